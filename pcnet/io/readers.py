"""Readers of observation files: CSV, NPY, NPZ and Parquet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pcnet.errors import ObservationError
from pcnet.files import plain_os_errors, read_regular
from pcnet.io import csv_table

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]
TIME_COLUMNS = ("t", "time")  # default names of the column of times
MAX_BYTES = 2**30  # of a CSV file, which takes several times as much memory


class ObservationTable(NamedTuple):
    """Observations (..., T, dim) by sensory node, and their times (T,), None if the file has none."""

    observations: dict[str, Array]
    times: list[float] | None
    report: str = ""  # what was taken for what


def read_observations(path: str | Path, channels: Mapping[str, int], time: str | None = None) -> ObservationTable:
    """Read a file of observations, .csv, .parquet, .npy or .npz; `ObservationError` if it does not fit.

    channels: number of channels of each sensory node. time: column of times; by default "t" or "time", if there is one.
    """
    path = Path(path)
    try:
        return _read(path, channels, time)
    except MemoryError:
        raise ObservationError(
            f"{str(path)!r} does not fit into memory; run it in parts (--resume), or line by line (--observations -)"
        ) from None


def _read(path: Path, channels: Mapping[str, int], time: str | None) -> ObservationTable:
    with plain_os_errors(path, "read", ObservationError):
        if not path.is_file():
            raise ObservationError(f"there is no file {str(path)!r}")
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ObservationError(f"{str(path)!r}: a file of observations must end in {', '.join(READERS)}")
    try:
        found = reader(path)
    except ImportError as error:
        raise ObservationError(f"{str(path)!r} needs another package: {error}") from None
    except ObservationError as error:
        raise ObservationError(f"{str(path)!r}: {error}") from None
    except MemoryError:
        raise
    except Exception as error:  # parsers raise anything for damaged files
        raise ObservationError(
            f"{str(path)!r} cannot be read: {(str(error).splitlines() or [type(error).__name__])[0]}"
        ) from None
    if isinstance(found, np.ndarray):
        if len(channels) > 1:
            raise ObservationError(f"{str(path)!r}: there are several sensory nodes; use named columns, or an NPZ file")
        found = {next(iter(channels)): found}
    if isinstance(found, dict):
        values = {name: _numbers(path, name, array) for name, array in found.items()}
        shaped = {name: v.reshape(-1, 1) if v.ndim < 2 else v for name, v in values.items()}
        return ObservationTable(shaped, None, _report(path, shaped, None, {}))
    return _from_frame(path, found, channels, time)


def _read_csv(path: Path) -> pd.DataFrame:
    import pandas as pd

    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ObservationError(
            f"it has {size / 2**30:.1f} GB, and a CSV file may have {MAX_BYTES // 2**30}; give it as .npy or .parquet, "
            "or line by line (--observations -)"
        )
    header, values = csv_table.parse(read_regular(path, ObservationError))
    return pd.DataFrame(values, columns=header)


def _read_parquet(path: Path) -> pd.DataFrame:
    import pandas as pd

    return pd.read_parquet(path)


def _read_npz(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as opened:
        return {name: opened[name] for name in opened.files}


READERS: dict[str, Any] = {".csv": _read_csv, ".parquet": _read_parquet, ".npy": np.load, ".npz": _read_npz}


def _from_frame(path: Path, frame: pd.DataFrame, channels: Mapping[str, int], time: str | None) -> ObservationTable:
    columns = [str(column) for column in frame.columns]
    frame = frame.set_axis(columns, axis=1)
    if len(set(columns)) < len(columns):
        raise ObservationError(f"{str(path)!r}: a column name occurs more than once")
    if time is not None and time not in columns:
        raise ObservationError(f"{str(path)!r} has no column {time!r}; columns: {', '.join(columns)}")
    named = {name: _columns_of(name, count, columns) for name, count in channels.items()}
    taken = {column for found in named.values() for column in found}
    if time is None:
        time = next((column for column in columns if column.lower() in TIME_COLUMNS and column not in taken), None)
    times = None if time is None else _numbers(path, time, frame[time].to_numpy(dtype=object))
    if times is not None and not np.isfinite(times).all():
        raise ObservationError(f"{str(path)!r}: a time is missing in column {time!r}")
    rest = [column for column in columns if column != time]
    if not taken:
        if len(channels) > 1:
            raise ObservationError(
                f"{str(path)!r} has the columns {', '.join(columns)}; name them after the sensory nodes "
                f"{', '.join(channels)}"
            )
        ((name, count),) = channels.items()
        if len(rest) != count:
            raise ObservationError(
                f"{str(path)!r} has {len(rest)} columns of observations; {name!r} takes {count}. They are "
                f"{', '.join(rest)}: leave out what is not observed; a column of times is called t or time, or "
                "is named by --time"
            )
        named, taken = {name: rest}, set(rest)
    for column in rest:
        if column not in taken:
            nodes = ", ".join(channels)
            raise ObservationError(f"{str(path)!r}: column {column!r} belongs to no sensory node ({nodes})")
    parts = {name: frame[found].to_numpy(dtype=object) for name, found in named.items() if found}
    observations = {name: _numbers(path, name, part) for name, part in parts.items()}
    report = _report(path, observations, time, named)
    return ObservationTable(observations, None if times is None else times.tolist(), report)


def _report(path: Path, observations: Mapping[str, Array], time: str | None, columns: Mapping[str, list[str]]) -> str:
    """What was taken for what, in a line."""
    parts = []
    for name, values in observations.items():
        of = f", from {', '.join(columns[name][:8])}{', …' if len(columns[name]) > 8 else ''}" if columns else ""
        missing = int(np.isnan(values).sum())
        parts.append(
            f"{values.shape[-2]} rows of {values.shape[-1]} channel{'s' * (values.shape[-1] > 1)} of {name!r}{of}; "
            f"{missing} values missing"
        )
    return f"{str(path)!r}: {'; '.join(parts)}; {'no times' if time is None else f'times from {time}'}"


def _columns_of(name: str, count: int, columns: list[str]) -> list[str]:
    """The columns of a sensory node: its name, or name.0, name.1, …; empty if there are none."""
    if count == 1 and name in columns:
        return [name]
    numbered = [f"{name}.{i}" for i in range(count)]
    return numbered if all(column in columns for column in numbered) else []


def _numbers(path: Path, what: str, values: Any) -> Array:
    array = np.asarray(values)
    if array.dtype.kind not in "fiubO":  # dates, durations, complex numbers and texts are none
        raise ObservationError(f"{str(path)!r}: {what} must be real numbers")
    try:
        array = array.astype(np.float64)
    except (TypeError, ValueError):
        raise ObservationError(f"{str(path)!r}: {what} contains something other than numbers") from None
    if not array.size:
        raise ObservationError(f"{str(path)!r}: there are no observations")
    return array
