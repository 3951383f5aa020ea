"""From charged rounds to guarantees: a line for each unit, scope and trust model, and the reason where there is no line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, sqrt
from typing import Any

from ldpfl.errors import ConfigError, in_short
from ldpfl.privacy.accountants.base import Accountant
from ldpfl.privacy.accountants.behind_shuffler import Bounds, CountedBits, ShuffledAccountant
from ldpfl.privacy.accountants.binomial import sigmoid
from ldpfl.privacy.accountants.closed_forms import central_limit_epsilon
from ldpfl.privacy.accountants.local import GaussianAccountant
from ldpfl.privacy.accountants.registry import accountant, behind_shuffler, least_epsilon
from ldpfl.privacy.charged_rounds import RoundGroup, charged
from ldpfl.privacy.events import OURS, BinaryRelease, Claim, GaussianRelease, PureRelease, Release, for_one_record
from ldpfl.privacy.guarantee import (
    AUTHORS_CLAIM,
    REPLACE_ONE,
    REPLACE_PERSON,
    REPLACE_RECORD,
    Guarantee,
    Protected,
    Scope,
    Statement,
    TrustModel,
    least_protected,
    worth_of,
)
from ldpfl.privacy.ledger import Ledger
from ldpfl.util.number_format import number

DELTA = 1e-5
SMALLEST_DELTA = 1e-25
"""Windows leave out less than 1e-30 of a distribution; a smaller delta would rest on what was left out."""

_NORMAL_ENOUGH = 10.0
"""Expected number of the rarer answer from which the central limit theorem's figure is worth showing."""

_PUBLIC = ("ranges are public", "random bits are uniform and secret")


def account(ledger: Ledger, delta: float = DELTA, colluding: int = 0) -> Statement:
    """Return what ``ledger`` guarantees to the client that took part most often.

    Args:
        delta: failure probability; it should be below 1 / n.
        colluding: clients that tell the adversary what they sent; nobody can hide behind them.

    Raises:
        ConfigError: delta not between 0 and 1, or as many colluding clients as there are in some round.
    """
    return account_together([ledger], delta, colluding)


def account_together(ledgers: Sequence[Ledger], delta: float = DELTA, colluding: int = 0) -> Statement:
    """Return what several runs together guarantee to a client that gave the same data to all of them, and to each most often.

    Raises:
        ConfigError: as :func:`account`.
    """
    rounds: Counter[RoundGroup] = Counter()
    for group in (group for ledger in ledgers for group in charged(ledger, colluding)):
        rounds[replace(group, rounds=1)] += group.rounds
    # Who took part most often in one run may not have in another: only where all did is it one client that sent all this.
    one = len(ledgers) == 1 or all(group.sampling == "everyone" for group in rounds)
    groups = [replace(group, rounds=count, known=group.known and one) for group, count in rounds.items()]
    if not groups:
        check_delta(delta)
        return Statement(delta, (), ("nothing was released",))
    try:
        return _known(tuple(groups), tuple(group.release.claimed for group in groups), delta)
    except ConfigError:
        raise
    except Exception as error:  # what was trained must not be lost by it: then no line is known
        return Statement(delta, (), (), (f"no figure of privacy: {_not_computed(error)}; take it that nothing is protected",))


@lru_cache(maxsize=64)
def _known(groups: tuple[RoundGroup, ...], claims: tuple[Claim | None, ...], delta: float) -> Statement:
    """A run's result, its ledger and a table take the same seconds of arithmetic. Equal releases may differ in claims."""
    return account_groups(groups, delta)


def run_epsilon(ledger: Ledger, delta: float = DELTA) -> float:
    """Return the epsilon of :attr:`Statement.best` for the run of ``ledger`` alone, in a fraction of the time of the whole statement."""
    groups = _for_what_is_protected(charged(ledger))
    return inf if _unprotected(groups) else least_epsilon(groups, delta)


def account_groups(groups: Sequence[RoundGroup], delta: float) -> Statement:
    """Return what rounds like ``groups`` guarantee to a client that takes part in all of them. Seconds on one core."""
    check_delta(delta)
    whole = _whole(groups)
    persons_too = whole is _RECORD and any(group.release.unit == "person" for group in groups)
    groups = _for_what_is_protected(groups)
    claims = [claim for claim in (group.release.claimed for group in groups) if claim is not None]
    rows = [max(claims, key=lambda claim: claim.epsilon).guarantee()] if claims else []
    costliest = _costliest(groups)
    notes: list[str] = []
    rows += _unit_rows(costliest, delta, notes)
    scopes: tuple[tuple[Scope, Sequence[Sequence[RoundGroup]]], ...] = (("round", [[group] for group in costliest]), ("run", [groups]))
    for scope, parts in scopes:
        rows += _whole_rows(parts, delta, scope, whole, notes)
    notes = list(dict.fromkeys(notes))
    clients = max(group.population for group in groups)
    warnings = [f"no guarantee: {reason}" for reason in _unprotected(groups)]
    if whole is not _CLIENT:
        by_chance = any(group.batch_rate < 1 for group in groups)
        notes.append((_MANY_BY_CHANCE if by_chance else _MANY).format(unit=whole.unit))
        notes += [_AT_SEVERAL_CLIENTS] * (whole is _PERSON) + [_PERSONS_FOR_RECORDS] * persons_too
        notes += _added_or_removed(groups, delta, whole.unit)
    if clients > 1 and delta >= 1 / clients and whole is _CLIENT:
        warnings.append(f"delta {delta:g} is not below 1/n = {1 / clients:g}: to publish one of the clients at random would satisfy it")
    warnings += _of_others(groups)
    if _of_others(groups):
        rows = [replace(row, status=AUTHORS_CLAIM) if row.status == "proved" else row for row in rows]
    found = Statement(delta, tuple(rows), tuple(notes), tuple(warnings))
    best = found.best
    if best is None or worth_of(best.epsilon) == "bad":  # the sentence then says no probability
        return found
    return replace(found, distance=_distance(groups, None if best.trust_model == "local" else behind_shuffler(groups)))


def _distance(groups: Sequence[RoundGroup], hidden: ShuffledAccountant | None) -> float:
    """Return an upper bound of the total variation distance between all that is seen of one input and of another; 1 where none is known."""
    try:
        found = (hidden or accountant((group.release, group.rounds) for group in groups)).distance()
    except Exception:  # the sentence then says what follows from epsilon
        return 1.0
    return found if 0 <= found <= 1 else 1.0


def _of_others(groups: Sequence[RoundGroup]) -> list[str]:
    """Say, of each mechanism that is not this project's, that all figures rest on what its author claims."""
    others = dict.fromkeys((release.mechanism, release.author) for release in (group.release for group in groups) if release.author != OURS)
    return [
        f"nothing is proved of {name}, whose code ({author}) is not ldpfl's: the figures rest on its author's claim"
        for name, author in others
    ]


def _added_or_removed(groups: Sequence[RoundGroup], delta: float, unit: Protected) -> list[str]:
    """Say what holds locally for a record, or person, that is left out, where all rounds protect such: other tools for DP-SGD count so.

    A ledger does not tell whether a run's only round was one of least squares, whose vectors are longer than half of their distance.
    """
    lengthened = sum(group.rounds for group in groups if not group.histograms) <= 1
    spent = accountant((_as_added(group, lengthened=lengthened), group.rounds) for group in groups)
    if not isinstance(spent, GaussianAccountant) or any(group.release.unit != unit for group in groups):
        return []
    from ldpfl.privacy.accountants.poisson import added_epsilon  # it loads all of dp-accounting

    try:
        found = added_epsilon(spent.rounds, delta)
    except Exception as error:  # beside what is proved, which stands
        return [f"no epsilon of one {unit} left out: {_not_computed(error)}"]
    return [
        f"one {unit} left out, its place kept empty and not taken by another, which Opacus and others count: epsilon {number(found)} "
        "against who sees senders"
    ]


def _as_added(group: RoundGroup, *, lengthened: bool) -> Release:
    """Return the release of ``group`` with twice the mu that it has where a record is left out.

    Leaving a record out moves a sum of gradients by half of what replacing it may. It moves one-hot counts by 1 / sqrt(2) of that, and
    sums of products by at most 1.34 / 2, which is less.
    """
    release, longer = group.release, group.histograms or lengthened
    return replace(release, mu=release.mu * sqrt(2)) if longer and isinstance(release, GaussianRelease) else release


_MANY = "one {unit} is protected, not the client that holds it: for m {unit}s of one client together, mu is m times as large"
_MANY_BY_CHANCE = (
    "one {unit} is protected, not the client that holds it: m {unit}s of one client together have a coin each, "
    "and for them epsilon is m times as large at most, at a delta m e^((m - 1) epsilon) times as large"
)
_AT_SEVERAL_CLIENTS = (
    "a person is known to a client by a name, and protected at each client apart: who has records at k clients counts as k persons, and "
    "at each of them all records of one name count as one person's; who is trained on is public, and test persons are not protected"
)


_PERSONS_FOR_RECORDS = (
    "rounds that protect persons count at twice their mu for one record: a row in the place of another person's changes what two persons "
    "add; how many records and persons a client has is public"
)


@dataclass(frozen=True)
class _Whole:
    """What the lines over all that a client sends are about."""

    unit: Protected
    adjacency: str


_CLIENT, _PERSON, _RECORD = _Whole("client", REPLACE_ONE), _Whole("person", REPLACE_PERSON), _Whole("record", REPLACE_RECORD)


def _whole(groups: Sequence[RoundGroup]) -> _Whole:
    """Return what is protected in all rounds: one record, as soon as some round protects no more; what protects a client protects it."""
    least = least_protected(group.release.unit for group in groups)
    return next(whole for whole in (_RECORD, _PERSON, _CLIENT) if whole.unit == least)


def _for_what_is_protected(groups: Sequence[RoundGroup]) -> Sequence[RoundGroup]:
    """Return ``groups`` as they count for one record, if some round protects no more; else as they are.

    No data set is known to attain what a round then counts at.
    """
    if _whole(groups) is not _RECORD:
        return groups
    counted = [replace(group, release=for_one_record(group.release)) for group in groups]
    return [replace(new, known=new.known and new.release == old.release) for new, old in zip(counted, groups, strict=True)]


def check_delta(delta: float) -> None:
    """Raise a :class:`ConfigError` unless ``delta`` is one that figures can be given for."""
    if not 0 < delta < 1:
        advice = "; the pure figures (delta = 0) are given in any case" if delta == 0 else ""
        raise ConfigError(f"delta must lie strictly between 0 and 1, got {delta:g}{advice}")
    if delta < SMALLEST_DELTA:
        raise ConfigError(f"delta {delta:g} is below {SMALLEST_DELTA:g}, the smallest that is computed reliably; rely on the pure figures")


def _costliest(groups: Sequence[RoundGroup]) -> list[RoundGroup]:
    """Return single rounds among which the costliest is, under any trust model: those that no other one exceeds in all that counts."""
    kept: list[RoundGroup] = []
    for one in dict.fromkeys(replace(group, rounds=1) for group in groups):
        if not any(_exceeds(other, one) for other in kept):  # of two that exceed each other, the first stays
            kept = [*(other for other in kept if not _exceeds(one, other)), one]
    return kept


def _exceeds(other: RoundGroup, one: RoundGroup) -> bool:
    def rest(group: RoundGroup) -> tuple[object, ...]:
        sampled = group.release.sampled if isinstance(group.release, BinaryRelease) else 1
        stated = (group.release.alike, group.release.integers) if isinstance(group.release, GaussianRelease) else ()
        travelled = group.sampling, group.rate, group.channel, group.linked
        return type(group.release), group.release.unit, sampled, stated, group.batch_rate, *travelled

    def size(group: RoundGroup) -> tuple[float, int, int, int, float]:
        common = group.release.blanket if isinstance(group.release, PureRelease) else None
        return group.release.parameter, group.release.units, -group.cohort, -group.population, -(common or 0.0)

    return rest(other) == rest(one) and all(x >= y for x, y in zip(size(other), size(one), strict=True))


def _not_computed(error: Exception) -> str:
    return f"not computed, because: {in_short(error)}"


def _epsilon(spent: Accountant, delta: float, notes: list[str]) -> float:
    """Return an epsilon at ``delta``; where it cannot be computed the pure one, which is never less, or infinity. ``notes`` then say so."""
    try:
        if (found := spent.epsilon(delta)) >= 0:
            return found
        why = "not computed: no number came out"
    except Exception as error:  # whatever an accountant meets, what was trained must not be lost by it
        why = _not_computed(error)
    if delta <= 0:
        notes.append(f"no epsilon without a delta: {why}")
        return inf
    notes.append(f"no epsilon at delta {delta:g} but the one without a delta: {why}")
    return _epsilon(spent, 0.0, notes)


def _bounds(shuffled: ShuffledAccountant, delta: float, notes: list[str]) -> Bounds | None:
    """Return what is known behind a shuffler or a sum; None where it cannot be computed, as ``notes`` then say."""
    try:
        found = shuffled.bounds(delta)
        if found.fixed >= 0 and found.adaptive >= 0 and (found.attained is None or found.attained >= 0):
            return found
        why = "not computed: no number came out"
    except Exception as error:  # as for what holds locally
        why = _not_computed(error)
    notes.append(f"no {_hidden_by(shuffled.groups)} number: {why}; the local figures hold")
    return None


def _unit_rows(rounds: Sequence[RoundGroup], delta: float, notes: list[str]) -> list[Guarantee]:
    """Return what one unit of one round costs: locally, and hidden among the other clients' reports of the same unit."""
    if any(group.release.by_round for group in rounds):
        return []
    worst = max(rounds, key=lambda group: group.release.parameter)
    common: dict[str, Any] = {
        "unit": worst.release.unit,
        "units_per_round": worst.release.units,
        "adjacency": "replace one client's value",
        "status": "proved",
    }
    epsilon = worst.release.parameter
    rows = [Guarantee(epsilon, 0.0, trust_model="local", assumptions=_PUBLIC if epsilon < inf else (), **common)]
    if all(CountedBits.supports([group]) for group in rounds):
        units = [replace(group, release=replace(group.release, units=1)) for group in rounds]
        ones = [_bounds(CountedBits([unit], accountant([(unit.release, 1)])), delta, notes) for unit in units]
        known = [bounds for bounds in ones if bounds is not None]
        if len(known) < len(ones):  # the costliest may be one that is not known
            return rows
        worst_one = max(known, key=lambda bounds: bounds.adaptive)
        hidden, lower = _shuffler(rounds), worst_one.attained
        trusted = _hidden_by(rounds)
        rows.append(Guarantee(worst_one.adaptive, delta, trust_model=trusted, assumptions=hidden, lower=lower, **common))
    return rows


def _whole_rows(parts: Sequence[Sequence[RoundGroup]], delta: float, scope: Scope, whole: _Whole, notes: list[str]) -> list[Guarantee]:
    """Return the costliest of ``parts`` under each trust model; ``notes`` say why a line is missing."""
    rows = _largest([_local_rows(part, delta, scope, whole, notes) for part in parts])
    shuffled = [behind_shuffler(part) for part in parts]
    reasons = [_why_not_shuffled(part) for part, found in zip(parts, shuffled, strict=True) if found is None]
    if reasons:
        notes += reasons
        return rows
    hidden = [_shuffled_rows(found, delta, scope, whole, notes) for found in shuffled if found]
    return rows + _largest(hidden) if all(hidden) else rows  # the costliest may be one that is not known


def _largest(candidates: Sequence[list[Guarantee]]) -> list[Guarantee]:
    """Return for each kind of row the one with the largest epsilon."""
    best: dict[tuple[object, ...], Guarantee] = {}
    for row in (row for rows in candidates for row in rows):
        kind = (row.trust_model, row.delta == 0, row.adaptive, row.status)
        if kind not in best or row.epsilon > best[kind].epsilon:
            best[kind] = row
    return list(best.values())


def _local_rows(groups: Sequence[RoundGroup], delta: float, scope: Scope, whole: _Whole, notes: list[str]) -> list[Guarantee]:
    """Return what all that a client sends costs against a server that sees who sent it: pure, and for ``delta``."""
    common: dict[str, Any] = {
        "unit": whole.unit,
        "units_per_round": 1,
        "adjacency": whole.adjacency,
        "trust_model": "local",
        "status": "proved",
        "scope": scope,
    }
    reasons = _unprotected(groups)
    if reasons:
        return [Guarantee(inf, level, assumptions=reasons, **common) for level in (0.0, delta)]
    spent = accountant((group.release, group.rounds) for group in groups)
    return [Guarantee(_epsilon(spent, level, notes), level, assumptions=_PUBLIC, **common) for level in (0.0, delta)]


def _unprotected(groups: Sequence[RoundGroup]) -> tuple[str, ...]:
    """Return what left without protection, and by which mechanism; each thing once."""
    releases = [group.release for group in groups]
    reasons = [f"{release.mechanism}: {release.why_unprotected}" for release in releases if not release.protected]
    return tuple(dict.fromkeys(reasons))


def _shuffled_rows(shuffled: ShuffledAccountant, delta: float, scope: Scope, whole: _Whole, notes: list[str]) -> list[Guarantee]:
    """Return what all that a client sends costs against a server behind an ideal shuffler; nothing where that cannot be computed."""
    groups, bounds = shuffled.groups, _bounds(shuffled, delta, notes)
    if bounds is None:
        return []
    common: dict[str, Any] = {
        "unit": whole.unit,
        "units_per_round": 1,
        "adjacency": whole.adjacency,
        "trust_model": _hidden_by(groups),
        "scope": scope,
    }
    rows = []
    if bounds.fixed < bounds.adaptive * (1 - 1e-9):
        fixed = (*_shuffler(groups), "inputs of all rounds are fixed before the first, which training does not do")
        rows.append(Guarantee(bounds.fixed, delta, assumptions=fixed, lower=bounds.attained, adaptive=False, status="proved", **common))
    rows.append(Guarantee(bounds.adaptive, delta, assumptions=_shuffler(groups), lower=bounds.attained, status="proved", **common))
    first, cohort = groups[0], min(group.cohort for group in groups)
    normal = isinstance(first.release, BinaryRelease) and cohort * sigmoid(-first.release.parameter) >= _NORMAL_ENOUGH
    if scope == "run" and bounds.attained is not None and len(groups) == 1 and normal:
        estimate = central_limit_epsilon(first.release.parameter, cohort, first.reports, delta)
        if estimate >= bounds.attained:  # else it is known to be too small
            rows.append(Guarantee(estimate, delta, source="central limit theorem: bounds nothing", status="estimate", **common))
    return rows


def _hidden_by(groups: Sequence[RoundGroup]) -> TrustModel:
    return "summed" if all(group.channel == "secure-sum" for group in groups) else "shuffled"


def _why_not_shuffled(groups: Sequence[RoundGroup]) -> str:
    """Say why no accountant composes ``groups`` behind a shuffler."""
    channels = {group.channel for group in groups}
    if "random-delay" in channels:
        why = "a random delay is not a shuffler; whoever watches the network, or sees who is late, can link reports to clients"
    elif "direct" in channels:
        why = "reports reach the server with their sender"
    elif "secure-sum" in channels:
        why = "what a sum hides is accounted for bits, and for Gaussian noise on integers (dp-sgd, dp-fedavg); the local figures hold"
    else:
        several = "rounds of different kinds are accounted together for one-bit reports only; the local figures hold"
        reasons = {group.release.not_shuffled: group.release.protected for group in groups if group.release.not_shuffled}
        why = min(reasons, key=lambda reason: reasons[reason], default=several)  # what left without protection comes first
    return f"no shuffled number: {why}"


def _others(cohort: int) -> str:
    """Return the subject of what is assumed of the other clients of a round, with its verb."""
    return "the other client is" if cohort - 1 == 1 else f"the other {cohort - 1:,} clients are"


def _shuffler(groups: Sequence[RoundGroup]) -> tuple[str, ...]:
    cohort = min(group.cohort for group in groups)
    none = "it neither drops out nor colludes" if cohort - 1 == 1 else "none of them drops out or colludes"
    others = f"{_others(cohort)} honest, and {none}"
    if cohort == 1:
        alone = all(group.cohort == 1 for group in groups)
        others = "there is no other client to hide among"
        others = others if alone else "in some rounds there is no other client to hide among, and in the others those counted are honest"
    if any(group.sampling == "once" for group in groups):
        others = f"{_others(cohort)} honest, and nobody learns the order in which they take part"
    if any(group.sampling == "secret" for group in groups):
        population = min(group.population for group in groups)
        each = "the other client" if population - 1 == 1 else f"each of the other {population - 1:,} clients"
        others = f"{each} is honest and decides for itself; nobody learns who takes part"
    linked = max(group.linked for group in groups)
    values = "value" if linked == 1 else f"record of {linked} values"
    shows = f"an ideal shuffler shows how often each {values} was sent for each weight, and nothing else"
    if all(group.release.by_round for group in groups):
        shows = "an ideal shuffler shows which vectors were sent, and nothing else"
    summed = [group.channel == "secure-sum" for group in groups]
    if any(summed):
        both = "" if all(summed) else f"{shows}; and in other rounds, "
        shows = f"{both}nobody learns more than the sum over all clients"
    return (*_PUBLIC, shows, others)
