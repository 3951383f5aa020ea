"""What trains a run's clients, and the trial of its model before anything is trained."""

from __future__ import annotations

import hashlib
import inspect
import pickle
import re
import sys
from dataclasses import replace

import torch
from torch import Tensor, nn

from ldpfl import models
from ldpfl.cache import Warn
from ldpfl.data import Dataset, Samples
from ldpfl.errors import ConfigError, PrivacyError, first_line
from ldpfl.experiments.config import RunConfig
from ldpfl.importing import GIVEN
from ldpfl.mechanisms import Mechanism
from ldpfl.simulation import BatchSchedule, GradientTrainer, LocalTask, LoopTrainer, RecordGradientTrainer, Trainer, VectorizedTrainer
from ldpfl.simulation.local_optimiser import LocalOptimiser
from ldpfl.tasks import Task


def trainer_of(config: RunConfig, local: LocalTask, mechanism: Mechanism, *, at_once: bool = True) -> Trainer:
    """Return what turns a broadcast into what clients put into ``mechanism``, many clients ``at_once`` or one after another.

    Raises:
        ConfigError: the mechanism bounds each record's gradient, and something else than gradients is asked for.
    """
    if config.model.name == models.CENTERED and config.mechanism.perturbed != "gradient":
        raise ConfigError(
            f"model {models.CENTERED!r} measures its center in the place of a gradient: set mechanism.perturbed to 'gradient'"
        )
    clip = mechanism.record_clip
    if config.mechanism.perturbed != "gradient":
        if clip is not None:
            raise ConfigError(f"mechanism {mechanism.name!r} bounds each record's gradient: mechanism.perturbed must be 'gradient'")
        return VectorizedTrainer(local) if at_once else LoopTrainer(local)
    if local.optimiser != LocalOptimiser(local.optimiser.learning_rate, rounds=local.optimiser.rounds) or local.clip_norm is not None:
        raise ConfigError("a gradient is taken once a round, at the broadcast weights: leave the client's optimiser and its clip_norm out")
    return GradientTrainer(local, at_once) if clip is None else RecordGradientTrainer(local, clip, at_once)


def tried(config: RunConfig, local: LocalTask, mechanism: Mechanism, weights: Tensor, data: Dataset, warn: Warn) -> Trainer:
    """Return the trainer, after it has trained two clients for a step on made-up samples: what does not fit is refused before a run.

    A model that has no form for many clients at once is trained client by client. One that keeps something of what it saw, or draws
    random numbers, is refused: a record would change what comes of others. What a forward does to other samples than these, and on
    purpose, no trial can tell: the guarantee rests on its being a function of one sample.

    Raises:
        ConfigError: the model does not fit the data, or fails.
        PrivacyError: what it makes of a sample depends on others.
    """
    trial = replace(local, data=_made_up(local.data, data))
    model, where = config.model.name, "these data" if config.data.name == GIVEN else config.data.path or config.data.name
    before = _kept(local.module)
    try:
        inputs, targets = trial.batch(torch.arange(2))
        found = local.outputs(local.layout.unflatten(weights.to(targets.device)), inputs)
        fits = _fits(local.task, found, targets, data.outputs)
        trainer, at_once, once = _first_step(config, trial, mechanism, weights, warn)
        again = _later_step(trainer, weights, local.data.device)
    except Exception as error:  # it is the user's code, on made-up samples: no private value is in the message
        raise ConfigError(f"model {model!r} cannot be trained on {where}: {type(error).__name__}: {first_line(error)}") from error
    if fits:
        raise ConfigError(f"model {model!r} gives {tuple(found.shape)} for two samples, expected {fits}")
    changed = [name for name, value in _kept(local.module).items() if before.get(name) != value]
    if changed:
        raise PrivacyError(
            f"model {model!r} changed {', '.join(changed)} while it ran: it keeps something of the samples that it saw, "
            "and no mechanism randomises that; let forward change nothing"
        )
    if not torch.equal(once.nan_to_num(), again.nan_to_num()):
        raise PrivacyError(
            f"model {model!r} makes something else of the same samples after it saw others: it remembers them, or draws random numbers, "
            "and no mechanism randomises that; let forward be a function of one sample"
        )
    return trainer_of(config, local, mechanism, at_once=at_once)


def _first_step(config: RunConfig, trial: LocalTask, mechanism: Mechanism, weights: Tensor, warn: Warn) -> tuple[Trainer, bool, Tensor]:
    """Return a trainer that works, whether for many clients at once, and what it makes of two made-up ones."""
    trainer, schedule = trainer_of(config, trial, mechanism), _made_up_clients(0, trial.data.device)
    try:
        return trainer, True, trainer.train(weights, schedule)
    except RuntimeError as error:
        trainer = trainer_of(config, trial, mechanism, at_once=False)
        trained, model = trainer.train(weights, schedule), config.model.name
        warn(f"model {model!r} cannot be trained for many clients at once ({first_line(error)}): one after another, which is slower")
        return trainer, False, trained


def _later_step(trainer: Trainer, weights: Tensor, device: torch.device) -> Tensor:
    """Return what it makes of the same two clients after others, and with random numbers elsewhere."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        trainer.train(weights, _made_up_clients(2, device))
        return trainer.train(weights, _made_up_clients(0, device))


def _made_up_clients(first: int, device: torch.device) -> BatchSchedule:
    """Return the step of two clients that hold the same two samples, from the ``first`` on."""
    return BatchSchedule(torch.tensor([[[first, first + 1]], [[first + 1, first]]]), torch.ones(2, 1, 2)).to(device)


def _made_up(samples: Samples, data: Dataset) -> Samples:
    """Return four samples that are like the others in shape and type alone."""
    generator = torch.Generator().manual_seed(0)

    def like(part: Tensor, tokens: int | None) -> Tensor:
        shape = (4, *part.shape[1:])
        if part.is_floating_point():
            return torch.randn(shape, generator=generator, dtype=part.dtype)
        return torch.randint(tokens or 256, shape, generator=generator).to(part.dtype)

    own = samples.inputs
    inputs = like(own, data.tokens()) if isinstance(own, Tensor) else {name: like(part, data.tokens(name)) for name, part in own.items()}
    targets = torch.zeros(4, *samples.targets.shape[1:], dtype=samples.targets.dtype)
    return Samples(inputs, targets).to(samples.device)


def told_of(module: nn.Module) -> str:
    """Return what can be told of ``module``: what it consists of and keeps, and the text of the files that its classes come from."""
    texts = []
    for name in sorted({type(part).__module__ for part in module.modules()}):
        if not name.startswith("torch."):
            try:
                texts.append(inspect.getsource(sys.modules[name]))
            except (KeyError, OSError, TypeError):  # of a notebook, say
                texts.append(name)
    tensors = {name: hashlib.sha256(value.numpy(force=True).tobytes()).hexdigest() for name, value in module.state_dict().items()}
    others = [
        (prefix, key, value)
        for prefix, part in module.named_modules()
        for key, value in part.__dict__.items()
        if key not in _PARTS | _VIEWS and not isinstance(value, Tensor)
    ]
    return re.sub(r" at 0x[0-9a-f]+", "", f"{module!r} {tensors!r} {others!r}") + "".join(texts)


def _kept(module: nn.Module) -> dict[str, object]:
    """Return all that ``module`` keeps, its parameters too, by name, in a form that can be compared."""
    found: dict[str, object] = {}
    for prefix, part in module.named_modules():
        apart = _PARTS | _VIEWS if isinstance(part, nn.RNNBase) else _PARTS
        own = {**{key: value for key, value in part.__dict__.items() if key not in apart}, **part._buffers, **part._parameters}
        for key, value in own.items():
            try:
                found[f"{prefix}.{key}".lstrip(".")] = pickle.dumps(value)
            except Exception:  # a function of one's own, or a tensor that has not come to be: as it is called
                found[f"{prefix}.{key}".lstrip(".")] = repr(value)
    return found


_PARTS = frozenset({"_parameters", "_buffers", "_modules"})
_VIEWS = frozenset({"_flat_weights", "_flat_weight_refs"})
"""Of PyTorch's recurrent modules: their parameters once more."""


def _fits(task: Task, found: object, targets: Tensor, outputs: int) -> str:
    """Return what a model's outputs for two samples should look like, if they do not."""
    if not outputs:  # a loss of an author's own knows, and nobody else
        return ""
    if not isinstance(found, Tensor):
        raise ConfigError(f"it gives a {type(found).__name__}, expected a tensor")
    wanted: tuple[int, ...] = (2, outputs)
    if task.targets == "tokens":
        wanted = (*targets.shape, outputs)
    if tuple(found.shape) == wanted or (task.targets == "number" and tuple(found.shape) == (2,)):
        return ""
    return str(wanted)
