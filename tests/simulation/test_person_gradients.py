"""Persons are protected as one: their mean gradient is clipped once, and their rows together count as one record in histograms."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from ldpfl import ParameterLayout, models
from ldpfl.data import Dataset, Samples
from ldpfl.data.persons import Persons
from ldpfl.data.unscaled import Unscaled
from ldpfl.mechanisms.dp_sgd import DpSgd
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.record_clipping import STEPS, RecordClip
from ldpfl.simulation import LocalTask, RecordGradientTrainer
from ldpfl.simulation.gradients import confined
from ldpfl.simulation.local_steps import LocalOptimiser, full_batch
from ldpfl.simulation.measuring import Measuring, count_offset, points_per_row
from ldpfl.util.randomness import RandomSource

WIDTH, MOST, NORM = 6, 4, 0.3


def rows_of(sizes: Sequence[int], seed: int = 0, width: int = WIDTH) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return inputs and targets of each person, a tensor each."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(size, width, generator=generator) for size in sizes]
    return inputs, [torch.randint(0, 3, (size,), generator=generator) for size in sizes]


def setting(
    model: str, inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], names: Sequence[str] | None = None, most: int = MOST
) -> tuple[LocalTask, Persons, torch.Tensor]:
    """Rows of the persons stand in turns, as in a table that is sorted by time."""
    names = [f"P{number:04d}" for number in range(len(inputs))] if names is None else names
    whose = np.repeat(np.array(names), list(map(len, inputs)))
    order = np.argsort(np.concatenate([np.arange(len(part)) for part in inputs]), kind="stable")
    samples = Samples(torch.cat(list(inputs))[order], torch.cat(list(targets))[order])
    module = models.create(model, (inputs[0].shape[1],), 3, seed=3)
    layout = ParameterLayout.from_module(module)
    weights = layout.flatten({name: part.detach() for name, part in module.named_parameters()})
    task = LocalTask(module, layout, samples, (), (), LocalOptimiser(1.0))
    return task, Persons.of(whose[order].tolist(), most), weights


def summed(
    model: str,
    inputs: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    number: int = 1,
    names: Sequence[str] | None = None,
    most: int = MOST,
) -> torch.Tensor:
    """Return the sum over all persons, one client's, (d,) lattice points."""
    task, persons, weights = setting(model, inputs, targets, names, most)
    trainer = RecordGradientTrainer(task, RecordClip(NORM), persons=persons)
    return trainer.train(weights, full_batch([np.arange(len(persons))], len(persons)), number)[0]


class Watched(Persons):
    """Persons that tell how many rows are asked for at once."""

    asked: ClassVar[list[int]] = []

    def rows_in_round(self, persons: torch.Tensor, round_number: int) -> tuple[torch.Tensor, torch.Tensor]:
        index, mask = super().rows_in_round(persons, round_number)
        self.asked.append(index.numel())
        return index, mask


def test_how_many_rows_are_held_at_once_does_not_grow_with_a_server_s_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    task, persons, weights = setting("linear", *rows_of([2] * 8))
    monkeypatch.setattr(Watched, "asked", [])
    for most in (1, 8, 4096):
        watched = Watched(persons.rows, persons.first, persons.counts, persons.lanes, most)
        RecordGradientTrainer(task, RecordClip(NORM), persons=watched).train(weights, full_batch([np.arange(8)], 8))
    assert max(Watched.asked) <= 2 * 4096


@pytest.mark.parametrize("norm", [0.02, 0.5, 100.0])
def test_a_person_s_mean_gradient_is_clipped_once(norm: float) -> None:
    inputs, targets = rows_of([1, 2, 4])
    task, persons, weights = setting("mlp", inputs, targets)
    found = RecordGradientTrainer(task, RecordClip(norm), persons=persons).train(weights, full_batch([np.arange(3)], 3))[0]
    total = torch.zeros(task.layout.dimension, dtype=torch.float64)
    for own, told in zip(inputs, targets, strict=True):
        task.module.zero_grad()
        nn.functional.cross_entropy(task.module(own), told).backward()  # type: ignore[no-untyped-call]
        gradient = -task.layout.flatten({name: p.grad for name, p in task.module.named_parameters() if p.grad is not None}).double()
        total += gradient * min(1.0, norm / float(gradient.norm()))
    torch.testing.assert_close(found.double() * norm / STEPS, total, atol=norm * 1e-4, rtol=1e-3)


def test_rows_beyond_those_that_count_have_their_turn_in_a_later_round() -> None:
    inputs, targets = rows_of([6, 1])
    first, second = (summed("linear", inputs, targets, number) for number in (1, 2))
    assert torch.equal(first, summed("linear", [inputs[0][:4], inputs[1]], [targets[0][:4], targets[1]]))
    turn = [4, 5, 0, 1]
    again = summed("linear", [inputs[0][turn], inputs[1]], [targets[0][turn], targets[1]])
    torch.testing.assert_close(second, again, atol=8, rtol=0)  # rows stand elsewhere, which rounds differently
    assert not torch.equal(first, second)


@pytest.mark.parametrize("model", ["linear", "mlp"])
def test_replacing_all_rows_of_a_person_moves_the_sum_by_two_norms_at_most(model: str) -> None:
    """In whole lattice steps, whatever is put in their place: more rows, fewer, huge values, or none that is a number."""
    inputs, targets = rows_of([1, 3, 7, 2, 20, 4, 1, 5])
    sums = []
    for count, scale in product((1, 3, 4, 5, 40), (1.0, 1e30, float("nan"))):
        own, told = rows_of([count], seed=count)
        sums.append(summed(model, [*inputs[:4], scale * own[0], *inputs[5:]], [*targets[:4], told[0], *targets[5:]]).tolist())
    sums.append(summed(model, [*inputs[:4], -inputs[4], *inputs[5:]], [*targets[:4], 2 - targets[4], *targets[5:]]).tolist())
    moved = [sum((x - y) ** 2 for x, y in zip(one, other, strict=True)) for one, other in product(sums, sums)]
    assert max(moved) <= (2 * STEPS) ** 2
    assert max(moved) > (1.2 * STEPS) ** 2  # and by more than a vector alone is long: what is tested does happen


@pytest.mark.parametrize("model", ["linear", "mlp"])
def test_other_persons_keep_their_gradients_to_the_last_bit(model: str) -> None:
    """A person that adds nothing, with one row or with fifty: how products are rounded depends on where their factors lie."""
    inputs, targets = rows_of([1, 3, 7, 2, 20, 4, 1, 5] * 5)
    sums = []
    for count in (1, 2, 5, 17, 50):
        nothing, told = torch.full((count, WIDTH), float("nan")), torch.zeros(count, dtype=torch.int64)
        sums.append(summed(model, [*inputs[:7], nothing, *inputs[8:]], [*targets[:7], told, *targets[8:]]))
    assert all(torch.equal(sums[0], other) for other in sums)
    assert int(sums[0].abs().max()) > 0


def test_other_persons_keep_their_gradients_wherever_rows_stand_and_whatever_one_is_called() -> None:
    """101 columns and 3 rows a person: nobody's numbers begin where memory is aligned, but by chance. One person adds nothing."""
    inputs, targets = rows_of([1, 3, 7, 2, 20, 4, 1, 5] * 8, width=101)
    names = [f"P{number:04d}" for number in range(64)]
    sums = []
    for place, count, name in product((0, 40, 63), (1, 9), ("P0020", "A", "PX", "Z", "7")):
        others = [number for number in range(64) if number != 20]
        order = [*others[:place], 20, *others[place:]]
        own = {20: (torch.full((count, 101), float("nan")), torch.zeros(count, dtype=torch.int64), name)}
        found = [own.get(number, (inputs[number], targets[number], names[number])) for number in order]
        given, told, called = zip(*found, strict=True)
        sums.append(summed("mlp", given, told, names=called, most=3))
    assert all(torch.equal(sums[0], other) for other in sums)
    assert int(sums[0].abs().max()) > 0


class Lanes(Persons):
    """Persons that tell who stands where in each block."""

    asked: ClassVar[list[list[int]]] = []

    def rows_in_round(self, persons: torch.Tensor, round_number: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append(persons.tolist())
        return super().rows_in_round(persons, round_number)


def lanes_of(names: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, set[int]]:
    """Return the lanes, of 16, in which each of these persons stands; the first has further ones, where copies of it fill gaps."""
    monkeypatch.setattr(Lanes, "asked", [])
    task, persons, weights = setting("mlp", *rows_of([1] * len(names)), names)
    told = Lanes(persons.rows, persons.first, persons.counts, persons.lanes, persons.most)
    RecordGradientTrainer(task, RecordClip(NORM), persons=told).train(weights, full_batch([np.arange(len(names))], len(names)))
    found: dict[str, set[int]] = {}
    for block in Lanes.asked:
        for place, number in enumerate(block):
            found.setdefault(sorted(names)[number], set()).add(place % 16)
    return found


def test_a_person_s_lane_follows_from_its_own_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any machine: whether rounding depends on lanes differs from one to the next."""
    names = [f"P{number:02d}" for number in range(60)]
    before, after = lanes_of(names, monkeypatch), lanes_of(["A", *names[3:], "Z", "P03b"], monkeypatch)
    assert all(len(before[name]) == 1 and before[name] == after[name] for name in names[3:])
    assert len(set.union(*before.values())) == 16


def test_one_person_with_all_rows_is_as_long_as_one_record() -> None:
    inputs, targets = rows_of([500])
    assert float(summed("mlp", inputs, targets).double().norm()) <= STEPS
    assert len(setting("mlp", inputs, targets)[1]) == 1


@pytest.mark.parametrize("at_once", [True, False])
def test_a_person_for_whom_the_model_raises_adds_nothing_on_a_node(at_once: bool) -> None:
    inputs, targets = rows_of([2, 3, 4, 1])
    task, persons, weights = setting("mlp", inputs, targets)
    trainer = RecordGradientTrainer(task, RecordClip(NORM), at_once, persons=persons)
    whole = full_batch([np.arange(4)], 4)
    hers = persons.all_rows_of(np.array([1]))[0]
    task.data.tensor[hers[1]] = float("nan")
    without = trainer.train(weights, whole)
    task.data.targets[hers[1]] = 10  # classes are 0 to 2
    with pytest.raises((IndexError, RuntimeError)):
        trainer.train(weights, whole)
    assert torch.equal(confined(trainer).train(weights, whole), without)


# --- histograms -------------------------------------------------------------------------------------------------------


class Recording(DpSgd):
    """Keeps what clients put into it."""

    def encode(self, values: torch.Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> object:  # type: ignore[override]
        SEEN.append(values.clone())
        return super().encode(values, ranges, generator)


SEEN: list[torch.Tensor] = []


def counted(persons: Sequence[NDArray[np.float64]]) -> torch.Tensor:
    """Return what a client puts into the first histogram of its persons' rows, each (rows, columns), (bins,) lattice points."""
    values = np.concatenate(persons)
    samples = Samples(torch.from_numpy(values).float(), torch.zeros(len(values), dtype=torch.int64))
    columns = tuple(Unscaled(str(column), column) for column in range(values.shape[1]))
    grouped = Persons.of(np.repeat([f"P{number}" for number in range(len(persons))], list(map(len, persons))).tolist(), MOST)
    rows, sharing = grouped.all_rows_of(np.arange(len(persons)))
    SEEN.clear()
    mechanism = Recording(RecordClip(0.5), 10.0, part="person")
    Measuring(0, mechanism, "direct").scaled(Dataset("x", samples, samples, 2, (), (), "x", unscaled=columns), [rows], [sharing])
    return SEEN[0][0] + count_offset(points_per_row(mechanism.steps, len(columns)), mechanism)


@pytest.mark.parametrize("columns", [1, 3])
def test_a_person_moves_its_client_s_histograms_by_no_more_than_a_record_does(columns: int) -> None:
    """Any rows by any others, more or fewer: by 2 C at most, which is 2^21 steps."""
    others, choices = [np.ones((3, columns)), np.full((1, columns), 7.0)], [-3.0, 5.0, float("nan")]
    sums = [counted([*others, np.full((count, columns), value)]) for count in (1, 2, 3, 60) for value in choices]
    sums += [counted([*others, np.array([[one] * columns, [other] * columns])]) for one, other in product(choices, choices)]
    moved = [float((one - other).double().norm()) for one, other in product(sums, sums)]
    assert max(moved) <= 2 * STEPS
    assert max(moved) > 1.99 * STEPS  # and the room is used


def test_rows_of_one_person_weigh_as_much_as_one_record() -> None:
    many, one = counted([np.full((64, 1), 5.0), np.ones((1, 1))]), counted([np.full((1, 1), 5.0), np.ones((1, 1))])
    assert int((many - one).abs().max()) <= 64  # rounded down for each row
    halves = counted([np.array([[5.0], [1.0]]), np.ones((1, 1))])
    assert halves.sum() == one.sum()
    assert sorted(halves[halves > 0].tolist()) == [one.max() // 2, one.max() // 2 * 3]
