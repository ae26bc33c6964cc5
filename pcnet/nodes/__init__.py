"""The kinds of node, one a file."""

from pcnet.nodes.categorical import CategoricalNode
from pcnet.nodes.cause import CauseNode
from pcnet.nodes.families import BinomialNode, ChoiceNode, PoissonNode, StudentTNode
from pcnet.nodes.gaussian_sum_state import GaussianSumStateNode
from pcnet.nodes.generalised_state import GeneralisedStateNode
from pcnet.nodes.input import InputNode
from pcnet.nodes.kalman_cause import KalmanCauseNode
from pcnet.nodes.kalman_state import KalmanStateNode
from pcnet.nodes.likelihood import LikelihoodNode
from pcnet.nodes.parameter import ParameterNode
from pcnet.nodes.precision import PrecisionNode
from pcnet.nodes.sensory import SensoryNode
from pcnet.nodes.switching_state import SwitchingStateNode

__all__ = [
    "BinomialNode",
    "CategoricalNode",
    "CauseNode",
    "ChoiceNode",
    "GaussianSumStateNode",
    "GeneralisedStateNode",
    "InputNode",
    "KalmanCauseNode",
    "KalmanStateNode",
    "LikelihoodNode",
    "ParameterNode",
    "PoissonNode",
    "PrecisionNode",
    "SensoryNode",
    "StudentTNode",
    "SwitchingStateNode",
]
