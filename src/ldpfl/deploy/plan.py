"""What a demo trains, checked before anything starts, and the policy that allows just that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, log10
from pathlib import Path

from ldpfl.data import load
from ldpfl.errors import ConfigError
from ldpfl.experiments import RunConfig, load_recipe
from ldpfl.experiments.build import build, choose_device
from ldpfl.flower.terms import deployable_mechanism
from ldpfl.privacy.events import UnprotectedRelease
from ldpfl.privacy.policy import Policy, epsilon_of, unit_epsilon

RECIPE = "quickstart"

LINKED = 16
"""Weights that stay together in a sealed record. LDP-FL's parameter shuffling has 1, which takes 16 times as long to seal and open."""

_FEWEST = 2
_SHORTER = ("training.epochs=2",)
_DIGITS = 3


@dataclass(frozen=True)
class Plan:
    """A run to deploy.

    Attributes:
        changes: to the recipe ``RECIPE``, as ``key=value``.
        policy: what each node allows; the aggregator's key is still missing in it.
        data_dir: folder with data sets, if they are not found otherwise.
    """

    config: RunConfig
    changes: tuple[str, ...]
    policy: Policy
    data_dir: Path | None

    @property
    def clients(self) -> int:
        return self.config.clients.count

    @property
    def rounds(self) -> int:
        return self.config.training.rounds


def plan(clients: int, rounds: int, changes: Sequence[str] = (), data_dir: Path | None = None) -> Plan:
    """Return the plan for ``clients`` nodes and so many ``rounds`` of the quickstart, changed by ``key=value``.

    Loads the data once, so that a mistake is found here, and the nodes find them decoded.

    Raises:
        LdpflError: the settings, the model or the data do not fit, or nothing would be protected.
    """
    for change in changes:
        if ";" in change:
            raise ConfigError(f"setting {change!r} holds a semicolon, which separates settings on Flower's wire")
    every = (f"clients.count={clients}", f"training.rounds={rounds}", *_SHORTER, *changes)
    config = load_recipe(RECIPE, every)
    if config.clients.count < _FEWEST or config.clients.fraction != 1:
        raise ConfigError(f"the demo asks all of at least {_FEWEST} clients in each round; leave clients.fraction at 1")
    return Plan(config, every, _policy(config, data_dir), None if data_dir is None else data_dir.absolute())


def _policy(config: RunConfig, data_dir: Path | None) -> Policy:
    """Return the policy that allows what ``config`` releases, and hardly more."""
    _, start = build(config, load(config.data.name, data_dir), choose_device("cpu"))
    ranges, rounds = start.state.ranges, config.training.rounds
    mechanism, public = deployable_mechanism(config, ranges), start.state.public()
    # Noise may follow a schedule over rounds; what clients on Flower may run depends on their number alone.
    releases = [mechanism.in_round(replace(public, round=number)).release(ranges) for number in range(1, rounds + 1)]
    if any(isinstance(release, UnprotectedRelease) for release in releases):
        raise ConfigError(f"mechanism {config.mechanism.name!r} protects nothing: the demo has no policy for it")
    delta = Policy().delta
    return Policy(
        mechanisms=(releases[0].mechanism,),
        epsilon_per_unit=_rounded_up(max(unit_epsilon(release, delta) for release in set(releases))),
        epsilon_per_round=_rounded_up(max(epsilon_of([(release, 1)], delta) for release in set(releases))),
        lifetime_epsilon=_rounded_up(epsilon_of(Counter(releases).items(), delta)),
        rounds=rounds,
        smallest_cohort=config.clients.count,
        transports=("relay",),
        parameters_per_report=LINKED,
    )


def _rounded_up(value: float) -> float:
    """Return ``value`` or a little more, with three digits: bounds that a person reads."""
    if value <= 0:
        return value
    step = 10.0 ** (floor(log10(value)) - _DIGITS + 1)
    return max(value, ceil(value / step) * step)
