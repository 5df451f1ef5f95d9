"""report.html: one self-contained page with the decision, the picture, the front and the assumptions."""

import base64
import html
from pathlib import Path
from typing import Any

import pandas as pd

from breakeven.studies.console import decision, front_columns
from breakeven.studies.result import Result

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:62rem;padding:0 1rem;color:#1b1b1b}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}img{max-width:100%;height:auto}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem;white-space:nowrap}
th,td{padding:.25rem .6rem;border-bottom:1px solid #ddd;text-align:right}th{background:#f4f4f4}
td:first-child,th:first-child{text-align:left}p.lead{font-size:1.1rem}small{color:#555}
@media print{body{margin:0;max-width:none}}
"""


def write_report(result: Result, folder: Path) -> None:
    """Write report.html into the output folder, with its picture inside."""
    record = result.record()
    picture = base64.b64encode((folder / "pareto.png").read_bytes()).decode()
    title = html.escape(str(record["study"]["name"]))
    body = [f"<h1>{title}</h1>", f"<p>{html.escape(str(record['study'].get('about', '')))}</p>"]
    body += [f'<p class="lead">{html.escape(line)}</p>' for line in decision(result)]
    body.append(f'<img alt="cost against SLO attainment" src="data:image/png;base64,{picture}">')
    body += ["<h2>Best of each topology that meets the target</h2>", _table(result.families)]
    body += ["<h2>Front</h2>", _table(result.front), "<h2>Assumptions</h2>", _assumptions(record["resolved"])]
    seconds, count = record["evaluation_seconds"], record["candidates_evaluated"]
    versions = ", ".join(f"{k} {v}" for k, v in record["versions"].items())
    body.append(
        f"<p><small>{count:,} candidates evaluated in {seconds:.1f} s, {record['search']} search, seed "
        f"{record['seed']}. Repeat it: <code>breakeven run {html.escape(Path(record['file']).name)}</code>. "
        f"{html.escape(versions)}.</small></p>"
    )
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
    page += f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_STYLE}</style>'
    (folder / "report.html").write_text(page + "\n".join(body) + "</html>\n", encoding="utf-8")


def _table(frame: pd.DataFrame) -> str:
    if frame.empty:
        return "<p>none</p>"
    shown = pd.DataFrame({words: frame[name].map(form) for name, words, form in front_columns(frame)})
    return f'<div class="wide">{shown.to_html(index=False, border=0)}</div>'


def _assumptions(resolved: dict[str, Any]) -> str:
    rows = [f"<li>LLM {html.escape(resolved['llm']['name'])}: {html.escape(str(resolved['llm']['source']))}</li>"]
    workload = ", ".join(
        f"{k.replace('_', ' ')} {v:,.0f}" if isinstance(v, float) else str(v) for k, v in resolved["workload"].items()
    )
    rows.append(f"<li>Workload {html.escape(workload)}</li>")
    for name, row in resolved["accelerators"].items():
        parts = [f"{name}: ${row['usd_per_hour']:,.2f} per hour; {'; '.join(row['sources'])}"]
        if row["recalled"]:
            parts.append(f"only recalled: {', '.join(row['recalled'])}")
        parts += [f"disputed {k}: {v}" for k, v in row["disputed"].items()]
        rows.append(f"<li>{html.escape('. '.join(parts))}</li>")
    return f"<ul>{''.join(rows)}</ul>"
