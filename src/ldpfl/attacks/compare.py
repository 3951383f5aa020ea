"""Attacks on many runs in one table: a line for each protection, over runs that differ only in their seed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ldpfl.attacks.on_run import AttackPlan, AttackRow, Kind, RunAttack, finished_run, label_of, versions
from ldpfl.data.partition import CURIOUS_CLIENT
from ldpfl.errors import ConfigError
from ldpfl.experiments.baseline import config_without_noise
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.mechanisms import MechanismSettings

_WITHOUT_EFFECT = ("name", "description")
"""Settings that change no result. Runs of one line may differ in these and in the seed."""


@dataclass(frozen=True)
class AttackedRun:
    """A run, and the attack on it."""

    folder: Path
    config: RunConfig
    attack: RunAttack


@dataclass(frozen=True)
class ComparedRuns:
    """One line of a comparison.

    Attributes:
        name: the protection; tells lines apart.
        runs: folders of the runs whose attacks are gathered. Only the first one of runs that share an unprotected model stands for it.
        row: their distances and shares, one for each run and attack seed, in the order of ``runs``, and their mean accuracy.
        accuracies: accuracy of each run's model; empty for a baseline.
    """

    name: str
    runs: tuple[Path, ...]
    row: AttackRow
    accuracies: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        share = statistics.fmean(self.row.shares)
        runs = [str(run) for run in self.runs]
        return {"name": self.name, "runs": runs, **self.row.to_dict(), "share": share, "accuracies": self.accuracies}


@dataclass(frozen=True)
class Comparison:
    """Attacks on several runs that were made and measured alike.

    Attributes:
        runs: number of attacked runs.
        images: number of images in each set that is compared.
        lines: a line for each protection, in the order in which they first came; then the unprotected models, each counted once
            however many runs share it; then the baselines.
        left_out: folders of runs whose client holds fewer than ``images`` images of other classes: that baseline would be biased.
    """

    label: int
    runs: int
    images: int
    plan: AttackPlan
    extractor: str
    features: int
    classifier: str
    classifier_accuracy: float
    data: str
    lines: tuple[ComparedRuns, ...]
    left_out: tuple[Path, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        lists = {"lines": [line.to_dict() for line in self.lines], "left_out": [str(run) for run in self.left_out]}
        return {**asdict(self), **lists, "attacking_client": CURIOUS_CLIENT, "versions": versions()}


def check_runs(folders: Sequence[RunFolder], plan: AttackPlan) -> None:
    """Check before any attack that the runs can be compared in one table.

    Raises:
        ConfigError: a run is missing or unfinished, two are the same run, or their data sets or labels differ.
    """
    configs = [finished_run(folder)[0] for folder in folders]
    _check_no_run_twice([(folder.path, config) for folder, config in zip(folders, configs, strict=True)])
    _check_all_equal("data set", (config.data.name for config in configs))
    _check_all_equal("label", (label_of(plan, config) for config in configs))


def compared(runs: Sequence[AttackedRun]) -> Comparison:
    """Return one table of the attacks on ``runs``. Runs that differ only in seed, name and description share a line.

    Raises:
        ConfigError: there is no run, two are the same, or they were not attacked and measured alike: the same data, label, plan,
            extractor, classifier, and number of images.
    """
    _check_no_run_twice([(run.folder, run.config) for run in runs])
    attacks = [run.attack for run in runs]
    distances = [(row.kind, distance) for attack in attacks for row in attack.rows for distance in row.distances]
    _check_all_equal("data set", (attack.data for attack in attacks))
    _check_all_equal("label", (attack.label for attack in attacks))
    # A plan may leave the label to the run, so labels are compared above.
    _check_all_equal("plan", (replace(attack.plan, label=None) for attack in attacks))
    _check_all_equal("extractor", (f"{distance.extractor}, {distance.features} features" for _, distance in distances))
    _check_all_equal("classifier", (attack.classifier for attack in attacks))
    # The baseline "other classes" may have fewer images, because it has only those that the client holds.
    counts = (f"{distance.other} to {distance.real}" for kind, distance in distances if kind != "other classes")
    _check_all_equal("number of images", counts)
    first = attacks[0]
    images = next(distance.real for _, distance in distances)  # any will do, since all are equal
    lines, left_out = _table_lines(runs, images)
    return Comparison(
        label=first.label,
        runs=len(runs),
        images=images,
        plan=first.plan,
        extractor=first.extractor,
        features=first.features,
        classifier=first.classifier,
        classifier_accuracy=first.classifier_accuracy,
        data=first.data,
        lines=lines,
        left_out=left_out,
    )


def _table_lines(runs: Sequence[AttackedRun], images: int) -> tuple[tuple[ComparedRuns, ...], tuple[Path, ...]]:
    """Return the table's lines, and the folders of the runs that are left out of the baseline "other classes".

    A run is left out if its client holds fewer than ``images`` images of other classes, because distances of fewer images are biased.
    """
    groups: dict[str, list[AttackedRun]] = {}
    baselines: dict[str, AttackedRun] = {}
    for run in runs:
        if run.config.mechanism.protects:
            groups.setdefault(_comparison_key(run.config, ("seed", *_WITHOUT_EFFECT)), []).append(run)
        # Runs that share an unprotected model share client 0's images as well.
        baselines.setdefault(config_without_noise(run.config).to_toml(), run)
    names = _unique_protection_names([members[0].config for members in groups.values()])
    # All distances of a row are of equally many images, so the first one tells how many.
    unbiased = [run for run in baselines.values() if any(row.distances[0].other == images for row in _rows_of_kind(run, "other classes"))]
    lines = [_compared_runs(name, "protected", members) for name, members in zip(names, groups.values(), strict=True)]
    # The floor compares public images with each other, so it is the same for all runs.
    lines += [_compared_runs("unprotected", "unprotected", list(baselines.values())), _compared_runs("floor", "floor", runs[:1])]
    if unbiased:
        lines.append(_compared_runs("other classes", "other classes", unbiased))
    return tuple(lines), tuple(run.folder for run in baselines.values() if run not in unbiased)


def _compared_runs(name: str, kind: Kind, runs: Sequence[AttackedRun]) -> ComparedRuns:
    """Return the line ``name`` of the table: the results of this ``kind`` for all ``runs`` together."""
    rows = [row for run in runs for row in _rows_of_kind(run, kind)]
    accuracies = tuple(row.accuracy for row in rows if row.accuracy is not None)
    gathered = AttackRow(
        kind,
        tuple(distance for row in rows for distance in row.distances),
        tuple(share for row in rows for share in row.shares),
        statistics.fmean(accuracies) if accuracies else None,
    )
    return ComparedRuns(name, tuple(run.folder for run in runs), gathered, accuracies)


def _rows_of_kind(run: AttackedRun, kind: Kind) -> list[AttackRow]:
    """Return the results of this ``kind`` of the attack on ``run``."""
    return [row for row in run.attack.rows if row.kind == kind]


def _protection_name(settings: MechanismSettings) -> str:
    """Return the name of a mechanism with its epsilon, as the table shows it."""
    epsilon, budget = settings.epsilon_and_budget or (None, "")
    return settings.name if epsilon is None else f"{settings.name}, epsilon {epsilon:g} a {budget}"


def _unique_protection_names(configs: Sequence[RunConfig]) -> list[str]:
    """Return a name for each config: mechanism and epsilon. Where these are equal, the settings that differ are added."""
    names = [_protection_name(config.mechanism) for config in configs]
    settings = [_settings_by_full_name(config) for config in configs]
    unique_names = []
    for name, values in zip(names, settings, strict=True):
        same_name = [other_values for other_values, other_name in zip(settings, names, strict=True) if other_name == name]
        differing = [key for key in values if any(other_values[key] != values[key] for other_values in same_name)]
        unique_names.append(", ".join([name, *(f"{key} {values[key]}" for key in differing)]))
    return unique_names


def _settings_by_full_name(config: RunConfig) -> dict[str, Any]:
    """Return all settings of a config by their full names, "section.key"."""
    sections = {name: values for name, values in config.model_dump().items() if isinstance(values, dict)}
    return {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}


def _comparison_key(config: RunConfig, left_out: Sequence[str]) -> str:
    """Return a text that is equal for configs that differ only in the settings ``left_out``."""
    return repr(config.model_dump(exclude=set(left_out)))


def _check_no_run_twice(runs: Sequence[tuple[Path, RunConfig]]) -> None:
    """Raise a :class:`ConfigError` if two of the ``runs`` are the same."""
    path_of: dict[str, Path] = {}
    for path, config in runs:
        identity = _comparison_key(config, _WITHOUT_EFFECT)  # runs with different seeds differ
        if identity in path_of:
            raise ConfigError(
                f"{path_of[identity]} and {path} are the same run with the same seed, which would count twice: give only one of them"
            )
        path_of[identity] = path


def _check_all_equal(quantity: str, values: Iterable[object]) -> None:
    """Raise a :class:`ConfigError` unless all ``values`` are equal; ``quantity`` names them in the message."""
    different = list(dict.fromkeys(str(value) for value in values))
    if len(different) != 1:
        raise ConfigError(f"all attacks in a table must have the same {quantity}, got {len(different)}: {'; '.join(different) or 'no run'}")
