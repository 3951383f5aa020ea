"""Commands that run federations and show runs."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ldpfl.cli.interrupts import Interrupts
from ldpfl.data.loading import DATA_DIR_VARIABLE
from ldpfl.errors import ConfigError
from ldpfl.experiments import RunConfig, Runner, load_recipe, read_config, recipe_names
from ldpfl.experiments.build import choose_device
from ldpfl.experiments.recipes import DEFAULT
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.experiments.sweep import Cell, cells, check_cells, load_sweep, open_folder, run_cell, sweep_names
from ldpfl.experiments.sweep_rows import courses, rows
from ldpfl.files import write_text
from ldpfl.report.console import ProgressDisplay, layer_table, result_table, sweep_table
from ldpfl.report.noise_plot import draw_noise
from ldpfl.report.plots import draw_accuracy_curve, draw_sweep
from ldpfl.report.privacy import print_guarantees

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def run(
    recipe: Annotated[str | None, typer.Argument(help="A recipe's name or a config file (*.toml).", show_default=DEFAULT)] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be given again.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder.", show_default="runs/NAME-TIME")] = None,
    data_dir: Annotated[Path | None, typer.Option(envvar=DATA_DIR_VARIABLE, help="Folder with data sets; else the hub.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of all random streams.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    twin: Annotated[bool, typer.Option("--twin/--no-twin", help="Also train without noise, to compare (cached).")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print result.json instead of tables.")] = False,
) -> None:
    """Train a model over simulated clients and write a run folder."""
    overrides = [*(set_ or []), *([f"seed={seed}"] if seed is not None else [])]
    chosen_device = choose_device(device)
    config, folder = _config_and_folder(recipe, overrides, out, resume=resume)
    torch.set_num_threads(_cores())
    errors = Console(stderr=True)
    flags = _flags(data_dir, device, twin=twin)
    try:
        with Interrupts() as interrupts, ProgressDisplay(errors, lines=not as_json, check=interrupts.check) as display:
            result = Runner(data_dir, chosen_device, display, draw_accuracy_curve).run(config, folder, resume=resume, twin=twin)
    except KeyboardInterrupt:
        if not folder.config_path.exists():
            raise
        hint = f"interrupted; finished rounds are kept, go on with: ldpfl run --resume --out {folder.path}{flags}"
        errors.print(Text(hint), soft_wrap=True)
        raise SystemExit(INTERRUPTED) from None
    print(json.dumps(result, indent=2)) if as_json else _print_result(folder, result)


def _flags(data_dir: Path | None, device: str, *, twin: bool) -> str:
    """Return the flags that a resumed run needs again, because they are not part of its config."""
    given = f" --data-dir {data_dir}" if data_dir and not os.environ.get(DATA_DIR_VARIABLE) else ""
    return given + (f" --device {device}" if device != "auto" else "") + ("" if twin else " --no-twin")


def _config_and_folder(recipe: str | None, overrides: list[str], out: Path | None, *, resume: bool) -> tuple[RunConfig, RunFolder]:
    if resume and out is None:
        raise ConfigError("--resume needs --out, the folder of the run to go on with")
    if resume and out is not None and recipe is None:
        folder = RunFolder(out)
        folder.config()  # says so if there is no run
        return read_config(folder.config_path, overrides), folder
    config = recipe_or_file(recipe or DEFAULT, overrides)
    folder = RunFolder(out or _default_folder(config))
    return config, folder


def recipe_or_file(name: str, overrides: list[str]) -> RunConfig:
    """Return the config of a recipe, or of a file if the name ends in .toml."""
    return read_config(Path(name), overrides) if name.endswith(".toml") else load_recipe(name, overrides)


def _default_folder(config: RunConfig) -> Path:
    moment = datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{config.name.replace('/', '-')}-seed{config.seed}-{moment}"


def _cores() -> int:
    """Threads to train with: OMP_NUM_THREADS if set, else the cores that this process may be scheduled on."""
    if os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def sweep(
    name: Annotated[str, typer.Argument(help="A sweep's name (see ldpfl recipes) or a file (*.toml).")],
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of every run.")] = None,
    out: Annotated[Path | None, typer.Option(help="The sweep's folder.", show_default="runs/sweep-NAME")] = None,
    data_dir: Annotated[Path | None, typer.Option(envvar=DATA_DIR_VARIABLE, help="Folder with data sets; else the hub.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Run a recipe's variants over settings and seeds; start it again to go on where it was stopped."""
    config, overrides = load_sweep(name), set_ or []
    todo = cells(config, overrides)
    check_cells(todo)
    folder = out or Path("runs") / f"sweep-{config.name.replace('/', '-')}"
    open_folder(config, overrides, folder)
    torch.set_num_threads(_cores())
    errors = Console(stderr=True)
    results: list[tuple[Cell, dict[str, Any]]] = []
    try:
        for number, cell in enumerate(todo, start=1):
            errors.print(Text(f"{number}/{len(todo)}: {cell}"), soft_wrap=True)
            with Interrupts() as interrupts, ProgressDisplay(errors, lines=False, check=interrupts.check) as display:
                runner = Runner(data_dir, choose_device(device), display, draw_accuracy_curve)
                results.append((cell, run_cell(cell, runner, folder)))
            gathered = rows(results)
            write_text(folder / "rows.json", json.dumps([row.to_dict() for row in gathered], indent=2) + "\n")
    except KeyboardInterrupt:
        errors.print(Text(f"interrupted; finished rounds are kept in {folder}, start the same command again to go on"), soft_wrap=True)
        raise SystemExit(INTERRUPTED) from None
    draw_sweep(folder / "accuracy.svg", config, gathered)
    noise_plot = folder / "noise.svg"
    noisy = draw_noise(noise_plot, config, courses(results, folder))
    if as_json:
        print(json.dumps([row.to_dict() for row in gathered], indent=2))
        return
    console = Console()
    console.print(sweep_table(config, gathered))
    if noisy:
        console.print(Text(f"budget as the papers count it, noise and accuracy by round: {noise_plot}"), soft_wrap=True)
    console.print(Text(f"sweep folder: {folder}"), soft_wrap=True)


def recipes() -> None:
    """List the recipes that "ldpfl run" knows."""
    table = Table(title="recipes", title_justify="left")
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("what it runs")
    for name in recipe_names():
        table.add_row(name + (" (default)" if name == DEFAULT else ""), load_recipe(name).description)
    console = Console()
    console.print(table)
    if sweep_names():
        sweeps = Table(title="sweeps (ldpfl sweep NAME)", title_justify="left")
        sweeps.add_column("name", style="bold", no_wrap=True)
        sweeps.add_column("what it runs")
        for name in sweep_names():
            sweeps.add_row(name, load_sweep(name).description)
        console.print(sweeps)


def show(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print result.json.")] = False,
) -> None:
    """Show a run: its result, or how far it got."""
    run_folder = RunFolder(folder)
    config = run_folder.config()
    result = run_folder.result()
    if result is not None:
        print(json.dumps(result, indent=2)) if as_json else _print_result(run_folder, result)
        return
    checkpoint = run_folder.checkpoint()
    done = checkpoint.state.round if checkpoint else 0
    reached = f", accuracy {checkpoint.history[-1].accuracy:.2%}" if checkpoint else ""
    if as_json:
        print(json.dumps({"name": config.name, "finished": False, "rounds_done": done, "rounds": config.training.rounds}, indent=2))
        return
    print(f"{config.name}: not finished, {done} of {config.training.rounds} rounds done{reached}")
    print(f"go on with: ldpfl run --resume --out {folder}")


def _print_result(folder: RunFolder, result: dict[str, Any]) -> None:
    console = Console()
    console.print(result_table(result))
    print_guarantees(console, result["privacy"])
    for caveat in result.get("caveats", ()):
        console.print(Text(f"note: {caveat}"), soft_wrap=True)
    console.print(layer_table(result))
    console.print(Text(f"run folder: {folder.path}"), soft_wrap=True)
