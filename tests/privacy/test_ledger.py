"""A ledger comes back as it was saved, and whatever is not a ledger is refused in one line, by its name."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate, product
from operator import add
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ldpfl.errors import DataError, WriteError
from ldpfl.privacy import BinaryRelease, GaussianRelease, Ledger, PureRelease, Release, RoundEvent, UnprotectedRelease
from ldpfl.privacy.accountants.registry import epsilon_of
from ldpfl.privacy.charged_rounds import charged_groups
from ldpfl.privacy.events import OURS, Channel, Sampling

COUNTS = st.integers(1, 10**12)
PARAMETERS = st.floats(min_value=1e-15, max_value=1e9)
PEOPLE = st.integers(1, 10**9)
UNITS = st.sampled_from(["weight", "coordinate", "layer", "vector"])
GAUSSIAN_UNITS = st.sampled_from(["vector", "record"])
TEXT = st.text(st.characters(codec="utf-8")).filter(str.isprintable)
RELEASES = st.one_of(
    st.builds(
        lambda name, epsilon, units, unit, exact: BinaryRelease(name, epsilon, units, unit, None if exact else epsilon, author=OURS),
        *(st.just("harmony"), PARAMETERS, COUNTS, st.sampled_from(["weight", "group", "layer"]), st.booleans()),
    ),
    st.builds(PureRelease, TEXT, PARAMETERS, COUNTS, UNITS),
    st.builds(GaussianRelease, TEXT, PARAMETERS, COUNTS, GAUSSIAN_UNITS),
    st.builds(UnprotectedRelease, TEXT, TEXT, COUNTS, UNITS),
    st.builds(UnprotectedRelease, TEXT, TEXT, COUNTS, UNITS, PARAMETERS, st.floats(0, 1, exclude_min=True, exclude_max=True)),
)


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    ledger, population, reports = Ledger(), draw(PEOPLE), 0
    for number, release in enumerate(draw(st.lists(RELEASES, max_size=4)), start=1):
        sampling: Sampling = draw(st.sampled_from(get_args(Sampling)[:2]))
        cohort = population if sampling == "everyone" else draw(st.integers(1, population))
        reports += cohort
        rate = draw(st.floats(0, 1, exclude_min=True))
        channel: Channel = draw(st.sampled_from(get_args(Channel)))
        ledger = ledger.charge(RoundEvent(number, release, cohort, population, number, sampling, rate, channel, draw(COUNTS)))
    return ledger


def example(rounds: int = 2) -> Ledger:
    ledger = Ledger()
    for number in range(1, rounds + 1):
        ledger = ledger.charge(RoundEvent(number, BinaryRelease("duchi", 1.0, 21_840, author=OURS), 100, 100, number))
    return ledger


def refusal(text: str) -> str:
    """Expect refusal in one line that begins with the origin, and return it."""
    with pytest.raises(DataError) as caught:
        Ledger.from_json(text, "some/ledger.json")
    message = str(caught.value)
    assert message.splitlines() == [message]
    assert message.startswith("some/ledger.json")
    return message


# --- keeping ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(ledgers())
def test_what_is_read_is_what_was_written(ledger: Ledger) -> None:
    text = ledger.to_json()
    assert Ledger.from_json(text) == ledger
    assert Ledger.from_json(text).to_json() == text


@settings(max_examples=settings().max_examples // 2)
@given(ledgers())
def test_what_is_written_is_strict_ascii_json_with_an_event_a_line(ledger: Ledger) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    text = ledger.to_json()
    tree = json.loads(text, parse_constant=refuse)
    assert (tree["format"], tree["version"]) == ("ldpfl-ledger", 3)
    assert text.isascii()
    assert sum(line.strip().startswith('{"round": ') for line in text.splitlines()) == len(ledger.events) == len(tree["events"])


@settings(max_examples=settings().max_examples // 2)
@given(ledgers(), st.dictionaries(TEXT, st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False), TEXT)))
@pytest.mark.slow
def test_what_was_accounted_is_kept_for_people_and_ignored_on_reading(ledger: Ledger, accounted: dict[str, Any]) -> None:
    text = ledger.to_json(accounted)
    assert json.loads(text)["accounted"] == accounted
    assert Ledger.from_json(text) == ledger


def test_a_false_account_in_the_file_changes_nothing() -> None:
    assert Ledger.from_json(example().to_json({"local": 0.0, "events": [], "version": 7})) == example()


def claimed() -> Ledger:
    release = UnprotectedRelease("ladp", "layers leave without noise", claimed_epsilon=0.9, claimed_delta=1e-3, author=OURS)
    return Ledger().charge(RoundEvent(1, release, 9, 9, 1))


def test_a_paper_s_claim_is_kept() -> None:
    read = Ledger.from_json(claimed().to_json())
    assert read == claimed()
    release = read.events[0].release
    assert isinstance(release, UnprotectedRelease)
    assert (release.claimed_epsilon, release.claimed_delta) == (0.9, 1e-3)


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("claimed_delta", None, "event 1: round 1, release of the mechanism 'ladp': claimed_epsilon must be"),
        ("claimed_epsilon", None, "event 1: round 1, release of the mechanism 'ladp': claimed_epsilon must be"),
        ("claimed_epsilon", 0.0, "event 1: round 1, release of the mechanism 'ladp': claimed_epsilon must be"),
        ("claimed_epsilon", -0.9, "event 1: round 1, release of the mechanism 'ladp': claimed_epsilon must be"),
        ("claimed_epsilon", float("nan"), "event 1: round 1, release of the mechanism 'ladp': claimed_epsilon must be"),
        ("claimed_epsilon", float("inf"), "event 1: round 1, release of the mechanism 'ladp': claimed_epsilon must be"),
        ("claimed_delta", 0.0, "event 1: round 1, release of the mechanism 'ladp': claimed_epsilon must be"),
        ("claimed_delta", 1.0, "event 1: round 1, release of the mechanism 'ladp': claimed_epsilon must be"),
        ("claimed_epsilon", "0.9", "UnprotectedRelease.claimed_epsilon"),
        ("claimed_epsilon", True, "UnprotectedRelease.claimed_epsilon"),
        ("claimed_delta", [], "UnprotectedRelease.claimed_delta"),
        ("claimed_epsilonn", 0.9, "did you mean 'claimed_epsilon'"),
    ],
)
def test_a_claim_that_contradicts_itself_is_refused(name: str, value: Any, named: str) -> None:
    tree = json.loads(claimed().to_json())
    tree["events"][0]["release"][name] = value
    assert named in refusal(json.dumps(tree))


def test_only_what_is_unprotected_carries_a_claim() -> None:
    assert "unknown field 'claimed_epsilon' in BinaryRelease" in refusal(mutated(put(*RELEASE, "claimed_epsilon", to=0.9)))


def test_a_file_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    example(3).save(path)
    example(2).save(path, {"local": 3.0})
    assert Ledger.load(path) == example(2)
    assert list(tmp_path.iterdir()) == [path]


def test_charging_leaves_the_ledger_before_as_it_was() -> None:
    before = example(2)
    after = before.charge(RoundEvent(7, GaussianRelease("gaussian", 0.1, author=OURS), 4, 4, 3))
    assert before == example(2)
    assert after.events[:2] == before.events
    assert after.events[2].round == 7


@pytest.mark.parametrize("number", [1, 2])
def test_a_round_is_charged_once_and_in_order(number: int) -> None:
    with pytest.raises(DataError, match=f"round {number} cannot be charged after round 2"):
        example(2).charge(RoundEvent(number, BinaryRelease("duchi", 1.0, 1, author=OURS), 9, 9, 1))


def test_a_save_that_fails_keeps_the_older_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.json"
    example(1).save(path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteError, match="no space left"):
        example(2).save(path)
    assert Ledger.load(path) == example(1)
    assert list(tmp_path.iterdir()) == [path]


def save_for_ever(path: Path, told: int) -> None:
    ledger = Ledger()
    for number in range(1, 100_000):
        ledger = ledger.charge(RoundEvent(number, BinaryRelease("duchi", 1.0, 21_840, author=OURS), 100, 100, number))
        ledger.save(path)
        os.write(told, b".")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.slow
def test_killed_while_it_saves_over_and_over_it_leaves_a_whole_ledger(tmp_path: Path) -> None:
    """Every round whose saving was told is there, perhaps one more, and never a part of one."""
    instants = random.Random(3)
    for attempt in range(8):
        path = tmp_path / f"{attempt}" / "ledger.json"
        path.parent.mkdir()
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                save_for_ever(path, writer)
            finally:
                os._exit(1)
        os.close(writer)
        told = sum(len(os.read(reader, 1)) for _ in range(5))
        time.sleep(instants.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        while more := len(os.read(reader, 1000)):
            told += more
        os.close(reader)
        events = Ledger.load(path).events
        assert len(events) in (told, told + 1)
        assert [event.round for event in events] == list(range(1, len(events) + 1))


# --- refusing ---------------------------------------------------------------------------------------------------------


Change = Callable[[dict[str, Any]], Any]


def put(*keys: str | int, to: Any) -> Change:
    """Return a change that puts ``to`` at the end of the path ``keys``."""

    def change(tree: dict[str, Any]) -> None:
        node: Any = tree
        for key in keys[:-1]:
            node = node[key]
        node[keys[-1]] = to

    return change


def drop(*keys: str | int) -> Change:
    def change(tree: dict[str, Any]) -> None:
        node: Any = tree
        for key in keys[:-1]:
            node = node[key]
        del node[keys[-1]]

    return change


def mutated(change: Change) -> str:
    tree = json.loads(example().to_json())
    change(tree)
    return json.dumps(tree)


EVENT: tuple[str | int, ...] = ("events", 1)
RELEASE: tuple[str | int, ...] = ("events", 1, "release")

NO_LEDGERS: dict[str, tuple[Change, str]] = {
    "other format": (put("format", to="ldpfl-checkpoint"), "not a ledger"),
    "no format": (drop("format"), "not a ledger"),
    "newer version": (put("version", to=4), "version 4"),
    "older version": (put("version", to=2), "version 2"),
    "version as text": (put("version", to="1"), "version '1'"),
    "version true": (put("version", to=True), "version True"),
    "no version": (drop("version"), "version None"),
    "no events": (drop("events"), "no list of events"),
    "events null": (put("events", to=None), "no list of events"),
    "events an object": (put("events", to={}), "no list of events"),
    "an event a number": (put(*EVENT, to=3), "event 2"),
    "an event null": (put(*EVENT, to=None), "event 2"),
    "no release": (drop(*EVENT, "release"), "event 2: the event's field 'release' must be an object"),
    "release a list": (put(*RELEASE, to=[]), "event 2: the event's field 'release' must be an object"),
    "unknown kind": (put(*RELEASE, "kind", to="binari"), "event 2: unknown kind of release 'binari': did you mean 'binary'"),
    "kind a list": (put(*RELEASE, "kind", to=["binary"]), "unknown kind of release"),
    "no kind": (drop(*RELEASE, "kind"), "unknown kind of release None"),
    "another kind's fields": (put(*RELEASE, "kind", to="gaussian"), "unknown field 'claim' in GaussianRelease"),
    "unknown field of an event": (put(*EVENT, "cohortt", to=3), "did you mean 'cohort'"),
    "unknown field of a release": (put(*RELEASE, "epsilonn", to=3), "did you mean 'epsilon'"),
    "no cohort": (drop(*EVENT, "cohort"), "lacks the field 'cohort'"),
    "no joined": (drop(*EVENT, "joined"), "lacks the field 'joined'"),
    "no epsilon": (drop(*RELEASE, "epsilon"), "lacks the field 'epsilon'"),
    "no units": (drop(*RELEASE, "units"), "lacks the field 'units'"),
    "the same round twice": (put(*EVENT, "round", to=1), "event 2: round 1"),
    "a round before": (put(*EVENT, "round", to=0), "event 2: round 0"),
    "a round below zero": (put(*EVENT, "round", to=-2), "event 2: round -2"),
    "round a float": (put(*EVENT, "round", to=2.0), "RoundEvent.round"),
    "round true": (put(*EVENT, "round", to=True), "RoundEvent.round"),
    "round text": (put(*EVENT, "round", to="2"), "RoundEvent.round"),
    "cohort true": (put(*EVENT, "cohort", to=True), "RoundEvent.cohort"),
    "cohort null": (put(*EVENT, "cohort", to=None), "RoundEvent.cohort"),
    "cohort zero": (put(*EVENT, "cohort", to=0), "cohort of 0"),
    "cohort below zero": (put(*EVENT, "cohort", to=-99), "cohort of -99"),
    "cohort above the population": (put(*EVENT, "cohort", to=101), "cohort of 101 out of 100"),
    "cohort huge": (put(*EVENT, "cohort", to=10**400), "401 digits"),
    "population huge": (put(*EVENT, "population", to=10**400), "401 digits"),
    "joined more than there were": (put(*EVENT, "joined", to=3), "joined 3"),
    "joined nothing": (put(*EVENT, "joined", to=0), "joined 0"),
    "joined true": (put(*EVENT, "joined", to=True), "RoundEvent.joined"),
    "units zero": (put(*RELEASE, "units", to=0), "units and linked must be at least 1"),
    "units below zero": (put(*RELEASE, "units", to=-1), "units and linked must be at least 1"),
    "units true": (put(*RELEASE, "units", to=True), "BinaryRelease.units"),
    "units a float": (put(*RELEASE, "units", to=1.5), "BinaryRelease.units"),
    "units huge": (put(*RELEASE, "units", to=10**400), "401 digits"),
    "unit unknown": (put(*RELEASE, "unit", to="weigth"), "BinaryRelease.unit"),
    "epsilon zero": (put(*RELEASE, "epsilon", to=0.0), "must be positive and finite"),
    "epsilon below zero": (put(*RELEASE, "epsilon", to=-1.0), "must be positive and finite"),
    "epsilon NaN": (put(*RELEASE, "epsilon", to=float("nan")), "must be positive and finite"),
    "epsilon infinite": (put(*RELEASE, "epsilon", to=float("inf")), "must be positive and finite"),
    "epsilon true": (put(*RELEASE, "epsilon", to=True), "BinaryRelease.epsilon"),
    "epsilon null": (put(*RELEASE, "epsilon", to=None), "BinaryRelease.epsilon"),
    "epsilon text": (put(*RELEASE, "epsilon", to="1.0"), "BinaryRelease.epsilon"),
    "epsilon huge": (put(*RELEASE, "epsilon", to=10**400), "401 digits"),
    "epsilon a list": (put(*RELEASE, "epsilon", to=[1.0]), "BinaryRelease.epsilon"),
    "realised above epsilon": (put(*RELEASE, "realised", to=1.01), "realised is 1.01"),
    "realised zero": (put(*RELEASE, "realised", to=0.0), "realised is 0.0"),
    "realised NaN": (put(*RELEASE, "realised", to=float("nan")), "realised is nan"),
    "realised true": (put(*RELEASE, "realised", to=True), "BinaryRelease.realised"),
    "mechanism null": (put(*RELEASE, "mechanism", to=None), "BinaryRelease.mechanism"),
    "sampling unknown": (put(*EVENT, "sampling", to="hidden"), "RoundEvent.sampling"),
    "channel unknown": (put(*EVENT, "channel", to="shuffler"), "RoundEvent.channel"),
    "rate zero": (put(*EVENT, "rate", to=0.0), "rate"),
    "rate NaN": (put(*EVENT, "rate", to=float("nan")), "rate"),
    "rate above one": (put(*EVENT, "rate", to=1.01), "rate"),
    "rate true": (put(*EVENT, "rate", to=True), "RoundEvent.rate"),
    "linked zero": (put(*EVENT, "linked", to=0), "linked = 0"),
    "linked true": (put(*EVENT, "linked", to=True), "RoundEvent.linked"),
}


@pytest.mark.parametrize("name", NO_LEDGERS)
def test_nonsense_is_refused_where_it_stands(name: str) -> None:
    change, named = NO_LEDGERS[name]
    assert named in refusal(mutated(change))


def test_the_ledger_that_is_mutated_above_is_a_good_one() -> None:
    assert Ledger.from_json(mutated(lambda tree: None)) == example()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "3",
        "[]",
        "{}",
        '"ldpfl-ledger"',
        '{"format": "ldpfl-ledger"',
        "[" * 100_000,
        '{"format": ' * 50_000,
        "9" * 5000,
        "\ufeff{}",
        "\x00",
        example().to_json() + "x",
        example().to_json()[:-3],
        example().to_json().replace("1.0", "1e400", 1),
        example().to_json().replace("21840", "2_1840", 1),
        example().to_json().replace("21840", "9" * 5000, 1),
    ],
    ids=repr,
)
def test_text_that_is_no_ledger_is_refused(text: str) -> None:
    refusal(text)


@pytest.mark.parametrize("name", ["two\nlines", "two\u2028lines", "a\r\nb"])
def test_a_mechanism_s_name_cannot_break_the_line(name: str) -> None:
    """Names of mechanisms come from the file, and are repeated in the message."""

    def change(tree: dict[str, Any]) -> None:
        tree["events"][1]["release"].update(mechanism=name, epsilon=-1.0)

    refusal(mutated(change))


def test_a_refusal_does_not_repeat_the_whole_file() -> None:
    assert len(refusal(mutated(put(*RELEASE, "epsilon", to="x" * 100_000)))) < 500


def test_a_field_that_is_given_twice_is_refused() -> None:
    """JSON readers disagree about which one counts."""
    refusal(example().to_json().replace('"epsilon": 1.0', '"epsilon": 1.0, "epsilon": 0.001', 1))


def test_an_unknown_field_beside_the_events_is_refused() -> None:
    """A later format may put there what changes their meaning."""
    refusal(mutated(put("dropped", to=[1])))


@pytest.mark.parametrize("content", [b"\xff\xfe{}", b"\x80", bytes(range(256))])
def test_bytes_that_are_no_text_are_refused_by_file(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"ledger\.json cannot be read"):
        Ledger.load(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.json", tmp_path):
        with pytest.raises(DataError, match="cannot be read"):
            Ledger.load(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "random-ledger.json"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        Ledger.load(path)
    assert len(str(caught.value).splitlines()) == 1


@given(JSON)
def test_random_json_is_refused_in_one_line(tree: Any) -> None:
    refusal(json.dumps(tree))


@given(JSON)
@pytest.mark.slow
def test_random_events_are_refused_in_one_line(entry: Any) -> None:
    refusal(mutated(put(*EVENT, to=entry)))
    refusal(mutated(put(*RELEASE, to=entry)))


FIELDS: list[tuple[str | int, ...]] = [
    *((*EVENT, name) for name in json.loads(example().to_json())["events"][1]),
    *((*RELEASE, name) for name in json.loads(example().to_json())["events"][1]["release"]),
]


@given(st.sampled_from(FIELDS), JSON)
@pytest.mark.slow
def test_a_mutated_field_is_refused_in_one_line_or_read_as_it_stands(path: tuple[str | int, ...], value: Any) -> None:
    """What is read must be what is written: nothing is turned into something else on the way."""
    text = mutated(put(*path, to=value))
    try:
        read = Ledger.from_json(text, "some/ledger.json")
    except DataError:
        refusal(text)
        return
    node: Any = json.loads(read.to_json())
    for key in path:
        node = node[key]
    assert node == value
    assert isinstance(value, str) == isinstance(node, str)
    assert not isinstance(value, bool)
    assert all(1 <= event.cohort <= event.population <= 10**12 for event in read.events)
    assert [event.round for event in read.events] == sorted({event.round for event in read.events})


@given(st.data())
@pytest.mark.slow
def test_a_damaged_file_is_refused_in_one_line_or_still_a_ledger(data: st.DataObject) -> None:
    """One character put, taken or changed anywhere: often that is another number, and then it must be a possible one."""
    text = example().to_json()
    place = data.draw(st.integers(0, len(text) - 1))
    character = data.draw(st.sampled_from(list('0123456789.-+eE"{}[]:, \\nNI')))
    damaged = data.draw(st.sampled_from([text[:place] + character + text[place:], text[:place] + character + text[place + 1 :]]))
    try:
        read = Ledger.from_json(damaged, "some/ledger.json")
    except DataError:
        refusal(damaged)
        return
    assert Ledger.from_json(read.to_json()) == read


def event(number: int, cohort: int = 100, joined: int | None = None, **changes: Any) -> RoundEvent:
    return RoundEvent(
        number, BinaryRelease("duchi", 1.0, 21_840, author=OURS), cohort, changes.pop("population", 100), joined or number, **changes
    )


IMPOSSIBLE: dict[str, tuple[tuple[RoundEvent, ...], str]] = {
    "each took part in all of nine rounds and joined one": (
        tuple(event(number, joined=1) for number in range(1, 10)),
        "event 2: 100 clients sent 200 reports so far, so some client joined more than joined = 1",
    ),
    "everyone, and not all": ((event(1, 99),), "event 1: sampling is 'everyone', but the cohort has only 99 of 100"),
    "all of them by rare coins": ((event(1, sampling="secret", rate=1e-9),), "is impossible at the rate 1e-09"),
    "two of them by fair coins": (
        (event(1, 2, sampling="secret", rate=0.5),),
        "a cohort of 2 out of 100 clients is impossible at the rate 0.5",
    ),
    "fewer than before": ((event(1), event(2, 10, population=10)), "population fell from 100 to 10 clients"),
    "half of them by rare coins": ((event(1, 50, sampling="secret", rate=0.05),), "is impossible at the rate 0.05"),
    "a round in the middle is missing": ((event(1), event(3)), "event 2: round 3 comes after round 1"),
    "the first round is missing": ((event(2),), "event 1: round 2 comes after round 0"),
    "fewer rounds joined than before": ((event(1), event(2), event(3, 1, 1, sampling="visible")), "event 3: a client cannot have joined 2"),
    "a thousand billion clients": ((event(1, 10**12, population=10**12),), "expected at most 1e9 clients"),
    "more than any noise hides": ((RoundEvent(1, PureRelease("a", 1e300, 1, "vector", author=OURS), 5, 5, 1),), "expected 1e-15 to 1e9"),
    "an epsilon of nothing": ((RoundEvent(1, PureRelease("a", 1e-320, 1, "vector", author=OURS), 5, 5, 1),), "expected 1e-15 to 1e9"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_what_no_run_writes_down_is_refused(case: str) -> None:
    events, named = IMPOSSIBLE[case]
    assert named in refusal(Ledger(events).to_json())


def _histories(clients: int, rounds: int) -> set[tuple[tuple[int, int], ...]]:
    """Every (cohort, most rounds that a client joined so far) by round, of all choices of who takes part."""
    states: set[tuple[tuple[int, ...], tuple[tuple[int, int], ...]]] = {((0,) * clients, ())}
    for _ in range(rounds):
        states = {
            (counts := tuple(sorted(map(add, before, who))), (*past, (sum(who), max(counts))))
            for before, past in states
            for who in product((0, 1), repeat=clients)
            if any(who)
        }
    return {past for _, past in states}


@pytest.mark.parametrize(("clients", "rounds"), [(2, 4), (3, 4), (4, 3)])
@pytest.mark.thorough_for("3-4", "4-3")
@pytest.mark.slow
def test_what_is_read_is_just_what_may_have_happened(clients: int, rounds: int) -> None:
    """Whoever takes part: of every cohort and every count, by enumeration."""
    possible, release = _histories(clients, rounds), BinaryRelease("duchi", 1.0, 5, author=OURS)
    for cohorts in product(range(1, clients + 1), repeat=rounds):
        for grown in product((0, 1), repeat=rounds - 1):
            past = tuple(zip(cohorts, accumulate((1, *grown)), strict=True))
            events = (RoundEvent(number, release, cohort, clients, joined, "visible") for number, (cohort, joined) in enumerate(past, 1))
            text = Ledger(tuple(events)).to_json()
            with nullcontext() if past in possible else pytest.raises(DataError, match="some client joined more than"):
                Ledger.from_json(text)


@pytest.mark.parametrize(
    ("other", "channel"),
    [({"mu": 0.9}, "direct"), ({"mu": 0.9, "alike": False}, "ideal-shuffler"), ({"mu": 0.9, "units": 100}, "ideal-shuffler")],
)
def test_rounds_of_noise_are_in_order_of_mu_only_if_they_differ_in_nothing_else(other: dict[str, Any], channel: Channel) -> None:
    """Of two rounds of which a client joined one, that with less noise may be hidden, or be sent once, and the other not."""
    release = GaussianRelease("full-dp", 1.0, alike=True, author=OURS)
    first = RoundEvent(1, release, 1000, 2000, 1, "visible")
    second = RoundEvent(2, replace(release, **other), 1000, 2000, 1, "visible", channel=channel)
    assert sum(group.rounds for group in charged_groups(Ledger((first, second)))) == 2
    assert (
        sum(
            group.rounds
            for group in charged_groups(Ledger((first, replace(second, release=replace(release, mu=0.9), channel=first.channel))))
        )
        == 1
    )


@pytest.mark.parametrize("field", ["mechanism", "reason", "claim"])
def test_nothing_in_a_ledger_steers_a_terminal(field: str) -> None:
    words = {"mechanism": "a", "reason": "weights", "claim": "so", field: "x\x1b[2J\x9b31m"}
    release = UnprotectedRelease(words["mechanism"], words["reason"], 1, "vector", 1.0, 1e-5, words["claim"], author=OURS)
    assert f"UnprotectedRelease.{field}: characters that are not printable" in refusal(Ledger((RoundEvent(1, release, 5, 5, 1),)).to_json())


def test_rounds_of_secret_participation_that_nobody_joined_may_be_left_out() -> None:
    events = (event(2, 3, 1, sampling="secret", rate=0.05), event(7, 0, 1, sampling="secret", rate=0.05))
    assert Ledger.from_json(Ledger(events).to_json()).events == events


def test_a_gap_of_a_thousand_billion_rounds_takes_no_memory() -> None:
    events = (event(1, 3, 1, sampling="secret", rate=0.05), event(10**12, 3, 2, sampling="secret", rate=0.05))
    groups = charged_groups(Ledger(events))
    assert sum(group.rounds for group in groups) == 10**12
    assert epsilon_of(((group.release, group.rounds) for group in groups), 0.0) == pytest.approx(21_840e12)


@pytest.mark.parametrize("change", ["a figure", "one left out", "one twice", "in another order"])
def test_events_are_chained(change: str) -> None:
    tree = json.loads(example(4).to_json())
    events = tree["events"]
    match change:
        case "a figure":
            events[1]["release"]["epsilon"] = 0.9
        case "one left out":
            for later in events[2:]:
                later["round"] -= 1
                later["joined"] -= 1
            del events[1]
        case "one twice":
            events.insert(2, {**events[1], "round": 3, "joined": 3})
            for later in events[3:]:
                later["round"] += 1
                later["joined"] += 1
        case "in another order":
            events[1]["release"], events[2]["release"] = {**events[2]["release"], "units": 5}, events[1]["release"]
    assert "event 2: its chain hash does not match" in refusal(json.dumps(tree)) or change == "one twice"
    assert "event was changed, or one before it was changed, left out or put in" in refusal(json.dumps(tree))


@pytest.mark.parametrize("one", [1, np.float32(1), np.float64(1), np.int64(1)])
def test_a_number_of_any_kind_is_written_as_it_is_read(one: Any) -> None:
    """An author's mechanism may state any: the chain of hashes once was that of another text."""
    releases: tuple[Release, ...] = (
        PureRelease("x", one, int(one), "weight"),
        BinaryRelease("x", one, 3, "weight"),
        GaussianRelease("x", one),
    )
    ledger = Ledger(tuple(RoundEvent(place, release, 10, 10, place) for place, release in enumerate(releases, start=1)))
    again = Ledger.from_json(ledger.to_json())
    assert again == ledger
    assert again.to_json() == ledger.to_json()
