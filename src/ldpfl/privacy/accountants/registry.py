"""Which accountants there are: what composes all releases of one client, by what is trusted; a line for each.

A new kind of release needs an accountant that supports it in :data:`LOCAL`. What none in :data:`HIDDEN` composes has no number of its own
behind a shuffler or a sum: what holds locally holds there too.
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
"""Against one who sees and keeps all that a client sends; in the order in which they are asked whether they support it."""

HIDDEN: tuple[type[ShuffledAccountant], ...] = (
    CountedBits,
    SummedNoise,
    ShuffledVectors,
    SelfSampledBits,
    LinkedBits,
    BlanketedReports,
    ClonedReports,
)
"""Against one who sees what a shuffler or a sum lets through; in the order in which they are asked whether they support it."""


def accountant(releases: Iterable[tuple[Release, int]]) -> LocalAccountant:
    """Return what composes ``releases``, each with its number of times.

    If one of them protects a record only, all is counted for one record, see :func:`ldpfl.privacy.events.for_one_record`.

    Raises:
        PrivacyError: kinds of release that no accountant composes.
    """
    counts: Counter[Release] = Counter()
    made = list(releases)
    by_record = any(release.unit == "record" for release, _ in made)
    for release, times in made:
        counts[for_one_record(release) if by_record else release] += times
    kinds = {type(release) for release in counts}
    for kind in LOCAL:
        if kind.supports(kinds):
            return kind(counts)
    raise PrivacyError(f"no accountant composes {' and '.join(sorted(kind.__name__ for kind in kinds))}: nothing is known to hold of them")


def behind_shuffler(groups: Sequence[RoundGroup]) -> ShuffledAccountant | None:
    """Return what composes rounds like ``groups``; None where nothing does, or a release says that a shuffler adds nothing to it."""
    if any(group.channel == "ideal-shuffler" and group.release.not_shuffled for group in groups):
        return None
    kind = next((kind for kind in HIDDEN if kind.supports(groups)), None)
    return None if kind is None else kind(groups, accountant((group.release, group.rounds) for group in groups))


def least_epsilon(groups: Sequence[RoundGroup], delta: float) -> float:
    """Return the smallest epsilon at ``delta`` that is known to hold of rounds like ``groups``, with or without what hides them."""
    local = epsilon_of(((group.release, group.rounds) for group in groups), delta)
    hidden = behind_shuffler(groups)
    try:
        found = inf if hidden is None else hidden.epsilon(delta)
    except Exception:  # a statement says why; what holds locally holds in any case
        return local
    return found if 0 <= found < local else local


def epsilon_of(releases: Iterable[tuple[Release, int]], delta: float) -> float:
    """Return epsilon at ``delta`` of all ``releases``, each with its number of times.

    Exact where all are alike or all Gaussian, else by Renyi divergences; adaptive. ``delta`` = 0 gives the pure sum. Infinite as
    soon as one is unprotected. Its time does not depend on how often a release was made.
    """
    return accountant(releases).epsilon(delta)


def unit_epsilon(release: Release, delta: float) -> float:
    """Return what one unit of ``release`` costs: pure where it is, else at ``delta``."""
    return release.pure_epsilon if release.pure_epsilon < inf else epsilon_of([(release, 1)], delta)
