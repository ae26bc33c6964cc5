"""Drawings of graphs, error flows and studies, against the data they show."""

import io
import shutil

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.image import AxesImage
from matplotlib.patches import FancyArrowPatch, Polygon
from matplotlib.text import Text
from PIL import Image

import pcnet as pc
from pcnet.errors import GraphError, ResultError, StudyError
from pcnet.graphs import odem
from pcnet.results import flow_plots
from pcnet.results import plots as plotting
from pcnet.results.drawing import DARK, LIGHT
from support.recorded import paper_run, repeated, stack, stack_run


@pytest.fixture(autouse=True)
def style_is_left_alone():
    before = dict(mpl.rcParams)
    yield
    assert dict(mpl.rcParams) == before


def arrows(ax, colour):
    return [p for p in ax.patches if isinstance(p, FancyArrowPatch) and to_hex(p.get_facecolor()) == colour.lower()]


def texts(thing):
    return {text.get_text() for text in thing.findobj(Text)}


def image(ax):
    (found,) = [child for child in ax.get_children() if isinstance(child, AxesImage)]
    return np.asarray(found.get_array()), found


# --- graphs ----------------------------------------------------------------------------------------------------------
def test_a_graph_has_a_shape_for_each_node_and_two_arrows_for_each_link():
    graph = stack(2)
    ax = graph.draw(pc.odem(every=12))
    assert len([p for p in ax.patches if isinstance(p, Polygon)]) == len(graph.nodes)
    assert len(arrows(ax, LIGHT.prediction)) == len(arrows(ax, LIGHT.error)) == len(graph.links)
    assert {*graph.nodes, "every 12", "level 0", "level 3", "predictions", "errors"} <= texts(ax)
    assert {"state", "cause", "sensory", "input", "parameter", "precision"} <= texts(ax)
    outlines = {len(p.get_xy()) for p in ax.patches if isinstance(p, Polygon)}
    assert len(outlines) >= 4
    heights = {text.get_text(): text.get_position()[1] for text in ax.texts}
    assert heights["y"] < heights["x1"] < heights["x2"] < heights["u"]


def test_predictions_point_down_and_errors_up():
    ax = odem().graph.draw()
    for colour, sign in ((LIGHT.prediction, -1), (LIGHT.error, 1)):
        steps = [np.subtract(*a._posA_posB[::-1])[1] for a in arrows(ax, colour)]
        assert [s for s in steps if abs(s) > 1e-9] == pytest.approx([sign * abs(max(steps, key=abs))])


def test_an_empty_graph_is_not_drawn():
    with pytest.raises(GraphError, match="add nodes before drawing it"):
        pc.Graph().draw()


def test_special_characters_in_names_are_drawn_literally():
    x = pc.GeneralisedStateNode("$x_", dim=1, orders=2, flow=lambda x, theta: -x)
    y = pc.SensoryNode(r"\frac$", dim=1, orders=1)
    graph = pc.Graph()
    graph.predicts(x, y)
    for node in (x, y):
        graph.weighs(pc.PrecisionNode(f"${node.name}", prior_precision=1, sd=0.1, correlation_time=0.1), node)
    graph.draw().figure.savefig(io.BytesIO())
    graph.run(np.ones((5, 1)), record=pc.Record.flow()).error_flow().plot().savefig(io.BytesIO())


# --- the map ---------------------------------------------------------------------------------------------------------
def test_the_map_holds_the_surprise_of_each_node_at_each_time():
    flow = stack_run().error_flow()
    ax = flow.map()
    values, _ = image(ax)
    np.testing.assert_allclose(values, [flow.surprise(name) for name in flow.surprised])
    assert [label.get_text() for label in ax.get_yticklabels()] == list(flow.surprised)


def test_a_long_map_keeps_every_surprise_at_its_time():
    flow = repeated(paper_run(), 20).error_flow()
    values, drawn = image(flow.map())
    assert values.shape[1] <= flow_plots.MAP_COLUMNS
    bin_size = 4  # 3,000 observations in at most 800 columns
    expected = flow.surprise("y").reshape(-1, bin_size).max(1)
    np.testing.assert_allclose(values[list(flow.surprised).index("y")], expected)
    left, right, *_ = drawn.get_extent()
    assert (left, right) == pytest.approx((-0.005, 29.995))


def test_a_window_is_a_part_of_the_map():
    flow = paper_run().error_flow()
    values, _ = image(flow.map(window=(0.5, 0.99)))
    np.testing.assert_allclose(values[1], flow.surprise("y")[50:100])


# --- shares ----------------------------------------------------------------------------------------------------------
def test_contributions_and_their_sum():
    result = paper_run()
    flow = result.error_flow()
    ax = flow.shares()
    lines = dict(zip([t.get_text() for t in ax.get_legend().get_texts()], ax.get_lines(), strict=True))
    np.testing.assert_allclose(lines["y"].get_ydata(), flow.share("y"))
    np.testing.assert_allclose(lines["all"].get_ydata(), result.free_energy)


def test_many_nodes_are_grouped():
    flow = stack_run().error_flow()
    ax = flow.shares()
    count = len(flow.structure.nodes)
    assert f"{count - 6} others" in texts(ax)
    drawn = [line.get_ydata() for line in ax.get_lines()]
    np.testing.assert_allclose(sum(drawn[:-1]), drawn[-1])


# --- the graph at work -----------------------------------------------------------------------------------------------
def test_the_width_of_links_is_their_traffic():
    flow = paper_run().error_flow()
    passed = flow.passed("y", "x")
    order = [link.parent + link.child for link in flow.structure.links].index("xy")
    widths = {}
    for at in (0.1, 0.75, 1.2):
        ax = flow.draw(at=at)
        widths[at] = arrows(ax, LIGHT.error)[order].get_linewidth()
        assert f"at {at:g};" in ax.get_xlabel()
    assert sorted(widths, key=widths.get) == sorted(widths, key=lambda at: passed[round(at * 100)])
    full = max(arrows(flow.draw(at=0.75), LIGHT.error)[order].get_linewidth(), widths[0.75])
    thin, low = flow_plots.graph_plots.THIN, passed[10] / np.quantile(passed, 0.995)
    assert widths[0.1] == pytest.approx(thin + (full - thin) * low, rel=1e-6)


def test_a_window_shows_the_mean():
    flow = paper_run().error_flow()
    order = [link.parent + link.child for link in flow.structure.links].index("xy")
    passed = flow.passed("y", "x")
    part = passed[:50].mean() / np.quantile(passed, 0.995)
    ax = flow.draw(window=(0, 0.49))
    wide = arrows(flow.draw(at=0.75), LIGHT.error)[order].get_linewidth()
    thin = flow_plots.graph_plots.THIN
    assert arrows(ax, LIGHT.error)[order].get_linewidth() == pytest.approx(thin + (wide - thin) * part, rel=1e-6)
    assert "mean from 0 to 0.49" in ax.get_xlabel()


def test_on_one_page_in_light_and_dark():
    flow = stack_run().error_flow()
    for dark, paper_colour in ((False, "#ffffff"), (True, DARK.paper)):
        figure = flow.plot(dark=dark, at=1.0, title="A run")
        assert figure.get_suptitle() == "A run"
        file = io.BytesIO()
        figure.savefig(file, dpi=40)
        corner = Image.open(file).convert("RGB").getpixel((0, 0))
        assert "#{:02x}{:02x}{:02x}".format(*corner) == paper_colour


# --- films -----------------------------------------------------------------------------------------------------------
def test_a_film_has_a_frame_for_each_stretch(tmp_path):
    flow = paper_run().error_flow()
    path = flow.animate(tmp_path / "film.gif", frames=7, window=(0.3, 1.0))
    with Image.open(path) as film:
        assert film.n_frames == 7
        assert film.format == "GIF"
    assert list(tmp_path.iterdir()) == [path]


def test_an_mp4_needs_ffmpeg(tmp_path, monkeypatch):
    flow = paper_run().error_flow()
    if shutil.which("ffmpeg"):
        assert b"ftyp" in flow.animate(tmp_path / "film.mp4", frames=2).read_bytes()[:12]
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ResultError, match=r"ffmpeg, which is not installed; install it, or write a \.gif"):
        flow.animate(tmp_path / "other.mp4")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [("film.png", {}, r"\.gif or \.mp4"), ("none/film.gif", {}, "no folder"), ("film.gif", {"frames": 0}, "one frame")],
)
def test_invalid_films_are_rejected(tmp_path, name, options, words):
    with pytest.raises(ResultError, match=words):
        paper_run().error_flow().animate(tmp_path / name, **options)


# --- results: causes and dark paper ----------------------------------------------------------------------------------
def test_causes_have_their_own_panel_with_bands_and_truth():
    result = stack_run()
    truth = np.linspace(0, 1, 40)[:, None]
    figure = result.plot(truth={"v1": truth})
    panels = {ax.get_ylabel(): ax for sub in figure.subfigs for ax in sub.axes}
    assert {"x1$_{1}$", "x1$_{2}$", "x2", "cause", "observation"} <= set(panels)
    lines = panels["cause"].get_lines()
    np.testing.assert_array_equal(lines[0].get_ydata(), result.mean("v1")[:, 0, 0])
    np.testing.assert_array_equal(lines[1].get_ydata(), result.mean("v2")[:, 0, 0])
    np.testing.assert_array_equal(lines[2].get_ydata(), truth[:, 0])
    with pytest.raises(ResultError, match="no cause node 'x1'; cause nodes: v1, v2"):
        plotting.causes(result, "x1")
    with pytest.raises(ResultError, match="given for 'z'"):
        result.plot(truth={"z": truth})


def test_true_precisions_are_drawn():
    figure = paper_run().plot(true_precisions={"lambda_y": np.log([1.0, 2.0, 3.0])})
    (ax,) = [ax for sub in figure.subfigs for ax in sub.axes if ax.get_ylabel().startswith("log-precision")]
    assert [line.get_ydata()[0] for line in ax.get_lines()[-3:]] == pytest.approx(np.log([1.0, 2.0, 3.0]))


def test_the_dark_theme_has_no_black_lines():
    figure = paper_run().plot(truth=torch.zeros(150, 3), dark=True)
    for text in figure.findobj(Text):
        assert to_hex(text.get_color()) != "#000000"
    for sub in figure.subfigs:
        for ax in sub.axes:
            assert to_hex(ax.get_facecolor()) == DARK.paper
            assert all(to_hex(line.get_color()) != "#000000" for line in ax.get_lines())


# --- studies ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def study():
    def build(orders, kappa, ratio):
        return odem("glv", orders, kappa=kappa, expected_precision_y=500 * ratio)

    process = pc.simulate.glv_process(40, noise="white", seed=1)
    grid = {"orders": [2, 3], "kappa": [0.5, 1.0], "ratio": [0.1, 1.0, 10.0]}
    return pc.sweep(build, grid, process.observations, truth={"x": process.states}, processes=1)


def test_a_study_shows_the_minimum_of_each_cell_and_marks_the_best(study):
    table = study.to_dataframe()
    figure = study.plot("kappa", "ratio", by="orders")
    panels = [ax for ax in figure.axes if ax.images]
    assert len(panels) == 4  # two scores, two groups
    for k, ax in enumerate(panels):
        score, orders = ("free_action", "x.mse")[k // 2], (2, 3)[k % 2]
        part = table[table.orders == orders]
        expected = part.pivot_table(index="ratio", columns="kappa", values=score)
        if score == "free_action":
            expected = expected - expected.min().min()
        values, _ = image(ax)
        np.testing.assert_allclose(values, expected.to_numpy())
        (star,) = ax.get_lines()
        best = part.loc[part[score].idxmin()]
        assert list(expected.columns)[int(star.get_xdata()[0])] == best.kappa
        assert list(expected.index)[int(star.get_ydata()[0])] == best.ratio
        assert ax.get_title() == f"orders = {orders}"
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("kappa", "ratio")


def test_remaining_settings_are_minimised_over(study):
    figure = study.plot("orders", "ratio", dark=True)
    table = study.to_dataframe()
    action, error = [ax for ax in figure.axes if ax.images]
    lowest = table.pivot_table(index="ratio", columns="orders", values="free_action", aggfunc="min")
    np.testing.assert_allclose(image(action)[0], (lowest - lowest.min()).to_numpy())
    assert len(action.get_lines()) == 2
    assert len(error.get_lines()) == 1


def test_a_study_over_one_setting(study):
    figure = study.plot("ratio", where={"orders": 3}, scores=["x.mse"])
    (ax,) = figure.axes
    table = study.to_dataframe(where={"orders": 3})
    np.testing.assert_allclose(ax.get_lines()[1].get_ydata(), table.groupby("ratio")["x.mse"].min())


def test_plots_of_a_study_that_are_not_possible_are_rejected(study):
    with pytest.raises(StudyError, match="different data"):
        study.plot("kappa", "ratio")
    with pytest.raises(StudyError, match="no setting 'z'; settings: kappa, orders, ratio"):
        study.plot("z")
    with pytest.raises(StudyError, match=r"no column 'z\.mse'"):
        study.plot("kappa", scores=["z.mse"])
    with pytest.raises(StudyError, match="both 'kappa'"):
        study.plot("kappa", "kappa")
    with pytest.raises(StudyError, match="no setting varies"):
        study.plot(where={"orders": 2, "kappa": 1.0, "ratio": 1.0})


def test_diverged_cells_are_crossed_out(study, monkeypatch):
    table = study.to_dataframe(where={"orders": 3})
    table.loc[table.index[0], ["free_action", "x.mse"]] = np.nan
    monkeypatch.setattr(study, "to_dataframe", lambda where: pd.DataFrame(table))
    figure = study.plot("kappa", "ratio")
    assert next(ax for ax in figure.axes if ax.images).texts[0].get_text() == "×"
    assert figure.get_suptitle() == "6 settings, 1 diverged"
