"""Gaussian noise by a schedule as a mechanism: its noise against the closed form, what leaves, and what is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace

import numpy as np
import pytest
import torch
from gaussian_states import CLIPPED, SIZES, STEPS, THEOREM, public_state
from hypothesis import given, settings, strategies as st
from scipy import stats
from torch import Tensor

from grids import each
from ldpfl import ConfigError, LayerRanges, PrivacyError, SecureSource, SeededStreams, mechanisms
from ldpfl.errors import ProtocolError
from ldpfl.mechanisms import Gaussian, VectorReports, guarantee_of, payload_bits
from ldpfl.mechanisms.base import PublicState
from ldpfl.mechanisms.gaussian import (
    AdapLDP,
    ClientState,
    Dpa,
    FullDP,
    LadpPaper,
    LadpSound,
    LayerSelection,
    NbAFL,
    NoiseSchedule,
    NoisyReports,
    SensitiveDP,
    TimeVarying,
)
from ldpfl.privacy import GaussianRelease, UnprotectedRelease
from ldpfl.privacy.accountants.gaussian import gaussian_epsilon, gaussian_mu
from ldpfl.transport.shuffling import mix

DIMENSION = sum(SIZES)
RANGES = LayerRanges(torch.zeros(len(SIZES)), torch.ones(len(SIZES)), SIZES)
FULL = Gaussian(FullDP(2.0, 1e-5, CLIPPED))

SOUND: tuple[NoiseSchedule, ...] = (
    FullDP(2.0, 1e-5, CLIPPED),
    NbAFL(0.5, 1e-5, norm=2.0, samples=10),
    TimeVarying(4.0, 1e-5, CLIPPED, rounds=10, ratio=0.9),
    Dpa(4.0, 1e-5, CLIPPED, rounds=10, contraction=0.8),
    SensitiveDP(2.0, 1e-5, CLIPPED, lam=0.0, clip_to_estimate=True),
    LadpSound(2.0, 1e-5, 0.5),
)
UNSOUND: tuple[NoiseSchedule, ...] = (
    FullDP(2.0, 1e-5, THEOREM),
    TimeVarying(4.0, 1e-5, THEOREM, rounds=10, ratio=0.9),
    SensitiveDP(2.0, 1e-5, CLIPPED, lam=0.5),
    AdapLDP(1.0, 1e-5, STEPS),
    LadpPaper(2.0, 1e-5, CLIPPED, selection=LayerSelection("top_fraction", 0.5)),
)


def updates(clients: int, length: float = 0.1, *, seed: int = 0) -> Tensor:
    """Updates (clients, d) of L2 norm ``length``."""
    values = torch.randn(clients, DIMENSION, generator=torch.Generator().manual_seed(seed))
    norms = values.norm(dim=1, keepdim=True)
    return values.mul_(length).div_(norms)


def streams(clients: int, *, first: int = 0) -> SeededStreams:
    return SeededStreams.for_clients(7, 2, range(first, first + clients))


def by_name(schedule: NoiseSchedule) -> str:
    return schedule.name


# --- the noise ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [FullDP(2.0, 1e-5, CLIPPED), LadpSound(2.0, 1e-5, 0.5, "kl")], ids=by_name)
def test_noise_has_mean_zero_and_the_stated_deviation_in_each_layer(schedule: NoiseSchedule) -> None:
    """Two z-tests a layer with |z| < 4.5, eight a schedule: a false alarm once in 9,000 seeds; the seed is fixed."""
    public, clients = public_state(2, step=1e-2), 400
    mechanism, values = Gaussian(schedule).in_round(public), updates(clients, 1e-3)
    reports = mechanism.encode(values, RANGES, streams(clients))
    noise = reports.values.double() - values.double()
    variance = mechanism.noise(RANGES).variance(values).double()
    stated = torch.from_numpy(mechanism.noise(RANGES).largest_std(1))
    if isinstance(schedule, LadpSound):
        assert len({round(float(deviation), 9) for deviation in stated}) > 1
    for layer, part in enumerate(noise.split_with_sizes(list(SIZES), dim=1)):
        count, sigma = part.numel(), float(stated[layer])
        assert abs(float(part.mean())) < 4.5 * sigma / math.sqrt(count)
        assert abs(float(part.square().mean()) / sigma**2 - 1) < 4.5 * math.sqrt(2 / count)
    for column, layer in ((0, 0), (DIMENSION - 1, len(SIZES) - 1)):
        assert float(variance[0, column]) == pytest.approx(float(stated[layer]) ** 2, rel=1e-6)
    assert torch.equal(reports.sigma, stated.repeat(clients, 1))


def test_noise_is_normal() -> None:
    """A Kolmogorov-Smirnov test at 1e-4, fixed seed."""
    noise = FULL.encode(torch.zeros(100, DIMENSION), RANGES, streams(100)).values.double()
    sigma = float(FULL.noise(RANGES).largest_std(1)[0])
    assert stats.kstest((noise / sigma).flatten().numpy(), "norm").pvalue > 1e-4


def test_vectors_inside_the_norm_are_not_changed_by_a_bit() -> None:
    """The noise of a client's stream is the same whatever it holds: without it, the update itself is left, up to one rounding."""
    values = updates(3, 0.499)
    noise = FULL.encode(torch.zeros_like(values), RANGES, streams(3)).values
    sent = FULL.encode(values, RANGES, streams(3)).values
    sigma = float(FULL.noise(RANGES).largest_std(1)[0])
    # One step of the lattice, and the rounding of both to float32.
    assert float((sent.double() - noise.double() - values.double()).abs().max()) < sigma * (2.0**-20 + 8 * 2.0**-23)
    public = PublicState(1, torch.zeros(DIMENSION), None, SIZES)
    assert torch.equal(FULL.schedule.clipped_updates(public, ClientState(values, torch.ones(3), torch.zeros(3), {})), values)


@pytest.mark.parametrize("length", [0.51, 5.0, 1e20, 1e37])
def test_what_is_noised_is_never_longer_than_the_norm(length: float) -> None:
    """In lattice points, also where the factor that shortens an update is a float32 without digits left."""
    values, sigma = updates(3, length), float(FULL.noise(RANGES).largest_std(1)[0])
    sent, noise = (FULL.encode(rows, RANGES, streams(3)).values.double() for rows in (values, torch.zeros_like(values)))
    # float32 rounds both sums: by 2^-24 of some standard deviations, each.
    assert float((sent - noise).norm(dim=1).max()) <= 0.5 + DIMENSION**0.5 * 8 * sigma * 2.0**-23


class Unclipped(FullDP):
    """Forgets to clip."""

    def clipped_updates(self, public: PublicState, clients: ClientState) -> Tensor:
        return clients.trained.clone()


def test_an_update_that_was_not_shortened_is_not_sent() -> None:
    mechanism, values = Gaussian(Unclipped(FULL.schedule.epsilon, FULL.schedule.delta, CLIPPED)), torch.zeros(3, DIMENSION)
    values[0, 1], values[1, -2] = 0.5, -0.5  # just as long as is allowed
    mechanism.encode(values, RANGES, streams(3))
    step = float(FULL.noise(RANGES).largest_std(1)[0]) * 2.0**-20
    for excess in (2 * step, 0.5, 1e30):
        values[2, 0] = 0.5 + excess
        with pytest.raises(PrivacyError, match="longer than its clipping norm"):
            mechanism.encode(values, RANGES, streams(3))


@pytest.mark.parametrize("length", [0.0, 0.5])
def test_an_epsilon_without_room_on_the_lattice_is_refused_whatever_the_update(length: float) -> None:
    with pytest.raises(PrivacyError, match="the noise is too fine for updates"):
        Gaussian(FullDP(1e7, 1e-5, CLIPPED)).encode(updates(1, length), RANGES, streams(1))


@pytest.mark.parametrize("length", [0.51, 5.0, 1e20])
def test_longer_vectors_are_clipped_to_the_norm(length: float) -> None:
    values = updates(3, length)
    noise = FULL.encode(torch.zeros_like(values), RANGES, streams(3)).values.double()
    kept = FULL.encode(values, RANGES, streams(3)).values.double() - noise
    torch.testing.assert_close(kept, updates(3, 0.5).double(), rtol=0, atol=1e-5)


def test_the_norm_of_the_noise_is_told_beside_it() -> None:
    values = torch.zeros(4, DIMENSION)
    reports = FULL.encode(values, RANGES, streams(4))
    torch.testing.assert_close(reports.noise_norm, reports.values.double().norm(dim=1), rtol=1e-6, atol=0)


def test_what_clients_hold_is_not_written_to() -> None:
    values = updates(3, 5.0)
    kept = values.clone()
    for schedule in (*SOUND, *UNSOUND):
        Gaussian(schedule).in_round(public_state(1)).encode(values, RANGES, streams(3))
        assert torch.equal(values, kept), schedule.name


def test_the_center_of_the_ranges_is_taken_off_and_put_back() -> None:
    center = torch.tensor([0.5, -0.25, 1.0, 2.0])
    moved = LayerRanges(center, RANGES.radius, SIZES)
    offset = center.repeat_interleave(torch.tensor(SIZES))
    values = torch.round(updates(3, 0.3) * 2**20) / 2**20  # exact beside the center
    sent = FULL.encode(values, RANGES, streams(3))
    shifted = FULL.encode(values + offset, moved, streams(3))
    assert torch.equal(shifted.values, sent.values)
    assert torch.equal(FULL.decode(shifted, moved), (sent.values.double() + offset.double()).float())
    torch.testing.assert_close(FULL.aggregate([shifted], moved), FULL.aggregate([sent], RANGES) + offset)


# --- streams and batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [*SOUND, *UNSOUND], ids=by_name)
def test_a_client_sends_the_same_bits_whoever_is_handled_with_it(schedule: NoiseSchedule) -> None:
    """In its first and in a later round, in which schedules with a memory use it."""
    for public in (public_state(1), public_state(2)):
        mechanism, values = Gaussian(schedule).in_round(public), updates(5, 0.4)
        facts = mechanism.first_facts(torch.tensor([10, 20, 30, 40, 50]), DIMENSION)
        if public.previous is not None:
            facts["joined"] = torch.tensor([1, 0, 1, 2, 1])
        together = mechanism.for_clients(facts).encode(values, RANGES, streams(5))
        for row in range(5):
            own = mechanism.for_clients({name: rows[row : row + 1] for name, rows in facts.items()})
            alone = own.encode(values[row : row + 1], RANGES, streams(1, first=row))
            assert torch.equal(alone.values[0], together.values[row])
            assert torch.equal(alone.sigma[0], together.sigma[row])
            assert torch.equal(alone.noise_norm[0], together.noise_norm[row])


def test_clients_draw_different_noise() -> None:
    noise = FULL.encode(torch.zeros(5, DIMENSION), RANGES, streams(5)).values
    assert len({row.numpy().tobytes() for row in noise}) == 5
    again = FULL.encode(torch.zeros(5, DIMENSION), RANGES, SeededStreams.for_clients(7, 3, range(5))).values
    assert not bool((noise == again).any(dim=1).all())


def test_the_secure_source_works() -> None:
    """Unseeded. The deviation of 3,500 values to 10 %: eight standard deviations, a false alarm once in 1e15 runs."""
    reports = FULL.encode(torch.zeros(10, DIMENSION), RANGES, SecureSource())
    sigma = float(FULL.noise(RANGES).largest_std(1)[0])
    assert float(reports.values.std()) == pytest.approx(sigma, rel=0.1)
    assert not torch.equal(reports.values, FULL.encode(torch.zeros(10, DIMENSION), RANGES, SecureSource()).values)


def test_the_variance_of_the_mean_is_that_of_one_over_the_clients() -> None:
    sigma = float(FULL.noise(RANGES).largest_std(1)[0])
    assert FULL.noise(RANGES).largest_std(9).tolist() == pytest.approx([sigma / 3] * len(SIZES))
    assert float(FULL.noise(RANGES).mean_variance(torch.zeros(DIMENSION), 9).max()) == pytest.approx(sigma**2 / 9, rel=1e-6)
    for schedule in UNSOUND:
        if schedule.data_dependent:  # the server cannot know it, and must not be told
            assert Gaussian(schedule).noise(RANGES).largest_std(9).tolist() == [math.inf] * len(SIZES)
            assert bool(torch.isinf(Gaussian(schedule).noise(RANGES).mean_variance(torch.zeros(DIMENSION), 9)).all())


# --- the wire and the shuffler ------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 4), st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_reports_survive_the_wire(dimension: int, clients: int, seed: int) -> None:
    ranges = LayerRanges(torch.zeros(1), torch.ones(1), (dimension,))
    values = torch.randn(clients, dimension, generator=torch.Generator().manual_seed(seed))
    sent = FULL.encode(values, ranges, SeededStreams.for_clients(seed, 0, range(clients)))
    payloads = list(sent.payloads())
    received = FULL.read(payloads, ranges)
    assert type(received) is VectorReports
    assert torch.equal(received.values, sent.values)
    assert {8 * len(payload) for payload in payloads} == {8 * sent.bytes_per_client} == {payload_bits(FULL, ranges)}
    assert b"".join(payloads) == sent.values.numpy().tobytes()  # and nothing of the noise's size


@pytest.mark.parametrize(
    "payload",
    [b"", b"\x00" * 4, b"\x00" * 9, np.array([1, np.nan], dtype=np.float32).tobytes(), np.array([np.inf, 1], dtype=np.float32).tobytes()],
    ids=["empty", "short", "odd", "NaN", "infinity"],
)
def test_malformed_payloads_are_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        FULL.read([payload], LayerRanges(torch.zeros(1), torch.ones(1), (2,)))


@pytest.mark.parametrize("schedule", [SOUND[0], UNSOUND[-1]], ids=by_name)
def test_the_pool_knows_nothing_but_what_was_sent(schedule: NoiseSchedule) -> None:
    """How much noise there was can depend on the data: the server's side has no attribute that tells it."""
    mechanism = Gaussian(schedule).in_round(public_state(2))
    batches = [mechanism.encode(updates(3, seed=seed), RANGES, streams(3, first=3 * seed)) for seed in (0, 1)]
    pool = mix(batches, np.random.default_rng(0))
    assert type(pool.reports) is VectorReports
    assert [entry.name for entry in fields(pool.reports)] == ["values"]
    assert set(vars(pool.reports)) == {"values"}
    hidden = {entry.name for entry in fields(NoisyReports)} - {"values"}
    assert hidden == {"sigma", "noise_norm"}
    assert not any(hasattr(pool, name) or hasattr(pool.reports, name) for name in hidden)
    sent = {row.numpy().tobytes() for batch in batches for row in batch.values}
    assert {row.numpy().tobytes() for row in pool.reports.values} == sent


def test_the_pool_comes_in_any_order() -> None:
    """Chi-squared over the 24 orders of four clients at 1e-4; fixed seed."""
    batches = [FULL.encode(updates(2, seed=seed), RANGES, streams(2, first=2 * seed)) for seed in (0, 1)]
    places = {row.numpy().tobytes(): place for place, row in enumerate(torch.cat([batch.values for batch in batches]))}
    generator, orders = np.random.default_rng(1), []
    for _ in range(1200):
        reports = mix(batches, generator).reports
        assert isinstance(reports, VectorReports)
        orders.append(tuple(places[row.numpy().tobytes()] for row in reports.values))
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-4


# --- what is refused and what is stated ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [*SOUND, *UNSOUND], ids=by_name)
@each("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_no_numbers_stop_the_report(schedule: NoiseSchedule, bad: float) -> None:
    values = updates(3)
    values[1, 7] = bad
    values[0, 0] = 0.7654321
    with pytest.raises(PrivacyError, match="nothing was sent") as caught:
        Gaussian(schedule).encode(values, RANGES, streams(3))
    assert "0.765" not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "values",
    [updates(3).double(), updates(3).to(torch.int32), updates(3)[:, 1:], updates(3)[0], updates(3)[None]],
    ids=["float64", "int32", "narrow", "flat", "deep"],
)
def test_another_dtype_or_shape_stops_the_report(values: Tensor) -> None:
    with pytest.raises(PrivacyError, match="nothing was sent") as caught:
        FULL.encode(values, RANGES, streams(3))
    assert f"{float(values.flatten()[5]):.3g}" not in str(caught.value) or values.dtype == torch.int32


def test_a_finite_update_that_overflows_beside_the_broadcast_stops_the_report() -> None:
    values = torch.zeros(1, DIMENSION)
    values[0, 3] = 3.4e38
    public = replace(public_state(1), weights=torch.full((DIMENSION,), 3.0e38))
    for schedule in (*SOUND, *UNSOUND):
        with pytest.raises(PrivacyError, match="nothing was sent"):
            Gaussian(schedule).in_round(public).encode(values, RANGES, streams(1))


@dataclass(frozen=True)
class _Broken(FullDP):
    """A schedule gone wrong."""

    wrong: float = field(default=0.0, kw_only=True)

    def round_sigma(self, round_number: int) -> float:
        return self.wrong


@pytest.mark.parametrize("sigma", [math.nan, math.inf, -1.0])
def test_noise_of_no_usable_size_stops_the_report(sigma: float) -> None:
    with pytest.raises(PrivacyError, match=r"negative or infinite noise level.*nothing was sent"):
        Gaussian(_Broken(2.0, 1e-5, CLIPPED, wrong=sigma)).encode(updates(1), RANGES, streams(1))


def test_facts_of_other_clients_than_the_values_are_refused() -> None:
    facts = FULL.first_facts(torch.tensor([10, 20]), DIMENSION)
    with pytest.raises(PrivacyError, match="one row a client"):
        FULL.for_clients(facts).encode(updates(3), RANGES, streams(3))


@pytest.mark.parametrize("schedule", SOUND, ids=by_name)
def test_a_sound_schedule_states_its_mu_as_an_epsilon(schedule: NoiseSchedule) -> None:
    for public in (public_state(1), public_state(2)):
        mechanism = Gaussian(schedule).in_round(public)
        mu = schedule.mu(public)
        assert mu is not None
        release = mechanism.release(RANGES)
        assert release == GaussianRelease(schedule.name, release.parameter, alike=True)
        assert mu < release.parameter < mu * (1 + 1e-13)  # rounded up
        guarantee = guarantee_of(mechanism, RANGES)
        assert guarantee.epsilon == gaussian_epsilon(release.parameter, schedule.delta)
        assert (guarantee.delta, guarantee.unit, guarantee.units_per_round) == (1e-5, "vector", 1)
        assert (guarantee.trust_model, guarantee.status) == ("local", "proved")


def test_full_dp_spends_its_budget_exactly() -> None:
    assert guarantee_of(FULL, RANGES).epsilon == pytest.approx(2.0, rel=1e-9)
    release = FULL.release(RANGES)
    assert isinstance(release, GaussianRelease)
    assert release.mu == pytest.approx(gaussian_mu(2.0, 1e-5), rel=1e-12)
    assert release.mu == pytest.approx(2 * 0.5 / float(FULL.noise(RANGES).largest_std(1)[0]), rel=1e-12)


@pytest.mark.parametrize("schedule", UNSOUND, ids=by_name)
def test_an_unsound_schedule_promises_nothing_and_says_why(schedule: NoiseSchedule) -> None:
    mechanism = Gaussian(schedule).in_round(public_state(2))
    release = mechanism.release(RANGES)
    claim = (None, None) if isinstance(schedule, TimeVarying) else (schedule.epsilon, 1e-5)  # shared over the run: not the paper's
    assert release == UnprotectedRelease(schedule.name, schedule.why_unproved(), 1, "vector", *claim)
    assert guarantee_of(mechanism, RANGES).epsilon == math.inf
    assert guarantee_of(mechanism, RANGES).assumptions == (schedule.why_unproved(),)
    assert schedule.why_unproved()


def test_the_registry_has_full_dp() -> None:
    mechanism = mechanisms.create("full-dp", epsilon=2.0, norm=0.5)
    assert mechanism == FULL
    assert mechanism.name == "full-dp"
    assert "full-dp" in mechanisms.names()
    for wrong in ({"epsilon": 0.0}, {"epsilon": -1.0}, {"epsilon": 1.0, "delta": 0.0}, {"epsilon": 1.0, "delta": 1.0}):
        with pytest.raises(ConfigError):
            mechanisms.create("full-dp", **wrong)
    for wrong in ({"epsilon": 1.0, "norm": 0.0}, {"epsilon": 1.0, "norm": math.inf}, {"epsilon": 1.0, "radius": 1.0}, {}):
        with pytest.raises(ConfigError):
            mechanisms.create("full-dp", **wrong)
