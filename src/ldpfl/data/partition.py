"""Divide samples over clients: seeded, every sample used at most once, no client empty.

A division can isolate a label from one client: see :class:`Isolation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, assert_never, get_args

import numpy as np
from numpy.typing import NDArray

from ldpfl.data.persons import Names, uniform_by_name
from ldpfl.data.samples import Division
from ldpfl.errors import ConfigError
from ldpfl.util.user_code import call_user_code

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
"""Schemes that divide positions alone: which client gets a sample does not depend on any sample's content."""

BY_LABEL: frozenset[str] = frozenset(get_args(Scheme)) - LABEL_BLIND
"""Schemes in which the label of one sample affects which client gets another sample."""


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
      other client as many and the private one. All hold equally many samples: clients take one in turn until a client's
      labels are used up. The remaining samples are not used (below 1 % of CIFAR-10 among 100 clients, more where labels
      are of unequal size). The shares of labels within a client follow the labels' frequencies.
    - ``dirichlet`` (section VII-B6, Distribution II): the private label is divided over the others by a Dirichlet
      distribution of its own. The implementation that the paper cites also gives nothing more to a client that has its
      mean share already, and redraws until no client has too few samples; this one does neither.
    - ``quantity`` (not in the paper): one draw of proportions for all labels. For the private label, client 0's proportion is set to 0.

    The settings are read from the paper's text with high confidence; how its sizes were made equal is not written there.

    Raises:
        ConfigError: more clients than samples, a parameter out of range, or no private label to isolate.
    """
    if clients < 1:
        raise ConfigError(f"clients is {clients}, expected at least 1")
    if clients > labels.size:
        raise ConfigError(f"clients.count is {clients}, but the training data has only {labels.size} samples: set clients.count lower")
    if scheme in ("dirichlet", "quantity"):
        _check_alpha("alpha", alpha)
    if isolated is not None:
        _check_isolation(labels, clients, isolated)
        shares = _shares_with_isolation(labels, clients, generator, scheme, alpha, labels_per_client, isolated)
        _give_curious_client_a_sample(shares, labels != isolated.label)  # first, since it may not get a sample of the private label
        return _give_empty_clients_a_sample(shares)
    match scheme:
        case "iid":
            return Division.equal(generator.permutation(labels.size), clients)
        case "quantity":
            shares = _split_by_shares(generator.permutation(labels.size), _dirichlet(generator, alpha, clients))
        case "dirichlet":
            shares = _divide_by_label(labels, clients, generator, lambda _: _dirichlet(generator, alpha, clients))
        case "labels":
            holders = _label_holders(labels, clients, labels_per_client, generator)
            shares = _divide_by_label(labels, clients, generator, lambda label: holders[label])
        case _:
            assert_never(scheme)
    return _give_empty_clients_a_sample([share.astype(np.int64) for share in shares])


def partition_by_name(
    names: Names, clients: int, seed: int, generator: np.random.Generator, *, scheme: str = "iid", alpha: float = 0.5
) -> Division:
    """Return the indices into ``names`` (N,), the names of persons, that each client gets.

    Only a person's own name and the public ``seed`` decide on its client, so replacing one person moves no other.
    ``iid``: each client is equally likely. ``quantity``: in proportions drawn from Dirichlet(``alpha``) by ``generator``.

    Raises:
        ConfigError: ``scheme`` is another one, or a client gets no person.
    """
    if scheme not in LABEL_BLIND:
        raise ConfigError(
            f"data.partition is {scheme!r}, which divides rows by their labels, but with data.person set all rows of a person go to "
            f"one client: set data.partition to {' or '.join(sorted(LABEL_BLIND))}, or name the column of the client in data.client"
        )
    if scheme == "quantity":
        _check_alpha("alpha", alpha)
    shares = _dirichlet(generator, alpha, clients) if scheme == "quantity" else np.full(clients, 1 / clients)
    # Each client gets an interval of [0, 1) as long as its share. The last interval's end is left out: rounding may move it below 1.
    ends = np.cumsum(shares / shares.sum())[:-1]
    owners = np.searchsorted(ends, uniform_by_name(names, f"client {seed}"), side="right")
    parts = Division.by_owner(owners, clients)
    if empty := int((parts.sizes == 0).sum()):
        advice = "fewer clients, or a larger data.alpha" if scheme == "quantity" else "fewer clients"
        raise ConfigError(
            f"{len(names):,} persons are assigned to {clients} clients by name, but {empty} of the clients get no person: use "
            f"{advice}, or name the column of the client in data.client"
        )
    return parts


def partition_by_code(path: str, samples: int, clients: int, seed: int) -> Division:
    """Return the sample indices of each client by the user's function at ``path``, which sees no sample.

    The function is called with the number of samples, the number of clients and the seed. It returns the client of each sample, or -1
    to leave the sample out.

    Raises:
        ConfigError: the function fails, or returns something else.
    """
    returned: Any = call_user_code("data.partition", path, samples, clients, seed)
    try:
        owners = np.asarray(returned)
    except (TypeError, ValueError):
        owners = np.zeros(0)  # refused below, for its shape
    if owners.shape != (samples,) or owners.dtype.kind not in "iu":
        given = f"{owners.dtype} of shape {owners.shape}" if isinstance(returned, np.ndarray) else f"a {type(returned).__name__}"
        raise ConfigError(f"data.partition {path!r} returns {given}, expected {samples:,} whole numbers: the client of each sample")
    if owners.min() < -1 or owners.max() >= clients:
        raise ConfigError(
            f"data.partition {path!r} returns clients from {owners.min()} to {owners.max()}, expected 0 to {clients - 1}, or -1 (no client)"
        )
    shares = Division.by_owner(owners.astype(np.int64), clients)
    if not shares.sizes.all():
        raise ConfigError(
            f"data.partition {path!r} gives client {shares.sizes.argmin()} no sample: give each of {clients} clients one or more"
        )
    return shares


def _check_alpha(name: str, alpha: float) -> None:
    """Raise a :class:`ConfigError` if ``alpha``, which messages call ``name``, cannot be a concentration of a Dirichlet distribution."""
    if not (np.isfinite(alpha) and alpha > 0):
        raise ConfigError(f"{name} is {alpha}, expected a positive finite number")


def _check_isolation(labels: NDArray[np.int64], clients: int, isolated: Isolation) -> None:
    """Raise a :class:`ConfigError` if the data cannot be divided so that only one client, the attacker, lacks the private label.

    There has to be another client to hold that label, and another label for the attacker to hold.
    """
    if clients < 2:
        raise ConfigError(
            f"clients.count is {clients}, but data.private_label gives a label to all clients but one: set clients.count to 2 or more"
        )
    present = np.unique(labels)
    if isolated.label not in present:
        raise ConfigError(
            f"data.private_label is {isolated.label}, but the training data has {present.size} labels from {present[0]} to {present[-1]}: "
            "set it to one of these"
        )
    if present.size == 1:
        raise ConfigError(f"data.private_label is {isolated.label}, the only label in the training data: use data with two labels or more")


def _shares_with_isolation(
    labels: NDArray[np.int64],
    clients: int,
    generator: np.random.Generator,
    scheme: Scheme,
    alpha: float,
    labels_per_client: int,
    isolated: Isolation,
) -> list[Indices]:
    """Divide the samples by ``scheme``. Client 0, the honest-but-curious attacker, gets no sample of the private label."""
    private = labels == isolated.label
    match scheme:
        case "iid":
            return _equal_shares(private, clients, generator)
        case "quantity":
            drawn = _dirichlet(generator, alpha, clients)
            proportions = {0: drawn, 1: _proportions_without_curious(drawn, generator)}  # 1: samples of the private label, 0: others
            return _divide_by_label(private.astype(np.int64), clients, generator, lambda is_private: proportions[is_private])
        case "dirichlet":

            def proportions_of(label: int) -> NDArray[np.float64]:
                """Draw each client's proportion of the samples of ``label``; it is 0 for client 0 and the private label."""
                if label != isolated.label:
                    return _dirichlet(generator, alpha, clients)
                return np.concatenate([[0.0], _dirichlet(generator, isolated.alpha, clients - 1)])

            return _divide_by_label(labels, clients, generator, proportions_of)
        case "labels":
            return _equal_parts_by_label(labels, clients, generator, labels_per_client, isolated.label)
        case _:
            assert_never(scheme)


def _equal_shares(private: NDArray[np.bool_], clients: int, generator: np.random.Generator) -> list[Indices]:
    """Divide samples at random into equal shares. Client 0, the attacker, gets no sample that the mask ``private`` (N,) marks."""
    size = min(private.size // clients, int(np.count_nonzero(~private)))
    order = generator.permutation(private.size)
    # The curious client, which is the attacker, is served first. Otherwise too few samples of other labels could be left for it.
    goes_to_curious = np.zeros(private.size, dtype=np.bool_)
    goes_to_curious[np.flatnonzero(~private[order])[:size]] = True
    others_samples = order[~goes_to_curious][: size * (clients - 1)]
    return [order[goes_to_curious], *np.split(others_samples, clients - 1)]


def _proportions_without_curious(proportions: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.float64]:
    """Return the clients' ``proportions`` of the private label, with 0 for the attacker, client 0. The others need not sum to 1."""
    remaining = proportions.copy()
    remaining[CURIOUS_CLIENT] = 0.0
    if remaining.sum() == 0:  # the attacker had all: one other client gets all instead
        remaining[generator.integers(1, remaining.size)] = 1.0
    return remaining


def _equal_parts_by_label(
    labels: NDArray[np.int64], clients: int, generator: np.random.Generator, labels_per_client: int, private: int
) -> list[Indices]:
    """Give each client equally many samples of ``labels_per_client`` labels. Client 0, the attacker, gets none of the ``private`` label."""
    present = np.unique(labels)
    if not 2 <= labels_per_client <= present.size:
        raise ConfigError(f"data.labels_per_client is {labels_per_client}, expected 2 to {present.size}, since one label is private")
    holders = _label_holders(labels[labels != private], clients, labels_per_client - 1, generator)
    labels_by_client = [[label for label in holders if holders[label][client]] for client in range(clients)]
    for client, client_labels in enumerate(labels_by_client):
        if client != CURIOUS_CLIENT:
            client_labels.append(private)
    stock = {int(label): generator.permutation(np.flatnonzero(labels == label)).tolist() for label in present}
    parts = _take_turns(stock, labels_by_client, generator.permutation(clients).tolist())
    size = min(len(part) for part in parts)
    # If some client got no sample, nothing is cut off: _give_empty_clients_a_sample gives that client a sample of another one.
    return [np.array(part[:size] if size else part, dtype=np.int64) for part in parts]


def _take_turns(stock: dict[int, list[int]], labels_by_client: Sequence[Sequence[int]], order: Sequence[int]) -> list[list[int]]:
    """Let clients take one sample each in turn from ``stock``, the sample indices of each label, and return each client's samples.

    ``order`` lists the clients in the order of their turns. The turns end when every client has a sample and one client's labels have run
    out, or when nobody can take a sample.

    A client first takes one sample of each of its labels. Then it takes the label with the highest ratio of samples left to samples that
    it has. So scarce labels are spared, all run out at about the same time, and no client is left with one label only.
    """
    parts: list[list[int]] = [[] for _ in labels_by_client]
    counts_by_client = [dict.fromkeys(client_labels, 0) for client_labels in labels_by_client]
    while True:
        clients_served = 0
        for client in order:
            counts = counts_by_client[client]  # number of samples of each label that the client has taken
            available = [label for label in counts if stock[label]]
            if available:
                label = max(available, key=lambda name: (counts[name] == 0, len(stock[name]) / (1 + counts[name])))
                parts[client].append(stock[label].pop())
                counts[label] += 1
                clients_served += 1
        if clients_served == 0 or (clients_served < len(order) and all(parts)):
            return parts


def _give_curious_client_a_sample(shares: list[Indices], allowed: NDArray[np.bool_]) -> None:
    """If client 0, the attacker, has no sample, give it one that the mask ``allowed`` marks, of the client that has most of these."""
    if shares[CURIOUS_CLIENT].size == 0:
        donor = max(range(len(shares)), key=lambda other: np.count_nonzero(allowed[shares[other]]))
        moved = np.flatnonzero(allowed[shares[donor]])[-1:]
        shares[CURIOUS_CLIENT] = shares[donor][moved]
        shares[donor] = np.delete(shares[donor], moved)


def _dirichlet(generator: np.random.Generator, alpha: float, clients: int) -> NDArray[np.float64]:
    """Draw the clients' proportions (clients,) from a symmetric Dirichlet distribution."""
    proportions = generator.dirichlet(np.full(clients, alpha))
    # A tiny alpha underflows to all zeros or NaN: then one client takes it all, which is the limit.
    if not np.isfinite(proportions).all() or proportions.sum() == 0:
        proportions = np.zeros(clients)
        proportions[generator.integers(clients)] = 1.0
    return proportions


def _split_by_shares(order: Indices, proportions: NDArray[np.float64]) -> list[Indices]:
    """Cut ``order``, shuffled sample indices, into consecutive parts of the given ``proportions``, which need not sum to 1."""
    ends = np.cumsum(proportions / proportions.sum())[:-1]  # without the last part's end, at which nothing is cut
    cuts = np.floor(ends * order.size + 0.5).astype(np.int64)  # rounded to the nearest sample
    return np.split(order, cuts)


def _divide_by_label(
    labels: NDArray[np.int64], clients: int, generator: np.random.Generator, proportions_of: Callable[[int], NDArray[np.float64]]
) -> list[Indices]:
    """Divide each label's samples over the clients, in the proportions (clients,) that ``proportions_of`` returns for the label."""
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
    """Return for each label an array (clients,) of 1 for the clients that hold the label, and else 0, to serve as proportions.

    Every client holds ``labels_per_client`` distinct labels, and every label is held by about equally many clients.
    """
    present = np.unique(labels)
    if not 1 <= labels_per_client <= present.size:
        raise ConfigError(f"data.labels_per_client is {labels_per_client}, expected 1 to {present.size}, the number of labels in the data")
    holders = {int(label): np.zeros(clients) for label in present}
    holder_counts = np.zeros(present.size)
    for client in generator.permutation(clients):
        # Labels with the fewest holders first, ties at random.
        chosen = np.lexsort((generator.random(present.size), holder_counts))[:labels_per_client]
        holder_counts[chosen] += 1
        for index in chosen:
            holders[int(present[index])][client] = 1.0
    return holders


def _give_empty_clients_a_sample(shares: list[Indices]) -> Division:
    """Give each client without samples one sample of the client that holds most, in place, and return the division."""
    for client, share in enumerate(shares):
        if share.size == 0:
            donor = max(range(len(shares)), key=lambda other: shares[other].size)
            shares[client] = shares[donor][-1:]
            shares[donor] = shares[donor][:-1]
    return Division.of(shares)
