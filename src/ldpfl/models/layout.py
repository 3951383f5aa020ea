"""Flatten a model into one vector and back, and refuse models with state that would leave a client without noise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.weight_norm import WeightNorm

from ldpfl.errors import ConfigError, PrivacyError
from ldpfl.models.attention import blind_to_values


@dataclass(frozen=True)
class ParameterLayout:
    """Names, shapes and slices of a model's trainable parameters inside one flat vector.

    A layer is one trainable parameter tensor, in the order of ``named_parameters()``. Frozen
    parameters (``requires_grad=False``) are public constants: they are never sent and have no place here.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def from_module(cls, module: nn.Module) -> ParameterLayout:
        """Describe ``module``, after :func:`validate_module` has accepted it.

        Raises:
            PrivacyError: the module holds something that no mechanism would randomise.
        """
        validate_module(module)
        trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        return cls(
            names=tuple(name for name, _ in trainable),
            shapes=tuple(tuple(p.shape) for _, p in trainable),
        )

    def split(self, prefixes: Iterable[str]) -> tuple[ParameterLayout, ParameterLayout]:
        """Return two layouts: the layers outside the modules and parameters that ``prefixes`` name, and the layers inside.

        Raises:
            ConfigError: a prefix names no layer, or no other layer is left.
        """
        named_layers: set[str] = set()
        for prefix in prefixes:
            matching = {name for name in self.names if f"{name}.".startswith(f"{prefix}.")}
            if not matching:
                raise ConfigError(
                    f"model.personal: no layer of the model has a name that starts with {prefix!r}; its layers: {', '.join(self.names)}"
                )
            named_layers |= matching
        if len(named_layers) == len(self.names):
            raise ConfigError("model.personal names all layers, so no layer is left to train together: remove some of them")
        return self._with_layers(set(self.names) - named_layers), self._with_layers(named_layers)

    def _with_layers(self, names: Set[str]) -> ParameterLayout:
        """Return the layout of the layers called ``names`` alone, in the same order."""
        layers = [(name, shape) for name, shape in zip(self.names, self.shapes, strict=True) if name in names]
        return ParameterLayout(tuple(name for name, _ in layers), tuple(shape for _, shape in layers))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of scalar weights of each layer."""
        return tuple(prod(shape) for shape in self.shapes)

    @property
    def dimension(self) -> int:
        """Number d of scalar weights of the whole model."""
        return sum(self.sizes)

    @property
    def slices(self) -> dict[str, slice]:
        """Where each layer lies in the flat vector."""
        stops = list(accumulate(self.sizes))
        starts = [0, *stops[:-1]]
        return {name: slice(start, stop) for name, start, stop in zip(self.names, starts, stops, strict=True)}

    def flatten(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Concatenate the layers ``parameters``, each of shape (*batch, *shape of the layer), to one tensor (*batch, d).

        Raises:
            PrivacyError: a layer is missing, unknown, or has another shape.
        """
        if set(parameters) != set(self.names):
            wrong = (("missing", set(self.names) - set(parameters)), ("unknown", set(parameters) - set(self.names)))
            lists = [f"{fault}: {', '.join(sorted(names))}" for fault, names in wrong if names]
            raise PrivacyError(f"the weights do not fit the model's layers ({'; '.join(lists)}): give weights of the same model")
        flat = []
        for name, shape in zip(self.names, self.shapes, strict=True):
            tensor = parameters[name]
            batch = tensor.shape[: tensor.dim() - len(shape)]
            if tuple(tensor.shape[len(batch) :]) != shape:
                raise PrivacyError(f"layer {name} has shape {tuple(tensor.shape)}, expected (*batch, {shape})")
            flat.append(tensor.reshape(*batch, prod(shape)))
        if len({piece.shape[:-1] for piece in flat}) != 1:
            raise PrivacyError(f"layers have different batch shapes: {sorted({tuple(piece.shape[:-1]) for piece in flat})}")
        return torch.cat(flat, dim=-1)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Cut a tensor of shape (*batch, d) into views by layer name, each of shape (*batch, *shape of the layer)."""
        if vector.shape[-1:] != (self.dimension,):
            raise PrivacyError(f"vector has shape {tuple(vector.shape)}, the model's layout has {self.dimension} weights")
        pieces = vector.split_with_sizes(list(self.sizes), dim=-1)
        batch = vector.shape[:-1]
        return {name: piece.reshape(*batch, *shape) for name, shape, piece in zip(self.names, self.shapes, pieces, strict=True)}


def called_with(
    module: nn.Module, parameters: dict[str, Tensor], arguments: tuple[Any, ...], named: Mapping[str, Any] | None = None
) -> Any:
    """Return the outputs of ``module`` with ``parameters`` (by layout names) instead of its own.

    ``arguments`` and ``named`` are the module's positional and named inputs. A model of ``transformers`` returns several tensors. Its
    scores are taken, see :func:`scores_in`.

    A parameter may be an attribute of several modules, and a module may have several names. PyTorch gets one name for each attribute: with
    two names for one attribute, ``functional_call`` would not put the module's own parameter back at the end.

    If the module replaces a parameter while it runs, ``parameters`` holds the new tensor afterwards, so that callers can notice it.
    """
    layout_names = {id(parameter): name for name, parameter in module.named_parameters()}
    name_by_attribute = {
        f"{prefix}.{key}".lstrip("."): layout_names[id(parameter)]
        for prefix, part in module.named_modules()
        for key, parameter in part._parameters.items()
        if parameter is not None
    }
    values = {attribute: parameters[name] for attribute, name in name_by_attribute.items() if name in parameters}
    # In this context, the branches that code of ``transformers`` takes depend on the shapes of tensors, not on their values. The
    # compiler cannot trace the context; code that it compiles has no branches on values anyway.
    with nullcontext() if torch.compiler.is_compiling() else blind_to_values(module, parameters.values()):
        outputs = functional_call(module, values, arguments, dict(named or {}), tie_weights=False)
    parameters.update({name: values[name] for name in parameters.keys() & values.keys()})
    return scores_in(outputs, *arguments[:1], **dict(named or {}))  # the tokens are the first argument, or have a name


def answers_of(module: nn.Module, inputs: Tensor | Mapping[str, Tensor]) -> Any:
    """Return the outputs of ``module`` for ``inputs``, with its own parameters."""
    if isinstance(inputs, Tensor):
        return scores_in(module(inputs), inputs)
    return scores_in(module(**inputs), **inputs)


def scores_in(outputs: Any, tokens: Tensor | None = None, **named: Tensor) -> Any:
    """Return the ``logits`` in the ``outputs`` of a model of ``transformers``. Outputs of any other model are returned unchanged.

    ``tokens`` is the model's input, or its ``named`` inputs contain the tokens. A trained prompt stands before the tokens. The scores at
    the places of the prompt predict nothing, and are left out.
    """
    logits = getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor):
        return outputs
    tokens = named.get("input_ids", tokens)
    if tokens is None or tokens.dim() != 2 or logits.dim() != 3:
        return logits
    return logits[:, -tokens.shape[1] :]  # (N, T, vocabulary): scores at the place of each of the T tokens


def validate_module(module: nn.Module) -> None:
    """Refuse a model with state that would leave a client without noise.

    Raises:
        PrivacyError: the model has such state. The message names each entry and its remedy.
    """
    _refuse(module, [*_buffer_problems(module), *_parameter_problems(module), *_part_problems(module), *_dropout_problems(module)])


def refuse_lost_in_copies(module: nn.Module) -> None:
    """Refuse a model whose copy would behave differently, since hooks on parameters and shared memory are not copied.

    Raises:
        PrivacyError: the model has such parameters. The message names them.
    """
    _refuse(module, [*_hook_problems(module), *_shared_problems(module)])


class _Problem(NamedTuple):
    """A problem of a model. Its message is ``subject`` and ``problem_text``, or ``nameless_subject`` and ``problem_text`` without names.

    Attributes:
        subject: the layers, buffers or parameters, with their names.
        nameless_subject: a phrase for them without their names, which the model's author chose.
        problem_text: the problem and its remedy, without names.
    """

    subject: str
    nameless_subject: str
    problem_text: str


def _refuse(module: nn.Module, problems: list[_Problem]) -> None:
    """Raise a :class:`PrivacyError` that lists the ``problems`` of ``module``, if there are any."""
    if problems:
        text = "; ".join(f"{problem.subject}{problem.problem_text}" for problem in problems)
        # Without names, messages on several layers are equal. The dict keeps one of each, in order.
        advice = "; ".join(dict.fromkeys(f"{problem.nameless_subject}{problem.problem_text}" for problem in problems))
        raise PrivacyError(
            f"{type(module).__name__} cannot be trained privately: {text}", advice=f"it cannot be trained privately: {advice}"
        )


_WEIGHT_NORM = "use torch.nn.utils.parametrizations.weight_norm"
_SPECTRAL_NORM_BUFFERS = frozenset({"_u", "_v", "weight_u", "weight_v"})


def _buffer_problems(module: nn.Module) -> list[_Problem]:
    """Return the problems of buffers that are saved with the model: they may hold private statistics, which nothing randomises."""
    persistent = set(module.state_dict(keep_vars=True)) - {name for name, _ in module.named_parameters()}
    problems = []
    for prefix, child in module.named_modules():
        buffers = [name for name, _ in child.named_buffers(prefix, recurse=False) if name in persistent]
        subject = f"buffers {', '.join(buffers)}" if buffers else prefix or type(child).__name__
        problem_text = ""
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            # Without running statistics there is no buffer, but a sample's result still depends on its batch.
            problem_text = ": batch normalisation mixes private samples and stores their statistics, use torch.nn.GroupNorm instead"
        elif buffers and isinstance(child, nn.modules.batchnorm._NormBase):
            problem_text = ": they store statistics of private samples, set track_running_stats=False"
        elif buffers and {name.rpartition(".")[2] for name in buffers} <= _SPECTRAL_NORM_BUFFERS:
            problem_text = f": spectral normalisation changes them while the model runs, leave it out or {_WEIGHT_NORM}"
        elif buffers:
            problem_text = (
                ": register it with persistent=False if it is a public constant, else make it a parameter that is trained; if it holds "
                "values of private rows, leave it out, because a constant or a frozen parameter gets no noise"
            )
        if problem_text:
            problems.append(_Problem(subject, "buffers" if buffers else "a layer", problem_text))
    return problems


_A_PARAMETER = "a parameter"


def _parameter_problems(module: nn.Module) -> list[_Problem]:
    """Return the problems of parameters that cannot be trained, flattened to a vector, or written back from one."""
    problems = []
    trainable = [(name, p) for name, p in module.named_parameters(remove_duplicate=True) if p.requires_grad]
    for name, parameter in trainable:
        problem_text = ""
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            problem_text = " is uninitialised: run one forward pass first, or give its layer a size"
        elif parameter.dtype != torch.float32:
            problem_text = f" is {parameter.dtype}: convert the model with .float()"
        elif parameter.dim() == 0:
            problem_text = " is 0-d: give it the shape (1,)"
        elif parameter.numel() == 0:
            problem_text = " is empty: remove it"
        elif any(size > 1 and stride == 0 for size, stride in zip(parameter.shape, parameter.stride(), strict=True)):
            problem_text = " repeats one value in memory, as after expand: replace it with its .clone()"
        if problem_text:
            problems.append(_Problem(f"parameter {name}", _A_PARAMETER, problem_text))
    if not trainable:
        problems.append(_Problem("", "", "no trainable parameter: set requires_grad=True on the parameters to train"))
    return [*problems, *_device_problems(module), *_adapter_problems(module), *_hook_problems(module), *_shared_problems(module)]


def _device_problems(module: nn.Module) -> list[_Problem]:
    """Return the problems of parameters, frozen ones included, that are on another device than the others, or have no values."""
    devices = {name: parameter.device for name, parameter in module.named_parameters()}
    without_values = [name for name, device in devices.items() if device.type == "meta"]
    if without_values:
        others = f", nor do {len(without_values) - 1} others" if len(without_values) > 1 else ""
        problem_text = f" has no values (device meta){others}: make the model on the CPU"
        return [_Problem(f"parameter {without_values[0]}", _A_PARAMETER, problem_text)]
    most_common_first = Counter(devices.values()).most_common()
    if len(most_common_first) > 1:
        name = next(name for name, device in devices.items() if device == most_common_first[-1][0])
        problem_text = f" is on {devices[name]}, and most others are on {most_common_first[0][0]}: move the whole model with .to(device)"
        return [_Problem(f"parameter {name}", _A_PARAMETER, problem_text)]
    return []


def _adapter_problems(module: nn.Module) -> list[_Problem]:
    """Return the problem of an active adapter of ``peft`` with frozen parameters, which training would not change."""
    problems = []
    for part in module.modules():
        active = getattr(part, "active_adapter", None) if isinstance(getattr(part, "peft_config", None), Mapping) else None
        if isinstance(active, str):
            frozen = [name for name, weight in part.named_parameters() if active in name.split(".") and not weight.requires_grad]
            if frozen:
                subject = f"adapter {active!r} has {len(frozen)} frozen parameters, such as {frozen[0]}"
                remedy = ": load it with is_trainable=True, or create it with inference_mode=False"
                problems.append(_Problem(subject, "an adapter is frozen", remedy))
                break  # the modules inside it share its settings
    return problems


def _hook_problems(module: nn.Module) -> list[_Problem]:
    """Return the problems of parameters with hooks on their gradients. Private training would silently skip a hook."""
    problem_text = " has a hook, which does not run in private training: remove the hook, and do its work in forward"
    return [
        _Problem(f"parameter {name}", _A_PARAMETER, problem_text)
        for name, parameter in module.named_parameters()
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    ]


def _shared_problems(module: nn.Module) -> list[_Problem]:
    """Return the problems of parameters that share memory. They are trained separately, and could not be written back into the model."""
    spans = []  # one for each parameter: (device, address of its first byte, address behind its last byte, name)
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, nn.parameter.UninitializedParameter) and not parameter.is_meta and parameter.numel():
            # Number of elements from the first to the last in memory, gaps included.
            extent = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True)) + 1
            start = parameter.data_ptr()
            spans.append((str(parameter.device), start, start + extent * parameter.element_size(), name))
    spans.sort()
    problem_text = " share memory: make them one nn.Parameter, or give one of them a .clone()"
    return [
        _Problem(f"parameters {name} and {next_name}", nameless_subject="two parameters", problem_text=problem_text)
        for (device, _, stop, name), (next_device, next_start, _, next_name) in pairwise(spans)
        if device == next_device and next_start < stop
    ]


def _part_problems(module: nn.Module) -> list[_Problem]:
    """Return the problems of compiled or distributed modules, of options of embeddings, and of old weight normalisation."""
    problems = []
    for name, child in module.named_modules():
        if replacement := _instead_of_wrapper(child):
            subject = f"{name or 'the model'} is a {type(child).__name__}"
            problems.append(
                _Problem(
                    subject, "a layer is compiled or distributed", f", which cannot run with other weights: pass {replacement} instead"
                )
            )
        if isinstance(child, nn.Embedding | nn.EmbeddingBag):
            weight = f"parameter {f'{name}.weight'.lstrip('.')}"
            if child.max_norm is not None:
                problems.append(_Problem(weight, "an embedding", " is changed by max_norm while the model runs: remove max_norm"))
            if child.sparse:
                problem_text = " has sparse gradients, which private training does not support: set sparse=False"
                problems.append(_Problem(weight, "an embedding", problem_text))
        if any(isinstance(hook, WeightNorm) for hook in child._forward_pre_hooks.values()):
            problem_text = f": torch.nn.utils.weight_norm stores computed weights in the layer, {_WEIGHT_NORM}"
            problems.append(_Problem(name or type(child).__name__, "a layer", problem_text))
    return problems


def _instead_of_wrapper(part: nn.Module) -> str:
    """Return what to pass instead of a compiled, scripted or distributed module; "" for any other module."""
    if isinstance(part, torch.jit.ScriptModule):
        return "the module that was scripted or traced"
    if isinstance(part, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return "its .module"
    return "the module that was compiled, its ._orig_mod" if isinstance(getattr(part, "_orig_mod", None), nn.Module) else ""


def _dropout_problems(module: nn.Module) -> list[_Problem]:
    """Return the problems of layers that draw random numbers in training."""
    problems, places = [], []
    for name, child in module.named_modules():
        if dropout_rates(child):
            places.append(name or type(child).__name__)
        elif isinstance(child, nn.RReLU):
            problems.append(_Problem(name or "RReLU", "RReLU", f"{_DRAWS}: use LeakyReLU"))
    if places:
        others = f" and {len(places) - _MAX_NAMED} others" if len(places) > _MAX_NAMED else ""
        subject = f"dropout in {', '.join(places[:_MAX_NAMED])}{others}"
        problems.append(_Problem(subject, "dropout", f"{_DRAWS}: set it to 0, or set model.mend to true"))
    return problems


_DRAWS = " draws random numbers from a generator that all clients share"

_MAX_NAMED = 3
"""Maximum number of layers that a message names. The others are counted."""

_RATES = ("dropout", "drop_prob", "drop_path", "layerdrop", "pdrop")
"""Parts of the names of attributes in which modules store a dropout probability."""


def dropout_rates(part: nn.Module) -> tuple[str, ...]:
    """Return the attributes of ``part`` itself that hold a probability of dropout above 0."""
    if isinstance(part, nn.modules.dropout._DropoutNd):
        return ("p",) if part.p > 0 else ()
    return tuple(
        name
        for name, value in vars(part).items()
        # A bool, which is an int in Python, is a switch and no probability.
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1 and any(word in name for word in _RATES)
    )
