"""Flows and mappings of generalised coordinates, with the derivatives that inference needs.

A plain function f(x, θ) moves a state x (..., dim) under parameters θ (..., parameters). In generalised
coordinates it becomes f̃(x̃, θ) = (f(x), J x', J x'', …) with J = ∂f/∂x. A `Function` gives f̃ and its derivatives;
they are closed forms, or derived from f once by tracing, never differentiated anew at every tick.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import jvp
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.dialect.common.cse_pass import CSEPass

from pcnet.errors import GraphError

Plain = Callable[[Tensor, Tensor], Tensor]
"""A function of (state, parameters), batched over leading dimensions."""


class Linearisation(NamedTuple):
    """f̃ (B, rows, out) and its slope ∂f̃/∂x̃ (B, rows·out, orders·dim)."""

    value: Tensor
    slope: Tensor


class Function(ABC):
    """A function of a generalised state and parameters. Shapes: x̃ (B, orders, dim), θ (B, p), ξ (B, rows, out)."""

    @abstractmethod
    def __call__(self, x: Tensor, parameters: Tensor) -> Tensor:
        """f(x, θ), batched over leading dimensions."""

    @abstractmethod
    def linearise(self, x: Tensor, parameters: Tensor, rows: int) -> Linearisation:
        """f̃ in its first `rows` orders, and ∂f̃/∂x̃."""

    @abstractmethod
    def curve(self, x: Tensor, parameters: Tensor, weights: Tensor) -> Tensor | None:
        """Σ ξ ∂²f̃/∂x̃² as its first block column (B, rows, dim, dim), or None where f is linear in x.

        f̃ is linear in all orders but the value, so that the rest is that column's transpose, and zero.
        """

    @abstractmethod
    def parameter_slope(self, x: Tensor, parameters: Tensor, rows: int) -> Tensor:
        """∂f̃/∂θ; (B, rows, out, p)."""

    @abstractmethod
    def parameter_curve(self, x: Tensor, parameters: Tensor, weights: Tensor) -> Tensor | None:
        """Σ ξ ∂²f̃/∂θ²; (B, p, p), or None where f is linear in θ."""


def spread_slope(jacobian: Tensor, bend: Tensor, orders: int) -> Tensor:
    """∂f̃/∂x̃ from J (B, out, dim) and ∂(J x^(i))/∂x for i ≥ 1 (B, rows − 1, out, dim): J on the diagonal of orders."""
    batch, out, dim = jacobian.shape
    rows = bend.shape[1] + 1
    slope = jacobian.new_zeros(batch, rows, out, orders, dim)
    slope.diagonal(dim1=1, dim2=3).copy_(jacobian[..., None])
    slope[:, 1:, :, 0] = bend
    return slope.view(batch, rows * out, orders * dim)


def less_curve(curvature: Tensor, curve: Tensor) -> Tensor:
    """A curvature (B, n, n) less Σ ξ ∂²f̃/∂x̃², which is given by its first block column (B, rows, dim, dim)."""
    batch, n, _ = curvature.shape
    rows, dim = curve.shape[1:3]
    blocks = curvature.clone().view(batch, n // dim, dim, n // dim, dim)
    blocks[:, 0, :, :rows] -= curve.transpose(1, 2)
    blocks[:, 1:rows, :, 0] -= curve[:, 1:]
    return blocks.view(batch, n, n)


class Identity(Function):
    """f(x) = x: the mapping of a state that is observed as it is."""

    def __init__(self) -> None:
        self._slopes: dict[tuple[Any, ...], Tensor] = {}

    def __call__(self, x: Tensor, parameters: Tensor) -> Tensor:
        return x

    def linearise(self, x: Tensor, parameters: Tensor, rows: int) -> Linearisation:
        key = (tuple(x.shape), rows, x.dtype, x.device)
        if key not in self._slopes:
            batch, orders, dim = x.shape
            eye = torch.eye(rows * dim, orders * dim, dtype=x.dtype, device=x.device)
            self._slopes[key] = eye.expand(batch, -1, -1).contiguous()
        return Linearisation(x[:, :rows], self._slopes[key])

    def curve(self, x: Tensor, parameters: Tensor, weights: Tensor) -> None:
        return None

    def parameter_slope(self, x: Tensor, parameters: Tensor, rows: int) -> Tensor:
        return x.new_zeros(x.shape[0], rows, x.shape[-1], parameters.shape[-1])

    def parameter_curve(self, x: Tensor, parameters: Tensor, weights: Tensor) -> None:
        return None


class Quadratic(Function):
    """f_a(x, θ) = Σ C[a,i,j,q] z_i z_j w_q with z = (1, x) and w = (1, θ): all derivatives in closed form.

    C (out, 1+dim, 1+dim, 1+p) is symmetrised in i, j. Lorenz, Lotka–Volterra and linear flows are of this kind.
    """

    def __init__(self, coefficients: Tensor) -> None:
        c = coefficients.detach().to(torch.float64)
        self.coefficients = 0.5 * (c + c.transpose(1, 2))
        self.out, self.dim, self.parameters = c.shape[0], c.shape[1] - 1, c.shape[3] - 1
        self._cast: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
        self._kept: tuple[Tensor, tuple[Tensor, Tensor]] | None = None

    def _tables(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The coefficients as matrices in the dtype of `like`: (1+p, out·z·z) and, by parameter, (z, p·out·z)."""
        key = (like.dtype, like.device)
        if key not in self._cast:
            c = self.coefficients.to(like)
            by_parameter = c.permute(3, 0, 1, 2).reshape(c.shape[3], -1).contiguous()
            learned = c[..., 1:].permute(2, 3, 0, 1).reshape(c.shape[2], -1).contiguous()
            self._cast[key] = by_parameter, learned
        return self._cast[key]

    def _form(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Σ_q C w_q (B, out·z, z), and the Hessian of f by output (B, out, dim·dim).

        Kept for as long as the parameters are the very same tensor, since they change only on the slow clock.
        """
        kept = self._kept
        if kept is not None and kept[0] is parameters:
            return kept[1]
        table, batch = self._tables(parameters)[0], parameters.shape[0]
        flat = torch.addmm(table[0], parameters, table[1:]) if self.parameters else table.expand(batch, -1)
        form = flat.view(batch, self.out, self.dim + 1, self.dim + 1)
        hessian = 2.0 * form[..., 1:, 1:]
        made = form.reshape(batch, -1, self.dim + 1), hessian.reshape(batch, self.out, -1)
        self._kept = parameters, made
        return made

    def __call__(self, x: Tensor, parameters: Tensor) -> Tensor:
        c = self.coefficients.to(x)
        one = torch.ones_like(x[..., :1])
        z = torch.cat([one, x], -1)
        w = torch.cat([one.expand(*parameters.shape[:-1], 1), parameters], -1)
        return torch.einsum("aijq,...i,...j,...q->...a", c, z, z, w)

    def linearise(self, x: Tensor, parameters: Tensor, rows: int) -> Linearisation:
        batch, orders, dim = x.shape
        form, hessian = self._form(parameters)
        z = torch.constant_pad_nd(x[:, 0], (1, 0), 1.0)
        half = torch.bmm(form, z[..., None]).view(batch, self.out, dim + 1)
        value = torch.bmm(half, z[..., None]).transpose(1, 2)
        jacobian = 2.0 * half[..., 1:]
        motion = x[:, 1:rows]
        bend = torch.bmm(hessian.view(batch, -1, dim), motion.mT).view(batch, self.out, dim, rows - 1)
        if rows > 1:
            value = torch.cat([value, torch.bmm(motion, jacobian.mT)], 1)
        return Linearisation(value, spread_slope(jacobian, bend.permute(0, 3, 1, 2), orders))

    def curve(self, x: Tensor, parameters: Tensor, weights: Tensor) -> Tensor:
        batch, _, dim = x.shape
        return torch.bmm(weights, self._form(parameters)[1]).view(batch, -1, dim, dim)

    def parameter_slope(self, x: Tensor, parameters: Tensor, rows: int) -> Tensor:
        batch, _, dim = x.shape
        z = torch.constant_pad_nd(x[:, 0], (1, 0), 1.0)
        half = torch.mm(z, self._tables(x)[1]).view(batch, -1, dim + 1)
        lifted = torch.cat([z[:, None], torch.constant_pad_nd(2.0 * x[:, 1:rows], (1, 0))], 1)
        slope = torch.bmm(half, lifted.mT).view(batch, self.parameters, self.out, rows)
        return slope.permute(0, 3, 2, 1)

    def parameter_curve(self, x: Tensor, parameters: Tensor, weights: Tensor) -> None:
        return None


class Derived(Function):
    """A plain function with derivatives derived by tracing it once for each shape of input.

    An analytic `jacobian` (..., out, dim) or `parameter_jacobian` (..., out, p) is used where given.
    """

    def __init__(self, function: Plain, jacobian: Plain | None = None, parameter_jacobian: Plain | None = None) -> None:
        self.function = function
        self.jacobian = jacobian or (
            lambda x, theta: _columns(lambda v: function(v, theta.expand(len(v), *theta.shape)), x)
        )
        self.parameter_jacobian = parameter_jacobian or (
            lambda x, theta: _columns(lambda v: function(x.expand(len(v), *x.shape), v), theta)
        )
        self._traces: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, x: Tensor, parameters: Tensor) -> Tensor:
        return self.function(x, parameters)

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
        return Linearisation(value, spread_slope(jacobian, bend, x.shape[1]))

    def curve(self, x: Tensor, parameters: Tensor, weights: Tensor) -> Tensor:
        rows = weights.shape[1]

        def body(x: Tensor, theta: Tensor, weights: Tensor) -> Tensor:
            def gradient(here: Tensor) -> Tensor:
                """Of Σ ξ·f̃ in each order of x̃, as a function of the value; (..., rows, dim)."""
                theta_, weights_, motion = _like(theta, here), _like(weights, here), _like(x[:, 1:rows], here)
                by_order = weights_ @ self.jacobian(here, theta_)
                if rows == 1:
                    return by_order
                bend = _along(self.jacobian, here, theta_, motion)  # (..., rows − 1, out, dim)
                value = by_order[..., :1, :] + (weights_[..., 1:, None, :] @ bend).sum(-3)
                return torch.cat([value, by_order[..., 1:, :]], -2)

            return _columns(gradient, x[:, 0])

        blocks: Tensor = self._traced("curve", rows, body, x, parameters, weights)
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

    def parameter_curve(self, x: Tensor, parameters: Tensor, weights: Tensor) -> Tensor:
        rows = weights.shape[1]

        def body(x: Tensor, theta: Tensor, weights: Tensor) -> Tensor:
            here, motion = x[:, 0], x[:, 1:rows]

            def gradient(theta: Tensor) -> Tensor:
                """Of Σ ξ·f̃ in θ, as a function of θ; (..., p)."""
                here_, weights_, motion_ = _like(here, theta), _like(weights, theta), _like(motion, theta)
                slope = self.parameter_jacobian(here_, theta)[..., None, :, :]
                if rows > 1:
                    slope = torch.cat([slope, _along(self.parameter_jacobian, here_, theta, motion_)], -3)
                return (weights_[..., None, :] @ slope).sum(-3)[..., 0, :]

            return _columns(gradient, theta)

        result: Tensor = self._traced("parameter_curve", rows, body, x, parameters, weights)
        return result

    def _traced(self, name: str, rows: int, body: Callable[..., Any], *inputs: Tensor) -> Any:
        key = (name, rows, *((tuple(v.shape), v.dtype, v.device) for v in inputs))
        trace = self._traces.get(key)
        if trace is None:
            trace = self._traces[key] = _trace(body, inputs)
        return trace(*inputs)


def as_function(function: Function | Plain | None) -> Function:
    """A `Function` as it is, None as the identity, and any other callable with derived derivatives."""
    if function is None:
        return Identity()
    if isinstance(function, Function):
        return function
    if not callable(function):
        raise GraphError(f"a flow or mapping must be a function of (state, parameters), not {function!r}")
    return Derived(function)


def _like(value: Tensor, leading: Tensor) -> Tensor:
    """`value` (B, …) repeated over the dimensions that `leading` (…, B, n) has before B."""
    extra = leading.shape[:-2]
    return value.expand(*extra, *value.shape) if extra else value


def _columns(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Derivative of a function (..., n) → (..., *out), batched over leading dimensions, as (..., *out, n).

    One forward-mode pass over n copies of the input, each with its own unit tangent.
    """
    n = at.shape[-1]
    if n == 0:
        return function(at[None])[0][..., None][..., :0]
    copies = at.expand(n, *at.shape).contiguous()
    units = torch.eye(n, dtype=at.dtype, device=at.device).view(n, *(1,) * (at.dim() - 1), n)
    tangent: Tensor = jvp(function, (copies,), (units.expand_as(copies).contiguous(),))[1]
    return tangent.movedim(0, -1)


def _along(function: Plain, x: Tensor, theta: Tensor, directions: Tensor) -> Tensor:
    """Derivative of a matrix-valued function at x (..., dim) along m directions (..., m, dim); (..., m, *matrix)."""
    ways = directions.movedim(-2, 0).contiguous()
    copies = x.expand(ways.shape).contiguous()
    tangent: Tensor = jvp(lambda v: function(v, theta.expand(len(v), *theta.shape)), (copies,), (ways,))[1]
    return tangent.movedim(0, x.dim() - 1)


def _trace(body: Callable[..., Any], inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """The body as a flat list of tensor operations, for inputs of these shapes."""
    with torch.inference_mode(False), torch.no_grad():
        examples = [v.clone() for v in inputs]
        module = make_fx(body)(*examples)
        shared = CSEPass()(module)
        module = module if shared is None else shared.graph_module
        module.graph.eliminate_dead_code()
        module.recompile()
    traced: Callable[..., Any] = module.forward
    return traced
