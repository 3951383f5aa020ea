"""Commands about deployments on Flower."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from ldpfl.api import operators as doing
from ldpfl.cli import nodes
from ldpfl.cli.commands import Group
from ldpfl.cli.interrupts import Interrupts
from ldpfl.cli.new_folder import new_folder
from ldpfl.cli.options import DataDirOption
from ldpfl.errors import DeploymentError
from ldpfl.report.console import terminal

if TYPE_CHECKING:
    from ldpfl.cli.demo_display import Display

app = typer.Typer(cls=Group, no_args_is_help=True, help="Deploy on Flower, with the relay.")


@app.command()
def demo(
    clients: Annotated[int, typer.Option(min=2, help="SuperNodes, each with its own part of the data.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of training.")] = 3,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the quickstart.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for all files.", show_default="runs/deploy-demo-TIME")] = None,
    data_dir: DataDirOption = None,
    reply_s: Annotated[
        float, typer.Option(min=1, help="Seconds after which each node replies, trained or not; more on a slow machine.")
    ] = 20,
    sum_: Annotated[
        bool, typer.Option("--sum", help="Add up the reports, so that no server sees a single one: records are protected, at epsilon 4.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep keys, tokens, certificates and what relay and Flower stored.")] = False,
) -> None:
    """Train on this machine as in a deployment: SuperLink, relay and SuperNodes with TLS, keys, policies and budgets."""
    errors = terminal(stderr=True)
    folder, watch = out or new_folder("deploy-demo"), partial(_watched, errors)
    try:
        outcome = doing.demo(
            clients, rounds, folder, watch=watch, settings=set_ or (), data_dir=data_dir, reply_s=reply_s, by_sum=sum_, keep=keep
        )
    except DeploymentError as error:
        for line in error.log:
            errors.print(Text(f"  {line}", style="yellow"), soft_wrap=True)
        raise
    from ldpfl.cli.demo_display import print_outcome  # imported late: it needs the packages of the demo

    print_outcome(terminal(), outcome)


@app.command()
def key(
    file: Annotated[Path, typer.Argument(help="File of the private key, which only its owner may read.")],
    show: Annotated[bool, typer.Option("--show", help="Make no key: print the public half of the one in the file.")] = False,
) -> None:
    """Make an aggregator's key, and print its public half, which nodes name in their policies."""
    print(doing.aggregator_key(file, make=not show))


@app.command()
def node_key(
    file: Annotated[Path, typer.Argument(help="File of the private key, which only its owner may read.")],
    show: Annotated[bool, typer.Option("--show", help="Make no key: print the public half of the one in the file.")] = False,
) -> None:
    """Make a node's signing key for sums, and print the node's line: for LDPFL_NODE_KEYS, and for the node's token at the relay."""
    print(doing.node_key(file, make=not show))


@app.command()
def certificates(
    folder: Annotated[Path, typer.Argument(help="Folder of the authority, and of a folder for each server; made if there is none.")],
    host: Annotated[
        list[str], typer.Option(help="Name or address of a server; several of one server joined by commas. One --host for each server.")
    ],
    days: Annotated[int, typer.Option(min=1, max=3650, help="Days that the servers' certificates are valid.")] = 365,
    renew: Annotated[bool, typer.Option("--renew", help="Replace certificates that are there, and their keys.")] = False,
) -> None:
    """Write an authority and certificates for SuperLink and relay. If your organisation has an authority, take certificates of that one."""
    issued = doing.issue_certificates(folder, host, days, renew=renew)
    console = terminal()
    for server in issued.servers:
        files = f"{server.certificate}, {server.key} (mode 600)"
        console.print(Text(f"{', '.join(server.names)}: {files}, valid until {server.until:%Y-%m-%d}"), soft_wrap=True)
    console.print(Text(f"for every node and the operator: {issued.authority}, valid until {issued.until:%Y-%m-%d}"), soft_wrap=True)
    warning = (
        f"{issued.authority_key} can pose as any of these servers: keep it off their machines. "
        "An organisation's own authority is better: it revokes, records what it issues, and guards its key."
    )
    console.print(Text(warning, style="yellow"), soft_wrap=True)


@contextmanager
def _watched(console: Console, rounds: int) -> Iterator[tuple[Display, Callable[[float], None]]]:
    """Show a demo's progress. Yield the display, and a function that waits a number of seconds and raises if the demo is interrupted."""
    from ldpfl.cli.demo_display import Display  # imported late: it needs the packages of the demo

    with _interruptible() as interrupts, Display(console, rounds) as display:

        def pause(seconds: float) -> None:
            time.sleep(seconds)
            interrupts.check()

        yield display, pause


@contextmanager
def _interruptible() -> Iterator[Interrupts]:
    """Treat SIGTERM and a closed terminal like Ctrl-C, so that the processes of the demo are stopped in order."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous_handlers = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with Interrupts() as interrupts:
            yield interrupts
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


for node_command in (nodes.check_node, nodes.node_metrics, nodes.left_open):
    app.command()(node_command)
