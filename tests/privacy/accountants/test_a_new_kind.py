"""A kind of release of somebody else's: what knows nothing of it counts it as unbounded or refuses it, and never as something else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log, sqrt
from typing import Any, ClassVar

import numpy as np
import pytest

from ldpfl.api.certified_lines import certified
from ldpfl.errors import ConfigError, PrivacyError
from ldpfl.privacy.accountants import registry
from ldpfl.privacy.accountants.adaptive import epsilon_needed, filter_order, filtered_epsilon
from ldpfl.privacy.accountants.behind_shuffler import Bounds, ShuffledAccountant
from ldpfl.privacy.accountants.binomial import Array
from ldpfl.privacy.accountants.local import LocalAccountant
from ldpfl.privacy.budget_file import as_stored
from ldpfl.privacy.charged_rounds import RoundGroup
from ldpfl.privacy.events import BinaryRelease, Release, UnprotectedRelease, _Stated
from ldpfl.privacy.ledger import Ledger


@dataclass(frozen=True)
class Concentrated(_Stated):
    """``rho``-zCDP."""

    mechanism: str
    rho: float
    units: int = 1
    unit: Any = "vector"
    not_shuffled: ClassVar[str] = "nobody has looked"

    @property
    def parameter(self) -> float:
        return self.rho

    @property
    def pure_epsilon(self) -> float:
        return inf


class Silent(LocalAccountant):
    """Says what a run costs, and nothing of what a budget counts by."""

    kinds = frozenset({Concentrated})

    def epsilon(self, delta: float) -> float:
        rho = sum(release.parameter * times for release, times in self.releases.items())
        return rho + 2 * sqrt(rho * log(1 / delta)) if delta else inf


class Speaking(Silent):
    """Says both."""

    def divergence(self, order: Array) -> Array:
        return np.asarray((1 + order) * sum(release.parameter * times for release, times in self.releases.items()))


RELEASE: Any = Concentrated("theirs", 0.3)


def known(kind: type[LocalAccountant], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "LOCAL", (*registry.LOCAL, kind))


def test_a_budget_counts_by_what_its_accountant_says(monkeypatch: pytest.MonkeyPatch) -> None:
    known(Silent, monkeypatch)
    order = filter_order(8.0, 1e-5)
    assert filtered_epsilon([(RELEASE, 1)], order, 1e-5) == inf
    assert epsilon_needed([(RELEASE, 10)], 1e-5) == inf
    monkeypatch.setattr(registry, "LOCAL", (Speaking,))
    for times in (1, 5, 27):
        counted = filtered_epsilon([(RELEASE, times)], order, 1e-5)
        assert registry.epsilon_of([(RELEASE, times)], 1e-5) * 0.7 < counted < inf
    assert epsilon_needed([(RELEASE, 27)], 1e-5) > 0.7 * registry.epsilon_of([(RELEASE, 27)], 1e-5)


def test_what_a_budget_s_file_cannot_hold_is_unprotected_there() -> None:
    assert isinstance(as_stored(RELEASE), UnprotectedRelease)


def test_kinds_that_nobody_composes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PrivacyError, match="no accountant composes Concentrated"):
        registry.epsilon_of([(RELEASE, 1)], 1e-5)
    known(Silent, monkeypatch)
    mixed: list[tuple[Release, int]] = [(RELEASE, 1), (BinaryRelease("duchi", 1.0, 3), 1)]
    with pytest.raises(PrivacyError, match="BinaryRelease and Concentrated"):
        registry.epsilon_of(mixed, 1e-5)


def test_no_certificate_calls_it_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    known(Silent, monkeypatch)
    group = RoundGroup(RELEASE, 10, 10)
    monkeypatch.setattr("ldpfl.api.certified_lines.charged_groups", lambda ledger: [group])
    monkeypatch.setattr("ldpfl.api.certified_lines.Ledger.from_json", lambda text, origin: Ledger())
    with pytest.raises(ConfigError, match="the ledger has a release of the type Concentrated, which no certificate can describe"):
        certified("", "run", 1e-5, {})


def test_a_release_that_says_a_shuffler_adds_nothing_is_asked_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which rounds a client is charged for follows from what it says."""

    class Eager(ShuffledAccountant):
        @classmethod
        def supports(cls, groups: Sequence[RoundGroup]) -> bool:
            return True

        def bounds(self, delta: float) -> Bounds:
            return Bounds(0.0, 0.0)

    known(Silent, monkeypatch)
    monkeypatch.setattr(registry, "HIDDEN", (Eager,))
    assert registry.behind_shuffler([RoundGroup(RELEASE, 10, 10)]) is None
    monkeypatch.setattr(Concentrated, "not_shuffled", "")
    assert registry.behind_shuffler([RoundGroup(RELEASE, 10, 10)]) is not None
