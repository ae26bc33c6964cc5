"""The option `engine` wherever models run: files, watchers, pages and modules."""

import copy

import numpy as np
import pytest
import torch

import pcnet as pc
from pcnet.errors import SettingError
from pcnet.graphs import adaptive_filter, odem
from pcnet.results.result import Result
from support.cases import CASES
from support.compare import same

Y = pc.simulate.glv_process(samples=120, noise="white", seed=2).observations


def test_a_result_remembers_its_engine(tmp_path):
    for engine in ("compiled", "eager"):
        result = odem(orders=2).run(Y, engine=engine)
        found = Result.load(result.save(tmp_path / f"{engine}.nc"))
        assert (found.engine, found.eager_ticks) == (engine, 0 if engine == "compiled" else 120)


def test_short_runs_of_large_batches_are_compiled(as_users_run):
    y = torch.randn(1200, 60, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    levels = {"process_noise_sd": 1.0, "observation_noise_sd": 1.0, "hypotheses": None}
    model = adaptive_filter(lambda x, _: -x, 1, 0.1, **levels)
    together, alone = model.run(y), model.run(y[3])
    assert (together.engine, alone.engine) == ("compiled", "eager")
    np.testing.assert_allclose(together.mean("x")[3], alone.mean("x"), rtol=1e-9, atol=1e-12)


def test_watchers_see_every_observation_of_a_compiled_session():
    session, times, beliefs = odem(orders=2).start(engine="compiled"), [], []
    session.watchers.append(lambda time, _: (times.append(time), beliefs.append(session.mean("x")[0, 0].item())))
    session.run(Y)
    assert times == pytest.approx([0.01 * k for k in range(120)])
    np.testing.assert_allclose(beliefs, odem(orders=2).run(Y, engine="eager").mean("x")[:, 0, 0], rtol=1e-9)


def test_a_watcher_that_fails_at_the_first_observation_leaves_a_new_session():
    def fail(*_):
        raise KeyboardInterrupt

    session = odem(orders=2).start(engine="compiled")
    session.watchers.append(fail)
    with pytest.raises(KeyboardInterrupt):
        session.step(Y[0])
    assert (session.tick, session.time) == (0, 0.0)
    session.watchers.clear()
    for y in Y:
        session.step(y.numpy())
    found, wanted = session.result(), odem(orders=2).run(Y, engine="compiled")
    np.testing.assert_array_equal(found.mean("x"), wanted.mean("x"))
    np.testing.assert_array_equal(found.times, wanted.times)


def test_weights_that_change_between_sessions_are_seen():
    network = torch.nn.Linear(1, 1).double()
    model = pc.Model(graph_with(network))
    before = model.run(Y[:, :1], engine="compiled").mean("x")
    with torch.no_grad():
        for weights in network.parameters():
            weights.mul_(0.5)
    after = model.run(Y[:, :1], engine="compiled").mean("x")
    np.testing.assert_allclose(after, model.run(Y[:, :1], engine="eager").mean("x"), rtol=1e-9)
    assert np.abs(after - before).max() > 1e-6


def graph_with(network):
    x = pc.GeneralisedStateNode("x", dim=1, orders=2, flow=lambda x, _: -0.1 * network(x))
    y = pc.SensoryNode("y", dim=1, orders=1, dt=0.01)
    graph = pc.Graph()
    graph.predicts(x, y)
    for node in (x, y):
        graph.weighs(pc.PrecisionNode(f"p {node.name}", prior_precision=10.0, sd=0.1, correlation_time=0.1), node)
    return graph


def test_a_live_page_reads_energies_of_compiled_ticks():
    session = odem(orders=2).start(engine="compiled")
    session.run(Y)
    _ = session.mean("x")
    recorder = session.recorder_for(pc.Record.flow())
    with torch.no_grad():
        recorder.append(recorder.read(session.time, None))
    found = recorder.tensor("y.free_energy")
    wanted = odem(orders=2).run(Y, record=pc.Record.flow(), engine="eager").traces["y.free_energy"].values[-1]
    np.testing.assert_allclose(found[0, 0], wanted, rtol=1e-9)


def test_an_unknown_engine_in_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("PCNET_ENGINE", "fast")
    with pytest.raises(SettingError, match="PCNET_ENGINE must be 'auto', 'compiled' or 'eager', not 'fast'"):
        odem(orders=2).start()


def test_a_resumed_session_may_become_eager_if_the_first_was_free_to(tmp_path, monkeypatch):
    """Its next ticks cannot be compiled, so that it gives up; with engine="auto" that is no error."""
    monkeypatch.setenv("PCNET_ENGINE", "compiled")
    graph, schedule, stream, _ = CASES["stack"]()  # some ticks need a pseudo-inverse
    session = graph.start(schedule).run(iter(stream[:7]))
    assert session.acting_engine == "compiled"
    again = pc.resume(session.save(tmp_path / "run"), pc.Model(graph, schedule))
    for each in (session, again):
        each.run(iter(stream[7:]))
    assert "linalg_pinv" in again.engine_report
    assert again.acting_engine == "eager"
    same(session.result(), again.result(), 1e-9)


def test_a_resumed_session_keeps_its_engine_whatever_the_environment_says(tmp_path, monkeypatch):
    for before, after in (("compiled", "eager"), ("eager", "compiled")):
        monkeypatch.setenv("PCNET_ENGINE", before)
        session = odem(orders=2).start()
        for y in Y[:5]:
            session.step(y)
        monkeypatch.setenv("PCNET_ENGINE", after)
        again = pc.resume(session.save(tmp_path / "run"), odem(orders=2))
        assert (again.engine, again.acting_engine) == ("auto", before)
        for each in (again, copy.deepcopy(session), session):
            each.run(Y[5:])
            assert each.result().engine == before
        same(session.result(), again.result())
