"""Run a config to its end, in a folder or in memory, and train its noise-free baseline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from ldpfl.data import Dataset
from ldpfl.data.encoder import Encoder
from ldpfl.data.features.extraction import Progress, no_progress
from ldpfl.errors import ConfigError, WriteError, error_without_data
from ldpfl.experiments.baseline import Baseline, baseline_of, config_with_clipping_only, config_without_noise
from ldpfl.experiments.build import MAX_CLIPPED_SHARE, build, with_torch_defaults
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.dataset import NO_CALLER_OBJECTS, CallerObjects, Description, load_dataset
from ldpfl.experiments.figures import as_released, last_round_before_stopping, summarise
from ldpfl.experiments.model_file import ModelFile
from ldpfl.experiments.pooled import pooled_scores
from ldpfl.experiments.quality import Reference, scores_on_test_rows
from ldpfl.experiments.run_folder import Kind, RunFolder
from ldpfl.experiments.secret_seed import new_secret
from ldpfl.models.adapters import base_digest
from ldpfl.models.pretrained import licence_of
from ldpfl.privacy.accounting import account
from ldpfl.server import Checkpoint, RoundMetrics
from ldpfl.simulation import Federation, simulate
from ldpfl.simulation.ray_workers import is_ray
from ldpfl.simulation.workers import Count, workers
from ldpfl.util.files import writing
from ldpfl.util.number_format import counted
from ldpfl.util.randomness import require_secret
from ldpfl.util.user_cache import CACHE_DIR_VARIABLE, warning_of_no_cache
from ldpfl.util.user_code import is_pretrained

Value = TypeVar("Value")
_Scorer = Callable[[RunConfig, Dataset, int | None], Reference]
"""Function from a config, its data and the secret seed of its noise to the scores of the noise-free baseline."""


class Observer(Protocol):
    """Receiver of a run's progress and warnings, such as the progress bar."""

    def started(self, label: str, rounds: int, done: tuple[RoundMetrics, ...], metric: str) -> None: ...

    def clients_done(self, done: int, total: int) -> None: ...

    def round_done(self, metrics: RoundMetrics) -> None: ...

    def warn(self, message: str) -> None: ...


@dataclass(frozen=True)
class Runner:
    """Executes runs on one device, with one data folder and one observer.

    Attributes:
        draw_curve: function that is called with (path, result) to draw the learning curve of a finished run.
        preparing: function that is called with the progress of computing features.
        caller_objects: data or a model that a caller passes from Python.
        workers: number of worker processes, see :func:`ldpfl.simulation.workers.workers`. Results do not depend on it.
    """

    data_dir: Path | None
    device: torch.device
    observer: Observer
    draw_curve: Callable[[Path, dict[str, Any]], None]
    preparing: Progress = no_progress
    caller_objects: CallerObjects = NO_CALLER_OBJECTS
    workers: Count = "auto"

    @with_torch_defaults()
    def in_memory(self, config: RunConfig, *, baseline: bool) -> Finished:
        """Run ``config`` without writing files. With ``baseline``, the noise-free baseline is trained too, without the cache.

        Raises:
            LdpflError: the config, the data or the model does not fit; or a client's policy refuses to send its values.
        """
        data, secret = self._load_data(config), new_secret(config)
        federation, start = self._build(config, data, secret)
        final = self._run_rounds(federation, start, config.training.rounds, _save_nothing, _label(config))
        figures = self._summarise(config, federation, data, final, self._train_baseline if baseline else None, secret)
        return Finished(config, federation, final, figures, data)

    @with_torch_defaults()
    def run(
        self, config: RunConfig, folder: RunFolder, *, resume: bool = False, baseline: bool | None = None, more_rounds: bool = False
    ) -> Finished:
        """Run ``config`` in ``folder``.

        The folder can be resumed after each round. A resumed run ends in the same model, metrics and config as an uninterrupted one.
        A finished run is returned unchanged, with its guarantee computed from its ledger. Files of it that are missing are written again,
        and its baseline is added if that is wanted and missing. On a user's own data a missing baseline is not added, since it may have
        been left out on purpose.

        Args:
            baseline: whether to train a noise-free baseline. None repeats the choice that the run was started with; a new run has one.
            more_rounds: whether to continue the finished run in ``folder`` under ``config``. It stays a finished run until the first of
                these rounds is done.

        Raises:
            LdpflError: the config, the data, the model or the folder does not fit; or a client's policy refuses to send its values.
            WriteError: the folder cannot be written. Finished rounds are kept.
        """
        data = self._load_data(config)
        secret = self._secret_of_run(config, folder, resume=resume)
        # Only a finished run may lack its secret. Its columns are not measured again, since that would draw noise from the secret.
        measured = folder.measured_encoder() if config.secret_noise and secret is None else None
        federation, start = self._build(config, data, secret, measured)
        if not more_rounds:
            folder.check(config, resume=resume, kind=Kind.SIMULATION)
        with folder.locked():
            earlier_result = folder.result() if resume else None
            # The choice is stored before the config: a folder with a config can be resumed, and would else miss the choice.
            baseline_chosen = folder.remember_baseline_choice(baseline)
            if not more_rounds:
                folder.open(config, resume=resume, kind=Kind.SIMULATION, secret=secret)
            baseline_left_out = earlier_result is not None and earlier_result["noise_free_score"] is None and config.data.brought
            wants_baseline = baseline_chosen and config.mechanism.protects and not baseline_left_out
            figures = None if more_rounds else earlier_result  # with more rounds, the result is computed anew
            # The run is finished, and no baseline has to be added.
            if figures is not None and (figures["noise_free_score"] is not None or not wants_baseline):
                return self._stored_run(config, folder, federation, start, figures, data)
            # ``secret`` was read or drawn before the lock was held.
            if config.secret_noise and require_secret(folder.secret()) != secret:
                raise ConfigError(
                    f"another process began a run in {folder.path} at the same time: wait for its end, or give another folder"
                )
            checkpoint = folder.checkpoint_to_resume(start)
            if checkpoint.ledger.events[: len(start.ledger.events)] != start.ledger.events:
                raise ConfigError(
                    f"the columns of the run in {folder.path} were measured under other settings than its config has now, and the stated "
                    "epsilon would not count measuring them again: put its config back, or start the run in a new folder"
                )
            save = partial(_save_added_round, folder, config, checkpoint.state.round + 1) if more_rounds else folder.save_round
            final = self._run_rounds(federation, checkpoint, config.training.rounds, save, _label(config))
            figures = self._summarise(config, federation, data, final, self._baseline_scores if wants_baseline else None, secret)
            folder.save_result(final, federation.task, figures, model_file_of(config, federation, data), federation.encoder)
            self._draw_learning_curve(folder, figures)
        return Finished(config, federation, final, figures, data)

    def _stored_run(
        self, config: RunConfig, folder: RunFolder, federation: Federation, start: Checkpoint, figures: dict[str, Any], data: Dataset
    ) -> Finished:
        """Return the finished run in ``folder`` with its guarantee computed from its ledger, and write its missing files again.

        ``start`` is the state before the first round, and ``figures`` are those of the stored result.
        """
        final = folder.checkpoint_or(start)
        figures = as_released(figures, final.ledger, account(final.ledger, config.privacy.delta))
        if not folder.curve_path.exists():  # after a crash before the curve was drawn
            self._draw_learning_curve(folder, figures)
        if missing := folder.missing_files(federation.encoder):
            final = folder.checkpoint_to_resume(start)
            folder.save_model(final, federation.task, figures, model_file_of(config, federation, data), federation.encoder)
            self.observer.warn(f"files that were missing are written again from the checkpoint: {', '.join(missing)}")
        folder.ledger()  # raises if the files of the run contradict each other
        return Finished(config, federation, final, figures, data)

    def _summarise(
        self, config: RunConfig, federation: Federation, data: Dataset, final: Checkpoint, scorer: _Scorer | None, secret: int | None
    ) -> dict[str, Any]:
        """Return the figures of a run that has finished its rounds. If the baseline fails, it is left out with a warning.

        Args:
            final: the run's last checkpoint.
            scorer: function that returns the scores of the noise-free baseline; None if no baseline is wanted.
            secret: secret seed of the run's noise; None if the noise follows from the config's seed.
        """
        reference = clamped = None
        if scorer is not None and config.mechanism.protects:
            reference = self._none_if_it_fails("no noise-free baseline to compare with", lambda: scorer(config, data, secret))
            clamped = self._none_if_it_fails(
                "no score with clipping but without noise", lambda: self._clamped_score(config, data, final, reference, secret)
            )
        return summarise(config, federation, data, final, reference, clamped)

    def _draw_learning_curve(self, folder: RunFolder, figures: dict[str, Any]) -> None:
        """Draw the learning curve. If that fails, only warn."""
        self._none_if_it_fails(f"no {folder.curve_path.name}", lambda: self.draw_curve(folder.curve_path, figures))

    def _none_if_it_fails(self, warning: str, make: Callable[[], Value]) -> Value | None:
        """Return the result of ``make``. If ``make`` fails, warn with the text ``warning`` and the reason, and return None."""
        try:
            return make()
        except Exception as error:  # the result of the rounds must not be lost
            self.observer.warn(f"{warning}: {error_without_data(error)}")
            return None

    def _run_rounds(
        self, federation: Federation, start: Checkpoint, rounds: int, save: Callable[[Checkpoint], None], label: str
    ) -> Checkpoint:
        """Run the rounds from ``start`` up to round number ``rounds``, call ``save`` after each, and return the last checkpoint.

        ``label`` tells the observer which training this is.
        """
        self.observer.started(label, rounds, start.history, federation.task.task.metric)
        checkpoint, has_warned = start, False
        with workers(self.workers, self.device, self.observer.warn) as pool:
            for checkpoint in simulate(federation, start, rounds, self.observer.clients_done, pool):
                save(checkpoint)
                self.observer.round_done(checkpoint.history[-1])
                # Warn once. A baseline is not clipped.
                if not has_warned and label == _PRIVATE and (warning := _clipping_warning(checkpoint.history[-1])):
                    self.observer.warn(warning)
                    has_warned = True
        last_round = last_round_before_stopping(federation, checkpoint)
        if last_round is not None and federation.stopping is not None:
            reason = f"the loss on validation rows has not fallen for {counted(federation.stopping.patience, 'round')}"
            self.observer.warn(f"stopped after round {last_round} of {rounds}: {reason}")
        return checkpoint

    @with_torch_defaults()
    def baseline(self, config: RunConfig) -> RunFolder:
        """Return the folder of a finished run of the same training without noise.

        The folder is in the user's cache folder. The baseline is trained only if the cache has none for an equal config. A baseline whose
        model is named by import path is trained each time.

        Raises:
            LdpflError: the config, the data, the model or the cache folder does not fit.
            WriteError: the cache folder cannot be written, and the baseline is not there.
        """
        baseline = baseline_of(config, self._load_data(config), self._build)
        try:
            self._cached_result(baseline)
        except WriteError as error:
            hint = f"set {CACHE_DIR_VARIABLE} to a folder that can be written"
            raise WriteError(
                f"{error}: the noise-free baseline cannot be stored in the cache; {hint}", error.reason, error.remedy
            ) from error
        return baseline.folder

    def _load_data(self, config: RunConfig) -> Dataset:
        """Return the data of ``config``, or raise a :class:`ConfigError` if only nodes have them."""
        if config.data.at_nodes:
            raise ConfigError(
                "data.name = 'node' is for clients on Flower, each with its own table: for a simulation give a table with --data (data=...)"
            )
        return load_dataset(config, self.data_dir, self.observer.warn, self.preparing, self.caller_objects)

    def _secret_of_run(self, config: RunConfig, folder: RunFolder, *, resume: bool) -> int | None:
        """Return the secret seed of the noise of the run in ``folder``: the stored one, or a new one for a new run.

        It is None if the noise follows from the config's seed, or if a finished run has lost its secret, which it needs no more.

        Raises:
            ConfigError: the run is not finished, and its secret is missing.
            DataError: the file of the secret is damaged.
        """
        if not (config.secret_noise and resume and folder.config_path.exists()):
            return new_secret(config)
        secret = folder.secret()
        # A finished run to which no rounds are added.
        draws_no_more_noise = folder.result_path.exists() and config.training.rounds == folder.config().training.rounds
        return secret if draws_no_more_noise else require_secret(secret)

    def _train_baseline(self, config: RunConfig, data: Dataset, secret: int | None) -> Reference:
        """Train the noise-free baseline without the cache, and return its scores."""
        federation, start = self._build(config_without_noise(config), data, secret)
        final = self._run_rounds(federation, start, config.training.rounds, _save_nothing, _BASELINE)
        return self._scores_of_baseline(federation, final)

    def _build(
        self, config: RunConfig, data: Dataset, secret: int | None = None, measured: Encoder | None = None
    ) -> tuple[Federation, Checkpoint]:
        """Return the federation of ``config`` and its state before the first round, see :func:`ldpfl.experiments.build.build`."""
        if config.model.personal and isinstance(self.workers, str) and is_ray(self.workers):
            raise ConfigError("model.personal keeps clients' layers on this machine, but Ray trains on others: set workers to a number")
        return build(config, data, self.device, self.caller_objects.module, self.observer.warn, secret, measured)

    def _baseline_scores(self, config: RunConfig, data: Dataset, secret: int | None) -> Reference:
        """Return the scores of the noise-free baseline, from the cache if it may be stored there."""
        baseline = baseline_of(config, data, partial(self._build, secret=secret))
        if not baseline.config.data.brought:  # a model that was trained without noise on a user's own data is never stored
            try:
                result = self._cached_result(baseline)
                return Reference(list(result["score_per_round"]), result["scores"])
            except WriteError as error:
                self.observer.warn(warning_of_no_cache(error))
        rounds = baseline.config.training.rounds
        final = self._run_rounds(baseline.federation, baseline.last_checkpoint(), rounds, _save_nothing, _BASELINE)
        return self._scores_of_baseline(baseline.federation, final)

    def _scores_of_baseline(self, federation: Federation, final: Checkpoint) -> Reference:
        """Return the scores of a baseline that ended in the checkpoint ``final``, and those of the pooled regression on its data."""
        scores = self._none_if_it_fails(
            "no figures of the noise-free model beside its scores",
            lambda: scores_on_test_rows(federation, final.state.model, final.personal),
        )
        pooled = self._none_if_it_fails("no pooled reference", lambda: pooled_scores(federation))
        return Reference([metrics.score for metrics in final.history], scores or {}, pooled)

    def _clamped_score(
        self, config: RunConfig, data: Dataset, final: Checkpoint, reference: Reference | None, secret: int | None
    ) -> float | None:
        """Return the score of the same training with clipping and without noise; None unless clipping was heavy enough to matter."""
        most_clipped = max((share for metrics in final.history for share in metrics.clipped_fraction.values()), default=0.0)
        if reference is None or not config.mechanism.uses_ranges or most_clipped <= _HEAVILY_CLIPPED:
            return None
        federation, start = self._build(config_with_clipping_only(config), data, secret)
        return self._run_rounds(federation, start, config.training.rounds, _save_nothing, "clamped, without noise").history[-1].score

    def _cached_result(self, baseline: Baseline) -> dict[str, Any]:
        """Return the baseline's result from its cache folder. If it is not finished, it is run there.

        Raises:
            WriteError: the baseline is not finished, and the folder cannot be written.
        """
        folder = baseline.folder
        with writing(folder.path):  # even reading the folder may be forbidden
            # No lock, since a cache may be read-only. The result is written last and atomically, so it is complete if it exists.
            finished = baseline.cached_result()
            if finished is not None:
                return finished
            with folder.locked(wait=True):
                if baseline.has_user_code or folder.is_damaged():  # code may have changed since the last run
                    folder.clear()
                result = folder.result()
                if result is None:
                    folder.open(baseline.config, resume=True, kind=Kind.SIMULATION)
                    rounds = baseline.config.training.rounds
                    final = self._run_rounds(
                        baseline.federation, folder.checkpoint_or(baseline.start), rounds, folder.save_round, _BASELINE
                    )
                    result = summarise(baseline.config, baseline.federation, baseline.data, final, None)
                    described = model_file_of(baseline.config, baseline.federation, baseline.data)
                    folder.save_result(final, baseline.federation.task, result, described)
        return result


def model_file_of(config: RunConfig, federation: Federation, data: Dataset) -> ModelFile:
    """Return the content of ``model.json``, which describes the weights of a finished run."""
    task = federation.task
    digest, model = base_digest(task.module), config.model
    # Ordered classes have one output less than there are classes, so their names do not fit the outputs.
    classes = data.classes if task.task.targets == "class" else ()
    if is_pretrained(model.name):
        model = model.model_copy(update={"licence": licence_of(model.name, model.licence)})
    has_encoding = federation.encoder is not None
    return ModelFile.of(model, Description.of(data), task.task.targets, task.mean, task.std, classes, digest, has_encoding=has_encoding)


def _clipping_warning(metrics: RoundMetrics) -> str:
    """Return a warning on layers in which a large share of values was clipped in this round; "" if there are none.

    Only a simulation knows these shares.
    """
    clipped = {name: share for name, share in metrics.clipped_fraction.items() if share > MAX_CLIPPED_SHARE}
    if not clipped:
        return ""
    shares = ", ".join(f"{share:.0%} of {name}" for name, share in clipped.items())
    advice = "a larger ranges.radius clips less, but adds noise"
    return f"round {metrics.round}: {shares} was outside its range and was clipped, which costs accuracy: {advice}"


_PRIVATE, _BASELINE = "private", "noise-free baseline"
"""Labels of trainings, for the observer."""
_HEAVILY_CLIPPED = 0.5
"""Share of a layer that was clipped in some round above which clipping may explain a low score."""


@dataclass(frozen=True, eq=False)
class Finished:
    """A finished run, with everything that it was made from.

    Attributes:
        data: the training and test data.
        figures: the content of ``result.json``.
    """

    config: RunConfig
    federation: Federation
    last: Checkpoint
    figures: dict[str, Any]
    data: Dataset

    @property
    def model_file(self) -> ModelFile:
        """Content of ``model.json``."""
        return model_file_of(self.config, self.federation, self.data)


def _label(config: RunConfig) -> str:
    """Return the label of a run for the observer: whether it is private."""
    return _PRIVATE if config.mechanism.protects else "not private"


def _save_added_round(folder: RunFolder, config: RunConfig, first: int, checkpoint: Checkpoint) -> None:
    """Record a round that was added to the finished run in ``folder``.

    ``first`` is the number of the first added round. Before that round is stored, the folder is changed to an unfinished run of ``config``.
    """
    if checkpoint.state.round == first:
        folder.reopen(config)
    folder.save_round(checkpoint)


def _save_nothing(checkpoint: Checkpoint) -> None:
    """Ignore the checkpoint of a round. Runs without a folder pass this function where others pass the one that saves rounds."""
