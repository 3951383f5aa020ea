"""What Flower imports of an app, before any wrapper is there, is found without running it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ldpfl
from ldpfl.errors import ConfigError
from ldpfl.flower.app_imports import bare_client, unwrapped_code
from ldpfl.flower.policy_init import offer_of

MINE = "from ldpfl.flower import LdpClientApp\nfrom mine.training import app as own\napp = LdpClientApp(own)\n"
QUIET = (
    '"""Docs."""\nfrom __future__ import annotations\nfrom ldpfl.flower import LdpClientApp\n\napp = LdpClientApp("mine.training:app")\n'
)

# What is installed, and what is looked for, takes seconds to find out: once, in one worker.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("imports-of-apps")]


def app_in(folder: Path, client: str = QUIET, package: str = "") -> Path:
    (folder / "mine").mkdir()
    (folder / "pyproject.toml").write_text('[tool.flwr.app.components]\nclientapp = "mine.client_app:app"\n', encoding="utf-8")
    (folder / "mine" / "__init__.py").write_text(package, encoding="utf-8")
    (folder / "mine" / "client_app.py").write_text(client, encoding="utf-8")
    return folder


@pytest.mark.thorough
def test_the_wrapper_alone_is_quiet(tmp_path: Path) -> None:
    assert list(unwrapped_code(app_in(tmp_path, package='"""Mine."""\n__version__ = "1"\n__all__ = ["a"]\n'))) == []
    assert list(unwrapped_code(Path(__file__).parents[2] / "examples" / "flower-mnist")) == []


@pytest.mark.parametrize(
    ("client", "package", "found"),
    [
        ("raise SystemExit('never run')\n", "", ["mine/client_app.py:1"]),
        (QUIET, "from mine.training import app\n", ["mine/__init__.py:1"]),
        (QUIET, "from . import training\n", ["mine/__init__.py:1"]),
        (f"import pandas\n{QUIET}", "", ["mine/client_app.py:1"]),
        (QUIET + "DATA = load('patients.csv')\n", "", [f"mine/client_app.py:{QUIET.count(chr(10)) + 1}"]),
        (
            "from ldpfl.flower import LdpClientApp\nfrom mine.training import app as own\napp = LdpClientApp(own)\n",
            "",
            ["mine/client_app.py:2", "mine/client_app.py:3"],
        ),
    ],
)
def test_what_else_is_run_is_named(client: str, package: str, found: list[str], tmp_path: Path) -> None:
    assert list(unwrapped_code(app_in(tmp_path, client, package))) == found


BARE = "from flwr.clientapp import ClientApp\napp = ClientApp()\n@app.train()\ndef train(message, context): ...\n"


@pytest.mark.parametrize(
    ("client", "is_bare"),
    [
        (BARE, True),
        ("from flwr.client import ClientApp as A\nimport numpy\napp: A = A(client_fn=numpy.load)\n", True),
        ("import flwr\napp = flwr.clientapp.ClientApp()\n", True),
        ("import flwr as fl\napp = fl.client.ClientApp(client_fn=lambda context: app)\n", True),
        (QUIET, False),
        (MINE, False),
        ("from ldpfl.flower import LdpClientApp as ClientApp\napp = ClientApp('mine.training:app')\n", False),
        (BARE + "from ldpfl.flower import LdpClientApp\napp = LdpClientApp(app)\n", False),
        (BARE + "if True:\n    app = wrapped(app)\n", False),
        (BARE + "from mine.training import *\n", False),
        (BARE + "def wrap():\n    global app\n", False),
        ("def ClientApp(): ...\n" + BARE, False),
        ("from mine.training import app\n", False),
        ("app = made()\n", False),
        ("app = (\n", False),
    ],
)
def test_a_client_is_called_bare_only_where_that_is_certain(client: str, is_bare: bool, tmp_path: Path) -> None:
    app = app_in(tmp_path, client)
    assert bare_client(app) == ("mine.client_app:app" if is_bare else "")
    if is_bare:
        with pytest.raises(
            ConfigError, match=r"'mine\.client_app:app' is a ClientApp without a wrapper, so its replies leave without noise"
        ):
            offer_of(str(app))


def test_a_package_of_the_app_s_own_is_not_taken_for_another_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "ldpfl").mkdir()
    assert list(unwrapped_code(app_in(tmp_path))) == ["mine/client_app.py:3"]


@pytest.mark.parametrize(
    ("file", "text", "found"),
    [
        ("mine/client_app/__init__.py", "import pandas\n", ["mine/client_app/__init__.py:1"]),  # Python takes it before the file
        ("secrets.py", "", ["secrets.py, which Python imports instead of the module secrets that other code needs: rename it"]),
        ("psutil/__init__.py", "", ["psutil, which Python imports instead of the module psutil that other code needs: rename it"]),
        ("docs/index.md", "", []),
        ("gmpy2.py", "", ["gmpy2.py, which Python imports instead of the module gmpy2 that other code needs: rename it"]),  # mpmath uses it
    ],
)
def test_modules_that_python_takes_in_place_of_others_are_named(file: str, text: str, found: list[str], tmp_path: Path) -> None:
    app = app_in(tmp_path)
    (app / file).parent.mkdir(exist_ok=True)
    (app / file).write_text(text, encoding="utf-8")
    assert list(unwrapped_code(app)) == found


def test_what_may_run_in_place_of_the_sources_is_named(tmp_path: Path) -> None:
    """Bytecode whose header says that nobody need compare it with its source; a package that says where else its modules lie."""
    app = app_in(tmp_path)
    cache = app / "mine" / "__pycache__"
    cache.mkdir()
    (cache / "client_app.cpython-311.pyc").write_bytes(b"")
    (app / "mine" / "__init__.py").write_text('__version__ = "1"\n__path__ = ["elsewhere"]\n', encoding="utf-8")
    bytecode = "mine/__pycache__/client_app.cpython-311.pyc, which Python may run in place of its source: delete it"
    assert list(unwrapped_code(app)) == [bytecode, "mine/__init__.py:2"]


def test_what_lies_elsewhere_cannot_be_checked_and_what_is_called_like_the_wrapper_is_none(tmp_path: Path) -> None:
    app = app_in(tmp_path, 'from ldpfl.models import import_module as LdpClientApp\napp = LdpClientApp("mine.training")\n')
    assert list(unwrapped_code(app)) == ["mine/client_app.py:1"]
    (app / "pyproject.toml").write_text('[tool.flwr.app.components]\nclientapp = "elsewhere.client:app"\n', encoding="utf-8")
    assert list(unwrapped_code(app)) == ["elsewhere, which is not in this folder and cannot be checked here"]


def test_ldpfl_s_own_client_needs_no_module_in_the_folder(tmp_path: Path) -> None:
    app = app_in(tmp_path)
    (app / "pyproject.toml").write_text('[tool.flwr.app.components]\nclientapp = "ldpfl.flower.apps:client_app"\n', encoding="utf-8")
    assert list(unwrapped_code(app)) == []
    (app / "ldpfl").mkdir()
    (app / "ldpfl" / "__init__.py").write_text("import os\n", encoding="utf-8")
    assert next(iter(unwrapped_code(app))) == "ldpfl/__init__.py:1"


def test_the_folder_may_be_named_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app_in(tmp_path, 'print("loud")\n')
    monkeypatch.chdir(tmp_path.parent)
    assert list(unwrapped_code(Path(tmp_path.name))) == ["mine/client_app.py:1"]


@pytest.mark.parametrize("name", ["evil-1.dist-info", "evil.egg-info", "evil.egg"])
def test_metadata_by_which_libraries_find_plug_ins_is_named(name: str, tmp_path: Path) -> None:
    app = app_in(tmp_path)
    (app / name).mkdir()
    assert list(unwrapped_code(app)) == [f"{name}, in which libraries look for code to run: delete it"]


@pytest.mark.parametrize("name", ["gmpy2", "pydot", "trio", "h2", "socksio"])
def test_what_is_looked_for_later_is_named_too(name: str, tmp_path: Path) -> None:
    """Some when the wrapper is imported, some when a node first calls its relay, in the process that charges."""
    app = app_in(tmp_path)
    (app / f"{name}.py").write_text("", encoding="utf-8")
    assert list(unwrapped_code(app)) == [f"{name}.py, which Python imports instead of the module {name} that other code needs: rename it"]


def test_a_folder_is_a_package_also_without_a_file_that_says_so(tmp_path: Path) -> None:
    app = app_in(tmp_path)
    (app / "pydot").mkdir()
    assert list(unwrapped_code(app)) == ["pydot, which Python imports instead of the module pydot that other code needs: rename it"]


@pytest.mark.thorough
def test_nothing_of_the_folder_that_one_is_in_is_run(tmp_path: Path) -> None:
    """Python takes modules from the current folder first, those that ldpfl means as well."""
    app = app_in(tmp_path)
    told = tmp_path / "told.txt"
    for name in ("json", "gmpy2", "torch", "ldpfl"):
        (app / f"{name}.py").write_text(f"open({str(told)!r}, 'a').write({name!r})\n", encoding="utf-8")
    code = "from pathlib import Path; from ldpfl.flower.app_imports import unwrapped_code; print(list(unwrapped_code(Path('.'))))"
    environment = {**os.environ, "PYTHONPATH": f"{Path(ldpfl.__file__).parents[1]}"}
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=app, env=environment, capture_output=True, text=True, check=True)
    assert all(f"{name}.py, which Python imports instead of the module" in done.stdout for name in ("json", "gmpy2", "torch", "ldpfl"))
    assert not told.exists()


@pytest.mark.parametrize("coding", ["utf-7", "unicode_escape", "raw_unicode_escape"])
def test_code_that_an_encoding_hides_is_found(coding: str, tmp_path: Path) -> None:
    """A line break that is none in UTF-8 ends the comment."""
    hidden = {"utf-7": "+AAo-open('x')", "unicode_escape": "\\nopen('x')", "raw_unicode_escape": "\\u000aopen('x')"}[coding]
    app = app_in(tmp_path, f"# coding: {coding}\n# a comment {hidden}\n")
    assert list(unwrapped_code(app)) == ["mine/client_app.py:3"]


def test_an_app_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        list(unwrapped_code(app_in(tmp_path, "def")))
    (tmp_path / "pyproject.toml").write_text("[tool]\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="has no `clientapp`"):
        list(unwrapped_code(tmp_path))
