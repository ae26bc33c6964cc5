"""Interactive page of an error flow as one HTML file.

The page's own code is in the files beside this one; cytoscape.js draws the graph (see cytoscape.LICENSE).
"""

import base64
import hashlib
import html
import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import numpy as np

from pcnet.errors import ResultError
from pcnet.results.downsample import Array, ranges
from pcnet.results.error_flow import MAX_MOVEMENT, MAX_SURPRISE, ErrorFlow, full_width, mean_step, regular
from pcnet.results.graph_summary import LinkSummary
from pcnet.results.result import Trace, package_version

BYTES = 4_000_000
"""Approximate limit for the size of a page's numbers; longer runs are downsampled to the range of each bin."""
CHANNELS = 6  # at most this many channels of a node are shown, as in `results.plots`
SCRIPTS = ("cytoscape.min.js", "flow.js", "chart.js", "graph.js", "page.js")
WITHOUT_SHARE = {
    "state": "It has no share of its own: the predictive likelihoods of the nodes below contain it.",
    "categorical": "It has no share of its own: that of the parameters below contains it.",
    "parameter": "It has no share of its own: it is part of the belief of the state below.",
    "precision": "It has no share of its own: it is learned along with the state, whose likelihoods contain it.",
    "input": "It has no share of its own: it is known.",
}
"""Why a node may have no share of the free energy, by its kind."""
PANELS = {"state": "belief", "cause": "belief", "parameter": "parameter", "precision": "log-precision"}


def render(flow: ErrorFlow, title: str | None = None, *, beside: ErrorFlow | None = None, live: bool = False) -> str:
    """The page as text; beside: a run to compare with. A live page polls its server for `flow.json`."""
    heading = title or f"Error flow of {flow.result.observations:,} observations"
    scripts = [_file(name) for name in SCRIPTS]
    hashes = " ".join(f"'sha256-{_base64(hashlib.sha256(script.encode()).digest())}'" for script in scripts)
    connect = "'self'" if live else "'none'"
    parts = {
        "policy": f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'",
        "title": html.escape(heading),
        "style": _file("page.css"),
        "data": in_script(payload(flow, heading, beside=beside, live=live)),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    # a single pass, so that placeholders within inserted text are not replaced
    pieces = _file("page.html").split("@@")
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def in_script(data: Any) -> str:
    """JSON text that cannot close the script element that contains it, whatever the names are."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def payload(
    flow: ErrorFlow, title: str, *, beside: ErrorFlow | None = None, live: bool = False, expected: int | None = None
) -> dict[str, Any]:
    """Data of the page: nodes and links with indices of their series, and all series as one block of numbers.

    beside: a run to compare with, whose numbers are added in the same order. expected: number of observations that a
    running stream will have, if it is known.
    """
    runs = 1 if beside is None else 2
    series = _Series(flow, runs, orders=None)
    if series.bin_size > 1:  # drop the higher orders before the resolution
        series = _Series(flow, runs, orders=1)
    other = None
    if beside is not None:
        if beside.structure != flow.structure or len(beside.times) != len(flow.times):
            raise ResultError(
                "runs that are compared must have the same graph and the same number of recorded observations; these "
                f"have {len(flow.structure.nodes)} and {len(beside.structure.nodes)} nodes, {len(flow.times)} and "
                f"{len(beside.times)} observations"
            )
        other = _base64(_Series(beside, runs, orders=series.orders).block().tobytes())
    times = flow.times
    return {
        "title": title,
        "version": package_version(),
        "schedule": flow.result.schedule.splitlines()[0],
        "observations": flow.result.observations,
        "live": live,
        "expected": expected,
        "beside": other,
        "ticks": len(times),
        "start": float(times[0]),
        "step": mean_step(times),
        "times": None if regular(times) else _base64(times.astype("<f8").tobytes()),
        "bin_size": series.bin_size,
        "max_surprise": MAX_SURPRISE,
        "max_movement": MAX_MOVEMENT,
        "energy": series.energy,
        "nodes": series.nodes,
        "links": series.links,
        "numbers": _base64(series.block().tobytes()),
    }


class _Series:
    """All series of a page, numbered in the order of their creation and downsampled by one common bin size."""

    def __init__(self, flow: ErrorFlow, runs: int, orders: int | None) -> None:
        self.flow = flow
        self.orders = orders
        self._rows: list[Array] = []
        nodes, links = flow.structure.nodes, flow.structure.links
        self.energy = self._add(np.sum([flow.share(node.name) for node in nodes], 0))
        self.nodes = [self._node(node.name) for node in nodes]
        self.links = [self._link(link) for link in links]
        for kind in {link.kind for link in links}:  # arrows of one kind of message have a common scale
            alike = [link for link in self.links if link["kind"] == kind]
            for way in ("down", "up"):
                full = max(full_width(self._rows[link[way]]) for link in alike)
                for link in alike:
                    link[f"full_{way}"] = full
        self.bin_size = _bin_size(runs * len(self._rows), len(flow.times))

    def _add(self, values: Array) -> int:
        self._rows.append(values)
        return len(self._rows) - 1

    def _node(self, name: str) -> dict[str, Any]:
        flow, about = self.flow, self.flow.structure[name]
        made: dict[str, Any] = {**about._asdict(), **flow.structure.layout[name]._asdict()}
        made |= dict.fromkeys(("surprise", "movement", "rise", "attention", "why"))
        made["deviations"] = []
        if name in flow.surprised:
            made["surprise"] = self._add(flow.surprise(name))
            if about.role == "sensory":
                found = flow.deviation(name)
                made["deviations"] = [self._add(found[:, i]) for i in range(min(found.shape[1], CHANNELS))]
        elif name in flow.moving:
            made["movement"] = self._add(flow.movement(name))
        if about.kind == "precision" and name in flow.moving:
            made["rise"] = self._add(flow.rise(name))
        weighing = [link.parent for link in flow.structure.links if link.kind == "weighs" and link.child == name]
        if any(parent in flow.moving for parent in weighing):
            made["attention"] = self._add(flow.attention(name))
        share = flow.share(name)
        made["share"] = self._add(share)  # also if it is zero: series of a live page must not change their places
        if not np.any(share):
            made["why"] = WITHOUT_SHARE.get(about.kind, WITHOUT_SHARE["state"])
        made["panels"] = list(self._panels(name))
        return made

    def _panels(self, name: str) -> Iterator[dict[str, Any]]:
        """Charts of a node, one per order: mean and sd, or observation and prediction."""
        traces, kind = self.flow.result.traces, self.flow.structure[name].kind
        if f"{name}.mean" in traces:
            title, keys = PANELS.get(kind, "belief"), {"mean": "mean", "sd": "sd"}
        elif f"{name}.observation" in traces:
            title = "observed and predicted" if f"{name}.prediction" in traces else "observed"
            keys = {"dots": "observation", "mean": "prediction"}
        else:
            return
        found = {key: dict(self._by_order(traces.get(f"{name}.{quantity}"))) for key, quantity in keys.items()}
        for order, values in next(iter(found.values())).items():
            lines = [
                {key: self._add(by_order[order][:, i]) if by_order else None for key, by_order in found.items()}
                for i in range(min(values.shape[1], CHANNELS))
            ]
            label = title if order == 0 else f"{title}, derivative {order}"
            yield {"title": label, "of": values.shape[1], "lines": lines}

    def _by_order(self, trace: Trace | None) -> Iterator[tuple[int, Array]]:
        """Values (T, channels) of each order; a quantity without orders has order 0 only."""
        if trace is None:
            return
        if len(trace.dims) == 1:
            yield 0, trace.values
            return
        for order in range(trace.values.shape[1])[: self.orders]:
            yield order, trace.values[:, order]

    def _link(self, link: LinkSummary) -> dict[str, Any]:
        """A link with the changes of its predictions and the sizes of its errors."""
        down = self.flow.changes(link.parent, link.child, link.of)
        up = self.flow.passed(link.child, link.parent, link.of)
        return {**link._asdict(), "down": self._add(down), "up": self._add(up)}

    def block(self) -> Array:
        """(series, frames) in single precision; if downsampled (series, 2, frames), minimum and maximum."""
        if self.bin_size == 1:
            return np.stack(self._rows).astype("<f4")
        return np.stack([np.stack(ranges(row, self.bin_size)) for row in self._rows]).astype("<f4")


def _bin_size(series: int, ticks: int) -> int:
    """Number of observations per frame that keeps the page within BYTES."""
    numbers = BYTES * 3 // 4 // 4  # four bytes per number; base64 turns three bytes into four
    if series * ticks <= numbers:
        return 1
    frames = max(numbers // (2 * series), 1)
    return -(-ticks // frames)


def _file(name: str) -> str:
    return files("pcnet.results.page").joinpath(name).read_text(encoding="utf-8")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
