"""What rests on somebody else's code is its author's claim, wherever a figure is shown: it cannot be taken for this project's."""

from __future__ import annotations

import copy
import functools
import pickle
import subprocess
import sys
import textwrap
from abc import ABCMeta
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from pydantic import BaseModel

import ldpfl
from ldpfl import LayerRanges, mechanisms
from ldpfl.api.certified_lines import certified
from ldpfl.errors import Declined
from ldpfl.mechanisms import Duchi, Gaussian, Identity, Mechanism, PublicState, duchi, guarantee_of
from ldpfl.mechanisms.base import PerRound, in_round, record_clip_of, record_rate_of, terms_of
from ldpfl.mechanisms.dp_sgd import DpSgd, on_users_code
from ldpfl.mechanisms.gaussian.schedule import NoiseSchedule
from ldpfl.mechanisms.record_clipping import RecordClip
from ldpfl.mechanisms.rotated_sign import RotatedSign
from ldpfl.privacy import GaussianRelease, Ledger, PureRelease, RoundEvent
from ldpfl.privacy.accounting import account
from ldpfl.privacy.authors import author_of, released
from ldpfl.privacy.budget import Budget
from ldpfl.privacy.budget_file import read_charges, set_limit
from ldpfl.privacy.events import OURS, UNKNOWN, USERS_CODE
from ldpfl.privacy.policy import Policy, Request
from ldpfl.report.privacy import guarantee_rows
from ldpfl_verify import Certificate, verify

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


WRAPPED: Any = functools.wraps(Duchi.encode)(lambda mechanism, *given: Duchi(20.0).encode(*given))
"""Says of itself that it is ours."""


class Wrapped(Duchi):
    encode = WRAPPED


class Descriptor:
    """Gives out a function when it is looked up, and cannot be called itself."""

    def __get__(self, thing: Any, kind: Any = None) -> Any:
        return functools.partial(WRAPPED, thing)


def forged(file: str) -> FunctionType:
    """Return a function of others that has the module, the names and the file name of one of ours."""
    code = Mine.encode.__code__.replace(co_filename=file, co_name="encode", co_qualname="Duchi.encode")
    return FunctionType(code, vars(duchi), "encode", None, Mine.encode.__closure__)


CHANGES: tuple[Any, ...] = (
    lambda *_: None,
    Mine.encode,
    FlatteringRelease,
    WRAPPED,
    Descriptor(),
    property(WRAPPED),
    functools.cached_property(WRAPPED),
    functools.lru_cache(WRAPPED),
    Identity.encode,  # ours, and of another mechanism
    forged(duchi.__file__),
    forged("<string>"),
    FunctionType(Duchi.encode.__code__, {**vars(duchi), "draw": None}, "encode"),
    FunctionType(Duchi.encode.__code__, vars(duchi), "encode", (WRAPPED,)),
)


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
    for changed in CHANGES:
        with monkeypatch.context() as patched:
            patched.setattr(Duchi, "encode", changed)
            assert author_of(Duchi(1.0)) == "ldpfl.mechanisms.duchi:Duchi (changed)", changed
    for name, value in (("name", "laplace"), ("source", "a proof"), ("in_round", Mine.encode), ("__getattribute__", Mine.encode)):
        with monkeypatch.context() as patched:
            made = Duchi(1.0)
            patched.setattr(Duchi, name, value, raising=False)
            assert author_of(made) != OURS, name
    assert author_of(Duchi(1.0)) == OURS


@pytest.mark.parametrize("changed", [WRAPPED, Duchi.encode, "mine"])
def test_an_instance_that_hides_what_its_class_defines_is_not_ours(changed: Any) -> None:
    for name in ("encode", "name", "gain", "release", "units"):
        shadowed = Duchi(1.0)
        shadowed.__dict__[name] = changed
        assert author_of(shadowed) == "ldpfl.mechanisms.duchi:Duchi (changed)"
    for name in ("in_round", "terms"):
        turning = RotatedSign(1.0)
        turning.__dict__[name] = changed
        assert author_of(turning) == "ldpfl.mechanisms.rotated_sign:RotatedSign (changed)"
    assert author_of(Wrapped(1.0)).endswith(":Wrapped")


def test_an_instance_s_attribute_makes_no_mechanism_one_that_differs_by_round_or_clips_records() -> None:
    """Such an attribute hides nothing that its class defines, so that nothing may come of it."""
    mechanism, public = Duchi(1.0), PublicState(1, torch.zeros(4), None, (4,))
    mechanism.__dict__.update(in_round=Duchi(9.0).release, terms=None, record_clip=1.0, record_rate=0.5)
    assert in_round(mechanism, public) is terms_of(mechanism) is mechanism
    assert (record_clip_of(mechanism), record_rate_of(mechanism)) == (None, 1.0)


def test_what_a_library_s_object_holds_may_be_code_of_others() -> None:
    hooked, marked = torch.nn.Linear(1, 1), torch.zeros(2)
    hooked.register_forward_hook(lambda *_: None)
    marked.clone_of_mine = lambda: None  # type: ignore[attr-defined]
    for held in (np.vectorize(float), hooked, marked, np.array([print], dtype=object), functools.partial(print), Duchi.encode):
        for holding in (held, [held], {"at": (held,)}):
            mechanism = Duchi(1.0)
            mechanism.__dict__["extra"] = holding
            assert (author_of(mechanism) == OURS) == (held is Duchi.encode), held
    mechanism.__dict__["extra"] = [torch.zeros(2), np.zeros(2), Fraction(1, 2), Decimal(1), mechanism.release]
    assert author_of(mechanism) == OURS


def test_copies_of_ours_are_ours_and_so_are_all_classes_of_ours() -> None:
    for name in ("duchi", "full-dp"):
        mechanism = mechanisms.with_defaults(name, 1.0)
        assert author_of(copy.deepcopy(mechanism), pickle.loads(pickle.dumps(mechanism))) == OURS
    reports = Duchi(1.0).encode(torch.zeros(1, 4), RANGES, torch.Generator())
    assert list(reports.payloads())
    assert author_of(reports, PublicState(1, torch.zeros(4), None, (4,))) == OURS
    for module in [module for name, module in sys.modules.items() if name.startswith("ldpfl.mechanisms.")]:
        kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
        assert {author_of(kind) for kind in kinds if not issubclass(kind, BaseModel)} <= {OURS}, module


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
    assert guarantee_of(Duchi(1.0), RANGES).status == "proved"
    assert guarantee_of(Mine(1.0), RANGES).status == "author's claim"


class EqualToAll(ABCMeta):
    """A class of which is said that it equals every other: what is ours is found by what is the same, not by what says so."""

    def __eq__(cls, other: object) -> bool:
        return True

    __hash__ = ABCMeta.__hash__


def test_a_class_that_says_it_equals_all_others_is_not_ours() -> None:
    class Equal(Duchi, metaclass=EqualToAll):
        name: ClassVar[str] = "equal"

        def release(self, ranges: LayerRanges) -> Any:
            return replace(Duchi(0.001).release(ranges), mechanism="duchi")

    assert author_of(Equal(8.0)) != OURS
    assert released(Equal(8.0), RANGES).author != OURS
    assert guarantee_of(Equal(8.0), RANGES).status == "author's claim"


@pytest.mark.parametrize("said", ["turning", "duchi"])
def test_a_class_that_changes_while_it_is_judged_is_not_ours(said: str) -> None:
    """It is of one class when it is asked what it releases, and of ours when its author is looked for."""

    class Turning(Duchi):
        name: ClassVar[str] = "turning"

        def release(self, ranges: LayerRanges) -> Any:
            object.__setattr__(self, "__class__", Duchi)
            return replace(Duchi(0.001).release(ranges), mechanism=said)

    mechanism = Turning(20.0)
    assert released(mechanism, RANGES).author != OURS
    assert type(mechanism) is Duchi


@pytest.mark.parametrize("odd", [np.array(4097, dtype=np.int32), np.array(9, dtype=np.float16), torch.tensor(2.0), Fraction(3)])
def test_a_number_of_an_odd_kind_is_not_ours(odd: Any) -> None:
    """In 32 bits the scale of the noise wraps around, and what is stated does not."""
    assert released(DpSgd(RecordClip(0.02), odd), RANGES).author != OURS
    assert released(DpSgd(RecordClip(0.02), float(odd)), RANGES).author == OURS


class StatesThatOnlyTheModelIsForeign(DpSgd):
    """Somebody else's, which would pass for ldpfl's mechanism on a user's model."""

    def release(self, ranges: LayerRanges) -> GaussianRelease:
        return replace(super().release(ranges), mu=1e-9, author=USERS_CODE)


def test_only_a_mechanism_of_ours_may_state_that_its_values_are_another_s() -> None:
    """A policy lets it pass as ldpfl's mechanism, and no other."""
    ours = on_users_code(DpSgd(RecordClip(0.02), 4.0))
    assert released(ours, RANGES).author == USERS_CODE
    assert guarantee_of(ours, RANGES).status == "author's claim"
    foreign = StatesThatOnlyTheModelIsForeign(RecordClip(0.02), 4.0)
    assert "StatesThatOnlyTheModelIsForeign" in released(foreign, RANGES).author
    terms: dict[str, Any] = {"run": "run", "round": 1, "cohort": 1, "transport": "direct"}
    bounds: dict[str, Any] = {"epsilon_per_unit": 9.0, "epsilon_per_round": 9.0, "lifetime_epsilon": 99.0, "min_clients": 1}
    policy = Policy(mechanisms=("dp-sgd",), protects="record", transports=("direct",), rounds=9, **bounds)
    policy.check(Request.of(ours, RANGES, **terms))
    with pytest.raises(Declined, match="has the name of a built-in mechanism but is code of"):
        policy.check(Request.of(foreign, RANGES, **terms))


@pytest.mark.thorough
def test_threads_find_the_same_authors() -> None:
    code = """
        from concurrent.futures import ThreadPoolExecutor
        from threading import Barrier
        from ldpfl import mechanisms
        from ldpfl.privacy.authors import author_of
        names, together = ["duchi", "laplace", "harmony", "piecewise"], Barrier(4)
        def found(name):
            made = mechanisms.with_defaults(name, 1.0)
            together.wait()
            return author_of(made)
        with ThreadPoolExecutor(4) as pool:
            print(sorted(set(pool.map(found, names))))
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "['ldpfl']"


def ledger_of(mechanism: Mechanism) -> Ledger:
    return Ledger((RoundEvent(1, released(mechanism, RANGES), 1000, 1000, 1),))


@pytest.mark.thorough
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
@pytest.mark.thorough
def test_a_certificate_of_it_is_never_confirmed() -> None:
    for mechanism, statuses in ((Mine(1.0), {"author's claim"}), (Duchi(1.0), {"confirmed", "nearly"})):
        statement = certified(ledger_of(mechanism).to_json(), "run", 1e-5, {})
        assert {line.status for line in statement.guarantees} == {"author's claim" if isinstance(mechanism, Mine) else "proved"}
        opinion = verify(Certificate(statement=statement))
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


@dataclass(frozen=True)
class Chooser(Duchi, PerRound):
    """Somebody else's, which returns a mechanism of ours for each round."""

    def in_round(self, public: PublicState) -> Mechanism:
        return Duchi(self.epsilon)

    @property
    def terms(self) -> object:
        return self


def test_a_policy_judges_the_code_that_chooses_a_round_s_mechanism(tmp_path: Path) -> None:
    """Server and node agree on the author: the chooser's, although the report is made by a mechanism of ours."""
    chosen = Chooser(1.0).in_round(PublicState(1, torch.zeros(4), None, (4,)))
    request = Request.of(chosen, RANGES, run="r", round=1, cohort=20, transport="direct", chosen_by=Chooser(1.0))
    assert request.release == released(chosen, RANGES, chosen_by=Chooser(1.0))
    assert request.release.author == f"{__name__}:Chooser"
    with pytest.raises(Declined, match=r"'duchi' has the name of a built-in mechanism but is code of .*:Chooser"):
        POLICY.check(request)


def test_a_policy_takes_code_of_others_by_a_name_of_its_own_only(tmp_path: Path) -> None:
    POLICY.check(asked(Duchi(1.0)))
    with pytest.raises(Declined, match=r"'duchi' has the name of a built-in mechanism but is code of .*:Mine"):
        POLICY.check(asked(Mine(1.0)))
    with pytest.raises(Declined, match="'flattering' is not among the policy's mechanisms"):
        POLICY.check(asked(Flattering(1.0)))
    named = POLICY.model_copy(update={"mechanisms": ("flattering",)})
    set_limit(tmp_path / "budget", 99.0)
    Budget(tmp_path / "budget", named).charge(asked(Flattering(1.0)))
    assert [charge.release.author for charge in read_charges(tmp_path / "budget")] == [f"{__name__}:Flattering"]
