"""The page of combinations says what comes of each."""

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TRIED = runpy.run_path(str(DOCS / "combinations.py"))


@pytest.mark.parametrize(
    "title", ["drives", *(pytest.param(each, marks=pytest.mark.slow) for each in TRIED["TABLES"] if each != "drives")]
)
def test_a_table_is_what_comes_of_trying(title):
    """After changes: python docs/combinations.py."""
    assert TRIED["table"](title) in (DOCS / "combinations.md").read_text(encoding="utf-8")
