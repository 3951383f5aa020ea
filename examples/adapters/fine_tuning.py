"""Adapters: a small pretrained Transformer is fine-tuned on texts of 50 clients, whole, by LoRA, or its head alone, at epsilon 4 a text.

    pip install "ldpfl[transformers]"
    python examples/adapters/fine_tuning.py [--seeds 1] [--rounds 10] [--folder adapters]

The texts are four lines each of the sources of Python's own library. The model is pre-trained for some minutes to tell which of 12 packages
a text is from; these texts count as public. Clients hold texts of four other packages, which it never saw, and it learns to tell those.
Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import random
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

import ldpfl

PUBLIC = ("ctypes", "email", "html", "http", "importlib", "lib2to3", "logging", "multiprocessing", "re", "unittest", "urllib", "xml")
PRIVATE = ("asyncio", "distutils", "idlelib", "tkinter")
LENGTH, TOKENS, OF_A_CLASS, HELD_OUT = 32, 1024, 2800, 1200
RATES = {"head": 1.0, "lora": 1.0, "none": 0.2}
"""The server's learning rate for each way."""

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--seeds", type=int, default=1)
parser.add_argument("--rounds", type=int, default=10)
parser.add_argument("--epochs", type=int, default=4, help="of pre-training")
parser.add_argument("--clients", type=int, default=50)
parser.add_argument("--texts", type=int, default=200, help="of a client")
parser.add_argument("--folder", type=Path, default=Path("adapters"))


def texts(package: str) -> Iterator[str]:
    """Yield the sources of ``package``, four lines a text."""
    for file in sorted(Path(sysconfig.get_path("stdlib"), package).rglob("*.py")):
        with tokenize.open(file) as source:
            lines = [" ".join(line.split()) for line in source if line.strip()]
        for start in range(0, len(lines) - 3, 4):
            yield " ".join(lines[start : start + 4])


def pretrain(folder: Path, epochs: int) -> None:
    """Train a tokenizer and a small BERT on the public packages, and write both to ``folder``."""
    rows = [(text, place) for place, package in enumerate(PUBLIC) for text in texts(package)]
    random.Random(0).shuffle(rows)
    made = Tokenizer(models.BPE(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]"]
    made.train_from_iterator([text for text, _ in rows], trainers.BpeTrainer(vocab_size=TOKENS, special_tokens=special))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 32}
    model = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), num_labels=len(PUBLIC), **sizes))
    found = tokenizer([text for text, _ in rows], padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt")
    labels = torch.tensor([label for _, label in rows])
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        right = 0
        for own in torch.randperm(len(labels)).split(64):
            told = model(input_ids=found.input_ids[own], attention_mask=found.attention_mask[own], labels=labels[own])
            optimiser.zero_grad()
            told.loss.backward()
            optimiser.step()
            right += int((told.logits.argmax(1) == labels[own]).sum())
        print(f"pre-training, epoch {epoch + 1}: {right / len(labels):.1%} of {len(labels):,} public texts", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "LICENSE").write_text("PSF-2.0: trained on the sources of Python's library\n")


def main() -> None:
    """Print a row for each way to fine-tune, and the bytes that a client sends in a round."""
    options = parser.parse_args()
    base = options.folder / "base"
    if not base.exists():
        pretrain(base, options.epochs)
    drawn = random.Random(1)
    rows = [(text, package) for package in PRIVATE for text in drawn.sample(list(texts(package)), OF_A_CLASS)]
    drawn.shuffle(rows)
    train, test = (pd.DataFrame(part, columns=["text", "package"]) for part in (rows[:-HELD_OUT], rows[-HELD_OUT:]))
    train = train[: options.clients * options.texts]
    found = []
    for seed in range(options.seeds):
        for kind, rate in RATES.items():
            result = ldpfl.run(
                data=(train, test),
                target="package",
                model=str(base),
                adapter=kind,
                seed=seed,
                target_epsilon=4.0,
                baseline=False,
                settings={
                    "clients.count": options.clients,
                    "data.length": LENGTH,
                    "data.classes": sorted(PRIVATE),
                    "training.rounds": options.rounds,
                    "training.server_learning_rate": rate,
                    "mechanism.clip_norm": 1.0,
                },
            )
            weights = sum(own.numel() for own in result.module().parameters() if own.requires_grad)
            row = {"trained": kind, "seed": seed, "weights": weights, "bytes a round": result.bytes_per_client, "accuracy": result.accuracy}
            found.append(row | {"epsilon": result.privacy.find("local", "run").epsilon})
            print(row, flush=True)
    print(pd.DataFrame(found).groupby("trained", sort=False).mean(numeric_only=True).drop(columns="seed").to_string())


if __name__ == "__main__":
    main()
