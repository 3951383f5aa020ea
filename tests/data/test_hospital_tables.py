"""Tables as hospitals have them: dates, limits, units in headers, words for no value, and columns that say whose a row is."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from pyarrow import parquet, table

from conftest import CommandLine
from ldpfl import ConfigError, DataError, api
from ldpfl.data import Dataset
from ldpfl.data.from_table import dataset_from_table
from ldpfl.data.identifiers import identifier_kind
from ldpfl.data.new_rows import predict_rows
from ldpfl.data.nodes import check_node_table, read_node_table, server_view_of_node_tables
from ldpfl.data.scaling import scaled_by_bounds
from ldpfl.data.settings import DataConfig
from ldpfl.data.tables import Table, read_table, table_from_frame
from ldpfl.data.unscaled import Unscaled


def of(cells: list[Any], name: str = "x") -> pd.DataFrame:
    return pd.DataFrame({name: cells, "ill": [place % 2 for place in range(len(cells))]})


def made(read: Table | pd.DataFrame, **settings: Any) -> Dataset:
    own = read if isinstance(read, Table) else table_from_frame(read)
    return dataset_from_table("rows", own, own, DataConfig(**{"target": "ill", **settings}), "class")


def inputs(read: Table | pd.DataFrame, **settings: Any) -> list[float]:
    values: list[float] = made(read, **settings).train.tensor[:, 0].tolist()
    return values


DAYS = ["2020-01-01", "2020-01-02", "2021-02-03", "2020-01-01"]


def test_dates_are_days_wherever_they_come_from(tmp_path: Path) -> None:
    frame = of(DAYS)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    moments = frame.assign(x=pd.to_datetime(frame["x"]))
    moments.to_parquet(tmp_path / "moments.parquet")
    parquet.write_table(table({"x": [datetime.date.fromisoformat(day) for day in DAYS], "ill": [0, 1, 0, 1]}), tmp_path / "days.parquet")
    tables = [
        table_from_frame(frame),
        table_from_frame(moments),
        *(read_table(tmp_path / name) for name in ("rows.csv", "moments.parquet", "days.parquet")),
    ]
    for own in tables:
        assert inputs(own) == [18262, 18263, 18661, 18262]
        assert made(own).unscaled[0] == Unscaled("x", 0)
        assert "taken as dates: x. A date counts as its days since 1970-01-01" in made(own).notes[0]


def test_bounds_of_dates_are_dates() -> None:
    """In any form that a config has, and written back as days."""
    config = DataConfig.model_validate({"target": "ill", "bounds": {"x": ["2020-01-01", "2021-02-03"]}})
    assert (config.bounds, config.dates) == ({"x": [18262.0, 18661.0]}, ["x"])
    assert DataConfig.model_validate_json(config.model_dump_json()) == config
    own = scaled_by_bounds(dataset_from_table("rows", table_from_frame(of(DAYS)), table_from_frame(of(DAYS)), config, "class"))
    assert own.train.tensor[:, 0].tolist() == pytest.approx([-1, 2 / 399 - 1, 1, -1], abs=1e-6)
    for written in ('data.bounds={"x (day)" = ["2020-01-01", "2021-02-03"]}', 'data.bounds={"x (day)" = [2020-01-01, 2021-02-03]}'):
        assert api.configure("own", [written]).data.bounds == {"x (day)": [18262.0, 18661.0]}
    for wrong in (["2020-13-01", "2021-01-01"], ["soon", 3.0], ["2020-01-01"], ["03/04/2020", "04/04/2020"]):
        with pytest.raises(ValueError, match=r"bounds\.x"):
            DataConfig.model_validate({"bounds": {"x": wrong}})
    with pytest.raises(ConfigError, match="both name 'x'"):
        made(of(DAYS), bounds={"x": ["2020-01-01", "2021-02-03"]}, words=["x"])


def test_new_rows_are_encoded_as_training_rows_were() -> None:
    frame = pd.DataFrame({"day": [*DAYS, "NA"], "crp": ["<0.5", "1", "2", "> 200", "unknown"], "ill": [0, 1, 0, 1, 0]})
    settings: dict[str, Any] = {"bounds": {"day": ["2020-01-01", "2022-01-01"], "crp": [0, 100]}, "missing_words": ["NA", "unknown"]}
    own = scaled_by_bounds(made(frame, **settings))
    assert own.encoder is not None
    again = type(own.encoder).model_validate_json(own.encoder.model_dump_json())
    seen: list[torch.Tensor] = []

    class Model(torch.nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            seen.append(inputs)
            return torch.zeros(len(inputs), 2)

    predict_rows(again, Model(), frame.drop(columns="ill"))
    assert torch.equal(seen[0], own.train.tensor)


@pytest.mark.parametrize("cells", [["03/04/2020"] * 4, ["3.4.2020"] * 4, ["1,5", "2,5", "3,5", "4,5"]])
def test_a_column_that_can_be_read_in_two_ways_is_named(cells: list[str]) -> None:
    with pytest.raises(DataError, match=r"the column 'x' holds .*: write .*; or list it in data.words to use it as words") as refusal:
        made(of(cells))
    assert cells[0] not in str(refusal.value)
    assert made(of(cells), words=["x"]).train.tensor.shape == (4, 128)


def test_limits_of_laboratories_are_numbers(tmp_path: Path) -> None:
    cells, expected = ["<0.5", "> 200", "≤3", ">= 7", "1", "NA"], [0.5, 200, 3, 7, 1, np.nan]
    np.testing.assert_allclose(inputs(of(cells)), expected)
    (tmp_path / "rows.csv").write_text("x;ill\n<0,5;0\n> 200;1\n1,5;0\n", encoding="utf-8")
    np.testing.assert_allclose(inputs(read_table(tmp_path / "rows.csv")), [0.5, 200, 1.5])
    rule = "such as <0.5 or >200, counts as the limit"
    assert all(rule in made(of(own)).notes[0] for own in (cells, ["1", "2"]))  # so that the note tells nothing of the rows
    assert torch.linalg.matrix_rank(made(of(["<50", ">=50"])).train.tensor) == 2  # groups are words
    classes = pd.DataFrame({"x": [1, 2], "ill": ["<50", ">=50"]})
    assert made(classes).train.targets.tolist() == [0, 1]


@pytest.mark.parametrize("name", ["CRP (mg/l)", "weight [kg]", 'a "quoted" one', "x.y", "x=1", "é, ü"])
def test_any_header_is_a_name(name: str, tmp_path: Path) -> None:
    frame = of([1.0, 2.0, 3.0, 4.0], name)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    quoted = name.replace('"', '\\"')
    config = api.configure("own", [f'data.bounds={{"{quoted}" = [0, 4]}}', f'data.columns=["{quoted}"]']).data
    assert (config.bounds, config.columns) == ({name: [0, 4]}, [name])
    own = scaled_by_bounds(made(read_table(tmp_path / "rows.csv"), bounds=config.bounds, columns=config.columns))
    assert own.train.tensor[:, 0].tolist() == [-0.5, 0.0, 0.5, 1.0]


@pytest.mark.parametrize("pair", [["yes", "no"], ["true", "false"], ["y", "n"], ["ja", "nein"], ["J", "N"]])
def test_two_words_are_words(pair: list[str]) -> None:
    found = made(of(pair * 4)).train.tensor
    assert (found.sum(dim=1) == 1).all()
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize(
    "name", ["id", "ID", "mrn", "MRN", "uuid", "name", "patient_id", "PatientID", "patient name", "Subject-Nr", "row_number"]
)
def test_a_column_whose_name_says_whose_a_row_is_is_left_out(name: str) -> None:
    assert identifier_kind(name)
    own = made(of([1, 2, 3, 4], name).assign(age=[4, 3, 2, 1]))
    assert own.train.tensor.shape == (4, 1)
    assert any(note.startswith("columns left out, because their names suggest identifiers: ") and name in note for note in own.notes)
    for named in ({"columns": ["age", name]}, {"numbers": [name]}, {"bounds": {name: [0.0, 9.0]}}, {"words": [name]}):
        assert made(of([1, 2, 3, 4], name).assign(age=[4, 3, 2, 1]), **named).train.tensor.shape[1] > 1
    with pytest.raises(DataError, match=r"the client and the person \(columns left out, "):
        made(of([1, 2, 3, 4], name))


PERSONS = (
    *("patient", "Person", "subject", "participant", "user", "member", "customer", "mrn", "ssn", "email", "E-Mail", "phone", "nhs_number"),
    *(
        "patient_id",
        "PatientID",
        "patientid",
        "id_patient",
        "ID of patient",
        "person key",
        "userUuid",
        "customer-no",
        "pat_id",
        "patient's id",
    ),
    *("memberNumber", "phone number", "medical record number", "patient_email", "user_name"),
    *(
        "Patienten-Nr",
        "Patientennummer",
        "Kundennummer",
        "Teilnehmer_ID",
        "Telefon",
        "numéro du patient",
        "id_patient",
        "PATIENT1",
        "KVNR",
        "kv_nummer",
    ),
)
CLIENTS = (
    "client",
    "account",
    "household",
    "device",
    "client_id",
    "accountNo",
    "device uuid",
    "id_client",
    "household_key",
    "Gerät",
    "acct_nr",
)
ROWS = ("id", "row_number", "case_id", "uuid", "sample no", "Vorname", "Prénom", "stay_id")
INPUTS = (
    *(
        "age",
        "ward_id",
        "drug name",
        "paid",
        "number of stays",
        "kidney",
        "identity",
        "geburtsdatum",
        "birth date",
        "x",
        "",
        "1",
        "persons",
        "patients",
        "no_patients",
    ),
    *("user_age", "account_balance", "client_income", "patient_age", "person_count", "patient weight", "email_domain", "phone_calls"),
    *(
        "household_size",
        "device_type",
        "member_since",
        "customer_segment",
        "number_of_patients",
        "clients",
        "personal",
        "subjective",
        "sample",
    ),
    *(
        "case",
        "visit",
        "record",
        "node",
        "notes",
        "nr",
        "key",
        "mobile",
        "idle",
        "Kundenwert",
        "deviceTemperature",
        "visit_type",
        "username_length",
    ),
)


@pytest.mark.parametrize(("names", "kind"), [(PERSONS, "person"), (CLIENTS, "client"), (ROWS, "row"), (INPUTS, None)])
def test_a_name_says_whose_a_row_is_or_says_nothing_of_it(names: tuple[str, ...], kind: str | None) -> None:
    assert {name: identifier_kind(name) for name in names} == dict.fromkeys(names, kind)


def test_the_note_on_columns_left_out_names_the_flag_that_protects_persons_or_divides_clients() -> None:
    frame = of([1, 2, 3, 4] * 2, "age").assign(patient=list("aabbccdd"), mrn=range(8), account=list("xxxxyyyy"), serial=range(8))
    (note,) = [one for one in made(frame).notes if "suggest identifiers" in one]
    assert "suggest identifiers: patient, mrn, account; list them in data.columns to use them" in note
    assert "--person COLUMN (data.person), such as patient, " in note
    assert "otherwise scores and intervals are too good" in note
    assert "--client COLUMN (data.client), such as account, " in note
    (note,) = [one for one in made(frame, person="patient", client="account").notes if "suggest identifiers" in one]
    assert "suggest identifiers: mrn; " in note
    assert "--person" not in note
    assert "--client" not in note
    assert not [one for one in made(frame, columns=["age", "patient"]).notes if "suggest identifiers" in one]
    same = made(frame.assign(patient=["a"] * 8))  # by the name alone, whatever stands in the column
    assert any("suggest identifiers: patient" in one for one in same.notes)


@pytest.mark.parametrize(
    ("name", "is_site"),
    [
        ("hospital", True),
        ("Clinic-ID", True),
        ("Hôpital", True),
        ("site of the", True),
        ("Facility-ID", True),
        ("hospital_beds", False),
        ("website", False),
    ],
)
def test_a_column_of_sites_is_kept_with_a_note_on_the_client(name: str, is_site: bool) -> None:
    frame = pd.DataFrame({"age": range(20), name: ["a", "b"] * 10, "ill": [0, 1, 1, 0] * 5})
    notes = [one for one in made(frame).notes if "suggest the site" in one]
    assert len(notes) == is_site
    assert not is_site or f"set --client {name} (data.client)" in notes[0]
    for settings in ({"client": name}, {"columns": ["age", name]}, {"words": [name]}):
        assert not any("suggest the site" in one for one in made(frame, **settings).notes)


def test_words_for_no_value_are_a_setting() -> None:
    frame = of(["1", "unknown", "999", "4"])
    np.testing.assert_array_equal(inputs(frame, missing_words=["Unknown", "999"]), [1, np.nan, np.nan, 4])
    np.testing.assert_array_equal(inputs(of([1.0, 2.0, 999.0]), missing_words=["999"]), [1, 2, np.nan])
    with pytest.raises(DataError, match=r"row 2: .* in the column 'x' is not a number.*data\.missing_words"):
        made(frame)
    words = ["none", "some", "-", ""]
    assert made(of(words)).train.tensor.sum(dim=1).tolist() == [0, 1, 0, 0]
    assert made(of(words), missing_words=["-"]).train.tensor.sum(dim=1).tolist() == [1, 1, 0, 0]


def test_a_named_class_client_or_category_is_a_value() -> None:
    frame = pd.DataFrame({"x": ["none", "some"] * 2, "ill": ["none", "mild", "none", "mild"], "site": ["NA", "None", "NA", "-"]})
    found = made(frame, classes=["none", "mild"], client="site", categories={"x": ["none", "some"]})
    assert found.train.targets.tolist() == [0, 1, 0, 1]
    assert found.train.tensor.argmax(dim=1).tolist() == [0, 1, 0, 1]
    assert found.clients is not None
    assert len(set(found.clients.tolist())) == 3
    with pytest.raises(DataError, match=r"the target 'ill' has no value .*if the word is a class, name all classes, --set 'data.classes="):
        made(frame)


def test_nodes_read_dates_and_named_words_by_the_same_rules(tmp_path: Path) -> None:
    rules: dict[str, Any] = {"name": "node", "target": "ill", "columns": ["day", "ward"], "classes": ["none", "mild"]}
    rules |= {"bounds": {"day": ["2020-01-01", "2022-01-01"]}, "categories": {"ward": ["NA", "icu"]}}
    config = DataConfig(**rules)
    frame = pd.DataFrame({"day": ["2020-01-01", "2021-01-01", "soon"], "ward": ["NA", "icu", "?"], "ill": ["none", "mild", "none"]})
    frame.to_csv(tmp_path / "rows.csv", index=False)
    found = read_node_table(config, "class", tmp_path / "rows.csv")
    assert found.train.tensor[:, 0].tolist() == pytest.approx([-1, 2 * 366 / 731 - 1, 0], abs=1e-6)
    assert found.train.tensor[:, 1:].tolist() == [[1, 0], [0, 1], [0, 0]]
    assert found.train.targets.tolist() == [0, 1, 0]
    assert server_view_of_node_tables(config, "class").encoder == found.encoder
    with pytest.raises(DataError, match=r"line 4: the value in the column 'day' is not an ISO date"):
        check_node_table(config, "class", tmp_path / "rows.csv")


@pytest.mark.slow
@pytest.mark.thorough
def test_a_hospital_s_table_is_trained_on_and_predicted_for(tmp_path: Path, ldpfl: CommandLine) -> None:
    """With a date, limits, units in headers and an identifier, from a file, by the command line."""
    generator = np.random.default_rng(0)
    crp, day = generator.lognormal(2, 1, 800), generator.integers(0, 2000, 800)
    outcome = np.where(np.log(crp) + day / 1000 - 3 + generator.logistic(size=800) > 0, "died", "none")
    frame = pd.DataFrame({"patient_id": range(800), "admitted": np.datetime64("2018-01-01") + day.astype("timedelta64[D]")})
    frame = frame.assign(**{"CRP (mg/l)": ["<2.5" if own < 2.5 else f"{own:.1f}" for own in crp], "outcome": outcome})
    frame.to_csv(tmp_path / "rows.csv", index=False)
    bounds = 'data.bounds={"CRP (mg/l)" = [0, 200], admitted = ["2018-01-01", "2024-01-01"]}'
    settings = ["--set", bounds, "--set", 'data.classes=["none", "died"]', "--set", "clients.count=4", "--set", "training.rounds=20"]
    asked: list[str | Path] = [
        "run",
        "--data",
        tmp_path / "rows.csv",
        "--target",
        "outcome",
        "--target-epsilon",
        "8",
        "--out",
        tmp_path / "run",
    ]
    outcome_of_run = ldpfl(*asked, *settings, "--no-baseline")
    assert outcome_of_run.code == 0, outcome_of_run.err
    said = " ".join(outcome_of_run.out.split())
    assert "columns left out, because their names suggest identifiers: patient_id" in said
    frame.drop(columns="outcome").to_csv(tmp_path / "new.csv", index=False)
    told = ldpfl("predict", tmp_path / "run", tmp_path / "new.csv")
    assert told.code == 0, told.err
    (tmp_path / "told.csv").write_text(told.out, encoding="utf-8")
    risks = pd.read_csv(tmp_path / "told.csv", keep_default_na=False)["probability of died"].to_numpy()
    died = outcome == "died"
    assert risks[died].mean() > risks[~died].mean() + 0.05


@pytest.mark.parametrize("cells", [[f"P{number}" for number in range(40)], list(range(40))], ids=["words", "numbers"])
def test_an_identifier_as_the_target_is_told_from_a_class_or_a_number(cells: list[Any]) -> None:
    frame = pd.DataFrame({"age": range(40), "patient": cells})
    with pytest.raises(DataError, match=r"'patient' has 40 different values, and its name suggests an identifier: .*--target") as refused:
        made(frame, target="patient")
    assert "a column that names each row's person belongs in --person (data.person)" in str(refused.value)
    assert "regression" not in str(refused.value)
    assert made(frame, target="patient", classes=[str(cell) for cell in cells]).outputs == 40


def test_words_as_the_target_of_a_regression_are_told_from_identifiers() -> None:
    for name, advice in (("patient", ", and its name suggests an identifier"), ("ward", ": to predict words, set task.name")):
        rows = table_from_frame(pd.DataFrame({"age": range(4), name: list("abcd")}))
        with pytest.raises(DataError, match=f"expects a number in each row{advice}"):
            dataset_from_table("rows", rows, rows, DataConfig(target=name), "number")


def test_a_measurement_as_the_target_is_told_so_even_if_some_cells_are_limits_or_empty() -> None:
    crp = ["<0.5", "", *(f"{number}.5" for number in range(30))]
    with pytest.raises(
        DataError, match=r"'crp' has 30 different values, which are numbers: .*--task regression.* passes a limit"
    ) as refused:
        made(pd.DataFrame({"age": range(32), "crp": crp}), target="crp")
    assert "data.classes" not in str(refused.value)
    with pytest.raises(DataError, match=r"a classification has at most 1,000 classes"):
        made(pd.DataFrame({"age": range(1200), "code": [f"c{number}" for number in range(1200)]}), target="code")
