"""Biased coins: exact probabilities, from the numbers at which they change."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ldpfl import SeededStreams
from ldpfl.mechanisms.coins import compare_random_words, toss_coins

ONE = range(1)


class Halves:
    """A source of one random number for one client: its first 16 bits, and then the others."""

    def __init__(self, number: int, bits: int) -> None:
        first, rest = number >> (bits - 16), number & ((1 << (bits - 16)) - 1)
        rest <<= 16 if bits == 64 else 0
        self._draws = [[first], [rest & (2**32 - 1), rest >> 32][: bits // 32]]

    def int32(self, row: int, count: int) -> Tensor:
        words = self._draws.pop(0)
        assert count == len(words)
        return torch.from_numpy(np.array(words, dtype=np.uint32).view(np.int32))


@pytest.mark.parametrize("probability", [0, 1, 2**31, 2**32, 2**48 - 1, 2**48, 2**63 + 12_345, 2**64 - 2**48, 2**64 - 1])
def test_events_happen_for_as_many_of_all_numbers_as_stated(probability: int) -> None:
    for number in {0, max(0, probability - 1), probability, min(2**64 - 1, probability + 1), 2**64 - 1}:
        # Numbers of 16 bits are compared as signed ones.
        assert bool(toss_coins(probability, Halves(number ^ (1 << 63), 64), ONE, 1)[0, 0]) == (number < probability)


@pytest.mark.parametrize("threshold", [-(2**31), -(2**31) + 1, -1, 0, 1, 65_535, 65_536, 2**31 - 1])
def test_words_lie_below_a_threshold_as_integers_do(threshold: int) -> None:
    first = np.array([[threshold >> 16]], dtype=np.int16)
    for number in {-(2**31), max(-(2**31), threshold - 1), threshold, min(2**31 - 1, threshold + 1), 2**31 - 1}:
        found = compare_random_words(first, lambda row, place: np.array([threshold]), Halves(number & (2**32 - 1), 32), ONE)
        assert bool(found[0, 0]) == (number < threshold)


def test_coins_of_a_client_do_not_depend_on_the_others() -> None:
    """2^20 coins for each of three clients: of each some 16 ask for more bits."""
    for probability in (2**63, 2**64 // 3):
        together = toss_coins(probability, SeededStreams.for_clients(1, 1, [4, 9, 2]), range(3), 2**20)
        for row, client in enumerate((4, 9, 2)):
            assert np.array_equal(toss_coins(probability, SeededStreams.for_clients(1, 1, [client]), ONE, 2**20)[0], together[row])
        assert abs(together.mean() - probability / 2**64) < 4 * (0.25 / together.size) ** 0.5  # a false alarm once in 15,000 seeds
