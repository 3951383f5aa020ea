"""The client of a Flower app, imported from the app's folder as Flower imports it."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.app import UserConfig

from ldpfl.errors import ConfigError
from ldpfl.flower.client_app import LdpClientApp
from ldpfl.util.files import from_toml, read_text


@contextmanager
def importable(app: Path) -> Iterator[None]:
    """Put the folder ``app`` first among the places that modules are looked for, and forget what was imported from it afterwards.

    Nothing is written to the folder: bytecode is what Python could run in place of the sources that were reviewed.
    """
    folder, before, bytecode = app.resolve(), set(sys.modules), sys.dont_write_bytecode
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = bytecode
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if folder in Path(getattr(sys.modules[name], "__file__", None) or "").parents:
                del sys.modules[name]


def client_app_in(app: Path) -> LdpClientApp:
    """Import the client that the app in this folder names, which runs the code of its client module.

    Raises:
        ConfigError: the app names none, or it is no ``LdpClientApp``.
    """
    named = str(_settings(app).get("components", {}).get("clientapp", ""))
    if ":" not in named:
        raise ConfigError(f"{app / 'pyproject.toml'} names no clientapp as package.module:name in [tool.flwr.app.components]")
    found = pkgutil.resolve_name(named)
    if not isinstance(found, LdpClientApp):
        raise ConfigError(
            f"the clientapp {named!r} is a {type(found).__name__}, whose replies no policy limits: let it be "
            'LdpClientApp("package.module:name"), see docs/flower.md'
        )
    return found


def run_config_of(app: Path) -> UserConfig:
    """Return the run config of the app in this folder as Flower hands it over: keys of tables are joined by points.

    Raises:
        ConfigError: there is no app.
    """
    return dict(_flat(_settings(app).get("config", {})))


def _flat(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _settings(app: Path) -> Mapping[str, Any]:
    project = app / "pyproject.toml"
    try:
        found: Mapping[str, Any] = from_toml(read_text(project))["tool"]["flwr"]["app"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{project} is no Flower app that can be read: it needs a [tool.flwr.app]") from None
    return found
