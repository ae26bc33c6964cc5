"""Precision matrices of generalised errors, with their structure."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor


class Precision:
    """Π̃ = temporal ⊗ diag(channel), channel = e^λ: temporal (B, rows, rows), channel (B, dim), log_det (B,).

    It is formed densely only where it is small, since that is quicker there. bends: whether the width w of the
    autocorrelation behind the temporal part is a parameter as well: temporal = diag(wⁱ) T diag(wⁱ) over the orders i.
    """

    __slots__ = ("_dense", "bends", "channel", "log_det", "temporal")

    separable: ClassVar[bool] = True
    """Whether all channels have the same temporal part."""

    def __init__(self, temporal: Tensor, channel: Tensor, log_det: Tensor, bends: bool = False) -> None:
        self.temporal = temporal
        self.channel = channel
        self.log_det = log_det
        self.bends = bends
        self._dense: Tensor | None = None

    def of_seen(self, seen: Tensor) -> Precision:
        """The precision of what is seen: of each channel the first `seen` orders; (B, dim). The rest weighs nothing."""
        leading, log_det = leading_precisions(self.temporal)
        batch = torch.arange(len(seen), device=seen.device)[:, None]
        orders = seen.long()
        total = (torch.xlogy(seen, self.channel) + log_det[batch, orders]).sum(-1)
        return ObservedPrecision(leading[batch, orders], self.channel, total, seen, self.bends)

    def scaled(self, weight: Tensor) -> Precision:
        """The same with channels weighed (B, dim); its log-determinant is left as it is."""
        return Precision(self.temporal, self.channel * weight, self.log_det, self.bends)

    def weigh(self, error: Tensor) -> Tensor:
        """ξ = Π̃ε; (B, rows, dim) → (B, rows, dim)."""
        return torch.bmm(self.temporal, error * self.channel[:, None, :])

    def sandwich(self, slope: Tensor) -> Tensor:
        """JᵀΠ̃J; (B, rows·dim, n) → (B, n, n)."""
        if slope.shape[1] <= SMALL:
            return torch.bmm(slope.mT, torch.bmm(self.dense(), slope))
        return self.between(slope, slope)

    def between(self, left: Tensor, right: Tensor) -> Tensor:
        """LᵀΠ̃R; (B, rows·dim, m) and (B, rows·dim, n) → (B, m, n)."""
        batch, rows = self.temporal.shape[:2]
        n = right.shape[-1]
        mixed = torch.bmm(self.temporal, right.expand(batch, -1, -1).reshape(batch, rows, -1))
        weighted = self.across(mixed.view(batch, rows, -1, n))
        return torch.bmm(left.expand(batch, -1, -1).mT, weighted.view(batch, -1, n))

    def across(self, values: Tensor) -> Tensor:
        """The channels of (B, …, dim, n), weighed as at one order."""
        return values * self.channel.view(len(self.channel), *(1,) * (values.dim() - 3), -1, 1)

    def dense(self) -> Tensor:
        """Π̃ itself, (B, rows·dim, rows·dim)."""
        if self._dense is None:
            size = self.temporal.shape[1] * self.channel.shape[1]
            blocks = self.temporal[:, :, None, :, None] * self._matrix()[:, None, :, None, :]
            self._dense = blocks.reshape(-1, size, size)
        return self._dense

    def _matrix(self) -> Tensor:
        """The precision of the channels at one order, (B, dim, dim)."""
        return self.channel.diag_embed()

    # --- what an error says of the precision's own parameters, here λ (B, dim), through E = ½ε̃ᵀΠ̃ε̃ − ½log|Π̃| -----------
    def slope(self, error: Tensor, weighted: Tensor) -> Tensor:
        """∂E/∂λ = ½(ξ·ε − rows)."""
        return 0.5 * (quadratic(weighted, error) - error.shape[1])

    def information(self) -> Tensor:
        """The expected curvature of E, rows/2; those of diagonals are given as such."""
        return torch.full_like(self.channel, 0.5 * self.temporal.shape[1])

    def curvature(self, error: Tensor, weighted: Tensor) -> Tensor:
        """∂²E/∂λ² = ½ξ·ε."""
        return 0.5 * quadratic(weighted, error)

    def slope_by_width(self, error: Tensor, weighted: Tensor) -> Tensor:
        """∂E/∂log w = Σ i(ξᵢ·εᵢ − channels of which the order i is seen); (B, 1)."""
        order = torch.arange(error.shape[1]).to(error)
        seen = self._orders_seen()
        return ((order[:, None] * weighted * error).sum((1, 2)) - (seen * (seen - 1) / 2).sum(-1))[:, None]

    def information_with_width(self) -> Tensor:
        """The expected curvature of E over λ and then log w, (B, dim + 1, dim + 1).

        Σi between the two, and Σ tr(N² + N S⁻¹ N S) with N = diag(i) over the channels along log w.
        """
        seen, own = self._orders_seen(), self.information()
        temporal = self.temporal if self.temporal.dim() == 4 else self.temporal[:, None]
        order = torch.arange(temporal.shape[-1]).to(temporal)
        there = (order < seen[..., None]).to(temporal)
        inverse = torch.linalg.inv(temporal + (1 - there[:, : temporal.shape[1]]).diag_embed())
        turned = (order[:, None] * temporal * order * inverse.mT).sum((-2, -1))
        along = ((order**2 * there).sum(-1) + turned).sum(-1)
        joint = torch.constant_pad_nd(own.diag_embed(), (0, 1, 0, 1))
        joint[:, -1, :-1] = joint[:, :-1, -1] = seen * (seen - 1) / 2
        joint[:, -1, -1] = along
        return joint

    def _orders_seen(self) -> Tensor:
        """Of each channel, (B, dim)."""
        return torch.full_like(self.channel, self.temporal.shape[1])


class ObservedPrecision(Precision):
    """Π̃ where some channels are missing, or some of their orders: each channel has a temporal part of its own.

    temporal (B, dim, rows, rows) is, for a channel of which r orders are seen, the inverse of the first r rows and
    columns of S, and zero beyond: evidence that is missing is integrated out, not set to zero.
    """

    __slots__ = ("seen",)
    separable = False

    def __init__(self, temporal: Tensor, channel: Tensor, log_det: Tensor, seen: Tensor, bends: bool = False) -> None:
        super().__init__(temporal, channel, log_det, bends)
        self.seen = seen

    def scaled(self, weight: Tensor) -> Precision:
        return ObservedPrecision(self.temporal, self.channel * weight, self.log_det, self.seen, self.bends)

    def weigh(self, error: Tensor) -> Tensor:
        return torch.einsum("bcij,bjc->bic", self.temporal, error * self.channel[:, None, :])

    def between(self, left: Tensor, right: Tensor) -> Tensor:
        batch, dim, rows, _ = self.temporal.shape
        n = right.shape[-1]
        by_channel = right.expand(batch, -1, -1).reshape(batch, rows, dim, n) * self.channel[:, None, :, None]
        weighted = torch.einsum("bcij,bjcn->bicn", self.temporal, by_channel)
        return torch.bmm(left.expand(batch, -1, -1).mT, weighted.reshape(batch, -1, n))

    def dense(self) -> Tensor:
        if self._dense is None:
            batch, dim, rows, _ = self.temporal.shape
            blocks = (self.temporal * self.channel[:, :, None, None]).permute(0, 2, 3, 1).diag_embed()
            self._dense = blocks.transpose(2, 3).reshape(batch, rows * dim, rows * dim)
        return self._dense

    def slope(self, error: Tensor, weighted: Tensor) -> Tensor:
        return 0.5 * (quadratic(weighted, error) - self.seen)

    def information(self) -> Tensor:
        return 0.5 * self.seen

    def _orders_seen(self) -> Tensor:
        return self.seen


class CholeskyPrecision(Precision):
    """Π̃ = temporal ⊗ Π with Π = TᵀΛT: T (B, dim, dim) is one on its diagonal and zero above, Λ = diag(e^λ), λ (B, dim).

    This is Cholesky's factorisation, so that Π is positive definite whatever λ and T are, and log|Π| = Σλ. e^λ_i is the
    precision of channel i once the channels before it are known, and −T_ij is how much j < i then says about i.
    `channel` is Π itself. The parameters are λ and then T below its diagonal, row by row.

    With the second moment M = Σ S⁻¹_ij ε_i ε_jᵀ (dim, dim) over the orders, 2E = Σ_i e^λ_i (TMTᵀ)_ii − rows Σλ + …;
    M is rows · Π⁻¹ on average. Different rows of T do not interact.
    """

    __slots__ = ("factor", "log_channel")

    def __init__(self, temporal: Tensor, log_channel: Tensor, factor: Tensor, log_det: Tensor) -> None:
        super().__init__(temporal, factor.mT @ (log_channel.exp()[..., None] * factor), log_det)
        self.log_channel = log_channel
        self.factor = factor

    def of_seen(self, seen: Tensor) -> Precision:
        return ObservedCholeskyPrecision(self, seen)

    def weigh(self, error: Tensor) -> Tensor:
        return torch.bmm(torch.bmm(self.temporal, error), self.channel)

    def across(self, values: Tensor) -> Tensor:
        return self.channel.view(len(self.channel), *(1,) * (values.dim() - 3), *self.channel.shape[1:]) @ values

    def _matrix(self) -> Tensor:
        return self.channel

    def slope(self, error: Tensor, weighted: Tensor) -> Tensor:
        """∂E/∂λ_i = ½(e^λ_i (TMTᵀ)_ii − rows), ∂E/∂T_ij = e^λ_i (TM)_ij."""
        pull = self._pull(self._moment(error))
        own = 0.5 * ((pull * self.factor).sum(-1) - error.shape[1])
        i, j = self._below
        return torch.cat([own, pull[:, i, j]], -1)

    def information(self) -> Tensor:
        """rows/2 along λ, and rows e^λ_i (Π⁻¹)_jk between T_ij and T_ik; none between λ and T; (B, n, n)."""
        rows = self.temporal.shape[1]
        eye = torch.eye(self.factor.shape[-1]).to(self.factor)
        inverse = torch.linalg.solve_triangular(self.factor, eye, upper=False, unitriangular=True)
        covariance = (inverse * (-self.log_channel).exp()[:, None, :]) @ inverse.mT
        return self._assemble(torch.full_like(self.log_channel, 0.5 * rows), None, rows * covariance)

    def curvature(self, error: Tensor, weighted: Tensor) -> Tensor:
        """½e^λ_i (TMTᵀ)_ii along λ, e^λ_i (TM)_ij between λ_i and T_ij, e^λ_i M_jk between T_ij and T_ik; (B, n, n)."""
        moment = self._moment(error)
        pull = self._pull(moment)
        return self._assemble(0.5 * (pull * self.factor).sum(-1), pull, moment)

    @property
    def _below(self) -> Tensor:
        dim = self.factor.shape[-1]
        return torch.tril_indices(dim, dim, -1, device=self.factor.device)

    def _moment(self, error: Tensor) -> Tensor:
        return torch.bmm(error.mT, torch.bmm(self.temporal, error))

    def _pull(self, moment: Tensor) -> Tensor:
        """e^λ_i (TM)_ij."""
        return self.log_channel.exp()[..., None] * (self.factor @ moment)

    def _assemble(self, own: Tensor, mixed: Tensor | None, moment: Tensor) -> Tensor:
        """A curvature from its parts along λ (B, dim), between λ and T, and of T, which is e^λ_i times a moment."""
        (i, j), dim = self._below, own.shape[-1]
        n = dim + len(i)
        curvature = own.new_zeros(own.shape[0], n, n)
        curvature[:, :dim, :dim].diagonal(dim1=-2, dim2=-1).copy_(own)
        within = self.log_channel.exp()[:, i, None] * moment[:, j[:, None], j]
        curvature[:, dim:, dim:] = within * (i[:, None] == i)
        if mixed is not None:
            place = torch.arange(dim, n, device=own.device)
            curvature[:, place, i] = curvature[:, i, place] = mixed[:, i, j]
        return curvature


class ObservedCholeskyPrecision(Precision):
    """Π̃ of coupled channels where some are missing, or some of their orders: those are integrated out.

    With u what is not seen, P = Π̃ − Π̃_·u Π̃_uu⁻¹ Π̃_u· and log|P| = log|Π̃| − log|Π̃_uu|. What an error says of λ and T is
    found by automatic differentiation, which is quick enough for a few tens of channels, and while some are missing.
    """

    __slots__ = ("_whole", "_without", "seen")
    separable = False

    def __init__(self, whole: CholeskyPrecision, seen: Tensor) -> None:
        rows = torch.arange(whole.temporal.shape[1], device=seen.device)
        self._whole = whole
        self._without = (rows[:, None] >= seen[:, None, :]).flatten(1).to(seen)  # 1 where an order is not seen, (B, N)
        self.seen = seen
        matrix, log_det = _of_seen(whole.dense(), self._without)
        super().__init__(whole.temporal, whole.channel, log_det)
        self._dense = matrix

    def weigh(self, error: Tensor) -> Tensor:
        return torch.bmm(self.dense(), error.flatten(1)[..., None]).view_as(error)

    def between(self, left: Tensor, right: Tensor) -> Tensor:
        batch = len(self.seen)
        return torch.bmm(left.expand(batch, -1, -1).mT, torch.bmm(self.dense(), right.expand(batch, -1, -1)))

    def slope(self, error: Tensor, weighted: Tensor) -> Tensor:
        return self._derived(torch.func.grad(_coupled_energy), error)

    def curvature(self, error: Tensor, weighted: Tensor) -> Tensor:
        return self._derived(torch.func.jacrev(torch.func.jacrev(_coupled_energy)), error)

    def information(self) -> Tensor:
        """½ tr(P⁻¹ ∂P P⁻¹ ∂P) over what is seen."""

        def information(theta: Tensor, temporal: Tensor, without: Tensor, _: Tensor) -> Tensor:
            by_parameter = torch.func.jacrev(lambda v: _coupled(v, temporal, without)[0])(theta)
            covariance = torch.linalg.inv(_coupled(theta, temporal, without)[0] + torch.diag(without))
            moved = torch.einsum("ij,jkp->pik", covariance, by_parameter)
            return 0.5 * torch.einsum("pik,qki->pq", moved, moved)

        return self._derived(information, self.seen)

    def _derived(self, function: Callable[..., Tensor], error: Tensor) -> Tensor:
        whole = self._whole
        i, j = whole._below
        with torch.inference_mode(False), torch.no_grad():
            theta = torch.cat([whole.log_channel, whole.factor[:, i, j]], -1)
            given = [v.clone() for v in (theta, whole.temporal, self._without, error.flatten(1))]
            found: Tensor = torch.func.vmap(function)(*given)
        return found


def _of_seen(matrix: Tensor, without: Tensor) -> tuple[Tensor, Tensor]:
    """The precision of what is left once what is `without` (..., N) is integrated out, and its log-determinant."""
    unseen = matrix * without[..., None, :]
    inner = unseen * without[..., :, None] + torch.diag_embed(1 - without)
    kept = 1 - without
    left = matrix - unseen @ torch.linalg.solve(inner, unseen.mT)
    log_det = torch.linalg.slogdet(matrix)[1] - torch.linalg.slogdet(inner)[1]
    return left * kept[..., :, None] * kept[..., None, :], log_det


def _coupled(theta: Tensor, temporal: Tensor, without: Tensor) -> tuple[Tensor, Tensor]:
    """P and log|P| of what is seen, as functions of λ and then T (n,) of one batch element."""
    rows = temporal.shape[0]
    dim = without.shape[0] // rows
    i, j = torch.tril_indices(dim, dim, -1, device=theta.device)
    factor = torch.eye(dim, dtype=theta.dtype, device=theta.device).index_put((i, j), theta[dim:])
    channel = factor.mT @ (theta[:dim].exp()[:, None] * factor)
    blocks = temporal[:, None, :, None] * channel[None, :, None, :]
    return _of_seen(blocks.reshape(rows * dim, rows * dim), without)


def _coupled_energy(theta: Tensor, temporal: Tensor, without: Tensor, error: Tensor) -> Tensor:
    """½ε̃ᵀPε̃ − ½log|P|."""
    matrix, log_det = _coupled(theta, temporal, without)
    return 0.5 * (error @ matrix @ error - log_det)


def leading_precisions(temporal: Tensor) -> tuple[Tensor, Tensor]:
    """Of a precision S⁻¹ (B, rows, rows) those of its first r orders alone, with their log-determinants, r = 0 … rows.

    (B, rows + 1, rows, rows), zero beyond r, and (B, rows + 1). The last order is integrated out time and again.
    """
    rows = temporal.shape[-1]
    found, log_pivots = [temporal], []
    for r in range(rows - 1, -1, -1):
        last = found[-1]
        pivot = last[:, r, r]
        log_pivots.append(pivot.log())
        less = last - last[:, :, r, None] * last[:, r, None, :] / pivot[:, None, None]
        less[:, r], less[:, :, r] = 0, 0
        found.append(less)
    log_det = torch.stack([torch.zeros_like(log_pivots[0]), *reversed(log_pivots)], 1).cumsum(1)
    return torch.stack(found[::-1], 1), log_det


class Dense:
    """A curvature without structure, (B, n, n)."""

    __slots__ = ("matrix",)
    separable: ClassVar[bool] = False

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix

    def dense(self) -> Tensor:
        """The matrix itself, (B, n, n)."""
        return self.matrix

    def sandwich(self, slope: Tensor) -> Tensor:
        """JᵀMJ; (B, n, m) → (B, m, m)."""
        return self.between(slope, slope)

    def between(self, left: Tensor, right: Tensor) -> Tensor:
        """LᵀMR; (B, n, m) and (B, n, k) → (B, m, k)."""
        return torch.bmm(left.mT, torch.bmm(self.matrix, right))


class DensePrecision(Dense):
    """A precision (B, n, n) of one order without structure, with its log-determinant (B,)."""

    __slots__ = ("log_det",)

    def __init__(self, matrix: Tensor, log_det: Tensor) -> None:
        super().__init__(matrix)
        self.log_det = log_det

    @classmethod
    def of_covariance(cls, covariance: Tensor, there: Tensor | None) -> DensePrecision:
        """Of a covariance (B, n, n); what is not there (B, n) weighs nothing. NaN where it is not positive definite."""
        if there is not None:
            both = there[:, :, None] & there[:, None, :]
            covariance = torch.where(both, covariance, torch.eye(covariance.shape[-1]).to(covariance))
        factor, info = torch.linalg.cholesky_ex(covariance)
        if bool(info.any()):
            factor = torch.where((info == 0)[:, None, None], factor, torch.nan)
        matrix, log_det = torch.cholesky_inverse(factor), -2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return cls(matrix if there is None else torch.where(both, matrix, 0.0), log_det)

    def weigh(self, error: Tensor) -> Tensor:
        """ξ = Πε; (B, 1, n) → (B, 1, n)."""
        return torch.bmm(error, self.matrix)


SMALL = 32
"""Up to this many rows a precision is quicker as a dense matrix."""


def quadratic(weighted: Tensor, error: Tensor) -> Tensor:
    """ξ·ε of every channel, summed over the orders; (B, rows, dim) → (B, dim)."""
    return (weighted * error).sum(-2)
