"""Functions with derivatives in closed form: identity, linear, quadratic."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from pcnet.errors import GraphError, SettingError
from pcnet.functions.base import Function
from pcnet.functions.linearisation import Linearisation


class Affine(Function):
    """Base class of functions that are linear in x and in θ: both contracted Hessians vanish."""

    def contracted_hessian(self, x: Tensor, parameters: Tensor, weights: Tensor) -> None:
        return None

    def parameter_contracted_hessian(self, x: Tensor, parameters: Tensor, weights: Tensor) -> None:
        return None


class Identity(Affine):
    """f(x) = x, the default mapping from a state to a sensory node."""

    parameters = 0
    is_affine = True

    def __init__(self) -> None:
        self._eyes: dict[tuple[Any, ...], Tensor] = {}

    @property
    def identity_key(self) -> Hashable:
        return Identity

    def __call__(self, x: Tensor, parameters: Tensor) -> Tensor:
        return x

    def __repr__(self) -> str:
        return "identity"

    def linearise(self, x: Tensor, parameters: Tensor, rows: int) -> Linearisation:
        batch, orders, dim = x.shape
        key = (batch, dim, x.dtype, x.device)
        if key not in self._eyes:
            with torch.inference_mode(False):
                self._eyes[key] = torch.eye(dim, dtype=x.dtype, device=x.device).repeat(batch, 1, 1)
        return Linearisation(x[:, :rows], self._eyes[key], None, orders)

    def parameter_slope(self, x: Tensor, parameters: Tensor, rows: int) -> Tensor:
        return x.new_zeros(x.shape[0], rows, x.shape[-1], parameters.shape[-1])


class Linear(Affine):
    """f(x) = Ax + b, or f(x, v) = Ax + Bv + b.

    Args:
        matrix: A, (out, dim). Without it the parameters are the elements of A, row by row.
        offset: b, (out,) or one number; 0 by default.
        dim: Dimension of x and f, given instead of a matrix.
        causes: B, (out, causes).
    """

    def __init__(
        self,
        matrix: Tensor | None = None,
        offset: Tensor | None = None,
        dim: int | None = None,
        causes: Tensor | None = None,
    ) -> None:
        if (matrix is None) == (dim is None):
            raise SettingError("Linear: give either matrix, or dim for a matrix of parameters")
        if matrix is None and causes is not None:
            raise SettingError("Linear: causes need a matrix; with dim alone leave them out")
        self.takes_causes = causes is not None
        self.matrix = None if matrix is None else torch.as_tensor(matrix, dtype=torch.float64).detach().clone()
        if self.matrix is not None and self.matrix.dim() != 2:
            raise SettingError(f"Linear: the matrix has shape {tuple(self.matrix.shape)}; it must have two dimensions")
        if self.matrix is not None and causes is not None:
            further = torch.as_tensor(causes, dtype=torch.float64).detach().reshape(len(self.matrix), -1)
            self.matrix = torch.cat([self.matrix, further], 1)
        self.out, self.dim = (dim or 0, dim or 0) if self.matrix is None else self.matrix.shape
        self.parameters = self.out * self.dim if self.matrix is None else 0
        self.is_affine = self.matrix is not None
        self.offset = torch.as_tensor(0.0 if offset is None else offset, dtype=torch.float64).detach()
        self.offset = self.offset.expand(self.out).clone()
        self._cast: dict[tuple[Any, ...], tuple[Tensor | None, Tensor]] = {}

    def __repr__(self) -> str:
        return f"Linear({self.dim} → {self.out})"

    @property
    def identity_key(self) -> Hashable:
        known = None if self.matrix is None else self.matrix.numpy().tobytes()
        return (Linear, self.takes_causes, self.out, self.dim, known, self.offset.numpy().tobytes())

    def _tables(self, like: Tensor, batch: int) -> tuple[Tensor | None, Tensor]:
        """A (B, out, dim), if it is given, and b (out,), in the dtype of `like`."""
        key = (like.dtype, like.device, batch)
        if key not in self._cast:
            with torch.inference_mode(False):  # kept after the run, when autograd may need them
                # stored by columns, which is faster with many channels
                matrix = None if self.matrix is None else self.matrix.T.to(like).repeat(batch, 1, 1).mT
                self._cast[key] = matrix, self.offset.to(like)
        return self._cast[key]

    def __call__(self, x: Tensor, parameters: Tensor) -> Tensor:
        _check_sizes(self, x, parameters)
        if self.matrix is None:
            matrix = parameters.reshape(*parameters.shape[:-1], self.out, self.dim)
            return (matrix @ x[..., None])[..., 0] + self.offset.to(x)
        return x @ self.matrix.to(x).T + self.offset.to(x)

    def linearise(self, x: Tensor, parameters: Tensor, rows: int) -> Linearisation:
        matrix, offset = self._tables(x, x.shape[0])
        jacobian = parameters.view(-1, self.out, self.dim) if matrix is None else matrix
        value = torch.bmm(x[:, :rows], jacobian.mT)
        value[:, 0] += offset
        return Linearisation(value, jacobian, None, x.shape[1])

    def parameter_slope(self, x: Tensor, parameters: Tensor, rows: int) -> Tensor:
        if self.matrix is not None:
            return x.new_zeros(x.shape[0], rows, self.out, 0)
        eye = torch.eye(self.out, dtype=x.dtype, device=x.device)
        return torch.einsum("ac,brd->bracd", eye, x[:, :rows]).flatten(3)


class Quadratic(Function):
    """f_a(x, θ) = Σ C[a,i,j,q] z_i z_j w_q with z = (1, x) and w = (1, θ).

    The flows of Lorenz and of Lotka and Volterra are of this kind.

    Args:
        coefficients: C, (out, 1 + dim, 1 + dim, 1 + p); it is symmetrised in i and j.
    """

    def __init__(self, coefficients: Tensor) -> None:
        c = torch.as_tensor(coefficients, dtype=torch.float64).detach()
        self.coefficients = 0.5 * (c + c.transpose(1, 2))
        self.out, self.dim, self.parameters = c.shape[0], c.shape[1] - 1, c.shape[3] - 1
        # C with as few rows of each form as possible, (1 + p, out·z·z); made here, because the first call may be within
        # a trace or a derivative of torch, and what is made there cannot be kept
        with torch.inference_mode(False):
            self._gathered = _gathered(self.coefficients).permute(3, 0, 1, 2).reshape(c.shape[3], -1).contiguous()
        self._cast: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
        self._cached: tuple[Tensor, tuple[Tensor, Tensor]] | None = None

    @property
    def identity_key(self) -> Hashable:
        return (Quadratic, self.takes_causes, tuple(self.coefficients.shape), self.coefficients.numpy().tobytes())

    def _tables(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """C in the dtype of `like` as matrices: (1 + p, out·z·z); and without q = 0, (z, p·out·z)."""
        key = (like.dtype, like.device)
        if key not in self._cast:
            with torch.inference_mode(False):  # kept after the run, when autograd may need them
                c = self.coefficients.to(dtype=like.dtype, device=like.device)
                by_parameter = c.permute(3, 0, 1, 2).reshape(c.shape[3], -1).contiguous()
                learned = c[..., 1:].permute(2, 3, 0, 1).reshape(c.shape[2], -1).contiguous()
            self._cast[key] = by_parameter, learned
        return self._cast[key]

    def _form(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Σ_q C w_q (B, out·z, z), and the Hessian of each output (B, out, dim·dim).

        Both are cached for one parameter tensor, because parameters change only at slow ticks. This is safe in
        inference mode only, where tensors are not changed in place.
        """
        if self._cached is not None and self._cached[0] is parameters:
            return self._cached[1]
        table, batch = self._tables(parameters)[0], parameters.shape[0]
        flat = torch.addmm(table[0], parameters, table[1:]) if self.parameters else table.expand(batch, -1)
        form = flat.view(batch, self.out, self.dim + 1, self.dim + 1)
        hessian = 2.0 * form[..., 1:, 1:]
        made = form.reshape(batch, -1, self.dim + 1), hessian.reshape(batch, self.out, -1)
        if parameters.is_inference():
            self._cached = parameters, made
        return made

    def __call__(self, x: Tensor, parameters: Tensor) -> Tensor:
        _check_sizes(self, x, parameters)
        table, size = self._gathered.to(x), self.dim + 1
        z = torch.constant_pad_nd(x, (1, 0), 1.0)
        flat = parameters @ table[1:] + table[0]
        half = flat.reshape(*flat.shape[:-1], self.out, size, size) @ z[..., None, :, None]
        value: Tensor = (z[..., None, None, :] @ half)[..., 0, 0]
        return value

    def linearise(self, x: Tensor, parameters: Tensor, rows: int) -> Linearisation:
        batch, orders, dim = x.shape
        form, hessian = self._form(parameters)
        z = torch.constant_pad_nd(x[:, 0], (1, 0), 1.0)
        half = torch.bmm(form, z[..., None]).view(batch, self.out, dim + 1)
        value = torch.bmm(half, z[..., None]).transpose(1, 2)
        jacobian = 2.0 * half[..., 1:]
        motion = x[:, 1:rows]
        derivative = torch.bmm(hessian.view(batch, -1, dim), motion.mT).view(batch, self.out, dim, rows - 1)
        if rows > 1:
            value = torch.cat([value, torch.bmm(motion, jacobian.mT)], 1)
        return Linearisation(value, jacobian, derivative.permute(0, 3, 1, 2), orders)

    def contracted_hessian(self, x: Tensor, parameters: Tensor, weights: Tensor) -> Tensor:
        batch, _, dim = x.shape
        return torch.bmm(weights, self._form(parameters)[1]).view(batch, -1, dim, dim)

    def parameter_slope(self, x: Tensor, parameters: Tensor, rows: int) -> Tensor:
        batch, _, dim = x.shape
        z = torch.constant_pad_nd(x[:, 0], (1, 0), 1.0)
        half = torch.mm(z, self._tables(x)[1]).view(batch, -1, dim + 1)
        lifted = torch.cat([z[:, None], torch.constant_pad_nd(2.0 * x[:, 1:rows], (1, 0))], 1)
        slope = torch.bmm(half, lifted.mT).view(batch, -1, self.out, rows)
        return slope.permute(0, 3, 2, 1)

    def parameter_contracted_hessian(self, x: Tensor, parameters: Tensor, weights: Tensor) -> None:
        return None


def _gathered(c: Tensor) -> Tensor:
    """Symmetric coefficients C[a,i,j,q] with the sum of each pair (i, j), (j, i) in that row of a with more terms."""
    terms = (c != 0).any(-1).sum(-1)
    terms[:, 0] = 0  # the row of the constant 1 has no use of its own
    place = torch.arange(c.shape[1])
    more = terms[:, :, None] - terms[:, None, :]
    kept = (more > 0) | ((more == 0) & (place[:, None] >= place))
    weight = torch.where(place[:, None] == place, 1.0, 2.0) * kept
    return c * weight[..., None]


def _check_sizes(function: Linear | Quadratic, x: Tensor, parameters: Tensor) -> None:
    if x.shape[-1] != function.dim or parameters.shape[-1] != function.parameters:
        raise GraphError(
            f"{function!r} takes states of dimension {function.dim} and {function.parameters} parameters, not "
            f"{x.shape[-1]} and {parameters.shape[-1]}"
        )
