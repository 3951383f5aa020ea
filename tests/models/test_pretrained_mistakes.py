"""Mistakes with pretrained models and adapters: each is one clear error before training."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ldpfl
from ldpfl.errors import ConfigError, LdpflError, PrivacyError
from ldpfl.models.layout import validate_module
from ldpfl.models.pretrained import check_tokens
from ldpfl.util.user_code import named_model

pytest.importorskip("peft")
from pretrained_models import PLACES, TOKENS, adapted, bert, save_base, texts, tokens

SMALL: dict[str, Any] = {"progress": False, "baseline": False, "rounds": 1, "seed": 1, "clients": {"count": 2}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base") / "small-bert")


def refused(module: torch.nn.Module) -> str:
    with pytest.raises(LdpflError) as refusal:
        ldpfl.run(data=tokens(40), model=module, mend=True, **SMALL)
    return str(refusal.value)


def test_an_adapter_that_is_frozen_is_refused() -> None:
    module = adapted(bert(), "lora", "SEQ_CLS", inference_mode=True)
    assert re.search(r"adapter 'default' has \d+ frozen parameters, such as \S+lora_A\.default\.weight", refused(module))


def test_an_adapter_half_of_which_is_frozen_is_refused() -> None:
    module = adapted(bert(), "lora", "SEQ_CLS")
    next(own for name, own in module.named_parameters() if "layer.1" in name and "lora_B" in name).requires_grad_(False)
    assert "has 1 frozen parameters, such as base_model.model.bert.encoder.layer.1" in refused(module)


def test_an_adapter_of_zeros_alone_is_refused_by_name() -> None:
    module = adapted(bert(), "lora", "SEQ_CLS")
    for name, own in module.named_parameters():
        if "layer.1.attention.self.value.lora_A" in name:
            torch.nn.init.zeros_(own)
    assert re.search(r"cannot train parameter \S+layer\.1\.attention\.self\.value\.lora_A\.default\.weight and 1 others", refused(module))


def test_an_adapter_that_is_switched_off_is_refused() -> None:
    module = adapted(bert(), "lora", "SEQ_CLS")
    for part in module.modules():
        if hasattr(part, "_disable_adapters"):
            part._disable_adapters = True
    assert "cannot train parameter base_model.model.bert.encoder.layer.0.attention.self.query.lora_A" in refused(module)


def test_an_adapter_elsewhere_is_refused() -> None:
    module = adapted(bert(), "lora", "SEQ_CLS")
    layer = next(part for name, part in module.named_modules() if name.endswith("layer.1.attention.self.query.lora_A"))
    layer["default"] = torch.nn.Linear(32, 4, bias=False, device="meta")
    with pytest.raises(PrivacyError, match=r"layer\.1\.attention\.self\.query\.lora_A\.default\.weight has no values \(device meta\)"):
        validate_module(module)


def test_a_layer_that_nothing_uses_is_refused() -> None:
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
    module.register_parameter("left_over", torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(ConfigError, match="cannot train parameter left_over: its outputs do not depend on it"):
        ldpfl.run(data=(torch.randn(40, 4), torch.arange(40) % 2), model=module, **SMALL)


@pytest.mark.thorough
def test_an_adapter_of_another_base_is_refused(base: Path, tmp_path: Path) -> None:
    finished = tmp_path / "run"
    ldpfl.run(data=texts(40), target="label", model=str(base), adapter="lora", length=16, folder=finished, **SMALL)
    other = save_base(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match=r"belong to another base model.* Give the base model of the training"):
        ldpfl.predict(finished, texts(3), model=str(other))


@pytest.mark.thorough
def test_a_tokenizer_of_another_vocabulary_is_refused(base: Path, tmp_path: Path) -> None:
    finished, other = tmp_path / "run", Path(shutil.copytree(base, tmp_path / "other"))
    ldpfl.run(data=texts(40), target="label", model=str(base), adapter="lora", length=16, folder=finished, **SMALL)
    path = other / "tokenizer.json"
    path.write_text(path.read_text().replace('"good"', '"well"'))
    with pytest.raises(ConfigError, match=r"the vocabulary of tokenizer .* name the model's tokenizer in data\.tokenizer"):
        ldpfl.predict(finished, texts(3), model=str(other))


@pytest.mark.slow
def test_a_folder_s_tokenizer_is_not_asked_for_at_the_hub(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder may be somebody else's, who would see who predicts."""
    finished = tmp_path / "run"
    ldpfl.run(data=texts(40), target="label", model=str(base), adapter="lora", length=16, folder=finished, **SMALL)
    path = finished / "encoding.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"data": json.loads(path.read_text())["data"] | {"tokenizer": "hf:a/b"}}))
    with monkeypatch.context() as online:
        online.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        with pytest.raises(ConfigError, match=r"reads texts by the tokenizer hf:a/b, which is no folder here.*HF_HUB_OFFLINE=1"):
            ldpfl.predict(finished, texts(3))
    with pytest.raises(ConfigError, match="tokenizer 'hf:a/b' cannot be loaded"):
        ldpfl.predict(finished, texts(3))


def without(pattern: str) -> Any:
    def change(folder: Path) -> None:
        for path in folder.glob(pattern):
            path.unlink()

    return change


def with_more_tokens(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tree = json.loads(path.read_text())
    tree["model"]["vocab"] |= {f"word{place}": TOKENS + place for place in range(9)}
    path.write_text(json.dumps(tree))


def settings_in(file: str, **changed: Any) -> Any:
    def change(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changed))

    return change


def cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def of_code(folder: Path) -> None:
    (folder / "own_code.py").write_text(f"from pathlib import Path\nPath({str(folder / 'was-run')!r}).touch()\n")
    names = {"AutoConfig": "own_code.Config", "AutoModelForSequenceClassification": "own_code.Model"}
    settings_in("config.json", model_type="of-code", auto_map=names)(folder)


def unchanged(folder: Path) -> None:
    pass


MISTAKES: dict[str, Any] = {
    "no weights": (without("*.safetensors"), {}, r"has no weights \(\*\.safetensors\)"),
    "no licence": (without("LICENSE"), {}, "the licence of the weights in .* is not known"),
    "no model": (without("config.json"), {}, r"has no config\.json"),
    "no tokenizer": (without("tokenizer*"), {}, "contains no tokenizer"),
    "another tokenizer": (with_more_tokens, {}, f"the tokenizer has {TOKENS + 9} tokens, but the model only {TOKENS}"),
    "too long": (unchanged, {"length": PLACES + 1}, f"data.length is {PLACES + 1} tokens, but the model takes {PLACES} in all"),
    "too long with its prompt": (
        unchanged,
        {"length": PLACES - 3, "adapter": "prompt"},
        f"data.length is {PLACES - 3} tokens, and the prompt has 8, but the model takes {PLACES} in all: set data.length to {PLACES - 8}",
    ),
    "another padding": (
        settings_in("tokenizer_config.json", pad_token="[CLS]"),
        {},
        "pads texts with token 2, but the model expects token 0",
    ),
    "weights that are cut off": (cut_off, {}, "model 'hf:.*' cannot be loaded"),
    "weights of another size": (
        settings_in("config.json", hidden_size=48),
        {},
        r"do not fit its config\.json: \d+ of \d+ parameters are absent or of another shape, such as bert\.",
    ),
    "a layer without weights": (settings_in("config.json", num_hidden_layers=3), {}, r"such as bert\.encoder\.layer\.2\."),
    "an adapter": (
        settings_in("adapter_config.json", base_model_name_or_path="some/base"),
        {},
        "has only an adapter: give .* its base",
    ),
    "a model that is code": (of_code, {}, "model 'hf:.*' cannot be loaded"),
    "no such layer": (unchanged, {"adapter_modules": ["querry"]}, "no layer 'querry': did you mean 'query'"),
    "no such column": (unchanged, {"text": "txt"}, "txt"),
}


@pytest.mark.thorough_for("another tokenizer", "too long", "too long with its prompt", "another padding")
@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_one_error_before_training(name: str, base: Path, tmp_path: Path) -> None:
    change, settings, said = MISTAKES[name]
    folder = Path(shutil.copytree(base, tmp_path / "changed"))
    change(folder)
    with pytest.raises(LdpflError, match=said):
        ldpfl.run(data=texts(40), target="label", model=str(folder), **{"adapter": "lora", "length": 16} | SMALL | settings)
    assert not (folder / "was-run").exists()


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(ConfigError, match="there is no folder /no/such/model"):
        ldpfl.run(data=texts(40), target="label", model="/no/such/model", **SMALL)


def test_an_adapter_is_for_pretrained_models_alone() -> None:
    with pytest.raises(ConfigError, match=r"needs a model of the transformers library, got a TwoLayerCNN"):
        ldpfl.run("quickstart", adapter="lora", progress=False)


def test_places_that_a_model_keeps_for_padding_do_not_count() -> None:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    sizes: Any = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    module = RobertaForSequenceClassification(RobertaConfig(vocab_size=30, max_position_embeddings=20, pad_token_id=1, **sizes))
    check_tokens(module, 30, 18)
    with pytest.raises(ConfigError, match=r"data\.length is 19 tokens, but the model takes 18 in all"):
        check_tokens(module, 30, 19)


def test_a_folder_that_holds_no_model_does_not_hide_a_built_in_one(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mlp").mkdir()
    shutil.copytree(base, "mine")
    assert named_model("mlp") == "mlp"
    assert named_model("mine") == f"hf:{tmp_path.resolve() / 'mine'}"
    assert named_model("./mlp") == f"hf:{tmp_path.resolve() / 'mlp'}"
