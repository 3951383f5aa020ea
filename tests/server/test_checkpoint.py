"""A checkpoint comes back as it was, and a damaged one is refused by name."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ldpfl import LayerRanges
from ldpfl.errors import ConfigError, DataError, WriteError
from ldpfl.privacy import PureRelease
from ldpfl.server import Checkpoint, RoundMetrics, ServerState, check_log_size, round_log
from ldpfl.util.files import append_text
from ldpfl.util.quantities import MAX_ROUNDS


def example(rounds: int = 2) -> Checkpoint:
    history = tuple(
        RoundMetrics(number, 0.1 * number, 7, 2, {"a": 0.1, "b": 1 / 3}, {"a": 0.02, "b": 0.0}, {"a": 0.5, "b": 1e-9}, 1.25)
        for number in range(1, rounds + 1)
    )
    ranges = LayerRanges(torch.tensor([0.1, -1 / 3]), torch.tensor([0.5, 1e-9], dtype=torch.float64), (4, 3))
    weights = torch.tensor([0.0, -0.0, 1e-42, 1 / 3, -1e30, 2.0, 3.0])
    return Checkpoint(ServerState(rounds, weights, ranges), history)


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    saved, path = example(), tmp_path / "checkpoint.safetensors"
    saved.save(path)
    loaded = Checkpoint.load(path)
    assert loaded.history == saved.history
    assert loaded.state.round == 2
    assert loaded.state.weights.dtype == torch.float32
    assert loaded.state.weights.numpy().tobytes() == saved.state.weights.numpy().tobytes()
    assert torch.equal(loaded.state.ranges.center, saved.state.ranges.center)
    assert torch.equal(loaded.state.ranges.radius, saved.state.ranges.radius)
    assert loaded.state.ranges.sizes == (4, 3)


def test_saving_what_was_loaded_gives_the_same_bytes(tmp_path: Path) -> None:
    example().save(tmp_path / "a")
    Checkpoint.load(tmp_path / "a").save(tmp_path / "b")
    assert Checkpoint.load(tmp_path / "b").state.weights.equal(example().state.weights)
    assert Checkpoint.load(tmp_path / "b").history == example().history


def test_saving_replaces_the_older_one_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    example(1).save(path)
    example(3).save(path)
    assert Checkpoint.load(path).state.round == 3
    assert sorted(tmp_path.iterdir()) == [path.with_suffix(".jsonl"), path]


def test_a_failed_save_keeps_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, for instance, shows when the new file is flushed."""
    path = tmp_path / "checkpoint.safetensors"
    example(1).save(path)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteError, match="no space left"):
        example(2).save(path)
    assert path.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == [path.with_suffix(".jsonl"), path]
    assert Checkpoint.load(path).history == example(1).history


def test_figures_that_clients_measure_after_a_round_is_saved_are_added_to_the_log(tmp_path: Path) -> None:
    """What stands there stays, so that a crash in between leaves the round; a second process reads both and goes on."""
    path, round_ = tmp_path / "checkpoint.safetensors", example(2)
    round_.save(path)
    before = path.with_suffix(".jsonl").read_bytes()
    told = {"sums": [0.1, -1 / 3], "noise": 0.5, "records": 40, "stated": False, "edges": [0.5]}
    measured = replace(round_, history=(round_.history[0], replace(round_.history[1], at_clients=told)))
    measured.save(path)
    after = path.with_suffix(".jsonl").read_bytes()
    assert after.startswith(before)
    assert len(after) > len(before)
    loaded = Checkpoint.load(path)
    assert loaded.history == measured.history
    later = replace(loaded, state=replace(loaded.state, round=3), history=(*loaded.history, example(3).history[2]))
    later.save(path)
    assert path.with_suffix(".jsonl").read_bytes().startswith(after)
    assert Checkpoint.load(path).history == later.history


@pytest.mark.parametrize("power_cut", [False, True])
def test_a_process_that_is_killed_while_it_writes_leaves_the_older_one(power_cut: bool, tmp_path: Path) -> None:
    """At any byte of the log's new lines, or before the checkpoint that they belong to; the run then goes on."""
    path = tmp_path / "checkpoint.safetensors"
    log = path.with_suffix(".jsonl")
    example(2).save(path)
    before, kept = path.read_bytes(), log.stat().st_size
    example(3).save(path)
    after = log.read_bytes()
    for end in (kept, kept + 1, kept + 100, len(after) - 1, len(after)):
        path.write_bytes(before)
        log.write_bytes(after[:end] + bytes(len(after) - end if power_cut else 0))
        assert Checkpoint.load(path).history == example(2).history
        assert Checkpoint.load(path).state.round == 2
        example(3).save(path)
        assert log.read_bytes() == after
        assert Checkpoint.load(path).history == example(3).history


def test_a_round_writes_its_own_lines_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a long run takes time in proportion to its rounds; lines before stay the bytes that they were."""
    path, written = tmp_path / "checkpoint.safetensors", list[str]()

    def append(path: Path, text: str, size: int) -> None:
        written.append(text)
        append_text(path, text, size)

    monkeypatch.setattr(round_log, "append_text", append)
    for rounds in range(1, 40):
        example(rounds).save(path)
    assert len(written) == 38
    assert all(text.count("\n") == 1 and len(text) < 600 for text in written)
    assert Checkpoint.load(path).history == example(39).history


@pytest.mark.parametrize("other", [1, 5])
def test_a_checkpoint_of_another_run_is_replaced_with_its_log(other: int, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    elsewhere = replace(example(other), history=tuple(replace(metrics, seconds=9.5) for metrics in example(other).history))
    elsewhere.save(path)
    example(3).save(path)
    assert Checkpoint.load(path).history == example(3).history
    example(2).save(path)
    assert Checkpoint.load(path).history == example(2).history


@pytest.mark.thorough
def test_more_figures_than_a_header_of_safetensors_may_have_are_read_again(tmp_path: Path) -> None:
    """A header has at most 100 MB, which 160 layers and 6,000 rounds exceed, or here 110 rounds with a layer of a long name."""
    path, whole = tmp_path / "checkpoint.safetensors", example(110)
    whole = replace(whole, history=tuple(replace(one, noise_std={"x" * 1_000_000: 0.5}) for one in whole.history))
    whole.save(path)
    assert path.with_suffix(".jsonl").stat().st_size > 100_000_000
    assert Checkpoint.load(path).history == whole.history


@pytest.mark.parametrize("damage", ["cut", "changed", "none", "a pipe", "another run's"])
def test_a_log_that_is_not_the_checkpoint_s_is_refused_by_name(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    log = path.with_suffix(".jsonl")
    example(3).save(path)
    text = log.read_text(encoding="utf-8")
    log.unlink()
    match damage:
        case "cut":
            log.write_text(text[:-1], encoding="utf-8")
        case "changed":
            log.write_text(text.replace("1.25", "1.26"), encoding="utf-8")
        case "a pipe":
            os.mkfifo(log)
        case "another run's":
            log.write_text(text.replace("0.02", "0.03") * 2, encoding="utf-8")
    said = r"checkpoint\.jsonl is missing" if damage == "none" else r"checkpoint\.safetensors is damaged: .*(checkpoint\.jsonl|bytes)"
    with pytest.raises(DataError, match=said):
        Checkpoint.load(path)


@pytest.mark.parametrize("size", [-1, True, 1.5, "8", None, 10**15])
def test_a_log_s_claimed_size_is_bounded(size: object, tmp_path: Path) -> None:
    extent = {"metrics": 1, "events": 0, "size": size, "digest": "", "last": ""}
    with pytest.raises(DataError, match=r"checkpoint\.safetensors is damaged"):
        Checkpoint.load(written(tmp_path, {}, log=str(extent).replace("'", '"').replace("True", "true").replace("None", "null")))


FIGURES = {"clients": 3, "uplink_bytes_per_client": 8, "clipped_fraction": {}, "noise_std": {}, "radius": {}, "seconds": 1.0}
WORDS = json.dumps({"round": 1, "score": "high", **FIGURES})
NO_FIGURES = [WORDS, "[" * 300_000, "[" + "[]," * 2_000_000 + "[]]", "{}", "[]", "7", '{"release": 1}', '{"round": 1}', " " * 5_000_000]


@pytest.mark.parametrize("line", NO_FIGURES, ids=lambda line: f"{line[:8]} of {len(line)}")
def test_lines_of_a_log_that_are_no_figures_are_refused(line: str, tmp_path: Path) -> None:
    """Whether they are nested without end, or take much more memory than bytes; also with a hash that fits."""
    text = f"{line}\n"
    extent = {"metrics": 1, "events": 0, "size": len(text), "digest": sha256(line.encode()).hexdigest(), "last": ""}
    path = written(tmp_path, {}, log=json.dumps(extent))
    path.with_suffix(".jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"checkpoint\.safetensors is damaged"):
        Checkpoint.load(path)


def test_a_run_whose_files_could_not_be_read_again_is_refused() -> None:
    """Before it begins, with a number of rounds that is not refused."""
    layers, release = [f"blocks.{layer}.weight" for layer in range(160)], PureRelease("harmony", 1.0, 160, "layer")
    check_log_size(layers, release, 6000)
    with pytest.raises(
        ConfigError, match=r"training\.rounds is 100,000, .* 160 layers the run's files would be too large to read after [\d,]+ rounds"
    ) as caught:
        check_log_size(layers, release, MAX_ROUNDS)
    possible = int(re.search(r"after ([\d,]+) rounds", str(caught.value))[1].replace(",", ""))  # type: ignore[index]
    assert possible > 15_000
    check_log_size(layers, release, possible)
    with pytest.raises(ConfigError, match="take a model with fewer layers"):
        check_log_size([f"{layer}" for layer in range(16_385)], release, 1)
    with pytest.raises(ConfigError, match=r"after [\d,]+ rounds"):
        check_log_size(["a"], replace(release, claim="x" * 5000), MAX_ROUNDS)
    check_log_size(["a"], release, MAX_ROUNDS)
    with pytest.raises(ConfigError, match="after 100,000 rounds"):  # as a server's own code may ask for
        check_log_size(["a"], release, MAX_ROUNDS + 1)


@pytest.mark.parametrize("keep", [0, 4, 8, 60, -200, -1])
def test_a_truncated_file_is_refused_by_name(keep: int, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    example().save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"checkpoint\.safetensors is damaged"):
        Checkpoint.load(path)


def test_tensors_without_a_checkpoint_s_figures_are_refused(tmp_path: Path) -> None:
    """A model file under the checkpoint's name, for instance."""

    path = tmp_path / "checkpoint.safetensors"
    save_file({"weights": torch.zeros(3), "center": torch.zeros(1), "radius": torch.ones(1)}, path)
    path.with_suffix(".jsonl").touch()
    with pytest.raises(DataError, match="damaged"):
        Checkpoint.load(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        Checkpoint.load(tmp_path / "nowhere")


CLAIMED = 50_000_000


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"weights": ("F32", [CLAIMED])}, "expected F32 of shape [7], found 'weights', F32 of shape [50000000]"),
        ({"weights": ("F16", [7])}, "expected F32 of shape [7], found 'weights', F16 of shape [7]"),
        ({"previous": ("F32", [CLAIMED])}, "found 'previous'"),
        ({"center": ("F64", [CLAIMED])}, "expected F64 of shape [2], found 'center'"),
        ({"another": ("F32", [7])}, "expected no tensor of this name, found 'another'"),
        ({"memory.sent": ("F16", [CLAIMED])}, "found 'memory.sent'"),
        ({"radius": None}, "it lacks the tensor 'radius'"),
    ],
)
def test_tensors_that_are_not_a_checkpoint_s_are_refused_by_what_the_header_says(
    tensors: dict[str, tuple[str, list[int]] | None], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few bytes may claim billions of values; none is read or converted."""
    path = written(tmp_path, tensors)
    for name in ("to", "float", "double"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("a tensor was converted"))
    with pytest.raises(DataError, match="is damaged: " + ".*" + re.escape(reason)):
        Checkpoint.load(path)


@pytest.mark.parametrize("field", ["sizes", "log"])
@pytest.mark.parametrize("text", [*NO_FIGURES, '["a"]', "[[]]"], ids=lambda text: f"{text[:8]} of {len(text)}")
def test_figures_that_are_none_are_refused(field: str, text: str, tmp_path: Path) -> None:
    """Whether they are nested without end, or take much more memory than bytes."""
    with pytest.raises(DataError, match=r"checkpoint\.safetensors is damaged"):
        Checkpoint.load(written(tmp_path, {}, **{field: text}))


def written(folder: Path, tensors: dict[str, tuple[str, list[int]] | None], **figures: str) -> Path:
    """Write a file that says what the example's does, but for ``tensors`` and ``figures``; its values take no room on the disk."""
    path = folder / "checkpoint.safetensors"
    example().save(path)
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    figures = {**header.pop("__metadata__"), **figures}
    told = {**{name: (entry["dtype"], entry["shape"]) for name, entry in header.items()}, **tensors}
    start, made = 0, {}
    for name, tensor in told.items():
        if tensor is not None:
            stop = start + math.prod(tensor[1]) * int(tensor[0][1:]) // 8
            made[name] = {"dtype": tensor[0], "shape": tensor[1], "data_offsets": [start, stop]}
            start = stop
    text = json.dumps({"__metadata__": figures, **made}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + start)
    return path


HUGE = 10**400


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"clients": HUGE}, "a number has 401 digits"),
        ({"clients": 10**20}, "lie between 0 and 1,000,000,000,000,000"),
        ({"round": -1}, "lie between 0 and"),
        ({"score": HUGE}, "a number has 401 digits"),
        ({"score": "high"}, "score in a round's metrics"),
        ({"seconds": None}, "seconds in a round's metrics"),
        ({"noise_std": [1.0]}, "noise_std in a round's metrics"),
        ({"at_clients": {"sums": "many", "noise": 1.0, "records": 5}}, "sums in a round's metrics"),
        ({"at_clients": {"sums": [1.0], "noise": 1.0, "records": 10**20}}, "records in a round's metrics"),
        ({"at_clients": {}}, "sums in a round's metrics"),
        ([], "expected a JSON object"),
        (7, "expected a JSON object"),
    ],
)
def test_a_line_of_the_log_that_is_of_another_kind_is_named(change: object, said: str, tmp_path: Path) -> None:
    """The log's digest finds accidents and no forger: what it lets through is looked at line by line."""
    path = tmp_path / "checkpoint.safetensors"
    example().save(path)
    lines = path.with_suffix(".jsonl").read_text().splitlines()
    lines[1] = json.dumps({**json.loads(lines[1]), **change} if isinstance(change, dict) else change)
    forge(path, lines)
    with pytest.raises(DataError, match=rf"checkpoint\.safetensors is damaged: checkpoint\.jsonl beside it, line 2: .*{re.escape(said)}"):
        Checkpoint.load(path)


@pytest.mark.parametrize("number", [str(HUGE), "-1", "100001", "one"])
def test_a_checkpoint_of_no_possible_round_is_damaged(number: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    example().save(path)
    forge(path, path.with_suffix(".jsonl").read_text().splitlines(), round=number)
    with pytest.raises(DataError, match=r"checkpoint\.safetensors is damaged"):
        Checkpoint.load(path)


def forge(path: Path, lines: list[str], **metadata: str) -> None:
    """Write ``lines`` as the log of the checkpoint at ``path``, with a digest that fits them, and change its ``metadata``."""
    text = "".join(f"{line}\n" for line in lines)
    path.with_suffix(".jsonl").write_text(text)
    digest = ""
    for line in lines:
        digest = sha256(f"{digest}{line}".encode()).hexdigest()
    with safe_open(path, framework="pt") as handle:
        found, tensors = dict(handle.metadata()), {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118  # no dict
    extent = {**json.loads(found["log"]), "size": len(text), "digest": digest}
    save_file(tensors, path, {**found, "log": json.dumps(extent), **metadata})
