"""Decide by name alone what a server may ask a node to use. Nothing is opened, downloaded or run before these checks have passed.

A server may name built-in models, features, tasks and data. It may name mechanisms, and code that is installed on the node, only if the
node's policy lists them in ``mechanisms`` or ``models``. It may never name files, folders, the hub or objects. The policy judges later what
a mechanism may release.
"""

from __future__ import annotations

from collections.abc import Mapping

from ldpfl.errors import ConfigError, Declined
from ldpfl.experiments import RunConfig
from ldpfl.privacy.policy import Policy
from ldpfl.util.user_code import is_code

_MAX_SHOWN = 40
"""Maximum number of characters of a name in an error. A server may send names of any length."""


def check_mechanism(name: str, policy: Policy) -> None:
    """Raise if the policy does not list the mechanism ``name``.

    This is checked before the mechanism is looked up, because the look-up would run the code of a mechanism from an installed package. It
    also declines a built-in mechanism before the server's terms cost this node any work.

    Raises:
        Declined: the policy does not list ``name``.
    """
    if name not in policy.mechanisms:
        allowed = ", ".join(policy.mechanisms) or "none"
        raise Declined(
            f"mechanism {name[:_MAX_SHOWN]!r} is not among the policy's mechanisms ({allowed}); nothing was run or sent. If you trust it, "
            "add it to mechanisms in the policy",
            setting="mechanisms",
        )


def check_config(config: RunConfig, policy: Policy) -> None:
    """Raise if a server may not name the model, the features, the task, the tokenizer or the data of ``config``.

    Raises:
        Declined: the model, the features, the task or the tokenizer is code that the policy does not list, or one of their options is text,
            which may be a path. Or the node would have to open data that are named; rows would be grouped into persons by another column
            than the policy's; or the partition is code.
    """
    _check_code("model", config.model.name, config.model.options, policy)
    _check_code("features", config.data.features, config.data.feature_options, policy)
    _check_code("task", config.task.name, {}, policy)
    _check_code("tokenizer", config.data.tokenizer, {}, policy)
    if config.data.brought:
        raise Declined(f"{_DATA_NOT_OPENED}; nothing was read or sent")
    if config.data.person not in ("", policy.person):
        raise Declined(
            f"the round groups rows into persons by the column {config.data.person[:_MAX_SHOWN]!r}, but the policy has "
            f"person = {policy.person!r}: if that column does name persons, set person to it in the policy; nothing was read or sent",
            setting="person",
        )
    if is_code(config.data.partition):
        raise Declined(
            f"data.partition is {config.data.partition[:_MAX_SHOWN]!r}, which is code, and a node runs no such code for a server; nothing "
            "was run or sent. The server should name a built-in partition"
        )


def check_nothing_opened_or_run(config: RunConfig) -> None:
    """Raise if planning the rounds of ``config`` would open or download data, or run code, that the config names.

    A policy is written for a config whose author may be a stranger, so no name in the config is trusted.

    Raises:
        ConfigError: ``config`` names data by path, hub or code, or a task that is code. Nodes decline these anyway.
    """
    if config.data.brought:
        raise ConfigError(f"{_DATA_NOT_OPENED}: use ldpfl init --flower to write an app whose nodes have their own tables")
    if is_code(config.task.name):
        raise ConfigError(f"the task {config.task.name!r} is code, which this command does not run: use a built-in task")


_DATA_NOT_OPENED = (
    "the server's config names data by a path, by a name on the hub or by code (data.name, data.path or data.test_path), and a node opens "
    "no such data for a server"
)


def code_names(config: RunConfig) -> tuple[str, ...]:
    """Return the names of the model and the features of ``config`` that are not built in. A policy must list them as code."""
    return tuple(dict.fromkeys(name for name in (config.model.name, config.data.features) if is_code(name)))


def _check_code(role: str, name: str, options: Mapping[str, object], policy: Policy) -> None:
    """Raise if ``name`` is code that the policy does not list, or an option is text. Errors name the ``role``, such as "model"."""
    if is_code(name) and name not in policy.models:
        reason = f"{role} {name[:_MAX_SHOWN]!r} is code, and the policy's models do not list it; nothing was run or sent"
        raise Declined(f"{reason}. If you trust this code, add it to models in the policy", setting="models")
    if any(isinstance(value, str) for value in options.values()):
        raise Declined(f"an option of the {role} is text, expected numbers: a server could use text as a path; nothing was run or sent")
