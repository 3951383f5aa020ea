"""``ldpfl-verify`` prints a table or JSON, and its exit code says the worst that it found."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from golden_files import CERTIFICATE, LEDGER, PUBLIC_KEY, keep_local_lines, write_unsigned
from ldpfl_verify.command_line import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """An unsigned copy of the golden certificate with its two local figures alone."""
    folder = tmp_path / "local"
    folder.mkdir()
    return write_unsigned(folder, keep_local_lines)


def too_small(statement: dict[str, Any]) -> None:
    """Keep the local figures, and state a smaller one in place of the first."""
    keep_local_lines(statement)
    statement["guarantees"][0].update(epsilon=1.0)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that calls the command, and returns its exit code, standard output and standard error."""

    def run_command(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ldpfl-verify", *map(str, arguments)])
        with pytest.raises(SystemExit) as ending:
            main()
        assert isinstance(ending.value.code, int)
        return (ending.value.code, *capsys.readouterr())

    return run_command


def test_the_golden_certificate_is_confirmed(run: Run) -> None:
    code, out, err = run(CERTIFICATE, "--ledger", LEDGER, "--signed-by", PUBLIC_KEY)
    assert (code, err) == (0, "")
    assert out.count("  confirmed  ") == 3
    assert out.splitlines()[0].endswith("certificate.json: certificate of ledger.json")
    assert f"note: signed by {PUBLIC_KEY}" in out
    assert "was not checked" not in out


def test_a_figure_that_is_too_small_is_not_confirmed(run: Run, tmp_path: Path) -> None:
    code, out, _ = run(write_unsigned(tmp_path, too_small))
    assert code == 3
    assert "  not confirmed  " in out
    assert "note: nobody signed the certificate" in out
    assert "note: whether the run released what the certificate charges was not checked" in out


def test_what_no_accountant_here_covers_is_not_checked(run: Run, tmp_path: Path) -> None:
    secret = {"sampling": "secret", "rate": 0.5}
    code, out, _ = run(write_unsigned(tmp_path, lambda statement: statement["charged"][0].update(secret)))
    assert code == 4
    assert "random check-in" in out


def test_of_several_certificates_each_is_looked_at_and_the_worst_code_wins(run: Run, local: Path, tmp_path: Path) -> None:
    less = write_unsigned(tmp_path, too_small)
    missing = tmp_path / "missing.json"
    code, out, err = run(local, less, missing)
    assert code == 2
    assert (out.count("certificate of"), "not confirmed" in out) == (2, True)
    assert err.splitlines() == [f"ldpfl-verify: certificate {missing} cannot be read: No such file or directory"]
    assert run(local, less)[0] == 3


@pytest.mark.parametrize("mu", [6e8, 1e9])
def test_figures_that_no_accountant_takes_are_not_checked_and_stop_no_other_file(mu: float, run: Run, local: Path, tmp_path: Path) -> None:
    def spoil(statement: dict[str, Any]) -> None:
        bits = {"kind": "gaussian", "unit": "person", "parameter": mu, "units": 1, "mechanism": "dp-sgd"}
        statement["charged"][0]["release"].update(bits)
        for line in statement["guarantees"]:
            line.update(protects="record", adjacency="replace one record of one client")

    huge = write_unsigned(tmp_path, spoil)
    code, out, err = run(huge, local)
    assert (code, err) == (4, "")
    assert "its figures are too large or too small to compute with" in out
    assert out.count("  confirmed  ") == 2


ODD_FIGURES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "losses that are next to nothing": (
        {"parameter": 1e-15, "units": 2, "rate": 0.1},
        {"cohort": 5000, "rounds": 10**6},
        {"trusted": "local", "epsilon": 1.0, "delta": 0.1},
        "the arithmetic is right",
    ),
    "an epsilon far above any loss": (
        {"kind": "pure", "parameter": 1e-12, "units": 2, "blanket": 1e-300},
        {"cohort": 1025, "linked": 1000},
        {"trusted": "shuffled", "epsilon": 12000.0, "delta": 1e-16},
        "the arithmetic is right",
    ),
    "the largest epsilon": (
        {"parameter": 1e-6, "units": 100, "sampled": 5},
        {"cohort": 2, "rounds": 50, "channel": "secure-sum"},
        {"trusted": "summed", "epsilon": 1e308, "delta": 1e-5},
        "the arithmetic is right",
    ),
    "many bits that stay together at a large epsilon": (
        {"parameter": 59.0, "units": 21840},
        {"cohort": 10, "linked": 1000},
        {"trusted": "shuffled", "epsilon": 11356.0, "delta": 1e-16},
        "identify their client",
    ),
}


@pytest.mark.thorough_for("the largest epsilon", "many bits that stay together at a large epsilon")
@pytest.mark.parametrize("case", ODD_FIGURES)
def test_odd_figures_are_computed_or_left_without_a_warning_of_numpy(case: str, run: Run, tmp_path: Path) -> None:
    """Pytest makes an error of each warning. Where a bound is found, it is far below the stated epsilon."""
    release, charged, guarantee, expected_text = ODD_FIGURES[case]

    def change(statement: dict[str, Any]) -> None:
        statement["charged"][0]["release"].update(release)
        statement["charged"][0].update(rounds=1, linked=1)
        statement["charged"][0].update(charged, population=charged["cohort"])
        statement["guarantees"] = [{**statement["guarantees"][0], **guarantee}]

    code, out, err = run(write_unsigned(tmp_path, change))
    assert (code, err) == (4, "")  # no mechanism of ldpfl has such figures: they are claimed, or not checked
    assert expected_text in out


def test_json_is_an_object_for_one_file_and_a_list_for_several(run: Run, local: Path) -> None:
    one, two = (json.loads(run(*files, "--json")[1]) for files in ([local], [local, local]))
    assert one["holds"]
    assert two == [one, one]
    assert {line["status"] for line in one["lines"]} == {"confirmed"}


def test_a_folder_without_a_certificate_is_told_how_to_get_one(run: Run, tmp_path: Path) -> None:
    code, _, err = run(tmp_path)
    assert code == 2
    assert f"write one for a run's folder with ldpfl certify {tmp_path} --out {tmp_path / 'certificate.json'}" in err


@pytest.mark.parametrize(("key", "expected_text"), [("00" * 32, "expected the key '0000"), ("nobody", "expected the key 'nobody'")])
def test_another_signer_is_refused(key: str, expected_text: str, run: Run) -> None:
    code, out, err = run(CERTIFICATE, "--signed-by", key)
    assert (code, out) == (2, "")
    assert expected_text in err


@pytest.mark.parametrize(
    ("trusted", "needed"),
    [("shuffled", "trust a shuffler hold only if an ideal shuffler shows"), ("summed", "trust a sum hold only if nobody learns")],
)
def test_what_a_kind_of_trust_needs_is_said_even_if_the_author_removed_it(trusted: str, needed: str, run: Run, tmp_path: Path) -> None:
    def change(statement: dict[str, Any]) -> None:
        statement["charged"][0]["release"].update(units=5)  # whose figure takes less time than that of 500
        statement["guarantees"] = [{**statement["guarantees"][0], "trusted": trusted, "assumptions": []}]

    _, out, _ = run(write_unsigned(tmp_path, change))
    assert needed in out
    assert "the other clients are honest" in out


@pytest.mark.parametrize(("trusted", "notes"), [("local", (False, False)), ("shuffled", (True, True))])
def test_a_certificate_that_leaves_out_what_holds_against_everybody_gets_a_note(
    trusted: str, notes: tuple[bool, bool], run: Run, tmp_path: Path
) -> None:
    """A guarantee that trusts nobody needs neither this note nor one on whom it trusts."""

    def change(statement: dict[str, Any]) -> None:
        statement["guarantees"] = [{**statement["guarantees"][0], "trusted": trusted}]

    said = " ".join(run(write_unsigned(tmp_path, change))[1].split())
    assert ("rows that trust a" in said, "no row says what holds where nobody is trusted" in said) == notes
