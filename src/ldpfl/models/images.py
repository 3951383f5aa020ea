"""Models for images. They hold no buffers and draw no random numbers in forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldpfl.errors import ConfigError

InputShape = tuple[int, ...]
"""Shape of one sample. For an image: channels, height, width."""


def _image(shape: InputShape) -> tuple[int, int, int]:
    """Return the channels, height and width of an image of this ``shape``.

    Raises:
        ConfigError: ``shape`` is not that of an image.
    """
    if len(shape) != 3:
        raise ConfigError(
            f"this model takes images (channels, height, width), got samples of shape {shape}: set model.name to linear or mlp"
        )
    return shape[0], shape[1], shape[2]


def halved(images: Tensor) -> Tensor:
    """Return the 2x2 max-pooled ``images``. An odd row or column is left out.

    In compiled code it is the maximum of four strided slices, which the compiler fuses with neighbouring operations. Equal maxima share the
    gradient there, while ``max_pool2d`` gives it to the first.
    """
    if not torch.compiler.is_compiling():
        return F.max_pool2d(images, 2)
    even = images[..., : images.shape[-2] // 2 * 2, : images.shape[-1] // 2 * 2]
    upper = torch.maximum(even[..., 0::2, 0::2], even[..., 0::2, 1::2])
    return torch.maximum(upper, torch.maximum(even[..., 1::2, 0::2], even[..., 1::2, 1::2]))


class Halved(nn.Module):
    """:func:`halved`, as a layer."""

    def forward(self, images: Tensor) -> Tensor:
        return halved(images)


class TwoLayerCNN(nn.Module):
    """Convolutions of 10 and 20 channels (5x5, max-pooled), then 50 hidden units: 21,840 weights on 1x28x28, 10 classes.

    Source: LDP-FL, section 5 ("a two-layer CNN"); the sizes are those of the PyTorch MNIST example of its time, which
    the paper does not spell out.
    """

    def __init__(self, shape: InputShape, classes: int) -> None:
        super().__init__()
        channels, height, width = _image(shape)
        # A 5x5 convolution takes away 4 pixels, and pooling halves the rest.
        pooled_sizes = [((size - 4) // 2 - 4) // 2 for size in (height, width)]
        if min(pooled_sizes) < 1:
            raise ConfigError(
                f"images of {height}x{width} are too small for the two-layer CNN, expected at least 16x16: use mlp or larger images"
            )
        self.conv1 = nn.Conv2d(channels, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.fc1 = nn.Linear(20 * pooled_sizes[0] * pooled_sizes[1], 50)
        self.fc2 = nn.Linear(50, classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(halved(self.conv1(images)))
        hidden = F.relu(halved(self.conv2(hidden)))
        hidden = F.relu(self.fc1(hidden.flatten(1)))
        return torch.as_tensor(self.fc2(hidden))


class SmallVGG(nn.Sequential):
    """Three VGG stages of two 3x3 convolutions (32, 64, 128 channels), then a linear layer.

    Source: LDP-FL, section 5 ("a small VGG" for CIFAR-10); the paper gives no layout.
    """

    def __init__(self, shape: InputShape, classes: int) -> None:
        channels, height, width = _image(shape)
        if min(height, width) < 8:
            raise ConfigError(
                f"images of {height}x{width} are too small for the small VGG, expected at least 8x8: use mlp or larger images"
            )
        layers: list[nn.Module] = []
        for outputs in (32, 64, 128):
            for _ in range(2):
                layers += [nn.Conv2d(channels, outputs, kernel_size=3, padding=1), nn.ReLU()]
                channels = outputs
            layers.append(Halved())
        super().__init__(*layers, nn.Flatten(), nn.Linear(128 * (height // 8) * (width // 8), classes))


class _ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the block changes the shape."""

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


class _ResNetGN(nn.Module):
    """A ResNet (He et al. 2016) with a 3x3 CIFAR stem and GroupNorm for BatchNorm; each stage but the first halves the image.

    GroupNorm (Wu and He 2018) keeps no running statistics of the private data.
    """

    def __init__(self, shape: InputShape, classes: int, *, widths: tuple[int, ...], blocks_per_stage: int) -> None:
        """Build one stage of ``blocks_per_stage`` residual blocks for each of ``widths``, the stages' numbers of channels."""
        super().__init__()
        inputs = widths[0]
        self.stem = nn.Conv2d(_image(shape)[0], inputs, 3, padding=1, bias=False)
        self.norm = _group_norm(inputs)
        blocks: list[nn.Module] = []
        for stage, outputs in enumerate(widths):
            for block in range(blocks_per_stage):
                blocks.append(_ResidualBlock(inputs, outputs, stride=2 if stage > 0 and block == 0 else 1))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.blocks(F.relu(self.norm(self.stem(images))))
        return torch.as_tensor(self.head(hidden.mean(dim=(2, 3))))


class ResNet18GN(_ResNetGN):
    """ResNet-18: 11,173,962 weights on 3x32x32 and 10 classes. Source: LaDP-FL, whose BatchNorm is replaced here."""

    def __init__(self, shape: InputShape, classes: int) -> None:
        super().__init__(shape, classes, widths=(64, 128, 256, 512), blocks_per_stage=2)


class ResNet8GN(_ResNetGN):
    """ResNet-8, the smallest of those for CIFAR: 78,042 weights on 3x32x32 and 10 classes."""

    def __init__(self, shape: InputShape, classes: int) -> None:
        super().__init__(shape, classes, widths=(16, 32, 64), blocks_per_stage=1)


def _group_norm(channels: int) -> nn.GroupNorm:
    """Return a normalisation in 32 groups, or in fewer groups of at least 4 channels."""
    return nn.GroupNorm(min(32, channels // 4), channels)
