"""Persons with several rows: which rows are whose, which count in a round, and who is held out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from ldpfl.data import held_out_by_person
from ldpfl.data.columns import person_names
from ldpfl.data.dataset import Dataset
from ldpfl.data.from_table import dataset_from_table
from ldpfl.data.holding_out import split_off_validation, with_tenth_as_test
from ldpfl.data.partition import partition_by_code, partition_by_name
from ldpfl.data.persons import Persons, number_names, uniform_by_name
from ldpfl.data.settings import DataConfig
from ldpfl.data.tables import read_table, table_from_frame
from ldpfl.errors import ConfigError, DataError
from ldpfl.experiments.dataset import CallerObjects, load_dataset
from ldpfl.experiments.recipes import load_recipe


def visits(persons: int = 20, seed: int = 0) -> pd.DataFrame:
    """One to six rows a person, in any order; a value that names its person, so that it is known whose row is where."""
    generator = np.random.default_rng(seed)
    who = np.repeat(np.arange(persons), generator.integers(1, 7, persons))
    generator.shuffle(who)
    return pd.DataFrame({"patient": [f"P{number}" for number in who], "lab": who.astype(float), "outcome": who % 2})


def data_of(frame: pd.DataFrame, test: pd.DataFrame | None = None, **settings: object) -> Dataset:
    config = DataConfig.model_validate({"target": "outcome", "person": "patient", **settings})
    return dataset_from_table("visits", table_from_frame(frame), None if test is None else table_from_frame(test), config, "class")


def test_persons_are_numbered_in_the_order_of_their_names() -> None:
    assert number_names(["b", "a", "b", "c", "a"]).tolist() == [1, 0, 1, 2, 0]


def test_rows_are_those_of_their_persons_and_come_with_how_many_there_are() -> None:
    persons = Persons.of(list("abacba"), 2)
    rows, sharing = persons.all_rows_of(np.array([2, 0]))
    assert len(persons) == 3
    assert (rows.tolist(), sharing.tolist()) == ([3, 0, 2, 5], [1, 3, 3, 3])


def test_a_person_s_rows_take_turns_and_each_person_takes_the_same_room() -> None:
    persons = Persons.of(list("aaaaabcc"), 2)
    seen = []
    for number in range(1, 6):
        index, mask = persons.rows_in_round(torch.tensor([0, 1, 2]), number)
        assert index.shape == mask.shape == (3, 2)
        seen += index[0].tolist()
        assert index[1:].tolist() == [[5, 5], [6, 7]]  # in the place of a row that is not there stands one of the same person
        assert mask.tolist() == [[1, 1], [1, 0], [1, 1]]
    assert seen == [0, 1, 2, 3, 4] * 2


def test_rows_without_an_answer_count_where_a_person_has_no_others() -> None:
    persons = Persons.of(list("aabb"), 4, answered=np.array([False, True, False, False]))
    assert persons.counts.tolist() == [1, 2]
    assert persons.all_rows_of(np.array([0, 1]))[0].tolist() == [1, 2, 3]


def test_a_person_needs_a_row_that_counts() -> None:
    with pytest.raises(ConfigError, match="is 0, expected at least 1"):
        Persons.of(["a"], 0)


def test_nobody_has_training_and_test_rows() -> None:
    frame = visits()
    data = data_of(frame)
    train, test = (set(part.tensor[:, 0].tolist()) for part in (data.train, data.test))
    assert len(train & test) == 0
    assert len(train | test) == 20
    assert len(data.train) + len(data.test) == len(frame)  # no row is lost
    assert data.encoder is not None
    assert data.encoder.data.columns == ["lab"]  # the name is no input


def test_anybody_can_say_which_rows_are_test_rows() -> None:
    frame = visits()
    data, held = data_of(frame), held_out_by_person(frame["patient"])
    assert data.test.tensor[:, 0].tolist() == pytest.approx(frame["lab"][held].tolist())
    assert data.train.tensor[:, 0].tolist() == pytest.approx(frame["lab"][~held].tolist())


@pytest.mark.parametrize("spoilt", ["{} ", "+{}", "{}.0", "0{}", None])
def test_test_rows_are_found_however_names_are_written(spoilt: str | None) -> None:
    frame = visits(60)
    numbers = [int(name[1:]) for name in frame.patient]
    frame["patient"] = [float(number) if spoilt is None else spoilt.format(number) for number in numbers]
    data, held = data_of(frame), held_out_by_person(frame["patient"])
    assert data.test.tensor[:, 0].tolist() == pytest.approx(frame["lab"][held].tolist())
    assert held.tolist() == held_out_by_person(numbers).tolist()


def parts_of(frame: pd.DataFrame) -> dict[str, set[str]]:
    """Return who is in which part."""
    data = data_of(frame)
    left, validation = split_off_validation(data, 0.5)
    tenth = with_tenth_as_test(data, seed=3)
    assert validation is not None
    assert data.persons is not None
    assert data.test_persons is not None
    assert left.test_persons is not None
    assert tenth.test_persons is not None
    of_all = {"train": data.persons, "test": data.test_persons, "scored": left.test_persons, "tenth": tenth.test_persons}
    return {part: set(names) for part, names in of_all.items()}


def test_who_is_held_out_depends_on_nobody_else_s_name_or_rows() -> None:
    """Whoever is there, and wherever their rows lie: a person's own name says in which part it is."""
    frame = visits(60)
    first = frame.patient.iloc[0]
    new = pd.DataFrame({"patient": ["Q"] * 9, "lab": 99.0, "outcome": 1})
    before = parts_of(frame)
    for changed in (
        frame[frame.patient != first],
        pd.concat([new, frame[frame.patient != first]]),
        pd.concat([frame[frame.patient != first], frame[frame.patient == first], new]),
        frame.sample(frac=1, random_state=1),
    ):
        after = parts_of(changed.reset_index(drop=True))
        for part, names in before.items():
            assert names - {first} == after[part] - {first, "Q"}


def test_names_are_spread_evenly_and_apart_for_each_purpose() -> None:
    """Of 20,000 names: shares within five standard deviations, and no dependence of two purposes."""
    names = [f"P{number}" for number in range(20_000)]
    test, tenth = uniform_by_name(names, "test") < 0.2, uniform_by_name(names, "holdout") < 0.1
    for found, share in ((test, 0.2), (tenth, 0.1), (test & tenth, 0.02)):
        assert abs(found.mean() - share) < 5 * (share * (1 - share) / len(names)) ** 0.5
    known = 0.26515164  # the rule is public, and stays what it is
    assert uniform_by_name(["a", "b", "a"], "test")[[0, 2]] == pytest.approx([known, known], abs=1e-7)


@pytest.mark.parametrize("scheme", ["iid", "quantity"])
def test_persons_are_dealt_out_each_by_its_own_name(scheme: str) -> None:
    names = np.array([f"P{number}" for number in range(3000)], dtype=object)

    def owners(some: np.ndarray, seed: int = 5) -> dict[str, int]:
        parts = partition_by_name(some, 4, seed, np.random.default_rng(1), scheme=scheme, alpha=5.0)
        return {str(some[place]): client for client, part in enumerate(parts) for place in part}

    before = owners(names)
    assert before.keys() == set(names)
    assert owners(names[::-1]) == before
    after = owners(np.concatenate([["Q"], names[1:]]).astype(object))
    assert {name: client for name, client in after.items() if name != "Q"} == {name: before[name] for name in names[1:]}
    assert owners(names, seed=6) != before
    counts = np.bincount(list(before.values())) / len(names)
    expected = np.random.default_rng(1).dirichlet([5.0] * 4) if scheme == "quantity" else np.full(4, 0.25)
    assert (abs(counts - expected) < 5 * (expected * (1 - expected) / len(names)) ** 0.5).all()


def test_a_client_without_a_person_is_refused() -> None:
    names = np.array(["a", "b", "c"], dtype=object)
    with pytest.raises(ConfigError, match=r"3 persons .* to 50 clients by name, but 4[789] of the clients get no person"):
        partition_by_name(names, 50, 0, np.random.default_rng(0))
    with pytest.raises(ConfigError, match=r"larger data\.alpha"):
        partition_by_name(names, 50, 0, np.random.default_rng(0), scheme="quantity")


def test_the_tenth_that_chooses_hyper_parameters_and_the_rows_that_say_when_to_stop_have_persons_of_their_own() -> None:
    data = data_of(visits(60))
    without = with_tenth_as_test(data, seed=3)
    train, held = (set(part.tensor[:, 0].tolist()) for part in (without.train, without.test))
    assert len(train & held) == 0
    assert 1 <= len(held) <= 12
    assert without.persons is not None
    assert len(without.persons) == len(without.train)
    left, validation = split_off_validation(data, 0.5)
    assert validation is not None
    said, scored = (set(part.tensor[:, 0].tolist()) for part in (validation, left.test))
    assert len(said & scored) == 0
    assert 0 < len(said) < len(said | scored) == len(set(data.test_persons if data.test_persons is not None else ()))
    assert left.test_persons is not None
    assert len(left.test_persons) == len(left.test)


def test_test_rows_of_persons_who_are_trained_on_are_refused(tmp_path: Path) -> None:
    own = load_recipe("own", ['data.name="given"', "data.target=outcome", "data.person=patient"])
    train, test = visits(20), visits(30)
    with pytest.raises(DataError, match="some persons have rows in both"):
        load_dataset(own, None, caller_objects=CallerObjects((train, test)))
    apart = test[~test.patient.isin(train.patient)]
    assert len(load_dataset(own, None, caller_objects=CallerObjects((train, apart))).test) == len(apart)
    assert load_dataset(own, None, caller_objects=CallerObjects((train, test.drop(columns="patient")))).test_persons is None  # nobody knows


def test_a_row_without_a_name_is_refused_with_its_place() -> None:
    frame = visits()
    frame.loc[2, "patient"] = "NA"
    with pytest.raises(DataError, match=r"row 3: data.person 'patient' has no value"):
        data_of(frame)
    with pytest.raises(DataError, match=r"data\.person names 'nobody', but there is no such column"):
        data_of(visits(), person="nobody")


def test_one_name_in_two_unicode_forms_is_one_person_and_so_is_one_number() -> None:
    forms = ["M\u00fcller", "Mu\u0308ller"]
    for names in (forms, [0.0, -0.0]):
        frame = pd.DataFrame({"patient": [*names, *range(1, 31)], "lab": 1.0, "outcome": [0, 1] * 16})
        data = data_of(frame)
        assert data.persons is not None
        assert data.test_persons is not None
        assert len({*data.persons, *data.test_persons}) == 31


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ("17,1,0\n18,2,1\n", "17.0,3,0\n", {"17", "18"}),  # as pandas writes whole numbers if one of them is missing
        ("0017,1,0\n", "17.0,3,0\n", {"17"}),
        ("+17,1,0\n17.,2,1\n", "17,3,0\n", {"17"}),
        ("1.2345600E7,1,0\n1e+05,2,1\n", "12345600,3,0\n100000,1,1\n", {"12345600", "100000"}),  # as Java and R write floats
        ("-0,1,0\n\u0661\u0667,2,1\n", "0,3,0\n17,1,1\n", {"0", "17"}),
        ("12E5,1,0\n1.5,2,1\n1e+99999,1,1\n", "1200000,3,0\n", {"12E5", "1.5", "1e+99999", "1200000"}),
        ('"17,0",1,0\n17,1,1\n', "17.0,1,0\n", {"17"}),  # a decimal comma
        ('"17,000",1,0\n17 000,1,1\n17\'000,1,1\n', "17000,1,0\n", {"17000"}),  # signs between thousands
        ('"1,017,000",1,0\n1.017.000,1,1\n', "1\u00a0017\u202f000,1,0\n", {"1017000"}),
        ("17.000,1,0\n", "17,1,0\n", {"17"}),  # one point is a decimal point
        ('"17,000.00",1,0\n"17 000,0",1,1\n', "17\u2019000.0,1,0\n\u221217000,1,0\n- 17000,1,0\n", {"17000", "-17000"}),
        ("O\u2019Brien,1,0\nAnna \u2013 Maria,1,1\n", "O'Brien,1,0\nAnna-Maria\ufe0f,1,0\n", {"O'Brien", "Anna-Maria"}),
        ("Smith  J,1,0\nSmith J,1,1\n", " Smith\tJ,1,0\n", {"Smith J"}),
        ("a\u20117,1,0\na-7,1,1\n", "a\u22127,1,0\n", {"a-7"}),  # a hyphen that breaks no line, and a minus
        ("1.10,1,0\n-.50,1,1\n1e-07,1,1\n", "1.1,1,0\n-0.5,1,1\n0.0000001,1,0\n", {"1.1", "-0.5", "0.0000001"}),
        ("Zoe\u0308,1,0\n", "Zoë,3,0\nＺoë,1,1\nZ\u200boë\ufeff,1,0\nZoe\u200b\u0308,1,0\n\u200bNA,1,1\n", {"Zoë", ""}),  # noqa: RUF001
    ],
)
def test_a_person_has_one_name_in_all_files(first: str, second: str, named: set[str], tmp_path: Path) -> None:
    for name, rows in (("a.csv", first), ("b.csv", second)):
        (tmp_path / name).write_text("who,x,y\n" + rows, encoding="utf-8")
    assert set(person_names(read_table(tmp_path), DataConfig(person="who", target="y"))) == named


@pytest.mark.parametrize("number", [2**53 + 1, 110_105_194_912_310_017])  # pandas writes floats of 1e16 or more with an exponent
def test_names_that_one_of_several_files_has_rounded_are_refused(number: int, tmp_path: Path) -> None:
    exact = pd.DataFrame({"who": [number, number + 2], "x": [1.0, 2.0], "y": [0, 1]})
    rounded = exact.assign(who=[float(number), np.nan])
    mixed = pd.DataFrame({"who": pd.Series([number, float(number)], dtype=object), "x": 1.0, "y": 0})
    with pytest.raises(DataError, match=r"row 2: .* holds floats of 2\^53 or more"):
        person_names(table_from_frame(mixed), DataConfig(person="who", target="y"))
    for order, (first, second) in enumerate(((exact, rounded), (rounded, exact))):
        for kind in ("parquet", "csv"):
            folder = tmp_path / f"{order}-{kind}"
            folder.mkdir()
            first.to_parquet(folder / "a.parquet")
            second.to_parquet(folder / "b.parquet") if kind == "parquet" else second.to_csv(folder / "b.csv", index=False)
            with pytest.raises(DataError, match=r"holds floats of 2\^53 or more, which may be rounded"):
                person_names(read_table(folder), DataConfig(person="who", target="y"))


@pytest.mark.parametrize(
    "text", ["1.1010519491231E17", "1e+16", "9007199254740992.", "1.23457E+11", "-1.2e+12", "12.3457E10", ".123457E+12", "1.2345679E14"]
)
def test_texts_of_floats_that_a_program_has_rounded_are_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text(f"who,x,y\nann,1,0\n{text},1,0\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"line 3: .* holds floats of 2\^53 or more, which may be rounded"):
        person_names(read_table(file), DataConfig(person="who", target="y"))


@pytest.mark.parametrize("text", ["1.23456789012E+11", "100000000000", "1e+05", "9007199254740993", "12E15", "1e+1000000000000000000"])
def test_texts_of_exact_numbers_are_names(text: str, tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text(f"who,x,y\nann,1,0\n{text},1,0\n", encoding="utf-8")
    assert len(person_names(read_table(file), DataConfig(person="who", target="y"))) == 2


def test_names_that_float32_has_rounded_are_refused() -> None:
    """2^24 + 1 would be 2^24, and another person than in a file of whole numbers."""
    frame = pd.DataFrame({"who": np.array([17, 2**24 + 1], dtype=np.float32), "x": [1.0, 2.0], "y": [0, 1]})
    with pytest.raises(DataError, match=r"row 2: .* holds floats of 2\^53 or more, which may be rounded \(float32: from 2\^24 on"):
        person_names(table_from_frame(frame), DataConfig(person="who", target="y"))
    assert person_names(table_from_frame(frame[:1]), DataConfig(person="who", target="y")) == ["17"]


def test_a_number_beyond_float32_is_read_without_a_word() -> None:
    """A warning in a log would tell of one row; tests turn warnings into errors."""
    frame = visits()
    frame.loc[3, "lab"] = 1e308
    data = data_of(frame)
    assert torch.isinf(torch.cat([data.train.tensor, data.test.tensor])).sum() == 1


def test_what_names_persons_is_neither_target_nor_client_nor_input() -> None:
    for settings in ({"person": "outcome"}, {"client": "patient"}):
        with pytest.raises(ConfigError, match="is also the client, the target or the text"):
            data_of(visits(), **settings)
    with pytest.raises(ConfigError, match="cannot be an input: remove it from"):
        data_of(visits(), columns=["patient"])


def test_too_few_persons_for_test_rows_are_refused() -> None:
    for name, said in (("P5", "none"), ("P0", "every one")):
        with pytest.raises(DataError, match=rf"of these 1 persons that is {said}: set data\.test_path"):
            data_of(pd.DataFrame({"patient": [name] * 4, "lab": 1.0, "outcome": [0, 1, 0, 1]}))
    with pytest.raises(ConfigError, match=r"about a tenth of the persons aside, chosen by name, but here that is none"):
        with_tenth_as_test(data_of(visits(7)), seed=0)


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
