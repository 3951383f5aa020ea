"""A run's folder: everything in it can be read, re-run and resumed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import tomli_w
from filelock import FileLock, Timeout
from safetensors.torch import save_file

from ldpfl.data.encoder import Encoder
from ldpfl.errors import ConfigError, DataError, LdpflError, printable
from ldpfl.experiments import secret_seed
from ldpfl.experiments.config import RunConfig, read_config
from ldpfl.experiments.model_file import ModelFile, kept_of, read_description
from ldpfl.experiments.result_schema import problem_of
from ldpfl.models.adapters import ADAPTER_FILES, save_adapter
from ldpfl.privacy.ledger import LEDGER_FILE, Ledger
from ldpfl.server import Checkpoint, RoundMetrics
from ldpfl.server.round_log import log_path
from ldpfl.simulation import LocalTask
from ldpfl.util.files import (
    MAX_METRICS_BYTES,
    MAX_RESULT_BYTES,
    append_text,
    ends_with,
    from_json,
    make_folder,
    read_text,
    remove_leftovers,
    replace_atomically,
    to_json,
    write_text,
    writing,
)


class Kind(StrEnum):
    """What made a run, and so what can go on with it."""

    SIMULATION = "simulation"
    READY_APP = "ready app on Flower"
    """``ldpfl.flower.apps``: the config tells all, data and model too."""
    OWN_APP = "own app on Flower"
    """Somebody's ServerApp around ``LdpStrategy``: its data and model are its own, whatever the config says."""

    @property
    def on_flower(self) -> bool:
        """Whether it is no simulation."""
        return self is not Kind.SIMULATION


def _is_ours(name: str) -> bool:
    """Tell whether a file is the lock, one that is written before the config, or what a killed process left of these."""
    first = (_KIND, secret_seed.FILE, "config.toml")
    return name in (_LOCK, _KIND, _NO_BASELINE, secret_seed.FILE) or name.startswith(tuple(f".{file}." for file in first))


def _used(config: RunConfig) -> dict[str, Any]:
    """Return the settings without those that an app of one's own does not use, unless it set them itself."""
    tree = config.model_dump()
    for name, keys in _NOT_ON_FLOWER.items():
        section = getattr(config, name)
        for key in keys or list(tree[name]):
            if key not in section.model_fields_set:
                del tree[name][key]
    return {name: value for name, value in tree.items() if value != {}}


@dataclass(frozen=True)
class RunFolder:
    """Names and writes the files of one run.

    ``config.toml`` (complete, re-runnable), ``checkpoint.safetensors`` with its log ``checkpoint.jsonl`` (after each round),
    ``metrics.jsonl`` and ``ledger.json`` (a line a round), and at the end ``model.safetensors``, ``model.json``, ``encoding.json`` (of a
    table), ``result.json`` and ``curve.svg``. On Flower, ``kind.txt`` and ``participation.json`` as well; an app of one's own has its
    model elsewhere and writes no result. On a user's own data, ``SECRET-seed`` is the only file that the noise could be computed from.
    Each file is replaced as a whole, but for logs and metrics, which grow.

    All that write raise :class:`ldpfl.errors.WriteError` where the system refuses it.
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
        return self.path / LEDGER_FILE

    @property
    def model_path(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def adapter_path(self) -> Path:
        """A folder with the model's adapter as ``peft`` reads it, where it has one."""
        return self.path / "adapter"

    @property
    def description_path(self) -> Path:
        """What model the weights are of."""
        return self.path / "model.json"

    @property
    def encoding_path(self) -> Path:
        """How rows of a table become inputs of the model."""
        return self.path / "encoding.json"

    @property
    def result_path(self) -> Path:
        return self.path / "result.json"

    @property
    def curve_path(self) -> Path:
        return self.path / "curve.svg"

    @property
    def participation_path(self) -> Path:
        """Which nodes were asked; written on Flower only."""
        return self.path / "participation.json"

    @property
    def stopped_path(self) -> Path:
        """Why a sweep gave the run up."""
        return self.path / "stopped.txt"

    @property
    def secret_path(self) -> Path:
        """What the noise on a user's own rows follows from; nothing else in the folder tells it."""
        return self.path / secret_seed.FILE

    def secret(self) -> int | None:
        """Return the secret that the run's noise follows from; None if the folder has none.

        Raises:
            DataError: its file is damaged.
        """
        return secret_seed.load(self.secret_path)

    def open(self, config: RunConfig, *, resume: bool, kind: Kind | None = None, secret: int | None = None) -> None:
        """Make the folder ready for ``config``; with ``resume``, one that was never begun is begun.

        Args:
            kind: what is about to run; recorded if it is not a simulation.
            secret: what the run's noise follows from, if it is not the config's seed; kept where a run is begun.

        Raises:
            ConfigError: the folder holds something else, or a run of another config or kind; nothing is written then.
        """
        self.check(config, resume=resume, kind=kind)
        make_folder(self.path)
        begun = self.config_path.exists()
        if config.data.brought and not begun:
            self.path.chmod(0o700)  # it holds the secret that the noise on somebody's own rows follows from, and exact figures of them
        if secret is not None and not begun:
            secret_seed.save(secret, self.secret_path)
        # First of all: where a config stands, nobody may take a folder of Flower's for a simulation's.
        if kind is not None and kind.on_flower and not (begun and self._kind_path.exists()):
            write_text(self._kind_path, f"{kind}\n")
        if not begun:
            if kind is Kind.SIMULATION:  # of one on Flower that did not come as far as its config
                self._kind_path.unlink(missing_ok=True)
            write_text(self.config_path, _OWN_CONFIG + tomli_w.dumps(_used(config)) if kind is Kind.OWN_APP else config.to_toml())

    def reopen(self, config: RunConfig) -> None:
        """Let the run that stands here go on under ``config``; its result is no longer one. A crash leaves the run as it was, or that."""
        self.result_path.unlink(missing_ok=True)  # first: without one, the old config just ends the run anew
        self.description_path.unlink(missing_ok=True)  # nor is the model of the old rounds the run's any more
        (self.path / "report-public.html").unlink(missing_ok=True)  # which tells of fewer rounds than there will be
        write_text(self.config_path, config.to_toml())

    def wants_baseline(self, asked: bool | None) -> bool:
        """Return whether the run is compared with a noise-free baseline: as ``asked``, else as it was last asked, which is kept here."""
        wanted = not self._no_baseline_path.exists() if asked is None else asked
        with writing(self._no_baseline_path):
            if wanted:
                self._no_baseline_path.unlink(missing_ok=True)
            else:
                self._no_baseline_path.touch()
        return wanted

    def check(self, config: RunConfig, *, resume: bool, kind: Kind | None = None) -> None:
        """Do what :meth:`open` checks, and touch nothing."""
        try:
            os.fsencode(self.path).decode()
        except UnicodeError:  # what reads models opens no such file
            raise ConfigError(f"output folder {self.path} has a name that is no UTF-8 text: choose another folder") from None
        if resume and self.config_path.exists():
            found = self.kind()
            if kind is not None and kind.on_flower != found.on_flower and (found.on_flower or self.checkpoint_path.exists()):
                raise ConfigError(f"{self.path} holds a run of this kind: {found}; a {kind} cannot go on with it")
            differences = self.config().differences(config)
            if differences:
                raise ConfigError(f"{self.path} holds a run of another config, so it cannot be resumed; {'; '.join(differences)}")
            return
        if self.path.exists() and (not self.path.is_dir() or any(not _is_ours(entry.name) for entry in self.path.iterdir())):
            advice = "resume the run in it, or choose another folder" if self.config_path.exists() else "choose another folder"
            raise ConfigError(f"output folder {self.path} is not empty: {advice}")

    @contextmanager
    def locked(self, *, wait: bool = False) -> Iterator[None]:
        """Keep a second process from working in the folder; with ``wait``, wait until it has finished.

        Raises:
            ConfigError: another process is at work in it.
        """
        make_folder(self.path)
        with writing(self.path / _LOCK):
            lock = FileLock(self.path / _LOCK)
            try:
                lock.acquire(timeout=-1 if wait else 0)
            except Timeout:
                raise ConfigError(f"another process is working in {self.path}") from None
        try:
            if self.config_path.exists() or all(entry.name.startswith(".") for entry in self.path.iterdir()):  # not somebody else's
                with writing(self.path):
                    remove_leftovers(self.path)
            yield
        finally:
            lock.release()

    def config(self) -> RunConfig:
        """Return the config that the run was started with; of an app of one's own, what it did not use has the default.

        Raises:
            ConfigError: there is no run, or its config is damaged.
        """
        if (self.path / SWEEP).exists():
            raise ConfigError(f"{self.path} is the folder of a sweep: give one of its runs, {self.path / 'runs'}/*")
        if not self.config_path.exists():
            raise ConfigError(f"{self.path} holds no run: {self.config_path.name} is missing")
        config = read_config(self.config_path)
        if not ends_with(self.config_path, "\n"):
            raise ConfigError(f"{self.config_path} is damaged: its last line is cut off")
        if not config.model_fields_set:  # all that is left of the file after a power cut, perhaps; to train the defaults is no answer
            raise ConfigError(f"{self.config_path} is damaged: it holds no setting")
        return config

    def kind(self) -> Kind:
        """Return what made the run.

        A folder that does not say so was made by the simulator, or on Flower before this was recorded. Then it tells who was
        asked, and if it was the ready app, holds a result or an origin that only this app gives.

        Raises:
            DataError: a file that tells is damaged.
        """
        recorded = self._recorded_kind()
        if recorded is not None:
            return recorded
        if not self.participation_path.exists():
            return Kind.SIMULATION
        if self.result_path.exists():
            return Kind.READY_APP
        last = self.checkpoint()
        return Kind.READY_APP if last and _READY_ORIGIN.fullmatch(last.origin) else Kind.OWN_APP

    @property
    def _no_baseline_path(self) -> Path:
        """A file that is there where the run was begun without a baseline."""
        return self.path / _NO_BASELINE

    @property
    def _kind_path(self) -> Path:
        return self.path / _KIND

    def _recorded_kind(self) -> Kind | None:
        try:
            return Kind(read_text(self._kind_path).strip())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise DataError(f"{self._kind_path} is damaged, or larger than such a file is: expected one of {', '.join(Kind)}") from error

    def checkpoint(self) -> Checkpoint | None:
        """Return the last checkpoint, if a round was finished.

        Raises:
            DataError: it is damaged; or the metrics, which are written after it, have more rounds: these would be counted nowhere.
        """
        last = Checkpoint.load(self.checkpoint_path) if self.checkpoint_path.exists() else None
        done = 0 if last is None else len(last.history)
        if (told := self._rounds_in_metrics()) > done:
            raise DataError(
                f"{self.checkpoint_path} has {done:,} rounds, and {self.metrics_path.name} beside it {told:,}: the checkpoint was removed, "
                "or put back to an earlier round; put back the latest one, for what was sent in the rounds since would not be counted"
            )
        return last

    def _rounds_in_metrics(self) -> int:
        if not self.metrics_path.is_file():
            return 0
        if (size := self.metrics_path.stat().st_size) > MAX_METRICS_BYTES:
            raise DataError(f"{self.metrics_path} has {size:,} bytes, expected at most {MAX_METRICS_BYTES:,}: it is no run's")
        with self.metrics_path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))

    def ledger(self) -> Ledger:
        """Return what the run released, as ledger and checkpoint say alike; but one of them may be a round ahead.

        Raises:
            ConfigError: nothing was released yet.
            DataError: a file is damaged, or they contradict each other.
        """
        last = self.checkpoint()
        if not self.ledger_path.exists():
            raise ConfigError(f"{self.path} has released nothing yet: no round is finished")
        told = (self.result() or {}).get("rounds", 0)
        ledger = Ledger.load(self.ledger_path)
        kept = ledger if last is None else last.ledger
        shorter, longer = sorted((ledger, kept), key=lambda one: len(one.events))
        if longer.events[: len(shorter.events)] != shorter.events or len(longer.events) > len(shorter.events) + 1:
            raise DataError(f"{self.ledger_path} is not the ledger of this run's checkpoint: one of them was changed, or is another run's")
        if (counted_rounds := len(longer.events) - sum(event.histograms for event in longer.events)) < told:
            raise DataError(
                f"{self.ledger_path} has {counted_rounds:,} rounds of training, and {self.result_path.name} beside it tells of {told:,}: "
                "ledger and checkpoint were put back to an earlier round; put back the latest ones"
            )
        return longer

    def result(self) -> dict[str, Any] | None:
        """Return the figures of a finished run, if it is finished; None stands for a figure that is not a finite number.

        Raises:
            DataError: the file is damaged.
        """
        if not self.result_path.exists():
            return None
        try:
            result = from_json(read_text(self.result_path, MAX_RESULT_BYTES))
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self.result_path} is damaged: {getattr(error, 'strerror', None) or error}; remove it, and finish the run again"
            ) from error
        problem = problem_of(result)
        if problem:
            raise DataError(f"{self.result_path} is damaged: {printable(problem)}; remove it, and finish the run again")
        figures: dict[str, Any] = _printable(result)
        return figures

    def model_file(self) -> ModelFile:
        """Return what model the folder holds; it may be that of an export.

        Raises:
            ConfigError: there is no model.
            DataError: the file is damaged.
        """
        try:
            found: ModelFile = read_description(self.description_path, ModelFile)
        except FileNotFoundError:
            if self.model_path.exists() and self.result_path.exists():
                raise ConfigError(
                    f"{self.path} has no {self.description_path.name}, so it is of an earlier version: remove {self.result_path.name}, and "
                    "finish the run again by ldpfl run --resume"
                ) from None
            raise ConfigError(
                f"{self.path} has no {self.description_path.name}: it holds a run that is not finished, or none; give the folder of a "
                "finished run, or one that ldpfl export wrote"
            ) from None
        return found

    def encoder(self) -> Encoder:
        """Return how rows become inputs of the model.

        Raises:
            ConfigError: the model was not trained on rows of a table.
            DataError: the file is damaged.
        """
        try:
            found: Encoder = read_description(self.encoding_path, Encoder)
        except FileNotFoundError:
            raise ConfigError(
                f"{self.path} holds a model of something else than a table: give its module inputs yourself, see ldpfl.load_model"
            ) from None
        if found.data.text and found.width > _MAX_WORDS:
            raise DataError(f"{self.encoding_path} is damaged: it keeps {found.width:,} words of a text, more than {_MAX_WORDS:,}")
        return found

    def measured(self) -> Encoder | None:
        """Return how the run scaled the columns of its table; None before its end, and where the data are no table.

        Raises:
            DataError: the file is damaged.
        """
        return self.encoder() if self.encoding_path.exists() else None

    @property
    def is_over(self) -> bool:
        """Whether the run has come to its end, or a sweep gave it up: then a sweep that is continued leaves it as it is."""
        return self.result_path.exists() or self.stopped_path.exists()

    def stopped(self) -> str | None:
        """Return why a sweep gave the run up, if it did.

        Raises:
            DataError: the file is damaged.
        """
        if not self.stopped_path.exists():
            return None
        try:
            return printable(read_text(self.stopped_path).rstrip("\n"))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{self.stopped_path} is damaged: {error}; remove it, and start the sweep again") from error

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

    def checkpoint_to_go_on(self, start: Checkpoint) -> Checkpoint:
        """Return the last checkpoint, or ``start`` if no round was finished, for more rounds to follow.

        Raises:
            ConfigError: as for :meth:`checkpoint_or`; or its rounds drew their random numbers in another way than those to come.
        """
        last = self.checkpoint_or(start)
        if last.words != start.words:
            raise ConfigError(
                f"{self.path} was begun by a version of ldpfl that drew random numbers in another way, so its model would be a mixture: it "
                "can be read, and not gone on with; begin another run in another folder"
            )
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
            with writing(path):
                path.unlink(missing_ok=True)
        log = log_path(self.checkpoint_path)
        others = (self.model_path, self.curve_path, self.encoding_path, self.description_path, self.secret_path)
        for path in (log, *others, *(self.adapter_path / name for name in ADAPTER_FILES)):
            with writing(path):
                path.unlink(missing_ok=True)

    def save_round(self, checkpoint: Checkpoint) -> None:
        """Record a finished round. The checkpoint comes first: metrics and ledger can be written again from it."""
        checkpoint.save(self.checkpoint_path)
        self._add_metrics(checkpoint)
        checkpoint.ledger.save(self.ledger_path)

    def save_ledger(self, ledger: Ledger) -> None:
        """Record charges ahead of the checkpoint that they belong to; a ledger without any is no file."""
        if ledger.events:
            ledger.save(self.ledger_path)
        else:
            self.ledger_path.unlink(missing_ok=True)

    def save_result(
        self, checkpoint: Checkpoint, task: LocalTask, result: dict[str, Any], described: ModelFile, encoder: Encoder | None = None
    ) -> None:
        """Record the end of a run. ``result.json`` comes last: where it stands, all the others do."""
        self._save_metrics(checkpoint)
        checkpoint.ledger.save(self.ledger_path, result["privacy"])
        # The whole module, cloned by name: a shared parameter has more than one.
        trained = task.module_with(checkpoint.state.model)
        tensors = {name: value.detach().clone() for name, value in kept_of(trained).items()}
        with replace_atomically(self.model_path) as temporary:
            save_file(tensors, temporary)
        save_adapter(trained, self.adapter_path, described.name)
        if encoder is not None:
            write_text(self.encoding_path, encoder.model_dump_json(indent=1) + "\n")
        write_text(self.description_path, described.model_dump_json(indent=1) + "\n")
        write_text(self.result_path, to_json(result, indent=2) + "\n")

    def _save_metrics(self, checkpoint: Checkpoint) -> None:
        write_text(self.metrics_path, "".join(map(_metrics_line, checkpoint.history)))

    def _add_metrics(self, checkpoint: Checkpoint) -> None:
        """Add the line of the last round where the file ends with the line before; else write all lines."""
        *_, before, last = ("", "", *map(_metrics_line, checkpoint.history[-2:]))
        if before and self.metrics_path.is_file() and ends_with(self.metrics_path, before):
            append_text(self.metrics_path, last, self.metrics_path.stat().st_size)
        else:
            self._save_metrics(checkpoint)


def _metrics_line(metrics: RoundMetrics) -> str:
    return to_json(metrics.reproducible()) + "\n"


_LOCK, _KIND, _NO_BASELINE = ".lock", "kind.txt", ".no-baseline"
_MAX_WORDS = 1 << 16
"""Number of words that are kept of a text, at most, by a folder that may be somebody else's: each row takes memory for all of them."""
SWEEP = "sweep.json"
"""What the folder of a sweep holds instead of a run."""

_READY_ORIGIN = re.compile(r".+ [0-9a-f]{16} on \w+ on Flower")
_NOT_ON_FLOWER: dict[str, tuple[str, ...]] = {
    "data": (),
    "model": (),
    "clients": ("count",),
    "training": ("epochs", "batch_size", "learning_rate", "momentum", "clip_norm"),
}
"""Settings that the strategy does not use: sections, and of some only these keys."""
_OWN_CONFIG = "# Of an app of one's own on Flower: its data, its model and how its clients train are known to the app alone.\n"


def _printable(figures: Any) -> Any:
    """Return what a file held with all its texts printable: it may be somebody else's, and is shown in a terminal."""
    match figures:
        case str():
            return printable(figures)
        case dict():
            return {printable(str(key)): _printable(value) for key, value in figures.items()}
        case list():
            return [_printable(value) for value in figures]
    return figures
