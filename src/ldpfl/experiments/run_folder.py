"""A run's folder: everything in it can be read, re-run and resumed."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors.torch import save_file

from ldpfl.errors import ConfigError, DataError, LdpflError
from ldpfl.experiments.config import RunConfig, read_config
from ldpfl.files import remove_leftovers, replace_atomically, write_text
from ldpfl.privacy import Ledger
from ldpfl.simulation import Checkpoint, LocalTask


def _is_ours(name: str) -> bool:
    """Tell whether a file is the lock, or what a killed process left of the first config."""
    return name == _LOCK or name.startswith(".config.toml.")


@dataclass(frozen=True)
class RunFolder:
    """Names and writes the files of one run; each is replaced atomically.

    ``config.toml`` (complete, re-runnable), ``checkpoint.safetensors`` (after each round), ``metrics.jsonl`` and
    ``ledger.json`` (a line a round), and at the end ``model.safetensors``, ``result.json`` and ``curve.svg``.
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
    def ledger_path(self) -> Path:
        return self.path / "ledger.json"

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
        self.check(config, resume=resume)
        if resume and self.config_path.exists():
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_text(self.config_path, config.to_toml())
        except OSError as error:
            raise ConfigError(f"output folder {self.path} cannot be written: {error}") from error

    def check(self, config: RunConfig, *, resume: bool) -> None:
        """Do what :meth:`open` checks, and touch nothing."""
        if resume and self.config_path.exists():
            differences = self.config().differences(config)
            if differences:
                raise ConfigError(f"{self.path} holds a run of another config, so it cannot be resumed; {'; '.join(differences)}")
            return
        if self.path.exists() and (not self.path.is_dir() or any(not _is_ours(entry.name) for entry in self.path.iterdir())):
            advice = "give --resume to go on with it, or another --out" if self.config_path.exists() else "give another --out"
            raise ConfigError(f"output folder {self.path} is not empty: {advice}")

    @contextmanager
    def locked(self, *, wait: bool = False) -> Iterator[None]:
        """Keep a second process from working in the folder; with ``wait``, wait until it has finished.

        Raises:
            ConfigError: another process is at work in it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path / _LOCK)
            lock.acquire(timeout=-1 if wait else 0)
        except Timeout:
            raise ConfigError(f"another process is working in {self.path}") from None
        except OSError as error:
            raise ConfigError(f"folder {self.path} cannot be written: {error}") from error
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
            result = json.loads(self.result_path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{self.result_path} is damaged: {error}") from error
        if not isinstance(result, dict) or not result.keys() >= _REQUIRED:
            raise DataError(f"{self.result_path} is damaged: it lacks figures of a finished run; remove it and give --resume")
        return result

    def checkpoint_or(self, start: Checkpoint) -> Checkpoint:
        """Return the last checkpoint, or ``start`` if no round was finished.

        Raises:
            ConfigError: the rounds so far were run on other data or another device, so the end would be a mixture.
        """
        last = self.checkpoint()
        if last is None:
            return start
        if last.origin != start.origin:
            raise ConfigError(f"{self.path} was begun on {last.origin}, and this is {start.origin}: it cannot be resumed")
        return last

    def is_damaged(self) -> bool:
        """Tell whether a file of the run cannot be read."""
        try:
            if self.config_path.exists():
                self.config(), self.checkpoint(), self.result()
        except LdpflError:
            return True
        return False

    def clear(self) -> None:
        """Remove the files of the run, so that it begins anew."""
        for path in (self.result_path, self.checkpoint_path, self.config_path, self.metrics_path, self.ledger_path):
            path.unlink(missing_ok=True)
        for path in (self.model_path, self.curve_path):
            path.unlink(missing_ok=True)

    def save_round(self, checkpoint: Checkpoint) -> None:
        """Record a finished round. The checkpoint comes first: metrics and ledger can be written again from it."""
        checkpoint.save(self.checkpoint_path)
        self._save_metrics(checkpoint)
        checkpoint.ledger.save(self.ledger_path)

    def save_ledger(self, ledger: Ledger) -> None:
        """Record charges ahead of the checkpoint that they belong to."""
        ledger.save(self.ledger_path)

    def save_result(self, checkpoint: Checkpoint, task: LocalTask, result: dict[str, Any]) -> None:
        """Record the end of a run. ``result.json`` comes last: where it stands, all the others do."""
        self._save_metrics(checkpoint)
        checkpoint.ledger.save(self.ledger_path, result["privacy"])
        # The whole module: what is not trained is public, and a shared parameter has more than one name.
        module = copy.deepcopy(task.module).cpu()
        module.load_state_dict(task.layout.unflatten(checkpoint.state.weights), strict=False)
        tensors = {name: value.detach().clone() for name, value in module.state_dict().items()}
        with replace_atomically(self.model_path) as temporary:
            save_file(tensors, temporary)
        write_text(self.result_path, json.dumps(result, indent=2) + "\n")

    def _save_metrics(self, checkpoint: Checkpoint) -> None:
        lines = (json.dumps(metrics.reproducible()) + "\n" for metrics in checkpoint.history)
        write_text(self.metrics_path, "".join(lines))


_LOCK = ".lock"
_REQUIRED = {"name", "seed", "accuracy", "accuracy_per_round", "noise_free_accuracy", "privacy", "layers", "seconds", "device"}
