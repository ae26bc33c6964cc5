"""The page that follows a running session, for this machine only."""

import base64
import contextlib
import http.client
import json
import socket
import struct
import threading

import numpy as np
import pytest

import pcnet as pc
from pcnet.errors import SettingError
from pcnet.graphs import adaptive_filter, odem
from pcnet.results import live_page
from pcnet.results.live_page import watch
from support.waiting import PATIENCE, wait_until

DATA = pc.simulate.glv_process(40, noise="white", seed=1).observations


def start(**options):
    graph, schedule = odem(every=10)
    return graph.start(schedule, **options)


def get(watched, path="/flow.json", host=None):
    port = watched._server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request(
        "GET", path, headers={"Host": host.format(port=port) if host is not None else f"127.0.0.1:{port}"}
    )
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_page_shows_the_last_observations_of_the_run():
    session = start(record=["mean"])
    with watch(session, window=15) as watched:
        assert json.loads(get(watched)[1]) is None
        session.run(DATA)
        data = json.loads(get(watched)[1])
    graph, schedule = odem(every=10)
    expected = graph.run(DATA, schedule, record=pc.Record.flow()).error_flow()
    assert data["ticks"] == 15
    assert data["observations"] == 40
    assert data["start"] == pytest.approx(0.25)
    block = np.frombuffer(base64.b64decode(data["numbers"]), "<f4").reshape(-1, 15)
    for node in data["nodes"]:
        np.testing.assert_allclose(block[node["share"]], expected.share(node["name"])[-15:], rtol=1e-6)
    for link in data["links"]:
        passed = expected.passed(link["child"], link["parent"])[-15:]
        np.testing.assert_allclose(block[link["up"]], passed, rtol=1e-5, atol=1e-12)
    assert set(session.result().traces) == {"x.mean", "theta.mean", "lambda_x.mean", "lambda_y.mean"}


def test_watching_does_not_change_the_run():
    alone = start().run(DATA).result()
    session = start()
    with watch(session):
        seen = session.run(DATA).result()
    for key, trace in alone.traces.items():
        np.testing.assert_array_equal(seen.traces[key].values, trace.values)


def test_memory_does_not_grow_with_the_stream():
    session = start(record=())
    with watch(session, window=20) as watched:
        for _ in range(20):
            session.run(DATA)
        assert len(watched._recorder) <= 20 + 256  # a window and a block
        assert json.loads(get(watched)[1])["ticks"] == 20


def test_the_window_is_shorter_for_wide_observations(monkeypatch):
    monkeypatch.setattr("pcnet.results.live_page.MEMORY", 1000)
    session = start(record=())
    with watch(session) as watched:
        for _ in range(4):
            session.run(DATA)
        assert json.loads(get(watched)[1])["ticks"] == 100


def test_only_requests_from_this_machine_are_served():
    session = start()
    with watch(session) as watched:
        session.step(DATA[0])
        port = watched._server.server_address[1]
        assert watched._server.server_address[0] == "127.0.0.1"
        assert watched.address == f"http://127.0.0.1:{port}/"
        assert get(watched, "/")[0] == get(watched, "/", "localhost:{port}")[0] == 200
        for host in ("evil.example:{port}", "evil.example", "127.0.0.1", "localhost.evil.example:{port}", ""):
            status, text = get(watched, "/flow.json", host)
            assert status == 421
            assert "numbers" not in text
        assert get(watched, "/etc/passwd")[0] == get(watched, "/../page.py")[0] == 404


def test_a_page_can_be_read_while_the_stream_runs():
    session = start(record=())
    with watch(session, window=30) as watched:
        session.step(DATA[0])
        runner = threading.Thread(target=lambda: [session.run(DATA) for _ in range(5)])
        runner.start()
        while runner.is_alive():
            status, text = get(watched)
            if status == 503:  # the data changed while they were read: a page asks again
                continue
            data = json.loads(text)
            count = len(base64.b64decode(data["numbers"])) // 4
            assert count % data["ticks"] == 0
        runner.join()
        assert json.loads(get(watched)[1])["observations"] == 201


def test_stopping_frees_the_port():
    session = start()
    watched = watch(session)
    port = watched._server.server_address[1]
    with pytest.raises(SettingError, match=f"port {port} cannot be used"):
        watch(session, port)
    watched.close()
    watched.close()
    assert session.watchers == []
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("options", "words"), [({"port": 70000}, "0 .any that is free. to 65535"), ({"window": 0}, "1 observation or more")]
)
def test_invalid_arguments_are_rejected(options, words):
    with pytest.raises(SettingError, match=words):
        watch(start(), **options)


def test_clients_that_hang_or_hang_up_cost_neither_threads_nor_words(capfd, monkeypatch):
    """Some reset the connection before the answer, some never ask, some never read."""
    monkeypatch.setattr(live_page._Handler, "timeout", 0.2)
    session = start().run(DATA)
    with watch(session) as watched:
        session.step(DATA[0])
        port = watched._server.server_address[1]
        ask = f"GET /flow.json HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(ask)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        before = threading.active_count()
        hanging = [socket.create_connection(("127.0.0.1", port)) for _ in range(3 * live_page.CLIENTS)]
        for each in hanging:
            with contextlib.suppress(OSError):  # some were sent away
                each.sendall(b"GE")
        assert threading.active_count() <= before + live_page.CLIENTS
        session.step(DATA[1])
        wait_until(lambda: threading.active_count() <= before, "the end of all hanging clients")
        assert json.loads(get(watched)[1])["observations"] >= 1
        for each in hanging:
            each.close()
    assert capfd.readouterr() == ("", "")


def test_a_bank_whose_rows_change_is_followed():
    wave = pc.systems.linear([[0.0, 1.0], [-1.0, 0.0]])
    model = adaptive_filter(wave, 2, 0.1, process_noise_sd=0.1, observation_noise_sd=0.1)
    data = np.random.default_rng(0).standard_normal((40, 2))
    session, alone = model.start(record=()), model.start(record=pc.Record.flow())
    alone.run(data)
    with watch(session) as watched:
        session.run(data)
        found = json.loads(get(watched)[1])
    assert len(session.weights) < 50  # rows were dropped
    assert (found["observations"], found["expected"]) == (40, 40)
    block = np.frombuffer(base64.b64decode(found["numbers"]), "<f4").reshape(-1, 40)
    flow = alone.result().error_flow()
    for link in found["links"]:
        sizes = flow.passed(link["child"], link["parent"])
        np.testing.assert_allclose(block[link["up"]][10:], sizes[10:], rtol=1e-3)
