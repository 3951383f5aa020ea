"""Ask a node for rounds that name a zebrafinch wherever a server can write, and fail if anything touches one.

A program of its own, because an audit hook cannot be taken away again. Its argument is a folder for the node's files.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flower_parts
from flwr.app import ConfigRecord, Message, RecordDict

from ldpfl import mechanisms
from ldpfl.experiments.config import known_keys
from ldpfl.flower import InProcessGrid
from ldpfl.flower.apps import client_app
from ldpfl.flower.invitation import QUESTION
from ldpfl.flower.terms import digest_of
from ldpfl.privacy.budget_file import set_limit

POLICY = """
mechanisms = ["duchi"]
epsilon_per_unit = 1e6
epsilon_per_round = 1e9
lifetime_epsilon = 1e12
rounds = 1_000_000
min_clients = 1
transports = ["direct"]
immediate_replies = true
models = ["torch.nn:Linear"]
"""
BAD = (
    "zebrafinch:boom",
    "zebrafinch",
    "../zebrafinch",
    "file://zebrafinch",
    "subprocess:getoutput#zebrafinch",
    "__import__('zebrafinch')",
    'zebrafinch"; import zebrafinch',
    "zebrafinch\n[model]\nname = 'zebrafinch:boom'",
    "zebrafinch" * 1000,
)
KEYS = (
    *dict.fromkeys(key for name in mechanisms.names() for key in known_keys(name)),
    "model.options.path",
    "noise.path",
    "ranges.center.weight",
    "ranges.radius.zebrafinch",
    "name.zebrafinch",
)
SETTINGS = ("ldpfl.recipe", "ldpfl.set", "ldpfl.out", "ldpfl.device", "ldpfl-policy", "ldpfl-budget", "data-dir", "partition-id", "app")

Asked = tuple[RecordDict, dict[str, Any]]


def with_bad_terms() -> Iterator[Asked]:
    """Straight into the record, past what an honest server's own checks would refuse."""
    for place, key in enumerate(KEYS):
        *sections, leaf = key.split(".")
        for value in (BAD[place % len(BAD)], BAD[(place + 4) % len(BAD)]):
            quoted = "'" + value.replace("'", "").replace("\n", " ") + "'"
            record = flower_parts.terms_of().to_record()
            record["config"] = (f"[{'.'.join(sections)}]\n" if sections else "") + f"{leaf} = {quoted}"
            yield RecordDict({"arrays": flower_parts.start_arrays(), "config": ConfigRecord({"path": value}), "ldpfl": record}), {}


def with_bad_run_config(chance: random.Random, rounds: int) -> Iterator[Asked]:
    for _ in range(rounds):
        settings = {}
        for name in chance.sample(SETTINGS, chance.randint(1, 5)):
            value = chance.choice(BAD)
            settings[name] = chance.choice([value, f"model.name={value}; model.options.cmd=zebrafinch", 3, True])
        yield flower_parts.instruction(flower_parts.terms_of(run_config=digest_of(settings))).content, settings


def main(folder: Path) -> None:
    (folder / "policy.toml").write_text(POLICY, encoding="utf-8")
    set_limit(folder / "budget.sqlite", 1e12)
    os.environ |= {"LDPFL_POLICY": str(folder / "policy.toml"), "LDPFL_BUDGET": str(folder / "budget.sqlite")}
    touched = os.open(
        folder / "touched", os.O_WRONLY | os.O_CREAT | os.O_APPEND
    )  # training runs in forked processes, which are watched too

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if any("zebrafinch" in str(argument) for argument in arguments):
            os.write(touched, f"{event}\n".encode())

    rounds = [*with_bad_terms(), *with_bad_run_config(random.Random(5), 100)]
    sys.addaudithook(watch)
    for number, (content, settings) in enumerate(rounds):
        content.config_records["ldpfl"]["run"] = f"run-{number}"  # a node reports each round of a run once
        grid = InProcessGrid(client_app, 1, run_config=settings)
        sizes = ConfigRecord({"sizes": [12, 3]})
        asking = RecordDict({"ldpfl": content.config_records["ldpfl"], "question": sizes})
        for sent, kind in ((asking, QUESTION), (content, "train")):
            next(iter(grid.send_and_receive([Message(sent, grid.get_node_ids()[0], kind)])))
    events = (folder / "touched").read_text(encoding="utf-8")
    if events or "zebrafinch" in sys.modules:
        raise SystemExit(f"a zebrafinch was touched: {sorted(set(events.split()))}")
    print(len(rounds))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
