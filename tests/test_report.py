"""The report: one file that needs nothing else, says what the run found, and opens in a real browser."""

import html
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from breakeven.studies.cli import _main
from breakeven.studies.document import Bars, Code, Document, Items, Paragraph, Picture, Table

STUDY: dict[str, Any] = {
    "name": "small",
    "about": '5 < 6 & "quotes"',
    "llm": "llama-3.1-8b",
    "workload": "tool-agent",
    "load": {"calls_per_second": 4},
    "slo": {"ttft_s": 1, "tpot_s": 0.05, "target": 0.9},
    "space": {
        "topologies": ["colocated", "chunked", "pd"],
        "accelerators": ["h100-sxm", "l40s"],
        "tensor_parallel": [1, 2],
        "replicas": [1, 2],
        "max_batch": 64,
        "links": ["ib-ndr-400"],
    },
    "economics": {"ownership": "neocloud", "api": {"input": 1, "output": 2}},
}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    (folder / "small.yaml").write_text(yaml.safe_dump(STUDY), encoding="utf-8")
    assert _main(["run", str(folder / "small.yaml"), "--out", str(folder / "out")]) == 0
    return folder / "out"


def test_it_says_what_the_run_found(ran: Path) -> None:
    page = html.unescape((ran / "report.html").read_text(encoding="utf-8"))
    best = pd.read_csv(ran / "families.csv").iloc[0]
    assert best["deployment"] in page and f"{best['cost_per_hour_usd']:,.2f} USD per hour" in page
    for heading in ("Where the money goes", "Where the time goes", "Verification", "Assumptions", "How to repeat it"):
        assert heading in page
    assert "Disaggregation" in page and "breakeven run small.yaml" in page
    text = (ran / "report.md").read_text(encoding="utf-8")
    assert best["deployment"] in text and "](pareto.png)" in text


def test_the_bill_adds_up(ran: Path) -> None:
    """The parts of the winner's cost are its cost per hour, as printed."""
    page = (ran / "report.md").read_text(encoding="utf-8")
    bill = page.split("## Where the money goes")[1].split("##")[0]
    *parts, total = [float(value.replace(",", "")) for value in re.findall(r"([\d.,]+) USD/h \|", bill)]
    assert sum(parts) == pytest.approx(total, abs=0.006 * len(parts))
    assert total == pytest.approx(pd.read_csv(ran / "families.csv").iloc[0]["cost_per_hour_usd"], abs=0.006)


def test_it_loads_nothing(ran: Path) -> None:
    page = (ran / "report.html").read_text(encoding="utf-8")
    sources = re.findall(r'(?:src|href)="([^"]{0,20})', page)
    assert sources and all(source.startswith("data:") for source in sources)
    assert "<script" not in page and "@import" not in page and "url(" not in page


def test_pictures_of_other_commands_come_in(ran: Path) -> None:
    (ran / "payoff.png").write_bytes((ran / "pareto.png").read_bytes())
    try:
        assert _main(["report", str(ran)]) == 0
        assert "Where a split pays" in (ran / "report.html").read_text(encoding="utf-8")
    finally:
        (ran / "payoff.png").unlink()
    assert _main(["report", str(ran)]) == 0
    assert "Where a split pays" not in (ran / "report.html").read_text(encoding="utf-8")


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(["report", str(tmp_path)]) == 2
    assert "output folder of `breakeven run`" in capsys.readouterr().err


def test_every_block_has_both_forms(ran: Path) -> None:
    """What is written by hand is shown as it is, never taken for markup."""
    page = Document("a <b>", "c & d")
    blocks = Paragraph("<p>", "lead"), Items(["<i>"]), Code("<code>", "<title>"), Picture(ran / "pareto.png", "<cap>")
    page.add("h <h>", *blocks, Table(("<x>", "y"), [("<1>", "2|3")], frozenset(("<x>",))), Bars([("<n>", 1.0, "<w>")]))
    page.add("nothing", None)
    shown = page.html()
    for word in ("<b>", "<p>", "<i>", "<code>", "<title>", "<cap>", "<x>", "<1>", "<n>", "<w>", "<h>"):
        assert html.escape(word) in shown
    assert "nothing" not in shown and "2\\|3" in page.markdown()


def _browse(page: Path, profile: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--enable-logging=stderr", f"--user-data-dir={profile}"]
    return subprocess.run([*command, *flags, page.as_uri()], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: the report is not looked at in a browser")
@pytest.mark.parametrize("width", [390, 1100])
def test_it_opens_in_a_browser(ran: Path, tmp_path: Path, width: int) -> None:
    """No console message, every picture drawn, nothing wider than the screen, on a phone and on a desk."""
    page = (ran / "report.html").read_text(encoding="utf-8")
    look = (
        "const d=document.getElementById('f').contentDocument;document.title=[d.documentElement.scrollWidth,"
        "[...d.images].every(i=>i.naturalWidth>0),d.querySelectorAll('h2').length].join(' ')"
    )
    frame = f'<iframe id="f" style="width:{width}px;height:900px" srcdoc="{html.escape(page)}"></iframe>'
    outer = tmp_path / "outer.html"
    outer.write_text(
        f'<!doctype html><link rel="icon" href="data:,">{frame}<script>window.onload=()=>{{{look}}}</script>',
        encoding="utf-8",
    )
    seen = _browse(outer, tmp_path / "profile", "--dump-dom")
    assert seen.returncode == 0, seen.stderr[-500:]
    assert "CONSOLE" not in seen.stderr, seen.stderr[-2000:]
    found = re.search(r"<title>(\d+) (true|false) (\d+)</title>", seen.stdout)
    assert found is not None
    assert int(found[1]) <= width and found[2] == "true" and int(found[3]) >= 6
