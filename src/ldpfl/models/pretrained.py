"""Load and check pretrained models of ``transformers`` from a folder or the hub."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ldpfl.errors import ConfigError
from ldpfl.models.adapters import Adapter, explained, quietly, with_adapter
from ldpfl.util.seeded_torch import SeededDraws
from ldpfl.util.user_code import PRETRAINED, library


def make(name: str, targets: str, outputs: int, *, images: bool, seed: int, adapter: Adapter) -> nn.Module:
    """Return the pretrained model called ``name`` for such ``targets``, with its ``adapter``.

    Layers that the files lack, such as the head of a new task, are initialised by ``seed`` and always trained, whatever the adapter is.
    No code from a folder or from the hub is run.

    Raises:
        ConfigError: there is no such model, its weights are missing or of another model, or it has no form for these targets.
    """
    transformers, place = library("transformers"), place_of(name)
    sizes = {} if targets == "tokens" else {"num_labels": outputs}
    safe = {"local_files_only": Path(place).is_dir(), "trust_remote_code": False}
    with explained(f"model {name!r} cannot be loaded"), SeededDraws(seed), quietly():
        load = partial(
            getattr(transformers, _class_for(targets, images)).from_pretrained,
            place,
            config=transformers.AutoConfig.from_pretrained(place, **safe, **sizes),
            use_safetensors=True,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **safe,
        )
        module, report = _with_pinned_parts(load)
        end = getattr(module.config, "eos_token_id", None)  # a model of images may have no tokens
        if end is not None and module.config.pad_token_id is None:
            module.config.pad_token_id = end  # as :mod:`ldpfl.data.tokens` fills up texts
        misfits = {key[0] for key in report["mismatched_keys"]}
        absent = {*report["missing_keys"], *misfits}
        _check_complete(module, absent, misfits, name)
        return with_adapter(module, adapter, targets, images, sorted({key.rpartition(".")[0] for key in absent}))


def _with_pinned_parts(load: Callable[..., Any]) -> Any:
    """Return what ``load`` returns for PyTorch's ``scaled_dot_product_attention``, or for plain products if the model has no form for it.

    A mixture of experts, if the model has one, is computed in plain PyTorch, expert by expert.

    Without a name, the installed version of ``transformers`` would choose, or the model's ``config.json``: results would depend on the
    choice, and a name in ``config.json`` may stand for a kernel of the hub, which is code. ``load`` has a config object: beside one that
    is still to be read from the file, the argument would not count.
    """
    pinned = partial(load, experts_implementation="eager")
    try:
        return pinned(attn_implementation="sdpa")
    except ValueError as error:
        if "attn_implementation" not in str(error):
            raise
        return pinned(attn_implementation="eager")


def _class_for(targets: str, images: bool) -> str:
    if targets == "tokens":
        return "AutoModelForCausalLM"
    return "AutoModelForImageClassification" if images else "AutoModelForSequenceClassification"


def _check_complete(module: Any, absent: Collection[str], misfits: Collection[str], name: str) -> None:
    """Return if the files held the weights of the base. A whole part of it may be absent, such as the pooler of a language model.

    Args:
        absent: names of parameters that no file held in the shape of the module.
        misfits: those of them that a file held in another shape.

    Raises:
        ConfigError: a part of the base is incomplete, or most of the base is absent: the weights are of another model.
    """
    start = f"{module.base_model_prefix}."
    names = [own for own, _ in module.named_parameters() if own.startswith(start)]
    missing = [own for own in names if own in absent]
    sizes, without = (Counter(map(_part, some)) for some in (names, missing))
    wrong = [own for own in missing if own in misfits or without[_part(own)] < sizes[_part(own)]]
    if wrong or 2 * len(missing) > len(names):
        raise ConfigError(
            f"the weights of model {name!r} do not fit its config.json: {len(missing)} of {len(names)} parameters are absent or of another "
            f"shape, such as {(wrong or missing)[0]}: save the model again by model.save_pretrained(folder)"
        )


def _part(name: str) -> str:
    """Return which part of the base the parameter ``name`` belongs to: ``encoder`` of ``bert.encoder.layer.0.output.dense.bias``."""
    return name.split(".")[1]


def place_of(name: str) -> str:
    """Return the folder of a pretrained model, or its name on the hub.

    Raises:
        ConfigError: the folder lacks the model, or its weights.
    """
    place = name.removeprefix(PRETRAINED)
    folder = Path(place)
    if folder.is_absolute() or folder.is_dir():
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {place}: give that of the pretrained model, --model FOLDER")
        if (folder / "adapter_config.json").is_file():  # transformers would load the base that this file names
            raise ConfigError(f"{place} holds an adapter: give the folder of its base, --model FOLDER")
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{place} holds no config.json: give a folder of save_pretrained, --model FOLDER")
        if not any(folder.glob("*.safetensors")):
            raise ConfigError(f"{place} holds no weights (*.safetensors): save the model there by model.save_pretrained(folder)")
    return place


def local_folder(name: str) -> str:
    """Return the folder of a pretrained model on this machine: its own, or that of the hub's cache. Nothing is downloaded.

    Raises:
        ConfigError: the model is not on this machine, or its folder lacks a part.
    """
    place = place_of(name)
    if Path(place).is_dir():
        return place
    try:
        found = library("huggingface_hub").snapshot_download(place, local_files_only=True)
    except Exception as error:  # of a library, on a name that may be anything
        raise ConfigError(
            f"{place!r} is no folder, and not in the hub's cache on this machine: get it by `hf download {place}`, or give the "
            f"model's folder, {PRETRAINED}FOLDER"
        ) from error
    return place_of(found)


def licence_of(name: str, said: str) -> str:
    """Return the licence of a pretrained model in a folder: what was ``said``, or the name in its model card, or of its file.

    Raises:
        ConfigError: nothing says under which licence the weights may be used.
    """
    folder = Path(place_of(name))
    if said or not folder.is_dir():
        return said
    card = folder / "README.md"
    stated = re.search(r"^license:\s*(\S+)", card.read_text("utf-8", errors="replace"), re.MULTILINE) if card.is_file() else None
    if stated:
        return stated[1]
    for path in sorted(folder.iterdir()):
        if path.name.lower().startswith(("license", "licence", "copying")):
            return path.name
    raise ConfigError(
        f"nothing says under which licence the weights in {folder} may be used: put the file LICENSE there, or say it by "
        "--set model.licence=NAME; 'own' for a model of yours"
    )


def check_tokens(module: nn.Module, tokens: int, length: int) -> None:
    """Return if a pretrained ``module`` knows so many ``tokens``, and takes texts of ``length`` tokens.

    Raises:
        ConfigError: the module knows fewer tokens, or takes shorter texts alone.
    """
    known = getattr(getattr(module, "config", None), "vocab_size", None)
    if isinstance(known, int) and tokens > known:
        raise ConfigError(f"the tokenizer has {tokens:,} tokens, and the model knows {known:,}: set data.tokenizer to that of the model")
    added = sum(getattr(own, "num_virtual_tokens", 0) for own in getattr(module, "peft_config", {}).values())
    places = _places(module)
    if places is not None and length + added > places:
        prompt = f" and {added} of a prompt" if added else ""
        raise ConfigError(f"data.length is {length} tokens{prompt}, and the model has {places} places: set data.length to {places - added}")


def check_padding(module: nn.Module, padding: int, tokenizer: str) -> None:
    """Return if a pretrained ``module`` expects texts to be filled up with the token ``padding``, as its ``tokenizer`` does.

    Raises:
        ConfigError: the module expects another token: the tokenizer is that of another model.
    """
    expected = getattr(getattr(module, "config", None), "pad_token_id", None)
    if expected not in (None, padding):
        raise ConfigError(
            f"tokenizer {tokenizer!r} fills texts up with token {padding}, and the model expects token {expected}: set data.tokenizer to "
            "that of the model, or pad_token_id in the model's config.json"
        )


def _places(module: nn.Module) -> int | None:
    """Return how many tokens ``module`` has positions for; None where its config names no number."""
    places = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    tables = (own for name, own in module.named_modules() if name.endswith("position_embeddings") and isinstance(own, nn.Embedding))
    unused = max((own.padding_idx + 1 for own in tables if own.padding_idx is not None), default=0)  # RoBERTa counts from behind it
    return places - unused if isinstance(places, int) else None
