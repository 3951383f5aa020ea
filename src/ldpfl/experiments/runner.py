"""Run a config to its end, in a folder, with its noise-free baseline beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from ldpfl.data import Dataset
from ldpfl.data.encoder import Encoder
from ldpfl.data.features.extraction import Progress, quietly
from ldpfl.errors import ConfigError, WriteError, in_short
from ldpfl.experiments.baseline import Baseline, baseline_of, clamped_only, noise_free
from ldpfl.experiments.build import MUCH_CLAMPED, as_usual, build
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.dataset import NOTHING, Description, Given, load_dataset
from ldpfl.experiments.figures import stopped_after, summarise
from ldpfl.experiments.model_file import ModelFile
from ldpfl.experiments.pooled import pooled_scores
from ldpfl.experiments.quality import Reference, scores_of
from ldpfl.experiments.run_folder import Kind, RunFolder
from ldpfl.experiments.secret_seed import drawn
from ldpfl.models.adapters import base_digest
from ldpfl.models.pretrained import licence_of
from ldpfl.server import Checkpoint, RoundMetrics
from ldpfl.simulation import Federation, simulate
from ldpfl.simulation.workers import Count, workers
from ldpfl.util.files import writing
from ldpfl.util.number_format import counted
from ldpfl.util.randomness import known
from ldpfl.util.user_cache import CACHE_DIR_VARIABLE, without_cache
from ldpfl.util.user_code import is_pretrained

Value = TypeVar("Value")
_Scores = Callable[[RunConfig, Dataset, int | None], Reference]


class Observer(Protocol):
    """Is told how a run gets on; draws the progress bar."""

    def started(self, label: str, rounds: int, done: tuple[RoundMetrics, ...], metric: str) -> None: ...

    def clients_done(self, done: int, total: int) -> None: ...

    def round_done(self, metrics: RoundMetrics) -> None: ...

    def warn(self, message: str) -> None: ...


@dataclass(frozen=True)
class Runner:
    """Where runs happen: the data folder, the device, and who watches.

    Attributes:
        draw_curve: called with (path, result) to draw how a run went.
        preparing: called while features are computed.
        given: data or a model that a caller hands over.
        workers: how many processes train, see :func:`ldpfl.simulation.workers.workers`; results do not depend on it.
    """

    data_dir: Path | None
    device: torch.device
    observer: Observer
    draw_curve: Callable[[Path, dict[str, Any]], None]
    preparing: Progress = quietly
    given: Given = NOTHING
    workers: Count = "auto"

    @as_usual()
    def in_memory(self, config: RunConfig, *, baseline: bool) -> Finished:
        """Run ``config`` without a file; its baseline, if that is wanted, is trained anew.

        Raises:
            LdpflError: the config, the data or the model does not fit; or a client's values must not leave.
        """
        task, secret = self._data(config), drawn(config)
        federation, start = self._build(config, task, secret)
        last = self._rounds(federation, start, config.training.rounds, _nowhere, _label(config))
        figures = self._figures(config, federation, task, last, self._trained_anew if baseline else None, secret)
        return Finished(config, federation, last, figures, task)

    @as_usual()
    def run(
        self, config: RunConfig, folder: RunFolder, *, resume: bool = False, baseline: bool | None = None, more_rounds: bool = False
    ) -> Finished:
        """Run ``config`` in ``folder``.

        A ``baseline`` of None is what was asked for when the run was begun, and of a new run that there is one. A finished run is returned
        as it is, with its baseline added if that is wanted and missing; but not on a user's own data, from which it may have been left out
        for good. After each round the folder can be resumed from; a resumed run ends in the same model, metrics
        and config as one that was never interrupted. With ``more_rounds`` the finished run there goes on under ``config``.

        Raises:
            LdpflError: the config, the data, the model or the folder does not fit; or a client's values must not leave.
            WriteError: the folder cannot be written; finished rounds are kept.
        """
        task = self._data(config)
        secret = self._secret(config, folder, resume=resume)
        # Without its secret a run is finished: then its columns are not measured again, which would draw noise.
        measured = folder.measured() if config.secret_noise and secret is None else None
        federation, start = self._build(config, task, secret, measured)
        if not more_rounds:
            folder.check(config, resume=resume, kind=Kind.SIMULATION)
        with folder.locked():
            before = folder.result() if resume else None
            if more_rounds:  # all that may be refused has been by now, and the run still stands as it was
                folder.checkpoint_to_go_on(start)
                folder.reopen(config)
            asked = folder.wants_baseline(baseline)  # kept before the config, from where on a run is gone on with by its folder alone
            folder.open(config, resume=resume, kind=Kind.SIMULATION, secret=secret)
            left_out = before is not None and before["noise_free_score"] is None and config.data.brought
            wants_baseline = asked and config.mechanism.protects and not left_out
            figures = folder.result() if resume else None
            if figures is not None and (figures["noise_free_score"] is not None or not wants_baseline):
                if not folder.curve_path.exists():  # as after a crash while it was drawn
                    self._draw(folder, figures)
                return Finished(config, federation, folder.checkpoint_or(start), figures, task)
            if config.secret_noise and known(folder.secret()) != secret:
                raise ConfigError(f"another process began the run in {folder.path} at the same time: resume that one")
            reached = folder.checkpoint_to_go_on(start)
            if reached.ledger.events[: len(start.ledger.events)] != start.ledger.events:
                raise ConfigError(
                    f"{folder.path} measured its columns in another way than its config now says: a second time is not charged"
                )
            last = self._rounds(federation, reached, config.training.rounds, folder.save_round, _label(config))
            figures = self._figures(config, federation, task, last, self._baseline_scores if wants_baseline else None, secret)
            folder.save_result(last, federation.task, figures, model_file_of(config, federation, task), federation.encoder)
            self._draw(folder, figures)
        return Finished(config, federation, last, figures, task)

    def _figures(
        self, config: RunConfig, federation: Federation, task: Dataset, last: Checkpoint, scores: _Scores | None, secret: int | None
    ) -> dict[str, Any]:
        """Return the figures of a run whose rounds are over; what of them fails must not cost the run its result.

        Args:
            scores: what gives the noise-free baseline, if that is wanted.
        """
        reference = clamped = None
        if scores is not None and config.mechanism.protects:
            reference = self._or_none("no noise-free baseline to compare with", lambda: scores(config, task, secret))
            clamped = self._or_none(
                "no score without noise and clamped", lambda: self._clamped_score(config, task, last, reference, secret)
            )
        return summarise(config, federation, task, last, reference, clamped)

    def _draw(self, folder: RunFolder, figures: dict[str, Any]) -> None:
        self._or_none(f"no {folder.curve_path.name}", lambda: self.draw_curve(folder.curve_path, figures))

    def _or_none(self, lack: str, make: Callable[[], Value]) -> Value | None:
        """Return what ``make`` does; None where it fails, and then it is said that there is a ``lack``."""
        try:
            return make()
        except Exception as error:  # what the rounds came to is worth more
            self.observer.warn(f"{lack}: {in_short(error)}")
            return None

    def _rounds(self, federation: Federation, start: Checkpoint, rounds: int, save: Callable[[Checkpoint], None], label: str) -> Checkpoint:
        self.observer.started(label, rounds, start.history, federation.task.task.metric)
        last, warned = start, False
        with workers(self.workers, self.device, self.observer.warn) as pool:
            for last in simulate(federation, start, rounds, self.observer.clients_done, pool):
                save(last)
                self.observer.round_done(last.history[-1])
                if not warned and label == _PRIVATE and (clamped := _clamped(last.history[-1])):  # without noise nothing is clamped
                    self.observer.warn(clamped)
                    warned = True
        after = stopped_after(federation, last)
        if after is not None and federation.stopping is not None:
            waited = f"the loss on validation rows has not fallen for {counted(federation.stopping.patience, 'round')}"
            self.observer.warn(f"stopped after round {after} of {rounds}: {waited}")
        return last

    @as_usual()
    def baseline(self, config: RunConfig) -> RunFolder:
        """Return the finished folder of the same training without noise; run once, then cached, and shared by equal baselines.

        It lies in the user's cache folder. A baseline whose model is named by import path is run anew each time.

        Raises:
            LdpflError: the config, the data, the model or the cache folder does not fit.
            WriteError: the cache folder cannot be written, and the baseline is not there.
        """
        baseline = baseline_of(config, self._data(config), self._build)
        try:
            self._cached(baseline)
        except WriteError as error:
            hint = f"set {CACHE_DIR_VARIABLE} to a folder that can be written"
            raise WriteError(f"{error}: the noise-free baseline is kept in the cache; {hint}", error.reason, error.remedy) from error
        return baseline.folder

    def _data(self, config: RunConfig) -> Dataset:
        if config.data.at_nodes:
            raise ConfigError(
                "data.name = 'node' is for clients on Flower, each with its own table: a simulation needs rows, given as data"
            )
        return load_dataset(config, self.data_dir, self.observer.warn, self.preparing, self.given)

    def _secret(self, config: RunConfig, folder: RunFolder, *, resume: bool) -> int | None:
        """Return what the noise of the run in ``folder`` follows from: its own secret, or a new one for a run that is begun.

        Raises:
            ConfigError: the run is not finished, and its secret is not there.
            DataError: the file of the secret is damaged.
        """
        if not (config.secret_noise and resume and folder.config_path.exists()):
            return drawn(config)
        secret = folder.secret()
        return secret if folder.result_path.exists() and config.training.rounds == folder.config().training.rounds else known(secret)

    def _trained_anew(self, config: RunConfig, task: Dataset, secret: int | None) -> Reference:
        federation, start = self._build(noise_free(config), task, secret)
        last = self._rounds(federation, start, config.training.rounds, _nowhere, _BASELINE)
        return self._reference(federation, last)

    def _build(
        self, config: RunConfig, task: Dataset, secret: int | None = None, measured: Encoder | None = None
    ) -> tuple[Federation, Checkpoint]:
        return build(config, task, self.device, self.given.module, self.observer.warn, secret, measured)

    def _baseline_scores(self, config: RunConfig, task: Dataset, secret: int | None) -> Reference:
        baseline = baseline_of(config, task, partial(self._build, secret=secret))
        if not baseline.config.data.brought:  # nothing that is made of a user's own data without noise is kept
            try:
                kept = self._cached(baseline)
                return Reference(list(kept["score_per_round"]), kept["scores"])
            except WriteError as error:
                self.observer.warn(without_cache(error))
        last = self._rounds(baseline.federation, baseline.reached(), baseline.config.training.rounds, lambda checkpoint: None, _BASELINE)
        return self._reference(baseline.federation, last)

    def _reference(self, federation: Federation, last: Checkpoint) -> Reference:
        scores = self._or_none("no figures of the noise-free model beside its scores", lambda: scores_of(federation, last.state.model))
        pooled = self._or_none("no pooled reference", lambda: pooled_scores(federation))
        return Reference([metrics.score for metrics in last.history], scores or {}, pooled)

    def _clamped_score(
        self, config: RunConfig, task: Dataset, last: Checkpoint, reference: Reference | None, secret: int | None
    ) -> float | None:
        """Return the score of the same training that is clamped and has no noise, where clamping may have cost something."""
        worst = max((share for metrics in last.history for share in metrics.clipped_fraction.values()), default=0.0)
        if reference is None or not config.mechanism.uses_ranges or worst <= _MOSTLY_CLAMPED:
            return None
        federation, start = self._build(clamped_only(config), task, secret)
        return self._rounds(federation, start, config.training.rounds, _nowhere, "clamped, without noise").history[-1].score

    def _cached(self, baseline: Baseline) -> dict[str, Any]:
        """Return the baseline's result from its folder, and run it there if it is not finished.

        Raises:
            WriteError: it is not finished, and the folder cannot be written.
        """
        folder = baseline.folder
        with writing(folder.path):  # looking into it may be forbidden as well
            # Without a lock, for a cache may be read-only: the result is the last file of a run, and comes all at once.
            finished = baseline.kept()
            if finished is not None:
                return finished
            with folder.locked(wait=True):
                if baseline.by_import_path or folder.is_damaged():
                    folder.clear()
                result = folder.result()
                if result is None:
                    folder.open(baseline.config, resume=True, kind=Kind.SIMULATION)
                    rounds = baseline.config.training.rounds
                    last = self._rounds(baseline.federation, folder.checkpoint_or(baseline.start), rounds, folder.save_round, _BASELINE)
                    result = summarise(baseline.config, baseline.federation, baseline.task, last, None)
                    described = model_file_of(baseline.config, baseline.federation, baseline.task)
                    folder.save_result(last, baseline.federation.task, result, described)
        return result


def model_file_of(config: RunConfig, federation: Federation, data: Dataset) -> ModelFile:
    """Return what is written beside the weights of a finished run."""
    task = federation.task
    digest, model = base_digest(task.module), config.model
    if is_pretrained(model.name):
        model = model.model_copy(update={"licence": licence_of(model.name, model.licence)})
    return ModelFile.of(model, Description.of(data), task.task.targets, task.mean, task.std, data.classes, digest)


def _clamped(metrics: RoundMetrics) -> str:
    """Return what to say of layers of which much lay outside their ranges; only a simulation can know."""
    found = {name: share for name, share in metrics.clipped_fraction.items() if share > MUCH_CLAMPED}
    if not found:
        return ""
    shares = ", ".join(f"{share:.0%} of {name}" for name, share in found.items())
    return (
        f"round {metrics.round}: {shares} was outside its range and was clamped, which costs accuracy beside the noise: see ranges.radius"
    )


_PRIVATE, _BASELINE = "private", "noise-free baseline"
_MOSTLY_CLAMPED = 0.5
"""Share of a layer outside its range in some round from which clamping may be what a run suffers from."""


@dataclass(frozen=True, eq=False)
class Finished:
    """A run that has come to its end, with all that made it.

    Attributes:
        data: what was trained and measured on.
        figures: what ``result.json`` holds.
    """

    config: RunConfig
    federation: Federation
    last: Checkpoint
    figures: dict[str, Any]
    data: Dataset

    @property
    def described(self) -> ModelFile:
        """What ``model.json`` holds."""
        return model_file_of(self.config, self.federation, self.data)


def _label(config: RunConfig) -> str:
    return _PRIVATE if config.mechanism.protects else "not private"


def _nowhere(checkpoint: Checkpoint) -> None:
    """Keep nothing of a round."""
