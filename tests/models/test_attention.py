"""Attention for many clients at once: that of each client, bit by bit, with all gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from ldpfl.models.attention import FoldedAttention

CLIENTS, HEADS, PLACES = 3, 2, 4


def attention(query: Tensor, mask: Tensor, kind: str) -> Tensor:
    used = {"causal": {"is_causal": True}, "whole": {}}.get(kind, {"attn_mask": mask})
    return F.scaled_dot_product_attention(query, 2 * query, 3 * query, **used)


def query_and_mask(kind: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(CLIENTS, 1, HEADS, PLACES, 8, generator=generator).requires_grad_()
    if kind == "trained bias":
        return query, torch.randn(CLIENTS, 1, HEADS, PLACES, PLACES, generator=generator).requires_grad_()
    mask = torch.ones(CLIENTS, 1, 1, PLACES, PLACES, dtype=torch.bool)
    mask[0, ..., 2:] = False
    mask[1] = False  # a text without any token
    return query, mask


def gradients(found: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(found.square().sum(), [part for part in parts if part.requires_grad])


@pytest.mark.parametrize("kind", ["whole", "causal", "padded", "trained bias"])
def test_clients_at_once_are_each_client(kind: str) -> None:
    query, mask = query_and_mask(kind)
    with FoldedAttention():
        together = vmap(lambda own, hidden: attention(own, hidden, kind))(query, mask)
    alone = torch.stack([attention(own, hidden, kind) for own, hidden in zip(query, mask, strict=True)])
    pairs = zip((together, *gradients(together, query, mask)), (alone, *gradients(alone, query, mask)), strict=True)
    for found, expected in pairs:
        assert torch.allclose(found, expected, atol=1e-6) if kind == "trained bias" else torch.equal(found, expected)
    assert not together.isnan().any()
