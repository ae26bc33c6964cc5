"""The examples run as documented and produce their pictures."""

import re
import runpy
import sys
import tracemalloc

import pytest

from support.paths import EXAMPLES, ROOT

pytestmark = pytest.mark.usefixtures("kinds_restored", "as_users_run")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run an example in a folder of its own; returns what it prints, and the number of its pictures."""

    def run(name, *arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out, len(list(tmp_path.rglob("*.png")))

    yield run
    tracemalloc.stop()  # a benchmark measures memory by it, as a process of its own


@pytest.mark.parametrize(
    ("name", "arguments", "pictures", "words"),
    [
        ("paper_demo.py", ["--observations", "100", "--output", "pictures"], 5, ["MSE", "free action", "truth 0.2"]),
        pytest.param(
            "pendulum.py",
            ["--seconds", "9", "--seeds", "1"],
            1,
            ["true flow", "better than persistence", "of 1 seeds"],
            marks=pytest.mark.slow,
        ),
        ("stack.py", ["--samples", "150", "--seeds", "1"], 1, ["drift: mean squared error", "switch: mean"]),
        ("spikes.py", ["--samples", "150"], 1, ["smoother: error", "true 3.0"]),
        pytest.param("choices.py", ["--trials", "60"], 1, ["forecast:", "true 0.15"], marks=pytest.mark.slow),
        ("fusion.py", ["--samples", "60", "--seeds", "1"], 1, ["both: error", "slow and accurate alone: error"]),
        ("manoeuvre.py", ["--samples", "30"], 1, ["of the velocity 0.", "turn rate"]),
        ("two_wells.py", ["--samples", "30", "--peaks", "4"], 1, ["up to 4 peaks: log-density", "one peak"]),
        (
            "benchmark_size.py",
            ["--channels", "--filtered", "--states", "3", "--passes", "1"],
            0,
            ["Kalman", "Lorenz-96", "MB"],
        ),
        ("benchmark_size.py", ["--case", "linear", "12", "--passes", "1"], 0, ['"pcnet": ', '"memory": ']),
        ("benchmark_size.py", ["--case", "nonlinear", "5", "--passes", "1"], 0, ['"pcnet": ', '"memory": ']),
        ("soak.py", ["--observations", "1500", "--check", "500"], 0, ["MB", "all checks passed"]),
        (
            "benchmark.py",
            [
                *("--passes", "1", "--samples", "150", "--models", "odem lorenz, 2 orders"),
                *("--rivals", "filterpy", "pyhgf-rust", "--pyhgf", "no-such-python"),
            ],
            0,
            ["numpy", "( 1.00)", "filterpy", "Rust", "does not start: FileNotFoundError", "recorded step", "lorenz"],
        ),
    ],
)
def test_example(name, arguments, pictures, words, run):
    printed, drawn = run(name, *arguments)
    assert all(word in printed for word in words)
    assert drawn == pictures


def test_a_short_soak_of_the_adaptive_filter(run, eager):
    """Without compiled code: what is compiled late takes memory that is no leak."""
    printed, _ = run("soak.py", "--model", "adaptive_filter", "--observations", "90", "--check", "30")
    assert "all checks passed" in printed


@pytest.mark.slow
def test_a_soak_of_the_adaptive_filter(run):
    printed, _ = run("soak.py", "--model", "adaptive_filter", "--observations", "3000", "--check", "1000")
    assert "all checks passed" in printed


def test_the_demo_shows_what_the_readme_claims(run, monkeypatch):
    """The error of a filter with wrong noise over ours; intervals that contain the truth; a page."""
    monkeypatch.delenv("PCNET_ENGINE", raising=False)  # as readers run it
    printed, pictures = run("demo.py", "--no-timing", "--output", "pictures")
    ours, theirs = map(float, re.search(r"error of the potential \(seen\) +([\d.]+) +([\d.]+)", printed).groups())
    claimed = re.search(r"has ([\d.]+) times its error", (ROOT / "README.md").read_text(encoding="utf-8"))[1]
    assert theirs / ours == pytest.approx(float(claimed), rel=0.1)
    for name in ("current", "rate of recovery", "noise sd of the electrode", "noise sd of the potential"):
        (line,) = (line for line in printed.splitlines() if line.startswith(name))
        assert "✓" in line
    assert float(re.search(r"(\d+)% of the true potential inside the 95 % band", printed)[1]) >= 80
    assert "open pictures/flow.html" in printed
    assert pictures == 2


@pytest.mark.slow
def test_a_learned_pendulum_is_forecast_better_than_by_persistence(run):
    """On seeds that neither the example shows nor its settings were chosen on, in angle and in velocity."""
    printed, _ = run("pendulum.py", "--seeds", "16", "--seed", "1000")
    rows = re.findall(r"([\d.]+) +s .* (\d+) \| (\d+) of 16 seeds", printed)
    assert [float(row[0]) for row in rows] == [0.1, 0.2, 0.5, 1.0, 1.5, 2.0]
    assert all(int(wins) >= 15 for row in rows for wins in row[1:])


def test_student_t_errors_are_robust_to_outliers(run):
    printed, pictures = run("student_t.py")
    assert pictures == 1
    assert "Student-t errors: mean squared error" in printed
    gaussian, heavy = (float(line.split()[-1]) for line in printed.splitlines()[:2])
    assert heavy < gaussian / 10
    assert heavy < 0.01  # the variance of an ordinary observation


def test_populations_are_forecast_better_than_by_persistence(run):
    printed, pictures = run("lynx_hare.py", "--years", "2")
    assert pictures == 1
    assert "as last year: 0.486" in printed
    assert "of 40 forecasts" in printed
    forecast, last = re.findall(r"(0\.\d+)", printed)[:2]
    assert float(forecast) < float(last) / 2


@pytest.mark.slow
def test_two_sensors_are_better_than_either_alone(run):
    printed, pictures = run("fusion.py", "--samples", "600", "--seeds", "1")
    assert pictures == 1
    assert printed.startswith("both: error")
    assert "slow and accurate alone" in printed
    both, fast, slow = (float(line.split("error")[1].split()[0]) for line in printed.splitlines()[:3])
    assert both < 0.95 * min(fast, slow)


@pytest.mark.slow
def test_categories_follow_a_target_that_turns(run):
    printed, pictures = run("manoeuvre.py", "--samples", "250")
    assert pictures == 1
    errors = [float(each) for each in re.findall(r"of the velocity (0\.\d+)", printed)]
    assert errors[0] < 0.85 * errors[1]
    assert float(re.findall(r"turn rate (0\.\d+)", printed)[0]) == pytest.approx(0.12, rel=0.15)


@pytest.mark.slow
def test_two_peaks_are_better_than_one(run):
    printed, pictures = run("two_wells.py", "--samples", "200", "--peaks", "4")
    assert pictures == 1
    seen, true = zip(
        *re.findall(r"log-density (-?[\d.]+) of what is seen next, (-?[\d.]+) of the true", printed), strict=True
    )
    assert float(seen[0]) > float(seen[1]) + 0.05
    assert float(true[0]) > float(true[1]) + 0.1


def test_a_hidden_force_is_inferred(run):
    printed, pictures = run("hidden_force.py", "--samples", "600")
    assert pictures == 1
    found = re.findall(r"error ([\d.]+), sd of the force ([\d.]+)", printed)
    (online, sd), (smoothed, _) = (map(float, each) for each in found)
    assert smoothed < online < 0.6 * sd


def test_a_heated_house_is_forecast(run):
    """Later beliefs are better than the first ones, and all errors below the noise of the sensor, 0.4 °C."""
    printed, pictures = run("heating.py", "--days", "2")
    assert pictures == 1
    found = re.findall(r"error of the air ([\d.]+) °C, of the walls ([\d.]+)", printed)
    online, later, ahead = ([float(value) for value in each] for each in found)
    assert later[0] <= online[0]
    assert max(*online, *later, *ahead) < 0.4


def test_a_blob_is_tracked_better_than_by_single_images(run):
    printed, pictures = run("blob.py", "--frames", "150", "--output", "pictures")
    assert pictures == 1
    assert "centre of mass:" in printed
    tracked, spot, mass = (float(line.split("error")[1].split()[0]) for line in printed.splitlines()[:3])
    assert tracked < 1 < spot < mass
    assert "true 0.7" in printed
    assert float(printed.split("learned sd")[1].split(",")[0]) == pytest.approx(0.7, rel=0.1)
