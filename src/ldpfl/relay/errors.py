"""Refusals of the relay, each with its HTTP status."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from ldpfl.errors import ConfigError, ProtocolError


class Refusal(ProtocolError):
    """The relay refuses a request. Nothing was changed."""

    status: ClassVar[int] = 400

    def __init__(self, message: str, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(message)
        self.headers = headers


class UnfitStore(ConfigError):
    """The relay cannot safely use the store that it was given."""


class WrongLength(Refusal):
    """An upload's length differs from the round's terms."""

    status = 400


class Unauthenticated(Refusal):
    """The request has no token, or a token that the relay does not know."""

    status = 401


class Forbidden(Refusal):
    """The token's owner is not allowed to make this request."""

    status = 403


class Unknown(Refusal):
    """The request names a round, upload or part that does not exist."""

    status = 404


class TooSlow(Refusal):
    """A request's body did not come in time."""

    status = 408


class Conflict(Refusal):
    """The request contradicts what the relay already holds."""

    status = 409


class RoundOver(Refusal):
    """The round takes no uploads any more, or its records were acknowledged and deleted."""

    status = 410


class LengthRequired(Refusal):
    """The request has a body but no Content-Length."""

    status = 411


class TooLong(Refusal):
    """The request's body has more bytes than the relay accepts."""

    status = 413


class TooEarly(Refusal):
    """The round is not over yet."""

    status = 425


class TooMany(Refusal):
    """A token's owner makes more requests, or more at once, than the limits allow."""

    status = 429


class StoreUnavailable(Refusal):
    """The store does not answer; the same request may work later."""

    status = 503


class StoreFull(Refusal):
    """The disk below the store is full; nothing was changed."""

    status = 507
