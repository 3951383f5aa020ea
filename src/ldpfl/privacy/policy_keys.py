"""Change the aggregators' keys in a policy file, and nothing else in it. While a key is replaced, the policy names both keys."""

from __future__ import annotations

import re
import stat
import tomllib
from pathlib import Path

from ldpfl.errors import ConfigError
from ldpfl.privacy.policy import Policy, read_policy
from ldpfl.util.files import replace_atomically

_SETTING = re.compile(r"^[ \t]*aggregator_keys[ \t]*=[ \t]*\[[^\]]*\]", re.MULTILINE)


def add_key(path: Path, key: str) -> Policy:
    """Add ``key`` to the keys that reports may be sealed to, and return the policy.

    Raises:
        ConfigError: ``key`` is no public key, the policy names it already, or the file's layout does not allow an automatic change.
        Declined: the file is unreliable.
    """
    keys = read_policy(path).aggregator_keys
    if key in keys:
        raise ConfigError(f"policy {path} names the key {key} already: nothing was changed")
    return _replace_keys(path, (*keys, key))


def remove_key(path: Path, key: str) -> Policy:
    """Remove ``key`` from the keys that reports may be sealed to, and return the policy. Raises the errors of :func:`add_key`."""
    keys = read_policy(path).aggregator_keys
    if key not in keys:
        raise ConfigError(f"policy {path} does not name the key {key!r}: it names {', '.join(keys) or 'none'}")
    return _replace_keys(path, tuple(known for known in keys if known != key))


def _replace_keys(path: Path, keys: tuple[str, ...]) -> Policy:
    """Replace the keys in the policy file by ``keys``, and return the policy. All other text stays, comments too."""
    policy_path = path.resolve()  # a symbolic link to the policy stays one
    current = read_policy(policy_path)
    changed_policy = Policy.model_validate({**current.model_dump(), "aggregator_keys": _validated_keys(keys)})
    text = policy_path.read_text(encoding="utf-8")
    setting = f"aggregator_keys = [{', '.join(map(_quoted, keys))}]"
    changed_text, matches = _SETTING.subn(lambda _: setting, text)
    if matches == 0 and "aggregator_keys" not in tomllib.loads(text):
        changed_text = f"{text.rstrip()}\n{setting}\n"  # a policy has no tables, so the end is as good a place as any
    # The file is written only if the new text means the new policy. It does not if, for example, a comment looks like the setting.
    if matches > 1 or _parse_policy(changed_text) != changed_policy:
        raise ConfigError(f"aggregator_keys in {path} cannot be changed by a command: set it by hand to [{', '.join(map(_quoted, keys))}]")
    with replace_atomically(policy_path, stat.S_IMODE(policy_path.stat().st_mode)) as temporary:
        temporary.write_text(changed_text, encoding="utf-8")
    return changed_policy


def _validated_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``keys`` if all are public keys, else raise :class:`ConfigError`."""
    for key in keys:
        try:
            Policy(aggregator_keys=(key,))
        except ValueError:
            raise ConfigError(
                f"{key!r} is not a public key: expected 32 bytes in base64, 44 characters, as ldpfl deploy key prints"
            ) from None
    return keys


def _quoted(key: str) -> str:
    return f'"{key}"'


def _parse_policy(text: str) -> Policy | None:
    """Return the policy in ``text``; None if it is not a valid one."""
    try:
        return Policy.model_validate(tomllib.loads(text))
    except ValueError:
        return None
