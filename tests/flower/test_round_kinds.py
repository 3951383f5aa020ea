"""Which round of a run asks for what follows from its config, as the simulator's ledger numbers it."""

from __future__ import annotations

from typing import Any

import pytest
from table_parts import config_of

from ldpfl.errors import AskedForOther
from ldpfl.experiments.planned_ledger import planned_ledger
from ldpfl.flower.round_kinds import last_round, mean_held_back_records, planned_round


@pytest.mark.parametrize("scaling", ["bounds", "measured"])
@pytest.mark.parametrize(("rounds", "every"), [(1, 0), (3, 0), (3, 1), (4, 2), (5, 2), (2, 5)])
def test_rounds_are_numbered_as_in_the_plan(rounds: int, every: int, scaling: str) -> None:
    for epsilon in ("off", 1.0):
        config = config_of(training__rounds=rounds, evaluation__every=every, evaluation__epsilon=epsilon, data__scaling=scaling)
        planned = [planned_round(config, number) for number in range(1, last_round(config, rounds) + 1)]
        events = planned_ledger(config).events
        assert [(own.number, not own.is_training) for own in planned] == [(event.round, event.histograms) for event in events]
        assert [own.trained for own in planned if own.is_training] == list(range(rounds))
        if epsilon != "off":
            assert planned[-1].trained == rounds
            with pytest.raises(AskedForOther, match="but the config that it sent has only "):
                planned_round(config, len(planned) + 1)


@pytest.mark.parametrize(
    ("more", "mean"), [({"mechanism__records": 90}, 10), ({"mechanism__records": 1}, 1), ({"evaluation__records": 7}, 7)]
)
def test_the_number_of_held_back_records_is_said_or_follows_from_those_that_are_left(more: dict[str, Any], mean: int) -> None:
    assert mean_held_back_records(config_of(**more)) == mean
