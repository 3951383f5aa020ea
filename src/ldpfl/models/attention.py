"""Attention for many clients or records at once: PyTorch's fast kernel on CPUs, and models that decide by shapes alone.

``torch.func.vmap`` has no rule for that kernel. It would run the kernel once for each client, or compute products that keep a matrix of
attention weights for each. Here the clients become part of the batch, because attention treats each element of a batch separately. The
results are those of the kernel for each client, bit by bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode


@contextmanager
def blind_to_values(module: nn.Module, parameters: Iterable[Tensor]) -> Iterator[None]:
    """Let parts of ``transformers`` in ``module`` decide by shapes alone what to compute, never by values.

    Otherwise such a part leaves out an attention mask that hides nothing. One record's padding would then change how others are rounded.
    And ``vmap``, which computes many records or clients at once, allows no decision by values. It is running if it wraps ``parameters``.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")  # None if nobody imported it: then ``module`` has no parts of transformers
    if masks is None or not any(type(part).__module__.startswith("transformers.") for part in module.modules()):
        yield
        return
    if not isinstance(masks.is_tracing, _IsTracing):  # wrapped once for the whole process; it changes answers only within this context
        masks.is_tracing = _IsTracing(masks.is_tracing)
    within_vmap = any(map(torch._C._functorch.is_functorch_wrapped_tensor, parameters))
    token = _BY_SHAPES.set(True)
    try:
        with FoldedAttention() if within_vmap else nullcontext():
            yield
    finally:
        _BY_SHAPES.reset(token)


_BY_SHAPES = ContextVar("by_shapes", default=False)
"""Whether this thread is within :func:`blind_to_values`."""


@dataclass(frozen=True)
class _IsTracing:
    """Whether ``transformers`` must decide by shapes alone: yes within :func:`blind_to_values`, and else as ``original`` says."""

    original: Callable[..., bool]

    def __call__(self, tensor: object = None) -> bool:
        return _BY_SHAPES.get() or self.original(tensor)


class FoldedAttention(TorchFunctionMode):
    """A context in which attention of many clients is computed at once. Where the fast kernel does not apply, products compute it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call PyTorch's ``func``. Attention is computed by the fast kernel, or by plain products where that does not apply."""
        named = dict(kwargs or {})
        if func is not F.scaled_dot_product_attention:
            return func(*args, **named)
        attended = _fast_attention(*args, **named)
        if attended is not None:
            return attended
        with sdpa_kernel(SDPBackend.MATH):
            return func(*args, **named)


def _fast_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Return the attention by the fast kernel; None if the kernel cannot compute it and all of its gradients.

    The arguments are those of PyTorch's function. The kernel has no gradient of a mask. A mask of numbers may be trained, as a bias by
    position is, so only masks of booleans are allowed.
    """
    fits_kernel = all(part.dim() == 4 and part.device.type == "cpu" and part.dtype == torch.float32 for part in (query, key, value))
    same_heads = query.shape[:2] == key.shape[:2] == value.shape[:2]
    causal_fits = not is_causal or (attn_mask is None and query.shape[-2] == key.shape[-2])
    mask_fits = attn_mask is None or (attn_mask.dim() == 4 and attn_mask.dtype == torch.bool)
    if not (fits_kernel and same_heads and causal_fits and mask_fits) or dropout_p or enable_gqa:
        return None
    mask = attn_mask
    if mask is not None:  # the kernel adds its mask to the weights
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
        mask = mask.expand(query.shape[0], mask.shape[1], query.shape[2], key.shape[2])
    attended: Tensor
    attended, _ = _Attention.apply(query, key, value, mask, is_causal, scale)  # type: ignore[no-untyped-call]
    return attended


class _Attention(torch.autograd.Function):
    """The kernel and its gradient, with a rule for ``vmap``."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Any:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return tuple(kernel(query, key, value, 0.0, causal, attn_mask=mask, scale=scale))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        query, key, value, mask, *ctx.causal_and_scale = inputs
        ctx.save_for_backward(query, key, value, *output, mask)
        ctx.mark_non_differentiable(output[1])  # logarithms of sums, which the kernel returns for its gradient alone

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Any:
        """Return the gradients of query, key and value by the kernel, and None for mask, causal and scale, which have none."""
        *saved, mask = ctx.saved_tensors
        causal, scale = ctx.causal_and_scale
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return (*kernel(gradient.contiguous(), *saved, 0.0, causal, attn_mask=mask, scale=scale), None, None, None)

    @staticmethod
    def vmap(info: Any, dims: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any) -> Any:
        """Return the results for all clients, with clients first. ``dims`` holds the dimension of clients in each argument, if any."""
        folded = (_with_clients_in_batch(part, dim, info.batch_size) for part, dim in zip((query, key, value, mask), dims[:4], strict=True))
        outputs = _Attention.apply(*folded, *rest)  # type: ignore[no-untyped-call]
        return tuple(part.unflatten(0, (info.batch_size, -1)) for part in outputs), (0, 0)


def _with_clients_in_batch(part: Tensor | None, client_dim: int | None, clients: int) -> Tensor | None:
    """Move the dimension ``client_dim`` of ``part`` to the front and merge it into the batch; repeat a part that all clients share."""
    if part is None:
        return None
    return (part.expand(clients, *part.shape) if client_dim is None else part.movedim(client_dim, 0)).flatten(0, 1)
