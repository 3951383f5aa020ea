"""Write the error message for a wrong setting: which setting, why it is wrong, and the nearest known one."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from math import isfinite

from pydantic import ValidationError

from ldpfl.errors import shown
from ldpfl.util.suggestions import did_you_mean

_MAX_SHOWN = 200
"""Maximum number of characters of a refused key in a message. A server may have sent the key, and the message goes to a node's log."""


def validation_message(error: ValidationError, origin: str, known: Sequence[str], sections: Sequence[str], mechanism: str) -> str:
    """Return a message on the first error in a config, with a suggestion.

    Args:
        origin: name of the config, for the message.
        known: dotted keys of all settings of a config with this ``mechanism``.
        sections: names of all sections.
    """
    errors = error.errors()
    first = errors[0]
    # Pydantic's location of an error consists of the parts of the key, and of names of the alternatives of a type, which are dropped.
    parts = {part for key in known for part in key.split(".")}
    key = ".".join(str(part) for part in first["loc"] if str(part) in parts)
    if first["type"] == "extra_forbidden":
        key = ".".join(str(part) for part in first["loc"])[:_MAX_SHOWN]  # an unknown key has parts that no known key has
        if key.startswith("mechanism."):
            settings = [name.removeprefix("mechanism.") for name in known if name.startswith("mechanism.")]
            return f"unknown setting {key!r} in {origin}: {_unknown_mechanism_setting(mechanism, key.removeprefix('mechanism.'), settings)}"
        return f"unknown setting {key!r} in {origin}: {_suggestion(key, known, sections, is_section=isinstance(first['input'], dict))}"
    if first["type"] == "unknown_mechanism":
        return f"setting {key!r} in {origin}: {first['msg']}"
    # A setting of several types, such as a number or a word, gives an error for each type.
    depth = len(key.split("."))
    expected = list(dict.fromkeys(other["msg"] for other in errors if other["loc"][:depth] == first["loc"][:depth]))
    message = expected[0] + "".join(f" or {text.removeprefix('Input should be ')}" for text in expected[1:])
    hint = _format_hint(key, first["input"], {other["type"] for other in errors})
    return f"setting {key!r} in {origin}: {message[0].lower()}{message[1:]}, got {shown(first['input'])}{hint}"


def _format_hint(key: str, value: object, error_types: Collection[str]) -> str:
    """Return a hint on how to write a list or a table, if one was expected and ``value`` is something else; "" otherwise.

    ``error_types`` are pydantic's names for the errors of this setting.
    """
    list_expected, table_expected = "list_type" in error_types, "dict_type" in error_types
    if list_expected and isinstance(value, Mapping):
        return f"; expected a list without names, as in {_EXAMPLES.get(key, '[first, second]')}"
    if table_expected and isinstance(value, list):
        return f"; expected a table with a name for each value, as in {_EXAMPLES.get(key, '{name = value}')}"
    if list_expected and key == "data.class_shares" and not isinstance(value, str):  # a number such as 0.1, for the rarer of two classes
        return f"; expected a list of all values, as in {_EXAMPLES[key]}"
    # A text is usually a list or a table without its brackets or quotes, as the shell passes it on.
    if table_expected and isinstance(value, str) and "=" in value:
        return "; a table has braces, and texts in it quotes, as in {age = [0, 120]}"
    if not list_expected or not isinstance(value, str):
        return ""
    parts = ", ".join(part if _is_number(part) else json.dumps(part, ensure_ascii=False) for part in map(str.strip, value.split(",")))
    return f"; a list has brackets, and texts in it quotes: --set '{key}=[{parts[:_MAX_SHOWN]}]'"


_EXAMPLES = {
    "data.class_shares": "[0.9, 0.1], a share for each class in the order of data.classes, or for each label in that of data.target",
    "data.cut_points": "[30, 90, 365], in the unit of the time",
    "data.bounds": "{age = [0, 120]}",
    "data.categories": '{ward = ["icu", "cardio"]}',
}
"""Example value of each setting that is a list or a table."""


def _is_number(text: str) -> bool:
    """Return whether ``text`` is a finite number."""
    try:
        return isfinite(float(text))
    except ValueError:
        return False


def _unknown_mechanism_setting(mechanism: str, setting: str, known_settings: Sequence[str]) -> str:
    """Return a message that ``mechanism`` has no such ``setting``, with the nearest of its ``known_settings``, or all of them."""
    nearest = get_close_matches(setting, known_settings, n=1)
    suggestion = f"did you mean 'mechanism.{nearest[0]}'?" if nearest else f"it has: {', '.join(sorted(known_settings))}"
    return f"{mechanism} has no setting {setting!r}; {suggestion}"


def _suggestion(key: str, known: Sequence[str], sections: Sequence[str], *, is_section: bool) -> str:
    """Suggest a name for the unknown ``key``: a section if its value is a table (``is_section``), else a setting of its section, or any."""
    if is_section and "." not in key:
        return did_you_mean(key, sections)
    section = key.rpartition(".")[0]
    siblings = [name for name in known if section and name.startswith(f"{section}.")]
    everywhere = sorted({*known, *sections})
    return did_you_mean(key, siblings) if siblings else did_you_mean(key, everywhere)
