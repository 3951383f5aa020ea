"""Compute the losses of many clients or records at once by ``torch.func.vmap``, without its warnings."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.func import vmap

_ONE_AFTER_ANOTHER = "There is a performance drop because we have not yet implemented the batching rule"
"""Start of PyTorch's warning that it computes an operation of one client after another. It asks users to report that to PyTorch."""


@contextmanager
def without_advice() -> Iterator[None]:
    """Leave out PyTorch's warning on operations that it has no rule for. Results are right, and users cannot add a rule."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _ONE_AFTER_ANOTHER, UserWarning)
        yield


def many_at_once(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function that computes ``loss`` for many clients: each argument has a further dimension in front, that of clients."""
    losses = vmap(loss)

    def quiet_losses(*arguments: object) -> Tensor:
        with without_advice():
            result: Tensor = losses(*arguments)
        return result

    return quiet_losses
