"""``ldpfl budget``: what was spent and what is left, at a glance; a mistake is one line."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from conftest import CommandLine
from ldpfl import LayerRanges, mechanisms
from ldpfl.errors import BudgetExhausted, PrivacyError
from ldpfl.mechanisms import Mechanism
from ldpfl.privacy import GaussianRelease
from ldpfl.privacy.budget import Budget
from ldpfl.privacy.budget_file import read_books, set_limit
from ldpfl.privacy.policy import Policy, Request, read_policy
from ldpfl.util import number_format

FILE = Path("budget.sqlite")
RANGES = LayerRanges(center=0.0, radius=0.1, sizes=(10,))
DUCHI = mechanisms.create("duchi", epsilon=0.5)
POLICY = Policy(
    mechanisms=("duchi", "full-dp", "none"),
    allow_unprotected=True,
    epsilon_per_unit=2.0,
    epsilon_per_round=100.0,
    lifetime_epsilon=1e6,
    rounds=10**6,
    min_clients=2,
    transports=("direct",),
)


def charge(run: str = "mnist-1", number: int = 1, mechanism: Mechanism = DUCHI, **changes: Any) -> None:
    asked: dict[str, Any] = {"cohort": 20, "transport": "direct"}
    Budget(FILE, POLICY).charge(Request.of(mechanism, RANGES, run=run, round=number, **asked | changes))


def shown(ldpfl: CommandLine) -> list[list[str]]:
    """Return the cells of the tables that ``show`` prints."""
    outcome = ldpfl("budget", "show", "--file", FILE)
    assert (outcome.code, outcome.err) == (0, "")
    return [[cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in outcome.out.splitlines()]


@pytest.fixture
def spent(ldpfl: CommandLine) -> CommandLine:
    """Two rounds of one run and three reports of another, 5 each, of a pure budget of 40."""
    set_limit(FILE, 40.0, 0.0)
    for run, number in (("mnist-1", 1), ("mnist-1", 2), ("femnist/2", 1), ("femnist/2", 1), ("femnist/2", 2)):
        charge(run, number)
    return ldpfl


def test_a_new_budget_is_set_and_shown(ldpfl: CommandLine) -> None:
    outcome = ldpfl("budget", "set", "--file", FILE, "--epsilon", "40", "--delta", "1e-6")
    assert (outcome.code, outcome.out) == (0, "budget: epsilon 40 at delta 1e-06; spent: 0\n")
    cells = shown(ldpfl)
    assert ["spent", "epsilon 0 at delta 1e-06 (0 pure)"] in cells
    assert ["reports charged", "0"] in cells
    assert "all its data" not in ldpfl("budget", "show", "--file", FILE).out  # it may come to protect single records alone


def test_what_was_spent_and_is_left_is_shown_by_run(spent: CommandLine) -> None:
    cells = shown(spent)
    assert ["spent", "epsilon 25 at delta 0 (25 pure)"] in cells
    assert ["reports charged", "5"] in cells
    assert ["rounds left like the last (duchi, epsilon 0.5 x 10 weights)", "3"] in cells
    assert ["mnist-1", "duchi", "2", "2", "10", "10"] in cells
    assert ["femnist/2", "duchi", "2", "3", "15", "15"] in cells


SUMS = """\
mechanisms = ["dp-sgd"]
protects = "record"
epsilon_per_unit = 100.0
epsilon_per_round = 100.0
lifetime_epsilon = 90.0
sum_epsilon = 2.0
rounds = 7
transports = ["sum"]
aggregator_keys = ["AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="]
"""


def test_what_was_spent_of_a_policy_is_shown(ldpfl: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget's file knows no bound on sums: only the policy has one."""
    Path("policy.toml").write_text(SUMS, encoding="utf-8")
    set_limit(FILE, 100.0)
    release = GaussianRelease("dp-sgd", 0.5, unit="record", author="ldpfl", integers=True)
    Budget(FILE, read_policy(Path("policy.toml"))).charge(Request("mnist-1", 1, release, 100, "sum", bytes(range(32))))
    plain = ldpfl("budget", "show", "--file", FILE)
    assert "sum_epsilon" not in plain.out
    assert "--policy FILE" in plain.out
    assert json.loads(ldpfl("budget", "show", "--file", FILE, "--json").out)["policy"] is None
    monkeypatch.setenv("LDPFL_POLICY", "policy.toml")  # as the SuperNode has it
    text = ldpfl("budget", "show", "--file", FILE).out
    figures = json.loads(ldpfl("budget", "show", "--file", FILE, "--json").out)["policy"]
    assert 0 < 5 * figures["sum_epsilon"]["spent"] < figures["lifetime_epsilon"]["spent"]
    assert (figures["sum_epsilon"]["allowed"], figures["rounds"], figures["delta"]) == (2.0, 7, 1e-5)
    assert f"epsilon {number_format.number(figures['sum_epsilon']['spent'])} of 2 at delta 1e-05, for whoever sees only sums" in text
    assert (
        f"epsilon {number_format.number(figures['lifetime_epsilon']['spent'])} of 90 at delta 1e-05, for whoever keeps all reports" in text
    )
    assert "1 of the policy's rounds = 7" in text
    metrics = ldpfl("deploy", "node-metrics", "--budget", FILE).out
    assert 'ldpfl_node_policy_epsilon{setting="sum_epsilon"} 2\n' in metrics
    assert f'ldpfl_node_policy_spent_epsilon{{setting="sum_epsilon"}} {figures["sum_epsilon"]["spent"]:.10g}\n' in metrics
    monkeypatch.setenv("LDPFL_POLICY", "gone.toml")
    assert "there is no policy at gone.toml" in ldpfl("budget", "show", "--file", FILE).err


def test_a_policy_for_records_shows_earlier_rounds_for_persons_as_they_count_for_a_record(ldpfl: CommandLine) -> None:
    Path("policy.toml").write_text(SUMS, encoding="utf-8")
    set_limit(FILE, 100.0)
    for_records = read_policy(Path("policy.toml"))
    release = GaussianRelease("dp-sgd", 0.5, unit="person", author="ldpfl", integers=True)
    Budget(FILE, for_records.model_copy(update={"protects": "person", "person": "patient"})).charge(
        Request("mnist-1", 1, release, 100, "sum", bytes(range(32)))
    )
    text = ldpfl("budget", "show", "--file", FILE).out
    figures = json.loads(ldpfl("budget", "show", "--file", FILE, "--policy", "policy.toml", "--json").out)
    by_policy = ldpfl("budget", "show", "--file", FILE, "--policy", "policy.toml").out
    assert "for replacing all records of any one person" in text
    assert "for replacing any one of its records" in by_policy
    assert figures["protected"] == "record"
    twice = read_books(FILE, "record").spent(1e-5)
    assert figures["spent"] == pytest.approx(twice)
    assert f"spent epsilon {number_format.number(twice)} at delta" in " ".join(by_policy.replace("│", " ").split())
    assert f"ldpfl_node_spent_epsilon {twice:.10g}\n" in ldpfl("deploy", "node-metrics", "--budget", FILE, "--policy", "policy.toml").out


def test_an_exhausted_budget_says_so_and_why(spent: CommandLine) -> None:
    for number in (3, 4, 5):
        charge(number=number)
    with pytest.raises(BudgetExhausted) as caught:
        charge(number=6)
    text = spent("budget", "show", "--file", FILE).out
    assert "0: exhausted" in text
    assert str(caught.value) in text
    assert "last refused" in text


def test_what_the_policy_declined_is_shown(spent: CommandLine) -> None:
    for _ in range(2):
        with pytest.raises(PrivacyError):
            charge(number=3, cohort=1)
    text = spent("budget", "show", "--file", FILE).out
    assert "2 refusals in all: run mnist-1, round 3: a cohort of 1 is below min_clients = 2; nothing was sent" in text


def test_noise_has_no_pure_sum_and_no_protection_has_no_end(spent: CommandLine) -> None:
    set_limit(FILE, 40.0, 1e-5)
    charge("noisy", mechanism=mechanisms.create("full-dp", epsilon=0.5))
    cells = shown(spent)
    (row,) = [row for row in cells if row[0] == "noisy"]
    assert row[1:4] == ["full-dp", "1", "1"]
    assert 0.5 < float(row[4]) < 40  # what an order costs that fits the whole budget, not so small a part of it
    assert row[5] == "inf"
    charge("open", mechanism=mechanisms.create("none"))
    cells = shown(spent)
    assert ["spent", "epsilon inf at delta 1e-05 (no pure bound)"] in cells
    assert any("values leave without protection" in cell for row in cells for cell in row)


@pytest.mark.parametrize("command", [("show",), ("export", "--format", "csv"), ("export",)])
def test_nothing_in_a_budget_steers_a_terminal(command: tuple[str, ...], spent: CommandLine) -> None:
    """The file may be somebody else's."""
    with sqlite3.connect(FILE) as connection:
        connection.execute("UPDATE limits SET at = ?", ("2026\x1b[2J\x9b31m",))
    outcome = spent("budget", *command, "--file", FILE)
    assert "\\x1b[2J" in outcome.out or command[1:] == ("--format", "csv") or "\\u001b[2J" in outcome.out
    assert not set(outcome.out + outcome.err) & set("\x1b\x9b")


def test_set_keeps_delta_and_says_what_was_before(spent: CommandLine) -> None:
    outcome = spent("budget", "set", "--file", FILE, "--epsilon", "10")
    assert outcome.out == "budget: epsilon 10 at delta 0 (before: epsilon 40 at delta 0); spent: 25\n"
    with pytest.raises(BudgetExhausted):
        charge(number=9)
    assert [grant.limit.epsilon for grant in read_books(FILE).granted] == [40.0, 10.0]
    assert any("0: exhausted" in cell for row in shown(spent) for cell in row)


def test_raising_a_used_budget_says_that_its_first_limit_decides_how_reports_count(ldpfl: CommandLine) -> None:
    set_limit(FILE, 4.33, 1e-5)
    assert "still counted" not in ldpfl("budget", "set", "--file", FILE, "--epsilon", "50").out  # unused
    charge()
    assert "tight near the budget at the first report, epsilon 50" in ldpfl("budget", "set", "--file", FILE, "--epsilon", "60").out
    assert "still counted" not in ldpfl("budget", "set", "--file", FILE, "--epsilon", "55").out  # lowered


def test_export_as_json_is_strict_and_says_what_it_holds(spent: CommandLine) -> None:
    charge("open", mechanism=mechanisms.create("none"))
    spent("budget", "set", "--file", FILE, "--epsilon", "50")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    outcome = spent("budget", "export", "--file", FILE)
    tree = json.loads(outcome.out, parse_constant=refuse)
    assert "no data, no report" in tree["holds"]
    assert tree["spent"] == {"protected": "client", "delta": 0.0, "epsilon": "infinity", "pure_sum": "infinity"}
    assert [grant["epsilon"] for grant in tree["budgets"]] == [40.0, 50.0]
    assert len(tree["charges"]) == 6
    first = tree["charges"][0]
    assert first.pop("at").endswith("+00:00")
    assert first == {
        **{"number": 1, "run": "mnist-1", "round": 1, "mechanism": "duchi", "parameter": "epsilon", "value": 0.5},
        **{"units": 10, "unit": "weight", "author": "ldpfl", "cohort": 20, "transport": "direct", "linked": 1},
        **{"person": "", "node": ""},
    }
    assert tree["charges"][-1]["value"] == "infinity"


def test_export_as_csv_holds_the_same_charges(spent: CommandLine) -> None:
    table = list(csv.DictReader(io.StringIO(spent("budget", "export", "--file", FILE, "--format", "csv").out)))
    tree = json.loads(spent("budget", "export", "--file", FILE, "--format", "json").out)
    assert table == [{name: str(value) for name, value in charge.items()} for charge in tree["charges"]]


@pytest.mark.parametrize("command", ["show", "export"])
def test_a_file_that_is_not_there_is_not_made(command: str, ldpfl: CommandLine) -> None:
    assert "there is no budget file budget.sqlite" in ldpfl.refused("budget", command, "--file", FILE)
    assert not FILE.exists()


@pytest.mark.parametrize("command", [("show",), ("export",), ("set", "--epsilon", "3")])
def test_a_damaged_file_is_one_line(command: tuple[str, ...], spent: CommandLine) -> None:
    FILE.write_bytes(FILE.read_bytes()[:5000])
    assert "nothing leaves this client" in spent.refused("budget", *command, "--file", FILE)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("set", "--file", "b", "--epsilon", "-1"), "a budget's epsilon must be finite and at least 0"),
        (("set", "--file", "b", "--epsilon", "nan"), "a budget's epsilon"),
        (("set", "--file", "b", "--epsilon", "1", "--delta", "1"), "a budget's delta"),
        (("set", "--file", "b"), "--epsilon"),
        (("set", "--file", "missing/b", "--epsilon", "1"), "cannot be made: No such file or directory"),
        (("show",), "--file"),
        (("export", "--file", "b", "--format", "xml"), "xml"),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], named: str, ldpfl: CommandLine) -> None:
    assert named in ldpfl.refused("budget", *arguments)
    assert not Path("b").exists()


def test_a_program_that_watches_over_a_node_reads_the_same_as_json(spent: CommandLine) -> None:
    with pytest.raises(PrivacyError):
        charge(number=3, cohort=1)
    found = json.loads(spent("budget", "show", "--file", FILE, "--json").out)
    assert (found["budget"], found["delta"], found["spent"], found["reports"], found["rounds_left"]) == (40, 0, 25, 5, 3)
    assert (found["last_charge"]["run"], found["last_charge"]["round"], found["protected"]) == ("femnist/2", 2, "client")
    assert found["refusals"] == 1
    assert "min_clients" in found["last_refusal"]["reason"]
    set_limit(Path("fresh.sqlite"), 1.0)
    fresh = json.loads(spent("budget", "show", "--file", "fresh.sqlite", "--json").out)
    assert (fresh["spent"], fresh["last_charge"], fresh["rounds_left"], fresh["last_refusal"]) == (0, None, None, None)
    assert fresh["protected"] is None


def test_a_budget_is_moved_by_a_command(spent: CommandLine) -> None:
    outcome = spent("budget", "move", "--file", FILE, "--to", "new.sqlite")
    assert "new.sqlite holds the budget: epsilon 40 at delta 0, 5 reports charged. The budget in budget.sqlite is 0" in outcome.out
    assert "this budget was moved to" in spent("budget", "show", "--file", FILE).out


def test_lost_reports_are_charged_to_a_backup(spent: CommandLine) -> None:
    outcome = spent("budget", "charge-lost", "--file", FILE, "--rounds", "2", "--nodes", "1")
    assert outcome.out == "7 reports charged; spent: epsilon 35 of epsilon 40 at delta 0\n"
    assert ["(lost)", "duchi", "2", "2", "10", "10"] in shown(spent)
    lost = ("--rounds", "2", "--nodes", "1", "--like", "9")
    assert "no charge with the number 9" in spent.refused("budget", "charge-lost", "--file", FILE, *lost)


def test_a_policy_for_more_than_was_protected_shows_no_bound(ldpfl: CommandLine) -> None:
    Path("policy.toml").write_text(SUMS, encoding="utf-8")
    Path("wider.toml").write_text(SUMS.replace('"record"', '"person"\nperson = "patient"'), encoding="utf-8")
    set_limit(FILE, 100.0)
    release = GaussianRelease("dp-sgd", 0.5, unit="record", author="ldpfl", integers=True)
    Budget(FILE, read_policy(Path("policy.toml"))).charge(Request("mnist-1", 1, release, 100, "sum", bytes(range(32))))
    figures = json.loads(ldpfl("budget", "show", "--file", FILE, "--policy", "wider.toml", "--json").out)
    assert (figures["policy"]["lifetime_epsilon"]["spent"], figures["policy"]["sum_epsilon"]["spent"]) == ("infinity", "infinity")
    text = " ".join(ldpfl("budget", "show", "--file", FILE, "--policy", "wider.toml").out.split())
    assert "The policy's bounds show inf: the reports protected less than the policy does" in text
    assert 'setting="lifetime_epsilon"} inf\n' in ldpfl("deploy", "node-metrics", "--budget", FILE, "--policy", "wider.toml").out


def test_rounds_left_are_those_that_budget_and_policy_both_allow(ldpfl: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where the two count the same reports to other epsilons, a line says why."""
    Path("policy.toml").write_text(SUMS, encoding="utf-8")
    set_limit(FILE, 5.0)
    release = GaussianRelease("dp-sgd", 0.1, unit="record", author="ldpfl", integers=True)

    def charged(number: int) -> None:
        request = Request("mnist-1", number, release, 100, "sum", bytes(range(32)))
        Budget(FILE, read_policy(Path("policy.toml"))).charge(request)

    for number in range(1, 6):
        charged(number)
    alone = json.loads(ldpfl("budget", "show", "--file", FILE, "--json").out)["rounds_left"]
    assert alone > 2
    assert f"ldpfl_node_rounds_left {alone}\n" in ldpfl("deploy", "node-metrics", "--budget", FILE).out
    assert "upper bounds for the same reports" not in ldpfl("budget", "show", "--file", FILE).out
    monkeypatch.setenv("LDPFL_POLICY", "policy.toml")
    text = ldpfl("budget", "show", "--file", FILE).out
    assert f"2 by the policy; the budget alone would allow {alone:,}" in text
    words = " ".join(text.split())
    assert "are upper bounds for the same reports" in words
    assert "a report leaves only if it keeps both limits" in words.lower()
    assert json.loads(ldpfl("budget", "show", "--file", FILE, "--json").out)["rounds_left"] == 2
    assert "ldpfl_node_rounds_left 2\n" in ldpfl("deploy", "node-metrics", "--budget", FILE).out
    charged(6)
    charged(7)
    assert f"0 by the policy; the budget alone would allow {alone - 2:,}" in ldpfl("budget", "show", "--file", FILE).out


def test_a_bound_on_sums_limits_the_rounds_left(ldpfl: CommandLine) -> None:
    """As many rounds are left as can then be charged."""
    Path("policy.toml").write_text(SUMS.replace("rounds = 7", "rounds = 1000").replace("sum_epsilon = 2.0", "sum_epsilon = 1.0"))
    set_limit(FILE, 100.0)
    budget = Budget(FILE, read_policy(Path("policy.toml")))
    release = GaussianRelease("dp-sgd", 0.5, unit="record", author="ldpfl", integers=True)
    budget.charge(Request("mnist-1", 1, release, 100, "sum", bytes(range(32))))
    shown = ldpfl("budget", "show", "--file", FILE, "--policy", "policy.toml", "--json")
    left = json.loads(shown.out)["rounds_left"]
    for number in range(left):
        budget.charge(Request("mnist-1", 2 + number, release, 100, "sum", bytes(range(32))))
    assert 0 < left < 100
    with pytest.raises(BudgetExhausted, match="sum_epsilon"):
        budget.charge(Request("mnist-1", 2 + left, release, 100, "sum", bytes(range(32))))
