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

from pcnet.results.downsample import Array, ranges
from pcnet.results.error_flow import MAX_SURPRISE, ErrorFlow, full_width, mean_step, regular
from pcnet.results.result import Trace, package_version

BYTES = 4_000_000
"""Approximate limit for the size of a page's numbers; longer runs are downsampled to the range of each bin."""
CHANNELS = 6  # at most this many channels of a node are shown, as in `results.plots`
SCRIPTS = ("cytoscape.min.js", "flow.js", "chart.js", "graph.js", "page.js")
PANELS = {"state": "belief", "cause": "belief", "parameter": "parameter", "precision": "log-precision"}


def render(flow: ErrorFlow, title: str | None = None, *, live: bool = False) -> str:
    """The page as text; a live page polls its server for `flow.json`."""
    heading = title or f"Error flow of {flow.result.observations:,} observations"
    scripts = [_file(name) for name in SCRIPTS]
    hashes = " ".join(f"'sha256-{_base64(hashlib.sha256(script.encode()).digest())}'" for script in scripts)
    connect = "'self'" if live else "'none'"
    parts = {
        "policy": f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'",
        "title": html.escape(heading),
        "style": _file("page.css"),
        "data": in_script(payload(flow, heading, live=live)),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    # a single pass, so that placeholders within inserted text are not replaced
    pieces = _file("page.html").split("@@")
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def in_script(data: Any) -> str:
    """JSON text that cannot close the script element that contains it, whatever the names are."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def payload(flow: ErrorFlow, title: str, *, live: bool = False) -> dict[str, Any]:
    """Data of the page: nodes and links with indices of their series, and all series as one block of numbers."""
    series = _Series(flow, orders=None)
    if series.bin_size > 1:  # drop the higher orders before the resolution
        series = _Series(flow, orders=1)
    times = flow.times
    return {
        "title": title,
        "version": package_version(),
        "schedule": flow.result.schedule.splitlines()[0],
        "observations": flow.result.observations,
        "live": live,
        "ticks": len(times),
        "start": float(times[0]),
        "step": mean_step(times),
        "times": None if regular(times) else _base64(times.astype("<f8").tobytes()),
        "bin_size": series.bin_size,
        "max_surprise": MAX_SURPRISE,
        "energy": series.energy,
        "nodes": series.nodes,
        "links": series.links,
        "numbers": _base64(series.block().tobytes()),
    }


class _Series:
    """All series of a page, numbered in the order of their creation and downsampled by one common bin size."""

    def __init__(self, flow: ErrorFlow, orders: int | None) -> None:
        self.flow = flow
        self._orders = orders
        self._rows: list[Array] = []
        nodes, passages = flow.structure.nodes, flow.passages()
        self.energy = self._add(np.sum([flow.share(node.name) for node in nodes], 0))
        self.nodes = [self._node(node.name) for node in nodes]
        self.links = [self._link(down, up) for down, up in zip(passages[::2], passages[1::2], strict=True)]
        self.bin_size = _bin_size(len(self._rows), len(flow.times))

    def _add(self, values: Array) -> int:
        self._rows.append(values)
        return len(self._rows) - 1

    def _node(self, name: str) -> dict[str, Any]:
        flow = self.flow
        return {
            **flow.structure[name]._asdict(),
            **flow.structure.layout[name]._asdict(),
            "surprise": self._add(flow.surprise(name)) if name in flow.surprised else None,
            "share": self._add(flow.share(name)),
            "panels": list(self._panels(name)),
        }

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
        for order in range(trace.values.shape[1])[: self._orders]:
            yield order, trace.values[:, order]

    def _link(self, down: Any, up: Any) -> dict[str, Any]:
        return {
            **down.link._asdict(),
            "down": self._add(down.size),
            "up": self._add(up.size),
            "full_down": full_width(down.size),
            "full_up": full_width(up.size),
        }

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
