"""Models of every kind with a short stream of observations, for tests that must hold for all of them."""

import math

import numpy as np
import torch

import pcnet as pc
from pcnet.graphs import Level, hierarchy, odem
from pcnet.model.schedule import LevelNodes, adaptive_filtering
from pcnet.nodes import (
    BinomialNode,
    CategoricalNode,
    CauseNode,
    ChoiceNode,
    GaussianSumStateNode,
    GeneralisedStateNode,
    InputNode,
    KalmanCauseNode,
    KalmanStateNode,
    ParameterNode,
    PoissonNode,
    PrecisionNode,
    SensoryNode,
    StudentTNode,
    SwitchingStateNode,
)
from pcnet.numerics.dwell_time import DwellTime
from pcnet.numerics.estimators import Newton, NoiseScoring
from pcnet.numerics.integrators import ImplicitEuler
from pcnet.numerics.kernels import Matern, White
from support.filters import single_filter
from support.models import build

TICKS = 14


def of_paper(**options):
    graph, schedule = odem(every=3, **options)
    y = 1 + 0.1 * np.random.default_rng(0).normal(size=(TICKS, 3))
    return graph, schedule, [y[k] for k in range(TICKS)], None


def nonlinear(**options):
    model = build(samples=TICKS, dims=(3, 3), orders=(3, 2), channels=(2, 1), **options)
    stream = [{name: y[k] for name, y in model.observations.items()} for k in range(TICKS)]
    return model.graph, pc.odem(every=3), stream, None


def stack():
    x = GeneralisedStateNode("x", dim=2, orders=3, flow=turn, integrator=ImplicitEuler(0.1))
    v = CauseNode("v", dim=1, orders=2, integrator=ImplicitEuler(0.1))
    theta = ParameterNode("theta", mean=[0.4], sd=0.3, estimator=Newton(forgetting_factor=0.1))
    y = SensoryNode("y", dim=2, orders=2, dt=0.1, derivatives="fit", window=4)
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.drives(v, x)
    graph.parametrises(theta, x)
    graph.predicts(InputNode("u", dim=1, orders=2, dt=0.1), v)
    for name in ("x", "y", "v"):
        graph.weighs(PrecisionNode(f"n{name}", prior_precision=5.0, sd=0.2, correlation_time=0.3), graph[name])
    draw = np.random.default_rng(1)
    stream = [{"y": draw.normal(size=2), "u": draw.normal(size=1)} for _ in range(TICKS)]
    stream[5]["y"][0] = math.nan
    del stream[9]["u"]
    return graph, pc.generalised_filtering(), stream, np.cumsum(draw.uniform(0.05, 0.3, size=TICKS)).tolist()


def turn(x, v, theta):
    return torch.stack([x[..., 1] + v[..., 0], -theta[..., 0] * torch.sin(x[..., 0])], -1)


def with_gaps(**options):
    graph, schedule, stream, _ = of_paper(**options)
    for k in (0, 3, 4, 5, 9):
        stream[k] = stream[k].copy()
        stream[k][k % 3] = math.nan
    stream[7] = None
    return graph, schedule, stream, None


def with_trouble(policy):
    graph, schedule, stream, _ = of_paper(kappa=[1.0, 0.5])
    stream[6] = np.full((2, 3), 1.0)
    stream[6][1] = 1e300
    return graph, schedule, stream, None, policy


def of_adaptive_filter(**options):
    graph, schedule = single_filter(
        pc.systems.lotka_volterra, 3, 0.01, parameter_mean=[0.3, -0.2, 0.3], parameter_sd=0.25, **options
    )
    _, _, stream, _ = with_gaps()
    return graph, schedule, stream, None


def of_levels():
    """Two levels, of which the upper one acts within the few observations."""
    above = Level(lambda x, theta: -0.01 * x, 1, process_noise_sd=0.1, initial_mean=[1.0])
    graph, schedule = hierarchy(
        Level(SPRING, 2, parameter_mean=[1.0], parameter_sd=0.01, learn_noise=True), above, dt=0.05, every=3
    )
    stream = [row[:2] for row in of_paper()[2]]
    stream[6] = None
    return graph, schedule, stream, None


def of_categories():
    x, y = KalmanStateNode("x", dim=2, flow=SPRING), SensoryNode("y", dim=2, orders=1, dt=0.05)
    theta = ParameterNode("theta", mean=[1.0], sd=0.05, estimator=Newton())
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.parametrises(theta, x)
    graph.predicts(CategoricalNode("recorded", values=[[0.5], [1.5]], stay=0.9), theta)  # checkpoints use this word too
    graph.weighs(
        PrecisionNode("nx", prior_precision=100.0, sd=0.5, kernel=White(), estimator=NoiseScoring(max_step=0.5)), x
    )
    graph.weighs(PrecisionNode("ny", prior_precision=100.0, sd=0.5, kernel=Matern(0.1, 0.5), estimator=Newton()), y)
    levels = (LevelNodes(("x",), ("nx", "ny"), ("theta",)), LevelNodes(("recorded",), (), ()))
    return (
        graph,
        adaptive_filtering(3, levels=levels),
        of_levels()[2],
        np.cumsum(np.linspace(0.02, 0.1, TICKS)).tolist(),
    )


def of_switching():
    """A spring that is pushed now and then."""
    pushed = pc.systems.linear([[0.0, 1.0], [-1.0, -0.1]], causes=[[0.0], [1.0]])
    x = SwitchingStateNode("x", dim=2, flow=pushed)
    y = SensoryNode("y", dim=2, orders=1, dt=0.05, outliers=0.05)
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.drives(CategoricalNode("push", values=[[0.0], [2.0]], dwell=DwellTime(mean=6.0, sd=3.0)), x)
    graph.weighs(PrecisionNode("nx", prior_precision=100.0, sd=0.5, kernel=Matern(0.1, 0.5)), x)
    graph.weighs(PrecisionNode("ny", prior_precision=100.0, sd=0.5, kernel=White()), y)
    return graph, adaptive_filtering(), of_levels()[2], np.cumsum(np.linspace(0.02, 0.1, TICKS)).tolist()


WELLS = pc.TracedFunction(lambda x, _: torch.stack([x[..., 1], x[..., 0] - x[..., 0] ** 3], -1))
SQUARE = pc.TracedFunction(lambda x, _: x[..., :1] ** 2)


def of_several_peaks(flow=WELLS, mapping=SQUARE):
    """An oscillator between two wells, of which the square of the position is seen."""
    x = GaussianSumStateNode("x", dim=2, flow=flow, peaks=3)
    graph, y = pc.Graph(), SensoryNode("y", dim=1, orders=1, dt=0.05, outliers=0.05)
    graph.predicts(x, y, via=mapping)
    graph.weighs(PrecisionNode("nx", prior_precision=100.0, sd=0.5, kernel=White()), x)
    graph.weighs(PrecisionNode("ny", prior_precision=100.0, sd=0.5, kernel=White()), y)
    stream = [None if row is None else row[:1] ** 2 for row in of_levels()[2]]
    return graph, adaptive_filtering(), stream, np.cumsum(np.linspace(0.02, 0.1, TICKS)).tolist()


def of_causes():
    """A spring that is pushed by a hidden force, whose own level above is driven by an input."""
    pushed = pc.systems.linear([[0.0, 1.0], [-1.0, -0.1]], causes=[[0.0], [1.0]])
    lifted = pc.systems.linear([[-0.5]], causes=[[1.0, 0.3]])
    x, force = KalmanStateNode("x", dim=2, flow=pushed), KalmanCauseNode("force", dim=1, flow=lifted)
    trend, y = KalmanCauseNode("trend", dim=1, correlation_time=2.0), SensoryNode("y", dim=2, orders=1, dt=0.05)
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.drives(force, x)
    graph.drives(trend, force)
    graph.drives(InputNode("u", dim=1, dt=0.05), force)
    for name, node in (("nx", x), ("nforce", force), ("ntrend", trend), ("ny", y)):
        graph.weighs(PrecisionNode(name, prior_precision=100.0, sd=0.5, kernel=White()), node)
    stream = [None if row is None else {"y": row, "u": [0.1 * i]} for i, row in enumerate(of_levels()[2])]
    stream[6] = {"u": [0.2]}
    return graph, adaptive_filtering(), stream, None


def of_families():
    """A Kalman state that is driven by an input, above sensors of all families."""
    driven = pc.systems.linear([[0.0, 1.0], [-1.0, -0.1]], causes=[[0.0], [1.0]])
    x, first = KalmanStateNode("x", dim=2, flow=driven), pc.systems.linear([[1.0, 0.0]])
    graph = pc.Graph()
    graph.drives(InputNode("u", dim=1, interpolation="linear", sd=0.3, dt=0.1), x)
    graph.predicts(x, PoissonNode("counts", dim=1, exposure=2.0), via=first)
    graph.predicts(x, BinomialNode("hits", dim=1, trials=3, link="probit"), via=first)
    graph.predicts(x, ChoiceNode("choice", dim=2))
    graph.predicts(x, StudentTNode("values", dim=2, degrees=3.0))
    graph.weighs(PrecisionNode("nx", prior_precision=4.0, sd=0.5, kernel=White()), x)
    graph.weighs(PrecisionNode("nv", prior_precision=9.0, sd=0.5, kernel=White()), graph["values"])
    draw = np.random.default_rng(2)
    stream = [
        {"u": [float(k)], "counts": [float(k % 4)], "hits": [k % 3], "choice": [k % 3], "values": draw.normal(size=2)}
        for k in range(TICKS)
    ]
    del stream[4]["choice"], stream[6]["u"]
    return graph, adaptive_filtering(), stream, None


SPRING = pc.TracedFunction(lambda x, k: torch.stack([x[..., 1], -k[..., 0] * x[..., 0]], -1))


CASES = {
    "paper": of_paper,
    "authors": lambda: of_paper(conventions="authors", model="lorenz", orders=2),
    "batch": lambda: of_paper(kappa=[1.0, 0.5, 0.25]),
    "batch of clocks": lambda: of_paper(smoothness=[[0.005], [0.01]], kappa=[1.0, 0.5]),
    "nonlinear": nonlinear,
    "full matrices": lambda: nonlinear(precisions="full"),
    "stack": stack,
    "gaps": with_gaps,
    "hold": lambda: with_trouble("hold"),
    "reset": lambda: with_trouble("reset"),
    "stop": lambda: with_trouble("stop"),
    "families": of_families,
    "adaptive filter": of_adaptive_filter,
    "adaptive filter, smooth": lambda: of_adaptive_filter(correlation_time=0.05),
    "adaptive filter, learned correlation time": lambda: of_adaptive_filter(
        correlation_time=0.05, correlation_time_sd=0.5
    ),
    "adaptive filter, model error": lambda: of_adaptive_filter(model_error_time=1.0),
    "adaptive filter, outliers": lambda: of_adaptive_filter(outliers=0.05, linearisation="taylor"),
    "adaptive filter, Matérn noise": lambda: of_adaptive_filter(
        correlation_time=Matern(0.05, 1.5), integrator="local_linearisation", substeps=2
    ),
    "levels": of_levels,
    "categories": of_categories,
    "switching": of_switching,
    "several peaks": of_several_peaks,
    "causes": of_causes,
}
