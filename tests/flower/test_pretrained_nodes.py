"""Pretrained models on Flower: named by a policy, and agreed on by the digest of their frozen weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, Message, UserConfig
from test_same_model import SimulatedNode, simulator_source

import ldpfl
from conftest import CommandLine
from ldpfl.api import begin_app
from ldpfl.errors import ConfigError, Declined
from ldpfl.experiments.config import RunConfig, toml_value
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.flower import InProcessGrid, LdpClientApp, apps
from ldpfl.flower.federation_setup import prepare
from ldpfl.flower.named_by_server import check_config
from ldpfl.flower.policy_init import offer_of, ranges_for
from ldpfl.models.adapters import Adapter
from ldpfl.models.pretrained import make
from ldpfl.privacy.policy import Policy, read_policy

pytest.importorskip("peft")
from pretrained_models import save_base, texts


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base") / "small-bert")


def config_on(base: Path) -> RunConfig:
    data = {"name": "node", "text": "text", "target": "label", "classes": ["down", "up"], "length": 16}
    settings = {"data": data, "model": {"name": f"hf:{base}", "adapter": "lora"}, "clients.count": 2, "mechanism.clip_norm": 1.0}
    return ldpfl.configure("own", settings, target_epsilon="off")


@pytest.mark.thorough
def test_an_app_reads_the_only_column_of_texts(base: Path, tmp_path: Path) -> None:
    texts(12).to_csv(tmp_path / "own.csv", index=False)
    begin_app(tmp_path / "app", "own", changes_on(base), data=str(tmp_path / "own.csv"), target="label")
    data = offer_of(str(tmp_path / "app")).config.data
    assert (data.text, data.columns) == ("text", [])


def changes_on(base: Path, *more: str) -> list[str]:
    return [f"model.name='hf:{base}'", "model.adapter=lora", "model.licence=own", "mechanism.records=6", "data.length=16", *more]


@pytest.mark.thorough
def test_an_app_of_a_model_in_a_folder_comes_with_policy_and_budget(base: Path, tmp_path: Path, ldpfl: CommandLine) -> None:
    """Its noise and its arrays' sizes follow from the folder; the folder's path is named, since each node needs it."""
    texts(12).to_csv(tmp_path / "own.csv", index=False)
    settings = [word for change in changes_on(base)[1:] for word in ("--set", change)]
    of: tuple[str | Path, ...] = ("--data", tmp_path / "own.csv", "--target", "label", "--text", "text", "--model", base, *settings)
    said = ldpfl("init", "--flower", tmp_path / "app", *of)
    assert "policy.toml holds the policy" in said.out, said.err
    assert f"{base}: the folder of the pretrained model, with the same files at the same path" in said.out
    assert read_policy(tmp_path / "app" / "policy.toml").models == (f"hf:{base}",)
    offer = offer_of(str(tmp_path / "app"))
    config = offer.config.model_dump()
    assert config["mechanism"]["noise_multiplier"] > 0
    sizes = ranges_for(offer, ()).sizes
    trained = make(f"hf:{base}", "class", 2, images=False, seed=0, adapter=Adapter("lora")).parameters()
    assert sizes == tuple(parameter.numel() for parameter in trained if parameter.requires_grad)
    files = ("--out", tmp_path / "policy.toml", "--budget", tmp_path / "budget.sqlite")
    wrong = ldpfl.refused("policy", "init", tmp_path / "app", "--layers", "10", *files)
    assert "--layers is 10, but the arrays of 'hf:" in wrong
    assert ldpfl("policy", "init", tmp_path / "app", "--layers", ",".join(map(str, sizes)), *files).code == 0


@pytest.mark.thorough_except("model.licence=''-licence of the weights")
@pytest.mark.parametrize(
    ("change", "said"),
    [("data.length=64", "data.length is 64 tokens, but the model takes 48"), ("model.licence=''", "licence of the weights")],
)
def test_an_app_that_no_server_could_start_is_not_begun(change: str, said: str, base: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(base, tmp_path / "bert", ignore=shutil.ignore_patterns("LICENSE", "README.md")))
    texts(12).to_csv(tmp_path / "own.csv", index=False)
    with pytest.raises(ConfigError, match=said):
        begin_app(tmp_path / "app", "own", changes_on(base, change), data=str(tmp_path / "own.csv"), target="label")
    assert not (tmp_path / "app").exists()


def test_a_pretrained_model_that_is_not_here_is_not_called_code(tmp_path: Path) -> None:
    texts(12).to_csv(tmp_path / "own.csv", index=False)
    with pytest.raises(
        ConfigError, match=r"'hf:owner/absent' is a pretrained model, which this command loads only .* by --layers"
    ) as raised:
        begin_app(tmp_path / "app", "own", changes_on(Path("owner/absent")), data=str(tmp_path / "own.csv"), target="label")
    assert "is code" not in str(raised.value)


@pytest.mark.thorough
def test_a_node_trains_on_the_server_s_base_alone(base: Path, tmp_path: Path) -> None:
    table = tmp_path / "own.csv"
    texts(12).to_csv(table, index=False)
    server = prepare(config_on(base).to_toml(), None, "cpu")
    assert server.config.model.base
    node = prepare(server.config.to_toml(), None, "cpu", server.federation.task.layout.dimension, table)
    assert torch.equal(node.start.state.weights, server.start.state.weights)
    assert len(node.data.train) == 12
    place = Path(shutil.copytree(base, tmp_path / "kept"))
    save_base(base, seed=1)
    try:
        prepare.cache_clear()
        with pytest.raises(ConfigError, match="belong to another base"):
            prepare(server.config.to_toml(), None, "cpu", None, table)
    finally:
        shutil.copytree(place, base, dirs_exist_ok=True)
        prepare.cache_clear()


@pytest.mark.thorough
def test_a_node_reads_texts_by_the_server_s_tokenizer_alone(base: Path, tmp_path: Path) -> None:
    table = tmp_path / "own.csv"
    texts(12).to_csv(table, index=False)
    terms = prepare(config_on(base).to_toml(), None, "cpu").config
    other = Path(shutil.copytree(base, tmp_path / "other"))
    path = other / "tokenizer.json"
    path.write_text(path.read_text().replace('"good"', '"well"'))
    data = terms.data.model_copy(update={"tokenizer": f"hf:{other}"})
    with pytest.raises(ConfigError, match="the vocabulary of tokenizer"):
        prepare(terms.model_copy(update={"data": data}).to_toml(), None, "cpu", None, table)


def test_a_pretrained_model_and_its_tokenizer_are_named_by_the_policy(base: Path) -> None:
    config = config_on(base)
    with pytest.raises(Declined, match="model 'hf:"):
        check_config(config, Policy())
    allowed = Policy(models=(config.model.name,))
    check_config(config, allowed)
    other = config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": "hf:somewhere/else"})})
    with pytest.raises(Declined, match="tokenizer 'hf:somewhere/else'"):
        check_config(other, allowed)


class WireGrid(InProcessGrid):
    """Keeps the number of values of each array, and the bytes of each message, both ways."""

    numbers: list[int]
    octets: list[int]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        sent = list(messages)
        for message in (*sent, *super().send_and_receive(sent, timeout=timeout)):
            records = [record for record in message.content.values() if isinstance(record, ArrayRecord)]
            self.numbers += [array.numpy().size for record in records for array in record.values()]
            others = [record for record in message.content.values() if not isinstance(record, ArrayRecord)]
            settings = sum(len(value if isinstance(value, bytes) else str(value)) for record in others for value in record.values())
            self.octets.append(settings + sum(record.count_bytes() for record in records))
            if message not in sent:
                yield message


def test_frozen_weights_never_cross_the_wire(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts(12).to_csv(tmp_path / "own.csv", index=False)
    monkeypatch.setenv("LDPFL_DATA", str(tmp_path / "own.csv"))
    changes = {
        **{"data.name": "node", "data.text": "text", "data.target": "label", "data.classes": ["down", "up"], "data.length": 16},
        **{"model.name": f"hf:{base}", "model.adapter": "lora", "clients.count": 2, "training.rounds": 1},
        **{"mechanism.records": 12, "mechanism.noise_multiplier": 2.0, "mechanism.clip_norm": 1.0, "privacy.target_epsilon": "off"},
        **{"training.server_learning_rate": 1.0, "training.server_weight_decay": 0.0},
    }
    named = ";".join(f"{key}={toml_value(value)}" for key, value in changes.items())
    settings: UserConfig = {"ldpfl.recipe": "own", "ldpfl.set": named, "ldpfl.out": str(tmp_path / "run")}
    client = LdpClientApp(apps.train, node=lambda context: SimulatedNode(), source=simulator_source)
    grid = WireGrid(client, 2, run_config=settings)
    grid.numbers, grid.octets = [], []
    apps.server_app(grid, grid.server_context())
    kept = RunFolder(tmp_path / "run")
    trained = sum(own.numel() for own in kept.model_file().module(kept.model_path).parameters() if own.requires_grad)
    whole = (base / "model.safetensors").stat().st_size
    assert max(grid.numbers) <= trained
    assert max(grid.octets) < 4.5 * trained + 20_000 < whole


def features_on(base: Path) -> RunConfig:
    data = {"name": "node", "text": "text", "target": "label", "classes": ["down", "up"], "length": 16, "features": f"hf:{base}"}
    return ldpfl.configure(
        "own", {"data": data, "model.name": "linear", "clients.count": 2, "mechanism.clip_norm": 1.0}, target_epsilon="off"
    )


def test_a_node_computes_features_by_the_server_s_weights_alone(base: Path, tmp_path: Path) -> None:
    table = tmp_path / "own.csv"
    texts(12).to_csv(table, index=False)
    server = prepare(features_on(base).to_toml(), None, "cpu")
    assert server.config.data.features_digest
    assert server.config.data.tokenizer_digest
    node = prepare(server.config.to_toml(), None, "cpu", server.federation.task.layout.dimension, table)
    assert node.data.train.tensor.shape == (12, 32)
    terms = server.config.to_toml().replace(server.config.data.features_digest, "0" * 64)
    with pytest.raises(ConfigError, match="but this run uses weights with"):
        prepare(terms, None, "cpu", None, table)


def test_features_of_a_pretrained_model_are_named_by_the_policy(base: Path) -> None:
    config = features_on(base)
    with pytest.raises(Declined, match="features 'hf:"):
        check_config(config, Policy())
    check_config(config, Policy(models=(config.data.features,)))
    timm = {"features": "timm:resnet18", "feature_options": {"weights": "/etc/passwd"}}
    with pytest.raises(Declined, match="an option of the features is text"):
        check_config(config.model_copy(update={"data": config.data.model_copy(update=timm)}), Policy(models=("timm:resnet18",)))
