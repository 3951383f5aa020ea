"""Gradients of single records in an app of one's own.

Its author brings the model, the loss and this node's samples; ldpfl takes the gradients and bounds them.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from torch import Tensor, nn

from ldpfl.data import Dataset, Samples
from ldpfl.data.inputs import Inputs, each, not_dense
from ldpfl.data.persons import DEFAULT_ROWS, Persons, names_of
from ldpfl.errors import ConfigError, GivesGradients, GivesWeights, LdpflError, NamesNoPersons, PrivacyError
from ldpfl.experiments import RunConfig
from ldpfl.experiments.build import as_usual, choose_device, mechanism_of
from ldpfl.experiments.config import parse_config
from ldpfl.experiments.trainers import tried
from ldpfl.flower.arrays import layout_of, only_arrays, to_arrays, to_vector
from ldpfl.flower.operator_node import named
from ldpfl.flower.terms import RECORD, RoundTerms
from ldpfl.mechanisms import Mechanism
from ldpfl.mechanisms.hooks import record_clip_of
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
"""What a model gives for B records, and their targets (B, ...), to their mean loss, or to the loss (B,) of each of them.

Where records are protected, B is 1. Where persons are, the records of one person are given together.
"""

_TYPES = (torch.float32, torch.int64)

_MADE_UP_TOKENS = 2
"""Made-up whole numbers are 0 and 1, which every embedding of two words or more knows."""


@dataclass(frozen=True, eq=False)
class RecordTask:
    """What an app of one's own learns from: a model, this node's records, and the loss of one record.

    ldpfl calls the model and the loss with one record at a time, takes the gradient at the weights that the server sent, and bounds it.
    Where the terms protect persons (``data.person``), it does so with the records of one person at a time: their mean gradient is bounded.
    So the bound is not the author's affair. What is: that each row holds all of one record, that no other record decides about a row (a
    column scaled by this node's own mean is no such row), and that model and loss are functions of their arguments alone.

    Attributes:
        model: its trainable parameters are the arrays that the server sends, by name and shape; their values here do not count.
        inputs: (N, ...) float32, or int64 for tokens and categories, as the model takes them; or several such tensors, by the names of
            the arguments of its ``forward``. Values are not looked at: a record that gives no finite gradient adds nothing.
        targets: (N, ...) float32 or int64.
        loss: such as ``torch.nn.functional.cross_entropy``; it is given one record at a time where records are protected. It runs under
            ``torch.func.vmap``, where it must not look at values to decide what to do; if it does, records are taken one after
            another, which is slower.
        persons: (N,) whose each row is, a whole number or a text, taken as :func:`ldpfl.data.persons.names_of` says; None where nobody
            says, so that single records can be protected alone. It decides what a person is, whatever column the terms name: the
            node's operator relies on the author for it. A row that names nobody adds nothing where persons are protected.

    Raises:
        ConfigError: there is no record, or rows and types do not fit.
    """

    model: nn.Module
    inputs: Inputs
    targets: Tensor
    loss: Loss
    persons: Sequence[Hashable] | Tensor | None = None

    def __post_init__(self) -> None:
        inputs = list(self.inputs.values()) if isinstance(self.inputs, Mapping) else [self.inputs]
        if not all(isinstance(part, Tensor) for part in (*inputs, self.targets)):
            raise ConfigError("inputs and targets are to be PyTorch tensors, or inputs a dict of them: convert arrays by torch.from_numpy")
        if not inputs:
            raise ConfigError("inputs are an empty dict: name a tensor for each argument of the model's forward")
        for what, part in (*(("inputs", part) for part in inputs), ("targets", self.targets)):
            if problem := not_dense(part):
                raise ConfigError(f"{what} are {problem}")
            if part.dim() == 0 or part.dtype not in _TYPES:
                raise ConfigError(f"{what} are {part.dtype} of shape {tuple(part.shape)}, expected rows of float32 or int64: convert them")
            if len(part) != len(self.targets):
                raise ConfigError(f"inputs have {len(part)} rows and targets have {len(self.targets)}: give one target for each row")
        if not len(self.targets):
            raise ConfigError("there are no records: give one row or more")
        if self.persons is not None and len(self.persons) != len(self.targets):
            raise ConfigError(f"persons are {len(self.persons)} and targets have {len(self.targets)} rows: say of each row whose it is")

    def check_persons(self) -> None:
        """Return if each row that says whose it is names somebody.

        Raises:
            ConfigError: a row names nobody.
        """
        if "" in (names := self._names()):
            raise ConfigError(
                f"persons name nobody in row {names.index('')} (from 0), and a row of nobody adds nothing: give each row a whole number "
                "or a text, or leave the row out"
            )

    def persons_by(self, most: int) -> Persons | None:
        """Return who has which records, of whom ``most`` rows count in a round; None where nobody says.

        Raises:
            ConfigError: no row names a person.
        """
        return None if self.persons is None else Persons.of(self._names(), most)

    def _names(self) -> list[str]:
        return names_of(() if self.persons is None else self.persons.tolist() if isinstance(self.persons, Tensor) else self.persons)

    def check(self) -> None:
        """Try the model and the loss on made-up samples of the same shapes, for tests of an app. No record is looked at.

        Raises:
            PrivacyError: the model mixes samples, remembers them, or draws random numbers.
            ConfigError: model and loss do not fit the shapes, or fail; or a row names nobody.
        """
        self.check_persons()
        layout = ParameterLayout.from_module(self.model)
        weights = layout.flatten({name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}).cpu()
        config = parse_config("", ["mechanism.name=dp-sgd", "mechanism.perturbed=gradient"], origin="the trial")
        mechanism = mechanism_of(config, LayerRanges(torch.tensor(0.0), torch.tensor(1.0), layout.sizes))
        trainer_of_records(self, layout, weights, config, mechanism, torch.device("cpu"), self.persons_by(DEFAULT_ROWS), LOGGER.warning)


Records = Callable[[Context], RecordTask]
"""Gives this node's model and records, for Flower's context of a message; it runs in each round, in the app's own process."""


@dataclass(frozen=True)
class RecordGradients:
    """A ClientApp that takes the gradients of an app's records at the weights that came, bounded one by one where the terms say so.

    Attributes:
        records: gives the records; or its import path, ``package.module:name``.
    """

    records: Records | str

    def __call__(self, message: Message, context: Context) -> Message:
        """Return the sum over all records, or the gradient of their mean loss, in a reply: PRIVATE, for ``LdpClientApp`` to protect.

        Raises:
            PrivacyError: what the app gives is no task for the arrays that came. The text repeats nothing of it.
        """
        terms = RoundTerms.from_record(message.content.config_records[RECORD])
        arrays = only_arrays(message.content, allowed=tuple(message.content.config_records))
        layout = layout_of(arrays, terms.layers)
        records: Records = pkgutil.resolve_name(self.records) if isinstance(self.records, str) else self.records
        task = records(context)
        if not isinstance(task, RecordTask):
            raise PrivacyError(f"the records of this node's app are a {type(task).__name__}, expected ldpfl.flower.RecordTask")
        if terms.config.data.person and task.persons is None:
            raise PrivacyError("the terms protect persons, and this node's RecordTask does not say whose the rows are: give it persons=")
        mechanism = terms.mechanism(terms.ranges(layout))
        found = _gradient(task, layout, to_vector(arrays, layout), terms, mechanism)
        return Message(RecordDict({"gradients": to_arrays(found, layout)}), reply_to=message)


def check_kind(config: RunConfig, *, weights: bool, gradients: bool, persons: bool) -> None:
    """Return if an app that gives trained ``weights``, ``gradients`` or both has what the terms ask for. These facts are public.

    ``persons`` is whether the app says whose each of its records is.

    Raises:
        Declined: it has not.
    """
    if config.mechanism.perturbed == "gradient" and not gradients:
        raise GivesWeights(
            f"the terms ask for gradients ({config.mechanism.name}), and this node's app gives trained weights, of which nobody knows what "
            "one record did to them; nothing was charged or sent. The app's author is to give LdpClientApp(records=...): see docs/flower.md"
        )
    if config.mechanism.perturbed != "gradient" and not weights:
        raise GivesGradients(
            f"the terms ask for trained weights (mechanism.perturbed is {config.mechanism.perturbed!r}), and this node's app gives "
            "gradients of records; nothing was charged or sent. The server is to set mechanism.perturbed to 'gradient', as for dp-sgd"
        )

    if config.data.person and gradients and not persons:
        raise NamesNoPersons(
            f"the terms protect persons ({config.data.person!r}), and this node's app does not say whose its records are; nothing was "
            "charged or sent. The app's author is to give RecordTask(persons=...) and LdpClientApp(persons=True): see docs/flower.md"
        )


@as_usual()
def _gradient(task: RecordTask, layout: ParameterLayout, weights: Tensor, terms: RoundTerms, mechanism: Mechanism) -> Tensor:
    """Return the gradient (d,) over all records of ``task``: PRIVATE."""
    device, config = choose_device(named("device") or "cpu"), terms.config
    by_person = config.data.person and record_clip_of(mechanism) is not None
    persons = task.persons_by(config.data.person_rows) if by_person else None
    try:
        own = ParameterLayout.from_module(task.model)
        fits = dict(zip(own.names, own.shapes, strict=True)) == dict(zip(layout.names, layout.shapes, strict=True))
        trainer = trainer_of_records(task, layout, weights, config, mechanism, device, persons, _warn_without_names) if fits else None
    except LdpflError:  # its text names parts of the app
        raise PrivacyError(
            "the model or the loss of this node's app cannot be trained on one record at a time: RecordTask.check() says why, in a test "
            "of the app"
        ) from None
    if trainer is None:
        raise PrivacyError("the trainable parameters of this node's model are not the arrays that the server sent, by name and shape")
    count = len(task.targets if persons is None else persons)
    whole = full_batch([np.arange(count)], count)
    return confined(trainer).train(weights, whole.to(device), terms.planned.trained + 1)[0].cpu()


def _by_record(loss: Loss) -> Loss:
    """Return what gives the loss (B,) of each record, also where ``loss`` gives the mean over those that it is shown."""

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        found = loss(outputs, targets)
        if not isinstance(found, Tensor) or found.dim():
            return found
        alone = [found] if len(targets) == 1 else [loss(outputs[row : row + 1], targets[row : row + 1]) for row in range(len(targets))]
        return torch.stack(alone)

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
) -> Trainer:
    """Return what takes the gradients, after a trial on made-up samples of the same shapes; ``warn`` is told what it found."""
    samples = Samples(each(Tensor.detach, task.inputs), task.targets.detach())
    own = Task("own", "number", _by_record(task.loss), metrics={})
    local = LocalTask(task.model.to(device), layout, samples.to(device), (), (), LocalOptimiser(1.0), task=own)
    public = Dataset("records", samples, samples.take(slice(0)), 0, (), (), "", vocabulary=_MADE_UP_TOKENS)
    ours = {"model": config.model.model_copy(update={"name": GIVEN}), "data": config.data.model_copy(update={"name": GIVEN})}
    return tried(config.model_copy(update=ours), local, mechanism, weights, public, warn, persons)


def _warn_without_names(message: str) -> None:
    """Say on a node that there is something to say of the app's model; the message itself may name parts of the app."""
    LOGGER.warning(
        "the app's model is slow, mixes rows of a person, or has no finite gradient: RecordTask.check() says which, in a test of the app"
    )
