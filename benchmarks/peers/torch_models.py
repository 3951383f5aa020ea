"""The two models in PyTorch, for peers that use it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class CNN(nn.Module):
    """Two convolutions (5x5, max-pooled) of 10 and 20 channels, 50 hidden units: 21,840 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 10, 5), nn.Conv2d(10, 20, 5)
        self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(F.max_pool2d(self.conv1(images.unsqueeze(1)), 2))
        hidden = F.relu(F.max_pool2d(self.conv2(hidden), 2))
        return self.fc2(F.relu(self.fc1(hidden.flatten(1))))


class Linear(nn.Module):
    """A logistic regression: 7,850 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(784, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(images.flatten(1))


def model_of(name: str) -> nn.Module:
    """Return the model that a task names."""
    return CNN() if name == "cnn" else Linear()
