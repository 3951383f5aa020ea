"""Run the relay as a server process."""

from __future__ import annotations

import logging
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from ldpfl.errors import ConfigError
from ldpfl.shuffling.relay.app import create_app
from ldpfl.shuffling.relay.clients import is_loopback
from ldpfl.shuffling.relay.limits import Limits
from ldpfl.shuffling.relay.logs import LOGGER, log_listening
from ldpfl.shuffling.relay.schema import open_engine
from ldpfl.shuffling.relay.store import Store

CONNECTIONS = 400
"""Connections at once; with a block of 256 KiB each, uploads take at most 100 MB of memory. More are told 503."""

_IDLE_S = 30
_SHUTDOWN_S = 10


@dataclass(frozen=True)
class Tls:
    """Files of the certificate chain and its private key, both PEM."""

    certificate: Path
    key: Path


def serve(store: str, host: str, port: int, tls: Tls | None, limits: Limits = Limits()) -> None:  # noqa: B008  (frozen)
    """Serve the relay over ``store`` until the process is told to stop; port 0 lets the system choose.

    Raises:
        ConfigError: the host is not this machine's own loopback and there is no TLS, or the certificate, store or address cannot be opened.
    """
    if tls is None and not is_loopback(host):
        raise ConfigError(f"without TLS the relay listens on this machine only, not on {host}: give --tls-cert and --tls-key")
    _log_to_stderr()
    relay = Store(open_engine(store))
    config = uvicorn.Config(
        create_app(relay, limits),
        ssl_certfile=tls.certificate if tls else None,
        ssl_keyfile=tls.key if tls else None,
        access_log=False,  # it would say who uploaded when
        log_config=None,
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        ws="none",
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"the certificate or its key cannot be read ({type(error).__name__}): both must be PEM files that fit together"
        ) from None
    with _listen(host, port) as listener:
        log_listening(host, listener.getsockname()[1], tls=tls is not None)
        uvicorn.Server(config).run(sockets=[listener])
    relay.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=CONNECTIONS)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from None


def _log_to_stderr() -> None:
    logger = logging.getLogger(LOGGER)
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler())
