"""What is predicted, by a run's folder and by an exported one: of images, texts and rows, and by a threshold of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from conftest import CommandLine
from ldpfl import ConfigError, DataError, api
from ldpfl.api.predicting import predict_csv
from ldpfl.data.holding_out import TEST_SHARE, held_out

pytestmark = pytest.mark.slow

HOW: dict[str, Any] = {"baseline": False, "progress": False, "target_epsilon": 50.0}
FEW: dict[str, Any] = {"training.rounds": 2, "clients.count": 4, "seed": 0}


def pictures(folder: Path, classes: tuple[str, ...] = ("ill", "well"), count: int = 20) -> Path:
    """A folder of images by class: those of the second one are bright."""
    generator = np.random.default_rng(0)
    for place, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = generator.integers(100 * place, 100 * place + 100, (8, 6, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number:02}-{name}.png")
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures(tmp_path_factory.mktemp("images") / "scans")


@pytest.fixture(scope="module")
def of_images(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    api.run(data=images, model="linear", settings=FEW, folder=folder, **HOW)
    return folder


def pixels_of(images: Path) -> tuple[list[str], np.ndarray[Any, Any]]:
    files = sorted(images.rglob("*.png"))
    return [str(file.relative_to(images)) for file in files], np.stack([np.asarray(Image.open(file)) for file in files])


def test_a_folder_of_images_is_predicted_by_the_run_and_by_its_export(of_images: Path, images: Path, ldpfl: CommandLine) -> None:
    files, pixels = pixels_of(images)
    found = api.predict(of_images, images)
    assert found.columns.tolist() == ["file", "class", "probability of ill", "probability of well"]
    assert found["file"].tolist() == files
    inputs = torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy())
    with torch.no_grad():
        chances = api.load_model(of_images)((inputs / 255 - 0.5) / 0.25).softmax(dim=1)
    np.testing.assert_allclose(found["probability of well"], chances[:, 1], rtol=1e-4)
    assert found["class"].tolist() == [("ill", "well")[place] for place in chances.argmax(dim=1)]
    assert ldpfl("export", of_images, "given").code == 0
    assert ldpfl("predict", "given", images).out == ldpfl("predict", of_images, images).out == found.to_csv(index=False)
    assert "ldpfl predict FOLDER images" in Path("given/README.md").read_text()


@pytest.mark.thorough
def test_an_array_and_a_table_of_images_are_predicted_as_their_files_are(of_images: Path, images: Path, tmp_path: Path) -> None:
    import datasets

    files, pixels = pixels_of(images)
    np.save(tmp_path / "pixels.npy", pixels)
    rows = {"image": [str(images / name) for name in files]}
    table = datasets.Dataset.from_dict(rows, features=datasets.Features({"image": datasets.Image()}))
    table.to_parquet(str(tmp_path / "images.parquet"))
    wanted = api.predict(of_images, images).drop(columns="file")
    for rows_of in (pixels, tmp_path / "pixels.npy", tmp_path / "images.parquet"):
        pd.testing.assert_frame_equal(api.predict(of_images, rows_of), wanted)
    one = api.predict(of_images, images / files[3])
    assert one["file"].tolist() == [Path(files[3]).name]
    assert one["class"].tolist() == wanted["class"].tolist()[3:4]


def test_grey_images_are_read_as_such_and_classes_without_names_are_numbers(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 5, 5), dtype=np.uint8)
    api.run(data=(pixels, np.arange(40) % 3), model="linear", settings=FEW, folder=tmp_path / "run", **HOW)
    Image.fromarray(pixels[0]).save(tmp_path / "one.png")
    found = api.predict(tmp_path / "run", tmp_path / "one.png")
    assert found.columns.tolist() == ["file", "class", *(f"probability of {place}" for place in range(3))]
    pd.testing.assert_frame_equal(found.drop(columns="file"), api.predict(tmp_path / "run", pixels).head(1))


def test_images_that_do_not_fit_are_refused(of_images: Path, images: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "no.png").write_bytes(b"none")
    np.save(tmp_path / "words.npy", np.array(["a"], dtype=object), allow_pickle=True)
    refused: tuple[tuple[Any, str], ...] = (
        (np.zeros((2, 5, 5), np.uint8), r"has the shape \(1, 5, 5\), but the model takes \(3, 8, 6\)"),
        (np.zeros(3), "expected samples along the first axis"),
        (tmp_path / "empty", "holds no images"),
        (tmp_path / "no.png", "cannot be decoded"),
        (tmp_path / "words.npy", "expected a file that numpy.save wrote"),
    )
    for rows, said in refused:
        with pytest.raises(DataError, match=said):
            api.predict(of_images, rows)
    with pytest.raises(ConfigError, match="was not trained on a table"):
        api.predict(of_images, pd.DataFrame({"a": [1]}))
    with pytest.raises(ConfigError, match="id_column works only with models of tables"):
        api.load_run(of_images).predict(images, id_column="a")


@pytest.mark.thorough
def test_texts_are_predicted_by_the_run_and_by_its_export(tmp_path: Path, ldpfl: CommandLine) -> None:
    frame = pd.DataFrame({"note": ["a cough and fever", "a broken arm"] * 40, "ward": ["inner", "bones"] * 40})
    settings = {**FEW, "data.text": "note", "training.rounds": 20, "model.name": "embedding-bag"}
    result = api.run(data=frame, target="ward", settings=settings, folder=tmp_path / "run", **HOW)
    new = pd.DataFrame({"note": ["a broken arm", "", "fever"]})
    new.to_csv(tmp_path / "new.csv", index=False)
    new.to_parquet(tmp_path / "new.parquet")
    api.export(tmp_path / "run", tmp_path / "given")
    wanted = result.predict(new)
    assert wanted["ward"].iloc[0] == "bones"
    for rows in (new, tmp_path / "new.csv", tmp_path / "new.parquet"):
        pd.testing.assert_frame_equal(api.predict(tmp_path / "given", rows), wanted)
    with pytest.raises(DataError, match="the table has no column 'note', whose texts the model reads: did you mean 'notes'"):
        result.predict(new.rename(columns={"note": "notes"}))
    assert ldpfl("predict", tmp_path / "given", tmp_path / "new.csv").out == ldpfl("predict", tmp_path / "run", tmp_path / "new.csv").out


def test_a_column_of_booleans_is_read_from_csv_as_it_was_from_a_frame(tmp_path: Path) -> None:
    frame = pd.DataFrame({"smokes": [True, False] * 40, "ward": ["lung", "bones"] * 40})
    result = api.run(data=frame, target="ward", settings=FEW, folder=tmp_path / "run", **HOW)
    wanted = result.predict(frame)
    for words in ("True", "False"), ("TRUE", "false"), ("1", "0"):
        frame.assign(smokes=list(words) * 40).to_csv(tmp_path / "new.csv", index=False)
        pd.testing.assert_frame_equal(api.predict(tmp_path / "run", tmp_path / "new.csv"), wanted)


def table() -> pd.DataFrame:
    generator = np.random.default_rng(0)
    age = generator.integers(20, 90, 300)
    return pd.DataFrame({"age": age, "died": np.where(generator.random(300) < age / 200, "yes", "no")})


def test_each_prediction_has_its_row_and_the_column_that_says_whose_it_is(tmp_path: Path, ldpfl: CommandLine) -> None:
    """That column was left out of training, for its name, and may hold what a spreadsheet would run."""
    frame = table().assign(patient_id=[f"=p{place}" for place in range(300)])
    result = api.run(data=frame, target="died", settings=FEW, folder=tmp_path / "run", **HOW)
    usual = result.predict(frame)
    frame.to_csv(tmp_path / "new.csv", index=False)
    for rows in (frame, tmp_path / "new.csv"):
        found = api.predict(tmp_path / "run", rows, id_column="patient_id")
        assert list(found) == ["patient_id", *usual]
        assert found["patient_id"].tolist() == frame["patient_id"].tolist()
        pd.testing.assert_frame_equal(found.drop(columns="patient_id"), usual)
        pd.testing.assert_frame_equal(result.predict(rows, id_column="patient_id"), found)
    told = ldpfl("predict", tmp_path / "run", tmp_path / "new.csv", "--id", "patient_id").out.splitlines()
    assert told[0].startswith("row,patient_id,died,")
    assert [line.split(",")[:2] for line in (told[1], told[300])] == [["1", "'=p0"], ["300", "'=p299"]]
    told = ldpfl("predict", tmp_path / "run", tmp_path / "new.csv").out.splitlines()
    assert told[0] == ",".join(["row", *usual])
    refused = ldpfl.refused("predict", tmp_path / "run", tmp_path / "new.csv", "--id", "patient")
    assert "no column 'patient', which id_column (--id) names: did you mean patient_id?" in refused.replace("'patient_id'", "patient_id")
    assert "the target that the model predicts" in ldpfl.refused("predict", tmp_path / "run", tmp_path / "new.csv", "--id", "died")


def test_a_cell_of_new_rows_that_cannot_be_read_is_refused_with_no_advice_on_training(tmp_path: Path, ldpfl: CommandLine) -> None:
    api.run(data=table(), target="died", settings=FEW, folder=tmp_path / "run", **HOW)
    (tmp_path / "new.csv").write_text("age\n50\n?!\n60\n")
    refused = ldpfl.refused("predict", tmp_path / "run", tmp_path / "new.csv")
    assert (
        "line 3: the value in the column 'age' is not a number, unlike others in this column; correct the cell, or leave it empty"
        in refused
    )
    assert "data.words" not in refused
    (tmp_path / "new.csv").write_text("age,ward\n50,a\n,b\n60,c\n")
    assert len(api.predict(tmp_path / "run", tmp_path / "new.csv")) == 3


def test_new_rows_that_do_not_fit_are_refused_with_what_to_do(tmp_path: Path, ldpfl: CommandLine) -> None:
    settings = {**FEW, "data.categories": {"ward": ["a", "b", "c"]}}
    run, rows = tmp_path / "run", tmp_path / "new.csv"
    api.run(data=table().assign(ward=["a", "b", "c"] * 100), target="died", settings=settings, folder=run, **HOW)
    rows.write_text("age,ward\n50,a\n60,z\n")
    refused = ldpfl.refused("predict", run, rows)
    assert "line 3: the value in the column 'ward' is not in data.categories.ward, expected one of a, b, c, or an empty cell" in refused
    assert "new.csv is a file, expected the folder of a run: ldpfl predict takes the folder first" in ldpfl.refused("predict", rows, run)
    rows.write_text("AGE,ward\n50,a\n60,\n")
    assert "the table has no column 'age', which the model needs: did you mean 'AGE'?" in ldpfl.refused("predict", run, rows)
    rows.write_text("age,ward\n50,a\n60,\n")
    assert len(api.predict(run, rows)) == 2


def test_a_target_may_be_called_row(tmp_path: Path) -> None:
    frame = table().rename(columns={"died": "row"})
    api.run(data=frame, target="row", settings=FEW, folder=tmp_path / "run", **HOW)
    frame.to_csv(tmp_path / "new.csv", index=False)
    assert predict_csv(tmp_path / "run", tmp_path / "new.csv").startswith("row,row,probability of no,")


def test_a_threshold_decides_between_two_classes(tmp_path: Path, ldpfl: CommandLine) -> None:
    settings = {**FEW, "task.threshold": 0.2}
    result = api.run(data=table(), target="died", settings=settings, folder=tmp_path / "run", **HOW)
    usual = result.predict(table())
    risks = usual["probability of yes"]
    middle = float(risks.median())  # as the figures of a risk are: not 0.5, which parts these rows otherwise
    early = result.predict(table(), threshold=middle)
    assert early["died"].tolist() == ["yes" if risk >= middle else "no" for risk in risks]
    assert early["died"].tolist() != usual["died"].tolist()
    pd.testing.assert_frame_equal(early.drop(columns="died"), usual.drop(columns="died"))
    pd.testing.assert_frame_equal(api.predict(tmp_path / "run", table(), threshold=middle), early)
    table().to_csv(tmp_path / "new.csv", index=False)
    told = ldpfl("predict", tmp_path / "run", tmp_path / "new.csv", "--threshold", f"{middle!r}").out
    early.insert(0, "row", range(1, 301))
    assert told == early.to_csv(index=False)
    test = table()[held_out(300, TEST_SHARE)]
    told, died = result.predict(test, threshold=0.2)["died"].to_numpy() == "yes", test["died"].to_numpy() == "yes"
    assert result.scores["sensitivity at 0.2"] == pytest.approx(float((told & died).sum() / died.sum()))
    assert result.scores["specificity at 0.2"] == pytest.approx(float((~told & ~died).sum() / (~died).sum()))
    assert "sensitivity at 0.2" in ldpfl("show", tmp_path / "run").out
    with pytest.raises(ConfigError, match="threshold is 1, expected a probability above 0 and below 1"):
        result.predict(table(), threshold=1.0)


def test_a_threshold_changes_neither_the_model_nor_its_noise() -> None:
    found = [api.run(data=table(), target="died", settings={**FEW, "task.threshold": own}, **HOW) for own in ("off", 0.2)]
    pd.testing.assert_frame_equal(found[0].predict(table()), found[1].predict(table()))


@pytest.mark.thorough
def test_a_threshold_that_says_nothing_is_refused(of_images: Path, images: Path, tmp_path: Path) -> None:
    assert set(api.predict(of_images, images, threshold=1e-9)["class"]) == {"well"}
    days = table().assign(days=np.arange(300) % 7)
    number = api.run(data=days, target="days", task="regression", settings=FEW, **HOW)
    several = api.run(data=days.assign(days=days["days"] % 3), target="days", settings=FEW, **HOW)
    for result, said in ((number, "no class"), (several, "one of 3 classes")):
        with pytest.raises(ConfigError, match=f"threshold = 0.2 is only for models of two classes, and this model predicts {said}"):
            result.predict(days, threshold=0.2)
    for task in ("regression", "classification"):
        settings = {**FEW, "task.threshold": 0.2}
        with pytest.raises(ConfigError, match=r"task.threshold = 0.2 works only in a classification of two classes"):
            api.run(data=days, target="days", task=task, settings=settings, **HOW)


def test_lines_have_the_index_of_the_frame() -> None:
    """A column of them is put beside the rows that they are about, whatever was left out of the frame, or shuffled."""
    frame = pd.DataFrame({"age": range(60), "sick": ["no", "yes"] * 30})
    result = api.run(data=frame, target="sick", count=3, settings={"training.rounds": 2, "data.bounds": {"age": [0, 60]}}, **HOW)
    some = frame.iloc[[40, 3, 17]]
    found = result.predict(some)
    assert found.index.tolist() == [40, 3, 17]
    alone = result.predict(frame.iloc[[3]])
    assert found.loc[3].tolist() == alone.loc[3].tolist()


def test_a_column_in_another_unit_is_noted(tmp_path: Path, ldpfl: CommandLine) -> None:
    frame = pd.DataFrame({"age": [30.0, 50.0] * 30, "sick": ["no", "yes"] * 30})
    settings = {"training.rounds": 1, "data.bounds": {"age": [0, 100]}, "data.scaling": "bounds"}
    api.run(data=frame, target="sick", count=3, folder=tmp_path / "run", settings=settings, **HOW)
    assert "notes" not in api.predict(tmp_path / "run", frame.assign(age=[30.0, 50.0, 101.0] * 20)).attrs
    (tmp_path / "rows.csv").write_text("age\n360\n50\n", encoding="utf-8")
    outcome = ldpfl("predict", tmp_path / "run", tmp_path / "rows.csv")
    assert "column 'age' lie beyond the range" in outcome.err
    assert "note" not in outcome.out
