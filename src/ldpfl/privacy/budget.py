"""A client's lifetime budget: charged, and on disk, before a report leaves."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ldpfl.privacy.budget_file import Books, add_charge, as_stored, books_in, find_sealed, note_refusal, opened
from ldpfl.privacy.events import Release
from ldpfl.privacy.policy import Declined, Exhausted, Policy, Request


@dataclass(frozen=True)
class Charge:
    """A release that is in the file and may now be sent.

    Attributes:
        number: of the charge, from 1.
        repeated: whether these sealed bytes were charged before, so that nothing was added.
    """

    number: int
    repeated: bool


@dataclass(frozen=True)
class Budget:
    """The lifetime budget in the file ``path``, under ``policy``: both limit what leaves, and the smaller one holds.

    Safe with any number of processes and threads. Killed at any moment, it has counted every report that was sent, and at
    most one more. No clock is relied on. Where the file is missing, damaged, newer, readable by others, or cannot be
    written, nothing may leave.
    """

    path: Path
    policy: Policy

    def require(self, request: Request) -> None:
        """Return if ``request`` could be charged now; to ask before training.

        Raises:
            Declined: as :meth:`charge`.
        """
        with self._noting_refusals():
            self.policy.check(request)
            with opened(self.path) as connection:
                self._require_room(request, books_in(connection), as_stored(request.release))

    def charge(self, request: Request, sealed: bytes | None = None) -> Charge:
        """Record a release durably; only after it returns may the report be sent.

        Every call is a new release, also for the same run and round: a second report, randomised anew, tells more. Only the very
        bytes ``sealed`` to the aggregator's key that were charged before are not counted again. They differ from
        one sealing to the next even if the report inside is the same, so equal bytes are one report.

        Raises:
            Exhausted: the lifetime budget or the number of rounds does not allow it.
            Declined: the policy does not, or the file is not to be relied on.
        """
        if sealed is not None and request.transport != "relay":
            raise request.declined("bytes that were not sealed for a relay cannot be told from those of another report")
        digest = None if sealed is None else hashlib.sha256(sealed).digest()
        release = as_stored(request.release)
        with self._noting_refusals():
            self.policy.check(request)
            with opened(self.path, write=True) as connection:
                books = books_in(connection)
                known = None if digest is None else find_sealed(connection, digest)
                if known is None:
                    self._require_room(request, books, release)
                    return Charge(add_charge(connection, request, release, digest), False)
                number, charged = known
                if charged != (request.run, request.round, release):
                    raise request.declined(f"the same sealed bytes were charged as run {charged[0]}, round {charged[1]}")
                self._require_room(request, books, None)
                return Charge(number, True)

    def refused(self, refusal: Declined) -> Declined:
        """Note a refusal for other reasons than policy and budget, where the file allows it, and return it to be raised."""
        with suppress(Declined), opened(self.path, write=True, patience=1.0) as connection:
            note_refusal(connection, str(refusal))
        return refusal

    def _require_room(self, request: Request, books: Books, new: Release | None) -> None:
        charges = books.charges + (new is not None)
        if charges > self.policy.rounds:
            raise request.declined(f"{charges} reports would exceed the policy's rounds = {self.policy.rounds}", Exhausted)
        if not request.protected:
            return  # the policy allows it by name; from then on no epsilon is finite, and nothing protected fits
        spent_at = {delta: books.spent(delta, new) for delta in {self.policy.delta, books.limit.delta}}
        for limit, source in ((self.policy.lifetime, "the policy's lifetime_epsilon"), (books.limit, f"the budget set in {self.path}")):
            spent = spent_at[limit.delta]
            if not spent <= limit.epsilon:
                why = f"all releases would cost epsilon {spent:.6g} at delta {limit.delta:g}, above {source} = {limit.epsilon:g}"
                raise request.declined(why, Exhausted)

    @contextmanager
    def _noting_refusals(self) -> Iterator[None]:
        """Write why something was refused into the file, if that is possible, for ``ldpfl budget show``."""
        try:
            yield
        except Declined as refusal:
            self.refused(refusal)
            raise
