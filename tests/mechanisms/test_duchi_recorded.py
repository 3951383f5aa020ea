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
from ldpfl.mechanisms.reports.base import COORDINATE_BLOCK

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
    ("one weight", 0.1, 2): ("96a296d224f285c6", "25b35bf1c23c04ad"),
    ("one weight", 1.0, 1): ("6e340b9cffb37a98", "a1837f906d27c755"),
    ("one weight", 4.0, 3): ("709e80c88487a241", "8d7dd5ec5bc503d1"),
    ("one weight", 22.5, 2): ("96a296d224f285c6", "c0163c2ecd64a0a1"),
    ("one block", 0.1, 2): ("537376f2b5a3c6ab", "efedb613bc980f0c"),
    ("one block", 1.0, 1): ("7d881fbc8eec08ba", "ba8759325c81dee0"),
    ("one block", 4.0, 3): ("9f25566294788ff6", "e782c61a20a9fc78"),
    ("one block", 22.5, 2): ("de711e9e3f3bae9b", "13b4b10b007b6493"),
    ("one layer over blocks", 0.1, 2): ("11d6840658556233", "63d5c006d4e8a1ad"),
    ("one layer over blocks", 1.0, 1): ("6fbe9c9b0f0d56e8", "169b47322c8ee358"),
    ("one layer over blocks", 4.0, 3): ("2e6cf643bc9123fc", "90f76fad7dc971c4"),
    ("one layer over blocks", 22.5, 2): ("54a96b02ac580e3a", "da07e9de50a7ef27"),
    ("a layer a block", 0.1, 2): ("7df2d5efe3d28cf5", "8bf55e98ede9d2b2"),
    ("a layer a block", 1.0, 1): ("82af14c55ed3fd54", "21878accb7bc9629"),
    ("a layer a block", 4.0, 3): ("9155270f316471ee", "b3c28d8b7f550f47"),
    ("a layer a block", 22.5, 2): ("6d2f27964cb4b1c3", "22bdb4dd165bc44b"),
    ("layers over block borders", 0.1, 2): ("0bc4e3f20a1ab514", "44683408a7074160"),
    ("layers over block borders", 1.0, 1): ("2697dfd9d9182d66", "dd2a6bcc9e546824"),
    ("layers over block borders", 4.0, 3): ("127c236cf52034c4", "0a44952617ba5983"),
    ("layers over block borders", 22.5, 2): ("388e172288de991d", "26864446a404edbe"),
    ("tiny layers", 0.1, 2): ("761e0af3e800469c", "b4e4db5bd63d9430"),
    ("tiny layers", 1.0, 1): ("899d6d95b4fd2699", "17efa04631645aa8"),
    ("tiny layers", 4.0, 3): ("2eb1f2d521ea69ce", "b976bdd64d6126b2"),
    ("tiny layers", 22.5, 2): ("d8baae840fef3b04", "fe318522910d3c7e"),
}


@pytest.mark.parametrize(("name", "epsilon", "clients"), RECORDED)
def test_reports_and_their_mean_are_the_recorded_ones(name: str, epsilon: float, clients: int) -> None:
    values, ranges = case(name, clients)
    reports = Duchi(epsilon).encode(values, ranges, SeededStreams.for_clients(3, 8, range(clients)))
    mean = Duchi(epsilon).aggregate([reports], ranges)
    assert (digest(*reports.payloads()), digest(mean.numpy().tobytes())) == RECORDED[name, epsilon, clients]
