"""Read and check the fields of a received record. Reading stops at the first wrong field, so that many wrong fields cost no more."""

from __future__ import annotations

from typing import Annotated, Self

from flwr.app import ConfigRecord
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, ValidationError

from ldpfl.errors import ProtocolError

MAX_LAYERS = 1 << 14
"""Maximum number of layers in a node's message. The largest published models have some thousand."""

_MAX_SHOWN = 120
"""Maximum number of characters of a name or a reason in an error."""


def _refuse_integer(value: object) -> object:
    """Return ``value`` unless it is an integer, which pydantic would convert to a float even in strict mode."""
    if type(value) is int:
        raise ValueError("expected a float")
    return value


# Without fail_fast pydantic would keep an error for each wrong element, which takes some hundred times the element's bytes.
_EACH_LAYER = Field(max_length=MAX_LAYERS, fail_fast=True)
LayerNames = Annotated[list[str], _EACH_LAYER]
LayerFloats = Annotated[list[Annotated[float, BeforeValidator(_refuse_integer)]], _EACH_LAYER]
LayerSizes = Annotated[list[PositiveInt], _EACH_LAYER, Field(min_length=1)]


class WireFields(BaseModel):
    """Base of models for received records. Each field must have exactly its type, and no other field is allowed."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, alias_generator=lambda name: name.replace("_", "-"))

    @classmethod
    def of(cls, record: ConfigRecord, title: str) -> Self:
        """Return the fields of ``record``. Errors call it by its ``title``, such as "the server's terms".

        Raises:
            ProtocolError: a field is missing, unknown, of another type, or too long.
        """
        max_fields = len(cls.model_fields)
        if len(record) > max_fields:
            raise ProtocolError(f"{title} cannot be read: the record has {len(record):,} fields, expected {max_fields} at most")
        try:
            return cls.model_validate(dict(record))
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"])[:_MAX_SHOWN]
            raise ProtocolError(f"{title} cannot be read: {place}: {first['msg'][:_MAX_SHOWN]}") from None
