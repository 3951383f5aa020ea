"""A client's policy: what its operator allows to be sent. It is checked against the release that the client's mechanism object states."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from ldpfl.errors import ConfigError, Declined, NotSetUp
from ldpfl.privacy.accountants.adaptive import filter_order
from ldpfl.privacy.accountants.registry import epsilon_of, unit_epsilon
from ldpfl.privacy.accounting import DELTA, SMALLEST_DELTA
from ldpfl.privacy.authors import Releasing, is_built_in, released
from ldpfl.privacy.events import OURS, USERS_CODE, BinaryRelease, GaussianRelease, Release, RoundEvent
from ldpfl.privacy.guarantee import Protected, Unit
from ldpfl.util.file_owners import require_own
from ldpfl.util.files import from_toml
from ldpfl.util.quantities import NotNegative, Positive
from ldpfl.util.suggestions import did_you_mean
from ldpfl.util.user_code import is_pretrained, lies_in_file

Transport = Literal["relay", "sum", "direct"]
"""How a report leaves. ``relay``: sealed, through a relay that mixes it with other reports. ``sum``: masked, to a relay that adds it to
other reports; the mask goes to the aggregator, which learns only the sum. ``direct``: in the reply, so that the server sees the sender."""

OVER_RELAY: tuple[Transport, ...] = ("relay", "sum")
"""Transports over the relay, which accepts one report per client and round."""

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,99}")


@dataclass(frozen=True)
class Request:
    """What a round would release about this client, as determined on the client. Build it with :meth:`of`.

    Attributes:
        run: name of the run: letters, digits and ``. _ : / -``, at most 100 characters.
        round: number of the round, from 1.
        release: the release that this client's mechanism states.
        cohort: number of clients that the report will be mixed with, this one included, as far as the client knows.
        transport: how the report will leave.
        key: raw public key of the aggregator; empty if the report is not sealed.
        linked: number of units that stay together in the relay.

    Raises:
        Declined: a value is not possible.
    """

    run: str
    round: int
    release: Release
    cohort: int
    transport: Transport
    key: bytes = b""
    linked: int = 1

    def __post_init__(self) -> None:
        if not _RUN_NAME.fullmatch(self.run):
            raise Declined(
                f"the name of the run must have 1 to 100 letters, digits and . _ : / -, got {self.run[:100]!r}; nothing was sent"
            )
        if self.transport not in get_args(Transport):
            expected = ", ".join(get_args(Transport))
            raise self.declined(f"the transport must be one of {expected}, got {str(self.transport)[:40]!r}")
        try:  # the event is not kept: making it checks the values
            RoundEvent(self.round, self.release, cohort=self.cohort, population=self.cohort, joined=1, linked=self.linked)
        except ConfigError as error:
            raise Declined(f"run {self.run}, {error}; nothing was sent") from None

    @classmethod
    def of(
        cls,
        mechanism: Releasing,
        ranges: Any,
        *,
        run: str,
        round: int,
        cohort: int,
        transport: Transport,
        key: bytes = b"",
        linked: int = 1,
        chosen_by: object = None,
    ) -> Request:
        """Return the request for one report of ``mechanism``. Pass the object that will encode the report, not a copy.

        Args:
            chosen_by: the mechanism that returned ``mechanism`` for this round, if any. Then the guarantee rests on the code of both.
        """
        return cls(run, round, released(mechanism, ranges, chosen_by=chosen_by), cohort, transport, key, linked)

    @property
    def mechanism(self) -> str:
        """Name that the mechanism states."""
        return self.release.mechanism

    @property
    def protected(self) -> bool:
        """Whether anything is guaranteed."""
        return self.release.protected

    @property
    def _run_and_round(self) -> str:
        return f"run {self.run}, round {self.round}"

    def declined(self, why: str, kind: type[Declined] = Declined, *, setting: str = "") -> Declined:
        """Return the error that refuses this request. The operator sees ``why``; the server sees only the policy's ``setting``."""
        return kind(f"{self._run_and_round}: {why}; nothing was sent", setting)


UPLOAD_S = 30.0
"""Seconds that a policy's ``longest_upload_s`` must leave for the upload after the time for replies."""


@dataclass(frozen=True)
class Limit:
    """A lifetime budget: everything that a client ever releases stays within ``epsilon`` at ``delta``, trusting nobody.

    Raises:
        ConfigError: epsilon is negative or not finite; delta is neither 0 nor in [``SMALLEST_DELTA``, 1).
    """

    epsilon: float
    delta: float = DELTA

    def __post_init__(self) -> None:
        if not (isfinite(self.epsilon) and self.epsilon >= 0):
            raise ConfigError(f"a budget's epsilon must be finite and at least 0, got {self.epsilon:g}")
        if not (self.delta == 0 or SMALLEST_DELTA <= self.delta < 1):
            raise ConfigError(f"a budget's delta must be 0 or lie in [{SMALLEST_DELTA:g}, 1), got {self.delta:g}")

    @property
    def order(self) -> float:
        """Rényi order of the privacy filter: see :func:`ldpfl.privacy.accountants.adaptive.filter_order`."""
        return filter_order(self.epsilon, self.delta)


def _check_delta_range(delta: float) -> float:
    """Return ``delta`` if it is 0 or no smaller than accountants support, else raise :class:`ValueError` for pydantic to report."""
    if 0 < delta < SMALLEST_DELTA:
        raise ValueError(f"a delta above 0 must be at least {SMALLEST_DELTA:g}")
    return delta


def _check_key(text: str) -> str:
    """Return ``text`` if it is a public key in base64, else raise :class:`ValueError` for pydantic to report."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != 32:
        raise ValueError("a public key must be 32 bytes in base64, 44 characters")
    return text


def _check_model_path(text: str) -> str:
    """Return ``text`` if it names a pretrained model or is an import path, else raise :class:`ValueError` for pydantic to report."""
    if is_pretrained(text):
        return text
    if lies_in_file(text) or text.count(":") != 1 or not all(part.isidentifier() for part in text.replace(":", ".").split(".")):
        raise ValueError("a model must be named package.module:Class")
    return text


Names = Annotated[tuple[str, ...], Field(strict=False)]


class Policy(BaseModel):
    """What an operator allows this client to send. Everything that is not stated is forbidden.

    The bounds are checked against the release of the client's own code. Only the cohort size is taken from the relay or the server.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    mechanisms: Names = ()
    """Names of the mechanisms that may be used. For a mechanism of another package than ldpfl, every bound below depends on what that
    package claims, and nothing is proved. ``ldpfl audit NAME`` tests it."""
    protects: Protected = "client"
    """Unit that every epsilon here protects: ``client``, all data of this client; ``person``, all records of one person in its table; or
    ``record``, one of its records, which is much weaker. Rounds that protect persons are declined under ``record``: a record that is
    replaced by another person's record changes the contributions of two persons."""
    person: str = ""
    """Column of this client's table that names the person of a row. Rounds that group rows by any other column are declined. If this is
    empty, all rounds that group rows by person are declined: the server must not choose what a person is."""
    allow_unprotected: bool = False
    """Allow a mechanism in ``mechanisms`` to send values without any guarantee, as ``none`` does. No epsilon bounds them."""
    epsilon_per_unit: NotNegative = 0.0
    """Largest epsilon of one unit (a weight, group, layer or vector) that a mechanism releases separately in one round."""
    epsilon_per_round: NotNegative = 0.0
    """Largest epsilon, at ``delta``, of everything that the client sends in one round."""
    lifetime_epsilon: NotNegative = 0.0
    """Largest epsilon, at ``delta``, of everything that the client ever sends, in all runs, against an adversary that keeps all of it."""
    relay_epsilon: Positive | Literal["off"] = "off"
    """Largest epsilon, at ``delta``, of everything that the client ever sends, against an adversary that sees only what the relay forwards.
    A report counts as hidden among ``min_clients`` - ``colluding`` clients, even if more are mixed. All reports must be bits and leave
    through the relay."""
    sum_epsilon: Positive | Literal["off"] = "off"
    """Largest epsilon, at ``delta``, of everything that the client ever sends, against an adversary that sees only sums: relay and
    aggregator do not collude. The noise of ``min_clients`` - ``colluding`` clients counts in each sum, even if more take part. All reports
    must leave by sums, with Gaussian noise on a lattice."""
    delta: Annotated[FiniteFloat, Field(ge=0, lt=1), AfterValidator(_check_delta_range)] = DELTA
    """Failure probability of the bounds; 0 for pure bounds."""
    rounds: Annotated[int, Field(ge=0)] = 0
    """Largest number of reports that the client ever sends."""
    min_clients: Annotated[int, Field(ge=1)] = 100
    """Smallest number of clients among which a report is mixed."""
    colluding: Annotated[int, Field(ge=0)] = 0
    """Number of clients among ``min_clients`` that may belong to the server, or reveal what they sent: they hide nobody."""
    transports: Annotated[tuple[Transport, ...], Field(strict=False)] = ("relay",)
    """How reports may leave."""
    aggregator_keys: Annotated[tuple[Annotated[str, AfterValidator(_check_key)], ...], Field(strict=False)] = ()
    """Public keys, base64, of the aggregators that reports may be sealed to."""
    linked: Annotated[int, Field(ge=1)] = 1
    """Largest number of units that may stay together in the relay."""
    models: Annotated[tuple[Annotated[str, AfterValidator(_check_model_path)], ...], Field(strict=False)] = ()
    """Models and feature extractors that a server may name besides the built-in ones. ``package.module:Class``: an import path; this node
    runs its code. ``hf:NAME`` or ``hf:FOLDER``: a pretrained model; its weights are loaded and checked to equal the server's."""
    immediate_replies: bool = False
    """Allow rounds that state no common time for replies. The time of a client's reply then reveals how long it trained."""
    longest_reply_s: Positive = 3600.0
    """Longest time for replies, in seconds, that a round may state. The node does nothing else meanwhile."""
    longest_upload_s: Positive = 24 * 3600.0
    """Longest time, in seconds after the charge, for which the node tries to upload a report to the relay. The node does nothing else
    meanwhile."""
    keep_state: bool = False
    """Allow an app to keep state across rounds whose reports go over the relay. A server may have given one client a state that no other
    client has, and recognise its reports."""

    @model_validator(mode="after")
    def _check_colluding(self) -> Policy:
        if self.colluding >= self.min_clients:
            raise ValueError(f"colluding = {self.colluding} leaves none of min_clients = {self.min_clients} honest: set colluding lower")
        return self

    @property
    def honest_clients(self) -> int:
        """Number of honest clients that a report is assumed to hide among, itself included. Other clients may be the server's."""
        return self.min_clients - self.colluding

    @property
    def lifetime(self) -> Limit:
        """The lifetime budget."""
        return Limit(self.lifetime_epsilon, self.delta)

    def allows_unit(self, unit: Unit) -> bool:
        """Return whether releases of this ``unit`` may leave: parts of a report, such as a weight, or exactly what the policy protects."""
        return unit not in ("record", "person") or unit == self.protects

    def check(self, request: Request) -> None:
        """Raise unless ``request`` keeps every bound of a single round. :class:`ldpfl.privacy.budget.Budget` checks the lifetime bounds.

        Raises:
            Declined: a bound is not kept; the message names its setting.
        """
        for is_kept, setting, why in self._bounds(request):
            if not is_kept:
                raise request.declined(why, setting=setting)

    def check_reply(self, reply_s: float, transport: Transport) -> None:
        """Raise unless a client may send its report ``reply_s`` seconds after the start of the round; 0 means as soon as it is ready.

        Raises:
            Declined: the time of the report would depend on the data, or is later than the operator allows.
        """
        if reply_s == 0 and not self.immediate_replies:
            raise Declined(
                "the round states no time for replies, so the time of a reply would reveal how long the client trained; "
                "set immediate_replies = true in the policy to allow this; nothing was sent",
                "immediate_replies",
            )
        if reply_s > self.longest_reply_s:
            too_late = f"the round asks for replies after {reply_s:g} s, later than the policy's longest_reply_s = {self.longest_reply_s:g}"
            raise Declined(f"{too_late}; nothing was sent", "longest_reply_s")
        if transport in OVER_RELAY and reply_s + UPLOAD_S > self.longest_upload_s:
            raise Declined(
                f"clients upload after {reply_s:g} s and need up to {UPLOAD_S:g} s for it, which is more than the policy's "
                f"longest_upload_s = {self.longest_upload_s:g}; nothing was sent",
                "longest_upload_s",
            )

    def _bounds(self, request: Request) -> Iterator[tuple[bool, str, str]]:
        """Yield for each bound whether ``request`` keeps it, its setting, and the refusal's reason.

        Later bounds may rely on earlier ones, so a caller has to stop at the first bound that is not kept.
        """
        allowed = ", ".join(self.mechanisms) or "none"
        yield (
            request.mechanism in self.mechanisms,
            "mechanisms",
            f"mechanism {request.mechanism!r} is not among the policy's mechanisms ({allowed})",
        )
        author = request.release.author
        yield (
            author in (OURS, USERS_CODE) or not is_built_in(request.mechanism),
            "mechanisms",
            f"mechanism {request.mechanism!r} has the name of a built-in mechanism but is code of {author}: its author has to rename it",
        )
        transports = ", ".join(self.transports) or "none"
        why = f"transport {request.transport!r} is not among the policy's transports ({transports})"
        yield request.transport in self.transports, "transports", why
        if request.transport in OVER_RELAY:
            keys = [base64.b64decode(key) for key in self.aggregator_keys]
            yield request.key in keys, "aggregator_keys", "the aggregator's key is not among the policy's aggregator_keys"
        if self.relay_epsilon != "off":
            why = f"with relay_epsilon set, reports may leave only by transport 'relay', got {request.transport!r}"
            yield request.transport == "relay", "relay_epsilon", why
            why = f"with relay_epsilon set, reports may hold only bits, and those of {request.mechanism} do not"
            yield isinstance(request.release, BinaryRelease), "relay_epsilon", why
        can_be_summed = isinstance(request.release, GaussianRelease) and request.release.adds_up
        if request.transport == "sum":
            why = f"reports of {request.mechanism} cannot be sent by transport 'sum', which needs Gaussian noise on integers"
            yield can_be_summed, "transports", why
        if self.sum_epsilon != "off":
            why = f"with sum_epsilon set, reports may leave only by transport 'sum', got {request.transport!r}"
            yield request.transport == "sum", "sum_epsilon", why
        linked = request.linked
        yield linked <= self.linked, "linked", _too_large("linked", linked, self.linked)
        yield request.cohort >= self.min_clients, "min_clients", f"a cohort of {request.cohort} is below min_clients = {self.min_clients}"
        if not request.protected:
            yield (
                self.allow_unprotected,
                "allow_unprotected",
                f"{request.mechanism} sends values without protection: the policy allows that only with allow_unprotected = true",
            )
            return
        unit = request.release.unit
        if unit == "record" or unit == "person":
            changes_two_persons = unit == "person" and self.protects == "record"
            why = f"{request.mechanism} protects one {unit} at a time, but the policy has protects = {self.protects!r}"
            yield self.allows_unit(unit), "protects", f"{why}; {_TWO_PERSONS}" if changes_two_persons else why
        cost_of_unit = unit_epsilon(request.release, self.delta)
        yield cost_of_unit <= self.epsilon_per_unit, "epsilon_per_unit", _too_large("epsilon_per_unit", cost_of_unit, self.epsilon_per_unit)
        cost = epsilon_of([(request.release, 1)], self.delta)
        yield (
            cost <= self.epsilon_per_round,
            "epsilon_per_round",
            _too_large("epsilon_per_round", cost, self.epsilon_per_round),
        )


_TWO_PERSONS = (
    "replacing a record by another person's record changes the contributions of two persons, which the round's epsilon does not count: "
    "to join such rounds, set protects to 'person' and person to the column that names persons"
)


def read_policy(path: Path) -> Policy:
    """Read a policy file in TOML.

    Raises:
        Declined: the file is missing, other users can change it, a key is unknown, or a value is invalid. The message is one line and names
            the key. Without a policy nothing may leave the client.
    """
    try:
        path.stat()  # a missing file gets its own error below
        checked_path = require_own(path, "nothing leaves this client: policy", Declined, secret=False)
        tree = from_toml(checked_path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotSetUp(f"there is no policy at {path}: make one with ldpfl policy init; without one nothing leaves this client") from None
    except (OSError, UnicodeDecodeError) as error:
        raise Declined(f"policy {path} cannot be read, so nothing leaves this client: {error}") from None
    except ValueError as error:
        raise Declined(f"policy {path} is not valid TOML, so nothing leaves this client: {error}") from None
    try:
        return Policy.model_validate(tree)
    except ValidationError as error:
        raise Declined(_explain(error, path)) from None


def _explain(error: ValidationError, path: Path) -> str:
    """Return the first error in the policy file ``path`` as one line that names the setting, or the settings that contradict each other."""
    first: Any = error.errors()[0]
    problem = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return f"policy {path}: {problem}; nothing leaves this client"
    key = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return f"unknown setting {key!r} in policy {path}: {did_you_mean(key, Policy.model_fields)}; nothing leaves this client"
    shown = repr(first["input"])[:60]
    return f"setting {key!r} in policy {path}: {problem[0].lower()}{problem[1:]}, got {shown}; nothing leaves this client"


def _too_large(setting: str, requested: float, bound: float) -> str:
    """Return the reason for refusing a request that needs more than ``setting`` allows."""
    return f"{requested:.6g} exceeds the policy's {setting} = {bound:g}"
