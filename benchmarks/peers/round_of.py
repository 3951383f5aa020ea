"""What the scripts of all peers share: the digits, their division among clients, and how a round is timed. It needs NumPy alone."""

from __future__ import annotations

import argparse
import json
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

RATE = 0.03
"""Learning rate of clients."""

BATCH = 10


@dataclass(frozen=True)
class Task:
    """Digits, their division among clients, and how a round is run.

    Attributes:
        images: (N, 28, 28) float32, normalised.
        labels: (N,) int64.
        clients: indices of each client's digits, equally many for all clients.
        model: ``cnn``, two layers of 10 and 20 channels and 50 hidden units; or ``linear``, a logistic regression.
    """

    images: NDArray[np.float32]
    labels: NDArray[np.int64]
    clients: list[NDArray[np.int64]]
    model: str
    threads: int
    rounds: int


def task_from_arguments() -> Task:
    """Return the task that the command line describes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("digits", help="an .npz file with images and labels")
    parser.add_argument("--model", choices=["cnn", "linear"], default="cnn")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--samples", type=int, default=600, help="of each client")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    digits = np.load(options.digits)
    rows = np.random.default_rng(0).permutation(len(digits["labels"]))[: options.clients * options.samples]
    images = ((digits["images"] / np.float32(255) - np.float32(0.1307)) / np.float32(0.3081)).astype(np.float32)
    return Task(images, digits["labels"].astype(np.int64), np.split(rows, options.clients), options.model, options.threads, options.rounds)


def time_rounds(task: Task, run_round: Callable[[int], Any], prints: bool = True) -> None:
    """Run the rounds, and print a line of JSON: the seconds of each round, and the peak memory of this process and its children."""
    memory = _Memory()
    seconds = []
    for number in range(1, task.rounds + 1):
        began = time.perf_counter()
        run_round(number)
        seconds.append(time.perf_counter() - began)
    if prints:
        print(json.dumps({"seconds": seconds, "mib": memory.peak()}), flush=True)


class _Memory:
    """Peak memory of this process and of those that it began (proportional set size), watched by a thread."""

    def __init__(self) -> None:
        self._most = 0.0
        try:
            import psutil
        except ImportError:
            return
        self._process = psutil.Process()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            total_bytes = 0
            for process in (self._process, *self._process.children(recursive=True)):
                try:
                    total_bytes += process.memory_full_info().pss
                except Exception:  # it has ended
                    continue
            self._most = max(self._most, total_bytes / 2**20)
            time.sleep(0.2)

    def peak(self) -> float:
        """Return the peak so far, in MiB. Without psutil, it is that of this process alone."""
        return self._most or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
