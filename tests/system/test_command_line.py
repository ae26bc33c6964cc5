"""The command `pcnet`."""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager
from importlib.metadata import version

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import pcnet as pc
from pcnet.graphs import odem
from pcnet.io.command_line import app
from pcnet.nodes import GeneralisedStateNode, PrecisionNode, SensoryNode
from support.compare import same
from support.waiting import PATIENCE

Y = 1 + 0.1 * np.random.default_rng(0).normal(size=(30, 3))
Y[4, 1] = np.nan
Y[9] = np.nan


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pc.save_model("graph.yaml", odem(orders=2, every=4))
    pd.DataFrame(Y, columns=["a", "b", "c"]).to_csv("data.csv", index=False)
    return tmp_path


def pcnet(*arguments, **options):
    return CliRunner().invoke(app, list(map(str, arguments)), **options)


def reference(**options):
    return odem(orders=2, every=4).run(Y, **options)


def good(*arguments, **options):
    done = pcnet(*arguments, **options)
    assert done.exit_code == 0, done.output
    return done


def test_run_over_all_file_formats(folder):
    np.save("data.npy", Y)
    np.savez("data.npz", y=Y)
    pd.DataFrame(Y, columns=["y.0", "y.1", "y.2"]).to_parquet("data.parquet")
    np.savetxt("bare.csv", Y, delimiter=",", fmt="%.17g")
    for name in ("data.csv", "bare.csv", "data.npy", "data.npz", "data.parquet"):
        done = good("run", "graph.yaml", "--observations", name, "--output", "result.nc")
        assert "30 observations, free action" in done.stdout
        assert "theta:" in done.stdout
        same(reference(), pc.Result.load("result.nc"))


def test_times_in_a_column(folder):
    times = np.cumsum(np.random.default_rng(1).uniform(0.005, 0.02, size=30))
    pd.DataFrame(Y, columns=["a", "b", "c"]).assign(time=times).to_csv("timed.csv", index=False)
    pd.DataFrame(Y, columns=["a", "b", "c"]).assign(when=times).to_csv("when.csv", index=False)
    good("run", "graph.yaml", "--observations", "timed.csv", "--output", "result.nc")
    same(reference(times=times), pc.Result.load("result.nc"))
    good("run", "graph.yaml", "--observations", "when.csv", "--time", "when", "--output", "result.nc")
    same(reference(times=times), pc.Result.load("result.nc"))


def test_interrupted_and_resumed(folder):
    pd.DataFrame(Y[:13]).to_csv("part.csv", index=False, header=False)
    good("run", "graph.yaml", "--observations", "part.csv", "--checkpoint", "run.ckpt", "--checkpoint-every", 5)
    done = good(
        "run",
        "graph.yaml",
        "--observations",
        "data.csv",
        "--resume",
        "run.ckpt",
        "--output",
        "r.nc",
        "--checkpoint",
        "run.ckpt",
    )
    assert "30 observations" in done.stdout
    same(reference(), pc.Result.load("r.nc"))
    assert pc.resume("run.ckpt").tick == 30


@pytest.mark.usefixtures("eager")
def test_beliefs_are_streamed_for_lines_of_input(folder):
    lines = [
        ",".join("" if np.isnan(v) else repr(float(v)) for v in row) if k % 2 else json.dumps({"y": _nulls(row)})
        for k, row in enumerate(Y)
    ]
    lines[9] = "null"
    done = good("run", "graph.yaml", "--observations", "-", input="\n".join(lines) + "\n")
    said = [json.loads(line) for line in done.stdout.splitlines()]
    whole = reference()
    assert [each["observation"] for each in said] == list(range(30))
    np.testing.assert_array_equal([each["beliefs"]["x"]["mean"] for each in said], whole.mean("x"))
    np.testing.assert_array_equal([each["beliefs"]["theta"]["sd"] for each in said], whole.sd("theta"))
    np.testing.assert_array_equal([each["free_energy"] for each in said], whole.free_energy)


def _nulls(row):
    return [None if np.isnan(v) else float(v) for v in row]


def test_lines_with_times_and_missing_sensors(folder):
    x = GeneralisedStateNode("x", dim=1, orders=2, flow=pc.systems.linear([[-0.1]]))
    graph = pc.Graph()
    for name in ("fast", "slow"):
        graph.predicts(x, SensoryNode(name, dim=1, orders=1, dt=0.1))
        graph.weighs(PrecisionNode(f"n {name}", prior_precision=10.0, sd=0.1, correlation_time=0.2), graph[name])
    graph.weighs(PrecisionNode("nx", prior_precision=10.0, sd=0.1, correlation_time=0.2), x)
    pc.save_model("two.json", pc.Model(graph, pc.states_only()))
    stream = [({"fast": 1.0, "slow": 2.0}, 0.0), ({"fast": 1.5}, 0.13), ({"slow": 2.5}, 0.2), ({}, 0.5)]
    text = "\n".join(json.dumps(y | {"t": t}) for y, t in stream)
    done = good("run", "two.json", "--observations", "-", input=text)
    session = pc.Model(graph, pc.states_only()).start()
    for line, (y, t) in zip(done.stdout.splitlines(), stream, strict=True):
        session.step({name: [value] for name, value in y.items()}, t=t)
        assert json.loads(line)["beliefs"]["x"]["mean"] == session.mean("x").tolist()
        assert json.loads(line)["t"] == t
    pd.DataFrame([y | {"t": t} for y, t in stream]).to_csv("two.csv", index=False)
    good("run", "two.json", "--observations", "two.csv", "--output", "two.nc")
    same(session.result(), pc.Result.load("two.nc"))


def test_forecast(folder):
    good("run", "graph.yaml", "--observations", "data.csv", "--checkpoint", "run.ckpt")
    for arguments in (["run.ckpt"], ["graph.yaml", "--observations", "data.csv"]):
        done = good("forecast", *arguments, "--horizon", 0.05)
        table = pd.read_csv(io.StringIO(done.stdout))
        expected = pc.resume("run.ckpt").forecast(0.05)
        found = table[table.node == "x"]["mean"].to_numpy().reshape(5, 3)
        np.testing.assert_allclose(found, expected.mean("x"), rtol=1e-9)  # ten digits are printed
    good("forecast", "run.ckpt", "--horizon", 0.05, "--output", "f.csv")
    pd.testing.assert_frame_equal(pd.read_csv("f.csv"), table)


def test_schema_and_draw(folder):
    assert json.loads(good("schema").stdout)["title"] == "A model of pcnet"
    for name, start in (("g.png", b"\x89PNG"), ("g.svg", b"<?xml"), ("g.pdf", b"%PDF"), ("g.dot", b"digraph")):
        good("draw", "graph.yaml", "--output", name)
        assert (folder / name).read_bytes().startswith(start)
    text = (folder / "g.dot").read_text()
    assert '"x" -> "y" [label="predicts"' in text
    assert '"lambda_y" -> "y" [label="weighs"' in text


def test_registered_functions_from_a_file(folder):
    (folder / "mine.py").write_text(
        "import pcnet as pc\n@pc.register('mine: decay')\ndef decay(x, theta):\n    return -x\n"
    )
    text = (folder / "graph.yaml").read_text().replace("flow: lotka_volterra", "flow: 'mine: decay'")
    (folder / "own.yaml").write_text(text.replace("{parametrises: [theta, x]}", "{parametrises: [theta, x]}"))
    done = pcnet("run", "own.yaml", "--observations", "data.csv")
    assert done.exit_code == 2
    assert "no function 'mine: decay' is registered" in done.stderr
    good("run", "own.yaml", "--observations", "data.csv", "--functions", "mine.py")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "nothing.yaml", "--observations", "data.csv"], "'nothing.yaml' cannot be read"),
        (["run", "data.csv", "--observations", "data.csv"], "'data.csv'"),
        (["run", "graph.yaml", "--observations", "nothing.csv"], "no file 'nothing.csv'"),
        (["run", "graph.yaml", "--observations", "graph.yaml"], "must end in .csv"),
        (["run", "graph.yaml", "--observations", "empty.csv"], "'empty.csv'"),
        (["run", "graph.yaml", "--observations", "words.csv"], "'three' is not a number"),
        (["run", "graph.yaml", "--observations", "semicolons.csv"], "columns are divided by commas"),
        (["run", "graph.yaml", "--observations", "dates.csv"], "a time is a number, such as seconds"),
        (["run", "graph.yaml", "--observations", "wide.csv"], "2 columns of observations; 'y' takes 3"),
        (["run", "graph.yaml", "--observations", "broken.npy"], "'broken.npy' cannot be read"),
        (["run", "graph.yaml", "--observations", "broken.parquet"], "'broken.parquet' cannot be read"),
        (["run", "graph.yaml", "--observations", "data.csv", "--time", "b.c"], "no column 'b.c'"),
        (["run", "graph.yaml", "--observations", "back.csv"], "before the previous one"),
        (["run", "graph.yaml", "--observations", "data.csv", "--resume", "nothing"], "no file 'nothing'"),
        (["run", "graph.yaml", "--observations", "data.csv", "--resume", "data.csv"], "not a checkpoint"),
        (["run", "graph.yaml", "--observations", "data.csv", "--output", "no/r.nc"], "no folder 'no'"),
        (["run", "graph.yaml", "--observations", "data.csv", "--checkpoint", "no/r"], "no folder 'no'"),
        (["run", "graph.yaml", "--observations", "data.csv", "--functions", "no.py"], "no file 'no.py'"),
        (["run", "graph.yaml", "--observations", "data.csv", "--functions", "graph.yaml"], "'graph.yaml' failed"),
        (["forecast", "nothing", "--horizon", "1"], "no file 'nothing'"),
        (["forecast", "graph.yaml", "--horizon", "1"], "give --observations"),
        (["forecast", "graph.yaml", "--observations", "data.csv", "--horizon", "-1"], "horizon must be"),
        (["draw", "graph.yaml", "--output", "g.jpg"], "a drawing must end in"),
        (["draw", "graph.yaml", "--output", "no/g.png"], "no folder 'no'"),
    ],
)
def test_user_errors_are_one_line(folder, arguments, words):
    (folder / "empty.csv").write_text("")
    (folder / "words.csv").write_text("a,b,c\n1,2,three\n")
    (folder / "semicolons.csv").write_text("a;b;c\n1;2;3\n")
    (folder / "dates.csv").write_text("t,a,b,c\n2024-01-01,1,2,3\n")
    (folder / "wide.csv").write_text("a,b\n1,2\n")
    (folder / "back.csv").write_text("t,a,b,c\n1,1,1,1\n0,1,1,1\n")
    (folder / "broken.npy").write_bytes(b"\x93NUMPY broken")
    (folder / "broken.parquet").write_bytes(b"PAR1")
    done = pcnet(*arguments)
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("pcnet: ")
    assert words in done.stderr
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("1,2", "line 2: observations of 'y' have shape"),
        ("1,2,x", "line 2: '1,2,x' is not a row of numbers"),
        ("{", "line 2: '{' is not JSON"),
        ('{"z": 1}', "line 2: observations are given for"),
        ('{"y": "text"}', "line 2: observations of 'y' must be real numbers"),
        ('{"y": [1, 2, 3], "t": "now"}', "line 2: a time must be a number"),
        ("inf,1,1", "line 2: observation of 'y' at index"),
    ],
)
def test_invalid_lines_are_rejected(folder, line, words):
    done = pcnet("run", "graph.yaml", "--observations", "-", "--checkpoint", "run.ckpt", input=f"1,1,1\n{line}\n")
    assert done.exit_code == 2
    assert words in done.stderr
    assert len(done.stdout.splitlines()) == 1  # what came before was answered, and is kept
    assert pc.resume("run.ckpt").tick == 1
    assert pcnet("run", "graph.yaml", "--observations", "-", input="").exit_code == 2


def test_divergence_has_its_own_exit_code(folder):
    wild = Y.copy()
    wild[5] = 1e300
    np.save("wild.npy", wild)
    done = pcnet("run", "graph.yaml", "--observations", "wild.npy")
    assert done.exit_code == 3
    assert "observation 5" in done.stderr
    done = good("run", "graph.yaml", "--observations", "wild.npy", "--on-divergence", "hold")
    assert "fallbacks of hold: 1" in done.stdout


def test_a_closed_output_pipe_ends_the_run_quietly(folder):
    command = [sys.executable, "-m", "pcnet.io.command_line", "run", "graph.yaml", "--observations", "-"]
    script = "import sys; from pcnet.io.command_line import app; sys.argv = sys.argv[1:]; app()"
    command[1:3] = ["-c", script, "pcnet"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ), text=True
    )
    process.stdin.write("1,1,1\n")
    process.stdin.flush()
    assert json.loads(process.stdout.readline())["observation"] == 0
    process.stdout.close()
    process.stdin.write("1,1,1\n" * 50)
    process.stdin.close()
    assert process.wait(PATIENCE) == 0
    assert process.stderr.read() == ""


def fetch(address, path):
    with urllib.request.urlopen(address + path, timeout=PATIENCE) as answer:
        return answer.read().decode()


@contextmanager
def started(folder, *arguments):
    """The command in a process of its own, and the address that it says."""
    command = [sys.executable, "-c", "from pcnet.io.command_line import app; app()", *arguments]
    ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=folder, text=True, **ends) as process:
        try:
            yield process, re.fullmatch(r"watch at (http://127\.0\.0\.1:\d+/)\n", process.stderr.readline())[1]
        finally:
            process.kill()


def test_a_stream_is_shown_on_the_live_page(folder):
    with started(folder, "run", "graph.yaml", "--observations", "-", "--watch") as (process, address):
        assert "Waiting" in fetch(address, "")
        for count in (1, 2, 3):
            process.stdin.write("1 1 1\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["observation"] == count - 1
            assert json.loads(fetch(address, "flow.json"))["observations"] == count
        assert "Error flow of graph.yaml" in fetch(address, "")
        process.stdin.close()
        assert process.wait(timeout=PATIENCE) == 0  # the page ends with the stream
        with pytest.raises(urllib.error.URLError):
            fetch(address, "")


def test_the_live_page_of_a_file_stays_until_ctrl_c(folder):
    arguments = ("run", "graph.yaml", "--observations", "data.csv", "--output", "result.nc", "--watch")
    with started(folder, *arguments) as (process, address):
        assert "30 rows of 3 channels of 'y', from a, b, c" in process.stderr.readline()
        assert "until Ctrl-C" in process.stderr.readline()
        assert json.loads(fetch(address, "flow.json"))["observations"] == 30
        same(reference(), pc.Result.load(folder / "result.nc"))
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE) == 0


def test_a_port_in_use_is_a_clear_error(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = pcnet("run", "graph.yaml", "--observations", "data.csv", "--watch", "--port", port)
    assert done.exit_code == 2
    assert f"port {port} cannot be used" in done.stderr


def test_a_diverged_run_is_saved_and_resumes_with_another_policy(folder):
    wild = Y.copy()
    wild[20] = 1e300
    np.save("wild.npy", wild)
    arguments = ("run", "graph.yaml", "--observations", "wild.npy")
    assert pcnet(*arguments, "--checkpoint", "run.ckpt", "--checkpoint-every", 7).exit_code == 3
    kept = pc.resume("run.ckpt")
    assert kept.tick == 20
    assert np.isfinite(kept.mean("x")).all()
    assert pcnet(*arguments, "--resume", "run.ckpt").exit_code == 3  # as so far
    good(*arguments, "--resume", "run.ckpt", "--on-divergence", "hold", "--output", "r.nc")
    held = odem(orders=2, every=4).run(wild, on_divergence="hold", screen=False)
    same(held, pc.Result.load("r.nc"))


def test_batches_and_single_series_from_files(folder):
    both = np.stack([Y, Y + 0.1])
    np.save("both.npy", both)
    arguments = ("run", "graph.yaml", "--observations", "both.npy", "--checkpoint", "run.ckpt", "--output", "r.nc")
    good(*arguments, "--checkpoint-every", 7)
    same(odem(orders=2, every=4).run(both), pc.Result.load("r.nc"))
    good("run", "graph.yaml", "--observations", "both.npy", "--resume", "run.ckpt")
    x = GeneralisedStateNode("x", dim=1, orders=1, flow=pc.systems.linear([[-0.1]]))
    graph = pc.Graph()
    graph.predicts(x, SensoryNode("y", dim=1, orders=1, dt=0.1))
    for name in ("x", "y"):
        graph.weighs(PrecisionNode(f"n{name}", prior_precision=1.0, sd=0.1, correlation_time=0.1), graph[name])
    pc.save_model("one.yaml", pc.Model(graph, pc.states_only()))
    np.save("one.npy", Y[:, 0])
    np.savez("one.npz", y=Y[:, 0])
    one, other = (good("run", "one.yaml", "--observations", name).stdout for name in ("one.npy", "one.npz"))
    assert one == other


@pytest.mark.parametrize("option", ["--output", "--checkpoint"])
def test_a_missing_folder_is_reported_before_the_run(folder, option):
    done = pcnet("run", "graph.yaml", "--observations", "-", option, "nowhere/file", input="1,2,3\n")
    assert done.exit_code == 2
    assert "no folder 'nowhere'" in done.stderr
    assert not done.stdout
    done = pcnet("run", "graph.yaml", "--observations", "-", "--time", "t", input="1,2,3\n")
    assert done.exit_code == 2
    assert "--time is for files" in done.stderr


def test_a_recorded_flow_can_be_viewed(tmp_path):
    odem(orders=2).save(tmp_path / "model.yaml")
    np.savetxt(tmp_path / "data.csv", pc.simulate.glv_process(30, noise="white", seed=1).observations, delimiter=",")
    run = ["run", str(tmp_path / "model.yaml"), "--observations", str(tmp_path / "data.csv"), "--record", "flow"]
    done = CliRunner().invoke(app, run)
    assert done.exit_code == 2
    assert "add --output run.nc, then pcnet view run.nc" in done.stderr
    done = CliRunner().invoke(app, [*run, "--output", str(tmp_path / "run.nc")])
    assert done.exit_code == 0, done.output
    assert "pcnet view" in done.stderr
    done = CliRunner().invoke(app, ["view", str(tmp_path / "run.nc"), "--no-open"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "run.html").stat().st_size > 100_000


def test_beliefs_as_a_table(folder):
    good("run", "graph.yaml", "--observations", "data.csv", "--output", "beliefs.csv")
    table = pd.read_csv("beliefs.csv")
    second = table[(table.node == "x") & (table.dimension == 1) & (table.order == 0)]
    np.testing.assert_allclose(second["mean"], reference().mean("x")[:, 0, 1], rtol=1e-8)


def test_the_version_is_that_of_the_package(folder):
    assert good("--version").output == f"pcnet {version('pcnet')}\n"


def test_warnings_are_one_line(folder):
    coded = Y.copy()
    coded[[3, 8], 0] = -999
    np.savetxt("coded.csv", coded, delimiter=",")
    done = pcnet("run", "graph.yaml", "--observations", "coded.csv", "--on-divergence", "hold")
    assert "pcnet: warning: channel 0 of 'y' is -999 in 2 observations" in done.stderr
