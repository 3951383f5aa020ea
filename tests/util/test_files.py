"""A file that the system refuses is left as it was, and the error says why and what to do; JSON is strict."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from full_disk import files_up_to
from ldpfl.errors import DataError, LdpflError, WriteError
from ldpfl.experiments.config import read_config
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.experiments.sweep_config import load_sweep
from ldpfl.privacy import Ledger
from ldpfl.util.files import (
    MAX_CONFIG_BYTES,
    MAX_LINE_BYTES,
    MAX_METRICS_BYTES,
    MAX_RESULT_BYTES,
    MAX_ROUNDS_BYTES,
    check_events,
    from_json,
    from_json_lines,
    from_toml,
    make_folder,
    read_text,
    remove_leftovers,
    replace_atomically,
    to_json,
    write_text,
)
from ldpfl_verify import CertificateError, read_certificate
from ldpfl_verify.bounded_json import MAX_CERTIFICATE_BYTES

REFUSALS = {
    errno.ENOSPC: ("no space left on the device of", "make room"),
    errno.EDQUOT: ("quota", "make room"),
    errno.EFBIG: ("larger than", "ulimit -f"),
    errno.EROFS: ("read-only file system", "make it writable"),
    errno.EACCES: ("cannot be written: Permission denied", "correct the cause"),
}


@pytest.mark.parametrize(("number", "expected"), REFUSALS.items())
def test_what_the_system_refuses_is_one_line_and_changes_nothing(number: int, expected: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    write_text(path, "old")

    def refused(temporary: Path) -> None:
        temporary.write_text("half of it", encoding="utf-8")
        raise OSError(number, "Permission denied")

    with pytest.raises(WriteError, match=expected[0]) as caught, replace_atomically(path) as temporary:
        refused(temporary)
    assert str(tmp_path) in str(caught.value)
    assert expected[1] in caught.value.remedy
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_tensors_that_do_not_fit_are_refused_like_text(tmp_path: Path) -> None:
    """Their library has an error class of its own, which tells of the system in its text only."""
    path = tmp_path / "model.safetensors"
    with replace_atomically(path) as temporary:
        save_file({"weights": torch.ones(10)}, temporary)
    before = path.read_bytes()
    with (
        files_up_to(20_000),
        pytest.raises(WriteError, match=r"model\.safetensors would become larger"),
        replace_atomically(path) as temporary,
    ):
        save_file({"weights": torch.ones(10_000)}, temporary)
    with files_up_to(20_000), pytest.raises(WriteError, match="larger"):
        write_text(tmp_path / "text", "x" * 30_000)
    with pytest.raises(SafetensorError, match="header"), replace_atomically(path):  # no fault of the disk
        raise SafetensorError("invalid header")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_in_the_file_s_place_is_named_and_stays(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(WriteError, match=r"/metrics\.jsonl cannot be written: Is a directory"):
        write_text(tmp_path / "metrics.jsonl", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_folder_below_a_file_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="Not a directory"):
        make_folder(tmp_path / "file" / "below")


def test_what_a_killed_process_left_is_removed_whoever_named_it(tmp_path: Path) -> None:
    for name in (".model.safetensors.k3x9_a1b.partial", ".tmpAb12Cd"):  # the second is made by safetensors
        (tmp_path / name).touch()
    (tmp_path / "tmpfile").touch()
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tmpfile"]


_WRITES_FOR_EVER = """
import sys
from pathlib import Path
from ldpfl.util.files import write_text

folder, text = Path(sys.argv[1]), sys.stdin.read()
while True:
    write_text(folder / "config.toml", text)
    write_text(folder / "config.toml", text + text.upper())
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_a_killed_writer_leaves_a_whole_file_that_no_line_is_missing_from(tmp_path: Path) -> None:
    """A config that ends with some line cannot be told from one that was cut off there: it must never come to be."""
    text = "a line of a config\n" * 50_000
    for pause in np.random.default_rng(0).uniform(0, 0.1, 6):
        command = [sys.executable, "-c", _WRITES_FOR_EVER, str(tmp_path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as writer:
            assert writer.stdin is not None
            writer.stdin.write(text)
            writer.stdin.close()
            while not (tmp_path / "config.toml").exists() and writer.poll() is None:
                time.sleep(0.01)
            time.sleep(pause)
            writer.kill()
        assert writer.returncode == -signal.SIGKILL
        assert (tmp_path / "config.toml").read_text() in (text, text + text.upper())
        remove_leftovers(tmp_path)
        (tmp_path / "config.toml").unlink()


def test_json_is_strict_and_the_json_of_before_can_be_read() -> None:
    value = {"a": nan, "b": [1.5, -inf, (inf, 2)], "c": "NaN", "d": True}
    text = to_json(value)
    assert json.loads(text, parse_constant=pytest.fail) == {"a": None, "b": [1.5, None, [None, 2]], "c": "NaN", "d": True}
    assert from_json(json.dumps(value)) == from_json(text)
    finite = {"a": [1, 2.5, None], "b": {"c": 1e300}}
    assert to_json(finite, indent=2) == json.dumps(finite, indent=2)
    with pytest.raises(ValueError, match="too deeply"):
        from_json("[" * 100_000)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names here")
def test_a_pipe_or_a_device_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(OSError, match="no regular file"):
            read_text(tmp_path / name)


@pytest.mark.parametrize("text", ["a = " + "[" * 100_000, "a = " + "9" * 5_000, "a." * 60_000 + "a = 1", "x = {" + '"a" . ' * 9 + "a = 1}"])
def test_toml_that_is_too_much_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"too deeply|digits|Exceeds|more than 8 parts"):
        from_toml(text)


@pytest.mark.parametrize("quote", ['"', "'"])
def test_a_quote_before_the_end_of_a_string_hides_no_key_of_many_parts(quote: str) -> None:
    """The text is TOML: the string ends with its fourth quote, and the rest of both lines is a comment."""
    text = f"x = {quote * 3}a{quote * 4} # {quote} {quote * 3}\n{{key}} = 1 # {quote * 3}\n"
    assert from_toml(text.format(key="a.b")) == {"x": f"a{quote}", "a": {"b": 1}}
    with pytest.raises(ValueError, match="more than 8 parts"):
        from_toml(text.format(key="a." * 20 + "b"))


@pytest.mark.parametrize("start", ["", "x=", 'x="', 'x="""', "x='''"])
@pytest.mark.parametrize(
    "repeated", ['"\\', '\\"', "'", "''''", '\\"""', '""""', '"""\\', '"\n', "#'\n", "a.", ". ", '"a".', "[a]\n", "{a="]
)
def test_the_time_to_read_toml_grows_with_its_length_and_not_with_the_square(start: str, repeated: str) -> None:
    """A text 16 times as long may take 16 times as long; the square would be 256 times."""

    def cost_s(length: int) -> float:
        text, costs = start + repeated * (length // len(repeated)), []
        for _ in range(3):
            began = time.process_time()
            with suppress(ValueError):
                from_toml(text)
            costs.append(time.process_time() - began)
        return min(costs)

    assert cost_s(64_000) < 80 * max(cost_s(4_000), 2e-5)


def test_dots_in_strings_comments_and_numbers_are_not_those_of_a_key() -> None:
    dots = "a." * 20
    text = f"""# {dots}\nx = [{"1.5, " * 20}]\ny = "{dots}"\nz.a.b = '''\n{dots}'''"""
    assert from_toml(text)["z"] == {"a": {"b": dots}}


def test_a_file_larger_than_any_of_its_kind_is_refused_and_the_bound_is_named(tmp_path: Path) -> None:
    """What is made of such a file takes many times its bytes; most of these take no room on the disk."""
    path = tmp_path / "config.toml"
    path.touch()
    os.truncate(path, MAX_CONFIG_BYTES + 1)
    with pytest.raises(OSError, match=r"1,048,577 bytes, expected at most 1,048,576"):
        read_text(path)
    os.truncate(path, MAX_CONFIG_BYTES)
    assert len(read_text(path)) == MAX_CONFIG_BYTES
    readers = {
        MAX_CONFIG_BYTES: (read_config, load_sweep_file),
        MAX_CERTIFICATE_BYTES: (read_certificate,),
        MAX_RESULT_BYTES: (lambda path: RunFolder(path.parent).result(),),
        MAX_ROUNDS_BYTES: (Ledger.load,),
        MAX_METRICS_BYTES: (lambda path: list(from_json_lines(path)),),
    }
    for most, functions in readers.items():
        for name in ("config.toml", "result.json"):
            (tmp_path / name).touch()
            os.truncate(tmp_path / name, most + 1)
        for function in functions:
            with pytest.raises((LdpflError, CertificateError, OSError), match=f"at most {most:,}"):
                function(path)


def load_sweep_file(path: Path) -> object:
    return load_sweep(str(path))


def test_json_of_very_many_empty_parts_is_refused_before_any_is_made(tmp_path: Path) -> None:
    text = "[" + "[]," * 2_000_000 + "{}]"
    with pytest.raises(ValueError, match="2,000,002 lists and objects, expected at most 1,048,576"):
        from_json(text)
    with pytest.raises(DataError, match="2,000,002 lists and objects"):
        Ledger.from_json(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" + '"abc",' * 3_000_000 + "0]", "3,000,000 commas, expected at most 2,621,440"),
        ("{" + ",".join(f'"{number}" : 0' for number in range(1_100)) + "}", "more than 1,024 different names"),
        ("{" + ",".join(f'"{{\\"{number}":0' for number in range(1_100)) + "}", "more than 1,024 different names"),
    ],
    ids=["short texts", "names", "names with quotes and braces"],
)
def test_a_ledger_of_more_values_or_names_than_any_run_writes_is_refused_before_it_is_parsed(
    text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 MiB of them would take 1 GB."""
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    with pytest.raises(DataError, match=said):
        Ledger.from_json(text)
    with pytest.raises(ValueError, match=said):
        check_events(text)


@pytest.mark.parametrize("text", ['"' + '\\"' * 500_000 + "\\", '"' * 500_001, '"a"' + " " * 500_000, '{"a": "' + "b" * 500_000])
def test_names_of_fields_are_counted_in_one_pass_whatever_the_text(text: str) -> None:
    began = time.process_time()
    check_events(text)
    assert time.process_time() - began < 5  # a pass that begins again at each quote takes minutes


def test_a_line_of_metrics_is_no_longer_than_a_round_needs(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"round": 1}\n"' + "x" * MAX_LINE_BYTES + '"\n', encoding="utf-8")
    lines = from_json_lines(path)
    assert next(lines) == {"round": 1}
    with pytest.raises(ValueError, match=r"line 2 has 4,194,306 characters"):
        next(lines)


def many(entry: str, count: int = 400_000) -> str:
    return ",".join(f'"{number}":{entry}' for number in range(count))


def a_list_of(entry: str, count: int = 400_000) -> str:
    return f"[{','.join([entry] * count)}]"


WRONG = {
    "a score a round": ("result.json", f'{{"score_per_round": {a_list_of(chr(34) * 2)}}}', "is damaged"),
    "caveats": ("result.json", f'{{"caveats": {a_list_of("0")}}}', "is damaged"),
    "layers": ("result.json", f'{{"layers": {{{many("1")}}}}}', "is damaged"),
    "classes": ("model.json", f'{{"classes": {a_list_of("0")}}}', "is damaged"),
    "fields of a model": ("model.json", f"{{{many('1')}}}", "more than 262,144 fields"),
    "entries of a model": ("model.json", f'{{"classes": {a_list_of("0", 3_000_000)}}}', "or 2,097,152 entries"),
    "fields of a certificate": ("certificate.json", f"{{{many('1')}}}", "at most 16,384 names, got 400,000"),
    "software": ("certificate.json", f'{{"statement": {{"software": {{{many("1")}}}}}}}', "is not a certificate"),
    "assumptions": (
        "certificate.json",
        f'{{"statement": {{"guarantees": [{{"assumptions": {a_list_of("0")}}}]}}}}',
        "is not a certificate",
    ),
}
READERS: dict[str, Callable[[Path], object]] = {
    "result.json": lambda path: RunFolder(path.parent).result(),
    "model.json": lambda path: RunFolder(path.parent).model_file(),
    "certificate.json": read_certificate,
}


@pytest.mark.thorough_for("layers", "fields of a certificate", "software")
@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_in_a_large_file_is_refused_without_an_error_for_each_part(what: str, tmp_path: Path) -> None:
    """Of each wrong part pydantic keeps an error, a thousand bytes of memory; that took six times as long as parsing, or longer."""
    name, text, reason = WRONG[what]
    (tmp_path / name).write_text(text, encoding="utf-8")

    def is_quick() -> bool:
        began = time.process_time()
        json.loads(WRONG["layers"][1])
        parsed = time.process_time()
        with pytest.raises((DataError, CertificateError), match=reason):
            READERS[name](tmp_path / name)
        return time.process_time() - parsed < 3 * (parsed - began)

    assert any(is_quick() for _ in range(4))  # on a busy machine times are sometimes twice as long
