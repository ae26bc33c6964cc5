"""What both kinds of state share: a flow, mappings, their parameters, and a first value from the first observation."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pcnet.errors import GraphError, SettingError
from pcnet.functions.base import Function
from pcnet.functions.check import check_function
from pcnet.functions.linearisation import Linearisation
from pcnet.functions.traced import as_function
from pcnet.model.context import Neighbours, NodeContext
from pcnet.model.links import AnyLink, Drives, Parametrises, Predicts, Weighs
from pcnet.model.messages import PredictionError
from pcnet.model.node import Node
from pcnet.model.protocols import ForecastContext, Forecasts
from pcnet.numerics.branching import eager_only, holds
from pcnet.numerics.laplace import pseudo_inverse

BEGINNINGS, SEARCH_STEPS = (0.0, 1.0, -1.0), 20
"""Where a search for the first value begins, relative to the given one, and its number of steps."""
MAX_HALVINGS = 30  # how often a step towards the first observation is halved before it is given up
Context = NodeContext[Any, Any]


class StateFunction(NamedTuple):
    """The flow or a mapping of a state: its name in errors, the sizes of its arguments, and that of its value."""

    what: str
    function: Function
    size: int  # of the state, with causes and time if it takes them
    n_parameters: int
    out: int


def state_functions(node: Node[Any, Any], dim: int, flow: Function, links: Neighbours) -> list[StateFunction]:
    """The flow of a state and its mappings to the nodes below."""
    width = sum(link.parent.shape.dim for link in links.above_of(Drives))
    found: list[tuple[str, Function, Node[Any, Any] | None, int]] = [(f"the flow of {node.title}", flow, None, dim)]
    for link in links.below_of(Predicts):
        what = f"the mapping from {node.name!r} to {link.child.name!r}"
        found.append((what, link.function, link.child, link.child.shape.dim))
    functions = []
    for what, function, of, out in found:
        size = dim + (width if function.takes_causes or function.takes_time else 0) + function.takes_time
        n_parameters = sum(link.parent.n_parameters for link in links.above_of(Parametrises, of))
        functions.append(StateFunction(what, function, size, n_parameters, out))
    return functions


def check_state(
    node: Node[Any, Any], dim: int, flow: Function, links: Neighbours, like: Tensor, knows_time: bool = False
) -> None:
    """Raise `GraphError` unless a state has children, a precision, and functions that fit its neighbours.

    knows_time: whether functions of time are possible.
    """
    if not links.below:
        raise GraphError(f"{node.title} predicts nothing: add graph.predicts({node.name}, node)")
    if not links.above_of(Weighs):
        raise GraphError(f"{node.title} has no precision: add graph.weighs(PrecisionNode(...), {node.name})")
    causes = [link.parent for link in links.above_of(Drives)]
    functions = state_functions(node, dim, flow, links)
    for what, function, *_ in functions:
        if function.takes_causes and not causes:
            raise GraphError(
                f"{what} takes three arguments, (state, causes or inputs, parameters), and nothing drives "
                f"{node.name!r}: give inputs={{'u': 1}} or causes=..., in a graph graph.drives(node, {node.name}); or "
                "take (x, theta); a function of time takes all four, (x, u, theta, t)"
            )
        if function.takes_time and not knows_time:
            raise GraphError(
                f"{what} is a function of time, f(x, u, theta, t); use a KalmanStateNode, or give the time as an input"
            )
    for what, function, size, n_parameters, out in functions:
        check_function(what, function, size, n_parameters, out, like)
    if causes and not any(each.function.takes_causes or each.function.takes_time for each in functions):
        raise GraphError(
            f"{node.title} is driven by {causes[0].name!r}, but neither its flow nor a mapping of it takes causes; "
            "give a function of (state, causes, parameters)"
        )


def check_predictors(node: Node[Any, Any], states: Sequence[Node[Any, Any]]) -> None:
    """Raise `GraphError` if a Kalman state predicts a node together with other states."""
    if len(states) > 1 and any(state.sends_covariance for state in states):
        names = " and ".join(repr(state.name) for state in states)
        raise GraphError(
            f"{node.title} is predicted by {names}, one of which is a Kalman state: join them into one state"
        )


def parameters_of(ctx: Context, of: Node[Any, Any] | None, like: Tensor) -> Tensor:
    """θ (B, p) of the flow, or of the mapping to `of`: the values of its parameter nodes, in order of attachment."""
    links = ctx.above_of(Parametrises, of)
    if not links:
        return ctx.cached("no parameters", lambda: like.new_zeros(like.shape[0], 0))
    parts = [ctx.message(link).value for link in links]
    if len(parts) == 1:
        return parts[0]
    return ctx.cached(f"parameters of {of.name if of else 'flow'}", lambda: torch.cat(parts, -1), *parts)


def first_value(
    value: Tensor,
    mappings: Mapping[Predicts, Linearisation],
    errors: Callable[[Tensor], Mapping[Predicts, PredictionError]],
) -> Tensor:
    """One Gauss–Newton step of a value (B, dim) on the errors from below, halved until these fall.

    mappings: those to the nodes below, linearised at the value. errors: gives the errors from below at a value.
    """
    dim, found = value.shape[-1], errors(value)
    before = _squared(found)
    gradient, curvature = value.new_zeros(value.shape), value.new_zeros(*value.shape, dim)
    for link, mapping in mappings.items():
        gradient = gradient - mapping.vjp(found[link].weighted)[:, :dim]
        curvature = curvature + mapping.quadratic_form(found[link].precision)[:, :dim, :dim]
    step = -torch.einsum("bij,bj->bi", pseudo_inverse(curvature, torch.isfinite(curvature).all(-1).all(-1)), gradient)
    worse = torch.ones_like(before, dtype=torch.bool)
    for _ in range(MAX_HALVINGS):
        worse = ~(_squared(errors(value + step)) <= before)
        if not holds(worse.any()):
            break
        eager_only("the search for the first value of a state")
        step = torch.where(worse[:, None], 0.5 * step, step)
    return torch.where(worse[:, None], value, value + step)


def searched_value(
    value: Tensor,
    linearise: Callable[[Tensor], Mapping[Predicts, Linearisation]],
    errors: Callable[[Tensor], Mapping[Predicts, PredictionError]],
) -> Tensor:
    """The value (B, dim) with the smallest errors from below that Gauss–Newton steps find.

    One step is enough for linear mappings. Others are searched from several beginnings: at a value of 0 a logarithm is
    infinite, and a square has no slope. Elements that no mapping depends on keep their value.

    Args:
        value: The first of the beginnings.
        linearise: Gives the mappings to the nodes below, linearised at a value.
        errors: Gives the errors from below at a value.
    """
    slopes = linearise(value)
    found = first_value(value, slopes, errors)
    if holds(_is_linear(slopes, linearise(found))):
        return found
    eager_only("the search for the first value of a state")
    best, least = value, torch.full_like(value[:, 0], math.inf)
    for shift in BEGINNINGS:
        found = value + shift
        size = _squared(errors(found))
        for _ in range(SEARCH_STEPS):
            found, before = first_value(found, linearise(found), errors), size
            size = _squared(errors(found))
            if not holds((size < 0.99 * before).any()):
                break
        known = torch.cat([each.jacobian[..., : value.shape[-1]] for each in linearise(found).values()], 1)
        found = torch.where(known.abs().sum(1).expand_as(value) > 0, found, value)
        better = size < 0.99 * least
        best, least = torch.where(better[:, None], found, best), torch.where(better, size, least)
    return best


def _is_linear(before: Mapping[Predicts, Linearisation], after: Mapping[Predicts, Linearisation]) -> Tensor:
    """Whether mappings have the same slopes at two values, and none has no slope at all."""
    pairs = [(each.jacobian, after[link].jacobian) for link, each in before.items()]
    same = [((new - old).abs() <= 1e-6 * old.abs()).all() & (old.abs().sum(-1) > 0).all() for old, new in pairs]
    return torch.stack(same).all()


def _squared(errors: Mapping[Predicts, PredictionError]) -> Tensor:
    """Sum of the squared weighted errors, (B,)."""
    return torch.cat([error.weighted.flatten(1) for error in errors.values()], 1).square().sum(1)


def future_value(ctx: Context, function: Function, of: Node[Any, Any] | None, now: ForecastContext) -> Tensor:
    """The flow, or the mapping to `of`, at a future state."""
    timed = function.takes_time
    causes = [now.messages[link] for link in ctx.above_of(Drives)] if function.takes_causes or timed else []
    if timed:
        assert now.time is not None
        causes = [*causes, now.time]
    parameters = [now.messages[link] for link in ctx.above_of(Parametrises, of)]
    none = now.own.new_zeros(*now.own.shape[:-1], 0)
    return function(torch.cat([now.own, *causes], -1), torch.cat(parameters, -1) if parameters else none)


class FlowForecasts(Forecasts):
    """A state whose own variables move by its flow, in forecasts."""

    flow: Any

    def velocity(self, ctx: Context, now: ForecastContext) -> Tensor:
        return future_value(ctx, self.flow, None, now) + now.noise

    def forecast_message(self, ctx: Context, link: AnyLink, now: ForecastContext) -> Tensor:
        assert link.function is not None
        return future_value(ctx, link.function, link.child, now)

    def forecast_value(self, ctx: Context, now: ForecastContext) -> Tensor:
        return now.own


def checked_flow(node: Node[Any, Any], flow: Any, dim: int) -> Function:
    """The flow of a state as a `Function`."""
    if flow is None:
        raise SettingError(f"{node.title}: give a flow; for a random walk, lambda x, theta: 0 * x")
    return as_function(flow, dim)
