"""What an aggregator logs and writes follows from the sum: clients that swap their data leave every byte of it as it was."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from flower_parts import start_arrays
from flwr.app import Context, Message, MetricRecord, RecordDict
from relayed_parts import InProcess, World, policy_of, world_in
from test_summed import SIZES, config_of_sum

from ldpfl.experiments.run_folder import RunFolder
from ldpfl.flower import LdpStrategy
from ldpfl.flower.arrays import layout_of, to_arrays, to_vector
from ldpfl.flower.relay_collection import SumCollector
from ldpfl.flower.report_collection import OpenRound, Received
from ldpfl.relay.store import Store
from ldpfl.transport.sums import SumBinding, open_seeds, unshard

pytestmark = pytest.mark.slow

LOGGER = logging.getLogger("flwr.ldpfl")
Owners = tuple[int, ...]


@dataclass(frozen=True)
class Swapped:
    """A training in which client k has the data of ``owners[k]``, and reports what must not leave."""

    owners: Owners

    def __call__(self, message: Message, context: Context) -> Message:
        owner = self.owners[int(context.node_config["partition-id"])]
        arrays = message.content.array_records["arrays"]
        layout = layout_of(arrays)
        trained = to_vector(arrays, layout) + 0.02 * (1 + owner)
        told = MetricRecord({"num-examples": 100 + owner, "loss": float(owner)})
        return Message(RecordDict({"arrays": to_arrays(trained, layout), "metrics": told}), reply_to=message)


class Keeping(InProcess):
    """A relay that gives away what clients upload."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.kept: list[bytes] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "PUT" and "/shares/" in request.url.path:
            self.kept.append(request.read())
        return super().handle_request(request)


class Colluding(SumCollector):
    """An aggregator that works together with the relay, and logs how long one client's vector is."""

    def read_release(self, round_: OpenRound) -> Received:
        terms = self.relay.round_status(round_.run, round_.number).terms
        share, size = KEPT[-1], 4 * sum(SIZES)
        binding = SumBinding(round_.run, round_.number, bytes.fromhex(terms.agreement), sum(SIZES), 32)
        (seed,) = open_seeds([share[size:]], self.key, self.nodes, binding, 1)
        LOGGER.info("one client: %d", int(np.abs(unshard(np.frombuffer(share[:size], "<u4"), [seed])).max()))
        return super().read_release(round_)


KEPT: list[bytes] = []


@pytest.fixture(autouse=True)
def _one_name_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs have one name, and rounds take no time: both are told, and follow from nothing that a client holds."""
    monkeypatch.setattr("secrets.token_hex", lambda count: "0" * 2 * count)
    monkeypatch.setattr("time.perf_counter", lambda: 0.0)


@dataclass
class View:
    """What an aggregator logged, and its files."""

    logged: list[str]
    written: dict[str, bytes] = field(default_factory=dict)


def in_order(tensors: bytes) -> bytes:
    """Return a safetensors file with its metadata in one order: the library writes them in one that is another each time."""
    end = 8 + int.from_bytes(tensors[:8], "little")
    return json.dumps(json.loads(tensors[8:end]), sort_keys=True).encode() + tensors[end:]


def view_of(folder: Path, owners: Owners, caplog: pytest.LogCaptureFixture, *, colluding: bool = False) -> View:
    folder.mkdir()
    caplog.clear()
    with world_in(folder) as world, caplog.at_level(logging.DEBUG):
        world.policy = policy_of(mechanisms=("dp-fedavg",), transports=("sum",), sum_epsilon=900.0)
        run(world, folder, owners, colluding=colluding)
    # Nodes of the simulation log in the same process; what is theirs is no server's.
    logged = [record.getMessage() for record in caplog.records if record.name.startswith("flwr")]
    written = {file.name: file.read_bytes() for file in (folder / "run").iterdir()}
    written["checkpoint.safetensors"] = in_order(written["checkpoint.safetensors"])
    return View(logged, written)


def run(world: World, folder: Path, owners: Owners, *, colluding: bool) -> None:
    collector: Any = world.adding_up()
    if colluding:
        world.wire = Keeping(world.store)
        KEPT.clear()
        world.wire.kept = KEPT
        collector = Colluding(**vars(collector))
    strategy = LdpStrategy(config_of_sum(), collector=collector, folder=RunFolder(folder / "run"))
    strategy.start(world.grid(Swapped(owners)), start_arrays(), 2, timeout=100.0)


def test_an_aggregator_logs_and_writes_the_same_whoever_holds_what(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, other = (view_of(tmp_path / name, owners, caplog) for name, owners in (("1", (0, 1, 2, 3, 4)), ("2", (4, 1, 2, 3, 0))))
    assert len(one.logged) > 3
    assert one.logged == other.logged
    assert {"checkpoint.safetensors", "metrics.jsonl", "ledger.json"} <= one.written.keys() == other.written.keys()
    differing = [name for name, data in one.written.items() if data != other.written[name]]
    assert differing == []


@pytest.mark.thorough
def test_an_aggregator_that_works_with_the_relay_is_seen_in_its_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, other = (
        view_of(tmp_path / name, owners, caplog, colluding=True) for name, owners in (("1", (0, 1, 2, 3, 4)), ("2", (4, 1, 2, 3, 0)))
    )
    assert one.logged != other.logged
    assert one.written["checkpoint.safetensors"] == other.written["checkpoint.safetensors"]
