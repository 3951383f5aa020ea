"""Test a mechanism, or a run, by experiment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ldpfl import mechanisms
from ldpfl.api.arguments import checked
from ldpfl.attacks.canary import RunAudit, audit_run as audit_folder
from ldpfl.auditing import ERROR_RATE, MechanismAudit, audit_mechanism, default_trials
from ldpfl.errors import ConfigError
from ldpfl.experiments.build import choose_device
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.mechanisms import Mechanism
from ldpfl.report.privacy import audit_table, canary_table
from ldpfl.util.displays import look
from ldpfl.util.suggestions import did_you_mean

look.register(MechanismAudit, audit_table)
look.register(RunAudit, canary_table)


@checked
def is_mechanism(name: str | Path) -> bool:
    """Return True if ``name`` is the name of a mechanism, False if it is the folder of a run.

    Raises:
        ConfigError: ``name`` is neither.
    """
    if str(name) in mechanisms.names():
        return True
    if not Path(name).is_dir():
        raise ConfigError(f"{str(name)!r} is neither a run's folder nor a mechanism: {did_you_mean(str(name), mechanisms.names())}")
    return False


@checked
def require_run(folder: str | Path) -> None:
    """Raise unless ``folder`` holds a run.

    Raises:
        ConfigError: ``folder`` holds no run.
        DataError: a file of the run is damaged.
    """
    RunFolder(Path(folder)).config()


@checked
def audit(
    mechanism: str | Mechanism, *, epsilon: float = 1.0, trials: int | None = None, error_rate: float = ERROR_RATE, seed: int | None = None
) -> MechanismAudit:
    """Test a mechanism by experiment, as a black box; see :func:`ldpfl.auditing.audit_mechanism`.

    Args:
        mechanism: a mechanism, or its name. ``epsilon`` is used with a name only.
        trials: number of randomised units for each input; by default as many as take some seconds.
        error_rate: probability that a correct mechanism fails the test.
        seed: seed of the random bits; by default they come from the operating system.

    Raises:
        ConfigError: an argument is out of range, or no mechanism has that name.
    """
    built = mechanisms.with_defaults(mechanism, epsilon) if isinstance(mechanism, str) else mechanism
    return audit_mechanism(built, trials=default_trials(built) if trials is None else trials, seed=seed, error_rate=error_rate)


@checked
def audit_run(
    folder: str | Path,
    *,
    trials: int = 400,
    seed: int = 0,
    data_dir: str | Path | None = None,
    device: str | torch.device | None = "auto",
    on_trial: Callable[[int, int], None] | None = None,
) -> RunAudit:
    """Put a canary (a client with one of two known patterns) into a run, and measure how well a round's reports reveal its pattern.

    See :func:`ldpfl.attacks.canary.audit_run`. ``on_trial`` is called with the number of trials done and of all trials.
    """
    data = None if data_dir is None else Path(data_dir)
    return audit_folder(RunFolder(Path(folder)), data, choose_device(device), trials=trials, seed=seed, progress=on_trial)
