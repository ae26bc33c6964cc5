"""Functions of several states together, made of functions of each and of what drives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pcnet.functions.base import Function
from pcnet.functions.linearisation import Linearisation
from pcnet.functions.traced import TracedFunction


class JointPart(NamedTuple):
    """One function, and where its arguments are among those of all."""

    function: Function
    places: tuple[int, ...]  # of its arguments among all
    columns: slice  # its parameters among all


class JointFunction(Function):
    """Functions f_i(s, θ_i) of parts of one vector s, with their values one after the other.

    Args:
        parts: The functions.
        causes: Whether known inputs follow in the vector.
        time: Whether inputs, and the time last, follow in it.
    """

    def __init__(self, parts: Sequence[JointPart], causes: bool, time: bool) -> None:
        self.parts, self.takes_causes, self.takes_time = tuple(parts), causes and not time, time
        self.is_affine = all(part.function.is_affine for part in self.parts)

    def __repr__(self) -> str:
        return " and ".join(repr(part.function) for part in self.parts)

    def __call__(self, x: Tensor, parameters: Tensor) -> Tensor:
        return torch.cat([f(x @ self._chosen(i, x).mT, parameters[..., at]) for i, (f, _, at) in self._all], -1)

    @property
    def _all(self) -> enumerate[JointPart]:
        return enumerate(self.parts)

    def _chosen(self, i: int, x: Tensor) -> Tensor:
        """The matrix (n, N) that takes the arguments of a function from x (..., N)."""
        n = x.shape[-1]
        return x.new_tensor([[float(j == place) for j in range(n)] for place in self.parts[i].places])

    def linearise(self, x: Tensor, parameters: Tensor, rows: int) -> Linearisation:
        values, jacobians = [], []
        for i, (function, places, at) in self._all:
            chosen = self._chosen(i, x)
            found = function.linearise(x @ chosen.mT, parameters[..., at], rows)
            values.append(found.value)
            jacobians.append(found.jacobian.expand(len(x), -1, len(places)) @ chosen)
        return Linearisation(torch.cat(values, -1), torch.cat(jacobians, 1), None, x.shape[1])

    def parameter_slope(self, x: Tensor, parameters: Tensor, rows: int) -> Tensor:
        found, total = [], parameters.shape[-1]
        for i, (function, _, at) in self._all:
            given = x @ self._chosen(i, x).mT
            if at.stop == at.start:
                out = function(given[:, 0], parameters[..., at]).shape[-1]
                found.append(x.new_zeros(len(x), rows, out, total))
                continue
            slope = function.parameter_slope(given, parameters[..., at], rows)
            found.append(torch.constant_pad_nd(slope, (at.start, total - at.stop)))
        return torch.cat(found, 2)

    def contracted_hessian(self, x: Tensor, parameters: Tensor, weights: Tensor) -> Tensor | None:
        return TracedFunction(self).contracted_hessian(x, parameters, weights)

    def parameter_contracted_hessian(self, x: Tensor, parameters: Tensor, weights: Tensor) -> Tensor | None:
        return TracedFunction(self).parameter_contracted_hessian(x, parameters, weights)
