"""What a run needs to go on after a crash, in one file: the server's state and the metrics so far."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ldpfl.errors import DataError, LdpflError
from ldpfl.files import check_regular, replace_atomically
from ldpfl.privacy import Ledger
from ldpfl.randomness import WORDS
from ldpfl.ranges import LayerRanges
from ldpfl.server.round_metrics import RoundMetrics
from ldpfl.server.state import ServerState

_MEMORY = "memory."
_CARRIED = ("previous", "velocity", "average", "size", "best")
"""Parts of the server's state that need not be there."""


@dataclass(frozen=True)
class Checkpoint:
    """The server's state after a round, the metrics of all rounds so far, and what they released.

    Random streams need no place here: they follow from the seed and the round. The state is public; the metrics hold
    ``clipped_fraction`` and the like, and ``memory`` what clients remember, which only a simulation can know.

    Attributes:
        origin: names the data and the device, so that a run is not resumed on others.
        memory: for mechanisms whose clients remember something, by name, a row a client.
        words: how the seeded random words of its rounds were made.
    """

    state: ServerState
    history: tuple[RoundMetrics, ...]
    origin: str = ""
    ledger: Ledger = field(default_factory=Ledger)
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    words: str = WORDS

    def save(self, path: Path) -> None:
        """Write to ``path`` so that a crash leaves this checkpoint or the one before."""
        tensors = {
            "weights": self.state.weights.contiguous(),
            "center": self.state.ranges.center,
            "radius": self.state.ranges.radius,
            # After a round that nobody joined, it is the same tensor as the weights, which a file refuses.
            **{name: tensor.clone().contiguous() for name in _CARRIED if (tensor := getattr(self.state, name)) is not None},
            **{f"{_MEMORY}{name}": rows.contiguous() for name, rows in self.memory.items()},
        }
        metadata = {
            "round": str(self.state.round),
            "sizes": json.dumps(self.state.ranges.sizes),
            "origin": self.origin,
            "words": self.words,
            "ledger": self.ledger.to_json(),
            "history": json.dumps([asdict(metrics) for metrics in self.history]),
        }
        with replace_atomically(path) as temporary:
            save_file(tensors, temporary, metadata)

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """Read a checkpoint.

        Raises:
            DataError: the file is damaged.
        """
        try:
            check_regular(path)
            with safe_open(path, framework="pt") as handle:
                metadata = handle.metadata()
                tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118  # it is no dict
            ranges = LayerRanges(tensors["center"], tensors["radius"], tuple(json.loads(metadata["sizes"])))
            history = tuple(RoundMetrics(**entry) for entry in json.loads(metadata["history"]))
            origin, words = metadata["origin"], metadata.get("words", "")
            ledger = Ledger.from_json(metadata["ledger"], "its ledger")
            state = ServerState(
                int(metadata["round"]), tensors["weights"].to(torch.float32), ranges, **{name: tensors.get(name) for name in _CARRIED}
            )
            memory = {name.removeprefix(_MEMORY): rows for name, rows in tensors.items() if name.startswith(_MEMORY)}
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, LdpflError) as error:
            raise DataError(f"checkpoint {path} is damaged: {error}") from error
        return cls(state, history, origin, ledger, memory, words)


def initial_checkpoint(weights: Tensor, ranges: LayerRanges, origin: str = "", ledger: Ledger | None = None) -> Checkpoint:
    """Return the state before the first round; ``origin`` names the data and the device, ``ledger`` what was released by then."""
    return Checkpoint(ServerState(0, weights, ranges), (), origin, ledger or Ledger())
