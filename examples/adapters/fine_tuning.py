"""Adapters: a small pretrained Transformer is fine-tuned on texts of 50 clients, whole, by LoRA, or its head alone, at epsilon 4 a text.

    pip install "ldpfl[transformers]"
    python examples/adapters/fine_tuning.py [--seeds 3] [--rounds 10] [--folder adapters]

A learning rate is chosen for each way first, by runs that are measured on texts held out of the training texts; an operator would choose it
on public texts, or pay for it. All runs have the same number of rounds. Start the command again to go on where it stopped.

The texts are four lines each of the sources of Python's own library. The model is pre-trained for some minutes to tell which of 12 packages
a text is from; these texts count as public. Clients hold texts of four other packages, which it never saw, and it learns to tell those.
Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

import ldpfl

PUBLIC = ("ctypes", "email", "html", "http", "importlib", "lib2to3", "logging", "multiprocessing", "re", "unittest", "urllib", "xml")
PRIVATE = ("asyncio", "distutils", "idlelib", "tkinter")
LENGTH, TOKENS, OF_A_CLASS, HELD_OUT, TUNING_SEED = 32, 1024, 2800, 1200, 1000
KINDS = ("head", "lora", "none")
RATES = (0.3, 1.0, 3.0, 10.0)
"""The server's learning rates that are tried for each kind, on texts that are held out of the training texts."""

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--rounds", type=int, default=10)
parser.add_argument("--epochs", type=int, default=4, help="of pre-training")
parser.add_argument("--clients", type=int, default=50)
parser.add_argument("--texts", type=int, default=200, help="of a client")
parser.add_argument("--rates", type=float, nargs="+", default=RATES)
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


def private_texts() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return training and test texts of the private packages, and which package each is from."""
    drawn = random.Random(1)
    rows = [(text, package) for package in PRIVATE for text in drawn.sample(list(texts(package)), OF_A_CLASS)]
    drawn.shuffle(rows)
    train, test = (pd.DataFrame(part, columns=["text", "package"]) for part in (rows[:-HELD_OUT], rows[-HELD_OUT:]))
    return train, test


@dataclass(frozen=True)
class Comparison:
    """Runs of one size, whose figures are kept in a file.

    Attributes:
        options: of the command line.
        train, test: private texts.
    """

    options: argparse.Namespace
    train: pd.DataFrame
    test: pd.DataFrame

    def chosen_rate(self, kind: str) -> float:
        """Return the rate with the highest accuracy on the last tenth of the training texts, on which these runs do not train."""
        held_out = len(self.train) // 10
        parts = self.train[:-held_out], self.train[-held_out:]
        return max(self.options.rates, key=lambda rate: float(self.row("tuning", kind, rate, TUNING_SEED, parts)["accuracy"]))

    def tested(self, kind: str, rate: float, seed: int) -> dict[str, Any]:
        """Return the figures of a run on all training texts, measured on the test texts; of LoRA also without noise."""
        return self.row("test", kind, rate, seed, (self.train, self.test))

    def row(self, stage: str, kind: str, rate: float, seed: int, parts: tuple[pd.DataFrame, pd.DataFrame]) -> dict[str, Any]:
        """Return the figures of a run, from the file if an earlier command wrote them there."""
        sizes = {name: getattr(self.options, name) for name in ("rounds", "clients", "texts")}
        key = {"stage": stage, "trained": kind, "rate": rate, "seed": seed, **sizes}
        log = self.options.folder / "figures.jsonl"
        for line in log.read_text().splitlines() if log.exists() else ():
            if key.items() <= (row := json.loads(line)).items():
                return dict(row)
        row = key | self.run(kind, rate, seed, parts, baseline=stage == "test" and kind == "lora")
        with log.open("a") as file:
            file.write(f"{json.dumps(row)}\n")
        print(row, flush=True)
        return row

    def run(self, kind: str, rate: float, seed: int, parts: tuple[pd.DataFrame, pd.DataFrame], *, baseline: bool) -> dict[str, Any]:
        """Train on the first of ``parts``, and return what came out on the second."""
        settings = {
            "clients.count": self.options.clients,
            "data.length": LENGTH,
            "data.classes": sorted(PRIVATE),
            "training.rounds": self.options.rounds,
            "training.server_learning_rate": rate,
            "mechanism.clip_norm": 1.0,
        }
        base = str(self.options.folder / "base")
        of_all: dict[str, Any] = {"target": "package", "target_epsilon": 4.0, "progress": False}
        found = ldpfl.run(data=parts, model=base, adapter=kind, seed=seed, baseline=baseline, settings=settings, **of_all)
        return {
            "weights": sum(own.numel() for own in found.module().parameters() if own.requires_grad),
            "bytes a round": found.bytes_per_client,
            "epsilon": found.privacy.find("local", "run").epsilon,
            "accuracy": found.accuracy,
            "without noise": found.baseline[-1] if found.baseline else None,
        }


def main() -> None:
    """Print a row for each way to fine-tune: mean and standard deviation over seeds, and the bytes that a client sends in a round."""
    options = parser.parse_args()
    if not (options.folder / "base").exists():
        pretrain(options.folder / "base", options.epochs)
    train, test = private_texts()
    comparison = Comparison(options, train[: options.clients * options.texts], test)
    rows = []
    for kind in KINDS:
        rate = comparison.chosen_rate(kind) if len(options.rates) > 1 else options.rates[0]
        rows += [comparison.tested(kind, rate, seed) for seed in range(options.seeds)]
    table = pd.DataFrame(rows).groupby(["trained", "rate", "weights", "bytes a round"], sort=False)
    print(table[["accuracy", "without noise"]].agg(["mean", "std"]).reset_index().to_string(index=False))


if __name__ == "__main__":
    main()
