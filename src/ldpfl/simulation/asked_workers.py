"""Who does the shares of a round, as a caller asks for it: this process, several, or a Ray cluster."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ldpfl.errors import ConfigError
from ldpfl.simulation.ray_workers import is_ray, ray_workers
from ldpfl.simulation.workers import ONE_PROCESS, Automatic, Processes, Workers, cores

Count = int | str
"""How many processes; ``auto``: one a core, once a run turns out to be long enough; ``ray`` or ``ray://HOST:PORT``: tasks of Ray."""


def checked_count(count: object) -> Count:
    """Return ``count`` if it says how many processes there may be.

    Raises:
        ConfigError: it is no whole number from 1 on, not ``auto``, and names no Ray cluster.
    """
    if isinstance(count, str) and (count == "auto" or is_ray(count)):
        return count
    if isinstance(count, int) and not isinstance(count, bool) and count >= 1:
        return count
    raise ConfigError(f"workers must be auto, a whole number from 1 on, ray or ray://HOST:PORT, got {count!r}")


@contextmanager
def workers(count: Count, device: torch.device, warn: Callable[[str], None] = lambda message: None) -> Iterator[Workers]:
    """Give ``count`` workers for as long as the block lasts; one process, on a device that is no CPU and without Ray.

    Raises:
        ConfigError: Ray is asked for, and is not installed.
        LdpflError: there is no such cluster.
    """
    if isinstance(count, str) and count != "auto":
        with ray_workers(count, device, warn) as tasks:
            yield tasks
        return
    if device.type != "cpu" or count == 1 or (count == "auto" and (cores() == 1 or not _may_begin_processes())):
        yield ONE_PROCESS
        return
    several = Processes(count, warn) if isinstance(count, int) else Automatic(cores(), warn)
    try:
        yield several
    finally:
        several.close()


def _may_begin_processes() -> bool:
    """Whether this process may have others: not one that is itself a worker of somebody's."""
    return not multiprocessing.current_process().daemon and multiprocessing.parent_process() is None
