"""Where training begins on a table, by what was measured of the target, and how long gradients are there."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import ldpfl
from grids import each
from ldpfl import ConfigError
from ldpfl.data.from_table import dataset_from_table
from ldpfl.data.settings import DataConfig
from ldpfl.data.tables import table_from_frame
from ldpfl.experiments.build import build, mechanism_of, model_of
from ldpfl.experiments.calibration import resolve_settings
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.dataset import CallerObjects, Description, load_dataset, target_kind_of
from ldpfl.experiments.recipes import load_recipe
from ldpfl.experiments.table_rules import choose_automatic_settings, clip_norm_for
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.models.layout import ParameterLayout, called_with
from ldpfl.tasks.outcomes import class_probabilities
from pretrained_models import vit

FRAME = pd.DataFrame(
    {"age": np.arange(20.0), "y": np.arange(20) % 4, "died": np.arange(20) % 2, "well": 1 - np.arange(20) % 2, "ward": ["a", "b"] * 10}
)


def config_of(task: str, model: str, target: Any = "y", **data: Any) -> RunConfig:
    noise = ["privacy.target_epsilon='off'", "mechanism.noise_multiplier=1.0", "mechanism.clip_norm=1.0", "data.buckets=4"]
    config = load_recipe("own", [*noise, f"task.name={task}", f"model.name={model}"])
    return config.model_copy(update={"data": DataConfig(path="rows.csv", target=target, columns=["age", "ward"], buckets=4, **data)})


def begun(task: str, model: str, shares: list[float], target: Any = "y", **data_settings: Any) -> Tensor:
    """Return the outputs (N, outputs) with which training begins, for any rows."""
    config = config_of(task, model, target, **data_settings)
    data = Description.of(dataset_from_table("x", table_from_frame(FRAME), table_from_frame(FRAME), config.data, target_kind_of(config)))
    module = model_of(config, data)
    layout = ParameterLayout.from_module(module)
    weights = layout.flatten({name: part.detach() for name, part in module.named_parameters()})
    ranges = LayerRanges(torch.zeros(1), torch.ones(1), (layout.dimension,))
    start = choose_automatic_settings(config, data, module, layout, weights, mechanism_of(config, ranges), 4, shares)
    rows = torch.randn(30, data.encoder.width if data.encoder else 0, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return torch.as_tensor(torch.func.functional_call(module, layout.unflatten(start.weights), (rows,)))


@pytest.mark.parametrize("model", ["logistic-regression", "mlp"])
def test_training_begins_at_what_was_measured(model: str) -> None:
    """Whatever a row holds: hidden units of an MLP cancel, each by another."""
    shares = [0.1, 0.2, 0.3, 0.4]
    expected = torch.tensor(shares).expand(30, 4)
    close: Any = {"rtol": 0.0, "atol": 1e-5}
    torch.testing.assert_close(begun("classification", model, shares).softmax(dim=1), expected, **close)
    torch.testing.assert_close(class_probabilities(begun("ordinal", model, shares)), expected, **close)
    labels = begun("multilabel", model, [0.1, 0.2], ["died", "well"]).sigmoid()
    torch.testing.assert_close(labels, torch.tensor([0.1, 0.2]).expand(30, 2), **close)
    torch.testing.assert_close(begun("poisson", model, [0.7]), torch.full((30, 1), log(0.7)), **close)
    hazards = [0.05 * place for place in range(1, 9)]
    torch.testing.assert_close(begun("survival", model, hazards, ["y", "died"]).sigmoid(), torch.tensor(hazards).expand(30, 8), **close)


def test_public_shares_are_as_many_as_there_are_outputs() -> None:
    """Training begins at them, whatever was measured; or at equal ones."""
    torch.testing.assert_close(begun("classification", "linear", []).softmax(dim=1), torch.full((30, 4), 0.25))
    stated = begun("classification", "logistic-regression", [0.1, 0.2, 0.3, 0.4], class_shares=[0.7, 0.1, 0.1, 0.1]).softmax(dim=1)
    torch.testing.assert_close(stated, torch.tensor([0.7, 0.1, 0.1, 0.1]).expand(30, 4))
    with pytest.raises(ConfigError, match=r"data.class_shares has 2 values, and this target needs 4"):
        begun("classification", "logistic-regression", [], class_shares=[0.5, 0.5])


def test_public_shares_of_classes_add_up_to_1() -> None:
    for task in ("classification", "ordinal"):
        with pytest.raises(ConfigError, match=r"class_shares = \[0.02, 0.5, 0.1, 0.1\] adds up to 0.72, .*as in \[0.9, 0.1\] for two"):
            begun(task, "logistic-regression", [], class_shares=[0.02, 0.5, 0.1, 0.1])
    begun("classification", "logistic-regression", [], class_shares=[0.33, 0.33, 0.33, 0.001])  # rounded
    begun("survival", "logistic-regression", [], ["y", "died"], class_shares=[0.1] * 8)  # hazards


SHARES = [0.7, 0.2, 0.1]
IMAGES = ("two-layer-cnn", "small-vgg", "resnet8-gn", "mlp", "logistic-regression")
TEXTS = ("embedding-bag", "gru", "lstm", "transformer")
FIXED = ["training.server_learning_rate=0.5", "training.server_weight_decay=0.0"]
UPDATES = ["mechanism.name=dp-fedavg", "mechanism.perturbed=update"]


def shift_of_start(model: str, *more: str, given: nn.Module | None = None, text: bool = False) -> Tensor:
    """Return by how much outputs (N, 3) at the start of training are larger than those of the same weights with a last layer of 0."""
    noise = ["privacy.target_epsilon='off'", "mechanism.noise_multiplier=1.0", "mechanism.clip_norm=1.0"]
    config = load_recipe("own", [*noise, f"model.name='{model}'", f"data.class_shares={SHARES}", *more])
    frame = pd.DataFrame({"note": ["no fever", "some fever", "well again"] * 8, "y": ["a", "b", "c"] * 8})
    if text:
        config = config.model_copy(update={"data": DataConfig(path="rows.csv", target="y", text="note", length=6, class_shares=SHARES)})
        data = Description.of(dataset_from_table("x", table_from_frame(frame), table_from_frame(frame), config.data, "class"))
        rows = torch.randint(1, data.vocabulary or 2, (8, 6), generator=torch.Generator().manual_seed(0))
    else:
        data, rows = Description((1, 28, 28), 3, records=1000), torch.randn(8, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    module = model_of(config, data, given).eval()
    layout = ParameterLayout.from_module(module)
    weights = layout.flatten({name: part.detach() for name, part in module.named_parameters() if part.requires_grad})
    ranges = LayerRanges(torch.zeros(1), torch.ones(1), (layout.dimension,))
    start = choose_automatic_settings(config, data, module, layout, weights, mechanism_of(config, ranges), 4, ()).weights
    without = start.clone()
    (last,) = [name for name in layout.names if layout.slices[name].stop == layout.dimension]
    without[layout.slices[last]] = 0
    with torch.no_grad():
        outputs, of_zero = (called_with(module, layout.unflatten(one), (rows,)) for one in (start, without))
    return torch.as_tensor(outputs - of_zero)


@each(("model", "settings"), [*((model, FIXED) for model in (*IMAGES, *TEXTS)), ("mlp", []), ("gru", []), ("gru", UPDATES)])
def test_training_of_each_model_with_a_bias_begins_at_stated_shares(model: str, settings: list[str]) -> None:
    shift = shift_of_start(model, *settings, text=model in TEXTS)
    torch.testing.assert_close(shift.softmax(dim=1), torch.tensor(SHARES).expand(8, 3), rtol=0, atol=1e-5)


@each("adapter", ("none", "head", "lora"))
def test_training_of_a_pretrained_model_begins_at_stated_shares(adapter: str) -> None:
    shift = shift_of_start(
        "given", *FIXED, f"model.adapter={adapter}", "model.adapter_modules=['projection']", "model.mend=true", given=vit()
    )
    torch.testing.assert_close(shift.softmax(dim=1), torch.tensor(SHARES).expand(8, 3), rtol=0, atol=1e-5)


def test_shares_are_refused_where_no_bias_can_hold_them() -> None:
    with pytest.raises(ConfigError, match=r"would have no effect: .* model 'linear' has none .* such as logistic-regression"):
        shift_of_start("linear")
    own = nn.Sequential(nn.Flatten(), nn.Linear(784, 3))
    with pytest.raises(ConfigError, match=r"model 'given' has none .* set that bias in your model to the logarithms of the shares"):
        shift_of_start("given", given=own)
    with pytest.raises(ConfigError, match=r"task.name is 'regression': omit it"):
        begun("regression", "mlp", [], class_shares=[0.5])
    shift_of_start("linear", "task.class_weights=balanced")  # which needs the shares


def test_the_rare_class_is_cut_less_where_there_is_little_noise() -> None:
    """A longer norm costs noise, which few rows notice and many do not; what decides is the number of rows, which is public."""
    config = config_of("classification", "logistic-regression", "died")
    data = Description.of(dataset_from_table("x", table_from_frame(FRAME), table_from_frame(FRAME), config.data, target_kind_of(config)))
    few, many = (clip_norm_for(config, replace(data, records=records), model_of(config, data)) for records in (1_000, 100_000))
    assert many / few == pytest.approx(1.1 / 0.85, rel=0.01)


def test_a_person_s_gradient_is_clipped_to_a_norm_between_those_for_one_row_and_for_all() -> None:
    """By the largest number of rows that count of a person, which is public, and not by how many a person has."""
    config = config_of("classification", "logistic-regression", "died")
    data = Description.of(dataset_from_table("x", table_from_frame(FRAME), table_from_frame(FRAME), config.data, target_kind_of(config)))
    of_rows, of_one, of_sixteen = (
        clip_norm_for(config.model_copy(update={"data": config.data.model_copy(update=own)}), data, model_of(config, data))
        for own in ({}, {"person": "patient", "person_rows": 1}, {"person": "patient", "person_rows": 16})
    )
    assert of_rows == of_one
    assert of_rows / of_sixteen == pytest.approx(2, rel=0.01)


def test_another_seed_is_another_mlp() -> None:
    config = config_of("classification", "mlp")
    data = Description.of(dataset_from_table("x", table_from_frame(FRAME), table_from_frame(FRAME), config.data, "class"))
    norms = {clip_norm_for(config.model_copy(update={"seed": seed}), data, model_of(config, data)) for seed in (1, 1, 2)}
    assert len(norms) == 2
    assert all(exp(-1) < norm / 12 < exp(1) for norm in norms)  # of 64 units whose last weights are 1


@pytest.mark.parametrize("options", [{"hidden": 1}, {"depth": 2}])
def test_an_mlp_that_has_no_pairs_begins_as_it_is(options: dict[str, Any]) -> None:
    """In a deeper one pairs would keep the first layer from learning: its gradient is not 0."""
    config = config_of("regression", "mlp")
    config = config.model_copy(update={"model": config.model.model_copy(update={"options": options})})
    data = Description.of(dataset_from_table("x", table_from_frame(FRAME), table_from_frame(FRAME), config.data, "number"))
    module = model_of(config, data)
    layout = ParameterLayout.from_module(module)
    weights = layout.flatten({name: part.detach() for name, part in module.named_parameters()})
    mechanism = mechanism_of(config, LayerRanges(torch.zeros(1), torch.ones(1), (layout.dimension,)))
    assert torch.equal(choose_automatic_settings(config, data, module, layout, weights, mechanism, 4, ()).weights, weights)


@pytest.mark.slow
@pytest.mark.thorough
def test_an_mlp_s_mean_risk_is_about_the_share_of_a_rare_class() -> None:
    """Within 30 %; four seeds gave 0.90 to 1.03 of it, and usual weights 0.19 to 0.24."""
    generator = np.random.default_rng(1)
    frame = pd.DataFrame({name: generator.normal(size=2000) for name in ("a", "b", "c", "d")})
    frame["word"] = generator.choice(list("uvxyz"), 2000)
    frame["ill"] = np.where(generator.random(2000) < 1 / (1 + np.exp(3.3 - frame["a"])), "yes", "no")
    few = {"data.buckets": 32, "model.options": {"hidden": 32}}
    result = ldpfl.run(
        data=frame, target="ill", model="mlp", target_epsilon=8.0, count=4, seed=1, baseline=False, progress=False, settings=few
    )
    risks = result.predict(frame)["probability of yes"]
    assert 0.7 < risks.mean() / (frame["ill"] == "yes").mean() < 1.3
    assert np.corrcoef(risks.rank(), frame["a"].rank())[0, 1] > 0.6


def test_steps_on_texts_are_longer_where_there_is_less_noise_or_fewer_words() -> None:
    """A rate that does not know the model was a third of what is stable, so that training ended long before it had converged."""
    frame = pd.DataFrame({"text": [f"word{row % 40} and word{row % 7}" for row in range(400)], "y": [row % 2 for row in range(400)]})
    given = CallerObjects(frame)

    def rate(noise: float, vocabulary: int) -> float:
        settings = {
            "data.text": "text",
            "data.vocabulary": vocabulary,
            "privacy.target_epsilon": "off",
            "mechanism.noise_multiplier": noise,
        }
        named = {
            "data.name": "given",
            "data.target": "y",
            "model.name": "embedding-bag",
            "clients.count": 4,
            "privacy.target_epsilon": "off",
        }
        config = resolve_settings(ldpfl.configure("own", {**settings, **named}), given)
        federation, _ = build(config, load_dataset(config, None, caller_objects=given), torch.device("cpu"), secret=1)
        return federation.optimiser.learning_rate

    little, more = rate(0.5, 256), rate(50.0, 256)
    assert little > more
    assert little > 2 * 0.6
    assert rate(50.0, 4096) <= more
