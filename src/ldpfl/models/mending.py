"""Replace the parts of a module that prevent private training."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ldpfl.errors import ConfigError, first_line
from ldpfl.models.layout import dropout_rates, refuse_lost_in_copies

_MAX_GROUPS = 32
"""Maximum number of groups in group normalisation (Wu and He 2018)."""

_MIN_CHANNELS, _MIN_CHANNELS_FLAT = 2, 4
"""Minimum number of channels in a group: for images, and for flat layers, where a group of two is always normalised to +1 and -1."""

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class Change:
    """A part of a module that was replaced.

    Attributes:
        place: name of the part in the module; empty for the module itself.
        before, after: descriptions of the part, as PyTorch prints it.
    """

    place: str
    before: str
    after: str


def copied(module: nn.Module) -> nn.Module:
    """Return a deep copy of ``module``.

    Raises:
        PrivacyError: the copy would behave differently from ``module`` in training.
        ConfigError: ``module`` cannot be copied.
    """
    refuse_lost_in_copies(module)
    try:
        return copy.deepcopy(module)
    except Exception as error:  # it is the user's class
        raise ConfigError(
            f"model {type(module).__name__} cannot be copied ({type(error).__name__}: {first_line(error)}): store no tensor in it that is "
            "computed from its weights, and replace torch.nn.utils.weight_norm with torch.nn.utils.parametrizations.weight_norm"
        ) from error


def mended(module: nn.Module) -> tuple[nn.Module, tuple[Change, ...]]:
    """Return a copy of ``module`` in which parts that prevent private training are replaced, and the list of changes.

    - Batch normalisation becomes group normalisation within each sample. Instance normalisation keeps no statistics.
    - Dropout probabilities become 0, since dropout draws from a generator that all clients share. The layers stay, because other parts may
      refer to them.
    - RReLU, which draws its slopes, becomes a LeakyReLU with their mean slope.
    - ``max_norm`` and ``sparse`` of embeddings are switched off, and weights become float32.

    Other problems remain, and :func:`ldpfl.models.layout.validate_module` reports them. A new part has its usual initial weights.
    """
    if (replacement := _replacement(module)) is not None:  # the whole module is one such part; its replacement is float32
        return replacement, (Change("", _description(module), _description(replacement)),)
    result = copied(module)
    changes = list(_mend_parts(result, replacements={}))  # changes ``result`` in place
    if any(parameter.is_floating_point() and parameter.dtype != torch.float32 for parameter in result.parameters()):
        dtypes = sorted({str(parameter.dtype) for parameter in result.parameters()})
        changes.append(Change("", ", ".join(dtypes), "torch.float32"))
        result = result.float()
    return result, tuple(changes)


def _mend_parts(module: nn.Module, replacements: dict[nn.Module, nn.Module], prefix: str = "") -> Iterator[Change]:
    """Replace parts of ``module`` in place while the result is iterated, and yield the changes.

    ``replacements`` holds the new part of each part replaced so far, and is added to. With it a shared part stays shared.
    """
    for name, child in list(module._modules.items()):  # a shared part under each of its names; named_children() has only the first
        if child is None:
            continue
        place = f"{prefix}{name}"
        replacement = replacements.get(child) or _replacement(child)
        if replacement is not None:
            replacements[child] = replacement
            setattr(module, name, replacement)
            yield Change(place, _description(child), _description(replacement))
        else:
            yield from _mend_parts(child, replacements, f"{place}.")
    if rates := dropout_rates(module):  # names of attributes
        before = _description(module)
        for rate in rates:
            setattr(module, rate, 0.0)
        yield Change(prefix.removesuffix("."), before, _description(module))
    if isinstance(module, _EMBEDDINGS) and (module.max_norm is not None or module.sparse):
        before = _description(module)
        module.max_norm, module.sparse = None, False
        yield Change(prefix.removesuffix("."), before, _description(module))


def _replacement(part: nn.Module) -> nn.Module | None:
    """Return the module that replaces ``part`` in private training; None if ``part`` itself stays. :func:`mended` gives the reasons."""
    if isinstance(part, nn.modules.batchnorm._BatchNorm):
        min_channels = _MIN_CHANNELS_FLAT if isinstance(part, nn.BatchNorm1d | nn.LazyBatchNorm1d) else _MIN_CHANNELS
        return nn.GroupNorm(_number_of_groups(part.num_features, min_channels), part.num_features, eps=part.eps, affine=part.affine)
    if isinstance(part, nn.modules.instancenorm._InstanceNorm) and part.track_running_stats:
        return type(part)(part.num_features, eps=part.eps, affine=part.affine)
    if isinstance(part, nn.RReLU):
        return nn.LeakyReLU((part.lower + part.upper) / 2)
    return None


def _number_of_groups(channels: int, min_channels: int) -> int:
    """Return the largest number of equal groups of at least ``min_channels`` channels; 1 if there are fewer ``channels``."""
    max_groups = min(_MAX_GROUPS, max(1, channels // min_channels))
    return max(groups for groups in range(1, max_groups + 1) if channels % groups == 0)


def _description(part: nn.Module) -> str:
    """Return PyTorch's description of ``part`` in one line."""
    return " ".join(str(part).split())
