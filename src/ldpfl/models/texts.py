"""Small models for texts, which are tokens (N, T) int64 with 0 as padding. All but the LSTM can train many clients at once.

With ``by_place`` a model has outputs at each place of a text, for the next token there; else it has outputs for the whole text.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ldpfl.errors import ConfigError


class EmbeddingBag(nn.Module):
    """A linear layer on the mean of the tokens' embeddings (fastText: Joulin et al. 2017)."""

    def __init__(self, vocabulary: int, outputs: int, by_place: bool, *, width: int = 32) -> None:
        """Raise a :class:`ConfigError` if ``by_place`` is True."""
        super().__init__()
        if by_place:
            raise ConfigError(
                "an embedding-bag ignores the order of tokens: set model.name to gru, lstm or transformer for a language model"
            )
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.as_tensor(self.head(_mean_over_tokens(self.embedding(tokens), tokens)))


def _mean_over_tokens(states: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean (N, H) of the ``states`` (N, T, H) over the ``tokens`` (N, T) of each text, without padding; 0 if there are none."""
    is_token = (tokens != 0).to(states.dtype)[..., None]
    return (states * is_token).sum(dim=-2) / is_token.sum(dim=-2).clamp_min(1)


class GRU(nn.Module):
    """One layer of gated recurrent units (Cho et al. 2014), written step by step, so that it trains many clients at once."""

    def __init__(self, vocabulary: int, outputs: int, by_place: bool, *, width: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self._by_place = by_place  # whether there are outputs at each place
        self.embedding = nn.Embedding(vocabulary, width)
        # Three parts: reset, keep and new.
        self.from_input = nn.Linear(width, 3 * hidden)
        self.from_state = nn.Linear(hidden, 3 * hidden)
        self.head = nn.Linear(hidden, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the outputs for ``tokens`` (..., T): at each place of a text, or for the mean state over its tokens."""
        inputs = self.from_input(self.embedding(tokens))
        state = torch.zeros_like(inputs[..., 0, : inputs.shape[-1] // 3])  # inputs hold three parts of a state's width
        states = []
        for place in range(tokens.shape[-1]):
            input_reset, input_keep, input_new = inputs[..., place, :].chunk(3, dim=-1)
            state_reset, state_keep, state_new = self.from_state(state).chunk(3, dim=-1)
            keep = (input_keep + state_keep).sigmoid()  # share of the old state that remains
            reset = (input_reset + state_reset).sigmoid()
            state = keep * state + (1 - keep) * (input_new + reset * state_new).tanh()
            states.append(state)
        all_states = torch.stack(states, dim=-2)
        return torch.as_tensor(self.head(all_states if self._by_place else _mean_over_tokens(all_states, tokens)))


class LSTM(nn.Module):
    """One layer of PyTorch's own LSTM, which has no form for many clients at once: they are trained one after another."""

    def __init__(self, vocabulary: int, outputs: int, by_place: bool, *, width: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self._by_place = by_place
        self.embedding = nn.Embedding(vocabulary, width)
        self.recurrent = nn.LSTM(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.recurrent(self.embedding(tokens))
        return torch.as_tensor(self.head(states if self._by_place else _mean_over_tokens(states, tokens)))


class Transformer(nn.Module):
    """Layers of self-attention over a text of at most ``longest`` tokens, normalised before each part (Xiong et al. 2020)."""

    def __init__(
        self, vocabulary: int, outputs: int, by_place: bool, *, width: int = 64, heads: int = 4, depth: int = 2, longest: int = 512
    ) -> None:
        """With ``by_place`` the model predicts the next token at each place of a text, else outputs for the whole text."""
        super().__init__()
        if width % heads:
            raise ConfigError(f"transformer: width must be a multiple of heads, got width {width} and heads {heads}")
        self._by_place = by_place
        self.embedding = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(0.02 * torch.randn(longest, width))  # small beside the tokens' embeddings, which they are added to
        # To predict a place's next token, its outputs must not see later tokens.
        self.layers = nn.ModuleList(_TransformerLayer(width, heads, causal=by_place) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the outputs for ``tokens`` (..., T): at each place of a text, or for the mean state over its tokens."""
        length = tokens.shape[-1]
        if length > len(self.places):
            raise ConfigError(
                f"transformer: texts have {length} tokens, but its option longest is {len(self.places)}: raise it, or shorten the texts"
            )
        states = self.embedding(tokens) + self.places[:length]
        for layer in self.layers:
            states = layer(states, tokens)
        states = self.norm(states)
        return torch.as_tensor(self.head(states if self._by_place else _mean_over_tokens(states, tokens)))


class _TransformerLayer(nn.Module):
    """One layer of a transformer: attention between the tokens of a text, then a small network on each token by itself."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self._heads, self._causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.own = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, states: Tensor, tokens: Tensor) -> Tensor:
        states = states + self.out(self._attended(self.norm1(states), tokens))
        return torch.as_tensor(states + self.own(self.norm2(states)))

    def _attended(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Return for each token (N, T, H) the weighted values of the tokens it attends to; if causal, earlier ones and itself."""
        query, key, value = (
            part.unflatten(-1, (self._heads, -1)).transpose(-3, -2) for part in self.mix(states).chunk(3, dim=-1)
        )  # (N, heads, T, width / heads)
        weights = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        length = tokens.shape[-1]
        if self._causal:
            is_visible = torch.ones(length, length, dtype=torch.bool, device=states.device).tril()
        else:
            is_visible = (tokens != 0)[..., None, None, :]
        # A large number instead of infinity: for a text without any token, the softmax of infinities would be NaN.
        weights = weights.masked_fill(~is_visible, -1e9)
        return torch.as_tensor((weights.softmax(dim=-1) @ value).transpose(-3, -2).flatten(-2))
