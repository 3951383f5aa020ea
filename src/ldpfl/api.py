"""The front door: run, sweep, plan, account and audit, with typed results; files only where a folder is given.

The command line parses, calls these functions and prints; notebooks call them too.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from torch import nn

from ldpfl import mechanisms
from ldpfl.auditing import ERROR_RATE, MechanismAudit, audit_mechanism, default_trials
from ldpfl.certificates import certify as certify
from ldpfl.certificates import verify as verify
from ldpfl.data.tables import SUFFIXES
from ldpfl.errors import ConfigError
from ldpfl.experiments.build import build, choose_device
from ldpfl.experiments.calibration import settled
from ldpfl.experiments.canary import RunAudit
from ldpfl.experiments.canary import audit_run as audit_folder
from ldpfl.experiments.checking import Checked
from ldpfl.experiments.checking import check as look_over
from ldpfl.experiments.config import RunConfig, known_keys, parse_config, read_config, toml_value
from ldpfl.experiments.dataset import NOTHING, Given, load_dataset
from ldpfl.experiments.extending import extend
from ldpfl.experiments.forecast import planned_ledger
from ldpfl.experiments.recipes import recipe_or_file
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.experiments.runner import Finished, Runner
from ldpfl.experiments.shipped import DEFAULT, OWN
from ldpfl.experiments.sweep import SweepConfig, cells, load_sweep
from ldpfl.experiments.sweep_run import run_sweep, stored_sweep
from ldpfl.importing import GIVEN
from ldpfl.mechanisms import Mechanism
from ldpfl.planning.planner import Plan, Setting, reach
from ldpfl.planning.planner import plan as plan_setting
from ldpfl.planning.regimes import plan_regime as plan_regime
from ldpfl.privacy import Ledger
from ldpfl.privacy.accounting import DELTA, account_together
from ldpfl.privacy.statement import Statement
from ldpfl.report.console import ProgressDisplay
from ldpfl.report.noise_plot import draw_noise
from ldpfl.report.plots import draw_score_curve, draw_sweep
from ldpfl.report.results import RunResult, SweepResult
from ldpfl.server import RoundMetrics
from ldpfl.suggestions import did_you_mean

_SEED_BITS = 63
"""As many as every reader of JSON and TOML takes; beyond what anybody could try."""

OnRound = Callable[[RoundMetrics], None]
Settings = Mapping[str, Any] | Sequence[str]
"""Changes of a config: ``{"ranges.radius": 0.1}``, or ``["ranges.radius=0.1"]`` as the command line has them."""

SCORE_PLOT, NOISE_PLOT = "score.svg", "noise.svg"
"""Plots in a sweep's folder."""


def configure(what: str | Path | RunConfig = DEFAULT, settings: Settings = (), **overrides: Any) -> RunConfig:
    """Return the config that :func:`run` runs for the same arguments, checked.

    Raises:
        ConfigError: no such recipe or setting, or a value that does not fit.
    """
    config = _configured(what, [*_listed(settings), *_listed(_by_leaf(overrides, what))])
    # A user's own data have a seed that nobody knows, unless one is said: their noise follows from it.
    said = what.model_fields_set if isinstance(what, RunConfig) else config.model_fields_set
    if config.data.brought and "seed" not in said and "seed" not in overrides:
        return config.model_copy(update={"seed": secrets.randbits(_SEED_BITS)})
    return config


def run(
    what: str | Path | RunConfig | None = None,
    *,
    settings: Settings = (),
    folder: str | Path | None = None,
    resume: bool = False,
    more_rounds: int = 0,
    baseline: bool = True,
    data_dir: str | Path | None = None,
    device: str = "auto",
    progress: bool | ProgressDisplay = True,
    on_round: OnRound | None = None,
    data: object = None,
    model: str | nn.Module | None = None,
    **overrides: Any,
) -> RunResult:
    """Train a model over simulated clients, and return what came out and what it guarantees.

        result = ldpfl.run("quickstart", epsilon=0.5, rounds=3)
        result.accuracy, result.privacy, result.module()
        ldpfl.run(data=frame, target="outcome", client="hospital", target_epsilon=4.0).scores

    Args:
        what: a recipe's name, a config file (``*.toml``), or a config; by default the quickstart, or the recipe ``own`` for one's own
            ``data``, or the config in ``folder``.
        settings: changes by dotted key, as ``{"ranges.radius": 0.1}``.
        overrides: the same by the last word of the key, where only one setting has it: ``epsilon``, ``rounds``, ``count``, ``seed``. The
            name of a section stands for its ``name``: ``mechanism="harmony"``. ``target_epsilon`` sets the mechanism's noise by
            the epsilon of the whole run.
        folder: where to keep config, checkpoints, ledger, model and figures; without one nothing is written.
        resume: go on with the run in ``folder``.
        more_rounds: go on with a finished run in ``folder`` for so many more rounds, which are charged on top.
        baseline: whether to train without noise as well, to compare.
        data_dir: folder with data sets; else ``LDPFL_DATA_DIR``, or the hub.
        device: auto, cpu or cuda.
        progress: whether to draw a bar, in a terminal or a notebook; or what draws it.
        on_round: called with the figures of each private round when it is done; what it raises ends the run.
        data: one's own: a file or folder of tables, a data frame, a pair of inputs and targets (tensors or arrays), a PyTorch data set of
            such pairs, an :class:`ldpfl.data.Dataset`; or the name of a built-in data set, or of one on the hub.
        model: one's own module, whose weights are public and where training begins; or its name or import path.

    Raises:
        ConfigError: no such recipe or setting, or one that does not fit.
        LdpflError: the data or the model does not fit; or a client's values must not leave.
        WriteError: the folder cannot be written; finished rounds are kept.
    """
    if resume and folder is None:
        raise ConfigError("resume needs folder, that of the run to go on with")
    path = None if folder is None else Path(folder)
    if more_rounds:
        if path is None or what is not None or not resume:
            raise ConfigError("more_rounds is for a finished run: give its folder and resume, and nothing to run")
        extend(RunFolder(path), more_rounds)
    if resume and what is None and path is not None:
        RunFolder(path).config()  # which names what is missing or damaged there
        what = RunFolder(path).config_path
    brought, given = _brought(data, model)
    default = OWN if data is not None else DEFAULT
    config = settled(configure(default if what is None else what, [*_listed(settings), *_listed(brought)], **overrides), given)
    with _display(progress) as display:
        runner = _runner(data_dir, device, display if on_round is None else _OnRound(display, on_round), given)
        if path is None:
            return RunResult.of(runner.in_memory(config, baseline=baseline), None)
        return RunResult.of(runner.run(config, RunFolder(path), resume=resume, baseline=baseline), path)


def check(
    what: str | Path | RunConfig = DEFAULT,
    *,
    settings: Settings = (),
    data_dir: str | Path | None = None,
    data: object = None,
    model: str | nn.Module | None = None,
    **overrides: Any,
) -> Checked:
    """Return what keeps a model from private training, and the mended module; arguments are those of :func:`run`.

    Raises:
        LdpflError: the data cannot be read, or the model cannot be made.
    """
    brought, given = _brought(data, model)
    config = configure(OWN if data is not None and what == DEFAULT else what, [*_listed(settings), *_listed(brought)], **overrides)
    return look_over(config, None if data_dir is None else Path(data_dir), given)


def load_run(folder: str | Path, *, data_dir: str | Path | None = None, data: object = None, model: nn.Module | None = None) -> RunResult:
    """Return the finished run in ``folder``; ``data`` and ``model`` are what was handed over to it.

    Raises:
        ConfigError: there is none, or it is not finished.
        DataError: a file is damaged.
    """
    kept = RunFolder(Path(folder))
    config, last, figures = kept.config(), kept.checkpoint(), kept.result()
    if last is None or figures is None:
        raise ConfigError(f"{folder} holds a run that is not finished: go on with it by run(..., folder=..., resume=True)")
    given = Given(data, model)
    task = load_dataset(config, None if data_dir is None else Path(data_dir), given=given)
    federation, start = build(config, task, torch.device("cpu"), model)
    found, begun = (origin.rpartition(" on ")[0] for origin in (start.origin, last.origin))
    if found != begun and data is not None:
        raise ConfigError(f"{folder} was run on {begun}, and what is handed over is {found}")
    return RunResult.of(Finished(config, federation, last, figures), Path(folder))


def sweep(
    what: str | Path | SweepConfig,
    *,
    settings: Settings = (),
    folder: str | Path | None = None,
    data_dir: str | Path | None = None,
    device: str = "auto",
    progress: bool | ProgressDisplay = True,
) -> SweepResult:
    """Run a recipe's variants over settings and seeds, and return a row for each; what is finished in ``folder`` is not run again.

    Args:
        what: a sweep's name, a file (``*.toml``), or a sweep.
        settings: changes of every run, by dotted key.
        folder: where to keep the runs, ``rows.json`` and plots; without one nothing stays.
        data_dir: as for :func:`run`.
        device: as for :func:`run`.
        progress: as for :func:`run`.

    Raises:
        ConfigError: no such sweep or setting, or one that does not fit; found before anything is trained.
        LdpflError: as for :func:`run`.
    """
    config, overrides = what if isinstance(what, SweepConfig) else load_sweep(str(what)), _listed(settings)
    config = _with_seeds(config, overrides, folder)
    if folder is None:
        with TemporaryDirectory() as temporary:
            return replace(_sweep(config, overrides, Path(temporary), data_dir, device, progress), folder=None)
    return _sweep(config, overrides, Path(folder), data_dir, device, progress)


def _with_seeds(config: SweepConfig, overrides: Sequence[str], folder: str | Path | None) -> SweepConfig:
    """Return the sweep with a seed that nobody knows, where it is over a user's own data and says none; that of ``folder``, if begun."""
    if "seeds" in config.model_fields_set or not any(cell.config.data.brought for cell in cells(config, overrides, settle=False)):
        return config
    begun = None if folder is None else stored_sweep(Path(folder))
    return config.model_copy(update={"seeds": begun[0].seeds if begun else [secrets.randbits(_SEED_BITS)]})


def plan(*, target_central: float | None = None, **setting: Any) -> Plan:
    """Return what a federation would guarantee and cost, before anything is run.

        ldpfl.plan(epsilon=1.0, clients=10_000, weights=21_840, rounds=10).statement

    Args:
        target_central: solve for ``clients`` or ``epsilon``, whichever is left out, so that the run has this central epsilon.
        setting: those of :class:`ldpfl.planning.planner.Setting`; ``epsilon``, ``clients``, ``weights`` and ``rounds`` are needed.

    Raises:
        ConfigError: one is missing, unknown or out of range; or nothing reaches the target.
    """
    known = Setting.__dataclass_fields__
    for name in setting:
        if name not in known:
            raise ConfigError(f"plan has no argument {name!r}: {did_you_mean(name, known)}")
    solved = () if target_central is None else ("epsilon", "clients")
    missing = [name for name in ("epsilon", "clients", "weights", "rounds") if setting.get(name) is None and name not in solved]
    if missing:
        raise ConfigError(f"plan needs {', '.join(missing)}")
    if target_central is None:
        return plan_setting(Setting(**setting))
    found, solution = reach(target_central, **{"epsilon": None, "clients": None, **setting})
    return replace(plan_setting(found), solution=solution)


def account(
    what: Ledger | RunResult | RunConfig | str | Path,
    *others: Ledger | RunResult | RunConfig | str | Path,
    settings: Settings = (),
    delta: float | None = None,
    colluding: int = 0,
) -> Statement:
    """Return what a ledger guarantees to the client that took part most often.

    Args:
        what: a ledger, its file, a run's folder, or a result; or a recipe or config, for what it would release.
        others: more of them, on the same clients' data: what a client sent in all of them adds up.
        settings: changes of a recipe or config.
        delta: failure probability; by default that of the run, or 1e-5.
        colluding: clients that tell the adversary what they sent.

    Raises:
        ConfigError: delta or colluding is out of range, there is no such run, or what a recipe releases depends on how it goes.
        DataError: a file is damaged.
    """
    found = [released(one, settings) for one in (what, *others)]
    ledgers, chosen = [ledger for ledger, _ in found], max(own for _, own in found)
    return warned_of_seeds(account_together(ledgers, chosen if delta is None else delta, colluding), (what, *others))


def warned_of_seeds(statement: Statement, of: Iterable[Ledger | RunResult | RunConfig | str | Path]) -> Statement:
    """Return ``statement`` of all these together, with a warning if two of them are simulations whose secrets follow from one seed."""
    seeds = [seed for one in of if (seed := _seed_of(one)) is not None]
    if len(set(seeds)) < len(seeds):
        said = "two of these are simulations of one seed, whose noise is the same: together they hide less than this table says"
        return replace(statement, warnings=(*statement.warnings, said))
    return statement


def _seed_of(what: Ledger | RunResult | RunConfig | str | Path) -> int | None:
    """Return the seed that what a simulation hides behind follows from; None of anything else, and where no two runs share any of it."""
    if isinstance(what, RunResult):
        return _seed_in(what.config)
    if isinstance(what, str | Path) and Path(what).is_dir():
        folder = RunFolder(Path(what))
        return None if folder.kind().on_flower else _seed_in(folder.config())
    return None


def _seed_in(config: RunConfig) -> int | None:
    by_coins = config.clients.once or config.clients.self_sampling != "off" or getattr(config.mechanism, "sample_rate", 1.0) != 1.0
    return config.seed if by_coins or not config.data.brought else None


def released(what: Ledger | RunResult | RunConfig | str | Path, settings: Settings = ()) -> tuple[Ledger, float]:
    """Return the events that :func:`account` accounts, and the delta that was chosen for them."""
    if isinstance(what, Ledger):
        return what, DELTA
    if isinstance(what, RunResult):
        return what.ledger, what.config.privacy.delta
    path = None if isinstance(what, RunConfig) else Path(what)
    is_file = path is not None and (path.suffix == ".json" or (path.is_file() and path.suffix != ".toml"))
    if path is None or not (path.is_dir() or is_file):
        config = _configured(what, _listed(settings))
        return planned_ledger(settled(config)), config.privacy.delta
    if settings:
        raise ConfigError("settings (--set) change a recipe, not a run that was made")
    if is_file:
        return Ledger.load(path), DELTA
    folder = RunFolder(path)
    chosen = folder.config().privacy.delta  # which names what is missing or damaged there
    return folder.ledger(), chosen


def audit(
    mechanism: str | Mechanism, *, epsilon: float = 1.0, trials: int | None = None, error_rate: float = ERROR_RATE, seed: int | None = None
) -> MechanismAudit:
    """Test a mechanism by experiment, as a black box; see :func:`ldpfl.auditing.audit_mechanism`.

    Args:
        mechanism: itself, or its name, for which ``epsilon`` counts.
        trials: randomised units for each input; by default as many as take some seconds.
        error_rate: probability that a sound mechanism fails.
        seed: of the random bits; the operating system's without one.

    Raises:
        ConfigError: an argument is out of range, or no mechanism has that name.
    """
    built = mechanisms.with_defaults(mechanism, epsilon) if isinstance(mechanism, str) else mechanism
    return audit_mechanism(built, trials=trials or default_trials(built), seed=seed, error_rate=error_rate)


def audit_run(
    folder: str | Path,
    *,
    trials: int = 400,
    seed: int = 0,
    data_dir: str | Path | None = None,
    device: str = "auto",
    on_trial: Callable[[int, int], None] | None = None,
) -> RunAudit:
    """Put a canary among the clients of the run in ``folder``, and return what a round's pool gives away of it.

    See :func:`ldpfl.experiments.canary.audit_run`. ``on_trial`` is called with (trials done, trials).
    """
    data = None if data_dir is None else Path(data_dir)
    return audit_folder(RunFolder(Path(folder)), data, choose_device(device), trials=trials, seed=seed, progress=on_trial)


class _OnRound:
    """Tells a display how a run gets on, and a caller of each private round: those of the first phase."""

    def __init__(self, display: ProgressDisplay, on_round: OnRound) -> None:
        self._display, self._on_round, self._phase = display, on_round, 0
        self.clients_done, self.warn, self.preparing = display.clients_done, display.warn, display.preparing

    def started(self, label: str, rounds: int, done: tuple[RoundMetrics, ...], metric: str) -> None:
        self._phase += 1
        self._display.started(label, rounds, done, metric)

    def round_done(self, metrics: RoundMetrics) -> None:
        self._display.round_done(metrics)
        if self._phase == 1:
            self._on_round(metrics)


def _sweep(
    config: SweepConfig, overrides: list[str], out: Path, data_dir: str | Path | None, device: str, progress: bool | ProgressDisplay
) -> SweepResult:
    with _display(progress) as display:
        rows, curves = run_sweep(
            config,
            overrides,
            _runner(data_dir, device, display),
            out,
            lambda number, of, cell: display.next_run(f"{number}/{of}: {cell}"),
        )
    draw_sweep(out / SCORE_PLOT, config, rows)
    draw_noise(out / NOISE_PLOT, config, curves)
    return SweepResult(config, tuple(rows), tuple(curves), out)


def _brought(data: object, model: str | nn.Module | None) -> tuple[dict[str, Any], Given]:
    """Return the settings that name what a caller brings, and what of it has no name."""
    settings: dict[str, Any] = {}
    if isinstance(data, str | Path):
        settings |= named_data(str(data))
    elif data is not None:
        settings["data.name"] = GIVEN
    if isinstance(model, type):
        raise ConfigError(f"model is the class {model.__name__}: give one of it, {model.__name__}(...)")
    if model is not None:
        settings["model.name"] = GIVEN if isinstance(model, nn.Module) else model
    handed = None if isinstance(data, str | Path) else data
    return settings, Given(handed, model if isinstance(model, nn.Module) else None)


def named_data(data: str) -> dict[str, Any]:
    """Return the setting that names ``data``: a file or folder of tables, or else a data set."""
    path = Path(data)
    is_path = path.suffix.lower() in (*SUFFIXES, ".txt", ".xlsx", ".xls", ".json") or path.exists() or data.startswith((".", "/", "~"))
    return {"data.path": str(path.expanduser().resolve())} if is_path else {"data.name": data}


def _runner(data_dir: str | Path | None, device: str, display: ProgressDisplay | _OnRound, given: Given = NOTHING) -> Runner:
    folder = None if data_dir is None else Path(data_dir)
    return Runner(folder, choose_device(device), display, draw_score_curve, display.preparing, given)


@contextmanager
def _display(progress: bool | ProgressDisplay) -> Iterator[ProgressDisplay]:
    if isinstance(progress, ProgressDisplay):  # its owner's
        yield progress
        return
    with ProgressDisplay(Console(stderr=True, quiet=not progress), lines=False) as display:
        yield display


def _configured(what: str | Path | RunConfig, overrides: list[str]) -> RunConfig:
    if isinstance(what, RunConfig):
        return parse_config(what.to_toml(), overrides, origin="the config")
    return read_config(what, overrides) if isinstance(what, Path) else recipe_or_file(what, overrides)


def _listed(settings: Settings) -> list[str]:
    """Return changes of a config as ``key=value``."""
    return [f"{key}={toml_value(value)}" for key, value in settings.items()] if isinstance(settings, Mapping) else list(settings)


def _by_leaf(overrides: Mapping[str, Any], what: str | Path | RunConfig) -> dict[str, Any]:
    """Return ``overrides`` by their dotted keys."""
    if not overrides:
        return {}
    name = str(overrides.get("mechanism", _configured(what, []).mechanism.name))
    known = known_keys(name)
    found = {}
    for leaf, value in overrides.items():
        keys = [f"{leaf}.name"] if f"{leaf}.name" in known else [key for key in known if key.rpartition(".")[2] == leaf]
        top = [key for key in keys if "." not in key]
        if len(top or keys) != 1:
            said = f"several settings end so, {', '.join(keys)}: give one in settings" if keys else did_you_mean(leaf, known)
            raise ConfigError(f"run has no argument {leaf!r}: {said}")
        found[(top or keys)[0]] = value
    return found
