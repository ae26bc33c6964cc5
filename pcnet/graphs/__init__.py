"""Ready-made models: a graph with the schedule that fits it."""

from pcnet.graphs.adaptive_filter import adaptive_filter
from pcnet.graphs.hierarchy import Level, hierarchy
from pcnet.graphs.odem import odem

__all__ = ["Level", "adaptive_filter", "hierarchy", "odem"]
