"""Consoles that know few characters, and words that know many: every command prints something legible, and none fails of it."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pandas as pd
import pytest

import ldpfl as package
from conftest import CommandLine
from grids import each
from ldpfl.api.predicting import without_formulas
from ldpfl.cli import main
from ldpfl.errors import ConfigError
from ldpfl.experiments.config import parse_config
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.report.console import print_anything
from ldpfl.util.user_cache import cache_dir

EMOJI, ASTRAL, BROKEN = "\N{GRINNING FACE}", "\U00020bb7", "\udcff"


def printed(monkeypatch: pytest.MonkeyPatch, encoding: str, *arguments: str) -> tuple[int | str | None, str, str]:
    """Return the exit code of a command, and what it wrote to an output and an error stream that are strict about their ``encoding``."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
    with monkeypatch.context() as own:
        own.setattr(sys, "argv", ["ldpfl", *arguments])
        own.setattr(sys, "stdout", streams[0])
        own.setattr(sys, "stderr", streams[1])
        with pytest.raises(SystemExit) as ending:
            main()
        for stream in streams:
            stream.flush()
    out, err = (stream.buffer.getvalue().decode(encoding) for stream in streams)
    return ending.value.code, out, err


@each("encoding", ("ascii", "cp1252", "cp932", "utf-8"))
def test_no_console_is_too_poor_for_a_message(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = printed(monkeypatch, encoding, "run", f"no{EMOJI}{ASTRAL}{BROKEN}")
    assert (code, out) == (2, "")
    assert err.startswith("ldpfl: no recipe 'no")
    assert (f"{EMOJI}{ASTRAL}" if encoding == "utf-8" else "\\U0001f600\\U00020bb7") in err
    assert "\\udcff" in err


@pytest.mark.slow
@each("encoding", ("ascii", "cp1252", "cp932"))
def test_no_console_is_too_poor_for_tables(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = printed(monkeypatch, encoding, "settings", "data")
    assert not code
    assert "data.target" in out


def test_what_we_write_ourselves_is_spelled_as_people_do(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # which no encoding can be set of
    print_anything()
    print("91.20 ± 0.30 … é \N{BRAILLE PATTERN DOTS-1}", EMOJI)
    stream.flush()
    assert stream.buffer.getvalue() == b"91.20 +- 0.30 ... e * \\U0001f600\n"


@pytest.mark.slow
def test_names_beyond_the_basic_plane_go_through_a_run(ldpfl: CommandLine) -> None:
    words = [f"={EMOJI}", f"-{ASTRAL}"]
    rows = {
        f"age{EMOJI}": [place % 7 for place in range(60)],
        f"kind{ASTRAL}": [words[place % 2] for place in range(60)],
        f"site{EMOJI}": [f"{ASTRAL}{place % 3}" for place in range(60)],
        f"={EMOJI}": [words[place % 2] for place in range(60)],
    }
    table = Path(f"t{EMOJI}.csv")
    pd.DataFrame(rows).to_csv(table, index=False)
    few = ("--set", "training.rounds=1", "--set", f"name={EMOJI}", "--no-baseline", "--no-report")
    assert ldpfl("run", "--data", table, "--target", f"={EMOJI}", "--client", f"site{EMOJI}", "--out", f"r{EMOJI}", *few).code == 0
    predicted = ldpfl("predict", f"r{EMOJI}", table).out.splitlines()
    assert predicted[0].startswith(f"row,'={EMOJI},probability of -{ASTRAL},")
    assert {line.split(",")[1] for line in predicted[1:]} <= {f"'={EMOJI}", f"'-{ASTRAL}"}
    assert ldpfl("show", f"r{EMOJI}").out.startswith(EMOJI)


def test_names_that_are_no_text_are_refused_in_a_line(ldpfl: CommandLine) -> None:
    line = ldpfl.refused("run", "--data", f"t{BROKEN}.csv", "--target", "x", "--out", "run")
    assert "setting 'data.path' has bytes that are no text" in line
    assert "PYTHONUTF8=1" in line
    with pytest.raises(ConfigError, match="not valid UTF-8: choose another folder"):
        RunFolder(Path(f"run{BROKEN}")).check(parse_config("", origin="test"), resume=False)


def test_only_words_that_spreadsheets_would_run_are_changed() -> None:
    found = pd.DataFrame({"=sum": ["=1+1", "+x", "-no", "@a", "-1.5", "+2e3", "yes", "a=b"], "number": [-1.5] * 8})
    safe = without_formulas(found)
    assert list(safe.columns) == ["'=sum", "number"]
    assert list(safe["'=sum"]) == ["'=1+1", "'+x", "'-no", "'@a", "-1.5", "+2e3", "yes", "a=b"]
    assert list(safe["number"]) == [-1.5] * 8


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(*given: object, **named: object) -> Path:
        raise RuntimeError("Could not determine home directory")

    monkeypatch.delenv("LDPFL_CACHE_DIR", raising=False)
    for found in (homeless, lambda *given, **named: Path("~/.cache/ldpfl")):
        monkeypatch.setattr("ldpfl.util.user_cache.user_cache_path", found)
        assert cache_dir().parent == Path(os.devnull)  # no folder can be made there
    with pytest.raises(ConfigError, match="but the home folder that ~ means is unknown"):
        package.check(data="~nobody-at-all/t.csv")
