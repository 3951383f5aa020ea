"""Ledgers of runs and recipes, and warnings about the assumptions of their guarantees, for :mod:`ldpfl.api.accounting`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ldpfl.api.arguments import Settings
from ldpfl.api.configuring import config_from, setting_texts
from ldpfl.api.results import RunResult
from ldpfl.errors import ConfigError, printable
from ldpfl.experiments.calibration import resolve_settings
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.dataset import check_persons_named
from ldpfl.experiments.figures import assumption_caveats
from ldpfl.experiments.planned_ledger import planned_ledger
from ldpfl.experiments.run_folder import TRIAL, RunFolder
from ldpfl.experiments.secret_seed import shared_seed_warnings
from ldpfl.experiments.sweep_config import check_same_protected
from ldpfl.privacy import Ledger
from ldpfl.util.user_code import is_code


def ledger_and_delta_of(what: RunResult | RunConfig | str | Path, settings: Settings) -> tuple[Ledger, float]:
    """Return the ledger of a run, or the ledger that a recipe or config would lead to, and the configured delta.

    Raises:
        ConfigError, DataError: as :func:`ldpfl.api.account`.
    """
    if isinstance(what, RunResult):
        return what.ledger, what.config.privacy.delta
    if isinstance(what, RunConfig) or not Path(what).is_dir():  # a config or a recipe, whose run is only planned
        changes = setting_texts(settings)
        config = config_from(what, changes)
        if not isinstance(what, RunConfig):  # a config object was made by the caller, who knows what code it names
            refuse_code_of_file(what, config, changes)
        check_persons_named(config.data)
        return planned_ledger(resolve_settings(config)), config.privacy.delta
    if settings:
        raise ConfigError(f"settings (--set) are given, but {what} is a run, whose settings are fixed: leave them out, or give a recipe")
    folder = RunFolder(Path(what))
    delta = folder.config().privacy.delta  # first, because its error names the missing or damaged file
    return folder.ledger(), delta


def refuse_code_of_file(file: str | Path, config: RunConfig, changes: Sequence[str]) -> None:
    """Raise if planning a run would run code that the config ``file`` names, unless the user's ``changes`` name the same key.

    The file may be somebody else's, and nobody expects a plan or an account to run a program.

    Raises:
        ConfigError: the file names code to import, and ``changes`` do not name it as well.
    """
    data = config.data
    names_by_key = {
        "model.name": config.model.name,
        "data.name": data.name,
        "data.features": data.features,
        "data.partition": data.partition,
        "task.name": config.task.name,
    }
    changed_keys = {change.partition("=")[0].strip() for change in changes}
    for key, name in names_by_key.items():
        if is_code(name) and key not in changed_keys:
            raise ConfigError(
                f"{file} names code, {key} = {printable(name)}, but ldpfl does not run code that only a file names: if you trust it, "
                f"repeat the name with --set {key}={printable(name)}"
            )


def assumption_warnings(runs: Sequence[RunResult | RunConfig | str | Path]) -> list[str]:
    """Return a warning for each assumption on which the joint guarantee of ``runs`` rests, such as that no two of them share a seed.

    Raises:
        ConfigError: the runs protect different persons or clients, see :func:`check_same_protected`.
    """
    begun = [config_and_simulated for run in runs if (config_and_simulated := _config_and_simulated(run)) is not None]
    planned = [config_from(run, []) for run in runs if isinstance(run, RunConfig) or (isinstance(run, str | Path) and _is_config(run))]
    configs = [*(config for config, _ in begun), *planned]
    check_same_protected(configs)
    warnings = [caveat for config in configs for caveat in assumption_caveats(config)]
    warnings += [TRIAL for run in runs if (folder := _run_folder(run)) is not None and folder.is_trial]
    # On Flower, each node draws its own noise, so a common seed matters only among simulations.
    return warnings + list(shared_seed_warnings(config for config, is_simulated in begun if is_simulated))


def _config_and_simulated(run: RunResult | RunConfig | str | Path) -> tuple[RunConfig, bool] | None:
    """Return the config of a run that has begun, and whether it was simulated; None if ``run`` is only planned, or a ledger alone."""
    if isinstance(run, RunResult):
        return run.config, True
    folder = _run_folder(run)
    return None if folder is None else (folder.config(), not folder.kind().on_flower)


def _is_config(path: str | Path) -> bool:
    """Whether ``path`` is a config file: then the run is only planned."""
    return Path(path).suffix == ".toml" and Path(path).is_file()


def _run_folder(run: RunResult | RunConfig | str | Path) -> RunFolder | None:
    """Return the folder of ``run``; None if it is a config or a recipe, or was not saved."""
    if isinstance(run, RunConfig):
        return None
    path = run.folder if isinstance(run, RunResult) else Path(run)
    return None if path is None or not RunFolder(path).config_path.exists() else RunFolder(path)
