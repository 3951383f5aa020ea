"""Derive the rounds that a client is charged for: from the events of a ledger to groups of equal rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from ldpfl.errors import ConfigError
from ldpfl.privacy.events import Channel, GaussianRelease, Release, RoundEvent, Sampling
from ldpfl.privacy.ledger import Ledger


@dataclass(frozen=True)
class RoundGroup:
    """``rounds`` equal rounds of one client. The other fields are those of :class:`RoundEvent`.

    ``cohort`` and ``population`` count honest clients only: colluding clients are already subtracted. ``known`` says whether it is certain
    that one client joined all of these rounds. If not, they are charged all the same.
    """

    release: Release
    cohort: int
    population: int
    rounds: int = 1
    sampling: Sampling = "everyone"
    rate: float = 1.0
    channel: Channel = "ideal-shuffler"
    linked: int = 1
    known: bool = True
    histograms: bool = False

    @property
    def joined(self) -> bool:
        """Whether one client joined all of these rounds, not in secret, so that others can know it. Else no lower bound is stated."""
        return self.known and self.sampling != "once" and (self.sampling != "secret" or self.rate == 1)

    @property
    def reports(self) -> int:
        """Number of units (such as bits) that one client releases over all rounds of the group."""
        return self.release.units * self.rounds

    @property
    def batch_rate(self) -> float:
        """Probability that a record is in a round's batch."""
        return self.release.rate if isinstance(self.release, GaussianRelease) else 1.0


def charged_groups(ledger: Ledger, colluding: int = 0) -> list[RoundGroup]:
    """Return the rounds that a statement charges: those of the client that took part most often, in groups of equal rounds."""
    return _groups_of_busiest_client(ledger.events, colluding) if ledger.events else []


def _groups_of_busiest_client(events: Sequence[RoundEvent], colluding: int) -> list[RoundGroup]:
    """Return the rounds of the client that took part most often, in groups of equal rounds.

    The ledger does not say which rounds that client joined, so the costliest rounds are charged.
    """
    smallest_cohort = min((event.cohort for event in events if event.cohort > 0), default=1)
    if not 0 <= colluding < smallest_cohort:
        raise ConfigError(
            f"colluding, the number of clients that collude, is {colluding}, expected 0 to {smallest_cohort - 1}: the smallest round had "
            f"{smallest_cohort} clients, and at least one of them must be honest"
        )
    colluding = max(colluding, max(event.colluding for event in events))  # at least the number that the run was planned for
    counts: Counter[RoundGroup] = Counter()
    for event, times in _with_empty_rounds(events):
        counts[_single_round_group(event, smallest_cohort, colluding)] += times
    counts = _with_whole_run_as_cohort(counts, events, colluding)
    groups = sorted(counts, key=lambda group: group.cohort)
    # Some client joined at least the average number of rounds, whatever the events say of ``joined``.
    average_rounds = ceil(sum(event.cohort for event in events) / max(event.population for event in events))
    charged_rounds = max(average_rounds, *(event.joined for event in events))
    # If rounds differ, it is uncertain which ones a client joined, unless it joined all.
    is_certain = charged_rounds <= average_rounds and (len(groups) == 1 or charged_rounds >= sum(counts.values()))
    if not (is_certain and _is_attained(events, colluding)):
        counts = Counter({replace(group, known=False): rounds for group, rounds in counts.items()})
        groups = sorted(counts, key=lambda group: group.cohort)
    return _costliest_rounds(groups, counts, charged_rounds)


def _costliest_rounds(groups: Sequence[RoundGroup], counts: Counter[RoundGroup], charged_rounds: int) -> list[RoundGroup]:
    """Return the ``charged_rounds`` costliest rounds, or all if it is not known which are the costliest.

    If rounds differ only in their cohort, those with the smallest cohorts are the costliest. Among rounds of Gaussian noise, those with the
    largest mu are. ``counts`` has the number of rounds of each kind, and ``groups`` these kinds, ordered by ascending cohort.
    """
    differ_only_in_cohort = len({replace(group, cohort=1, population=1) for group in groups}) == 1
    if differ_only_in_cohort and groups[0].sampling != "secret":
        return _first_rounds_up_to(groups, counts, charged_rounds)
    # Behind a sum or shuffler the cost also depends on the cohort: then no round may be the costliest under both trust models.
    if all(isinstance(group.release, GaussianRelease) for group in groups) and _is_ordered_by_mu(groups):
        return _first_rounds_up_to(sorted(groups, key=lambda group: -group.release.parameter), counts, charged_rounds)
    return [replace(group, rounds=counts[group]) for group in groups]


def _is_attained(events: Sequence[RoundEvent], colluding: int) -> bool:
    """Whether the epsilon of the charged rounds is a lower bound as well: some data set certainly attains it.

    Colluding clients are charged as if they took part in every round. That is certain only if all clients did. A round with histograms
    never attains its epsilon.
    """
    everyone = all(event.cohort == event.population for event in events)
    return (colluding == 0 or everyone) and not any(event.histograms for event in events)


def _is_ordered_by_mu(groups: Sequence[RoundGroup]) -> bool:
    """Whether a round of Gaussian noise with a larger mu (of Gaussian DP) costs more under each trust model.

    Then the round with the largest mu is the costliest, and no other one need be computed.

    False if rounds differ in anything but mu that the cost depends on: unit, sampling rate, channel. False for a sum. False behind a
    shuffler if cohorts differ, since a larger cohort may hide a larger mu better, or if participation is secret.
    """
    all_but_mu = {
        (replace(group.release, mu=1.0), group.channel, group.sampling, group.rate)
        for group in groups
        if isinstance(group.release, GaussianRelease)
    }
    if len(all_but_mu) != 1 or groups[0].channel == "secure-sum":
        return False
    shuffled = groups[0].channel == "ideal-shuffler" and not groups[0].release.not_shuffled
    return not (shuffled and (len({group.cohort for group in groups}) > 1 or groups[0].sampling == "secret"))


def _with_whole_run_as_cohort(counts: Counter[RoundGroup], events: Sequence[RoundEvent], colluding: int) -> Counter[RoundGroup]:
    """Return ``counts`` (rounds by kind) with all clients of the run as one cohort, if each joins once, in a secret random order.

    ``counts`` is returned unchanged if clients join in another way or rounds differ in their mechanism. Clients in a random order hide
    among all clients of the run, not only among those of their round. That holds even if each report depends on earlier ones (Feldman,
    McMillan and Talwar 2021, Theorem 3.2). The theorem needs a random order of its own for each unit (such as one weight), so it applies
    only to reports of one unit: the units of a report share their client's place in the order.
    """
    kinds = {(event.sampling, event.release, event.population, event.channel, event.linked) for event in events}
    first = events[0]
    if not counts or len(kinds) > 1 or (first.sampling, first.channel, first.release.units) != ("once", "ideal-shuffler", 1):
        return counts
    everyone = max(1, min(sum(event.cohort for event in events), first.population) - colluding)
    # The number of rounds stays, and the accountant knows that each client joins only one of them.
    return Counter({replace(next(iter(counts)), cohort=everyone): len(events)})


def _first_rounds_up_to(groups: Sequence[RoundGroup], counts: Mapping[RoundGroup, int], limit: int) -> list[RoundGroup]:
    """Return the first ``limit`` rounds of ``groups``. ``counts`` gives the number of rounds of each group."""
    groups_within_limit: list[RoundGroup] = []
    for group in groups:
        rounds = min(counts[group], limit - sum(earlier.rounds for earlier in groups_within_limit))
        if rounds > 0:
            groups_within_limit.append(replace(group, rounds=rounds))
    return groups_within_limit


def _with_empty_rounds(events: Sequence[RoundEvent]) -> Iterator[tuple[RoundEvent, int]]:
    """Yield each round that released something, and how often to count it.

    With secret participation, an event also counts for the rounds before it that are missing because nobody joined. An empty round is an
    outcome like any other: its probability is part of the guarantee of a round.
    """
    last_round = 0
    for event in events:
        if event.sampling == "secret":
            yield event, event.round - last_round
        elif event.cohort > 0:  # with visible participation, an empty round released nothing
            yield event, 1
        last_round = event.round


def _single_round_group(event: RoundEvent, smallest_cohort: int, colluding: int) -> RoundGroup:
    """Return one round as a group without the ``colluding`` clients. ``smallest_cohort`` is the size of the run's smallest cohort."""
    honest = max(1, event.population - colluding)
    # With secret participation the cohort size is random, and does not make rounds differ.
    cohort = smallest_cohort if event.sampling == "secret" else event.cohort
    # At least the client itself is honest, so its own noise always counts.
    honest_cohort = max(1, cohort - colluding)
    linked = min(event.linked, event.release.units)
    return RoundGroup(
        event.release,
        cohort=honest_cohort,
        population=honest,
        rounds=1,
        sampling=event.sampling,
        rate=event.rate,
        channel=event.channel,
        linked=linked,
        histograms=event.histograms,
    )
