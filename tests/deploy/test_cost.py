"""What a round over relays or of a sum costs: sizes are those of real uploads, and times follow from measured figures."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from ldpfl import ConfigError, LayerRanges, SeededStreams
from ldpfl.cli import app
from ldpfl.deploy.cost import OPEN_S, round_cost
from ldpfl.deploy.sum_cost import sum_cost
from ldpfl.mechanisms import create
from ldpfl.relay.protocol import MAX_ROUND_BYTES, MAX_UPLOADS
from ldpfl.transport.shuffling import RecordPlan
from ldpfl.transport.shuffling.sealing import Binding, generate_key, seal
from ldpfl.transport.sums import ENVELOPE_BYTES, Bits, SumBinding, new_seed, seal_seed, shard

RANGES = LayerRanges(torch.tensor(0.0), torch.tensor(0.1), (1000,))


@pytest.mark.parametrize("name", ["duchi", "laplace", "harmony"])
@pytest.mark.parametrize("linked", [1, 7, 10_000])
def test_sizes_are_those_of_what_a_client_uploads(name: str, linked: int) -> None:
    mechanism = create(name, epsilon=1.0)
    plan = RecordPlan(mechanism, RANGES, linked)
    [payload] = mechanism.encode(torch.zeros(1, 1000), RANGES, SeededStreams.for_clients(0, 1, [0])).payloads()
    sealed = seal(plan.split(payload), generate_key().public_key(), Binding("run", 1, plan.fingerprint))
    cost = round_cost(mechanism, RANGES, 500, linked)
    assert (cost.records, cost.upload_bytes, cost.round_bytes) == (plan.records, len(sealed), 500 * len(sealed))
    assert cost.relays == 1


def test_a_hundred_million_clients_need_many_relays() -> None:
    ranges = LayerRanges(torch.tensor(0.0), torch.tensor(0.1), (1_000_000,))
    cost = round_cost(create("duchi", epsilon=1.0), ranges, 10**8, 1_000_000)
    each = -(-(10**8) // cost.relays)
    assert each <= MAX_UPLOADS
    assert each * cost.upload_bytes <= MAX_ROUND_BYTES
    assert (each + each // 100) * cost.upload_bytes > MAX_ROUND_BYTES  # and no more relays than that
    assert 10**8 * OPEN_S <= cost.server_s <= 3600 * cost.server_cores < cost.server_s + 3600
    assert any("clients of its relay" in value for _, value in cost.lines())


def test_memory_grows_with_clients_only_where_reports_do_not_add_up() -> None:
    few, many = (round_cost(create("duchi", epsilon=1.0), RANGES, clients, 1000) for clients in (10, 10**6))
    assert few.server_bytes == many.server_bytes
    few, many = (round_cost(create("harmony", epsilon=1.0), RANGES, clients, 1000) for clients in (10, 10**6))
    assert few.server_bytes < many.server_bytes


@pytest.mark.parametrize("bits", [32, 64])
def test_sizes_of_a_sum_are_those_of_what_a_client_uploads_and_an_aggregator_pulls(bits: Bits) -> None:
    binding = SumBinding("run", 1, bytes(32), 1000, bits)
    sent = shard(np.zeros(1000, np.int64), new_seed(), bits)
    envelope = seal_seed(new_seed(), generate_key().public_key(), Ed25519PrivateKey.generate(), binding)
    cost = sum_cost(500, 1000, bits)
    assert (cost.upload_bytes, cost.round_bytes) == (len(sent + envelope), 500 * len(sent + envelope))
    assert cost.download_bytes == len(sent) + 500 * len(envelope)
    twice = sum_cost(1000, 1000, bits)
    assert (twice.relay_s, twice.aggregator_s) == (2 * cost.relay_s, 2 * cost.aggregator_s)
    assert twice.client_s == cost.client_s
    assert not any(name == "note" for name, _ in twice.lines())
    assert any("split it into 3 rounds" in value for _, value in sum_cost(2_000_001, 1000, bits).lines())


@pytest.mark.thorough
def test_the_command_line_knows_sums() -> None:
    """By a regime, of which the plan says how many bits a number takes, and by a mechanism and channel."""
    line = ["plan", "--regime", "clients-summed", "--target", "1", "--clients", "1000", "--weights", "1000", "--rounds", "1", "--cost"]
    planned = json.loads(CliRunner().invoke(app, [*line, "--json"]).stdout)
    assert planned["cost"]["upload_bytes"] == planned["bytes_per_client"] + ENVELOPE_BYTES
    assert "cost of a round of 1,000 clients as a sum over two servers" in CliRunner().invoke(app, line).stdout
    line = ["plan", "--epsilon", "1", "--clients", "1000", "--rounds", "1", "--weights", "1000", "--channel", "secure-sum", "--cost"]
    shown = CliRunner().invoke(app, [*line, "--mechanism", "dp-fedavg"]).stdout
    assert "cost of a round of 1,000 clients as a sum over two servers" in shown
    with pytest.raises(ConfigError, match="reports of the mechanism 'duchi' cannot be added up: give"):
        CliRunner().invoke(app, line, catch_exceptions=False, standalone_mode=False)


def test_the_command_line_says_it_where_it_is_asked() -> None:
    line = ["plan", "--epsilon", "1", "--clients", "1000", "--rounds", "1", "--weights", "1000", "--channel", "direct"]
    assert "cost" not in json.loads(CliRunner().invoke(app, [*line, "--json"]).stdout)
    asked = CliRunner().invoke(app, [*line, "--json", "--cost", "--linked", "10"])
    cost = json.loads(asked.stdout)["cost"]
    assert (cost["clients"], cost["records"], cost["linked"]) == (1000, 100, 10)
    shown = CliRunner().invoke(app, [*line, "--cost"]).stdout
    assert "cost of a round of 1,000 clients over relays" in shown
    assert "s of one core" in shown
    with pytest.raises(ConfigError, match="--cost"):
        CliRunner().invoke(
            app, ["plan", "--regime", "local", "--target", "1", "--clients", "9", "--cost"], catch_exceptions=False, standalone_mode=False
        )
