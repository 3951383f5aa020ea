"""From events to guarantees: a line for each unit, scope and trust model, and the reason where there is no line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import ceil, inf, sqrt
from typing import Any

from ldpfl.errors import ConfigError
from ldpfl.privacy.accountants.clones import any_report, composed_clone_epsilon
from ldpfl.privacy.accountants.closed_forms import central_limit_epsilon
from ldpfl.privacy.accountants.composition import local_epsilon
from ldpfl.privacy.accountants.sampling import self_sampled_epsilon
from ldpfl.privacy.accountants.shuffled import single_attained_epsilon, single_epsilon
from ldpfl.privacy.accountants.shuffled_composition import Bracket, ShuffledRounds, shuffled_epsilon
from ldpfl.privacy.claims import paper_claim
from ldpfl.privacy.events import BinaryRelease, GaussianRelease, PureRelease, RoundEvent, UnprotectedRelease
from ldpfl.privacy.guarantee import REPLACE_ONE, Guarantee, Scope
from ldpfl.privacy.ledger import Ledger
from ldpfl.privacy.statement import RoundGroup, Statement

DELTA = 1e-5

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
        raise ConfigError("the ledger is empty: nothing was released yet")
    return account_groups(_groups(ledger.events, colluding), delta)


def account_groups(groups: Sequence[RoundGroup], delta: float) -> Statement:
    """Return what rounds like ``groups`` guarantee to a client that takes part in all of them. Seconds on one core."""
    if not 0 < delta < 1:
        advice = "; the pure figures (delta = 0) are given in any case" if delta == 0 else ""
        raise ConfigError(f"delta must lie strictly between 0 and 1, got {delta:g}{advice}")
    cohort = min(group.cohort for group in groups)
    warnings = []
    if cohort > 1 and delta >= 1 / cohort:
        warnings.append(f"delta {delta:g} is not below 1/n = {1 / cohort:g}: to publish one of the clients at random would satisfy it")
    claims = [claim for claim in (paper_claim(group.release) for group in groups) if claim is not None]
    rows = [max(claims, key=lambda claim: claim.epsilon)] if claims else []
    rows += _unit_rows(groups, delta)
    one_round = [replace(max(groups, key=_cost), rounds=1)]
    notes: list[str] = []
    scopes: tuple[tuple[Scope, Sequence[RoundGroup]], ...] = (("round", one_round), ("run", groups))
    for scope, part in scopes:
        rows += _local_rows(part, delta, scope)
        shuffled, reason = _shuffled_rows(part, delta, scope)
        rows += shuffled
        notes += [reason] if reason and reason not in notes else []
    return Statement(delta, tuple(rows), tuple(notes), tuple(warnings))


def _groups(events: Sequence[RoundEvent], colluding: int) -> list[RoundGroup]:
    """Return the rounds that one client joined, the dearest ones where it did not join all, grouped by likeness."""
    smallest = min(event.cohort for event in events)
    if not 0 <= colluding < smallest:
        raise ConfigError(f"colluding must lie between 0 and {smallest - 1} of those that took part, got {colluding}")
    alike: Counter[RoundGroup] = Counter()
    for group in sorted((_group(event, smallest, colluding) for event in events), key=_cost, reverse=True)[: _joined(events)]:
        alike[group] += 1
    return [replace(group, rounds=count) for group, count in alike.items()]


def _joined(events: Sequence[RoundEvent]) -> int:
    return len(events) if any(event.sampling == "secret" for event in events) else min(len(events), max(event.joined for event in events))


def _group(event: RoundEvent, smallest: int, colluding: int) -> RoundGroup:
    honest = max(1, event.population - colluding)
    # Where participation is secret, how many took part is chance: it does not make rounds differ.
    cohort = smallest if event.sampling == "secret" else event.cohort
    return RoundGroup(
        event.release,
        cohort - colluding,
        honest,
        1,
        event.sampling,
        event.rate,
        event.channel,
        min(event.linked, event.release.units),
    )


def _cost(group: RoundGroup) -> tuple[float, int]:
    """Order rounds by what they cost one client: unprotected ones first, then by pure sum or mu, then by the smaller crowd."""
    match group.release:
        case UnprotectedRelease():
            return inf, -group.cohort
        case GaussianRelease(mu=mu):
            return mu, -group.cohort
        case BinaryRelease(epsilon=epsilon, units=units) | PureRelease(epsilon=epsilon, units=units):
            return epsilon * units, -group.cohort


def _unit_rows(groups: Sequence[RoundGroup], delta: float) -> list[Guarantee]:
    """Return what one unit of one round costs: locally, and hidden among the other clients' reports of the same unit."""
    worst = max(groups, key=lambda group: (_report_epsilon(group), -group.cohort))
    if isinstance(worst.release, GaussianRelease):
        return []
    epsilon = _report_epsilon(worst)
    common: dict[str, Any] = {
        "unit": worst.release.unit,
        "units_per_round": worst.release.units,
        "adjacency": "replace one client's value",
        "status": "proved",
    }
    rows = [Guarantee(epsilon, 0.0, trust_model="local", assumptions=_PUBLIC if epsilon < inf else (), **common)]
    if _counts_only(worst):
        shuffled, attained = single_epsilon(epsilon, worst.cohort, delta), single_attained_epsilon(epsilon, worst.cohort, delta)
        rows.append(Guarantee(shuffled, delta, trust_model="shuffled", assumptions=_shuffler(worst.cohort), lower=attained, **common))
    return rows


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
    unprotected = [group.release for group in groups if isinstance(group.release, UnprotectedRelease)]
    if unprotected:
        reasons = tuple(dict.fromkeys(f"{release.mechanism}: {release.reason}" for release in unprotected))
        return [Guarantee(inf, level, assumptions=reasons, **common) for level in (0.0, delta)]
    return [Guarantee(_local(groups, level), level, assumptions=_PUBLIC, **common) for level in (0.0, delta)]


def _local(groups: Sequence[RoundGroup], delta: float) -> float:
    reports, mus = [], []
    for group in groups:
        match group.release:
            case GaussianRelease(mu=mu):
                mus.append(mu * sqrt(group.reports))
            case BinaryRelease(epsilon=epsilon) | PureRelease(epsilon=epsilon):
                reports.append((epsilon, group.reports))
    return local_epsilon(reports, mus, delta)


def _shuffled_rows(groups: Sequence[RoundGroup], delta: float, scope: Scope) -> tuple[list[Guarantee], str]:
    """Return what all that a client sends costs against a server behind an ideal shuffler, or the reason why there is no such line."""
    reason = _why_not_shuffled(groups)
    if reason:
        return [], reason
    crowd = min(group.cohort for group in groups)
    bracket, known = _shuffled(groups, delta)
    common: dict[str, Any] = {
        "unit": "client",
        "units_per_round": 1,
        "adjacency": REPLACE_ONE,
        "trust_model": "shuffled",
        "status": "proved",
    }
    rows = []
    if known and bracket.upper < bracket.adaptive:
        fixed = (*_shuffler(crowd), "inputs of all rounds are fixed before the first, which training does not do")
        rows.append(Guarantee(bracket.upper, delta, assumptions=fixed, scope=scope, lower=bracket.lower, adaptive=False, **common))
    lower = bracket.lower if known else None
    rows.append(Guarantee(bracket.adaptive, delta, assumptions=_shuffler(crowd), scope=scope, lower=lower, **common))
    if scope == "run" and known and len(groups) == 1 and _counts_only(groups[0]):
        group = groups[0]
        # Among a few clients it may say more than even the sum of all reports: then it is no estimate either.
        estimate = min(_local(groups, 0.0), central_limit_epsilon(_report_epsilon(group), group.cohort, group.reports, delta))
        rows.append(
            Guarantee(estimate, delta, scope=scope, source="central limit theorem: bounds nothing", **{**common, "status": "estimate"})
        )
    return rows, ""


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
    local = _local(groups, delta)
    first = groups[0]
    if not _counts_only(first):
        epsilon = _report_epsilon(first) * first.linked
        messages = ceil(first.release.units / first.linked) * first.rounds
        upper = min(local, composed_clone_epsilon(epsilon, first.cohort, messages, delta, any_report(epsilon)))
        return Bracket(0.0, upper, upper), False
    settings = [ShuffledRounds(_report_epsilon(group), group.cohort, group.release.units, group.rounds) for group in groups]
    if first.sampling == "secret" and first.rate < 1:
        upper = min(local, self_sampled_epsilon(replace(settings[0], clients=first.population), first.rate, delta))
        return Bracket(0.0, upper, upper), False
    return shuffled_epsilon(settings, delta), True


def _counts_only(group: RoundGroup) -> bool:
    """Tell whether all that an ideal shuffler shows of a unit is how many bits were 1."""
    return isinstance(group.release, BinaryRelease) and group.linked == 1 and group.channel == "ideal-shuffler"


def _report_epsilon(group: RoundGroup) -> float:
    match group.release:
        case BinaryRelease(epsilon=epsilon) | PureRelease(epsilon=epsilon):
            return epsilon
        case UnprotectedRelease():
            return inf
    return 0.0  # Gaussian noise has no pure epsilon; it is accounted by the round


def _shuffler(crowd: int) -> tuple[str, ...]:
    others = f"the other {crowd - 1:,} clients are honest, and none of them drops out or colludes"
    return (*_PUBLIC, "an ideal shuffler shows how often each value was sent for each weight, and nothing else", others)
