"""Commands for one's own data and models: look a model over, look settings up, begin a config."""

from __future__ import annotations

import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ldpfl import api, mechanisms
from ldpfl.api import DEFAULT, OWN
from ldpfl.api.configuring import configured
from ldpfl.cli.options import DataDirOption
from ldpfl.data.cells import reads
from ldpfl.errors import ConfigError
from ldpfl.experiments.config import toml_value
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.experiments.settings_listed import commented, sections
from ldpfl.experiments.settings_listed import settings as settings_in
from ldpfl.files import to_json, write_text
from ldpfl.mechanisms.new_package import write_package
from ldpfl.number_format import counted
from ldpfl.report.terminal import terminal

if TYPE_CHECKING:
    import pandas

UNFIT = 3
"""Exit code for a model that cannot be trained as it is."""

DataOption = Annotated[str | None, typer.Option(help="Your own data: a CSV or Parquet file, or a folder; or a data set's name.")]
TargetOption = Annotated[str | None, typer.Option(help="Column that is to be predicted.")]
ClientOption = Annotated[str | None, typer.Option(help="Column that names the client that a row belongs to.")]
PersonOption = Annotated[
    str | None, typer.Option(help="Column that names the person a row is of, where persons may have several: they are then protected.")
]
TaskOption = Annotated[
    str | None, typer.Option(help="classification, multilabel, regression, poisson, ordinal, survival or language-model.")
]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be given again.")]


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run, or one that ldpfl export wrote.")],
    rows: Annotated[
        Path,
        typer.Argument(
            metavar="ROWS",
            help="A CSV or Parquet file, or a folder: the run's columns, the target aside. Of images a folder, an image or a .npy file.",
        ),
    ],
    model: Annotated[str | None, typer.Option(help="The model, where that is code of yours (package.module:Class).")] = None,
    threshold: Annotated[
        float | None,
        typer.Option(help="Of two classes, the probability of the second one from which on it is predicted.", show_default="0.5"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="CSV file to write.", show_default="printed")] = None,
) -> None:
    """Predict new rows of a table, texts or images with a finished run's model: a line each, as CSV.

    A word that a spreadsheet would take for a formula, such as =A1, has an apostrophe before it; numbers stay as they are.
    """
    text = without_formulas(api.predict(run, rows, model=model, threshold=threshold)).to_csv(index=False)
    if out is None:
        print(text, end="")
        return
    write_text(out, text)
    terminal().print(Text(f"{out}: {counted(text.count(chr(10)) - 1, 'row')}"), soft_wrap=True)


def without_formulas(found: pandas.DataFrame) -> pandas.DataFrame:
    """Return a table in which no name of a column, and no word, is a formula to a spreadsheet that opens it."""
    words = found.map(lambda cell: _no_formula(cell) if isinstance(cell, str) else cell)
    return words.rename(columns=_no_formula)


def _no_formula(text: str) -> str:
    return f"'{text}" if text.startswith(_BEGIN_FORMULAS) and not reads(float, text) else text


_BEGIN_FORMULAS = ("=", "+", "-", "@", "\t", "\r")


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="New folder to write.")],
    key: Annotated[Path | None, typer.Option(help="Private key that signs the certificate (Ed25519); made if there is none.")] = None,
) -> None:
    """Write what may be handed on of a finished run to a new folder: model, guarantee, certificate and model card, and nothing secret."""
    with terminal(stderr=True).status("accounting ..."):
        api.export(run, folder, key=key)
    config = RunFolder(run).config()
    seeded = config.data.brought and not config.secret_noise
    what = "written" if seeded else "to be handed on as it is"
    terminal().print(Text(f"{folder}: {what}; {folder / 'README.md'} says what is in it"), soft_wrap=True)
    if seeded:
        said = (
            f"all noise of this run follows from the seed {config.seed}, which was given: whoever knows or guesses it takes the noise off"
        )
        terminal(stderr=True).print(
            Text(f"{said}; for a model that is handed on, run again without a seed", style="yellow"), soft_wrap=True
        )


def overrides_of(
    data: str | None,
    target: str | None,
    client: str | None,
    task: str | None,
    model: str | None,
    target_epsilon: float | None,
    changes: list[str] | None,
    recipe: str | None = None,
    person: str | None = None,
    evaluation_epsilon: float | None = None,
) -> list[str]:
    """Return what the flags for own data change in a config, as ``key=value``.

    Raises:
        ConfigError: a number is given for a column.
    """
    if target is not None and reads(float, target):
        raise ConfigError(f"--target names a column of your data; the epsilon of the whole run is --target-epsilon {target}")
    if not (target is None and client is None and person is None) and data is None and recipe is None:
        raise ConfigError("--target, --client and --person name columns of your own data: give them with --data")
    own = {"data.target": target, "data.client": client, "data.person": person, "task.name": task, "model.name": model}
    return [
        *([f"{key}={toml_value(value)}" for key, value in api.named_data(data).items()] if data is not None else []),
        *(f"{key}={toml_value(value)}" for key, value in own.items() if value is not None),
        *(changes or []),
        *([f"privacy.target_epsilon={target_epsilon}"] if target_epsilon is not None else []),
        *([f"evaluation.epsilon={evaluation_epsilon}"] if evaluation_epsilon is not None else []),
    ]


def check(
    model: Annotated[str, typer.Argument(help="A built-in model, or your own as file.py:Class.")],
    data: DataOption = None,
    target: TargetOption = None,
    client: ClientOption = None,
    person: PersonOption = None,
    task: TaskOption = None,
    set_: SetOption = None,
    data_dir: DataDirOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look a model over: what in it keeps it from private training, and what to put in its place. Exit code 3 if it cannot be trained."""
    overrides = overrides_of(data, target, client, task, model, None, set_, person=person)
    found = api.check(DEFAULT if data is None else OWN, settings=overrides, data_dir=data_dir)
    if as_json:
        figures = {"fit": found.is_fit, "problem": found.problem, "changes": [asdict(change) for change in found.changes]}
        print(
            to_json(
                {**figures, "still": found.still, "weights": found.weights, "sizes": dict(found.sizes), "notes": list(found.notes)},
                indent=2,
            )
        )
    else:
        _print_check(terminal(), model, found)
    if not found.is_fit:
        raise SystemExit(UNFIT)


def _print_check(console: Console, model: str, found: Any) -> None:
    if found.is_fit:
        console.print(Text(f"{model} can be trained privately: {counted(found.weights, 'weight')}"), soft_wrap=True)
    else:
        console.print(Text(found.problem, style="red"), soft_wrap=True)
    for change in found.changes:
        place = change.place or "the whole"
        console.print(Text(f"  {place}: {change.before} -> {change.after}"), soft_wrap=True)
    if found.still and found.changes:
        console.print(Text(f"even so: {found.still}", style="red"), soft_wrap=True)
    elif found.changes:
        console.print(
            Text(f"so changed it can be trained, {counted(found.weights, 'weight')}: add --set model.mend=true to ldpfl run"),
            soft_wrap=True,
        )
    sizes = ", ".join(f"{name} {value if isinstance(value, tuple) else format(value, ',')}" for name, value in found.sizes.items())
    console.print(Text(f"the data ask for: {sizes}"), soft_wrap=True)
    for note in found.notes:
        console.print(Text(f"note: {note}"), soft_wrap=True)


def settings(
    of: Annotated[
        str | None, typer.Argument(help="A section, such as data, or a mechanism, such as dp-sgd.", show_default="all sections")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List every setting of a config: key, meaning, default, and what may stand there."""
    chosen = (of,) if of is not None else sections()
    found = {name: settings_in(name) for name in chosen}
    if as_json:
        print(to_json({name: [asdict(setting) for setting in own] for name, own in found.items()}, indent=2))
        return
    console = terminal()
    for name, own in found.items():
        console.rule(Text(name, style="bold"), align="left")
        for setting in own:
            default = f" = {setting.default}" if setting.default else ""
            console.print(Text.assemble((setting.key, "bold"), default, (f"   {setting.allowed}", "dim")))
            console.print(Padding(Text(setting.meaning), (0, 0, 0, 4)))
    if of in (None, "mechanism"):
        console.print(Text(f"each mechanism has more: ldpfl settings NAME, of {', '.join(mechanisms.names())}"), soft_wrap=True)


def init(
    file: Annotated[Path, typer.Argument(help="Where to write the config.")] = Path("config.toml"),
    recipe: Annotated[str | None, typer.Option(help="What to begin with.", show_default=f"{OWN}, for your own data")] = None,
    data: DataOption = None,
    target: TargetOption = None,
    client: ClientOption = None,
    person: PersonOption = None,
    task: TaskOption = None,
    model: Annotated[str | None, typer.Option(help="A built-in model, or your own as file.py:Class.")] = None,
    target_epsilon: Annotated[float | None, typer.Option(help="Epsilon of the whole run.")] = None,
    evaluation_epsilon: Annotated[
        float | None, typer.Option(help="Of it, for measuring the model at clients, on records that they hold back.")
    ] = None,
    set_: SetOption = None,
    mechanism: Annotated[
        str | None, typer.Option(help="In place of a config, a new folder of this name with a mechanism of your own.")
    ] = None,
    flower: Annotated[Path | None, typer.Option(help="In place of a config, a new folder for a Flower app of it.")] = None,
) -> None:
    """Write a config with a comment for each key; what is left open is asked for in a terminal."""
    if mechanism is not None:
        write_package(Path(mechanism), mechanism)
        print(f"wrote the package {mechanism}; its README.md says how it is installed, tested and used: pip install -e {mechanism}")
        return
    if flower is not None:
        chosen = recipe or (OWN if data is not None else DEFAULT)
        changes = overrides_of(None, None, None, task, model, target_epsilon, set_, chosen, evaluation_epsilon=evaluation_epsilon)
        _init_app(flower, chosen, data, target, client, person, changes)
        return
    if file.exists():
        raise ConfigError(f"{file} exists: give another name")
    asks = sys.stdin.isatty() and recipe is None
    if asks and data is None:
        data = typer.prompt("Your data: a CSV or Parquet file, a folder of them, or a data set's name")
    if asks and target is None:
        target = typer.prompt("Column that is to be predicted")
    if asks and client is None:
        client = typer.prompt("Column that names the client of a row (empty: rows are dealt out)", default="") or None
    if asks and target_epsilon is None:
        target_epsilon = typer.prompt("Epsilon of the whole run", default=4.0, type=float)
    chosen = recipe or (OWN if data is not None else DEFAULT)
    changes = overrides_of(data, target, client, task, model, target_epsilon, set_, recipe, person, evaluation_epsilon)
    config = configured(chosen, changes)
    write_text(file, commented(config))
    print(f"wrote {file}; run it with: ldpfl run {file}" if file.suffix == ".toml" else f"wrote {file}, which ldpfl run takes as FILE.toml")


def _init_app(
    folder: Path, recipe: str, data: str | None, target: str | None, client: str | None, person: str | None, changes: list[str]
) -> None:
    """Write a Flower app, and where nothing is left to be filled in, a policy and a budget that fit it."""
    if find_spec("flwr") is None:
        raise ConfigError("apps are for Flower: pip install 'ldpfl[flower]'")
    from ldpfl.cli.policy import init as init_policy
    from ldpfl.flower.left_out import left_out, needed_by_nodes
    from ldpfl.flower.named_by_server import code_of
    from ldpfl.flower.new_app import NOT_KNOWN, public_settings, write_app, written
    from ldpfl.flower.policy_init import fitting_policy, offer_of_settings, ranges_for
    from ldpfl.flower.run_settings import RunSettings, joined

    public: dict[str, Any] = {}
    config = api.configure(recipe, changes)
    if data is not None:
        if target is None:
            raise ConfigError("--target has to name the column that is to be predicted")
        public = public_settings(Path(data), target, client, person, config.data.bounds, classes=config.task.name == "classification")
        changes = [change for change in changes if not change.startswith("data.bounds")]
    together = joined([*written(public), *changes])
    way: dict[str, Any] = {"transport": "sum", "min_clients": config.clients.count} if config.shuffling.channel == "secure-sum" else {}
    settings = RunSettings(recipe=recipe, changes=together, out="run", reply_s=_REPLY_S if public else 0.0, **way)
    left = [name for name, bounds in public.get("data.bounds", {}).items() if bounds == NOT_KNOWN]
    sized = not left and not code_of((offer := offer_of_settings(settings)).config)
    if sized:
        fitting_policy(offer, ranges_for(offer, ()))  # so that nothing is written for which there is no policy
    write_app(folder, settings)
    console = terminal()
    console.print(Text(f"wrote the app {folder}"), soft_wrap=True)
    at_nodes = bool(public) or config.data.at_nodes
    console.print("on Flower these are otherwise than in a simulation:")
    for line in left_out(config, at_nodes=at_nodes):
        console.print(Text(f"  {line}"), soft_wrap=True)
    console.print("each node has to be given:")
    for line in needed_by_nodes(at_nodes=at_nodes):
        console.print(Text(f"  {line}"), soft_wrap=True)
    if public:
        said = "its columns, their kinds and its classes were taken from the table and are sent to every node: is the table public?"
        console.print(Text(said, style="yellow"), soft_wrap=True)
    if left:
        unsaid = config.mechanism.unsaid and ", and add the line mechanism.records=NUMBER, the mean number of rows of a node"
        bounds = f"fill in data.bounds of {', '.join(left)} in {folder / 'pyproject.toml'}, by what the public knows of them"
        console.print(Text(f"{bounds}{unsaid}; then: ldpfl policy init {folder}"), soft_wrap=True)
        return
    if not sized:
        said_sizes = "the model is code, which is not run for this: give the sizes of its arrays for policy and budget"
        console.print(Text(f"{said_sizes}: ldpfl policy init {folder} --layers SIZES"), soft_wrap=True)
        return
    if way:
        said_sum = "reports are added up over a relay (docs/sums.md), and sealed to the aggregator's key: with that key,"
        console.print(Text(f"{said_sum} ldpfl policy init {folder} --key KEY"), soft_wrap=True)
        return
    init_policy(str(folder), out=folder / "policy.toml", budget=folder / "budget.sqlite")


_REPLY_S = 60.0
"""Seconds after which clients reply, whatever they trained on; a person changes it to what nodes need."""
