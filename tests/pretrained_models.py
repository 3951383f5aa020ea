"""Small models of transformers, pre-trained on nothing, and a folder of one with its tokenizer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

from ldpfl.models.adapters import quietly

WORDS = ("good", "fine", "warm", "bad", "poor", "cold", *"abcdefghijklmnopqrstuvwxyz")
PLACES, TOKENS = 48, len(WORDS) + 3


def bert(outputs: int = 2, dropout: float = 0.1, **sizes: int) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    return _seeded(lambda: BertForSequenceClassification(BertConfig(**_bert(dropout) | sizes, num_labels=outputs)))


def gpt2(kind: str = "GPT2LMHeadModel") -> Any:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=TOKENS, n_positions=PLACES, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1, pad_token_id=0
    )
    return _seeded(lambda: getattr(transformers, kind)(config))


def vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    sizes: Any = {"image_size": 28, "patch_size": 7, "num_channels": 1, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = ViTConfig(hidden_size=32, intermediate_size=64, num_labels=3, attention_probs_dropout_prob=0.1, **sizes)
    return _seeded(lambda: ViTForImageClassification(config))


def adapted(model: Any, kind: str, task: str | None, targets: Sequence[str] = ("query", "value"), **more: Any) -> Any:
    import peft

    with quietly():
        if kind == "lora":
            return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=list(targets), task_type=task, **more))
        if kind == "ia3":
            return peft.get_peft_model(model, peft.IA3Config(target_modules=list(targets), feedforward_modules=[], task_type=task))
        return peft.get_peft_model(model, peft.PromptTuningConfig(num_virtual_tokens=3, task_type=task))


def tokens(count: int, length: int = 12) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Texts of unequal lengths as tokens and mask, and of each whether its first token is a large number."""
    generator = torch.Generator().manual_seed(0)
    found = torch.randint(3, TOKENS, (count, length), generator=generator)
    mask = torch.ones_like(found)
    mask[::3, 7:] = 0
    return {"input_ids": found * mask, "attention_mask": mask}, (found[:, 0] > TOKENS // 2).long()


def texts(count: int) -> pd.DataFrame:
    drawn = random.Random(0)
    rows = []
    for _ in range(count):
        label = drawn.random() < 0.5
        words = [drawn.choice(WORDS[6:]) for _ in range(drawn.randint(2, 12))] + [drawn.choice(WORDS[:3] if label else WORDS[3:6])]
        rows.append((" ".join(words), "up" if label else "down"))
    return pd.DataFrame(rows, columns=["text", "label"])


def save_base(folder: Path, seed: int = 0) -> Path:
    """Write a masked language model, whose classifier is still to be made, and its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

    known = {word: place for place, word in enumerate(("[PAD]", "[UNK]", "[CLS]", *WORDS))}
    made = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    with quietly():
        PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]").save_pretrained(folder)
        model: Any = _seeded(lambda: BertForMaskedLM(BertConfig(**_bert(0.1))), seed)
        model.save_pretrained(folder)
    (folder / "LICENSE").write_text("of the test\n")
    return folder


def _bert(dropout: float) -> dict[str, Any]:
    sizes = {"vocab_size": TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return {**sizes, "max_position_embeddings": PLACES, "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}


def _seeded(make: Any, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(), quietly():
        torch.manual_seed(seed)
        made: nn.Module = make()
    return made
