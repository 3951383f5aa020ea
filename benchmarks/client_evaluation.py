"""How far figures lie from those of all held-back records when clients measure them: over a secure sum, and trusting nobody.

Records are right with a given probability and have a loss and scores to go with it; only the noise is drawn anew each time.

    python benchmarks/client_evaluation.py
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from ldpfl.mechanisms.dp_sgd import DpSgd
from ldpfl.mechanisms.record_clipping import RecordClip
from ldpfl.models.dense import Linear
from ldpfl.models.layout import ParameterLayout
from ldpfl.privacy.accountants.gaussian import gaussian_mu
from ldpfl.simulation import LocalTask
from ldpfl.simulation.evaluating import GAP, LOSS, RANKED, RIGHT, ClientFigures, RecordScores
from ldpfl.simulation.local_steps import LocalOptimiser
from ldpfl.simulation.record_sums import NoisySum, points_of, released_sum
from ldpfl.util.randomness import Purpose

CLIENTS, DRAWS = 100, 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print("classes,records,epsilon,channel,accuracy,mean loss,predicted less observed,AUROC,in intervals")
    for classes in (2, 10):
        for held in (10, 60, 600):
            for epsilon in (0.5, 1.0):
                for summed in (True, False):
                    print(line(classes, held, epsilon, summed=summed))


def line(classes: int, held: int, epsilon: float, *, summed: bool) -> str:
    """Return a line of the table: the root of the mean squared error of each figure over the draws."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, classes, (CLIENTS * held,), generator=generator)
    outputs = torch.randn(CLIENTS * held, classes, generator=generator)
    outputs[torch.arange(len(targets)), targets] += 2.0
    module = Linear((1,), classes)
    task = LocalTask(module, ParameterLayout.from_module(module), None, (), (), LocalOptimiser(0.1))  # type: ignore[arg-type]
    scores = RecordScores("class", classes, 5.0)
    noise = 2 / gaussian_mu(epsilon, 1e-5) / (np.sqrt(CLIENTS) if summed else 1)
    mechanism = DpSgd(RecordClip(1.0), noise, summed=summed, records=float(held))
    sums = points_of(scores.vectors(task, outputs, targets), mechanism.steps).reshape(CLIENTS, held, -1).sum(dim=1)
    exact = ClientFigures(
        scores, _sum(sums, scores, DpSgd(RecordClip(1.0), 2.0**-10, summed=True, records=float(held)), 0), len(targets)
    ).all()
    errors: dict[str, list[float]] = {name: [] for name in exact}
    inside = 0
    for seed in range(DRAWS):
        found = ClientFigures(scores, _sum(sums, scores, mechanism, seed), len(targets)).all()
        for name, figure in found.items():
            errors[name].append(figure.value - exact[name].value)
        inside += abs(found[RIGHT].value - exact[RIGHT].value) <= 1.96 * found[RIGHT].noise
    cells = [f"{np.sqrt(np.mean(np.square(errors[name]))):.4f}" if errors.get(name) else "-" for name in (RIGHT, LOSS, GAP, RANKED)]
    return ",".join([str(classes), f"{CLIENTS * held}", f"{epsilon:g}", "sum" if summed else "direct", *cells, f"{inside / DRAWS:.0%}"])


def _sum(sums: torch.Tensor, scores: RecordScores, mechanism: DpSgd, seed: int) -> NoisySum:
    found = released_sum(
        lambda some: sums[some.start : some.stop], CLIENTS, scores.size, mechanism, seed=seed, purpose=Purpose.EVALUATION, number=1
    )
    return found.in_units(mechanism.steps)


if __name__ == "__main__":
    main()
