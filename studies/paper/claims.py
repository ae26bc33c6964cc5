"""Claims of the paper about its results, and statements that it does not make, each with a test."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from pcnet.graphs.odem import MODELS as PRIORS
from pcnet.simulate import GLV_OBSERVATION_SD, GLV_PARAMETERS, GLV_STATE_SD
from studies.paper.checks import (
    Array,
    Check,
    Claim,
    StudyView,
    at,
    less,
    median,
    medians,
    our_claim,
    paper_claim,
    percent,
    span,
    step_name,
    with_orders,
)
from studies.paper.design import EXPECTED_STATE_PRECISION, MODELS, PARAMETERS, Cell, ratio_name
from studies.paper.results import StudyResults
from studies.reporting import number

CALIBRATED = 0.9
"""Required coverage of two-sd intervals; a calibrated Gaussian belief has 95 %."""
STILL = 0.1
"""A log-precision that moves by less counts as nearly constant: the precision changes by 10 %."""
SETTLED = 0.1
"""Largest share of its range that a settled belief covers in the last quarter of the time; steady drift covers 0.25."""
MOTIONLESS = 0.01
"""A belief that moves by less, in log-precision or in prior standard deviations, counts as settled."""
ALMOST_EQUAL = 0.1
"""Relative difference below which free actions count as almost equal."""
GOOD = 2.0
"""A choice is good if its error is at most this many times that of the best choice."""
LONGEST_LAG = 5.0
"""Longest lag, in units of time, that is tried; the process has a period of about 16."""

TRUE_PRECISION = {"lambda_y": GLV_OBSERVATION_SD**-2, "lambda_x": GLV_STATE_SD**-2}
NOISE = {"lambda_y": "observation noise", "lambda_x": "state noise"}


def examine(results: StudyResults) -> list[Claim]:
    """Test every claim: first those of the paper, in its order, then ours."""
    study = StudyView(results)
    return [test(study) for test in (*PAPER, *OURS)]


# --- the paper: states -----------------------------------------------------------------------------------------------
STATES = "Results, inference of states"
STATES_2, STATES_3 = "Appendix, inferred states, k = 2", "Appendix, inferred states, k = 3"


def third_order_lowers_error(study: StudyView) -> Claim:
    checks, factors = [], dict[str, list[float]]()
    for two, three, r in study.pairs():
        errors = study.value(two, r, "x.mse"), study.value(three, r, "x.mse")
        checks.append(Check(MODELS[two.model], at(two.ratio), r, less(errors[1], errors[0])))
        factors.setdefault(MODELS[two.model], []).append(errors[0] / errors[1])
    return paper_claim(
        "A third order of motion lowers the error",
        STATES,
        "A third order of motion consistently lowers the error of the inferred states in both scenarios.",
        "MSE is lower with three orders than with two, at every C.",
        checks,
        f"Median of MSE with two orders over MSE with three: {medians(factors)}.",
    )


def right_model_has_less_error(study: StudyView) -> Claim:
    checks = [
        Check(
            f"{cell.orders} orders",
            at(cell.ratio),
            r,
            less(study.value(cell, r, "x.mse"), study.value(other, r, "x.mse")),
        )
        for cell, r in study.each(["glv"])
        for other in [cell._replace(model="lorenz")]
    ]
    return paper_claim(
        "The model of the right form has less error",
        STATES,
        "The GLV model fits the data better than the Lorenz model.",
        "Its MSE is lower, at every C and order.",
        checks,
    )


def lorenz_fails_with_two(study: StudyView) -> Claim:
    checks = [
        Check("Lorenz", at(cell.ratio), r, less(study.variance[r], study.value(cell, r, "x.mse")))
        for cell, r in study.each(["lorenz"], [2])
    ]
    return paper_claim(
        "The Lorenz model cannot track with two orders",
        f"{STATES}; {STATES_2}",
        "Two orders are not enough for the Lorenz model to track the process.",
        "MSE is above the variance of the states: a constant estimate would be better.",
        checks,
        f"MSE {span(study.values('lorenz', 2, 'x.mse'))}; variance {span(study.variance)}.",
    )


def lorenz_tracks_with_three(study: StudyView) -> Claim:
    cells = list(study.each(["lorenz"], [3]))
    checks = [
        Check("Lorenz", at(cell.ratio), r, less(study.value(cell, r, "x.mse"), study.variance[r])) for cell, r in cells
    ]
    below = [less(study.value(cell, r, "x.mse"), study.raw[r]) for cell, r in cells]
    return paper_claim(
        "The Lorenz model tracks with three orders",
        f"{STATES}; abstract",
        "With three orders the Lorenz model tracks the process although its form is wrong.",
        "MSE is below the variance of the states, at every C.",
        checks,
        f"MSE {span(study.values('lorenz', 3, 'x.mse'))}; variance {span(study.variance)}. "
        f"Below the raw observations ({span(study.raw)}) in {sum(bool(b) for b in below)} cases.",
    )


def lorenz_tracks_at_ten(study: StudyView) -> Claim:
    cells = list(study.each(["lorenz"], [3], [10.0]))
    checks = [
        Check("Lorenz", at(cell.ratio), r, less(study.value(cell, r, "x.mse"), study.variance[r])) for cell, r in cells
    ]
    shares = [study.value(cell, r, "x.mse") / study.variance[r] for cell, r in cells]
    return paper_claim(
        "The Lorenz model tracks decently with three orders and C = 10",
        STATES_3,
        "With three orders and C = 10 the tracking is decent and not too noisy.",
        "MSE is below the variance of the states.",
        checks,
        f"MSE is {percent(shares)} of the variance.",
    )


def glv_tracks_with_both(study: StudyView) -> Claim:
    cells = list(study.each(["glv"]))
    checks = [
        Check(f"{cell.orders} orders", at(cell.ratio), r, less(study.value(cell, r, "x.mse"), study.variance[r]))
        for cell, r in cells
    ]
    below = [less(study.value(cell, r, "x.mse"), study.raw[r]) for cell, r in cells]
    errors = "; ".join(f"{k} orders {span(study.values('glv', k, 'x.mse'))}" for k in study.orders)
    return paper_claim(
        "The GLV model tracks with two and with three orders",
        f"{STATES}; {STATES_2}",
        "A model of the right form tracks effectively with either number of orders.",
        "MSE is below the variance of the states, at every C and order.",
        checks,
        f"MSE: {errors}. Below the raw observations ({span(study.raw)}) in {sum(bool(b) for b in below)} cases.",
    )


def glv_gains_less(study: StudyView) -> Claim:
    checks, gains = [], dict[str, list[float]]()
    for two, three, r in study.pairs(["glv"]):
        errors = [
            (study.value(two._replace(model=m), r, "x.mse"), study.value(three._replace(model=m), r, "x.mse"))
            for m in ("glv", "lorenz")
        ]
        (ratio, other_ratio), (gap, other_gap) = [a / b for a, b in errors], [a - b for a, b in errors]
        checks.append(Check("by ratio", at(two.ratio), r, less(ratio, other_ratio)))
        checks.append(Check("by difference", at(two.ratio), r, less(gap, other_gap)))
        gains.setdefault("GLV", []).append(ratio)
        gains.setdefault("Lorenz", []).append(other_ratio)
    return paper_claim(
        "The GLV model gains less from a third order than the Lorenz model",
        STATES,
        "If the form of the model is right, a third order improves tracking comparatively little.",
        "The MSE decreases less from two to three orders for GLV than for Lorenz, by ratio and by difference.",
        checks,
        f"Median ratio: {medians(gains)}.",
    )


def error_falls_with_ratio(study: StudyView) -> Claim:
    checks = [
        Check(MODELS[m], step_name(a, b), r, less(*(study.value(Cell(m, 2, c), r, "x.mse") for c in (b, a))))
        for m in MODELS
        for a, b in study.steps()
        for r in study.replicates
    ]

    def typical(model: str, ratio: float) -> str:
        return number(median(study.value(Cell(model, 2, ratio), r, "x.mse") for r in study.replicates))

    low, high = study.ratios[0], study.ratios[-1]
    ends = ", ".join(f"{name} from {typical(m, low)} to {typical(m, high)}" for m, name in MODELS.items())
    return paper_claim(
        "With two orders tracking improves with C",
        STATES_2,
        "With two orders both models track better at higher precision ratios.",
        "MSE decreases at every step from one C to the next.",
        checks,
        f"MSE: {ends}.",
    )


def lag_goes_with_third_order(study: StudyView) -> Claim:
    low = study.ratios[0]
    lags = [lag(study, Cell("glv", orders, low)) for orders in (2, 3)]
    checks = [
        Check("lag with two orders", at(low), 0, less(0.0, lags[0])),
        Check("less than a tenth of it with three", at(low), 0, less(10 * lags[1], lags[0])),
    ]
    return paper_claim(
        "The third order removes the lag of the GLV model",
        f"{STATES_2} and 3",
        f"At C = {ratio_name(low)} the GLV model lags behind with two orders, but not with three.",
        f"Lag: delay of the true states, up to {LONGEST_LAG:g}, that best fits the inferred states. First replicate.",
        checks,
        f"Lag {number(lags[0])} with two orders, {number(lags[1])} with three.",
    )


def lag(study: StudyView, cell: Cell) -> float:
    """Delay of the true states, in units of time, that best fits the inferred states."""
    result = study.trace(cell)
    if result is None or len(result.times) < 8:
        return math.nan
    inferred, true = result.mean("x")[:, 0], study.results.realisations[0].states.numpy()
    dt = float(result.times[1] - result.times[0])
    most = min(round(LONGEST_LAG / dt), len(true) // 4)
    late = inferred[most:]  # the same times for every shift
    errors = [((late - true[most - shift : len(true) - shift]) ** 2).mean() for shift in range(most + 1)]
    return int(np.argmin(errors)) * dt


def noisier_beyond_one(study: StudyView) -> Claim:
    beyond = {"glv": [1.0, 10.0, 25.0, 50.0], "lorenz": [10.0, 25.0, 50.0]}
    values = {m: {c: roughness(study, Cell(m, 3, c)) for c in ratios} for m, ratios in beyond.items()}
    checks = [
        Check(MODELS[m], step_name(a, b), 0, less(rough[a], rough[b]))
        for m, rough in values.items()
        for a, b in study.steps(beyond[m])
    ]
    world = study.results.realisations[0]
    raw = increments(world.observations.numpy()) / increments(world.states.numpy())
    extra = "; ".join(
        f"{MODELS[m]} " + ", ".join(f"{number(value)} at {at(c)}" for c, value in rough.items())
        for m, rough in values.items()
    )
    return paper_claim(
        "With three orders the inferred states get noisier with C",
        STATES_3,
        "Beyond C = 1 (GLV) and C = 10 (Lorenz) the inferred states become noisier.",
        "Roughness, the RMS step of the inferred states over that of the true states, increases with C. "
        "First replicate.",
        checks,
        f"Roughness: {extra}; raw observations {number(raw)}.",
    )


def increments(values: Array) -> float:
    """Root mean square step between consecutive times of a series (T, channels)."""
    return float(np.sqrt((np.diff(values, axis=0) ** 2).mean()))


def roughness(study: StudyView, cell: Cell) -> float:
    result = study.trace(cell)
    if result is None:
        return math.nan
    return increments(result.mean("x")[:, 0]) / increments(study.results.realisations[0].states.numpy())


def observations_are_copied(study: StudyView) -> Claim:
    checks, shown = [], []
    for orders, ratios in ((3, [50.0]), (2, [10.0, 25.0, 50.0])):
        for ratio in ratios:
            to_seen, to_true = distances(study, Cell("glv", orders, ratio))
            copied = less(to_seen, to_true)
            expected = copied if orders == 3 or copied is None else not copied
            checks.append(Check(f"{orders} orders", at(ratio), 0, expected))
            shown.append(f"{number(to_seen)} and {number(to_true)} ({orders} orders, {at(ratio)})")
    return paper_claim(
        "At C = 50 the GLV model ignores its dynamics with three orders, but not with two",
        f"{STATES_3}; Appendix, predicted sensations, k = 3",
        "With three orders the model follows the observations alone; with two orders it does not.",
        "It follows the observations if the inferred states are closer to them (MSE) than to the true states. "
        "First replicate.",
        checks,
        f"MSE to the observations and to the true states: {'; '.join(shown)}.",
    )


def distances(study: StudyView, cell: Cell) -> tuple[float, float]:
    """MSE of the inferred states to the observations and to the true states."""
    result = study.trace(cell)
    if result is None:
        return math.nan, math.nan
    world, inferred = study.results.realisations[0], result.mean("x")[:, 0]
    to_seen, to_true = (((inferred - v.numpy()) ** 2).mean() for v in (world.observations, world.states))
    return float(to_seen), float(to_true)


# --- the paper: sensations -------------------------------------------------------------------------------------------
SENSATIONS = "Appendix, predicted sensations"


def sensory_error(study: StudyView, cell: Cell) -> float:
    """MSE of the predicted observations."""
    result = study.trace(cell)
    if result is None:
        return math.nan
    return float(((result.prediction("y")[:, 0] - result.observation("y")[:, 0]) ** 2).mean())


def sensations_improve_with_ratio(study: StudyView) -> Claim:
    kinds = [("lorenz", 2), ("lorenz", 3), ("glv", 2)]
    errors = {Cell(m, k, c): sensory_error(study, Cell(m, k, c)) for m, k in kinds for c in study.ratios}
    checks = [
        Check(with_orders(Cell(m, k, a)), step_name(a, b), 0, less(errors[Cell(m, k, b)], errors[Cell(m, k, a)]))
        for m, k in kinds
        for a, b in study.steps()
    ]
    ends = "; ".join(
        f"{MODELS[m]}, {k} orders, from {number(errors[Cell(m, k, study.ratios[0])])} to "
        f"{number(errors[Cell(m, k, study.ratios[-1])])}"
        for m, k in kinds
    )
    return paper_claim(
        "Predicted sensations improve with C",
        SENSATIONS,
        "Predicted observations of the Lorenz model, and of the GLV model with two orders, improve with C.",
        "Their MSE decreases at every step from one C to the next. First replicate.",
        checks,
        f"MSE: {ends}.",
    )


def lorenz_mispredicts_with_two(study: StudyView) -> Claim:
    error = sensory_error(study, Cell("lorenz", 2, 50.0))
    spread = float(study.results.realisations[0].observations.var(0, correction=0).mean())
    return paper_claim(
        "Even at C = 50 the Lorenz model predicts no sensations with two orders",
        f"{SENSATIONS}, k = 2",
        "With two orders it fails to predict the observations even at the highest ratio.",
        "MSE of the predicted observations is above the variance of the observations. First replicate.",
        [Check("Lorenz", at(50.0), 0, less(spread, error))],
        f"MSE {number(error)}, variance {number(spread)}.",
    )


def third_order_improves_sensations(study: StudyView) -> Claim:
    wanted = [("lorenz", c) for c in study.ratios] + [("glv", study.ratios[0])]
    checks = [
        Check(MODELS[m], at(c), 0, less(sensory_error(study, Cell(m, 3, c)), sensory_error(study, Cell(m, 2, c))))
        for m, c in wanted
    ]
    return paper_claim(
        "A third order improves predicted sensations",
        f"{SENSATIONS}, k = 3",
        "With three orders the Lorenz model, and at the lowest C the GLV model, predict observations much better.",
        "Their MSE is lower with three orders than with two. First replicate.",
        checks,
    )


# --- the paper: free action ------------------------------------------------------------------------------------------
ACTION = "Results, free action"


def right_model_has_lower_action(study: StudyView) -> Claim:
    cells = [(cell, cell._replace(model="lorenz"), r) for cell, r in study.each(["glv"])]
    values = [(study.value(a, r, "free_action"), study.value(b, r, "free_action")) for a, b, r in cells]
    checks = [
        Check(f"{cell.orders} orders", at(cell.ratio), r, less(*pair))
        for (cell, _, r), pair in zip(cells, values, strict=True)
    ]
    ratio = median(b / a for a, b in values)
    return paper_claim(
        "The free action prefers the model of the right form",
        ACTION,
        "The free action is much lower in scenario-same than in scenario-different at every ratio.",
        "Free action of GLV is lower than that of Lorenz, at every C and order.",
        checks,
        f"Median of Lorenz over GLV: {number(ratio)}.",
    )


def action_hardly_changes(study: StudyView) -> Claim:
    checks, changes = [], []
    for two, three, r in study.pairs():
        a, b = study.value(two, r, "free_action"), study.value(three, r, "free_action")
        change = abs(b - a) / max(abs(a), abs(b))
        checks.append(Check(MODELS[two.model], at(two.ratio), r, less(change, ALMOST_EQUAL)))
        changes.append(100 * change)
    return paper_claim(
        "The free action hardly changes with the order",
        ACTION,
        "The free actions with two and three orders are almost identical.",
        f"They differ by less than {100 * ALMOST_EQUAL:g} % of the larger one. (The paper itself notes that free "
        "actions of different orders belong to different data.)",
        checks,
        f"Difference: median {number(median(changes))} %, range {span(changes)} %.",
    )


def accuracy_and_complexity_rise(study: StudyView) -> Claim:
    checks = [
        Check(
            f"{part}, {MODELS[two.model]}",
            at(two.ratio),
            r,
            less(study.value(two, r, part), study.value(three, r, part)),
        )
        for part in ("accuracy", "complexity")
        for two, three, r in study.pairs()
    ]
    return paper_claim(
        "A third order raises both accuracy and complexity",
        ACTION,
        "A third order makes the model more accurate at the cost of higher complexity.",
        "Accuracy and complexity are higher with three orders than with two, at every C.",
        checks,
    )


# --- the paper: precisions -------------------------------------------------------------------------------------------
CONVERGENCE = "Results, convergence"


def precision_is_constant(study: StudyView, node: str) -> Claim:
    cells = list(study.each(["glv"]))
    moved = [study.excursion(cell, r, node) for cell, r in cells]
    checks = [
        Check(f"{cell.orders} orders", at(cell.ratio), r, less(by, STILL))
        for (cell, r), by in zip(cells, moved, strict=True)
    ]
    return paper_claim(
        f"The {NOISE[node]} precision stays nearly constant in scenario-same",
        CONVERGENCE,
        "If the form of the model is right, its precisions hardly need updating.",
        f"The log-precision stays within {STILL:g} (10 % of the precision) of its initial value.",
        checks,
        f"Largest distance: median {number(median(moved))}, range {span(moved)}.",
    )


def precision_adapts(study: StudyView, node: str) -> Claim:
    checks, moved = [], dict[str, list[float]]()
    for cell, r in study.each(["glv"]):
        same, different = (study.excursion(cell._replace(model=m), r, node) for m in ("glv", "lorenz"))
        checks.append(Check(f"{cell.orders} orders", at(cell.ratio), r, less(same, different)))
        moved.setdefault("Lorenz", []).append(different)
        moved.setdefault("GLV", []).append(same)
    return paper_claim(
        f"The {NOISE[node]} precision adapts in scenario-different",
        CONVERGENCE,
        "If the form of the model is wrong, its precisions adapt to compensate.",
        "The log-precision of Lorenz moves farther from its initial value than that of GLV, at every C and order.",
        checks,
        f"Median largest distance: {medians(moved)}.",
    )


def precisions_still_up_to_one(study: StudyView) -> Claim:
    low = [ratio for ratio in study.ratios if ratio <= 1]
    checks = [
        Check(NOISE[node], at(cell.ratio), r, less(study.excursion(cell, r, node), STILL))
        for node in NOISE
        for cell, r in study.each(["lorenz"], [2], low)
    ]
    return paper_claim(
        "Up to C = 1 the Lorenz model with two orders hardly moves its precisions",
        "Appendices, convergence of λ, k = 2",
        "With two orders and C ≤ 1 both log-precisions hardly change in scenario-different.",
        f"The log-precision stays within {STILL:g} of its initial value.",
        checks,
    )


def third_order_moves_precision_less(study: StudyView) -> Claim:
    checks = [
        Check("Lorenz", at(two.ratio), r, less(*(study.excursion(cell, r, "lambda_y") for cell in (three, two))))
        for two, three, r in study.pairs(["lorenz"])
    ]
    return paper_claim(
        "With a third order the Lorenz model moves its observation noise precision less",
        "Appendix, convergence of λʸ, k = 3",
        "With three orders the observation noise precision changes less than with two.",
        "The log-precision moves less far from its initial value with three orders than with two, at every C.",
        checks,
    )


def precisions_settle(study: StudyView) -> Claim:
    checks = [
        Check(f"{NOISE[node]}, {MODELS[cell.model]}", at(cell.ratio), r, settled)
        for node in NOISE
        for cell, r in study.each()
        for settled in settles(study, cell, r, node, 1.0)
    ]
    return paper_claim(
        "The precisions settle",
        CONVERGENCE,
        "Given enough time both log-precisions stabilise.",
        SETTLING.format("moves by less than 0.01"),
        checks,
    )


SETTLING = (
    f"In the last quarter of the time the mean covers at most {100 * SETTLED:g} % of its whole range; a steady drift "
    "would cover 25 %. A mean that {} counts as settled."
)


def settles(study: StudyView, cell: Cell, replicate: int, node: str, scale: float) -> list[bool | None]:
    """Whether the mean of each channel covers little of its range in the last quarter of the time."""
    mean = study.slow(cell, replicate, node, "mean")
    if mean is None:
        return [None]
    whole, late = np.ptp(mean, axis=0), np.ptp(mean[-(-3 * len(mean) // 4) :], axis=0)
    settled: list[bool | None] = ((late <= SETTLED * whole) | (whole < MOTIONLESS * scale)).tolist()
    return settled


# --- the paper: parameters and intervals -----------------------------------------------------------------------------
THETA = "Appendix, convergence of θ"


def parameters_settle(study: StudyView) -> Claim:
    checks = [
        Check(with_orders(cell), f"{at(cell.ratio)}, {name}", r, settled)
        for cell, r in study.each()
        for name, settled in _named(cell, settles(study, cell, r, "theta", PRIORS[cell.model].sd))
    ]
    return paper_claim(
        "The parameters settle",
        f"{CONVERGENCE}; {THETA}",
        "The parameter estimates stabilise over time, in both scenarios and with both orders.",
        SETTLING.format("moves by less than 0.01 prior standard deviations"),
        checks,
    )


def _named(cell: Cell, values: list[bool | None]) -> Iterator[tuple[str, bool | None]]:
    """Pairs of parameter names and values; a missing belief is missing for every parameter."""
    names = PARAMETERS[cell.model]
    return zip(names, values if len(values) == len(names) else [None] * len(names), strict=True)


def intervals_narrow(study: StudyView) -> Claim:
    names = {"theta": "parameters"} | NOISE
    checks = [
        Check(names[node], f"{MODELS[cell.model]}, {cell.orders} orders, {at(cell.ratio)}", r, narrowed)
        for node in names
        for cell, r in study.each()
        for narrowed in narrows(study, cell, r, node)
    ]
    return paper_claim(
        "Credible intervals narrow with data",
        f"{CONVERGENCE}; {THETA}",
        "The credible intervals of precisions and parameters become narrower with more data.",
        "The standard deviation is smaller at the end than at the first record.",
        checks,
    )


def narrows(study: StudyView, cell: Cell, replicate: int, node: str) -> list[bool | None]:
    sd = study.slow(cell, replicate, node, "sd")
    return [None] if sd is None else (sd[-1] < sd[0]).tolist()


def intervals_narrow_early(study: StudyView) -> Claim:
    wanted = [("theta", "glv", 2), ("theta", "glv", 3), ("lambda_y", "lorenz", 2)]
    names = {"theta": "parameters", "lambda_y": "observation noise"}
    checks = [
        Check(f"{names[node]}, {with_orders(cell)}", at(cell.ratio), r, early)
        for node, model, orders in wanted
        for cell, r in study.each([model], [orders])
        for early in narrows_early(study, cell, r, node)
    ]
    return paper_claim(
        "Intervals narrow quickly at first",
        "Appendices, convergence of λʸ, k = 2, and of θ",
        "Uncertainty about the GLV parameters, and about the observation noise in scenario-different with two orders, "
        "shrinks quickly early on.",
        "The standard deviation decreases, and at least half of the decrease is in the first tenth of the time.",
        checks,
    )


def narrows_early(study: StudyView, cell: Cell, replicate: int, node: str) -> list[bool | None]:
    sd = study.slow(cell, replicate, node, "sd")
    if sd is None:
        return [None]
    fall, early = sd[0] - sd[-1], sd[0] - sd[len(sd) // 10]
    fast: list[bool | None] = ((fall > 0) & (early >= 0.5 * fall)).tolist()
    return fast


def narrowing(study: StudyView, two: Cell, three: Cell, replicate: int) -> float:
    """Ratio of parameter standard deviations, two orders over three, as a geometric mean over time."""
    sds = [study.slow(cell, replicate, "theta", "sd") for cell in (two, three)]
    if sds[0] is None or sds[1] is None:
        return math.nan
    return float(np.exp((np.log(sds[0]) - np.log(sds[1])).mean()))


def third_order_narrows_faster(study: StudyView) -> Claim:
    checks, factors = [], dict[str, list[float]]()
    for two, three, r in study.pairs():
        factor = narrowing(study, two, three, r)
        checks.append(Check(MODELS[two.model], at(two.ratio), r, less(1.0, factor)))
        factors.setdefault(MODELS[two.model], []).append(factor)
    return paper_claim(
        "A third order makes the parameters certain faster",
        CONVERGENCE,
        "The posterior variance of the parameters decreases faster with three orders than with two.",
        "The geometric mean over time of their standard deviations is smaller with three orders, at every C.",
        checks,
        f"Median ratio of standard deviations, two orders over three: {medians(factors)}.",
    )


def narrowing_is_for_the_wrong_model(study: StudyView) -> Claim:
    checks = []
    for two, three, r in study.pairs(["lorenz"]):
        same = narrowing(study, two._replace(model="glv"), three._replace(model="glv"), r)
        checks.append(Check("Lorenz", at(two.ratio), r, less(same, narrowing(study, two, three, r))))
    return paper_claim(
        "A third order makes the parameters certain faster particularly in scenario-different",
        CONVERGENCE,
        "The faster decrease of the variance is most visible in scenario-different.",
        "The ratio of standard deviations, two orders over three, is larger for Lorenz than for GLV, at every C.",
        checks,
    )


def rho_hardly_moves(study: StudyView) -> Claim:
    limit = 0.1 * PRIORS["lorenz"].sd
    moved = [study.excursion(cell, r, "theta") for cell, r in study.each(["lorenz"], [2])]
    checks = [
        Check("Lorenz", at(cell.ratio), r, less(by, limit))
        for (cell, r), by in zip(study.each(["lorenz"], [2]), moved, strict=True)
    ]
    return paper_claim(
        "With two orders ρ hardly moves",
        f"{THETA}, k = 2",
        "With two orders the Lorenz model hardly changes ρ.",
        f"ρ stays within a tenth of its prior standard deviation ({limit:g}) of its initial value.",
        checks,
        f"Largest distance: {span(moved)}.",
    )


def rho_moves_more_with_three(study: StudyView) -> Claim:
    checks = [
        Check("Lorenz", at(two.ratio), r, less(*(study.excursion(cell, r, "theta") for cell in (two, three))))
        for two, three, r in study.pairs(["lorenz"])
    ]
    return paper_claim(
        "With three orders ρ moves more",
        f"{THETA}, k = 3",
        "With three orders the Lorenz model updates ρ more than with two.",
        "ρ moves farther from its initial value with three orders than with two, at every C.",
        checks,
    )


# --- ours ------------------------------------------------------------------------------------------------------------
def parameters_are_in_their_intervals(study: StudyView) -> Claim:
    checks = [
        Check(f"{cell.orders} orders", f"{at(cell.ratio)}, {name}", r, inside)
        for cell, r in study.each(["glv"])
        for name, inside in zip(PARAMETERS["glv"], _inside(study, cell, r), strict=True)
    ]
    table = study.results.table
    rows = table[(table["model"] == "glv") & table["free_action"].notna()]
    whole = [
        ((rows[f"theta.mean[{i}]"] - true).abs() <= 2 * rows[f"theta.sd[{i}]"]).mean()
        for i, true in enumerate(GLV_PARAMETERS)
    ]
    return our_claim(
        "The intervals of the parameters contain the true values",
        "At the end, two-standard-deviation intervals of the GLV parameters contain the values of the process.",
        f"They do in {100 * CALIBRATED:g} % of the cases or more; 95 % would be calibrated.",
        checks,
        f"Of all {len(rows):,} GLV inversions: "
        + ", ".join(f"{name} {percent([share])}" for name, share in zip(PARAMETERS["glv"], whole, strict=True))
        + ".",
        CALIBRATED,
    )


def _inside(study: StudyView, cell: Cell, replicate: int) -> list[bool | None]:
    inside = []
    for i, true in enumerate(GLV_PARAMETERS):
        mean, sd = (study.value(cell, replicate, f"theta.{quantity}[{i}]") for quantity in ("mean", "sd"))
        inside.append(less(abs(mean - true), 2 * sd))
    return inside


def parameters_get_nearer(study: StudyView) -> Claim:
    prior = PRIORS["glv"].mean
    checks = [
        Check(name, f"{cell.orders} orders, {at(cell.ratio)}", r, less(abs(value - true), abs(before - true)))
        for i, (name, true, before) in enumerate(zip(PARAMETERS["glv"], GLV_PARAMETERS, prior, strict=True))
        for cell, r in study.each(["glv"])
        for value in [study.value(cell, r, f"theta.mean[{i}]")]
    ]
    table = study.results.table
    rows = table[(table["model"] == "glv") & table["free_action"].notna()]
    whole = [
        ((rows[f"theta.mean[{i}]"] - true).abs() < abs(before - true)).mean()
        for i, (true, before) in enumerate(zip(GLV_PARAMETERS, prior, strict=True))
    ]
    return our_claim(
        "Learning brings the parameters nearer to the true values",
        "At the end, the GLV parameters are closer to those of the process than their prior means.",
        "The final mean is closer to the true value than the prior mean, for each parameter.",
        checks,
        "Of all GLV inversions: "
        + ", ".join(f"{name} {percent([share])}" for name, share in zip(PARAMETERS["glv"], whole, strict=True))
        + ".",
    )


def states_are_in_their_intervals(study: StudyView) -> Claim:
    cells = list(study.each())
    covered = [study.value(cell, r, "x.coverage") for cell, r in cells]
    checks = [
        Check(with_orders(cell), at(cell.ratio), r, less(CALIBRATED, share + 1e-12))
        for (cell, r), share in zip(cells, covered, strict=True)
    ]
    extra = "; ".join(
        f"{MODELS[m]}, {k} orders, {percent(study.values(m, k, 'x.coverage'))}"
        for m in study.models
        for k in study.orders
    )
    return our_claim(
        "The intervals of the states contain the true states",
        "Two-standard-deviation intervals of the inferred states contain the true states.",
        f"They do at {100 * CALIBRATED:g} % of all times and channels or more; 95 % would be calibrated.",
        checks,
        f"Mean share: {extra}.",
    )


def estimates_beat_observations(study: StudyView) -> Claim:
    checks = [
        Check(with_orders(cell), at(cell.ratio), r, less(study.value(cell, r, "x.mse"), study.raw[r]))
        for cell, r in study.each()
    ]
    return our_claim(
        "The inferred states are better than the raw observations",
        "Inference removes noise: the inferred states are closer to the true states than the observations.",
        "MSE is lower than that of the observations.",
        checks,
        f"MSE of the observations: {span(study.raw)}.",
    )


def action_finds_the_ratio(study: StudyView) -> Claim:
    checks, shown = [], []
    for m in study.models:
        for k in study.orders:
            for r in study.replicates:
                rows = [
                    (study.value(Cell(m, k, c), r, "free_action"), study.value(Cell(m, k, c), r, "x.mse"), c)
                    for c in study.ratios
                ]
                rows = [row for row in rows if not math.isnan(row[0])]
                good = None
                if rows:
                    (_, chosen, c), (_, best, ideal) = min(rows), min(rows, key=lambda row: row[1])
                    good = chosen <= GOOD * best
                    if r == 0:
                        shown.append(
                            f"{MODELS[m]}, {k} orders, {at(c)} with MSE {number(chosen)}, best {at(ideal)} with "
                            f"{number(best)}"
                        )
                checks.append(Check(f"{MODELS[m]}, {k} orders", "all C", r, good))
    return our_claim(
        "The lowest free action finds a good C",
        "Among the ratios, the one with the lowest free action also has a low error.",
        f"Its MSE is at most {GOOD:g} times the lowest over all C.",
        checks,
        f"First replicate: {'; '.join(shown) or '–'}.",
    )


def action_finds_the_settings(study: StudyView) -> Claim:
    keys = ["model", "orders", "ratio", "replicate"]
    errors = study.results.table[study.results.table["free_action"].notna()].groupby(keys)["x.mse"]
    best = errors.min()[errors.size() > 1].to_dict()  # a single setting is no choice
    checks, factors = [], []
    for cell, r in study.each():
        factor = study.value(cell, r, "x.mse") / best.get((*cell, r), math.nan)
        checks.append(Check(with_orders(cell), at(cell.ratio), r, less(factor, GOOD + 1e-12)))
        factors.append(factor)
    return our_claim(
        "Within a cell, the lowest free action finds good settings",
        "Among the settings of one model, order and C, the one with the lowest free action also has a low error.",
        f"Its MSE is at most {GOOD:g} times the lowest of all settings in the cell.",
        checks,
        f"MSE over the lowest: median {number(median(factors))}, range {span(factors)}.",
    )


def precisions_get_nearer(study: StudyView) -> Claim:
    checks = []
    for node, true in TRUE_PRECISION.items():
        for cell, r in study.each():
            expected = EXPECTED_STATE_PRECISION * (cell.ratio if node == "lambda_y" else 1.0)
            prior = math.log(expected) - study.value(cell, r, f"sd_{node}") ** 2 / 2
            final = np.mean(_channels(study, cell, r, node, "mean"))
            off = [abs(value - math.log(true)) for value in (float(final), prior)]
            checks.append(
                Check(f"{NOISE[node]}, {MODELS[cell.model]}", f"{cell.orders} orders, {at(cell.ratio)}", r, less(*off))
            )
    true_values = " and ".join(f"{true:.0f} ({NOISE[node]})" for node, true in TRUE_PRECISION.items())
    return our_claim(
        "The precisions approach the true ones",
        "At the end, the log-precisions are closer to those of the noise in the process than their prior means.",
        f"The final mean (over channels) is closer to the logarithm of {true_values} than the prior mean.",
        checks,
    )


def _channels(study: StudyView, cell: Cell, replicate: int, node: str, quantity: str) -> list[float]:
    """Final belief of each channel, or one NaN."""
    values = [study.value(cell, replicate, f"{node}.{quantity}[{i}]") for i in range(3)]
    return [value for value in values if not math.isnan(value)] or [math.nan]


def precisions_are_in_their_intervals(study: StudyView) -> Claim:
    checks = [
        Check(
            f"{NOISE[node]}, {MODELS[cell.model]}",
            f"{cell.orders} orders, {at(cell.ratio)}",
            r,
            less(abs(mean - math.log(true)), 2 * sd),
        )
        for node, true in TRUE_PRECISION.items()
        for cell, r in study.each()
        for mean, sd in zip(*(_channels(study, cell, r, node, quantity) for quantity in ("mean", "sd")), strict=True)
    ]
    return our_claim(
        "The intervals of the precisions contain the true ones",
        "At the end, two-standard-deviation intervals of the log-precisions contain those of the noise in the process.",
        f"They do in {100 * CALIBRATED:g} % of the cases or more; 95 % would be calibrated.",
        checks,
        required=CALIBRATED,
    )


def settings_lie_inside_the_grid(study: StudyView) -> Claim:
    table = study.results.table
    checks = []
    for column, name in {"kappa": "κ", "every": "interval between updates"}.items():
        low, high, count = table[column].min(), table[column].max(), table[column].nunique()
        for cell, r in study.each():
            value = study.value(cell, r, column)
            passed = None if count < 3 or math.isnan(value) else low < value < high
            checks.append(Check(name, f"{MODELS[cell.model]}, {cell.orders} orders, {at(cell.ratio)}", r, passed))
    return our_claim(
        "The best settings lie inside the grid",
        "The selected κ and interval between updates are not at the end of the tested range.",
        "The value is neither the smallest nor the largest of three or more.",
        checks,
    )


def nothing_diverges(study: StudyView) -> Claim:
    table = study.results.table
    checks = [
        Check(f"{MODELS[str(m)]}, {k} orders", at(float(c)), int(r), bool(ok))
        for m, k, c, r, ok in zip(
            *(table[name].tolist() for name in ("model", "orders", "ratio", "replicate")),
            table["diverged_at"].isna().tolist(),
            strict=True,
        )
    ]
    empty = [str(cell) for cell in study.results.cells if not any((cell, r) in study.winners for r in study.replicates)]
    return our_claim(
        "Every inversion stays finite",
        "No inversion of the grid diverges.",
        "All beliefs are finite to the end, in every inversion.",
        checks,
        f"Cells in which all diverged: {'; '.join(empty)}." if empty else "No cell is without a finite inversion.",
        1.0,
    )


PAPER: tuple[Callable[[StudyView], Claim], ...] = (
    lambda study: precision_is_constant(study, "lambda_y"),
    lambda study: precision_adapts(study, "lambda_y"),
    lambda study: precision_is_constant(study, "lambda_x"),
    lambda study: precision_adapts(study, "lambda_x"),
    precisions_settle,
    intervals_narrow,
    parameters_settle,
    third_order_narrows_faster,
    narrowing_is_for_the_wrong_model,
    third_order_lowers_error,
    right_model_has_less_error,
    lorenz_fails_with_two,
    lorenz_tracks_with_three,
    glv_tracks_with_both,
    glv_gains_less,
    action_hardly_changes,
    accuracy_and_complexity_rise,
    right_model_has_lower_action,
    error_falls_with_ratio,
    lorenz_tracks_at_ten,
    lag_goes_with_third_order,
    noisier_beyond_one,
    observations_are_copied,
    sensations_improve_with_ratio,
    lorenz_mispredicts_with_two,
    third_order_improves_sensations,
    precisions_still_up_to_one,
    third_order_moves_precision_less,
    rho_hardly_moves,
    rho_moves_more_with_three,
    intervals_narrow_early,
)

OURS: tuple[Callable[[StudyView], Claim], ...] = (
    estimates_beat_observations,
    states_are_in_their_intervals,
    parameters_get_nearer,
    parameters_are_in_their_intervals,
    precisions_get_nearer,
    precisions_are_in_their_intervals,
    action_finds_the_ratio,
    action_finds_the_settings,
    settings_lie_inside_the_grid,
    nothing_diverges,
)
