"""Files are written whole or not at all, damage is noticed, and every trouble has a name.

Expectations come from the bytes that were written, from the operating system, and from the numbers of the session.
"""

import errno
import functools
import json
import os
import random
import signal
import stat
import threading
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import pcnet as pc
from pcnet import files
from pcnet.engine import checkpoint, segments
from pcnet.engine.checkpoint import _digest as checkpoint_digest
from pcnet.errors import CheckpointError, PcnetError, ResultError, SettingError
from pcnet.files import atomic_write
from pcnet.graphs import adaptive_filter, odem
from pcnet.model.digest import digest
from pcnet.results import recorder
from support import disks
from support.compare import same
from support.waiting import wait_until

Y = 1 + 0.1 * np.random.default_rng(0).normal(size=(40, 3))
ROOT = os.geteuid() == 0 if hasattr(os, "geteuid") else False


@pytest.fixture
def segmented(monkeypatch):
    """Short recordings are long enough for segments."""
    monkeypatch.setattr(checkpoint, "INLINE", 1000)
    monkeypatch.setattr(recorder, "BLOCK", 4)


def content(path):
    return path.read_bytes()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# --- writing ---
def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a"
    with atomic_write(path) as file:
        file.write(b"first")
    with pytest.raises(ZeroDivisionError), atomic_write(path) as file:
        file.write(b"second"[: 1 // 0])
    assert content(path) == b"first"
    assert names(tmp_path) == ["a"]


def test_threads_that_save_one_path_do_not_collide(tmp_path):
    path, errors, written = tmp_path / "a", [], [bytes([k]) * 5000 for k in range(4)]

    def work(mine):
        try:
            for _ in range(25):
                with atomic_write(path) as file:
                    file.write(mine)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in written]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert content(path) in written
    assert names(tmp_path) == ["a"]


def test_links_are_followed_and_other_than_regular_files_refused(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    (tmp_path / "a").chmod(0o640)
    (tmp_path / "link").symlink_to("a")
    with atomic_write(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "link").is_symlink()
    assert content(tmp_path / "a") == b"new"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/null", tmp_path / "pipe"):
        with pytest.raises(ResultError, match="give a regular file"), atomic_write(files.Path(path)):
            pass
    assert stat.S_ISCHR(files.Path("/dev/null").stat().st_mode)


@pytest.mark.parametrize(
    ("name", "words"),
    [("nowhere/a", "no folder"), ("", "is a folder"), ("x" * 300, "too long"), ("a\0b", "not valid")],
    ids=["no folder", "a folder", "long", "NUL"],
)
def test_paths_that_cannot_be_written_are_named(tmp_path, name, words):
    with pytest.raises(ResultError, match=words), atomic_write(tmp_path / name):
        pass
    session = odem(orders=2).start().run(Y[:3])
    with pytest.raises(CheckpointError, match=words):
        session.save(tmp_path / name)
    with pytest.raises(ResultError, match=words):
        session.result().save(tmp_path / name)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "disk is full"), (errno.EROFS, "read-only"), (errno.EACCES, "permission")]
)
def test_errors_of_the_disk_have_a_remedy_and_leave_the_old_file(tmp_path, monkeypatch, number, words):
    session = odem(orders=2).start().run(Y[:3])
    path = session.save(tmp_path / "run")
    before = content(path)

    def fail(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(CheckpointError, match=rf"run' cannot be written: .*{words}"):
        session.run(Y[3:6]).save(path)
    with pytest.raises(ResultError, match=words):
        session.result().save(tmp_path / "run.nc")
    assert content(path) == before
    assert names(tmp_path) == ["run"]


@pytest.mark.skipif(ROOT, reason="root may write anywhere")
def test_a_read_only_folder(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ResultError, match="permission is denied"), atomic_write(tmp_path / "a"):
        pass
    tmp_path.chmod(0o700)


def test_a_disk_that_is_really_full_or_read_only(tmp_path):
    found = disks.attack(tmp_path, 6)
    if found is None:
        pytest.skip("no file system can be mounted here")
    assert found == []


def test_what_a_killed_process_has_left_is_removed(tmp_path):
    """The scratch of a dead process is not locked; that of one that still writes is."""
    target = tmp_path / "a"
    dead, alive = files._scratch_name(target), files._scratch_name(target)
    other = files._scratch_name(tmp_path / "b")
    for each in (dead, alive, other):
        each.write_bytes(b"part")
    with alive.open("rb") as held:
        files.lock(held.fileno())
        with atomic_write(target) as file:
            file.write(b"whole")
    assert names(tmp_path) == sorted(["a", alive.name, other.name])


def killed_while_saving(folder, times, seed=0):
    """Kill a process that saves a growing recording again and again, so often; (damaged checkpoints, files left)."""
    chance, damaged = random.Random(seed), 0
    model, path = odem(orders=2), folder / "run"
    sessions = [model.start(engine=engine).run(Y[:2]) for engine in ("eager", "compiled")]
    for turn in range(times):
        session = sessions[turn % 2]
        session.save(path)
        child = os.fork()
        if not child:
            for k in range(10_000):
                session.segments.clear() if k % 3 == 2 else None
                session.step(Y[k % 40]).save(path)
            os._exit(1)
        seen = path.stat().st_mtime_ns
        wait_until(lambda seen=seen: path.stat().st_mtime_ns != seen, "a save")
        time.sleep(chance.uniform(0, 0.004))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        try:
            found = pc.resume(path, model)
            damaged += len(found.recorder.times) != found.tick
        except PcnetError:
            damaged += 1
    session.save(path)
    kept = {"run", *(each.file(path).name for each in session.segments.values())}
    return damaged, set(names(folder)) - kept


def test_kills_within_save_damage_nothing_and_leave_nothing(tmp_path, segmented):
    assert killed_while_saving(tmp_path, 25) == (0, set())


# --- damage ---
def flips(path, read, count, seed=0):
    """Numbers of single bit flips after which a file is read as if nothing were, and with an error without a name."""
    whole, chance, silent, unnamed = content(path), random.Random(seed), 0, []
    for _ in range(count):
        changed = bytearray(whole)
        changed[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        path.write_bytes(changed)
        try:
            read(path)
            silent += 1
        except PcnetError:
            pass
        except BaseException as error:
            unnamed.append(error)
    path.write_bytes(whole)
    return silent, unnamed


def test_no_bit_of_a_result_changes_in_silence(tmp_path):
    path = odem(orders=2).run(Y[:5]).save(tmp_path / "run.nc")
    assert flips(path, pc.Result.load, 400) == (0, [])


def test_results_of_earlier_formats_are_read(tmp_path):
    result = odem(orders=2).run(Y[:5])
    data = result.to_xarray()
    data.attrs["format"] = 2
    data.to_netcdf(tmp_path / "old.nc", engine="h5netcdf")
    same(pc.Result.load(tmp_path / "old.nc"), result)
    result.to_xarray().to_netcdf(tmp_path / "new.nc", engine="h5netcdf")
    with pytest.raises(ResultError, match="has no digest"):
        pc.Result.load(tmp_path / "new.nc")


def test_other_programs_read_results(tmp_path):
    import xarray as xr

    result = odem(orders=2).run(Y[:5])
    with xr.open_dataset(result.save(tmp_path / "run.nc"), engine="h5netcdf") as opened:
        np.testing.assert_array_equal(opened["x.mean"].values, result.mean("x"))


def test_no_bit_of_a_checkpoint_or_its_segments_changes_in_silence(tmp_path, segmented):
    model = odem(orders=2)
    path = model.start().run(Y[:12]).save(tmp_path / "run")
    (rows,) = tmp_path.glob("run.rows-*")
    assert flips(path, lambda p: pc.resume(p, model), 300) == (0, [])
    assert flips(rows, lambda _: pc.resume(path, model), 300) == (0, [])
    whole = content(rows)
    for cut in (0, 5, 39, len(whole) - 1):
        rows.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match="damaged"):
            pc.resume(path, model)
    rows.unlink()
    with pytest.raises(CheckpointError, match="belongs beside it"):
        pc.resume(path, model)


# --- segments ---
@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_a_recording_in_segments_resumes_to_the_bit(tmp_path, segmented, engine):
    model, path = odem(orders=2), tmp_path / "run"
    whole = model.start(engine=engine)
    for y in Y:
        whole.step(y)
    session = model.start(engine=engine)
    for k, y in enumerate(Y):
        session.step(y)
        if k % 5 == 4:
            session.save(path)
        if k % 15 == 14:
            session = pc.resume(path, model)
    same(whole.result(), pc.resume(session.save(path), model).result())
    assert len(names(tmp_path)) == 2


def test_a_save_writes_only_what_is_new(tmp_path, segmented, monkeypatch):
    """Bytes that go to the disk, not time: the last of many saves writes as much as an early one."""
    appended = []
    to_bytes = segments.to_bytes
    monkeypatch.setattr(segments, "to_bytes", lambda rows: appended.append(len(rows[segments.TIMES])) or to_bytes(rows))
    session, path = odem(orders=2).start(engine="compiled"), tmp_path / "run"
    sizes = []
    for _ in range(6):
        session.run(Y).save(path)
        sizes.append(path.stat().st_size)
    assert appended == [40] * 6
    assert max(sizes) - min(sizes) < 2000
    assert len(pc.resume(path, session.model).recorder) == 240


def test_two_sessions_that_save_one_path_leave_one_of_them(tmp_path, segmented):
    model, path = odem(orders=2), tmp_path / "run"
    first = model.start().run(Y[:20])
    first.save(path)
    second = pc.resume(path, model).run(Y[20:30])
    second.save(path)
    first.run(Y[:15]).save(path)
    second.run(Y[30:]).save(path)
    whole = model.start().run(Y[:20]).run(Y[20:30]).run(Y[30:])
    same(pc.resume(path, model).result(), whole.result())
    assert len(names(tmp_path)) == 2
    moved = path.rename(tmp_path / "moved")
    next(tmp_path.glob("run.rows-*")).rename(next(tmp_path.glob("run.rows-*")).as_posix().replace("run.", "moved."))
    same(pc.resume(moved, model).result(), whole.result())


# --- content that a valid digest does not excuse ---
def forged(path, about=None, **tensors):
    """Write a checkpoint with other content and a digest that fits."""
    header = json.loads(checkpoint.safe_open(path, "pt").metadata()["pcnet"])
    text = about(header) if about else json.dumps(header)
    found = load_file(path)
    for name, value in tensors.items():
        found.pop(name) if value is None else found.update({name: value})
    save_file(found, path, {"pcnet": text, "digest": checkpoint_digest(text, found)})


RECORDING = {"token": "../../ab", "size": 1, "digest": "0" * 64, "rows": 1}
FORGERIES = {
    "shape": {"time": torch.zeros(3, dtype=torch.float64)},
    "dtype": {"time": torch.zeros(1, dtype=torch.float32)},
    "missing": {"x/mean": None},
    "more": {"x/meaning": torch.zeros(1)},
    "recorded": {"/raw/x.mean": torch.zeros(7, 1, 2, 3, dtype=torch.float64)},
    "running": {"/running": torch.zeros(9, dtype=torch.bool)},
    "batch": {"about": lambda h: json.dumps(h | {"batch_shape": [10**9]})},
    "negative": {"about": lambda h: json.dumps(h | {"tick": -1})},
    "type": {"about": lambda h: json.dumps(h | {"tick": "many"})},
    "key": {"about": lambda h: json.dumps({k: v for k, v in h.items() if k != "dtype"})},
    "strides": {
        "about": lambda h: json.dumps(h | {"strides": {k: [10**12] * len(v) for k, v in h["strides"].items()}})
    },
    "nested": {"about": lambda h: json.dumps(h)[:-1] + ', "spec": ' + "[" * 100_000 + "]" * 100_000 + "}"},
    "list": {"about": lambda _: "[]"},
    "policy": {"about": lambda h: json.dumps(h | {"on_divergence": "ignore"})},
    "stopped": {"about": lambda h: json.dumps(h | {"stopped": [[10**6, 1, "x"]]})},
    "file": {"about": lambda h: json.dumps(h | {"recording": RECORDING})},
}


@pytest.mark.parametrize("kind", FORGERIES)
@pytest.mark.parametrize("form", ["odem", "filter"])
def test_a_checkpoint_with_a_valid_digest_and_wrong_content_is_refused(tmp_path, kind, form):
    model = odem(orders=2) if form == "odem" else FILTER
    path = model.start(engine="eager").run(Y[:5, :3] if form == "odem" else Y[:5, :1]).save(tmp_path / "run")
    found = load_file(path)
    changes = dict(FORGERIES[kind])
    if kind == "missing" and "x/mean" not in found:
        changes = {next(name for name in found if name.startswith("x/")): None}
    forged(path, **changes)
    with pytest.raises(CheckpointError):
        pc.resume(path, model)


FILTER = adaptive_filter(pc.systems.linear([[-1.0]]), 1, 0.1)


SMOOTH = {
    "fewer rows": {"/further/smoothing/x": torch.zeros(3, 1, 2, dtype=torch.float64)},
    "no rows": {"/further/smoothing/x": None},
    "rows of another state": {"/further/smoothing/y": torch.zeros(4, 1, 2, dtype=torch.float64)},
    "lag": {"about": lambda h: json.dumps(h | {"smooth": -2})},
    "every": {"about": lambda h: json.dumps(h | {"every": 2})},
    "none": {"about": lambda h: json.dumps(h | {"smooth": False})},
}


@pytest.mark.parametrize("kind", SMOOTH)
@pytest.mark.parametrize("bank", [True, False])
def test_a_checkpoint_to_be_smoothed_is_refused_if_it_does_not_fit(tmp_path, kind, bank):
    options = {} if bank else {"hypotheses": None, "process_noise_sd": 1.0, "observation_noise_sd": 1.0}
    model = adaptive_filter(pc.systems.linear([[-1.0]]), 1, 0.1, **options)
    path = model.start(smooth=3, engine="eager").run(np.zeros((5, 1))).save(tmp_path / "run")
    assert pc.resume(path, model).smoothed(3)["x"].mean.shape == (1,)
    forged(path, **SMOOTH[kind])
    with pytest.raises(CheckpointError):
        pc.resume(path, model)


# --- digests of models ---
def decay(x, theta, rate=1.0):
    return -rate * x


class Decay:
    def __init__(self, rate):
        self.rate = rate

    def __call__(self, x, theta):
        return -self.rate * x

    def of(self, x, theta):
        return -self.rate * x


class Slotted:
    __slots__ = ("rate",)

    def __init__(self, rate):
        self.rate = rate

    def __call__(self, x, theta):
        return -self.rate * x


class Layer(torch.nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x, theta):
        return -self.rate * x


def around(inner):
    def outer(x, theta):
        return inner(x, theta)

    return outer


def of_list(rates):
    return lambda x, theta: -rates[0] * x


FLOWS = {
    "partial": lambda rate: functools.partial(decay, rate=rate),
    "object": Decay,
    "slots": Slotted,
    "module": Layer,
    "bound method": lambda rate: Decay(rate).of,
    "closure over a function": lambda rate: around(lambda x, theta: -rate * x),
    "closure over a partial": lambda rate: around(functools.partial(decay, rate=rate)),
    "closure over a list": lambda rate: of_list([rate]),
}


@pytest.mark.parametrize("kind", FLOWS)
def test_a_digest_sees_what_a_flow_holds(kind, tmp_path):
    def model(rate):
        return adaptive_filter(FLOWS[kind](rate), 1, 0.1)

    assert digest(model(1.0)) == digest(model(1.0))
    assert digest(model(1.0)) != digest(model(2.0))
    path = model(1.0).start(engine="eager").run(Y[:3, :1]).save(tmp_path / "run")
    assert pc.resume(path, model(1.0)).tick == 3
    with pytest.raises(CheckpointError, match="another graph or schedule"):
        pc.resume(path, model(2.0))


def test_a_flow_that_hides_what_it_holds_is_refused_by_name(tmp_path):
    lock = threading.Lock()
    model = adaptive_filter(lambda x, theta: (-x, lock)[0], 1, 0.1)
    with pytest.raises(SettingError, match="cannot be compared"):
        digest(model)
    session = model.start().run(Y[:3, :1])  # it runs all the same
    with pytest.raises(CheckpointError, match="tell its model from others"):
        session.save(tmp_path / "run")


def test_a_flow_that_refers_to_itself_has_a_digest():
    def build(rate):
        def flow(x, theta, again=False):
            return -rate * x if again else flow(x, theta, True)

        return adaptive_filter(flow, 1, 0.1)

    assert digest(build(1.0)) == digest(build(1.0)) != digest(build(2.0))
