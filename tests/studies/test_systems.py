"""The study of systems: its simulations and rivals against closed forms, and a tiny run."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

from pcnet.errors import SettingError
from studies.systems import trials
from studies.systems.design import SYSTEMS, System, matern_noise, simulate
from studies.systems.flows import seen
from studies.systems.report import cells_of, holds
from studies.systems.rivals import averaged_filter, gaussian_filter, particle_filter
from studies.systems.run import run_study
from studies.systems.trials import worst

pytestmark = pytest.mark.usefixtures("as_users_run")


def decay(x, p):
    return -0.5 * x + 0.0 * p[..., :1]


LINEAR = System("Decay", "linear", decay, (1.0,), (1.0,), (1e-6,), (1.0,), (0.7,), (0.3,), (0.2,), 0.1, 60, seen(0))


def exact(data, process=1.0, observation=1.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The Kalman filter of ẋ = −x/2 + noise: means, standard deviations and log-evidence of all seeds."""
    keep, noise = math.exp(-0.05), 0.04 * observation
    added = 0.09 * process * (1 - keep**2)  # ∫0.3² e^(−s) ds
    means, sds, evidence = [], [], np.zeros(len(data.states))
    mean, variance = np.ones(len(data.states)), 0.49
    for k in range(LINEAR.samples):
        if k:
            mean, variance = keep * mean, keep**2 * variance + added
        error, total = data.observations[:, k, 0].numpy() - mean, variance + noise
        evidence -= 0.5 * (error**2 / total + math.log(2 * math.pi * total))
        mean, variance = mean + variance / total * error, variance * noise / total
        means.append(mean)
        sds.append(np.full_like(mean, math.sqrt(variance)))
    return np.stack(means, 1), np.stack(sds, 1), evidence


@pytest.mark.parametrize("kind", ["extended", "cubature"])
def test_rivals_are_kalman_filters_where_everything_is_linear(kind):
    data = simulate(LINEAR, range(4))
    found = gaussian_filter(LINEAR, data, kind)
    means, sds, evidence = exact(data)
    np.testing.assert_allclose(found.mean[..., 0], means, atol=5e-3)  # up to the noise within a step
    np.testing.assert_allclose(found.sd[..., 0], sds, rtol=2e-2)
    np.testing.assert_allclose(found.log_evidence, evidence, atol=0.2)


def test_the_average_over_noise_levels_is_that_of_exact_filters():
    """Bayes: the last belief of Kalman filters at all 49 combinations of levels, weighed by their evidence."""
    data, factors = simulate(LINEAR, range(4)), np.geomspace(1 / 64, 64, 7)
    found = averaged_filter(LINEAR, data)
    alone = [exact(data, a, b) for a in factors for b in factors]
    evidence = np.stack([each[2] for each in alone])
    weight = np.exp(evidence - evidence.max(0))
    weight /= weight.sum(0)
    means, sds = (np.stack([each[i][:, -1] for each in alone]) for i in (0, 1))
    mean = (weight * means).sum(0)
    sd = np.sqrt((weight * (sds**2 + (means - mean) ** 2)).sum(0))
    np.testing.assert_allclose(found.mean[:, -1, 0], mean, atol=5e-3)
    np.testing.assert_allclose(found.sd[:, -1, 0], sd, rtol=2e-2)


def test_the_particle_filter_agrees_with_the_kalman_filter():
    data = simulate(LINEAR, range(3))
    found, (means, sds, evidence) = particle_filter(LINEAR, data, 2000), exact(data)
    np.testing.assert_allclose(found.mean[..., 0], means, atol=0.05)
    np.testing.assert_allclose(found.sd[:, 10:, 0].mean(), sds[:, 10:].mean(), rtol=0.05)
    np.testing.assert_allclose(found.log_evidence, evidence, atol=1.5)


def test_simulated_states_have_the_moments_of_the_process():
    """From N(1, 0.7²): mean e^(−t/2), variance 0.49 e^(−t) + 0.09 (1 − e^(−t))."""
    data = simulate(LINEAR._replace(samples=11), range(400))
    left = math.exp(-1.0)
    assert float(data.states[:, -1, 0].mean()) == pytest.approx(math.exp(-0.5), abs=0.08)
    assert float(data.states[:, -1, 0].var()) == pytest.approx(0.49 * left + 0.09 * (1 - left), rel=0.2)


def test_matern_noise_has_its_autocorrelation():
    """κ(h) = (1 + √3 h/τ) e^(−√3 h/τ)."""
    first, second = torch.randn(2, 400, 60, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = matern_noise(first, second, torch.full((60,), 0.1, dtype=torch.float64), 0.3)[..., 0]
    for lag in (0, 1, 3):
        scaled = math.sqrt(3) * 0.1 * lag / 0.3
        found = (noise[:, : 60 - lag] * noise[:, lag:]).mean()
        assert float(found) == pytest.approx((1 + scaled) * math.exp(-scaled), abs=0.06)


def test_the_worst_level_is_the_farthest_from_one():
    ratios = np.array([[0.5, 1.5, np.nan], [np.nan, np.nan, 3.0], [np.nan, np.nan, np.nan]])
    np.testing.assert_allclose(worst(ratios), [0.5, 3.0, np.nan])


def test_limits_are_ratios_to_the_better_rival():
    row = {"system": "neuron", "seed": 1, "parameters": 1.0, "coverage": 0.95, "parameter_coverage": 1.0, "lost": 0.0}
    row |= {"level_x": np.nan, "level_y": 1.1}
    rows = [
        {**row, "method": "extended", "guess": "", "whole": 2.0, "half": 1.0},
        {**row, "method": "cubature", "guess": "", "whole": 1.0, "half": 2.0},
        {**row, "method": "pcnet", "guess": "right", "whole": 1.2, "half": 1.05},
        {**row, "method": "pcnet", "guess": "none", "whole": 1.2, "half": 1.2},
    ]
    cells = cells_of(pd.DataFrame(rows))
    np.testing.assert_allclose(cells["whole_ratio"], [2.0, 1.0, 1.2, 1.2])
    assert holds(cells)[2:].tolist() == [True, False]


def test_a_tiny_run_writes_its_report(tmp_path, monkeypatch):
    monkeypatch.setitem(SYSTEMS, "short", SYSTEMS["short"]._replace(samples=12))
    monkeypatch.setattr(trials, "GUESSES", [guess for guess in trials.GUESSES if guess.name in ("right", "none")])
    report = run_study(tmp_path, seeds=2, systems=["short"], first_seed=3000, processes=1)
    text = report.markdown.read_text(encoding="utf-8")
    assert "Damped oscillator, position seen" in text
    assert len(pd.read_csv(report.trials)) == 2 * 5
    assert set(report.holding) == {"development"}
    before = report.trials.read_bytes()

    def fail(*_):
        raise ValueError("it is broken")

    monkeypatch.setattr(trials, "run_rival", fail)  # what was kept is not run again
    report = run_study(tmp_path, seeds=2, systems=["short"], first_seed=3000, processes=1)
    assert report.trials.read_bytes() == before
    assert not report.failed
    other = run_study(tmp_path, seeds=2, systems=["short"], first_seed=3001, processes=1)
    assert set(other.failed.values()) == {"ValueError: it is broken"}
    assert len(pd.read_csv(other.trials)) == 2 * 2
    assert "it is broken" in other.markdown.read_text(encoding="utf-8")
    with pytest.raises(SettingError, match="there is no system 'shrt'"):
        run_study(tmp_path, systems=["shrt"])
