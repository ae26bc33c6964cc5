"""pcnet: message-passing predictive coding in generalised coordinates of motion."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pcnet import errors, graphs, nodes
from pcnet.engine.inputs import Sample
from pcnet.functions import systems
from pcnet.functions.network import Network
from pcnet.functions.registry import register
from pcnet.functions.traced import TracedFunction
from pcnet.model.graph import Graph
from pcnet.model.hypotheses import Hypotheses
from pcnet.model.model import Model
from pcnet.model.schedule import (
    Act,
    Every,
    Schedule,
    act,
    adaptive_filtering,
    batch,
    generalised_filtering,
    odem,
    states_only,
)
from pcnet.nodes import (
    BinomialNode,
    CategoricalNode,
    CauseNode,
    ChoiceNode,
    GeneralisedStateNode,
    InputNode,
    KalmanCauseNode,
    KalmanStateNode,
    LikelihoodNode,
    ParameterNode,
    PoissonNode,
    PrecisionNode,
    SensoryNode,
    StudentTNode,
    SwitchingStateNode,
)
from pcnet.numerics import estimators, integrators, kernels
from pcnet.numerics.dwell_time import DwellTime
from pcnet.results.recorder import Record
from pcnet.results.result import Result

if TYPE_CHECKING:
    from pcnet import simulate
    from pcnet.engine.checkpoint import resume
    from pcnet.engine.fit import Fit
    from pcnet.io.model_files import load_model, save_model
    from pcnet.sweeps.study import Study
    from pcnet.sweeps.sweep import sweep

__all__ = [
    "Act",
    "BinomialNode",
    "CategoricalNode",
    "CauseNode",
    "ChoiceNode",
    "DwellTime",
    "Every",
    "Fit",
    "GeneralisedStateNode",
    "Graph",
    "Hypotheses",
    "InputNode",
    "KalmanCauseNode",
    "KalmanStateNode",
    "LikelihoodNode",
    "Model",
    "Network",
    "ParameterNode",
    "PoissonNode",
    "PrecisionNode",
    "Record",
    "Result",
    "Sample",
    "Schedule",
    "SensoryNode",
    "StudentTNode",
    "Study",
    "SwitchingStateNode",
    "TracedFunction",
    "act",
    "adaptive_filtering",
    "batch",
    "errors",
    "estimators",
    "generalised_filtering",
    "graphs",
    "integrators",
    "kernels",
    "load_model",
    "nodes",
    "odem",
    "register",
    "resume",
    "save_model",
    "simulate",
    "states_only",
    "sweep",
    "systems",
]

_ON_FIRST_USE = {
    "Fit": "pcnet.engine.fit",
    "Study": "pcnet.sweeps.study",
    "load_model": "pcnet.io.model_files",
    "resume": "pcnet.engine.checkpoint",
    "save_model": "pcnet.io.model_files",
    "sweep": "pcnet.sweeps.sweep",
}
"""Names that are imported at their first use, by module: `import pcnet` is faster without them."""


def __getattr__(name: str) -> Any:
    if name == "simulate":
        return import_module("pcnet.simulate")
    if name not in _ON_FIRST_USE:
        raise _unknown(name)
    found = globals()[name] = getattr(import_module(_ON_FIRST_USE[name]), name)
    return found


def _unknown(name: str) -> AttributeError:
    """The error about a name that pcnet does not have, with where it is."""
    text = f"module 'pcnet' has no attribute {name!r}"
    if name.startswith("_"):
        return AttributeError(text)
    for room in ("graphs", "systems", "simulate", "errors", "nodes"):
        if hasattr(import_module(f"pcnet.functions.{room}" if room == "systems" else f"pcnet.{room}"), name):
            return AttributeError(f"{text}; use pcnet.{room}.{name}")
    if name.lower() in _KALMAN_FILTERS:
        return AttributeError(f"{text}; use pcnet.graphs.adaptive_filter(flow, dim, dt)")
    if name in _OF_A_MODEL:
        return AttributeError(
            f"{text}; make a model, such as pcnet.graphs.adaptive_filter(flow, dim, dt), and {_OF_A_MODEL[name]}"
        )
    return AttributeError(f"{text}; {errors.suggestion(name, __all__)}")


_KALMAN_FILTERS = ("kalmanfilter", "kalman", "ekf", "ukf", "adaptivefilter", "filter", "extendedkalmanfilter")
_OF_A_MODEL = {
    "run": "call model.run(observations)",
    "fit": "call model.fit(observations)",
    "start": "call model.start()",
    "plot": "call model.run(observations).plot()",
    "load": "read what was saved by pcnet.load_model(path), pcnet.Result.load(path) or pcnet.resume(path, model)",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
