"""What a server may name on a node, by name alone: nothing is opened, fetched or run for it before this has allowed it.

Built-in models, features, tasks and data may be named by anyone; mechanisms, and code that is installed on the node, by those only whose
policy names it in ``mechanisms`` or ``models``; files, folders, the hub and objects by nobody. What a mechanism may do is the policy's to
judge.
"""

from __future__ import annotations

from collections.abc import Mapping

from ldpfl.errors import ConfigError, Declined
from ldpfl.experiments import RunConfig
from ldpfl.privacy.policy import Policy
from ldpfl.util.user_code import is_code, lies_in_file


def check_mechanism(name: str, policy: Policy) -> None:
    """Return if the policy names the mechanism ``name``, which is the name that its settings and its releases go by.

    Raises:
        Declined: it does not. One that is not built in may be of a package that is installed here, whose code would run when it is looked
            up; and any other is declined before a server's terms make work for this node.
    """
    if name not in policy.mechanisms:
        allowed = ", ".join(policy.mechanisms) or "none at all"
        raise Declined(f"mechanism {name[:40]!r} is not among the policy's mechanisms ({allowed}); nothing was run or sent", "mechanisms")


def check_config(config: RunConfig, policy: Policy) -> None:
    """Return if a server may name the model, the features, the task and the data of ``config``.

    Raises:
        Declined: one of them is code that the policy does not name, an option is text, which may be a path, data would be opened, or rows
            would be grouped into persons by a column that the policy does not name.
    """
    _check_code("model", config.model.name, config.model.options, policy)
    _check_code("features", config.data.features, config.data.feature_options, policy)
    _check_code("task", config.task.name, {}, policy)
    _check_code("tokenizer", config.data.tokenizer, {}, policy)
    if config.data.brought:
        raise Declined(f"{_OPENED}; nothing was read or sent")
    if config.data.person not in ("", policy.person):
        raise Declined(
            f"the round takes rows of one {config.data.person[:40]!r} for one person's, and the policy's person is {policy.person!r}: if "
            "that column does name persons, set person to it in the policy; nothing was read or sent",
            "person",
        )
    if is_code(config.data.partition):
        raise Declined(f"partition {config.data.partition[:40]!r} is code that the server names; nothing was run or sent")


def check_needs_nothing(config: RunConfig) -> None:
    """Return if nothing has to be opened, fetched or run to know what ``config`` asks of nodes; who wrote it may be a stranger.

    Raises:
        ConfigError: it names data or a task of its own, or a file of code, which nodes decline anyway.
    """
    if config.data.brought:
        raise ConfigError(_OPENED)
    for name in code_of(config):
        if lies_in_file(name):
            raise ConfigError(f"the app names the file {name!r}, and a node loads none: what it is to run comes as package.module:Class")
    if is_code(config.task.name):
        raise ConfigError(
            f"{config.task.name!r} is code, which is not run for this: a node takes a built-in task, or one that its policy names"
        )


_OPENED = "the round names data by path, hub or code, which a node opens for no server"


def code_of(config: RunConfig) -> tuple[str, ...]:
    """Return what ``config`` names that is code: its model, its features."""
    return tuple(dict.fromkeys(name for name in (config.model.name, config.data.features) if is_code(name)))


def _check_code(what: str, name: str, options: Mapping[str, object], policy: Policy) -> None:
    if is_code(name) and name not in policy.models:
        said = f"{what} {name[:40]!r} is code that the server names, and not among the policy's models; nothing was run or sent"
        raise Declined(said, "models")
    if any(isinstance(value, str) for value in options.values()):
        raise Declined(f"an option of the {what} is text, which a server could use as a path; nothing was run or sent")
