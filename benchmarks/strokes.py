"""Make the directions of the features called ``strokes`` anew, from random scribbles alone; minutes on one core.

python benchmarks/strokes.py                  # compares with the file in the package
python benchmarks/strokes.py --write FILE     # writes another
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.progress import Progress
from safetensors.torch import save_file

from ldpfl.features import strokes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    with Progress() as bars:
        bar = bars.add_task("scribbles")
        mean, directions = strokes.learn(lambda done, total: bars.update(bar, completed=done, total=total))
    if arguments.write:
        save_file({"mean": mean, "directions": directions}, arguments.write)
        return
    own_mean, own = strokes.learnt()
    shared = (own / own.norm(dim=0) * directions.float() / directions.float().norm(dim=0)).sum(dim=0)
    print(f"mean: largest difference {float((own_mean - mean.float()).abs().max()):.2g}")
    print(f"directions: cosine of each with the package's {float(shared.min()):.6f} at least")


if __name__ == "__main__":
    main()
