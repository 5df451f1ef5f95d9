"""Prices: the catalogue's rows and medians, whose price applies, and a SkyPilot file with all its faults."""

from pathlib import Path

import pytest

from breakeven.models.catalog import table
from breakeven.models.hardware import accelerator, accelerators
from breakeven.models.inputs import InputError
from breakeven.models.prices import (
    TERMS,
    PriceRow,
    Prices,
    committed_multiplier,
    price_rows,
    read_skypilot,
    usd_per_hour,
)

H100_ON_DEMAND = dict(aws=8.256, azure=12.29, gcp=10.55, nebius=2.95, oci=10.0, runpod=2.69, vast=1.93) | {
    "verda": 1.99,
    "lambda": 3.19,
}


def test_rows_are_sourced_unique_and_of_known_accelerators() -> None:
    rows = price_rows()
    assert len({row[:3] for row in rows}) == len(rows) > 100
    for row in rows:
        assert row.accelerator in accelerators() and row.term in TERMS
        assert 0.1 < row.usd_per_hour < 20 and row.as_of >= "2025" and row.source
        assert row.confidence in ("high", "medium", "low")


def test_spot_is_below_on_demand_at_every_provider() -> None:
    on_demand = {row[:2]: row.usd_per_hour for row in price_rows() if row.term == "on-demand"}
    for row in price_rows():
        if row.term == "spot" and row[:2] in on_demand:
            assert row.usd_per_hour < on_demand[row[:2]]


def test_the_on_demand_median_of_the_h100() -> None:
    listed = {
        row.provider: row.usd_per_hour
        for row in price_rows()
        if (row.accelerator, row.term) == ("h100-sxm", "on-demand") and row.provider != "market-index"
    }
    assert listed == H100_ON_DEMAND
    assert usd_per_hour(accelerator("h100-sxm")) == 3.19  # fifth of nine; with the index it would be 3.41


@pytest.mark.parametrize(
    ("name", "term", "provider", "price"),
    [
        ("h100-sxm", "on-demand", "aws", 8.256),
        ("h100-sxm", "on-demand", "market-index", 3.631),
        ("h100-sxm", "spot", "median", 1.5),  # of 0.9975, 1.25, 1.5, 2.2712, 2.6167
        ("h100-sxm", "owning", "median", (1.30 + 1.69) / 2),
        ("h100-sxm", "owning", "semianalysis-neocloud", 1.69),
        ("h100-sxm", "committed-3y", "median", 1.30),  # a listed rental before any multiplier
        ("h100-sxm", "committed-1y", "median", 3.19 * 0.70),
        ("h100-sxm", "committed-1y", "aws", 8.256 * 0.68),
        ("h100-sxm", "committed-3y", "oci", 10.0 * 0.70),
        ("b200-sxm", "on-demand", "median", 4.99),  # of 3.79, 4.705, 4.99, 5.5, 14.2416
        ("a100-pcie-80gb", "on-demand", "runpod", 1.39),  # the dated snapshot of two
        ("tpu-v6e", "spot", "gcp", 0.7498),
    ],
)
def test_prices_by_term_and_provider(name: str, term: str, provider: str, price: float) -> None:
    assert usd_per_hour(accelerator(name), term, provider) == pytest.approx(price)


def test_committed_multipliers() -> None:
    assert committed_multiplier("committed-3y", "median") == pytest.approx(0.51)  # of 0.5, 0.5, 0.52, 0.7
    assert committed_multiplier("committed-3y", "runpod") is None
    assert committed_multiplier("spot", "aws") is None


def test_whose_price_applies() -> None:
    costly = accelerator({"like": "h100-sxm", "name": "costly", "price": 2.0})
    assert usd_per_hour(costly) == pytest.approx(2 * 3.19)
    assert usd_per_hour(costly, own={"h100-sxm": 2.5}) == pytest.approx(5.0)
    assert usd_per_hour(costly, own={"h100-sxm": 2.5, "costly": 4.0}) == 4.0
    owned = accelerator({"like": "h100-sxm", "usd_per_hour": 1.0})
    assert usd_per_hour(owned) == 1.0 and usd_per_hour(owned, own={"h100-sxm": 2.5}) == 1.0
    assert usd_per_hour(accelerator({"like": "rubin-cpx", "priced_as": "l40s"})) == 0.9119


def test_a_choice_of_prices_carries_over() -> None:
    choice = Prices(term="spot", provider="aws", own={"l4": 0.2})
    assert choice.usd_per_hour(accelerator("h100-sxm")) == 2.6167
    assert choice.usd_per_hour(accelerator("l4")) == 0.2


@pytest.mark.parametrize(
    ("name", "choice", "message"),
    [
        ("rubin-cpx", {}, "no price at all; give prices.own.rubin-cpx or usd_per_hour"),
        (
            "mi300x",
            {"provider": "aws"},
            "it has on-demand of azure, oci, runpod, tensorwave, vultr; spot of crusoe",
        ),
        (
            "h100-sxm",
            {"term": "committed-1y", "provider": "lambda"},
            "no such price; it has on-demand of aws",
        ),
        ("h100-sxm", {"term": "spots"}, "prices.term = 'spots': unknown; did you mean spot?"),
        ("h100-sxm", {"provider": "asw"}, "prices.provider = 'asw': unknown; did you mean aws"),
        ("h100-sxm", {"own": {"l4": -1}}, "prices.own.l4 = -1: a number from 0"),
    ],
)
def test_a_missing_price_says_what_exists(name: str, choice: dict, message: str) -> None:
    with pytest.raises(InputError) as error:
        usd_per_hour(accelerator(name), **choice)
    assert message in str(error.value)


HEADER = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region\n"


def gpu(name: str, count: int, mib: int) -> str:
    """GpuInfo as Python writes it, quoted for the file."""
    info = {"Gpus": [{"Name": name, "Count": count, "MemoryInfo": {"SizeInMiB": mib}}]}
    return f'"{info}"'


def skypilot(folder: Path, body: str, provider: str = "aws") -> Path:
    path = folder / provider / "vms.csv"
    path.parent.mkdir()
    path.write_text(HEADER + body)
    return path


def test_skypilot_medians_over_regions_and_sentinels(tmp_path: Path) -> None:
    h100 = gpu("H100", 8, 81559)
    body = (
        f"p5,H100,8.0,192,2048,{h100},55.04,20.0,us-east-1\n"
        f"p5,H100,8.0,192,2048,{h100},55.04,24.0,us-east-1\n"
        f"p5,H100,8.0,192,2048,{h100},64.0,64.0,eu-north-1\n"  # spot equals on-demand
        f"p5,H100,8.0,192,2048,{h100},80.0,8.0,ap-south-1\n"  # spot is a tenth
        f"m5,,,4,16,,0.19,0.08,us-east-1\n"
        f"g4,T4,1.0,4,16,{gpu('T4', 1, 15360)},0.5,,us-east-1\n"
    )
    rows, report = read_skypilot(skypilot(tmp_path, body))
    prices = {row[:3]: row.usd_per_hour for row in rows}
    assert prices == {("h100-sxm", "aws", "on-demand"): 8.0, ("h100-sxm", "aws", "spot"): 2.75}
    assert (report.read, report.used, report.malformed) == (6, 4, [])
    assert report.dropped == {
        "spot equal to on-demand": 1,
        "spot a tenth of on-demand": 1,
        "no accelerator": 1,
        "accelerator not in the catalogue": 1,
    }
    assert report.unknown == {"T4": 1}
    assert usd_per_hour(accelerator("h100-sxm"), rows=rows) == 8.0


def test_skypilot_malformed_rows_are_counted_and_named(tmp_path: Path) -> None:
    good = f"x,L40S,2,8,64,{gpu('L40S', 2, 46068)},2.0,,us\n"
    body = (
        good  # line 2
        + "x,L40S,2,8\n"  # 3: cut short
        + "x,L40S,two,8,64,,2.0,,us\n"  # 4
        + "x,L40S,0,8,64,,2.0,,us\n"  # 5
        + "x,L40S,2,8,64,,-2.0,,us\n"  # 6
        + "x,L40S,2,8,64,,2.0,nan,us\n"  # 7
        + "x,L40S,2,8,64,\"{'Gpus': [\",2.0,,us\n"  # 8: not a literal
        + 'x,L40S,2,8,64,"{,2.0,,us\n'  # 9: open quote
        + "\n"
        + good  # 11
    )
    rows, report = read_skypilot(skypilot(tmp_path, body))
    assert [row.usd_per_hour for row in rows] == [1.0]
    assert (report.read, report.used) == (9, 2)
    assert [line for line, _ in report.malformed] == [3, 4, 5, 6, 7, 8, 9]
    assert "7 malformed: line 3 (not 9 columns), line 4 (AcceleratorCount = 'two')" in str(report)


@pytest.mark.parametrize(
    ("provider", "line", "expected"),
    [
        ("aws", f"p4d,A100,8,9,9,{gpu('A100', 8, 40960)},16,,r", "a100-sxm-40gb"),
        ("oci", f"x,A100,8,9,9,{gpu('A100', 8, 81920)},16,,r", "a100-sxm-80gb"),
        ("lambda", "x,A100-80GB-SXM,8,9,9,,16,,r", "a100-sxm-80gb"),
        ("runpod", f"1x,A100-80GB,8,9,9,{gpu('A100 PCIe', 1, 80)},16,,r", "a100-pcie-80gb"),  # 80 "MiB"
        ("vast", f"A100_SXM4,A100,2,9,9,{gpu('A100', 2, 81920)},4,,r", "a100-sxm-40gb"),  # memory of both
        ("vast", f"A100_PCIE,A100,1,9,9,{gpu('A100', 1, 81920)},2,,r", "a100-pcie-80gb"),
        ("vast", f"H100_NVL,H100,2,9,9,{gpu('H100', 2, 191660)},4,,r", "h100-nvl"),
        ("azure", f"Standard_NC40ads_H100_v5,H100,1,9,9,{gpu('H100', 1, 95830)},2,,r", "h100-nvl"),
        ("lambda", f"gpu_1x_h100_pcie,H100,1,9,9,{gpu('H100', 1, 81920)},2,,r", "h100-pcie"),
        ("lambda", f"gpu_1x_h100_sxm5,H100,1,9,9,{gpu('H100', 1, 81920)},2,,r", "h100-sxm"),
        ("verda", 'x,B200,1,9,9,"{""Gpus"": [{""Name"": ""B200""}]}",2,,r', "b200-sxm"),
        ("gcp", ",tpu-v6e-8,1,,,tpu-v6e-8,16,,r", "tpu-v6e"),  # 8 chips
        ("gcp", ",tpu-v5p-16,1,,,tpu-v5p-16,16,,r", "tpu-v5p"),  # 16 cores, 8 chips
        ("aws", "trn2,Trainium2,16,9,9,,32,,r", "trainium2"),
        ("vast", "x,RTXPRO6000WS,1,9,9,,2,,r", "rtx-pro-6000-ws"),
    ],
)
def test_skypilot_names(tmp_path: Path, provider: str, line: str, expected: str) -> None:
    (row,), _ = read_skypilot(skypilot(tmp_path, line + "\n", provider))
    assert (row.accelerator, row.provider, row.usd_per_hour) == (expected, provider, 2.0)


def test_skypilot_google_sentinels(tmp_path: Path) -> None:
    body = ",tpu-v6e-1,1,,,,700.0,700.0,a\n,tpu-v6e-1,1,,,,2.7,0.0,b\n,A100,1,,,,2.9,1.1,b\n"
    rows, report = read_skypilot(skypilot(tmp_path, body, "gcp"))
    assert [row[:4] for row in rows] == [("tpu-v6e", "gcp", "on-demand", 2.7)]
    assert report.dropped == {
        "on-demand of 700.00, a slice not sold": 1,
        "spot of 700.00, a slice not sold": 1,
        "spot of 0.00": 1,
        "accelerator without its machine": 1,
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a SkyPilot catalogue: no column AcceleratorName"),
        (b"a,b\n1,2\n", "not a SkyPilot catalogue"),
        (
            HEADER.encode() + b"p5,H100,8.0,192,2048,",
            "line 2 = 'p5,H100,8.0,192,2048,': the file is cut off here",
        ),
        (HEADER.encode() + b"p5,H100,8.0,192,2048,,,,r\n", "no usable price"),
        (HEADER.encode() + b"\xff\xfe\n", "cannot be read: not UTF-8"),
    ],
)
def test_skypilot_files_that_cannot_be_used(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "vms.csv"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        read_skypilot(path)
    assert message in str(error.value) and str(error.value).startswith(str(path))


def test_skypilot_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_skypilot(tmp_path / "none.csv")


def test_aliases_lead_to_rows_of_the_catalogue() -> None:
    names = table("prices")["skypilot"]
    assert {alias["id"] for alias in (*names["alias"], *names["slice"])} <= set(accelerators())


def test_own_rows_replace_the_catalogue() -> None:
    rows = [PriceRow("l4", "attic", "on-demand", 0.25, "2026-01-01", "high", "bill")]
    assert usd_per_hour(accelerator("l4"), provider="attic", rows=rows) == 0.25
    with pytest.raises(InputError, match="no price at all"):
        usd_per_hour(accelerator("h100-sxm"), rows=rows)
