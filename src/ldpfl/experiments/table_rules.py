"""Choose the clipping norm, the server's learning rate and its weight decay where a config says ``auto``.

Everything here follows from public facts (columns, number of rows, noise), from synthetic random rows, and from the measured shares of
the classes. So it costs no privacy beyond the measuring. Synthetic pixels, and numbers in an array, have mean 0 and variance 1, as real
pixels have approximately.

- **Clipping norm**: a record's gradient is J^T r, with r the residual of the outputs and J their Jacobian by the weights. The norm is the
  root mean square of |J^T v| for a unit vector v, over drawn rows, times the largest residual, times :data:`_CLIP_FACTOR`, or, where there
  is little noise, :data:`_CLIP_FACTOR_LITTLE_NOISE`. A smaller norm would clip the gradients of the rare class, whose residuals are large,
  and so bias every risk downwards. A larger one means more noise.
- **Weight decay** towards the initial model (ridge): a mean gradient has noise of variance n^2 a coordinate, if all rounds are averaged.
  Weights of variance v, seen through a curvature h, are estimated with the least squared error by a ridge of n^2 / (v h). With much
  noise the model stays near its start, which is the measured base rate; with little it is free. v is :data:`_WEIGHT_VARIANCE`. Images and
  arrays have no weight decay: their curvature lies in few directions (the brightness of an image alone has a third of it or more), so that
  one decay would hold all others back long before it keeps these from following noise.
- **Learning rate on a table**: heavy ball with momentum b is stable up to 2 (1 + b) / L, with L the largest eigenvalue of the curvature.
  The rate is (1 - b^2) divided by the trace of the curvature. The trace is no smaller than L, however correlated the columns are.
- **Learning rate on images and arrays**: the largest rate that is stable whatever the data are, or a smaller one with which the noise of
  all rounds moves a logit by 1 (:mod:`ldpfl.experiments.noise_walk`). So rounds end before noise is as large as what was learnt. Scaled
  pixels are -2 to 2, so that L is no larger than :data:`_MAX_MEAN_SQUARE` times the trace over drawn pixels, times the largest curvature of
  the loss.
- **Pretrained models**: a clipping norm of :data:`_FALLBACK_CLIP_NORM`, which cuts most gradients to one length. The learning rate is
  :data:`_FALLBACK_RATE`, or that of the rule for images, on random tokens or pixels, if this is larger. A base whose outputs hardly differ
  between samples has short gradients and needs the larger rate.
- **Start of an MLP** of one hidden layer: its first weights are much larger than the usual ones, and noise is small beside them, so that
  gradients stay as long as they are at the start. Usual weights are of the size of the noise, which makes them longer, and then the
  clipping norm cuts the rare class. Hidden units come in pairs that cancel, so that the outputs begin at the base rate.
  :data:`_LINEAR_SHARE` of the units begin far from their kink, where they are a straight line: the model learns slopes nearly as fast as a
  logistic regression.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log, sqrt

import numpy as np
import torch
from torch import Tensor, nn

from ldpfl import models
from ldpfl.data.columns import draw_synthetic_inputs
from ldpfl.data.features.registry import NONE
from ldpfl.data.samples import MASK, TOKENS, Inputs, one_by_one
from ldpfl.data.tokens import vocabulary_size
from ldpfl.errors import ConfigError
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.dataset import Description, target_kind_of
from ldpfl.experiments.emphasis import weighted_shares
from ldpfl.experiments.noise_walk import longest_total_step
from ldpfl.mechanisms import Mechanism
from ldpfl.mechanisms.base import record_clip_of
from ldpfl.mechanisms.dp_sgd import DpSgdSettings
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.models.adapters import is_of_transformers
from ldpfl.models.dense import Parallel
from ldpfl.models.layout import ParameterLayout, answers_of
from ldpfl.models.mending import copied
from ldpfl.tasks import NO_EMPHASIS, PARALLEL, Emphasis, Targets
from ldpfl.util.user_code import public_name

_SYNTHETIC_ROWS = 64
"""Number of synthetic rows on which gradient norms are estimated."""
_CLIP_FACTOR, _CLIP_FACTOR_LITTLE_NOISE = 0.85, 1.1
"""Clipping norm as a fraction of the largest usual length of a gradient, with much noise and with little noise."""
_LITTLE_NOISE = 1e-3
"""Noise counts as little below this: its standard deviation in a coordinate of the mean gradient, all rounds taken together, as a share of
the clipping norm."""
_WEIGHT_VARIANCE = 0.05
"""Expected variance of a weight that belongs to a column of variance 1."""
_MAX_MEAN_SQUARE = 4.0
"""Largest mean square of the scaled pixels of an image, reached if all are black or all are white: scaled pixels are -2 to 2."""
_FALLBACK_CLIP_NORM, _FALLBACK_RATE = 1.0, 0.6
"""Clipping norm, and learning rate for gradients divided by it, for features, and for models that fail on the synthetic rows. The trial
before the run reports such a failure. Texts have this clipping norm, and a learning rate that may be larger."""

_MAX_LOGIT_CHANGE, _MAX_NUMBER_CHANGE = 1.0, 0.5
"""Maximum root mean square change of an output by noise alone: a logit by 1, which changes a probability by at most a quarter; a number by
half a spread."""

_ROUNDED_SHARES = 0.02
"""Largest distance from 1 of a sum of stated shares, which may be rounded."""
_LINEAR_SHARE = 0.5
"""Share of an MLP's pairs of hidden units that begin far from the kink of the ReLU, where they are linear."""
_MLP = "mlp"

_CONVEX = ("logistic-regression", "linear")
"""Models with a convex loss, which may start at 0."""
_AT_MEASURED_RATE = ("logistic-regression", _MLP)
"""Models with a bias of their outputs that start at the measured base rate of a table. Others with a bias start at a stated one."""


@dataclass(frozen=True)
class ChosenStart:
    """The initial weights of training, and the config with the chosen server settings.

    Attributes:
        weights: (d,) initial weights.
        config: the config with numbers instead of ``auto``.
    """

    weights: Tensor
    config: RunConfig


def clip_norm_for(config: RunConfig, data: Description, module: nn.Module) -> float:
    """Return the clipping norm for ``module`` on ``data``, rounded to three digits. The rule is at the top of this file.

    If persons are protected, one mean gradient over all rows of a person is clipped. A person may have one row or the largest number of
    rows that counts, m. Gradients of m rows that point in unrelated directions have a mean that is 1 / sqrt(m) as long. The norm for one
    row is divided by the fourth root of m, halfway between both: by sqrt(m) it would clip most persons that have a single row and so bias
    the risks, and undivided it would add noise that hides a rare outcome (decision 0036 has the figures).
    """
    rows = None if _clips_to_fixed_norm(data, module) else _synthetic_rows(config, data)
    mean_square = _mean_squared_gradient(_with_paired_hidden_units(config, data, module), data, rows)
    if mean_square is None:
        return _FALLBACK_CLIP_NORM
    factor = _CLIP_FACTOR_LITTLE_NOISE if _noise_share(config, data) < _LITTLE_NOISE else _CLIP_FACTOR
    residual = _largest_residual(target_kind_of(config), data.outputs) * _largest_class_weight(config)
    person_rows = config.data.person_rows if config.data.person else 1
    return float(f"{factor * residual * sqrt(mean_square) / person_rows**0.25:.3g}")


def _largest_class_weight(config: RunConfig) -> float:
    """Return the largest weight that a sample has in the loss, by its class."""
    weights = config.task.class_weights
    return max(weights, default=1.0) if isinstance(weights, list) else 1.0  # the weights "balanced" are at most 1


def _noise_share(config: RunConfig, data: Description) -> float:
    """Return the noise in a coordinate of the mean gradient, averaged over all rounds, as a share of the clipping norm.

    Each client adds its own noise. The result is infinity for mechanisms other than ``dp-sgd``, whose noise is not known here.
    """
    mechanism, clients = config.mechanism, config.clients.count
    if not isinstance(mechanism, DpSgdSettings):
        return inf
    records = mechanism.records * clients or data.records  # the config may state 0: unknown
    # Noise of all clients in the sum, divided by the number of records and by the root of the number of rounds.
    return mechanism.noise_multiplier * sqrt(clients / config.training.rounds) / max(records, 1)


def choose_automatic_settings(
    config: RunConfig,
    data: Description,
    module: nn.Module,
    layout: ParameterLayout,
    weights: Tensor,
    mechanism: Mechanism,
    clients: int,
    shares: Sequence[float],
    emphasis: Emphasis = NO_EMPHASIS,
) -> ChosenStart:
    """Choose the server's learning rate and weight decay if they are "auto", and initial weights that suit them.

    A setting that is not "auto" stays as it is. If neither is "auto", the weights change only where ``data.class_shares`` states a base
    rate. The rules and their reasons are at the top of this file.

    Args:
        layout: layout of the d weights.
        weights: (d,) initial weights of ``module``.
        mechanism: mechanism of the training rounds, whose noise decides.
        clients: number of clients.
        shares: measured shares of the classes, or empty; ``data.class_shares`` overrides them. See :class:`ldpfl.data.encoder.Encoder`.
        emphasis: how much the classes count in the loss.

    Raises:
        ConfigError: ``data.class_shares`` does not have one value for each class, its values do not add up to 1, or it has no effect.
    """
    training, targets = config.training, target_kind_of(config)
    bias = output_bias(config, module, layout, data.outputs)
    _check_class_shares(config, targets, data.outputs, bias)
    # Shares that are stated need no noisy estimate.
    sample_shares = config.data.class_shares or list(shares) or _default_shares(targets, data.outputs)
    loss_shares, mean_weight = weighted_shares(sample_shares, emphasis)
    if config.data.class_shares:
        weights = _with_base_rate(layout, weights, bias, _base_rate_outputs(targets, loss_shares))
    if "auto" not in (training.server_learning_rate, training.server_weight_decay):
        return ChosenStart(weights, config)
    if config.mechanism.perturbed != "gradient":  # clients send updates or weights, which already have the right scale
        # With momentum b, each update moves the model 1 / (1 - b) times as far.
        return ChosenStart(weights, _replace_auto_settings(config, 1 - training.server_momentum, 0.0))
    initial = _with_paired_hidden_units(config, data, module)
    rows = _synthetic_rows(config, data)
    mean_square = _mean_squared_gradient(initial, data, rows)
    if mean_square is None or rows is None:  # the rules below need gradients
        return ChosenStart(weights, _replace_auto_settings(config, _FALLBACK_RATE, 0.0))
    record_clip = record_clip_of(mechanism)
    clip_norm = 1.0 if record_clip is None else record_clip.norm
    noise = _noise_of_all_rounds(mechanism, clip_norm, layout.dimension, clients, training.rounds)
    # The rate and the decay are first those for gradients of their own length.
    if data.encoder is not None and not data.encoder.data.text:
        curvature = mean_weight * _output_curvature(targets, loss_shares)
        decay = noise**2 / (_WEIGHT_VARIANCE * curvature)  # the ridge n^2 / (v h)
        trace = curvature * mean_square  # trace of the loss' curvature by the weights
        rate = (1 - training.server_momentum**2) / (trace + decay)
    else:
        decay = 0.0
        # Training must be stable for samples of the class with the largest weight, too.
        rate = _rate_without_table(config, data, initial, rows, mean_square * _largest_class_weight(config), noise)
        if _clips_to_fixed_norm(data, module):
            rate = max(rate, _FALLBACK_RATE / clip_norm)
    trained = {name: parameter.detach() for name, parameter in initial.named_parameters() if parameter.requires_grad}
    chosen_weights = layout.flatten(trained)
    if config.model.name in _CONVEX:
        chosen_weights.zero_()
    if config.data.class_shares or _starts_at_measured_rate(config, module):
        chosen_weights = _with_base_rate(layout, chosen_weights, bias, _base_rate_outputs(targets, loss_shares))
    # The server gets gradients divided by the clipping norm. So its rate is larger by this factor, and its decay smaller.
    return ChosenStart(chosen_weights, _replace_auto_settings(config, rate * clip_norm, decay / clip_norm))


def _noise_of_all_rounds(mechanism: Mechanism, clip_norm: float, dimension: int, clients: int, rounds: int) -> float:
    """Return the standard deviation of the noise in a coordinate of the mean gradient, averaged over all rounds."""
    # The mechanism states its noise for a range of radius 1, that is, in units of the clipping norm.
    ranges = LayerRanges(torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64), (dimension,))
    return float(mechanism.noise(ranges).largest_std(clients)[0]) * clip_norm / sqrt(rounds)  # [0]: of the only range


def _clips_to_fixed_norm(data: Description, module: nn.Module) -> bool:
    """Return whether gradients are clipped to ``_FALLBACK_CLIP_NORM``, as for texts and for pretrained models."""
    return (data.encoder is not None and bool(data.encoder.data.text)) or is_of_transformers(module)


def _has_own_words(data: Description) -> bool:
    """Return whether samples are texts as numbers of words, for a model with embeddings of its own."""
    is_text = data.encoder is not None and bool(data.encoder.data.text) and not data.encoder.data.tokenizer
    return is_text and data.vocabulary is not None and data.vocabulary > 1


def _rate_without_table(config: RunConfig, data: Description, module: nn.Module, rows: Inputs, mean_square: float, noise: float) -> float:
    """Return the server's learning rate for images, arrays and texts.

    It is the largest rate at which training is stable and at which the noise of all rounds moves the outputs little.

    Args:
        module: the model with its initial weights.
        rows: synthetic samples.
        mean_square: mean squared length of the gradient of an output over ``rows``.
        noise: standard deviation of the noise in a coordinate of the mean gradient, all rounds taken together.
    """
    training, targets = config.training, target_kind_of(config)
    # The curvature of a cross-entropy is at most 0.5, whatever the classes' shares.
    curvature = 0.5 if targets == "class" else _output_curvature(targets, _default_shares(targets, data.outputs))
    # Mean square of the largest possible sample, as a multiple of that of the synthetic ones. Embeddings of words are the same in both.
    largest_mean_square = 1.0 if _has_own_words(data) else _MAX_MEAN_SQUARE
    # Heavy ball with momentum b is stable up to a rate of 2 (1 + b) / L, with L the largest eigenvalue of the curvature.
    max_stable_rate = 2 * (1 + training.server_momentum) / (largest_mean_square * mean_square * curvature)
    # Momentum b lets each gradient move the model 1 / (1 - b) times as far, as that many rounds without momentum would.
    plain_rounds = training.rounds / (1 - training.server_momentum)
    max_change = _MAX_NUMBER_CHANGE if targets == "number" else _MAX_LOGIT_CHANGE
    max_total = max_stable_rate * plain_rounds
    return longest_total_step(copied(module), rows, _output_direction(data), noise, max_change, max_total) / plain_rounds


def _replace_auto_settings(config: RunConfig, rate: float, decay: float) -> RunConfig:
    """Return ``config`` with the learning rate ``rate`` and the weight decay ``decay`` wherever it says ``auto``."""
    training = config.training
    chosen = {"server_learning_rate": rate, "server_weight_decay": decay}
    update = {name: value for name, value in chosen.items() if getattr(training, name) == "auto"}
    return config.model_copy(update={"training": training.model_copy(update=update)})


def output_bias(config: RunConfig, module: nn.Module, layout: ParameterLayout, outputs: int) -> str | None:
    """Return the name of the layer that is added to the ``outputs`` of ``module``, and so can hold a base rate; None if none is known.

    It is known for built-in models and for the heads of pretrained ones. A user's own module may change the outputs of its last layer.
    """
    names = [f"{place}.bias" for place, part in module.named_modules() if isinstance(part, nn.Linear)][-1:]
    if isinstance(module, Parallel):
        names = ["offsets"]
    elif config.model.name not in models.names() and not is_of_transformers(module):
        names = []
    sizes = dict(zip(layout.names, layout.sizes, strict=True))
    return next((name for name in names if sizes.get(name) == outputs), None)


def _starts_at_measured_rate(config: RunConfig, module: nn.Module) -> bool:
    """Return whether training of ``module`` starts at the base rate even if it was measured, or is not known."""
    return isinstance(module, Parallel) or config.model.name in _AT_MEASURED_RATE


def _with_base_rate(layout: ParameterLayout, weights: Tensor, bias: str | None, outputs: Sequence[float]) -> Tensor:
    """Return ``weights`` (d,) with the base-rate ``outputs`` in the layer ``bias``; unchanged if there is no such layer or no base rate."""
    changed = weights.clone()
    if bias is not None and outputs:
        changed[layout.slices[bias]] = torch.tensor(outputs, dtype=changed.dtype)
    return changed


def _base_rate_outputs(targets: Targets, shares: Sequence[float]) -> list[float]:
    """Return the outputs of a model that predicts the base rate in ``shares`` for every row; an empty list for numbers and tokens."""
    if targets == "class":
        return [log(share) for share in shares]
    if targets == "count":
        return [log(shares[0])]  # the share is the mean count, and the output the logarithm of the expected count
    return [log(share / (1 - share)) for share in _probabilities(targets, shares)]


def _probabilities(targets: Targets, shares: Sequence[float]) -> list[float]:
    """Return the base-rate probability of each output that is a logit, from the ``shares`` of labels, ordered classes or hazards.

    For ordered classes it is the probability of being above each threshold. The result is an empty list for other targets.
    """
    if targets == "ordered":
        return [float(share) for share in 1 - np.cumsum(shares)[:-1] / sum(shares)]
    return list(shares) if targets in ("classes", "survival") else []


def _with_paired_hidden_units(config: RunConfig, data: Description, module: nn.Module) -> nn.Module:
    """Return ``module``, or for an MLP of one hidden layer on a table a copy whose hidden units come in pairs that cancel.

    The units of a pair are equal, and the outputs add them with opposite signs. So the outputs begin at their biases, for which the base
    rate is taken later. The hidden weights are large beside the noise. A deeper MLP is returned unchanged, since cancelling pairs would
    leave the layers before them without a gradient.
    """
    if config.model.name != _MLP or data.encoder is None or data.encoder.data.text:
        return module
    changed, generator = copied(module), torch.Generator().manual_seed(config.seed % 2**63)
    hidden, *later_layers = [layer for layer in changed.modules() if isinstance(layer, nn.Linear)]
    pairs = hidden.out_features // 2
    if len(later_layers) != 1 or not pairs:
        return module
    (output_layer,) = later_layers
    rows = draw_synthetic_inputs(data.encoder.data, _SYNTHETIC_ROWS, torch.Generator().manual_seed(0))
    # The inputs of the hidden units have a variance of about 1.
    weights = torch.randn(pairs, hidden.in_features, generator=generator) / rows.square().sum(dim=1).mean().sqrt()
    biases, linear_pairs = torch.randn(pairs, generator=generator) / 2, int(_LINEAR_SHARE * pairs)
    # A linear unit begins with no weights and a positive bias, far from its kink.
    weights[:linear_pairs], biases[:linear_pairs] = 0.0, 1.0
    signs = 2.0 * torch.randint(2, (output_layer.out_features, pairs), generator=generator) - 1
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.zero_()
        hidden.weight[: 2 * pairs], hidden.bias[: 2 * pairs] = weights.repeat(2, 1), biases.repeat(2)
        output_layer.weight[:, : 2 * pairs] = torch.cat([signs, -signs], dim=1)
    return changed


def _check_class_shares(config: RunConfig, targets: Targets, outputs: int, bias: str | None) -> None:
    """Raise a :class:`ConfigError` if ``data.class_shares`` has wrong values, or no effect because the model has no output ``bias``."""
    if not (shares := config.data.class_shares):
        return
    if targets in ("number", "tokens"):
        raise ConfigError(f"data.class_shares is for classes, labels, counts and times, but task.name is {config.task.name!r}: omit it")
    if len(shares) != (expected := len(_default_shares(targets, outputs))):
        raise ConfigError(
            f"data.class_shares has {len(shares)} values, and this target needs {expected}: one for each class, label or interval of time"
        )
    if targets in ("class", "ordered") and abs(sum(shares) - 1) > _ROUNDED_SHARES:
        raise ConfigError(
            f"data.class_shares = {shares} adds up to {sum(shares):.4g}, but the shares of all classes must add up to 1: give the share of "
            "each class, in the order of data.classes, as in [0.9, 0.1] for two classes"
        )
    if bias is None and config.task.class_weights != "balanced":  # which balances the classes by their shares
        name = config.model.name
        raise ConfigError(
            f"data.class_shares = {shares} would have no effect: it sets the bias of the outputs, and model {public_name(name)!r} has none "
            "that is trained by all clients and that ldpfl knows. Leave data.class_shares out, and "
            + (
                f"take a model with a bias, such as {_AT_MEASURED_RATE[0]}"
                if name in models.names()
                else "set that bias in your model to the logarithms of the shares"
            )
        )


def _default_shares(targets: Targets, outputs: int) -> list[float]:
    """Return the shares to assume if nothing was measured.

    Classes are equally frequent, half of the rows have a label, and the mean of a count is one spread. For survival, the shares are the
    hazards of the intervals. They are half of what they would be if equally many events fell into each interval and after the last.
    """
    if targets in ("class", "ordered"):
        classes = outputs + 1 if targets == "ordered" else outputs  # ordered classes have an output for each threshold between them
        return [1 / classes] * classes
    if targets == "survival":
        return [0.5 / (outputs + 1 - place) for place in range(outputs)]
    return [1.0 if targets == "count" else 0.5] * outputs


def _largest_residual(targets: Targets, outputs: int) -> float:
    """Return a usual bound on the norm of the loss' gradient with respect to the outputs. The clipping norm is a multiple of it."""
    bounds: dict[Targets, float] = {
        "class": sqrt(2),  # the largest norm
        "classes": sqrt(2) / outputs,  # two labels are wrong
        "count": 4.0,  # an error of four spreads: counts have long tails, and clipping them lowers the mean
        "ordered": 1.0,  # the largest norm with respect to the score that the outputs share
        "survival": 1.0,  # likewise
    }
    return bounds.get(targets, 2.0)  # for a number, an error of one spread; for tokens, more than the largest norm


def _output_curvature(targets: Targets, shares: Sequence[float]) -> float:
    """Return the largest eigenvalue of the loss' Hessian with respect to the outputs, at outputs that predict the base rate in ``shares``.

    Ordered classes and survival times have one score, to which each output adds a constant. For them the result is the second derivative
    with respect to that score.
    """
    if targets == "class":
        probabilities = np.asarray(shares)
        return float(np.linalg.eigvalsh(np.diag(probabilities) - np.outer(probabilities, probabilities))[-1])
    if targets == "count":
        return shares[0]
    variances = [probability * (1 - probability) for probability in _probabilities(targets, shares)]
    if targets == "classes":
        return max(variances) / len(variances)
    if targets == "ordered":
        return sum(variances) / len(variances)
    if targets == "survival":
        # A row adds to the loss of an interval only if it reaches it. ``reaching`` is the share of rows that reach each interval.
        reaching = np.cumprod([1.0, *(1 - share for share in shares)])[:-1]
        return float(reaching @ variances)
    return 2.0  # the second derivative of a squared error; an upper bound for tokens


def _synthetic_rows(config: RunConfig, data: Description) -> Inputs | None:
    """Return synthetic samples of the shape of ``data``: rows of a table, arrays, or texts of random tokens.

    The result is None for features, whose distribution is not known, for samples of several tensors, and for other texts.
    """
    generator = torch.Generator().manual_seed(0)
    if data.encoder is not None and not data.encoder.data.text:  # rows of a table
        return draw_synthetic_inputs(data.encoder.data, _SYNTHETIC_ROWS, generator)
    if config.data.features != NONE:
        return None
    if data.encoder is None:
        if data.shape is None or data.vocabulary is not None:  # samples of several tensors, or texts that are no column of a table
            return None
        return torch.randn(_SYNTHETIC_ROWS, *data.shape, generator=generator)
    settings = data.encoder.data
    if data.vocabulary is not None and _has_own_words(data):  # texts as numbers of words, where 0 is padding
        return torch.randint(1, data.vocabulary, (_SYNTHETIC_ROWS, settings.length), generator=generator)
    if settings.tokenizer:  # texts as tokens of a pretrained model
        tokens = torch.randint(vocabulary_size(settings.tokenizer), (_SYNTHETIC_ROWS, settings.length), generator=generator)
        return {TOKENS: tokens, MASK: torch.ones_like(tokens)}
    return None  # texts as bytes


def _mean_squared_gradient(module: nn.Module, data: Description, rows: Inputs | None) -> float | None:
    """Return the mean of |J^T v|^2 over ``rows``: J is the Jacobian of the outputs by the weights, v the vector of `_output_direction`.

    The result is None if there are no rows, if the model fails on them, or if its outputs do not depend on the weights. A copy of the model
    is used: the trial before the run, which refuses a forward that changes the model, needs it unchanged.
    """
    if rows is None:
        return None
    direction, total = _output_direction(data), 0.0
    try:
        module = copied(module)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for row in one_by_one(rows):
            output = (answers_of(module, row).reshape(-1) * direction).sum()
            total += sum(float(part.double().square().sum()) for part in torch.autograd.grad(output, trained))
    except Exception:  # a user's module may fail on synthetic rows; the trial before the run reports the reason
        return None
    return total / _SYNTHETIC_ROWS if 0 < total < inf else None


def _output_direction(data: Description) -> Tensor:
    """Return a unit vector (K,) in the space of the K outputs, along which gradients and noise are measured.

    It lies along the difference of the first two outputs, because only differences of logits matter. A single output, or parallel outputs,
    which are one score plus offsets, have the direction of the first output.
    """
    parallel = data.encoder is not None and data.encoder.targets in PARALLEL
    direction = torch.zeros(data.outputs)
    direction[:2] = torch.tensor([1.0, 0.0 if parallel else -1.0])[: data.outputs]
    return torch.nn.functional.normalize(direction, dim=0)
