"""The registry of built-in models, and building any model by name, by import path, or from a module that a caller passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ldpfl.errors import ConfigError, first_line, shown
from ldpfl.models import dense, images, leaf_network, texts
from ldpfl.models.images import InputShape
from ldpfl.models.layout import refuse_lost_in_copies
from ldpfl.models.mending import copied
from ldpfl.util.seeded_torch import SeededDraws
from ldpfl.util.suggestions import did_you_mean
from ldpfl.util.user_code import GIVEN, call_user_code, is_code

CENTERED = "centered-linear"
"""Name of the model whose first round measures a center."""

_REGISTRY: Mapping[str, Callable[..., nn.Module]] = {
    "two-layer-cnn": images.TwoLayerCNN,
    "small-vgg": images.SmallVGG,
    "resnet18-gn": images.ResNet18GN,
    "resnet8-gn": images.ResNet8GN,
    "leaf-network": leaf_network.LeafNetwork,
    "logistic-regression": dense.LogisticRegression,
    "linear": dense.Linear,
    CENTERED: dense.CenteredLinear,
    "mlp": dense.MLP,
}

_MAX_PARTS, _MAX_WIDTH = 64, 1 << 16
"""Maximum values of options. A server may set them, and larger models could exhaust a node's memory."""

_TEXT_MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "embedding-bag": texts.EmbeddingBag,
    "gru": texts.GRU,
    "lstm": texts.LSTM,
    "transformer": texts.Transformer,
}


def names() -> tuple[str, ...]:
    """Return the names of the built-in models."""
    return (*_REGISTRY, *_TEXT_MODELS)


def create(
    name: str,
    shape: InputShape | None,
    outputs: int,
    *,
    seed: int,
    options: Mapping[str, Any] | None = None,
    vocabulary: int | None = None,
    by_place: bool = False,
    given: nn.Module | None = None,
) -> nn.Module:
    """Build a model with weights that ``seed`` alone decides, whatever is drawn in other threads; see :class:`SeededDraws`.

    Args:
        name: one of :func:`names`; or the user's class, ``"package.module:Class"`` or ``"file.py:Class"``; or "given", for a copy of
            ``given``.
        shape: shape of one sample; None if a sample is several tensors.
        outputs: number of outputs for a sample.
        options: arguments for the model's class. A user's class also gets the sizes of :func:`offered` that it requires.
        vocabulary: number of tokens if samples are texts, else None.
        by_place: whether the model has outputs at each place of a text, which predict the next token from the ones before.
        given: the module that a caller passed, for the name "given".

    Raises:
        ConfigError: the name or an option is unknown, the model is for other samples, or the user's class is not a ``torch.nn.Module``.
    """
    if name == GIVEN:
        if given is None:
            raise ConfigError("the run's model was passed in Python as an object, which is not stored: pass it again with model=...")
        return copied(given)
    arguments = dict(options or {})
    with SeededDraws(seed):
        if is_code(name):
            module = _checked_module(name, call_user_code("model", name, offered=offered(shape, outputs, vocabulary), **arguments))
            return _with_fixed_sizes(module, name, shape, tokens=vocabulary is not None)
        if shape is None and name in names():
            raise ConfigError(
                f"model {name!r} takes samples of one tensor, but these samples have several: give a module with an argument for each"
            )
        if name in _TEXT_MODELS:
            if vocabulary is None:
                raise ConfigError(f"model {name!r} is for texts: set data.text to the column of the texts, or choose another model")
            return _built_in_model(name, _TEXT_MODELS[name], arguments, vocabulary, outputs, by_place)
        if name not in _REGISTRY:
            raise ConfigError(f"unknown model {name!r}: {did_you_mean(name, names())}, or give an import path package.module:Class")
        if vocabulary is not None or shape is None:
            remedy = f"set model.name (--model) to one of {', '.join(_TEXT_MODELS)}"
            raise ConfigError(f"model {name!r} takes neither texts nor whole numbers, which count as tokens: {remedy}")
        return _built_in_model(name, _REGISTRY[name], arguments, shape, outputs)


def offered(shape: InputShape | None, outputs: int, vocabulary: int | None) -> dict[str, Any]:
    """Return sizes of the data by name. A user's own class is passed those that it requires as arguments.

    If a sample is one tensor, ``shape`` is its shape and ``inputs`` its number of values. ``outputs`` is the number of outputs that the
    task needs. ``vocabulary`` is the number of tokens, if the samples are texts.
    """
    sizes = {"inputs": None if shape is None else prod(shape), "outputs": outputs, "shape": shape, "vocabulary": vocabulary}
    return {name: value for name, value in sizes.items() if value is not None}


def _with_fixed_sizes(module: nn.Module, name: str, shape: InputShape | None, *, tokens: bool) -> nn.Module:
    """Return ``module``. Lazy layers, if it has any, get their sizes by a run on samples of zeros.

    Raises:
        ConfigError: the module fails on samples of zeros.
    """
    if shape is None or not any(is_lazy(part) for part in (*module.parameters(), *module.buffers())):
        return module
    try:
        with torch.no_grad():  # two samples, since batch normalisation refuses one
            module(torch.zeros(2, *shape, dtype=torch.int64 if tokens else torch.float32))
    except Exception as error:  # it is the user's class
        raise ConfigError(
            f"model {name!r} has lazy layers, and failed on two samples of shape {tuple(shape)} "
            f"({type(error).__name__}: {first_line(error)}): correct its forward, or give the layers fixed sizes"
        ) from error
    return module


def _built_in_model(name: str, build: Callable[..., nn.Module], options: Mapping[str, Any], *arguments: Any) -> nn.Module:
    """Return the built-in model ``name``, made by ``build``. Its options are the keyword-only arguments of ``build``.

    Raises:
        ConfigError: an option is unknown, or its value is no whole number or too large.
    """
    known = [key for key, parameter in signature(build).parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    for key, value in options.items():
        if key not in known:
            raise ConfigError(f"model {name!r} has no option {key!r}" + (f": {did_you_mean(key, known)}" if known else ""))
        largest = _MAX_PARTS if key in ("depth", "heads") else _MAX_WIDTH
        if type(value) is not int or not 1 <= value <= largest:
            raise ConfigError(f"model {name!r}, {key}: expected a whole number from 1 to {largest:,}, got {shown(value)}")
    return build(*arguments, **options)


def _checked_module(name: str, returned: object) -> nn.Module:
    """Return the object that the user's class ``name`` ``returned``, or raise if it is not a module that can be copied."""
    if not isinstance(returned, nn.Module):
        raise ConfigError(f"model {name!r} returned a {type(returned).__name__}, expected a torch.nn.Module")
    refuse_lost_in_copies(returned)
    return returned
