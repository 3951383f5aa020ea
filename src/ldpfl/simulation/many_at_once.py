"""Compute the losses of many clients or records at once by ``torch.func.vmap``, without its warnings."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch import Tensor
from torch.func import vmap

_ONE_AFTER_ANOTHER = "There is a performance drop because we have not yet implemented the batching rule"
"""Start of PyTorch's warning that it computes an operation of one client after another. It asks users to report that to PyTorch."""


def many_at_once(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function that computes ``loss`` for many clients: each argument has a further dimension in front, that of clients.

    Results are right where PyTorch has no rule for an operation, and users cannot add one. So the warning about it is left out, here only.
    """
    losses = vmap(loss)

    def quiet_losses(*arguments: object) -> Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _ONE_AFTER_ANOTHER, UserWarning)
            result: Tensor = losses(*arguments)
        return result

    return quiet_losses
