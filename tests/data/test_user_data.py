"""A user's own data, model and task, from the command line and from Python, to a model and a guarantee."""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import nn

import ldpfl
from conftest import CommandLine
from ldpfl import ConfigError, DataError, LdpflError, PrivacyError, api
from ldpfl.data import Dataset, Samples
from ldpfl.data.holding_out import held_out
from ldpfl.data.settings import DataConfig
from ldpfl.data.user_data import load_user_data
from ldpfl.experiments import build as build_module
from ldpfl.experiments.build import build
from ldpfl.experiments.config import RunConfig, parse_config, read_config, toml_value
from ldpfl.experiments.dataset import load_dataset
from ldpfl.experiments.planned_ledger import planned_ledger
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.experiments.settings_listed import commented_toml
from ldpfl.experiments.sweep_config import SweepConfig
from ldpfl.flower import RecordTask
from ldpfl.server import RoundMetrics
from ldpfl.simulation import BatchSchedule, RecordGradientTrainer
from ldpfl.util.user_code import call_user_code

FEW = {"training.rounds": 3}


def patients(count: int = 600, hospitals: int = 5, seed: int = 0) -> pd.DataFrame:
    """Rows of which an outcome depends on age, a marker and the ward, and the days of stay too."""
    generator = np.random.default_rng(seed)
    age, marker = generator.normal(62, 14, count).round(), generator.lognormal(1.5, 1.0, count).round(2)
    ward = generator.choice(["cardio", "icu", "surgery"], count)
    logit = 0.07 * (age - 62) + 0.8 * (np.log1p(marker) - 1.6) + 1.2 * (ward == "icu")
    return pd.DataFrame(
        {
            "hospital": [f"H{place % hospitals}" for place in range(count)],
            "age": age,
            "marker": marker,
            "ward": ward,
            "days": (5 + logit + generator.normal(0, 0.5, count)).round(2),
            "outcome": np.where(generator.random(count) < 1 / (1 + np.exp(-logit)), "died", "alive"),
        }
    )


@pytest.fixture(autouse=True)
def _same_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds of own data are drawn anew: here they are not, so that no figure depends on luck."""
    monkeypatch.setattr("ldpfl.api.configuring.secrets.randbits", lambda bits: 2)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "patients.csv"
    patients().drop(columns="days").to_csv(path, index=False)
    return path


@pytest.mark.slow
def test_a_table_from_the_command_line(table: Path, ldpfl: CommandLine, tmp_path: Path) -> None:
    arguments = ["run", "--data", str(table), "--target", "outcome", "--client", "hospital", "--set", "training.rounds=3", "--seed", "0"]
    outcome = ldpfl(*arguments, "--out", str(tmp_path / "run"))
    for said in ("AUROC (test)", "accuracy", "guarantee met: epsilon", "taken from the data"):
        assert said in outcome.out
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["clients"], result["metric"]) == (5, "AUROC")
    assert result["privacy"]["local"] <= 4
    again = ldpfl(*arguments, "--out", str(tmp_path / "again"), "--json")
    assert json.loads(again.out)["scores"] == result["scores"]
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    assert len(ledger["events"]) == 7  # four histograms and three rounds


def test_a_frame_and_a_module_from_python() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(130, 8), nn.Tanh(), nn.Linear(8, 2))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.layers(rows))

    net = Net()
    before = [p.clone() for p in net.parameters()]
    frame = patients().drop(columns="days")
    result = api.run(data=frame, target="outcome", client="hospital", model=net, settings=FEW, baseline=False, progress=False)
    assert result.scores.keys() > {"accuracy", "macro F1", "AUROC"}
    assert isinstance(result.module(), Net)
    assert all(torch.equal(one, other) for one, other in zip(before, net.parameters(), strict=True))
    assert not torch.equal(before[0], next(result.module().parameters()))
    assert result.to_dict()["privacy"]["protected"] == "record"


def test_a_run_on_what_was_handed_over_goes_on_with_it_alone(tmp_path: Path) -> None:
    frame = patients().drop(columns="days")
    whole = api.run(data=frame, target="outcome", client="hospital", settings=FEW, folder=tmp_path / "run", progress=False)
    again = api.load_run(tmp_path / "run", data=frame)
    assert again.scores == whole.scores
    with pytest.raises(ConfigError, match="pass them again"):
        api.load_run(tmp_path / "run")
    changed = frame.assign(age=frame["age"] + 1)
    with pytest.raises(LdpflError, match="use the same data"):
        api.run(data=changed, folder=tmp_path / "run", resume=True, progress=False)


def test_the_forecast_is_the_ledger_that_a_run_on_own_data_leaves(table: Path) -> None:
    """Histograms included, with the noise that the target asks for."""
    result = api.run(data=table, target="outcome", client="hospital", settings=FEW, baseline=False, progress=False)
    assert planned_ledger(result.config) == result.ledger
    assert [event.joined for event in result.ledger.events] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("count", [12_000])
@pytest.mark.slow
@pytest.mark.thorough
def test_as_good_as_a_pooled_regression(count: int) -> None:
    """20 hospitals of 600 rows: at epsilon 4 within 3 points of scikit-learn on all rows, without noise within 1."""
    from sklearn.compose import make_column_transformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    frame = patients(count, 20).drop(columns="days")
    test = held_out(count, 5)
    rows, outcome = frame.drop(columns=["outcome", "hospital"]), frame["outcome"]
    columns = make_column_transformer((StandardScaler(), ["age", "marker"]), (OneHotEncoder(), ["ward"]))
    pooled = make_pipeline(columns, LogisticRegression()).fit(rows[~test], outcome[~test]).score(rows[test], outcome[test])
    result = api.run(data=frame, target="outcome", client="hospital", target_epsilon=4.0, progress=False)
    assert result.baseline is not None
    assert result.baseline[-1] > pooled - 0.01
    assert result.accuracy > pooled - 0.03


@pytest.mark.slow
def test_a_regression() -> None:
    frame = patients(2000).drop(columns="outcome")
    result = api.run(data=frame, target="days", client="hospital", task="regression", target_epsilon=8.0, baseline=False, progress=False)
    assert result.metric == "R2"
    assert result.score > 0.4
    assert 0.3 < (result.scores["MAE"] or 0) < 1.0  # in days: the noise in them has a mean size of 0.4
    assert np.isnan(result.accuracy)


def test_several_labels() -> None:
    frame = (
        patients()
        .drop(columns="outcome")
        .assign(old=lambda rows: (rows["age"] > 62).astype(int), long=lambda rows: (rows["days"] > 5).astype(int))
    )
    settings = {**FEW, "data.target": ["old", "long"], "data.columns": ["age", "marker", "ward"]}
    result = api.run(data=frame, client="hospital", task="multilabel", settings=settings, baseline=False, progress=False)
    assert result.metric == "AUROC"
    assert result.score > 0.6


@pytest.mark.parametrize("model", ["embedding-bag", "lstm"])
@pytest.mark.slow
@pytest.mark.thorough_for("lstm")
def test_texts(model: str, recwarn: pytest.WarningsRecorder) -> None:
    """The LSTM has no form for many clients at once: it is trained all the same, one after another."""
    generator = np.random.default_rng(0)
    good, bad = ["fine", "well", "better"], ["pain", "fever", "worse"]
    ill = generator.integers(0, 2, 200)
    notes = [" ".join(generator.choice(bad if state else good, 6)) for state in ill]
    frame = pd.DataFrame({"note": notes, "ill": ill})
    settings = {
        **FEW,
        "data.text": "note",
        "data.length": 8,
        "data.vocabulary": 64,
        "mechanism.name": "none",
        "mechanism.perturbed": "weights",
    }
    settings |= {"privacy.target_epsilon": "off", "training.learning_rate": 0.5, "clients.count": 4}
    settings["data.columns"] = ["note"]  # the same column as data.text
    result = api.run(data=frame, target="ill", model=model, settings=settings, baseline=False, progress=False)
    assert result.accuracy > 0.9


def test_a_number_is_estimated_from_texts_by_where_it_is_measured_to_lie() -> None:
    stars = np.random.default_rng(0).integers(0, 6, 400)
    frame = pd.DataFrame({"note": ["good " * int(own) + "bad " * int(5 - own) for own in stars], "stars": stars})
    settings = {**FEW, "data.text": "note", "data.length": 8, "data.vocabulary": 64, "clients.count": 4}
    how: dict[str, Any] = {"task": "regression", "model": "embedding-bag", "target_epsilon": 50.0, "baseline": False, "progress": False}
    found = api.run(data=frame, target="stars", settings=settings, seed=1, **how)
    assert found.ledger.events[0].release.unit == "record"
    assert list(found.predict(frame.head(3))["stars"].between(-5, 10)) == [True] * 3


@pytest.mark.thorough
def test_tensors_and_torch_data_sets_are_data() -> None:
    inputs = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    targets = (inputs[:, 0] > 0).long()
    settings = {**FEW, "clients.count": 4, "seed": 0}
    pair = api.run(data=(inputs, targets), settings=settings, baseline=False, progress=False)
    as_set = api.run(data=torch.utils.data.TensorDataset(inputs, targets), settings=settings, baseline=False, progress=False)
    assert pair.scores == as_set.scores
    samples = Samples(inputs, targets)
    given = api.run(data=Dataset("own", samples, samples, 2, (), (), "abc"), settings=settings, baseline=False, progress=False)
    assert given.accuracy > 0.5
    for wrong, said in (
        (object(), "a pandas data frame"),
        ((inputs, targets[:-1]), "inputs have 100 rows, and targets 99"),
        ((inputs / 0, targets), "NaN or infinity"),
        ((-torch.ones(100, 3).long(), targets), "count as tokens, from 0 on"),
    ):
        with pytest.raises(LdpflError, match=said):
            api.run(data=wrong, settings=settings, progress=False)


class Both(nn.Module):
    """What a picture, a text and a row say together."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.conv, self.head = nn.Embedding(6, 3), nn.Conv2d(1, 2, 3), nn.Linear(3 + 2 + 4, 2)

    def forward(self, *, row: torch.Tensor, scan: torch.Tensor, note: torch.Tensor) -> torch.Tensor:
        seen = self.conv(scan).amax(dim=(2, 3))
        found: torch.Tensor = self.head(torch.cat([row, seen, self.words(note).mean(dim=1)], dim=1))
        return found


class _Visits(torch.utils.data.Dataset[tuple[dict[str, torch.Tensor], torch.Tensor]]):
    def __init__(self, inputs: dict[str, torch.Tensor], targets: torch.Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, place: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        return {name: part[place] for name, part in self.inputs.items()}, self.targets[place]


def visits() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Four numbers, a scan, and a note of five words that tells the answer."""
    random = torch.Generator().manual_seed(0)
    targets = torch.arange(300) % 2
    note = torch.randint(3, (300, 5), generator=random) + 3 * targets[:, None]
    scan = torch.randint(256, (300, 1, 6, 6), generator=random, dtype=torch.uint8)
    return {"row": torch.randn(300, 4, generator=random), "scan": scan, "note": note}, targets


@pytest.mark.parametrize("mechanism", [{"name": "dp-sgd"}, {"name": "duchi", "perturbed": "update", "epsilon": 4.0}])
@pytest.mark.slow
@pytest.mark.thorough_for("mechanism1")
def test_samples_of_several_tensors_go_to_a_model_by_their_names(mechanism: dict[str, object], tmp_path: Path) -> None:
    inputs, targets = visits()
    own = {f"mechanism.{key}": value for key, value in mechanism.items()} | {"training.rounds": 2, "clients.count": 3}
    epsilon: Any = 50.0 if mechanism["name"] == "dp-sgd" else "off"

    def run(data: object, folder: Path | None = None) -> ldpfl.RunResult:
        model = Both()
        with torch.no_grad():
            for place, weights in enumerate(model.parameters()):
                weights.copy_(torch.sin(torch.arange(weights.numel()) + place).view_as(weights) / 4)
        return api.run(data=data, model=model, settings=own, seed=1, folder=folder, target_epsilon=epsilon, baseline=False, progress=False)

    pair, as_set = run((inputs, targets), tmp_path / "run"), run(_Visits(inputs, targets))
    trained = pair.module()
    held = torch.from_numpy(held_out(300, 5))
    outputs = trained(**{name: (part[held].float() / 255 - 0.5) / 0.25 if name == "scan" else part[held] for name, part in inputs.items()})
    assert float((outputs.argmax(dim=1) == targets[held]).float().mean()) == pytest.approx(pair.accuracy)
    assert parameters_of(as_set.module()).equal(parameters_of(trained))
    changed = {**inputs, "note": inputs["note"].flip(0)}  # the fingerprint is of all of them
    with pytest.raises(LdpflError, match="use the same data"):
        api.run(data=(changed, targets), model=Both(), settings=own, folder=tmp_path / "run", resume=True, progress=False)


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [
        ({"a": {"b": torch.zeros(30, 2)}}, torch.zeros(30)),
        ([[1.0], [1.0, 2.0]] * 15, [0, 1] * 15),
        (["one", "two"] * 15, [0, 1] * 15),
        (torch.zeros(30, 2), ["yes", "no"] * 15),
        (torch.zeros(30, 2), None),
        (torch.tensor(1.0), torch.tensor(1)),
        (torch.zeros(30, 2, dtype=torch.complex64), torch.zeros(30)),
        (np.array(["2020-01-01"] * 30, dtype="datetime64[D]"), [0, 1] * 15),
        (pd.DataFrame({"a": ["x"] * 30}), pd.Series([0, 1] * 15)),
    ],
)
def test_pairs_that_are_no_numbers_are_one_clear_line(inputs: object, targets: object) -> None:
    with pytest.raises(DataError, match=r"^(inputs|targets) (are one number|are complex|cannot be converted)[^\n]*$"):
        api.run(data=(inputs, targets), settings={**FEW, "clients.count": 4}, progress=False)


def test_samples_bring_no_code_of_their_own_into_the_training() -> None:
    """A subclass of tensors sees each operation on them, and could mix samples unseen."""

    class Watched(torch.Tensor):
        pass

    rows, targets = torch.rand(40, 3).as_subclass(Watched), torch.arange(40) % 2
    samples = Samples(rows, targets)
    for data in ((rows, targets), Dataset("watched", samples, samples, 2, (), (), "")):
        with pytest.raises(DataError, match=r"of the class Watched, .*give X\.as_subclass\(torch\.Tensor\)"):
            load_user_data(DataConfig(name="given"), "class", data)


def test_a_mask_is_not_lost() -> None:
    rows, targets = np.random.default_rng(0).random((40, 3)), np.arange(40) % 2
    with pytest.raises(DataError, match=r"inputs are a masked array, whose mask would be lost: fill it"):
        load_user_data(DataConfig(name="given"), "class", (np.ma.masked_less(rows, 0.5), targets))


def test_columns_of_a_frame_are_a_pair() -> None:
    frame = patients()
    pair = (frame[["age", "marker"]], (frame["outcome"] == "died").astype(int))
    settings = {**FEW, "clients.count": 4}
    assert api.run(data=pair, settings=settings, baseline=False, progress=False).accuracy > 0


@pytest.mark.parametrize("bounds", [{}, {"age": [20.0, 100.0], "days": [0.0, 60.0]}])
@pytest.mark.slow
@pytest.mark.thorough
def test_a_model_says_what_new_rows_are(bounds: dict[str, list[float]], tmp_path: Path, ldpfl: CommandLine) -> None:
    """As it was measured on rows of the test split: by the run in hand, and by its files alone."""
    frame = patients(1200)
    held, folder = held_out(len(frame), 5), tmp_path / "run"
    own = {"data.bounds": bounds, "training.rounds": 10}
    how: dict[str, Any] = {"client": "hospital", "target_epsilon": 50.0, "seed": 3, "baseline": False, "progress": False}
    told = api.run(data=frame, target="days", task="regression", settings=own, **how)
    guessed = told.predict(frame[held].drop(columns="days"))["days"].to_numpy()
    real = frame["days"].to_numpy()[held]
    assert 1 - ((guessed - real) ** 2).sum() / ((real - real.mean()) ** 2).sum() == pytest.approx(told.score, abs=1e-4)
    own["data.bounds"] = {name: own_bounds for name, own_bounds in bounds.items() if name == "age"}
    classes = api.run(data=frame, target="outcome", settings=own, folder=folder, **how)
    found = classes.predict(frame[held].drop(columns=["outcome", "hospital"]))
    assert float((found["outcome"].to_numpy() == frame["outcome"].to_numpy()[held]).mean()) == pytest.approx(classes.accuracy)
    np.testing.assert_allclose(found[["probability of alive", "probability of died"]].sum(axis=1), 1.0)
    frame[held].drop(columns="outcome").to_csv(tmp_path / "new.csv", index=False)
    ldpfl("predict", folder, tmp_path / "new.csv", "--out", tmp_path / "said.csv")
    again = pd.read_csv(tmp_path / "said.csv")
    assert again["outcome"].tolist() == found["outcome"].tolist()
    np.testing.assert_allclose(again["probability of died"], found["probability of died"], rtol=1e-6)
    frame[held].drop(columns="age").to_csv(tmp_path / "new.csv", index=False)
    assert "no column 'age'" in ldpfl.refused("predict", folder, tmp_path / "new.csv")
    frame[held].to_csv(tmp_path / "new.csv", index=False)
    for file in folder.iterdir():
        if file.name not in ("model.safetensors", "model.json", "encoding.json"):
            file.unlink()
    assert ldpfl("predict", folder, tmp_path / "new.csv").code == 0
    described = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps({**described, "name": "os:abort"}))
    assert "and loading it runs this code" in ldpfl.refused("predict", folder, tmp_path / "new.csv")
    (folder / "model.json").write_text(json.dumps(described))
    told_of = json.loads((folder / "encoding.json").read_text())
    assert told_of["data"]["name"] == "given"  # and not that of a built-in data set
    for change in ({"unscaled": [99]}, {"targets": "number"}, {"width": told_of["width"] + 1}, {"spreads": [1.0] * 9}):
        (folder / "encoding.json").write_text(json.dumps({**told_of, **change}))
        assert "damaged" in ldpfl.refused("predict", folder, tmp_path / "new.csv"), change
    (folder / "encoding.json").write_bytes(b"\xff")
    assert "damaged" in ldpfl.refused("predict", folder, tmp_path / "new.csv")
    (folder / "encoding.json").write_text(json.dumps({**told_of, "data": {**told_of["data"], "target": "\x1b]0;evil\x07"}}))
    assert "\x1b" not in ldpfl("predict", folder, tmp_path / "new.csv").out
    (folder / "encoding.json").write_text(json.dumps(told_of))
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    assert "no regular file" in ldpfl.refused("predict", folder, tmp_path / "new.csv")
    (folder / "encoding.json").unlink()
    assert "encoding.json is missing" in ldpfl.refused("predict", folder, tmp_path / "new.csv")


def parameters_of(module: nn.Module) -> torch.Tensor:
    return torch.cat([weights.detach().flatten() for weights in module.parameters()])


@pytest.mark.parametrize(
    ("change", "model", "said"),
    [
        ({}, "mlp", "takes samples of one tensor, but these samples have several"),
        ({}, "embedding-bag", "takes samples of one tensor, but these samples have several"),
        ({"row": torch.zeros(299, 4)}, Both(), "inputs 'row' have 299 rows, and targets 300"),
        ({"row": torch.full((300, 4), torch.nan)}, Both(), "NaN or infinity"),
        (
            {"more": torch.zeros(300, 4)},
            Both(),
            r"unexpected keyword argument 'more'.* define forward\(self, row, scan, note, more\)",
        ),
        (
            {},
            nn.Linear(4, 2),
            r"parts row, scan, note, which forward gets by name, but it takes input: define forward\(self, row, scan, note\)",
        ),
        ({7: torch.zeros(300, 4)}, Both(), "give each input the name of an argument"),
    ],
)
def test_several_tensors_that_do_not_fit_are_refused(change: dict[Any, torch.Tensor], model: str | nn.Module, said: str) -> None:
    inputs, targets = visits()
    own: dict[Any, torch.Tensor] = {**inputs, **change}
    with pytest.raises(LdpflError, match=said):
        api.run(data=(own, targets), model=model, settings={**FEW, "clients.count": 4}, progress=False)


def test_code_of_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ldpfl: CommandLine) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(
        "from torch import nn\nimport pandas\n"
        "class Net(nn.Sequential):\n    def __init__(self, wide=4):\n"
        "        super().__init__(nn.Linear(2, wide), nn.BatchNorm1d(wide), nn.ReLU(), nn.Linear(wide, 2))\n"
        "def rows():\n    return pandas.DataFrame({'a': range(40), 'b': [1.5] * 40, 'c': [0, 1] * 20})\n"
    )
    path = list(sys.path)
    arguments = ["--data", "nets.py:rows", "--target", "c", "--set", "clients.count=4"]
    refused = ldpfl("check", "nets.py:Net", *arguments)
    assert refused.code == 3
    assert "BatchNorm1d" in refused.out
    assert "--set model.mend=true" in refused.out
    assert "the data need a model with: inputs 2, outputs 2, shape (2,)" in refused.out
    assert json.loads(ldpfl("check", "nets.py:Net", *arguments, "--json").out)["sizes"] == {"inputs": 2, "outputs": 2, "shape": [2]}
    narrow = ldpfl("check", "torch.nn:Linear", *arguments, "--set", "model.options={in_features = 3, out_features = 2}")
    assert narrow.code == 3
    assert "with these changes" not in narrow.out  # for nothing was changed
    short = ["--set", "training.rounds=2", "--no-baseline", "--json"]
    assert "batch normalisation" in ldpfl("run", "--model", "nets.py:Net", *arguments, *short).err
    done = ldpfl("run", "--model", "nets:Net", "--set", "model.mend=true", "--set", "model.options.wide=8", *arguments, *short)
    assert json.loads(done.out)["weights"] == 2 * 8 + 8 + 16 + 2 * 8 + 2
    assert sys.path == path


@pytest.mark.parametrize("forward", ["self.l(x) / 0.0 * 0.0", "torch.sqrt(self.l(x) * 0) + self.l(x)", "torch.log(-self.l(x) ** 2)"])
def test_a_forward_that_gives_no_finite_gradient_is_told_what_to_do(forward: str, ldpfl: CommandLine) -> None:
    """Nothing else says so where a record without a finite gradient adds nothing: the model would stay as it is."""
    Path("nets.py").write_text(
        "import torch\n\nclass Net(torch.nn.Module):\n    def __init__(self, inputs, outputs):\n        super().__init__()\n"
        f"        self.l = torch.nn.Linear(inputs, outputs)\n\n    def forward(self, x):\n        return {forward}\n",
        encoding="utf-8",
    )
    Path("rows.csv").write_text("age,sick\n" + "40,yes\n70,no\n" * 50, encoding="utf-8")
    notes = json.loads(ldpfl("check", "nets.py:Net", "--data", "rows.csv", "--target", "sick", "--json").out)["notes"]
    (note,) = [note for note in notes if "has a gradient that is NaN or infinite" in note]
    assert "Look in forward and in the loss for log, sqrt, exp or a division" in note


@pytest.mark.parametrize("inside", [False, True])
def test_code_from_elsewhere_needs_nothing_of_the_current_folder(inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That may be somebody else's, with a file in place of what a library looks for and can do without; beside a file are its own."""
    (tmp_path / "here").mkdir()
    (tmp_path / "code").mkdir()
    for place in ("here", "code"):
        (tmp_path / place / "ldpfl_optional.py").write_text(f"PLACE = {place!r}\n")
    (tmp_path / "code" / "wanted.py").write_text(
        "try:\n    from ldpfl_optional import PLACE\nexcept ImportError:\n    PLACE = ''\ndef place():\n    return PLACE\n"
    )
    monkeypatch.chdir(tmp_path / "here")
    if inside:  # as if it were installed; what it looks for is not
        monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "installed")])
        (tmp_path / "code").rename(tmp_path / "installed")
        (tmp_path / "installed" / "ldpfl_optional.py").unlink()
        assert call_user_code("data", "wanted:place") == ""
    else:
        assert call_user_code("data", f"{tmp_path / 'code' / 'wanted.py'}:place") == "code"


@pytest.mark.thorough_for("arguments7-clients.count is 5000, but the training data has only", "arguments9-leave data.partition")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "outcom"], "did you mean 'outcome'"),
        (["--target", "outcome", "--client", "hospitl"], "did you mean 'hospital'"),
        (["--target", "4"], "--target-epsilon 4"),
        (["--target", "age"], "set task.name to 'regression' (--task regression)"),
        (["--target", "outcome", "--client", "outcome"], "both name 'outcome'"),
        (["--target", "ward", "--task", "regression"], "the target 'ward' holds words, and this task expects a number"),
        (["--target", "outcome", "--model", "gru"], "is for texts"),
        (["--target", "outcome", "--set", "clients.count=5000"], "clients.count is 5000, but the training data has only"),
        (["--target", "outcome", "--set", "mechanism.name=duchi", "--set", "privacy.target_epsilon=off"], "give data.bounds"),
        (["--target", "outcome", "--client", "hospital", "--set", "data.partition=quantity"], "leave data.partition"),
        (["--target", "outcome", "--set", "data.partition=labels", "--task", "regression"], "holds words, and this task expects a number"),
    ],
)
def test_a_mistake_is_one_clear_line(arguments: list[str], said: str, table: Path, ldpfl: CommandLine, tmp_path: Path) -> None:
    outcome = ldpfl("run", "--data", str(table), *arguments, "--out", str(tmp_path / "run"))
    assert outcome.code == 2
    assert said in outcome.err
    assert len(outcome.err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_that_was_killed_says_how_its_own_data_are_found_again(table: Path, ldpfl: CommandLine, tmp_path: Path) -> None:
    """A file is named in the config; what was handed over is known to its caller alone; neither is looked for on the hub."""
    for data, said in ((table, "go on with: ldpfl run --resume --out"), (pd.read_csv(table), "go on from Python, with the data")):
        folder = tmp_path / type(data).__name__
        api.run(data=data, target="outcome", client="hospital", settings=FEW, folder=folder, progress=False, baseline=False)
        (folder / "result.json").unlink()
        out = ldpfl("show", folder).out
        assert said in out
        assert "hub" not in out


def test_a_data_set_that_the_hub_does_not_give_is_one_line(ldpfl: CommandLine, tmp_path: Path) -> None:
    outcome = ldpfl("run", "--data", "nobody/nothing", "--target", "x", "--out", str(tmp_path / "run"))
    assert outcome.code == 2
    assert "the hub does not have it either" in outcome.err.splitlines()[-1]


def test_settings_are_listed_with_their_meaning(ldpfl: CommandLine) -> None:
    listed = json.loads(ldpfl("settings", "--json").out)
    keys = {setting["key"] for own in listed.values() for setting in own}
    assert {"seed", "data.target", "training.proximal", "privacy.target_epsilon"} <= keys
    assert all(setting["meaning"] for own in listed.values() for setting in own if setting["key"] != "mechanism.name")
    assert "mechanism.noise_multiplier" in ldpfl("settings", "dp-sgd").out
    assert "did you mean 'dp-sgd'" in ldpfl("settings", "dpsgd").err


def test_a_commented_config_is_what_it_was_made_of(table: Path, ldpfl: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    arguments = ["--data", str(table), "--target", "outcome", "--client", "hospital", "--target-epsilon", "2", "--set", "seed=5"]
    assert f"ldpfl run {file}" in ldpfl("init", str(file), *arguments).out
    config = api.configure(file)
    assert (config.data.path, config.data.target, config.privacy.target_epsilon) == (str(table), "outcome", 2.0)
    assert config == api.configure(
        "own", {"data.path": str(table), "data.target": "outcome", "data.client": "hospital"}, target_epsilon=2.0, seed=5
    )
    assert "# Concentration of" in file.read_text()
    assert "exists" in ldpfl("init", str(file), *arguments).err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--data", "nofile.csv"], "there is no file "),
        (["--data", "patients"], "unknown data set 'patients', and no file or folder here has that name"),
        (["--target", "outcom"], "data.target names 'outcom', but there is no such column: did you mean 'outcome'?"),
        (
            ["--target", "outcome", "--client", "hospitl"],
            "data.client names 'hospitl', but there is no such column: did you mean 'hospital'?",
        ),
        (["--target", "outcome", "--person", "who"], "data.person names 'who', but there is no such column: known: "),
        (["--target", "outcome", "--text", "letter"], "data.text names 'letter', but there is no such column: known: "),
        (["--target", "outcome", "--set", "data.columns=['agee']"], "data.columns names 'agee', but there is no such column"),
    ],
)
def test_a_config_of_data_that_do_not_exist_is_not_written(
    flags: list[str], said: str, table: Path, ldpfl: CommandLine, tmp_path: Path
) -> None:
    assert said in ldpfl.refused("init", tmp_path / "own.toml", "--data", table, *flags)
    assert not (tmp_path / "own.toml").exists()


def test_in_a_terminal_a_mistyped_file_or_column_is_asked_for_again(
    table: Path, ldpfl: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, answers = tmp_path / "own.toml", iter(["nofile.csv", str(table), "outcom", "outcome", "hospitl", "hospital", 2.0])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("typer.prompt", lambda *_, **__: next(answers))
    outcome = ldpfl("init", file)
    assert outcome.code == 0, outcome.err
    assert [outcome.out.count(said) for said in ("there is no file", "data.target names 'outcom'", "data.client names 'hospitl'")] == [
        1,
        1,
        1,
    ]
    config = api.configure(file)
    assert (config.data.path, config.data.target, config.data.client) == (str(table), "outcome", "hospital")
    answers = iter([])  # a fault in the flags is none in an answer, so nothing is asked
    assert "data.person names 'who'" in ldpfl.refused("init", tmp_path / "other.toml", "--data", table, "--person", "who")


def test_a_note_on_many_classes_says_how_many_are_not_listed() -> None:
    frame = pd.DataFrame({"age": range(60), "ward": [f"W{place % 9}" for place in range(60)]})
    settings = DataConfig(name="given", target="ward")
    notes = " ".join(load_user_data(settings, "class", frame).notes)
    assert "the classes of 'ward' (W0, W1, W2, W3, W4 and 4 more) were taken from the data" in notes
    few = " ".join(load_user_data(settings, "class", frame[frame["ward"] < "W5"]).notes)
    assert "(W0, W1, W2, W3, W4) were taken" in few


def test_a_config_that_is_written_to_be_kept_has_no_seed_unless_one_is_said(table: Path, ldpfl: CommandLine, tmp_path: Path) -> None:
    """All noise of its runs would follow from it, and it is made to be handed on."""
    file = tmp_path / "own.toml"
    assert ldpfl("init", str(file), "--data", str(table), "--target", "outcome").code == 0
    assert "\nseed =" not in file.read_text()
    assert "seed" not in read_config(file).model_fields_set


def test_no_target_is_promised_where_clients_decide_in_secret(table: Path) -> None:
    """Who takes part in such a run on one's own data follows from the data as well: a target would be solved for other rounds."""
    settings = {"mechanism.name": "duchi", "mechanism.perturbed": "update", "clients.self_sampling": "plain"}
    settings["data.bounds"] = {"age": [0, 100], "marker": [0, 100]}  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="only the run itself decides which of your clients take part"):
        api.run(data=table, target="outcome", settings={**settings, "clients.count": 4}, target_epsilon=4.0, progress=False)


@pytest.mark.slow
def test_a_finished_run_goes_on_for_more_rounds(table: Path, ldpfl: CommandLine, tmp_path: Path) -> None:
    """What was released stays charged, and more is; the noise is that of before."""
    folder = tmp_path / "run"
    first = api.run(data=table, target="outcome", client="hospital", settings=FEW, folder=folder, progress=False)
    more = json.loads(ldpfl("run", "--resume", "--more-rounds", "2", "--out", folder, "--json").out)
    made = json.loads(ldpfl("ledger", folder, "--json").out)
    assert (made["rounds"], made["measuring_rounds"]) == (5, 4)
    assert ldpfl("ledger", folder).out.splitlines()[0].endswith("run: 5 rounds of training and 4 of measuring")
    told = (more["caveats"], json.loads(ldpfl("ledger", folder, "--json").out)["warnings"], api.account(folder).warnings)
    assert all(any("2 of 5 rounds were added" in line for line in lines) for lines in told)
    assert not api.account(first).warnings
    assert (more["rounds"], more["score_per_round"][:3]) == (5, [metrics.score for metrics in first.history])
    longer = api.load_run(folder)
    assert longer.ledger.events[:7] == first.ledger.events
    assert [event.round for event in longer.ledger.events] == list(range(1, 10))
    assert longer.config.mechanism == first.config.mechanism
    assert more["privacy"]["local"] > first.to_dict()["privacy"]["local"]
    with pytest.raises(ConfigError, match="more_rounds is -1, expected at least 1"):
        api.run(folder=folder, resume=True, more_rounds=-1)
    assert "more_rounds cannot change a run's settings" in ldpfl.refused(
        "run", "--resume", "--more-rounds", "2", "--out", folder, "--set", "training.server_momentum=0.1"
    )
    fixed = {**FEW, "training.server_schedule": "linear"}
    api.run(data=table, target="outcome", client="hospital", settings=fixed, folder=tmp_path / "fixed", progress=False)
    assert "depend on the number of rounds" in ldpfl.refused("run", "--resume", "--more-rounds", "2", "--out", tmp_path / "fixed")
    assert "give --resume and the run's folder as --out, and no recipe" in ldpfl.refused("run", "--more-rounds", "2")


@pytest.mark.slow
@pytest.mark.thorough
def test_a_finished_run_stays_one_until_a_round_is_added_and_names_the_epsilon_that_was_asked_for(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    again: dict[str, Any] = {"folder": folder, "resume": True, "more_rounds": 2, "progress": False}
    asked: dict[str, Any] = {"target_epsilon": 2.0, "baseline": False, "progress": False}
    api.run(data=table, target="outcome", client="hospital", settings=FEW, folder=folder, **asked)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr("ldpfl.experiments.runner.simulate", raising)
        with pytest.raises(RuntimeError, match="before a round"):
            api.run(**again)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    assert len(api.load_run(folder).history) == 3
    longer = api.run(**again).to_dict()
    assert longer["privacy"]["local"] > 2
    assert [note for note in longer["caveats"] if note.startswith("epsilon 2 was asked for; with the 2 added rounds it is 2.")]
    assert any("with the 4 added rounds" in note for note in api.run(**again).to_dict()["caveats"])


def raising(*arguments: object) -> Any:
    raise RuntimeError("before a round")


@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_that_cannot_go_on_stays_as_it_was(table: Path, ldpfl: CommandLine, tmp_path: Path) -> None:
    """Whatever is wrong with its data by now; and a baseline that was left out is not made up for."""
    folder, frame = tmp_path / "run", pd.read_csv(table)
    api.run(data=table, target="outcome", client="hospital", settings=FEW, folder=folder, baseline=False, progress=False)
    files = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    more = ("run", "--resume", "--more-rounds", "2", "--out", folder)
    with table.open("a") as rows:
        rows.write("one,cell,too,few\n")
    assert "cells, but the header has" in ldpfl.refused(*more)
    frame.iloc[:-1].to_csv(table, index=False)
    assert "use the same data" in ldpfl.refused(*more)
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == files
    frame.to_csv(table, index=False)
    assert json.loads(ldpfl("run", "--resume", "--out", folder, "--json").out)["noise_free_score"] is None
    done = json.loads(ldpfl(*more, "--json").out)
    assert (done["rounds"], done["noise_free_score"]) == (5, None)


def test_a_run_goes_on_with_what_was_measured_or_not_at_all(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise that comes out otherwise, as that of a later version may, would be a second release that nobody charged."""
    folder = tmp_path / "run"
    api.run(data=table, target="outcome", client="hospital", settings=FEW, folder=folder, progress=False, baseline=False)
    seed = build_module.secret_seed
    monkeypatch.setattr(build_module, "secret_seed", lambda config, task, secret: (seed(config, task, secret) or 0) + 1)
    with pytest.raises(ConfigError, match="use the same data"):
        api.run(folder=folder, resume=True, more_rounds=1, progress=False)


def test_layers_that_are_clamped_are_told_of(ldpfl: CommandLine, table: Path) -> None:
    """Before the first round from the public model, and after it from what a simulation sees."""
    settings = {"mechanism.name": "duchi", "mechanism.epsilon": 5.0, "mechanism.perturbed": "weights", "ranges.radius": 0.02}
    settings |= {"privacy.target_epsilon": "off", "data.bounds": {"age": [0, 100], "marker": [0, 100]}, "training.rounds": 1}
    flags = [f"--set={key}={toml_value(value)}" for key, value in settings.items()]
    command: list[str | Path] = ["run", "--data", table, "--target", "outcome", "--client", "hospital", "--no-baseline", "--json"]
    outcome = ldpfl(*command, *flags)
    assert "of the initial model lies outside" in outcome.err
    assert "round 1: " in outcome.err
    assert "was clipped" in outcome.err
    update = ["--set=mechanism.perturbed=update", "--set=ranges.radius=1.0"]
    assert (
        ldpfl("run", "--data", table, "--target", "outcome", "--client", "hospital", "--no-baseline", "--json", *flags, *update).err == ""
    )


class Remembers(nn.Module):
    """A module that keeps what it saw where no buffer is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(3, 2), 0.0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen = max(self.seen, float(rows.abs().max().item()))
        return torch.as_tensor(self.layer(rows))


def test_a_module_that_remembers_what_it_saw_is_refused() -> None:
    """With it one record would change what is sent for all others, beyond any clipping."""
    pair = (torch.randn(50, 3), torch.arange(50) % 2)
    with pytest.raises(PrivacyError, match="changed seen while it ran"):
        api.run(data=pair, model=Remembers(), settings={**FEW, "clients.count": 4}, progress=False)


def test_what_is_made_of_own_data_without_noise_is_not_kept(table: Path, cache: Path, tmp_path: Path) -> None:
    result = api.run(data=table, target="outcome", client="hospital", settings=FEW, folder=tmp_path / "run", progress=False)
    assert result.baseline is not None
    assert not (cache / "baselines").exists()
    notes = result.to_dict()["caveats"]
    assert any("this is a simulation" in note for note in notes)
    assert any("test rows are not protected" in note for note in notes)


def test_columns_that_noise_hides_are_left_out_and_said(tmp_path: Path) -> None:
    """Of 60 rows, 48 of them for training: not one bin stands out at epsilon 1."""
    settings = {"clients.count": 5, "training.rounds": 3}
    frame = patients(60).drop(columns="days")
    result = api.run(data=frame, target="outcome", target_epsilon=0.3, settings=settings, baseline=False, progress=False)
    (note,) = [note for note in result.to_dict()["caveats"] if "were not seen above the noise of measuring: age, marker" in note]
    assert "no input left" not in note  # there is a column of words
    assert note.endswith("or give more rows; without a secure sum each client adds noise of its own, so fewer and larger clients help too")
    alone = api.run(data=frame, target="outcome", columns=["age", "marker"], target_epsilon=0.3, settings=settings, baseline=False)
    notes = alone.to_dict()["caveats"]
    assert any("measuring: age, marker. So the model has no input left, and predicts the same for all rows" in note for note in notes)
    assert not any("output is the same for all" in note for note in notes)


@pytest.mark.parametrize("named", [(), ("d\u00e9c\u00e8s", "vie"), ("de\u0301ce\u0300s", "vie")], ids=["unnamed", "composed", "decomposed"])
def test_one_word_in_two_unicode_forms_is_one_class_and_one_input(named: tuple[str, ...]) -> None:
    """Files from macOS often write an accent as a character of its own, after its letter."""
    forms = ["d\u00e9c\u00e8s", "de\u0301ce\u0300s"]
    frame = patients(60).assign(word=[forms[row // 2 % 2] if row % 2 else "vie" for row in range(60)])
    config = {
        **FEW,
        "clients.count": 4,
        "data.columns": ["word"],
        "data.classes": list(named),
        "data.categories": {"word": [forms[1], "vie"]},
    }
    frame["outcome"] = frame["word"]
    result = api.run(data=frame, target="outcome", settings=config, baseline=False, progress=False, target_epsilon=50)
    assert [str(name) for name in result.predict(frame.head(8)).columns if str(name) != "outcome"] == [
        f"probability of {forms[0]}",
        "probability of vie",
    ]


def test_a_missing_word_is_one_in_each_unicode_form_and_identifiers_keep_theirs(tmp_path: Path) -> None:
    composed, decomposed = "erh\u00f6ht", "erho\u0308ht"
    frame = patients(60).assign(word=[decomposed if row % 3 == 0 else f"w{row % 3}" for row in range(60)])
    frame["person"] = [f"{decomposed}{row}" for row in range(60)]
    settings = {**FEW, "clients.count": 4, "data.columns": ["age", "word"], "data.missing_words": [composed]}
    result = api.run(data=frame, target="outcome", settings=settings, baseline=False, progress=False, target_epsilon=50)
    assert any("columns with missing values: word (33" in note for note in result.to_dict()["caveats"])
    assert list(result.predict(frame.head(5), id_column="person")["person"]) == list(frame["person"].head(5))
    with pytest.raises(ConfigError, match="expected each word once"):
        api.run(data=frame, target="outcome", settings={**settings, "data.classes": [composed, decomposed]}, progress=False)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ([0.0, 1.5] * 25, "to predict a number"),
        ([0, -1] * 25, "negative or above 999"),
        ([0.0, float("nan")] * 25, "NaN or infinity"),
        ([1] * 50, "all targets are of the same class"),
        ([[0], [1]] * 25, r"targets have the shape \(50, 1\), expected \(50,\), one class each: give targets.squeeze\(1\)"),
        ([[0, 1], [1, 0]] * 25, r"targets have the shape \(50, 2\), expected \(50,\).*: give targets.argmax\(1\)"),
    ],
)
def test_targets_that_are_no_classes_are_refused(targets: list[Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        api.run(data=(torch.randn(50, 3), torch.tensor(targets)), settings={**FEW, "clients.count": 4}, progress=False)


def test_flags_for_own_data_need_some(ldpfl: CommandLine) -> None:
    assert "but --data is missing" in ldpfl.refused("run", "--target", "outcome")
    assert "is not a table that ldpfl can read" in ldpfl.refused("run", "--data", __file__, "--target", "outcome")


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "channel"), [(0.01, "direct"), (0.01, "secure-sum"), (30.0, "direct")])
@pytest.mark.thorough_except("0.01-secure-sum")
def test_a_run_of_records_is_audited(noise: float, channel: str, tiny_data: Path, ldpfl: CommandLine) -> None:
    """Its clients put integers into the mechanism."""
    settings = ["--set=clients.count=8", "--set=training.rounds=1", "--set=model.name=linear", "--set=data.features=none"]
    settings += ["--data-dir", str(tiny_data)]
    more = [f"--set=mechanism.noise_multiplier={noise}", f"--set=shuffling.channel={channel}"]
    ldpfl("run", "sound/records-mnist", *settings, *more, "--no-baseline", "--out", "run")
    rows = json.loads(ldpfl("audit", "run", "--trials", "100", "--data-dir", tiny_data, "--json").out)["rows"]
    # A canary as long as a record's gradient may be is seen where there is next to no noise, and nowhere where there is much.
    assert (rows[-1]["accuracy"] == 1.0) == (noise < 1), rows
    if noise > 1:
        return
    by_chance = ["--set=mechanism.sample_rate=0.5", "--out", "chance"]
    ldpfl("run", "sound/records-mnist", *settings, *by_chance, "--no-baseline")
    assert "samples records, but the canary is in every round" in ldpfl("audit", "chance", "--trials", "100", "--data-dir", tiny_data).err


@pytest.mark.thorough
def test_an_attack_that_draws_images_needs_some(table: Path, ldpfl: CommandLine) -> None:
    ldpfl("run", "--data", table, "--target", "outcome", "--client", "hospital", "--set=training.rounds=1", "--no-baseline", "--out", "run")
    assert "attack a run on a built-in data set" in ldpfl.refused("attack", "gan", "run", "--label", "1")
    assert "holds a run" in ldpfl.refused("sweep", "sound-heads", "--out", "run")


@pytest.mark.thorough_except("shape0-mlp")
@pytest.mark.parametrize(
    ("shape", "model"),
    [((60, 16), "mlp"), ((60, 16, 16), "two-layer-cnn"), ((60, 16, 16, 3), "two-layer-cnn"), ((60, 3, 16, 16), "two-layer-cnn")],
)
def test_bytes_are_images_or_small_numbers(shape: tuple[int, ...], model: str) -> None:
    """However their axes are ordered."""
    inputs = torch.randint(256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    settings = {**FEW, "training.rounds": 1, "clients.count": 4}
    result = api.run(data=(inputs, torch.arange(60) % 2), model=model, settings=settings, baseline=False, progress=False)
    assert 0 <= result.accuracy <= 1


class Talkative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.layer(rows)}


def test_a_model_that_gives_something_else_is_refused() -> None:
    pair = (torch.randn(50, 3), torch.arange(50) % 2)
    for model, said in ((Talkative(), "returns a dict, expected a tensor"), (Talkative, r"give an instance, Talkative\(")):
        with pytest.raises(ConfigError, match=said):
            api.run(data=pair, model=model, settings={**FEW, "clients.count": 4}, progress=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [nn.Linear(3, 1), nn.Linear(3, 4)])
def test_a_model_of_another_number_of_outputs_is_told_which(model: nn.Module) -> None:
    pair = (torch.randn(50, 3), torch.arange(50) % 2)
    with pytest.raises(ConfigError, match="give the last layer 2 outputs, a score for each class, also where there are two"):
        api.run(data=pair, model=model, settings={**FEW, "clients.count": 4}, progress=False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (torch.Tensor.to_sparse, r"a tensor of the layout sparse_coo, expected a dense one: give \.to_dense\(\)"),
        (torch.Tensor.to_sparse_csr, "a tensor of the layout sparse_csr"),
        (lambda rows: torch.quantize_per_tensor(rows, 0.1, 0, torch.qint8), r"quantised \(torch.qint8\): give \.dequantize\(\)"),
        (lambda rows: torch.nested.nested_tensor(list(rows)), "a nested tensor, whose samples differ in shape: give them one shape"),
        (lambda rows: torch.nested.nested_tensor(list(rows), layout=torch.jagged), "a nested tensor"),
        (lambda rows: rows.to("meta"), "a tensor without values"),
    ],
    ids=["sparse", "compressed", "quantised", "nested", "jagged", "meta"],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_not_dense_are_refused_by_name(change: Callable[[torch.Tensor], torch.Tensor], said: str) -> None:
    rows, classes = torch.randn(50, 3), torch.arange(50) % 2
    for pair, what in (((change(rows), classes), "inputs"), (({"x": change(rows)}, classes), "inputs"), ((rows, change(rows)), "targets")):
        with pytest.raises(DataError, match=f"{what} are {said}"):
            api.run(data=pair, settings={**FEW, "clients.count": 4}, progress=False)
    with pytest.raises(ConfigError, match=f"`inputs` are {said}"):
        RecordTask(nn.Linear(3, 2), change(rows), classes, nn.functional.cross_entropy)


class _Stream(torch.utils.data.IterableDataset[tuple[torch.Tensor, int]]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return iter([(torch.zeros(3), 1)])


class _Split:
    def to_pandas(self) -> None: ...


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (_Stream(), r"a _Stream, which lacks __len__ or __getitem__.* with pairs = list\(data\), give"),
        ([(torch.zeros(3), 1)] * 5, r"with pairs = list\(data\), give"),
        (torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(4, 3))), "data.dataset is the data set of this loader"),
        ({"train": _Split(), "test": _Split()}, r"give data\['train'\].to_pandas"),
    ],
    ids=["stream", "pairs", "loader", "splits"],
)
def test_data_in_another_form_are_told_how_to_be_given(data: object, said: str) -> None:
    with pytest.raises(LdpflError, match=said):
        api.run(data=data, settings=FEW, progress=False)


def test_a_check_answers_though_there_are_fewer_samples_than_clients() -> None:
    assert api.check(data=(torch.randn(40, 3), torch.arange(40) % 2), model=nn.Linear(3, 2)).is_fit


class Counted(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Twenty samples, drawn anew each time that somebody looks."""

    looks = 0

    def __len__(self) -> int:
        return 20

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        self.looks += 1
        return torch.rand(3), place % 2


def test_own_data_are_read_once_for_a_run() -> None:
    """Were they read again, each step of a run would be on others."""
    data = Counted()
    api.run(data=data, settings={**FEW, "clients.count": 4, "data.bounds": {}}, progress=False)
    assert data.looks == 20


@pytest.mark.thorough_except("two  spaces.csv")
@pytest.mark.parametrize("path", ["two  spaces.csv", 'a "quoted".csv', "tab\tin it.csv"])
def test_a_commented_config_keeps_every_character(path: str) -> None:
    config = api.configure("own", {"seed": 3, "data.path": path, "data.bounds": {"a b": [0, 1.5]}, "data.target": ["x", "y"]})
    assert parse_config(commented_toml(config), origin="test") == config


def test_columns_say_of_what_kind_they_are(table: Path) -> None:
    frame = pd.read_csv(table)
    frame["code"] = [f"{place % 7}" for place in range(len(frame))]
    usual: dict[str, Any] = {"data": frame, "target": "outcome", "client": "hospital", "baseline": False, "progress": False, "rounds": 1}
    assert any("words, hashed: ward, code" in note for note in api.run(**usual, words=["code"]).to_dict()["caveats"])
    assert any("numbers: age, marker, code" in note for note in api.run(**usual).to_dict()["caveats"])
    with pytest.raises(ConfigError, match=r"data\.numbers and data\.words both name 'code'"):
        api.run(**usual, words=["code"], numbers=["code"])
    with pytest.raises(DataError, match="no value in the column 'ward' is a number"):
        api.run(**usual, numbers=["ward"])


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("named", [(), ("\u00e9", "b"), ("e\u0301", "b")], ids=["unnamed", "composed", "decomposed"])
def test_a_folder_of_a_class_may_have_either_unicode_form(named: tuple[str, ...], tmp_path: Path) -> None:
    """macOS writes the names of folders in the decomposed form."""
    for place in range(60):
        folder = tmp_path / "train" / ("e\u0301", "b")[place % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (place, 0, 0)).save(folder / f"{place:02}.png")
    settings = {**FEW, "clients.count": 3, "model.name": "linear", "data.classes": list(named)}
    result = api.run(data=tmp_path, settings=settings, baseline=False, progress=False, target_epsilon=50.0)
    assert set(result.predict(tmp_path / "train" / "b").columns) >= {"probability of \u00e9", "probability of b"}


def test_a_folder_of_images_by_class_is_data(tmp_path: Path, ldpfl: CommandLine) -> None:
    """As people have them, and as data sets of the hub are laid out: Parquet files with an image column."""
    random_ = np.random.default_rng(0)
    pictures = [random_.integers(0, 256, (8, 8, 3), dtype=np.uint8) // (1 + place % 2) for place in range(60)]
    for place, pixels in enumerate(pictures):
        folder = tmp_path / "scans" / "train" / ("bright", "dark")[place % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{place:02}.png")
    settings = {**FEW, "clients.count": 3, "model.name": "linear", "training.rounds": 8}
    own: dict[str, Any] = {"target_epsilon": 50.0, "settings": settings, "baseline": False, "progress": False, "seed": 1}
    by_class = api.run(data=tmp_path / "scans", **own)
    assert by_class.score > 0.9  # two classes: the AUROC
    assert by_class.to_dict()["event"] == "dark"
    assert by_class.module()(torch.zeros(1, 3, 8, 8)).shape == (1, 2)
    assert any("names of the classes (bright, dark) were taken from the data" in note for note in by_class.to_dict()["caveats"])
    rows = {"image": [Image.fromarray(pixels) for pixels in pictures], "kind": ["bright", "dark"] * 30, "ward": list("aab") * 20}
    (tmp_path / "hub").mkdir()
    datasets.Dataset.from_dict(
        rows, datasets.Features({"image": datasets.Image(), "kind": datasets.Value("string"), "ward": datasets.Value("string")})
    ).to_parquet(tmp_path / "hub" / "train-00000-of-00001.parquet")
    assert api.run(data=tmp_path / "hub", target="kind", **own).score > 0.9
    by_ward = api.run(data=tmp_path / "hub", target="kind", client="ward", **{**own, "settings": {"model.name": "linear", **FEW}})
    assert by_ward.config.clients.count == by_ward.ledger.events[0].cohort == 2
    short = ("run", "--data", tmp_path / "hub", "--no-baseline", "--set", "clients.count=3")
    assert "names 'wart', but there is no such column" in ldpfl.refused(
        "run", "--data", tmp_path / "hub", "--target", "kind", "--client", "wart"
    )
    assert "has no column 'label'" in ldpfl.refused(*short)
    assert "both name 'kind'" in ldpfl.refused(*short, "--target", "kind", "--client", "kind")
    (tmp_path / "scans" / "train" / "dark" / "odd.png").write_bytes(b"no picture")
    assert "cannot be" in ldpfl.refused("run", "--data", tmp_path / "scans", "--no-baseline", "--set", "clients.count=3")


@pytest.mark.slow
def test_images_to_measure_on_are_those_of_the_other_folder(tmp_path: Path, ldpfl: CommandLine) -> None:
    """Classes are told apart by name there too, and no image of the first folder is measured on."""
    pixels = np.random.default_rng(0).integers(0, 256, (60, 8, 8, 3), dtype=np.uint8)
    kinds = ["bright", "dark", "grey"] * 20
    for place, kind in enumerate(kinds):
        mine = tmp_path / ("own" if place < 40 or kind != "dark" else "public") / kind
        mine.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[place]).save(mine / f"{place:02}.png")
    settings: dict[str, Any] = {"target_epsilon": 50.0, "seed": 1, "baseline": False, "progress": False}
    own: dict[str, Any] = {**FEW, "clients.count": 3, "model.name": "linear", "data.test_path": str(tmp_path / "public")}
    found = load_user_data(DataConfig(name="given", path=str(tmp_path / "own"), test_path=str(tmp_path / "public")), "class")
    assert (len(found.train), len(found.test), found.outputs) == (53, 7, 3)
    assert set(found.test.targets.tolist()) == {1}
    api.run(data=tmp_path / "own", settings=own, **settings)
    ordered = DataConfig(name="given", path=str(tmp_path / "own"), classes=["grey", "dark", "bright", "odd"])
    told = load_user_data(ordered, "class")
    assert (told.outputs, told.notes) == (4, ())
    assert (told.train.targets == 0).sum() + (told.test.targets == 0).sum() == 20
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "rows.csv").write_text("a,b\n1,2\n")
    short = ("run", "--data", tmp_path / "own", "--no-baseline", "--set", "clients.count=3", "--set")
    for setting, said in (
        ("data.test_path=nowhere", "cannot be read"),
        (f"data.test_path={tmp_path / 'table'}", "holds no images"),
        ('data.columns=["age"]', "has no effect where data is images"),
        ('data.classes=["bright"]', "expected one of bright"),
        ("task.name=regression", "have one class each"),
    ):
        assert said in ldpfl.refused(*short, setting), setting
    for given in ((pixels, np.arange(60) % 2), [(pixels[place], place % 2) for place in range(60)]):
        brought = given if isinstance(given, tuple) else Pairs(given)
        with pytest.raises(
            ConfigError, match=r"data\.test_path has no effect where data is an? (pair|PyTorch data set|ldpfl.data.Dataset)"
        ):
            api.run(data=brought, settings=own, **settings)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([0, -1], "not whole numbers from 0 to 999"),
        ([0, 2**40], "whole numbers from 0 to 999"),
        ([0, None], "has a class of the type NoneType"),
        ([[0], [1]], "has a class of the type list"),
        (["a", ""], None),
        ([1, 2], None),
        ([250, 410], None),
    ],
)
def test_classes_of_images_are_looked_at_as_those_of_a_table_are(labels: list[Any], said: str | None, tmp_path: Path) -> None:
    """In one Parquet file, as a data set of the hub has them."""
    pixels = np.random.default_rng(0).integers(0, 256, (20, 8, 8, 3), dtype=np.uint8)
    rows = {"image": [Image.fromarray(own) for own in pixels], "kind": labels * 10, "owner": ["a", "b"] * 9 + ["a", None]}
    kinds = datasets.Dataset.from_dict({"kind": labels}).features["kind"]
    features = datasets.Features({"image": datasets.Image(), "kind": kinds, "owner": datasets.Value("string")})
    file = tmp_path / "images.parquet"
    datasets.Dataset.from_dict(rows, features).to_parquet(file)
    config = DataConfig(name="given", path=str(file), target="kind")
    if said is None:
        assert load_user_data(config, "class").outputs == 2
        with pytest.raises(DataError, match="fill in its 'owner'"):
            load_user_data(config.model_copy(update={"client": "owner"}), "class")
        return
    with pytest.raises(DataError, match=said):
        load_user_data(config, "class")


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # the library leaves files open
def test_a_folder_of_images_with_a_table_of_whose_they_are_is_one_of_images(tmp_path: Path) -> None:
    """And a run on it is not gone on with once they are somebody else's."""
    pixels = np.random.default_rng(0).integers(0, 256, (24, 8, 8, 3), dtype=np.uint8)
    folder = tmp_path / "scans" / "train"
    folder.mkdir(parents=True)
    for place, own in enumerate(pixels):
        Image.fromarray(own).save(folder / f"{place:02}.png")

    def owned(by: list[str]) -> Path:
        rows = {"file_name": [f"{place:02}.png" for place in range(24)], "label": [0, 1] * 12, "ward": by}
        pd.DataFrame(rows).to_csv(folder / "metadata.csv", index=False)
        return tmp_path / "scans"

    settings = {"model.name": "linear", "training.rounds": 1, "privacy.target_epsilon": "off", "mechanism.noise_multiplier": 1.0}
    how: dict[str, Any] = {"client": "ward", "settings": settings, "baseline": False, "progress": False, "folder": tmp_path / "run"}
    found = api.run(data=owned(["a", "b", "c"] * 8), **how)
    assert found.config.clients.count == 3
    owned(["a", "a", "b", "b", "c", "c"] * 4)
    with pytest.raises(ConfigError, match="was begun on"):
        api.run(folder=tmp_path / "run", resume=True, more_rounds=1, progress=False)


@pytest.mark.parametrize(
    ("classes", "held"), [(("test", "dog"), 0.2), (("train", "bus"), 0.2), (("train/test", "train/dog", "test/dog"), 1 / 3)]
)
def test_a_class_may_be_called_as_it_likes(classes: tuple[str, ...], held: float, tmp_path: Path) -> None:
    """Which images are measured on, and not protected, is no guess by words in their paths."""
    pixels = np.random.default_rng(0).integers(0, 256, (30, 8, 8, 3), dtype=np.uint8)
    for place, own in enumerate(pixels):
        folder = tmp_path / "scans" / classes[place % len(classes)]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(own).save(folder / f"{place:02}.png")
    (tmp_path / "scans" / "notes.txt").write_text("a text beside them")
    found = load_user_data(DataConfig(name="given", path=str(tmp_path / "scans")), "class")
    assert (len(found.train) + len(found.test), found.outputs) == (30, 2)
    assert abs(len(found.test) - 30 * held) < 5


@pytest.mark.slow
def test_the_class_of_one_image_decides_nothing_about_others(tmp_path: Path) -> None:
    """Neither who is held out nor whose they are, though files come in the order of their classes."""
    pixels = np.random.default_rng(0).integers(0, 256, (60, 4, 4, 3), dtype=np.uint8)

    def divided(moved: str) -> list[set[bytes]]:
        root = tmp_path / moved
        for place, own in enumerate(pixels):
            folder = root / ("dog" if place >= 30 or f"{place:03}" == moved else "cat")
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(own).save(folder / f"{place:03}.png")
        data: Any = {"name": "given", "path": str(root), "evaluate_on": "holdout" if moved.endswith("7") else "test"}
        config = RunConfig.model_validate({"data": data, "clients": {"count": 4}, "model": {"name": "linear"}})
        federation, _ = build(config, load_dataset(config, None), torch.device("cpu"))
        parts = [federation.task.data.tensor[torch.from_numpy(own)] for own in federation.samples]
        return [{image.numpy().tobytes() for image in part} for part in (*parts, federation.evaluation.samples.tensor)]

    for one, other in (("none", "005"), ("nobody7", "017")):
        before, after = divided(one), divided(other)
        assert before == after
        assert all(before)
    with pytest.raises(ConfigError, match=r"data\.partition and data\.private_label cannot be used here, because each file"):
        api.run(data=tmp_path / "none", settings={**FEW, "data.partition": "quantity"}, progress=False, baseline=False)
    with pytest.raises(ConfigError, match=r"some client gets none: set clients\.count to \d+ ") as refused:
        api.run(data=tmp_path / "none", settings={**FEW, "clients.count": 45}, progress=False, baseline=False)
    fewer = int(str(refused.value).split("clients.count=")[1].rstrip(")"))
    assert 1 < fewer < 45
    api.run(data=tmp_path / "none", settings={**FEW, "clients.count": fewer}, progress=False, baseline=False)


def test_a_run_on_files_is_not_gone_on_with_once_they_are_called_otherwise(tmp_path: Path) -> None:
    """They would be other clients'."""
    for place, own in enumerate(np.random.default_rng(0).integers(0, 256, (60, 4, 4, 3), dtype=np.uint8)):
        folder = tmp_path / "scans" / ("test" if place < 10 else "train") / ("cat", "dog")[place % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(own).save(folder / f"{place:02}.png")
    settings = {"model.name": "linear", "training.rounds": 1, "clients.count": 2, "privacy.target_epsilon": "off"}
    api.run(data=tmp_path / "scans", settings=settings, folder=tmp_path / "run", baseline=False, progress=False)
    for file in sorted((tmp_path / "scans").rglob("*.png")):
        file.rename(file.with_name(f"a{file.name}"))
    with pytest.raises(ConfigError, match="was begun on"):
        api.run(folder=tmp_path / "run", resume=True, more_rounds=1, progress=False)


def test_a_folder_of_images_that_another_library_sorted_is_not_taken() -> None:
    pairs = Pairs([(torch.zeros(1, 4, 4), 0)] * 20)
    pairs.class_to_idx, pairs.samples = {"cat": 0}, ["cat/0.png"]  # type: ignore[attr-defined]
    part = torch.utils.data.Subset(pairs, list(range(10)))
    several: Any = torch.utils.data.ConcatDataset([Pairs([(torch.zeros(1, 4, 4), 0)]), part])
    for given in (pairs, part, several):
        with pytest.raises(ConfigError, match="give the path of its folder"):
            api.run(data=given, settings=FEW, progress=False, baseline=False)


class Pairs(torch.utils.data.Dataset[Any]):
    def __init__(self, pairs: list[Any]) -> None:
        self._pairs = pairs

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, place: int) -> Any:
        return self._pairs[place]


@pytest.mark.slow
@pytest.mark.thorough
def test_features_of_own_data_are_not_kept(cache: Path) -> None:
    pixels = torch.randint(0, 256, (60, 1, 28, 28), dtype=torch.uint8)
    data = Dataset("own", Samples(pixels[:40], torch.arange(40) % 10), Samples(pixels[40:], torch.arange(20) % 10), 10, (0.5,), (0.5,), "x")
    api.run(
        data=data,
        settings={"data.features": "scattering", "training.rounds": 1, "clients.count": 2, "model.name": "linear"},
        baseline=False,
        progress=False,
    )
    assert not (cache / "features").exists()


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("channel", ["direct", "secure-sum"])
def test_two_runs_of_one_seed_have_no_noise_in_common(channel: str, table: Path, tmp_path: Path) -> None:
    """Were it one draw at two scales, two published models would give the noise-free one: (s_b a - s_a b) / (s_b - s_a)."""
    rows = pd.read_csv(table)
    rows.to_csv(tmp_path / "elsewhere.csv", index=False)
    rows.assign(age=rows["age"].where(rows.index != 7, 99)).to_csv(tmp_path / "changed.csv", index=False)
    settings = {"privacy.target_epsilon": "off", "data.bounds": {"age": [0, 100], "marker": [0, 100]}, "training.rounds": 1}
    settings["shuffling.channel"] = channel

    def trained(data: Path, noise: float) -> torch.Tensor:
        own = {**settings, "mechanism.noise_multiplier": noise}
        module = api.run(data=data, target="outcome", settings=own, seed=5, baseline=False, progress=False).module()
        return torch.cat([value.flatten() for value in module.state_dict().values()])

    small, large, free = (trained(table, noise) for noise in (20.0, 40.0, 1e-3))
    cancelled = 2 * small - large
    assert float((cancelled - free).norm()) > float((small - free).norm())
    assert torch.equal(trained(tmp_path / "elsewhere.csv", 20.0), small)  # the same run
    changed = trained(tmp_path / "changed.csv", 20.0)
    assert float((changed - small).norm()) > 0.5 * float((small - free).norm())


@pytest.mark.parametrize("channel", ["direct", "secure-sum"])
def test_two_models_of_one_seed_have_no_noise_in_common(channel: str) -> None:
    """Handed over, they differ in nothing that a config tells; yet what is randomised differs, and so does its noise."""
    rows = patients(200, 2).loc[:, ["age", "outcome", "hospital"]]
    settings = {
        "privacy.target_epsilon": "off",
        "mechanism.noise_multiplier": 100.0,
        "data.bounds": {"age": [0, 100]},
        "data.scaling": "bounds",
        "training.rounds": 1,
        "training.server_learning_rate": 0.3,
        "training.server_weight_decay": 0.0,
        "mechanism.clip_norm": 1.0,
    }
    settings["shuffling.channel"] = channel

    def step(bias: float, noise: float) -> torch.Tensor:
        model = nn.Linear(1, 2)
        with torch.no_grad():
            model.weight.zero_()
            model.bias.copy_(torch.tensor([bias, -bias]))
        own = {**settings, "mechanism.noise_multiplier": noise}
        found = api.run(data=rows, target="outcome", client="hospital", model=model, settings=own, seed=5, baseline=False, progress=False)
        trained = found.module().state_dict()
        return torch.cat([(trained[name] - value.detach()).flatten() for name, value in model.named_parameters()])

    free = step(0.0, 1e-3) - step(2.0, 1e-3)
    apart = step(0.0, 100.0) - step(2.0, 100.0)
    assert float((apart - free).norm()) > float(free.norm())


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Which records took part, of every training from here on."""
    masks: list[torch.Tensor] = []
    train = RecordGradientTrainer.train

    def seen(trainer: RecordGradientTrainer, weights: torch.Tensor, schedule: BatchSchedule, round_number: int = 1) -> torch.Tensor:
        masks.append(schedule.mask.clone())
        return train(trainer, weights, schedule, round_number)

    monkeypatch.setattr(RecordGradientTrainer, "train", seen)
    return masks


@pytest.mark.parametrize("begin", [0.0, 1.0])
@pytest.mark.slow
@pytest.mark.thorough
def test_records_take_part_by_other_coins_in_runs_of_other_models(begin: float, drawn: list[torch.Tensor]) -> None:
    """Of one seed, on the same rows: what the same coins decide in two runs costs more than their guarantees add up to."""
    data = torch.randn(400, 6, generator=torch.Generator().manual_seed(0)), torch.arange(400) % 2
    own = {"clients.count": 1, "training.rounds": 1, "mechanism.sample_rate": 0.1, "mechanism.noise_multiplier": 1.0}

    def coins(model: nn.Module) -> torch.Tensor:
        drawn.clear()
        api.run(data=data, model=model, settings={**own, "privacy.target_epsilon": "off"}, seed=5, baseline=False, progress=False)
        return drawn[-1]

    def linear(weight: float) -> nn.Module:
        model = nn.Linear(6, 2)
        nn.init.constant_(model.weight, weight)
        nn.init.zeros_(model.bias)
        return model

    first = coins(linear(begin))
    assert torch.equal(first, coins(linear(begin)))
    assert not torch.equal(first, coins(linear(begin + 0.5)))
    assert not torch.equal(first, coins(nn.Sequential(linear(begin), nn.Identity())))


@pytest.mark.thorough
def test_records_take_part_by_other_coins_once_they_are_somebody_else_s(drawn: list[torch.Tensor]) -> None:
    """Equal masks of all rounds but for a division: what two ledgers add up to is of coins that know nothing of each other."""
    samples = Samples(torch.randn(320, 6, generator=torch.Generator().manual_seed(0)), torch.arange(320) % 2)
    settings = {"training.rounds": 1, "mechanism.sample_rate": 0.1, "mechanism.noise_multiplier": 1.0, "privacy.target_epsilon": "off"}

    def coins(owners: list[int]) -> torch.Tensor:
        drawn.clear()
        data = Dataset("own", samples, samples, 2, (), (), "x", clients=np.array(owners * 80))
        api.run(data=data, model="logistic-regression", settings=settings, seed=5, baseline=False, progress=False)
        return drawn[-1]

    assert torch.equal(coins([0, 0, 1, 1]), coins([0, 0, 1, 1]))
    assert not torch.equal(coins([0, 0, 1, 1]), coins([0, 1, 0, 1]))


def test_what_noise_there_was_is_not_kept_of_own_data(tmp_path: Path) -> None:
    """The length of one client's noise tells which of two data sets a model came of."""
    rows = patients(60, 2).loc[:, ["age", "outcome", "hospital"]]
    settings: dict[str, Any] = {"mechanism.name": "full-dp", "mechanism.epsilon": 5.0, "mechanism.perturbed": "update"}
    settings |= {"privacy.target_epsilon": "off", "data.bounds": {"age": [0, 100]}, "training.rounds": 1}
    found = api.run(
        data=rows, target="outcome", client="hospital", settings=settings, folder=tmp_path / "run", baseline=False, progress=False
    )
    assert found.history[-1].noise == {}
    assert "norm" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    result = RunFolder(tmp_path / "run").result()
    assert result is not None
    assert "noise" not in result


def test_noise_of_another_size_is_another_noise(tmp_path: Path) -> None:
    """A schedule's size follows from the number of rounds: where settings are told apart by nothing else, as of a run that is extended."""
    rows = patients(240, 2).loc[:, ["age", "ward", "outcome", "hospital"]]  # some hundred weights: with few, chance decides
    settings: dict[str, Any] = {"mechanism.name": "dpa", "mechanism.perturbed": "update", "mechanism.sensitivity": "update_clip"}
    settings |= {"mechanism.epsilon": 20.0, "mechanism.contraction": 0.5, "privacy.target_epsilon": "off", "data.bounds": {"age": [0, 100]}}
    settings |= {"training.server_learning_rate": 1.0, "training.server_momentum": 0.0}

    def stop(metrics: RoundMetrics) -> None:
        raise KeyboardInterrupt

    def first(rounds: int, extended: int) -> tuple[torch.Tensor, float]:
        own, folder = {**settings, "training.rounds": rounds, "training.extended": extended}, tmp_path / str(rounds)
        kept: dict[str, Any] = {"folder": folder, "on_round": stop, "progress": False, "baseline": False}
        with pytest.raises(KeyboardInterrupt):
            api.run(data=rows, target="outcome", client="hospital", model="linear", settings=own, seed=5, **kept)
        last = RunFolder(folder).checkpoint()
        assert last is not None
        return last.state.weights.double(), max(last.history[0].noise_std.values())

    (one, small), (two, large) = first(4, 0), first(8, 4)
    assert large > 1.1 * small
    # Were it one draw at two sizes, the difference of the models would be as long as that of the sizes, and no longer.
    shared = (large - small) * one.numel() ** 0.5
    assert float((two - one).norm()) > 1.5 * shared


@pytest.mark.slow
def test_an_extended_run_measures_its_columns_no_second_time(table: Path, tmp_path: Path) -> None:
    api.run(data=table, target="outcome", client="hospital", settings=FEW, folder=tmp_path / "run", progress=False, baseline=False)
    first = api.load_run(tmp_path / "run")
    longer = api.run(folder=tmp_path / "run", resume=True, more_rounds=2, progress=False, baseline=False)

    def columns(config: RunConfig) -> torch.Tensor:
        secret = RunFolder(tmp_path / "run").secret()
        federation, _ = build(config, load_dataset(config, None), torch.device("cpu"), secret=secret)
        return federation.task.data.tensor

    assert longer.config.training.rounds == first.config.training.rounds + 2
    assert torch.equal(columns(first.config), columns(longer.config))


@pytest.mark.slow
def test_two_simulations_of_one_seed_are_not_taken_for_independent(
    tiny_data: Path, config_file: Path, tmp_path: Path, ldpfl: CommandLine
) -> None:
    """Those on built-in data, whose noise is that of their seed alone; in Python and on the command line."""
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        api.run(config_file, folder=tmp_path / name, data_dir=tiny_data, baseline=False, progress=False, seed=seed)
    folders = [tmp_path / name for name in "abc"]
    assert any("with one seed" in said for said in api.account(*folders).warnings)
    assert not any("with one seed" in said for said in api.account(*folders[1:]).warnings)
    assert "with one seed" in " ".join(ldpfl("ledger", *folders[:2]).out.split())


@pytest.mark.slow
def test_a_seed_that_is_given_for_own_data_is_shown_to_nobody(table: Path, ldpfl: CommandLine, tmp_path: Path) -> None:
    """The noise follows from it; it stands in the run's folder alone, as a note says."""
    settings = ("--set", "training.rounds=1", "--set", "clients.count=4")
    run: list[str | Path] = ["run", "--data", table, "--target", "outcome", *settings, "--no-baseline", "--out", "run"]
    outcome = ldpfl(*run, "--seed", "7654321")
    assert outcome.code == 0, outcome.err
    assert "7654321" not in outcome.out + outcome.err
    assert "whoever knows it can take the noise off" in " ".join(outcome.out.split())
    assert "7654321" not in repr(api.load_run("run"))
    assert "7654321" in Path("run/config.toml").read_text()
    assert not Path("run/SECRET-seed").exists()
    assert Path("run").stat().st_mode & 0o777 == 0o700
    assert json.loads(ldpfl("show", "run", "--json").out)["seed"] is None
    assert "seed: another one" in ldpfl.refused(*run, "--resume", "--seed", "3")


@pytest.mark.slow
@pytest.mark.thorough
def test_seeds_that_come_with_a_sweep_are_none_of_own_data(table: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Everybody knows them, and a secure sum's noise could be taken off a published model."""
    drawn = iter(range(100, 200))
    monkeypatch.setattr("ldpfl.experiments.secret_seed.secrets.randbits", lambda bits: next(drawn))
    monkeypatch.setattr("ldpfl.api.sweeping.draw_sweep", lambda *_: None)
    own = {"data.path": str(table), "data.target": "outcome", "data.features": "none", "model.name": "linear", "training.rounds": 1}
    own |= {"clients.count": 4, "data.bounds": {"age": [0, 100], "marker": [0, 60]}, "privacy.target_epsilon": "off"}
    own |= {
        "mechanism.name": "dp-sgd",
        "mechanism.noise_multiplier": 5.0,
        "shuffling.channel": "secure-sum",
        "training.server_learning_rate": 1.0,
    }
    result = api.sweep("sound-mnist", settings=own, folder=tmp_path / "sweep", progress=False)
    assert len(result.config.each_seed) == 3
    runs = [RunFolder(path) for path in (tmp_path / "sweep" / "runs").iterdir()]
    assert all(run.config().secret_noise for run in runs)
    secrets = {run.secret() for run in runs}
    assert None not in secrets
    assert len(secrets) == len(runs) > 3
    assert (tmp_path / "sweep").stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_a_sweep_over_own_data_has_noise_that_follows_from_no_seed(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it goes on; unless its own file names seeds."""
    monkeypatch.setattr("ldpfl.api.sweeping.draw_sweep", lambda *_: None)
    rounds = ["training.rounds=1", f"data.path={str(table)!r}", "data.target='outcome'"]
    config = SweepConfig(name="mine", recipe="own", settings=rounds, axes={"clients.count": [2]})
    first = api.sweep(config, folder=tmp_path / "sweep", progress=False)
    (path,) = (tmp_path / "sweep" / "runs").iterdir()
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    assert "SECRET-seed" in files
    again = api.sweep(config, folder=tmp_path / "sweep", progress=False)
    assert again.to_dict() == first.to_dict()
    assert {file.name: file.read_bytes() for file in path.iterdir()} == files
    api.sweep(config.model_copy(update={"seeds": [3]}), folder=tmp_path / "said", progress=False)
    (path,) = (tmp_path / "said" / "runs").iterdir()
    assert (RunFolder(path).config().seed, RunFolder(path).secret()) == (3, None)


class Codebook(nn.Module):
    """Keeps a running mean where nothing is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(3, 2), nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen.mul_(0.9).add_(rows.mean(dim=0))
        return torch.as_tensor(self.layer(rows + self.seen))


class Elsewhere(nn.Module):
    """Keeps it where no module's state is."""

    seen = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        shifted = rows + Elsewhere.seen
        Elsewhere.seen = float(rows.mean())
        return torch.as_tensor(self.layer(shifted))


class Drawing(nn.Module):
    """Draws numbers, more of them for some samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.layer(nn.functional.dropout(rows, 0.5)))


@pytest.mark.thorough_for("dp-sgd-Codebook-changed seen while it ran", "dp-sgd-Drawing-after it saw others")
@pytest.mark.parametrize(
    ("module", "said"),
    [(Codebook, "changed seen while it ran"), (Elsewhere, r"changed Elsewhere\.seen while it ran"), (Drawing, "after it saw others")],
)
@pytest.mark.parametrize("mechanism", ["dp-sgd", "duchi"])
def test_a_module_that_is_no_function_of_one_sample_is_refused(module: type[nn.Module], said: str, mechanism: str) -> None:
    pair = (torch.randn(50, 3), torch.arange(50) % 2)
    other = {
        "mechanism.name": mechanism,
        "privacy.target_epsilon": "off",
        "mechanism.perturbed": "gradient" if mechanism == "dp-sgd" else "update",
    }
    with pytest.raises(PrivacyError, match=said):
        api.run(data=pair, model=module(), settings={**FEW, **other, "clients.count": 4}, progress=False)


@pytest.mark.slow
def test_the_noise_of_own_data_follows_from_a_secret_that_is_drawn_for_each_run(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ldpfl.api.configuring.secrets.randbits", random.SystemRandom().getrandbits)
    usual: dict[str, Any] = {"data": table, "target": "outcome", "rounds": 1, "baseline": False, "progress": False}
    first, second = (api.run(**usual) for _ in range(2))
    again = api.run(first.config, data=table, baseline=False, progress=False)  # of the same seed, and another secret
    models = [next(iter(result.module().state_dict().values())) for result in (first, second, again)]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(models, 2))
    told = [api.run(**usual, seed=3).module().state_dict() for _ in range(2)]
    assert all(torch.equal(told[0][name], told[1][name]) for name in told[0])
    assert (api.configure("quickstart").seed, api.configure("quickstart").secret_noise) == (0, False)
    with pytest.raises(ConfigError, match=r"secret_noise is only for your own data, and .* is built in"):
        api.run("quickstart", settings={"secret_noise": True}, progress=False)


def test_a_delta_that_lets_a_record_be_published_is_told_of(table: Path) -> None:
    usual: dict[str, Any] = {"data": table, "target": "outcome", "rounds": 1, "baseline": False, "progress": False}
    assert any("below 1/400" in note for note in api.run(**usual, delta=0.01).to_dict()["caveats"])
    assert not any("below 1/" in note for note in api.run(**usual).to_dict()["caveats"])


@pytest.mark.slow
@pytest.mark.thorough
def test_what_clamping_costs_is_told_from_what_noise_costs(table: Path, ldpfl: CommandLine, tmp_path: Path) -> None:
    """A layer of ones around which nobody put a range."""
    usual = {"mechanism.name": "duchi", "privacy.target_epsilon": "off", "mechanism.epsilon": 8.0, "ranges.radius": 0.001}
    usual["shuffling.channel"] = "direct"
    bounds = {"data.bounds": {"age": [20, 100], "marker": [0, 60]}, "mechanism.perturbed": "weights", "seed": 1, "training.rounds": 2}
    settings = [f"{key}={toml_value(value)}" for key, value in {**usual, **bounds}.items()]
    changes = [part for change in settings for part in ("--set", change)]
    outcome = ldpfl("run", "--data", table, "--target", "outcome", "--client", "hospital", *changes, "--out", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["clamped_score"] is not None
    for said in ("with clamping -", "with noise ", "clamped, without noise"):
        assert said in outcome.out
    wide = api.run(data=table, target="outcome", client="hospital", settings=[*settings, "ranges.radius=5.0"], progress=False)
    assert wide.to_dict()["clamped_score"] is None


def test_tensors_that_are_measured_on_are_not_trained_on() -> None:
    given = torch.arange(50.0).reshape(50, 1), torch.arange(50) % 2
    task = load_user_data(DataConfig(name="given"), "class", given)
    train, test = (torch.as_tensor(part.inputs).flatten().tolist() for part in (task.train, task.test))
    assert (len(train), len(test)) == (40, 10)
    assert sorted(train + test) == given[0][:, 0].tolist()


@pytest.mark.parametrize("task", ["ordinal", "survival"])
def test_ordered_classes_and_times_are_read_from_tables(task: str) -> None:
    with pytest.raises(ConfigError, match=r"need a table: give a data frame or a file, and data.target"):
        api.run(data=(np.zeros((20, 2)), np.zeros(20)), task=task, count=2, target_epsilon=4.0, progress=False)


@pytest.mark.parametrize(("task", "target"), [("classification", "ward"), ("regression", "cost")])
def test_thousands_separators_are_refused_in_an_input_and_in_a_target(task: str, target: str) -> None:
    frame = pd.DataFrame({"ward": ["a", "b"] * 50, "age": range(100), "cost": ["3,491.23", "423.88", "1,000.00", "2,000"] * 25})
    with pytest.raises(DataError, match=r"'cost' holds numbers with thousands separators.*write 1234\.56"):
        api.run(data=frame, target=target, task=task, baseline=False, progress=False)


@pytest.mark.thorough
@pytest.mark.parametrize(("classes", "notes"), [(["yes", "Yes", "no"], 1), (["yes", "no", "never"], 0)])
def test_classes_that_differ_only_in_case_are_named(classes: list[str], notes: int) -> None:
    frame = pd.DataFrame({"age": range(120), "well": classes * 40})
    found = api.run(data=frame, target="well", target_epsilon=8.0, baseline=False, progress=False, settings={"clients.count": 4})
    said = [note for note in found.to_dict()["caveats"] if "differ only in upper and lower case" in note]
    assert len(said) == notes
    assert all(note.startswith("Yes and yes are different classes of 'well'") for note in said)


def test_counts_below_0_are_refused() -> None:
    with pytest.raises(DataError, match="counts must be 0 or more"):
        api.run(data=(np.zeros((20, 2)), np.full(20, -1.0)), task="poisson", count=2, target_epsilon=4.0, progress=False)


@pytest.mark.parametrize(
    ("task", "target", "said"),
    [
        ("regression", "outcome", "the target 'outcome' holds words, and this task expects a number in each row: to predict words, set"),
        ("poisson", "outcome", "holds words, and this task expects a number"),
        ("multilabel", ["outcome", "ward"], "the target 'outcome' holds words, and this task expects 0 or 1"),
        ("survival", ["days", "outcome"], "the target 'outcome' holds words, and this task expects 0 or 1"),
        ("multilabel", "age,marker", """for several columns give a list, --set 'data.target=["age", "marker"]'"""),
        (
            "classification",
            "days,outcome",
            """--set 'data.target=["days", "outcome"]'; for several labels set task.name to 'multilabel' (--task multilabel), and for a """
            "time and an event to 'survival' (--task survival)",
        ),
    ],
)
def test_a_target_of_words_where_numbers_are_told_is_one_clear_line(task: str, target: Any, said: str) -> None:
    with pytest.raises(DataError) as refused:
        api.run(data=patients(), target=target, task=task, baseline=False, progress=False)
    assert said in str(refused.value)
