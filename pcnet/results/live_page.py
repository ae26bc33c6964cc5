"""Live page of the error flow of a running session, served to this machine only.

>>> session = model.start()
>>> with watch(session) as page:
...     print(page.address)          # http://127.0.0.1:…
...     for observation in stream:
...         session.step(observation)
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pcnet.errors import PcnetError, SettingError
from pcnet.results.error_flow import ErrorFlow
from pcnet.results.page import payload, render
from pcnet.results.recorder import Record, Recorder

if TYPE_CHECKING:
    from pcnet.engine.session import Session

WINDOW = 2000  # default number of recent observations that are shown
MEMORY = 100_000_000
"""The window is shortened where it would take more than this many bytes, but to no fewer than 100 observations."""
CLIENTS = 64  # clients that are served at once; others are sent away
PATIENCE = 10.0  # seconds that a client may take to ask, or to read on
WAITING = """<!DOCTYPE html><meta charset="utf-8"><meta http-equiv="refresh" content="1"><title>pcnet</title>
<link rel="icon" href="data:,"><p>Waiting for the first observation …"""


class watch:  # noqa: N801, a context manager that is used like a function
    """Serve a page that follows a session until `close()` or the end of a `with` block.

    The server listens on 127.0.0.1 and answers requests to 127.0.0.1 and localhost only. It keeps its own recording of
    the last observations, separate from the session's record.

    Args:
        port: TCP port; 0 chooses a free one.
        window: Number of recent observations to show.
        element: Flat index of the batch element to show.
    """

    def __init__(
        self, session: Session, port: int = 0, *, window: int = WINDOW, element: int = 0, title: str | None = None
    ) -> None:
        if not 0 <= port < 65536:
            raise SettingError(f"port must be from 0 (any that is free) to 65535, not {port}")
        if window < 1:
            raise SettingError(f"window must be 1 observation or more, not {window}")
        self.session = session
        self.title = title or "Error flow of a running stream"
        self._window, self._element = window, element
        self._lock = threading.Lock()
        self._recorder: Recorder | None = None
        try:
            self._server = _Server(("127.0.0.1", port), self)
        except OSError as error:
            raise SettingError(f"port {port} cannot be used ({error}); use another one, or 0 for a free one") from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="pcnet watch", daemon=True)
        self._thread.start()
        session.watchers.append(self._record)

    @property
    def address(self) -> str:
        """Address of the page."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/"

    def close(self) -> None:
        """Stop the server; the session's own record is not affected."""
        if self._record in self.session.watchers:
            self.session.watchers.remove(self._record)
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def __enter__(self) -> watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _record(self, time: float, running: Tensor | None) -> None:
        """Record the current tick; called in the thread of the session."""
        with self._lock:
            first = self._recorder is None
            recorder = self._recorder = self._recorder or self.session.recorder_for(Record.flow())
            recorder.append(recorder.read(time, running))
            recorder.keep_last(self._window)
            if first:
                self._window = min(self._window, max(MEMORY // recorder.nbytes, 100))

    # --- called in the threads of the server ---------------------------------------------------------------------
    def flow(self) -> ErrorFlow | None:
        """Error flow of the last observations; None before the first one."""
        with self._lock:
            if self._recorder is None:
                return None
            result = self.session.result_of(self._recorder, self._window)
        return ErrorFlow(result, self._element)

    def html(self) -> str:
        flow = self.flow()
        return WAITING if flow is None else render(flow, self.title, live=True)

    def data(self) -> str:
        flow = self.flow()
        expected = self.session.expected
        return json.dumps(None if flow is None else payload(flow, self.title, live=True, expected=expected))


class _Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, CLIENTS
    allow_reuse_address = False  # a second run must not take over the port of a first one

    def __init__(self, address: tuple[str, int], page: watch) -> None:
        super().__init__(address, _Handler)
        self.page = page
        self._free = threading.BoundedSemaphore(CLIENTS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:  # the others hang, or it is an attack
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up or does not read is no news; the terminal belongs to the run."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = PATIENCE

    def do_GET(self) -> None:
        host, _, port = self.headers.get("Host", "").rpartition(":")
        if host not in ("127.0.0.1", "localhost") or port != str(self.server.server_address[1]):
            # DNS rebinding: a foreign page whose host name resolves to 127.0.0.1 must not read the data
            self._send(421, "text/plain", "this page is for 127.0.0.1 only")
            return
        page = self.server.page
        routes = {"/": ("text/html", page.html), "/flow.json": ("application/json", page.data)}
        path = self.path.partition("?")[0]
        if path not in routes:
            self._send(404, "text/plain", "not found; the page is at /")
            return
        content_type, make = routes[path]
        try:
            text = make()
        except PcnetError as error:
            self._send(500, "text/plain", str(error))
        except RuntimeError:  # data changed while they were read: the session runs in another thread
            self._send(503, "text/plain", "busy; ask again")
        else:
            self._send(200, content_type, text)

    def _send(self, status: int, content_type: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        headers = {"Content-Type": f"{content_type}; charset=utf-8", "Content-Length": str(len(body))}
        headers |= {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests: the terminal belongs to the run."""
