"""The node kinds that come along, one a file."""

from pcnet.nodes.categorical import CategoricalNode
from pcnet.nodes.cause import CauseNode
from pcnet.nodes.filter import FilterNode
from pcnet.nodes.input import InputNode
from pcnet.nodes.parameter import ParameterNode
from pcnet.nodes.precision import PrecisionNode
from pcnet.nodes.sensory import SensoryNode
from pcnet.nodes.state import StateNode

__all__ = [
    "CategoricalNode",
    "CauseNode",
    "FilterNode",
    "InputNode",
    "ParameterNode",
    "PrecisionNode",
    "SensoryNode",
    "StateNode",
]
