"""The relay's log: one line of JSON an event, about rounds and faults, never about a request, a client or a token."""

from __future__ import annotations

import json
import logging
import traceback
from pathlib import Path

LOGGER = "ldpfl.relay"
_log = logging.getLogger(LOGGER)


def log_round(event: str, run: str, number: int, **figures: float) -> None:
    """Log what happened to a round, with counts, sizes and durations."""
    _log.info(json.dumps({"event": event, "run": run, "round": number, **figures}))


def log_fault(event: str, error: BaseException) -> None:
    """Log that something went wrong by kind and place only: an error's text could repeat a request or a token."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    _log.error(json.dumps({"event": event, "error": type(error).__name__, "place": place}))


def log_listening(host: str, port: int, *, tls: bool) -> None:
    """Log where the relay listens."""
    _log.info(json.dumps({"event": "listening", "host": host, "port": port, "tls": tls}))
