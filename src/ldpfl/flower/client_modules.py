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
    """Put the folder ``app`` first in ``sys.path`` within this context, and remove the modules imported from it afterwards.

    No bytecode is written to the folder: Python could run it later in place of the sources that the operator has reviewed.
    """
    folder, modules_before, bytecode_setting = app.resolve(), set(sys.modules), sys.dont_write_bytecode
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = bytecode_setting
        sys.path.remove(str(folder))
        for name in set(sys.modules) - modules_before:
            if folder in Path(getattr(sys.modules[name], "__file__", None) or "").parents:
                del sys.modules[name]


def import_client_app(app: Path) -> LdpClientApp:
    """Import and return the client that the app in this folder names. This runs the code of its client module.

    Raises:
        ConfigError: the app names no client, or the client is no ``LdpClientApp``.
    """
    import_path = str(_settings(app).get("components", {}).get("clientapp", ""))
    if ":" not in import_path:
        raise ConfigError(
            f"{app / 'pyproject.toml'}: clientapp in [tool.flwr.app.components] must be package.module:name, got {import_path!r}"
        )
    client = pkgutil.resolve_name(import_path)
    if not isinstance(client, LdpClientApp):
        raise ConfigError(
            f"the clientapp {import_path!r} is a {type(client).__name__}, whose replies a node's policy cannot limit: replace it by "
            'LdpClientApp("package.module:name"), see docs/flower.md'
        )
    return client


def run_config_of(app: Path) -> UserConfig:
    """Return the run config of the app in this folder as Flower passes it to apps: keys of nested tables are joined by dots.

    Raises:
        ConfigError: there is no app.
    """
    return dict(_flatten_keys(_settings(app).get("config", {})))


def _flatten_keys(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) for each value in ``table`` and its nested tables. The key is ``prefix`` and the keys to the value, with dots."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _settings(app: Path) -> Mapping[str, Any]:
    """Return the table ``[tool.flwr.app]`` of the app's ``pyproject.toml``."""
    project = app / "pyproject.toml"
    try:
        settings: Mapping[str, Any] = from_toml(read_text(project))["tool"]["flwr"]["app"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{project} is not the file of a Flower app: it needs [tool.flwr.app] with its components") from None
    return settings
