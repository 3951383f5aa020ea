"""Bearer tokens of clients and aggregators: 256 random bits, of which the store keeps only a hash. Which role may do what, ``app`` says."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import Engine, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from ldpfl.errors import ConfigError
from ldpfl.relay.database import store_errors
from ldpfl.relay.errors import Unauthenticated
from ldpfl.relay.protocol import owner_of
from ldpfl.relay.schema import READ_ONLY, tokens

_TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")


class Role(StrEnum):
    """What the owner of a token may do."""

    CLIENT = "client"
    AGGREGATOR = "aggregator"


@dataclass(frozen=True)
class Owner:
    """Who a token belongs to.

    Attributes:
        renewed: whether an older token works beside the newest one. Whoever has two is still one client, which uploads once a round.
    """

    name: str
    role: Role
    renewed: bool = False


class Tokens:
    """The tokens in a store."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def add(self, name: str, role: Role) -> str:
        """Make a token for ``name`` and return it: the only time that it can be read.

        Raises:
            ConfigError: the name is not allowed or has a token.
            StoreUnavailable, StoreFull: the store does not take it.
        """
        token = secrets.token_urlsafe(32)
        with store_errors():
            try:
                with self._engine.begin() as connection:
                    connection.execute(insert(tokens).values(_row(token, owner_of(name), role.value)))
            except IntegrityError:
                raise ConfigError(
                    f"{name} has a token already: give it a second one (ldpfl relay token renew {name}), or revoke that one"
                ) from None
        return token

    def renew(self, name: str) -> str:
        """Make a second token for ``name`` and return it. The one before works until it is revoked, so that nothing breaks off.

        Raises:
            ConfigError: there is no token, or there are two already.
            StoreUnavailable, StoreFull: the store does not take it.
        """
        token = secrets.token_urlsafe(32)
        known = tokens.c.name == name
        with store_errors():
            try:
                with self._engine.begin() as connection:
                    role = connection.scalar(select(tokens.c.role).where(known, tokens.c.older.is_(False)))
                    if role is None:
                        raise _no_token(name)
                    connection.execute(update(tokens).where(known).values(older=True))  # the older of two would collide
                    connection.execute(insert(tokens).values(_row(token, name, role)))
            except IntegrityError:
                raise ConfigError(
                    f"{name} has two tokens already: revoke the older one first (ldpfl relay token revoke {name} --older)"
                ) from None
        return token

    def all(self) -> list[Owner]:
        """Return who has a token, by name.

        Raises:
            StoreUnavailable: the store does not answer.
        """
        known = select(tokens.c.name, tokens.c.role, func.count()).group_by(tokens.c.name, tokens.c.role).order_by(tokens.c.name)
        with store_errors(), self._engine.connect().execution_options(**READ_ONLY) as connection:
            return [Owner(name, Role(role), count > 1) for name, role, count in connection.execute(known)]

    def revoke(self, name: str, *, older: bool = False) -> None:
        """Take all tokens of ``name`` away, from its next request on; or only the ``older`` one of two.

        Raises:
            ConfigError: there is none.
            StoreUnavailable, StoreFull: the store does not take it.
        """
        meant = [tokens.c.name == name, *([tokens.c.older.is_(True)] if older else [])]
        with store_errors(), self._engine.begin() as connection:
            if connection.execute(delete(tokens).where(*meant)).rowcount == 0:
                raise ConfigError(f"{name} has no older token: nothing was revoked") if older else _no_token(name)

    def owner(self, token: str) -> Owner:
        """Return whose token this is.

        Raises:
            Unauthenticated: nobody's.
            StoreUnavailable: the store does not answer.
        """
        if is_token(token):
            with store_errors(), self._engine.connect().execution_options(**READ_ONLY) as connection:
                row = connection.execute(select(tokens.c.name, tokens.c.role).where(tokens.c.hash == hashed(token))).first()
            if row is not None:
                return Owner(row.name, Role(row.role))
        raise unknown_token()


def _row(token: str, name: str, role: str) -> dict[str, object]:
    return {"hash": hashed(token), "name": name, "role": role, "older": False}


def _no_token(name: str) -> ConfigError:
    return ConfigError(f"{name} has no token: ldpfl relay token list says who has one")


def is_token(text: str) -> bool:
    """Whether a token can read so."""
    return _TOKEN.fullmatch(text) is not None


def unknown_token() -> Unauthenticated:
    """Return the refusal of a token that is nobody's."""
    return Unauthenticated("the token is not known to this relay", {"WWW-Authenticate": "Bearer"})


def hashed(token: str) -> bytes:
    """Return what the store keeps of a token.

    Slow, salted hashes protect passwords, which can be guessed. Of 2**256 equally likely tokens none can, however fast
    the hash, and equal tokens do not occur: SHA-256 is enough, and a stolen store opens nothing. The hash is also what
    is looked up: how long the index takes can at most tell about hashes, and nobody can choose a token by its hash, so
    no comparison has to run in constant time.
    """
    return hashlib.sha256(token.encode("ascii")).digest()
