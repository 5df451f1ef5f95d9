"""What a simulation works on: a flat record array per kind of thing, so that the loop compiles, and runs as Python.

Tokens and seconds. A field that names another record holds its row, -1 for none.
"""

import functools
from typing import Any, NamedTuple, get_args, get_type_hints

import numpy as np

Records = Any  # np.recarray, whose fields are attributes

COLOCATED, CHUNKED, SPLIT = 0, 1, 2  # prefill first; prefill in chunks that ride with decode; pools apart
PREFILLED, PASS, TRANSFERRED, ARRIVAL, RELOADED, ENCODED = (
    0,
    1,
    2,
    3,
    4,
    5,
)  # kinds of event, in the order taken at one time
MISSED, HIT, OPENING, READ = 0, 1, 2, 3  # what a call found of its prefix; OPENING: none yet, READ: in a lower tier


class Speed(NamedTuple):
    """Coefficients of one engine's step (`breakeven.models.steps`), seconds, and what they depend on."""

    step: float  # launches
    attention_weight: float
    attention_token: float
    ffn_weight: float
    ffn_token: float
    expert: float
    expert_token: float
    permute_token: float
    log_expert_miss: float  # ln(1 - active / experts)
    activation_token: float
    collective: float
    collective_token: float
    collective_root: float
    sequence: float
    context: float
    selected_context: float
    prefill_context: float
    pair: float
    selected_pair: float
    query: float
    sparse_topk: float
    ranks: float  # data-parallel ranks
    depth: int  # pipeline stages
    ring: float = 0.0  # seconds of a cached token going round context-parallel ranks
    drafts: float = 0.0  # tokens of a step and sequence beside the certain one (`breakeven.models.speculation`)
    yielded: float = 1.0
    layers_share: float = 0.0
    weights_share: float = 0.0
    parts: float = 1.0  # of a step, computed while the collectives of another run (two-batch overlap)


NO_SPEED = Speed(*[0.0] * 20, 1.0, 1.0, 1)  # type: ignore[call-arg]


class SplitPlan(NamedTuple):
    """Attention and feed-forward engines of a bundle that stand apart (`breakeven.models.bundle`), for one phase."""

    apart: bool
    attention: Speed = NO_SPEED
    ffn: Speed = NO_SPEED
    micro_batches: float = 1.0
    workers: float = 1.0
    ffn_engines: float = 1.0
    pipeline: float = 1.0
    ffn_pipeline: float = 1.0
    straggle_tokens: float = 0.0
    handoff_s: float = 0.0
    dispatch_token: float = 0.0
    combine_token: float = 0.0
    worker_ports: float = 1.0
    ways: float = 1.0
    shared: float = 0.0  # seconds to read shared experts on an attention engine, and of their arithmetic per token
    shared_token: float = 0.0


class EncodePlan(NamedTuple):
    """The vision encoder (`breakeven.models.encoder`)."""

    engines: int  # of its own; 0 where it stands in the pool that prefills, or nothing is encoded
    speed: Speed = NO_SPEED
    patches: float = 0.0  # of an image; 0: nothing is encoded
    per_pass: float = 1.0
    reuse: float = 0.0
    link_latency_s: float = 0.0
    link_image_s: float = 0.0


class TierPlan(NamedTuple):
    """A tier of KV cache below HBM."""

    capacity: float  # tokens, of one engine or of them all
    shared: bool
    latency_s: float
    token_s: float  # of reading one token back into HBM
    paths: float  # reads an engine does at once
    prefetch_s: float = 0.0  # before a call comes that reading begins


NO_TIER = TierPlan(0.0, False, 0.0, 0.0, 1.0)


class Plan(NamedTuple):
    """A deployment and its load, as the loop needs them."""

    mode: int
    prefill_engines: int  # engines 0 .. prefill_engines - 1; in a shared pool they also decode
    decode_engines: int  # the engines after them; 0 in a shared pool
    prefill: Speed
    decode: Speed
    token_budget: float  # new tokens per step and data-parallel rank
    max_batch: int
    prefill_capacity: float  # tokens of KV cache of one engine
    decode_capacity: float
    shared_prefix: float  # tokens that every engine holds once
    request_s: float
    link_latency_s: float
    link_token_s: float
    routing: int  # code of deployment.ROUTING
    window_start_s: float  # calls that arrive in the window are measured
    window_end_s: float
    horizon_s: float  # the simulation ends here even if some of them have not left
    whole_sessions: bool  # go on until the sessions that started in the window have ended
    log_start_s: float  # passes that start from here on are logged, as many as fit
    first_chunk_steps: float = 0.0  # decode steps from a call's first token to its first chunk at the user
    first_chunk_s: float = 0.0  # at most 0: seconds less than that
    cache_ttl_s: float = np.inf  # idle sessions lose their cache after this
    preempts: bool = False  # admit by the prompt, and take the latest calls off when the cache is full; never if split
    prefill_split: SplitPlan = SplitPlan(False)
    decode_split: SplitPlan = SplitPlan(False)
    link_ways: float = 1.0  # KV caches that one prefill engine sends at once
    link_last: float = 1.0  # share of a KV cache that can only be sent after prefill; 1: all of it
    returns: bool = False  # a call's output goes back to where it was prefilled
    keeps: bool = False  # decode engines keep their sessions; the second half of the sessions are what they hold
    local_tokens: float = 0.0  # calls with at most so many new tokens are prefilled where their session is kept
    decode_budget: float = 0.0  # new tokens of a step of a decode engine that prefills
    encode: EncodePlan = EncodePlan(0)
    levels: int = 0  # tiers of KV cache below HBM
    tiers: tuple[TierPlan, TierPlan, TierPlan] = (NO_TIER, NO_TIER, NO_TIER)  # nearest first


def packed(plan: Plan) -> Any:
    """The plan as one record, for the compiled loop: a tuple's every number would be an argument of every function."""
    record = np.zeros(1, _layout(Plan))
    _fill(record, plan)
    return record[0]


@functools.cache
def _layout(kind: type) -> Any:
    """The record type of a tuple's fields; several of a kind are an array."""
    if kind in (bool, int, float):
        return np.dtype(np.float64 if kind is float else np.int64)  # all of one width: nothing to align
    fields = []
    for name, own in get_type_hints(kind).items():
        several = get_args(own)
        fields.append((name, _layout(several[0]), (len(several),)) if several else (name, _layout(own)))
    return np.dtype((np.record, fields))  # fields are attributes, in plain Python too


def _fill(record: Any, value: Any) -> None:
    for name, field in value._asdict().items():
        if not isinstance(field, tuple):
            record[name] = field
        elif hasattr(field, "_fields"):
            _fill(record[name], field)
        else:
            for k, one in enumerate(field):
                _fill(record[name][..., k], one)


_CALL = [
    ("session", "i8"),
    ("prompt", "f8"),
    ("shared", "f8"),  # of it, always cached
    ("output", "f8"),
    ("hit_tokens", "f8"),  # to prefill when the session's context is cached
    ("missed_tokens", "f8"),  # to prefill when it is not
    ("fresh_tokens", "f8"),  # that an engine lacks which has all of the call before
    ("local", "?"),  # its decode engine prefills it
    ("images_found", "f8"),  # to encode when it is cached
    ("images_held", "f8"),  # to encode when it is not
    ("gap_s", "f8"),  # from this call's end, and that of the sub-agents it forks, to the next call
    ("fork", "i4"),  # the first of them, sessions
    ("forks", "i4"),  # how many
    ("first", "?"),
    ("last", "?"),
    ("begun", "?"),
    ("preempted", "i4"),  # times
    ("tie", "f8"),  # in [0, 1): where the search for the least loaded engine starts
    ("next", "i8"),  # in the queue or list it stands in
    ("order", "i4"),  # of its admission to its engine
    ("found", "i4"),  # MISSED, HIT, OPENING or READ; -1 before prefill
    ("written", "f8"),  # tokens of its output that it was preempted with: to prefill with the prompt
    ("left", "f8"),  # to prefill
    ("position", "f8"),  # prompt tokens held so far
    ("prefill_engine", "i4"),
    ("decode_engine", "i4"),
    ("arrival_s", "f8"),
    ("prefill_start_s", "f8"),
    ("prefill_end_s", "f8"),
    ("transfer_s", "f8"),  # start of the KV transfer
    ("first_s", "f8"),  # first token
    ("end_s", "f8"),
]
_SESSION = [
    ("first_call", "i8"),
    ("parent", "i8"),  # call that forked it
    ("start_s", "f8"),  # inf: starts when another session ends
    ("home", "i8"),  # engine that its first call goes to
    ("where", "i8"),  # engine that holds or held its context
    ("measured", "?"),  # it started in the window
    ("cached", "?"),
    ("resumes", "?"),  # what is cached is of a call that was preempted, and goes from its end
    ("level", "i8"),  # where: 0 in HBM, k in the k-th tier below
    ("since_s", "f8"),  # idle since then
    ("tokens", "f8"),  # of its own, cached while it is idle
    ("behind", "f8"),  # tokens that its prefill engine lacks beside those of the last call
    ("older", "i8"),  # neighbours in its engine's order of last use
    ("newer", "i8"),
]
_ENGINE = [
    ("prefills", "?"),
    ("decodes", "?"),
    ("busy", "?"),
    ("version", "i8"),  # of its next event: one of another version is void
    ("load", "i8"),  # calls here, waiting or in service
    ("head", "i8"),  # queue
    ("tail", "i8"),
    ("prefilling", "i8"),
    ("batch", "i8"),  # calls that decode
    ("capacity", "f8"),
    ("admitted", "i8"),  # calls so far
    ("reserved", "f8"),  # tokens of KV cache of calls in service
    ("peak", "f8"),
    ("context", "f8"),  # tokens that its batch holds
    ("selected", "f8"),  # the same, at most top-k each
    ("growing", "i8"),  # calls of the batch below top-k
    ("steps", "i8"),  # decode steps done so far
    ("keys", "i8"),  # in its heap of step counts
    ("ahead", "i8"),  # decode steps of the pass in progress
    ("decoding", "i8"),  # calls it decodes
    ("widening", "i8"),  # of them below top-k
    ("start_s", "f8"),
    ("step_s", "f8"),  # its first step
    ("growth_s", "f8"),  # by which each further step is longer
    ("tokens", "f8"),  # it prefills
    ("done", "i8"),  # first of the calls whose prefill it completes
    ("encoding_s", "f8"),  # of the prefill pass being put together
    ("through_s", "f8"),  # when the last prefill has passed through its pipeline
    ("link_free_s", "f8"),
    ("prefill_busy_s", "f8"),  # in the window
    ("decode_busy_s", "f8"),
    ("link_busy_s", "f8"),
]
_CACHE = [
    ("idle", "f8"),  # tokens of idle sessions
    ("oldest", "i8"),
    ("newest", "i8"),
    ("free_s", "f8"),  # when its path has nothing to read any more
]
_EVENT = [("time_s", "f8"), ("kind", "i8"), ("index", "i8"), ("version", "i8")]
_KEY = [("step", "i8"), ("call", "i8")]  # ~call: from this step on it attends to top-k tokens
_LOG = [
    ("start_s", "f8"),
    ("end_s", "f8"),
    ("engine", "i8"),
    ("decoding", "i8"),
    ("steps", "i8"),
    ("tokens", "f8"),
]
_CLOCK = [
    ("now_s", "f8"),
    ("events", "i8"),  # in the heap
    ("taken", "i8"),  # events so far
    ("logged", "i8"),
    ("waiting_session", "i8"),  # next session that starts when another ends
    ("playing", "i8"),  # sessions that have calls
    ("outstanding", "i8"),  # calls of the window that have not left
    ("arrived", "i8"),  # in the window
    ("left", "i8"),  # in the window
]


def records(fields: list[tuple[str, str]], shape: int | tuple[int, ...]) -> Records:
    """Zeroed records of these fields."""
    return np.zeros(shape, np.dtype(fields, align=True)).view(np.recarray)


class State(NamedTuple):
    """Everything that changes."""

    calls: Records
    sessions: Records
    engines: Records
    caches: Records  # (1 + tiers, engines): idle sessions by last use; a shared tier has one, at engine 0
    keys: Records  # (engines, 2 max_batch + 2)
    events: Records
    log: Records
    clock: Records  # (1,)
    encoders: Records  # when each encoder of its own has nothing to do any more, seconds


def new_calls(n: int) -> Records:
    """`n` calls that have not arrived."""
    calls = records(_CALL, n)
    for name in ("next", "fork", "found", "prefill_engine", "decode_engine"):
        calls[name] = -1
    for name in ("arrival_s", "prefill_start_s", "prefill_end_s", "transfer_s", "first_s", "end_s"):
        calls[name] = np.nan
    return calls


def new_sessions(n: int) -> Records:
    """`n` sessions whose context no engine holds."""
    sessions = records(_SESSION, n)
    for name in ("parent", "where", "older", "newer"):
        sessions[name] = -1
    return sessions


def new_state(plan: Plan, calls: Records, sessions: Records, log_rows: int = 0) -> State:
    """An idle deployment before the first call."""
    total = plan.prefill_engines + plan.decode_engines
    engines = records(_ENGINE, total)
    for name in ("head", "tail", "done"):
        engines[name] = -1
    engines["prefills"] = np.arange(total) < plan.prefill_engines
    engines["decodes"] = np.arange(total) >= (plan.prefill_engines if plan.mode == SPLIT else 0)
    engines["capacity"] = np.where(engines["prefills"], plan.prefill_capacity, plan.decode_capacity)
    engines["peak"] = plan.shared_prefix
    caches = records(_CACHE, (1 + plan.levels, total))
    for name in ("oldest", "newest"):
        caches[name] = -1
    return State(
        calls=calls,
        sessions=sessions,
        engines=engines,
        caches=caches,
        keys=records(_KEY, (total, 2 * plan.max_batch + 2)),
        events=records(_EVENT, 2 * len(sessions) + 4 * total + 64),  # one a session and engine, and some void ones
        log=records(_LOG, log_rows),
        clock=records(_CLOCK, 1),
        encoders=np.zeros(max(plan.encode.engines, 1)),
    )
