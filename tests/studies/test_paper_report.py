"""Figures show the results, claims are checked against them, and the report holds both, whatever the input."""

import base64
import contextlib
import math
import re
from html.parser import HTMLParser

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.collections import PolyCollection

from pcnet import simulate
from pcnet.files import atomic_write
from pcnet.graphs import odem
from pcnet.results.result import Result, Trace
from studies import reporting
from studies.paper import checks, claims, figures, report
from studies.paper.design import MODELS, RATIOS, Cell, ratio_name
from studies.paper.results import Speed, StudyResults

SLOW = ("theta", "lambda_x", "lambda_y")
SPEED = Speed(90.0, 112, 300, 5000.0, 50.0, 2, 3 * 2**20)
CELLS = [Cell(m, k, c) for m in MODELS for k in (2, 3) for c in RATIOS]


def lowest(table):
    """The row with the lowest free action for each model, orders, ratio and replicate, where one is left."""
    kept = table[table["free_action"].notna()]
    best = kept.groupby(["model", "orders", "ratio", "replicate"], sort=True)["free_action"].idxmin()
    return kept.loc[best].reset_index(drop=True)


@pytest.fixture(autouse=True)
def _nothing_global_is_touched():
    before = dict(mpl.rcParams)
    yield
    assert dict(mpl.rcParams) == before
    import matplotlib.pyplot as plt

    assert plt.get_fignums() == []


# --- findings of real runs -------------------------------------------------------------------------------------------
def part(result, chosen, every=1, nodes=None):
    """Some batch elements of a result, at every `every`-th time."""
    single = isinstance(chosen, int)
    kept = {key: t for key, t in result.traces.items() if nodes is None or key.split(".")[0] in nodes}
    return Result(
        traces={
            key: Trace(t.values[chosen][::every] if single else t.values[chosen][:, ::every], t.dims)
            for key, t in kept.items()
        },
        batch_shape=() if single else (len(chosen),),
        times=result.times[::every],
        free_action=result.free_action[chosen],
        fallbacks={},
        observations=result.observations,
        roles=result.roles,
        graph="",
        schedule="",
    )


def small_study(conventions, replicates, samples=150, kappas=(1.0, 0.25)):
    seeds = list(range(42, 42 + replicates))
    world = simulate.glv_process(samples=samples, noise="authors", seed=seeds)
    worlds = tuple(simulate.Simulation(world.times, *(v[r] for v in world[1:])) for r in range(replicates))
    grids = np.meshgrid(np.arange(replicates), RATIOS, kappas, indexing="ij")
    which, ratio, kappa = (grid.reshape(-1) for grid in grids)
    parts, traces, slow = [], {}, {}
    for model in MODELS:
        for orders in (2, 3):
            graph, schedule = odem(
                model=model,
                orders=orders,
                kappa=torch.tensor(kappa),
                expected_precision_y=torch.tensor(500 * ratio),
                conventions=conventions,
            )
            result = graph.run(world.observations[torch.tensor(which)], schedule=schedule)
            truth, mean = world.states.numpy()[which], result.mean("x")[:, :, 0]
            rows = pd.DataFrame({"model": model, "orders": orders, "ratio": ratio, "kappa": kappa, "replicate": which})
            rows = rows.assign(every=64, beta_lambda=0.0, beta_theta=0.0, sd_lambda_x=0.1, sd_lambda_y=0.1)
            rows = rows.assign(diverged_at=math.nan, diverged_node=None, free_action=result.free_action)
            rows = rows.assign(accuracy=result.accuracy.sum(-1), complexity=result.complexity.sum(-1))
            rows["x.mse"] = ((mean - truth) ** 2).mean((1, 2))
            rows["x.coverage"] = (np.abs(mean - truth) <= 2 * result.sd("x")[:, :, 0]).mean((1, 2))
            for node in SLOW:
                for quantity in ("mean", "sd"):
                    final = result.get(node, quantity)[:, -1]
                    for i in range(final.shape[-1]):
                        rows[f"{node}.{quantity}[{i}]"] = final[:, i]
            parts.append(rows)
            best = lowest(rows.assign(element=rows.index))
            for c in RATIOS:
                elements = best[best["ratio"] == c].sort_values("replicate")["element"].tolist()
                traces[Cell(model, orders, c)] = part(result, elements[0])
                slow[Cell(model, orders, c)] = part(result, elements, 10, SLOW)
    table = pd.concat(parts, ignore_index=True)
    return StudyResults("authors", "small", conventions, worlds, table, lowest(table), traces, slow, SPEED)


@pytest.fixture(scope="module")
def found():
    return small_study("authors", 2)


@pytest.fixture(scope="module")
def single():
    """One replicate, a log-precision for every channel, and nothing left of one cell."""
    whole = small_study("paper", 1, kappas=(1.0,))
    return without(whole, Cell("lorenz", 3, 50.0))


def without(findings, cell):
    """As if all inversions of a cell had diverged."""
    table = findings.table.copy()
    lost = (table["model"] == cell.model) & (table["orders"] == cell.orders) & (table["ratio"] == cell.ratio)
    table.loc[lost, ["free_action", "accuracy", "complexity", "x.mse", "x.coverage"]] = math.nan
    table.loc[lost, "diverged_at"] = 120.0
    table["diverged_node"] = table["diverged_node"].astype(object)
    table.loc[lost, "diverged_node"] = "lambda_y"
    kept = {name: {c: r for c, r in getattr(findings, name).items() if c != cell} for name in ("traces", "slow")}
    return findings._replace(table=table, winners=lowest(table), **kept)


@pytest.fixture(scope="module")
def drawn(single, tmp_path_factory):
    """Four of the figures in files, coarse ones: that is quicker."""
    some = [figures.makers(single)[i] for i in (0, 1, 3, 7)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reporting, "DPI", 40)
        patch.setattr(figures, "makers", lambda findings: some)
        return figures.draw(single, tmp_path_factory.mktemp("report") / "figures")


@pytest.fixture(scope="module")
def drawings(found, single):
    """Every figure of both studies."""
    return [[make() for make in figures.makers(findings)] for findings in (found, single)]


def winners_of(findings, cell):
    rows = findings.winners
    return rows[(rows["model"] == cell.model) & (rows["orders"] == cell.orders) & (rows["ratio"] == cell.ratio)]


# --- findings --------------------------------------------------------------------------------------------------------
def test_names_of_ratios():
    assert [ratio_name(ratio) for ratio in RATIOS] == ["1/50", "1/25", "1/10", "1", "10", "25", "50"]


def test_lowest_free_action_of_each_cell_and_replicate():
    table = pd.DataFrame(
        {
            "model": "glv",
            "orders": 2,
            "ratio": [1.0, 1.0, 1.0, 10.0, 10.0],
            "replicate": [0, 0, 1, 0, 1],
            "free_action": [3.0, 2.0, 9.0, math.nan, -5.0],
        }
    )
    best = lowest(table)
    rows = best[["ratio", "replicate", "free_action"]].to_numpy().tolist()
    assert rows == [[1.0, 0, 2.0], [1.0, 1, 9.0], [10.0, 1, -5.0]]


# --- figures ---------------------------------------------------------------------------------------------------------
def lines(ax):
    return [np.asarray(line.get_ydata()) for line in ax.get_lines()]


def bands(ax):
    return [c.get_paths()[0].vertices for c in ax.collections if isinstance(c, PolyCollection)]


def averages(ax):
    return [np.asarray(container.lines[0].get_ydata()) for container in ax.containers]


def words(ax):
    return [text.get_text() for text in ax.texts]


def test_every_axis_is_labelled(drawings):
    for drawing in [*drawings[0], *drawings[1]]:
        axes = drawing.figure.axes
        places = [ax.get_subplotspec() for ax in axes]
        for ax, place in zip(axes, places, strict=True):
            left = axes[[p.rowspan.start for p in places].index(place.rowspan.start)]
            assert ax.get_ylabel() or ax.get_shared_y_axes().joined(ax, left), drawing.name
            assert ax.get_xlabel() or place.rowspan.stop < max(p.rowspan.stop for p in places), drawing.name
        assert drawing.figure.legends
        assert drawing.caption.endswith(".")


def test_process_shows_states_and_observations(found):
    above, below = figures.process(found).figure.axes
    world = found.realisations[0]
    for ax, values in ((above, world.states), (below, world.observations)):
        np.testing.assert_array_equal(np.stack(lines(ax)), values.numpy().T)


def test_errors_are_geometric_means(found):
    drawing = figures.errors(found)
    assert len(drawing.figure.axes) == 2
    for model, ax in zip(MODELS, drawing.figure.axes, strict=True):
        assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
        for orders, shown in zip((2, 3), averages(ax), strict=True):
            for ratio, value in zip(RATIOS, shown, strict=True):
                first, second = winners_of(found, Cell(model, orders, ratio))["x.mse"]
                assert value == pytest.approx(math.sqrt(first * second))
        levels = [values[0] for values in lines(ax) if len(values) == 2 and values[0] == values[1]]
        assert levels == pytest.approx([found.state_variance, found.raw_mse])
    assert "geometric mean over 2 replicates" in drawing.caption


def test_error_bars_span_the_replicates(found):
    ax = figures.errors(found).figure.axes[0]
    (bar,) = ax.containers[0].lines[2]
    ends = np.array([segment[:, 1] for segment in bar.get_segments()])
    rows = found.winners.query("model == 'lorenz' and orders == 2").groupby("ratio")["x.mse"]
    np.testing.assert_allclose(ends, np.stack([rows.min(), rows.max()], axis=1))


def test_free_action_is_the_sum_of_its_lines(found):
    for ax in figures.free_actions(found).figure.axes:
        shown = averages(ax)  # free action, complexity, −accuracy; two and three orders of each
        assert len(shown) == 6
        for k in (0, 1):
            np.testing.assert_allclose(shown[k], shown[2 + k] + shown[4 + k], rtol=1e-9)


def test_negative_free_actions_can_be_drawn(found):
    winners = found.winners.assign(free_action=-found.winners["free_action"])
    drawing = figures.free_actions(found._replace(winners=winners))
    assert drawing.figure.axes[0].get_yscale() == "symlog"


@pytest.mark.parametrize("node", ["lambda_y", "lambda_x"])
def test_log_precisions_with_bands_and_replicates(found, node):
    figure = figures.log_precisions(found, node).figure
    places = [(model, orders) for orders in (2, 3) for model in MODELS]
    for (model, orders), ax in zip(places, figure.axes, strict=True):
        curves = [values for values in lines(ax) if len(values) > 2]
        ends = [values for values in lines(ax) if len(values) == 2]
        assert len(curves) == len(bands(ax)) == len(RATIOS)
        true = math.log({"lambda_y": 100, "lambda_x": 400}[node])
        assert ends.pop() == pytest.approx([true, true])
        for ratio, curve, band, reached in zip(RATIOS, curves, bands(ax), ends, strict=True):
            result = found.slow[Cell(model, orders, ratio)]
            mean, sd = result.mean(node)[..., 0], result.sd(node)[..., 0]
            np.testing.assert_allclose(curve, mean.mean(0))
            assert band[:, 1].max() == pytest.approx((mean.mean(0) + 2 * sd.mean(0)).max())
            np.testing.assert_allclose(reached, [mean[:, -1].min(), mean[:, -1].max()])
            low, high = ax.get_ylim()
            assert low <= curve.min() <= curve.max() <= high


def test_averages_over_channels_are_labelled(single):
    drawing = figures.log_precisions(single, "lambda_y")
    ax = drawing.figure.axes[0]
    assert "mean of 3 channels" in ax.get_ylabel()
    assert "averaged over 3" in drawing.caption
    np.testing.assert_allclose(lines(ax)[0], single.slow[Cell("lorenz", 2, 1 / 50)].mean("lambda_y")[0].mean(-1))


def test_parameters_with_true_values(found):
    figure = figures.parameters(found).figure
    truths = [None, None, 0.2, 0.2, -0.4, -0.4, 0.1, 0.1]
    names = ["ρ", "ρ", "a₁₂", "a₁₂", "a₁₃", "a₁₃", "a₂₃", "a₂₃"]
    for i, (ax, truth, name) in enumerate(zip(figure.axes, truths, names, strict=True)):
        level = [v[0] for v in lines(ax) if len(v) == 2 and v[0] == v[1]]
        assert (truth in level) == (truth is not None)
        assert name in ax.get_ylabel() or i % 2
        model, channel = ("lorenz", 0) if i < 2 else ("glv", i // 2 - 1)
        curves = [values for values in lines(ax) if len(values) > 2]
        for ratio, curve in zip(RATIOS, curves, strict=True):
            mean = found.slow[Cell(model, 2 + i % 2, ratio)].mean("theta")[..., channel].mean(0)
            np.testing.assert_allclose(curve, mean)


@pytest.mark.parametrize("orders", [2, 3])
def test_states_and_observations_row_by_row(found, orders):
    world = found.realisations[0]
    states, sensations = (make(found, orders) for make in (figures.inferred_states, figures.predicted_sensations))
    places = [Cell(model, orders, ratio) for ratio in RATIOS for model in MODELS]
    for cell, upper, lower in zip(places, states.figure.axes, sensations.figure.axes, strict=True):
        result = found.traces[cell]
        np.testing.assert_array_equal(np.stack(lines(upper)[:3]), world.states.numpy().T)
        np.testing.assert_array_equal(np.stack(lines(upper)[3:]), result.mean("x")[:, 0].T)
        np.testing.assert_array_equal(np.stack(lines(lower)[:3]), result.observation("y")[:, 0].T)
        np.testing.assert_array_equal(np.stack(lines(lower)[3:]), result.prediction("y")[:, 0].T)
        assert lower.get_lines()[0].get_alpha() < 1
        mse = winners_of(found, cell).query("replicate == 0")["x.mse"].item()
        assert f"MSE {mse:.2g}" in upper.get_title(loc="right")


def test_colours_of_ratios_are_all_different_and_ordered_by_lightness():
    colours = figures.ratio_colours(RATIOS)
    lightness = [np.dot([0.2126, 0.7152, 0.0722], mpl.colors.to_rgb(colour)) for colour in colours.values()]
    assert np.all(np.diff(lightness) > 0.02)


def test_a_cell_without_a_winner_is_marked(single, drawings):
    missing = "Lorenz, 3 orders, C = 50"
    for drawing in drawings[1]:
        if drawing.name not in ("process", "states_2_orders", "sensations_2_orders"):
            assert missing in drawing.caption
    panel = figures.inferred_states(single, 3).figure.axes[-2]
    assert words(panel) == [figures.NOTHING]
    assert np.isnan(averages(figures.errors(single).figure.axes[0])[1][-1])


def test_all_figures_are_drawn_without_any_winner(single):
    empty = single._replace(winners=single.winners.iloc[:0], traces={}, slow={})
    for make in figures.makers(empty):
        assert make().figure.axes


def test_all_result_figures_of_the_paper_are_drawn(drawings):
    names = ["process", "mse", "free_action", "log_precision_y", "log_precision_x", "parameters"]
    names += [f"{shown}_{orders}_orders" for shown in ("states", "sensations") for orders in (2, 3)]
    assert [drawing.name for drawing in drawings[0]] == names


def test_pictures_are_written_atomically(single, drawn, tmp_path, monkeypatch):
    for picture in drawn:
        assert picture.path.name == f"{picture.name}.png"
        assert picture.path.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(figures.Figure, "savefig", lambda self, file, **_: file.write(b"half") and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        figures.draw(single, tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- claims: findings made to measure --------------------------------------------------------------------------------
T, DT = 400, 0.05
VARIANCE, RAW = 2.0, 0.01
RANK = {ratio: i for i, ratio in enumerate(RATIOS)}


def sound_mse(cell, replicate):
    """Lorenz fails with two orders and tracks with three; GLV tracks with both and gains little."""
    level = {("lorenz", 2): 3.0, ("lorenz", 3): 0.6, ("glv", 2): 0.12, ("glv", 3): 0.1}[cell[:2]]
    return VARIANCE * level * 0.9 ** RANK[cell.ratio]


def sound_shift(node, cell):
    """How far a slow belief travels."""
    if node == "theta":
        return {("lorenz", 2): 0.1, ("lorenz", 3): 0.5}.get(cell[:2], 0.05)
    if cell.model == "glv":
        return 0.02
    return (0.05 if cell.ratio <= 1 else 1.0) * (0.9 if cell.orders == 3 else 1.0)


SOUND = {
    "replicates": 1,
    "mse": sound_mse,
    "action": lambda cell: {"lorenz": 1000.0, "glv": 100.0}[cell.model] * (1.05 if cell.orders == 3 else 1.0),
    "complexity": lambda cell: {2: 10.0, 3: 90.0}[cell.orders],
    "shift": sound_shift,
    "pace": lambda node, cell: 0.05,
    "sd": lambda node, cell: (1.0, 0.1),
    "sd_factor": lambda cell: {("lorenz", 3): 0.3, ("glv", 3): 0.8}.get(cell[:2], 1.0),
    "delay": lambda cell: 40 if cell == Cell("glv", 2, 1 / 50) else 0,
    "noise": lambda cell: (
        {1.0: 0.3, 10.0: 0.6, 25.0: 0.8, 50.0: 1.0}.get(cell.ratio, 0.1)
        * (cell.orders == 3)
        * (0.9 if cell.model == "lorenz" else 1.0)
    ),
    "surprise": lambda cell: sound_mse(cell, 0),
    "coverage": lambda cell: 0.95,
    "theta_offset": lambda cell: 0.01,
    "theta_sd": 0.02,
    "precision_offset": 0.1,
    "precision_sd": 0.1,
    "kappa": 0.5,
}
"""Findings for which the paper is right in everything; tests spoil one of them at a time."""


def world(seed):
    times = DT * np.arange(T)
    states = 2 + np.sqrt(2 * VARIANCE) * np.sin(2 * np.pi * times[:, None] / 10 + np.arange(3))
    noise = np.sqrt(RAW) * np.random.default_rng(seed).choice([-1.0, 1.0], size=states.shape)
    return simulate.Simulation(*(torch.tensor(v) for v in (times, states, states + noise, 0 * noise, noise)))


def made(**changes):
    options = SOUND | changes
    worlds = tuple(world(seed) for seed in range(options["replicates"]))
    rows, traces, slow = [], {}, {}
    for cell in CELLS:
        for r in range(options["replicates"]):
            row = {"model": cell.model, "orders": cell.orders, "ratio": cell.ratio, "replicate": r, "every": 64}
            row |= {"beta_lambda": 0.0, "beta_theta": 0.0, "sd_lambda_x": 0.1, "sd_lambda_y": 0.1}
            row |= {"diverged_at": math.nan, "diverged_node": None, "complexity": options["complexity"](cell)}
            row |= {"free_action": options["action"](cell), "x.coverage": options["coverage"](cell)}
            row |= {"accuracy": row["complexity"] - row["free_action"], "x.mse": options["mse"](cell, r)}
            for i, true in enumerate(simulate.GLV_PARAMETERS if cell.model == "glv" else [0.0]):
                row |= {f"theta.mean[{i}]": true + options["theta_offset"](cell), f"theta.sd[{i}]": options["theta_sd"]}
            for node, true in (("lambda_x", 400.0), ("lambda_y", 100.0)):
                row |= {f"{node}.mean[0]": math.log(true) + options["precision_offset"]}
                row |= {f"{node}.sd[0]": options["precision_sd"]}
            better = row | {"kappa": options["kappa"]}
            worse = [row | {"kappa": k, "free_action": 2e6, "x.mse": 2 * row["x.mse"]} for k in (1.0, 0.5, 0.25)]
            rows += [better, *worse]
        traces[cell] = fast(cell, worlds[0], options)
        slow[cell] = slowly(cell, options)
    table = pd.DataFrame(rows)
    return StudyResults("white", "paper", "paper", worlds, table, lowest(table), traces, slow, SPEED)


def holding(traces, batch, times):
    roles = {"x": "state", "y": "sensory", "theta": "parameter", "lambda_x": "precision", "lambda_y": "precision"}
    empty = np.zeros(batch)
    about = {"fallbacks": {}, "observations": T, "roles": roles, "graph": "", "schedule": ""}
    return Result(traces=traces, batch_shape=batch, times=times, free_action=empty, **about)


def fast(cell, process, options):
    states, seen = process.states.numpy(), process.observations.numpy()
    inferred = states + options["noise"](cell) * (seen - states)
    delay = options["delay"](cell)
    inferred = np.concatenate([np.repeat(inferred[:1], delay, 0), inferred[: T - delay]])
    predicted = seen + math.sqrt(options["surprise"](cell))
    shown = {"x.mean": inferred, "y.prediction": predicted, "y.observation": seen}
    traces = {key: Trace(value[:, None], ("order", "dimension")) for key, value in shown.items()}
    return holding(traces, (), process.times.numpy())


def slowly(cell, options):
    times = DT * np.arange(3, T, 4)
    traces = {}
    for node in SLOW:
        channels = 3 if (node, cell.model) == ("theta", "glv") else 1
        shape = (options["replicates"], len(times), channels)
        fall = np.exp(-times / (options["pace"](node, cell) * times[-1]))
        first, last = options["sd"](node, cell)
        sd = (last + (first - last) * fall) * (options["sd_factor"](cell) if node == "theta" else 1.0)
        for quantity, values in (("mean", options["shift"](node, cell) * (1 - fall)), ("sd", sd)):
            traces[f"{node}.{quantity}"] = Trace(np.broadcast_to(values[:, None], shape), ("dimension",))
    return holding(traces, (options["replicates"],), times)


def verdicts(findings):
    return {claim.title: claim.verdict for claim in claims.examine(findings)}


def test_synthetic_results_are_as_constructed():
    findings = made()
    assert findings.state_variance == pytest.approx(VARIANCE, rel=1e-9)
    assert findings.raw_mse == pytest.approx(RAW)
    assert len(findings.winners) == len(CELLS)


@pytest.mark.parametrize("replicates", [1, 3])
def test_all_claims_of_the_paper_hold_for_results_that_support_them(replicates):
    judged = [claim for claim in claims.examine(made(replicates=replicates)) if claim.source == "paper"]
    assert [claim.title for claim in judged if claim.verdict != "holds"] == []
    assert len({claim.title for claim in judged}) == len(judged)
    if replicates > 1:
        assert sum("Holds in 3 of 3 replicates." in claim.measured for claim in judged) > 20


def flat(value):
    return lambda *_: value


def on(kind, then, otherwise):
    """A function of (node,) cell that differs from another one for some cells, named by model and orders."""

    def choose(*given):
        cell = next(g for g in given if isinstance(g, Cell))
        return then(*given) if cell[:2] in kind else otherwise(*given)

    return choose


LORENZ, GLV = [("lorenz", 2), ("lorenz", 3)], [("glv", 2), ("glv", 3)]
SPOILED = {
    "The observation noise precision stays nearly constant in scenario-same": {"shift": flat(0.3)},
    "The state noise precision stays nearly constant in scenario-same": {"shift": flat(0.3)},
    "The observation noise precision adapts in scenario-different": {"shift": flat(0.3)},
    "The state noise precision adapts in scenario-different": {"shift": flat(0.3)},
    "The precisions settle": {"pace": flat(5.0), "shift": flat(1.0)},
    "The parameters settle": {"pace": flat(5.0), "shift": flat(1.0)},
    "Credible intervals narrow with data": {"sd": flat((0.1, 0.1))},
    "Intervals narrow quickly at first": {"pace": flat(5.0)},
    "A third order makes the parameters certain faster": {"sd_factor": flat(1.0)},
    "A third order makes the parameters certain faster particularly in scenario-different": {
        "sd_factor": lambda cell: {("lorenz", 3): 0.8, ("glv", 3): 0.3}.get(cell[:2], 1.0)
    },
    "A third order of motion lowers the error": {"mse": lambda cell, r: 0.1 * cell.orders},
    "The model of the right form has less error": {"mse": flat(0.1)},
    "The Lorenz model cannot track with two orders": {"mse": flat(0.9 * VARIANCE)},
    "The Lorenz model tracks with three orders": {"mse": flat(1.1 * VARIANCE)},
    "The Lorenz model tracks decently with three orders and C = 10": {"mse": flat(1.1 * VARIANCE)},
    "The GLV model tracks with two and with three orders": {"mse": flat(1.1 * VARIANCE)},
    "The GLV model gains less from a third order than the Lorenz model": {
        "mse": on([("glv", 2)], flat(50.0), sound_mse)
    },
    "With two orders tracking improves with C": {"mse": lambda cell, r: 1.0 + RANK[cell.ratio]},
    "The third order removes the lag of the GLV model": {"delay": flat(0)},
    "With three orders the inferred states get noisier with C": {"noise": flat(0.5)},
    "At C = 50 the GLV model ignores its dynamics with three orders, but not with two": {
        "noise": lambda cell: float(cell.orders == 2)
    },
    "Predicted sensations improve with C": {"surprise": lambda cell: 1.0 + RANK[cell.ratio]},
    "Even at C = 50 the Lorenz model predicts no sensations with two orders": {"surprise": flat(0.9 * VARIANCE)},
    "A third order improves predicted sensations": {"surprise": lambda cell: 1.0 * cell.orders},
    "The free action prefers the model of the right form": {"action": flat(100.0)},
    "The free action hardly changes with the order": {"action": lambda cell: 10.0**cell.orders},
    "A third order raises both accuracy and complexity": {
        "action": lambda cell: 10.0**cell.orders,
        "complexity": lambda cell: -1.0 * cell.orders,
    },
    "Up to C = 1 the Lorenz model with two orders hardly moves its precisions": {"shift": flat(0.3)},
    "With a third order the Lorenz model moves its observation noise precision less": {
        "shift": lambda node, cell: 1.0 * cell.orders
    },
    "With two orders ρ hardly moves": {"shift": flat(2.0)},
    "With three orders ρ moves more": {"shift": flat(0.3)},
}


def test_every_claim_of_the_paper_has_a_counterexample():
    assert {claim.title for claim in claims.examine(made()) if claim.source == "paper"} == set(SPOILED)


@pytest.mark.parametrize("title", SPOILED)
def test_claims_of_the_paper_can_fail(title):
    assert verdicts(made(**SPOILED[title]))[title] == "does not hold"


def test_constant_beliefs_count_as_converged():
    judged = verdicts(made(pace=flat(5.0), shift=flat(0.001)))
    assert judged["The precisions settle"] == judged["The parameters settle"] == "holds"


def test_a_persistent_lag_is_half_the_claim():
    judged = verdicts(made(delay=flat(40)))
    assert judged["The third order removes the lag of the GLV model"] == "holds in part"


def test_a_claim_that_holds_in_half_of_the_cases_holds_in_part():
    """A third order helps in one scenario only."""
    mse = on(GLV, lambda cell, r: 0.1 * cell.orders, sound_mse)
    (claim,) = (c for c in claims.examine(made(mse=mse)) if c.title == "A third order of motion lowers the error")
    assert claim.verdict == "holds in part"
    assert claim.measured.startswith("**7 of 14** cases. Lorenz: 7 of 7; GLV: 0 of 7.")


def test_exceptions_are_named():
    def mse(cell, r):
        return sound_mse(cell, r) * (100 if cell == Cell("glv", 3, 25.0) else 1)

    (claim,) = (c for c in claims.examine(made(mse=mse)) if c.title == "A third order of motion lowers the error")
    assert claim.verdict == "holds in part"
    assert "GLV: 6 of 7 (fails at C = 25)" in claim.measured


def test_replicates_are_counted_one_by_one():
    def mse(cell, r):
        return sound_mse(cell, r) if r < 2 else 1.0

    (claim,) = (
        c for c in claims.examine(made(replicates=3, mse=mse)) if c.title == "A third order of motion lowers the error"
    )
    assert "**28 of 42** cases" in claim.measured
    assert "Holds in 2 of 3 replicates." in claim.measured


def test_lag_is_measured_in_time():
    evidence = checks.StudyView(made())
    assert claims.lag(evidence, Cell("glv", 2, 1 / 50)) == pytest.approx(40 * DT)
    assert claims.lag(evidence, Cell("glv", 3, 1 / 50)) == 0.0


GOOD = {"mse": flat(0.9 * RAW), "precision_offset": 0.0}
"""Findings with which everything that the paper does not ask comes out well."""
OURS = {
    "The inferred states are better than the raw observations": {"mse": flat(1.1 * RAW)},
    "The intervals of the states contain the true states": {"coverage": flat(0.89)},
    "Learning brings the parameters nearer to the true values": {"theta_offset": flat(0.5)},
    "The intervals of the parameters contain the true values": {"theta_offset": flat(0.05)},
    "The precisions approach the true ones": {"precision_offset": 9.0},
    "The intervals of the precisions contain the true ones": {"precision_offset": 0.21},
    "The lowest free action finds a good C": {
        "mse": lambda cell, r: 1.0 + 9 * (cell.ratio == 1),
        "action": lambda cell: 1.0 - 9 * (cell.ratio == 1),
    },
    "The best settings lie inside the grid": {"kappa": 0.25},
}


def test_additional_checks_can_pass():
    judged = [claim for claim in claims.examine(made(**GOOD)) if claim.source == "ours"]
    found = {claim.title: claim.verdict for claim in judged}
    assert set(found.values()) == {"holds"}
    assert set(OURS) | {
        "Within a cell, the lowest free action finds good settings",
        "Every inversion stays finite",
    } == {claim.title for claim in judged}


@pytest.mark.parametrize("title", OURS)
def test_additional_checks_can_fail(title):
    assert verdicts(made(**GOOD | OURS[title]))[title] == "does not hold"


def test_settings_chosen_by_free_action_can_be_bad():
    findings = made()
    table = findings.table.copy()
    table.loc[table["free_action"] == 2e6, "x.mse"] *= 0.01
    title = "Within a cell, the lowest free action finds good settings"
    assert verdicts(findings._replace(table=table))[title] == "does not hold"


def test_a_single_setting_is_not_a_selection():
    findings = made()
    title = "Within a cell, the lowest free action finds good settings"
    assert verdicts(findings._replace(table=findings.winners))[title] == "not measured"


def test_a_single_diverged_inversion_is_reported():
    findings = made()
    table = findings.table.copy()
    table.loc[3, "diverged_at"] = 7.0
    assert verdicts(findings._replace(table=table))["Every inversion stays finite"] == "holds in part"


def test_missing_cells_are_left_out_and_counted():
    findings = without(made(), Cell("glv", 3, 25.0))
    judged = {claim.title: claim for claim in claims.examine(findings)}
    claim = judged["A third order of motion lowers the error"]
    assert claim.verdict == "holds"
    assert "**13 of 13** cases" in claim.measured
    assert "Could not be measured: 1 of 14 cases." in claim.measured
    assert "GLV, 3 orders, C = 25" in judged["Every inversion stays finite"].measured


def test_beliefs_of_replicates_are_found_where_some_have_no_winner():
    """The second of three replicates has no winner, so that the batch holds the first and the third."""
    findings = made(replicates=3)
    cell = Cell("glv", 2, 1.0)
    gone = findings.winners.eval("model == 'glv' and orders == 2 and ratio == 1.0 and replicate == 1")
    left = part(findings.slow[cell], [0, 2])
    left.traces["theta.mean"] = Trace(np.stack([np.full((100, 3), 0.0), np.full((100, 3), 2.0)]), ("dimension",))
    evidence = checks.StudyView(findings._replace(winners=findings.winners[~gone], slow={cell: left}))
    assert evidence.slow(cell, 0, "theta", "mean")[0, 0] == 0.0
    assert evidence.slow(cell, 1, "theta", "mean") is None
    assert evidence.slow(cell, 2, "theta", "mean")[0, 0] == 2.0


def test_claims_without_data_are_not_measured(found):
    empty = found._replace(winners=found.winners.iloc[:0], traces={}, slow={})
    kinds = {claim.verdict for claim in claims.examine(empty) if claim.title != "Every inversion stays finite"}
    assert kinds <= {"not measured", "does not hold"}
    judged = verdicts(empty)
    assert judged["A third order of motion lowers the error"] == "not measured"
    assert judged["The precisions settle"] == "not measured"


def test_real_runs_are_judged(found, single):
    for findings in (found, single):
        judged = claims.examine(findings)
        assert all(claim.verdict in checks.VERDICTS and claim.measured and claim.criterion for claim in judged)
        assert {claim.title for claim in judged} == {claim.title for claim in claims.examine(made())}
    judged = verdicts(found)
    assert judged["The model of the right form has less error"] == "holds"
    assert judged["The free action prefers the model of the right form"] == "holds"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0.00"),
        (-1.5, "−1.50"),
        (0.00456, "0.00456"),
        (123.4, "123"),
        (12345.6, "12,346"),
        (1.234e6, "1.23·10⁶"),
        (1e-5, "1.00·10⁻⁵"),
        (math.nan, "–"),
    ],
)
def test_numbers_are_formatted_readably(value, shown):
    assert reporting.number(value) == shown


# --- report ----------------------------------------------------------------------------------------------------------
class Page(HTMLParser):
    """The tags, attributes and words of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.cells, self.said = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        if tag == "tr":
            self.cells.append(0)
        elif tag in ("td", "th"):
            self.cells[-1] += 1

    def handle_data(self, data):
        self.said.append(data)

    @property
    def text(self):
        return " ".join("".join(self.said).split())


@pytest.fixture(scope="module")
def written(single, drawn):
    folder = drawn[0].path.parents[1]
    return report.write(single, claims.examine(single), drawn, folder)


def test_the_html_report_is_self_contained(written, drawn):
    text = written.html.read_text(encoding="utf-8")
    page = Page(text)
    assert not re.search(r"https?://|url\(|@import|<script|<link|<iframe", text)
    images = [link for link in page.links if not link.startswith("#")]
    assert len(images) == len(drawn)
    for link, picture in zip(images, drawn, strict=True):
        assert base64.b64decode(link.removeprefix("data:image/png;base64,")) == picture.path.read_bytes()
    for anchor in {link for link in page.links if link.startswith("#")}:
        assert f'id="{anchor[1:]}"' in text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_markdown_links_to_its_figures(written, drawn):
    text = written.markdown.read_text(encoding="utf-8")
    links = re.findall(r"!\[[^\]]*\]\(<([^>]*)>\)", text)
    assert [(written.markdown.parent / link).resolve() for link in links] == [p.path.resolve() for p in drawn]
    assert not any(link.startswith("/") for link in links)


def test_both_hold_every_claim_and_caption(written, single, drawn):
    html = Page(written.html.read_text(encoding="utf-8")).text
    for claim in claims.examine(single):
        for words in (claim.title, claim.statement, claim.criterion, claim.measured.replace("**", "")):
            assert " ".join(words.split()) in html
    for picture in drawn:
        assert picture.title in html
        assert picture.caption in html
    papers = [claim.verdict for claim in claims.examine(single) if claim.source == "paper"]
    assert f"{papers.count('holds')} hold, " in html


def test_every_row_has_all_its_cells(written):
    page = Page(written.html.read_text(encoding="utf-8"))
    assert "<table" in written.html.read_text(encoding="utf-8")
    sizes = [size for i, size in enumerate(page.cells) if i and size != page.cells[i - 1]]
    assert len(sizes) <= 8  # one size a table, so that sizes change only from table to table


def test_tables_show_the_winners(written, single):
    text = written.markdown.read_text(encoding="utf-8")
    errors = text.split("## Errors")[1].split("## Free action")[0]
    row = next(line for line in errors.splitlines() if line.startswith("| GLV, 3 orders"))
    shown = [cell.strip() for cell in row.strip("|").split("|")][1:]
    rows = single.winners.query("model == 'glv' and orders == 3").sort_values("ratio")
    assert shown == [reporting.number(value) for value in rows["x.mse"]]
    lost = next(line for line in errors.splitlines() if line.startswith("| Lorenz, 3 orders"))
    assert lost.endswith("| diverged |")


def test_one_diverged_inversion_is_listed(written):
    text = written.markdown.read_text(encoding="utf-8").split("## Diverged inversions")[1]
    assert "| Lorenz, 3 orders, C = 50 | 1 | 64 | 0 | 0 | 0.1 | 0.1 | 0 | 120 | lambda\\_y |" in text


def test_many_diverged_inversions_are_summarised(found):
    table = found.table.copy()
    table["diverged_node"] = "x"
    table["diverged_at"] = np.arange(len(table)) + 1.0
    text = report._diverged(found._replace(table=table))
    assert text.startswith("112 in all.")
    first = table.query("model == 'glv' and orders == 2 and ratio == 0.02")["diverged_at"]
    assert f"| GLV, 2 orders, C = 1/50 | x | 4 | {first.min():.0f} | {first.median():.0f} | {first.max():.0f} |" in text
    assert len(text.splitlines()) == 2 + 2 + len(CELLS)


HOSTILE = "<script>alert(1)</script>|*x*_y_`z`[a](http://b)&amp;\n# c"


def test_names_are_escaped(single, drawn, tmp_path):
    table = single.table.copy()
    table["diverged_node"] = table["diverged_node"].where(table["diverged_node"].isna(), HOSTILE)
    hostile = single._replace(table=table, data=HOSTILE, grid=HOSTILE, conventions=HOSTILE)
    claim = claims.Claim(HOSTILE, HOSTILE, HOSTILE, HOSTILE, "<b onclick=x>1|2</b>", "holds", "paper")
    picture = drawn[0]._replace(title=HOSTILE, caption=HOSTILE)
    text = report.write(hostile, [claim], [picture], tmp_path).html.read_text(encoding="utf-8")
    page = Page(text)
    assert not {"script", "b"} & set(page.tags)
    assert [link for link in page.links if not link.startswith(("#", "data:"))] == []
    assert page.text.count(" ".join(HOSTILE.split())) == 3 + 4 + 2 + 1  # settings, claim, figure, node
    assert "<b onclick=x>1|2</b>" in page.text


def test_the_speed_is_described(found):
    text = report._speed(found)
    assert "| Speed-up by batching | 100 times |" in text
    assert "| Peak memory | 3 MiB |" in text
    assert "90 s with 2 processes" in text
    bare = report._speed(found._replace(speed=SPEED._replace(peak_memory=None, single_rate=0.0, seconds=9000.0)))
    assert "Peak memory" not in bare
    assert "Speed-up" not in bare
    assert "2 h 30 min" in bare


def test_selected_settings_and_their_agreement(found):
    winners = found.winners.copy()
    cell = winners.eval("model == 'glv' and orders == 2 and ratio == 1.0")
    winners.loc[cell, "kappa"] = [1.0, 0.25]
    lines = report._selected(found._replace(winners=winners)).splitlines()
    (row,) = (line for line in lines if line.startswith("| GLV, 2 orders, C = 1 |"))
    assert row.startswith("| GLV, 2 orders, C = 1 | 1 |")
    assert row.endswith("| 1 |")
    assert len(lines) == 2 + len(CELLS)


def test_a_report_is_replaced_atomically(single, drawn, tmp_path, monkeypatch):
    judged = claims.examine(single)
    first = report.write(single, judged, drawn[:1], tmp_path)
    before = first.html.read_text(encoding="utf-8")

    @contextlib.contextmanager
    def failing(path):
        with atomic_write(path) as file:
            file.write(b"half")
            yield file
            raise ZeroDivisionError

    monkeypatch.setattr("studies.reporting.atomic_write", failing)
    with pytest.raises(ZeroDivisionError):
        report.write(single, judged[:1], drawn[:1], tmp_path)
    assert first.html.read_text(encoding="utf-8") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.md"]
