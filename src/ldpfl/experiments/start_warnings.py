"""What is to be said of a run before its first round: it follows from settings and from numbers of rows, which are public."""

from __future__ import annotations

from collections.abc import Iterator

from ldpfl.data import Dataset
from ldpfl.data.division import Division
from ldpfl.data.holding_out import TEST_SHARE
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.quality import MIN_SITE_ROWS
from ldpfl.mechanisms.dp_sgd import DpSgdSettings

_MUCH_OFF = 2.0
"""Factor between the stated and the true number of records a client from which on a word is said."""


def start_warnings(config: RunConfig, data: Dataset, parts: Division) -> Iterator[str]:
    """Yield what is wrong with a run on ``data``, divided over clients as ``parts``, that the run itself does not stop at."""
    if not config.data.at_nodes:  # whose rows nobody but each node knows
        yield from _of_records(config, parts)
        yield from _of_few_rows(config, data)


def _of_records(config: RunConfig, parts: Division) -> Iterator[str]:
    """Compare the stated mean number of records a client with the true one: each mean gradient is off by their ratio."""
    stated = config.mechanism.records if isinstance(config.mechanism, DpSgdSettings) else 0
    true = float(parts.sizes.mean())
    if stated and not 1 / _MUCH_OFF <= true / stated <= _MUCH_OFF:
        effect = "training may diverge" if true > stated else "the model hardly moves"
        what = "persons" if config.data.person else "records"
        yield (
            f"mechanism.records says {stated:,} {what} a client, and clients have {true:,.4g} on average: each step is "
            f"{true / stated:.3g} times as long as the learning rate says, so {effect}; "
            f"set mechanism.records to {max(1, round(true)):,}, or in a simulation to 0"
        )


def _of_few_rows(config: RunConfig, data: Dataset) -> Iterator[str]:
    rows = len(data.test)
    if config.data.brought and rows < MIN_SITE_ROWS:
        more = f"{TEST_SHARE * MIN_SITE_ROWS} rows in all, or a data.test_path"
        needed = "a data.test_path with as many" if config.data.test_path else more
        yield (
            f"{len(data.train):,} rows to train on and {rows:,} to measure on are too few: figures of a model say something from "
            f"{MIN_SITE_ROWS} test rows on, and intervals need 10 of each class; give {needed}"
        )
