"""Error flow of a run: size of the prediction errors of each node and of the messages on each link over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pcnet.errors import ResultError
from pcnet.files import atomic_write
from pcnet.results.downsample import Array
from pcnet.results.graph_summary import GraphSummary, LinkSummary
from pcnet.results.result import NOTHING_RECORDED, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WAYS = ("prediction", "error")
MAX_SURPRISE = 4.0  # upper end of colour scales, in units of the expected error
MAX_MOVEMENT = 1.0  # the same for movements of beliefs in one observation, in standard deviations
FULL_QUANTILE = 0.995
"""Arrows are drawn at full width from this quantile of the message sizes, so that one outlier does not dominate."""


class Passage(NamedTuple):
    """Size over time, (T,), of the messages on a link in one direction."""

    link: LinkSummary
    way: str
    size: Array


class ErrorFlow:
    """Errors and messages of one batch element of a run that was recorded with `Record.flow()`.

    The surprise of a node is √(ε̃ᵀΠ̃ε̃ / n): its error relative to its precision, 1 being as large as expected. The size
    of a message is the root mean square of its n numbers, in the units of the link. Missing values are left out; both
    are NaN where all values are missing.
    """

    def __init__(self, result: Result, element: int | tuple[int, ...] = 0) -> None:
        if result.structure is None:
            raise ResultError("this result has no graph summary: its file has an older format; run the model again")
        if not len(result.times):
            raise ResultError(NOTHING_RECORDED)
        self.result = result.single(element)
        self.structure: GraphSummary = result.structure
        self.times: Array = self.result.times

        traces, links = self.result.traces, self.structure.links
        weighted = [link.child for link in links if link.kind == "weighs"]
        required = {
            "messages": [link.channel(way) for link in links for way in WAYS],
            "error": [f"{name}.error" for name in weighted],
            "weighted_error": [f"{name}.weighted_error" for name in weighted],
            "energy": [f"{node.name}.free_energy" for node in self.structure.nodes],
        }
        missing = [quantity for quantity, names in required.items() if not all(name in traces for name in names)]
        if missing:
            lacking = f"the error flow needs quantities that were not recorded: {', '.join(missing)}"
            raise ResultError(f"{lacking}; run with record=Record.flow() (on the command line: --record flow)")

    def __repr__(self) -> str:
        return f"<ErrorFlow of {len(self.structure.nodes)} nodes at {len(self.times)} times>"

    # --- numbers -----------------------------------------------------------------------------------------------
    @property
    def surprised(self) -> tuple[str, ...]:
        """Names of the nodes with a prediction error, from the top level down."""
        nodes = [n for n in self.structure.nodes if f"{n.name}.weighted_error" in self.result.traces]
        return tuple(n.name for n in sorted(nodes, key=lambda n: -n.level))

    def surprise(self, node: str) -> Array:
        """√(ε̃ᵀΠ̃ε̃ / n) at each time, (T,)."""
        if node not in self.surprised:
            name = self.structure[node].name
            raise ResultError(f"{name!r} has no prediction error; nodes that have one: {', '.join(self.surprised)}")
        error, weighted = (self.result.get(node, quantity) for quantity in ("error", "weighted_error"))
        return np.sqrt(np.maximum(_mean_of_known(error * weighted), 0.0))

    @property
    def moving(self) -> tuple[str, ...]:
        """Names of the nodes without an error of their own whose beliefs were recorded: parameters and noise levels."""
        traces = self.result.traces
        known = [n for n in self.structure.nodes if all(f"{n.name}.{q}" in traces for q in ("mean", "sd"))]
        return tuple(n.name for n in sorted(known, key=lambda n: -n.level) if n.name not in self.surprised)

    def movement(self, node: str) -> Array:
        """Change of the mean since the observation before, rms in standard deviations of the belief, (T,)."""
        return np.sqrt(_mean_of_known(self._steps(node) ** 2))

    def rise(self, node: str) -> Array:
        """Mean change of the noise of a precision node, in sds of the belief; > 0 is more noise, (T,)."""
        if self.structure[node].kind != "precision":
            raise ResultError(f"{node!r} is not a precision node, which is what a noise is learned by")
        return -_mean_of_known(self._steps(node))

    def _steps(self, node: str) -> Array:
        mean, sd = self.result.mean(node), self.result.sd(node)
        with np.errstate(divide="ignore", invalid="ignore"):
            steps: Array = np.diff(mean, axis=0, prepend=mean[:1]) / sd
        return steps

    def attention(self, node: str) -> Array:
        """Precision that weighs the error of a node, relative to its median over the run, (T,).

        The geometric mean over channels; 2 means that an error counts twice as much as usual.
        """
        names = [link.parent for link in self.structure.links if link.kind == "weighs" and link.child == node]
        known = [self.result.traces[f"{name}.mean"].values for name in names if f"{name}.mean" in self.result.traces]
        if not known:
            raise ResultError(f"no precision of {node!r} was recorded")
        level = _mean_of_known(np.concatenate(known, -1))
        relative: Array = np.exp(np.clip(level - np.nanmedian(level), -50.0, 50.0))
        return relative

    def deviation(self, node: str) -> Array:
        """Errors of values (without motion) with their signs, in expected standard deviations, (T, channels)."""
        _ = self.surprise(node)
        error, weighted = (self.result.get(node, quantity)[:, 0] for quantity in ("error", "weighted_error"))
        deviation: Array = np.sign(error) * np.sqrt(np.maximum(error * weighted, 0.0))
        return deviation

    def share(self, node: str) -> Array:
        """Contribution of a node to the free energy at each time, (T,)."""
        return self.result.free_energy_of(node)

    def passages(self) -> list[Passage]:
        """Message sizes of every link in both directions."""
        return [Passage(link, way, self._size(link, way)) for link in self.structure.links for way in WAYS]

    def passed(self, sender: str, receiver: str, of: str | None = None) -> Array:
        """Size of the messages from one node to another at each time, (T,); of: see `Result.message`."""
        for link in self.structure.links:
            if link.of == of and {link.parent, link.child} == {sender, receiver}:
                return self._size(link, "prediction" if link.parent == sender else "error")
        raise ResultError(f"there is no link between {sender!r} and {receiver!r}" + (f" of {of!r}" if of else ""))

    def changes(self, sender: str, receiver: str, of: str | None = None) -> Array:
        """Change of the messages from one node to another since the observation before, rms, (T,)."""
        for link in self.structure.links:
            if link.of == of and {link.parent, link.child} == {sender, receiver}:
                return self._change(link, "prediction" if link.parent == sender else "error")
        raise ResultError(f"there is no link between {sender!r} and {receiver!r}" + (f" of {of!r}" if of else ""))

    def _change(self, link: LinkSummary, way: str) -> Array:
        values = self.result.traces[link.channel(way)].values
        return np.sqrt(_mean_of_known(np.diff(values, axis=0, prepend=values[:1]) ** 2))

    def _size(self, link: LinkSummary, way: str) -> Array:
        return np.sqrt(_mean_of_known(self.result.traces[link.channel(way)].values ** 2))

    def within(self, at: float | None = None, window: Sequence[float] | None = None) -> slice:
        """Slice of the recorded times: the one nearest to `at`, those in `window` = (from, to), or all."""
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
                f"nothing was recorded from {window[0]:g} to {window[1]:g}; the run lasts from {self.times[0]:g} to "
                f"{self.times[-1]:g}"
            )
        return slice(int(first), int(last))

    # --- figures -----------------------------------------------------------------------------------------------
    def plot(self, **options: Any) -> Figure:
        """Surprise map, free energy by node and graph on one page; see `results.flow_plots.overview`."""
        from pcnet.results import flow_plots

        return flow_plots.overview(self, **options)

    def map(self, **options: Any) -> Axes:
        """Node × time map of the surprise; see `results.flow_plots.surprise_map`."""
        from pcnet.results import flow_plots

        return flow_plots.surprise_map(self, **options)

    def shares(self, **options: Any) -> Axes:
        """Free energy by node; see `results.flow_plots.shares`."""
        from pcnet.results import flow_plots

        return flow_plots.shares(self, **options)

    def draw(self, **options: Any) -> Axes:
        """Graph with arrows as wide as the messages; see `results.flow_plots.message_graph`."""
        from pcnet.results import flow_plots

        return flow_plots.message_graph(self, **options)

    def animate(self, path: str | Path, **options: Any) -> Path:
        """Write the run as GIF or MP4; see `results.flow_plots.animate`."""
        from pcnet.results import flow_plots

        return flow_plots.animate(self, Path(path), **options)

    def save(self, path: str | Path, title: str | None = None, *, beside: ErrorFlow | None = None) -> Path:
        """Write an interactive HTML page that needs no network, atomically.

        Args:
            path: A file that ends in .html.
            title: Heading of the page.
            beside: Another run to compare with, of the same graph with as many observations: the page shows both, and
                their difference.
        """
        from pcnet.results.page import render

        path = Path(path)
        if beside is not None and not isinstance(beside, ErrorFlow):
            raise ResultError(f"beside= must be another error flow, result.error_flow(), not {beside!r:.60}")
        if path.suffix.lower() not in (".html", ".htm"):
            raise ResultError(
                f"the page is an HTML file: give a name that ends in .html, not {path.name!r} (use animate for an "
                "animation, result.save for the data)"
            )
        with atomic_write(path) as file:
            file.write(render(self, title, beside=beside).encode())
        return path


def _mean_of_known(values: Array) -> Array:
    """Mean of the finite numbers at each time, (T, ...) → (T,); NaN if there are none."""
    mean: Array = np.ma.masked_invalid(values.reshape(len(values), -1)).mean(1).filled(np.nan)
    return mean


def full_width(size: Array) -> float:
    """Message size that is drawn at full width: a high quantile, else the maximum, else 1."""
    finite = size[np.isfinite(size)]
    if not finite.size:
        return 1.0
    return float(np.quantile(finite, FULL_QUANTILE)) or float(finite.max()) or 1.0


def regular(times: Array) -> bool:
    """Whether records are equally spaced."""
    return np.allclose(np.diff(times), mean_step(times), rtol=1e-6, atol=0.0)


def mean_step(times: Array) -> float:
    """Mean time between records; 1 if there is only one."""
    return float((times[-1] - times[0]) / (len(times) - 1)) if len(times) > 1 and times[-1] > times[0] else 1.0
