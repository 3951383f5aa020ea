"""The ledger: the privacy events of a run in a file. It holds facts only, and no epsilon.

So a saved ledger can be accounted again later, with a better accountant or for another delta.
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
from ldpfl.privacy.events import KIND_NAMES, KINDS, UNKNOWN, Release, RoundEvent
from ldpfl.privacy.stated_author import with_checked_author
from ldpfl.util.files import MAX_ROUNDS_BYTES, check_events, read_text, unique_fields, whole_number, write_text
from ldpfl.util.suggestions import did_you_mean

LEDGER_FILE = "ledger.json"
"""Name of the ledger in a run's folder."""

FORMAT = "ldpfl-ledger"
VERSION = 3

_IF_CHANGED = "if the file was changed, restore it from a copy"
_MOST_CLIENTS = 10**9
_SMALLEST_PARAMETER, _LARGEST_PARAMETER = 1e-15, 1e9
_IMPOSSIBLE = 1e-15
"""Probability below which a cohort size is rejected as impossible for clients that decide by random coins."""

_DEFAULTS_LEFT_OUT = [("blanket", None), ("alike", False), ("integers", False), ("signed", False), ("author", UNKNOWN)]
"""Field values of a release that are not written: a ledger without a field has its default. Chain hashes rely on this."""

_TOP_FIELDS = {"format", "version", "events", "accounted"}

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Ledger:
    """The events of a run, in order of their rounds."""

    events: tuple[RoundEvent, ...] = ()

    def charge(self, event: RoundEvent) -> Ledger:
        """Return the ledger with one more round.

        Raises:
            DataError: the event's round is not later than the last one: it would be charged twice, or out of order.
        """
        longer_ledger = Ledger((*self.events, _require_later(self.events, event)))
        if "_chain" in vars(self):  # a ledger is saved after each round: reuse the cached lines, and serialise only the new event
            lines, last_hash = self._chain
            line, new_hash = _line_and_hash(event, last_hash)
            vars(longer_ledger)["_chain"] = ((*lines, line), new_hash)
        return longer_ledger

    @property
    def lines(self) -> tuple[str, ...]:
        """Each event as JSON text, with its chain hash."""
        return self._chain[0]

    @cached_property
    def _chain(self) -> tuple[tuple[str, ...], str]:
        """The lines, and the chain hash of the last one."""
        lines, link = [], ""
        for event in self.events:
            line, link = _line_and_hash(event, link)
            lines.append(line)
        return tuple(lines), link

    @property
    def measured(self) -> int:
        """Number of rounds that measured histograms of columns before the first round of training."""
        return next((index for index, event in enumerate(self.events) if not event.histograms), len(self.events))

    def to_json(self, accounted: Mapping[str, Any] | None = None) -> str:
        """Return the ledger as JSON text, one line for each event. ``accounted`` is added for human readers and ignored when read back."""
        extra = f',\n "accounted": {json.dumps(accounted)}' if accounted is not None else ""
        return _json_document(self.lines, extra)

    @classmethod
    def from_lines(cls, lines: Sequence[str], origin: str = "ledger") -> Ledger:
        """Return the ledger with these :attr:`lines`, which are checked as untrusted input. Raises the errors of :meth:`from_json`."""
        return cls.from_json(_json_document(lines), origin)

    @classmethod
    def from_json(cls, text: str, origin: str = "ledger") -> Ledger:
        """Read the JSON text of a ledger; ``origin`` is its name in errors.

        If a release states this project as author but cannot be this project's, its author is replaced: see
        :mod:`ldpfl.privacy.stated_author`.

        Raises:
            DataError: the text is no ledger, has another version, or has an event that is unknown or contradicts another.
        """
        try:
            check_events(text)
            tree = json.loads(text, parse_int=whole_number, object_pairs_hook=unique_fields)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{origin} is not valid JSON: {error}") from None
        if not isinstance(tree, dict) or tree.get("format") != FORMAT:
            raise DataError(f"{origin} is not a ledger: it lacks the field format = {FORMAT!r}; give the ledger.json of a run")
        version = tree.get("version")
        if type(version) is not int or version != VERSION:
            raise DataError(
                f"{origin} is a ledger of version {_shortened(version)}, and this ldpfl reads version {VERSION}: use the ldpfl that wrote "
                "it, or restore the file"
            )
        unknown = sorted(tree.keys() - _TOP_FIELDS)
        if unknown:
            raise DataError(f"{origin} has an unknown field {_shortened(unknown[0])}: expected only {', '.join(sorted(_TOP_FIELDS))}")
        if not isinstance(tree.get("events"), list):
            raise DataError(f"{origin} is a ledger, but it has no list of events: restore the file from a copy")
        events: list[RoundEvent] = []
        links = []
        for index, entry in enumerate(tree["events"], start=1):
            try:
                # The stored chain hash is checked below. It is no field of the event.
                links.append(entry.pop("chain", None) if isinstance(entry, dict) else None)
                events.append(_require_later(events, _event_from_json(entry)))
            except LdpflError as error:
                raise DataError(f"{origin}, event {index}: {error} ({_IF_CHANGED})") from None
        _check_possible(events, origin)
        _check_chained(events, links, origin)
        return cls(tuple(map(_with_checked_author, events)))

    def save(self, path: Path, accounted: Mapping[str, Any] | None = None) -> None:
        """Write the ledger to ``path`` atomically: after a crash the file holds this ledger or the previous one."""
        write_text(path, self.to_json(accounted))

    @classmethod
    def load(cls, path: Path) -> Ledger:
        """Read a ledger file. Raises the errors of :meth:`from_json`."""
        try:
            text = read_text(path, MAX_ROUNDS_BYTES)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"ledger {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        return cls.from_json(text, str(path))


def _json_document(lines: Sequence[str], extra: str = "") -> str:
    """Return the JSON text of a ledger with these event ``lines``; ``extra`` is JSON text of further fields."""
    events = ",\n".join(f"  {line}" for line in lines)
    return f'{{"format": "{FORMAT}", "version": {VERSION},\n "events": [\n{events}\n ]{extra}\n}}\n'


def _line_and_hash(event: RoundEvent, previous: str) -> tuple[str, str]:
    """Return an event as JSON text, and its chain hash. The hash also depends on ``previous``, the hash of the event before it."""
    link = _chain_hash(previous, event)
    return json.dumps({**_event_to_json(event), "chain": link}), link


def _with_checked_author(event: RoundEvent) -> RoundEvent:
    """Return ``event`` with the author of its release replaced, if the stated author cannot be true."""
    release = with_checked_author(event.release)
    return event if release is event.release else replace(event, release=release)


def _require_later(events: Sequence[RoundEvent], event: RoundEvent) -> RoundEvent:
    """Return ``event`` if its round is later than those of ``events``, else raise a :class:`DataError`."""
    if events and event.round <= events[-1].round:
        raise DataError(
            f"round {event.round} cannot be charged after round {events[-1].round}, because rounds ascend: resume from the newest "
            "checkpoint"
        )
    return event


def _chain_hash(previous: str, event: RoundEvent) -> str:
    """Return the chain hash of ``event``. It also depends on ``previous``, the chain hash of the event before it.

    So an event that is changed or lost by accident is found. A forger can compute the hashes anew.
    """
    return hashlib.sha256(f"{previous}{json.dumps(_event_to_json(event), sort_keys=True)}".encode()).hexdigest()[:16]


def _check_chained(events: Sequence[RoundEvent], links: Sequence[object], origin: str) -> None:
    """Raise a :class:`DataError` unless each stored hash in ``links`` is the chain hash of its event."""
    link = ""
    for index, (event, stored) in enumerate(zip(events, links, strict=True), start=1):
        link = _chain_hash(link, event)
        if stored != link:
            raise DataError(
                f"{origin}, event {index}: its chain hash does not match, so this event was changed, or one before it was changed, "
                "left out or put in; restore the file from a copy"
            )


def _check_possible(events: Sequence[RoundEvent], origin: str) -> None:
    """Reject events that no run can have. With them, the client that is charged might not be the one that took part most often.

    Raises:
        DataError: an event contradicts itself, or the events before it.
    """
    previous, others_by_rounds, reports = None, Counter[int](), 0
    for index, event in enumerate(events, start=1):
        reports += event.cohort
        reason = _reason_impossible(event, previous)
        if not reason:
            others_by_rounds = _other_clients_by_rounds(others_by_rounds, event, previous)
            if others_by_rounds.total() >= event.population or max(others_by_rounds, default=0) > event.joined:
                reason = (
                    f"{event.population:,} clients sent {reports:,} reports so far, "
                    f"so some client joined more than joined = {event.joined} rounds"
                )
        if reason:
            raise DataError(f"{origin}, event {index}: {reason} ({_IF_CHANGED})")
        previous = event


def _other_clients_by_rounds(earlier: Counter[int], event: RoundEvent, previous: RoundEvent | None) -> Counter[int]:
    """Return how many of the other clients joined 0, 1, ... rounds up to ``event``; ``earlier`` is the result up to ``previous``.

    At any time some client has joined ``joined`` rounds. It may be assumed to be one client throughout, that joins a round whenever
    ``joined`` grows. It is not among the others. The others share the remaining reports as evenly as possible, so that the largest number
    of rounds is as small as possible. If there are too few clients for the reports, the result has more clients than exist.
    """
    busiest_client_joins = event.joined > (previous.joined if previous else 0)
    unassigned_reports = event.cohort - busiest_client_joins
    # Clients that are new in the population have joined no round so far.
    clients_by_rounds = earlier + Counter({0: event.population - 1 - earlier.total()})
    for rounds, clients in sorted(clients_by_rounds.items()):
        joining = max(0, min(unassigned_reports, clients))
        clients_by_rounds[rounds] -= joining
        clients_by_rounds[rounds + 1] += joining
        unassigned_reports -= joining
    # Reports that are left over count as further clients, which do not exist: the caller rejects the event. Unary plus drops entries of 0.
    return +clients_by_rounds + Counter({event.joined: max(0, unassigned_reports)})


def _reason_impossible(event: RoundEvent, previous: RoundEvent | None) -> str:
    """Return the reason why ``event`` cannot follow the event ``previous``; empty if it can. ``previous`` is None for the first event."""
    last_round, joined = (previous.round, previous.joined) if previous else (0, 0)
    parameter = event.release.parameter
    if event.population > _MOST_CLIENTS:
        return f"population is {event.population:,}, expected at most 1e9 clients"
    if not (_SMALLEST_PARAMETER <= parameter <= _LARGEST_PARAMETER or parameter == inf):
        return f"the release has the epsilon or mu {parameter:g}, expected 1e-15 to 1e9"
    if event.sampling == "everyone" and event.cohort < event.population:
        return f"sampling is 'everyone', but the cohort has only {event.cohort:,} of {event.population:,} clients"
    if event.sampling == "secret" and _tail_probability(event) < _IMPOSSIBLE:
        return f"a cohort of {event.cohort:,} out of {event.population:,} clients is impossible at the rate {event.rate:g}"
    if previous and event.population < previous.population:
        return (
            f"population fell from {previous.population:,} to {event.population:,} clients: it must not fall, "
            "since clients that left are still counted"
        )
    # With secret participation, rounds that nobody joined are not in the ledger.
    if event.round != last_round + 1 and event.sampling != "secret":
        return f"round {event.round} comes after round {last_round}: the rounds between them are missing"
    if not joined <= event.joined <= joined + event.round - last_round:
        return f"a client cannot have joined {joined} rounds by round {last_round} and {event.joined} by round {event.round}"
    return ""


def _tail_probability(event: RoundEvent) -> float:
    """Return the probability of a cohort of at most this size, or of at least this size, whichever is smaller.

    Each client joins with the probability ``rate``. Clients that dropped out are not in the cohort: it is tested and charged as it is.
    """
    # bdtr(k, n, p) and bdtrc(k, n, p): probability that at most k, or more than k, of n clients join.
    at_most = bdtr(event.cohort, event.population, event.rate)
    at_least = bdtrc(event.cohort - 1, event.population, event.rate) if event.cohort else 1.0
    return float(min(at_most, at_least))


def _shortened(value: Any) -> str:
    """Return ``value`` for an error message, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _event_to_json(event: RoundEvent) -> dict[str, Any]:
    """Return ``event`` as a JSON object. Some fields are left out at their defaults."""
    tree = {**asdict(event), **_numbers_as_python_types(event)}
    fields = {**tree["release"], **_numbers_as_python_types(event.release)}
    release = {name: value for name, value in fields.items() if (name, value) not in _DEFAULTS_LEFT_OUT}
    for name in ("histograms", "colluding"):
        if not tree[name]:
            del tree[name]
    return {**tree, "release": {"kind": KIND_NAMES[type(event.release)], **release}}


def _numbers_as_python_types(thing: RoundEvent | Release) -> dict[str, float]:
    """Return the fields of ``thing`` that are declared as ``float`` or ``int``, converted to that type. Fields that are None are left out.

    A mechanism may state an ``int`` for a ``float``, or a number of NumPy. Its JSON text, and so its chain hash, would differ from that of
    the number that is read back.
    """
    # The type's first word decides, so that "float | None" counts as float.
    stated = {field.name: (str(field.type).partition(" ")[0], getattr(thing, field.name)) for field in fields(thing)}
    kinds = {"float": float, "int": int}
    return {name: kinds[declared](value) for name, (declared, value) in stated.items() if declared in kinds and value is not None}


def _event_from_json(tree: Any) -> RoundEvent:
    """Return the event of a JSON object that was read from a ledger. The object is untrusted: raise a :class:`DataError` if it is wrong."""
    if not isinstance(tree, dict) or not isinstance(tree.get("release"), dict):
        raise DataError("the event's field 'release' must be an object that has a field 'kind'")
    kind = tree["release"].get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise DataError(f"unknown kind of release {_shortened(kind)}: {did_you_mean(str(kind)[:40], KINDS)}")
    fields = {name: value for name, value in tree["release"].items() if name != "kind"}
    release = _construct(KINDS[kind], fields)
    return _construct(RoundEvent, {**tree, "release": release})


def _construct(kind: type[Kind], values: dict[str, Any]) -> Kind:
    """Build the dataclass ``kind`` from untrusted ``values``. An unknown, missing or mistyped field raises :class:`DataError`."""
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(values.keys() - known.keys())
    if unknown:
        raise DataError(f"unknown field {_shortened(unknown[0])} in {kind.__name__}: {did_you_mean(unknown[0][:40], known)}")
    missing = [name for name, field in known.items() if field.default is MISSING and name not in values]
    if missing:
        raise DataError(f"{kind.__name__} lacks the field {missing[0]!r}")
    types = _field_types(kind)  # type: ignore[arg-type]
    return kind(**{name: _validated(types[name], value, f"{kind.__name__}.{name}") for name, value in values.items()})


@cache
def _field_types(kind: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name, cached."""
    return get_type_hints(kind)


@cache
def _cached_validator(expected_type: Any) -> TypeAdapter[Any]:
    """Build a type's validator, cached: building it takes longer than validating a field."""
    return TypeAdapter(expected_type)


def _validated(expected_type: Any, value: Any, place: str) -> Any:
    """Return ``value`` if it has the expected type, else raise :class:`DataError`; ``place`` names the field in the error."""
    if isinstance(value, str) and not value.isprintable():  # the text is shown, and control characters may steer a terminal
        raise DataError(f"{place}: characters that are not printable, in {_shortened(value)}")
    try:
        return _cached_validator(expected_type).validate_python(value, strict=True)
    except ValidationError as error:
        raise DataError(f"{place}: {error.errors()[0]['msg']}, got {_shortened(value)}") from None
