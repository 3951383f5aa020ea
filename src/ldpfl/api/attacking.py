"""Attack runs and arrival times, and save an attack's figures and pictures in a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ldpfl.api.running import displayed
from ldpfl.attacks import GanConfig
from ldpfl.attacks.compare import AttackedRun, Comparison, check_runs, compared
from ldpfl.attacks.linkage import LinkagePlan, LinkageResult, LinkageSetting, linkage
from ldpfl.attacks.on_run import Attacker, AttackImages, AttackPlan, RunAttack, attack_folder
from ldpfl.errors import ConfigError
from ldpfl.experiments.build import choose_device
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.report.images import draw_image_grid, draw_side_by_side
from ldpfl.report.linkage import draw_linkage
from ldpfl.report.progress import ProgressDisplay
from ldpfl.util.files import make_folder, write_text

__all__ = ["COMPARISON", "FIGURES", "PLOT", "SIDE_BY_SIDE", "AttackPlan", "AttackResult", "Comparison", "GanConfig"]
__all__ += ["LinkagePlan", "LinkageResult", "LinkageSetting", "RunAttack", "attack_linkage", "attack_runs"]

SIDE_BY_SIDE, COMPARISON = "side-by-side.png", "comparison.json"
"""Files of an attack on runs."""

FIGURES, PLOT = "linkage.json", "linkage.svg"
"""Files of an attack on arrival times."""

_MAX_PANEL_IMAGES = 64
"""Maximum number of images in a panel."""


@dataclass(frozen=True)
class AttackResult:
    """Figures of an attack on one run, or of the attacks on several.

    Attributes:
        found: figures of the one run, or the comparison of several.
        folder: folder of figures and pictures.
    """

    found: RunAttack | Comparison
    folder: Path

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as the folder's file has them."""
        return self.found.to_dict()


def attack_runs(
    runs: Sequence[Path],
    plan: AttackPlan,
    *,
    out: Path | None = None,
    data_dir: Path | None = None,
    device: str = "auto",
    progress: bool | ProgressDisplay = True,
) -> AttackResult:
    """Reconstruct images of one class from the models of finished simulations, and draw pictures.

    Each run is attacked with and without its protection. Finished parts of an earlier attack are kept. The result is the attack on a single
    run, or the comparison of several runs.

    Args:
        out: folder of the attack on one run, by default inside the run's folder; or of the comparison of several runs.
        progress: as for :func:`ldpfl.run`.

    Raises:
        ConfigError: a run is not finished, or was on other data; the runs cannot be compared; or there are several runs and no ``out``.
        DataError: the data cannot be read, or hold too few images of the class.
    """
    folders = [RunFolder(run) for run in runs]
    with displayed(progress) as display:
        attacker = Attacker(data_dir, choose_device(device), display, display.phase)
        if len(folders) == 1:
            target = out or attack_folder(folders[0], plan.label)
            attack, _ = _attack(attacker, folders[0], plan, target)
            return AttackResult(attack, target)
        if out is None:
            raise ConfigError(
                f"{len(folders)} runs are to be compared, but --out is missing: name the folder of their comparison with --out"
            )
        check_runs(folders, plan)
        make_folder(out)
        attacked: list[AttackedRun] = []
        pictures: dict[Path, AttackImages] = {}
        for number, folder in enumerate(folders, start=1):
            display.next_run(f"{number}/{len(folders)}: {folder.path}")
            result, drawn = _attack(attacker, folder, plan, attack_folder(folder, plan.label))
            pictures[folder.path] = _for_panel(drawn)
            attacked.append(AttackedRun(folder.path, folder.config(), result))
    comparison = compared(attacked)
    write_text(out / COMPARISON, json.dumps(comparison.to_dict(), indent=2) + "\n")
    draw_side_by_side(out / SIDE_BY_SIDE, _panels(comparison, pictures))
    return AttackResult(comparison, out)


def attack_linkage(
    setting: LinkageSetting, plan: LinkagePlan, *, out: Path | None = None, progress: Callable[[int, int], None] = lambda done, total: None
) -> LinkageResult:
    """Simulate how well reports are linked to clients by when they arrive; see :func:`ldpfl.attacks.linkage.linkage`.

    Args:
        out: folder for the figures and a plot; without one nothing is written.
        progress: called with (rounds done, rounds); may raise to end the attack.

    Raises:
        ConfigError: a number is out of range.
        WriteError: ``out`` cannot be created or written.
    """
    if out is not None:
        make_folder(out)  # before the work, so that a mistake costs no time
    result = linkage(setting, plan, progress)
    if out is not None:
        write_text(out / FIGURES, json.dumps(result.to_dict(), indent=2) + "\n")
        draw_linkage(out / PLOT, result)
    return result


def _attack(attacker: Attacker, folder: RunFolder, plan: AttackPlan, target: Path) -> tuple[RunAttack, AttackImages]:
    """Attack the run in ``folder``, draw its pictures into the folder ``target``, and return figures and pictures."""
    result, pictures = attacker.run(folder, plan, target)
    _draw(target, pictures, result)
    return result, pictures


def _for_panel(pictures: AttackImages) -> AttackImages:
    """Return only as many images as a panel shows, to save memory with many runs."""
    protected = None if pictures.protected is None else pictures.protected[:_MAX_PANEL_IMAGES].clone()
    return AttackImages(pictures.real[:_MAX_PANEL_IMAGES].clone(), protected, pictures.unprotected[:_MAX_PANEL_IMAGES].clone())


def _panels(comparison: Comparison, pictures: dict[Path, AttackImages]) -> list[tuple[str, Tensor]]:
    """Return the heading and images of each panel: first real images, then those of the first run of each line of the comparison.

    Lines without protection come before protected ones. Lines without an accuracy are references, not attacks, and get no panel.
    """
    attacked_lines = sorted((line for line in comparison.lines if line.accuracies), key=lambda line: line.row.kind == "protected")
    first_runs = [pictures[line.runs[0]] for line in attacked_lines]
    panels = [(f"real, label {comparison.label}", first_runs[0].real)]
    for line, run_images in zip(attacked_lines, first_runs, strict=True):
        images = run_images.unprotected if line.row.kind == "unprotected" else run_images.protected
        if images is not None:
            panels.append((line.name, images))
    return panels


def _draw(out: Path, pictures: AttackImages, result: RunAttack) -> None:
    """Draw the images of an attack on one run: each set in a file of its own, and all sets side by side."""
    panels = [(f"real, label {result.label}", "real", pictures.real), ("unprotected", "unprotected", pictures.unprotected)]
    if pictures.protected is not None:
        panels.append((f"protected, {result.mechanism}", "protected", pictures.protected))
    for _, file_stem, images in panels:
        draw_image_grid(out / f"{file_stem}.png", images)
    draw_side_by_side(out / SIDE_BY_SIDE, [(heading, images) for heading, _, images in panels])
