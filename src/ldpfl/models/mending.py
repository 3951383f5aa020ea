"""What in a module keeps it from private training, and the module without it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from ldpfl.errors import ConfigError, first_line
from ldpfl.models.layout import dropout_rates, refuse_lost_in_copies

_GROUPS = 32

_FEWEST, _FEWEST_ALONE = 2, 4
"""Fewest channels of a group, of an image and of a flat layer: two numbers by themselves are always made +1 and -1."""
"""Most groups that channels are normalised in (Wu and He 2018)."""

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class Change:
    """A part of a module that was replaced.

    Attributes:
        place: its name in the module; empty for the module itself.
        before, after: as PyTorch writes them.
    """

    place: str
    before: str
    after: str


def copied(module: nn.Module) -> nn.Module:
    """Return a copy of ``module``, which shares nothing with it.

    Raises:
        PrivacyError: a copy would be trained to something else.
        ConfigError: there is no copy of it.
    """
    refuse_lost_in_copies(module)
    try:
        return copy.deepcopy(module)
    except Exception as error:  # it is the user's class
        raise ConfigError(
            f"model {type(module).__name__} cannot be copied ({type(error).__name__}: {first_line(error)}): keep in it nothing that is "
            "computed from its weights; in the place of torch.nn.utils.weight_norm take torch.nn.utils.parametrizations.weight_norm"
        ) from error


def mended(module: nn.Module) -> tuple[nn.Module, tuple[Change, ...]]:
    """Return a copy of ``module`` that can be trained privately, as far as one is known, and what was changed in it.

    Batch normalisation becomes normalisation by groups of channels, within each sample; instance normalisation keeps no statistics.
    Probabilities of dropout, which would draw from a generator that all clients share, become 0 where they stand: other parts may ask for
    them. ``max_norm`` and ``sparse`` of embeddings are switched off, and weights become float32. What else is wrong stays, for
    :func:`ldpfl.models.layout.validate_module` to say. A new part begins with its usual weights.
    """
    if (replaced := _replacement(module)) is not None:
        return replaced, (Change("", _line(module), _line(replaced)),)
    result = copied(module)
    changes = [*_changed(result, {})]
    if any(parameter.is_floating_point() and parameter.dtype != parameter.float().dtype for parameter in result.parameters()):
        kinds = sorted({str(parameter.dtype) for parameter in result.parameters()})
        changes.append(Change("", ", ".join(kinds), "torch.float32"))
        result = result.float()
    return result, tuple(changes)


def _changed(module: nn.Module, done: dict[nn.Module, nn.Module], prefix: str = "") -> Iterator[Change]:
    """Change the parts of ``module`` in place, and yield what was changed; ``done`` has what replaced a part that stands elsewhere too."""
    for name, child in list(module._modules.items()):  # under each of its names, which named_children() leaves out
        if child is None:
            continue
        place = f"{prefix}{name}"
        replaced = done.get(child) or _replacement(child)
        if replaced is not None:
            done[child] = replaced
            setattr(module, name, replaced)
            yield Change(place, _line(child), _line(replaced))
        else:
            yield from _changed(child, done, f"{place}.")
    if rates := dropout_rates(module):
        before = _line(module)
        for rate in rates:
            setattr(module, rate, 0.0)
        yield Change(prefix.removesuffix("."), before, _line(module))
    if isinstance(module, _EMBEDDINGS) and (module.max_norm is not None or module.sparse):
        before = _line(module)
        module.max_norm, module.sparse = None, False
        yield Change(prefix.removesuffix("."), before, _line(module))


def _replacement(part: nn.Module) -> nn.Module | None:
    if isinstance(part, nn.modules.batchnorm._BatchNorm):
        few = _FEWEST_ALONE if isinstance(part, nn.BatchNorm1d | nn.LazyBatchNorm1d) else _FEWEST
        return nn.GroupNorm(_groups(part.num_features, few), part.num_features, eps=part.eps, affine=part.affine)
    if isinstance(part, nn.modules.instancenorm._InstanceNorm) and part.track_running_stats:
        return type(part)(part.num_features, eps=part.eps, affine=part.affine)
    if isinstance(part, nn.RReLU):
        return nn.LeakyReLU((part.lower + part.upper) / 2)
    return None


def _groups(channels: int, few: int) -> int:
    """Return the largest number of equal groups, of at least ``few`` channels each where that is possible."""
    return max(groups for groups in range(1, min(_GROUPS, max(1, channels // few)) + 1) if channels % groups == 0)


def _line(part: nn.Module) -> str:
    return " ".join(str(part).split())
