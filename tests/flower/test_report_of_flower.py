"""A page about a run on Flower says what is known there: of an app of one's own neither model nor data, and while it goes on, how far."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest
from flower_parts import app_of, config_of, start_arrays
from flwr.app import Message

from conftest import CommandLine
from ldpfl.experiments.run_folder import Kind, RunFolder
from ldpfl.flower import InProcessGrid, LdpStrategy

pytestmark = pytest.mark.slow


def text_of(page: str) -> str:
    without = re.sub(r"<style.*?</style>|<svg.*?</svg>", "", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", without)).split())


class Stopped(Exception):
    """The server is stopped while nodes train."""


class Stopping(LdpStrategy):
    def configure_train(self, *args: Any) -> list[Message]:
        messages = super().configure_train(*args)
        if args[0] == 3:
            raise Stopped
        return messages


@pytest.mark.thorough_except("own app on Flower")
@pytest.mark.parametrize("kind", [Kind.OWN_APP, Kind.READY_APP])
def test_a_run_is_reported_while_it_goes_on(kind: Kind, ldpfl: CommandLine) -> None:
    folder = RunFolder(Path("run"))
    strategy = Stopping(config_of("training.rounds=4"), folder=folder, kind=kind)
    with pytest.raises(Stopped):
        strategy.start(InProcessGrid(app_of(), 3), start_arrays())
    assert ldpfl("report", folder.path).code == 0
    text = text_of((folder.path / "report.html").read_text(encoding="utf-8"))
    assert "after 2 rounds with 3 clients, by duchi" in text
    assert "Round 3 has begun. The privacy figures count it" in text
    assert f"run by {kind}" in text
    assert "nodes 3, of which none was asked in more than 3 rounds" in text
    assert "reports in the replies" in text
    assert "one client, whole run nobody 90" in text  # the begun round included
    named = ("two-layer-cnn on", "mnist", "accuracy -", "100 clients")
    assert not [words for words in named if words in text.split("Config")[0]] or kind is Kind.READY_APP
    assert ("two-layer-cnn on" in text) == (kind is Kind.READY_APP)
    assert "? threads" not in text
