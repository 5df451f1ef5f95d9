"""A study: the file's words resolved into a space, a workload, an SLO and a catalogue, ready to be searched."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from breakeven.models.architecture import Architecture
from breakeven.models.attainment import Bound, Slo
from breakeven.models.business_case import ApiPrice, api_price
from breakeven.models.catalog import table
from breakeven.models.forks import sample_forks
from breakeven.models.hardware import Accelerator, Link, accelerator, link
from breakeven.models.inputs import InputError, known_fields, number, pick
from breakeven.models.kept import heavy_hitters, sinks_and_window
from breakeven.models.llm import LLM, llm
from breakeven.models.media import seen_by
from breakeven.models.ownership import HOURS_PER_MONTH, Bill, Ownership, ownership
from breakeven.models.placement_choices import placement_rows, placements
from breakeven.models.prices import Prices, read_skypilot
from breakeven.models.sessions import SessionSpec, sample_sessions, scaled_spec, session_spec
from breakeven.models.speculation import speculation
from breakeven.models.stress import Losses
from breakeven.models.tables import Catalog, Economy, Engine, catalog, engine
from breakeven.models.tiers import stack
from breakeven.models.topology import ANY, TOPOLOGIES, Topology, any_topology, topology
from breakeven.models.transfer_ways import transfer_way
from breakeven.models.workload import Workload, recorded_workload, with_peaks, workload
from breakeven.optimizer.evaluator import Evaluator
from breakeven.optimizer.simulator import Simulator
from breakeven.optimizer.uncertainty import UNCERTAIN, Draw, Factor, RobustEvaluator, draws
from breakeven.spaces.space import (
    ROUTING,
    Domains,
    Names,
    PoolDomain,
    Space,
    build_space,
    first_broken_rule,
)
from breakeven.studies.local_file import Corrected, applicable, as_arrays, read_local
from breakeven.studies.narrowed import narrowed
from breakeven.studies.recorded import Recorded, recorded, workload_fields
from breakeven.studies.schema import (
    BoundFields,
    KeptFields,
    PeakFields,
    PoolChoices,
    Range,
    StudyFile,
    parse_study,
    read_yaml,
    set_path,
)

UNLIMITED = 1e12
_sampled = functools.lru_cache(maxsize=4)(sample_sessions)  # studies of one workload draw the same sessions
_COUNTS = (
    "tensor_parallel",
    "data_parallel",
    "pipeline_parallel",
    "context_parallel",
    "replicas",
    "max_batch",
    "token_budget",
)


def _listed(value: Any) -> list[Any]:
    if isinstance(value, Range):
        return value.values()
    return list(value) if isinstance(value, list) else [value]


ROLES = ("shared", "encode", "prefill", "decode", "attention", "ffn")
PEAKING = {"prefill": ("first_prompt_tokens", "growth_tokens"), "decode": ("output_tokens",)}  # what a peak multiplies
ENCODERS = ("bf16", "fp8", "int8", "fp4")  # formats of a vision encoder's weights and products
ENCODED_TOGETHER = 8  # images in one pass of an encoder of its own, where a study does not say


def roles(stages: Sequence[str]) -> list[str]:
    """Whose choices a pool of these stages takes, most particular first."""
    if tuple(stages) == ("encode",):
        return ["encode"]
    sides = {stage.rpartition("_")[2] for stage in stages if stage != "encode"}
    phases = {stage.partition("_")[0] for stage in stages if stage != "encode"}
    side = [side for side in ("attention", "ffn") if sides == {side}]
    return side + ([phases.pop()] if len(phases) == 1 else [] if side else ["shared"])


def _topology(field: str, name: str) -> Topology:
    try:
        return topology(name)
    except KeyError:
        pick(field, name, [*TOPOLOGIES, ANY, "or its pools, as E PA PF | DA | DF"])
        raise


def _unique(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))


@dataclass(frozen=True)
class Study:
    """A study file and what its words stand for."""

    written: StudyFile
    data: dict[str, Any]  # the file as a mapping, with every --set applied
    file: str

    @classmethod
    def load(cls, path: str | Path, changes: Sequence[str] = ()) -> "Study":
        """Read a study file, apply `PATH=VALUE` changes, check every field. Raises InputError."""
        return cls.parse(read_yaml(path), str(path), changes)

    @classmethod
    def parse(cls, data: dict[str, Any], file: str, changes: Sequence[str] = ()) -> "Study":
        """The study in a mapping; `file` is named in errors, and paths in the study are relative to it."""
        for change in changes:
            set_path(data, change)
        study = cls(parse_study(data, file), data, file)
        try:
            study.check()
        except InputError as error:
            raise error.inside(file=file) from None
        return study

    def check(self) -> None:
        """Resolve everything that a name can get wrong."""
        _ = self.catalog, self.workload, self.space, self.api_price
        if self.written.mixed is not None and len(self.accelerators) < 2:
            kinds = ", ".join(self.names.accelerator_ids)
            raise InputError("space.accelerators", kinds, "at least two with `mixed`")

    @cached_property
    def architecture(self) -> Architecture:
        return llm(self.written.llm, "llm", Path(self.file).parent)

    @cached_property
    def session_spec(self) -> SessionSpec:
        """The distributions of the workload; of a study that names a trace, there are none."""
        given, name = workload_fields(self.written.workload, Path(self.file).parent)
        spec = session_spec(given, "workload")
        seen = None if spec.media is None else seen_by(spec.media, self.architecture.encoder)
        return dataclasses.replace(spec, name=name or spec.name, media=seen)

    @cached_property
    def recorded(self) -> Recorded | None:
        """The trace that is the workload, if one is."""
        return recorded(self.written.workload, Path(self.file).parent)

    @property
    def workload_name(self) -> str:
        return self.recorded.name if self.recorded else self.session_spec.name

    @cached_property
    def accelerators(self) -> tuple[Accelerator, ...]:
        """Every accelerator the space may use, in the order first named."""
        space = self.written.space
        found: dict[str, Accelerator] = {}
        for prefix, choices in (("space", space), *self._overrides()):
            for i, spec in enumerate(_listed(choices.accelerators or [])):
                row = self._row(accelerator, spec, f"{prefix}.accelerators.{i}", self.written.catalog.accelerators)
                if row.id in found and found[row.id] != row:
                    raise InputError(f"{prefix}.accelerators.{i}.name", row.id, "a name of its own: it is taken")
                found[row.id] = row
        if not found:
            raise InputError("space.accelerators", None, "at least one accelerator")
        for key in self.written.catalog.accelerators:
            pick(f"accelerators.{key}", key, found)
        return tuple(found.values())

    @staticmethod
    def _row(read: Any, spec: Any, field: str, changes: dict[str, dict[str, Any]]) -> Any:
        """A catalogue row as this study sees it; a fault in a change names the change."""
        row = read(spec, field)
        if row.id not in changes:
            return row
        try:
            return read(spec, field, changes[row.id])
        except InputError as error:
            kind = "links" if isinstance(row, Link) else "accelerators"
            own = f"{kind}.{row.id}{error.field.removeprefix(field)}"
            raise InputError(own, error.value, error.allowed, error.file) from None

    def _overrides(self) -> list[tuple[str, PoolChoices]]:
        space = self.written.space
        roles = [(f"space.{role}", getattr(space, role)) for role in ROLES]
        return roles + [(f"space.pools.{name}", choices) for name, choices in space.pools.items()]

    @cached_property
    def names(self) -> Names:
        space = self.written.space
        pools = [space, *[choices for _, choices in self._overrides()]]
        data = table("precisions")
        weights = _unique([w for pool in pools for w in _listed(pool.weights or [])]) or ("bf16",)
        kv = _unique(_listed(space.kv))
        for field, chosen in (("weights", weights), ("kv", kv)):
            for name in chosen:
                pick(f"space.{field}", name, data[field])
        changes = self.written.catalog.links
        links = [self._row(link, spec, f"space.links.{i}", changes) for i, spec in enumerate(_listed(space.links))]
        for key in changes:
            pick(f"links.{key}", key, [row.id for row in links])
        tiers = [stack(spec, f"space.kv_tiers.{i}") for i, spec in enumerate(_listed(space.kv_tiers))]
        named = _listed(space.speculation)
        ways = [speculation(spec, self.architecture, f"space.speculation.{i}") for i, spec in enumerate(named)]
        moves = [transfer_way(spec, f"space.kv_transfer.{i}") for i, spec in enumerate(_listed(space.kv_transfer))]
        encoders = _unique(_listed(space.encoder_weights))
        for i, name in enumerate(encoders):
            pick(f"space.encoder_weights.{i}", name, ENCODERS)
        joint = tuple(tiers), tuple(ways), tuple(moves), encoders
        placed = placements(space.placement, self.architecture, "space.placement")
        return Names(self.accelerators, tuple(links), weights, kv, *joint, placed)

    def _pool_domain(self, topology: Topology, pool: int) -> PoolDomain:
        """The choices of a pool: its own by name, then those of its side and its phase, then the space's."""
        space, name = self.written.space, topology.pools[pool]
        own = [space.pools[name]] if name in space.pools else []
        chain: list[PoolChoices] = [*own, *[getattr(space, role) for role in roles(topology.stages(pool))], space]

        def first(field: str) -> Any:
            return next((getattr(c, field) for c in chain if getattr(c, field) is not None), None)

        fields = (*_COUNTS, "expert_parallel", "weights")
        values = {name: _unique(_listed(first(name))) for name in fields if first(name) is not None}
        if topology.stages(pool) == ("encode",) and all(c.max_batch is None for c in chain[:-1]):
            values["max_batch"] = (ENCODED_TOGETHER,)
        specs = first("accelerators")
        if specs is None:
            specs = [a.id for a in self.accelerators]
        ids = _unique([accelerator(spec).id for spec in _listed(specs)])
        return PoolDomain(accelerator=ids, **values)

    @cached_property
    def space(self) -> Space:
        choices = self.written.space
        named = _listed(choices.topologies)
        topologies = [_topology(f"space.topologies.{i}", name) for i, name in enumerate(named) if name != ANY]
        if ANY in named:
            topologies += any_topology(self.workload.images is not None)
        pools = {name for chosen in topologies for name in chosen.pools}
        for name in choices.pools:
            pick(f"space.pools.{name}", name, sorted(pools))
        for i, name in enumerate(_listed(choices.routing)):
            pick(f"space.routing.{i}", name, ROUTING)
        domains = Domains(
            topologies=_unique([chosen.name for chosen in topologies]),
            pool=self._pool_domain,
            kv=_unique(_listed(choices.kv)),
            links=_unique([row.id for row in self.names.links]),
            kv_tiers=_unique([row.id for row in self.names.tiers]),
            routing=_unique(_listed(choices.routing)),
            micro_batches=_unique(_listed(choices.micro_batches)),
            speculation=_unique([way.id for way in self.names.speculations]),
            kv_transfer=_unique([way.id for way in self.names.transfers]),
            encoder=self.names.encoders,
        )
        space = build_space(domains, self.names, self.architecture)
        if space.size == 0:
            rule = first_broken_rule(self._pool_domain(topologies[0], 0), self.names, self.architecture)
            raise InputError("space", "empty", f"no configuration is valid; most break: {rule}")
        limits, folder = self.written.limits, Path(self.file).parent
        if limits.deployable == "today" and self.written.kv_kept != 1.0:
            raise InputError(
                "kv_kept", self.written.kv_kept, "1.0 with `limits.deployable: today`: no engine documents it"
            )
        return narrowed(space, limits, self.architecture.name, self.engine_name, folder)

    @cached_property
    def catalog(self) -> Catalog:
        limits = self.written.limits
        owned = limits.inventory
        for key in owned or {}:
            pick(f"limits.inventory.{key}", key, self.names.accelerator_ids)
        available = [UNLIMITED if owned is None else max(owned.get(a.id, 0), 1e-3) for a in self.accelerators]
        return catalog(
            self.accelerators,
            self.prices_usd_per_hour,
            available,
            self.names.links,
            self.names.weights,
            self.names.kv,
            self._llm(),
            self._engine(),
            self._economy(),
            [0.0 if bill is None else bill.electricity for bill in self.bills],
            self.names.tiers,
            as_arrays(self.local, self.names) if self.local else None,
            self.names.speculations,
            self.names.transfers,
            self.names.encoders,
            placement_rows(self.names.placements, self.architecture),
        )

    @property
    def engine_name(self) -> str:
        """The engine of the catalogue that the study's is, or is like."""
        spec = self.written.engine
        return spec if isinstance(spec, str) else str(spec.get("like", "vllm"))

    @cached_property
    def local(self) -> tuple[Corrected, ...]:
        """The corrections measured locally that apply to the study; none if it names no file of them."""
        if self.written.local is None:
            return ()
        path = Path(self.file).parent / self.written.local
        try:
            return applicable(read_local(path), self.architecture.name, self.engine_name, self.names)
        except InputError as error:
            raise error.inside(file=str(path)) from None

    def _llm(self) -> LLM:
        found, kept = LLM.from_architecture(self.architecture), self.written.kv_kept
        if isinstance(kept, KeptFields):
            return sinks_and_window(found, self.architecture, kept.sinks + kept.window)
        return found if kept == 1.0 else heavy_hitters(found, self.architecture, kept)

    def _engine(self) -> Engine:
        spec = self.written.engine
        if isinstance(spec, str):
            return engine(spec)
        known_fields(spec, ("like", *Engine.__dataclass_fields__), "engine")
        own = {k: number(f"engine.{k}", v, 0.0, 1e12) for k, v in spec.items() if k != "like"}
        if own.get("overlapped_batches", 2.0) < 2.0 or ("overlapped_batches" in own and self.space.apart):
            raise InputError("engine.overlapped_batches", own["overlapped_batches"],
                             "at least 2, where no topology has attention and feed-forward layers apart")  # fmt: skip
        return engine(self.engine_name, own)

    @cached_property
    def prices_usd_per_hour(self) -> tuple[float, ...]:
        """Price of each accelerator, in the order of `accelerators`; of an owned one what it costs beside its
        electricity. Spot prices include the accelerators that stand in for those taken away."""
        prices = self.written.prices
        for key in prices.own:
            pick(f"prices.own.{key}", key, self.names.accelerator_ids)
        rows = None
        if prices.skypilot is not None:
            rows = read_skypilot(Path(self.file).parent / prices.skypilot).rows
        chosen = Prices(prices.term, prices.provider, prices.own, rows)
        away = prices.spot.interruptions_per_month * prices.spot.recovery_s / (HOURS_PER_MONTH * 3600.0)
        if away >= 1.0:
            raise InputError("prices.spot", away, "interruptions_per_month × recovery_s below a month")
        changed = self.written.catalog.accelerators
        spare = 1.0 / (1.0 - away) if prices.term == "spot" else 1.0

        def price(accelerator: Accelerator, bill: Bill | None) -> float:
            if bill is not None:
                return bill.fixed
            if accelerator.id in prices.own:
                return chosen.usd_per_hour(accelerator) * changed.get(accelerator.id, {}).get("price", 1.0)
            return chosen.usd_per_hour(accelerator) * spare

        return tuple(price(a, bill) for a, bill in zip(self.accelerators, self.bills, strict=True))

    @cached_property
    def ownership(self) -> Ownership | None:
        """Who owns the accelerators, if they are not rented."""
        spec = self.written.economics.ownership
        return None if spec is None else ownership(spec, "economics.ownership")

    @cached_property
    def bills(self) -> tuple[Bill | None, ...]:
        """What owning each accelerator costs; None where it is rented or has a price of the study's own."""
        owner, own = self.ownership, self.written.prices.own
        return tuple(None if owner is None or a.id in own else owner.bill(a) for a in self.accelerators)

    @cached_property
    def api_price(self) -> ApiPrice | None:
        """The API that self-hosting is compared with, if the study names one."""
        spec = self.written.economics.api
        return None if spec is None else api_price(spec, "economics.api")

    def _economy(self) -> Economy:
        written = self.written
        limits, prices, power = written.limits, written.prices, written.power
        values = {
            "whole_instances": float(prices.whole_instances),
            "pool_usd_per_hour": prices.pool_usd_per_month / HOURS_PER_MONTH,
            "second_kind_usd_per_hour": prices.second_kind_usd_per_month / HOURS_PER_MONTH,
            "idle_power_share": power.idle_share,
            "power_overhead": power.pue,
            "budget_usd_per_hour": limits.budget_usd_per_hour or UNLIMITED,
            "max_power_w": (limits.max_power_kw or UNLIMITED) * 1e3,
            "success_rate": written.economics.success_rate,
        }
        return Economy(**{name: jnp.float32(value) for name, value in values.items()})

    @property
    def max_load(self) -> bool:
        """Whether the study asks for the largest load instead of stating one."""
        return self.written.load == "max"

    @cached_property
    def workload(self) -> Workload:
        arrivals, load = self.written.arrivals, self.written.load
        cv = 1.0 if isinstance(arrivals, str) else arrivals.cv
        context = float(self.architecture.max_context)
        if self.recorded:
            if not isinstance(load, str) and load.peaks is not None:
                raise InputError("load.peaks", "given", "nothing with a recorded workload, which has its own")
            base = recorded_workload(self.recorded.sessions(context), cv)
        else:
            base = with_peaks(workload(self.session_spec, context, cv), self._peaks(context, cv))
        if isinstance(load, str):
            return dataclasses.replace(base, sessions_per_second=np.float32(1.0))
        if load.concurrent_sessions is not None:
            return dataclasses.replace(base, concurrent_sessions=np.float32(load.concurrent_sessions))
        rate = load.sessions_per_second
        if rate is None:
            assert load.calls_per_second is not None
            rate = load.calls_per_second / float(base.calls_per_session)
        return dataclasses.replace(base, sessions_per_second=np.float32(rate))

    def _peaks(self, context: float, cv: float) -> list[Workload]:
        """The workload in hours of more prefill, and of more decode, than usual."""
        load = self.written.load
        asked = PeakFields() if isinstance(load, str) or load.peaks is None else load.peaks
        factors = [dict.fromkeys(PEAKING[phase], float(getattr(asked, phase))) for phase in PEAKING]
        return [
            workload(scaled_spec(self.session_spec, by, "load.peaks"), context, cv)
            for by in factors
            if max(by.values()) > 1.0
        ]

    @cached_property
    def slo(self) -> Slo:
        fields = self.written.slo

        def bound(value: float | BoundFields | None) -> Bound | None:
            if value is None:
                return None
            given = value if isinstance(value, BoundFields) else BoundFields(bound=value)
            return Bound(jnp.float32(given.bound), jnp.float32(given.fraction))

        return Slo(
            target=jnp.float32(fields.target),
            per_session=jnp.float32(fields.per == "session"),
            ttft=bound(fields.ttft_s),
            tpot=bound(fields.tpot_s),
            call=bound(fields.call_s),
            session=bound(fields.session_s),
            losses=self._losses(),
        )

    def _losses(self) -> Losses | None:
        lost = self.written.limits.lost_replicas
        pools = max(len(family.topology.pools) for family in self.space.families)
        return Losses(jnp.arange(pools), jnp.float32(lost)) if lost else None

    def evaluator(self) -> Evaluator:
        """What evaluates the study's candidates, at the usual values of all inputs."""
        return Evaluator(
            self.space,
            self.workload,
            self.slo,
            self.catalog,
            session_p95="session_p95_s" in self.written.objectives,
            max_load=self.max_load,
            engine=self.engine_name,
        )

    def searched(self) -> Evaluator:
        """What a search ranks by: the usual values, or a quantile over draws of what is uncertain."""
        usual, uncertain = self.evaluator(), self.written.uncertain
        if uncertain is None or uncertain.objective == "nominal":
            return usual
        draws = self.draws(uncertain.search_draws)
        return RobustEvaluator(**usual.__dict__, draws=draws, quantile=uncertain.quantile)

    def draws(self, count: int) -> tuple[Draw, ...]:
        """So many draws of what is uncertain."""
        uncertain = self.written.uncertain
        given = {name: getattr(uncertain, name) for name in UNCERTAIN}
        factors = {
            name: Factor(spread.cv) if spread.cv is not None else Factor(None, spread.low, spread.high)
            for name, spread in given.items()
            if spread is not None
        }
        return draws(self.workload, self.catalog, factors, count, self.written.search.seed)

    def simulator(self, evaluator: Evaluator | None = None) -> Simulator:
        """What simulates the study's candidates."""
        context = float(self.architecture.max_context)
        if self.recorded:
            replayed = self.recorded.sessions(context)
            return Simulator(evaluator or self.evaluator(), lambda _: replayed)
        spec = self.session_spec
        return Simulator(
            evaluator or self.evaluator(),
            lambda sessions: _sampled(spec, sessions, 1, context),
            lambda sample: sample_forks(spec, sample, 1, context),
        )
