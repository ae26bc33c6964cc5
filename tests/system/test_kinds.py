"""Every kind of adaptive filter in files, on the command line and in sweeps, with both engines.

Expectations: the digest of the model, and the numbers of one run without a stop.
"""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import pcnet as pc
from pcnet.io.command_line import app
from pcnet.model.digest import digest
from support.forgeries import forgeries
from support.kinds import KINDS, rows


@pytest.mark.parametrize("kind", ["switching", "causes", "inputs", "counts"])
def test_model_files_and_the_command_line_take_every_kind(kind, tmp_path, monkeypatch):
    model, data, _ = KINDS[kind]()
    monkeypatch.chdir(tmp_path)
    pc.save_model("model.yaml", model)
    assert digest(pc.Model.load("model.yaml")) == digest(model)
    np.savetxt("y.csv", np.hstack(list(data.values()))[:20], delimiter=",", header=",".join(data), comments="")
    given = ["run", "model.yaml", "--observations", "y.csv", "--output", "run.nc", "--record", "flow"]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, (done.stderr, done.exception)
    parts = {name: values[:20] for name, values in data.items()}
    found, whole = pc.Result.load("run.nc"), model.run(parts, progress=False)
    np.testing.assert_allclose(found.mean("x"), whole.mean("x"), rtol=1e-9)
    assert CliRunner().invoke(app, ["view", "run.nc", "--output", "run.html"]).exit_code == 0
    lines = "\n".join(json.dumps({name: y.tolist() for name, y in row.items()}) for row in rows(data, 0, 5))
    done = CliRunner().invoke(app, ["run", "model.yaml", "--observations", "-"], input=lines + "\n")
    assert done.exit_code == 0, (done.stderr, done.exception)
    assert len(done.stdout.splitlines()) == 5


@pytest.mark.parametrize("engine", ["eager", "compiled"])
@pytest.mark.parametrize("kind", ["switching", "causes", "inputs", "counts", "smoothed bank", "peaks"])
def test_every_kind_resumes_to_the_bit(kind, engine, tmp_path):
    model, data, options = KINDS[kind]()
    end = 24 if engine == "eager" else 50
    whole = model.start(engine=engine, **options)
    session = model.start(engine=engine, **options)
    for k, y in enumerate(rows(data, 0, end)):
        whole.step(y)
        session.step(y)
        if k in (10, end // 2):
            session = pc.resume(session.save(tmp_path / "run"), model)
    np.testing.assert_array_equal(session.result().mean("x"), whole.result().mean("x"))
    np.testing.assert_array_equal(session.result().sd("x"), whole.result().sd("x"))


def test_forged_checkpoints_of_every_kind_have_named_errors(tmp_path):
    assert forgeries(tmp_path, 40) == []


@pytest.mark.parametrize("kind", ["switching", "causes"])
def test_sweeps_take_every_kind(kind):
    _, data, _ = KINDS[kind]()
    parts = {name: values[:20] for name, values in data.items()}
    counts = pc.sweep(lambda trial: KINDS[kind]()[0], {"trial": [1, 2]}, parts, progress=False, processes=1).counts
    assert counts["done"] == 2
