"""The relay's log and counters, for its operator, and the text format of metrics, which a node uses as well."""

from __future__ import annotations

import json
import logging
import traceback
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

LOGGER = "ldpfl.relay"
"""Name of the logger. Each event is one line of JSON about rounds and faults, never about a request, a client or a token."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus' text format. It is written here without a library, because there are only counters of one process. No label names a client,
a token, a run or a round."""

_METHODS = frozenset({"GET", "PUT", "POST", "PATCH", "HEAD", "DELETE"})
_log = logging.getLogger(LOGGER)


def log_round(event: str, run: str, number: int, **figures: float) -> None:
    """Log what happened to a round, with counts, sizes and durations."""
    _log.info(json.dumps({"event": event, "run": run, "round": number, **figures}))


def log_fault(event: str, error: BaseException) -> None:
    """Log an exception by type and place only, because its text could repeat a request or a token."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    _log.error(json.dumps({"event": event, "error": type(error).__name__, "place": place}))


def log_event(event: str, **figures: float | str) -> None:
    """Log an event that needs the operator's attention, without any text of an exception."""
    _log.error(json.dumps({"event": event, **figures}))


def log_listening(host: str, port: int, *, tls: bool) -> None:
    """Log where the relay listens."""
    _log.info(json.dumps({"event": "listening", "host": host, "port": port, "tls": tls}))


def metric_lines(name: str, kind: str, help_text: str, values: Mapping[str, float]) -> list[str]:
    """Return a metric in Prometheus' text format. ``values`` has its values by their labels in braces, or by "" for no label."""
    numbers = (f"{name}{labels} {value if isinstance(value, int) else f'{value:.10g}'}" for labels, value in values.items())
    return [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}", *numbers]


class Metrics:
    """Counters since the process started. Used by the event loop only, so without locks."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._received = 0
        self._handed_out = 0

    def count_request(self, method: str, status: int) -> None:
        """Count a request and its answer. Unknown methods share one counter, because a caller could invent any number of them."""
        self._requests[method if method in _METHODS else "other", status] += 1

    def count_received(self, count: int) -> None:
        """Count bytes of uploads that were stored."""
        self._received += count

    def count_handed_out(self, count: int) -> None:
        """Count bytes of mixed records that were sent to aggregators."""
        self._handed_out += count

    def text(self) -> str:
        """Return all counters in Prometheus' text format."""
        requests = {f'{{method="{method}",status="{status}"}}': count for (method, status), count in sorted(self._requests.items())}
        lines = [
            *metric_lines("ldpfl_relay_requests_total", "counter", "Requests by method and status.", requests),
            *metric_lines("ldpfl_relay_received_bytes_total", "counter", "Bytes of uploads that were stored.", {"": self._received}),
            *metric_lines(
                "ldpfl_relay_handed_out_bytes_total", "counter", "Bytes of mixed records sent to aggregators.", {"": self._handed_out}
            ),
        ]
        return "\n".join(lines) + "\n"
