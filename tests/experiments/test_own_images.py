"""Training on images of one's own by ``auto``: probabilities that may be read, a note where they may not, and classes by their names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from conftest import CommandLine
from ldpfl import ConfigError, DataError, api
from ldpfl.data import held_out_by_person
from ldpfl.experiments.build import build, model_of
from ldpfl.experiments.dataset import Description, load_dataset
from ldpfl.experiments.public_figures import without_private_figures
from ldpfl.experiments.recipes import load_recipe
from ldpfl.experiments.table_rules import clip_norm_for
from ldpfl.report.page import page

EXTREME = "predicted probabilities are far too close to 0 and 1"
OFF = "the mean predicted risk is far from the observed share"
HOW: dict[str, Any] = {"baseline": False, "progress": False, "seed": 1}
FIXED = {"mechanism.clip_norm": 1.0, "training.server_learning_rate": 0.6, "training.server_weight_decay": 0.0}
"""A step that suits inputs of length 1, which images are far from."""


def scans(count: int = 1000, share: float = 0.15, size: int = 8) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return images of grey noise, of which a ``share`` has something bright in the middle: no class can be told for sure."""
    generator = np.random.default_rng(0)
    ill = (generator.random(count) < share).astype(np.int64)
    pixels = generator.normal(110, 50, (count, size, size, 3))
    pixels[:, 2:6, 2:6] += (ill * generator.normal(25, 15, count))[:, None, None, None]
    return pixels.clip(0, 255).astype(np.uint8), ill


def in_folder(folder: Path, pixels: NDArray[np.uint8], names: NDArray[np.str_]) -> Path:
    for place, (own, name) in enumerate(zip(pixels, names, strict=True)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(own).save(folder / name / f"{place:04}.png")
    return folder


def test_the_clipping_norm_follows_from_the_number_of_pixels() -> None:
    """The gradient of a logistic regression is as long as its inputs and a bias, times a residual of sqrt(2) at most."""
    config = load_recipe("own", ["privacy.target_epsilon='off'", "mechanism.noise_multiplier=1.0"])
    for shape in ((3, 8, 8), (1, 28, 28), (20,)):
        data = Description(shape, 2, records=1000)
        expected = 0.85 * sqrt(2) * sqrt(np.prod(shape) + 1)
        assert clip_norm_for(config, data, model_of(config, data)) == pytest.approx(expected, rel=0.05)
    tokens = replace(Description((20,), 2), vocabulary=50)
    assert clip_norm_for(config, tokens, torch.nn.Linear(20, 2)) == 1.0  # which no rule knows


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("model", ["logistic-regression", "mlp"])
def test_risks_of_images_are_calibrated_by_auto(model: str) -> None:
    """A slope within a factor of four of the best; with a step that does not know how long images are it is 0.24 and 0.18."""
    result = api.run(data=scans(), model=model, target_epsilon=8.0, settings={"clients.count": 4}, **HOW)
    slope = result.scores["calibration slope"] or 0.0
    assert 1 / 4 < slope < 4
    assert (result.scores["AUROC"] or 0) > 0.7
    assert not any(EXTREME in note for note in result.to_dict()["caveats"])


@pytest.mark.slow
@pytest.mark.thorough
def test_extreme_probabilities_are_said_wherever_the_result_is_shown(tmp_path: Path, ldpfl: CommandLine) -> None:
    pixels, ill = scans()
    folder = in_folder(tmp_path / "scans", pixels, np.array(["healthy", "ill"])[ill])
    changes = [text for key, value in {**FIXED, "clients.count": 4, "seed": 1}.items() for text in ("--set", f"{key}={value}")]
    printed = ldpfl("run", "--data", folder, "--no-baseline", "--out", "run", *changes)
    assert printed.code == 0
    shown = ldpfl("show", "run")
    (note,) = [one for one in api.load_run("run").to_dict()["caveats"] if EXTREME in one]
    assert "calibration slope 0." in note
    assert "a smaller training.server_learning_rate" in note
    for text in (printed.out, shown.out, page([Path("run")]), str(api.load_run("run"))):
        assert EXTREME in " ".join(text.split())
    loaded = api.load_run("run")
    public = without_private_figures(loaded.config, loaded.to_dict())
    assert not any(EXTREME in one for one in public["caveats"])  # it tells of private rows


@pytest.mark.slow
def test_extreme_probabilities_of_several_classes_are_said_too() -> None:
    pixels, ill = scans()
    classes = ill + 2 * (np.arange(len(ill)) % 2)
    result = api.run(data=(pixels, classes), settings={**FIXED, "clients.count": 4, "training.rounds": 10}, **HOW)
    assert (result.scores["calibration slope"] or 0) < 0.5
    assert any(EXTREME in note for note in result.to_dict()["caveats"])


@pytest.mark.slow
@pytest.mark.thorough
def test_a_result_predicts_images_as_its_folder_does_and_names_their_classes(tmp_path: Path) -> None:
    pixels, _ = scans(60)
    names = np.array(["cat", "dog", "eel"])[np.arange(60) % 3]
    folder = in_folder(tmp_path / "animals", pixels, names)
    settings = {"clients.count": 2, "training.rounds": 2}
    result = api.run(data=folder, model="linear", settings=settings, target_epsilon=50.0, folder=tmp_path / "run", **HOW)
    figures = result.to_dict()
    assert figures["classes"] == ["cat", "dog", "eel"]
    assert "The classes are cat, dog, eel." in " ".join(str(result).split())
    assert "The classes are cat, dog, eel." in page([tmp_path / "run"])
    assert any("the names of the classes (cat, dog, eel) were taken from the data" in note for note in figures["caveats"])
    for rows in (folder, pixels, sorted(folder.rglob("*.png"))[0]):
        found = result.predict(rows)
        assert found.columns.tolist()[-3:] == [f"probability of {name}" for name in ("cat", "dog", "eel")]
        pd.testing.assert_frame_equal(found, api.predict(tmp_path / "run", rows))
        pd.testing.assert_frame_equal(found, api.load_run(tmp_path / "run").predict(rows))
    with pytest.raises(ConfigError, match="the model of this run was not trained on a table"):
        result.predict(pd.DataFrame({"a": [1]}))
    with pytest.raises(DataError, match="but the model takes"):
        result.predict(pixels[:, :4])
    said = api.run(data=folder, model="linear", settings={**settings, "data.classes": ["cat", "dog", "eel"]}, **HOW).to_dict()["caveats"]
    assert not any("names of the classes" in note for note in said)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_confusion_matrix_names_the_classes_of_images(tmp_path: Path) -> None:
    pixels, ill = scans(200)
    folder = in_folder(tmp_path / "scans", pixels, np.array(["healthy", "ill"])[ill])
    settings = {"clients.count": 2, "training.rounds": 2, "evaluation.epsilon": 50.0}
    api.run(data=folder, settings=settings, target_epsilon=100.0, folder=tmp_path / "run", **HOW)
    text = page([tmp_path / "run"])
    matrix = text[text.index("Confusion matrix") :]
    for name in ("healthy", "ill"):
        assert f'<th scope="col" class="number">{name}</th>' in matrix
        assert f'<th scope="row">{name}</th>' in matrix


@pytest.mark.slow
def test_a_mean_risk_far_from_the_observed_share_is_said_and_stated_shares_mend_it(tmp_path: Path) -> None:
    data, few = scans(share=0.08), {"clients.count": 4, "training.rounds": 5}
    shares = {"data.class_shares": [0.92, 0.08]}
    without, stated = (api.run(data=data, settings={**few, **own}, target_epsilon=8.0, **HOW) for own in ({}, shares))
    (note,) = [one for one in without.to_dict()["caveats"] if one.startswith(OFF)]
    assert "state the shares of the classes in data.class_shares" in note
    linear = api.run(data=data, model="linear", settings={**few, "training.rounds": 1}, target_epsilon=8.0, **HOW).to_dict()["caveats"]
    (of_linear,) = [one for one in linear if one.startswith(OFF)]  # it has no bias to hold the shares
    assert "class_shares" not in of_linear
    assert not any(one.startswith(OFF) for one in stated.to_dict()["caveats"])
    assert stated.scores["mean predicted risk"] == pytest.approx(0.08, abs=0.03)
    assert not any(one.startswith(OFF) for one in without_private_figures(without.config, without.to_dict())["caveats"])


def test_the_class_of_an_image_decides_nothing_about_others(tmp_path: Path) -> None:
    """Files lie in folders by class: one of another class is another path, and the paths between are at other places."""
    pixels, _ = scans(120)
    pixels[:, 0, 0, 0] = np.arange(120)
    names = np.where(np.arange(120) < 60, "benign", "malign")
    moved = names.copy()
    moved[:5] = "malign"
    settings = [
        "evaluation.share=0.3",
        "clients.count=2",
        "training.server_learning_rate=1.0",
        "privacy.target_epsilon='off'",
        "mechanism.noise_multiplier=1.0",
        "mechanism.clip_norm=1.0",
        "evaluation.epsilon=1.0",
    ]
    found = []
    for folder, own in (("one", names), ("other", moved)):
        config = load_recipe("own", [f'data.path="{in_folder(tmp_path / folder, pixels, own)}"', *settings, 'model.name="linear"'])
        task = load_dataset(config, None)
        federation, _ = build(config, task, torch.device("cpu"), secret=1)
        inputs = federation.task.data.inputs
        assert federation.judged is not None
        assert isinstance(inputs, torch.Tensor)
        marks = inputs[:, 0, 0, 0].double()
        found.append([[marks[places].tolist() for places in units] for units in (federation.samples, federation.judged.units)])
    assert found[0] == found[1]
    assert all(part for part in found[0][1])


def described(folder: Path, pixels: NDArray[np.uint8], **columns: list[str]) -> Path:
    """Write images with a table that describes them."""
    (folder / "train").mkdir(parents=True)
    names = [f"{place:04}.png" for place in range(len(pixels))]
    for name, own in zip(names, pixels, strict=True):
        Image.fromarray(own).save(folder / "train" / name)
    pd.DataFrame({"file_name": names, **columns}).to_csv(folder / "train" / "metadata.csv", index=False)
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace(",", ";"), r"metadata\.csv has no column file_name: .* by commas \(not by semicolons\)"),
        (lambda text: text.replace("file_name", "file"), r"metadata\.csv has no column file_name"),
        (lambda text: text + "0003.png,ill,8\n", r"lists the image 0003\.png more than once: keep one row for each image"),
        (lambda text: text.replace(",7\n", ",007\n"), r"the column 'site' of .* has codes with zeros in front.*a letter before each code"),
        (lambda text: "", "cannot be read as a table in UTF-8 with commas"),
    ],
    ids=["semicolons", "no file names", "twice", "codes", "empty"],
)
def test_a_table_of_images_that_would_be_misread_is_refused(change: Callable[[str], str], said: str, tmp_path: Path) -> None:
    """Else one image would be two records, or two hospitals one."""
    pixels, ill = scans(40)
    folder = described(tmp_path / "scans", pixels, finding=[["healthy", "ill"][one] for one in ill], site=["7", "8"] * 20)
    table = folder / "train" / "metadata.csv"
    settings = {"training.rounds": 1, "data.target": "finding"}
    sound = table.read_text(encoding="utf-8")
    with_codes = sound.replace("site\n", "site,post code\n").replace(",7\n", ",7,07\n").replace(",8\n", ",8,7\n")
    table.write_text(with_codes, encoding="utf-8")  # which matter only in columns that are read
    api.run(data=folder, client="site", target_epsilon=4.0, settings=settings, **HOW)
    table.write_text(change(sound), encoding="utf-8")
    with pytest.raises(DataError, match=said):
        api.run(data=folder, client="site", target_epsilon=4.0, settings=settings, **HOW)


def test_images_of_one_person_are_protected_together(tmp_path: Path) -> None:
    """The table that describes them names the persons. Their names decide the split, not the names of files."""
    pixels, ill = scans(240)
    patients, sites = [f"P{place % 80}" for place in range(240)], [f"site {place % 80 % 2}" for place in range(240)]
    sites[:80] = [f"site\u00a0{place % 2}" for place in range(80)]  # the same clients
    folder = described(tmp_path / "scans", pixels, finding=[["healthy", "ill"][one] for one in ill], patient=patients, site=sites)
    settings = {"training.rounds": 2, "data.target": "finding"}
    run = api.run(data=folder, client="site", person="patient", target_epsilon=4.0, settings=settings, **HOW)
    assert run.privacy.protected == "person"
    data = load_dataset(run.config, None)
    assert data.persons is not None
    assert data.test_persons is not None
    assert set(data.test_persons) == {one for one, out in zip(patients, held_out_by_person(patients), strict=True) if out}
    assert not set(data.persons) & set(data.test_persons)
    assert data.client_names == ("site 0", "site 1")
    assert not any("not used" in note for note in data.notes)
    unnamed = api.run(data=folder, target_epsilon=4.0, settings={**settings, "clients.count": 2}, **HOW)
    (note,) = [note for note in unnamed.to_dict()["caveats"] if "not used" in note]
    assert "(patient, site)" in note


def test_persons_of_images_may_have_codes_with_zeros_in_front_as_in_a_table_of_rows(tmp_path: Path) -> None:
    """007 and 7 are one person in any table, so it does not matter that the library reads them as numbers."""
    pixels, ill = scans(80)
    codes = [f"{place // 4:03}" for place in range(80)]
    codes[1::4] = [str(int(code)) for code in codes[1::4]]
    described(folder := tmp_path / "scans", pixels, finding=[["healthy", "ill"][one] for one in ill], patient=codes)
    settings: dict[str, Any] = {"training.rounds": 1, "clients.count": 1}
    of_images = api.run(data=folder, person="patient", target_epsilon=4.0, settings={**settings, "data.target": "finding"}, **HOW)
    frame = pd.DataFrame({"age": np.arange(80.0), "patient": codes, "ill": ill})
    frame.to_csv(tmp_path / "rows.csv", index=False)
    of_rows = api.run(data=tmp_path / "rows.csv", target="ill", person="patient", target_epsilon=4.0, settings=settings, **HOW)
    persons, names = (load_dataset(run.config, None) for run in (of_images, of_rows))
    assert persons.persons is not None
    assert names.persons is not None
    assert set(persons.persons) == set(names.persons)
    assert persons.test_persons is not None
    assert len(set(persons.persons)) + len(set(persons.test_persons)) == 20


@pytest.mark.parametrize(
    ("person", "refused"),
    [
        ("finding", "names 'finding', which is also"),
        ("patnt", "did you mean 'patient'"),
        ("patient", "row 3: data.person 'patient' has no value"),
    ],
)
def test_persons_of_images_that_cannot_be_are_refused(person: str, refused: str, tmp_path: Path) -> None:
    pixels, ill = scans(20)
    patients = ["a", "b", "", *["c"] * 17]
    folder = described(tmp_path / "scans", pixels, finding=[["healthy", "ill"][one] for one in ill], patient=patients)
    with pytest.raises((ConfigError, DataError), match=refused):
        api.run(data=folder, person=person, settings={"data.target": "finding"}, **HOW)
