"""Audit of a run: how surely a server that sees nothing but the shuffled pool recognises one client's whole report.

One client of one more round is replaced by a canary, which holds one of two opposite reports, both known to the
auditor. If a client's whole report were epsilon-LDP, nobody could tell the two apart with an accuracy above
``e**epsilon / (1 + e**epsilon)``. Shuffling each weight's bits hides who sent them; it does not hide their sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import exp, floor, isinf, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.attacks.on_run import rebuilt_federation
from ldpfl.auditing.bounds import Floats, best_threshold, clopper_pearson, json_safe, threshold_epsilon
from ldpfl.errors import ConfigError
from ldpfl.experiments.build import with_torch_defaults
from ldpfl.experiments.dataset import load_dataset
from ldpfl.experiments.run_folder import Kind, RunFolder
from ldpfl.mechanisms import Mechanism, guarantee_of
from ldpfl.mechanisms.base import in_round, record_clip_of, record_rate_of
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.privacy.guarantee import Guarantee
from ldpfl.server import ServerState
from ldpfl.simulation import Federation, train_cohort
from ldpfl.transport.shuffling import mix
from ldpfl.util.displays import Shown
from ldpfl.util.randomness import Purpose, SeededStreams, stream

CONFIDENCE = 0.95
"""Probability with which all bounds of all rows hold together."""

FEWEST_TRIALS = 100
"""Minimum number of trials. With fewer, the bounds say next to nothing."""

MOST_REPORTS = 5 * 10**10
"""Maximum of weights * clients * trials: about ten minutes of one-bit reports on one core."""

_KEY = 0x43414E59
"""First part of the key of the audit's streams; no round has this number."""


@dataclass(frozen=True)
class CanaryRow:
    """Result of the audit from the sums of ``weights`` weights.

    Attributes:
        weights: number of weights that the auditor uses.
        accuracy: fraction of the trials in which the auditor recognises the canary's report; guessing gives 1/2.
        accuracy_low, accuracy_high: confidence interval of the accuracy (Clopper & Pearson 1934).
        epsilon_lower: lower bound on the epsilon of the canary's whole report, at the run's delta.
        best_possible_if_claim_held: maximum accuracy if the whole report had the epsilon and delta that are claimed for one unit.
    """

    weights: int
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    epsilon_lower: float
    best_possible_if_claim_held: float


@dataclass(frozen=True)
class RunAudit(Shown):
    """Result of the audit of a run by a canary.

    Attributes:
        name: name of the run.
        clients: number of clients in the cohort, the canary included.
        weights: number of weights of the model.
        mechanism: name of the mechanism.
        epsilon_per_unit: epsilon that the mechanism claims for one unit; infinity if nothing is protected.
        trials: number of trials. Half of them are used to choose thresholds, and half to measure the accuracy.
        delta: the run's delta, at which the bounds of the rows hold.
        rows: one row for each number of weights.
        confidence: probability with which all bounds hold together.
    """

    name: str
    clients: int
    weights: int
    mechanism: str
    epsilon_per_unit: float
    trials: int
    delta: float
    rows: tuple[CanaryRow, ...]
    confidence: float = CONFIDENCE

    def to_dict(self) -> dict[str, Any]:
        """Return everything for JSON. An infinite epsilon is the string "infinity", as in guarantees."""
        return {key: json_safe(value) for key, value in asdict(self).items()}


@with_torch_defaults()
def audit_run(
    folder: RunFolder,
    data_dir: Path | None,
    device: torch.device,
    *,
    trials: int = 400,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> RunAudit:
    """Audit the run in ``folder`` after its last finished round; the folder is only read.

    The round that would come next is trained once, and its first client replaced by the canary, which holds
    ``center + radius * s`` or ``center - radius * s`` with a random sign s for each weight. In every trial all clients
    randomise anew, the reports are shuffled, and the auditor gets the pool. It knows s and, as an auditor may assume,
    the others' values. Its statistic is the sum of ``s * (mean - expected mean) / radius`` over the first weights, in an order fixed
    beforehand. If the run protects records and not clients, the canary is a client with one record,
    whose gradient is as long as the clipping allows, in the direction ``s`` or ``-s``. If the ``trials`` would take too long, fewer are
    made, but at least ``FEWEST_TRIALS``.

    Source: privacy auditing with canaries, Jagielski et al. 2020 and Nasr et al. 2021.

    Args:
        trials: number of trials, rounded down to a multiple of four.
        seed: seed of the canary and of the noise; the run has its own.
        progress: called with (trials done, trials).

    Raises:
        ConfigError: the folder holds no run with a finished round, or one on other data; the run samples records or changes its clipping
            norm; too few trials are asked for; or the run is so large that ``FEWEST_TRIALS`` would take too long.
        DataError: the data cannot be read.
    """
    if isinstance(trials, bool) or not isinstance(trials, int) or trials < FEWEST_TRIALS:
        raise ConfigError(f"the audit of a run needs a whole number of trials, at least {FEWEST_TRIALS}, got {trials!r}")
    federation, state = _last_state(folder, data_dir, device)
    last_possible_round = federation.participation.once_over  # None if clients may join several rounds
    round_number = state.round + 1 if last_possible_round is None else min(state.round + 1, last_possible_round)
    cohort = federation.cohort(round_number)
    if not cohort.size:
        raise ConfigError(
            f"round {round_number} has no clients, so there is nothing to audit: continue the run for a round (ldpfl run --resume)"
        )
    _check_same_canary_each_round(federation.mechanism)
    trials = _affordable_trials(trials, len(cohort), state.ranges.dimension)
    mechanism = in_round(federation.mechanism, state.public())
    config = folder.config()
    canary_trials = _CanaryTrials.prepare(mechanism, state.ranges, train_cohort(federation, state, cohort), seed)
    scores = canary_trials.run(trials, progress or (lambda done, total: None))
    guarantee = guarantee_of(mechanism, state.ranges)
    return RunAudit(
        name=config.name,
        clients=len(cohort),
        weights=state.ranges.dimension,
        mechanism=mechanism.name,
        epsilon_per_unit=guarantee.epsilon,
        trials=trials,
        delta=config.privacy.delta,
        rows=_row_of_each_count(scores, canary_trials.sizes, guarantee, config.privacy.delta),
    )


def _check_same_canary_each_round(mechanism: Mechanism) -> None:
    """Raise a :class:`ConfigError` if the run samples records or changes its clipping norm: rounds would then not be like the one tried."""
    if record_rate_of(mechanism) < 1:
        raise ConfigError(
            "this run samples records, but the canary is in every round, so the audit would not measure the run's guarantee: audit a run "
            "that uses all records (mechanism.sample_rate = 1)"
        )
    if (clip := record_clip_of(mechanism)) is not None and clip.adaptive:
        raise ConfigError(
            "a run with clipping.target_quantile cannot be audited, because its clipping norm changes, and so would the canary: audit a "
            "run whose clipping.target_quantile is 'off'"
        )


def _last_state(folder: RunFolder, data_dir: Path | None, device: torch.device) -> tuple[Federation, ServerState]:
    """Return the run's federation, built anew, and its state after the last finished round.

    Raises:
        ConfigError: the run has no finished round, belongs to a custom app, or was made on other data than those that are loaded now.
    """
    config, last = folder.config(), folder.checkpoint_needed()
    if folder.kind() is Kind.OWN_APP:
        raise ConfigError(f"{folder.path} was run by a custom app on Flower, whose data only the app knows: audit a simulation instead")
    if last is None:
        raise ConfigError(f"the run in {folder.path} has no finished round, so there is nothing to audit: resume it (ldpfl run --resume)")
    return rebuilt_federation(folder, config, load_dataset(config, data_dir), device), last.state


def _affordable_trials(trials: int, clients: int, dimension: int) -> int:
    """Return the number of trials to make: at most ``trials``, and a multiple of four, so that each half has both reports equally often.

    Raises:
        ConfigError: even ``FEWEST_TRIALS`` rounds of ``clients`` reports about ``dimension`` weights would take too long.
    """
    affordable = MOST_REPORTS // (clients * dimension)
    if affordable < FEWEST_TRIALS:
        raise ConfigError(
            f"a round of {clients} clients and {dimension} weights is too large to audit: {FEWEST_TRIALS} trials, the minimum, would "
            f"randomise {FEWEST_TRIALS * clients * dimension:,} weights, and at most {MOST_REPORTS:,} are allowed. Audit a run of fewer "
            "clients or weights"
        )
    return min(trials, affordable) // 4 * 4


@dataclass(frozen=True, eq=False)
class _CanaryTrials:
    """Everything that stays the same over the trials. In shapes, K is the number of clients, and d the number of weights.

    Attributes:
        values: (K, d) the clients' values. Row 0 belongs to the canary, and each trial overwrites it.
        canaries: the two vectors (d,) that the canary may hold.
        expected: (d,) expected mean of the pool if the canary holds the center.
        weighing: (d,) factor of each weight in the auditor's sum.
        order: (d,) order in which the auditor uses the weights.
        sizes: numbers of weights for which the sums are computed.
    """

    mechanism: Mechanism
    ranges: LayerRanges
    values: Tensor
    canaries: tuple[Tensor, Tensor]
    expected: Tensor
    weighing: Tensor
    order: Tensor
    sizes: tuple[int, ...]
    seed: int

    @classmethod
    def prepare(cls, mechanism: Mechanism, ranges: LayerRanges, values: Tensor, seed: int) -> _CanaryTrials:
        """Draw the canary's signs and the order in which weights are added to a score, and compute what stays the same over the trials."""
        generator = stream(seed, Purpose.MECHANISM, _KEY)
        signs = torch.from_numpy(2.0 * generator.integers(0, 2, ranges.dimension) - 1.0)  # each -1 or 1
        order = torch.from_numpy(generator.permutation(ranges.dimension))
        counts = _weight_counts(ranges.dimension)
        center, radius = ranges.expand()
        if (clip := record_clip_of(mechanism)) is not None:  # the canary is a gradient of integers, nearly as long as clip.steps
            gradient = (signs * floor(clip.steps / sqrt(ranges.dimension))).long()
            canaries, weighing = (gradient, -gradient), signs
            expected = torch.zeros(ranges.dimension, dtype=torch.float64)  # need not be exact: it shifts all scores alike
        else:
            canaries, weighing = ((center + signs * radius).float(), (center - signs * radius).float()), signs / radius
            expected = _expected_mean(mechanism, ranges, values[1:])
        return cls(mechanism, ranges, values.clone(), canaries, expected, weighing, order, counts, seed)

    def run(self, trials: int, progress: Callable[[int, int], None]) -> Floats:
        """Return the auditor's sums (trials, sizes). Each column adds up as many weights as its entry in ``sizes`` says.

        In even trials the canary sends the first of its two vectors, in odd ones the second.
        """
        scores = np.empty((trials, len(self.sizes)))
        for trial in range(trials):
            scores[trial] = self._score(trial)
            progress(trial + 1, trials)
        return scores

    def _score(self, trial: int) -> NDArray[np.float64]:
        """Run one trial. Return the auditor's sum over the first n weights in ``order``, for each n in ``sizes``."""
        self.values[0] = self.canaries[trial % 2]
        # All clients draw new random bits in each trial.
        streams = SeededStreams.of(range(len(self.values)), self.seed, Purpose.MECHANISM, _KEY, trial)
        reports = self.mechanism.encode(self.values, self.ranges, streams)
        pool = mix([reports], stream(self.seed, Purpose.MIXING, _KEY, trial))
        mean = self.mechanism.aggregate([pool.reports], self.ranges).double()
        sums = ((mean - self.expected) * self.weighing)[self.order].cumsum(0)
        return np.asarray(sums[torch.tensor(self.sizes) - 1].numpy())


def _expected_mean(mechanism: Mechanism, ranges: LayerRanges, others: Tensor) -> Tensor:
    """Return the expected mean (d,) of the reports about d weights of ``others`` (clients - 1, d) and of one client at the center.

    Scores are computed from means less this expected mean, which keeps them near 0. All scores shift by the same amount, so an inexact
    expected mean would not change the audit's result.
    """
    center, _ = ranges.expand()
    total = center.clone()
    for row in others.double():
        # Mechanisms clamp values to their ranges, but for those that protect nothing, which report values as they are.
        total += row if isinf(guarantee_of(mechanism, ranges).epsilon) else ranges.clamp(row)
    return total / (len(others) + 1)


def _weight_counts(dimension: int) -> tuple[int, ...]:
    """Return the numbers of weights to audit: 1, 10, 100 and so on below the ``dimension``, and the dimension itself."""
    powers = (10**exponent for exponent in range(len(str(dimension))))  # no power with more digits is below the dimension
    return (*(power for power in powers if power < dimension), dimension)


def _row_of_each_count(scores: Floats, sizes: tuple[int, ...], claim: Guarantee, delta: float) -> tuple[CanaryRow, ...]:
    """Return a row for each number of attacked weights in ``sizes``: how often the attack tells a client's two possible reports apart.

    Each row has two statements that may be wrong by chance: an interval of the share of right guesses, and a lower bound of epsilon. All
    statements of all rows share the error probability equally. Even rows of ``scores`` (trials, sizes) are of the client's first possible
    report, odd ones of its second. The first half of the trials chooses the thresholds, and the second half tests them.
    """
    half = len(scores) // 2
    error = (1 - CONFIDENCE) / (2 * len(sizes))
    # (e^epsilon + delta) / (1 + e^epsilon), written so that a large epsilon does not overflow
    best_if_claim_held = 1.0 if isinf(claim.epsilon) else (1 + claim.delta * exp(-claim.epsilon)) / (1 + exp(-claim.epsilon))
    rows = []
    for column, weights in enumerate(sizes):
        choosing_scores = scores[:half:2, column], scores[1:half:2, column]
        judging_scores = scores[half::2, column], scores[half + 1 :: 2, column]  # ``half`` is even: trials are a multiple of four
        threshold = best_threshold(*choosing_scores)
        correct = int((judging_scores[0] > threshold).sum()) + int((judging_scores[1] <= threshold).sum())
        low, high = clopper_pearson(correct, half, error)
        epsilon_lower = threshold_epsilon(choosing_scores, judging_scores, delta, error)
        rows.append(CanaryRow(weights, correct / half, low, high, epsilon_lower, best_if_claim_held))
    return tuple(rows)
