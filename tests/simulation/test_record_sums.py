"""Sums over records: no two records lie farther apart than the noise is for, and sums without noise are exact."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from ldpfl.data.persons import Persons
from ldpfl.data.samples import Division, Samples
from ldpfl.mechanisms.dp_sgd import DpSgd
from ldpfl.mechanisms.record_clipping import STEPS, RecordClip
from ldpfl.models.dense import LogisticRegression
from ldpfl.models.layout import ParameterLayout
from ldpfl.simulation import LocalTask
from ldpfl.simulation.evaluating_records import RecordScores
from ldpfl.simulation.least_squares import LeastSquares
from ldpfl.simulation.local_steps import LocalOptimiser
from ldpfl.simulation.record_sums import RecordVectors, client_sums, lattice_points, mean_vectors, released_sum
from ldpfl.util.randomness import Purpose

STEPS_OF = (2**10, STEPS)


def task_of(inputs: Tensor, targets: Tensor, classes: int = 3) -> tuple[LocalTask, Tensor]:
    torch.manual_seed(0)
    module = LogisticRegression(tuple(inputs.shape[1:]), classes)
    layout = ParameterLayout.from_module(module)
    weights = layout.flatten({name: part.detach() for name, part in module.named_parameters()})
    return LocalTask(module, layout, Samples(inputs, targets), (), (), LocalOptimiser(0.1)), weights


def farthest(vectors: Tensor, steps: int) -> float:
    """Return the largest distance of two records' lattice points, of all pairs, as a share of what it may be."""
    points = torch.cat([lattice_points(vectors, steps), torch.zeros(1, vectors.shape[1], dtype=torch.int64)]).double()
    return float(torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist").max()) / (2 * steps)


def corners(width: int) -> Tensor:
    """Return features of all signs and sizes, among them those that lie farthest apart, and some that are no numbers."""
    signs = torch.tensor(list(product([-1.0, 0.0, 1.0], repeat=width)))
    turned = torch.tensor([[np.cos(angle), np.sin(angle), *[0.0] * (width - 2)] for angle in np.linspace(0, np.pi, 61)])
    drawn = torch.randn(100, width, generator=torch.Generator().manual_seed(1))
    return torch.cat([signs, 100 * signs, turned.float(), drawn, torch.full((1, width), float("inf"))])


@pytest.mark.thorough_for("1-True", "4-True")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("classes", [1, 2, 4])
def test_any_record_by_any_other_moves_the_sums_of_least_squares_by_no_more_than_a_gradient(classes: int, bias: bool) -> None:
    inputs = corners(3)
    for share, steps in product((0.05, 0.3, 0.5, 0.66, 0.8, 0.95), STEPS_OF):
        head = LeastSquares(3, classes, classes > 1, bias, target_share=share)
        targets = range(classes) if classes > 1 else (-100.0, -1.0, 0.0, 5.0, float("nan"))
        vectors = torch.cat([head.vectors(inputs, torch.full((len(inputs),), target)) for target in targets])
        assert farthest(vectors, steps) <= 1


def test_the_room_of_least_squares_is_used() -> None:
    """Of the same class, at the angle where the distance is largest, and without a constant that no record can change."""
    for share in (0.5, 0.8):
        vectors = LeastSquares(3, 2, classes=True, bias=False, target_share=share).vectors(corners(3), torch.zeros(216, dtype=torch.int64))
        assert farthest(vectors, STEPS) > 0.999


@pytest.mark.parametrize("classes", [2, 3, 40])
def test_any_record_by_any_other_moves_what_clients_measure_by_no_more_than_a_gradient(classes: int) -> None:
    """Outputs right and wrong, sure and unsure, and no numbers; records without an answer."""
    task, _ = task_of(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), classes)
    outputs = torch.cat([torch.eye(classes) * size for size in (0.0, 0.3, 3.0, 1e9)])[:60]
    outputs = torch.cat([outputs, torch.full((1, classes), float("nan")), -outputs[-1:]])
    scores = RecordScores("class", classes, 2.0)
    vectors = torch.cat([scores.vectors(task, outputs, torch.full((len(outputs),), target)) for target in (-100, 0, 1, classes - 1)])
    for steps in STEPS_OF:
        assert farthest(vectors, steps) <= 1


class Mixing(LogisticRegression):
    """A model whose outputs all change if its batch holds a large number."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        return outputs + (inputs.abs().amax() > 1e3) * torch.arange(3)


def test_no_record_changes_what_another_adds_to_an_evaluation_whatever_the_model_does_in_a_batch() -> None:
    inputs, targets = torch.randn(9, 2, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 3
    task, weights = task_of(inputs, targets)
    scores, units = RecordScores("class", 3, 2.0), Division.of([np.arange(8)])
    task = replace(task, module=Mixing((2,), 3))
    with_outlier = replace(task, data=Samples(torch.where(torch.arange(9)[:, None] == 8, 1e4, inputs), targets))
    sums = [client_sums(scores, some, weights, units, STEPS) for some in (task, with_outlier)]
    both = client_sums(scores, with_outlier, weights, Division.of([np.arange(9)]), STEPS)
    outlier = client_sums(scores, with_outlier, weights, Division.of([np.array([8])]), STEPS)
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(both, sums[0] + outlier)


@dataclass(frozen=True)
class PlaceTelling:
    """A rule whose vectors hold what may decide how a row is rounded, and nothing else of other rows: its place, and the batch's length."""

    size: int = 3
    one_by_one: bool = False

    def of(self, task: LocalTask, weights: Tensor, rows: Tensor) -> Tensor:
        return torch.stack([rows, torch.arange(len(rows)), torch.full((len(rows),), len(rows))], dim=1).double()


@pytest.mark.parametrize("changed", [0, 7, 299])
def test_how_many_rows_a_unit_has_decides_nothing_about_the_rounding_of_others(changed: int) -> None:
    task, weights = task_of(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))
    sizes = np.random.default_rng(0).integers(0, 12, 300)
    others = np.arange(300) != changed
    results = []
    for size in (0, 1, 5, 8, 9, 700):
        sizes[changed] = size
        results.append(mean_vectors(PlaceTelling(), task, weights, [np.arange(count) for count in sizes])[others])
    assert all(torch.equal(result, results[0]) for result in results)


def test_who_else_is_there_decides_nothing_about_the_rounding_of_a_person() -> None:
    """A person is replaced by one whose name comes first, last or in the middle, and so all others have other numbers."""
    task, weights = task_of(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))
    generator = np.random.default_rng(0)
    sizes, lanes = generator.integers(0, 12, 60), generator.random(60)
    results = []
    for place, size, lane in ((0, 1, 0.0), (59, 8, 0.99), (30, 300, 0.5)):
        all_sizes, all_lanes = np.insert(sizes, place, size), np.insert(lanes, place, lane)
        means = mean_vectors(PlaceTelling(), task, weights, [np.arange(count) for count in all_sizes], all_lanes)
        results.append(means[np.arange(61) != place])
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.thorough_except("False")
@pytest.mark.parametrize("one_by_one", [False, True])
def test_the_mean_of_a_units_rows_is_that_of_their_vectors(one_by_one: bool) -> None:
    task, weights = task_of(torch.randn(600, 2, generator=torch.Generator().manual_seed(0)), torch.arange(600) % 3)
    scores = RecordScores("class", 3, 2.0, one_by_one=one_by_one)
    units = [np.arange(size) + size for size in (3, 0, 1, 8, 9, 260)]
    means = mean_vectors(scores, task, weights, units)
    vectors = scores.of(task, weights, torch.arange(600))
    expected = [vectors[rows].mean(dim=0) if len(rows) else torch.zeros(scores.size, dtype=torch.float64) for rows in units]
    torch.testing.assert_close(means, torch.stack(expected), rtol=0, atol=1e-6)


def test_a_person_counts_as_one_record() -> None:
    """The mean over its rows: so any rows, of any number, move the sum by no more than a gradient."""
    inputs = corners(3)[:60]
    task, weights = task_of(inputs, torch.arange(60) % 3)
    head = LeastSquares(3, 3, classes=True, bias=True)
    sums = []
    for seed in range(40):
        generator = np.random.default_rng(seed)
        rows = generator.integers(0, 60, generator.integers(1, 9))
        persons = Persons(rows=rows, first=np.array([0]), counts=np.array([rows.size]), lanes=np.array([0]), most=8)
        sums.append(client_sums(head, task, weights, Division.of([np.array([0])]), STEPS, persons)[0].double())
    assert max(float((one - other).norm()) for one, other in product(sums, sums)) <= 2 * STEPS
    one = Persons(rows=np.array([7]), first=np.array([0]), counts=np.array([1]), lanes=np.array([0]), most=8)
    same = client_sums(head, task, weights, Division.of([np.array([0])]), STEPS, one)
    assert torch.equal(same, client_sums(head, task, weights, Division.of([np.array([7])]), STEPS))


@pytest.mark.parametrize("vectors", [LeastSquares(2, 3, classes=True, bias=False), RecordScores("class", 3, 2.0)])
def test_a_sum_is_that_of_its_records_and_noise_is_what_the_mechanism_says(vectors: RecordVectors) -> None:
    """Noise of 40 releases of each coordinate: its deviation is within 10 % (false alarm below 1e-5), its mean within 5 deviations."""
    generator = torch.Generator().manual_seed(0)
    task, weights = task_of(torch.randn(90, 2, generator=generator), torch.randint(0, 3, (90,), generator=generator))
    units = Division.of(np.array_split(np.arange(90), 4))
    sums = client_sums(vectors, task, weights, units, STEPS)
    each = torch.stack([client_sums(vectors, task, weights, Division.of([np.array([row])]), STEPS)[0] for row in range(90)])
    assert torch.equal(sums.sum(dim=0), each.sum(dim=0))
    for summed in (False, True):
        mechanism = DpSgd(RecordClip(0.3), 3.0, summed=summed, records=22.5)
        found = [
            released_sum(
                lambda some: sums[some.start : some.stop], 4, vectors.size, mechanism, seed=seed, purpose=Purpose.EVALUATION, number=1
            )
            for seed in range(40)
        ]
        noise = np.stack([own.points - sums.sum(dim=0).numpy() for own in found])
        assert found[0].noise == pytest.approx(3.0 * 2 * STEPS)
        assert noise.std() == pytest.approx(found[0].noise, rel=0.1)
        assert abs(noise.mean()) < 5 * found[0].noise / np.sqrt(noise.size)
