"""Functions whose derivatives are derived from a plain function, once for each shape of input, by tracing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import jvp, vmap

from pcnet.errors import GraphError
from pcnet.functions.base import Function, Plain
from pcnet.functions.closed_form import Identity
from pcnet.functions.linearisation import Linearisation
from pcnet.functions.tracing import trace


class TracedFunction(Function):
    """A plain function with derivatives derived by tracing it once for each shape of input.

    An analytic `jacobian` (..., out, dim) or `parameter_jacobian` (..., out, p) is used where given. `parameters` is
    how many it takes, if that is to be checked. A trace sees weights of a module that are trained later, but other
    attributes as they were.
    """

    def __init__(
        self,
        function: Plain,
        jacobian: Plain | None = None,
        parameter_jacobian: Plain | None = None,
        parameters: int | None = None,
    ) -> None:
        self.function = function
        self.parameters = parameters
        self.caused = isinstance(function, WithCauses)
        self._given = (function, jacobian, parameter_jacobian, parameters)
        self.jacobian = jacobian or (lambda x, theta: _columns(lambda v: function(v, theta), x))
        self.parameter_jacobian = parameter_jacobian or (lambda x, theta: _columns(lambda v: function(x, v), theta))
        self._traces: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, x: Tensor, parameters: Tensor) -> Tensor:
        return self.function(x, parameters)

    @property
    def identity_key(self) -> Hashable:
        return self._given

    def __repr__(self) -> str:
        return repr(self.function) if self.caused else getattr(self.function, "__name__", type(self.function).__name__)

    def linearise(self, x: Tensor, parameters: Tensor, rows: int) -> Linearisation:
        def body(x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            here, motion = x[:, 0], x[:, 1:rows]
            jacobian = self.jacobian(here, theta)
            value = self.function(here, theta)[:, None]
            if rows == 1:
                return value, jacobian, jacobian[:, None][:, :0]
            bend = _along(self.jacobian, here, theta, motion)
            return torch.cat([value, motion @ jacobian.mT], 1), jacobian, bend

        value, jacobian, bend = self._traced("linearise", rows, body, x, parameters)
        return Linearisation(value, jacobian, bend, x.shape[1])

    def contracted_hessian(self, x: Tensor, parameters: Tensor, weights: Tensor) -> Tensor | None:
        rows = weights.shape[1]

        def body(x: Tensor, theta: Tensor, weights: Tensor) -> Tensor:
            def gradient(here: Tensor) -> Tensor:
                """Of Σ ξ·f̃ in each order of x̃, as a function of the value; (B, rows, dim)."""
                by_order = weights @ self.jacobian(here, theta)
                if rows == 1:
                    return by_order
                bend = _along(self.jacobian, here, theta, x[:, 1:rows])  # (B, rows − 1, out, dim)
                value = by_order[:, :1] + (weights[:, 1:, None, :] @ bend).sum(1)
                return torch.cat([value, by_order[:, 1:]], 1)

            return _columns(gradient, x[:, 0])

        blocks: Tensor | None = self._traced("curve", rows, body, x, parameters, weights)
        return blocks

    def parameter_slope(self, x: Tensor, parameters: Tensor, rows: int) -> Tensor:
        def body(x: Tensor, theta: Tensor) -> Tensor:
            here, motion = x[:, 0], x[:, 1:rows]
            slope = self.parameter_jacobian(here, theta)[:, None]
            if rows == 1:
                return slope
            return torch.cat([slope, _along(self.parameter_jacobian, here, theta, motion)], 1)

        result: Tensor = self._traced("parameter_slope", rows, body, x, parameters)
        return result

    def parameter_contracted_hessian(self, x: Tensor, parameters: Tensor, weights: Tensor) -> Tensor | None:
        rows = weights.shape[1]

        def body(x: Tensor, theta: Tensor, weights: Tensor) -> Tensor:
            here, motion = x[:, 0], x[:, 1:rows]

            def gradient(theta: Tensor) -> Tensor:
                """Of Σ ξ·f̃ in θ, as a function of θ; (B, p)."""
                slope = self.parameter_jacobian(here, theta)[:, None]
                if rows > 1:
                    slope = torch.cat([slope, _along(self.parameter_jacobian, here, theta, motion)], 1)
                return (weights[:, :, None] @ slope).sum(1)[:, 0]

            return _columns(gradient, theta)

        result: Tensor | None = self._traced("parameter_curve", rows, body, x, parameters, weights)
        return result

    def _traced(self, name: str, rows: int, body: Callable[..., Any], *inputs: Tensor) -> Any:
        key = (name, rows, *((tuple(v.shape), v.dtype, v.device) for v in inputs))
        traced = self._traces.get(key)
        if traced is None:
            traced = self._traces[key] = trace(body, inputs, MAY_VANISH[name])
        return traced(*inputs)


MAY_VANISH = {"linearise": (2,), "curve": (0,), "parameter_slope": (), "parameter_curve": (0,)}
"""Outputs of a trace that are None if they are zero whatever goes in, as second derivatives of linear functions are."""


ThreeArguments = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class WithCauses:
    """A plain function f(x, v, θ) of a state, its causes and parameters, as one of (x and v, θ)."""

    function: ThreeArguments
    dim: int

    def __call__(self, x: Tensor, parameters: Tensor) -> Tensor:
        return self.function(x[..., : self.dim], x[..., self.dim :], parameters)

    def __repr__(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)


def as_function(function: Function | Plain | None, dim: int | None = None) -> Function:
    """A `Function` as it is, None as the identity, and any other callable with derived derivatives.

    A callable of three arguments is one of (state, causes, parameters); `dim` is the state's.
    """
    if function is None:
        return Identity()
    if isinstance(function, Function):
        return function
    if not callable(function):
        raise GraphError(f"a flow or mapping must be a function of (state, parameters), not {function!r}")
    if dim is not None and _arguments(function) == 3:
        return TracedFunction(WithCauses(cast("ThreeArguments", function), dim))
    return TracedFunction(function)


def _arguments(function: Callable[..., Any]) -> int:
    """How many arguments a callable must be given."""
    target = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # built in: it does not say
        return 2
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _columns(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Derivative of a function (B, n) → (B, *out) that keeps batch elements apart, as (B, *out, n)."""
    n = at.shape[-1]
    if n == 0:
        return function(at)[..., None][..., :0]
    units = torch.eye(n, dtype=at.dtype, device=at.device)[:, None].expand(n, *at.shape)
    return _tangents(function, at, units).movedim(0, -1)


def _along(function: Plain, x: Tensor, theta: Tensor, directions: Tensor) -> Tensor:
    """Derivative of a matrix-valued function at x (B, dim) along m directions (B, m, dim); (B, m, *matrix)."""
    return _tangents(lambda v: function(v, theta), x, directions.movedim(1, 0)).movedim(0, 1)


def _tangents(function: Callable[[Tensor], Tensor], at: Tensor, ways: Tensor) -> Tensor:
    """Derivatives of a function at one place along m ways (m, B, n) at once, by forward mode; (m, B, *out)."""
    along = vmap(lambda way: jvp(function, (at,), (way,))[1], randomness="same")
    tangents: Tensor = along(ways)
    return tangents
