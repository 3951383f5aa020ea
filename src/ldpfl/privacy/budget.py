"""A client's lifetime budget: charged, and on disk, before a client's data are touched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from sqlite3 import Connection

from ldpfl.errors import ChargedBefore, Declined, Exhausted
from ldpfl.privacy.accountants.adaptive import filter_order, hidden_epsilon, summed_epsilon
from ldpfl.privacy.budget_file import Books, Sent, add_charge, as_stored, books_in, note_refusal, opened, relayed_before, sent_by
from ldpfl.privacy.events import BinaryRelease, GaussianRelease, Release
from ldpfl.privacy.guarantee import PROTECTED
from ldpfl.privacy.policy import OVER_RELAY, Policy, Request
from ldpfl.util.number_format import counted


@dataclass(frozen=True)
class Budget:
    """The lifetime budget in the file ``path``, under ``policy``: both limit what leaves, and the smaller one holds.

    Safe with any number of processes and threads. Killed at any moment, it has counted every report that was sent, and those
    that were being made. No clock is relied on. Where the file is missing, damaged, newer, readable by others, or cannot be
    written, nothing may leave.

    Guarantee: all that ever leaves is epsilon-LDP at delta as the file says, and as the policy says, for all that left under
    it, whatever a server chooses by what it saw: see :mod:`ldpfl.privacy.accountants.adaptive`.
    """

    path: Path
    policy: Policy

    def check_policy(self, request: Request) -> None:
        """Return if the policy allows ``request``, whatever was spent before.

        So a server that never lets a round come to the charge learns nothing of what others have had.

        Raises:
            Declined: the policy does not.
        """
        with self._noting_refusals():
            self.policy.check(request)

    def check(self, request: Request) -> None:
        """Return if :meth:`charge` would allow ``request`` now. Nothing is charged or written, a refusal neither.

        So whoever asks costs nothing, however often. What is allowed now may not be when it is charged.

        Raises:
            Exhausted, Declined: as :meth:`charge`, but for a file that cannot be written.
        """
        self.policy.check(request)
        with opened(self.path) as connection:
            _check_new(request, connection)
            self._check_room(request, books_in(connection), as_stored(request.release))
            self._check_hidden(request, connection)

    def charge(self, request: Request) -> int:
        """Record a release durably, and return its number; only after it returns may data be touched for it.

        Every call is a new release, in a reply also for the same run and round: a second report, randomised anew, tells more. The
        relay takes one report of a round from each client, so over it a round is charged once, and a message that is replayed is declined.

        Raises:
            Exhausted: the lifetime budget or the number of rounds does not allow it.
            Declined: the policy does not, the file is not to be relied on, or the round was charged before over the relay.
        """
        release = as_stored(request.release)
        with self._noting_refusals():
            self.policy.check(request)
            with opened(self.path, write=True) as connection:
                _check_new(request, connection)
                self._check_room(request, books_in(connection), release)
                self._check_hidden(request, connection)
                return add_charge(connection, self._relied_on(request), release)

    def refused(self, refusal: Declined) -> Declined:
        """Note a refusal for other reasons than policy and budget, where the file allows it, and return it to be raised."""
        with suppress(Declined), opened(self.path, write=True, patience=1.0) as connection:
            note_refusal(connection, str(refusal))
        return refusal

    def _check_room(self, request: Request, books: Books, new: Release) -> None:
        charges = books.charges + 1
        if charges > self.policy.rounds:
            why = f"{counted(charges, 'report')} would exceed the policy's rounds = {self.policy.rounds}"
            raise request.declined(why, Exhausted, setting="rounds")
        if not request.protected:
            return  # the policy allows it by name; from then on no epsilon is finite, and nothing protected fits
        policy, file = self.policy.lifetime, books.limit
        bounds = ((policy, policy.order, "the policy's lifetime_epsilon"), (file, books.order, f"the budget set in {self.path}"))
        if PROTECTED.index(books.protected) < PROTECTED.index(self.policy.protects):
            whole = "the whole client" if self.policy.protects == "client" else "all records of a person"
            why = f"{self.path} has releases that protected one {books.protected} at a time: what they revealed of {whole} has no epsilon"
            raise request.declined(why, Exhausted)
        for limit, order, source in bounds:
            spent = books.spent(limit.delta, new, order=order)
            if not spent <= limit.epsilon:
                why = f"all releases would cost epsilon {spent:.6g} at delta {limit.delta:g}, above {source} = {limit.epsilon:g}"
                raise request.declined(why, Exhausted)

    def _relied_on(self, request: Request) -> Request:
        """Return ``request`` among no more clients than the policy counts on: a server may fill a round with its own."""
        return replace(request, cohort=min(request.cohort, self.policy.crowd)) if request.transport in OVER_RELAY else request

    def _check_hidden(self, request: Request, connection: Connection) -> None:
        """Check what the policy says of all that ever leaves, this report included, against who sees what the relay lets through."""
        policy = self.policy
        bounds = (("relay_epsilon", "behind the relay", policy.relay_epsilon), ("sum_epsilon", "in sums", policy.sum_epsilon))
        for setting, where, allowed in bounds:
            if allowed == "off":
                continue
            new = Sent(as_stored(request.release), request.cohort, request.transport, request.linked, 1)
            spent = self._hidden([*sent_by(connection), new], allowed, summed=setting == "sum_epsilon")
            if not spent <= allowed:
                why = f"all releases would cost epsilon {spent:.6g} {where}, above the policy's {setting} = {allowed:g}"
                raise request.declined(why, Exhausted, setting=setting)

    def _hidden(self, sent: list[Sent], allowed: float, *, summed: bool) -> float:
        """Return what all that was ``sent`` costs, as bits that were mixed or as noise that was ``summed``; infinite if any was not."""
        policy = self.policy
        if policy.delta == 0 or any(one.transport != ("sum" if summed else "relay") for one in sent):
            return inf
        order = filter_order(allowed, policy.delta)
        among = [(one, min(one.cohort, policy.crowd)) for one in sent]
        if summed:
            noise = [(one.release, clients, one.count) for one, clients in among if isinstance(one.release, GaussianRelease)]
            return summed_epsilon(noise, order, policy.delta) if len(noise) == len(sent) else inf
        bits = [(one.release, clients, one.linked, one.count) for one, clients in among if isinstance(one.release, BinaryRelease)]
        return hidden_epsilon(bits, order, policy.delta) if len(bits) == len(sent) else inf

    @contextmanager
    def _noting_refusals(self) -> Iterator[None]:
        """Write why something was refused into the file, if that is possible, for ``ldpfl budget show``."""
        try:
            yield
        except Declined as refusal:
            self.refused(refusal)
            raise


def _check_new(request: Request, connection: Connection) -> None:
    if request.transport in OVER_RELAY and relayed_before(connection, request.run, request.round):
        why = "this round was charged before, and the relay takes one report of it from each client; the message may have been replayed"
        raise request.declined(why, ChargedBefore)
