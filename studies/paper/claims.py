"""What the paper says of its results, and what it does not ask, each put to the test by a criterion of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from pcnet.graphs.odem import MODELS as PRIORS
from pcnet.simulate import GLV_OBSERVATION_SD, GLV_PARAMETERS, GLV_STATE_SD
from studies.paper.findings import EXPECTED_STATE_PRECISION, MODELS, PARAMETERS, Cell, Findings, ratio_name
from studies.paper.judging import (
    Array,
    Case,
    Claim,
    Evidence,
    at,
    excursion,
    less,
    median,
    number,
    our_claim,
    paper_claim,
    percent,
    span,
    step_name,
    with_orders,
)

CALIBRATED = 0.9
"""How often two-sd intervals must contain the truth; of a calibrated normal belief 95 % would."""
STILL = 0.1
"""A log-precision that moves by less is nearly constant: the precision changes by a tenth."""
SETTLED = 0.1
"""The share of its whole range that a settled belief may still cover in the last quarter; steady drift covers 0.25."""
MOTIONLESS = 0.01
"""A belief that moves by less, in log-precision or in prior standard deviations, has nothing to settle."""
ALMOST_EQUAL = 0.1
"""Relative difference of free actions that are almost the same."""
GOOD = 2.0
"""A choice is good if its error is at most this many times that of the best choice."""
LONGEST_LAG = 5.0
"""Up to which time a lag is sought; the process goes round in about 16."""

TRUE_PRECISION = {"lambda_y": GLV_OBSERVATION_SD**-2, "lambda_x": GLV_STATE_SD**-2}
NOISE = {"lambda_y": "observation noise", "lambda_x": "state noise"}


def examine(findings: Findings) -> list[Claim]:
    """Every claim: the paper's in its order, then ours."""
    evidence = Evidence(findings)
    return [judged(evidence) for judged in (*PAPER, *OURS)]


# --- the paper: states -----------------------------------------------------------------------------------------------
STATES = "Results, inference of states"
STATES_2, STATES_3 = "Appendix, inferred states, k = 2", "Appendix, inferred states, k = 3"


def third_order_lowers_error(e: Evidence) -> Claim:
    cases, factors = [], dict[str, list[float]]()
    for two, three, r in e.pairs():
        errors = e.value(two, r, "x.mse"), e.value(three, r, "x.mse")
        cases.append(Case(MODELS[two.model], at(two.ratio), r, less(errors[1], errors[0])))
        factors.setdefault(MODELS[two.model], []).append(errors[0] / errors[1])
    extra = ", ".join(f"{name} {number(median(found))}" for name, found in factors.items())
    return paper_claim(
        "A third order of motion lowers the error",
        STATES,
        "The error of the inferred states falls consistently, in both scenarios, with a third order.",
        "MSE with three orders is below that with two, at every C.",
        cases,
        f"Median of MSE with two over MSE with three: {extra or '–'}.",
    )


def right_model_has_less_error(e: Evidence) -> Claim:
    cases = [
        Case(f"{cell.orders} orders", at(cell.ratio), r, less(e.value(cell, r, "x.mse"), e.value(other, r, "x.mse")))
        for cell, r in e.each(["glv"])
        for other in [cell._replace(model="lorenz")]
    ]
    return paper_claim(
        "The model of the right form has less error",
        STATES,
        "The GLV model suits the data better than the Lorenz model.",
        "Its MSE is lower, at every C and order.",
        cases,
    )


def lorenz_fails_with_two(e: Evidence) -> Claim:
    cases = [
        Case("Lorenz", at(cell.ratio), r, less(e.variance[r], e.value(cell, r, "x.mse")))
        for cell, r in e.each(["lorenz"], [2])
    ]
    return paper_claim(
        "The Lorenz model cannot track with two orders",
        f"{STATES}; {STATES_2}",
        "Two orders are not enough for the Lorenz model to track the process.",
        "MSE is above the variance of the states: a constant would do better.",
        cases,
        f"MSE {span(e.values('lorenz', 2, 'x.mse'))}; variance {span(e.variance)}.",
    )


def lorenz_tracks_with_three(e: Evidence) -> Claim:
    cells = list(e.each(["lorenz"], [3]))
    cases = [Case("Lorenz", at(cell.ratio), r, less(e.value(cell, r, "x.mse"), e.variance[r])) for cell, r in cells]
    below = [less(e.value(cell, r, "x.mse"), e.raw[r]) for cell, r in cells]
    return paper_claim(
        "The Lorenz model tracks with three orders",
        f"{STATES}; abstract",
        "With three orders the Lorenz model tracks the process although its form is another.",
        "MSE is below the variance of the states, at every C.",
        cases,
        f"MSE {span(e.values('lorenz', 3, 'x.mse'))}; variance {span(e.variance)}. "
        f"Below the raw observations ({span(e.raw)}) in {sum(bool(b) for b in below)} cases.",
    )


def lorenz_tracks_at_ten(e: Evidence) -> Claim:
    cells = list(e.each(["lorenz"], [3], [10.0]))
    cases = [Case("Lorenz", at(cell.ratio), r, less(e.value(cell, r, "x.mse"), e.variance[r])) for cell, r in cells]
    shares = [e.value(cell, r, "x.mse") / e.variance[r] for cell, r in cells]
    return paper_claim(
        "The Lorenz model tracks decently with three orders and C = 10",
        STATES_3,
        "With three orders and C = 10 the tracking is decent and not too noisy.",
        "MSE is below the variance of the states.",
        cases,
        f"MSE is {percent(shares)} of the variance.",
    )


def glv_tracks_with_both(e: Evidence) -> Claim:
    cells = list(e.each(["glv"]))
    cases = [
        Case(f"{cell.orders} orders", at(cell.ratio), r, less(e.value(cell, r, "x.mse"), e.variance[r]))
        for cell, r in cells
    ]
    below = [less(e.value(cell, r, "x.mse"), e.raw[r]) for cell, r in cells]
    errors = "; ".join(f"{k} orders {span(e.values('glv', k, 'x.mse'))}" for k in e.orders)
    return paper_claim(
        "The GLV model tracks with two and with three orders",
        f"{STATES}; {STATES_2}",
        "A model of the right form tracks effectively with either order.",
        "MSE is below the variance of the states, at every C and order.",
        cases,
        f"MSE: {errors}. Below the raw observations ({span(e.raw)}) in {sum(bool(b) for b in below)} cases.",
    )


def glv_gains_less(e: Evidence) -> Claim:
    cases, gains = [], dict[str, list[float]]()
    for two, three, r in e.pairs(["glv"]):
        errors = [
            (e.value(two._replace(model=m), r, "x.mse"), e.value(three._replace(model=m), r, "x.mse"))
            for m in ("glv", "lorenz")
        ]
        (ratio, other_ratio), (gap, other_gap) = [a / b for a, b in errors], [a - b for a, b in errors]
        cases.append(Case("by ratio", at(two.ratio), r, less(ratio, other_ratio)))
        cases.append(Case("by difference", at(two.ratio), r, less(gap, other_gap)))
        gains.setdefault("GLV", []).append(ratio)
        gains.setdefault("Lorenz", []).append(other_ratio)
    extra = ", ".join(f"{name} {number(median(found))}" for name, found in gains.items())
    return paper_claim(
        "The GLV model gains less from a third order than the Lorenz model",
        STATES,
        "If the form of the model is right, a third order brings comparatively little.",
        "The fall of the MSE from two to three orders is smaller for GLV than for Lorenz, by ratio and by difference.",
        cases,
        f"Median ratio: {extra or '–'}.",
    )


def error_falls_with_ratio(e: Evidence) -> Claim:
    cases = [
        Case(MODELS[m], step_name(a, b), r, less(*(e.value(Cell(m, 2, c), r, "x.mse") for c in (b, a))))
        for m in MODELS
        for a, b in e.steps()
        for r in e.replicates
    ]
    ends = ", ".join(
        f"{MODELS[m]} from {number(median(e.value(Cell(m, 2, e.ratios[0]), r, 'x.mse') for r in e.replicates))} to "
        f"{number(median(e.value(Cell(m, 2, e.ratios[-1]), r, 'x.mse') for r in e.replicates))}"
        for m in MODELS
    )
    return paper_claim(
        "With two orders tracking improves with C",
        STATES_2,
        "With two orders both models track better the higher the precision ratio.",
        "MSE falls at every step from one C to the next.",
        cases,
        f"MSE: {ends}.",
    )


def lag_goes_with_third_order(e: Evidence) -> Claim:
    low = e.ratios[0]
    lags = [lag(e, Cell("glv", orders, low)) for orders in (2, 3)]
    cases = [
        Case("lag with two orders", at(low), 0, less(0.0, lags[0])),
        Case("less than a tenth of it with three", at(low), 0, less(10 * lags[1], lags[0])),
    ]
    return paper_claim(
        "The third order removes the lag of the GLV model",
        f"{STATES_2} and 3",
        f"At C = {ratio_name(low)} the GLV model lags behind with two orders and does not with three.",
        f"Lag: the shift of the true states, up to {LONGEST_LAG:g}, that the inferred ones fit best. First replicate.",
        cases,
        f"Lag {number(lags[0])} with two orders, {number(lags[1])} with three.",
    )


def lag(e: Evidence, cell: Cell) -> float:
    """The delay of the true states, in units of time, at which they are nearest to the inferred ones."""
    result = e.trace(cell)
    if result is None or len(result.times) < 8:
        return math.nan
    inferred, true = result.mean("x")[:, 0], e.findings.worlds[0].states.numpy()
    dt = float(result.times[1] - result.times[0])
    most = min(round(LONGEST_LAG / dt), len(true) // 4)
    ahead = inferred[most:]  # the same stretch of time for every shift
    errors = [((ahead - true[most - shift : len(true) - shift]) ** 2).mean() for shift in range(most + 1)]
    return int(np.argmin(errors)) * dt


def noisier_beyond_one(e: Evidence) -> Claim:
    beyond = {"glv": [1.0, 10.0, 25.0, 50.0], "lorenz": [10.0, 25.0, 50.0]}
    found = {m: {c: roughness(e, Cell(m, 3, c)) for c in ratios} for m, ratios in beyond.items()}
    cases = [
        Case(MODELS[m], step_name(a, b), 0, less(rough[a], rough[b]))
        for m, rough in found.items()
        for a, b in e.steps(beyond[m])
    ]
    world = e.findings.worlds[0]
    raw = increments(world.observations.numpy()) / increments(world.states.numpy())
    extra = "; ".join(
        f"{MODELS[m]} " + ", ".join(f"{number(value)} at {at(c)}" for c, value in rough.items())
        for m, rough in found.items()
    )
    return paper_claim(
        "With three orders the inferred states get noisier with C",
        STATES_3,
        "Beyond C = 1 (GLV) and C = 10 (Lorenz) the inferred states become noisier.",
        "Roughness, the root mean square step of the inferred states over that of the true ones, rises with C. "
        "First replicate.",
        cases,
        f"Roughness: {extra}; raw observations {number(raw)}.",
    )


def increments(values: Array) -> float:
    """The root mean square step from one time to the next; (T, channels)."""
    return float(np.sqrt((np.diff(values, axis=0) ** 2).mean()))


def roughness(e: Evidence, cell: Cell) -> float:
    result = e.trace(cell)
    if result is None:
        return math.nan
    return increments(result.mean("x")[:, 0]) / increments(e.findings.worlds[0].states.numpy())


def observations_are_copied(e: Evidence) -> Claim:
    cases, shown = [], []
    for orders, ratios in ((3, [50.0]), (2, [10.0, 25.0, 50.0])):
        for ratio in ratios:
            to_seen, to_true = distances(e, Cell("glv", orders, ratio))
            copied = less(to_seen, to_true)
            expected = copied if orders == 3 or copied is None else not copied
            cases.append(Case(f"{orders} orders", at(ratio), 0, expected))
            shown.append(f"{number(to_seen)} and {number(to_true)} ({orders} orders, {at(ratio)})")
    return paper_claim(
        "At C = 50 the GLV model ignores its dynamics with three orders, but not with two",
        f"{STATES_3}; Appendix, predicted sensations, k = 3",
        "With three orders the model ends up following the observations alone; with two it does not.",
        "It follows the observations if the inferred states are nearer to them (MSE) than to the true states. "
        "First replicate.",
        cases,
        f"MSE to the observations and to the truth: {'; '.join(shown)}.",
    )


def distances(e: Evidence, cell: Cell) -> tuple[float, float]:
    """The MSE of the inferred states to the observations, and to the true states."""
    result = e.trace(cell)
    if result is None:
        return math.nan, math.nan
    world, inferred = e.findings.worlds[0], result.mean("x")[:, 0]
    to_seen, to_true = (((inferred - v.numpy()) ** 2).mean() for v in (world.observations, world.states))
    return float(to_seen), float(to_true)


# --- the paper: sensations -------------------------------------------------------------------------------------------
SENSATIONS = "Appendix, predicted sensations"


def surprise(e: Evidence, cell: Cell) -> float:
    """The MSE between predicted and actual sensations."""
    result = e.trace(cell)
    if result is None:
        return math.nan
    return float(((result.prediction("y")[:, 0] - result.observation("y")[:, 0]) ** 2).mean())


def sensations_improve_with_ratio(e: Evidence) -> Claim:
    kinds = [("lorenz", 2), ("lorenz", 3), ("glv", 2)]
    found = {Cell(m, k, c): surprise(e, Cell(m, k, c)) for m, k in kinds for c in e.ratios}
    cases = [
        Case(with_orders(Cell(m, k, a)), step_name(a, b), 0, less(found[Cell(m, k, b)], found[Cell(m, k, a)]))
        for m, k in kinds
        for a, b in e.steps()
    ]
    ends = "; ".join(
        f"{MODELS[m]}, {k} orders, from {number(found[Cell(m, k, e.ratios[0])])} to "
        f"{number(found[Cell(m, k, e.ratios[-1])])}"
        for m, k in kinds
    )
    return paper_claim(
        "Predicted sensations improve with C",
        SENSATIONS,
        "The predicted sensations of the Lorenz model, and of the GLV model with two orders, improve with C.",
        "Their MSE to the observations falls at every step from one C to the next. First replicate.",
        cases,
        f"MSE: {ends}.",
    )


def lorenz_mispredicts_with_two(e: Evidence) -> Claim:
    error = surprise(e, Cell("lorenz", 2, 50.0))
    spread = float(e.findings.worlds[0].observations.var(0, correction=0).mean())
    return paper_claim(
        "Even at C = 50 the Lorenz model predicts no sensations with two orders",
        f"{SENSATIONS}, k = 2",
        "With two orders it fails to predict the sensations at the highest ratio too.",
        "MSE of the predicted sensations is above the variance of the observations. First replicate.",
        [Case("Lorenz", at(50.0), 0, less(spread, error))],
        f"MSE {number(error)}, variance {number(spread)}.",
    )


def third_order_improves_sensations(e: Evidence) -> Claim:
    wanted = [("lorenz", c) for c in e.ratios] + [("glv", e.ratios[0])]
    cases = [Case(MODELS[m], at(c), 0, less(surprise(e, Cell(m, 3, c)), surprise(e, Cell(m, 2, c)))) for m, c in wanted]
    return paper_claim(
        "A third order improves predicted sensations",
        f"{SENSATIONS}, k = 3",
        "With three orders the Lorenz model predicts sensations much better; so does the GLV model at the lowest C.",
        "Their MSE to the observations is lower with three orders than with two. First replicate.",
        cases,
    )


# --- the paper: free action ------------------------------------------------------------------------------------------
ACTION = "Results, free action"


def right_model_has_lower_action(e: Evidence) -> Claim:
    cells = [(cell, cell._replace(model="lorenz"), r) for cell, r in e.each(["glv"])]
    values = [(e.value(a, r, "free_action"), e.value(b, r, "free_action")) for a, b, r in cells]
    cases = [
        Case(f"{cell.orders} orders", at(cell.ratio), r, less(*pair))
        for (cell, _, r), pair in zip(cells, values, strict=True)
    ]
    ratio = median(b / a for a, b in values)
    return paper_claim(
        "The free action prefers the model of the right form",
        ACTION,
        "The free action is much lower in scenario-same than in scenario-different at every ratio.",
        "Free action of GLV is below that of Lorenz, at every C and order.",
        cases,
        f"Median of Lorenz over GLV: {number(ratio)}.",
    )


def action_hardly_changes(e: Evidence) -> Claim:
    cases, changes = [], []
    for two, three, r in e.pairs():
        a, b = e.value(two, r, "free_action"), e.value(three, r, "free_action")
        change = abs(b - a) / max(abs(a), abs(b))
        cases.append(Case(MODELS[two.model], at(two.ratio), r, less(change, ALMOST_EQUAL)))
        changes.append(100 * change)
    return paper_claim(
        "The free action hardly changes with the order",
        ACTION,
        "The free actions with two and three orders are almost identical.",
        f"They differ by less than {100 * ALMOST_EQUAL:g} % of the larger one. (The paper itself warns that free "
        "actions of different orders are of different data.)",
        cases,
        f"Difference: median {number(median(changes))} %, range {span(changes)} %.",
    )


def accuracy_and_complexity_rise(e: Evidence) -> Claim:
    cases = [
        Case(f"{part}, {MODELS[two.model]}", at(two.ratio), r, less(e.value(two, r, part), e.value(three, r, part)))
        for part in ("accuracy", "complexity")
        for two, three, r in e.pairs()
    ]
    return paper_claim(
        "A third order raises both accuracy and complexity",
        ACTION,
        "A third order makes the model more accurate, at the cost of more complexity.",
        "Accuracy and complexity with three orders are above those with two, at every C.",
        cases,
    )


# --- the paper: precisions -------------------------------------------------------------------------------------------
CONVERGENCE = "Results, convergence"


def precision_is_constant(e: Evidence, node: str) -> Claim:
    cells = list(e.each(["glv"]))
    moved = [excursion(e, cell, r, node) for cell, r in cells]
    cases = [
        Case(f"{cell.orders} orders", at(cell.ratio), r, less(by, STILL))
        for (cell, r), by in zip(cells, moved, strict=True)
    ]
    return paper_claim(
        f"The {NOISE[node]} precision stays nearly constant in scenario-same",
        CONVERGENCE,
        "If the form of the model is right, its precisions need hardly any update.",
        f"The log-precision never gets {STILL:g} (a tenth of the precision) away from its start.",
        cases,
        f"Farthest: median {number(median(moved))}, range {span(moved)}.",
    )


def precision_adapts(e: Evidence, node: str) -> Claim:
    cases, moved = [], dict[str, list[float]]()
    for cell, r in e.each(["glv"]):
        same, different = (excursion(e, cell._replace(model=m), r, node) for m in ("glv", "lorenz"))
        cases.append(Case(f"{cell.orders} orders", at(cell.ratio), r, less(same, different)))
        moved.setdefault("Lorenz", []).append(different)
        moved.setdefault("GLV", []).append(same)
    extra = ", ".join(f"{name} {number(median(found))}" for name, found in moved.items())
    return paper_claim(
        f"The {NOISE[node]} precision adapts in scenario-different",
        CONVERGENCE,
        "If the form of the model is wrong, its precisions adapt to make up for it.",
        "The log-precision of Lorenz gets farther from its start than that of GLV, at every C and order.",
        cases,
        f"Farthest, median: {extra or '–'}.",
    )


def precisions_still_up_to_one(e: Evidence) -> Claim:
    low = [ratio for ratio in e.ratios if ratio <= 1]
    cases = [
        Case(NOISE[node], at(cell.ratio), r, less(excursion(e, cell, r, node), STILL))
        for node in NOISE
        for cell, r in e.each(["lorenz"], [2], low)
    ]
    return paper_claim(
        "Up to C = 1 the Lorenz model with two orders hardly moves its precisions",
        "Appendices, convergence of λ, k = 2",
        "With two orders and C ≤ 1 there are nearly no changes in either log-precision in scenario-different.",
        f"The log-precision never gets {STILL:g} away from its start.",
        cases,
    )


def third_order_moves_precision_less(e: Evidence) -> Claim:
    cases = [
        Case("Lorenz", at(two.ratio), r, less(*(excursion(e, cell, r, "lambda_y") for cell in (three, two))))
        for two, three, r in e.pairs(["lorenz"])
    ]
    return paper_claim(
        "With a third order the Lorenz model moves its observation noise precision less",
        "Appendix, convergence of λʸ, k = 3",
        "With three orders the observation noise precision has to change less than with two.",
        "The log-precision gets less far from its start with three orders than with two, at every C.",
        cases,
    )


def precisions_settle(e: Evidence) -> Claim:
    cases = [
        Case(f"{NOISE[node]}, {MODELS[cell.model]}", at(cell.ratio), r, settled)
        for node in NOISE
        for cell, r in e.each()
        for settled in settles(e, cell, r, node, 1.0)
    ]
    return paper_claim(
        "The precisions settle",
        CONVERGENCE,
        "Given enough time both log-precisions stabilise.",
        SETTLING.format("that moves by less than 0.01"),
        cases,
    )


SETTLING = (
    f"In the last quarter of the time the mean covers at most {100 * SETTLED:g} % of its whole range; steady drift "
    "would cover 25 %. One {} counts as settled."
)


def settles(e: Evidence, cell: Cell, replicate: int, node: str, scale: float) -> list[bool | None]:
    """For each channel, whether the mean covers little of its range in the last quarter of the time."""
    mean = e.slow(cell, replicate, node, "mean")
    if mean is None:
        return [None]
    whole, late = np.ptp(mean, axis=0), np.ptp(mean[-(-3 * len(mean) // 4) :], axis=0)
    found: list[bool | None] = ((late <= SETTLED * whole) | (whole < MOTIONLESS * scale)).tolist()
    return found


# --- the paper: parameters and intervals -----------------------------------------------------------------------------
THETA = "Appendix, convergence of θ"


def parameters_settle(e: Evidence) -> Claim:
    cases = [
        Case(with_orders(cell), f"{at(cell.ratio)}, {name}", r, settled)
        for cell, r in e.each()
        for name, settled in _named(cell, settles(e, cell, r, "theta", PRIORS[cell.model].sd))
    ]
    return paper_claim(
        "The parameters settle",
        f"{CONVERGENCE}; {THETA}",
        "The parameter estimates stabilise over time, in both scenarios and with both orders.",
        SETTLING.format("that moves by less than 0.01 prior standard deviations"),
        cases,
    )


def _named(cell: Cell, found: list[bool | None]) -> Iterator[tuple[str, bool | None]]:
    """With the names of a model's parameters; one missing belief is missing for each of them."""
    names = PARAMETERS[cell.model]
    return zip(names, found if len(found) == len(names) else [None] * len(names), strict=True)


def intervals_narrow(e: Evidence) -> Claim:
    names = {"theta": "parameters"} | NOISE
    cases = [
        Case(names[node], f"{MODELS[cell.model]}, {cell.orders} orders, {at(cell.ratio)}", r, narrowed)
        for node in names
        for cell, r in e.each()
        for narrowed in narrows(e, cell, r, node)
    ]
    return paper_claim(
        "Credible intervals narrow with data",
        f"{CONVERGENCE}; {THETA}",
        "The credible intervals of precisions and parameters get narrower with the amount of data.",
        "The standard deviation is smaller at the end than where it was first recorded.",
        cases,
    )


def narrows(e: Evidence, cell: Cell, replicate: int, node: str) -> list[bool | None]:
    sd = e.slow(cell, replicate, node, "sd")
    return [None] if sd is None else (sd[-1] < sd[0]).tolist()


def intervals_narrow_early(e: Evidence) -> Claim:
    wanted = [("theta", "glv", 2), ("theta", "glv", 3), ("lambda_y", "lorenz", 2)]
    names = {"theta": "parameters", "lambda_y": "observation noise"}
    cases = [
        Case(f"{names[node]}, {with_orders(cell)}", at(cell.ratio), r, early)
        for node, model, orders in wanted
        for cell, r in e.each([model], [orders])
        for early in narrows_early(e, cell, r, node)
    ]
    return paper_claim(
        "Intervals narrow quickly at first",
        "Appendices, convergence of λʸ, k = 2, and of θ",
        "Uncertainty about the GLV parameters, and about the observation noise in scenario-different with two orders, "
        "shrinks quickly early on.",
        "The standard deviation falls, by at least half of its whole fall in the first tenth of the time.",
        cases,
    )


def narrows_early(e: Evidence, cell: Cell, replicate: int, node: str) -> list[bool | None]:
    sd = e.slow(cell, replicate, node, "sd")
    if sd is None:
        return [None]
    fall, early = sd[0] - sd[-1], sd[0] - sd[len(sd) // 10]
    found: list[bool | None] = ((fall > 0) & (early >= 0.5 * fall)).tolist()
    return found


def narrowing(e: Evidence, two: Cell, three: Cell, replicate: int) -> float:
    """How many times wider the intervals of the parameters are with two orders, as a geometric mean over time."""
    sds = [e.slow(cell, replicate, "theta", "sd") for cell in (two, three)]
    if sds[0] is None or sds[1] is None:
        return math.nan
    return float(np.exp((np.log(sds[0]) - np.log(sds[1])).mean()))


def third_order_narrows_faster(e: Evidence) -> Claim:
    cases, factors = [], dict[str, list[float]]()
    for two, three, r in e.pairs():
        factor = narrowing(e, two, three, r)
        cases.append(Case(MODELS[two.model], at(two.ratio), r, less(1.0, factor)))
        factors.setdefault(MODELS[two.model], []).append(factor)
    extra = ", ".join(f"{name} {number(median(found))}" for name, found in factors.items())
    return paper_claim(
        "A third order makes the parameters certain faster",
        CONVERGENCE,
        "From two to three orders the posterior variance of the parameters falls faster.",
        "Over the run (geometric mean over time) their standard deviation is smaller with three orders, at every C.",
        cases,
        f"Median ratio of standard deviations, two over three: {extra or '–'}.",
    )


def narrowing_is_for_the_wrong_model(e: Evidence) -> Claim:
    cases = []
    for two, three, r in e.pairs(["lorenz"]):
        same = narrowing(e, two._replace(model="glv"), three._replace(model="glv"), r)
        cases.append(Case("Lorenz", at(two.ratio), r, less(same, narrowing(e, two, three, r))))
    return paper_claim(
        "A third order makes the parameters certain faster particularly in scenario-different",
        CONVERGENCE,
        "The faster fall of the variance shows above all in scenario-different.",
        "The ratio of standard deviations, two orders over three, is larger for Lorenz than for GLV, at every C.",
        cases,
    )


def rho_hardly_moves(e: Evidence) -> Claim:
    limit = 0.1 * PRIORS["lorenz"].sd
    moved = [excursion(e, cell, r, "theta") for cell, r in e.each(["lorenz"], [2])]
    cases = [
        Case("Lorenz", at(cell.ratio), r, less(by, limit))
        for (cell, r), by in zip(e.each(["lorenz"], [2]), moved, strict=True)
    ]
    return paper_claim(
        "With two orders ρ hardly moves",
        f"{THETA}, k = 2",
        "With two orders the Lorenz model makes little change to ρ.",
        f"ρ never gets a tenth of its prior standard deviation ({limit:g}) away from its start.",
        cases,
        f"Farthest: {span(moved)}.",
    )


def rho_moves_more_with_three(e: Evidence) -> Claim:
    cases = [
        Case("Lorenz", at(two.ratio), r, less(*(excursion(e, cell, r, "theta") for cell in (two, three))))
        for two, three, r in e.pairs(["lorenz"])
    ]
    return paper_claim(
        "With three orders ρ moves more",
        f"{THETA}, k = 3",
        "With three orders the Lorenz model updates ρ more than with two.",
        "ρ gets farther from its start with three orders than with two, at every C.",
        cases,
    )


# --- ours ------------------------------------------------------------------------------------------------------------
def parameters_are_in_their_intervals(e: Evidence) -> Claim:
    cases = [
        Case(f"{cell.orders} orders", f"{at(cell.ratio)}, {name}", r, inside)
        for cell, r in e.each(["glv"])
        for name, inside in zip(PARAMETERS["glv"], _inside(e, cell, r), strict=True)
    ]
    table = e.findings.table
    rows = table[(table["model"] == "glv") & table["free_action"].notna()]
    whole = [
        ((rows[f"theta.mean[{i}]"] - true).abs() <= 2 * rows[f"theta.sd[{i}]"]).mean()
        for i, true in enumerate(GLV_PARAMETERS)
    ]
    return our_claim(
        "The intervals of the parameters contain the true values",
        "Two-standard-deviation intervals of the GLV parameters contain the values of the process at the end.",
        f"They do in {100 * CALIBRATED:g} % of the cases or more; 95 % would be calibrated.",
        cases,
        f"Of all {len(rows):,} GLV inversions: "
        + ", ".join(f"{name} {percent([share])}" for name, share in zip(PARAMETERS["glv"], whole, strict=True))
        + ".",
        CALIBRATED,
    )


def _inside(e: Evidence, cell: Cell, replicate: int) -> list[bool | None]:
    found = []
    for i, true in enumerate(GLV_PARAMETERS):
        mean, sd = (e.value(cell, replicate, f"theta.{quantity}[{i}]") for quantity in ("mean", "sd"))
        found.append(less(abs(mean - true), 2 * sd))
    return found


def parameters_get_nearer(e: Evidence) -> Claim:
    prior = PRIORS["glv"].mean
    cases = [
        Case(name, f"{cell.orders} orders, {at(cell.ratio)}", r, less(abs(value - true), abs(before - true)))
        for i, (name, true, before) in enumerate(zip(PARAMETERS["glv"], GLV_PARAMETERS, prior, strict=True))
        for cell, r in e.each(["glv"])
        for value in [e.value(cell, r, f"theta.mean[{i}]")]
    ]
    table = e.findings.table
    rows = table[(table["model"] == "glv") & table["free_action"].notna()]
    whole = [
        ((rows[f"theta.mean[{i}]"] - true).abs() < abs(before - true)).mean()
        for i, (true, before) in enumerate(zip(GLV_PARAMETERS, prior, strict=True))
    ]
    return our_claim(
        "Learning brings the parameters nearer to the true values",
        "At the end the GLV parameters are nearer to those of the process than their prior means were.",
        "The final mean is nearer to the true value than the prior mean, for each parameter.",
        cases,
        "Of all GLV inversions: "
        + ", ".join(f"{name} {percent([share])}" for name, share in zip(PARAMETERS["glv"], whole, strict=True))
        + ".",
    )


def states_are_in_their_intervals(e: Evidence) -> Claim:
    cells = list(e.each())
    covered = [e.value(cell, r, "x.coverage") for cell, r in cells]
    cases = [
        Case(with_orders(cell), at(cell.ratio), r, less(CALIBRATED, share + 1e-12))
        for (cell, r), share in zip(cells, covered, strict=True)
    ]
    extra = "; ".join(
        f"{MODELS[m]}, {k} orders, {percent(e.values(m, k, 'x.coverage'))}" for m in e.models for k in e.orders
    )
    return our_claim(
        "The intervals of the states contain the true states",
        "Two-standard-deviation intervals of the inferred states contain the true ones.",
        f"They do at {100 * CALIBRATED:g} % of all times and channels or more; 95 % would be calibrated.",
        cases,
        f"Mean share: {extra}.",
    )


def estimates_beat_observations(e: Evidence) -> Claim:
    cases = [
        Case(with_orders(cell), at(cell.ratio), r, less(e.value(cell, r, "x.mse"), e.raw[r])) for cell, r in e.each()
    ]
    return our_claim(
        "The inferred states are better than the raw observations",
        "Inference removes noise: the inferred states are nearer to the truth than the observations are.",
        "MSE is below that of the observations.",
        cases,
        f"MSE of the observations: {span(e.raw)}.",
    )


def action_finds_the_ratio(e: Evidence) -> Claim:
    cases, shown = [], []
    for m in e.models:
        for k in e.orders:
            for r in e.replicates:
                rows = [
                    (e.value(Cell(m, k, c), r, "free_action"), e.value(Cell(m, k, c), r, "x.mse"), c) for c in e.ratios
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
                cases.append(Case(f"{MODELS[m]}, {k} orders", "all C", r, good))
    return our_claim(
        "The lowest free action finds a good C",
        "Among the ratios, the one with the lowest free action has a low error too.",
        f"Its MSE is at most {GOOD:g} times the lowest over all C.",
        cases,
        f"First replicate: {'; '.join(shown) or '–'}.",
    )


def action_finds_the_settings(e: Evidence) -> Claim:
    keys = ["model", "orders", "ratio", "replicate"]
    errors = e.findings.table[e.findings.table["free_action"].notna()].groupby(keys)["x.mse"]
    best = errors.min()[errors.size() > 1].to_dict()  # one alone is no choice
    cases, factors = [], []
    for cell, r in e.each():
        factor = e.value(cell, r, "x.mse") / best.get((*cell, r), math.nan)
        cases.append(Case(with_orders(cell), at(cell.ratio), r, less(factor, GOOD + 1e-12)))
        factors.append(factor)
    return our_claim(
        "Within a cell, the lowest free action finds good settings",
        "Among the settings of one model, order and C, the one with the lowest free action has a low error too.",
        f"Its MSE is at most {GOOD:g} times the lowest of all settings in the cell.",
        cases,
        f"MSE over the lowest: median {number(median(factors))}, range {span(factors)}.",
    )


def precisions_get_nearer(e: Evidence) -> Claim:
    cases = []
    for node, true in TRUE_PRECISION.items():
        for cell, r in e.each():
            expected = EXPECTED_STATE_PRECISION * (cell.ratio if node == "lambda_y" else 1.0)
            prior = math.log(expected) - e.value(cell, r, f"sd_{node}") ** 2 / 2
            final = np.mean(_channels(e, cell, r, node, "mean"))
            off = [abs(value - math.log(true)) for value in (float(final), prior)]
            cases.append(
                Case(f"{NOISE[node]}, {MODELS[cell.model]}", f"{cell.orders} orders, {at(cell.ratio)}", r, less(*off))
            )
    true_values = " and ".join(f"{true:.0f} ({NOISE[node]})" for node, true in TRUE_PRECISION.items())
    return our_claim(
        "The precisions approach the true ones",
        "At the end the log-precisions are nearer to those of the noise in the process than their prior means were.",
        f"The final mean (over channels) is nearer to the logarithm of {true_values} than the prior mean.",
        cases,
    )


def _channels(e: Evidence, cell: Cell, replicate: int, node: str, quantity: str) -> list[float]:
    """The final belief of each channel, or one NaN."""
    found = [e.value(cell, replicate, f"{node}.{quantity}[{i}]") for i in range(3)]
    return [value for value in found if not math.isnan(value)] or [math.nan]


def precisions_are_in_their_intervals(e: Evidence) -> Claim:
    cases = [
        Case(
            f"{NOISE[node]}, {MODELS[cell.model]}",
            f"{cell.orders} orders, {at(cell.ratio)}",
            r,
            less(abs(mean - math.log(true)), 2 * sd),
        )
        for node, true in TRUE_PRECISION.items()
        for cell, r in e.each()
        for mean, sd in zip(*(_channels(e, cell, r, node, quantity) for quantity in ("mean", "sd")), strict=True)
    ]
    return our_claim(
        "The intervals of the precisions contain the true ones",
        "Two-standard-deviation intervals of the log-precisions contain those of the noise in the process at the end.",
        f"They do in {100 * CALIBRATED:g} % of the cases or more; 95 % would be calibrated.",
        cases,
        nearly_all=CALIBRATED,
    )


def settings_lie_inside_the_grid(e: Evidence) -> Claim:
    table = e.findings.table
    cases = []
    for column, name in {"kappa": "κ", "every": "interval of updates"}.items():
        low, high, count = table[column].min(), table[column].max(), table[column].nunique()
        for cell, r in e.each():
            value = e.value(cell, r, column)
            passed = None if count < 3 or math.isnan(value) else low < value < high
            cases.append(Case(name, f"{MODELS[cell.model]}, {cell.orders} orders, {at(cell.ratio)}", r, passed))
    return our_claim(
        "The best settings lie inside the grid",
        "The selected κ and interval between updates are not at the end of the range that was tried.",
        "The value is neither the least nor the greatest of three or more.",
        cases,
    )


def nothing_diverges(e: Evidence) -> Claim:
    table = e.findings.table
    cases = [
        Case(f"{MODELS[str(m)]}, {k} orders", at(float(c)), int(r), bool(ok))
        for m, k, c, r, ok in zip(
            *(table[name].tolist() for name in ("model", "orders", "ratio", "replicate")),
            table["diverged_at"].isna().tolist(),
            strict=True,
        )
    ]
    empty = [str(cell) for cell in e.findings.cells if not any((cell, r) in e.winners for r in e.replicates)]
    return our_claim(
        "Every inversion stays finite",
        "No inversion of the grid diverges.",
        "All beliefs are finite to the end, in every inversion.",
        cases,
        f"Without any survivor: {'; '.join(empty)}." if empty else "Every cell has a survivor.",
        1.0,
    )


PAPER: tuple[Callable[[Evidence], Claim], ...] = (
    lambda e: precision_is_constant(e, "lambda_y"),
    lambda e: precision_adapts(e, "lambda_y"),
    lambda e: precision_is_constant(e, "lambda_x"),
    lambda e: precision_adapts(e, "lambda_x"),
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

OURS: tuple[Callable[[Evidence], Claim], ...] = (
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
