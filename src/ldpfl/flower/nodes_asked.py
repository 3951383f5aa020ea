"""Which nodes were asked in which rounds: what the ledger needs to know of clients, and no checkpoint holds."""

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
"""Size of the largest file: a million nodes take 30 MB."""

_ID_DIGITS = 20
"""Digits of a node's number in Flower, which has 64 bits."""

_SHOWN = 200
"""Characters of a reason in an error: it may repeat what the file holds."""

_Rounds = Annotated[int, Field(ge=0, le=MAX_ROUNDS)]


def _plausible(rounds: object) -> object:
    """Return what is said of nodes, unless one entry is wrong: pydantic would keep an error for each."""
    if isinstance(rounds, dict):
        for node, count in rounds.items():
            is_node = str(node).lstrip("-").isdecimal() and len(str(node)) <= _ID_DIGITS
            if not (is_node and type(count) is int and 0 <= count <= MAX_ROUNDS):
                raise ValueError(f"expected a number of rounds up to {MAX_ROUNDS:,} by the number of each node")
    return rounds


class Participation(BaseModel):
    """Rounds that each node was told to train in, an upper bound on those in which it sent a report.

    A node that was only asked whether it would take part has sent nothing, and does not count.

    Attributes:
        run: names the run, the same after a resume; another one for each run, so that no relay takes one for the other.
        begun: the last round that any node was told to train in.
        asked: nodes told so in that round.
        rounds: by node, how many rounds; every node that was ever seen is here.
        terms: how reports of that round come in: they are charged, and can be read, on these terms only.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str = Field(default_factory=lambda: secrets.token_hex(16))
    begun: _Rounds = 0
    asked: Annotated[int, Field(ge=0, le=10**9)] = 0
    rounds: Annotated[dict[int, int], BeforeValidator(_plausible)] = {}
    terms: Annotated[dict[str, str | int], FEW] = {}

    def ask(self, number: int, nodes: Iterable[int], seen: Iterable[int], terms: Mapping[str, str | int]) -> Participation:
        """Return what follows when ``nodes``, out of those ``seen``, are told to train in round ``number`` on these ``terms``.

        Flower gives a node another number when it is started again without a key. So a new number may be a client that was asked
        before, and counts as the one that was asked most often.
        """
        rounds = dict.fromkeys(seen, max(self.rounds.values(), default=0)) | self.rounds
        chosen = list(nodes)
        for node in chosen:
            rounds[node] += 1
        return self.model_copy(update={"begun": number, "asked": len(chosen), "rounds": rounds, "terms": dict(terms)})

    def renamed(self) -> Participation:
        """Return the same for a run of another name: what was begun under the old one, and taken back, cannot be taken for it."""
        return self.model_copy(update={"run": secrets.token_hex(16)})

    def check_terms(self, now: Mapping[str, str | int]) -> None:
        """Return if the round that was begun can be closed on the terms ``now``.

        Raises:
            ConfigError: it was begun on others.
        """
        others = sorted(name for name in now.keys() | self.terms.keys() if now.get(name) != self.terms.get(name))
        if others:
            raise ConfigError(
                f"round {self.begun} was begun on other terms ({', '.join(others)}): its reports can be read and charged on "
                "those only; start the run with them again (a key that was replaced is named by LDPFL_AGGREGATOR_KEY_BEFORE)"
            )

    def counts(self) -> NDArray[np.int64]:
        """Return the rounds of all nodes, in no order that means anything."""
        return np.array(list(self.rounds.values()), dtype=np.int64)

    def save(self, path: Path) -> None:
        """Write to ``path`` so that a crash leaves this or what stood there before."""
        write_text(path, self.model_dump_json() + "\n")

    @classmethod
    def load(cls, path: Path) -> Participation:
        """Read what :meth:`save` wrote; nothing has begun where there is no file.

        Raises:
            DataError: the file is damaged.
        """
        try:
            return cls.model_validate(from_json(read_text(path, MAX_BYTES))) if path.exists() else cls()
        except ValidationError as error:
            first = error.errors(include_input=False)[0]
            raise DataError(f"{path} is damaged: {'.'.join(map(str, first['loc']))[:_SHOWN]}: {first['msg'][:_SHOWN]}") from None
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is damaged: {getattr(error, 'strerror', None) or str(error)[:_SHOWN]}") from None
