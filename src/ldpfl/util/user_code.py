"""Code that a user names: ``package.module:name`` or ``file.py:name``, the current folder included."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module, util
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

from ldpfl.errors import ConfigError, in_short
from ldpfl.util.suggestions import did_you_mean

GIVEN = "given"
"""Name of data, or of a model, that a caller hands over; nothing but its caller can run such a config again."""


PRETRAINED = "hf:"
"""What the name of a pretrained model of ``transformers`` begins with; a folder or a name of the hub follows."""


TIMM = "timm:"
"""What the name of features of ``timm`` begins with; a name or a folder follows. Policies treat it as an import path."""


def is_pretrained(name: str) -> bool:
    """Tell whether ``name`` is that of a pretrained model. Policies treat it as an import path: nodes load no model that a server chose."""
    return name.startswith(PRETRAINED)


def named_model(name: str) -> str:
    """Return the name of a model as a config has it: ``hf:FOLDER`` where ``name`` is the folder of a pretrained model.

    A folder in the current one that has the name of a built-in model, and holds no pretrained model, is not taken for one.
    """
    place = name.removeprefix(PRETRAINED)
    is_path = place.startswith((".", "/", "~")) and not is_code(place)
    path = Path(place).expanduser() if is_path else Path(place)
    is_folder = path.is_dir() and (is_pretrained(name) or len(path.parts) > 1 or any(path.glob("*config.json")))
    return f"{PRETRAINED}{path.resolve()}" if is_path or is_folder else name


def public_name(name: str) -> str:
    """Return a setting's text without the folder of the file, the code or the pretrained model that it names: the last part stays."""
    file, colon, attribute = name.partition(":")
    if colon and lies_in_file(name):
        return f"{Path(file).name}{colon}{attribute}"
    prefix = next((own for own in (PRETRAINED, TIMM) if name.startswith(own)), "")
    place = name.removeprefix(prefix)
    return f"{prefix}{Path(place).name}" if place.startswith(("/", "~")) or Path(place).is_absolute() else name


def library(name: str) -> Any:
    """Import ``transformers`` or ``peft``. Nothing imports them before they are needed.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(f'pretrained models need {name} ({in_short(error)}): pip install "ldpfl[transformers]"') from error


def is_code(name: str) -> bool:
    """Tell whether ``name`` is an import path, whose code would run."""
    return ":" in name


def lies_in_file(name: str) -> bool:
    """Tell whether the code ``name`` is that of a file, of whatever folder a process happens to run in, and not of an installed package."""
    return name.partition(":")[0].endswith(".py")


class _NotCalled(Exception):
    """What is named is not there, or wants arguments that nobody gave."""


def called(what: str, path: str, *arguments: Any, offered: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """Return what the function or class at ``path`` makes of the arguments; ``what`` is named in errors.

    Args:
        offered: more arguments, by name: it is given those that it requires, and that are not among ``options``.

    Raises:
        ConfigError: there is none, it requires an argument that is not there, or it fails.
    """
    module_name, _, attribute = path.partition(":")
    try:
        with _found_in(_folder_of(module_name)):
            module = _of_file(Path(module_name)) if module_name.endswith(".py") else import_module(module_name)
            if not hasattr(module, attribute):
                raise _NotCalled(f"{module_name} has no {attribute!r}{_nearest(attribute, module)}")
            made_by = getattr(module, attribute)
            own = options if offered is None else _given(made_by, offered, options)
            return made_by(*arguments, **own)
    except _NotCalled as error:
        raise ConfigError(f"{what} {path!r} cannot be built: {error}") from None
    except Exception as error:  # it is the user's code: anything may come out of it
        # What reads somebody's data may repeat them in what it says went wrong.
        said = in_short(error) if what == "data" else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{what} {path!r} cannot be built: {said}") from error


_MOST_LISTED = 20
"""Names of a module that a message lists."""


def _nearest(name: str, module: ModuleType) -> str:
    """Return a clause that points at what ``module`` has; nothing of a module that has much."""
    known = [own for own, value in vars(module).items() if not (own.startswith("_") or isinstance(value, ModuleType))]
    return f": {did_you_mean(name, known)}" if 0 < len(known) <= _MOST_LISTED else ""


def _given(made_by: Callable[..., Any], offered: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options``, and what of ``offered`` the function or class ``made_by`` requires beside them."""
    try:
        parameters = signature(made_by).parameters.values()
    except (TypeError, ValueError):  # some that are built into Python say nothing of their arguments
        return dict(options)
    by_name = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) and one.default is one.empty]
    required = [name for name in by_name if name not in options]
    lacking = [name for name in required if name not in offered]
    if lacking:
        those = ", ".join(f"{name}={value}" for name, value in offered.items())
        raise _NotCalled(
            f"it requires {', '.join(lacking)}, which nothing gives: add --set model.options.{lacking[0]}=VALUE, or a default; an argument "
            f"with one of these names is given without that: {those}"
        )
    return {**{name: offered[name] for name in required}, **options}


def _of_file(path: Path) -> ModuleType:
    # A name of its own: the file may be called as a module that others mean. By the path, so that one file is one module.
    name = f"_ldpfl_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    spec = util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    module = util.module_from_spec(spec)
    sys.modules[name] = module  # so that classes defined there can be copied and saved
    spec.loader.exec_module(module)
    return module


def _folder_of(module: str) -> Path | None:
    """Return where what is named may have others beside it: a file's own folder, or the current one if nowhere else is a module so called.

    What is installed, and what lies elsewhere, needs nothing of the folder that one happens to be in, which may be somebody else's.
    """
    if module.endswith(".py"):
        return Path(module).resolve().parent
    return Path.cwd() if util.find_spec(module.partition(".")[0]) is None else None


@contextmanager
def _found_in(folder: Path | None) -> Iterator[None]:
    """Let modules of ``folder`` be found, after all others: what is installed keeps its name."""
    if folder is None:
        yield
        return
    sys.path.append(str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
