"""Observations from files: CSV, NPY, NPZ and Parquet, as arrays for each sensory node, with times if there are any."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pcnet.errors import ObservationError

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]
TIMES = ("t", "time")
"""What a column of times is called, unless it is said to be another."""


class Table(NamedTuple):
    """Observations (T, dim) of sensory nodes by name, and their times."""

    observations: dict[str, Array]
    times: list[float] | None


def read_table(path: str | Path, widths: Mapping[str, int], time: str | None = None) -> Table:
    """Observations for sensory nodes of these widths; `time` names the column of times."""
    path = Path(path)
    if not path.is_file():
        raise ObservationError(f"there is no file {str(path)!r}")
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ObservationError(f"{str(path)!r}: a file of observations ends in {', '.join(READERS)}")
    try:
        found = reader(path)
    except ImportError as error:
        raise ObservationError(f"{str(path)!r} needs another package: {error}") from None
    except Exception as error:  # whatever a parser of a damaged file may raise
        raise ObservationError(f"{str(path)!r} cannot be read: {str(error).splitlines()[0]}") from None
    if isinstance(found, np.ndarray):
        return _of_array(path, found, widths)
    if isinstance(found, dict):
        return Table({name: _rows(_numbers(path, name, values)) for name, values in found.items()}, None)
    return _of_frame(path, found, widths, time)


def _read_csv(path: Path) -> pd.DataFrame:
    import pandas as pd

    with path.open(encoding="utf-8") as lines:
        first = lines.readline()
    header = None if _is_row(first) else 0
    # as texts, which become numbers to the last digit later
    frame = pd.read_csv(path, header=header, skipinitialspace=True, dtype=str)
    frame.columns = [str(column).strip() for column in frame.columns]
    return frame


def _is_row(line: str) -> bool:
    """Whether a first line holds numbers already, or gaps, and no names."""
    cells = [cell.strip() for cell in line.split(",")]
    try:
        return bool([float(cell) for cell in cells if cell])
    except ValueError:
        return False


def _read_parquet(path: Path) -> pd.DataFrame:
    import pandas as pd

    return pd.read_parquet(path)


def _read_npy(path: Path) -> Any:
    return np.load(path, allow_pickle=False)


def _read_npz(path: Path) -> Any:
    with np.load(path, allow_pickle=False) as opened:
        return {name: opened[name] for name in opened.files}


READERS = {".csv": _read_csv, ".parquet": _read_parquet, ".npy": _read_npy, ".npz": _read_npz}


def _of_array(path: Path, found: Array, widths: Mapping[str, int]) -> Table:
    values = _rows(_numbers(path, "the array", found))
    if len(widths) > 1:
        raise ObservationError(f"{str(path)!r}: there are several sensory nodes; use named columns, or an NPZ file")
    return Table({next(iter(widths)): values}, None)


def _rows(values: Array) -> Array:
    """(..., T, dim): a single series is one of single numbers."""
    return values.reshape(-1, 1) if values.ndim < 2 else values


def _of_frame(path: Path, frame: pd.DataFrame, widths: Mapping[str, int], time: str | None) -> Table:
    columns = [str(column) for column in frame.columns]
    frame = frame.set_axis(columns, axis=1)
    if len(set(columns)) < len(columns):
        raise ObservationError(f"{str(path)!r}: a column is there more than once")
    if time is not None and time not in columns:
        raise ObservationError(f"{str(path)!r} has no column {time!r}; columns: {', '.join(columns)}")
    named = {name: _columns_of(name, width, columns) for name, width in widths.items()}
    by_name = any(named.values())
    taken = {column for found in named.values() for column in found}
    if time is None:
        time = next((column for column in columns if column.lower() in TIMES and column not in taken), None)
    times = None if time is None else _numbers(path, time, frame[time].to_numpy(dtype=object))
    if times is not None and not np.isfinite(times).all():
        raise ObservationError(f"{str(path)!r}: a time is missing in column {time!r}")
    rest = [column for column in columns if column != time]
    if not by_name:
        if len(widths) > 1:
            raise ObservationError(
                f"{str(path)!r} has the columns {', '.join(columns)}; call them by the sensory nodes "
                f"{', '.join(widths)}"
            )
        ((name, width),) = widths.items()
        if len(rest) != width:
            raise ObservationError(f"{str(path)!r} has {len(rest)} columns of observations; {name!r} takes {width}")
        named = {name: rest}
    unknown = [column for column in rest if column not in {c for found in named.values() for c in found}]
    if unknown:
        raise ObservationError(f"{str(path)!r}: column {unknown[0]!r} belongs to no sensory node ({', '.join(widths)})")
    observations = {
        name: _numbers(path, name, frame[found].to_numpy(dtype=object)) for name, found in named.items() if found
    }
    return Table(observations, None if times is None else times.tolist())


def _columns_of(name: str, width: int, columns: list[str]) -> list[str]:
    """The columns of a node: its name, or its name with a number for each channel."""
    if width == 1 and name in columns:
        return [name]
    numbered = [f"{name}.{i}" for i in range(width)]
    return numbered if all(column in columns for column in numbered) else []


def _numbers(path: Path, what: str, values: Any) -> Array:
    array = np.asarray(values)
    if array.dtype == object or not (np.issubdtype(array.dtype, np.number) or array.dtype == bool):
        try:
            array = array.astype(np.float64)
        except (TypeError, ValueError):
            raise ObservationError(f"{str(path)!r}: there is something else than numbers in {what}") from None
    if np.iscomplexobj(array):
        raise ObservationError(f"{str(path)!r}: {what} must be real numbers")
    if not array.size:
        raise ObservationError(f"{str(path)!r}: there are no observations")
    return array.astype(np.float64)
