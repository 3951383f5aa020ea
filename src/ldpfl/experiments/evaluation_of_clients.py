"""Read a config's evaluation at clients, for runs that protect everything of a client.

A client computes a vector of figures about the model on its held-back records. Behind a shuffler, or a sum of bits, it sends a bit about
each entry of its vector, and hides among all clients. If nobody is trusted, it secretly draws one entry and sends a single bit, which has
pure epsilon. In a sum of vectors (``dp-fedavg``), it sends its vector with its share of the noise.
"""

from __future__ import annotations

from ldpfl import tasks
from ldpfl.errors import ConfigError
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.planning.evaluation_noise import epsilon_of_bit, noise_multiplier_for_sum, server_sees_senders
from ldpfl.mechanisms.dp_fedavg import DpFedAvgSettings
from ldpfl.mechanisms.duchi import DuchiSettings
from ldpfl.mechanisms.harmony import HarmonySettings
from ldpfl.mechanisms.settings import MechanismSettings
from ldpfl.simulation.evaluating_clients import BitScores, ClientScores, MeanScores


def check_evaluation_fits(config: RunConfig) -> None:
    """Raise unless the accountants can add the evaluations at clients to the guarantee of training.

    Raises:
        ConfigError: the mechanism, the channel or the participation does not allow it.
    """
    mechanism, channel = config.mechanism, config.shuffling.channel
    if not mechanism.protects:
        raise ConfigError(
            f"evaluation.epsilon is {config.evaluation.epsilon}, but mechanism {mechanism.name!r} adds no noise that would protect the "
            "measurement: choose another mechanism, or leave evaluation.epsilon out"
        )
    if config.clients.self_sampling != "off" or config.clients.once:
        raise ConfigError("evaluation.epsilon needs all clients in every round: leave clients.self_sampling and clients.once out")
    if not (server_sees_senders(channel) or mechanism.sends_bits or evaluates_by_sums(config)):
        raise ConfigError(
            f"evaluation.epsilon has clients send bits, which shuffling.channel = {channel!r} can hide only among other bits, but "
            f"mechanism {mechanism.name!r} sends none: set mechanism.name to 'rotated-sign', 'duchi' or 'harmony', or to 'dp-sgd' for "
            "records; or set shuffling.channel to 'direct'"
        )


def evaluates_by_sums(config: RunConfig) -> bool:
    """Return whether clients evaluate by noisy vectors, of which the server sees only the sum. Otherwise they send bits."""
    return isinstance(config.mechanism, DpFedAvgSettings) and config.shuffling.channel == "secure-sum"


def figures_layout(config: RunConfig, outputs: int) -> ClientScores:
    """Return the layout of the vector of figures that each client sends. ``outputs`` is the model's number of outputs."""
    kind = MeanScores if evaluates_by_sums(config) else BitScores
    return kind(tasks.create(config.task.name, outputs).targets, outputs, config.evaluation.loss_bound)


def evaluation_mechanism_settings(config: RunConfig, evaluations: int) -> MechanismSettings:
    """Return the settings of the mechanism for one evaluation at clients.

    The run has this number of ``evaluations``. All of them together have ``evaluation.epsilon``.
    """
    epsilon, shuffling = config.evaluation.epsilon, config.shuffling
    if epsilon == "off":
        raise ConfigError("evaluation.epsilon is 'off', so nothing is measured at clients: set it to a number")
    honest = config.clients.count - shuffling.colluding
    if evaluates_by_sums(config):
        changed = {"noise_multiplier": noise_multiplier_for_sum(epsilon, config.privacy.delta, honest, evaluations), "clip_norm": 1.0}
        return config.mechanism.model_copy(update=changed)
    entries = figures_layout(config, outputs=2).ranges.dimension  # the same for any number of outputs
    bit_epsilon = epsilon_of_bit(epsilon, config.privacy.delta, shuffling.channel, honest, entries, evaluations)
    if server_sees_senders(shuffling.channel):
        return HarmonySettings(epsilon=bit_epsilon)  # one bit about one entry
    return DuchiSettings(epsilon=bit_epsilon)  # a bit about each entry
