"""A run's folder: its files, and how they are written and read, so that the run can be resumed and repeated."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import tomli_w
from filelock import FileLock, Timeout
from safetensors.torch import save_file

from ldpfl.data.encoder import Encoder
from ldpfl.errors import ConfigError, DataError, LdpflError, printable, shown
from ldpfl.experiments import secret_seed
from ldpfl.experiments.config import RunConfig, read_config
from ldpfl.experiments.model_file import ModelFile, check_present, read_description, tensors_to_save
from ldpfl.experiments.nodes_asked import Participation
from ldpfl.experiments.other_folders import SWEEP as SWEEP, describe_other_folder, trials_mark
from ldpfl.experiments.personal_file import load_personal, save_personal
from ldpfl.experiments.result_schema import problem_in_result
from ldpfl.models.adapters import ADAPTER_FILES, save_adapter
from ldpfl.privacy.events import OURS, GaussianRelease, RoundEvent
from ldpfl.privacy.ledger import LEDGER_FILE, Ledger
from ldpfl.server import Checkpoint, RoundMetrics
from ldpfl.server.round_log import log_path
from ldpfl.simulation import LocalTask
from ldpfl.util.files import (
    MAX_METRICS_BYTES,
    MAX_RESULT_BYTES,
    Inside,
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
from ldpfl.util.number_format import counted


class Kind(StrEnum):
    """What kind of program made a run, and so can resume it."""

    SIMULATION = "simulation"
    READY_APP = "ready app on Flower"
    """``ldpfl.flower.apps``. The config describes everything, data and model included."""
    OWN_APP = "own app on Flower"
    """A user's ServerApp around ``LdpStrategy``. It has its own data and model, and the config does not describe them."""

    @property
    def on_flower(self) -> bool:
        """Whether the run is on Flower rather than simulated."""
        return self is not Kind.SIMULATION


_LOCK, _KIND, _NO_BASELINE, _TRIAL = ".lock", "kind.txt", ".no-baseline", "trial.txt"


def _is_written_before_config(name: str) -> bool:
    """Return whether a run writes the file ``name`` before its config: the lock, an early file, or a killed process's temporary file."""
    early_files = (_KIND, secret_seed.FILE, "config.toml")
    return name in (_LOCK, _KIND, _NO_BASELINE, _TRIAL, secret_seed.FILE) or name.startswith(tuple(f".{file}." for file in early_files))


def _settings_of_own_app(config: RunConfig) -> dict[str, Any]:
    """Return the settings of a user's own app as nested dicts, without those that ``LdpStrategy`` ignores and that the app did not set."""
    tree = config.model_dump()
    for name, keys in _UNUSED_ON_FLOWER.items():
        section = getattr(config, name)
        for key in keys or list(tree[name]):
            if key not in section.model_fields_set:
                del tree[name][key]
    return {name: value for name, value in tree.items() if value != {}}


@dataclass(frozen=True)
class RunFolder:
    """The files of one run.

    ``config.toml`` (complete, re-runnable), ``checkpoint.safetensors`` with its log ``checkpoint.jsonl`` (after each round),
    ``metrics.jsonl`` and ``ledger.json`` (one line for each round), and at the end ``model.safetensors``, ``model.json``,
    ``encoding.json`` (of a table), ``result.json`` and ``curve.svg``. On Flower, there are ``kind.txt`` and ``participation.json`` as
    well. A user's own app keeps its model elsewhere and writes no result. On a user's own data, the noise can be computed only from the
    file ``SECRET-seed``.
    A simulation with personal layers keeps them in ``PRIVATE-personal-ROUND.safetensors``, which only resuming needs.
    Each file is replaced as a whole, except logs and metrics, which grow.

    All methods that write raise :class:`ldpfl.errors.WriteError` if the system refuses to write.
    """

    path: Path

    def __post_init__(self) -> None:
        if not isinstance(self.path, Path):
            raise ConfigError(f"the path of RunFolder must be a Path, got {shown(self.path)}: give RunFolder(Path(...))")

    config_path = Inside("config.toml")
    checkpoint_path = Inside("checkpoint.safetensors")
    metrics_path = Inside("metrics.jsonl")
    ledger_path = Inside(LEDGER_FILE)
    model_path = Inside("model.safetensors")
    adapter_path = Inside("adapter")
    """Folder of the model's adapter in the format of ``peft``, if the model has one."""
    description_path = Inside("model.json")
    """Description of the model that the weights belong to."""
    encoding_path = Inside("encoding.json")
    """Encoding from rows of a table to inputs of the model."""
    result_path = Inside("result.json")
    curve_path = Inside("curve.svg")
    participation_path = Inside("participation.json")
    """List of the nodes that were asked to take part. Written on Flower only."""
    stopped_path = Inside("stopped.txt")
    """Reason why a sweep stopped the run early."""
    secret_path = Inside(secret_seed.FILE)
    """Secret seed of the noise on a user's own rows. No other file in the folder reveals it."""
    _no_baseline_path = Inside(_NO_BASELINE)
    """Marker file of a run without a baseline."""
    _kind_path = Inside(_KIND)
    _trial_path = Inside(_TRIAL)
    """Marker file of a trial of a tuning, which a copy of the folder keeps."""

    @property
    def is_vacant(self) -> bool:
        """Whether a new run may start here: there is no folder yet, or it holds only files that a run writes before its config."""
        if not self.path.exists():
            return True
        return self.path.is_dir() and not self.config_path.exists() and all(_is_written_before_config(p.name) for p in self.path.iterdir())

    def personal_path(self, round_number: int) -> Path:
        """Return the path of all clients' personal layers after a round, to resume the run from. They are private data without noise."""
        return self.path / f"{_PERSONAL}{round_number}.safetensors"

    @property
    def is_trial(self) -> bool:
        """Whether the run is a trial of a tuning. Its ledger does not count the other trials."""
        return self._trial_path.exists() or trials_mark(self.path.resolve().parent.parent).exists()

    def mark_as_trial(self) -> None:
        """Mark the folder as that of a trial of a tuning, and create it if it is missing.

        Raises:
            WriteError: the folder cannot be written.
        """
        make_folder(self.path)
        write_text(self._trial_path, TRIAL + "\n")

    def check_may_be_handed_on(self) -> None:
        """Raise unless the run's model, guarantee and public figures may be published.

        Raises:
            ConfigError: the run is a trial of a tuning.
            DataError: a file of the run is a link.
        """
        if self.is_trial:
            raise ConfigError(
                f"{self.path} is a trial of a tuning, and its guarantee does not count the other trials: publish the tuning's folder "
                "'release' instead"
            )
        self.check_no_links()

    def check_is_ldpfls(self) -> None:
        """Raise a :class:`ConfigError` if the run is of an own app on Flower, so that ldpfl has neither its model nor its data."""
        if self.kind() is Kind.OWN_APP:
            raise ConfigError(
                f"{self.path} is a run of your own app on Flower, whose model your ServerApp saves: use that model, and ldpfl certify "
                "for the guarantee"
            )

    def check_no_links(self) -> None:
        """Raise a :class:`DataError` if a file of the run is a link.

        The folder may be somebody else's. A link in it could name any file of this user, and publish its content.
        """
        for path in (*self._files(), self.adapter_path):
            if path.is_symlink():
                raise DataError(f"{path} is a link, expected a file of this run: if you trust the link, replace it by a copy of its file")

    def _files(self) -> list[Path]:
        """Return the paths of the run's files, whether they exist or not, except those with secrets or personal layers."""
        files = [self.result_path, self.checkpoint_path, self.config_path, self.metrics_path, self.ledger_path, self.participation_path]
        files += [log_path(self.checkpoint_path), self.model_path, self.curve_path, self.encoding_path, self.description_path]
        return files + [self.adapter_path / name for name in ADAPTER_FILES]

    def secret(self) -> int | None:
        """Return the secret seed of the run's noise; None if the folder has none.

        Raises:
            DataError: the file of the secret is damaged.
        """
        return secret_seed.load(self.secret_path)

    def open(self, config: RunConfig, *, resume: bool, kind: Kind | None = None, secret: int | None = None) -> None:
        """Prepare the folder for a run of ``config``, or for resuming it. With ``resume``, an empty folder starts a new run.

        Args:
            kind: kind of the run. It is recorded if the run is not a simulation.
            secret: seed of the run's noise, if that is not the config's seed. It is saved when a run starts.

        Raises:
            ConfigError: the folder holds something else, or a run of another config or kind. Then nothing is written.
        """
        self.check(config, resume=resume, kind=kind)
        make_folder(self.path)
        has_started = self.config_path.exists()
        if config.data.brought and not has_started:
            self.path.chmod(0o700)  # the folder holds the secret seed of the noise, and exact metrics of the user's own rows
        if secret is not None and not has_started:
            secret_seed.save(secret, self.secret_path)
        # The kind is written before the config: a folder with a config and without a kind would count as a simulation.
        if kind is not None and kind.on_flower and not (has_started and self._kind_path.exists()):
            write_text(self._kind_path, f"{kind}\n")
        if not has_started:
            if kind is Kind.SIMULATION:  # a run on Flower that died before it wrote its config may have left its kind here
                self._kind_path.unlink(missing_ok=True)
            write_text(
                self.config_path,
                _COMMENT_OF_OWN_APP + tomli_w.dumps(_settings_of_own_app(config)) if kind is Kind.OWN_APP else config.to_toml(),
            )

    def reopen(self, config: RunConfig) -> None:
        """Turn the finished run in this folder into an unfinished run of ``config``, such as one with more rounds.

        After a crash on the way, the folder can be resumed with the old or the new config.
        """
        self.result_path.unlink(missing_ok=True)  # first: without a result, the old config only writes the result again
        self.description_path.unlink(missing_ok=True)  # the model of the old rounds is not the final model any more
        (self.path / "report-public.html").unlink(missing_ok=True)  # it reports fewer rounds than there will be
        write_text(self.config_path, config.to_toml())

    def remember_baseline_choice(self, choice: bool | None) -> bool:
        """Return whether the run is compared with a noise-free baseline, and store the answer in the folder.

        ``choice`` decides. If it is None, the stored answer decides, and a new folder gets a baseline.
        """
        is_wanted = not self._no_baseline_path.exists() if choice is None else choice
        with writing(self._no_baseline_path):
            if is_wanted:
                self._no_baseline_path.unlink(missing_ok=True)
            else:
                self._no_baseline_path.touch()
        return is_wanted

    def check(self, config: RunConfig, *, resume: bool, kind: Kind | None = None) -> None:
        """Raise the errors that :meth:`open` would raise, and write nothing."""
        try:
            os.fsencode(self.path).decode()
        except UnicodeError:  # the reader of safetensors cannot open such a path
            raise ConfigError(f"output folder {self.path} has a name that is not valid UTF-8: choose another folder") from None
        if resume and self.config_path.exists():
            recorded = self.kind()
            if kind is not None:
                self.check_kind(kind)
            differences = self.config().differences(config)
            if differences:
                raise ConfigError(
                    f"{self.path} holds a run of another config, so it cannot be resumed. To begin another run, set another folder "
                    f"({'ldpfl.out' if recorded.on_flower else '--out'}); to resume this one, set again what you changed. These settings "
                    "differ, some because they follow from others, as noise and step size follow from rounds, clients and epsilon: "
                    f"{'; '.join(differences)}"
                )
            return
        if not self.is_vacant:  # something else is here, or a run that is not to be resumed
            advice = "resume the run in it, or choose another folder" if self.config_path.exists() else "choose another folder"
            raise ConfigError(f"output folder {self.path} is not empty: {advice}")

    def check_kind(self, kind: Kind) -> None:
        """Raise a :class:`ConfigError` if the folder holds a run that a program of this ``kind`` cannot resume.

        A folder without a recorded kind counts as a simulation, so a run on Flower may resume it as long as it has no checkpoint.
        """
        recorded = self.kind()
        if kind.on_flower != recorded.on_flower and (recorded.on_flower or self.checkpoint_path.exists()):
            raise ConfigError(f"{self.path} holds a run of this kind: {recorded}; a {kind} cannot resume it: choose another folder")

    @contextmanager
    def locked(self, *, wait: bool = False) -> Iterator[None]:
        """Hold the folder's lock, so that no second process works in it. With ``wait``, wait for a process that holds it.

        Raises:
            ConfigError: another process holds the lock, and ``wait`` is not set.
        """
        make_folder(self.path)
        with writing(self.path / _LOCK):
            lock = FileLock(self.path / _LOCK)
            try:
                lock.acquire(timeout=-1 if wait else 0)
            except Timeout:
                raise ConfigError(f"another process is working in {self.path}: wait until it ends, or choose another folder") from None
        try:
            # Temporary files of a killed process are removed only in a run's folder, or in one that is empty except for hidden files.
            if self.config_path.exists() or all(entry.name.startswith(".") for entry in self.path.iterdir()):
                with writing(self.path):
                    remove_leftovers(self.path)
            yield
        finally:
            lock.release()

    def config(self) -> RunConfig:
        """Return the config that the run was started with. For a user's own app, settings that it did not use have their defaults.

        Raises:
            ConfigError: the folder holds no run, or its config is damaged.
        """
        self._check_no_other_folder()
        if not self.config_path.exists():
            raise ConfigError(f"{self.path} holds no run, because {self.config_path.name} is missing: give a run's folder")
        config = read_config(self.config_path)
        if not ends_with(self.config_path, "\n"):
            raise ConfigError(f"{self.config_path} is damaged, because its last line is cut off: restore the file from a backup")
        if not config.model_fields_set:  # a power cut may leave an empty file, and training with the defaults would be wrong
            raise ConfigError(f"{self.config_path} is damaged, because it holds no setting: restore the file from a backup")
        return config

    def _check_no_other_folder(self) -> None:
        """Raise a :class:`ConfigError` if the folder is one that ldpfl wrote for something else than a run."""
        if not self.config_path.exists() and (description := describe_other_folder(self.path)):
            raise ConfigError(description)

    def kind(self) -> Kind:
        """Return the kind of the run. A run on Flower records its kind in ``kind.txt`` before anything else.

        Raises:
            DataError: ``kind.txt`` is damaged, or missing beside ``participation.json``, which only runs on Flower write.
        """
        try:
            return Kind(read_text(self._kind_path).strip())
        except (OSError, ValueError) as error:
            if isinstance(error, FileNotFoundError) and not self.participation_path.exists():
                return Kind.SIMULATION
            raise DataError(
                f"{self._kind_path} is damaged or missing, and so does not say what made the run: restore it from a backup, or write the "
                f"line that is true of the run into it: {' / '.join(Kind)}"
            ) from error

    def checkpoint(self) -> Checkpoint | None:
        """Return the last checkpoint, or None if no round is finished.

        Raises:
            DataError: the checkpoint is damaged, or has fewer rounds than the metrics. Metrics are written after the checkpoint, so an
                earlier checkpoint was put back, and the privacy cost of the rounds since would not be counted.
        """
        checkpoint = Checkpoint.load(self.checkpoint_path) if self.checkpoint_path.exists() else None
        finished = 0 if checkpoint is None else len(checkpoint.history)
        if (recorded := self._rounds_in_metrics()) > finished:
            raise DataError(
                f"{self.checkpoint_path} has {finished:,} rounds, and {self.metrics_path.name} beside it {recorded:,}: the checkpoint was "
                "removed, or comes from an older backup; restore the latest copy, or what was sent in later rounds is not counted"
            )
        return checkpoint

    def participation(self) -> Participation:
        """Return the number of rounds that each node was told to train in, or raise :class:`DataError` if the file of it is damaged."""
        return Participation.load(self.participation_path)

    def _rounds_in_metrics(self) -> int:
        """Return the number of lines of the file of metrics, one for each round; 0 if there is no file."""
        if not self.metrics_path.is_file():
            return 0
        if (size := self.metrics_path.stat().st_size) > MAX_METRICS_BYTES:
            raise DataError(
                f"{self.metrics_path} has {size:,} bytes, expected at most {MAX_METRICS_BYTES:,}: it is not the metrics file of a run"
            )
        with self.metrics_path.open("rb") as file:  # in blocks of 1 MiB, since the whole file may be large
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))

    def ledger(self) -> Ledger:
        """Return the run's ledger, checked against its checkpoint and result.

        After a crash, the ledger's file or the checkpoint may be a round ahead. Then the longer ledger is returned.

        Raises:
            ConfigError: no round is finished, so nothing was released yet.
            DataError: a file is missing or damaged, or the files contradict each other.
        """
        begun = self.participation().begun  # read first: a server that works in the folder may begin a round meanwhile
        if not self.has_released():
            self._check_no_other_folder()
            raise ConfigError(f"the run in {self.path} has released nothing yet: let it finish a round first")
        checkpoint = self.checkpoint()
        reported_rounds = (self.result() or {}).get("rounds", 0)  # 0 before the end of the run
        stored, on_flower = Ledger.load(self.ledger_path), self.kind().on_flower
        longer = stored if checkpoint is None else self._longer_ledger(stored, checkpoint.ledger, on_flower=on_flower)
        if (counted_rounds := len(longer.events) - sum(event.histograms for event in longer.events)) < reported_rounds:
            raise DataError(
                f"{self.ledger_path} has {counted_rounds:,} rounds of training, and {self.result_path.name} beside it reports "
                f"{reported_rounds:,}: ledger and checkpoint seem to come from an older backup; restore the latest copies of both"
            )
        if begun > len(longer.events):
            raise DataError(
                f"{self.ledger_path} has {len(longer.events):,} rounds, but {self.participation_path.name} says that nodes were told to "
                f"train in {begun:,} rounds: ledger and checkpoint seem to come from an older backup; restore the latest copies of both"
            )
        if len(longer.events) > 1 and on_flower:  # the participation of a run's first round is saved after its ledger
            check_present(self.participation_path)
        self._check_states_users_code(longer)
        return longer

    def _longer_ledger(self, stored: Ledger, checkpointed: Ledger, *, on_flower: bool) -> Ledger:
        """Return the longer one of the ledger ``stored`` in its file and that of the checkpoint.

        Raises:
            DataError: the rounds that both have differ, or one has more than one round that the other lacks.
        """
        if on_flower and _is_charged_before(stored.events, checkpointed.events):
            return checkpointed  # the server was stopped between the checkpoint and the ledger of the last round
        shorter, longer = sorted((stored, checkpointed), key=lambda ledger: len(ledger.events))
        if longer.events[: len(shorter.events)] != shorter.events or len(longer.events) > len(shorter.events) + 1:
            raise DataError(
                f"{self.ledger_path} does not belong to this run's checkpoint, {self.checkpoint_path.name}: one of the two was changed, or "
                "is another run's; restore both from one backup"
            )
        return longer

    def check_ledger_continues(self, checkpoint: Checkpoint) -> None:
        """Raise if a run that goes on from ``checkpoint`` would overwrite a ledger that counts more rounds, or other ones.

        The ledger's last round may have no checkpoint, or another number of reports there, if the run was stopped in that round.

        Raises:
            DataError: the ledger is damaged or does not fit.
        """
        if not self.ledger_path.exists():
            return
        charged, done = Ledger.load(self.ledger_path).events, checkpoint.ledger.events
        must_be_equal = max(0, min(len(charged), len(done)) - 1)  # the rounds that both have, except the last of them
        if len(charged) > len(done) + 1 or charged[:must_be_equal] != done[:must_be_equal]:
            raise DataError(
                f"{self.ledger_path} has {counted(len(charged), 'round')} and the checkpoint beside it {len(done)}, expected the "
                "same rounds, and one more in the ledger at most: the checkpoint is an older one, or another run's. Put back the latest "
                "one, or begin a run in another folder"
            )

    def has_released(self) -> bool:
        """Return whether the run has a ledger.

        Raises:
            DataError: the ledger is missing, although the run is finished, its checkpoint has releases, or nodes were told to train; or a
                file is damaged.
        """
        if self.ledger_path.exists():
            return True
        checkpoint = self.checkpoint()
        if self.result_path.exists() or (checkpoint is not None and checkpoint.ledger.events) or self.participation().begun:
            check_present(self.ledger_path)
        return False

    def _check_states_users_code(self, ledger: Ledger) -> None:
        """Raise a :class:`DataError` if ``ledger`` says that a protection rests on ldpfl's code alone, but the config names a user's code.

        On Flower, only the protection of single records or persons rests on such code. A whole client is protected in any case, because
        the mechanism bounds all that a node sends.
        """
        code = self.config().users_code if self.config_path.exists() else ()
        releases = [event.release for event in ledger.events if event.release.protected and event.release.author == OURS]
        if code and self.kind().on_flower:
            releases = [release for release in releases if isinstance(release, GaussianRelease) and release.of_part]
        if code and releases:
            raise DataError(
                f"{self.ledger_path} says that the guarantee rests on ldpfl's code alone, but the run used {' and '.join(code)}. So the "
                "ledger is not this run's, or was changed: restore it from a backup, or begin a run in another folder"
            )

    def result(self) -> dict[str, Any] | None:
        """Return the figures of a finished run, or None if the run is not finished. Figures that are not finite numbers are None.

        Raises:
            DataError: the result file is damaged.
        """
        if not self.result_path.exists():
            return None
        remedy = f"remove it, then write it again by ldpfl run --resume --out {self.path}"
        try:
            result = from_json(read_text(self.result_path, MAX_RESULT_BYTES))
        except (OSError, ValueError) as error:
            raise DataError(f"{self.result_path} is damaged: {getattr(error, 'strerror', None) or error}; {remedy}") from error
        problem = problem_in_result(result)
        if problem:
            raise DataError(f"{self.result_path} is damaged: {printable(problem)}; {remedy}")
        figures: dict[str, Any] = _all_printable(result)
        return figures

    def model_file(self) -> ModelFile:
        """Return the description of the model in the folder, which may be a run's folder or an export.

        Raises:
            ConfigError: the folder holds no model.
            DataError: the description is damaged, or is missing beside the weights.
        """
        if self.path.is_file():
            raise ConfigError(f"{self.path} is a file, expected the folder of a run: ldpfl predict takes the folder first, then the rows")
        try:
            description: ModelFile = read_description(self.description_path, ModelFile)
        except FileNotFoundError:
            if self.model_path.exists():
                check_present(self.description_path)
            self.check_is_ldpfls()
            remedy = "give the folder of a finished run, or one that ldpfl export wrote"
            if self.config_path.exists() and not self._kind_path.exists():  # a simulation's folder has no kind.txt
                remedy = f"finish the run with ldpfl run --resume --out {self.path}"
            raise ConfigError(f"{self.path} has no {self.description_path.name}: it holds no finished run; {remedy}") from None
        return description

    def encoder(self) -> Encoder:
        """Return the encoder from rows of a table to the model's inputs.

        Raises:
            ConfigError: the model was not trained on rows of a table.
            DataError: the encoding is missing or damaged.
        """
        try:
            encoder: Encoder = read_description(self.encoding_path, Encoder)
        except FileNotFoundError:
            if self.model_file().has_encoding:
                check_present(self.encoding_path)
            raise ConfigError(
                f"{self.path} holds a model that was not trained on a table: load its module with ldpfl.load_model, and give it inputs"
            ) from None
        if encoder.data.text and encoder.width > _MAX_TEXT_LENGTH:
            raise DataError(
                f"{self.encoding_path} is damaged: it takes the first {encoder.width:,} words of a text, more than {_MAX_TEXT_LENGTH:,}; "
                "restore the file from a backup"
            )
        return encoder

    def measured_encoder(self) -> Encoder | None:
        """Return the encoder of a finished run, with the scales that it measured; None before its end, or if its data are not a table.

        Raises:
            DataError: the encoding is damaged, or is missing beside a model of a table.
        """
        is_expected = self.encoding_path.exists() or (self.description_path.exists() and self.model_file().has_encoding)
        return self.encoder() if is_expected else None

    @property
    def is_over(self) -> bool:
        """Whether the run is finished, or a sweep stopped it early. A resumed sweep does not run it again."""
        return self.result_path.exists() or self.stopped_path.exists()

    def stopped(self) -> str | None:
        """Return the reason why a sweep stopped the run early; None if it did not.

        Raises:
            DataError: the file with the reason is damaged.
        """
        if not self.stopped_path.exists():
            return None
        if self.stopped_path.is_symlink():  # a link in a stranger's folder could point to a file of this user, which would be shown
            raise DataError(f"{self.stopped_path} is a link, expected a file: remove it, and start the sweep again")
        try:
            return printable(read_text(self.stopped_path).rstrip("\n"))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{self.stopped_path} is damaged: {error}; remove it, and start the sweep again") from error

    def checkpoint_needed(self) -> Checkpoint | None:
        """Return the last checkpoint, or None if no round is finished.

        The guarantee, the figures and the predictions of a finished run follow from other files. Only code that continues from the run's
        state needs its checkpoint.

        Raises:
            DataError: the run is finished, but its checkpoint is missing; or as for :meth:`checkpoint`.
        """
        checkpoint = self.checkpoint()
        if checkpoint is None and self.result_path.exists():
            raise DataError(
                f"{self.checkpoint_path} is missing beside {self.result_path.name} of a finished run: restore the file from a backup"
            )
        return checkpoint

    def checkpoint_or(self, start: Checkpoint) -> Checkpoint:
        """Return the last checkpoint, or ``start`` if no round was finished.

        Raises:
            ConfigError: the rounds so far used other data or another device, so the model would be a mixture.
            DataError: the run is finished, but its checkpoint is missing.
        """
        checkpoint = self.checkpoint_needed()
        if checkpoint is None:
            return start
        if checkpoint.origin != start.origin:
            raise ConfigError(
                f"{self.path} was begun on {checkpoint.origin}, but would go on with {start.origin}: use the same data and device"
            )
        return checkpoint

    def checkpoint_to_resume(self, start: Checkpoint) -> Checkpoint:
        """Return the checkpoint from which to train further rounds: the last one, or ``start`` if no round was finished.

        Raises:
            ConfigError: as for :meth:`checkpoint_or`; or another version of ldpfl, with other random numbers, ran the rounds so far.
        """
        checkpoint = self.checkpoint_or(start)
        if checkpoint.words != start.words:
            raise ConfigError(
                f"{self.path} was begun by a version of ldpfl that drew random numbers in another way, so the run can be read but not "
                "resumed: begin another run in another folder"
            )
        # Checkpoints do not hold personal layers, which lie in a file of their own after the first round.
        if start.personal is None or checkpoint.state.round == start.state.round:
            return checkpoint
        return replace(checkpoint, personal=load_personal(self.personal_path(checkpoint.state.round), start.personal))

    def is_damaged(self) -> bool:
        """Return whether the run's config, checkpoint or result is there and cannot be read. A folder without a config is not damaged."""
        try:
            if self.config_path.exists():
                for read in (self.config, self.checkpoint, self.result):
                    read()  # raises if its file cannot be read
        except LdpflError:
            return True
        return False

    def clear(self) -> None:
        """Remove the files of the run, so that a new run can start in the folder."""
        for path in (*self._files(), self.secret_path, *self.path.glob(f"{_PERSONAL}*")):
            with writing(path):
                path.unlink(missing_ok=True)

    def save_round(self, checkpoint: Checkpoint) -> None:
        """Record a finished round. The checkpoint comes first: metrics and ledger can be written again from it."""
        if checkpoint.personal is not None:  # before the checkpoint, which is of no use without this file
            save_personal(checkpoint.personal, self.personal_path(checkpoint.state.round))
        checkpoint.save(self.checkpoint_path)
        if checkpoint.personal is not None:
            for older in set(self.path.glob(f"{_PERSONAL}*")) - {self.personal_path(checkpoint.state.round)}:
                older.unlink()
        self._append_metrics(checkpoint)
        checkpoint.ledger.save(self.ledger_path)

    def save_ledger(self, ledger: Ledger) -> None:
        """Write the ledger, or remove its file if ``ledger`` is empty. Call this before the checkpoint with the same charges is written.

        A crash between the two then leaves a charge without its round, and not a round without its charge.
        """
        if ledger.events:
            ledger.save(self.ledger_path)
        else:
            self.ledger_path.unlink(missing_ok=True)

    def save_result(
        self, checkpoint: Checkpoint, task: LocalTask, result: dict[str, Any], described: ModelFile, encoder: Encoder | None = None
    ) -> None:
        """Write the files of a finished run. ``result.json`` is written last, so its presence shows that all others are complete.

        Args:
            checkpoint: the last checkpoint.
            task: the task with the module that the weights belong to.
            result: the content of ``result.json``.
            described: the content of ``model.json``.
            encoder: encoder of a table's rows; None for other data.
        """
        self.save_model(checkpoint, task, result, described, encoder)
        write_text(self.result_path, to_json(result, indent=2) + "\n")

    def missing_files(self, encoder: Encoder | None) -> list[str]:
        """Return the names of the files that :meth:`save_model` writes with ``encoder`` and that are not in the folder."""
        paths = [self.metrics_path, self.ledger_path, self.model_path, self.description_path]
        if encoder is not None:
            paths.append(self.encoding_path)
        return [path.name for path in paths if not path.exists()]

    def save_model(
        self, checkpoint: Checkpoint, task: LocalTask, result: dict[str, Any], described: ModelFile, encoder: Encoder | None = None
    ) -> None:
        """Write the files of a finished run except ``result.json``. Arguments are as for :meth:`save_result`."""
        self._save_metrics(checkpoint)
        checkpoint.ledger.save(self.ledger_path, result["privacy"])
        # All tensors of the module are cloned, since a shared parameter appears under several names and safetensors refuses shared memory.
        trained = task.module_with(checkpoint.state.model)
        tensors = {name: value.detach().contiguous().clone() for name, value in tensors_to_save(trained).items()}
        with replace_atomically(self.model_path) as temporary:
            save_file(tensors, temporary)
        save_adapter(trained, self.adapter_path, described.name)
        if encoder is not None:
            write_text(self.encoding_path, encoder.model_dump_json(indent=1) + "\n")
        write_text(self.description_path, described.model_dump_json(indent=1) + "\n")

    def _save_metrics(self, checkpoint: Checkpoint) -> None:
        """Write the metrics of all rounds anew."""
        write_text(self.metrics_path, "".join(map(_metrics_line, checkpoint.history)))

    def _append_metrics(self, checkpoint: Checkpoint) -> None:
        """Append the last round's line to the metrics. If they do not end with the line of the round before, write all lines again."""
        lines = [_metrics_line(metrics) for metrics in checkpoint.history[-2:]]
        if len(lines) == 2 and self.metrics_path.is_file() and ends_with(self.metrics_path, lines[0]):
            append_text(self.metrics_path, lines[1], self.metrics_path.stat().st_size)
        else:
            self._save_metrics(checkpoint)


def _metrics_line(metrics: RoundMetrics) -> str:
    """Return the line of ``metrics.jsonl`` for one round, without figures such as times that differ between equal runs."""
    return to_json(metrics.reproducible()) + "\n"


_PERSONAL = "PRIVATE-personal-"
"""Start of the names of files with personal layers."""
_MAX_TEXT_LENGTH = 1 << 16
"""Maximum text length of an encoding from an untrusted folder, in words. Each row takes memory for all of them."""
TRIAL = (
    "this run is a trial of a tuning, and the other trials are not counted here: the guarantee of the tuning's release is in its folder "
    "'release'"
)
"""Warning beside the guarantee of a trial."""
_UNUSED_ON_FLOWER: dict[str, tuple[str, ...]] = {
    "data": (),
    "model": (),
    "clients": ("count",),
    "training": ("epochs", "batch_size", "learning_rate", "momentum", "clip_norm"),
}
"""Settings that ``LdpStrategy`` does not use: for each section these keys, or all of them if none are listed."""
_COMMENT_OF_OWN_APP = "# A run of a user's own app on Flower. Only that app knows its data, its model and how its clients train.\n"


def _all_printable(figures: Any) -> Any:
    """Return ``figures`` with all texts made printable. They come from an untrusted file, and are shown in a terminal."""
    match figures:
        case str():
            return printable(figures)
        case dict():
            return {printable(str(key)): _all_printable(value) for key, value in figures.items()}
        case list():
            return [_all_printable(value) for value in figures]
    return figures


def _is_charged_before(charged: Sequence[RoundEvent], finished: Sequence[RoundEvent]) -> bool:
    """Return whether ``charged`` and ``finished`` are the same rounds, and ``charged`` has the last one as charged before it began.

    Before a round, at most as many reports are charged as come in the end: fewer reports hide one another less. So not all clients may
    count then, and the participation is "visible" even if it is "everyone" in the end.
    """
    if not charged or len(charged) != len(finished) or charged[:-1] != finished[:-1]:
        return False
    before, after = charged[-1], finished[-1]
    fewer = before.cohort <= after.cohort and before.colluding <= after.colluding and before.sampling in ("visible", after.sampling)
    return fewer and replace(before, cohort=after.cohort, colluding=after.colluding, sampling=after.sampling) == after
