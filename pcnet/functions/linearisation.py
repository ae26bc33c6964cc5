"""A function of a generalised state as it is near one: its value and its slope, whose structure is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from pcnet.numerics.precision import SMALL, Dense, Precision


class Linearisation:
    """f̃ (B, rows, out) and its slope ∂f̃/∂x̃ (B, rows·out, orders·dim), with what inference asks of it.

    The slope has J = ∂f/∂x (B, out, dim) on its diagonal of orders and, in its first block column, the bend, which is
    ∂(J x^(i))/∂x for i ≥ 1 (B, rows − 1, out, dim), or None where f is linear in x. It is formed only where small.
    """

    __slots__ = ("_slope", "bend", "jacobian", "orders", "value")

    def __init__(self, value: Tensor, jacobian: Tensor, bend: Tensor | None, orders: int) -> None:
        self.value = value
        self.jacobian = jacobian
        self.bend = bend
        self.orders = orders
        self._slope: Tensor | None = None

    @property
    def slope(self) -> Tensor:
        if self._slope is None:
            (batch, out, dim), rows = self.jacobian.shape, self.value.shape[1]
            slope = self.jacobian.new_zeros(batch, rows, out, self.orders, dim)
            slope.diagonal(dim1=1, dim2=3).copy_(self.jacobian[..., None])
            if self.bend is not None:
                slope[:, 1:, :, 0] = self.bend
            self._slope = slope.view(batch, rows * out, self.orders * dim)
        return self._slope

    def of(self, part: slice, orders: int) -> Linearisation:
        """The same in part of the argument, of which so many orders count."""
        bend = None if self.bend is None else self.bend[..., part]
        return Linearisation(self.value, self.jacobian[..., part], bend, orders)

    @property
    def small(self) -> bool:
        return self.value.shape[1] * self.value.shape[2] <= SMALL

    def pull(self, weighted: Tensor) -> Tensor:
        """What an error ξ (B, rows, out) says of x̃: ξᵀ ∂f̃/∂x̃, (B, orders·dim)."""
        batch = weighted.shape[0]
        if self.small:
            return torch.bmm(weighted.reshape(batch, 1, -1), self.slope)[:, 0]
        by_order = torch.bmm(weighted, self.jacobian)
        if self.bend is not None:
            bend = self.bend.reshape(batch, -1, self.bend.shape[-1])
            by_order[:, :1] += torch.bmm(weighted[:, 1:].reshape(batch, 1, -1), bend)
        return torch.constant_pad_nd(by_order, (0, 0, 0, self.orders - by_order.shape[1])).flatten(1)

    def sandwich(self, precision: Precision | Dense) -> Tensor:
        """(∂f̃/∂x̃)ᵀ Π̃ ∂f̃/∂x̃; (B, n, n) with n = orders·dim.

        By blocks of orders (a, b): S⁻¹_ab JᵀΠJ and, in the first row and column, where bends come in, sums of
        S⁻¹_ij B_iᵀΠB_j with B_0 = J. So it takes one pass over the channels.
        """
        if self.small or not isinstance(precision, Precision) or not precision.separable:
            return precision.sandwich(self.slope)
        (batch, _, dim), rows = self.jacobian.shape, self.value.shape[1]
        columns = self.jacobian.mT  # and those of the bends: (B, columns, out), by which many channels are quicker
        if self.bend is not None:
            columns = torch.cat([columns[:, None], self.bend.mT], 1).flatten(1, 2)
        gram = torch.bmm(columns, precision.across(columns.mT))
        gram = gram.view(batch, -1, dim, gram.shape[-1] // dim, dim)
        blocks = gram.new_zeros(batch, self.orders, dim, self.orders, dim)
        temporal = precision.temporal
        blocks[:, :rows, :, :rows] = torch.einsum("bij,bkl->bikjl", temporal, gram[:, 0, :, 0])
        if self.bend is not None:
            blocks[:, 0, :, :rows] = torch.einsum("bij,bikl->bkjl", temporal, gram[:, :, :, 0])
            blocks[:, :rows, :, 0] = blocks[:, 0, :, :rows].permute(0, 2, 3, 1)
            blocks[:, 0, :, 0] = torch.einsum("bij,bikjl->bkl", temporal, gram)
        return blocks.view(batch, self.orders * dim, self.orders * dim)
