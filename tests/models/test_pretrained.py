"""Models of transformers and adapters of peft: as they are, with what is trained alone sent and kept, and each mistake named."""

from __future__ import annotations

import copy
import io
import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import ldpfl
from ldpfl import ParameterLayout
from ldpfl.data import Samples
from ldpfl.data.tokens import next_token_targets
from ldpfl.errors import ConfigError, PrivacyError
from ldpfl.models.adapters import Adapter, base_digest
from ldpfl.models.layout import validate_module
from ldpfl.models.mending import mended
from ldpfl.models.pretrained import make
from ldpfl.report.progress import ProgressDisplay
from ldpfl.simulation import BatchSchedule, GradientTrainer, LocalTask
from ldpfl.simulation.local_steps import LocalOptimiser

pytest.importorskip("peft")
from pretrained_models import TOKENS, adapted, bert, gpt2, save_base, texts, tokens, vit

SMALL: dict[str, Any] = {"progress": False, "baseline": False, "rounds": 1, "seed": 1, "clients": {"count": 2}}
LM: dict[str, Any] = {"task": {"name": "language-model"}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base") / "small-bert")


@pytest.fixture(scope="module")
def finished(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "lora"
    ldpfl.run(data=texts(80), target="label", model=str(base), adapter="lora", length=16, folder=folder, **SMALL)
    return folder


def images() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (40, 28, 28), generator=generator, dtype=torch.uint8), torch.arange(40) % 3


MODELS: dict[str, Any] = {
    "classifier of texts": (lambda: bert(), lambda: tokens(40), {}),
    "classifier by the last token": (lambda: gpt2("GPT2ForSequenceClassification"), lambda: tokens(40), {}),
    "classifier of images": (vit, images, {}),
    "classifier of tokens": (
        lambda: gpt2("GPT2ForTokenClassification"),
        lambda: (tokens(40)[0], torch.where(tokens(40)[0]["attention_mask"] > 0, tokens(40)[0]["input_ids"] % 2, -100)),
        LM,
    ),
    "language model": (lambda: gpt2(), lambda: tokens(40)[0], LM),
    "lora": (lambda: adapted(bert(), "lora", "SEQ_CLS", lora_dropout=0.1), lambda: tokens(40), {}),
    "ia3": (lambda: adapted(bert(), "ia3", "SEQ_CLS"), lambda: tokens(40), {}),
    "prompt": (lambda: adapted(bert(), "prompt", "SEQ_CLS"), lambda: tokens(40), {}),
    "prompt of a language model": (lambda: adapted(gpt2(), "prompt", "CAUSAL_LM"), lambda: tokens(40)[0], LM),
    "lora of a language model": (
        lambda: adapted(gpt2(), "lora", "CAUSAL_LM", ["c_attn"], fan_in_fan_out=True),
        lambda: tokens(40)[0],
        LM,
    ),
}


@pytest.mark.thorough_except("lora")
@pytest.mark.parametrize("name", MODELS)
def test_models_are_trained_as_they_are(name: str) -> None:
    model, data, settings = MODELS[name]
    module = model()
    trained = sum(own.numel() for own in module.parameters() if own.requires_grad)
    found = ldpfl.run(data=data(), model=module, mend=True, **SMALL, **settings)
    assert found.bytes_per_client == pytest.approx(4 * trained, rel=0.01)
    assert type(found.module()) is type(module)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["lora", "language model"])
def test_clients_send_changes_of_weights_too(name: str) -> None:
    model, data, settings = MODELS[name]
    what = "quickstart"
    found = ldpfl.run(what, data=data(), model=model(), mend=True, radius=0.05, perturbed="update", epochs=1, **SMALL, **settings)
    assert found.history[-1].round == 1


@pytest.mark.thorough_except("language model", "classifier of tokens")
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_many_records_are_those_of_each(name: str) -> None:
    model, data, settings = MODELS[name]
    module = mended(model())[0]
    given = data()
    inputs, told = given if isinstance(given, tuple) else (given, next_token_targets(given))
    samples = Samples(inputs if isinstance(inputs, dict) else inputs[:, None].float() / 256, told)
    layout = ParameterLayout.from_module(module)
    weights = layout.flatten({own: value.detach() for own, value in module.named_parameters() if value.requires_grad})
    weights = weights + 0.01 * torch.randn(weights.shape, generator=torch.Generator().manual_seed(0))
    task = ldpfl.tasks.create(settings.get("task", {}).get("name", "classification"), 2 if told.dim() > 1 else 3)
    local = LocalTask(module, layout, samples, (), (), LocalOptimiser(0.1), task=task)
    each = BatchSchedule(torch.arange(6).view(6, 1, 1), torch.ones(6, 1, 1))
    together, alone = (GradientTrainer(local, at_once=at_once).train(weights, each) for at_once in (True, False))
    assert ((together - alone).norm(dim=1) <= 1e-5 * alone.norm(dim=1)).all()
    assert alone.norm(dim=1).min() > 0


def test_padding_counts_for_nothing() -> None:
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 0], [5, 6, 7, 8]]), "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])}
    assert next_token_targets(inputs).tolist() == [[6, 7, -100, -100], [6, 7, 8, -100]]
    logits = torch.randn(1, 4, TOKENS, generator=torch.Generator().manual_seed(0))
    task = ldpfl.tasks.create("language-model", TOKENS)
    found = task.losses(logits, next_token_targets(inputs)[:1])
    expected = torch.nn.functional.cross_entropy(logits[0, :2], torch.tensor([6, 7]))
    assert torch.allclose(found, expected)


def test_a_refusal_counts_the_layers_of_dropout_in_one_line() -> None:
    with pytest.raises(PrivacyError) as refusal:
        validate_module(bert())
    said = str(refusal.value)
    assert said.count("dropout in") == 1
    assert "and 5 others" in said
    assert "model.mend" in said


def test_dropout_is_set_to_0_where_it_stands() -> None:
    module = vit()
    right, changes = mended(module)
    assert changes
    assert [type(part) for part in right.modules()] == [type(part) for part in module.modules()]
    validate_module(right)
    with pytest.raises(PrivacyError, match="dropout"):
        validate_module(module)


@pytest.mark.thorough
def test_a_run_keeps_what_was_trained_alone(finished: Path, base: Path) -> None:
    kept = load_file(finished / "model.safetensors")
    assert {name.rpartition(".")[0].rpartition(".")[0].rpartition(".")[2] for name in kept} == {"lora_A", "lora_B", "modules_to_save"}
    assert (finished / "model.safetensors").stat().st_size < 0.5 * (base / "model.safetensors").stat().st_size
    described = json.loads((finished / "model.json").read_text())
    assert described["base"]
    assert described["licence"] == "LICENSE"


@pytest.mark.thorough
def test_bytes_of_a_round_are_those_of_the_adapter(finished: Path) -> None:
    adapter = load_file(finished / "adapter" / "adapter_model.safetensors")
    assert json.loads((finished / "adapter" / "adapter_config.json").read_text())["r"] == 8
    sent = json.loads((finished / "metrics.jsonl").read_text().splitlines()[-1])["uplink_bytes_per_client"]
    assert sent == pytest.approx(sum(own.nbytes for own in adapter.values()), rel=0.01)


@pytest.mark.slow
@pytest.mark.thorough
def test_features_of_own_texts_are_computed_in_each_run_and_classes_keep_their_names(base: Path, tmp_path: Path) -> None:
    lines = io.StringIO()
    display = ProgressDisplay(Console(file=lines, width=200), lines=True)
    settings = {"data.features": f"hf:{base}", "model.name": "linear", "data.text": "text", "data.length": 16}
    run = ldpfl.run(data=texts(80), target="label", settings=settings, folder=tmp_path / "run", **SMALL | {"progress": display})
    assert f"features hf:{base} (computed in each run): 80 samples" in lines.getvalue()
    assert run.to_dict()["classes"] == ["down", "up"]
    assert run.to_dict()["event"] == "up"
    assert json.loads((tmp_path / "run" / "model.json").read_text())["classes"] == ["down", "up"]


@pytest.mark.slow
@pytest.mark.thorough
def test_whether_to_compile_is_decided_without_pytorch_s_advice(base: Path) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        ldpfl.run(data=tokens(120), model=bert(), adapter="lora", settings={"model.mend": True}, **SMALL | {"rounds": 40})
    assert [line for line in shown if "performance drop" in str(line.message)] == []


def test_new_texts_are_predicted(finished: Path) -> None:
    found = ldpfl.predict(finished, texts(7))
    assert list(found) == ["label", "probability of down", "probability of up"]
    assert len(found) == 7


def test_an_export_is_an_adapter_that_peft_reads(finished: Path, base: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    from ldpfl.models.adapters import quietly

    out = ldpfl.export(finished, tmp_path / "out")
    assert not any(str(base.parent) in path.read_text(errors="replace") for path in out.iterdir())
    with pytest.raises(ConfigError, match="this model needs its base hf:small-bert, which was not found"):
        ldpfl.predict(out, texts(3))
    found = ldpfl.predict(out, texts(5), model=str(base))
    pd.testing.assert_frame_equal(found, ldpfl.predict(finished, texts(5)))
    with quietly():
        whole = PeftModel.from_pretrained(AutoModelForSequenceClassification.from_pretrained(base, num_labels=2), str(out))
    ours = ldpfl.load_model(out, model=str(base)).eval()
    inputs = tokens(4)[0]
    with torch.no_grad():
        assert torch.allclose(whole.eval()(**inputs).logits, ours(**inputs).logits, atol=1e-6)
    assert "base_model: small-bert" in (out / "README.md").read_text()


def test_a_base_is_told_by_its_weights_whatever_is_around_it() -> None:
    plain = bert()
    plain.requires_grad_(False)
    plain.classifier.requires_grad_(True)
    assert base_digest(plain) == base_digest(adapted(bert(), "lora", "SEQ_CLS")) == base_digest(adapted(bert(), "ia3", "SEQ_CLS"))
    other = copy.deepcopy(plain)
    with torch.no_grad():
        other.bert.pooler.dense.bias[0] += 1
    assert base_digest(other) != base_digest(plain)
    measured = copy.deepcopy(plain)
    measured.register_buffer("scale", torch.ones(2))
    assert base_digest(measured) != base_digest(plain)
    assert base_digest(bert()) == base_digest(torch.nn.Linear(2, 2)) == ""


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["none", "head", "ia3", "prompt"])
def test_a_folder_is_trained_in_other_ways(kind: str, base: Path) -> None:
    found = ldpfl.run(data=texts(40), target="label", model=str(base), adapter=kind, length=16, **SMALL)
    assert {"none": 10**4, "head": 10**3, "ia3": 10**3, "prompt": 10**3}[kind] < found.bytes_per_client / 4


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_auto_moves_a_base_whose_outputs_hardly_differ_between_texts(tmp_path: Path) -> None:
    """Each text begins with the same token, at which an untrained base reads next to nothing. A step of 0.6 leaves one class for all."""
    base = save_base(tmp_path / "base")
    bert().save_pretrained(base)
    words = {"up": "good fine warm", "down": "bad poor cold"}
    frame = pd.DataFrame([(f"[CLS] {words[label]}", label) for label in ("up", "down")] * 500, columns=["text", "label"])
    result = ldpfl.run(data=frame, target="label", model=str(base), adapter="lora", length=4, **SMALL)
    assert result.to_dict()["chosen"]["training.server_learning_rate"] == pytest.approx(1.2, rel=0.2)
    assert getattr(result.config.mechanism, "clip_norm", None) == 1.0


@pytest.mark.thorough
def test_a_base_that_tells_no_texts_apart_is_advised_a_longer_step(base: Path) -> None:
    frame = pd.DataFrame({"text": ["good fine"] * 240, "label": ["up", "down"] * 120})
    found = ldpfl.run(data=frame, target="label", model=str(base), adapter="head", length=8, settings={"data.columns": ["text"]}, **SMALL)
    (note,) = [note for note in found.to_dict()["caveats"] if note.startswith("nothing was found to have been learnt")]
    assert "try a larger training.server_learning_rate (for a pretrained model 1 to 3" in note
    assert "data.bounds" not in note
    with pytest.raises(ConfigError, match=r"leave data\.columns out"):
        ldpfl.run(data=frame.assign(more="x"), target="label", text="text", columns=["text", "more"], model=str(base), **SMALL)


def test_a_language_model_reads_texts_by_its_tokenizer(base: Path) -> None:
    from transformers import AutoTokenizer

    from ldpfl.models.adapters import quietly

    folder = base.parent / "gpt"
    with quietly():
        gpt2().save_pretrained(folder)
        AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    found = ldpfl.run(data=texts(40)[["text"]], model=str(folder), adapter="lora", length=16, licence="own", **LM, **SMALL)
    assert found.metric == "perplexity"


@pytest.mark.thorough
def test_the_plain_package_imports_neither_library() -> None:
    code = "import sys, ldpfl; ldpfl.run; print([name for name in ('transformers', 'peft', 'tokenizers') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.thorough
def test_an_adapter_is_added_to_a_model_that_is_handed_over(tmp_path: Path) -> None:
    whole = bert()
    found = ldpfl.run(data=tokens(40), model=whole, adapter="lora", mend=True, folder=tmp_path / "run", **SMALL)
    trained = found.module()
    assert len(load_file(tmp_path / "run" / "model.safetensors")) == sum(own.requires_grad for own in trained.parameters())
    again = ldpfl.load_model(tmp_path / "run", model=whole)
    with torch.no_grad():
        assert torch.equal(again.eval()(**tokens(4)[0]).logits, trained.eval()(**tokens(4)[0]).logits)
    assert not hasattr(whole, "peft_config")


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_attention_is_pinned_whatever_the_model_s_config_names(key: str, base: Path, tmp_path: Path) -> None:
    """A name such as ``somebody/kernel`` stands for code of the hub, which is not run; another one would round otherwise."""
    folder = Path(shutil.copytree(base, tmp_path / "base"))
    config = json.loads((folder / "config.json").read_text("utf-8"))
    for name in ("eager", "somebody/kernel"):
        (folder / "config.json").write_text(json.dumps({**config, key: name}), "utf-8")
        module: Any = make(str(folder), "classes", 3, images=False, seed=1, adapter=Adapter())
        assert module.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("key", ["experts_implementation", "_experts_implementation"])
def test_experts_are_pinned_whatever_the_model_s_config_names(key: str, tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    MixtralForCausalLM(MixtralConfig(vocab_size=32, num_local_experts=2, **sizes)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    for name in ("grouped_mm", "batched_mm", "somebody/kernel"):
        (tmp_path / "config.json").write_text(json.dumps({**config, key: name}), "utf-8")
        module: Any = make(str(tmp_path), "tokens", 32, images=False, seed=1, adapter=Adapter())
        assert module.config._experts_implementation == "eager"


def test_a_model_without_that_attention_takes_plain_products(tmp_path: Path) -> None:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", num_labels=3)
    ResNetForImageClassification(config).save_pretrained(tmp_path / "resnet")
    module: Any = make(str(tmp_path / "resnet"), "classes", 3, images=True, seed=1, adapter=Adapter())
    assert module.config._attn_implementation == "eager"
