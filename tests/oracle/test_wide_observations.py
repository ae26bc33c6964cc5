"""Many channels below a Kalman state: as the dense form and the Kalman filter, at a cost that is linear in them."""

import math

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

import pcnet as pc
from pcnet.errors import GraphError
from pcnet.functions.closed_form import Linear
from pcnet.nodes import KalmanStateNode, PrecisionNode, SensoryNode
from pcnet.numerics import kalman, low_rank
from pcnet.numerics.dispatch import DispatchMode
from pcnet.numerics.kalman import GaussianWithSensitivities
from pcnet.numerics.kernels import White
from pcnet.numerics.low_rank import LowRankDistribution, LowRankPrecision
from pcnet.numerics.precision import DensePrecision
from support.kalman import DT, FIRST, FLOW, STATE_VARIANCE, STILL, Kalman, transition

CHANNELS = 50


def mapping(channels=CHANNELS, seed=0):
    return np.random.default_rng(seed).standard_normal((channels, 2))


def variances(channels=CHANNELS):
    return np.geomspace(0.02, 2.0, channels)


def graph_of(channels=CHANNELS, *, learn=False, shared=False, guess=None, g=None, outliers=0.0, **options):
    x = KalmanStateNode("x", dim=2, flow=Linear(FLOW), learn_noise=learn, initial_sd=0.9, **options)
    y = SensoryNode("y", dim=channels, orders=1, dt=DT, outliers=outliers)
    graph = pc.Graph()
    graph.predicts(x, y, via=Linear(mapping(channels)) if g is None else g)
    level = -math.log(STATE_VARIANCE)
    graph.weighs(PrecisionNode("noise_x", mean=level, sd=1.0, kernel=White(), channels="shared"), x)
    guess = variances(channels) if guess is None else guess
    kind = "shared" if shared else "each"
    graph.weighs(PrecisionNode("noise_y", mean=-np.log(guess), sd=1.6, kernel=White(), channels=kind), y)
    return graph


def record(samples, channels=CHANNELS, seed=1):
    """Observations of the linear model, and its states."""
    rng, g = np.random.default_rng(seed), mapping(channels)
    f, q = transition(FLOW, STATE_VARIANCE * np.ones(2), DT)
    x, states, found = FIRST, [], []
    for _ in range(samples):
        found.append(g @ x + np.sqrt(variances(channels)) * rng.standard_normal(channels))
        states.append(x)
        x = f @ x + np.linalg.cholesky(q) @ rng.standard_normal(2)
    return np.array(found), np.array(states)


def random_belief(n=4, s=3, seed=2):
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    roots = normal(2, 1 + s, n, n)
    return GaussianWithSensitivities(normal(2, n), roots @ roots.mT, normal(2, n, 2), normal(2, n, s)), normal


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("level", [None, 2])
def test_every_rule_is_that_of_the_dense_form(level, missing):
    """Update, scores of levels and of parameters, and log|Ω|, with the noise in one log-variance or in none."""
    d, (belief, normal) = 12, random_belief()
    jacobian, mean, error, direct = normal(2, d, 4), normal(2, d), normal(2, d), normal(2, d, 2)
    noise = normal(2, d).exp()
    by_source = torch.zeros(2, 4, d, dtype=torch.float64)
    by_source[:, 0 if level is None else 1 + level] = noise
    levels = (by_source[:, 1:] > 0).any(-1).double()
    there = torch.ones(2, d, dtype=torch.bool)
    if missing:
        there[0, ::3], there[1, 1::2] = False, False
    error = torch.where(there, error, 0.0)
    wide = LowRankDistribution(mean, jacobian, belief.covariance_by_source, noise, levels, belief.dmean_dlogvar)
    thin = LowRankPrecision.of(wide, there)
    dense = kalman.predict_observation(belief, mean, jacobian, by_source)
    full = DensePrecision.of_covariance(dense.covariance, there)
    weighted = full.weigh(error[:, None])[:, 0]
    pull = torch.bmm(weighted[:, None], jacobian)[:, 0]

    def close(a, b):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)

    close(wide.covariance, dense.covariance)
    close(wide.variance, dense.variance)
    close(thin.dense(), full.matrix)
    close(thin.log_det, full.log_det)
    close(thin.weigh(error[:, None])[:, 0], weighted)
    expected = kalman.update(belief, jacobian, direct, weighted, full.matrix, by_source)
    for ours, theirs in zip(low_rank.update(belief, thin, pull, direct, levels), expected, strict=True):
        close(ours, theirs)
    close(thin.quadratic_form(direct), full.quadratic_form(direct))
    for part in (slice(0, 3), slice(0, 2), slice(2, 3)):
        ours = low_rank.noise_score(wide.of_levels(part), thin, weighted)
        theirs = kalman.noise_score(dense.of_levels(part), error, weighted, full.matrix)
        close(ours.score, theirs.score)
        close(ours.information, theirs.information)


def test_scores_of_channels_are_derivatives_of_the_log_likelihood():
    """By autograd, at a fixed belief; the information is the expected square of the score."""
    d, (belief, normal) = 9, random_belief()
    jacobian, error, noise = normal(2, d, 4), normal(2, d), normal(2, d).exp()
    wide = LowRankDistribution(
        normal(2, d), jacobian, belief.covariance_by_source, noise, torch.zeros(2, 3), belief.dmean_dlogvar
    )
    precision = LowRankPrecision.of(wide, None)
    score, information = low_rank.channel_scores(wide, precision, precision.weigh(error[:, None])[:, 0])
    level = noise.log().requires_grad_()
    prior = jacobian @ belief.covariance @ jacobian.mT
    covariance = prior + level.exp().diag_embed()
    normals = torch.distributions.MultivariateNormal(torch.zeros(d, dtype=torch.float64), covariance)
    (slope,) = torch.autograd.grad(normals.log_prob(error).sum(), level)
    torch.testing.assert_close(score, slope, rtol=1e-9, atol=1e-9)
    omega = covariance.detach().inverse()
    expected = 0.5 * (noise * omega.diagonal(dim1=-2, dim2=-1)) ** 2
    torch.testing.assert_close(information, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("gaps", [False, True])
def test_it_is_the_kalman_filter(gaps):
    seen, _ = record(30)
    if gaps:
        seen[3:9, ::2], seen[12], seen[:, 7] = np.nan, np.nan, np.nan
    result = graph_of(initial_mean=FIRST).run(seen, schedule=STILL, record=("mean", "covariance", "energy"))
    f, q = transition(FLOW, STATE_VARIANCE * np.ones(2), DT)
    textbook = Kalman(f, q, mapping(), np.diag(variances()), FIRST, 0.81 * np.eye(2))
    for k, y in enumerate(seen):
        textbook.step(y)
        np.testing.assert_allclose(result.mean("x")[k].ravel(), textbook.mean, rtol=1e-8, atol=1e-8)
        np.testing.assert_allclose(result.covariance("x")[k], textbook.covariance, rtol=1e-8, atol=1e-8)
    assert result.accuracy.sum() == pytest.approx(textbook.log_evidence, rel=1e-8)


@pytest.mark.parametrize("outliers", [0.0, 0.05])
@pytest.mark.parametrize("first", [FIRST, None])
def test_a_shared_level_is_learned_as_in_the_dense_form(first, outliers, monkeypatch):
    seen, _ = record(40)
    options = {"learn": True, "shared": True, "guess": 0.1, "initial_mean": first, "outliers": outliers}
    wanted = ("mean", "covariance", "energy", "prediction")
    wide = graph_of(**options).run(seen, schedule=pc.adaptive_filtering(), record=wanted)
    monkeypatch.setattr("pcnet.numerics.low_rank.WIDE", 10**6)
    dense = graph_of(**options).run(seen, schedule=pc.adaptive_filtering(), record=wanted)
    for key, trace in dense.traces.items():
        np.testing.assert_allclose(wide.traces[key].values, trace.values, rtol=1e-8, atol=1e-8, err_msg=str(key))


def test_each_channel_learns_its_own_level():
    """From a common guess, levels over two decades: within three standard errors √(2/T) of a sample variance, and the
    states are those of the filter that knows all levels."""
    samples = 400
    seen, states = record(samples)
    result = graph_of(learn=True, guess=np.full(CHANNELS, 0.3)).run(
        seen, schedule=pc.adaptive_filtering(), record=("mean", "sd")
    )
    off = -result.mean("noise_y")[-1] - np.log(variances())
    assert np.abs(off).max() < 3.5 * math.sqrt(2 / samples)
    assert off.std() < 1.3 * math.sqrt(2 / samples)
    told = graph_of().run(seen, schedule=STILL, record=("mean",))
    half = slice(samples // 2, None)
    errors = [((run.mean("x")[half, 0] - states[half]) ** 2).mean() for run in (result, told)]
    assert errors[0] < 1.05 * errors[1]


class Largest(DispatchMode):
    """Remembers the most numbers that any operation gave back."""

    numbers = 0

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        result = operation(*arguments, **(keywords or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                self.numbers = max(self.numbers, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("g", [None, lambda x, theta: torch.tanh(x @ torch.tensor(mapping(2000)).T.to(x))])
def test_memory_is_linear_in_the_channels(g):
    seen, _ = record(6, 2000)
    graph = graph_of(2000, learn=True, g=g, initial_mean=FIRST)
    session = graph.start(pc.adaptive_filtering(), record=("mean", "sd", "energy"))
    session.step(seen[0])
    with Largest() as largest:
        for y in seen[1:]:
            session.step(y)
    assert 2000 <= largest.numbers <= 5 * 2 * 2000


def test_engines_batches_checkpoints_and_smoothing_agree(tmp_path):
    seen, _ = record(80, 40)
    seen[20:25, :20] = np.nan
    model = pc.Model(graph_of(40, learn=True, guess=np.full(40, 0.3), initial_mean=FIRST), pc.adaptive_filtering())
    eager = model.run(seen, engine="eager", record=("mean", "sd", "energy"), smooth=True)
    compiled = model.run(seen, engine="compiled", record=("mean", "sd", "energy"), smooth=True)
    for key, trace in eager.traces.items():
        np.testing.assert_allclose(compiled.traces[key].values, trace.values, rtol=1e-7, atol=1e-9, err_msg=str(key))
    both = model.run(np.stack([seen, seen[::-1]]), engine="eager", record=("mean",))
    np.testing.assert_allclose(both.mean("x")[0], eager.mean("x"), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(compiled.smoothed("x").mean, eager.smoothed("x").mean, rtol=1e-7, atol=1e-9)
    session = model.start(engine="eager")
    session.run(seen[:30])
    again = pc.resume(session.save(tmp_path / "half"), model)
    again.run(seen[30:])
    np.testing.assert_allclose(again.mean("x").ravel(), eager.mean("x")[-1].ravel(), rtol=1e-9, atol=1e-12)


def test_thousands_of_channels_are_compiled():
    """In loops, with the digits of the eager engine; products with narrow matrices are not left to torch."""
    model, seen = pc.Model(graph_of(1500, learn=True), pc.adaptive_filtering()), record(8, 1500)[0]
    eager, compiled = (model.run(seen, engine=engine, record=("mean", "energy")) for engine in ("eager", "compiled"))
    assert compiled.eager_ticks <= 1  # the first
    np.testing.assert_allclose(compiled.mean("x"), eager.mean("x"), rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(compiled.accuracy, eager.accuracy, rtol=1e-7)


def test_forecasts_are_those_of_the_kalman_filter():
    session = pc.Model(graph_of(40, initial_mean=FIRST), STILL).start().run(record(10, 40)[0])
    ahead, state = session.forecast(3 * DT), session.read("x", "covariance").numpy()
    f, q = transition(FLOW, STATE_VARIANCE * np.ones(2), DT)
    for _ in range(3):
        state = f @ state @ f.T + q
    expected = np.sqrt(np.diag(mapping(40) @ state @ mapping(40).T) + variances(40))
    np.testing.assert_allclose(ahead.sd("y")[-1].ravel(), expected, rtol=1e-8)


def test_smooth_noise_of_many_channels_is_refused_with_what_to_take():
    """Its coordinates are part of the belief: 5 for each channel, at a cost that grows with the cube."""
    graph = pc.Graph()
    x, y = KalmanStateNode("x", dim=2, flow=Linear(FLOW)), SensoryNode("y", dim=200, orders=1, dt=DT)
    graph.predicts(x, y, via=Linear(mapping(200)))
    graph.weighs(PrecisionNode("noise_x", prior_precision=9.0, sd=1.0, kernel=White()), x)
    graph.weighs(PrecisionNode("noise_y", prior_precision=9.0, sd=1.0, correlation_time=DT), y)
    with pytest.raises(GraphError, match=r"600 elements .* 3 for each of 200 channels.*Matern"):
        pc.Model(graph, pc.adaptive_filtering()).run(np.zeros((3, 200)))
