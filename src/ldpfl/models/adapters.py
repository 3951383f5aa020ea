"""Adapters of ``peft`` on pretrained models, and the digest that identifies the frozen part of a model, its base.

The base is loaded wherever it is needed. It is never sent, and never saved with a run.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ldpfl.errors import ConfigError, DataError, first_line
from ldpfl.util.files import check_regular, from_json, make_folder, read_text, replace_atomically, write_text
from ldpfl.util.seeded_torch import SeededDraws
from ldpfl.util.suggestions import did_you_mean
from ldpfl.util.user_code import PRETRAINED, import_library, public_name

Kind = Literal["none", "lora", "ia3", "prompt", "head"]


@dataclass(frozen=True)
class Adapter:
    """Which part of a pretrained model is trained.

    Attributes:
        kind: ``none`` trains the whole model, ``head`` the layers of the outputs alone. The others add an adapter, and train it and the
            head.
        rank: rank of LoRA's factors.
        alpha: scale of the product of LoRA's factors, as a multiple of 1 / rank.
        modules: names of the layers that LoRA or IA3 changes. If empty, ``peft`` chooses the layers by the kind of model.
        tokens: number of trained tokens before each text, for ``prompt``.
    """

    kind: Kind = "none"
    rank: int = 8
    alpha: float = 16.0
    modules: tuple[str, ...] = ()
    tokens: int = 8


def adapted(module: nn.Module, adapter: Adapter, targets: str, *, images: bool, seed: int) -> nn.Module:
    """Return a caller's pretrained ``module`` with an ``adapter``, whose initial weights ``seed`` decides.

    ``targets`` is the kind of the task's targets, and ``images`` says whether the samples are images.

    Raises:
        ConfigError: the module is no pretrained model, or lacks layers that the adapter names.
    """
    if not is_of_transformers(module):
        raise ConfigError(f"model.adapter = {adapter.kind!r} needs a model of the transformers library, got a {type(module).__name__}")
    with raising_config_error(f"adapter {adapter.kind!r} does not fit the model"), SeededDraws(seed), quietly():
        return with_adapter(module, adapter, targets, images, absent=())


def with_adapter(module: nn.Module, adapter: Adapter, targets: str, images: bool, absent: Sequence[str]) -> nn.Module:
    """Return ``module`` with its ``adapter``, in training mode. Only parameters that are trained require gradients.

    Without an adapter ("none") all are trained, and with "head" only the new layers. Any other adapter is trained beside the new layers.

    Args:
        targets, images: kind of the task's targets, and whether the samples are images.
        absent: names of layers whose weights no file holds. They are trained whatever the adapter is.

    Raises:
        ConfigError: the module lacks layers that the adapter names.
    """
    if adapter.kind == "none":
        return module.train()
    # A language model comes with a trained head. For other tasks the head is new: it consists of all parts beside the base.
    children = {} if targets == "tokens" else dict(module.named_children())
    heads = [name for name, part in children.items() if name != module.base_model_prefix and [*part.parameters()]]
    trained_layers = sorted({*heads, *absent})
    if adapter.kind == "head":
        module.requires_grad_(False)
        for name in trained_layers or ["lm_head"]:  # the head of a language model
            module.get_submodule(name).requires_grad_(True)
        return module.train()
    _check_modules(module, adapter)
    text_task = "CAUSAL_LM" if targets == "tokens" else "SEQ_CLS"
    config = _peft_config(adapter, None if images else text_task, trained_layers)
    adapted_module: nn.Module = import_library("peft").get_peft_model(module, config)
    if adapter.kind == "prompt":  # the config of a prompt cannot list ``trained_layers``
        for name in trained_layers:
            part = adapted_module.get_submodule("base_model").get_submodule(name)
            if not hasattr(part, "original_module"):  # of a layer with this attribute, ``peft`` trains a copy
                part.requires_grad_(True)
    return adapted_module.train()


def _peft_config(adapter: Adapter, task: str | None, trained_layers: Sequence[str]) -> Any:
    """Return the config of ``peft`` for ``adapter`` and a ``task`` by its name there. ``trained_layers`` are trained beside the adapter."""
    peft = import_library("peft")
    changed_layers = list(adapter.modules) or None
    common: dict[str, Any] = {"target_modules": changed_layers, "modules_to_save": list(trained_layers) or None, "task_type": task}
    if adapter.kind == "lora":
        return peft.LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, **common)
    if adapter.kind == "ia3":
        # Where layers are named, ``peft`` also needs a list of those whose inputs are scaled. It is empty: outputs are scaled.
        return peft.IA3Config(feedforward_modules=None if changed_layers is None else [], **common)
    return peft.PromptTuningConfig(num_virtual_tokens=adapter.tokens, task_type=task)  # the caller unfreezes the trained layers


def _check_modules(module: nn.Module, adapter: Adapter) -> None:
    """Raise a :class:`ConfigError` if a layer that ``adapter`` names is not in ``module``. The last part of a layer's name suffices."""
    for layer in adapter.modules:
        if not any(name == layer or name.endswith(f".{layer}") for name, _ in module.named_modules()):
            innermost = [name for name, part in module.named_modules() if not [*part.children()] and [*part.parameters()]]
            suggestions = sorted({name.rpartition(".")[2] for name in innermost})
            raise ConfigError(f"model.adapter_modules: the model has no layer {layer!r}: {did_you_mean(layer, suggestions)}")


ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""Files of an adapter, as ``peft`` names them."""


def save_adapter(module: nn.Module, folder: Path, base: str) -> None:
    """Write the adapter of ``module`` to ``folder`` in the files that ``peft`` reads. For a module without an adapter, nothing is written.

    Args:
        base: name of the model under the adapter. If it is a folder of this machine, only the last part of its path is written.
    """
    save: Any = getattr(module, "save_pretrained", None)
    if save is None or not hasattr(module, "peft_config"):
        return
    with TemporaryDirectory() as scratch:
        save(scratch, save_embedding_layers=False)
        files = {path.name: path.read_bytes() for path in Path(scratch).iterdir() if path.name in ADAPTER_FILES}
    config_file, _ = ADAPTER_FILES
    settings = json.loads(files[config_file]) | {"base_model_name_or_path": public_name(base).removeprefix(PRETRAINED)}
    files[config_file] = f"{json.dumps(settings, indent=1, sort_keys=True)}\n".encode()
    make_folder(folder)
    for name, content in files.items():
        with replace_atomically(folder / name) as temporary:
            temporary.write_bytes(content)


def copy_adapter(folder: Path, out: Path) -> None:
    """Write the settings and the tensors of the adapter in ``folder`` to the folder ``out``. Anything else in its files is left out.

    Raises:
        DataError: a file is missing, damaged, or no adapter's.
    """
    config, weights = (folder / name for name in ADAPTER_FILES)
    try:
        settings = from_json(read_text(config))
        if not isinstance(settings, dict) or "peft_type" not in settings:
            raise ValueError(f"{config.name} is no config of peft: it has no peft_type")
        check_regular(weights)
        tensors = load_file(weights)
    except (OSError, SafetensorError, ValueError) as error:
        raise DataError(f"the adapter in {folder} is damaged: {first_line(error)}; restore the folder from a copy of the run") from error
    write_text(out / config.name, json.dumps(settings, indent=1, sort_keys=True) + "\n")
    with replace_atomically(out / weights.name) as temporary:
        save_file(tensors, temporary, {"format": "pt"})


def is_of_transformers(module: nn.Module) -> bool:
    """Return whether ``module`` is a model of ``transformers``, or an adapter of ``peft`` around one."""
    return hasattr(module, "peft_config") or hasattr(module, "base_model_prefix")


def has_base(module: nn.Module) -> bool:
    """Return whether ``module`` is pretrained and has frozen parameters, its base. Only its other parameters are sent and saved."""
    return is_of_transformers(module) and not all(parameter.requires_grad for parameter in module.parameters())


def base_digest(module: nn.Module) -> str:
    """Return the SHA-256, in hex, of the frozen tensors of a pretrained ``module``: parameters, and buffers that are saved with them.

    The digest is empty for a module without frozen parameters. Names are those of the base, so an adapter does not change the digest.
    Where an adapter trains a copy of a layer and keeps the unused original, the original does not count.
    """
    if not has_base(module):
        return ""
    trained = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    frozen: dict[str, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():  # keep_vars: the same objects as the parameters, so ids can be compared
        if id(tensor) not in trained and not _COPIED_LAYER.search(name):
            frozen[_ADDED_BY_ADAPTER.sub("", name)] = tensor
    return digest_of(frozen)


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256, in hex, of ``tensors`` with their names, types and shapes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


_COPIED_LAYER = re.compile(r"\.(original_module|modules_to_save)\.")
"""Part of the name of a parameter in a layer that ``peft`` copied, and in the copy, which is trained."""

_ADDED_BY_ADAPTER = re.compile(r"^base_model\.(model\.)?|\.base_layer(?=\.)")
"""Parts that an adapter adds to the name of a parameter of its base."""


def check_base(module: nn.Module, digest: str) -> None:
    """Raise if the frozen parameters of ``module`` do not have this ``digest``. An empty digest allows any.

    Raises:
        ConfigError: the frozen parameters have another digest.
    """
    if digest and base_digest(module) != digest:
        raise ConfigError(
            f"the trained weights belong to another base model: the frozen weights of this base have SHA-256 {base_digest(module)[:16]}, "
            f"expected {digest[:16]}. Give the base model of the training: --model FOLDER"
        )


@contextmanager
def quietly() -> Iterator[None]:
    """Keep ``transformers`` from printing within this context. Callers check for the causes of its warnings, and raise their own errors."""
    logging = import_library("transformers").utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():  # the libraries warn of calls among themselves
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def raising_config_error(trouble: str) -> Iterator[None]:
    """Turn any error within this context into a :class:`ConfigError` that begins with ``trouble``. The libraries raise many kinds."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{trouble}: {type(error).__name__}: {first_line(error)}") from error
