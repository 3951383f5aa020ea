"""A certificate: what a run guarantees and what that was computed from, in a small file that anybody can check, and that may be signed.

It holds no figure of the data: of the run it says what its ledger says, and how the ledger's bytes are told from others.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from ldpfl.errors import printable
from ldpfl.few import FEW, require_few

FORMAT = "ldpfl-certificate"
INFINITE = "infinity"

Words = Annotated[str, Field(max_length=2000), AfterValidator(printable)]
Count = Annotated[int, Field(ge=1, le=10**12)]
Share = Annotated[FiniteFloat, Field(gt=0, le=1)]
Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

OURS, UNKNOWN = "ldpfl", "unknown"
"""Author of a release: this project, or nobody that is known. Others are a class, ``module:Class``."""

_NOT_STATED = [("blanket", None), ("alike", False), ("integers", False), ("author", UNKNOWN)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    _has_few_fields = model_validator(mode="before")(require_few)


class Released(_Part):
    """What one client sent in a round.

    Attributes:
        kind: ``binary`` (bits by randomised response), ``pure`` (any reports), ``gaussian`` (a vector with noise) or ``unprotected``.
        parameter: epsilon of a unit, or mu of a Gaussian vector; None of what is not protected.
        sampled: of how many coordinates a bit is about one that its client drew in secret.
        rate: probability with which a record, or a person, took part.
        blanket: share of a pure report that follows one law whatever its input; such reports are between that and e^epsilon times that as
            likely as under it. None where none is stated.
        alike: whether all clients of the round bounded their vectors to one ball, of radius ``parameter`` / 2 standard deviations, and
            added noise of the same law.
        integers: whether a Gaussian vector consists of integers, so that a sum over clients has the noise of all; of records and persons it
            always does.
        author: whose code the mechanism is; of other code than :data:`OURS` all that is said here is its author's claim.
    """

    kind: Literal["binary", "pure", "gaussian", "unprotected"]
    mechanism: Words
    parameter: Annotated[FiniteFloat, Field(ge=1e-15, le=1e9)] | None
    units: Count
    unit: Literal["weight", "coordinate", "group", "layer", "vector", "record", "person", "client"]
    sampled: Count = 1
    rate: Share = 1.0
    blanket: Annotated[FiniteFloat, Field(gt=0, lt=1)] | None = None
    alike: bool = False
    integers: bool = False
    author: Words = UNKNOWN

    @model_validator(mode="after")
    def _has_a_parameter_if_protected(self) -> Self:
        if (self.parameter is None) != (self.kind == "unprotected"):
            raise ValueError("what is protected has a parameter, and nothing else")
        return self

    @model_serializer(mode="wrap")
    def _without_what_is_not_stated(self, made: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what is not stated: certificates that were signed before it could be are still what was signed."""
        return {name: value for name, value in made(self).items() if (name, value) not in _NOT_STATED}


class Charged(_Part):
    """Rounds of one client that are alike, and how many; ``cohort`` and the like as in a ledger."""

    release: Released
    cohort: Count
    population: Count
    rounds: Count
    sampling: Literal["everyone", "visible", "secret", "once"]
    rate: Share
    channel: Literal["ideal-shuffler", "secure-sum", "random-delay", "direct"]
    linked: Count


class Line(_Part):
    """A guarantee over all that a client sends in the run."""

    protects: Literal["client", "person", "record"]
    adjacency: Literal["replace one client's data", "replace all records of one person at one client", "replace one record of one client"]
    trusted: Literal["local", "shuffled", "summed"]
    epsilon: Annotated[FiniteFloat, Field(ge=0)] | Literal["infinity"]
    delta: Annotated[FiniteFloat, Field(ge=0, lt=1)]
    status: Literal["proved", "author's claim"] = "author's claim"
    computed: Words
    assumptions: Annotated[list[Words], Field(fail_fast=True)]


class Statement(_Part):
    """What is certified.

    Attributes:
        run: its name.
        ledger: SHA-256 of the bytes of its ledger.
        charged: the rounds that are charged, of the client that took part most often.
        guarantees: what they cost.
        caveats: what the run itself says against them.
        software: versions, by name; of the mechanisms that were used as well.
    """

    run: Words
    ledger: Hex
    charged: Annotated[list[Charged], Field(min_length=1, max_length=10_000)]
    guarantees: Annotated[list[Line], Field(min_length=1, max_length=8)]
    caveats: Annotated[list[Words], Field(fail_fast=True)] = []
    software: Annotated[dict[Words, Words], FEW]


class Signature(_Part):
    """Ed25519 over the statement, as JSON with sorted keys and no blanks."""

    public_key: Hex
    value: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


class Certificate(_Part):
    """A statement, and who signed it, if anybody did."""

    format: Literal["ldpfl-certificate"] = "ldpfl-certificate"
    version: Literal[1] = 1
    statement: Statement
    signature: Signature | None = None

    def to_json(self) -> str:
        """Return the certificate as a file holds it."""
        return json.dumps(self.model_dump(mode="json"), indent=1, allow_nan=False) + "\n"
