"""A run's page while it trains, on 127.0.0.1: made anew once a round is finished, and only when somebody looks."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from ldpfl.errors import LdpflError
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
        files = (self._folder / name for name in ("checkpoint.safetensors", "ledger.json", "result.json"))
        return tuple((state.st_mtime_ns, state.st_size) for file in files if file.exists() for state in (file.stat(),))

    def _made(self) -> str:
        try:
            return page([self._folder], refresh_s=REFRESH_S)
        except (LdpflError, OSError) as error:  # nothing yet, or a file that is being replaced
            return _WAITING.format(seconds=REFRESH_S, said=escape(str(error)))


class _Handler(BaseHTTPRequestHandler):
    latest: ClassVar[_Latest]
    path_of_page: ClassVar[str]
    hosts: ClassVar[tuple[str, ...]]

    def do_GET(self) -> None:
        # A page of somebody else's can make a browser ask for another name at this address: it is not answered, nor who guesses.
        known = self.headers.get("Host") in self.hosts and self.path == self.path_of_page
        body = (self.latest.text() if known else "there is no such page").encode()
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
    secret = secrets.token_urlsafe(12)
    own = type("_OwnHandler", (_Handler,), {"latest": _Latest(folder), "path_of_page": f"/{secret}/", "hosts": ()})
    with ThreadingHTTPServer((HOST, 0), own) as server:
        server.daemon_threads = True
        place = f"{HOST}:{server.server_address[1]}"
        own.hosts = (place,)  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        thread.start()
        try:
            yield f"http://{place}/{secret}/"
        finally:
            server.shutdown()
            thread.join()
