"""Results of trials that are kept: what was done is not done again, what has changed is, and no error loses others."""

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from studies.kept import Job, key_of, run_jobs

ROOT = Path(__file__).parents[2]
VALUES = [0.1 + 0.2, 1e-300, -math.inf, math.pi, 0]


def note(place, name, fails=False):
    """Write down that a job has run, in its result and in a file."""
    with (Path(place) / "ran").open("a") as file:
        file.write(f"{name}\n")
    if fails:
        raise ValueError(f"{name} is bad")
    return {"name": name, "values": VALUES, "none": math.nan}


def ran(place):
    path = place / "ran"
    return path.read_text().split() if path.exists() else []


def job(place, name, key="key", **options):
    return Job(f"job {name}", key, note, (str(place), name, *options.values()))


def outcomes(place, jobs, processes=1):
    return {each.job.name[4:]: each for each in run_jobs([[job] for job in jobs], place / "kept", processes)}


@pytest.mark.parametrize("processes", [1, 2])
def test_what_was_kept_is_not_run_again_and_has_the_same_digits(processes, tmp_path):
    jobs = [job(tmp_path, name) for name in "abc"]
    first, again = outcomes(tmp_path, jobs[:2], processes), outcomes(tmp_path, jobs, processes)
    assert sorted(ran(tmp_path)) == ["a", "b", "c"]
    assert [first[name].kept for name in "ab"] == [False, False]
    assert [again[name].kept for name in "abc"] == [True, True, False]
    for outcome in (*first.values(), *again.values()):
        assert outcome.result["values"] == VALUES
        assert math.isnan(outcome.result["none"])


def test_with_another_key_it_is_run_anew(tmp_path):
    outcomes(tmp_path, [job(tmp_path, "a")])
    found = outcomes(tmp_path, [job(tmp_path, "a", key="other")])
    assert ran(tmp_path) == ["a", "a"]
    assert not found["a"].kept


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"key": 1}'])
def test_a_file_that_is_no_result_is_replaced(content, tmp_path):
    one = job(tmp_path, "a")
    outcomes(tmp_path, [one])
    (path,) = (tmp_path / "kept").iterdir()
    assert path == one.path(tmp_path / "kept")
    assert json.loads(path.read_text())["result"]["name"] == "a"
    path.write_text(content)
    assert not outcomes(tmp_path, [one])["a"].kept
    assert outcomes(tmp_path, [one])["a"].kept


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_is_the_outcome_of_its_job_alone_and_is_tried_again(processes, tmp_path):
    jobs = [job(tmp_path, "a"), job(tmp_path, "b", fails=True), job(tmp_path, "c")]
    for _ in range(2):
        found = outcomes(tmp_path, jobs, processes)
        assert [found[name].error for name in "abc"] == [None, "ValueError: b is bad", None]
    assert sorted(ran(tmp_path)) == ["a", "b", "b", "c"]


def test_an_error_leaves_the_rest_of_its_group(tmp_path):
    group = [job(tmp_path, "a", fails=True), job(tmp_path, "b")]
    found = list(run_jobs([group], tmp_path / "kept", 1))
    assert [outcome.error for outcome in found] == ["ValueError: a is bad", None]


def test_a_run_that_was_killed_goes_on(tmp_path):
    """A process that is killed after two of four jobs has kept these; no scratch of a file is left."""
    script = f"""
import os, signal, sys
sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
from pathlib import Path
from test_kept import job, run_jobs

place = Path({str(tmp_path)!r})
for outcome in run_jobs([[job(place, name)] for name in "abcd"], place / "kept", 1):
    if outcome.job.name == "job b":
        os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert ran(tmp_path) == ["a", "b"]
    found = outcomes(tmp_path, [job(tmp_path, name) for name in "abcd"])
    assert [found[name].kept for name in "abcd"] == [True, True, False, False]
    assert ran(tmp_path) == ["a", "b", "c", "d"]
    assert len(list((tmp_path / "kept").iterdir())) == 4


def test_names_that_look_alike_as_files_have_files_of_their_own(tmp_path):
    folder = tmp_path / "kept"
    names = ["both × 50", "both ÷ 50", "both/50", "both 50", "x" * 40]
    paths = {Job(name, "", note).path(folder) for name in names}
    assert len(paths) == len(names)
    assert all(path.parent == folder for path in paths)


def test_a_key_depends_on_code_versions_and_settings(tmp_path, monkeypatch):
    code = tmp_path / "rules.py"
    code.write_text("x = 1")
    first = key_of([code], ["torch"], "smooth", (1, 2))
    assert first == key_of([code], ["torch"], "smooth", (1, 2))
    others = {key_of([code], ["torch"], "smooth", (1, 3)), key_of([code], ["torch", "numpy"], "smooth", (1, 2))}
    code.write_text("x = 2")
    others.add(key_of([code], ["torch"], "smooth", (1, 2)))
    code.write_text("x = 1")
    monkeypatch.setattr("studies.kept.sources", lambda: "other code of pcnet")
    others.add(key_of([code], ["torch"], "smooth", (1, 2)))
    assert len(others - {first}) == 4
