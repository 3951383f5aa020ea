"""What the convolutions of the two-layer CNN cost at least in PyTorch's own kernels: python benchmarks/products.py

Times each product of a training step alone: 10 clients with weights of their own, 10 digits each, one thread, the fastest of 200 calls.
Prints microseconds a digit, and billions of floating-point operations a second (``GFLOP/s``). The last line is a product of two large
matrices, which is close to what the core can do.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

CLIENTS, BATCH = 10, 10
SAMPLES = CLIENTS * BATCH


def fastest(call: Callable[[], object], calls: int = 200) -> float:
    """Return the seconds of the fastest of some calls."""
    best = float("inf")
    for _ in range(calls):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best


def row(name: str, call: Callable[[], object], operations: float) -> float:
    """Print the row of one product, and return its microseconds a digit."""
    seconds = fastest(call)
    print(f"{name:44} {seconds / SAMPLES * 1e6:6.1f} us a digit {operations * SAMPLES / seconds / 1e9:6.0f} GFLOP/s")
    return seconds / SAMPLES * 1e6


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    first, second = 2 * 24 * 24 * 25 * 10, 2 * 8 * 8 * 250 * 20  # multiplications and additions of one forward pass and digit
    patches, weights = torch.randn(CLIENTS, 25, BATCH * 24 * 24), torch.randn(CLIENTS, 10, 25)
    slopes = torch.randn(CLIENTS, 10, BATCH * 24 * 24)
    maps, kernels = torch.randn(BATCH, CLIENTS * 10, 12, 12), torch.randn(CLIENTS * 20, 10, 5, 5)
    above = torch.randn(BATCH, CLIENTS * 20, 8, 8)

    def backward(*wanted: bool) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            above, maps, kernels, None, [1, 1], [0, 0], [1, 1], False, [0, 0], CLIENTS, wanted
        )
        return found

    total = row("first layer, forward, by patches", lambda: weights @ patches, first)
    total += row("first layer, gradient of weights, by patches", lambda: slopes @ patches.mT, first)
    total += row("second layer, forward, grouped", lambda: F.conv2d(maps, kernels, groups=CLIENTS), second)
    total += row("second layer, both gradients, grouped", lambda: backward(True, True, False), 2 * second)
    print(f"{'together':44} {total:6.1f} us a digit")
    one, other = torch.randn(1000, 1000), torch.randn(1000, 1000)
    print(f"a product of 1000 x 1000 numbers: {2e9 / fastest(lambda: one @ other) / 1e9:.0f} GFLOP/s")


if __name__ == "__main__":
    main()
