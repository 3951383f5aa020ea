"""Commands of those who operate a node or the aggregator of a deployment: registered with ``ldpfl deploy``."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from ldpfl.api import DATA_DIR_VARIABLE, operators
from ldpfl.api.operators import NodeSetUp, Standing, Trial
from ldpfl.cli.policy import shapes_of, sizes_of
from ldpfl.errors import ConfigError
from ldpfl.report.console import terminal

NOT_READY = 3
"""Exit code when something has to be corrected before a node can take part."""

_COLOURS = {"ok": "green", "look": "yellow", "wrong": "red"}


def _variable_option(variable: str, text: str) -> typer.models.OptionInfo:
    """Return an option that may also be given by an environment ``variable``; ``text`` is its help."""
    option: typer.models.OptionInfo = typer.Option(envvar=variable, show_envvar=True, help=text)
    return option


def check_node(
    policy: Annotated[Path | None, _variable_option("LDPFL_POLICY", "Policy file.")] = None,
    budget: Annotated[Path | None, _variable_option("LDPFL_BUDGET", "File of the lifetime budget.")] = None,
    relay: Annotated[str | None, _variable_option("LDPFL_RELAY", "URL of the relay.")] = None,
    token: Annotated[Path | None, _variable_option("LDPFL_RELAY_TOKEN", "File of the node's token at the relay.")] = None,
    relay_ca: Annotated[Path | None, _variable_option("LDPFL_RELAY_CA", "Authority of the relay's certificate.")] = None,
    data: Annotated[str | None, _variable_option("LDPFL_DATA", "This node's own table.")] = None,
    data_dir: Annotated[Path | None, _variable_option(DATA_DIR_VARIABLE, "Folder of data sets.")] = None,
    partition: Annotated[int | None, typer.Option(min=0, help="The node's partition-id.")] = None,
    signing_key: Annotated[Path | None, _variable_option("LDPFL_SIGNING_KEY", "Key by which the node signs what it adds to sums.")] = None,
    node_key: Annotated[Path | None, typer.Option(help="Private key with which the SuperNode proves who it is.")] = None,
    superlink: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Address of the SuperLink.")] = None,
    superlink_ca: Annotated[Path | None, typer.Option(help="Authority of the SuperLink's certificate.")] = None,
    app: Annotated[
        str | None, typer.Option(help="Folder of the app that will run: also check that policy, budget and table fit it.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Config of the app's own ServerApp.")] = None,
    layers: Annotated[
        str,
        typer.Option(help="Values in each of the model's arrays, as 500,10, or names and shapes, as w=10x50,b=10: for a model of its own."),
    ] = "",
    try_: Annotated[
        bool,
        typer.Option("--try", help="Do one round's local work on this node's data by the app's code, and throw the report away."),
    ] = False,
    node_config: Annotated[str, typer.Option(metavar="'KEY=VALUE ...'", help="With --try: the SuperNode's --node-config.")] = "",
    train_config: Annotated[
        str, typer.Option(metavar="'KEY=VALUE ...'", help="With --try: what the app's own ServerApp hands to clients (train_config).")
    ] = "",
) -> None:
    """Check a node's set-up as its SuperNode would find it, a line a finding. Sends nothing of the data. Exit code 3: something is wrong.

    Run it as the user, and with the environment, that the SuperNode has. With --try it also runs the app's code, as a round does: it reads
    the data, trains, clips and encodes. Nothing is charged, sent or written.
    """
    operators.need_deployment()
    if try_ and app is None:
        raise ConfigError("--try is set, but --app is missing: name the app's folder with --app")
    node = NodeSetUp(
        policy=policy,
        budget=budget,
        relay=relay,
        token=token,
        relay_ca=relay_ca,
        data=data,
        data_dir=data_dir,
        node_key=node_key,
        superlink=superlink,
        superlink_ca=superlink_ca,
        app=app,
        config=config,
        layers=sizes_of(layers),
        partition=partition,
        signing_key=signing_key,
        shapes=shapes_of(layers),
    )
    trial = Trial(_pairs(node_config, "--node-config"), _pairs(train_config, "--train-config")) if try_ else None
    console, faults = terminal(), 0
    for finding in operators.check_node(node, trial):
        if finding.standing is Standing.WRONG:
            faults += 1
        line = Text.assemble((f"{finding.standing.value:<6}", _COLOURS[finding.standing]), f"{finding.what:<10}", finding.said)
        console.print(line, soft_wrap=True)
    if faults:
        raise SystemExit(NOT_READY)


def _pairs(text: str, option: str) -> dict[str, str | int | float | bool]:
    """Return the settings in ``text``, the value of ``option``. As for Flower, they are ``key=value``, with values as in TOML."""
    pairs = _PAIR.findall(text)
    try:
        if _PAIR.sub("", text).strip():
            raise ValueError("some of it is not of the form KEY=VALUE")
        settings = tomllib.loads("\n".join(f"{json.dumps(key)} = {value}" for key, value in pairs))  # quoted, "a.b" is one key
    except ValueError as error:
        raise ConfigError(f"{option} is {text!r}, expected KEY=VALUE with spaces between, and texts in quotes: {error}") from None
    return settings


_PAIR = re.compile(r"([\w.-]+)\s*=\s*(\"[^\"]*\"|'[^']*'|[^\s\"']+)")


def node_metrics(
    budget: Annotated[Path, _variable_option("LDPFL_BUDGET", "File of the lifetime budget.")],
    log: Annotated[Path | None, typer.Option(help="The SuperNode's log: counts reports sent, replaced, declined and failed.")] = None,
    policy: Annotated[Path | None, _variable_option("LDPFL_POLICY", "Policy file: tells what was spent of each of its bounds.")] = None,
) -> None:
    """Print what a node's operator watches, in Prometheus' text format. For the operator alone: some of it depends on the node's data."""
    print(operators.node_metrics(budget, log, policy), end="")


def left_open(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The aggregator's run folder.")],
    relay: Annotated[str | None, _variable_option("LDPFL_RELAY", "URL of the relay.")] = None,
    token: Annotated[Path | None, _variable_option("LDPFL_AGGREGATOR_TOKEN", "File of the aggregator's token at the relay.")] = None,
    relay_ca: Annotated[Path | None, _variable_option("LDPFL_RELAY_CA", "Authority of the relay's certificate.")] = None,
    cancel: Annotated[bool, typer.Option("--cancel", help="Have the relay delete what it holds of the run.")] = False,
) -> None:
    """Say what a run on Flower that was stopped has left open, at the aggregator and at the relay, and close it if told to."""
    console = terminal()
    for line in operators.left_open(run, relay=relay, token=token, relay_ca=relay_ca, cancel=cancel):
        console.print(Text(line), soft_wrap=True)
