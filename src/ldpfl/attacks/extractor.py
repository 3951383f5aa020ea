"""Extractors turn images into features, whose distributions are then compared.

There are two, which are never mixed in one table: Inception v3, which published distances use, if its weights are on this machine; or a
small classifier of the data set's public training split, which is trained once and kept in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from math import ceil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import ldpfl
from ldpfl.data import Dataset
from ldpfl.data.samples import normalise
from ldpfl.util.files import replace_atomically
from ldpfl.util.seeded_torch import SeededDraws
from ldpfl.util.user_cache import cache_dir

_INCEPTION_FILE = "weights-inception-2015-12-05-6726825d.pth"
_INCEPTION_DIGEST = "6726825d"
_ARCHITECTURE = "conv 32, 64; linear 64"
_FEATURES = 64
_BATCH = 500


@dataclass(frozen=True)
class Extractor:
    """A network that maps images to features, with a name that identifies it.

    Attributes:
        name: the network, its training data, and the versions that trained it. Only distances under equal names are comparable.
        function: maps images (N, C, H, W) uint8 to features (N, features) float.
        features: number of features.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    features: int


@dataclass(frozen=True)
class ClassifierConfig:
    """Training settings of the classifier: Adam, for ``epochs`` of the training split or ``most_steps`` steps, whichever ends first."""

    epochs: int = 20
    most_steps: int = 2000
    batch_size: int = 64
    learning_rate: float = 1e-3
    seed: int = 0


class Classifier(nn.Module):
    """Two convolutions, 64 features and a linear layer, which map images (N, C, H, W) uint8 to logits (N, classes).

    It has few features on purpose. The covariance of 64 features can be estimated from some hundred images, and that of 2,048 cannot.
    """

    def __init__(self, task: Dataset) -> None:
        super().__init__()
        channels, height, width = task.shape
        self._mean, self._std = task.mean, task.std
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * (height // 4) * (width // 4), _FEATURES),  # two poolings halved height and width twice
            nn.ReLU(),
        )
        self.head = nn.Linear(_FEATURES, task.outputs)

    def extract(self, pixels: Tensor) -> Tensor:
        """Return the features (N, 64)."""
        return torch.as_tensor(self.features(normalise(pixels, self._mean, self._std)))

    def forward(self, pixels: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.extract(pixels)))

    def predict(self, pixels: Tensor) -> Tensor:
        """Return the most likely classes (N,)."""
        with torch.no_grad():
            return torch.cat([self(part).argmax(1) for part in torch.split(pixels, _BATCH)])


@dataclass(frozen=True)
class TrainedClassifier:
    """A classifier that was trained on public images, independently of every model under attack.

    Attributes:
        name: name of its extractor.
        accuracy: accuracy on the test split.
    """

    name: str
    classifier: Classifier
    accuracy: float

    def extractor(self) -> Extractor:
        """Return an extractor of the features below the last layer."""
        return Extractor(self.name, self.classifier.extract, _FEATURES)

    def share(self, pixels: Tensor, label: int) -> float:
        """Return the fraction of images ``pixels`` (N, C, H, W) uint8 that the classifier assigns to ``label``."""
        return float((self.classifier.predict(pixels) == label).float().mean())


def trained_classifier(
    task: Dataset, config: ClassifierConfig | None = None, progress: Callable[[int, int], None] = lambda done, total: None
) -> TrainedClassifier:
    """Return the classifier of ``task`` from the cache, or train it on the public train split and store it there.

    The cache key is a hash of the data's fingerprint, the architecture, the settings and the versions; a damaged file is replaced.

    Args:
        progress: called with (steps done, steps) while it trains.
    """
    config = config or ClassifierConfig()
    facts = {
        "data": f"{task.name} {task.fingerprint}",
        "architecture": _ARCHITECTURE,
        "ldpfl": ldpfl.__version__,
        "torch": torch.__version__,
        **asdict(config),
    }
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    name = f"classifier ({_ARCHITECTURE}) of the {task.name} train split, {key}"
    path = cache_dir() / "extractors" / f"{task.name}-{key}.safetensors"
    classifier = _new_classifier(task, config)
    accuracy = _load_classifier(path, classifier)
    if accuracy is None:  # a failed load may have changed the classifier, so a new one is trained
        classifier = _train_classifier(_new_classifier(task, config), task, config, progress)
        accuracy = float((classifier.predict(task.test.tensor) == task.test.targets).float().mean())
        _save_classifier(path, classifier, accuracy)
    return TrainedClassifier(name, classifier.eval(), accuracy)


def inception() -> Extractor | None:
    """Return Inception v3 if torch-fidelity is installed and its weights are on disk; nothing is ever downloaded.

    The weights are looked for in PyTorch's hub folder, under the name that torch-fidelity gives them. They are a pickle,
    which could run code: a file whose digest is not the one in its name is not opened.
    """
    path = Path(torch.hub.get_dir()) / "checkpoints" / _INCEPTION_FILE
    if find_spec("torch_fidelity") is None or not path.is_file():
        return None
    with path.open("rb") as handle:
        if not hashlib.file_digest(handle, "sha256").hexdigest().startswith(_INCEPTION_DIGEST):
            return None
    from torchmetrics.image.fid import NoTrainInceptionV3  # slow to import

    network = NoTrainInceptionV3("inception-v3-compat", ["2048"], str(path))

    def extract(pixels: Tensor) -> Tensor:
        """Return the features (N, 2048). The only channel of grey images is repeated three times, since the network takes colour images."""
        return torch.as_tensor(network(pixels.expand(-1, 3, -1, -1)))

    return Extractor(f"Inception v3, torch-fidelity weights {_INCEPTION_DIGEST}", extract, 2048)


def _new_classifier(task: Dataset, config: ClassifierConfig) -> Classifier:
    """Return an untrained classifier, whose initial weights the config's seed decides."""
    with SeededDraws(config.seed):
        return Classifier(task)


def _train_classifier(classifier: Classifier, task: Dataset, config: ClassifierConfig, progress: Callable[[int, int], None]) -> Classifier:
    """Train ``classifier`` on the public training split in random batches, and return it."""
    generator = torch.Generator().manual_seed(config.seed)
    optimiser = torch.optim.Adam(classifier.parameters(), config.learning_rate)
    steps_per_epoch = ceil(len(task.train) / config.batch_size)
    steps = min(config.most_steps, config.epochs * steps_per_epoch)
    order = torch.empty(0, dtype=torch.int64)  # samples that this epoch has not used yet
    for step in range(steps):
        if len(order) == 0:  # an epoch begins
            order = torch.randperm(len(task.train), generator=generator)
        batch = task.train.take(order[: config.batch_size])
        order = order[config.batch_size :]
        optimiser.zero_grad()
        F.cross_entropy(classifier(batch.tensor), batch.targets).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        progress(step + 1, steps)
    return classifier


def _load_classifier(path: Path, classifier: Classifier) -> float | None:
    """Load the parameters into ``classifier`` and return its accuracy. None if the file is missing, or damaged and maybe partly loaded."""
    try:
        with safe_open(path, framework="pt") as handle:
            accuracy = float(handle.metadata()["accuracy"])
            state = {name: handle.get_tensor(name) for name in classifier.state_dict()}
        classifier.load_state_dict(state)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError):
        return None
    return accuracy


def _save_classifier(path: Path, classifier: Classifier, accuracy: float) -> None:
    """Write the classifier's parameters and its accuracy to ``path``, for :func:`_load_classifier`. Metadata must be text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_atomically(path) as temporary:
        save_file(classifier.state_dict(), temporary, {"accuracy": repr(accuracy)})
