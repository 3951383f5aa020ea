"""Callers of the relay: a client that uploads, and the aggregator that opens rounds and takes the mixed records."""

from __future__ import annotations

import ipaddress
import random
import re
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from ldpfl.errors import ConfigError, ProtocolError
from ldpfl.shuffling.relay.headers import LENGTH, OFFSET, PARTS
from ldpfl.shuffling.relay.mixing import MAX_PARTS
from ldpfl.shuffling.relay.terms import RoundStatus, Terms, round_of, run_of, upload_of

_WORTH_A_RETRY = frozenset({408, 429, 500, 502, 503, 504, 507})
_LONGEST_TEXT = 200
_NUMBER = re.compile("[0-9]{1,18}")


class RelayRefused(ProtocolError):
    """The relay refused; ``status`` is the HTTP status that it said so with."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the relay refused ({status}): {message}")
        self.status = status


class RelayRoundOver(RelayRefused):
    """The round takes no uploads any more, or its records were acknowledged and deleted."""


class RelayUnreachable(ProtocolError):
    """The relay did not answer, or not in its own language, as often as was tried."""


class RelayNotReleased(ProtocolError):
    """The round was not released in the time that the aggregator waits for it."""


@dataclass(frozen=True)
class Patience:
    """How often and how long to try: ``tries`` in a row that bring nothing forward, waiting ``first_s``, twice that, and so on.

    Each wait is drawn from the upper half of its length, so that clients that a break has hit at once do not come back
    at once. ``timeout_s`` is for connecting, and for each piece that is sent or read.
    """

    tries: int = 8
    first_s: float = 0.25
    longest_s: float = 15.0
    timeout_s: float = 60.0

    def wait(self, failures: int, asked_s: float) -> float:
        """Return the seconds to wait after so many failures in a row, of which the relay asked for ``asked_s``."""
        own = min(self.longest_s, self.first_s * 2.0 ** (failures - 1))
        return min(self.longest_s, max(asked_s, own * random.SystemRandom().uniform(0.5, 1.0)))


class _Caller:
    """Requests to one relay with one token. Usable as a context manager."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        transport: httpx.BaseTransport | None = None,
        verify: ssl.SSLContext | bool = True,
        patience: Patience = Patience(),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Prepare to call the relay at ``url``; ``verify`` may be a context that trusts an own authority.

        Raises:
            ConfigError: the URL is none, or would carry the token over a network without TLS.
        """
        self._patience, self._sleep = patience, sleep
        self._http = httpx.Client(
            base_url=_checked(url),
            headers={"Authorization": f"Bearer {token}"},
            transport=transport,
            verify=verify,
            timeout=patience.timeout_s,
            trust_env=False,  # a .netrc would replace the token, a proxy variable would see when who uploads
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _round_status(self, run: str, number: int) -> RoundStatus:
        return _status_of(self._call("GET", _path(run, number)))

    def _call(self, method: str, path: str, **parts: Any) -> httpx.Response:
        """Send a request that may be repeated, until it is answered; return the answer, or raise what it refuses."""
        failures = 0
        while True:
            response = self._once(method, path, **parts)
            if response is not None and response.status_code not in _WORTH_A_RETRY:
                return _accepted(response)
            failures = self._failed(failures, response)

    def _once(self, method: str, path: str, **parts: Any) -> httpx.Response | None:
        """Send a request once; None if the connection broke or timed out, or the answer cannot be unpacked."""
        try:
            return self._http.request(method, path, **parts)
        except httpx.RequestError:
            return None

    def _failed(self, failures: int, response: httpx.Response | None) -> int:
        """Wait after one more failure and return how many there are in a row now; give up after too many."""
        failures += 1
        if failures >= self._patience.tries:
            if response is not None and response.status_code in _WORTH_A_RETRY:
                _accepted(response)
            raise RelayUnreachable(f"the relay could not be reached, or took nothing more, {failures} times in a row")
        self._sleep(self._patience.wait(failures, _asked_s(response)))
        return failures


class RelayClient(_Caller):
    """A client of the relay: uploads its sealed records once a round."""

    def round_status(self, run: str, number: int) -> RoundStatus:
        """Return the terms and the state of a round.

        Raises:
            RelayRefused: there is no such round, or the token is not known.
            RelayUnreachable: no answer.
        """
        return self._round_status(run, number)

    def upload(self, run: str, number: int, upload_id: str, blob: bytes) -> None:
        """Upload ``blob``, whole records of the round's terms, and return once the relay has all of it on disk.

        After a break it asks how far it got and goes on there. ``upload_id`` (16 to 64 letters, digits, - and _) makes
        the call idempotent: once more, also from another process, uploads nothing twice.

        Raises:
            RelayRoundOver: the round is over; whether an upload that was cut off by that counted, it does not say.
            RelayRefused: the relay does not take it, and why.
            RelayUnreachable: too often in a row it broke off, or answered, without any progress.
            ProtocolError: an answer that cannot be right, or a name or id that the relay cannot have.
        """
        path = f"{_path(run, number)}/uploads/{quote(upload_of(upload_id), safe='')}"
        offset = _offset(self._call("POST", path, headers={LENGTH: str(len(blob))}), blob)
        furthest, failures = offset, 0
        while offset < len(blob):
            response = self._once("PATCH", path, headers={OFFSET: str(offset)}, content=blob[offset:])
            if response is not None and response.status_code not in _WORTH_A_RETRY and not _is_elsewhere(response):
                offset = _offset(_accepted(response), blob)
            if offset <= furthest:  # broken off, or answered that nothing has come
                failures = self._failed(failures, response)
                offset = _offset(self._call("HEAD", path), blob)
            if offset > furthest:
                furthest, failures = offset, 0


class RelayAggregator(_Caller):
    """The aggregator: opens rounds and takes what the relay has mixed."""

    def open_round(self, run: str, number: int, terms: Terms) -> RoundStatus:
        """Open a round; once more with equal terms changes nothing.

        Raises:
            RelayRefused: the terms are not allowed or differ from those that the round has.
            RelayUnreachable: no answer.
        """
        return _status_of(self._call("PUT", _path(run, number), json=terms.model_dump()))

    def round_status(self, run: str, number: int) -> RoundStatus:
        """Return the terms and the state of a round, and how many uploads are complete.

        Raises:
            RelayRefused: there is no such round, or the token is not known.
            RelayUnreachable: no answer.
        """
        return self._round_status(run, number)

    def wait(self, run: str, number: int, timeout_s: float, *, poll_s: float = 1.0) -> RoundStatus:
        """Wait until the round is released, by the relay's clock, at most ``timeout_s`` seconds of waiting.

        Raises:
            RelayNotReleased: it is not released by then; says why.
            RelayRefused, RelayUnreachable: as for :meth:`round_status`.
        """
        waited = 0.0
        while (status := self._round_status(run, number)).state in ("open", "waiting"):
            if waited >= timeout_s:
                why = (
                    "is still open"
                    if status.state == "open"
                    else f"has {status.uploads} uploads of the {status.terms.min_clients} it waits for"
                )
                raise RelayNotReleased(f"round {number} of {run} {why} after {timeout_s:g} seconds; wait longer or cancel it")
            pause = min(max(status.seconds_left, 0.01) if status.state == "open" else poll_s, poll_s, timeout_s - waited)
            self._sleep(pause)
            waited += pause
        return status

    def pull(self, run: str, number: int) -> Iterator[bytes]:
        """Yield the sealed records of a released round one by one, in the relay's mixed order; one part is in memory at a time.

        May be called again until :meth:`acknowledge`: it yields the same records in the same order.

        Raises:
            RelayRefused: the round is not over yet (status 425), or gone.
            RelayUnreachable: no answer.
            ProtocolError: what came is not what the terms and the number of uploads promise.
        """
        part, parts, records, size = 0, 1, 0, 0
        while part < parts:
            response = self._call("GET", f"{_path(run, number)}/records", params={"part": part})
            if part == 0:
                parts = _header(response, PARTS, MAX_PARTS)
                status = self._round_status(run, number)
                size = status.terms.record_bytes
            data = response.content
            if len(data) % size:
                raise ProtocolError(f"part {part} of round {number} of {run} is no whole number of records; nothing was acknowledged")
            for start in range(0, len(data), size):
                yield data[start : start + size]
            records += len(data) // size
            part += 1
        if status.uploads is None or records != status.uploads * status.terms.records_per_upload:
            raise ProtocolError(f"round {number} of {run} brought {records} records, not what its uploads hold; nothing was acknowledged")

    def acknowledge(self, run: str, number: int) -> None:
        """Tell the relay that the records were taken: it deletes them. Once more changes nothing.

        Raises:
            RelayRefused: the round was not released, or is another aggregator's.
            RelayUnreachable: no answer.
        """
        self._call("DELETE", f"{_path(run, number)}/records")

    def cancel(self, run: str, number: int) -> None:
        """End a round that is not wanted any more, whatever its state: the relay deletes what it holds of it.

        Raises:
            RelayRefused: there is no such round, or it is another aggregator's.
            RelayUnreachable: no answer.
        """
        self._call("DELETE", _path(run, number))


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only be this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _checked(text: str) -> httpx.URL:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        raise ConfigError("the relay's URL cannot be read; expected https://host:port") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"the relay's URL must be https://host:port, not {text!r}")
    if url.scheme == "http" and not is_loopback(url.host):
        raise ConfigError(f"the relay at {url.host} would get its token without TLS: use https outside this machine")
    return url


def _path(run: str, number: int) -> str:
    return f"/v1/rounds/{quote(run_of(run), safe='')}/{round_of(str(number))}"


def _accepted(response: httpx.Response) -> httpx.Response:
    if response.is_success:
        return response
    kind = RelayRoundOver if response.status_code == 410 else RelayRefused
    raise kind(response.status_code, _reason(response))


def _reason(response: httpx.Response) -> str:
    try:
        text = str(response.json()["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        text = response.reason_phrase or "no reason given"  # an answer to HEAD has no body
    return text[:_LONGEST_TEXT]


def _is_elsewhere(response: httpx.Response) -> bool:
    return response.status_code == 409 and OFFSET in response.headers


def _status_of(response: httpx.Response) -> RoundStatus:
    try:
        return RoundStatus.model_validate_json(response.content)
    except ValidationError:
        raise ProtocolError("the relay's answer about a round cannot be read; is this URL a relay of this version?") from None


def _offset(response: httpx.Response, blob: bytes) -> int:
    return _header(response, OFFSET, len(blob))


def _header(response: httpx.Response, name: str, largest: int) -> int:
    text = response.headers.get(name, "")
    if not _NUMBER.fullmatch(text) or int(text) > largest:
        raise ProtocolError(f"the relay's answer has no number up to {largest} in {name}; is this URL a relay of this version?")
    return int(text)


def _asked_s(response: httpx.Response | None) -> float:
    text = "" if response is None else response.headers.get("Retry-After", "")
    return float(text) if _NUMBER.fullmatch(text) else 0.0
