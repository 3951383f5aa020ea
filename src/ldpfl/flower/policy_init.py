"""The policy that allows just what an app asks of a client, for an operator to read, judge and change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, inf, log10
from pathlib import Path
from typing import Any

import tomli_w
import torch

from ldpfl.data.nodes import check_at_node, read_at_node
from ldpfl.errors import ConfigError, DataError, printable
from ldpfl.experiments import RunConfig, load_recipe
from ldpfl.experiments.build import size_of
from ldpfl.experiments.calibration import settled
from ldpfl.experiments.config import read_config
from ldpfl.experiments.dataset import described, targets_of
from ldpfl.experiments.planned_ledger import start_of
from ldpfl.experiments.recipes import recipe_or_file
from ldpfl.flower.app_imports import gives
from ldpfl.flower.named_by_server import check_needs_nothing, code_of
from ldpfl.flower.round_kinds import Kind, config_for, last_round, planned_round
from ldpfl.flower.run_settings import RunSettings
from ldpfl.flower.terms import deployable_mechanism
from ldpfl.mechanisms.base import PublicState
from ldpfl.mechanisms.hooks import in_round
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.privacy.accountants.adaptive import epsilon_needed, in_sum
from ldpfl.privacy.accountants.gaussian import ROUNDED
from ldpfl.privacy.accountants.registry import epsilon_of, unit_epsilon
from ldpfl.privacy.authors import released
from ldpfl.privacy.events import Channel, GaussianRelease, Release
from ldpfl.privacy.guarantee import least_protected
from ldpfl.privacy.policy import OVER_RELAY, UPLOAD_S, Policy, Transport
from ldpfl.tasks import without_answer
from ldpfl.transport.shuffling.sealing import read_public
from ldpfl.util.files import from_toml, read_text
from ldpfl.util.quantities import cohort_size

_ASKED_BY = ("transport", "linked", "min-clients", "window-s", "reply-s")
"""Settings of an app by which it is known what its clients are asked for, whatever its ServerApp is."""

_ASKS = {"recipe", "set"}
"""Settings by which it is known what the ready ServerApp asks for; without one of them a ServerApp may be another."""

_CHANNELS: Mapping[Transport, Channel] = {"direct": "direct", "relay": "ideal-shuffler", "sum": "secure-sum"}

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
        window_s: seconds that the relay takes uploads for; infinite if the app does not say.
        own_model: whether clients train a model of the app's own, and not the one that ``config`` names.
    """

    config: RunConfig
    transport: Transport
    cohort: int
    linked: int = 1
    reply_s: float = 0.0
    window_s: float = inf
    own_model: bool = False


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
        if config is None and not settings.keys() & _ASKS:
            raise ConfigError(
                f"{project} names no recipe in [tool.flwr.app.config.ldpfl], so it does not say what the app asks: for a ServerApp of its "
                "own give the config that it uses, with --config; for ldpfl's own, name its recipe there"
            )
        if config is not None:  # of a ServerApp that may have settings of its own
            offer = _offer(read_config(config), RunSettings.read({key: settings[key] for key in _ASKED_BY if key in settings}))
            offer = offer if "window-s" in settings else replace(offer, window_s=inf)
        else:
            offer = offer_of_settings(RunSettings.read(settings))
        given = gives(project.parent)
        _check_gives(offer.config, given)
        own = given in ("weights", "gradients", "gradients of persons") or (given == "unknown" and config is not None)
        return replace(offer, own_model=own)
    if config is not None:
        raise ConfigError(f"--config goes with a Flower app, and {path} is no folder with a pyproject.toml")
    if Path(path).is_dir():
        raise ConfigError(f"the folder {path} holds no app: it has no pyproject.toml")
    return _offer(recipe_or_file(path), RunSettings())


def offer_of_settings(settings: RunSettings) -> Offer:
    """Return what ldpfl's own ServerApp asks with these settings.

    Raises:
        ConfigError: they do not fit together, or not nodes.
    """
    return _offer(load_recipe(settings.recipe, settings.change_list), settings)


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
    config, releases, usual = offer.config, releases_of(offer, ranges), Policy()
    if not all(release.protected for release in releases):
        raise ConfigError(f"mechanism {config.mechanism.name!r} protects nothing: there is no policy that fits it")
    for key in keys:
        read_public(key)
    delta = usual.delta
    colluding = min(config.shuffling.colluding, offer.cohort - 1)
    honest = offer.cohort - colluding
    summed = [in_sum(release, honest) for release in releases if isinstance(release, GaussianRelease) and offer.transport == "sum"]
    return Policy(
        mechanisms=(releases[0].mechanism,),
        protects=least_protected(release.unit for release in releases),
        person=config.data.person,
        epsilon_per_unit=_rounded_up(max(unit_epsilon(release, delta) for release in set(releases))),
        epsilon_per_round=_rounded_up(max(epsilon_of([(release, 1)], delta) for release in set(releases))),
        lifetime_epsilon=_rounded_up(epsilon_needed(Counter(releases).items(), delta)),
        sum_epsilon=_rounded_up(epsilon_needed(Counter[Release](summed).items(), delta * (1 - ROUNDED))) if summed else "off",
        rounds=len(releases),
        min_clients=offer.cohort,
        colluding=colluding,
        transports=(offer.transport,),
        aggregator_keys=tuple(keys),
        linked=offer.linked,
        models=code_of(config),
        immediate_replies=offer.reply_s == 0,
        longest_reply_s=max(usual.longest_reply_s, offer.reply_s),
        longest_upload_s=max(usual.longest_upload_s, offer.reply_s + UPLOAD_S),
    )


def releases_of(offer: Offer, ranges: LayerRanges) -> list[Release]:
    """Return what a client releases in each round of ``offer``, of all kinds.

    Raises:
        ConfigError: the mechanism does not run on Flower, or not for these layers.
    """
    config = offer.config
    mechanism, weights, found = deployable_mechanism(config, ranges), torch.zeros(ranges.dimension), list[Release]()
    of_sums: dict[Kind, Release] = {}
    for number in range(1, last_round(config, config.training.rounds) + 1):
        planned = planned_round(config, number)
        if planned.kind == "training":
            # Noise may follow a schedule over rounds; what clients on Flower may run depends on their number alone.
            bound = in_round(mechanism, PublicState(planned.trained + 1, weights, None, ranges.sizes))
            found.append(released(bound, ranges, mechanism))
        else:  # what is released does not depend on how many numbers are summed
            if planned.kind not in of_sums:
                of_sums[planned.kind] = released(deployable_mechanism(config_for(config, planned.kind), ranges), ranges)
            found.append(of_sums[planned.kind])
    return found


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


def ranges_for(offer: Offer, layers: Sequence[int]) -> LayerRanges:
    """Return ranges of the model that clients train, or for arrays of ``layers`` values each, where the app has a model of its own.

    Raises:
        ConfigError: ``layers`` is empty, and what is released depends on the size of a model that is code, which is not run for this, or
            the app's own; or the model does not fit the data.
    """
    if layers:
        return LayerRanges(torch.tensor(0.0), torch.tensor(1.0), tuple(layers))
    for name in code_of(offer.config):
        raise ConfigError(f"{name!r} is code, which is not run for this: give the sizes of the model's arrays, with --layers")
    ranges = start_of(offer.config)[1]
    if offer.own_model and releases_of(offer, ranges) != releases_of(offer, _larger(ranges)):
        raise ConfigError(
            f"the app's clients train a model of its own, and what mechanism {offer.config.mechanism.name!r} releases depends on its size: "
            "give the number of values in each of the model's arrays, with --layers, as in --layers 500,10"
        )
    return ranges


def _larger(ranges: LayerRanges) -> LayerRanges:
    """Return ranges of a model with as many values again, in one more array."""
    return LayerRanges(torch.tensor(0.0), torch.tensor(1.0), (*ranges.sizes, ranges.dimension))


def _check_size(config: RunConfig) -> None:
    """Return if the built-in model of ``config`` fits this machine's memory, by far; none is made for it."""
    size = size_of(config, described(config))
    if size > _LARGEST:
        raise ConfigError(f"the app's model has {size:,} weights, more than {_LARGEST:,}: decline, or give the sizes of its arrays")


def _check_gives(config: RunConfig, given: str) -> None:
    """Return if the app's clients give what ``config`` asks for, as far as its client module tells: :func:`ldpfl.flower.app_imports.gives`.

    Raises:
        ConfigError: they would decline each round.
    """
    asked = config.mechanism.perturbed
    if asked == "gradient" and given == "weights":
        raise ConfigError(
            f"mechanism {config.mechanism.name!r} takes gradients, and this app's LdpClientApp wraps an app that gives trained weights: "
            'each node would decline. Its author is to give LdpClientApp(records="package.module:name"), see docs/flower.md'
        )
    if asked == "gradient" and config.data.person and given == "gradients":
        raise ConfigError(
            f"the app protects persons (data.person is {config.data.person!r}), and its LdpClientApp does not say that its records name "
            "them: each node would decline. Its author is to give RecordTask(persons=...) and LdpClientApp(records=..., persons=True)"
        )
    if asked != "gradient" and given.startswith("gradients"):
        raise ConfigError(
            f"mechanism.perturbed is {asked!r}, and this app's LdpClientApp(records=...) gives gradients: each node would decline. Set "
            "mechanism.perturbed to 'gradient' and a mechanism that takes them, such as dp-sgd"
        )


def _app_settings(project: Path) -> Mapping[str, Any]:
    try:
        tree: Any = from_toml(read_text(project))
        settings: Mapping[str, Any] = tree["tool"]["flwr"]["app"].get("config", {}).get("ldpfl", {})
    except (OSError, ValueError) as error:
        raise ConfigError(f"{project} cannot be read: {error}") from None
    except (KeyError, AttributeError, TypeError):
        raise ConfigError(f"{project} is no Flower app: it has no [tool.flwr.app]") from None
    return settings


def _offer(config: RunConfig, settings: RunSettings) -> Offer:
    config = for_nodes(config)
    check_needs_nothing(config)
    code = code_of(config)
    if not code:
        _check_size(config)
    if code and config.privacy.target_epsilon != "off":
        raise ConfigError(f"{code[0]!r} is code, which is not run for this: leave privacy.target_epsilon out, set the mechanism's noise")
    clients = config.clients
    asked = cohort_size(clients.fraction, clients.count)
    if settings.transport in OVER_RELAY and settings.min_clients > asked:
        raise ConfigError(
            f"ldpfl.min-clients is {settings.min_clients:,}, and a round asks {asked:,} of clients.count = {clients.count:,}: no round "
            f"could have so many, and each would be declined. Set ldpfl.min-clients to {asked:,} or fewer, or clients.count to more"
        )
    config = as_sent(config, settings.transport, settings.linked, settings.min_clients)
    config = config if code else settled(config)
    if settings.transport == "direct":
        return Offer(config, "direct", asked, reply_s=settings.reply_s)
    return Offer(config, settings.transport, settings.min_clients, settings.linked, settings.reply_s, settings.window_s)


def as_sent(config: RunConfig, transport: Transport, linked: int, min_clients: int) -> RunConfig:
    """Return ``config`` with the channel that reports really take: what noise a target needs depends on it.

    Raises:
        ConfigError: a target for records of several units, or for rounds of fewer clients than are asked: what holds for them is
            accounted, but not solved for.
    """
    if transport in OVER_RELAY and config.privacy.target_epsilon != "off":
        asked = cohort_size(config.clients.fraction, config.clients.count)
        if linked > 1:
            raise ConfigError("privacy.target_epsilon is met by records of one unit: set ldpfl.linked to 1, or leave the target out")
        if min_clients < asked:
            raise ConfigError(f"privacy.target_epsilon is met by rounds of all clients that are asked: set ldpfl.min-clients to {asked}")
    return config.model_copy(update={"shuffling": config.shuffling.model_copy(update={"channel": _CHANNELS[transport]})})


def for_nodes(config: RunConfig) -> RunConfig:
    """Return ``config`` as nodes get it: of their own tables, without the rows that the server measures on."""
    return config.model_copy(update={"data": config.data.model_copy(update={"test_path": ""})}) if config.data.at_nodes else config


def _rounded_up(value: float) -> float:
    """Return ``value`` or a little more, with three digits: bounds that a person reads."""
    if value <= 0:
        return value
    step = 10.0 ** (floor(log10(value)) - _DIGITS + 1)
    return max(value, ceil(value / step) * step)
