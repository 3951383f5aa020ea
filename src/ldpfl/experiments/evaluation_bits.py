"""Read a config's evaluation at clients in randomised bits, for runs that protect everything of a client.

Behind a shuffler, or a sum of bits, a client sends a bit about each entry of its vector, and hides among all clients. With nobody trusted
it secretly draws one entry and sends a single bit, whose epsilon is a pure one. The existing accountants find the epsilon of a bit.
"""

from __future__ import annotations

from functools import lru_cache
from math import sqrt

from ldpfl import tasks
from ldpfl.errors import ConfigError
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.planning.search import smallest
from ldpfl.mechanisms import Mechanism
from ldpfl.mechanisms.duchi import Duchi, DuchiSettings
from ldpfl.mechanisms.harmony import Harmony, HarmonySettings
from ldpfl.mechanisms.settings import MechanismSettings
from ldpfl.privacy.accountants.gaussian import gaussian_mu
from ldpfl.privacy.accountants.registry import least_epsilon
from ldpfl.privacy.authors import released
from ldpfl.privacy.charged_rounds import RoundGroup
from ldpfl.privacy.events import Channel
from ldpfl.simulation.evaluating_bits import BitScores
from ldpfl.simulation.record_sums import ranges_of

_LEAST, _MOST = 1e-6, 20.0
"""Range of the epsilon of one bit. Above, a bit has no noise left."""
_PRECISE = 1e-3

_UNSEEN: tuple[Channel, ...] = ("direct", "random-delay")
"""Channels behind which nobody is trusted: reports can be linked to their senders."""


def check_bits(config: RunConfig) -> None:
    """Raise unless clients can be asked for bits about the model: the mechanism protects clients, and accountants compose bits with it.

    Raises:
        ConfigError: the settings do not allow it.
    """
    mechanism, channel = config.mechanism, config.shuffling.channel
    if not mechanism.protects:
        raise ConfigError(
            f"evaluation.epsilon is {config.evaluation.epsilon}, and mechanism {mechanism.name!r} protects nobody: choose another "
            "mechanism, or leave evaluation.epsilon out"
        )
    if config.clients.self_sampling != "off" or config.clients.once:
        raise ConfigError("evaluation.epsilon asks all clients at once: leave clients.self_sampling and clients.once out")
    if channel not in _UNSEEN and not mechanism.sends_bits:
        raise ConfigError(
            f"evaluation.epsilon releases bits, which shuffling.channel = {channel!r} hides only beside other bits, and mechanism "
            f"{mechanism.name!r} sends none: set mechanism.name to 'rotated-sign', 'duchi' or 'harmony', or to 'dp-sgd' for records; "
            "or set shuffling.channel to 'direct'"
        )


def bit_scores(config: RunConfig, outputs: int) -> BitScores:
    """Return the layout of what a client's bits are about."""
    return BitScores(tasks.create(config.task.name, outputs).targets, outputs, config.evaluation.loss_bound)


def bit_settings(config: RunConfig, evaluations: int) -> MechanismSettings:
    """Return the settings of the mechanism for the bits of each of so many ``evaluations``."""
    epsilon, through = config.evaluation.epsilon, config.shuffling
    if epsilon == "off":
        raise ConfigError("evaluation.epsilon is 'off', so nothing is measured at clients: set it to a number")
    honest, entries = config.clients.count - through.colluding, bit_scores(config, 2).entries
    found = epsilon_of_bit(epsilon, config.privacy.delta, through.channel, honest, entries, evaluations)
    if through.channel in _UNSEEN:
        return HarmonySettings(epsilon=found)
    return DuchiSettings(epsilon=found)


@lru_cache(maxsize=256)
def epsilon_of_bit(epsilon: float, delta: float, channel: Channel, honest: int, entries: int, evaluations: int) -> float:
    """Return the largest epsilon of a bit with which all ``evaluations`` of ``honest`` clients keep ``epsilon``.

    Args:
        channel: channel between clients and server. It decides whether a client sends one bit, or one about each of the ``entries``.

    Raises:
        ConfigError: no bit keeps it.
    """

    def reached(strength: float) -> float:
        return least_epsilon([bit_rounds(strength, channel, honest, entries, evaluations)], delta)

    guess = evaluations / epsilon if channel in _UNSEEN else sqrt(entries * evaluations / honest) / gaussian_mu(epsilon, delta)
    inverse = smallest(lambda x: reached(1 / x), guess, epsilon, 1 / _MOST, 1 / _LEAST, _PRECISE)
    if inverse is None:
        raise ConfigError(
            f"evaluation.epsilon = {epsilon:g} is out of reach: one bit at {_LEAST:g} costs {reached(_LEAST):.3g}; set it higher"
        )
    return 1 / inverse


def bit_rounds(epsilon: float, channel: Channel, honest: int, entries: int, evaluations: int) -> RoundGroup:
    """Return the evaluations that a client is charged for, with bits at ``epsilon``."""
    mechanism: Mechanism = Harmony(epsilon) if channel in _UNSEEN else Duchi(epsilon)
    release = released(mechanism, ranges_of(entries))
    return RoundGroup(release, honest, honest, evaluations, channel=channel, known=False, histograms=True)
