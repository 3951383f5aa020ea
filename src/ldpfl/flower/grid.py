"""A Flower Grid in one process: rounds without Ray, sockets or further processes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, islice

from flwr.app import Context, Error, Message, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from ldpfl.flower.internals import APP_RAISED, SERVER_NODE, Run, local_run, set_message_id


class InProcessGrid(Grid):
    """Run a ClientApp for ``clients`` nodes in this process; replies come one by one, in the order of the messages.

    Node i has ``partition-id`` i and ``num-partitions`` ``clients`` in its config, as in Flower's own simulation, and keeps its
    context over the rounds. A client is run when its reply is asked for, so at most ``workers`` replies are held. An app that
    raises is answered with an error, as Flower does.

    Args:
        run_config: what ``flwr run`` would give to the apps.
        node_config: further entries of every node's config.
        workers: threads that run clients at once. More than one need an app that keeps nothing in shared variables.
    """

    def __init__(
        self,
        app: ClientApp,
        clients: int,
        *,
        run_config: Mapping[str, str | int | float | bool] | None = None,
        node_config: Mapping[str, str | int | float | bool] | None = None,
        workers: int = 1,
    ) -> None:
        self._app, self._workers = app, workers
        self._run = local_run()
        self._run_config: UserConfig = dict(run_config or {})
        # The server is a node as well, so clients are numbered after it.
        self._contexts = {SERVER_NODE + 1 + i: self._context(i, clients, node_config or {}) for i in range(clients)}
        self._names = count(1)
        self._pushed: dict[str, Message] = {}

    def _context(self, partition: int, clients: int, extra: Mapping[str, str | int | float | bool]) -> Context:
        own: UserConfig = {"partition-id": partition, "num-partitions": clients, **extra}
        return Context(self._run.run_id, SERVER_NODE + 1 + partition, own, RecordDict(), dict(self._run_config))

    def server_context(self) -> Context:
        """Return a context to call a ServerApp with: ``server_app(grid, grid.server_context())``."""
        return Context(self._run.run_id, SERVER_NODE, {}, RecordDict(), dict(self._run_config))

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Keep ``messages`` until their replies are pulled, and return their names."""
        named = [self._named(message) for message in messages]
        self._pushed |= {message.metadata.message_id: message for message in named}
        return [message.metadata.message_id for message in named]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        """Run the clients whose messages were pushed, and yield their replies; each can be pulled once."""
        return self._replies(self._pushed.pop(name) for name in message_ids if name in self._pushed)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Yield the replies to ``messages``; after ``timeout`` seconds no further client is started."""
        return self._replies(_until(map(self._named, messages), timeout))

    def _named(self, message: Message) -> Message:
        set_message_id(message, str(next(self._names)))
        return message

    def _replies(self, messages: Iterator[Message]) -> Iterator[Message]:
        if self._workers == 1:
            yield from map(self._answer, messages)
            return
        with ThreadPoolExecutor(self._workers) as pool:
            running: list[Future[Message]] = [pool.submit(self._answer, message) for message in islice(messages, self._workers)]
            while running:
                yield running.pop(0).result()
                running += [pool.submit(self._answer, message) for message in islice(messages, 1)]

    def _answer(self, message: Message) -> Message:
        context = self._contexts[message.metadata.dst_node_id]
        try:
            return self._app(message, context)
        except Exception as error:  # whatever an app may raise
            return Message(Error(APP_RAISED, f"{type(error)}:<'{error}'>"), reply_to=message)


def _until(messages: Iterator[Message], timeout: float | None) -> Iterator[Message]:
    end = None if timeout is None else time.monotonic() + timeout
    for message in messages:
        if end is not None and time.monotonic() >= end:
            return
        yield message
