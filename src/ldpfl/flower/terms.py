"""The terms of a round, and a client's answer to them: the two ConfigRecords that ldpfl sends in Flower's messages."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Protocol, runtime_checkable

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, field_validator
from torch import Tensor

from ldpfl.errors import AskedForOther, ConfigError, LdpflError, OtherVersion, ProtocolError
from ldpfl.experiments.build import mechanism_of
from ldpfl.experiments.config import RunConfig, parse_config
from ldpfl.flower.round_kinds import Kind, PlannedRound, config_for_kind, planned_round
from ldpfl.flower.wire import MAX_LAYERS, LayerFloats, LayerNames, WireFields
from ldpfl.mechanisms import Mechanism, payload_bits
from ldpfl.mechanisms.dp_sgd import DpSgdSettings
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.models.layout import ParameterLayout
from ldpfl.privacy.policy import OVER_RELAY, UPLOAD_S, Transport
from ldpfl.relay.protocol import parse_run
from ldpfl.transport.sums import Bits
from ldpfl.util.files import from_toml
from ldpfl.util.randomness import RandomSource

ARRAYS, CONFIG = "arrays", "config"
"""Names of the records that apps find in a message, as with Flower's FedAvg."""

RECORD = "ldpfl"
"""Name of the record with the terms, in a request, and of the record with the answer, in a reply."""

VERSION = 7
"""Version of both records. A node and a server of different versions do not understand each other."""

SHORTEST_REPLY_S, _LONGEST_REPLY_S = 1.0, 7 * 24 * 3600.0
"""Bounds of a stated time for replies. Within less than a second, the time that a report takes could be noticed."""

_MAX_MEASURED = 1 << 21
"""Maximum number of characters of column measurements. Those of 400 columns take 200,000."""

_MAX_CONFIG = 1 << 17
"""Maximum number of characters of a config. The largest recipe has some 2,000, and bounds of 400 columns take 18,000."""


def check_window(window_s: float, reply_s: float, *, fewest: int, asked: int) -> None:
    """Raise if a relay's window is too short for clients that send after ``reply_s`` seconds.

    ``fewest`` is the number of uploads that a round needs, ``asked`` the number of clients asked. If both are equal, any window will do,
    because the round stays open until all clients have uploaded.

    Raises:
        ConfigError: the window leaves too little time for an upload.
    """
    if reply_s and window_s < reply_s + UPLOAD_S and fewest < asked:
        raise ConfigError(
            f"the relay's window is {window_s:g} s, but clients reply after {reply_s:g} s and need up to {UPLOAD_S:g} s for the upload: "
            f"make the window at least {reply_s + UPLOAD_S:g} s (window_s, ldpfl.window-s)"
        )


class _Wire(WireFields):
    """The fields of the server's terms, as they are on the wire."""

    version: int
    run: str
    round: PositiveInt
    kind: Kind
    size: PositiveInt
    measured: Annotated[str, Field(max_length=_MAX_MEASURED)]
    config: Annotated[str, Field(max_length=_MAX_CONFIG)]
    layers: LayerNames
    center: LayerFloats
    radius: LayerFloats
    asked: PositiveInt
    min_clients: PositiveInt
    transport: Transport
    key: bytes
    linked: PositiveInt
    reply_s: Annotated[float, Field(ge=0, le=_LONGEST_REPLY_S, allow_inf_nan=False)]
    run_config: str
    ready_app: bool

    @field_validator("reply_s")
    @classmethod
    def _check_reply_time(cls, seconds: float) -> float:
        if 0 < seconds < SHORTEST_REPLY_S:
            raise ValueError(
                f"the server's ldpfl.reply-s must be 0 (nodes reply at once) or at least {SHORTEST_REPLY_S:g} s, got {seconds:g} s"
            )
        return seconds


@dataclass(frozen=True, eq=False)
class RoundTerms:
    """The server's request in one round. A client does not trust it: the client's policy judges the release that would follow from it.

    Attributes:
        run: name of the run, the same over all rounds and resumes.
        round: number of the round, from 1; rounds of all kinds are numbered together.
        kind: kind of values that are asked for. It follows from ``config`` and ``round``; :attr:`planned` checks this.
        size: length of the vector that is asked for.
        config: settings of the run: mechanism, noise and everything that they depend on.
        layers: names of the layers, in the order of the flat vector.
        center, radius: public ranges, by layer.
        asked: number of clients that were asked.
        min_clients: minimum number of clients whose reports a relay releases together; 1 for ``direct``.
        transport: ``direct``: the report is in the Flower reply; ``relay`` and ``sum``: the report goes to the relay, and the reply only
            acknowledges.
        key: the aggregator's public key; empty for ``direct``.
        linked: number of units of a report that stay together in the relay.
        reply_s: seconds after the charge at which every client replies; 0 means as soon as it can, which reveals how long it trained.
        run_config: digest of the run config that every client has, see :func:`digest_of`.
        measured: in statistics rounds, the edges of the histograms that are asked for; later, how nodes scale their columns. See
            :mod:`ldpfl.flower.statistics`. Empty if no column is measured.
        ready_app: whether the server's ledger says that ldpfl's own app computes what nodes send. If so, a node with another app declines
            rounds whose guarantee for records would rest on that app.
    """

    run: str
    round: int
    size: int
    config: RunConfig
    layers: tuple[str, ...]
    center: tuple[float, ...]
    radius: tuple[float, ...]
    asked: int
    transport: Transport = "direct"
    key: bytes = b""
    linked: int = 1
    reply_s: float = 0.0
    run_config: str = field(default_factory=lambda: digest_of({}))
    kind: Kind = "training"
    measured: str = ""
    min_clients: int = 1
    ready_app: bool = False

    def to_record(self) -> ConfigRecord:
        """Return the terms as a Flower record.

        Raises:
            ConfigError: the config or the list of layers is longer than a node reads.
        """
        config = self.config.to_toml()
        if len(config) > _MAX_CONFIG or len(self.layers) > MAX_LAYERS:
            raise ConfigError(
                f"nodes read configs of at most {_MAX_CONFIG:,} characters and models of at most {MAX_LAYERS:,} layers, but this run "
                f"has {len(config):,} characters and {len(self.layers):,} layers: name fewer columns, or join layers"
            )
        return ConfigRecord(
            {
                "version": VERSION,
                "run": self.run,
                "round": self.round,
                "kind": self.kind,
                "size": self.size,
                "measured": self.measured,
                "config": config,
                "layers": list(self.layers),
                "center": list(self.center),
                "radius": list(self.radius),
                "asked": self.asked,
                "min-clients": self.min_clients,
                "transport": self.transport,
                "key": self.key,
                "linked": self.linked,
                "reply-s": self.reply_s,
                "run-config": self.run_config,
                "ready-app": self.ready_app,
            }
        )

    @classmethod
    def from_record(cls, record: ConfigRecord) -> RoundTerms:
        """Return the terms in ``record``, which :meth:`to_record` made.

        Raises:
            ProtocolError: a field is missing, unknown, or of another kind; OtherVersion, if the terms are of another version.
        """
        version = record.get("version")
        if version != VERSION:
            got = version if type(version) is int else "(not a number)"
            raise OtherVersion(
                f"the server's terms have version {got}, but this ldpfl reads only version {VERSION}: install the version of ldpfl that "
                "the server uses; nothing was sent"
            )
        wire = _Wire.of(record, "the server's terms")
        parse_run(wire.run)  # it becomes part of a path at the relay
        return cls(
            run=wire.run,
            round=wire.round,
            kind=wire.kind,
            size=wire.size,
            measured=wire.measured,
            config=_parsed_config(wire.config),
            layers=tuple(wire.layers),
            center=tuple(wire.center),
            radius=tuple(wire.radius),
            asked=wire.asked,
            min_clients=wire.min_clients,
            transport=wire.transport,
            key=wire.key,
            linked=wire.linked,
            reply_s=wire.reply_s,
            run_config=wire.run_config,
            ready_app=wire.ready_app,
        )

    def ranges(self, layout: ParameterLayout) -> LayerRanges:
        """Return the ranges for arrays of ``layout``.

        Raises:
            ProtocolError: the ranges are for other layers, or their values are not allowed.
        """
        if self.layers != layout.names or not len(self.layers) == len(self.center) == len(self.radius):
            raise ProtocolError(
                f"the server sent {len(layout.names)} layers, but its terms name {len(self.layers)} layers with {len(self.center)} centers "
                f"and {len(self.radius)} radii of clipping ranges: expected the same layers in the same order, one center and radius each"
            )
        try:
            # Without the dtype the numbers would be rounded to float32, and clients would clip to other ranges than the server's.
            center, radius = (torch.tensor(values, dtype=torch.float64) for values in (self.center, self.radius))
            return LayerRanges(center, radius, layout.sizes)
        except ConfigError as error:
            raise ProtocolError(f"the server's ranges cannot be used: {error}") from None

    @property
    def cohort(self) -> int:
        """Number of clients among which a report is mixed. Over a relay this is the minimum, otherwise all clients that were asked."""
        return self.min_clients if self.transport in OVER_RELAY else self.asked

    @property
    def planned(self) -> PlannedRound:
        """The round that the config plans under this number.

        Raises:
            AskedForOther: the server asks for another kind of values.
        """
        planned = planned_round(self.config, self.round)
        if planned.kind != self.kind:
            raise AskedForOther(
                f"the server asks for {self.kind} in round {self.round}, but the config that it sent plans {planned.kind} for it: the "
                "server's operator has to correct this; nothing was sent"
            )
        return planned

    def mechanism(self, ranges: LayerRanges) -> Mechanism:
        """Return the mechanism that protects what the server asks for.

        Args:
            ranges: ranges of the vector that is asked for, see :func:`ldpfl.flower.sent_vectors.vector_form`.

        Raises:
            ProtocolError: the config's channel and the transport contradict each other.
        """
        is_summed = self.config.shuffling.channel == "secure-sum"
        if is_summed != (self.transport == "sum"):
            channel = self.config.shuffling.channel
            raise ProtocolError(
                f"the server's shuffling.channel is {channel!r}, but its transport is {self.transport!r}: the channel 'secure-sum' and the "
                "transport 'sum' can only be used together"
            )
        mechanism = deployable_mechanism(config_for_kind(self.config, self.kind), ranges)
        if is_summed:
            require_adding_up(mechanism)  # raises if the mechanism is not for sums
            check_sum_fits(self.config, self.asked)
        return mechanism


@dataclass(frozen=True)
class Answer:
    """A client's answer: the report itself, or, over a relay, the acknowledgement that it was uploaded.

    It names its run and round, so that a late answer is not counted in another round.
    """

    run: str
    round: int
    report: bytes | None = None

    def to_record(self) -> ConfigRecord:
        """Return the answer as a Flower record."""
        record = ConfigRecord({"version": VERSION, "run": self.run, "round": self.round})
        if self.report is not None:
            record["report"] = self.report
        return record

    @classmethod
    def from_record(cls, record: ConfigRecord | None) -> Answer:
        """Return the answer in ``record``, which :meth:`to_record` made.

        Raises:
            ProtocolError: the record is None or holds no answer.
        """
        values: dict[str, Any] = dict(record or {})
        report = values.pop("report", None)
        version, run, number = values.pop("version", None), values.pop("run", None), values.pop("round", None)
        is_valid = version == VERSION and type(run) is str and type(number) is int and isinstance(report, bytes | None)
        if values or not is_valid:  # any values that remain are unknown fields
            raise ProtocolError("a node's reply holds no valid answer to the round's terms: its reply is left out")
        return cls(run, number, report)


def agreement_of(content: RecordDict, message_type: str) -> str:
    """Return the SHA-256, in hex, over everything that a message asks of a client: its type, and each record, with its arrays' bytes.

    A client that receives a different request could be recognised by its report. So the relay keeps one agreement for all clients, and
    each client compares it with the agreement of its own message.
    """
    digest = hashlib.sha256()
    for part in (message_type.encode(), *_record_bytes(content)):  # each follows its length, so that no two messages give the same bytes
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def digest_of(run_config: Mapping[str, object]) -> str:
    """Return the SHA-256, in hex, over a run config, which Flower passes to apps beside the message."""
    digest = hashlib.sha256()
    for key, value in sorted(run_config.items()):  # each part follows its length, so that no two configs give the same bytes
        part = b"%b=%b" % (repr(key).encode(), _encode_exactly(value))
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def _record_bytes(content: RecordDict) -> Iterator[bytes]:
    """Yield the records of ``content`` as bytes, sorted by name. Arrays keep their order, because an app may depend on it."""
    for name, record in sorted(content.items()):
        yield f"{type(record).__name__} {name!r} {len(record)}".encode()
        if isinstance(record, ArrayRecord):
            for key, array in record.items():
                yield repr((key, array.dtype, tuple(array.shape), array.stype)).encode()
                yield array.data
        else:
            yield from (b"%b=%b" % (repr(key).encode(), _encode_exactly(value)) for key, value in sorted(record.items()))


def _encode_exactly(value: object) -> bytes:
    """Return the type and every bit of a record's value as bytes, so that values which any program can distinguish get different bytes."""
    if isinstance(value, list):
        whole = bytearray(b"list%d:" % len(value))
        for part in map(_encode_exactly, value):  # appended one by one: a list of all parts would take much memory
            whole += len(part).to_bytes(8, "big") + part
        return bytes(whole)
    if isinstance(value, float):
        return b"float:" + struct.pack(">d", value)
    return f"{type(value).__name__}:{value!r}".encode()


def mechanism_name_in(content: RecordDict) -> str:
    """Return the name of the mechanism that a message asks for, without looking the mechanism up; "" if the message names none."""
    record = content.config_records.get(RECORD, ConfigRecord())
    text = record.get("config")
    if not isinstance(text, str) or len(text) > _MAX_CONFIG:
        return ""
    try:
        return str(from_toml(text)["mechanism"]["name"])
    except (ValueError, KeyError, TypeError):
        return ""


def deployable_mechanism(config: RunConfig, ranges: LayerRanges) -> Mechanism:
    """Return the mechanism of ``config`` as clients on Flower run it.

    Raises:
        ConfigError: the config asks for something that runs in the simulator only: early stopping, adaptive clipping with dp-sgd, or a
            setting that is computed from all clients' data. Or the mechanism's noise depends on private data, on what clients remember, or
            on the size of others' data sets, so that it has no guarantee.
    """
    if config.training.patience:
        raise ConfigError("training.patience works only in simulations: on Flower leave it out, and ask for fewer rounds")
    if config.clipping.is_adaptive and isinstance(config.mechanism, DpSgdSettings):
        # Adaptive clipping needs the share of clipped gradients, and a node sends only arrays of the model's shapes.
        raise ConfigError(
            f"clipping.target_quantile is {config.clipping.target_quantile}, which mechanism 'dp-sgd' supports in simulations but not on "
            "Flower: set clipping.target_quantile to 'off', or mechanism.name to 'dp-fedavg'"
        )
    mechanism = mechanism_of(config, ranges)
    if config.mechanism.missing_setting_message:  # a message on a setting that only simulations can compute
        raise ConfigError(config.mechanism.missing_setting_message)
    if not mechanism.properties.deployable:
        raise ConfigError(
            f"mechanism {mechanism.name!r} has no proved guarantee with these settings, so it works only in simulations: on Flower use "
            "another mechanism"
        )
    return mechanism


def check_sum_fits(config: RunConfig, asked: int) -> None:
    """Check that a sum has room for the numbers of all ``asked`` clients.

    Raises:
        ConfigError: more clients are asked than planned, and their sum could exceed its 32 or 64 bits.
    """
    max_clients = config.shuffling.max_clients or config.clients.count
    if config.shuffling.channel == "secure-sum" and asked > max_clients:
        raise ConfigError(
            f"{asked:,} nodes are asked, but the sum is planned for at most {max_clients:,}: set shuffling.max_clients to {asked} or more"
        )


@runtime_checkable
class AddingUp(Protocol):
    """Interface of mechanisms for secure sums. A report is a vector of integers that includes the client's share of the noise."""

    @property
    def bits(self) -> Bits:
        """Number of bits of a coordinate. Vectors are added modulo 2**bits."""
        ...

    def points(self, values: Tensor, ranges: LayerRanges, generator: RandomSource) -> NDArray[np.int64]:
        """Return the integer vectors (K, d) of K clients, noise included."""
        ...

    def max_sum_length(self, clients: int, asked: int, dimension: int, vector: float = 1.0) -> float:
        """Return a Euclidean length that the noisy sum of ``clients`` honest clients practically never exceeds.

        Args:
            asked: number of clients that were asked, of which these ``clients`` are a part.
            vector: maximum length of the vector that a client adds, as a multiple of the clipping norm.
        """
        ...

    def reports_from_sum(self, total: NDArray[np.int64], clients: int) -> Any:
        """Return reports that stand for ``clients`` clients, of whose vectors only the sum ``total`` (d,) is known."""
        ...


def require_adding_up(mechanism: Mechanism) -> AddingUp:
    """Return ``mechanism``, typed as one whose reports can be added up.

    Raises:
        ConfigError: its reports cannot be added up.
    """
    if not isinstance(mechanism, AddingUp):
        raise ConfigError(f"mechanism {mechanism.name!r} has reports that cannot be added up: for sums use dp-sgd or dp-fedavg")
    return mechanism


def numbers_in_sum(mechanism: Mechanism, ranges: LayerRanges) -> int:
    """Return how many integers a client adds to a sum: one for each weight, and one more with adaptive clipping.

    Raises:
        ConfigError: the mechanism's reports cannot be added up.
    """
    return payload_bits(mechanism, ranges) // require_adding_up(mechanism).bits  # `bits` for each integer


@lru_cache(maxsize=8)
def _parsed_config(text: str) -> RunConfig:
    """Return the config in the server's terms. Cached, because simulated clients share a process."""
    try:
        return parse_config(text, origin="the server's terms")
    except LdpflError as error:
        raise ProtocolError(str(error)) from None
