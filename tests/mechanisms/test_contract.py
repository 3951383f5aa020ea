"""What all mechanisms keep to, whatever they do to values: a line of ``CASES`` for each way in which one differs from another."""

from __future__ import annotations

import math
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ldpfl import ConfigError, LayerRanges, PrivacyError, mechanisms
from ldpfl.mechanisms import Harmony, Hybrid, Laplace, Mechanism, Piecewise, guarantee_of, payload_bits, privatize, read_valid
from ldpfl.mechanisms.privunit import PrivUnitG
from ldpfl.mechanisms.reports.bits import BitReports, packed_size
from ldpfl.mechanisms.reports.dense import DenseReports
from ldpfl.mechanisms.rotated_sign import RotatedSign
from ldpfl.util.randomness import COORDINATE_BLOCK, SeededStreams

CASES: dict[str, Mechanism] = {
    **{name: mechanisms.with_defaults(name, 2.0) for name in mechanisms.names(alone=True)},
    "duchi, a large budget": mechanisms.with_defaults("duchi", 8.0),
    "harmony, groups": Harmony(2.0, 4),
    "rotated-sign, groups": RotatedSign(2.0, group=4),
    "privunit-g, directions alone": PrivUnitG(2.0, 1.0),
    "laplace, sampled": Laplace(2.0, 3),
    "piecewise, sampled": Piecewise(4.0, 1),
    "hybrid, sampled": Hybrid(4.0, 21),
}
RANGES = LayerRanges(torch.tensor([0.5, -1.0]), torch.tensor([0.25, 0.1]), (13, 8))
NARROW = LayerRanges(torch.tensor([0.0]), torch.tensor([1.0]), (8,))
DIMENSION = 21
SECRET = 8675.309
every = pytest.mark.parametrize("case", CASES)


def values_of(clients: int, seed: int = 1) -> Tensor:
    return torch.empty(clients, DIMENSION).uniform_(-1, 1, generator=torch.Generator().manual_seed(seed))


def streams(*clients: int) -> SeededStreams:
    return SeededStreams.for_clients(2, 0, clients)


def sent(mechanism: Mechanism, values: Tensor, *clients: int) -> list[bytes]:
    return list(mechanism.encode(values, RANGES, streams(*clients)).payloads())


@every
@pytest.mark.parametrize("clients", [1, 2, 40, pytest.param(300, marks=pytest.mark.thorough)])
def test_aggregate_is_the_mean_of_decode_and_does_not_depend_on_splits(case: str, clients: int) -> None:
    mechanism = CASES[case]
    whole = mechanism.encode(values_of(clients), RANGES, streams(*range(clients)))
    mean, decoded = mechanism.aggregate([whole], RANGES), mechanism.decode(whole, RANGES)
    assert (mean.dtype, tuple(mean.shape), tuple(decoded.shape)) == (torch.float32, (DIMENSION,), (clients, DIMENSION))
    torch.testing.assert_close(mean, decoded.double().mean(0).float(), rtol=1e-5, atol=1e-5)
    payloads = list(whole.payloads())
    for cut in {1, clients // 3, clients - 1} - {0, clients}:
        parts = [mechanism.read(part, RANGES) for part in (payloads[:cut], payloads[cut:])]
        assert torch.equal(mechanism.aggregate(parts, RANGES), mechanism.aggregate([mechanism.read(payloads, RANGES)], RANGES))


@every
def test_reports_survive_the_wire_and_are_of_one_length(case: str) -> None:
    mechanism = CASES[case]
    values = torch.cat([values_of(4), torch.zeros(1, DIMENSION), torch.full((1, DIMENSION), 1e30), RANGES.expand()[0].float()[None]])
    payloads = sent(mechanism, values, *range(7))
    received = mechanism.read(payloads, RANGES)
    assert list(received.payloads()) == payloads
    assert received.clients == 7
    assert {len(payload) for payload in payloads} == {received.bytes_per_client} == {packed_size(payload_bits(mechanism, RANGES))}
    for wrong in (b"", payloads[0][:-1], payloads[0] + b"\0"):
        kept, refused = read_valid(mechanism, [payloads[1], wrong], RANGES)
        assert (kept.clients if kept else 0, [entry.place for entry in refused]) == (1, [1])


@every
def test_a_client_s_report_is_its_own_whoever_is_beside_it(case: str) -> None:
    mechanism, values = CASES[case], values_of(4)
    together = sent(mechanism, values, 3, 1, 40, 7)
    assert sent(mechanism, values[[2, 0]], 40, 3) == [together[2], together[0]]
    strided = values.T.contiguous().T.requires_grad_()
    assert sent(mechanism, strided, 3, 1, 40, 7) == together
    assert torch.equal(values, values_of(4))  # and the caller's values are as they were


@every
def test_a_block_of_clients_sends_what_each_of_them_sends_alone(case: str) -> None:
    """More clients than fit a block of few weights, and more weights than fit a block of coordinates."""
    mechanism, generator = CASES[case], torch.Generator().manual_seed(3)
    for clients, sizes in ((7000, (13, 8)), (3, (COORDINATE_BLOCK - 3, 9, 5000))):
        ranges = LayerRanges([0.5, -1.0, 0.0][: len(sizes)], [0.25, 0.1, 0.7][: len(sizes)], sizes)
        values = torch.empty(clients, sum(sizes)).uniform_(-1, 1, generator=generator)
        together = list(mechanism.encode(values, ranges, streams(*range(clients))).payloads())
        for client in {0, 1, clients // 2, clients - 1}:
            alone = mechanism.encode(values[client : client + 1], ranges, streams(client))
            assert list(alone.payloads()) == [together[client]]


BAD_VALUES: dict[str, Tensor] = {
    "nan": torch.tensor([[SECRET, math.nan, *[0.0] * 19]]),
    "inf": torch.tensor([[SECRET, *[0.0] * 20], [0.0, math.inf, *[0.0] * 19]]),
    "minus inf": torch.tensor([[SECRET, -math.inf, *[0.0] * 19]]),
    "float64": torch.full((1, DIMENSION), SECRET, dtype=torch.float64),
    "float16": torch.full((1, DIMENSION), SECRET, dtype=torch.float16),
    "integers": torch.full((1, DIMENSION), 8675),
    "one-dimensional": torch.full((DIMENSION,), SECRET),
    "too narrow": torch.full((1, DIMENSION - 1), SECRET),
    "too wide": torch.full((1, DIMENSION + 1), SECRET),
    "three-dimensional": torch.full((1, 1, DIMENSION), SECRET),
    "empty": torch.empty(0),
    "no weights": torch.empty(1, 0),
}


@every
def test_bad_values_are_refused_without_being_repeated(case: str) -> None:
    mechanism = CASES[case]
    sampled = "sampled" in case or case.startswith("harmony")  # looks at what it samples only; a client's wrapper looks at all
    for name, values in BAD_VALUES.items():
        if sampled and name in ("nan", "inf", "minus inf"):
            continue
        for method in (mechanism.encode, partial(privatize, mechanism)):
            with pytest.raises(PrivacyError, match="nothing was sent") as caught:
                method(values, RANGES, streams(*range(len(values))))
            assert "867" not in str(caught.value), name
            assert caught.value.__cause__ is None


@every
def test_missing_and_foreign_reports_are_refused(case: str) -> None:
    mechanism = CASES[case]
    dense, bits = DenseReports(torch.zeros(1, DIMENSION)), BitReports(np.zeros((1, 3), dtype=np.uint8), DIMENSION)
    own = mechanism.encode(values_of(1), RANGES, streams(0))
    foreign: list[Any] = [report for report in (dense, bits) if type(report) is not type(own)]
    with suppress(ConfigError):  # that samples more weights than there are
        foreign.append(mechanism.encode(torch.zeros(1, 8), NARROW, streams(0)))
    with pytest.raises(PrivacyError, match="no report"):
        mechanism.aggregate([], RANGES)
    for report in foreign:
        for call in (mechanism.aggregate, mechanism.decode):
            with pytest.raises(PrivacyError):
                call([report] if call == mechanism.aggregate else report, RANGES)


@every
def test_a_source_without_bits_for_a_client_is_refused(case: str) -> None:
    if case == "none":
        return  # it draws none
    with pytest.raises(PrivacyError, match="no stream for client number 1"):
        CASES[case].encode(torch.zeros(2, DIMENSION), RANGES, streams(0))


@every
def test_what_is_stated_of_it_fits_together(case: str) -> None:
    mechanism = CASES[case]
    release, guarantee = mechanism.release(RANGES), guarantee_of(mechanism, RANGES)
    assert (guarantee.unit, guarantee.units_per_round) == (release.unit, release.units)
    assert release.protected == (guarantee.epsilon < math.inf)
    assert tuple(mechanism.noise(RANGES).largest_std(10).shape) == (2,)
    mean = mechanism.noise(RANGES).mean_variance(torch.zeros(DIMENSION), 10)
    assert tuple(mean.shape) == (DIMENSION,)
    assert bool((mean >= 0).all())


def test_an_author_meets_nine_members_of_which_eight_are_to_be_written() -> None:
    members = {name for name in {*vars(Mechanism), *Mechanism.__annotations__} if not name.startswith("_")}
    assert members == {"name", *Mechanism.__abstractmethods__, "properties"}
    assert members == {"name", "encode", "read", "decode", "aggregate", "noise", "units", "release", "properties"}
