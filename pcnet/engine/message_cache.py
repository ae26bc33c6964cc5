"""Channels between neighbours: a message is computed when somebody asks for it and kept while it is true.

It is true until a belief that it depends on changes; which beliefs those are follows from the links alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import networkx as nx
from torch import Tensor

from pcnet.model.graph import Graph
from pcnet.model.node import Link, Node, NodeContext
from pcnet.numerics.precision import Precision

Way = Literal["down", "up"]


class Channel:
    """One direction of a link: the message on it, if it is still true."""

    __slots__ = ("link", "message", "node", "sender", "way")

    def __init__(self, link: Link, way: Way, sender: NodeContext) -> None:
        self.link = link
        self.way = way
        self.node: Node = link.parent if way == "down" else link.child
        self.sender = sender
        self.message: Any = None

    def __call__(self) -> Any:
        if self.message is None:
            send = self.node.prediction if self.way == "down" else self.node.error
            self.message = send(self.sender, self.link)
        return self.message

    @property
    def name(self) -> str:
        """What a recording of this channel is called: "x to y.prediction"."""
        ends = (self.link.parent.name, self.link.child.name)
        sender, receiver = ends if self.way == "down" else reversed(ends)
        of = f" ({self.link.of.name})" if self.link.of is not None else ""
        return f"{sender} to {receiver}{of}.{'prediction' if self.way == 'down' else 'error'}"

    def content(self) -> Tensor:
        """A prediction's value (a precision by its channels), or an error's weight, as a flat tensor (B, n)."""
        message = self()
        content: Tensor | Precision = message.weighted if self.way == "up" else message.value
        return (content if isinstance(content, Tensor) else content.channel).flatten(1)


def connect(graph: Graph, locals_: Mapping[str, NodeContext]) -> list[Channel]:
    """Lay a channel for each direction of each link, and let each belief tell the messages it has a part in."""
    order = list(nx.topological_sort(graph.network))
    sides = {name: (graph.above(node), graph.below(node)) for name, node in graph.nodes.items()}
    # the beliefs that a prediction depends on are those of its sender and above; an error also depends on those below
    down: dict[Link, frozenset[str]] = {}
    up: dict[Link, frozenset[str]] = {}
    for name in order:
        above, below = sides[name]
        down |= dict.fromkeys(below, frozenset({name}).union(*(down[link] for link in above)))
    for name in reversed(order):
        above, below = sides[name]
        sources = frozenset({name}).union(*(down[link] for link in above), *(up[link] for link in below))
        up |= dict.fromkeys(above, sources)

    downward = {link: Channel(link, "down", locals_[link.parent.name]) for link in graph.links}
    upward = {link: Channel(link, "up", locals_[link.child.name]) for link in graph.links}
    for name, local in locals_.items():
        local.above, local.below = sides[name]
        inbox = {link: downward[link] for link in local.above} | {link: upward[link] for link in local.below}
        touched = [downward[link] for link, sources in down.items() if name in sources]
        touched += [upward[link] for link, sources in up.items() if name in sources]
        local.attach(inbox, _forgetter(touched))
    return [*downward.values(), *upward.values()]


def _forgetter(channels: list[Channel]) -> Callable[[], None]:
    def forget() -> None:
        for channel in channels:
            channel.message = None

    return forget
