"""The front door: run, plan, account and audit from Python, with typed results; files only where a folder is given."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console, Group
from rich.text import Text
from torch import nn

from ldpfl import mechanisms
from ldpfl.auditing import MechanismAudit, audit_mechanism, default_trials
from ldpfl.data import load
from ldpfl.errors import ConfigError
from ldpfl.experiments.build import build, choose_device
from ldpfl.experiments.config import RunConfig, known_keys, parse_config
from ldpfl.experiments.recipes import recipe_or_file
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.experiments.runner import Finished, Runner
from ldpfl.experiments.shipped import DEFAULT
from ldpfl.mechanisms import Mechanism
from ldpfl.planning.planner import Plan, Setting
from ldpfl.planning.planner import plan as plan_setting
from ldpfl.privacy import Ledger
from ldpfl.privacy.accounting import DELTA
from ldpfl.privacy.accounting import account as account_ledger
from ldpfl.privacy.statement import Statement
from ldpfl.report.console import ProgressDisplay, result_table
from ldpfl.report.plots import Picture, accuracy_curve, draw_accuracy_curve
from ldpfl.report.privacy import guarantee_table
from ldpfl.server import RoundMetrics
from ldpfl.suggestions import did_you_mean

if TYPE_CHECKING:
    import pandas

OnRound = Callable[[RoundMetrics], None]


@dataclass(frozen=True, eq=False)
class RunResult:
    """A finished run.

    Attributes:
        config: what was run, defaults included.
        history: figures of each round.
        ledger: what each round released.
        privacy: what that guarantees to a client, see :func:`account`.
        baseline: accuracy of the same training without noise, after each round; None if it was not asked for.
        folder: where its files are; None if there are none.
    """

    config: RunConfig
    history: tuple[RoundMetrics, ...]
    ledger: Ledger
    privacy: Statement
    baseline: tuple[float, ...] | None
    folder: Path | None
    _module: nn.Module = field(repr=False)
    _figures: Mapping[str, Any] = field(repr=False)

    @property
    def accuracy(self) -> float:
        """Share of the evaluation images that the final model classifies correctly."""
        return self.history[-1].accuracy

    @property
    def bytes_per_client(self) -> int:
        """Bytes that one client sends in one round, at most."""
        return max(metrics.uplink_bytes_per_client for metrics in self.history)

    def module(self) -> nn.Module:
        """Return the trained model, a plain PyTorch module of one's own, on the CPU."""
        return copy.deepcopy(self._module)

    def plot(self) -> Picture:
        """Return accuracy against rounds as a picture, which a notebook shows and :meth:`Picture.save` writes."""
        return accuracy_curve(dict(self._figures))

    def to_dataframe(self) -> pandas.DataFrame:
        """Return a row a round: accuracy, clients, bytes, seconds, and by layer radius, noise and clipping."""
        import pandas

        frame = pandas.json_normalize([_row(metrics) for metrics in self.history])
        return frame.set_index("round")

    def to_dict(self) -> dict[str, Any]:
        """Return what ``result.json`` of a run's folder holds."""
        return copy.deepcopy(dict(self._figures))

    def __rich__(self) -> Group:
        notes = (Text(line, style="yellow") for line in (*self.privacy.notes, *self.privacy.warnings))
        return Group(result_table(dict(self._figures)), guarantee_table(self.privacy.to_dict()), *notes)

    def _repr_html_(self) -> str:
        console = Console(record=True, width=110, file=StringIO(), force_jupyter=False)
        console.print(self)
        return console.export_html(inline_styles=True, code_format='<pre style="font-family:monospace">{code}</pre>')


def run(
    what: str | Path | RunConfig = DEFAULT,
    *,
    settings: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    baseline: bool = True,
    data_dir: str | Path | None = None,
    device: str = "auto",
    progress: bool = True,
    on_round: OnRound | None = None,
    **overrides: Any,
) -> RunResult:
    """Train a model over simulated clients, and return what came out and what it guarantees.

        result = ldpfl.run("quickstart", epsilon=0.5, rounds=3)
        result.accuracy, result.privacy, result.module()

    Args:
        what: a recipe's name, a config file (``*.toml``), or a config.
        settings: changes by dotted key, as ``{"ranges.radius": 0.1}``.
        overrides: the same by the last word of the key, where only one setting has it: ``epsilon``, ``rounds``, ``count``, ``seed``. The
            name of a section stands for its ``name``: ``mechanism="harmony"``.
        folder: where to keep config, checkpoints, ledger, model and figures; without one nothing is written.
        resume: go on with the run in ``folder``.
        baseline: whether to train without noise as well, to compare.
        data_dir: folder with data sets; else ``LDPFL_DATA_DIR``, or the hub.
        device: auto, cpu or cuda.
        progress: whether to draw a bar, in a terminal or a notebook.
        on_round: called with the figures of each private round when it is done; what it raises ends the run.

    Raises:
        ConfigError: no such recipe or setting, or one that does not fit.
        LdpflError: the data or the model does not fit; or a client's values must not leave.
    """
    config = _config(what, {**dict(settings or {}), **_by_leaf(overrides, what)})
    if resume and folder is None:
        raise ConfigError("resume needs folder, that of the run to go on with")
    data = None if data_dir is None else Path(data_dir)
    with ProgressDisplay(Console(stderr=True, quiet=not progress), lines=False) as display:
        runner = Runner(data, choose_device(device), _Heard(display, on_round), draw_accuracy_curve)
        if folder is None:
            return _result(runner.in_memory(config, baseline=baseline), None)
        path = Path(folder)
        runner.run(config, RunFolder(path), resume=resume, baseline=baseline)
    return load_run(path, data_dir=data)


def load_run(folder: str | Path, *, data_dir: str | Path | None = None) -> RunResult:
    """Return the finished run in ``folder``.

    Raises:
        ConfigError: there is none, or it is not finished.
        DataError: a file is damaged.
    """
    kept = RunFolder(Path(folder))
    config, last, figures = kept.config(), kept.checkpoint(), kept.result()
    if last is None or figures is None:
        raise ConfigError(f"{folder} holds a run that is not finished: go on with it by run(..., folder=..., resume=True)")
    task = load(config.data.name, None if data_dir is None else Path(data_dir))
    federation, _ = build(config, task, torch.device("cpu"))
    return _result(Finished(config, federation, last, figures), Path(folder))


def plan(**setting: Any) -> Plan:
    """Return what a federation would guarantee and cost, before anything is run.

        ldpfl.plan(epsilon=1.0, clients=10_000, weights=21_840, rounds=10).statement

    Args:
        setting: those of :class:`ldpfl.planning.planner.Setting`; ``epsilon``, ``clients``, ``weights`` and ``rounds`` are needed.

    Raises:
        ConfigError: one is missing, unknown or out of range.
    """
    known = Setting.__dataclass_fields__
    for name in setting:
        if name not in known:
            raise ConfigError(f"plan has no argument {name!r}: {did_you_mean(name, known)}")
    missing = [name for name in ("epsilon", "clients", "weights", "rounds") if name not in setting]
    if missing:
        raise ConfigError(f"plan needs {', '.join(missing)}")
    return plan_setting(Setting(**setting))


def account(released: Ledger | RunResult | str | Path, *, delta: float | None = None, colluding: int = 0) -> Statement:
    """Return what a ledger guarantees to the client that took part most often.

    Args:
        released: a ledger, its file, a run's folder, or a result.
        delta: failure probability; by default that of the run, or 1e-5.
        colluding: clients that tell the adversary what they sent.

    Raises:
        ConfigError: delta or colluding is out of range, or there is no such run.
        DataError: a file is damaged.
    """
    ledger, chosen = _ledger(released)
    return account_ledger(ledger, chosen if delta is None else delta, colluding)


def audit(mechanism: str | Mechanism, *, epsilon: float = 1.0, trials: int | None = None, seed: int | None = None) -> MechanismAudit:
    """Test a mechanism by experiment, as a black box; see :func:`ldpfl.auditing.audit_mechanism`.

    Args:
        mechanism: itself, or its name, for which ``epsilon`` counts.
        trials: randomised units for each input; by default as many as take some seconds.
        seed: of the random bits; the operating system's without one.

    Raises:
        ConfigError: an argument is out of range, or no mechanism has that name.
    """
    built = mechanisms.with_defaults(mechanism, epsilon) if isinstance(mechanism, str) else mechanism
    return audit_mechanism(built, trials=trials or default_trials(built), seed=seed)


class _Heard:
    """Tells a display how a run gets on, and a caller of each private round."""

    def __init__(self, display: ProgressDisplay, on_round: OnRound | None) -> None:
        self._display, self._on_round, self._phase = display, on_round, 0

    def started(self, label: str, rounds: int, done: tuple[RoundMetrics, ...]) -> None:
        self._phase += 1
        self._display.started(label, rounds, done)

    def clients_done(self, done: int, total: int) -> None:
        self._display.clients_done(done, total)

    def round_done(self, metrics: RoundMetrics) -> None:
        self._display.round_done(metrics)
        if self._on_round is not None and self._phase == 1:
            self._on_round(metrics)

    def warn(self, message: str) -> None:
        self._display.warn(message)


def _config(what: str | Path | RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    overrides = [f"{key}={_text(value)}" for key, value in changes.items()]
    if isinstance(what, RunConfig):
        return parse_config(what.to_toml(), overrides, origin="the config")
    return recipe_or_file(str(what), overrides)


def _by_leaf(overrides: Mapping[str, Any], what: str | Path | RunConfig) -> dict[str, Any]:
    """Return ``overrides`` by their dotted keys."""
    name = str(overrides.get("mechanism", _config(what, {}).mechanism.name))
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


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, int | float) else f'"{value}"'


def _result(finished: Finished, folder: Path | None) -> RunResult:
    local, last, figures = finished.federation.task, finished.last, finished.figures
    baseline = figures["noise_free_accuracy_per_round"]
    return RunResult(
        finished.config,
        last.history,
        last.ledger,
        account_ledger(last.ledger, finished.config.privacy.delta),
        None if baseline is None else tuple(baseline),
        folder,
        local.module_with(last.state.weights),
        figures,
    )


def _row(metrics: RoundMetrics) -> dict[str, Any]:
    return {**metrics.reproducible(), "seconds": metrics.seconds}


def _ledger(released: Ledger | RunResult | str | Path) -> tuple[Ledger, float]:
    if isinstance(released, Ledger):
        return released, DELTA
    if isinstance(released, RunResult):
        return released.ledger, released.config.privacy.delta
    path = Path(released)
    if not path.is_dir():
        return Ledger.load(path), DELTA
    folder = RunFolder(path)
    return Ledger.load(folder.ledger_path), folder.config().privacy.delta
