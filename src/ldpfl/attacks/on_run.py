"""Attack a simulation's run, and the same run without protection, as its honest-but-curious client would.

Only a simulation can be attacked like this: its folder tells who holds what. The attacker gets what client 0 has, its own
images and the last global model; the public train and test splits serve to measure, and nothing of them reaches the attack.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import ldpfl
from ldpfl.attacks.extractor import Extractor, TrainedClassifier, inception, trained_classifier
from ldpfl.attacks.frechet import FEWEST_IMAGES, Distance, frechet_distance
from ldpfl.attacks.gan import GanConfig, Target, attack
from ldpfl.data import Dataset, Samples
from ldpfl.data.partition import CURIOUS_CLIENT
from ldpfl.errors import ConfigError, DataError
from ldpfl.experiments import run_folder
from ldpfl.experiments.build import build
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.dataset import load_dataset
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.experiments.runner import Observer, Runner
from ldpfl.simulation import Federation
from ldpfl.util.files import make_folder, replace_atomically, write_text
from ldpfl.util.number_format import counted
from ldpfl.util.user_cache import cache_dir

Kind = Literal["protected", "unprotected", "floor", "other classes"]
PhaseProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class AttackPlan:
    """Settings of an attack.

    Attributes:
        label: the class to reconstruct; None takes the run's ``data.private_label``.
        images: largest number of images in each set that is compared; smaller if the public splits hold fewer of the class.
        seeds: the attack is made once with each seed.
    """

    label: int | None = None
    images: int = 500
    seeds: tuple[int, ...] = (0,)
    gan: GanConfig = field(default_factory=GanConfig)

    def __post_init__(self) -> None:
        if self.images < FEWEST_IMAGES:
            raise ConfigError(f"images must be at least {FEWEST_IMAGES}, got {self.images}")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds) or min(self.seeds) < 0 or max(self.seeds) >= 2**63:
            raise ConfigError(f"the attack needs different seeds from 0 to {2**63 - 1}, got {list(self.seeds)}")


@dataclass(frozen=True)
class AttackRow:
    """One line of the table: a set of images against real ones of the attacked class.

    Attributes:
        distances: one for each attack; a baseline has one.
        shares: fraction of the images that an independent classifier assigns to the class, one for each distance.
        accuracy: accuracy of the attacked model, as its run states it; None for a baseline.
    """

    kind: Kind
    distances: tuple[Distance, ...]
    shares: tuple[float, ...]
    accuracy: float | None = None

    @property
    def mean(self) -> float:
        """Mean distance."""
        return statistics.fmean(distance.value for distance in self.distances)

    @property
    def deviation(self) -> float:
        """Standard deviation of the distance over the attacks; 0 for one."""
        return statistics.stdev(distance.value for distance in self.distances) if len(self.distances) > 1 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {**asdict(self), "mean": self.mean, "deviation": self.deviation}


@dataclass(frozen=True)
class RunAttack:
    """Result of an attack on a run.

    Attributes:
        mechanism, epsilon: the run's mechanism, and its epsilon in the config; None if nothing is protected.
        budget: what the epsilon is for, each "unit" of a report or the whole "client".
        own_images: number of images that the attacking client holds; ``own_of_label`` of them are of the attacked class.
        extractor: name of the extractor behind all distances.
        classifier_accuracy: accuracy of the independent classifier on the test split.
    """

    name: str
    label: int
    mechanism: str
    epsilon: float | None
    budget: str
    own_images: int
    own_of_label: int
    plan: AttackPlan
    extractor: str
    features: int
    classifier: str
    classifier_accuracy: float
    data: str
    rows: tuple[AttackRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        rows = [row.to_dict() for row in self.rows]
        return {**asdict(self), "attacking_client": CURIOUS_CLIENT, "rows": rows, "versions": versions()}


@dataclass(frozen=True)
class AttackImages:
    """Images (N, C, H, W) uint8 of the attacked class: real ones, and those of the first seed; ``protected`` is None without protection."""

    real: Tensor
    protected: Tensor | None
    unprotected: Tensor


@dataclass(frozen=True)
class _ImageSet:
    """Images (N, C, H, W) of each seed, and the accuracy of the model that they were drawn from. A baseline has one entry and no model."""

    images: tuple[Tensor, ...]
    accuracy: float | None = None


@dataclass(frozen=True)
class Attacker:
    """Runs attacks.

    Attributes:
        observer: watches the training of the unprotected run.
        progress: called with (phase, done, total) in the other phases; may raise to end the attack.
    """

    data_dir: Path | None
    device: torch.device
    observer: Observer
    progress: PhaseProgress = lambda phase, done, total: None

    def run(self, folder: RunFolder, plan: AttackPlan, out: Path) -> tuple[RunAttack, AttackImages]:
        """Attack the run in ``folder``, write ``attack.json`` to ``out``, and return the result; the run is only read.

        Images that an earlier attack with the same run and settings stored in ``out`` are not made again.

        Raises:
            ConfigError: there is no run, it is unfinished, or was made on other data, on a user's own data or on data other than images;
                or the data do not have the label.
            DataError: the data cannot be read, or the splits hold too few images of the class.
            WriteError: ``out`` cannot be created or written.
        """
        config, weights, accuracy = finished_run(folder)
        if config.data.brought:
            raise ConfigError(
                f"{folder.path} was run on your own data, but this attack trains models on the data without noise, and saves them: "
                "attack a run on a built-in data set"
            )
        task = load_dataset(config, self.data_dir)
        if len(task.shape) != 3 or task.train.tensor.dtype != torch.uint8:
            raise ConfigError(f"{folder.path} was run on samples that are not images: this attack needs a run on images")
        label = label_of(plan, config)
        _check_class(label, task)
        federation = rebuilt_federation(folder, config, task, self.device)
        own_images = _own_images(federation)
        self._warn_if_label_held(own_images, label)
        real, floor = _public_images(task, label, plan.images)
        make_folder(out)
        is_protected = config.mechanism.protects
        models: dict[Kind, tuple[Tensor, float]]
        if is_protected:
            models = {"protected": (weights, accuracy), "unprotected": self._unprotected_model(config)}
        else:
            models = {"unprotected": (weights, accuracy)}
        sets: dict[Kind, _ImageSet] = {}
        for kind, (model, score) in models.items():
            target = _target_of_attack(federation, task, model)
            sets[kind] = _ImageSet(self._images_by_seed(kind, target, own_images, label, plan, len(real), out), score)
        pictures = AttackImages(real, sets["protected"].images[0] if is_protected else None, sets["unprotected"].images[0])
        # The baselines: real training images of the class, the best case, and the client's images of other classes.
        sets |= {"floor": _ImageSet((floor,)), "other classes": _ImageSet(_images_of_other_classes(own_images, label, len(real)))}
        result = self._measure(config, task, own_images, label, plan, real, sets)
        write_text(out / "attack.json", json.dumps(result.to_dict(), indent=2) + "\n")
        return result, pictures

    def _warn_if_label_held(self, own_images: Samples, label: int) -> None:
        """Warn if the attacking client itself holds images of ``label``, since the attack then learns from them too."""
        if int((own_images.targets == label).sum()) > 0:
            self.observer.warn(
                f"client {CURIOUS_CLIENT}, the attacker, holds images of label {label} itself, so the attack learns from these too. To see "
                f"what it learns from other clients alone, attack a run with data.private_label={label}"
            )

    def _measure(
        self,
        config: RunConfig,
        task: Dataset,
        own_images: Samples,
        label: int,
        plan: AttackPlan,
        real: Tensor,
        sets: dict[Kind, _ImageSet],
    ) -> RunAttack:
        """Return the result of the attack: how close each of the image ``sets`` is to the ``real`` images of the class."""
        classifier = trained_classifier(task, progress=_phase_progress(self.progress, "classifier to measure with"))
        extractor = inception() or classifier.extractor()  # published distances use Inception, whose weights may not be here
        epsilon, budget = config.mechanism.epsilon_and_budget or (None, "unit")
        return RunAttack(
            name=config.name,
            label=label,
            mechanism=config.mechanism.name,
            epsilon=epsilon,
            budget=budget,
            own_images=len(own_images),
            own_of_label=int((own_images.targets == label).sum()),
            plan=plan,
            extractor=extractor.name,
            features=extractor.features,
            classifier=classifier.name,
            classifier_accuracy=classifier.accuracy,
            data=f"{task.name} {task.fingerprint}",
            rows=tuple(_attack_row(kind, images, real, label, extractor, classifier) for kind, images in sets.items() if images.images),
        )

    def _unprotected_model(self, config: RunConfig) -> tuple[Tensor, float]:
        """Return the last global model of the same run without noise, and its accuracy."""
        runner = Runner(self.data_dir, self.device, self.observer, lambda path, result: None)  # the result is read from the run's folder
        _, weights, accuracy = finished_run(runner.baseline(config))
        return weights, accuracy

    def _images_by_seed(
        self, kind: Kind, target: Target, own_images: Samples, label: int, plan: AttackPlan, count: int, out: Path
    ) -> tuple[Tensor, ...]:
        """Return ``count`` images of ``label`` for each seed of ``plan``. Images that are stored already are not made again."""
        images = []
        for seed in plan.seeds:
            key = _content_key(target, own_images, label, plan.gan, seed, count)
            # Runs that differ only in their protection share the unprotected model, so its images are stored in a common folder.
            shared = cache_dir() / "reconstructions" / f"{key}.safetensors"
            path = shared if kind == "unprotected" else out / "images" / f"{kind}-{seed}.safetensors"
            stored = _stored_images(path, key)
            if stored is None:
                phase = f"attack on the {kind} model" + (f", seed {seed}" if len(plan.seeds) > 1 else "")
                report = _phase_progress(self.progress, phase)
                _, stored = attack(target, own_images, label, count, plan.gan, seed, report)
                path.parent.mkdir(parents=True, exist_ok=True)
                with replace_atomically(path) as temporary:
                    save_file({"images": stored}, temporary, {"key": key})
            images.append(stored)
        return tuple(images)


def versions() -> dict[str, str]:
    """Return the versions of the software that the figures were made with."""
    return {"ldpfl": ldpfl.__version__, "torch": torch.__version__}


def finished_run(folder: RunFolder) -> tuple[RunConfig, Tensor, float]:
    """Return the config, the last global weights (d,) and the last accuracy of a finished run.

    Raises:
        ConfigError: there is no run, or it is not finished.
    """
    config = folder.config()
    if folder.kind() is run_folder.Kind.OWN_APP:
        raise ConfigError(f"{folder.path} was run by a custom app on Flower, whose data only the app knows: attack a simulation instead")
    last, result = folder.checkpoint_needed(), folder.result()
    if last is None or result is None:
        done = last.state.round if last else 0
        raise ConfigError(
            f"the run in {folder.path} has finished {done} of {counted(config.training.rounds, 'round')}: "
            f"finish it with ldpfl run --resume --out {folder.path}, then attack it"
        )
    return config, last.state.model, float(result["score"])


def attack_folder(folder: RunFolder, label: int | None) -> Path:
    """Return the default output folder of an attack on the run in ``folder``: ``attacks/gan-LABEL`` in it.

    Raises:
        ConfigError: there is no run.
    """
    return folder.path / "attacks" / f"gan-{folder.config().data.private_label if label is None else label}"


def label_of(plan: AttackPlan, config: RunConfig) -> int:
    """Return the class to reconstruct: the plan's, or else the class that client 0 does not hold in this run.

    Raises:
        ConfigError: there is neither.
    """
    if plan.label is not None:
        return plan.label
    if config.data.private_label == "none":
        raise ConfigError(
            "data.private_label is none, so client 0, the attacker, may have every class: name the class to reconstruct with --label L"
        )
    return config.data.private_label


def _check_class(label: int, task: Dataset) -> None:
    """Raise a :class:`ConfigError` unless ``label`` is a class of the data set."""
    if not 0 <= label < task.outputs:
        raise ConfigError(f"{task.name} has no label {label}: give --label from 0 to {task.outputs - 1}")


def rebuilt_federation(folder: RunFolder, config: RunConfig, task: Dataset, device: torch.device) -> Federation:
    """Build the run's federation anew. Raise a :class:`ConfigError` if ``task`` is not the data that the run was made with."""
    if config.data.at_nodes:
        raise ConfigError(
            f"the rows of the clients of {folder.path} are at their nodes, so its training cannot be repeated here: run a simulation of "
            "the same settings on other data, with --data, and audit or attack that"
        )
    federation, start = build(config, task, device, secret=folder.secret(), measured=folder.measured_encoder())
    last = folder.checkpoint()
    recorded = last.origin if last else ""
    # An origin is "DATA on DEVICE". The device may differ.
    recorded_data, loaded_data = (origin.rpartition(" on ")[0] for origin in (recorded, start.origin))
    if recorded_data != loaded_data:
        raise ConfigError(
            f"{folder.path} was run on {recorded_data}, but the data loaded now are {loaded_data}: give the --data-dir that it was run with"
        )
    return federation


def _own_images(federation: Federation) -> Samples:
    """Return the attacking client's samples."""
    images = federation.task.data
    return images.take(torch.from_numpy(federation.samples[CURIOUS_CLIENT]).to(images.tensor.device))


def _target_of_attack(federation: Federation, task: Dataset, weights: Tensor) -> Target:
    """Return the global model with these ``weights``, as the attacking client gets it."""
    return Target(federation.task.module, federation.task.layout, weights, task.outputs, task.mean, task.std)


def _public_images(task: Dataset, label: int, most: int) -> tuple[Tensor, Tensor]:
    """Return two equally large sets of real images of ``label``: test images to compare with, and train images as the best case."""
    test_images, train_images = (split.tensor[split.targets == label] for split in (task.test, task.train))
    count = min(most, len(test_images), len(train_images))
    if count < FEWEST_IMAGES:
        raise DataError(
            f"the comparison needs at least {FEWEST_IMAGES} images of label {label}, but {task.name} has {count}: give another --label"
        )
    return test_images[:count], train_images[:count]


def _images_of_other_classes(own_images: Samples, label: int, most: int) -> tuple[Tensor, ...]:
    """Return at most ``most`` of the attacking client's images of other classes, evenly spaced; empty if it holds too few."""
    pixels = own_images.tensor[own_images.targets != label].cpu()
    index = torch.linspace(0, len(pixels) - 1, min(most, len(pixels))).long()
    return (pixels[index],) if len(index) >= FEWEST_IMAGES else ()


def _attack_row(
    kind: Kind, image_set: _ImageSet, real: Tensor, label: int, extractor: Extractor, classifier: TrainedClassifier
) -> AttackRow:
    """Return the table's line for the images of one ``kind``, with the accuracy of the model that they were drawn from.

    For the images of each seed, it has their distance to the ``real`` ones, and the share of them that is recognised as ``label``.
    """
    distances = tuple(frechet_distance(extractor, real, images) for images in image_set.images)
    shares = tuple(classifier.share(images, label) for images in image_set.images)
    return AttackRow(kind, distances, shares, image_set.accuracy)


def _phase_progress(progress: PhaseProgress, phase: str) -> Callable[[int, int], None]:
    """Return ``progress`` as a function of (done, total) within one ``phase``."""
    return lambda done, total: progress(phase, done, total)


def _content_key(target: Target, own_images: Samples, label: int, config: GanConfig, seed: int, count: int) -> str:
    """Return a digest of everything that the generated images depend on, under which they are stored.

    The code of a model that is named by its import path is not in the digest.
    """
    digest = hashlib.sha256()
    for tensor in (target.weights, own_images.tensor, own_images.targets):
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    facts = (label, asdict(config), seed, count, ldpfl.__version__, torch.__version__, own_images.tensor.device.type)
    digest.update(repr(facts).encode())
    return digest.hexdigest()


def _stored_images(path: Path, key: str) -> Tensor | None:
    """Return the images that an earlier call stored under the same key; None if there are none, or they are damaged."""
    try:
        with safe_open(path, framework="pt") as handle:
            return handle.get_tensor("images") if handle.metadata()["key"] == key else None
    except (SafetensorError, OSError, KeyError, TypeError):
        return None
