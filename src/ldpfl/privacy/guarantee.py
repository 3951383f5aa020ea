"""What goes with every privacy parameter: one line of it, and all lines of a run with what they are worth in a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import ceil, exp, isfinite, isnan
from typing import TYPE_CHECKING, Any, Final, Literal

from ldpfl.util.displays import Shown

if TYPE_CHECKING:
    import pandas

REPLACE_ONE = "replace one client's data"
"""Adjacency used throughout: anything that one client holds, in all rounds, may be replaced by anything else."""

REPLACE_RECORD = "replace one record of one client"
"""Adjacency of what is protected record by record: the number of a client's records is public."""

REPLACE_PERSON = "replace all records of one person at one client"
"""Adjacency of what is protected person by person: the records of another person there who is trained on too take their place.

There may be more or fewer of them. The number of a client's persons is public, and who is trained on follows from names by a public rule.
"""

Unit = Literal["weight", "coordinate", "group", "layer", "vector", "record", "person", "client"]
Protected = Literal["record", "person", "client"]
PROTECTED: tuple[Protected, ...] = ("record", "person", "client")
"""Units that a line over all that a client sends may be about, the least first.

What protects a client protects a record and a person as well. What protects a person protects a record only at twice the mu: see
:func:`ldpfl.privacy.events.for_one_record`.
"""
Scope = Literal["round", "run"]
TrustModel = Literal["local", "shuffled", "summed", "central"]
Status = Literal["proved", "author's claim", "claimed", "estimate"]


def least_protected(units: Iterable[Unit]) -> Protected:
    """Return what is protected where releases of all these ``units`` were made: the least of them; what protects no less, the client."""
    found = set(units)
    return next(unit for unit in PROTECTED if unit in found or unit == "client")


WHAT_IS_PROTECTED: Mapping[str, str] = {"record": "one record", "person": "one person", "client": "a client"}
"""How tables and pages call what a run's lines are about."""

AUTHORS_CLAIM: Final = "author's claim"
HOLDS: tuple[Status, ...] = ("proved", AUTHORS_CLAIM)
"""Status of lines that are computed from what was released: proved, or as sound as what somebody else's mechanism says of itself."""


@dataclass(frozen=True)
class Guarantee:
    """What one (epsilon, delta) means: for which unit, against whom, and whether it is proved.

    Attributes:
        epsilon: privacy loss of one unit, certified from above where ``status`` is proved or the author's claim; infinity where nothing
            is protected.
        delta: failure probability; 0 for a pure guarantee.
        unit: what the epsilon protects. ``"weight"``: one scalar of one report; ``"record"``: one record of a
            client in all that it sends; ``"person"``: all records of one person there; ``"client"``: all that a client sends.
        units_per_round: how many such units one client releases in one round.
        adjacency: which inputs are to be indistinguishable.
        trust_model: ``"local"`` trusts nobody; ``"shuffled"`` trusts a shuffler to show only counts; ``"summed"``
            trusts a sum over clients to hide its terms; ``"central"`` trusts the server.
        status: ``"proved"``; ``"author's claim"``: proved if what a mechanism of somebody else's says of itself is true; ``"claimed"`` by
            a paper, and not so; or an ``"estimate"`` that bounds nothing.
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


Worth = Literal["good", "fair", "bad"]
"""Whether an epsilon over a whole run protects, protects a little, or does not."""

GOOD, FAIR = 1.0, 10.0
"""Up to which a guess is right three times of four at most, and up to which there is something left to guess."""


def worth_of(epsilon: float) -> Worth:
    """Return what an epsilon over a whole run is worth to whom it protects."""
    return "good" if epsilon <= GOOD else "fair" if epsilon <= FAIR else "bad"


IF_TRUSTED: Mapping[str, str] = {
    "local": "trusting nobody",
    "shuffled": "if a shuffler hides who sent what",
    "summed": "if nobody learns more than the sum over all clients",
}
TRUSTED: Mapping[str, str] = {"local": "nobody", "shuffled": "shuffler", "summed": "sum", "central": "server"}
IN_SHORT: Mapping[str, str] = {"local": "trusting nobody", "shuffled": "behind a shuffler", "summed": "of a sum"}
"""Whom one trusts, by trust model: in a sentence, in a table, beside a mark."""

_WORTHLESS_IS: Mapping[str, str] = {
    "client": "This is no protection for a client in practice: what it sends in the run may tell any two data sets apart, {trusted}.",
    "record": "This is no protection for a record in practice: what its client sends in the run may tell any two records apart, {trusted}.",
    "person": "This is no protection for a person in practice: what a client sends in the run may tell any two persons apart, {trusted}.",
}
_RESTS = " That is not proved: it rests on what the author of the mechanism claims."
_WORTH: Mapping[str, str] = {
    "client": (
        "A client is {kept}: who sees all that it ever sends in this run, and guesses which of two data sets it holds, is right "
        "with probability {percent} at most ({trusted}; {source}; chance is 50 %)."
    ),
    "record": (
        "One record of a client is {kept}: who sees all that the client ever sends in this run, and guesses which of two records it "
        "holds, is right with probability {percent} at most ({trusted}; {source}; chance is 50 %)."
    ),
    "person": (
        "A person at a client is {kept}: who sees all that the client ever sends in this run, and guesses which of two persons' records "
        "it holds, is right with probability {percent} at most ({trusted}; {source}; chance is 50 %)."
    ),
}


_DIGITS = 1e-9
"""Part by which rounding may have made a probability too small."""

_OVER_THE_RUN = ("local", "shuffled_upper_adaptive")
"""Of :meth:`Statement.figures`: what holds for all that is sent in a run, trusting nobody, and if a shuffler or a sum hides the reports."""


def best_figure(figures: Mapping[str, Any]) -> tuple[float, str] | None:
    """Return the smallest epsilon of :meth:`Statement.figures` that holds over the whole run, and whom it trusts.

    None where nobody took part, or where there are no such figures: they may come from a damaged file.
    """
    found = {name: figures[name] for name in _OVER_THE_RUN if is_figure(figures.get(name))}
    name = min(found, key=lambda name: float(found[name]), default=None)
    return None if name is None else (float(found[name]), "nobody" if name == "local" else "shuffler or sum")


def is_figure(value: object) -> bool:
    """Whether a file that holds ``value`` holds an epsilon there."""
    return value == "infinity" or (isinstance(value, int | float) and not isinstance(value, bool))


@dataclass(frozen=True)
class Statement(Shown):
    """What holds of a run.

    Attributes:
        delta: for all lines but the pure ones.
        rows: the paper's claim first, then what is proved, then estimates.
        notes: why a line is missing.
        warnings: what makes the figures mean less than it seems.
        distance: upper bound of the total variation distance between all that who is not trusted by :attr:`best` sees of one input and of
            another; 1 where nothing smaller is known but what follows from epsilon.
    """

    delta: float
    rows: tuple[Guarantee, ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    distance: float = 1.0

    def __repr__(self) -> str:
        """Return the table of the lines, so that a console shows it."""
        return str(self)

    @property
    def protected(self) -> Protected:
        """What the lines over all that a client sends are about: the client, one person in its data, or one of its records."""
        return least_protected(row.unit for row in self.rows)

    def find(self, trust_model: str, scope: Scope, *, client: bool = True, pure: bool = False, adaptive: bool = True) -> Guarantee | None:
        """Return the row of this kind that is computed from what was released, if there is one.

        ``client`` asks for all that a client sends, or for one record or person in it, and not for one unit of a report. ``trust_model``
        "hidden" is a shuffler or a sum, whichever the run has.
        """
        trusted = ("shuffled", "summed") if trust_model == "hidden" else (trust_model,)
        for row in self.rows:
            kind = (row.scope, row.unit == self.protected, row.delta == 0, row.adaptive)
            if row.status in HOLDS and row.trust_model in trusted and kind == (scope, client, pure, adaptive):
                return row
        return None

    @property
    def status(self) -> Status:
        """Whether what holds is proved, or rests on what authors of other code claim."""
        return AUTHORS_CLAIM if any(row.status == AUTHORS_CLAIM for row in self.rows) else "proved"

    @property
    def best(self) -> Guarantee | None:
        """The smallest epsilon that holds over the whole run, with or without trust in what the run trusts; None if none is known."""
        rows = [row for row in (self.find("local", "run"), self.find("hidden", "run")) if row is not None]
        return min(rows, key=lambda row: row.epsilon, default=None)

    @property
    def verdict(self) -> str:
        """What the run is worth to a client, in a sentence for who has not read the papers."""
        best = self.best
        if best is None:
            return ""
        trusted = IF_TRUSTED[best.trust_model]
        if worth_of(best.epsilon) == "bad":
            return _WORTHLESS_IS[self.protected].format(trusted=trusted)
        rests = "" if self.status == "proved" else _RESTS
        kept = "protected" if worth_of(best.epsilon) == "good" else "protected a little"
        by_epsilon, by_noise = (exp(best.epsilon) + best.delta) / (1 + exp(best.epsilon)), (1 + self.distance) / 2
        source = "by epsilon" if by_epsilon <= by_noise else "by the noise of all releases, which epsilon bounds less closely"
        right = min(1.0, min(by_epsilon, by_noise) * (1 + _DIGITS))
        percent = f"{ceil(100_000 * right) / 1000:g} %"
        return _WORTH[self.protected].format(kept=kept, percent=percent, trusted=trusted, source=source) + rests

    def figures(self) -> dict[str, float | str | None]:
        """Return the numbers by name, for machines; None where there is none, "infinity" where nothing is protected."""
        claim = next((row.epsilon for row in self.rows if row.status == "claimed"), None)
        estimate = next((row.epsilon for row in self.rows if row.status == "estimate"), None)
        adaptive, fixed = self.find("hidden", "run"), self.find("hidden", "run", adaptive=False)
        values = {
            "paper_claim": claim,
            "per_report": _epsilon(self.find("local", "round", client=False, pure=True)),
            "per_report_shuffled": _epsilon(self.find("hidden", "round", client=False)),
            "local_pure_round": _epsilon(self.find("local", "round", pure=True)),
            "local_round": _epsilon(self.find("local", "round")),
            "local_pure": _epsilon(self.find("local", "run", pure=True)),
            "local": _epsilon(self.find("local", "run")),
            "shuffled_lower": adaptive.lower if adaptive else None,
            "shuffled_upper": _epsilon(fixed or adaptive),
            "shuffled_upper_adaptive": _epsilon(adaptive),
            "shuffled_estimate": estimate,
        }
        return {
            "delta": self.delta,
            "protected": self.protected,
            "status": self.status,
            **{name: json_number(value) for name, value in values.items()},
        }

    def to_dataframe(self) -> pandas.DataFrame:
        """Return a row a line, with the fields of :class:`Guarantee`."""
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


def _epsilon(row: Guarantee | None) -> float | None:
    return None if row is None else row.epsilon
