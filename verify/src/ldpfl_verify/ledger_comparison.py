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
    """Raise unless ``statement`` is about the ledger at ``path`` and charges its rounds, or rounds that cost more.

    Raises:
        CertificateError: the ledger is another one, cannot be read, or holds more than the statement charges.
    """
    ledger = read_ledger(path)
    if ledger.sha256 != statement.ledger:
        raise CertificateError(f"{path} is not the ledger that was certified: its SHA-256 differs from the one in the certificate")
    charged = [replace(group, release=with_believed_author(group.release)) for group in statement.charged]  # as read_ledger does
    _check_authors(charged, ledger.events, path)
    why = _why_not_charged(charged, ledger.events)
    if why:
        raise CertificateError(f"the certificate does not charge all that {path} holds: {why}")


def _check_authors(charged: Sequence[ChargedRounds], events: Sequence[Event], path: Path) -> None:
    """Raise if ``charged`` attributes a mechanism to the ldpfl project, but the project's code cannot send its reports in the ledger.

    The ledger has to be asked, because it states more about a report than a certificate, such as the epsilon after rounding.

    Raises:
        CertificateError: the ledger contradicts the author that the certificate states.
    """
    doubted = {replace(event.release, author=OURS) for event in events if event.release.author == DOUBTED}
    for group in charged:
        if group.release in doubted:
            raise CertificateError(
                f"the certificate says that mechanism {quoted(group.release.mechanism)} is the ldpfl project's code, but {path} says of "
                "its reports what that code cannot send: ask who signed the certificate"
            )


def _why_not_charged(charged: Sequence[ChargedRounds], events: Sequence[Event]) -> str:
    """Return why ``charged`` does not cover the rounds of ``events``, or an empty text if it does."""
    joined = [event for event in events if event.cohort]
    if not joined:
        return "no client joined any of its rounds; the cost of empty rounds is not compared with a certificate here"
    # The largest number that any round states. A client must expect so many, even in a round that was planned for fewer.
    colluding = max(event.colluding for event in events)
    rounds = [event.as_charged(colluding) for event in joined]
    max_joined = max(event.joined for event in joined)
    samplings = {group.sampling for group in rounds}
    if samplings == {"secret"}:
        # An empty round of random check-in is an outcome like any other, and part of the cost.
        times: Counter[ChargedRounds] = Counter()
        last_round = 0
        for event in sorted((event for event in events if event.sampling == "secret"), key=lambda event: event.round):
            times[_without_cohort(event.as_charged(colluding))] += event.round - last_round  # missing rounds before it were empty
            last_round = event.round
        return _why_random_check_in_not_charged(charged, rounds, times, max_joined)
    if "secret" in samplings:
        return "it mixes rounds of random check-in with other rounds, which are not compared with a certificate here"
    if samplings == {"once"} and [group.rounds for group in charged] == [1]:
        honest_reports = max(1, sum(event.cohort for event in joined) - colluding)  # each client joins once, so each counts once
        return _why_one_round_each_not_charged(charged[0], rounds, honest_reports)
    # Some client joined at least as many rounds as clients did on average.
    average = math.ceil(sum(event.cohort for event in joined) / max(event.population for event in joined))
    return _why_not_charged_by_round(charged, rounds, max(max_joined, average))


def _why_not_charged_by_round(charged: Sequence[ChargedRounds], rounds: Sequence[ChargedRounds], max_joined: int) -> str:
    """Compare round by round, and return why ``charged`` does not cover ``rounds``, or an empty text. Some client joined ``max_joined``."""
    times_in_ledger = Counter(rounds)
    times_charged: Counter[ChargedRounds] = Counter()
    for group in charged:
        times_charged[replace(group, rounds=1)] += group.rounds
    invented = [group for group in times_charged if group not in times_in_ledger]
    if invented:
        return f"it has no round like the charged one with mechanism {invented[0].release.mechanism} and a cohort of {invented[0].cohort:,}"
    left_out = [group for group in times_in_ledger if times_charged[group] < times_in_ledger[group]]
    if left_out and len(times_in_ledger) * len(times_charged) > MAX_COMPARED_PAIRS:
        return f"it has more than {MAX_COMPARED_PAIRS:,} pairs of different rounds, too many to compare here"
    if left_out and times_charged.total() < max_joined:
        return f"some client joined {max_joined:,} rounds, but only {times_charged.total():,} are charged"
    for group in left_out:
        if any(times_charged[other] and _may_cost_more(group, other) for other in times_charged):
            return f"a round with a cohort of {group.cohort:,} is not charged, and a round that may cost less is charged instead"
    return ""


def _may_cost_more(one: ChargedRounds, other: ChargedRounds) -> bool:
    """Return whether ``one`` may cost more than ``other``.

    It costs no more if only sizes differ, and ``one`` has no larger parameter, no smaller population and no smaller cohort. The cohort does
    not matter for Gaussian noise whose sender is known.
    """
    same_but_size = _without_size(one) == _without_size(other)
    no_larger_parameter = (one.release.parameter or 0.0) <= (other.release.parameter or 0.0)
    mixed = one.channel == "secure-sum" or (one.channel == "ideal-shuffler" and one.release.alike)
    cohort_matters = one.release.kind != "gaussian" or mixed
    no_smaller_cohort = not cohort_matters or one.cohort >= other.cohort
    return not (same_but_size and no_larger_parameter and no_smaller_cohort and one.population >= other.population)


def _without_size(one: ChargedRounds) -> ChargedRounds:
    """Return ``one`` with a fixed cohort, population and parameter, to compare everything else."""
    release = one.release if one.release.parameter is None else replace(one.release, parameter=1.0)
    return replace(one, cohort=1, population=1, release=release)


def _without_cohort(one: ChargedRounds) -> ChargedRounds:
    """Return one round like ``one`` with a fixed cohort."""
    return replace(one, cohort=1, rounds=1)


def _why_random_check_in_not_charged(
    charged: Sequence[ChargedRounds], rounds: Sequence[ChargedRounds], times: Counter[ChargedRounds], max_joined: int
) -> str:
    """Return why ``charged`` does not cover ``rounds`` of random check-in, or an empty text.

    Args:
        rounds: rounds that some client joined.
        times: how many rounds there were of each kind (:func:`_without_cohort`), empty ones too.
        max_joined: number of rounds that some client joined.
    """
    # Behind a shuffler nobody learns which rounds a client joined. Elsewhere, with Gaussian noise, a client pays only for rounds it joined.
    participation_is_hidden = any(group.channel == "ideal-shuffler" and group.release.alike for group in rounds)
    pays_for_joined = all(group.release.kind == "gaussian" for group in rounds) and not participation_is_hidden
    needed = max_joined if pays_for_joined else times.total()
    charged_rounds = sum(group.rounds for group in charged)
    if charged_rounds < needed:
        return f"there were {needed:,} rounds, but only {charged_rounds:,} are charged"
    times_charged: Counter[ChargedRounds] = Counter()
    for group in charged:
        times_charged[_without_cohort(group)] += group.rounds
    if times_charged.keys() != times.keys():
        return "its rounds are of another kind than the charged ones"
    if len(times) > 1 and any(times_charged[kind] < times[kind] for kind in times):
        return "rounds of random check-in of several kinds are compared only with a certificate that charges each of them"
    smallest, largest_charged = min(group.cohort for group in rounds), max(group.cohort for group in charged)
    return f"a cohort of {largest_charged:,} is charged, but its smallest cohort has {smallest:,}" if largest_charged > smallest else ""


def _why_one_round_each_not_charged(charged: ChargedRounds, rounds: Sequence[ChargedRounds], honest_reports: int) -> str:
    """Return why ``charged`` does not cover ``rounds``, in one of which, drawn in secret, each client took part; else an empty text.

    A single message then hides among the messages of all rounds, of which ``honest_reports`` are of clients that do not collude.
    """
    if {replace(group, cohort=1) for group in rounds} != {replace(charged, cohort=1)}:
        return "its rounds are of another kind than the charged ones"
    one_message_in_all = charged.release.units == 1 and charged.channel == "ideal-shuffler"
    whole_run = min(honest_reports, charged.population)
    max_anonymity_set = whole_run if one_message_in_all else min(group.cohort for group in rounds)
    return (
        f"an anonymity set of {charged.cohort:,} is charged, but its rounds allow at most {max_anonymity_set:,}"
        if charged.cohort > max_anonymity_set
        else ""
    )
