"""Limits on the number of the relay's connections and on their times. They apply before a caller has authenticated."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import re
import socket
import weakref
from collections import Counter
from typing import Any, ClassVar, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ldpfl.relay.usage_limits import ConnectionLimits

HEAD_BYTES = 4 * 2**10
"""Maximum length of a request's head. If a head is longer, not much more of it is in memory."""

TASK = "ldpfl.task"
"""Key of an ASGI scope for the task that answers the request."""

_MAX_HEADERS = 64
_MAX_BLANKS = 16
_BLANKS = re.compile(rb"[ \t]{%d}" % (_MAX_BLANKS + 1))
"""Matches more consecutive blanks than any honest caller sends in a head. h11's time for blanks grows with the square of their number."""

_BACKLOG = 128  # new connections that are looked at before the event loop serves others again
_COLLECT_EVERY = 100  # number of accepted connections after which garbage is collected
_IPV6_NETWORK = 64  # prefix length in bits: a provider assigns at least such a network to each customer

_MAX_HANDSHAKE_BYTES = 4 * 2**10
"""Maximum bytes of a TLS handshake: twice what any caller needs. The time for lists in it grows with the square of their length."""

_MAX_TLS_BEFORE_HTTP, _SPARE_TLS_BYTES = 24 * 2**10, 96 * 2**10
"""Maximum bytes of TLS that a connection may bring before any HTTP: the handshake and a first record; and later, beyond twice the bytes of
HTTP, to allow for data that is not decrypted yet."""

_READ_BUFFER_BYTES = 32 * 2**10
_NEW_TURN_BYTES, _TURN_BYTES, _UPLOAD_TURN_BYTES = 4 * 2**10, 32 * 2**10, 256 * 2**10
"""Bytes that are read from a connection before all others have their turn: while it has brought little HTTP, later, and once it has brought
much. If all other connections are new, a turn of all of them may take a tenth of a second."""

_UPLOAD_BYTES = 64 * 2**10  # of HTTP, after which a connection counts as one that uploads


class Gate(socket.socket):
    """A listening socket that closes new connections when there are too many, before TLS and before any byte is read."""

    def __init__(self, listening: socket.socket, bounds: ConnectionLimits) -> None:
        super().__init__(fileno=listening.detach())  # takes the listening socket over from the plain one
        self._bounds = bounds
        self._open: Counter[str] = Counter()  # connections by the caller's network
        self._accepted_since_collection = 0

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection that is within the bounds.

        Raises:
            BlockingIOError: no such connection is waiting, or :data:`_BACKLOG` others were closed in this call.
        """
        for _ in range(_BACKLOG):
            accepted, address = super().accept()
            network = _caller_network(address[0])
            if self._is_full(network):
                accepted.close()
                continue
            self._open[network] += 1
            self._accepted_since_collection += 1
            if self._accepted_since_collection >= _COLLECT_EVERY:
                # Closed connections leave reference cycles of up to 400 KB faster than Python's collector runs by itself.
                self._accepted_since_collection = 0
                gc.collect()
            return Accepted(accepted, self, network), address
        raise BlockingIOError  # give others in the event loop their turn before more connections are rejected

    def count_closed(self, network: str) -> None:
        """Stop counting a connection from ``network`` that has been closed."""
        self._open[network] -= 1
        if self._open[network] == 0:
            del self._open[network]  # otherwise the counter would keep every address that ever connected

    def _is_full(self, network: str) -> bool:
        """Whether one more connection from ``network`` would exceed the bounds."""
        max_per_network = self._bounds.per_address  # 0 for no limit
        return self._open.total() >= self._bounds.in_total or (max_per_network > 0 and self._open[network] >= max_per_network)


class Accepted(socket.socket):
    """An accepted connection. It counts until it is closed or garbage-collected, and ends if its TLS carries too little HTTP.

    TLS has messages without content that are expensive to read, such as KeyUpdate: 8 microseconds for 27 bytes, and OpenSSL reads all that
    are waiting before another connection has a turn. So a turn is short, and a connection that brings little else is ended.

    Attributes:
        handshake_done: whether the TLS handshake is over; the protocol sets it.
        http_bytes: bytes of HTTP that the connection has brought so far; the protocol counts them.
    """

    def __init__(self, accepted: socket.socket, gate: Gate, network: str) -> None:
        super().__init__(fileno=accepted.detach())  # takes the open connection over from the plain socket
        self.http_bytes = self._tls_bytes = 0
        self.handshake_done = False
        self._uncount = weakref.finalize(self, gate.count_closed, network)
        self._uncount.atexit = False  # when the process ends, nothing is counted any more

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Read encrypted bytes into ``buffer``. Event loops call this method only for connections with TLS.

        Raises:
            ConnectionAbortedError: the connection has brought too much TLS for its HTTP.
        """
        if not self.handshake_done:
            max_tls_bytes = _MAX_HANDSHAKE_BYTES
        elif self.http_bytes == 0:
            max_tls_bytes = _MAX_TLS_BEFORE_HTTP
        else:
            max_tls_bytes = _SPARE_TLS_BYTES + 2 * self.http_bytes
        if self._tls_bytes > max_tls_bytes:
            raise ConnectionAbortedError(
                f"the connection brought {self._tls_bytes} bytes of TLS, allowed {max_tls_bytes} with {self.http_bytes} of HTTP"
            )
        turn_bytes = _NEW_TURN_BYTES  # bytes to read before other connections have their turn
        if 2 * self.http_bytes > self._tls_bytes:  # more than half of what the connection brought is HTTP
            turn_bytes = _UPLOAD_TURN_BYTES if self.http_bytes > _UPLOAD_BYTES else _TURN_BYTES
        asked_bytes = nbytes or len(buffer)  # 0: as many as fit into the buffer
        count = super().recv_into(buffer, min(asked_bytes, turn_bytes, len(buffer)), flags)
        self._tls_bytes += count
        return count

    def close(self) -> None:
        """Close the connection and stop counting it."""
        super().close()
        self._uncount()


def _caller_network(host: str) -> str:
    """Return the name under which connections from ``host`` are counted: its IPv4 address, or its IPv6 network."""
    address = ipaddress.ip_address(host)
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:  # how a socket for both kinds of addresses shows an IPv4 caller
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address), _IPV6_NETWORK), strict=False))


class TimedTlsEventLoop(asyncio.SelectorEventLoop):
    """An event loop whose servers limit the time for a TLS handshake and shutdown; uvicorn has no setting for these limits."""

    def __init__(self, bounds: ConnectionLimits) -> None:
        super().__init__()
        self._bounds = bounds

    async def create_server(self, *arguments: Any, ssl: Any = None, **options: Any) -> asyncio.Server:
        """Create a server as asyncio does, with the limits if it has TLS."""
        if ssl is not None:
            options |= {"ssl_handshake_timeout": self._bounds.handshake_s, "ssl_shutdown_timeout": self._bounds.closing_s}
        server: asyncio.Server = await super().create_server(*arguments, ssl=ssl, **options)
        return server


def bounded_protocol(bounds: ConnectionLimits) -> type[asyncio.Protocol]:
    """Return a protocol class that enforces ``bounds``. Uvicorn makes an instance for each connection."""

    class Bounded(_TimedProtocol):
        _bounds = bounds

    return Bounded


class _PlainHttp(h11.Connection):
    """HTTP/1.1 without features that cost the relay much more than the sender: chunked bodies, whose chunks may have one byte, and many
    headers."""

    def next_event(self) -> Any:
        """Return the next event of the request.

        Raises:
            RemoteProtocolError: the request is malformed, or uses a feature that the relay does without.
        """
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names:
                raise h11.RemoteProtocolError("Transfer-Encoding is not supported: send the body with a Content-Length")
            if b"upgrade" in names or event.method == b"CONNECT":
                raise h11.RemoteProtocolError("Upgrade and CONNECT are not supported: the relay speaks HTTP/1.1 only")
            if len(event.headers) > _MAX_HEADERS:
                raise h11.RemoteProtocolError(f"the request has {len(event.headers)} headers, expected at most {_MAX_HEADERS}")
        return event


class _TimedProtocol(H11Protocol):
    """Uvicorn's HTTP/1.1 protocol with a limit on each time for which a caller can keep the relay waiting."""

    _bounds: ClassVar[ConnectionLimits]
    _accepted: Accepted | None = None
    _last_bytes = b""
    _head_timer: asyncio.TimerHandle | None = None
    _answer_timer: asyncio.TimerHandle | None = None
    _closing_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Prepare a new connection: bound its buffers, and start the timer of the first request's head."""
        self.conn = _PlainHttp(h11.SERVER, HEAD_BYTES)
        super().connection_made(transport)
        wrapped = transport.get_extra_info("socket")
        self._accepted = getattr(wrapped, "_sock", None)  # asyncio hands out no more than a view of it
        if isinstance(self._accepted, Accepted):
            self._accepted.handshake_done = True
        if transport.get_extra_info("ssl_object") is not None:
            # Encrypted bytes do not count as HTTP yet, so only a few may be buffered while an answer is made.
            cast(Any, transport).set_read_buffer_limits(high=_READ_BUFFER_BYTES)
        # With these limits, uvicorn calls pause_writing once any byte waits to be read by the caller, and resume_writing once none does.
        transport.set_write_buffer_limits(high=1, low=0)
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request that the connection was for, and stop its timers."""
        super().connection_lost(exc)
        task = cast("dict[str, Any]", self.scope or {}).get(TASK)
        if task is not None:
            # Otherwise a caller that disconnects after each request could have any number of requests waiting.
            task.cancel()
        for timer in (self._head_timer, self._answer_timer, self._closing_timer, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Pass received bytes on to uvicorn. A request's head is passed in pieces, because h11 checks the length of incomplete heads only.

        Callers of the relay wait for an answer before they ask again. Several requests at once end the connection, because h11 would read
        the later heads without a limit.
        """
        if isinstance(self._accepted, Accepted):
            self._accepted.http_bytes += len(data)
        while data and not self.transport.is_closing():
            in_head = self.conn.their_state is h11.IDLE  # h11's state of the caller: its request's head is not complete
            piece = data[: HEAD_BYTES + 1] if in_head else data
            data = data[len(piece) :]
            in_body = self.conn.their_state is h11.SEND_BODY
            if not (in_head or in_body) or (in_head and _BLANKS.search(self._last_bytes + piece)):
                self._cut_off()  # the caller sends more than its request, or too many blanks
                break
            self._last_bytes = piece[-_MAX_BLANKS:]
            super().data_received(piece)
            if self.conn.their_state is h11.DONE and self.conn.trailing_data[0]:  # bytes after a complete request
                self._cut_off()
        self._time_head()

    def pause_writing(self) -> None:
        """Start the timer of an answer, unless it runs already: some of the answer is waiting for the caller to read it."""
        super().pause_writing()
        self._answer_timer = self._answer_timer or self.loop.call_later(self._bounds.answer_s, self._cut_off)

    def resume_writing(self) -> None:
        """Stop the timer of an answer: the caller has read all of it."""
        super().resume_writing()
        if self._answer_timer is not None:
            self._answer_timer.cancel()
            self._answer_timer = None

    def on_response_complete(self) -> None:
        """Limit the time for reading the answer if uvicorn closes the connection after it."""
        super().on_response_complete()
        self._time_closing()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection, which has been idle for too long. Uvicorn calls this if no request follows a response in time."""
        if self.flow.write_paused:  # not idle: the caller is still reading the answer, which has a limit of its own
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
            return
        super().timeout_keep_alive_handler()
        self._time_closing()

    def shutdown(self) -> None:
        """Close the connection as uvicorn does when the server ends, in a limited time."""
        super().shutdown()
        self._time_closing()

    def send_400_response(self, msg: str) -> None:
        """Refuse a malformed request, or cut the connection off if no response can be sent any more."""
        if self.conn.our_state is h11.SEND_RESPONSE and self.conn._request_method == b"HEAD":
            self._cut_off()  # the response to HEAD must have no body, but uvicorn would send one
            return
        if self.cycle is not None:
            self.cycle.disconnected = True  # the application's own response comes too late, and would be logged as an error
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
            self._time_closing()
        else:
            self._cut_off()

    def _time_head(self) -> None:
        """Start the timer of a request's head if a head is awaited and no timer runs. Stop the timer once the head is complete."""
        if self.conn.their_state is not h11.IDLE:  # the head is complete
            if self._head_timer is not None:
                self._head_timer.cancel()
            self._head_timer = None
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self._bounds.head_s, self._cut_off)

    def _time_closing(self) -> None:
        """If the connection is being closed, start the timer in which the caller must read the last answer."""
        if self.transport.is_closing() and self._closing_timer is None:
            self._closing_timer = self.loop.call_later(self._bounds.closing_s, self._cut_off)

    def _cut_off(self) -> None:
        """Close the connection at once, whatever is still to be sent."""
        self.transport.abort()
