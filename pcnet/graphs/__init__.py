"""Ready-made graphs, each with its schedule."""

from pcnet.graphs import paper
from pcnet.graphs.hierarchy import Tier, hierarchy
from pcnet.graphs.triple import triple

__all__ = ["Tier", "hierarchy", "paper", "triple"]
