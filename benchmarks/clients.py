"""One round of a federation of many clients that hold one record each: logistic regression, 784 inputs by 10 classes, on made-up digits.

    python benchmarks/clients.py [--clients 100000] [--mechanism duchi] [--compile on] [--profile]

Prints seconds, microseconds a client by the clock and of processor time, and peak memory. The second of two equal rounds is timed: steps
are compiled by then. Run with OMP_NUM_THREADS=1 for one core.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import resource
import time

import torch

from ldpfl import data
from ldpfl.experiments.build import build
from ldpfl.experiments.config import RunConfig
from ldpfl.simulation import simulate


def made_up(clients: int, inputs: int, classes: int) -> data.Dataset:
    """Return ``clients`` records of random pixels, each of a random class."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (clients, 1, 1, inputs), dtype=torch.uint8, generator=generator)
    train = data.Samples(pixels, torch.randint(0, classes, (clients,), generator=generator))
    return data.Dataset("made-up", train, train.take(slice(1000)), classes, (0.1307,), (0.3081,), "made-up")


def config_of(args: argparse.Namespace) -> RunConfig:
    """Return the config of one round."""
    regime_b = args.mechanism == "privunit-g"
    return RunConfig.model_validate(
        {
            "seed": 1,
            "data": {"name": "mnist"},
            "model": {"name": "linear"},
            "clients": {"count": args.clients, "fraction": 1.0},
            "training": {"rounds": 1, "epochs": 1, "batch_size": 1, "learning_rate": 0.01, "compile": args.compile},
            "mechanism": {"name": args.mechanism, "epsilon": 8.0 if regime_b else 1.0, "perturbed": args.perturbed},
        }
    )


def main() -> None:
    """Time a round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--mechanism", default="duchi")
    parser.add_argument("--perturbed", default="update")
    parser.add_argument("--inputs", type=int, default=784)
    parser.add_argument("--compile", default="auto", choices=["auto", "on", "off"])
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    dataset = made_up(args.clients, args.inputs, 10)
    memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    federation, start = build(config_of(args), dataset, torch.device("cpu"))
    list(simulate(federation, start, 1))
    built, processor_began = time.perf_counter(), time.process_time()
    profile = cProfile.Profile()
    if args.profile:
        profile.enable()
    (last,) = simulate(federation, start, 1)
    profile.disable()
    seconds, processor_s = time.perf_counter() - built, time.process_time() - processor_began
    memory_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"{args.mechanism}: {args.clients:,} clients x {last.state.weights.numel():,} weights, built and run once in {built - began:.1f} s"
    )
    per_client = f"{seconds / args.clients * 1e6:.1f} us a client, {processor_s / args.clients * 1e6:.1f} of the processor"
    print(f"{seconds:.2f} s: {per_client}; memory {memory_peak / 1024:.0f} MiB at the peak, {memory_before / 1024:.0f} of them before")
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
