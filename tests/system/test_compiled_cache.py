"""The folder of compiled code: shared by processes and threads, and harmless when damaged, full or not writable."""

import os
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest

import pcnet as pc
from pcnet.engine.compiled import cache as cache_module
from pcnet.engine.compiled import driver
from pcnet.engine.compiled.cache import ObjectCache
from pcnet.graphs import odem

Y = pc.simulate.glv_process(samples=60, noise="white", seed=1).observations
PROGRAM = """
import numpy, pcnet as pc
from pcnet.graphs import odem
y = pc.simulate.glv_process(samples=60, noise="white", seed=1).observations
session = odem(orders=2).start(engine="compiled")
session.run(y)
print(session.result().mean("x")[-1].tobytes().hex(), session.result().engine)
import sys
print("pcnet.engine.compiled.tick_compiler" in sys.modules)
"""


def run(folder):
    return odem(orders=2).run(Y, engine="compiled")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PCNET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A run with an empty folder, and what it left there."""
    made = tmp_path_factory.mktemp("first") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PCNET_CACHE", str(made))
        return run(made), made


@pytest.fixture
def filled(first, folder):
    """A copy of that folder."""
    shutil.copytree(first[1], folder)
    return folder


def test_files_are_private_and_used_again(folder):
    first = run(folder)
    files = sorted(folder.glob("*.o"))
    assert files
    assert folder.stat().st_mode & 0o077 == 0
    assert not list(folder.glob("*.part"))
    times = [path.stat().st_ino for path in files]
    second = run(folder)
    assert [path.stat().st_ino for path in sorted(folder.glob("*.o"))] == times
    np.testing.assert_array_equal(first.mean("x"), second.mean("x"))


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "other"])
def test_a_damaged_file_is_made_anew(first, filled, damage):
    wanted, folder = first[0], filled
    assert list(folder.glob("*.o"))
    for path in folder.glob("*.o"):
        content = bytearray(path.read_bytes())
        if damage == "flipped":
            content[len(content) // 2] ^= 1
        path.write_bytes({"flipped": bytes(content), "cut": bytes(content[:100]), "empty": b""}.get(damage, b"x" * 500))
    np.testing.assert_array_equal(run(folder).mean("x"), wanted.mean("x"))
    cache = ObjectCache(folder)
    assert all(cache.get(path.stem) is not None for path in folder.glob("*.o"))


def test_code_that_others_could_have_written_is_not_run(filled):
    folder = filled
    cache = ObjectCache(folder)
    path = next(folder.glob("*.o"))
    path.chmod(0o666)
    assert cache.get(path.stem) is None
    path.chmod(0o600)
    assert cache.get(path.stem) is not None
    folder.chmod(0o777)
    assert cache.get(path.stem) is None
    folder.chmod(0o700)


def test_without_a_folder_everything_works(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    for given in ("", str(tmp_path / "file"), "/proc/nothing"):
        monkeypatch.setenv("PCNET_CACHE", given)
        assert run(None).engine == "compiled"


def test_the_folder_does_not_grow_without_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "LIMIT", 5000)
    cache = ObjectCache(tmp_path / "cache")
    for number in range(20):
        cache.put(f"{number:064x}", bytes(1000))
        os.utime(tmp_path / "cache" / f"{number:064x}.o", (number, number))
    kept = sorted(int(path.stem, 16) for path in (tmp_path / "cache").glob("*.o"))
    assert kept[-1] == 19
    assert sum(path.stat().st_size for path in (tmp_path / "cache").glob("*.o")) <= 6100


def test_two_processes_and_a_third_that_finds_all_code_give_the_same_digits(folder):
    """The third does not import the compiler."""
    environment = os.environ | {"PCNET_CACHE": str(folder)}

    def start():
        return subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, text=True)

    together = [start(), start()]
    found = [process.communicate(timeout=600)[0].split() for process in together]
    later = start().communicate(timeout=600)[0].split()
    assert found[0][:2] == found[1][:2] == later[:2]
    assert later[1] == "compiled"
    assert "True" in (found[0][2], found[1][2])
    assert later[2] == "False"


def test_two_threads_share_a_model(folder):
    """They compile the same, as in a new process, and run what the other has compiled."""
    driver._compiled_loop.cache_clear()
    model, found, errors = odem(orders=2), {}, []

    def work(name):
        try:
            found[name] = model.run(Y, engine="compiled").mean("x")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for value in found.values():
        # a tick whose code another thread is just adding may be left to the eager engine
        np.testing.assert_allclose(value, found[0], rtol=1e-12)
