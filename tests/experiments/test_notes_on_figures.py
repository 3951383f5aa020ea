"""Notes on what a run came to: probabilities too close together, nothing learnt, a wrong scale of inputs; and what ``auto`` chose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from numpy.typing import NDArray

from conftest import CommandLine
from ldpfl import api
from ldpfl.experiments.public_figures import without_private_figures
from ldpfl.experiments.start_warnings import FEW_OUTCOMES
from ldpfl.report.page import page
from ldpfl.report.scores import no_score_sentence

NARROW = "predicted probabilities lie far too close together"
CHANCE = "nothing was found to have been learnt"
UNSURE = "the test rows hardly show how good the model is"
OFF = "the mean predicted risk is far from the observed share"
EXTREME = "predicted probabilities are far too close to 0 and 1"
ONE_CLASS = "all test rows are predicted to be of the class"
EVENT = "the event is"
SCALE = "the inputs may be on a wrong scale"
HOW: dict[str, Any] = {"baseline": False, "progress": False, "seed": 1}
FEW: dict[str, Any] = {"clients.count": 4, "training.rounds": 3}
SMALL_STEP: dict[str, Any] = {**FEW, "training.server_learning_rate": 1e-3, "training.server_weight_decay": 0.0}


def samples(classes: int = 2, count: int = 600, told: float = 2.0) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return samples of 6 numbers whose classes lie ``told`` spreads apart."""
    generator = np.random.default_rng(0)
    labels = np.arange(count) % classes
    inputs = generator.normal(size=(count, 6)) + told * np.eye(6)[labels]
    return inputs.astype(np.float32), labels.astype(np.int64)


def rare_samples() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return samples of 6 numbers, about one in ten of which is of the second class."""
    inputs, _ = samples(told=0.0)
    risks = 1 / (1 + np.exp(3 - 1.5 * inputs[:, 0]))
    return inputs, (np.random.default_rng(2).random(len(inputs)) < risks).astype(np.int64)


def notes_of(data: Any, settings: dict[str, Any], start: str, epsilon: float = 50.0) -> list[str]:
    """Return the notes that begin with ``start``; of those of private rows none may be handed on."""
    result = api.run(data=data, model="linear", target_epsilon=epsilon, settings=settings, **HOW)
    public = without_private_figures(result.config, result.to_dict())["caveats"]
    assert not any(note.startswith(start) for note in public)
    return [note for note in result.to_dict()["caveats"] if note.startswith(start)]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("classes", [2, 3])
def test_probabilities_too_close_together_are_said(classes: int) -> None:
    (note,) = notes_of(samples(classes, told=1.0), SMALL_STEP, NARROW)
    assert "calibration slope" in note
    assert "more training.rounds, a larger training.server_learning_rate" in note
    assert not notes_of(samples(classes, told=1.0), {"clients.count": 4}, NARROW)


@pytest.mark.slow
def test_a_wide_interval_of_the_slope_above_1_is_enough_for_the_note() -> None:
    few = samples(told=0.6, count=300)
    (note,) = notes_of(few, {**SMALL_STEP, "training.server_learning_rate": 0.23}, NARROW)
    assert "95 % interval 1.1 to 8" in note
    assert not notes_of(few, {**SMALL_STEP, "training.server_learning_rate": 0.3}, NARROW)  # its interval begins at 0.81


def test_test_rows_without_the_event_are_said(tmp_path: Path) -> None:
    """Every model that predicts no event is right on all of them, so no figure shows how good it is."""
    inputs, outcomes = rare_samples()
    frame = pandas.DataFrame(inputs, columns=[f"x{column}" for column in range(6)]).assign(outcome=outcomes)
    test_file = tmp_path / "test.csv"
    frame[frame["outcome"] == 0].head(100).to_csv(test_file, index=False)
    settings = {**FEW, "data.test_path": str(test_file), "data.classes": ["0", "1"]}
    result = api.run(data=frame.tail(300), target="outcome", target_epsilon=50, settings=settings, **HOW)
    found = result.to_dict()
    assert any(note.startswith(FEW_OUTCOMES) for note in found["caveats"])
    assert not any(note.startswith(UNSURE) for note in found["caveats"])
    assert found["test_rows"] == 100
    assert no_score_sentence(found) == ""  # 100 rows were scored


@pytest.mark.parametrize(("copied", "is_said"), [(100, True), (5, False)])
def test_copies_of_training_rows_among_test_rows_are_said(copied: int, is_said: bool, tmp_path: Path) -> None:
    inputs, outcomes = rare_samples()
    frame = pandas.DataFrame(inputs, columns=[f"x{column}" for column in range(6)]).assign(outcome=outcomes)
    train, others = frame.head(300), frame.tail(300)
    file, test_file = tmp_path / "train.csv", tmp_path / "test.csv"
    train.to_csv(file, index=False)
    pandas.concat([train.head(copied), others.head(150 - copied)]).to_csv(test_file, index=False)
    settings = {**FEW, "data.test_path": str(test_file)}
    result = api.run(data=file, target="outcome", target_epsilon=50, settings=settings, **HOW)
    notes = [note for note in result.to_dict()["caveats"] if note.startswith("test rows are copies of training rows")]
    assert len(notes) == is_said
    assert all("100 of 150 rows of data.test_path have the same values" in note for note in notes)
    public = without_private_figures(result.config, result.to_dict())["caveats"]
    assert not any("copies of training rows" in note for note in public)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_model_that_is_no_better_than_chance_is_said() -> None:
    """Of two classes the AUROC decides; one run in 40 would be above chance by luck, and the seed is fixed."""
    (note,) = notes_of(samples(told=0.0), FEW, CHANCE)
    assert note.startswith(f"{CHANCE}: AUROC 0.")
    assert "chance is 0.5" in note
    assert "More rows at each client (of rows that you deal out: fewer clients, because each adds noise of its own), a larger" in note
    (note,) = notes_of(samples(3, told=0.0), FEW, CHANCE)
    assert note.startswith(f"{CHANCE}: accuracy 0.")
    assert "the share of the commonest class is 3" in note
    for classes in (2, 3):
        assert not notes_of(samples(classes), FEW, CHANCE)


@pytest.mark.slow
def test_a_score_on_few_events_is_said_to_be_unsure() -> None:
    inputs, _ = samples(told=0.0)
    risks = 1 / (1 + np.exp(2.2 - 1.5 * inputs[:, 0]))
    labels = (np.random.default_rng(2).random(len(inputs)) < risks).astype(np.int64)
    (note,) = notes_of((inputs, labels), FEW, UNSURE)
    assert ", and 15 of 120 rows have the event. New rows may score much lower or higher." in note
    assert "data.test_path" in note
    assert "more rows at each client (of rows that you deal out: fewer clients, because each adds noise of its own), fewer columns" in note
    assert not notes_of(samples(), FEW, UNSURE)


def test_a_model_that_has_learnt_nothing_gets_no_advice_on_thresholds() -> None:
    """All rows are predicted to be of the rare class, with risks far from its share, which is said in any case."""
    settings = {**FEW, "task.class_weights": [1.0, 100.0]}
    starts = (CHANCE, ONE_CLASS, OFF)
    for learnt in (True, False):
        inputs, rare = rare_samples()
        order = np.arange(len(rare)) if learnt else np.random.default_rng(3).permutation(len(rare))
        frame = pandas.DataFrame(inputs, columns=list("abcdef")).assign(died=rare[order])
        result = api.run(data=frame, target="died", target_epsilon=50.0, settings=settings, **HOW)
        found = [start for note in result.to_dict()["caveats"] for start in starts if note.startswith(start)]
        assert found == ([ONE_CLASS, OFF] if learnt else [CHANCE, OFF])


@pytest.mark.slow
@pytest.mark.thorough
def test_a_number_that_is_predicted_no_better_than_by_its_mean_is_said() -> None:
    inputs, _ = samples()
    targets = np.random.default_rng(1).normal(size=len(inputs)).astype(np.float32)
    settings = {**FEW, "task.name": "regression"}
    (note,) = notes_of((inputs, targets), settings, CHANCE)
    assert note.startswith(f"{CHANCE}: R2 ")
    assert not notes_of((inputs, inputs[:, 0]), {**settings, "training.rounds": 20}, CHANCE)


@pytest.mark.slow
@pytest.mark.thorough_except("poisson-visits")
@pytest.mark.parametrize(
    ("task", "target"),
    [("classification", "died"), ("classification", "grade"), ("regression", "days"), ("poisson", "visits"), ("ordinal", "grade")],
)
def test_a_model_that_says_the_same_of_each_row_is_said(task: str, target: str) -> None:
    """The only input is 0 in each row, so the output is the model's offset alone."""
    random = np.random.default_rng(3)
    frame = pandas.DataFrame({"flat": np.zeros(600), "died": np.arange(600) % 100 == 7, "grade": random.integers(4, size=600)})
    frame = frame.assign(days=random.normal(size=600), visits=random.poisson(2.0, size=600))
    settings = {**FEW, "data.bounds": {"flat": [-1, 1]}}
    found = api.run(data=frame, target=target, columns=["flat"], task=task, target_epsilon=8.0, settings=settings, **HOW).to_dict()
    (note,) = [note for note in found["caveats"] if note.startswith(CHANCE)]
    assert f"the model's output is the same for all {found['test_rows']} test rows" in note
    assert not any(note.startswith(ONE_CLASS) for note in found["caveats"])


@pytest.mark.slow
def test_one_class_for_all_rows_is_said_where_the_outputs_differ() -> None:
    inputs, _ = samples(told=0.0)
    rare = (np.random.default_rng(2).random(len(inputs)) < 1 / (1 + np.exp(3 - 0.5 * inputs[:, 0]))).astype(np.int64)
    frame = pandas.DataFrame(inputs, columns=list("abcdef")).assign(died=rare)
    result = api.run(data=frame, target="died", target_epsilon=50.0, settings=FEW, **HOW)
    (note,) = [note for note in result.to_dict()["caveats"] if note.startswith(ONE_CLASS)]
    assert note.startswith(f"{ONE_CLASS} '0': the accuracy shows no more than how common that class is")
    threshold = float(note.rpartition("--threshold ")[2])
    flagged = (result.predict(frame, threshold=threshold)["died"] == "1").mean()
    assert flagged == pytest.approx(rare.mean(), abs=0.03)
    assert not any(note.startswith(ONE_CLASS) for note in without_private_figures(result.config, result.to_dict())["caveats"])
    assert not notes_of(samples(), FEW, ONE_CLASS)


@pytest.mark.slow
@pytest.mark.thorough
def test_an_event_that_nearly_all_rows_have_is_named_with_the_way_to_the_other() -> None:
    inputs, _ = samples()
    frame = pandas.DataFrame(inputs, columns=list("abcdef")).assign(readmitted=np.where(np.arange(len(inputs)) % 30 < 2, "ja", "nein"))
    how: dict[str, Any] = {"data": frame, "target": "readmitted", "target_epsilon": 8.0, **HOW}
    result = api.run(**how, settings=FEW)
    (note,) = [note for note in result.to_dict()["caveats"] if note.startswith(EVENT)]
    assert note.startswith(f"{EVENT} 'nein', which 9")
    assert note.endswith("""If 'ja' is meant, name it last: --set 'data.classes=["nein", "ja"]'""")
    assert not any(note.startswith(EVENT) for note in without_private_figures(result.config, result.to_dict())["caveats"])
    for classes in (["nein", "ja"], ["ja", "nein"]):  # who names the order has chosen
        chosen = api.run(**how, settings={**FEW, "data.classes": classes}).to_dict()
        assert chosen["event"] == classes[1]
        assert not any(note.startswith(EVENT) for note in chosen["caveats"])


@pytest.mark.thorough_except("settings0-task.class_weights")
@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"task.class_weights": [1.0, 20.0]}, "task.class_weights"),
        ({"task.class_weights": [1.0, 20.0], "task.focusing": 1.0}, "task.class_weights and task.focusing"),
    ],
)
def test_a_loss_that_moves_the_predicted_risks_is_named_as_their_cause(settings: dict[str, Any], names: str) -> None:
    data = rare_samples()
    (note,) = notes_of(data, {**FEW, **settings}, OFF)
    assert f"was observed. {names} moved the predicted probabilities: train with the default loss" in note
    assert "class_shares" not in note
    table = pandas.DataFrame(data[0], columns=list("abcdef")).assign(died=data[1])
    how = {**HOW, "target_epsilon": 50.0, "settings": {**FEW, **settings}}
    (note,) = [note for note in api.run(data=table, target="died", **how).to_dict()["caveats"] if note.startswith(OFF)]
    assert f"{names} moved the predicted probabilities" in note


def test_a_mean_risk_far_from_the_share_of_a_common_event_is_said() -> None:
    """The mean risk is less than twice the share of the event, but the other class is predicted far too often."""
    inputs, rare = rare_samples()
    (note,) = notes_of((inputs, 1 - rare), {**FEW, "task.class_weights": [20.0, 1.0]}, OFF)
    assert "was observed" in note
    assert not notes_of(samples(), FEW, OFF)


@pytest.mark.thorough
@pytest.mark.parametrize(("task", "target"), [("classification", "died"), ("regression", "cost"), ("poisson", "visits")])
def test_a_mean_prediction_apart_from_the_observed_mean_is_said(task: str, target: str) -> None:
    """A small clipping norm cuts the rare class and the tail of a skewed target, and the note tells to take a larger one."""
    inputs, rare = rare_samples()
    frame = pandas.DataFrame(np.tile(inputs, (4, 1)), columns=list("abcdef"))
    numbers = np.random.default_rng(4)
    frame = frame.assign(died=np.tile(rare, 4), cost=numbers.lognormal(7, 1.1, 2400), visits=numbers.negative_binomial(0.3, 0.1, 2400))
    how = {**HOW, "columns": list("abcdef"), "task": task, "target": target, "target_epsilon": 50.0}

    def notes(**settings: Any) -> list[str]:
        found = api.run(data=frame, settings={**FEW, "training.rounds": 20, **settings}, **how).to_dict()["caveats"]
        return [note for note in found if " far from the observed " in note]

    (note,) = notes(**{"mechanism.clip_norm": 0.05})
    assert "was observed" in note
    rounds = "more or fewer training.rounds (a run with the noise-free baseline shows which)"
    assert f"a larger mechanism.clip_norm (it is 0.05) or {rounds}" in note
    assert not notes(**{"mechanism.clip_norm": 20.0})
    wrong_start = {"classification": [0.5, 0.5], "poisson": [0.99], "regression": []}
    # Nothing is clipped, and nothing is learnt.
    untrained = {"mechanism.clip_norm": 5000.0, "training.server_learning_rate": 1e-9, "data.class_shares": wrong_start[task]}
    (note,) = notes(**untrained)
    assert rounds in note
    assert "clip" not in note.lower()


@pytest.mark.slow
def test_a_mean_risk_that_is_off_without_noise_too_is_not_blamed_on_noise() -> None:
    inputs, rare = rare_samples()
    frame = pandas.DataFrame(np.tile(inputs, (4, 1)), columns=list("abcdef")).assign(died=np.tile(rare, 4))
    how = {**HOW, "baseline": True, "data": frame, "target": "died", "target_epsilon": 50.0}
    found = api.run(**how, settings={**FEW, "training.rounds": 20, "mechanism.clip_norm": 0.05}).to_dict()
    (note,) = [note for note in found["caveats"] if note.startswith(OFF)]
    clipped = (
        f"Clipping shortened {found['clipped_records_per_round'][-1]:.1%} of the gradients in the last round (known only in a simulation)"
    )
    assert f"was observed. {clipped}. As a rule those of the rarer class are the longest" in note
    assert "a larger mechanism.clip_norm (it is 0.05) or more training.rounds (without noise the mean risk is " in note
    unclipped = {**FEW, "mechanism.clip_norm": 5000.0, "training.server_learning_rate": 1e-9, "data.class_shares": [0.5, 0.5]}
    (note,) = [note for note in api.run(**how, settings=unclipped).to_dict()["caveats"] if note.startswith(OFF)]
    assert ". Take more training.rounds (without noise the mean risk is " in note
    assert "clip" not in note.lower()


def test_the_threshold_that_is_suggested_lies_within_the_predicted_risks() -> None:
    """All risks lie above the base rate, so that a threshold there would flag each row."""
    inputs, rare = rare_samples()
    frame = pandas.DataFrame(inputs, columns=list("abcdef")).assign(died=rare)
    settings = {**FEW, "task.class_weights": [1.0, 100.0]}
    result = api.run(data=frame, target="died", target_epsilon=50.0, settings=settings, **HOW)
    (note,) = [note for note in result.to_dict()["caveats"] if note.startswith(ONE_CLASS)]
    risks = result.predict(frame)["probability of 1"]
    assert risks.min() > 0.5
    assert (risks >= float(note.rpartition("--threshold ")[2])).mean() == pytest.approx(rare.mean(), abs=0.05)


@pytest.mark.thorough
def test_why_there_is_no_calibration_slope_is_said(tmp_path: Path) -> None:
    settings = {**FEW, "training.rounds": 10}
    result = api.run(data=samples(told=20.0), model="linear", target_epsilon=50.0, settings=settings, folder=tmp_path / "run", **HOW)
    assert (result.scores["AUROC"], result.scores["calibration slope"]) == (1.0, None)
    for text in (str(result), page([tmp_path / "run"])):
        assert "There is no calibration slope: the predicted risks separate the classes perfectly" in " ".join(text.split())


def test_a_reversed_ranking_is_not_called_too_extreme() -> None:
    inputs, labels = samples(count=1200)
    train, test = (pandas.DataFrame(inputs[own], columns=list("abcdef")) for own in (slice(0, 600), slice(600, 1200)))
    data = (train.assign(died=labels[:600]), test.assign(died=1 - labels[600:]))
    result = api.run(data=data, target="died", target_epsilon=50.0, settings={**FEW, "training.rounds": 10}, **HOW)
    assert result.intervals["calibration slope"][1] < 0
    notes = result.to_dict()["caveats"]
    assert any(note.startswith(CHANCE) for note in notes)
    assert not any(note.startswith(EXTREME) for note in notes)


@pytest.mark.slow
@pytest.mark.thorough_except("usual", "small")
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda x: 40 * x, "subtract a mean and divide by a spread"),
        (lambda x: x / 100, "subtract a mean and divide by a spread"),
        (lambda x: x, ""),
        (lambda x: np.abs(x[:, :, None, None] / 10).clip(0, 1) * np.ones((4, 4), np.float32), "give images as bytes (uint8) from 0 to 255"),
        (lambda x: (x[:, :1, None] > 0).astype(np.uint8) * np.ones((4, 4), np.uint8), "multiply them by 255"),
        (lambda x: (x[:, :1, None] > 0).astype(np.uint8) * np.full((4, 4), 200, np.uint8), ""),
    ],
    ids=["large", "small", "usual", "from 0 to 1", "bytes of 0 and 1", "bytes"],
)
def test_inputs_on_a_wrong_scale_are_said(changed: Any, said: str) -> None:
    inputs, labels = samples()
    notes = notes_of((changed(inputs), labels), {**FEW, "training.rounds": 1}, SCALE)
    assert len(notes) == bool(said)
    assert all(said in note for note in notes)


@pytest.mark.slow
@pytest.mark.thorough
def test_the_numbers_that_auto_chose_are_shown(tmp_path: Path, ldpfl: CommandLine) -> None:
    result = api.run(data=samples(), model="linear", target_epsilon=8.0, settings=FEW, folder=tmp_path / "run", **HOW)
    chosen = result.to_dict()["chosen"]
    assert list(chosen) == ["training.server_learning_rate", "training.server_weight_decay"]
    rate = f"training.server_learning_rate = {chosen['training.server_learning_rate']:.3g}"
    printed = ldpfl("show", tmp_path / "run")
    for text in (printed.out.replace("│", " "), str(result).replace("│", " "), page([tmp_path / "run"])):
        assert rate in " ".join(text.split())
    given = {**FEW, **{key.replace("'", ""): value for key, value in chosen.items()}}
    again = api.run(data=samples(), model="linear", target_epsilon=8.0, settings=given, **HOW)
    assert again.to_dict()["chosen"] == {}
    assert again.scores == result.scores
