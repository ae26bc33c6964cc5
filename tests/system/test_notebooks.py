"""The notebooks run from top to bottom and show pictures."""

import os

import nbformat
import pytest
from nbclient import NotebookClient

from support.paths import ROOT
from support.waiting import PATIENCE

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def test_there_are_three():
    assert len(NOTEBOOKS) == 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in code)  # files stay small, and differences readable
    folder = {"metadata": {"path": path.parent}}
    client = NotebookClient(
        notebook, timeout=PATIENCE, startup_timeout=PATIENCE, kernel_name="python3", resources=folder
    )
    client.execute()
    pictures = [each for cell in code for each in cell.outputs if "image/png" in each.get("data", {})]
    assert len(pictures) >= 2
