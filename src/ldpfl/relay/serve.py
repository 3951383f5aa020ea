"""Run the relay as a server process."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

import uvicorn

from ldpfl.errors import ConfigError
from ldpfl.relay.app import create_app
from ldpfl.relay.connections import HEAD_BYTES, Gate, TimedTlsEventLoop, bounded_protocol
from ldpfl.relay.database import open_engine, warn_of_log_copies
from ldpfl.relay.requests import is_loopback
from ldpfl.relay.store import Store
from ldpfl.relay.telemetry import LOGGER, log_fault, log_listening
from ldpfl.relay.usage_limits import ConnectionLimits, Limits
from ldpfl.util.file_owners import require_own

_SHUTDOWN_S = 10  # for requests to end after a signal
_TIDY_S = 2.0  # between two attempts to delete what is left of ended rounds
_TLS_GROUP = "prime256v1"
_PR_SET_DUMPABLE = 4  # of Linux' <sys/prctl.h>
_OTHER_FILES = 64
"""Number of file descriptors for other things than connections: the store, temporary files, the log and the event loop."""


@dataclass(frozen=True)
class Tls:
    """Files of the certificate chain and its private key, both PEM."""

    certificate: Path
    key: Path


def serve(
    store: str,
    host: str,
    port: int,
    tls: Tls | None,
    limits: Limits = Limits(),  # noqa: B008  (frozen)
    connections: ConnectionLimits = ConnectionLimits(),  # noqa: B008  (frozen)
) -> None:
    """Serve the relay over ``store`` until SIGTERM or SIGINT, then close the store and return.

    Args:
        store: path of a SQLite file, or URL of a PostgreSQL database.
        port: port to listen on; 0 lets the system choose one.
        tls: certificate and key; None to listen without TLS, which only a loopback ``host`` may.
        limits: limits on the requests of each token.
        connections: limits on the number and the times of connections.

    Raises:
        ConfigError: there is no TLS and the host is not a loopback address; others may read the store or the key; or the certificate,
            the store or the address cannot be opened.
    """
    if tls is None and not is_loopback(host):
        raise ConfigError(f"without TLS the relay may listen on this machine only, got host {host}: give --tls-cert and --tls-key")
    if tls is not None:
        require_own(tls.key, "the certificate's key", ConfigError, secret=True)
    _log_to_stderr()
    _forbid_memory_dumps()
    with closing(Store(open_engine(store))) as relay:
        server = uvicorn.Server(_uvicorn_config(relay, tls, limits, connections))
        with _ending_on_signals(server), Gate(_listen(host, port), _reduced_to_descriptor_limit(connections)) as listener:
            relay.tidy()  # deletes what an earlier process has left of ended rounds
            log_listening(host, listener.getsockname()[1], tls=tls is not None)
            warn_of_log_copies(relay.engine)
            with _periodic_tidying(relay), asyncio.Runner(loop_factory=partial(TimedTlsEventLoop, connections)) as runner:
                runner.get_loop().set_exception_handler(_log_fault)
                runner.run(server.serve(sockets=[listener]))
            relay.tidy()  # deletes at once what the periodic deletion has not come to


def _log_fault(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an uncaught exception by type and place only. asyncio's own handler would log its text, which may hold data."""
    log_fault("connection_failed", context.get("exception") or RuntimeError())  # some faults come without an exception


@contextmanager
def _ending_on_signals(server: uvicorn.Server) -> Iterator[None]:
    """End ``server`` on SIGINT or SIGTERM, at any time. Uvicorn raises the signal again at its end; this handler then absorbs it."""
    earlier_handlers = {number: signal.signal(number, server.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in earlier_handlers.items():
            signal.signal(number, handler)


def _reduced_to_descriptor_limit(connections: ConnectionLimits) -> ConnectionLimits:
    """Raise this process's limit of file descriptors if possible, and return ``connections`` reduced to the limit.

    Without a free descriptor, each new connection would be a fault.
    """
    if resource is None:
        return connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections.in_total + _OTHER_FILES
    if soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)  # RLIM_INFINITY is -1, so min would take it
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    available = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_FILES
    return replace(connections, in_total=max(1, min(connections.in_total, available)))


@contextmanager
def _periodic_tidying(relay: Store) -> Iterator[None]:
    """Run a thread that periodically retries deletions, which fail if a reader holds the store, the disk is full, or time is short.

    The thread also collects the garbage of connections, see :class:`~ldpfl.relay.connections.Gate`. Objects of loaded packages are excluded
    from the collection, so that it takes only a millisecond or two.
    """
    over = threading.Event()
    gc.collect()
    gc.freeze()

    def tidy() -> None:
        """Collect garbage, and do the deletions that are still due, every two seconds until ``over`` is set."""
        while not over.wait(_TIDY_S):
            gc.collect()
            try:
                relay.end_hung_connections()
                if relay.untidy and relay.is_available:
                    relay.tidy(at_once=False)
            except OSError as error:  # the store's folder cannot be read now; the thread must live to try again
                log_fault("tidy_failed", error)

    thread = threading.Thread(target=tidy, name="tidying")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _uvicorn_config(relay: Store, tls: Tls | None, limits: Limits, connections: ConnectionLimits) -> uvicorn.Config:
    """Return uvicorn's configuration for the relay: no logs of requests, no protocols but HTTP/1.1, and limited times."""
    config = uvicorn.Config(
        create_app(relay, limits),
        http=bounded_protocol(connections),  # never httptools, which reads a head of any length
        h11_max_incomplete_event_size=HEAD_BYTES,
        ssl_certfile=tls.certificate if tls else None,
        ssl_keyfile=tls.key if tls else None,
        access_log=False,  # it would say who uploaded when
        log_config=None,
        log_level="error",  # warnings are about callers, and a stranger could fill the disk with them
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        ws="none",
        limit_concurrency=connections.served,
        timeout_keep_alive=connections.idle_s,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"the certificate or its key cannot be read ({type(error).__name__}): both must be PEM files that belong together"
        ) from None
    if config.ssl is not None:
        # OpenSSL's default list includes groups for which one handshake costs a tenth of a second; every caller supports this group.
        config.ssl.set_ecdh_curve(_TLS_GROUP)
    return config


def _forbid_memory_dumps() -> None:
    """Forbid core dumps of this process, and reading its memory by other processes of the user: it holds tokens and uploads."""
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on ``host``, an IPv4 or IPv6 address or a name."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET  # only IPv6 addresses have colons
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from None


def _log_to_stderr() -> None:
    """Write the relay's own log, and no other, to the standard error output."""
    logger = logging.getLogger(LOGGER)
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler())
