"""The linearisation of a generalised function, in structured form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pcnet.numerics.low_rank import LowRankPrecision
from pcnet.numerics.precision import SMALL, DenseCurvature, Precision


@dataclass(eq=False)
class Linearisation:
    """The value f̃ (B, rows, out) and the Jacobian ∂f̃/∂x̃ (B, rows·out, orders·dim) of a generalised function.

    ∂f̃/∂x̃ has J in its diagonal blocks, and below the diagonal of its first block column the derivatives of J.
    """

    value: Tensor  # f̃, (B, rows, out)
    jacobian: Tensor  # J = ∂f/∂x, (B, out, dim)
    jacobian_derivative: Tensor | None  # ∂(J x^(i))/∂x for i ≥ 1, (B, rows − 1, out, dim); None if f is linear in x
    orders: int  # number of orders of x̃

    @cached_property
    def slope(self) -> Tensor:
        """∂f̃/∂x̃ as a dense matrix, (B, rows·out, orders·dim)."""
        (batch, out, dim), rows = self.jacobian.shape, self.value.shape[1]
        slope = self.jacobian.new_zeros(batch, rows, out, self.orders, dim)
        slope.diagonal(dim1=1, dim2=3).copy_(self.jacobian[..., None])
        if self.jacobian_derivative is not None:
            slope[:, 1:, :, 0] = self.jacobian_derivative
        return slope.view(batch, rows * out, self.orders * dim)

    def restrict(self, part: slice, orders: int) -> Linearisation:
        """The linearisation in a part of x, such as one of its causes, of which `orders` orders are used."""
        derivative = None if self.jacobian_derivative is None else self.jacobian_derivative[..., part]
        return Linearisation(self.value, self.jacobian[..., part], derivative, orders)

    @property
    def small(self) -> bool:
        """Whether dense matrices are faster."""
        return self.value.shape[1] * self.value.shape[2] <= SMALL

    def vjp(self, weighted: Tensor) -> Tensor:
        """Vector-Jacobian product ξᵀ ∂f̃/∂x̃ of a weighted error ξ (B, rows, out); (B, orders·dim)."""
        batch = weighted.shape[0]
        if self.small:
            return torch.bmm(weighted.reshape(batch, 1, -1), self.slope)[:, 0]
        by_order = torch.bmm(weighted, self.jacobian)
        if self.jacobian_derivative is not None:
            derivative = self.jacobian_derivative.reshape(batch, -1, self.jacobian_derivative.shape[-1])
            by_order[:, :1] += torch.bmm(weighted[:, 1:].reshape(batch, 1, -1), derivative)
        return torch.constant_pad_nd(by_order, (0, 0, 0, self.orders - by_order.shape[1])).flatten(1)

    def quadratic_form(self, precision: Precision | DenseCurvature | LowRankPrecision) -> Tensor:
        """The Gauss–Newton curvature (∂f̃/∂x̃)ᵀ Π̃ ∂f̃/∂x̃, (B, n, n) with n = orders·dim.

        Large ones are formed from one pass over the channels: block (a, b) is S⁻¹_ab JᵀΠJ; the blocks of the first
        row and column are sums of S⁻¹_ij B_iᵀΠB_j with B_0 = J and B_i the derivative of J x^(i).
        """
        if self.small or not isinstance(precision, Precision) or not precision.separable:
            return precision.quadratic_form(self.slope)
        (batch, _, dim), rows = self.jacobian.shape, self.value.shape[1]
        columns = self.jacobian.mT  # (B, columns, out): faster with many channels
        if self.jacobian_derivative is not None:
            columns = torch.cat([columns[:, None], self.jacobian_derivative.mT], 1).flatten(1, 2)
        gram = torch.bmm(columns, precision.weigh_channels(columns.mT))
        gram = gram.view(batch, -1, dim, gram.shape[-1] // dim, dim)
        blocks = gram.new_zeros(batch, self.orders, dim, self.orders, dim)
        temporal = precision.temporal
        blocks[:, :rows, :, :rows] = torch.einsum("bij,bkl->bikjl", temporal, gram[:, 0, :, 0])
        if self.jacobian_derivative is not None:
            blocks[:, 0, :, :rows] = torch.einsum("bij,bikl->bkjl", temporal, gram[:, :, :, 0])
            blocks[:, :rows, :, 0] = blocks[:, 0, :, :rows].permute(0, 2, 3, 1)
            blocks[:, 0, :, 0] = torch.einsum("bij,bikjl->bkl", temporal, gram)
        return blocks.view(batch, self.orders * dim, self.orders * dim)
