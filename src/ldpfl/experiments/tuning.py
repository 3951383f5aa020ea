"""Tune settings under one guarantee: run a random number of private trials, and choose the one with the best noisy score.

The proof is in :mod:`ldpfl.privacy.accountants.best_of_trials`. It needs three things. Trials are independent: each draws its setting, its
seed and its noise anew. A trial's score is private, so clients measure it with noise. Only the chosen trial is released: the others, and
their number, stay in a private folder.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import floor, inf, isfinite, log10
from pathlib import Path
from typing import Any

import torch

from ldpfl.errors import ConfigError, DataError, LdpflError, PrivacyError, error_without_data
from ldpfl.experiments import secret_seed
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.dataset import NO_CALLER_OBJECTS, CallerObjects
from ldpfl.experiments.other_folders import PRIVATE, trials_mark
from ldpfl.experiments.planned_ledger import planned_ledger
from ldpfl.experiments.recipes import recipe_or_file
from ldpfl.experiments.record_sums import is_evaluated
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.experiments.runner import Runner
from ldpfl.experiments.sweep_config import Cell, SweepConfig, cells, check_cells
from ldpfl.experiments.sweep_run import Ahead, OnRun, run_cell
from ldpfl.privacy import Ledger
from ldpfl.privacy.accountants.best_of_trials import TrialCount, best_of_gaussian_epsilon, trial_mu
from ldpfl.privacy.accountants.gaussian import gaussian_epsilon, gaussian_mu
from ldpfl.privacy.accounting import account_together, run_epsilon
from ldpfl.privacy.events import GaussianRelease
from ldpfl.privacy.guarantee import AUTHORS_CLAIM, HOLDS, Guarantee, Statement, Status
from ldpfl.simulation.evaluating_records import LOSS
from ldpfl.tasks import ACCURACY
from ldpfl.tasks.weighted_metrics import AUROC
from ldpfl.util.files import make_folder, read_text, to_json, write_text
from ldpfl.util.randomness import Purpose, require_secret, stream_key

_DEFAULT_EVALUATION = 0.3
"""Default for the epsilon of a trial's score, as a fraction of the trial's epsilon."""

_EPSILON_DIGITS = 4
"""Number of digits of a trial's epsilon, which becomes a setting of its config."""
_MARGIN = 1 + 1e-9
"""Margin for rounding errors of mu."""

_PRIVATE_TRIALS = (
    "whoever runs the trials holds all data and is trusted",
    "nothing else of the trials becomes known: neither their number, nor how long they took, nor another trial",
)


@dataclass(frozen=True)
class Tuning:
    """What is tuned, and under which guarantee.

    Attributes:
        space: sweep whose variants and points are the settings to choose from. Its seeds are not used.
        overrides: settings of every trial, applied last.
        epsilon: target epsilon of the release.
        count: probability distribution of the number of trials.
        evaluation_epsilon: epsilon of a trial's score, a part of the trial's epsilon; None takes 0.3 of the trial's epsilon.
        seed: seed from which everything follows; None draws a secret from the operating system.
    """

    space: SweepConfig
    overrides: tuple[str, ...]
    epsilon: float
    count: TrialCount
    evaluation_epsilon: float | None = None
    seed: int | None = None

    def to_json(self) -> str:
        """Return everything as JSON, to recognise the same tuning when it is started again."""
        return to_json({**asdict(self), "space": self.space.model_dump()}, indent=1)


@dataclass(frozen=True)
class TunedGuarantee:
    """The guarantee of a tuning, known before its first trial.

    Attributes:
        statement: a row for whoever sees only the release, and rows for whoever sees what clients send in all trials.
        trial_epsilon: epsilon of one trial at the same delta.
    """

    statement: Statement
    trial_epsilon: float

    @property
    def release(self) -> Guarantee:
        """The guarantee against whoever sees only the release."""
        return self.statement.rows[0]

    @property
    def trials(self) -> tuple[Guarantee, ...]:
        """The guarantees against whoever sees what clients send in all trials."""
        return self.statement.rows[1:]


@dataclass(frozen=True)
class Chosen:
    """The trial that is released.

    Attributes:
        cell: its setting.
        metric: name of its score.
        figure: the score's value, deviations and 95 % interval, as in ``result.json``.
        folder: its run folder, which is private.
        guarantee: the guarantee of the tuning.
        labels: names of all settings among which the tuning chose.
        settings_tried: number of different settings of the trials. It is private, like the number of trials.
    """

    cell: Cell
    metric: str
    figure: dict[str, Any]
    folder: RunFolder
    guarantee: TunedGuarantee
    labels: tuple[str, ...]
    settings_tried: int


def run_tuning(tuning: Tuning, runner: Runner, out: Path, on_trial: OnRun, ahead: Ahead) -> Chosen:
    """Run the unfinished trials of ``tuning`` in the private folder below ``out``, and return the trial to release.

    Raises:
        ConfigError: settings do not fit together, found before anything is trained; or ``out`` holds something else.
        PrivacyError: no trial came to its end.
        WriteError: ``out`` cannot be written. Finished rounds are kept.
    """
    settings_to_try = candidates(tuning, runner.caller_objects)
    guarantee = guarantee_of(tuning, settings_to_try, runner.caller_objects)
    private = out / PRIVATE
    secret = _open_folders(tuning, out, private)
    trials = _draw_trials(tuning, settings_to_try, secret)
    ahead(trials, private)
    best: tuple[Cell, dict[str, Any]] | None = None
    best_rank: tuple[float, ...] = ()  # below every rank
    failures: list[str] = []
    for number, cell in enumerate(trials, start=1):
        on_trial(number, len(trials), cell)
        figures = _run_trial(cell, runner, private)
        _check_charged(cell, cell.folder(private), guarantee)
        if "stopped" in figures or not figures["at_clients"]:  # such a trial counts, but is the worst of all
            failures.append(figures.get("stopped", "no score was measured"))
            continue
        last_evaluation = figures["at_clients"][-1]
        rank = _rank(last_evaluation)
        if rank > best_rank:  # the first one of equal scores is taken, as the proof assumes
            best, best_rank = (cell, last_evaluation), rank
    if best is None:
        raise PrivacyError(f"no trial ended with a score: give other settings, and another folder. The first trial failed: {failures[0]}")
    cell, last_evaluation = best
    # The first figure of the comparison that the trial has, else its first figure.
    metric = next(
        name for name in (*_comparison_metrics(last_evaluation), *last_evaluation["figures"]) if name in last_evaluation["figures"]
    )
    labels, settings_tried = tuple(map(setting_label, settings_to_try)), len(set(map(setting_label, trials)))
    return Chosen(cell, metric, last_evaluation["figures"][metric], cell.folder(private), guarantee, labels, settings_tried)


def _run_trial(cell: Cell, runner: Runner, private: Path) -> dict[str, Any]:
    """Return the figures of a trial, see :func:`~ldpfl.experiments.sweep_run.run_cell`. A trial that fails is stopped for good.

    If it were tried again, a resumed tuning could release another trial, and the guarantee is for one release. An error that does not
    follow from the setting or the user's code, such as a full disk, ends the tuning, and the trial goes on when the tuning is resumed.
    """
    folder = cell.folder(private)
    folder.mark_as_trial()
    try:
        return run_cell(cell, runner, private)
    except (OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # An error of a run that has begun says that its files are damaged, or that the rows have changed.
        if isinstance(error, LdpflError) and (not isinstance(error, ConfigError) or folder.config_path.exists()):
            raise
        reason = error_without_data(error)
        write_text(folder.stopped_path, reason)
        runner.observer.warn(f"failed: {setting_label(cell)}: {reason}")
        return {"stopped": reason}


def setting_label(cell: Cell) -> str:
    """Return the name of a cell's setting, without its seed: the variant, unless it is the only one, and the values of the axes."""
    point = [f"{key} = {value}" for key, value in cell.point]
    return ", ".join([cell.variant, *point] if cell.variant != "as it is" or not point else point)


def candidates(tuning: Tuning, caller_objects: CallerObjects = NO_CALLER_OBJECTS) -> list[Cell]:
    """Return all settings to choose from, each with the noise that the guarantee of the release needs.

    Raises:
        ConfigError: there is only one setting, or a setting does not fit a tuning.
    """
    space = tuning.space.model_copy(update={"seeds": [0]})
    unresolved_cells = cells(space, tuning.overrides, resolve=False, load=recipe_or_file)
    if len(unresolved_cells) < 2:
        raise ConfigError(
            f"{space.name} has only one setting, but a tuning needs several to choose from: give several values, such as --set KEY=1,2,4"
        )
    varied_keys = [*space.axes, *(text.partition("=")[0].strip() for settings in space.variants.values() for text in settings)]
    if forbidden := [key for key in varied_keys if key == "seed" or key.startswith(("privacy.", "evaluation."))]:
        raise ConfigError(f"{space.name} varies {forbidden[0]}, which must be the same in all trials: leave it out, or give it one value")
    trial_epsilon, evaluation_epsilon = _trial_epsilons(tuning, unresolved_cells[0].config.privacy.delta)
    # The noise is found last, since that takes long: first check that each setting fits a tuning.
    trial_settings = [f"privacy.target_epsilon={trial_epsilon!r}", f"evaluation.epsilon={evaluation_epsilon!r}"]
    for cell in cells(space, [*tuning.overrides, *trial_settings], resolve=False, load=recipe_or_file):
        _check_trial(cell.config)
    resolved_cells = cells(space, [*tuning.overrides, *trial_settings], caller_objects=caller_objects, load=recipe_or_file)
    check_cells(resolved_cells, caller_objects)
    return resolved_cells


def _trial_epsilons(tuning: Tuning, delta: float) -> tuple[float, float]:
    """Return the epsilon of a trial with which the release keeps the tuning's target, and the part of it that is for the trial's score.

    Raise a :class:`ConfigError` if ``tuning.evaluation_epsilon`` is no such part, or the target leaves no epsilon for a trial.
    """
    trial_epsilon = _round_down(gaussian_epsilon(trial_mu(tuning.epsilon, tuning.count, delta), delta))
    evaluation_epsilon = tuning.evaluation_epsilon
    if evaluation_epsilon is None:
        return trial_epsilon, _round_down(_DEFAULT_EVALUATION * trial_epsilon)
    if not 0 < evaluation_epsilon < trial_epsilon:
        raise ConfigError(
            f"the evaluation epsilon must be above 0 and below the {trial_epsilon:g} of a whole trial, got {evaluation_epsilon:g}: if "
            f"left out, it is {_DEFAULT_EVALUATION:g} of the trial's epsilon"
        )
    return trial_epsilon, evaluation_epsilon


def _round_down(value: float) -> float:
    """Return an epsilon rounded down to a few digits, or raise a :class:`ConfigError` if it is not positive."""
    if value <= 0:
        raise ConfigError("the target epsilon is so small that no epsilon is left for a trial: set a larger target, or fewer trials")
    step = 10.0 ** (floor(log10(value)) - _EPSILON_DIGITS + 1)
    return float(f"{floor(value / step) * step:.{_EPSILON_DIGITS}g}")


def _check_trial(config: RunConfig) -> None:
    """Raise a :class:`ConfigError` unless runs of ``config`` can be trials, whose cost is known and whose score is private."""
    if config.mechanism.name != "dp-sgd":
        raise ConfigError(
            f"mechanism.name is {config.mechanism.name!r}, but a tuning can account only for trials with sums over records: set "
            "mechanism.name to 'dp-sgd'"
        )
    is_evaluated(config)  # raises if the config does not fit an evaluation on held-back records
    if config.shuffling.channel not in ("direct", "secure-sum"):
        raise ConfigError(
            f"shuffling.channel is {config.shuffling.channel!r}, but tuning needs scores measured by clients, which this channel does not "
            "carry: set it to 'secure-sum' or 'direct'"
        )
    if config.clients.fraction != 1:
        raise ConfigError(f"clients.fraction is {config.clients.fraction:g}, but in a trial all clients take part: set it to 1")
    if config.training.patience:
        raise ConfigError(
            f"training.patience is {config.training.patience}, but stopping early uses scores without noise, which a trial must not: set "
            "it to 0, or tune training.rounds"
        )


def guarantee_of(tuning: Tuning, settings_to_try: Sequence[Cell], caller_objects: CallerObjects = NO_CALLER_OBJECTS) -> TunedGuarantee:
    """Return the guarantee of a tuning among the settings of the cells ``settings_to_try``.

    Raises:
        ConfigError: the settings protect different units, or differ in delta.
        PrivacyError: the target is missed, which no rounding should cause.
    """
    delta = settings_to_try[0].config.privacy.delta
    ledgers = list(dict.fromkeys(planned_ledger(cell.config, caller_objects).events for cell in settings_to_try))
    # For each distinct ledger, the statement if the largest number of trials ran with these settings.
    statements = [account_together([Ledger(events)] * tuning.count.limit, delta) for events in ledgers]
    if len({statement.protected for statement in statements}) > 1 or {cell.config.privacy.delta for cell in settings_to_try} != {delta}:
        raise ConfigError(
            f"the settings of {tuning.space.name} protect different units, or have different deltas: give all settings the same protected "
            "unit and the same delta"
        )
    mu = max(_trial_mu(Ledger(events), delta) for events in ledgers)
    total = best_of_gaussian_epsilon(mu, tuning.count, delta)
    if total > tuning.epsilon:
        raise PrivacyError(
            f"the release would have epsilon {total:.6g}, above the target {tuning.epsilon:g}: please report this fault of ldpfl"
        )
    rows = _rows_for_all_settings(statements)
    assumption = f"at most {tuning.count.limit} trials, which add up"
    trial_rows = [replace(row, assumptions=(assumption, *row.assumptions)) for row in rows]
    release_row = replace(rows[0], epsilon=total, trust_model="central", assumptions=(*_PRIVATE_TRIALS, *rows[0].assumptions))
    warnings = tuple(dict.fromkeys(line for statement in statements for line in statement.warnings))
    statement = Statement(delta, (release_row, *trial_rows), warnings=warnings)
    return TunedGuarantee(statement, gaussian_epsilon(mu, delta))


def _rows_for_all_settings(statements: Sequence[Statement]) -> list[Guarantee]:
    """Return the guarantees that hold whichever setting's statement applies, smallest epsilon first, one for each trust model.

    Any setting's trials may have run. So a trust model needs a row in each statement. Its guarantee takes the largest epsilon of these
    rows, which share one delta, and the weakest status of all statements.
    """
    status: Status = "proved" if all(statement.status == "proved" for statement in statements) else AUTHORS_CLAIM
    rows_by_model = [{row.trust_model: row for row in statement.rows if _covers_whole_run(row, statement)} for statement in statements]
    worst_rows = []
    for model in rows_by_model[0]:
        if all(model in rows for rows in rows_by_model):
            worst_rows.append(max((rows[model] for rows in rows_by_model), key=lambda row: row.epsilon))
    # No lower bound: the trials may have run with a setting of smaller epsilon.
    return [replace(row, lower=None, status=status) for row in sorted(worst_rows, key=lambda row: row.epsilon)]


def _covers_whole_run(row: Guarantee, statement: Statement) -> bool:
    """Return whether ``row`` is a proved guarantee at delta > 0 for everything that a run sends about one protected unit."""
    is_of_run = (row.scope, row.unit, row.adaptive) == ("run", statement.protected, True)
    return is_of_run and row.delta > 0 and row.status in HOLDS


def _trial_mu(ledger: Ledger, delta: float) -> float:
    """Return the mu (of Gaussian differential privacy) of everything that a trial releases.

    All noise of a trial is Gaussian, so its epsilon determines its mu exactly.

    Raises:
        PrivacyError: the trial adds other noise, or samples records.
    """
    for event in ledger.events:
        if not isinstance(event.release, GaussianRelease) or event.release.rate != 1:
            raise PrivacyError(
                f"mechanism {event.release.mechanism!r} adds noise that is not Gaussian, or samples records, which a tuning cannot account "
                "for: set mechanism.name to 'dp-sgd', and mechanism.sample_rate to 1"
            )
    return gaussian_mu(run_epsilon(ledger, delta), delta) * _MARGIN


def _check_charged(cell: Cell, folder: RunFolder, guarantee: TunedGuarantee) -> None:
    """Raise a :class:`PrivacyError` if a trial released more than was planned for it."""
    if folder.ledger_path.exists() and run_epsilon(folder.ledger(), cell.config.privacy.delta) > guarantee.trial_epsilon * _MARGIN:
        raise PrivacyError(
            f"the trial in {folder.path} released more than was planned, so the tuning releases nothing: report this fault of ldpfl"
        )


def _comparison_metrics(last_evaluation: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the figures by which trials are compared, from a trial's ``last_evaluation``. The first one counts most.

    For two classes the accuracy is left out: if there is no AUROC, one class is usually rare, and then all models are equally accurate.
    An evaluation is of two classes if it has an AUROC, or one of the two notes (``rare_class``, ``binning``) on the AUROC.
    """
    is_of_two_classes = last_evaluation.get("rare_class", False) or "binning" in last_evaluation or AUROC in last_evaluation["figures"]
    return (AUROC, LOSS) if is_of_two_classes else (ACCURACY, LOSS)


def _rank(last_evaluation: dict[str, Any]) -> tuple[float, ...]:
    """Return the tuple by which trials are compared, from a trial's ``last_evaluation``. A larger one is better."""

    def value(name: str) -> float:
        """Return the figure ``name`` such that larger is better: a loss is negated, and a figure without a value is -inf."""
        figure = last_evaluation["figures"].get(name, {}).get("value")
        return -inf if figure is None or not isfinite(figure) else float(-figure if name == LOSS else figure)

    return tuple(map(value, _comparison_metrics(last_evaluation)))


def _open_folders(tuning: Tuning, out: Path, private: Path) -> int:
    """Prepare the folder ``out`` and the folder ``private`` in it, or check that they hold the same ``tuning``.

    Return the seed from which the number of trials (random, as the proof needs), their settings and their seeds are drawn.

    Raises:
        ConfigError: ``out`` holds something else, or ``tuning.seed`` is out of range.
        DataError: a file of the tuning cannot be read.
    """
    mark, text = trials_mark(private), tuning.to_json()
    if not mark.exists():
        if out.exists() and (not out.is_dir() or any(path.name != PRIVATE for path in out.iterdir())):
            raise ConfigError(f"the output folder {out} is not empty and not the folder of a tuning: give a new folder")
        for folder in (out, private):
            make_folder(folder, 0o700)
            folder.chmod(0o700)
        if tuning.seed is not None and not 0 <= tuning.seed < 2**128:
            raise ConfigError(f"seed is {tuning.seed}: expected a number from 0 to 2^128 - 1; leave it out for a secret one")
        secret_seed.save(secrets.randbits(128) if tuning.seed is None else tuning.seed, private / secret_seed.FILE)
        write_text(mark, text)
    try:
        stored_text = read_text(mark)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{mark} cannot be read: {reason}; make the file readable, or restore it from a backup") from None
    if stored_text != text:
        raise ConfigError(f"{out} holds another tuning, or this one with other settings: give another folder, or the same settings")
    return require_secret(secret_seed.load(private / secret_seed.FILE))


def _draw_trials(tuning: Tuning, settings_to_try: Sequence[Cell], secret: int) -> list[Cell]:
    """Return the trials: a random number of them, each with a setting and a seed drawn independently.

    All draws follow from ``secret``, so that a tuning that is started again has the same trials.
    """

    def random_integer(*key: int) -> int:
        """Return an integer of 256 bits, which is random and independent for each ``key``."""
        return int.from_bytes(stream_key(secret, Purpose.TUNING, *key))

    def trial(number: int) -> Cell:
        """Return trial ``number``, from 1. Its setting is uniform up to 2^-200, and its seed has 128 bits, as a config allows."""
        cell, seed = settings_to_try[random_integer(number, 0) % len(settings_to_try)], random_integer(number, 1) >> 128
        # A seed that the user gave determines the noise, too.
        secret_noise = {"secret_noise": True} if tuning.seed is None and cell.config.data.brought else {}
        return replace(cell, seed=seed, config=cell.config.model_copy(update={"seed": seed, **secret_noise}))

    return [trial(number) for number in range(1, tuning.count.drawn(random_integer(0)) + 1)]
