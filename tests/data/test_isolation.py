"""Client 0 never holds the private label, whatever the scheme; without isolation nothing has changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from scipy.optimize import linprog

from ldpfl.data import CURIOUS_CLIENT, Isolation, partition
from ldpfl.data.partition import Scheme
from ldpfl.data.samples import Division
from ldpfl.errors import ConfigError

SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
ALPHAS = [1e-300, 1e-3, 0.1, 1.0, 1e6]
Labels = NDArray[np.int64]
PRIVATE = 5
BALANCED = np.repeat(np.arange(10), 500)
"""A tenth of CIFAR-10's training labels."""


def divide(labels: Labels, clients: int, seed: int = 0, private: int = PRIVATE, **settings: Any) -> Division:
    isolated = Isolation(private, settings.pop("private_alpha", 0.5))
    return partition(labels, clients, np.random.default_rng(seed), isolated=isolated, **settings)


def labels_of(part: Labels, labels: Labels) -> set[int]:
    return set(np.unique(labels[part]).tolist())


@st.composite
def isolable(draw: st.DrawFn) -> tuple[Labels, int, int, int]:
    """Labels of which one is private, that one, a number of clients they are enough for, and of labels each may hold."""
    drawn = draw(st.lists(st.integers(0, 9), min_size=2, max_size=120).filter(lambda labels: len(set(labels)) > 1))
    present = sorted(set(drawn))
    private, clients = draw(st.sampled_from(present)), draw(st.integers(2, len(drawn)))
    return np.array(drawn, dtype=np.int64), private, clients, draw(st.integers(2, len(present)))


@settings(max_examples=400, derandomize=True)
@given(isolable(), st.sampled_from(SCHEMES), st.integers(0, 2**32), st.sampled_from(ALPHAS), st.sampled_from(ALPHAS))
@pytest.mark.slow
@pytest.mark.thorough
def test_the_curious_client_lacks_the_private_label_and_all_else_holds_as_ever(
    case: tuple[Labels, int, int, int], scheme: Scheme, seed: int, alpha: float, private_alpha: float
) -> None:
    labels, private, clients, held = case
    choices: dict[str, Any] = {"scheme": scheme, "alpha": alpha, "private_alpha": private_alpha, "labels_per_client": held}
    parts = divide(labels, clients, seed, private, **choices)
    assert len(parts) == clients
    assert private not in labels_of(parts[CURIOUS_CLIENT], labels)
    assert min(part.size for part in parts) >= 1
    used = np.concatenate(parts)
    assert used.dtype == np.int64
    assert np.unique(used).size == used.size
    assert used.min() >= 0
    assert used.max() < labels.size
    again = divide(labels, clients, seed, private, **choices)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_sample_of_another_label_goes_to_the_curious_client(scheme: Scheme) -> None:
    """The narrowest case: whatever is drawn, nothing else may be given to it, and nobody stays empty."""
    labels = np.array([PRIVATE] * 5 + [3])
    for clients in range(2, 7):
        for seed in range(20):
            parts = divide(labels, clients, seed, scheme=scheme, alpha=0.1)
            assert parts[CURIOUS_CLIENT].tolist() == [5]
            assert min(part.size for part in parts) >= 1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_seed_decides_the_division(scheme: Scheme) -> None:
    first, other = (divide(BALANCED, 10, seed, scheme=scheme) for seed in (1, 2))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@settings(max_examples=100, derandomize=True)
@given(isolable())
@pytest.mark.slow
def test_iid_shares_are_equal_and_as_large_as_the_curious_client_can_be_served(case: tuple[Labels, int, int, int]) -> None:
    labels, private, clients, _ = case
    sizes = {part.size for part in divide(labels, clients, private=private)}
    assert sizes == {min(labels.size // clients, int((labels != private).sum()))}


def test_iid_leaves_every_private_sample_to_the_others_at_random() -> None:
    """10 clients of 500: client 0 holds 9 labels evenly, the others about 500/9 private samples each.

    The counts are hypergeometric with standard deviation below 7; five of them are passed by chance in fewer than one
    of 10,000 divisions, and the seed is fixed.
    """
    parts = divide(BALANCED, 10)
    assert sorted(np.concatenate(parts)) == list(range(5000))
    counts = np.array([np.bincount(BALANCED[part], minlength=10) for part in parts])
    assert counts[1:, PRIVATE].sum() == 500
    assert np.abs(counts[1:, PRIVATE] - 500 / 9).max() < 35
    assert np.abs(np.delete(counts[0], PRIVATE) - 500 / 9).max() < 35


@settings(max_examples=30, derandomize=True)
@given(clients=st.integers(2, 40), held=st.integers(2, 10), seed=st.integers(0, 2**32))
def test_distribution_one_has_exactly_the_labels_of_the_paper_and_equal_sizes(clients: int, held: int, seed: int) -> None:
    parts = divide(BALANCED, clients, seed, scheme="labels", labels_per_client=held)
    own = [labels_of(part, BALANCED) for part in parts]
    assert len(own[CURIOUS_CLIENT]) == held - 1
    assert PRIVATE not in own[CURIOUS_CLIENT]
    assert {len(labels) for labels in own[1:]} == {held}
    assert all(PRIVATE in labels for labels in own[1:])
    assert len({part.size for part in parts}) == 1


def test_distribution_one_leaves_next_to_nothing_unused_and_no_label_out_of_proportion() -> None:
    """The paper's setting on CIFAR-10: 100 clients of 500 images, of which 5000/99 can be private and a third of the rest each."""
    labels = np.repeat(np.arange(10), 5000)
    parts = divide(labels, 100, scheme="labels", labels_per_client=4)
    assert {part.size for part in parts} <= set(range(496, 501))
    for client, part in enumerate(parts):
        counts = np.bincount(labels[part], minlength=10)
        others = np.delete(counts, PRIVATE)
        assert others[others > 0].max() < 1.25 * others[others > 0].min()
        assert (counts[PRIVATE] == 0) if client == CURIOUS_CLIENT else (45 <= counts[PRIVATE] <= 56)


@pytest.mark.parametrize("seed", range(6))
def test_distribution_one_comes_near_the_largest_equal_size_though_half_the_labels_are_scarce(seed: int) -> None:
    """The largest is a linear program: amounts of each held label, equal sums, no label used beyond its stock."""
    labels = np.repeat(np.arange(10), [2000, 200] * 5)
    parts = divide(labels, 20, seed, scheme="labels", labels_per_client=4)
    pairs = np.argwhere([np.isin(np.arange(10), labels[part]) for part in parts])
    uses, sums = np.zeros((10, len(pairs) + 1)), np.zeros((20, len(pairs) + 1))
    uses[pairs[:, 1], np.arange(len(pairs))] = 1
    sums[pairs[:, 0], np.arange(len(pairs))] = 1
    sums[:, -1] = -1
    maximised = -np.eye(len(pairs) + 1)[-1]
    program = linprog(maximised, A_ub=uses, b_ub=np.bincount(labels), A_eq=sums, b_eq=np.zeros(20), bounds=(1, None))
    (size,) = {part.size for part in parts}
    assert 0.75 * -program.fun <= size <= -program.fun


def test_all_labels_each_is_every_label_but_the_private_one_for_the_curious_client() -> None:
    parts = divide(BALANCED, 10, scheme="labels", labels_per_client=10)
    assert labels_of(parts[CURIOUS_CLIENT], BALANCED) == set(range(10)) - {PRIVATE}
    assert all(labels_of(part, BALANCED) == set(range(10)) for part in parts[1:])


@settings(derandomize=True)
@given(isolable(), st.sampled_from(["dirichlet", "quantity"]), st.sampled_from(ALPHAS), st.sampled_from(ALPHAS))
def test_the_dirichlet_schemes_use_every_sample(case: tuple[Labels, int, int, int], scheme: Scheme, alpha: float, beta: float) -> None:
    labels, private, clients, _ = case
    parts = divide(labels, clients, private=private, scheme=scheme, alpha=alpha, private_alpha=beta)
    assert sorted(np.concatenate(parts)) == list(range(labels.size))


@pytest.mark.parametrize(("alpha", "private_alpha"), [(0.01, 1e4), (1e4, 0.01)])
def test_distribution_two_has_a_concentration_of_its_own_for_the_private_label(alpha: float, private_alpha: float) -> None:
    """One is concentrated and the other even, whichever is which."""
    parts = divide(BALANCED, 11, scheme="dirichlet", alpha=alpha, private_alpha=private_alpha)
    counts = np.array([np.bincount(BALANCED[part], minlength=10) for part in parts])
    largest = counts.max(axis=0) / 500
    others = np.delete(largest, PRIVATE).mean()
    even, concentrated = (largest[PRIVATE], others) if alpha < 1 else (others, largest[PRIVATE])
    assert even < 0.12  # a tenth or an eleventh each
    assert concentrated > 0.6


def test_quantity_keeps_the_private_share_of_all_others_alike() -> None:
    """Sizes are skewed, mixtures are not: private samples among the others in proportion to their size."""
    parts = divide(BALANCED, 10, scheme="quantity", alpha=0.5)
    sizes = np.array([part.size for part in parts])
    assert sizes.max() > 4 * sizes.min()
    private = np.array([(BALANCED[part] == PRIVATE).sum() for part in parts])
    np.testing.assert_allclose(private[1:], 500 * (sizes - private)[1:] / (sizes - private)[1:].sum(), atol=2)


def test_quantity_that_gives_the_curious_client_everything_leaves_the_private_label_to_another() -> None:
    """The limit of a tiny alpha, which some seeds reach for client 0."""
    owners = set()
    for seed in range(20):
        parts = divide(BALANCED, 2, seed, scheme="quantity", alpha=1e-300)
        owners.add(int(np.argmax([part.size for part in parts])))
        assert (BALANCED[parts[1]] == PRIVATE).sum() == 500
    assert owners == {0, 1}


def test_without_isolation_the_draws_are_those_of_before() -> None:
    """Written out in the generator's own calls, so that published seeds keep their divisions."""
    labels, clients, alpha = np.arange(300) % 7, 6, 0.8

    def cut(order: Labels, shares: NDArray[np.float64]) -> list[Labels]:
        return np.split(order, np.floor(np.cumsum(shares / shares.sum())[:-1] * order.size + 0.5).astype(np.int64))

    def equal(scheme: Scheme, expected: list[Labels]) -> bool:
        parts = partition(labels, clients, np.random.default_rng(4), scheme=scheme, alpha=alpha)
        return all(np.array_equal(a, b) for a, b in zip(parts, expected, strict=True))

    generator = np.random.default_rng(4)
    assert equal("iid", np.split(generator.permutation(300), clients))
    generator = np.random.default_rng(4)
    assert equal("quantity", cut(generator.permutation(300), generator.dirichlet([alpha] * clients)))
    generator = np.random.default_rng(4)
    pieces = [cut(generator.permutation(np.flatnonzero(labels == label)), generator.dirichlet([alpha] * clients)) for label in range(7)]
    assert equal("dirichlet", [np.concatenate([piece[client] for piece in pieces]) for client in range(clients)])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_cannot_be_isolated_is_refused(scheme: Scheme) -> None:
    with pytest.raises(ConfigError, match=r"private_label is 10, .*10 labels from 0 to 9"):
        divide(BALANCED, 10, private=10, scheme=scheme)
    with pytest.raises(ConfigError, match=r"is 1, .*: set clients\.count to 2 or more"):
        divide(BALANCED, 1, scheme=scheme)
    with pytest.raises(ConfigError, match=r"data\.private_label is 3, the only label"):
        divide(np.full(20, 3), 4, private=3, scheme=scheme)


@pytest.mark.parametrize("held", [0, 1, 11])
def test_one_label_each_leaves_the_curious_client_none_and_is_refused(held: int) -> None:
    with pytest.raises(ConfigError, match=f"labels_per_client is {held}, expected 2 to 10, since one label is private"):
        divide(BALANCED, 10, scheme="labels", labels_per_client=held)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_an_alpha_of_the_private_label_out_of_range_is_refused(alpha: float) -> None:
    with pytest.raises(ConfigError, match="alpha of the private label"):
        replace(Isolation(PRIVATE), alpha=alpha)
