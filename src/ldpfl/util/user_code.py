"""Code that a user names: ``package.module:name`` or ``file.py:name``, the current folder included."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, util
from inspect import signature
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from ldpfl.errors import ConfigError, error_without_data
from ldpfl.util.suggestions import did_you_mean

GIVEN = "given"
"""Name of data, or of a model, that was passed as an object. Only a caller that passes it again can rerun such a config."""


PRETRAINED = "hf:"
"""Prefix of the name of a pretrained model of ``transformers``; a folder or a name of the hub follows."""


TIMM = "timm:"
"""Prefix of the name of features of ``timm``; a name or a folder follows. Policies treat it as an import path."""


def is_pretrained(name: str) -> bool:
    """Whether ``name`` is that of a pretrained model. Policies treat it as an import path: nodes load no model that a server chose."""
    return name.startswith(PRETRAINED)


def named_model(name: str) -> str:
    """Return a model's name for a config: ``hf:FOLDER`` if ``name`` is the folder of a pretrained model, else ``name`` itself.

    A folder inside the current folder counts only if it holds a pretrained model: it may happen to have the name of a built-in model.
    """
    reference = name.removeprefix(PRETRAINED)
    is_path = reference.startswith((".", "/", "~")) and not is_code(reference)
    path = Path(reference).expanduser() if is_path else Path(reference)
    is_folder = path.is_dir() and (is_pretrained(name) or len(path.parts) > 1 or any(path.glob("*config.json")))
    return f"{PRETRAINED}{path.resolve()}" if is_path or is_folder else name


def public_name(name: str) -> str:
    """Return the setting ``name`` for pages that others see. Only the last part of a path, to code or to a pretrained model, is kept."""
    file, colon, attribute = name.partition(":")
    if colon and lies_in_file(name):
        return f"{Path(file).name}{colon}{attribute}"
    prefix = next((known for known in (PRETRAINED, TIMM) if name.startswith(known)), "")
    reference = name.removeprefix(prefix)
    return f"{prefix}{Path(reference).name}" if reference.startswith(("/", "~")) or Path(reference).is_absolute() else name


def import_library(name: str) -> Any:
    """Import the optional library ``name``, such as ``transformers``, when it is needed first.

    Raises:
        ConfigError: the library is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(f'pretrained models need {name} ({error_without_data(error)}): pip install "ldpfl[transformers]"') from error


def is_code(name: str) -> bool:
    """Whether ``name`` counts as an import path, whose code would run. Names such as ``hf:gpt2`` count, too."""
    return ":" in name


def lies_in_file(name: str) -> bool:
    """Whether the code that ``name`` names lies in a file, not in an importable module."""
    return name.partition(":")[0].endswith(".py")


class _CannotCall(Exception):
    """Error inside :func:`call_user_code`: the function or class does not exist, or requires arguments that are not given."""


def call_user_code(what: str, path: str, *arguments: Any, offered: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """Call the function or class at ``path`` and return the result.

    Args:
        what: name of the result in errors, such as "model".
        path: ``package.module:name`` or ``file.py:name``.
        offered: further arguments by name. Only those are passed that the function requires and that are not among ``options``.

    Raises:
        ConfigError: there is no such function, it requires an argument that is not given, or it fails.
    """
    module_name, _, attribute = path.partition(":")
    try:
        with _importable_from(_folder_to_search(module_name)):
            module = _import_file(Path(module_name)) if module_name.endswith(".py") else import_module(module_name)
            if not hasattr(module, attribute):
                raise _CannotCall(f"{module_name} has no {attribute!r}{_suggestion(attribute, module)}")
            factory = getattr(module, attribute)
            keywords = options if offered is None else _with_required(factory, offered, options)
            return factory(*arguments, **keywords)
    except _CannotCall as error:  # its text says all: the traceback has no line of the user's code
        raise ConfigError(f"{what} {path!r} cannot be built: {error}") from None
    except Exception as error:  # the user's code may raise anything
        # The text of an error of code that reads data may repeat values of the data.
        problem = error_without_data(error) if what == "data" else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{what} {path!r} cannot be built: {problem}") from error


_MAX_LISTED = 20
"""Maximum number of a module's names that a message lists."""


def _suggestion(name: str, module: ModuleType) -> str:
    """Return a clause that suggests a name in ``module`` for the unknown ``name``; empty if the module has too many names."""
    names = [defined for defined, value in vars(module).items() if not (defined.startswith("_") or isinstance(value, ModuleType))]
    return f": {did_you_mean(name, names)}" if 0 < len(names) <= _MAX_LISTED else ""


def _with_required(factory: Callable[..., Any], offered: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options``, and the arguments in ``offered`` that the function or class ``factory`` requires beside ``options``."""
    try:
        parameters = signature(factory).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have no signature
        return dict(options)
    without_default = [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and parameter.default is parameter.empty
    ]
    required = [name for name in without_default if name not in options]
    missing = [name for name in required if name not in offered]
    if missing:
        offered_text = ", ".join(f"{name}={value}" for name, value in offered.items())
        raise _CannotCall(
            f"it requires {', '.join(missing)}, but got no value: add --set model.options.{missing[0]}=VALUE, or give it a default in the "
            f"code. Arguments with these names get a value from the data: {offered_text}"
        )
    return {**{name: offered[name] for name in required}, **options}


def _import_file(path: Path) -> ModuleType:
    """Run a Python file as a module, and return the module. A file that was run before with the same content is not run again."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    # The name is unique, because the file may have the name of another module. It follows from path and content, so that a class keeps its
    # identity while the file is unchanged, and a changed file is a new module.
    digest = hashlib.sha256(str(path.resolve()).encode() + b"\0" + path.read_bytes()).hexdigest()
    name = f"{_FILE_MODULE}{path.stem}_{digest[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{path} cannot be loaded as a Python file (.py)")
    module = util.module_from_spec(spec)
    sys.modules[name] = module  # so that classes defined there can be copied and saved
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


_FILE_MODULE = "_ldpfl_"
"""Prefix of the name of a module that a file was run as."""


@dataclass(frozen=True)
class ModuleSource:
    """Where another process finds a module that Python finds there only with help: a user's file, or a module in the user's folder.

    Attributes:
        name: name of the module in ``sys.modules``.
        file: the module's file.
        folder: folder in which the module, and what it imports itself, are searched.
    """

    name: str
    file: Path
    folder: Path

    @classmethod
    def of(cls, name: str) -> ModuleSource | None:
        """Return the source of the module ``name``; None if it has no file, or if every process finds the module by its name."""
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if module is None or file is None:
            return None
        path = Path(file).resolve()
        if name.startswith(_FILE_MODULE):  # a file that was run under a name of ldpfl's
            return cls(name, path, path.parent)
        top = name.partition(".")[0]
        if top == "__main__" or any(finder.find_spec(top, None) for finder in sys.meta_path):  # every process finds it
            return None
        is_package = hasattr(module, "__path__")  # its file is the __init__.py in a folder of its name
        return cls(name, path, path.parents[name.count(".") + int(is_package)])  # the folder that has its top-level package

    def module(self) -> ModuleType:
        """Return the module. It is imported if this process has not imported it.

        Raises:
            ImportError: there is no such module in the folder, or its file was changed after it was run.
        """
        if self.name in sys.modules:
            return sys.modules[self.name]
        with _importable_from(self.folder):
            if not self.name.startswith(_FILE_MODULE):
                return import_module(self.name)
            if not self.file.is_file():
                raise ModuleNotFoundError(f"there is no file {self.file}", name=str(self.file))
            module = _import_file(self.file)
        if module.__name__ != self.name:
            raise ImportError(f"{self.file} was changed after this run had begun: restore it, or start a new run")
        return module

    def attribute(self, qualified_name: str) -> Any:
        """Return the function or class ``qualified_name``, such as ``Net`` or ``Net.Block``, of the module.

        Raises:
            ImportError: the module cannot be imported, see :meth:`module`.
            AttributeError: it has no such attribute.
        """
        return attrgetter(qualified_name)(self.module())


def _folder_to_search(module: str) -> Path | None:
    """Return the folder to search for ``module`` and its imports: a file's own folder, or the current one for a module by name.

    The result is None for an installed module. It does not need the current folder, which may be somebody else's.
    """
    if module.endswith(".py"):
        return Path(module).resolve().parent
    is_installed = util.find_spec(module.partition(".")[0]) is not None
    return None if is_installed else Path.cwd()


@contextmanager
def _importable_from(folder: Path | None) -> Iterator[None]:
    """Make modules in ``folder`` importable within the block. Installed modules of the same name come first."""
    if folder is None:
        yield
        return
    sys.path.append(str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
