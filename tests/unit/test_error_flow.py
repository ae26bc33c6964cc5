"""Error flow: precision-weighted errors and messages over time, its files, and the data of its page."""

import base64
import json
import re
import sys

import numpy as np
import pytest
import xarray as xr
from typer.testing import CliRunner

import pcnet as pc
from pcnet import Record
from pcnet.errors import ResultError
from pcnet.graphs import odem
from pcnet.io.command_line import app
from pcnet.results.page import BYTES, in_script, payload, render
from support.recorded import EVIL, hostile_graph, paper_run, repeated, stack_run


# --- numbers ---------------------------------------------------------------------------------------------------------
def test_surprise_is_the_error_in_units_of_its_precision():
    result = paper_run()
    error = result.observation("y") - result.prediction("y")
    weighted = result.message("y", "x").reshape(error.shape)  # message from the sensory node to the state
    expected = np.sqrt((error * weighted).sum((1, 2)) / error[0].size)
    np.testing.assert_allclose(result.error_flow().surprise("y"), expected, rtol=1e-9)


def test_an_outlier_has_the_largest_surprise():
    flow = paper_run().error_flow()
    assert flow.surprise("y").argmax() in (75, 76)  # the jump there, or the jump back
    assert flow.surprised == ("x", "y")


def test_the_traffic_of_a_link_is_the_root_mean_square_of_its_messages():
    result = stack_run()
    flow = result.error_flow()
    for sender, receiver, of in (("x1", "y", None), ("y", "x1", None), ("u", "v2", None), ("x1", "b", "y")):
        message = result.message(sender, receiver, of)
        expected = np.linalg.norm(message, axis=-1) / np.sqrt(message.shape[-1])
        np.testing.assert_allclose(flow.passed(sender, receiver, of), expected)
    assert len(flow.passages()) == 2 * len(result.structure.links)
    with pytest.raises(ResultError, match="no link between 'y' and 'u'"):
        flow.passed("y", "u")


def test_shares_add_up_to_the_free_energy():
    result = stack_run()
    flow = result.error_flow()
    total = sum(flow.share(node.name) for node in flow.structure.nodes)
    np.testing.assert_allclose(total, result.free_energy)


def test_an_element_of_a_batch():
    graph, schedule = odem(kappa=[[0.5, 1.0, 1.0], [0.2, 0.3, 0.4]])
    data = pc.simulate.glv_process(12, seed=0).observations
    result = graph.run(data, schedule, record=Record.flow())
    alone, its = odem(kappa=0.3)
    expected = alone.run(data, its, record=Record.flow()).error_flow().surprise("y")
    np.testing.assert_allclose(result.error_flow((1, 1)).surprise("y"), expected, rtol=1e-6)
    np.testing.assert_allclose(result.error_flow(4).surprise("y"), expected, rtol=1e-6)
    with pytest.raises(ResultError, match="no batch element 6"):
        result.error_flow(6)


def test_times_and_windows():
    flow = paper_run().error_flow()  # every 0.01 from 0 to 1.49
    assert flow.within(at=0.5049) == slice(50, 51)
    assert flow.within(window=(0.095, 0.205)) == slice(10, 21)
    assert flow.within() == slice(0, 150)
    for wrong, words in (
        ({"window": (2, 3)}, "from 0 to 1.49"),
        ({"window": (1, 0)}, "from, to"),
        ({"at": 1, "window": (0, 1)}, "not both"),
    ):
        with pytest.raises(ResultError, match=words):
            flow.within(**wrong)


# --- what has to be recorded -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("record", "missing"),
    [
        (None, "messages, error, weighted_error"),
        (Record(messages=True), "error, weighted_error"),
        (["error", "weighted_error"], "messages, energy"),
        (Record(("error", "weighted_error", "energy"), nodes=("y",), messages=True), "error, weighted_error"),
    ],
)
def test_missing_recordings_are_named_with_the_remedy(record, missing):
    graph, schedule = odem()
    result = graph.run(np.ones((3, 3)), schedule, record=record)
    with pytest.raises(ResultError, match=rf"not recorded: {missing}; run with record=Record.flow\(\)"):
        result.error_flow()


def test_a_run_without_recording():
    graph, schedule = odem()
    result = graph.run(np.ones((3, 3)), schedule, record=Record.flow(every=4))
    with pytest.raises(ResultError, match=r"nothing was recorded: record\.every is more"):
        result.error_flow()


# --- files -----------------------------------------------------------------------------------------------------------
def test_the_structure_is_in_the_file(tmp_path):
    result = stack_run()
    loaded = pc.Result.load(result.save(tmp_path / "run.nc"))
    assert loaded.structure == result.structure
    np.testing.assert_array_equal(loaded.error_flow().surprise("y"), result.error_flow().surprise("y"))


def test_a_file_of_the_first_format_is_still_read(tmp_path):
    path = paper_run().save(tmp_path / "run.nc")
    with xr.open_dataset(path, engine="h5netcdf") as opened:
        data = opened.load()
    del data.attrs["structure"]
    data.attrs["format"] = 1
    data.to_netcdf(tmp_path / "old.nc", engine="h5netcdf")
    old = pc.Result.load(tmp_path / "old.nc")
    np.testing.assert_array_equal(old.mean("x"), paper_run().mean("x"))
    with pytest.raises(ResultError, match="older format"):
        old.error_flow()


def test_a_page_is_written_atomically(tmp_path, monkeypatch):
    flow = paper_run().error_flow()
    path = flow.save(tmp_path / "flow.html")
    before = path.read_bytes()
    monkeypatch.setattr("pcnet.results.page.render", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(ResultError, match="cannot be written: disk full"):
        flow.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ResultError, match=r"ends in \.html, not 'flow\.gif'"):
        flow.save(tmp_path / "flow.gif")
    with pytest.raises(ResultError, match="no folder"):
        flow.save(tmp_path / "none" / "flow.html")


# --- the page's data -------------------------------------------------------------------------------------------------
def numbers(data):
    """(series, low and high, frames)."""
    block = np.frombuffer(base64.b64decode(data["numbers"]), "<f4")
    frames = -(-data["ticks"] // data["bin_size"])
    rows = block.reshape(-1, 1 if data["bin_size"] == 1 else 2, frames)
    return np.repeat(rows, 2, 1) if data["bin_size"] == 1 else rows


def test_the_page_holds_the_numbers_of_the_result():
    result = stack_run()
    flow = result.error_flow()
    data = payload(flow, "title")
    block = numbers(data)
    assert data["bin_size"] == 1
    for node in data["nodes"]:
        np.testing.assert_allclose(block[node["share"], 0], flow.share(node["name"]), rtol=1e-6)
        assert bool(node["why"]) != flow.share(node["name"]).any()
        if node["movement"] is not None:
            mean, sd = result.mean(node["name"]), result.sd(node["name"])
            steps = np.concatenate([np.zeros_like(mean[:1]), mean[1:] - mean[:-1]]) / sd
            np.testing.assert_allclose(block[node["movement"], 0], np.sqrt((steps**2).mean(1)), rtol=1e-5, atol=1e-12)
        if node["surprise"] is not None:
            np.testing.assert_allclose(block[node["surprise"], 0], flow.surprise(node["name"]), rtol=1e-6)
    for link in data["links"]:
        sent = result.message(link["parent"], link["child"], link["of"])
        change = np.concatenate([[0.0], np.sqrt(((sent[1:] - sent[:-1]) ** 2).mean(1))])
        np.testing.assert_allclose(block[link["down"], 0], change, rtol=1e-6)
        up = flow.passed(link["child"], link["parent"], link["of"])
        np.testing.assert_allclose(block[link["up"], 0], up, rtol=1e-6)
    for way in ("down", "up"):  # one scale for each kind of message
        for kind in {link["kind"] for link in data["links"]}:
            assert len({link[f"full_{way}"] for link in data["links"] if link["kind"] == kind}) == 1
    by_name = {node["name"]: node for node in data["nodes"]}
    levels = result.mean("precision of x1").mean(1)
    np.testing.assert_allclose(block[by_name["x1"]["attention"], 0], np.exp(levels - np.median(levels)), rtol=1e-5)
    velocity = by_name["x1"]["panels"][1]
    assert velocity["title"] == "belief, derivative 1"
    np.testing.assert_allclose(block[velocity["lines"][1]["mean"], 0], result.mean("x1")[:, 1, 1], rtol=1e-6)
    np.testing.assert_allclose(block[velocity["lines"][1]["sd"], 0], result.sd("x1")[:, 1, 1], rtol=1e-6)
    seen = by_name["y"]["panels"][0]["lines"][0]
    np.testing.assert_allclose(block[seen["dots"], 0], result.observation("y")[:, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(block[seen["mean"], 0], result.prediction("y")[:, 0, 0], rtol=1e-6)
    assert by_name["u"]["panels"][0]["lines"][0]["mean"] is None


def test_ten_thousand_observations_are_not_downsampled():
    flow = repeated(paper_run(), 67).error_flow()
    assert len(flow.times) > 10_000
    page = render(flow)
    assert len(page.encode()) < 5_000_000
    assert json.loads(re.search(r'type="application/json">(.*?)</script>', page)[1])["bin_size"] == 1


def test_a_long_run_is_downsampled_and_keeps_every_surprise():
    flow = repeated(paper_run(), 700).error_flow()
    data = payload(flow, "title")
    assert data["bin_size"] > 1
    assert len(data["numbers"]) <= BYTES
    block = numbers(data)
    (y,) = [node for node in data["nodes"] if node["name"] == "y"]
    surprise = flow.surprise("y")
    for i in range(0, len(surprise), data["bin_size"]):
        low, high = block[y["surprise"], :, i // data["bin_size"]]
        part = surprise[i : i + data["bin_size"]].astype("f4")
        assert (low, high) == (part.min(), part.max())


def test_pages_of_a_single_observation_and_of_a_diverged_run():
    graph, schedule = odem()
    assert "<title>" in render(graph.run(np.ones((1, 3)), schedule, record=Record.flow()).error_flow())
    wild = np.ones((20, 3))
    wild[10:] = 1e200
    result = graph.run(wild, schedule, record=Record.flow(), on_divergence="stop")
    assert result.diverged.at >= 0
    assert "NaN" not in json.dumps(payload(result.error_flow(), ""), allow_nan=False)


def test_times_may_be_uneven_and_observations_missing():
    graph, schedule = odem()
    observations = np.ones((6, 3))
    observations[2] = np.nan
    times = np.array([0.0, 0.01, 0.05, 0.06, 0.2, 0.21])
    result = graph.run(observations, schedule, record=Record.flow(), times=times)
    flow = result.error_flow()
    data = payload(flow, "")
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(data["times"]), "<f8"), times)
    mesh = next(iter(flow.map().collections))
    np.testing.assert_allclose(mesh.get_coordinates()[0, :-1, 0], times)
    assert flow.within(at=0.19) == slice(4, 5)
    error, weighted = result.get("y", "error"), result.get("y", "weighted_error")
    for t in range(6):
        known = [e * w for e, w in zip(error[t].flat, weighted[t].flat, strict=True) if np.isfinite(e * w)]
        assert bool(known) == (t != 2)
        expected = np.sqrt(np.mean(known)) if known else np.nan
        assert flow.surprise("y")[t] == pytest.approx(expected, nan_ok=True)


# --- names are text --------------------------------------------------------------------------------------------------


def test_names_are_escaped_in_the_page():
    flow = hostile_graph().run(np.ones((3, 1)), record=Record.flow()).error_flow()
    plain = render(paper_run().error_flow(), "title")
    page = render(flow, "</title><script>alert(1)</script>")
    for tag in ("<script", "</script", "<img", "<!--", "</title", "alert(1)<"):
        expected = plain.lower().count(tag)
        assert page.lower().count(tag) == expected, tag
    held = json.loads(re.search(r'type="application/json">(.*?)</script>', page)[1])
    assert {node["name"] for node in held["nodes"]} == {*EVIL, "<!--"}
    assert held["title"] == "</title><script>alert(1)</script>"


def test_json_in_a_script_is_escaped():
    wild = {"</script><!--": ["&", "\u2028", ">"]}
    text = in_script(wild)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == wild
    with pytest.raises(ValueError, match="JSON compliant"):
        in_script(float("nan"))


def test_the_page_makes_no_network_requests():
    page = render(paper_run().error_flow())
    assert "connect-src 'none'" in page
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", page)


# --- the command -----------------------------------------------------------------------------------------------------
def test_view_writes_the_page_beside_the_file_or_where_it_is_told(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("typer.launch", opened.append)
    path = paper_run().save(tmp_path / "run.nc")
    done = CliRunner().invoke(app, ["view", str(path), "--no-open"])
    assert done.exit_code == 0, done.output
    assert "Error flow of run.nc" in (tmp_path / "run.html").read_text(encoding="utf-8")
    assert opened == []
    for display, expected in (("", []), (":0", [(tmp_path / "other.html").as_uri()])):
        monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
        monkeypatch.setenv("DISPLAY", display) if display else monkeypatch.delenv("DISPLAY", raising=False)
        done = CliRunner().invoke(app, ["view", str(path), "--output", str(tmp_path / "other.html")])
        assert done.exit_code == 0, done.output
        assert opened == expected or not sys.platform.startswith("linux")


def test_view_reports_errors_in_one_line(tmp_path):
    graph, schedule = odem()
    path = graph.run(np.ones((3, 3)), schedule).save(tmp_path / "run.nc")
    done = CliRunner().invoke(app, ["view", str(path), "--no-open"])
    assert done.exit_code == 2
    assert done.stderr.startswith("pcnet: the error flow needs quantities that were not recorded: messages")
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == [path]
