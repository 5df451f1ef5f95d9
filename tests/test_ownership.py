"""Total cost of ownership and the case for a split, against sums done by hand and published figures."""

import jax.numpy as jnp
import numpy as np
import pytest

from breakeven.models.business_case import Horizon, api_case, api_price, split_case
from breakeven.models.economics import fleet
from breakeven.models.hardware import accelerator
from breakeven.models.inputs import InputError
from breakeven.models.ownership import annuity, ownership
from breakeven.models.prices import price_rows
from breakeven.models.tables import resolve
from breakeven.optimizer.front import OBJECTIVES
from breakeven.studies.economics import against_api, economics, sentences, split_against_joint
from breakeven.studies.result import records, table

# The spreadsheet, line by line, USD:
#   server 40,000 + network 5,000                            45,000.00
#   + 10 % overhead                                          49,500.00
#   + 5 % spares                                             51,975.00
#   sold after four years for 20 %                           10,395.00, today 10,395.00 / 1.1^4 = 7,099.92
#   to pay off                                               44,875.08
#   per year at 10 % over four years, x 0.1 / (1 - 1.1^-4)   x 0.3154708 = 14,156.78
#   purchase per hour, / 8,760                                1.61607
#   facility: 1 kW of IT power x 150 a month / 730            0.20548
#   staff: 240,000 a year / 500 accelerators / 8,760          0.05479
#   electricity at full use: 1 kW x 1.2 x 0.10                0.12000
#   at 60 % use, 30 % of it drawn when idle: x 0.72           0.08640
#   sum at 60 % use                                           1.96275
SHEET = {
    "server_usd": {"sheet": 40000.0},
    "network_usd": 5000,
    "overhead_share": 0.10,
    "spares_share": 0.05,
    "residual_share": 0.20,
    "cost_of_capital": 0.10,
    "life_years": 4,
    "facility_usd_per_kw_month": 150,
    "electricity_usd_per_kwh": 0.10,
    "pue": 1.2,
    "staff_usd_per_year": 240000,
    "accelerators_per_staff": 500,
}
SHEET_KW = {"like": "h100-sxm", "all_in_kw": 1.3, "name": "sheet"}  # 1 kW of IT power


def test_owning_cost_by_hand():
    bill = ownership(SHEET).bill(accelerator(SHEET_KW))
    assert bill == pytest.approx((1.61607, 0.20548, 0.05479, 0.12), abs=1e-5)
    assert bill.at(0.6, 0.3) == pytest.approx(1.96275, abs=1e-5)


@pytest.mark.parametrize("rate", [0.0, 0.07, 0.3])
def test_an_annuity_pays_the_purchase_off(rate):
    """Year by year: interest on what is owed, less the payment, leaves exactly the resale value."""
    owed = 1000.0
    for _ in range(5):
        owed = owed * (1.0 + rate) - annuity(1000.0, 0.2, rate, 5.0)
    assert owed == pytest.approx(200.0)


def test_a_fleet_owned_costs_what_the_sheet_says(make_study):
    """2 prefill and 4 decode accelerators, prefill 60 % busy, decode not at all: the sheet's sum, through the model."""
    made = make_study(
        "prices.pool_usd_per_month=730",
        topologies="pd",
        accelerators=[SHEET_KW],
        pipeline_parallel=1,
        prefill={"tensor_parallel": 2, "replicas": 1},
        decode={"tensor_parallel": 4, "replicas": 1},
    )
    made.data["economics"] = {"ownership": SHEET}
    made = type(made).parse(made.data, "test", ())
    resolved = resolve(made.space.deployment(np.array([0])), made.catalog)
    busy, idle = 0.6 * np.ones(1), np.zeros(1)
    found = fleet(resolved, made.catalog.economy, [jnp.asarray(x) for x in (busy, busy, busy, idle, idle)])
    expected = 2 * 1.96275 + 4 * (1.61607 + 0.20548 + 0.05479 + 0.3 * 0.12) + 1.0
    assert float(found.cost_per_hour_usd[0]) == pytest.approx(expected, rel=1e-5)
    assert float(found.complexity_usd_per_hour[0]) == pytest.approx(1.0)


def test_published_owning_costs():
    """SemiAnalysis (InferenceX constants, 2026-04-03) from our components: an H100 of a hyperscaler within 15 %, and
    all accelerators whose purchase price is known, with purchase prices that are called rough, within a quarter."""
    for row in price_rows():
        rows = ("h100-sxm", "h200-sxm", "b200-sxm", "gb200-nvl72", "mi300x")
        if row.term == "owning" and row.accelerator in rows:
            bill = ownership(row.provider.removeprefix("semianalysis-")).bill(accelerator(row.accelerator))
            within = 0.15 if (row.accelerator, row.provider) == ("h100-sxm", "semianalysis-hyperscaler") else 0.25
            assert bill.at(0.7, 0.3) == pytest.approx(row.usd_per_hour, rel=within), row


def test_owning_an_unpriced_accelerator_is_refused():
    with pytest.raises(InputError, match=r"server_usd\.l4 = None: no purchase price"):
        ownership("neocloud").bill(accelerator("l4"))
    with pytest.raises(InputError, match="hyperscaler"):
        ownership("hyperscalar")
    with pytest.raises(InputError, match=r"ownership\.pue = 0\.5"):
        ownership({"like": "neocloud", "pue": 0.5})


def test_a_dearer_variation_is_bought_dearer():
    """`price` is a factor on whatever price applies, the purchase among them."""
    owner = ownership("neocloud")
    twice = accelerator({"like": "h100-sxm", "price": 2.0, "name": "twice"})
    assert owner.server_of(twice) == 2.0 * owner.server_of(accelerator("h100-sxm"))


# Shared pool 100 USD/h on 32 accelerators; split 80 USD/h, 5 of them to run it; 50,000 USD to set it up; 24 months at
# 12 % a year. A month's rate is 1.12^(1/12) - 1 = 0.00948879, 24 payments are worth 21.37322 of one.
#   net saving 20 x 730 = 14,600 a month; gross 18,250; running it 3,650; set-up 50,000 / 21.37322 = 2,339.38 a month


def test_split_case_by_hand():
    case = split_case(100.0, 80.0, 5.0, 32.0, 50_000.0, Horizon(24, 0.12))
    assert case.saving_usd_per_month == pytest.approx(14_600)
    assert case.payback_months == pytest.approx(3.42466, abs=1e-5)
    assert case.npv_usd == pytest.approx(sum(14_600 / 1.12 ** (m / 12) for m in range(1, 25)) - 50_000)
    assert case.npv_usd == pytest.approx(262_049, abs=1.0)
    assert case.roi == pytest.approx(14_600 * 24 / 50_000 - 1)
    assert case.break_even_complexity_usd_per_month == pytest.approx(15_910.6, abs=0.1)
    assert case.break_even_fleet == pytest.approx(32 * (3_650 + 2_339.38) / 18_250, abs=1e-3)


def test_at_its_break_even_points_a_split_is_worth_nothing():
    horizon = Horizon(36, 0.10)
    case = split_case(100.0, 85.0, 2.0, 32.0, 20_000.0, horizon)
    limit = case.break_even_complexity_usd_per_month / 730.0
    assert split_case(100.0, 83.0 + limit, limit, 32.0, 20_000.0, horizon).npv_usd == pytest.approx(0.0, abs=1e-6)
    scale = case.break_even_fleet / 32.0
    scaled = split_case(100.0 * scale, 83.0 * scale + 2.0, 2.0, 32.0 * scale, 20_000.0, horizon)
    assert scaled.npv_usd == pytest.approx(0.0, abs=1e-6)


def test_a_split_that_loses_never_pays():
    case = split_case(100.0, 110.0, 0.0, 32.0, 1.0, Horizon(36, 0.0))
    assert case.payback_months == case.break_even_fleet == np.inf and case.npv_usd < 0.0


def test_api_by_hand():
    """1,000 new at 3.75 (cache write), 20,000 reused at 0.30, 500 out at 15: 0.00375 + 0.006 + 0.0075."""
    price = api_price("claude-sonnet-4-6")
    assert price.usd_per_call(1000.0, 20_000.0, 500.0) == pytest.approx(0.01725)
    case = api_case(price, usd_per_session=0.5, sessions_per_second=0.1, self_usd_per_hour=90.0)
    assert case.api_usd_per_hour == pytest.approx(180.0) and case.ratio == pytest.approx(0.5)
    assert case.break_even_sessions_per_second == pytest.approx(0.05)


def test_prices_of_ones_own_api():
    own = api_price({"input": 1.0, "output": 4.0})
    assert (own.cached, own.cache_write) == (1.0, 1.0)
    assert api_price({"like": "claude-sonnet-4-6", "input": 2.0}).cache_write == 2.0
    with pytest.raises(InputError, match=r"api\.output"):
        api_price({"input": 1.0})


def test_a_solved_task_costs_a_session_over_the_success_rate(make_study):
    """And what a study holds of money is consistent with the deployments' own columns."""
    made = make_study(
        "economics.success_rate=0.4",
        "economics.api=deepseek-v3-2",
        "economics.split_one_off_usd=1000",
        "prices.pool_usd_per_month=1000",
        accelerators=["h100-sxm"],
        replicas=4,
        tensor_parallel=8,
    )
    rows = records(table(made.evaluator(), np.array([made.space.offsets[0], made.space.offsets[2]])))
    joint, split = rows
    assert joint["cost_per_solved_task_usd"] == pytest.approx(joint["cost_per_session_usd"] / 0.4)
    assert joint["solved_tasks_per_hour"] == pytest.approx(3600 * 0.4 * joint["sessions_per_second"])
    assert joint["sessions_per_accelerator"] * joint["accelerators"] == pytest.approx(joint["sessions_in_progress"])
    case = split_against_joint(made, rows)
    assert case is not None
    assert case.saving_usd_per_month == pytest.approx(730 * (joint["cost_per_hour_usd"] - split["cost_per_hour_usd"]))
    assert case.complexity_usd_per_month == pytest.approx(1000, rel=1e-4)
    api = against_api(made, joint)
    assert api is not None and api.self_usd_per_hour == pytest.approx(joint["cost_per_hour_usd"])
    found = economics(made, joint, rows)
    assert found["split"]["complexity_usd_per_month"] == pytest.approx(1000, rel=1e-4)
    assert len(sentences(made, joint, rows)) == 3


def test_interruptions_of_spot_are_paid_for(make_study):
    """A tenth of the time away: a ninth more accelerators."""
    spot = "prices.term=spot"
    away = "prices.spot={interruptions_per_month: 73, recovery_s: 3600}"
    plain = make_study(spot, "prices.spot={interruptions_per_month: 0}", accelerators=["h100-sxm"])
    held = make_study(spot, away, accelerators=["h100-sxm"])
    assert held.prices_usd_per_hour[0] == pytest.approx(plain.prices_usd_per_hour[0] / 0.9)
    own = make_study(spot, away, "prices.own={h100-sxm: 1.0}", accelerators=["h100-sxm"])
    assert own.prices_usd_per_hour[0] == 1.0


def test_money_can_be_the_objective():
    assert {"cost_per_solved_task_usd", "sessions_per_accelerator", "sessions_per_kw"} <= set(OBJECTIVES)
