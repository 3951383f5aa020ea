"""Changing the aggregators' keys of a policy file, and nothing else in it: while a key is replaced, a policy names both."""

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
    """Let reports be sealed to ``key`` as well, and return the policy.

    Raises:
        ConfigError: it is no public key, is named already, or the file is written in a way that this cannot change.
        Declined: the file cannot be relied on.
    """
    keys = read_policy(path).aggregator_keys
    if key in keys:
        raise ConfigError(f"{path} names the key {key} already")
    return _with_keys(path, (*keys, key))


def remove_key(path: Path, key: str) -> Policy:
    """Let no more reports be sealed to ``key``, and return the policy; errors as :func:`add_key`."""
    keys = read_policy(path).aggregator_keys
    if key not in keys:
        raise ConfigError(f"{path} does not name the key {key!r}: it names {', '.join(keys) or 'none'}")
    return _with_keys(path, tuple(known for known in keys if known != key))


def _with_keys(path: Path, keys: tuple[str, ...]) -> Policy:
    """Put ``keys`` in place of those in the file; all other text stays, comments too."""
    own = path.resolve()
    before = read_policy(own)
    wanted = Policy.model_validate({**before.model_dump(), "aggregator_keys": _checked(keys)})
    text = own.read_text(encoding="utf-8")
    setting = f"aggregator_keys = [{', '.join(map(_quoted, keys))}]"
    changed, times = _SETTING.subn(lambda _: setting, text)
    if times == 0 and "aggregator_keys" not in tomllib.loads(text):
        changed = f"{text.rstrip()}\n{setting}\n"  # a policy has no tables, so the end is as good a place as any
    if times > 1 or _read(changed) != wanted:  # such as one that is written in another way, or stands in a comment
        raise ConfigError(f"aggregator_keys in {path} cannot be changed by a command: set it by hand to [{', '.join(map(_quoted, keys))}]")
    with replace_atomically(own, stat.S_IMODE(own.stat().st_mode)) as temporary:
        temporary.write_text(changed, encoding="utf-8")
    return wanted


def _checked(keys: tuple[str, ...]) -> tuple[str, ...]:
    for key in keys:
        try:
            Policy(aggregator_keys=(key,))
        except ValueError:
            raise ConfigError(f"{key!r} is no public key: expected 32 bytes in base64, 44 characters, as ldpfl deploy key prints") from None
    return keys


def _quoted(key: str) -> str:
    return f'"{key}"'


def _read(text: str) -> Policy | None:
    try:
        return Policy.model_validate(tomllib.loads(text))
    except ValueError:
        return None
