"""What a server may name on a node: what is built in, and what the operator names; nothing is opened or run to find out."""

from __future__ import annotations

import pytest

from conftest import TINY_TOML
from ldpfl.errors import ConfigError, Declined
from ldpfl.experiments.config import parse_config
from ldpfl.flower.named_by_server import check_config, check_mechanism, check_nothing_opened_or_run
from ldpfl.flower.policy_init import check_code
from ldpfl.privacy.policy import Policy

CODE = "somewhere:Thing"

FOREIGN = {
    "a model": (f"model.name={CODE}", "model 'somewhere:Thing' is code"),
    "a model of a file": ("model.name=thing.py:Thing", "model 'thing.py:Thing' is code"),
    "an option of a model": ('model.options.hidden="/etc/passwd"', "an option of the model is text"),
    "features": (f"data.features={CODE}", "features 'somewhere:Thing' is code"),
    "an option of features": ('data.feature_options.directions="/etc/passwd"', "an option of the features is text"),
    "a task": (f"task.name={CODE}", "task 'somewhere:Thing' is code"),
    "data": (f"data.name={CODE}", "the server's config names data by a path"),
    "data of the hub": ("data.name=somebody/faces", "the server's config names data by a path"),
    "data that were handed over": ("data.name=given", "the server's config names data by a path"),
}


def policy_of(**settings: object) -> Policy:
    return Policy.model_validate({"mechanisms": ["duchi"], **settings})


@pytest.mark.parametrize("what", FOREIGN)
def test_what_a_policy_does_not_name_is_declined(what: str) -> None:
    change, why = FOREIGN[what]
    with pytest.raises(Declined, match=why):
        check_config(parse_config(TINY_TOML, [change], origin="test"), policy_of())


@pytest.mark.parametrize("what", ["a model", "features", "a task"])
def test_installed_code_may_be_named_where_the_policy_does(what: str) -> None:
    check_config(parse_config(TINY_TOML, [FOREIGN[what][0]], origin="test"), policy_of(models=[CODE]))


def test_built_in_names_and_numbers_are_for_every_server() -> None:
    check_config(parse_config(TINY_TOML, ["data.features=strokes", "data.feature_options.directions=20"], origin="test"), policy_of())


def test_a_mechanism_is_one_that_the_policy_names() -> None:
    """Also one of ours: it is looked up and built only then."""
    check_mechanism("duchi", policy_of())
    check_mechanism("theirs", policy_of(mechanisms=["theirs"]))
    for name in ("harmony", "theirs", "duchi:Thing", ""):
        with pytest.raises(Declined, match="not among the policy's mechanisms"):
            check_mechanism(name, policy_of())


def test_a_stranger_s_app_says_what_it_asks_without_being_run() -> None:
    """Code that is installed is not run either, and has to be named in the policy that comes of it."""
    check_nothing_opened_or_run(parse_config(TINY_TOML, [f"model.name={CODE}"], origin="test"))
    for change in (f"task.name={CODE}", f"data.name={CODE}", "data.name=somebody/faces"):
        with pytest.raises(ConfigError):
            check_nothing_opened_or_run(parse_config(TINY_TOML, [change], origin="test"))
    with pytest.raises(ConfigError, match="nodes load no code from files"):
        check_code(parse_config(TINY_TOML, ["model.name=thing.py:Thing"], origin="test"))
