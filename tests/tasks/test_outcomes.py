"""Losses and figures of counts, ordered classes and times, against closed forms, scikit-learn and statsmodels."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn import metrics
from torch import Tensor

from ldpfl import ConfigError, tasks
from ldpfl.models.dense import Parallel
from ldpfl.tasks import ABSENT, outcomes

NAN = math.nan


def drawn(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradient(losses: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor) -> Tensor:
    outputs = outputs.clone().requires_grad_()
    (found,) = torch.autograd.grad(losses(outputs, targets).sum(), outputs)
    return found


def fitted(losses: Callable[[Tensor, Tensor], Tensor], parameters: list[Tensor], outputs: Callable[[], Tensor], targets: Tensor) -> None:
    optimiser = torch.optim.LBFGS(parameters, max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = losses(outputs(), targets).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimiser.step(closure)  # type: ignore[no-untyped-call]


def test_a_count_s_gradient_is_the_expected_count_less_the_count_and_stays_finite() -> None:
    outputs, counts = drawn(50), torch.arange(50.0) % 4
    deviance = metrics.mean_poisson_deviance(counts.double(), outputs.double().exp())
    assert float(outcomes.count_losses(outputs, counts).mean()) == pytest.approx(deviance / 2, rel=1e-5)
    assert outcomes.count_losses((counts + 1).log(), counts + 1).abs().max() < 1e-6  # the least there is
    torch.testing.assert_close(gradient(outcomes.count_losses, outputs, counts), outputs.exp() - counts)
    far = torch.tensor([4.0, 80.0, 1e30])
    torch.testing.assert_close(gradient(outcomes.count_losses, far, torch.zeros(3)), torch.full((3,), math.exp(4)))
    assert outcomes.expected_count(far).isfinite().all()


def test_deviance_explained_is_scikit_learn_s_in_any_unit() -> None:
    outputs, counts = drawn(60), torch.arange(60.0) % 5
    for unit in (1.0, 0.37):
        found = tasks.create("poisson", 1, scale=unit).measured(iter([(outputs[:, None] - math.log(unit), counts / unit)]), every=True)
        assert found["deviance explained"] == pytest.approx(metrics.d2_tweedie_score(counts, outputs.exp(), power=1), rel=1e-5)
        assert found["MAE"] == pytest.approx(metrics.mean_absolute_error(counts, outputs.exp()), rel=1e-5)


def test_ordered_residuals_are_bounded_and_chances_add_up() -> None:
    logits, classes = 9 * drawn(40, 3), torch.arange(40) % 4
    above = (classes[:, None] > torch.arange(3)).float()
    residuals = gradient(outcomes.ordered_losses, logits, classes)
    torch.testing.assert_close(residuals, (logits.sigmoid() - above) / 3)
    assert float(residuals.sum(dim=1).abs().max()) <= 1
    chances = outcomes.class_probabilities(logits)
    assert float(chances.min()) >= 0
    torch.testing.assert_close(chances.sum(dim=1), torch.ones(40))
    in_order = logits.sort(dim=1, descending=True).values
    torch.testing.assert_close(outcomes.class_probabilities(in_order)[:, 1:].cumsum(dim=1)[:, -1], in_order[:, 0].sigmoid())
    assert torch.equal(outcomes.median_class(in_order), (outcomes.class_probabilities(in_order).cumsum(dim=1) < 0.5).sum(dim=1))


def test_ordinal_figures() -> None:
    task, logits, classes = tasks.create("ordinal", 3), drawn(60, 3), torch.arange(60) % 4
    found, told = task.measured(iter([(logits[:30], classes[:30]), (logits[30:], classes[30:])]), every=True), outcomes.median_class(logits)
    assert found["quadratic kappa"] == pytest.approx(metrics.cohen_kappa_score(classes, told, weights="quadratic"), abs=1e-5)
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(classes, told))
    assert found["mean class error"] == pytest.approx(metrics.mean_absolute_error(classes, told))


@pytest.mark.slow
def test_ordinal_slopes_are_those_of_proportional_odds() -> None:
    """Within 0.1 of the likelihood's own, statsmodels', on 3,000 rows: three of their standard errors."""
    from statsmodels.miscmodels.ordinal_model import OrderedModel

    generator = np.random.default_rng(1)
    rows = generator.normal(size=(3000, 2))
    classes = np.digitize(rows @ [1.0, -0.5] + generator.logistic(size=3000), [-1, 0.5, 2])
    expected = OrderedModel(classes, rows, distr="logit").fit(method="bfgs", disp=False)
    score = torch.nn.Linear(2, 1, bias=False)
    module = Parallel(score, 3)
    inputs = torch.from_numpy(rows).float()
    fitted(outcomes.ordered_losses, list(module.parameters()), lambda: module(inputs), torch.from_numpy(classes))
    assert score.weight.flatten().tolist() == pytest.approx(list(expected.params[:2]), abs=0.1)
    cuts = expected.model.transform_threshold_params(expected.params)[1:-1]
    assert module.offsets.tolist() == pytest.approx([-cut for cut in cuts], abs=0.1)


CUTS = torch.tensor([10.0, 20.0, 30.0])


@pytest.mark.parametrize(
    ("time", "event", "expected"),
    [
        (4.0, 1, [1, NAN, NAN]),
        (0.0, 1, [1, NAN, NAN]),
        (10.0, 1, [1, NAN, NAN]),
        (12.0, 1, [0, 1, NAN]),
        (31.0, 1, [0, 0, 0]),
        (4.0, 0, [NAN, NAN, NAN]),
        (6.0, 0, [0, NAN, NAN]),
        (14.0, 0, [0, NAN, NAN]),
        (15.0, 0, [0, 0, NAN]),
        (99.0, 0, [0, 0, 0]),
    ],
)
def test_a_time_counts_for_the_intervals_that_it_saw(time: float, event: int, expected: list[float]) -> None:
    (found,) = outcomes.interval_targets(torch.tensor([time]), torch.tensor([float(event)]), CUTS)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32), equal_nan=True)


def test_a_hazard_s_gradient_is_0_where_nothing_was_seen() -> None:
    logits, targets = drawn(3, 3), torch.tensor([[0.0, 1.0, NAN], [0.0, 0.0, 0.0], [NAN, NAN, NAN]])
    hazards = logits.sigmoid()
    expected = torch.where(targets.isnan(), torch.zeros(3, 3), hazards - targets)
    torch.testing.assert_close(gradient(outcomes.hazard_losses, logits, targets), expected)
    likelihood = (1 - hazards[0, 0]) * hazards[0, 1]
    torch.testing.assert_close(outcomes.hazard_losses(logits, targets)[0], -likelihood.log())
    torch.testing.assert_close(outcomes.survival_probabilities(logits)[:, 2], (1 - hazards).prod(dim=1))


def test_hazards_of_no_column_are_kaplan_meier_s() -> None:
    """Where each time ends at the end of an interval, as statsmodels tells it."""
    from statsmodels.duration.survfunc import SurvfuncRight

    generator = np.random.default_rng(2)
    times, events = generator.integers(1, 5, 200) * 10.0, generator.integers(0, 2, 200)
    logits = torch.zeros(1, 3, requires_grad=True)
    targets = outcomes.interval_targets(torch.from_numpy(times).float(), torch.from_numpy(events).float(), CUTS)
    fitted(outcomes.hazard_losses, [logits], lambda: logits.expand(200, 3), targets)
    expected = SurvfuncRight(times, events)
    found = outcomes.survival_probabilities(logits.detach())[0]
    assert found.tolist() == pytest.approx(list(expected.surv_prob[np.isin(expected.surv_times, CUTS.numpy())]), abs=1e-3)


def survivors() -> tuple[Tensor, Tensor]:
    times, events = 20 + 12 * drawn(300), (drawn(300, seed=4) > -0.3).float()
    return drawn(300, 3, seed=5) - times[:, None] / 15, outcomes.interval_targets(times, events, CUTS)


def harrell(times: Tensor, events: Tensor, lasting: Tensor) -> float:
    right, pairs = 0.0, 0
    for time, last in zip(times[events > 0], lasting[events > 0], strict=True):
        later = lasting[(times > time) | ((times == time) & (events == 0))]
        pairs += len(later)
        right += float((last < later).sum()) + float((last == later).sum()) / 2
    return right / pairs


def test_concordance_is_harrell_s_on_the_times_themselves() -> None:
    """Pairs within an interval count, and so do two rows at one time of which one left without an event; tied survival is a half."""
    times, events = (25 + 10 * drawn(300)).clamp_min(0).round(), (drawn(300, seed=4) > -0.5).float()
    logits = (drawn(300, 3, seed=5) - times[:, None] / 15).round(decimals=1)
    targets = outcomes.with_times(outcomes.interval_targets(times, events, CUTS), times, events)
    task = tasks.create("survival", 3)
    found = task.measured(iter([(logits[:100], targets[:100]), (logits[100:], targets[100:])]), every=True)
    expected = harrell(times, events, outcomes.survival_probabilities(logits.double()).sum(dim=1))
    assert found == {"concordance": pytest.approx(expected, abs=1e-12)}
    assert 0.5 < expected < 0.95
    assert task.measured(iter([(torch.zeros(300, 3), targets)]), every=True) == {"concordance": 0.5}
    with pytest.raises(ConfigError, match="have 3 columns, expected 5"):
        task.measured(iter([(logits, targets[:, :3])]), every=True)


def test_times_behind_the_intervals_change_no_loss() -> None:
    logits, targets = survivors()
    more = outcomes.with_times(targets, drawn(300), torch.ones(300))
    assert torch.equal(outcomes.hazard_losses(logits, more), outcomes.hazard_losses(logits, targets))


@pytest.mark.parametrize("name", ["poisson", "ordinal", "survival"])
def test_a_sample_without_an_answer_teaches_nothing(name: str) -> None:
    task = tasks.create(name, 3)
    outputs = drawn(2, 1) if name == "poisson" else drawn(2, 3)
    shape, kind = ((2, 3) if name == "survival" else (2,)), torch.int64 if name == "ordinal" else torch.float32
    absent = torch.full(shape, ABSENT[task.targets], dtype=kind)
    assert task.losses(outputs, absent).tolist() == [0.0, 0.0]
    assert not gradient(task.losses, outputs, absent).any()
    assert tasks.absent_targets(absent).all()


def test_no_pair_and_no_count_has_no_figure() -> None:
    assert math.isnan(tasks.create("survival", 1).measured(iter([(drawn(1, 1), torch.zeros(1, 3))]), every=False)["concordance"])
    assert math.isnan(tasks.create("poisson", 1).measured(iter([(drawn(2, 1), torch.zeros(2))]), every=False)["deviance explained"])
