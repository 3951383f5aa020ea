"""The registry of features, and features by name, or from any module by import path with its weights frozen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ldpfl.data.features.base import FeatureMap
from ldpfl.data.features.efficientnet import EfficientNetLite0, EfficientNetLite1, EfficientNetLite2
from ldpfl.data.features.leaves import LeafFeatures
from ldpfl.data.features.pretrained import TimmFeatures, TransformersFeatures
from ldpfl.data.features.scattering import ScatteringFeatures
from ldpfl.data.features.strokes import StrokeFeatures
from ldpfl.errors import ConfigError, shown
from ldpfl.models.adapters import digest_of
from ldpfl.util.suggestions import did_you_mean
from ldpfl.util.user_code import PRETRAINED, TIMM, call_user_code, is_code

NONE = "none"
"""Name in ``data.features`` for samples without features."""

_REGISTRY: Mapping[str, Callable[..., FeatureMap]] = {
    "scattering": ScatteringFeatures,
    "strokes": StrokeFeatures,
    "leaves": LeafFeatures,
    "efficientnet-lite0": EfficientNetLite0,
    "efficientnet-lite1": EfficientNetLite1,
    "efficientnet-lite2": EfficientNetLite2,
}

_ENCODERS_BY_PREFIX: Mapping[str, Callable[..., FeatureMap]] = {TIMM: TimmFeatures, PRETRAINED: TransformersFeatures}


def is_cacheable(name: str) -> bool:
    """Return whether the features ``name`` may be cached. Those by import path may not: the code may change and keep its path."""
    return not is_code(name) or name.startswith(tuple(_ENCODERS_BY_PREFIX))


def names() -> tuple[str, ...]:
    """Return the names of the built-in features."""
    return tuple(_REGISTRY)


def feature_map(name: str, options: Mapping[str, Any]) -> FeatureMap:
    """Return the features ``name``, or those of the module at ``"package.module:Class"``, built with ``options``.

    Names such as ``timm:NAME`` and ``hf:FOLDER`` are frozen encoders, see :mod:`ldpfl.data.features.pretrained`.

    Raises:
        ConfigError: the name or an option is unknown, or a value is out of range.
    """
    for prefix, encoder in _ENCODERS_BY_PREFIX.items():
        if name.startswith(prefix):
            _check_options(name, encoder, options)
            return encoder(name, **options)
    if is_code(name):
        return _load_module(name, tuple(sorted(options.items())))
    if name not in _REGISTRY:
        raise ConfigError(
            f"unknown features {name!r}: {did_you_mean(name, (NONE, *_REGISTRY))}, or give an import path package.module:Class"
        )
    features = _REGISTRY[name]
    _check_options(name, features, options)
    return features(**options)


def _check_options(name: str, features: Any, options: Mapping[str, Any]) -> None:
    """Raise a :class:`ConfigError` if the dataclass ``features`` lacks one of the ``options``, or takes values of another type for it."""
    known_fields = [field for field in fields(features) if field.default is not MISSING]  # without a default: ``name``
    known_names = [field.name for field in known_fields]
    for option in options:
        if option not in known_names:
            raise ConfigError(f"features {name!r} have no option {option!r}: {did_you_mean(option, known_names)}")
    for field in known_fields:
        if field.name in options and type(options[field.name]) is not type(field.default):
            raise ConfigError(
                f"option {field.name} of features {name!r}: expected a {type(field.default).__name__}, got {shown(options[field.name])}"
            )


@dataclass(frozen=True)
class _FrozenModule(FeatureMap):
    """A user's module as features, in evaluation mode and never trained."""

    module: nn.Module

    @property
    def digest(self) -> str:
        state = self.module.state_dict()
        return digest_of({key: value for key, value in state.items() if isinstance(value, Tensor) and not value.is_quantized})

    def shape(self, inputs: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one sample's features, computed for two samples of zeros: a module may drop the axis of a batch of one."""
        return tuple(self(torch.zeros(2, *inputs, dtype=torch.uint8 if len(inputs) == 3 else torch.float32)).shape[1:])

    def __call__(self, inputs: Tensor) -> Tensor:
        with torch.inference_mode():
            outputs = self.module(inputs)
        return torch.as_tensor(outputs, dtype=torch.float32).clone()  # a tensor of inference mode could not be used in training


@lru_cache(maxsize=4)
def _load_module(path: str, options: tuple[tuple[str, Any], ...]) -> _FrozenModule:
    """Return the module that the user's class or function at ``path`` builds with ``options``, frozen. It is built once for a run."""
    module = call_user_code("features", path, **dict(options))
    if not isinstance(module, nn.Module):
        raise ConfigError(f"features {path!r}: calling it returned a {type(module).__name__}, expected a torch.nn.Module")
    return _FrozenModule(module.eval().requires_grad_(False))
