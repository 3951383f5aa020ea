"""Checkpoints for resuming a run: the server's state in one file, and a log of all rounds so far beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ldpfl.errors import DataError, LdpflError
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.privacy import Ledger
from ldpfl.server.round_log import Extent, continues_extent, extend_log, log_path, read_log
from ldpfl.server.state import RoundMetrics, ServerState
from ldpfl.util.files import check_parts, check_regular, replace_atomically, writing
from ldpfl.util.quantities import MAX_ROUNDS
from ldpfl.util.randomness import WORDS

_LOG = "log"
_MEMORY = "memory."
_MEMORY_DTYPES = ("F32", "F64")
"""Key of the log's :class:`Extent`; prefix of the names of tensors that clients remember, and the types of these tensors."""
_MAX_SHOWN = 200
"""Maximum number of characters of a name or a reason in a message, which may repeat text of an untrusted file."""

_OPTIONAL = ("previous", "velocity", "average", "size", "best")
"""Tensors of the server's state that may be None."""


@dataclass(frozen=True)
class Checkpoint:
    """The server's state after a round, the metrics of all rounds so far, and what they released.

    Random streams are not saved, since they follow from the seed and the round. The state is public. Some metrics, such as
    ``clipped_fraction``, and the clients' ``memory`` are known only to a simulation.

    Attributes:
        origin: data and device of the run, as text. A run is not resumed with another origin.
        memory: what clients remember, for mechanisms that need it: tensors by name, with one row for each client.
        personal: (N, p) values of the clients' personal layers; None if the model has none. They are un-noised values that only a
            simulation knows. :meth:`save` leaves them out.
        words: version of the generator of seeded random words that the rounds used.
    """

    state: ServerState
    history: tuple[RoundMetrics, ...]
    origin: str = ""
    ledger: Ledger = field(default_factory=Ledger)
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    words: str = WORDS
    personal: Tensor | None = None

    def save(self, path: Path) -> None:
        """Write the checkpoint to ``path``. A crash leaves either this checkpoint or the one before, each with its lines of the log.

        A checkpoint at ``path`` that this one does not continue, such as one of another run, is removed first. Then a crash may leave no
        checkpoint.

        Raises:
            WriteError: the system refuses it.
        """
        # If this checkpoint continues the old one, only the new lines are appended to the log, so that a late round costs no more than an
        # early one. Otherwise the log is written anew.
        log, old_extent = log_path(path), _extent_at(path)
        if old_extent is not None and not continues_extent(old_extent, log, self.history, self.ledger):
            old_extent = None
        if old_extent is None:
            with writing(path):
                path.unlink(missing_ok=True)
        # The log first: after a crash here, the checkpoint before still finds its own lines, and ignores the new ones.
        extent = extend_log(log, old_extent, self.history, self.ledger)
        metadata = {
            "round": str(self.state.round),
            "sizes": json.dumps(self.state.ranges.sizes),
            "origin": self.origin,
            "words": self.words,
            _LOG: json.dumps(asdict(extent)),
        }
        with replace_atomically(path) as temporary:
            save_file(self._tensors(), temporary, metadata)

    def _tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a file of the checkpoint holds, by name."""
        return {
            "weights": self.state.weights.contiguous(),
            "center": self.state.ranges.center,
            "radius": self.state.ranges.radius,
            # Cloned, since "previous" is the same tensor as the weights after an empty round, and safetensors refuses shared memory.
            **{name: tensor.clone().contiguous() for name in _OPTIONAL if (tensor := getattr(self.state, name)) is not None},
            **{f"{_MEMORY}{name}": rows.contiguous() for name, rows in self.memory.items()},
        }

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """Read a checkpoint. Its ``personal`` is None, because :meth:`save` leaves these values out.

        Raises:
            DataError: the file is damaged, or its log is missing.
        """
        if path.exists() and not log_path(path).exists():
            raise DataError(f"{log_path(path)} is missing, but the checkpoint {path.name} needs it: copy both files, or start the run anew")
        try:
            check_regular(path)
            with safe_open(path, framework="pt") as handle:
                metadata = handle.metadata()
                sizes = _parse_list(metadata, "sizes")
                # Only headers are read until the shapes are checked, since a small file may claim billions of values.
                slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118  # it is no dict
                _check_headers({name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}, sizes)
                tensors = {name: handle.get_tensor(name) for name in slices}
            ranges = LayerRanges(tensors["center"], tensors["radius"], sizes)
            history, ledger = read_log(log_path(path), Extent.from_json(metadata[_LOG]))
            origin, words = metadata["origin"], metadata.get("words", "")  # files of earlier versions state no generator of words
            state = ServerState(_parse_round(metadata), tensors["weights"], ranges, **{name: tensors.get(name) for name in _OPTIONAL})
            memory = {name.removeprefix(_MEMORY): rows for name, rows in tensors.items() if name.startswith(_MEMORY)}
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError, LdpflError) as error:
            raise DataError(f"checkpoint {path} is damaged: {str(error)[:_MAX_SHOWN]}") from error
        return cls(state, history, origin, ledger, memory, words)


def _extent_at(path: Path) -> Extent | None:
    """Return which part of the log belongs to the checkpoint at ``path``, or None if that checkpoint is missing or damaged."""
    try:
        check_regular(path)
        with safe_open(path, framework="pt") as handle:
            return Extent.from_json(handle.metadata()[_LOG])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError):
        return None


def _parse_list(metadata: Mapping[str, str], name: str) -> list[Any]:
    """Return the list ``name`` from a checkpoint's metadata, which may come from an untrusted file.

    Raises:
        KeyError, ValueError: the entry is missing, is not a list, or is larger than in any real checkpoint.
    """
    check_parts(metadata[name])
    value = json.loads(metadata[name])
    if not isinstance(value, list):
        raise ValueError(f"its field {name} is not a list, but a {type(value).__name__}")
    return value


def _parse_round(metadata: Mapping[str, str]) -> int:
    """Return the number of completed rounds from a checkpoint's metadata, which may come from an untrusted file."""
    number = int(metadata["round"])
    if not 0 <= number <= MAX_ROUNDS:
        raise ValueError(f"it is of round {number}, expected 0 to {MAX_ROUNDS:,}")
    return number


def _check_headers(headers: Mapping[str, tuple[str, list[int]]], sizes: Sequence[Any]) -> None:
    """Raise if the tensors in a file do not fit the layers' ``sizes``.

    ``headers`` has the type and the shape of each tensor, from the file's header.

    Raises:
        ValueError: a tensor is missing, unknown, or of another type or shape.
    """
    if not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError("its field sizes must hold a positive whole number for each layer")
    one_per_layer, one_per_weight = ("F64", [len(sizes)]), ("F32", [sum(sizes)])
    expected = {"center": one_per_layer, "radius": one_per_layer, "weights": one_per_weight, **dict.fromkeys(_OPTIONAL, one_per_weight)}
    missing = expected.keys() - headers.keys() - set(_OPTIONAL)
    if missing:
        raise ValueError(f"it lacks the tensor {min(missing)!r}: take the file from a backup, or start the run anew")
    for name, (dtype, shape) in headers.items():
        if name.startswith(_MEMORY) and dtype in _MEMORY_DTYPES:  # what clients remember; the code that uses it checks its shapes
            continue
        if (dtype, shape) != expected.get(name):
            expectation = "no tensor of this name" if name not in expected else "{} of shape {}".format(*expected[name])
            raise ValueError(f"expected {expectation}, found {name[:_MAX_SHOWN]!r}, {dtype} of shape {shape[:4]}")


def initial_checkpoint(weights: Tensor, ranges: LayerRanges, origin: str = "", ledger: Ledger | None = None) -> Checkpoint:
    """Return the checkpoint before the first round.

    Args:
        weights: (d,) initial weights.
        ranges: clipping ranges of the first round.
        origin: data and device of the run, as text. A run is not resumed with another origin.
        ledger: events that were released before the first round, such as histograms.
    """
    return Checkpoint(ServerState(round=0, weights=weights, ranges=ranges), history=(), origin=origin, ledger=ledger or Ledger())
