"""What a run should warn of: data that fit the model, and yet are hardly what was meant."""

from collections.abc import Iterator, Mapping, Sized

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pcnet.functions.base import Function
from pcnet.functions.check import is_finite_below_zero
from pcnet.model.graph import Graph
from pcnet.model.node import AnyNode
from pcnet.model.protocols import StartsGiven
from pcnet.nodes.flow import state_functions

ROWS, COLUMNS = 10_000, 32  # values and channels that are looked at
REPEATED = 5  # a value that occurs so often, while all others differ, stands for something else
DISTINCT = 0.95  # share of different values among the others, so that they are said to differ
OUTSIDE = 10.0  # a value that occurs twice and is so many times the range of all others away is a code
LIMIT = 0.1  # a value that is less than this share of that range beyond the others is a limit, as of counts or a sensor
STUCK = 50  # observations after which a value that never changes is worth a warning
VARIED = 10  # different values among the others without which nothing is said
UNUSUAL = 30.0  # times so many sampling intervals apart, or that many times closer, are taken for other units
UNEVEN = 1.25  # largest step of an index in smallest ones, so that rows count as evenly spaced
EARLY = 64  # until so many observations a first belief may explain a divergence
ENOUGH = 10  # observations after which times are judged


def of_observations(nodes: Mapping[str, AnyNode], series: Mapping[str, Tensor]) -> Iterator[str]:
    """Sensors of which nothing was observed. series: observations (T, ..., n) by node, NaN if they were not given."""
    for name, values in series.items():
        empty = ~torch.isfinite(values).any(-1).any(0)
        if bool(empty.any()) and not nodes[name].is_input:
            where = "" if bool(empty.all()) else f" in {int(empty.sum())} of {empty.numel()} batch elements"
            yield (
                f"all values of {name!r}{where} are NaN, or were not given: nothing was observed, so that beliefs "
                "follow the flow and the priors; check how the data were read (missing single values may be NaN)"
            )
        elif not nodes[name].is_input:
            yield from _single_rows(name, values)
            found = list(_codes(name, values, hasattr(nodes[name], "log_likelihood")))
            more = f" ({len(found) - 1} other channels are alike)" if len(found) > 1 else ""
            yield from (f"{each}{more}" for each in found[:1])


def _single_rows(name: str, values: Tensor) -> Iterator[str]:
    """Batches of one observation each, which are mostly a series with a dimension too many."""
    if values.dim() == 3 and len(values) == 1 and values.shape[1] >= ENOUGH:
        batch, channels = values.shape[1:]
        yield (
            f"{batch} batch elements of {name!r} have one observation each: the dimensions of observations are "
            f"(batch, time, channels). For one series of {batch} observations give ({batch}, {channels}), "
            "observations[:, 0]"
        )


def _codes(name: str, values: Tensor, discrete: bool) -> Iterator[str]:
    """Numbers that may stand for missing values, such as −999, and series that never change.

    discrete: whether values may be counts or choices, which often stay the same.
    """
    table = values.flatten(1, -2) if values.dim() > 2 else values[:, None]
    columns = table.flatten(0, 1)[:ROWS, :COLUMNS].T.cpu().numpy()
    for channel, column in enumerate(columns):
        where = f"{name!r}" if len(columns) == 1 else f"channel {channel} of {name!r}"
        found, counts = np.unique(column[np.isfinite(column)], return_counts=True)
        if len(found) == 1 and counts[0] >= STUCK and not discrete:
            yield f"{where} is {found[0]:g} in all of {counts[0]} observations: check the sensor and the file"
        if len(found) == 2 and set(found) == {0.0, 1.0} and counts.sum() >= STUCK and not discrete:
            yield (
                f"{where} is 0 or 1 and was read as a number with Gaussian noise; for successes or choices use "
                'sensors={"y": Sensor(family="binomial", family_settings={"trials": 1})}'
            )
        if len(found) - 1 < VARIED or counts.max() == 1:
            continue
        at = int(counts.argmax())
        others, value = np.delete(found, at), found[at]
        extent = others[-1] - others[0]
        outside = max(others[0] - value, value - others[-1])
        is_code = outside > OUTSIDE * extent
        is_limit = 0 < outside < LIMIT * extent
        others_differ = counts[at] >= REPEATED and len(others) >= DISTINCT * (counts.sum() - counts[at])
        if is_code or (others_differ and not is_limit):
            yield (
                f"{where} is {value:g} in {counts[at]} observations, "
                f"{'far from all other values' if is_code else 'while other values do not repeat'}: if this "
                f"stands for missing values, write NaN instead, observations[observations == {value:g}] = numpy.nan"
            )


def of_functions(graph: Graph, like: Tensor) -> str:
    """What to look at after a divergence, if a flow or mapping is not finite at negative states; "" otherwise."""
    for node in graph.nodes.values():
        flow = getattr(node, "flow", None)
        if node.role != "state" or not isinstance(flow, Function):
            continue
        for what, function, size, n_parameters, _ in state_functions(
            node, node.shape.dim, flow, graph.neighbours(node)
        ):
            if not is_finite_below_zero(function, size, n_parameters, like):
                return (
                    f"; {what} is NaN or infinite at negative states (a logarithm, a root or a power), which a belief "
                    "may reach: limit them by torch.clamp(x, min=1e-6), or take the logarithm as the state"
                )
    return ""


def of_start(nodes: Mapping[str, AnyNode], tick: int) -> str:
    """What to look at after a divergence at the start, if a first belief was left at its defaults; "" otherwise."""
    doubtful = [name for name, node in nodes.items() if isinstance(node, StartsGiven) and node.has_default_start]
    if not doubtful or tick > EARLY:
        return ""
    return (
        f"; the elements of {doubtful[0]!r} start with a standard deviation of 1, the default: if their units are "
        "others, give initial_mean and initial_sd"
    )


def of_times(times: object, intervals: Tensor) -> Iterator[str]:
    """Times in other units than the sampling interval. times: an iterator is not looked at. intervals: dt, (B,)."""
    if not isinstance(times, Sized) or len(times) < ENOUGH:
        return
    apart = float(np.median(np.diff(np.asarray(times, dtype=np.float64))))
    least, most = float(intervals.min()), float(intervals.max())
    if not least / UNUSUAL <= apart <= most * UNUSUAL:
        yield (
            f"times are {apart:.3g} apart, and dt is {least:.3g}: give both in the same unit, or another dt if the "
            "observations are meant to be so far apart"
        )


def of_tables(given: object, intervals: Tensor) -> Iterator[str]:
    """Tables whose rows are not as far apart as their index says, which a run without times does not read.

    given: a table of pandas or xarray, or a mapping from names to these; anything else has no index. intervals: dt.
    """
    named = given.items() if isinstance(given, Mapping) else [("", given)]
    for name, table in named:
        index = _index(table)
        if index is None or len(index) < ENOUGH:
            continue
        where = f"the index of {name!r}" if isinstance(given, Mapping) else "the index of the table"
        steps = np.diff(index)
        dt = float(intervals.min())
        if bool((steps <= 0).any()):
            at = int((steps <= 0).argmax()) + 1
            yield (
                f"{where} does not increase at row {at}: rows are taken in as they come, dt = {dt:.3g} apart; sort "
                "them, table.sort_index(), and run each recording by itself"
            )
        elif steps.max() > UNEVEN * steps.min():
            yield (
                f"{where} has steps from {steps.min():.3g} to {steps.max():.3g}, but it is not read, and rows count as "
                f"dt = {dt:.3g} apart: give times=table.index, of dates times=(table.index - table.index[0])"
                ".total_seconds(); rows that were left out, as by dropna(), are better kept as NaN"
            )
        elif not (isinstance(given, Mapping) or steps[0] % 1 == 0 or dt / UNEVEN < steps[0] < dt * UNEVEN):
            yield (
                f"{where} has steps of {steps[0]:.3g}, but it is not read, and rows count as dt = {dt:.3g} apart: give "
                "times=table.index (of xarray the coordinate of time), or this interval as dt"
            )


def _index(table: object) -> NDArray[np.float64] | None:
    """The index of the rows of a table as numbers, of dates in seconds; None if it has none, or one of names."""
    found = getattr(table, "index", None)
    dims, coords = getattr(table, "dims", None), getattr(table, "coords", None)
    if found is None and isinstance(dims, tuple) and isinstance(coords, Mapping):  # xarray
        found = coords.get(dims[max(0, len(dims) - 2)])
    if getattr(found, "tz", None) is not None:
        found = found.tz_convert(None)  # type: ignore[union-attr]
    values = getattr(found, "values", None)
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iufmM":
        return None
    if values.dtype.kind in "mM":
        seconds: NDArray[np.float64] = (values - values[:1]) / np.timedelta64(1, "s")
        return seconds
    return values.astype(np.float64)
