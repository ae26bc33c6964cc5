"""pcnet: message-passing predictive coding in generalised coordinates of motion."""

from pcnet import errors, flows, graphs, kernels, movers, nodes, simulate
from pcnet.checkpoint import resume
from pcnet.derived import Derived
from pcnet.graph import Graph
from pcnet.networks import Network
from pcnet.nodes import CauseNode, InputNode, ParameterNode, PrecisionNode, SensoryNode, StateNode
from pcnet.observations import Sample
from pcnet.record import Record
from pcnet.result import Result
from pcnet.schedule import Act, Clock, Schedule, act, generalised_filtering, odem, states_only
from pcnet.study import Study
from pcnet.sweeps import sweep

__all__ = [
    "Act",
    "CauseNode",
    "Clock",
    "Derived",
    "Graph",
    "InputNode",
    "Network",
    "ParameterNode",
    "PrecisionNode",
    "Record",
    "Result",
    "Sample",
    "Schedule",
    "SensoryNode",
    "StateNode",
    "Study",
    "act",
    "errors",
    "flows",
    "generalised_filtering",
    "graphs",
    "kernels",
    "movers",
    "nodes",
    "odem",
    "resume",
    "simulate",
    "states_only",
    "sweep",
]
