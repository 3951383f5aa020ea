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
from ldpfl.models.adapters import Adapter, quietly, raising_config_error, with_adapter
from ldpfl.util.seeded_torch import SeededDraws
from ldpfl.util.user_code import PRETRAINED, import_library


def make(name: str, targets: str, outputs: int, *, images: bool, seed: int, adapter: Adapter) -> nn.Module:
    """Return the pretrained model ``name`` with the head that ``targets`` need, ``outputs`` wide, and with its ``adapter``.

    Layers that the files lack, such as the head of a new task, are initialised by ``seed`` and always trained, whatever the adapter is.
    No code from a folder or from the hub is run.

    Raises:
        ConfigError: there is no such model, its weights are missing or of another model, or it has no form for these targets.
    """
    transformers = import_library("transformers")
    folder_or_name = folder_or_hub_name(name)
    sizes = {} if targets == "tokens" else {"num_labels": outputs}
    without_code = {"local_files_only": Path(folder_or_name).is_dir(), "trust_remote_code": False}
    with raising_config_error(f"model {name!r} cannot be loaded"), SeededDraws(seed), quietly():
        load = partial(
            getattr(transformers, _class_for(targets, images)).from_pretrained,
            folder_or_name,
            config=transformers.AutoConfig.from_pretrained(folder_or_name, **without_code, **sizes),
            use_safetensors=True,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **without_code,
        )
        module, report = _with_fixed_implementations(load)
        end_of_text = getattr(module.config, "eos_token_id", None)  # a model of images may have no tokens
        if end_of_text is not None and module.config.pad_token_id is None:
            module.config.pad_token_id = end_of_text  # with which :mod:`ldpfl.data.tokens` pads texts, too
        misfits = {key[0] for key in report["mismatched_keys"]}  # an entry is the parameter's name and two shapes
        absent = {*report["missing_keys"], *misfits}
        _check_complete(module, absent, misfits, name)
        absent_layers = sorted({key.rpartition(".")[0] for key in absent})  # "classifier" of "classifier.weight"
        return with_adapter(module, adapter, targets, images, absent_layers)


def _with_fixed_implementations(load: Callable[..., Any]) -> Any:
    """Call ``load`` with fixed implementations of the model's parts, and return its result.

    Attention is PyTorch's ``scaled_dot_product_attention``, or plain products if the model has no form for it. A mixture of experts is
    computed in plain PyTorch, expert by expert.

    Otherwise the installed version of ``transformers``, or the model's ``config.json``, would choose the implementations. Results would
    depend on that choice, and ``config.json`` may choose a kernel of the hub, which is code. ``load`` must already hold a config object:
    if the config were still read from its file, these arguments would be ignored.
    """
    pinned = partial(load, experts_implementation="eager")
    try:
        return pinned(attn_implementation="sdpa")
    except ValueError as error:
        if "attn_implementation" not in str(error):
            raise
        return pinned(attn_implementation="eager")


def _class_for(targets: str, images: bool) -> str:
    """Return the class of ``transformers`` that builds a model with a head for ``targets``."""
    if targets == "tokens":
        return "AutoModelForCausalLM"
    return "AutoModelForImageClassification" if images else "AutoModelForSequenceClassification"


def _check_complete(module: Any, absent: Collection[str], misfits: Collection[str], name: str) -> None:
    """Raise if the files of the model ``name`` lack weights of its base, the part below its head.

    A whole part of the base may be absent, such as the pooler of a language model.

    Args:
        absent: names of parameters that no file contains in the shape that ``module`` needs.
        misfits: those of the absent parameters that a file contains in another shape.

    Raises:
        ConfigError: a part of the base is incomplete, or most of the base is absent.
    """
    prefix = f"{module.base_model_prefix}."
    base_names = [parameter for parameter, _ in module.named_parameters() if parameter.startswith(prefix)]
    missing = [parameter for parameter in base_names if parameter in absent]
    part_sizes, missing_by_part = (Counter(map(_part_of_base, names)) for names in (base_names, missing))
    incomplete = [key for key in missing if key in misfits or missing_by_part[_part_of_base(key)] < part_sizes[_part_of_base(key)]]
    if incomplete or 2 * len(missing) > len(base_names):
        raise ConfigError(
            f"the weights of model {name!r} do not fit its config.json: {len(missing)} of {len(base_names)} parameters are absent or of "
            f"another shape, such as {(incomplete or missing)[0]}: save the model again by model.save_pretrained(folder)"
        )


def _part_of_base(name: str) -> str:
    """Return which part of the base the parameter ``name`` belongs to: ``encoder`` of ``bert.encoder.layer.0.output.dense.bias``."""
    return name.split(".")[1]


def folder_or_hub_name(name: str) -> str:
    """Return the folder of a pretrained model, or its name on the hub.

    Raises:
        ConfigError: the folder lacks the model, or its weights.
    """
    folder_or_name = name.removeprefix(PRETRAINED)
    folder = Path(folder_or_name)
    if folder.is_absolute() or folder.is_dir():
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {folder_or_name}: give the folder of the pretrained model, --model FOLDER")
        if (folder / "adapter_config.json").is_file():  # transformers would load the base that this file names
            raise ConfigError(f"{folder_or_name} has only an adapter: give the folder of its base model, --model FOLDER")
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{folder_or_name} has no config.json: give a folder that model.save_pretrained wrote, --model FOLDER")
        if not any(folder.glob("*.safetensors")):
            raise ConfigError(f"{folder_or_name} has no weights (*.safetensors): save the model there with model.save_pretrained(folder)")
    return folder_or_name


def local_folder(name: str) -> str:
    """Return the folder of a pretrained model on this machine: its own, or that of the hub's cache. Nothing is downloaded.

    Raises:
        ConfigError: the model is not on this machine, or its folder lacks a part.
    """
    folder_or_name = folder_or_hub_name(name)
    if Path(folder_or_name).is_dir():
        return folder_or_name
    try:
        folder: str = import_library("huggingface_hub").snapshot_download(folder_or_name, local_files_only=True)
    except Exception as error:  # the library raises many kinds
        raise ConfigError(
            f"{folder_or_name!r} is neither a folder nor a model in the hub's cache on this machine: download it with "
            f"`hf download {folder_or_name}`, or give the model's folder, {PRETRAINED}FOLDER"
        ) from error
    return folder_or_hub_name(folder)


def licence_of(name: str, setting: str) -> str:
    """Return the licence of the pretrained model ``name``.

    It is ``setting``, the setting ``model.licence``, if that is set. Otherwise, for a model in a folder, it is the licence in the model
    card, or the name of the licence file. For a model of the hub it may stay empty.

    Raises:
        ConfigError: nothing says under which licence the weights may be used.
    """
    folder = Path(folder_or_hub_name(name))
    if setting or not folder.is_dir():
        return setting
    card = folder / "README.md"
    stated = re.search(r"^license:\s*(\S+)", card.read_text("utf-8", errors="replace"), re.MULTILINE) if card.is_file() else None
    if stated:
        return stated[1]
    for path in sorted(folder.iterdir()):
        if path.name.lower().startswith(("license", "licence", "copying")):
            return path.name
    raise ConfigError(
        f"the licence of the weights in {folder} is not known: put a file LICENSE there, or give its name by "
        "--set model.licence=NAME ('own' for your own model)"
    )


def check_tokens(module: nn.Module, tokens: int, length: int) -> None:
    """Raise if a pretrained ``module`` cannot read texts of ``length`` tokens from a vocabulary of ``tokens`` tokens.

    Raises:
        ConfigError: the module's vocabulary is smaller, or the module only takes shorter texts.
    """
    size = getattr(getattr(module, "config", None), "vocab_size", None)  # of the module's vocabulary
    if isinstance(size, int) and tokens > size:
        raise ConfigError(f"the tokenizer has {tokens:,} tokens, but the model only {size:,}: set data.tokenizer to the model's tokenizer")
    prompt = sum(getattr(adapter, "num_virtual_tokens", 0) for adapter in getattr(module, "peft_config", {}).values())
    max_tokens = _max_tokens(module)
    if max_tokens is not None and length + prompt > max_tokens:
        beside = f", and the prompt has {prompt}" if prompt else ""
        raise ConfigError(
            f"data.length is {length} tokens{beside}, but the model takes {max_tokens} in all: "
            f"set data.length to {max_tokens - prompt} or less"
        )


def check_padding(module: nn.Module, padding: int, tokenizer: str) -> None:
    """Raise if a pretrained ``module`` expects another padding token than ``padding``, that of the ``tokenizer``.

    Raises:
        ConfigError: the module expects another token: the tokenizer is that of another model.
    """
    expected = getattr(getattr(module, "config", None), "pad_token_id", None)
    if expected not in (None, padding):
        raise ConfigError(
            f"tokenizer {tokenizer!r} pads texts with token {padding}, but the model expects token {expected}: set data.tokenizer to the "
            f"model's tokenizer, or pad_token_id in the model's config.json to {padding}"
        )


def _max_tokens(module: nn.Module) -> int | None:
    """Return the maximum number of tokens of a text for ``module``; None if its config states none."""
    positions = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    tables = (part for name, part in module.named_modules() if name.endswith("position_embeddings") and isinstance(part, nn.Embedding))
    # In RoBERTa, the positions up to that of the padding token are not used for tokens.
    unused = max((table.padding_idx + 1 for table in tables if table.padding_idx is not None), default=0)
    return positions - unused if isinstance(positions, int) else None
