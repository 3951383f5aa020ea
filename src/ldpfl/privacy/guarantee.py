"""The statement that goes with every privacy parameter."""

from dataclasses import asdict, dataclass
from math import isfinite, isnan
from typing import Any, Literal

REPLACE_ONE = "replace one client's data"
"""Adjacency used throughout: anything that one client holds, in all rounds, may be replaced by anything else."""

REPLACE_RECORD = "replace one record of one client"
"""Adjacency of what is protected record by record: the number of a client's records is public."""

Unit = Literal["weight", "coordinate", "group", "layer", "vector", "record", "client"]
Scope = Literal["round", "run"]
TrustModel = Literal["local", "shuffled", "summed", "central"]
Status = Literal["proved", "claimed", "estimate"]


@dataclass(frozen=True)
class Guarantee:
    """What one (epsilon, delta) means: for which unit, against whom, and whether it is proved.

    Attributes:
        epsilon: privacy loss of one unit, certified from above where ``status`` is proved; infinity where nothing is protected.
        delta: failure probability; 0 for a pure guarantee.
        unit: what the epsilon protects. ``"weight"``: one scalar of one report; ``"record"``: one record of a
            client in all that it sends; ``"client"``: all that a client sends.
        units_per_round: how many such units one client releases in one round.
        adjacency: which inputs are to be indistinguishable.
        trust_model: ``"local"`` trusts nobody; ``"shuffled"`` trusts a shuffler to show only counts; ``"summed"``
            trusts a sum over clients to hide its terms; ``"central"`` trusts the server.
        status: ``"proved"``; ``"claimed"`` by a paper, and not so; or an ``"estimate"`` that bounds nothing.
        assumptions: what has to be true outside the mechanism.
        scope: whether the unit is counted in one round or over the whole run.
        lower: an epsilon that some data set attains, where one is known: no proof can get below it.
        adaptive: whether it holds when later inputs depend on earlier outputs, as they do in training.
        source: where the claim or the bound comes from.
    """

    epsilon: float
    delta: float
    unit: Unit
    units_per_round: int
    adjacency: str
    trust_model: TrustModel
    status: Status
    assumptions: tuple[str, ...] = ()
    scope: Scope = "round"
    lower: float | None = None
    adaptive: bool = True
    source: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON, which knows no infinity: an infinite epsilon becomes the string ``"infinity"``."""
        fields = asdict(self)
        return {**fields, "epsilon": json_number(self.epsilon), "lower": json_number(self.lower), "assumptions": list(self.assumptions)}


def json_number(value: float | None) -> float | str | None:
    """Return ``value`` as JSON can hold it."""
    if value is not None and isnan(value):
        raise ValueError("a privacy figure is not a number")
    return value if value is None or isfinite(value) else "infinity"
