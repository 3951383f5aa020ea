"""Which mechanisms there are: built in, and brought by another package; each owns its settings."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

import ldpfl
from brought_package import install
from conftest import CommandLine
from ldpfl import ConfigError, LayerRanges, mechanisms
from ldpfl.data import load
from ldpfl.experiments.build import build, mechanism_of
from ldpfl.experiments.config import RunConfig, parse_config
from ldpfl.mechanisms.base import record_rate_of
from ldpfl.mechanisms.dp_sgd import DpSgd
from ldpfl.mechanisms.record_clipping import RecordClip
from ldpfl.mechanisms.registry import built
from ldpfl.mechanisms.settings import Facts, MechanismSettings
from ldpfl.privacy.accounting import account
from ldpfl.simulation import simulate

SMALL = ["model.name=logistic-regression", "clients.count=5", "training.epochs=1", "training.rounds=1"]


def build_mechanism(config: RunConfig) -> mechanisms.Mechanism:
    return mechanism_of(config, LayerRanges(torch.zeros(1), torch.ones(1), (5,)))


def config_of(*overrides: str) -> RunConfig:
    return parse_config("", SMALL, overrides, origin="test")


def test_records_cannot_take_part_more_often_than_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("mechanism.name=dp-sgd", "mechanism.sample_rate=0.1")
    assert record_rate_of(build_mechanism(config)) == 0.1
    monkeypatch.setattr(DpSgd, "record_rate", 0.5)
    with pytest.raises(ConfigError, match=r"'dp-sgd' samples records with probability 0\.5, but its release states 0\.1"):
        build_mechanism(config)


@pytest.mark.parametrize(
    ("name", "given", "meant"), [("duchi", "eps", "epsilon"), ("harmony", "grop", "group"), ("laplace", "Epsilon", "epsilon")]
)
def test_a_mistyped_setting_is_named_before_one_that_is_missing(name: str, given: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"mechanism '{name}' has no setting '{given}': did you mean '{meant}'"):
        mechanisms.create(name, **{given: 1})
    with pytest.raises(ConfigError, match=r"has no setting 'qqqq': known: epsilon(, [a-z_]+)*$") as caught:
        mechanisms.create("duchi", qqqq=1)
    assert "budget" not in str(caught.value)  # settings of a run, which are refused here


@pytest.mark.slow
def test_another_package_brings_a_mechanism(tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is configured, trained, accounted, planned and refused as those of ours, and nothing of ours names it."""
    assert "careless" not in mechanisms.names()
    install(tmp_path / "site", monkeypatch)
    assert "careless" in mechanisms.names(alone=True)
    assert mechanisms.create("careless", epsilon=2.0, haste=3).name == "careless"
    config = config_of("mechanism.name=careless", "mechanism.epsilon=2", "mechanism.haste=3")
    assert parse_config(config.to_toml(), origin="again") == config
    federation, start = build(config, load("mnist", tiny_data), torch.device("cpu"))
    *_, last = simulate(federation, start, 1)
    assert last.ledger.events[0].release.mechanism == "careless"
    local = account(last.ledger).find("local", "round", client=False, pure=True)
    assert local is not None
    assert local.epsilon == 2.0
    with pytest.raises(ConfigError, match=r"setting 'mechanism\.haste' in test: input should be greater than or equal to 1, got 0"):
        config_of("mechanism.name=careless", "mechanism.haste=0")
    with pytest.raises(ConfigError, match=r"unknown setting 'mechanism\.group' in test"):
        config_of("mechanism.name=careless", "mechanism.group=3")


def test_no_package_takes_the_place_of_a_mechanism_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", monkeypatch, name="duchi")
    assert type(mechanisms.create("duchi", epsilon=1.0)) is mechanisms.Duchi


@pytest.mark.parametrize("place", ["careless_package:Nothing", "no_such_package:Settings", "careless_package:Careless"])
def test_a_package_that_cannot_be_used_is_named(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", monkeypatch, place=place, name="broken")
    with pytest.raises(ConfigError, match="broken.*" + place.partition(":")[2]):
        config_of("mechanism.name=broken")
    assert config_of().mechanism.name == "duchi"  # others are as they were


@pytest.mark.slow
@pytest.mark.thorough_except('careless_package:Nameless-add the field name: Literal["broken"] = "broken"')
@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("no_such_package:Settings", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("angry_package:Settings", "RuntimeError: not today"),
        ("careless_package:Nameless", 'add the field name: Literal["broken"] = "broken"'),
    ],
)
def test_a_broken_package_breaks_its_own_mechanism_alone(
    place: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ldpfl: CommandLine
) -> None:
    install(tmp_path / "site", monkeypatch, place=place, name="broken")
    (tmp_path / "site" / "angry_package.py").write_text('raise RuntimeError("not today\\nnor tomorrow")', encoding="utf-8")
    for command in ("audit", "settings"):
        line = ldpfl.refused(command, "broken")
        assert "mechanism 'broken' of careless-package 1.0" in line
        assert said in line
    assert {"duchi", "none"} <= set(mechanisms.names(alone=True)) < set(mechanisms.names())
    assert ldpfl("audit", "duchi", "--trials", "1000", "--seed", "1").code == 0


@pytest.mark.parametrize("name", ["dp-sgd", "nbafl"])
def test_an_audit_says_why_it_cannot_build_a_mechanism(name: str, ldpfl: CommandLine) -> None:
    assert f"mechanism '{name}' depends on training settings" in ldpfl.refused("audit", name)


def test_a_mechanism_of_a_simulation_alone_is_no_promise_to_others() -> None:
    """Nothing calls it for any other, in a simulation or on Flower."""
    assert not hasattr(mechanisms.Mechanism, "for_clients")


def test_a_setting_of_another_mechanism_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"duchi has no setting 'group'; it has: budget, epsilon, name, perturbed$"):
        config_of("mechanism.group=4")
    with pytest.raises(ConfigError, match=r"duchi has no setting 'epsilom'; did you mean 'mechanism\.epsilon'\?$"):
        config_of("mechanism.epsilom=4")


@pytest.mark.parametrize(("value", "name"), [("laplace", "laplace"), ("[1]", "duchi"), ("4", "duchi")])
def test_a_mechanism_is_a_section(value: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"setting 'mechanism' in test: input should be a section.* mechanism\.name={name}, got"):
        config_of(f"mechanism={value}")


@pytest.mark.parametrize("name", ["duchi", "harmony", "laplace"])
def test_a_budget_too_small_is_told_which_is_not(name: str) -> None:
    with pytest.raises(ConfigError, match=f"mechanism '{name}', epsilon 1e-30 .*: at least 1e-09 is needed"):
        build_mechanism(config_of(f"mechanism.name={name}", "mechanism.epsilon=1e-30"))
    assert build_mechanism(config_of(f"mechanism.name={name}", "mechanism.epsilon=1e-9")).name == name


@pytest.mark.parametrize("name", mechanisms.names())
def test_a_mechanism_has_its_own_settings_and_no_others(name: str) -> None:
    own = mechanisms.settings_of(name).model_fields
    foreign = {setting for other in mechanisms.names() for setting in mechanisms.settings_of(other).model_fields} - set(own)
    assert foreign
    for setting in sorted(foreign):
        with pytest.raises(ConfigError, match=rf"unknown setting 'mechanism\.{setting}'"):
            config_of(f"mechanism.name={name}", f"mechanism.{setting}=1")


def test_naming_another_mechanism_keeps_what_it_has_too_and_drops_the_rest() -> None:
    text = '[mechanism]\nname = "harmony"\nepsilon = 3.0\ngroup = 4\nperturbed = "update"\n'
    changed = parse_config(text, ["mechanism.name=laplace"], origin="test").mechanism
    assert changed.model_dump() == {"name": "laplace", "epsilon": 3.0, "perturbed": "update", "budget": "unit", "coordinates": "all"}
    both = parse_config(text, ["mechanism.coordinates=5", "mechanism.name=laplace"], origin="test").mechanism
    assert both.model_dump()["coordinates"] == 5  # whatever their order
    with pytest.raises(ConfigError, match=r"unknown setting 'mechanism\.group'"):
        parse_config(text, ["mechanism.name=laplace", "mechanism.group=4"], origin="test")


@pytest.mark.parametrize("name", ["nbafl", "time-varying", "ladp"])
def test_what_depends_on_training_is_not_created_by_itself(name: str) -> None:
    with pytest.raises(ConfigError, match="depends on training settings"):
        mechanisms.create(name, epsilon=0.5)


@pytest.mark.parametrize("setting", ["budget", "perturbed"])
def test_settings_of_runs_are_not_taken_by_a_mechanism_alone(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting):
        mechanisms.create("duchi", **{setting: "client"})


@pytest.mark.parametrize("inherited", ["settings", "mechanism"])
def test_a_mechanism_that_goes_by_the_name_of_another_is_refused(inherited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that allows ``duchi`` would allow it, and a budget would count it as that."""
    install(tmp_path / "site", monkeypatch, name="modest", place="modest_package:Settings")
    own = 'name: ClassVar[str] = "modest"' if inherited == "settings" else "pass"
    named = "duchi" if inherited == "settings" else "modest"
    (tmp_path / "site" / "modest_package.py").write_text(
        f"""
from dataclasses import dataclass
from typing import ClassVar, Literal
from ldpfl.mechanisms import Duchi
from ldpfl.mechanisms.settings import EpsilonSettings

@dataclass(frozen=True)
class Modest(Duchi):
    {own}

class Settings(EpsilonSettings):
    name: Literal["{named}"] = "{named}"

    def at(self, epsilon):
        return Modest(epsilon)
""",
        encoding="utf-8",
    )
    with pytest.raises(ConfigError, match=r"modest.*'duchi'"):
        mechanisms.create("modest", epsilon=1.0)
    with pytest.raises(ConfigError, match=r"modest.*'duchi'"):
        build_mechanism(config_of("mechanism.name=modest"))
    with pytest.raises(ConfigError, match=r"modest.*'duchi'"):  # a plan builds it without a run's config
        ldpfl.plan(epsilon=1.0, clients=100, weights=10, rounds=1, mechanism="modest")


class Stranger(MechanismSettings):
    """Settings of somebody else's that build a mechanism of ours, and say so once they have."""

    name: Literal["stranger"] = "stranger"

    def build(self, facts: Facts) -> mechanisms.Mechanism:
        object.__setattr__(self, "name", "dp-sgd")
        return DpSgd(RecordClip(0.02), 10.0, part="person")


def test_settings_of_others_build_no_mechanism_of_ours() -> None:
    """They could say that what is clipped record by record is a person, or that nobody learns more than a sum: and it would be proved."""
    facts = Facts(LayerRanges(torch.zeros(1), torch.ones(1), (5,)))
    with pytest.raises(ConfigError, match="built the built-in mechanism 'dp-sgd'"):
        built(Stranger(), facts)
    config = config_of("mechanism.name=dp-sgd", "mechanism.clip_norm=0.02")
    assert built(config.mechanism, facts).name == "dp-sgd"
