"""Report of the calibration study: Markdown with figures beside it, one self-contained HTML file, and tables."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pcnet.results.result import package_version
from studies.calibration.design import CASES, DEVELOPMENT, HELD_OUT, RANDOM_WALK
from studies.calibration.measures import NOMINAL_COVERAGE, Share
from studies.calibration.results import Cell, StudyResults
from studies.calibration.targets import VERDICTS, Judgement, share_text
from studies.reporting import Picture, escape, figure_links, figure_sections, number, render_html, table, write_files

TITLE = "Calibration: errors and coverage of beliefs"
MARKS = dict(zip(VERDICTS, ("✓", "✗", "–"), strict=True))


class Report(NamedTuple):
    """Files of a report."""

    markdown: Path
    html: Path
    seeds: Path
    cells: Path


def write(results: StudyResults, judgements: Sequence[Judgement], pictures: Sequence[Picture], folder: Path) -> Report:
    """Write report.md, report.html, seeds.csv (one row per cell and seed) and cells.json (summaries of the cells)."""
    links = figure_links(pictures, folder)
    text = compose(results, judgements, pictures, list(links))
    report = Report(folder / "report.md", folder / "report.html", folder / "seeds.csv", folder / "cells.json")
    write_files(
        {
            report.markdown: text,
            report.html: render_html(text, links, TITLE),
            report.seeds: results.table.to_csv(index=False),
            report.cells: json.dumps(summaries(results, judgements), indent=1, ensure_ascii=False),
        }
    )
    return report


def compose(
    results: StudyResults, judgements: Sequence[Judgement], pictures: Sequence[Picture], links: Sequence[str]
) -> str:
    """The report as Markdown; links: relative paths of the figures."""
    parts = [
        f"# {TITLE}",
        _introduction(results),
        "## Summary",
        _summary(results, judgements),
        "## Targets",
        _targets(judgements),
        "## All cells",
        _explanation(),
    ]
    for case in results.cases:
        parts += [f"### {escape(CASES[case].title)}", _cells(results, case)]
    parts += ["## Figures", *figure_sections(pictures, links), "## Methods", _methods(results)]
    return "\n\n".join(parts) + "\n"


def _introduction(results: StudyResults) -> str:
    return (
        "Simulated processes are tracked by pcnet's recommended graph (`pcnet.graphs.adaptive_filter`), by the rules "
        "of the paper (ODEM), and by Kalman filters with the parameters in their state that are given the true noise. "
        "pcnet and ODEM start from a prior of the noise variances, which is right in some cells and wrong by a factor "
        f"of 50 in others. There are {len(results.seeds)} seeds per cell with {results.samples:,} observations each."
    )


def _summary(results: StudyResults, judgements: Sequence[Judgement]) -> str:
    lines = []
    for case in results.cases:
        own = [each for each in judgements if each.case == case]
        if not own:
            continue
        met = sum(each.verdict == "holds" for each in own)
        lines.append(f"- {escape(CASES[case].title)}: {met} of {len(own)} targets hold.")
        lines += [
            f"  - Missed by {each.missed}: {escape(each.target)} ({escape(each.measured)})."
            for each in own
            if each.verdict == "does not hold"
        ]
    lines += [
        f"- Skipped: {escape(cell.label)} on {escape(CASES[cell.case].title)}, {escape(why)}."
        for cell, why in results.skipped.items()
    ]
    lines += [
        f"- **Failed**: {escape(cell.label)} on {escape(CASES[cell.case].title)}, {escape(why)}"
        for cell, why in results.failed.items()
    ]
    return "\n".join(lines) or "These cases have no targets."


def _targets(judgements: Sequence[Judgement]) -> str:
    head = ("Verdict", "Case", "Target", "Measured", "Missed by")
    rows = [
        (
            f"{MARKS[each.verdict]} {each.verdict}",
            f"**{escape(CASES[each.case].title)}**",
            escape(each.target),
            escape(each.measured),
            escape(each.missed) or "–",
        )
        for each in judgements
    ]
    return table(head, rows, left=len(head))


def _explanation() -> str:
    return (
        "MSE is that of the states in the second half of the time; the column “whole run” covers all of it and has no "
        "target. Error is the largest final error of a parameter. Both are means over seeds. Coverage is the share of "
        f"true values within two standard deviations, nominally {100 * NOMINAL_COVERAGE:.1f} %, with Wilson's "
        "interval, counting one trial per seed. Priors are named by the factors by which the assumed variances of "
        "state noise (x) and observation noise (y) are wrong. Precisions are medians relative to the true ones, with "
        "the share of seeds that are close enough (y: 20 %, x: a factor of 2)."
    )


def _cells(results: StudyResults, case: str) -> str:
    jumps = CASES[case].process.jump is not None
    head = [
        "Method",
        "MSE",
        "MSE, whole run",
        "error",
        "coverage of parameters",
        "of states",
        "precision of y",
        "of x",
        "diverged",
    ]
    rows = []
    for cell in results.cells(case):
        summary = results.summary(cell)
        row = [
            escape(cell.label),
            number(summary.mse),
            number(summary.mse_whole),
            number(summary.error),
            _share(summary.coverage_parameters),
            _share(summary.coverage_states),
            _precision(summary.precision_y, summary.near_y),
            _precision(summary.precision_x, summary.near_x),
            str(summary.diverged),
        ]
        rows.append([*row, _share(summary.followed)] if jumps else row)
    raw = results.summary(results.cells(case)[0]).raw
    return (
        table([*head, "followed the jump"] if jumps else head, rows)
        + f"\n\nMSE of the raw observations: {number(raw)}."
    )


def _share(share: Share) -> str:
    return escape(share_text(share))


def _precision(ratio: float, near: Share) -> str:
    return "–" if math.isnan(near.value) else f"{number(ratio)}; {100 * near.value:.0f} %"


def _methods(results: StudyResults) -> str:
    first, last = results.seeds[0], results.seeds[-1]
    seeds = (
        f"{first:,} to {last:,}, held out: no method or setting was chosen with them"
        if results.held_out
        else f"{first:,} to {last:,}, which are **not** the held-out ones"
    )
    rows = [
        ("Seeds", seeds),
        ("Development", f"uses seeds from {DEVELOPMENT:,} on; those of the report start at {HELD_OUT:,}"),
        (
            "Noise",
            "constant over each step (zero-order hold); smooth noise is white noise convolved with a Gaussian kernel, "
            "whose width is given in samples",
        ),
        (
            "Information given to pcnet",
            "flow, prior of the parameters, smoothness of the noise, and a log-normal prior of its precision (sd 2) "
            "that is centred on the truth or wrong by the named factors",
        ),
        (
            "Matched noise",
            "white noise with the spectral density of the smooth noise: its variance × 2√π · kernel width in samples",
        ),
        ("Noise as states", "each smooth noise is a Markov process of order 4 in the state of the filter"),
        (
            "Random-walk parameters",
            f"sd {RANDOM_WALK:g} per observation, matched noise; a compromise between the best values for white and "
            "for smooth noise on development seeds",
        ),
        (
            "ODEM as in the paper",
            "with the settings of its study: three orders, smoothness 0.005, a slow update every 64 observations",
        ),
        ("Duration", duration(results)),
        ("pcnet", escape(package_version())),
    ]
    return table(("Item", "Description"), rows, left=2)


def duration(results: StudyResults) -> str:
    """How long this run took, and how many cells it did not have to run."""
    kept = f"; {results.kept} of {len(results.trials)} cells were kept from former runs" if results.kept else ""
    return f"{results.seconds / 60:.1f} min{kept}"


def summaries(results: StudyResults, judgements: Sequence[Judgement]) -> dict[str, object]:
    """Summaries of all cells and the targets as JSON data; unknown numbers are null."""

    def known(value: object) -> object:
        if isinstance(value, Share):
            return {name: known(each) for name, each in value._asdict().items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    def cell_data(cell: Cell) -> dict[str, object]:
        summary = {name: known(value) for name, value in results.summary(cell)._asdict().items()}
        return {**cell._asdict(), **summary, "seconds": round(results.trials[cell].seconds, 1)}

    return {
        "seeds": list(results.seeds),
        "held_out": results.held_out,
        "samples": results.samples,
        "cells": [cell_data(cell) for case in results.cases for cell in results.cells(case)],
        "skipped": [{**cell._asdict(), "why": why} for cell, why in results.skipped.items()],
        "failed": [{**cell._asdict(), "why": why} for cell, why in results.failed.items()],
        "targets": [each._asdict() for each in judgements],
    }
