"""A position whose velocity a level above predicts, and observations of it."""

import math

import numpy as np

import pcnet as pc
from pcnet.model.schedule import LevelNodes, adaptive_filtering
from pcnet.nodes import CategoricalNode, KalmanStateNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.numerics.estimators import Newton
from pcnet.numerics.kernels import White
from support.kalman import DT

CRUISE = pc.TracedFunction(lambda x, theta: theta + 0.0 * x)
"""x' = θ."""


OBSERVATIONS = np.cumsum(np.random.default_rng(11).standard_normal((40, 1)), 0) * 0.1


VALUES, STAY = [[-0.2], [0.0], [0.15]], 0.85


def switching(every: int, freedom: float = 1e-6, estimator: Newton | None = None) -> tuple[pc.Graph, pc.Schedule]:
    x = KalmanStateNode("x", dim=1, flow=CRUISE, initial_mean=[0.0], initial_sd=0.5, learn_noise=False)
    y = SensoryNode("y", dim=1, orders=1, dt=DT)
    a = ParameterNode("a", mean=[0.0], sd=freedom, estimator=estimator)
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.parametrises(a, x)
    graph.predicts(CategoricalNode("which", values=VALUES, stay=STAY), a)
    graph.weighs(PrecisionNode("noise_x", mean=math.log(4.0), sd=1.0, kernel=White()), x)
    graph.weighs(PrecisionNode("noise_y", mean=1.0, sd=1.0, kernel=White()), y)
    return graph, adaptive_filtering(every, levels=(LevelNodes(("x",), (), ("a",)), LevelNodes(("which",), (), ())))
