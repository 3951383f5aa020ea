"""Tune settings under one guarantee."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from rich.console import Group
from rich.text import Text
from torch import nn

from ldpfl.api.arguments import Settings, checked
from ldpfl.api.configuring import overrides_by_key, setting_texts, settings_and_objects
from ldpfl.api.exporting import note_on_tensors_as_given, write_model
from ldpfl.api.running import displayed, runner_for
from ldpfl.api.sweeping import WatchedRuns
from ldpfl.errors import ConfigError
from ldpfl.experiments.dataset import SIMULATION
from ldpfl.experiments.other_folders import PRIVATE, RELEASE, TUNED
from ldpfl.experiments.public_figures import public_caveats
from ldpfl.experiments.shipped import DEFAULT, OWN, sweep_names
from ldpfl.experiments.sweep_config import SweepConfig, load_sweep, parse_axis, sweep_of
from ldpfl.experiments.tuning import Chosen, TunedGuarantee, Tuning, run_tuning, setting_label
from ldpfl.privacy.accountants.best_of_trials import Law, TrialCount
from ldpfl.privacy.guarantee import IF_TRUSTED
from ldpfl.report import client_figures
from ldpfl.report.privacy import guarantee_table, notes_on
from ldpfl.report.progress import ProgressDisplay
from ldpfl.report.scores import format_score
from ldpfl.simulation.evaluating_records import LOSS
from ldpfl.tasks.weighted_metrics import AUROC
from ldpfl.util.displays import Shown
from ldpfl.util.files import from_toml, read_text, to_json, write_text
from ldpfl.util.number_format import number


@dataclass(frozen=True, eq=False)
class TuneResult(Shown):
    """The release of a tuning: the chosen trial. It holds nothing of the other trials.

    Attributes:
        setting: the chosen variant, if there are several, and the value of each tuned setting, as text.
        values: value of each tuned setting, by dotted key.
        metric: name of the score.
        score: noisy score of the chosen trial. As the best of several noisy scores, it is a little too high on average.
        interval: 95 % interval of the score. It does not account for the choice of the best.
        settings: names of all settings among which the tuning chose.
        guarantee: the guarantee of the release, and that of all trials.
        sentences: meaning of the guarantee in plain words.
        caveats: notes of the chosen trial that may be published, for example that classes were taken from the data.
        folder: folder with the model, for :func:`ldpfl.load_model` and :func:`ldpfl.predict`.
    """

    setting: str
    values: Mapping[str, Any]
    metric: str
    score: float
    interval: tuple[float, float]
    settings: tuple[str, ...]
    guarantee: TunedGuarantee
    sentences: tuple[str, ...]
    caveats: tuple[str, ...]
    folder: Path

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the folder, for JSON."""
        return {
            "setting": self.setting,
            "values": dict(self.values),
            "metric": self.metric,
            "score": self.score,
            "interval": list(self.interval),
            "settings": list(self.settings),
            "privacy": {key: value for key, value in self.guarantee.statement.to_dict().items() if key in _PRIVACY_KEYS},
            "sentences": list(self.sentences),
            "caveats": list(self.caveats),
        }

    def __rich__(self) -> Group:
        low, high = (format_score(self.metric, end) for end in self.interval)
        score = f"{self.metric} {format_score(self.metric, self.score)} ({low} to {high})"
        chosen = f"chosen: {self.setting}; {score}, measured at clients with noise, which may lift it beyond what is possible"
        privacy = self.guarantee.statement.to_dict()
        caveats = (Text(f"note: {caveat}", style="yellow") for caveat in self.caveats)
        return Group(Text(chosen), guarantee_table(privacy), *notes_on(privacy), *map(Text, self.sentences), *caveats)


_PRIVACY_KEYS = ("delta", "protected", "status", "guarantees", "warnings")
"""Keys of a statement's dictionary that a tuning keeps. The others assume that no server is trusted, which a tuning needs."""


@checked
def tune(
    what: str | Path | SweepConfig | None = None,
    *,
    trials: float = 10.0,
    target_epsilon: float,
    folder: str | Path,
    settings: Settings = (),
    axes: Mapping[str, Any] | None = None,
    evaluation_epsilon: float | None = None,
    max_trials: int | None = None,
    law: Law = "poisson",
    seed: int | None = None,
    data_dir: str | Path | None = None,
    device: str | torch.device | None = "auto",
    jobs: int = 1,
    progress: bool | ProgressDisplay = True,
    data: object = None,
    model: str | nn.Module | None = None,
    **overrides: Any,
) -> TuneResult:
    """Choose settings by a random number of private trials, and release the best trial alone, under one epsilon in all.

        ldpfl.tune("sum/records-mnist", axes={"training.server_learning_rate": [32, 64, 128]}, trials=10, target_epsilon=2, folder="tuned")

    The guarantee holds against whoever sees only the release, if whoever runs the trials is trusted. The same call resumes the tuning.

    Args:
        what: a recipe, a config file, a sweep's name or file; by default the quickstart, or the recipe ``own`` with ``data``.
        trials: mean number of trials. The number that is run is random and secret.
        target_epsilon: epsilon of the release: training, scores and choice together.
        folder: folder of the tuning. Its subfolder ``release`` may be handed on, and ``private`` must not.
        settings: changes of every trial, by dotted key.
        axes: values of each setting that is tuned, by dotted key. Every combination may be chosen.
        evaluation_epsilon: epsilon of a trial's score, a part of the trial's epsilon; by default 0.3 of it.
        max_trials: maximum number of trials; by default four times ``trials``.
        law: distribution of the number of trials: ``poisson``, ``geometric`` or ``logarithmic``. With the last two, the number varies
            more, and each trial gets more of the epsilon, above all if ``trials`` is large.
        seed: seed that determines all randomness. The guarantee then holds only while the seed is secret.
        data_dir: as for :func:`run`.
        device: as for :func:`run`.
        jobs: number of trials that train at once, each in its own process on one thread; on a CPU.
        progress: as for :func:`run`. It shows the number of trials, so it is for whoever runs them.
        data: as for :func:`run`.
        model: as for :func:`run`.
        overrides: changes of every trial by the last word of the key, as for :func:`run`.

    Raises:
        ConfigError: there is no such recipe or setting, or a setting does not fit. Nothing was trained.
        LdpflError: as for :func:`run`.
    """
    data_settings, caller_objects = settings_and_objects(data, model)
    default = OWN if data is not None else DEFAULT
    space = _search_space(default if what is None else what, axes or {})
    # Later changes replace earlier ones.
    changes = [*setting_texts(data_settings), *setting_texts(overrides_by_key(tune, overrides, space.recipe)), *setting_texts(settings)]
    tuning = Tuning(space, tuple(changes), target_epsilon, TrialCount.of(trials, max_trials, law), evaluation_epsilon, seed)
    if not (isfinite(target_epsilon) and target_epsilon > 0):
        raise ConfigError(f"target_epsilon is {target_epsilon:g}: set a positive number, such as 2")
    if jobs > 1 and (caller_objects.data is not None or caller_objects.module is not None):
        raise ConfigError(f"jobs is {jobs}, but parallel trials read data and model from files: give files instead of objects, or jobs=1")
    out = Path(folder)
    with displayed(progress) as display:
        runner = runner_for(data_dir, device, display, caller_objects)
        if jobs > 1 and runner.device.type != "cpu":
            raise ConfigError(f"jobs is {jobs}, but several trials at once work only on a CPU, not on {device}: set jobs to 1")
        # It shows the rounds of a trial as the runner's observer, and trials by its own methods.
        watched = WatchedRuns(display, runner.data_dir, jobs, lambda number, total, cell: f"trial {number}/{total}: {setting_label(cell)}")
        chosen = run_tuning(tuning, replace(runner, observer=watched), out, watched.begins, watched.planned)
        watched.ended()
        _warn_in_private(chosen, display)
    return _write_release(tuning, chosen, out)


def _warn_in_private(chosen: Chosen, display: ProgressDisplay) -> None:
    """Warn whoever runs the trials of facts that the release must not reveal, as they depend on the rows or the number of trials."""
    caveats = _caveats(chosen)
    published = public_caveats(chosen.cell.config, caveats)
    for caveat in caveats:
        if caveat not in published and not caveat.startswith(SIMULATION):  # what else that note says is for runs that are exported
            display.warn(caveat)
    if chosen.settings_tried == 1:
        display.warn(
            f"by chance, all trials had the same one of {len(chosen.labels)} settings, so nothing was compared. More trials (--trials) "
            "make this unlikely, but another tuning is another release of the same rows. Keep this to yourself: the number of trials "
            "is secret"
        )


def _caveats(chosen: Chosen) -> list[str]:
    """Return all notes of the chosen trial, also those that only whoever runs the trials may see."""
    return list((chosen.folder.result() or {}).get("caveats", ()))


def tuned_settings(texts: Sequence[str]) -> tuple[list[str], dict[str, list[Any]]]:
    """Return the settings of every trial, and the values of those that are tuned, from texts ``KEY=VALUE`` and ``KEY=VALUE,VALUE``.

    Raises:
        ConfigError: a text has no key or no value, or a key with several values is named twice.
    """
    fixed: list[str] = []
    axes: dict[str, list[Any]] = {}
    fixed_keys: set[str] = set()
    for text in texts:
        key, values = parse_axis(text, "--set")
        if key in axes or (key in fixed_keys and len(values) > 1):
            raise ConfigError(f"--set names {key} twice: give all of its values in one --set, as in KEY=VALUE,VALUE")
        if len(values) > 1:
            axes[key] = values
        else:
            fixed.append(text)
            fixed_keys.add(key)
    return fixed, axes


def _search_space(what: str | Path | SweepConfig, axes: Mapping[str, Any]) -> SweepConfig:
    """Return the sweep from whose settings a tuning chooses: ``what`` if it is a sweep, else the recipe ``what`` over ``axes``."""
    if isinstance(what, SweepConfig) or str(what) in sweep_names() or _is_sweep_file(Path(what)):
        if axes:
            name = what.name if isinstance(what, SweepConfig) else what
            raise ConfigError(
                f"{name} is a sweep, which already names the values to compare: leave out axes (--set with several values), or "
                "name a recipe instead"
            )
        return what if isinstance(what, SweepConfig) else load_sweep(str(what))
    return sweep_of(str(what), settings=[], axes=axes, seeds=1, name=Path(what).stem if str(what).endswith(".toml") else str(what))


def _is_sweep_file(path: Path) -> bool:
    """Whether the file defines a sweep rather than a run. Only a sweep names a recipe."""
    try:
        return path.suffix == ".toml" and "recipe" in from_toml(read_text(path))
    except (OSError, ValueError):
        return False  # the error comes later, when the file is read as a config


def _write_release(tuning: Tuning, chosen: Chosen, out: Path) -> TuneResult:
    """Write the release of a tuning into a subfolder of ``out``, and return it."""
    release, figure = out / RELEASE, chosen.figure
    as_given = write_model(chosen.folder, release)
    notes = [note_on_tensors_as_given(as_given)] if as_given else []
    result = TuneResult(
        setting=setting_label(chosen.cell),
        values=dict(chosen.cell.point),
        metric=chosen.metric,
        score=figure["value"],
        interval=(figure["low"], figure["high"]),
        settings=chosen.labels,
        guarantee=chosen.guarantee,
        sentences=(*_sentences_on_loss(chosen), *_note_on_noise(chosen), *_guarantee_sentences(tuning, chosen)),
        caveats=(*public_caveats(chosen.cell.config, _caveats(chosen)), *notes),
        folder=release,
    )
    write_text(release / TUNED, to_json(result.to_dict(), indent=2) + "\n")
    return result


def _sentences_on_loss(chosen: Chosen) -> tuple[str, ...]:
    """Return a sentence on the unit of the score if it is the loss of a number or a count. The released encoding reveals it, too."""
    sentence = client_figures.sentence_on_loss(chosen.folder.result() or {}) if chosen.metric == LOSS else ""
    return (sentence.strip(),) if sentence else ()


def _note_on_noise(chosen: Chosen) -> tuple[str, ...]:
    """Return a sentence if the score's interval is so wide that it does not tell settings apart; else an empty tuple."""
    low, high, is_loss = chosen.figure["low"], chosen.figure["high"], chosen.metric == LOSS
    max_width = abs(chosen.figure["value"]) * _MAX_LOSS_WIDTH if is_loss else _MAX_SHARE_WIDTH
    if high - low <= max_width and not (chosen.metric == AUROC and low <= 0.5):  # an AUROC of 0.5 is chance
        return ()
    return (
        f"the choice of the setting says little: the {chosen.metric} of the chosen trial is known only from "
        f"{format_score(chosen.metric, low)} to {format_score(chosen.metric, high)}, within which trials cannot be distinguished. More "
        "rows, a larger evaluation epsilon (--evaluation-epsilon), or fewer trials or settings help",
    )


_MAX_LOSS_WIDTH, _MAX_SHARE_WIDTH = 0.5, 0.2
"""Maximum width of an interval that can tell settings apart: for a loss as a multiple of it, and for an AUROC or accuracy."""


def _guarantee_sentences(tuning: Tuning, chosen: Chosen) -> tuple[str, ...]:
    """Return sentences on the meaning of a tuning's guarantee, and on what it does not cover."""
    guarantee, count, settings = chosen.guarantee, tuning.count, len(chosen.labels)
    release = guarantee.release
    epsilons = ", ".join(f"{number(row.epsilon)} {IF_TRUSTED[row.trust_model]}" for row in guarantee.trials)
    is_proved = guarantee.statement.status == "proved"
    not_proved = () if is_proved else (f"this and all that follows is {guarantee.statement.status}: it rests on code that is not ldpfl's",)
    seed_text = "the number of trials and their noise follow from the seed that was given: the guarantee holds while nobody else knows it"
    seed_warning = () if tuning.seed is None else (seed_text,)
    return (
        f"whoever sees only the release (setting, model and noisy score) has epsilon {number(release.epsilon)} at delta {release.delta:g} "
        f"for each {guarantee.statement.protected}, if whoever runs the trials holds all data and is trusted",
        *not_proved,
        f"this covers training, scores and the choice among {settings} settings; a trial alone has {number(guarantee.trial_epsilon)}",
        f"the number of trials is secret ({count.mean:g} on average, at most {count.limit}): do not tell how long the tuning took, and "
        f"publish nothing from the folder {PRIVATE!r}",
        f"whoever sees what clients send in the trials learns from every one: at most {count.limit} trials together have epsilon "
        f"{epsilons}",
        *seed_warning,
    )
