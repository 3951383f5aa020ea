"""Compute the guarantees of charged rounds: one row for each unit, scope and trust model, or a note why the row is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import inf, sqrt
from typing import Any

from ldpfl.errors import ConfigError, error_without_data
from ldpfl.privacy.accountants.base import Accountant
from ldpfl.privacy.accountants.behind_shuffler import Bounds, CountedBits, ShuffledAccountant, SummedNoise
from ldpfl.privacy.accountants.binomial import sigmoid
from ldpfl.privacy.accountants.closed_forms import central_limit_epsilon
from ldpfl.privacy.accountants.gaussian import ROUNDED
from ldpfl.privacy.accountants.local import GaussianAccountant
from ldpfl.privacy.accountants.registry import accountant, behind_shuffler, least_epsilon
from ldpfl.privacy.charged_rounds import RoundGroup, charged_groups
from ldpfl.privacy.events import OURS, USERS_CODE, BinaryRelease, Claim, GaussianRelease, PureRelease, Release, for_one_record
from ldpfl.privacy.guarantee import (
    AUTHORS_CLAIM,
    IF_TRUSTED,
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
"""Smallest delta that is computed. Distributions are cut off where less than 1e-30 remains, so a smaller delta could be wrong."""

_NORMAL_ENOUGH = 10.0
"""Expected number of the rarer bit value from which the central limit theorem's estimate is shown."""

_PUBLIC = ("ranges are public", "random bits are uniform and secret")


def account(ledger: Ledger, delta: float = DELTA, colluding: int = 0) -> Statement:
    """Compute the privacy guarantees of ``ledger`` for the client that took part most often.

    Args:
        delta: failure probability; it should be below 1 / n for n clients.
        colluding: number of clients that reveal to the adversary what they sent; they hide nobody.

    Raises:
        ConfigError: delta is not between 0 and 1, or some round has no more than ``colluding`` clients.
    """
    return account_together([ledger], delta, colluding)


def account_together(ledgers: Sequence[Ledger], delta: float = DELTA, colluding: int = 0) -> Statement:
    """Compute the guarantees of several runs together, for a client that used the same data in all and took part most often in each.

    Raises:
        ConfigError: as :func:`account`.
    """
    counts: Counter[RoundGroup] = Counter()
    charged = [charged_groups(ledger, colluding) for ledger in ledgers]
    for groups_of_run in charged:
        for group in groups_of_run:
            counts[replace(group, rounds=1)] += group.rounds
    # Different clients may have taken part most often in different runs. Only if all joined is it certainly one client.
    is_one_client = len(ledgers) == 1 or all(group.sampling == "everyone" for group in counts)
    groups = [replace(group, rounds=count, known=group.known and is_one_client) for group, count in counts.items()]
    if not groups:
        check_delta(delta)
        return Statement(delta, (), ("nothing was released",))
    try:
        claims = tuple(group.release.claimed for group in groups)
        return _cached_statement(tuple(groups), claims, delta, any(map(_is_of_one_round, charged)))
    except ConfigError:
        raise
    except Exception as error:  # an error here must not lose the trained model: the statement then has no rows
        return Statement(delta, (), (), (f"no figure of privacy: {_why_not_computed(error)}; assume that nothing is protected",))


@lru_cache(maxsize=64)
def _cached_statement(
    groups: tuple[RoundGroup, ...], claims: tuple[Claim | None, ...], delta: float, has_run_of_one_round: bool
) -> Statement:
    """Compute the statement, cached for repeated calls. ``claims`` is only a part of the key: equal releases may differ in their claims."""
    return account_groups(groups, delta, has_run_of_one_round=has_run_of_one_round)


def run_epsilon(ledger: Ledger, delta: float = DELTA) -> float:
    """Return the epsilon of :attr:`Statement.best` for the run of ``ledger``. Much faster than computing the whole statement."""
    groups = _counted_for_protected_unit(charged_groups(ledger))
    return inf if _unprotected_reasons(groups) else least_epsilon(groups, delta)


def account_groups(groups: Sequence[RoundGroup], delta: float, *, has_run_of_one_round: bool | None = None) -> Statement:
    """Compute the guarantees of ``groups`` of rounds for a client that takes part in all of them. Takes seconds on one core.

    The rows are the paper's claim, then the guarantees for one unit of a round, for all that a client sends in a round, and in the run.

    Args:
        groups: the rounds.
        delta: failure probability of all guarantees that are not pure.
        has_run_of_one_round: whether some run has only one round. By default, all rounds are taken to be of the same run.
    """
    check_delta(delta)
    protected_unit = _protected_unit(groups)
    counts_persons_as_records = protected_unit is _RECORD and any(group.release.unit == "person" for group in groups)
    groups = _counted_for_protected_unit(groups)
    # The rows.
    claims = [claim for claim in (group.release.claimed for group in groups) if claim is not None]
    rows = [max(claims, key=lambda claim: claim.epsilon).guarantee()] if claims else []
    costliest = _candidates_for_costliest_round(groups)
    notes: list[str] = []
    rows += _rows_for_one_unit(costliest, delta, notes)
    rows += _rows_for_everything_sent([[group] for group in costliest], delta, "round", protected_unit, notes)
    rows += _rows_for_everything_sent([groups], delta, "run", protected_unit, notes)
    third_party_warnings = _third_party_warnings(groups)
    if third_party_warnings:  # all epsilons depend on that code, so none is proved
        rows = [replace(row, status=AUTHORS_CLAIM) if row.status == "proved" else row for row in rows]
    # The notes.
    notes = list(dict.fromkeys(notes))  # several rounds may give the same note
    if any(group.histograms for group in costliest):
        notes.append("one round means the costliest release, which may be one that measures columns before round 1, not a training round")
    if protected_unit is not _CLIENT:
        is_batch_random = any(group.batch_rate < 1 for group in groups)
        notes.append((_MANY_BY_CHANCE if is_batch_random else _MANY).format(unit=protected_unit.unit))
        if protected_unit is _PERSON:
            notes.append(_AT_SEVERAL_CLIENTS)
        if counts_persons_as_records:
            notes.append(_PERSONS_FOR_RECORDS)
        of_one_round = _is_of_one_round(groups) if has_run_of_one_round is None else has_run_of_one_round
        notes += _notes_for_removing_one(groups, delta, protected_unit.unit, may_be_least_squares=of_one_round)
    # The warnings.
    warnings = [f"no guarantee: {reason}" for reason in _unprotected_reasons(groups)]
    clients = max(group.population for group in groups)
    if clients > 1 and delta >= 1 / clients and protected_unit is _CLIENT:
        warnings.append(f"delta {delta:g} is not below 1/n = {1 / clients:g}: even publishing one client at random would satisfy it")
    warnings += third_party_warnings
    statement = Statement(delta, tuple(rows), tuple(notes), tuple(warnings))
    best = statement.best
    if best is None or worth_of(best.epsilon) == "bad":  # the verdict then states no probability
        return statement
    return replace(statement, distance=_distance(groups, None if best.trust_model == "local" else behind_shuffler(groups)))


def _distance(groups: Sequence[RoundGroup], shuffled: ShuffledAccountant | None) -> float:
    """Return an upper bound of the total variation distance between the adversary's views of two inputs; 1 if no bound is known.

    If ``shuffled`` is given, the adversary sees only the mixed or summed reports. Else it sees each report with its sender.
    """
    try:
        distance = (shuffled or accountant((group.release, group.rounds) for group in groups)).distance()
    except Exception:  # the verdict then uses the bound that epsilon implies
        return 1.0
    return distance if 0 <= distance <= 1 else 1.0


def _third_party_warnings(groups: Sequence[RoundGroup]) -> list[str]:
    """Return a warning for each third-party mechanism, and for each mechanism on a user's code: all epsilons depend on that code."""
    warnings = []
    for release in (group.release for group in groups if group.release.author != OURS):
        name, author = release.mechanism, release.author
        foreign = f"nothing is proved of {name}, whose code ({author}) is not ldpfl's: the figures rest on its author's claim"
        unit = least_protected([release.unit])
        warnings.append(_ON_USERS_CODE.format(name=name, unit=unit) if author == USERS_CODE else foreign)
    return list(dict.fromkeys(warnings))


_ON_USERS_CODE = (
    "nothing is proved of {name} on a model, loss, features or data from code that is not ldpfl's: the figures hold if this code treats "
    "each {unit} by itself and keeps nothing of it for another, which ldpfl cannot prove"
)


def _is_of_one_round(groups: Sequence[RoundGroup]) -> bool:
    """Whether the run of ``groups`` has at most one round of training. Measurements of columns are not counted."""
    return sum(group.rounds for group in groups if not group.histograms) <= 1


def _notes_for_removing_one(groups: Sequence[RoundGroup], delta: float, unit: Protected, *, may_be_least_squares: bool) -> list[str]:
    """Return a note with the epsilon for adding or removing a record or person, as other tools for DP-SGD state it.

    Behind a sum, the note has the epsilon of the sums beside the local one. The list is empty unless all rounds protect this ``unit`` by
    Gaussian noise. A ledger does not tell whether a run's only round solved least squares, where removing a record may change more than in
    a round of gradients. If some run ``may_be_least_squares``, all rounds get the larger factor of :func:`_release_for_removal`.
    """
    for_removal = [replace(group, release=_release_for_removal(group, may_be_least_squares=may_be_least_squares)) for group in groups]
    local = accountant((group.release, group.rounds) for group in for_removal)
    if not isinstance(local, GaussianAccountant) or any(group.release.unit != unit for group in groups):
        return []
    from ldpfl.privacy.accountants.poisson import added_epsilon  # it loads all of dp-accounting

    shuffled = behind_shuffler(for_removal)
    try:
        figures = [f"{number(added_epsilon(local.rounds, delta))} against whoever sees who sent what"]
        if isinstance(shuffled, SummedNoise):
            # The rest of delta is for the difference between sums of rounded noise and one Gaussian.
            epsilon_of_sums = added_epsilon(shuffled.sums().rounds, delta * (1 - ROUNDED))
            figures.insert(0, f"{number(epsilon_of_sums)} {IF_TRUSTED['summed']}")
    except Exception as error:  # only this extra note is missing; the proved rows stand
        return [f"no epsilon for leaving one {unit} out: {_why_not_computed(error)}"]
    relation = f"if one {unit} is left out and its place stays empty (not replaced by another), as Opacus and others count"
    return [f"{relation}: epsilon {'; '.join(figures)}"]


def _release_for_removal(group: RoundGroup, *, may_be_least_squares: bool) -> Release:
    """Return the release of ``group`` with mu set to twice the mu of removing a record, since ``added_epsilon`` halves mu.

    Removing a record moves a sum of gradients half as far as replacing it: mu stays. It moves one-hot counts 1 / sqrt(2) times as far, and
    the sums of products of least squares at most 1.36 / 2 times as far, which is less: for both, mu is multiplied by sqrt(2).
    """
    release = group.release
    if isinstance(release, GaussianRelease) and (group.histograms or may_be_least_squares):
        return replace(release, mu=release.mu * sqrt(2))
    return release


_MANY = "one {unit} is protected, not the client that holds it: for m {unit}s of one client together, mu is m times as large"
_MANY_BY_CHANCE = (
    "one {unit} is protected, not the client that holds it: m {unit}s of one client are sampled independently, "
    "and for all of them together epsilon is at most m times as large, at a delta m e^((m - 1) epsilon) times as large"
)
_AT_SEVERAL_CLIENTS = (
    "each client knows its persons by a name: all records of one name at a client count as one person's, and a person with records at k "
    "clients counts as k persons; which persons are trained on is public, and test persons are not protected"
)


_PERSONS_FOR_RECORDS = (
    "rounds that protect persons count at twice their mu for one record, because a record replaced by another person's record changes "
    "what two persons add; how many records and persons a client has is public"
)


@dataclass(frozen=True)
class _ProtectedUnit:
    """The unit, with its adjacency, that the rows over everything a client sends protect."""

    unit: Protected
    adjacency: str


_CLIENT, _PERSON, _RECORD = (
    _ProtectedUnit("client", REPLACE_ONE),
    _ProtectedUnit("person", REPLACE_PERSON),
    _ProtectedUnit("record", REPLACE_RECORD),
)


def _protected_unit(groups: Sequence[RoundGroup]) -> _ProtectedUnit:
    """Return the weakest unit that some round protects. It is protected in all rounds."""
    least = least_protected(group.release.unit for group in groups)
    return next(protected_unit for protected_unit in (_RECORD, _PERSON, _CLIENT) if protected_unit.unit == least)


def _counted_for_protected_unit(groups: Sequence[RoundGroup]) -> Sequence[RoundGroup]:
    """Return ``groups`` with releases counted for one record, if some round protects only records; else ``groups``.

    A group whose release changes is marked as not ``known``: no data set is known to attain its new epsilon.
    """
    if _protected_unit(groups) is not _RECORD:
        return groups
    counted = [replace(group, release=for_one_record(group.release)) for group in groups]
    return [replace(new, known=new.known and new.release == old.release) for new, old in zip(counted, groups, strict=True)]


def check_delta(delta: float) -> None:
    """Raise a :class:`ConfigError` unless ``delta`` lies in [``SMALLEST_DELTA``, 1)."""
    if not 0 < delta < 1:
        advice = "; the pure figures (delta = 0) are given in any case" if delta == 0 else ""
        raise ConfigError(f"delta must lie strictly between 0 and 1, got {delta:g}{advice}")
    if delta < SMALLEST_DELTA:
        raise ConfigError(f"delta {delta:g} is below {SMALLEST_DELTA:g}, the smallest that is computed reliably: give a larger delta")


_MAX_COSTLIEST = 8
"""Maximum number of single rounds of a kind that are accounted one by one. Each may take seconds."""


def _candidates_for_costliest_round(groups: Sequence[RoundGroup]) -> list[RoundGroup]:
    """Return a few single rounds. Under any trust model, one of them costs at least as much as the costliest round of ``groups``.

    Rounds that another one dominates (certainly costs as much as) are left out. If many remain, a few made-up, costlier ones replace them.
    """
    undominated: list[RoundGroup] = []
    for round_group in dict.fromkeys(replace(group, rounds=1) for group in groups):
        if not any(_costs_at_least(earlier, round_group) for earlier in undominated):  # of two equally costly rounds, the first stays
            undominated = [*(earlier for earlier in undominated if not _costs_at_least(round_group, earlier)), round_group]
    by_kind: dict[tuple[object, ...], list[RoundGroup]] = {}
    for round_group in undominated:
        by_kind.setdefault(_comparison_kind(round_group), []).append(round_group)
    return [round_group for comparable_rounds in by_kind.values() for round_group in _few_dominating_rounds(comparable_rounds)]


def _few_dominating_rounds(rounds: Sequence[RoundGroup]) -> Sequence[RoundGroup]:
    """Return at most ``_MAX_COSTLIEST`` rounds that dominate ``rounds``, which are of one kind: each costs no more than one of them."""
    if len(rounds) <= _MAX_COSTLIEST:
        return rounds
    # A made-up round costs little more than rounds of similar epsilon or mu, so each stands for neighbours in that order.
    ordered = sorted(rounds, key=lambda group: group.release.parameter)
    borders = [len(ordered) * index // _MAX_COSTLIEST for index in range(_MAX_COSTLIEST + 1)]
    return [_dominating_round(ordered[begin:end]) for begin, end in pairwise(borders)]


def _dominating_round(rounds: Sequence[RoundGroup]) -> RoundGroup:
    """Return a round that costs at least as much as each of ``rounds``. No data set is known to attain its cost."""
    largest = max((group.release for group in rounds), key=lambda release: release.parameter)
    release: Release = replace(largest, units=max(group.release.units for group in rounds))
    if isinstance(release, PureRelease):
        blankets = [group.release.blanket for group in rounds if isinstance(group.release, PureRelease)]
        release = replace(release, blanket=None if None in blankets else min(blanket for blanket in blankets if blanket is not None))
    cohort, population = min(group.cohort for group in rounds), min(group.population for group in rounds)
    return replace(rounds[0], release=release, cohort=cohort, population=population, known=False)


def _comparison_kind(group: RoundGroup) -> tuple[object, ...]:
    """Return a key. Rounds with the same key differ only in numbers that :func:`_costs_at_least` compares, such as epsilon and cohort."""
    sampled = group.release.sampled if isinstance(group.release, BinaryRelease) else 1
    noise = (group.release.alike, group.release.integers) if isinstance(group.release, GaussianRelease) else ()
    participation_and_transport = group.sampling, group.rate, group.channel, group.linked
    return type(group.release), group.release.unit, sampled, noise, group.batch_rate, *participation_and_transport


def _costs_at_least(costlier: RoundGroup, cheaper: RoundGroup) -> bool:
    """Whether a round of ``costlier`` certainly costs at least as much as one of ``cheaper``: same kind, and no cost factor is smaller."""

    def cost_factors(group: RoundGroup) -> tuple[float, int, int, int, float]:
        """Return numbers that each raise the cost of a round. Three are negated: fewer clients and a smaller blanket hide less."""
        blanket = group.release.blanket if isinstance(group.release, PureRelease) else None
        return group.release.parameter, group.release.units, -group.cohort, -group.population, -(blanket or 0.0)

    is_no_smaller = [high >= low for high, low in zip(cost_factors(costlier), cost_factors(cheaper), strict=True)]
    return _comparison_kind(costlier) == _comparison_kind(cheaper) and all(is_no_smaller)


def _why_not_computed(error: Exception) -> str:
    """Return the remark about a figure whose computation raised ``error``."""
    return f"not computed, because: {error_without_data(error)}"


def _epsilon_or_note(spent: Accountant, delta: float, notes: list[str]) -> float:
    """Return the epsilon at ``delta``. If it cannot be computed, add a note, and return an upper bound: that at delta 0, or infinity."""
    try:
        if (epsilon := spent.epsilon(delta)) >= 0:  # False if it is not a number (NaN)
            return epsilon
        why = "not computed: no number came out"
    except Exception as error:  # an accountant's error must not lose the trained model
        why = _why_not_computed(error)
    if delta <= 0:
        notes.append(f"no epsilon without a delta: {why}")
        return inf
    notes.append(f"at delta {delta:g}, only the epsilon without a delta can be given: {why}")
    return _epsilon_or_note(spent, 0.0, notes)


def _bounds_or_note(shuffled: ShuffledAccountant, delta: float, notes: list[str]) -> Bounds | None:
    """Return the bounds on epsilon behind a shuffler or a sum. If they cannot be computed, add a note to ``notes`` and return None."""
    try:
        bounds = shuffled.bounds(delta)
        if bounds.fixed >= 0 and bounds.adaptive >= 0 and (bounds.attained is None or bounds.attained >= 0):
            return bounds
        why = "not computed: no number came out"
    except Exception as error:  # as in _epsilon_or_note
        why = _why_not_computed(error)
    notes.append(f"no {_trust_model(shuffled.groups)} number: {why}; the local figures hold")
    return None


def _rows_for_one_unit(rounds: Sequence[RoundGroup], delta: float, notes: list[str]) -> list[Guarantee]:
    """Return the rows for one unit of the costliest round: local and, for bits, among other clients' bits behind a shuffler or sum.

    The list is empty if releases are accounted by whole rounds, since their units have no epsilon.
    """
    if any(group.release.by_round for group in rounds):
        return []
    worst = max(rounds, key=lambda group: group.release.parameter)
    shared_fields: dict[str, Any] = {
        "unit": worst.release.unit,
        "units_per_round": worst.release.units,
        "adjacency": "replace one client's value",
        "status": "proved",
    }
    epsilon = worst.release.parameter
    rows = [Guarantee(epsilon, delta=0.0, trust_model="local", assumptions=_PUBLIC if epsilon < inf else (), **shared_fields)]
    if all(CountedBits.supports([group]) for group in rounds):
        units = [replace(group, release=replace(group.release, units=1)) for group in rounds]
        unit_bounds = [_bounds_or_note(CountedBits([unit], accountant([(unit.release, 1)])), delta, notes) for unit in units]
        known_bounds = [bounds for bounds in unit_bounds if bounds is not None]
        if len(known_bounds) < len(unit_bounds):  # the costliest round may be the one that could not be computed
            return rows
        costliest = max(known_bounds, key=lambda bounds: bounds.adaptive)
        assumptions, trusted = _shuffler_assumptions(rounds), _trust_model(rounds)
        rows.append(
            Guarantee(costliest.adaptive, delta, trust_model=trusted, assumptions=assumptions, lower=costliest.attained, **shared_fields)
        )
    return rows


def _rows_for_everything_sent(
    candidates: Sequence[Sequence[RoundGroup]], delta: float, scope: Scope, protected_unit: _ProtectedUnit, notes: list[str]
) -> list[Guarantee]:
    """Return the rows for everything a client sends in the costliest of ``candidates``, under each trust model.

    A candidate is all rounds of the run, or a single round. For each row that is missing, a note is added to ``notes``.
    """
    local_rows = _costliest_rows([_local_rows(groups, delta, scope, protected_unit, notes) for groups in candidates])
    accountants = [behind_shuffler(groups) for groups in candidates]
    reasons = [_why_not_shuffled(groups) for groups, shuffled in zip(candidates, accountants, strict=True) if shuffled is None]
    if reasons:
        notes += reasons
        return local_rows
    shuffled_rows = [_shuffled_rows(shuffled, delta, scope, protected_unit, notes) for shuffled in accountants if shuffled]
    if not all(shuffled_rows):  # the candidate that could not be computed may be the costliest
        return local_rows
    return local_rows + _costliest_rows(shuffled_rows)


def _costliest_rows(candidates: Sequence[list[Guarantee]]) -> list[Guarantee]:
    """Return the row with the largest epsilon among ``candidates`` for each kind: trust model, pure or not, adaptive or not, status."""
    costliest: dict[tuple[object, ...], Guarantee] = {}
    for rows in candidates:
        for row in rows:
            kind = (row.trust_model, row.delta == 0, row.adaptive, row.status)
            if kind not in costliest or row.epsilon > costliest[kind].epsilon:
                costliest[kind] = row
    return list(costliest.values())


def _local_rows(
    groups: Sequence[RoundGroup], delta: float, scope: Scope, protected_unit: _ProtectedUnit, notes: list[str]
) -> list[Guarantee]:
    """Return the rows for everything a client sends, against a server that sees the sender: at delta 0 and at ``delta``."""
    shared_fields: dict[str, Any] = {
        "unit": protected_unit.unit,
        "units_per_round": 1,
        "adjacency": protected_unit.adjacency,
        "trust_model": "local",
        "status": "proved",
        "scope": scope,
    }
    reasons = _unprotected_reasons(groups)
    if reasons:
        return [Guarantee(inf, row_delta, assumptions=reasons, **shared_fields) for row_delta in (0.0, delta)]
    local = accountant((group.release, group.rounds) for group in groups)
    epsilons = [(_epsilon_or_note(local, row_delta, notes), row_delta) for row_delta in (0.0, delta)]
    return [Guarantee(epsilon, row_delta, assumptions=_PUBLIC, **shared_fields) for epsilon, row_delta in epsilons]


def _unprotected_reasons(groups: Sequence[RoundGroup]) -> tuple[str, ...]:
    """Return the values that are sent without protection, each with its mechanism's name, without repetitions."""
    releases = [group.release for group in groups]
    reasons = [f"{release.mechanism}: {release.why_unprotected}" for release in releases if not release.protected]
    return tuple(dict.fromkeys(reasons))


def _shuffled_rows(
    shuffled: ShuffledAccountant, delta: float, scope: Scope, protected_unit: _ProtectedUnit, notes: list[str]
) -> list[Guarantee]:
    """Return the rows for everything a client sends, behind a shuffler or sum. If they cannot be computed, add a note and return none."""
    groups = shuffled.groups
    bounds = _bounds_or_note(shuffled, delta, notes)
    if bounds is None:
        return []
    shared_fields: dict[str, Any] = {
        "unit": protected_unit.unit,
        "units_per_round": 1,
        "adjacency": protected_unit.adjacency,
        "trust_model": _trust_model(groups),
        "scope": scope,
    }
    bound_fields = {**shared_fields, "lower": bounds.attained, "status": "proved"}
    assumptions = _shuffler_assumptions(groups)
    rows = []
    if bounds.fixed < bounds.adaptive * (1 - 1e-9):  # shown only if it differs by more than rounding
        fixed_inputs = "inputs of all rounds are fixed before the first, which training does not do"
        rows.append(Guarantee(bounds.fixed, delta, assumptions=(*assumptions, fixed_inputs), adaptive=False, **bound_fields))
    rows.append(Guarantee(bounds.adaptive, delta, assumptions=assumptions, **bound_fields))
    first, cohort = groups[0], min(group.cohort for group in groups)
    # sigmoid(-epsilon) is the probability of the rarer value of a bit.
    is_nearly_normal = isinstance(first.release, BinaryRelease) and cohort * sigmoid(-first.release.parameter) >= _NORMAL_ENOUGH
    if scope == "run" and bounds.attained is not None and len(groups) == 1 and is_nearly_normal:
        estimate = central_limit_epsilon(first.release.parameter, cohort, first.reports, delta)
        if estimate >= bounds.attained:  # a smaller estimate is known to be wrong
            rows.append(Guarantee(estimate, delta, source="central limit theorem: bounds nothing", status="estimate", **shared_fields))
    return rows


def _trust_model(groups: Sequence[RoundGroup]) -> TrustModel:
    """Return the trust model of the rows behind a shuffler or a sum."""
    return "summed" if all(group.channel == "secure-sum" for group in groups) else "shuffled"


def _why_not_shuffled(groups: Sequence[RoundGroup]) -> str:
    """Return a note with the reason why no accountant composes ``groups`` behind a shuffler."""
    channels = {group.channel for group in groups}
    if "random-delay" in channels:
        why = "a random delay is not a shuffler; whoever watches the network, or sees who is late, can link reports to clients"
    elif "direct" in channels:
        why = "reports reach the server with their sender"
    elif "secure-sum" in channels:
        why = "a sum is accounted only for bits, and for Gaussian noise on integers (dp-sgd, dp-fedavg); the local figures hold"
    else:
        different_kinds = "rounds of different kinds are accounted together for one-bit reports only; the local figures hold"
        is_protected = {group.release.not_shuffled: group.release.protected for group in groups if group.release.not_shuffled}
        # The reason of a release without protection (False) comes first.
        why = min(is_protected, key=lambda reason: is_protected[reason], default=different_kinds)
    return f"no shuffled number: {why}"


def _others_are(cohort: int) -> str:
    """Return the subject and verb of the sentence on the other clients of a round: "the other 99 clients are"."""
    return "the other client is" if cohort - 1 == 1 else f"the other {cohort - 1:,} clients are"


def _shuffler_assumptions(groups: Sequence[RoundGroup]) -> tuple[str, ...]:
    """Return the assumptions of the rows behind a shuffler or a sum, as sentences."""
    return (*_PUBLIC, _what_is_revealed(groups), _what_others_do(groups))


def _what_is_revealed(groups: Sequence[RoundGroup]) -> str:
    """Return the assumption on what the shuffler or the sum reveals. Some rounds may be mixed, and others summed."""
    linked = max(group.linked for group in groups)
    values = "value" if linked == 1 else f"record of {linked} values"
    by_shuffler = f"an ideal shuffler shows how often each {values} was sent for each weight, and nothing else"
    if all(group.release.by_round for group in groups):
        by_shuffler = "an ideal shuffler shows which vectors were sent, and nothing else"
    is_sum = [group.channel == "secure-sum" for group in groups]
    if not any(is_sum):
        return by_shuffler
    by_sum = "nobody learns more than the sum over all clients"
    return by_sum if all(is_sum) else f"{by_shuffler}; and in other rounds, {by_sum}"


def _what_others_do(groups: Sequence[RoundGroup]) -> str:
    """Return the assumption about the other clients: how many are honest, and what nobody learns about their participation."""
    cohort = min(group.cohort for group in groups)
    if any(group.sampling == "secret" for group in groups):
        population = min(group.population for group in groups)
        each = "the other client" if population - 1 == 1 else f"each of the other {population - 1:,} clients"
        return f"{each} is honest and decides for itself; nobody learns who takes part"
    if any(group.sampling == "once" for group in groups):
        return f"{_others_are(cohort)} honest, and nobody learns the order in which they take part"
    if all(group.cohort == 1 for group in groups):
        return "there is no other client to hide among"
    if cohort == 1:
        return "in some rounds there is no other client to hide among, and in the others those counted are honest"
    nobody_leaves = "it neither drops out nor colludes" if cohort - 1 == 1 else "none of them drops out or colludes"
    return f"{_others_are(cohort)} honest, and {nobody_leaves}"
