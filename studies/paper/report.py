"""Report of the paper's study: Markdown with figures beside it, and one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pcnet.results.result import package_version
from studies.paper.checks import HALF, NEARLY_ALL, VERDICTS, Claim, Verdict
from studies.paper.design import MODELS, NOISES, SCENARIOS, SETTINGS, Cell, ratio_name
from studies.paper.results import StudyResults
from studies.reporting import Picture, escape, figure_links, figure_sections, number, render_html, table, write_files

TITLE = "Online Generalised Predictive Coding: reproduction of the study"
MARKS = dict(zip(VERDICTS, ("✓", "◐", "✗", "–"), strict=True))
PHRASES: dict[Verdict, tuple[str, str]] = {
    "holds": ("holds", "hold"),
    "holds in part": ("holds in part", "hold in part"),
    "does not hold": ("does not hold", "do not hold"),
    "not measured": ("could not be measured", "could not be measured"),
}
"""Singular and plural of each verdict."""
CONVENTIONS = {"authors": "as in the authors' program", "paper": "as in the paper"}
GRIDS = {
    "paper": "the paper's tuning parameters",
    "full": "the paper's tuning parameters and prior standard deviations of the log-precisions",
    "small": "one setting of the paper's tuning parameters",
}
SYMBOLS = {
    "kappa": "κ",
    "every": "interval between updates",
    "beta_lambda": "β_Λ",
    "beta_theta": "β_θ",
    "sd_lambda_x": "σ_λx",
    "sd_lambda_y": "σ_λy",
}
MAX_LISTED = 20
"""Up to this many diverged inversions are listed one by one."""


class Report(NamedTuple):
    """Files of a report."""

    markdown: Path
    html: Path


def write(results: StudyResults, claims: Sequence[Claim], figures: Sequence[Picture], folder: str | Path) -> Report:
    """Write report.md, which links to the figures, and report.html, which contains them."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    links = figure_links(figures, folder)
    text = compose(results, claims, figures, list(links))
    report = Report(folder / "report.md", folder / "report.html")
    write_files({report.markdown: text, report.html: render_html(text, links, TITLE)})
    return report


def compose(results: StudyResults, claims: Sequence[Claim], figures: Sequence[Picture], links: Sequence[str]) -> str:
    """The report as Markdown; links: relative paths of the figures."""
    parts = [
        f"# {TITLE}",
        "Two models track a noisy ecosystem of three populations online: a generalised Lotka–Volterra (GLV) model, "
        "which has the form of the ecosystem, and a Lorenz model, which has a different form. For every model, number "
        "of orders of motion and prior precision ratio C, the settings with the lowest free action are reported.",
        "## Summary",
        _headline(results, claims),
        "## Design",
        _design(results),
        "## Claims of the paper",
        "Each claim was tested by a criterion in a number of cases, mostly one per condition that it covers and "
        f"replicate. It holds if at least {100 * NEARLY_ALL:g} % of the cases pass (some criteria require another "
        f"share), holds in part if at least {100 * HALF:g} % pass, and otherwise does not hold. The thresholds are our "
        "choice; the measured numbers allow others.",
        _claims(claims, "paper", "The paper states"),
        "## Statements that the paper does not make",
        _claims(claims, "ours", "Statement"),
        "## Errors",
        f"Mean squared error of the inferred states of the selected models{_averaged(results, 'geometric mean')}. "
        f"For comparison: variance of the states {number(results.state_variance)}, raw observations "
        f"{number(results.raw_mse)}.",
        _by_ratio(results, "x.mse", geometric=True),
        "## Free action",
        f"In thousands of nats, of the selected models{_averaged(results, 'mean')}.",
        _by_ratio(results, "free_action", geometric=False, unit=1000),
        "## Selected settings",
        _settings_note(results),
        _selected(results),
        "## Figures",
    ]
    parts += figure_sections(figures, links)
    parts += ["## Speed", _speed(results), "## Diverged inversions", _diverged(results)]
    return "\n\n".join(parts) + "\n"


def _design(results: StudyResults) -> str:
    replicates, speed = len(results.realisations), results.speed
    ratios = ", ".join(ratio_name(ratio) for ratio in results.ratios)
    rows = [
        ("Process", "generalised Lotka–Volterra with three populations"),
        ("Noise", NOISES.get(results.data, escape(results.data))),
        ("Models", " and ".join(f"{MODELS[m]} ({SCENARIOS[m]})" for m in results.models)),
        ("Orders of motion", " and ".join(str(orders) for orders in results.orders)),
        ("Prior precision ratios C", ratios),
        ("Conventions", CONVENTIONS.get(results.conventions, escape(results.conventions))),
        ("Grid", GRIDS.get(results.grid, escape(results.grid))),
        ("Replicates", f"{replicates}, with independent noise" if replicates > 1 else "1"),
        ("Observations", f"{speed.observations:,} per inversion"),
        ("Inversions", f"{len(results.table):,}"),
        ("pcnet", escape(package_version())),
    ]
    return table(("Item", "Value"), rows, left=2)


def _headline(results: StudyResults, claims: Sequence[Claim]) -> str:
    papers, ours = ([c for c in claims if c.source == source] for source in ("paper", "ours"))
    errors = [f"{MODELS[m]}, {k} orders, {_range(results, m, k)}" for m in results.models for k in results.orders]
    diverged = int(results.table["diverged_at"].notna().sum())
    lines = [
        f"Of {len(papers)} claims of the paper, {_counts(papers)}.",
        f"Of {len(ours)} statements that the paper does not make, {_counts(ours)}.",
        f"MSE of the inferred states over all C: {'; '.join(errors)}. The variance of the states is "
        f"{number(results.state_variance)}, the MSE of the raw observations {number(results.raw_mse)}.",
        f"{diverged:,} of {len(results.table):,} inversions diverged.",
    ]
    failed = [escape(claim.title) for claim in papers if claim.verdict == "does not hold"]
    if failed:
        lines[0] = "\n".join([f"{lines[0]} These do not hold:", *(f"  - {title}" for title in failed)])
    return "\n".join(f"- {line}" for line in lines)


def _counts(claims: Sequence[Claim]) -> str:
    """Number of claims with each verdict."""
    verdicts = [claim.verdict for claim in claims]
    counts = [(verdicts.count(verdict), PHRASES[verdict]) for verdict in VERDICTS if verdict in verdicts]
    parts = [f"{count} {one if count == 1 else many}" for count, (one, many) in counts]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _range(results: StudyResults, model: str, orders: int) -> str:
    rows = results.winners
    errors = rows[(rows["model"] == model) & (rows["orders"] == orders)]["x.mse"]
    return (
        f"{number(errors.min())} to {number(errors.max())}" if len(errors) else "none, because all inversions diverged"
    )


def _claims(claims: Sequence[Claim], source: str, heading: str) -> str:
    head = ("Verdict", "Claim", heading, "Criterion", "Measured")
    rows = [
        (
            f"{MARKS[claim.verdict]} {claim.verdict}",
            f"**{escape(claim.title)}**",
            escape(claim.statement) + (f" *({escape(claim.section)})*" if source == "paper" else ""),
            escape(claim.criterion),
            claim.measured.replace("|", "\\|"),
        )
        for claim in claims
        if claim.source == source
    ]
    return table(head, rows, left=len(head))


def _averaged(results: StudyResults, average: str) -> str:
    count = len(results.realisations)
    return f", {average} over {count} replicates" if count > 1 else ""


def _by_ratio(results: StudyResults, column: str, *, geometric: bool, unit: float = 1.0) -> str:
    rows = []
    for m in results.models:
        for k in results.orders:
            own = results.winners[(results.winners["model"] == m) & (results.winners["orders"] == k)]
            cells = [own[own["ratio"] == ratio][column].to_numpy(dtype=float) for ratio in results.ratios]
            rows.append((f"{MODELS[m]}, {k} orders", *(_average(values / unit, geometric) for values in cells)))
    return table(("C", *(ratio_name(ratio) for ratio in results.ratios)), rows)


def _average(values: np.ndarray[Any, Any], geometric: bool) -> str:
    if not len(values):
        return "diverged"
    return number(float(np.exp(np.log(values).mean()) if geometric else values.mean()))


def _settings_note(results: StudyResults) -> str:
    text = "Settings with the lowest free action for each model, order and C"
    count = len(results.realisations)
    if count == 1:
        return text + "."
    return f"{text} in the first replicate, and the number of replicates (of {count}) in which they are the same."


def _selected(results: StudyResults) -> str:
    several = len(results.realisations) > 1
    varied = [name for name in SETTINGS if results.table[name].nunique() > 1] or list(SETTINGS[:1])
    head = ["Model", *(SYMBOLS[name] for name in varied), "MSE", "free action (thousands of nats)"]
    rows = []
    for cell in results.cells:
        own = results.winners
        own = own[(own["model"] == cell.model) & (own["orders"] == cell.orders) & (own["ratio"] == cell.ratio)]
        first = own[own["replicate"] == 0].to_dict("records")
        if not first:
            rows.append([str(cell), *("diverged" for _ in head[1:]), *(["–"] if several else [])])
            continue
        best = first[0]
        same = (own[varied] == [best[name] for name in varied]).all(axis=1).sum()
        numbers = [f"{best[name]:g}" for name in varied] + [number(best["x.mse"]), number(best["free_action"] / 1000)]
        rows.append([str(cell), *numbers, *([str(same)] if several else [])])
    return table([escape(name) for name in [*head, *(["same in"] if several else [])]], rows)


def _speed(results: StudyResults) -> str:
    speed = results.speed
    rows = [
        ("Inversions × observations", f"{speed.inversions:,} × {speed.observations:,}"),
        (
            "Time",
            f"{_duration(speed.seconds)} with {speed.processes} {'process' if speed.processes == 1 else 'processes'}",
        ),
        ("Rate of the sweep", f"{speed.rate:,.0f} inversions × observations per second"),
        ("Rate of single runs", f"{speed.single_rate:,.0f} inversions × observations per second"),
    ]
    if speed.single_rate > 0:
        rows.append(("Speed-up by batching", f"{speed.rate / speed.single_rate:,.3g} times"))
    if speed.peak_memory is not None:
        rows.append(("Peak memory", f"{speed.peak_memory / 2**20:,.0f} MiB"))
    return table(("Quantity", "Value"), rows, left=2)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _diverged(results: StudyResults) -> str:
    """Table of diverged inversions: all if there are few, else numbers and times by cell and node."""
    diverged = results.table[results.table["diverged_at"].notna()].sort_values("diverged_at")
    if diverged.empty:
        return "None."
    if len(diverged) <= MAX_LISTED:
        head = ("Model", *(SYMBOLS[name] for name in SETTINGS), "replicate", "observation", "node")
        rows = [
            (
                str(Cell(row["model"], row["orders"], row["ratio"])),
                *(f"{row[name]:g}" for name in SETTINGS),
                str(row["replicate"]),
                f"{row['diverged_at']:,.0f}",
                escape(row["diverged_node"]),
            )
            for row in diverged.to_dict("records")
        ]
        return table([escape(name) for name in head], rows)
    rows = []
    by = ["model", "orders", "ratio", "diverged_node"]
    for _, group in diverged.fillna({"diverged_node": "–"}).groupby(by):
        model, orders, ratio, node = (group[name].iloc[0] for name in by)
        when = group["diverged_at"]
        times = (f"{time:,.0f}" for time in (when.min(), when.median(), when.max()))
        rows.append((str(Cell(model, orders, ratio)), escape(node), f"{len(group):,}", *times))
    head = ("Model", "node", "inversions", "first at observation", "median", "last")
    return f"{len(diverged):,} in all.\n\n" + table(head, rows, left=2)
