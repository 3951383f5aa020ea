"""Per-record gradients of a Transformer under LoRA: time and memory beside Opacus' GradSampleModule, and how far both lie apart.

    python benchmarks/adapters.py [--records 32] [--length 64] [--steps 3]

A BERT of 30 million weights, LoRA of rank 8 on queries and values. One step takes each record's gradient, shortens it to the clipping norm
and adds all up. Each of the two is a process of its own, whose peak memory is read, and compared with that before the first step.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ldpfl import ParameterLayout
from ldpfl.data import Samples
from ldpfl.data.samples import tensors_by_name
from ldpfl.mechanisms.record_clipping import RecordClip
from ldpfl.simulation import BatchSchedule, GradientTrainer, LocalTask, RecordGradientTrainer
from ldpfl.simulation.local_steps import LocalOptimiser

CLIP = 1.0
KIB_PER_MIB = 1024

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--records", type=int, default=32)
parser.add_argument("--length", type=int, default=64)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--only", choices=("ldpfl", "opacus", "apart"), help="what this process measures")


def model() -> Any:
    """Return the model. LoRA's second factors begin at 0; here they do not, so that no gradient is 0."""
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"vocab_size": 8000, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 2048}
    config = BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    lora = LoraConfig(r=8, task_type="SEQ_CLS", target_modules=["query", "value"])
    adapted_model = get_peft_model(BertForSequenceClassification(config), lora)
    for name, parameter in adapted_model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return adapted_model


def samples(records: int, length: int) -> Samples:
    """Return random texts of ``length`` / 2 to ``length`` tokens, with padding, and random targets."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 8000, (records, length), generator=generator)
    mask = (torch.arange(length) < torch.randint(length // 2, length + 1, (records, 1), generator=generator)).long()
    return Samples({"input_ids": ids, "attention_mask": mask}, torch.randint(0, 2, (records,), generator=generator))


def local_task(options: argparse.Namespace) -> tuple[LocalTask, Tensor]:
    """Return the model and the samples as a task of ldpfl, and the trained weights."""
    module = model()
    layout = ParameterLayout.from_module(module)
    weights = layout.flatten({name: parameter.detach() for name, parameter in module.named_parameters() if parameter.requires_grad})
    return LocalTask(module, layout, samples(options.records, options.length), (), (), LocalOptimiser(0.1)), weights


def step_of_ldpfl(options: argparse.Namespace) -> Callable[[], object]:
    """Return a function that sums up clipped gradients by ldpfl."""
    task, weights = local_task(options)
    trainer, schedule = RecordGradientTrainer(task, RecordClip(CLIP)), BatchSchedule(*_each_record_once(options.records, 1))
    return lambda: trainer.train(weights, schedule)


def _each_record_once(records: int, clients: int) -> tuple[Tensor, Tensor]:
    """Return index and mask of one step in which all ``records`` are divided among ``clients``."""
    index = torch.arange(records).view(clients, 1, records // clients)
    return index, torch.ones(index.shape)


def step_of_opacus(options: argparse.Namespace) -> Callable[[], object]:
    """Return a function that sums up clipped gradients by Opacus."""
    gradients = _gradients_of_opacus(options)

    def step() -> object:
        record_gradients = gradients()
        return (record_gradients * (CLIP / record_gradients.norm(dim=1).clamp_min(CLIP))[:, None]).sum(dim=0)

    return step


def _gradients_of_opacus(options: argparse.Namespace) -> Callable[[], Tensor]:
    """Return a function that computes the gradient of each record by Opacus."""
    from opacus import GradSampleModule

    data = samples(options.records, options.length)
    inputs = dict(tensors_by_name(data.inputs))
    module = GradSampleModule(model(), strict=False, loss_reduction="sum")

    def gradients() -> Tensor:
        module.zero_grad(set_to_none=True)
        for parameter in module.parameters():
            parameter.grad_sample = None
        torch.nn.functional.cross_entropy(module(**inputs).logits, data.targets, reduction="sum").backward()  # type: ignore[no-untyped-call]
        return torch.cat([parameter.grad_sample.flatten(1) for parameter in module.parameters() if parameter.requires_grad], dim=1)

    return gradients


def print_measurements(options: argparse.Namespace) -> None:
    """Print seconds of the fastest step, memory before the first step, and memory at the peak, in MiB."""
    step = step_of_ldpfl(options) if options.only == "ldpfl" else step_of_opacus(options)
    mib_before, seconds = _peak_mib(), []
    for _ in range(options.steps):
        began = time.process_time()  # of this process alone, whatever else the machine does
        step()
        seconds.append(time.process_time() - began)
    print(min(seconds), mib_before, _peak_mib())


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / KIB_PER_MIB


def print_distance(options: argparse.Namespace) -> None:
    """Print the largest distance between the gradients of a record by ldpfl and by Opacus, as a share of the gradient's length."""
    task, weights = local_task(options)
    ours = -GradientTrainer(task).train(weights, BatchSchedule(*_each_record_once(options.records, options.records)))
    theirs = _gradients_of_opacus(options)()
    print(float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).max()))


def main() -> None:
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.only:
        (print_distance if options.only == "apart" else print_measurements)(options)
        return
    figures = {}
    for name in ("ldpfl", "opacus", "apart"):
        command = [sys.executable, __file__, *sys.argv[1:], "--only", name]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
        figures[name] = [float(word) for word in output.splitlines()[-1].split()]
    for name in ("ldpfl", "opacus"):
        seconds, before, peak = figures[name]
        print(f"{name:6}: {seconds:.2f} s of one core, {peak - before:,.0f} MiB beyond the model's, {peak:,.0f} MiB at the peak")
    (ours_s, before, ours_peak), (theirs_s, start, theirs_peak) = figures["ldpfl"], figures["opacus"]
    print(f"time {ours_s / theirs_s:.2f} x, memory {(ours_peak - before) / (theirs_peak - start):.2f} x of Opacus'")
    print(f"gradients of a record lie {figures['apart'][0]:.1e} of their length apart at most")


if __name__ == "__main__":
    main()
