"""Requests to the relay: retries and their waits, time limits, and limits on the length of answers."""

from __future__ import annotations

import ipaddress
import math
import random
import re
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.cookiejar import CookieJar, DefaultCookiePolicy
from types import TracebackType
from typing import Any, Self, cast
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from ldpfl.errors import ConfigError, ProtocolError, RelayRefused, RelayRoundOver, RelayUnreachable, first_line
from ldpfl.relay.protocol import RoundStatus, parse_round_number, parse_run
from ldpfl.util.number_format import counted

ANSWER_BYTES = 64 * 2**10
"""Longest answer that is read, except for the records."""

_RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504, 507})
_MAX_TEXT_LENGTH = 200
_MAX_ADDRESSES = 8
_LOOPBACK = "127.0.0.1"
_PORTS = {"http": 80, "https": 443}
_NUMBER = re.compile("[0-9]{1,18}")


@dataclass(frozen=True)
class Patience:
    """How often and how long to retry a request.

    Attributes:
        tries: number of failures in a row after which to give up. Uploads are retried until their own time limit instead.
        first_s: seconds to wait after the first failure. The wait doubles with each further failure.
        longest_s: maximum of such a wait.
        timeout_s: limit for connecting, and for each piece that is sent or read.
        total_s: limit for one request with its answer.
        all_tries_s: limit for all tries of a request with their waits. Uploads have their own time limit instead.
        longest_upload_s: maximum of a wait between two tries of an upload.
    """

    tries: int = 8
    first_s: float = 0.25
    longest_s: float = 15.0
    timeout_s: float = 60.0
    total_s: float = 600.0
    all_tries_s: float = math.inf
    longest_upload_s: float = 5.0

    def wait(self, failures: int, asked_s: float) -> float:
        """Return the seconds to wait after ``failures`` failures in a row; the relay asked for at least ``asked_s`` (Retry-After).

        The wait is random, between half its length and all of it, so that clients that fail together do not retry together.
        """
        backoff = min(self.longest_s, self.first_s * 2.0 ** (failures - 1))
        return min(self.longest_s, max(asked_s, backoff * random.SystemRandom().uniform(0.5, 1.0)))

    def wait_within(self, failures: int, asked_s: float, left_s: float) -> float:
        """Return the seconds to wait before an upload that has ``left_s`` seconds left is tried again.

        The wait is uniform between 0 and a bound that doubles with each failure, so that many clients spread out. The relay's ``asked_s``
        is limited to half of the time left, so that a relay that asks for too much does not prevent the upload.
        """
        backoff = min(self.longest_upload_s, self.first_s * 2.0 ** min(failures, 32))  # without 32, many failures would overflow
        return min(left_s, max(min(asked_s, left_s / 2), random.SystemRandom().uniform(0.0, backoff)))


@dataclass
class RetryPolicy(ABC):
    """Decides how long one call is retried."""

    patience: Patience
    sleep: Callable[[float], None]
    clock: Callable[[], float]
    failures: int = field(default=0, init=False)
    _started_at_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._started_at_s = self.clock()

    @abstractmethod
    def seconds_left(self) -> float:
        """Return the maximum number of seconds for the next request."""

    @abstractmethod
    def wait_or_give_up(self, response: httpx.Response | None) -> str:
        """Count one more failure, and wait. Return "" if the request may be sent again.

        Otherwise the call is given up: return how often or how long it was tried, as the end of the error's text ("tried ...").

        Args:
            response: the relay's answer, or None if none came.

        Raises:
            RelayRefused: the call is given up, and the last answer was a refusal.
        """

    def reset_failures(self) -> None:
        """Reset the number of failures."""
        self.failures = 0


@dataclass
class LimitedTries(RetryPolicy):
    """Gives up after ``patience.tries`` failures in a row, or after ``patience.all_tries_s`` seconds."""

    def seconds_left(self) -> float:
        return max(0.0, min(self.patience.total_s, self._started_at_s + self.patience.all_tries_s - self.clock()))

    def wait_or_give_up(self, response: httpx.Response | None) -> str:
        """Count one more failure, and wait longer than after the last one, unless there have been too many.

        Return "" if the request may be sent again. Return the number of failures as text if there were too many, or the time is over.
        """
        self.failures += 1
        if self.failures < self.patience.tries:
            self.sleep(min(self.seconds_left(), self.patience.wait(self.failures, _retry_after_s(response))))
            if self.seconds_left() > 0:
                return ""
        if response is not None and is_worth_a_retry(response):
            require_success(response)  # raises, since no status that is worth a retry is a success
        return f"{counted(self.failures, 'time')} in a row"


@dataclass
class LimitedTime(RetryPolicy):
    """Gives up after ``seconds``, whatever the number of failures."""

    seconds: float

    def seconds_left(self) -> float:
        return max(0.0, self._started_at_s + self.seconds - self.clock())

    def wait_or_give_up(self, response: httpx.Response | None) -> str:
        """Count one more failure, and wait.

        Return "" if the request may be sent again. Return how long it was tried, and the last answer, if the time is over after the wait.
        """
        self.failures += 1
        self.sleep(self.patience.wait_within(self.failures, _retry_after_s(response), self.seconds_left()))
        if self.seconds_left() > 0:
            return ""
        last_answer = "" if response is None else f"; the last answer was {response.status_code}: {_refusal_reason(response)}"
        return f"for {self.seconds:.0f} seconds{last_answer}"


class Caller:
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to call the relay at ``url``; ``verify`` may be a TLS context that trusts a private authority.

        ``transport`` replaces the network, for a relay in this process. Tests replace ``sleep`` and ``clock``.

        Raises:
            ConfigError: the URL is not valid, or the token would go over a network without TLS.
        """
        self._patience, self._sleep, self._clock = patience, sleep, clock
        self._connection = _OpenConnections()
        self._last_address = self._last_error = ""
        self.answer_date = ""
        """The header ``Date`` of the last answer: the relay's time, in whole seconds. Empty without an answer, or without the header."""
        self._in_process = transport is not None
        base = _relay_url(url)
        self._shown_url = str(base.copy_with(userinfo=b"", query=None, fragment=None)).rstrip("/")  # for messages, so without a password
        self._http = httpx.Client(
            base_url=base,
            # No compression: a small compressed answer could have any size.
            headers={"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"},
            transport=transport,
            verify=verify,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),  # no cookies: they would accumulate, and identify this client
            trust_env=False,  # a .netrc file would replace the token, and a proxy would see when this client uploads
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def round_status(self, run: str, number: int, retry_policy: RetryPolicy | None = None) -> RoundStatus:
        """Return the terms and the state of a round, as the relay states them. An aggregator also learns how many uploads are complete.

        Raises:
            RelayRefused: there is no such round, or the token is not known.
            RelayUnreachable: no answer.
        """
        return parse_round_status(self._call("GET", round_path(run, number), retry_policy=retry_policy), run, number)

    def _call(
        self, method: str, path: str, *, retry_policy: RetryPolicy | None = None, max_bytes: int = ANSWER_BYTES, **parts: Any
    ) -> httpx.Response:
        """Send an idempotent request, retrying as ``retry_policy`` says. Return the answer, or raise if it is a refusal.

        Args:
            retry_policy: by default, a limited number of failures in a row.
            max_bytes: maximum length of the answer's body.
            parts: further parts of the request, such as ``content`` or ``headers``, as httpx takes them.
        """
        retry_policy = retry_policy or LimitedTries(self._patience, self._sleep, self._clock)
        while True:
            response = self._send_once(method, path, retry_policy, max_bytes, **parts)
            if response is not None and not is_worth_a_retry(response):
                return require_success(response)
            self._wait_or_raise(retry_policy, response)

    def _wait_or_raise(self, retry_policy: RetryPolicy, response: httpx.Response | None) -> None:
        """Wait after one more failure, or raise.

        Raises:
            RelayRefused: ``retry_policy`` gave up, and the last answer was a refusal.
            RelayUnreachable: ``retry_policy`` gave up, and there was no answer, or no progress.
        """
        tried_for = retry_policy.wait_or_give_up(response)
        if tried_for:
            why = f" ({self._last_error})" if response is None and self._last_error else ""
            raise RelayUnreachable(f"the relay {self._shown_url} could not be reached{why}, or accepted no more data: tried {tried_for}")

    def _send_once(
        self, method: str, path: str, retry_policy: RetryPolicy, max_bytes: int = ANSWER_BYTES, **parts: Any
    ) -> httpx.Response | None:
        """Send a request once, and return the answer. Return None if the connection failed or timed out, or the answer is compressed.

        The time for connecting is divided among the relay's addresses, so that a silent address does not use up all of it.
        """
        request = self._http.build_request(method, path, **parts)
        host_name, addresses = request.url.host, self._addresses(request.url)
        started_at_s, allowed_s = self._clock(), retry_policy.seconds_left()
        if not addresses:
            self._last_error = f"no address was found for {host_name}"
        for index, address in enumerate(addresses):
            waited_s = self._clock() - started_at_s if index else 0.0  # for the addresses before this one
            left_s = max(0.0, allowed_s - waited_s)
            addresses_left = len(addresses) - index
            # An equal share, for each address left, of what remains of the time for connecting.
            connect_s = max(0.0, min(self._patience.timeout_s, allowed_s) - waited_s) / addresses_left
            request.url = request.url.copy_with(host=address)
            request.extensions = {
                "timeout": httpx.Timeout(min(self._patience.timeout_s, left_s), connect=connect_s).as_dict(),
                "trace": self._connection.watch,
                "sni_hostname": host_name,  # TLS checks the certificate for this name, although the URL now holds the address
            }
            try:
                with self._connection.cut_after(left_s):
                    response = self._http.send(request, stream=True)
                    self._last_address, self.answer_date = address, response.headers.get("Date", "")
                    with closing(response):
                        return _read_body(response, max_bytes, self._shown_url)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                if left_s > 0:  # an attempt without time left fails in any case
                    self._last_error = first_line(error)[:_MAX_TEXT_LENGTH]
                continue
            except (httpx.RequestError, httpx.InvalidURL, UnicodeError) as error:  # httpx also parses a redirect's Location: the latter two
                self._last_error = type(error).__name__
                return None
        return None

    def _addresses(self, url: httpx.URL) -> list[str]:
        """Return the relay's addresses, first the one that answered last; the host itself if it is an address, or in-process."""
        if self._in_process or _is_address(url.host):
            return [url.host]
        if url.scheme == "http":  # loopback only. IPv4 alone, because another user may listen on the same port of IPv6's loopback
            return [_LOOPBACK]
        try:
            entries = socket.getaddrinfo(url.host, url.port or _PORTS[url.scheme], type=socket.SOCK_STREAM)
        except OSError:
            return []
        socket_addresses = [socket_address for *_, socket_address in entries]  # each a tuple: the address, the port, and others
        addresses = list(dict.fromkeys(str(address) for address, *_ in socket_addresses))  # each address once, in the system's order
        return sorted(addresses[:_MAX_ADDRESSES], key=lambda address: address != self._last_address)  # False comes first


class _OpenConnections:
    """Handle on a client's connections, to cut them after a total time. The HTTP client's timeouts cover only single reads and writes.

    All are cut, not only the latest: the client says when it opens a connection, but not which one of them it uses again.
    """

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []
        self._time_is_up = False

    def watch(self, event: str, details: dict[str, Any]) -> None:
        """Remember the socket of a new connection; httpcore's ``trace`` extension calls this."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            still_open = [one for one in self._sockets if one.fileno() != -1]
            # A new list, because the timer's thread may be going through the old one.
            self._sockets = [*still_open, details["return_value"].get_extra_info("socket")]
            if self._time_is_up:  # the time ended while this connection was being made
                self._break_off()

    @contextmanager
    def cut_after(self, seconds: float) -> Iterator[None]:
        """Break all connections if the block takes longer than ``seconds``."""
        self._time_is_up = False
        timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), self._break_off)  # a timer takes no infinite time
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _break_off(self) -> None:
        """Break all connections, and the next one that is being made."""
        self._time_is_up = True
        for one in self._sockets:
            with suppress(OSError):  # it is closed already
                # Not SSLSocket.shutdown, which removes TLS first: data that is written at this moment would be sent unencrypted.
                socket.socket.shutdown(one, socket.SHUT_RDWR)


def _read_body(response: httpx.Response, max_bytes: int, relay_url: str) -> httpx.Response | None:
    """Return the answer with its body read. The body of a refusal is cut off after ``max_bytes``. Return None if the body is compressed.

    The returned answer also holds ``relay_url``, for the message of :func:`wrong_server_error`.

    Raises:
        ProtocolError: the body of a success is longer than ``max_bytes`` bytes.
    """
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        return None
    body = bytearray()
    for data in cast(httpx.SyncByteStream, response.stream):
        body += data
        if len(body) > max_bytes and response.is_error:  # such as a proxy's long page that says the relay is down
            break
        if len(body) > max_bytes:
            raise ProtocolError(f"the answer of {relay_url} is longer than {max_bytes:,} bytes: {_OTHER_SERVER}")
    return httpx.Response(response.status_code, headers=response.headers, content=bytes(body), extensions={_URL_KEY: relay_url})


_URL_KEY = "ldpfl.relay"
_OTHER_SERVER = "check that this is the URL of a relay, and that the relay has this version of ldpfl"


def wrong_server_error(response: httpx.Response, what: str) -> ProtocolError:
    """Return the error for an answer that no relay of this version gives. ``what`` follows "the answer of URL" in its text."""
    return ProtocolError(f"the answer of {response.extensions[_URL_KEY]} {what}: {_OTHER_SERVER}")


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only be this machine."""
    return ipaddress.ip_address(host).is_loopback if _is_address(host) else host == "localhost"


def _is_address(host: str) -> bool:
    """Whether ``host`` is an IP address, and not a name."""
    try:
        ipaddress.ip_address(host)
        return True
    except ValueError:
        return False


def is_worth_a_retry(response: httpx.Response) -> bool:
    """Whether the same request may get another answer later."""
    return response.status_code in _RETRIED_STATUSES


def require_success(response: httpx.Response) -> httpx.Response:
    """Return ``response`` if it is a success.

    Raises:
        RelayRefused: the answer is a refusal; RelayRoundOver if its status is 410.
    """
    if response.is_success:
        return response
    error_type = RelayRoundOver if response.status_code == 410 else RelayRefused
    raise error_type(response.status_code, _refusal_reason(response))


def round_path(run: str, number: int) -> str:
    """Return the path of a round in the relay's URLs.

    Raises:
        ProtocolError: the name of the run or the number of the round is not allowed.
    """
    return f"/v1/rounds/{quote(parse_run(run), safe='')}/{parse_round_number(str(number))}"


def parse_round_status(response: httpx.Response, run: str, number: int) -> RoundStatus:
    """Return the status of a round in an answer.

    Raises:
        ProtocolError: the status cannot be read, is impossible, or is of another round.
    """
    try:
        status = RoundStatus.model_validate_json(response.content)
    except ValidationError:
        raise wrong_server_error(response, "about a round cannot be read") from None
    if (status.run, status.round) != (run, number):
        raise ProtocolError(f"asked the relay about round {number} of {run}, but its answer is about another round: {_OTHER_SERVER}")
    return status


def number_in_header(response: httpx.Response, name: str, largest: int) -> int:
    """Return the number in the header ``name``.

    Raises:
        ProtocolError: the header is missing, or is no number up to ``largest``.
    """
    text = response.headers.get(name, "")
    if not _NUMBER.fullmatch(text) or int(text) > largest:
        raise wrong_server_error(response, f"has no number up to {largest} in its header {name}")
    return int(text)


def _relay_url(text: str) -> httpx.URL:
    """Return ``text`` as a URL to which a token may be sent, or raise a :class:`ConfigError`."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        raise ConfigError("the relay's URL is not valid: expected https://host:port") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"the relay's URL must be https://host:port, not {text!r}")
    if url.scheme == "http" and not is_loopback(url.host):
        raise ConfigError(
            f"the token would travel to the relay at {url.host} without TLS: use https://, since http:// is for this machine only"
        )
    return url


def _refusal_reason(response: httpx.Response) -> str:
    """Return the relay's reason for a refusal, shortened, and without characters that could control a terminal."""
    try:
        text = str(response.json()["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        text = response.reason_phrase or "no reason given"  # an answer to HEAD has no body
    return "".join(char for char in text[:_MAX_TEXT_LENGTH] if char.isprintable())


def _retry_after_s(response: httpx.Response | None) -> float:
    """Return the seconds that the relay asks to wait for (Retry-After), 0 if it asks for none."""
    text = "" if response is None else response.headers.get("Retry-After", "")
    return float(text) if _NUMBER.fullmatch(text) else 0.0
