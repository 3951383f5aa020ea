"""A Flower Grid that runs clients in this process, without Ray or sockets."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from math import inf

from flwr.app import Context, Error, Message, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from ldpfl.flower.internals import APP_RAISED, SERVER_NODE, Run, local_run, set_message_id


class InProcessGrid(Grid):
    """A Flower Grid that runs a ClientApp for ``clients`` nodes in this process. Replies come one by one, in the order of the messages.

    Node i has ``partition-id`` i and ``num-partitions`` ``clients`` in its config, as in Flower's own simulation, and keeps its
    context over the rounds. A client runs only when its reply is iterated over, so that few replies are in memory. If the app raises, the
    reply is an error, as in Flower.

    Args:
        run_config: the run config, as ``flwr run`` would give it to the apps.
        node_config: further entries of every node's config.
    """

    def __init__(
        self,
        app: ClientApp,
        clients: int,
        *,
        run_config: Mapping[str, str | int | float | bool] | None = None,
        node_config: Mapping[str, str | int | float | bool] | None = None,
    ) -> None:
        self._app = app
        self._run = local_run()
        self._run_config: UserConfig = dict(run_config or {})
        # The server is a node as well, so clients are numbered after it.
        self._contexts = {SERVER_NODE + 1 + i: self._context(i, clients, node_config or {}) for i in range(clients)}
        self._ids = count(1)
        self._pushed: dict[str, Message] = {}

    def _context(self, partition: int, clients: int, extra: Mapping[str, str | int | float | bool]) -> Context:
        """Return the context of the node with the number ``partition``. Its config gets the further entries ``extra``."""
        node_config: UserConfig = {"partition-id": partition, "num-partitions": clients, **extra}
        return Context(self._run.run_id, SERVER_NODE + 1 + partition, node_config, RecordDict(), dict(self._run_config))

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
        """Keep ``messages`` until their replies are pulled, and return their ids."""
        numbered = [self._with_id(message) for message in messages]
        self._pushed |= {message.metadata.message_id: message for message in numbered}
        return [message.metadata.message_id for message in numbered]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        """Run the clients whose messages were pushed, and yield their replies. Each reply can be pulled once. Unknown ids are skipped."""
        return self._replies([self._pushed.pop(message_id) for message_id in message_ids if message_id in self._pushed])

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Yield the replies to ``messages``. After ``timeout`` seconds no further client is started."""
        return self._replies([self._with_id(message) for message in messages], timeout)

    def _with_id(self, message: Message) -> Message:
        """Give ``message`` an id of its own, as a SuperLink would, and return it."""
        set_message_id(message, str(next(self._ids)))
        return message

    def _replies(self, messages: Sequence[Message], timeout: float | None = None) -> Iterator[Message]:
        """Run the clients of ``messages``, and yield their replies until ``timeout`` seconds are over."""
        end = inf if timeout is None else time.monotonic() + timeout
        for message in messages:
            if time.monotonic() >= end:
                return
            yield self._answer(message)

    def _answer(self, message: Message) -> Message:
        """Run the app for the message's node, and return its reply. If the app raises, the reply is an error, as in Flower."""
        context = self._contexts[message.metadata.dst_node_id]
        try:
            return self._app(message, context)
        except Exception as error:  # whatever an app may raise
            return Message(Error(APP_RAISED, f"{type(error)}:<'{error}'>"), reply_to=message)
