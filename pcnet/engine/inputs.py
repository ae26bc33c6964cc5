"""Reading observations: arrays, streams or single ones, as one tensor for each sensory node."""

import math
from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from pcnet.errors import ObservationError, suggestion
from pcnet.model.node import AnyNode

Observation = dict[str, Tensor]  # one observation: (..., dim) for each sensory node by name, NaN where it is missing


class Sample(NamedTuple):
    """An observation with its time, for streams that bring both: `session.run(Sample(y, t) for t, y in …)`."""

    observation: Any
    time: float


@runtime_checkable
class ArrayLike(Protocol):
    """Anything that numpy can read as an array, such as a data frame."""

    def __array__(self) -> Any: ...


ARRAYS = (Tensor, np.ndarray, list, tuple, ArrayLike)
SINGLE = (Mapping, Sample)  # items of a list that are single observations
PLAIN = (Tensor, np.ndarray)  # types without a mask; numpy imports its masked arrays only when they are named


class ObservationReader:
    """Reads observations for sensory nodes of given names and sizes.

    periods: sampling interval of each node in those of the run, 1 unless given.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        dtype: torch.dtype,
        device: torch.device,
        periods: Mapping[str, int] | None = None,
    ) -> None:
        self.sizes, self.dtype, self.device = dict(sizes), dtype, device
        self.periods = dict(periods or {})
        nan = torch.tensor(torch.nan, dtype=dtype, device=device)
        self._missing = {name: nan.repeat(size) for name, size in sizes.items()}

    def one(self, given: Any) -> Observation:
        """A single observation: (..., dim), or a mapping from names to these; None for a missing one."""
        if given is None:
            return dict(self._missing)
        named = given if isinstance(given, Mapping) else {self._only_name(): given}
        self._check_names(named)
        present = {name: self._tensor(name, value, 1) for name, value in named.items() if value is not None}
        return present if len(present) == len(self.sizes) else self._missing | present

    def series(self, given: Any) -> dict[str, Tensor] | None:
        """Observations of all sensory nodes as arrays with time first, (T, ..., dim); None if they come one by one.

        Args:
            given: (..., T, dim), (T,) for one channel, a mapping from names to these, or an iterable of single
                observations or samples. Nodes with longer sampling intervals may have fewer rows, one for each of
                these, the first at the first observation.
        """
        if isinstance(given, (list, tuple)) and any(item is None or isinstance(item, SINGLE) for item in given):
            return None
        if isinstance(given, ARRAYS):
            given = {self._only_name(): given}
        if not isinstance(given, Mapping):
            return None
        if not all(isinstance(value, ARRAYS) for value in given.values()):
            raise ObservationError("give a mapping of arrays, or an iterable of mappings")
        self._check_names(given)
        series = {name: self.rows(name, value) for name, value in given.items()}
        if not series:
            raise ObservationError("there are no observations; give at least one")
        total = max(map(len, series.values()))
        series = {name: self._spread(name, value, total) for name, value in series.items()}
        lengths = {name: len(value) for name, value in series.items()}
        total, *others = set(lengths.values())
        if others:
            raise ObservationError(
                f"observations differ in length: {lengths}; give a row for each observation, NaN where a sensor is "
                "missing, or every= of a sensor that is slower (Sensor(every=10), SensoryNode(dt=...))"
            )
        absent = {name: missing.expand(total, -1) for name, missing in self._missing.items() if name not in series}
        return series | absent

    def rows(self, name: str, given: Any) -> Tensor:
        """Values (..., T, dim) of one node as a tensor with time first, (T, ..., dim)."""
        return self._tensor(name, given, 2).movedim(-2, 0).contiguous()

    def _spread(self, name: str, value: Tensor, total: int) -> Tensor:
        """Rows (T', ..., dim) of a slow sensor at every so many of all observations, with missing ones in between."""
        period = self.periods.get(name, 1)
        if period == 1 or len(value) != -(-total // period):
            return value
        spread = value.new_full((total, *value.shape[1:]), torch.nan)
        spread[::period] = value
        return spread

    def items(self, given: Any) -> Iterator[Observation | Sample]:
        """Single observations one by one; see `series` for what may be given."""
        series = self.series(given)
        if series is not None:
            total = len(next(iter(series.values())))
            return ({name: value[t] for name, value in series.items()} for t in range(total))
        if not isinstance(given, Iterable) or isinstance(given, (str, bytes)):
            remedy = f"not {type(given).__name__}; read files first, for example by numpy.loadtxt"
            raise ObservationError(f"observations must be an array or an iterable, {remedy}")
        return (self.timed(item) for item in given)

    @staticmethod
    def length(given: Any) -> int | None:
        """The number of observations that come one by one, if it is known."""
        return len(given) if isinstance(given, (list, tuple)) else None

    def timed(self, given: Any) -> Observation | Sample:
        """A single observation, with its time if it is a `Sample`."""
        return Sample(self.one(given.observation), given.time) if isinstance(given, Sample) else self.one(given)

    def _only_name(self) -> str:
        if len(self.sizes) > 1:
            names = ", ".join(f"{name!r}: …" for name in self.sizes)
            raise ObservationError(f"observations and inputs are several nodes; give them by name: {{{names}}}")
        return next(iter(self.sizes))

    def _check_names(self, given: Mapping[str, Any]) -> None:
        if not given.keys() <= self.sizes.keys():
            unknown = next(str(name) for name in given if name not in self.sizes)
            remedy = suggestion(unknown, self.sizes)
            raise ObservationError(f"observations are given for {unknown!r}, which is no node that observes; {remedy}")

    def _tensor(self, name: str, value: Any, own: int) -> Tensor:
        """A value with `own` trailing dimensions, (..., dim) or (..., time, dim), as a tensor."""
        size = self.sizes[name]
        try:
            if type(value) not in PLAIN and isinstance(value, np.ma.MaskedArray):
                value = np.ma.filled(value.astype(np.float64), np.nan)
            tensor = value.detach() if isinstance(value, Tensor) else torch.from_numpy(_numbers(value))
            if tensor.is_complex():
                raise TypeError
            tensor = tensor.to(dtype=self.dtype, device=self.device)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise ObservationError(
                f"observations of {name!r} must be real numbers in a rectangular array; text becomes numbers by "
                "numpy.asarray(y, float), a missing value is NaN, dates go into times="
            ) from None
        if tensor.numel() == 0:
            raise ObservationError(f"there are no observations of {name!r}; give at least one")
        if size == 1 and tensor.dim() == own - 1:
            tensor = tensor[..., None]  # a series of one channel, or a single number
        if tensor.dim() < own or tensor.shape[-1] != size:
            expected = ("(…, time, dim)" if own == 2 else "(…, dim)") + f" with dim = {size}"
            turn = own == 2 and tensor.dim() >= 2 and tensor.shape[-2] == size
            partly = (
                "; what is not seen is NaN, or left out by a mapping (mapping=, via=)"
                if tensor.shape[-1:] < (size,)
                else ""
            )
            remedy = "; time comes first: turn it over, observations.T" if turn else partly
            remedy = _of_columns(getattr(value, "columns", ()), size) or remedy
            shape = tuple(tensor.shape)
            raise ObservationError(f"observations of {name!r} have shape {shape}; expected {expected}{remedy}")
        if not math.isfinite(tensor.sum().item()) and bool(torch.isinf(tensor).any()):
            where = f"at index {torch.isinf(tensor).nonzero()[0].tolist()} is infinite in {self.dtype}"
            raise ObservationError(f"observation of {name!r} {where}; use NaN for missing values")
        return tensor


def _numbers(value: Any) -> Any:
    """An array of numbers; of objects, if each is a number or None, which is missing."""
    array = np.array(value)
    if array.dtype == object and all(each is None or isinstance(each, Real) for each in array.flat):
        return array.astype(np.float64)
    return array


def _of_columns(columns: Iterable[Any], size: int) -> str:
    """What to type if a table has too many columns."""
    names = [str(each) for each in columns]
    times = [name for name in names if name.lower() in ("t", "time", "times", "timestamp", "date")]
    chosen = [name for name in names if name not in times][:size]
    if len(names) <= size or not chosen:
        return ""
    given = f", times=table[{times[0]!r}]" if times else ""
    return f"; its columns are {', '.join(names)}: choose those that are observed, run(table[{chosen}]{given})"


def sampling_periods(nodes: Mapping[str, AnyNode]) -> dict[str, int]:
    """The sampling interval of each observing node in shortest ones, where it is a whole number of them."""
    intervals = {name: node.sampling_interval for name, node in nodes.items() if node.observes}
    known = {name: value for name, value in intervals.items() if value is not None}
    found = {}
    for name, value in known.items():
        ratio = max(float((value / other).max()) for other in known.values())
        same = all(bool((value / other == (value / other).reshape(-1)[0]).all()) for other in known.values())
        if same and abs(ratio - round(ratio)) < 1e-9 * ratio:
            found[name] = round(ratio)
    return found


def time_of(given: Any) -> float:
    """A time as a number; `ObservationError` if it is not a finite number."""
    try:
        time = float(given)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ObservationError(
            f"a time must be a number, not {str(given)[:60]!r}; of dates, (t - t[0]) / timedelta(seconds=1) is one"
        ) from None
    if isinstance(given, (str, bytes)) or not math.isfinite(time):
        raise ObservationError(f"a time must be a finite number, not {given!r}")
    return time
