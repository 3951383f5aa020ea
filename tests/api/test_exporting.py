"""What is handed on of a run: that others can predict with it, and that it tells nothing which the guarantee does not cover."""

from __future__ import annotations

import json
import re
import shutil
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from conftest import CommandLine
from ldpfl import ConfigError, DataError, api
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.privacy.accounting import account
from ldpfl.privacy.events import OURS, USERS_CODE
from ldpfl.privacy.ledger import Ledger
from ldpfl.report.page import page
from ldpfl.report.scores import format_score

pytestmark = pytest.mark.slow

FILES = {"README.md", "certificate.json", "encoding.json", "guarantee.json", "model.json", "model.safetensors"}
HOW: dict[str, Any] = {"target": "sick", "count": 4, "progress": False}
FEW: dict[str, Any] = {"training.rounds": 2, "data.bounds": {"age": [0, 100]}}


def table(folder: Path) -> Path:
    path = folder / "rows.csv"
    sick = ["no", "yes", "yes", "no", "yes", "no"] * 20
    pd.DataFrame({"age": [20 + place % 50 for place in range(120)], "sick": sick}).to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table(tmp_path_factory.mktemp("rows in a folder of mine"))


@pytest.fixture(scope="module")
def run(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "run"
    api.run(data=rows, **HOW, settings=FEW, folder=folder)
    return folder


def test_an_export_predicts_and_holds_no_figure_of_private_rows(run: Path, rows: Path, ldpfl: CommandLine) -> None:
    outcome = ldpfl("export", run, "given")
    assert outcome.code == 0, outcome.err
    texts = {path.name: path.read_bytes() for path in Path("given").iterdir()}
    assert set(texts) == FILES
    assert ldpfl("predict", "given", rows).out == ldpfl("predict", run, rows).out != ""
    result, secret = RunFolder(run).result(), RunFolder(run).secret()
    assert result is not None
    assert secret is not None
    assert result["noise_free_score"] is not None
    scores = [*result["score_per_round"], *result["noise_free_score_per_round"], *result["scores"].values()]
    scores += [*result["noise_free_scores"].values(), *result["pooled_scores"].values(), *result["clipped_records_per_round"]]
    private = {*(f"{score:.4g}" for score in scores if score not in (None, 0.0, 1.0)), *(f"{score:.2%}" for score in scores if score)}
    private = {text for text in private if len(text) > 4}  # shorter ones are other figures too
    for figure in private:  # as a whole: digits of longer numbers may be the same by chance
        whole = re.compile(rb"(?<![\d.])" + re.escape(figure.encode()) + rb"(?!\d)")
        assert not any(whole.search(text) for name, text in texts.items() if not name.endswith(".safetensors")), figure
    exact = {f"{score:.8g}" for score in scores if score not in (None, 0.0, 1.0)}
    for said in (
        *{text for text in exact if len(text) > 6},
        result["data_fingerprint"],
        f"{secret:x}",
        str(secret),
        str(rows.parent),
        rows.name.join("/ "),
        str(run),
    ):
        assert not any(said.encode() in text for name, text in texts.items() if not name.endswith(".safetensors")), said
    assert "rows.csv" not in texts["encoding.json"].decode()
    card = texts["README.md"].decode()
    assert card.startswith("---\nlibrary_name: ldpfl\npipeline_tag: tabular-classification\n")
    front, statement = yaml.safe_load(card.split("---\n")[1]), account(RunFolder(run).ledger(), 1e-5)
    assert "datasets" not in front
    assert statement.best is not None
    said_best = {"delta": 1e-5, "protected": "record", "trusted": "nobody", "status": "proved", "certificate": "certificate.json"}
    epsilon = front["differential_privacy"].pop("epsilon")
    assert front["differential_privacy"] == said_best
    assert statement.best.epsilon <= epsilon <= 1.01 * statement.best.epsilon
    for said in ("`sick`", "`age`", "**taken from the rows**", "How good the model is is not said", "ldpfl predict FOLDER rows.csv"):
        assert said in card, said
    assert all(f"`{name}`" in card or name in front["differential_privacy"].values() for name in FILES - {"README.md"})
    assert "\nTrained on rows that one machine held, in a simulation: " in card
    assert "- this is a simulation: the guarantee is that of a deployment like it, where clients draw their own noise\n" in card
    assert not any(b"SECRET" in text for text in texts.values())
    for advice in ("SECRET-seed", "hand the model on", "data.classes"):
        assert advice in " ".join(result["caveats"])
        assert advice not in card
    assert json.loads(texts["guarantee.json"])["verdict"] in card
    shown = " ".join(ldpfl("show", run).out.split())
    for said in ("The unit of protection is one record of one client", "Software: ldpfl maintainers"):
        assert said in shown, said
        assert said in card, said
        assert said in page([run], public=True), said
    assert ldpfl("verify", "given/certificate.json").code == 0
    assert ldpfl("verify", "given").out == ldpfl("verify", "given/certificate.json").out


def test_a_model_of_another_round_or_run_is_not_exported_with_this_guarantee(run: Path, ldpfl: CommandLine, tmp_path: Path) -> None:
    exchanged, more = tmp_path / "exchanged", tmp_path / "more"
    shutil.copytree(run, exchanged)
    shutil.copytree(run, more)
    ldpfl("run", "--resume", "--out", more, "--more-rounds", "1", "--no-report")
    shutil.copy(more / "model.safetensors", exchanged)
    assert "has other weights than the run's checkpoint" in ldpfl.refused("export", exchanged, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    ldpfl("export", more, tmp_path / "out")


def test_the_same_weights_at_other_places_are_another_model(run: Path, ldpfl: CommandLine, tmp_path: Path) -> None:
    """Weights that are a few values each, as after a round of random bits, are in other models, too."""
    exchanged = tmp_path / "exchanged"
    shutil.copytree(run, exchanged)
    tensors = load_file(run / "model.safetensors")
    save_file({name: tensor.flatten().flip(0).reshape(tensor.shape) for name, tensor in tensors.items()}, exchanged / "model.safetensors")
    assert "has other weights than the run's checkpoint" in ldpfl.refused("export", exchanged, tmp_path / "out")


class Transposed(nn.Module):
    """A model with a parameter that is not contiguous, and two equal ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 1).repeat(1, 2).T[:1])
        self.first, self.second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.weight + self.first + self.second


def test_a_parameter_that_is_not_contiguous_is_saved_and_exported(rows: Path, tmp_path: Path) -> None:
    result = api.run(data=rows, **HOW, settings=FEW, model=Transposed(), folder=tmp_path / "run")
    api.export(result, tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")["weight"].shape == (1, 2)


def test_a_certificate_is_not_compared_with_a_ledger_that_was_put_back(run: Path, ldpfl: CommandLine, tmp_path: Path) -> None:
    more = tmp_path / "more"
    shutil.copytree(run, more)
    ldpfl("certify", run, "--out", tmp_path / "certificate.json")
    ldpfl("run", "--resume", "--out", more, "--more-rounds", "2", "--no-report")
    shutil.copy(run / "ledger.json", more)
    for ledger in (more, more / "ledger.json"):
        assert "does not belong to this run's checkpoint" in ldpfl.refused("verify", tmp_path / "certificate.json", "--ledger", ledger)
    ldpfl("verify", tmp_path / "certificate.json", "--ledger", run)


def test_an_export_goes_to_a_new_folder_alone(run: Path, ldpfl: CommandLine, tmp_path: Path) -> None:
    Path("given").mkdir()
    Path("given/notes.txt").write_text("mine")
    assert "given is not empty: give a new folder" in ldpfl.refused("export", run, "given")
    assert [path.name for path in Path("given").iterdir()] == ["notes.txt"]
    assert "holds no run" in ldpfl.refused("export", tmp_path, "new")
    assert not Path("new").exists()
    ldpfl("export", run, "exported")
    for command in (("certify", "exported"), ("show", "exported"), ("ledger", "exported"), ("export", "exported", "new")):
        assert "exported is an exported model, and no run: it is handed on as it is" in ldpfl.refused(*command)


def test_what_is_not_protected_is_not_exported(rows: Path, tmp_path: Path) -> None:
    settings = {**FEW, "mechanism.name": "none", "mechanism.perturbed": "update", "privacy.target_epsilon": "off"}
    settings["shuffling.channel"] = "direct"
    found = api.run(data=rows, **HOW, settings=settings, folder=tmp_path / "run", baseline=False)
    with pytest.raises(ConfigError, match="without noise, so its model may reveal any row"):
        api.export(found, tmp_path / "given")
    with pytest.raises(ConfigError, match=r"run it again with ldpfl\.run\(\.\.\., folder="):
        api.export(api.run(data=rows, **HOW, settings=FEW, baseline=False), tmp_path / "given")


def test_the_score_on_public_rows_is_exported(tiny_data: Path, config_file: Path, tmp_path: Path) -> None:
    found = api.run(config_file, folder=tmp_path / "run", data_dir=tiny_data, rounds=1, progress=False)
    given = api.export(found, tmp_path / "given")
    assert {path.name for path in given.iterdir()} == FILES - {"encoding.json"}
    card = (given / "README.md").read_text()
    assert f"accuracy on the public test split: {found.accuracy:.2%}" in card
    assert yaml.safe_load(card.split("---\n")[1])["datasets"] == ["mnist"]
    assert "ldpfl.load_model" in card
    module = api.load_model(given)
    for name, value in found.module().state_dict().items():
        assert torch.equal(module.state_dict()[name], value)
    with pytest.raises(ConfigError, match="was not trained on a table"):
        api.predict(given, pd.DataFrame({"age": [1]}))


def test_a_model_that_was_handed_over_is_handed_over_again(rows: Path, tmp_path: Path) -> None:
    net = nn.Linear(1, 2)
    found = api.run(data=rows, **HOW, settings=FEW, model=net, folder=tmp_path / "run", baseline=False)
    given = api.export(found, tmp_path / "given")
    with pytest.raises(ConfigError, match="pass it again"):
        api.predict(given, rows)
    chances = api.predict(given, rows, model=nn.Linear(1, 2))["probability of yes"]
    np.testing.assert_allclose(chances, found.predict(rows)["probability of yes"])


def test_code_is_what_the_caller_names_whatever_a_folder_says(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    net = "from torch import nn\n\n\nclass Net(nn.Linear):\n    def __init__(self) -> None:\n        super().__init__(1, 2)\n"
    (tmp_path / "net.py").write_text(net)
    settings = {**FEW, "model.name": f"{tmp_path / 'net.py'}:Net"}
    given = api.export(api.run(data=rows, **HOW, settings=settings, folder=tmp_path / "run", baseline=False), tmp_path / "given")
    assert str(tmp_path) not in (given / "model.json").read_text()
    with pytest.raises(ConfigError, match=r"is the code net\.py:Net, and loading it runs this code: if you trust it, give"):
        api.predict(given, rows)
    (given / "model.json").write_text((given / "model.json").read_text().replace("net.py:Net", "os:abort"))
    assert len(api.predict(given, rows, model="net.py:Net")) == 120
    with pytest.raises(ConfigError, match="is the code os:abort"):
        api.predict(given, rows, model="linear")


@pytest.mark.thorough_except("object")
@pytest.mark.parametrize("is_file", [False, True], ids=["object", "file"])
def test_code_on_which_a_guarantee_rests_is_named_wherever_the_guarantee_stands(is_file: bool, rows: Path, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("from torch import nn\n\n\ndef net() -> nn.Module:\n    return nn.Linear(1, 2)\n")
    model: Any = f"{tmp_path / 'net.py'}:net" if is_file else nn.Linear(1, 2)
    note = f"model{' net.py:net' if is_file else ''}: code that is not ldpfl's"
    found = api.run(data=rows, **HOW, settings=FEW, model=model, folder=tmp_path / "run", baseline=False)
    certificate = api.certify(tmp_path / "run").to_json()
    card = (api.export(found, tmp_path / "given") / "README.md").read_text()
    for text in (*found.to_dict()["caveats"], *api.account(tmp_path / "run").warnings, certificate, card):
        assert str(tmp_path) not in text
    result = found.to_dict()
    for texts in ([*result["caveats"], *result["privacy"]["warnings"]], api.account(tmp_path / "run").warnings, [certificate], [card]):
        text = "\n".join(texts)
        assert text.count(note) == text.count("keeps nothing of it for another, which ldpfl cannot prove") == 1, text
    built_in = api.run(data=rows, **HOW, settings=FEW, folder=tmp_path / "other", baseline=False)
    assert not any("not ldpfl's" in line for line in (*built_in.to_dict()["caveats"], *api.account(tmp_path / "other").warnings))


def assert_refused_if_relabelled(run: Path) -> None:
    """Nothing accepts the ledger of ``run``, by the folder or by the file, if it says that the guarantee rests on ldpfl's code alone."""
    assert api.account(run / "ledger.json") == api.account(run)
    certificate = api.certify(run / "ledger.json")
    assert certificate == api.certify(run)
    assert certificate.statement.caveats
    folder = RunFolder(run)
    events = tuple(replace(event, release=replace(event.release, author=OURS)) for event in folder.ledger().events)
    for file in (*run.glob("checkpoint*"), folder.metrics_path):  # what the ledger is compared with
        file.unlink()
    Ledger(events).save(folder.ledger_path)
    for read in (api.certify, api.account):
        for named in (run, folder.ledger_path):
            with pytest.raises(DataError, match=r"rests on ldpfl's code alone, but the run used model"):
                read(named)


def test_records_are_proved_protected_only_with_a_model_of_ldpfl(rows: Path, tmp_path: Path, ldpfl: CommandLine) -> None:
    """Ledger, result and certificate say whose code the guarantee rests on; a certificate that says otherwise contradicts its ledger."""
    few: dict[str, Any] = {**HOW, "settings": FEW, "baseline": False}
    for name, model, author, status in (("own", nn.Linear(1, 2), USERS_CODE, "author's claim"), ("built in", None, OURS, "proved")):
        result = api.run(data=rows, **few, model=model, folder=tmp_path / name)
        assert {event.release.author for event in RunFolder(tmp_path / name).ledger().events} == {author}
        assert {row.status for row in result.privacy.rows} == {status}
        assert (" rests on code that is not ldpfl's" in result.privacy.verdict) == (author != OURS)
        certificate = api.certify(tmp_path / name)
        assert {line.status for line in certificate.statement.guarantees} == {status}
        verdicts = api.verify(certificate, ledger=tmp_path / name).lines
        assert {verdict.status for verdict in verdicts} == {"confirmed" if author == OURS else status}
        assert all(("treats each record by itself" in verdict.why) == (author != OURS) for verdict in verdicts)
        shown = " ".join(ldpfl("show", tmp_path / name).out.split())
        assert ("What follows is not proved by ldpfl: it assumes that the code that is not ldpfl's treats" in shown) == (author != OURS)
        assert "as its author claims" not in shown
    certificate = api.certify(tmp_path / "own")
    charged = tuple(replace(group, release=replace(group.release, author=OURS)) for group in certificate.statement.charged)
    with pytest.raises(DataError, match="has no round like the charged one"):
        api.verify(replace(certificate, statement=replace(certificate.statement, charged=charged)), ledger=tmp_path / "own")
    assert_refused_if_relabelled(tmp_path / "own")
    shutil.copy(tmp_path / "own" / "ledger.json", tmp_path / "copied.json")  # nothing beside it says what the run used
    assert api.account(tmp_path / "copied.json").status == "proved"


@pytest.mark.parametrize("name", ["dp-fedavg", "duchi"])
def test_in_a_simulation_what_protects_a_whole_client_rests_on_the_model(name: str, rows: Path, tmp_path: Path, ldpfl: CommandLine) -> None:
    """All clients share one process, so a model could pass one client's data to another: training and evaluation are both a claim."""
    evaluated = {"evaluation.share": 0.3, "evaluation.epsilon": 2.0}
    settings = {**FEW, **CLIENTS[name], **evaluated, "mechanism.name": name}
    for folder, model, author, status in (("own", nn.Linear(1, 2), USERS_CODE, "author's claim"), ("built in", None, OURS, "proved")):
        result = api.run(data=rows, **HOW, settings=settings, model=model, folder=tmp_path / folder, baseline=False)
        assert {event.release.author for event in result.ledger.events} == {author}
        assert any(event.histograms for event in result.ledger.events)
        assert (result.privacy.status, result.privacy.protected) == (status, "client")
        assert any("treats each client by itself" in line for line in result.privacy.warnings) == (author != OURS)
        verdicts = api.verify(api.certify(tmp_path / folder), ledger=tmp_path / folder).lines
        assert {verdict.status for verdict in verdicts} <= {"confirmed", "nearly"} if author == OURS else {status}
        shown = " ".join(ldpfl("show", tmp_path / folder).out.split())
        assert ("assumes that the code that is not ldpfl's treats each client" in shown) == (author != OURS)
    assert_refused_if_relabelled(tmp_path / "own")


CLIENTS: dict[str, dict[str, Any]] = {
    "dp-fedavg": {"mechanism.perturbed": "update", "mechanism.clip_norm": 1.0},
    "duchi": {"mechanism.perturbed": "weights"},
}


@pytest.mark.parametrize("mechanism", ["dp-sgd", "dp-fedavg"])
def test_rows_from_code_are_protected_as_the_code_returns_them(
    mechanism: str, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "load.py").write_text(f"import pandas\n\n\ndef rows() -> object:\n    return pandas.read_csv({str(rows)!r})\n")
    settings = FEW if mechanism == "dp-sgd" else {**FEW, **CLIENTS[mechanism], "mechanism.name": mechanism}
    result = api.run(data="load.py:rows", **HOW, settings=settings, folder=tmp_path / "run", baseline=False)
    assert result.privacy.status == "author's claim"
    note = "data load.py:rows: code that is not ldpfl's. Rows are protected as load.py:rows returns them"
    certificate = api.certify(tmp_path / "run").to_json()
    for text in ("\n".join(result.to_dict()["caveats"]), "\n".join(api.account(tmp_path / "run").warnings), certificate):
        assert text.count(note) == 1, text


def test_what_a_config_with_a_model_of_ones_own_would_release_is_not_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text("from torch import nn\n\n\nclass Net(nn.Linear):\n    pass\n")
    settings = {"mechanism.name": "dp-sgd", "mechanism.perturbed": "gradient", "training.rounds": 2}
    assert api.account("quickstart", settings={**settings, "model.name": "linear"}).status == "proved"
    own = {**settings, "model.name": "net.py:Net", "model.options": {"in_features": 784, "out_features": 10}}
    assert api.account("quickstart", settings=own).status == "author's claim"
    own |= {"mechanism.name": "duchi", "mechanism.perturbed": "weights"}
    assert api.account("quickstart", settings=own).status == "author's claim"


def test_a_page_that_is_handed_on_leaves_out_what_is_not_covered(run: Path, ldpfl: CommandLine) -> None:
    whole, result = page([run]), RunFolder(run).result()
    assert result is not None
    assert ldpfl("report", run, "--public", "--out", "public.html").code == 0
    public = Path("public.html").read_text()
    scores = {format_score(result["metric"], score) for score in (*result["score_per_round"], *result["noise_free_score_per_round"])}
    long = {score for score in scores if len(score) > 4}  # a short one, as 0.5, is said of other things too
    for said in (*long, "without noise", "gradients clipped", "s of training", "rows.csv"):
        assert said in whole, said
        assert said not in public, said
    assert "Left out, because the guarantee does not cover it: scores, which were measured on rows that are not protected" in public
    assert "fingerprint" not in public
    assert page([run, run], public=True).count("Left out") == 2


@pytest.mark.thorough
def test_a_public_page_has_a_name_of_its_own(run: Path, ldpfl: CommandLine) -> None:
    """ldpfl run and ldpfl report write the owner's page again, which would turn a public one into it."""
    own, public = run / "report.html", run / "report-public.html"
    said = ldpfl("report", run, "--public").out
    assert f"{public}: " in said
    assert "a public page, without what the guarantee does not cover" in said
    before = public.read_text()
    assert "a page for its owner alone" in ldpfl("report", run).out
    assert public.read_text() == before != own.read_text()
    assert "so the next run would overwrite the public page" in ldpfl.refused("report", run, "--public", "--out", own)
    assert ldpfl("report", run, run, "--public").code == 0
    assert Path("report-public.html").is_file()


@pytest.mark.thorough
def test_a_public_page_says_where_scores_are_those_of_public_rows(tiny_data: Path, config_file: Path, tmp_path: Path) -> None:
    for place, settings in enumerate(({}, {"data.evaluate_on": "holdout"})):
        folder = tmp_path / f"{place}"
        found = api.run(config_file, settings=settings, folder=folder, data_dir=tiny_data, rounds=1, progress=False)
        public = page([folder], public=True)
        assert (f"{found.accuracy:.2%}" in public) == (not settings)
        assert ("Scores were measured on the public test split" in public) == (not settings)
        assert "without noise" not in public


@pytest.mark.thorough
def test_the_round_at_which_private_rows_stopped_a_run_is_not_handed_on(rows: Path, tmp_path: Path) -> None:
    settings = {
        **FEW,
        "training.rounds": 6,
        "training.patience": 1,
        "data.validation": 0.3,
        "training.server_learning_rate": 1e-30,
    }  # nothing moves
    found = api.run(data=rows, **HOW, settings=settings, folder=tmp_path / "run", baseline=False)
    stopped = "training stopped after round"
    assert any(stopped in caveat for caveat in found.to_dict()["caveats"])
    given = api.export(found, tmp_path / "given")
    for text in (*(path.read_text() for path in given.iterdir() if path.suffix != ".safetensors"), page([tmp_path / "run"], public=True)):
        assert stopped not in text
    assert "was decided by the loss on rows that are not protected" in (given / "README.md").read_text()


def test_sweeps_and_plans_have_no_public_page(ldpfl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    assert "--public works only for runs" in ldpfl.refused("report", tmp_path / "plan.json", "--public")


def test_an_export_holds_the_tensors_of_the_model_and_nothing_else_that_is_in_its_file(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    file = copy / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors, file, {"note": "a word of mine"})
    api.export(copy, tmp_path / "given")
    given = tmp_path / "given" / "model.safetensors"
    assert b"a word of mine" not in given.read_bytes()
    assert {name: value.tolist() for name, value in load_file(given).items()} == {name: value.tolist() for name, value in tensors.items()}


def test_a_model_s_file_that_is_something_else_is_not_exported(run: Path, tmp_path: Path) -> None:
    """A folder of somebody else's may name any file of the user's by a link."""
    copy, private = tmp_path / "run", tmp_path / "private.safetensors"
    shutil.copytree(run, copy)
    file = copy / "model.safetensors"
    file.rename(private)
    file.symlink_to(private)
    with pytest.raises(DataError, match=r"model\.safetensors is a link"):
        api.export(copy, tmp_path / "linked")
    file.unlink()
    for tensors in ({"rows": torch.zeros(3)}, {}):
        save_file(tensors, file)
        with pytest.raises(DataError, match="of another model"):
            api.export(copy, tmp_path / "other")
    file.write_bytes(b"a private text")
    with pytest.raises(DataError, match="is damaged"):
        api.export(copy, tmp_path / "text")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "private.safetensors"}


@pytest.mark.parametrize("name", ["config.toml", "result.json", "ledger.json", "model.json", "encoding.json", "adapter"])
def test_nothing_of_a_run_is_handed_on_by_a_link(name: str, run: Path, tmp_path: Path) -> None:
    copy, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    shutil.copytree(run, copy)
    (copy / "adapter").mkdir()
    (copy / name).rename(elsewhere)
    (copy / name).symlink_to(elsewhere)
    ways = (
        lambda: api.export(copy, tmp_path / "given"),
        lambda: api.certify(copy),
        lambda: api.page([copy], tmp_path / "page.html", public=True),
    )
    for hand_on in ways:
        with pytest.raises(DataError, match=f"{re.escape(name)} is a link, expected a file of this run"):
            hand_on()
    assert {path.name for path in tmp_path.iterdir()} == {"run", "elsewhere"}
    assert api.page([copy], tmp_path / "own.html").size > 0  # its owner may see all


def test_only_an_adapter_of_the_model_is_exported(run: Path, tmp_path: Path) -> None:
    """Whoever prepares a run's folder may put any file in the place of an adapter."""
    copy, adapter = tmp_path / "run", tmp_path / "run" / "adapter"
    shutil.copytree(run, copy)
    adapter.mkdir()
    config, weights = adapter / "adapter_config.json", adapter / "adapter_model.safetensors"
    weights.symlink_to(tmp_path / "SECRET-seed")
    with pytest.raises(DataError, match=r"adapter_model\.safetensors is a link"):
        api.export(copy, tmp_path / "linked")
    weights.unlink()
    config.write_text("a private text")
    assert {path.name for path in api.export(copy, tmp_path / "given").iterdir()} == FILES  # the model has no base, so no adapter
    description = json.loads((copy / "model.json").read_text())
    (copy / "model.json").write_text(json.dumps(description | {"base": "0" * 64}))
    (tmp_path / "mine").mkdir()
    for text, content, problem in (
        ("", b"", "Expecting value"),
        ('{"password": 1}', b"", "it has no peft_type"),
        ('{"peft_type": "LORA"}', b"", ""),
        ('{"peft_type": "LORA"}', b"a private text", ""),
    ):
        config.write_text(text)
        weights.write_bytes(content)
        for folder in ("new", "mine"):
            with pytest.raises(DataError, match=f"the adapter in .* is damaged: .*{problem}"):
                api.export(copy, tmp_path / folder)
        assert not (tmp_path / "new").exists()
        assert list((tmp_path / "mine").iterdir()) == []
    weights.unlink()
    with pytest.raises(DataError, match=r"is damaged: .*No such file"):
        api.export(copy, tmp_path / "new")
    save_file({"rank": torch.ones(2)}, weights, {"note": "a private text"})
    given = api.export(copy, tmp_path / "new")
    assert b"a private text" not in (given / weights.name).read_bytes()
    assert load_file(given / weights.name)["rank"].tolist() == [1.0, 1.0]


@pytest.mark.thorough
def test_a_model_in_onnx_says_what_the_module_says(run: Path, rows: Path, ldpfl: CommandLine) -> None:
    import onnxruntime

    outcome = ldpfl("export", run, "given", "--onnx", "--pt2")
    assert outcome.code == 0, outcome.err
    assert {path.name for path in Path("given").iterdir()} == FILES | {"model.onnx", "model.pt2"}
    assert "`model.onnx`" in Path("given/README.md").read_text()
    module = api.load_model("given").eval()
    session, program = onnxruntime.InferenceSession("given/model.onnx"), torch.export.load("given/model.pt2").module()
    for count in (1, 7):
        inputs = torch.randn(count, 1, generator=torch.Generator().manual_seed(count))
        expected = module(inputs).detach()
        torch.testing.assert_close(torch.from_numpy(session.run(["outputs"], {"inputs": inputs.numpy()})[0]), expected)
        torch.testing.assert_close(program(inputs), expected, rtol=0, atol=0)


NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.within = nn.Linear(1, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.within(rows))


class Stubborn(Net):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) * (1 if rows.sum().item() > -1e9 else 2)
"""


@pytest.mark.thorough
def test_code_is_exchanged_once_it_is_named_and_no_path_of_this_machine_is_in_it(rows: Path, tmp_path: Path) -> None:
    (tmp_path / "net_of_mine.py").write_text(NET)
    name = f"{tmp_path / 'net_of_mine.py'}:Net"
    found = api.run(data=rows, **HOW, settings={**FEW, "model.name": name}, folder=tmp_path / "run", baseline=False)
    with pytest.raises(ConfigError, match="and loading it runs this code"):
        api.export(tmp_path / "run", tmp_path / "given", onnx=True)
    assert not (tmp_path / "given").exists()
    given = api.export(tmp_path / "run", tmp_path / "given", onnx=True, pt2=True, model=name)
    assert (api.export(found, tmp_path / "again", onnx=True) / "model.onnx").exists()
    with zipfile.ZipFile(given / "model.pt2") as archive:
        files = [archive.read(entry) for entry in archive.namelist()]
    for file in (*files, (given / "model.onnx").read_bytes()):
        for said in (tmp_path, Path(torch.__file__).parent):
            assert str(said).encode() not in file


class Frozen(nn.Module):
    """A model with tensors that training leaves as they are, and with frozen zeros, of which other tensors may be made, too."""

    mean: Tensor

    def __init__(self, *, is_frozen: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)
        self.is_frozen = is_frozen
        if is_frozen:
            self.register_buffer("mean", torch.tensor([47.0]), persistent=False)
            self.rows, self.zeros = (nn.Parameter(values, requires_grad=False) for values in (torch.full((3, 1), 61.0), torch.zeros(2)))

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.layer(rows - self.mean) + self.zeros if self.is_frozen else self.layer(rows)
        return outputs


def test_tensors_that_training_leaves_as_they_are_are_named_as_not_protected(
    rows: Path, run: Path, tmp_path: Path, ldpfl: CommandLine
) -> None:
    settings = {**FEW, "model.name": f"{__name__}:Frozen"}
    result = api.run(data=rows, **HOW, settings=settings, folder=tmp_path / "own", baseline=False)
    outcome = ldpfl("export", tmp_path / "own", tmp_path / "out")
    assert outcome.code == 0
    assert "may be published" not in outcome.out
    assert "does not cover the tensors rows, zeros of your model" in outcome.err
    said = "The guarantee does not cover these tensors, which training has left as the model's owner gave them: `rows`, `zeros`."
    assert said in (tmp_path / "out" / "README.md").read_text()
    notes: list[str] = []
    exchanged = api.export(result, tmp_path / "pt2", pt2=True, on_note=notes.append)
    assert "tensors rows, zeros, mean of" in notes[0]
    card = (exchanged / "README.md").read_text()
    assert said.replace("`zeros`", "`zeros`, `mean`") in card
    assert "the numbers in its owner's code" in card
    api.run(data=rows, **HOW, settings=FEW, model=Frozen(is_frozen=False), folder=tmp_path / "trained", baseline=False)
    for folder in (run, tmp_path / "trained"):  # the built-in model, and code that is trained as a whole
        outcome = ldpfl("export", folder, tmp_path / f"of-{folder.name}")
        assert "may be published as it is" in outcome.out
        assert "does not cover these tensors" not in (tmp_path / f"of-{folder.name}" / "README.md").read_text()


@pytest.mark.thorough
def test_a_model_that_cannot_be_exchanged_is_not_exported_by_halves(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net_of_mine.py").write_text(NET)
    name = f"{tmp_path / 'net_of_mine.py'}:Stubborn"
    api.run(data=rows, **HOW, settings={**FEW, "model.name": name}, folder=tmp_path / "run", baseline=False)
    with pytest.raises(ConfigError, match=r"the model cannot be written as \.pt2"):
        api.export(tmp_path / "run", tmp_path / "given", pt2=True, model=name)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ConfigError, match=r"pip install 'ldpfl\[onnx\]'"):
        api.export(tmp_path / "run", tmp_path / "given", onnx=True, model=f"{tmp_path / 'net_of_mine.py'}:Net")
    assert not (tmp_path / "given").exists()
