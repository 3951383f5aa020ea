"""Which features there are: a line each; or any module by import path, with its weights frozen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ldpfl.data.features.base import FeatureMap
from ldpfl.data.features.efficientnet import EfficientNetLite0
from ldpfl.data.features.leaves import LeafFeatures
from ldpfl.data.features.scattering import ScatteringFeatures
from ldpfl.data.features.strokes import StrokeFeatures
from ldpfl.errors import ConfigError, shown
from ldpfl.util.suggestions import did_you_mean
from ldpfl.util.user_code import called, is_code

NONE = "none"
"""Samples as they are."""


_REGISTRY: Mapping[str, Callable[..., FeatureMap]] = {
    "scattering": ScatteringFeatures,
    "strokes": StrokeFeatures,
    "leaves": LeafFeatures,
    "efficientnet-lite0": EfficientNetLite0,
}


def names() -> tuple[str, ...]:
    """Names that :func:`feature_map` knows beside import paths."""
    return tuple(_REGISTRY)


def feature_map(name: str, options: Mapping[str, Any]) -> FeatureMap:
    """Return the features called ``name``, or those of the module at ``"package.module:Class"``, made with ``options``.

    Raises:
        ConfigError: the name or an option is unknown, or a value is out of range.
    """
    if is_code(name):
        return _imported(name, options)
    if name not in _REGISTRY:
        raise ConfigError(
            f"unknown features {name!r}: {did_you_mean(name, (NONE, *_REGISTRY))}, or give an import path package.module:Class"
        )
    made = _REGISTRY[name]
    has = [field.name for field in fields(made)]  # type: ignore[arg-type]
    for option in options:
        if option not in has:
            raise ConfigError(f"features {name!r} have no option {option!r}: {did_you_mean(option, has)}")
    for field in fields(made):  # type: ignore[arg-type]
        if field.name in options and type(options[field.name]) is not type(field.default):
            raise ConfigError(
                f"features {name!r}, {field.name}: expected a {type(field.default).__name__}, got {shown(options[field.name])}"
            )
    return made(**options)


@dataclass(frozen=True)
class _Frozen(FeatureMap):
    """A module as features: in evaluation mode, and never trained."""

    module: nn.Module

    def shape(self, inputs: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self(torch.zeros(2, *inputs, dtype=torch.uint8 if len(inputs) == 3 else torch.float32)).shape[1:])

    def __call__(self, inputs: Tensor) -> Tensor:
        with torch.inference_mode():
            found = self.module(inputs)
        return torch.as_tensor(found, dtype=torch.float32).clone()


@lru_cache(maxsize=4)
def _made(path: str, options: tuple[tuple[str, Any], ...]) -> _Frozen:
    module = called("features", path, **dict(options))
    if not isinstance(module, nn.Module):
        raise ConfigError(f"features {path!r} give a {type(module).__name__}, expected a torch.nn.Module")
    return _Frozen(module.eval().requires_grad_(False))


def _imported(path: str, options: Mapping[str, Any]) -> _Frozen:
    return _made(path, tuple(sorted(options.items())))
