"""The examples run as they are started, and make the pictures they speak of."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    ("name", "arguments", "pictures", "words"),
    [
        ("demo.py", ["--observations", "300", "--output", "pictures"], 5, ["MSE", "free action", "truth 0.2"]),
        ("student_t.py", [], 1, ["Student-t errors: mean squared error"]),
        ("benchmark.py", ["--passes", "1"], 0, ["Kalman", "batch 756", "lorenz"]),
    ],
)
def test_example(name, arguments, pictures, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    assert all(word in printed for word in words)
    assert len(list(tmp_path.rglob("*.png"))) == pictures


def test_outliers_drag_gaussian_errors_but_not_heavy_tails(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "student_t.py"), run_name="__main__")
    gaussian, heavy = (float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()[:2])
    assert heavy < gaussian / 10
    assert heavy < 0.01  # the variance of an ordinary observation
