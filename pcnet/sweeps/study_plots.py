"""Figures of a study: free action and errors over settings, with the best of each group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize, SymLogNorm
from matplotlib.figure import Figure

from pcnet.errors import StudyError
from pcnet.results.downsample import Array
from pcnet.results.drawing import COLOURS, darken
from pcnet.results.graph_plots import contrast
from pcnet.sweeps.study import Study, Where, finished, no_column, same_data

if TYPE_CHECKING:
    import pandas as pd

MAX_LABELLED = 80  # maps of up to this many cells show their numbers
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
    """Draw scores over one or two settings: a row per score, a column per group, a star at the best of each group.

    A cell shows the minimum over all other settings. Free actions are summed over replicates and shown relative to the
    lowest of the same data, because those of different data are not comparable; other scores are averaged.

    Args:
        x, y: Settings; by default the first two that vary.
        by: Setting that defines the groups.
        scores: Columns of the table; free action and all mean squared errors by default.
        where: Selection of inversions.
        dark: Use the dark theme.
    """
    table, settings = finished(study.to_dataframe(where)), study.settings
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
            part = models if by is None else models[_is(models[by], group)]
            if y is None:
                _draw_line(ax, part, x, score)
            else:
                _draw_map(ax, part, x, y, score, norm)
            if by is not None:
                ax.set_title(f"{by} = {_text(group)}", fontsize="medium")
    figure.suptitle(title or f"{len(models)} settings, {int(models[ACTION].isna().sum())} diverged")
    if dark:
        darken(figure)
    return figure


def _axes(
    table: pd.DataFrame, settings: Sequence[str], x: str | None, y: str | None, by: str | None
) -> tuple[str, str | None]:
    """Settings of the axes: those given, else the first that vary."""
    free = [name for name in settings if name not in (x, y, by) and table[name].nunique(dropna=False) > 1]
    given = x is not None
    x = x or (free.pop(0) if free else None)
    if x is None:
        raise StudyError("no setting varies, so there is nothing to draw over; give x=")
    if y is None and not given and free:
        y = free[0]
    if x == y:
        raise StudyError(f"x and y are both {x!r}; give two settings, or x alone")
    return x, y


def _models(table: pd.DataFrame, settings: Sequence[str], scores: Sequence[str]) -> pd.DataFrame:
    """One row per setting: relative free action summed over replicates, other scores averaged."""
    replicates = table["replicate"].nunique()
    grouped = table.groupby([*settings, "data"], sort=False, dropna=False)
    models = grouped[list(dict.fromkeys([ACTION, *scores]))].sum(min_count=replicates)
    models = models.assign(**{name: models[name] / replicates for name in scores if name != ACTION})
    models = models.reset_index().assign(replicate=0)
    models[ACTION] = models[ACTION] - models.groupby("data")[ACTION].transform("min")
    return models


def _draw_map(ax: Axes, part: pd.DataFrame, x: str, y: str, score: str, norm: Normalize) -> None:
    columns, rows = _ordered(part[x]), _ordered(part[y])
    cells = [_lowest(part[_is(part[x], column) & _is(part[y], row)], score) for row in rows for column in columns]
    values = np.array([value for value, _ in cells]).reshape(len(rows), len(columns))
    colours = colormaps["cividis_r"]
    image = ax.imshow(values, cmap=colours, norm=norm, aspect="auto", origin="lower", interpolation="nearest")
    assert ax.figure is not None
    ax.figure.colorbar(image, ax=ax, pad=0.02).set_label(_label(score))
    centre: dict[str, Any] = {"ha": "center", "va": "center"}
    for i, j in np.argwhere(np.isnan(values)):
        ax.text(j, i, "×", color="black", **centre)
    for i, j in np.argwhere(~np.isnan(values)) if values.size <= MAX_LABELLED else ():
        value, colour = values[i, j], contrast(colours(norm(values[i, j])))
        # not quite black: `darken` must leave text on a coloured cell alone
        colour = "#010101" if colour == "black" else colour
        ax.text(j, i, f"{value:.0f}" if abs(value) >= 100 else f"{value:.2g}", color=colour, fontsize=7, **centre)
    for best in _best(cells):
        i, j = divmod(best, len(columns))
        star: dict[str, Any] = {"marker": "*", "markersize": 11, "markeredgecolor": "white", "markeredgewidth": 0.7}
        ax.plot(j, i + 0.3, color=COLOURS[1], **star)
    _set_ticks(ax, x, columns)
    ax.set_yticks(range(len(rows)), [_text(row) for row in rows])
    ax.set_ylabel(y)


def _draw_line(ax: Axes, part: pd.DataFrame, x: str, score: str) -> None:
    columns = _ordered(part[x])
    index = {column: i for i, column in enumerate(columns)}
    ax.plot(part[x].map(index.__getitem__), part[score], ".", color="grey", alpha=0.5, markeredgewidth=0)
    cells = [_lowest(part[_is(part[x], column)], score) for column in columns]
    lowest = [value for value, _ in cells]
    ax.plot(lowest, "o-", color=COLOURS[0], markersize=4)
    for best in _best(cells):
        ax.plot(best, lowest[best], marker="*", color=COLOURS[1], markersize=12, markeredgecolor="white", zorder=3)
    _set_ticks(ax, x, columns)
    ax.set_ylabel(_label(score))
    ax.spines[["top", "right"]].set_visible(False)


def _is(values: pd.Series[Any], wanted: Any) -> pd.Series[Any]:
    """Mask of a value; pandas would compare tuples element by element."""
    return values.map(lambda value: value == wanted)


def _lowest(part: pd.DataFrame, score: str) -> tuple[float, str]:
    """Lowest score; for free actions also the data, which must be the same for all rows."""
    if score != ACTION:
        return float(part[score].min()), ""
    same_data(part)
    return float(part[score].min()), "".join(part["data"].unique())


def _best(cells: Sequence[tuple[float, str]]) -> list[int]:
    """Index of the lowest value of each data."""
    best: dict[str, int] = {}
    for i, (value, data) in enumerate(cells):
        if np.isfinite(value) and (data not in best or value < cells[best[data]][0]):
            best[data] = i
    return list(best.values())


def _set_ticks(ax: Axes, name: str, values: Sequence[Any]) -> None:
    texts = [_text(value) for value in values]
    slanted = sum(map(len, texts)) > 40
    ax.set_xticks(range(len(texts)), texts, rotation=45 if slanted else 0, ha="right" if slanted else "center")
    ax.set_xlabel(name)


def _norm(values: Array, score: str) -> Normalize:
    """Logarithmic colour scale if scores differ in magnitude, so that good ones remain distinguishable."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return Normalize(0.0, 1.0)
    low, high = float(finite.min()), float(finite.max())
    if score == ACTION:
        return SymLogNorm(1.0, vmin=0.0, vmax=max(high, 1.0))
    return LogNorm(low, high) if low > 0 and high > 20 * low else Normalize(low, high)


def _ordered(values: pd.Series[Any]) -> list[Any]:
    """Distinct values, sorted if possible."""
    distinct = list(dict.fromkeys(values.tolist()))
    try:
        return sorted(distinct)
    except TypeError:
        return distinct


def _label(score: str) -> str:
    if score == ACTION:
        return "free action above\nthe lowest (nats)"
    node, _, what = score.rpartition(".")
    return f"mean squared error of {node}" if what == "mse" and node else score


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
