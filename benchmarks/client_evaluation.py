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
from ldpfl.simulation.evaluating_records import LOSS, RANKED, RIGHT, ClientFigures, RecordScores
from ldpfl.simulation.evaluating_whole_clients import BitScores, ClientScores, MeanScores
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
            federation = MadeUpFederation(classes, clients, args.held)
            for epsilon in (0.5, 1.0):
                for (trusted, protects), figures in federation.regimes(epsilon).items():
                    cells = federation.errors(figures)
                    print(
                        ",".join([str(classes), str(clients), str(clients * args.held), f"{epsilon:g}", trusted, protects, *cells]),
                        flush=True,
                    )


class MadeUpFederation:
    """A federation with made-up held-back records, ``held`` for each client, and a model's outputs for them."""

    def __init__(self, classes: int, clients: int, held: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.clients, self.held, self.classes = clients, held, classes
        self.targets = torch.randint(0, classes, (clients * held,), generator=generator)
        self.outputs = torch.randn(clients * held, classes, generator=generator)
        self.outputs[torch.arange(len(self.targets)), self.targets] += 2.0
        module = Linear((1,), classes)
        self.task = LocalTask(module, ParameterLayout.from_module(module), None, (), (), LocalOptimiser(0.1))  # type: ignore[arg-type]
        self.exact = self.figures_of_record_sums(DpSgd(RecordClip(1.0), 2.0**-10, summed=True, records=float(held)))(0).all()

    def regimes(self, epsilon: float) -> Mapping[tuple[str, str], Figures]:
        """Return the figures of each regime, by who is trusted and what is protected."""
        mu, records = gaussian_mu(epsilon, DELTA), float(self.held)
        bits, means = BitScores("class", self.classes, BOUND), MeanScores("class", self.classes, BOUND)
        channels: Sequence[Channel] = ("ideal-shuffler", "direct")
        shuffled_epsilon, direct_epsilon = (epsilon_of_bit(epsilon, DELTA, channel, self.clients, bits.entries, 1) for channel in channels)
        share = noise_multiplier_for_sum(epsilon, DELTA, self.clients, 1)
        return {
            ("a sum", "a record"): self.figures_of_record_sums(DpSgd(RecordClip(1.0), share, summed=True, records=records)),
            ("a sum", "a client"): self.figures_of_client_reports(means, DpFedAvg(RecordClip(1.0), share, summed=True)),
            ("a shuffler", "a client"): self.figures_of_client_reports(bits, Duchi(shuffled_epsilon)),
            ("nobody", "a record"): self.figures_of_record_sums(DpSgd(RecordClip(1.0), 2 / mu, records=records)),
            ("nobody", "a client"): self.figures_of_client_reports(bits, Harmony(direct_epsilon)),
        }

    def sums_by_client(self, vectors: Tensor) -> Tensor:
        """Return the sum of the vectors of each client's records."""
        return vectors.reshape(self.clients, self.held, -1).sum(dim=1)

    def figures_of_record_sums(self, mechanism: DpSgd) -> Figures:
        """Return a function of the noise's seed that measures by noisy sums over records."""
        scores = RecordScores("class", self.classes, BOUND)
        sums = self.sums_by_client(lattice_points(scores.vectors(self.task, self.outputs, self.targets), mechanism.steps))

        def figures(seed: int) -> ClientFigures:
            def values_of(client_range: range) -> Tensor:
                return sums[client_range.start : client_range.stop]

            summed_scores = released_sum(values_of, self.clients, scores.size, mechanism, seed=seed, purpose=Purpose.EVALUATION, number=1)
            return ClientFigures(scores, summed_scores.in_units(mechanism.steps), len(self.targets))

        return figures

    def figures_of_client_reports(self, scores: ClientScores, mechanism: Mechanism) -> Figures:
        """Return a function of the noise's seed that measures by one randomised report of each client."""
        values = scores.sent_values(self.sums_by_client(scores.vectors(self.task, self.outputs, self.targets)) / self.held)

        def figures(seed: int) -> ClientFigures:
            def values_of(client_range: range) -> Tensor:
                return values[client_range.start : client_range.stop]

            pool = released_pool(values_of, self.clients, scores.ranges, mechanism, seed=seed, purpose=Purpose.EVALUATION, number=1)
            return ClientFigures(scores, scores.estimated_sum(pool, mechanism), self.clients)

        return figures

    def errors(self, figures: Figures) -> list[str]:
        """Return the root mean squared error of each figure, and how often the accuracy lies within 1.96 deviations of its noise."""
        draws = [figures(seed).all() for seed in range(DRAWS)]
        cells = []
        for name in (RIGHT, LOSS, RANKED):
            errors = [draw[name].value - self.exact[name].value for draw in draws if name in draw]
            cells.append(f"{np.sqrt(np.mean(np.square(errors))):.4f}" if len(errors) == DRAWS else "-")
        inside = [abs(draw[RIGHT].value - self.exact[RIGHT].value) <= 1.96 * draw[RIGHT].noise for draw in draws]
        return [*cells, f"{np.mean(inside):.0%}"]


if __name__ == "__main__":
    main()
