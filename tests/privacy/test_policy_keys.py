"""While an aggregator's key is replaced a policy names both; all else in the file, comments too, stays as it was."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from ldpfl import ConfigError
from ldpfl.errors import Declined
from ldpfl.privacy.policy import Policy, read_policy
from ldpfl.privacy.policy_keys import add_key, remove_key
from ldpfl.transport.shuffling.sealing import generate_key, public_text

OLD, NEW = (public_text(generate_key()) for _ in range(2))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "policy.toml"


@pytest.mark.parametrize("written", ['aggregator_keys = ["{}"]', 'aggregator_keys = [\n    "{}",\n]', "  aggregator_keys=['{}']  # theirs"])
def test_a_key_is_added_beside_the_old_one_which_is_then_removed(written: str, file: Path) -> None:
    file.write_text(f'# mine\nmechanisms = ["duchi"]\n{written.format(OLD)}\nrounds = 3  # no more\n', encoding="utf-8")
    file.chmod(0o600)
    before = read_policy(file)
    assert add_key(file, NEW) == read_policy(file) == before.model_copy(update={"aggregator_keys": (OLD, NEW)})
    assert remove_key(file, OLD) == read_policy(file) == before.model_copy(update={"aggregator_keys": (NEW,)})
    text = file.read_text(encoding="utf-8")
    assert "# mine\n" in text
    assert "rounds = 3  # no more\n" in text
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_policy_without_keys_gets_its_first(file: Path) -> None:
    file.write_text('mechanisms = ["duchi"]', encoding="utf-8")
    add_key(file, NEW)
    assert read_policy(file) == Policy(mechanisms=("duchi",), aggregator_keys=(NEW,))


@pytest.mark.parametrize(
    "text",
    [
        '# aggregator_keys = ["a"]\n"aggregator_keys" = []\n',  # named otherwise
        'aggregator_keys = [\n  # the [first] one\n  "OLD",\n]\n',  # a bracket in a comment
    ],
)
def test_what_cannot_be_changed_safely_is_left_as_it_is(text: str, file: Path) -> None:
    file.write_text(text.replace("OLD", OLD), encoding="utf-8")
    with pytest.raises(ConfigError, match="by hand"):
        add_key(file, NEW)
    assert file.read_text(encoding="utf-8") == text.replace("OLD", OLD)


def test_mistakes_are_refused_and_change_nothing(file: Path) -> None:
    file.write_text(f'aggregator_keys = ["{OLD}"]\n', encoding="utf-8")
    for action, key, words in ((add_key, OLD, "already"), (add_key, "abc", "not a public key"), (remove_key, NEW, "does not name")):
        with pytest.raises(ConfigError, match=words):
            action(file, key)
    file.chmod(0o666)
    with pytest.raises(Declined, match="can be changed by other users"):
        add_key(file, NEW)
    assert file.read_text(encoding="utf-8") == f'aggregator_keys = ["{OLD}"]\n'
