"""Plan a training whose guarantee covers everything that is sent: which noise a target takes, and what the noise does to a mean."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil, inf, sqrt
from typing import Any, Literal, get_args

import torch

from ldpfl.errors import ConfigError
from ldpfl.mechanisms import Mechanism
from ldpfl.mechanisms.dp_sgd import DpSgd
from ldpfl.mechanisms.privunit import PrivUnitG
from ldpfl.mechanisms.records import RecordClip
from ldpfl.mechanisms.rotated_sign import RotatedSign
from ldpfl.planning.planner import MOST_CLIENTS, MOST_REPORTS, smallest
from ldpfl.privacy.accountants.behind_shuffler import behind_shuffler
from ldpfl.privacy.accountants.gaussian import gaussian_mu
from ldpfl.privacy.accountants.local import epsilon_of
from ldpfl.privacy.accounting import DELTA, account_groups, check_delta
from ldpfl.privacy.events import Channel
from ldpfl.privacy.statement import RoundGroup, Statement
from ldpfl.ranges import LayerRanges

Regime = Literal["shuffled", "local", "records", "records-summed"]
"""``shuffled``: signs of each client's gradient, counted. ``local``: one report a client. ``records``: each client's own noise for each of
its records; ``records-summed``: the same behind a sum over clients."""

_PRECISE = 1e-3
_SMALL = 0.1
"""Noise of this length, where a gradient is a direction of length 1, hardly disturbs a step."""


@dataclass(frozen=True)
class RegimePlan:
    """What a regime takes to keep a target.

    Attributes:
        parameter, value: of the mechanism, and what reaches the target.
        noise: length of the noise in the mean of directions of length 1: its standard deviation times the root of the weights.
        trusted_noise: that of a trusted server which adds noise for the same unit and target.
        wanted: how many clients, or records a client, bring the noise down to a tenth of a direction.
        group: of so many coordinates a client sends one; 1 where it sends all.
        relay_records: into how many records a relay takes a client's report apart.
        bytes_per_client: what one client sends in one of its rounds.
        reports: rounds that a client takes part in.
    """

    regime: Regime
    target: float
    clients: int
    records: int
    weights: int
    rounds: int
    mechanism: str
    parameter: str
    value: float
    noise: float
    trusted_noise: float
    wanted: int
    group: int
    relay_records: int
    bytes_per_client: int
    reports: int
    statement: Statement

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        fields = {name: value for name, value in asdict(self).items() if name != "statement"}
        return {**fields, **self.statement.to_dict()}


def plan_regime(
    regime: str,
    target: float,
    *,
    clients: int,
    weights: int,
    rounds: int,
    records: int = 1,
    group: int = 1,
    linked: int = 1,
    delta: float = DELTA,
    colluding: int = 0,
) -> RegimePlan:
    """Return which noise keeps ``target`` for all that is ever sent, and what it costs, before anything is run. Seconds on one core.

        ldpfl.plan_regime("records", 2.0, clients=100, records=600, weights=2000, rounds=15).noise

    Args:
        regime: shuffled, local, records or records-summed, see :data:`Regime`.
        group: of so many rotated coordinates a client draws one in secret and sends it, in the regime shuffled.
        linked: how many of what it sends stay together behind the shuffler, in that regime.

    Raises:
        ConfigError: the regime is unknown, a figure is out of range, or nothing reaches the target.
    """
    kind = regime_named(regime)
    check_delta(delta)
    if not 0 < target < inf:
        raise ConfigError(f"the target must be positive and finite, got {target:g}")
    if min(clients - colluding, weights, rounds, records, group, linked) < 1 or clients > MOST_CLIENTS or weights * rounds > MOST_REPORTS:
        raise ConfigError(
            "clients that do not collude, weights, rounds, records, group and linked must be at least 1, and no more than is planned"
        )
    if max(group, linked) > 1 and kind != "shuffled":
        raise ConfigError(f"coordinates are drawn and linked in groups in the regime shuffled, not in {kind}")
    if kind == "local" and clients < rounds:
        raise ConfigError(f"{clients:,} clients cannot take part once each in {rounds:,} rounds")
    ranges = LayerRanges(torch.zeros(1), torch.ones(1), (weights,))

    def group_at(strength: float) -> RoundGroup:
        release = _mechanism(kind, strength, records, group).release(ranges)
        channel: Channel = {"records": "direct", "records-summed": "secure-sum"}.get(kind, "ideal-shuffler")  # type: ignore[assignment]
        once = kind == "local"
        honest = clients - colluding
        return RoundGroup(release, honest, honest, 1 if once else rounds, "once" if once else "everyone", channel=channel, linked=linked)

    def epsilon(inverse: float) -> float:
        group = group_at(1 / inverse)
        hidden, local = behind_shuffler([group]), epsilon_of([(group.release, group.rounds)], delta)
        return local if hidden is None else min(local, hidden.epsilon(delta))

    found = smallest(epsilon, _guess(kind, target, clients - colluding, ceil(weights / group), rounds, delta), target, 1e-4, 1e6, _PRECISE)
    if found is None:
        raise ConfigError(f"no noise brings this to epsilon {target:g}: more clients or fewer rounds may")
    mechanism = _mechanism(kind, 1 / found, records, group)
    once = kind == "local"
    heard = clients // rounds if once else clients
    noise = float(mechanism.noise_std(ranges, heard)[0]) * sqrt(weights)
    units = clients * records if kind.startswith("records") else clients
    name, value = ("noise_multiplier", found) if kind.startswith("records") else ("epsilon", 1 / found)
    return RegimePlan(
        regime=kind,
        target=target,
        clients=clients,
        records=records,
        weights=weights,
        rounds=rounds,
        mechanism=mechanism.name,
        parameter=name,
        value=value,
        noise=noise,
        trusted_noise=2 * sqrt(rounds) / (units * gaussian_mu(target, delta)) * sqrt(weights),
        wanted=_wanted(kind, noise, clients, records),
        group=group,
        relay_records=ceil(mechanism.release(ranges).units / linked),
        bytes_per_client=(mechanism.payload_bits(ranges) + 7) // 8,
        reports=1 if once else rounds,
        statement=account_groups([group_at(1 / found)], delta),
    )


def regime_named(name: str) -> Regime:
    """Return the regime called ``name``.

    Raises:
        ConfigError: there is none.
    """
    for known in get_args(Regime):
        if name == known:
            regime: Regime = known
            return regime
    raise ConfigError(f"unknown regime {name!r}: known: {', '.join(get_args(Regime))}")


def _mechanism(regime: Regime, strength: float, records: int, group: int) -> Mechanism:
    """Return the regime's mechanism; what it tells grows with ``strength``."""
    if regime == "shuffled":
        return RotatedSign(strength, group=group)
    if regime == "local":
        return PrivUnitG(strength, 1.0)
    return DpSgd(RecordClip(1.0), 1 / strength, float(records), regime == "records-summed")


def _guess(regime: Regime, target: float, clients: int, weights: int, rounds: int, delta: float) -> float:
    """Return one over about the right strength, where the search begins."""
    mu = gaussian_mu(target, delta)
    if regime == "shuffled":
        return sqrt(weights * rounds / clients) / mu
    if regime == "local":
        return 1 / 7
    return 2 * sqrt(rounds / (clients if regime == "records-summed" else 1)) / mu


def _wanted(regime: Regime, noise: float, clients: int, records: int) -> int:
    """Return how many clients, or for records how many of them a client, leave noise of a tenth of a direction's length."""
    factor = noise / _SMALL
    if regime.startswith("records"):
        return ceil(records * factor)
    return ceil(clients * (factor**2 if regime == "local" else factor))
