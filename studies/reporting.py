"""Parts that the reports of all studies share: numbers, Markdown tables, figure files and self-contained HTML pages."""

from __future__ import annotations

import base64
import html
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token
from matplotlib.figure import Figure

from pcnet.files import atomic_write

WIDTH = 9.0
"""Width of a figure in inches."""
DPI = 150

Row = Sequence[str]


# --- figures ---------------------------------------------------------------------------------------------------------
class Drawing(NamedTuple):
    """A figure with its file name, title and caption."""

    name: str
    title: str
    caption: str
    figure: Figure


class Picture(NamedTuple):
    """A figure that was written to a file."""

    name: str
    path: Path
    title: str
    caption: str


def save_figures(drawings: Iterable[Drawing], folder: str | Path) -> list[Picture]:
    """Write each figure as a PNG file into a folder, which is created if necessary."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    for drawing in drawings:
        path = folder / f"{drawing.name}.png"
        with atomic_write(path) as file:
            drawing.figure.savefig(file, dpi=DPI, format="png")
        pictures.append(Picture(drawing.name, path, drawing.title, drawing.caption))
    return pictures


def legend(figure: Figure, handles: Sequence[Any], columns: int | None = None, **style: Any) -> None:
    """Add a legend above all panels, filled row by row."""
    columns = columns or len(handles)
    by_row = [handle for first in range(columns) for handle in handles[first::columns]]
    figure.legend(handles=by_row, loc="outside upper center", ncols=columns, frameon=False, columnspacing=1.2, **style)


# --- text ------------------------------------------------------------------------------------------------------------
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float) -> str:
    """Three digits with thousands separators, or with a power of ten; a dash for NaN."""
    if math.isnan(value):
        return "–"
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.replace('-', '−')}·10{str(int(exponent)).translate(_SUPERSCRIPT)}"
    digits = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.3g}".removesuffix(".")
    return digits.replace("-", "−")


def escape(text: object) -> str:
    """Text that Markdown shows literally, in one line."""
    return re.sub(r"([\\`*_\[\]<>|&#~!])", r"\\\1", " ".join(str(text).split()))


def table(head: Row, rows: Iterable[Row], left: int = 1) -> str:
    """Markdown table; the first `left` columns are aligned to the left, the others to the right."""
    lines = [head, [":---" if i < left else "---:" for i in range(len(head))], *rows]
    return "\n".join("| " + " | ".join(cell.replace("\n", " ") for cell in line) + " |" for line in lines)


def figure_links(pictures: Sequence[Picture], folder: Path) -> dict[str, Path]:
    """Paths of figures by their links relative to the folder of a report."""
    return {Path(os.path.relpath(picture.path, folder)).as_posix(): picture.path for picture in pictures}


def figure_sections(pictures: Sequence[Picture], links: Iterable[str]) -> list[str]:
    """Markdown of the figures: title, image and caption of each."""
    parts = []
    for picture, link in zip(pictures, links, strict=True):
        title = escape(picture.title)
        parts += [f"### {title}", f"![{title}](<{link}>)", f"*{escape(picture.caption)}*"]
    return parts


def write_files(contents: Mapping[Path, str]) -> None:
    """Write each text file atomically."""
    for path, content in contents.items():
        with atomic_write(path) as file:
            file.write(content.encode())


# --- HTML ------------------------------------------------------------------------------------------------------------
def render_html(text: str, images: Mapping[str, Path], title: str) -> str:
    """Self-contained HTML page of Markdown text: images and style are embedded, raw HTML is shown as text."""
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(text)
    contents = _add_anchors(tokens)
    _mark_cells(tokens)
    for token in tokens:
        for child in token.children or []:
            if child.type == "image":
                path = images[str(child.attrs["src"])]
                child.attrs["src"] = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")
                child.attrs["loading"] = "lazy"
    body = markdown.renderer.render(tokens, markdown.options, {})
    body = body.replace("<table", '<div class="scroll"><table').replace("</table>", "</table></div>")
    links = "".join(f'<a href="#{name}">{html.escape(heading)}</a>' for name, heading in contents)
    return PAGE.format(title=html.escape(title), style=STYLE, links=links, body=body)


def _add_anchors(tokens: Sequence[Token]) -> list[tuple[str, str]]:
    """Give second-level headings an anchor; returns anchors and headings."""
    contents = []
    for heading, text in pairwise(tokens):
        if heading.type == "heading_open" and heading.tag == "h2":
            name = re.sub(r"\W+", "-", text.content.lower()).strip("-")
            heading.attrs["id"] = name
            contents.append((name, text.content))
    return contents


def _mark_cells(tokens: Sequence[Token]) -> None:
    """Mark tables with a verdict column: they become cards on narrow screens, with coloured verdicts."""
    table_open, head, column = tokens[0], list[str](), 0
    for token, following in pairwise(tokens):
        if token.type == "table_open":
            table_open, head = token, []
        elif token.type == "th_open":
            head.append(following.content)
            if following.content == "Verdict":
                table_open.attrs["class"] = "claims"
        elif token.type == "tr_open":
            column = 0
        elif token.type == "td_open":
            if table_open.attrs.get("class") == "claims":
                token.attrs["data-column"] = head[column]
                if column == 0:
                    token.attrs["class"] = "verdict " + following.content[2:].replace(" ", "-")
            column += 1


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<nav>{links}</nav>
<main>
{body}</main>
</body>
</html>
"""

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #5c636b; --line: #d9dde2; --paper: #ffffff; --shade: #f4f6f8;
  --link: #0b5cad; --good: #00694d; --part: #7a5200; --bad: #a63300; --none: #5c636b; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --soft: #a0a8b1; --line: #3a4047; --paper: #16181b; --shade: #1f2327;
    --link: #7fb8f0; --good: #4fc9a0; --part: #e8b04a; --bad: #ff8a5c; --none: #a0a8b1; }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
nav { position: sticky; top: 0; display: flex; gap: 1.2rem; overflow-x: auto; scrollbar-width: none;
  padding: .6rem 1.2rem;
  background: var(--paper); border-bottom: 1px solid var(--line); font-size: .875rem; white-space: nowrap; z-index: 1; }
a { color: var(--link); text-decoration: none; }
a:hover { text-decoration: underline; }
main { max-width: 76rem; margin: 0 auto; padding: 1rem 1.2rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.25; margin: 1.2rem 0; }
h2 { font-size: 1.4rem; margin: 2.8rem 0 .8rem; scroll-margin-top: 3.2rem; }
h3 { font-size: 1.1rem; margin: 2.4rem 0 .6rem; }
p, ul { max-width: 50rem; }
li { margin: .3rem 0; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .8rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { background: var(--shade); font-weight: 600; white-space: nowrap; }
td:first-child { white-space: nowrap; }
table.claims { width: 100%; font-size: .85rem; line-height: 1.45; }
table.claims td:nth-child(2) { min-width: 10rem; }
table.claims td:nth-child(n+3) { min-width: 13rem; }
table.claims em { color: var(--soft); }
.verdict { font-weight: 600; }
.holds { color: var(--good); }
.holds-in-part { color: var(--part); }
.does-not-hold { color: var(--bad); }
.not-measured { color: var(--none); }
img { display: block; width: 100%; max-width: 60rem; height: auto; background: #ffffff; border-radius: 6px; }
h3 + p { max-width: 60rem; }
p > em:only-child { color: var(--soft); font-style: normal; font-size: .9rem; }
@media (max-width: 760px) {
  h1 { font-size: 1.5rem; }
  th, td { padding: .35rem .5rem; }
  table.claims, table.claims tbody, table.claims tr, table.claims td { display: block; }
  table.claims thead { display: none; }
  table.claims tr { border: 1px solid var(--line); border-radius: 8px; margin: 0 0 1rem; padding: .5rem .8rem; }
  table.claims td { border: 0; padding: .25rem 0; min-width: 0; white-space: normal; }
  table.claims td:nth-child(n+3)::before { content: attr(data-column) ": "; color: var(--soft); font-weight: 600; }
}
@media print { nav { display: none; } img { break-inside: avoid; } }
"""
