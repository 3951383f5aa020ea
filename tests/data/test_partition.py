"""However samples are divided: each is used at most once, no client is empty, and a seed decides it all."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from ldpfl.data import partition
from ldpfl.data.partition import Scheme
from ldpfl.data.samples import Division
from ldpfl.errors import ConfigError

SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
Labels = NDArray[np.int64]


@st.composite
def labelled(draw: st.DrawFn) -> tuple[Labels, int]:
    """Labels of some samples, and a number of clients that they are enough for."""
    labels = draw(st.lists(st.integers(0, 9), min_size=1, max_size=120))
    return np.array(labels, dtype=np.int64), draw(st.integers(1, len(labels)))


def divide(labels: Labels, clients: int, seed: int = 0, **settings: Any) -> Division:
    return partition(labels, clients, np.random.default_rng(seed), **settings)


@settings(max_examples=150, derandomize=True)
@given(labelled(), st.sampled_from(SCHEMES), st.integers(0, 2**32), st.sampled_from([1e-300, 1e-3, 0.1, 1.0, 1e6]))
def test_every_sample_at_most_once_and_no_client_empty(case: tuple[Labels, int], scheme: Scheme, seed: int, alpha: float) -> None:
    labels, clients = case
    parts = divide(labels, clients, seed, scheme=scheme, alpha=alpha, labels_per_client=1)
    assert len(parts) == clients
    assert min(part.size for part in parts) >= 1
    used = np.concatenate(parts)
    assert used.dtype == np.int64
    assert np.unique(used).size == used.size
    assert used.min() >= 0
    assert used.max() < labels.size


@settings(derandomize=True)
@given(labelled(), st.sampled_from(["dirichlet", "quantity"]), st.sampled_from([1e-300, 1e-3, 0.5, 1e6]))
def test_the_dirichlet_schemes_use_every_sample(case: tuple[Labels, int], scheme: Scheme, alpha: float) -> None:
    labels, clients = case
    parts = divide(labels, clients, scheme=scheme, alpha=alpha)
    assert sorted(np.concatenate(parts)) == list(range(labels.size))


@settings(max_examples=60, derandomize=True)
@given(labelled())
def test_iid_shares_are_equal_and_leave_less_than_one_each(case: tuple[Labels, int]) -> None:
    labels, clients = case
    sizes = {part.size for part in divide(labels, clients)}
    assert sizes == {labels.size // clients}


@settings(max_examples=60, derandomize=True)
@given(clients=st.integers(1, 40), held=st.integers(1, 10), seed=st.integers(0, 2**32))
def test_a_client_holds_exactly_the_labels_it_was_given(clients: int, held: int, seed: int) -> None:
    """With samples in plenty nobody is left empty, so the number is exact and every label finds a holder if it can."""
    labels = np.repeat(np.arange(10), 50)
    parts = divide(labels, clients, seed, scheme="labels", labels_per_client=held)
    assert {np.unique(labels[part]).size for part in parts} == {held}
    holders = [sum(label in labels[part] for part in parts) for label in range(10)]
    assert max(holders) - min(holders) <= 1


def test_labels_held_by_nobody_are_left_out() -> None:
    labels = np.repeat(np.arange(10), 5)
    (part,) = divide(labels, 1, scheme="labels", labels_per_client=2)
    assert part.size == 10


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_seed_decides_the_partition(scheme: Scheme) -> None:
    labels = np.arange(200) % 10
    first, again, other = (divide(labels, 10, seed, scheme=scheme) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_iid_mixes_the_samples() -> None:
    """Sorted labels must not reach clients in blocks."""
    labels = np.repeat(np.arange(10), 100)
    assert min(np.unique(labels[part]).size for part in divide(labels, 10)) >= 8


def test_a_small_alpha_concentrates_labels_and_a_large_one_spreads_them() -> None:
    labels = np.repeat(np.arange(10), 100)

    def largest_shares(alpha: float) -> float:
        parts = divide(labels, 10, scheme="dirichlet", alpha=alpha)
        return float(np.mean([np.bincount(labels[part], minlength=10).max() / part.size for part in parts]))

    assert largest_shares(0.01) > 0.7
    assert largest_shares(1e4) < 0.2


def test_a_tiny_alpha_gives_each_label_to_one_client() -> None:
    """The limit of the Dirichlet distribution, where its samples underflow."""
    labels = np.repeat(np.arange(10), 20)
    parts = divide(labels, 3, scheme="dirichlet", alpha=1e-300)
    owners = [[client for client, part in enumerate(parts) if label in labels[part]] for label in range(10)]
    assert sum(len(owner) for owner in owners) <= 10 + 2  # at most two clients had to be filled


def test_quantity_skews_sizes_and_not_labels() -> None:
    labels = np.arange(2000) % 10
    parts = divide(labels, 10, scheme="quantity", alpha=0.5)
    sizes = sorted(part.size for part in parts)
    assert sizes[-1] > 4 * sizes[0]
    counts = np.bincount(labels[max(parts, key=lambda part: part.size)], minlength=10)
    assert counts.max() < 2 * counts.min()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_as_many_clients_as_samples_get_one_each(scheme: Scheme) -> None:
    labels = np.arange(10)
    parts = divide(labels, 10, scheme=scheme, alpha=0.1, labels_per_client=1)
    assert sorted(int(part.item()) for part in parts) == list(range(10))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_more_clients_than_samples_are_refused(scheme: Scheme) -> None:
    with pytest.raises(ConfigError, match=r"clients\.count is 11, but .* only 10 samples"):
        divide(np.arange(10), 11, scheme=scheme)


@pytest.mark.parametrize(
    "settings",
    [
        {"scheme": "dirichlet", "alpha": 0.0},
        {"scheme": "dirichlet", "alpha": float("nan")},
        {"scheme": "quantity", "alpha": -1.0},
        {"scheme": "quantity", "alpha": float("inf")},
        {"scheme": "labels", "labels_per_client": 0},
        {"scheme": "labels", "labels_per_client": 11},
    ],
)
def test_parameters_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"alpha|labels_per_client"):
        divide(np.repeat(np.arange(10), 5), 5, **settings)


@pytest.mark.parametrize("clients", [0, -3])
def test_no_clients_are_refused(clients: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        divide(np.arange(10), clients)
