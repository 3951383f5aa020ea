"""A run's folder: everything in it can be read, re-run and resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors.torch import save_file

from ldpfl.errors import ConfigError, DataError
from ldpfl.experiments.config import RunConfig, read_config
from ldpfl.files import remove_leftovers, replace_atomically, write_text
from ldpfl.layout import ParameterLayout
from ldpfl.simulation import Checkpoint


@dataclass(frozen=True)
class RunFolder:
    """Names and writes the files of one run; each is replaced atomically.

    ``config.toml`` (complete, re-runnable), ``checkpoint.safetensors`` (after each round), ``metrics.jsonl`` (a line a
    round), and at the end ``model.safetensors``, ``result.json`` and ``curve.svg``.
    """

    path: Path

    @property
    def config_path(self) -> Path:
        return self.path / "config.toml"

    @property
    def checkpoint_path(self) -> Path:
        return self.path / "checkpoint.safetensors"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def model_path(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def result_path(self) -> Path:
        return self.path / "result.json"

    @property
    def curve_path(self) -> Path:
        return self.path / "curve.svg"

    def open(self, config: RunConfig, *, resume: bool) -> None:
        """Make the folder ready for ``config``; with ``resume``, one that was never begun is begun.

        Raises:
            ConfigError: the folder holds something else, or a run of another config; nothing is written then.
        """
        if not resume or not self.config_path.exists():
            self._create(config)
            return
        stored = self.config()
        differences = stored.differences(config)
        if differences:
            raise ConfigError(f"{self.path} holds a run of another config, so it cannot be resumed; {'; '.join(differences)}")

    def _create(self, config: RunConfig) -> None:
        if self.path.exists() and (not self.path.is_dir() or any(not entry.name.startswith(".") for entry in self.path.iterdir())):
            advice = "give --resume to go on with it, or another --out" if self.config_path.exists() else "give another --out"
            raise ConfigError(f"output folder {self.path} is not empty: {advice}")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_text(self.config_path, config.to_toml())
        except OSError as error:
            raise ConfigError(f"output folder {self.path} cannot be written: {error}") from error

    @contextmanager
    def locked(self, *, wait: bool = False) -> Iterator[None]:
        """Keep a second process from working in the folder; with ``wait``, wait until it has finished.

        Raises:
            ConfigError: another process is at work in it.
        """
        lock = FileLock(self.path / _LOCK)
        try:
            lock.acquire(timeout=-1 if wait else 0)
        except Timeout:
            raise ConfigError(f"another process is working in {self.path}") from None
        try:
            remove_leftovers(self.path)
            yield
        finally:
            lock.release()

    def config(self) -> RunConfig:
        """Return the config that the run was started with."""
        if not self.config_path.exists():
            raise ConfigError(f"{self.path} holds no run: {self.config_path.name} is missing")
        return read_config(self.config_path)

    def checkpoint(self) -> Checkpoint | None:
        """Return the last checkpoint, if a round was finished."""
        return Checkpoint.load(self.checkpoint_path) if self.checkpoint_path.exists() else None

    def result(self) -> dict[str, Any] | None:
        """Return the figures of a finished run, if it is finished."""
        if not self.result_path.exists():
            return None
        try:
            return dict(json.loads(self.result_path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise DataError(f"{self.result_path} is damaged: {error}") from error

    def save_round(self, checkpoint: Checkpoint) -> None:
        """Record a finished round. The checkpoint comes first: the metrics can be written again from it."""
        checkpoint.save(self.checkpoint_path)
        self._save_metrics(checkpoint)

    def save_result(self, checkpoint: Checkpoint, layout: ParameterLayout, result: dict[str, Any]) -> None:
        """Record the end of a run. ``result.json`` comes last: where it stands, all the others do."""
        self._save_metrics(checkpoint)
        tensors = {name: value.clone() for name, value in layout.unflatten(checkpoint.state.weights).items()}
        with replace_atomically(self.model_path) as temporary:
            save_file(tensors, temporary)
        write_text(self.result_path, json.dumps(result, indent=2) + "\n")

    def _save_metrics(self, checkpoint: Checkpoint) -> None:
        lines = (json.dumps(metrics.reproducible()) + "\n" for metrics in checkpoint.history)
        write_text(self.metrics_path, "".join(lines))


_LOCK = ".lock"
