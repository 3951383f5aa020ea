"""Bearer tokens of clients and aggregators: 256 random bits each. The store keeps only a hash. ``app`` decides what each role may do.

A client's token is bound to the key that must sign the client's shares of sums, so that it cannot add shares in another client's name.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from sqlalchemy import Connection, Engine, Row, delete, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError

from ldpfl.errors import ConfigError
from ldpfl.relay.database import store_errors
from ldpfl.relay.errors import StoreUnavailable, Unauthenticated
from ldpfl.relay.protocol import parse_owner_name
from ldpfl.relay.schema import READ_ONLY, is_sqlite, tokens
from ldpfl.relay.telemetry import log_event, log_fault

_TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")


class Role(StrEnum):
    """What the owner of a token may do."""

    CLIENT = "client"
    AGGREGATOR = "aggregator"


@dataclass(frozen=True)
class Owner:
    """Who a token belongs to.

    Attributes:
        signing_key: public half of the key by which a client signs its shares of sums; None if it may only send records to be mixed.
        older: whether a newer token of the same name works beside this one. Both tokens belong to one client, which uploads once a round.
    """

    name: str
    role: Role
    signing_key: Ed25519PublicKey | None = None
    older: bool = False


class Tokens:
    """The tokens in a store."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def add(self, name: str, role: Role, signing_key: Ed25519PublicKey | None = None) -> str:
        """Create a token for ``name`` and return it. It cannot be read again later.

        Args:
            signing_key: public half of the client's key for sums; without one the token is for mixed records alone.

        Raises:
            ConfigError: the name is not allowed or has a token; or the key is another client's, or an aggregator's.
            StoreUnavailable, StoreFull: the store cannot be changed.
        """
        token = secrets.token_urlsafe(32)
        with store_errors(), self._engine.begin() as connection:
            if not _insert_token(connection, token, Owner(parse_owner_name(name), role, signing_key)):
                raise ConfigError(f"{name} has a token already: give it a second one (ldpfl relay token renew {name}), or revoke that one")
        return token

    def renew(self, name: str, signing_key: Ed25519PublicKey | None = None) -> str:
        """Create a second token for ``name`` and return it. The first works until it is revoked, so that no request fails.

        Args:
            signing_key: for the second token, as for :meth:`add`; by default the first token's key.

        Raises:
            ConfigError: there is no token, or there are two already; or the key is another client's, or an aggregator's.
            StoreUnavailable, StoreFull: the store cannot be changed.
        """
        token = secrets.token_urlsafe(32)
        is_named = tokens.c.name == name
        with store_errors(), self._engine.begin() as connection:
            rows = connection.execute(select(tokens).where(is_named).order_by(tokens.c.older)).all()
            if not rows:
                raise _no_token_error(name)
            owner, has_two = _owner_from_row(rows[0]), len(rows) > 1  # rows[0] is the newer or only token
            if not has_two:
                connection.execute(update(tokens).where(is_named, tokens.c.older.is_(False)).values(older=True))
            # An error rolls the change above back. The insertion fails if another process has just added a token for this name.
            if has_two or not _insert_token(connection, token, Owner(name, owner.role, signing_key or owner.signing_key)):
                raise ConfigError(f"{name} has two tokens already: revoke the older one first (ldpfl relay token revoke {name} --older)")
        return token

    def all(self) -> list[Owner]:
        """Return the owner of each token, sorted by name. If a name has two tokens, the older one comes second.

        Raises:
            StoreUnavailable: the store does not answer.
        """
        query = select(tokens).order_by(tokens.c.name, tokens.c.older)
        with store_errors(), self._engine.connect().execution_options(**READ_ONLY) as connection:
            return [_owner_from_row(row) for row in connection.execute(query)]

    def revoke(self, name: str, *, older: bool = False) -> None:
        """Revoke all tokens of ``name``, or only the ``older`` of two. The next request with a revoked token is rejected.

        PostgreSQL keeps the deleted row readable in its files. So the table is rewritten, or, if that fails, after the next round.

        Raises:
            ConfigError: ``name`` has no such token.
            StoreUnavailable, StoreFull: the store cannot be changed.
        """
        conditions = [tokens.c.name == name]
        if older:
            conditions.append(tokens.c.older.is_(True))
        with store_errors(), self._engine.begin() as connection:
            if connection.execute(delete(tokens).where(*conditions)).rowcount == 0:
                raise ConfigError(f"{name} has no older token: nothing was revoked") if older else _no_token_error(name)
        if not is_sqlite(self._engine):
            self._rewrite_table()

    def _rewrite_table(self) -> None:
        """Rewrite PostgreSQL's table of tokens without deleted rows. An error is only logged, because the token is revoked already."""
        from ldpfl.relay.postgres_connections import vacuum

        try:
            if not vacuum(self._engine, (), rewritten=(tokens,)):
                log_event("scrub_incomplete")
        except (SQLAlchemyError, StoreUnavailable) as error:
            log_fault("scrub_failed", error)

    def owner(self, token: str) -> Owner:
        """Return the owner of ``token``.

        Raises:
            Unauthenticated: the token is not valid.
            StoreUnavailable: the store does not answer.
        """
        if is_token(token):
            with store_errors(), self._engine.connect().execution_options(**READ_ONLY) as connection:
                row = connection.execute(select(tokens).where(tokens.c.hash == token_hash(token))).first()
            if row is not None:
                return _owner_from_row(row)
        raise unknown_token_refusal()


def _insert_token(connection: Connection, token: str, owner: Owner) -> bool:
    """Store a token unless ``owner`` has a newer or only token already; return whether it was stored.

    Raise a :class:`ConfigError` if the signing key is another client's, or an aggregator's.
    No statement may violate a constraint, because PostgreSQL would log the client's name with the error. Two clients may not share a
    signing key: in a sum with both, the aggregator would reject one as a forgery.
    """
    key = owner.signing_key
    if key is not None:
        if owner.role is not Role.CLIENT:
            raise ConfigError("an aggregator uploads nothing to sums, so its token has no signing key: leave the key out")
        other_names = select(tokens.c.name).where(tokens.c.signing_key == key.public_bytes_raw(), tokens.c.name != owner.name)
        other = connection.scalar(other_names.limit(1))
        if other is not None:
            raise ConfigError(f"this signing key is that of {other}: make a separate key for each client (ldpfl deploy node-key)")
    values = {"hash": token_hash(token), "name": owner.name, "role": owner.role.value, "older": False}
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    statement = insert(tokens).values(**values, signing_key=None if key is None else key.public_bytes_raw())
    stored = connection.execute(statement.on_conflict_do_nothing(index_elements=["name", "older"]).returning(tokens.c.older))
    return stored.first() is not None


def _owner_from_row(row: Row[Any]) -> Owner:
    """Return the owner that a row of the table of tokens describes."""
    key = row.signing_key
    return Owner(row.name, Role(row.role), None if key is None else Ed25519PublicKey.from_public_bytes(key), row.older)


def _no_token_error(name: str) -> ConfigError:
    """Return the error for a name without a token."""
    return ConfigError(f"{name} has no token: to see who has one, run ldpfl relay token list")


def is_token(text: str) -> bool:
    """Whether ``text`` has the form of a token."""
    return _TOKEN.fullmatch(text) is not None


def unknown_token_refusal() -> Unauthenticated:
    """Return the refusal of a token that is not valid."""
    return Unauthenticated("the token is not known to this relay: ask its operator for a new one", {"WWW-Authenticate": "Bearer"})


def token_hash(token: str) -> bytes:
    """Return the SHA-256 of a token, which the store keeps in its place.

    Slow, salted hashes are for passwords, which can be guessed. A token is one of 2**256 equally likely ones, so it cannot be guessed
    however fast the hash is, and equal tokens do not occur. So SHA-256 is enough, and a stolen store gives no access.

    No comparison needs constant time. The time of a look-up can reveal at most something about the stored hashes, and nobody can make a
    token with a given hash.
    """
    return hashlib.sha256(token.encode("ascii")).digest()
