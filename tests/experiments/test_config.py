"""A config is checked before anything starts, and written down so that it can be run again."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from conftest import TINY_TOML, CommandLine
from grids import each
from ldpfl.api import configure
from ldpfl.errors import ConfigError
from ldpfl.experiments import RunConfig, load_recipe, read_config, recipe_names
from ldpfl.experiments.config import known_keys, parse_config, toml_value
from ldpfl.util.quantities import MAX_ROUNDS


def parse(text: str = "", *overrides: str) -> RunConfig:
    return parse_config(text, overrides, origin="test")


def refusal(text: str = "", *overrides: str) -> str:
    """Expect refusal in one line, and return it."""
    with pytest.raises(ConfigError) as caught:
        parse(text, *overrides)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("[mechanism]\nepsilom = 1.0", "mechanism.epsilon"),
        ("[training]\nlearningrate = 1.0", "training.learning_rate"),
        ("[training]\nround = 3", "training.rounds"),
        ("[range]\nradius = 0.1", "ranges"),
        ("epsilon = 1.0", "mechanism.epsilon"),
        ("sed = 1", "seed"),
        ("[client]\ncount = 3", "clients"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(wrong: str, nearest: str) -> None:
    message = refusal(wrong)
    assert "unknown setting" in message
    assert f"did you mean '{nearest}" in message


@each("key", ["mechanism.epsilon", "ranges.radius", "training.learning_rate", "data.alpha", "ranges.floor"])
@each("value", ["0", "0.0", "-1", "nan", "inf", "-inf", '"1.0"', "true", "[1.0]"])
def test_what_must_be_positive_and_finite_is(key: str, value: str) -> None:
    assert key in refusal("", f"{key}={value}")


@each("key", ["clients.count", "training.rounds", "training.epochs", "training.batch_size"])
@each("value", ["0", "-1", "1.5", "2.0", '"3"', "true", "nan", "many"])
def test_counts_are_whole_and_at_least_one(key: str, value: str) -> None:
    assert key in refusal("", f"{key}={value}")


@pytest.mark.parametrize(
    "override",
    [
        "seed=-1",
        "seed=1.5",
        "clients.fraction=0",
        "clients.fraction=1.01",
        "clients.fraction=nan",
        "training.momentum=1.0",
        "training.momentum=-0.1",
        "mechanism.name=laplacian",
        "mechanism.perturbed=gradients",
        "data.partition=random",
        "data.evaluate_on=train",
        "ranges.rule=free",
        "ranges.radius=big",
        "ranges.center=inf",
        "name=3",
    ],
)
def test_values_outside_their_domain_are_refused_by_key(override: str) -> None:
    assert override.split("=")[0] in refusal("", override)


def test_a_setting_that_is_a_number_or_a_word_is_refused_with_both_kinds() -> None:
    assert "valid number or 'off', got 'on'" in refusal("", "training.clip_norm=on")


def test_a_radius_of_one_layer_that_is_not_positive_is_refused() -> None:
    assert "ranges.radius" in refusal('[ranges.radius]\n"fc1.weight" = 0.1\n"fc1.bias" = 0.0')


def test_a_file_that_is_no_toml_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("[mechanism\nepsilon = 1", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"broken\.toml is not valid TOML"):
        read_config(path)


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00name")
    for path in (tmp_path / "missing.toml", tmp_path, binary):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_config(path)


def test_overrides_are_read_as_toml_values_and_else_as_text() -> None:
    config = parse(
        TINY_TOML,
        "mechanism.epsilon=4",
        "clients.count = 20",
        "data.name=cifar10",
        'name="quoted"',
        "description=two words",
        "training.momentum=5e-1",
        "model.options={bias = false, width = 3}",
        "ranges.radius=initial",
    )
    assert config.mechanism.epsilon_and_budget == (4.0, "unit")
    assert config.clients.count == 20
    assert config.data.name == "cifar10"
    assert (config.name, config.description) == ("quoted", "two words")
    assert config.training.momentum == 0.5
    assert config.model.options == {"bias": False, "width": 3}
    assert config.ranges.radius == "initial"
    assert config.training.rounds == 3  # untouched settings stay as the file has them


def test_the_last_override_of_a_key_counts_and_values_may_hold_equal_signs() -> None:
    assert parse("", "seed=1", "seed=2").seed == 2
    assert parse("", "description=a=b").description == "a=b"


@pytest.mark.parametrize("override", ["seed", "=3", "", "  = 1"])
def test_an_override_without_key_or_value_is_refused(override: str) -> None:
    assert "key=value" in refusal("", override)


def test_an_override_into_a_value_is_refused() -> None:
    assert "seed" in refusal("seed = 1", "seed.more=2")


texts = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\x7f"), max_size=20)
positive = st.floats(1e-300, 1e300)


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    """Configs with odd but allowed values in every kind of setting."""
    layers = st.dictionaries(st.sampled_from(["1.weight", "fc1.bias", "a b", "ü"]), positive, min_size=1)
    tree: dict[str, Any] = {
        "name": draw(texts.filter(str.isprintable)),
        "description": draw(texts.filter(str.isprintable)),
        "seed": draw(st.integers(0, 2**63 - 1)),
        "model": {"name": draw(texts), "options": draw(st.dictionaries(texts, st.booleans() | st.integers(-99, 99) | positive | texts))},
        "mechanism": {"epsilon": draw(positive), "perturbed": draw(st.sampled_from(["weights", "update"]))},
        "clients": {"count": draw(st.integers(1, 10**9)), "fraction": draw(st.floats(1e-9, 1.0))},
        "ranges": {"radius": draw(positive | layers | st.just("initial")), "center": draw(st.floats(-1e300, 1e300) | layers)},
    }
    return RunConfig.model_validate(tree)


@settings(derandomize=True)
@given(configs())
@pytest.mark.slow
@pytest.mark.thorough
def test_the_written_config_reads_back_the_same(config: RunConfig) -> None:
    assert parse(config.to_toml()) == config
    assert parse(config.to_toml()).to_toml() == config.to_toml()


def test_the_written_config_is_complete() -> None:
    """A later version with other defaults must still run the same."""

    def flat(tree: dict[str, Any], prefix: str = "") -> set[str]:
        inner = [flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}"} for key, value in tree.items()]
        return set().union(*inner)

    written = flat(tomllib.loads(parse(TINY_TOML).to_toml()))
    assert written == set(known_keys())
    assert {"seed", "data.partition", "training.momentum", "ranges.floor", "clients.fraction"} <= written


def test_differences_name_each_setting_with_both_values() -> None:
    mine = parse(TINY_TOML)
    theirs = parse(TINY_TOML, "mechanism.epsilon=5", "seed=9")
    assert mine.differences(theirs) == ["mechanism.epsilon: 2.0 -> 5.0", "seed: 3 -> 9"]
    assert mine.differences(parse(TINY_TOML)) == []


RECIPES: dict[str, dict[str, Any]] = {
    "quickstart": {"data.name": "mnist-5k"},
    "ldp-fl/mnist": {
        "data.name": "mnist",
        "data.partition": "iid",
        "model.name": "two-layer-cnn",
        "clients.count": 100,
        "clients.fraction": 1.0,
        "training.rounds": 10,
        "training.learning_rate": 0.03,
        "training.epochs": 5,
        "training.batch_size": 10,
        "mechanism.name": "duchi",
        "mechanism.epsilon": 1.0,
        "mechanism.perturbed": "weights",
        "ranges.rule": "fixed",
        "ranges.center": 0.0,
        "ranges.radius": 0.075,
    },
    "ldp-fl/mnist-update": {"data.name": "mnist", "mechanism.perturbed": "update", "ranges.radius": 0.02, "ranges.center": 0.0},
    "ldp-fl/fmnist": {"data.name": "fashion_mnist", "mechanism.perturbed": "weights", "model.name": "two-layer-cnn"},
    "ldp-fl/fmnist-update": {"data.name": "fashion_mnist", "mechanism.perturbed": "update"},
    "ldp-fl/cifar10": {"data.name": "cifar10", "mechanism.perturbed": "weights", "model.name": "small-vgg"},
    "ldp-fl/cifar10-update": {"data.name": "cifar10", "mechanism.perturbed": "update"},
    "ldp-fl/fmnist-scattering": {"clients.count": 200, "training.rounds": 15, "mechanism.epsilon": 4.0, "mechanism.perturbed": "update"},
    "ldp-fl/cifar10-leaves": {"clients.count": 500, "training.rounds": 15, "mechanism.epsilon": 10.0, "mechanism.perturbed": "update"},
}


def test_the_recipes_of_the_issue_are_there_with_the_default_first() -> None:
    assert recipe_names()[0] == "quickstart"
    assert set(RECIPES) <= set(recipe_names())


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_values_of_the_issue(name: str) -> None:
    config = load_recipe(name)
    assert config.name == name
    assert config.description
    for key, value in RECIPES[name].items():
        section, _, leaf = key.partition(".")
        assert getattr(getattr(config, section), leaf) == value, key


@pytest.mark.parametrize("name", ["ldp-fl/mnist", "ldp-fl/fmnist", "ldp-fl/cifar10"])
def test_an_update_baseline_differs_in_mechanism_ranges_and_what_was_chosen_only(name: str) -> None:
    changed = {line.split(":")[0] for line in load_recipe(name).differences(load_recipe(f"{name}-update"))}
    assert "mechanism.perturbed" in changed
    chosen = {"training.epochs", "training.learning_rate"} if name == "ldp-fl/fmnist" else set()  # on held-out images, to meet the paper
    assert {key for key in changed if not key.startswith("ranges.")} <= {"name", "description", "mechanism.perturbed"} | chosen


def test_a_recipe_takes_overrides() -> None:
    assert load_recipe("quickstart", ["mechanism.epsilon=3"]).mechanism.epsilon_and_budget == (3.0, "unit")


def test_an_unknown_recipe_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'ldp-fl/mnist'"):
        load_recipe("ldpfl/mnist")


def test_a_setting_that_the_shell_took_apart_is_answered_with_quotes(ldpfl: CommandLine) -> None:
    """A shell makes two words of ``data.bounds={age=[0,120]}``."""
    pieces = ("--set", "data.bounds=age=[0", "data.bounds=120]")
    for command in (("run",), ("run", "quickstart"), ("sweep",), ("sweep", "sound-mnist"), ("tune", "--target-epsilon", "2")):
        assert "so put a setting that has them in quotes: --set 'data.bounds={age=[0,120]}'" in ldpfl.refused(*command, *pieces)


def test_all_numbers_of_all_recipes_are_finite() -> None:
    for name in recipe_names():
        config = load_recipe(name)
        if config.mechanism.epsilon_and_budget is not None:
            assert math.isfinite(config.mechanism.epsilon_and_budget[0])
        assert parse(config.to_toml()) == config


@pytest.mark.parametrize("name", ["\U0001f600", "a\x7fb", 'say "so"', "a\\\\b", "ö", "a\tb"])
def test_columns_of_any_name_can_be_set(name: str) -> None:
    written = f"data.bounds={toml_value({name: [0, 1]})}"
    config = parse_config("", [written], origin="test")
    assert config.data.bounds == {name: [0.0, 1.0]}
    assert parse_config(config.to_toml(), origin="again") == config


@pytest.mark.parametrize("setting", ["clients.count=5\nmechanism.epsilon=0.5", "clients.count=5\n[mechanism]\nepsilon=0.5"])
def test_a_setting_that_another_one_follows_is_refused(setting: str) -> None:
    """It would be lost, and a budget may be what is lost."""
    with pytest.raises(ConfigError, match="with semicolons between them"):
        parse_config("", [setting], origin="test")


@pytest.mark.parametrize(
    ("table", "texts"),
    [
        ({"clients": {"count": 5}}, ["clients={count = 5}"]),
        ({"clients": {"count": 5}}, ["clients.count=5"]),
        ({"mechanism": {"epsilon": 2.0, "name": "harmony"}}, ["mechanism={epsilon = 2, name = 'harmony'}"]),
        ({"ranges.radius": {"layer": 0.5}}, ["ranges.radius={layer = 0.5}"]),
    ],
)
def test_settings_as_a_dict_and_as_text_make_one_config(table: dict[str, object], texts: list[str]) -> None:
    """A whole section changes the keys that it names, and leaves the recipe's others, in both forms."""
    assert configure("ldp-fl/mnist", table) == configure("ldp-fl/mnist", texts)
    assert configure("ldp-fl/mnist", texts).ranges.rule == configure("ldp-fl/mnist").ranges.rule


def test_rounds_are_bounded_by_what_can_be_read_again() -> None:
    assert parse_config("", ["training.rounds=100000"], origin="test").training.rounds == MAX_ROUNDS
    with pytest.raises(ConfigError, match=r"'training\.rounds' in test: input should be less than or equal to 100000, got 100001"):
        parse_config("", ["training.rounds=100001"], origin="test")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("data.class_shares={healthy = 0.9, ill = 0.1}", "expected a list without names, as in [0.9, 0.1], a share for each class"),
        ("data.class_shares=0.1", "expected a list of all values, as in [0.9, 0.1], a share for each class"),
        ("data.cut_points={first = 30}", "expected a list without names, as in [30, 90, 365]"),
        ("data.columns={age = 1}", "expected a list without names, as in [first, second]"),
        ("data.bounds=[0, 120]", "expected a table with a name for each value, as in {age = [0, 120]}"),
        ('data.categories=["a"]', 'as in {ward = ["icu", "cardio"]}'),
        ("data.columns=age,sex", """a list has brackets, and texts in it quotes: --set 'data.columns=["age", "sex"]'"""),
        ("data.cut_points=1,2.5", "--set 'data.cut_points=[1, 2.5]'"),
        ("data.classes=low", """--set 'data.classes=["low"]'"""),
        ("data.columns=[age, sex]", "'[age, sex]' begins like a list or a table, but cannot be read as one: put its texts in quotes"),
        ("data.target=[days,died]", "'[days,died]' begins like a list or a table"),
        ("data.categories={sex=[f,m]}", "begins like a list or a table"),
        ("data.bounds=age=0,120", "a table has braces, and texts in it quotes, as in {age = [0, 120]}"),
    ],
)
def test_a_list_without_its_brackets_or_quotes_is_answered_with_how_it_is_written(change: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config("", [change], origin="test")
    assert said in str(refused.value)


def test_a_file_with_a_list_of_words_without_quotes_is_answered_too() -> None:
    with pytest.raises(ConfigError, match=r"is not valid TOML: .*put texts in quotes, also in lists"):
        parse_config("[data]\ncolumns = [age, sex]\n", origin="config.toml")
