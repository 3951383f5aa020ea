"""How many clients to train together: as memory allows, and as a short probe finds fastest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise

import psutil
import torch
from torch import Tensor

from ldpfl.simulation.local_training import Trainer
from ldpfl.simulation.schedule import BatchSchedule

MEMORY_SHARE = 0.5
"""Part of the free memory that training may take."""

ALIGNED = 16
"""Rows after which memory is aligned as before, however long they are: 64 bytes of float32 values."""
MOST_CLIENTS = 256
"""Clients that are trained at once at most, where all of a cohort do not fit."""

_PROBED_SIZES = (16, 32, 64, 128, MOST_CLIENTS)
_SLOWER = 1.1
_TRIES = 20
_PROBED_S = 0.25
"""Each size is tried so often, or for so many seconds, three times at least: other work on the machine makes short steps look slow."""
_COPIES = 8  # of a client's sum: as floats, as integers, with noise, and in between


def split_evenly(count: int, largest: int, unit: int = ALIGNED) -> Iterator[slice]:
    """Cut ``count`` clients into runs of nearly equal length, none above ``largest``; as far as that goes, of ``unit`` times some number.

    How products are rounded depends on where a client's rows lie in memory, which after 16 clients is as at the start: so a client's
    weights do not depend on how many are trained together, where that is at least 16.
    """
    unit = unit if largest >= unit else 1
    units = -(-count // unit)
    pieces = -(-units // (largest // unit))
    bounds = [min(count, unit * (units * piece // pieces)) for piece in range(pieces + 1)]
    return (slice(a, b) for a, b in pairwise(bounds))


def choose_chunk_size(trainer: Trainer, weights: Tensor, schedule: BatchSchedule, device: torch.device) -> int:
    """Return the number of clients, at most ``schedule.clients``, to train at once on ``device``.

    A step of growing chunks is timed, several times, until two are clearly slower a client than the best so far, or until
    the memory that a client was seen to need says stop. Fewer than 16 are never much faster, and results would depend on how many.
    """
    probe = schedule.head(1)
    fitting = min(schedule.clients, _fitting(trainer, weights, probe, device))
    if fitting <= _PROBED_SIZES[0]:
        return fitting
    best, best_seconds, slower = _PROBED_SIZES[0], float("inf"), 0
    for size in (*(s for s in _PROBED_SIZES if s < fitting), fitting):
        chunk = BatchSchedule(probe.index[:size], probe.mask[:size])
        seconds = _fastest(trainer, weights, chunk, device) / size
        if seconds < best_seconds:
            best, best_seconds, slower = size, seconds, 0
        else:
            slower += seconds > _SLOWER * best_seconds
        if slower == 2:  # once may be the machine, which has other things to do
            break
    return best


def most_sums(weights: Tensor, device: torch.device) -> int:
    """Return how many clients' sums of gradients (d,), with what is made of them, fit into ``MEMORY_SHARE`` of the free memory."""
    return max(1, int(MEMORY_SHARE * _free(device) / (_COPIES * weights.numel() * torch.float64.itemsize)))


def _fastest(trainer: Trainer, weights: Tensor, schedule: BatchSchedule, device: torch.device) -> float:
    taken: list[float] = []
    while len(taken) < 3 or (len(taken) < _TRIES and sum(taken) < _PROBED_S):
        taken.append(_seconds(trainer, weights, schedule, device))
    return min(taken)


def _seconds(trainer: Trainer, weights: Tensor, schedule: BatchSchedule, device: torch.device) -> float:
    started = time.perf_counter()
    trainer.train(weights, schedule)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _fitting(trainer: Trainer, weights: Tensor, probe: BatchSchedule, device: torch.device) -> int:
    """Clients whose training fits into ``MEMORY_SHARE`` of the free memory, from what two of them keep for backward."""
    kept = 0

    def note(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    pair = BatchSchedule(probe.index[:2].expand(2, -1, -1), probe.mask[:2].expand(2, -1, -1))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        trainer.train(weights, pair)
    parameters = 4 * weights.numel() * weights.element_size()  # weights, gradient, momentum, flattened copy
    a_client = kept / 2 + parameters
    return max(1, int(MEMORY_SHARE * _free(device) / a_client))


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
