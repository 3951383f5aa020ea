"""Microseconds of processor time for a record's clipped gradient, in a sum over records: eager, compiled, and by Opacus (if installed).

    python benchmarks/record_gradients.py [--records 600] [--repeats 5]

Made-up digits, one thread, one client. All take turns in one process, and the fastest of ``--repeats`` counts. Opacus clips and sums in
float32; ldpfl's sums are of exact lattice points.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import time
import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from ldpfl import ParameterLayout, data
from ldpfl.data.samples import normalise
from ldpfl.mechanisms.record_clipping import RecordClip
from ldpfl.models.images import TwoLayerCNN
from ldpfl.simulation import BatchSchedule, LocalTask, RecordGradientTrainer
from ldpfl.simulation.compiled_records import CompiledSums
from ldpfl.simulation.local_steps import LocalOptimiser

NORM = 0.5
MODELS: dict[str, Callable[[], nn.Module]] = {
    "two-layer CNN": lambda: TwoLayerCNN((1, 28, 28), 10),
    "logistic regression": lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)),
    "MLP of 200 units": lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10)),
}


def opacus_summing(module: nn.Module, inputs: Tensor, targets: Tensor, batch: int) -> Callable[[], object]:
    """Return a function that sums up the clipped gradients of all records with Opacus, ``batch`` records at a time."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    model = GradSampleModule(copy.deepcopy(module), loss_reduction="sum")
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    optimiser = DPOptimizer(inner, noise_multiplier=0.0, max_grad_norm=NORM, expected_batch_size=len(inputs), loss_reduction="sum")

    def sum_up() -> None:
        optimiser.zero_grad()
        for start in range(0, len(inputs), batch):
            rows = slice(start, start + batch)
            F.cross_entropy(model(inputs[rows]), targets[rows], reduction="sum").backward()  # type: ignore[no-untyped-call]
            optimiser.clip_and_accumulate()
            for parameter in model.parameters():
                parameter.grad_sample = None

    return sum_up


def us_per_record(name: str, records: int, repeats: int) -> dict[str, float]:
    """Return the fewest microseconds for a record by each implementation, for the model ``name``."""
    torch.manual_seed(0)
    module = MODELS[name]()
    layout = ParameterLayout.from_module(module)
    weights = layout.flatten({name: value.detach() for name, value in module.named_parameters()})
    digits = torch.randint(0, 256, (records, 1, 28, 28), dtype=torch.uint8)
    samples = data.Samples(digits, torch.arange(records) % 10)
    task, clip = LocalTask(module, layout, samples, (0.1307,), (0.3081,), LocalOptimiser(1.0)), RecordClip(NORM)
    eager = RecordGradientTrainer(task, clip)
    compiled = replace(eager, compiled=CompiledSums(task, clip))
    schedule = BatchSchedule(torch.arange(records)[None, None], torch.ones(1, 1, records))
    eager_sum, compiled_sum = (trainer.train(weights, schedule).double() for trainer in (eager, compiled))
    print(f"{name}: compiled differs from eager by {float((eager_sum - compiled_sum).norm() / eager_sum.norm()):.1e} of the sum's length")
    actions: dict[str, Callable[[], object]] = {
        "eager": lambda: eager.train(weights, schedule),
        "compiled": lambda: compiled.train(weights, schedule),
    }
    if importlib.util.find_spec("opacus"):
        for batch in (16, 64, 256):
            actions[f"Opacus, batches of {batch}"] = opacus_summing(module, normalise(digits, task.mean, task.std), samples.targets, batch)
    fastest = dict.fromkeys(actions, float("inf"))
    for _ in range(repeats):
        for computed_by, action in actions.items():
            began = time.process_time()
            action()
            fastest[computed_by] = min(fastest[computed_by], (time.process_time() - began) / records * 1e6)
    return fastest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # of Opacus
    table = Table("model", "how", "us a record", "times the first", title=f"clipped gradients of {options.records} records, one thread")
    for name in MODELS:
        us_of_record = us_per_record(name, options.records, options.repeats)
        for computed_by, microseconds in us_of_record.items():
            table.add_row(name, computed_by, f"{microseconds:.1f}", f"{us_of_record['eager'] / microseconds:.2f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
