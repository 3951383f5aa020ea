"""The attack on every finished run of a sweep, and the results of earlier attacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ldpfl.attacks.on_run import Attacker, AttackPlan, attack_folder
from ldpfl.errors import DataError
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.experiments.sweep_config import Cell
from ldpfl.util.files import MAX_RESULT_BYTES, from_json, read_text

OnAttack = Callable[[int, int, Cell], None]
"""Called with (number of an attack, from 1; how many there are; the run) when it begins."""


def attack_sweep(todo: Sequence[Cell], out: Path, attacker: Attacker, plan: AttackPlan, on_attack: OnAttack) -> None:
    """Attack each finished run of ``todo``, in the sweep's folder ``out``, that was not attacked yet. A run that occurs twice counts once.

    Raises:
        LdpflError: as for :meth:`ldpfl.attacks.on_run.Attacker.run`.
    """
    finished = {cell.folder_name: cell for cell in todo if cell.folder(out).result() is not None}
    not_attacked = [cell for cell in finished.values() if distances_of(cell.folder(out), plan) is None]
    for number, cell in enumerate(not_attacked, start=1):
        on_attack(number, len(not_attacked), cell)
        folder = cell.folder(out)
        attacker.run(folder, plan, attack_folder(folder, plan.label))


def distances_of(folder: RunFolder, plan: AttackPlan) -> tuple[float, ...] | None:
    """Return the stored distances of an attack by ``plan`` on the run in ``folder``, one for each seed. None if no such attack was made.

    For a run without protection, they are those of the unprotected model.

    Raises:
        DataError: the stored result is damaged.
    """
    path = attack_folder(folder, plan.label) / "attack.json"
    if not path.exists():
        return None
    try:
        stored = from_json(read_text(path, MAX_RESULT_BYTES))
        stored_plan = stored["plan"]
        if (stored_plan["images"], stored_plan["seeds"], stored_plan["gan"]["steps"]) != (plan.images, list(plan.seeds), plan.gan.steps):
            return None
        rows = {row["kind"]: row["distances"] for row in stored["rows"]}
        # A run without protection has no row "protected".
        return tuple(float(distance["value"]) for distance in rows.get("protected", rows["unprotected"]))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(
            f"{path} is damaged: {getattr(error, 'strerror', None) or type(error).__name__}. Remove it, and attack the run again"
        ) from error
