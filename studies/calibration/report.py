"""The study as a report: Markdown beside its figures, one self-contained HTML file, and tables as CSV and JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pcnet.files import atomic_write
from pcnet.results.result import package_version
from studies.calibration.design import CASES, DEVELOPMENT, HELD_OUT, RANDOM_WALK
from studies.calibration.figures import cell_name
from studies.calibration.findings import Cell, Findings
from studies.calibration.judging import VERDICTS, Judgement, share_words
from studies.calibration.measures import EXACT, Share
from studies.paper.figures import Picture
from studies.paper.judging import number
from studies.paper.report import plain, render, table

TITLE = "Calibration: are beliefs right, and as sure as they should be?"
MARKS = dict(zip(VERDICTS, ("✓", "✗", "–"), strict=True))


class Report(NamedTuple):
    """The files of a report."""

    markdown: Path
    html: Path
    seeds: Path
    cells: Path


def write(findings: Findings, judgements: Sequence[Judgement], pictures: Sequence[Picture], folder: Path) -> Report:
    """Write report.md, report.html, seeds.csv (a row a cell and seed) and cells.json (what each cell comes to)."""
    links = {Path(os.path.relpath(picture.path, folder)).as_posix(): picture.path for picture in pictures}
    text = compose(findings, judgements, pictures, list(links))
    report = Report(folder / "report.md", folder / "report.html", folder / "seeds.csv", folder / "cells.json")
    contents = (
        text,
        render(text, links, TITLE),
        findings.table.to_csv(index=False),
        json.dumps(cells(findings, judgements), indent=1, ensure_ascii=False),
    )
    for path, content in zip(report, contents, strict=True):
        with atomic_write(path) as scratch:
            scratch.write_text(content, encoding="utf-8")
    return report


def compose(
    findings: Findings, judgements: Sequence[Judgement], pictures: Sequence[Picture], links: Sequence[str]
) -> str:
    """The whole report as Markdown; `links` lead to the figures."""
    parts = [
        f"# {TITLE}",
        _opening(findings),
        "## In short",
        _short(findings, judgements),
        "## Targets",
        _targets(judgements),
    ]
    parts.append("## All cells")
    parts.append(_how_to_read())
    for case in findings.cases:
        parts += [f"### {plain(CASES[case].title)}", _cells(findings, case)]
    parts.append("## Figures")
    for picture, link in zip(pictures, links, strict=True):
        parts += [f"### {plain(picture.title)}", f"![{plain(picture.title)}](<{link}>)", f"*{plain(picture.caption)}*"]
    parts += ["## How it was done", _how(findings)]
    return "\n\n".join(parts) + "\n"


def _opening(findings: Findings) -> str:
    return (
        "Processes with a known truth are followed by pcnet's recommended graph (`pcnet.graphs.triple`), by the rules "
        "of the paper, and by Kalman filters with the parameters in their state told the true noise. The graph "
        "is told a prior of the noise's strength, which is right in some cells and wrong by a factor of 50 in others. "
        f"{len(findings.seeds)} seeds a cell, {findings.samples:,} observations each."
    )


def _short(findings: Findings, judgements: Sequence[Judgement]) -> str:
    lines = []
    for case in findings.cases:
        own = [each for each in judgements if each.case == case]
        if not own:
            continue
        held = sum(each.verdict == "holds" for each in own)
        lines.append(f"- {plain(CASES[case].title)}: {held} of {len(own)} targets hold.")
        lines += [
            f"  - Missed by {each.missed}: {plain(each.target)} ({plain(each.measured)})."
            for each in own
            if each.verdict == "does not hold"
        ]
    lines += [
        f"- Skipped: {plain(cell_name(cell))} on {plain(CASES[cell.case].title)}, {plain(why)}."
        for cell, why in findings.skipped.items()
    ]
    return "\n".join(lines) or "No targets belong to these cases."


def _targets(judgements: Sequence[Judgement]) -> str:
    head = ("Verdict", "Case", "Target", "Measured", "Missed by")
    rows = [
        (
            f"{MARKS[each.verdict]} {each.verdict}",
            f"**{plain(CASES[each.case].title)}**",
            plain(each.target),
            plain(each.measured),
            plain(each.missed) or "–",
        )
        for each in judgements
    ]
    return table(head, rows, left=len(head))


def _how_to_read() -> str:
    return (
        "MSE is that of the states in the second half of the time and, not judged, in all of it; error is the largest "
        "of a parameter at the end; all are means over seeds. Coverage is the share of truths within two standard "
        "deviations, "
        f"{100 * EXACT:.1f} % if all is right, with Wilson's interval for as many trials as there are seeds. "
        "Priors are named by what they take the variances of the noises for: of states (x) and observations (y). "
        "Precisions are medians in units of the true ones, with the share of seeds that are near enough (y 20 %, x a "
        "factor of 2)."
    )


def _cells(findings: Findings, case: str) -> str:
    jumps = CASES[case].process.jump is not None
    head = [
        "Method",
        "MSE",
        "in all",
        "error",
        "coverage of parameters",
        "of states",
        "precision of y",
        "of x",
        "diverged",
    ]
    rows = []
    for cell in findings.cells(case):
        found = findings.summary(cell)
        row = [
            plain(cell_name(cell)),
            number(found.mse),
            number(found.mse_whole),
            number(found.error),
            _words(found.coverage_parameters),
            _words(found.coverage_states),
            _precision(found.precision_y, found.near_y),
            _precision(found.precision_x, found.near_x),
            str(found.lost),
        ]
        rows.append([*row, _words(found.followed)] if jumps else row)
    raw = findings.summary(findings.cells(case)[0]).raw
    return table([*head, "followed the jump"] if jumps else head, rows) + f"\n\nRaw observations: {number(raw)}."


def _words(share: Share) -> str:
    return plain(share_words(share))


def _precision(ratio: float, near: Share) -> str:
    return "–" if math.isnan(near.value) else f"{number(ratio)}; {100 * near.value:.0f} %"


def _how(findings: Findings) -> str:
    first, last = findings.seeds[0], findings.seeds[-1]
    seeds = (
        f"{first:,} to {last:,}, held out: nothing was chosen by looking at them"
        if findings.held_out
        else f"{first:,} to {last:,}, which are **not** the held-out ones"
    )
    rows = [
        ("Seeds", seeds),
        (
            "Development",
            f"rules and settings are tried out on seeds from {DEVELOPMENT:,} on; the report's begin at {HELD_OUT:,}",
        ),
        ("Noise", "held over each step; smooth noise is white noise through a Gaussian kernel of so many samples"),
        (
            "What pcnet is told",
            "flow, prior of the parameters, smoothness of the noise, and a log-normal prior of its precision (sd 2) "
            "around the truth or, by the factors that a prior is named after, far from it. The "
            "prior called right is a favour",
        ),
        (
            "Matched",
            "white noise with the smooth noise's spectral density: its variance × 2√π · kernel width in samples",
        ),
        ("Noise as states", "each smooth noise is a Markov process of order 4 in the filter's state"),
        (
            "Parameters that walk",
            f"sd {RANDOM_WALK:g} an observation, matched noise; between the best for white and for smooth noise "
            "on development seeds",
        ),
        (
            "The paper's rules",
            "with the settings of its study: three orders, smoothness 0.005, a slow step every 64 observations",
        ),
        ("Time", f"{findings.seconds / 60:.0f} min"),
        ("pcnet", plain(package_version())),
    ]
    return table(("What", "How"), rows, left=2)


def cells(findings: Findings, judgements: Sequence[Judgement]) -> dict[str, object]:
    """What each cell comes to, and the targets, for other programs; numbers that are not known are null."""

    def known(value: object) -> object:
        if isinstance(value, Share):
            return {name: known(each) for name, each in value._asdict().items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    def of(cell: Cell) -> dict[str, object]:
        found = findings.summary(cell)._asdict()
        seconds = findings.outcomes[cell].seconds
        return {**cell._asdict(), **{name: known(value) for name, value in found.items()}, "seconds": round(seconds, 1)}

    return {
        "seeds": list(findings.seeds),
        "held_out": findings.held_out,
        "samples": findings.samples,
        "cells": [of(cell) for case in findings.cases for cell in findings.cells(case)],
        "skipped": [{**cell._asdict(), "why": why} for cell, why in findings.skipped.items()],
        "targets": [each._asdict() for each in judgements],
    }
