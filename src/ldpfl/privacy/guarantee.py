"""Privacy guarantees. A :class:`Guarantee` is one epsilon with its meaning; a :class:`Statement` holds all guarantees of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import ceil, exp, isfinite, isnan
from typing import TYPE_CHECKING, Any, Final, Literal

from ldpfl.util.displays import Shown

if TYPE_CHECKING:
    import pandas

REPLACE_ONE = "replace one client's data"
"""Adjacency for clients: all data that one client holds, in all rounds, may be replaced by any other data."""

REPLACE_RECORD = "replace one record of one client"
"""Adjacency for records: one record may be replaced by any other. The number of a client's records is public."""

REPLACE_PERSON = "replace all records of one person at one client"
"""Adjacency for persons: all records of one person at a client may be replaced by the records of another person.

The number of these records may change. The number of a client's persons is public. A public rule on names decides which persons are used
for training.
"""

Unit = Literal["weight", "coordinate", "group", "layer", "vector", "record", "person", "client"]
Protected = Literal["record", "person", "client"]
PROTECTED: tuple[Protected, ...] = ("record", "person", "client")
"""Units that a guarantee over everything a client sends may protect, the weakest first.

Protecting a client protects its records and persons as well. Protecting a person protects a record only at twice the mu: see
:func:`ldpfl.privacy.events.for_one_record`.
"""
Scope = Literal["round", "run"]
TrustModel = Literal["local", "shuffled", "summed", "central"]
Status = Literal["proved", "author's claim", "claimed", "estimate"]


def least_protected(units: Iterable[Unit]) -> Protected:
    """Return the weakest protected unit among releases with these ``units``: a record or a person if one occurs, else the client."""
    released = set(units)
    return next(unit for unit in PROTECTED if unit in released or unit == "client")


WHAT_IS_PROTECTED: Mapping[str, str] = {"record": "one record", "person": "one person", "client": "a client"}
"""Name of the protected unit in tables and on pages."""

AUTHORS_CLAIM: Final = "author's claim"
HOLDS: tuple[Status, ...] = ("proved", AUTHORS_CLAIM)
"""Status of guarantees that are computed from releases: proved, or dependent on code that is not this project's."""


@dataclass(frozen=True)
class Guarantee:
    """One (epsilon, delta) with its meaning: for which unit, against whom, and whether it is proved.

    Attributes:
        epsilon: privacy loss of one unit; an upper bound if ``status`` is proved or the author's claim; infinity if nothing is protected.
        delta: failure probability; 0 for a pure guarantee.
        unit: what the epsilon protects. ``"weight"``: one scalar of one report; ``"record"``: one record of a
            client in all that it sends; ``"person"``: all records of one person there; ``"client"``: all that a client sends.
        units_per_round: number of such units that one client releases in one round.
        adjacency: which pairs of inputs the guarantee makes indistinguishable.
        trust_model: ``"local"`` trusts nobody; ``"shuffled"`` trusts a shuffler to show only counts; ``"summed"``
            trusts a sum over clients to hide its terms; ``"central"`` trusts the server.
        status: ``"proved"``; ``"author's claim"``: proved if code that is not this project's keeps what its author claims: a third-party
            mechanism's statements about itself, or that a user's model treats each protected record by itself; ``"claimed"``: claimed by a
            paper and not proved here; or ``"estimate"``, which is no bound.
        assumptions: what has to be true outside the mechanism.
        scope: whether the epsilon is for one round or for the whole run.
        lower: an epsilon that some data set attains; None if unknown. No proof can get below it.
        adaptive: whether the guarantee holds when later inputs depend on earlier outputs, as they do in training.
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
        """Return the fields for JSON, which has no infinity: an infinite epsilon becomes the string ``"infinity"``."""
        fields = asdict(self)
        return {**fields, "epsilon": json_number(self.epsilon), "lower": json_number(self.lower), "assumptions": list(self.assumptions)}


def json_number(value: float | None) -> float | str | None:
    """Return ``value`` for JSON: an infinite number becomes the string ``"infinity"``. Raise a ``ValueError`` for NaN."""
    if value is not None and isnan(value):
        raise ValueError("an epsilon is NaN, expected a number or infinity")
    return value if value is None or isfinite(value) else "infinity"


Worth = Literal["good", "fair", "bad"]
"""Rating of an epsilon over a whole run: it protects, protects a little, or does not protect."""

GOOD, FAIR = 1.0, 10.0
"""Largest epsilon with the rating. At 1 a guess between two data sets is right with probability 0.73; at 10 with 0.99995."""


def worth_of(epsilon: float) -> Worth:
    """Rate the protection that an epsilon over a whole run gives."""
    return "good" if epsilon <= GOOD else "fair" if epsilon <= FAIR else "bad"


IF_TRUSTED: Mapping[str, str] = {
    "local": "trusting nobody",
    "shuffled": "if a shuffler hides who sent what",
    "summed": "if nobody learns more than the sum over all clients",
}
TRUSTED: Mapping[str, str] = {"local": "nobody", "shuffled": "shuffler", "summed": "sum", "central": "server"}
IN_SHORT: Mapping[str, str] = {"local": "trusting nobody", "shuffled": "behind a shuffler", "summed": "of a sum"}
"""The trusted party by trust model: for a sentence (``IF_TRUSTED``), for a table (``TRUSTED``), for a plot mark (``IN_SHORT``)."""

_NO_PROTECTION: Mapping[str, str] = {
    "client": "This is no protection for a client in practice: what it sends in the run may tell any two data sets apart{to_whom}.",
    "record": "This is no protection for a record in practice: what its client sends in the run may tell any two records apart{to_whom}.",
    "person": "This is no protection for a person in practice: what a client sends in the run may tell any two persons apart{to_whom}.",
}
_TO_WHOM: Mapping[str, str] = {
    "local": " to a server that sees who sent what",
    "shuffled": ", even if a shuffler hides who sent what",
    "summed": ", even to a server that sees only the sum over all clients",
}
_UNPROVED = " That is not proved: it rests on code that is not ldpfl's."
_VERDICT = (
    "An observer who sees {seen} of this run, and guesses which of two {held} the client holds, is right with "
    "probability {percent} at most ({trusted}; {source}; chance is 50 %)."
)
_SEEN: Mapping[str, str] = {"local": "all reports of a client", "shuffled": "all mixed reports", "summed": "all sums over clients"}
_HELD: Mapping[str, str] = {"client": "data sets", "record": "records", "person": "persons' records"}


_DIGITS = 1e-9
"""Relative rounding error by which a probability may be too small."""

_OVER_THE_RUN = ("local", "shuffled_upper_adaptive")
"""Keys of :meth:`Statement.figures` for the whole run: trusting nobody, and behind a shuffler or a sum."""


def best_figure(figures: Mapping[str, Any]) -> tuple[float, str] | None:
    """Return the smallest epsilon of :meth:`Statement.figures` for the whole run, and the party that has to be trusted for it.

    Return None if ``figures`` has no epsilon for the run: nobody took part, or a damaged file was read.
    """
    epsilons = {name: figures[name] for name in _OVER_THE_RUN if is_figure(figures.get(name))}
    name = min(epsilons, key=lambda name: float(epsilons[name]), default=None)
    return None if name is None else (float(epsilons[name]), "nobody" if name == "local" else "shuffler or sum")


def is_figure(value: object) -> bool:
    """Whether ``value``, read from JSON, is an epsilon: a number or ``"infinity"``."""
    return value == "infinity" or (isinstance(value, int | float) and not isinstance(value, bool))


@dataclass(frozen=True)
class Statement(Shown):
    """All privacy guarantees of a run.

    Attributes:
        delta: failure probability of all rows except the pure ones.
        rows: the paper's claim first, then proved guarantees, then estimates.
        notes: reasons why a row is missing, and remarks on what the rows mean.
        warnings: reasons why the guarantees mean less than they seem to.
        distance: upper bound of the total variation distance between everything that the adversary of :attr:`best` sees for one input and
            for another; 1 if no bound is known beyond the one that epsilon implies.
    """

    delta: float
    rows: tuple[Guarantee, ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    distance: float = 1.0

    def __repr__(self) -> str:
        """Return the table of the rows, so that a console shows it."""
        return str(self)

    @property
    def protected(self) -> Protected:
        """The unit that the rows over everything a client sends protect: the client, one person, or one record."""
        return least_protected(row.unit for row in self.rows)

    def find(self, trust_model: str, scope: Scope, *, client: bool = True, pure: bool = False, adaptive: bool = True) -> Guarantee | None:
        """Return the row of this kind that is computed from releases; None if there is no such row.

        Args:
            trust_model: as in :class:`Guarantee`, or "hidden" for a shuffler or a sum, whichever the run has.
            scope: ask for the row of one round or of the whole run.
            client: ask for the row that protects :attr:`protected` in everything a client sends, and not for one unit of a report.
            pure: ask for the row at delta 0.
            adaptive: ask for the row that holds if later inputs depend on earlier outputs.
        """
        trusted = ("shuffled", "summed") if trust_model == "hidden" else (trust_model,)
        for row in self.rows:
            kind = (row.scope, row.unit == self.protected, row.delta == 0, row.adaptive)
            if row.status in HOLDS and row.trust_model in trusted and kind == (scope, client, pure, adaptive):
                return row
        return None

    @property
    def status(self) -> Status:
        """Whether the guarantees are proved, or depend on code that is not this project's."""
        return AUTHORS_CLAIM if any(row.status == AUTHORS_CLAIM for row in self.rows) else "proved"

    @property
    def best(self) -> Guarantee | None:
        """The row with the smallest epsilon over the whole run: local, or behind the run's shuffler or sum. None if neither exists."""
        rows = [row for row in (self.find("local", "run"), self.find("hidden", "run")) if row is not None]
        return min(rows, key=lambda row: row.epsilon, default=None)

    @property
    def verdict(self) -> str:
        """How well the run protects its clients, in a sentence for readers who do not know differential privacy; or empty."""
        best = self.best
        if best is None:
            return ""
        if worth_of(best.epsilon) == "bad":
            return _NO_PROTECTION[self.protected].format(to_whom=_TO_WHOM[best.trust_model])
        trusted = IF_TRUSTED[best.trust_model]
        unproved = "" if self.status == "proved" else _UNPROVED
        # Two upper bounds of the probability of a right guess between two data sets: by (epsilon, delta), and by total variation.
        by_epsilon = (exp(best.epsilon) + best.delta) / (1 + exp(best.epsilon))
        by_noise = (1 + self.distance) / 2  # ``distance`` is the total variation
        source = "by epsilon" if by_epsilon <= by_noise else "by the noise of all releases, which epsilon bounds less closely"
        probability = min(1.0, min(by_epsilon, by_noise) * (1 + _DIGITS))
        percent = f"{ceil(100_000 * probability) / 1000:g} %"  # rounded up to three decimals
        seen = _SEEN[best.trust_model]
        return _VERDICT.format(seen=seen, held=_HELD[self.protected], percent=percent, trusted=trusted, source=source) + unproved

    def figures(self) -> dict[str, float | str | None]:
        """Return the epsilons by name, for JSON: None if an epsilon is unknown, "infinity" if nothing is protected."""
        claim = next((row.epsilon for row in self.rows if row.status == "claimed"), None)
        estimate = next((row.epsilon for row in self.rows if row.status == "estimate"), None)
        adaptive, fixed = self.find("hidden", "run"), self.find("hidden", "run", adaptive=False)
        values = {
            "paper_claim": claim,
            "per_report": _epsilon_of(self.find("local", "round", client=False, pure=True)),
            "per_report_shuffled": _epsilon_of(self.find("hidden", "round", client=False)),
            "local_pure_round": _epsilon_of(self.find("local", "round", pure=True)),
            "local_round": _epsilon_of(self.find("local", "round")),
            "local_pure": _epsilon_of(self.find("local", "run", pure=True)),
            "local": _epsilon_of(self.find("local", "run")),
            "shuffled_lower": adaptive.lower if adaptive else None,
            "shuffled_upper": _epsilon_of(fixed or adaptive),
            "shuffled_upper_adaptive": _epsilon_of(adaptive),
            "shuffled_estimate": estimate,
        }
        return {
            "delta": self.delta,
            "protected": self.protected,
            "status": self.status,
            **{name: json_number(value) for name, value in values.items()},
        }

    def to_dataframe(self) -> pandas.DataFrame:
        """Return a table with one line for each guarantee; the columns are the fields of :class:`Guarantee`."""
        import pandas

        return pandas.DataFrame([asdict(row) for row in self.rows], columns=list(Guarantee.__dataclass_fields__))

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {
            **self.figures(),
            "verdict": self.verdict,
            "guarantees": [row.to_dict() for row in self.rows],
            "notes": list(self.notes),
            "warnings": list(self.warnings),
        }


def _epsilon_of(row: Guarantee | None) -> float | None:
    return None if row is None else row.epsilon
