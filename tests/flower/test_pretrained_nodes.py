"""Pretrained models on Flower: named by a policy, and agreed on by the digest of their frozen weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ldpfl
from ldpfl.errors import ConfigError, Declined
from ldpfl.experiments.config import RunConfig
from ldpfl.flower.named_by_server import check_config
from ldpfl.flower.preparing import prepare
from ldpfl.privacy.policy import Policy

pytest.importorskip("peft")
from pretrained_models import save_base, texts


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base") / "small-bert")


def config_on(base: Path) -> RunConfig:
    data = {"name": "node", "text": "text", "target": "label", "classes": ["down", "up"], "length": 16}
    settings = {"data": data, "model": {"name": f"hf:{base}", "adapter": "lora"}, "clients.count": 2, "mechanism.clip_norm": 1.0}
    return ldpfl.configure("own", settings, target_epsilon="off")


def test_a_node_trains_on_the_server_s_base_alone(base: Path, tmp_path: Path) -> None:
    table = tmp_path / "own.csv"
    texts(12).to_csv(table, index=False)
    server = prepare(config_on(base).to_toml(), None, "cpu")
    assert server.config.model.base
    node = prepare(server.config.to_toml(), None, "cpu", server.federation.task.layout.dimension, table)
    assert torch.equal(node.start.state.weights, server.start.state.weights)
    assert len(node.task.train) == 12
    place = Path(shutil.copytree(base, tmp_path / "kept"))
    save_base(base, seed=1)
    try:
        prepare.cache_clear()
        with pytest.raises(ConfigError, match="belongs to another base"):
            prepare(server.config.to_toml(), None, "cpu", None, table)
    finally:
        shutil.copytree(place, base, dirs_exist_ok=True)
        prepare.cache_clear()


def test_a_pretrained_model_and_its_tokenizer_are_named_by_the_policy(base: Path) -> None:
    config = config_on(base)
    with pytest.raises(Declined, match="model 'hf:"):
        check_config(config, Policy())
    allowed = Policy(models=(config.model.name,))
    check_config(config, allowed)
    other = config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": "hf:somewhere/else"})})
    with pytest.raises(Declined, match="tokenizer 'hf:somewhere/else'"):
        check_config(other, allowed)
