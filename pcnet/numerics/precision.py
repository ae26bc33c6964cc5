"""Precision matrices of generalised errors, in structured form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from pcnet.numerics.branching import holds

SMALL = 32  # up to this many rows dense matrices are faster than structured ones


@dataclass(eq=False)
class Precision:
    """Π̃ = temporal ⊗ diag(channel).

    `gradient`, `information` and `curvature` are derivatives of the energy E = ½ε̃ᵀΠ̃ε̃ − ½log|Π̃| in λ (B, dim). With
    `learns_lengthscale` the lengthscale ℓ in temporal = diag(ℓⁱ) T diag(ℓⁱ), over the orders i, is a parameter too.
    """

    temporal: Tensor  # S⁻¹, (B, rows, rows)
    channel: Tensor  # e^λ, (B, dim)
    log_det: Tensor  # log|Π̃|, (B,)
    learns_lengthscale: bool = False
    separable: ClassVar[bool] = True  # whether all channels have the same temporal part

    def observed(self, seen: Tensor) -> Precision:
        """The marginal precision of the first `seen` (B, dim) orders of each channel; zero for the others."""
        leading, log_det = leading_precisions(self.temporal)
        batch = torch.arange(len(seen), device=seen.device)[:, None]
        orders = seen.long()
        total = (torch.xlogy(seen, self.channel) + log_det[batch, orders]).sum(-1)
        return ObservedPrecision(leading[batch, orders], self.channel, total, self.learns_lengthscale, seen=seen)

    def scaled(self, weight: Tensor) -> Precision:
        """A copy with channels multiplied by a weight (B, dim) and the same log_det."""
        return dataclasses.replace(self, channel=self.channel * weight)

    def weigh(self, error: Tensor) -> Tensor:
        """ξ = Π̃ε; (B, rows, dim) → (B, rows, dim)."""
        return torch.bmm(self.temporal, error * self.channel[:, None, :])

    def quadratic_form(self, slope: Tensor) -> Tensor:
        """JᵀΠ̃J; (B, rows·dim, n) → (B, n, n)."""
        if slope.shape[1] <= SMALL:
            return torch.bmm(slope.mT, torch.bmm(self.dense(), slope))
        return self.bilinear_form(slope, slope)

    def bilinear_form(self, left: Tensor, right: Tensor) -> Tensor:
        """LᵀΠ̃R; (B, rows·dim, m) and (B, rows·dim, n) → (B, m, n)."""
        batch, rows = self.temporal.shape[:2]
        n = right.shape[-1]
        mixed = torch.bmm(self.temporal, right.expand(batch, -1, -1).reshape(batch, rows, -1))
        weighted = self.weigh_channels(mixed.view(batch, rows, -1, n))
        return torch.bmm(left.expand(batch, -1, -1).mT, weighted.view(batch, -1, n))

    def weigh_channels(self, values: Tensor) -> Tensor:
        """Channels (B, …, dim, n) multiplied by their precision, without the temporal part."""
        return values * self.channel.view(len(self.channel), *(1,) * (values.dim() - 3), -1, 1)

    def dense(self) -> Tensor:
        """Π̃ as a matrix, (B, rows·dim, rows·dim)."""
        return self._dense

    @cached_property
    def _dense(self) -> Tensor:
        size = self.temporal.shape[1] * self.channel.shape[1]
        blocks = self.temporal[:, :, None, :, None] * self._channel_matrix()[:, None, :, None, :]
        return blocks.reshape(-1, size, size)

    def _channel_matrix(self) -> Tensor:
        """Precision of the channels at one order, (B, dim, dim)."""
        return self.channel.diag_embed()

    def gradient(self, error: Tensor, weighted: Tensor) -> Tensor:
        """∂E/∂λ = ½(ξ·ε − rows)."""
        return 0.5 * (weighted_squares(weighted, error) - error.shape[1])

    def information(self) -> Tensor:
        """Expected ∂²E/∂λ², which is rows/2; a diagonal is returned as (B, dim)."""
        return torch.full_like(self.channel, 0.5 * self.temporal.shape[1])

    def curvature(self, error: Tensor, weighted: Tensor) -> Tensor:
        """∂²E/∂λ² = ½ξ·ε."""
        return 0.5 * weighted_squares(weighted, error)

    def lengthscale_gradient(self, error: Tensor, weighted: Tensor) -> Tensor:
        """∂E/∂log ℓ = Σ i(ξᵢ·εᵢ − number of channels whose order i is observed), (B, 1)."""
        order = torch.arange(error.shape[1], dtype=error.dtype, device=error.device)
        seen = self._orders_seen()
        return ((order[:, None] * weighted * error).sum((1, 2)) - (seen * (seen - 1) / 2).sum(-1))[:, None]

    def joint_information(self) -> Tensor:
        """Expected curvature of E in λ and log ℓ, (B, dim + 1, dim + 1).

        The mixed element of a channel is Σi, that of log ℓ is Σ tr(N² + N S⁻¹ N S) over channels with N = diag(i).
        """
        seen, own = self._orders_seen(), self.information()
        temporal = self.temporal if self.temporal.dim() == 4 else self.temporal[:, None]
        order = torch.arange(temporal.shape[-1], dtype=temporal.dtype, device=temporal.device)
        there = (order < seen[..., None]).to(temporal)
        inverse = torch.linalg.inv(temporal + (1 - there[:, : temporal.shape[1]]).diag_embed())
        trace = (order[:, None] * temporal * order * inverse.mT).sum((-2, -1))
        joint = torch.constant_pad_nd(own.diag_embed(), (0, 1, 0, 1))
        joint[:, -1, :-1] = joint[:, :-1, -1] = seen * (seen - 1) / 2
        joint[:, -1, -1] = ((order**2 * there).sum(-1) + trace).sum(-1)
        return joint

    def _orders_seen(self) -> Tensor:
        """Number of observed orders of each channel, (B, dim)."""
        return torch.full_like(self.channel, self.temporal.shape[1])


@dataclass(eq=False)
class ObservedPrecision(Precision):
    """Π̃ with missing channels or orders, which are integrated out.

    temporal (B, dim, rows, rows) differs between channels: with r observed orders it is the inverse of the first r rows
    and columns of S, and zero beyond.
    """

    seen: Tensor = field(kw_only=True)
    separable = False

    def weigh(self, error: Tensor) -> Tensor:
        return torch.einsum("bcij,bjc->bic", self.temporal, error * self.channel[:, None, :])

    def bilinear_form(self, left: Tensor, right: Tensor) -> Tensor:
        batch, dim, rows, _ = self.temporal.shape
        n = right.shape[-1]
        by_channel = right.expand(batch, -1, -1).reshape(batch, rows, dim, n) * self.channel[:, None, :, None]
        weighted = torch.einsum("bcij,bjcn->bicn", self.temporal, by_channel)
        return torch.bmm(left.expand(batch, -1, -1).mT, weighted.reshape(batch, -1, n))

    @cached_property
    def _dense(self) -> Tensor:
        batch, dim, rows, _ = self.temporal.shape
        blocks = (self.temporal * self.channel[:, :, None, None]).permute(0, 2, 3, 1).diag_embed()
        return blocks.transpose(2, 3).reshape(batch, rows * dim, rows * dim)

    def gradient(self, error: Tensor, weighted: Tensor) -> Tensor:
        return 0.5 * (weighted_squares(weighted, error) - self.seen)

    def information(self) -> Tensor:
        return 0.5 * self.seen

    def _orders_seen(self) -> Tensor:
        return self.seen


class CholeskyPrecision(Precision):
    """Π̃ = temporal ⊗ Π with Π = TᵀΛT, T unit lower triangular and Λ = diag(e^λ).

    Π is positive definite for all λ and T, and log|Π| = Σλ. e^λ_i is the precision of channel i given the channels
    before it, and −T_ij is its regression coefficient on channel j < i. The parameters are λ, then T below the
    diagonal, row by row. With the second moment M = Σ S⁻¹_ij ε_i ε_jᵀ over orders, whose mean is rows·Π⁻¹,
    2E = Σ_i e^λ_i (TMTᵀ)_ii − rows Σλ + const. Different rows of T do not interact. log_channel is λ
    (B, dim), factor is T (B, dim, dim), channel is Π.
    """

    def __init__(self, temporal: Tensor, log_channel: Tensor, factor: Tensor, log_det: Tensor) -> None:
        super().__init__(temporal, factor.mT @ (log_channel.exp()[..., None] * factor), log_det)
        self.log_channel, self.factor = log_channel, factor

    def observed(self, seen: Tensor) -> Precision:
        return ObservedCholeskyPrecision(self, seen)

    def weigh(self, error: Tensor) -> Tensor:
        return torch.bmm(torch.bmm(self.temporal, error), self.channel)

    def weigh_channels(self, values: Tensor) -> Tensor:
        return self.channel.view(len(self.channel), *(1,) * (values.dim() - 3), *self.channel.shape[1:]) @ values

    def _channel_matrix(self) -> Tensor:
        return self.channel

    def gradient(self, error: Tensor, weighted: Tensor) -> Tensor:
        """∂E/∂λ_i = ½(e^λ_i (TMTᵀ)_ii − rows), ∂E/∂T_ij = e^λ_i (TM)_ij."""
        by_factor = self._factor_gradient(self._moment(error))
        own = 0.5 * ((by_factor * self.factor).sum(-1) - error.shape[1])
        i, j = self._below
        return torch.cat([own, by_factor[:, i, j]], -1)

    def information(self) -> Tensor:
        """rows/2 for λ, rows e^λ_i (Π⁻¹)_jk between T_ij and T_ik, 0 between λ and T; (B, n, n)."""
        rows = self.temporal.shape[1]
        eye = torch.eye(self.factor.shape[-1], dtype=self.factor.dtype, device=self.factor.device)
        inverse = torch.linalg.solve_triangular(self.factor, eye, upper=False, unitriangular=True)
        covariance = (inverse * (-self.log_channel).exp()[:, None, :]) @ inverse.mT
        return self._assemble(torch.full_like(self.log_channel, 0.5 * rows), None, rows * covariance)

    def curvature(self, error: Tensor, weighted: Tensor) -> Tensor:
        """½e^λ_i (TMTᵀ)_ii for λ, e^λ_i (TM)_ij between λ_i and T_ij, e^λ_i M_jk between T_ij and T_ik; (B, n, n)."""
        moment = self._moment(error)
        by_factor = self._factor_gradient(moment)
        return self._assemble(0.5 * (by_factor * self.factor).sum(-1), by_factor, moment)

    @property
    def _below(self) -> Tensor:
        dim = self.factor.shape[-1]
        return torch.tril_indices(dim, dim, -1, device=self.factor.device)

    def _moment(self, error: Tensor) -> Tensor:
        return torch.bmm(error.mT, torch.bmm(self.temporal, error))

    def _factor_gradient(self, moment: Tensor) -> Tensor:
        """e^λ_i (TM)_ij, (B, dim, dim)."""
        return self.log_channel.exp()[..., None] * (self.factor @ moment)

    def _assemble(self, own: Tensor, mixed: Tensor | None, moment: Tensor) -> Tensor:
        """A curvature (B, n, n) from its parts: of λ (B, dim), between λ and T, and the second moment for T."""
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
    """A `CholeskyPrecision` with missing channels or orders, which are integrated out.

    With u the unobserved part, P = Π̃ − Π̃_·u Π̃_uu⁻¹ Π̃_u· and log|P| = log|Π̃| − log|Π̃_uu|. Derivatives in λ and T are by
    automatic differentiation, which is fast enough for a few tens of channels.
    """

    separable = False

    def __init__(self, whole: CholeskyPrecision, seen: Tensor) -> None:
        rows = torch.arange(whole.temporal.shape[1], device=seen.device)
        self._whole, self.seen = whole, seen
        self._missing = (rows[:, None] >= seen[:, None, :]).flatten(1).to(seen)  # 1 where missing, (B, N)
        self._dense, log_det = _marginal(whole.dense(), self._missing)
        super().__init__(whole.temporal, whole.channel, log_det)

    def weigh(self, error: Tensor) -> Tensor:
        return torch.bmm(self.dense(), error.flatten(1)[..., None]).view_as(error)

    def bilinear_form(self, left: Tensor, right: Tensor) -> Tensor:
        batch = len(self.seen)
        return torch.bmm(left.expand(batch, -1, -1).mT, torch.bmm(self.dense(), right.expand(batch, -1, -1)))

    def gradient(self, error: Tensor, weighted: Tensor) -> Tensor:
        return self._by_autodiff(torch.func.grad(_coupled_energy), error)

    def curvature(self, error: Tensor, weighted: Tensor) -> Tensor:
        return self._by_autodiff(torch.func.jacrev(torch.func.jacrev(_coupled_energy)), error)

    def information(self) -> Tensor:
        """½ tr(P⁻¹ ∂P P⁻¹ ∂P) of the observed part."""

        def information(theta: Tensor, temporal: Tensor, missing: Tensor, _: Tensor) -> Tensor:
            by_parameter = torch.func.jacrev(lambda v: _coupled(v, temporal, missing)[0])(theta)
            covariance = torch.linalg.inv(_coupled(theta, temporal, missing)[0] + torch.diag(missing))
            product = torch.einsum("ij,jkp->pik", covariance, by_parameter)
            return 0.5 * torch.einsum("pik,qki->pq", product, product)

        return self._by_autodiff(information, self.seen)

    def _by_autodiff(self, function: Callable[..., Tensor], error: Tensor) -> Tensor:
        whole = self._whole
        i, j = whole._below
        with torch.inference_mode(False), torch.no_grad():
            theta = torch.cat([whole.log_channel, whole.factor[:, i, j]], -1)
            given = [v.clone() for v in (theta, whole.temporal, self._missing, error.flatten(1))]
            found: Tensor = torch.func.vmap(function)(*given)
        return found


def _marginal(matrix: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
    """A precision with the missing (..., N) elements integrated out, and its log-determinant."""
    unseen = matrix * missing[..., None, :]
    inner = unseen * missing[..., :, None] + torch.diag_embed(1 - missing)
    kept = 1 - missing
    left = matrix - unseen @ torch.linalg.solve(inner, unseen.mT)
    log_det = torch.linalg.slogdet(matrix)[1] - torch.linalg.slogdet(inner)[1]
    return left * kept[..., :, None] * kept[..., None, :], log_det


def _coupled(theta: Tensor, temporal: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
    """P and log|P| of one batch element as functions of (λ, T), (n,)."""
    rows = temporal.shape[0]
    dim = missing.shape[0] // rows
    i, j = torch.tril_indices(dim, dim, -1, device=theta.device)
    factor = torch.eye(dim, dtype=theta.dtype, device=theta.device).index_put((i, j), theta[dim:])
    channel = factor.mT @ (theta[:dim].exp()[:, None] * factor)
    blocks = temporal[:, None, :, None] * channel[None, :, None, :]
    return _marginal(blocks.reshape(rows * dim, rows * dim), missing)


def _coupled_energy(theta: Tensor, temporal: Tensor, missing: Tensor, error: Tensor) -> Tensor:
    """½ε̃ᵀPε̃ − ½log|P|."""
    matrix, log_det = _coupled(theta, temporal, missing)
    return 0.5 * (error @ matrix @ error - log_det)


def leading_precisions(temporal: Tensor) -> tuple[Tensor, Tensor]:
    """Marginal precisions of the first r = 0 … rows orders, and their log-determinants.

    The last order is integrated out repeatedly. S⁻¹ (B, rows, rows) → (B, rows + 1, rows, rows), zero beyond r, and
    (B, rows + 1).
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


@dataclass(eq=False)
class DenseCurvature:
    """A curvature without structure, (B, n, n)."""

    matrix: Tensor
    separable: ClassVar[bool] = False

    def dense(self) -> Tensor:
        """The matrix itself, (B, n, n)."""
        return self.matrix

    def quadratic_form(self, slope: Tensor) -> Tensor:
        """JᵀMJ; (B, n, m) → (B, m, m)."""
        return self.bilinear_form(slope, slope)

    def bilinear_form(self, left: Tensor, right: Tensor) -> Tensor:
        """LᵀMR; (B, n, m) and (B, n, k) → (B, m, k)."""
        return torch.bmm(left.mT, torch.bmm(self.matrix, right))


@dataclass(eq=False)
class DensePrecision(DenseCurvature):
    """A precision (B, n, n) of one order without structure, with its log-determinant (B,)."""

    log_det: Tensor

    @classmethod
    def of_covariance(cls, covariance: Tensor, there: Tensor | None) -> DensePrecision:
        """The precision of the channels that are `there` (B, n), None for all; others get zero precision.

        NaN if the covariance (B, n, n) is not positive definite.
        """
        if there is not None:
            both = there[:, :, None] & there[:, None, :]
            eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
            covariance = torch.where(both, covariance, eye)
        factor, info = torch.linalg.cholesky_ex(covariance)
        if holds(info.any()):
            factor = torch.where((info == 0)[:, None, None], factor, torch.nan)
        matrix, log_det = torch.cholesky_inverse(factor), -2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return cls(matrix if there is None else torch.where(both, matrix, 0.0), log_det)

    def weigh(self, error: Tensor) -> Tensor:
        """ξ = Πε; (B, 1, n) → (B, 1, n)."""
        return torch.bmm(error, self.matrix)


def weighted_squares(weighted: Tensor, error: Tensor) -> Tensor:
    """ξ·ε of each channel, summed over orders; (B, rows, dim) → (B, dim)."""
    return (weighted * error).sum(-2)
