"""The calibration study: measures and baselines against closed forms, targets, and a tiny run."""

import json
import math
from statistics import NormalDist

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pcnet.errors import SettingError, StudyError
from pcnet.simulate import glv_process, smooth_noise
from studies.calibration import baselines, calibrate, conclude, design, measures, methods, targets, trials
from studies.calibration.results import summarise


# --- measures --------------------------------------------------------------------------------------------------------
@given(st.integers(1, 500), st.floats(0, 1))
def test_wilsons_interval_solves_its_quadratic(trials_, share):
    """Its ends are where |p̂ − p| = z√(p(1−p)/n)."""
    z = NormalDist().inv_cdf(0.975)
    found = measures.wilson(share, trials_)
    for p in (found.low, found.high):
        if 0 < p < 1:
            assert abs(share - p) == pytest.approx(z * math.sqrt(p * (1 - p) / trials_), abs=1e-7)
    assert found.low - 1e-12 <= share <= found.high + 1e-12


def test_no_trials_give_no_interval():
    assert all(math.isnan(value) for value in measures.wilson(0.5, 0))


def test_coverage_of_gaussian_beliefs_is_that_of_the_normal_distribution():
    rng = np.random.default_rng(0)
    truth, sd = rng.normal(size=(50, 400, 3)), 0.3
    right = truth + sd * rng.normal(size=truth.shape)
    for scale in (1.0, 0.5):  # of the sd that is claimed
        expected = 2 * NormalDist().cdf(2 * scale) - 1
        found = measures.coverage(right, np.full_like(right, scale * sd), truth)
        assert found.shape == (50,)
        assert found.mean() == pytest.approx(expected, abs=4 * math.sqrt(0.25 / truth.size))


def test_nan_is_not_covered():
    truth = np.zeros((1, 2))
    assert measures.coverage(np.array([[0.0, np.nan]]), np.ones((1, 2)), truth) == pytest.approx(0.5)


def test_errors_by_seed():
    truth = np.zeros((2, 4, 3))
    off = truth + np.array([1.0, -2.0])[:, None, None]
    assert measures.mean_squared_error(off, truth) == pytest.approx([1, 4])
    assert measures.largest_error(np.array([[0.1, -0.4], [0.2, 0.0]]), np.zeros(2)) == pytest.approx([0.4, 0.2])


# --- rivals ----------------------------------------------------------------------------------------------------------
def test_the_extended_filter_of_a_linear_process_equals_the_joint_gaussian():
    """Filtered beliefs are the conditional of the joint Gaussian of all states given the observations so far."""
    rng = np.random.default_rng(1)
    steps, n, d = baselines.EVERY, 3, 2
    a = 0.9 * np.linalg.qr(rng.normal(size=(n, n)))[0]
    q, r = np.diag([0.1, 0.2, 0.3]), np.diag([0.5, 0.4])
    c = rng.normal(size=(d, n))
    first, spread = rng.normal(size=n), np.eye(n) * 0.7
    y = rng.normal(size=(1, steps, d))
    # the last state and all observations but the first as linear functions of (s_0, q_1, …): mean and covariance
    maps = [
        np.concatenate(
            [np.linalg.matrix_power(a, t)]
            + [np.linalg.matrix_power(a, t - k) if k <= t else np.zeros((n, n)) for k in range(1, steps)],
            1,
        )
        for t in range(steps)
    ]
    sources = np.kron(np.eye(steps), q)
    sources[:n, :n] = spread
    centre = np.concatenate([first, np.zeros(n * (steps - 1))])
    seen = np.concatenate([c @ each for each in maps[1:]])
    noise = np.kron(np.eye(steps - 1), r)
    gain = maps[-1] @ sources @ seen.T @ np.linalg.inv(seen @ sources @ seen.T + noise)
    mean = maps[-1] @ centre + gain @ (y[0, 1:].ravel() - seen @ centre)
    covariance = maps[-1] @ sources @ maps[-1].T - gain @ seen @ sources @ maps[-1].T

    tensor = torch.from_numpy
    found = baselines.extended_kalman(
        lambda s: tensor(a) @ s, tensor(y), tensor(first)[None], tensor(spread)[None], tensor(q), tensor(c), tensor(r)
    )
    assert found.mean.shape == (1, 1, n)
    assert found.mean[0, 0].numpy() == pytest.approx(mean, abs=1e-10)
    assert found.sd[0, 0].numpy() == pytest.approx(np.sqrt(np.diag(covariance)), abs=1e-10)


@pytest.mark.parametrize("width", [5.0, 50.0])
def test_the_markov_process_has_nearly_the_autocorrelation_of_smooth_noise(width):
    forward, fresh, settled = baselines.markov(width)
    assert float(settled[0, 0]) == pytest.approx(1)
    assert torch.allclose(forward @ settled @ forward.T + fresh, settled, atol=1e-10)
    assert float(torch.linalg.eigvalsh(fresh).min()) > -1e-10
    at, worst = settled, 0.0
    for lag in range(1, int(4 * width)):
        at = forward @ at
        worst = max(worst, abs(float(at[0, 0]) - math.exp(-((lag / width) ** 2) / 4)))
    assert worst < 0.05


def test_matched_noise_has_the_power_of_smooth_noise_at_low_frequencies():
    """The variance of long means of smooth noise is that of white noise which is stronger by the factor."""
    process = design.CASES["smooth5"].process
    means = smooth_noise(400_000, 1, width=5.0, seed=3).view(1000, 400).mean(1)
    assert float(means.var() * 400) == pytest.approx(process.spectral_factor, rel=0.15)


@pytest.mark.slow
def test_the_unscented_filter_agrees_with_the_extended_one_where_noise_is_small():
    pytest.importorskip("dynamax")
    from studies.calibration import unscented

    case = design.CASES["white"]
    observations = case.process.simulate(600, [design.DEVELOPMENT]).observations
    theirs, ours = unscented.run_filter(case, observations, matched=False), baselines.run_filter(case, observations)
    assert theirs.mean.shape == ours.mean.shape
    assert bool(((theirs.mean - ours.mean)[:, -1].abs() < 0.5 * ours.sd[:, -1]).all())
    assert torch.allclose(theirs.sd[:, -1], ours.sd[:, -1], rtol=0.2)


# --- processes -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "options"), [("white", {"noise": "white"}), ("smooth5", {"noise": "smooth", "width": 0.05})]
)
def test_the_data_are_those_of_the_glv_process(name, options):
    found = design.CASES[name].process.simulate(300, [1000, 1001])
    expected = glv_process(300, clamp_observations=False, seed=[1000, 1001], **options)
    assert torch.equal(found.states, expected.states)
    assert torch.equal(found.observations, expected.observations)


def test_baselines_use_the_true_flow():
    model = design.CASES["white"].model
    x, theta = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert model.plain_flow is not None
    assert torch.allclose(model.plain_flow(x, theta), model.flow(x, theta))


def test_a_jump_changes_only_the_second_half():
    jumped = design.CASES["jump-white"].process.simulate(400, [1000])
    steady = design.CASES["white"].process.simulate(400, [1000])
    assert torch.equal(jumped.states[:, :201], steady.states[:, :201])
    assert not torch.allclose(jumped.states[:, 210:], steady.states[:, 210:], atol=1e-4)
    x, z = jumped.states[0], jumped.state_noise[0]
    flow = design.CASES["white"].model.flow
    step = x[300] + design.DT * (flow(x[300], torch.tensor(design.JUMP_TO, dtype=torch.float64)) + z[300])
    assert torch.allclose(x[301], step)


def test_development_seeds_and_held_out_seeds_are_disjoint():
    assert design.DEVELOPMENT + 10_000 <= design.HELD_OUT


# --- verdicts --------------------------------------------------------------------------------------------------------
def _rows(**columns):
    count = len(next(iter(columns.values())))
    return pd.DataFrame({"raw": [0.01] * count, "diverged": [False] * count, **columns})


def test_a_summary_counts_accurate_and_failed_seeds():
    found = summarise(
        _rows(
            mse=[1.0, 3.0, np.nan, 2.0],
            precision_y=[1.19, 1.21, np.nan, 0.81],
            precision_x=[0.51, 1.9, np.nan, 2.1],
            error_later=[0.01, 0.03, np.nan, 0.02],
            diverged=[False, False, True, False],
        )
    )
    assert (found.seeds, found.diverged, found.mse) == (4, 1, 2.0)
    assert (found.near_y.value, found.near_x.value, found.followed.value) == (0.5, 0.5, 0.5)
    assert math.isnan(found.error)


def test_verdicts_state_the_margin():
    good, bad = summarise(_rows(mse=[1.2])), summarise(_rows(mse=[1.5]))
    rival = summarise(_rows(mse=[1.0]))
    assert targets.ratio("white", "", good, rival, "mse", 1.3)[3:] == ("holds", "")
    assert targets.ratio("white", "", bad, rival, "mse", 1.2)[3:] == ("does not hold", "25 %")
    assert targets.ratio("white", "", bad._replace(mse=12.0), rival, "mse", 1.2).missed == "10 ×"
    assert targets.ratio("white", "", good._replace(diverged=1), rival, "mse", 1.3).verdict == "does not hold"
    assert targets.within("white", "", measures.wilson(0.95, 100)).verdict == "holds"
    assert targets.within("white", "", measures.wilson(1.0, 100)).missed == "1.0 points"
    assert targets.within("white", "", measures.wilson(0.5, 100)).missed == "40.0 points"
    assert targets.at_least("white", "", measures.wilson(0.9, 100)).verdict == "holds"
    assert targets.at_least("white", "", measures.wilson(math.nan, 0)).verdict == "not measured"


# --- the whole -------------------------------------------------------------------------------------------------------
def test_every_method_and_prior_is_tried():
    found = trials.list_trials(list(design.CASES))
    assert len({(t.case, t.method, t.prior) for t in found}) == len(found)
    assert sum(t.case == "smooth50" for t in found) == 5 + 5 + 4


@pytest.mark.parametrize(
    ("case", "method"),
    [
        pytest.param("smooth5", "pcnet", marks=pytest.mark.slow),
        ("white", "paper"),
        ("smooth50", "ekf noise as states"),
    ],
)
def test_a_trial_has_a_row_for_each_seed(case, method, monkeypatch):
    prior = design.PRIORS[1] if method in ("pcnet", "paper") else None
    seeds = [1000, 1001, 1002]
    world = design.CASES[case].process.simulate(200, seeds)
    run, found = trials.METHODS[method], []
    monkeypatch.setitem(trials.METHODS, method, lambda *given: found.append(run(*given)) or found[-1])
    outcome = trials.run_trial(trials.Trial(case, method, prior), world, seeds)
    assert [row["seed"] for row in outcome.rows] == [1000, 1001, 1002]
    (beliefs,) = found
    assert beliefs.theta.shape == (3, 20, 3)
    np.testing.assert_array_equal(outcome.spread[1], np.median(beliefs.theta[..., 0], 0))
    assert trials.TrialResult.of(outcome.trial, json.loads(json.dumps(outcome.data()))).spread.shape == (3, 20)
    for row, theta in zip(outcome.rows, beliefs.theta[:, -1], strict=True):
        assert row["error"] == pytest.approx(np.abs(theta - np.array([0.2, -0.4, 0.1])).max())
        assert 0 < row["mse"] < 1
        assert math.isnan(row["precision_y"]) == (prior is None)


def test_without_dynamax_its_filter_is_skipped_with_a_reason(monkeypatch):
    monkeypatch.setattr(trials, "why_unavailable", lambda: "it is not there")
    world = design.CASES["white"].process.simulate(200, [1000])
    assert trials.run_trial(trials.Trial("white", "ukf", None), world, [1000]).skipped == "it is not there"


def test_a_tiny_study_has_a_report(tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "why_unavailable", lambda: "it is not there")
    white = design.CASES["white"]._replace(methods=("pcnet", "ekf", "ukf"), priors=design.RIGHT)
    monkeypatch.setitem(design.CASES, "white", white)
    said = []
    names = ["white", "jump-white"]
    done = calibrate(tmp_path, seeds=2, samples=200, cases=names, first_seed=1000, processes=1, log=said.append)
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"report.md", "report.html", "seeds.csv", "cells.json", "cells", "figures"}
    assert len(list((tmp_path / "figures").glob("*.png"))) == 4
    assert len(pd.read_csv(done.report.seeds)) == 2 * 4
    summary = json.loads(done.report.cells.read_text())
    assert not summary["held_out"]
    assert [(cell["case"], cell["method"]) for cell in summary["cells"]] == [
        ("white", "pcnet"),
        ("white", "ekf"),
        ("jump-white", "pcnet"),
        ("jump-white", "ekf random walk"),
    ]
    text = done.report.markdown.read_text()
    assert "**not** the held-out ones" in text
    assert "it is not there" in text
    assert len(done.judgements) == 4 + 2 + 1
    assert "Targets:" in conclude(done)
    assert len(said) == 5


@pytest.fixture
def small(monkeypatch):
    """A study of three quick cells; the list of those that were run."""
    white = design.CASES["white"]._replace(methods=("paper", "ekf"), priors=design.PRIORS[:2])
    monkeypatch.setitem(design.CASES, "white", white)
    ran = []
    for name in white.methods:
        run = trials.METHODS[name]
        monkeypatch.setitem(
            trials.METHODS, name, lambda *given, name=name, run=run: ran.append((name, given[1].name)) or run(*given)
        )
    return ran


SMALL = {"seeds": 2, "samples": 200, "cases": ["white"], "first_seed": 1000, "processes": 1}


def test_a_study_that_was_stopped_goes_on_where_it_was(tmp_path, small):
    def stop(said):
        if said.startswith("2 of 3"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(tmp_path / "stopped", **SMALL, log=stop)
    before, said = small.copy(), []
    done = calibrate(tmp_path / "stopped", **SMALL, log=said.append)
    assert len(before) == 2
    assert len(small) == len(set(small)) == 3
    assert sum("done before" in each for each in said) == done.results.kept == 2
    assert "2 of 3 cells were kept from former runs" in done.report.markdown.read_text()
    whole = calibrate(tmp_path / "whole", **SMALL)
    assert len(small) == 6
    assert done.report.seeds.read_bytes() == whole.report.seeds.read_bytes()
    assert [path.read_bytes() for path in sorted((tmp_path / "stopped" / "figures").iterdir())] == [
        path.read_bytes() for path in sorted((tmp_path / "whole" / "figures").iterdir())
    ]


@pytest.mark.parametrize("change", [{"seeds": 3}, {"samples": 210}, {"first_seed": 1001}])
def test_other_settings_are_run_anew(change, tmp_path, small):
    calibrate(tmp_path, **SMALL)
    assert calibrate(tmp_path, **SMALL | change).results.kept == 0
    assert len(small) == 6
    assert calibrate(tmp_path, **SMALL).results.kept == 3


def test_a_trial_that_fails_is_named_and_does_not_lose_the_others(tmp_path, small, monkeypatch):
    run = trials.METHODS["ekf"]
    monkeypatch.setitem(trials.METHODS, "ekf", lambda *_: 1 / 0)
    done = calibrate(tmp_path, **SMALL)
    assert list(done.results.failed.values()) == ["ZeroDivisionError: division by zero"]
    assert set(done.results.table["method"]) == {"paper"}
    for text in (conclude(done), done.report.markdown.read_text()):
        assert "extended Kalman filter" in text or "EKF" in text
        assert "ZeroDivisionError: division by zero" in text
    assert [each["method"] for each in json.loads(done.report.cells.read_text())["failed"]] == ["ekf"]
    assert "not measured" in {each.verdict for each in done.judgements}
    monkeypatch.setitem(trials.METHODS, "ekf", run)
    small.clear()
    again = calibrate(tmp_path, **SMALL)
    assert not again.results.failed
    assert [method for method, _ in small] == ["ekf"]


def test_an_error_says_that_all_have_failed(tmp_path, small, monkeypatch):
    for name in ("ekf", "paper"):
        monkeypatch.setitem(trials.METHODS, name, lambda *_: 1 / 0)
    with pytest.raises(StudyError, match="no trial has succeeded; ZeroDivisionError: division by zero"):
        calibrate(tmp_path, **SMALL)


def test_a_method_may_run_some_seeds_after_the_other(monkeypatch):
    """Each seed has its own beliefs, in order, whatever runs with it."""
    monkeypatch.setattr(methods, "SEEDS_AT_ONCE", 3)
    sizes = []

    def method(case, prior, observations):
        sizes.append(len(observations))
        each = observations.sum((1, 2)).numpy()
        whole = each[:, None, None] * np.ones((1, 4, 2))
        return measures.Beliefs(np.arange(4), whole, whole + 1, whole + 2, whole + 3, each, each + 1, each > 0)

    observations = torch.randn(8, 4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    case = design.CASES["white"]
    found = methods._in_parts(method)(case, case.priors[0], observations)
    assert sizes == [3, 3, 2]
    for part, expected in zip(found, method(case, case.priors[0], observations), strict=True):
        np.testing.assert_allclose(part, expected, rtol=1e-14)


def test_an_unknown_case_is_rejected(tmp_path):
    with pytest.raises(SettingError, match="there is no case 'red'; cases: white"):
        calibrate(tmp_path, cases=["red"])
    with pytest.raises(SettingError, match="samples 200 or more"):
        calibrate(tmp_path, samples=10)
