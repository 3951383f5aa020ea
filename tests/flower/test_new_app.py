"""A new Flower app is one that runs nothing but the wrapper, and says what nodes are asked for."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pandas as pd
import pytest

from conftest import CommandLine
from ldpfl.experiments import load_recipe
from ldpfl.experiments.config import read_config
from ldpfl.flower.app_imports import unwrapped_code
from ldpfl.flower.policy_init import offer_of
from ldpfl.privacy.budget_file import read_books
from ldpfl.privacy.policy import read_policy

pytestmark = pytest.mark.xdist_group("imports-of-apps")  # what the wrapper imports is found once a process


@pytest.fixture
def table(tmp_path: Path) -> Path:
    frame = pd.DataFrame({"hospital": ["a", "b"] * 5, "age": range(10), "ward": ["icu", "cardio"] * 5, "outcome": ["died", "alive"] * 5})
    frame.to_csv(tmp_path / "rows.csv", index=False)
    return tmp_path / "rows.csv"


@pytest.mark.slow
def test_the_app_of_a_recipe_comes_with_a_policy_and_a_budget_that_fit(tmp_path: Path, ldpfl: CommandLine) -> None:
    outcome = ldpfl(
        "init", "--flower", tmp_path / "digits", "--recipe", "quickstart", "--set", "mechanism.epsilon=2", "--set", "training.rounds=3"
    )
    assert outcome.code == 0, outcome.err
    assert "seed = 0: decides how the data are divided" in outcome.out
    config, policy = offer_of(str(tmp_path / "digits")).config, read_policy(tmp_path / "digits" / "policy.toml")
    assert (config.mechanism.name, config.training.rounds) == ("duchi", 3)
    assert (policy.mechanisms, policy.rounds, policy.epsilon_per_unit) == (("duchi",), 3, 2.0)
    assert read_books(tmp_path / "digits" / "budget.sqlite").limit.epsilon == policy.lifetime_epsilon
    assert list(unwrapped_code(tmp_path / "digits")) == []


@pytest.mark.slow
def test_what_the_public_knows_of_columns_is_left_to_be_said(tmp_path: Path, table: Path, ldpfl: CommandLine) -> None:
    own = ("--data", table, "--target", "outcome", "--client", "hospital", "--set", "mechanism.records=10", "--set", "clients.count=2")
    outcome = ldpfl("init", "--flower", tmp_path / "heart", *own)
    assert "fill in data.bounds of age" in outcome.out, outcome.err
    assert "mechanism.records" not in outcome.out
    own_mean = ldpfl("init", "--flower", tmp_path / "mean", "--data", table, "--target", "outcome", "--client", "hospital")
    assert "the mean number of rows of a node" in own_mean.out
    seed = load_recipe("own", []).seed  # what the app's server reads: a run on one's own data in a simulation draws another one
    assert f"seed = {seed}: decides the random initial weights, and which nodes are asked if a round asks only some" in outcome.out
    assert not (tmp_path / "heart" / "policy.toml").exists()
    files = ("--out", tmp_path / "policy.toml", "--budget", tmp_path / "budget.sqlite")
    assert "then the largest: fill in its publicly known bounds" in ldpfl.refused("policy", "init", tmp_path / "heart", *files)
    project = tmp_path / "heart" / "pyproject.toml"
    project.write_text(project.read_text().replace("[0, 0]", "[0, 120]"))
    assert "All 10 rows" in ldpfl("policy", "init", tmp_path / "heart", "--data", table, *files).out
    config = offer_of(str(tmp_path / "heart")).config
    assert (config.data.columns, config.data.words, config.data.classes) == (["age", "ward"], ["ward"], ["alive", "died"])
    said = ldpfl("init", "--flower", tmp_path / "again", *own, "--set", "data.bounds={age = [0, 120]}")
    assert "policy.toml holds the policy" in said.out


def settings_written(app: Path) -> list[str]:
    """Return the keys of the settings in the app's ``pyproject.toml``, in their order."""
    project = tomllib.loads((app / "pyproject.toml").read_text())
    return [change.partition("=")[0].strip() for change in project["tool"]["flwr"]["app"]["config"]["ldpfl"]["set"].split(";")]


@pytest.mark.slow
@pytest.mark.thorough
def test_only_the_chosen_columns_are_described_and_each_setting_is_written_once(tmp_path: Path, table: Path, ldpfl: CommandLine) -> None:
    pd.read_csv(table).assign(crp=[0.5] * 10, code=[1, 2] * 5, admitted="2024-02-01").to_csv(table, index=False)
    chosen = (
        'data.columns=["age", "ward", "code"]',
        "data.bounds={age=[0, 120]}",
        'data.categories={ward=["cardio", "icu"]}',
        'data={words=["code"], buckets=16}',
        'data.classes=["alive", "died"]',
        "data.client=hospital",
        "mechanism.records=10",
        "clients.count=2",
    )
    sets = [word for change in chosen for word in ("--set", change)]
    said = ldpfl("init", "--flower", tmp_path / "heart", "--data", table, "--target", "outcome", *sets)
    assert "policy.toml holds the policy" in said.out, said.err
    data = offer_of(str(tmp_path / "heart")).config.data
    assert (data.columns, data.words, data.bounds, data.categories) == (
        ["age", "ward", "code"],
        ["code"],
        {"age": [0.0, 120.0]},
        {"ward": ["cardio", "icu"]},
    )
    assert (data.classes, data.buckets, data.client) == (["alive", "died"], 16, "")
    keys = settings_written(tmp_path / "heart")
    assert sorted(set(keys)) == sorted(keys)
    files = ("--out", tmp_path / "policy.toml", "--budget", tmp_path / "budget.sqlite")
    assert "All 10 rows" in ldpfl("policy", "init", tmp_path / "heart", "--data", table, *files).out


@pytest.mark.slow
@pytest.mark.thorough
def test_ordered_classes_of_an_app_are_in_ascending_order(tmp_path: Path, table: Path, ldpfl: CommandLine) -> None:
    pd.read_csv(table).assign(grade=[2, 10, 1, 3, 2] * 2).to_csv(table, index=False)
    own = ("--data", table, "--task", "ordinal", "--set", "data.columns=['age']", "--set", "data.bounds={age=[0, 120]}")
    sized = ("--set", "mechanism.records=10", "--set", "clients.count=2")
    assert "policy.toml holds the policy" in ldpfl("init", "--flower", tmp_path / "grades", "--target", "grade", *own, *sized).out
    assert offer_of(str(tmp_path / "grades")).config.data.classes == ["1", "2", "3", "10"]
    words = ("init", "--flower", tmp_path / "words", "--target", "ward", *own, *sized)
    assert "list them in data.classes, the lowest first" in ldpfl.refused(*words)
    ldpfl(*words, "--set", "data.classes=['icu', 'cardio']")
    assert offer_of(str(tmp_path / "words")).config.data.classes == ["icu", "cardio"]


@pytest.mark.slow
@pytest.mark.thorough
def test_an_app_and_a_config_for_persons_name_their_column(tmp_path: Path, table: Path, ldpfl: CommandLine) -> None:
    pd.read_csv(table).assign(pseudonym=list("aabbccddee")).to_csv(table, index=False)
    own = ("--data", table, "--target", "outcome", "--client", "hospital", "--person", "pseudonym", "--set", "mechanism.records=5")
    assert "the mean number of persons of a node" in ldpfl("init", "--flower", tmp_path / "open", *own[:-2]).out
    said = ldpfl("init", "--flower", tmp_path / "heart", *own, "--set", "data.bounds={age = [0, 120]}", "--set", "clients.count=2")
    assert "all records of any one person in this client's table" in said.out, said.err
    config, policy = offer_of(str(tmp_path / "heart")).config, read_policy(tmp_path / "heart" / "policy.toml")
    assert (config.data.person, config.data.columns) == ("pseudonym", ["age", "ward"])
    assert (policy.protects, policy.person) == ("person", "pseudonym")
    ldpfl("init", tmp_path / "config.toml", *own)
    assert read_config(tmp_path / "config.toml").data.person == "pseudonym"
    assert "--client and --person name columns of your data" in ldpfl.refused("run", "--person", "pseudonym")


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("flag", [("--text", "review"), ("--set", "data.text=review")], ids=lambda flag: flag[0])
def test_an_app_of_texts_has_no_other_inputs(flag: tuple[str, str], tmp_path: Path, ldpfl: CommandLine) -> None:
    frame = pd.DataFrame({"review": ["good film", "bad film"] * 3, "stars": [5, 1] * 3, "label": ["up", "down"] * 3})
    frame.to_csv(tmp_path / "texts.csv", index=False)
    own = ("--data", tmp_path / "texts.csv", "--target", "label", "--model", "embedding-bag", "--set", "mechanism.records=6", *flag)
    said = ldpfl("init", "--flower", tmp_path / "app", *own)
    assert "policy.toml holds the policy" in said.out, said.err
    data = offer_of(str(tmp_path / "app")).config.data
    assert (data.text, data.columns, data.bounds, data.classes) == ("review", [], {}, ["down", "up"])
    assert settings_written(tmp_path / "app").count("data.text") == 1
    files = ("--out", tmp_path / "policy.toml", "--budget", tmp_path / "budget.sqlite")
    assert "All 6 rows" in ldpfl("policy", "init", tmp_path / "app", "--data", tmp_path / "texts.csv", *files).out
    assert ldpfl("init", tmp_path / "config.toml", *own).code == 0
    assert read_config(tmp_path / "config.toml").data.text == "review"


@pytest.mark.slow
@pytest.mark.thorough
def test_classes_that_are_numbers_are_written_as_they_are_read(tmp_path: Path, ldpfl: CommandLine) -> None:
    pd.DataFrame({"age": [1.0, 2.0, 3.0], "grade": [0, 1, 1]}).to_parquet(tmp_path / "rows.parquet")
    own = ("--data", tmp_path / "rows.parquet", "--target", "grade", "--set", "mechanism.records=3", "--set", "data.bounds={age = [0, 9]}")
    ldpfl("init", "--flower", tmp_path / "grades", *own)
    assert offer_of(str(tmp_path / "grades")).config.data.classes == ["0", "1"]
    files = ("--out", tmp_path / "policy.toml", "--budget", tmp_path / "budget.sqlite")
    assert "All 3 rows" in ldpfl("policy", "init", tmp_path / "grades", "--data", tmp_path / "rows.parquet", *files).out


@pytest.mark.slow
@pytest.mark.thorough
def test_nodes_with_tables_that_settings_describe_reply_at_a_fixed_time(tmp_path: Path, ldpfl: CommandLine) -> None:
    described = ("data.name=node", "data.target=outcome", "data.columns=['age']", "data.bounds={age=[0, 9]}", "data.classes=['no', 'yes']")
    changes = [word for change in (*described, "mechanism.records=10") for word in ("--set", change)]
    assert ldpfl("init", "--flower", tmp_path / "app", "--recipe", "own", *changes).code == 0
    assert offer_of(str(tmp_path / "app")).reply_s == 60.0
    assert not read_policy(tmp_path / "app" / "policy.toml").immediate_replies


def test_images_are_for_an_app_of_one_s_own(tmp_path: Path, ldpfl: CommandLine) -> None:
    (tmp_path / "images" / "cat").mkdir(parents=True)
    (tmp_path / "images" / "cat" / "1.png").touch()
    said = ldpfl.refused("init", "--flower", tmp_path / "app", "--data", tmp_path / "images")
    assert "contains images, but an app that ldpfl init writes reads only tables" in said
    assert "RecordTask, see docs/flower.md" in said


@pytest.mark.parametrize("bounds", [(), ("--set", "data.bounds={age = [0, 120]}")], ids=["bounds left open", "bounds"])
def test_an_app_that_ldpfl_itself_would_refuse_is_not_begun(
    bounds: tuple[str, ...], tmp_path: Path, table: Path, ldpfl: CommandLine
) -> None:
    """All steps are in one message, whether or not the bounds of columns are filled in."""
    new: tuple[str | Path, ...] = ("init", "--flower", tmp_path / "app", "--data", table, "--target", "outcome", *bounds)
    new = (*new, "--set", "mechanism.records=5")
    said = ldpfl.refused(*new, "--model", "net.py:Net")
    for words in ("nodes load no code from files", "name it package.module:Class", "Set privacy.target_epsilon=off", "--layers"):
        assert words in said
    assert not (tmp_path / "app").exists()
    noise = ("privacy.target_epsilon=off", "mechanism.noise_multiplier=3", "mechanism.clip_norm=1")
    settings = [word for change in noise for word in ("--set", change)]
    written = ldpfl(*new, "--model", "my_package.models:Net", *settings)
    assert f"ldpfl policy init {tmp_path / 'app'} --layers SIZES" in written.out, written.err


def test_nothing_is_written_over_and_a_folder_has_the_name_of_a_package(tmp_path: Path, table: Path, ldpfl: CommandLine) -> None:
    assert "was not changed" in ldpfl.refused("init", "--flower", tmp_path, "--recipe", "quickstart") or tmp_path.name[0].isdigit()
    assert "is not a valid name" in ldpfl.refused("init", "--flower", tmp_path / "2 apps", "--recipe", "quickstart")
    assert "--target" in ldpfl.refused("init", "--flower", tmp_path / "app", "--data", table)
    assert not (tmp_path / "app").exists()


@pytest.mark.parametrize("name", ["a;b", "a; model.name='os:system'; x='", "it's; 'so'", 'a"; seed=7; b="', "a\\u003b;"])
@pytest.mark.slow
@pytest.mark.thorough
def test_what_a_table_is_called_by_writes_no_setting(name: str, tmp_path: Path, ldpfl: CommandLine) -> None:
    rows = {"age": [1, 2, 3], name: ["x", "y;z", "x"], "outcome": [name, "died", name]}
    pd.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    own = (
        "--data",
        tmp_path / "rows.parquet",
        "--target",
        "outcome",
        "--set",
        "mechanism.records=3",
        "--set",
        "data.bounds={age = [0, 9]}",
    )
    outcome = ldpfl("init", "--flower", tmp_path / "app", *own)
    config = offer_of(str(tmp_path / "app")).config
    assert (config.data.columns, config.data.words, set(config.data.classes)) == (["age", name], [name], {name.strip(), "died"}), (
        outcome.err
    )
    assert (config.model.name, config.seed) == (load_recipe("own", []).model.name, load_recipe("own", []).seed)


@pytest.mark.slow
def test_an_app_for_which_there_is_no_policy_is_not_begun(tmp_path: Path, ldpfl: CommandLine) -> None:
    new = ("init", "--flower", tmp_path / "app", "--recipe", "sound/records-mnist")
    assert "--set mechanism.records=600" in ldpfl.refused(*new)
    assert not (tmp_path / "app").exists()
    assert "policy.toml holds the policy" in ldpfl(*new, "--set", "mechanism.records=600").out
    shown = ldpfl("init", "--flower", tmp_path / "code", "--set", "model.name=my_package.models:Net")
    assert f"ldpfl policy init {tmp_path / 'code'} --layers" in shown.out
    assert shown.code == 0


def test_what_does_nothing_on_flower_is_named_and_so_is_what_nodes_need(tmp_path: Path, table: Path, ldpfl: CommandLine) -> None:
    new = ("init", "--flower", tmp_path / "ready", "--recipe", "quickstart", "--set", "clients.self_sampling=plain")
    assert "training.patience works only in simulations" in ldpfl.refused(*new, "--set", "training.patience=3")
    shown = ldpfl(*new).out
    for words in (
        "clients.self_sampling = plain: refused",
        "clients.count = 100: the data are divided into",
    ):
        assert words in shown
    assert "shuffling.channel = ideal-shuffler: has no effect" in shown
    assert 'LDPFL_DATA_DIR: folder of the data sets, unless bundled; --node-config "partition-id=N' in shown
    shown = ldpfl("init", "--flower", tmp_path / "own", "--data", table, "--target", "outcome", "--set", "data.partition=dirichlet").out
    assert ": a policy's min_clients, and the noise of a sum, are planned for this number of nodes in a round" in shown
    assert "With ldpfl.nodes = 0 a round waits for this number of nodes" in shown
    assert "data.partition = dirichlet: has no effect" in shown
    assert "LDPFL_DATA: the node's table" in shown
    assert "refused" not in shown


@pytest.mark.slow
def test_columns_that_say_whose_a_row_is_are_named_and_not_sent_to_nodes(tmp_path: Path, table: Path, ldpfl: CommandLine) -> None:
    pd.read_csv(table).assign(patient=list("aabbccddee"), patient_age=range(10)).to_csv(table, index=False)
    said = ldpfl("init", "--flower", tmp_path / "heart", "--data", table, "--target", "outcome", "--client", "hospital")
    assert "columns left out, because their names suggest identifiers: patient; " in said.out, said.err
    assert "--person COLUMN (data.person), such as patient, " in said.out
    settings = (tmp_path / "heart" / "pyproject.toml").read_text()
    assert '["age", "ward", "patient_age"]' in settings


@pytest.mark.slow
def test_a_column_of_sites_which_is_one_value_at_a_node_is_named_with_the_remedy(tmp_path: Path, table: Path, ldpfl: CommandLine) -> None:
    pd.read_csv(table).assign(account=range(10)).to_csv(table, index=False)
    said = " ".join(ldpfl("init", "--flower", tmp_path / "heart", "--data", table, "--target", "outcome").out.split())
    assert "suggest the site that a row is from: hospital. Where a node holds the rows of one site, such an input is the same" in said
    assert "leave it out, with --client hospital, or list the columns to use in data.columns" in said
    assert "suggest identifiers: account; list them in data.columns to use them. inputs" in said  # no client's column divides a node's rows
    done = ldpfl("init", "--flower", tmp_path / "sited", "--data", table, "--target", "outcome", "--client", "hospital")
    assert "suggest the site" not in done.out, done.err
    assert '["age", "ward"]' in (tmp_path / "sited" / "pyproject.toml").read_text()


@pytest.mark.slow
def test_identifiers_and_measurements_are_no_classes_of_an_app(tmp_path: Path, table: Path, ldpfl: CommandLine) -> None:
    """Else every node would get the list of them."""
    frame = pd.DataFrame(
        {"age": range(30), "patient": [f"P{number}" for number in range(30)], "crp": [number + 0.5 for number in range(30)]}
    )
    frame.to_csv(table, index=False)
    for target, problem in (("patient", "its name suggests an identifier"), ("crp", "--task regression")):
        refused = ldpfl("init", "--flower", tmp_path / target, "--data", table, "--target", target)
        assert f"'{target}' has 30 different values" in refused.err
        assert problem in refused.err
        assert not (tmp_path / target).exists()
