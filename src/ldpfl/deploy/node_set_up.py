"""The settings of a node that ``check-node`` looks at, and the findings of the check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from ldpfl.errors import LdpflError


class Standing(StrEnum):
    """Severity of a finding."""

    FINE = "ok"
    LOOK = "look"
    WRONG = "wrong"


@dataclass(frozen=True)
class Finding:
    """Result of one check. The text ``said`` is for the node's operator alone, because it may depend on the data."""

    what: str
    standing: Standing
    said: str


@dataclass(frozen=True)
class NodeSetUp:
    """Settings of a node, as its SuperNode gets them; None for a setting that the operator has not named.

    Attributes:
        app: folder of the app that will run, to check policy, budget and table against it.
        config: config file of an app that has its own ServerApp.
        layers: number of values in each array of an app's own model.
        shapes: names and shapes of these arrays, if known. A trial of an app's own training loop uses such arrays.
        partition: number of the node, if ``data`` contains ``{partition}``.
    """

    policy: Path | None
    budget: Path | None
    relay: str | None = None
    token: Path | None = None
    relay_ca: Path | None = None
    data: str | None = None
    data_dir: Path | None = None
    node_key: Path | None = None
    superlink: str | None = None
    superlink_ca: Path | None = None
    app: str | None = None
    config: Path | None = None
    layers: tuple[int, ...] = ()
    partition: int | None = None
    signing_key: Path | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Trial:
    """Settings of a trial of one round's local work, beside those of the node.

    Attributes:
        node_config: what the SuperNode is given as ``--node-config``.
        train_config: what the app's own ServerApp hands to its clients with each round.
    """

    node_config: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    train_config: Mapping[str, str | int | float | bool] = field(default_factory=dict)


def wrong_finding(what: str, error: LdpflError) -> Finding:
    """Return the finding that ``what`` is wrong, with the text of ``error``."""
    return Finding(what, Standing.WRONG, str(error))
