"""Personal layers, set by ``model.personal``: layers that stay at the clients. Check other settings, and build the trainer for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from ldpfl.errors import ConfigError
from ldpfl.experiments.config import RunConfig
from ldpfl.models.layout import ParameterLayout
from ldpfl.simulation import LocalTask, Trainer, VectorizedTrainer
from ldpfl.simulation.personal_layers import PersonalTrainer
from ldpfl.util.user_code import is_pretrained


def split_layers(config: RunConfig, module: nn.Module) -> tuple[ParameterLayout, ParameterLayout]:
    """Return the layouts of the layers that clients send, and of the layers that stay with them.

    Raises:
        ConfigError: ``model.personal`` names no layer or all of them, or another setting does not fit it.
        PrivacyError: the model cannot be trained privately.
    """
    if problem := next(_misfits_with_personal_layers(config), None):
        raise ConfigError(f"model.personal keeps layers at the clients, and {problem}")
    return ParameterLayout.from_module(module).split(config.model.personal)


def _misfits_with_personal_layers(config: RunConfig) -> Iterator[str]:
    """Yield the reasons why other settings do not fit ``model.personal``, as ends of a sentence; nothing if no layer is personal."""
    if not config.model.personal:
        return
    training = config.training
    if config.mechanism.perturbed == "gradient":
        yield (
            f"mechanism {config.mechanism.name!r} sends gradients, so that no layer is trained at a client: choose a mechanism that "
            "protects clients, with mechanism.perturbed = 'update'. A mechanism that protects records would not cover personal layers: a "
            "record changes its client's layers, and through them the gradients of the client's other records"
        )
    if config.data.at_nodes:
        yield "nodes on Flower do not support that: leave model.personal out, or simulate"
    if config.data.evaluate_on != "clients":
        yield (
            "no client has a test set: set data.evaluate_on to 'clients' and evaluation.share, such as 0.2, to evaluate each client's "
            "model on records that it holds back"
        )
    if config.evaluation.epsilon != "off":
        yield "the private evaluation at clients measures the shared model: leave evaluation.epsilon out"
    for key in ("average", "patience"):
        if value := getattr(training, key):  # a recipe may have set it
            yield f"training.{key} = {value} would need the values of these layers in earlier rounds, which are not kept: set it to 0"
    if training.compile == "on":
        yield "compiled steps cannot train these layers: leave training.compile out"
    if training.proximal:
        yield "training.proximal draws layers towards broadcast values, which these layers do not have: leave it out"
    if is_pretrained(config.model.name) or config.model.adapter != "none":
        yield "pretrained models already choose what is trained: leave model.personal out, or take another model"


def weights_of_layers(module: nn.Module, layout: ParameterLayout) -> Tensor:
    """Return the weights (d,) of ``module`` that belong to the layers of ``layout``."""
    parameters = dict(module.named_parameters())
    return layout.flatten({name: parameters[name].detach() for name in layout.names})


def with_personal_layers(trainer: Trainer, shared: ParameterLayout, personal: ParameterLayout, module: nn.Module) -> Trainer:
    """Return the trainer of models whose layers in ``personal`` stay at the clients. Without such layers, return ``trainer`` unchanged.

    ``trainer`` trains all layers of ``module``. Clients send only those in ``shared``.

    Raises:
        ConfigError: the model cannot be trained for many clients at once.
    """
    if not personal.names:
        return trainer
    if not isinstance(trainer, VectorizedTrainer):
        raise ConfigError(
            "model.personal needs a model that can be trained for many clients at once, and this model cannot: leave model.personal out"
        )
    return PersonalTrainer(trainer, shared, personal, weights_of_layers(module, personal).to(trainer.task.data.device))


def task_of_all_layers(shared: LocalTask, weights: Tensor, personal: ParameterLayout) -> tuple[LocalTask, Tensor]:
    """Return the task of training all layers, and their initial weights (d + p,) in the module's order. Clients send d and keep p of them.

    ``weights`` (d,) are the initial weights of the layers that clients send. The personal layers begin with the weights of the module.
    """
    if not personal.names:
        return shared, weights
    layout = ParameterLayout.from_module(shared.module)
    layers = shared.layout.unflatten(weights) | personal.unflatten(weights_of_layers(shared.module, personal).to(weights.device))
    return replace(shared, layout=layout), layout.flatten(layers)


def initial_personal_layers(trainer: Trainer, clients: int) -> Tensor | None:
    """Return the p personal weights of each client before the first round, as (``clients``, p); None if the model has none."""
    return torch.tile(trainer.initial.cpu(), (clients, 1)) if isinstance(trainer, PersonalTrainer) else None
