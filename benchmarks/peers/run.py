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
    """A program that runs rounds.

    Attributes:
        packages: what its environment holds; empty for ldpfl's own.
        many: clients of one record that it is asked for: slow peers are asked for fewer, and compared by the client.
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


def python_of(name: str, peer: Peer) -> str:
    """Return the interpreter of a peer; its environment is made if there is none."""
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


def once(python: str, peer: Peer, digits: Path, options: list[str], threads: int) -> dict[str, float]:
    """Return seconds of the later rounds and MiB of one run."""
    processes = threads if peer.distributed else 1
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)] if processes > 1 else []
    environment = {**os.environ, **peer.environment, "OMP_NUM_THREADS": str(1 if launch else threads), "PYTHONPATH": str(HERE)}
    command = [python, *launch, str(HERE / peer.script), str(digits), "--threads", str(threads), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HOURS, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{peer.script} failed:\n{done.stderr[-2000:]}")
    told = json.loads(lines[-1])
    return {"seconds": median(told["seconds"][1:]), "mib": told["mib"]}


def main() -> None:
    """Time all peers, in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--settings", nargs="*", default=["cnn", "linear"])
    parser.add_argument("--out", type=Path, help="file for all figures, as JSON")
    own = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    task = data.load("mnist", own.data_dir)
    digits = BUILD / "digits.npz"
    np.savez(digits, images=task.train.inputs.numpy().reshape(-1, 28, 28), labels=task.train.targets.numpy())
    pythons = {name: python_of(name, PEERS[name]) for name in own.only}
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for setting in own.settings:
        rows = found.setdefault(setting, {name: [] for name in own.only})
        for _ in range(own.turns):
            for name in own.only:
                peer = PEERS[name]
                clients, samples = (100, 600) if setting == "cnn" else (peer.many, 1)
                options = ["--model", setting, "--clients", str(clients), "--samples", str(samples)]
                try:
                    told = once(pythons[name], peer, digits, options, own.threads)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    print(f"{name}, {setting}: {error}", flush=True)
                    continue
                rows[name].append({**told, "clients": clients})
                print(f"{name}, {setting}: {told['seconds']:.2f} s, {told['mib']:.0f} MiB", flush=True)
        show(setting, rows, own.threads)
    if own.out:
        own.out.write_text(json.dumps({"threads": own.threads, "found": found}, indent=1) + "\n", encoding="utf-8")


def show(setting: str, rows: dict[str, list[dict[str, float]]], threads: int) -> None:
    """Print the table of a setting: ratios are of the same turn."""
    title = "100 clients x 600 digits, two-layer CNN" if setting == "cnn" else "one digit a client, logistic regression"
    table = Table(title=f"one round, {title}, {threads} cores")
    for heading in ("", "clients", "seconds", "us a client", "times ldpfl's", "from .. to", "MiB"):
        table.add_column(heading, justify="right")
    ours = next((runs for name, runs in rows.items() if name == "ldpfl"), [])
    for name, runs in rows.items():
        if not runs:
            continue
        each = [run["seconds"] / run["clients"] for run in runs]
        ratios = [own / (base["seconds"] / base["clients"]) for own, base in zip(each, ours, strict=False)] or [float("nan")]
        table.add_row(
            name,
            f"{int(runs[0]['clients']):,}",
            f"{median(run['seconds'] for run in runs):.2f}",
            f"{median(each) * 1e6:,.0f}",
            f"{median(ratios):.1f}",
            f"{min(ratios):.1f} .. {max(ratios):.1f}",
            f"{max(run['mib'] for run in runs):,.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
