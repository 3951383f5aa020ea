"""A run's page while it trains, on 127.0.0.1: made anew once a round is finished, and only when somebody looks."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
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

_WAITING = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="color-scheme" content="light dark">
<meta http-equiv="refresh" content="{seconds}"><title>{said}</title><p>{said}"""


class _Latest:
    """The page of the run in ``folder`` as of its last finished round."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock, self._stamp, self._text = threading.Lock(), object(), ""

    def text(self) -> str:
        with self._lock:
            stamp = self._made_of()
            if stamp != self._stamp:
                self._text, self._stamp = self._made(), stamp
            return self._text

    def _made_of(self) -> object:
        return tuple(_stamp(self._folder / name) for name in ("checkpoint.safetensors", LEDGER_FILE, "result.json"))

    def _made(self) -> str:
        try:
            return page([self._folder], refresh_s=REFRESH_S)
        except (LdpflError, OSError) as error:  # nothing yet, or a file that is being replaced
            return _WAITING.format(seconds=REFRESH_S, said=escape(str(error)))


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        state = file.stat()
    except OSError:  # it is not there yet
        return None
    return state.st_mtime_ns, state.st_size


_MOST_CONNECTIONS, _SILENT_S = 32, 5.0
"""At once, each with a thread; and how long one may say nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__((HOST, 0), _Handler)
        self.latest, self.path_of_page = _Latest(folder), f"/{secrets.token_urlsafe(12)}/"
        self.place = f"{HOST}:{self.server_address[1]}"
        self._room = threading.BoundedSemaphore(_MOST_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Hang up where there are too many: whoever may reach this port could use up what the run has to open files."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a browser that asks anew has hung up, and the terminal shows the run."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _SILENT_S

    def do_GET(self) -> None:
        # A page of somebody else's can make a browser ask for another name at this address: it is not answered, nor who guesses.
        known = self.headers.get("Host") == self.server.place and self.path == self.server.path_of_page
        body = (self.server.latest.text() if known else "there is no such page").encode()
        self.send_response(200 if known else 404)
        self.send_header("Content-Type", "text/html; charset=utf-8" if known else "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # the base class calls it so
        """Say nothing: the terminal shows the run."""


@contextmanager
def watching(folder: Path) -> Iterator[str]:
    """Serve the page of the run in ``folder`` to this machine alone, at an address that nobody guesses; yield the address."""
    with _Server(folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        thread.start()
        try:
            yield f"http://{server.place}{server.path_of_page}"
        finally:
            server.shutdown()
            thread.join()
