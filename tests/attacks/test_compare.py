"""Attacks on several runs become one table only where they were made alike, and each run and each unprotected model counts once."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import TINY_TOML
from ldpfl.attacks.compare import AttackedRun, compared
from ldpfl.attacks.frechet import Distance
from ldpfl.attacks.on_run import AttackPlan, AttackRow, RunAttack
from ldpfl.errors import ConfigError
from ldpfl.experiments.config import RunConfig, parse_config
from ldpfl.report.attacks import comparison_table

IMAGES = 100


def config_of(*overrides: str) -> RunConfig:
    return parse_config(TINY_TOML, ["data.private_label=4", *overrides], origin="test")


def distance(value: float, *, other: int = IMAGES) -> Distance:
    return Distance(value, "classifier", 64, IMAGES, other)


def attacked(name: str, config: RunConfig, protected: float, unprotected: float = 10.0, *, foreign: int = IMAGES) -> AttackedRun:
    """A run attacked with two seeds, whose distances lie 1 on both sides of what is given."""
    private = config.mechanism.name != "none"
    rows = [
        *[AttackRow("protected", (distance(protected - 1), distance(protected + 1)), (0.25, 0.75), protected / 1000)] * private,
        AttackRow("unprotected", (distance(unprotected - 1), distance(unprotected + 1)), (1.0, 1.0), 0.9),
        AttackRow("floor", (distance(5.0),), (1.0,)),
        AttackRow("other classes", (distance(900.0 + unprotected, other=foreign),), (0.0,)),
    ]
    epsilon, budget = config.mechanism.epsilon_and_budget or (None, "unit")
    attack = RunAttack(
        name=config.name,
        label=4,
        mechanism=config.mechanism.name,
        epsilon=epsilon,
        budget=budget,
        own_images=500,
        own_of_label=0,
        plan=AttackPlan(images=IMAGES, seeds=(0, 1)),
        extractor="classifier",
        features=64,
        classifier="classifier",
        classifier_accuracy=0.99,
        data="mnist 1234",
        rows=tuple(rows),
    )
    return AttackedRun(Path(name), config, attack)


def test_runs_that_differ_in_seed_name_and_description_only_are_one_line() -> None:
    first = attacked("a", config_of("seed=1"), 100.0, 10.0)
    second = attacked("b", config_of("seed=2", "name=again", "description=x"), 200.0, 30.0)
    found = compared([first, second])
    assert [line.name for line in found.lines] == ["duchi, epsilon 2 a unit", "unprotected", "floor", "other classes"]
    group, open_models, floor, others = found.lines
    values = [99.0, 101.0, 199.0, 201.0]
    assert [item.value for item in group.row.distances] == values
    assert group.row.mean == pytest.approx(150.0)
    assert group.row.deviation == pytest.approx(statistics.stdev(values))
    assert group.row.accuracy == pytest.approx(0.15)
    assert group.runs == (Path("a"), Path("b"))
    assert [item.value for item in open_models.row.distances] == [9.0, 11.0, 29.0, 31.0]  # another seed, another model
    assert [item.value for item in floor.row.distances] == [5.0]
    assert [item.value for item in others.row.distances] == [910.0, 930.0]
    assert (floor.accuracies, others.accuracies) == ((), ())


def test_an_unprotected_model_that_runs_share_counts_once() -> None:
    duchi, piecewise = config_of(), config_of("mechanism.name=piecewise", "mechanism.epsilon=0.5")
    plain = config_of("mechanism.name=none")
    found = compared([attacked("a", duchi, 100.0), attacked("b", piecewise, 200.0), attacked("c", plain, 0.0)])
    names = [line.name for line in found.lines]
    assert names == ["duchi, epsilon 2 a unit", "piecewise, epsilon 0.5 a unit", "unprotected", "floor", "other classes"]
    assert [len(line.row.distances) for line in found.lines] == [2, 2, 2, 1, 1]
    assert found.runs == 3


def test_lines_that_would_have_one_name_are_told_apart_by_what_differs() -> None:
    configs = [config_of(), config_of("ranges.radius=0.5"), config_of("seed=9"), config_of("mechanism.epsilon=1.0")]
    found = compared([attacked(str(number), config, 100.0) for number, config in enumerate(configs)])
    names = [line.name for line in found.lines if line.row.kind == "protected"]
    assert names == ["duchi, epsilon 2 a unit, ranges.radius 0.02", "duchi, epsilon 2 a unit, ranges.radius 0.5", "duchi, epsilon 1 a unit"]


def test_a_baseline_of_fewer_images_is_left_out_and_named() -> None:
    full, few = attacked("a", config_of("seed=1"), 100.0), attacked("b", config_of("seed=2"), 100.0, foreign=IMAGES - 1)
    found = compared([full, few])
    assert found.left_out == (Path("b"),)
    assert len(found.lines[-1].row.distances) == 1
    assert "without 1 run" in str(comparison_table(found).caption)
    assert [line.name for line in compared([few]).lines] == ["duchi, epsilon 2 a unit", "unprotected", "floor"]


def with_distances(attack: RunAttack, change: Callable[[Distance], Distance]) -> RunAttack:
    rows = [replace(row, distances=tuple(change(item) for item in row.distances)) for row in attack.rows]
    return replace(attack, rows=tuple(rows))


MIXED: list[tuple[str, Callable[[RunAttack], RunAttack]]] = [
    ("label", lambda attack: replace(attack, label=5)),
    ("data set", lambda attack: replace(attack, data="fashion-mnist 1234")),
    ("plan", lambda attack: replace(attack, plan=replace(attack.plan, seeds=(0, 2)))),
    ("extractor", lambda attack: with_distances(attack, lambda item: replace(item, extractor="Inception"))),
    ("extractor", lambda attack: with_distances(attack, lambda item: replace(item, features=2048))),
    ("number of images", lambda attack: with_distances(attack, lambda item: replace(item, real=99))),
    ("number of images", lambda attack: with_distances(attack, lambda item: replace(item, other=99))),
    ("classifier", lambda attack: replace(attack, classifier="another")),
]


@pytest.mark.parametrize(("what", "change"), MIXED)
def test_attacks_that_were_not_made_alike_are_refused(what: str, change: Callable[[RunAttack], RunAttack]) -> None:
    first, second = attacked("a", config_of("seed=1"), 100.0), attacked("b", config_of("seed=2"), 100.0)
    compared([first, second])
    with pytest.raises(ConfigError, match=f"must have the same {what}, got 2"):
        compared([first, replace(second, attack=change(second.attack))])


def test_the_label_may_be_the_runs_own_or_the_same_one_given() -> None:
    first, second = attacked("a", config_of("seed=1"), 100.0), attacked("b", config_of("seed=2"), 100.0)
    given = replace(second, attack=replace(second.attack, plan=replace(second.attack.plan, label=4)))
    assert compared([first, given]).lines == compared([first, second]).lines


def test_a_run_does_not_count_twice() -> None:
    first = attacked("a", config_of(), 100.0)
    for other in (first, attacked("copy", config_of("name=copy"), 100.0)):
        with pytest.raises(ConfigError, match="same run with the same seed"):
            compared([first, other])
    with pytest.raises(ConfigError, match="got 0"):
        compared([])


def test_the_json_has_every_figure() -> None:
    found = compared([attacked("a", config_of("seed=1"), 100.0), attacked("b", config_of("seed=2"), 200.0)])
    kept = json.loads(json.dumps(found.to_dict()))
    line = kept["lines"][0]
    assert (line["name"], line["kind"], line["runs"]) == ("duchi, epsilon 2 a unit", "protected", ["a", "b"])
    assert (line["mean"], line["deviation"]) == (found.lines[0].row.mean, found.lines[0].row.deviation)
    assert (line["share"], line["accuracies"]) == (0.5, [0.1, 0.2])
    assert (kept["images"], kept["label"], kept["runs"], kept["plan"]["seeds"]) == (IMAGES, 4, 2, [0, 1])
    assert kept["versions"].keys() == {"ldpfl", "torch"}


def test_the_table_has_a_line_each_and_says_how_to_read_it() -> None:
    table = comparison_table(compared([attacked("a", config_of("seed=1"), 100.0), attacked("b", config_of("seed=2"), 200.0)]))
    cells = [[str(cell) for cell in column.cells] for column in table.columns]
    assert cells[1:] == [
        ["4", "4", "-", "-"],
        ["150 ± 58", "10 ± 1.2", "5", "910 ± 0"],
        ["50.0%", "100.0%", "100.0%", "0.0%"],
        ["15.0%", "90.0%", "-", "-"],
    ]
    assert cells[0][0] == "duchi, epsilon 2 a unit"
    assert "2 runs, 2 seeds of the attack on each" in str(table.title)
    assert "extractor: classifier" in str(table.caption)
