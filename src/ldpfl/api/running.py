"""Run a config, look a model over, and read a finished run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ldpfl.api.accounted_runs import refuse_code_of_file
from ldpfl.api.arguments import Settings, checked
from ldpfl.api.callbacks import Announcer, Callback, OnRound
from ldpfl.api.configuring import config_for_call, setting_texts, settings_and_objects
from ldpfl.api.results import RunResult
from ldpfl.api.tracking import tracker_callbacks
from ldpfl.errors import ConfigError
from ldpfl.experiments.build import build, choose_device, with_torch_defaults
from ldpfl.experiments.calibration import resolve_settings
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.dataset import NO_CALLER_OBJECTS, CallerObjects, load_dataset
from ldpfl.experiments.model_check import Checked, check as look_over
from ldpfl.experiments.more_rounds import config_with_more_rounds
from ldpfl.experiments.run_folder import Kind, RunFolder
from ldpfl.experiments.runner import Finished, Runner
from ldpfl.experiments.secret_seed import new_secret
from ldpfl.experiments.shipped import DEFAULT, OWN
from ldpfl.experiments.training_cost import TrainingCost, training_cost as estimate_training_cost
from ldpfl.report.console import terminal
from ldpfl.report.plots import draw_score_curve
from ldpfl.report.progress import ProgressDisplay
from ldpfl.simulation.workers import Count, checked_count, cores
from ldpfl.util.user_code import GIVEN

_COLUMN_SETTINGS = frozenset(f"{section}{key}" for section in ("", "data.") for key in ("target", "client", "person"))
"""Settings that name columns of a user's data."""


@with_torch_defaults()
@checked
def run(
    what: str | Path | RunConfig | None = None,
    *,
    settings: Settings = (),
    folder: str | Path | None = None,
    resume: bool = False,
    more_rounds: int = 0,
    baseline: bool | None = None,
    data_dir: str | Path | None = None,
    device: str | torch.device | None = "auto",
    workers: Count = "auto",
    progress: bool | ProgressDisplay = True,
    on_round: OnRound | None = None,
    callbacks: Sequence[Callback] = (),
    track: str | Sequence[str] = (),
    data: object = None,
    model: str | nn.Module | None = None,
    **overrides: Any,
) -> RunResult:
    """Train a model over simulated clients, and return the result with its privacy guarantee.

        result = ldpfl.run("quickstart", epsilon=0.5, rounds=3)
        result.accuracy, result.privacy, result.module()
        ldpfl.run(data=frame, target="outcome", client="hospital", target_epsilon=4.0).scores

    Args:
        what: a recipe's name, a config file (``*.toml``), or a config. By default it is the quickstart, or the recipe ``own`` if ``data``
            is given, or the config in ``folder`` if a run is resumed.
        settings: changes by dotted key, as ``{"ranges.radius": 0.1}``.
        overrides: changes by the last word of the key, if only one setting has it: ``epsilon``, ``rounds``, ``count``, ``seed``. A
            section's name sets its ``name``, as in ``mechanism="harmony"``, or takes a dict, as in ``clients={"count": 5}``.
            ``target_epsilon`` sets the mechanism's noise by the epsilon of the whole run. ``evaluation_epsilon`` is the part of it by which
            clients measure the model.
        folder: folder for config, checkpoints, ledger, model and figures. Without it, nothing is written except, for built-in data, the
            noise-free baseline, which the cache keeps for later runs.
        resume: continue the run in ``folder``, with the seed that was drawn for it unless another seed is given. With ``what`` or
            ``data``, a new or empty folder starts a new run, so the same call can be repeated until the run is finished.
        more_rounds: continue a finished run in ``folder`` for this number of further rounds, which are charged in addition.
        baseline: whether to train without noise as well, to compare. By default a new run does, and a resumed run does if it did before.
        data_dir: folder with data sets; by default ``LDPFL_DATA_DIR``, or the hub.
        device: auto, cpu or cuda, or a device of PyTorch.
        workers: number of processes that train, with one thread each. ``auto`` takes one for each core if the run is long enough. ``ray``
            or ``ray://HOST:PORT`` takes a Ray cluster. Results are the same, bit by bit.
        progress: whether to draw a bar, in a terminal or a notebook; or the display that draws it.
        on_round: called with the figures of each private round when it is done. An exception in it ends the run.
        callbacks: called at the start, after each private round and at the end; see :class:`ldpfl.Callback`.
        track: ``mlflow``, ``wandb`` or ``tensorboard``, or several. They get the public figures of each round, and at the end the files of
            :func:`ldpfl.export`. It needs ``folder``. TensorBoard's files stay in that folder and have all figures.
        data: your data: a file or folder of tables, a data frame, a pair of inputs and targets (tensors or arrays), a PyTorch data set of
            such pairs, an :class:`ldpfl.data.Dataset`; or the name of a built-in data set, or of a data set on the hub.
        model: your module, whose weights are public and where training begins; or its name or import path.

    Raises:
        ConfigError: there is no such recipe or setting, or a setting does not fit.
        LdpflError: the data or the model does not fit; or a client refuses to send its values.
        WriteError: the folder cannot be written; finished rounds are kept.
    """
    if resume and folder is None:
        raise ConfigError("resume=True needs the argument folder, which is not given: give the folder of the run to resume")
    path = None if folder is None else Path(folder)
    if resume and path is not None:
        RunFolder(path).check_kind(Kind.SIMULATION)  # before data are loaded, which may take long
    if more_rounds:
        if path is None or what is not None or not resume:
            raise ConfigError(
                f"more_rounds is {more_rounds}, which extends a finished run: give the run's folder and resume=True, but no recipe"
            )
        what = extended_run = config_with_more_rounds(RunFolder(path), more_rounds)
    resumed_config = None
    if resume and path is not None:
        resumed_config = _config_to_resume(RunFolder(path), is_described=what is not None or data is not None)
        if what is None and resumed_config is not None:
            what = RunFolder(path).config_path
    data_settings, caller_objects = settings_and_objects(data, model)
    _check_data_given(what, data, model, [*setting_texts(settings), *overrides])
    default = OWN if data is not None else DEFAULT
    changes = [*setting_texts(settings), *setting_texts(data_settings)]
    config = resolve_settings(config_for_call(run, default if what is None else what, changes, overrides, resumed_config), caller_objects)
    if more_rounds and (differences := extended_run.differences(config)):
        raise ConfigError(f"more_rounds cannot change a run's settings: leave out the changes {'; '.join(differences)}")
    names = [track] if isinstance(track, str) else track
    with displayed(progress) as display, tracker_callbacks(names, path, display.warn) as trackers:
        announcer = Announcer(display, config, [*callbacks, *trackers], on_round)
        runner = runner_for(data_dir, device, announcer, caller_objects, workers)
        if path is None:
            finished = runner.in_memory(config, baseline=baseline is not False)
        else:
            finished = runner.run(config, RunFolder(path), resume=resume, baseline=baseline, more_rounds=more_rounds > 0)
        result = RunResult.of(finished, path)
        announcer.finished(result)
        return result


@with_torch_defaults()
@checked
def training_cost(
    what: str | Path | RunConfig,
    settings: Settings = (),
    *,
    data_dir: str | Path | None = None,
    device: str | torch.device | None = "auto",
) -> TrainingCost:
    """Estimate how long a run takes on this machine and how much memory it needs, from a few of its steps. The arguments are :func:`run`'s.

    Raises:
        ConfigError: there is no such recipe or setting; a setting does not fit; the config file names code to import, and ``settings`` do
            not name it as well; or the model is solved for without steps.
        LdpflError: the data or the model does not fit.
    """
    config = config_for_call(run, what, settings, {})  # the arguments are checked as those of `run`
    if not isinstance(what, RunConfig):
        refuse_code_of_file(what, config, setting_texts(settings))
    if config.training.method == "least-squares":
        raise ConfigError("the cost of training was asked for (--cost), but least squares train no steps: they solve for the model at once")
    if config.data.name == GIVEN and not config.data.path:
        raise ConfigError("the recipe trains on your own data, but names none: give --set data.path=FILE and --set data.target=COLUMN")
    config = resolve_settings(config, NO_CALLER_OBJECTS)
    data = load_dataset(config, None if data_dir is None else Path(data_dir))
    return estimate_training_cost(config, *build(config, data, choose_device(device), secret=new_secret(config)))


def _config_to_resume(folder: RunFolder, *, is_described: bool) -> RunConfig | None:
    """Return the config of the run to resume in ``folder``; None if a new run starts there.

    A new run starts only if the caller described it, by a recipe or by data. Otherwise the folder's name may be mistyped.

    Raises:
        ConfigError: the folder holds no run and none may start in it, or its config is damaged.
    """
    starts_new_run = is_described and not folder.config_path.exists() and folder.is_vacant
    return None if starts_new_run else folder.config()


def prepare(device: str) -> None:
    """Check that ``device`` exists, and let PyTorch use every core that this process may use.

    Raises:
        ConfigError: there is no such ``device``.
    """
    choose_device(device)  # only to raise early
    torch.set_num_threads(cores())


@with_torch_defaults()
@checked
def check(
    what: str | Path | RunConfig | None = None,
    *,
    settings: Settings = (),
    data_dir: str | Path | None = None,
    data: object = None,
    model: str | nn.Module | None = None,
    **overrides: Any,
) -> Checked:
    """Check whether a model can be trained privately, and suggest fixes. The arguments are those of :func:`run`.

    Raises:
        LdpflError: the data cannot be read, or the model cannot be made.
    """
    data_settings, caller_objects = settings_and_objects(data, model)
    _check_data_given(what, data, model, [*setting_texts(settings), *overrides])
    default = OWN if data is not None else DEFAULT
    config = config_for_call(check, default if what is None else what, [*setting_texts(settings), *setting_texts(data_settings)], overrides)
    return look_over(config, None if data_dir is None else Path(data_dir), caller_objects)


def _check_data_given(recipe: object, data: object, model: str | nn.Module | None, given_keys: list[str]) -> None:
    """Raise if a module or columns are given, but neither data nor a recipe.

    Without this check, a call whose data are None by mistake would train on the quickstart's data.

    Args:
        given_keys: keyword arguments of the call, and its settings as texts ``key=value``. They may name data, too.

    Raises:
        ConfigError: ``data`` is missing.
    """
    if recipe is not None or data is not None:
        return
    # A module may be for any data that the settings name, also for a built-in data set.
    if isinstance(model, nn.Module) and not any(key.startswith("data") for key in given_keys):
        raise ConfigError(
            f"model is given, but data is None: give data=... (yours, or the name of a built-in data set), or name a recipe ({DEFAULT!r})"
        )
    # Only a user's own data have columns to name, so a built-in data set among the settings is not enough.
    columns = [key for given in given_keys if (key := given.partition("=")[0]) in _COLUMN_SETTINGS]
    if columns and not any(key.startswith("data.path") for key in given_keys):
        raise ConfigError(f"{columns[0]} names a column of your data, but data is None: give data=..., a file, a folder or a data frame")


@with_torch_defaults()
@checked
def load_run(folder: str | Path, *, data_dir: str | Path | None = None, data: object = None, model: nn.Module | None = None) -> RunResult:
    """Return the finished run in ``folder``, with its guarantee computed from its ledger.

    ``data`` and ``model`` are the Python objects that the run was given, if any.

    Raises:
        ConfigError: ``folder`` holds no run, or the run is not finished.
        DataError: a file is damaged.
    """
    run_folder = RunFolder(Path(folder))
    config, last, figures = run_folder.config(), run_folder.checkpoint_needed(), run_folder.result()
    run_folder.check_is_ldpfls()
    if last is None or figures is None:
        raise ConfigError(f"{folder} contains a run that is not finished: finish it with run(..., folder=..., resume=True)")
    caller_objects = CallerObjects(data, model)
    task = load_dataset(config, None if data_dir is None else Path(data_dir), caller_objects=caller_objects)
    federation, start = build(config, task, torch.device("cpu"), model, secret=run_folder.secret(), measured=run_folder.measured_encoder())
    # An origin names the data and the frozen base, and after " on " the device, which may differ. Only data that the caller gives are
    # compared: a run's own files may have changed since, and its figures are read from the folder.
    given_origin, stored_origin = (origin.rpartition(" on ")[0] for origin in (start.origin, last.origin))
    if given_origin != stored_origin and data is not None:
        raise ConfigError(f"the run in {folder} used {stored_origin}, but you gave {given_origin}: give the run's data, or another folder")
    run_folder.ledger()  # raises if the ledger contradicts the checkpoint, whose ledger the result has
    return RunResult.of(Finished(config, federation, last, figures, task), Path(folder))


def runner_for(
    data_dir: str | Path | None,
    device: str | torch.device | None,
    display: ProgressDisplay | Announcer,
    caller_objects: CallerObjects = NO_CALLER_OBJECTS,
    workers: Count = "auto",
) -> Runner:
    """Return a runner of configs that uses the caller's data folder, device, display and number of processes."""
    folder = None if data_dir is None else Path(data_dir)
    return Runner(folder, choose_device(device), display, draw_score_curve, display.preparing, caller_objects, checked_count(workers))


@contextmanager
def displayed(progress: bool | ProgressDisplay) -> Iterator[ProgressDisplay]:
    """Yield the caller's own display, or a new one that lasts as long as the block."""
    if isinstance(progress, ProgressDisplay):  # the caller opens and closes it
        yield progress
        return
    with ProgressDisplay(terminal(stderr=True, quiet=not progress), lines=False) as display:
        yield display
