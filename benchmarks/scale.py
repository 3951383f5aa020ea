"""One round of many clients of one record each: processor time a client and peak memory, over clients and weights.

    python benchmarks/scale.py [--folder build/scale] [--most 1e9] [--mechanisms duchi rotated-sign privunit-g]

Measures every pair of clients (100 to a million) and weights (1,000 to ten million) whose product is at most ``--most``, each in a
process of one thread. Each result is added to ``scale.json`` at once: rerun the same command to go on where it was stopped. Then draws
``scale.svg``. Its dashed lines are 6 operations a weight at the speed of this core's matrix product: two each for the model, its gradient
and the step.

The second of two equal rounds is timed, so that steps are compiled. Peak memory includes the data, a byte for each input of each client.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch

from clients import config_of, made_up
from ldpfl.experiments.build import build
from ldpfl.simulation import simulate

CLIENTS = (100, 1_000, 10_000, 100_000, 1_000_000)
WEIGHTS = (1_000, 7_840, 100_000, 1_000_000, 10_000_000)
CLASSES = 10


def measured(mechanism: str, clients: int, weights: int) -> dict[str, float]:
    """Return microseconds of the processor a client, and MiB at the peak, of one round."""
    torch.set_num_threads(1)
    inputs = weights // CLASSES
    chosen = argparse.Namespace(clients=clients, mechanism=mechanism, perturbed="update", compile="on")
    federation, start = build(config_of(chosen), made_up(clients, inputs, CLASSES), torch.device("cpu"))
    used = 0.0
    for _ in range(2):
        used = -time.process_time()
        list(simulate(federation, start, 1))
        used += time.process_time()
    return {"microseconds": used / clients * 1e6, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def in_its_own_process(mechanism: str, clients: int, weights: int) -> dict[str, float]:
    """Return what :func:`measured` does there."""
    command = [sys.executable, __file__, "--one", mechanism, str(clients), str(weights)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def operations_a_second() -> float:
    """Return floating-point operations a second of a product of two matrices, on one thread."""
    torch.set_num_threads(1)
    square, best = torch.randn(1000, 1000), float("inf")
    for _ in range(10):
        began = time.perf_counter()
        square @ square
        best = min(best, time.perf_counter() - began)
    return 2e9 / best


def draw(found: dict[str, dict[str, float]], speed: float, path: Path) -> None:
    """Draw microseconds a client over clients: a panel a mechanism, a curve for each number of weights."""
    keys = [(mechanism, int(clients), int(weights)) for mechanism, clients, weights in (key.split() for key in found)]
    names = sorted({mechanism for mechanism, _, _ in keys})
    mpl.rcParams["svg.hashsalt"] = "scale"
    figure, panels = plt.subplots(1, len(names), figsize=(4.5 * len(names), 4), sharey=True, squeeze=False, layout="constrained")
    for panel, name in zip(panels[0], names, strict=True):
        for number, weights in enumerate(sorted({weights for mechanism, _, weights in keys if mechanism == name})):
            own = sorted(clients for mechanism, clients, held in keys if (mechanism, held) == (name, weights))
            times = [found[f"{name} {clients} {weights}"]["microseconds"] for clients in own]
            panel.plot(own, times, marker="o", color=f"C{number}", label=f"{weights:,} weights")
            panel.axhline(6 * weights / speed * 1e6, color=f"C{number}", linestyle="--", linewidth=0.8)
        panel.set(title=name, xscale="log", yscale="log", xlabel="clients of one record")
        panel.legend(fontsize="small")
    panels[0][0].set_ylabel("microseconds of one core a client")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measure what is missing, then draw everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/scale"))
    parser.add_argument("--most", type=float, default=1e9)
    parser.add_argument("--mechanisms", nargs="+", default=["duchi", "rotated-sign", "privunit-g"])
    parser.add_argument("--one", nargs=3, metavar=("MECHANISM", "CLIENTS", "WEIGHTS"), help="measure this alone, and print it")
    options = parser.parse_args()
    if options.one:
        mechanism, clients, weights = options.one
        print(json.dumps(measured(mechanism, int(clients), int(weights))))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / "scale.json"
    found: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.exists() else {}
    for clients, weights in sorted(((n, d) for n in CLIENTS for d in WEIGHTS), key=lambda pair: pair[0] * pair[1]):
        for mechanism in options.mechanisms:
            name = f"{mechanism} {clients} {weights}"
            if name in found or clients * weights > options.most:
                continue
            found[name] = in_its_own_process(mechanism, clients, weights)
            path.write_text(json.dumps(found, indent=1))
            print(f"{name}: {found[name]['microseconds']:.1f} us a client, {found[name]['peak_mib']:.0f} MiB", flush=True)
    draw(found, operations_a_second(), options.folder / "scale.svg")


if __name__ == "__main__":
    main()
