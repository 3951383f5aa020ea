"""Choose the trainer of a run's clients, and try the model on made-up samples before a run."""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ldpfl import models
from ldpfl.data import Dataset, Samples
from ldpfl.data.persons import Persons
from ldpfl.data.samples import MASK, Inputs
from ldpfl.errors import ConfigError, LdpflError, PrivacyError, first_line
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.movable import untrainable_parameters
from ldpfl.experiments.sample_independence import MADE_UP, mixes_samples
from ldpfl.mechanisms import Mechanism
from ldpfl.mechanisms.base import record_clip_of
from ldpfl.models import CenteredLinear
from ldpfl.simulation import BatchSchedule, GradientTrainer, LocalTask, LoopTrainer, RecordGradientTrainer, Trainer, VectorizedTrainer
from ldpfl.simulation.compiled_records import CompiledSums
from ldpfl.simulation.compiled_training import CompiledTrainer
from ldpfl.simulation.compiling import Work, has_compiler, is_worth_compiling
from ldpfl.simulation.local_steps import LocalOptimiser
from ldpfl.simulation.local_training import evaluated
from ldpfl.tasks import Task
from ldpfl.util.side_effects import PARTS, VIEWS
from ldpfl.util.user_cache import Warn
from ldpfl.util.user_code import GIVEN


def trainer_of(
    config: RunConfig, local: LocalTask, mechanism: Mechanism, *, at_once: bool = True, persons: Persons | None = None
) -> Trainer:
    """Return the trainer that computes, from the broadcast weights, the clients' inputs to ``mechanism``.

    These are trained weights or updates, gradients of clients, or, for a mechanism that clips records, sums of records' gradients.

    Args:
        at_once: whether many clients are trained together rather than one after another.
        persons: which rows belong to which person, if persons are protected.

    Raises:
        ConfigError: ``mechanism.perturbed`` does not fit the mechanism or the model, or the client's optimiser does not fit gradients.
    """
    if config.model.name == models.CENTERED and config.mechanism.perturbed != "gradient":
        raise ConfigError(
            f"model {models.CENTERED!r} measures its center instead of a gradient in the first round: set mechanism.perturbed to 'gradient'"
        )
    clip = record_clip_of(mechanism)
    if config.mechanism.perturbed != "gradient":
        if clip is not None:
            perturbed = config.mechanism.perturbed
            raise ConfigError(
                f"mechanism {mechanism.name!r} clips each record's gradient, and mechanism.perturbed is {perturbed!r}: set it to 'gradient'"
            )
        return VectorizedTrainer(local) if at_once else LoopTrainer(local)
    # Only plain SGD without clipping of mini-batches is a single gradient: all settings but the rate and the rounds have their defaults.
    if local.optimiser != LocalOptimiser(local.optimiser.learning_rate, rounds=local.optimiser.rounds) or local.clip_norm is not None:
        raise ConfigError(
            "a gradient is taken once a round, at the broadcast weights: leave the client's optimiser and its clip_norm out "
            "(training.momentum, optimiser, weight_decay, proximal, schedule); the server has settings of its own, such as "
            "training.server_schedule"
        )
    return GradientTrainer(local, at_once) if clip is None else RecordGradientTrainer(local, clip, at_once, persons=persons)


def trainer_after_trial(
    config: RunConfig,
    local: LocalTask,
    mechanism: Mechanism,
    weights: Tensor,
    data: Dataset,
    warn: Warn,
    persons: Persons | None = None,
    *,
    quotes: bool = True,
) -> Trainer:
    """Return the trainer of the run, after a trial with two clients on made-up samples. An unfit model is refused before the run.

    - A model that cannot be trained for many clients at once, or whose gradient differs then, is trained client by client.
    - A model that remembers samples, changes its own state, draws random numbers, or mixes the samples of a batch is refused, because one
      record would affect the gradients of others. Where persons are protected, the rows of one person may be mixed, with a warning.
    - A gradient that is not finite gives a warning.

    The trial cannot detect a forward that deliberately behaves differently on other samples. Training also checks that the model's state
    is unchanged, see :mod:`ldpfl.util.side_effects`. Beyond that, the guarantee assumes that the model is a function of one
    sample.

    Args:
        local: task with the real samples, whose shapes and types the made-up samples have.
        weights: (d,) initial weights.
        persons: which rows belong to which person, if persons are protected.
        quotes: whether warnings may quote exceptions of the model. They may not where the model is made of a node's private rows.

    Raises:
        ConfigError: the model or the loss fails, or does not fit the data; or training cannot change some parameter.
        PrivacyError: the output for a sample depends on other samples, or forward changes the model's state.
    """
    trial_with_config_precision = replace(local, data=_made_up_samples(local.data, data))
    trial = replace(trial_with_config_precision, precision="float32")  # with fewer bits, rounding would hide that gradients differ
    model = config.model.name
    message_start = (
        f"model {model!r} cannot be trained on {'these data' if config.data.name == GIVEN else config.data.path or config.data.name}"
    )
    _check_parts(model, local)
    _check_runs(model, message_start, trial, weights, data.outputs)
    _check_all_parameters_trainable(model, message_start, trial, weights)
    one_step = config.mechanism.perturbed == "gradient"
    by_record = record_clip_of(mechanism) is not None and persons is None
    made_up_persons = _made_up_persons(persons)
    # The first two clients hold samples 0 and 1, and the other two hold samples 2 and 3.
    clients, other_clients = (_made_up_clients(first, one_step).to(trial.data.device) for first in (0, 2))
    with _failures_as_config_errors(message_start):
        # The gradient that the mechanism gets of a client: that of a single record, or of a batch.
        first_step = _first_sample_alone(clients) if by_record else clients.head(1)
        gradient = GradientTrainer(trial, at_once=False).train(weights, first_step)
        separation_reason = _reason_to_train_separately(trial, weights, first_step, gradient)
        trainer = trainer_of(config, trial_with_config_precision, mechanism, at_once=not separation_reason, persons=made_up_persons)
        # The same samples give the same result before and after other samples, unless the model remembers or draws something.
        before, _, after = (trainer.train(weights, schedule) for schedule in (clients, other_clients, clients))
    if not torch.equal(before.nan_to_num(), after.nan_to_num()):  # NaN would not equal itself
        fault = (
            "gives other outputs for the same samples after it saw others: it remembers samples, or draws random numbers, and no mechanism "
            "protects that; let forward be a function of one sample"
        )
        raise PrivacyError(f"model {model!r} {fault}", advice=f"it {fault}")
    if model not in models.names():  # built-in models do not mix samples
        with _failures_as_config_errors(message_start):
            mixes = mixes_samples(trial, weights)
        if mixes:
            # Evaluation at clients puts rows of several persons into one batch, so mixing is refused there.
            _refuse_mixing(model, warn if persons is not None and config.evaluation.share == 0 else None)
    if not gradient.isfinite().all():
        warn(
            f"model {model!r} has a gradient that is NaN or infinite on made-up samples, which are small numbers around 0: such a record "
            "adds nothing to training, or stops it. Look in forward and in the loss for log, sqrt, exp or a division, and keep what goes "
            "into them in bounds, as by x.clamp(min=1e-6)"
        )
    if separation_reason:
        quoted_reason = f" ({separation_reason})" if quotes else ""
        warn(f"model {model!r} cannot be trained for many clients at once{quoted_reason}: clients are trained one by one, which is slower")
    return trainer_of(config, local, mechanism, at_once=not separation_reason, persons=persons)


def _check_runs(model: str, message_start: str, trial: LocalTask, weights: Tensor, width: int) -> None:
    """Raise if the model or the loss fails on a batch of two samples, or on a batch of one. A message begins with ``message_start``.

    ``width`` is the expected number of outputs.

    Raises:
        ConfigError: the model or the loss fails, or the outputs have another shape than expected.
    """
    for count in (2, 1):  # two first: a failure with two samples is not blamed on the batch size
        with _failures_as_config_errors(message_start if count == 2 else f"{message_start}, where a batch may be of one sample"):
            ((output, targets),) = evaluated(trial, weights, trial.data.take(slice(count)))  # a single batch
            _check_outputs(model, trial.task, output, targets, width)
            trial.losses(output, targets)


def _check_all_parameters_trainable(model: str, message_start: str, trial: LocalTask, weights: Tensor) -> None:
    """Raise if training cannot change some trainable parameter, for which clients would send only noise.

    Raises:
        ConfigError: training cannot change some parameter.
    """
    with _failures_as_config_errors(message_start):
        # The center is set to the mean of the samples, not trained.
        measured_names = {"center"} if isinstance(trial.module, CenteredLinear) else set()
        untrainable_names = [name for name in untrainable_parameters(trial, weights) if name not in measured_names]
    if untrainable_names:
        and_others = f" and {len(untrainable_names) - 1} others" if len(untrainable_names) > 1 else ""
        remedy = (
            "its outputs do not depend on it. Freeze parameters that forward does not use (requires_grad=False); if it has an adapter, "
            "check that the adapter is switched on, and that not both of its factors are zeros"
        )
        raise ConfigError(
            f"model {model!r} cannot train parameter {untrainable_names[0]}{and_others}: {remedy}",
            advice=f"it cannot train one of its parameters: {remedy}",
        )


@dataclass(frozen=True)
class RunSize:
    """The amount of training in a run.

    Attributes:
        samples: number of samples in all steps of all rounds, counted with repetition.
        width: number of samples in a client's step.
        steps: minimum and maximum number of a client's steps in a round.
    """

    samples: int
    width: int
    steps: tuple[int, int]


def compiled_if_worthwhile(config: RunConfig, trainer: Trainer, weights: Tensor, data: Dataset, size: RunSize, warn: Warn) -> Trainer:
    """Return the compiled form of ``trainer`` if ``config`` demands it or the run is long enough to pay for it; else ``trainer``.

    The compiled form is tried on made-up samples first. So no private value decides whether a trainer is compiled or refused. If it fails
    and ``config`` does not demand it, ``trainer`` is returned with a warning.

    Raises:
        ConfigError: ``training.compile`` is "on", and the trainer cannot be compiled here.
    """
    compile_setting = config.training.compile
    # "Eager" means not compiled, as in PyTorch.
    eager = _on_made_up_samples(trainer, data)
    compiled = None if compile_setting == "off" else _compiled_form(eager, weights, size)
    if compiled is None:  # there is none for this trainer, or the setting is "off"
        return _eager_unless_on(compile_setting, trainer)
    # ``size.samples / compiled.samples`` is how often the run calls the compiled step.
    if compile_setting == "auto" and not (has_compiler() and is_worth_compiling(size.samples / compiled.samples, compiled.work)):
        return trainer
    if not has_compiler():
        raise ConfigError("training.compile is 'on', and there is no C++ compiler: install g++, or leave training.compile at 'auto'")
    reason = "its weights differ when compiled"  # replaced if compiling fails
    rounding = _TOLERANCE if config.training.precision == "float32" else _TOLERANCE_BF16
    try:
        if all(_results_agree(compiled.trainer, eager, weights, schedule, compiled.start, rounding) for schedule in compiled.trials):
            return _on_samples_of(trainer, compiled.trainer)
    except LdpflError:
        raise
    except Exception as error:  # PyTorch compiles the user's forward; the message is about code and holds no private value
        reason = first_line(error)
    if compile_setting == "on":
        raise ConfigError(f"training.compile is 'on', and model {config.model.name!r} cannot be compiled: {reason}; leave it at 'auto'")
    warn(f"model {config.model.name!r} cannot be compiled ({reason}): it is trained uncompiled")
    return trainer


def _on_made_up_samples(trainer: Trainer, data: Dataset) -> Trainer:
    """Return ``trainer`` for made-up samples, each of a person of its own if persons are protected."""
    if not isinstance(trainer, (VectorizedTrainer, RecordGradientTrainer)):
        return trainer
    task = replace(trainer.task, data=_made_up_samples(trainer.task.data, data))
    if isinstance(trainer, VectorizedTrainer):
        return replace(trainer, task=task)
    return replace(trainer, task=task, persons=_made_up_persons(trainer.persons))


def _on_samples_of(trainer: Trainer, compiled: Trainer) -> Trainer:
    """Return the compiled form of ``trainer`` for its own samples. ``compiled`` is the form that was tried on made-up samples."""
    if isinstance(trainer, RecordGradientTrainer):
        # ``compiled_before`` says that the trial has compiled the same code already.
        return replace(trainer, compiled=CompiledSums(trainer.task, trainer.clip, compiled_before=True))
    if isinstance(trainer, VectorizedTrainer) and isinstance(compiled, CompiledTrainer):
        return replace(compiled, task=trainer.task, compiled_before=True)
    return trainer


def _made_up_persons(persons: Persons | None) -> Persons | None:
    """Return made-up persons with one sample each. If ``persons`` is None, no persons are protected, and the result is None."""
    return None if persons is None else Persons.of(list(map(str, range(MADE_UP))), persons.most)


def is_compiled(trainer: Trainer) -> bool:
    """Return whether steps of the ``trainer`` are compiled."""
    return isinstance(trainer, CompiledTrainer) or (isinstance(trainer, RecordGradientTrainer) and trainer.compiled is not None)


class _CompiledForm(NamedTuple):
    """A trainer that compiles its steps, and the data for its trial.

    Attributes:
        samples: number of samples in one call of the compiled step.
        work: function that returns the amount of computation in one call.
        trials: schedules that together use every piece of code that a run compiles.
        start: (d,) result of a client that learns nothing: the broadcast weights, or zeros for gradients.
    """

    trainer: Trainer
    samples: int
    work: Callable[[], Work]
    trials: tuple[BatchSchedule, ...]
    start: Tensor


def _compiled_form(trainer: Trainer, weights: Tensor, size: RunSize) -> _CompiledForm | None:
    """Return the compiled form of ``trainer``, to be tried on its samples.

    Only local steps of many clients at once and gradients of records, on a CPU, have one. For other trainers the result is None.
    """
    if isinstance(trainer, VectorizedTrainer) and trainer.task.data.device.type == "cpu":
        steps = CompiledTrainer(trainer.task, size.width)
        # A single step and several steps are compiled to different code. Two steps are enough to try the latter.
        trials = tuple(
            _schedule_of_first_sample(steps.block, count, size.width) for count in sorted({min(2, count) for count in size.steps})
        )
        work = partial(steps.work, weights, sent=steps.takes_one_step(trials[-1]))  # after a single step, its result is sent at once
        return _CompiledForm(steps, steps.block * size.width, work, trials, weights)
    if isinstance(trainer, RecordGradientTrainer) and trainer.task.data.device.type == "cpu" and trainer.at_once:
        if isinstance(trainer.task.module, CenteredLinear):  # in the first round it takes samples, not gradients
            return None
        if trainer.clip.adaptive:  # compiled code has one clipping norm built in
            return None
        # Compiled code rounds a gradient and its norm differently. With few bits, a clipped gradient would seem too long and be left out.
        if trainer.task.precision != "float32":
            return None
        sums = CompiledSums(trainer.task, trainer.clip)
        rows = 1 if trainer.persons is None else trainer.persons.most
        block = trainer.block(weights)
        work = partial(sums.work, weights, block, rows)
        return _CompiledForm(replace(trainer, compiled=sums), block, work, (_schedule_of_first_sample(1, 1, 1),), torch.zeros_like(weights))
    return None


def _schedule_of_first_sample(clients: int, steps: int, width: int) -> BatchSchedule:
    """Return a schedule in which all ``clients`` use the first sample in every step."""
    index = torch.zeros(clients, steps, width, dtype=torch.int64)
    return BatchSchedule(index, torch.ones(index.shape))


def _results_agree(compiled: Trainer, eager: Trainer, weights: Tensor, schedule: BatchSchedule, start: Tensor, rounding: float) -> bool:
    """Return whether both trainers give the same result, up to ``rounding`` as a fraction of the change by training.

    ``start`` is the result of a client that learns nothing.
    """
    expected = eager.train(weights, schedule).double()
    difference = (compiled.train(weights, schedule).double() - expected).norm()
    return bool(difference <= rounding * (expected - start).norm() + _TINY)


def _eager_unless_on(compile_setting: str, trainer: Trainer) -> Trainer:
    """Return ``trainer``, which has no compiled form, or raise a :class:`ConfigError` if ``training.compile`` is on."""
    if compile_setting == "on":
        raise ConfigError(
            "training.compile is 'on', but this run cannot be compiled: only local steps of many clients at once, and gradients of "
            "records, are compiled, and only on a CPU. Leave training.compile at 'auto' for gradients of clients, for "
            "clipping.target_quantile, for gradients of records at another precision than float32, for models that are trained client by "
            "client, and on a GPU"
        )
    return trainer


def _refuse_mixing(model: str, warn: Warn | None) -> None:
    """Raise a :class:`PrivacyError` that the model mixes the samples of a batch. If ``warn`` is given, call it instead."""
    fault = "gives other outputs for samples together than for each sample alone: it mixes the samples of a batch"
    if warn is None:
        fault = (
            f"{fault}, as a mean over the first axis does, or nn.MultiheadAttention, nn.LSTM or nn.TransformerEncoderLayer without "
            "batch_first=True. Expected a function of one sample, because training forms batches of any samples: let forward "
            "treat each entry of the first axis by itself"
        )
        raise PrivacyError(f"model {model!r} {fault}", advice=f"it {fault}")
    rows = "In training these are the rows of one person; scores and predictions depend on which rows are given together"
    warn(f"model {model!r} {fault}. {rows}")


@contextmanager
def _failures_as_config_errors(message_start: str) -> Iterator[None]:
    """Turn any exception of a user's model or loss on made-up samples into a :class:`ConfigError` that begins with ``message_start``.

    The text quotes the exception, which may repeat private values if the model was made from a node's rows. So on a node
    :mod:`ldpfl.flower.record_trial` shows only where the exception arose.
    """
    try:
        yield
    except LdpflError:
        raise
    except Exception as error:  # it is the user's code
        raise ConfigError(f"{message_start}: {type(error).__name__}: {first_line(error)}") from error


def _reason_to_train_separately(trial: LocalTask, weights: Tensor, clients: BatchSchedule, separate: Tensor) -> str:
    """Return why ``clients`` cannot be trained at once; "" if they can.

    They can if their gradients equal ``separate``, the gradients of the same clients trained one after another. An example of a model that
    fails is one with a hook on gradients, which would see the gradients of all clients and could carry values from one to another.
    """
    try:
        together = GradientTrainer(trial).train(weights, clients)
    except RuntimeError as error:
        return first_line(error)
    difference = (together.nan_to_num() - separate.nan_to_num()).double().norm()
    return "its gradients differ then" if difference > _TOLERANCE * separate.nan_to_num().double().norm() + _TINY else ""


def _made_up_clients(first: int, one_step: bool) -> BatchSchedule:
    """Return a schedule of two clients that hold the same two samples, at ``first`` and the next index, in opposite order.

    Each client's first step uses both samples. Unless ``one_step``, a second step uses one of them.
    """
    # Both have the shape (clients, steps, samples). The mask is 0 where a step has no sample.
    index = torch.tensor([[[first, first + 1], [first, first]], [[first + 1, first], [first + 1, first + 1]]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]]).expand(2, -1, -1)
    return BatchSchedule(index, mask).head(1 if one_step else 2)


def _first_sample_alone(clients: BatchSchedule) -> BatchSchedule:
    """Return the schedule of the same clients with the first sample of their first step alone."""
    return BatchSchedule(clients.index[:, :1, :1], clients.mask[:, :1, :1])


def _made_up_samples(samples: Samples, data: Dataset) -> Samples:
    """Return a few random samples that share only shape and type with ``samples``. They depend on no private value."""
    generator = torch.Generator().manual_seed(0)

    def like(part: Tensor, tokens: int | None) -> Tensor:
        """Return random values of the type of ``part``. Whole numbers are below ``tokens``; without tokens, they are bytes of images."""
        shape = (MADE_UP, *part.shape[1:])
        if part.is_floating_point():
            return torch.randn(shape, generator=generator, dtype=part.dtype)
        return torch.randint(tokens or 256, shape, generator=generator).to(part.dtype)

    real_inputs = samples.inputs
    if isinstance(real_inputs, Tensor):
        inputs: Inputs = like(real_inputs, data.tokens())
    else:  # the mask is all ones, since a model may fail on a text without tokens
        inputs = {
            name: torch.ones(MADE_UP, *part.shape[1:], dtype=part.dtype) if name == MASK else like(part, data.tokens(name))
            for name, part in real_inputs.items()
        }
    targets = torch.zeros(MADE_UP, *samples.targets.shape[1:], dtype=samples.targets.dtype)
    return Samples(inputs, targets).to(samples.device)


def identifying_text(module: nn.Module) -> str:
    """Return a text that identifies ``module``: its structure, hashes of its tensors, its attributes and source code.

    Addresses in memory, and what PyTorch itself keeps in a module, are left out.
    """
    sources = []
    for name in sorted({type(part).__module__ for part in module.modules()}):
        if not name.startswith("torch."):
            try:
                sources.append(inspect.getsource(sys.modules[name]))
            except (KeyError, OSError, TypeError):  # no source file, as in a notebook
                sources.append(name)
    tensors = {name: hashlib.sha256(value.numpy(force=True).tobytes()).hexdigest() for name, value in module.state_dict().items()}
    attributes = [
        (prefix, key, value)
        for prefix, part in module.named_modules()
        for key, value in part.__dict__.items()
        if key not in PARTS | VIEWS and not isinstance(value, Tensor)
    ]
    return re.sub(r" at 0x[0-9a-f]+", "", f"{module!r} {tensors!r} {attributes!r}") + "".join(sources)


def _check_parts(model: str, local: LocalTask) -> None:
    """Raise if samples are several named tensors, and the model's forward does not take arguments of these names.

    Raises:
        ConfigError: forward lacks such an argument.
    """
    parts = local.data.inputs
    if isinstance(parts, Tensor):
        return
    signature, names = inspect.signature(local.module.forward), ", ".join(parts)
    try:
        signature.bind(**dict.fromkeys(parts))  # raises if forward does not take these names; their values do not matter
    except TypeError as error:
        raise ConfigError(
            f"model {model!r} cannot be trained on these data: TypeError: {error}. Each sample has the parts {names}, which forward "
            f"gets by name, but it takes {', '.join(signature.parameters)}: define forward(self, {names})",
            advice="its forward does not take the parts of a sample by name: let it take each part as an argument of the part's name",
        ) from None


def _check_outputs(model: str, task: Task, output: object, targets: Tensor, width: int) -> None:
    """Raise if the ``output`` of a model does not have the shape that ``targets`` and ``width``, the number of outputs, require.

    Raises:
        ConfigError: the outputs have another type or shape.
    """
    if not width:  # only the user's own loss knows the shape
        return
    if not isinstance(output, Tensor):
        raise ConfigError(f"model {model!r} returns a {type(output).__name__}, expected a tensor: let its forward return one")
    count = len(targets)
    expected: tuple[int, ...] = (*targets.shape, width) if task.targets == "tokens" else (count, width)
    if task.targets == "tokens" and output.shape[:-1] == targets.shape and output.shape[-1] > width:
        return  # a score for each token, also for tokens of the model's vocabulary that the data lack
    if tuple(output.shape) == expected or (task.targets == "number" and tuple(output.shape) == (count,)):
        return
    advice = "" if count > 1 else ": a batch may be of one sample, so tell squeeze() which dimension is meant"
    if task.targets == "class" and count > 1 and tuple(output.shape[1:]) != (width,):
        advice = f": give the last layer {width} outputs, a score for each class" + (", also where there are two" if width == 2 else "")
    samples = "two samples" if count > 1 else "one sample"
    raise ConfigError(f"model {model!r} gives {tuple(output.shape)} for {samples}, expected {expected}{advice}")


_TOLERANCE, _TOLERANCE_BF16, _TINY = 0.02, 0.3, 1e-6
"""Tolerance between gradients of the same samples: relative to their norm (float32, bfloat16), and absolute. Graphics cards round products
to 10 bits."""
