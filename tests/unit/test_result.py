"""Results are labelled arrays that survive being saved."""

import numpy as np
import pytest
from scipy.stats import norm

import pcnet as pc
from pcnet.errors import ResultError
from pcnet.graphs import odem


@pytest.fixture(scope="module")
def single():
    graph, schedule = odem(orders=3, every=5)
    y = np.linspace(1.0, 2.0, 60).reshape(20, 3)
    return graph.run(y, schedule=schedule)


@pytest.fixture(scope="module")
def batched():
    graph, schedule = odem(orders=3, every=5, kappa=[0.5, 1.0])
    y = np.linspace(1.0, 2.0, 60).reshape(20, 3)
    return graph.run(y, schedule=schedule)


def test_shapes(single, batched):
    assert single.mean("x").shape == (20, 3, 3)
    assert single.mean("theta").shape == single.sd("theta").shape == (20, 3)
    assert single.mean("lambda_x").shape == (20, 3)
    assert single.free_energy.shape == single.accuracy.shape == single.complexity.shape == (20,)
    assert single.free_action.shape == ()
    assert batched.mean("x").shape == (2, 20, 3, 3)
    assert batched.free_energy.shape == (2, 20)
    assert batched.free_action.shape == (2,)
    np.testing.assert_allclose(single.times, 0.01 * np.arange(20))
    np.testing.assert_allclose(single.free_energy, single.complexity - single.accuracy)


def test_intervals(single):
    lower, upper = single.interval("theta", probability=0.9)
    np.testing.assert_allclose((upper - lower) / 2, norm.ppf(0.95) * single.sd("theta"))
    np.testing.assert_allclose((upper + lower) / 2, single.mean("theta"))
    with pytest.raises(ResultError, match="between 0 and 1"):
        single.interval("theta", probability=95)


def test_xarray(batched):
    data = batched.to_xarray()
    assert data["x.mean"].dims == ("batch", "time", "x.order", "x.dimension")
    np.testing.assert_array_equal(data["x.mean"].values, batched.mean("x"))
    np.testing.assert_allclose(data.time.values, batched.times)
    assert data["free_action"].dims == ("batch",)


def test_dataframe(batched):
    table = batched.to_dataframe(long=True)
    row = table[
        (table.node == "x")
        & (table.quantity == "mean")
        & (table.batch == 1)
        & (table.order == 2)
        & (table.dimension == 0)
    ]
    np.testing.assert_array_equal(row.value, batched.mean("x")[1, :, 2, 0])
    np.testing.assert_allclose(row.time, batched.times)
    assert len(table) == sum(trace.values.size for trace in batched.traces.values())


@pytest.mark.parametrize("name", ["single", "batched"])
def test_save_and_load(name, request, tmp_path):
    result = request.getfixturevalue(name)
    loaded = pc.Result.load(result.save(tmp_path / "run.nc"))
    assert loaded.traces.keys() == result.traces.keys()
    for key, trace in result.traces.items():
        np.testing.assert_array_equal(loaded.traces[key].values, trace.values)
        assert loaded.traces[key].dims == trace.dims
    np.testing.assert_array_equal(loaded.free_action, result.free_action)
    np.testing.assert_array_equal(loaded.times, result.times)
    assert loaded.roles == result.roles
    assert loaded.batch_shape == result.batch_shape
    assert loaded.fallbacks.keys() == result.fallbacks.keys()
    assert loaded.graph == result.graph
    assert list(tmp_path.iterdir()) == [tmp_path / "run.nc"]


def test_a_failed_save_leaves_the_old_file(single, tmp_path, monkeypatch):
    path = single.save(tmp_path / "run.nc")
    before = path.read_bytes()
    monkeypatch.setattr("xarray.Dataset.dump_to_store", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        single.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_invalid_files_are_rejected(tmp_path, single):
    with pytest.raises(ResultError, match="no file"):
        pc.Result.load(tmp_path / "none.nc")
    junk = tmp_path / "junk.nc"
    junk.write_bytes(b"not a file of ours")
    with pytest.raises(ResultError, match="not a NetCDF file"):
        pc.Result.load(junk)
    whole = single.save(tmp_path / "whole.nc").read_bytes()
    junk.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ResultError, match=r"junk.nc"):
        pc.Result.load(junk)
    import xarray as xr

    xr.Dataset({"a": ("t", [1.0])}).to_netcdf(tmp_path / "foreign.nc", engine="h5netcdf")
    with pytest.raises(ResultError, match="not written by pcnet"):
        pc.Result.load(tmp_path / "foreign.nc")


def test_missing_quantities_are_named(single):
    with pytest.raises(ResultError, match="no node 'z'"):
        single.mean("z")
    with pytest.raises(ResultError, match=r"'covariance' of 'x' was not recorded.*record="):
        single.covariance("x")
    with pytest.raises(ResultError, match=r"Record\(messages=True\)"):
        single.message("x", "y")
    assert "x.mean" in repr(single)
