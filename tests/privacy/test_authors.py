"""What rests on somebody else's code is its author's claim, wherever a figure is shown: it cannot be taken for this project's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import ldpfl
from ldpfl import LayerRanges, mechanisms
from ldpfl.errors import Declined
from ldpfl.mechanisms import Duchi, Gaussian, Mechanism
from ldpfl.mechanisms.gaussian.schedule import NoiseSchedule
from ldpfl.privacy import Ledger, PureRelease, RoundEvent
from ldpfl.privacy.authors import author_of, released
from ldpfl.privacy.budget import Budget
from ldpfl.privacy.budget_file import read_charges, set_limit
from ldpfl.privacy.certified_lines import certified
from ldpfl.privacy.events import OURS, UNKNOWN
from ldpfl.privacy.policy import Policy, Request
from ldpfl.privacy.statement import account
from ldpfl.report.privacy import guarantee_rows
from ldpfl.verifying.certificate_file import Certificate
from ldpfl.verifying.verdicts import second_opinion

RANGES = LayerRanges(torch.tensor([0.0]), torch.tensor([1.0]), (4,))


@dataclass(frozen=True)
class Mine(Duchi):
    """Somebody else's, with the name and the release of ours."""

    def encode(self, values: Any, ranges: Any, generator: Any) -> Any:
        return super().encode(values.sign(), ranges, generator)


class FlatteringRelease(PureRelease):
    """Claims to be ours, and answers accountants in its own way."""

    @property
    def parameter(self) -> float:
        return 1e-9


@dataclass(frozen=True)
class Flattering(Duchi):
    name: ClassVar[str] = "flattering"

    def release(self, ranges: LayerRanges) -> Any:
        return FlatteringRelease(self.name, 4.0, 4, "weight", blanket=0.999, author=OURS)


def test_our_mechanisms_are_ours() -> None:
    for name in mechanisms.names(alone=True):
        assert author_of(mechanisms.with_defaults(name, 1.0)) == OURS, name
    assert author_of(mechanisms.create("harmony", epsilon=1.0, group=3)) == OURS


def test_code_of_others_is_not_ours_whatever_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert author_of(Mine(1.0)).endswith("test_authors:Mine")
    shadowed = Duchi(1.0)
    object.__setattr__(shadowed, "encode", lambda *_: None)
    assert author_of(shadowed) != OURS
    forged: Any = type("Duchi", (Mine,), {"__module__": "ldpfl.mechanisms.duchi", "__qualname__": "Duchi"})
    assert author_of(forged(1.0)) == "ldpfl.mechanisms.duchi:Duchi (changed)"
    for changed in (lambda *_: None, Mine.encode, FlatteringRelease):
        with monkeypatch.context() as patched:
            patched.setattr(Duchi, "encode", changed)
            assert (author_of(Duchi(1.0)) == OURS) == (changed is FlatteringRelease), changed
    assert author_of(Duchi(1.0)) == OURS


def test_a_schedule_of_others_in_a_mechanism_of_ours_is_not_ours() -> None:
    ours = mechanisms.with_defaults("full-dp", 1.0)
    assert isinstance(ours, Gaussian)
    theirs = type("Theirs", (type(ours.schedule),), {"__module__": __name__})
    assert issubclass(theirs, NoiseSchedule)
    schedule = theirs.__new__(theirs)
    schedule.__dict__.update(vars(ours.schedule))
    assert author_of(replace(ours, schedule=schedule)) == f"{__name__}:Theirs"


def test_a_release_has_the_author_that_is_found_and_the_class_that_is_ours() -> None:
    assert released(Duchi(1.0), RANGES).author == OURS
    assert Duchi(1.0).release(RANGES).author == UNKNOWN
    found = released(Flattering(1.0), RANGES)
    assert type(found) is PureRelease
    assert (found.author, found.parameter) == (f"{__name__}:Flattering", 4.0)
    assert released(Duchi(1.0), RANGES, Mine(1.0)).author == f"{__name__}:Mine"
    assert Duchi(1.0).guarantee(RANGES).status == "proved"
    assert Mine(1.0).guarantee(RANGES).status == "author's claim"


def ledger_of(mechanism: Mechanism) -> Ledger:
    return Ledger((RoundEvent(1, released(mechanism, RANGES), 1000, 1000, 1),))


@pytest.mark.parametrize("mechanism", [Mine(1.0), Flattering(1.0)])
def test_every_figure_of_it_is_its_author_s_claim(mechanism: Mechanism) -> None:
    kept = Ledger.from_json(ledger_of(mechanism).to_json())
    assert kept == ledger_of(mechanism)
    statement = account(kept)
    assert statement.status == statement.figures()["status"] == "author's claim"
    assert not [row for row in statement.rows if row.status == "proved"]
    assert statement.find("hidden", "run") is not None
    assert "author's claim" in {status for *_, status in guarantee_rows(statement.to_dict())}
    assert "proved" not in {status for *_, status in guarantee_rows(statement.to_dict())}
    assert any(type(mechanism).__name__ in warning for warning in statement.warnings)
    ours = account(ledger_of(Duchi(1.0)))
    assert ours.status == "proved"
    assert not ours.warnings


def test_a_release_that_somebody_wrote_down_is_not_proved() -> None:
    event = RoundEvent(1, PureRelease("duchi", 1.0, 1, "weight"), 10, 10, 1)
    assert ldpfl.account(Ledger((event,))).status == "author's claim"


@pytest.mark.slow
def test_a_certificate_of_it_is_never_confirmed() -> None:
    for mechanism, statuses in ((Mine(1.0), {"author's claim"}), (Duchi(1.0), {"confirmed", "nearly"})):
        statement = certified(ledger_of(mechanism).to_json(), "run", 1e-5, {})
        assert {line.status for line in statement.guarantees} == {"author's claim" if isinstance(mechanism, Mine) else "proved"}
        opinion = second_opinion(Certificate(statement=statement))
        assert {line.status for line in opinion.lines} <= statuses
        assert opinion.holds != isinstance(mechanism, Mine)
        assert not opinion.contradicted
        assert all((f"author of {__name__}:Mine claims" in line.why) == isinstance(mechanism, Mine) for line in opinion.lines)


POLICY = Policy(
    mechanisms=("duchi",),
    epsilon_per_unit=4.0,
    epsilon_per_round=16.0,
    lifetime_epsilon=99.0,
    rounds=5,
    min_clients=2,
    transports=("direct",),
)


def asked(mechanism: Mechanism) -> Request:
    return Request.of(mechanism, RANGES, run="r", round=1, cohort=20, transport="direct")


def test_a_policy_takes_code_of_others_by_a_name_of_its_own_only(tmp_path: Path) -> None:
    POLICY.check(asked(Duchi(1.0)))
    with pytest.raises(Declined, match=r"'duchi' is not ldpfl's own of that name, but code of .*:Mine"):
        POLICY.check(asked(Mine(1.0)))
    with pytest.raises(Declined, match="'flattering' is not among the policy's mechanisms"):
        POLICY.check(asked(Flattering(1.0)))
    named = POLICY.model_copy(update={"mechanisms": ("flattering",)})
    set_limit(tmp_path / "budget", 99.0)
    Budget(tmp_path / "budget", named).charge(asked(Flattering(1.0)))
    assert [charge.release.author for charge in read_charges(tmp_path / "budget")] == [f"{__name__}:Flattering"]
