"""The accelerators and links: every row is sourced, the known traps are avoided, variations and errors."""

import dataclasses

import pytest

from breakeven.models.catalog import table
from breakeven.models.hardware import (
    Accelerator,
    accelerator,
    accelerators,
    all_in_factor,
    link,
    links,
)
from breakeven.models.inputs import InputError

PEAKS = ("bf16_flops_per_s", "fp8_flops_per_s", "int8_flops_per_s", "fp4_flops_per_s")
# fmt: off
ASKED_FOR = [
    "a100-sxm-40gb", "a100-sxm-80gb", "a100-pcie-80gb", "h100-sxm", "h100-pcie", "h100-nvl", "h200-sxm",
    "h20", "b200-sxm", "b300-sxm", "gb200-nvl72", "gb300-nvl72", "l4", "l40s", "a10g",
    "rtx-pro-6000-server", "mi300x", "mi325x", "mi355x", "tpu-v5e", "tpu-v5p", "tpu-v6e",
    "tpu-v7-ironwood", "gaudi3", "trainium2", "ascend-910c", "rubin-cpx", "groq-lpu-v1",
    "groq-3-lpu-lp30", "xeon-max-9480", "jetson-agx-orin",
]
# fmt: on


def every(kind: str) -> list[str]:
    return list(table(kind))


@pytest.mark.parametrize("name", every("accelerators"))
def test_a_row_is_sourced_and_usable(name: str) -> None:
    row, chip = table("accelerators")[name], accelerators()[name]
    assert row["sources"] and all(row["sources"]) and row["as_of"] >= "2025-12"
    assert row["confidence"] in ("high", "medium", "low")
    assert max(getattr(chip, peak) for peak in PEAKS) > 1e13
    assert chip.memory_bytes > 0 and chip.memory_bandwidth_bytes_per_s > 0 and chip.nic_bytes_per_s > 0
    for doubtful in (*row.get("recalled", ()), *row.get("disputed", {})):
        assert doubtful in row, f"{name} marks {doubtful}, which it does not state"


@pytest.mark.parametrize("name", every("links"))
def test_a_link_is_sourced_and_usable(name: str) -> None:
    row = table("links")[name]
    assert row["sources"] and row["as_of"]
    assert set(row.get("recalled", ())) | set(row.get("disputed", {})) <= row.keys()
    assert links()[name].bytes_per_s == pytest.approx(row["gbs"] * 1e9)


def test_the_catalogue_covers_what_users_have() -> None:
    assert set(ASKED_FOR) <= set(accelerators())


@pytest.mark.parametrize("chip", accelerators().values(), ids=lambda chip: chip.id)
def test_narrower_formats_at_most_double_where_dense(chip: Accelerator) -> None:
    """A peak with sparsity stands out as four times the next wider one."""
    if chip.id in ("rubin-vr200-nvl72", "trainium3"):  # FP8 units are 3.75 to 4.4 times the BF16 ones
        return
    wide, narrow, int8, tiny = (getattr(chip, peak) for peak in PEAKS)
    assert not wide or narrow <= 2.2 * wide
    assert not wide or int8 <= 4.0 * wide  # Ada's INT8 is four times its FP32-accumulating BF16
    ultra = chip.generation == "blackwell-ultra"  # FP4 three times FP8
    assert not narrow or tiny <= (3.1 if ultra else 2.2) * narrow


def test_the_dense_peaks_of_the_h100() -> None:
    h100 = accelerator("h100-sxm")
    assert (h100.bf16_flops_per_s, h100.fp8_flops_per_s) == (989e12, 1979e12)
    assert h100.fp4_flops_per_s == 0.0
    assert accelerator("a100-sxm-80gb").fp8_flops_per_s == 0.0


def test_known_traps() -> None:
    b200, mi300x = accelerator("b200-sxm"), accelerator("mi300x")
    assert b200.memory_bytes == pytest.approx(179.06 * 2**30)  # both dies, usable
    assert b200.memory_bandwidth_bytes_per_s == 8e12
    assert accelerator("mi325x").memory_bytes == 256 * 2**30  # not 288
    assert mi300x.memory_bandwidth_bytes_per_s == 5.3e12  # not 10.3
    assert mi300x.scaleup_pair_bytes_per_s == 64e9 and mi300x.scaleup_bytes_per_s == 448e9
    assert b200.scaleup_pair_bytes_per_s == b200.scaleup_bytes_per_s == 900e9
    assert accelerator("gaudi3").bf16_flops_per_s == 1677e12  # not 1835
    assert accelerator("rubin-vr200-nvl72").fp4_flops_per_s == 35e15  # not 50
    assert accelerator("trainium2").bf16_flops_per_s == 667e12
    assert accelerator("gb200-nvl72").per_instance == 4 and b200.per_instance == 8


def test_chips_of_one_phase_lack_the_wider_formats() -> None:
    assert accelerator("rubin-cpx").bf16_flops_per_s == accelerator("groq-3-lpu-lp30").bf16_flops_per_s == 0.0


@pytest.mark.parametrize("chip", accelerators().values(), ids=lambda chip: chip.id)
def test_a_pair_never_beats_the_whole_link(chip: Accelerator) -> None:
    assert chip.scaleup_pair_bytes_per_s <= chip.scaleup_bytes_per_s
    assert (chip.scaleup_link == "none") == (chip.scaleup_domain == 1) == (chip.scaleup_bytes_per_s == 0)


def test_all_in_power_is_published_or_derived() -> None:
    assert all_in_factor() == pytest.approx(2.18, abs=0.01)
    assert accelerator("h100-sxm").all_in_power_w == 1730.0
    l4 = accelerator("l4")
    assert l4.derived == ("all_in_kw",) and l4.all_in_power_w == pytest.approx(72 * all_in_factor())
    assert accelerator("groq-3-lpu-lp30").all_in_power_w == 0.0  # no power published, none invented


def test_compute_factor_doubles_every_peak_and_nothing_else() -> None:
    base, fast = accelerator("b200-sxm"), accelerator({"like": "b200-sxm", "compute": 2.0})
    for peak in PEAKS:
        assert getattr(fast, peak) == 2 * getattr(base, peak)
    same = {f.name for f in dataclasses.fields(Accelerator)} - {*PEAKS, "id", "name", "sources"}
    assert all(getattr(fast, name) == getattr(base, name) for name in same)
    assert fast.id == fast.name == "b200-sxm*"


def test_a_variation_mixes_factors_and_absolute_values() -> None:
    chip = accelerator(
        dict(name="My Chip", like="mi300x", memory_bandwidth=1.5, scaleup=2.0, nic=0.5, price=1.5)
        | dict(memory_gib=192, sram_mib=512, power_w=1500)
    )
    assert (chip.id, chip.name, chip.priced_as, chip.price_factor) == ("my-chip", "My Chip", "mi300x", 1.5)
    assert chip.memory_bandwidth_bytes_per_s == pytest.approx(7.95e12)
    assert chip.scaleup_bytes_per_s == 896e9 and chip.scaleup_pair_bytes_per_s == 128e9
    assert chip.nic_bytes_per_s == 25e9 and chip.sram_bytes == 512 * 2**20
    assert chip.all_in_power_w == pytest.approx(2 * 1790.0)  # in proportion to the power
    assert "memory_gib" not in chip.recalled  # stated now


def test_a_new_link_brings_its_bandwidth() -> None:
    chip = accelerator({"like": "mi300x", "scaleup_link": "nvlink5", "scaleup_domain": 72})
    assert chip.scaleup_bytes_per_s == chip.scaleup_pair_bytes_per_s == 900e9
    cut = accelerator({"like": "gb200-nvl72", "scaleup_link": "none", "host_link": "pcie5-x16"})
    assert (cut.scaleup_domain, cut.scaleup_bytes_per_s, cut.host_bytes_per_s) == (1, 0.0, 63e9)


def test_a_whole_definition() -> None:
    chip = accelerator(dict(name="Edge 1", fp8_tflops=100, memory_gib=16, memory_bandwidth_gbs=200, usd_per_hour=0.1))
    assert chip.id == chip.priced_as == "edge-1" and chip.usd_per_hour == 0.1
    assert chip.fp8_flops_per_s == 1e14 and chip.scaleup_domain == chip.per_instance == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("h100", "accelerator = 'h100': unknown; did you mean h100-sxm"),
        (7, "accelerator = 7: unknown"),
        ({"like": "h100"}, "accelerator.like = 'h100': unknown; did you mean"),
        ({"like": "l4", "memory_gib": -1}, "accelerator.memory_gib = -1: a number from 0.01"),
        ({"like": "l4", "compute": 1e9}, "accelerator.compute = 1000000000.0: a number from 0.01 to 100"),
        ({"like": "l4", "price": -0.5}, "accelerator.price = -0.5"),
        ({"like": "l4", "power_w": float("nan")}, "accelerator.power_w = nan"),
        ({"like": "l4", "power_w": "72 W"}, "accelerator.power_w = '72 W'"),
        ({"like": "l4", "per_instance": 2.5}, "accelerator.per_instance = 2.5: a whole number"),
        ({"like": "l4", "compue": 2}, "accelerator.compue = 2: unknown field; did you mean compute?"),
        ({"like": "l4", "scaleup_domain": 8}, "accelerator.scaleup_domain = 8.0: needs a scaleup_link"),
        ({"like": "l4", "scaleup_link": "nvlink9"}, "accelerator.scaleup_link = 'nvlink9': unknown"),
        ({"like": "l4", "name": "H100-SXM"}, "accelerator.name = 'H100-SXM': is a row of the catalogue"),
        ({"like": "l4", "sources": "me"}, "accelerator.sources = 'me': a list of texts"),
        ({"like": "l4", "priced_as": "l5"}, "accelerator.priced_as = 'l5': unknown"),
        ({"name": "x", "memory_gib": 1}, "accelerator.memory_bandwidth_gbs = None: missing"),
        (
            {"name": "x", "memory_gib": 1, "memory_bandwidth_gbs": 9},
            "accelerator.bf16_tflops = None: missing",
        ),
        ({"memory_gib": 1}, "accelerator.name = None"),
        ({"name": "x", "compute": 2.0}, "accelerator.compute = 2.0: unknown field"),
    ],
)
def test_errors_name_the_field(spec: object, message: str) -> None:
    with pytest.raises(InputError) as error:
        accelerator(spec)  # pyright: ignore[reportArgumentType]
    assert str(error.value).startswith(message)


def test_errors_start_with_the_callers_field() -> None:
    with pytest.raises(InputError, match=r"^space\.decode = 'h100-sx'"):
        accelerator("h100-sx", "space.decode")


def test_links_by_name_variation_and_definition() -> None:
    assert link("ib-ndr-400").bytes_per_s == 50e9
    varied = link({"like": "on-package", "name": "Chiplet", "bandwidth": 2.0, "latency_us": 0.05})
    assert varied.id == "chiplet" and varied.kind == "on-package"
    assert varied.bytes_per_s == 8e12 and varied.latency_s == pytest.approx(5e-8)
    assert "latency_us" not in varied.recalled and "gbs" in varied.recalled
    own = link(dict(name="fibre", kind="scale-out", gbs=10, latency_us=30, efficiency=0.8))
    assert own.bytes_per_s == 1e10


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ib-ndr", "link = 'ib-ndr': unknown; did you mean ib-ndr-400"),
        ({"like": "nvlink4", "efficiency": 1.5}, "link.efficiency = 1.5: a number from 0.01 to 1"),
        ({"name": "x", "kind": "wire", "gbs": 1, "latency_us": 1, "efficiency": 1}, "link.kind = 'wire'"),
        ({"name": "x", "kind": "host"}, "link.gbs = None: a number"),
        ({"name": "x", "bandwith": 2}, "link.bandwith = 2: unknown field"),
    ],
)
def test_link_errors(spec: object, message: str) -> None:
    with pytest.raises(InputError) as error:
        link(spec)  # pyright: ignore[reportArgumentType]
    assert str(error.value).startswith(message)


def test_the_catalogue_is_not_changed_by_variations() -> None:
    before = accelerator("h100-sxm")
    accelerator({"like": "h100-sxm", "memory_gib": 1, "recalled": ["memory_gib"]})
    assert accelerator("h100-sxm") == before and table("accelerators")["h100-sxm"]["memory_gib"] == 79.65
