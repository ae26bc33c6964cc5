"""The README is short, and its code runs and prints as shown."""

import os
import re

import pytest

from support.pages import printed as pages
from support.paths import ROOT

pytestmark = pytest.mark.usefixtures("kinds_restored", "as_users_run")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_code_prints_what_is_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PCNET_ENGINE", raising=False)  # as readers run it
    ((_, printed), (_, nothing)) = [
        each for each in pages.run(README, "README", dict(os.environ)) if each[0].language != "console"
    ]
    assert nothing is None  # the block after it is what it prints
    shown = re.search(r"```text\n(.*?)```", README, flags=re.DOTALL).group(1)
    assert pages.difference(printed, shown) is None
    assert (tmp_path / "forecast.png").stat().st_size > 10_000
    assert (tmp_path / "flow.html").stat().st_size > 100_000


def test_it_is_short():
    assert len(README.split()) <= 900
    code = re.search(r"```python\n(.*?)```", README, flags=re.DOTALL).group(1)
    statements = [line for line in code.splitlines() if line.strip()]
    assert len(statements) <= 15, statements


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_links_exist(target):
    assert (ROOT / target).exists()


def test_the_commands_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in re.findall(r"`?make (\w+)", README):
        assert f"\n{command}:" in makefile


def cells(page, row):
    """The cells of a row of a table in the documentation."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (found,) = re.findall(rf"^\| {row}[^|]*\|(.*)\|$", text, flags=re.MULTILINE)
    return [cell.strip() for cell in found.split("|")]


def test_its_figures_are_those_of_the_studies():
    text = re.sub(r"\s+", " ", README)
    told, ours = cells("calibration.md", "Lotka–Volterra, white noise, five guesses")
    ratio = float(ours.split("–")[0]) / float(told.split(",")[0])
    assert f"error is {ratio:.2f} of that of a Kalman filter" in text
    parameters, states = re.search(r"(\d+) / (\d+) %", ours).groups()
    assert f"contain the truth in {parameters}–{states} %" in text
    kinds = (
        "`odem`, 2 orders",
        "adaptive filter with its hypotheses",
        "one hypothesis of it, white noise",
        "two levels",
    )
    runs = [float(cells("performance.md", kind)[0]) for kind in kinds]
    assert f"{min(runs):.1f} to {max(runs):.1f} of the time of a numpy Kalman filter" in text
