"""The relay's HTTP interface: authentication, roles, and the form of requests and responses. The store implements the rest."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from io import BytesIO
from typing import Any, BinaryIO, TypeVar

from anyio import to_thread
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ldpfl.relay.connections import TASK
from ldpfl.relay.database import BUSY_S, busy_refusal
from ldpfl.relay.errors import Forbidden, LengthRequired, Refusal, TooLong, TooMany, TooSlow, Unauthenticated, Unknown, WrongLength
from ldpfl.relay.protocol import (
    ANY_TERMS,
    BLOCK_BYTES,
    COMPLETE,
    LENGTH,
    OFFSET,
    PARTS,
    TERMS_BYTES,
    RoundStatus,
    SumTerms,
    Terms,
    TokenStatus,
    parse_round_number,
    parse_run,
    parse_share_id,
    parse_upload_id,
)
from ldpfl.relay.queries import Progress
from ldpfl.relay.store import RecordsPart, Store, wrong_offset_refusal
from ldpfl.relay.sum_store import append_to_body, empty_body
from ldpfl.relay.telemetry import CONTENT_TYPE, Metrics, log_fault
from ldpfl.relay.tokens import Owner, Role, Tokens, is_token, token_hash, unknown_token_refusal
from ldpfl.relay.usage_limits import BufferedUploads, Limits, RateLimit
from ldpfl.transport.sums.envelopes import signer_of

_THREADS = 12  # fewer than the store's connections, so that a request in a thread never waits for a connection
_THREADS_PER_TOKEN = 4
"""Maximum number of threads for one token at once. All requests without a known token share the same number, so none can take them all."""

_STRANGERS = ""
"""Name of the lane for requests without a known token."""

_MAX_DIGITS = 18  # any number of so many digits fits into 64 bits
_PIECE_BYTES = 256 * 2**10  # of a response, handed to uvicorn at a time

T = TypeVar("T")


def create_app(store: Store, limits: Limits = Limits()) -> ASGIApp:  # noqa: B008  (frozen)
    """Return the relay over ``store`` as an ASGI application."""
    relay = _Relay(store, limits)
    one_round = "/v1/rounds/{run}/{round}"
    routes = [
        Route(one_round, relay.open_round, methods=["PUT"]),
        Route(one_round, relay.status, methods=["GET"]),
        Route(one_round, relay.cancel, methods=["DELETE"]),
        Route(one_round + "/uploads/{upload}", relay.begin, methods=["POST"]),
        Route(one_round + "/uploads/{upload}", relay.append, methods=["PATCH"]),
        Route(one_round + "/uploads/{upload}", relay.progress, methods=["HEAD"]),
        Route(one_round + "/shares/{upload}", relay.share, methods=["PUT"]),
        Route(one_round + "/records", relay.records, methods=["GET"]),
        Route(one_round + "/records", relay.acknowledge, methods=["DELETE"]),
        Route("/v1/token", relay.token, methods=["GET"]),
        Route("/health", relay.health, methods=["GET"]),
        Route("/metrics", relay.metrics_text, methods=["GET"]),
    ]
    handlers = {HTTPException: _answer_http_error, Refusal: _answer_refusal, ClientDisconnect: _answer_disconnect, Exception: _answer_fault}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False  # each resource has one path, without a slash at its end
    return _Guard(app, relay.metrics)


class _Relay:
    """The endpoints. Store calls run in threads. At most one block of a request's body is in memory, except for shares of sums."""

    def __init__(self, store: Store, limits: Limits) -> None:
        self._store, self._limits = store, limits
        self._tokens = Tokens(store.engine)
        self._rate = RateLimit(limits)
        self._parts_being_sent: Counter[str] = Counter()  # by the name of the token's owner
        self._buffered = BufferedUploads(limits.sum_bytes)
        self._threads = asyncio.Semaphore(_THREADS)
        self._lanes: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_THREADS_PER_TOKEN))  # by owner's name
        self._owner_names: dict[bytes, str] = {}  # by the hash of a token that was valid before
        self._unfinished: set[asyncio.Future[Any]] = set()  # work in threads; the set keeps it alive
        self.metrics = Metrics()

    async def open_round(self, request: Request) -> Response:
        """Open a round with the terms in the body; answer with its status."""
        owner = await self._owner_name(request, Role.AGGREGATOR)
        run, number = _round_in_path(request)
        terms = _parse_terms(b"".join([block async for block in self._body(request, TERMS_BYTES)]))
        return _status_response(await self._call(owner, self._store.open_round, owner, run, number, terms))

    async def status(self, request: Request) -> Response:
        """Answer with the terms and state of a round."""
        owner = await self._owner_name(request, Role.CLIENT, Role.AGGREGATOR)
        return _status_response(await self._call(owner, self._store.status, owner, *_round_in_path(request)))

    async def begin(self, request: Request) -> Response:
        """Begin an upload of the stated length, or find one that was begun before; answer with its progress."""
        client = await self._owner_name(request, Role.CLIENT)
        upload = _upload_in_path(request)
        return _progress_response(await self._call(client, self._store.begin, client, *upload, _number_in_header(request, LENGTH)))

    async def progress(self, request: Request) -> Response:
        """Answer how many bytes of an upload the relay has."""
        client = await self._owner_name(request, Role.CLIENT)
        return _progress_response(await self._call(client, self._store.progress, client, *_upload_in_path(request)))

    async def append(self, request: Request) -> Response:
        """Store the body as the next bytes of an upload, block by block; answer with its progress."""
        client = await self._owner_name(request, Role.CLIENT)
        upload = _upload_in_path(request)
        length = _content_length(request)
        offset = _number_in_header(request, OFFSET)
        # These checks come before the first byte is stored, so that a refused request has changed nothing.
        progress: Progress = await self._call(client, self._store.progress, client, *upload)
        if progress.received != offset:
            raise wrong_offset_refusal(progress)
        if offset + length > progress.expected:
            raise TooLong(
                f"the upload would have {offset + length} bytes, but in this round an upload has exactly {progress.expected} bytes"
            )
        async for block in self._body(request, length):
            progress = await self._call(client, self._store.append, client, *upload, progress.received, block)
            self.metrics.count_received(len(block))
        return _progress_response(progress)

    async def share(self, request: Request) -> Response:
        """Add the body, a whole upload to a sum round, to the round's sum."""
        client = await self._owner(request, Role.CLIENT)
        upload = (*_round_in_path(request), parse_share_id(request.path_params["upload"]))
        length = _content_length(request)
        expected = await self._call(client.name, self._store.sums.check, client, *upload, length)
        with ExitStack() as stack:
            stack.enter_context(self._buffered.reserve(client.name, length))
            body = stack.enter_context(empty_body(length))
            await self._read_whole_body(client.name, request, length, body)
            # From here on the share is added even if the caller disconnects. Its reserved bytes and its body are kept until it is added.
            adding = self._store.sums.add(expected, body)
            work = asyncio.ensure_future(_wait_and_release(adding, stack.pop_all()))
        await self._wait_for(work)
        self.metrics.count_received(length)
        return Response(status_code=204)

    async def _read_whole_body(self, client: str, request: Request, length: int, body: BinaryIO) -> None:
        """Read a request's whole body of ``length`` bytes into ``body``. A thread writes to it if it is a file, since disks may be slow."""
        received = 0
        async for block in self._body(request, length):
            if isinstance(body, BytesIO):
                append_to_body(body, block)
            else:
                await self._call(client, append_to_body, body, block)
            received += len(block)
        if received < length:
            raise WrongLength(f"the body has {received} bytes, but its Content-Length is {length}: send the whole body again")

    async def token(self, request: Request) -> Response:
        """Tell a client which key must sign its shares of sums, or that there is none and it may send none."""
        key = (await self._owner(request, Role.CLIENT)).signing_key
        return JSONResponse(TokenStatus(signer=None if key is None else signer_of(key).hex()).model_dump())

    async def records(self, request: Request) -> Response:
        """Send one part of a released round's mixed records or sum."""
        owner = await self._owner_name(request, Role.AGGREGATOR)
        run, number = _round_in_path(request)
        index = request.query_params.get("part", "")
        if not _is_number(index):
            raise Unknown("the query must say which part to send: ?part=0 is the first one")
        if self._parts_being_sent[owner] >= self._limits.parts_at_once:
            raise TooMany(
                f"the relay sends {self._limits.parts_at_once} parts to this token already: read one of them first", {"Retry-After": "1"}
            )
        with ExitStack() as stack:
            self._parts_being_sent[owner] += 1
            stack.callback(self._parts_being_sent.subtract, [owner])  # when the stack is closed, one part less
            part = await self._call(owner, self._store.part, owner, run, number, int(index))
            self.metrics.count_handed_out(len(part.data))
            return _PiecewiseResponse(part, stack.pop_all())  # the part stops counting once it is sent

    async def acknowledge(self, request: Request) -> Response:
        """Delete a round's mixed records or sum, which its aggregator has received."""
        owner = await self._owner_name(request, Role.AGGREGATOR)
        await self._call(owner, self._store.acknowledge, owner, *_round_in_path(request))
        return Response(status_code=204)

    async def cancel(self, request: Request) -> Response:
        """Delete all data of a round, whatever its state."""
        owner = await self._owner_name(request, Role.AGGREGATOR)
        await self._call(owner, self._store.cancel, owner, *_round_in_path(request))
        return Response(status_code=204)

    async def health(self, request: Request) -> Response:
        """Answer that the relay and its store work; no token is needed."""
        await self._call(_STRANGERS, self._store.check)
        return JSONResponse({"status": "ok"})

    async def metrics_text(self, request: Request) -> Response:
        """Answer with all counters. No token is needed, since the counters name nobody."""
        return PlainTextResponse(self.metrics.text(), media_type=CONTENT_TYPE)

    async def _owner_name(self, request: Request, *roles: Role) -> str:
        """Return the name of the token's owner. It raises the same refusals as :meth:`_owner`."""
        return (await self._owner(request, *roles)).name

    async def _owner(self, request: Request, *roles: Role) -> Owner:
        """Return the owner of the request's token, and count the request for the owner's rate limit.

        Raises:
            Unauthenticated: the request has no token that the relay knows.
            TooMany: the owner exceeds its rate limit.
            Forbidden: the owner has none of the ``roles``.
        """
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            reason = "the request has no token: send it in the header Authorization: Bearer TOKEN"
            raise Unauthenticated(reason, {"WWW-Authenticate": "Bearer"})
        if not is_token(token):
            raise unknown_token_refusal()
        # A token that was valid before is looked up in its owner's lane (see _call), so that strangers' requests cannot delay the look-up.
        # The store decides each time whether the token is still valid.
        digest = token_hash(token)
        owner = await self._call(self._owner_names.get(digest, _STRANGERS), self._tokens.owner, token)
        self._owner_names[digest] = owner.name
        self._rate.count_request(owner.name)
        if owner.role not in roles:
            raise Forbidden(f"this request needs the token of {' or '.join(role.value for role in roles)}, got one of {owner.role.value}")
        return owner

    async def _body(self, request: Request, max_bytes: int) -> AsyncIterator[bytes]:
        """Yield the body in blocks of :data:`BLOCK_BYTES` bytes; the last block may be shorter.

        Each block must arrive within ``block_s`` seconds, however small the pieces are in which the network delivers it.

        Raises:
            TooLong: the body has more than ``max_bytes`` bytes. Blocks before this point have been yielded.
            TooSlow: a block did not arrive in time.
        """
        stream = aiter(request.stream())
        buffered = bytearray()
        received, ended = 0, False
        while not ended:
            try:
                async with asyncio.timeout(self._limits.block_s):
                    while len(buffered) < BLOCK_BYTES and not ended:
                        data = await anext(stream, None)  # None at the end of the stream
                        ended = data is None
                        buffered += data or b""
                        received += len(data or b"")
                        if received > max_bytes:
                            raise TooLong(
                                f"the body of this {request.method} request has more than {max_bytes} bytes, its maximum: "
                                f"terms have up to {TERMS_BYTES} bytes, an upload as many as its Content-Length says"
                            )
            except TimeoutError:
                raise TooSlow(
                    f"the body came too slowly: send at least {BLOCK_BYTES} bytes every {self._limits.block_s:g} seconds"
                ) from None
            while len(buffered) >= BLOCK_BYTES or (ended and buffered):
                yield bytes(buffered[:BLOCK_BYTES])
                del buffered[:BLOCK_BYTES]

    async def _call(self, lane: str, function: Callable[..., T], *arguments: object) -> T:
        """Call ``function`` in a thread, as soon as one is free for this ``lane``.

        Args:
            lane: for whom the call is made: the name of a token's owner, or :data:`_STRANGERS`. Each lane has a limit on its threads, so
                that nobody can take all of them. All lanes together have a limit, too.

        Raises:
            StoreUnavailable: no thread became free within :data:`BUSY_S` seconds.
        """
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(BUSY_S):
                    await stack.enter_async_context(self._lanes[lane])
                    await stack.enter_async_context(self._threads)
            except TimeoutError:
                raise busy_refusal() from None
            # A thread cannot be ended: it keeps its slots until it is done, even if the caller disconnects.
            work = asyncio.ensure_future(_in_thread(stack.pop_all(), partial(function, *arguments)))
        return await self._wait_for(work)

    async def _wait_for(self, work: asyncio.Future[T]) -> T:
        """Wait for ``work``, which continues even if the caller disconnects."""
        self._unfinished.add(work)
        work.add_done_callback(self._forget)
        return await asyncio.shield(work)

    def _forget(self, work: asyncio.Future[Any]) -> None:
        """Drop finished ``work`` from the set that keeps it alive: asyncio itself has only weak references to tasks."""
        self._unfinished.discard(work)
        if not work.cancelled():
            work.exception()  # marks the exception as retrieved: otherwise asyncio logs it with its text


async def _in_thread(slots: AsyncExitStack, function: Callable[[], T]) -> T:
    """Run ``function`` in a thread. When it has ended, close ``slots``, the places that it holds among its lane's and all threads."""
    async with slots:
        return await to_thread.run_sync(function)


async def _wait_and_release(adding: Future[None], resources: ExitStack) -> None:
    """Wait until a share is in its sum, then release the ``resources`` that it needs."""
    with resources:
        await asyncio.wrap_future(adding)


class _PiecewiseResponse(Response):
    """Response with a part of a round's records. It sends pieces as fast as the caller reads, and then closes ``resources``."""

    def __init__(self, part: RecordsPart, resources: ExitStack) -> None:
        super().__init__(part.data, media_type="application/octet-stream", headers={PARTS: str(part.count)})
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response's head, its body in pieces, and an empty piece that marks the end; then close the resources."""
        with self._resources:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for start in range(0, len(self.body), _PIECE_BYTES):
                await send({"type": "http.response.body", "body": self.body[start : start + _PIECE_BYTES], "more_body": True})
            await send({"type": "http.response.body"})


_CLOSING_STATUSES = frozenset({400, 401, 404, 405})
"""Statuses after which the connection is closed. A stranger gets no other status, and so pays for a new connection each time."""


class _Guard:
    """ASGI middleware around the application, for every request, authenticated or not.

    It counts requests. It keeps exceptions out of the server's log, because their text may repeat a request. It rejects paths with percent
    signs, so that each resource has one path. It closes the connection after a response whose request body was not read to its end,
    because such a body could go on for ever.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as the ASGI interface defines the arguments."""
        if scope["type"] != "http":
            raise RuntimeError(f"the relay speaks HTTP only, not {scope['type']}")
        scope[TASK] = asyncio.current_task()  # the connection cancels this task if the caller disconnects
        unread = _has_body(scope)  # whether some of the request's body has not been received yet
        answered = False

        async def read() -> Message:
            """Receive the next message with a piece of the body, and note when the body has been read to its end."""
            nonlocal unread
            message = await receive()
            unread = unread and message.get("more_body", False)
            return message

        async def watch(message: Message) -> None:
            """Send a message of the response. Count the response by its head, and have the connection closed after it where necessary."""
            nonlocal answered
            answered = True
            if message["type"] == "http.response.start":
                self._metrics.count_request(scope["method"], message["status"])
                if unread or message["status"] in _CLOSING_STATUSES:
                    message = {**message, "headers": [*message.get("headers", []), (b"connection", b"close")]}
            await send(message)

        app = (
            _error_response(404, "Not Found: the relay has no path with a percent sign")
            if b"%" in scope.get("raw_path", b"")
            else self._app
        )
        try:
            await app(scope, read, watch)
        except Exception as error:
            log_fault("request_failed", error)  # Starlette has already responded, by _answer_fault
        except asyncio.CancelledError:  # the caller disconnected, or the relay is ending; not logged, or strangers could fill the log
            if not answered:
                await _error_response(503, "the relay is shutting down; try again later")(scope, receive, send)


def _has_body(scope: Scope) -> bool:
    """Return whether the request announces a body in its headers."""
    headers = dict(scope["headers"])
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


def _error_response(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": message}, status, headers)


async def _answer_refusal(request: Request, error: Exception) -> Response:
    """Answer with a refusal's own status and reason. The signature is that of Starlette's handlers, which may get any exception."""
    if not isinstance(error, Refusal):
        raise error
    return _error_response(error.status, str(error), dict(error.headers))


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """Answer with the status of an error that Starlette itself raised, such as 404. The signature is that of Starlette's handlers."""
    if not isinstance(error, HTTPException):
        raise error
    return _error_response(error.status_code, error.detail, dict(error.headers or {}))


async def _answer_disconnect(request: Request, error: Exception) -> Response:
    """Answer a caller that disconnected while it sent a body, for the counters alone. A client can go on from the stored bytes."""
    return _error_response(400, "the body broke off")


async def _answer_fault(request: Request, error: Exception) -> Response:
    """Answer after an unexpected error, without its text, which may repeat a request. The signature is that of Starlette's handlers."""
    return _error_response(500, "the relay failed at this request: its operator finds the place in its log (request_failed)")


def _status_response(status: RoundStatus) -> Response:
    return JSONResponse(status.model_dump(exclude_none=True))


def _progress_response(progress: Progress) -> Response:
    complete = "?1" if progress.complete else "?0"  # how HTTP's structured fields write true and false
    return Response(status_code=204, headers={OFFSET: str(progress.received), COMPLETE: complete})


def _round_in_path(request: Request) -> tuple[str, int]:
    return parse_run(request.path_params["run"]), parse_round_number(request.path_params["round"])


def _upload_in_path(request: Request) -> tuple[str, int, str]:
    """Return an upload's run, round number and id."""
    return *_round_in_path(request), parse_upload_id(request.path_params["upload"])


def _parse_terms(body: bytes) -> Terms | SumTerms:
    """Return the round's terms in a request's ``body``, JSON; raise a :class:`Refusal` that names the first wrong field."""
    try:
        return ANY_TERMS.validate_json(body)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"][1:]))  # without the first item, which is the kind of the round
        raise Refusal(f"the round's terms are not valid: {f'{place}: ' if place else ''}{first['msg']}") from None


def _content_length(request: Request) -> int:
    if "content-length" not in request.headers:
        raise LengthRequired("the request has no Content-Length: state the body's length in this header")
    return _number_in_header(request, "Content-Length")


def _number_in_header(request: Request, header: str) -> int:
    """Return the number of bytes in a ``header`` of the request; raise a :class:`Refusal` if the header holds no number."""
    text = request.headers.get(header, "")
    if not _is_number(text):
        raise Refusal(f"the header {header} is missing or wrong: expected a number of bytes with up to {_MAX_DIGITS} digits")
    return int(text)


def _is_number(text: str) -> bool:
    """Whether ``text`` is a decimal number that fits into 64 bits."""
    return text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
