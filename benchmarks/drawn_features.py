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

from ldpfl.data.features import leaves as leaf_features, strokes
from ldpfl.models.leaf_network import leaves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", choices=["strokes", "leaves"])
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    module = {"strokes": strokes, "leaves": leaf_features}[arguments.features]
    with Progress() as bars:
        bar = bars.add_task("drawings")
        learnt = module.learn(lambda done, total: bars.update(bar, completed=done, total=total))
    if arguments.write:
        save_file(learnt, arguments.write)
        return
    packaged = {"strokes": strokes.load_learnt, "leaves": leaves}[arguments.features]()
    for name, packaged_tensor in packaged.items():
        print(f"{name}: {_difference_text(packaged_tensor.float(), learnt[name].float())}")


def _difference_text(packaged: Tensor, learnt: Tensor) -> str:
    """Return how far the tensors differ: by number for a vector, by the cosine of each row or filter for others."""
    if packaged.dim() == 1:
        return f"largest difference {float((packaged - learnt).abs().max()):.2g}"
    packaged, learnt = packaged.flatten(1) if packaged.dim() > 2 else packaged.T, learnt.flatten(1) if learnt.dim() > 2 else learnt.T
    cosines = (packaged / packaged.norm(dim=1, keepdim=True) * learnt / learnt.norm(dim=1, keepdim=True)).sum(dim=1)
    return f"cosine of each with the package's {float(cosines.min()):.6f} at least"


if __name__ == "__main__":
    main()
