"""The command that tunes settings under one guarantee."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from ldpfl import api
from ldpfl.api import DEFAULT, OWN, overrides_of
from ldpfl.cli.interrupts import INTERRUPTED, Interrupts
from ldpfl.cli.options import DataDirOption
from ldpfl.cli.own import ClientOption, DataOption, PersonOption, TargetOption, TaskOption
from ldpfl.report.console import print_json, terminal
from ldpfl.report.progress import ProgressDisplay


def tune(
    target_epsilon: Annotated[float, typer.Option(help="Epsilon of the release: training, scores and choice together.")],
    what: Annotated[
        str | None,
        typer.Argument(help="A recipe, a config file, a sweep or its file.", show_default=f"{DEFAULT}; {OWN} with --data"),
    ] = None,
    trials: Annotated[float, typer.Option(help="Mean number of trials. The number that is run is random and secret.")] = 10.0,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE,...", help="A setting of every trial; with several values, one that is tuned."),
    ] = None,
    evaluation_epsilon: Annotated[
        float | None, typer.Option(help="Epsilon of a trial's score, a part of the trial's epsilon.", show_default="0.3 of it")
    ] = None,
    max_trials: Annotated[int | None, typer.Option(help="Maximum number of trials.", show_default="4 times --trials")] = None,
    law: Annotated[str, typer.Option(help="Law of the number of trials: poisson, geometric or logarithmic.")] = "poisson",
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of everything. The guarantee holds only while it is secret.")] = None,
    data: DataOption = None,
    target: TargetOption = None,
    client: ClientOption = None,
    person: PersonOption = None,
    task: TaskOption = None,
    model: Annotated[str | None, typer.Option(help="A built-in model, or your own as file.py:Class.")] = None,
    out: Annotated[Path | None, typer.Option(help="The tuning's folder.", show_default="runs/tune-NAME")] = None,
    data_dir: DataDirOption = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    jobs: Annotated[int, typer.Option(min=1, help="Trials at once, each in a process of its own on one thread; on a CPU.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Choose settings by private trials, and release the best one under one epsilon. Rerun the same command to resume.

    The guarantee is for whoever sees only the folder "release". Progress shows the number of trials: it is for whoever runs them.
    """
    fixed, axes = api.tuned_settings(set_ or [])
    recipe = what or (DEFAULT if data is None else OWN)
    changes = overrides_of(data, target, client, task, model, target_epsilon=None, changes=fixed, recipe=recipe, person=person)
    folder = out or Path("runs") / f"tune-{Path(recipe).stem if recipe.endswith('.toml') else recipe.replace('/', '-')}"
    api.prepare(device)
    errors = terminal(stderr=True)
    try:
        with Interrupts() as interrupts, ProgressDisplay(errors, lines=False, check=interrupts.check) as display:
            result = api.tune(
                recipe,
                trials=trials,
                target_epsilon=target_epsilon,
                folder=folder,
                settings=changes,
                axes=axes,
                evaluation_epsilon=evaluation_epsilon,
                max_trials=max_trials,
                law=law,  # type: ignore[arg-type]  # checked by the function
                seed=seed,
                data_dir=data_dir,
                device=device,
                jobs=jobs,
                progress=display,
            )
    except KeyboardInterrupt:
        errors.print(Text("interrupted; finished rounds are kept, go on with the same command"), soft_wrap=True)
        raise SystemExit(INTERRUPTED) from None
    if as_json:
        print_json(result.to_dict())
        return
    console = terminal()
    console.print(result)
    console.print(Text(f"folder that may be handed on: {result.folder}"), soft_wrap=True)
