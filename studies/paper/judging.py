"""How claims are judged: evidence looked up, cases that pass or do not, and the words that say so.

A claim is a number of cases: mostly one for each setting that it speaks of and each replicate. It holds if nearly all
of them pass, and does not hold if fewer than half do. A case without the inversions that it needs, because they
diverged, is left out and counted.
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
from studies.paper.findings import MODELS, Cell, Findings, ratio_name

Array = NDArray[Any]
Verdict = Literal["holds", "holds in part", "does not hold", "not measured"]
Source = Literal["paper", "ours"]
VERDICTS: tuple[Verdict, ...] = ("holds", "holds in part", "does not hold", "not measured")

NEARLY_ALL = 0.95
"""The share of cases from which on a claim holds."""
HALF = 0.5
"""The share of cases from which on it holds in part."""


class Claim(NamedTuple):
    """A statement, by what it was judged, and what was found; `measured` is Markdown."""

    title: str
    section: str
    says: str
    criterion: str
    measured: str
    verdict: Verdict
    source: Source


class Case(NamedTuple):
    """One test of a claim: its group, where it was made, and whether it was passed; None if it could not be made."""

    group: str
    where: str
    replicate: int
    passed: bool | None


def judge(cases: Iterable[Case], nearly_all: float = NEARLY_ALL) -> Verdict:
    """By the share of the cases that pass."""
    passed = [case.passed for case in cases if case.passed is not None]
    if not passed:
        return "not measured"
    share = sum(passed) / len(passed)
    return "holds" if share >= nearly_all else "holds in part" if share >= HALF else "does not hold"


def tally(cases: Sequence[Case], nearly_all: float = NEARLY_ALL) -> str:
    """How many cases pass, in all, by group and by replicate, and where the exceptions are."""
    measured = [case for case in cases if case.passed is not None]
    words = []
    if measured:
        words.append(f"**{_count(measured)}** {'case' if len(measured) == 1 else 'cases'}.")
        groups: dict[str, list[Case]] = {}
        for case in measured:
            groups.setdefault(case.group, []).append(case)
        if len(groups) == 1:
            words[0] = words[0].removesuffix(".") + f"{_exceptions(measured)}."
        elif not all(case.passed for case in measured):
            parts = [f"{name}: {_count(own)}{_exceptions(own)}" for name, own in groups.items()]
            words.append(f"{_sentence('; '.join(parts))}.")
        replicates = sorted({case.replicate for case in measured})
        if len(replicates) > 1:
            verdicts = [judge([c for c in measured if c.replicate == r], nearly_all) for r in replicates]
            words.append(f"Holds in {verdicts.count('holds')} of {len(replicates)} replicates.")
    if len(measured) < len(cases):
        words.append(f"Could not be measured: {len(cases) - len(measured)} of {len(cases)} cases.")
    return " ".join(words)


def _sentence(words: str) -> str:
    """With a capital letter, unless it begins with a symbol such as a₁₂."""
    return words[0].upper() + words[1:] if words[1:2].isalpha() else words


def _count(cases: Sequence[Case]) -> str:
    return f"{sum(bool(case.passed) for case in cases):,} of {len(cases):,}"


def _exceptions(cases: Sequence[Case], most: int = 4) -> str:
    """Where cases failed, unless all did or the places are many."""
    places = list(dict.fromkeys(case.where for case in cases if not case.passed))
    if not 0 < len(places) <= most or not any(case.passed for case in cases):
        return ""
    if all(place.startswith(AT) and ", " not in place for place in places):
        return f" (fails at {AT}{', '.join(place.removeprefix(AT) for place in places)})"
    return f" (fails at {'; '.join(places)})"


def less(a: float, b: float) -> bool | None:
    """a < b, or None if one of them is missing."""
    return None if math.isnan(a) or math.isnan(b) else a < b


def number(value: float) -> str:
    """Three digits, with thousands apart, or with a power of ten as people write it."""
    if math.isnan(value):
        return "–"
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.replace('-', '−')}·10{str(int(exponent)).translate(_SUPERSCRIPT)}"
    digits = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.3g}".removesuffix(".")
    return digits.replace("-", "−")


_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def span(values: Iterable[float]) -> str:
    """From the least to the greatest."""
    found = [value for value in values if not math.isnan(value)]
    if not found:
        return "–"
    low, high = number(min(found)), number(max(found))
    return low if low == high else f"{low} to {high}"


def percent(values: Iterable[float | bool | None]) -> str:
    """The mean of shares."""
    found = [float(value) for value in values if value is not None and not math.isnan(value)]
    return f"{100 * sum(found) / len(found):.3g} %" if found else "–"


def median(values: Iterable[float]) -> float:
    found = [value for value in values if not math.isnan(value)]
    return float(np.median(found)) if found else math.nan


# --- what there is to go by ------------------------------------------------------------------------------------------
class Evidence:
    """The findings, arranged for looking things up; what is missing is NaN or None."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.models = findings.models
        self.ratios = findings.ratios
        self.orders = findings.orders
        self.replicates = range(len(findings.worlds))

    @cached_property
    def winners(self) -> dict[tuple[Cell, int], dict[str, Any]]:
        rows: list[dict[str, Any]] = self.findings.winners.to_dict("records")  # type: ignore[assignment]
        return {(Cell(row["model"], int(row["orders"]), row["ratio"]), int(row["replicate"])): row for row in rows}

    @cached_property
    def variance(self) -> list[float]:
        """Of the states in each replicate: the MSE of the best constant guess."""
        return [float(world.states.var(0, correction=0).mean()) for world in self.findings.worlds]

    @cached_property
    def raw(self) -> list[float]:
        """The MSE of the observations in each replicate."""
        return [float((world.observations - world.states).square().mean()) for world in self.findings.worlds]

    def value(self, cell: Cell, replicate: int, column: str) -> float:
        """A number of a cell's winner."""
        row = self.winners.get((cell, replicate))
        return math.nan if row is None else float(row.get(column, math.nan))

    def values(self, model: str, orders: int, column: str) -> list[float]:
        """Of all winners of a model with these orders."""
        return [self.value(cell, r, column) for cell, r in self.each([model], [orders])]

    def each(
        self, models: Iterable[str] = MODELS, orders: Iterable[int] = (2, 3), ratios: Iterable[float] | None = None
    ) -> Iterator[tuple[Cell, int]]:
        """Cells and replicates, whether or not they have a winner; orders and models that were not run are left out."""
        for model in models:
            for order in orders:
                for ratio in self.ratios if ratios is None else ratios:
                    for replicate in self.replicates:
                        if model in self.models and order in self.orders and ratio in self.ratios:
                            yield Cell(model, order, ratio), replicate

    def pairs(self, models: Iterable[str] = MODELS) -> Iterator[tuple[Cell, Cell, int]]:
        """The cells with two and three orders of each model, ratio and replicate."""
        if {2, 3} <= set(self.orders):
            for cell, replicate in self.each(models, [2]):
                yield cell, cell._replace(orders=3), replicate

    def steps(self, ratios: Sequence[float] | None = None) -> list[tuple[float, float]]:
        """Each ratio and the next higher one."""
        wanted = [ratio for ratio in self.ratios if ratios is None or ratio in ratios]
        return list(pairwise(wanted))

    def slow(self, cell: Cell, replicate: int, node: str, quantity: str) -> Array | None:
        """A slow belief of a cell's winner over time; (T, channels)."""
        result = self.findings.slow.get(cell)
        having = [r for r in self.replicates if (cell, r) in self.winners]
        if result is None or replicate not in having:
            return None
        values: Array = result.get(node, quantity)[having.index(replicate)]
        return values

    def trace(self, cell: Cell) -> Result | None:
        """The winner of the first replicate at every observation."""
        return self.findings.traces.get(cell)


AT = "C = "


def at(ratio: float) -> str:
    return AT + ratio_name(ratio)


def step_name(low: float, high: float) -> str:
    return f"{AT}{ratio_name(low)} → {ratio_name(high)}"


def with_orders(cell: Cell) -> str:
    return f"{MODELS[cell.model]}, {cell.orders} orders"


def excursion(evidence: Evidence, cell: Cell, replicate: int, node: str) -> float:
    """How far a belief's mean gets from where it was first recorded, at most over time and channels."""
    mean = evidence.slow(cell, replicate, node, "mean")
    return math.nan if mean is None else float(np.abs(mean - mean[0]).max())


def paper_claim(title: str, section: str, says: str, criterion: str, cases: Sequence[Case], extra: str = "") -> Claim:
    return Claim(title, section, says, criterion, f"{tally(cases)} {extra}".strip(), judge(cases), "paper")


def our_claim(
    title: str, says: str, criterion: str, cases: Sequence[Case], extra: str = "", nearly_all: float = NEARLY_ALL
) -> Claim:
    measured = f"{tally(cases, nearly_all)} {extra}".strip()
    return Claim(title, "not in the paper", says, criterion, measured, judge(cases, nearly_all), "ours")
