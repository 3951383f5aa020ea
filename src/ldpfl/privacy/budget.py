"""A client's lifetime budget: charged, and on disk, before a client's data are touched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from sqlite3 import Connection

from ldpfl.errors import ChargedBefore, Declined, Exhausted
from ldpfl.privacy.accountants.adaptive import filter_order, hidden_epsilon, summed_epsilon
from ldpfl.privacy.budget_file import (
    Books,
    Charged,
    Sent,
    add_charge,
    as_stored,
    budget_transaction,
    most_that_fit,
    nodes_charged,
    note_refusal,
    read_open_books,
    read_sent_reports,
)
from ldpfl.privacy.budget_move import is_moved
from ldpfl.privacy.events import BinaryRelease, GaussianRelease
from ldpfl.privacy.guarantee import PROTECTED
from ldpfl.privacy.policy import OVER_RELAY, Policy, Request
from ldpfl.util.number_format import counted


@dataclass(frozen=True)
class PolicySpend:
    """Epsilon that was spent of one of a policy's lifetime bounds.

    Attributes:
        setting: the policy's setting: ``lifetime_epsilon``, ``relay_epsilon`` or ``sum_epsilon``.
        allowed: the setting's value.
        delta: the policy's delta.
        epsilon: epsilon of all charged reports at ``delta``, for the adversary that the setting is about. Infinite if a report left by a
            way that the setting does not bound.
    """

    setting: str
    allowed: float
    delta: float
    epsilon: float

    @property
    def against(self) -> str:
        """The adversary that the setting is about, in words for an operator."""
        return _AGAINST[self.setting]


_AGAINST = {
    "lifetime_epsilon": "whoever keeps all reports",
    "relay_epsilon": "whoever sees only what the relay has mixed",
    "sum_epsilon": "whoever sees only sums",
}
_SETTINGS_BEHIND_RELAY = {"relay_epsilon": "behind the relay", "sum_epsilon": "in sums"}
"""Settings that bound what the relay forwards, each with the words that name where its epsilon holds."""


@dataclass(frozen=True)
class Budget:
    """A client's lifetime budget, kept in the file ``path``. The file's limit and the limit of ``policy`` both apply.

    Safe with any number of processes and threads. If the process is killed at any moment, every report that was sent is counted, and so is
    every report that was being made. No clock is relied on. If the file is missing, damaged, of a newer version, readable by other users,
    or cannot be written, no report is allowed.

    Guarantee: all reports that were ever charged to the file are together (epsilon, delta)-LDP at the file's limit. All reports that were
    sent under the policy are so at the policy's limit. This holds for a server that chooses each round by what it saw before: see
    :mod:`ldpfl.privacy.accountants.adaptive`.

    Attributes:
        path: the file. Nodes with data of the same people share one file.
        policy: the policy.
        node: name of this node in the file, which several nodes may share. A named node is charged at most once for a round. A node without
            a name is charged at most once for a round over the relay, and without this limit for others.
    """

    path: Path
    policy: Policy
    node: str = ""

    def check_policy(self, request: Request) -> None:
        """Raise unless the policy allows ``request``. The spent budget does not affect the answer, so the answer reveals nothing of it.

        :meth:`check` does depend on the spent budget: a server that asks often could learn how much was spent.

        Raises:
            Declined: the policy does not allow the request.
        """
        with self._noting_refusals():
            self.policy.check(request)

    def check(self, request: Request) -> None:
        """Raise unless :meth:`charge` would allow ``request`` now. Nothing is charged, and not even a refusal is written.

        The check may be repeated at no cost. A request that passes it may still be refused when it is charged.

        Raises:
            Exhausted, Declined: as :meth:`charge`.
        """
        self.policy.check(request)
        with budget_transaction(self.path, write=True) as connection:
            self._add_charge(request, connection)
            connection.execute("ROLLBACK")  # writing the journal has already shown whether the disk is full, or the file read-only

    def charge(self, request: Request) -> int:
        """Record a release durably, and return its number. Only then may the client's data be used for it.

        Every call charges a new release, also for a second report of the same round: its fresh randomness reveals more. But a round needs
        only one report from each client, so a second charge to the same ``node`` is declined, for example after a replayed message.

        Raises:
            Exhausted: the lifetime budget or the policy's number of rounds does not allow the release.
            Declined: the policy does not allow it, the file is unreliable, or the round was charged to this node before.
        """
        with self._noting_refusals():
            self.policy.check(request)
            with budget_transaction(self.path, write=True) as connection:
                return self._add_charge(request, connection)

    def _add_charge(self, request: Request, connection: Connection) -> int:
        """Add the charge for ``request`` to an open file, and return its number. Raises the errors of :meth:`charge`."""
        self._check_bounds(request, connection)
        release = as_stored(request.release)
        return add_charge(connection, self._with_honest_cohort(request), release, person=self.policy.person, node=self.node)

    def refused(self, refusal: Declined) -> Declined:
        """Note ``refusal`` in the file, if it can be written, and return it, so that the caller can raise it.

        For refusals that neither policy nor budget decided.
        """
        with suppress(Declined), budget_transaction(self.path, write=True, patience=1.0) as connection:
            note_refusal(connection, str(refusal))
        return refusal

    def _check_bounds(self, request: Request, connection: Connection) -> None:
        """Raise if ``request`` repeats a round, or exceeds a bound on all releases.

        Several nodes may share the file. Over the relay, the reports that other nodes still have to send in this round must fit too.
        Otherwise one node would be charged for a round that another one then declines.
        """
        self._refuse_repeated_round(request, connection)
        books = read_open_books(connection, self.policy.protects)
        if is_moved(books) and books.refusals is not None:
            raise request.declined(books.refusals.reason, Exhausted)  # it names the new file
        reports = 1
        if request.transport in OVER_RELAY:  # this node's report, and those of the nodes that are not charged for this round yet
            reports = max(1, books.together - len(nodes_charged(connection, request.run, request.round)))
        self._check_lifetime(request, books, reports)
        self._check_spend_behind_relay(request, connection, reports)

    def _check_lifetime(self, request: Request, books: Books, times: int) -> None:
        """Raise :class:`Exhausted` unless the policy's number of rounds and both lifetime epsilons allow ``times`` such reports.

        An unprotected report needs only a budget above 0. A protected one is refused also if charged releases have no epsilon for the unit
        that the policy protects. ``books`` is the content of the file.
        """
        charges = books.charges + times
        if charges > self.policy.rounds:
            why = f"{counted(charges, 'report')} would exceed the policy's rounds = {self.policy.rounds}"
            raise request.declined(why, Exhausted, setting="rounds")
        if not request.protected:
            if books.limit.epsilon == 0:  # an operator stopped all reports
                raise request.declined(f"the budget set in {self.path} is 0, which allows no report", Exhausted)
            return  # Policy.check allowed the mechanism; once this is charged, the spent epsilon is infinite: no protected release fits
        if why := self.why_unbounded(books):
            raise request.declined(why, Exhausted)
        of_policy, of_file = self.policy.lifetime, books.limit
        bounds = ((of_policy, of_policy.order, "the policy's lifetime_epsilon"), (of_file, books.order, f"the budget set in {self.path}"))
        for limit, order, source in bounds:
            spent = books.spent(limit.delta, as_stored(request.release), order=order, times=times)
            if not spent <= limit.epsilon:  # this form also refuses NaN
                why = f"all releases would cost epsilon {spent:.6g} at delta {limit.delta:g}, above {source} = {limit.epsilon:g}"
                raise request.declined(why, Exhausted)

    def _with_honest_cohort(self, request: Request) -> Request:
        """Return ``request``. Over the relay, limit its cohort to the policy's honest clients, since a server may add its own clients."""
        if request.transport not in OVER_RELAY:
            return request
        return replace(request, cohort=min(request.cohort, self.policy.honest_clients))

    def spent_of_policy(self) -> tuple[PolicySpend, ...]:
        """Return the cost of all charged reports for each lifetime bound that the policy sets.

        The cost is infinite if the reports protected a smaller unit than the policy protects.

        Raises:
            Declined: the file is unreliable.
        """
        policy = self.policy
        with budget_transaction(self.path) as connection:
            books, sent = read_open_books(connection, policy.protects), read_sent_reports(connection, policy.protects)
        spent = books.spent(policy.delta, order=policy.lifetime.order)
        lifetime = PolicySpend("lifetime_epsilon", policy.lifetime_epsilon, policy.delta, spent)
        spends = (lifetime, *self._spend_behind_relay(sent))
        return tuple(replace(spend, epsilon=inf) for spend in spends) if self.why_unbounded(books) else spends

    def spends_behind_relay(self, more: Iterable[Sent]) -> tuple[PolicySpend, ...]:
        """Return what all charged reports and ``more`` cost of ``relay_epsilon`` and ``sum_epsilon``, where the policy sets them.

        Raises:
            Declined: the file is unreliable.
        """
        with budget_transaction(self.path) as connection:
            return tuple(self._spend_behind_relay([*read_sent_reports(connection, self.policy.protects), *more]))

    def rounds_left(self, last: Charged) -> int:
        """Return how many more rounds like that of ``last`` the file's limit and the policy's lifetime bounds allow, at most 1e9.

        In a round over the relay, each node that shares the file sends a report.

        Raises:
            Declined: the file is unreliable.
        """
        with budget_transaction(self.path) as connection:
            books, sent = read_open_books(connection, self.policy.protects), read_sent_reports(connection, self.policy.protects)
        together = books.together if last.transport in OVER_RELAY else 1
        if self.why_unbounded(books) or not self.policy.allows_unit(last.release.unit):
            return 0
        bounds = ((self.policy.lifetime, self.policy.lifetime.order), (books.limit, books.order))

        def fits(rounds: int) -> bool:
            """Whether ``rounds`` more rounds keep the number of reports and all lifetime bounds."""
            reports = rounds * together
            new = Sent(last.release, last.cohort, last.transport, last.linked, reports, together)
            return (
                books.charges + reports <= self.policy.rounds
                and all(books.spent(bound.delta, last.release, order=order, times=reports) <= bound.epsilon for bound, order in bounds)
                and all(spend.epsilon <= spend.allowed for spend in self._spend_behind_relay([*sent, new]))
            )

        return most_that_fit(fits)

    def why_unbounded(self, books: Books) -> str:
        """Return why charged releases have no epsilon for the unit that the policy protects; empty if they have one."""
        policy, protected = self.policy, books.protected
        if PROTECTED.index(protected) < PROTECTED.index(policy.protects):
            unit = "the whole client" if policy.protects == "client" else "all records of a person"
            revealed = f"no epsilon covers what these revealed of {unit}, which the policy protects"
            remedy = f"to go on using this budget, set protects = {protected!r} in the policy"
            return f"{self.path} has releases that protected one {protected} at a time: {revealed}; {remedy}"
        other_columns = ", ".join(map(repr, sorted(books.person_columns - {policy.person})))
        if policy.protects == "person" and other_columns:
            revealed = f"no epsilon covers what these revealed of a person named by the policy's person = {policy.person!r}"
            remedy = f"set person = {other_columns} again. If only the table's column was renamed, give it its old name"
            return f"{self.path} has releases that protected persons named by the column {other_columns}: {revealed}; {remedy}"
        return ""

    def _refuse_repeated_round(self, request: Request, connection: Connection) -> None:
        """Raise :class:`ChargedBefore` if this node was charged before for the round of ``request``.

        A node without a name is checked only over the relay. A server that works as intended asks for a round once. If its run folder is an
        older copy, it asks again, and its ledger lacks the first report.
        """
        over_relay = request.transport in OVER_RELAY
        if (over_relay or self.node) and self.node in nodes_charged(connection, request.run, request.round, over_relay=over_relay):
            why = (
                "this round was charged before, and a round has one report from each client: the message may be a repeated one, or the "
                "server's run folder an older copy"
            )
            raise request.declined(why, ChargedBefore)

    def _check_spend_behind_relay(self, request: Request, connection: Connection, times: int) -> None:
        """Raise :class:`Exhausted` if ``times`` reports like ``request`` exceed the policy's ``relay_epsilon`` or ``sum_epsilon``.

        Both bound all reports ever sent, against an adversary that sees only what the relay forwards.
        """
        for spend in self._spend_behind_relay(read_sent_reports(connection, self.policy.protects, request, times)):
            if not spend.epsilon <= spend.allowed:
                cost = f"all releases would cost epsilon {spend.epsilon:.6g} {_SETTINGS_BEHIND_RELAY[spend.setting]}"
                raise request.declined(f"{cost}, above the policy's {spend.setting} = {spend.allowed:g}", Exhausted, setting=spend.setting)

    def _spend_behind_relay(self, sent: list[Sent]) -> Iterator[PolicySpend]:
        """Yield what ``sent`` reports cost of ``relay_epsilon`` and of ``sum_epsilon``, where the policy sets them."""
        for setting in _SETTINGS_BEHIND_RELAY:
            allowed = getattr(self.policy, setting)
            if allowed != "off":
                epsilon = self._epsilon_behind_relay(sent, allowed, summed=setting == "sum_epsilon") if sent else 0.0
                yield PolicySpend(setting, allowed, self.policy.delta, epsilon)

    def _epsilon_behind_relay(self, sent: list[Sent], allowed: float, *, summed: bool) -> float:
        """Return the epsilon of all ``sent`` reports, for an adversary that sees only what the relay forwards.

        The relay forwards mixed bits, or sums with Gaussian noise if ``summed``. Return infinity if any report was of another kind, or left
        by another way. The order of the privacy filter, which computes the epsilon, is chosen for the policy's bound ``allowed``.

        If k reports on the same people are in one round, from k nodes that share the budget, each counts as hidden among 1/k of the honest
        clients. The reason: divide these clients into k groups in advance, with one of the k nodes in each. An adversary that sees each
        group's bits or sum by itself sees no less, and its view consists of k separate releases, one for each report.
        """
        policy = self.policy
        if policy.delta == 0 or any(reports.transport != ("sum" if summed else "relay") for reports in sent):
            return inf
        order = filter_order(allowed, policy.delta)
        noise, bits = [], []
        for reports in sent:
            release = reports.release
            clients = max(1, min(reports.cohort, policy.honest_clients) // reports.together)
            if isinstance(release, GaussianRelease):
                noise.append((release, clients, reports.count))
            elif isinstance(release, BinaryRelease):
                bits.append((release, clients, reports.linked, reports.count))
        if summed:
            return summed_epsilon(noise, order, policy.delta) if len(noise) == len(sent) else inf
        return hidden_epsilon(bits, order, policy.delta) if len(bits) == len(sent) else inf

    @contextmanager
    def _noting_refusals(self) -> Iterator[None]:
        """Write the reason of a refusal into the file, if possible, for ``ldpfl budget show``."""
        try:
            yield
        except Declined as refusal:
            self.refused(refusal)
            raise
