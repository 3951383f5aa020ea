"""Local SGD: of many clients at once by ``torch.func.vmap``, and of one client after another as the reference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from math import inf, nan
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ldpfl.data.samples import Inputs, Samples, map_tensors, normalise
from ldpfl.errors import ConfigError
from ldpfl.models.layout import ParameterLayout, called_with
from ldpfl.models.mending import copied
from ldpfl.simulation.local_steps import (
    ADAM_BETA_1,
    ADAM_BETA_2,
    ADAM_EPSILON,
    BatchSchedule,
    Descent,
    LocalOptimiser,
    factor_per_client,
    for_many_clients_at_once,
)
from ldpfl.tasks import CLASSIFICATION, Task
from ldpfl.util.side_effects import OutsideState, refuse_state_changes, refuse_tensor_writes

Precision = Literal["float32", "bf16"]

AT_ONCE = 250
"""Number of samples in an evaluation batch. It is a third faster than 1000, whose intermediate results need new memory each time."""


@dataclass(frozen=True)
class LocalTask:
    """What local training needs: the model, the samples that schedules index, the task, and the optimiser.

    Attributes:
        clip_norm: clipping norm C. Each mini-batch gradient g of a client, flat over all parameters, becomes g * min(1, C / ||g||_2)
            before it reaches the momentum or the weights. None leaves gradients as they are. A gradient that is not finite becomes NaN as
            a whole. Source: LaDP-FL, equation (6); confidence: medium that C bounds the mini-batch's gradient and not each sample's.
        precision: precision of products in training; see :meth:`trained`.

    Raises:
        ConfigError: ``clip_norm`` is not positive and finite.
    """

    module: nn.Module
    layout: ParameterLayout
    data: Samples
    mean: tuple[float, ...]
    std: tuple[float, ...]
    optimiser: LocalOptimiser
    clip_norm: float | None = None
    task: Task = CLASSIFICATION
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not 0 < self.clip_norm < inf:  # False for NaN as well
            raise ConfigError(f"clip_norm must be positive and finite, got {self.clip_norm!r}; None trains without clipping")

    def batch(self, index: Tensor) -> tuple[Inputs, Tensor]:
        """Return the model's inputs (..., *shape) and the targets (..., *) at ``index`` (...)."""
        batch = self.data.at(index)
        return self.normalised(batch.inputs), batch.targets

    def normalised(self, inputs: Inputs) -> Inputs:
        """Return ``inputs`` with pixels normalised. Other inputs are unchanged."""
        return map_tensors(lambda part: normalise(part, self.mean, self.std), inputs)

    def outputs(self, parameters: dict[str, Tensor], inputs: Inputs) -> Tensor:
        """Return the outputs of the model with ``parameters`` for ``inputs`` as :meth:`batch` returns them."""
        # A model takes a single tensor by position, and several tensors by their names.
        arguments, named = ((inputs,), {}) if isinstance(inputs, Tensor) else ((), dict(inputs))
        outputs: Tensor = called_with(self.module, parameters, arguments, named)
        return outputs

    def trained(self, parameters: dict[str, Tensor], inputs: Inputs) -> Tensor:
        """Return the outputs of the model with ``parameters`` in the training ``precision``.

        This is the only place where numbers may have less than 32 bits: in products within the model, and in operations on them that
        PyTorch runs in bfloat16. Outputs, losses and gradients are float32, and so are all values that are clipped, randomised or sent.
        """
        if self.precision == "float32":
            return self.outputs(parameters, inputs)
        device = next(iter(parameters.values())).device.type
        with torch.autocast(device, dtype=torch.bfloat16, cache_enabled=False):  # a cache would use the weights of the last step again
            outputs = self.outputs(parameters, inputs)
        return outputs.float() if isinstance(outputs, Tensor) else outputs

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss (B,) of each sample.

        Raises:
            ConfigError: a user's own task returns something else, which would silently train another model.
        """
        losses, expected = self.task.losses(outputs, targets), tuple(targets.shape[:1])
        if not isinstance(losses, Tensor) or tuple(losses.shape) != expected:
            given = f"of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else f"that is a {type(losses).__name__}"
            raise ConfigError(
                f"task {self.task.name!r} gives a loss {given} for {len(targets)} samples, expected {expected}: return one number for each "
                "sample, as PyTorch's losses do with reduction='none'",
                advice="its loss has another shape than expected: return one number for each sample, or the mean over the samples",
            )
        return losses

    def loss(self, parameters: dict[str, Tensor], inputs: Inputs, targets: Tensor, mask: Tensor) -> Tensor:
        """Return the mean loss over the samples in ``mask`` (B,), or 0 if it is empty."""
        losses = self.losses(self.trained(parameters, inputs), targets)
        return (losses * mask).sum() / mask.sum().clamp_min(1)

    @contextmanager
    def isolated(self) -> Iterator[LocalTask]:
        """Yield the same task with copies of the model and of the loss, for one record or client alone.

        A model or loss that changes itself could change the vectors of other records, and a later record could undo the change before
        anybody compares. So such a change is an error. Values that classes and functions keep are put back after the block, except those
        that :class:`OutsideState` does not find.

        Raises:
            PrivacyError: the block changes the model or the loss.
            PrivacyError, ConfigError: the model cannot be copied.
        """
        own = replace(self, module=copied(self.module), task=replace(self.task, losses=copy.deepcopy(self.task.losses)))
        outside = OutsideState.of(own.module, own.task.losses)
        with outside.restored(), refuse_state_changes(own.module, own.task.losses, outside):
            yield own

    def module_with(self, weights: Tensor) -> nn.Module:
        """Return a copy of the whole module on the CPU, with ``weights`` (d,) as its trainable parameters."""
        module = copy.deepcopy(self.module).cpu()
        module.load_state_dict(self.layout.unflatten(weights), strict=False)  # parameters that are not trained are public and unchanged
        return module


class Trainer(Protocol):
    """Turns a broadcast vector and the clients' schedules into the clients' trained vectors."""

    def train(self, weights: Tensor, schedule: BatchSchedule, round_number: int = 1) -> Tensor:
        """Return (K, d) trained weights, where every client starts from ``weights`` (d,). The learning rate may depend on the round.

        Raises:
            PrivacyError: the model changes its own state while it runs, see :mod:`ldpfl.util.side_effects`.
        """


@dataclass(frozen=True)
class VectorizedTrainer:
    """Trains all clients of a schedule at once: every parameter gets a leading client dimension.

    The weights to start from are (d,) for all clients, or (K, d) with a row for each client.

    On a CPU, a client's result does not depend on the other clients in the schedule, to the last bit.

    Attributes:
        patches: whether to compute convolutions over few channels by patches (see :class:`ManyAtOnce`): faster, rounded differently.
    """

    task: LocalTask
    patches: bool = True

    def train(self, weights: Tensor, schedule: BatchSchedule, round_number: int = 1) -> Tensor:
        """Return the weights (K, d) of the K clients of ``schedule`` after training from ``weights``, (d,) or (K, d)."""
        if schedule.clients == 1:  # a batch of one uses other kernels, which round differently, so it is doubled
            doubled = BatchSchedule(schedule.index.expand(2, -1, -1), schedule.mask.expand(2, -1, -1))
            return self.train(weights.expand(2, -1), doubled, round_number)[:1]
        with refuse_state_changes(self.task.module, self.task.task.losses):
            return self._train(weights, schedule, round_number)

    def _train(self, weights: Tensor, schedule: BatchSchedule, round_number: int) -> Tensor:
        """Return the trained weights (K, d) of two or more clients. Each parameter has a dimension of clients in front."""
        task = self.task
        start = task.layout.unflatten(weights.to(task.data.device).expand(schedule.clients, -1))
        names = list(start)
        parameters = [start[name].clone().requires_grad_() for name in names]
        descent = Descent(task.optimiser, parameters, round_number)
        client_losses = for_many_clients_at_once(lambda values, *batch: task.loss(dict(zip(names, values, strict=True)), *batch))
        for step in range(schedule.steps):
            inputs, targets = task.batch(schedule.index[:, step])
            mask = schedule.mask[:, step]
            trained = dict(zip(names, parameters, strict=True))
            with refuse_tensor_writes(task.module, trained, by_value=False), ManyAtOnce(self.patches):
                total = client_losses(parameters, inputs, targets, mask).sum()
                # Clients share no parameter, so the gradient of the sum is every client's own gradient.
                gradients = torch.autograd.grad(total, parameters)
            if task.clip_norm is not None:
                gradients = clipped(gradients, task.clip_norm)
            descent.step(gradients, active=mask.amax(dim=1))
        if len(parameters) == 1:  # no copy, which would take a tenth of a step of logistic regression
            return parameters[0].detach().flatten(1)
        return task.layout.flatten(dict(zip(names, (p.detach() for p in parameters), strict=True)))


def clipped(gradients: Sequence[Tensor], clip_norm: float) -> tuple[Tensor, ...]:
    """Return the gradients (K, *shape) of K clients, with each client's whole gradient clipped to ``clip_norm``."""
    factors = _clip_factors(gradients, clip_norm)
    # Not in place: autograd may hand out one tensor as the gradient of two parameters.
    return tuple(gradient * factor_per_client(factors, gradient) for gradient in gradients)


def _clip_factors(gradients: Sequence[Tensor], clip_norm: float) -> Tensor:
    """Return min(1, clip_norm / ||g||_2) (K,) for the gradients (K, *shape) of K clients, in their dtype; NaN where g is not finite.

    A client's factor must not depend on the other clients. So each sum runs over contiguous rows, because sums over
    columns add up in an order that depends on the number of columns. Squares of float32 do not overflow in float64.
    """
    rows = (gradient.reshape(len(gradient), -1) for gradient in gradients)
    copies = (row.to(torch.float64, copy=True, memory_format=torch.contiguous_format) for row in rows)
    norms = torch.stack([copy.square_().sum(dim=1) for copy in copies], dim=1).sum(dim=1).sqrt_()
    factors = clip_norm / norms.clamp_min(clip_norm)  # exactly 1 for a short enough gradient, zero included
    # The factor of an infinite gradient is 0, so only its infinite coordinates would become NaN. A mechanism that sends few coordinates
    # might miss these, so the whole gradient becomes NaN.
    return torch.where(norms.isfinite(), factors, nan).to(gradients[0].dtype)


@dataclass(frozen=True)
class LoopTrainer:
    """Trains one client after another with PyTorch's own optimisers: the reference for :class:`VectorizedTrainer`."""

    task: LocalTask

    def train(self, weights: Tensor, schedule: BatchSchedule, round_number: int = 1) -> Tensor:
        """Return the weights (K, d) of the K clients of ``schedule``, each trained from ``weights`` (d,) by its own copy of the model."""
        trained = []
        for index, mask in zip(schedule.index, schedule.mask, strict=True):
            with self.task.isolated() as task:
                trained.append(self._train_one(task, weights, BatchSchedule(index[None], mask[None]), round_number))
        return torch.stack(trained)

    @staticmethod
    def _train_one(task: LocalTask, weights: Tensor, schedule: BatchSchedule, round_number: int) -> Tensor:
        """Return the trained weights (d,) of the only client of ``schedule``, by the model and the loss of ``task``."""
        start = task.layout.unflatten(weights.to(task.data.device))
        parameters = {name: value.clone().requires_grad_() for name, value in start.items()}
        optimiser = _torch_optimiser(task.optimiser, parameters.values(), round_number)
        for index, mask in zip(schedule.index[0], schedule.mask[0], strict=True):
            chosen = index[mask > 0]
            if chosen.numel() == 0:  # all later steps are padding
                break
            inputs, targets = task.batch(chosen)
            optimiser.zero_grad()
            with refuse_tensor_writes(task.module, parameters, by_value=True):
                task.losses(task.trained(parameters, inputs), targets).mean().backward()  # type: ignore[no-untyped-call]
            if task.clip_norm is not None:
                gradients = [p.grad[None] for p in parameters.values() if p.grad is not None]  # of K = 1 client; views
                factor = _clip_factors(gradients, task.clip_norm)
                for gradient in gradients:
                    gradient.mul_(factor_per_client(factor, gradient))
            if task.optimiser.proximal:
                for name, parameter in parameters.items():
                    if parameter.grad is not None:
                        parameter.grad.add_(parameter.detach() - start[name], alpha=task.optimiser.proximal)
            optimiser.step()
        return task.layout.flatten({name: value.detach() for name, value in parameters.items()})


def _torch_optimiser(optimiser: LocalOptimiser, parameters: Iterable[Tensor], round_number: int) -> torch.optim.Optimizer:
    """Return PyTorch's optimiser for the settings of ``optimiser``, except the proximal term, which it does not have."""
    rate, decay = optimiser.rate(round_number), optimiser.weight_decay
    if optimiser.kind == "adam":
        return torch.optim.Adam(parameters, lr=rate, betas=(ADAM_BETA_1, ADAM_BETA_2), eps=ADAM_EPSILON, weight_decay=decay)
    return torch.optim.SGD(parameters, lr=rate, momentum=optimiser.momentum, weight_decay=decay)


def mean_loss(task: LocalTask, weights: Tensor, samples: Samples) -> float:
    """Return the mean loss of the model with ``weights`` (d,) over ``samples``."""
    batches = evaluated(task, weights, samples)
    return sum(float(task.losses(outputs, targets).double().sum()) for outputs, targets in batches) / len(samples)


def measured(task: LocalTask, weights: Tensor, samples: Samples, *, every: bool = False) -> dict[str, float]:
    """Return the task's main metric of the model with ``weights`` (d,) on ``samples``, or ``every`` metric of the task, by name."""
    if not len(samples):  # a server may have no test data
        return dict.fromkeys(task.task.metrics, nan)
    return task.task.measured(evaluated(task, weights, samples), every=every)


def evaluated(task: LocalTask, weights: Tensor, samples: Samples) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the outputs of the model with ``weights`` (d,) for ``samples``, and the targets, in batches of AT_ONCE samples.

    Raises:
        PrivacyError: the model changes its own state while it runs, so the evaluated model would not be the given one.
    """
    # The model gets copies, so that it cannot change the broadcast weights.
    parameters = {name: value.clone() for name, value in task.layout.unflatten(weights.to(samples.device)).items()}
    with torch.no_grad(), refuse_state_changes(task.module):
        for start in range(0, len(samples), AT_ONCE):
            batch = samples.take(slice(start, start + AT_ONCE))
            with refuse_tensor_writes(task.module, parameters, by_value=True):
                outputs = task.outputs(parameters, task.normalised(batch.inputs))
            yield outputs, batch.targets


FEW_CHANNELS = 4
"""Maximum number of input channels of a convolution that is computed by patches."""


class ManyAtOnce(TorchFunctionMode):
    """Context in which ``torch.func.vmap`` processes many clients or records at once.

    It refuses operators with a batching rule or a backward pass written by their author, hooks on gradients, and functions that pack the
    tensors saved for the backward pass. They see the values of all clients or records, and could mix them. PyTorch's own batching rules
    do not.

    With ``patches``, convolutions over few channels are computed as matrix products of patches. PyTorch's rule turns a convolution with
    per-client weights into one grouped convolution. With one to four input channels per group, that kernel leaves most of a vector unit
    idle. Patches and a matrix product train the two-layer CNN 1.4 times faster on two cores (``benchmarks/local_training.py``).

    The choice depends on shapes only, so the result does not depend on the number of clients that are trained together.
    """

    def __init__(self, patches: bool = True) -> None:
        super().__init__()
        self._patches = patches
        self._context = ExitStack()

    def __enter__(self) -> ManyAtOnce:
        """Forbid packing of the tensors that are saved for the backward pass, and begin to intercept PyTorch's functions."""
        with suppress(RuntimeError):  # raised if the caller itself has set such hooks, for example to measure memory
            self._context.enter_context(torch.autograd.graph.disable_saved_tensors_hooks(_NO_PACKING))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._context.close()

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call PyTorch's ``func``, or raise if it could mix the samples of several clients. Compute some convolutions by patches."""
        if name := named_batching_rule(func, args):
            raise RuntimeError(f"{name} has its own rule for vmap or its own backward pass, which could mix samples")
        if func in _WAYS_TO_HOOKS:
            raise RuntimeError("the model sets a hook on gradients, which could mix samples")
        if self._patches and func in (torch.conv2d, F.conv2d) and _has_few_channels(*args, **(kwargs or {})):
            return _patch_conv2d(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def named_batching_rule(func: Callable[..., Any], args: Sequence[Any]) -> str:
    """Return the name of the operator that ``func`` calls, if its author may have written its batching rule or its backward pass; else "".

    A function with its own backward pass is named, too, because operators in that pass are not seen: PyTorch leaves the context before it.
    """
    if isinstance(func, _OPERATOR_TYPES):
        return "" if str(func).startswith(_OPERATORS_OF_TORCH) else str(func)
    function = args[0] if args else None  # vmap passes the class of a torch.autograd.Function
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        return ""
    return "" if function.__module__.startswith(_MODULES_WITH_CHECKED_RULES) else function.__name__


_OPERATOR_TYPES = (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))
_WAYS_TO_HOOKS = frozenset({Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.grad_fn.__get__})  # type: ignore[union-attr]
"""Functions through which a model could set hooks on gradients. ``grad_fn`` gives the node of a tensor, which takes hooks, too."""
_NO_PACKING = "the model packs tensors for its backward pass, which could mix samples"
_OPERATORS_OF_TORCH = ("aten.", "prim.", "prims.")
_MODULES_WITH_CHECKED_RULES = ("torch.", "ldpfl.")

Pair = int | tuple[int, ...] | str
"""Setting of a convolution: one number for both directions, one for each, or a name such as "same"."""


def _has_few_channels(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Pair = 1, padding: Pair = 0, dilation: Pair = 1, groups: int = 1
) -> bool:
    """Whether :func:`_patch_conv2d` computes the convolution with these arguments of ``torch.conv2d``."""
    has_plain_settings = groups == 1 and dilation in (1, (1,), (1, 1)) and not isinstance(padding, str)
    return has_plain_settings and input.dim() == 4 and weight.shape[1] <= FEW_CHANNELS


def _patch_conv2d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Tensor:
    """Return the convolution as a product of the weights and all patches of the input. Arguments are those of ``torch.conv2d``."""
    # ``dilation`` and ``groups`` are not used: :func:`_has_few_channels` makes sure that they are 1.
    vertical, horizontal = _pair(padding)
    down, right = _pair(stride)
    if vertical or horizontal:
        input = F.pad(input, (horizontal, horizontal, vertical, vertical))
    outputs, channels, height, width = weight.shape
    patches = input.unfold(2, height, down).unfold(3, width, right)
    images, _, rows, columns = patches.shape[:4]
    patches = patches.permute(1, 4, 5, 0, 2, 3).reshape(channels * height * width, images * rows * columns)
    result = weight.reshape(outputs, -1) @ patches
    if bias is not None:
        result = result + bias[:, None]
    return result.reshape(outputs, images, rows, columns).transpose(0, 1).contiguous()


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    """Return a stride or padding for the vertical and the horizontal direction. As in PyTorch, one number stands for both."""
    if isinstance(value, int):
        return value, value
    return value[0], value[-1]
