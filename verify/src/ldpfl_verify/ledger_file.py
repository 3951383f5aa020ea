"""Read a run's ledger, and refuse one that was edited or that no run can have written.

A ledger is a list of privacy events, one for each round. Each event carries a hash of itself and of all events before it.
That finds accidents and careless edits; it does not stop a forger, who can compute all hashes anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any, get_args

from scipy.special import bdtr, bdtrc

from ldpfl_verify.bounded_json import MAX_LEDGER_BYTES, parse_ledger, read_bytes
from ldpfl_verify.certificate_file import Channel, ChargedRounds, ClientRelease, Sampling
from ldpfl_verify.errors import CertificateError, quoted
from ldpfl_verify.field_checks import MAX_COUNT, check_fields, count, flag, number, object_of, one_of
from ldpfl_verify.stated_author import with_author_of_bits, with_believed_author

LEDGER_FILE = "ledger.json"
"""Name of the ledger in a run's folder."""

MAX_CLIENTS = 10**9
MIN_PROBABILITY = 1e-15
"""Probability below which a cohort size is rejected as impossible for clients that decide at random."""

_VERSION = 3
_PARAMETERS = {"binary": "epsilon", "pure": "epsilon", "gaussian": "mu", "unprotected": None}
_NOT_CHARGED = {"claim", "realised", "signed", "reason", "claimed_epsilon", "claimed_delta"}
"""Fields of a release in a ledger that say nothing about its cost."""

_FIELDS = {
    "binary": {"epsilon", "realised", "sampled", "claim"},
    "pure": {"epsilon", "blanket", "signed", "claim"},
    "gaussian": {"mu", "rate", "alike", "integers"},
    "unprotected": {"reason", "claimed_epsilon", "claimed_delta", "claim"},
}
"""Fields of a release of each kind, beside those of every kind."""

_FIELDS_OF_ALL = {"kind", "mechanism", "units", "unit", "author"}


@dataclass(frozen=True)
class Event:
    """One round of a ledger.

    Attributes:
        round: number of the round, from 1.
        release: the report of each client of the cohort.
        cohort: number of clients whose reports were mixed or added up. It is 0 if each client decided for itself and none joined.
        population: number of clients that could have taken part.
        joined: the largest number of rounds that any one client has joined so far, this round included.
        sampling, rate, channel, linked: as in :class:`ldpfl_verify.certificate_file.ChargedRounds`.
        histograms: whether the round measured counts and not a model; it costs the same.
        colluding: number of clients that are assumed to work together against the others. Nobody hides behind their reports or noise.
    """

    round: int
    release: ClientRelease
    cohort: int
    population: int
    joined: int
    sampling: Sampling
    rate: float
    channel: Channel
    linked: int
    histograms: bool = False
    colluding: int = 0

    def __post_init__(self) -> None:
        check_fields(self, _EVENT)

    def as_charged(self, colluding: int) -> ChargedRounds:
        """Return the round as a certificate charges it if ``colluding`` clients work together."""
        return ChargedRounds(
            release=self.release,
            cohort=max(1, self.cohort - colluding),
            population=max(1, self.population - colluding),
            rounds=1,
            sampling=self.sampling,
            rate=self.rate,
            channel=self.channel,
            linked=min(self.linked, self.release.units),
        )


def _count_or_zero(value: object) -> int:
    """Check that ``value`` is a whole number from 0 to 10^12, and return it."""
    return 0 if value == 0 and not isinstance(value, bool) else count(value)


_EVENT = {
    "round": count,
    "release": object_of(ClientRelease),
    "cohort": _count_or_zero,
    "population": count,
    "joined": _count_or_zero,
    "sampling": one_of(*get_args(Sampling)),
    "rate": number(lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "channel": one_of(*get_args(Channel)),
    "linked": count,
    "histograms": flag,
    "colluding": _count_or_zero,
}


@dataclass(frozen=True)
class Ledger:
    """The events of a ledger, and the SHA-256 of the file's bytes."""

    sha256: str
    events: tuple[Event, ...]


def read_ledger(path: Path) -> Ledger:
    """Return the ledger in the file at ``path``, or in the run's folder at ``path``.

    Raises:
        CertificateError: the file cannot be read, is no ledger, was changed, or contradicts itself.
    """
    file = path / LEDGER_FILE if path.is_dir() else path
    try:
        content = read_bytes(file, MAX_LEDGER_BYTES)
        return Ledger(hashlib.sha256(content).hexdigest(), _checked_events(parse_ledger(content.decode())))
    except OSError as error:
        raise CertificateError(f"ledger {file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CertificateError(f"{file} is not a ledger of a run: {error}") from None


def _checked_events(tree: Any) -> tuple[Event, ...]:
    """Return the events of a ledger's JSON. Raise a ``ValueError`` if it is no ledger, was changed, or contradicts itself."""
    if not isinstance(tree, dict) or tree.get("format") != "ldpfl-ledger" or not isinstance(tree.get("events"), list):
        raise ValueError("it lacks the field format = 'ldpfl-ledger', or a list of events")
    if tree.get("version") != _VERSION:
        raise ValueError(f"it has version {quoted(tree.get('version'))}, expected {_VERSION}")
    events: list[Event] = []
    last_hash, reports = "", 0
    for place, entry in enumerate(tree["events"], start=1):
        try:
            last_hash = _check_link(entry, last_hash)
            event = _event_from(entry)
            reports += event.cohort
            why = _why_impossible(event, events[-1] if events else None, reports)
            if why:
                raise ValueError(why)
        except ValueError as error:
            raise ValueError(f"event {place}: {error}") from None
        events.append(event)
    return tuple(events)


def _check_link(entry: Any, previous_hash: str) -> str:
    """Return the hash of the event ``entry`` and of all before it, if the event states the same.

    Raises:
        ValueError: the event states another hash, or none.
    """
    if not isinstance(entry, dict):
        raise ValueError(f"got {quoted(entry)}, expected an object")
    hashed = json.dumps({name: value for name, value in entry.items() if name != "chain"}, sort_keys=True)
    event_hash = hashlib.sha256(f"{previous_hash}{hashed}".encode()).hexdigest()[:16]
    if entry.get("chain") != event_hash:
        raise ValueError("the event was changed, or an earlier event was changed, left out or put in")
    return event_hash


def _event_from(entry: Mapping[str, Any]) -> Event:
    """Return the event that the JSON object ``entry`` holds. Raise a ``ValueError`` if its fields are not those of an event."""
    fields = {name: value for name, value in entry.items() if name != "chain"}
    try:
        return Event(**{**fields, "release": _release_from(fields.get("release"))})
    except TypeError:  # of the constructor: a field is missing or unknown
        raise ValueError(f"its fields are {', '.join(sorted(fields))[:200]}; expected {', '.join(_EVENT)}") from None


def _release_from(tree: Any) -> ClientRelease:
    """Return the release in an event's JSON, with the author that can be believed. Raise a ``ValueError`` if no mechanism makes it."""
    kind = tree.get("kind") if isinstance(tree, dict) else None
    if not isinstance(kind, str) or kind not in _PARAMETERS:
        raise ValueError(f"got a release of kind {quoted(kind)}, expected {', '.join(_PARAMETERS)}")
    known = _FIELDS[kind] | _FIELDS_OF_ALL
    wrong_fields = f"a release of kind {kind!r} has the fields {', '.join(sorted(tree))[:200]}; expected {', '.join(sorted(known))}"
    if not tree.keys() <= known:
        raise ValueError(wrong_fields)
    parameter_name = _PARAMETERS[kind]  # None if releases of this kind have no parameter
    fields = {name: value for name, value in tree.items() if name not in _NOT_CHARGED and name != parameter_name}
    try:
        release = ClientRelease(**{**fields, "parameter": None if parameter_name is None else tree[parameter_name]})
    except (TypeError, KeyError):
        raise ValueError(wrong_fields) from None
    why = _why_impossible_release(release)
    if why:
        raise ValueError(why)
    realised = tree.get("realised")
    return with_believed_author(release if realised is None or kind != "binary" else with_author_of_bits(release, realised))


def _why_impossible_release(release: ClientRelease) -> str:
    """Return why no mechanism makes ``release``, or an empty text."""
    protects_part_of_client = release.unit in ("record", "person")
    if release.unit == "client" or (protects_part_of_client and release.kind in ("binary", "pure")):
        return f"a release of kind {release.kind!r} does not protect a {release.unit} as one unit"
    if release.blanket is not None and release.parameter is not None and release.blanket < exp(-min(release.parameter, 700.0)):
        return f"the blanket is {release.blanket:g}, expected at least e^-epsilon at epsilon {release.parameter:g}"
    if protects_part_of_client and release.alike:
        return f"alike must be false for the unit {release.unit!r}: sums over records have no common bound"
    if release.rate < 1 and not protects_part_of_client:
        return f"the rate of a release with unit {release.unit!r} must be 1, got {release.rate:g}"
    return ""


def _why_impossible(event: Event, before: Event | None, reports: int) -> str:
    """Return why no run has ``event`` after the event ``before``, or an empty text. ``reports`` counts all reports up to ``event``."""
    # ``joined`` counts the rounds of the client that joined most. It grows by at most one a round.
    last_round, joined_before = (before.round, before.joined) if before else (0, 0)
    if event.population > MAX_CLIENTS:
        return f"{event.population:,} clients, expected at most {MAX_CLIENTS:,}"
    if max(event.release.units, event.linked, event.round) > MAX_COUNT:
        return f"units, linked and round must be at most {MAX_COUNT:,}"
    if event.cohort > event.population or event.colluding >= event.population:
        return f"a cohort of {event.cohort:,} with {event.colluding:,} colluding clients, in a population of {event.population:,}"
    if event.sampling == "everyone" and event.cohort != event.population:
        return f"sampling is 'everyone', but only {event.cohort:,} of {event.population:,} clients took part"
    if event.sampling == "secret" and _probability_of_cohort(event) < MIN_PROBABILITY:
        return f"{event.population:,} clients that join with probability {event.rate:g} each do not make a cohort of {event.cohort:,}"
    if before and event.population < before.population:
        return f"the population shrank from {before.population:,} to {event.population:,}; clients that left still count"
    if event.round <= last_round or (event.round != last_round + 1 and event.sampling != "secret"):
        return f"round {event.round} comes after round {last_round}: a round is missing or repeated"
    if not joined_before <= event.joined <= joined_before + event.round - last_round or (event.cohort and not event.joined):
        return f"a client cannot have joined {joined_before} rounds before this round and {event.joined} with it"
    if event.sampling == "once" and event.joined > 1:
        return f"sampling is 'once', but a client joined {event.joined} rounds"
    if reports > event.population * event.joined:
        return f"{reports:,} reports of {event.population:,} clients: some client joined more than {event.joined} rounds"
    return ""


def _probability_of_cohort(event: Event) -> float:
    """Return the probability of a cohort as small as that of ``event``, or as large, whichever is smaller."""
    fewer = float(bdtr(event.cohort, event.population, event.rate))
    more = float(bdtrc(event.cohort - 1, event.population, event.rate)) if event.cohort else 1.0
    return min(fewer, more)
