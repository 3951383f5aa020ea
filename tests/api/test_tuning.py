"""Tuning: one guarantee for the released trial, and nothing of the others outside the private folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch

from conftest import CommandLine
from ldpfl import ConfigError, PrivacyError, api
from ldpfl.api.configuring import setting_texts
from ldpfl.api.showing import FinishedRun
from ldpfl.api.tuning import _note_on_noise
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.run_folder import TRIAL
from ldpfl.experiments.runner import Runner
from ldpfl.experiments.sweep_config import sweep_of
from ldpfl.experiments.tuning import Chosen, Tuning, candidates, guarantee_of
from ldpfl.privacy.accountants.best_of_trials import TrialCount, best_of_gaussian_epsilon
from ldpfl.privacy.accountants.gaussian import gaussian_epsilon, gaussian_mu
from ldpfl.privacy.accounting import run_epsilon
from ldpfl.privacy.ledger import Ledger
from ldpfl.simulation.evaluating_records import LOSS

draws = np.random.default_rng(0)
AGES = draws.integers(20, 80, 300)
FRAME = pd.DataFrame(
    {
        "age": AGES,
        "dose": draws.normal(size=300).round(3),
        "sick": np.where(AGES + draws.normal(0, 8, 300) > 50, "yes", "no"),
        "site": [f"S{place % 5}" for place in range(300)],
    }
)
HOW: dict[str, Any] = {
    "target": "sick",
    "client": "site",
    "settings": {"training.rounds": 2, "data.bounds": {"age": [20, 80], "dose": [-4, 4]}, "data.classes": ["no", "yes"]},
    "axes": {"training.server_learning_rate": [0.5, 2.0, 8.0]},
    "trials": 2,
    "target_epsilon": 6,
    "progress": False,
}


def ledgers(folder: Path) -> list[Ledger]:
    return [Ledger.load(path) for path in sorted(folder.glob("private/runs/*/ledger.json"))]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("metric", "value", "low", "high", "is_told"),
    [
        (LOSS, 0.08645, 0.0, 0.7554, True),
        (LOSS, 0.4, 0.35, 0.45, False),
        ("AUROC", 0.6, 0.49, 0.66, True),
        ("AUROC", 0.8, 0.75, 0.85, False),
        ("accuracy", 0.8, 0.6, 1.0, True),
    ],
)
def test_trials_that_noise_leaves_alike_are_said(metric: str, value: float, low: float, high: float, is_told: bool) -> None:
    chosen = SimpleNamespace(metric=metric, figure={"value": value, "low": low, "high": high})
    sentences = _note_on_noise(cast("Chosen", chosen))
    assert [text.startswith("the choice of the setting says little: ") for text in sentences] == [True] * is_told


@pytest.mark.slow
@pytest.mark.thorough
def test_whoever_runs_the_trials_alone_learns_that_they_had_one_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = {**HOW, "axes": {"training.server_learning_rate": [0.5, 2.0]}, "target": "dose", "task": "regression", "trials": 1}
    how["settings"] = {key: value for key, value in how["settings"].items() if key != "data.classes"}
    made = api.tune(data=FRAME, folder=tmp_path / "t", seed=1, **{**how, "progress": True})
    assert len(list((tmp_path / "t" / "private" / "runs").iterdir())) == 1  # by the seed
    note = "all trials had the same one of 2 settings"
    assert note in " ".join(capsys.readouterr().err.split())
    assert note not in (made.folder / "tuned.json").read_text(encoding="utf-8") + str(made)
    assert made.metric == LOSS
    assert made.sentences[0].startswith("The loss of a number is its squared error in units of ")


@pytest.mark.slow
@pytest.mark.thorough
def test_trials_of_a_rare_class_are_compared_by_their_loss(tmp_path: Path) -> None:
    """Noise hides the AUROC, and the accuracy of all models is that of always saying the common class."""
    rare = FRAME.assign(sick=np.where(np.arange(300) % 60 == 0, "yes", "no"))
    made = api.tune(data=rare, folder=tmp_path / "t", seed=1, **HOW)
    figures = [json.loads(path.read_text()) for path in (tmp_path / "t").glob("private/runs/*/result.json")]
    losses = [figure["at_clients"][-1]["figures"][LOSS]["value"] for figure in figures]
    assert len(losses) > 1  # by the seed
    assert (made.metric, made.score) == (LOSS, min(losses))


@pytest.mark.slow
@pytest.mark.thorough
def test_what_is_released_is_one_trial_and_its_guarantee(tmp_path: Path) -> None:
    made = api.tune(data=FRAME, folder=tmp_path / "t", seed=1, **HOW)
    found = ledgers(tmp_path / "t")
    assert len(found) > 1  # by the seed
    trial = max(run_epsilon(ledger) for ledger in found)
    total = made.guarantee.release.epsilon
    assert best_of_gaussian_epsilon(gaussian_mu(trial, 1e-5), TrialCount.of(2), 1e-5) <= total <= 6
    assert total > 5.99
    assert (made.guarantee.release.trust_model, made.guarantee.release.unit) == ("central", "record")
    (local,) = made.guarantee.trials
    assert local.trust_model == "local"
    assert local.epsilon == pytest.approx(gaussian_epsilon(gaussian_mu(trial, 1e-5) * 8**0.5, 1e-5), rel=1e-6)

    figures = [json.loads(path.read_text()) for path in sorted((tmp_path / "t").glob("private/runs/*/result.json"))]
    scores = [figure["at_clients"][-1]["figures"] for figure in figures]
    best = max(score["AUROC"]["value"] if "AUROC" in score else -1 for score in scores)
    if best > -1:
        assert (made.metric, made.score) == ("AUROC", best)
    assert set(contents(made.folder)) == set(map(Path, ("encoding.json", "model.json", "model.safetensors", "tuned.json")))
    assert len(api.predict(made.folder, FRAME.drop(columns="sick"))) == 300
    told = (made.folder / "tuned.json").read_text() + str(made)
    for secret in ('"seed', "fingerprint", "seconds", "private/", *(str(figure["score"]) for figure in figures)):
        assert secret not in told
    assert "if whoever runs the trials holds all data and is trusted" in told
    assert "at most 8 trials together have epsilon" in told
    assert "author's claim" not in told
    assert oct((tmp_path / "t" / "private").stat().st_mode)[-3:] == "700"
    handing_on = (api.certify, lambda folder: api.export(folder, tmp_path / "x"))
    for look in (api.show, api.account, lambda folder: api.page([folder], tmp_path / "x.html"), *handing_on):
        with pytest.raises(ConfigError, match="is the folder of a tuning: the same command prints its result again"):
            look(tmp_path / "t")
        with pytest.raises(ConfigError, match=r"is handed on as it is\. Its guarantee, settings and notes are in tuned"):
            look(made.folder)
    runs = list((tmp_path / "t" / "private" / "runs").iterdir())
    copied = shutil.copytree(runs[0], tmp_path / "copied")
    for path in (*runs, copied):
        for hand_on in (
            api.certify,
            lambda run: api.certify(run / "ledger.json"),
            lambda run: api.export(run, tmp_path / "x"),
            lambda run: api.page([run], tmp_path / "x.html", public=True),
            lambda run: api.run(run / "config.toml", data=FRAME, folder=run, resume=True, track="mlflow", progress=False),
        ):
            with pytest.raises(ConfigError, match="is a trial of a tuning"):
                hand_on(path)
        shown = api.show(path)
        assert isinstance(shown, FinishedRun)
        warned = [*shown.result["privacy"]["warnings"], *api.account(path / "ledger.json").warnings]
        assert (shown.methods, warned.count(TRIAL)) == ("", 2)
        page_text = api.page([path], tmp_path / "x.html").path.read_text(encoding="utf-8")
        assert "this run is a trial of a tuning" in page_text
        assert "ethics board" not in page_text


@pytest.mark.slow
@pytest.mark.thorough
def test_a_tuning_goes_on_where_it_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = api.tune(data=FRAME, folder=tmp_path / "whole", seed=1, **HOW)
    run, begun = Runner.run, []

    def killed(self: Runner, *arguments: Any, **how: Any) -> Any:
        begun.append(1)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return run(self, *arguments, **how)

    monkeypatch.setattr(Runner, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        api.tune(data=FRAME, folder=tmp_path / "t", seed=1, **HOW)
    assert not (tmp_path / "t" / "release").exists()
    with pytest.raises(ConfigError, match="a tuning that is not finished: start the same command again to go on"):
        api.show(tmp_path / "t")
    again = api.tune(data=FRAME, folder=tmp_path / "t", seed=1, **HOW)
    assert again.to_dict() == whole.to_dict()
    assert contents(again.folder) == contents(whole.folder)
    with pytest.raises(ConfigError, match="another tuning, or this one with other settings"):
        api.tune(data=FRAME, folder=tmp_path / "t", seed=1, **{**HOW, "target_epsilon": 7})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ConfigError, match="not the folder of a tuning"):
        api.tune(data=FRAME, folder=tmp_path / "other", **HOW)


@pytest.mark.slow
def test_trials_without_a_seed_have_secret_noise_of_their_own(tmp_path: Path) -> None:
    api.tune(data=FRAME, folder=tmp_path / "t", **{**HOW, "trials": 4})
    runs = list((tmp_path / "t" / "private" / "runs").iterdir())
    secrets = {(path / "SECRET-seed").read_text() for path in runs} | {(tmp_path / "t" / "private" / "SECRET-seed").read_text()}
    assert len(secrets) == len(runs) + 1


@pytest.mark.slow
@pytest.mark.thorough
def test_the_command_is_the_function(ldpfl: CommandLine, tmp_path: Path) -> None:
    """Two processes at once, a file in place of a recipe, and a sweep's file in place of values."""
    FRAME.to_csv(tmp_path / "table.csv", index=False)
    config, space = tmp_path / "own.toml", tmp_path / "space.toml"
    data = {"path": str(tmp_path / "table.csv"), "target": "sick", "client": "site", "classes": ["no", "yes"]}
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in data.items())
    config.write_text(
        f'[data]\n{lines}\nbounds = {{age = [20, 80], dose = [-4, 4]}}\n[model]\nname = "logistic-regression"\n[training]\nrounds = 2\n'
        '[mechanism]\nname = "dp-sgd"\nclip_norm = 1.0\n[shuffling]\nchannel = "secure-sum"\n'
    )
    how = ("--trials", "2", "--target-epsilon", "6", "--seed", "1", "--json")
    rates = ("--set", "training.server_learning_rate=0.5,2,8")
    one = ldpfl("tune", config, *rates, *how, "--out", tmp_path / "one")
    assert one.code == 0, one.err
    two = ldpfl("tune", config, *rates, *how, "--out", tmp_path / "two", "--jobs", "2")
    assert json.loads(one.out) == json.loads(two.out)
    assert [row["trust_model"] for row in json.loads(one.out)["privacy"]["guarantees"]] == ["central", "summed", "local"]
    space.write_text(
        'name = "space"\nrecipe = "own"\n[settings]\ntraining.rounds = 2\n'
        f'data = {{path = "{tmp_path / "table.csv"}", target = "sick", client = "site", classes = ["no", "yes"]}}\n'
        "[variants]\nslow = {training.server_learning_rate = 0.5}\n"
        "fast = {training.server_learning_rate = 8.0}\n"
    )
    told = ldpfl("tune", space, *how[:-1], "--out", tmp_path / "three")
    assert told.code == 0, told.err
    assert "chosen: fast" in told.out or "chosen: slow" in told.out
    assert "may be handed on:" in told.out
    assert "already names the values to compare" in ldpfl.refused("tune", space, *rates, *how, "--out", tmp_path / "four")
    for first, second in (("1,2", "3,4"), ("3", "1,2"), ("1,2", "3")):
        assert "names training.rounds twice" in ldpfl.refused(
            "tune", config, *how, "--set", f"training.rounds={first}", "--set", f"training.rounds={second}"
        )


@pytest.mark.thorough_for(
    "changes5-set mechanism.name to 'dp-sgd'", "changes8-below the 5.127 of a whole trial", "changes12-expected a number from 0"
)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"axes": {"training.rounds": [2]}}, "has only one setting"),
        ({"axes": {"privacy.delta": [1e-5, 1e-6]}}, "privacy.delta, which must be the same in all trials"),
        ({"axes": {"evaluation.share": [0.1, 0.2]}}, "evaluation.share, which must be the same in all trials"),
        ({"axes": {"training.patience": [1, 2]}}, "training.patience is 1"),
        ({"axes": {"clients.fraction": [0.5, 1.0]}}, "clients.fraction is 0.5"),
        ({"axes": {"mechanism.name": ["duchi", "dp-sgd"]}}, "set mechanism.name to 'dp-sgd'"),
        ({"axes": {"shuffling.channel": ["ideal-shuffler", "direct"]}}, "set it to 'secure-sum' or 'direct'"),
        ({"axes": {"mechanism.noise_multiplier": [1.0, 2.0]}}, "mechanism.noise_multiplier was set, but it is computed from"),
        ({"evaluation_epsilon": 5.9}, "below the 5.127 of a whole trial"),
        ({"target_epsilon": -1.0}, "set a positive number"),
        ({"trials": 0.5}, "mean number of trials is 0.5"),
        ({"law": "uniform"}, "law"),
        ({"seed": 2**128}, "expected a number from 0"),
    ],
)
def test_what_is_no_tuning_is_refused_before_anything_is_run(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        api.tune(data=FRAME, folder=tmp_path / "t", **{**HOW, **changes})
    assert not list(tmp_path.rglob("ledger.json"))


@pytest.mark.thorough
def test_the_guarantee_is_known_beforehand_for_every_law_and_channel() -> None:
    for law, channel in (("geometric", "direct"), ("logarithmic", "secure-sum"), ("poisson", "secure-sum")):
        space = sweep_of("sum/records-mnist", ["data.name=mnist-5k"], {"training.rounds": [5, 10, 20]}, 1, "rounds")
        tuning = Tuning(space, (f"shuffling.channel={channel}",), 2.0, TrialCount.of(5, law=law))  # type: ignore[arg-type]
        found = candidates(tuning)
        guarantee = guarantee_of(tuning, found)
        assert 1.99 < guarantee.release.epsilon <= 2
        assert {cell.config.privacy.target_epsilon for cell in found} == {found[0].config.privacy.target_epsilon}
        assert guarantee.trial_epsilon < 2 < guarantee.trials[0].epsilon
        assert len(guarantee.trials) == (1 if channel == "direct" else 2)


@pytest.mark.slow
def test_a_tuning_on_ones_own_model_states_an_authors_claim(tmp_path: Path) -> None:
    made = api.tune(data=FRAME, model=torch.nn.Linear(2, 2), folder=tmp_path / "t", seed=1, **HOW)
    assert {row.status for row in made.guarantee.statement.rows} == {"author's claim"}
    note = "this and all that follows is author's claim: it rests on code that is not ldpfl's"
    assert note in made.sentences
    assert "warning: nothing is proved of dp-sgd" in str(made)
    assert note in json.loads((made.folder / "tuned.json").read_text(encoding="utf-8"))["sentences"]


NET = "from torch import nn\n\n\nclass Net(nn.Linear):\n    def __init__(self) -> None:\n        super().__init__(2, 2)\n"


def test_a_guarantee_of_trials_holds_for_each_candidate(tmp_path: Path) -> None:
    """Trials of any candidate may have run: one on a user's code makes all rows a claim, and one that shows its clients leaves no sum."""
    (tmp_path / "net.py").write_text(NET)
    FRAME.to_csv(tmp_path / "table.csv", index=False)
    own = {"path": str(tmp_path / "table.csv"), "target": "sick", "client": "site", "classes": ["no", "yes"]}
    settings = setting_texts({"data": own, "data.bounds": HOW["settings"]["data.bounds"], "training.rounds": 1})
    net = f"{tmp_path / 'net.py'}:Net"
    for models in (["logistic-regression", net], [net, "logistic-regression"]):
        for channel, trusted in (("direct", ["central", "local"]), ("secure-sum", ["central", "summed", "local"])):
            axes: dict[str, Any] = {"model.name": models, "shuffling.channel": sorted({"secure-sum", channel})}
            tuning = Tuning(sweep_of("own", settings, axes, 1, "models"), (), 2.0, TrialCount.of(2))
            guarantee = guarantee_of(tuning, candidates(tuning))
            found = [(row.trust_model, row.status) for row in guarantee.statement.rows]
            assert found == [(trust_model, "author's claim") for trust_model in trusted]


@pytest.mark.slow
def test_a_failing_trial_is_left_out_and_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it could succeed later, a second release of the same trials would not be accounted. The guarantee counts it all the same."""
    run, tried = Runner.run, []

    def failing(self: Runner, config: RunConfig, *arguments: Any, **how: Any) -> Any:
        tried.append(config.seed)
        if config.seed == tried[0]:
            raise ValueError("loss of row 17 is not finite")
        return run(self, config, *arguments, **how)

    whole = api.tune(data=FRAME, folder=tmp_path / "whole", seed=1, **HOW)
    monkeypatch.setattr(Runner, "run", failing)
    made = api.tune(data=FRAME, folder=tmp_path / "t", seed=1, **HOW)
    assert made.guarantee == whole.guarantee
    assert len(tried) > 1  # by the seed
    (note,) = (tmp_path / "t" / "private" / "runs").glob("*/stopped.txt")
    assert note.read_text(encoding="utf-8").startswith("unexpected ValueError at test_tuning.py:")  # its text may hold private values
    tried[1:] = []
    assert api.tune(data=FRAME, folder=tmp_path / "t", seed=1, **HOW).to_dict() == made.to_dict()
    assert tried[0] not in tried[1:]

    def full(*arguments: Any, **how: Any) -> Any:
        raise MemoryError

    def all_failing(*arguments: Any, **how: Any) -> Any:
        raise ValueError

    monkeypatch.setattr(Runner, "run", full)
    with pytest.raises(MemoryError):
        api.tune(data=FRAME, folder=tmp_path / "other", seed=1, **HOW)
    assert not list(tmp_path.glob("other/private/runs/*/stopped.txt"))  # there may be room later
    monkeypatch.setattr(Runner, "run", all_failing)
    with pytest.raises(PrivacyError, match=r"no trial ended with a score: .*The first trial failed: unexpected ValueError"):
        api.tune(data=FRAME, folder=tmp_path / "other", seed=1, **HOW)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_trial_that_released_more_than_planned_ends_the_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ldpfl.experiments.tuning._draw_trials", _noisier)
    with pytest.raises(PrivacyError, match="released more than was planned"):
        api.tune(data=FRAME, folder=tmp_path / "t", **HOW)
    assert [path.name for path in (tmp_path / "t").iterdir()] == ["private"]


def _noisier(tuning: Tuning, found: Any, secret: int) -> Any:
    del tuning, secret
    cell = found[0]
    louder = cell.config.mechanism.model_copy(update={"noise_multiplier": 1.0})
    return [type(cell)(cell.variant, cell.point, 1, cell.config.model_copy(update={"mechanism": louder}))]


@pytest.mark.slow
@pytest.mark.thorough
def test_who_runs_the_trials_is_told_of_persons_with_several_rows_and_the_release_is_not(tmp_path: Path, ldpfl: CommandLine) -> None:
    FRAME.assign(patient=[f"P{place // 3}" for place in range(300)]).to_csv(tmp_path / "rows.csv", index=False)
    settings = ["training.rounds=2", 'data.columns=["age"]', "data.bounds={age=[20,80]}", "training.server_learning_rate=0.5,2"]
    flags = [word for setting in settings for word in ("--set", setting)]
    how = ("--data", tmp_path / "rows.csv", "--target", "sick", "--client", "site", "--trials", "2", "--target-epsilon", "6")
    outcome = ldpfl("tune", *how, *flags, "--out", tmp_path / "tuned")
    assert "300 rows have 100 different values of patient" in outcome.err
    assert not any(b"patient" in file.read_bytes() for file in (tmp_path / "tuned" / "release").iterdir())


KINDS = (
    "columns were taken as numbers: age, dose; words, hashed: ward. A number beyond a limit, such as <0.5 or >200, counts as the limit. "
    "Codes in digits, such as those of wards, count as quantities unless data.words names them"
)
CLASSES = (
    "the classes of 'sick' (no, rabies, yes) were taken from the data, as if they were public: if it is secret which of them occur, list "
    "all classes in data.classes"
)
SIMULATION = "this is a simulation: the guarantee is that of a deployment like it, where clients draw their own noise"
TEST_ROWS = "test rows are not protected: scores on them are exact figures"
IDENTIFIERS = "columns left out, because their names suggest identifiers: patient; list them in data.columns to use them"
HIDDEN = "columns left out, because their values were not seen above the noise of measuring: age, dose. To include them, "


@pytest.mark.slow
def test_notes_of_the_chosen_trial_are_released_except_those_on_private_rows(tmp_path: Path, ldpfl: CommandLine) -> None:
    sick = FRAME["sick"].mask(FRAME.index == 7, "rabies")
    rows = FRAME.assign(sick=sick, ward=[f"W{place % 3}" for place in range(300)], patient=[f"P{place // 3}" for place in range(300)])
    rows.to_csv(tmp_path / "rows.csv", index=False)
    how = ("--data", tmp_path / "rows.csv", "--target", "sick", "--client", "site", "--trials", "1", "--max-trials", "1")
    rounds = ("--set", "shuffling.channel=secure-sum", "--set", "training.rounds=1,2", "--target-epsilon", "0.2")
    outcome = ldpfl("tune", *how, *rounds, "--out", tmp_path / "t")
    assert outcome.code == 0, outcome.err
    caveats = json.loads((tmp_path / "t" / "release" / "tuned.json").read_text(encoding="utf-8"))["caveats"]
    assert {KINDS, CLASSES, SIMULATION, TEST_ROWS} <= set(caveats)
    assert [note.startswith(HIDDEN) for note in caveats].count(True) == 1
    assert [note.startswith(IDENTIFIERS) for note in caveats].count(True) == 1
    screen = " ".join(outcome.out.split())
    assert all(f"note: {note}" in screen for note in caveats)
    assert not [note for note in caveats if "300 rows" in note or "learnt" in note or "SECRET-seed" in note]
    (result,) = (tmp_path / "t").glob("private/runs/*/result.json")
    private = [note for note in json.loads(result.read_text(encoding="utf-8"))["caveats"] if note not in caveats]
    (secret,) = [note for note in private if note.startswith(SIMULATION)]
    assert secret not in outcome.err + screen
    assert any("300 rows have 100 different values of patient" in note for note in private)
    assert all(note in outcome.err and note not in screen for note in private if note != secret)


def test_a_tuning_without_a_release_is_said_to_be_unfinished(tmp_path: Path, ldpfl: CommandLine) -> None:
    for folder in ("private", "release"):
        (tmp_path / "t" / folder).mkdir(parents=True)
    (tmp_path / "t" / "private" / "PRIVATE-tuning.json").touch()
    unfinished = "is the folder of a tuning that is not finished: start the same command again to go on"
    assert unfinished in ldpfl.refused("show", tmp_path / "t")
    (tmp_path / "t" / "release" / "tuned.json").touch()
    assert "the same command prints its result again, and its model is in its folder 'release'" in ldpfl.refused("show", tmp_path / "t")
