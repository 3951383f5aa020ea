"""Pretrained models of ``transformers``, from a folder or the hub, and the adapters of ``peft`` that are trained on them.

What is not trained, the base, is loaded where it is needed and never sent or kept with a run: it is named, and told by a digest.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ldpfl.errors import ConfigError, first_line
from ldpfl.files import make_folder, replace_atomically
from ldpfl.importing import PRETRAINED, library, public_name
from ldpfl.seeded_draws import SeededDraws
from ldpfl.suggestions import did_you_mean

Kind = Literal["none", "lora", "ia3", "prompt", "head"]


@dataclass(frozen=True)
class Adapter:
    """What of a pretrained model is trained.

    Attributes:
        kind: ``none`` trains the whole model, ``head`` the layers of the outputs alone; others add an adapter, and train it and the head.
        rank, alpha: of LoRA's factors, and the scale of their product as a multiple of 1 / rank.
        modules: names of the layers that LoRA or IA3 changes; those that ``peft`` knows for the kind of model where none are named.
        tokens: trained tokens before each text, for ``prompt``.
    """

    kind: Kind = "none"
    rank: int = 8
    alpha: float = 16.0
    modules: tuple[str, ...] = ()
    tokens: int = 8


def make(name: str, targets: str, outputs: int, *, images: bool, seed: int, adapter: Adapter) -> nn.Module:
    """Return the pretrained model called ``name`` for such ``targets``, with its ``adapter``; ``seed`` decides what the base does not hold.

    Layers that the base lacks, such as the head of another task, are trained whatever the adapter is: their values are nowhere else.

    Raises:
        ConfigError: there is no such model, it holds no weights, or it is none for these targets.
    """
    transformers, place = library("transformers"), place_of(name)
    kinds: dict[str, str] = {"tokens": "AutoModelForCausalLM"}
    kind = kinds.get(targets, "AutoModelForImageClassification" if images else "AutoModelForSequenceClassification")
    sizes = {} if targets == "tokens" else {"num_labels": outputs}
    with _explained(f"model {name!r} cannot be loaded"), SeededDraws(seed), quietly():
        module, report = getattr(transformers, kind).from_pretrained(
            place,
            **sizes,
            local_files_only=Path(place).is_dir(),
            use_safetensors=True,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
        if module.config.pad_token_id is None and (end := module.config.eos_token_id) is not None:
            module.config.pad_token_id = end  # as :mod:`ldpfl.data.tokens` fills up texts
        absent = {*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])}
        return _adapted(module, adapter, targets, images, sorted({key.rpartition(".")[0] for key in absent}))


def adapted(module: nn.Module, adapter: Adapter, targets: str, *, images: bool, seed: int) -> nn.Module:
    """Return the pretrained ``module`` that a caller handed over, with an ``adapter``, whose first values ``seed`` decides.

    Raises:
        ConfigError: it is no pretrained model, or has no such layers.
    """
    if not is_of_transformers(module):
        raise ConfigError(f"model.adapter is {adapter.kind!r}, and the model is a {type(module).__name__}: give a model of transformers")
    with _explained(f"adapter {adapter.kind!r} does not fit the model"), SeededDraws(seed), quietly():
        return _adapted(module, adapter, targets, images, ())


def _adapted(module: nn.Module, adapter: Adapter, targets: str, images: bool, absent: Sequence[str]) -> nn.Module:
    if adapter.kind == "none":
        return module.train()
    children = {} if targets == "tokens" else dict(module.named_children())
    heads = [own for own, part in children.items() if own != module.base_model_prefix and [*part.parameters()]]
    trained = sorted({*heads, *absent})
    if adapter.kind == "head":
        module.requires_grad_(False)
        for own in trained or ["lm_head"]:
            module.get_submodule(own).requires_grad_(True)
        return module.train()
    peft = library("peft")
    task = None if images else "CAUSAL_LM" if targets == "tokens" else "SEQ_CLS"
    changed = list(adapter.modules) or None
    if adapter.kind == "lora":
        settings = peft.LoraConfig(
            r=adapter.rank, lora_alpha=adapter.alpha, target_modules=changed, modules_to_save=trained or None, task_type=task
        )
    elif adapter.kind == "ia3":
        settings = peft.IA3Config(
            target_modules=changed, feedforward_modules=changed and [], modules_to_save=trained or None, task_type=task
        )
    else:
        settings = peft.PromptTuningConfig(num_virtual_tokens=adapter.tokens, task_type=task)
    _check_modules(module, adapter)
    found: nn.Module = peft.get_peft_model(module, settings)
    for own in trained if adapter.kind == "prompt" else ():
        part = found.get_submodule("base_model").get_submodule(own)
        if not hasattr(part, "original_module"):  # of which ``peft`` trains a copy
            part.requires_grad_(True)
    return found.train()


def _check_modules(module: nn.Module, adapter: Adapter) -> None:
    known = sorted({name.rpartition(".")[2] for name, part in module.named_modules() if not [*part.children()] and [*part.parameters()]})
    for own in adapter.modules:
        if not any(name == own or name.endswith(f".{own}") for name, _ in module.named_modules()):
            raise ConfigError(f"model.adapter_modules names {own!r}, and the model has no such layer: {did_you_mean(own, known)}")


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
        if not (folder / "config.json").is_file():
            adapter = (folder / "adapter_config.json").is_file()
            what = "an adapter and no model: give the folder of its base" if adapter else "no config.json: give a folder of save_pretrained"
            raise ConfigError(f"{place} holds {what}, --model FOLDER")
        if not any(folder.glob("*.safetensors")):
            raise ConfigError(f"{place} holds no weights (*.safetensors): save the model there by model.save_pretrained(folder)")
    return place


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
    """Return if a pretrained ``module`` knows so many ``tokens``, and takes texts of ``length`` of them.

    Raises:
        ConfigError: it does not.
    """
    config = getattr(module, "config", None)
    known, places = (getattr(config, name, None) for name in ("vocab_size", "max_position_embeddings"))
    if isinstance(known, int) and tokens > known:
        raise ConfigError(f"the tokenizer has {tokens:,} tokens, and the model knows {known:,}: set data.tokenizer to that of the model")
    added = sum(getattr(own, "num_virtual_tokens", 0) for own in getattr(module, "peft_config", {}).values())
    if isinstance(places, int) and length + added > places:
        prompt = f" and {added} of a prompt" if added else ""
        raise ConfigError(f"data.length is {length} tokens{prompt}, and the model has {places} places: set data.length to {places - added}")


ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""Files of an adapter, as ``peft`` names them."""


def save_adapter(module: nn.Module, folder: Path, base: str) -> None:
    """Write the adapter of ``module`` to ``folder`` as ``peft`` reads it; nothing where it has none.

    Args:
        base: name of the model that it is an adapter of; no folder of this machine is written down.
    """
    save: Any = getattr(module, "save_pretrained", None)
    if save is None or not hasattr(module, "peft_config"):
        return
    with TemporaryDirectory() as made:
        save(made, save_embedding_layers=False)
        files = {path.name: path.read_bytes() for path in Path(made).iterdir() if path.name in ADAPTER_FILES}
    settings = json.loads(files[ADAPTER_FILES[0]]) | {"base_model_name_or_path": public_name(base).removeprefix(PRETRAINED)}
    make_folder(folder)
    for name, content in (files | {ADAPTER_FILES[0]: f"{json.dumps(settings, indent=1, sort_keys=True)}\n".encode()}).items():
        with replace_atomically(folder / name) as temporary:
            temporary.write_bytes(content)


def is_of_transformers(module: nn.Module) -> bool:
    """Whether ``module`` is a model of ``transformers``, or an adapter of ``peft`` around one."""
    return hasattr(module, "peft_config") or hasattr(module, "base_model_prefix")


def has_base(module: nn.Module) -> bool:
    """Whether ``module`` is a pretrained one with frozen parameters: who has its base needs no more than what was trained."""
    return is_of_transformers(module) and not all(own.requires_grad for own in module.parameters())


def base_digest(module: nn.Module) -> str:
    """Return the SHA-256, in hex, of the frozen parameters of a pretrained ``module``; empty where it has none.

    Names are those of the base, whatever adapter is around it. Layers whose trained copies are used in their place do not count.
    """
    if not has_base(module):
        return ""
    trained = {id(own) for own in module.parameters() if own.requires_grad}
    found: dict[str, Tensor] = {}
    for name, own in module.named_parameters():
        if id(own) not in trained and ".original_module." not in name:
            found[_BASE_NAME.sub("", name)] = own
    digest = hashlib.sha256()
    for name, frozen in sorted(found.items()):
        digest.update(f"{name} {frozen.dtype} {tuple(frozen.shape)} ".encode())
        digest.update(frozen.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


_BASE_NAME = re.compile(r"^base_model\.(model\.)?|\.base_layer(?=\.)")
"""Parts that an adapter adds to the name of a parameter of its base."""


def check_base(module: nn.Module, digest: str) -> None:
    """Return if the frozen parameters of ``module`` are those of ``digest``; an empty one asks for none.

    Raises:
        ConfigError: they are others.
    """
    if digest and base_digest(module) != digest:
        raise ConfigError(
            f"what was trained belongs to another base than this one, whose frozen weights have the SHA-256 {base_digest(module)[:16]}, "
            f"expected {digest[:16]}: name the base that it was trained on, --model FOLDER"
        )


@contextmanager
def quietly() -> Iterator[None]:
    """Let ``transformers`` print nothing of what it loads; what matters of that becomes an error here."""
    logging = library("transformers").utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():  # of what the libraries call of each other, or set right themselves
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _explained(trouble: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # of the libraries, on files that may hold anything
        raise ConfigError(f"{trouble}: {type(error).__name__}: {first_line(error)}") from error
