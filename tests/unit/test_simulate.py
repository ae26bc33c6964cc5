"""Simulated processes, against closed forms and the authors' data."""

import math

import numpy as np
import pytest
import torch

from pcnet.errors import DivergenceError, GraphError, SettingError
from pcnet.functions import systems as flows
from pcnet.numerics.kernels import SquaredExponential
from pcnet.simulate import Simulation, euler, glv_process, simulate, smooth_noise
from support.paths import DATA

CHANNELS = 3000


def correlations(noise: torch.Tensor, lag: int) -> torch.Tensor:
    """The correlation at a lag for every pair of times, over the channels; (T − lag,)."""
    return (noise[lag:] * noise[: len(noise) - lag]).mean(1)


# --- noise -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("width", "dt"), [(0.05, 0.01), (0.01, 0.01), (2.0, 0.5)])
def test_smooth_noise_has_the_autocorrelation_of_its_kernel_up_to_the_ends(width, dt):
    noise = smooth_noise(60, CHANNELS, sd=1.0, width=width, dt=dt, seed=0)
    error = 5 * math.sqrt(2 / CHANNELS)  # the variance of a product of two unit normals is 2 at most
    assert torch.allclose(noise.var(1, correction=0), torch.ones(60, dtype=torch.float64), atol=error)
    for lag in (1, 2, 5, 9):
        expected = math.exp(-((lag * dt) ** 2) / (4 * width**2))
        found = correlations(noise, lag)
        assert torch.allclose(found, torch.full_like(found, expected), atol=error)


def test_smooth_noise_over_many_seeds():
    width, dt, seeds = 0.05, 0.01, 800
    runs = torch.cat([smooth_noise(12, 1, sd=0.3, width=width, dt=dt, seed=seed) for seed in range(seeds)], 1)
    error = 5 * 0.3**2 * math.sqrt(2 / seeds)
    for lag in (0, 3, 11):
        expected = 0.3**2 * math.exp(-((lag * dt) ** 2) / (4 * width**2))
        found = correlations(runs, lag)
        assert torch.allclose(found, torch.full_like(found, expected), atol=error)


def test_the_correlation_time_of_a_precision_node_is_the_kernel_width_times_root_two():
    width, dt = 0.05, 0.01
    noise = smooth_noise(2000, 300, width=width, dt=dt, seed=1)
    for lag in (2, 7, 14):
        expected = float(SquaredExponential(math.sqrt(2) * width).correlation(torch.tensor(lag * dt)))
        # 2000 × 300 samples, one in √(2π)·width/dt ≈ 13 of them independent
        assert float(correlations(noise, lag).mean()) == pytest.approx(expected, abs=5 * math.sqrt(2 * 13 / 6e5))


def test_noise_without_width_is_white():
    noise = smooth_noise(400, CHANNELS, sd=1.0, seed=2)
    assert float(noise.var()) == pytest.approx(1.0, abs=5 * math.sqrt(2 / noise.numel()))
    for lag in (1, 2, 10):
        assert abs(float(correlations(noise, lag).mean())) < 5 / math.sqrt(noise.numel() - lag * CHANNELS)


def test_the_standard_deviation_may_differ_by_channel():
    unit = smooth_noise(50, 2, width=1.0, seed=3)
    assert torch.allclose(smooth_noise(50, 2, sd=[0.5, 4.0], width=1.0, seed=3), unit * torch.tensor([0.5, 4.0]))


def test_a_generator_advances_and_a_seed_does_not():
    rng = np.random.default_rng(5)
    first, second = (smooth_noise(10, 2, width=1.0, seed=rng) for _ in range(2))
    assert torch.equal(first, smooth_noise(10, 2, width=1.0, seed=5))
    assert not torch.equal(first, second)


# --- Euler steps -----------------------------------------------------------------------------------------------------
def test_euler_steps_of_a_linear_flow_are_powers_of_a_matrix():
    matrix = np.array([[-0.5, 2.0], [-2.0, -0.1]])
    states = euler(flows.linear(torch.tensor(matrix)), initial=[1.0, -2.0], noise=np.zeros((30, 2)), dt=0.05)
    expected = [np.linalg.matrix_power(np.eye(2) + 0.05 * matrix, t) @ [1.0, -2.0] for t in range(30)]
    np.testing.assert_allclose(states.numpy(), expected, rtol=1e-12)


def test_noise_drives_the_step_that_follows_it():
    noise = np.arange(12.0).reshape(6, 2)
    states = euler(lambda x, _: torch.zeros_like(x), initial=[10.0, 20.0], noise=noise, dt=0.1)
    before = np.vstack([np.zeros(2), noise[:-1]])
    np.testing.assert_allclose(states.numpy(), [10.0, 20.0] + 0.1 * before.cumsum(0), rtol=1e-14)


def test_a_mean_reverting_process_has_the_variance_of_an_autoregression():
    rate, dt, sd, count = 2.0, 0.1, 0.7, 4000
    made = simulate(
        lambda x, theta: -theta[..., :1] * x,
        parameters=[rate],
        initial=torch.zeros(count, 1),
        samples=60,
        dt=dt,
        state_sd=sd,
        observation_sd=0.0,
        seed=0,
    )
    keep = 1 - rate * dt
    for t in (1, 5, 59):
        expected = (dt * sd) ** 2 * (1 - keep ** (2 * t)) / (1 - keep**2)
        found = float(made.states[:, t].var(correction=0))
        assert found == pytest.approx(expected, rel=5 * math.sqrt(2 / count))
    assert torch.equal(made.observations, made.states)


def test_states_and_observations_keep_within_their_clamps():
    noise = 100.0 * torch.tensor([[1.0, -1.0], [1.0, -1.0], [0.0, 0.0]], dtype=torch.float64)
    states = euler(lambda x, _: 0 * x, initial=[1.0, 1.0], noise=noise, dt=1.0, lower=[-1e9, 0.0], upper=[50.0, 1e9])
    assert states.tolist() == [[1.0, 1.0], [50.0, 0.0], [50.0, 0.0]]
    made = simulate(
        flows.lotka_volterra,
        parameters=[0.2, -0.4, 0.1],
        initial=[0.1, 0.1, 0.1],
        samples=300,
        dt=0.01,
        state_sd=3.0,
        observation_sd=0.5,
        lower=0.05,
        upper=0.15,
        observation_lower=0.0,
        seed=1,
    )
    assert float(made.states.min()) == 0.05
    assert float(made.states.max()) == 0.15
    assert float(made.observations.min()) == 0.0
    assert torch.equal(made.observations, (made.states + made.observation_noise).clamp_min(0.0))


# --- processes -------------------------------------------------------------------------------------------------------
def van_der_pol(**changes):
    common = {
        "parameters": [1.5],
        "initial": [1.0, 0.0],
        "samples": 80,
        "dt": 0.02,
        "state_sd": 0.3,
        "observation_sd": [0.1],
        "width": 0.06,
        "mapping": lambda x, theta: theta[..., :1] * x[..., :1] ** 2,
        "mapping_parameters": [3.0],
        "seed": 7,
    }
    return simulate(flows.van_der_pol, **(common | changes))


def test_a_process_is_determined_by_its_noises():
    made = van_der_pol()
    assert isinstance(made, Simulation)
    x, z = made.states.numpy(), made.state_noise.numpy()
    flow = np.stack([x[:-1, 1], 1.5 * (1 - x[:-1, 0] ** 2) * x[:-1, 1] - x[:-1, 0]], 1)
    np.testing.assert_allclose(x[0], [1.0, 0.0])
    np.testing.assert_allclose(x[1:], x[:-1] + 0.02 * (flow + z[:-1]), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(made.observations.numpy(), 3.0 * x[:, :1] ** 2 + made.observation_noise.numpy())
    np.testing.assert_allclose(made.times.numpy(), 0.02 * np.arange(80))
    assert all(part.dtype == torch.float64 for part in made)
    assert made.observations.shape == (80, 1)


def test_each_replicate_equals_that_of_its_seed_alone():
    together = van_der_pol(seed=[7, 1, 12])
    assert together.states.shape == (3, 80, 2)
    for i, seed in enumerate([7, 1, 12]):
        for one, many in zip(van_der_pol(seed=seed), together, strict=True):
            assert torch.allclose(many if many.dim() == 1 else many[i], one, rtol=1e-13, atol=1e-14)


def test_batch_elements_have_their_own_settings_and_noise():
    made = van_der_pol(
        initial=[[1.0, 0.0], [0.5, 0.5]], parameters=torch.tensor([[[0.1]], [[1.0]], [[2.0]]]), seed=[0, 1]
    )
    assert made.states.shape == (2, 3, 2, 80, 2)
    assert made.observations.shape == (2, 3, 2, 80, 1)
    noises = made.state_noise.flatten(0, 2)
    assert len({tuple(each.flatten().tolist()) for each in noises}) == 12
    assert torch.equal(made.states[..., 0, :], torch.tensor([[1.0, 0.0], [0.5, 0.5]]).double().expand(2, 3, 2, 2))


def test_a_longer_process_starts_with_the_shorter_one():
    for short, long in zip(van_der_pol(samples=50), van_der_pol(samples=80), strict=True):
        assert torch.allclose(short, long[:50], rtol=1e-13, atol=1e-14)


def test_global_random_state_is_untouched():
    torch.manual_seed(3)
    np.random.seed(3)
    expected = torch.rand(2), np.random.rand(2)
    torch.manual_seed(3)
    np.random.seed(3)
    van_der_pol()
    glv_process(20, noise="authors")
    assert torch.equal(torch.rand(2), expected[0])
    assert np.array_equal(np.random.rand(2), expected[1])


# --- the paper's process ---------------------------------------------------------------------------------------------
def test_the_authors_process_is_reproduced():
    saved = np.load(DATA / "authors_process.npz")
    made = glv_process(noise="authors")
    assert made.states.shape == (10_000, 3)
    np.testing.assert_allclose(made.states.numpy()[saved["index"]], saved["states"], rtol=0, atol=1e-13)
    np.testing.assert_allclose(made.observations.numpy()[saved["index"]], saved["observations"], rtol=0, atol=1e-13)
    assert torch.equal(made.observation_noise, 2 * made.state_noise)


def test_fewer_samples_are_the_first_of_the_authors_process():
    saved = np.load(DATA / "authors_process.npz")
    made = glv_process(100, noise="authors", seed=42)
    np.testing.assert_allclose(made.observations.numpy(), saved["observations"][:100], rtol=0, atol=1e-13)


@pytest.mark.parametrize(("noise", "width"), [("white", 0.0), ("smooth", 0.05)])
def test_the_glv_process_has_independent_noises_of_the_stated_size(noise, width):
    made = glv_process(400, noise=noise, seed=list(range(40)))
    z, w = made.state_noise, made.observation_noise
    spread = max(math.sqrt(2 * math.pi) * width / 0.01, 1)  # samples for each independent one, by Σ κ² over all lags
    error = 5 * math.sqrt(spread / z.numel())
    assert float((z / 0.05).var()) == pytest.approx(1.0, abs=error * math.sqrt(2))
    assert float((w / 0.1).var()) == pytest.approx(1.0, abs=error * math.sqrt(2))
    assert abs(float((z / 0.05 * w / 0.1).mean())) < error
    lagged = float((z[:, 5:] * z[:, :-5]).mean()) / 0.05**2
    assert lagged == pytest.approx(math.exp(-0.25) if width else 0.0, abs=error * math.sqrt(2))
    x = made.states
    matrix = torch.tensor([[0.0, 0.2, -0.4], [-0.2, 0.0, 0.1], [0.4, -0.1, 0.0]], dtype=torch.float64)
    flow = x * (x @ matrix.T)
    assert torch.allclose(x[:, 1:], (x + 0.01 * (flow + z)).clamp(0, 5)[:, :-1], rtol=1e-12, atol=1e-14)
    assert torch.equal(made.observations, (x + w).clamp_min(0))
    assert torch.allclose(x[:, 0], torch.tensor([2.25, 1.1, 1.65], dtype=torch.float64))


def test_observations_can_be_left_unclamped():
    made = glv_process(2000, noise="white", clamp_observations=False, seed=0)
    assert float(made.observations.min()) < 0
    assert torch.equal(made.observations, made.states + made.observation_noise)


# --- what is refused -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"samples": 0}, "samples"),
        ({"samples": 10.5}, "samples"),
        ({"dt": 0.0}, "dt"),
        ({"dt": float("nan")}, "dt must be finite"),
        ({"width": -1.0}, "width"),
        ({"state_sd": -0.1}, "state_sd must not be negative"),
        ({"state_sd": [0.1, 0.1, 0.1]}, "state_sd has 3 values"),
        ({"observation_sd": "loud"}, "observation_sd"),
        ({"initial": [1.0, 2.0, 3.0], "parameters": []}, "the flow takes 1 parameters and is given 0"),
        ({"initial": [[1.0, 0.0]] * 3, "parameters": [[1.0]] * 2}, "batch dimensions do not fit"),
        ({"mapping": 3}, "must be a function of"),
        ({"mapping": lambda x, theta: x.sum()}, "the mapping must turn"),
        ({"lower": 2.0, "upper": 1.0}, "lower must not be above upper"),
        ({"seed": -1}, "a seed must be"),
        ({"seed": 1.5}, "a seed must be"),
        ({"seed": []}, "at least one"),
        ({"seed": [1, "two"]}, "a seed must be"),
    ],
)
def test_invalid_settings_are_named(changes, words):
    with pytest.raises((SettingError, GraphError), match=words):
        van_der_pol(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"noise": "pink"}, "no noise 'pink'"),
        ({"noise": "white", "width": 0.1}, "takes no width"),
        ({"noise": "authors", "samples": 10_001}, "10000 samples"),
        ({"noise": "authors", "seed": np.random.default_rng(0)}, "needs a seed"),
    ],
)
def test_invalid_settings_of_the_glv_process_are_named(changes, words):
    with pytest.raises(SettingError, match=words):
        glv_process(**({"samples": 10} | changes))


def test_a_diverging_flow_is_reported_with_the_time():
    with pytest.raises(DivergenceError, match="no longer finite at sample"):
        euler(lambda x, _: x**3, initial=[5.0], noise=np.zeros((40, 1)), dt=1.0)
