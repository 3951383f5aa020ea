"""Refusals of the relay, each with its HTTP status."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from ldpfl.errors import ConfigError, ProtocolError


class Refusal(ProtocolError):
    """The relay refuses a request. Nothing was changed."""

    status: ClassVar[int] = 400

    def __init_subclass__(cls, status: int) -> None:
        cls.status = status

    def __init__(self, message: str, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(message)
        self.headers = headers


class UnfitStore(ConfigError):
    """The relay cannot safely use the store that it was given."""


class WrongLength(Refusal, status=400):
    """An upload's length differs from the round's terms."""


class Unauthenticated(Refusal, status=401):
    """The request has no token, or a token that the relay does not know."""


class Forbidden(Refusal, status=403):
    """The token's owner is not allowed to make this request."""


class Unknown(Refusal, status=404):
    """The request names a round, upload or part that does not exist."""


class TooSlow(Refusal, status=408):
    """A request's body did not come in time."""


class Conflict(Refusal, status=409):
    """The request contradicts what the relay already holds."""


class RoundOver(Refusal, status=410):
    """The round takes no uploads any more, or its records were acknowledged and deleted."""


class LengthRequired(Refusal, status=411):
    """The request has a body but no Content-Length."""


class TooLong(Refusal, status=413):
    """The request's body has more bytes than the relay accepts."""


class TooEarly(Refusal, status=425):
    """The round is not over yet."""


class TooMany(Refusal, status=429):
    """A token's owner makes more requests, or more at once, than the limits allow."""


class StoreUnavailable(Refusal, status=503):
    """The store does not answer; the same request may work later."""


class StoreFull(Refusal, status=507):
    """The disk below the store is full; nothing was changed."""
