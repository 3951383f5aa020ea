"""The run of a trial: the quickstart with changes, the policy that allows this run, and the settings of its Flower app."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ldpfl.deploy.demo_files import Site
from ldpfl.errors import ConfigError
from ldpfl.experiments import RunConfig, load_recipe
from ldpfl.experiments.build import build, choose_device
from ldpfl.experiments.calibration import resolve_settings
from ldpfl.experiments.dataset import load_dataset
from ldpfl.flower.policy_init import Offer, config_for_transport, fitting_policy
from ldpfl.flower.run_settings import RunSettings
from ldpfl.flower.terms import deployable_mechanism, require_adding_up
from ldpfl.privacy.policy import Policy, Transport

RECIPE = "quickstart"

LINKED = 16
"""Weights that stay together in a sealed record. LDP-FL's parameter shuffling has 1, which takes 16 times as long to seal and open."""

REPLY_S = 20.0
"""Seconds after its charge at which each node replies. A node that has not trained by then, on a busy machine, reports no change."""

_MIN_CLIENTS = 2

_DEMO_CHANGES: Mapping[Transport, tuple[str, ...]] = {
    "relay": ("training.epochs=2",),
    "sum": (
        "privacy.target_epsilon=4",
        'mechanism.name="dp-sgd"',
        'mechanism.perturbed="gradient"',
        'data.features="strokes"',
        'model.name="linear"',
        "training.epochs=1",
        "training.server_learning_rate=64",
        "training.server_momentum=0.9",
    ),
}
"""Settings that the demo changes in the quickstart: a shorter training, or a linear model whose records a sum protects."""

_MEASURING_DIVISOR = 4
"""Divisor of the target epsilon. The quotient is spent on measuring the model at nodes, if records are protected."""

WINDOW_S = 1.0
"""Minimum number of seconds for which the relay takes uploads. It waits for all clients anyway, so a slow machine loses none."""

_NODES_WAIT_S = 120.0
_REPLIES_WAIT_S = 180.0


@dataclass(frozen=True)
class Trial:
    """A run to deploy on one machine.

    Attributes:
        changes: changes to the recipe ``RECIPE``, as ``key=value``.
        policy: policy of each node; the aggregator's key is still missing in it.
        data_dir: folder with data sets; None to look in the default places.
        reply_s: seconds after its charge at which each node replies.
        transport: way of the reports: through the relay that mixes them, or as masked vectors into a sum.
        layers: sizes of the model's arrays.
    """

    config: RunConfig
    changes: tuple[str, ...]
    policy: Policy
    data_dir: Path | None
    reply_s: float
    transport: Transport = "relay"
    layers: tuple[int, ...] = ()

    @property
    def clients(self) -> int:
        return self.config.clients.count

    @property
    def rounds(self) -> int:
        return self.config.training.rounds


def trial_of(
    clients: int,
    rounds: int,
    changes: Sequence[str] = (),
    data_dir: Path | None = None,
    reply_s: float = REPLY_S,
    transport: Transport = "relay",
) -> Trial:
    """Return the trial of ``clients`` nodes and ``rounds`` rounds of the quickstart, with ``changes`` of the form ``key=value``.

    The data are loaded once here. So mistakes show before the deployment, and nodes read the decoded data from the cache. The other
    arguments are as for :class:`Trial`.

    Raises:
        LdpflError: the settings, the model or the data do not fit, or nothing would be protected.
    """
    for change in changes:
        if ";" in change:
            raise ConfigError(f"setting {change!r} has a semicolon, by which Flower's run config separates settings: remove it")
    all_changes = (f"clients.count={clients}", f"training.rounds={rounds}", *_DEMO_CHANGES[transport], *changes)
    recipe = load_recipe(RECIPE, all_changes)
    target = recipe.privacy.target_epsilon
    # If records are protected in sums, the nodes also measure the model, unless the changes say something else about evaluation.
    adds_evaluation = (
        transport == "sum" and recipe.mechanism.name == "dp-sgd" and not any(change.startswith("evaluation.") for change in changes)
    )
    if adds_evaluation and target != "off":
        all_changes = (*all_changes, f"evaluation.epsilon={target / _MEASURING_DIVISOR:g}")
        recipe = load_recipe(RECIPE, all_changes)
    dataset = load_dataset(recipe, data_dir)
    if recipe.mechanism.missing_setting_message:
        all_changes = (*all_changes, *_stated_record_counts(recipe, len(dataset.train)))
        recipe = load_recipe(RECIPE, all_changes)
    linked = LINKED if transport == "relay" else 1
    config = resolve_settings(config_for_transport(recipe, transport, linked, recipe.clients.count))
    if config.clients.count < _MIN_CLIENTS:
        raise ConfigError(f"the demo needs at least {_MIN_CLIENTS} clients, got {config.clients.count}")
    if config.clients.fraction != 1:
        raise ConfigError(f"the demo asks all clients in each round: leave clients.fraction at 1, got {config.clients.fraction:g}")
    _, start = build(config, dataset, choose_device("cpu"))
    if transport == "sum":
        require_adding_up(deployable_mechanism(config, start.state.ranges))  # raises before anything is deployed
    offer = Offer(config, transport, cohort=config.clients.count, linked=linked, reply_s=reply_s)
    policy = fitting_policy(offer, start.state.ranges)
    absolute_data_dir = None if data_dir is None else data_dir.absolute()
    return Trial(config, all_changes, policy, absolute_data_dir, reply_s, transport, start.state.ranges.sizes)


def _stated_record_counts(recipe: RunConfig, records: int) -> list[str]:
    """Return changes that state a client's mean numbers of ``records``: those it trains on, and those it holds back, if any.

    A deployment must state these numbers, which are public in the demo. A simulation computes them.
    """
    records_per_client = records // recipe.clients.count
    held_back = int(records_per_client * recipe.evaluation.share)
    changes = [f"mechanism.records={max(1, records_per_client - held_back)}"]
    return [*changes, f"evaluation.records={held_back}"] if held_back else changes


def settings_of(site: Site, trial: Trial) -> RunSettings:
    """Return the settings with which the operator submits ldpfl's own apps."""
    return RunSettings(
        recipe=RECIPE,
        changes="; ".join(trial.changes),
        out=str(site.run),
        nodes=trial.clients,
        wait_s=_NODES_WAIT_S,
        timeout_s=_REPLIES_WAIT_S,
        transport=trial.transport,
        linked=LINKED if trial.transport == "relay" else 1,  # values of a report that one message holds; only the relay mixes messages
        min_clients=trial.clients,
        window_s=WINDOW_S,
        reply_s=trial.reply_s,
    )
