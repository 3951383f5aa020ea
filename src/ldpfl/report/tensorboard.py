"""A run's figures for TensorBoard, written round by round into a folder beside its own files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ldpfl.errors import ConfigError
from ldpfl.privacy.guarantee import IF_TRUSTED, Statement
from ldpfl.server import RoundMetrics
from ldpfl.util.number_format import number

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"
"""Where a run's folder keeps them."""


class Board:
    """Writes each round's score, clients, seconds, and by layer the noise, the radius and what was clipped; at the end what is guaranteed.

    Nothing is made before the first round is done: until then a run's folder may be refused.
    """

    def __init__(self, folder: Path, metric: str) -> None:
        self._folder, self._metric = folder, metric
        self._writer: SummaryWriter | None = None

    def round_done(self, metrics: RoundMetrics) -> None:
        writer = self._open()
        figures = {self._metric: metrics.score, "clients": float(metrics.clients), "seconds": metrics.seconds}
        by_layer: dict[str, Mapping[str, float]] = {
            "noise std": metrics.noise_std,
            "radius": metrics.radius,
            "clipped": metrics.clipped_fraction,
        }
        figures |= {f"{kind}/{layer}": value for kind, layers in by_layer.items() for layer, value in layers.items()}
        for name, value in figures.items():
            writer.add_scalar(name, value, metrics.round)
        writer.flush()

    def guaranteed(self, privacy: Statement, rounds: int) -> None:
        """Write the privacy guarantee after ``rounds`` rounds, as text."""
        self._open().add_text("privacy", _guaranteed(privacy), rounds)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = self._writer or SummaryWriter(self._folder)
        return self._writer


@contextmanager
def board(run_folder: Path, metric: str) -> Iterator[Board]:
    """Give a board for the run in ``run_folder``, whose models are judged by ``metric``.

    Raises:
        ConfigError: TensorBoard is not installed.
    """
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise ConfigError("--tensorboard needs TensorBoard: pip install 'ldpfl[tensorboard]'") from error
    opened = Board(run_folder / FOLDER, metric)
    try:
        yield opened
    finally:
        opened.close()


def _guaranteed(privacy: Statement) -> str:
    """Return what a run guarantees, a line for each kind of trust."""
    lines = [privacy.verdict or "Nothing is protected: values leave as they are."]
    for row in filter(None, (privacy.find("local", "run"), privacy.find("hidden", "run"))):
        epsilon, trusted = number(row.epsilon), IF_TRUSTED[row.trust_model]
        lines.append(f"epsilon {epsilon} at delta {privacy.delta:g} for the whole run of a {privacy.protected}, {trusted}")
    return "\n\n".join(lines)
