"""List of the commands. A command is imported when it is called, so that a help text or a list of recipes needs no PyTorch."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import click
import typer
from typer.core import TyperGroup

from ldpfl.util.lazy_imports import without_garbage_collection
from ldpfl.util.suggestions import did_you_mean

COMMANDS = {
    "run": ("runs:run", "Train a model over simulated clients and write a run folder."),
    "sweep": ("runs:sweep", "Run a recipe over several settings and seeds. Rerun the same command to resume."),
    "tune": (
        "tuning:tune",
        "Choose settings by private trials, and release the best one under one epsilon. Rerun the same command to resume.",
    ),
    "reproduce": (
        "reproduce:reproduce",
        "Reproduce a paper's table or figure: our figures, the paper's, and the proved bounds. Rerun the same command to resume.",
    ),
    "recipes": ("recipes:recipes", 'List the recipes that "ldpfl run" knows.'),
    "check": (
        "own:check",
        "Check whether a model can be trained privately, and suggest fixes. Exit code 3 if it cannot be trained.",
    ),
    "settings": ("own:settings", "List every setting of a config: key, meaning, default and allowed values."),
    "init": ("own:init", "Write a config with a comment for each key. In a terminal it asks for values that are missing."),
    "show": (
        "runs:show",
        "Show a run: its result and a paragraph for a paper, or how far it got. Of a sweep, how many of its runs are finished.",
    ),
    "report": (
        "reports:report",
        "Write a self-contained HTML report on runs, a sweep or a plan: accuracy, privacy, plots.",
    ),
    "predict": ("own:predict", "Predict new rows of a table, texts or images with a finished run's model: a line each, as CSV."),
    "export": (
        "own:export",
        "Write the public parts of a finished run to a new folder: model, guarantee, certificate and model card, and nothing secret.",
    ),
    "plan": ("plan:plan", "Compute the privacy and cost of a planned federation."),
    "ledger": ("ledger:ledger", "Compute the privacy guarantee of a run or a recipe."),
    "certify": (
        "certificates:certify",
        "Write a run's guarantee to a small file that others can check. It contains no figure of the data.",
    ),
    "verify": (
        "certificates:verify",
        "Check certificates by a second implementation of the accountants. Exit code 3: one is not confirmed; 4: one is not checked.",
    ),
    "audit": (
        "audit:audit",
        "Test a mechanism, or what a server learns from a run's pool, by experiment. Exit code 3 if a mechanism fails.",
    ),
    "attack": ("attacks:app", "Attack published models or sent reports, to measure how well they are protected."),
    "budget": ("budget:app", "A client's lifetime budget: its limit, and how much is spent."),
    "policy": ("policy:app", "A client's policy: the reports that its operator allows to leave."),
    "relay": ("relay:app", "Run the relay, which mixes sealed reports so that nobody sees who sent what."),
    "deploy": ("deploy:app", "Deploy on Flower, with the relay."),
}
"""By name: its module below ``ldpfl.cli`` and its function or app there, and the first sentence of its own help."""


class Group(TyperGroup):
    """Group of commands that suggests the nearest command for a mistyped one."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that ``args`` begins with, or raise an error that suggests the nearest one."""
        names = self.list_commands(ctx)
        if args and not args[0].startswith("-") and args[0] not in names and not ctx.resilient_parsing:
            raise click.UsageError(f"no such command {args[0]!r}: {did_you_mean(args[0], names)}", ctx)
        return super().resolve_command(ctx, args)


class Commands(Group):
    """The commands of :data:`COMMANDS`, each imported when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a stand-in for a command, which has only its line in the list of commands. The command itself is not imported."""
        return click.Command(cmd_name, help=COMMANDS[cmd_name][1]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that ``args`` begins with, imported in place of its stand-in."""
        name, _, remaining_args = super().resolve_command(ctx, args)
        return name, None if name is None else command(name), remaining_args


def command(name: str) -> click.Command:
    """Import the command called ``name``, and return it with all its options."""
    place, _ = COMMANDS[name]
    module, _, attribute = place.partition(":")
    target = getattr(_import_commands(f"ldpfl.cli.{module}"), attribute)
    if not isinstance(target, typer.Typer):  # a function: the command has no commands of its own
        single_command = typer.Typer(add_completion=False)
        single_command.command(name)(target)
        target = single_command
    loaded = typer.main.get_command(target)
    loaded.name = name
    return loaded


def _import_commands(module: str) -> ModuleType:
    """Import a module of commands without garbage collection, which would take time and find nothing."""
    with without_garbage_collection():
        return import_module(module)
