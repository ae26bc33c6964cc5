"""A saved run resumes bit for bit, for every kind of model, even if the process was killed."""

import json
import multiprocessing
import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import pcnet as pc
from pcnet.errors import CheckpointError
from pcnet.graphs import odem
from pcnet.nodes import (
    GeneralisedStateNode,
    PrecisionNode,
    SensoryNode,
)
from pcnet.results.recorder import Recorder
from support.cases import (
    CASES,
    TICKS,
    nonlinear,
    of_paper,
    stack,
)
from support.compare import same
from support.filters import single_filter
from support.waiting import PATIENCE, wait_until


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(case, tmp_path):
    graph, schedule, stream, times, *policy = CASES[case]()
    options = {"on_divergence": policy[0]} if policy else {}
    times = times or [None] * TICKS
    whole = graph.start(schedule, **options)
    for y, t in zip(stream, times, strict=True):
        whole.step(y, t)
    for at in (1, 7, 10):
        first = graph.start(schedule, **options)
        for y, t in zip(stream[:at], times[:at], strict=True):
            first.step(y, t)
        second = pc.resume(first.save(tmp_path / "run"), pc.Model(graph, schedule))
        assert (second.tick, second.time) == (first.tick, first.time)
        np.testing.assert_array_equal(second.free_energy, first.free_energy)
        for y, t in zip(stream[at:], times[at:], strict=True):
            second.step(y, t)
        same(whole.result(), second.result())
        np.testing.assert_array_equal(whole.result().times, second.result().times)
        np.testing.assert_array_equal(whole.free_action, second.free_action)
        assert list(whole.divergence_events) == list(second.divergence_events)
        np.testing.assert_array_equal(whole.diverged.at, second.diverged.at)
        for (name, count), (_, other) in zip(whole.fallbacks.items(), second.fallbacks.items(), strict=True):
            assert torch.equal(count, other), name


def test_saving_without_the_recording(tmp_path):
    graph, schedule, stream, _ = of_paper()
    session = graph.start(schedule, record=pc.Record(("mean",), nodes=("x",), every=2)).run(iter(stream[:7]))
    again = pc.resume(session.save(tmp_path / "run", recording=False), pc.Model(graph, schedule))
    assert again.record.every == 2
    again.run(iter(stream[7:]))
    whole = graph.run(iter(stream), schedule=schedule, record=("mean",))
    np.testing.assert_array_equal(again.result().mean("x"), whole.mean("x")[7::2])


def test_a_model_of_registered_functions_is_stored_in_the_checkpoint(tmp_path):
    graph, schedule, stream, _ = of_paper(conventions="authors")
    session = graph.start(schedule).run(iter(stream[:7]))
    again = pc.resume(session.save(tmp_path / "run"))
    same(session.run(iter(stream[7:])).result(), again.run(iter(stream[7:])).result())
    graph, schedule, stream, _ = nonlinear()
    graph.start(schedule).run(iter(stream)).save(tmp_path / "run")
    with pytest.raises(CheckpointError, match="functions have no names"):
        pc.resume(tmp_path / "run")


def test_single_precision(tmp_path):
    graph, schedule, stream, _ = of_paper()
    session = graph.start(schedule, dtype=torch.float32).run(iter(stream[:7]))
    again = pc.resume(session.save(tmp_path / "run"), pc.Model(graph, schedule))
    assert again.mean("x").dtype == torch.float32
    same(session.run(iter(stream[7:])).result(), again.run(iter(stream[7:])).result())


# --- a tick is done whole or not at all ---
ACTIONS = [
    (SensoryNode, "observe"),
    (GeneralisedStateNode, "update"),
    (GeneralisedStateNode, "update_covariance"),
    (PrecisionNode, "renew_prior"),
    (Recorder, "append"),
]


@pytest.mark.parametrize(("kind", "action"), ACTIONS)
@pytest.mark.parametrize("where", [(0, 0), (5, 0), (5, 1), (8, 2)], ids=str)
def test_an_interrupt_within_a_tick_leaves_the_state_before_it(kind, action, where, monkeypatch, tmp_path):
    """Ctrl-C in any action: the observation can be repeated, here or after resuming from a file."""
    graph, schedule, stream, _ = of_paper()
    whole = graph.start(schedule).run(iter(stream))
    session = graph.start(schedule)
    do, calls = getattr(kind, action), []

    def interrupted(self, *given):
        done = do(self, *given)
        calls.append(session.tick)
        if session.tick == where[0] and calls.count(session.tick) == 1 + where[1]:
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(kind, action, interrupted)
    for y in stream:
        try:
            session.step(y)
        except KeyboardInterrupt:
            if session.tick:
                session = pc.resume(session.save(tmp_path / "run"), pc.Model(graph, schedule))
            session.step(y)
    same(whole.result(), session.result())
    assert len(session.result().times) == TICKS
    np.testing.assert_array_equal(whole.free_action, session.free_action)


@pytest.mark.parametrize("case", ["paper", "adaptive filter", "adaptive filter, model error"])
def test_a_rejected_observation_leaves_the_state_unchanged(case, tmp_path):
    """After a divergence or a time in the past, the run continues or is saved as if it had not come."""
    graph, schedule, stream, _ = CASES[case]()
    whole = graph.start(schedule).run(iter(stream))
    session = graph.start(schedule)
    for k, y in enumerate(stream):
        if k == 5:
            with pytest.raises(pc.errors.DivergenceError):
                session.step(np.full(3, 1e300))
            session = pc.resume(session.save(tmp_path / "run"), pc.Model(graph, schedule))
            with pytest.raises(pc.errors.ObservationError, match="times must increase"):
                session.step(y, t=0.01)
        session.step(y)
    same(whole.result(), session.result())
    np.testing.assert_array_equal(whole.free_action, session.free_action)


def test_a_rejected_first_observation_leaves_the_session_unstarted():
    graph, _, stream, _ = stack()
    session = graph.start(pc.generalised_filtering())
    with pytest.raises(pc.errors.ObservationError, match="has no value yet"):
        session.step({"y": [0.0, 0.0]})
    with pytest.raises(pc.errors.ObservationError, match="before the first observation"):
        _ = session.free_energy
    batched = {name: np.stack([value, value]) for name, value in stream[0].items()}  # it may be of another shape
    assert session.step(batched, t=3.0).free_energy.shape == (2,)


# --- killed ---
def killable(kind):
    if kind == "paper":
        return odem(every=7, orders=2)
    return single_filter(
        pc.systems.lotka_volterra,
        3,
        0.01,
        parameter_mean=[0.3, -0.2, 0.3],
        parameter_sd=0.25,
        model_error_time=1.0,
    )


def victim(path, out, cache, ticks, end, kind, engine):
    """Resume, save after every few observations, and be killed after `end`; at the end of the stream write the result.

    From `end` on, the next observations are taken in again and again, and the same checkpoint is written, so that the
    process is within one or the other when it is killed, however fast it is. `ticks` is without a lock, because a
    process that is killed would keep it.
    """
    os.environ["PCNET_CACHE"] = str(cache)
    model = killable(kind)
    session = pc.resume(path, model) if path.exists() else model.start(engine=engine)
    while session.tick < end:
        part = STREAM[session.tick : min(end, session.tick + 1 + session.tick % 3)]
        if len(part) == 1:
            session.step(part[0])
        else:
            session.run(part if len(part) == 2 else iter(part))
        session.save(path)
        assert session.acting_engine == engine
        ticks.value = session.tick
    while end < len(STREAM):
        pc.resume(path, model).run(STREAM[end:])
        session.save(path)
    np.savez(out, mean=session.result().mean("x"), action=float(session.free_action))


def reached(ticks, aim, process):
    return ticks.value >= aim or not process.is_alive()


STREAM = 1 + 0.1 * np.random.default_rng(0).normal(size=(60, 3))


@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        ("paper", "eager"),
        ("adaptive filter", "compiled"),
        pytest.param("paper", "compiled", marks=pytest.mark.slow),
        pytest.param("adaptive filter", "eager", marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_at_random_moments_resumes(kind, engine, tmp_path, monkeypatch):
    """kill -9 at random moments, within an observation or while a checkpoint or compiled code is written."""
    chance = random.Random(0)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pcnet", "torch"])
    path, out, cache = tmp_path / "run.safetensors", tmp_path / "done.npz", tmp_path / "cache"
    ticks = context.RawValue("i", 0)
    for end in (15, 30, 45, 59, 60):
        process = context.Process(target=victim, args=(path, out, cache, ticks, end, kind, engine))
        process.start()
        if end < len(STREAM):
            aim = chance.randrange(ticks.value + 1, end)
            wait_until(partial(reached, ticks, aim, process), f"observation {aim}")
            time.sleep(chance.uniform(0.0, 0.02))
            process.kill()
        process.join(PATIENCE)
        assert process.exitcode == (-signal.SIGKILL if end < len(STREAM) else 0)
    monkeypatch.setenv("PCNET_CACHE", "")  # code that is compiled here, not by the processes that were killed
    whole = killable(kind).run(STREAM, engine=engine)
    assert whole.engine == engine
    found = np.load(out)
    np.testing.assert_array_equal(found["mean"], whole.mean("x"))
    assert float(found["action"]) == float(whole.free_action)


# --- files that are refused ---
@pytest.fixture
def saved(tmp_path):
    graph, schedule, stream, _ = of_paper()
    path = graph.start(schedule).run(iter(stream)).save(tmp_path / "run")
    return graph, schedule, path


def test_a_truncated_file_is_rejected(saved):
    graph, schedule, path = saved
    content = path.read_bytes()
    for size in [0, 1, 7, 8, 9, 100, len(content) // 2, len(content) - 1]:
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match="damaged"):
            pc.resume(path, pc.Model(graph, schedule))


def test_a_corrupted_file_is_rejected(saved):
    graph, schedule, path = saved
    content = path.read_bytes()
    chance = random.Random(1)
    for place in [0, 8, 12, len(content) - 1, *(chance.randrange(len(content)) for _ in range(60))]:
        changed = bytearray(content)
        changed[place] ^= 1 << chance.randrange(8)
        path.write_bytes(bytes(changed))
        with pytest.raises(CheckpointError):
            pc.resume(path, pc.Model(graph, schedule))


def header_of(path):
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size])["__metadata__"]


def test_foreign_files_are_rejected(saved, tmp_path):
    graph, schedule, path = saved
    foreign = tmp_path / "foreign"
    save_file({"a": torch.zeros(3)}, foreign)
    with pytest.raises(CheckpointError, match="not written by pcnet"):
        pc.resume(foreign, pc.Model(graph, schedule))
    foreign.write_text("hello, this is a text of some length, longer than a header")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        pc.resume(foreign, pc.Model(graph, schedule))
    with pytest.raises(CheckpointError, match="no file"):
        pc.resume(tmp_path / "nothing", pc.Model(graph, schedule))
    with pytest.raises(CheckpointError, match="no file"):
        pc.resume(tmp_path, pc.Model(graph, schedule))
    newer = json.loads(header_of(path)["pcnet"]) | {"format": 99, "pcnet_version": "9.9"}
    save_file(load_file(path), foreign, {"pcnet": json.dumps(newer), "digest": ""})
    with pytest.raises(CheckpointError, match=r"format 99, of pcnet 9.9; this pcnet reads 3"):
        pc.resume(foreign, pc.Model(graph, schedule))


def test_a_checkpoint_of_another_model_is_rejected(saved):
    graph, schedule, path = saved
    other, _ = odem(every=3, kappa=0.3)
    with pytest.raises(CheckpointError, match="another graph or schedule"):
        pc.resume(path, pc.Model(other, schedule))
    with pytest.raises(CheckpointError, match="another graph or schedule"):
        pc.resume(path, pc.Model(graph, pc.odem(every=4)))
    session = pc.resume(path, pc.Model(other, schedule), strict=False)
    assert session.tick == TICKS
    with pytest.raises(CheckpointError, match="other nodes"):
        pc.resume(path, pc.Model(nonlinear()[0], pc.odem()), strict=False)


def test_an_unwritable_path_is_an_error(saved, tmp_path):
    graph, schedule, path = saved
    session = pc.resume(path, pc.Model(graph, schedule))
    with pytest.raises(CheckpointError, match="no folder"):
        session.save(tmp_path / "nowhere" / "run")
    assert sorted(p.name for p in Path(tmp_path).iterdir()) == ["run"]
