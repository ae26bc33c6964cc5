"""Python functions as `Function`s: derivatives by forward-mode automatic differentiation, traced once per shape."""

import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import jvp, vmap

from pcnet.errors import GraphError
from pcnet.functions.base import Function, PlainFunction
from pcnet.functions.closed_form import Identity
from pcnet.functions.linearisation import Linearisation
from pcnet.functions.tracing import trace


class TracedFunction(Function):
    """A Python function f(x, θ) with derivatives by automatic differentiation, traced once for each input shape.

    A trace follows later changes of the weights of a torch module, but of no other attributes.

    Args:
        function: f(x, θ), made of torch operations, batched over leading dimensions.
        jacobian: ∂f/∂x, (..., out, dim), if it is known analytically.
        parameter_jacobian: ∂f/∂θ, (..., out, p), if it is known analytically.
        parameters: Number of parameters, to be checked.
    """

    def __init__(
        self,
        function: PlainFunction,
        jacobian: PlainFunction | None = None,
        parameter_jacobian: PlainFunction | None = None,
        parameters: int | None = None,
    ) -> None:
        self.function = function
        self.parameters = parameters
        self.takes_causes = isinstance(function, WithCauses)
        self.takes_time = isinstance(function, WithTime)
        self._given = (function, jacobian, parameter_jacobian, parameters)
        self.jacobian = jacobian or (lambda x, theta: jacobian_of(lambda v: function(v, theta), x))
        self.parameter_jacobian = parameter_jacobian or (lambda x, theta: jacobian_of(lambda v: function(x, v), theta))
        self._traces: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, x: Tensor, parameters: Tensor) -> Tensor:
        return self.function(x, parameters)

    @property
    def identity_key(self) -> Hashable:
        return self._given

    def __repr__(self) -> str:
        return name_of(self.function)

    def linearise(self, x: Tensor, parameters: Tensor, rows: int) -> Linearisation:
        def body(x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            here, motion = x[:, 0], x[:, 1:rows]
            jacobian = self.jacobian(here, theta)
            value = self.function(here, theta)[:, None]
            if rows == 1:
                return value, jacobian, jacobian[:, None][:, :0]
            derivative = _along(self.jacobian, here, theta, motion)
            return torch.cat([value, motion @ jacobian.mT], 1), jacobian, derivative

        value, jacobian, derivative = self._traced("linearise", (2,), rows, body, x, parameters)
        return Linearisation(value, jacobian, derivative, x.shape[1])

    def contracted_hessian(self, x: Tensor, parameters: Tensor, weights: Tensor) -> Tensor | None:
        rows = weights.shape[1]

        def body(x: Tensor, theta: Tensor, weights: Tensor) -> Tensor:
            def gradient(here: Tensor) -> Tensor:
                """Gradient of Σ ξ·f̃ in each order of x̃, as a function of the value; (B, rows, dim)."""
                by_order = weights @ self.jacobian(here, theta)
                if rows == 1:
                    return by_order
                derivative = _along(self.jacobian, here, theta, x[:, 1:rows])  # (B, rows − 1, out, dim)
                value = by_order[:, :1] + (weights[:, 1:, None, :] @ derivative).sum(1)
                return torch.cat([value, by_order[:, 1:]], 1)

            return jacobian_of(gradient, x[:, 0])

        blocks: Tensor | None = self._traced("contracted_hessian", (0,), rows, body, x, parameters, weights)
        return blocks

    def _slope(self, x: Tensor, theta: Tensor, rows: int) -> Tensor:
        """∂f̃/∂θ, (B, rows, out, p), without tracing."""
        here, motion = x[:, 0], x[:, 1:rows]
        slope = self.parameter_jacobian(here, theta)[:, None]
        return slope if rows == 1 else torch.cat([slope, _along(self.parameter_jacobian, here, theta, motion)], 1)

    def parameter_slope(self, x: Tensor, parameters: Tensor, rows: int) -> Tensor:
        def body(x: Tensor, theta: Tensor) -> Tensor:
            return self._slope(x, theta, rows)

        found: Tensor = self._traced("parameter_slope", (), rows, body, x, parameters)
        return found

    def parameter_contracted_hessian(self, x: Tensor, parameters: Tensor, weights: Tensor) -> Tensor | None:
        rows = weights.shape[1]

        def body(x: Tensor, theta: Tensor, weights: Tensor) -> Tensor:
            return jacobian_of(lambda v: (weights[:, :, None] @ self._slope(x, v, rows)).sum(1)[:, 0], theta)

        found: Tensor | None = self._traced("parameter_contracted_hessian", (0,), rows, body, x, parameters, weights)
        return found

    def _traced(
        self, name: str, may_vanish: tuple[int, ...], rows: int, body: Callable[..., Any], *inputs: Tensor
    ) -> Any:
        """The value of a body, traced for these shapes; outputs that `may_vanish` are None if identically zero."""
        key = (name, rows, *((tuple(v.shape), v.dtype, v.device) for v in inputs))
        traced = self._traces.get(key)
        if traced is None:
            traced = self._traces[key] = trace(body, inputs, may_vanish)
        return traced(*inputs)


ThreeArguments = Callable[[Tensor, Tensor, Tensor], Tensor]
FourArguments = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class WithCauses:
    """A Python function f(x, v, θ) of a state (..., dim) and causes v as a function of (x and v joined, θ)."""

    function: ThreeArguments
    dim: int

    def __call__(self, x: Tensor, parameters: Tensor) -> Tensor:
        return self.function(x[..., : self.dim], x[..., self.dim :], parameters)


@dataclass(frozen=True)
class WithTime:
    """A Python function f(x, v, θ, t) of the time t (...) as well, as a function of (x, v and t joined, θ)."""

    function: FourArguments
    dim: int

    def __call__(self, x: Tensor, parameters: Tensor) -> Tensor:
        return self.function(x[..., : self.dim], x[..., self.dim : -1], parameters, x[..., -1])


def name_of(function: Any) -> str:
    """The name of a Python function, or of the class of a callable object."""
    if isinstance(function, (WithCauses, WithTime)):
        return name_of(function.function)
    return str(getattr(function, "__name__", type(function).__name__))


def as_function(function: Function | PlainFunction | None, dim: int | None = None) -> Function:
    """A `Function` unchanged, None as the identity, and any other callable as a `TracedFunction`.

    Args:
        function: The function. A callable with three arguments takes (state, causes, parameters), one with four
            (state, causes, parameters, time).
        dim: Dimension of the state, needed for a callable with more than two arguments.
    """
    if function is None:
        return Identity()
    if isinstance(function, Function):
        return function
    if not callable(function):
        matrix = "; of a matrix, pcnet.systems.linear(matrix)" if hasattr(function, "__len__") else ""
        shown = type(function).__name__ if hasattr(function, "shape") else repr(function)
        raise GraphError(f"a flow or mapping must be a function of (state, parameters), not {shown}{matrix}")
    required = 2 if dim is None else _required_arguments(function)
    if dim is not None and required == 3:
        return TracedFunction(WithCauses(cast("ThreeArguments", function), dim))
    if dim is not None and required == 4:
        return TracedFunction(WithTime(cast("FourArguments", function), dim))
    return TracedFunction(function)


def _required_arguments(function: Callable[..., Any]) -> int:
    target = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # built-in functions have no signature
        return 2
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def jacobian_of(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Jacobian (B, *out, n) of a function (B, n) → (B, *out) that does not mix batch elements."""
    n = at.shape[-1]
    if n == 0:
        return function(at)[..., None][..., :0]
    units = torch.eye(n, dtype=at.dtype, device=at.device)[:, None].expand(n, *at.shape)
    return _tangents(function, at, units).movedim(0, -1)


def _along(function: PlainFunction, x: Tensor, theta: Tensor, directions: Tensor) -> Tensor:
    """Derivatives of a matrix-valued function at x (B, dim) along m directions (B, m, dim); (B, m, *matrix)."""
    return _tangents(lambda v: function(v, theta), x, directions.movedim(1, 0)).movedim(0, 1)


def _tangents(function: Callable[[Tensor], Tensor], at: Tensor, directions: Tensor) -> Tensor:
    """Derivatives of a function along m directions (m, B, n), by forward mode; (m, B, *out)."""
    along = vmap(lambda direction: jvp(function, (at,), (direction,))[1], randomness="same")
    tangents: Tensor = along(directions)
    return tangents
