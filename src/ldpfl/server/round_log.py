"""The log beside the checkpoint: one line for each round's metrics, and one for each privacy event.

An evaluation at clients has a separate line, since on Flower it is made after the round's line is written.

The file only grows, so a late round costs no more to write than an early one. A checkpoint states how much of the file belongs to it
(:class:`Extent`). Later lines were written by a process that was killed before it wrote the next checkpoint, and are cut off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from hashlib import sha256
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, FiniteFloat, TypeAdapter, ValidationError

from ldpfl.errors import ConfigError
from ldpfl.privacy import Ledger
from ldpfl.privacy.events import Release, RoundEvent
from ldpfl.server.state import RoundMetrics
from ldpfl.util.files import MAX_LINE_BYTES, MAX_METRICS_BYTES, MAX_ROUNDS_BYTES, append_text, check_parts, from_json, read_text, write_text
from ldpfl.util.name_limits import MAX_NAMES
from ldpfl.util.quantities import MAX_COUNT, MAX_ROUNDS

_MEASURED_AFTER = "measured_after"
"""Key in the line of an evaluation at clients: the number of the round whose model was evaluated."""


class _AtClients(BaseModel):
    """The result of an evaluation at clients after a round.

    ``stated`` says whether ``records`` is a stated number, rather than counted. ``edges`` are those of the bins of scores.
    """

    sums: Annotated[list[float], Field(fail_fast=True)]
    noise: float
    records: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    stated: bool
    edges: Annotated[list[FiniteFloat], Field(fail_fast=True)]


_METRICS = TypeAdapter(RoundMetrics)
_MAX_BYTES = MAX_METRICS_BYTES + MAX_ROUNDS_BYTES
_FIGURE_BYTES, _ROUND_BYTES = 30, 1000
"""Maximum number of bytes of one figure of a layer, without the layer's name; and of all figures of a round that are not by layer."""


@dataclass(frozen=True)
class Extent:
    """The part of a log that belongs to a checkpoint.

    Attributes:
        metrics: number of lines that are a round's metrics.
        measured: number of lines that are an evaluation at clients.
        events: number of lines that are a privacy event.
        size: number of bytes of all these lines.
        digest: hash of all these lines. It detects accidental changes, not deliberate ones.
        last: hash of the last line of each kind. By it, a process recognises a log that it wrote itself.
    """

    metrics: int
    measured: int
    events: int
    size: int
    digest: str
    last: str

    @classmethod
    def from_json(cls, text: str) -> Extent:
        """Read the extent in a checkpoint, which may come from an untrusted file.

        Raises:
            ValueError, TypeError: ``text`` is not an extent, or states a larger log than there can be.
        """
        check_parts(text)
        extent = cls(**json.loads(text))
        numbers = (extent.metrics, extent.measured, extent.events, extent.size)
        if not all(type(number) is int and 0 <= number <= _MAX_BYTES for number in numbers):
            raise ValueError(f"the counts and the size of its log must lie between 0 and {_MAX_BYTES:,}")
        return extent


def log_path(checkpoint: Path) -> Path:
    """Return the path of the log that belongs to the ``checkpoint``."""
    return checkpoint.with_suffix(".jsonl")


def continues_extent(extent: Extent, path: Path, history: Sequence[RoundMetrics], ledger: Ledger) -> bool:
    """Return whether the log at ``path`` can be extended by the new lines of ``history`` and ``ledger``.

    It can if the file is at least as long as ``extent``, and if ``history`` and ``ledger`` begin with the lines of ``extent``. To save
    time, only the last of these lines of each kind is compared.
    """
    evaluated = _evaluated_rounds(history)
    if extent.metrics > len(history) or extent.measured > len(evaluated) or extent.events > len(ledger.events):
        return False
    if not path.is_file() or path.stat().st_size < extent.size:
        return False
    return _last_lines_digest(history[: extent.metrics], evaluated[: extent.measured], ledger.lines[: extent.events]) == extent.last


def extend_log(path: Path, old_extent: Extent | None, history: Sequence[RoundMetrics], ledger: Ledger) -> Extent:
    """Append the lines of ``history`` and ``ledger`` beyond ``old_extent`` to the log at ``path``, and flush it to disk.

    Without ``old_extent``, the log is replaced. With it, a crash leaves all lines of ``old_extent`` unchanged.

    Raises:
        WriteError: the system refuses it.
    """
    no_lines = Extent(metrics=0, measured=0, events=0, size=0, digest="", last="")
    old, evaluated = old_extent or no_lines, _evaluated_rounds(history)
    lines = [*map(_metrics_line, history[old.metrics :]), *map(_evaluation_line, evaluated[old.measured :]), *ledger.lines[old.events :]]
    text = "".join(f"{line}\n" for line in lines)
    if old_extent is None:
        write_text(path, text)
    elif text:
        append_text(path, text, old_extent.size)  # cuts off what follows the old extent
    last = _last_lines_digest(history, evaluated, ledger.lines)
    size, digest = old.size + len(text), reduce(_chained_digest, lines, old.digest)  # JSON is ASCII: one byte a character
    return Extent(len(history), len(evaluated), len(ledger.events), size, digest, last)


def read_log(path: Path, extent: Extent) -> tuple[tuple[RoundMetrics, ...], Ledger]:
    """Return the metrics and the ledger from the log at ``path``, which may be an untrusted file.

    Lines after ``extent`` are only counted. They are of rounds that were logged, but not saved in the checkpoint.

    Raises:
        OSError, ValueError, TypeError, DataError: the lines are not those of the extent, or damaged.
    """
    text = read_text(path, _MAX_BYTES, extent.size)
    check_parts(text)
    if (later := _rounds_after(path, extent)) > 1:  # a process that is killed before it writes the checkpoint leaves one round
        raise ValueError(f"{path.name} beside it has {later:,} more rounds, so this checkpoint is an old one: use the latest one")
    lines = text.split("\n")[:-1]
    if len(lines) != extent.metrics + extent.measured + extent.events or reduce(_chained_digest, lines, "") != extent.digest:
        raise ValueError(
            f"{path.name} beside it was changed, or is that of another run: copy the {path.name} back that was saved with this checkpoint"
        )
    history, events = list[RoundMetrics](), []
    for number, line in enumerate(lines, start=1):
        try:
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"{len(line):,} characters, expected at most {MAX_LINE_BYTES:,}")
            entry = from_json(line)
            if not isinstance(entry, dict):
                raise ValueError("expected a JSON object")
            # A line is a privacy event, an evaluation at clients after an earlier round, or the metrics of a round.
            if "release" in entry:
                events.append(line)
            elif _MEASURED_AFTER in entry:
                index = _index_of_round(history, entry[_MEASURED_AFTER])
                with_evaluation = {**asdict(history[index]), "at_clients": entry.get("at_clients")}
                history[index] = _parse_metrics(json.dumps(with_evaluation))  # parsed again, which checks the evaluation
            else:
                history.append(_parse_metrics(line))
        except ValueError as error:
            raise ValueError(f"{path.name} beside it, line {number:,}: {error}") from None
    return tuple(history), Ledger.from_lines(events, "its ledger")


def _rounds_after(path: Path, extent: Extent) -> int:
    """Return the number of rounds whose metrics are in the log at ``path`` after the lines of ``extent``."""
    with path.open("rb") as file:
        file.seek(extent.size)
        return len(_ROUND.findall(file.read()))


_ROUND = re.compile(rb'^\{"round": \d+, "score": ', re.MULTILINE)
"""Pattern of the start of a line of a round's metrics."""


def _parse_metrics(line: str) -> RoundMetrics:
    """Return the metrics in a ``line`` of the log, which may be untrusted. Raise a ValueError that names the first wrong figure."""
    try:
        metrics = _METRICS.validate_json(line, strict=True)
        if not all(0 <= count <= MAX_COUNT for count in (metrics.round, metrics.clients, metrics.uplink_bytes_per_client)):
            raise ValueError(f"round, clients and uplink_bytes_per_client in a round's metrics lie between 0 and {MAX_COUNT:,}")
        if metrics.at_clients is not None:
            _AtClients.model_validate(metrics.at_clients, strict=True)
        return metrics
    except ValidationError as error:  # its text is long, and repeats values
        first_error = error.errors(include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first_error['loc']))[:80]} in a round's metrics: {first_error['msg'][:80]}") from None


def check_log_size(layers: Sequence[str], release: Release, rounds: int) -> None:
    """Raise if a run of ``rounds`` rounds, of a model with these ``layers``, would write files that are too large to be read again.

    ``release`` is what a client's report of a round releases; the ledger repeats it for each round.

    Raises:
        ConfigError: the files would be too large.
    """
    layer_bytes = sum(len(json.dumps(name)) + _FIGURE_BYTES for name in layers)
    round_bytes = _ROUND_BYTES + 3 * layer_bytes  # RoundMetrics has three figures by layer
    event = RoundEvent(MAX_ROUNDS, release, 10**9, 10**9, MAX_ROUNDS)  # no real round needs more digits
    event_bytes = len(Ledger((event,)).to_json())
    if round_bytes > MAX_LINE_BYTES or len(layers) > MAX_NAMES:
        raise ConfigError(
            f"the model has {len(layers):,} layers, whose figures take up to {round_bytes:,} bytes a round: at most {MAX_NAMES:,} "
            f"layers and {MAX_LINE_BYTES:,} bytes can be read again, so take a model with fewer layers"
        )
    limit = min(MAX_ROUNDS, MAX_METRICS_BYTES // round_bytes, MAX_ROUNDS_BYTES // event_bytes)
    if rounds > limit:
        raise ConfigError(
            f"training.rounds is {rounds:,}, but with {len(layers):,} layers the run's files would be too large to read after "
            f"{limit:,} rounds: set training.rounds to {limit:,} or less, or take a model with fewer layers"
        )


def _metrics_line(metrics: RoundMetrics) -> str:
    """Return the line of a round's metrics. An evaluation at clients has its own line."""
    return json.dumps(asdict(replace(metrics, at_clients=None)))


def _evaluated_rounds(history: Sequence[RoundMetrics]) -> list[RoundMetrics]:
    """Return the metrics of the rounds after which clients evaluated the model."""
    return [metrics for metrics in history if metrics.at_clients is not None]


def _evaluation_line(metrics: RoundMetrics) -> str:
    """Return the line of the evaluation at clients after a round."""
    return json.dumps({_MEASURED_AFTER: metrics.round, "at_clients": metrics.at_clients})


def _index_of_round(history: Sequence[RoundMetrics], number: object) -> int:
    """Return the index in ``history`` of the round ``number``. The search starts at the end, since the round is one of the last."""
    for index in range(len(history) - 1, -1, -1):
        if history[index].round == number:
            return index
    raise ValueError("it has an evaluation at clients after a round that is not in the log")


def _chained_digest(digest: str, line: str) -> str:
    """Return the hash of all lines up to ``line``, from the hash ``digest`` of the lines before."""
    return sha256(f"{digest}{line}".encode()).hexdigest()


def _last_lines_digest(history: Sequence[RoundMetrics], evaluated: Sequence[RoundMetrics], events: Sequence[str]) -> str:
    """Return one hash of the last line of each kind, which an :class:`Extent` stores as ``last``."""
    return reduce(_chained_digest, [*map(_metrics_line, history[-1:]), *map(_evaluation_line, evaluated[-1:]), *events[-1:]], "")
