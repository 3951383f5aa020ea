"""What the threat model and the table of faults name as evidence is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
CODE = re.compile(r"`([\w/]+\.py|[\w/]+/)`(?:, `(?:\w+\.)*(\w+)`)?")


@pytest.mark.parametrize("document", ["threat-model.md", "results/deployment.md"])
def test_what_a_document_names_is_there(document: str) -> None:
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    named = [(ROOT / "tests" / path, name) for path, name in TEST.findall(text)]
    assert len(named) > 5
    assert [f"{path}::{name}" for path, name in named if f"def {name}(" not in path.read_text(encoding="utf-8")] == []
    for path, name in CODE.findall(text):
        places = [ROOT / folder / path for folder in ("src/ldpfl", "tests", ".") if (ROOT / folder / path).exists()]
        assert places, path
        assert not name or name in places[0].read_text(encoding="utf-8"), (path, name)
