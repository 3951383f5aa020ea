"""Tokenise texts for a pretrained model, padded to one length, and build the targets of a language model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ldpfl.data.samples import MASK, TOKENS, Inputs
from ldpfl.errors import ConfigError, DataError, first_line
from ldpfl.tasks import NO_TOKEN
from ldpfl.util.user_code import PRETRAINED, import_library

_MAX_CHARACTERS_PER_TOKEN = 100
"""Characters of a text that are read for each token that is kept. Without a limit, the run time would reveal one long text."""


def tokenize(texts: Sequence[str], tokenizer: str, length: int) -> dict[str, Tensor]:
    """Return the tokens (N, ``length``) of ``texts`` and their padding mask, under the names that models of ``transformers`` use.

    Raises:
        ConfigError: the tokenizer cannot be loaded, or has no token for padding.
    """
    shortened = [str(text)[: _MAX_CHARACTERS_PER_TOKEN * length] for text in texts]
    encoded = _tokenizer(tokenizer)(
        shortened, padding="max_length", truncation=True, max_length=length, return_tensors="pt", return_attention_mask=True
    )
    return {TOKENS: encoded[TOKENS], MASK: encoded[MASK]}


def vocabulary_size(tokenizer: str) -> int:
    """Return the largest token's number plus one, which is the number of embeddings that a model needs. Numbers may have gaps.

    Raises:
        ConfigError: as :func:`tokenize`.
    """
    return 1 + max(map(int, _tokenizer(tokenizer).get_vocab().values()))


@lru_cache(maxsize=2)
def vocabulary_digest(tokenizer: str) -> str:
    """Return the SHA-256, in hex, of all tokens and their numbers.

    Raises:
        ConfigError: as :func:`tokenize`.
    """
    return hashlib.sha256(json.dumps(sorted(_tokenizer(tokenizer).get_vocab().items())).encode()).hexdigest()


def check_vocabulary(tokenizer: str, digest: str) -> None:
    """Raise if the vocabulary of ``tokenizer`` does not have this ``digest``. An empty digest allows any vocabulary.

    Raises:
        ConfigError: the tokenizer has another vocabulary.
    """
    if digest and vocabulary_digest(tokenizer) != digest:
        raise ConfigError(
            f"the vocabulary of tokenizer {tokenizer!r} has the SHA-256 {vocabulary_digest(tokenizer)[:16]}, but the model's has "
            f"{digest[:16]}: name the model's tokenizer in data.tokenizer"
        )


def padding_token_number(tokenizer: str) -> int:
    """Return the number of the padding token.

    Raises:
        ConfigError: as :func:`tokenize`.
    """
    return int(_tokenizer(tokenizer).pad_token_id)


_VOCABULARY_FILES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken")
"""Patterns of files that hold a tokenizer's vocabulary."""


@lru_cache(maxsize=2)
def _tokenizer(name: str) -> Any:
    """Load the tokenizer ``name``, set to pad short texts on the right. It raises the same errors as :func:`tokenize`."""
    folder_or_hub_name = name.removeprefix(PRETRAINED)
    folder = Path(folder_or_hub_name)
    # Without this check, transformers would return a tokenizer with an empty vocabulary.
    if folder.is_dir() and not any(path.match(pattern) for path in folder.iterdir() for pattern in _VOCABULARY_FILES):
        raise ConfigError(f"{folder} contains no tokenizer: save the model's tokenizer there with tokenizer.save_pretrained(folder)")
    try:
        read = import_library("transformers").AutoTokenizer.from_pretrained
        tokenizer = read(folder_or_hub_name, local_files_only=folder.is_dir(), trust_remote_code=False)
    except ConfigError:
        raise
    except Exception as error:  # the library raises many kinds
        raise ConfigError(f"tokenizer {name!r} cannot be loaded: {type(error).__name__}: {first_line(error)}") from error
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ConfigError(f"tokenizer {name!r} has neither a pad_token nor an eos_token: set one, and save it again")
        tokenizer.pad_token = tokenizer.eos_token  # the mask distinguishes padding from a real end of text
    tokenizer.padding_side = "right"
    return tokenizer


def next_token_targets(inputs: Inputs) -> Tensor:
    """Return the targets (N, T) of a language model: each position's next token, or ``NO_TOKEN`` at the end of a text and in padding.

    Raises:
        DataError: the inputs are not tokens.
    """
    tokens = inputs if isinstance(inputs, Tensor) else inputs.get(TOKENS, torch.empty(0))  # an empty tensor is refused below
    if tokens.dim() != 2 or tokens.is_floating_point():
        raise DataError(
            f"inputs without targets must be tokens, whole numbers (N, T), alone or as {TOKENS!r} of a dict: correct them, or give targets"
        )
    is_token = torch.ones_like(tokens, dtype=torch.bool) if isinstance(inputs, Tensor) or MASK not in inputs else inputs[MASK].bool()
    next_tokens = torch.full_like(tokens, NO_TOKEN, dtype=torch.int64)
    next_tokens[:, :-1] = torch.where(is_token[:, 1:] & is_token[:, :-1], tokens[:, 1:].long(), NO_TOKEN)
    return next_tokens
