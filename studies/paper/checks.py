"""Tests of claims: checks that pass or fail, verdicts, their wording, and lookups in the results.

A claim is tested by a number of checks, mostly one per condition that it covers and replicate. It holds if nearly all
checks pass, and does not hold if fewer than half do. Checks whose inversions diverged are left out and counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pcnet.results.result import Result
from studies.paper.design import MODELS, Cell, ratio_name
from studies.paper.results import StudyResults
from studies.reporting import number

Array = NDArray[Any]
Verdict = Literal["holds", "holds in part", "does not hold", "not measured"]
Source = Literal["paper", "ours"]
VERDICTS: tuple[Verdict, ...] = ("holds", "holds in part", "does not hold", "not measured")

NEARLY_ALL = 0.95
"""A claim holds if at least this share of its checks passes."""
HALF = 0.5
"""A claim holds in part if at least this share of its checks passes."""


class Claim(NamedTuple):
    """A tested statement: its source, criterion, measured outcome (Markdown) and verdict."""

    title: str
    section: str
    statement: str
    criterion: str
    measured: str
    verdict: Verdict
    source: Source


class Check(NamedTuple):
    """One check of a claim: its group and condition, and whether it passed; None if it could not be made."""

    group: str
    condition: str
    replicate: int
    passed: bool | None


def judge(checks: Iterable[Check], required: float = NEARLY_ALL) -> Verdict:
    """Verdict by the share of checks that pass; required: the share from which on a claim holds."""
    passed = [check.passed for check in checks if check.passed is not None]
    if not passed:
        return "not measured"
    share = sum(passed) / len(passed)
    return "holds" if share >= required else "holds in part" if share >= HALF else "does not hold"


def tally(checks: Sequence[Check], required: float = NEARLY_ALL) -> str:
    """Numbers of passed checks in total, by group and by replicate, and the conditions of the failed ones."""
    measured = [check for check in checks if check.passed is not None]
    sentences = []
    if measured:
        sentences.append(f"**{_count(measured)}** {'case' if len(measured) == 1 else 'cases'}.")
        groups: dict[str, list[Check]] = {}
        for check in measured:
            groups.setdefault(check.group, []).append(check)
        if len(groups) == 1:
            sentences[0] = sentences[0].removesuffix(".") + f"{_failures(measured)}."
        elif not all(check.passed for check in measured):
            parts = [f"{name}: {_count(own)}{_failures(own)}" for name, own in groups.items()]
            sentences.append(f"{_capitalised('; '.join(parts))}.")
        replicates = sorted({check.replicate for check in measured})
        if len(replicates) > 1:
            verdicts = [judge([c for c in measured if c.replicate == r], required) for r in replicates]
            sentences.append(f"Holds in {verdicts.count('holds')} of {len(replicates)} replicates.")
    if len(measured) < len(checks):
        sentences.append(f"Could not be measured: {len(checks) - len(measured)} of {len(checks)} cases.")
    return " ".join(sentences)


def _capitalised(text: str) -> str:
    """Text with a capital letter, unless it starts with a symbol such as a₁₂."""
    return text[0].upper() + text[1:] if text[1:2].isalpha() else text


def _count(checks: Sequence[Check]) -> str:
    return f"{sum(bool(check.passed) for check in checks):,} of {len(checks):,}"


def _failures(checks: Sequence[Check], most: int = 4) -> str:
    """Conditions of failed checks, unless all checks failed or the conditions are many."""
    conditions = list(dict.fromkeys(check.condition for check in checks if not check.passed))
    if not 0 < len(conditions) <= most or not any(check.passed for check in checks):
        return ""
    if all(condition.startswith(AT) and ", " not in condition for condition in conditions):
        return f" (fails at {AT}{', '.join(condition.removeprefix(AT) for condition in conditions)})"
    return f" (fails at {'; '.join(conditions)})"


def paper_claim(
    title: str, section: str, statement: str, criterion: str, checks: Sequence[Check], details: str = ""
) -> Claim:
    """A claim of the paper."""
    measured = f"{tally(checks)} {details}".strip()
    return Claim(title, section, statement, criterion, measured, judge(checks), "paper")


def our_claim(
    title: str,
    statement: str,
    criterion: str,
    checks: Sequence[Check],
    details: str = "",
    required: float = NEARLY_ALL,
) -> Claim:
    """A statement that the paper does not make."""
    measured = f"{tally(checks, required)} {details}".strip()
    return Claim(title, "not in the paper", statement, criterion, measured, judge(checks, required), "ours")


# --- numbers as text -------------------------------------------------------------------------------------------------
AT = "C = "


def at(ratio: float) -> str:
    return AT + ratio_name(ratio)


def step_name(low: float, high: float) -> str:
    return f"{AT}{ratio_name(low)} → {ratio_name(high)}"


def with_orders(cell: Cell) -> str:
    return f"{MODELS[cell.model]}, {cell.orders} orders"


def span(values: Iterable[float]) -> str:
    """Minimum to maximum."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "–"
    low, high = number(min(known)), number(max(known))
    return low if low == high else f"{low} to {high}"


def percent(values: Iterable[float | bool | None]) -> str:
    """Mean of shares as a percentage."""
    known = [float(value) for value in values if value is not None and not math.isnan(value)]
    return f"{100 * sum(known) / len(known):.3g} %" if known else "–"


def medians(values: dict[str, list[float]]) -> str:
    """Median of each list by name."""
    return ", ".join(f"{name} {number(median(own))}" for name, own in values.items()) or "–"


def median(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return float(np.median(known)) if known else math.nan


def less(a: float, b: float) -> bool | None:
    """a < b; None if one of them is NaN."""
    return None if math.isnan(a) or math.isnan(b) else a < b


# --- lookups ---------------------------------------------------------------------------------------------------------
class StudyView:
    """Lookups in the results of the study; missing values are NaN or None."""

    def __init__(self, results: StudyResults) -> None:
        self.results = results
        self.models, self.ratios, self.orders = results.models, results.ratios, results.orders
        self.replicates = range(len(results.realisations))
        self.variance, self.raw = results.state_variances, results.raw_mses

    @cached_property
    def winners(self) -> dict[tuple[Cell, int], dict[str, Any]]:
        rows: list[dict[str, Any]] = self.results.winners.to_dict("records")  # type: ignore[assignment]
        return {(Cell(row["model"], int(row["orders"]), row["ratio"]), int(row["replicate"])): row for row in rows}

    def value(self, cell: Cell, replicate: int, column: str) -> float:
        """Value of a column for the winner of a cell."""
        row = self.winners.get((cell, replicate))
        return math.nan if row is None else float(row.get(column, math.nan))

    def values(self, model: str, orders: int, column: str) -> list[float]:
        """Values of a column for all winners of a model with these orders."""
        return [self.value(cell, r, column) for cell, r in self.each([model], [orders])]

    def each(
        self, models: Iterable[str] = MODELS, orders: Iterable[int] = (2, 3), ratios: Iterable[float] | None = None
    ) -> Iterator[tuple[Cell, int]]:
        """Cells and replicates of the study, with or without a winner."""
        for model in models:
            for order in orders:
                for ratio in self.ratios if ratios is None else ratios:
                    for replicate in self.replicates:
                        if model in self.models and order in self.orders and ratio in self.ratios:
                            yield Cell(model, order, ratio), replicate

    def pairs(self, models: Iterable[str] = MODELS) -> Iterator[tuple[Cell, Cell, int]]:
        """Cells with two and three orders of each model, ratio and replicate."""
        if {2, 3} <= set(self.orders):
            for cell, replicate in self.each(models, [2]):
                yield cell, cell._replace(orders=3), replicate

    def steps(self, ratios: Sequence[float] | None = None) -> list[tuple[float, float]]:
        """Pairs of consecutive ratios."""
        return list(pairwise(ratio for ratio in self.ratios if ratios is None or ratio in ratios))

    def slow(self, cell: Cell, replicate: int, node: str, quantity: str) -> Array | None:
        """Slow belief of the winner of a cell over time; (T, channels)."""
        result = self.results.slow.get(cell)
        stored = [r for r in self.replicates if (cell, r) in self.winners]
        if result is None or replicate not in stored:
            return None
        values: Array = result.get(node, quantity)[stored.index(replicate)]
        return values

    def trace(self, cell: Cell) -> Result | None:
        """Full result of the winner of the first replicate."""
        return self.results.traces.get(cell)

    def excursion(self, cell: Cell, replicate: int, node: str) -> float:
        """Largest distance of a belief's mean from its first recorded value, over time and channels."""
        mean = self.slow(cell, replicate, node, "mean")
        return math.nan if mean is None else float(np.abs(mean - mean[0]).max())
