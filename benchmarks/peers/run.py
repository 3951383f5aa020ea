"""One round by ldpfl and by its peers, side by side on this machine, each peer in an environment of its own.

    python benchmarks/peers/run.py --data-dir DIR [--turns 3] [--threads 2] [--only pfl plain] [--out docs/results]

Two settings: MNIST, 100 clients of 600 digits, a two-layer CNN, one epoch at batch size 10; and one record for each of many clients, a
logistic regression. ldpfl randomises each client's report (one bit a weight); the peers only average. Peers take turns. The first round
of each run is left out: processes begin and code is compiled in it. Environments are made in build/peers, by pip.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from ldpfl import data

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "peers"
HOURS = 3600.0


@dataclass(frozen=True)
class Peer:
    """A library that runs rounds by a script of its own.

    Attributes:
        packages: packages of its environment; empty for the environment of ldpfl.
        many: number of clients with one record each. Slow peers get fewer clients, and are compared by the time for a client.
    """

    script: str
    packages: tuple[str, ...] = ()
    many: int = 60_000
    distributed: bool = False
    environment: dict[str, str] = field(default_factory=dict)


TORCH = ("torch==2.13.0", "psutil", "numpy<2.5")
FEDJAX = (
    *("fedjax==0.0.17", "jax==0.4.25", "jaxlib==0.4.25", "numpy<2", "scipy<1.13", "psutil"),
    *("dm-haiku==0.0.12", "flax==0.8.2", "optax==0.2.2", "chex==0.1.86"),  # those of its time: later ones need a later JAX
)
PEERS = {
    "ldpfl": Peer("ours.py"),
    "ldpfl, eager": Peer("ours.py", environment={"COMPILE": "off"}),
    "plain loop": Peer("plain.py", many=6_000),
    "pfl 0.6": Peer("pfl_round.py", (*TORCH, "pfl[pytorch]==0.6.0"), distributed=True),
    "FedJAX 0.0.17": Peer("fedjax_round.py", FEDJAX),
    "DrJAX 0.2.1": Peer("drjax_round.py", ("drjax==0.2.1", "psutil")),
    "Flower 1.41, Ray": Peer("flower_round.py", many=600),
}


def python_with_packages(name: str, peer: Peer) -> str:
    """Return the Python interpreter of a peer, whose environment is made when it is first needed."""
    if not peer.packages:
        return sys.executable
    folder = BUILD / name.split()[0].lower()
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        print(f"{name}: installing into {folder.relative_to(ROOT)}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *peer.packages], check=True, stderr=subprocess.DEVNULL)
        (folder / "ready").touch()
    return str(python)


def run_peer(python: str, peer: Peer, digits: Path, options: list[str], threads: int) -> dict[str, float]:
    """Run a peer once. Return the median seconds of the rounds after the first, and the peak memory in MiB."""
    processes = threads if peer.distributed else 1
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)] if processes > 1 else []
    environment = {**os.environ, **peer.environment, "OMP_NUM_THREADS": str(1 if launch else threads), "PYTHONPATH": str(HERE)}
    command = [python, *launch, str(HERE / peer.script), str(digits), "--threads", str(threads), *options]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HOURS, check=False)
    lines = [line for line in finished.stdout.splitlines() if line.startswith("{")]
    if finished.returncode or not lines:
        raise RuntimeError(f"{peer.script} failed:\n{finished.stderr[-2000:]}")
    printed = json.loads(lines[-1])
    return {"seconds": median(printed["seconds"][1:]), "mib": printed["mib"]}


def main() -> None:
    """Time all peers, in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--settings", nargs="*", default=["cnn", "linear"])
    parser.add_argument("--out", type=Path, help="file for all figures, as JSON")
    arguments = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    task = data.load("mnist", arguments.data_dir)
    digits = BUILD / "digits.npz"
    np.savez(digits, images=task.train.inputs.numpy().reshape(-1, 28, 28), labels=task.train.targets.numpy())
    pythons = {name: python_with_packages(name, PEERS[name]) for name in arguments.only}
    figures_of_setting: dict[str, dict[str, list[dict[str, float]]]] = {}
    for setting in arguments.settings:
        rows = figures_of_setting.setdefault(setting, {name: [] for name in arguments.only})
        for _ in range(arguments.turns):
            for name in arguments.only:
                peer = PEERS[name]
                clients, samples = (100, 600) if setting == "cnn" else (peer.many, 1)
                options = ["--model", setting, "--clients", str(clients), "--samples", str(samples)]
                try:
                    figures = run_peer(pythons[name], peer, digits, options, arguments.threads)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    print(f"{name}, {setting}: {error}", flush=True)
                    continue
                rows[name].append({**figures, "clients": clients})
                print(f"{name}, {setting}: {figures['seconds']:.2f} s, {figures['mib']:.0f} MiB", flush=True)
        show(setting, rows, arguments.threads)
    if arguments.out:
        arguments.out.write_text(json.dumps({"threads": arguments.threads, "found": figures_of_setting}, indent=1) + "\n", encoding="utf-8")


def show(setting: str, rows: dict[str, list[dict[str, float]]], threads: int) -> None:
    """Print the table of a setting. A peer is compared with the run of ldpfl in the same turn."""
    title = "100 clients x 600 digits, two-layer CNN" if setting == "cnn" else "one digit a client, logistic regression"
    table = Table(title=f"one round, {title}, {threads} cores")
    for heading in ("", "clients", "seconds", "us a client", "times ldpfl's", "from .. to", "MiB"):
        table.add_column(heading, justify="right")
    ours = next((runs for name, runs in rows.items() if name == "ldpfl"), [])
    for name, runs in rows.items():
        if not runs:
            continue
        seconds_per_client = [run["seconds"] / run["clients"] for run in runs]
        ratios = [
            seconds_of_peer / (base_run["seconds"] / base_run["clients"])
            for seconds_of_peer, base_run in zip(seconds_per_client, ours, strict=False)
        ] or [float("nan")]
        table.add_row(
            name,
            f"{int(runs[0]['clients']):,}",
            f"{median(run['seconds'] for run in runs):.2f}",
            f"{median(seconds_per_client) * 1e6:,.0f}",
            f"{median(ratios):.1f}",
            f"{min(ratios):.1f} .. {max(ratios):.1f}",
            f"{max(run['mib'] for run in runs):,.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
