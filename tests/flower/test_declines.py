"""The server's operator reads which public fact keeps nodes from a round, and no figure of a node's policy or budget."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord
from relayed_parts import CLIENTS, World, world_in
from table_parts import deployed, open_policy, write_tables

from ldpfl.errors import AllDeclined
from ldpfl.flower import RoundTerms


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("LDPFL_DATA", write_tables(tmp_path))
    with world_in(tmp_path) as made:
        made.policy, made.min_clients = open_policy(), CLIENTS
        yield made


def by(setting: str) -> str:
    return f"declined: its policy's {setting} does not allow the round"


POLICIES: dict[str, tuple[dict[str, Any], str]] = {
    "mechanism": ({"mechanisms": ("dp-fedavg",)}, by("mechanisms")),
    "cohort": ({"min_clients": CLIENTS + 1}, by("min_clients")),
    "sums": ({"sum_epsilon": 0.5}, by("sum_epsilon")),
    "rounds": ({"rounds": 0}, by("rounds")),
    "lifetime": ({"lifetime_epsilon": 0.5}, "declined: its lifetime budget does not allow the round"),
}


def refused(world: World) -> str:
    with pytest.raises(AllDeclined) as raised:
        deployed(world, evaluation__epsilon="off")
    assert sum(world.charges()) == 0
    return str(raised.value)


@pytest.mark.parametrize("case", POLICIES)
@pytest.mark.slow
@pytest.mark.thorough_for("rounds", "lifetime")
def test_a_policy_that_does_not_allow_a_round_is_named_to_the_server(case: str, world: World) -> None:
    changes, told = POLICIES[case]
    world.policy = open_policy(**changes)
    said = refused(world)
    assert f"round 1: none of 5 nodes takes part: 5 said {told!r} (nodes 2, 3, 4, 5, 6)" in said
    assert "0.5" not in said


@pytest.mark.slow
def test_a_budget_that_does_not_allow_a_round_is_named_to_the_server(world: World) -> None:
    world.budget = 0.5
    assert "5 said 'declined: its lifetime budget does not allow the round'" in refused(world)


@pytest.mark.slow
def test_nodes_with_another_version_of_ldpfl_are_named_to_the_server(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = RoundTerms.to_record

    def newer(self: RoundTerms) -> ConfigRecord:
        record = honest(self)
        record["version"] = int(record["version"]) + 1  # type: ignore[arg-type]
        return record

    monkeypatch.setattr(RoundTerms, "to_record", newer)
    assert "5 said 'declined: its ldpfl reads other terms: it needs the version that the server has'" in refused(world)
