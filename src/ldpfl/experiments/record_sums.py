"""Read a config's settings of sums over records: least squares, and evaluation at clients on records that they hold back."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from ldpfl import models, tasks
from ldpfl.data import Dataset
from ldpfl.data.holding_out import split_off_share, split_off_share_by_name
from ldpfl.data.persons import Persons
from ldpfl.data.samples import Division
from ldpfl.errors import ConfigError
from ldpfl.experiments.config import ClippingConfig, RunConfig
from ldpfl.experiments.dataset import Description
from ldpfl.experiments.evaluation_of_clients import check_evaluation_fits, evaluation_mechanism_settings, figures_layout
from ldpfl.experiments.planning.evaluation_noise import noise_multiplier_for_sum
from ldpfl.mechanisms.dp_sgd import DpSgdSettings
from ldpfl.simulation.evaluating import RecordScores, is_due
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
    is_class, bias = targets == "class", config.model.name == WITH_BIAS
    norm, bound, share = settings.feature_norm, settings.target_bound, settings.target_share
    return LeastSquares(
        inputs=prod(data.shape),
        outputs=data.outputs,
        classes=is_class,
        bias=bias,
        norm=norm,
        bound=bound,
        target_share=share,
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
        check_evaluation_fits(config)
    target = config.privacy.target_epsilon
    if target != "off" and config.evaluation.epsilon >= target:
        raise ConfigError(
            f"evaluation.epsilon is {config.evaluation.epsilon:g}, but the whole run has only privacy.target_epsilon = {target:g}: set "
            "evaluation.epsilon below it"
        )
    return True


def rounds_evaluated_at_clients(config: RunConfig) -> list[int]:
    """Return the rounds after which the model is evaluated at clients; an empty list if it is not."""
    rounds, every = config.training.rounds, config.evaluation.every
    return [number for number in range(1, rounds + 1) if is_due(number, rounds, every)] if is_evaluated(config) else []


def config_for_evaluation(config: RunConfig, *, records: int = 0) -> RunConfig:
    """Return ``config`` with the mechanism for one evaluation at clients, which has its own noise.

    Args:
        records: mean number of records that a client holds back; 0 uses that of the simulated clients. Bits do not depend on it.
    """
    if not isinstance(config.mechanism, DpSgdSettings):
        return config.model_copy(
            update={
                "mechanism": evaluation_mechanism_settings(config, len(rounds_evaluated_at_clients(config))),
                "clipping": ClippingConfig(),
            }
        )
    epsilon, shuffling = config.evaluation.epsilon, config.shuffling
    if epsilon == "off":
        raise ConfigError("evaluation.epsilon is 'off', so nothing is measured at clients: set it to a number")
    # In a secure sum, the noise of all honest clients adds up. Otherwise a client's own noise has to be enough.
    honest = config.clients.count - shuffling.colluding if shuffling.channel == "secure-sum" else 1
    noise = noise_multiplier_for_sum(epsilon, config.privacy.delta, honest, len(rounds_evaluated_at_clients(config)))
    settings = _require_records(config, "evaluation.epsilon")
    changed = settings.model_copy(update={"noise_multiplier": noise, "clip_norm": 1.0, "records": records})
    return config.model_copy(update={"mechanism": changed, "clipping": ClippingConfig()})


def evaluation_vector_layout(config: RunConfig, outputs: int) -> RecordScores:
    """Return the layout of the vector of figures that each held-back record, or each client if clients are protected, contributes.

    ``outputs`` is the model's number of outputs.
    """
    if isinstance(config.mechanism, DpSgdSettings):
        layout = RecordScores(tasks.create(config.task.name, outputs).targets, outputs, config.evaluation.loss_bound)
    else:
        layout = figures_layout(config, outputs)
    # A user's own model or task might mix the records of a batch, so it sees them one by one.
    return replace(layout, one_by_one=config.model.name not in models.names() or config.task.name not in tasks.names())


def split_for_evaluation(config: RunConfig, division: Division, persons: Persons | None, data: Dataset) -> tuple[Division, Division]:
    """Split each client's records, or ``persons``, into records that are trained on and records that are held back.

    The names of persons decide if persons are protected, and the names of files if the samples are files. Files come sorted by class, so
    their positions would reveal classes. Otherwise positions decide. On a node, all clients share its table, so it is split once. A client
    with too few records holds none back.

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
    if not held_out.sizes.any() or not trained_on.sizes.all():
        problem = "a client has none to train on" if held_out.sizes.any() else "no client holds any back"
        raise ConfigError(
            f"clients have {int(division.sizes.min()):,} to {int(division.sizes.max()):,} records or persons each, of which "
            f"evaluation.share = {share:g} is held back: {problem}; set another share, or fewer clients"
        )
    return trained_on, held_out
