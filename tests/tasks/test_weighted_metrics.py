"""Figures of models against scikit-learn's own, their intervals against resamples that are drawn one by one."""

from __future__ import annotations

import time

import numpy as np
import pytest
from numpy.typing import NDArray

from ldpfl.tasks import weighted_metrics
from ldpfl.tasks.survival import concordance, horizon
from ldpfl.tasks.weighted_metrics import Floats

ROWS = 400


def drawn(rows: int = ROWS, seed: int = 0) -> tuple[Floats, NDArray[np.bool_]]:
    """Return log odds, some of them equal, and events that are rarer than these say."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=rows).round(1) * 1.5 - 1
    return logits, random.random(rows) < 1 / (1 + np.exp(0.5 - 0.7 * logits))


def test_two_classes_have_scikit_learn_s_figures() -> None:
    from sklearn import metrics
    from sklearn.linear_model import LogisticRegression

    logits, events = drawn()
    found, risks = weighted_metrics.figures_of_all_rows(weighted_metrics.two_class_figures(logits, events), ROWS), 1 / (1 + np.exp(-logits))
    expected = {
        "AUROC": metrics.roc_auc_score(events, risks),
        "average precision": metrics.average_precision_score(events, risks),
        "Brier score": metrics.brier_score_loss(events, risks),
        "mean predicted risk": risks.mean(),
        "observed share": events.mean(),
        "accuracy": metrics.accuracy_score(events, risks > 0.5),
        "accuracy of the commonest class": max(events.mean(), 1 - events.mean()),
        "macro F1": metrics.f1_score(events, risks > 0.5, average="macro"),
    }
    for threshold, name in ((0.5, "0.5"), (events.mean(), "the base rate")):
        flagged = risks >= threshold
        expected[f"sensitivity at {name}"] = metrics.recall_score(events, flagged)
        expected[f"specificity at {name}"] = metrics.recall_score(~events, ~flagged)
        expected[f"positive predictive value at {name}"] = metrics.precision_score(events, flagged)
    fitted = LogisticRegression(C=1e12, tol=1e-10).fit(logits[:, None], events)
    assert found.pop("calibration slope") == pytest.approx(float(fitted.coef_[0, 0]), rel=1e-4)
    assert found == pytest.approx(expected)


def test_several_classes_and_labels_and_numbers_have_scikit_learn_s_figures() -> None:
    from sklearn import metrics

    random = np.random.default_rng(1)
    logits, classes = random.normal(size=(ROWS, 4)), random.integers(4, size=ROWS)
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    told = logits.argmax(axis=1)
    found = weighted_metrics.figures_of_all_rows(weighted_metrics.several_class_figures(logits, classes), ROWS)
    assert abs(found.pop("calibration slope")) < 0.2  # classes that have nothing to do with the logits
    assert found == pytest.approx(
        {
            "accuracy": metrics.accuracy_score(classes, told),
            "accuracy of the commonest class": np.bincount(classes).max() / ROWS,
            "macro F1": metrics.f1_score(classes, told, average="macro"),
            "AUROC": metrics.roc_auc_score(classes, chances, multi_class="ovr"),
            "Brier score": ((chances - np.eye(4)[classes]) ** 2).sum() / ROWS,
        }
    )
    labels = random.random((ROWS, 4)) < 0.3
    assert weighted_metrics.figures_of_all_rows(weighted_metrics.label_figures(logits, labels), ROWS) == pytest.approx(
        {
            "AUROC": metrics.roc_auc_score(labels, logits),
            "macro F1": metrics.f1_score(labels, logits > 0, average="macro"),
            "exact match": metrics.accuracy_score(labels, logits > 0),
        }
    )
    numbers, targets = logits[:, 0] + 20, logits[:, 0] + logits[:, 1] / 2 + 20
    assert weighted_metrics.figures_of_all_rows(weighted_metrics.number_figures(numbers, targets), ROWS) == pytest.approx(
        {
            "R2": metrics.r2_score(targets, numbers),
            "MAE": metrics.mean_absolute_error(targets, numbers),
            "RMSE": metrics.mean_squared_error(targets, numbers) ** 0.5,
            "mean prediction": numbers.mean(),
            "observed mean": targets.mean(),
        }
    )


def test_counts_and_ordered_classes_have_scikit_learn_s_figures() -> None:
    from sklearn import metrics

    random = np.random.default_rng(2)
    expected = np.exp(random.normal(size=ROWS))
    counts = random.poisson(expected).astype(np.float64)
    found = weighted_metrics.figures_of_all_rows(weighted_metrics.count_figures(expected, counts), ROWS)
    assert found == pytest.approx(
        {
            "deviance explained": metrics.d2_tweedie_score(counts, expected, power=1),
            "MAE": metrics.mean_absolute_error(counts, expected),
            "mean prediction": expected.mean(),
            "observed mean": counts.mean(),
        }
    )
    told, classes = random.integers(4, size=ROWS).astype(np.float64), random.integers(4, size=ROWS)
    assert weighted_metrics.figures_of_all_rows(weighted_metrics.ordered_class_figures(told, classes), ROWS) == pytest.approx(
        {
            "quadratic kappa": metrics.cohen_kappa_score(classes, told, weights="quadratic"),
            "accuracy": metrics.accuracy_score(classes, told),
            "mean class error": metrics.mean_absolute_error(classes, told),
        }
    )


def test_equal_counts_leave_no_deviance_to_explain() -> None:
    alike = weighted_metrics.count_figures(np.linspace(1, 2, ROWS), np.full(ROWS, 3.0))
    assert np.isnan(weighted_metrics.figures_of_all_rows(alike, ROWS)["deviance explained"])
    alike = weighted_metrics.number_figures(np.linspace(1, 2, ROWS), np.full(ROWS, 0.1))
    assert np.isnan(weighted_metrics.figures_of_all_rows(alike, ROWS)["R2"])


def test_intervals_are_those_of_resamples_that_are_drawn_one_by_one() -> None:
    """Ends of 500 resamples, beside those of 300 others: a tenth of the interval's width, or a little more, apart."""
    logits, events = drawn()
    found = weighted_metrics.confidence_intervals(weighted_metrics.two_class_figures(logits, events), ROWS, seed=0)
    random, each = np.random.default_rng(7), dict[str, list[float]]()
    for _ in range(300):
        own = random.integers(ROWS, size=ROWS)
        figures = weighted_metrics.figures_of_all_rows(weighted_metrics.two_class_figures(logits[own], events[own]), ROWS)
        for name in ("AUROC", "average precision", "Brier score", "calibration slope", "accuracy", "sensitivity at 0.5"):
            each.setdefault(name, []).append(figures[name])
    for name, values in each.items():
        low, high = np.quantile(values, (0.025, 0.975))
        assert found[name] == pytest.approx((low, high), abs=0.2 * (high - low)), name


def test_rows_of_one_person_are_drawn_together() -> None:
    """Ten equal rows of each of 200 persons say what one row of each says; drawn as rows, they would seem to say ten times as much."""
    random = np.random.default_rng(4)
    told, seen = random.normal(size=200), random.random(200) < 0.3
    whose = np.repeat(np.arange(200), 10)
    once, alike = weighted_metrics.two_class_figures(told, seen), weighted_metrics.two_class_figures(told[whose], seen[whose])
    for name, (low, high) in weighted_metrics.confidence_intervals(once, 200, seed=1).items():
        assert weighted_metrics.confidence_intervals(alike, 2000, seed=1, person_of_row=whose)[name] == pytest.approx(
            (low, high), abs=6e-3
        ), name  # of shares, the variance that is estimated from persons makes a small difference
    narrow, wide = (np.ptp(weighted_metrics.confidence_intervals(alike, 2000, seed=1, person_of_row=of)["AUROC"]) for of in (None, whose))
    assert wide > 2 * narrow


def test_a_share_without_a_hit_or_without_a_miss_has_wilson_s_interval() -> None:
    """A bootstrap would give a single point: each resample has no hit, or hits alone."""
    from scipy.stats import binomtest

    events = np.arange(200) < 30
    logits = np.where(np.arange(200) < 4, 1.0, -1.0 - np.arange(200) % 7)
    found = weighted_metrics.confidence_intervals(weighted_metrics.two_class_figures(logits, events), 200, seed=0)
    for name, hits, rows in (
        ("positive predictive value at 0.5", 4, 4),
        ("specificity at 0.5", 170, 170),
        ("sensitivity at 0.5", 4, 30),
        ("accuracy", 174, 200),
    ):
        ends = binomtest(hits, rows).proportion_ci(method="wilson")
        assert found[name] == pytest.approx((ends.low, ends.high), abs=1e-6), name
    several = weighted_metrics.several_class_figures(10 * np.eye(3)[np.arange(200) % 3], np.arange(200) % 3)
    labels = weighted_metrics.label_figures(np.where(events, 1.0, -1.0)[:, None], events[:, None])
    ordered = weighted_metrics.ordered_class_figures((np.arange(200) % 3).astype(np.float64), np.arange(200) % 3)
    for figures, name in ((several, "accuracy"), (labels, "exact match"), (ordered, "accuracy")):
        low, high = weighted_metrics.confidence_intervals(figures, 200, seed=0)[name]
        assert (low, high) == pytest.approx((200 / (200 + 1.96**2), 1), abs=1e-6)


def test_rows_of_a_person_widen_a_share_s_interval_as_far_as_they_agree() -> None:
    random = np.random.default_rng(6)
    whose = np.repeat(np.arange(100), 10)
    hits = random.random(1000) < 0.3
    independent = np.ptp(weighted_metrics.share_interval(hits))
    assert np.ptp(weighted_metrics.share_interval(hits, whose)) == pytest.approx(independent, rel=0.15)
    once = hits[:100]
    assert weighted_metrics.share_interval(once[whose], whose) == pytest.approx(weighted_metrics.share_interval(once), rel=1e-2)
    # No hit shows no effect, so the interval is that of one row a person.
    assert weighted_metrics.share_interval(np.zeros(1000), whose) == pytest.approx(weighted_metrics.share_interval(np.zeros(100)))


@pytest.mark.parametrize("persons", [1, 3, 9, 12, 30])
def test_a_share_s_interval_covers_with_few_persons_of_many_rows(persons: int) -> None:
    """In 500 draws, at least 89 % of the intervals hold the true share. False alarms: below 1e-6 at a coverage of 95 %."""
    drawn, covered = np.random.default_rng(persons), 0
    for _ in range(500):
        whose = np.repeat(np.arange(persons), 40)
        hits = (drawn.random(persons * 40) < drawn.beta(1.5, 1.5, persons)[whose]).astype(float)
        low, high = weighted_metrics.share_interval(hits, whose)
        covered += low <= 0.5 <= high
    assert covered >= 445


@pytest.mark.parametrize(("persons", "share"), [(20, 0.5), (30, 0.3), (100, 0.3)])
def test_a_share_s_interval_covers_with_very_unequal_persons(persons: int, share: float) -> None:
    """In 500 draws, at least 89 % of the intervals hold the true share. False alarms: below 1e-6 at a coverage of 95 %.

    Of 30 persons, one has a fifth of the rows. Intervals of the normal distribution, with the plain variance over persons, cover 84 %.
    """
    drawn, covered = np.random.default_rng(persons), 0
    for _ in range(500):
        rows_of_person = np.ceil(5 * np.exp(1.5 * drawn.normal(size=persons))).astype(int)
        whose = np.repeat(np.arange(persons), rows_of_person)
        hits = (drawn.random(whose.size) < drawn.beta(2 * share, 2 * (1 - share), persons)[whose]).astype(float)
        low, high = weighted_metrics.share_interval(hits, whose)
        covered += low <= share <= high
    assert covered >= 445


def test_the_commonest_class_is_that_of_all_rows_in_each_resample() -> None:
    """Of ten equal classes the largest share of a resample is larger than a tenth, always."""
    random = np.random.default_rng(5)
    figures = weighted_metrics.several_class_figures(random.normal(size=(ROWS, 10)), np.arange(ROWS) % 10)
    low, high = weighted_metrics.confidence_intervals(figures, ROWS, seed=0)["accuracy of the commonest class"]
    assert low < 0.1 < high


def test_macro_f1_is_of_the_same_classes_in_each_resample() -> None:
    """A class of two rows that is never told: where neither is drawn, the mean of the two other classes would be half as much again."""
    classes = np.concatenate([np.arange(ROWS - 2) % 2, [2, 2]])
    logits = np.eye(3)[np.where(np.arange(ROWS) % 5 == 0, 1 - classes % 2, classes % 2)]
    figures = weighted_metrics.several_class_figures(logits, classes)
    point, (low, high) = (
        weighted_metrics.figures_of_all_rows(figures, ROWS)["macro F1"],
        weighted_metrics.confidence_intervals(figures, ROWS, seed=0)["macro F1"],
    )
    assert low < point < high < 1.2 * point


def test_a_count_is_a_row_that_is_there_so_often() -> None:
    logits, events = drawn(30)
    often = np.random.default_rng(2).integers(3, size=30)
    own = np.repeat(np.arange(30), often)
    whole, parts = weighted_metrics.two_class_figures(logits, events), weighted_metrics.two_class_figures(logits[own], events[own])
    expected = weighted_metrics.figures_of_all_rows(parts, own.size)
    for name, value in whole(often[None].astype(np.float64)).items():
        if name not in ("calibration slope", "accuracy of the commonest class") and "base rate" not in name:  # of all rows
            assert value[0] == pytest.approx(expected[name]), name


def test_what_has_no_value_is_nan_and_has_no_interval() -> None:
    """A model that flags nobody, and that tells nobody apart."""
    events = np.arange(40) % 8 == 0
    figures = weighted_metrics.two_class_figures(np.full(40, -2.0), events)
    found, ends = weighted_metrics.figures_of_all_rows(figures, 40), weighted_metrics.confidence_intervals(figures, 40, seed=0)
    assert (found["AUROC"], found["sensitivity at 0.5"], found["accuracy"]) == (0.5, 0.0, 0.875)
    for name in ("calibration slope", "positive predictive value at 0.5"):
        assert np.isnan(found[name])
        assert name not in ends


def test_tenths_are_of_those_alike_and_have_wilson_s_interval() -> None:
    logits, events = drawn()
    risks = 1 / (1 + np.exp(-logits))
    tenths = weighted_metrics.calibration_groups(risks, events.astype(np.float64), shares=True)
    assert [own["rows"] for own in tenths] == [40] * 10
    assert [own["predicted"] for own in tenths] == sorted(own["predicted"] for own in tenths)
    assert np.mean([own["observed"] for own in tenths]) == pytest.approx(events.mean())
    share, z, n = tenths[4]["observed"], 1.959964, 40
    middle, half = share + z**2 / (2 * n), z * (share * (1 - share) / n + z**2 / (4 * n**2)) ** 0.5
    assert [tenths[4]["low"], tenths[4]["high"]] == pytest.approx([(middle - half) / (1 + z**2 / n), (middle + half) / (1 + z**2 / n)])
    numbers = weighted_metrics.calibration_groups(np.arange(100.0), np.arange(100.0) ** 2, shares=False)
    assert (numbers[0]["low"], numbers[0]["high"]) == pytest.approx((0.9, 65.7))


@pytest.mark.slow
@pytest.mark.thorough
def test_ten_thousand_rows_take_seconds() -> None:
    logits, events = drawn(10_000)
    began = time.process_time()
    weighted_metrics.confidence_intervals(weighted_metrics.two_class_figures(logits, events), 10_000, seed=0)
    assert time.process_time() - began < 10  # 1 s on a quiet machine; row by row it would be minutes


def timed(rows: int = ROWS) -> tuple[Floats, Floats, Floats]:
    """Return survival beyond three cuts, times of which many are equal with events of two in three, and the cuts."""
    random = np.random.default_rng(2)
    ill = random.normal(size=rows)
    whole, left = 20 * random.exponential(np.exp(-ill)), random.uniform(0, 60, rows)
    seen = np.stack([np.minimum(whole, left).round(), whole <= left], axis=1)
    cuts = np.array([5.0, 15.0, 40.0])
    return np.exp(-np.outer(np.exp(0.6 * ill.round(1)), cuts / 20)), seen, cuts


def test_the_integrated_brier_score_is_graf_s_on_the_times_themselves() -> None:
    from statsmodels.duration.survfunc import SurvfuncRight

    lasting, seen, cuts = timed()
    times, events = seen[:, 0], seen[:, 1] > 0
    staying = SurvfuncRight(times + 0.5 * ~events, ~events)  # who had an event at a time is gone before others leave then

    def stays(until: float) -> float:
        return float(np.concatenate([[1.0], staying.surv_prob])[np.searchsorted(staying.surv_times, until, side="right")])

    moments, end = np.linspace(0, 30, 101), 30.0
    by_moment = []
    for moment in moments:
        errors = []
        for when, event, own in zip(times, events, lasting, strict=True):
            chance = np.interp(moment, [0.0, *cuts], [1.0, *own])
            errors.append((1 - chance) ** 2 / stays(np.floor(moment) + 0.5) if when > moment else chance**2 / stays(when) if event else 0.0)
        by_moment.append(float(np.mean(errors)))
    found = weighted_metrics.figures_of_all_rows(weighted_metrics.survival_figures(lasting, seen, cuts, end), ROWS)
    assert found["integrated Brier"] == pytest.approx(np.trapezoid(by_moment, moments) / end, rel=1e-9)


def test_one_prediction_has_one_integrated_brier_score_whatever_its_cuts() -> None:
    """Cuts are measured under noise, so those of a private model and of the one without noise end at other times."""
    _, seen, _ = timed()
    end = horizon(seen[:, 0], seen[:, 1] > 0)
    assert end == np.quantile(seen[seen[:, 1] > 0, 0], 0.9, method="lower")
    found = []
    for last in (30.0, 60.0, 100.0):
        cuts = np.linspace(1, last, 200)
        lasting = np.exp(-np.outer(np.ones(ROWS), cuts / 20))
        figures = weighted_metrics.survival_figures(lasting, seen, cuts, end)
        found.append(weighted_metrics.figures_of_all_rows(figures, ROWS)["integrated Brier"])
    assert found == pytest.approx([found[0]] * 3, rel=1e-3 if end <= 30 else 0.05)


def test_intervals_of_concordance_are_those_of_resamples_drawn_one_by_one() -> None:
    lasting, seen, cuts = timed()
    figures, random = weighted_metrics.survival_figures(lasting, seen, cuts, 30.0), np.random.default_rng(3)
    low, high = weighted_metrics.confidence_intervals(figures, ROWS, seed=1)["concordance"]
    found = []
    for _ in range(300):
        own = random.integers(ROWS, size=ROWS)
        found.append(concordance(seen[own, 0], seen[own, 1] > 0, lasting[own].sum(axis=1)))
    assert (low, high) == pytest.approx(tuple(np.quantile(found, (0.025, 0.975))), abs=0.008)
    assert low < weighted_metrics.figures_of_all_rows(figures, ROWS)["concordance"] < high


def test_times_that_nobody_stayed_to_see_have_no_brier_score() -> None:
    seen = np.array([[1.0, 0.0], [2.0, 0.0]])
    found = weighted_metrics.figures_of_all_rows(weighted_metrics.survival_figures(np.full((2, 1), 0.5), seen, np.array([3.0]), np.nan), 2)
    assert np.isnan(found["integrated Brier"])
    assert np.isnan(found["concordance"])


def test_the_calibration_slope_of_several_classes_is_the_factor_by_which_they_are_likeliest() -> None:
    """Classes drawn by a fifth of the logits: the slope is a fifth, and the same for two classes as without an intercept."""
    from scipy.optimize import minimize_scalar
    from scipy.special import log_softmax

    random = np.random.default_rng(3)
    logits = 5 * random.normal(size=(2000, 4))
    classes = np.array([random.choice(4, p=own) for own in np.exp(log_softmax(logits / 5, axis=1))])
    found = weighted_metrics.figures_of_all_rows(weighted_metrics.several_class_figures(logits, classes), 2000)["calibration slope"]
    best = minimize_scalar(lambda factor: -log_softmax(factor * logits, axis=1)[np.arange(2000), classes].sum(), bounds=(0, 2)).x
    assert found == pytest.approx(best, abs=1e-4)
    low, high = weighted_metrics.confidence_intervals(weighted_metrics.several_class_figures(logits, classes), 2000, seed=0)[
        "calibration slope"
    ]
    assert low < 0.2 < high < 0.25
    told_apart = weighted_metrics.figures_of_all_rows(weighted_metrics.several_class_figures(10 * np.eye(4)[classes], classes), 2000)
    assert np.isnan(told_apart["calibration slope"])  # no factor is the best
