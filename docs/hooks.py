"""What the site is built with beside its pages: the help texts of all commands, all settings, and the list of decisions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner

from ldpfl import mechanisms
from ldpfl.cli.commands import COMMANDS, command
from ldpfl.experiments.settings_listed import sections, settings

_DECISIONS = Path(__file__).parent / "decisions"
_PLAIN = {"COLUMNS": "110", "TERMINAL_WIDTH": "110", "NO_COLOR": "1", "LDPFL_DATA_DIR": ""}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put what is generated where a page names it."""
    for name, made in (("{{ commands }}", _commands), ("{{ settings }}", _settings), ("{{ decisions }}", _decisions)):
        if name in markdown:
            markdown = markdown.replace(name, "\n".join(made()))
    return markdown


def _commands() -> Iterator[str]:
    for name in COMMANDS:
        found = command(name)
        yield _help(found, f"ldpfl {name}", [], 2)
        if isinstance(found, click.Group):
            for inner in found.commands:
                yield _help(found, f"ldpfl {name}", [inner], 3)


def _settings() -> Iterator[str]:
    for title, names in (("Sections", sections()), ("Mechanisms", mechanisms.names())):
        yield f"## {title}\n"
        for name in names:
            yield f"### {name}\n"
            for setting in settings(name):
                default = f" = `{setting.default}`" if setting.default else ""
                yield f"- **{setting.key}**{default} ({setting.allowed}): {setting.meaning}"
            yield ""


def _help(found: click.Command, path: str, inner: list[str], level: int) -> str:
    said = CliRunner().invoke(found, [*inner, "--help"], prog_name=path, env=_PLAIN).output.strip()
    return f"{'#' * level} {' '.join([path, *inner])}\n\n```text\n{said}\n```\n"


def _decisions() -> Iterator[str]:
    for file in sorted(_DECISIONS.glob("[0-9]*.md")):
        title = file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        yield f"- [{title}]({file.name})"
