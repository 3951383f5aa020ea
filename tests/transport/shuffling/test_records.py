"""Records: cut and joined without loss, averaged by weight where some are missing, and refused where they cannot be right."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from scipy.stats import chisquare
from torch import Tensor

from grids import each
from ldpfl import ConfigError, LayerRanges, PrivacyError, ProtocolError, SeededStreams
from ldpfl.mechanisms import Duchi, Harmony, Hybrid, Laplace, Mechanism, Piecewise, Reports, create, guarantee_of, payload_bits
from ldpfl.mechanisms.base import PublicState
from ldpfl.mechanisms.reports.units import SampledUnits, Units
from ldpfl.privacy.accounting import account
from ldpfl.privacy.events import RoundEvent
from ldpfl.privacy.ledger import Ledger
from ldpfl.transport.shuffling import Joined, PartialPool, RecordPlan, ReportPool
from ldpfl.transport.shuffling.sampled_records import WEIGHT_TOO_OFTEN

Bytes = NDArray[np.uint8]

SIZES = (7, 13, 1)
RANGES = LayerRanges(torch.tensor([0.0, 0.2, -1.0]), torch.tensor([0.5, 0.25, 2.0]), SIZES)
DIMENSION = sum(SIZES)
CLIENTS = 5
ID = 4
"""Bytes of a record's id, in front."""

DUCHI, LAPLACE, SAMPLED = create("duchi", epsilon=1.0), Laplace(1.0), Laplace(4.0, 5)

MECHANISMS: dict[str, Mechanism] = {
    "duchi": DUCHI,
    "harmony": Harmony(1.0),
    "harmony-1": Harmony(1.0, 1),
    "harmony-3": Harmony(1.0, 3),
    "harmony-13": Harmony(1.0, 13),
    "laplace": LAPLACE,
    "piecewise": Piecewise(2.0),
    "hybrid": Hybrid(0.5),
    "laplace-5-of-d": SAMPLED,
    "piecewise-2-of-d": Piecewise(5.0, "auto"),
    "hybrid-all-of-d": Hybrid(4.0, DIMENSION),
    "duchi-vector": create("duchi-vector", epsilon=1.0),
    "privunit-g": create("privunit-g", epsilon=4.0, norm=1.0, magnitude_share=0.5),
    "full-dp": create("full-dp", epsilon=1.0),
    "none": create("none"),
}
SUMS_OF_INTEGERS = {"duchi", "harmony", "harmony-1", "harmony-3", "harmony-13", "duchi-vector"}
LINKED = (1, 2, 8, 100)

every_mechanism = pytest.mark.parametrize("name", MECHANISMS)


def plan_of(mechanism: Mechanism, linked: int = 1, ranges: LayerRanges = RANGES) -> RecordPlan:
    return RecordPlan(mechanism, ranges, linked, unprotected=True)


def encode(mechanism: Mechanism, clients: int = CLIENTS, seed: int = 0, ranges: LayerRanges = RANGES) -> Reports:
    values = torch.empty(clients, ranges.dimension).uniform_(-0.4, 0.4, generator=torch.Generator().manual_seed(seed))
    reports: Reports = mechanism.encode(values, ranges, SeededStreams.for_clients(seed, 1, range(clients)))
    return reports


def cut(plan: RecordPlan, reports: Reports) -> Bytes:
    """Return all clients' records, (K * m, p), client by client."""
    return np.concatenate([plan.split(payload) for payload in reports.payloads()])


def shuffled(records: Bytes, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).permutation(records)


def payloads(joined: Joined) -> list[bytes]:
    assert isinstance(joined.pool, ReportPool)
    return list(joined.pool.reports.payloads())


def refusals(joined: Joined) -> dict[str, int]:
    return {entry.reason: entry.count for entry in joined.refused}


def flat(joined: Joined) -> list[tuple[bytes, list[bool]]]:
    """Return everything that a pool tells: payloads, and what they are about."""
    if isinstance(joined.pool, PartialPool):
        reported = joined.pool.reported.tolist()
        return [(payload, part.weights.tolist() + reported) for part in joined.pool.parts for payload in part.reports.payloads()]
    return [(payload, []) for payload in payloads(joined)]


# --- cutting ----------------------------------------------------------------------------------------------------------


@every_mechanism
@each("linked", LINKED)
def test_one_clients_records_make_its_payload_again(name: str, linked: int) -> None:
    plan = plan_of(MECHANISMS[name], linked)
    [payload] = encode(MECHANISMS[name], 1).payloads()
    records = plan.split(payload)
    assert records.shape == (plan.records, plan.plaintext_bytes)
    joined = plan.join(shuffled(records), 1)
    assert payloads(joined) == [payload]
    assert joined.refused == ()


@pytest.mark.slow
@pytest.mark.thorough
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    linked=st.integers(1, 30),
    kind=st.sampled_from(["duchi", "harmony", "laplace", "sampled"]),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_any_model_is_cut_without_loss(sizes: list[int], linked: int, kind: str, seed: int, data: st.DataObject) -> None:
    ranges = LayerRanges(torch.tensor(0.0), torch.tensor(0.5), tuple(sizes))
    mechanisms: dict[str, Mechanism] = {
        "duchi": DUCHI,
        "harmony": Harmony(1.0, data.draw(st.none() | st.integers(1, max(sizes)))),
        "laplace": LAPLACE,
        "sampled": Piecewise(4.0, data.draw(st.integers(1, sum(sizes)))),
    }
    plan = plan_of(mechanisms[kind], linked, ranges)
    reports = encode(mechanisms[kind], 3, seed, ranges)
    [first, *_] = reports.payloads()
    assert payloads(plan.join(shuffled(plan.split(first), seed), 1)) == [first]
    joined = plan.join(shuffled(cut(plan, reports), seed), 3)
    assert isinstance(joined.pool, ReportPool)
    expected = mechanisms[kind].aggregate([reports], ranges)
    torch.testing.assert_close(joined.pool.aggregate(mechanisms[kind], ranges).mean, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "mechanism", [DUCHI, Harmony(1.0), LAPLACE, Laplace(1.0, 1)], ids=["duchi", "harmony", "laplace", "laplace-1-of-d"]
)
def test_a_model_of_one_weight_is_cut_too(mechanism: Mechanism) -> None:
    """Its index takes no bits at all."""
    plan = plan_of(mechanism, ranges=LayerRanges(torch.tensor(0.0), torch.tensor(0.5), (1,)))
    reports = encode(mechanism, 3, ranges=plan.ranges)
    assert sorted(payloads(plan.join(cut(plan, reports), 3))) == sorted(reports.payloads())


def test_a_record_holds_its_own_units_and_nothing_of_others() -> None:
    bits = np.array([1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 1, 0, 0, 0, 1, 1, 0, 1, 0, 1], dtype=np.uint8)
    records = plan_of(DUCHI, 5).split(np.packbits(bits, bitorder="little").tobytes())
    assert records[:, :ID].tolist() == [[0, 0, 0, number] for number in range(5)]
    held = np.unpackbits(records[:, ID:], axis=1, bitorder="little")
    assert [row[:5].tolist() for row in held] == [*bits[:20].reshape(4, 5).tolist(), [1, 0, 0, 0, 0]]
    assert not held[:, 5:].any()


@pytest.mark.parametrize("name", ["duchi", "harmony", "harmony-3", "laplace", "laplace-5-of-d"])
def test_a_record_of_one_weight_takes_16_bytes(name: str) -> None:
    assert plan_of(MECHANISMS[name]).plaintext_bytes == 16


@pytest.mark.parametrize(
    ("name", "linked", "records"),
    [("duchi", 1, 21), ("duchi", 4, 6), ("harmony", 1, 3), ("harmony-3", 2, 5), ("laplace", 100, 1), ("laplace-5-of-d", 2, 3)]
    + [(name, 1, 1) for name in ("duchi-vector", "privunit-g", "full-dp", "none")],
)
def test_how_many_records_a_client_sends(name: str, linked: int, records: int) -> None:
    assert plan_of(MECHANISMS[name], linked).records == records


@every_mechanism
def test_units_add_up_to_the_payload_and_to_the_model(name: str) -> None:
    mechanism = MECHANISMS[name]
    units = mechanism.units(RANGES)
    if isinstance(units, Units):
        bits, weights = units.bits_and_weights_per_unit()
        assert bits.sum() == payload_bits(mechanism, RANGES)
        assert weights.sum() == units.dimension == DIMENSION
    else:
        assert isinstance(mechanism, Laplace | Piecewise | Hybrid)
        assert units == SampledUnits(mechanism.sample_count(RANGES) or 0, DIMENSION)


@every_mechanism
def test_units_released_apart_are_those_of_the_guarantee_or_sampled(name: str) -> None:
    """What one epsilon covers is never cut, except sampled weights, each of which is reported at epsilon / k."""
    units, guarantee = MECHANISMS[name].units(RANGES), guarantee_of(MECHANISMS[name], RANGES)
    if isinstance(units, Units) and name != "none":  # which protects nothing, and is kept whole
        assert units.count == guarantee.units_per_round


class KeptWhole(Duchi):
    """Says that its weights are sent apart, but cuts no report."""

    def units(self, ranges: LayerRanges) -> Units:
        return Units.whole(ranges.dimension, ranges.dimension)


def test_a_mechanism_whose_records_hold_more_than_its_release_counts_is_refused() -> None:
    with pytest.raises(PrivacyError, match=r"cuts a report into 1 units .* but its release counts 50"):
        RecordPlan(KeptWhole(1.0), LayerRanges(0.0, 1.0, (50,)), 1)


def test_the_place_of_a_sampled_weight_does_not_show_in_its_record() -> None:
    records = plan_of(SAMPLED, 2).split(next(iter(encode(SAMPLED, 1).payloads())))
    assert records[:, :ID].tolist() == [[0, 0, 0, 2], [0, 0, 0, 2], [0, 0, 0, 1]]


def held(plan: RecordPlan, records: Bytes) -> list[list[tuple[int, float]]]:
    """Return the (weight, value) pairs in each record of sampled weights, as they stand on the wire."""
    found, width = [], (plan.ranges.dimension - 1).bit_length()
    for row in records:
        size = int.from_bytes(row[:ID].tobytes(), "big")
        head = -(-size * width // 8)
        bits = np.unpackbits(row[ID : ID + head], count=size * width, bitorder="little").reshape(size, width)
        values = np.frombuffer(row[ID + head : ID + head + 4 * size].tobytes(), dtype="<f4")
        found.append(list(zip((bits @ (1 << np.arange(width))).tolist(), values.tolist(), strict=True)))
    return found


def weights(pairs: list[tuple[int, float]]) -> tuple[int, ...]:
    return tuple(weight for weight, _ in pairs)


FALSE_ALARM = 1e-6  # of each chi-square test below, were its seed not fixed


@pytest.mark.slow
def test_every_dealing_of_sampled_weights_to_records_is_equally_likely() -> None:
    """All 5! / (2! 2! 1!) = 30 ways to deal one report: this is the law of a client's records, given its report."""
    plan, source = plan_of(SAMPLED, 2), SeededStreams.for_clients(5, 1, [0])
    [payload] = encode(SAMPLED, 1).payloads()
    seen: Counter[tuple[tuple[int, ...], ...]] = Counter()
    for _ in range(600):
        dealt = held(plan, plan.split(payload, source))
        assert all(weights(record) == tuple(sorted(weights(record))) for record in dealt)
        seen[tuple(map(weights, dealt))] += 1
    assert len(seen) == 30
    assert chisquare(list(seen.values())).pvalue > FALSE_ALARM


@pytest.mark.slow
def test_a_record_tells_of_another_one_of_its_client_only_what_it_does_not_hold() -> None:
    """Of 6 weights 4 are sampled: given the first record's 2, the other's are any 2 of the 4 left, each equally likely."""
    mechanism = Laplace(4.0, 4)
    ranges = LayerRanges(torch.tensor(0.0), torch.tensor(0.5), (6,))
    plan, clients = plan_of(mechanism, 2, ranges), 900
    seen: Counter[tuple[tuple[int, ...], ...]] = Counter()
    for row, payload in enumerate(encode(mechanism, clients, ranges=ranges).payloads()):
        seen[tuple(map(weights, held(plan, plan.split(payload, SeededStreams.for_clients(6, 1, [row])))))] += 1
    pairs = list(combinations(range(6), 2))
    possible = [(first, second) for first in pairs for second in pairs if not set(first) & set(second)]
    assert len(possible) == 90
    assert set(seen) <= set(possible)
    assert chisquare([seen[cell] for cell in possible]).pvalue > FALSE_ALARM


def test_records_of_sampled_weights_are_not_linked_by_where_they_begin_and_end() -> None:
    """Twenty records of ten clients each: the one that begins next after another ends is its client's no more often than by chance.

    A binomial share of 4,000 guesses, |z| < 5: a false alarm once in a million seeds. Runs of ascending indices are right in most.
    """
    mechanism, clients = Laplace(1.0, 200), 10
    ranges = LayerRanges(torch.tensor(0.0), torch.tensor(0.5), (20_000,))
    plan, right, guesses = plan_of(mechanism, 10, ranges), 0, 0
    for seed in range(20):
        source = SeededStreams.for_clients(7, 1, [seed])
        own = [held(plan, plan.split(payload, source)) for payload in encode(mechanism, clients, seed, ranges).payloads()]
        ends = np.array([[record[-1][0] for record in records] for records in own])
        begins = np.array([[record[0][0] for record in records] for records in own])
        for number in range(plan.records):
            gap = begins[:, [(number + 1) % plan.records]].T - ends[:, [number]]
            nearest = np.where(gap > 0, gap, gap + ranges.dimension).argmin(axis=1)
            right += int((nearest == np.arange(clients)).sum())
            guesses += clients
    assert guesses == 4_000
    assert abs(right - guesses / clients) < 5 * np.sqrt(guesses / clients * (1 - 1 / clients))


@pytest.mark.parametrize("linked", LINKED)
def test_the_aggregate_does_not_depend_on_how_sampled_weights_were_dealt(linked: int) -> None:
    plan, reports = plan_of(SAMPLED, linked), encode(SAMPLED)
    dealt = [[plan.split(payload, SeededStreams.for_clients(seed, 8, [0])) for payload in reports.payloads()] for seed in (1, 2)]
    assert linked != 2 or not np.array_equal(dealt[0], dealt[1])
    one, other = (plan.join(np.concatenate(records), CLIENTS) for records in dealt)
    assert flat(one) == flat(other)
    whole = [pair for record in held(plan, dealt[0][0]) for pair in record]
    assert payloads(plan.join(dealt[0][0], 1)) == [next(iter(reports.payloads()))]
    assert len({weight for weight, _ in whole}) == len(whole) == 5


def test_by_itself_a_client_deals_differently_each_time() -> None:
    """From 200 of 1,000 weights in records of 10, two equal dealings are out of the question."""
    mechanism, ranges = Laplace(1.0, 200), LayerRanges(torch.tensor(0.0), torch.tensor(0.5), (1_000,))
    plan = plan_of(mechanism, 10, ranges)
    [payload] = encode(mechanism, 1, ranges=ranges).payloads()
    assert len({plan.split(payload).tobytes() for _ in range(5)}) == 5


def test_where_all_weights_are_sampled_records_are_about_the_same_ones_for_all() -> None:
    """No record then tells whose it is: dealt at random, one client's could be found, for they share no weight."""
    mechanism = MECHANISMS["hybrid-all-of-d"]
    plan = plan_of(mechanism, 4)
    about = {tuple(map(weights, held(plan, plan.split(payload)))) for payload in encode(mechanism).payloads()}
    assert about == {tuple(tuple(range(first, min(first + 4, DIMENSION))) for first in range(0, DIMENSION, 4))}


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["laplace-5-of-d", "piecewise-2-of-d", "hybrid-all-of-d"])
def test_no_guarantee_counts_on_records_of_sampled_weights_being_apart(name: str) -> None:
    """The ledger takes a report of sampled weights for one message, however it is cut."""
    mechanism = MECHANISMS[name]
    events = [RoundEvent(1, mechanism.release(RANGES), 100, 100, 1, linked=linked) for linked in LINKED]
    statements = [account(Ledger((event,))) for event in events]
    assert any(row.trust_model == "shuffled" for row in statements[0].rows)
    assert all(statement == statements[0] for statement in statements)
    assert events[0].release.units == 1


@pytest.mark.parametrize("name", ["duchi", "laplace", "laplace-5-of-d", "duchi-vector"])
def test_payloads_of_another_length_are_not_cut(name: str) -> None:
    [payload] = encode(MECHANISMS[name], 1).payloads()
    for wrong in (payload[:-1], payload + b"\0", b""):
        with pytest.raises(ProtocolError, match="bytes, expected"):
            plan_of(MECHANISMS[name]).split(wrong)


# --- joining all ------------------------------------------------------------------------------------------------------


@every_mechanism
@each("linked", LINKED)
def test_the_aggregate_of_mixed_records_is_that_of_the_reports(name: str, linked: int) -> None:
    mechanism, plan = MECHANISMS[name], plan_of(MECHANISMS[name], linked)
    reports = encode(mechanism)
    joined = plan.join(shuffled(cut(plan, reports)), CLIENTS)
    assert joined.refused == ()
    assert isinstance(joined.pool, ReportPool)
    assert joined.pool.clients == CLIENTS
    told = joined.pool.aggregate(mechanism, RANGES)
    expected = mechanism.aggregate([reports], RANGES)
    assert told.reported is None
    if name in SUMS_OF_INTEGERS:
        assert torch.equal(told.mean, expected)
        assert torch.equal(told.variance, mechanism.noise(RANGES).mean_variance(expected, CLIENTS))
    else:
        torch.testing.assert_close(told.mean, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(told.variance, mechanism.noise(RANGES).mean_variance(expected, CLIENTS), rtol=1e-4, atol=1e-6)


@every_mechanism
@each("lost", [0, 3])
def test_the_pool_does_not_depend_on_the_order_of_arrival(name: str, lost: int) -> None:
    plan = plan_of(MECHANISMS[name], 2)
    records = cut(plan, encode(MECHANISMS[name]))[lost:]
    assert flat(plan.join(shuffled(records, 1), CLIENTS)) == flat(plan.join(shuffled(records, 2), CLIENTS))


def test_rows_of_the_pool_are_no_clients() -> None:
    reports = encode(DUCHI)
    assert not set(reports.payloads()) & set(payloads(plan_of(DUCHI).join(cut(plan_of(DUCHI), reports), CLIENTS)))


def test_whole_clients_may_be_missing() -> None:
    for name, mechanism in MECHANISMS.items():
        if name == "hybrid-all-of-d" or not name.endswith("of-d"):  # elsewhere a weight may have been sampled by all that are left
            plan, reports = plan_of(mechanism), encode(mechanism, 3)
            joined = plan.join(shuffled(cut(plan, reports)), CLIENTS)
            assert isinstance(joined.pool, ReportPool)
            assert joined.pool.clients == 3
            torch.testing.assert_close(joined.pool.aggregate(mechanism, RANGES).mean, mechanism.aggregate([reports], RANGES))


# --- joining what is left -----------------------------------------------------------------------------------------------


def mean_by_weight(mechanism: Mechanism, reports: Reports, arrived: NDArray[np.bool_]) -> tuple[Tensor, Tensor]:
    """Return the mean (d,) of the estimates whose (client, weight) in ``arrived`` is set, and how many these are."""
    estimates, kept = mechanism.decode(reports, RANGES).double(), torch.from_numpy(arrived)
    counts = kept.sum(dim=0)
    return (estimates * kept).sum(dim=0) / counts.clamp_min(1), counts


@given(
    name=st.sampled_from([name for name in MECHANISMS if not name.endswith("of-d")]),
    linked=st.sampled_from([1, 2, 3, 8]),
    seed=st.integers(0, 2**32),
    share=st.floats(0.05, 1.0),
)
@pytest.mark.slow
def test_each_weight_is_averaged_over_the_reports_that_arrived(name: str, linked: int, seed: int, share: float) -> None:
    mechanism, plan, reports = MECHANISMS[name], plan_of(MECHANISMS[name], linked), encode(MECHANISMS[name], seed=seed)
    arrived = np.random.default_rng(seed).random((CLIENTS, plan.records)) < share
    units = mechanism.units(RANGES)
    assert isinstance(units, Units)
    weights = np.add.reduceat(units.bits_and_weights_per_unit()[1], np.arange(0, units.count, linked))
    expected, counts = mean_by_weight(mechanism, reports, np.repeat(arrived, weights, axis=1))
    joined = plan.join(shuffled(cut(plan, reports)[arrived.ravel()], seed), CLIENTS)
    assert joined.refused == ()
    if not arrived.any():
        assert joined.pool is None
        return
    assert joined.pool is not None
    told = joined.pool.aggregate(mechanism, RANGES)
    reported = counts > 0
    assert torch.equal(torch.ones(DIMENSION, dtype=torch.bool) if told.reported is None else told.reported, reported)
    torch.testing.assert_close(told.mean[reported].double(), expected[reported], rtol=1e-5, atol=1e-5)
    assert not told.mean[~reported].any()
    assert not told.variance[~reported].any()
    assert joined.pool.clients == counts[reported].min()
    if isinstance(joined.pool, PartialPool):
        assert torch.equal(joined.pool.counts, counts)
        for count in set(counts.tolist()):
            if count and name in ("duchi", "laplace", "harmony-3"):
                own = counts == count
                wanted = mechanism.noise(RANGES).mean_variance(told.mean, count)
                torch.testing.assert_close(told.variance[own], wanted[own], rtol=1e-5, atol=1e-6)


@given(
    name=st.sampled_from([name for name in MECHANISMS if name.endswith("of-d")]),
    linked=st.sampled_from([1, 2, 3, 8]),
    seed=st.integers(0, 2**32),
    share=st.floats(0.05, 1.0),
)
@pytest.mark.slow
@pytest.mark.thorough
def test_sampled_weights_are_averaged_over_all_that_arrived(name: str, linked: int, seed: int, share: float) -> None:
    mechanism = MECHANISMS[name]
    assert isinstance(mechanism, Laplace | Piecewise | Hybrid)
    plan = plan_of(mechanism, linked)
    records = cut(plan, encode(mechanism, seed=seed))
    arrived = np.random.default_rng(seed).random(len(records)) < share
    joined = plan.join(shuffled(records[arrived], seed), CLIENTS)
    assert joined.refused == ()
    if not arrived.any():
        assert joined.pool is None
        return
    pairs = [pair for record in held(plan, records[arrived]) for pair in record]
    center, radius = RANGES.expand()
    total = torch.zeros(DIMENSION, dtype=torch.float64)
    for weight, value in pairs:
        total[weight] += value
    assert joined.pool is not None
    told = joined.pool.aggregate(mechanism, RANGES)
    assert told.reported is None or bool(told.reported.all())
    torch.testing.assert_close(told.mean.double(), center + radius * total * DIMENSION / len(pairs), rtol=1e-5, atol=1e-5)
    assert 1 <= joined.pool.clients <= CLIENTS


def test_nothing_at_all_is_no_pool() -> None:
    for mechanism in (DUCHI, SAMPLED):
        plan = plan_of(mechanism)
        assert plan.join(np.zeros((0, plan.plaintext_bytes), dtype=np.uint8), 3) == Joined(None, ())


# --- refusals -----------------------------------------------------------------------------------------------------------


def expect_one_refused(mechanism: Mechanism, bad: Bytes, reason: str, linked: int = 1) -> None:
    """Join honest records with a false one in front, and check that it alone is left out."""
    plan, reports = plan_of(mechanism, linked), encode(mechanism)
    honest = cut(plan, reports)
    joined = plan.join(np.concatenate([bad, honest]), CLIENTS + 1)
    [(told, count)] = refusals(joined).items()
    assert reason in told
    assert count == len(bad)
    assert flat(joined) == flat(plan.join(honest, CLIENTS + 1))


def record(mechanism: Mechanism, number: int, body: bytes, linked: int = 1) -> Bytes:
    size = plan_of(mechanism, linked).plaintext_bytes
    return np.frombuffer((number.to_bytes(ID, "big") + body).ljust(size, b"\0"), dtype=np.uint8).reshape(1, -1)


@pytest.mark.parametrize("number", [21, 22, 2**31, 2**32 - 1])
def test_ids_outside_the_model_are_refused(number: int) -> None:
    expect_one_refused(DUCHI, record(DUCHI, number, b"\1"), "record id that this round's plan does not have")
    expect_one_refused(SAMPLED, record(SAMPLED, number, bytes(5)), "record id that this round's plan does not have")


@pytest.mark.parametrize(
    ("mechanism", "body", "linked"),
    [
        (DUCHI, b"\2", 1),
        (DUCHI, b"\1" + bytes(10) + b"\1", 1),
        (DUCHI, b"\377\1", 8),
        (LAPLACE, np.float32(0.5).tobytes() + b"\1", 1),
        (Harmony(1.0, 3), b"\10", 1),
        (SAMPLED, b"\40" + np.float32(0.5).tobytes(), 1),
        (SAMPLED, b"\1" + np.float32(0.5).tobytes() + b"\1", 1),
    ],
)
def test_padding_must_be_zero(mechanism: Mechanism, body: bytes, linked: int) -> None:
    number = 1 if mechanism is SAMPLED else 0
    expect_one_refused(mechanism, record(mechanism, number, body, linked), "padding that is not zero", linked)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
@pytest.mark.parametrize("linked", [1, 3])
def test_values_that_no_client_can_send_are_refused(value: float, linked: int) -> None:
    body = np.array([0.5] * (linked - 1) + [value], dtype="<f4").tobytes()
    for number in range(DIMENSION // linked):
        expect_one_refused(LAPLACE, record(LAPLACE, number, body, linked), "no client can send", linked)
    expect_one_refused(SAMPLED, record(SAMPLED, 1, b"\3" + np.float32(value).tobytes()), "no client can send")


def test_an_index_outside_its_group_is_refused() -> None:
    """Groups of 3 have two bits for the place, of which 3 is none; the last group of each layer has 1 weight."""
    expect_one_refused(Harmony(1.0, 3), record(Harmony(1.0, 3), 0, b"\3"), "no client can send")
    expect_one_refused(Harmony(1.0, 3), record(Harmony(1.0, 3), 3, b"\7"), "no client can send")


def test_sampled_weights_must_exist_and_ascend() -> None:
    value = np.float32(0.5).tobytes()
    expect_one_refused(SAMPLED, record(SAMPLED, 1, b"\25" + value), "no client can send")  # 21 of 0..20
    for index in (b"\143\0", b"\103\0"):  # (3, 3), (3, 2) in five bits each
        expect_one_refused(SAMPLED, record(SAMPLED, 2, index + 2 * value, 2), "no client can send", 2)


def test_a_false_vector_costs_that_vector_alone() -> None:
    for name in ("privunit-g", "full-dp"):
        [body] = encode(MECHANISMS[name], 1, seed=9).payloads()
        expect_one_refused(MECHANISMS[name], record(MECHANISMS[name], 0, np.float32(np.nan).tobytes() + body[4:]), "no client can send")


def test_many_false_records_among_many_weights() -> None:
    records = cut(plan_of(LAPLACE), encode(LAPLACE))
    false = np.random.default_rng(3).random(len(records)) < 0.4
    records[false, ID : ID + 4] = 255  # NaN
    joined = plan_of(LAPLACE).join(records, CLIENTS)
    assert list(refusals(joined).values()) == [false.sum()]
    assert flat(joined) == flat(plan_of(LAPLACE).join(records[~false], CLIENTS))


def test_an_id_that_came_too_often_is_left_out_for_the_round() -> None:
    reports = encode(DUCHI)
    honest = cut(plan_of(DUCHI), reports)
    joined = plan_of(DUCHI).join(np.concatenate([honest, honest[:1], honest[3:4], honest[3:4]]), CLIENTS)
    [(reason, count)] = refusals(joined).items()
    assert "more often than there are uploads" in reason
    assert count == 2 * CLIENTS + 3
    assert isinstance(joined.pool, PartialPool)
    told = joined.pool.aggregate(DUCHI, RANGES)
    assert joined.pool.reported.tolist() == [j not in (0, 3) for j in range(DIMENSION)]
    assert torch.equal(told.mean, DUCHI.aggregate([reports], RANGES) * joined.pool.reported)
    assert joined.pool.counts.tolist() == [0 if j in (0, 3) else CLIENTS for j in range(DIMENSION)]


def test_an_id_that_came_once_for_each_upload_is_kept_whoever_sent_it() -> None:
    honest = cut(plan_of(DUCHI), encode(DUCHI))
    joined = plan_of(DUCHI).join(np.concatenate([honest[1:], honest[1:2]]), CLIENTS + 1)
    assert joined.refused == ()
    assert joined.pool is not None
    assert joined.pool.clients == CLIENTS - 1


def test_a_sampled_weight_that_came_too_often_is_left_out() -> None:
    mechanism = Hybrid(4.0, DIMENSION)
    plan = plan_of(mechanism)
    honest = cut(plan, encode(mechanism))
    whole = plan.join(honest, CLIENTS).pool
    assert whole is not None
    joined = plan.join(np.concatenate([honest, honest[2:3]]), CLIENTS)
    assert refusals(joined) == {WEIGHT_TOO_OFTEN: CLIENTS + 1}
    assert isinstance(joined.pool, PartialPool)
    assert joined.pool.reported.tolist() == [j != 2 for j in range(DIMENSION)]
    of_two_weights = cut(plan_of(mechanism, 2), encode(mechanism))
    twice = np.concatenate([of_two_weights, of_two_weights[1:2]])
    assert refusals(plan_of(mechanism, 2).join(twice, CLIENTS)) == {WEIGHT_TOO_OFTEN: CLIENTS + 1}, "records are counted, not values"
    told, center = joined.pool.aggregate(mechanism, RANGES).mean, RANGES.expand()[0]
    expected = center + (whole.aggregate(mechanism, RANGES).mean - center) * len(honest) / (len(honest) + 1)
    torch.testing.assert_close(told[told != 0].double(), expected[joined.pool.reported], rtol=1e-5, atol=1e-6)


def test_refusals_tell_nothing_of_the_content() -> None:
    seen = set()
    for value in (1e6, 2e6):
        seen |= {entry.reason for entry in plan_of(LAPLACE).join(record(LAPLACE, 0, np.float32(value).tobytes()), 1).refused}
    assert len(seen) == 1
    assert not any(character.isdigit() for character in seen.pop())


@pytest.mark.parametrize("shape", [(3, 15), (3, 17), (16,)])
def test_records_of_another_plan_are_not_joined(shape: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError, match="cut by another plan"):
        plan_of(DUCHI).join(np.zeros(shape, dtype=np.uint8), 1)


def test_no_uploads_cannot_have_records() -> None:
    with pytest.raises(ProtocolError, match="expected at least 1"):
        plan_of(DUCHI).join(np.zeros((1, 16), dtype=np.uint8), 0)


@given(name=st.sampled_from(list(MECHANISMS)), linked=st.sampled_from(LINKED), rows=st.integers(1, 40), seed=st.integers(0, 2**32))
@pytest.mark.slow
def test_noise_in_place_of_records_is_refused_or_averaged_but_breaks_nothing(name: str, linked: int, rows: int, seed: int) -> None:
    mechanism, plan = MECHANISMS[name], plan_of(MECHANISMS[name], linked)
    generator = np.random.default_rng(seed)
    noise = generator.integers(0, 256, (rows, plan.plaintext_bytes), dtype=np.uint8)
    noise[:, : ID - 1] = 0
    noise[:, ID - 1] %= plan.records + 2
    joined = plan.join(np.concatenate([noise, cut(plan, encode(mechanism))]), rows + CLIENTS)
    assert sum(entry.count for entry in joined.refused) <= rows
    assert joined.pool is not None
    assert bool(torch.isfinite(joined.pool.aggregate(mechanism, RANGES).mean).all())


# --- the plan -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("linked", [0, -1, 1.0, True, "1", None])
def test_parameters_per_report_is_a_positive_whole_number(linked: Any) -> None:
    with pytest.raises(ConfigError, match="linked"):
        RecordPlan(DUCHI, RANGES, linked)


def test_a_mechanism_that_protects_nothing_needs_asking_for() -> None:
    with pytest.raises(PrivacyError, match="guarantees nothing"):
        RecordPlan(create("none"), RANGES)
    assert RecordPlan(create("none"), RANGES, unprotected=True).records == 1


def test_the_fingerprint_differs_with_everything_that_both_sides_must_share() -> None:
    up = torch.nextafter(RANGES.radius, torch.full_like(RANGES.radius, 9.0))
    plans = [
        plan_of(DUCHI),
        plan_of(create("duchi", epsilon=1.0 + 2**-52)),
        plan_of(DUCHI, 2),
        plan_of(DUCHI, ranges=LayerRanges(RANGES.center, up, RANGES.sizes)),
        plan_of(DUCHI, ranges=LayerRanges(RANGES.center + 2**-40, RANGES.radius, RANGES.sizes)),
        plan_of(DUCHI, ranges=LayerRanges(RANGES.center, RANGES.radius, (13, 7, 1))),
        *(plan_of(mechanism) for name, mechanism in MECHANISMS.items() if name != "duchi"),
        plan_of(create("full-dp", epsilon=1.0, norm=2.0)),
    ]
    fingerprints = {plan.fingerprint for plan in plans}
    assert len(fingerprints) == len(plans)
    assert {len(entry) for entry in fingerprints} == {32}


def test_the_fingerprint_is_the_same_on_every_machine_and_in_later_versions() -> None:
    assert plan_of(DUCHI).fingerprint.hex() == plan_of(create("duchi", epsilon=1)).fingerprint.hex()
    assert plan_of(DUCHI).fingerprint.hex() == "ebffc0902edc1e3cd49589e11cccab86bc5793555c3eb675815d12479a1dbeaa"


def test_what_only_one_side_knows_is_not_in_the_fingerprint() -> None:
    full: Any = create("full-dp", epsilon=1.0)
    later = full.in_round(PublicState(3, torch.ones(DIMENSION), None, SIZES)).for_clients({"samples": torch.ones(1, dtype=torch.int64)})
    assert plan_of(later).fingerprint == plan_of(full).fingerprint


# --- units --------------------------------------------------------------------------------------------------------------


def test_equal_units_that_are_stated_once_are_those_that_are_stated_one_by_one() -> None:
    stated = Units(np.array([3, 1, 2]), np.array([5, 1, 4]), np.array([2, 0, 1]))
    bits, weights = stated.bits_and_weights_per_unit()
    assert (bits.tolist(), weights.tolist()) == ([3, 3, 2], [5, 5, 4])
    assert (stated.count, stated.payload_bits, stated.dimension) == (3, 8, 14)


def test_a_very_large_model_takes_no_memory_to_say_how_long_its_reports_are() -> None:
    """A few bytes of a server can claim one, and a node asks for the length before it believes them."""
    claimed = LayerRanges(0.0, 1.0, (2**40, 2**31))
    assert payload_bits(MECHANISMS["duchi"], claimed) == 2**40 + 2**31
    assert payload_bits(Harmony(1.0, 2**31), claimed) == (2**9 + 1) * 32


@pytest.mark.parametrize(("bits", "weights"), [([], []), ([1, 1], [1]), ([0], [1]), ([1], [0]), ([[1]], [[1]])])
def test_units_without_bits_or_weights_are_refused(bits: Any, weights: Any) -> None:
    with pytest.raises(ConfigError, match=r"a report.s units|each unit of a report"):
        Units(np.array(bits, dtype=np.int64), np.array(weights, dtype=np.int64))


# --- joining as records come ------------------------------------------------------------------------------------------


def in_batches(plan: RecordPlan, records: Bytes, uploads: int, size: int) -> Joined:
    joining = plan.joining()
    for first in range(0, len(records), size):
        joining.add(records[first : first + size])
    return joining.joined(uploads)


def aggregated(joined: Joined, mechanism: Mechanism) -> tuple[bytes, ...]:
    if joined.pool is None:
        return ()
    told = joined.pool.aggregate(mechanism, RANGES)
    return (told.mean.numpy().tobytes(), told.variance.numpy().tobytes(), b"" if told.reported is None else told.reported.numpy().tobytes())


@pytest.mark.thorough_except("none", "duchi-vector", "harmony", "privunit-g")
@every_mechanism
@each("linked", LINKED)
@each("lost", [0, 3])
def test_records_that_come_in_batches_amount_to_what_all_at_once_do(name: str, linked: int, lost: int) -> None:
    mechanism, plan = MECHANISMS[name], plan_of(MECHANISMS[name], linked)
    records = shuffled(cut(plan, encode(mechanism)))[lost:]
    at_once = plan.join(records, CLIENTS)
    for size in (1, 3, 1000):
        batched = in_batches(plan, records, CLIENTS, size)
        assert batched.refused == at_once.refused
        assert type(batched.pool) is type(at_once.pool)
        if at_once.pool is None:
            continue
        assert batched.pool is not None
        assert batched.pool.clients == at_once.pool.clients
        if name in SUMS_OF_INTEGERS | {"laplace"}:  # sums of points of a binary lattice are exact
            assert aggregated(batched, mechanism) == aggregated(at_once, mechanism)
        else:
            told, expected = batched.pool.aggregate(mechanism, RANGES), at_once.pool.aggregate(mechanism, RANGES)
            torch.testing.assert_close(told.mean, expected.mean, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(told.variance, expected.variance, rtol=1e-4, atol=1e-6)


@every_mechanism
def test_how_records_are_batched_changes_nothing(name: str) -> None:
    mechanism, plan = MECHANISMS[name], plan_of(MECHANISMS[name], 2)
    records = shuffled(cut(plan, encode(mechanism)))
    assert len({aggregated(in_batches(plan, records, CLIENTS, size), mechanism) for size in (1, 2, 7, 1000)}) == 1


@pytest.mark.thorough_except("duchi-vector", "none", "harmony-13")
@every_mechanism
@each("linked", [1, 3, 100])
def test_batches_refuse_what_all_at_once_refuse(name: str, linked: int) -> None:
    """Bytes are altered at random, and one record comes too often: each fault is refused for the same reason, as often."""
    mechanism, plan, draws = MECHANISMS[name], plan_of(MECHANISMS[name], linked), np.random.default_rng(7)
    for _ in range(10):
        records = cut(plan, encode(mechanism))
        for row in draws.choice(len(records), size=len(records) // 3 + 1, replace=False):
            records[row, draws.integers(plan.plaintext_bytes)] ^= draws.integers(1, 256)
        records = shuffled(np.concatenate([records, np.repeat(records[:1], CLIENTS, axis=0)]))
        at_once, batched = plan.join(records, CLIENTS), in_batches(plan, records, CLIENTS, 5)
        assert refusals(batched) == refusals(at_once)
        if isinstance(at_once.pool, PartialPool):
            assert isinstance(batched.pool, PartialPool)
            assert torch.equal(batched.pool.counts, at_once.pool.counts)


@pytest.mark.thorough
def test_sums_alone_are_kept_of_records_that_add_up() -> None:
    tracemalloc.start()
    try:
        peaks = []
        for clients in (10, 1000):
            plan = plan_of(LAPLACE, 100, LayerRanges(torch.tensor(0.0), torch.tensor(0.1), (1000,)))
            record, joining = plan.split(bytes(4000)), plan.joining()
            tracemalloc.reset_peak()
            for _ in range(clients):
                joining.add(record.copy())
            assert joining.joined(clients).pool is not None
            peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 100_000  # 990 more clients send 4 MB


def test_batches_of_another_plan_or_of_no_uploads_are_not_joined() -> None:
    joining = plan_of(DUCHI).joining()
    with pytest.raises(ProtocolError, match="cut by another plan"):
        joining.add(np.zeros((1, 17), dtype=np.uint8))
    with pytest.raises(ProtocolError, match="0 uploads"):
        joining.joined(0)
