"""Divide samples over clients: seeded, every sample used at most once, no client empty.

A division can isolate a label from one client: see :class:`Isolation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, assert_never, get_args

import numpy as np
from numpy.typing import NDArray

from ldpfl.data.division import Division
from ldpfl.data.persons import Names, uniform_by_name
from ldpfl.errors import ConfigError
from ldpfl.util.user_code import called

Scheme = Literal["iid", "dirichlet", "labels", "quantity"]
Indices = NDArray[np.int64]
CURIOUS_CLIENT = 0
"""Client that an :class:`Isolation` keeps the private label from."""


@dataclass(frozen=True)
class Isolation:
    """A private label of which client 0, honest but curious, holds no sample (LaDP-FL, section VII-A).

    The paper has one such client among 100, and does not say which: any would do, since clients are exchangeable.

    Attributes:
        label: the private label.
        alpha: concentration of the Dirichlet distribution that divides the private label over the other clients, for the
            scheme ``dirichlet`` only. The paper's own value is not known.

    Raises:
        ConfigError: ``alpha`` is not a positive finite number.
    """

    label: int
    alpha: float = 0.5

    def __post_init__(self) -> None:
        _check_alpha("alpha of the private label", self.alpha)


LABEL_BLIND: frozenset[Scheme] = frozenset({"iid", "quantity"})
"""Schemes that divide places alone: who gets which sample does not depend on what any sample is."""

BY_LABEL: frozenset[str] = frozenset(get_args(Scheme)) - LABEL_BLIND
"""Schemes in which the label of one sample has a say in which client gets another."""


def partition(
    labels: NDArray[np.int64],
    clients: int,
    generator: np.random.Generator,
    *,
    scheme: Scheme = "iid",
    alpha: float = 0.5,
    labels_per_client: int = 2,
    isolated: Isolation | None = None,
) -> Division:
    """Return the sample indices of each client.

    ``iid``: equal shares at random; a remainder that does not divide is left out (LDP-FL, section 5). ``dirichlet``:
    each label is divided in proportions drawn from Dirichlet(``alpha``) (Hsu et al. 2019). ``labels``: each client
    holds ``labels_per_client`` of the labels. ``quantity``: sizes in proportions drawn from Dirichlet(``alpha``).

    With ``isolated``, client 0 gets no sample of the private label, and the schemes become those of LaDP-FL:

    - ``iid`` (section VII-A): shares as equal as before, client 0 without the private label. Where fewer samples of
      other labels exist than such a share, all shares shrink to that number.
    - ``labels`` (section VII-B6, Distribution I): client 0 holds ``labels_per_client - 1`` of the other labels, and every
      other client as many and the private one. All hold equally many samples: clients take one in turn until one of
      them finds none left of its labels; what is left then (below 1 % of CIFAR-10 among 100 clients, more where labels
      are of unequal size) is not used. Shares of labels within a client follow what there is of each.
    - ``dirichlet`` (section VII-B6, Distribution II): the private label is divided over the others by a Dirichlet
      distribution of its own. The implementation that the paper cites also gives nothing more to a client that has its
      mean share already, and draws until nobody has too little; this one does neither.
    - ``quantity`` (not in the paper): one draw of proportions, of the private label without client 0.

    The settings are read from the paper's text with high confidence; how its sizes were made equal is not written there.

    Raises:
        ConfigError: more clients than samples, a parameter out of range, or no private label to isolate.
    """
    if clients < 1:
        raise ConfigError(f"clients must be at least 1, got {clients}")
    if clients > labels.size:
        raise ConfigError(f"{clients} clients need at least {clients} samples, the training data has {labels.size}")
    if scheme in ("dirichlet", "quantity"):
        _check_alpha("alpha", alpha)
    if isolated is not None:
        _check_isolation(labels, clients, isolated)
        shares = _isolating(labels, clients, generator, scheme, alpha, labels_per_client, isolated)
        _give_curious_one(shares, labels != isolated.label)
        return _fill_empty(shares)
    match scheme:
        case "iid":
            return Division.equal(generator.permutation(labels.size), clients)
        case "quantity":
            shares = _split_by_shares(generator.permutation(labels.size), _dirichlet(generator, alpha, clients))
        case "dirichlet":
            shares = _by_label(labels, clients, generator, lambda _: _dirichlet(generator, alpha, clients))
        case "labels":
            holders = _label_holders(labels, clients, labels_per_client, generator)
            shares = _by_label(labels, clients, generator, lambda label: holders[label])
        case _:
            assert_never(scheme)
    return _fill_empty([share.astype(np.int64) for share in shares])


def partition_by_name(
    names: Names, clients: int, seed: int, generator: np.random.Generator, *, scheme: str = "iid", alpha: float = 0.5
) -> Division:
    """Return the places of each client's persons among the ``names`` (N,), a name for each person.

    A person's own name and the public ``seed`` decide about it alone, so that another person in the place of one moves nobody else.
    ``iid``: each client is as likely as any other. ``quantity``: in proportions drawn from Dirichlet(``alpha``) by ``generator``.

    Raises:
        ConfigError: another scheme, or a client without any person.
    """
    if scheme not in LABEL_BLIND:
        raise ConfigError(
            f"persons are dealt out whole, by their names, and data.partition is {scheme!r}: set it to {' or '.join(sorted(LABEL_BLIND))}, "
            "or name the column of the client by data.client"
        )
    if scheme == "quantity":
        _check_alpha("alpha", alpha)
    shares = _dirichlet(generator, alpha, clients) if scheme == "quantity" else np.full(clients, 1 / clients)
    ends = np.cumsum(shares / shares.sum())
    owners = np.searchsorted(ends[:-1], uniform_by_name(names, f"client {seed}"), side="right")
    parts = Division.by_owner(owners, clients)
    if empty := int((parts.sizes == 0).sum()):
        advice = "fewer clients, or a larger data.alpha" if scheme == "quantity" else "fewer clients"
        raise ConfigError(
            f"{len(names):,} persons are dealt out to {clients} clients by their names, and {empty} of the clients have no person: take "
            f"{advice}, or name the column of the client by data.client"
        )
    return parts


def partition_by_code(path: str, samples: int, clients: int, seed: int) -> Division:
    """Return the sample indices of each client as the function at ``path`` says; it is shown no sample.

    It is called with the numbers of samples and clients and the seed, and returns the client of each sample, or -1 for none.

    Raises:
        ConfigError: it fails, or returns something else.
    """
    found: Any = called("data.partition", path, samples, clients, seed)
    try:
        owners = np.asarray(found)
    except (TypeError, ValueError):
        owners = np.zeros(0)
    if owners.shape != (samples,) or owners.dtype.kind not in "iu":
        given = f"{owners.dtype} of shape {owners.shape}" if isinstance(found, np.ndarray) else f"a {type(found).__name__}"
        raise ConfigError(f"data.partition {path!r} returns {given}, expected {samples:,} whole numbers: the client of each sample")
    if owners.min() < -1 or owners.max() >= clients:
        raise ConfigError(
            f"data.partition {path!r} returns clients from {owners.min()} to {owners.max()}, expected 0 to {clients - 1}, or -1 for none"
        )
    shares = Division.by_owner(owners.astype(np.int64), clients)
    if not shares.sizes.all():
        raise ConfigError(
            f"data.partition {path!r} gives client {shares.sizes.argmin()} no sample: give each of {clients} clients one or more"
        )
    return shares


def _check_alpha(name: str, alpha: float) -> None:
    if not (np.isfinite(alpha) and alpha > 0):
        raise ConfigError(f"{name} must be a positive finite number, got {alpha}")


def _check_isolation(labels: NDArray[np.int64], clients: int, isolated: Isolation) -> None:
    if clients < 2:
        raise ConfigError(f"a private label is kept from one client and left to the others: it needs 2 clients or more, got {clients}")
    present = np.unique(labels)
    if isolated.label not in present:
        raise ConfigError(
            f"the training data has no label {isolated.label} that could be private: "
            f"it has {present.size} labels from {present[0]} to {present[-1]}"
        )
    if present.size == 1:
        raise ConfigError(f"private label {isolated.label} is the only one in the training data: nothing is left for the client without it")


def _isolating(
    labels: NDArray[np.int64],
    clients: int,
    generator: np.random.Generator,
    scheme: Scheme,
    alpha: float,
    labels_per_client: int,
    isolated: Isolation,
) -> list[Indices]:
    """Divide as ``scheme`` says, the private label among all but the curious client."""
    private = labels == isolated.label
    match scheme:
        case "iid":
            return _equal_shares(private, clients, generator)
        case "quantity":
            drawn = _dirichlet(generator, alpha, clients)
            proportions = {0: drawn, 1: _without_curious(drawn, generator)}
            return _by_label(private.astype(np.int64), clients, generator, lambda is_private: proportions[is_private])
        case "dirichlet":

            def proportions_of(label: int) -> NDArray[np.float64]:
                if label != isolated.label:
                    return _dirichlet(generator, alpha, clients)
                return np.concatenate([[0.0], _dirichlet(generator, isolated.alpha, clients - 1)])

            return _by_label(labels, clients, generator, proportions_of)
        case "labels":
            return _equal_hands(labels, clients, generator, labels_per_client, isolated.label)
        case _:
            assert_never(scheme)


def _equal_shares(private: NDArray[np.bool_], clients: int, generator: np.random.Generator) -> list[Indices]:
    size = min(private.size // clients, int(np.count_nonzero(~private)))
    order = generator.permutation(private.size)
    # The curious client chooses first, or the samples that it may have could be gone.
    is_curious = np.zeros(private.size, dtype=np.bool_)
    is_curious[np.flatnonzero(~private[order])[:size]] = True
    others = order[~is_curious][: size * (clients - 1)]
    return [order[is_curious], *np.split(others, clients - 1)]


def _without_curious(proportions: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.float64]:
    others = proportions.copy()
    others[CURIOUS_CLIENT] = 0.0
    if others.sum() == 0:  # it had drawn everything
        others[generator.integers(1, others.size)] = 1.0
    return others


def _equal_hands(
    labels: NDArray[np.int64], clients: int, generator: np.random.Generator, labels_per_client: int, private: int
) -> list[Indices]:
    """Give the curious client one label less than the others, and all of them equally many samples."""
    present = np.unique(labels)
    if not 2 <= labels_per_client <= present.size:
        raise ConfigError(
            f"labels_per_client must lie between 2 and {present.size} where one of the labels is private, got {labels_per_client}"
        )
    holders = _label_holders(labels[labels != private], clients, labels_per_client - 1, generator)
    held = [[label for label in holders if holders[label][client]] for client in range(clients)]
    for client, own in enumerate(held):
        if client != CURIOUS_CLIENT:
            own.append(private)
    stock = {int(label): generator.permutation(np.flatnonzero(labels == label)).tolist() for label in present}
    hands = _deal(stock, held, generator.permutation(clients).tolist())
    size = min(len(hand) for hand in hands)
    # Where there is not even one for each, all that was dealt stays in play: the empty ones are filled from it.
    return [np.array(hand[:size] if size else hand, dtype=np.int64) for hand in hands]


def _deal(stock: dict[int, list[int]], held: Sequence[Sequence[int]], order: Sequence[int]) -> list[list[int]]:
    """Let clients take one sample in turn, until one of them who has some finds none left, or nobody finds any.

    A client first takes one of each of its labels, then of that with the highest ratio of what is left to what it has:
    so scarce labels are spared, all run out at about the same time, and no client is left with one label only.
    """
    hands: list[list[int]] = [[] for _ in held]
    counts = [dict.fromkeys(own, 0) for own in held]
    while True:
        served = 0
        for client in order:
            count = counts[client]
            left = [label for label in count if stock[label]]
            if left:
                label = max(left, key=lambda name: (count[name] == 0, len(stock[name]) / (1 + count[name])))
                hands[client].append(stock[label].pop())
                count[label] += 1
                served += 1
        if served == 0 or (served < len(order) and all(hands)):
            return hands


def _give_curious_one(shares: list[Indices], allowed: NDArray[np.bool_]) -> None:
    """Hand the curious client, if it is empty, a sample that it may hold, of the client that has most of them."""
    if shares[CURIOUS_CLIENT].size == 0:
        donor = max(range(len(shares)), key=lambda other: np.count_nonzero(allowed[shares[other]]))
        place = np.flatnonzero(allowed[shares[donor]])[-1:]
        shares[CURIOUS_CLIENT], shares[donor] = shares[donor][place], np.delete(shares[donor], place)


def _dirichlet(generator: np.random.Generator, alpha: float, clients: int) -> NDArray[np.float64]:
    proportions = generator.dirichlet(np.full(clients, alpha))
    # A tiny alpha underflows to all zeros or NaN: then one client takes it all, which is the limit.
    if not np.isfinite(proportions).all() or proportions.sum() == 0:
        proportions = np.zeros(clients)
        proportions[generator.integers(clients)] = 1.0
    return proportions


def _split_by_shares(order: Indices, proportions: NDArray[np.float64]) -> list[Indices]:
    cuts = np.floor(np.cumsum(proportions / proportions.sum())[:-1] * order.size + 0.5).astype(np.int64)
    return np.split(order, cuts)


def _by_label(
    labels: NDArray[np.int64], clients: int, generator: np.random.Generator, proportions_of: Callable[[int], NDArray[np.float64]]
) -> list[Indices]:
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        order = generator.permutation(np.flatnonzero(labels == label))
        proportions = proportions_of(int(label))
        if proportions.sum() == 0:
            continue  # no client holds this label
        for client, share in enumerate(_split_by_shares(order, proportions)):
            parts[client].append(share)
    return [np.concatenate(part) if part else np.empty(0, dtype=np.int64) for part in parts]


def _label_holders(
    labels: NDArray[np.int64], clients: int, labels_per_client: int, generator: np.random.Generator
) -> dict[int, NDArray[np.float64]]:
    """Give every client ``labels_per_client`` distinct labels, each label to about as many clients."""
    present = np.unique(labels)
    if not 1 <= labels_per_client <= present.size:
        raise ConfigError(f"labels_per_client must lie between 1 and {present.size}, got {labels_per_client}")
    holders = {int(label): np.zeros(clients) for label in present}
    held = np.zeros(present.size)
    for client in generator.permutation(clients):
        # The least held labels first, ties at random.
        chosen = np.lexsort((generator.random(present.size), held))[:labels_per_client]
        held[chosen] += 1
        for index in chosen:
            holders[int(present[index])][client] = 1.0
    return holders


def _fill_empty(shares: list[Indices]) -> Division:
    """Hand an empty client one sample of the client that holds most."""
    for client, share in enumerate(shares):
        if share.size == 0:
            donor = max(range(len(shares)), key=lambda other: shares[other].size)
            shares[client], shares[donor] = shares[donor][-1:], shares[donor][:-1]
    return Division.of(shares)
