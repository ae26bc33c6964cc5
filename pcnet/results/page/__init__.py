"""The interactive page of an error flow: one HTML file with everything in it.

The page's own code is in the files beside this one; cytoscape.js draws the graph (see cytoscape.LICENSE).
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pcnet.results.downsample import ranges
from pcnet.results.error_flow import ErrorFlow, full_width, typical_step
from pcnet.results.result import package_version

Array = NDArray[Any]

BYTES = 4_000_000
"""The numbers of a page take at most about so much; longer runs are thinned to the extremes of stretches of time."""
CHANNELS = 6
"""So many channels of a node are shown, as in `pcnet.plotting`."""
LOUD = 4.0
"""The surprise from which on all look alike."""
SCRIPTS = ("cytoscape.min.js", "flow.js", "chart.js", "graph.js", "page.js")
PANELS = {"state": "belief", "cause": "belief", "parameter": "parameter", "precision": "log-precision"}


def render(flow: ErrorFlow, title: str | None = None, *, live: bool = False) -> str:
    """The page as text. A live page asks its server for `flow.json` again and again."""
    heading = title or f"Error flow of {flow.result.observations:,} observations"
    scripts = [_part(name) for name in SCRIPTS]
    trusted = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    reach = "'self'" if live else "'none'"
    policy = (
        f"default-src 'none'; script-src {trusted}; style-src 'unsafe-inline'; img-src data:; connect-src {reach}; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": policy,
        "title": html.escape(heading),
        "style": _part("page.css"),
        "data": in_script(payload(flow, heading, live=live)),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    page = _part("page.html")
    # one pass, so that nothing in a part is taken for a mark
    pieces = page.split("@@")
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def in_script(data: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever the names are."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def payload(flow: ErrorFlow, title: str, *, live: bool = False) -> dict[str, Any]:
    """All that the page shows: the structure with indices into series, and the series as one block of numbers."""
    every_order = _Series(flow, orders=None)
    series = every_order if every_order.stretch == 1 else _Series(flow, orders=1)
    times, step = flow.times, typical_step(flow.times)
    even = np.allclose(np.diff(times), step, rtol=1e-6, atol=0.0)
    return {
        "title": title,
        "version": package_version(),
        "schedule": flow.result.schedule.splitlines()[0],
        "observations": flow.result.observations,
        "live": live,
        "ticks": len(times),
        "start": float(times[0]),
        "step": step,
        "times": None if even else base64.b64encode(times.astype("<f8").tobytes()).decode("ascii"),
        "stretch": series.stretch,
        "loud": LOUD,
        "energy": series.energy,
        "nodes": series.nodes,
        "links": series.links,
        "numbers": base64.b64encode(series.block().tobytes()).decode("ascii"),
    }


class _Series:
    """The series of a page, numbered in the order in which they come, thinned alike to what the page may take."""

    def __init__(self, flow: ErrorFlow, orders: int | None) -> None:
        self.flow = flow
        self._orders = orders
        self._rows: list[Array] = []
        self.energy = self._number(np.sum([flow.share(node.name) for node in flow.structure.nodes], 0))
        self.nodes = [self._node(name) for name in (node.name for node in flow.structure.nodes)]
        self.links = [self._link(down, up) for down, up in self._pairs()]
        self.stretch = _stretch(len(self._rows), len(flow.times))

    def _number(self, values: Array) -> int:
        self._rows.append(values)
        return len(self._rows) - 1

    def _node(self, name: str) -> dict[str, Any]:
        flow, node = self.flow, self.flow.structure[name]
        place = flow.structure.layout[name]
        return {
            **node._asdict(),
            "column": place.column,
            "row": place.row,
            "surprise": self._number(flow.surprise(name)) if name in flow.surprised else None,
            "share": self._number(flow.share(name)),
            "panels": list(self._panels(name)),
        }

    def _panels(self, name: str) -> Iterator[dict[str, Any]]:
        """Charts of a node: each with lines of a mean and its sd, or of a prediction and what was observed."""
        traces, kind = self.flow.result.traces, self.flow.structure[name].kind
        if f"{name}.mean" in traces:
            mean, sd = traces[f"{name}.mean"], traces.get(f"{name}.sd")
            for order, values in self._by_order(mean.values, mean.dims):
                bands = None if sd is None else dict(self._by_order(sd.values, sd.dims))[order]
                lines = [
                    {"mean": self._number(values[:, i]), "sd": None if bands is None else self._number(bands[:, i])}
                    for i in range(min(values.shape[1], CHANNELS))
                ]
                yield {"title": _ordered(PANELS.get(kind, "belief"), order), "of": values.shape[1], "lines": lines}
        elif f"{name}.observation" in traces:
            seen, told = traces[f"{name}.observation"], traces.get(f"{name}.prediction")
            for order, values in self._by_order(seen.values, seen.dims):
                foretold = None if told is None else dict(self._by_order(told.values, told.dims))[order]
                lines = [
                    {
                        "dots": self._number(values[:, i]),
                        "mean": None if foretold is None else self._number(foretold[:, i]),
                    }
                    for i in range(min(values.shape[1], CHANNELS))
                ]
                title = "observed" if told is None else "observed and predicted"
                yield {"title": _ordered(title, order), "of": values.shape[1], "lines": lines}

    def _by_order(self, values: Array, dims: tuple[str, ...]) -> Iterator[tuple[int, Array]]:
        """(T, channels) of each order, where there are orders."""
        if len(dims) == 1:
            yield 0, values
            return
        for order in range(values.shape[1] if self._orders is None else min(self._orders, values.shape[1])):
            yield order, values[:, order]

    def _pairs(self) -> list[tuple[Any, Any]]:
        passages = self.flow.passages()
        return list(zip(passages[::2], passages[1::2], strict=True))

    def _link(self, down: Any, up: Any) -> dict[str, Any]:
        return {
            **down.link._asdict(),
            "down": self._number(down.size),
            "up": self._number(up.size),
            "full_down": full_width(down.size),
            "full_up": full_width(up.size),
        }

    def block(self) -> Array:
        """(series, frames) in single precision; with thinning (series, 2, frames), the least and the greatest."""
        if self.stretch == 1:
            return np.stack(self._rows).astype("<f4")
        return np.stack([np.stack(ranges(row, self.stretch)) for row in self._rows]).astype("<f4")


def _stretch(series: int, ticks: int) -> int:
    """How many observations to put together so that the page stays small."""
    room = BYTES * 3 // 4 // 4  # four bytes a number, and base64 takes four for three
    if series * ticks <= room:
        return 1
    frames = max(room // (2 * series), 1)
    return -(-ticks // frames)


def _ordered(title: str, order: int) -> str:
    return title if order == 0 else f"{title}, derivative {order}"


def _part(name: str) -> str:
    return files("pcnet.results.page").joinpath(name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
