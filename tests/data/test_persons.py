"""Persons with several rows: which rows are whose, which count in a round, and who is held out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from ldpfl.data import held_out_by_person
from ldpfl.data.from_table import dataset_of
from ldpfl.data.holding_out import with_validation, without_a_tenth
from ldpfl.data.partition import partition_by_code
from ldpfl.data.persons import Persons, numbered
from ldpfl.data.samples import Dataset
from ldpfl.data.settings import DataConfig
from ldpfl.data.tables import table_of
from ldpfl.errors import ConfigError, DataError
from ldpfl.experiments.dataset import Given, load_dataset
from ldpfl.experiments.recipes import load_recipe


def visits(persons: int = 20, seed: int = 0) -> pd.DataFrame:
    """One to six rows a person, in any order; a value that names its person, so that it is known whose row is where."""
    generator = np.random.default_rng(seed)
    who = np.repeat(np.arange(persons), generator.integers(1, 7, persons))
    generator.shuffle(who)
    return pd.DataFrame({"patient": [f"P{number}" for number in who], "lab": who.astype(float), "outcome": who % 2})


def data_of(frame: pd.DataFrame, test: pd.DataFrame | None = None, **settings: object) -> Dataset:
    config = DataConfig.model_validate({"target": "outcome", "person": "patient", **settings})
    return dataset_of("visits", table_of(frame), None if test is None else table_of(test), config, "class")


def test_persons_are_numbered_in_the_order_of_their_first_rows() -> None:
    assert numbered(["b", "a", "b", "c", "a"]).tolist() == [0, 1, 0, 2, 1]


def test_rows_are_those_of_their_persons_and_come_with_how_many_there_are() -> None:
    persons = Persons.of(np.array([0, 1, 0, 2, 1, 0]), 2)
    rows, sharing = persons.rows_of(np.array([2, 0]))
    assert len(persons) == 3
    assert (rows.tolist(), sharing.tolist()) == ([3, 0, 2, 5], [1, 3, 3, 3])


def test_a_person_s_rows_take_turns_and_each_person_takes_the_same_room() -> None:
    persons = Persons.of(np.array([0, 0, 0, 0, 0, 1, 2, 2]), 2)
    seen = []
    for number in range(1, 6):
        index, mask = persons.turn(torch.tensor([0, 1, 2]), number)
        assert index.shape == mask.shape == (3, 2)
        seen += index[0].tolist()
        assert index[1:].tolist() == [[5, 5], [6, 7]]  # in the place of a row that is not there stands one of the same person
        assert mask.tolist() == [[1, 1], [1, 0], [1, 1]]
    assert seen == [0, 1, 2, 3, 4] * 2


def test_rows_without_an_answer_count_where_a_person_has_no_others() -> None:
    persons = Persons.of(np.array([0, 0, 1, 1]), 4, np.array([False, True, False, False]))
    assert persons.counts.tolist() == [1, 2]
    assert persons.rows_of(np.array([0, 1]))[0].tolist() == [1, 2, 3]


def test_a_person_needs_a_row_that_counts() -> None:
    with pytest.raises(ConfigError, match=r"at least 1, got 0"):
        Persons.of(np.array([0]), 0)


def test_nobody_has_training_and_test_rows() -> None:
    frame = visits()
    data = data_of(frame)
    train, test = (set(part.tensor[:, 0].tolist()) for part in (data.train, data.test))
    assert len(train & test) == 0
    assert (len(train), len(test)) == (16, 4)
    assert len(data.train) + len(data.test) == len(frame)  # no row is lost
    assert data.encoder is not None
    assert data.encoder.data.columns == ["lab"]  # the name is no input


def test_anybody_can_say_which_rows_are_test_rows() -> None:
    frame = visits()
    data, held = data_of(frame), held_out_by_person(frame["patient"])
    assert data.test.tensor[:, 0].tolist() == pytest.approx(frame["lab"][held].tolist())
    assert data.train.tensor[:, 0].tolist() == pytest.approx(frame["lab"][~held].tolist())


def test_who_is_held_out_depends_on_nobody_s_name_or_rows() -> None:
    """Another name and other values, and more rows behind those of the others: the others stay where they were."""
    frame = visits()
    first = frame.patient.iloc[0]
    changed = frame[frame.patient != first]
    new = pd.DataFrame({"patient": ["Q"] * 9, "lab": 99.0, "outcome": 1})
    changed = pd.concat([new.head(1), changed, new.tail(8)])
    before, after = (held_out_by_person(one.patient) for one in (frame, changed))
    kept = [set(one.patient[~held]) - {first, "Q"} for one, held in ((frame, before), (changed, after))]
    assert kept[0] == kept[1]


def test_the_tenth_that_chooses_hyper_parameters_and_the_rows_that_say_when_to_stop_have_persons_of_their_own() -> None:
    data = data_of(visits(60))
    without = without_a_tenth(data, seed=3)
    train, held = (set(part.tensor[:, 0].tolist()) for part in (without.train, without.test))
    assert (len(train & held), len(held)) == (0, 4)
    assert without.persons is not None
    assert len(without.persons) == len(without.train)
    left, validation = with_validation(data, 0.5)
    assert validation is not None
    said, scored = (set(part.tensor[:, 0].tolist()) for part in (validation, left.test))
    assert (len(said & scored), len(said), len(scored)) == (0, 6, 6)
    assert left.test_persons is not None
    assert len(left.test_persons) == len(left.test)


def test_test_rows_of_persons_who_are_trained_on_are_refused(tmp_path: Path) -> None:
    own = load_recipe("own", ['data.name="given"', "data.target=outcome", "data.person=patient"])
    train, test = visits(20), visits(30)
    with pytest.raises(DataError, match="have training rows too"):
        load_dataset(own, None, given=Given((train, test)))
    apart = test[~test.patient.isin(train.patient)]
    assert len(load_dataset(own, None, given=Given((train, apart))).test) == len(apart)
    assert load_dataset(own, None, given=Given((train, test.drop(columns="patient")))).test_persons is None  # nobody knows


def test_a_row_without_a_name_is_refused_with_its_place() -> None:
    frame = visits()
    frame.loc[2, "patient"] = "NA"
    with pytest.raises(DataError, match=r"row 3: the person's column 'patient' has no value"):
        data_of(frame)
    with pytest.raises(DataError, match=r"data\.person names no column"):
        data_of(visits(), person="nobody")


def test_what_names_persons_is_neither_target_nor_client_nor_input() -> None:
    for settings in ({"person": "outcome"}, {"client": "patient"}):
        with pytest.raises(ConfigError, match="is the client, the target or the text"):
            data_of(visits(), **settings)
    with pytest.raises(ConfigError, match="cannot be an input too"):
        data_of(visits(), columns=["patient"])


def test_too_few_persons_for_test_rows_are_refused() -> None:
    with pytest.raises(DataError, match="4 persons are too few"):
        data_of(visits(4))


# --- a partition of one's own -----------------------------------------------------------------------------------------


CODE = """
import numpy as np

def halves(samples, clients, seed):
    return (np.arange(samples) * clients // samples).tolist()

def first_left_out(samples, clients, seed):
    return np.where(np.arange(samples) == 0, -1, (np.arange(samples) + seed) % clients)

def shares(samples, clients, seed):
    return np.ones(samples) / clients

def short(samples, clients, seed):
    return [0]

def one_for_all(samples, clients, seed):
    return [0] * samples

def beyond(samples, clients, seed):
    return [clients] * samples
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "deal.py").write_text(CODE)
    return tmp_path / "deal.py"


def test_a_partition_of_one_s_own_says_the_client_of_each_sample(code: Path) -> None:
    assert [part.tolist() for part in partition_by_code(f"{code}:halves", 5, 2, 0)] == [[0, 1, 2], [3, 4]]
    assert [part.tolist() for part in partition_by_code(f"{code}:first_left_out", 5, 2, 1)] == [[1, 3], [2, 4]]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("shares", "returns float64 of shape .5,., expected 5 whole numbers"),
        ("short", "returns a list, expected 5 whole numbers"),
        ("one_for_all", "gives client 1 no sample"),
        ("beyond", "returns clients from 2 to 2, expected 0 to 1"),
        ("nothing", "cannot be built"),
    ],
)
def test_another_answer_is_refused(function: str, said: str, code: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        partition_by_code(f"{code}:{function}", 5, 2, 0)


def test_a_partition_is_a_scheme_or_code() -> None:
    assert not DataConfig(partition="deal.py:halves").by_label
    assert DataConfig(partition="labels").by_label
    with pytest.raises(ConfigError, match=r"data\.partition"):
        load_recipe("own", ["data.partition=halves"])
