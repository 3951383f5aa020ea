"""The statement that goes with every privacy parameter."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Guarantee:
    """What one (epsilon, delta) means: for which unit, against whom, and whether it is proved.

    Attributes:
        epsilon: privacy loss of one unit; infinity where nothing is protected.
        delta: failure probability; 0 for a pure guarantee.
        unit: what the epsilon protects, for instance ``"weight"`` (one scalar of one round's report).
        units_per_round: how many such units one client releases in one round.
        adjacency: which inputs are to be indistinguishable.
        trust_model: ``"local"`` needs no trusted server.
        status: ``"proved"`` here, or only ``"claimed"`` by a paper.
        assumptions: what has to be true outside the mechanism.
    """

    epsilon: float
    delta: float
    unit: str
    units_per_round: int
    adjacency: str
    trust_model: Literal["local", "shuffled", "central"]
    status: Literal["proved", "claimed"]
    assumptions: tuple[str, ...] = ()

    def pure_total(self, rounds: int) -> float:
        """Epsilon of ``rounds`` whole reports of one client by basic composition: units x rounds x epsilon.

        This holds against a server that links all reports of a client. It is the sum that the LDP-FL paper
        (section 4, "Parameter Shuffling") writes as T d epsilon.
        """
        return self.epsilon * self.units_per_round * rounds
