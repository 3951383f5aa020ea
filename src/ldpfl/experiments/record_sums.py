"""Read a config's settings of sums over records: least squares, and evaluation at clients on records that they hold back.

In runs that protect everything of a client, a client computes a vector of figures about the model on its held-back records. Behind a
shuffler, or a sum of bits, it sends a bit about each entry of its vector, and hides among all clients. If nobody is trusted, it secretly
draws one entry and sends a single bit, which has pure epsilon. In a sum of vectors (``dp-fedavg``), it sends its vector with its share of
the noise.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from ldpfl import models, tasks
from ldpfl.data import Dataset
from ldpfl.data.encoder import Encoder
from ldpfl.data.holding_out import split_off_share, split_off_share_by_name
from ldpfl.data.persons import Persons
from ldpfl.data.samples import Division
from ldpfl.errors import ConfigError
from ldpfl.experiments.config import ClippingConfig, RunConfig
from ldpfl.experiments.dataset import Description
from ldpfl.experiments.planning.evaluation_noise import epsilon_of_bit, noise_multiplier_for_sum, server_sees_senders
from ldpfl.mechanisms.dp_fedavg import DpFedAvgSettings
from ldpfl.mechanisms.dp_sgd import DpSgdSettings
from ldpfl.mechanisms.duchi import DuchiSettings
from ldpfl.mechanisms.harmony import HarmonySettings
from ldpfl.mechanisms.settings import MechanismSettings
from ldpfl.simulation.evaluating_records import RecordScores, is_due
from ldpfl.simulation.evaluating_whole_clients import BitScores, ClientScores, MeanScores
from ldpfl.simulation.least_squares import LeastSquares

LINEAR, WITH_BIAS = "linear", "logistic-regression"
"""Models that consist of a linear head."""


def least_squares_solver(config: RunConfig, data: Description) -> LeastSquares | None:
    """Return the least-squares solver of the run; None if the run trains by gradient steps.

    Raises:
        ConfigError: the method is least squares, and another setting does not fit it.
    """
    if config.training.method != "least-squares":
        return None
    settings, targets = config.least_squares, tasks.create(config.task.name, data.outputs).targets
    _require_records(config, "training.method = 'least-squares'")
    if config.model.name not in (LINEAR, WITH_BIAS) or config.model.mend:
        raise ConfigError(
            f"training.method = 'least-squares' solves for a linear head, and model.name is {config.model.name!r}: set it to {LINEAR!r}, "
            f"or to {WITH_BIAS!r}, which has a bias; to train anything below the head, set training.method to 'gradient'"
        )
    if config.task.name not in ("classification", "regression"):
        raise ConfigError(
            f"training.method = 'least-squares' works only for task.name 'classification' or 'regression', and task.name is "
            f"{config.task.name!r}: set training.method to 'gradient'"
        )
    if data.shape is None or data.vocabulary is not None:
        raise ConfigError(
            "training.method = 'least-squares' works only with samples of one tensor of numbers: set training.method to 'gradient'"
        )
    if config.training.patience:
        raise ConfigError("training.patience stops training early, but least squares has only one round: leave training.patience out")
    return LeastSquares(
        inputs=prod(data.shape),
        outputs=data.outputs,
        classes=targets == "class",
        bias=config.model.name == WITH_BIAS,
        norm=settings.feature_norm,
        bound=settings.target_bound,
        target_share=settings.target_share,
        floor=settings.eigenvalue_floor,
        ridge=settings.ridge,
    )


def _require_records(config: RunConfig, purpose: str) -> DpSgdSettings:
    """Return the settings of ``dp-sgd``, or raise if the run does not protect sums over all records of all clients.

    Args:
        purpose: the setting that needs such a mechanism, for the message.

    Raises:
        ConfigError: the mechanism does not protect records, or not all records or clients take part.
    """
    mechanism = config.mechanism
    if not isinstance(mechanism, DpSgdSettings):
        raise ConfigError(
            f"{purpose} releases a sum over records, but mechanism {mechanism.name!r} does not protect records: set mechanism.name to "
            "'dp-sgd'"
        )
    if mechanism.sample_rate != 1:
        raise ConfigError(f"{purpose} takes all records, and mechanism.sample_rate is {mechanism.sample_rate:g}: set it to 1")
    if config.clients.self_sampling != "off" or config.clients.once:
        raise ConfigError(f"{purpose} needs all clients at once: leave clients.self_sampling and clients.once out")
    return mechanism


def is_evaluated(config: RunConfig) -> bool:
    """Return whether the model is evaluated at clients, on held-back records.

    Raises:
        ConfigError: ``evaluation.epsilon`` is set, and another setting does not fit it.
    """
    if config.evaluation.epsilon == "off":
        return False
    if isinstance(config.mechanism, DpSgdSettings):
        _require_records(config, "evaluation.epsilon")
    else:
        _check_evaluation_fits(config)
    target = config.privacy.target_epsilon
    if target != "off" and config.evaluation.epsilon >= target:
        raise ConfigError(
            f"evaluation.epsilon is {config.evaluation.epsilon:g}, but the whole run has only privacy.target_epsilon = {target:g}: set "
            "evaluation.epsilon below it"
        )
    return True


def _check_evaluation_fits(config: RunConfig) -> None:
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
    if not (server_sees_senders(channel) or mechanism.sends_bits or _evaluates_by_sums(config)):
        raise ConfigError(
            f"evaluation.epsilon has clients send bits, which shuffling.channel = {channel!r} can hide only among other bits, but "
            f"mechanism {mechanism.name!r} sends none: set mechanism.name to 'rotated-sign', 'duchi' or 'harmony', or to 'dp-sgd' for "
            "records; or set shuffling.channel to 'direct'"
        )


def _evaluates_by_sums(config: RunConfig) -> bool:
    """Return whether whole clients, if they are protected, evaluate by noisy vectors behind a sum. Otherwise they send bits."""
    return isinstance(config.mechanism, DpFedAvgSettings) and config.shuffling.channel == "secure-sum"


def rounds_evaluated_at_clients(config: RunConfig) -> list[int]:
    """Return the rounds after which the model is evaluated at clients; an empty list if it is not."""
    rounds, every = config.training.rounds, config.evaluation.every
    return [number for number in range(1, rounds + 1) if is_due(number, rounds, every)] if is_evaluated(config) else []


def config_for_evaluation(config: RunConfig, *, records: int = 0) -> RunConfig:
    """Return ``config`` with the mechanism for one evaluation at clients, which has its own noise.

    Args:
        records: mean number of records that a client holds back; 0 uses that of the simulated clients. Only ``dp-sgd`` uses it.

    Raises:
        ConfigError: ``evaluation.epsilon`` is "off", or another setting does not fit it.
    """
    epsilon, evaluations = config.evaluation.epsilon, len(rounds_evaluated_at_clients(config))
    if epsilon == "off":
        raise ConfigError("evaluation.epsilon is 'off', so nothing is measured at clients: set it to a number")
    mechanism = _mechanism_for_evaluation(config, epsilon, evaluations, records)
    # The clipping norm of an evaluation is fixed: adaptive clipping (clipping.target_quantile) is for training.
    return config.model_copy(update={"mechanism": mechanism, "clipping": ClippingConfig()})


def _mechanism_for_evaluation(config: RunConfig, epsilon: float, evaluations: int, records: int) -> MechanismSettings:
    """Return the settings of the mechanism for one evaluation, if all ``evaluations`` together have ``epsilon``."""
    delta, channel, honest = config.privacy.delta, config.shuffling.channel, config.clients.count - config.shuffling.colluding
    if isinstance(config.mechanism, DpSgdSettings):
        # In a secure sum, the noise of all honest clients adds up. Otherwise a client's own noise has to be enough.
        noise = noise_multiplier_for_sum(epsilon, delta, honest if channel == "secure-sum" else 1, evaluations)
        settings = _require_records(config, "evaluation.epsilon")
        return settings.model_copy(update={"noise_multiplier": noise, "clip_norm": 1.0, "records": records})
    if _evaluates_by_sums(config):
        noise = noise_multiplier_for_sum(epsilon, delta, honest, evaluations)
        return config.mechanism.model_copy(update={"noise_multiplier": noise, "clip_norm": 1.0})
    entries = _figures_layout(config, outputs=2).ranges.dimension  # the same for any number of outputs
    bit_epsilon = epsilon_of_bit(epsilon, delta, channel, honest, entries, evaluations)
    if server_sees_senders(channel):
        return HarmonySettings(epsilon=bit_epsilon)  # one bit about one entry
    return DuchiSettings(epsilon=bit_epsilon)  # a bit about each entry


def _figures_layout(config: RunConfig, outputs: int) -> ClientScores:
    """Return the layout of the vector of figures that each client sends. ``outputs`` is the model's number of outputs."""
    kind = MeanScores if _evaluates_by_sums(config) else BitScores
    return kind(tasks.create(config.task.name, outputs).targets, outputs, config.evaluation.loss_bound)


def evaluation_vector_layout(config: RunConfig, outputs: int, encoder: Encoder | None = None) -> RecordScores:
    """Return the layout of the vector of figures that each held-back record, or each client if clients are protected, contributes.

    Args:
        outputs: number of outputs of the model.
        encoder: encoder of the rows if the data are a table. Only the choice of the bins of scores needs it.
    """
    if isinstance(config.mechanism, DpSgdSettings):
        layout = RecordScores(tasks.create(config.task.name, outputs).targets, outputs, config.evaluation.loss_bound)
    else:
        layout = _figures_layout(config, outputs)
    is_logistic = config.model.name == WITH_BIAS and layout.of_classes and outputs == 2 and not config.model.mend
    # Of texts, and of features that a network computes, no usual values are known.
    table = encoder.data if is_logistic and encoder is not None and not encoder.data.text else None
    # A user's own model or task might mix the records of a batch, so it sees them one by one.
    one_by_one = config.model.name not in models.names() or config.task.name not in tasks.names()
    return replace(layout, one_by_one=one_by_one, table=table)


def split_for_evaluation(config: RunConfig, division: Division, persons: Persons | None, data: Dataset) -> tuple[Division, Division]:
    """Split each client's records, or ``persons``, into records that are trained on and records that are held back.

    The names of persons decide if persons are protected, and the names of files if the samples are files. Files come sorted by class, so
    their positions would reveal classes. Otherwise positions decide. A client with too few records holds none back. On a node, every client
    of ``division`` has all rows of the node's table, so the first client's rows are split, for all.

    Raises:
        ConfigError: no client holds any record back, or some client has none left to train on.
    """
    share, is_at_node = config.evaluation.share, config.data.at_nodes
    division_to_split = division[:1] if is_at_node else division
    if persons is not None and data.persons is not None:
        trained_on, held_out = split_off_share_by_name(division_to_split, data.persons[persons.rows[persons.first]], share)
    elif data.identities is not None:
        trained_on, held_out = split_off_share_by_name(division_to_split, data.identities.astype(str), share)
    else:
        trained_on, held_out = split_off_share(division_to_split, share)
    if is_at_node:
        return Division.shared(trained_on[0], len(division)), Division.shared(held_out[0], len(division))
    nobody_holds_back = not held_out.sizes.any()
    if nobody_holds_back or not trained_on.sizes.all():
        unit = "records" if persons is None else "persons"
        problem, remedy = ("no client holds any back", "a larger") if nobody_holds_back else ("a client has none to train on", "a smaller")
        raise ConfigError(
            f"clients have {int(division.sizes.min()):,} to {int(division.sizes.max()):,} {unit} each, of which evaluation.share = "
            f"{share:g} is held back: {problem}; set {remedy} evaluation.share, or fewer clients (clients.count)"
        )
    return trained_on, held_out
