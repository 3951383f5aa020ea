"""Models have the published sizes, hold nothing that would leave un-noised, and depend on their seed alone."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drawn_leaves import draw_pictures
from ldpfl import ParameterLayout, models, validate_module
from ldpfl.data.features.leaves import LeafFeatures
from ldpfl.errors import ConfigError, LdpflError, PrivacyError
from ldpfl.util.suggestions import nearest

OF_TEXTS = ("embedding-bag", "gru", "lstm", "transformer")
GRAY, COLOUR = (1, 28, 28), (3, 32, 32)


def weights_of(module: nn.Module) -> int:
    return ParameterLayout.from_module(module).dimension


def test_the_two_layer_cnn_has_the_published_size() -> None:
    assert weights_of(models.create("two-layer-cnn", GRAY, 10, seed=0)) == 21_840


def test_the_leaf_network_has_the_size_that_its_docstring_gives() -> None:
    assert weights_of(models.create("leaf-network", COLOUR, 10, seed=0)) == 642_902


def test_resnet18_has_the_size_of_the_original_with_a_cifar_stem() -> None:
    layout = ParameterLayout.from_module(models.create("resnet18-gn", COLOUR, 10, seed=0))
    assert layout.dimension == 11_173_962
    assert len(layout.names) == 62


def test_resnet8_has_the_size_that_its_docstring_gives() -> None:
    assert weights_of(models.create("resnet8-gn", COLOUR, 10, seed=0)) == 78_042


def test_logistic_regression_is_one_linear_layer() -> None:
    assert weights_of(models.create("logistic-regression", GRAY, 10, seed=0)) == 28 * 28 * 10 + 10


@pytest.mark.parametrize("shape", [GRAY, COLOUR, (1, 20, 24)])
@pytest.mark.parametrize("name", [name for name in models.names() if name not in (*OF_TEXTS, "leaf-network")])
def test_forward_gives_a_logit_for_each_class(name: str, shape: tuple[int, int, int]) -> None:
    module = models.create(name, shape, 7, seed=0)
    logits = module(torch.zeros(2, *shape))
    assert logits.shape == (2, 7)
    assert bool(torch.isfinite(logits).all())


@pytest.mark.parametrize("name", models.names())
def test_every_model_can_be_trained_privately(name: str) -> None:
    module = models.create(name, (12,) if name in OF_TEXTS else COLOUR, 10, seed=0, vocabulary=50 if name in OF_TEXTS else None)
    validate_module(module)
    assert list(module.buffers()) == []


@pytest.mark.parametrize("name", ["two-layer-cnn", "small-vgg", "logistic-regression"])
def test_the_seed_decides_the_weights(name: str) -> None:
    first, again, other = (models.create(name, COLOUR, 10, seed=seed).state_dict() for seed in (5, 5, 6))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_building_a_model_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    models.create("two-layer-cnn", GRAY, 10, seed=1)
    models.create("torch.nn:Linear", GRAY, 10, seed=1, options={"in_features": 3, "out_features": 2})
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("name", "shape"), [("two-layer-cnn", (1, 15, 28)), ("small-vgg", (3, 32, 7))])
def test_images_too_small_for_a_model_are_refused(name: str, shape: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="too small"):
        models.create(name, shape, 10, seed=0)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'two-layer-cnn'.*package\.module:Class"):
        models.create("two-layer-ccn", GRAY, 10, seed=0)
    assert nearest("SBP", ["age", "dbp", "sbp"]) == "sbp"


def test_a_model_by_import_path_gets_its_options_and_its_seed() -> None:
    options = {"in_features": 3, "out_features": 2, "bias": False}
    first, again = (models.create("torch.nn:Linear", GRAY, 10, seed=4, options=options) for _ in range(2))
    assert isinstance(first, nn.Linear)
    assert first.bias is None
    assert torch.equal(first.weight, again.weight)


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("no_such_package.here:Model", {}),
        ("torch.nn:NoSuchLayer", {}),
        ("torch.nn:Linear", {"width": 3}),
        ("torch.nn:Linear", {}),
        ("collections:OrderedDict", {}),
        ("torch.nn:", {}),
        (":Model", {}),
        ("torch.nn:GroupNorm", {"num_groups": 3, "num_channels": 4}),
    ],
)
def test_an_import_path_that_gives_no_model_is_refused_by_name(path: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        models.create(path, GRAY, 10, seed=0, options=options)
    assert repr(path) in str(caught.value)


NETS = """
import torch
from torch import nn

class Net(nn.Linear):
    def __init__(self, inputs, width=3, *, outputs):
        super().__init__(inputs, outputs)
        self.said = (inputs, outputs, width)

class Texts(nn.Embedding):
    def __init__(self, vocabulary, shape):
        super().__init__(vocabulary, *shape)

class Wide(nn.Linear):
    def __init__(self, inputs, breadth):
        super().__init__(inputs, breadth)

class Lazy(nn.Sequential):
    def __init__(self):
        super().__init__(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))

class Failing(nn.LazyLinear):
    def __init__(self):
        super().__init__(4)

    def forward(self, rows):
        raise ValueError("not such rows")
"""


@pytest.fixture
def nets(tmp_path: Path) -> str:
    (tmp_path / "nets.py").write_text(NETS, encoding="utf-8")
    return str(tmp_path / "nets.py")


def test_a_class_of_one_s_own_is_given_the_sizes_that_it_requires(nets: str) -> None:
    assert models.create(f"{nets}:Net", (7,), 2, seed=0).said == (7, 2, 3)
    assert models.create(f"{nets}:Net", (7,), 2, seed=0, options={"inputs": 9, "width": 5}).said == (9, 2, 5)
    texts = models.create(f"{nets}:Texts", (12,), 2, seed=0, vocabulary=50)
    assert isinstance(texts, nn.Embedding)
    assert (texts.num_embeddings, texts.embedding_dim) == (50, 12)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "Wide",
            r"requires breadth, but got no value: add --set model\.options\.breadth=VALUE, .*: inputs=7, outputs=2, shape=\(7,\)$",
        ),
        ("Texts", r"it requires vocabulary, but got no value"),
        ("Nett", r"cannot be built: .*nets\.py has no 'Nett': did you mean 'Net'\?"),
    ],
)
def test_what_a_class_of_one_s_own_lacks_is_said(nets: str, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        models.create(f"{nets}:{name}", (7,), 2, seed=0)
    assert "_ldpfl_" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_layers_of_a_class_take_their_sizes_from_the_data(nets: str) -> None:
    module = models.create(f"{nets}:Lazy", (7,), 2, seed=0)
    assert weights_of(module) == 7 * 4 + 4 + 4 * 2 + 2
    again = models.create(f"{nets}:Lazy", (7,), 2, seed=0)
    assert all(torch.equal(first, second) for first, second in zip(module.parameters(), again.parameters(), strict=True))
    with pytest.raises(ConfigError, match=r"failed on two samples of shape \(7,\) \(ValueError: not such rows\)"):
        models.create(f"{nets}:Failing", (7,), 2, seed=0)


def test_a_module_file_with_a_syntax_error_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_written_model.py").write_text("class Model(:\n", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(ConfigError, match="half_written_model"):
        models.create("half_written_model:Model", GRAY, 10, seed=0)


def test_an_imported_model_with_running_statistics_is_refused_with_a_remedy() -> None:
    """It is built, but its statistics of private data would leave un-noised."""
    module = models.create("torch.nn:BatchNorm2d", GRAY, 10, seed=0, options={"num_features": 4})
    with pytest.raises(PrivacyError, match="GroupNorm"):
        ParameterLayout.from_module(module)


def test_the_leaf_network_begins_as_the_features_of_its_name_and_trains_all_its_weights() -> None:
    """It sees every second patch, and the features all of them."""
    network, pictures = (
        models.create("leaf-network", COLOUR, 3, seed=0, options={"directions": 50}),
        draw_pictures(torch.Generator().manual_seed(1), 6),
    )
    with torch.no_grad():
        network.get_parameter("head.weight").copy_(torch.eye(50)[:3] / 10)  # outputs are the first three of the 50 features
    outputs = network((pictures.float() / 255 - 0.5) * 4)
    torch.testing.assert_close(outputs, LeafFeatures(50)(pictures)[:, :3], atol=0.1, rtol=0)
    torch.testing.assert_close(network((pictures.flip(-1).float() / 255 - 0.5) * 4), outputs, atol=1e-3, rtol=0)
    outputs.square().sum().backward()
    assert all(bool(torch.as_tensor(parameter.grad).any()) for parameter in network.parameters())


@pytest.mark.parametrize(
    ("shape", "options", "match"), [(GRAY, {}, "32 x 32 pixels.*28, 28"), (COLOUR, {"directions": 801}, "at most 800 directions, got 801")]
)
def test_the_leaf_network_says_what_it_needs(shape: tuple[int, ...], options: dict[str, int], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        models.create("leaf-network", shape, 10, seed=0, options=options)


def test_options_that_a_shipped_model_does_not_take_are_refused() -> None:
    """Silence would let a person believe that the setting had an effect."""
    with pytest.raises(LdpflError, match="width"):
        models.create("two-layer-cnn", GRAY, 10, seed=0, options={"width": 64})


def test_a_file_may_be_called_as_a_module_that_others_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "random.py").write_text("import torch\ndef net(**options): return torch.nn.Linear(4, 2)\n", encoding="utf-8")
    before = sys.modules["random"]
    made = models.create("random.py:net", (4,), 2, seed=0)
    assert isinstance(made, torch.nn.Linear)
    assert sys.modules["random"] is before


class Drawn(nn.Module):
    """Draws its weights in many ways, and slowly."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(3) + torch.rand(3) + torch.randint(9, (3,)) + torch.randperm(3) for _ in range(200))


@pytest.mark.thorough_except("mlp")
@pytest.mark.parametrize("name", ["mlp", f"{__name__}:Drawn"])
def test_threads_that_build_models_at_once_begin_with_the_weights_of_their_seeds(name: str) -> None:
    def weights(seed: int) -> Tensor:
        module = models.create(name, None if ":" in name else (64,), 10, seed=seed, options={} if ":" in name else {"depth": 20})
        return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])

    expected = [weights(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        drawing = pool.submit(lambda: [torch.randn(10) for _ in range(2000)])  # somebody else's draws, from the process's generator
        found = list(pool.map(weights, [*range(8)] * 4))
        drawing.result()
    assert all(torch.equal(own, expected[place % 8]) for place, own in enumerate(found))


def test_a_seed_gives_the_weights_that_pytorch_gives_after_it() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        expected = nn.Linear(12, 10)
    assert torch.equal(models.create("logistic-regression", (12,), 10, seed=5).state_dict()["1.weight"], expected.weight)
