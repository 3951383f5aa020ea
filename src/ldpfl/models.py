"""Models that hold no buffers and draw no random numbers while they run; or any module by import path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldpfl.errors import ConfigError
from ldpfl.suggestions import did_you_mean

InputShape = tuple[int, ...]
"""Of one sample; of an image: channels, height, width."""


def _image(shape: InputShape) -> tuple[int, int, int]:
    """Return channels, height and width.

    Raises:
        ConfigError: samples of this shape are no images.
    """
    if len(shape) != 3:
        raise ConfigError(f"this model is for images; these samples are {shape}: take linear or mlp")
    return shape[0], shape[1], shape[2]


class TwoLayerCNN(nn.Module):
    """Convolutions of 10 and 20 channels (5x5, max-pooled), then 50 hidden units: 21,840 weights on 1x28x28, 10 classes.

    Source: LDP-FL, section 5 ("a two-layer CNN"); the sizes are those of the PyTorch MNIST example of its time, which
    the paper does not spell out.
    """

    def __init__(self, shape: InputShape, classes: int) -> None:
        super().__init__()
        channels, height, width = _image(shape)
        after = [((size - 4) // 2 - 4) // 2 for size in (height, width)]
        if min(after) < 1:
            raise ConfigError(f"images of {height}x{width} are too small for the two-layer CNN, which needs 16x16")
        self.conv1 = nn.Conv2d(channels, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.fc1 = nn.Linear(20 * after[0] * after[1], 50)
        self.fc2 = nn.Linear(50, classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(F.max_pool2d(self.conv1(images), 2))
        hidden = F.relu(F.max_pool2d(self.conv2(hidden), 2))
        hidden = F.relu(self.fc1(hidden.flatten(1)))
        return torch.as_tensor(self.fc2(hidden))


class SmallVGG(nn.Sequential):
    """Three VGG stages of two 3x3 convolutions (32, 64, 128 channels), then a linear layer.

    Source: LDP-FL, section 5 ("a small VGG" for CIFAR-10); the paper gives no layout.
    """

    def __init__(self, shape: InputShape, classes: int) -> None:
        channels, height, width = _image(shape)
        if min(height, width) < 8:
            raise ConfigError(f"images of {height}x{width} are too small for the small VGG, which needs 8x8")
        layers: list[nn.Module] = []
        for outputs in (32, 64, 128):
            for _ in range(2):
                layers += [nn.Conv2d(channels, outputs, kernel_size=3, padding=1), nn.ReLU()]
                channels = outputs
            layers.append(nn.MaxPool2d(2))
        super().__init__(*layers, nn.Flatten(), nn.Linear(128 * (height // 8) * (width // 8), classes))


class LogisticRegression(nn.Sequential):
    """One linear layer."""

    def __init__(self, shape: InputShape, classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(prod(shape), classes))


class Linear(nn.Sequential):
    """One linear layer without bias, from 0: for features that are centered or of one length, where every weight costs noise."""

    def __init__(self, shape: InputShape, classes: int) -> None:
        layer = nn.Linear(prod(shape), classes, bias=False)
        nn.init.zeros_(layer.weight)
        super().__init__(nn.Flatten(), layer)


class CenteredLinear(nn.Module):
    """One linear layer without bias, from 0, on samples less a common center, brought to length 1.

    The center is a layer like any other, but it is measured and not trained: while the broadcast one is 0, which is public, clients put
    their own samples' mean in the place of a gradient, see :mod:`ldpfl.simulation.gradients`. So it is randomised, charged and sent
    as everything else.
    """

    def __init__(self, shape: InputShape, classes: int) -> None:
        super().__init__()
        self.center = nn.Parameter(torch.zeros(prod(shape)))
        self.weight = nn.Parameter(torch.zeros(classes, prod(shape)))

    def forward(self, inputs: Tensor) -> Tensor:
        offset = inputs.flatten(1) - self.center.detach()
        return F.linear(offset / offset.norm(dim=1, keepdim=True).clamp_min(1e-6), self.weight)


class MLP(nn.Sequential):
    """One hidden layer of 64 units, on whatever a sample is."""

    def __init__(self, shape: InputShape, classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(prod(shape), 64), nn.ReLU(), nn.Linear(64, classes))


class _ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = _group_norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = _group_norm(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), _group_norm(outputs))

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(self.norm1(self.conv1(images)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(images))


class ResNet18GN(nn.Module):
    """ResNet-18 (He et al. 2016) with a 3x3 CIFAR stem and GroupNorm for BatchNorm: 11,173,962 weights on 3x32x32, 10 classes.

    GroupNorm (Wu and He 2018) keeps no running statistics of the private data.
    """

    def __init__(self, shape: InputShape, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(_image(shape)[0], 64, 3, padding=1, bias=False)
        self.norm = _group_norm(64)
        blocks: list[nn.Module] = []
        inputs = 64
        for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [_ResidualBlock(inputs, outputs, stride), _ResidualBlock(outputs, outputs, 1)]
            inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(512, classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.blocks(F.relu(self.norm(self.stem(images))))
        return torch.as_tensor(self.head(hidden.mean(dim=(2, 3))))


def _group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(min(32, channels // 4), channels)


CENTERED = "centered-linear"
"""The model whose first round measures a center."""

_REGISTRY: dict[str, Callable[[InputShape, int], nn.Module]] = {
    "two-layer-cnn": TwoLayerCNN,
    "small-vgg": SmallVGG,
    "resnet18-gn": ResNet18GN,
    "logistic-regression": LogisticRegression,
    "linear": Linear,
    CENTERED: CenteredLinear,
    "mlp": MLP,
}


def names() -> tuple[str, ...]:
    """Names that :func:`create` knows beside import paths."""
    return tuple(_REGISTRY)


def create(name: str, shape: InputShape, classes: int, *, seed: int, options: Mapping[str, Any] | None = None) -> nn.Module:
    """Build a model with weights that ``seed`` decides, leaving the global random state as it was.

    ``name`` is one of :func:`names`, built for ``shape`` and ``classes``; or ``"package.module:Class"``, called
    with ``options`` alone.

    Raises:
        ConfigError: the name is unknown, the path cannot be imported, or it does not give a ``torch.nn.Module``.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if ":" in name:
            return _import_module(name, dict(options or {}))
        if name not in _REGISTRY:
            raise ConfigError(f"unknown model {name!r}: {did_you_mean(name, _REGISTRY)}, or give an import path package.module:Class")
        if options:
            raise ConfigError(f"model {name!r} takes no options, got {', '.join(options)}; they belong to import paths")
        return _REGISTRY[name](shape, classes)


def _import_module(path: str, options: dict[str, Any]) -> nn.Module:
    module_name, _, attribute = path.partition(":")
    try:
        model = getattr(import_module(module_name), attribute)(**options)
    except Exception as error:  # it is the user's code: anything may come out of it
        raise ConfigError(f"model {path!r} cannot be built: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model {path!r} gives a {type(model).__name__}, expected a torch.nn.Module")
    return model
