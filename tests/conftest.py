"""Fixtures that several tests share: an isolated cache, a tiny data set in the Hugging Face layout, and the command line."""

from __future__ import annotations

import atexit
import gc
import io
import itertools
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import settings
from numpy.typing import NDArray
from PIL import Image
from pyarrow import parquet

from ldpfl.api import running
from ldpfl.cli import main
from ldpfl.data import Dataset, Samples, load
from ldpfl.util.files import write_text

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # some tests draw the pictures that features were learnt from

# Keeps the library "datasets" out of the user's home and off the network: it reads these when first imported, by whichever test file.
os.environ.update(HF_HOME=mkdtemp(prefix="ldpfl-tests-hugging-face-"), HF_HUB_OFFLINE="1")
atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)

# One thread each, as under make: several workers share the cores, and a fork of a process whose threads have worked may hang.
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))

# How long an example takes says how busy the machine is. Continuous integration tries more of them.
settings.register_profile("untimed", deadline=None, max_examples=100 if os.environ.get("CI") else 40)
settings.load_profile("untimed")

# To a logger that hands nothing on, pytest adds its handlers before each step of each test; PyTorch has fifty of them.
for logger in logging.root.manager.loggerDict.values():
    if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
        logger.propagate = True

Pixels = NDArray[np.uint8]


@pytest.hookimpl(tryfirst=True)  # before "-m" chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as ``thorough`` the settings of a test that ``thorough_for`` names, and those that ``thorough_except`` does not name."""
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            named = [item.callspec.id in mark.args for mark in item.iter_markers("thorough_for")]
            unnamed = [item.callspec.id not in mark.args for mark in item.iter_markers("thorough_except")]
            if any(named) or any(unnamed):
                item.add_marker("thorough")


def pytest_collection_finish() -> None:
    """Leave out of each later search for garbage what was made until here, the libraries: it takes longer than most tests do."""
    gc.collect()
    gc.freeze()


CLASSES = 10


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what fixtures of a whole file make out of the user's home: they come before ``cache``, which is each test's own."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LDPFL_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patched.delenv("LDPFL_DATA_DIR", raising=False)
        yield


@pytest.fixture(autouse=True)
def no_module_of_another_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget modules that a test wrote and imported: another test's app or package may have the same name."""
    before = set(sys.modules)
    yield
    written = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(written):
            del sys.modules[name]


_NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every test, and every process it starts, its own cache folder, and no default data folder.

    The folder is made once it is used, or holds the decoded images of ``tiny_data``, where a test has that.
    """
    folder = tmp_path_factory.getbasetemp() / f"cache-{next(_NUMBERS)}"
    if "tiny_data" in request.fixturenames:
        shutil.copytree(request.getfixturevalue("decoded_data"), folder)
    monkeypatch.setenv("LDPFL_CACHE_DIR", str(folder))
    monkeypatch.delenv("LDPFL_DATA_DIR", raising=False)
    monkeypatch.setenv("LDPFL_REPORT", "no")  # a page is accounted round by round
    if request.node.get_closest_marker("draws") is None:
        monkeypatch.setattr(running, "draw_score_curve", _noted)
    return folder


def _noted(path: Path, result: dict[str, Any]) -> None:
    """Write what a curve would be drawn of in its place: most tests that run something do not look at it."""
    write_text(path, json.dumps([result["score_per_round"], result.get("noise_free_score_per_round")]))


def digits(count: int, *, seed: int, shape: tuple[int, ...] = (20, 20)) -> tuple[Pixels, list[int]]:
    """Return noisy images with a bright bar whose place tells the label, and the labels."""
    generator = np.random.default_rng(seed)
    labels = [index % CLASSES for index in range(count)]
    images = generator.integers(0, 120, (count, *shape), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[2 * label : 2 * label + 2] = 255
    return images, labels


def write_split(
    data_dir: Path,
    name: str,
    split: str,
    images: Sequence[Pixels] | Pixels,
    labels: Sequence[int | str | None],
    *,
    columns: tuple[str, str] = ("image", "label"),
) -> Path:
    """Write one parquet file as the Hugging Face hub serves it: PNG bytes and labels, described in the schema's metadata."""
    image, label = columns
    kind = {"dtype": "string" if any(isinstance(entry, str) for entry in labels) else "int64", "_type": "Value"}
    table = pa.table(
        {
            image: pa.array([{"bytes": _png(pixels), "path": None} for pixels in images], type=_IMAGE),
            label: pa.array(labels),
        }
    )
    features = {image: {"_type": "Image"}, label: kind}
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path = data_dir / name / f"{split}-00000-of-00001.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path)
    return path


_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def _png(pixels: Pixels) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder whose ``mnist`` holds 200 train and 50 test images of 20x20."""
    folder = tmp_path_factory.mktemp("data")
    write_split(folder, "mnist", "train", *digits(200, seed=1))
    write_split(folder, "mnist", "test", *digits(50, seed=2))
    return folder


@pytest.fixture(scope="session")
def decoded_data(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that holds the decoded images of ``tiny_data``, and nothing else."""
    folder = tmp_path_factory.mktemp("decoded")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LDPFL_CACHE_DIR", str(folder))
        load("mnist", tiny_data)
    return folder


@pytest.fixture
def extractors(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what classifiers of images were trained for the next test that asks for this."""
    own, kept = cache / "extractors", tmp_path_factory.getbasetemp() / "extractors"
    if kept.exists():
        shutil.copytree(kept, own)
    yield
    if own.exists() and not kept.exists():
        shutil.copytree(own, kept)


@pytest.fixture(scope="session")
def tiny_task() -> Dataset:
    """The same images as ``tiny_data``, already decoded."""
    return Dataset("mnist", _decoded(200, seed=1), _decoded(50, seed=2), CLASSES, (0.1307,), (0.3081,), "tiny")


def _decoded(count: int, *, seed: int) -> Samples:
    images, labels = digits(count, seed=seed)
    return Samples(torch.from_numpy(images)[:, None], torch.tensor(labels))


@pytest.fixture(scope="session")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config that trains on ``tiny_data`` in well under a second."""
    path = tmp_path_factory.mktemp("config") / "tiny.toml"
    path.write_text(TINY_TOML, encoding="utf-8")
    return path


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


class CommandLine:
    """Calls ``ldpfl`` in this process, as the console script does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: str | Path) -> Outcome:
        self._monkeypatch.setattr(sys, "argv", ["ldpfl", *map(str, arguments)])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ending:
            main()
        captured = self._capsys.readouterr()
        assert ending.value.code is None or isinstance(ending.value.code, int)
        return Outcome(ending.value.code or 0, captured.out, captured.err)

    def refused(self, *arguments: str | Path) -> str:
        """Expect exit code 2, one line on stderr, nothing on stdout; return the line."""
        outcome = self(*arguments)
        assert outcome.code == 2
        assert outcome.out == ""
        lines = outcome.err.splitlines()
        assert len(lines) == 1, outcome.err
        assert lines[0].startswith("ldpfl: ")
        return lines[0]


@pytest.fixture
def ldpfl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> CommandLine:
    """Called in an empty folder, on one thread, and wide enough that tables do not break."""
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setenv("COLUMNS", "160")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return CommandLine(monkeypatch, capsys)


TINY_TOML = """
name = "tiny"
seed = 3

[data]
name = "mnist"

[model]
name = "logistic-regression"

[clients]
count = 8

[training]
rounds = 3
epochs = 1
batch_size = 10
learning_rate = 0.05

[mechanism]
name = "duchi"
epsilon = 2.0
perturbed = "update"
[shuffling]
channel = "direct"

[ranges]
rule = "fixed"
radius = 0.02
"""
