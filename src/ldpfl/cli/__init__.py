"""The command line: parse, call, print."""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import click
import typer

from ldpfl.cli.commands import Commands
from ldpfl.cli.interrupts import INTERRUPTED
from ldpfl.errors import NO_ROOM, LdpflError, error_without_data
from ldpfl.report.console import print_anything
from ldpfl.util.suggestions import quoting_hint

# Typer's own tracebacks print local variables, and with them private data.
app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Federated learning under local differential privacy.",
)

DEBUG_VARIABLE = "LDPFL_DEBUG"


def main() -> None:
    """Run the command line. An error is one line on stderr: exit code 2 for a mistake, 130 for an interrupt, 1 for an unexpected error."""
    print_anything()
    try:
        sys.exit(app(standalone_mode=False))  # Click raises its errors here, instead of printing them
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        sys.exit(2)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        message = error.format_message()
        hint = quoting_hint(message.rstrip(").")) if "extra argument" in message else ""  # such a message ends with the argument
        _stop(f"{message}{hint} (see {_typed_command(context)} --help)")
    except LdpflError as error:
        _stop(str(error))
    except OSError as error:
        stdout_is_full = error.filename is None and error.errno in NO_ROOM
        _stop(f"the output cannot be written to standard output: {error.strerror}; make room there" if stdout_is_full else str(error))
    except (KeyboardInterrupt, click.Abort):
        print("ldpfl: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except Exception as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        _stop(f"{error_without_data(error)}; set {DEBUG_VARIABLE}=1 to see the full traceback", code=1)


def _typed_command(context: click.Context | None) -> str:
    """Return the command with the mistake as a user types it, such as ``ldpfl budget show``."""
    return "ldpfl" if context is None else " ".join(["ldpfl", *context.command_path.split()[1:]])


def _stop(message: str, code: int = 2) -> NoReturn:
    """Print ``message`` as one line on stderr, and exit with ``code``."""
    line = " ".join(message.split())
    # The message may quote a file of somebody else, whose control characters must not reach the terminal.
    printed = "".join(char if char.isprintable() else char.encode("unicode_escape", "backslashreplace").decode() for char in line)
    print(f"ldpfl: {printed}", file=sys.stderr)
    sys.exit(code)


def _print_version(is_given: bool) -> None:
    """Print the version and exit, if the option ``--version`` is given."""
    if is_given:
        from ldpfl import __version__  # looking up the version is slow

        print(f"ldpfl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")] = False,
) -> None:  # nothing is left to do: the option's callback prints the version
    """Federated learning under local differential privacy."""
