"""Gradients of single records for an app with its own model.

The app's author provides the model, the loss and this node's samples. ldpfl computes the gradients and clips them.
"""

from __future__ import annotations

import logging
import pkgutil
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from torch import Tensor, nn

from ldpfl.data import Dataset, Samples
from ldpfl.data.persons import DEFAULT_ROWS, Persons, normalise_names
from ldpfl.data.samples import Inputs, density_problem, map_tensors
from ldpfl.errors import ConfigError, GivesGradients, GivesWeights, LdpflError, NamesNoPersons, PrivacyError, shown
from ldpfl.experiments import RunConfig
from ldpfl.experiments.build import choose_device, mechanism_of, with_torch_defaults
from ldpfl.experiments.config import parse_config
from ldpfl.experiments.trainers import trainer_after_trial
from ldpfl.flower.app_failures import TRY_IT, UNUSABLE
from ldpfl.flower.arrays import layout_of, only_arrays, to_arrays, to_vector
from ldpfl.flower.operator_node import operator_setting
from ldpfl.flower.terms import RECORD, RoundTerms
from ldpfl.mechanisms import Mechanism
from ldpfl.mechanisms.base import record_clip_of
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.models.layout import ParameterLayout
from ldpfl.simulation import LocalTask, Trainer
from ldpfl.simulation.gradients import confined
from ldpfl.simulation.local_steps import LocalOptimiser, full_batch
from ldpfl.tasks import Task
from ldpfl.util.user_cache import Warn
from ldpfl.util.user_code import GIVEN

LOGGER = logging.getLogger("flwr.ldpfl")

Loss = Callable[[Tensor, Tensor], Tensor]
"""Function of a model's outputs for B records and their targets (B, ...). It returns the mean loss, or the loss (B,) of each record.

Where records are protected, B is 1. Where persons are protected, it is called with the records of one person.
"""

_DTYPES = (torch.float32, torch.int64)
"""Dtypes that a record's inputs and targets may have."""

_MADE_UP_TOKENS = 2
"""Made-up tokens are 0 and 1, which are valid for every embedding of at least two words."""


@dataclass(frozen=True, eq=False)
class RecordTask:
    """Task of an app with its own model: the model, this node's records, and the loss of one record.

    ldpfl calls the model and the loss with one record at a time, computes the gradient at the weights that the server sent, and clips it.
    Where the terms protect persons (``data.person``), it calls them with the records of one person at a time and clips their mean gradient.
    The author need not clip anything, but must ensure three things. Each row holds all of one record. No row depends on other records; for
    example, a column scaled by this node's own mean breaks this. Model and loss are functions of their arguments alone.

    Attributes:
        model: its trainable parameters must be the arrays that the server sends, by name and shape. Their values here are not used.
        inputs: (N, ...) float32, or int64 for tokens and categories, as the model expects them; or a dict of several such tensors, by the
            names of the arguments of ``forward``. Values are not checked: a record whose gradient is not finite adds nothing.
        targets: (N, ...) float32 or int64.
        loss: such as ``torch.nn.functional.cross_entropy``. It is called with one record at a time where records are protected. It runs
            under ``torch.func.vmap``, where control flow must not depend on values. If it does, records are processed one after another,
            which is slower.
        persons: (N,) the person to whom each row belongs, as a whole number or a text; see :func:`ldpfl.data.persons.normalise_names`.
            None if this is not known: then only single records can be protected. This attribute defines the persons, whatever column the
            terms name, so the node's operator relies on the author. A row without a person adds nothing where persons are protected.

    Raises:
        ConfigError: there is no record, or rows and dtypes do not fit.
    """

    model: nn.Module
    inputs: Inputs
    targets: Tensor
    loss: Loss
    persons: Sequence[Hashable] | Tensor | None = None

    def __post_init__(self) -> None:
        inputs = list(self.inputs.values()) if isinstance(self.inputs, Mapping) else [self.inputs]
        if not all(isinstance(part, Tensor) for part in (*inputs, self.targets)):
            raise ConfigError(
                "`inputs` and `targets` of RecordTask must be PyTorch tensors (`inputs` may be a dict of tensors): convert arrays with "
                "torch.from_numpy"
            )
        if not isinstance(self.model, nn.Module):
            raise ConfigError(f"`model` of RecordTask must be a torch.nn.Module, got {shown(self.model)}: give the model itself")
        if not inputs:
            raise ConfigError("`inputs` is an empty dict: give a tensor for each argument of the model's forward")
        for name, part in (*(("inputs", part) for part in inputs), ("targets", self.targets)):
            if problem := density_problem(part):
                raise ConfigError(f"`{name}` are {problem}")
            if part.dim() == 0 or part.dtype not in _DTYPES:
                raise ConfigError(f"`{name}` has {part.dtype} and shape {tuple(part.shape)}, expected rows of float32 or int64: convert it")
            if len(part) != len(self.targets):
                raise ConfigError(f"`inputs` has {len(part)} rows and `targets` has {len(self.targets)}: give one target for each row")
        if not len(self.targets):
            raise ConfigError("RecordTask has no records: give at least one row")
        if self.persons is not None and len(self.persons) != len(self.targets):
            raise ConfigError(
                f"`persons` has {len(self.persons)} entries and `targets` has {len(self.targets)} rows: give one person for each row"
            )
        if not callable(self.loss):
            raise ConfigError(
                f"`loss` of RecordTask must be a function of outputs and targets, got {shown(self.loss)}: give one such as "
                "torch.nn.functional.cross_entropy"
            )

    def check_persons(self) -> None:
        """Raise if ``persons`` is given and a row has no person.

        Raises:
            ConfigError: a row's entry in ``persons`` is empty.
        """
        names = self._names()
        if "" in names:
            raise ConfigError(
                f"`persons` is empty in row {names.index('')} (counted from 0): give each row a whole number or a text that names its "
                "person, or leave the row out"
            )

    def persons_by(self, max_rows: int) -> Persons | None:
        """Return which rows belong to which person. At most ``max_rows`` rows of a person count in a round. None if ``persons`` is None.

        Raises:
            ConfigError: no row names a person.
        """
        return None if self.persons is None else Persons.of(self._names(), max_rows)

    def _names(self) -> list[str]:
        """Return the name of each row's person, "" for a row without one. The list is empty if ``persons`` is None."""
        if self.persons is None:
            return normalise_names(())
        return normalise_names(self.persons.tolist() if isinstance(self.persons, Tensor) else self.persons)

    def check(self) -> None:
        """Try the model and the loss on made-up samples of the same shapes, for tests of an app. No record is looked at.

        Raises:
            PrivacyError: the model mixes samples, remembers them, or draws random numbers.
            ConfigError: model and loss do not fit the shapes, or fail; or ``persons`` is given and a row has no person.
        """
        self.check_persons()
        layout = ParameterLayout.from_module(self.model)
        weights = layout.flatten({name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}).cpu()
        config = parse_config("", ["mechanism.name=dp-sgd", "mechanism.perturbed=gradient"], origin="the trial")
        mechanism = mechanism_of(config, LayerRanges(torch.tensor(0.0), torch.tensor(1.0), layout.sizes))  # any center and radius will do
        # Called for its trial alone, which raises if something does not fit.
        trainer_of_records(self, layout, weights, config, mechanism, torch.device("cpu"), self.persons_by(DEFAULT_ROWS), LOGGER.warning)


Records = Callable[[Context], RecordTask]
"""Function that returns this node's model and records for Flower's context. It runs in each round, in the app's own process."""


@dataclass(frozen=True)
class RecordGradients:
    """A ClientApp that computes the gradients of an app's records at the server's weights, and clips them where the terms ask for it.

    Attributes:
        records: function that returns the records; or its import path, ``package.module:name``.
    """

    records: Records | str

    def __call__(self, message: Message, context: Context) -> Message:
        """Reply with the sum of the clipped gradients, or the gradient of the mean loss: PRIVATE, for ``LdpClientApp`` to protect.

        Raises:
            PrivacyError: the app's records are no task for the arrays in the message. The text repeats nothing of the records.
        """
        terms = RoundTerms.from_record(message.content.config_records[RECORD])
        arrays = only_arrays(message.content, allowed=tuple(message.content.config_records))
        layout = layout_of(arrays, terms.layers)
        records: Records = import_named(self.records) if isinstance(self.records, str) else self.records
        task = records(context)
        if not isinstance(task, RecordTask):
            raise PrivacyError(
                f"the function that LdpClientApp(records=...) names returned a {type(task).__name__}, expected an ldpfl.flower.RecordTask: "
                "return RecordTask(model, inputs, targets, loss=...)"
            )
        if terms.config.data.person and task.persons is None:
            raise PrivacyError("data.person asks to protect persons, but this node's RecordTask has no persons: give it `persons`")
        mechanism = terms.mechanism(terms.ranges(layout))
        gradient = _gradient(task, layout, to_vector(arrays, layout), terms, mechanism)
        if not gradient.any():
            LOGGER.warning(
                "%sno record of this node's app has a gradient that is finite and not 0. To see why, run %s on this node", UNUSABLE, TRY_IT
            )
        return Message(RecordDict({"gradients": to_arrays(gradient, layout)}), reply_to=message)


def check_values_asked(config: RunConfig, *, weights: bool, gradients: bool, persons: bool) -> None:
    """Raise if an app does not return the values that the terms ask for. All arguments are public facts.

    Args:
        weights: whether the app can return trained weights.
        gradients: whether the app can return gradients.
        persons: whether the app says to whom each record belongs.

    Raises:
        Declined: the app does not return these values.
    """
    if config.mechanism.perturbed == "gradient" and not gradients:  # `perturbed` says which values the mechanism randomises
        raise GivesWeights(
            f"the round asks for gradients ({config.mechanism.name}), but this node's app returns trained weights, in which the influence "
            "of one record is not bounded; nothing was charged or sent. The app's author should use LdpClientApp(records=...): see "
            "docs/flower.md"
        )
    if config.mechanism.perturbed != "gradient" and not weights:
        raise GivesGradients(
            f"the round asks for trained weights (mechanism.perturbed is {config.mechanism.perturbed!r}), but this node's app returns "
            "gradients of records; nothing was charged or sent. The server should set mechanism.perturbed to 'gradient', as for dp-sgd"
        )
    if config.data.person and gradients and not persons:
        raise NamesNoPersons(
            f"the round protects persons (data.person is {config.data.person!r}), but this node's app names no persons; nothing was "
            "charged or sent. The app's author should use RecordTask(persons=...) and LdpClientApp(persons=True): see docs/flower.md"
        )


def device_of_node() -> torch.device:
    """Return the device on which this node trains, as its operator has set it.

    Raises:
        ConfigError: there is no such device. The error is raised here, and not where devices are chosen, because no data are read here:
            :func:`ldpfl.flower.confined_process.describe_error` passes its text on.
    """
    try:
        return choose_device(operator_setting("device") or "cpu")
    except ConfigError as error:
        raise ConfigError(f"LDPFL_DEVICE: {error}") from None


@with_torch_defaults()
def _gradient(task: RecordTask, layout: ParameterLayout, weights: Tensor, terms: RoundTerms, mechanism: Mechanism) -> Tensor:
    """Return the gradient (d,) over all records of ``task`` at the server's ``weights`` (d,), whose layers are ``layout``: PRIVATE.

    Where the mechanism protects records or persons, it is the sum of their clipped gradients, else the gradient of the mean loss.
    """
    device, config = device_of_node(), terms.config
    by_person = config.data.person and record_clip_of(mechanism) is not None
    persons = task.persons_by(config.data.person_rows) if by_person else None
    try:
        model_layout = ParameterLayout.from_module(task.model)
        expected_shapes = dict(zip(layout.names, layout.shapes, strict=True))
        fits = dict(zip(model_layout.names, model_layout.shapes, strict=True)) == expected_shapes
        trainer = trainer_of_records(task, layout, weights, config, mechanism, device, persons, _warn_without_names) if fits else None
    except LdpflError:  # its text is not passed on, because it names parts of the app
        raise PrivacyError(
            "the model or the loss of this node's app cannot be trained on one record at a time: to see why, run ldpfl deploy check-node "
            "--app APP --try on this node, or RecordTask.check() in a test of the app"
        ) from None
    if trainer is None:  # the model has other parameters than the arrays that the server sent
        raise PrivacyError(
            "the trainable parameters of this node's model differ in name or shape from the arrays that the server sent: build the same "
            "model on the server and on each node"
        )
    count = len(task.targets if persons is None else persons)
    all_records = full_batch([np.arange(count)], count)
    return confined(trainer).train(weights, all_records.to(device), terms.planned.trained + 1)[0].cpu()  # of the schedule's only client


def is_import_path(path: str) -> bool:
    """Tell whether ``path`` has the form ``package.module:name``."""
    module, _, name = path.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), *name.split(".")))


def import_named(path: str) -> Any:
    """Import and return the object at ``path``, ``package.module:name``, which ``LdpClientApp`` was given.

    Raises:
        PrivacyError: there is nothing to call at ``path``. The text repeats only ``path``, which the app's author wrote.
        Exception: the app's own, raised while its module is imported.
    """
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        # The path is wrong if the missing module is a part of the path, or if pkgutil itself raised. Any other error is the app's own.
        is_missing = isinstance(error, ModuleNotFoundError) and f"{path.replace(':', '.')}.".startswith(f"{error.name}.")
        if not is_missing and traceback.extract_tb(error.__traceback__)[-1].filename != pkgutil.__file__:
            raise
        found = None
    if not callable(found):
        raise PrivacyError(
            f"LdpClientApp names {path!r}, but this node finds no app or function there: correct the path, as in package.module:name, or "
            "install the package"
        )
    return found


def _loss_by_record(loss: Loss) -> Loss:
    """Return a function that gives the loss (B,) of each record, also if ``loss`` returns the mean over its records."""

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss (B,) of each of B records, given the model's ``outputs`` (B, ...) and their ``targets`` (B, ...)."""
        value = loss(outputs, targets)
        if not isinstance(value, Tensor) or value.dim():
            return value  # the loss of each record already; or no tensor, which the caller reports
        if len(targets) == 1:
            return value[None]  # the mean over a single record is its loss
        return torch.stack([loss(outputs[row : row + 1], targets[row : row + 1]) for row in range(len(targets))])

    return losses


def trainer_of_records(
    task: RecordTask,
    layout: ParameterLayout,
    weights: Tensor,
    config: RunConfig,
    mechanism: Mechanism,
    device: torch.device,
    persons: Persons | None,
    warn: Warn,
    *,
    quotes: bool = True,
) -> Trainer:
    """Return the trainer that computes the gradients of ``task``, after a trial on made-up samples of the same shapes.

    Args:
        layout, weights: names and shapes of the model's arrays, and their values (d,), as the server sent them.
        persons: which rows belong to which person, if persons are protected; None to protect records.
        warn: function that gets the warnings.
        quotes: whether warnings may quote exceptions of the app. They may not on a node, where they may repeat values of its records.
    """
    samples = Samples(map_tensors(Tensor.detach, task.inputs), task.targets.detach())
    app_task = Task(name="own", targets="number", losses=_loss_by_record(task.loss), metrics={})
    # The app's inputs are not normalised. The learning rate has no effect, because the trainer returns gradients.
    local = LocalTask(task.model.to(device), layout, samples.to(device), mean=(), std=(), optimiser=LocalOptimiser(1.0), task=app_task)
    # The trial reads only the vocabulary and the number of outputs; 0 is for an unknown number.
    no_samples = samples.take(slice(0))
    dataset = Dataset("records", samples, no_samples, outputs=0, mean=(), std=(), fingerprint="", vocabulary=_MADE_UP_TOKENS)
    # Model and data are the app's own objects, whatever names the server's config has.
    renamed = {"model": config.model.model_copy(update={"name": GIVEN}), "data": config.data.model_copy(update={"name": GIVEN})}
    return trainer_after_trial(config.model_copy(update=renamed), local, mechanism, weights, dataset, warn, persons, quotes=quotes)


def _warn_without_names(message: str) -> None:
    """Log on a node that the app's model has a problem. The trainer's ``message`` is not used, because it may name parts of the app."""
    LOGGER.warning(
        "the app's model is slow, mixes rows of a person, or has no finite gradient: call RecordTask.check() in a test to see which"
    )
