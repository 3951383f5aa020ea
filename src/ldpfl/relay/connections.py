"""How many connections the relay holds, and for how long one may keep it waiting; both before anybody has shown a token."""

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

from ldpfl.relay.usage_limits import Connections

HEAD_BYTES = 4 * 2**10
"""Longest head of a request. Not much more of one that does not end is in memory."""

TASK = "ldpfl.task"
"""Where a request's scope has the task that answers it."""

_HEADERS = 64
_MOST_BLANKS = 16
_BLANKS = re.compile(rb"[ \t]{%d}" % (_MOST_BLANKS + 1))
"""No caller sends so many in a head. h11 takes a time for them that grows with the square of their number."""

_BACKLOG = 128
_COLLECTED = 100  # connections that may come before what they leave is collected
_IPV6_NETWORK = 64  # bits: what one customer of a provider has to himself

_HELLO_BYTES = 4 * 2**10
"""Bytes of a TLS handshake: twice what any caller needs. Lists in it cost a time that grows with the square of their length."""

_FIRST_BYTES, _EMPTY_BYTES = 24 * 2**10, 96 * 2**10
"""Bytes that a connection may bring before it says anything, the handshake and a first record, and later beyond twice what it says:
what is not decrypted yet."""

_UNDECRYPTED = 32 * 2**10
_STRANGERS_TURN, _TURN, _UPLOADS_TURN = 4 * 2**10, 32 * 2**10, 256 * 2**10
"""Bytes that are taken of a connection before all others have their turn: as long as it has said little, later, and once it has said
much. A turn of all others may take a tenth of a second where they do nothing but begin."""

_MUCH = 64 * 2**10


class Gate(socket.socket):
    """A listening socket that closes what comes when there are too many connections, before TLS and before any byte is read."""

    def __init__(self, listening: socket.socket, bounds: Connections) -> None:
        super().__init__(fileno=listening.detach())
        self._bounds = bounds
        self._open: Counter[str] = Counter()
        self._since = 0

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection that is within the bounds.

        Raises:
            BlockingIOError: there is none now.
        """
        for _ in range(_BACKLOG):
            accepted, address = super().accept()
            network = _network(address[0])
            if self._is_full(network):
                accepted.close()
                continue
            self._open[network] += 1
            self._since += 1
            if self._since >= _COLLECTED:
                # Connections leave circles, of up to 400 KB where TLS never ends, sooner than the collector looks for them.
                self._since = 0
                gc.collect()
            return Accepted(accepted, self, network), address
        raise BlockingIOError  # others in the event loop have their turn before more are turned away

    def left(self, network: str) -> None:
        """Count a connection from ``network`` as over."""
        self._open[network] -= 1
        if self._open[network] == 0:
            del self._open[network]  # else every address that ever called would be kept

    def _is_full(self, network: str) -> bool:
        bound = self._bounds.an_address
        return self._open.total() >= self._bounds.in_all or (bound > 0 and self._open[network] >= bound)


class Accepted(socket.socket):
    """A connection that counts until it is closed, or forgotten, and whose TLS must say something.

    TLS has messages that say nothing and cost much to read, such as KeyUpdate: 8 microseconds for 27 bytes, and OpenSSL reads all that
    there is of them before anybody else has a turn. So a turn is short, and a connection that brings little else is ended.

    Attributes:
        shaken: whether TLS's handshake is over, as its protocol says.
        said: bytes of HTTP that came of it so far, counted by the protocol that reads them.
    """

    def __init__(self, accepted: socket.socket, gate: Gate, network: str) -> None:
        super().__init__(fileno=accepted.detach())
        self.said = self._brought = 0
        self.shaken = False
        self._leave = weakref.finalize(self, gate.left, network)
        self._leave.atexit = False

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Read into ``buffer``; event loops call this for TLS alone, whose bytes are not HTTP yet.

        Raises:
            ConnectionAbortedError: too much came that said nothing.
        """
        later = _EMPTY_BYTES + 2 * self.said if self.said else _FIRST_BYTES
        if self._brought > (later if self.shaken else _HELLO_BYTES):
            raise ConnectionAbortedError("TLS without content")
        turn = _STRANGERS_TURN
        if 2 * self.said > self._brought:
            turn = _UPLOADS_TURN if self.said > _MUCH else _TURN
        count = super().recv_into(buffer, min(nbytes or turn, turn, len(buffer)), flags)
        self._brought += count
        return count

    def close(self) -> None:
        super().close()
        self._leave()


def _network(host: str) -> str:
    address = ipaddress.ip_address(host)
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address), _IPV6_NETWORK), strict=False))


class TlsInTime(asyncio.SelectorEventLoop):
    """An event loop whose servers do not wait long for TLS to begin or to end; uvicorn has no setting for that."""

    def __init__(self, bounds: Connections) -> None:
        super().__init__()
        self._bounds = bounds

    async def create_server(self, *arguments: Any, ssl: Any = None, **options: Any) -> asyncio.Server:
        if ssl is not None:
            options |= {"ssl_handshake_timeout": self._bounds.handshake_s, "ssl_shutdown_timeout": self._bounds.closing_s}
        server: asyncio.Server = await super().create_server(*arguments, ssl=ssl, **options)
        return server


def protocol_within(bounds: Connections) -> type[asyncio.Protocol]:
    """Return a protocol that keeps to ``bounds``, for uvicorn, which makes one for each connection."""

    class Bounded(_InTime):
        _bounds = bounds

    return Bounded


class _Plain(h11.Connection):
    """HTTP/1.1 without what costs much more to read than to send: bodies in chunks, which may be of one byte, and crowds of headers."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names:
                raise h11.RemoteProtocolError("a body has a Content-Length here")
            if b"upgrade" in names or event.method == b"CONNECT":
                raise h11.RemoteProtocolError("no other protocol is spoken here")
            if len(event.headers) > _HEADERS:
                raise h11.RemoteProtocolError("too many headers")
        return event


class _InTime(H11Protocol):
    """HTTP/1.1 as uvicorn speaks it, with an end to each time that a caller can keep it waiting."""

    _bounds: ClassVar[Connections]
    _accepted: Accepted | None = None
    _end = b""
    _head: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        self.conn = _Plain(h11.SERVER, HEAD_BYTES)
        super().connection_made(transport)
        wrapped = transport.get_extra_info("socket")
        self._accepted = getattr(wrapped, "_sock", None)  # asyncio hands out no more than a view of it
        if isinstance(self._accepted, Accepted):
            self._accepted.shaken = True
        if transport.get_extra_info("ssl_object") is not None:
            # What is not decrypted yet has said nothing: much of it must not wait while an answer is made.
            cast(Any, transport).set_read_buffer_limits(high=_UNDECRYPTED)
        # So pause_writing means that something waits to be read, and resume_writing that nothing does.
        transport.set_write_buffer_limits(high=1, low=0)
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        task = cast("dict[str, Any]", self.scope or {}).get(TASK)
        if task is not None:
            # Else who asks and leaves, over and over, has as many requests waiting as it likes, though few connections.
            task.cancel()
        for timer in (self._head, self._unread, self._closing, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Pass on what came, the head of a request in pieces: h11 bounds one that is not there yet, and reads one that is, however long.

        Callers of the relay wait for an answer before they ask again. More than one request at once, of which the later ones would be
        read as a whole, ends the connection.
        """
        if isinstance(self._accepted, Accepted):
            self._accepted.said += len(data)
        while data and not self.transport.is_closing():
            in_head = self.conn.their_state is h11.IDLE
            piece = data[: HEAD_BYTES + 1] if in_head else data
            data = data[len(piece) :]
            if not (in_head or self.conn.their_state is h11.SEND_BODY) or (in_head and _BLANKS.search(self._end + piece)):
                self._cut_off()
                break
            self._end = piece[-_MOST_BLANKS:]
            super().data_received(piece)
            if self.conn.their_state is h11.DONE and self.conn.trailing_data[0]:
                self._cut_off()
        self._time_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self._unread or self.loop.call_later(self._bounds.answer_s, self._cut_off)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._time_closing()

    def timeout_keep_alive_handler(self) -> None:
        if self.flow.write_paused:  # not idle: the answer is being read, which has a time of its own
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
            return
        super().timeout_keep_alive_handler()
        self._time_closing()

    def shutdown(self) -> None:
        super().shutdown()
        self._time_closing()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state is h11.SEND_RESPONSE and self.conn._request_method == b"HEAD":
            self._cut_off()  # its answer has no body, which uvicorn would send
            return
        if self.cycle is not None:
            self.cycle.disconnected = True  # what the application answers comes too late: it would be an error in the log
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
            self._time_closing()
        else:
            self._cut_off()

    def _time_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            if self._head is not None:
                self._head.cancel()
            self._head = None
        elif self._head is None:
            self._head = self.loop.call_later(self._bounds.head_s, self._cut_off)

    def _time_closing(self) -> None:
        if self.transport.is_closing() and self._closing is None:
            self._closing = self.loop.call_later(self._bounds.closing_s, self._cut_off)

    def _cut_off(self) -> None:
        self.transport.abort()
