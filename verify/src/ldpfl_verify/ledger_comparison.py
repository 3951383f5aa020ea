"""Decide whether a certificate charges at least the rounds that the run's ledger holds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ldpfl_verify.certificate_file import OURS, ChargedRounds, Statement
from ldpfl_verify.errors import CertificateError, quoted
from ldpfl_verify.ledger_file import Event, read_ledger
from ldpfl_verify.stated_author import DOUBTED, with_believed_author

MAX_COMPARED_PAIRS = 10**6
"""Number of pairs of a charged round and a ledger's round that are compared. More would take minutes."""


def check_charged(statement: Statement, path: Path) -> None:
    """Return if ``statement`` is about the ledger at ``path`` and charges its rounds, or rounds that cost more.

    Raises:
        CertificateError: the ledger is another one, cannot be read, or holds more than the statement charges.
    """
    ledger = read_ledger(path)
    if ledger.sha256 != statement.ledger:
        raise CertificateError(f"{path} is not the ledger that was certified: its SHA-256 differs from the one in the certificate")
    charged = [replace(one, release=with_believed_author(one.release)) for one in statement.charged]  # as of the ledger
    _check_authors(charged, ledger.events, path)
    why = _missing(charged, ledger.events)
    if why:
        raise CertificateError(f"the certificate does not charge all that {path} holds: {why}")


def _check_authors(charged: Sequence[ChargedRounds], events: Sequence[Event], path: Path) -> None:
    """Raise if ``charged`` attributes a mechanism to the ldpfl project, and the ledger says of its reports what the project's cannot be.

    A certificate does not hold all that a ledger says of a report, such as the epsilon that rounded probabilities leave.
    """
    doubted = {replace(event.release, author=OURS) for event in events if event.release.author == DOUBTED}
    for one in charged:
        if one.release in doubted:
            raise CertificateError(
                f"the certificate says that mechanism {quoted(one.release.mechanism)} is the ldpfl project's code, but {path} says of its "
                "reports what that code cannot send: ask who signed the certificate"
            )


def _missing(charged: Sequence[ChargedRounds], events: Sequence[Event]) -> str:
    """Return which rounds of ``events`` are not paid for by ``charged``, or an empty text."""
    joined = [event for event in events if event.cohort]
    if not joined:
        return "no client joined any of its rounds; the cost of empty rounds is not compared with a certificate here"
    # The largest number that any round names: a client has to count with so many even where a round was planned for fewer.
    colluding = max(event.colluding for event in events)
    rounds = [event.as_charged(colluding) for event in joined]
    most = max(event.joined for event in joined)
    samplings = {one.sampling for one in rounds}
    if samplings == {"secret"}:
        # An empty round of random check-in is an outcome like any other, and part of the cost.
        last = max(event.round for event in events if event.sampling == "secret")
        return _missing_in_random_check_in(charged, rounds, last, most)
    if "secret" in samplings:
        return "it mixes rounds of random check-in with other rounds, which are not compared with a certificate here"
    if samplings == {"once"} and [one.rounds for one in charged] == [1]:
        return _missing_in_one_round_each(charged[0], rounds)
    # Some client joined at least as many rounds as clients did on average.
    average = math.ceil(sum(event.cohort for event in joined) / max(event.population for event in joined))
    return _missing_by_round(charged, rounds, max(most, average))


def _missing_by_round(charged: Sequence[ChargedRounds], rounds: Sequence[ChargedRounds], most: int) -> str:
    """Compare round by round; some client joined ``most`` rounds."""
    held = Counter(rounds)
    paid: Counter[ChargedRounds] = Counter()
    for one in charged:
        paid[replace(one, rounds=1)] += one.rounds
    invented = [one for one in paid if one not in held]
    if invented:
        return f"it has no round like the charged one with mechanism {invented[0].release.mechanism} and a cohort of {invented[0].cohort:,}"
    left_out = [one for one in held if paid[one] < held[one]]
    if left_out and len(held) * len(paid) > MAX_COMPARED_PAIRS:
        return f"it has more than {MAX_COMPARED_PAIRS:,} pairs of different rounds, too many to compare here"
    if left_out and paid.total() < most:
        return f"some client joined {most:,} rounds, but only {paid.total():,} are charged"
    for one in left_out:
        if any(paid[other] and _may_cost_more(one, other) for other in paid):
            return f"a round with a cohort of {one.cohort:,} is not charged, and a round that may cost less is charged instead"
    return ""


def _may_cost_more(one: ChargedRounds, other: ChargedRounds) -> bool:
    """Return whether ``one`` may cost more than ``other``.

    It cannot if it differs from ``other`` by a smaller parameter and a larger population at most, and its cohort is no smaller. Gaussian
    noise whose sender is known costs the same in any cohort.
    """
    same_but_size = _without_size(one) == _without_size(other)
    no_larger_parameter = (one.release.parameter or 0.0) <= (other.release.parameter or 0.0)
    mixed = one.channel == "secure-sum" or (one.channel == "ideal-shuffler" and one.release.alike)
    cohort_matters = one.release.kind != "gaussian" or mixed
    no_smaller_cohort = not cohort_matters or one.cohort >= other.cohort
    return not (same_but_size and no_larger_parameter and no_smaller_cohort and one.population >= other.population)


def _without_size(one: ChargedRounds) -> ChargedRounds:
    """Return ``one`` with the same cohort, population and parameter as any other."""
    release = one.release if one.release.parameter is None else replace(one.release, parameter=1.0)
    return replace(one, cohort=1, population=1, release=release)


def _missing_in_random_check_in(charged: Sequence[ChargedRounds], rounds: Sequence[ChargedRounds], last: int, most: int) -> str:
    """Compare rounds of random check-in, of which ``last`` is the number of the last one; some client joined ``most`` of them."""
    needed = last
    # Behind a shuffler nobody learns which rounds a client joined. Elsewhere, with Gaussian noise, a client pays for its own rounds alone.
    unseen = any(one.channel == "ideal-shuffler" and one.release.alike for one in rounds)
    if all(one.release.kind == "gaussian" for one in rounds) and not unseen:
        needed = most
    paid = sum(one.rounds for one in charged)
    if paid < needed:
        return f"there were {needed:,} rounds, but only {paid:,} are charged"
    kinds = {replace(one, cohort=1) for one in rounds}
    if {replace(one, cohort=1, rounds=1) for one in charged} != kinds or len(kinds) > 1:
        return "its rounds are of another kind than the charged ones"
    smallest, largest_charged = min(one.cohort for one in rounds), max(one.cohort for one in charged)
    return f"a cohort of {largest_charged:,} is charged, but its smallest cohort has {smallest:,}" if largest_charged > smallest else ""


def _missing_in_one_round_each(charged: ChargedRounds, rounds: Sequence[ChargedRounds]) -> str:
    """Compare rounds of which every client joined one, in a secret random order: its report then hides among those of all rounds."""
    if {replace(one, cohort=1) for one in rounds} != {replace(charged, cohort=1)}:
        return "its rounds are of another kind than the charged ones"
    one_message_in_all = charged.release.units == 1 and charged.channel == "ideal-shuffler"
    whole_run = min(sum(one.cohort for one in rounds), charged.population)
    largest = whole_run if one_message_in_all else min(one.cohort for one in rounds)
    return (
        f"an anonymity set of {charged.cohort:,} is charged, but its rounds allow at most {largest:,}" if charged.cohort > largest else ""
    )
