"""A run's page while it trains, on 127.0.0.1: made anew once a round is finished, and only when somebody looks."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ldpfl.errors import LdpflError
from ldpfl.privacy.ledger import LEDGER_FILE
from ldpfl.report.page import page

HOST = "127.0.0.1"
REFRESH_S = 5

_NO_PAGE_YET = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="color-scheme" content="light dark">
<meta http-equiv="refresh" content="{seconds}"><title>{text}</title><p>{text}"""


class _LatestPage:
    """The page of the run in ``folder`` after its last finished round. ``metric`` returns the name of the main metric, once it is known."""

    def __init__(self, folder: Path, metric: Callable[[], str]) -> None:
        self._folder, self._metric = folder, metric
        self._lock, self._text = threading.Lock(), ""
        self._stamp = object()  # equals no stamp of the files, so the first call renders the page

    def text(self) -> str:
        """Return the page, rendered again only if the run has written its files since the last call."""
        with self._lock:
            stamp = self._current_stamp()
            if stamp != self._stamp:
                self._text, self._stamp = self._render(), stamp
            return self._text

    def _current_stamp(self) -> object:
        """Return a value that changes when one of the files changes from which the page is made."""
        return tuple(_time_and_size(self._folder / name) for name in ("checkpoint.safetensors", LEDGER_FILE, "result.json"))

    def _render(self) -> str:
        """Return the page, or one that says why there is none yet."""
        try:
            return page([self._folder], refresh_s=REFRESH_S, metric=self._metric())
        except (LdpflError, OSError) as error:  # no round is finished, or a file is being replaced
            return _NO_PAGE_YET.format(seconds=REFRESH_S, text=escape(str(error)))


def _time_and_size(file: Path) -> tuple[int, int] | None:
    """Return a file's time and size; None if it does not exist."""
    try:
        state = file.stat()
    except OSError:  # the run has not written the file yet
        return None
    return state.st_mtime_ns, state.st_size


_MAX_CONNECTIONS, _MAX_SILENCE_S = 32, 5.0
"""Maximum number of connections at once, each with a thread, and seconds for which a connection may be silent."""


class _Server(ThreadingHTTPServer):
    """Server of one run's page, at an address that cannot be guessed, for a limited number of connections."""

    daemon_threads = True

    def __init__(self, folder: Path, metric: Callable[[], str]) -> None:
        super().__init__((HOST, 0), _Handler)  # port 0: the system chooses a free one
        self.latest = _LatestPage(folder, metric)
        self.path_of_page = f"/{secrets.token_urlsafe(12)}/"  # unguessable: only those who are given the address can read the page
        self.host_and_port = f"{HOST}:{self.server_address[1]}"
        self._free_connections = threading.BoundedSemaphore(_MAX_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection, or close it if there are too many. Connections use up file descriptors, which the run needs, too."""
        if self._free_connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection in its thread, and then let another one take its place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free_connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing. A browser that reloads closes its connection, and the terminal shows the run."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _MAX_SILENCE_S

    def do_GET(self) -> None:
        """Send the page if both the host and the path are right."""
        # Another site can make a browser send requests here, but with the site's own name as the host.
        is_page = self.headers.get("Host") == self.server.host_and_port and self.path == self.server.path_of_page
        body = (self.server.latest.text() if is_page else "there is no such page").encode()
        self.send_response(200 if is_page else 404)
        self.send_header("Content-Type", "text/html; charset=utf-8" if is_page else "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # the base class names the parameter
        """Print nothing: the terminal shows the run."""


@contextmanager
def watching(folder: Path, metric: Callable[[], str] = lambda: "") -> Iterator[str]:
    """Serve the page of the run in ``folder`` to this machine alone, while the block lasts. Yield the address, which nobody can guess.

    ``metric`` returns the name of the run's main metric, or "" while it is not known. The folder shows it only at the end.
    """
    with _Server(folder, metric) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        thread.start()
        try:
            yield f"http://{server.host_and_port}{server.path_of_page}"
        finally:
            server.shutdown()
            thread.join()
