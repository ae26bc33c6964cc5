"""Observations as they come, whole or one by one, turned into a tensor for each sensory node or refused in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from pcnet.errors import ObservationError

Observation = dict[str, Tensor]
"""One observation: (..., dim) for each sensory node by name."""


@runtime_checkable
class Table(Protocol):
    """What numpy can read as an array: data frames and the like."""

    def __array__(self) -> Any: ...


ARRAYS = (Tensor, np.ndarray, list, tuple, Table)


class Intake:
    """Reads observations for sensory nodes of given names and dimensions."""

    def __init__(self, dims: Mapping[str, int], dtype: torch.dtype, device: torch.device) -> None:
        self.dims = dict(dims)
        self.dtype = dtype
        self.device = device

    def one(self, given: Any) -> Observation:
        """A single observation: (..., dim), or a mapping from names to these."""
        named = given if isinstance(given, Mapping) else {self._only(): given}
        return {name: self._tensor(name, value, 1) for name, value in self._named(named).items()}

    def stream(self, given: Any) -> tuple[Iterator[Observation], int | None]:
        """Observations one by one, and how many there are if that is known.

        given: (..., T, dim), a mapping from names to these, or an iterable of single observations.
        """
        if isinstance(given, ARRAYS):
            given = {self._only(): given}
        if isinstance(given, Mapping):
            if not all(isinstance(value, ARRAYS) for value in given.values()):
                raise ObservationError("give a mapping of arrays, or an iterable of mappings")
            whole = {
                name: self._tensor(name, v, 2).movedim(-2, 0).contiguous() for name, v in self._named(given).items()
            }
            lengths = {name: len(value) for name, value in whole.items()}
            if len(set(lengths.values())) > 1:
                raise ObservationError(f"observations differ in length: {lengths}")
            total = next(iter(lengths.values()))
            return ({name: value[t] for name, value in whole.items()} for t in range(total)), total
        if not isinstance(given, Iterable) or isinstance(given, (str, bytes)):
            raise ObservationError(
                f"observations must be an array or an iterable, not {type(given).__name__}; read files first, for "
                "example by numpy.loadtxt"
            )
        return (self.one(item) for item in given), None

    def _only(self) -> str:
        if len(self.dims) > 1:
            names = ", ".join(f"{name!r}: …" for name in self.dims)
            raise ObservationError(f"there are several sensory nodes; give a mapping {{{names}}}")
        return next(iter(self.dims))

    def _named(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        if set(given) != set(self.dims):
            raise ObservationError(
                f"observations are given for {sorted(map(str, given))}, sensory nodes are {sorted(self.dims)}"
            )
        return given

    def _tensor(self, name: str, value: Any, own: int) -> Tensor:
        try:
            tensor = value if isinstance(value, Tensor) else torch.tensor(np.asarray(value))
            if tensor.is_complex():
                raise TypeError
            tensor = tensor.detach().to(dtype=self.dtype, device=self.device)
        except (TypeError, ValueError, RuntimeError):
            raise ObservationError(f"observations of {name!r} must be real numbers in a rectangular array") from None
        if tensor.numel() == 0:
            raise ObservationError(f"there are no observations of {name!r}; give at least one")
        what = "(…, time, dim)" if own == 2 else "(…, dim)"
        if tensor.dim() < own or tensor.shape[-1] != self.dims[name]:
            raise ObservationError(
                f"observations of {name!r} have shape {tuple(tensor.shape)}; "
                f"expected {what} with dim = {self.dims[name]}{_remedy(tensor, self.dims[name], own)}"
            )
        if not bool(torch.isfinite(tensor).all()):
            where = (~torch.isfinite(tensor)).nonzero()[0].tolist()
            raise ObservationError(
                f"observation of {name!r} at index {where} is not finite; fill it in, or leave that time out"
            )
        return tensor


def _remedy(tensor: Tensor, dim: int, own: int) -> str:
    """What to do where it is plain what was meant."""
    if own == 2 and tensor.dim() == 1 and dim == 1:
        return "; add a dimension: observations[:, None]"
    if own == 2 and tensor.dim() >= 2 and tensor.shape[-2] == dim:
        return "; time comes first: turn it over, observations.T"
    return ""
