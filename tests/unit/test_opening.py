"""First guesses of noise levels from the first observations."""

import numpy as np
import pytest
import torch

import pcnet as pc
from pcnet.engine.opening import LENGTH, Opening
from pcnet.graphs import Sensor, adaptive_filter
from pcnet.numerics.kernels import Matern, SquaredExponential, White

DT, SD, DRAWS = 0.1, 0.3, 2000
KERNELS = [White(), SquaredExponential(0.4), Matern(0.5, 1.5), pc.kernels.Autocorrelation(lambda h: torch.exp(-(h**2)))]


def draws(kernel, interval):
    """Noise of this autocorrelation beside a level of 20, in 16 observations; (T, B, 1)."""
    times = interval * torch.arange(LENGTH, dtype=torch.float64)
    covariance = SD**2 * kernel.correlation(times[:, None] - times)
    values = np.random.default_rng(0).multivariate_normal(np.zeros(LENGTH), covariance.numpy(), DRAWS)
    return 20.0 + torch.as_tensor(values.T[..., None])


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda each: type(each).__name__)
def test_the_guess_of_observation_noise_is_its_variance_whatever_its_correlation(kernel, every):
    """Without a signal the guess is unbiased."""
    sensor = Sensor(every=every, correlation_time=None if isinstance(kernel, White) else kernel)
    graph = adaptive_filter(lambda x, _: -x, 1, DT, sensors={"y": sensor, "z": Sensor()}).graph
    nothing = torch.full((DRAWS, 1), torch.nan, dtype=torch.float64)
    given = [each for value in draws(kernel, every * DT) for each in [value, *[nothing] * (every - 1)]]
    opening = Opening([({"y": value}, None) for value in given], {}, {})
    interval = torch.full((DRAWS,), DT, dtype=torch.float64)
    guess = opening.guesses(["noise_y"], graph, torch.Size([DRAWS]), interval)["noise_y"].exp()
    assert guess.mean().item() == pytest.approx(SD**2, rel=0.1)


def test_smooth_noise_needs_no_first_guess():
    """Its third differences are a hundredth of those of white noise, and were taken for its level."""
    for seed in (1, 2):
        world = pc.simulate.glv_process(samples=250, noise="smooth", seed=seed)
        prior = {"parameter_mean": [0.3, -0.2, 0.3], "parameter_sd": 0.25}
        model = adaptive_filter(pc.systems.lotka_volterra, 3, 0.01, **prior, correlation_time=0.07)
        result = model.run(world.observations, engine="compiled")
        error = result.mean("theta")[-1] - np.array([0.2, -0.4, 0.1])
        assert (abs(error) < 4 * result.sd("theta")[-1]).all()
        assert (abs(error) < 0.25).all()
        raw = world.observations - world.states
        assert np.square(result.mean("x")[:, 0] - world.states.numpy()).mean() < 0.7 * float((raw**2).mean())
        np.testing.assert_allclose(np.exp(-0.5 * result.mean("noise_y")[-1]), 0.1, rtol=0.5)


def test_smooth_noise_in_single_precision():
    """White rests, which are tied to the levels after 8 and 32 observations, have the dtype of the run."""
    world = pc.simulate.glv_process(samples=36, noise="smooth", seed=1)
    few = pc.Hypotheses(process_factors=(1.0,), observation_factors=(0.1, 1.0), contrast=1.0, outliers=0.0)
    known = {"process_noise_sd": 0.05, "observation_noise_sd": 0.1, "correlation_time": 0.07, "hypotheses": few}
    prior = {"parameter_mean": [0.2, -0.4, 0.1], "parameter_sd": 0.1}
    model = adaptive_filter(pc.systems.lotka_volterra, 3, 0.01, **prior, **known)
    single, double = (model.run(world.observations, dtype=each).mean("x") for each in (torch.float32, torch.float64))
    np.testing.assert_allclose(single, double, atol=5e-3)
