"""From events to guarantees: a line for each unit, scope and trust model, and the reason where there is no line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import ceil, inf
from typing import Any

from ldpfl.errors import ConfigError
from ldpfl.privacy.accountants.binomial import sigmoid
from ldpfl.privacy.accountants.clones import any_report, composed_clone_epsilon
from ldpfl.privacy.accountants.closed_forms import central_limit_epsilon
from ldpfl.privacy.accountants.local import epsilon_of
from ldpfl.privacy.accountants.sampling import self_sampled_epsilon
from ldpfl.privacy.accountants.shuffled_composition import Bracket, ShuffledRounds, attained_epsilon, certified_epsilon
from ldpfl.privacy.claims import paper_claim
from ldpfl.privacy.events import BinaryRelease, GaussianRelease, RoundEvent, UnprotectedRelease
from ldpfl.privacy.guarantee import REPLACE_ONE, Guarantee, Scope
from ldpfl.privacy.ledger import Ledger
from ldpfl.privacy.statement import RoundGroup, Statement

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
    if not ledger.events:
        check_delta(delta)
        return Statement(delta, (), ("nothing was released",))
    return account_groups(_groups(ledger.events, colluding), delta)


def account_groups(groups: Sequence[RoundGroup], delta: float) -> Statement:
    """Return what rounds like ``groups`` guarantee to a client that takes part in all of them. Seconds on one core."""
    check_delta(delta)
    claims = [claim for claim in (paper_claim(group.release) for group in groups) if claim is not None]
    rows = [max(claims, key=lambda claim: claim.epsilon)] if claims else []
    dearest = _dearest(groups)
    rows += _unit_rows(dearest, delta)
    notes: list[str] = []
    scopes: tuple[tuple[Scope, Sequence[Sequence[RoundGroup]]], ...] = (("round", [[group] for group in dearest]), ("run", [groups]))
    for scope, parts in scopes:
        found, reasons = _client_rows(parts, delta, scope)
        rows += found
        notes += [reason for reason in reasons if reason not in notes]
    clients = max(group.population for group in groups)
    warnings = [f"no guarantee: {reason}" for reason in _unprotected(groups)]
    if clients > 1 and delta >= 1 / clients:
        warnings.append(f"delta {delta:g} is not below 1/n = {1 / clients:g}: to publish one of the clients at random would satisfy it")
    return Statement(delta, tuple(rows), tuple(notes), tuple(warnings))


def check_delta(delta: float) -> None:
    """Raise a :class:`ConfigError` unless ``delta`` is one that figures can be given for."""
    if not 0 < delta < 1:
        advice = "; the pure figures (delta = 0) are given in any case" if delta == 0 else ""
        raise ConfigError(f"delta must lie strictly between 0 and 1, got {delta:g}{advice}")
    if delta < SMALLEST_DELTA:
        raise ConfigError(f"delta {delta:g} is below {SMALLEST_DELTA:g}, the smallest that is computed reliably; rely on the pure figures")


def _groups(events: Sequence[RoundEvent], colluding: int) -> list[RoundGroup]:
    """Return the rounds of the client that took part most often, grouped by likeness.

    Which rounds it joined is not in the ledger. If all are alike but for the crowd, those with the smallest crowds are
    the dearest, and among rounds of Gaussian noise those with the largest mu; otherwise it is charged for every one.
    """
    smallest = min(event.cohort for event in events)
    if not 0 <= colluding < smallest:
        raise ConfigError(f"colluding must lie between 0 and {smallest - 1} of those that took part, got {colluding}")
    groups = sorted((_group(event, smallest, colluding) for event in events), key=lambda group: group.cohort)
    # Some client joined at least as often as clients did on average, whatever the events say.
    average = ceil(sum(event.cohort for event in events) / max(event.population for event in events))
    most = max(average, *(event.joined for event in events))
    if len({replace(group, cohort=1, population=1) for group in groups}) == 1 and groups[0].sampling != "secret":
        groups = groups[:most]
    elif all(isinstance(group.release, GaussianRelease) for group in groups):
        groups = sorted(groups, key=lambda group: -group.release.parameter)[:most]
    return [replace(group, rounds=count) for group, count in Counter(groups).items()]


def _group(event: RoundEvent, smallest: int, colluding: int) -> RoundGroup:
    honest = max(1, event.population - colluding)
    # Where participation is secret, how many took part is chance: it does not make rounds differ.
    cohort = smallest if event.sampling == "secret" else event.cohort
    linked = min(event.linked, event.release.units)
    return RoundGroup(event.release, cohort - colluding, honest, 1, event.sampling, event.rate, event.channel, linked)


def _dearest(groups: Sequence[RoundGroup]) -> list[RoundGroup]:
    """Return single rounds among which the dearest is, under any trust model: those that no other one exceeds in all that counts."""
    kept: list[RoundGroup] = []
    for one in dict.fromkeys(replace(group, rounds=1) for group in groups):
        if not any(_exceeds(other, one) for other in kept):  # of two that exceed each other, the first stays
            kept = [*(other for other in kept if not _exceeds(one, other)), one]
    return kept


def _exceeds(other: RoundGroup, one: RoundGroup) -> bool:
    def rest(group: RoundGroup) -> tuple[object, ...]:
        return type(group.release), group.release.unit, group.sampling, group.rate, group.channel, group.linked

    def size(group: RoundGroup) -> tuple[float, int, int, int]:
        return group.release.parameter, group.release.units, -group.cohort, -group.population

    return rest(other) == rest(one) and all(x >= y for x, y in zip(size(other), size(one), strict=True))


def _unit_rows(rounds: Sequence[RoundGroup], delta: float) -> list[Guarantee]:
    """Return what one unit of one round costs: locally, and hidden among the other clients' reports of the same unit."""
    if any(isinstance(group.release, GaussianRelease) for group in rounds):
        return []  # Gaussian noise has no pure epsilon; it is accounted by the round
    worst = max(rounds, key=lambda group: group.release.parameter)
    common: dict[str, Any] = {
        "unit": worst.release.unit,
        "units_per_round": worst.release.units,
        "adjacency": "replace one client's value",
        "status": "proved",
    }
    epsilon = worst.release.parameter
    rows = [Guarantee(epsilon, 0.0, trust_model="local", assumptions=_PUBLIC if epsilon < inf else (), **common)]
    if all(_counts_only(group) for group in rounds):
        brackets = [_shuffled([replace(group, release=replace(group.release, units=1))], delta) for group in rounds]
        found = max(brackets, key=lambda pair: pair[0].adaptive)
        lower = found[0].lower if found[1] else None
        rows.append(Guarantee(found[0].adaptive, delta, trust_model="shuffled", assumptions=_shuffler(rounds), lower=lower, **common))
    return rows


def _client_rows(parts: Sequence[Sequence[RoundGroup]], delta: float, scope: Scope) -> tuple[list[Guarantee], list[str]]:
    """Return the dearest of ``parts`` under each trust model, and why a line is missing."""
    rows = _largest([_local_rows(part, delta, scope) for part in parts])
    reasons = [reason for reason in (_why_not_shuffled(part) for part in parts) if reason]
    if reasons:
        return rows, reasons
    return rows + _largest([_shuffled_rows(part, delta, scope) for part in parts]), []


def _largest(candidates: Sequence[list[Guarantee]]) -> list[Guarantee]:
    """Return for each kind of row the one with the largest epsilon."""
    best: dict[tuple[object, ...], Guarantee] = {}
    for row in (row for rows in candidates for row in rows):
        kind = (row.trust_model, row.delta == 0, row.adaptive, row.status)
        if kind not in best or row.epsilon > best[kind].epsilon:
            best[kind] = row
    return list(best.values())


def _local_rows(groups: Sequence[RoundGroup], delta: float, scope: Scope) -> list[Guarantee]:
    """Return what all that a client sends costs against a server that sees who sent it: pure, and for ``delta``."""
    common: dict[str, Any] = {
        "unit": "client",
        "units_per_round": 1,
        "adjacency": REPLACE_ONE,
        "trust_model": "local",
        "status": "proved",
        "scope": scope,
    }
    reasons = _unprotected(groups)
    if reasons:
        return [Guarantee(inf, level, assumptions=reasons, **common) for level in (0.0, delta)]
    return [Guarantee(_local(groups, level), level, assumptions=_PUBLIC, **common) for level in (0.0, delta)]


def _unprotected(groups: Sequence[RoundGroup]) -> tuple[str, ...]:
    """Return what left without protection, and by which mechanism; each thing once."""
    releases = [group.release for group in groups]
    reasons = [f"{release.mechanism}: {release.reason}" for release in releases if isinstance(release, UnprotectedRelease)]
    return tuple(dict.fromkeys(reasons))


def _local(groups: Sequence[RoundGroup], delta: float) -> float:
    return epsilon_of([(group.release, group.rounds) for group in groups], delta)


def _shuffled_rows(groups: Sequence[RoundGroup], delta: float, scope: Scope) -> list[Guarantee]:
    """Return what all that a client sends costs against a server behind an ideal shuffler."""
    cohort = min(group.cohort for group in groups)
    bracket, known = _shuffled(groups, delta)
    common: dict[str, Any] = {"unit": "client", "units_per_round": 1, "adjacency": REPLACE_ONE, "trust_model": "shuffled", "scope": scope}
    rows = []
    if known and bracket.upper < bracket.adaptive * (1 - 1e-9):
        fixed = (*_shuffler(groups), "inputs of all rounds are fixed before the first, which training does not do")
        rows.append(Guarantee(bracket.upper, delta, assumptions=fixed, lower=bracket.lower, adaptive=False, status="proved", **common))
    lower = bracket.lower if known else None
    rows.append(Guarantee(bracket.adaptive, delta, assumptions=_shuffler(groups), lower=lower, status="proved", **common))
    if scope == "run" and known and len(groups) == 1 and cohort * sigmoid(-groups[0].release.parameter) >= _NORMAL_ENOUGH:
        estimate = central_limit_epsilon(groups[0].release.parameter, cohort, groups[0].reports, delta)
        rows.append(Guarantee(estimate, delta, source="central limit theorem: bounds nothing", status="estimate", **common))
    return rows


def _why_not_shuffled(groups: Sequence[RoundGroup]) -> str:
    channels = {group.channel for group in groups}
    if "random-delay" in channels:
        return (
            "no shuffled number: a random delay is not a shuffler; "
            "whoever watches the network, or sees who is late, can link reports to clients"
        )
    if "direct" in channels:
        return "no shuffled number: reports reach the server with their sender"
    if any(isinstance(group.release, UnprotectedRelease) for group in groups):
        return "no shuffled number: values leave without protection, and a shuffler shows them as they are"
    if any(isinstance(group.release, GaussianRelease) for group in groups):
        return "no shuffled number: what a shuffler adds to Gaussian noise is not accounted here; the local figures hold behind it too"
    if len(groups) > 1 and not all(_counts_only(group) and group.sampling != "secret" for group in groups):
        return "no shuffled number: rounds of different kinds are accounted together for one-bit reports only; the local figures hold"
    return ""


def _shuffled(groups: Sequence[RoundGroup], delta: float) -> tuple[Bracket, bool]:
    """Return bounds, and whether the lower one is known."""
    local, first = _local(groups, delta), groups[0]
    if not _counts_only(first):
        epsilon = first.release.parameter * first.linked
        messages = ceil(first.release.units / first.linked) * first.rounds
        upper = min(local, composed_clone_epsilon(epsilon, first.cohort, messages, delta, any_report(epsilon)))
        return Bracket(0.0, upper, upper), False
    settings = [ShuffledRounds(group.release.parameter, group.cohort, group.release.units, group.rounds) for group in groups]
    if first.sampling == "secret" and first.rate < 1:
        upper = min(local, self_sampled_epsilon(replace(settings[0], clients=first.population), first.rate, delta))
        return Bracket(0.0, upper, upper), False
    upper, adaptive = certified_epsilon(settings, delta)
    # What a data set attains is a fact about the bits that are really sent.
    realised = [replace(setting, epsilon0=_realised(group)) for setting, group in zip(settings, groups, strict=True)]
    return Bracket(min(attained_epsilon(realised, delta), upper), upper, adaptive), True


def _realised(group: RoundGroup) -> float:
    realised = group.release.realised if isinstance(group.release, BinaryRelease) else None
    return group.release.parameter if realised is None else realised


def _counts_only(group: RoundGroup) -> bool:
    """Tell whether all that an ideal shuffler shows of a unit is how many bits were 1."""
    return isinstance(group.release, BinaryRelease) and group.linked == 1 and group.channel == "ideal-shuffler"


def _shuffler(groups: Sequence[RoundGroup]) -> tuple[str, ...]:
    cohort = min(group.cohort for group in groups)
    others = f"the other {cohort - 1:,} clients are honest, and none of them drops out or colludes"
    if cohort == 1:
        others = "there is no other client to hide among"
    if any(group.sampling == "secret" for group in groups):
        population = min(group.population for group in groups)
        others = f"each of the other {population - 1:,} clients is honest and decides for itself; nobody learns who takes part"
    return (*_PUBLIC, "an ideal shuffler shows how often each value was sent for each weight, and nothing else", others)
