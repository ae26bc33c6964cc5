"""The error flow of a run: which node was surprised, when, and what it told whom."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pcnet.errors import ResultError
from pcnet.files import atomic_write
from pcnet.results.graph_summary import GraphSummary, LinkView
from pcnet.results.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[Any]
Way = Literal["prediction", "error"]
WAYS: tuple[Way, Way] = ("prediction", "error")
FULL = 0.995
"""Links are drawn at full width from this quantile of what passes along them, so that one tick does not hide others."""


class Passage(NamedTuple):
    """What passed along a link one way: its size at each time, (T,)."""

    link: LinkView
    way: Way
    size: Array


class ErrorFlow:
    """Errors and messages of one batch element of a run that was recorded with `Record.flow()`.

    Surprise of a node: √(ε̃ᵀΠ̃ε̃ / n), its error in units of what its precision leads it to expect (1 is as expected).
    Size of a message: the root mean square of its n numbers, in the units of the link. What is missing does not count;
    where all is missing, both are NaN.
    """

    def __init__(self, result: Result, element: int | tuple[int, ...] = 0) -> None:
        if result.structure is None:
            raise ResultError(
                "this result does not hold the structure of its graph (its file is of an older format); run it again"
            )
        if not len(result.times):
            raise ResultError("nothing was recorded: record.every is more than the number of observations")
        self.result = result.single(element)
        self.structure: GraphSummary = result.structure
        self.times: Array = self.result.times
        missing = self._missing()
        if missing:
            raise ResultError(
                f"the error flow needs what was not recorded: {', '.join(missing)}; run with record=Record.flow()"
            )

    def _missing(self) -> list[str]:
        """What would have to be recorded as well."""
        held = self.result.traces
        missing = []
        if not all(link.channel(way) in held for link in self.structure.links for way in WAYS):
            missing.append("messages")
        weighed = [link.child for link in self.structure.links if link.kind == "weighs"]
        missing += [q for q in ("error", "weighted_error") if not all(f"{name}.{q}" in held for name in weighed)]
        if not all(f"{node.name}.free_energy" in held for node in self.structure.nodes):
            missing.append("energy")
        return missing

    def __repr__(self) -> str:
        return f"<ErrorFlow of {len(self.structure.nodes)} nodes at {len(self.times)} times>"

    # --- numbers -----------------------------------------------------------------------------------------------
    @property
    def surprised(self) -> tuple[str, ...]:
        """The nodes with an error of their own, from the top level down."""
        known = [n for n in self.structure.nodes if f"{n.name}.weighted_error" in self.result.traces]
        return tuple(n.name for n in sorted(known, key=lambda n: -n.level))

    def surprise(self, node: str) -> Array:
        """√(ε̃ᵀΠ̃ε̃ / n) at each time, (T,)."""
        if node not in self.surprised:
            raise ResultError(
                f"{self.structure[node].name!r} has no error of its own; these have: {', '.join(self.surprised)}"
            )
        error, weighted = (self.result.get(node, quantity) for quantity in ("error", "weighted_error"))
        return np.sqrt(np.maximum(_mean_of_known(error * weighted), 0.0))

    def share(self, node: str) -> Array:
        """A node's share of the free energy at each time, (T,)."""
        return self.result.free_energy_of(node)

    def passages(self) -> list[Passage]:
        """What passed along every link, both ways."""
        return [Passage(link, way, self._size(link, way)) for link in self.structure.links for way in WAYS]

    def passed(self, sender: str, receiver: str, of: str | None = None) -> Array:
        """The size of what a node told a neighbour at each time, (T,)."""
        for link in self.structure.links:
            if link.of == of and {link.parent, link.child} == {sender, receiver}:
                return self._size(link, "prediction" if link.parent == sender else "error")
        raise ResultError(f"there is no link between {sender!r} and {receiver!r}" + (f" of {of!r}" if of else ""))

    def _size(self, link: LinkView, way: Way) -> Array:
        values = self.result.traces[link.channel(way)].values
        return np.sqrt(_mean_of_known(values**2))

    # --- pictures ----------------------------------------------------------------------------------------------
    def plot(self, **options: Any) -> Figure:
        """Map, shares and graph on one page; see `pcnet.flow_plots.overview`."""
        from pcnet.results import flow_plots

        return flow_plots.overview(self, **options)

    def map(self, **options: Any) -> Axes:
        """Node × time map of surprise; see `pcnet.flow_plots.surprise_map`."""
        from pcnet.results import flow_plots

        return flow_plots.surprise_map(self, **options)

    def shares(self, **options: Any) -> Axes:
        """Free energy by node; see `pcnet.flow_plots.shares`."""
        from pcnet.results import flow_plots

        return flow_plots.shares(self, **options)

    def draw(self, **options: Any) -> Axes:
        """The graph with links as wide as what passed along them; see `pcnet.flow_plots.passing`."""
        from pcnet.results import flow_plots

        return flow_plots.passing(self, **options)

    def animate(self, path: str | Path, **options: Any) -> Path:
        """A GIF or MP4 of the run; see `pcnet.flow_plots.animate`."""
        from pcnet.results import flow_plots

        return flow_plots.animate(self, Path(path), **options)

    def within(self, at: float | None = None, window: Sequence[float] | None = None) -> slice:
        """The recorded times nearest to `at`, or those in the window from one time to another; else all."""
        if at is not None and window is not None:
            raise ResultError("give a time (at=) or a window, not both")
        if at is not None:
            nearest = int(np.abs(self.times - at).argmin())
            return slice(nearest, nearest + 1)
        if window is None:
            return slice(0, len(self.times))
        if len(window) != 2 or not window[0] <= window[1]:
            raise ResultError(f"a window is (from, to) in time, not {window!r}")
        first, last = np.searchsorted(self.times, window[0]), np.searchsorted(self.times, window[1], side="right")
        if first == last:
            raise ResultError(
                f"nothing was recorded from {window[0]:g} to {window[1]:g}; the run goes from {self.times[0]:g} to "
                f"{self.times[-1]:g}"
            )
        return slice(int(first), int(last))

    # --- the page ----------------------------------------------------------------------------------------------
    def save(self, path: str | Path, title: str | None = None) -> Path:
        """Write an interactive page: one HTML file that needs no network. Whole or not at all."""
        from pcnet.results.page import render

        path = Path(path)
        if path.suffix.lower() not in (".html", ".htm"):
            raise ResultError(
                f"the page is an HTML file: give a name that ends in .html, not {path.name!r} (for a moving picture "
                "use animate, for data result.save)"
            )
        if not path.parent.is_dir():
            raise ResultError(f"there is no folder {str(path.parent)!r} to save into")
        with atomic_write(path) as scratch:
            scratch.write_text(render(self, title), encoding="utf-8")
        return path


def _mean_of_known(values: Array) -> Array:
    """The mean of the numbers at each time, (T, ...) → (T,); of those that are there, NaN if none is."""
    flat = values.reshape(len(values), -1)
    known = np.isfinite(flat)
    count = known.sum(1)
    mean: Array = np.where(count > 0, np.where(known, flat, 0.0).sum(1) / np.maximum(count, 1), np.nan)
    return mean


def full_width(size: Array) -> float:
    """The size at which a link is drawn at its full width: a high quantile, or the greatest where that is nothing."""
    finite = size[np.isfinite(size)]
    if not finite.size:
        return 1.0
    return float(np.quantile(finite, FULL)) or float(finite.max()) or 1.0


def typical_step(times: Array) -> float:
    """The mean time from one record to the next; 1 where there is one only."""
    return float((times[-1] - times[0]) / (len(times) - 1)) if len(times) > 1 and times[-1] > times[0] else 1.0
