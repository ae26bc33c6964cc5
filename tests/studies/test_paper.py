"""The study of the paper: selection, re-runs, resumption, and the measured figures."""

import csv
from functools import partial

import numpy as np
import pytest
from typer.testing import CliRunner

from pcnet.errors import SettingError
from studies import reporting
from studies.paper import conclude, figures, reproduce
from studies.paper.__main__ import app
from studies.paper.design import GRIDS, RATIOS, Cell, build, ratio_name, realisations
from studies.paper.run import EVERY
from support.paths import DATA


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("study")


@pytest.fixture(scope="module")
def done(folder):
    """A small study with three figures, which are drawn coarsely and without a layout because that is quicker."""
    makers = figures.makers

    def plain(make):
        drawing = make()
        drawing.figure.set_layout_engine("none")
        return drawing

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PCNET_ENGINE", "compiled")
        patch.setattr(reporting, "DPI", 40)
        patch.setattr(figures, "makers", lambda found: [partial(plain, make) for make in makers(found)[:3]])
        return reproduce(folder, grid="small", data="white", seeds=2, observations=200, processes=1, progress=False)


def test_grids_have_the_sizes_of_the_paper():
    def sizes(grid):
        return int(np.prod([len(values) for name, values in GRIDS[grid].items() if name != "model"]))

    assert (sizes("paper"), sizes("full")) == (1512, 6048)
    assert all(len(GRIDS[grid]["model"]) == 2 for grid in GRIDS)


def test_settings_reach_the_model():
    graph, schedule = build(
        "glv", 3, 10.0, "paper", kappa=0.5, every=128, beta_lambda=0.1, beta_theta=0.2, sd_lambda_x=0.1, sd_lambda_y=0.5
    )
    assert graph["x"].integrator.kappa.item() == 0.5
    assert graph["lambda_x"].prior_mean.exp().item() == pytest.approx(500 * np.exp(-(0.1**2) / 2))
    assert graph["lambda_y"].prior_mean.exp().item() == pytest.approx(5000 * np.exp(-(0.5**2) / 2))
    assert graph["lambda_y"].estimator.averaging.beta.item() == 0.1
    assert graph["theta"].estimator.averaging.beta.item() == 0.2
    assert {int(act.clock.every) for act in schedule.acts} == {1, 128}


def test_replicates_differ_and_the_first_is_the_authors():
    first, second = realisations("authors", 2, 50)
    measured = np.load(DATA / "authors_process.npz")
    np.testing.assert_allclose(first.observations.numpy(), measured["observations"][:50], rtol=1e-12)
    assert not np.allclose(first.observations, second.observations)


def test_winners_have_the_lowest_free_action(done):
    table = done.results.table
    assert len(table) == 2 * 2 * 7 * 2
    for row in done.results.winners.to_dict("records"):
        cell = table
        for name in ("model", "orders", "ratio", "replicate"):
            cell = cell[cell[name] == row[name]]
        assert row["free_action"] == cell["free_action"].min()


def test_re_runs_agree_with_the_sweep(done):
    """Error and free action of the full trace equal those summed during the sweep."""
    truth = done.results.realisations[0].states.numpy()
    winners = done.results.winners
    for row in winners[winners["replicate"] == 0].to_dict("records"):
        result = done.results.traces[Cell(row["model"], row["orders"], row["ratio"])]
        assert ((result.mean("x")[:, 0] - truth) ** 2).mean() == pytest.approx(row["x.mse"], rel=1e-9)
        assert result.free_energy.sum() == pytest.approx(row["free_action"], rel=1e-9)
        assert result.accuracy.sum() == pytest.approx(row["accuracy"], rel=1e-9)
        assert result.mean("theta")[-1, 0] == pytest.approx(row["theta.mean[0]"], rel=1e-9)


def test_recorded_parameters_of_all_replicates(done):
    for cell, slow in done.results.slow.items():
        full = done.results.traces[cell]
        assert slow.batch_shape == (2,)
        np.testing.assert_array_equal(slow.times, full.times[EVERY - 1 :: EVERY])
        np.testing.assert_array_equal(slow.mean("theta")[0], full.mean("theta")[EVERY - 1 :: EVERY])
        last = done.results.winners.set_index(["model", "orders", "ratio", "replicate"]).loc[(*cell, 1)]
        assert slow.mean("lambda_y")[1, -1, 0] == pytest.approx(last["lambda_y.mean[0]"], rel=1e-9)


def test_report_and_figures_are_there(done, folder):
    assert done.report.html.stat().st_size > 30_000
    assert done.report.markdown.read_text(encoding="utf-8").count("figures/") == 3
    assert len(list((folder / "figures").glob("*.png"))) == 3
    assert "GLV, 3 orders" in conclude(done)


@pytest.mark.slow
def test_a_second_call_computes_nothing_again(done, folder):
    before = done.study.to_dataframe()[["free_action", "seconds"]]
    again = reproduce(folder, grid="small", data="white", seeds=2, observations=200, processes=1, progress=False)
    assert before.equals(again.study.to_dataframe()[["free_action", "seconds"]])
    assert again.report.html.stat().st_size > 100_000
    assert again.report.markdown.read_text(encoding="utf-8").count("figures/") >= 10
    assert len(list((folder / "figures").glob("*.png"))) >= 10


@pytest.mark.slow
def test_command_line(folder, done):
    arguments = [str(folder), "--grid", "small", "--data", "white", "--seeds", "2", "--processes", "1"]
    printed = CliRunner().invoke(app, [*arguments, "--observations", "200"])
    assert printed.exit_code == 0, printed.output
    assert "times a loop of single runs" in printed.output
    other = CliRunner().invoke(app, [*arguments, "--observations", "300"])
    assert other.exit_code == 2
    assert "study of other observations" in other.output
    assert "Traceback" not in other.output
    assert CliRunner().invoke(app, ["--data", "pink"]).exit_code == 2


def test_invalid_settings_are_rejected(tmp_path):
    with pytest.raises(SettingError, match="there is no grid 'huge'; choose paper, full, small"):
        reproduce(tmp_path, grid="huge")
    for options in ({"seeds": 0}, {"observations": 199}):
        with pytest.raises(SettingError, match="seeds must be 1 or more, observations 200 or more"):
            reproduce(tmp_path, **options)


@pytest.mark.slow
def test_the_whole_study_reproduces_the_measured_errors(tmp_path):
    """3,024 inversions of the authors' 10,000 observations: the MSE of every cell within 2 % of the measured one."""
    done = reproduce(tmp_path, progress=True)
    assert len(done.results.table) == 2 * 1512
    assert not done.results.table["diverged_at"].notna().any()
    errors = done.results.winners.set_index(["model", "orders", "ratio"])["x.mse"]
    with (DATA / "authors_study.csv").open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            for ratio in RATIOS:
                text = row[ratio_name(ratio)]
                rounding = 0.5 * 10.0 ** -len(text.partition(".")[2])
                expected = float(text)
                found = errors[row["model"], int(row["orders"]), ratio]
                assert found == pytest.approx(expected, abs=0.02 * expected + rounding), (
                    row["model"],
                    row["orders"],
                    text,
                )
