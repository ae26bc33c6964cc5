"""The wheel contains only the package, and runs where only the wheel is; importing it leaves out what is slow."""

import subprocess
import sys
import tarfile
import zipfile

import pytest

import pcnet
from support.paths import ROOT

SCRIPT = """
import sys, pcnet, numpy as np
from pcnet.graphs import odem
assert pcnet.__file__.startswith(sys.argv[1]), pcnet.__file__
graph, schedule = odem(orders=2, every=2)
print(graph.run(np.ones((4, 3)), schedule=schedule).mean("x").shape)
"""
IMPORT = """
import sys, torch
before = set(sys.modules)
import pcnet, pcnet.graphs
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""
HEAVY = {
    "filelock", "h5netcdf", "llvmlite", "loky", "matplotlib", "networkx", "pandas", "safetensors", "scipy", "sqlite3",
    "sympy", "typer", "xarray", "yaml",
}  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def test_contents(built):
    wheel, sdist = built
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"pcnet", "pcnet-0.1.0.dist-info"}
    assert "pcnet/py.typed" in names
    assert "pcnet/nodes/generalised_state.py" in names
    page = {
        "page.html",
        "page.css",
        "page.js",
        "flow.js",
        "chart.js",
        "graph.js",
        "cytoscape.min.js",
        "cytoscape.LICENSE",
    }
    assert {f"pcnet/results/page/{name}" for name in page} <= set(names)
    assert "pcnet-0.1.0.dist-info/licenses/pcnet/results/page/cytoscape.LICENSE" in names
    with tarfile.open(sdist) as archive:
        members = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "pcnet/model/graph.py", "tests/system/test_package.py"} <= members
    assert {"mkdocs.yml", "docs/index.md", "docs/pictures/loop.png", "examples/notebooks/fusion.ipynb"} <= members


def test_the_wheel_runs_alone(built, tmp_path):
    wheel, _ = built
    target = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(target)
    command = [sys.executable, "-c", SCRIPT, str(target)]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(target)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(4, 2, 3)"


def test_top_level_links_point_into_the_package():
    for name in ("nodes", "graphs"):
        assert (ROOT / name).is_symlink()
        assert (ROOT / name).resolve() == ROOT / "pcnet" / name


def test_an_import_leaves_out_what_few_runs_need():
    done = subprocess.run([sys.executable, "-c", IMPORT], cwd=ROOT, capture_output=True, text=True, check=True)
    found = set(done.stdout.split())
    assert "pcnet" in found
    assert not found & HEAVY


def test_names_that_are_imported_at_their_first_use():
    assert set(pcnet.__all__) <= set(dir(pcnet))
    assert all(hasattr(pcnet, name) for name in pcnet.__all__)
    with pytest.raises(AttributeError, match="module 'pcnet' has no attribute 'sweap'"):
        pcnet.sweap  # noqa: B018
