"""The examples run as documented and produce their pictures."""

import re
import runpy
import sys

import pytest

from support.paths import EXAMPLES

pytestmark = pytest.mark.usefixtures("kinds_restored")


@pytest.mark.parametrize(
    ("name", "arguments", "pictures", "words"),
    [
        ("demo.py", ["--observations", "300", "--output", "pictures"], 5, ["MSE", "free action", "truth 0.2"]),
        ("student_t.py", [], 1, ["Student-t errors: mean squared error"]),
        ("pendulum.py", ["--seconds", "9", "--seeds", "1"], 1, ["true flow", "better than persistence", "of 1 seeds"]),
        ("blob.py", ["--frames", "60", "--output", "pictures"], 1, ["tracked:", "centre of mass:", "true 0.7"]),
        ("fusion.py", ["--samples", "60", "--seeds", "1"], 1, ["both: error", "slow and accurate alone"]),
        ("stack.py", ["--samples", "400", "--seeds", "1"], 1, ["drift: mean squared error", "switch: mean"]),
        ("lynx_hare.py", ["--years", "3"], 1, ["as last year: 0.486", "of 40 forecasts"]),
        ("benchmark_size.py", ["--channels", "40", "--states", "3", "--passes", "1"], 0, ["Kalman", "Lorenz-96", "MB"]),
        ("soak.py", ["--observations", "3000", "--check", "1000"], 0, ["MB", "all checks passed"]),
        (
            "soak.py",
            ["--model", "adaptive_filter", "--observations", "600", "--check", "200"],
            0,
            ["MB", "all checks passed"],
        ),
        (
            "benchmark.py",
            ["--passes", "1", "--samples", "150", "--models", "odem lorenz, 2 orders"],
            0,
            ["Kalman", "recorded step", "lorenz"],
        ),
    ],
)
def test_example(name, arguments, pictures, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    assert all(word in printed for word in words)
    assert len(list(tmp_path.rglob("*.png"))) == pictures


@pytest.mark.slow
def test_a_learned_pendulum_is_forecast_better_than_by_persistence(tmp_path, monkeypatch, capsys):
    """On seeds that neither the example shows nor its settings were chosen on, in angle and in velocity."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pendulum.py", "--seeds", "16", "--seed", "1000"])
    runpy.run_path(str(EXAMPLES / "pendulum.py"), run_name="__main__")
    rows = re.findall(r"([\d.]+) +s .* (\d+) \| (\d+) of 16 seeds", capsys.readouterr().out)
    assert [float(row[0]) for row in rows] == [0.1, 0.2, 0.5, 1.0, 1.5, 2.0]
    assert all(int(wins) >= 15 for row in rows for wins in row[1:])


def test_student_t_errors_are_robust_to_outliers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "student_t.py"), run_name="__main__")
    gaussian, heavy = (float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()[:2])
    assert heavy < gaussian / 10
    assert heavy < 0.01  # the variance of an ordinary observation


def test_populations_are_forecast_better_than_by_persistence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lynx_hare.py", "--years", "1"])
    runpy.run_path(str(EXAMPLES / "lynx_hare.py"), run_name="__main__")
    forecast, last = re.findall(r"(0\.\d+)", capsys.readouterr().out)[:2]
    assert float(forecast) < float(last) / 2


def test_two_sensors_are_better_than_either_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fusion.py", "--samples", "1000", "--seeds", "2"])
    runpy.run_path(str(EXAMPLES / "fusion.py"), run_name="__main__")
    both, fast, slow = (float(line.split("error")[1].split()[0]) for line in capsys.readouterr().out.splitlines()[:3])
    assert both < 0.95 * min(fast, slow)


def test_a_blob_is_tracked_better_than_by_single_images(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["blob.py", "--frames", "150"])
    runpy.run_path(str(EXAMPLES / "blob.py"), run_name="__main__")
    printed = capsys.readouterr().out
    tracked, spot, mass = (float(line.split("error")[1].split()[0]) for line in printed.splitlines()[:3])
    assert tracked < 1 < spot < mass
    assert float(printed.split("learned sd")[1].split(",")[0]) == pytest.approx(0.7, rel=0.1)
