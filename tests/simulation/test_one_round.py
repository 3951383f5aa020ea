"""One round of the simulator enters few modules, and ``docs/one-round.md`` names them in the order in which they are entered."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch

import ldpfl
from ldpfl.data import Dataset
from ldpfl.experiments import load_recipe
from ldpfl.experiments.build import build
from ldpfl.simulation import simulate

PACKAGE = Path(ldpfl.__file__).parent
PAGE = PACKAGE.parents[1] / "docs" / "one-round.md"

MAX_MODULES = 27
"""Modules that a round may enter. Lower it with each module that a round no longer enters; never raise it."""

_STEP = re.compile(r"^\| `([\w.]+)` \| `([\w.]+)` \|", re.MULTILINE)
"""The module and the function at the head of a row of the page's tables."""


@pytest.fixture(scope="module")
def entered(tiny_task: Dataset) -> dict[str, list[str]]:
    """Functions of each module that round 2 of ``quickstart`` enters, modules and functions in the order in which they are entered."""
    config = load_recipe("quickstart", ["clients.count=5", "training.epochs=1", "training.rounds=3"])
    federation, start = build(config, tiny_task, torch.device("cpu"))
    rounds = simulate(federation, start, config.training.rounds)
    next(rounds)
    found: dict[str, list[str]] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(PACKAGE):
            module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
            found.setdefault(module, []).append(frame.f_code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        next(rounds)
    finally:
        sys.setprofile(before)
    return found


def test_a_round_enters_few_modules(entered: dict[str, list[str]]) -> None:
    listed = "\n".join(f"{number:2} {module}: {functions[0]}" for number, (module, functions) in enumerate(entered.items(), start=1))
    print(listed)
    assert len(entered) <= MAX_MODULES, listed


def test_the_page_names_the_modules_of_a_round_in_order(entered: dict[str, list[str]]) -> None:
    steps = _STEP.findall(PAGE.read_text(encoding="utf-8"))
    assert list(dict.fromkeys(module for module, _ in steps)) == list(entered)
    missing = [f"{module}.{function}" for module, function in steps if function not in entered[module]]
    assert missing == []
