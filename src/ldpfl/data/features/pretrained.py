"""Frozen encoders of ``timm`` and ``transformers`` as public features. Their weights lie on this machine: nothing is downloaded."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldpfl.data.features.base import TAKEN_FOR_PUBLIC, FeatureMap, unit
from ldpfl.data.inputs import MASK, TOKENS, by_name
from ldpfl.data.samples import Dataset, Samples
from ldpfl.data.tokens import padding_of
from ldpfl.errors import ConfigError, first_line, in_short
from ldpfl.models.adapters import digest_of, explained, quietly
from ldpfl.models.pretrained import check_padding, check_tokens, local_folder
from ldpfl.util.suggestions import did_you_mean
from ldpfl.util.user_code import PRETRAINED, TIMM, library

_NO_TOKEN = -1
"""What stands in the place of a token where a text is filled up."""

_RGB = 3

Interpolation = Literal["bilinear", "bicubic"]


@dataclass(frozen=True)
class Preprocessing:
    """How a network is shown an image: its size in pixels, the mean and spread of each channel in [0, 1], and the interpolation."""

    size: tuple[int, int]
    mean: Sequence[float]
    std: Sequence[float]
    interpolation: Interpolation

    def __call__(self, images: Tensor) -> Tensor:
        """Return ``images`` (N, C, H, W) uint8 resized as a whole, without cropping, and normalised, float32."""
        resized = F.interpolate(images.float() / 255, size=self.size, mode=self.interpolation, align_corners=False, antialias=True)
        resized = resized.clamp(0, 1)  # bicubic overshoots at edges
        return (resized - torch.tensor(self.mean).view(-1, 1, 1)) / torch.tensor(self.std).view(-1, 1, 1)


@dataclass(frozen=True)
class FrozenEncoder(FeatureMap):
    """A frozen network by its name in ``data.features``: samples to vectors (N, F) float32 of length 1."""

    name: str

    @property
    @abstractmethod
    def _network(self) -> Any: ...

    @property
    @abstractmethod
    def _channels(self) -> int: ...

    @abstractmethod
    def _vectors(self, inputs: Tensor) -> Tensor: ...

    def load(self) -> None:
        self._network  # noqa: B018  # the property loads it

    @cached_property
    def digest(self) -> str:
        # What a pooler makes is not used, and its weights are drawn at random where the files have none.
        return digest_of({key: own for key, own in self._network.state_dict().items() if not key.startswith("pooler.")})

    @property
    def note(self) -> str:
        return f"data.features come from the frozen network {self.name} (SHA-256 {self.digest[:16]}): {TAKEN_FOR_PUBLIC}"

    def prepared(self, dataset: Dataset) -> Dataset:
        if self.reads_texts:
            raise ConfigError(f"features {self.name!r} are made of texts, and these samples are none: name the column in data.text")
        inputs = by_name(dataset.train.inputs).get("")
        if inputs is None or inputs.dtype != torch.uint8 or inputs.dim() != 4:
            raise ConfigError(
                f"features {self.name!r} are made of images (N, channels, height, width) of bytes, and these samples are none"
            )
        return dataset

    def shape(self, inputs: tuple[int, ...]) -> tuple[int, ...]:
        if self.reads_texts:
            made = torch.zeros(1, *inputs, dtype=torch.int64)
        elif len(inputs) == 3 and inputs[0] in (self._channels, 1):
            made = torch.zeros(1, *inputs, dtype=torch.uint8)
        else:
            or_grey = " or 1" if self._channels != 1 else ""
            raise ConfigError(f"features {self.name!r} take images of {self._channels}{or_grey} channels; these samples are {inputs}")
        return tuple(self(made).shape[1:])

    def __call__(self, inputs: Tensor) -> Tensor:
        with torch.inference_mode(), explained(f"features {self.name!r} cannot be computed"):
            images = inputs.dim() == 4
            found = self._vectors(inputs.expand(-1, self._channels, -1, -1) if images else inputs)
        return unit(found.float().clone())


@dataclass(frozen=True)
class TimmFeatures(FrozenEncoder):
    """An encoder of ``timm``, as its preprocessing config says, without its classifier.

    Attributes:
        weights: a safetensors file of weights, instead of those of the hub's cache.
        size: side in pixels of the image that the network is shown; 0 for the network's own.
    """

    weights: str = ""
    size: int = 0

    @property
    def _network(self) -> Any:
        return _timm_network(self.name.removeprefix(TIMM), self.weights)

    @property
    def _channels(self) -> int:
        return int(self._network.pretrained_cfg.get("input_size", (_RGB,))[0])

    def _vectors(self, inputs: Tensor) -> Tensor:
        found = import_module("timm.data").resolve_data_config(pretrained_cfg=self._network.pretrained_cfg)
        size = (self.size, self.size) if self.size else tuple(found["input_size"][1:])
        mode: Interpolation = "bilinear" if found["interpolation"] == "bilinear" else "bicubic"
        vectors: Tensor = self._network(Preprocessing(size, found["mean"], found["std"], mode)(inputs))
        return vectors


@lru_cache(maxsize=2)
def _timm_network(name: str, weights: str) -> nn.Module:
    """Load the encoder ``name``, or that of a folder, without its classifier.

    Raises:
        ConfigError: ``timm`` or the weights are not on this machine, or do not fit; or the name is unknown.
    """
    timm = _timm()
    folder = Path(name)
    if folder.is_dir() or folder.is_absolute():
        if weights:
            raise ConfigError(f"data.feature_options.weights is set, and {name} is a folder with weights: name one of them")
        if not ((folder / "config.json").is_file() and (folder / "model.safetensors").is_file()):
            raise ConfigError(
                f"{name} lacks config.json or model.safetensors: write them by "
                "timm.models.save_for_hf(model, folder, safe_serialization=True)"
            )
        source, overlay = f"local-dir:{folder}", {}
    else:
        source, overlay = name, {"file": _timm_weights(timm, name, weights), "custom_load": False}
    with explained(f"features {TIMM}{name} cannot be loaded"):
        made = timm.create_model(source, pretrained=True, num_classes=0, pretrained_cfg_overlay=overlay)
    network: nn.Module = made.eval().requires_grad_(False)
    return network


def _timm() -> Any:
    """Import ``timm``.

    Raises:
        ConfigError: it is not installed, or cannot be imported.
    """
    try:
        return import_module("timm")
    except ImportError as error:
        raise ConfigError(f"features '{TIMM}...' need timm ({in_short(error)}): pip install 'ldpfl[timm]'") from error
    except Exception as error:  # such as a torchvision that was built for another PyTorch
        raise ConfigError(
            f"timm cannot be imported ({type(error).__name__}: {first_line(error)}): install the torchvision that fits this PyTorch "
            f"({torch.__version__}), from the same index"
        ) from error


def _timm_weights(timm: Any, name: str, weights: str) -> str:
    """Return the path of the weights of the encoder ``name``: the file ``weights``, or that of the hub's cache."""
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        raise ConfigError(f"timm has no model {architecture!r}{_near(architecture, timm.list_models())}")
    tagged = timm.list_models(f"{architecture}.*", pretrained=True)
    if tag and name not in tagged:
        raise ConfigError(f"timm has no weights {name!r}{_near(name, tagged)}")
    if weights:
        if not (Path(weights).is_file() and weights.endswith(".safetensors")):
            raise ConfigError(f"data.feature_options.weights is {weights!r}, expected a file of weights, NAME.safetensors")
        return weights
    described = timm.get_pretrained_cfg(name)
    origin, file = getattr(described, "hf_hub_id", None), getattr(described, "hf_hub_filename", None) or "model.safetensors"
    found = import_module("huggingface_hub").try_to_load_from_cache(origin, file) if origin else None
    if not isinstance(found, str):
        get = f"hf download {origin} {file}" if origin else "timm names none for it"
        raise ConfigError(
            f"the weights of {TIMM}{name} are not on this machine, and features download nothing: get them by `{get}`, or name a file, "
            "--set data.feature_options.weights=FILE.safetensors"
        )
    return found


def _near(name: str, known: Sequence[str]) -> str:
    """Return a clause with the nearest of the ``known`` names; there are over a thousand, so all are never listed."""
    said = did_you_mean(name, known)
    return f": {said}" if said.startswith("did") else ": timm.list_models(pretrained=True) lists them"


@dataclass(frozen=True)
class TransformersFeatures(FrozenEncoder):
    """An encoder of ``transformers`` for texts or images: the mean of its last hidden states, over all tokens that are no padding.

    The pooled output is not taken: many checkpoints have no pooler, and others have one that was trained for another task.
    """

    @property
    def _network(self) -> Any:
        return _encoder(local_folder(self.name))

    def load(self) -> None:
        super().load()
        if not self.reads_texts:
            _shown(local_folder(self.name))

    @property
    def reads_texts(self) -> bool:
        return bool(self._network.main_input_name == TOKENS)

    @property
    def _channels(self) -> int:
        return int(getattr(self._network.config, "num_channels", _RGB))

    def prepared(self, dataset: Dataset) -> Dataset:
        if not self.reads_texts or TOKENS not in by_name(dataset.train.inputs):
            return super().prepared(dataset)
        check_tokens(self._network, dataset.tokens(TOKENS) or 0, by_name(dataset.train.inputs)[TOKENS].shape[1])
        if dataset.encoder is not None and (tokenizer := dataset.encoder.data.tokenizer):
            check_padding(self._network, padding_of(tokenizer), tokenizer)
        train, test = (_as_one_tensor(samples) for samples in (dataset.train, dataset.test))
        return replace(dataset, train=train, test=test, vocabulary=dataset.tokens(TOKENS))

    def _vectors(self, inputs: Tensor) -> Tensor:
        if not self.reads_texts:
            states: Tensor = self._network(pixel_values=_shown(local_folder(self.name))(inputs)).last_hidden_state
            return states.mean(dim=1) if states.dim() == 3 else states.flatten(2).mean(dim=2)
        there = (inputs != _NO_TOKEN).long()
        padding = getattr(self._network.config, "pad_token_id", None) or 0
        states = self._network(input_ids=inputs.where(there.bool(), padding), attention_mask=there).last_hidden_state
        weights = there[:, :, None].float()
        return (states * weights).sum(dim=1) / weights.sum(dim=1).clamp_min(1)


def _as_one_tensor(samples: Samples) -> Samples:
    parts = by_name(samples.inputs)
    return replace(samples, inputs=parts[TOKENS].masked_fill(parts[MASK] == 0, _NO_TOKEN))


@lru_cache(maxsize=2)
def _encoder(folder: str) -> Any:
    """Load the encoder in ``folder``. No code from there is run.

    Raises:
        ConfigError: its weights are missing, or those of another model.
    """
    transformers = library("transformers")
    with explained(f"features {PRETRAINED}{folder} cannot be loaded"), quietly():
        safe: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        made, report = transformers.AutoModel.from_pretrained(
            folder,
            use_safetensors=True,
            dtype=torch.float32,
            attn_implementation="eager",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **safe,
        )
    wrong = sorted([*(key for key in report["missing_keys"] if "pooler." not in key), *(key[0] for key in report["mismatched_keys"])])
    if wrong:
        raise ConfigError(
            f"the weights in {folder} do not fit its config.json: {len(wrong)} parameters are absent or of another shape, such as "
            f"{wrong[0]}: save the model again by model.save_pretrained(folder)"
        )
    if getattr(made.config, "is_encoder_decoder", False):
        made = made.get_encoder()
    return made.eval().requires_grad_(False)


_BILINEAR = 2
"""Pillow's number of an interpolation, which processor configs name."""


@lru_cache(maxsize=2)
def _shown(folder: str) -> Preprocessing:
    """Return how the processor config in ``folder`` says that images are shown to the network."""
    with explained(f"{folder} has no usable preprocessor_config.json"):
        found, _ = library("transformers.image_processing_utils").BaseImageProcessor.get_image_processor_dict(folder, local_files_only=True)
        size = found.get("crop_size") if found.get("do_center_crop") else found["size"]
        height, width = (
            (size, size) if isinstance(size, int) else (size.get(side, size.get("shortest_edge")) for side in ("height", "width"))
        )
        normal = found.get("do_normalize", True)
        mean, std = (found["image_mean"], found["image_std"]) if normal else ([0.0], [1.0])
        return Preprocessing(
            (int(height), int(width)), mean, std, "bilinear" if found.get("resample", _BILINEAR) == _BILINEAR else "bicubic"
        )
