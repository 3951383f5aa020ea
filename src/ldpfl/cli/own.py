"""Commands for one's own data and models: look a model over, look settings up, begin a config."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ldpfl import api
from ldpfl.api import DEFAULT, OWN, overrides_of
from ldpfl.api.beginning import BegunApp
from ldpfl.cli.options import DataDirOption
from ldpfl.errors import ConfigError, LdpflError, printable
from ldpfl.report.console import print_json, terminal
from ldpfl.util.number_format import counted

UNFIT = 3
"""Exit code for a model that cannot be trained as it is."""

DataOption = Annotated[str | None, typer.Option(help="Your own data: a CSV or Parquet file, or a folder; or a data set's name.")]
TargetOption = Annotated[str | None, typer.Option(help="Column that is to be predicted.")]
ClientOption = Annotated[str | None, typer.Option(help="Column that names the client that a row belongs to.")]
PersonOption = Annotated[
    str | None, typer.Option(help="Column that names the person of a row, if a person may have several rows: persons are then protected.")
]
TaskOption = Annotated[
    str | None, typer.Option(help="classification, multilabel, regression, poisson, ordinal, survival or language-model.")
]
TextOption = Annotated[
    str | None, typer.Option(help="Column that holds texts, for models of texts. A pretrained model finds it if there is only one.")
]
AdapterOption = Annotated[str | None, typer.Option(help="Train this of a pretrained model: lora, ia3, prompt or head.", show_default="all")]
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
    model: Annotated[
        str | None,
        typer.Option(help="The model, if it is your code (package.module:Class), or the base of a pretrained model."),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(help="For two classes: the probability of the second class from which it is predicted.", show_default="0.5"),
    ] = None,
    id_: Annotated[
        str | None,
        typer.Option("--id", metavar="COLUMN", help="Column of ROWS to write beside predictions, such as a patient's number."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="CSV file to write.", show_default="printed")] = None,
) -> None:
    """Predict new rows of a table, texts or images with a finished run's model: a line each, as CSV.

    The first column is the row's number, from 1 without the header, or the image's file; --id adds a column of the table.

    A word that a spreadsheet would take for a formula, such as =A1, has an apostrophe before it; numbers stay as they are.
    """
    console = terminal(stderr=True)
    text = api.predict_csv(
        run,
        rows,
        model=model,
        threshold=threshold,
        id_column=id_,
        file=out,
        on_note=lambda note: console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True),
    )
    if out is None:
        print(text, end="")
        return
    row_count = sum(1 for _ in csv.reader(StringIO(text))) - 1  # without the heading; a cell may hold line breaks
    terminal().print(Text(f"{out}: {counted(row_count, 'row')}"), soft_wrap=True)


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="New folder to write.")],
    key: Annotated[Path | None, typer.Option(help="Private key that signs the certificate (Ed25519); made if there is none.")] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Also write model.onnx, for ONNX Runtime and others.")] = False,
    pt2: Annotated[bool, typer.Option("--pt2", help="Also write model.pt2, a program of torch.export.")] = False,
    model: Annotated[str | None, typer.Option(help="With --onnx or --pt2: the model, if it is your code (package.module:Class).")] = None,
) -> None:
    """Write the public parts of a finished run to a new folder: model, guarantee, certificate and model card, and nothing secret."""
    notes: list[str] = []
    with terminal(stderr=True).status("accounting ..."):
        api.export(run, folder, key=key, onnx=onnx, pt2=pt2, model=model, on_note=notes.append)
    seed = api.given_seed(run)
    state = "may be published as it is" if seed is None and not notes else "written"
    terminal().print(Text(f"{folder}: {state}; {folder / 'README.md'} describes its files"), soft_wrap=True)
    for note in notes:
        terminal(stderr=True).print(Text(note, style="yellow"), soft_wrap=True)
    if seed is not None:
        warning = f"the seed {seed} that you gave determines all noise of this run: whoever knows or guesses it can remove the noise"
        terminal(stderr=True).print(
            Text(f"{warning}. Run again without a seed before you publish the model", style="yellow"), soft_wrap=True
        )


def check(
    model: Annotated[str, typer.Argument(help="A built-in model, or your own as file.py:Class.")],
    data: DataOption = None,
    target: TargetOption = None,
    client: ClientOption = None,
    person: PersonOption = None,
    task: TaskOption = None,
    text: TextOption = None,
    set_: SetOption = None,
    data_dir: DataDirOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check whether a model can be trained privately, and suggest fixes. Exit code 3 if it cannot be trained."""
    overrides = overrides_of(data, target, client, task, model, target_epsilon=None, changes=set_, person=person, text=text)
    checked = api.check(DEFAULT if data is None else OWN, settings=overrides, data_dir=data_dir)
    if as_json:
        outcome = {"fit": checked.is_fit, "problem": checked.problem, "changes": [asdict(change) for change in checked.changes]}
        sizes = {"weights": checked.weights, "sizes": dict(checked.sizes)}
        print_json({**outcome, "remaining_problem": checked.remaining_problem, **sizes, "notes": list(checked.notes)})
    else:
        _print_check(terminal(), model, checked)
    if not checked.is_fit:
        raise SystemExit(UNFIT)


def _print_check(console: Console, model: str, checked: Any) -> None:
    """Print whether the model can be trained, the changes that it needs, and what the data require of it."""
    if checked.is_fit:
        console.print(Text(f"{model} can be trained privately: {counted(checked.weights, 'weight')}"), soft_wrap=True)
    else:
        console.print(Text(checked.problem, style="red"), soft_wrap=True)
    for change in checked.changes:
        layer = change.place or "the whole model"
        console.print(Text(f"  {layer}: {change.before} -> {change.after}"), soft_wrap=True)
    if checked.remaining_problem and checked.changes:
        console.print(Text(f"with these changes it still cannot be trained: {checked.remaining_problem}", style="red"), soft_wrap=True)
    elif checked.changes:
        console.print(
            Text(f"with these changes it can be trained, {counted(checked.weights, 'weight')}: add --set model.mend=true to ldpfl run"),
            soft_wrap=True,
        )
    sizes = ", ".join(f"{name} {value if isinstance(value, tuple) else format(value, ',')}" for name, value in checked.sizes.items())
    console.print(Text(f"the data need a model with: {sizes}"), soft_wrap=True)
    for note in checked.notes:
        console.print(Text(f"note: {note}"), soft_wrap=True)


def settings(
    of: Annotated[
        str | None, typer.Argument(help="A section, such as data, or a mechanism, such as dp-sgd.", show_default="all sections")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List every setting of a config: key, meaning, default and allowed values."""
    by_section = api.list_settings(of)
    if as_json:
        print_json({name: [asdict(setting) for setting in section_settings] for name, section_settings in by_section.items()})
        return
    console = terminal()
    for name, section_settings in by_section.items():
        console.rule(Text(name, style="bold"), align="left")
        for setting in section_settings:
            default = f" = {setting.default}" if setting.default else ""
            console.print(Text.assemble((setting.key, "bold"), default, (f"   {setting.allowed}", "dim")))
            console.print(Padding(Text(setting.meaning), (0, 0, 0, 4)))
    if of in (None, "mechanism"):
        names = ", ".join(api.mechanism_names())
        console.print(Text(f"each mechanism has further settings: ldpfl settings NAME, where NAME is one of {names}"), soft_wrap=True)


def init(
    file: Annotated[Path, typer.Argument(help="Where to write the config.")] = Path("config.toml"),
    recipe: Annotated[str | None, typer.Option(help="Recipe to begin with.", show_default=f"{OWN}, for your own data")] = None,
    data: DataOption = None,
    target: TargetOption = None,
    client: ClientOption = None,
    person: PersonOption = None,
    text: TextOption = None,
    task: TaskOption = None,
    model: Annotated[str | None, typer.Option(help="A built-in model, or your own as file.py:Class.")] = None,
    target_epsilon: Annotated[float | None, typer.Option(help="Epsilon of the whole run.")] = None,
    evaluation_epsilon: Annotated[
        float | None, typer.Option(help="Part of the target epsilon for measuring the model at clients, on records that they hold back.")
    ] = None,
    set_: SetOption = None,
    mechanism: Annotated[str | None, typer.Option(help="Instead of a config: name of a new folder with your own mechanism.")] = None,
    flower: Annotated[Path | None, typer.Option(help="Instead of a config: new folder for a Flower app that runs it.")] = None,
) -> None:
    """Write a config with a comment for each key. In a terminal it asks for values that are missing."""
    if mechanism is not None:
        api.begin_mechanism(mechanism)
        print(f"wrote the package {mechanism}: install it with pip install -e {mechanism}; its README.md says how to test and use it")
        return
    if flower is not None:  # the data and columns go to the app apart from the other changes
        chosen = recipe or (OWN if data is not None else DEFAULT)
        changes = overrides_of(
            None, None, None, task, model, target_epsilon, set_, chosen, evaluation_epsilon=evaluation_epsilon, text=text
        )
        _init_app(flower, chosen, data, target, client, person, changes)
        return
    if file.exists():
        raise ConfigError(f"{file} already exists and is not overwritten: give another file")
    may_ask = sys.stdin.isatty() and recipe is None
    if may_ask:
        if data is not None:  # a fault in the given columns must not be taken for one in an answer
            _check_data(data, target, client, person, text)
        data = data or _answer("Your data: a CSV or Parquet file, a folder of them, or a data set's name", _check_data)
        target = target or _answer("Column that is to be predicted", partial(_check_data, data))
        if client is None:
            question = "Column that names the client of a row (empty: rows are dealt out)"
            client = _answer(question, partial(_check_data, data, None), default="") or None
        if target_epsilon is None:
            target_epsilon = typer.prompt("Epsilon of the whole run", default=4.0, type=float)
    chosen = recipe or (OWN if data is not None else DEFAULT)
    changes = overrides_of(data, target, client, task, model, target_epsilon, set_, recipe, person, evaluation_epsilon, text)
    api.begin_config(file, chosen, changes)
    print(
        f"wrote {file}; run it with: ldpfl run {file}" if file.suffix == ".toml" else f"wrote {file}; rename it to FILE.toml for ldpfl run"
    )


def _answer(question: str, check: Callable[[str], None], default: str | None = None) -> str:
    """Ask ``question`` in the terminal until ``check`` raises no error for the answer, and return the answer."""
    while True:
        answer: str = typer.prompt(question, default=default)
        try:
            check(answer)
        except LdpflError as error:
            terminal().print(Text(str(error), style="red"), soft_wrap=True)
        else:
            return answer


def _check_data(
    data: str, target: str | None = None, client: str | None = None, person: str | None = None, text: str | None = None
) -> None:
    """Raise an :class:`LdpflError` if the ``data`` do not exist, or lack one of the columns."""
    api.config_of_existing_data(OWN, overrides_of(data, target, client or None, None, None, None, None, person=person, text=text))


def _init_app(
    folder: Path, recipe: str, data: str | None, target: str | None, client: str | None, person: str | None, changes: list[str]
) -> None:
    """Write a Flower app. If nothing has to be filled in, also write a policy and a budget that fit it."""
    app = api.begin_app(folder, recipe, changes, data=data, target=target, client=client, person=person)
    console = terminal()
    console.print(Text(f"wrote the app {folder}"), soft_wrap=True)
    console.print("differences between Flower and a simulation:")
    for line in app.differs:
        console.print(Text(f"  {line}"), soft_wrap=True)
    console.print("each node needs:")
    for line in app.needed:
        console.print(Text(f"  {line}"), soft_wrap=True)
    if app.from_table:
        warning = "the table's columns, their kinds and its classes are in the app, which every node gets: make sure that they are public"
        console.print(Text(warning, style="yellow"), soft_wrap=True)
    if app.note:
        console.print(Text(printable(app.note)), soft_wrap=True)
    if app.is_complete:
        from ldpfl.cli.policy import init as init_policy

        init_policy(str(folder), out=folder / "policy.toml", budget=folder / "budget.sqlite")
    else:
        console.print(Text(_left_to_do(app)), soft_wrap=True)


def _left_to_do(app: BegunApp) -> str:
    """Return the steps that the user has to do before a policy and a budget can be written."""
    layers_flag = "" if app.is_sized else " --layers SIZES"
    key_flag = " --key KEY" if app.by_sum else ""
    command = f"ldpfl policy init {app.folder}{layers_flag}{key_flag}"
    if app.open_bounds:
        records = f", and add the line mechanism.records=NUMBER, the mean number of {app.mean_left} of a node" if app.mean_left else ""
        bounds = f"fill in data.bounds of {', '.join(app.open_bounds)} in {app.folder / 'pyproject.toml'}"
        return f"{bounds}, from public knowledge and not from the data{records}; then: {command}"
    reasons = []
    if not app.is_sized:
        unknown_sizes = (
            "the sizes of the model's arrays are unknown, because its code is not run, or it is pretrained and not in a folder here"
        )
        reasons.append(f"{unknown_sizes}: give them with --layers; their total is the number of weights that ldpfl check prints")
    if app.by_sum:
        reasons.append("reports are added up over a relay (docs/sums.md) and encrypted for the aggregator: give its public key with --key")
    return f"{'; '.join(reasons)}: {command}"
