"""Frozen encoders of transformers and timm as features: what they compute, what trains on them, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_features import dataset, images, silent

import ldpfl
from ldpfl.data.features import extracted, feature_map
from ldpfl.data.features.extraction import no_progress
from ldpfl.errors import ConfigError
from ldpfl.util.user_code import public_name

pytest.importorskip("transformers")
from pretrained_models import PLACES, save_base, texts, vit

SMALL: dict[str, Any] = {"progress": False, "baseline": False, "rounds": 1, "seed": 1, "length": 16, "clients": {"count": 2}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base") / "small-bert")


@pytest.fixture(scope="module")
def looker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an encoder of grey images."""
    folder = tmp_path_factory.mktemp("vit") / "small-vit"
    vit().save_pretrained(folder)
    shown = {"size": {"height": 28, "width": 28}, "image_mean": [0.5], "image_std": [0.25], "resample": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(shown))
    return folder


def test_a_text_s_features_are_the_mean_of_its_tokens_states_whatever_fills_it_up(base: Path) -> None:
    from transformers import AutoModel

    module = AutoModel.from_pretrained(base).eval()
    tokens = torch.randint(3, 30, (3, 9), generator=torch.Generator().manual_seed(1))
    filled = tokens.clone()
    filled[0, 4:] = -1
    found = feature_map(f"hf:{base}", {})(filled)
    for row, length in enumerate((4, 9, 9)):
        with torch.inference_mode():
            mean = module(input_ids=tokens[row : row + 1, :length]).last_hidden_state.mean(dim=1)[0]
        torch.testing.assert_close(found[row], mean / mean.norm(), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.thorough_except("privunit-g")
@pytest.mark.parametrize("mechanism", ["dp-sgd", "duchi", "privunit-g", "harmony"])
def test_a_head_trains_on_features_of_texts_under_each_kind_of_mechanism(mechanism: str, base: Path) -> None:
    chosen = {"mechanism.name": mechanism, "privacy.target_epsilon": "off"}
    result = ldpfl.run(data=texts(60), target="label", features=f"hf:{base}", model="linear", settings=chosen, **SMALL)
    (note,) = (said for said in result.to_dict()["caveats"] if "data.features" in said)
    assert f"hf:{base}" in note
    assert "count as public" in note


def test_an_image_s_features_are_the_mean_of_its_patches_states(looker: Path) -> None:
    from transformers import AutoModel

    pictures = images(3, (1, 28, 28))
    with torch.inference_mode():
        states = AutoModel.from_pretrained(looker).eval()(pixel_values=(pictures.float() / 255 - 0.5) / 0.25).last_hidden_state
    mean = states.mean(dim=1)
    chosen = feature_map(f"hf:{looker}", {})
    torch.testing.assert_close(chosen(pictures), mean / mean.norm(dim=1, keepdim=True), atol=1e-5, rtol=1e-4)
    assert chosen.shape((1, 28, 28)) == (32,)
    assert feature_map(f"hf:{shutil.copytree(looker, looker.parent / 'again')}", {}).digest == chosen.digest  # its pooler is drawn anew
    with pytest.raises(ConfigError, match=r"need images of 1 channels, got samples of shape \(3, 28, 28\)"):
        chosen.shape((3, 28, 28))


def test_features_are_kept_under_the_digest_of_their_weights(looker: Path, tmp_path: Path, cache: Path) -> None:
    first = extracted(dataset(), f"hf:{looker}", {}, silent)
    again = extracted(dataset(), f"hf:{looker}", {}, silent, lambda what, done, total: pytest.fail("computed again"))
    assert torch.equal(first.train.tensor, again.train.tensor)
    assert "small-vit" in first.notes[-1]
    (kept,) = (cache / "features").iterdir()
    other = feature_map(f"hf:{looker}", {}).digest
    with pytest.raises(ConfigError, match=f"the SHA-256 {other[:16]}, but this run uses weights with 0123"):
        extracted(dataset(), f"hf:{looker}", {}, silent, digest="0123")
    assert extracted(dataset(), f"hf:{looker}", {}, silent, digest=other).fingerprint == first.fingerprint
    assert kept.name.startswith("made-up-hf-")


def test_what_was_stopped_goes_on_where_it_was(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ldpfl.data.features.extraction._PART_SIZE", 16)
    whole = extracted(dataset(), "scattering", {}, silent, keep=False)
    assert not cache.exists()

    def stop(what: str, done: int, total: int) -> None:
        if done > 36:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        extracted(dataset(), "scattering", {}, silent, stop)
    parts = sorted((cache / "features").iterdir())
    assert [path.name.partition(".")[2] for path in parts] == ["train-0.part", "train-16.part"]
    steps: list[int] = []
    parts[1].write_bytes(b"damaged")
    found = extracted(dataset(), "scattering", {}, silent, lambda what, done, total: steps.append(done))
    assert torch.equal(found.train.tensor, whole.train.tensor)
    assert torch.equal(found.test.tensor, whole.test.tensor)
    assert steps[0] == 16
    assert steps[-1] == 60
    assert [path.suffix for path in (cache / "features").iterdir()] == [".safetensors"]


def without(pattern: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for path in folder.glob(pattern):
            path.unlink()

    return change


def of_more_layers(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 3}))


def with_another_padding(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": "[CLS]"}))


def as_it_is(folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "settings", "why"),
    [
        (without("*.safetensors"), {}, r"has no weights \(\*\.safetensors\)"),
        (without("tokenizer*"), {}, "contains no tokenizer"),
        (without("config.json"), {}, r"has no config\.json"),
        (of_more_layers, {}, r"do not fit its config\.json: 16 parameters are absent or of another shape, such as encoder\.layer\.2"),
        (with_another_padding, {}, "pads texts with token 2, but the model expects token 0"),
        (as_it_is, {"length": PLACES + 1}, f"data.length is {PLACES + 1} tokens, but the model takes {PLACES} in all"),
    ],
)
def test_each_mistake_with_an_encoder_of_texts_is_one_error(
    change: Callable[[Path], None], settings: dict[str, Any], why: str, base: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "changed"))
    change(folder)
    with pytest.raises(ConfigError, match=why):
        ldpfl.run(data=texts(40), target="label", features=f"hf:{folder}", model="linear", **SMALL | settings)


def test_features_that_are_not_there_are_named_before_data_are_read(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ldpfl.experiments.dataset.load_user_data", lambda *a: pytest.fail("data were read"))
    for features, model, why in (
        ("hf:nobody/nothing", "linear", "nor a model in the hub's cache on this machine: download it with `hf download nobody/nothing`"),
        ("hf:/no/such/folder", "linear", "there is no folder /no/such/folder"),
        (f"hf:{base}", f"hf:{base}", "or train a head on the vectors, with model.name = 'linear'"),
    ):
        with pytest.raises(ConfigError, match=why):
            ldpfl.run(data=texts(40), target="label", features=features, model=model, settings={"model.licence": "own"}, **SMALL)


def test_an_encoder_of_images_says_how_it_is_shown_them(looker: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(looker, tmp_path / "changed"))
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no usable preprocessor_config\.json"):
        feature_map(f"hf:{folder}", {}).load()


def test_images_are_no_texts(base: Path, looker: Path) -> None:
    with pytest.raises(ConfigError, match="are made from texts, but these samples are not"):
        extracted(dataset(), f"hf:{base}", {}, silent)
    with pytest.raises(ConfigError, match=r"made from images, uint8 arrays of the shape .* but these samples are not images"):
        ldpfl.run(data=texts(40), target="label", text="text", features=f"hf:{looker}", model="linear", **SMALL)


def test_folders_are_not_told() -> None:
    assert public_name("timm:/home/me/net") == "timm:net"
    assert public_name("timm:resnet18.a1_in1k") == "timm:resnet18.a1_in1k"


def test_timm_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(ConfigError, match=r"pip install 'ldpfl\[timm\]'"):
        feature_map("timm:resnet18", {}).load()


@pytest.fixture(scope="module")
def timm() -> Any:
    try:
        import timm
    except Exception as error:  # such as a torchvision of another PyTorch
        pytest.skip(f"timm cannot be imported: {error}")
    return timm


@pytest.fixture(scope="module")
def network(timm: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A small network, and the folder that it was saved in."""
    folder = tmp_path_factory.mktemp("timm") / "small"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = timm.create_model("test_efficientnet", pretrained=False, num_classes=0).eval()
    timm.models.save_for_hf(made, folder, safe_serialization=True)
    return made, folder


def test_timm_s_features_are_those_of_its_network(network: tuple[Any, Path], timm: Any, cache: Path) -> None:
    made, folder = network
    pictures = images(3, (3, 160, 160))
    config = timm.data.resolve_data_config(pretrained_cfg=made.pretrained_cfg)
    assert config["input_size"] == (3, 160, 160)
    mean, std = (torch.tensor(config[name]).view(-1, 1, 1) for name in ("mean", "std"))
    with torch.inference_mode():
        vectors = made((pictures.float() / 255 - mean) / std)
    chosen = feature_map(f"timm:{folder}", {})
    torch.testing.assert_close(chosen(pictures), vectors / vectors.norm(dim=1, keepdim=True), atol=1e-5, rtol=1e-4)
    weights = str(folder / "model.safetensors")
    named = feature_map("timm:test_efficientnet", {"weights": weights, "size": 96})
    assert named.digest == chosen.digest
    assert named.shape((1, 32, 32)) == tuple(vectors.shape[1:])
    found = extracted(dataset((3, 32, 32)), f"timm:{folder}", {"size": 64}, silent, no_progress)
    assert f"timm:{folder}" in found.notes[-1]
    assert len([*(cache / "features").iterdir()]) == 1


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("resnet_18", {}, "timm has no model 'resnet_18': did you mean 'resnet18'"),
        ("qqqqqq", {}, r"timm has no model 'qqqqqq': timm\.list_models"),
        ("resnet18.a1_in1", {}, "timm has no weights 'resnet18.a1_in1': did you mean 'resnet18.a1_in1k'"),
        ("resnet18.a1_in1k", {}, r"not on this machine, .* get them by `hf download timm/resnet18.a1_in1k model.safetensors`"),
        ("resnet18", {"weights": "none.bin"}, r"expected a file of weights, NAME\.safetensors"),
        ("resnet18", {"wieghts": "none.bin"}, "did you mean 'weights'"),
        ("/no/such/folder", {}, r"lacks config\.json or model\.safetensors"),
    ],
)
def test_what_timm_does_not_have_is_refused(name: str, options: dict[str, Any], why: str, timm: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "/no/such/cache")
    with pytest.raises(ConfigError, match=why):
        feature_map(f"timm:{name}", options).load()


def test_weights_of_another_network_and_other_channels_are_refused(network: tuple[Any, Path]) -> None:
    weights = {"weights": str(network[1] / "model.safetensors")}
    with pytest.raises(ConfigError, match="features timm:resnet18 cannot be loaded"):
        feature_map("timm:resnet18", weights).load()
    with pytest.raises(ConfigError, match=r"need images of 3 or 1 channels, got samples of shape \(4, 32, 32\)"):
        feature_map("timm:test_efficientnet", weights).shape((4, 32, 32))
