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


def fastest_seconds(call: Callable[[], object], calls: int = 200) -> float:
    """Return the seconds of the fastest of ``calls`` calls."""
    best = float("inf")
    for _ in range(calls):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best


def print_row(name: str, call: Callable[[], object], operations: float) -> float:
    """Print the row of one product, and return its microseconds a digit."""
    seconds = fastest_seconds(call)
    print(f"{name:44} {seconds / SAMPLES * 1e6:6.1f} us a digit {operations * SAMPLES / seconds / 1e9:6.0f} GFLOP/s")
    return seconds / SAMPLES * 1e6


def main() -> None:
    """Measure each product, and print its row."""
    torch.set_num_threads(1)
    # Multiplications and additions of a layer, for one forward pass and digit.
    first_operations, second_operations = 2 * 24 * 24 * 25 * 10, 2 * 8 * 8 * 250 * 20
    patches, weights = torch.randn(CLIENTS, 25, BATCH * 24 * 24), torch.randn(CLIENTS, 10, 25)
    patch_gradients = torch.randn(CLIENTS, 10, BATCH * 24 * 24)
    maps, kernels = torch.randn(BATCH, CLIENTS * 10, 12, 12), torch.randn(CLIENTS * 20, 10, 5, 5)
    output_gradients = torch.randn(BATCH, CLIENTS * 20, 8, 8)

    def backward(*needed: bool) -> tuple[Tensor, ...]:
        gradients: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            output_gradients, maps, kernels, None, [1, 1], [0, 0], [1, 1], False, [0, 0], CLIENTS, needed
        )
        return gradients

    total = print_row("first layer, forward, by patches", lambda: weights @ patches, first_operations)
    total += print_row("first layer, gradient of weights, by patches", lambda: patch_gradients @ patches.mT, first_operations)
    total += print_row("second layer, forward, grouped", lambda: F.conv2d(maps, kernels, groups=CLIENTS), second_operations)
    total += print_row("second layer, both gradients, grouped", lambda: backward(True, True, False), 2 * second_operations)
    print(f"{'together':44} {total:6.1f} us a digit")
    left, right = torch.randn(1000, 1000), torch.randn(1000, 1000)
    print(f"a product of 1000 x 1000 numbers: {2e9 / fastest_seconds(lambda: left @ right) / 1e9:.0f} GFLOP/s")


if __name__ == "__main__":
    main()
