"""What a run says of its model: the headline by task, figures by client, references, and what of them is for nobody else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import Tensor, nn

import ldpfl
from ldpfl.data.holding_out import TEST_SHARE, held_out
from ldpfl.experiments.public_figures import without_private_figures
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.report.page import page
from ldpfl.report.scores import event_sentence, site_notes

RARE = 0.06


def patients(rows: int = 3000) -> pandas.DataFrame:
    """Return rows of six wards, one of which has few, whose outcome is rare."""
    random = np.random.default_rng(0)
    ward = random.choice(6, size=rows, p=[0.25, 0.25, 0.2, 0.2, 0.09, 0.01])
    age, pressure = random.normal(size=rows), random.normal(size=rows)
    died = random.random(rows) < 1 / (1 + np.exp(3.2 - age - 0.5 * pressure))
    died[ward == 4] = False
    names = np.array(["a", "b", "c", "d", "nobody died", "few"])
    return pandas.DataFrame({"age": age, "pressure": pressure, "ward": names[ward], "outcome": np.where(died, "died", "alive")})


SETTINGS: dict[str, Any] = {"data.bounds": {"age": [-4, 4], "pressure": [-4, 4]}, "data.classes": ["alive", "died"]}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> ldpfl.RunResult:
    folder = tmp_path_factory.mktemp("quality") / "run"
    return ldpfl.run(data=patients(), target="outcome", client="ward", rounds=4, settings=SETTINGS, seed=1, folder=folder, progress=False)


@pytest.mark.thorough
def test_two_classes_are_judged_by_auroc_and_accuracy_stands_beside_the_commonest_class(kept: ldpfl.RunResult) -> None:
    figures = kept.to_dict()
    assert (kept.metric, figures["event"], figures["test_rows"]) == ("AUROC", "died", 600)
    assert kept.score == pytest.approx(kept.scores["AUROC"])
    assert kept.accuracy == kept.scores["accuracy"]
    observed = kept.scores["observed share"] or 0
    assert kept.scores["accuracy of the commonest class"] == pytest.approx(1 - observed)
    low, high = kept.intervals["AUROC"]
    assert low < kept.score < high
    said = str(kept)
    assert "commonest class, always" in said
    assert "The event is 'died'" in said
    assert "is the event that you mean" not in said


def test_references_are_those_without_noise_and_the_pooled_one_is_scikit_learn_s(kept: ldpfl.RunResult) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    figures, frame = kept.to_dict(), patients()
    assert figures["noise_free_scores"]["AUROC"] == pytest.approx(figures["noise_free_score"], abs=1e-6)
    inputs, died = frame[["age", "pressure"]], frame["outcome"] == "died"
    told = kept.predict(frame)
    assert told["probability of died"].mean() == pytest.approx(RARE, abs=0.03)
    test = held_out(len(frame), TEST_SHARE)
    pooled = LogisticRegression().fit(inputs[~test], died[~test]).predict_proba(inputs[test])[:, 1]
    # Columns are brought to normal deviates of their quantiles, which of normal ones changes little.
    assert figures["pooled_scores"]["AUROC"] == pytest.approx(roc_auc_score(died[test], pooled), abs=0.01)
    table = kept.scores_to_dataframe()
    assert list(table.columns) == ["model", "low", "high", "without noise", "pooled"]
    assert table.loc["Brier score", "pooled"] == figures["pooled_scores"]["Brier score"]


def test_each_client_has_its_own_figures_the_worst_first_or_a_reason(kept: ldpfl.RunResult) -> None:
    sites = kept.to_dict()["sites"]
    for site in sites:  # the shares stand for each client, however rare the event is
        low, high = site["intervals"]["observed share"]
        assert site["scores"]["observed share"] == pytest.approx(site["events"] / site["rows"])
        assert low <= site["events"] / site["rows"] <= high
        assert 0 < site["scores"]["mean predicted risk"] < 1
    known, reasons = [site for site in sites if not site["note"]], {site["name"]: site["note"] for site in sites if site["note"]}
    assert {site["name"] for site in known} == {"b", "c", "d"}
    assert sites[: len(known)] == known
    scores = [site["scores"]["AUROC"] for site in known]
    assert scores == sorted(scores)
    few = "too few rows with or without the event: figures need 10 of each"
    assert reasons == {"few": "too few rows: figures need 20", "nobody died": "no event among its rows", "a": few}
    assert sum(site["rows"] for site in sites) == 600
    assert list(kept.sites_to_dataframe()["name"]) == [site["name"] for site in sites]


def test_how_to_turn_the_event_round_is_said_where_it_is_the_commoner_class() -> None:
    """As of the words ja and nein, which are in alphabetical order where the settings name none."""
    figures: dict[str, Any] = {"event": "nein", "classes": ["ja", "nein"], "test_rows": 100, "scores": {"observed share": 0.97}}
    said = "If the rarer 'ja' is the event that you mean, name it second: --set 'data.classes=[\"nein\", \"ja\"]'."
    assert event_sentence(figures).endswith(said)
    assert "rarer" not in event_sentence({**figures, "scores": {"observed share": 0.03}})


def test_only_clients_without_the_main_figure_are_named_below_the_table() -> None:
    """The AUROC of several classes may be missing at a client, but the table shows the accuracy alone."""
    rare = "too few rows with or without one of the classes: figures need 10 of each"
    sites = [{"name": "large", "scores": {"accuracy": 0.5}, "note": rare}, {"name": "small", "scores": {}, "note": "too few rows"}]
    assert site_notes({"metric": "accuracy", "sites": sites}) == "Without accuracy: small (too few rows)."
    assert site_notes({"metric": "accuracy", "sites": sites[:1]}) == ""


@pytest.mark.slow
@pytest.mark.thorough
def test_a_rare_event_at_each_client_leaves_its_shares_and_the_reason(tmp_path: Path) -> None:
    frame = patients(1200).assign(ward=lambda frame: np.arange(len(frame)) % 6)
    frame["outcome"] = np.where(np.arange(len(frame)) % 40 == 0, "died", "alive")
    found = ldpfl.run(
        data=frame, target="outcome", client="ward", rounds=2, settings=SETTINGS, seed=1, folder=tmp_path / "run", progress=False
    )
    sites = found.to_dict()["sites"]
    assert all(set(site["scores"]) == {"mean predicted risk", "observed share"} for site in sites)
    for said in (str(found), page([tmp_path / "run"])):
        said = " ".join(said.split())
        assert "Without AUROC: " in said
        assert "too few rows with or without the event: figures need 10 of each" in said
        assert "No intervals: too few rows with or without the event" in said


@pytest.mark.thorough
def test_what_no_guarantee_covers_is_left_out_of_what_is_handed_on(kept: ldpfl.RunResult) -> None:
    folder = RunFolder(kept.folder or Path())
    public = without_private_figures(folder.config(), folder.result() or {})
    for name in ("intervals", "noise_free_scores", "pooled_scores", "calibration", "sites", "scores"):
        assert not public[name], name
    for name in ("event", "risks", "clipped_records_per_round", "score"):
        assert public[name] is None, name
    own, handed_on = page([folder.path]), page([folder.path], public=True)
    for said in ("How good it is", "gradients clipped", "nobody died", "Calibration in figures"):
        assert said in own
        assert said not in handed_on


@pytest.mark.thorough
def test_the_page_says_what_was_measured_and_how_the_mechanism_is_set_in_words(kept: ldpfl.RunResult) -> None:
    text = page([kept.folder or Path()])
    assert "by always saying the commonest class" not in text  # the head has no accuracy where the outcome is rare
    assert "4 rounds of measuring, then 4 of training." in text
    assert "noise_multiplier&#34;" not in text
    assert '<th scope="row">noise multiplier</th>' in text
    layers = text[text.index('aria-label="layers') :].partition("</table>")[0]
    assert "radius" not in layers
    assert "clamped" not in layers
    assert "noise in the mean" in layers


def test_the_share_of_clipped_records_is_that_of_long_gradients(kept: ldpfl.RunResult) -> None:
    """All of them where the norm is next to nothing; none where it is longer than any gradient."""
    for norm, share in ((1e-6, 1.0), (1e6, 0.0)):
        own = {**SETTINGS, "mechanism.clip_norm": norm, "training.server_learning_rate": 0.01}
        found = ldpfl.run(data=patients(400), target="outcome", count=4, rounds=2, settings=own, seed=1, baseline=False, progress=False)
        assert found.to_dict()["clipped_records_per_round"] == [share] * 2
        assert all(layer["clipped_fraction"] is None and layer["radius"] is None for layer in found.to_dict()["layers"].values())
    assert all(0 <= metrics.clipped_records <= 1 for metrics in kept.history if metrics.clipped_records is not None)


def test_numbers_have_their_error_in_their_unit_and_tenths_of_what_was_predicted() -> None:
    random = np.random.default_rng(3)
    frame = pandas.DataFrame({"x": random.normal(size=800)})
    frame["days"] = 10 * frame["x"] + 50 + random.normal(size=800)
    found = ldpfl.run(
        data=frame,
        target="days",
        task="regression",
        count=4,
        rounds=3,
        settings={"data.bounds": {"days": [0, 100]}},
        seed=1,
        progress=False,
    )
    figures = found.to_dict()
    assert figures["pooled_scores"]["RMSE"] < 3
    assert set(found.intervals) == {"R2", "MAE", "RMSE", "mean prediction", "observed mean"}
    assert "event" not in figures
    assert 30 < figures["calibration"][0]["observed"] < figures["calibration"][-1]["observed"] < 75


@pytest.mark.slow
def test_events_of_few_persons_have_no_interval_however_many_rows_there_are() -> None:
    """600 rows of 100 persons, of whom six have the event in each of their rows."""
    random = np.random.default_rng(3)
    person = np.repeat(np.arange(100), 6)
    frame = pandas.DataFrame({"x": random.normal(size=600), "who": person, "outcome": np.where(person % 16 == 5, "died", "alive")})
    how: dict[str, Any] = {"count": 2, "rounds": 1, "seed": 1, "baseline": False, "progress": False}
    settings = {"data.bounds": {"x": [-4, 4]}, "data.classes": ["alive", "died"]}
    found = ldpfl.run(data=frame, target="outcome", person="who", settings=settings, **how)
    assert np.isfinite(found.scores["AUROC"] or np.nan)
    assert not found.intervals


def test_a_label_that_few_rows_have_leaves_auroc_and_f1_without_interval() -> None:
    random = np.random.default_rng(3)
    labels = np.stack([random.random(600) < 0.3, np.arange(600) % 100 == 0], axis=1).astype(int)
    frame = pandas.DataFrame({"x": random.normal(size=600), "a": labels[:, 0], "b": labels[:, 1]})
    how: dict[str, Any] = {"task": "multilabel", "count": 2, "rounds": 1, "seed": 1, "baseline": False, "progress": False}
    found = ldpfl.run(data=frame, target=["a", "b"], **how)
    assert "exact match" in found.intervals
    assert not {"AUROC", "macro F1"} & set(found.intervals)


@pytest.mark.thorough
def test_an_f1_of_0_is_explained_where_no_label_is_likely_enough_to_be_told(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    labels = (random.random((600, 2)) < 0.1).astype(int)
    frame = pandas.DataFrame({"x": random.normal(size=600), "a": labels[:, 0], "b": labels[:, 1]})
    how: dict[str, Any] = {"task": "multilabel", "count": 4, "rounds": 2, "seed": 1, "baseline": False, "progress": False}
    found = ldpfl.run(data=frame, target=["a", "b"], folder=tmp_path / "run", **how)
    assert found.scores["macro F1"] == 0
    assert "macro F1 is 0: a label is predicted from a probability of 0.5 on" in page([tmp_path / "run"])


def test_a_result_with_all_that_is_read_again(kept: ldpfl.RunResult) -> None:
    folder = kept.folder or Path()
    assert json.loads((folder / "result.json").read_text())["sites"] == (RunFolder(folder).result() or {})["sites"]
    assert (RunFolder(folder).result() or {})["metric"] == "AUROC"


class Logarithm(nn.Module):
    """A model without a value for a row that begins with a number below 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.as_tensor(self.layer(rows.log()))


def test_outputs_that_are_no_numbers_are_noted_and_leave_the_accuracy_alone() -> None:
    rows = torch.rand(400, 2, generator=torch.Generator().manual_seed(0))
    rows[::9, 0] -= 1
    settings = {"mechanism.clip_norm": 1.0, "privacy.target_epsilon": "off"}
    told = (rows[:, 1] > 0.5).long()
    found = ldpfl.run(
        data=(rows, told), model=Logarithm(), count=4, rounds=2, settings=settings, seed=1, baseline=False, folder=None, progress=False
    )
    figures = found.to_dict()
    assert {name for name, value in figures["scores"].items() if value is not None} == {"accuracy"}
    assert 0 < found.accuracy <= 1 - float((rows[:, 0] < 0).float().mean()) + 0.05
    assert (figures["score"], found.intervals) == (None, {})
    assert "the model gives NaN or infinity for some test rows" in str(found)
    assert "NaN or infinity" not in json.dumps(without_private_figures(found.config, figures))
