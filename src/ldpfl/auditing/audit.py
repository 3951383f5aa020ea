"""Audit a mechanism as a black box: run it through its wire format, and look for contradictions to its claims.

The audit does not know how a mechanism works. Values go in, bytes come out, and only the decoded estimates are tested. A leak in a report
that ``decode`` drops is not found. An audit can refute a guarantee; it cannot prove one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isinf
from typing import Any

import torch

from ldpfl.auditing.bounds import json_safe
from ldpfl.auditing.checks import Check, Examination
from ldpfl.errors import ConfigError
from ldpfl.mechanisms import Mechanism, guarantee_of
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.util.displays import Shown

ERROR_RATE = 1e-4
"""Default probability that a sound mechanism fails the audit."""


@dataclass(frozen=True)
class MechanismAudit(Shown):
    """The result of an audit.

    Attributes:
        mechanism: name of the mechanism.
        epsilon_claimed: claimed epsilon of one unit (a weight, a vector); infinity if nothing is claimed.
        epsilon_lower: proved lower bound of epsilon of one unit; 0 if nothing was shown.
        trials: number of randomised units for each input, over all layers.
        error_rate: largest probability that a sound mechanism fails any of the checks.
        checks: results of all checks.
        epsilon_findable: largest epsilon that so many trials can show: the lower bound that they give if every one of them shows its input.
        mu_findable: the same for mu; None unless the release is Gaussian.
    """

    mechanism: str
    epsilon_claimed: float
    epsilon_lower: float
    trials: int
    error_rate: float
    checks: tuple[Check, ...]
    epsilon_findable: float
    mu_findable: float | None = None

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.passed is False)

    @property
    def passed(self) -> bool:
        """Whether no check failed. A mechanism that claims no privacy can pass: see ``verdict``."""
        return not self.failures

    @property
    def verdict(self) -> str:
        """The result as a sentence that claims no more than was shown."""
        if self.failures:
            names = ", ".join(check.name for check in self.failures)
            return f"{self.mechanism}: {len(self.failures)} of {len(self.checks)} checks failed: {names}"
        if isinf(self.epsilon_claimed):
            return f"{self.mechanism}: nothing is protected; apart from that it does what it states"
        nothing = f"{self.mechanism}: nothing found that contradicts epsilon {self.epsilon_claimed:g}"
        mu = "" if self.mu_findable is None else f", mu {self.mu_findable:.3g}"
        return (
            f"{nothing}: {self.trials:,} trials for each input show that it is {self.epsilon_lower:.3g} at least; they would show "
            f"{self.epsilon_findable:.3g}{mu} if reports told their inputs"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything for JSON: infinity as the string "infinity", as in guarantees, and NaN as None."""
        extra = {"passed": self.passed, "verdict": self.verdict}
        return {key: json_safe(value) for key, value in {**asdict(self), **extra}.items()}


def audit_mechanism(
    mechanism: Mechanism, *, trials: int = 1_000_000, seed: int | None = None, error_rate: float = ERROR_RATE
) -> MechanismAudit:
    """Audit ``mechanism`` as a black box. It encodes, sends, reads, decodes and aggregates reports by its real code.

    The audit checks the privacy loss of inputs inside and beyond the range, bias, variance, whether every client, weight and call has noise
    of its own, and the bytes that are sent. ``trials`` units are randomised for each of eight inputs (rounded up to whole blocks). If the
    guarantee's unit is a weight, every weight of every client is a trial. Else a trial is a client's row, or the row's part in a layer if
    that is the unit. Such a row is judged by its projection on the difference of the two inputs.

    The checks share ``error_rate`` equally, and each divides its part over all that it compares. So a sound mechanism fails the whole audit
    with probability at most ``error_rate`` (Bonferroni). That is exact for epsilon. For bias and variance, it assumes that no estimate is
    larger than the largest one that was seen. For independence, it assumes that the squares of noise average out over each comparison.

    Without a ``seed`` the bits are the operating system's, as in a deployed client; with one the audit is reproducible.

    Source: privacy auditing by attack, Jagielski et al. 2020 and Nasr et al. 2021.

    Raises:
        ConfigError: fewer than 1000 trials, a Gaussian release without a delta, an error rate outside (0, 0.5),
            or a seed that is not a whole number of at least 0.
    """
    _check_arguments(trials, seed, error_rate)
    examination = Examination(mechanism, trials, seed, error_rate)
    checks = examination.checks()
    # A trial may replace more than one unit, for which epsilon is larger. Then only bits show the epsilon of one unit.
    trial_is_one_unit = examination.epsilon_of_trial == examination.epsilon
    candidates = examination.epsilon_checks if trial_is_one_unit else checks
    checks_of_epsilon = [check for check in candidates if check.name.startswith("epsilon")]
    return MechanismAudit(
        mechanism.name,
        examination.epsilon,
        epsilon_lower=max(check.figure for check in checks_of_epsilon if check.bound == examination.epsilon),
        trials=examination.trials,
        error_rate=error_rate,
        checks=checks,
        epsilon_findable=examination.epsilon_findable,
        mu_findable=examination.mu_findable,
    )


def default_trials(mechanism: Mechanism) -> int:
    """Return a number of trials that takes some seconds. A trial is one weight, or a client's whole row if the protected unit is larger."""
    unit = guarantee_of(mechanism, LayerRanges(torch.tensor([0.0]), torch.tensor([1.0]), (2,))).unit
    return 1_000_000 if unit == "weight" else 20_000


def _check_arguments(trials: int, seed: int | None, error_rate: float) -> None:
    """Raise a ConfigError unless the arguments of :func:`audit_mechanism` are valid."""
    if isinstance(trials, bool) or not isinstance(trials, int) or trials < 1000:
        raise ConfigError(f"an audit needs a whole number of trials, at least 1000, got {trials!r}")
    if isinstance(error_rate, bool) or not isinstance(error_rate, int | float) or not 0 < error_rate < 0.5:
        raise ConfigError(f"the error rate of an audit must lie between 0 and 0.5, got {error_rate!r}")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        raise ConfigError(f"the seed of an audit must be a whole number, 0 or above, got {seed!r}")
