"""The study as a report: Markdown beside its figures, and one self-contained HTML file."""

from __future__ import annotations

import base64
import html
import os
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from markdown_it import MarkdownIt
from markdown_it.token import Token

from pcnet.files import atomic_write
from pcnet.results.result import package_version
from studies.paper.figures import Picture
from studies.paper.findings import MODELS, NOISES, SCENARIOS, SETTINGS, Cell, Findings, ratio_name
from studies.paper.judging import HALF, NEARLY_ALL, VERDICTS, Claim, Verdict, number

TITLE = "Online Generalised Predictive Coding: the study run again"
MARKS = dict(zip(VERDICTS, ("✓", "◐", "✗", "–"), strict=True))
WORDS: dict[Verdict, tuple[str, str]] = {
    "holds": ("holds", "hold"),
    "holds in part": ("holds in part", "hold in part"),
    "does not hold": ("does not hold", "do not hold"),
    "not measured": ("could not be measured", "could not be measured"),
}
"""Each verdict about one claim and about several."""
CONVENTIONS = {"authors": "those of the authors' program", "paper": "those of the paper"}
GRIDS = {
    "paper": "the paper's tuning parameters",
    "full": "the paper's tuning parameters and prior standard deviations of the log-precisions",
    "small": "one setting of the paper's tuning parameters",
}
SYMBOLS = {
    "kappa": "κ",
    "every": "interval of updates",
    "beta_lambda": "β_Λ",
    "beta_theta": "β_θ",
    "sd_lambda_x": "σ_λx",
    "sd_lambda_y": "σ_λy",
}
LISTED = 20
"""Up to this many diverged inversions are listed one by one."""

Row = Sequence[str]


class Report(NamedTuple):
    """The two files of a report."""

    markdown: Path
    html: Path


def write(findings: Findings, claims: Sequence[Claim], figures: Sequence[Picture], folder: str | Path) -> Report:
    """Write report.md, which links to the figures, and report.html, which holds them."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    links = {Path(os.path.relpath(figure.path, folder)).as_posix(): figure.path for figure in figures}
    text = compose(findings, claims, figures, list(links))
    report = Report(folder / "report.md", folder / "report.html")
    for path, content in zip(report, (text, render(text, links)), strict=True):
        with atomic_write(path) as scratch:
            scratch.write_text(content, encoding="utf-8")
    return report


# --- Markdown --------------------------------------------------------------------------------------------------------
def compose(findings: Findings, claims: Sequence[Claim], figures: Sequence[Picture], links: Sequence[str]) -> str:
    """The whole report as Markdown; `links` lead to the figures."""
    parts = [
        f"# {TITLE}",
        "Two models track one noisy ecosystem of three populations, online: a generalised Lotka–Volterra (GLV) model, "
        "which has the form of the ecosystem, and a Lorenz model, which has not. For every model, number of orders of "
        "motion and prior precision ratio C, the settings with the lowest free action are selected and reported.",
        "## In short",
        _headline(findings, claims),
        "## What was run",
        _what_was_run(findings),
        "## What the paper says",
        "Each claim was put to the test by a criterion, in a number of cases: mostly one for each setting that it "
        f"speaks of and each replicate. It holds if at least {100 * NEARLY_ALL:g} % of the cases pass (some criteria "
        f"ask for another share), holds in part if at least {100 * HALF:g} % do, and else does not hold. The "
        "thresholds are choices; the numbers beside them allow for others.",
        _claims(claims, "paper", "The paper says"),
        "## What the paper does not ask",
        _claims(claims, "ours", "Statement"),
        "## Errors",
        f"Mean squared error of the inferred states of the selected models{_averaged(findings, 'geometric mean')}. "
        f"For comparison: variance of the states {number(findings.state_variance)}, raw observations "
        f"{number(findings.raw_mse)}.",
        _by_ratio(findings, "x.mse", geometric=True),
        "## Free action",
        f"In thousands of nats, of the selected models{_averaged(findings, 'mean')}.",
        _by_ratio(findings, "free_action", geometric=False, unit=1000),
        "## Selected settings",
        _settings_note(findings),
        _selected(findings),
        "## Figures",
    ]
    for figure, link in zip(figures, links, strict=True):
        parts += [f"### {plain(figure.title)}", f"![{plain(figure.title)}](<{link}>)", f"*{plain(figure.caption)}*"]
    parts += ["## Speed", _speed(findings), "## Diverged inversions", _diverged(findings)]
    return "\n\n".join(parts) + "\n"


def plain(text: object) -> str:
    """Text that Markdown shows as it is, in one line."""
    return re.sub(r"([\\`*_\[\]<>|&#~!])", r"\\\1", " ".join(str(text).split()))


def table(head: Row, rows: Iterable[Row], left: int = 1) -> str:
    """A table of Markdown cells; the first `left` columns and all of no numbers are aligned to the left."""
    lines = [head, [":---" if i < left else "---:" for i in range(len(head))], *rows]
    return "\n".join("| " + " | ".join(cell.replace("\n", " ") for cell in line) + " |" for line in lines)


def _what_was_run(findings: Findings) -> str:
    worlds, speed = len(findings.worlds), findings.speed
    ratios = ", ".join(ratio_name(ratio) for ratio in findings.ratios)
    rows = [
        ("Process", "generalised Lotka–Volterra with three populations"),
        ("Noise", NOISES.get(findings.data, plain(findings.data))),
        ("Models", " and ".join(f"{MODELS[m]} ({SCENARIOS[m]})" for m in findings.models)),
        ("Orders of motion", " and ".join(str(orders) for orders in findings.orders)),
        ("Prior precision ratios C", ratios),
        ("Conventions", CONVENTIONS.get(findings.conventions, plain(findings.conventions))),
        ("Grid", GRIDS.get(findings.grid, plain(findings.grid))),
        ("Replicates", f"{worlds}, each with noise of its own" if worlds > 1 else "1"),
        ("Observations", f"{speed.observations:,} for each inversion"),
        ("Inversions", f"{len(findings.table):,}"),
        ("pcnet", plain(package_version())),
    ]
    return table(("What", "How"), rows, left=2)


def _headline(findings: Findings, claims: Sequence[Claim]) -> str:
    papers, ours = ([c for c in claims if c.source == source] for source in ("paper", "ours"))
    errors = [f"{MODELS[m]}, {k} orders, {_range(findings, m, k)}" for m in findings.models for k in findings.orders]
    diverged = int(findings.table["diverged_at"].notna().sum())
    lines = [
        f"Of {len(papers)} claims of the paper {_counts(papers)}.",
        f"Of {len(ours)} statements that the paper does not make {_counts(ours)}.",
        f"MSE of the inferred states over all C: {'; '.join(errors)}. The states have a variance of "
        f"{number(findings.state_variance)}, the raw observations an MSE of {number(findings.raw_mse)}.",
        f"{diverged:,} of {len(findings.table):,} inversions diverged.",
    ]
    fails = [plain(claim.title) for claim in papers if claim.verdict == "does not hold"]
    if fails:
        lines[0] = "\n".join([f"{lines[0]} These do not:", *(f"  - {title}" for title in fails)])
    return "\n".join(f"- {line}" for line in lines)


def _counts(claims: Sequence[Claim]) -> str:
    """How many have which verdict, in words."""
    verdicts = [claim.verdict for claim in claims]
    counts = [(verdicts.count(verdict), WORDS[verdict]) for verdict in VERDICTS if verdict in verdicts]
    parts = [f"{count} {one if count == 1 else many}" for count, (one, many) in counts]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _range(findings: Findings, model: str, orders: int) -> str:
    rows = findings.winners
    errors = rows[(rows["model"] == model) & (rows["orders"] == orders)]["x.mse"]
    return f"{number(errors.min())} to {number(errors.max())}" if len(errors) else "none, for all inversions diverged"


def _claims(claims: Sequence[Claim], source: str, says: str) -> str:
    head = ("Verdict", "Claim", says, "Criterion", "Measured")
    rows = [
        (
            f"{MARKS[claim.verdict]} {claim.verdict}",
            f"**{plain(claim.title)}**",
            plain(claim.says) + (f" *({plain(claim.section)})*" if source == "paper" else ""),
            plain(claim.criterion),
            claim.measured.replace("|", "\\|"),
        )
        for claim in claims
        if claim.source == source
    ]
    return table(head, rows, left=len(head))


def _averaged(findings: Findings, average: str) -> str:
    count = len(findings.worlds)
    return f", {average} over {count} replicates" if count > 1 else ""


def _by_ratio(findings: Findings, column: str, *, geometric: bool, unit: float = 1.0) -> str:
    rows = []
    for m in findings.models:
        for k in findings.orders:
            own = findings.winners[(findings.winners["model"] == m) & (findings.winners["orders"] == k)]
            cells = [own[own["ratio"] == ratio][column].to_numpy(dtype=float) for ratio in findings.ratios]
            rows.append((f"{MODELS[m]}, {k} orders", *(_average(values / unit, geometric) for values in cells)))
    return table(("C", *(ratio_name(ratio) for ratio in findings.ratios)), rows)


def _average(values: np.ndarray[Any, Any], geometric: bool) -> str:
    if not len(values):
        return "diverged"
    return number(float(np.exp(np.log(values).mean()) if geometric else values.mean()))


def _settings_note(findings: Findings) -> str:
    words = "The settings with the lowest free action for each model, order and C"
    count = len(findings.worlds)
    if count == 1:
        return words + "."
    return f"{words}, in the first replicate, and in how many of {count} replicates they are the same."


def _selected(findings: Findings) -> str:
    several = len(findings.worlds) > 1
    varied = [name for name in SETTINGS if findings.table[name].nunique() > 1] or list(SETTINGS[:1])
    head = ["Model", *(SYMBOLS[name] for name in varied), "MSE", "free action (thousands of nats)"]
    rows = []
    for cell in findings.cells:
        own = findings.winners
        own = own[(own["model"] == cell.model) & (own["orders"] == cell.orders) & (own["ratio"] == cell.ratio)]
        first = own[own["replicate"] == 0].to_dict("records")
        if not first:
            rows.append([str(cell), *("diverged" for _ in head[1:]), *(["–"] if several else [])])
            continue
        best = first[0]
        alike = (own[varied] == [best[name] for name in varied]).all(axis=1).sum()
        numbers = [f"{best[name]:g}" for name in varied] + [number(best["x.mse"]), number(best["free_action"] / 1000)]
        rows.append([str(cell), *numbers, *([str(alike)] if several else [])])
    return table([plain(name) for name in [*head, *(["same in"] if several else [])]], rows)


def _speed(findings: Findings) -> str:
    speed = findings.speed
    rows = [
        ("Inversions × observations", f"{speed.inversions:,} × {speed.observations:,}"),
        (
            "Time",
            f"{_duration(speed.seconds)} with {speed.processes} {'process' if speed.processes == 1 else 'processes'}",
        ),
        ("Rate while sweeping", f"{speed.rate:,.0f} inversions × observations a second"),
        ("Rate of single runs one after another", f"{speed.single_rate:,.0f} inversions × observations a second"),
    ]
    if speed.single_rate > 0:
        rows.append(("Gain by running them together", f"{speed.rate / speed.single_rate:,.3g} times"))
    if speed.peak_memory is not None:
        rows.append(("Peak memory", f"{speed.peak_memory / 2**20:,.0f} MiB"))
    return table(("Quantity", "Value"), rows, left=2)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _diverged(findings: Findings) -> str:
    """All of them, if they are few; else how many at which node, and when."""
    lost = findings.table[findings.table["diverged_at"].notna()].sort_values("diverged_at")
    if lost.empty:
        return "None."
    if len(lost) <= LISTED:
        head = ("Model", *(SYMBOLS[name] for name in SETTINGS), "replicate", "observation", "node")
        rows = [
            (
                str(Cell(row["model"], row["orders"], row["ratio"])),
                *(f"{row[name]:g}" for name in SETTINGS),
                str(row["replicate"]),
                f"{row['diverged_at']:,.0f}",
                plain(row["diverged_node"]),
            )
            for row in lost.to_dict("records")
        ]
        return table([plain(name) for name in head], rows)
    rows = []
    by = ["model", "orders", "ratio", "diverged_node"]
    for _, group in lost.fillna({"diverged_node": "–"}).groupby(by):
        model, orders, ratio, node = (group[name].iloc[0] for name in by)
        when = group["diverged_at"]
        times = (f"{time:,.0f}" for time in (when.min(), when.median(), when.max()))
        rows.append((str(Cell(model, orders, ratio)), plain(node), f"{len(group):,}", *times))
    head = ("Model", "node", "inversions", "first at observation", "median", "last")
    return f"{len(lost):,} in all.\n\n" + table(head, rows, left=2)


# --- HTML ------------------------------------------------------------------------------------------------------------
def render(text: str, images: dict[str, Path], title: str = TITLE) -> str:
    """One HTML file that needs nothing else: images as data, style of its own, raw HTML shown as text."""
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(text)
    contents = _name_headings(tokens)
    _label_cells(tokens)
    for token in tokens:
        for child in token.children or []:
            if child.type == "image":
                path = images[str(child.attrs["src"])]
                child.attrs["src"] = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")
                child.attrs["loading"] = "lazy"
    body = markdown.renderer.render(tokens, markdown.options, {})
    body = body.replace("<table", '<div class="scroll"><table').replace("</table>", "</table></div>")
    links = "".join(f'<a href="#{name}">{html.escape(words)}</a>' for name, words in contents)
    return PAGE.format(title=html.escape(title), style=STYLE, links=links, body=body)


def _name_headings(tokens: Sequence[Token]) -> list[tuple[str, str]]:
    """Give the second headings names to link to, and return names and words."""
    contents = []
    for heading, words in pairwise(tokens):
        if heading.type == "heading_open" and heading.tag == "h2":
            name = re.sub(r"\W+", "-", words.content.lower()).strip("-")
            heading.attrs["id"] = name
            contents.append((name, words.content))
    return contents


def _label_cells(tokens: Sequence[Token]) -> None:
    """Tables of claims become cards on narrow screens: each cell knows its column, each verdict its colour."""
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
