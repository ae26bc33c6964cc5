"""The node kinds that come along, one a file."""

from pcnet.nodes.parameter import ParameterNode
from pcnet.nodes.precision import PrecisionNode
from pcnet.nodes.sensory import SensoryNode
from pcnet.nodes.state import StateNode

__all__ = ["ParameterNode", "PrecisionNode", "SensoryNode", "StateNode"]
