"""PyTorch's fast attention on CPUs for many clients or records at once.

``torch.func.vmap`` has no rule for it: it would run it for each of them by itself, or as products that keep a matrix of weights each. Here
the clients become part of the batch, which attention treats by itself anyway. Results are those of the kernel for each, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode


class FoldedAttention(TorchFunctionMode):
    """Within this context, attention of many clients is computed at once; where the fast kernel does not apply, by products."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is not F.scaled_dot_product_attention:
            return func(*args, **named)
        if _applies(*args, **named):
            return _attention(*args, **named)
        with sdpa_kernel(SDPBackend.MATH):
            return func(*args, **named)


def _applies(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> bool:
    plain = all(part.dim() == 4 and part.device.type == "cpu" and part.dtype == torch.float32 for part in (query, key, value))
    square = not is_causal or (attn_mask is None and query.shape[-2] == key.shape[-2])
    masked = attn_mask is None or attn_mask.dim() == 4
    return plain and square and masked and not dropout_p and not enable_gqa and query.shape[:2] == key.shape[:2] == value.shape[:2]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    mask = attn_mask
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
        mask = mask.expand(query.shape[0], mask.shape[1], query.shape[2], key.shape[2])
    found: Tensor = _Attention.apply(query, key, value, mask, is_causal, scale)[0]  # type: ignore[no-untyped-call]
    return found


class _Attention(torch.autograd.Function):
    """The kernel and its gradient, with the rule that ``vmap`` lacks."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Any:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return tuple(kernel(query, key, value, 0.0, causal, attn_mask=mask, scale=scale))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        query, key, value, mask, *ctx.rest = inputs
        ctx.save_for_backward(query, key, value, *output, mask)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Any:
        *kept, mask = ctx.saved_tensors
        causal, scale = ctx.rest
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return (*kernel(gradient.contiguous(), *kept, 0.0, causal, attn_mask=mask, scale=scale), None, None, None)

    @staticmethod
    def vmap(info: Any, dims: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any) -> Any:
        parts = (_folded(part, own, info.batch_size) for part, own in zip((query, key, value, mask), dims[:4], strict=True))
        found = _Attention.apply(*parts, *rest)  # type: ignore[no-untyped-call]
        return tuple(part.unflatten(0, (info.batch_size, -1)) for part in found), (0, 0)


def _folded(part: Tensor | None, of_clients: int | None, clients: int) -> Tensor | None:
    """Return ``part`` with its dimension ``of_clients`` as a part of the batch, in front."""
    if part is None:
        return None
    return (part.expand(clients, *part.shape) if of_clients is None else part.movedim(of_clients, 0)).flatten(0, 1)
