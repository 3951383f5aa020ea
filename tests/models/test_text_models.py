"""Models of texts: what stands behind a text, and after a place, changes nothing; many clients at once train like one after another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ldpfl import ConfigError, ParameterLayout, models, tasks
from ldpfl.data import Samples
from ldpfl.simulation import BatchSchedule, LocalTask, LoopTrainer, VectorizedTrainer
from ldpfl.simulation.gradients import GradientTrainer
from ldpfl.simulation.local_steps import LocalOptimiser

VOCABULARY = 30


def made(name: str, *, by_place: bool = False, outputs: int = 3) -> nn.Module:
    return models.create(name, (8,), outputs, seed=1, vocabulary=VOCABULARY, by_place=by_place)


def tokens(count: int, length: int = 8) -> Tensor:
    return torch.randint(1, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", ["embedding-bag", "transformer"])
def test_what_stands_behind_a_text_changes_nothing(name: str) -> None:
    module, text = made(name), tokens(4)
    longer = torch.cat([text, torch.zeros(4, 3, dtype=torch.int64)], dim=1)
    torch.testing.assert_close(module(text), module(longer))
    assert bool(torch.isfinite(module(torch.zeros_like(text))).all())  # a text without any token


@pytest.mark.parametrize("name", ["gru", "lstm", "transformer"])
def test_a_language_model_knows_nothing_of_what_comes(name: str) -> None:
    module, text = made(name, by_place=True, outputs=VOCABULARY), tokens(4)
    other = text.clone()
    other[:, 5:] = tokens(4)[:, :3]
    found, changed = module(text), module(other)
    assert found.shape == (4, 8, VOCABULARY)
    torch.testing.assert_close(found[:, :5], changed[:, :5])
    assert not torch.allclose(found[:, 5:], changed[:, 5:])


def test_the_gru_is_pytorch_s() -> None:
    module = made("gru", by_place=True)
    theirs = nn.GRU(32, 64, batch_first=True)
    ours = dict(module.named_parameters())
    theirs.load_state_dict(
        {
            "weight_ih_l0": ours["from_input.weight"],
            "weight_hh_l0": ours["from_state.weight"],
            "bias_ih_l0": ours["from_input.bias"],
            "bias_hh_l0": ours["from_state.bias"],
        }
    )
    text = tokens(4)
    expected = torch.nn.functional.linear(theirs(module.get_submodule("embedding")(text))[0], ours["head.weight"], ours["head.bias"])
    torch.testing.assert_close(module(text), expected)


@pytest.mark.parametrize("name", ["embedding-bag", "gru", "transformer"])
def test_many_clients_at_once_train_like_one_after_another(name: str) -> None:
    module = made(name)
    layout = ParameterLayout.from_module(module)
    weights = layout.flatten({own: p.detach() for own, p in module.named_parameters()})
    samples = Samples(tokens(12), torch.arange(12) % 3)
    task = LocalTask(module, layout, samples, (), (), LocalOptimiser(0.1), task=tasks.create("classification", 3))
    schedule = BatchSchedule(torch.arange(12).view(3, 2, 2), torch.ones(3, 2, 2))
    at_once, alone = (trainer.train(weights, schedule) for trainer in (VectorizedTrainer(task), LoopTrainer(task)))
    torch.testing.assert_close(at_once, alone, atol=1e-5, rtol=1e-4)
    whole = BatchSchedule(schedule.index.view(3, 1, 4), torch.ones(3, 1, 4))
    torch.testing.assert_close(GradientTrainer(task).train(weights, whole), GradientTrainer(task, at_once=False).train(weights, whole))


def test_models_are_for_their_own_kind_of_samples() -> None:
    for name, vocabulary, said in (
        ("gru", None, "is for texts"),
        ("mlp", 30, r"takes neither texts nor .* set model\.name \(--model\) to one of embedding-bag"),
        ("two-layer-cnn", None, "takes images"),
    ):
        with pytest.raises(ConfigError, match=said):
            models.create(name, (8,), 3, seed=0, vocabulary=vocabulary)
    with pytest.raises(ConfigError, match="ignores the order of tokens"):
        made("embedding-bag", by_place=True)
    with pytest.raises(ConfigError, match="its option longest is 4"):
        models.create("transformer", (8,), 3, seed=0, vocabulary=9, options={"longest": 4})(tokens(1) % 9)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("mlp", {"hiden": 3}, "did you mean 'hidden'"),
        ("mlp", {"hidden": 0}, "whole number"),
        ("linear", {"hidden": 3}, "no option 'hidden'"),
    ],
)
def test_options_of_built_in_models_are_checked(name: str, options: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        models.create(name, (8,), 3, seed=0, options=options)


def test_an_mlp_has_the_layers_that_are_asked_for() -> None:
    module = models.create("mlp", (8,), 3, seed=0, options={"hidden": 5, "depth": 2})
    assert [tuple(p.shape) for p in module.parameters() if p.dim() == 2] == [(5, 8), (5, 5), (3, 5)]
