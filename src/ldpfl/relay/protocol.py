"""What the relay and its callers agree on: a round's terms and state, names in paths, headers, and sizes."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, TypeAdapter, model_validator

from ldpfl.errors import ConfigError
from ldpfl.relay.errors import Unknown
from ldpfl.transport.sums.envelopes import ENVELOPE_BYTES
from ldpfl.transport.sums.masks import Bits

OFFSET = "Upload-Offset"
"""Header: how many bytes of an upload the relay has; in a request that sends bytes, the position of the first one."""

COMPLETE = "Upload-Complete"
"""Header: ``?1`` if the relay has all bytes of an upload, else ``?0``."""

LENGTH = "Upload-Length"
"""Header: how many bytes an upload will have."""

PARTS = "Relay-Parts"
"""Header: how many parts the mixed records have."""

BLOCK_BYTES = 256 * 2**10
"""Uploads are stored in blocks of this length; no more of a request's body is in memory."""

TERMS_BYTES = 4096  # maximum length of a round's terms as JSON

MIN_RECORD_BYTES = 16
"""Sealed records have 49 bytes or more. Mixing takes memory for each record, so shorter ones would cost many times their length."""

MAX_RECORD_BYTES = 16 * 2**20
MAX_UPLOAD_BYTES = 256 * 2**20
MAX_ROUND_BYTES = 16 * 2**30
MAX_UPLOADS = 1_000_000
MAX_OPEN_S = 7 * 24 * 3600.0

SUM_PART_BYTES = 4 * 2**20
"""A sum is stored and handed out in parts of this length; the last one may be shorter. A multiple of the length of each number."""

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ROUND = re.compile(r"[1-9][0-9]{0,8}")  # each round has only one name, so 01 is invalid
_UPLOAD = re.compile(r"[A-Za-z0-9_-]{16,64}")
_SHARE = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")

State = Literal["open", "waiting", "released", "gone"]


class _Terms(BaseModel):
    """Fields that the terms of both kinds of rounds share.

    The round is held for ``closes_in_s`` seconds and until ``min_clients`` clients have uploaded, whichever is later.
    ``agreement`` is the SHA-256, in hex, of everything that the aggregator asks of clients. The relay cannot interpret it, and tells it to
    every client. A client whose own request has another SHA-256 notices that it was asked for something else, by which its report could
    be recognised.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    min_clients: Annotated[int, Field(ge=1, le=MAX_UPLOADS)]
    closes_in_s: Annotated[float, Field(ge=0, le=MAX_OPEN_S, allow_inf_nan=False)]
    max_uploads: Annotated[int, Field(ge=1, le=MAX_UPLOADS)]
    agreement: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

    @model_validator(mode="after")
    def _check_counts(self) -> Self:
        """Check that the round can get enough uploads to be released."""
        if self.max_uploads < self.min_clients:
            raise ValueError(
                f"max_uploads is less than min_clients ({self.max_uploads} < {self.min_clients}): the round could never be released"
            )
        return self


class Terms(_Terms):
    """What a round of mixed records takes: an upload is exactly ``records_per_upload`` records of ``record_bytes`` bytes."""

    record_bytes: Annotated[int, Field(ge=MIN_RECORD_BYTES, le=MAX_RECORD_BYTES)]
    records_per_upload: Annotated[int, Field(ge=1, le=MAX_UPLOAD_BYTES)]

    @property
    def upload_bytes(self) -> int:
        """Length of one upload."""
        return self.record_bytes * self.records_per_upload

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        """Check that neither an upload nor all uploads of the round together are too long."""
        if self.upload_bytes > MAX_UPLOAD_BYTES:
            raise ValueError(f"record_bytes * records_per_upload is {self.upload_bytes:,}, expected at most {MAX_UPLOAD_BYTES:,}")
        round_bytes = self.upload_bytes * self.max_uploads
        if round_bytes > MAX_ROUND_BYTES:
            raise ValueError(f"record_bytes * records_per_upload * max_uploads is {round_bytes:,}, expected at most {MAX_ROUND_BYTES:,}")
        return self


class SumTerms(_Terms):
    """What a sum round takes: ``dimension`` masked numbers of ``bits`` bits from each client, and the envelope of the mask.

    The relay hands out the sum of the masked numbers and all envelopes, never the numbers of one client.
    """

    dimension: Annotated[int, Field(ge=1, le=MAX_UPLOAD_BYTES)]
    bits: Bits

    @property
    def sum_bytes(self) -> int:
        """Length of the masked numbers of one client, and of their sum."""
        return self.dimension * self.bits // 8

    @property
    def upload_bytes(self) -> int:
        """Length of one upload: the masked numbers, then the envelope."""
        return self.sum_bytes + ENVELOPE_BYTES

    def sum_parts(self) -> list[slice]:
        """Return for each part which bytes of the sum it holds."""
        return [slice(start, min(start + SUM_PART_BYTES, self.sum_bytes)) for start in range(0, self.sum_bytes, SUM_PART_BYTES)]

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        """Check that a client's vector is not too long. Of all vectors only the sum is stored, so their number need not be limited here."""
        if self.sum_bytes > MAX_UPLOAD_BYTES:
            raise ValueError(f"dimension * bits / 8 is {self.sum_bytes:,}, expected at most {MAX_UPLOAD_BYTES:,}")
        return self


def _kind_of_terms(terms: Any) -> str:
    """Return the tag of the kind of round that ``terms``, parsed or not, are for."""
    return "sum" if isinstance(terms, SumTerms) or (isinstance(terms, dict) and "dimension" in terms) else "records"


AnyTerms = Annotated[Annotated[Terms, Tag("records")] | Annotated[SumTerms, Tag("sum")], Discriminator(_kind_of_terms)]
"""Terms of either kind of round. Only those of a sum have a dimension."""

ANY_TERMS: TypeAdapter[Terms | SumTerms] = TypeAdapter(AnyTerms)


class RoundStatus(BaseModel):
    """State of a round: ``open`` until its deadline, ``waiting`` for more clients after it, ``released``, then ``gone``.

    ``seconds_left`` counts down to the deadline by the relay's clock. ``uploads`` is the number of complete uploads.
    Only the aggregator that opened the round is told.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run: str
    round: int
    state: State
    seconds_left: Annotated[float, Field(ge=0, le=MAX_OPEN_S, allow_inf_nan=False)]
    terms: AnyTerms
    uploads: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _check_uploads(self) -> Self:
        if self.uploads is not None and self.uploads > self.terms.max_uploads:
            raise ValueError(f"the round has {self.uploads} uploads, but takes at most {self.terms.max_uploads} (max_uploads)")
        return self


class TokenStatus(BaseModel):
    """Name of the key that must sign the shares that a token's client adds to sums; None if the client may add none."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    signer: Annotated[str, Field(pattern="^[0-9a-f]{16}$")] | None


def parse_run(text: str) -> str:
    """Return ``text`` if it can name a run, else raise :class:`Unknown`."""
    if not _RUN.fullmatch(text):
        raise Unknown(
            "the name of the run is not valid: use up to 64 letters, digits, dots, dashes and underscores, first a letter or digit"
        )
    return text


def parse_round_number(text: str) -> int:
    """Return the round number in ``text``, or raise :class:`Unknown` if it is none."""
    if not _ROUND.fullmatch(text):
        raise Unknown("there is no such round: rounds have whole numbers from 1, of up to 9 digits")
    return int(text)


def parse_upload_id(text: str) -> str:
    """Return ``text`` if it can name an upload, else raise :class:`Unknown`."""
    if not _UPLOAD.fullmatch(text):
        raise Unknown("there is no such upload: the id of an upload has 16 to 64 letters, digits, dashes and underscores")
    return text


def parse_share_id(text: str) -> str:
    """Return ``text`` if it can name an upload of a sum round, else raise :class:`Unknown`."""
    if not _SHARE.fullmatch(text):
        raise Unknown("there is no such share: its id must be the SHA-256 of the upload's envelope, as 64 lower-case hexadecimal digits")
    return text


def parse_owner_name(text: str) -> str:
    """Return ``text`` if it can be the name of a token's owner, else raise a ConfigError: the operator has chosen the name."""
    if not _NAME.fullmatch(text):
        raise ConfigError(
            f"{text!r} cannot name a client or aggregator: expected at most 64 characters, each a letter, a digit or one of ._@-, and a "
            "letter or digit first"
        )
    return text
