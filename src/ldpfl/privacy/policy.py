"""A client's own policy: what its operator allows to leave, judged by what the mechanism on the client really releases."""

from __future__ import annotations

import base64
import binascii
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from ldpfl.errors import ConfigError, Declined, NotSetUp
from ldpfl.privacy.accountants.adaptive import filter_order
from ldpfl.privacy.accountants.registry import epsilon_of, unit_epsilon
from ldpfl.privacy.authors import Releasing, is_built_in, released
from ldpfl.privacy.events import OURS, BinaryRelease, GaussianRelease, Release, RoundEvent
from ldpfl.privacy.guarantee import Protected
from ldpfl.privacy.statement import DELTA, SMALLEST_DELTA
from ldpfl.util.file_owners import require_own
from ldpfl.util.quantities import NotNegative, Positive
from ldpfl.util.suggestions import did_you_mean
from ldpfl.util.user_code import is_pretrained, lies_in_file

Transport = Literal["relay", "sum", "direct"]
"""How a report leaves. ``relay``: sealed, through a relay that mixes it with others. ``sum``: masked, to a relay that adds it to others,
and the mask to the aggregator, who learns the sum alone. ``direct``: in the reply, where the server sees who sent it."""

OVER_RELAY: tuple[Transport, ...] = ("relay", "sum")
"""Those by which a report goes to the relay, which takes one of a round from each client."""

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,99}")


@dataclass(frozen=True)
class Request:
    """What a round would release of this client, as the client makes it out; build it with :meth:`of`.

    Attributes:
        run: letters, digits and ``. _ : / -``, at most 100.
        round: from 1.
        release: what the mechanism on this client states of itself.
        cohort: clients that the report will be mixed with, this one included, as far as the client knows.
        transport: how the report will leave.
        key: raw public key of the aggregator; empty where the report is not sealed.
        linked: units that stay together in the relay.

    Raises:
        Declined: figures that are not possible.
    """

    run: str
    round: int
    release: Release
    cohort: int
    transport: Transport
    key: bytes = b""
    linked: int = 1

    def __post_init__(self) -> None:
        if not _RUN.fullmatch(self.run):
            raise Declined("the name of the run is not one of 1 to 100 letters, digits and . _ : / -; nothing was sent")
        if self.transport not in get_args(Transport):
            raise Declined(f"{self._place}: the transport must be one of {', '.join(get_args(Transport))}; nothing was sent")
        try:
            RoundEvent(self.round, self.release, self.cohort, self.cohort, 1, linked=self.linked)
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
    ) -> Request:
        """Return the request for one report of ``mechanism``, the very object that will encode it."""
        return cls(run, round, released(mechanism, ranges), cohort, transport, key, linked)

    @property
    def mechanism(self) -> str:
        """The mechanism's name for itself."""
        return self.release.mechanism

    @property
    def protected(self) -> bool:
        """Whether anything is guaranteed."""
        return self.release.protected

    @property
    def _place(self) -> str:
        return f"run {self.run}, round {self.round}"

    def declined(self, why: str, kind: type[Declined] = Declined, *, setting: str = "") -> Declined:
        """Return the refusal of this request; ``why`` is for the operator, and the server is told the policy's ``setting`` alone."""
        return kind(f"{self._place}: {why}; nothing was sent", setting)


UPLOAD_S = 30.0
"""Seconds that a policy has to leave for an upload, once clients may send."""


@dataclass(frozen=True)
class Limit:
    """A lifetime budget: all that a client ever releases stays within ``epsilon`` at ``delta``, trusting nobody.

    Raises:
        ConfigError: epsilon is negative or not finite; delta is neither 0 nor one that figures can be given for.
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
        """Of the rule by which the budget is kept: see :func:`ldpfl.privacy.accountants.adaptive.filter_order`."""
        return filter_order(self.epsilon, self.delta)


def _reliable(delta: float) -> float:
    if 0 < delta < SMALLEST_DELTA:
        raise ValueError(f"a delta above 0 must be at least {SMALLEST_DELTA:g}")
    return delta


def _is_key(text: str) -> str:
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != 32:
        raise ValueError("a public key must be 32 bytes in base64, 44 characters")
    return text


def _is_path(text: str) -> str:
    if is_pretrained(text):
        return text
    if lies_in_file(text) or text.count(":") != 1 or not all(part.isidentifier() for part in text.replace(":", ".").split(".")):
        raise ValueError("a model must be named package.module:Class")
    return text


Names = Annotated[tuple[str, ...], Field(strict=False)]


class Policy(BaseModel):
    """What an operator allows this client to send. What is not stated is not allowed.

    A bound holds for what the client itself would release. ``cohort`` alone rests on what the relay or the server says.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    mechanisms: Names = ()
    """Names of the mechanisms that may be used. One of another package than ldpfl is named here on its author's word: every bound below
    then rests on what that package claims of itself, and nothing of it is proved. ``ldpfl audit NAME`` tests it."""
    protects: Protected = "client"
    """What every epsilon here is of: all that this client holds; ``person``, all records of any one person in its table; or ``record``,
    any one of its records, which is much less to ask. Rounds that protect persons are declined under ``record``: one row in the place of
    another person's changes what two persons add."""
    person: str = ""
    """The column of this client's table that names the person whose record a row is. Rounds that group rows by any other column, or by
    any at all where none is named, are declined: the server must not choose what a person is."""
    allow_unprotected: bool = False
    """Lets a mechanism in ``mechanisms`` send what nothing is guaranteed for, such as ``none``: no epsilon bounds that."""
    epsilon_per_unit: NotNegative = 0.0
    """Largest epsilon of what a mechanism releases separately (a weight, group, layer or vector) in one round."""
    epsilon_per_round: NotNegative = 0.0
    """Largest epsilon, at ``delta``, of all that the client sends in one round."""
    lifetime_epsilon: NotNegative = 0.0
    """Largest epsilon, at ``delta``, of all that the client ever sends, in all runs, against whoever keeps all of it."""
    relay_epsilon: Positive | Literal["off"] = "off"
    """Largest epsilon, at ``delta``, of all that the client ever sends, against whoever sees no more than the relay lets through. A
    report counts as one of ``min_clients`` less ``colluding``, however many more are mixed; all must be bits, and leave through it."""
    sum_epsilon: Positive | Literal["off"] = "off"
    """Largest epsilon, at ``delta``, of all that the client ever sends, against whoever sees no more than sums: relay and aggregator do not
    work together. In a report's sum the noise of ``min_clients`` less ``colluding`` counts, however many more there are; all must leave
    by sums, with Gaussian noise on a lattice."""
    delta: Annotated[FiniteFloat, Field(ge=0, lt=1), AfterValidator(_reliable)] = DELTA
    """Failure probability at which the bounds count; 0 for pure ones."""
    rounds: Annotated[int, Field(ge=0)] = 0
    """Most reports that the client ever sends."""
    min_clients: Annotated[int, Field(ge=1)] = 100
    """Fewest clients among which the report is mixed."""
    colluding: Annotated[int, Field(ge=0)] = 0
    """How many of ``min_clients`` may be the server's own, or tell what they sent: they hide nobody."""
    transports: Annotated[tuple[Transport, ...], Field(strict=False)] = ("relay",)
    """How reports may leave."""
    aggregator_keys: Annotated[tuple[Annotated[str, AfterValidator(_is_key)], ...], Field(strict=False)] = ()
    """Public keys, base64, of the aggregators that reports may be sealed to."""
    linked: Annotated[int, Field(ge=1)] = 1
    """Most units that may stay together in the relay."""
    models: Annotated[tuple[Annotated[str, AfterValidator(_is_path)], ...], Field(strict=False)] = ()
    """Import paths, ``package.module:Class``, of models and features that a server may name beside the built-in ones: this node runs
    their code. And pretrained models, ``hf:NAME`` or ``hf:FOLDER``: their weights are loaded, and checked to be the server's."""
    immediate_replies: bool = False
    """Lets a round do without a time at which every client replies: when a client replies then tells how long it trained."""
    longest_reply_s: Positive = 3600.0
    """Longest time for replies that a round may state: the node does nothing else meanwhile."""
    longest_upload_s: Positive = 24 * 3600.0
    """Longest time for which the node tries to upload a report to the relay, from its charge on: the node does nothing else meanwhile."""
    keep_state: bool = False
    """Lets an app remember over rounds whose reports go over the relay: a server may have made one client remember what no other does."""

    @model_validator(mode="after")
    def _some_are_honest(self) -> Policy:
        if self.colluding >= self.min_clients:
            raise ValueError(f"colluding = {self.colluding} leaves none of min_clients = {self.min_clients}")
        return self

    @property
    def crowd(self) -> int:
        """Clients among which a report is counted on to hide, itself included: the others of a round may be the server's."""
        return self.min_clients - self.colluding

    @property
    def lifetime(self) -> Limit:
        """The lifetime budget."""
        return Limit(self.lifetime_epsilon, self.delta)

    def check(self, request: Request) -> None:
        """Return if ``request`` keeps every bound of a single round; the lifetime's are for :class:`ldpfl.privacy.budget.Budget`.

        Raises:
            Declined: one is not kept; the text names its setting.
        """
        for kept, setting, why in self._bounds(request):
            if not kept:
                raise request.declined(why, setting=setting)

    def check_reply(self, reply_s: float, transport: Transport) -> None:
        """Return if a client may send its report over ``transport``, ``reply_s`` seconds after it began; 0 is as soon as it can.

        Raises:
            Declined: the time of the report would depend on the data, or is later than the operator waits.
        """
        if reply_s == 0 and not self.immediate_replies:
            raise Declined(
                "the round states no time for replies, so when a client replies would tell how long it trained, "
                "and immediate_replies is not set; nothing was sent",
                "immediate_replies",
            )
        if reply_s > self.longest_reply_s:
            said = f"replies after {reply_s:g} s are later than the policy's longest_reply_s = {self.longest_reply_s:g}"
            raise Declined(said, "longest_reply_s")
        if transport in OVER_RELAY and reply_s + UPLOAD_S > self.longest_upload_s:
            raise Declined(
                f"clients upload after {reply_s:g} s and need up to {UPLOAD_S:g} s for it, which is more than the policy's "
                f"longest_upload_s = {self.longest_upload_s:g}",
                "longest_upload_s",
            )

    def _bounds(self, request: Request) -> Iterator[tuple[bool, str, str]]:
        """Yield for each bound whether it is kept, its setting, and what to say if not; later ones may rely on those before."""
        allowed = ", ".join(self.mechanisms) or "none at all"
        yield (
            request.mechanism in self.mechanisms,
            "mechanisms",
            f"mechanism {request.mechanism!r} is not among the policy's mechanisms ({allowed})",
        )
        author = request.release.author
        genuine = author == OURS or not is_built_in(request.mechanism)
        yield (
            genuine,
            "mechanisms",
            f"mechanism {request.mechanism!r} is not ldpfl's own of that name, but code of {author}: its author has to name it",
        )
        yield request.transport in self.transports, "transports", f"transport {request.transport!r} is not among the policy's transports"
        if request.transport in OVER_RELAY:
            keys = [base64.b64decode(key) for key in self.aggregator_keys]
            yield request.key in keys, "aggregator_keys", "the aggregator's key is not among the policy's aggregator_keys"
        if self.relay_epsilon != "off":
            hidden = request.transport == "relay" and isinstance(request.release, BinaryRelease)
            yield hidden, "relay_epsilon", "relay_epsilon is for bits that leave through the relay, and for nothing else"
        summed = isinstance(request.release, GaussianRelease) and request.release.adds_up
        if request.transport == "sum":
            yield summed, "transports", "only Gaussian noise on a lattice adds up in a sum: of this release nothing is known there"
        if self.sum_epsilon != "off":
            yield request.transport == "sum", "sum_epsilon", "sum_epsilon is for reports that leave by sums, and for nothing else"
        linked = request.linked
        yield linked <= self.linked, "linked", _exceeds("linked", linked, self.linked)
        yield request.cohort >= self.min_clients, "min_clients", f"a cohort of {request.cohort} is below min_clients = {self.min_clients}"
        if not request.protected:
            yield (
                self.allow_unprotected,
                "allow_unprotected",
                f"{request.mechanism} sends values without protection, and allow_unprotected is not set",
            )
            return
        unit = request.release.unit
        if unit == "record" or unit == "person":
            twice = unit == "person" and self.protects == "record"
            why = f"{request.mechanism} protects one {unit} at a time, and the policy protects the {self.protects}"
            yield unit == self.protects, "protects", f"{why}; {_TWO_PERSONS}" if twice else why
        separate = unit_epsilon(request.release, self.delta)
        yield separate <= self.epsilon_per_unit, "epsilon_per_unit", _exceeds("epsilon_per_unit", separate, self.epsilon_per_unit)
        whole = epsilon_of([(request.release, 1)], self.delta)
        yield whole <= self.epsilon_per_round, "epsilon_per_round", _exceeds("epsilon_per_round", whole, self.epsilon_per_round)


_TWO_PERSONS = (
    "a row in the place of another person's row changes what two persons add, which the round's figures do not count: to take such rounds, "
    "set protects to 'person' and person to the column that names persons"
)


def read_policy(path: Path) -> Policy:
    """Read a policy file in TOML.

    Raises:
        Declined: there is none, other users can change it, a key is unknown, or a value does not fit; one line, naming the key. Then
            nothing may leave.
    """
    try:
        path.stat()  # that there is none is another matter than that it cannot be relied on
        own = require_own(path, "nothing leaves this client: policy", Declined, secret=False)
        tree = tomllib.loads(own.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotSetUp(f"there is no policy at {path}: make one with ldpfl policy init; without one nothing leaves this client") from None
    except (OSError, UnicodeDecodeError) as error:
        raise Declined(f"policy {path} cannot be read, so nothing leaves this client: {error}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise Declined(f"policy {path} is not valid TOML, so nothing leaves this client: {error}") from None
    try:
        return Policy.model_validate(tree)
    except ValidationError as error:
        raise Declined(_explain(error, path)) from None


def _explain(error: ValidationError, path: Path) -> str:
    first: Any = error.errors()[0]
    key = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return f"unknown setting {key!r} in policy {path}: {did_you_mean(key, Policy.model_fields)}; nothing leaves this client"
    why, shown = first["msg"].removeprefix("Value error, "), repr(first["input"])[:60]
    return f"setting {key!r} in policy {path}: {why[0].lower()}{why[1:]}, got {shown}; nothing leaves this client"


def _exceeds(setting: str, asked: float, bound: float) -> str:
    return f"{asked:.6g} exceeds the policy's {setting} = {bound:g}"
