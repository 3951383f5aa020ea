"""What the relay counts for its operator, in the text format of Prometheus.

A dozen lines instead of a library: these are counters of one process without histograms. No label names a client, a
token, a run or a round.
"""

from __future__ import annotations

from collections import Counter

_METHODS = frozenset({"GET", "PUT", "POST", "PATCH", "HEAD", "DELETE"})
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counters since the process started. Used by the event loop only, so without locks."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._received = 0
        self._handed_out = 0

    def request(self, method: str, status: int) -> None:
        """Count a request and its answer."""
        self._requests[method if method in _METHODS else "other", status] += 1

    def received(self, count: int) -> None:
        """Count bytes of uploads that were stored."""
        self._received += count

    def handed_out(self, count: int) -> None:
        """Count bytes of mixed records that were sent to aggregators."""
        self._handed_out += count

    def text(self) -> str:
        """Return all counters."""
        requests = [
            f'ldpfl_relay_requests_total{{method="{method}",status="{status}"}} {count}'
            for (method, status), count in sorted(self._requests.items())
        ]
        lines = [
            "# HELP ldpfl_relay_requests_total Requests by method and status.",
            "# TYPE ldpfl_relay_requests_total counter",
            *requests,
            "# HELP ldpfl_relay_received_bytes_total Bytes of uploads that were stored.",
            "# TYPE ldpfl_relay_received_bytes_total counter",
            f"ldpfl_relay_received_bytes_total {self._received}",
            "# HELP ldpfl_relay_handed_out_bytes_total Bytes of mixed records sent to aggregators.",
            "# TYPE ldpfl_relay_handed_out_bytes_total counter",
            f"ldpfl_relay_handed_out_bytes_total {self._handed_out}",
        ]
        return "\n".join(lines) + "\n"
