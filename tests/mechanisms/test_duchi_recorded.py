"""Seeded reports and their mean, bit for bit as they were first recorded: encoding may become faster, not different."""

from __future__ import annotations

import hashlib
import itertools
import math

import pytest
import torch
from torch import Tensor

from ldpfl import LayerRanges, SeededStreams
from ldpfl.mechanisms import Duchi
from ldpfl.util.randomness import COORDINATE_BLOCK

SIZES = {
    "one weight": (1,),
    "one block": (COORDINATE_BLOCK,),
    "one layer over blocks": (2 * COORDINATE_BLOCK + 11,),
    "a layer a block": (COORDINATE_BLOCK, COORDINATE_BLOCK),
    "layers over block borders": (COORDINATE_BLOCK - 3, 7, 2 * COORDINATE_BLOCK, 1, 4242),
    "tiny layers": tuple(itertools.islice(itertools.cycle((1, 2, 3, 5, 1)), 3000)),
}
CENTERS, RADII = (0.0, 0.3, -0.2, 1e-3, 5.0, -1e4), (0.1, 1.0, 0.05, 1 / 3, 1e-4, 3e3, 2.0)
EXTREMES = (math.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, 0.5)
"""In radii around the center, which float32 rounds; the infinite one stands for the center itself."""


def case(name: str, clients: int) -> tuple[Tensor, LayerRanges]:
    """Values in and a little beyond the box, from raw random words, so that they do not depend on a library's version."""
    sizes = SIZES[name]
    center, radius = (torch.tensor(list(itertools.islice(itertools.cycle(told), len(sizes)))).double() for told in (CENTERS, RADII))
    ranges = LayerRanges(center, radius, sizes)
    source = SeededStreams.for_clients(99, 0, range(clients))
    spread = torch.stack([source.int32(row, ranges.dimension) for row in range(clients)]).double() * (1.25 / 2**31)
    repeats = torch.tensor(sizes)
    values = (center.repeat_interleave(repeats) + radius.repeat_interleave(repeats) * spread).float()
    for place, extreme in enumerate(EXTREMES[: ranges.dimension]):
        values[0, -1 - place] = center[-1].float() if extreme == math.inf else extreme
    ends = slice(0, ranges.dimension, 97)  # both ends of the box, in every layer and block
    values[-1, ends] = (center.repeat_interleave(repeats) + radius.repeat_interleave(repeats) * spread[-1].sign())[ends].float()
    return values, ranges


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


RECORDED: dict[tuple[str, float, int], tuple[str, str]] = {
    ("one weight", 0.1, 2): ("9dcf97a184f32623", "1319c0d6c21eece2"),
    ("one weight", 1.0, 1): ("4bf5122f344554c5", "267c4f05394da5b3"),
    ("one weight", 4.0, 3): ("9f44ac6acb8a37b0", "7d20f71b9a310d50"),
    ("one weight", 22.5, 2): ("9dcf97a184f32623", "fb360f7241a770dc"),
    ("one block", 0.1, 2): ("469c7f8cffc8eb58", "b1b7a5d906ef7723"),
    ("one block", 1.0, 1): ("a21278baaa15d83d", "0a5ed4649ae5f9fb"),
    ("one block", 4.0, 3): ("a1ccd691be428c5a", "92bb996e70e8328b"),
    ("one block", 22.5, 2): ("7dfe480b648041f4", "dbe16ea0549012f1"),
    ("one layer over blocks", 0.1, 2): ("f4fdd1d83a97947e", "68a776c5eeb3e352"),
    ("one layer over blocks", 1.0, 1): ("b3b6e45cfff28001", "cc211a2d175d665c"),
    ("one layer over blocks", 4.0, 3): ("85b3019da1b82c58", "30222f77bf931a1f"),
    ("one layer over blocks", 22.5, 2): ("8e6ddd12068183b8", "7ddd70aa0e3d9521"),
    ("a layer a block", 0.1, 2): ("c30a1003b127bef0", "c56346e423b6e14e"),
    ("a layer a block", 1.0, 1): ("a114629ad4dc7be5", "cc6431096c083e11"),
    ("a layer a block", 4.0, 3): ("dee90f3f7a998486", "d831842581ea9947"),
    ("a layer a block", 22.5, 2): ("58ed1218e93657dd", "24e92a553abc1f92"),
    ("layers over block borders", 0.1, 2): ("11e9dc97eadf5b75", "e07eea1d2ebe67e2"),
    ("layers over block borders", 1.0, 1): ("e4d410f5aed63da0", "7a1eb855a7f0fc37"),
    ("layers over block borders", 4.0, 3): ("87024447db86249c", "e26c1529ceb75047"),
    ("layers over block borders", 22.5, 2): ("17927bb0a1665fda", "32b109d378bf36da"),
    ("tiny layers", 0.1, 2): ("6a6df7dcd28a33e9", "bdda6ee279dcec8e"),
    ("tiny layers", 1.0, 1): ("4ac9fe3351f09771", "d9f4e00e103d3920"),
    ("tiny layers", 4.0, 3): ("3f78f45c615d2883", "d01843581f77380c"),
    ("tiny layers", 22.5, 2): ("8637ba24478e1532", "56779175d83d8af6"),
}


@pytest.mark.parametrize(("name", "epsilon", "clients"), RECORDED)
def test_reports_and_their_mean_are_the_recorded_ones(name: str, epsilon: float, clients: int) -> None:
    values, ranges = case(name, clients)
    reports = Duchi(epsilon).encode(values, ranges, SeededStreams.for_clients(3, 8, range(clients)))
    mean = Duchi(epsilon).aggregate([reports], ranges)
    assert (digest(*reports.payloads()), digest(mean.numpy().tobytes())) == RECORDED[name, epsilon, clients]
