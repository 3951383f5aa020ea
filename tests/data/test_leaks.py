"""Columns that give the target away are noted where a user's own rows are read, and nowhere else; texts in a table are noted too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ldpfl import api
from ldpfl.data.leaks import COLLISIONS, EMPTY, GAPS, LEAK, REPEATED_PERSONS, find_leaks, leak_note
from ldpfl.data.nodes import read_node_table
from ldpfl.data.settings import DataConfig
from ldpfl.data.tables import table_from_frame
from ldpfl.experiments.public_figures import without_private_figures

ROWS = 400
GENERATOR = np.random.default_rng(0)
SICK = GENERATOR.random(ROWS) < 0.1
STAGE = GENERATOR.integers(4, size=ROWS)
DAYS = GENERATOR.exponential(100.0, ROWS)
CLEAN = pd.DataFrame(
    {
        "age": GENERATOR.normal(60, 10, ROWS) + 8 * SICK,
        "ward": GENERATOR.choice(["a", "b", "c"], ROWS),
        "code": [f"c{place}" for place in range(ROWS)],
        "flat": 1.0,
    }
)
HOW: dict[str, Any] = {"count": 2, "rounds": 1, "seed": 1, "target_epsilon": 500.0, "baseline": False, "progress": False}


def notes(frame: pd.DataFrame, target: str | list[str], task: str, **changes: Any) -> list[str]:
    """Return the notes on leaks of a run; of these none may be handed on."""
    result = api.run(data=frame, target=target, task=task, **{**HOW, **changes})
    figures = result.to_dict()
    assert not any(note.startswith(LEAK) for note in without_private_figures(result.config, figures)["caveats"])
    return [note for note in figures["caveats"] if note.startswith(LEAK)]


@pytest.mark.thorough_except("multilabel-target9-values9")
@pytest.mark.parametrize(
    ("task", "target", "values"),
    [
        ("classification", "sick", {"copy": SICK.astype(int)}),
        ("classification", "sick", {"cause": np.where(SICK, "virus", "")}),
        ("classification", "sick", {"treated_days": np.where(SICK, 5 + DAYS, np.nan)}),
        ("classification", "sick", {"score": np.where(SICK, 100 + DAYS, -DAYS)}),
        ("classification", "stage", {"stage_again": STAGE + 7}),
        ("ordinal", "stage", {"grade": np.array(["i", "ii", "iii", "iv"])[STAGE]}),
        ("regression", "days", {"hours": 24 * DAYS}),
        ("regression", "days", {"logarithm": -np.log(DAYS)}),
        ("poisson", "visits", {"bills": 3 * STAGE}),
        ("multilabel", ["sick", "late"], {"delay": np.where(DAYS > 100, "yes", "no")}),
        ("survival", ["days", "sick"], {"left_on_day": DAYS}),
        ("survival", ["days", "sick"], {"died": SICK.astype(int)}),
    ],
)
def test_a_column_that_tells_the_target_is_named(task: str, target: str | list[str], values: dict[str, Any]) -> None:
    targets = {"sick": SICK.astype(int), "stage": STAGE, "days": DAYS, "visits": STAGE, "late": (DAYS > 100).astype(int)}
    frame = CLEAN.assign(**{name: targets[name] for name in ([target] if isinstance(target, str) else target)})
    assert notes(frame, target, task) == []
    (note,) = notes(frame.assign(**values), target, task)
    (name,) = values
    assert note.startswith(f"{LEAK}: {name} predicts it nearly without error, alone. Where such a column is known")


def test_a_column_of_many_words_that_is_filled_for_one_class_alone_is_found() -> None:
    cause = np.where(SICK, [f"cause {place % 60}" for place in range(ROWS)], "")
    table = table_from_frame(CLEAN.assign(sick=SICK.astype(int), cause=cause, known=np.where(SICK, cause, "-")))
    config = DataConfig(target="sick", columns=["ward", "cause", "known"], words=["ward", "cause", "known"])
    assert find_leaks(table, config, "class") == {"cause": True, "known": True}
    half_filled = table_from_frame(CLEAN.assign(sick=SICK.astype(int), cause=np.where(np.arange(ROWS) % 2 == 0, cause, "")))
    assert find_leaks(half_filled, config.model_copy(update={"columns": ["ward", "cause"]}), "class") == {}


def test_names_with_a_comma_or_space_are_quoted_in_notes() -> None:
    (note,) = leak_note({"ICD,code": True, "ward": True, "died on": True}, None)
    assert note.startswith(f"{LEAK}: 'ICD,code', ward, 'died on' each predict it")


def private_notes(frame: pd.DataFrame, start: str, **changes: Any) -> list[str]:
    """Return the notes of a run that begin with ``start``; of these none may be handed on."""
    result = api.run(data=frame.assign(sick=SICK.astype(int)), target="sick", **{**HOW, **changes})
    figures = result.to_dict()
    assert not any(note.startswith(start) for note in without_private_figures(result.config, figures)["caveats"])
    return [note for note in figures["caveats"] if note.startswith(start)]


@pytest.mark.thorough
def test_several_rows_of_a_person_are_said_where_the_person_is_not_named() -> None:
    visits = CLEAN.assign(patient=[f"p{place % 150}" for place in range(ROWS)])
    for columns in ([], ["age", "ward"]):
        (note,) = private_notes(visits, REPEATED_PERSONS, columns=columns)
        assert "400 rows have 150 different values of patient. So scores and intervals are too good" in note
        assert note.endswith("set --person patient (data.person)")
    assert private_notes(visits, REPEATED_PERSONS, person="patient") == []
    assert private_notes(CLEAN.assign(patient=range(ROWS)), REPEATED_PERSONS) == []
    assert private_notes(CLEAN.assign(patient=["p1", *[""] * (ROWS - 1)]), REPEATED_PERSONS) == []


def test_a_column_without_any_value_is_said() -> None:
    (note,) = private_notes(CLEAN.assign(lost="", gone="n/a"), EMPTY)
    assert note.startswith(f"{EMPTY}: lost, gone. ")
    assert private_notes(CLEAN.assign(lost=["x", *[""] * (ROWS - 1)]), EMPTY) == []


def test_columns_of_more_words_than_buckets_are_said() -> None:
    """With the default of 128 buckets, 100 words share many."""
    crowded = CLEAN.assign(code=[f"c{row % 100}x" for row in range(ROWS)], few=[f"w{row % 9}x" for row in range(ROWS)])
    (note,) = private_notes(crowded, COLLISIONS)
    assert note.startswith(f"{COLLISIONS}, which is 128: code (100 words). ")
    listed = {"code": [f"c{number}x" for number in range(100)]}
    assert private_notes(crowded, COLLISIONS, categories=listed) == []


def test_columns_with_missing_values_are_said_with_their_shares() -> None:
    """Each column's own share, the largest first; a column without any value has a note of its own."""
    lab = np.where(np.arange(ROWS) % 4 == 0, "NA", "7.5")
    note_word = np.where(np.arange(ROWS) % 2 == 0, "?", "red")
    (note,) = private_notes(CLEAN.assign(lab=lab, colour=note_word, lost=""), GAPS)
    assert note.startswith(f"{GAPS}: colour (50.0%), lab (25.0%). data.missing says")
    assert private_notes(CLEAN, GAPS) == []


def test_several_columns_that_tell_the_target_are_named_together() -> None:
    frame = CLEAN.assign(sick=SICK.astype(int), copy=SICK.astype(int), cause=np.where(SICK, "virus", ""))
    (note,) = notes(frame, "sick", "classification")
    assert note.startswith(f"{LEAK}: copy, cause each predict it nearly without error, alone. Where such columns are known")


def test_a_column_that_noise_hid_from_the_model_is_not_named() -> None:
    frame = CLEAN.assign(sick=SICK.astype(int), score=np.where(SICK, 100 + DAYS, -DAYS))
    assert notes(frame, "sick", "classification", target_epsilon=0.1) == []
    hidden = notes(frame.assign(cause=np.where(frame["sick"], "virus", "")), "sick", "classification", target_epsilon=0.1)
    assert [note.partition(" predicts")[0] for note in hidden] == [f"{LEAK}: cause"]


def test_a_node_notes_nothing_of_its_rows(tmp_path: Path) -> None:
    frame = CLEAN.assign(sick=SICK.astype(int), copy=SICK.astype(int))
    frame.to_csv(tmp_path / "own.csv", index=False)
    bounds = {"age": [0.0, 120.0], "copy": [0.0, 1.0]}
    config = DataConfig(name="node", target="sick", columns=["age", "copy"], bounds=bounds, classes=["0", "1"], scaling="bounds")
    own = read_node_table(config, "class", tmp_path / "own.csv")
    assert not any(note.startswith(LEAK) for note in own.notes)


def test_texts_in_a_table_are_said_and_how_they_are_trained_on() -> None:
    frame = CLEAN.assign(sick=SICK.astype(int), letter=[f"seen on day {place} and sent home" for place in range(ROWS)])
    (note,) = [note for note in api.run(data=frame, target="sick", **HOW).to_dict()["caveats"] if "texts of several words" in note]
    assert note.startswith("most cells of letter are texts")
    assert "set --text letter --model embedding-bag; " in note
    trained = api.run(data=frame, target="sick", text="letter", model="embedding-bag", **HOW)  # as the note says
    assert trained.config.data.text == "letter"
    named = api.run(data=frame, target="sick", settings={"data.words": ["letter"]}, **HOW).to_dict()["caveats"]
    assert not any("texts of several words" in note for note in named)
