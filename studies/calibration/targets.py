"""Targets, and whether they were reached: a number of pcnet's beside a limit, mostly a multiple of a rival's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from studies.calibration.design import CASES, RIGHT
from studies.calibration.findings import NEAR_JUMP, NEAR_X, NEAR_Y, Cell, Findings, Summary
from studies.calibration.measures import Share

Verdict = Literal["holds", "does not hold", "not measured"]
VERDICTS: tuple[Verdict, ...] = ("holds", "does not hold", "not measured")

SURE = (0.90, 0.99)
"""Between these the coverage of intervals of two standard deviations should be."""
MOST = 0.90
"""The share of seeds that should find the precisions, or follow a jump."""


class Rival(NamedTuple):
    """To whom pcnet is compared in a case, and how many times its errors are allowed."""

    method: str
    mse: float
    error: float | None


RIVALS = {
    "white": Rival("ekf", 1.3, 1.5),
    "smooth5": Rival("ekf matched", 1.2, 1.2),
    "smooth50": Rival("ekf matched", 1.0, None),
    "pendulum": Rival("ekf", 1.3, 1.5),
    "lorenz63": Rival("ekf", 1.3, 1.5),
}
"""Noise of the last two is white; they are judged as white noise is."""


class Judgement(NamedTuple):
    """A target, what was measured, and by how much it was missed ("" if it was not)."""

    case: str
    target: str
    measured: str
    verdict: Verdict
    missed: str


def judge(findings: Findings) -> list[Judgement]:
    """All targets of the cases that were run."""
    found: list[Judgement] = []
    for case in findings.cases:
        if case in RIVALS:
            found += _against_rival(findings, case)
        if case in ("white", "smooth5", "smooth50"):
            found += _precisions(findings, case)
        if not CASES[case].model.right:
            found += _better_than_raw(findings, case)
        if CASES[case].process.jump is not None:
            found += _jump(findings, case)
    return found


def _against_rival(findings: Findings, case: str) -> Iterator[Judgement]:
    """From every prior: from the right one alone it would be as if the noise were told."""
    for prior in CASES[case].priors:
        ours = findings.summary(Cell(case, "pcnet", prior.name))
        theirs = findings.summary(Cell(case, RIVALS[case].method, ""))
        yield from _beside(case, f"prior {prior.name}", ours, theirs)


def _beside(case: str, prior: str, ours: Summary, theirs: Summary) -> Iterator[Judgement]:
    rival = RIVALS[case]
    yield ratio(
        case,
        f"{prior}: MSE of the states at most {rival.mse:g} × that of the rival told the noise",
        ours,
        theirs,
        "mse",
        rival.mse,
    )
    if rival.error is not None:
        target = f"{prior}: largest error of a parameter at most {rival.error:g} × that of the rival"
        yield ratio(case, target, ours, theirs, "error", rival.error)
        for what in ("parameters", "states"):
            yield within(case, f"{prior}: coverage of {what} by ±2 sd", getattr(ours, f"coverage_{what}"))


def _precisions(findings: Findings, case: str) -> Iterator[Judgement]:
    for prior in CASES[case].priors:
        ours = findings.summary(Cell(case, "pcnet", prior.name))
        target = f"prior {prior.name}: precision of y within {100 * (NEAR_Y[1] - 1):.0f} % in {_percent(MOST)} of seeds"
        yield at_least(case, target, ours.near_y, f"; median {ours.precision_y:.3g} × the truth")
        target = f"prior {prior.name}: precision of x within a factor of {NEAR_X[1]:g} in {_percent(MOST)} of seeds"
        yield at_least(case, target, ours.near_x, f"; median {ours.precision_x:.3g} × the truth")


def _better_than_raw(findings: Findings, case: str) -> Iterator[Judgement]:
    for prior in CASES[case].priors:
        ours = findings.summary(Cell(case, "pcnet", prior.name))
        raw = ours._replace(mse=ours.raw, lost=0)
        yield ratio(case, f"prior {prior.name}: MSE below that of the raw observations", ours, raw, "mse", 1.0)


def _jump(findings: Findings, case: str) -> Iterator[Judgement]:
    ours = findings.summary(Cell(case, "pcnet", RIGHT[0].name)).followed
    theirs = findings.summary(Cell(case, "ekf random walk", "")).followed
    target = f"within {NEAR_JUMP:g} of the truth 2,000 observations after the jump in {_percent(MOST)} of seeds"
    yield at_least(case, target, ours, f"; the rival {share_words(theirs)}")


# --- kinds of targets ------------------------------------------------------------------------------------------------
def ratio(case: str, target: str, ours: Summary, theirs: Summary, name: str, limit: float) -> Judgement:
    """An error that may be at most so many times another's; no seed may diverge."""
    mine, other = float(getattr(ours, name)), float(getattr(theirs, name))
    times = mine / other if other else math.nan
    measured = f"{mine:.3g}, {times:.2f} × {other:.3g}"
    if ours.lost:
        return Judgement(case, target, measured, "does not hold", f"{ours.lost} of {ours.seeds} seeds diverged")
    if math.isnan(times):
        return Judgement(case, target, measured, "not measured", "")
    missed = (
        ""
        if times <= limit
        else f"{100 * (times / limit - 1):.0f} %"
        if times < 3 * limit
        else f"{times / limit:.3g} ×"
    )
    return Judgement(case, target, measured, "does not hold" if missed else "holds", missed)


def within(case: str, target: str, share: Share) -> Judgement:
    """A coverage between the two limits."""
    low, high = SURE
    off = max(low - share.value, share.value - high)
    target = f"{target} between {_percent(low)} and {_percent(high)}"
    return _share(case, target, share, off, "")


def at_least(case: str, target: str, share: Share, more: str = "") -> Judgement:
    """A share of seeds that is large enough."""
    return _share(case, target, share, MOST - share.value, more)


def _share(case: str, target: str, share: Share, off: float, more: str) -> Judgement:
    if math.isnan(share.value):
        return Judgement(case, target, "–", "not measured", "")
    missed = f"{100 * off:.1f} points" if off > 1e-12 else ""
    return Judgement(case, target, share_words(share) + more, "does not hold" if missed else "holds", missed)


def share_words(share: Share) -> str:
    """A share with its interval."""
    if math.isnan(share.value):
        return "–"
    return f"{100 * share.value:.1f} % ({100 * share.low:.0f}–{100 * share.high:.0f})"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
