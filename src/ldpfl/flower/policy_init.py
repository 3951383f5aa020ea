"""Write the policy that allows what an app asks of a client and hardly more, for an operator to read, judge and change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import ceil, floor, inf, log10
from pathlib import Path
from typing import Any

import tomli_w
import torch

from ldpfl.data.nodes import check_node_table, read_node_table
from ldpfl.errors import ConfigError, DataError, printable
from ldpfl.experiments import RunConfig, load_recipe
from ldpfl.experiments.build import check_texts, count_weights, model_of
from ldpfl.experiments.calibration import resolve_settings
from ldpfl.experiments.config import read_config
from ldpfl.experiments.dataset import Description, describe_data, load_dataset, target_kind_of
from ldpfl.experiments.planned_ledger import initial_weights_and_ranges
from ldpfl.experiments.recipes import recipe_or_file
from ldpfl.experiments.record_sums import evaluation_vector_layout, is_evaluated
from ldpfl.experiments.shipped import recipe_files
from ldpfl.flower.app_imports import bare_client, client_output, has_ready_server
from ldpfl.flower.named_by_server import check_nothing_opened_or_run, code_names
from ldpfl.flower.round_kinds import Kind, config_for_kind, last_round, planned_round, statistics_rounds
from ldpfl.flower.run_settings import SECTION, RunSettings
from ldpfl.flower.terms import deployable_mechanism
from ldpfl.mechanisms.base import PublicState, in_round
from ldpfl.mechanisms.dp_sgd import DpSgdSettings
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.models.pretrained import licence_of
from ldpfl.privacy.accountants.adaptive import epsilon_needed, in_sum
from ldpfl.privacy.accountants.gaussian import ROUNDED
from ldpfl.privacy.accountants.registry import epsilon_of, unit_epsilon
from ldpfl.privacy.authors import released
from ldpfl.privacy.events import Channel, GaussianRelease, Release
from ldpfl.privacy.guarantee import least_protected
from ldpfl.privacy.policy import OVER_RELAY, UPLOAD_S, Policy, Transport
from ldpfl.tasks import absent_targets
from ldpfl.transport.shuffling.sealing import read_public
from ldpfl.util.files import from_toml, read_text
from ldpfl.util.quantities import cohort_size
from ldpfl.util.suggestions import did_you_mean
from ldpfl.util.user_code import PRETRAINED, TIMM, is_pretrained, lies_in_file

_TRANSPORT_SETTINGS = ("transport", "linked", "min-clients", "window-s", "reply-s")
"""Settings of an app that say how its clients' reports travel, whichever ServerApp it has."""

_RECIPE_SETTINGS = {"recipe", "set"}
"""Settings that say what the ready ServerApp asks for. An app without any of them may have another ServerApp."""

_CHANNELS: Mapping[Transport, Channel] = {"direct": "direct", "relay": "ideal-shuffler", "sum": "secure-sum"}
"""Channel that the ledger counts for each transport."""

_DIGITS = 3
"""Significant digits of the bounds in a policy."""

_MAX_WEIGHTS = 10**9
"""Maximum number of weights of a model that is built to find out what a policy must allow."""


@dataclass(frozen=True)
class Offer:
    """What an app will ask of its clients.

    Attributes:
        config: config of the app's rounds, as nodes get it.
        transport: way in which reports reach the server.
        cohort: minimum number of clients among which a report is mixed; without a relay, the number of clients asked.
        linked: number of units (messages) of a report that stay together in the relay.
        reply_s: seconds after which clients reply; 0 means as soon as they can.
        window_s: seconds during which the relay accepts uploads; infinite if the app does not say.
        own_model: whether clients train a model that the app defines itself, instead of the one that ``config`` names.
        own_server: whether the app's ServerApp is not ldpfl's own, and may send arrays of another model than ``config`` names.
    """

    config: RunConfig
    transport: Transport
    cohort: int
    linked: int = 1
    reply_s: float = 0.0
    window_s: float = inf
    own_model: bool = False
    own_server: bool = True


def offer_of(path: str, config: Path | None = None) -> Offer:
    """Return what the Flower app in the folder ``path`` asks of its clients. None of the app's code is run.

    Args:
        path: folder of the app. A recipe's name or a config file stands for ldpfl's own apps with this config.
        config: config file of an app that has a ServerApp of its own.

    Raises:
        ConfigError: the app cannot be read, or its files do not say what it asks.
    """
    project = Path(path) / "pyproject.toml"
    if project.is_file():
        return _offer_of_app(project, config)
    if config is not None:
        raise ConfigError(f"--config works only with a Flower app, and {path} is not a folder with a pyproject.toml: leave --config out")
    if Path(path).is_dir():
        raise ConfigError(f"the folder {path} is not a Flower app: it has no pyproject.toml")
    if path not in (recipes := recipe_files()) and Path(path).suffix != ".toml" and not Path(path).exists():
        hint = did_you_mean(path, recipes)
        raise ConfigError(f"{path!r} is neither a folder nor a recipe: give an app's folder or a recipe; {hint}")
    return _offer_from(recipe_or_file(path), RunSettings())


def _offer_of_app(project: Path, config: Path | None) -> Offer:
    """Return what the Flower app whose ``pyproject.toml`` is ``project`` asks of its clients. Errors are those of :func:`offer_of`.

    ``config`` is the config file if the app has a ServerApp of its own, else None.
    """
    settings = _app_settings(project)
    if client := bare_client(project.parent):
        raise ConfigError(
            f"the clientapp {client!r} is a ClientApp without a wrapper, so its replies leave without noise, whatever a policy says: "
            f'wrap it in LdpClientApp. In another module write app = LdpClientApp("{client}"), and name this app as clientapp in '
            f"{project} (docs/flower.md)"
        )
    if config is not None:  # the app may have a ServerApp of its own, with other settings: only the transport's settings are read
        _refuse_mistyped(settings)
        transport_settings = {key: settings[key] for key in _TRANSPORT_SETTINGS if key in settings}
        offer = _offer_from(read_config(config), RunSettings.read(transport_settings))
        offer = offer if "window-s" in settings else replace(offer, window_s=inf)  # the ServerApp may set any window
    elif not settings:
        raise ConfigError(
            f"{project} has no [tool.flwr.app.config.ldpfl], so it does not say what the app asks: give --config FILE, the config that "
            "the app's ServerApp uses. If the app trains a custom model, also give its arrays, as in --layers weight=10x50,bias=10"
        )
    elif not settings.keys() & _RECIPE_SETTINGS:
        raise ConfigError(
            f"{project} has no recipe in [tool.flwr.app.config.ldpfl], so it does not say what the app asks: if the app uses ldpfl's "
            "ServerApp, add its recipe there. If not, give --config FILE, the config that the app's ServerApp uses. If the app trains "
            "a custom model, also give its arrays, as in --layers weight=10x50,bias=10"
        )
    else:
        offer = offer_of_settings(RunSettings.read(settings))
    output = client_output(project.parent)
    _check_output(offer.config, output, ready_server=has_ready_server(project.parent))
    return replace(offer, own_model=output != "ready")


def offer_of_settings(settings: RunSettings) -> Offer:
    """Return what ldpfl's own ServerApp asks of its clients with these settings.

    Raises:
        ConfigError: the settings contradict each other, or cannot run on nodes.
    """
    return replace(_offer_from(load_recipe(settings.recipe, settings.change_list), settings), own_server=False)


def check_table_fits(config: RunConfig, table: Path) -> tuple[int, int, str]:
    """Check whether a node's own ``table`` has the columns and values that ``config`` expects.

    Return the number of its rows, the number of rows that cannot be used, and the first problem as text. If the table fits, these are the
    number of its rows, 0 and "".

    Raises:
        ConfigError: the app does not train on nodes' own tables.
        DataError: the table cannot be read, or lacks a column.
    """
    if not config.data.at_nodes:
        raise ConfigError(
            "--data works only with apps that train on nodes' own tables (data.name = 'node'), and this is none: leave it out"
        )
    targets = target_kind_of(config)
    row_targets = read_node_table(config.data, targets, table).train.targets  # in training, a row that cannot be used gets no target
    try:
        check_node_table(config.data, targets, table)  # raises at the first value that does not fit
    except DataError as error:
        return len(row_targets), int(absent_targets(row_targets).sum()), str(error)
    return len(row_targets), 0, ""


def fitting_policy(offer: Offer, ranges: LayerRanges, keys: Sequence[str] = ()) -> Policy:
    """Return the policy that allows all rounds of ``offer`` for a model with the layers of ``ranges``, and hardly anything else.

    Its bounds on epsilon are those of the offer's releases, rounded up to a few digits.

    Args:
        keys: public keys of the aggregators for which nodes may encrypt reports.

    Raises:
        ConfigError: the mechanism protects nothing, or one of the ``keys`` is no public key.
    """
    config, releases = offer.config, releases_of(offer, ranges)
    default = Policy()
    if not all(release.protected for release in releases):
        raise ConfigError(f"mechanism {config.mechanism.name!r} protects nothing, so no policy can allow it: use another mechanism")
    for key in keys:
        read_public(key)  # raises if it is no key
    delta = default.delta
    colluding = min(config.shuffling.colluding, offer.cohort - 1)  # a policy needs at least one honest client
    honest = offer.cohort - colluding  # clients whose noise counts in a sum
    is_sum = offer.transport == "sum"
    delta_of_sums = delta * (1 - ROUNDED)  # the policy charges the rest of delta for sums of rounded noise
    sum_releases = [in_sum(release, honest) for release in releases if isinstance(release, GaussianRelease) and is_sum]
    return Policy(
        mechanisms=tuple(dict.fromkeys(release.mechanism for release in releases)),
        protects=least_protected(release.unit for release in releases),
        person=config.data.person,
        epsilon_per_unit=_rounded_up(max(unit_epsilon(release, delta) for release in set(releases))),
        epsilon_per_round=_rounded_up(max(epsilon_of([(release, 1)], delta) for release in set(releases))),
        lifetime_epsilon=_rounded_up(epsilon_needed(Counter(releases).items(), delta)),
        sum_epsilon=_rounded_up(epsilon_needed(Counter[Release](sum_releases).items(), delta_of_sums)) if sum_releases else "off",
        rounds=len(releases),
        min_clients=offer.cohort if offer.transport in OVER_RELAY else 1,
        colluding=colluding,
        transports=(offer.transport,),
        aggregator_keys=tuple(keys),
        linked=offer.linked,
        models=code_names(config),
        immediate_replies=offer.reply_s == 0,
        longest_reply_s=max(default.longest_reply_s, offer.reply_s),
        longest_upload_s=max(default.longest_upload_s, offer.reply_s + UPLOAD_S),
    )


def releases_of(offer: Offer, ranges: LayerRanges) -> list[Release]:
    """Return what a client releases in each round of ``offer``, in order, for rounds of all kinds.

    ``ranges`` need only have the layer sizes of the model that clients train.

    Raises:
        ConfigError: the mechanism does not run on Flower, or not for these layers.
    """
    config = offer.config
    mechanism, weights = deployable_mechanism(config, ranges), torch.zeros(ranges.dimension)
    releases: list[Release] = []
    sum_releases: dict[Kind, Release] = {}
    for number in range(1, last_round(config, config.training.rounds) + 1):
        planned = planned_round(config, number)
        if planned.kind == "training":
            # Noise may follow a schedule over rounds. On Flower, it depends on the round's number alone, so weights of 0 will do.
            round_mechanism = in_round(mechanism, PublicState(planned.trained + 1, weights, None, ranges.sizes))
            releases.append(released(round_mechanism, ranges, chosen_by=mechanism))
        else:  # a release of sums does not depend on how many numbers are summed, so any length will do: 2 outputs, or the model's length
            if planned.kind not in sum_releases:  # all rounds of this kind release the same
                sum_ranges = evaluation_vector_layout(config, 2).ranges if planned.kind == "evaluation" else ranges
                sum_releases[planned.kind] = released(deployable_mechanism(config_for_kind(config, planned.kind), sum_ranges), sum_ranges)
            releases.append(sum_releases[planned.kind])
    return releases


def policy_text(policy: Policy, title: str) -> str:
    """Return ``policy`` as the text of a TOML file, with a comment above each setting that explains it."""
    lines = [f"# {printable(title)}", "# What is not stated here is not allowed. docs/budget.md says more."]
    for name, value in policy.model_dump(mode="json").items():
        lines += [
            "",
            *(f"# {line}" for line in (Policy.model_fields[name].description or "").splitlines()),
            tomli_w.dumps({name: value}).strip(),
        ]
    return "\n".join(lines) + "\n"


def ranges_for(offer: Offer, layers: Sequence[int]) -> LayerRanges:
    """Return ranges with the layer sizes of the model that clients train. Their centers and radii need not be those of the run.

    Args:
        layers: number of values in each array of the model. It may be empty if the config's model can be built here.

    Raises:
        ConfigError: ``layers`` is empty, but the releases depend on the size of a model that is not loaded here
            (:func:`names_not_loaded`) or is the app's own. Or the model does not fit the data, or its arrays differ from ``layers``.
    """
    not_loaded = names_not_loaded(offer.config)
    # The sizes of layers follow from the shape of samples, which the config states for nodes' own tables. Files of a built-in data set may
    # hold samples of another shape than usual.
    sizes_may_differ = not (offer.config.data.at_nodes or is_pretrained(offer.config.model.name))
    if layers and (offer.own_model or offer.own_server or not_loaded or sizes_may_differ):  # `layers` cannot be checked here
        return LayerRanges(torch.tensor(0.0), torch.tensor(1.0), tuple(layers))
    if not_loaded:
        raise ConfigError(f"{_why_not_loaded(not_loaded[0])}: give the sizes of the model's arrays by --layers, as in --layers 500,10")
    if is_pretrained(offer.config.model.name):
        _check_pretrained(offer.config)
    ranges = initial_weights_and_ranges(offer.config)[1]  # of the model that the config names
    if layers and ranges.sizes != tuple(layers):
        raise ConfigError(
            f"--layers is {','.join(map(str, layers))}, but the arrays of {offer.config.model.name!r} have the sizes "
            f"{','.join(map(str, ranges.sizes))}: leave --layers out"
        )
    # An app's own model has other sizes than the model in the config. That is no matter if the releases do not depend on the size.
    if offer.own_model and releases_of(offer, ranges) != releases_of(offer, _twice_as_large(ranges)):
        raise ConfigError(
            f"the app trains a custom model, and the cost of mechanism {offer.config.mechanism.name!r} depends on the model's size: "
            "give the arrays that its server sends, as in --layers weight=10x50,bias=10. ldpfl deploy check-node takes the same"
        )
    return ranges


def names_not_loaded(config: RunConfig) -> tuple[str, ...]:
    """Return the names of the model and the features of ``config`` that are not loaded here, so that the arrays' sizes are not known.

    No code is run for a policy, and nothing is downloaded. A pretrained model in a folder of this machine is loaded, because this runs no
    code of the folder.
    """
    model, tokenizer = config.model.name, config.data.tokenizer
    is_at_hand = is_pretrained(model) and all(Path(name.removeprefix(PRETRAINED)).is_dir() for name in (model, tokenizer or model))
    return tuple(name for name in code_names(config) if not (is_at_hand and name == model))


def _check_pretrained(config: RunConfig) -> None:
    """Raise if the pretrained model in a folder does not fit the texts, as the app's server would at its start."""
    licence_of(config.model.name, config.model.licence)
    data = load_dataset(config, None)
    check_texts(model_of(config, Description.of(data)), data)


def _why_not_loaded(name: str) -> str:
    """Return why this command does not know the sizes of the model or the features ``name``."""
    if name.startswith((PRETRAINED, TIMM)):
        return f"{name!r} is a pretrained model, which this command loads only as model.name and from a folder of this machine"
    return f"{name!r} is code, which this command does not run"


def check_code(config: RunConfig) -> None:
    """Raise if ``config`` names code in a file, or needs noise computed for a model that is not loaded here.

    Raises:
        ConfigError: one of these problems; the text says what to do about each.
    """
    files = [name for name in code_names(config) if lies_in_file(name)]
    not_loaded = names_not_loaded(config)
    steps = []
    if files:
        steps.append(
            f"the app names the file {files[0]!r}, but nodes load no code from files: install the code and name it package.module:Class"
        )
    if not_loaded and config.privacy.target_epsilon != "off":
        steps.append(
            f"{_why_not_loaded(not_loaded[0])}, so it cannot compute the noise for privacy.target_epsilon. Set privacy.target_epsilon=off, "
            "mechanism.noise_multiplier to a number (ldpfl plan --regime computes it), and mechanism.clip_norm to the length to which "
            "gradients are clipped, often 1. Give the sizes of the model's arrays to ldpfl policy init by --layers"
        )
    if steps:
        raise ConfigError(". Also, ".join(steps))


def _twice_as_large(ranges: LayerRanges) -> LayerRanges:
    """Return ranges of a model with one more layer, as large as all others together, to find out whether releases depend on the size."""
    return LayerRanges(torch.tensor(0.0), torch.tensor(1.0), (*ranges.sizes, ranges.dimension))


def _check_size(config: RunConfig) -> None:
    """Raise if the built-in model of ``config`` is too large to be built here. The size is computed without building the model."""
    size = count_weights(config, describe_data(config))
    if size > _MAX_WEIGHTS:
        raise ConfigError(
            f"the app's model has {size:,} weights, and models of at most {_MAX_WEIGHTS:,} are built to find the sizes of their arrays: "
            "give these with --layers if you expect such a model; otherwise do not run the app"
        )


def _check_output(config: RunConfig, output: str, *, ready_server: bool) -> None:
    """Raise if the app's clients do not return what ``config`` asks for.

    Args:
        output: what the clients return, as :func:`ldpfl.flower.app_imports.client_output` reads it from the client module.
        ready_server: whether the app's ServerApp is ldpfl's own. Where records are protected, that one needs ldpfl's own ClientApp.

    Raises:
        ConfigError: each node would decline each round.
    """
    perturbed = config.mechanism.perturbed
    if perturbed == "gradient" and output == "weights":
        raise ConfigError(
            f"mechanism {config.mechanism.name!r} needs gradients, but this app's LdpClientApp returns trained weights: each node would "
            'decline. The app\'s author should use LdpClientApp(records="package.module:name"), see docs/flower.md'
        )
    if output.startswith("gradients") and ready_server and isinstance(config.mechanism, DpSgdSettings):
        raise ConfigError(
            "the app's ServerApp is ldpfl's own, which for dp-sgd needs ldpfl's own ClientApp, but this app has another ClientApp: "
            "each node would decline. The app's author should write a ServerApp with LdpStrategy, see docs/flower.md"
        )
    if perturbed == "gradient" and config.data.person and output == "gradients":
        raise ConfigError(
            f"the app protects persons (data.person is {config.data.person!r}), but its LdpClientApp names no persons: each node would "
            "decline. The app's author should use RecordTask(persons=...) and LdpClientApp(records=..., persons=True)"
        )
    if perturbed != "gradient" and output.startswith("gradients"):
        raise ConfigError(
            f"mechanism.perturbed is {perturbed!r}, but this app's LdpClientApp(records=...) returns gradients: each node would decline. "
            "Set mechanism.perturbed to 'gradient', and mechanism.name to dp-sgd or another one for gradients"
        )


def _refuse_mistyped(settings: Mapping[str, Any]) -> None:
    """Raise if one of the ``settings``, of an app with a ServerApp of its own, looks like a mistyped one of :data:`_TRANSPORT_SETTINGS`.

    Such an app may have settings of its own, so an unknown name alone is no mistake.
    """
    for key in settings.keys() - set(RunSettings.names()):
        similar = get_close_matches(key.casefold().replace("_", "-"), _TRANSPORT_SETTINGS, n=1, cutoff=0.8)
        if similar:
            raise ConfigError(f"unknown setting {SECTION}.{key}: did you mean {similar[0]!r}?")


def _app_settings(project: Path) -> Mapping[str, Any]:
    """Return the table ``[tool.flwr.app.config.ldpfl]`` of an app's ``pyproject.toml``; empty if it has none."""
    try:
        tree: Any = from_toml(read_text(project))
        settings: Mapping[str, Any] = tree["tool"]["flwr"]["app"].get("config", {}).get("ldpfl", {})
    except (OSError, ValueError) as error:
        raise ConfigError(f"{project} cannot be read: {error}") from None
    except (KeyError, AttributeError, TypeError):
        raise ConfigError(f"{project} is not the file of a Flower app: it has no [tool.flwr.app]") from None
    return settings


def _offer_from(config: RunConfig, settings: RunSettings) -> Offer:
    """Return what an app with this ``config`` and these transport ``settings`` asks of its clients.

    Raises:
        ConfigError: nodes would decline every round, or this command cannot find out what the rounds release.
    """
    config = config_for_nodes(config)
    check_nothing_opened_or_run(config)
    check_code(config)
    not_loaded = names_not_loaded(config)
    if not code_names(config):  # the size of a model that is code is not known here
        _check_size(config)
    clients = config.clients
    asked = cohort_size(clients.fraction, clients.count)
    if settings.transport in OVER_RELAY and settings.min_clients > asked:
        raise ConfigError(
            f"ldpfl.min-clients is {settings.min_clients:,}, but a round asks only {asked:,} of the {clients.count:,} clients "
            f"(clients.count), so each node would decline each round. Set ldpfl.min-clients to {asked:,} or fewer, or raise clients.count"
        )
    config = config_for_transport(config, settings.transport, settings.linked, settings.min_clients)
    if not not_loaded:
        config = resolve_settings(config)  # some settings follow from the model's size, so the model must be loaded
    if settings.transport == "direct":
        return Offer(config, "direct", cohort=asked, reply_s=settings.reply_s)
    # A relay may release a round with the reports of no more than `min_clients`, however many are asked.
    return Offer(config, settings.transport, settings.min_clients, settings.linked, settings.reply_s, settings.window_s)


def config_for_transport(config: RunConfig, transport: Transport, linked: int, min_clients: int) -> RunConfig:
    """Return ``config`` with the channel of this ``transport``. The noise for a target epsilon depends on the channel.

    Args:
        linked: number of units of a report that stay together in the relay.
        min_clients: minimum number of clients whose reports the relay releases together.

    Raises:
        ConfigError: the noise for a target epsilon would not be calibrated for the rounds. In the order of the checks:

            - training has a target epsilon and asks a fraction of the clients: connected nodes would be asked more often than planned; or
            - training or evaluations have one that needs all clients (:func:`targets_for_all_clients`), and several units stay together in
              the relay; or training asks a fraction of the clients, but evaluations and statistics ask all, so that no one value of
              ``min_clients`` fits all rounds; or rounds may have fewer clients than are asked.
    """
    targets = targets_for_all_clients(config, transport)
    clients = config.clients
    asked = cohort_size(clients.fraction, clients.count)
    if config.privacy.target_epsilon != "off" and asked < clients.count:
        raise ConfigError(
            f"privacy.target_epsilon needs clients.fraction = 1, got {clients.fraction:g}: with less, connected nodes are asked more "
            "often than planned while others are away. Set clients.fraction to 1, or leave privacy.target_epsilon out and set the "
            "mechanism's noise"
        )
    if targets:
        if linked > 1:
            raise ConfigError(f"{targets[0]} needs ldpfl.linked = 1, got {linked}: set it to 1, or leave {targets[0]} out")
        if asked < clients.count and (is_evaluated(config) or statistics_rounds(config)):
            raise ConfigError(
                f"{targets[0]} needs rounds in which all clients that are asked take part. Evaluations and statistics ask "
                f"{clients.count:,}, training asks {asked:,}, but ldpfl.min-clients is one number. Set clients.fraction to 1, or leave "
                f"{targets[0]} out"
            )
        if min_clients < asked:
            raise ConfigError(f"{targets[0]} needs rounds in which all clients that are asked take part: set ldpfl.min-clients to {asked}")
    return config.model_copy(update={"shuffling": config.shuffling.model_copy(update={"channel": _CHANNELS[transport]})})


def targets_for_all_clients(config: RunConfig, transport: Transport) -> list[str]:
    """Return the settings of target epsilons for which a round needs the reports of all clients that are asked.

    Over a relay, clients' reports hide each other or their noise adds up, and less noise is calibrated for more clients. A shuffler does
    not hide sums over records, though: their epsilon is that of a client alone.
    """
    if transport not in OVER_RELAY or (transport == "relay" and isinstance(config.mechanism, DpSgdSettings)):
        return []
    calibrated_for = {"privacy.target_epsilon": config.privacy.target_epsilon, "evaluation.epsilon": config.evaluation.epsilon}
    return [key for key, epsilon in calibrated_for.items() if epsilon != "off"]


def transport_for_channel(channel: Channel) -> Transport:
    """Return the transport whose reports travel through ``channel``."""
    return next(transport for transport, channel_of_transport in _CHANNELS.items() if channel_of_transport == channel)


def config_for_nodes(config: RunConfig) -> RunConfig:
    """Return ``config`` as nodes get it: without the path of the server's test rows, if nodes train on their own tables."""
    return config.model_copy(update={"data": config.data.model_copy(update={"test_path": ""})}) if config.data.at_nodes else config


def _rounded_up(value: float) -> float:
    """Round ``value`` up to three significant digits, to give bounds that are easy to read. Zero and negative values are unchanged."""
    if value <= 0:
        return value
    step = 10.0 ** (floor(log10(value)) - _DIGITS + 1)  # the third significant digit's unit
    in_decimals = f"{ceil(value / step) * step:.{_DIGITS}g}"  # the product alone may have further digits, as 481 * 0.01 has
    return max(value, float(in_decimals))
