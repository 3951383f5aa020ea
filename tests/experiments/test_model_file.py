"""A folder that somebody hands on: whatever its files say, one error comes of it, soon and without much memory."""

from __future__ import annotations

import json
import resource
import shutil
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import load_file, save_file

from ldpfl import DataError, LdpflError, api

pytestmark = pytest.mark.slow

MOST_BYTES = 32 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    frame = pd.DataFrame({"age": np.arange(80) % 50 + 20.0, "town": ["a", "b"] * 40, "sick": ["no", "yes", "yes", "no"] * 20})
    found = tmp_path_factory.mktemp("model")
    few = {"training.rounds": 1, "data.bounds": {"age": [0, 100]}, "data.buckets": 4, "model.name": "mlp", "model.options": {"hidden": 3}}
    api.run(data=frame, target="sick", count=4, settings=few, folder=found / "run", baseline=False, progress=False)
    api.export(found / "run", found / "given")
    return found / "given"


ROWS = pd.DataFrame({"age": [30.0, 40.0], "town": ["a", "c"]})


def copied(folder: Path, to: Path, **files: bytes | dict[str, Any]) -> Path:
    """A copy of ``folder`` with other contents in some JSON files, by their first names."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    for name, content in files.items():
        (to / f"{name}.json").write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return to


def parts(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return json.loads((folder / "model.json").read_text()), json.loads((folder / "encoding.json").read_text())


@pytest.mark.thorough
def test_a_folder_that_claims_a_huge_model_takes_no_memory(folder: Path, tmp_path: Path) -> None:
    """Three million columns by a thousand classes were 12 GB, allocated before they were found not to fit."""
    model, encoding = parts(folder)
    classes = [f"class {place}" for place in range(1000)]
    words = {"town": [f"{place}" for place in range(100_000)]}
    wide = {
        **encoding,
        "classes": classes,
        "outputs": 1000,
        "width": 100_001,
        "data": {**encoding["data"], "categories": words, "words": []},
    }
    claims: tuple[dict[str, Any], ...] = (
        {"model": {**model, "shape": [100_001], "outputs": 1000, "options": {"hidden": 65536, "depth": 64}}, "encoding": wide},
        {"model": {**model, "name": "logistic-regression", "options": {}, "shape": [100_001], "outputs": 1000}, "encoding": wide},
        {"model": model, "encoding": {**encoding, "width": 3_000_000}},
        {"model": {**model, "options": {"hidden": 65536}}},
        {"model": {**model, "shape": [1 << 24] * 9}},
    )
    for place, claim in enumerate(claims):
        tracemalloc.start()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(DataError, match="damaged"):
            api.predict(copied(folder, tmp_path / f"{place}", **claim), ROWS)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2 * MOST_BYTES
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 8 * MOST_BYTES


def test_a_text_of_which_millions_of_words_are_kept_is_refused(folder: Path, tmp_path: Path) -> None:
    model, encoding = parts(folder)
    data = {**encoding["data"], "text": "town", "columns": [], "words": [], "bounds": {}, "length": 1 << 24, "vocabulary": 4096}
    claim = copied(folder, tmp_path, encoding={**encoding, "width": 1 << 24, "data": data}, model={**model, "vocabulary": 4096})
    with pytest.raises(DataError, match="words of a text, more than 65,536"):
        api.predict(claim, ROWS)


def test_weights_of_another_model_are_named(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = min(tensors)
    for changed in ({**tensors, name: tensors[name][:1].clone()}, {**tensors, "more": tensors[name].clone()}, {}):
        place = copied(folder, tmp_path / f"{len(changed)}")
        save_file(changed, place / "model.safetensors")
        with pytest.raises(DataError, match=r"of another model: expected '[\w.]+' of shape .*, found"):
            api.predict(place, ROWS)


def test_a_folder_of_before_is_told_of(folder: Path, tmp_path: Path) -> None:
    place = copied(folder, tmp_path)
    (place / "model.json").unlink()
    with pytest.raises(DataError, match=r"model\.json is missing: restore the file from a backup$"):
        api.predict(place, ROWS)
    (place / "model.safetensors").unlink()
    with pytest.raises(LdpflError, match=r"has no model\.json: it holds no finished run; give the folder of a finished run"):
        api.predict(place, ROWS)
    (place / "config.toml").touch()  # as in the folder of a run that was interrupted
    with pytest.raises(LdpflError, match=r"it holds no finished run; finish the run with ldpfl run --resume --out /"):
        api.predict(place, ROWS)


@pytest.mark.parametrize("name", ["model.safetensors", "encoding.json"])
def test_a_missing_file_of_a_model_is_named(folder: Path, tmp_path: Path, name: str) -> None:
    place = copied(folder, tmp_path)
    (place / name).unlink()
    with pytest.raises(DataError, match=rf"{name} is missing: restore the file from a backup$"):
        api.predict(place, ROWS)


def test_missing_files_of_a_finished_run_are_refused_and_written_again(folder: Path, tmp_path: Path) -> None:
    names = ["model.safetensors", "model.json", "encoding.json", "ledger.json", "metrics.jsonl"]
    rows = tmp_path / "rows.csv"
    pd.DataFrame({"age": np.arange(80) % 50 + 20.0, "sick": ["no", "yes", "yes", "no"] * 20}).to_csv(rows, index=False)
    place = tmp_path / "run"
    few = {"training.rounds": 1, "model.name": "logistic-regression"}
    api.run(data=rows, target="sick", count=4, settings=few, folder=place, baseline=False, progress=False)
    written = {name: (place / name).read_bytes() for name in names}
    (place / "encoding.json").unlink()
    with pytest.raises(DataError, match=r"encoding\.json is missing: restore the file from a backup, or let ldpfl run --resume"):
        api.export(place, tmp_path / "out")
    (place / "ledger.json").unlink()
    with pytest.raises(DataError, match=r"ledger\.json is missing"):
        api.account(place)
    for name in names:
        (place / name).unlink(missing_ok=True)
    api.run(folder=place, resume=True, progress=False)
    assert {name: (place / name).read_bytes() for name in names} == written
    (place / "checkpoint.jsonl").unlink()
    with pytest.raises(DataError, match=r"checkpoint\.jsonl is missing"):
        api.run(folder=place, resume=True, progress=False)
    (place / "checkpoint.safetensors").unlink()
    (place / "metrics.jsonl").unlink()
    for use in (partial(api.run, resume=True, progress=False), partial(api.run, more_rounds=1, resume=True, progress=False), api.load_run):
        with pytest.raises(DataError, match=r"checkpoint\.safetensors is missing beside result\.json of a finished run: restore the file"):
            use(folder=place)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def refused_or_right(place: Path) -> None:
    """A change may be of no effect; what has one is a single error of ours."""
    said = ""
    try:
        assert len(api.predict(place, ROWS)) == len(ROWS)
    except LdpflError as error:
        said = str(error)
    assert "\n" not in said
    assert len(said) < 2000


@pytest.mark.thorough_except("encoding")
@pytest.mark.parametrize("name", ["model", "encoding"])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_description_in_which_anything_stands_is_refused_or_right(name: str, folder: Path, tmp_path: Path, data: st.DataObject) -> None:
    whole = parts(folder)[name == "encoding"]
    inner = whole["data"] if name == "encoding" and data.draw(st.booleans()) else whole
    inner[data.draw(st.sampled_from([*inner, "more"]))] = data.draw(
        ANYTHING | st.sampled_from([1 << 24, 1 << 70, 0, -1, "given", "os:abort"])
    )
    refused_or_right(copied(folder, tmp_path / "claim", **{name: whole}))


@pytest.mark.thorough_except("encoding.json")
@pytest.mark.parametrize("name", ["model.json", "encoding.json", "model.safetensors"])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_of_which_bytes_are_changed_or_missing_is_refused_or_right(
    name: str, folder: Path, tmp_path: Path, data: st.DataObject
) -> None:
    place = copied(folder, tmp_path / "claim")
    content = bytearray((folder / name).read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, min(len(content), 400) - 1))] = data.draw(st.integers(0, 255))
    (place / name).write_bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])
    refused_or_right(place)


NONE = (b"[" * 100_000, b'{"name":' * 50_000, b"\xff\xfe", b"", b"null", b"1e999", b'{"name": NaN}')


@pytest.mark.parametrize("name", ["model", "encoding"])
def test_what_is_no_description_is_refused(name: str, folder: Path, tmp_path: Path) -> None:
    for content in NONE:
        with pytest.raises(DataError, match=rf"{name}\.json is damaged"):
            api.predict(copied(folder, tmp_path, **{name: content}), ROWS)


def test_a_description_that_has_no_end_is_not_read(folder: Path, tmp_path: Path) -> None:
    place = copied(folder, tmp_path)
    with (place / "encoding.json").open("r+b") as file:
        file.truncate(1 << 33)
    with pytest.raises(DataError, match="at most 16,777,216"):
        api.predict(place, ROWS)
