"""Recognise folders that ldpfl wrote and that hold no run, and say what to do with each."""

from __future__ import annotations

from pathlib import Path

SWEEP = "sweep.json"
"""File that marks the folder of a sweep."""

PRIVATE = "private"
"""Folder with all trials, within that of a tuning. It must not be handed on."""

RELEASE = "release"
"""Folder with the chosen trial, within that of a tuning. It may be handed on."""

TUNED = "tuned.json"
"""File with the result and the guarantee of a tuning, in the folder of its release."""

GUARANTEE = "guarantee.json"
"""File with the guarantee of an exported model."""


def trials_mark(folder: Path) -> Path:
    """Return the file that marks ``folder`` as the private folder of a tuning, and describes the tuning."""
    return folder / "PRIVATE-tuning.json"


def describe_other_folder(folder: Path) -> str:
    """Return what ``folder`` is and what to do with it, if ldpfl wrote it for something else than a run; "" otherwise."""
    if (folder / SWEEP).exists():
        return f"{folder} is the folder of a sweep: give one of its runs, {folder / 'runs'}/*"
    if trials_mark(folder / PRIVATE).exists():
        if not (folder / RELEASE / TUNED).exists():  # the last file of a tuning
            return f"{folder} is the folder of a tuning that is not finished: start the same command again to go on"
        return f"{folder} is the folder of a tuning: the same command prints its result again, and its model is in its folder {RELEASE!r}"
    if (folder / TUNED).exists():
        return (
            f"{folder} is the release of a tuning, and no run: it is handed on as it is. Its guarantee, settings and notes are in {TUNED}, "
            "and ldpfl predict takes the folder. It has no ledger and no certificate, because the ledger of one trial does not count the "
            "others"
        )
    if (folder / GUARANTEE).exists():
        return (
            f"{folder} is an exported model, and no run: it is handed on as it is. README.md describes it, ldpfl predict takes the folder, "
            "and ldpfl verify checks its certificate; for anything else give the folder of the run"
        )
    return ""
