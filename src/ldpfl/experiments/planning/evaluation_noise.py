"""Find the noise with which clients measure a model, before anything is run: the epsilon of bits, or the noise of a sum."""

from __future__ import annotations

from functools import lru_cache
from math import sqrt

from ldpfl.errors import ConfigError
from ldpfl.experiments.planning.search import smallest_argument
from ldpfl.mechanisms import Mechanism
from ldpfl.mechanisms.duchi import Duchi
from ldpfl.mechanisms.harmony import Harmony
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.privacy.accountants.gaussian import gaussian_mu
from ldpfl.privacy.accountants.registry import least_epsilon
from ldpfl.privacy.authors import released
from ldpfl.privacy.charged_rounds import RoundGroup
from ldpfl.privacy.events import Channel, without_claim

ENTRIES_OF_CLASSES = 88
"""Number of entries that the bits about a classification are about (``BitScores.entries``)."""

_MIN_BIT, _MAX_BIT = 1e-6, 20.0
"""Range of the epsilon of one bit in the search. Above it, a bit has practically no noise."""
_TOLERANCE = 1e-3
"""Relative precision of the epsilon that is found."""

_MAX_COUNTED_CLIENTS = 10**5
"""Maximum number of clients that are counted. With more, bits have next to no noise, and nodes have to compute it within seconds."""
MAX_EVALUATIONS = 1000
"""Maximum number of evaluations in bits."""


def server_sees_senders(channel: Channel) -> bool:
    """Return whether the server sees which client sent which report. The guarantee then trusts nobody."""
    return channel in ("direct", "random-delay")


_NOISE_MARGIN = 1 + 1e-6
"""Factor on the noise, so that rounding errors do not make epsilon larger than asked for."""


def noise_multiplier_for_sum(epsilon: float, delta: float, honest: int, evaluations: int) -> float:
    """Return each client's noise multiplier with which all ``evaluations`` together have ``epsilon`` at ``delta``.

    The noise of the ``honest`` clients, which do not collude with the adversary, adds up. One evaluation with noise multiplier s in the sum
    is mu-GDP (Gaussian differential privacy) with mu = 2 / s, since replacing a vector moves the sum by up to twice the clipping norm.
    """
    return 2 / gaussian_mu(epsilon, delta) * sqrt(evaluations / honest) * _NOISE_MARGIN


@lru_cache(maxsize=256)
def epsilon_of_bit(epsilon: float, delta: float, channel: Channel, honest: int, entries: int, evaluations: int) -> float:
    """Return the largest epsilon of one bit with which all ``evaluations`` together have at most ``epsilon`` at ``delta``.

    Args:
        channel: channel between clients and server. It decides whether a client sends one bit, or one about each of the ``entries``.
        honest: number of clients that do not collude with the adversary.
        entries: number of entries of the vector that a client reports on in one evaluation.

    Raises:
        ConfigError: even the noisiest bit exceeds ``epsilon``, or there are more than :data:`MAX_EVALUATIONS`.
    """
    if evaluations > MAX_EVALUATIONS:
        raise ConfigError(
            f"the run has {evaluations:,} evaluations in bits, expected at most {MAX_EVALUATIONS:,}: set evaluation.every higher"
        )
    honest = min(honest, _MAX_COUNTED_CLIENTS)  # fewer clients hide less, so the result stays valid

    def epsilon_with(bit_epsilon: float) -> float:
        """Return the epsilon of all evaluations if each bit has ``bit_epsilon``."""
        return least_epsilon([bit_rounds(bit_epsilon, channel, honest, entries, evaluations)], delta)

    # The search varies 1 / epsilon of a bit, because it needs a decreasing function. If senders are seen, the epsilons of all evaluations
    # add up (simple composition). Behind a shuffler, the guess follows from the central limit theorem.
    guess = evaluations / epsilon if server_sees_senders(channel) else sqrt(entries * evaluations / honest) / gaussian_mu(epsilon, delta)
    inverse = smallest_argument(lambda x: epsilon_with(1 / x), guess, epsilon, 1 / _MAX_BIT, 1 / _MIN_BIT, _TOLERANCE)
    if inverse is None:
        raise ConfigError(
            f"evaluation.epsilon is {epsilon:g}, but the smallest epsilon that bits reach here is {epsilon_with(_MIN_BIT):.3g}: set it "
            "higher"
        )
    return 1 / inverse


def bit_rounds(epsilon: float, channel: Channel, honest: int, entries: int, evaluations: int) -> RoundGroup:
    """Return the rounds of evaluation that a client is charged for, if each of its bits has this ``epsilon``.

    If the server sees the senders, a client draws one of the ``entries`` and sends one bit (``harmony``). Otherwise it sends a bit about
    each entry (``duchi``). ``known=False`` states no lower bound of epsilon, only an upper bound.
    """
    mechanism: Mechanism = Harmony(epsilon) if server_sees_senders(channel) else Duchi(epsilon)
    release = without_claim(released(mechanism, LayerRanges(0.0, 1.0, (entries,))))
    return RoundGroup(release, cohort=honest, population=honest, rounds=evaluations, channel=channel, known=False, histograms=True)
