"""How much faster local training is with products in bfloat16: python benchmarks/precision.py [--compiled]

Made-up images, ten clients with batches of 10 (of 64 for wide layers), one thread; both precisions in turns, the fastest of each.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import torch
from torch import nn

from ldpfl import ParameterLayout, data
from ldpfl.models.images import TwoLayerCNN
from ldpfl.simulation import BatchSchedule, LocalTask, VectorizedTrainer
from ldpfl.simulation.compiled_training import CompiledTrainer
from ldpfl.simulation.local_steps import LocalOptimiser


def wide_mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiled", action="store_true")
    compiled = parser.parse_args().compiled
    torch.set_num_threads(1)
    images = data.Samples(torch.randint(0, 256, (640, 1, 28, 28), dtype=torch.uint8), torch.arange(640) % 10)
    for name, module, batch in (("MLP, 2 x 1,024 units", wide_mlp(), 64), ("two-layer CNN", TwoLayerCNN((1, 28, 28), 10), 10)):
        layout = ParameterLayout.from_module(module)
        weights = layout.flatten({name: value.detach() for name, value in module.named_parameters()})
        exact = LocalTask(module, layout, images, (0.1307,), (0.3081,), LocalOptimiser(0.03))
        tasks = (exact, replace(exact, precision="bf16"))
        trainers = [CompiledTrainer(task, batch) if compiled else VectorizedTrainer(task) for task in tasks]
        index = torch.arange(10 * 2 * batch).reshape(10, 2, batch) % 640
        schedule = BatchSchedule(index, torch.ones(index.shape))
        us_per_sample = [[float("inf")], [float("inf")]]
        for _ in range(6):
            for trainer, times in zip(trainers, us_per_sample, strict=True):
                began = time.process_time()
                trainer.train(weights, schedule)
                times.append((time.process_time() - began) / index.numel() * 1e6)
        float32, bf16 = map(min, us_per_sample)
        print(f"{name}: {float32:.1f} us a sample in float32, {bf16:.1f} in bfloat16, {float32 / bf16:.2f} times as fast", flush=True)


if __name__ == "__main__":
    main()
