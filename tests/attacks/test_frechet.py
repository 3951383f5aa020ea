"""Distances against the closed form, and an extractor that is trained once and mended when its file is damaged."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm
from torch import Tensor, nn

from ldpfl.attacks import extractor as extractors
from ldpfl.attacks.extractor import ClassifierConfig, Extractor, inception, trained_classifier
from ldpfl.attacks.frechet import frechet_distance
from ldpfl.data import Dataset
from ldpfl.errors import DataError

pytestmark = pytest.mark.xdist_group("frechet")  # torchmetrics and scipy are loaded once a process, and take seconds

QUICK = ClassifierConfig(epochs=1)


class Pixels(nn.Module):
    """Features are the pixels themselves, on [0, 1]."""

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1).double() / 255


def pixels(features: int) -> Extractor:
    return Extractor("pixels", Pixels(), features)


def drawn(count: int, mean: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(count, 6, generator=generator) @ torch.randn(6, 6, generator=generator) * 12
    return (mixed + mean).clamp(0, 255).to(torch.uint8).view(count, 1, 2, 3)


@pytest.mark.slow
def test_the_distance_is_that_of_the_fitted_normal_distributions() -> None:
    first, second = drawn(400, 120, 1), drawn(300, 140, 2)
    a, b = (Pixels()(images).numpy() for images in (first, second))
    root = sqrtm(np.cov(a.T) @ np.cov(b.T)).real
    expected = np.sum((a.mean(0) - b.mean(0)) ** 2) + np.trace(np.cov(a.T) + np.cov(b.T) - 2 * root)
    distance = frechet_distance(pixels(6), first, second)
    assert distance.value == pytest.approx(expected, rel=1e-6)
    assert (distance.extractor, distance.features, distance.real, distance.other) == ("pixels", 6, 400, 300)


@pytest.mark.slow
def test_a_shift_alone_costs_its_square() -> None:
    first = drawn(200, 100, 3).clamp(0, 200)
    assert frechet_distance(pixels(6), first, first + 51).value == pytest.approx(6 * 0.2**2, abs=1e-6)


def test_equal_sets_are_at_distance_zero_and_order_does_not_matter() -> None:
    first, second = drawn(50, 120, 1), drawn(60, 130, 2)
    assert frechet_distance(pixels(6), first, first.flip(0)).value == pytest.approx(0, abs=1e-6)
    one_way, back = frechet_distance(pixels(6), first, second).value, frechet_distance(pixels(6), second, first).value
    assert one_way == pytest.approx(back, rel=1e-6)


def test_a_set_of_one_image_and_features_that_are_not_finite_are_refused() -> None:
    images = drawn(10, 120, 1)
    with pytest.raises(DataError, match="at least 2 images"):
        frechet_distance(pixels(6), images, images[:1])

    class Sick(Pixels):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images) * float("nan")

    with pytest.raises(DataError, match=r"features of .* contain NaN or infinity"):
        frechet_distance(Extractor("sick", Sick(), 6), images, images)


def files(cache: Path) -> list[Path]:
    return sorted((cache / "extractors").iterdir())


@pytest.mark.slow
@pytest.mark.thorough
def test_the_classifier_is_trained_once_and_the_same_on_every_machine_state(tiny_task: Dataset, cache: Path) -> None:
    steps: list[int] = []
    torch.manual_seed(1)
    first = trained_classifier(tiny_task, QUICK, lambda done, total: steps.append(total))
    (path,) = files(cache)
    written = path.read_bytes()
    assert len(steps) == 4  # 200 images in batches of 64

    again = trained_classifier(tiny_task, QUICK, lambda done, total: pytest.fail("trained again"))
    path.unlink()
    torch.manual_seed(2)
    anew = trained_classifier(tiny_task, QUICK)
    assert files(cache) == [path]
    assert path.read_bytes() == written
    for other in (again, anew):
        assert (other.name, other.accuracy) == (first.name, first.accuracy)
        assert isinstance(tiny_task.test.inputs, torch.Tensor)
        assert torch.equal(other.extractor().function(tiny_task.test.inputs), first.extractor().function(tiny_task.test.inputs))


@pytest.mark.parametrize("damage", ["cut", "emptied", "text", "wrong tensors"])
@pytest.mark.thorough_for("cut", "emptied")
@pytest.mark.slow
def test_a_damaged_file_is_replaced(tiny_task: Dataset, cache: Path, damage: str) -> None:
    trained_classifier(tiny_task, QUICK)
    (path,) = files(cache)
    sound = path.read_bytes()
    if damage == "wrong tensors":
        from safetensors.torch import save_file

        save_file({"features.0.weight": torch.zeros(1)}, path, {"accuracy": "0.5"})
    else:
        path.write_bytes({"cut": sound[:-100], "emptied": b"", "text": b"not a tensor"}[damage])
    trained_classifier(tiny_task, QUICK)
    assert path.read_bytes() == sound


@pytest.mark.slow
def test_settings_and_data_make_another_name(tiny_task: Dataset, cache: Path) -> None:
    first = trained_classifier(tiny_task, QUICK)
    assert trained_classifier(tiny_task, ClassifierConfig(epochs=1, seed=1)).name != first.name
    changed = Dataset(tiny_task.name, tiny_task.train, tiny_task.test, 10, tiny_task.mean, tiny_task.std, "another")
    assert trained_classifier(changed, QUICK).name != first.name
    assert len(files(cache)) == 3


@pytest.mark.slow
@pytest.mark.thorough
def test_the_classifier_recognises_and_its_features_separate(tiny_task: Dataset) -> None:
    classifier = trained_classifier(tiny_task)
    assert classifier.accuracy > 0.95
    of_one = tiny_task.test.tensor[tiny_task.test.targets == 3]
    assert classifier.share(of_one, 3) > 0.9
    assert classifier.share(of_one, 4) < 0.1
    train = {label: tiny_task.train.tensor[tiny_task.train.targets == label] for label in (3, 7)}
    near, far = (frechet_distance(classifier.extractor(), of_one, train[label]).value for label in (3, 7))
    assert near < far / 5


def test_inception_is_never_downloaded_and_a_foreign_file_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(extractors, "find_spec", lambda name: object())
    monkeypatch.setattr(torch, "load", lambda *arguments, **named: pytest.fail("opened"))
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda *arguments, **named: pytest.fail("downloaded"))
    assert inception() is None
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "weights-inception-2015-12-05-6726825d.pth").write_bytes(b"not the weights")
    assert inception() is None


@pytest.mark.slow
@pytest.mark.thorough
def test_torchmetrics_is_loaded_only_when_a_distance_is_computed() -> None:
    assert find_spec("torchmetrics")  # it is installed, so the line below means something
    code = "import sys, ldpfl.cli, ldpfl.attacks.frechet; sys.exit('torchmetrics' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
