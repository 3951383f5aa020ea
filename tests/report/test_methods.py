"""The paragraph about a run for a paper, and the citation."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import ldpfl
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.run_folder import Kind
from ldpfl.privacy import Ledger, RoundEvent
from ldpfl.privacy.accounting import account
from ldpfl.privacy.events import OURS, GaussianRelease, Release, UnprotectedRelease
from ldpfl.report.methods import bibtex, citation, methods
from ldpfl.util.number_format import number
from ldpfl.version import YEAR

ROOT = Path(__file__).parents[2]


def said(release: Release, *, own: bool, histograms: int = 0) -> str:
    config = RunConfig.model_validate({"data": {"path": "/mine/rows.csv"}}) if own else RunConfig()
    ledger = Ledger()
    for place in range(1, histograms + 3):
        ledger = ledger.charge(RoundEvent(place, release, 4, 4, place, channel="direct", histograms=place <= histograms))
    result = {"rounds": 2, "clients": 4, "records": 321, "versions": {"ldpfl": "0.1.0"}, "score": 0.98765, "name": "mine"}
    return methods(config, result, ledger, account(ledger, 1e-5), Kind.SIMULATION)


def test_the_paragraph_says_who_is_protected_from_whom_by_what() -> None:
    release = GaussianRelease("dp-sgd", 0.5, unit="record")
    text = said(release, own=True, histograms=2)
    ledger = Ledger()
    for place in range(1, 5):
        ledger = ledger.charge(RoundEvent(place, release, 4, 4, place, channel="direct", histograms=place <= 2))
    row = account(ledger, 1e-5).find("local", "run")
    assert row is not None
    for part in (
        "2 rounds with 4 clients, with ldpfl 0.1.0, in a simulation",
        "321 training records in all",
        "replacing one record of one client",
        f"epsilon = {number(row.epsilon)} and delta = 1e-05 against an adversary who sees every message",
        "all 4 releases",
        "standard deviation is 4 times that bound",
        "measured 2 times",
        "a share of 0.1",
        "does not cover names and kinds of columns, names of classes and scores on test rows",
        citation(),
    ):
        assert part in text, part
    assert "rows.csv" not in text
    assert "98" not in text


def test_what_an_author_claims_is_said_to_be_claimed() -> None:
    ours, foreign = (replace(GaussianRelease("dp-sgd", 0.5, unit="record"), author=author) for author in (OURS, "theirs:Mechanism"))
    assert "claim" not in said(ours, own=True)
    text = said(foreign, own=True)
    assert "claimed by the author of the mechanism (theirs:Mechanism), and not proved by ldpfl" in text
    assert ", as its author claims." in text


def test_a_number_of_records_that_is_not_public_is_left_out() -> None:
    vector = GaussianRelease("fixed", 0.5)
    assert "321" not in said(vector, own=True)
    assert "321" in said(vector, own=False)
    assert "replacing all data of one client" in said(vector, own=True)


def test_a_run_without_protection_claims_none() -> None:
    text = said(UnprotectedRelease("none", "values leave as they are"), own=False)
    assert "No finite epsilon is proved" in text
    assert "without a proved protection (values leave as they are)" in text
    assert "epsilon =" not in text


def test_the_citation_file_is_valid_and_of_this_version() -> None:
    cited = importlib.import_module("yaml").safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "version", "date-released", "license"} <= set(cited)
    assert cited["authors"] == [{"name": "ldpfl maintainers"}]
    assert cited["version"] == ldpfl.__version__
    assert str(cited["date-released"])[:4] == YEAR
    for text in (citation(), bibtex("mine")):
        assert all(part in text for part in ("ldpfl maintainers", YEAR, ldpfl.__version__, cited["title"]))
