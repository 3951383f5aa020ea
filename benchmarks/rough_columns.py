"""How far the note can be trusted which names columns of a table that were seen only roughly.

    python benchmarks/rough_columns.py [--seeds 3] [--first 0]

Made-up tables of 400 to 20,000 rows at 4 or 20 clients, epsilon 1 to 8, without bounds or with bounds 1, 10 or 1,000 times as wide as the
values. It prints which share of the rightly scaled columns the note names, and how many wrongly scaled ones (deviates off by a factor of
3, or by 2 spreads) it does not name, in how many tables.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray

from ldpfl.data import Dataset, Samples
from ldpfl.data.unscaled import Unscaled
from ldpfl.mechanisms.dp_sgd import DpSgd
from ldpfl.mechanisms.record_clipping import RecordClip
from ldpfl.simulation.measuring import Measuring

NOISE = {1: 50.0, 2: 26.0, 4: 13.7, 8: 7.6}
"""Noise multiplier at each epsilon of a whole run, roughly as runs choose it."""
COLUMNS = 7
RARE = "5 % of 0/1"


def columns_of_many_kinds(generator: np.random.Generator, rows: int) -> dict[str, NDArray[np.float64]]:
    """Return columns of many kinds, by name."""
    shares = {RARE: 0.05, "20 % of 0/1": 0.2, "half of 0/1": 0.5}
    amounts = generator.lognormal(1, 1, rows)
    return {
        **{name: (generator.random(rows) < share).astype(float) for name, share in shares.items()},
        "counts 0 to 5": generator.integers(0, 6, rows).astype(float),
        "Poisson of mean 1": generator.poisson(1, rows).astype(float),
        "answers 1 to 5": generator.choice([1.0, 2.0, 3.0, 4.0, 5.0], rows, p=[0.02, 0.05, 0.15, 0.38, 0.4]),
        "age": generator.normal(66, 15, rows),
        "temperature": generator.normal(37, 0.6, rows),
        "lognormal": generator.lognormal(2, 1.2, rows),
        "heavy tails": generator.standard_t(2, rows) * 10,
        "year": generator.integers(2005, 2025, rows).astype(float),
        "amount, 70 % of it 0": np.where(generator.random(rows) < 0.7, 0, amounts),
        "small": generator.normal(0.003, 0.0005, rows),
    }


def bounds_around(values: NDArray[np.float64], factor: float | None) -> tuple[float, float] | None:
    """Return bounds ``factor`` times as wide as the range of ``values``, or None without a factor."""
    if factor is None:
        return None
    middle, reach = (values.max() + values.min()) / 2, factor * np.ptp(values) / 2
    return float(middle - reach), float(middle + reach)


def judged_columns(rows: int, clients: int, epsilon: int, factor: float | None, seed: int) -> Iterator[tuple[str, bool, bool]]:
    """Yield each column that was measured, precisely or roughly: its name, whether its scale is wrong, and whether the note names it."""
    generator = np.random.default_rng([seed, rows, clients])
    columns = columns_of_many_kinds(generator, rows)
    names = generator.permutation(list(columns))[:COLUMNS].tolist()
    inputs = torch.from_numpy(np.stack([columns[name] for name in names], axis=1)).float()
    samples = Samples(inputs, torch.from_numpy(generator.integers(0, 2, rows)))
    unscaled = [Unscaled(name, place, bounds_around(columns[name], factor)) for place, name in enumerate(names)]
    dataset = Dataset("x", samples, samples, 2, (), (), "x", unscaled=(*unscaled, Unscaled("outcome, the target", classes=2)))
    mechanism = DpSgd(RecordClip(1.0), NOISE[epsilon], records=rows / clients)
    parts = tuple(np.array_split(np.arange(rows), clients))
    scaled_dataset, _ = Measuring(seed, mechanism, "direct").scaled(dataset, parts)
    notes = {rough: " ".join(note for note in scaled_dataset.notes if ("roughly" in note) == rough) for rough in (True, False)}
    for place, name in enumerate(names):
        if name not in notes[False]:
            spread, center = float(scaled_dataset.train.tensor[:, place].std()), float(scaled_dataset.train.tensor[:, place].mean())
            yield name, not 1 / 3 < spread < 3 or abs(center) > 2, name in notes[True]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    named_by_group, tables, missed = defaultdict[str, list[bool]](list), 0, 0
    seeds = range(options.first, options.first + options.seeds)
    for rows, clients, epsilon, factor, seed in product((400, 1000, 3000, 8000, 20000), (4, 20), NOISE, (None, 1.0, 10.0, 1000.0), seeds):
        judged = list(judged_columns(rows, clients, epsilon, factor, seed))
        tables, missed = tables + bool(judged), missed + any(is_wrong and not is_named for _, is_wrong, is_named in judged)
        for name, is_wrong, is_named in judged:
            if not is_wrong:
                kind = "rare" if name == RARE else "others"
                group = (
                    "less than 3,000 rows"
                    if rows < 3000
                    else f"3,000 rows and more, epsilon {'4 and 8' if epsilon > 2 else '1 and 2'}, {kind}"
                )
                named_by_group[group].append(is_named)
    for group, is_named_of_group in sorted(named_by_group.items()):
        print(f"{group}: {np.mean(is_named_of_group):.1%} of {len(is_named_of_group):,} right columns named")
    print(f"a wrong column that is not named: in {missed} of {tables:,} tables")


if __name__ == "__main__":
    main()
