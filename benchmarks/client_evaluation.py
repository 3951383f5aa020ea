"""How far figures lie from those of all held-back records when clients measure them: by a sum, behind a shuffler, and trusting nobody.

Records are right with a given probability and have a loss and scores to go with it; only the noise is drawn anew each time. The records
follow from seed 0, and the noise from seeds 0 to 29.

    python benchmarks/client_evaluation.py [--clients 1000 10000] [--held 10]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ldpfl.experiments.planning.evaluation_noise import epsilon_of_bit, noise_multiplier_for_sum
from ldpfl.mechanisms import Mechanism
from ldpfl.mechanisms.dp_fedavg import DpFedAvg
from ldpfl.mechanisms.dp_sgd import DpSgd
from ldpfl.mechanisms.duchi import Duchi
from ldpfl.mechanisms.harmony import Harmony
from ldpfl.mechanisms.record_clipping import RecordClip
from ldpfl.models.dense import Linear
from ldpfl.models.layout import ParameterLayout
from ldpfl.privacy.accountants.gaussian import gaussian_mu
from ldpfl.privacy.events import Channel
from ldpfl.simulation import LocalTask
from ldpfl.simulation.evaluating import LOSS, RANKED, RIGHT, ClientFigures, RecordScores
from ldpfl.simulation.evaluating_clients import BitScores, ClientScores, MeanScores
from ldpfl.simulation.local_steps import LocalOptimiser
from ldpfl.simulation.record_sums import lattice_points, released_pool, released_sum
from ldpfl.util.randomness import Purpose

DRAWS, DELTA, BOUND = 30, 1e-5, 5.0

Figures = Callable[[int], ClientFigures]
"""The figures that one draw of the noise gives, by its seed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1_000, 10_000])
    parser.add_argument("--held", type=int, default=10, help="held-back records of a client")
    args = parser.parse_args()
    print("classes,clients,records,epsilon,trusted,protects,accuracy,mean loss,AUROC,in intervals")
    for classes in (2, 10):
        for clients in args.clients:
            made = Made(classes, clients, args.held)
            for epsilon in (0.5, 1.0):
                for (trusted, protects), figures in made.regimes(epsilon).items():
                    cells = made.errors(figures)
                    print(
                        ",".join([str(classes), str(clients), str(clients * args.held), f"{epsilon:g}", trusted, protects, *cells]),
                        flush=True,
                    )


class Made:
    """Made-up held-back records of a federation, and what a model says of them."""

    def __init__(self, classes: int, clients: int, held: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.clients, self.held, self.classes = clients, held, classes
        self.targets = torch.randint(0, classes, (clients * held,), generator=generator)
        self.outputs = torch.randn(clients * held, classes, generator=generator)
        self.outputs[torch.arange(len(self.targets)), self.targets] += 2.0
        module = Linear((1,), classes)
        self.task = LocalTask(module, ParameterLayout.from_module(module), None, (), (), LocalOptimiser(0.1))  # type: ignore[arg-type]
        self.exact = self.summed(DpSgd(RecordClip(1.0), 2.0**-10, summed=True, records=float(held)))(0).all()

    def regimes(self, epsilon: float) -> Mapping[tuple[str, str], Figures]:
        """Return the figures of each regime, by who is trusted and what is protected."""
        mu, records = gaussian_mu(epsilon, DELTA), float(self.held)
        bits, means = BitScores("class", self.classes, BOUND), MeanScores("class", self.classes, BOUND)
        channels: Sequence[Channel] = ("ideal-shuffler", "direct")
        mixed, seen = (epsilon_of_bit(epsilon, DELTA, channel, self.clients, bits.entries, 1) for channel in channels)
        share = noise_multiplier_for_sum(epsilon, DELTA, self.clients, 1)
        return {
            ("a sum", "a record"): self.summed(DpSgd(RecordClip(1.0), share, summed=True, records=records)),
            ("a sum", "a client"): self.of_clients(means, DpFedAvg(RecordClip(1.0), share, summed=True)),
            ("a shuffler", "a client"): self.of_clients(bits, Duchi(mixed)),
            ("nobody", "a record"): self.summed(DpSgd(RecordClip(1.0), 2 / mu, records=records)),
            ("nobody", "a client"): self.of_clients(bits, Harmony(seen)),
        }

    def by_client(self, vectors: Tensor) -> Tensor:
        return vectors.reshape(self.clients, self.held, -1).sum(dim=1)

    def summed(self, mechanism: DpSgd) -> Figures:
        scores = RecordScores("class", self.classes, BOUND)
        sums = self.by_client(lattice_points(scores.vectors(self.task, self.outputs, self.targets), mechanism.steps))

        def figures(seed: int) -> ClientFigures:
            def own(some: range) -> Tensor:
                return sums[some.start : some.stop]

            found = released_sum(own, self.clients, scores.size, mechanism, seed=seed, purpose=Purpose.EVALUATION, number=1)
            return ClientFigures(scores, found.in_units(mechanism.steps), len(self.targets))

        return figures

    def of_clients(self, scores: ClientScores, mechanism: Mechanism) -> Figures:
        asked = scores.sent_values(self.by_client(scores.vectors(self.task, self.outputs, self.targets)) / self.held)

        def figures(seed: int) -> ClientFigures:
            def own(some: range) -> Tensor:
                return asked[some.start : some.stop]

            pool = released_pool(own, self.clients, scores.ranges, mechanism, seed=seed, purpose=Purpose.EVALUATION, number=1)
            return ClientFigures(scores, scores.estimated_sum(pool, mechanism), self.clients)

        return figures

    def errors(self, figures: Figures) -> list[str]:
        """Return the root of the mean squared error of each figure, and how often 1.96 deviations of the noise hold the accuracy."""
        found = [figures(seed).all() for seed in range(DRAWS)]
        cells = []
        for name in (RIGHT, LOSS, RANKED):
            errors = [own[name].value - self.exact[name].value for own in found if name in own]
            cells.append(f"{np.sqrt(np.mean(np.square(errors))):.4f}" if len(errors) == DRAWS else "-")
        inside = [abs(own[RIGHT].value - self.exact[RIGHT].value) <= 1.96 * own[RIGHT].noise for own in found]
        return [*cells, f"{np.mean(inside):.0%}"]


if __name__ == "__main__":
    main()
