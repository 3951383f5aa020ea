"""Make what the features called ``strokes`` or ``leaves`` have learnt anew, from random drawings alone; minutes on one core.

python benchmarks/drawn_features.py leaves                  # compares with the file in the package
python benchmarks/drawn_features.py leaves --write FILE     # writes another
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.progress import Progress
from safetensors.torch import save_file
from torch import Tensor

from ldpfl.data.features import leaves as leaf_features
from ldpfl.data.features import strokes
from ldpfl.models.leaf_network import leaves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", choices=["strokes", "leaves"])
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    module = {"strokes": strokes, "leaves": leaf_features}[arguments.features]
    with Progress() as bars:
        bar = bars.add_task("drawings")
        found = module.learn(lambda done, total: bars.update(bar, completed=done, total=total))
    if arguments.write:
        save_file(found, arguments.write)
        return
    packaged = {"strokes": strokes.load_learnt, "leaves": leaves}[arguments.features]()
    for name, own in packaged.items():
        print(f"{name}: {_compared(own.float(), found[name].float())}")


def _compared(own: Tensor, made: Tensor) -> str:
    if own.dim() == 1:
        return f"largest difference {float((own - made).abs().max()):.2g}"
    own, made = own.flatten(1) if own.dim() > 2 else own.T, made.flatten(1) if made.dim() > 2 else made.T
    shared = (own / own.norm(dim=1, keepdim=True) * made / made.norm(dim=1, keepdim=True)).sum(dim=1)
    return f"cosine of each with the package's {float(shared.min()):.6f} at least"


if __name__ == "__main__":
    main()
