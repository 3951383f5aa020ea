"""Flatten and unflatten agree, and a model that would leak or misbehave is refused with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from ldpfl import ParameterLayout, PrivacyError, validate_module

LAYOUT = ParameterLayout(names=("first", "second", "third"), shapes=((2, 3), (4,), (1, 1, 2)))


def model() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 3, 2), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(12, 5))


def refusal(module: nn.Module) -> str:
    """Return the message with which ``module`` is refused."""
    with pytest.raises(PrivacyError) as caught:
        validate_module(module)
    with pytest.raises(PrivacyError):
        ParameterLayout.from_module(module)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- flatten and unflatten --------------------------------------------------------------------------------------------


def test_layout_describes_the_trainable_parameters_in_order() -> None:
    module = model()
    layout = ParameterLayout.from_module(module)
    assert layout.names == tuple(name for name, _ in module.named_parameters())
    assert layout.shapes == tuple(tuple(parameter.shape) for parameter in module.parameters())
    assert layout.sizes == tuple(parameter.numel() for parameter in module.parameters())
    assert layout.dimension == sum(parameter.numel() for parameter in module.parameters())


def test_slices_are_contiguous_and_cover_the_vector() -> None:
    slices = list(LAYOUT.slices.items())
    assert [name for name, _ in slices] == list(LAYOUT.names)
    assert slices[0][1].start == 0
    assert slices[-1][1].stop == LAYOUT.dimension == 12
    assert all(left.stop == right.start for (_, left), (_, right) in pairwise(slices))


def test_flatten_agrees_with_torch_and_with_the_slices() -> None:
    module = model()
    layout = ParameterLayout.from_module(module)
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    flat = layout.flatten(parameters)
    assert torch.equal(flat, nn.utils.parameters_to_vector(module.parameters()).detach())
    for name, place in layout.slices.items():
        assert torch.equal(flat[place], parameters[name].flatten())


@pytest.mark.parametrize("batch", [(), (1,), (5,), (2, 3)])
def test_flatten_and_unflatten_are_inverse(batch: tuple[int, ...]) -> None:
    vector = torch.randn(*batch, LAYOUT.dimension, generator=torch.Generator().manual_seed(0))
    named = LAYOUT.unflatten(vector)
    assert {name: tuple(tensor.shape) for name, tensor in named.items()} == {
        name: (*batch, *shape) for name, shape in zip(LAYOUT.names, LAYOUT.shapes, strict=True)
    }
    assert torch.equal(LAYOUT.flatten(named), vector)


def test_every_client_of_a_batch_keeps_its_row() -> None:
    vector = torch.arange(24.0).reshape(2, 12)
    named = LAYOUT.unflatten(vector)
    for row in range(2):
        alone = LAYOUT.unflatten(vector[row])
        assert all(torch.equal(named[name][row], alone[name]) for name in LAYOUT.names)


def test_flatten_ignores_the_order_of_the_mapping() -> None:
    named = LAYOUT.unflatten(torch.arange(12.0))
    assert torch.equal(LAYOUT.flatten(dict(reversed(named.items()))), torch.arange(12.0))


def test_unflatten_returns_views() -> None:
    vector = torch.zeros(12)
    LAYOUT.unflatten(vector)["second"].fill_(1.0)
    assert vector.tolist() == [0.0] * 6 + [1.0] * 4 + [0.0] * 2


def test_an_unflattened_vector_runs_in_the_model() -> None:
    module = model()
    layout = ParameterLayout.from_module(module)
    parameters = layout.unflatten(nn.utils.parameters_to_vector(module.parameters()).detach())
    images = torch.randn(2, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    output: Tensor = torch.func.functional_call(module, parameters, (images,))
    assert torch.equal(output, module(images))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"third": None}, "third"),
        ({"fourth": torch.zeros(1)}, "fourth"),
        ({"second": torch.zeros(5)}, "second has shape \\(5,\\)"),
        ({"first": torch.zeros(3, 2)}, "first has shape \\(3, 2\\)"),
        ({"first": torch.zeros(3)}, "first has shape \\(3,\\)"),
    ],
)
def test_flatten_refuses_layers_that_do_not_fit(change: dict[str, Tensor | None], message: str) -> None:
    named: dict[str, Tensor | None] = {**LAYOUT.unflatten(torch.zeros(12)), **change}
    with pytest.raises(PrivacyError, match=message):
        LAYOUT.flatten({name: tensor for name, tensor in named.items() if tensor is not None})


@pytest.mark.parametrize("shape", [(4,), (3, 4)])
def test_flatten_refuses_layers_of_different_batches(shape: tuple[int, ...]) -> None:
    named = LAYOUT.unflatten(torch.zeros(5, 12))
    with pytest.raises(PrivacyError, match="batch"):
        LAYOUT.flatten({**named, "second": torch.zeros(shape)})


@pytest.mark.parametrize("shape", [(11,), (13,), (12, 11), (0,)])
def test_unflatten_refuses_another_dimension(shape: tuple[int, ...]) -> None:
    with pytest.raises(PrivacyError, match="the model's layout has 12"):
        LAYOUT.unflatten(torch.zeros(shape))


# --- what a model may hold --------------------------------------------------------------------------------------------


def test_frozen_parameters_have_no_place() -> None:
    module = model()
    module[0].requires_grad_(False).double()  # a frozen constant may have any dtype
    layout = ParameterLayout.from_module(module)
    assert not any(name.startswith("0.") for name in layout.names)
    assert layout.dimension == sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def test_tied_parameters_are_counted_once() -> None:
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    assert ParameterLayout.from_module(nn.Sequential(first, second)).names == ("0.weight",)


class Holder(nn.Module):
    """One good parameter, and whatever a test adds."""

    def __init__(self) -> None:
        super().__init__()
        self.good = nn.Parameter(torch.zeros(2))


def with_buffer(buffer: Tensor, *, persistent: bool = True) -> Holder:
    holder = Holder()
    holder.register_buffer("table", buffer, persistent=persistent)
    return holder


def with_parameter(parameter: Tensor) -> Holder:
    holder = Holder()
    holder.register_parameter("odd", nn.Parameter(parameter))
    return holder


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(3), nn.SyncBatchNorm(3), nn.BatchNorm2d(3, affine=False)])
def test_batch_normalisation_is_refused_with_its_replacement(norm: nn.Module) -> None:
    message = refusal(nn.Sequential(nn.Linear(3, 3), norm))
    for part in ("Sequential", "1.running_mean", "1.running_var", "1.num_batches_tracked", "GroupNorm"):
        assert part in message
    assert "0.weight" not in message


@pytest.mark.parametrize("buffer", [torch.zeros(3), torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.bool), torch.tensor(1.0)])
def test_other_buffers_are_refused_by_name(buffer: Tensor) -> None:
    message = refusal(with_buffer(buffer))
    assert "table" in message
    assert "persistent=False" in message
    assert "holds values of private rows, leave it out" in message


def test_running_statistics_of_other_norms_and_spectral_norm_are_refused() -> None:
    norm = nn.Sequential(nn.Linear(3, 3), nn.InstanceNorm1d(3, track_running_stats=True))
    assert "1.running_mean" in refusal(norm)
    assert "_u" in refusal(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)))


def test_constants_that_are_not_saved_are_allowed() -> None:
    assert ParameterLayout.from_module(with_buffer(torch.zeros(3), persistent=False)).names == ("good",)


@pytest.mark.parametrize(
    ("parameter", "remedy"),
    [
        (torch.tensor(1.0), "(1,)"),
        (torch.zeros(3, dtype=torch.float64), ".float()"),
        (torch.zeros(3, dtype=torch.float16), ".float()"),
        (torch.zeros(3, dtype=torch.complex64), ".float()"),
        (torch.zeros(0, 3), "remove it"),
    ],
    ids=["0-d", "float64", "float16", "complex", "empty"],
)
def test_odd_parameters_are_refused_with_a_remedy(parameter: Tensor, remedy: str) -> None:
    message = refusal(with_parameter(parameter))
    assert "parameter odd" in message
    assert "good" not in message
    assert remedy in message


@pytest.mark.parametrize("module", [nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)], ids=["empty", "frozen"])
def test_a_model_without_trainable_parameters_is_refused(module: nn.Module) -> None:
    message = refusal(module)
    assert "no trainable parameter" in message
    assert "requires_grad=True" in message


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_modules_are_refused_until_they_have_run() -> None:
    module = nn.Sequential(nn.LazyLinear(4), nn.ReLU())
    message = refusal(module)
    assert "parameter 0.weight" in message
    assert "forward pass" in message
    module(torch.zeros(1, 3))
    assert ParameterLayout.from_module(module).dimension == 16


@pytest.mark.parametrize("dropout", [nn.Dropout(0.5), nn.Dropout2d(0.1), nn.AlphaDropout(0.1), nn.FeatureAlphaDropout(0.1)])
def test_active_dropout_is_refused(dropout: nn.Module) -> None:
    message = refusal(nn.Sequential(nn.Linear(2, 2), dropout))
    assert "dropout in 1" in message
    assert "set it to 0" in message


def test_batch_normalisation_without_buffers_is_refused_too() -> None:
    # It mixes the samples of a batch, so padding would change what a client learns.
    assert "GroupNorm" in refusal(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, track_running_stats=False)))


def test_inactive_dropout_is_allowed() -> None:
    validate_module(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)))


@pytest.mark.parametrize(
    "module", [nn.LSTM(2, 2, num_layers=2, dropout=0.5), nn.GRU(2, 2, num_layers=2, dropout=0.5), nn.MultiheadAttention(4, 2, dropout=0.5)]
)
def test_dropout_inside_other_modules_is_refused(module: nn.Module) -> None:
    assert "dropout" in refusal(nn.Sequential(module))


def test_a_random_activation_is_refused() -> None:
    assert "LeakyReLU" in refusal(nn.Sequential(nn.Linear(2, 2), nn.RReLU()))


def test_all_problems_are_named_at_once() -> None:
    module = nn.Sequential(nn.Linear(2, 2).double(), nn.BatchNorm1d(2), nn.Dropout(0.5))
    message = refusal(module)
    for part in ("0.weight", "0.bias", "1.running_mean", "dropout in 2"):
        assert part in message


def _hooked() -> nn.Module:
    module = nn.Linear(3, 2)
    module.weight.register_hook(lambda gradient: gradient * 0)  # type: ignore[no-untyped-call]
    return module


def _sharing() -> nn.Module:
    module, memory = nn.Linear(3, 2), torch.zeros(6)
    module.first, module.second = nn.Parameter(memory[:4]), nn.Parameter(memory[2:])
    return module


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_hooked, "parameter weight has a hook"),
        (_sharing, "parameters first and second share memory"),
        (lambda: nn.Linear(3, 2, device="meta"), "parameter weight has no values"),
        (lambda: nn.Embedding(3, 2, max_norm=1.0), "parameter weight is changed by max_norm while the model runs"),
        (lambda: nn.EmbeddingBag(3, 2, sparse=True), "parameter weight has sparse gradients"),
        (lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)), "spectral normalisation changes them"),
    ],
    ids=["hook", "shared memory", "meta", "max_norm", "sparse", "spectral norm"],
)
def test_what_gradients_cannot_train_is_refused_by_name(make: Callable[[], nn.Module], said: str) -> None:
    assert said in refusal(make())


@pytest.mark.thorough_for("compiled")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("wrap", "instead"),
    [(torch.compile, "_orig_mod"), (torch.jit.script, "the module that was scripted"), (nn.DataParallel, "its .module")],
    ids=["compiled", "scripted", "parallel"],
)
def test_a_wrapped_module_is_refused_and_the_original_is_asked_for(wrap: Callable[[nn.Module], nn.Module], instead: str) -> None:
    for module, where in ((wrap(nn.Linear(3, 2)), "the model is a"), (nn.Sequential(wrap(nn.Linear(3, 2))), "0 is a")):
        with pytest.raises(PrivacyError, match=f"{where} .* cannot run with other weights: pass .*{instead}"):
            validate_module(module)
