"""Pictures of a study: free action and errors over settings, with the best of each group.

Nothing here touches pyplot or its settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize, SymLogNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pcnet.errors import StudyError
from pcnet.results.drawing import COLOURS, darken
from pcnet.results.graph_plots import contrast
from pcnet.sweeps.study import Study, Where, finished, no_column, same_data

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[Any]

WRITTEN = 80
"""Cells of up to so many are labelled with their numbers."""
ACTION = "free_action"


def overview(
    study: Study,
    x: str | None = None,
    y: str | None = None,
    *,
    by: str | None = None,
    scores: Sequence[str] | None = None,
    where: Where | None = None,
    title: str | None = None,
    dark: bool = False,
) -> Figure:
    """Free action and error over two settings (or one), a row for each score and a column for each group.

    x, y: settings; the first two that vary, unless given. A cell shows the lowest score over all other settings; a star
    marks the best of a group. by: a setting that tells groups apart. scores: columns of the table; free action and
    all mean squared errors unless given. Free actions are shown as what they are above the lowest of the same data,
    since those of different data cannot be compared, and added over replicates; other scores are averaged over them.
    """
    table = finished(study.to_dataframe(where))
    settings = study.settings
    chosen = scores or [ACTION, *(str(name) for name in table if str(name).endswith(".mse"))]
    for name in (x, y, by):
        if name is not None and name not in settings:
            raise StudyError(f"there is no setting {name!r}; settings: {', '.join(settings)}")
    for name in chosen:
        if name not in table:
            raise no_column(name, table)
    x, y = _axes(table, settings, x, y, by)
    models = _models(table, settings, chosen)
    groups: list[Any] = [None] if by is None else _ordered(models[by])
    figure = Figure(figsize=(4.6 * len(groups) + 0.6, 3.3 * len(chosen) + 0.4), layout="constrained")
    grid = figure.subplots(len(chosen), len(groups), squeeze=False)
    for row, score in zip(grid, chosen, strict=True):
        norm = _norm(models[score].to_numpy(float), score)
        for ax, group in zip(row, groups, strict=True):
            part = models if by is None else models[models[by].map(lambda value, g=group: value == g)]
            if y is None:
                _line(ax, part, x, score)
            else:
                _cells(ax, part, x, y, score, norm)
            if by is not None:
                ax.set_title(f"{by} = {_text(group)}", fontsize="medium")
    figure.suptitle(title or f"{len(models)} settings, {int(models[ACTION].isna().sum())} diverged")
    if dark:
        darken(figure)
    return figure


def _axes(
    table: pd.DataFrame, settings: Sequence[str], x: str | None, y: str | None, by: str | None
) -> tuple[str, str | None]:
    """The settings to draw over: those given, else the first that vary."""
    free = [name for name in settings if name not in (x, y, by) and table[name].nunique(dropna=False) > 1]
    given = x is not None
    x = x or (free.pop(0) if free else None)
    if x is None:
        raise StudyError("no setting varies, so that there is nothing to draw over; give x=")
    if y is None and not given and free:
        y = free[0]
    if x == y:
        raise StudyError(f"x and y are both {x!r}; give two settings, or x alone")
    return x, y


def _models(table: pd.DataFrame, settings: Sequence[str], scores: Sequence[str]) -> pd.DataFrame:
    """A row for each setting: free actions added over replicates and relative to the same data, scores averaged."""
    replicates = table["replicate"].nunique()
    grouped = table.groupby([*settings, "data"], sort=False, dropna=False)
    models = grouped[list(dict.fromkeys([ACTION, *scores]))].sum(min_count=replicates)
    models = models.assign(**{name: models[name] / replicates for name in scores if name != ACTION})
    models = models.reset_index().assign(replicate=0)
    models[ACTION] = models[ACTION] - models.groupby("data")[ACTION].transform("min")
    return models


def _cells(ax: Axes, part: pd.DataFrame, x: str, y: str, score: str, norm: Normalize) -> None:
    columns, rows = _ordered(part[x]), _ordered(part[y])
    values, data = np.full((len(rows), len(columns)), np.nan), np.full((len(rows), len(columns)), "", dtype=object)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            values[i, j], data[i, j] = _lowest(part[_is(part[x], column) & _is(part[y], row)], score)
    shades = colormaps["cividis_r"]
    image = ax.imshow(values, cmap=shades, norm=norm, aspect="auto", origin="lower", interpolation="nearest")
    assert ax.figure is not None
    bar = ax.figure.colorbar(image, ax=ax, pad=0.02)
    bar.set_label(_label(score))
    for i, j in np.argwhere(np.isnan(values)):
        ax.text(j, i, "×", ha="center", va="center", color="black")
    if values.size <= WRITTEN:
        for i, j in np.argwhere(~np.isnan(values)):
            colour = contrast(shades(norm(values[i, j])))
            ax.text(j, i, _number(values[i, j]), ha="center", va="center", color=_not_quite(colour), fontsize=7)
    for best in _best(values.reshape(-1), data.reshape(-1)):
        at, along = divmod(best, len(columns))
        ax.plot(
            along, at + 0.3, marker="*", color=COLOURS[1], markersize=11, markeredgecolor="white", markeredgewidth=0.7
        )
    _ticks(ax, x, columns)
    ax.set_yticks(range(len(rows)), [_text(row) for row in rows])
    ax.set_ylabel(y)


def _line(ax: Axes, part: pd.DataFrame, x: str, score: str) -> None:
    columns = _ordered(part[x])
    at = {column: i for i, column in enumerate(columns)}
    ax.plot(part[x].map(at.__getitem__), part[score], ".", color="grey", alpha=0.5, markeredgewidth=0)
    found = [_lowest(part[_is(part[x], column)], score) for column in columns]
    lowest = np.array([value for value, _ in found])
    ax.plot(lowest, "o-", color=COLOURS[0], markersize=4)
    for best in _best(lowest, np.array([data for _, data in found], dtype=object)):
        ax.plot(best, lowest[best], marker="*", color=COLOURS[1], markersize=12, markeredgecolor="white", zorder=3)
    _ticks(ax, x, columns)
    ax.set_ylabel(_label(score))
    ax.spines[["top", "right"]].set_visible(False)


def _is(values: pd.Series[Any], wanted: Any) -> pd.Series[Any]:
    """Where a setting has a value; settings may be tuples, which pandas would compare one by one."""
    return values.map(lambda value: value == wanted)


def _lowest(own: pd.DataFrame, score: str) -> tuple[float, str]:
    """The lowest score of some settings, and for free actions the data they are of, which must be the same."""
    if score != ACTION:
        return float(own[score].min()), ""
    same_data(own)
    return float(own[score].min()), "".join(own["data"].unique())


def _best(values: Array, data: Array) -> list[int]:
    """Where the lowest value of each data is."""
    found = []
    for each in dict.fromkeys(data.tolist()):
        own = np.where((data == each) & np.isfinite(values), values, np.inf)
        if np.isfinite(own).any():
            found.append(int(own.argmin()))
    return found


def _ticks(ax: Axes, name: str, values: Sequence[Any]) -> None:
    words = [_text(value) for value in values]
    slanted = sum(map(len, words)) > 40
    ax.set_xticks(range(len(words)), words, rotation=45 if slanted else 0, ha="right" if slanted else "center")
    ax.set_xlabel(name)


def _norm(values: Array, score: str) -> Normalize:
    """By logarithms where scores are of different magnitudes, since the good ones are to be told apart."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return Normalize(0.0, 1.0)
    low, high = float(finite.min()), float(finite.max())
    if score == ACTION:
        return SymLogNorm(1.0, vmin=0.0, vmax=max(high, 1.0))
    return LogNorm(low, high) if low > 0 and high > 20 * low else Normalize(low, high)


def _ordered(values: pd.Series[Any]) -> list[Any]:
    """The different values, in order where they have one."""
    found = list(dict.fromkeys(values.tolist()))
    try:
        return sorted(found)
    except TypeError:
        return found


def _label(score: str) -> str:
    if score == ACTION:
        return "free action above\nthe lowest (nats)"
    node, _, what = score.rpartition(".")
    return f"mean squared error of {node}" if what == "mse" and node else score


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2g}"


def _not_quite(colour: str) -> str:
    """A black that stays black on dark paper, where it stands on a coloured cell."""
    return "#010101" if colour == "black" else colour
