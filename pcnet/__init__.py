"""pcnet: message-passing predictive coding in generalised coordinates of motion."""

from pcnet import errors, flows, graphs, kernels, movers, nodes, simulate
from pcnet.checkpoint import resume
from pcnet.derived import Derived
from pcnet.dwelling import Dwelling
from pcnet.fitting import Fit
from pcnet.graph import Graph
from pcnet.networks import Network
from pcnet.nodes import (
    CategoricalNode,
    CauseNode,
    FilterNode,
    InputNode,
    ParameterNode,
    PrecisionNode,
    SensoryNode,
    StateNode,
)
from pcnet.observations import Sample
from pcnet.record import Record
from pcnet.registry import register
from pcnet.result import Result
from pcnet.schedule import Act, Clock, Schedule, act, generalised_filtering, odem, offline, states_only, tracking
from pcnet.specification import load_model, save_model
from pcnet.study import Study
from pcnet.sweeps import sweep

__all__ = [
    "Act",
    "CategoricalNode",
    "CauseNode",
    "Clock",
    "Derived",
    "Dwelling",
    "FilterNode",
    "Fit",
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
    "load_model",
    "movers",
    "nodes",
    "odem",
    "offline",
    "register",
    "resume",
    "save_model",
    "simulate",
    "states_only",
    "sweep",
    "tracking",
]
