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
    """Digits and who has them.

    Attributes:
        images: (N, 28, 28) float32, normalised.
        labels: (N,) int64.
        clients: rows of each client: all clients have as many.
        model: ``cnn``, two layers of 10 and 20 channels and 50 hidden units; or ``linear``, a logistic regression.
    """

    images: NDArray[np.float32]
    labels: NDArray[np.int64]
    clients: list[NDArray[np.int64]]
    model: str
    threads: int
    rounds: int


def asked() -> Task:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("digits", help="an .npz file with images and labels")
    parser.add_argument("--model", choices=["cnn", "linear"], default="cnn")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--samples", type=int, default=600, help="of each client")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    own = parser.parse_args()
    digits = np.load(own.digits)
    rows = np.random.default_rng(0).permutation(len(digits["labels"]))[: own.clients * own.samples]
    images = ((digits["images"] / np.float32(255) - np.float32(0.1307)) / np.float32(0.3081)).astype(np.float32)
    return Task(images, digits["labels"].astype(np.int64), np.split(rows, own.clients), own.model, own.threads, own.rounds)


def timed(task: Task, run_round: Callable[[int], Any], says: bool = True) -> None:
    """Run the rounds, and print the seconds of each, the memory of this process and its children at the most, as a line of JSON."""
    memory = _Memory()
    seconds = []
    for number in range(1, task.rounds + 1):
        began = time.perf_counter()
        run_round(number)
        seconds.append(time.perf_counter() - began)
    if says:
        print(json.dumps({"seconds": seconds, "mib": memory.peak()}), flush=True)


class _Memory:
    """Watches the memory that this process and those that it began have for themselves (their proportional set size)."""

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
            found = 0
            for process in (self._process, *self._process.children(recursive=True)):
                try:
                    found += process.memory_full_info().pss
                except Exception:  # it has ended
                    continue
            self._most = max(self._most, found / 2**20)
            time.sleep(0.2)

    def peak(self) -> float:
        """Return the most so far, in MiB."""
        return self._most or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
