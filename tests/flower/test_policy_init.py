"""Policies are made from what an app says of itself, and nothing of it is run for that."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ldpfl import ConfigError
from ldpfl.experiments import load_recipe
from ldpfl.experiments.calibration import resolve_settings
from ldpfl.experiments.planned_ledger import planned_ledger
from ldpfl.flower.policy_init import config_for_transport, fitting_policy, offer_of, ranges_for
from ldpfl.privacy import Ledger
from ldpfl.privacy.accounting import run_epsilon
from ldpfl.privacy.policy import Transport

APP = """
[tool.flwr.app]
publisher = "somebody"

[tool.flwr.app.components]
clientapp = "ldpfl.flower.apps:client_app"

[tool.flwr.app.config.ldpfl]
recipe = "quickstart"
set = '{set}'
"""


def app(folder: Path, changes: str) -> str:
    (folder / "pyproject.toml").write_text(APP.format(set=changes), encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize("name", ["nowhere", "apps/nowhere", "quickstar"])
def test_a_name_of_nothing_is_no_folder_and_no_recipe(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hint = "did you mean 'quickstart'" if name == "quickstar" else "known: "
    with pytest.raises(ConfigError, match=f"'{name}' is neither a folder nor a recipe: .*{hint}"):
        offer_of(name)


def test_features_that_are_code_are_named_and_not_run(tmp_path: Path) -> None:
    told = tmp_path / "told"
    path = app(tmp_path, f'data.features="os:mkdir";data.feature_options.path="{told}"')
    offer = offer_of(path)
    with pytest.raises(ConfigError, match="'os:mkdir' is code, which this command does not run"):
        ranges_for(offer, ())
    policy = fitting_policy(offer, ranges_for(offer, (20, 5)))
    assert policy.models == ("os:mkdir",)
    assert not told.exists()


@pytest.mark.parametrize("rest", ["", ";privacy.target_epsilon=1.0;mechanism.name=dp-sgd;mechanism.perturbed=gradient"])
@pytest.mark.parametrize(
    "changes",
    ['task.name="told:make"', 'data.name="told.py:make"', 'data.path="rows.csv"', 'data.test_path="rows.csv"', 'data.name="some/one"'],
)
def test_data_and_tasks_that_an_app_names_are_neither_run_nor_opened(
    changes: str, rest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads what an app asks for has not judged it yet."""
    path = app(tmp_path, changes + rest)
    (tmp_path / "told.py").write_text("raise SystemExit\n", encoding="utf-8")
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.load_dataset", lambda *asked, **more: pytest.fail("the hub was asked"))
    for layers in ((), (20, 5)):
        with pytest.raises(ConfigError, match=r"the server's config names data by a path.*ldpfl init --flower|'told:make' is code"):
            ranges_for(offer_of(path), layers)
    assert "told" not in sys.modules


@pytest.mark.parametrize("rest", ["", ";privacy.target_epsilon=1.0"])
def test_a_model_that_no_machine_could_hold_is_not_made(rest: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the app's model has 2[\d,]+ weights"):
        offer_of(app(tmp_path, f"model.name=mlp;model.options.hidden=65536;model.options.depth=64{rest}"))


def test_a_target_of_an_app_whose_features_are_code_is_not_looked_for(tmp_path: Path) -> None:
    told = tmp_path / "told"
    with pytest.raises(ConfigError, match=r"Set privacy\.target_epsilon=off, mechanism\.noise_multiplier"):
        offer_of(app(tmp_path, f'data.features="os:mkdir";data.feature_options.path="{told}";privacy.target_epsilon=1.0'))
    assert not told.exists()


def test_a_target_is_met_by_what_really_leaves(tmp_path: Path) -> None:
    """Behind a shuffler less noise would do; without one, and in linked records, it would not."""
    signs = "mechanism.name=rotated-sign;mechanism.perturbed=gradient;model.name=linear;clients.count=8;privacy.target_epsilon=2.0"
    config = offer_of(app(tmp_path, signs)).config
    assert config.shuffling.channel == "direct"
    assert run_epsilon(planned_ledger(config), config.privacy.delta) <= 2.0
    with pytest.raises(ConfigError, match=r"needs ldpfl\.linked = 1, got 8"):
        config_for_transport(config, "relay", 8, 8)
    with pytest.raises(ConfigError, match=r"rounds in which all clients that are asked take part: set ldpfl\.min-clients to 8"):
        config_for_transport(config, "relay", 1, 7)
    assert config_for_transport(config, "relay", 1, 8).shuffling.channel == "ideal-shuffler"
    evaluated = load_recipe("sound/shuffled-mnist", ["clients.count=8", "evaluation.epsilon=0.3", "evaluation.share=0.1"])
    assert evaluated.privacy.target_epsilon == "off"
    with pytest.raises(ConfigError, match=r"evaluation\.epsilon needs ldpfl\.linked = 1, got 8"):
        config_for_transport(evaluated, "relay", 8, 8)
    with pytest.raises(
        ConfigError, match=r"evaluation\.epsilon needs rounds in which all clients that are asked take part: set ldpfl\.min-clients to 8"
    ):
        config_for_transport(evaluated, "relay", 1, 7)


def test_a_target_for_records_behind_a_relay_needs_no_fixed_number_of_clients() -> None:
    """A relay does not hide sums over records: each client's own noise keeps the target, however few there are. In a sum noises add up."""
    settings = ["clients.count=4", "privacy.target_epsilon=4.0", "evaluation.epsilon=0.5", "evaluation.share=0.1"]
    config = load_recipe("sound/records-mnist", settings)
    fewer = resolve_settings(config_for_transport(config, "relay", 1, 2))
    assert fewer == resolve_settings(config_for_transport(config, "relay", 1, 4))
    ledger = planned_ledger(fewer)
    alone = Ledger(tuple(replace(event, cohort=2, population=2) for event in ledger.events))
    assert run_epsilon(alone, fewer.privacy.delta) == run_epsilon(ledger, fewer.privacy.delta) <= 4.0
    with pytest.raises(ConfigError, match=r"privacy\.target_epsilon needs rounds in which all clients .* set ldpfl\.min-clients to 4"):
        config_for_transport(config, "sum", 1, 2)


@pytest.mark.parametrize("settings", [["privacy.target_epsilon=1.0"], []])
def test_a_fraction_of_the_clients_and_an_evaluation_of_all_have_no_common_least_number_of_clients(settings: list[str]) -> None:
    """With 4 of 8 clients an evaluation would have half of its planned noise."""
    half = ["clients.count=8", "clients.fraction=0.5", "evaluation.epsilon=0.3", "evaluation.share=0.1"]
    for least in (4, 8):
        with pytest.raises(ConfigError, match=r"Set clients\.fraction to 1"):
            config_for_transport(load_recipe("sound/shuffled-mnist", [*half, *settings]), "relay", 1, least)


def test_a_target_and_a_fraction_do_not_go_together_on_flower() -> None:
    """If 8 of 10 nodes are away, the other two are asked in every round, and the noise was for some of the rounds."""
    fifth = load_recipe("sum/clients-mnist", ["clients.count=10", "clients.fraction=0.2", "privacy.target_epsilon=2.0"])
    ways: tuple[Transport, ...] = ("direct", "relay", "sum")
    for transport in ways:
        with pytest.raises(ConfigError, match=r"more often than planned while others are away\. Set clients\.fraction to 1"):
            config_for_transport(fifth, transport, 1, 2)


def test_clients_that_may_collude_are_not_counted_twice() -> None:
    """The noise of an evaluation is planned for all clients but the colluding ones. If these stay and others leave, it is too little."""
    summed = load_recipe(
        "sum/clients-mnist", ["clients.count=8", "shuffling.colluding=3", "evaluation.epsilon=0.3", "evaluation.share=0.1"]
    )
    with pytest.raises(ConfigError, match=r"set ldpfl\.min-clients to 8"):
        config_for_transport(summed, "sum", 1, 5)
    assert config_for_transport(summed, "sum", 1, 8).shuffling.channel == "secure-sum"


def test_more_clients_than_a_round_asks_are_refused_with_both_numbers(tmp_path: Path) -> None:
    path = Path(app(tmp_path, "model.name=linear;clients.count=8")) / "pyproject.toml"
    path.write_text(path.read_text(encoding="utf-8") + 'transport = "relay"\nmin-clients = 9\nreply-s = 60\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"ldpfl\.min-clients is 9, but a round asks only 8 of the 8 clients \(clients\.count\)"):
        offer_of(str(tmp_path))


@pytest.mark.parametrize(
    ("mistyped", "meant"),
    [("min_clients", "min-clients"), ("min-client", "min-clients"), ("transpot", "transport"), ("Reply_S", "reply-s")],
)
def test_a_mistyped_setting_of_an_app_with_its_own_server_is_refused(mistyped: str, meant: str, tmp_path: Path) -> None:
    """Left out silently, the policy would be made for other terms. Other names are the app's own settings."""
    (tmp_path / "config.toml").write_text('[mechanism]\nname = "duchi"\n', encoding="utf-8")
    project = tmp_path / "pyproject.toml"
    settings = '[tool.flwr.app.components]\nclientapp = "mine:app"\n[tool.flwr.app.config.ldpfl]\nhospital = "north"\n'
    project.write_text(settings, encoding="utf-8")
    assert offer_of(str(tmp_path), tmp_path / "config.toml").transport == "direct"
    project.write_text(f"{settings}{mistyped} = 5\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"unknown setting ldpfl.{mistyped}: did you mean '{meant}'"):
        offer_of(str(tmp_path), tmp_path / "config.toml")


@pytest.mark.parametrize("reply_s", [60.0, 7200.0, 90_000.0])
def test_the_policy_lets_clients_reply_when_the_app_says(reply_s: float, tmp_path: Path) -> None:
    path = Path(app(tmp_path, "model.name=linear")) / "pyproject.toml"
    path.write_text(path.read_text(encoding="utf-8") + f'transport = "relay"\nmin-clients = 100\nreply-s = {reply_s}\n', encoding="utf-8")
    offer = offer_of(str(tmp_path))
    policy = fitting_policy(offer, ranges_for(offer, ()))
    policy.check_reply(offer.reply_s, offer.transport)
    assert (policy.longest_reply_s, policy.longest_upload_s) == (max(3600.0, reply_s), max(86_400.0, reply_s + 30))


def test_the_policy_of_an_app_that_measures_at_nodes_counts_these_rounds(tmp_path: Path) -> None:
    """What training and evaluation need together, and neither of the two alone."""
    of_records = "mechanism.name=dp-sgd;mechanism.perturbed=gradient;mechanism.records=36;model.name=linear;training.rounds=4"
    offers = [offer_of(app(tmp_path, of_records + more)) for more in ("", ";evaluation.epsilon=0.5;evaluation.every=2")]
    plain, measured = (fitting_policy(offer, ranges_for(offer, ())) for offer in offers)
    assert (plain.rounds, measured.rounds) == (4, 6)
    assert plain.lifetime_epsilon < measured.lifetime_epsilon <= plain.lifetime_epsilon + 0.6


def test_the_policy_of_a_recipe_for_records_says_so(tmp_path: Path) -> None:
    offer = offer_of(app(tmp_path, "mechanism.name=dp-sgd;mechanism.perturbed=gradient;mechanism.records=40;model.name=linear"))
    policy = fitting_policy(offer, ranges_for(offer, ()))
    assert policy.protects == "record"
    assert policy.mechanisms == ("dp-sgd",)
