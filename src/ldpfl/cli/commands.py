"""List of the commands. A command is imported when it is called, so that a help text or a list of recipes needs no PyTorch."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import click
import typer
from typer.core import TyperGroup

from ldpfl.util.lazy_imports import importing
from ldpfl.util.suggestions import did_you_mean

COMMANDS = {
    "run": ("runs:run", "Train a model over simulated clients and write a run folder."),
    "sweep": ("runs:sweep", "Run a recipe's variants over settings and seeds; start it again to go on where it was stopped."),
    "tune": (
        "tuning:tune",
        "Choose settings by private trials, and release the best one under one epsilon. Start it again to go on where it was stopped.",
    ),
    "reproduce": (
        "reproduce:reproduce",
        "Make a table or figure of a paper again: ours, the paper's and what really holds. Start it again to go on where it stopped.",
    ),
    "recipes": ("recipes:recipes", 'List the recipes that "ldpfl run" knows.'),
    "check": (
        "own:check",
        "Look a model over: what in it keeps it from private training, and what to put in its place. Exit code 3 if it cannot be trained.",
    ),
    "settings": ("own:settings", "List every setting of a config: key, meaning, default, and what may stand there."),
    "init": ("own:init", "Write a config with a comment for each key; what is left open is asked for in a terminal."),
    "show": (
        "runs:show",
        "Show a run: its result and a paragraph for a paper, or how far it got. Of a sweep, how many of its runs are finished.",
    ),
    "report": (
        "reports:report",
        "Write one HTML file about runs, a sweep or a plan: how good, what is protected, in pictures. It needs no network and no script.",
    ),
    "predict": ("own:predict", "Predict new rows of a table, texts or images with a finished run's model: a line each, as CSV."),
    "export": (
        "own:export",
        "Write what may be handed on of a finished run to a new folder: model, guarantee, certificate and model card, and nothing secret.",
    ),
    "plan": ("plan:plan", "Print what a federation would guarantee and cost, before anything is run."),
    "ledger": ("ledger:ledger", "Account what a run released, or what a recipe would release, and print what holds."),
    "certify": (
        "certificates:certify",
        "Write what a run guarantees, and from what that follows, in a small file for others to check. No figure of the data is in it.",
    ),
    "verify": (
        "certificates:verify",
        "Check certificates by a second implementation of the accountants. Exit code 3: one is not confirmed; 4: one is not checked.",
    ),
    "audit": (
        "audit:audit",
        "Test a mechanism, or what a server learns from a run's pool, by experiment. Exit code 3 if a mechanism fails.",
    ),
    "attack": ("attacks:app", "Attack what is published or sent, to see what protection is worth."),
    "budget": ("budget:app", "A client's own lifetime budget: what it allows to leave, and what has left."),
    "policy": ("policy:app", "What a client's operator allows to leave."),
    "relay": ("relay:app", "Run the relay, which mixes sealed reports so that nobody sees who sent what."),
    "deploy": ("deploy:app", "Deploy on Flower, with the relay."),
}
"""By name: its module below ``ldpfl.cli`` and its function or app there, and the first sentence of its own help."""


class Group(TyperGroup):
    """Group of commands that suggests the nearest command for a mistyped one."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if args and not args[0].startswith("-") and args[0] not in names and not ctx.resilient_parsing:
            raise click.UsageError(f"no such command {args[0]!r}: {did_you_mean(args[0], names)}", ctx)
        return super().resolve_command(ctx, args)


class Commands(Group):
    """The commands of :data:`COMMANDS`, each imported when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a stand-in for a command, with what the list of commands shows of it."""
        return click.Command(cmd_name, help=COMMANDS[cmd_name][1]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else command(name), rest


def command(name: str) -> click.Command:
    """Return the command called ``name``, with all its options."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    target = getattr(_imported(f"ldpfl.cli.{module}"), attribute)
    if not isinstance(target, typer.Typer):
        single_command = typer.Typer(add_completion=False)
        single_command.command(name)(target)
        target = single_command
    loaded = typer.main.get_command(target)
    loaded.name = name
    return loaded


def _imported(module: str) -> ModuleType:
    """Import a module of commands, with a message about a missing extra if that fails."""
    with importing():
        return import_module(module)
