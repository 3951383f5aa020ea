"""``ldpfl attack gan``: one command from a run folder to figures and pictures, and one line for every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from conftest import CommandLine
from ldpfl.attacks import GanConfig, attack as gan_attack
from ldpfl.attacks.on_run import Attacker, AttackPlan
from ldpfl.errors import ConfigError
from ldpfl.experiments import Runner, read_config
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.report.images import draw_image_grid, draw_side_by_side
from ldpfl.server import RoundMetrics

pytestmark = pytest.mark.usefixtures("extractors")

QUICK = ("--steps", "2")


class Quiet:
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def started(self, label: str, rounds: int, done: tuple[RoundMetrics, ...], metric: str) -> None: ...
    def clients_done(self, done: int, total: int) -> None: ...
    def round_done(self, metrics: RoundMetrics) -> None: ...

    def warn(self, message: str) -> None:
        self.warnings.append(message)


class StopsAfterFirst(Quiet):
    def round_done(self, metrics: RoundMetrics) -> None:
        raise KeyboardInterrupt


def made(folder: Path, config_file: Path, data: Path, *overrides: str) -> Path:
    config = read_config(config_file, ["training.rounds=1", "shuffling.channel=direct", *overrides])
    Runner(data, torch.device("cpu"), Quiet(), lambda path, result: None).run(config, RunFolder(folder), baseline=False)
    return folder


@pytest.fixture
def run(tmp_path: Path, config_file: Path, tiny_data: Path) -> Path:
    """A private run of one round in which client 0 holds no image of label 4."""
    return made(tmp_path / "run", config_file, tiny_data, "data.private_label=4")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != ".lock"}


@pytest.mark.slow
def test_an_attack_writes_figures_and_pictures_and_leaves_the_run_as_it_was(ldpfl: CommandLine, run: Path, tiny_data: Path) -> None:
    before = contents(run)
    outcome = ldpfl("attack", "gan", run, *QUICK, "--data-dir", tiny_data)
    assert outcome.code == 0, outcome.err
    assert contents(run) == before
    for word in ("label 4", "Fréchet distance", "duchi, epsilon 2", "unprotected model", "floor", "other classes", "classifier ("):
        assert word in outcome.out, word
    assert "too few for 64 features" in outcome.out
    assert "holds images" not in outcome.err
    out = run / "attacks" / "gan-4"
    result = json.loads((out / "attack.json").read_text(encoding="utf-8"))
    assert [row["kind"] for row in result["rows"]] == ["protected", "unprotected", "floor", "other classes"]
    assert (result["label"], result["own_of_label"], result["attacking_client"]) == (4, 0, 0)
    assert result["plan"]["gan"]["steps"] == 2
    # Five test images of the label there are, so that many are compared.
    assert {(d["real"], d["other"]) for row in result["rows"] for d in row["distances"]} == {(5, 5)}
    assert {d["extractor"] for row in result["rows"] for d in row["distances"]} == {result["extractor"]}
    assert result["rows"][3]["shares"][0] < 0.5 < result["rows"][2]["shares"][0]
    for name in ("real", "protected", "unprotected", "side-by-side"):
        with Image.open(out / f"{name}.png") as picture:
            assert picture.format == "PNG"


@pytest.mark.slow
@pytest.mark.thorough
def test_a_second_call_makes_nothing_again_and_a_damaged_part_is_made_again(
    ldpfl: CommandLine, run: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command: list[str | Path] = ["attack", "gan", run, *QUICK, "--seeds", "2", "--data-dir", tiny_data, "--out", "out", "--json"]
    first = ldpfl(*command)
    assert json.loads(first.out)["plan"]["seeds"] == [0, 1]
    kept = contents(Path("out"))
    attacked: list[int] = []

    def counted(*arguments: object) -> object:
        attacked.append(1)
        return gan_attack(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("ldpfl.attacks.on_run.attack", counted)
    monkeypatch.setattr("ldpfl.experiments.runner.simulate", lambda *arguments: pytest.fail("trained again"))
    assert ldpfl(*command).out == first.out
    assert (len(attacked), contents(Path("out"))) == (0, kept)

    damaged = Path("out/images/protected-1.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-9])
    assert ldpfl(*command).out == first.out
    assert (len(attacked), contents(Path("out"))) == (1, kept)
    # Other settings make other images: nothing of theirs is taken for the new ones.
    assert ldpfl(*command, "--steps", "3", "--seeds", "1").code == 0
    assert len(attacked) == 3


@pytest.mark.slow
@pytest.mark.thorough
def test_an_interrupted_attack_is_gone_on_with(run: Path, tiny_data: Path, tmp_path: Path) -> None:
    plan, cpu = AttackPlan(gan=GanConfig(steps=2)), torch.device("cpu")
    with pytest.raises(KeyboardInterrupt):
        Attacker(tiny_data, cpu, StopsAfterFirst()).run(RunFolder(run), plan, tmp_path / "stopped")
    resumed, _ = Attacker(tiny_data, cpu, Quiet()).run(RunFolder(run), plan, tmp_path / "stopped")
    whole, _ = Attacker(tiny_data, cpu, Quiet()).run(RunFolder(run), plan, tmp_path / "whole")
    assert resumed == whole


@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_without_protection_is_attacked_once(ldpfl: CommandLine, config_file: Path, tiny_data: Path, tmp_path: Path) -> None:
    run = made(tmp_path / "open", config_file, tiny_data, "mechanism.name=none", "data.private_label=4")
    result = json.loads(ldpfl("attack", "gan", run, *QUICK, "--data-dir", tiny_data, "--json").out)
    assert [row["kind"] for row in result["rows"]] == ["unprotected", "floor", "other classes"]
    assert result["epsilon"] is None
    assert not (run / "attacks/gan-4/protected.png").exists()


@pytest.mark.slow
@pytest.mark.thorough
def test_the_unprotected_model_is_the_runs_own_without_noise(run: Path, config_file: Path, tiny_data: Path, tmp_path: Path) -> None:
    overrides = ("data.private_label=4", "mechanism.name=none", "mechanism.perturbed=weights")
    open_run = made(tmp_path / "open", config_file, tiny_data, *overrides)
    plan, attacker = AttackPlan(gan=GanConfig(steps=2)), Attacker(tiny_data, torch.device("cpu"), Quiet())
    protected, _ = attacker.run(RunFolder(run), plan, tmp_path / "first")
    unprotected, _ = attacker.run(RunFolder(open_run), plan, tmp_path / "second")
    rows = {row.kind: row for row in protected.rows}
    assert rows["unprotected"] == unprotected.rows[0]
    assert rows["protected"] != unprotected.rows[0]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_label_that_the_client_holds_is_warned_of(ldpfl: CommandLine, run: Path, tiny_data: Path) -> None:
    outcome = ldpfl("attack", "gan", run, *QUICK, "--label", "5", "--data-dir", tiny_data, "--out", "out")
    assert outcome.code == 0
    assert "client 0, the attacker, holds images of label 5 itself" in outcome.err
    assert "data.private_label=5" in outcome.err


def test_mistakes_get_one_line_and_write_nothing(ldpfl: CommandLine, run: Path, config_file: Path, tiny_data: Path, tmp_path: Path) -> None:
    data: list[str | Path] = ["--data-dir", tiny_data, "--out", "out"]
    assert "no run" in ldpfl.refused("attack", "gan", "nowhere", *data)
    assert "0 to 9" in ldpfl.refused("attack", "gan", run, "--label", "10", *data)
    assert "images must be at least 2, got 1" in ldpfl.refused("attack", "gan", run, "--images", "1", *data)
    assert "steps" in ldpfl.refused("attack", "gan", run, "--steps", "0", *data)
    assert "no-data-here" in ldpfl.refused("attack", "gan", run, "--data-dir", "no-data-here", "--out", "out")
    shared = made(tmp_path / "shared", config_file, tiny_data)
    assert "--label" in ldpfl.refused("attack", "gan", shared, *data)
    config = run / "config.toml"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace('"logistic-regression"', '"nowhere.at.all:Model"'), encoding="utf-8")
    assert "nowhere.at.all" in ldpfl.refused("attack", "gan", run, *data)
    config.write_text(text, encoding="utf-8")
    (run / "result.json").unlink()
    line = ldpfl.refused("attack", "gan", run, *data)
    assert "has finished 1 of 1 round: finish it" in line
    assert "--resume" in line
    assert not Path("out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [(), (1, 1), (-1,), (2**63,)])
def test_seeds_that_do_not_differ_or_are_too_large_are_refused(seeds: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="seeds"):
        AttackPlan(seeds=seeds)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_grid_shows_every_pixel_in_its_place(channels: int, tmp_path: Path) -> None:
    images = torch.randint(0, 256, (7, channels, 5, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    draw_image_grid(tmp_path / "grid.png", images, columns=3, rows=2)
    with Image.open(tmp_path / "grid.png") as picture:
        assert picture.size == (2 * (3 * 6 + 2), 2 * (2 * 7 + 2))
        for number in range(6):  # the seventh has no place
            left, top = number % 3 * 6 + 2, number // 3 * 7 + 2
            for row in range(5):
                for column in range(4):
                    expected = tuple(images[number, :, row, column].tolist()) * (3 // channels)
                    assert picture.getpixel((2 * (left + column), 2 * (top + row))) == expected


def test_panels_wrap_into_rows_and_keep_their_places(tmp_path: Path) -> None:
    """Nine panels of one dark image each: three rows of three, none over another, and the tallest sets a row's height."""
    panels = [(f"panel {number}", torch.full((1, 1, 30 + 10 * (number == 4), 60), 10 * number, dtype=torch.uint8)) for number in range(9)]
    draw_side_by_side(tmp_path / "nine.png", panels)
    gap, margin, width = 2, 16, 2 * (60 + 2 * 2)
    heights = [2 * (height + 2 * gap) for height in (30, 40, 30)]
    with Image.open(tmp_path / "nine.png") as picture:
        assert picture.size == (3 * width + 4 * margin, sum(heights) + 7 * margin)
        for number in range(9):
            row, place = divmod(number, 3)
            left, top = margin + place * (width + margin), 2 * margin + sum(heights[:row]) + 2 * margin * row
            assert picture.getpixel((left + 2 * gap, top + 2 * gap)) == (10 * number,) * 3
            assert picture.getpixel((left - 1, top)) == (255,) * 3
    draw_side_by_side(tmp_path / "two.png", panels[:2])
    with Image.open(tmp_path / "two.png") as picture:
        assert picture.size == (2 * width + 3 * margin, heights[0] + 3 * margin)


def test_pictures_repeat_byte_by_byte_and_refuse_what_is_no_image(tmp_path: Path) -> None:
    images = torch.zeros(3, 1, 4, 4, dtype=torch.uint8)
    for name in ("a.png", "b.png"):
        draw_side_by_side(tmp_path / name, [("left", images), ("right", images)])
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    for bad in (images[:0], images.float(), images[0], torch.zeros(1, 2, 4, 4, dtype=torch.uint8)):
        with pytest.raises(ConfigError, match="a grid needs images"):
            draw_image_grid(tmp_path / "c.png", bad)
    with pytest.raises(ConfigError, match="panel"):
        draw_side_by_side(tmp_path / "c.png", [])
    assert not (tmp_path / "c.png").exists()
