"""How far a deployed run has come, read from the aggregator's run folder, and whether a node would not take part."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from ldpfl.deploy.processes import without_colour
from ldpfl.deploy.site import NodeSite, Site
from ldpfl.errors import DataError
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.flower.participation import Participation


class Observer(Protocol):
    """Is told what happens."""

    def step(self, text: str) -> None:
        """Something begins."""
        ...

    def asked(self, round_: int, names: tuple[str, ...]) -> None:
        """These nodes are asked to take part in a round."""
        ...

    def round_done(self, round_: int, reports: int, accuracy: float) -> None:
        """A round is over."""
        ...


@dataclass
class Watch:
    """Tells an observer what is new in a run.

    Attributes:
        names: by Flower's number, what a node is called here.
    """

    site: Site
    names: Mapping[int, str]
    observer: Observer
    _replaced: Counter[str] = field(default_factory=Counter)
    _begun: int = 0
    _done: int = 0

    def look(self) -> None:
        """Tell what is new since the last time."""
        for node in self.site.nodes:
            for reason in islice(replacements(node), self._replaced[node.name], None):
                self._replaced[node.name] += 1
                self.observer.step(f"{node.name}: {reason}")
        participation = self._participation()  # read first: the round that it tells of follows those that are told before it
        for metrics in rounds_in(self.site)[self._done :]:
            self._done += 1
            self.observer.round_done(metrics["round"], metrics["clients"], metrics["accuracy"])
        if participation is not None and participation.begun > self._begun:
            self._begun = participation.begun
            asked = (self.names.get(node, str(node)) for node, rounds in participation.rounds.items() if rounds == self._begun)
            self.observer.asked(self._begun, tuple(sorted(asked)))

    def _participation(self) -> Participation | None:
        path = RunFolder(self.site.run).participation_path
        try:
            return Participation.load(path) if path.exists() else None
        except DataError:
            return None


def rounds_in(site: Site) -> list[dict[str, Any]]:
    """Return the figures of the rounds that are over."""
    path = RunFolder(site.run).metrics_path
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def refusals(node: NodeSite) -> Iterator[str]:
    """Yield why a node sent no report, as its own log says it: that holds no private value."""
    return _logged(node, _REFUSED)


def replacements(node: NodeSite) -> Iterator[str]:
    """Yield why a node reported no change, as its own log says it."""
    return _logged(node, _REPLACED)


def _logged(node: NodeSite, pattern: re.Pattern[str]) -> Iterator[str]:
    found = (pattern.match(without_colour(line)) for line in _lines(node.log))
    return (match[1] for match in found if match is not None)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


_REFUSED = re.compile(r"(?:WARN|WARNING|ERROR)\s*:\s*((?:declined|failed): .*)")
_REPLACED = re.compile(r"ERROR\s*:\s*replaced: (.*)")
