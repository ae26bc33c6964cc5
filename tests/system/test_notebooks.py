"""The notebooks run from top to bottom and show pictures."""

import os

import nbformat
import pytest
from nbclient import NotebookClient

from support.pages import notebooks
from support.paths import ROOT
from support.waiting import PATIENCE

pytestmark = pytest.mark.usefixtures("as_users_run")

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def test_there_are_three():
    assert len(NOTEBOOKS) == 3


def test_those_of_the_how_to_pages_are_made_from_them():
    """The code of the pages is run, and what it prints compared, by the tests of the documentation."""
    assert len(notebooks.pages()) == 10
    for page in notebooks.pages():
        made = notebooks.notebook(page.read_text(encoding="utf-8"))
        nbformat.validate(nbformat.reads(made, as_version=4))
        found = (ROOT / "examples" / "notebooks" / "howto" / f"{page.stem}.ipynb").read_text(encoding="utf-8")
        assert found == made, f"run python docs/notebooks.py: {page.name} has changed"


@pytest.mark.slow
def test_notebooks_run(monkeypatch):
    """One after another in one kernel, whose names are forgotten in between: a kernel takes seconds to start."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    all_cells, code = [], {}
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        code[path.stem] = [cell for cell in cells if cell.cell_type == "code"]
        all_cells += [*cells, nbformat.v4.new_code_cell("%reset -f")]
    assert not any(cell.outputs for cells in code.values() for cell in cells)  # small files, readable differences
    together = nbformat.v4.new_notebook(cells=all_cells)
    folder = {"metadata": {"path": NOTEBOOKS[0].parent}}
    client = NotebookClient(
        together, timeout=PATIENCE, startup_timeout=PATIENCE, kernel_name="python3", resources=folder
    )
    client.execute()
    for name, cells in code.items():
        pictures = [each for cell in cells for each in cell.outputs if "image/png" in each.get("data", {})]
        assert len(pictures) >= 2, name
