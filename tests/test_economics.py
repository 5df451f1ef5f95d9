"""What fleets cost: additive, by whole instances where asked, and held against budget, power and inventory."""

import dataclasses

import jax
import numpy as np
import pytest

from breakeven.models.economics import fleet
from breakeven.models.ownership import HOURS_PER_MONTH
from breakeven.models.serving import evaluate
from breakeven.models.tables import resolve

OWN = "prices.own={h100-sxm: 3.0, l40s: 1.0}"


def of(resolved, economy, use=1.0):
    """The fleet of resolved candidates whose pools are all busy for a share `use` of the time."""
    return fleet(resolved, economy, [use * np.ones_like(resolved.balanced)] * 5)


def bill(made, ids=(0,), use=1.0):
    return of(resolve(made.space.deployment(np.array(ids)), made.catalog), made.catalog.economy, use)


@pytest.fixture
def pair(make_study):
    """A study with one candidate: 3 x TP2 prefill on H100 and 2 x TP4 decode on L40S."""

    def make(*changes):
        return make_study(
            OWN,
            "space.prefill={accelerators: h100-sxm, tensor_parallel: 2, replicas: 3}",
            "space.decode={accelerators: l40s, tensor_parallel: 4, replicas: 2}",
            *changes,
            topologies="pd",
            accelerators=["h100-sxm", "l40s"],
            pipeline_parallel=1,
        )

    return make


def test_cost_adds_up_over_pools(pair):
    """6 H100 at $3 and 8 L40S at $1 are $26 an hour."""
    found = bill(pair())
    assert float(found.accelerators[0]) == 14.0 and float(found.cost_per_hour_usd[0]) == pytest.approx(26.0)
    assert [float(count[0]) for count in found.by_stage] == [6.0, 0.0, 0.0, 8.0, 0.0]


def test_whole_instances_are_paid_whole(pair):
    """6 of 8 H100 are paid as 8; 8 L40S are one instance: 8 x $3 + 8 x $1."""
    found = bill(pair("prices.whole_instances=true"))
    assert float(found.accelerators[0]) == 16.0 and float(found.cost_per_hour_usd[0]) == pytest.approx(32.0)


def test_pools_of_one_kind_share_instances(pair):
    """3 x TP2 and 2 x TP1 on H100 are 8 accelerators together: one instance, not two."""
    same = "space.decode={accelerators: h100-sxm, tensor_parallel: 1, replicas: 2}"
    found = bill(pair("prices.whole_instances=true", same))
    assert float(found.accelerators[0]) == 8.0 and float(found.cost_per_hour_usd[0]) == pytest.approx(24.0)


def test_each_pool_beyond_the_first_costs_its_running(pair):
    found = bill(pair(f"prices.pool_usd_per_month={HOURS_PER_MONTH}"))
    assert float(found.cost_per_hour_usd[0]) == pytest.approx(27.0)


def test_a_second_kind_of_accelerator_costs_its_running(pair):
    second = f"prices.second_kind_usd_per_month={2 * HOURS_PER_MONTH}"
    found = bill(pair(second, f"prices.pool_usd_per_month={HOURS_PER_MONTH}"))
    assert float(found.cost_per_hour_usd[0]) == pytest.approx(29.0)
    assert float(found.complexity_usd_per_hour[0]) == pytest.approx(3.0)
    same = "space.decode={accelerators: h100-sxm, tensor_parallel: 4, replicas: 2}"
    assert float(bill(pair(second, same)).complexity_usd_per_hour[0]) == 0.0


def test_cost_is_proportional_to_replicas(study, deployment):
    """Twice the replicas cost and draw twice as much."""

    def doubled(d):
        stages = {
            name: dataclasses.replace(stage, replicas=2.0 * stage.replicas)
            for name, stage in vars(d).items()
            if hasattr(stage, "replicas")
        }
        return dataclasses.replace(d, **stages)

    once, twice = (of(resolve(d, study.catalog), study.catalog.economy) for d in (deployment, doubled(deployment)))
    for name in ("accelerators", "cost_per_hour_usd", "power_w", "drawn_w"):
        a, b = np.asarray(getattr(once, name)), np.asarray(getattr(twice, name))
        assert b == pytest.approx(2.0 * a, rel=1e-5)


def test_paying_whole_instances_never_costs_less(study, deployment):
    whole = dataclasses.replace(study.catalog.economy, whole_instances=np.float32(1.0))
    resolved = resolve(deployment, study.catalog)
    exact, rounded = of(resolved, study.catalog.economy), of(resolved, whole)
    assert (np.asarray(rounded.cost_per_hour_usd) >= np.asarray(exact.cost_per_hour_usd) * (1 - 1e-6)).all()


def test_inventory_is_exceeded_by_the_worst_kind(pair):
    """6 of 6 H100 are fine; 8 of 5 L40S exceed it by 60 %."""
    assert float(bill(pair("limits.inventory={h100-sxm: 6, l40s: 8}")).inventory_excess[0]) == pytest.approx(0.0)
    found = bill(pair("limits.inventory={h100-sxm: 6, l40s: 5}"))
    assert float(found.inventory_excess[0]) == pytest.approx(0.6)


def test_a_kind_one_does_not_own_is_out_of_reach(pair):
    assert float(bill(pair("limits.inventory={h100-sxm: 100}")).inventory_excess[0]) > 0.0


def test_limits_make_exactly_the_fleets_beyond_them_infeasible(study, deployment):
    """Budget and power: excess is cost over the limit less one, and what exceeds it is infeasible."""
    free = evaluate(deployment, study.workload, study.slo, study.catalog)
    cost, power = np.asarray(free.cost_per_hour_usd), np.asarray(free.power_kw)
    budget, kilowatts = np.float32(np.median(cost) + 0.01), np.float32(np.median(power) + 0.01)
    economy = dataclasses.replace(
        study.catalog.economy, budget_usd_per_hour=budget, max_power_w=np.float32(kilowatts * 1e3)
    )
    economy = jax.tree.map(jax.numpy.float32, economy)
    limited = dataclasses.replace(study.catalog, economy=economy)
    found = evaluate(deployment, study.workload, study.slo, limited)
    assert np.asarray(found.violations.budget) == pytest.approx(cost / budget - 1.0, abs=1e-5)
    assert np.asarray(found.violations.power) == pytest.approx(power / kilowatts - 1.0, abs=1e-5)
    within = np.asarray(free.feasible) & (cost <= budget) & (power <= kilowatts)
    assert np.array_equal(np.asarray(found.feasible), within) and within.any() and not within.all()
