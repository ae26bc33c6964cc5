"""Summary of a result: a table of what was inferred and learned, with what deserves attention in words."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pcnet.errors import ResultError
from pcnet.results.downsample import Array
from pcnet.results.result import Interval, Result

if TYPE_CHECKING:
    import pandas as pd

LAST = 0.1  # share of the run over which a belief has settled if it hardly moved
SETTLED = 1.0  # a belief has settled if its mean moved by less than this over that time, in standard deviations
FAR = 4.0  # a mean so many prior standard deviations from its prior mean was held back by a prior that is too narrow
INFORMED = 0.98  # share of the prior standard deviation that is left of a parameter that the data do not determine
UNMOVED = 0.5  # and its mean is less than so many prior standard deviations from its prior mean
ENOUGH = 200  # observations after which a parameter that has not moved is worth a warning


class Line(NamedTuple):
    """One number that a belief is about, at the end of a run.

    change: of the mean from the prior mean, in prior standard deviations. left: standard deviation over that of the
    prior. moved: change of the mean over the last tenth of the run, in standard deviations. noise_sd: a log-precision
    as a standard deviation. NaN where there is none.
    """

    node: str
    role: str
    channel: int  # from 1
    mean: float
    sd: float
    lower: float
    upper: float
    change: float
    left: float
    moved: float
    noise_sd: float
    channels: int

    @property
    def label(self) -> str:
        return self.node if self.channels == 1 else f"{self.node}[{self.channel - 1}]"

    @property
    def is_settled(self) -> bool | None:
        """Whether the mean hardly moved at last; None for states, which move."""
        return None if math.isnan(self.moved) else self.moved < SETTLED


@dataclasses.dataclass(frozen=True, repr=False)
class Summary:
    """Means, standard deviations and intervals at the end of a run; printing it shows a table."""

    head: str
    probability: float
    lines: tuple[Line, ...]
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        names = ("", "mean", "sd", f"{100 * self.probability:g} % interval", "change", "settled", "noise sd")
        rows: list[tuple[str, ...]] = [names]
        for line in self.lines:
            settled = {None: "", True: "yes", False: "no"}[line.is_settled]
            interval = f"{rounded(line.lower, line.sd)} to {rounded(line.upper, line.sd)}"
            change = "" if math.isnan(line.change) else f"{line.change:+.1f} sd"
            noise = "" if math.isnan(line.noise_sd) else f"{line.noise_sd:.3g}"
            row = (line.label, rounded(line.mean, line.sd), f"{line.sd:#.2g}", interval, change, settled, noise)
            rows.append(tuple(cell.replace("-", "−") for cell in row))
        used = [i for i in range(len(names)) if i < 4 or any(row[i] for row in rows[1:])]
        widths = [max(len(row[i]) for row in rows) for i in used]
        texts = [
            "  ".join(
                row[i].ljust(w) if i == 0 else row[i].rjust(w) for i, w in zip(used, widths, strict=True)
            ).rstrip()
            for row in rows
        ]
        rule = "─" * max(map(len, texts))
        return "\n".join([self.head, rule, texts[0], rule, *texts[1:], rule, *(f"• {note}" for note in self.notes)])

    def to_dataframe(self) -> pd.DataFrame:
        """The table with one row for each line, without rounding."""
        import pandas as pd

        return pd.DataFrame([line._asdict() | {"settled": line.is_settled} for line in self.lines])


def rounded(value: float, sd: float) -> str:
    """A number with the digits that its standard deviation leaves: two of the latter."""
    if not (math.isfinite(value) and math.isfinite(sd) and sd > 0):
        return f"{value:.4g}"
    digits = 1 - math.floor(math.log10(sd))
    return f"{value:.{digits}f}" if 0 <= digits <= 6 and abs(value) < 1e7 else f"{value:.4g}"


def summarise(result: Result, probability: float = 0.95, element: int | tuple[int, ...] = 0) -> Summary:
    """The summary of one batch element; see `Result.summary`."""
    single = result.single(element)
    if not len(single.times):
        raise ResultError(
            "nothing was recorded, so that there is nothing to summarise; run with record=['mean', 'sd', 'energy']"
        )
    lines = [line for name in single.roles for line in _lines(single, name, probability)]
    if not lines:
        raise ResultError("no means and standard deviations were recorded; run with record=['mean', 'sd', 'energy']")
    which = f", batch element {element}" if result.batch_shape else ""
    head = f"{single.observations:,} observations{which}, t = {single.times[0]:g} to {single.times[-1]:g}"
    action = float(single.free_action)
    head += f", free action {action:,.1f} nats, {single.engine} engine".replace("-", "−")
    return Summary(head, probability, tuple(lines), tuple(_notes(single, lines)))


def _lines(single: Result, name: str, probability: float) -> list[Line]:
    if not all(f"{name}.{quantity}" in single.traces for quantity in ("mean", "sd")):
        return []
    means, sds = (_values(single.get(name, quantity)) for quantity in ("mean", "sd"))
    mean, sd = means[-1], sds[-1]
    lower, upper = Interval.normal(mean, sd, probability)
    role, prior = single.roles[name], single.priors.get(name)
    slow = role in ("parameter", "precision")
    none = np.full(len(mean), np.nan)
    change, left, moved = none, none, none
    with np.errstate(divide="ignore", invalid="ignore"):
        if prior is not None:
            before, width = (values[: len(mean)] for values in prior)  # without a lengthscale
            change, left = (mean - before) / width, sd / width
        if slow:
            before = means[-1 - max(1, round(LAST * (len(means) - 1)))] if len(means) > 1 else mean * np.nan
            moved = np.abs(mean - before) / sd
    noise = np.exp(-mean / 2) if role == "precision" and not _is_matrix(single, name) else none
    names = ("mean", "sd", "lower", "upper", "change", "left", "moved", "noise_sd")
    columns = zip(names, (mean, sd, lower, upper, change, left, moved, noise), strict=True)
    numbers = {key: [float(value) for value in values] for key, values in columns}
    each = [{key: values[i] for key, values in numbers.items()} for i in range(len(mean))]
    return [Line(node=name, role=role, channel=i + 1, channels=len(mean), **part) for i, part in enumerate(each)]


def _values(values: Array) -> Array:
    """Values (..., n) at several times or of several batch elements, without motion."""
    return values[:, 0] if values.ndim == 3 else values


def _is_matrix(single: Result, name: str) -> bool:
    """Whether a precision has couplings between channels, so that its numbers are not log-precisions alone."""
    return single.structure is not None and "full precision matrix" in single.structure[name].about


def _notes(single: Result, lines: list[Line]) -> list[str]:
    notes = []
    if int(single.diverged.at) >= 0:
        notes.append(f"stopped at observation {int(single.diverged.at)}: {single.diverged.node} diverged")
    for line in lines:
        if line.role == "parameter":
            notes += [note for note in (_note(line),) if note]
    unsettled = [line.label for line in lines if line.is_settled is False]
    if unsettled:
        notes.append(f"still moving at the end (more than {SETTLED:g} sd in the last tenth): {', '.join(unsettled)}")
    for name, count in single.fallbacks.items():
        if int(count):
            notes.append(f"fallback of {name!r} used {int(count)} times")
    return notes


def _note(line: Line) -> str | None:
    """What is remarkable about a parameter."""
    if line.left > INFORMED and abs(line.change) < UNMOVED:
        return (
            f"{line.label} is where its prior was ({100 * line.left:.0f} % of the prior sd is left): the data do "
            "not determine it, or the prior is too narrow for them to move it. Observe what it changes, give more data "
            "or a larger prior sd, or fix it"
        )
    if abs(line.change) > FAR:
        return (
            f"{line.label} ended {abs(line.change):.1f} prior sds from its prior mean: the prior holds it back; give "
            "it a larger prior sd (parameter_sd of adaptive_filter, sd of a ParameterNode)"
        )
    return None


def remarks(result: Result) -> list[str]:
    """What a run should warn of: parameters at their priors, or far from them; of a batch, the first and how many."""
    if result.observations < ENOUGH or not len(result.times):
        return []
    shape, count, notes = result.batch_shape, int(np.prod(result.batch_shape, dtype=int)), []
    for name in (name for name, role in result.roles.items() if role == "parameter"):
        traces = {key: result.traces[key] for key in (f"{name}.mean", f"{name}.sd") if key in result.traces}
        prior = result.priors.get(name)
        if len(traces) < 2 or prior is None:
            continue
        last = (trace.values.reshape(count, *trace.values.shape[len(shape) :])[:, -1] for trace in traces.values())
        mean, sd = map(_values, last)
        before, width = (value.reshape(count, -1)[:, : mean.shape[1]] for value in prior)
        with np.errstate(divide="ignore", invalid="ignore"):
            change, left = np.abs(mean - before) / width, sd / width
        kinds = ((left > INFORMED) & (change < UNMOVED), change > FAR)
        for channel in range(mean.shape[1]):
            for elements in (np.flatnonzero(kind[:, channel]) for kind in kinds):
                if len(elements):
                    single = dataclasses.replace(result, traces=traces).single(int(elements[0]))
                    where = f" (batch element {elements[0]}; {len(elements)} of {count} in all)" if shape else ""
                    notes.append(f"{_note(_lines(single, name, 0.95)[channel])}{where}")
    return notes
