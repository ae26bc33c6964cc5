"""The README's code runs as printed."""

import re

import pytest

from pcnet.sweeps import sweep
from support.paths import ROOT

pytestmark = pytest.mark.usefixtures("kinds_restored")
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_code_runs_as_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "cores", lambda: 1)  # starting worker processes takes longer than the work
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), names)
    assert (tmp_path / "quickstart.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    error, raw = map(float, re.search(r"error ([\d.]+), of the raw observations ([\d.]+)", printed).groups())
    assert error < raw / 2
    assert "(3, 1000, 3, 3)" in printed


def test_the_quickstart_is_short():
    lines = [line for line in BLOCKS[0].splitlines() if line.strip()]
    assert len(lines) <= 20


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#:]+)\)", README))
def test_links_exist(target):
    assert (ROOT / target).exists()


def test_the_commands_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in re.findall(r"`?make (\w+)", README):
        assert f"\n{command}:" in makefile
