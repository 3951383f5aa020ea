"""The ledger: the events of a run in a file, kept apart from what any accountant makes of them.

A saved ledger can be accounted again later, by a better accountant or for another delta.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cache, cached_property
from math import inf
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError
from scipy.special import bdtr, bdtrc

from ldpfl.errors import DataError, LdpflError
from ldpfl.privacy.believed import believed
from ldpfl.privacy.events import UNKNOWN, BinaryRelease, GaussianRelease, PureRelease, Release, RoundEvent, UnprotectedRelease
from ldpfl.util.files import MAX_ROUNDS_BYTES, check_events, read_text, unique_fields, whole_number, write_text
from ldpfl.util.suggestions import did_you_mean

LEDGER_FILE = "ledger.json"
"""Name of the ledger in a run's folder."""

FORMAT = "ldpfl-ledger"
VERSION = 3
_CHAINED = 3
"""From this version on each event carries a hash of itself and of all before it: that finds accidents, and no forger."""

_MOST_CLIENTS = 10**9
_SMALLEST_PARAMETER, _LARGEST_PARAMETER = 1e-15, 1e9
_IMPOSSIBLE = 1e-15
"""Probability below which a number of clients is not one that came about by their own coins."""

_CLAIMS_OF_VERSION_1: Mapping[str, str] = {
    "duchi": "LDP-FL, section 4: shuffling hides who sent a bit, but a client's bits are many, and they add up",
    "harmony": "Optimal LDP-FL, section 4: epsilon is spent once a layer and round, and these add up",
}
"""Events of version 1 did not say what their mechanism's paper claims of them."""

_NOT_STATED = [("blanket", None), ("alike", False), ("integers", False), ("signed", False), ("author", UNKNOWN)]
"""What was not known of a release when a ledger was written is not in it, nor in its chain."""

_PARTS = {"format", "version", "events", "accounted"}

_KINDS: Mapping[str, type[Release]] = {
    "binary": BinaryRelease,
    "pure": PureRelease,
    "gaussian": GaussianRelease,
    "unprotected": UnprotectedRelease,
}
Kind = TypeVar("Kind")
_NAMES = {kind: name for name, kind in _KINDS.items()}


@dataclass(frozen=True)
class Ledger:
    """The events of a run, in order of their rounds."""

    events: tuple[RoundEvent, ...] = ()

    def charge(self, event: RoundEvent) -> Ledger:
        """Return the ledger with one more round.

        Raises:
            DataError: the event's round is not later than the last one: it would be charged twice, or out of order.
        """
        grown = Ledger((*self.events, _after(self.events, event)))
        if "_linked" in vars(self):  # a ledger that is written after each round is not made into text anew each time
            lines, link = self._linked
            line, link = _line(event, link)
            vars(grown)["_linked"] = ((*lines, line), link)
        return grown

    @property
    def lines(self) -> tuple[str, ...]:
        """Each event as JSON text, with its link of the chain."""
        return self._linked[0]

    @cached_property
    def _linked(self) -> tuple[tuple[str, ...], str]:
        """The lines, and the last link of the chain."""
        lines, link = [], ""
        for event in self.events:
            line, link = _line(event, link)
            lines.append(line)
        return tuple(lines), link

    @property
    def measured(self) -> int:
        """How many histograms of columns there are: they come before the first round of training."""
        return next((place for place, event in enumerate(self.events) if not event.histograms), len(self.events))

    def to_json(self, accounted: Mapping[str, Any] | None = None) -> str:
        """Return the ledger as JSON text, an event a line; ``accounted`` is kept beside it for people, and not read back."""
        extra = f',\n "accounted": {json.dumps(accounted)}' if accounted is not None else ""
        return _document(self.lines, extra)

    @classmethod
    def from_lines(cls, lines: Sequence[str], origin: str = "ledger") -> Ledger:
        """Return the ledger of :attr:`lines`, which may be somebody else's; errors as in :meth:`from_json`."""
        return cls.from_json(_document(lines), origin)

    @classmethod
    def from_json(cls, text: str, origin: str = "ledger") -> Ledger:
        """Read what :meth:`to_json` wrote; ``origin`` is named in errors.

        A release that says it is this project's, and cannot be, comes back with another author: see :mod:`ldpfl.privacy.believed`.

        Raises:
            DataError: not a ledger, of another version, or with an event that is unknown or contradicts itself; one line.
        """
        try:
            check_events(text)
            tree = json.loads(text, parse_int=whole_number, object_pairs_hook=unique_fields)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{origin} is not valid JSON: {error}") from None
        if not isinstance(tree, dict) or tree.get("format") != FORMAT:
            raise DataError(f"{origin} is not a ledger: it lacks the field format = {FORMAT!r}")
        version = tree.get("version")
        if type(version) is not int or not 1 <= version <= VERSION:
            raise DataError(f"{origin} is a ledger of version {_short(version)}, and this ldpfl reads versions up to {VERSION}")
        unknown = sorted(tree.keys() - _PARTS)
        if unknown:
            raise DataError(f"{origin} has an unknown part {_short(unknown[0])}")
        if not isinstance(tree.get("events"), list):
            raise DataError(f"{origin} has no list of events")
        events: list[RoundEvent] = []
        links = []
        for index, entry in enumerate(tree["events"], start=1):
            try:
                links.append(entry.pop("chain", None) if isinstance(entry, dict) and version >= _CHAINED else None)
                events.append(_after(events, _from_tree(entry, version)))
            except LdpflError as error:
                raise DataError(f"{origin}, event {index}: {error}") from None
        _check_possible(events, origin, gaps=version < _CHAINED)
        if version >= _CHAINED:
            _check_chained(events, links, origin)
        return cls(tuple(map(_believed, events)))

    def save(self, path: Path, accounted: Mapping[str, Any] | None = None) -> None:
        """Write to ``path`` so that a crash leaves this ledger or the one before."""
        write_text(path, self.to_json(accounted))

    @classmethod
    def load(cls, path: Path) -> Ledger:
        """Read a ledger file; errors as in :meth:`from_json`."""
        try:
            text = read_text(path, MAX_ROUNDS_BYTES)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"ledger {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        return cls.from_json(text, str(path))


def _document(lines: Sequence[str], extra: str = "") -> str:
    events = ",\n".join(f"  {line}" for line in lines)
    return f'{{"format": "{FORMAT}", "version": {VERSION},\n "events": [\n{events}\n ]{extra}\n}}\n'


def _line(event: RoundEvent, before: str) -> tuple[str, str]:
    """Return an event as JSON text, and its link of the chain after the link ``before``."""
    link = _next_link(before, event)
    return json.dumps({**_to_tree(event), "chain": link}), link


def _believed(event: RoundEvent) -> RoundEvent:
    release = believed(event.release)
    return event if release is event.release else replace(event, release=release)


def _after(events: Sequence[RoundEvent], event: RoundEvent) -> RoundEvent:
    """Return ``event`` if its round is later than those of ``events``, else raise a :class:`DataError`."""
    if events and event.round <= events[-1].round:
        raise DataError(f"round {event.round} cannot be charged after round {events[-1].round}")
    return event


def _next_link(link: str, event: RoundEvent) -> str:
    return hashlib.sha256(f"{link}{json.dumps(_to_tree(event), sort_keys=True)}".encode()).hexdigest()[:16]


def _check_chained(events: Sequence[RoundEvent], links: Sequence[object], origin: str) -> None:
    link = ""
    for index, (event, told) in enumerate(zip(events, links, strict=True), start=1):
        link = _next_link(link, event)
        if told != link:
            raise DataError(f"{origin}, event {index}: it was changed, or one before it was changed, left out or put in")


def _check_possible(events: Sequence[RoundEvent], origin: str, *, gaps: bool) -> None:
    """Refuse what no run writes down: the client that is charged would not be the one that took part most often.

    With ``gaps``, rounds may be missing that each client decided not to join: earlier versions left them out.

    Raises:
        DataError: an event contradicts itself, or those before it.
    """
    before, others, reports = None, Counter[int](), 0
    for index, event in enumerate(events, start=1):
        why, reports = _impossible(event, before, gaps=gaps), reports + event.cohort
        if not why:
            others = _joined_by_others(others, event, before)
            if others.total() >= event.population or max(others, default=0) > event.joined:
                why = f"{reports:,} reports of {event.population:,} clients: some client joined more than {event.joined} rounds"
        if why:
            raise DataError(f"{origin}, event {index}: {why}")
        before = event


def _joined_by_others(others: Counter[int], event: RoundEvent, before: RoundEvent | None) -> Counter[int]:
    """Return how many clients joined how many rounds, but for one that joined whenever ``joined`` grew; more than there are if none could.

    They share the other reports as evenly as can be: no other division keeps the largest of their counts as small. And that some client
    has ``joined`` at every time means that one of them had it all along.
    """
    left = event.cohort - (event.joined > (before.joined if before else 0))
    after = others + Counter({0: event.population - 1 - others.total()})
    for count, clients in sorted(after.items()):
        now = max(0, min(left, clients))
        after[count] -= now
        after[count + 1] += now
        left -= now
    return +after + Counter({event.joined: max(0, left)})


def _impossible(event: RoundEvent, before: RoundEvent | None, *, gaps: bool) -> str:
    """Say why no run has such a round after the one ``before``; empty if one may."""
    last, joined = (before.round, before.joined) if before else (0, 0)
    parameter = event.release.parameter
    if event.population > _MOST_CLIENTS or not (_SMALLEST_PARAMETER <= parameter <= _LARGEST_PARAMETER or parameter == inf):
        return "more than 1e9 clients, or a parameter below 1e-15 or above 1e9, are not accounted"
    if event.sampling == "everyone" and event.cohort < event.population:
        return f"everyone took part, and only {event.cohort:,} of {event.population:,} clients did"
    if event.sampling == "secret" and _least_tail(event) < _IMPOSSIBLE:
        return f"{event.cohort:,} of {event.population:,} clients do not join by coins of probability {event.rate:g}"
    if before and event.population < before.population:
        return f"{before.population:,} clients were known before, and {event.population:,} are now: those that left are counted, too"
    if event.round != last + 1 and not (event.sampling == "secret" or (gaps and event.sampling == "visible")):
        return f"round {event.round} comes after round {last}: what others released is missing"
    if not joined <= event.joined <= joined + event.round - last:
        return f"a client cannot have joined {joined} rounds before and {event.joined} now"
    return ""


def _least_tail(event: RoundEvent) -> float:
    """Return the probability that so few join by coins, or so many, whichever is smaller; who drops out then is charged as one of fewer."""
    fewer, more = bdtr(event.cohort, event.population, event.rate), bdtrc(event.cohort - 1, event.population, event.rate)
    return float(min(fewer, more if event.cohort else 1.0))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _to_tree(event: RoundEvent) -> dict[str, Any]:
    tree = asdict(event)
    release = {name: value for name, value in tree["release"].items() if (name, value) not in _NOT_STATED}
    for name in ("histograms", "colluding"):
        if not tree[name]:
            del tree[name]  # nor what was not said of a round
    return {**tree, "release": {"kind": _NAMES[type(event.release)], **release}}


def _from_tree(tree: Any, version: int) -> RoundEvent:
    if not isinstance(tree, dict) or not isinstance(tree.get("release"), dict):
        raise DataError("an event needs a release, which is an object with a kind")
    kind = tree["release"].get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise DataError(f"unknown kind of release {_short(kind)}: {did_you_mean(str(kind)[:40], _KINDS)}")
    fields = {name: value for name, value in tree["release"].items() if name != "kind"}
    if version == 1 and kind in ("binary", "pure") and str(fields.get("mechanism")) in _CLAIMS_OF_VERSION_1:
        fields["claim"] = _CLAIMS_OF_VERSION_1[fields["mechanism"]]
    release = _build(_KINDS[kind], fields)
    return _build(RoundEvent, {**tree, "release": release})


def _build(kind: type[Kind], values: dict[str, Any]) -> Kind:
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(values.keys() - known.keys())
    if unknown:
        raise DataError(f"unknown field {_short(unknown[0])} in {kind.__name__}: {did_you_mean(unknown[0][:40], known)}")
    missing = [name for name, field in known.items() if field.default is MISSING and name not in values]
    if missing:
        raise DataError(f"{kind.__name__} lacks the field {missing[0]!r}")
    types = _types(kind)  # type: ignore[arg-type]
    return kind(**{name: _checked(types[name], value, f"{kind.__name__}.{name}") for name, value in values.items()})


@cache
def _types(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


@cache
def _adapter(wanted: Any) -> TypeAdapter[Any]:
    """Made once: that takes longer than all else that is done with a field."""
    return TypeAdapter(wanted)


def _checked(wanted: Any, value: Any, place: str) -> Any:
    if isinstance(value, str) and not value.isprintable():  # it would be shown, and may steer a terminal
        raise DataError(f"{place}: characters that are not printable, in {_short(value)}")
    try:
        return _adapter(wanted).validate_python(value, strict=True)
    except ValidationError as error:
        raise DataError(f"{place}: {error.errors()[0]['msg']}, got {_short(value)}") from None
