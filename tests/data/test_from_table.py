"""What becomes of a table: by public rules alone, and each refusal names the place."""

from __future__ import annotations

import pathlib
import tracemalloc
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from ldpfl import ConfigError, DataError
from ldpfl.data import Dataset
from ldpfl.data.columns import column_words, person_names
from ldpfl.data.from_table import dataset_from_table
from ldpfl.data.holding_out import held_out
from ldpfl.data.new_rows import predict_rows
from ldpfl.data.scaling import scaled_by_bounds
from ldpfl.data.settings import DataConfig
from ldpfl.data.tables import read_table, table_from_frame
from ldpfl.data.unscaled import Unscaled
from ldpfl.tasks import NO_TOKEN, Targets


def rows(count: int = 20) -> pd.DataFrame:
    generator = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "age": generator.integers(20, 90, count).astype(float),
            "ward": generator.choice(["a", "b", "c"], count),
            "clinic": [f"C{place % 4}" for place in range(count)],
            "ill": [place % 2 for place in range(count)],
        }
    )


def made(frame: pd.DataFrame, targets: Targets = "class", test: pd.DataFrame | None = None, **settings: Any) -> Dataset:
    config = DataConfig(**{"target": "ill", **settings})
    return dataset_from_table("rows", table_from_frame(frame), None if test is None else table_from_frame(test), config, targets)


def test_numbers_keep_their_scale_until_it_is_known() -> None:
    frame = rows()
    own = made(frame, columns=["age"], test=frame)
    assert own.unscaled == (Unscaled("age", 0), Unscaled("ill, the target", classes=2))
    np.testing.assert_array_equal(own.train.tensor[:, 0], frame["age"])
    bounded = made(frame, columns=["age"], test=frame, bounds={"age": [20.0, 70.0]})
    assert bounded.unscaled[0] == Unscaled("age", 0, (20.0, 70.0))
    np.testing.assert_allclose(scaled_by_bounds(bounded).train.tensor[:, 0], np.clip((frame["age"] - 20) / 25 - 1, -1, 1), atol=1e-6)
    with pytest.raises(DataError, match=r"the column 'age' has no bounds"):
        scaled_by_bounds(own)


def test_words_are_numbered_by_what_is_public_or_hashed() -> None:
    """The hash is the same on every machine: it is pinned."""
    frame = rows()
    listed = made(frame, columns=["ward"], test=frame, categories={"ward": ["c", "b", "a"]}).train.tensor
    assert listed.argmax(dim=1).tolist() == [{"c": 0, "b": 1, "a": 2}[word] for word in frame["ward"]]
    hashed = made(frame, columns=["ward"], test=frame, buckets=8).train.tensor
    assert hashed.shape == (20, 8)
    assert hashed.sum(dim=1).tolist() == [1.0] * 20
    places = {word: int(row.argmax()) for word, row in zip(frame["ward"], hashed, strict=True)}
    assert places == {"a": 4, "b": 3, "c": 0}
    alone = made(frame[frame["ward"] == "b"], columns=["ward"], test=frame, buckets=8).train.tensor
    assert set(alone.argmax(dim=1).tolist()) == {places["b"]}  # other rows have no say


@pytest.mark.parametrize(("missing", "width"), [("center", 1), ("indicator", 2)])
def test_a_gap_becomes_the_middle(missing: str, width: int) -> None:
    frame = rows()
    frame.loc[3, "age"] = np.nan
    inputs = scaled_by_bounds(made(frame, columns=["age"], test=frame, bounds={"age": [0.0, 100.0]}, missing=missing)).train.tensor
    assert inputs.shape == (20, width)
    assert inputs[3].tolist() == [0.0, 1.0][:width]
    with pytest.raises(DataError, match="row 4: the column 'age' has no value"):
        made(frame, columns=["age"], missing="refuse")


def test_who_is_a_test_row_does_not_depend_on_what_stands_there() -> None:
    chosen = held_out(20, 5)
    assert chosen.sum() == 4
    frame = rows()
    turned = frame.iloc[::-1].reset_index(drop=True)
    for own in (frame, turned):
        found = made(own, columns=["age"])
        np.testing.assert_array_equal(found.test.tensor[:, 0], own["age"][chosen])


def test_clients_are_those_that_the_data_name() -> None:
    frame = rows()
    found = made(frame, client="clinic", test=frame)
    assert found.clients is not None
    assert found.clients.tolist() == [place % 4 for place in range(20)]
    assert found.train.tensor.shape[1] == 1 + 128  # the client's name is no input
    frame.loc[7, "clinic"] = None
    with pytest.raises(DataError, match=r"row 8: data.client 'clinic' has no value"):
        made(frame, client="clinic")


def test_targets_of_each_task() -> None:
    frame = rows()
    classes = made(frame, test=frame)
    assert (classes.outputs, classes.train.targets.dtype) == (2, torch.int64)
    assert "numbers: age; words, hashed: ward, clinic" in classes.notes[0]
    assert "taken from the data" in classes.notes[-1]
    assert made(frame, test=frame, classes=["1", "0"]).train.targets.tolist() == [1 - place % 2 for place in range(20)]
    assert made(frame, test=frame, classes=["1", "0"]).notes == classes.notes[:-1]
    number = made(frame, "number", test=frame, columns=["ward"], target="age", bounds={"age": [0.0, 100.0]})
    assert (number.outputs, number.unscaled) == (1, (Unscaled("age, the target", bounds=(0.0, 100.0)),))
    assert scaled_by_bounds(number).unit == 50.0
    labels = made(frame.assign(well=1 - frame["ill"]), "classes", test=None, target=["ill", "well"])
    assert labels.train.targets.sum(dim=1).tolist() == [1.0] * 16
    text = made(frame.assign(note="a b"), "tokens", target="", text="note", length=4)
    assert text.train.tensor[0].tolist() == [0, 98, 33, 99]
    assert text.train.targets[0].tolist() == [98, 33, 99, NO_TOKEN]


def test_a_client_for_each_file_of_a_folder_takes_one_line_that_the_message_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FOLDER").mkdir()
    for name in ("north", "south"):
        rows().drop(columns="clinic").assign(code="0012").to_csv(f"FOLDER/{name}.csv", index=False)
    config = DataConfig(target="ill", client="the clinic", columns=["age"])
    with pytest.raises(DataError, match=r"no such column: .* If each file of the folder is a client, add a column") as refused:
        dataset_from_table("rows", read_table(Path("FOLDER")), None, config, "class")
    exec(str(refused.value).rpartition("in Python: ")[2], {"pandas": pd, "pathlib": pathlib})
    joined = read_table(Path("all.csv"))
    assert dataset_from_table("rows", joined, None, config, "class").client_names == ("north", "south")
    assert set(joined.columns["code"]) == {"0012"}
    with pytest.raises(DataError, match=r"no such column") as of_one_file:
        dataset_from_table("rows", joined, None, config.model_copy(update={"client": "site"}), "class")
    assert "each file" not in str(of_one_file.value)


def test_texts_become_hashed_words() -> None:
    frame = rows().assign(note=["Fever, fever!", *["x"] * 19])
    found = made(frame, test=frame, text="note", length=3, vocabulary=100)
    first = found.train.tensor[0].tolist()
    assert (first[0] == first[1], first[2], found.vocabulary) == (True, 0, 100)
    assert 0 < first[0] < 100


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"target": "il"}, "data.target names 'il', but there is no such column: did you mean 'ill'"),
        ({"target": ""}, r"data.target is missing: name the column to predict"),
        ({"client": "clinik"}, "data.client names 'clinik', but there is no such column: did you mean 'clinic'"),
        ({"columns": ["agee"]}, "data.columns names 'agee', but there is no such column"),
        ({"columns": ["ill"]}, "is the target, the client or the person"),
        ({"bounds": {"age": [9.0, 9.0]}}, "expected the smallest value first, then the largest"),
        (
            {"bounds": {"ward": [0.0, 1.0]}},
            "row 1: no value in the column 'ward' is a number; .* data.words and not in",
        ),
        ({"bounds": {"alter": [0.0, 1.0]}}, "data.bounds names 'alter', but there is no such column: known: age, "),
        ({"categories": {"ward": ["a", "b"]}}, "column 'ward' is not in data.categories.ward"),
        ({"classes": ["0"]}, "the class in the column 'ill' is not in data.classes, expected one of 0"),
        ({"target": ["ill", "age"]}, "set task.name to 'multilabel'"),
        ({"text": "age"}, "holds numbers"),
        ({"text": "ward", "columns": ["age"]}, "leave data.columns out"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, DataError), match=said):
        made(rows(), **settings)


def test_targets_that_tell_nothing_are_refused() -> None:
    with pytest.raises(DataError, match="'ill' is the same in every row"):
        made(rows().assign(ill=1))
    with pytest.raises(DataError, match=r"set task.name to 'regression'"):
        made(rows(200), target="age")
    with pytest.raises(DataError, match=r"set task.name to 'regression'"):
        made(rows(200).assign(ill=[None, *range(199)]))  # a class is meant seldom, so the missing value is not the first problem
    with pytest.raises(DataError, match="row 2: the target 'ill' has no value"):
        made(rows().assign(ill=[0, None, *[1] * 18]))
    with pytest.raises(DataError, match="row 2: the target 'ill' has no value"):
        made(rows().assign(ill=[1, None, *[1] * 18]))
    with pytest.raises(DataError, match="row 3: the label in the column 'ill' must be 0 or 1"):
        made(rows().assign(ill=[0, 1, 2, *[1] * 17]), "classes", target=["ill", "age"])
    with pytest.raises(ConfigError, match="two columns or more"):
        made(rows(), "classes")
    with pytest.raises(DataError, match="too few to keep a fifth"):
        made(rows(4))
    with pytest.raises(DataError, match="no input columns"):
        made(rows()[["ill"]])


@pytest.mark.parametrize("targets", ["number", "count", "class", "classes", "survival"])
def test_all_rows_with_a_stray_word_in_a_target_of_numbers_are_named_and_no_word_is(targets: Targets, tmp_path: Path) -> None:
    cells = [str(place % 2) for place in range(40)]
    for place in (7, 21, 30):
        cells[place] = "see note"
    pd.DataFrame({"age": range(40), "told": cells, "other": [0, 1] * 20}).to_csv(tmp_path / "rows.csv", index=False)
    target = ["told", "other"] if targets in ("classes", "survival") else "told"
    with pytest.raises(DataError) as refused:
        dataset_from_table("rows", read_table(tmp_path / "rows.csv"), None, DataConfig(target=target), targets)
    assert "rows.csv, line 9, line 23, line 32: the target 'told' is not a number, " in str(refused.value)
    assert "see note" not in str(refused.value)
    assert ("name all classes" in str(refused.value)) == (targets == "class")


@pytest.mark.parametrize("targets", ["number", "count"])
def test_a_gap_in_a_target_of_numbers_is_refused_without_advice_on_classes(targets: Targets) -> None:
    with pytest.raises(DataError, match=r"row 2: the target 'ill' has no value \(.*\): leave such rows out$"):
        made(rows().assign(ill=[0, None, *[1] * 18]), targets)


def test_many_rows_without_a_target_are_named_in_part() -> None:
    frame = rows(40).assign(ill=[None] * 9 + [0, 1] * 15 + [0])
    with pytest.raises(DataError, match=r"row 1, row 2, row 3, row 4, row 5 and 4 others: the target 'ill' has no value"):
        made(frame)


def test_a_word_is_the_same_from_a_file_and_from_a_frame(tmp_path: Path) -> None:
    """Truth values, days and long numbers, which pandas knows as what they are and a CSV file as text: also where categories are named."""
    seen = pd.to_datetime(["2020-01-01", "2021-02-03"] * 10)
    frame = pd.DataFrame({"smokes": [True, False] * 10, "seen": seen, "number": [12345678901234567, 5] * 10})
    frame = frame.assign(outcome=["alive", "died"] * 10)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    for categories in ({}, {"smokes": ["True", "False"]}):
        words = [name for name in ("smokes", "seen", "number") if name not in categories]
        how = DataConfig(target="outcome", columns=["smokes", "seen", "number"], words=words, categories=categories, buckets=64)
        tables = table_from_frame(frame), read_table(tmp_path / "rows.csv")
        assert torch.equal(*(dataset_from_table("rows", table, None, how, "class").train.tensor for table in tables))


LONG = [2**53 + 1 + place // 2 for place in range(20)]
"""Names of ten persons with two rows each. Float64 holds only every second one of these numbers."""


@pytest.mark.parametrize("kind", ["frame", "frame with a gap", "csv", "parquet", "parquet with a gap", "folder", "decimal"])
def test_long_whole_numbers_are_exact_where_they_are_names(kind: str, tmp_path: Path) -> None:
    frame = rows().assign(patient=LONG, code=LONG)
    if "gap" in kind:
        frame["code"] = frame["code"].astype("Int64").where(frame.index != 3)
    if kind == "decimal":
        frame = frame.assign(patient=[Decimal(number) for number in LONG])
    if kind == "csv":
        frame.to_csv(tmp_path / "rows.csv", index=False)
    elif kind == "folder":  # the second file holds short numbers alone, the third one texts
        for place, part in enumerate((frame[:10], frame[10:15].assign(code=7), frame[15:].astype({"patient": str, "code": str}))):
            part.to_parquet(tmp_path / f"{place}.parquet")
    elif kind.startswith("parquet"):
        frame.to_parquet(tmp_path / "rows.parquet")
    path = tmp_path if kind == "folder" else tmp_path / f"rows.{kind[:7]}"
    table = table_from_frame(frame) if kind.startswith("frame") or kind == "decimal" else read_table(path)
    names = [str(number) for number in LONG]
    assert column_words(table, "patient") == person_names(table, DataConfig(person="patient", target="ill")) == names
    assert column_words(table.take(np.array([5, 0])), "patient") == [names[5], names[0]]
    if kind != "folder":
        assert column_words(table, "code") == [name if "gap" not in kind or row != 3 else "" for row, name in enumerate(names)]
    owners = dataset_from_table("rows", table, None, DataConfig(target="ill", client="patient", columns=["age"]), "class")
    assert owners.client_names is not None
    assert set(owners.client_names) == set(names)


def test_long_whole_numbers_are_exact_as_categories_classes_and_identifiers_of_predictions() -> None:
    frame = rows().assign(code=LONG, ill=[LONG[0], LONG[-1] + 1] * 10)
    told = made(frame, columns=["code"], categories={"code": sorted({str(number) for number in LONG})}, test=frame)
    assert told.train.tensor.argmax(dim=1).tolist() == [place // 2 for place in range(20)]
    assert told.encoder is not None
    assert told.encoder.classes == (str(LONG[0]), str(LONG[-1] + 1))
    found = predict_rows(told.encoder, torch.nn.Linear(10, 2), frame.assign(patient=LONG), id_column="patient")
    assert found["patient"].tolist() == [str(number) for number in LONG]


@pytest.mark.parametrize("setting", ["person", "client", "words"])
def test_names_that_were_rounded_are_refused(setting: str) -> None:
    frame = rows().assign(code=[float(number) for number in LONG])
    use: dict[str, Any] = {"columns": ["code"], "words": ["code"]} if setting == "words" else {"columns": ["age"], setting: "code"}
    with pytest.raises(DataError, match=r"row 1: the column 'code', which data\.\w+ names, holds floats of 2\^53 or more, which may be"):
        made(frame, **use)
    made(frame, columns=["age", "code"], numbers=["code"])


def test_a_client_has_one_name_however_it_is_written() -> None:
    """Two names of one client would count as two clients. Leading zeros stay, since clients' names are shown."""
    names = ["Zu\u0308rich", "Zürich", "1.7E1", "17", "17.0", "007", "1.10", "1.1", "\u0661\u0667", "ward\u200b 3", "ward 3", "12E5"]
    data = made(rows(24).assign(site=names * 2), columns=["age"], client="site")
    assert data.client_names == ("007", "1.1", "1.10", "12E5", "17", "Zürich", "ward 3")


def test_two_frames_that_differ_in_a_long_number_are_different_data() -> None:
    first, other = (table_from_frame(rows().assign(code=numbers)) for numbers in (LONG, [LONG[0] - 1, *LONG[1:]]))
    assert first.digest != other.digest


@pytest.mark.parametrize(
    ("values", "noted"),
    [(range(6), True), ([*range(1, 8), 12, 40], True), (range(5), False), ([0, 1, 2, 3, 4, 6], False), (range(2, 9), False)],
)
def test_classes_that_may_be_counts_are_said(values: Iterable[int], noted: bool) -> None:
    counts = [*values] * 4
    frame = rows(len(counts)).assign(ill=counts)
    notes = [note for note in made(frame).notes if note.startswith("the target 'ill' has")]
    assert len(notes) == noted
    assert all("(--task poisson)" in note and "'regression'" in note for note in notes)
    assert not any(note.startswith("the target 'ill' has") for note in made(frame, "ordered").notes)
    assert not any(note.startswith("the target 'ill' has") for note in made(frame, classes=[*map(str, sorted(set(counts)))]).notes)


def test_codes_keep_their_leading_zeros_from_each_kind_of_file(tmp_path: Path) -> None:
    """Unless the settings say that they are numbers."""
    long = "0" * 3 + "1" * 17
    frame = pd.DataFrame({"code": ["0012", "12", "0471", "1233"] * 5, "long": [long, long[:-1] + "2"] * 10, "ill": [0, 1] * 10})
    frame.to_csv(tmp_path / "rows.csv", index=False)
    frame.to_parquet(tmp_path / "rows.parquet")
    for table in (table_from_frame(frame), read_table(tmp_path / "rows.csv"), read_table(tmp_path / "rows.parquet")):
        data = dataset_from_table("rows", table, None, DataConfig(target="ill", columns=["code", "long"], buckets=64), "class")
        assert data.encoder is not None
        assert data.encoder.data.words == ["code", "long"]
        assert len({tuple(row) for row in data.train.tensor[:, :64].tolist()}) == 4
        assert len({tuple(row) for row in data.train.tensor[:, 64:].tolist()}) == 2
    as_numbers: list[dict[str, Any]] = [{"numbers": ["code"]}, {"bounds": {"code": [0.0, 2000.0]}}]
    for settings in as_numbers:
        numbers = made(frame, columns=["code"], **settings).train.tensor
        assert set(numbers[:, 0].tolist()) == {12.0, 471.0, 1233.0}
    assert made(frame, target="code", columns=["ill"]).outputs == 4


def test_a_code_that_lost_its_zeros_is_refused_with_the_reason() -> None:
    frame = rows().assign(code=["0012", "1233"] * 10)
    settings: dict[str, Any] = {"columns": ["code"], "categories": {"code": ["0012", "1233"]}}
    with pytest.raises(
        DataError, match=r"expected one of 0012, 1233, or an empty cell \(a spreadsheet, or pandas without dtype=str, drops"
    ):
        made(frame, test=frame.assign(code=[12, 1233] * 10), **settings)


def test_one_long_name_of_a_client_takes_no_memory_for_others() -> None:
    """An array of texts is as wide as the longest everywhere: a gigabyte here."""
    frame = pd.DataFrame(
        {"age": range(300), "who": ["a", "b", "a"] * 99 + ["b", "c" * 1_000_000, "c" * 1_000_000], "told": ["x", "y"] * 150}
    )
    tracemalloc.start()
    try:
        made = dataset_from_table("rows", table_from_frame(frame), None, DataConfig(name="given", target="told", client="who"), "class")
        assert tracemalloc.get_traced_memory()[1] < 300e6
    finally:
        tracemalloc.stop()
    assert made.clients is not None
    assert set(made.clients.tolist()) <= {0, 1, 2}


def test_an_index_of_a_frame_is_said_to_be_no_column() -> None:
    """A person who is named by the index alone would have each row protected by itself."""
    frame = rows().assign(patient=[f"P{row // 2}" for row in range(20)]).set_index("patient")
    (note,) = [note for note in made(frame, columns=["age"]).notes if "index" in note]
    assert "the data frame's index (patient) is not used" in note
    with pytest.raises(DataError, match=r"data\.person names 'patient', .*so give frame\.reset_index\(\)"):
        made(frame, columns=["age"], person="patient")
    assert not any("index" in note for note in made(frame.reset_index(), columns=["age"]).notes)
