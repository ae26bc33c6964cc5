"""Gaussian-sum states against exact filters on a grid, and against the Kalman filter where that is exact."""

import math

import numpy as np
import pytest
import torch

import pcnet as pc
from pcnet.errors import SettingError
from pcnet.graphs import adaptive_filter
from pcnet.nodes import GaussianSumStateNode, KalmanStateNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.numerics.gaussian_sums import GaussianSum, divide, reduce
from pcnet.numerics.kalman import GaussianWithSensitivities
from pcnet.numerics.kernels import White
from pcnet.numerics.sigma_points import covariance_root
from support.kalman import STILL


def growth(x, u, theta, t):
    """x ← x/2 + 25x/(1 + x²) + 8cos 1.2k, one Euler step of length 1."""
    return -0.5 * x + 25 * x / (1 + x**2) + 8 * torch.cos(1.2 * t[..., None])


def wells(x, theta):
    return 2 * x * (1 - x**2)


class Problem:
    """A scalar system with y = g(x) plus noise, its data, and the exact filter on a grid."""

    def __init__(self, flow, mapping, step, *, process, noise, first, grid, dt, substeps, integrator):
        self.flow, self.mapping, self.step, self.dt = flow, mapping, step, dt
        self.process, self.noise, self.first, self.grid = process, noise, first, np.linspace(*grid)
        self.substeps, self.integrator = substeps, integrator

    def data(self, samples, seed):
        rng = np.random.default_rng(seed)
        x, found = self.first * rng.standard_normal(), []
        for k in range(samples):
            for _ in range(self.substeps if k else 0):
                h = self.dt / self.substeps
                x = self.step(x, k - 1, h) + self.process * math.sqrt(h) * rng.standard_normal()
            found.append((x, self.mapping(x) + self.noise * rng.standard_normal()))
        return np.array(found).T

    def filtered(self, seen):
        """Means, standard deviations and log-evidence of each observation."""
        x, h = self.grid, self.dt / self.substeps
        width, rows, found = x[1] - x[0], {}, []
        p = np.exp(-0.5 * (x / self.first) ** 2)
        for k, y in enumerate(seen):
            for _ in range(self.substeps if k else 0):
                key = k if self.flow is growth else 0
                if key not in rows:
                    away = x[:, None] - self.step(x, k - 1, h)
                    rows = {key: np.exp(-0.5 * (away / self.process) ** 2 / h)}
                p = rows[key] @ p
            p = p / (p.sum() * width)
            error = 0.0 * x if np.isnan(y) else (y - self.mapping(x)) / self.noise
            likelihood = np.exp(-0.5 * error**2) / (self.noise * math.sqrt(2 * math.pi))
            evidence = (p * likelihood).sum() * width
            p = p * likelihood / evidence
            mean = (p * x).sum() * width
            found.append((mean, math.sqrt((p * (x - mean) ** 2).sum() * width), math.log(evidence)))
        return np.array(found).T

    def graph(self, kind=GaussianSumStateNode, **settings):
        x = kind(
            "x",
            dim=1,
            flow=self.flow,
            initial_mean=[0.0],
            initial_sd=self.first,
            integrator=self.integrator,
            learn_noise=False,
            **settings,
        )
        y, graph = SensoryNode("y", dim=1, orders=1, dt=self.dt), pc.Graph()
        graph.predicts(x, y, via=lambda x, theta: self.mapping(x))
        graph.weighs(PrecisionNode("noise_x", mean=-2 * math.log(self.process), sd=1.0, kernel=White()), x)
        graph.weighs(PrecisionNode("noise_y", mean=-2 * math.log(self.noise), sd=1.0, kernel=White()), y)
        return graph


PROBLEMS = {
    "growth": Problem(
        growth,
        lambda x: x**2 / 20,
        lambda x, k, h: 0.5 * x + 25 * x / (1 + x**2) + 8 * np.cos(1.2 * k),
        process=math.sqrt(10),
        noise=1.0,
        first=2.0,
        grid=(-45, 45, 901),
        dt=1.0,
        substeps=1,
        integrator="euler",
    ),
    "wells": Problem(
        wells,
        lambda x: x**2,
        lambda x, k, h: x + h * 2 * x * (1 - x**2),
        process=0.6,
        noise=0.2,
        first=1.0,
        grid=(-3.5, 3.5, 701),
        dt=0.1,
        substeps=8,
        integrator="rk4",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_belief_with_several_peaks_is_nearly_the_exact_one(name):
    """Where one Gaussian is lost; over seeds that the rules were not chosen with."""
    problem = PROBLEMS[name]
    states, seen = zip(*(problem.data(80, seed) for seed in range(900, 904)), strict=True)
    exact = np.stack([problem.filtered(y) for y in seen])
    observations = torch.tensor(np.array(seen))[..., None]
    record = ("mean", "sd", "energy")
    result = problem.graph().run(observations, schedule=STILL, record=record, engine="eager")
    single = problem.graph(KalmanStateNode).run(observations, schedule=STILL, record=record, engine="eager")
    mean, sd = (getattr(result, each)("x").reshape(4, -1) for each in ("mean", "sd"))
    assert np.sqrt(np.mean((mean - exact[:, 0]) ** 2)) < 0.25 * np.sqrt(np.mean(exact[:, 1] ** 2))
    assert np.mean(np.abs(np.log(sd / exact[:, 1]))) < 0.2
    lost, lost_by_one = ((exact[:, 2] - each.accuracy.reshape(4, -1)).mean() for each in (result, single))
    assert -0.01 < lost < 0.05 < 0.3 < lost_by_one  # nats an observation
    error, least = (np.sqrt(np.mean((each - np.array(states)) ** 2)) for each in (mean, exact[:, 0]))
    assert error < 1.1 * least


def test_without_bends_it_is_the_kalman_filter():
    rng = np.random.default_rng(0)
    seen = rng.standard_normal((30, 1)).cumsum(0)
    seen[10:14] = np.nan
    found = {}
    for kind in (KalmanStateNode, GaussianSumStateNode):
        x, y = (
            kind("x", dim=2, flow=pc.systems.linear([[0.0, 1.0], [-1.0, -0.2]])),
            SensoryNode("y", dim=1, orders=1, dt=0.1),
        )
        graph = pc.Graph()
        graph.predicts(x, y, via=pc.systems.linear([[1.0, 0.0]]))
        for name, node in (("noise_x", x), ("noise_y", y)):
            graph.weighs(PrecisionNode(name, mean=0.0, sd=1.0, kernel=White()), node)
        found[kind] = graph.run(seen, schedule=pc.adaptive_filtering(), record=("mean", "covariance", "energy"))
    one, several = found.values()
    for name in ("x", "noise_x", "noise_y"):
        np.testing.assert_allclose(several.mean(name), one.mean(name), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(several.covariance("x"), one.covariance("x"), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(several.accuracy, one.accuracy, rtol=1e-10, atol=1e-12)


def random_sum(k, n, seed=0):
    """A sum of Gaussians with covariances of three sources."""
    draw = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
    weight = normal(2, k).softmax(1)
    roots = normal(2, k, 3, n, n)
    parts = GaussianWithSensitivities(normal(2, k, n), roots @ roots.mT, normal(2, k, n, 2), normal(2, k, n, 2))
    return GaussianSum(weight, parts)


def moments(of):
    weight, (mean, shares, *_) = of
    centre = (weight[..., None] * mean).sum(1)
    away = mean - centre[:, None]
    covariance = (weight[..., None, None] * (shares.sum(2) + away[..., :, None] * away[..., None, :])).sum(1)
    return centre, covariance


def test_reducing_keeps_mean_and_covariance():
    whole = random_sum(9, 3)
    few = reduce(whole, 4)
    assert few.weight.shape == (2, 4)
    torch.testing.assert_close(few.weight.sum(1), torch.ones(2, dtype=torch.float64))
    for ours, theirs in zip(moments(few), moments(whole), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_gaussians_that_are_alone_stay_what_they_are_when_others_are_merged():
    """Three far apart with weight, and copies without: those three are left."""
    whole = random_sum(3, 2, seed=1)
    whole = whole._replace(parts=whole.parts._replace(mean=100 * whole.parts.mean))
    padded = GaussianSum(
        torch.cat([whole.weight, torch.zeros_like(whole.weight)], 1),
        GaussianWithSensitivities(*(torch.cat([each, each], 1) for each in whole.parts)),
    )
    few, order = reduce(padded, 3), whole.weight.argsort(1, descending=True)
    there = few.weight.argsort(1, descending=True)
    for b in range(2):
        torch.testing.assert_close(few.weight[b, there[b]], whole.weight[b, order[b]])
        torch.testing.assert_close(few.parts.mean[b, there[b]], whole.parts.mean[b, order[b]])
        shares = [each.parts.covariance_by_source[b, at[b]] for each, at in ((few, there), (whole, order))]
        torch.testing.assert_close(*shares, rtol=1e-9, atol=1e-9)


def test_a_divided_gaussian_is_nearly_the_whole_one():
    """Its mean and covariance exactly, its density to 2.5 % of the peak."""
    whole = random_sum(1, 2)
    covariance = whole.parts.covariance_by_source.sum(2)
    root = covariance_root(covariance)
    bent = torch.tensor([0.0, 1.0], dtype=torch.float64).expand(2, 1, 2)
    three = divide(whole, root, bent, 0.5, 0.0)
    (mean, total), (expected, _) = moments(three), moments(whole)
    torch.testing.assert_close(mean, expected)
    column = root[:, 0, :, 1]
    torch.testing.assert_close(total, covariance[:, 0], rtol=1e-6, atol=1e-6)
    points = whole.parts.mean[:, 0, None] + torch.linspace(-3, 3, 61, dtype=torch.float64)[:, None] * column[:, None]

    def density(of):
        found = 0.0
        for i in range(of.weight.shape[1]):
            normal = torch.distributions.MultivariateNormal(
                of.parts.mean[:, i], of.parts.covariance_by_source[:, i].sum(1)
            )
            found = found + of.weight[:, i] * normal.log_prob(points.transpose(0, 1)).exp()
        return found

    assert (density(three) - density(whole)).abs().max() < 0.025 * density(whole).max()
    still = divide(whole, root, bent, 2.0, 0.0)
    torch.testing.assert_close(still.parts.mean[:, :1], whole.parts.mean)
    assert (still.weight[:, 1:] == 0).all()


def test_a_parameter_may_have_two_peaks():
    """Of a drift θ² only the size of θ is seen: both signs stay, with the weights of the prior."""
    x, y = (
        GaussianSumStateNode("x", dim=1, flow=lambda x, theta: theta**2, peaks=8, learn_noise=False),
        SensoryNode("y", dim=1, orders=1, dt=0.1),
    )
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.parametrises(ParameterNode("theta", mean=[0.1], sd=1.0), x)
    graph.weighs(PrecisionNode("noise_x", mean=-2 * math.log(0.1), sd=1.0, kernel=White()), x)
    graph.weighs(PrecisionNode("noise_y", mean=-2 * math.log(0.1), sd=1.0, kernel=White()), y)
    seen = 0.1 * torch.arange(200.0, dtype=torch.float64)[:, None] * 1.5**2
    seen = seen + 0.1 * torch.randn(seen.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    session = pc.Model(graph, pc.adaptive_filtering()).start(engine="eager").run(seen)
    weight, mean = session.read("x", "peak_weight"), session.context("x").state.modes.belief.mean[0, :, 1]
    right = float(weight[mean > 0].sum())
    odds = math.exp(-0.5 * (1.5 - 0.1) ** 2 + 0.5 * (1.5 + 0.1) ** 2)  # of the prior
    assert right == pytest.approx(odds / (1 + odds), abs=0.08)
    assert (mean[weight > 1e-3].abs() - 1.5).abs().max() < 0.1
    assert float(session.read("theta", "sd")) > 1.0


def test_compiled_it_gives_the_digits_of_the_eager_engine():
    problem = PROBLEMS["wells"]
    _, seen = problem.data(40, 3)
    seen[20:23] = np.nan
    options = {"schedule": STILL, "record": ("mean", "sd", "energy", "peak_weight", "peak_mean", "peak_sd")}
    eager, compiled = (problem.graph(peaks=4).run(seen, engine=engine, **options) for engine in ("eager", "compiled"))
    assert compiled.engine == "compiled"
    assert compiled.eager_ticks < 10
    for name in ("mean", "sd", "peak_weight", "peak_mean", "peak_sd"):
        np.testing.assert_allclose(compiled.get("x", name), eager.get("x", name), rtol=1e-9, atol=1e-9)
    weight, mean = eager.get("x", "peak_weight"), eager.get("x", "peak_mean")
    np.testing.assert_allclose((weight[..., None] * mean).sum(1), eager.mean("x")[:, 0], rtol=1e-9, atol=1e-9)


def test_forecasts_and_draws_have_all_peaks():
    """Against the exact density on the grid, moved by as many steps."""
    problem = PROBLEMS["wells"]
    _, seen = problem.data(30, 5)
    session = pc.Model(problem.graph(), STILL).start(engine="eager").run(seen)
    mean, sd, _ = problem.filtered(np.append(seen, np.full(10, np.nan)))[:, 30:]
    ahead, drawn = session.forecast(1.0), session.sample(1.0, 4000, seed=0).values["x"]
    for found in (ahead.sd("x"), drawn.std(0)):
        np.testing.assert_allclose(found.ravel(), sd, rtol=0.12)  # 256 points
    for found in (ahead.mean("x"), drawn.mean(0)):
        np.testing.assert_allclose(found.ravel(), mean, atol=0.15 * sd.max())


@pytest.mark.parametrize(
    "guess",
    [{}, pytest.param({"process_noise_sd": 20.0, "observation_noise_sd": 0.15}, marks=pytest.mark.slow)],
)
def test_told_nothing_of_the_noise_it_is_nearly_as_good_as_the_exact_filter(guess):
    problem = PROBLEMS["growth"]
    states, seen = problem.data(200, 31)
    model = adaptive_filter(
        growth,
        1,
        1.0,
        mapping=lambda x, theta: x**2 / 20,
        initial_mean=[0.0],
        initial_sd=2.0,
        integrator="euler",
        peaks=6,
        **guess,
    )
    result = model.run(seen, record=("mean", "sd"), engine="eager")
    exact, mean, sd = problem.filtered(seen)[0], result.mean("x").ravel(), result.sd("x").ravel()
    error, least = (np.sqrt(np.mean((each - states)[50:] ** 2)) for each in (mean, exact))
    assert error < 1.2 * least
    assert 0.88 < np.mean(np.abs(mean - states)[50:] < 2 * sd[50:]) <= 1.0


def test_what_it_cannot_be_asked_for():
    with pytest.raises(SettingError, match="peaks"):
        GaussianSumStateNode("x", dim=1, flow=wells, peaks=1)
    with pytest.raises(SettingError, match="whole number"):
        adaptive_filter(wells, 1, 0.1, peaks=1.5)
    category = pc.CategoricalNode("c", values=[[0.0], [1.0]], stay=0.9)
    with pytest.raises(SettingError, match="leave out peaks"):
        adaptive_filter(wells, 1, 0.1, peaks=4, switching=category)
