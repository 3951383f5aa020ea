"""Local training of a round's cohort, in chunks of clients. The results are private values without noise.

Memory and a short probe decide how many clients are trained at once. The training itself is in ``local_training``, and for per-record
gradients in ``gradients``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.data.samples import Division
from ldpfl.errors import ConfigError, PrivacyError
from ldpfl.mechanisms.base import record_rate_of
from ldpfl.server import ServerState, client_values
from ldpfl.simulation.compiled_training import CompiledTrainer
from ldpfl.simulation.federation import Federation
from ldpfl.simulation.gradients import RecordGradientTrainer
from ldpfl.simulation.local_steps import MOST_CLIENTS, BatchSchedule, batch_schedule, full_batch, poisson_batch, split_evenly
from ldpfl.simulation.local_training import LoopTrainer, Trainer
from ldpfl.simulation.personal_layers import PersonalTrainer
from ldpfl.util.randomness import Purpose, SeededStreams, require_secret

ClientsDone = Callable[[int, int], None]
"""Called with (clients trained so far, cohort size) while a round goes on."""

MEMORY_SHARE = 0.5
"""Share of the free memory that training may use."""

_PROBED_SIZES = (16, 32, 64, 128, MOST_CLIENTS)
"""Numbers of clients that are timed. Fewer than 16 are never much faster, and would round differently."""
_SLOWER = 1.1
"""A size is clearly slower if its time for a client is this many times the best one."""
_MIN_TRIES, _MAX_TRIES, _PROBED_S = 3, 20, 0.25
"""A size is timed up to so many times, or for so many seconds. Other work on the machine makes single short steps look slow."""
_COPIES = 8  # number of copies of a client's sum in memory at once: as floats, as integers, with noise, and in between


def train_cohort(
    federation: Federation,
    state: ServerState,
    cohort: NDArray[np.int64],
    chunk_size: int | None = None,
    clients_done: ClientsDone = lambda done, total: None,
) -> Tensor:
    """Return the values (K, d) that the clients of ``cohort`` would randomise in the round after ``state``. Row i is ``cohort[i]``'s.

    They are private values without noise, for audits of a simulation. No code that plays the server may see them. At most ``chunk_size``
    clients are trained at once. By default the free memory and the measured speed decide.
    """
    if chunk_size is None:
        chunk_size = federation.chunk_size or chunk_size_for(federation, state, cohort)
    values, done = torch.empty(0), 0
    for places in chunks_of_cohort(federation, cohort, chunk_size):
        chunk_values = client_values(train_clients(federation, state, cohort[places]), state, federation.perturbed)
        if done == 0:  # the type is known only now: sums of records' gradients are integers, other values float32
            values = torch.empty(len(cohort), state.ranges.dimension, dtype=chunk_values.dtype)
        values[torch.from_numpy(places)] = chunk_values
        done += places.size
        clients_done(done, len(cohort))
    return values


def chunks_of_cohort(
    federation: Federation, cohort: NDArray[np.int64], chunk_size: int, most: int = MOST_CLIENTS
) -> Iterator[NDArray[np.intp]]:
    """Yield the positions (k,) in ``cohort`` of each chunk of clients that are trained together.

    A compiled step processes a block of a fixed number of clients. Its chunks are whole blocks, with up to ``most`` clients in a chunk.
    Other chunks have up to ``chunk_size`` clients.
    """
    # Clients of similar size are together, so that fewer steps are padding. A client's random words do not depend on this order.
    order = np.argsort(federation.samples.sizes[cohort], kind="stable")
    block = federation.trainer.block if isinstance(federation.trainer, CompiledTrainer) else 0
    # A client's place in its block affects rounding, so the borders of blocks must not depend on ``chunk_size``.
    pieces = _whole_blocks(len(cohort), block, most) if block else split_evenly(len(cohort), chunk_size)
    return (order[piece] for piece in pieces)


def _whole_blocks(count: int, block: int, most: int) -> Iterator[slice]:
    """Cut ``count`` clients into pieces of whole blocks: at most ``most`` clients, but at least one block. The last may be shorter."""
    piece = block * max(1, most // block)
    return (slice(start, min(start + piece, count)) for start in range(0, count, piece))


def train_clients(federation: Federation, state: ServerState, clients: NDArray[np.int64]) -> Tensor:
    """Return the weights (k, d) that ``clients`` have after local training in the round after ``state``: private values, on the CPU.

    Raises:
        ConfigError: the model has personal layers. Only the rounds of a simulation store them.
        PrivacyError: the model changes its own state while it runs, or PyTorch refuses to run it although the trial before the run passed.
    """
    trained, _ = train_with_personal_layers(federation, state, clients, personal=None)
    return trained


def train_with_personal_layers(
    federation: Federation, state: ServerState, clients: NDArray[np.int64], personal: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the weights (k, d) of ``clients`` after local training, and their personal layers (k, p), which they keep.

    Args:
        personal: (k, p) the clients' personal layers before the round; None if the model has none.

    Raises:
        ConfigError, PrivacyError: as for :func:`train_clients`.
    """
    schedule, trainer = schedule_of(federation, state, clients), federation.trainer
    if isinstance(trainer, RecordGradientTrainer):
        trainer = trainer.in_round(state.ranges)  # with adaptive clipping, each round has its own clipping norm
    if isinstance(trainer, PersonalTrainer) and personal is None:
        raise ConfigError("model.personal works only in simulations, which store each client's layers between rounds: remove this setting")
    with explained_pytorch_errors(federation, state, schedule):
        if isinstance(trainer, PersonalTrainer) and personal is not None:
            trained, personal = trainer.train_both(state.weights, personal.to(federation.device), schedule, round_number=state.round + 1)
            personal = personal.cpu()
        else:
            trained, personal = trainer.train(state.weights, schedule, state.round + 1), None
    return federation.scaled_by_size(state.weights, trained.cpu(), clients), personal


@contextmanager
def explained_pytorch_errors(federation: Federation, state: ServerState, schedule: BatchSchedule) -> Iterator[None]:
    """Turn an error of PyTorch while it trains by ``schedule`` into a :class:`PrivacyError` that explains it.

    The error's text is not repeated, since it may hold private values. When many clients are trained at once, PyTorch forbids some writes
    of a model to itself without naming the tensor. So one client is trained separately, which raises an error that names it.
    """
    try:
        yield
    except torch.OutOfMemoryError:  # its text explains itself
        raise
    except RuntimeError as error:
        first_client = BatchSchedule(schedule.index[:1], schedule.mask[:1])
        with suppress(RuntimeError):  # not a PrivacyError, which names the tensor and replaces the error below
            LoopTrainer(federation.task).train(state.weights, first_client, state.round + 1)
        raise PrivacyError(
            f"round {state.round + 1} stopped, and nothing was sent: PyTorch could not run the model on these samples, though it could on "
            "made-up ones. Either memory ran out, or forward behaves differently after some calls. Write forward so that the output for a "
            "sample depends only on this sample and the weights"
        ) from error


def schedule_of(federation: Federation, state: ServerState, clients: NDArray[np.int64]) -> BatchSchedule:
    """Return the schedule of the samples on which ``clients`` train, step by step, in the round after ``state``."""
    samples, round_number = federation.samples.take(clients), state.round + 1
    if federation.perturbed == "gradient":
        return _gradient_batch(federation, round_number, clients, samples).to(federation.device)
    epochs = range(federation.work.epochs)
    orders = [SeededStreams.of(clients, federation.seed, Purpose.BATCH_ORDER, round_number, epoch) for epoch in epochs]
    return batch_schedule(samples, orders, batch_size=federation.batch_width).to(federation.device)


def _gradient_batch(federation: Federation, round_number: int, clients: NDArray[np.int64], samples: Division) -> BatchSchedule:
    """Return the schedule of one gradient step: all ``samples``, or a Poisson sample of them if the mechanism relies on one."""
    whole, rate = full_batch(samples, federation.batch_width), record_rate_of(federation.mechanism)
    if rate == 1:
        return whole
    # The guarantee holds only if nobody learns which records are sampled, so a secret seed decides.
    return poisson_batch(whole, rate, SeededStreams.of(clients, require_secret(federation.coin_seed), Purpose.RECORDS, round_number))


def chunk_size_for(federation: Federation, state: ServerState, cohort: NDArray[np.int64]) -> int:
    """Return the number of clients of ``cohort`` to train at once. If this number affects the speed, the largest clients are timed."""
    if isinstance(federation.trainer, CompiledTrainer):  # it trains whole blocks, see :func:`chunks_of_cohort`
        return MOST_CLIENTS
    if isinstance(federation.trainer, RecordGradientTrainer):  # its speed does not depend on this number, so memory decides
        return min(len(cohort), MOST_CLIENTS, max_clients_in_memory(state.weights, federation.device))
    largest_first = cohort[np.argsort(-federation.samples.sizes[cohort], kind="stable")]
    schedule = schedule_of(federation, state, largest_first[:MOST_CLIENTS])
    return choose_chunk_size(federation.trainer, state.weights, schedule, federation.device)


def choose_chunk_size(trainer: Trainer, weights: Tensor, schedule: BatchSchedule, device: torch.device) -> int:
    """Return the number of clients, at most ``schedule.clients``, to train at once on ``device``.

    The first step is timed for growing chunks. Timing ends once two sizes take clearly longer for each client than the best so far, or once
    a chunk would not fit into memory.
    """
    probe = schedule.head(1)
    fitting = min(schedule.clients, _fitting_clients(trainer, weights, probe, device))
    if fitting <= _PROBED_SIZES[0]:
        return fitting
    best, best_seconds, slower_sizes = _PROBED_SIZES[0], float("inf"), 0  # seconds are for each client
    for size in [*(size for size in _PROBED_SIZES if size < fitting), fitting]:
        chunk = BatchSchedule(probe.index[:size], probe.mask[:size])
        seconds = _min_seconds(trainer, weights, chunk, device) / size
        if seconds < best_seconds:
            best, best_seconds, slower_sizes = size, seconds, 0
        elif seconds > _SLOWER * best_seconds:
            slower_sizes += 1
        if slower_sizes == 2:  # a single slow size may be due to other work on the machine
            break
    return best


def max_clients_in_memory(weights: Tensor, device: torch.device) -> int:
    """Return the number of clients whose gradient sums fit into ``MEMORY_SHARE`` of the free memory."""
    return max(1, int(MEMORY_SHARE * _free_bytes(device) / bytes_of_sum(weights)))


def bytes_of_sum(weights: Tensor) -> int:
    """Return the size of a client's gradient sum, of the size of ``weights`` (d,), with all copies of it that are in memory at once."""
    return _COPIES * weights.numel() * torch.float64.itemsize


def _min_seconds(trainer: Trainer, weights: Tensor, schedule: BatchSchedule, device: torch.device) -> float:
    """Return the shortest of several measured times, in seconds, that ``trainer`` takes for ``schedule``."""
    times: list[float] = []
    while len(times) < _MIN_TRIES or (len(times) < _MAX_TRIES and sum(times) < _PROBED_S):
        times.append(_measured_seconds(trainer, weights, schedule, device))
    return min(times)


def _measured_seconds(trainer: Trainer, weights: Tensor, schedule: BatchSchedule, device: torch.device) -> float:
    """Return the time, in seconds, that ``trainer`` takes once for ``schedule``."""
    started = time.perf_counter()
    trainer.train(weights, schedule)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _fitting_clients(trainer: Trainer, weights: Tensor, probe: BatchSchedule, device: torch.device) -> int:
    """Return the number of clients whose training fits into ``MEMORY_SHARE`` of the free memory, by the first step of ``probe``."""
    # If there is only one client, the pair consists of two copies of it, since a single client is computed in another way.
    pair = BatchSchedule(probe.index[:2].expand(2, -1, -1), probe.mask[:2].expand(2, -1, -1))
    return max(1, int(MEMORY_SHARE * _free_bytes(device) / bytes_in_training(trainer, weights, pair)))


def bytes_in_training(trainer: Trainer, weights: Tensor, schedule: BatchSchedule) -> float:
    """Return the size of what each client of ``schedule``, which has one step, keeps while it trains from ``weights`` (d,).

    These are copies of its weights, and the tensors for the backward pass.
    """
    backward_bytes = 0

    def add_bytes(tensor: Tensor) -> Tensor:
        """Add the size of a ``tensor`` that is kept for the backward pass, and return it unchanged."""
        nonlocal backward_bytes
        backward_bytes += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(add_bytes, lambda tensor: tensor):
        trainer.train(weights, schedule)
    parameter_bytes = 4 * weights.numel() * weights.element_size()  # weights, gradient, momentum, flattened copy
    return backward_bytes / schedule.clients + parameter_bytes


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
