"""The policy that allows just what an app asks of a client, for an operator to read, judge and change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

import tomli_w
import torch

from ldpfl.data.nodes import check_at_node, read_at_node
from ldpfl.errors import ConfigError, DataError, printable
from ldpfl.experiments import RunConfig, load_recipe
from ldpfl.experiments.build import size_of
from ldpfl.experiments.calibration import settled
from ldpfl.experiments.config import read_config, split_changes
from ldpfl.experiments.dataset import described, targets_of
from ldpfl.experiments.forecast import start_of
from ldpfl.experiments.recipes import recipe_or_file
from ldpfl.experiments.shipped import DEFAULT
from ldpfl.features import is_code
from ldpfl.files import from_toml, read_text
from ldpfl.flower.terms import deployable_mechanism
from ldpfl.mechanisms.base import PublicState
from ldpfl.privacy.accountants.adaptive import epsilon_needed
from ldpfl.privacy.accountants.registry import epsilon_of, unit_epsilon
from ldpfl.privacy.policy import Policy, Transport
from ldpfl.ranges import LayerRanges
from ldpfl.shuffling.sealing import read_public
from ldpfl.tasks import without_answer

_DIGITS = 3
_LARGEST = 10**9
"""Weights of a model that is made to see what it asks for."""


@dataclass(frozen=True)
class Offer:
    """What an app is going to ask of its clients.

    Attributes:
        cohort: fewest clients among which a report is mixed; over no relay, those that are asked.
        linked: units that stay together in the relay.
        reply_s: seconds after which clients reply; 0 is as soon as they can.
    """

    config: RunConfig
    transport: Transport
    cohort: int
    linked: int = 1
    reply_s: float = 0.0


def offer_of(path: str, config: Path | None = None) -> Offer:
    """Return what the Flower app in the folder ``path`` asks; ``config`` is that of a ServerApp of its own.

    ``path`` may also name a recipe, or a config file. Nothing of the app is run.

    Raises:
        ConfigError: it cannot be read, or does not say what it asks.
    """
    project = Path(path) / "pyproject.toml"
    if project.is_file():
        settings = _app_settings(project)
        if config is None and not settings:
            raise ConfigError(
                f"{project} has no [tool.flwr.app.config.ldpfl], by which the recipes' apps are set: for a ServerApp of its own give "
                "the config that it uses, with --config"
            )
        return _offer(read_config(config) if config else _recipe(settings), settings)
    if config is not None:
        raise ConfigError(f"--config goes with a Flower app, and {path} is no folder with a pyproject.toml")
    return _offer(recipe_or_file(path), {})


def fitting_rows(config: RunConfig, table: Path) -> tuple[int, int, str]:
    """Return how many rows a node's own ``table`` has, of how many too little fits ``config``, and what does not fit first, if anything.

    Raises:
        ConfigError: the app does not train on nodes' own tables.
        DataError: the table cannot be read, or lacks a column.
    """
    if not config.data.at_nodes:
        raise ConfigError("--data is for apps that train on nodes' own tables, and this one does not: its data.name is not 'node'")
    targets = targets_of(config)
    answers = read_at_node(config.data, targets, table).train.targets
    try:
        check_at_node(config.data, targets, table)
    except DataError as error:
        return len(answers), int(without_answer(answers).sum()), str(error)
    return len(answers), 0, ""


def fitting_policy(offer: Offer, ranges: LayerRanges, keys: Sequence[str] = ()) -> Policy:
    """Return the policy that allows all rounds of ``offer`` for a model of the layers of ``ranges``, and hardly more.

    Raises:
        ConfigError: nothing would be protected, or a key is none.
    """
    config = offer.config
    mechanism, weights = deployable_mechanism(config, ranges), torch.zeros(ranges.dimension)
    # Noise may follow a schedule over rounds; what clients on Flower may run depends on their number alone.
    public = (PublicState(number, weights, None, ranges.sizes) for number in range(1, config.training.rounds + 1))
    releases = [mechanism.in_round(state).release(ranges) for state in public]
    if not all(release.protected for release in releases):
        raise ConfigError(f"mechanism {config.mechanism.name!r} protects nothing: there is no policy that fits it")
    for key in keys:
        read_public(key)
    delta = Policy().delta
    return Policy(
        mechanisms=(releases[0].mechanism,),
        protects="record" if any(release.unit == "record" for release in releases) else "client",
        epsilon_per_unit=_rounded_up(max(unit_epsilon(release, delta) for release in set(releases))),
        epsilon_per_round=_rounded_up(max(epsilon_of([(release, 1)], delta) for release in set(releases))),
        lifetime_epsilon=_rounded_up(epsilon_needed(Counter(releases).items(), delta)),
        rounds=config.training.rounds,
        min_clients=offer.cohort,
        transports=(offer.transport,),
        aggregator_keys=tuple(keys),
        linked=offer.linked,
        models=_code_of(config),
        immediate_replies=offer.reply_s == 0,
    )


def policy_text(policy: Policy, title: str) -> str:
    """Return ``policy`` as a file, with what each setting means above it."""
    lines = [f"# {printable(title)}", "# What is not stated here is not allowed. docs/budget.md says more."]
    for name, value in policy.model_dump(mode="json").items():
        lines += [
            "",
            *(f"# {line}" for line in (Policy.model_fields[name].description or "").splitlines()),
            tomli_w.dumps({name: value}).strip(),
        ]
    return "\n".join(lines) + "\n"


def ranges_for(config: RunConfig, layers: Sequence[int]) -> LayerRanges:
    """Return ranges of the model of ``config``, or for arrays of ``layers`` values each, where the app has a model of its own.

    Raises:
        ConfigError: the model is code, which is not run for this, and ``layers`` is empty; or it does not fit the data.
    """
    if layers:
        return LayerRanges(torch.tensor(0.0), torch.tensor(1.0), tuple(layers))
    for name in _code_of(config):
        raise ConfigError(f"{name!r} is code, which is not run for this: give the sizes of the model's arrays, with --layers")
    return start_of(config)[1]


def _check_nothing_named(config: RunConfig) -> None:
    """Return if nothing has to be opened, fetched or run to know what ``config`` asks for; who wrote it may be a stranger.

    Raises:
        ConfigError: it names data or a task of its own, which nodes decline anyway.
    """
    config.data.check_unopened()
    for name in _code_of(config):
        if name.partition(":")[0].endswith(".py"):
            raise ConfigError(f"the app names the file {name!r}, and a node loads none: what it is to run comes as package.module:Class")
    if is_code(config.task.name):
        raise ConfigError(
            f"{config.task.name!r} is code, which is not run for this: a node takes a built-in task, or one that its policy names"
        )


def _check_size(config: RunConfig) -> None:
    """Return if the built-in model of ``config`` fits this machine's memory, by far; none is made for it."""
    size = size_of(config, described(config))
    if size > _LARGEST:
        raise ConfigError(f"the app's model has {size:,} weights, more than {_LARGEST:,}: decline, or give the sizes of its arrays")


def _code_of(config: RunConfig) -> tuple[str, ...]:
    """Return what of ``config`` is code that a client would run: model and features by import path."""
    return tuple(dict.fromkeys(name for name in (config.model.name, config.data.features) if is_code(name)))


def _app_settings(project: Path) -> Mapping[str, Any]:
    try:
        tree: Any = from_toml(read_text(project))
        settings: Mapping[str, Any] = tree["tool"]["flwr"]["app"].get("config", {}).get("ldpfl", {})
    except (OSError, ValueError) as error:
        raise ConfigError(f"{project} cannot be read: {error}") from None
    except (KeyError, AttributeError, TypeError):
        raise ConfigError(f"{project} is no Flower app: it has no [tool.flwr.app]") from None
    return settings


def _recipe(settings: Mapping[str, Any]) -> RunConfig:
    return load_recipe(str(settings.get("recipe", DEFAULT)), split_changes(str(settings.get("set", ""))))


def _offer(config: RunConfig, settings: Mapping[str, Any]) -> Offer:
    config = for_nodes(config)
    _check_nothing_named(config)
    code = _code_of(config)
    if not code:
        _check_size(config)
    if code and config.privacy.target_epsilon != "off":
        raise ConfigError(f"{code[0]!r} is code, which is not run for this: leave privacy.target_epsilon out, set the mechanism's noise")
    transport: Transport = "direct" if settings.get("transport", "direct") == "direct" else "relay"
    config = as_sent(config, transport, int(settings.get("linked", 1)), int(settings.get("min-clients", 2)))
    config = config if code else settled(config)
    asked = max(1, round(config.clients.count * config.clients.fraction))
    if transport == "direct":
        return Offer(config, "direct", asked, reply_s=float(settings.get("reply-s", 0.0)))
    return Offer(config, "relay", int(settings.get("min-clients", 2)), int(settings.get("linked", 1)), float(settings.get("reply-s", 0.0)))


def as_sent(config: RunConfig, transport: Transport, linked: int, min_clients: int) -> RunConfig:
    """Return ``config`` with the channel that reports really take: what noise a target needs depends on it.

    Raises:
        ConfigError: a target for records of several units, or for rounds of fewer clients than are asked: what holds for them is
            accounted, but not solved for.
    """
    if transport == "relay" and config.privacy.target_epsilon != "off":
        asked = ceil(config.clients.fraction * config.clients.count - 1e-9)
        if linked > 1:
            raise ConfigError("privacy.target_epsilon is met by records of one unit: set ldpfl.linked to 1, or leave the target out")
        if min_clients < asked:
            raise ConfigError(f"privacy.target_epsilon is met by rounds of all {asked} clients: set ldpfl.min-clients to that")
    channel = "direct" if transport == "direct" else "ideal-shuffler"
    return config.model_copy(update={"shuffling": config.shuffling.model_copy(update={"channel": channel})})


def for_nodes(config: RunConfig) -> RunConfig:
    """Return ``config`` as nodes get it: of their own tables, without the rows that the server measures on."""
    return config.model_copy(update={"data": config.data.model_copy(update={"test_path": ""})}) if config.data.at_nodes else config


def _rounded_up(value: float) -> float:
    """Return ``value`` or a little more, with three digits: bounds that a person reads."""
    if value <= 0:
        return value
    step = 10.0 ** (floor(log10(value)) - _DIGITS + 1)
    return max(value, ceil(value / step) * step)
