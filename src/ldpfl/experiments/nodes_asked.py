"""Count the rounds that each node was told to train in. The ledger needs these counts, and a checkpoint does not hold them."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ldpfl.errors import ConfigError, DataError
from ldpfl.util.files import from_json, read_text, write_text
from ldpfl.util.name_limits import FEW
from ldpfl.util.quantities import MAX_ROUNDS

MAX_BYTES = 1 << 25
"""Maximum size of the file. A million nodes take 30 MB."""

_ID_DIGITS = 20
"""Maximum number of digits of a node's id in Flower, which has 64 bits."""

_MAX_SHOWN = 200
"""Maximum number of characters of a reason in an error. The reason may repeat the file's content."""

_REMEDY = "restore its latest copy"

_Rounds = Annotated[int, Field(ge=0, le=MAX_ROUNDS)]


def _check_rounds(rounds: object) -> object:
    """Check ``rounds`` by node and return them unchanged. Raise at the first wrong entry, because pydantic would keep an error for each."""
    if isinstance(rounds, dict):
        for node, count in rounds.items():
            is_node = str(node).lstrip("-").isdecimal() and len(str(node)) <= _ID_DIGITS
            if not (is_node and type(count) is int and 0 <= count <= MAX_ROUNDS):
                raise ValueError(f"expected node ids, each with the number of rounds that the node was asked in, from 0 to {MAX_ROUNDS:,}")
    return rounds


class Participation(BaseModel):
    """Number of rounds that each node was told to train in: an upper bound on the rounds in which it sent a report.

    A node that was only asked whether it would take part has sent nothing, and does not count.

    Attributes:
        run: random name of the run. It stays the same after a resume, and differs between runs, so that a relay cannot confuse two runs.
        begun: number of the last round that any node was told to train in.
        asked: number of nodes told to train in that round.
        rounds: number of rounds by node id. Every node that was ever seen has an entry.
        terms: transport settings of that round, such as the aggregator's key. Its reports can be read and charged on these terms only.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str = Field(default_factory=lambda: secrets.token_hex(16))
    begun: _Rounds = 0
    asked: Annotated[int, Field(ge=0, le=10**9)] = 0
    rounds: Annotated[dict[int, int], BeforeValidator(_check_rounds)] = {}
    terms: Annotated[dict[str, str | int], FEW] = {}

    def after_asking(
        self, number: int, nodes: Iterable[int], seen: Iterable[int], terms: Mapping[str, str | int], charged_before: Iterable[int] = ()
    ) -> Participation:
        """Return the participation after ``nodes`` are told to train in round ``number`` on these ``terms`` of the transport.

        ``seen`` are all connected nodes. ``charged_before`` are nodes that have charged this round already, which happens if this file is
        an older copy. They have reported in the round, so it counts for them, too.

        A connected node without a count gets the highest count of any node, as an upper bound: Flower gives a node a new id when it is
        restarted without a key, so a new id may belong to a client that was asked before.
        """
        highest_count = max(self.rounds.values(), default=0)
        rounds = dict.fromkeys(seen, highest_count) | self.rounds
        asked_nodes = list(nodes)
        for node in (*asked_nodes, *charged_before):
            rounds[node] += 1
        return self.model_copy(update={"begun": number, "asked": len(asked_nodes), "rounds": rounds, "terms": dict(terms)})

    def under_new_name(self) -> Participation:
        """Return the same participation under a new run name, so that no message of a withdrawn round counts for a later round."""
        return self.model_copy(update={"run": secrets.token_hex(16)})

    def check_terms(self, current: Mapping[str, str | int]) -> None:
        """Raise if the round that was begun cannot be aggregated on the transport's ``current`` terms.

        Raises:
            ConfigError: the round was begun on other terms.
        """
        changed = sorted(name for name in current.keys() | self.terms.keys() if current.get(name) != self.terms.get(name))
        if changed:
            raise ConfigError(
                f"round {self.begun} was begun with other settings than now (changed: {', '.join(changed)}), and its reports can be read "
                "only with the earlier settings: start the run with those. If the aggregator's key was replaced, name the file of the "
                "earlier key in LDPFL_AGGREGATOR_KEY_BEFORE"
            )

    def counts(self) -> NDArray[np.int64]:
        """Return the number of rounds of each node, in arbitrary order."""
        return np.array(list(self.rounds.values()), dtype=np.int64)

    def save(self, path: Path) -> None:
        """Write to ``path`` atomically: after a crash the file holds the new or the previous content."""
        write_text(path, self.model_dump_json() + "\n")

    @classmethod
    def load(cls, path: Path) -> Participation:
        """Read what :meth:`save` wrote. If there is no file, return a participation in which no round has begun.

        Raises:
            DataError: the file is damaged.
        """
        try:
            return cls.model_validate(from_json(read_text(path, MAX_BYTES))) if path.exists() else cls()
        except ValidationError as error:
            first = error.errors(include_input=False)[0]
            raise DataError(
                f"{path} is damaged: {'.'.join(map(str, first['loc']))[:_MAX_SHOWN]}: {first['msg'][:_MAX_SHOWN]}; {_REMEDY}"
            ) from None
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is damaged: {getattr(error, 'strerror', None) or str(error)[:_MAX_SHOWN]}; {_REMEDY}") from None
