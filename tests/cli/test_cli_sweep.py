"""``ldpfl sweep``: from a file to a table, again without training, and what it says when something is wrong."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from conftest import CommandLine
from ldpfl import api
from ldpfl.util.number_format import number

SWEEP = """
name = "tiny"
recipe = "quickstart"
settings = ['data.name="mnist"', 'model.name="logistic-regression"', "clients.count=4", "training.epochs=1", "training.rounds=1"]
seeds = [0, 1]
plot_against = "budget"

[axes]
"mechanism.epsilon" = [1.0, 4.0]

[variants]
"plain" = ['mechanism.name="none"']
"bits" = []
"""
SHORT = SWEEP.replace("[0, 1]", "[0]").replace("[1.0, 4.0]", "[1.0]")
"""Two runs in all."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(SWEEP, encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_sweep_ends_in_a_table_and_is_not_run_twice(ldpfl: CommandLine, file: Path, tiny_data: Path, tmp_path: Path) -> None:
    command: list[str | Path] = ["sweep", file, "--data-dir", tiny_data, "--out", tmp_path / "s", "--set", "shuffling.channel=direct"]
    outcome = ldpfl(*command, "--set", "training.batch_size=5")
    assert outcome.code == 0, outcome.err
    for word in ("tiny, 2 seeds", "plain", "bits", "worth its price", "none under"):
        assert word in outcome.out, word
    assert "8/8: bits, epsilon 4.0, seed 1" in outcome.err
    found = json.loads((tmp_path / "s" / "rows.json").read_text(encoding="utf-8"))
    assert [(row["variant"], row["point"], len(row["score"])) for row in found] == [
        ("plain", {}, 2),
        ("bits", {"mechanism.epsilon": 1.0}, 2),
        ("bits", {"mechanism.epsilon": 4.0}, 2),
    ]
    assert (tmp_path / "s" / "score.svg").stat().st_size > 1000
    assert not (tmp_path / "s" / "noise.svg").exists()
    assert "noise.svg" not in outcome.out

    runs = {path: path.stat().st_mtime_ns for path in (tmp_path / "s" / "runs").rglob("result.json")}
    assert len(runs) == 6
    again = ldpfl(*command, "--set", "training.batch_size=5", "--json")
    assert again.code == 0, again.err
    assert json.loads(again.out) == {"name": "tiny", "rows": found, "together": None}
    assert {path: path.stat().st_mtime_ns for path in runs} == runs
    other = ldpfl(*command)
    assert (other.code, other.err.count("\n")) == (2, 1)
    assert "another sweep" in other.err


def test_a_variant_that_does_not_fit_costs_no_training(ldpfl: CommandLine, file: Path, tiny_data: Path, tmp_path: Path) -> None:
    file.write_text(SWEEP + '"wide" = [\'mechanism.name="harmony"\', "mechanism.group=20000"]\n', encoding="utf-8")
    outcome = ldpfl("sweep", file, "--data-dir", tiny_data, "--out", tmp_path / "s")
    assert outcome.code == 2
    assert "wide, epsilon 1.0, seed 0" in outcome.err
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_an_interrupted_sweep_says_how_to_go_on(
    ldpfl: CommandLine, file: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(SHORT, encoding="utf-8")
    command: list[str | Path] = ["sweep", file, "--data-dir", tiny_data, "--out", tmp_path / "s", "--set", "shuffling.channel=direct"]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ldpfl.experiments.sweep_run.rows", interrupted)  # after the first run
        outcome = ldpfl(*command)
    assert outcome.code == 130
    assert len(list((tmp_path / "s" / "runs").rglob("result.json"))) == 1
    file.unlink()
    again = ldpfl(*hint(outcome.err))
    assert again.code == 0, again.err
    assert len(list((tmp_path / "s" / "runs").rglob("result.json"))) == 2


@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_that_fails_is_named_and_the_other_runs_go_on(ldpfl: CommandLine, tmp_path: Path) -> None:
    table, out = tmp_path / "counts.csv", tmp_path / "s"
    table.write_text("age,visits\n" + "".join(f"{20 + row % 50},{row % 7}\n" for row in range(400)), encoding="utf-8")
    settings = ["--set", "clients.count=40", "--set", "training.rounds=1"]
    command: list[str | Path] = ["sweep", "--data", table, "--target", "visits", "--task", "poisson", *settings, "--out", out]
    outcome = ldpfl(*command, "--axis", "privacy.target_epsilon=0.5,200", "--json")
    assert outcome.code == 2
    failed, finished = json.loads(outcome.out)["rows"]
    assert (len(failed["failed"]), failed["score"]) == (1, [])
    assert (finished["failed"], len(finished["score"])) == ([], 1)
    for part in ("target_epsilon 0.5", "the noise was too large", "dealt to 40 made-up clients", "data.client", "a smaller clients.count"):
        assert part in failed["failed"][0], part
    assert outcome.err.splitlines()[-1].startswith("ldpfl: 1 run failed")
    runs = {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("result.json")}
    assert len(runs) == 1

    again = ldpfl(*hint(outcome.err))
    assert again.code == 2
    assert {path: path.stat().st_mtime_ns for path in runs} == runs
    assert any(" 0.5 " in line and " failed " in line for line in again.out.splitlines())
    assert "deviance explained" in again.out
    assert "failed: as it is, target_epsilon 0.5, seed 0: the noise" in " ".join(again.out.split())

    all_failed = ldpfl(*command[:-1], tmp_path / "none", "--axis", "privacy.target_epsilon=0.5,0.6")
    assert (all_failed.code, all_failed.out) == (2, "")
    assert all_failed.err.splitlines()[-1].startswith("ldpfl: the noise was too large")


@pytest.mark.slow
@pytest.mark.thorough
def test_a_sweep_in_which_nobody_takes_part_has_a_table_too(ldpfl: CommandLine, file: Path, tiny_data: Path, tmp_path: Path) -> None:
    # One client that joins with a probability in (0, 1): with some seeds it stays away from the only round.
    text = SWEEP.replace("clients.count=4", "clients.count=1").replace("seeds = [0, 1]", f"seeds = {list(range(6))}")
    file.write_text(text.replace('"bits" = []', '"bits" = [\'clients.self_sampling="plain"\']'), encoding="utf-8")
    outcome = ldpfl("sweep", file, "--data-dir", tiny_data, "--out", tmp_path / "s")
    assert outcome.code == 0, outcome.err


NOISY = """
name = "noisy"
recipe = "ladp-fl/desk"
settings = ['model.name="logistic-regression"', "clients.count=4", "clients.fraction=0.5", "training.rounds=2", "training.batch_size=10"]
seeds = [0, 1]

[axes]
"mechanism.epsilon" = [0.2, 0.5]

[variants]
"no noise" = ['mechanism.name="none"']
"to NaN" = ['mechanism.name="none"', "training.learning_rate=3e38", 'training.clip_norm="off"']
"Full DP" = ['mechanism.name="full-dp"']
"LaDP-FL" = []
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_a_sweep_over_noise_schedules_ends_with_budget_and_noise_by_round(
    ldpfl: CommandLine, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a variant that stops, and after an interruption."""
    file, out = tmp_path / "noisy.toml", tmp_path / "s"
    file.write_text(NOISY, encoding="utf-8")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ldpfl.experiments.sweep_run.rows", interrupted)
        assert ldpfl("sweep", file, "--data-dir", tiny_data, "--out", out).code == 130
    assert not (out / "noise.svg").exists()
    outcome = ldpfl("sweep", file, "--data-dir", tiny_data, "--out", out)
    assert outcome.code == 0, outcome.err
    assert f"noise and score by round: {out / 'noise.svg'}" in outcome.out
    assert "to NaN stopped" in outcome.out
    text = (out / "noise.svg").read_text(encoding="utf-8")
    for word in ("NOT a guarantee", "Full DP (ledger: infinite)", "LaDP-FL (ledger: infinite)", "epsilon 0.2", "epsilon 0.5"):
        assert word in text, word
    assert "to NaN" not in text

    results = [json.loads(path.read_text(encoding="utf-8")) for path in (out / "runs").glob("*/result.json")]
    found = json.loads((out / "rows.json").read_text(encoding="utf-8"))
    noisy = [row for row in found if row["noise"]]
    assert [(row["variant"], row["point"]) for row in noisy] == [
        (variant, {"mechanism.epsilon": epsilon}) for epsilon in (0.2, 0.5) for variant in ("Full DP", "LaDP-FL")
    ]
    mechanisms = {"Full DP": "full-dp", "LaDP-FL": "ladp"}
    for row in noisy:
        claim = (mechanisms[row["variant"]], row["point"]["mechanism.epsilon"])
        own = [result["noise"] for result in results if (result["mechanism"], result["privacy"]["paper_claim"]) == claim]
        assert len(own) == 2
        for name in ("norm", "protected_fraction", "paper_epsilon"):
            assert row["noise"][name] == pytest.approx((own[0][name] + own[1][name]) / 2, rel=1e-12)
        assert row["noise"]["norm_deviation"] == pytest.approx(abs(own[0]["norm"] - own[1]["norm"]) / 2**0.5, rel=1e-9)

    (out / "noise.svg").unlink()
    again = ldpfl("sweep", file, "--data-dir", tiny_data, "--out", out, "--json")
    assert json.loads(again.out)["rows"] == found
    assert (out / "noise.svg").read_text(encoding="utf-8") == text


def hint(output: str) -> list[str]:
    """Return the command after "go on with:", as a shell would read it."""
    (line,) = [line for line in output.splitlines() if "go on with: ldpfl " in line]
    return shlex.split(line.partition("go on with: ldpfl ")[2])


def together_of(out: Path) -> dict[str, object]:
    return json.loads(json.dumps(api.account(*(out / "runs").iterdir()).to_dict()))  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_sweep_over_ones_own_rows_needs_no_file(ldpfl: CommandLine, tmp_path: Path) -> None:
    table, out = tmp_path / "rows.csv", tmp_path / "s"
    table.write_text("age,sick\n" + "".join(f"{20 + place % 50},{'yes' if place % 3 else 'no'}\n" for place in range(60)), encoding="utf-8")
    how = (
        "--data",
        table,
        "--target",
        "sick",
        "--set",
        "clients.count=3",
        "--set",
        "training.rounds=1",
        "--seeds",
        "2",
        "--out",
        out,
        "--json",
    )
    outcome = ldpfl("sweep", *how, "--axis", "privacy.target_epsilon=2,4")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    assert [row["point"] for row in found["rows"]] == [{"privacy.target_epsilon": 2}, {"privacy.target_epsilon": 4}]
    assert [len(row["score"]) for row in found["rows"]] == [2, 2]
    assert len(list((out / "runs").glob("*/SECRET-seed"))) == 4
    notes = {path.parent.name: json.loads(path.read_text(encoding="utf-8"))["caveats"] for path in (out / "runs").glob("*/result.json")}
    assert found["rows"][0]["caveats"] | found["rows"][1]["caveats"] == notes
    again = ldpfl("sweep", *how[:-1], "--axis", "privacy.target_epsilon=2,4").out
    together = api.account(*(out / "runs").iterdir()).best
    assert together is not None
    assert found["name"] == "rows-target_epsilon"
    assert found["together"] == {"runs": 4, "privacy": together_of(out)}
    assert again.count("whoever sees") == 1
    assert f"all 4 runs, each of them released on the same rows, has epsilon {number(together.epsilon)} at delta" in again
    assert "is choosing on the test rows" in again
    assert again.count("note: in 4 of 4 finished runs: the classes of 'sick' (no, yes) were taken from the data") == 1
    assert "this is a simulation" not in again
    assert "measured on test rows without noise: no epsilon covers them" in again
    assert "has no values: give KEY=VALUE" in ldpfl.refused("sweep", *how, "--axis", "privacy.target_epsilon")
    assert "exactly one of these" in ldpfl.refused("sweep")
    page = tmp_path / "page.html"
    assert ldpfl("report", out, "--out", page).code == 0
    text = page.read_text(encoding="utf-8")
    assert text.count("Whoever sees the models of all 4 runs") == 1
    assert text.count("In 4 of 4 finished runs: the classes of") == 1
    assert f"has epsilon {number(together.epsilon)} at delta" in text
    assert ldpfl("sweep", "--resume", "--out", out, "--json").out == outcome.out
    assert "--resume is set, but --out is missing" in ldpfl.refused("sweep", "--resume")
    assert "contains no sweep" in ldpfl.refused("sweep", "--resume", "--out", tmp_path / "nothing")
    assert "names privacy.delta twice" in ldpfl.refused("sweep", *how, "--axis", "privacy.delta=0.1", "--axis", "privacy.delta=0.2")
    table.write_text(table.read_text(encoding="utf-8").replace("20,no", "21,no", 1), encoding="utf-8")
    changed = ldpfl("sweep", "--resume", "--out", out)
    assert (changed.code, changed.out) == (2, "")
    assert "use the same data" in changed.err
    assert "work only with --data" in ldpfl.refused("sweep", "sound-mnist", "--axis", "seed=1")


def test_several_values_of_a_setting_are_an_axis(ldpfl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("age,ill\n1,no\n2,yes\n", encoding="utf-8")
    line = ldpfl.refused("sweep", "--data", tmp_path / "t.csv", "--target", "ill", "--set", "training.rounds=1,2")
    assert line.endswith("to compare them give --axis training.rounds=1,2")
