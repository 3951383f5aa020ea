"""What the server asks of a client in a round, and how a client answers: the two ConfigRecords on Flower's wire."""

from __future__ import annotations

import hashlib
import struct
import tomllib
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
from ldpfl.flower.round_kinds import Kind, PlannedRound, config_for, planned_round
from ldpfl.flower.wire import MAX_LAYERS, LayerFloats, LayerNames, WireFields
from ldpfl.mechanisms import Mechanism
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.models.layout import ParameterLayout
from ldpfl.privacy.policy import UPLOAD_S, Transport
from ldpfl.relay.protocol import run_of
from ldpfl.transport.sums import Bits
from ldpfl.util.randomness import RandomSource

ARRAYS, CONFIG = "arrays", "config"
"""Names of the records that apps find in a message, as with Flower's FedAvg."""

RECORD = "ldpfl"
"""Name of both records."""

VERSION = 5
SHORTEST_REPLY_S, _LONGEST_REPLY_S = 1.0, 7 * 24 * 3600.0
"""Of a stated time for replies; in less than a second, taking the report would show."""

_LONGEST_MEASURED = 1 << 21
"""Characters of what was measured of columns; those of 400 columns take 200,000."""

_LONGEST_CONFIG = 1 << 17
"""Characters of a config; the largest recipe has some 2,000, and bounds of 400 columns take 18,000."""


def check_window(window_s: float, reply_s: float, *, fewest: int, asked: int) -> None:
    """Return if a relay's window leaves clients that send after ``reply_s`` seconds the time to upload.

    A round that cannot end without all clients that are ``asked`` is open for longer than its window.

    Raises:
        ConfigError: it does not.
    """
    if reply_s and window_s < reply_s + UPLOAD_S and fewest < asked:
        raise ConfigError(
            f"the relay's window is {window_s:g} s, and clients reply after {reply_s:g} s and need up to {UPLOAD_S:g} s for the upload: "
            f"make the window at least {reply_s + UPLOAD_S:g} s (window_s, ldpfl.window-s)"
        )


class _Wire(WireFields):
    """The fields of the server's terms, as they are on the wire."""

    version: int
    run: str
    round: PositiveInt
    kind: Kind
    size: PositiveInt
    measured: Annotated[str, Field(max_length=_LONGEST_MEASURED)]
    config: Annotated[str, Field(max_length=_LONGEST_CONFIG)]
    layers: LayerNames
    center: LayerFloats
    radius: LayerFloats
    asked: PositiveInt
    transport: Transport
    key: bytes
    linked: PositiveInt
    reply_s: Annotated[float, Field(ge=0, le=_LONGEST_REPLY_S, allow_inf_nan=False)]
    run_config: str

    @field_validator("reply_s")
    @classmethod
    def _can_be_kept(cls, seconds: float) -> float:
        if 0 < seconds < SHORTEST_REPLY_S:
            raise ValueError(f"a time for replies is 0 or at least {SHORTEST_REPLY_S:g} s")
        return seconds


@dataclass(frozen=True, eq=False)
class RoundTerms:
    """What the server asks for in one round. A client takes nothing of it on trust: its policy judges what it would release.

    Attributes:
        run: names the run, the same over all rounds and resumes.
        round: number of the round, from 1; rounds of all kinds are numbered together.
        kind: what is asked for. It follows from ``config`` and ``round``, and :attr:`planned` compares.
        size: length of the vector that is asked for.
        config: mechanism, noise and what they depend on.
        layers: names, in the order of the flat vector.
        center, radius: public ranges, by layer.
        asked: clients that were asked.
        transport: ``direct``, the report is in the Flower reply; ``relay``, it goes there sealed, and the reply acknowledges.
        key: the aggregator's public key, for ``relay``.
        linked: units that stay together in the relay.
        reply_s: seconds after the charge at which every client replies; 0 is as soon as it can, which tells how long it trained.
        run_config: digest of the run config that every client has, see :func:`digest_of`.
        measured: what was measured of tables' columns so far, see :mod:`ldpfl.flower.statistics`; empty where nothing is measured. In
            rounds for statistics, edges of the histograms that are asked for; later, how nodes scale their columns.
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

    def to_record(self) -> ConfigRecord:
        """Return the terms as Flower carries them.

        Raises:
            ConfigError: they are longer than a node reads.
        """
        config = self.config.to_toml()
        if len(config) > _LONGEST_CONFIG or len(self.layers) > MAX_LAYERS:
            raise ConfigError(
                f"nodes read configs of {_LONGEST_CONFIG:,} characters and models of {MAX_LAYERS:,} layers at most, and these have "
                f"{len(config):,} and {len(self.layers):,}: name fewer columns, or join layers"
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
                "transport": self.transport,
                "key": self.key,
                "linked": self.linked,
                "reply-s": self.reply_s,
                "run-config": self.run_config,
            }
        )

    @classmethod
    def from_record(cls, record: ConfigRecord) -> RoundTerms:
        """Read what :meth:`to_record` wrote.

        Raises:
            ProtocolError: a field is missing, unknown, or of another kind; OtherVersion, if the terms are of another version.
        """
        version = record.get("version")
        if version != VERSION:
            found = version if type(version) is int else "(no number)"
            raise OtherVersion(
                f"the server's terms are of version {found}, and this ldpfl reads version {VERSION}: install the version of ldpfl that the "
                "server has; nothing was sent"
            )
        wire = _Wire.of(record, "the server's terms")
        run_of(wire.run)  # it becomes part of a path at the relay
        return cls(
            run=wire.run,
            round=wire.round,
            kind=wire.kind,
            size=wire.size,
            measured=wire.measured,
            config=_parsed(wire.config),
            layers=tuple(wire.layers),
            center=tuple(wire.center),
            radius=tuple(wire.radius),
            asked=wire.asked,
            transport=wire.transport,
            key=wire.key,
            linked=wire.linked,
            reply_s=wire.reply_s,
            run_config=wire.run_config,
        )

    def ranges(self, layout: ParameterLayout) -> LayerRanges:
        """Return the ranges for arrays of ``layout``.

        Raises:
            ProtocolError: the ranges are for other layers, or are no ranges.
        """
        if self.layers != layout.names or not len(self.layers) == len(self.center) == len(self.radius):
            raise ProtocolError("the server's ranges are not for the layers that it sent")
        try:
            # Without the dtype these would pass through float32, and clients would clamp to other ranges than the server's.
            center, radius = (torch.tensor(figures, dtype=torch.float64) for figures in (self.center, self.radius))
            return LayerRanges(center, radius, layout.sizes)
        except ConfigError as error:
            raise ProtocolError(f"the server's ranges cannot be used: {error}") from None

    @property
    def planned(self) -> PlannedRound:
        """The round that the config has in this place.

        Raises:
            AskedForOther: the server asks for something else.
        """
        planned = planned_round(self.config, self.round)
        if planned.kind != self.kind:
            raise AskedForOther(f"round {self.round} asks for {self.kind}, and its config plans {planned.kind} there; nothing was sent")
        return planned

    def mechanism(self, ranges: LayerRanges) -> Mechanism:
        """Return the mechanism that protects what the server asks for.

        Args:
            ranges: those of the vector that is asked for, see :func:`ldpfl.flower.sent_vectors.sent_in`.

        Raises:
            ProtocolError: what it sends does not go with the way that it is to leave by.
        """
        summed = self.config.shuffling.channel == "secure-sum"
        if summed != (self.transport == "sum"):
            raise ProtocolError(f"the server's terms have the channel {self.config.shuffling.channel!r} and reports by {self.transport!r}")
        mechanism = deployable_mechanism(config_for(self.config, self.kind), ranges)
        if summed:
            adding_up(mechanism)
            check_sum_fits(self.config, self.asked)
        return mechanism


@dataclass(frozen=True)
class Answer:
    """A client's answer: the report itself, or, over a relay, that there is one.

    It says which run and round it is for, so that one that comes late is not counted in another round.
    """

    run: str
    round: int
    report: bytes | None = None

    def to_record(self) -> ConfigRecord:
        """Return the answer as Flower carries it."""
        record = ConfigRecord({"version": VERSION, "run": self.run, "round": self.round})
        if self.report is not None:
            record["report"] = self.report
        return record

    @classmethod
    def from_record(cls, record: ConfigRecord | None) -> Answer:
        """Read what :meth:`to_record` wrote.

        Raises:
            ProtocolError: it is something else.
        """
        values: dict[str, Any] = dict(record or {})
        report = values.pop("report", None)
        version, run, number = values.pop("version", None), values.pop("run", None), values.pop("round", None)
        fits = version == VERSION and type(run) is str and type(number) is int and isinstance(report, bytes | None)
        if values or not fits:
            raise ProtocolError("a reply does not hold an answer to the round's terms")
        return cls(run, number, report)


def agreement_of(content: RecordDict, message_type: str) -> str:
    """Return the SHA-256, in hex, over all that a message asks of a client: its type, and each record with its arrays' shapes and bytes.

    Whoever is asked for anything else than the others could be told apart by what it sends. So the relay keeps this, the same for
    all, and each client compares it with that of its own message.
    """
    digest = hashlib.sha256()
    for part in (message_type.encode(), *_parts(content)):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def digest_of(run_config: Mapping[str, object]) -> str:
    """Return the SHA-256, in hex, over a run config, which Flower hands to apps beside the message."""
    digest = hashlib.sha256()
    for key, value in sorted(run_config.items()):
        part = b"%b=%b" % (repr(key).encode(), _exactly(value))
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def _parts(content: RecordDict) -> Iterator[bytes]:
    """Yield the records in the order of their names; arrays stay in theirs, which an app may go by."""
    for name, record in sorted(content.items()):
        yield f"{type(record).__name__} {name!r} {len(record)}".encode()
        if isinstance(record, ArrayRecord):
            for key, array in record.items():
                yield repr((key, array.dtype, tuple(array.shape), array.stype)).encode()
                yield array.data
        else:
            yield from (b"%b=%b" % (repr(key).encode(), _exactly(value)) for key, value in sorted(record.items()))


def _exactly(value: object) -> bytes:
    """Return the kind and every bit of a value of a record: two are the same only if no program can tell them apart."""
    if isinstance(value, list):
        whole = bytearray(b"list%d:" % len(value))
        for part in map(_exactly, value):  # joined at once, each part of a long list would be in memory as an object
            whole += len(part).to_bytes(8, "big") + part
        return bytes(whole)
    if isinstance(value, float):
        return b"float:" + struct.pack(">d", value)
    return f"{type(value).__name__}:{value!r}".encode()


def mechanism_named(content: RecordDict) -> str:
    """Return the name of the mechanism that a message asks for, without looking it up; empty where it cannot be read."""
    record = content.config_records.get(RECORD, ConfigRecord())
    text = record.get("config")
    if not isinstance(text, str) or len(text) > _LONGEST_CONFIG:
        return ""
    try:
        return str(tomllib.loads(text)["mechanism"]["name"])
    except (ValueError, RecursionError, KeyError, TypeError):  # a number of thousands of digits is a ValueError
        return ""


def deployable_mechanism(config: RunConfig, ranges: LayerRanges) -> Mechanism:
    """Return the mechanism of ``config`` as clients on Flower run it.

    Raises:
        ConfigError: its noise depends on private data, on what clients remember, or on the size of others' data sets: such
            schedules have no guarantee, and run in the simulator only. Or the run is to stop early.
    """
    if config.training.patience:
        raise ConfigError("training.patience stops simulations: on Flower leave it out, and ask for fewer rounds")
    mechanism = mechanism_of(config, ranges)
    if config.mechanism.unsaid:
        raise ConfigError(config.mechanism.unsaid)
    if not mechanism.properties.deployable:
        raise ConfigError(f"mechanism {mechanism.name!r} has no proved guarantee with these settings: it runs in the simulator only")
    return mechanism


def check_sum_fits(config: RunConfig, asked: int) -> None:
    """Check that no more clients are asked for their part of a sum than the sum's numbers were made for.

    Raises:
        ConfigError: more are asked, and their sum could exceed its 32 or 64 bits.
    """
    most = config.shuffling.max_clients or config.clients.count
    if config.shuffling.channel == "secure-sum" and asked > most:
        said = f"{asked:,} nodes are asked, and a sum of at most {most:,} was planned"
        raise ConfigError(f"{said}: set shuffling.max_clients to {asked} or more")


@runtime_checkable
class AddingUp(Protocol):
    """What mechanisms offer whose reports are points of a lattice, with a share of the noise in them, that a sum is taken over."""

    @property
    def bits(self) -> Bits:
        """Number of bits of a coordinate: points are added up modulo 2 to the power of it."""
        ...

    def points(self, values: Tensor, ranges: LayerRanges, generator: RandomSource) -> NDArray[np.int64]:
        """Return the (K, d) points of the clients, noise included."""
        ...

    def longest_sum(self, clients: int, asked: int, dimension: int, vector: float = 1.0) -> float:
        """Return the length that a sum over ``clients`` of the ``asked`` has at most if all are honest.

        Args:
            vector: length of the longest vector that a client adds up, in clipping norms.
        """
        ...

    def sum_of(self, total: NDArray[np.int64], clients: int) -> Any:
        """Return the reports of ``clients`` of whose points only the ``total`` (d,) is known."""
        ...


def adding_up(mechanism: Mechanism) -> AddingUp:
    """Return ``mechanism`` as one whose reports can be added up.

    Raises:
        ConfigError: they cannot.
    """
    if not isinstance(mechanism, AddingUp):
        raise ConfigError(f"mechanism {mechanism.name!r} sends nothing that could be added up: for sums use dp-sgd or dp-fedavg")
    return mechanism


@lru_cache(maxsize=8)
def _parsed(text: str) -> RunConfig:
    try:
        return parse_config(text, origin="the server's terms")
    except LdpflError as error:
        raise ProtocolError(str(error)) from None
