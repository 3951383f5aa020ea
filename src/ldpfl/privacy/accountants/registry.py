"""The registered accountants: for everything a client sends (:data:`LOCAL`), and behind a shuffler or a sum (:data:`HIDDEN`).

A new kind of release needs an accountant in :data:`LOCAL`. If no accountant in :data:`HIDDEN` composes some rounds, only the local bound is
given, which also holds behind a shuffler or a sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf

from ldpfl.errors import PrivacyError
from ldpfl.privacy.accountants.behind_shuffler import (
    BlanketedReports,
    ClonedReports,
    CountedBits,
    LinkedBits,
    SelfSampledBits,
    ShuffledAccountant,
    ShuffledVectors,
    SummedNoise,
)
from ldpfl.privacy.accountants.local import GaussianAccountant, LocalAccountant, NoAccountant, PureAccountant, RenyiAccountant
from ldpfl.privacy.charged_rounds import RoundGroup
from ldpfl.privacy.events import Release, for_one_record

LOCAL: tuple[type[LocalAccountant], ...] = (PureAccountant, GaussianAccountant, RenyiAccountant, NoAccountant)
"""Accountants against an adversary that sees everything a client sends. The first one that supports the releases is used."""

HIDDEN: tuple[type[ShuffledAccountant], ...] = (
    CountedBits,
    SummedNoise,
    ShuffledVectors,
    SelfSampledBits,
    LinkedBits,
    BlanketedReports,
    ClonedReports,
)
"""Accountants against an adversary that sees only what a shuffler or a sum reveals. The first one that supports the rounds is used."""


def accountant(releases: Iterable[tuple[Release, int]]) -> LocalAccountant:
    """Return the local accountant of ``releases``, given as (release, number of times).

    If a release protects only records, all are counted for one record, see :func:`ldpfl.privacy.events.for_one_record`.

    Raises:
        PrivacyError: no accountant composes these kinds of release.
    """
    counts: Counter[Release] = Counter()
    releases = list(releases)
    is_for_one_record = any(release.unit == "record" for release, _ in releases)
    for release, times in releases:
        counts[for_one_record(release) if is_for_one_record else release] += times
    kinds = {type(release) for release in counts}
    for kind in LOCAL:
        if kind.supports(kinds):
            return kind(counts)
    raise PrivacyError(f"no accountant composes {' and '.join(sorted(kind.__name__ for kind in kinds))}, so no guarantee can be computed")


def behind_shuffler(groups: Sequence[RoundGroup]) -> ShuffledAccountant | None:
    """Return the accountant that composes ``groups`` of rounds behind a shuffler or sum.

    Return None if no accountant does, or if a shuffler does not hide one of the releases.
    """
    if any(group.channel == "ideal-shuffler" and group.release.not_shuffled for group in groups):
        return None
    kind = next((kind for kind in HIDDEN if kind.supports(groups)), None)
    return None if kind is None else kind(groups, accountant((group.release, group.rounds) for group in groups))


def least_epsilon(groups: Sequence[RoundGroup], delta: float) -> float:
    """Return the smallest epsilon at ``delta`` that is proved for ``groups``: local, or behind the shuffler or sum."""
    local = epsilon_of(((group.release, group.rounds) for group in groups), delta)
    hidden = behind_shuffler(groups)
    try:
        hidden_epsilon = inf if hidden is None else hidden.epsilon(delta)
    except Exception:  # the local bound holds in any case; a statement notes the reason
        return local
    return hidden_epsilon if 0 <= hidden_epsilon < local else local


def epsilon_of(releases: Iterable[tuple[Release, int]], delta: float) -> float:
    """Return the local epsilon at ``delta`` of all ``releases``, given as (release, number of times).

    The epsilon is exact if all releases are equal or all are Gaussian, else an upper bound. It holds for adaptive composition. At
    ``delta`` = 0 it is the sum of pure epsilons. It is infinite if any release is unprotected. Large numbers of times take no longer.
    """
    return accountant(releases).epsilon(delta)


def unit_epsilon(release: Release, delta: float) -> float:
    """Return the epsilon of one unit of ``release``: the pure epsilon if it is finite, else the epsilon at ``delta``."""
    return release.pure_epsilon if release.pure_epsilon < inf else epsilon_of([(release, 1)], delta)
