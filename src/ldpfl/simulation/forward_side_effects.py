"""Check that a model changes nothing while it runs. A change could carry samples into what is sent or kept without randomisation.

Inside ``vmap`` PyTorch counts every write to a tensor (``Tensor._version``), and forbids ``.data`` and NumPy, which write past the counter.
Outside of ``vmap`` such writes are possible, so values are compared there, bit by bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from types import FunctionType

import torch
from torch import Tensor, nn

from ldpfl.errors import LdpflError, PrivacyError
from ldpfl.util.outside_state import OutsideState, comparable_copy, equal, equal_bits

PARTS = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes of a module that hold its tensors and submodules, which :func:`_snapshot` reads separately."""

VIEWS = frozenset({"_flat_weights", "_flat_weight_refs"})
"""Attributes of PyTorch's recurrent modules that hold their parameters a second time."""


@contextmanager
def refuse_state_changes(
    module: nn.Module, losses: Callable[..., object] | None = None, outside: OutsideState | None = None
) -> Iterator[None]:
    """Raise an error if the block changes ``module`` or ``losses``.

    Parameters, their gradients, buffers and other attributes of the module are compared, and the attributes of the loss. So is the state
    that a copy of the model would share, such as attributes of classes: ``outside``, which by default is looked for.

    Raises:
        PrivacyError: something has changed; the message names it.
    """
    reached = OutsideState.of(module, losses) if outside is None else outside

    def state() -> dict[str, object]:
        return _snapshot(module) | _snapshot_of_losses(losses) | reached.snapshot()

    before = state()
    with _refuse_changes(module, lambda: _differing_names(before, state())):
        yield


@contextmanager
def refuse_tensor_writes(module: nn.Module, trained: Mapping[str, Tensor], *, by_value: bool) -> Iterator[None]:
    """Raise an error if the block, a forward or backward pass of ``module``, writes to the ``trained`` tensors, given by name.

    Inside ``vmap`` PyTorch's version counters of tensors show every write. Elsewhere ``by_value`` is needed: it compares copies.

    Raises:
        PrivacyError: a tensor was written to; the message names it.
    """
    versions = {name: tensor._version for name, tensor in trained.items()}
    copies = {name: tensor.detach().clone() for name, tensor in trained.items()} if by_value else {}

    def written_names() -> list[str]:
        by_counter = [name for name, tensor in trained.items() if tensor._version != versions[name]]
        return by_counter or [name for name, copy in copies.items() if not equal_bits(copy, trained[name].detach())]

    with _refuse_changes(module, written_names):
        yield


@contextmanager
def _refuse_changes(module: nn.Module, changed_names: Callable[[], list[str]]) -> Iterator[None]:
    """Raise a :class:`PrivacyError` after the block if ``changed_names`` returns any name.

    It replaces an error that the block raised, since the change may have caused that error.
    """
    try:
        yield
    except LdpflError:
        raise
    except Exception as error:
        _raise_if_changed(module, changed_names(), error)
        raise
    _raise_if_changed(module, changed_names(), cause=None)


def _raise_if_changed(module: nn.Module, changed: list[str], cause: Exception | None) -> None:
    """Raise a PrivacyError for ``module`` if the list of ``changed`` names is not empty."""
    if changed:
        why = (
            "while it ran, which could store or send information on its samples that no mechanism has randomised: write forward and hooks "
            "so that they change nothing in the model (for embeddings: remove max_norm)"
        )
        text = f"{type(module).__name__} changed {', '.join(changed)} {why}"
        raise PrivacyError(text, advice=f"it changed its own state {why}") from cause


def _snapshot(module: nn.Module) -> dict[str, object]:
    """Return the state of ``module``, by name, in a form that can be compared: copies of tensors, and other attributes as bytes."""
    snapshot: dict[str, object] = {}
    copies: dict[int, object] = {}  # by id: all parts of a model of ``transformers`` share one config, which is copied once
    for module_name, submodule in module.named_modules():
        left_out = PARTS | VIEWS if isinstance(submodule, nn.RNNBase) else PARTS
        prefix = f"{module_name}." if module_name else ""
        attributes = ((key, value) for key, value in submodule.__dict__.items() if key not in left_out)
        for key, value in chain(attributes, submodule._buffers.items(), submodule._parameters.items()):
            if id(value) not in copies:
                copies[id(value)] = _frozen_fingerprint(value) if _is_frozen(value) else comparable_copy(value)
            snapshot[prefix + key] = copies[id(value)]
            if isinstance(value, Tensor) and isinstance(value, nn.Parameter):  # the first check is cheaper, and enough for most attributes
                snapshot[f"{prefix}{key}.grad"] = comparable_copy(value.grad)
    return snapshot


def _snapshot_of_losses(losses: Callable[..., object] | None) -> dict[str, object]:
    """Return the state of a loss, by name, in a form that can be compared."""
    if losses is None or isinstance(losses, FunctionType):  # a function's state is outside of copies
        return {}
    if isinstance(losses, nn.Module):
        return {f"losses.{name}": value for name, value in _snapshot(losses).items()}
    return {"losses": comparable_copy(losses)}


def _is_frozen(value: object) -> bool:
    """Whether ``value`` is a frozen parameter whose bits can be read."""
    return isinstance(value, nn.Parameter) and not value.requires_grad and value.layout == torch.strided and value.numel() > 0


def _frozen_fingerprint(value: Tensor) -> object:
    """Return write counter, address, shape and SHA-256 of a frozen parameter. Copies would double the memory of a pretrained model."""
    octets = value.detach().reshape(-1).view(torch.uint8).cpu().numpy()
    return value._version, value.data_ptr(), tuple(value.shape), hashlib.sha256(octets.data).digest()


def _differing_names(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return the names whose values differ, or that are in only one of both snapshots."""
    return [name for name in {**before, **after} if name not in before or name not in after or not equal(before[name], after[name])]
