"""Frozen encoders of ``timm`` and ``transformers`` as public features. Their weights must be on this machine: nothing is downloaded."""

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

from ldpfl.data.dataset import Dataset
from ldpfl.data.features.base import TAKEN_FOR_PUBLIC, FeatureMap, unit_length
from ldpfl.data.samples import MASK, TOKENS, Samples, tensors_by_name
from ldpfl.data.tokens import padding_token_number
from ldpfl.errors import ConfigError, error_without_data, first_line
from ldpfl.models.adapters import digest_of, quietly, raising_config_error
from ldpfl.models.pretrained import check_padding, check_tokens, local_folder
from ldpfl.util.suggestions import did_you_mean
from ldpfl.util.user_code import PRETRAINED, TIMM, import_library

_PADDING = -1
"""Number in the place of padding tokens, where tokenised texts are one tensor without a mask."""

_RGB = 3
"""Number of channels of an encoder whose config does not state it."""

Interpolation = Literal["bilinear", "bicubic"]


@dataclass(frozen=True)
class Preprocessing:
    """How images are prepared for a network: resized to ``size`` (height, width), and normalised by each channel's mean and deviation."""

    size: tuple[int, int]
    mean: Sequence[float]
    std: Sequence[float]
    interpolation: Interpolation

    def __call__(self, images: Tensor) -> Tensor:
        """Return ``images`` (N, C, H, W) uint8 as float32, resized without cropping, and normalised."""
        resized = F.interpolate(images.float() / 255, size=self.size, mode=self.interpolation, align_corners=False, antialias=True)
        resized = resized.clamp(0, 1)  # bicubic overshoots at edges
        return (resized - torch.tensor(self.mean).view(-1, 1, 1)) / torch.tensor(self.std).view(-1, 1, 1)


@dataclass(frozen=True)
class FrozenEncoder(FeatureMap):
    """A frozen network by its name in ``data.features``: samples to vectors (N, F) float32 of length 1."""

    name: str

    @property
    @abstractmethod
    def _network(self) -> Any:
        """The network, loaded at first use."""

    @property
    @abstractmethod
    def _channels(self) -> int:
        """Number of channels of images that the network takes."""

    @abstractmethod
    def _vectors(self, inputs: Tensor) -> Tensor:
        """Return the network's vectors (N, F) of ``inputs``: images with the network's channels, or tokens."""

    def load(self) -> None:
        self._network  # noqa: B018  # the property loads it

    @cached_property
    def digest(self) -> str:
        # A pooler's output is not used, and its weights are random if the files hold none.
        return digest_of({key: tensor for key, tensor in self._network.state_dict().items() if not key.startswith("pooler.")})

    @property
    def note(self) -> str:
        return f"data.features come from the frozen network {self.name} (SHA-256 {self.digest[:16]}): {TAKEN_FOR_PUBLIC}"

    def prepared(self, dataset: Dataset) -> Dataset:
        """Return ``dataset`` if its samples are images; else raise. A subclass that reads texts handles tokens before it calls this."""
        if self.reads_texts:
            raise ConfigError(
                f"features {self.name!r} are made from texts, but these samples are not: name the column of texts in data.text"
            )
        inputs = tensors_by_name(dataset.train.inputs).get("")  # None if samples have several tensors
        if inputs is None or inputs.dtype != torch.uint8 or inputs.dim() != 4:
            raise ConfigError(
                f"features {self.name!r} are made from images, uint8 arrays of the shape (N, channels, height, width), but these samples "
                "are not images: leave data.features out, or give images"
            )
        return dataset

    def shape(self, inputs: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one sample's features. It is that for a sample of zeros, since configs of networks do not all state it."""
        if self.reads_texts:
            sample = torch.zeros(1, *inputs, dtype=torch.int64)
        elif len(inputs) == 3 and inputs[0] in (self._channels, 1):
            sample = torch.zeros(1, *inputs, dtype=torch.uint8)
        else:
            or_grey = " or 1" if self._channels != 1 else ""
            raise ConfigError(f"features {self.name!r} need images of {self._channels}{or_grey} channels, got samples of shape {inputs}")
        return tuple(self(sample).shape[1:])

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the network's vectors (N, F) of ``inputs``, of length 1. Grey images get the network's channels by repetition."""
        with torch.inference_mode(), raising_config_error(f"features {self.name!r} cannot be computed"):
            are_images = inputs.dim() == 4
            vectors = self._vectors(inputs.expand(-1, self._channels, -1, -1) if are_images else inputs)
        return unit_length(vectors.float().clone())  # a tensor of inference mode could not be used in training


@dataclass(frozen=True)
class TimmFeatures(FrozenEncoder):
    """An image encoder of ``timm`` without its classifier. Images are prepared as the encoder's config says.

    Attributes:
        weights: safetensors file of weights, instead of the file in the hub's cache.
        size: side in pixels to which images are resized; 0 for the size in the encoder's config.
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
        """Return the encoder's outputs (N, F) for images that are resized and normalised as its config says."""
        config = import_module("timm.data").resolve_data_config(pretrained_cfg=self._network.pretrained_cfg)
        size = (self.size, self.size) if self.size else tuple(config["input_size"][1:])
        mode: Interpolation = "bilinear" if config["interpolation"] == "bilinear" else "bicubic"
        vectors: Tensor = self._network(Preprocessing(size, config["mean"], config["std"], mode)(inputs))
        return vectors


@lru_cache(maxsize=2)
def _timm_network(name: str, weights: str) -> nn.Module:
    """Load the encoder ``name``, a name of ``timm`` or a folder, without its classifier; with the file ``weights`` unless that is "".

    Raises:
        ConfigError: ``timm`` or the weights are not on this machine, the weights do not fit, or the name is unknown.
    """
    timm = _timm()
    folder = Path(name)
    if folder.is_dir() or folder.is_absolute():
        if weights:
            raise ConfigError(f"data.feature_options.weights is set, but the folder {name} has its own weights: leave that setting out")
        if not ((folder / "config.json").is_file() and (folder / "model.safetensors").is_file()):
            raise ConfigError(
                f"the folder {name} lacks config.json or model.safetensors: write them with "
                "timm.models.save_for_hf(model, folder, safe_serialization=True)"
            )
        source, overlay = f"local-dir:{folder}", {}
    else:
        # Some configs ask for a loader of their own, for another format. This file is safetensors, which the common loader reads.
        source, overlay = name, {"file": _timm_weights(timm, name, weights), "custom_load": False}
    with raising_config_error(f"features {TIMM}{name} cannot be loaded"):
        loaded = timm.create_model(source, pretrained=True, num_classes=0, pretrained_cfg_overlay=overlay)
    network: nn.Module = loaded.eval().requires_grad_(False)
    return network


def _timm() -> Any:
    """Import ``timm``, or raise a :class:`ConfigError` that says how to install what it needs."""
    try:
        return import_module("timm")
    except ImportError as error:
        raise ConfigError(f"features '{TIMM}...' need timm ({error_without_data(error)}): pip install 'ldpfl[timm]'") from error
    except Exception as error:  # for example from a torchvision that was built for another PyTorch
        raise ConfigError(
            f"timm cannot be imported ({type(error).__name__}: {first_line(error)}): install the torchvision that fits this PyTorch "
            f"({torch.__version__}), from the same index"
        ) from error


def _timm_weights(timm: Any, name: str, weights: str) -> str:
    """Return the path of the weights of the encoder ``name``: the file ``weights``, or the file in the hub's cache."""
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        raise ConfigError(f"timm has no model {architecture!r}{_suggestion(architecture, timm.list_models())}")
    names_with_weights = timm.list_models(f"{architecture}.*", pretrained=True)
    if tag and name not in names_with_weights:
        raise ConfigError(f"timm has no weights {name!r}{_suggestion(name, names_with_weights)}")
    if weights:
        if not (Path(weights).is_file() and weights.endswith(".safetensors")):
            raise ConfigError(f"data.feature_options.weights is {weights!r}, expected an existing file of weights, NAME.safetensors")
        return weights
    config = timm.get_pretrained_cfg(name)
    origin = getattr(config, "hf_hub_id", None)
    file = getattr(config, "hf_hub_filename", None) or "model.safetensors"
    cached = import_module("huggingface_hub").try_to_load_from_cache(origin, file) if origin else None
    if not isinstance(cached, str):
        command = f"`hf download {origin} {file}`" if origin else "hand (timm names no source)"
        raise ConfigError(
            f"the weights of {TIMM}{name} are not on this machine, and ldpfl does not download them: get them by {command}, or name a file "
            "with --set data.feature_options.weights=FILE.safetensors"
        )
    return cached


def _suggestion(name: str, known: Sequence[str]) -> str:
    """Return the end of a message that suggests the nearest of the ``known`` names. They may be over a thousand, so it never lists them."""
    suggestion = did_you_mean(name, known)
    return f": {suggestion}" if suggestion.startswith("did") else ": timm.list_models(pretrained=True) lists them"


@dataclass(frozen=True)
class TransformersFeatures(FrozenEncoder):
    """An encoder of ``transformers`` for texts or images. A sample's vector is the mean of the last hidden states, without padding.

    The pooled output is not used: many checkpoints have no pooler, and others have one that was trained for another task.
    """

    @property
    def _network(self) -> Any:
        return _transformers_network(local_folder(self.name))

    def load(self) -> None:
        super().load()
        if not self.reads_texts:
            _preprocessing(local_folder(self.name))

    @property
    def reads_texts(self) -> bool:
        return bool(self._network.main_input_name == TOKENS)

    @property
    def _channels(self) -> int:
        return int(getattr(self._network.config, "num_channels", _RGB))

    def prepared(self, dataset: Dataset) -> Dataset:
        """Return ``dataset`` with tokenised texts as one tensor, or raise if the network cannot read them. Images stay as they are."""
        if not self.reads_texts or TOKENS not in tensors_by_name(dataset.train.inputs):
            return super().prepared(dataset)
        check_tokens(self._network, dataset.tokens(TOKENS) or 0, tensors_by_name(dataset.train.inputs)[TOKENS].shape[1])
        if dataset.encoder is not None and (tokenizer := dataset.encoder.data.tokenizer):
            check_padding(self._network, padding_token_number(tokenizer), tokenizer)
        train, test = (_as_one_tensor(samples) for samples in (dataset.train, dataset.test))
        return replace(dataset, train=train, test=test, vocabulary=dataset.tokens(TOKENS))

    def _vectors(self, inputs: Tensor) -> Tensor:
        """Return the mean (N, F) of the last hidden states: of images over all positions, of texts over all tokens but padding."""
        if not self.reads_texts:
            states: Tensor = self._network(pixel_values=_preprocessing(local_folder(self.name))(inputs)).last_hidden_state
            # Transformers return (N, positions, F), convolutional networks (N, F, height, width).
            return states.mean(dim=1) if states.dim() == 3 else states.flatten(2).mean(dim=2)
        mask = (inputs != _PADDING).long()
        padding_token = getattr(self._network.config, "pad_token_id", None) or 0  # any token would do, since the mask hides it
        states = self._network(input_ids=inputs.where(mask.bool(), padding_token), attention_mask=mask).last_hidden_state
        weights = mask[:, :, None].float()
        return (states * weights).sum(dim=1) / weights.sum(dim=1).clamp_min(1)


def _as_one_tensor(samples: Samples) -> Samples:
    """Return tokenised texts as one tensor (N, T): the tokens, with ``_PADDING`` where the mask is 0."""
    parts = tensors_by_name(samples.inputs)
    return replace(samples, inputs=parts[TOKENS].masked_fill(parts[MASK] == 0, _PADDING))


@lru_cache(maxsize=2)
def _transformers_network(folder: str) -> Any:
    """Load the encoder of ``transformers`` in ``folder``. No code from there is run.

    Raises:
        ConfigError: the weights are missing, or do not fit the config.
    """
    transformers = import_library("transformers")
    with raising_config_error(f"features {PRETRAINED}{folder} cannot be loaded"), quietly():
        safe: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        network, report = transformers.AutoModel.from_pretrained(
            folder,
            use_safetensors=True,
            dtype=torch.float32,
            attn_implementation="eager",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **safe,
        )
    missing = [key for key in report["missing_keys"] if "pooler." not in key]  # a pooler's output is not used
    not_loaded = sorted([*missing, *(key[0] for key in report["mismatched_keys"])])
    if not_loaded:
        raise ConfigError(
            f"the weights in {folder} do not fit its config.json: {len(not_loaded)} parameters are absent or of another shape, such as "
            f"{not_loaded[0]}: save the model again by model.save_pretrained(folder)"
        )
    if getattr(network.config, "is_encoder_decoder", False):
        network = network.get_encoder()
    return network.eval().requires_grad_(False)


_PILLOW_BILINEAR = 2
"""Pillow's number for bilinear interpolation, which processor configs use."""


@lru_cache(maxsize=2)
def _preprocessing(folder: str) -> Preprocessing:
    """Return how images are prepared for the network in ``folder``, by its processor config."""
    with raising_config_error(f"{folder} has no usable preprocessor_config.json"):
        processor = import_library("transformers.image_processing_utils").BaseImageProcessor
        config, _ = processor.get_image_processor_dict(folder, local_files_only=True)
        size = config.get("crop_size") if config.get("do_center_crop") else config["size"]
        if isinstance(size, int):
            height = width = size
        else:  # a config with one edge alone means to crop afterwards; here nothing is cropped, and both sides get this length
            height, width = (size.get(side, size.get("shortest_edge")) for side in ("height", "width"))
        mean, std = (config["image_mean"], config["image_std"]) if config.get("do_normalize", True) else ([0.0], [1.0])
        is_bilinear = config.get("resample", _PILLOW_BILINEAR) == _PILLOW_BILINEAR
        return Preprocessing((int(height), int(width)), mean, std, "bilinear" if is_bilinear else "bicubic")
