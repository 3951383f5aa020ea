"""Read a config's evaluation at clients in randomised bits, for runs that protect everything of a client.

Behind a shuffler, or a sum of bits, a client sends a bit about each entry of its vector, and hides among all clients. With nobody trusted
it secretly draws one entry and sends a single bit, whose epsilon is a pure one. The existing accountants find the epsilon of a bit.
"""

from __future__ import annotations

from ldpfl import tasks
from ldpfl.errors import ConfigError
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.planning.bits import epsilon_of_bit, is_seen
from ldpfl.mechanisms.duchi import DuchiSettings
from ldpfl.mechanisms.harmony import HarmonySettings
from ldpfl.mechanisms.settings import MechanismSettings
from ldpfl.simulation.evaluating_bits import BitScores


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
    if not is_seen(channel) and not mechanism.sends_bits:
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
    if is_seen(through.channel):
        return HarmonySettings(epsilon=found)
    return DuchiSettings(epsilon=found)
