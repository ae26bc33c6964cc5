"""Observations as they come, whole or one by one, turned into a tensor for each sensory node or refused in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from pcnet.errors import ObservationError

Observation = dict[str, Tensor]
"""One observation: (..., dim) for each sensory node by name; NaN where something is missing."""


class Sample(NamedTuple):
    """An observation with its time, for streams that bring both: `live.run(Sample(y, t) for t, y in …)`."""

    observation: Any
    time: float


@runtime_checkable
class Table(Protocol):
    """What numpy can read as an array: data frames and the like."""

    def __array__(self) -> Any: ...


ARRAYS = (Tensor, np.ndarray, list, tuple, Table)
SINGLE = (Mapping, Sample)
"""What a list has among its items only if these are observations, one by one."""


class ObservationReader:
    """Reads observations for sensory nodes of given names and dimensions."""

    def __init__(self, dims: Mapping[str, int], dtype: torch.dtype, device: torch.device) -> None:
        self.dims = dict(dims)
        self.dtype = dtype
        self.device = device
        self._nothing = {name: torch.full((dim,), torch.nan, dtype=dtype, device=device) for name, dim in dims.items()}

    def one(self, given: Any) -> Observation:
        """A single observation: (..., dim), or a mapping from names to these; None, or no name, where there is none."""
        if given is None:
            return dict(self._nothing)
        named = given if isinstance(given, Mapping) else {self._only(): given}
        self._check_names(named)
        present = {name: self._tensor(name, value, 1) for name, value in named.items() if value is not None}
        return present if len(present) == len(self.dims) else self._nothing | present

    def stream(self, given: Any) -> tuple[Iterator[Observation | Sample], int | None]:
        """Observations one by one, and how many there are if that is known.

        given: (..., T, dim), a mapping from names to these, or an iterable of single observations or samples.
        """
        if isinstance(given, (list, tuple)) and any(item is None or isinstance(item, SINGLE) for item in given):
            return (self.timed(item) for item in given), len(given)
        if isinstance(given, ARRAYS):
            given = {self._only(): given}
        if isinstance(given, Mapping):
            if not all(isinstance(value, ARRAYS) for value in given.values()):
                raise ObservationError("give a mapping of arrays, or an iterable of mappings")
            self._check_names(given)
            whole = {name: self._tensor(name, v, 2).movedim(-2, 0).contiguous() for name, v in given.items()}
            lengths = {name: len(value) for name, value in whole.items()}
            if len(set(lengths.values())) > 1:
                raise ObservationError(f"observations differ in length: {lengths}")
            if not lengths:
                raise ObservationError("there are no observations; give at least one")
            total = next(iter(lengths.values()))
            absent = {name: nothing for name, nothing in self._nothing.items() if name not in whole}
            return ({name: value[t] for name, value in whole.items()} | absent for t in range(total)), total
        if not isinstance(given, Iterable) or isinstance(given, (str, bytes)):
            raise ObservationError(
                f"observations must be an array or an iterable, not {type(given).__name__}; read files first, for "
                "example by numpy.loadtxt"
            )
        return (self.timed(item) for item in given), None

    def timed(self, given: Any) -> Observation | Sample:
        """A single observation, with its time if it brings one."""
        return Sample(self.one(given.observation), given.time) if isinstance(given, Sample) else self.one(given)

    def _only(self) -> str:
        if len(self.dims) > 1:
            names = ", ".join(f"{name!r}: …" for name in self.dims)
            raise ObservationError(f"there are several sensory nodes; give a mapping {{{names}}}")
        return next(iter(self.dims))

    def _check_names(self, given: Mapping[str, Any]) -> None:
        if not given.keys() <= self.dims.keys():
            raise ObservationError(
                f"observations are given for {sorted(map(str, given))}, sensory nodes are {sorted(self.dims)}"
            )

    def _tensor(self, name: str, value: Any, own: int) -> Tensor:
        try:
            if isinstance(value, np.ma.MaskedArray):  # what is masked is missing, whatever is behind the mask
                value = np.ma.filled(value.astype(np.float64), np.nan)
            tensor = value.detach() if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
            if tensor.is_complex():
                raise TypeError
            tensor = tensor.to(dtype=self.dtype, device=self.device)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise ObservationError(f"observations of {name!r} must be real numbers in a rectangular array") from None
        if tensor.numel() == 0:
            raise ObservationError(f"there are no observations of {name!r}; give at least one")
        what = "(…, time, dim)" if own == 2 else "(…, dim)"
        if tensor.dim() < own or tensor.shape[-1] != self.dims[name]:
            raise ObservationError(
                f"observations of {name!r} have shape {tuple(tensor.shape)}; "
                f"expected {what} with dim = {self.dims[name]}{_remedy(tensor, self.dims[name], own)}"
            )
        if not math.isfinite(tensor.sum().item()) and bool(torch.isinf(tensor).any()):
            where = torch.isinf(tensor).nonzero()[0].tolist()
            raise ObservationError(
                f"observation of {name!r} at index {where} is infinite in {self.dtype}; give NaN where it is missing"
            )
        return tensor


def moment(given: Any) -> float:
    """A time, as a number, or refused in words."""
    try:
        time = float(given)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ObservationError(f"a time must be a number, not {str(given)[:60]!r}") from None
    if isinstance(given, (str, bytes)) or not math.isfinite(time):
        raise ObservationError(f"a time must be a finite number, not {given!r}")
    return time


def _remedy(tensor: Tensor, dim: int, own: int) -> str:
    """What to do where it is plain what was meant."""
    if own == 2 and tensor.dim() == 1 and dim == 1:
        return "; add a dimension: observations[:, None]"
    if own == 2 and tensor.dim() >= 2 and tensor.shape[-2] == dim:
        return "; time comes first: turn it over, observations.T"
    return ""
