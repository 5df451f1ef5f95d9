"""A page of headings, paragraphs, tables, bars and pictures, as one self-contained HTML file and as Markdown."""

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_STYLE = """
:root{color-scheme:light}
body{font:16px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:62rem;padding:0 1rem;color:#1b1b1b;
overflow-wrap:break-word}
h1{font-size:1.6rem;line-height:1.25;margin:0 0 .25rem}h2{font-size:1.2rem;margin:2.2rem 0 .5rem}
img{max-width:100%;height:auto;display:block}figure{margin:1rem 0}figcaption,small,.note{color:#555;font-size:.85rem}
p.lead{font-size:1.12rem;border-left:4px solid #0173b2;padding-left:.8rem;margin:.6rem 0}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.86rem}
th,td{padding:.25rem .6rem;border-bottom:1px solid #ddd;text-align:right;vertical-align:top}th{background:#f4f4f4}
td.words,th.words{text-align:left}tr.sum td{border-top:2px solid #555;font-weight:600}
.bars td{border:0}.bars td.bar{width:55%;text-align:left;vertical-align:middle}
.bar i{display:block;height:.8rem;background:#0173b2;min-width:1px}
pre{background:#f4f4f4;padding:.7rem;overflow-x:auto;font-size:.85rem}code{background:#f4f4f4}
ul{padding-left:1.2rem}li{margin:.2rem 0}summary{cursor:pointer;margin:.5rem 0}
@media (max-width:40rem){
body{margin:1rem auto}
.cards thead{display:none}.cards tr{display:block;border-bottom:2px solid #bbb;padding:.4rem 0}
.cards table,.cards tbody{display:block}
.cards td{display:flex;justify-content:space-between;gap:1rem;border:0;padding:.1rem .2rem}
.cards td.words{text-align:right}.cards td:empty{display:none}
.cards td::before{content:attr(data-label);color:#555;text-align:left}
.cards td:first-child{font-weight:600;text-align:left}.cards td:first-child::before{content:none}
.bars td.bar{width:35%}
}
@media print{
@page{margin:14mm}body{margin:0;max-width:none;font-size:10pt}table{font-size:7.5pt}th,td{padding:.15rem .3rem}
.wide,pre{overflow:visible}pre{white-space:pre-wrap}h2{break-after:avoid}figure,tr,.bars{break-inside:avoid}
.bar i,th,pre{print-color-adjust:exact;-webkit-print-color-adjust:exact}
}
"""


@dataclass(frozen=True)
class Paragraph:
    """Words; `lead` where they are the answer, `small` where they are an aside."""

    text: str
    kind: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells; the columns named in `words` are text. A row called "total" is set apart."""

    heading: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Bars:
    """(name, size, size in words) of parts that add up."""

    rows: Sequence[tuple[str, float, str]]


@dataclass(frozen=True)
class Picture:
    """A PNG file, and what it shows."""

    path: Path
    caption: str


@dataclass(frozen=True)
class Items:
    """A list of sentences."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Code:
    """Text to copy; folded away under `title` where it has one."""

    text: str
    title: str = ""


Block = Paragraph | Table | Bars | Picture | Items | Code


@dataclass
class Document:
    """A title and sections of blocks, in order."""

    title: str
    about: str = ""
    sections: list[tuple[str, list[Block]]] = field(default_factory=list)

    def add(self, heading: str, *blocks: Block | None) -> None:
        """Append a section of those blocks that are not None; nothing where all are."""
        kept = [block for block in blocks if block is not None]
        if kept:
            self.sections.append((heading, kept))

    def html(self) -> str:
        """One HTML page with its pictures inside: it loads nothing and runs nothing."""
        body = [f"<h1>{html.escape(self.title)}</h1>"]
        body += [f"<p>{html.escape(self.about)}</p>"] if self.about else []
        for heading, blocks in self.sections:
            body += [f"<section><h2>{html.escape(heading)}</h2>"] if heading else ["<section>"]
            body += [*map(_html, blocks), "</section>"]
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(self.title)}</title>'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f'<link rel="icon" href="data:,"><style>{_STYLE}</style></head><body>\n'
            + "\n".join(body)
            + "\n</body></html>\n"
        )

    def markdown(self) -> str:
        """The same as Markdown, beside its pictures."""
        parts = [f"# {self.title}"]
        parts += [self.about] if self.about else []
        for heading, blocks in self.sections:
            parts += [f"## {heading}"] if heading else []
            parts += [_markdown(block) for block in blocks]
        return "\n\n".join(parts) + "\n"


def _html(block: Block) -> str:
    match block:
        case Paragraph(text, kind):
            return f'<p class="{kind}">{html.escape(text)}</p>' if kind else f"<p>{html.escape(text)}</p>"
        case Items(lines):
            return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"
        case Code(text, title):
            pre = f"<pre>{html.escape(text)}</pre>"
            return f"<details><summary>{html.escape(title)}</summary>{pre}</details>" if title else pre
        case Picture(path, caption):
            data = base64.b64encode(path.read_bytes()).decode()
            words = html.escape(caption)
            image = f'<img alt="{words}" src="data:image/png;base64,{data}">'
            return f"<figure>{image}<figcaption>{words}</figcaption></figure>"
        case Bars(rows):
            return _html_bars(rows)
        case Table():
            return _html_table(block)


def _html_bars(rows: Sequence[tuple[str, float, str]]) -> str:
    longest = max((size for _, size, _ in rows), default=1.0) or 1.0
    lines = [
        f'<tr><td class="words">{html.escape(name)}</td>'
        f'<td class="bar"><i style="width:{100.0 * max(size, 0.0) / longest:.1f}%"></i></td>'
        f"<td>{html.escape(words)}</td></tr>"
        for name, size, words in rows
    ]
    return f'<table class="bars">{"".join(lines)}</table>'


def _html_table(block: Table) -> str:
    def cell(tag: str, name: str, text: str) -> str:
        kind = ' class="words"' if name in block.words else ""
        label = f' data-label="{html.escape(name)}"' if tag == "td" else ""
        return f"<{tag}{kind}{label}>{html.escape(text)}</{tag}>"

    head = "".join(cell("th", name, name) for name in block.heading)
    body = []
    for row in block.rows:
        total = ' class="sum"' if row[0] == "total" else ""
        cells = "".join(cell("td", name, text) for name, text in zip(block.heading, row, strict=True))
        body.append(f"<tr{total}>{cells}</tr>")
    return f'<div class="wide cards"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _markdown(block: Block) -> str:
    match block:
        case Paragraph(text, kind):
            return f"**{text}**" if kind == "lead" else text
        case Items(lines):
            return "\n".join(f"* {line}" for line in lines)
        case Code(text, title):
            return (f"{title}\n\n" if title else "") + f"```\n{text.rstrip()}\n```"
        case Picture(path, caption):
            return f"![{caption}]({path.name})"
        case Bars(rows):
            return _markdown_table(("part", "size"), [(name, words) for name, _, words in rows], {"part"})
        case Table(heading, rows, words):
            return _markdown_table(heading, rows, words)


def _markdown_table(heading: Sequence[str], rows: Sequence[Sequence[str]], words: frozenset[str] | set[str]) -> str:
    rule = ["---" if name in words else "---:" for name in heading]
    lines = [heading, rule, *[[text.replace("|", "\\|") for text in row] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
