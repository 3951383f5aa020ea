"""Read a config's evaluation at clients, for runs that protect everything of a client.

Behind a shuffler, or a sum of bits, a client sends a bit about each entry of its vector, and hides among all clients. With nobody trusted
it secretly draws one entry and sends a single bit, whose epsilon is a pure one. The existing accountants find the epsilon of a bit.
By a sum of vectors (``dp-fedavg``) it sends its vector with its share of the noise.
"""

from __future__ import annotations

from ldpfl import tasks
from ldpfl.errors import ConfigError
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.planning.evaluation_noise import epsilon_of_bit, is_seen, noise_of_sum
from ldpfl.mechanisms.dp_fedavg import DpFedAvgSettings
from ldpfl.mechanisms.duchi import DuchiSettings
from ldpfl.mechanisms.harmony import HarmonySettings
from ldpfl.mechanisms.settings import MechanismSettings
from ldpfl.simulation.evaluating_clients import BitScores, ClientScores, MeanScores


def check_clients(config: RunConfig) -> None:
    """Raise unless accountants compose what clients would send about the model with what they send in training.

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
    if not (is_seen(channel) or mechanism.sends_bits or is_summed(config)):
        raise ConfigError(
            f"evaluation.epsilon releases bits, which shuffling.channel = {channel!r} hides only beside other bits, and mechanism "
            f"{mechanism.name!r} sends none: set mechanism.name to 'rotated-sign', 'duchi' or 'harmony', or to 'dp-sgd' for records; "
            "or set shuffling.channel to 'direct'"
        )


def is_summed(config: RunConfig) -> bool:
    """Return whether clients send vectors with noise, of which only the sum is seen."""
    return isinstance(config.mechanism, DpFedAvgSettings) and config.shuffling.channel == "secure-sum"


def client_scores(config: RunConfig, outputs: int) -> ClientScores:
    """Return the layout of what a client sends."""
    kind = MeanScores if is_summed(config) else BitScores
    return kind(tasks.create(config.task.name, outputs).targets, outputs, config.evaluation.loss_bound)


def client_settings(config: RunConfig, evaluations: int) -> MechanismSettings:
    """Return the settings of the mechanism for each of so many ``evaluations``."""
    epsilon, through = config.evaluation.epsilon, config.shuffling
    if epsilon == "off":
        raise ConfigError("evaluation.epsilon is 'off', so nothing is measured at clients: set it to a number")
    honest = config.clients.count - through.colluding
    if is_summed(config):
        changed = {"noise_multiplier": noise_of_sum(epsilon, config.privacy.delta, honest, evaluations), "clip_norm": 1.0}
        return config.mechanism.model_copy(update=changed)
    entries = client_scores(config, 2).ranges.dimension
    found = epsilon_of_bit(epsilon, config.privacy.delta, through.channel, honest, entries, evaluations)
    if is_seen(through.channel):
        return HarmonySettings(epsilon=found)
    return DuchiSettings(epsilon=found)
