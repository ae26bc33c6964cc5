"""The single-layer graph of *Online Generalised Predictive Coding*, in the paper's conventions or its authors'.

The conventions of the published program are ordinary options, chosen here and nowhere else:

- the prior variance of a log-precision is σ_λ⁴ (the standard deviation is squared twice);
- one log-precision for all channels of an error;
- exact second derivatives;
- the first states are drawn from U(0, 1) and the first differences are taken from zero;
- covariances of precisions and parameters are taken from the curvature before the first observation;
- the covariance of the states is taken before the slow step, not after it;
- the temporal covariance gets a ridge of machine precision times its mean variance.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pcnet.errors import SettingError, naming
from pcnet.functions import systems as flows
from pcnet.functions.base import Function
from pcnet.model.graph import Graph
from pcnet.model.model import Model
from pcnet.model.schedule import SLOW, Schedule, act, slow_step
from pcnet.model.schedule import odem as odem_schedule
from pcnet.nodes import GeneralisedStateNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.numerics.estimators import Exponential, RobbinsMonro
from pcnet.numerics.integrators import LocalLinearisation
from pcnet.settings import to_tensor


class Prior(NamedTuple):
    """A model of the paper: its flow, and the prior of its parameters."""

    flow: Function
    mean: tuple[float, ...]
    sd: float


MODELS = {
    "lorenz": Prior(flows.lorenz, (30.0,), 9.0),
    "glv": Prior(flows.lotka_volterra, (0.3, -0.2, 0.3), 0.25),
}
"""The two generative models of the study."""


@naming(SettingError)
def odem(
    model: Literal["glv", "lorenz"] = "glv",
    orders: int = 3,
    dt: Any = 0.01,
    *,
    expected_precision_x: Any = 500.0,
    expected_precision_y: Any = 500.0,
    sd_lambda_x: Any = 0.1,
    sd_lambda_y: Any = 0.1,
    kappa: Any = 1.0,
    every: Any = 64,
    beta_lambda: Any = 0.0,
    beta_theta: Any = 0.0,
    smoothness: Any = 0.005,
    nu: Any = -4.0,
    rate: Any = 1e-4,
    t0: Any = 10.0,
    gamma: Any = 0.3,
    theta_mean: Any = None,
    theta_sd: Any = None,
    conventions: Literal["paper", "authors"] = "paper",
    initial_mean: Any = None,
    seed: int = 42,
) -> Model:
    """The paper's graph (nodes x, y, theta, lambda_x, lambda_y) and its ODEM schedule.

    Numbers may be tensors of settings: then every result gains their leading batch dimensions; theta_mean and
    theta_sd end in the parameters, initial_mean in (orders, 3). orders is that of the states, k_x; k_y is one less.
    seed draws the first states under the authors' conventions, where initial_mean is not given; 42 gives theirs.
    """
    if model not in MODELS:
        raise SettingError(f"there is no model {model!r}; models: {', '.join(MODELS)}")
    if conventions not in ("paper", "authors"):
        raise SettingError(f"there are no conventions {conventions!r}; choose 'paper' or 'authors'")
    if orders < 2:
        raise SettingError(f"orders must be 2 or more, not {orders}: observations have one order less than states")
    authors = conventions == "authors"
    prior = MODELS[model]
    curvature: Literal["exact", "gauss-newton"] = "exact" if authors else "gauss-newton"
    if initial_mean is None and authors:
        initial_mean = torch.rand(orders, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def steps(beta: Any) -> RobbinsMonro:
        return RobbinsMonro(rate, t0, gamma, Exponential(beta))

    def precision(name: str, expected: Any, sd: Any) -> PrecisionNode:
        sd_, expected_ = _channel("sd_" + name, sd), _channel("expected_precision_" + name[-1], expected)
        return PrecisionNode(
            name,
            mean=expected_.log() - sd_**2 / 2,
            sd=sd_**2 if authors else sd_,
            correlation_time=smoothness,
            channels="shared" if authors else "each",
            estimator=steps(beta_lambda),
            curvature=curvature,
            ridge=torch.finfo(torch.float64).eps if authors else 0.0,
        )

    x = GeneralisedStateNode(
        "x",
        dim=3,
        orders=orders,
        flow=prior.flow,
        initial_mean=initial_mean,
        integrator=LocalLinearisation(kappa, log_step_size=nu),
        curvature=curvature,
    )
    y = SensoryNode("y", dim=3, orders=orders - 1, dt=dt, derivative_init="zeros" if authors else "first")
    theta = ParameterNode(
        "theta",
        mean=to_tensor(prior.mean if theta_mean is None else theta_mean),
        sd=to_tensor(prior.sd if theta_sd is None else theta_sd),
        estimator=steps(beta_theta),
        curvature=curvature,
    )
    graph = Graph()
    graph.predicts(x, y)
    graph.parametrises(theta, x)
    graph.weighs(precision("lambda_x", expected_precision_x, sd_lambda_x), x)
    graph.weighs(precision("lambda_y", expected_precision_y, sd_lambda_y), y)
    if not authors:
        return Model(graph, odem_schedule(every))
    slow = [step for who in SLOW for step in slow_step(who, every=every)]
    as_programmed = Schedule(
        name="ODEM as programmed by its authors",
        on_start=(act("update_covariance", *SLOW),),
        acts=(
            act("observe", "sensory"),
            act("update", "state"),
            act("update_covariance", "state"),
            act("accumulate", *SLOW),
            *slow,
        ),
    )
    return Model(graph, as_programmed)


def _channel(name: str, value: Any) -> Tensor:
    """A positive setting, with a last dimension of one for the channels."""
    tensor: Tensor = to_tensor(value)
    if not bool((tensor > 0).all()):
        raise SettingError(f"{name} must be positive")
    return tensor[..., None]
