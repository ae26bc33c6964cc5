"""Ready-made models: a graph with the schedule that fits it."""

from pcnet.graphs.adaptive_filter import adaptive_filter
from pcnet.graphs.causes import Cause
from pcnet.graphs.hierarchy import Level, hierarchy
from pcnet.graphs.odem import odem
from pcnet.graphs.sensors import Input, Sensor

__all__ = ["Cause", "Input", "Level", "Sensor", "adaptive_filter", "hierarchy", "odem"]
