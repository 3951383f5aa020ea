"""What a database or a disk reports, as refusals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from errno import EDQUOT, EFBIG, ENOSPC

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ldpfl.shuffling.relay.errors import StoreFull, StoreUnavailable

_DISK_IS_FULL = frozenset({ENOSPC, EDQUOT, EFBIG})
_SQLITE_FULL = 13
_POSTGRES_DISK_FULL = "53100"


@contextmanager
def store_errors() -> Iterator[None]:
    """Turn what a database or a disk says into a refusal; its own text, which may hold data, goes no further.

    Raises:
        StoreFull: there is no room on the disk.
        StoreUnavailable: any other trouble that the database reports as its own.
    """
    try:
        yield
    except DBAPIError as error:
        if _is_full(error):
            raise StoreFull("the relay's disk is full; nothing was stored") from None
        raise StoreUnavailable("the relay's store does not answer; try again later", {"Retry-After": "1"}) from None
    except PoolTimeout:
        raise busy() from None
    except OSError as error:
        if error.errno not in _DISK_IS_FULL:
            raise
        raise StoreFull("the relay's disk is full; nothing was stored") from None


def busy() -> StoreUnavailable:
    """Return the refusal of what has waited for too long."""
    return StoreUnavailable("the relay is busy; try again later", {"Retry-After": "1"})


def _is_full(error: DBAPIError) -> bool:
    code = getattr(error.orig, "sqlite_errorcode", None)
    return code == _SQLITE_FULL or getattr(error.orig, "sqlstate", None) == _POSTGRES_DISK_FULL
