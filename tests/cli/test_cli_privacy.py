"""Commands about privacy: plan, ledger and audit print what holds, and answer every mistake with one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from brought_package import install
from conftest import TINY_TOML, CommandLine
from ldpfl import LayerRanges
from ldpfl.data import load
from ldpfl.errors import Declined
from ldpfl.experiments.build import build
from ldpfl.experiments.config import parse_config
from ldpfl.experiments.nodes_asked import Participation
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.mechanisms import Facts, read_settings
from ldpfl.privacy import BinaryRelease, Ledger, RoundEvent
from ldpfl.privacy.accounting import account
from ldpfl.privacy.events import OURS
from ldpfl.privacy.policy import Policy, Request
from ldpfl.simulation import simulate

ONE_BIT = ("--weights", "1", "--rounds", "1")
"""What a shuffler hides of one bit is known at once; of many, after seconds."""

DIRECT = ("--set", "shuffling.channel=direct")


def ledger_of(rounds: int = 2, *, cohort: int = 100, channel: Any = "direct") -> Ledger:
    ledger = Ledger()
    for number in range(1, rounds + 1):
        ledger = ledger.charge(RoundEvent(number, BinaryRelease("duchi", 1.0, 1, author=OURS), cohort, 100, number, channel=channel))
    return ledger


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    """A run folder after two of three rounds, with a delta of its own, whose reports go to the server directly."""
    overrides = ["shuffling.channel=direct", "privacy.delta=1e-3"]
    folder, config = RunFolder(tmp_path_factory.mktemp("cli") / "tiny"), parse_config(TINY_TOML, overrides, origin="test")
    folder.open(config, resume=False)
    federation, start = build(config, load("mnist", tiny_data), torch.device("cpu"))
    for checkpoint in simulate(federation, start, 2):
        folder.save_round(checkpoint)
    return folder.path


def figures(ldpfl: CommandLine, *arguments: str | Path) -> dict[str, Any]:
    """Expect nothing but strict JSON on stdout, and return it."""
    outcome = ldpfl(*arguments, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.err == ""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    tree: dict[str, Any] = json.loads(outcome.out, parse_constant=refuse)
    return tree


# --- ledger -----------------------------------------------------------------------------------------------------------


def test_the_ledger_of_a_run_is_accounted_at_its_own_delta_whether_finished_or_not(ldpfl: CommandLine, run: Path) -> None:
    found = figures(ldpfl, "ledger", run)
    assert found.items() >= account(Ledger.load(run / "ledger.json"), 1e-3).to_dict().items()
    assert (found["rounds"], found["delta"], found["local_pure"]) == (2, 1e-3, 2.0 * 4010 * 2)
    text = ldpfl("ledger", run).out
    for word in ("2 rounds", "delta 0.001", "paper's claim", "16,040 pure", "no shuffled number: reports reach the server"):
        assert word in text, word


def test_a_ledger_file_is_accounted_by_itself(ldpfl: CommandLine, run: Path) -> None:
    Path("kept.json").write_bytes((run / "ledger.json").read_bytes())
    found = figures(ldpfl, "ledger", "kept.json")
    assert (found["delta"], found["local_pure"]) == (1e-5, 16_040.0)
    assert found["local"] > figures(ldpfl, "ledger", run)["local"]
    assert figures(ldpfl, "ledger", run / "ledger.json")["delta"] == 1e-3  # in a run's folder, it is the run


def test_a_recipe_is_accounted_before_it_is_run(ldpfl: CommandLine) -> None:
    found = figures(ldpfl, "ledger", "ldp-fl/mnist", *DIRECT, "--set", "training.rounds=2", "--set", "mechanism.epsilon=0.5")
    assert (found["rounds"], found["per_report"], found["local_pure"]) == (2, 0.5, 0.5 * 21_840 * 2)
    assert list(Path().iterdir()) == []


def test_a_config_file_is_accounted_before_it_is_run(ldpfl: CommandLine, config_file: Path) -> None:
    found = figures(ldpfl, "ledger", config_file, *DIRECT, "--set", "privacy.delta=0.01")
    assert (found["rounds"], found["per_report"], found["delta"]) == (3, 2.0, 0.01)


def test_no_file_is_written_under_the_name_of_another_kind(ldpfl: CommandLine, run: Path) -> None:
    Path("rows.csv").write_text("x\n1\n")
    page, certificate = (("report", run), "page.pdf", "page.html"), (("certify", run), "made.pdf", "made.json")
    for command, name, meant in (page, certificate, (("predict", run, "rows.csv"), "told.xlsx", "told.csv")):
        said = " ".join(ldpfl.refused(*command, "--out", name).split())
        assert f"cannot be written to {name}, because" in said
        assert f"name the file {meant}" in said
        assert not Path(name).exists()
    assert ldpfl("certify", run, "--out", "made").code == 0  # a name that says nothing


NET = """
import pathlib
import torch

pathlib.Path("was_run").touch()


class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(784, 10)

    def forward(self, images):
        return super().forward(images.flatten(1))


def anything(*arguments):
    raise SystemExit
"""


@pytest.mark.thorough_except("model.name")
@pytest.mark.parametrize("key", ["model.name", "data.name", "data.features", "data.partition", "task.name"])
def test_no_code_that_a_file_names_is_run_to_account_or_plan_it(key: str, ldpfl: CommandLine, tmp_path: Path, run: Path) -> None:
    Path("net.py").write_text(NET)
    file = tmp_path / "theirs.toml"
    file.write_text(parse_config(TINY_TOML, [f"{key}=net.py:anything"], origin="test").to_toml())
    for planning in (("ledger", file, *DIRECT), ("plan", file, "--cost")):
        said = " ".join(ldpfl.refused(*planning).split())
        assert f"names code, {key} = net.py:anything, but ldpfl does not run code that only a file names" in said
        assert f"--set {key}=net.py:anything" in said
    theirs = shutil.copytree(run, tmp_path / "theirs")
    (theirs / "kind.txt").write_text("ready app on Flower\n")  # in a simulation, this ledger would contradict a config that names code
    Participation(begun=len(RunFolder(run).ledger().events)).save(RunFolder(theirs).participation_path)
    config = RunFolder(theirs).config().to_toml()
    RunFolder(theirs).config_path.write_text(parse_config(config, [f"{key}=net.py:anything"], origin="test").to_toml())
    for command in ("ledger", "show", "certify", "report"):
        assert ldpfl(command, theirs).code == 0, command
    ldpfl("export", theirs, tmp_path / "given")
    assert not Path("was_run").exists()


def test_code_is_run_for_accounting_where_the_one_who_asks_names_it(ldpfl: CommandLine, tmp_path: Path) -> None:
    Path("net.py").write_text(NET)
    file = tmp_path / "own.toml"
    file.write_text(parse_config(TINY_TOML, ["model.name=net.py:Net"], origin="test").to_toml())
    found = figures(ldpfl, "ledger", file, *DIRECT, "--set", "model.name=net.py:Net")
    assert found["local_pure"] == 2.0 * 7_850 * 3
    assert Path("was_run").exists()


def test_delta_and_colluding_clients_can_be_chosen(ldpfl: CommandLine) -> None:
    ledger_of(1, channel="ideal-shuffler").save(Path("one.json"))
    found = figures(ldpfl, "ledger", "one.json", "--delta", "1e-3", "--colluding", "40")
    assert found["colluding"] == 40
    assert found.items() >= account(ledger_of(1, channel="ideal-shuffler"), 1e-3, 40).to_dict().items()
    assert "the other 59 clients are honest" in " ".join(ldpfl("ledger", "one.json", "--colluding", "40").out.split())


@pytest.mark.parametrize(
    ("channel", "why"),
    [("random-delay", "a random delay is not a shuffler"), ("direct", "reports reach the server with their sender")],
)
def test_where_there_is_no_shuffled_number_the_table_says_why(channel: str, why: str, ldpfl: CommandLine) -> None:
    ledger_of(2, channel=channel).save(Path("a.json"))
    assert f"no shuffled number: {why}" in ldpfl("ledger", "a.json").out


def test_a_delta_that_is_not_below_one_over_n_is_warned_of(ldpfl: CommandLine) -> None:
    ledger_of(2).save(Path("a.json"))
    assert "warning: delta 0.05 is not below 1/n" in ldpfl("ledger", "a.json", "--delta", "0.05").out
    assert len(figures(ldpfl, "ledger", "a.json", "--delta", "0.05")["warnings"]) == 1


BAD_LEDGERS: dict[str, tuple[Callable[[str], str], str]] = {
    "another version": (lambda text: text.replace('"version": 3', '"version": 4'), "version 4, and this ldpfl reads version 3"),
    "an unknown event": (lambda text: text.replace('"binary"', '"binari"'), "unknown kind of release 'binari': did you mean 'binary'?"),
    "another file": (lambda text: '{"accuracy": 0.9}', "is not a ledger"),
    "half of it": (lambda text: text[:100], "is not valid JSON"),
    "nothing released": (lambda text: '{"format": "ldpfl-ledger", "version": 3, "events": []}', "the ledger is empty"),
    "a name with control characters": (
        lambda text: text.replace('"mechanism": "duchi"', '"mechanism": "a\\nb\\u001b[2J"').replace('"epsilon": 1.0', '"epsilon": -1.0'),
        "not printable",
    ),
    "a lone surrogate": (
        lambda text: text.replace('"mechanism": "duchi"', '"mechanism": "\\ud800"').replace('"epsilon": 1.0', '"epsilon": -1.0'),
        "not printable",
    ),
}


@pytest.mark.parametrize("name", BAD_LEDGERS)
def test_a_file_that_is_no_ledger_gets_one_line(name: str, ldpfl: CommandLine) -> None:
    change, named = BAD_LEDGERS[name]
    Path("bad.json").write_text(change(ledger_of().to_json()), encoding="utf-8")
    line = ldpfl.refused("ledger", "bad.json")
    assert named in line
    assert line.isprintable()
    assert "bad.json" in line or name == "nothing released"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nosuch"], "nosuch"),
        (["ldp-fl/mnits"], "did you mean 'ldp-fl/mnist'"),
        (["missing.toml"], "missing.toml"),
        (["missing.json"], "missing.json"),
        (["."], "holds no run"),
        (["a.json", "--delta", "0"], "the pure figures (delta = 0) are given in any case"),
        (["a.json", "--delta", "1"], "delta"),
        (["a.json", "--delta", "nan"], "delta"),
        (["a.json", "--delta", "x"], "--delta"),
        (["a.json", "--colluding", "100"], "is 100, expected 0 to 99"),
        (["a.json", "--colluding", "-1"], "--colluding"),
        (["a.json", "--set", "seed=1"], "a ledger, which has none: leave them out"),
        (["ldp-fl/mnist", "--set", "seeed=1"], "seeed"),
        (["a.json", "--collude", "1"], "--collude"),
        ([], "RUN|RECIPE"),
    ],
)
def test_a_mistake_about_a_ledger_gets_one_line(arguments: list[str], named: str, ldpfl: CommandLine) -> None:
    ledger_of().save(Path("a.json"))
    assert named in ldpfl.refused("ledger", *arguments)


def test_a_ledger_that_is_not_there_is_not_taken_for_a_recipe(ldpfl: CommandLine) -> None:
    """A mistyped file name, for instance; a list of recipes would lead astray."""
    assert "recipe" not in ldpfl.refused("ledger", "runs/one/ledger.json")


def test_a_run_that_released_nothing_yet_says_so(ldpfl: CommandLine) -> None:
    RunFolder(Path("new")).open(parse_config(TINY_TOML, [], origin="test"), resume=False)
    assert "released nothing yet" in ldpfl.refused("ledger", "new")
    assert "a run, whose settings are fixed: leave them out" in ldpfl.refused("ledger", "new", "--set", "seed=1")


# --- plan -------------------------------------------------------------------------------------------------------------


def test_a_plan_prints_what_it_would_guarantee_and_cost(ldpfl: CommandLine) -> None:
    text = ldpfl("plan", "--epsilon", "1", "--clients", "100", *ONE_BIT).out
    for word in ("duchi, epsilon 1 a report", "100", "1; 1", "std 0.01623", "1 bytes", "paper's claim", "0.4078", "whole run"):
        assert word in text, word


def test_all_settings_reach_the_plan(ldpfl: CommandLine) -> None:
    options = {"epsilon": 0.5, "clients": 60, "weights": 2, "rounds": 1, "delta": 1e-4, "participation": 0.5, "radius": 0.2, "colluding": 3}
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    found = figures(ldpfl, "plan", *arguments, "--mechanism", "duchi", "--channel", "random-delay", "--self-sampling")
    assert found.items() >= {**options, "mechanism": "duchi", "channel": "random-delay", "self_sampling": True, "cohort": 30}.items()
    assert (found["local_pure"], found["bytes_per_client"]) == (1.0, 1)


def test_without_noise_a_plan_promises_nothing(ldpfl: CommandLine) -> None:
    arguments = ["plan", "--epsilon", "1", "--clients", "100", *ONE_BIT, "--mechanism", "none"]
    assert figures(ldpfl, *arguments)["local"] == "infinity"
    text = ldpfl(*arguments).out
    assert "no shuffled number: values leave without protection" in text
    assert "epsilon 1 a report" not in text


@pytest.mark.slow
def test_the_clients_for_a_target_are_found_and_planned_for(ldpfl: CommandLine) -> None:
    arguments = ["plan", "--epsilon", "1", "--target-central", "0.8", *ONE_BIT]
    found = figures(ldpfl, *arguments)
    assert found["clients"] == found["clients_needed"] >= found["clients_necessary"]
    assert found["shuffled_upper_adaptive"] <= found["target_central"] == 0.8
    assert found["epsilon_allowed"] is None
    assert f"{found['clients_needed']} are enough" in ldpfl(*arguments).out


@pytest.mark.slow
def test_the_epsilon_for_a_target_is_found_and_planned_for(ldpfl: CommandLine) -> None:
    arguments = ["plan", "--clients", "100", "--target-central", "0.5", *ONE_BIT]
    found = figures(ldpfl, *arguments)
    assert found["epsilon"] == found["epsilon_allowed"] > 1
    assert 0.49 < found["shuffled_upper_adaptive"] <= 0.5
    assert found["clients_needed"] is None
    assert f"{found['epsilon']:.4g}" in ldpfl(*arguments).out


@pytest.mark.slow
def test_with_both_given_both_are_found_and_the_plan_is_as_given(ldpfl: CommandLine) -> None:
    found = figures(ldpfl, "plan", "--epsilon", "1", "--clients", "40", "--target-central", "0.8", *ONE_BIT)
    assert (found["epsilon"], found["clients"]) == (1.0, 40)
    assert found["clients_needed"] < 40
    assert found["epsilon_allowed"] > 1


@pytest.mark.parametrize("suffix", ["svg", "png"])
@pytest.mark.slow
@pytest.mark.thorough
def test_a_plot_is_drawn(suffix: str, ldpfl: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ldpfl.api.planning.client_counts_to_plot", lambda setting: [10, 20])
    outcome = ldpfl("plan", "--epsilon", "1", "--clients", "20", *ONE_BIT, "--plot", f"plot.{suffix}", "--target-central", "0.8")
    assert outcome.code == 0, outcome.err
    assert f"plot: plot.{suffix}" in outcome.out
    assert Path(f"plot.{suffix}").read_bytes()[:5] in (b"<?xml", b"\x89PNG\r")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--plot", "plot.jpg"], ".svg, .png, .pdf"),
        (["--plot", "nowhere/plot.svg"], "nowhere"),
        (["--plot", "plot.svg", "--mechanism", "none"], "none"),
        (["--plot", "plot.svg", "--channel", "direct"], "ideal-shuffler"),
    ],
)
def test_a_plot_that_cannot_be_drawn_is_refused_before_the_work(
    arguments: list[str], named: str, ldpfl: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work takes half a minute for the largest settings."""

    def work(*arguments: object) -> None:
        raise RuntimeError("planned before the plot was looked at")

    monkeypatch.setattr("ldpfl.api.planning.plan_setting", work)
    assert named in ldpfl.refused("plan", "--epsilon", "1", "--clients", "100", *arguments)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "the plan lacks --epsilon and --clients: give"),
        (["--epsilon", "1"], "--epsilon and --clients"),
        (["--regime", "records", "--target", "1"], "but --clients is missing: give all three"),
        (["--target-central", "4"], "--epsilon (to find the clients) or --clients"),
        (["--epsilon", "1", "--clients", "0"], "at least 1"),
        (["--epsilon", "1", "--clients", "5", "--weights", "0"], "at least 1"),
        (["--epsilon", "1", "--clients", "5", "--rounds", "0"], "at least 1"),
        (["--epsilon", "1", "--clients", "200000000"], "clients is 200,000,000, expected at most 100,000,000"),
        (["--epsilon", "1", "--clients", "5", "--weights", "10000000000"], "weights x rounds is 100,000,000,000, expected at most"),
        (["--epsilon", "0", "--clients", "5"], "epsilon"),
        (["--epsilon", "nan", "--clients", "5"], "epsilon"),
        (["--epsilon", "1e-12", "--clients", "5"], "epsilon"),
        (["--epsilon", "one", "--clients", "5"], "--epsilon"),
        (["--epsilon", "1", "--clients", "5", "--delta", "0"], "the pure figures (delta = 0) are given in any case"),
        (["--epsilon", "1", "--clients", "5", "--delta", "1"], "delta"),
        (["--epsilon", "1", "--clients", "5", "--delta", "nan"], "delta"),
        (["--epsilon", "1", "--target-central", "4", "--delta", "0"], "delta"),
        (["--epsilon", "1", "--clients", "5", "--participation", "0"], "participation"),
        (["--epsilon", "1", "--clients", "5", "--participation", "nan"], "participation"),
        (["--epsilon", "1", "--clients", "5", "--radius", "0"], "radius"),
        (["--epsilon", "1", "--clients", "5", "--colluding", "5"], "colluding"),
        (["--epsilon", "1", "--clients", "5", "--mechanism", "duchy"], "did you mean 'duchi'"),
        (["--epsilon", "1", "--clients", "5", "--channel", "delay"], "did you mean 'random-delay'"),
        (["--epsilon", "1", "--target-central", "0"], "target"),
        (["--epsilon", "1", "--target-central", "nan"], "target"),
        (["--epsilon", "1", "--target-central", "4", "--channel", "direct"], "ideal-shuffler"),
        (["--epsilon", "1", "--target-central", "4", "--mechanism", "none"], "none"),
        (["--epsilon", "1", "--target-central", "4", "--self-sampling", "--participation", "0.1"], "self-sampling"),
    ],
)
def test_a_mistake_about_a_plan_gets_one_line(arguments: list[str], named: str, ldpfl: CommandLine) -> None:
    assert named in ldpfl.refused("plan", *arguments)


@pytest.mark.slow
def test_a_target_out_of_reach_gets_one_line(ldpfl: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ldpfl.experiments.planning.planner.MOST_CLIENTS", 1000)
    assert "a smaller epsilon" in ldpfl.refused("plan", "--epsilon", "1", "--target-central", "0.01", *ONE_BIT)


def test_a_large_epsilon_is_planned_with_a_warning(ldpfl: CommandLine) -> None:
    outcome = ldpfl("plan", "--epsilon", "40", "--clients", "100", *ONE_BIT)
    assert outcome.code == 0
    assert "warning: epsilon 40 is more than 32 random bits express: 22.18 is realised" in outcome.out


def test_a_client_alone_is_planned_with_the_local_figures(ldpfl: CommandLine) -> None:
    found = figures(ldpfl, "plan", "--epsilon", "1", "--clients", "1", "--weights", "20", "--rounds", "3")
    assert found["shuffled_upper_adaptive"] == found["local"]


# --- audit ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sound_mechanism_passes_its_audit(ldpfl: CommandLine) -> None:
    outcome = ldpfl("audit", "duchi", "--epsilon", "2", "--trials", "20000", "--seed", "1")
    assert outcome.code == 0, outcome.err
    assert "FAILED" not in outcome.out
    assert "ok" in outcome.out
    assert figures(ldpfl, "audit", "duchi", "--trials", "20000", "--seed", "1")["passed"] is True


def test_a_faulty_mechanism_fails_its_audit_with_an_exit_code_of_its_own(
    ldpfl: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", monkeypatch)
    arguments = ["audit", "careless", "--trials", "20000", "--seed", "1"]
    outcome = ldpfl(*arguments)
    assert outcome.code == 3
    assert "FAILED" in outcome.out
    assert outcome.err == ""
    as_json = ldpfl(*arguments, "--json")
    assert as_json.code == 3
    assert json.loads(as_json.out)["passed"] is False


@pytest.mark.slow
@pytest.mark.thorough
def test_a_mechanism_of_others_that_wraps_one_of_ours_is_its_author_s_claim_everywhere(
    ldpfl: CommandLine, tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", monkeypatch, name="wrapped", place="careless_package:WrappedSettings")
    config = tmp_path / "wrapped.toml"
    config.write_text(TINY_TOML.replace('"duchi"', '"wrapped"').replace("rounds = 3", "rounds = 1"), encoding="utf-8")
    outcome = ldpfl("run", config, "--out", "made", "--data-dir", tiny_data, "--device", "cpu", "--no-baseline")
    assert outcome.code == 0, outcome.err
    assert "author's claim" in outcome.out
    assert "nothing is proved of wrapped" in outcome.out
    (event,) = Ledger.from_json(Path("made/ledger.json").read_text(encoding="utf-8")).events
    assert event.release.author == "ldpfl.mechanisms.duchi:Duchi (changed)"
    assert figures(ldpfl, "ledger", "made")["status"] == "author's claim"
    certified = ldpfl("certify", "made", "--out", "certificate.json")
    assert certified.code == 0, certified.err
    verified = ldpfl("verify", "certificate.json")
    assert verified.code == 4
    assert "author's claim" in verified.out
    policy = Policy(mechanisms=("duchi",), epsilon_per_unit=9, epsilon_per_round=1e6, lifetime_epsilon=1e7, rounds=5, min_clients=2)
    ranges = LayerRanges(torch.zeros(1), torch.ones(1), (4,))
    asked = Request.of(read_settings({"name": "wrapped"}).build(Facts(ranges)), ranges, run="r", round=1, cohort=20, transport="direct")
    with pytest.raises(Declined, match="'wrapped' is not among the policy's mechanisms"):
        policy.check(asked)
    with pytest.raises(Declined, match="has the name of a built-in mechanism"):
        policy.check(replace(asked, release=replace(asked.release, mechanism="duchi")))


def test_a_run_is_audited_by_a_canary(ldpfl: CommandLine, run: Path, tiny_data: Path) -> None:
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    outcome = ldpfl("audit", run, "--data-dir", tiny_data, "--trials", "100", "--seed", "1", "--device", "cpu")
    assert outcome.code == 0, outcome.err
    for word in ("canary", "8 clients", "4,010", "100 trials"):
        assert word in outcome.out, word
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["duchy"], "did you mean 'duchi'"),
        (["nowhere/run"], "neither a run's folder nor a mechanism"),
        ([".", "--epsilon", "2"], "--epsilon works only for a mechanism"),
        (["."], "holds no run"),
        (["duchi", "--epsilon", "0"], "epsilon"),
        (["duchi", "--epsilon", "nan"], "epsilon"),
        (["duchi", "--trials", "0"], "--trials"),
        (["duchi", "--error-rate", "0"], "error"),
        (["duchi", "--error-rate", "nan"], "error"),
        (["duchi", "--seed", "-1"], "--seed"),
        ([], "MECHANISM|RUN"),
    ],
)
def test_a_mistake_about_an_audit_gets_one_line(arguments: list[str], named: str, ldpfl: CommandLine) -> None:
    assert named in ldpfl.refused("audit", *arguments)


# --- help -------------------------------------------------------------------------------------------------------------

OPTIONS = {
    "ledger": ["RUN|RECIPE", "--delta", "--colluding", "--set", "--json"],
    "plan": [
        *("--epsilon", "--clients", "--weights", "--rounds", "--delta", "--mechanism", "--participation", "--self-sampling", "--radius"),
        *("--channel", "--colluding", "--target-central", "--plot", "--json"),
    ],
    "audit": ["MECHANISM|RUN", "--epsilon", "--trials", "--error-rate", "--seed", "--data-dir", "--device", "--json"],
}


@pytest.mark.parametrize("command", OPTIONS)
def test_the_help_names_every_option(command: str, ldpfl: CommandLine) -> None:
    outcome = ldpfl(command, "--help")
    assert outcome.code == 0
    for option in OPTIONS[command]:
        assert option in outcome.out, option
    assert command in ldpfl("--help").out


@pytest.mark.thorough
def test_a_regime_says_on_which_settings_its_figures_rest(ldpfl: CommandLine) -> None:
    printed = ldpfl("plan", "--regime", "local", "--target", "4", "--clients", "500", "--weights", "20", "--rounds", "2").out
    assert "norm 1, magnitude_share 0" in " ".join(printed.split())


def test_a_plan_of_records_says_that_it_counts_one_each_where_none_are_given(ldpfl: CommandLine) -> None:
    plan = ("plan", "--regime", "records", "--persons", "--target", "8", "--clients", "5", "--weights", "20", "--rounds", "2")
    assert "5, 1 person each; --records sets how many" in " ".join(ldpfl(*plan).out.split())
    assert "5, 100 persons each │" in " ".join(ldpfl(*plan, "--records", "100").out.split())
