"""Covariances stay finite, symmetric and without negative variances, with channels of very different scales.

The expectation is the model in channels of scale 1: the same numbers in other units.
"""

import numpy as np
import pytest
import torch

import pcnet as pc
from pcnet.errors import DivergenceError
from pcnet.graphs import adaptive_filter
from pcnet.numerics.trees import flatten
from support.filters import single_filter

SCALES = torch.tensor([1e-8, 1.0, 1e8], dtype=torch.float64)
RNG = np.random.default_rng(0)
FLOW = torch.tensor(0.3 * RNG.normal(size=(3, 3)) - np.eye(3))
Y = np.cumsum(RNG.normal(size=(120, 3)), 0) * 0.1
Y[40:45, 0] = np.nan


def flow(scales):
    return pc.systems.linear(scales[:, None] * FLOW / scales)


def laplace(scales):
    x, y = pc.GeneralisedStateNode("x", dim=3, orders=2, flow=flow(scales)), pc.SensoryNode("y", 3, 2, dt=0.1)
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.weighs(pc.PrecisionNode("noise_x", prior_precision=(0.3 * scales) ** -2, sd=0.1, correlation_time=0.05), x)
    graph.weighs(pc.PrecisionNode("noise_y", prior_precision=(0.1 * scales) ** -2, sd=0.1, correlation_time=0.05), y)
    return pc.Model(graph, pc.odem(every=64))


def kalman(scales, **options):
    noise = {"process_noise_sd": 0.3 * scales, "observation_noise_sd": 0.1 * scales, "initial_sd": scales}
    return single_filter(flow(scales), 3, 0.1, **noise, **options)


MODELS = {
    "laplace": laplace,
    "kalman": kalman,
    "kalman, smooth noise": lambda scales: kalman(scales, correlation_time=0.3),
    "kalman, model error": lambda scales: kalman(scales, model_error_time=1.0),
}


def matrices(session):
    """All covariances and precisions of a session, the reported one with them."""
    yield "reported", session.read("x", "covariance")
    for name, state in session.state.nodes.items():
        for path, value in flatten(state, name).items():
            if path.rpartition("/")[2] in ("covariance", "covariance_by_source", "precision") and value.numel():
                yield path, value


@pytest.mark.parametrize("engine", ["eager", "auto"])
@pytest.mark.parametrize("kind", MODELS)
def test_covariances_of_unlike_channels_stay_symmetric(kind, engine):
    session = MODELS[kind](SCALES).start(engine=engine)
    plain = MODELS[kind](torch.ones(3, dtype=torch.float64)).start(engine=engine)
    for part in np.array_split(Y[:60] if engine == "eager" else Y, 4):
        session.run(part * SCALES.numpy())
        plain.run(part)
        found = list(matrices(session))
        assert found
        for path, value in found:
            assert torch.isfinite(value).all(), path
            sd = value.diagonal(dim1=-2, dim2=-1).abs().sqrt()
            size = (sd[..., :, None] * sd[..., None, :]).clamp(min=1e-300)
            assert float(((value - value.mT).abs() / size).max()) < 1e-14, path
        if kind == "laplace":  # the steps of a gradient flow depend on units
            continue
        torch.testing.assert_close(session.sd("x") / SCALES, plain.sd("x"), rtol=0.02, atol=0)
        torch.testing.assert_close(session.mean("x") / SCALES, plain.mean("x"), rtol=0.02, atol=0.02)


EXTREMES = {
    "dt 1e-9": {"dt": 1e-9},
    "much noise": {"process_noise_sd": 1e12, "observation_noise_sd": 1e12},
    "exact observations": {"process_noise_sd": 1e12, "observation_noise_sd": 1e-12},
    "exact flow": {"process_noise_sd": 1e-12, "observation_noise_sd": 1e12},
    "all exact": {"process_noise_sd": 1e-12, "observation_noise_sd": 1e-12},
}


@pytest.mark.parametrize("kind", EXTREMES)
def test_extreme_settings_end_in_numbers(kind):
    """Means and covariances are finite, variances positive, and no data are far away from what is observed for good."""
    options = dict(EXTREMES[kind])
    y = np.sin(0.1 * np.arange(60))[:, None] + 0.1 * np.random.default_rng(0).normal(size=(60, 1))
    session = adaptive_filter(pc.systems.linear([[-1.0]]), 1, options.pop("dt", 0.1), **options).start()
    session.run(y)
    session.step(y[-1], t=session.time + 1e4)  # and a pause that is as extreme
    session.run(y[:5])
    covariance = session.read("x", "covariance")
    assert torch.isfinite(covariance).all()
    assert float(covariance) > 0
    assert np.isfinite(session.result().mean("x")).all()
    assert abs(float(session.mean("x"))) < 10


def test_a_bank_that_has_diverged_says_so_when_it_is_read():
    """ẋ = x over 1,000 time units: e^1000 is no number, and nothing else may be reported."""
    session = adaptive_filter(lambda x, _: x, 1, 0.1).start(engine="eager").run(np.ones((20, 1)))
    with pytest.raises(DivergenceError, match="all hypotheses have diverged by observation 21"):
        session.step(None, t=1000.0).mean("x")
