"""Which rounds a client is charged for: from the events of a ledger to groups of rounds that are alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from ldpfl.errors import ConfigError
from ldpfl.privacy.events import Channel, GaussianRelease, PureRelease, Release, RoundEvent, Sampling
from ldpfl.privacy.ledger import Ledger


@dataclass(frozen=True)
class RoundGroup:
    """``rounds`` rounds of one client that are alike; the fields are those of :class:`RoundEvent`.

    ``cohort`` and ``population`` count honest clients only: colluding ones are already taken off. ``known`` says whether some client is
    sure to have joined all of these rounds; else they are charged as if one had.
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
        """Whether some client did join all of these rounds, and others can know that it did: else no data set attains what is charged."""
        return self.known and self.sampling != "once" and (self.sampling != "secret" or self.rate == 1)

    @property
    def reports(self) -> int:
        """Reports of one client over all rounds of the group."""
        return self.release.units * self.rounds

    @property
    def batch_rate(self) -> float:
        """Probability with which a record is in a round's batch."""
        return self.release.rate if isinstance(self.release, GaussianRelease) else 1.0


def charged(ledger: Ledger, colluding: int = 0) -> list[RoundGroup]:
    """Return the rounds that a statement charges: those of the client that took part most often, grouped by likeness."""
    return _groups(_said_of_all(ledger.events), colluding) if ledger.events else []


def _said_of_all(events: Sequence[RoundEvent]) -> Sequence[RoundEvent]:
    """Return ``events`` with what is stated of a release only where all that are like it state it: older versions did not say it."""
    released = {event.release for event in events}
    silent: dict[Release, Release] = {}
    for release in released:
        if isinstance(release, PureRelease) and release.signed and (plain := replace(release, signed=False)) in released:
            silent[release] = plain
    return [replace(event, release=silent.get(event.release, event.release)) for event in events] if silent else events


def _groups(events: Sequence[RoundEvent], colluding: int) -> list[RoundGroup]:
    """Return the rounds of the client that took part most often, grouped by likeness.

    Which rounds it joined is not in the ledger. If all are alike but for the cohort, those with the smallest cohorts are
    the costliest, and among rounds of Gaussian noise those with the largest mu; otherwise it is charged for every one.
    """
    smallest = min((event.cohort for event in events if event.cohort > 0), default=1)
    if not 0 <= colluding < smallest:
        raise ConfigError(f"colluding must lie between 0 and {smallest - 1} of those that took part, got {colluding}")
    colluding = max(colluding, max(event.colluding for event in events))  # what the run was planned for
    counts: Counter[RoundGroup] = Counter()
    for event, times in _with_unseen(events):
        counts[_group(event, smallest, colluding)] += times
    counts = _hidden_in_all(counts, events, colluding)
    groups = sorted(counts, key=lambda group: group.cohort)
    # Some client joined at least as often as clients did on average, whatever the events say.
    average = ceil(sum(event.cohort for event in events) / max(event.population for event in events))
    most = max(average, *(event.joined for event in events))
    # Some client sent as many reports as clients did on average; of rounds that differ it is known which only if it joined all.
    sent = most <= average and (len(groups) == 1 or most >= sum(counts.values()))
    if not (sent and _attainable(events, colluding)):
        counts = Counter({replace(group, known=False): rounds for group, rounds in counts.items()})
        groups = sorted(counts, key=lambda group: group.cohort)
    if len({replace(group, cohort=1, population=1) for group in groups}) == 1 and groups[0].sampling != "secret":
        return _first_rounds(groups, counts, most)
    # What a sum hides depends on how many are in it, too: then no round is the costliest under both trust models.
    if all(isinstance(group.release, GaussianRelease) for group in groups) and _order_by_mu(groups):
        return _first_rounds(sorted(groups, key=lambda group: -group.release.parameter), counts, most)
    return [replace(group, rounds=counts[group]) for group in groups]


def _attainable(events: Sequence[RoundEvent], colluding: int) -> bool:
    """Tell whether some data are as far apart as is charged, with those who collude in every round: surely so only if everyone was."""
    everyone = all(event.cohort == event.population for event in events)
    return (colluding == 0 or everyone) and not any(event.histograms for event in events)


def _order_by_mu(groups: Sequence[RoundGroup]) -> bool:
    """Tell whether a round of Gaussian noise with a larger mu costs more under each trust model.

    Not where rounds differ in anything else that a figure depends on: what is protected, how often, in which batches, behind whom; nor
    where more clients may hide the one with the larger mu better, or nobody learns who was in which round, nor so in how many.
    """
    others = {
        (replace(group.release, mu=1.0), group.channel, group.sampling, group.rate)
        for group in groups
        if isinstance(group.release, GaussianRelease)
    }
    if len(others) != 1 or groups[0].channel == "secure-sum":
        return False
    hidden = groups[0].channel == "ideal-shuffler" and not groups[0].release.not_shuffled
    return not (hidden and (len({group.cohort for group in groups}) > 1 or groups[0].sampling == "secret"))


def _hidden_in_all(counts: Counter[RoundGroup], events: Sequence[RoundEvent], colluding: int) -> Counter[RoundGroup]:
    """Return ``counts`` with all clients of the run as the crowd of those that take part once, in a secret order, by one mechanism.

    Reports that each depend on what was released before, of clients in a random order, hide a client among all of them, not among
    those of its round (Feldman, McMillan and Talwar 2021, Theorem 3.2). That is one order of clients: it hides a report that is one
    unit. Where a report has several, they share the order, and do not hide as if each had one of its own.
    """
    alike = {(event.sampling, event.release, event.population, event.channel, event.linked) for event in events}
    first = events[0]
    if not counts or len(alike) > 1 or (first.sampling, first.channel, first.release.units) != ("once", "ideal-shuffler", 1):
        return counts
    crowd = max(1, min(sum(event.cohort for event in events), first.population) - colluding)
    return Counter({replace(next(iter(counts)), cohort=crowd): len(events)})


def _first_rounds(groups: Sequence[RoundGroup], counts: Mapping[RoundGroup, int], most: int) -> list[RoundGroup]:
    """Return the first ``most`` rounds of ``groups``, of which there are as many as ``counts`` says."""
    taken: list[RoundGroup] = []
    for group in groups:
        rounds = min(counts[group], most - sum(before.rounds for before in taken))
        if rounds > 0:
            taken.append(replace(group, rounds=rounds))
    return taken


def _with_unseen(events: Sequence[RoundEvent]) -> Iterator[tuple[RoundEvent, int]]:
    """Yield rounds that released something, and how often: one of secret participation also for those before that are not there.

    Nobody joined those. That this happened is an outcome like any other: its probability is part of the guarantee of a round.
    """
    before = 0
    for event in events:
        if event.sampling == "secret":
            yield event, event.round - before
        elif event.cohort > 0:  # that nobody did is seen, and released nothing
            yield event, 1
        before = event.round


def _group(event: RoundEvent, smallest: int, colluding: int) -> RoundGroup:
    honest = max(1, event.population - colluding)
    # Where participation is secret, how many took part is chance: it does not make rounds differ.
    cohort = smallest if event.sampling == "secret" else event.cohort
    # Where no more took part than may collude, the client itself is left, and its own noise. Other rounds lose all that may.
    left = max(1, cohort - colluding)
    linked = min(event.linked, event.release.units)
    return RoundGroup(event.release, left, honest, 1, event.sampling, event.rate, event.channel, linked, histograms=event.histograms)
