"""Whether the rounds that a certificate charges are those of its ledger; read from the file, without a line of what wrote it."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from ldpfl.errors import DataError
from ldpfl.files import MAX_ROUNDS_BYTES, check_events, from_json, read_text
from ldpfl.verifying.certificate_file import UNKNOWN, Charged, Released, Statement

_MOST_PAIRS = 10**6

_PARAMETERS = {"binary": "epsilon", "pure": "epsilon", "gaussian": "mu"}


def check_charged(statement: Statement, ledger: Path) -> None:
    """Return if ``statement`` charges the rounds that ``ledger`` holds, or costlier ones.

    Raises:
        DataError: it is another ledger, cannot be read, or holds more than is charged.
    """
    try:
        text = read_text(ledger, MAX_ROUNDS_BYTES)
        if hashlib.sha256(text.encode()).hexdigest() != statement.ledger:
            raise DataError(f"{ledger} is not the ledger that was certified")
        check_events(text)
        events = from_json(text)["events"]
        # As many as the run was planned for are no crowd in any of its rounds; the client itself is left.
        colluding = max((event.get("colluding", 0) for event in events), default=0)
        seen = [_Seen(_round(event, colluding), event["joined"]) for event in events if event["cohort"]]
        # Some client joined at least as often as clients did on average.
        average = math.ceil(sum(event["cohort"] for event in events) / max(event["population"] for event in events)) if seen else 0
        # That nobody joined a round of secret participation is an outcome like any other, and part of its cost.
        last = max((event["round"] for event in events if event["sampling"] == "secret"), default=0)
    except OSError as error:
        raise DataError(f"ledger {ledger} cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, ValidationError) as error:
        raise DataError(f"{ledger} is no ledger: {type(error).__name__}") from None
    why = _too_little(statement.charged, seen, last, average)
    if why:
        raise DataError(f"the certificate charges less than {ledger} holds: {why}")


class _Seen(NamedTuple):
    """A round that somebody joined, and the most that any client had joined by then."""

    round: Charged
    joined: int


def _round(event: Mapping[str, Any], colluding: int) -> Charged:
    """Return one round as a certificate would charge it; ``colluding`` clients are no crowd."""
    release, kind = event["release"], event["release"]["kind"]
    parameter = release.get(_PARAMETERS.get(kind, ""))
    what = Released(
        kind=kind,
        mechanism=release["mechanism"],
        parameter=None if parameter is None else float(parameter),
        units=release["units"],
        unit=release["unit"],
        sampled=release.get("sampled", 1),
        rate=float(release.get("rate", 1.0)),
        blanket=release.get("blanket"),
        alike=release.get("alike", False),
        integers=release.get("integers", False),
        author=release.get("author", UNKNOWN),
    )
    return Charged(
        release=what,
        cohort=max(1, event["cohort"] - colluding),
        population=max(1, event["population"] - colluding),
        rounds=1,
        sampling=event["sampling"],
        rate=float(event["rate"]),
        channel=event["channel"],
        linked=min(event["linked"], what.units),
    )


def _too_little(charged: Sequence[Charged], seen: Sequence[_Seen], last: int, average: int) -> str:
    """Say what is missing in ``charged`` against the rounds that were ``seen``.

    ``last`` is the number of the last secret one; some client joined ``average`` rounds or more.
    """
    if not seen:
        return "nobody joined any of its rounds, and what that reveals is not compared with a certificate here"
    samplings = {one.sampling for one, _ in seen}
    if samplings == {"secret"}:
        return _too_little_in_secret(charged, seen, last)
    if "secret" in samplings:
        return "rounds of secret participation among others are not held against a certificate here"
    if samplings == {"once"} and [one.rounds for one in charged] == [1]:
        return _too_little_at_once(charged[0], seen)
    held = Counter(one for one, _ in seen)
    paid: Counter[Charged] = Counter()
    for one in charged:
        paid[one.model_copy(update={"rounds": 1})] += one.rounds
    invented = [one for one in paid if one not in held]
    if invented:
        return f"no round of it is one of {invented[0].release.mechanism} among {invented[0].cohort:,}"
    left_out = [one for one in held if paid[one] < held[one]]
    if left_out and len(held) * len(paid) > _MOST_PAIRS:
        return "there are too many different rounds to compare"
    if left_out:
        most = max(average, *(joined for _, joined in seen))
        if paid.total() < most:
            return f"some client joined {most:,} rounds, and {paid.total():,} are charged"
        for one in left_out:
            if any(_may_cost_more(one, other) for other in paid if paid[other]):
                return f"a round among {one.cohort:,} clients is left out for one that may cost less"
    return ""


def _may_cost_more(one: Charged, other: Charged) -> bool:
    """Tell whether ``one`` might cost more than ``other``: it does not where it is the same but for more clients, or a smaller mu."""
    smaller = (one.release.parameter or 0.0) <= (other.release.parameter or 0.0) or one.release.parameter == other.release.parameter
    alike = one.model_copy(update={"cohort": 1, "population": 1, "release": _without(one.release)})
    same = alike == other.model_copy(update={"cohort": 1, "population": 1, "release": _without(other.release)})
    hidden = one.channel == "secure-sum" or (one.channel == "ideal-shuffler" and one.release.alike)
    alone = one.release.kind == "gaussian" and not hidden  # however many others there are
    return not (same and smaller and (alone or one.cohort >= other.cohort) and one.population >= other.population)


def _without(release: Released) -> Released:
    return release.model_copy(update={"parameter": None})


def _too_little_in_secret(charged: Sequence[Charged], seen: Sequence[_Seen], last: int) -> str:
    rounds = sum(one.rounds for one in charged)
    hidden = any(one.channel == "ideal-shuffler" and one.release.alike for one, _ in seen)  # then nobody learns in how many rounds
    if all(one.release.kind == "gaussian" for one, _ in seen) and not hidden:  # a client pays for its own rounds, which are seen
        last = max(joined for _, joined in seen)
    if rounds < last:
        return f"there were {last:,} rounds, and {rounds:,} are charged"
    fewest = min(one.cohort for one, _ in seen)
    kinds = {one.model_copy(update={"cohort": 1}) for one, _ in seen}
    if {one.model_copy(update={"cohort": 1, "rounds": 1}) for one in charged} != kinds or len(kinds) > 1:
        return "its rounds are of another kind"
    most = max(one.cohort for one in charged)
    return f"{most:,} clients are not at most {fewest:,}" if most > fewest else ""


def _too_little_at_once(charged: Charged, seen: Sequence[_Seen]) -> str:
    kinds = {one.model_copy(update={"cohort": 1}) for one, _ in seen}
    if kinds != {charged.model_copy(update={"cohort": 1})}:
        return "its rounds are of another kind"
    crowd = min(sum(one.cohort for one, _ in seen), charged.population)
    several = charged.release.units > 1 or charged.channel != "ideal-shuffler"
    hidden = min(one.cohort for one, _ in seen) if several else crowd
    return f"{charged.cohort:,} clients are not more than {hidden:,}" if charged.cohort > hidden else ""
