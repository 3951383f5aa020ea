"""A figure that cannot be computed is left out and said to be missing: it never looks like a good one."""

from __future__ import annotations

from math import inf, nan

import pytest

from ldpfl.privacy import Ledger, RoundEvent, accounting as statement_module
from ldpfl.privacy.accountants.behind_shuffler import Bounds, CountedBits
from ldpfl.privacy.accountants.local import PureAccountant
from ldpfl.privacy.accounting import account, run_epsilon
from ldpfl.privacy.events import BinaryRelease, Channel


def ledger(epsilon: float, channel: Channel = "ideal-shuffler") -> Ledger:
    release = BinaryRelease("duchi", epsilon, 3)
    return Ledger(tuple(RoundEvent(number, release, 10, 10, number, channel=channel) for number in (1, 2)))


def broken(*given: object) -> float:
    raise OverflowError("secret-4711")


def test_without_a_figure_behind_the_shuffler_the_local_one_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountedBits, "bounds", broken)
    monkeypatch.setattr(CountedBits, "epsilon", broken)
    found = account(ledger(0.5001))
    best = found.best
    assert best is not None
    assert best.trust_model == "local"
    assert all(row.trust_model == "local" for row in found.rows)
    assert [note for note in found.notes if note.startswith("no shuffled number: not computed, because: unexpected OverflowError at")]
    assert "secret-4711" not in str(found.to_dict())
    assert run_epsilon(ledger(0.5001)) == best.epsilon


def test_what_is_not_a_number_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountedBits, "bounds", lambda self, delta: Bounds(nan, 1.0))
    monkeypatch.setattr(CountedBits, "epsilon", lambda self, delta: nan)
    found = account(ledger(0.5002))
    assert all(row.trust_model == "local" for row in found.rows)
    assert run_epsilon(ledger(0.5002)) == found.best.epsilon  # type: ignore[union-attr]


def test_without_an_exact_local_figure_the_sum_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = PureAccountant.epsilon
    monkeypatch.setattr(PureAccountant, "epsilon", lambda self, delta: broken() if delta > 0 else exact(self, delta))
    found = account(ledger(0.5003, "direct"))
    row = found.find("local", "run")
    assert row is not None
    assert row.epsilon == pytest.approx(6 * 0.5003)
    assert any("only the epsilon without a delta can be given: not computed" in note for note in found.notes)
    monkeypatch.setattr(PureAccountant, "epsilon", broken)
    assert account(ledger(0.5004, "direct")).find("local", "run").epsilon == inf  # type: ignore[union-attr]


def test_of_a_statement_that_cannot_be_made_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statement_module, "account_groups", broken)
    found = account(ledger(0.5005))
    assert (found.rows, found.best, found.verdict) == ((), None, "")
    assert "nothing is protected" in found.warnings[0]
