"""A Flower Grid that runs clients in this process or a few forked ones, without Ray or sockets."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import random
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from math import inf
from multiprocessing.connection import Connection

import numpy as np
import torch
from flwr.app import Context, Error, Message, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from ldpfl.errors import ConfigError
from ldpfl.flower.internals import APP_RAISED, SERVER_NODE, Run, local_run, set_message_id

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of two options of glibc's ``mallopt``."""

_PIPE_BYTES = 1 << 20
"""Buffer of a worker's pipe: the maximum on Linux for users without privileges."""


class InProcessGrid(Grid):
    """A Flower Grid that runs a ClientApp for ``clients`` nodes in this process. Replies come one by one, in the order of the messages.

    Node i has ``partition-id`` i and ``num-partitions`` ``clients`` in its config, as in Flower's own simulation, and keeps its
    context over the rounds. A client runs only when its reply is iterated over, so that few replies are in memory. If the app raises, the
    reply is an error, as in Flower.

    With several ``workers``, each round forks that many processes and divides the clients among them. Then the app must not raise PyTorch's
    number of threads nor start processes (such as a DataLoader's workers), everything that it keeps between rounds must be in the context's
    state, and global random generators are seeded afresh in each process. If a worker dies, the replies of its clients are errors.
    Threads are not used, because encoding has many short steps, for which they would wait for each other.

    Args:
        run_config: the run config, as ``flwr run`` would give it to the apps.
        node_config: further entries of every node's config.
        workers: number of clients that run at once. More than 1 only on Linux and macOS, and not on a GPU.

    Raises:
        ConfigError: ``workers`` is less than 1, or more than 1 where processes cannot be forked.
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
        if workers < 1:
            raise ConfigError(f"workers must be at least 1, got {workers}")
        if workers > 1 and "fork" not in multiprocessing.get_all_start_methods():
            raise ConfigError(f"this system cannot fork processes, so workers must be 1, got {workers}")
        self._app, self._workers = app, workers
        self._run = local_run()
        self._run_config: UserConfig = dict(run_config or {})
        # The server is a node as well, so clients are numbered after it.
        self._contexts = {SERVER_NODE + 1 + i: self._context(i, clients, node_config or {}) for i in range(clients)}
        self._ids = count(1)
        self._pushed: dict[str, Message] = {}

    def _context(self, partition: int, clients: int, extra: Mapping[str, str | int | float | bool]) -> Context:
        """Return the context of the node with the number ``partition``; ``extra`` are further entries of its config."""
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
        """Run the clients whose messages were pushed, and yield their replies; each can be pulled once."""
        return self._replies([self._pushed.pop(message_id) for message_id in message_ids if message_id in self._pushed])

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Yield the replies to ``messages``; after ``timeout`` seconds no further client is started."""
        return self._replies([self._with_id(message) for message in messages], timeout)

    def _with_id(self, message: Message) -> Message:
        """Give ``message`` an id of its own, as a SuperLink would, and return it."""
        set_message_id(message, str(next(self._ids)))
        return message

    def _replies(self, messages: Sequence[Message], timeout: float | None = None) -> Iterator[Message]:
        """Run the clients of ``messages``, here or in workers, and yield their replies until ``timeout`` seconds are over.

        With W workers, message i goes to worker i mod W, which answers its messages in order.
        """
        end = inf if timeout is None else time.monotonic() + timeout
        if self._workers == 1:
            for message in messages:
                if time.monotonic() >= end:
                    return
                yield self._answer(message)
            return
        with ExitStack() as stack:
            workers = min(self._workers, len(messages))
            pipes: list[Connection] = []
            for worker in range(workers):
                pipes.append(stack.enter_context(self._forked_worker(messages[worker::workers], end, pipes)))
            for index, message in enumerate(messages):
                pipe = pipes[index % workers]
                try:
                    if not pipe.poll(None if end == inf else max(0.0, end - time.monotonic())):
                        continue  # the time is over, and this pipe has no reply; later pipes may still have one
                    reply, state = pipe.recv()
                except (EOFError, OSError):
                    if time.monotonic() < end:
                        yield Message(Error(APP_RAISED, "the worker process of this client has ended"), reply_to=message)
                    continue
                # The reply's own node: if an earlier reply of this pipe was late, this is that reply, and not the one of `message`.
                self._contexts[reply.metadata.src_node_id].state = state
                yield reply

    @contextmanager
    def _forked_worker(self, messages: Sequence[Message], end: float, earlier_pipes: Sequence[Connection]) -> Iterator[Connection]:
        """Answer ``messages`` in a forked worker. Yield the pipe through which the replies and the nodes' states come.

        ``earlier_pipes`` are the pipes of earlier workers. The new worker closes its copies: a pipe breaks only when no process holds it.
        """
        fork = multiprocessing.get_context("fork")
        receiving, sending = fork.Pipe(duplex=False)
        _enlarge_buffer(sending)
        process = fork.Process(target=self._run_worker, args=(messages, end, sending, (*earlier_pipes, receiving)), daemon=True)
        process.start()
        sending.close()
        try:
            yield receiving
        finally:
            receiving.close()
            process.kill()
            process.join()

    def _run_worker(self, messages: Sequence[Message], end: float, replies: Connection, inherited_pipes: Sequence[Connection]) -> None:
        """Run the body of a worker: answer ``messages`` until the time ``end``, and send each reply and its node's state."""
        for pipe in inherited_pipes:
            pipe.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that forked this one
        torch.set_num_threads(1)  # the threads of PyTorch's pool did not survive the fork
        gc.freeze()  # a garbage collection would write to objects from before the fork, and so copy the memory that is shared
        _keep_freed_memory()
        _seed_anew()
        parent = multiprocessing.parent_process()
        for message in messages:
            if time.monotonic() >= end or parent is None or not parent.is_alive():
                return  # nobody would read another reply, but its client would be charged
            reply = self._answer(message)
            replies.send((reply, self._contexts[message.metadata.dst_node_id].state))

    def _answer(self, message: Message) -> Message:
        """Run the app for the message's node, and return its reply; an error as Flower returns it if the app raises."""
        context = self._contexts[message.metadata.dst_node_id]
        try:
            return self._app(message, context)
        except Exception as error:  # whatever an app may raise
            return Message(Error(APP_RAISED, f"{type(error)}:<'{error}'>"), reply_to=message)


def _enlarge_buffer(pipe: Connection) -> None:
    """Enlarge the buffer of ``pipe`` to hold some replies, so that a worker need not wait until another worker's reply is read."""
    if sys.platform == "linux":
        from fcntl import F_SETPIPE_SZ, fcntl

        with suppress(OSError):  # the user's limit on pipe memory is reached
            fcntl(pipe.fileno(), F_SETPIPE_SZ, _PIPE_BYTES)


def _seed_anew() -> None:
    """Seed the global random generators, so that forked processes do not draw the same numbers."""
    random.seed()
    np.random.seed()
    torch.seed()


def _keep_freed_memory() -> None:
    """Keep freed memory in this process for the next client: returning it to the system and requesting it again takes 10 % of the time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, 1 << 30)
        mallopt(_MMAP_THRESHOLD, 1 << 25)
