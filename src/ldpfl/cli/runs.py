"""Commands that run federations and show runs."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ldpfl import api
from ldpfl.api import DATA_DIR_VARIABLE, DEFAULT, MOST_SEEDS, OWN, overrides_of
from ldpfl.api.showing import StoredSweep, UnfinishedRun, resume_sweep_command
from ldpfl.cli.interrupts import INTERRUPTED, Interrupts
from ldpfl.cli.new_folder import new_folder
from ldpfl.cli.options import DataDirOption
from ldpfl.cli.own import AdapterOption, ClientOption, DataOption, PersonOption, TargetOption, TaskOption, TextOption
from ldpfl.errors import ConfigError, LdpflError, WriteError, error_without_data, printable
from ldpfl.experiments import RunConfig
from ldpfl.experiments.run_folder import SWEEP, RunFolder
from ldpfl.report.console import print_json, terminal
from ldpfl.report.privacy import print_guarantees
from ldpfl.report.progress import ProgressDisplay
from ldpfl.report.scores import format_score
from ldpfl.report.terminal_tables import layer_table, quality_tables, result_table
from ldpfl.util.number_format import counted


def run(
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe's name or a config file (*.toml).", show_default=f"{DEFAULT}; {OWN} with --data")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be given again.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder.", show_default="runs/NAME-TIME")] = None,
    data_dir: DataDirOption = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    workers: Annotated[str, typer.Option(help="Processes that train: auto, a number, or ray[://HOST:PORT]; same results.")] = "auto",
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of all randomness; without it, noise on your own data is secret.")] = None,
    data: DataOption = None,
    target: TargetOption = None,
    client: ClientOption = None,
    person: PersonOption = None,
    task: TaskOption = None,
    model: Annotated[str | None, typer.Option(help="A built-in model, your own as file.py:Class, or a pretrained one's folder.")] = None,
    text: TextOption = None,
    adapter: AdapterOption = None,
    target_epsilon: Annotated[float | None, typer.Option(help="Epsilon of the whole run; sets the mechanism's noise by it.")] = None,
    evaluation_epsilon: Annotated[
        float | None, typer.Option(help="Part of the target epsilon by which clients measure the model on records that they hold back.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out, or start it there.")] = False,
    more_rounds: Annotated[int, typer.Option(min=0, help="With --resume: go on with a finished run for so many more rounds.")] = 0,
    baseline: Annotated[
        bool | None,
        typer.Option("--baseline/--no-baseline", help="Also train without noise, to compare (cached).", show_default="on, or as begun"),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Serve the run's page on 127.0.0.1 while it trains.")] = False,
    track: Annotated[
        list[str] | None, typer.Option(help="Hand public figures and files to mlflow or wandb, or all figures to tensorboard; repeatable.")
    ] = None,
    report: Annotated[bool, typer.Option("--report/--no-report", envvar="LDPFL_REPORT", help="Write report.html at the end.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print result.json instead of tables.")] = False,
) -> None:
    """Train a model over simulated clients and write a run folder."""
    overrides = [
        *overrides_of(data, target, client, task, model, target_epsilon, set_, recipe, person, evaluation_epsilon, text, adapter),
        *([f"seed={seed}"] if seed is not None else []),
    ]
    default = DEFAULT if data is None else OWN
    api.prepare(device)
    if resume and out is None:
        raise ConfigError("--resume is set, but --out is missing: give the folder of the run to resume")
    if more_rounds and not (resume and recipe is None):
        raise ConfigError("--more-rounds extends a finished run: give --resume and the run's folder as --out, and no recipe")
    # With --resume and --data, an empty folder starts a new run.
    is_new = data is not None and out is not None and RunFolder(out).is_vacant and not more_rounds
    # None: go on with the config in the folder, changed by the overrides. That needs --out, so without --out there is a config here.
    config = None if resume and recipe is None and not is_new else api.configure(recipe or default, overrides)
    folder = RunFolder(out or _default_folder(config or api.configure()))
    errors = terminal(stderr=True)
    resume_command = _resume_command(folder.path, _flags(data_dir, device))
    try:
        with (
            Interrupts() as interrupts,
            ProgressDisplay(errors, lines=not as_json, check=interrupts.check) as display,
            _page_served(folder.path, display, errors) if watch else nullcontext(),
        ):
            options: dict[str, Any] = {
                "folder": folder.path,
                "resume": resume,
                "more_rounds": more_rounds,
                "baseline": baseline,
                "data_dir": data_dir,
                "device": device,
                "workers": int(workers) if workers.isdecimal() else workers,
                "track": track or (),
            }
            result = api.run(config, settings=() if config else overrides, progress=display, **options).to_dict()
    except KeyboardInterrupt:
        if not folder.config_path.exists():
            raise
        errors.print(Text(f"interrupted; finished rounds are kept, go on with: {resume_command}"), soft_wrap=True)
        raise SystemExit(INTERRUPTED) from None
    except WriteError as error:
        raise _with_next_step(error, resume_command if folder.config_path.exists() else "the same command") from error
    if report:
        _write_report(folder.path, errors)
    if as_json:
        _print_as_json(result)
    else:
        _print_result(folder.path, result)


@contextmanager
def _page_served(folder: Path, display: ProgressDisplay, errors: Console) -> Iterator[None]:
    """Serve the page of the run that ``display`` shows while the block lasts, and print its address."""
    from ldpfl.report.watching import watching

    with watching(folder, lambda: display.metric) as address:
        errors.print(Text(f"watch it at {address}"), soft_wrap=True)
        yield


def _write_report(folder: Path, errors: Console) -> None:
    """Write the run's page beside its figures. An error is printed instead of raised, because the run itself has finished."""
    try:
        with errors.status("writing report.html ..."):
            api.page([folder], folder / "report.html")
    except Exception as error:
        errors.print(Text(f"report.html was not written: {error_without_data(error)}"), soft_wrap=True)


def _print_as_json(result: dict[str, Any]) -> None:
    """Print ``result.json``, with null for a secret seed, which determines the noise, and for the fingerprint of a user's own data."""
    shown = dict(result)
    if shown.get("seed_is_secret"):
        shown["seed"] = None
    if shown.get("own_data"):  # the seed is secret for such data alone
        shown["data_fingerprint"] = None
    print_json(shown)


def _with_next_step(error: WriteError, next_command: str) -> WriteError:
    """Return ``error`` with its remedy and ``next_command`` added to the message. The command resumes the run or sweep, or restarts it."""
    message = f"{error}: nothing that was finished is lost; {error.remedy} and go on with: {next_command}"
    return WriteError(message, error.reason, error.remedy)


def _resume_command(folder: Path, flags: str) -> str:
    """Return the command that resumes the run in ``folder``."""
    return f"ldpfl run --resume --out {shlex.quote(str(folder))}{flags}"


def _flags(data_dir: Path | None, device: str) -> str:
    """Return the flags that a resumed run or sweep needs again, because they are not part of its config."""
    is_from_environment = str(data_dir) == os.environ.get(DATA_DIR_VARIABLE)  # and so will be there again
    data_flag = f" --data-dir {shlex.quote(str(data_dir))}" if data_dir and not is_from_environment else ""
    return data_flag + (f" --device {device}" if device != "auto" else "")


def _default_folder(config: RunConfig) -> Path:
    """Return a new folder for a run, named after the config, its seed if that is public, and the time."""
    seed = "" if config.data.brought else f"-seed{config.seed}"
    return new_folder(f"{config.name}{seed}")


def sweep(
    name: Annotated[
        str | None, typer.Argument(help="A sweep's name (see ldpfl recipes) or a file (*.toml); none with --data.", show_default=False)
    ] = None,
    data: DataOption = None,
    target: TargetOption = None,
    client: ClientOption = None,
    person: PersonOption = None,
    task: TaskOption = None,
    model: Annotated[str | None, typer.Option(help="With --data: a built-in model, or your own as file.py:Class.")] = None,
    axis: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE,...", help="With --data: values of a setting to compare.")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=MOST_SEEDS, help="With --data: runs of each setting.")] = 1,
    called: Annotated[
        str | None, typer.Option("--name", help="With --data: what the sweep is called.", show_default="by data and axes")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of every run.")] = None,
    out: Annotated[Path | None, typer.Option(help="The sweep's folder.", show_default="runs/sweep-NAME")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the sweep in --out, with the settings it was begun with.")] = False,
    data_dir: DataDirOption = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    jobs: Annotated[int, typer.Option(min=1, help="Runs at once, each in a process of its own on one thread; on a CPU.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Run a recipe over several settings and seeds. Rerun the same command to resume."""
    if [name is not None, data is not None, resume].count(True) != 1:
        raise ConfigError("give ldpfl sweep exactly one of these: the name or file of a sweep, --data, or --resume")
    if data is None and (axis or target or client or person or task or model or called or seeds != 1):
        unfit = "--axis, --seeds, --name, --target, --client, --person, --task and --model"
        raise ConfigError(
            "a sweep that is named, given as a file or resumed sets its axes and seeds itself: leave out "
            f"{unfit}, which work only with --data"
        )
    config, changes = None, set_ or []  # for --resume: the sweep is read from its folder, and refuses changes
    if name is not None:
        config = api.sweep_config(name)
    elif data is not None:
        _check_single_values(set_ or [])
        overrides = overrides_of(data, target, client, task, model, target_epsilon=None, changes=set_, person=person)
        config, changes = api.sweep_config(changes=overrides, axes=axis or (), seeds=seeds, called=called), []
    if config is None and out is None:
        raise ConfigError("--resume is set, but --out is missing: give the folder of the sweep to resume")
    folder = out or Path("runs") / f"sweep-{config.name.replace('/', '-') if config else ''}"
    api.prepare(device)
    errors = terminal(stderr=True)
    resume_flags = _flags(data_dir, device) + (f" --jobs {jobs}" if jobs > 1 else "")
    flags = {"--data": data, "--target": target, "--client": client, "--person": person, "--task": task, "--model": model, "--name": called}
    all_flags: dict[str, object] = {**flags, "--seeds": seeds if seeds > 1 else None}
    first_command = _sweep_command(name, all_flags, axis or [], set_ or [], folder) + resume_flags  # if there is nothing to resume yet
    resume_command = f"{resume_sweep_command(folder)}{resume_flags}"
    options: dict[str, Any] = {"folder": folder, "data_dir": data_dir, "device": device, "jobs": jobs, "resume": resume}
    sweep_file = folder / SWEEP
    try:
        with Interrupts() as interrupts, ProgressDisplay(errors, lines=False, check=interrupts.check) as display:
            # By its name, a sweep that ships with ldpfl is recognised, whose seeds everybody knows.
            result = api.sweep(config if name is None else name, settings=changes, progress=display, **options)
    except KeyboardInterrupt:
        if not sweep_file.exists():
            raise
        errors.print(Text(f"interrupted; finished rounds are kept, go on with: {resume_command}"), soft_wrap=True)
        raise SystemExit(INTERRUPTED) from None
    except WriteError as error:
        raise _with_next_step(error, resume_command if sweep_file.exists() else first_command) from error
    if as_json:
        print_json(result.to_dict())
    else:
        console = terminal()
        console.print(result)
        noise_plot = folder / api.NOISE_PLOT
        if noise_plot.exists():
            console.print(Text(f"budget as the papers count it, noise and score by round: {noise_plot}"), soft_wrap=True)
        console.print(Text(f"sweep folder: {folder}"), soft_wrap=True)
    if result.failed:
        raise LdpflError(
            f"{counted(len(result.failed), 'run')} failed, for the reasons in the table, and all others are finished; to try again, "
            f"go on with: {resume_command}"
        )


def _check_single_values(settings: list[str]) -> None:
    """Raise a :class:`ConfigError` if one of ``settings``, ``key=value``, has several values, as an axis has."""
    for setting in settings:
        value = setting.partition("=")[2].strip()
        if "," in value and not value.startswith(("[", "{", '"', "'")):
            raise ConfigError(f"--set gives every run one value, but {setting} has several: to compare them give --axis {setting}")


def _sweep_command(name: str | None, flags: dict[str, object], axes: list[str], settings: list[str], folder: Path) -> str:
    """Return the command that starts a sweep anew. A sweep needs it if nothing was written, because then it cannot be resumed."""
    options = [(flag, str(value)) for flag, value in flags.items() if value is not None]
    options += [("--axis", axis) for axis in axes] + [("--set", setting) for setting in settings] + [("--out", str(folder))]
    return printable(shlex.join(["ldpfl", "sweep", *([name] if name else []), *(word for option in options for word in option)]))


def show(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or a sweep's.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print result.json.")] = False,
) -> None:
    """Show a run: its result and a paragraph for a paper, or how far it got. Of a sweep, how many of its runs are finished."""
    shown_folder = api.show(folder)
    if isinstance(shown_folder, StoredSweep):
        _show_sweep(shown_folder, as_json=as_json)
    elif isinstance(shown_folder, UnfinishedRun):
        _show_unfinished(shown_folder, as_json=as_json)
    elif as_json:
        _print_as_json(shown_folder.result)
    else:
        _print_result(folder, shown_folder.result)
        if shown_folder.flower:  # the kind of the app on Flower, in words
            print(f"kind: {shown_folder.flower}")
        if shown_folder.methods:
            terminal().print(Text("\nFor a paper or an ethics board:\n" + shown_folder.methods))


def _show_unfinished(run: UnfinishedRun, *, as_json: bool) -> None:
    """Print how far a run has come, and how it is resumed."""
    if as_json:
        finished = None if run.own_app else False  # only a user's own app knows whether its run is finished
        figures = {"name": run.name, "kind": run.kind, "finished": finished, "rounds_done": run.done, "rounds": run.rounds}
        print_json(figures | ({"stopped": run.stopped} if run.stopped is not None else {}))
        return
    score_text = ""
    if run.score is not None:
        metric, score = run.score
        score_text = f", {metric} {format_score(metric, score)}"
    print(f"{run.name}: {_progress_text(run)}{score_text}")
    print(f"given up: {run.stopped}" if run.stopped is not None else _next_step(run))


def _progress_text(run: UnfinishedRun) -> str:
    """Return how many rounds of a run are finished."""
    if run.own_app:  # such an app writes no result, and may ask for another number of rounds than its config
        done = f"{counted(run.done, 'round')} done ({run.rounds} in its config)"
        return f"{run.kind}, {done}; only the app knows its data and model"
    return f"not finished{f' ({run.kind})' if run.on_flower else ''}, {run.done} of {counted(run.rounds, 'round')} done"


_RESTART_HINT = "resume it by starting its ServerApp again with this folder"


def _next_step(run: UnfinishedRun) -> str:
    """Return how an unfinished run is resumed: one of a user's own app, on Flower, from Python or by a command, in this order."""
    if run.own_app:  # the run may be finished, which only the app knows
        released = f"what it released: ldpfl ledger {shlex.quote(str(run.folder))}" if run.released else ""
        all_rounds_done = run.done > 0 and run.done >= run.rounds
        state = "finished, unless its app asks for more rounds than its config" if all_rounds_done else _RESTART_HINT
        return "; ".join(filter(None, (state, released)))
    if run.on_flower:
        return "go on with: flwr run, with the same run config as before, ldpfl.out included"
    if run.handed_over:
        return "go on from Python, with the data that were handed over: ldpfl.run(data=..., folder=..., resume=True)"
    hint = f"go on with: {_resume_command(run.folder, _flags(data_dir=None, device=run.device))}"
    if run.looked_up is None or os.environ.get(DATA_DIR_VARIABLE):
        return hint
    name = printable(run.looked_up)  # the config that has this name may be somebody else's
    return f"{hint}\nif the run was begun with --data-dir, give it again: without it, {name} is looked for on the hub"


def _show_sweep(sweep: StoredSweep, *, as_json: bool) -> None:
    """Print how many of a sweep's runs are finished, and how it is resumed or its table is printed."""
    is_over = sweep.done + sweep.stopped == sweep.runs
    if as_json:
        counts = {"runs_done": sweep.done, "stopped": sweep.stopped, "runs": sweep.runs}
        print_json({"name": sweep.name, "kind": "sweep", "finished": is_over, **counts})
        return
    given_up = f", {sweep.stopped} given up" if sweep.stopped else ""
    print(f"{sweep.name}: a sweep, {sweep.done} of {counted(sweep.runs, 'run')} finished{given_up}")
    print(f"{'print its table' if is_over else 'go on'} with: {resume_sweep_command(sweep.folder)}")
    if sweep.first is not None:
        print(f"one of its runs: ldpfl show {printable(shlex.quote(str(sweep.first)))}")


def _print_result(folder: Path, result: dict[str, Any]) -> None:
    """Print a finished run: its figures, guarantee, caveats and layers."""
    console = terminal()
    for table in (result_table(result), *quality_tables(result)):
        console.print(table)
    print_guarantees(console, result["privacy"], result.get("target"))
    for caveat in result.get("caveats", ()):
        console.print(Text(f"note: {caveat}"), soft_wrap=True)
    console.print(layer_table(result))
    console.print(Text(f"run folder: {folder}"), soft_wrap=True)
