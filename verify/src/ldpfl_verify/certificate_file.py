"""The form of a certificate: the privacy guarantees of a run, the rounds that they were computed from, and who signed them.

A certificate holds no figure of the data. It says of the run what the run's ledger says, and the SHA-256 of the ledger's bytes.
Every class checks its fields when it is made, so that a certificate in memory is always one that a file may hold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ldpfl_verify.field_checks import (
    check_fields,
    count,
    either,
    flag,
    from_tree,
    hexadecimal,
    list_of,
    number,
    object_of,
    one_of,
    optional,
    text,
    texts_by_name,
    to_tree,
)

INFINITY = "infinity"
"""Epsilon of a guarantee that promises nothing. JSON has no number for it."""

OURS, UNKNOWN = "ldpfl", "unknown"
"""Author of a mechanism: the ldpfl project, or nobody that is known. Any other author is a Python class, ``module:Class``."""

USERS_CODE = "code that is not ldpfl's"
"""Author of a report that the project's mechanism protects, while other code computes what each record, person or client adds."""

MAX_KINDS_OF_ROUNDS = 10_000
MAX_GUARANTEES = 8

Kind = Literal["binary", "pure", "gaussian", "unprotected"]
Unit = Literal["weight", "coordinate", "group", "layer", "vector", "record", "person", "client"]
Sampling = Literal["everyone", "visible", "secret", "once"]
Channel = Literal["ideal-shuffler", "secure-sum", "random-delay", "direct"]
Protected = Literal["client", "person", "record"]
Adjacency = Literal["replace one client's data", "replace all records of one person at one client", "replace one record of one client"]
Trusted = Literal["local", "shuffled", "summed"]

_share = number(lambda value: 0 < value <= 1, "above 0 and at most 1")


@dataclass(frozen=True)
class ClientRelease:
    """The report of one client in one round.

    Attributes:
        kind: ``binary`` (bits by randomised response), ``pure`` (reports of any epsilon-LDP mechanism), ``gaussian`` (one vector with
            Gaussian noise) or ``unprotected`` (something left the client as it was).
        mechanism: name of the mechanism.
        parameter: epsilon of one unit; for ``gaussian`` mu, the sensitivity over the noise's standard deviation; None if unprotected.
        units: number of units in the report.
        unit: what one unit stands for.
        sampled: number of coordinates among which the client drew the one of a bit in secret; 1 if the coordinate is fixed.
        rate: probability with which each record, or each person, took part in the report.
        blanket: share g of a ``pure`` report that follows one law U whatever the input: a report is between g and g e^epsilon times as
            likely as under U. None if no such share is stated.
        alike: whether all clients of the round clipped their vectors to one ball, of radius ``parameter`` / 2 standard deviations, and
            added noise of the same law.
        integers: whether a ``gaussian`` vector consists of integers, so that a sum over clients has the noise of all of them. Vectors about
            records or persons always do.
        author: whose code the report rests on. If it is not :data:`OURS`, everything said here is the author's claim.
    """

    kind: Kind
    mechanism: str
    parameter: float | None
    units: int
    unit: Unit
    sampled: int = 1
    rate: float = 1.0
    blanket: float | None = None
    alike: bool = False
    integers: bool = False
    author: str = UNKNOWN

    def __post_init__(self) -> None:
        check_fields(self, _RELEASE)
        if (self.parameter is None) != (self.kind == "unprotected"):
            raise ValueError(f"a release of kind {self.kind!r} {'has no' if self.kind == 'unprotected' else 'needs a'} parameter")

    @property
    def left_out(self) -> set[str]:
        """Names of the fields that are not written to a file, because they have the value that stands for "not stated"."""
        return {name for name, value in _NOT_STATED.items() if getattr(self, name) == value}


_NOT_STATED = {"blanket": None, "alike": False, "integers": False, "author": UNKNOWN}
_RELEASE = {
    "kind": one_of(*get_args(Kind)),
    "mechanism": text,
    "parameter": optional(number(lambda value: 1e-15 <= value <= 1e9, "from 1e-15 to 1e9")),
    "units": count,
    "unit": one_of(*get_args(Unit)),
    "sampled": count,
    "rate": _share,
    "blanket": optional(number(lambda value: 0 < value < 1, "between 0 and 1")),
    "alike": flag,
    "integers": flag,
    "author": text,
}


@dataclass(frozen=True)
class ChargedRounds:
    """A number of equal rounds that the most frequent client is charged for.

    Attributes:
        release: the client's report in each of these rounds.
        cohort: number of clients whose reports were mixed or added up in a round.
        population: number of clients that could have taken part.
        rounds: number of such rounds.
        sampling: how the cohort came about. ``everyone``: all clients. ``visible``: some clients, and others know which. ``secret``: each
            client decided in secret (random check-in). ``once``: each client in one round of the whole run, in a secret random order.
        rate: probability with which a client takes part, if it decides in secret.
        channel: how reports travelled.
        linked: messages per report: number of units that stay together in one message.
    """

    release: ClientRelease
    cohort: int
    population: int
    rounds: int
    sampling: Sampling
    rate: float
    channel: Channel
    linked: int

    def __post_init__(self) -> None:
        check_fields(self, _CHARGED)


_CHARGED = {
    "release": object_of(ClientRelease),
    "cohort": count,
    "population": count,
    "rounds": count,
    "sampling": one_of(*get_args(Sampling)),
    "rate": _share,
    "channel": one_of(*get_args(Channel)),
    "linked": count,
}


@dataclass(frozen=True)
class StatedGuarantee:
    """A guarantee over everything that one client sends in the run.

    Attributes:
        protects: what is protected as a whole.
        adjacency: how two data sets differ that an observer cannot distinguish.
        trusted: who is trusted: nobody (``local``), a shuffler (``shuffled``), or those who add reports up (``summed``).
        epsilon: upper bound, or :data:`INFINITY`.
        delta: failure probability; 0 if the guarantee is pure.
        status: ``proved`` by theorems, or ``author's claim`` about a mechanism's code.
        computed: name of the accountant that computed the figure, and what it does.
        assumptions: facts on which the guarantee relies.
    """

    protects: Protected
    adjacency: Adjacency
    trusted: Trusted
    epsilon: float | Literal["infinity"]
    delta: float
    computed: str
    assumptions: tuple[str, ...]
    status: Literal["proved", "author's claim"] = "author's claim"

    def __post_init__(self) -> None:
        check_fields(self, _GUARANTEE)


_GUARANTEE = {
    "protects": one_of(*get_args(Protected)),
    "adjacency": one_of(*get_args(Adjacency)),
    "trusted": one_of(*get_args(Trusted)),
    "epsilon": either(one_of(INFINITY), number(lambda value: value >= 0, "of 0 or more")),
    "delta": number(lambda value: 0 <= value < 1, "of 0 or more, below 1"),
    "computed": text,
    "assumptions": list_of(text),
    "status": one_of("proved", "author's claim"),
}


@dataclass(frozen=True)
class Statement:
    """The part of a certificate that is signed.

    Attributes:
        run: name of the run.
        ledger: SHA-256 of the bytes of the run's ledger.
        charged: the rounds that the client is charged for that took part most often.
        guarantees: the privacy cost of these rounds.
        software: versions of the software and of the mechanisms, by name.
        caveats: reservations about the figures that the run itself states.
    """

    run: str
    ledger: str
    charged: tuple[ChargedRounds, ...]
    guarantees: tuple[StatedGuarantee, ...]
    software: Mapping[str, str]
    caveats: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, _STATEMENT)

    def signed_bytes(self) -> bytes:
        """Return the bytes that a signature is over: JSON with sorted keys and no blanks."""
        return json.dumps(to_tree(self), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


_STATEMENT = {
    "run": text,
    "ledger": hexadecimal(64),
    "charged": list_of(object_of(ChargedRounds), 1, MAX_KINDS_OF_ROUNDS),
    "guarantees": list_of(object_of(StatedGuarantee), 1, MAX_GUARANTEES),
    "software": texts_by_name,
    "caveats": list_of(text),
}


@dataclass(frozen=True)
class Signature:
    """An Ed25519 signature over :meth:`Statement.signed_bytes`, and the public key that it fits."""

    public_key: str
    value: str

    def __post_init__(self) -> None:
        check_fields(self, {"public_key": hexadecimal(64), "value": hexadecimal(128)})


@dataclass(frozen=True)
class Certificate:
    """A statement, and its signature if somebody signed it."""

    statement: Statement
    signature: Signature | None = None
    format: str = "ldpfl-certificate"
    version: int = 1

    def __post_init__(self) -> None:
        check_fields(self, _CERTIFICATE)

    @classmethod
    def from_dict(cls, tree: object) -> Certificate:
        """Return the certificate that the JSON object ``tree`` holds. Its signature is not checked here.

        Raises:
            ValueError: ``tree`` is no certificate. The message says where.
        """
        return from_tree(cls, tree)

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate as an object of JSON."""
        return {"format": self.format, "version": self.version, **to_tree(self)}

    def to_json(self) -> str:
        """Return the text of the certificate's file."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"


_CERTIFICATE = {
    "statement": object_of(Statement),
    "signature": optional(object_of(Signature)),
    "format": one_of("ldpfl-certificate"),
    "version": one_of(1),
}


def epsilon_of(guarantee: StatedGuarantee) -> float:
    """Return the stated epsilon as a number, ``inf`` for :data:`INFINITY`."""
    return float("inf") if isinstance(guarantee.epsilon, str) else guarantee.epsilon
