"""Looking on while a stream runs: the page of the error flow, served to this machine only.

>>> live = graph.start(schedule)
>>> with watch(live) as page:
...     print(page.address)          # http://127.0.0.1:…
...     for observation in stream:
...         live.step(observation)
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from torch import Tensor

from pcnet.engine.session import Session
from pcnet.errors import PcnetError, SettingError
from pcnet.results.error_flow import ErrorFlow
from pcnet.results.page import payload, render
from pcnet.results.recorder import Record, Recorder

WINDOW = 2000
"""So many of the last observations are shown."""
MEMORY = 100_000_000
"""Fewer where they would take more than so many bytes, but no fewer than a hundred."""
WAITING = """<!DOCTYPE html><meta charset="utf-8"><meta http-equiv="refresh" content="1"><title>pcnet</title>
<link rel="icon" href="data:,"><p>Waiting for the first observation …"""


def watch(live: Session, port: int = 0, *, window: int = WINDOW, element: int = 0, title: str | None = None) -> Watch:
    """Serve a page at `watch(live).address` that follows a run, until `close()` or the end of a `with` block.

    It listens on 127.0.0.1 only, and answers only to that name and to localhost. What it shows is kept apart from the
    run's own record, which may be anything, and only for the last `window` observations, or fewer if these are wide.
    port: a free one unless given. element: which batch element, counting all of them.
    """
    return Watch(live, port, window=window, element=element, title=title)


class Watch:
    """A page that follows a run; see `watch`."""

    def __init__(self, live: Session, port: int = 0, *, window: int, element: int, title: str | None) -> None:
        if not 0 <= port < 65536:
            raise SettingError(f"a port is a number from 0 (any that is free) to 65535, not {port}")
        if window < 1:
            raise SettingError(f"the window must be 1 observation or more, not {window}")
        self.live = live
        self.title = title or "Error flow of a running stream"
        self._window = window
        self._element = element
        self._lock = threading.Lock()
        self._recorder: Recorder | None = None
        try:
            self._server = _Server(("127.0.0.1", port), self)
        except OSError as error:
            raise SettingError(
                f"port {port} cannot be used ({error}); give another, or 0 for any that is free"
            ) from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="pcnet watch", daemon=True)
        self._thread.start()
        live.watchers.append(self._see)

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/"

    def close(self) -> None:
        """Stop serving; what was recorded of the run stays with the run."""
        if self._see in self.live.watchers:
            self.live.watchers.remove(self._see)
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # --- in the thread of the run --------------------------------------------------------------------------------
    def _see(self, time: float, running: Tensor | None) -> None:
        """Record the present state after an observation."""
        with self._lock:
            first = self._recorder is None
            recorder = self._recorder = self._recorder or self.live.recorder_for(Record.flow())
            recorder.append(recorder.read(time, running))
            recorder.keep_last(self._window)
            if first:
                self._window = min(self._window, max(MEMORY // recorder.nbytes, 100))

    # --- in the threads of the server ----------------------------------------------------------------------------
    def flow(self) -> ErrorFlow | None:
        """The error flow of the last observations, or None before the first."""
        with self._lock:
            if self._recorder is None:
                return None
            result = self.live.result_of(self._recorder, self._window)
        return ErrorFlow(result, self._element)

    def page(self) -> str:
        flow = self.flow()
        return WAITING if flow is None else render(flow, self.title, live=True)

    def data(self) -> str:
        flow = self.flow()
        return json.dumps(None if flow is None else payload(flow, self.title, live=True))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = False  # or a second run could take the port of a first

    def __init__(self, address: tuple[str, int], watch: Watch) -> None:
        super().__init__(address, _Answer)
        self.watch = watch


class _Answer(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        host, _, port = self.headers.get("Host", "").rpartition(":")
        if host not in ("127.0.0.1", "localhost") or port != str(self.server.server_address[1]):
            # a page from elsewhere whose name was made to point here must not read along
            self._send(421, "text/plain", "this page is for 127.0.0.1 only")
            return
        path = self.path.partition("?")[0]
        answers = {
            "/": ("text/html", self.server.watch.page),
            "/flow.json": ("application/json", self.server.watch.data),
        }
        if path not in answers:
            self._send(404, "text/plain", "there is nothing here")
            return
        kind, make = answers[path]
        try:
            text = make()
        except PcnetError as error:
            self._send(500, "text/plain", str(error))
        except RuntimeError:  # what was read changed meanwhile, in the thread of the run
            self._send(503, "text/plain", "ask again")
        else:
            self._send(200, kind, text)

    def _send(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the terminal is the run's."""
