"""Try an app's own records on a node, for the node's operator, before any round."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from torch import Tensor

from ldpfl.data.samples import Inputs
from ldpfl.errors import ConfigError, LdpflError
from ldpfl.experiments import RunConfig
from ldpfl.experiments.build import initial_ranges, mechanism_of, with_torch_defaults
from ldpfl.flower.arrays import to_arrays
from ldpfl.flower.confined_process import public_type_name
from ldpfl.flower.records import Records, RecordTask, device_of_node, import_named, trainer_of_records
from ldpfl.flower.terms import ARRAYS
from ldpfl.mechanisms.base import record_clip_of
from ldpfl.models.layout import ParameterLayout
from ldpfl.simulation import RecordGradientTrainer
from ldpfl.simulation.gradients import confined
from ldpfl.simulation.local_steps import full_batch
from ldpfl.util.number_format import counted

_FINDINGS = "found"
"""Name of the record, and of its only entry, that holds the figures of :class:`RecordsFound` as JSON."""

_MAX_NAMED = 5
"""Maximum number of rows that are named."""


@dataclass(frozen=True)
class RecordsFound:
    """Findings about an app's records. They hold no value of a record.

    Attributes:
        arrays: the model's trainable parameters, by name.
        rows: number of rows.
        left_out: number of rows, or of persons where persons are protected, that add nothing to training.
        first_left_out: indices, from 0, of the first few rows or persons that are left out.
        reason: why the first of these adds nothing.
        notes: warnings about the model. They quote nothing of the app.
    """

    arrays: ArrayRecord
    rows: int
    left_out: int
    first_left_out: tuple[int, ...]
    reason: str
    notes: tuple[str, ...]

    def to_records(self) -> RecordDict:
        """Return the findings as Flower's records, which one process can hand to another."""
        figures = json.dumps([self.rows, self.left_out, self.first_left_out, self.reason, self.notes])
        return RecordDict({ARRAYS: self.arrays, _FINDINGS: ConfigRecord({_FINDINGS: figures})})

    @classmethod
    def of(cls, records: RecordDict) -> RecordsFound:
        """Return the findings in ``records``, which :meth:`to_records` made."""
        rows, left_out, first_left_out, reason, notes = json.loads(str(records.config_records[_FINDINGS][_FINDINGS]))
        return cls(records.array_records[ARRAYS], rows, left_out, tuple(first_left_out), reason, tuple(notes))


@with_torch_defaults()
def try_records(records: Records | str, context: Context, config: RunConfig) -> RecordsFound:
    """Try the model and the loss of an app's ``records`` on made-up samples, then compute each record's gradient. Return the findings.

    Where ``config`` protects persons, each person's mean gradient is computed instead.

    Args:
        records: function that returns the app's ``RecordTask`` for ``context``; or its import path, ``package.module:name``.
        config: config that the app's server sends.

    Raises:
        ConfigError, PrivacyError: ``records`` returns no ``RecordTask``, or the model and the loss do not fit the records. The text is
            fixed, because the app may build the model from the node's rows, so that names and sizes of layers repeat values.
        Exception: the app's own. Its text may repeat values, see :func:`ldpfl.flower.app_failures.explain_to_operator`.
    """
    make_task: Records = import_named(records) if isinstance(records, str) else records
    task = make_task(context)
    if not isinstance(task, RecordTask):
        raise ConfigError(
            f"the function that LdpClientApp(records=...) names returned a {public_type_name(task)}, expected ldpfl.flower.RecordTask"
        )
    if config.data.person and task.persons is None:
        raise ConfigError("data.person asks to protect persons, but RecordTask has no persons: give it `persons`, one entry for each row")
    task.check_persons()
    device = device_of_node()
    notes = list[str]()  # filled by the trainer's trial
    with _fixed_errors(task):
        layout = ParameterLayout.from_module(task.model)
    weights = layout.flatten({name: p.detach() for name, p in task.model.named_parameters() if p.requires_grad}).cpu()
    mechanism = mechanism_of(config, initial_ranges(config, layout, weights))
    by_person = config.data.person and record_clip_of(mechanism) is not None
    persons = task.persons_by(config.data.person_rows) if by_person else None
    with _fixed_errors(task):
        trainer = trainer_of_records(task, layout, weights, config, mechanism, device, persons, notes.append, quotes=False)
    count = len(task.targets if persons is None else persons)  # number of rows, or of persons
    left_out, reason = list[int](), ""
    if isinstance(trainer, RecordGradientTrainer):  # any other trainer takes all rows at once, so no row can be left out
        watched = replace(trainer, left_out=lambda indices: left_out.extend(indices.tolist()))
        confined(watched).train(weights, full_batch([np.arange(count)], count).to(device))  # only for its calls of `left_out`
        left_out.sort()
        reason = _why_left_out(task, trainer, weights, left_out[0], by_row=persons is None) if left_out else ""
    return RecordsFound(to_arrays(weights, layout), len(task.targets), len(left_out), tuple(left_out[:_MAX_NAMED]), reason, tuple(notes))


@contextmanager
def _fixed_errors(task: RecordTask) -> Iterator[None]:
    """Replace an error of ldpfl about the app's model by its advice, because the error's own text may repeat values of records.

    The advice is a fixed text. An error without advice is replaced by the app's own exception that caused it, or is raised as it is if
    nothing caused it.
    """
    try:
        yield
    except LdpflError as error:
        if not error.advice:
            raise error.__cause__ or error from None
        raise ConfigError(f"the app's model is refused: {error.advice} ({_dtypes_text(task)})") from None


def _why_left_out(task: RecordTask, trainer: RecordGradientTrainer, weights: Tensor, place: int, *, by_row: bool) -> str:
    """Return why the record with the index ``place`` adds nothing to training. Without ``by_row``, it is the person with this index.

    ``trainer`` computes gradients at ``weights``. It is called for this record alone, because its error may be the reason.
    """
    if by_row and not _is_finite(task.inputs, place):
        return "its inputs hold NaN or infinity: a missing value, or one that is too large for float32"
    if by_row and not _is_finite(task.targets, place):
        return "its target is NaN or infinite: a missing value, or one that is too large for float32"
    single_record = full_batch([np.array([place])], 1).to(trainer.task.data.device)
    try:
        trainer.train(weights, single_record)  # not confined: an exception of the model or the loss is raised here
    except (Exception, SystemExit) as error:  # only the type is shown, because the text may repeat the record
        return f"the model or the loss raises {public_type_name(error)} for it: is its target outside the classes, or a token too large?"
    return "its gradient is NaN or infinite: are its values huge, or is there a log, sqrt or division in the model or the loss?"


def _dtypes_text(task: RecordTask) -> str:
    """Return dtype and number of axes of the task's inputs and targets, as text. Sizes and names are left out: they may reveal values."""
    inputs = [task.inputs] if isinstance(task.inputs, Tensor) else list(task.inputs.values())
    named_tensors = [*(("inputs", part) for part in inputs), ("targets", task.targets)]
    return ", ".join(
        f"{name} {str(part.dtype).removeprefix('torch.')} with {counted(part.dim(), 'axis', 'axes')}" for name, part in named_tensors
    )


def _is_finite(values: Inputs, place: int) -> bool:
    """Tell whether all ``values`` of the row at ``place`` are finite."""
    parts = [values] if isinstance(values, Tensor) else list(values.values())
    return all(bool(torch.isfinite(part[place]).all()) for part in parts)
