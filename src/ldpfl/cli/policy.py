"""Commands about a client's policy."""

from __future__ import annotations

from importlib.util import find_spec
from math import prod
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
from rich.text import Text

from ldpfl.api.policies import (
    FittedPolicy,
    Policy,
    Rows,
    add_key,
    fit_policy,
    leaves_over_relay,
    read_budget,
    read_policy,
    remove_key,
    why_unbounded,
)
from ldpfl.cli.commands import Group
from ldpfl.errors import ConfigError, printable
from ldpfl.report.console import terminal
from ldpfl.util.number_format import counted, number

app = typer.Typer(cls=Group, no_args_is_help=True, help="A client's policy: the reports that its operator allows to leave.")


key_app = typer.Typer(cls=Group, no_args_is_help=True, help="Aggregators' keys that reports may be sealed to: two while one is replaced.")
app.add_typer(key_app, name="key")
PolicyFile = Annotated[Path, typer.Option("--file", help="The node's policy.")]
KeyArgument = Annotated[str, typer.Argument(help="Public key, as ldpfl deploy key prints it.")]


@key_app.command("add")
def add_key_command(key: KeyArgument, file: PolicyFile = Path("policy.toml")) -> None:
    """Let reports be sealed to one more key. Nothing else in the policy changes."""
    _print_keys(file, add_key(file, key))


@key_app.command("remove")
def remove_key_command(key: KeyArgument, file: PolicyFile = Path("policy.toml")) -> None:
    """Let no more reports be sealed to a key. Nothing else in the policy changes."""
    _print_keys(file, remove_key(file, key))


@key_app.command("list")
def list_keys_command(file: PolicyFile = Path("policy.toml")) -> None:
    """Print the keys that reports may be sealed to, a line each."""
    for known in read_policy(file).aggregator_keys:
        print(known)


def _print_keys(file: Path, policy: Policy) -> None:
    """Print how many keys the policy allows, with a warning if it needs a key and has none."""
    console = terminal()
    console.print(
        Text(f"{file}: reports may be sealed to {counted(len(policy.aggregator_keys), 'key')}, from the next round on"), soft_wrap=True
    )
    if not policy.aggregator_keys and leaves_over_relay(policy):
        console.print(
            Text(
                "without a key, no report leaves this node over a relay: add the aggregator's key with ldpfl policy key add", style="yellow"
            )
        )


@app.command()
def init(
    of: Annotated[str, typer.Argument(metavar="APP", help="Folder of a Flower app; or a recipe, or a config file.")],
    out: Annotated[Path, typer.Option(help="New policy file.")] = Path("policy.toml"),
    budget: Annotated[Path, typer.Option(help="Budget file; made if there is none.")] = Path("budget.sqlite"),
    key: Annotated[list[str] | None, typer.Option(help="Public key of an aggregator; for reports over a relay.")] = None,
    config: Annotated[Path | None, typer.Option(help="Config of a ServerApp of its own.")] = None,
    data: Annotated[Path | None, typer.Option(help="This node's own table, to see whether the app can train on it.")] = None,
    layers: Annotated[
        str,
        typer.Option(help="Values in each of the model's arrays, as 500,10, or names and shapes, as w=10x50,b=10: for a model of its own."),
    ] = "",
) -> None:
    """Write the policy, and the lifetime budget, that an app needs, and say what they allow. Runs nothing of the app."""
    if find_spec("flwr") is None:
        raise ConfigError("policies are for nodes on Flower, which is not installed: pip install 'ldpfl[flower]'")
    fitted = fit_policy(of, out=out, budget=budget, keys=key or (), config=config, data=data, layers=sizes_of(layers))
    _print_fitted(fitted, out, budget)
    if data is not None and fitted.rows is not None:
        _print_rows(data, fitted.rows)
        policy = fitted.policy
        if policy.protects != "client" and policy.delta * fitted.rows.count >= 1:
            warning = (
                f"delta {policy.delta:g} is not below 1/{fitted.rows.count:,}: even publishing a random row would satisfy it; lower delta"
            )
            terminal().print(Text(warning, style="yellow"), soft_wrap=True)
    if fitted.code_warning:
        terminal().print(Text(f"{fitted.code_warning}.", style="yellow"), soft_wrap=True)


def _print_rows(data: Path, checked_rows: Rows) -> None:
    """Print whether the app can train on the rows of the node's table."""
    rows, useless, misfit = checked_rows.count, checked_rows.useless, checked_rows.misfit
    message = f"{'The row' if rows == 1 else f'All {rows:,} rows'} of {printable(str(data))} can be trained on"
    if misfit:
        summary = f"{counted(rows, 'row')} can be trained on, some with missing values"
        if useless:
            summary = f"{useless:,} of the {counted(rows, 'row')} cannot be trained on"
        message = f"Some values of {printable(str(data))} do not fit and count as missing: {summary}. The first: {misfit}"
    terminal().print(Text(f"{message}: export LDPFL_DATA={quote(str(data.absolute()))}", style="yellow" if misfit else ""), soft_wrap=True)


def sizes_of(text: str) -> tuple[int, ...]:
    """Return the number of values of each array in ``text``, the argument of ``--layers``."""
    return tuple(prod(shape) for _, shape in _parse_layers(text))


def shapes_of(text: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each array in ``text``, the argument of ``--layers``, by its name; empty if the arrays have no names."""
    return {name: shape for name, shape in _parse_layers(text) if name}


def _parse_layers(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return name and shape of each array in ``text``, such as ``500,10`` or ``weight=10x50,bias=10``. A name may be empty.

    Raises:
        ConfigError: ``text`` has neither form.
    """
    parts = [part.strip().rpartition("=") for part in text.split(",") if part.strip()]
    layers = [(name.strip(), tuple(size.strip() for size in shape.split("x"))) for name, _, shape in parts]
    names = [name for name, _ in layers]
    # Either no array has a name, or each array has a name of its own.
    has_wrong_names = any(names) and len({*names} - {""}) != len(names)
    are_sizes = all(size.isascii() and size.isdigit() and int(size) > 0 for _, shape in layers for size in shape)
    if not are_sizes or has_wrong_names:
        raise ConfigError(
            f"--layers is {text!r}, expected sizes, as in 500,10, or a name and a shape for each array, as in w=10x50,b=10, no name twice"
        )
    return [(name, tuple(map(int, shape))) for name, shape in layers]


def _print_left(budget: Path, policy: Policy) -> None:
    """Print how much is left of ``budget``, which existed before the policy, and which limits must cover all apps over the same data."""
    books = read_budget(budget, policy).books
    limit, charges = books.limit, books.charges
    if unbounded := why_unbounded(budget, policy):
        terminal().print(Text(f"This node sends nothing for this app: {printable(unbounded)}.", style="yellow"), soft_wrap=True)
        return
    left = number(max(0.0, limit.epsilon - books.spent(limit.delta)))
    message = f"{budget} has epsilon {left} of {limit.epsilon:g} left at delta {limit.delta:g}, and {counted(charges, 'report')} charged."
    if charges:
        message += (
            " These count against the policy too. To let the app send all of its reports, raise rounds "
            f"(to {charges + policy.rounds:,}) and each limit on epsilon that is a number in the policy (lifetime_epsilon, relay_epsilon, "
            "sum_epsilon), and the budget (ldpfl budget set), until they cover all apps over the same people's data. A new budget file for "
            "these people would break the bound."
        )
    terminal().print(Text(message, style="yellow"), soft_wrap=True)


_PROTECTED = {
    "client": "this client",
    "person": "all records of any one person in this client's table (and of the client as a whole, no bound is given)",
    "record": "any one of this client's records (and of the client as a whole, no bound is given)",
}


def _print_fitted(fitted: FittedPolicy, out: Path, budget: Path) -> None:
    """Print what the written policy allows, the claims that it rests on, and the variables that name its files to the SuperNode."""
    console, policy, claimed = terminal(), fitted.policy, fitted.claimed
    budget_state = f"{budget} existed already and is unchanged" if fitted.budget_was_there else f"{budget} holds the budget"
    console.print(Text(f"{out} holds the policy; {budget_state}."), soft_wrap=True)
    console.print(
        Text(
            f"This node may send {counted(policy.rounds, 'report')} of {', '.join(policy.mechanisms)} ({', '.join(policy.transports)}). "
            f"Whoever keeps all of these reports learns of {_PROTECTED[policy.protects]} at most epsilon {number(policy.lifetime_epsilon)} "
            f"at delta {policy.delta:g}."
        ),
        soft_wrap=True,
    )
    if fitted.budget_was_there:
        _print_left(budget, policy)
    if policy.sum_epsilon != "off":
        message = (
            f"Whoever sees no more than the sums over at least {counted(policy.min_clients, 'node')} learns at most epsilon "
            f"{number(policy.sum_epsilon)}: that holds as long as relay and aggregator do not work together."
        )
        console.print(Text(message), soft_wrap=True)
    if claimed:
        message = (
            f"This guarantee is only claimed, by the author of {', '.join(claimed)}, which is not part of ldpfl: test it with ldpfl audit "
            f"{claimed[0]}."
        )
        console.print(Text(printable(message), style="bold yellow"), soft_wrap=True)
    if fitted.on_users_code:
        message = (
            f"This guarantee holds only if the app's model code treats each {policy.protects} by itself and keeps nothing of it, which "
            "ldpfl tests but cannot prove: review that code."
        )
        console.print(Text(message, style="bold yellow"), soft_wrap=True)
    console.print(
        Text("These figures are what the app asks for, not a recommendation: lower them in the policy, or decline.", style="yellow"),
        soft_wrap=True,
    )
    if policy.immediate_replies:
        message = (
            "The app sets no time for replies, so a reply's time shows how long this client trained: immediate_replies in the policy "
            "allows that."
        )
        console.print(Text(message, style="yellow"), soft_wrap=True)
    signing = " LDPFL_SIGNING_KEY=FILE (ldpfl deploy node-key FILE makes it)" if "sum" in policy.transports else ""
    files = f"LDPFL_POLICY={quote(str(out.absolute()))} LDPFL_BUDGET={quote(str(budget.absolute()))}"
    console.print(Text(f"For the SuperNode: export {files}{signing}"), soft_wrap=True)
