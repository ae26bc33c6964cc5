"""Targets of the study and whether they are met: limits for pcnet, mostly relative to a baseline."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from studies.calibration.design import CASES, RIGHT
from studies.calibration.measures import Share
from studies.calibration.results import NEAR_JUMP, NEAR_X, NEAR_Y, Cell, StudyResults, Summary

Verdict = Literal["holds", "does not hold", "not measured"]
VERDICTS: tuple[Verdict, ...] = ("holds", "does not hold", "not measured")

COVERAGE = (0.90, 0.99)
"""Target range for the coverage of intervals of two standard deviations."""
MOST = 0.90
"""Target share of seeds that learn the precisions, or follow a jump."""


class Baseline(NamedTuple):
    """Baseline of a case, and the largest allowed ratios of pcnet's errors to its errors."""

    method: str
    mse: float
    error: float | None


BASELINES = {
    "white": Baseline("ekf", 1.3, 1.5),
    "smooth5": Baseline("ekf matched", 1.2, 1.2),
    "smooth50": Baseline("ekf matched", 1.0, None),
    "pendulum": Baseline("ekf", 1.3, 1.5),
    "lorenz63": Baseline("ekf", 1.3, 1.5),
}
"""Baselines by case; the last two cases have white noise and the same limits as "white"."""


class Judgement(NamedTuple):
    """A target, the measured value, the verdict, and by how much the target was missed ("" if it holds)."""

    case: str
    target: str
    measured: str
    verdict: Verdict
    missed: str


def judge(results: StudyResults) -> list[Judgement]:
    """All targets of the cases that were run."""
    judgements: list[Judgement] = []
    for case in results.cases:
        if case in BASELINES:
            judgements += _against_baseline(results, case)
        if case in ("white", "smooth5", "smooth50"):
            judgements += _precisions(results, case)
        if not CASES[case].model.right:
            judgements += _better_than_raw(results, case)
        if CASES[case].process.jump is not None:
            judgements += _jump(results, case)
    return judgements


def _against_baseline(results: StudyResults, case: str) -> Iterator[Judgement]:
    """Targets from every prior, relative to the baseline."""
    for prior in CASES[case].priors:
        baseline = BASELINES[case]
        ours = results.summary(Cell(case, "pcnet", prior.name))
        theirs = results.summary(Cell(case, baseline.method, ""))
        target = f"prior {prior.name}: MSE of the states at most {baseline.mse:g} × that of the baseline"
        yield ratio(case, target, ours, theirs, "mse", baseline.mse)
        if baseline.error is not None:
            target = f"prior {prior.name}: largest parameter error at most {baseline.error:g} × that of the baseline"
            yield ratio(case, target, ours, theirs, "error", baseline.error)
            for what in ("parameters", "states"):
                target = f"prior {prior.name}: coverage of {what} by ±2 sd"
                yield within(case, target, getattr(ours, f"coverage_{what}"))


def _precisions(results: StudyResults, case: str) -> Iterator[Judgement]:
    for prior in CASES[case].priors:
        ours = results.summary(Cell(case, "pcnet", prior.name))
        target = f"prior {prior.name}: precision of y within {100 * (NEAR_Y[1] - 1):.0f} % in {_percent(MOST)} of seeds"
        yield at_least(case, target, ours.near_y, f"; median {ours.precision_y:.3g} × the truth")
        target = f"prior {prior.name}: precision of x within a factor of {NEAR_X[1]:g} in {_percent(MOST)} of seeds"
        yield at_least(case, target, ours.near_x, f"; median {ours.precision_x:.3g} × the truth")


def _better_than_raw(results: StudyResults, case: str) -> Iterator[Judgement]:
    for prior in CASES[case].priors:
        ours = results.summary(Cell(case, "pcnet", prior.name))
        raw = ours._replace(mse=ours.raw, diverged=0)
        yield ratio(case, f"prior {prior.name}: MSE below that of the raw observations", ours, raw, "mse", 1.0)


def _jump(results: StudyResults, case: str) -> Iterator[Judgement]:
    ours = results.summary(Cell(case, "pcnet", RIGHT[0].name)).followed
    theirs = results.summary(Cell(case, "ekf random walk", "")).followed
    target = f"within {NEAR_JUMP:g} of the truth 2,000 observations after the jump in {_percent(MOST)} of seeds"
    yield at_least(case, target, ours, f"; baseline {share_text(theirs)}")


# --- kinds of targets ------------------------------------------------------------------------------------------------
def ratio(case: str, target: str, ours: Summary, theirs: Summary, name: str, limit: float) -> Judgement:
    """Limit for the ratio of an error to that of a baseline; no seed may diverge."""
    mine, other = float(getattr(ours, name)), float(getattr(theirs, name))
    times = mine / other if other else math.nan
    measured = f"{mine:.3g}, {times:.2f} × {other:.3g}"
    if ours.diverged:
        return Judgement(case, target, measured, "does not hold", f"{ours.diverged} of {ours.seeds} seeds diverged")
    if math.isnan(times):
        return Judgement(case, target, measured, "not measured", "")
    missed = f"{100 * (times / limit - 1):.0f} %" if times < 3 * limit else f"{times / limit:.3g} ×"
    missed = "" if times <= limit else missed
    return Judgement(case, target, measured, "does not hold" if missed else "holds", missed)


def within(case: str, target: str, share: Share) -> Judgement:
    """Coverage within the target range."""
    low, high = COVERAGE
    off = max(low - share.value, share.value - high)
    target = f"{target} between {_percent(low)} and {_percent(high)}"
    return _share(case, target, share, off, "")


def at_least(case: str, target: str, share: Share, more: str = "") -> Judgement:
    """Share of seeds of at least MOST."""
    return _share(case, target, share, MOST - share.value, more)


def _share(case: str, target: str, share: Share, off: float, more: str) -> Judgement:
    if math.isnan(share.value):
        return Judgement(case, target, "–", "not measured", "")
    missed = f"{100 * off:.1f} points" if off > 1e-12 else ""
    return Judgement(case, target, share_text(share) + more, "does not hold" if missed else "holds", missed)


def share_text(share: Share) -> str:
    """A share with its interval as text."""
    if math.isnan(share.value):
        return "–"
    return f"{100 * share.value:.1f} % ({100 * share.low:.0f}–{100 * share.high:.0f})"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
