"""Ready-made graphs, each with its schedule."""

from pcnet.graphs import paper

__all__ = ["paper"]
