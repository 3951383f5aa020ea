"""Federations with noise by a schedule: what decides their outcome, what clients remember, and what the ledger says of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.data import Dataset
from ldpfl.errors import ConfigError
from ldpfl.mechanisms import Gaussian, guarantee_of
from ldpfl.mechanisms.base import PublicState, in_round
from ldpfl.mechanisms.gaussian import (
    AdapLDP,
    ClientState,
    Dpa,
    FullDP,
    LadpPaper,
    LadpSound,
    LayerSelection,
    LocalSteps,
    NbAFL,
    NoiseSchedule,
    SensitiveDP,
    Sensitivity,
    TimeVarying,
)
from ldpfl.mechanisms.ranges import Fixed
from ldpfl.privacy import GaussianRelease, UnprotectedRelease
from ldpfl.privacy.accountants.gaussian import composed_mu, gaussian_epsilon, gaussian_mu
from ldpfl.privacy.accounting import account
from ldpfl.privacy.events import OURS, Channel
from ldpfl.privacy.guarantee import Statement
from ldpfl.server import Checkpoint, round_cohort, sample_cohort
from ldpfl.simulation import Federation, simulate
from ldpfl.simulation.federation import Participation
from ldpfl.simulation.shares import ClientFacts, RoundNoise, SentNoise
from ldpfl.util.randomness import SeededStreams
from simulated import CLIENTS, federation_of

ROUNDS = 4
DELTA = 1e-5
STEPS = LocalSteps(learning_rate=0.05, epochs=1, batch_size=5, clip_norm=1.0)
CLIPPED = Sensitivity("update_clip", norm=0.5)
ASSUMED = Sensitivity("per_batch", STEPS)
HALF = LayerSelection("top_fraction", 0.5)
"""Of the model's two layers the weights get noise, the biases do not."""

SCHEDULES: dict[str, NoiseSchedule] = {
    "full-dp": FullDP(2.0, DELTA, CLIPPED),
    "nbafl": NbAFL(0.5, DELTA, norm=2.0, samples=20),
    "time-varying": TimeVarying(4.0, DELTA, CLIPPED, rounds=ROUNDS, ratio=0.8),
    "sensitive-dp": SensitiveDP(2.0, DELTA, CLIPPED, lam=0.5),
    "dpa": Dpa(4.0, DELTA, CLIPPED, rounds=ROUNDS, contraction=0.5),
    "adapldp": AdapLDP(1.0, DELTA, STEPS),
    "ladp": LadpPaper(2.0, DELTA, ASSUMED, selection=HALF, p_max=1e-3),
    "ladp-sound": LadpSound(2.0, DELTA, 0.5),
}
REMEMBERED = {"sensitive-dp": {"moved"}, "adapldp": {"scaler", "sent"}}
SOUND = ("full-dp", "nbafl", "time-varying", "dpa", "ladp-sound")
GUESSED = FullDP(2.0, DELTA, ASSUMED)


def scheduled(data: Dataset, schedule: NoiseSchedule, *, fraction: float = 0.5, scheme: str = "quantity") -> tuple[Federation, Checkpoint]:
    federation, start = federation_of(data, mechanism="none", scheme=scheme)
    return replace(federation, mechanism=Gaussian(schedule), rule=Fixed(), participation=Participation(fraction)), start


def trace(federation: Federation, start: Checkpoint, rounds: int = ROUNDS) -> tuple[object, ...]:
    """All that a run leaves, bit by bit."""
    *_, last = simulate(federation, start, rounds)
    previous = b"" if last.state.previous is None else last.state.previous.numpy().tobytes()
    memory = {name: rows.numpy().tobytes() for name, rows in last.memory.items()}
    return last.state.weights.numpy().tobytes(), previous, memory, last.ledger, [metrics.reproducible() for metrics in last.history]


def statement_of(federation: Federation, start: Checkpoint, channel: Channel = "ideal-shuffler") -> tuple[Checkpoint, Statement]:
    *_, last = simulate(replace(federation, participation=replace(federation.participation, channel=channel)), start, ROUNDS)
    return last, account(last.ledger, DELTA)


def most_joined(seed: int) -> int:
    """How often the client that came most often came, three of nine a round."""
    cohorts = [sample_cohort(seed, number, CLIENTS, 0.3) for number in range(1, ROUNDS + 1)]
    return int(np.bincount(np.concatenate(cohorts)).max())


def local(statement: Statement) -> float:
    row = statement.find("local", "run")
    assert row is not None
    return row.epsilon


# --- what decides the outcome ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.slow
@pytest.mark.thorough_except("ladp-sound")
def test_going_on_from_a_checkpoint_ends_where_the_whole_run_ends(name: str, tiny_task: Dataset, tmp_path: Path) -> None:
    """Memory and the broadcast before are saved: noise of later rounds depends on them."""
    federation, start = scheduled(tiny_task, SCHEDULES[name])
    whole = trace(federation, start)
    for stop in (1, 3):
        *_, halfway = simulate(federation, start, stop)
        halfway.save(tmp_path / "checkpoint")
        loaded = Checkpoint.load(tmp_path / "checkpoint")
        assert set(loaded.memory) == REMEMBERED.get(name, set())
        for kept, rows in halfway.memory.items():
            assert loaded.memory[kept].dtype == rows.dtype
            assert torch.equal(loaded.memory[kept], rows)
        assert trace(federation, loaded) == whole


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.slow
@pytest.mark.thorough
def test_chunking_changes_no_bit(name: str, tiny_task: Dataset) -> None:
    federation, start = scheduled(tiny_task, SCHEDULES[name])
    reference = trace(replace(federation, chunk_size=CLIENTS), start)
    for size in (1, 2):
        assert trace(replace(federation, chunk_size=size), start) == reference


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("scheme", ["iid", "quantity"])
@pytest.mark.slow
@pytest.mark.thorough_except("quantity-nbafl")
def test_the_order_in_which_the_cohort_comes_changes_no_bit(
    name: str, scheme: str, tiny_task: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, start = scheduled(tiny_task, SCHEDULES[name], scheme=scheme)
    straight = trace(federation, start)

    def turned(seed: int, number: int, clients: int, fraction: float, lowest: float | None) -> NDArray[np.int64]:
        return np.roll(round_cohort(seed, number, clients, fraction, lowest)[::-1], number).copy()

    monkeypatch.setattr("ldpfl.simulation.federation.round_cohort", turned)
    assert trace(federation, start) == straight


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.thorough_for("nbafl", "time-varying", "sensitive-dp", "dpa", "ladp")
def test_the_seed_decides_the_noise(name: str, tiny_task: Dataset) -> None:
    federation, start = scheduled(tiny_task, SCHEDULES[name])
    weights = trace(federation, start, 1)[0]
    assert weights != trace(replace(federation, seed=6), start, 1)[0]
    assert weights != start.state.weights.numpy().tobytes()


def test_a_round_beyond_those_that_share_the_budget_is_refused(tiny_task: Dataset) -> None:
    federation, start = scheduled(tiny_task, SCHEDULES["time-varying"])
    with pytest.raises(ConfigError, match=f"round {ROUNDS + 1} is beyond the"):
        list(simulate(federation, start, ROUNDS + 1))


# --- what clients and the server remember ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REMEMBERED)
def test_a_later_round_leaves_the_memory_of_an_earlier_checkpoint_alone(name: str, tiny_task: Dataset) -> None:
    federation, start = scheduled(tiny_task, SCHEDULES[name])
    checkpoints = [start]
    kept: list[dict[str, bytes]] = [{}]
    for checkpoint in simulate(federation, start, ROUNDS):
        checkpoints.append(checkpoint)
        kept.append({field: rows.numpy().tobytes() for field, rows in checkpoint.memory.items()})
    for checkpoint, before in zip(checkpoints, kept, strict=True):
        assert {field: rows.numpy().tobytes() for field, rows in checkpoint.memory.items()} == before
    assert all(earlier != later for earlier, later in pairwise(kept))


@pytest.mark.parametrize(("name", "field"), [("sensitive-dp", "moved"), ("adapldp", "sent")])
def test_clients_that_stay_away_remember_what_they_remembered(name: str, field: str, tiny_task: Dataset) -> None:
    federation, start = scheduled(tiny_task, SCHEDULES[name], fraction=0.3)
    first, second = simulate(federation, start, 2)
    came = np.isin(np.arange(CLIENTS), federation.cohort(2))
    assert 0 < came.sum() < CLIENTS
    before, after = first.memory[field].reshape(CLIENTS, -1), second.memory[field].reshape(CLIENTS, -1)
    changed = (before != after).any(dim=1).numpy()
    assert np.array_equal(changed, came)
    never = ~came & ~np.isin(np.arange(CLIENTS), federation.cohort(1))
    assert never.any()
    assert not bool(after[torch.from_numpy(never)].any())


@dataclass(frozen=True)
class _Noting(FullDP):
    """Full DP that takes down what it was told of the clients: (round, samples, joined) of each call."""

    noted: list[tuple[int, list[int], list[int]]] = field(default_factory=list, kw_only=True, compare=False)

    def clipped_updates(self, public: PublicState, clients: ClientState) -> Tensor:
        self.noted.append((public.round, clients.samples.tolist(), clients.joined.tolist()))
        return super().clipped_updates(public, clients)


@pytest.mark.parametrize("stop", [0, 2])
def test_schedules_are_told_how_much_a_client_holds_and_how_often_it_joined_before(stop: int, tiny_task: Dataset, tmp_path: Path) -> None:
    """Also after a resume; counted by hand from the cohorts. Clients are handled in the order of their sizes."""
    schedule = _Noting(2.0, DELTA, CLIPPED)
    federation, start = scheduled(tiny_task, schedule)
    federation = replace(federation, chunk_size=CLIENTS)
    for checkpoint in simulate(federation, start, stop):
        checkpoint.save(tmp_path / "checkpoint")
    schedule.noted.clear()
    list(simulate(federation, Checkpoint.load(tmp_path / "checkpoint") if stop else start, ROUNDS))
    cohorts = [sample_cohort(5, number, CLIENTS, 0.5).tolist() for number in range(1, ROUNDS + 1)]
    expected = []
    for number in range(stop + 1, ROUNDS + 1):
        clients = sorted(cohorts[number - 1], key=lambda client: federation.samples[client].size)
        joined = [sum(client in cohort for cohort in cohorts[: number - 1]) for client in clients]
        expected.append((number, [federation.samples[client].size for client in clients], joined))
    assert schedule.noted == expected
    assert {count for _, _, joined in expected for count in joined} >= {0, 1, 2}


def test_the_broadcast_before_is_kept(tiny_task: Dataset) -> None:
    federation, start = scheduled(tiny_task, SCHEDULES["ladp-sound"])
    assert start.state.previous is None
    before = start.state
    for checkpoint in simulate(federation, start, ROUNDS):
        assert checkpoint.state.previous is not None
        assert torch.equal(checkpoint.state.previous, before.weights)
        assert checkpoint.state.public().round == checkpoint.state.round + 1
        before = checkpoint.state


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full-dp", "adapldp", "ladp-sound"])
@pytest.mark.thorough_for("full-dp")
def test_a_round_that_nobody_joins_is_saved_and_gone_on_from(
    name: str, tiny_task: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model and the broadcast before are one and the same then."""
    federation, start = scheduled(tiny_task, SCHEDULES[name])

    def nobody_in_round_2(seed: int, number: int, clients: int, fraction: float, lowest: float | None) -> NDArray[np.int64]:
        return round_cohort(seed, number, clients, fraction, lowest)[: 0 if number == 2 else None]

    monkeypatch.setattr("ldpfl.simulation.federation.round_cohort", nobody_in_round_2)
    *_, idle = simulate(federation, start, 2)
    assert idle.history[-1].clients == 0
    assert idle.history[-1].noise == {}
    idle.save(tmp_path / "checkpoint")
    loaded = Checkpoint.load(tmp_path / "checkpoint")
    assert loaded.state.previous is not None
    assert torch.equal(loaded.state.previous, loaded.state.weights)
    assert trace(federation, loaded) == trace(federation, start)
    assert [event.round for event in idle.ledger.events] == [1]


# --- the noise of a round -------------------------------------------------------------------------------------------------------


def test_the_norms_of_the_noise_add_up_to_what_the_deviation_says(tiny_task: Dataset) -> None:
    """A norm is sigma sqrt(d - 1/2) on average, with a deviation of sigma / sqrt(2). |z| < 4 over all rounds; fixed seed."""
    schedule = FullDP(2.0, DELTA, CLIPPED)
    federation, start = scheduled(tiny_task, schedule)
    *_, last = simulate(federation, start, ROUNDS)
    dimension, reports = federation.task.layout.dimension, sum(metrics.clients for metrics in last.history)
    assert reports == ROUNDS * 5
    total = sum(metrics.noise["norm"] for metrics in last.history)
    expected = reports * schedule.full_sigma * math.sqrt(dimension - 0.5)
    assert abs(total - expected) < 4 * schedule.full_sigma * math.sqrt(reports / 2)
    for metrics in last.history:
        assert metrics.noise["protected_fraction"] == 1.0
        assert metrics.noise["multiplier_median"] == metrics.noise["multiplier_max"] == 1.0
        assert metrics.noise["paper_epsilon"] == pytest.approx(2.0)
        assert metrics.noise_std == pytest.approx(dict.fromkeys(federation.task.layout.names, schedule.full_sigma / math.sqrt(5)))


def test_time_varying_noise_shrinks_round_by_round(tiny_task: Dataset) -> None:
    federation, start = scheduled(tiny_task, SCHEDULES["time-varying"])
    *_, last = simulate(federation, start, ROUNDS)
    stds = [metrics.noise_std["1.weight"] for metrics in last.history]
    assert [after / before for before, after in pairwise(stds)] == pytest.approx([0.8] * 3)


def test_layers_that_are_not_selected_leave_without_noise_and_the_figures_say_so(tiny_task: Dataset) -> None:
    federation, start = scheduled(tiny_task, SCHEDULES["ladp"])
    *_, last = simulate(federation, start, ROUNDS)
    for metrics in last.history:
        assert metrics.noise_std["1.bias"] == 0
        assert metrics.noise_std["1.weight"] > 0
        assert metrics.noise["protected_fraction"] == pytest.approx(4000 / 4010)
        assert metrics.noise["multiplier_max"] >= metrics.noise["multiplier_median"] >= 1 - 1e-12
        assert metrics.noise["paper_epsilon"] > 0


@pytest.mark.parametrize("mechanism", ["duchi", "none"])
def test_other_mechanisms_have_no_such_figures_and_no_memory(mechanism: str, tiny_task: Dataset) -> None:
    federation, start = federation_of(tiny_task, mechanism=mechanism)
    *_, last = simulate(federation, start, 1)
    assert last.history[0].noise == {}
    assert last.memory == {}


def clients_noise(mechanism: Gaussian, federation: Federation, values: Tensor, start: Checkpoint) -> RoundNoise:
    """The clients' side of one round in which everybody sends ``values``."""
    ranges, clients = start.state.ranges, np.arange(CLIENTS)
    memory = mechanism.schedule.initial_memory(CLIENTS, ranges.dimension)
    facts = ClientFacts(torch.from_numpy(federation.samples.sizes), torch.zeros(CLIENTS, dtype=torch.int64), memory)
    bound = facts.with_noise_of_clients(mechanism)
    reports = bound.encode(values, ranges, SeededStreams.for_clients(1, 2, range(CLIENTS)))
    sent = SentNoise.of(bound, clients, values, ranges, reports)
    assert sent is not None
    return RoundNoise(mechanism, memory, [sent])


@pytest.mark.parametrize(("name", "same"), [("ladp-sound", True), ("ladp", False)])
def test_the_sound_form_has_the_same_noise_whatever_clients_hold(name: str, same: bool, tiny_task: Dataset) -> None:
    """Two federations with other data get the same broadcast; bit by bit. The paper's form tells them apart."""
    federation, start = scheduled(tiny_task, SCHEDULES[name], fraction=1.0)
    *_, earlier = simulate(federation, start, 2)
    images = federation.task.data
    turned = replace(federation, task=replace(federation.task, data=replace(images, inputs=images.tensor.flip(-1))))
    turned = replace(turned, trainer=type(federation.trainer)(turned.task))  # type: ignore[call-arg]
    (ours,), (theirs,) = simulate(federation, earlier, 3), simulate(turned, earlier, 3)
    assert not torch.equal(ours.state.weights, theirs.state.weights)
    assert (ours.history[-1].noise_std == theirs.history[-1].noise_std) == same

    mechanism = in_round(federation.mechanism, earlier.state.public())
    assert isinstance(mechanism, Gaussian)
    values = torch.randn(CLIENTS, 4010, generator=torch.Generator().manual_seed(1))
    stds = [clients_noise(mechanism, federation, scale * values, start).std() for scale in (1e-3, 1e-1)]
    assert stds[0] is not None
    assert stds[1] is not None
    assert torch.equal(stds[0], stds[1]) == same


# --- what the ledger says -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.thorough_for("time-varying", "dpa")
@pytest.mark.slow
def test_sound_schedules_compose_by_their_mu_over_the_rounds_of_a_client(name: str, tiny_task: Dataset) -> None:
    """Whoever joined most often is charged for as many rounds, the dearest ones, in closed form."""
    schedule = SCHEDULES[name]
    federation, start = scheduled(tiny_task, schedule, fraction=0.3)
    last, statement = statement_of(replace(federation, seed=6), start, "direct")
    most = most_joined(6)
    assert most == 3
    mus = sorted(event.release.mu for event in last.ledger.events if isinstance(event.release, GaussianRelease))
    assert len(mus) == ROUNDS
    assert local(statement) == pytest.approx(gaussian_epsilon(composed_mu(mus[-most:]), DELTA), rel=1e-9)
    assert not [warning for warning in statement.warnings if "no guarantee" in warning]
    pure = statement.find("local", "run", pure=True)
    assert pure is not None
    assert pure.epsilon == math.inf


@pytest.mark.parametrize("name", ["full-dp", "ladp-sound"])
@pytest.mark.slow
def test_a_budget_of_a_round_becomes_its_root_of_rounds(name: str, tiny_task: Dataset) -> None:
    federation, start = scheduled(tiny_task, SCHEDULES[name], fraction=1.0)
    _, statement = statement_of(federation, start, "direct")
    assert local(statement) == pytest.approx(gaussian_epsilon(math.sqrt(ROUNDS) * gaussian_mu(2.0, DELTA), DELTA), rel=1e-9)
    round_row = statement.find("local", "round")
    assert round_row is not None
    assert round_row.epsilon == pytest.approx(2.0, rel=1e-9)


@pytest.mark.parametrize("name", ["time-varying", "dpa"])
@pytest.mark.thorough_for("time-varying")
@pytest.mark.slow
def test_a_budget_shared_over_rounds_is_spent_exactly(name: str, tiny_task: Dataset) -> None:
    federation, start = scheduled(tiny_task, SCHEDULES[name], fraction=1.0)
    last, statement = statement_of(federation, start, "direct")
    assert local(statement) == pytest.approx(4.0, rel=1e-9)
    assert len({event.release for event in last.ledger.events}) == ROUNDS


@pytest.mark.slow
def test_a_budget_shared_over_the_rounds_that_a_client_joins_is_spent_by_the_one_that_joins_most(tiny_task: Dataset) -> None:
    """By no more than the whole budget, and by all of it where the dearest rounds are charged."""
    schedule = TimeVarying(4.0, DELTA, CLIPPED, rounds=ROUNDS, ratio=0.8, participations=most_joined(6))
    federation, start = scheduled(tiny_task, schedule, fraction=0.3)
    _, statement = statement_of(replace(federation, seed=6), start, "direct")
    assert local(statement) == pytest.approx(4.0, rel=1e-9)


@pytest.mark.parametrize("schedule", [*(SCHEDULES[name] for name in SCHEDULES if name not in SOUND), GUESSED], ids=lambda own: own.name)
@pytest.mark.thorough_for("sensitive-dp", "adapldp")
def test_what_is_not_proved_is_infinitely_dear_beside_what_its_paper_claims(schedule: NoiseSchedule, tiny_task: Dataset) -> None:
    federation, start = scheduled(tiny_task, schedule)
    last, statement = statement_of(federation, start)
    expected = UnprotectedRelease(schedule.name, schedule.why_unproved(), 1, "vector", schedule.epsilon, DELTA, author=OURS)
    assert {event.release for event in last.ledger.events} == {expected}
    assert local(statement) == math.inf
    assert statement.find("shuffled", "run") is None
    first = statement.rows[0]
    assert (first.status, first.epsilon, first.delta, first.scope) == ("claimed", schedule.epsilon, DELTA, "round")
    assert [warning for warning in statement.warnings if "no guarantee" in warning] == [
        f"no guarantee: {schedule.name}: {schedule.why_unproved()}"
    ]


@pytest.mark.parametrize("variant", ["paper", "equal_budget"])
def test_a_budget_that_is_shared_over_the_run_is_no_claim_of_a_round(variant: Literal["paper", "equal_budget"], tiny_task: Dataset) -> None:
    schedule = TimeVarying(2.0, DELTA, ASSUMED, rounds=ROUNDS, ratio=0.8, variant=variant)
    federation, start = scheduled(tiny_task, schedule)
    _, statement = statement_of(federation, start)
    assert local(statement) == math.inf
    claimed = [(row.epsilon, row.scope) for row in statement.rows if row.status == "claimed"]
    assert claimed == ([(2.0, "round")] if variant == "paper" else [])


def test_what_nbafl_guarantees_rests_on_a_public_number_of_samples(tiny_task: Dataset) -> None:
    for name in SOUND:
        federation, start = scheduled(tiny_task, SCHEDULES[name])
        assumptions = " ".join(guarantee_of(federation.mechanism, start.state.ranges).assumptions)
        assert ("smallest data set" in assumptions) == (name == "nbafl")
