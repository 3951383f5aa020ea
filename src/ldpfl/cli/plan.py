"""The command that plans a federation."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from click.core import ParameterSource
from rich.progress import track
from rich.text import Text

from ldpfl import api
from ldpfl.errors import ConfigError
from ldpfl.report.console import terminal
from ldpfl.report.privacy import lines_table, plan_table, print_guarantees, regime_table


def plan(
    context: typer.Context,
    what: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="With --cost: a recipe or config file whose training is estimated.")
    ] = None,
    *,
    epsilon: Annotated[float | None, typer.Option(help="Budget of one weight in one round.")] = None,
    clients: Annotated[int | None, typer.Option(help="How many clients there are.")] = None,
    weights: Annotated[int, typer.Option(help="Parameters of the model.")] = 21_840,
    rounds: Annotated[int, typer.Option(help="Rounds of training.")] = 10,
    delta: Annotated[float, typer.Option(help="Failure probability; it should be below 1 / clients.")] = api.DELTA,
    mechanism: Annotated[str, typer.Option(help="Mechanism (local randomiser).")] = "duchi",
    participation: Annotated[float, typer.Option(help="Fraction of the clients that takes part in a round.")] = 1.0,
    self_sampling: Annotated[
        bool, typer.Option("--self-sampling", help="Each client decides for itself, in secret, whether it takes part.")
    ] = False,
    radius: Annotated[float, typer.Option(help="Clipping range: weights are clipped to center +- radius.")] = 0.075,
    channel: Annotated[str, typer.Option(help="ideal-shuffler, secure-sum, random-delay or direct.")] = "ideal-shuffler",
    colluding: Annotated[int, typer.Option(min=0, help="Clients that tell the adversary what they sent.")] = 0,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Number of the model's parameter tensors; needed if the mechanism's reports depend on it.")
    ] = None,
    target_central: Annotated[
        float | None, typer.Option(help="Central epsilon: solve for the clients, or the epsilon, that reach it.")
    ] = None,
    regime: Annotated[
        str | None,
        typer.Option(help="shuffled, local, records, records-summed or clients-summed; with --target, --clients."),
    ] = None,
    target: Annotated[float | None, typer.Option(help="Epsilon of the whole run that the regime is to keep.")] = None,
    records: Annotated[int, typer.Option(min=1, help="Records of a client, for the regime records.")] = 1,
    persons: Annotated[
        bool, typer.Option("--persons", help="--records counts persons, who may have several records, and protects them.")
    ] = False,
    evaluation_epsilon: Annotated[
        float,
        typer.Option(min=0.0, help="Part of the target that clients spend on measuring the model; not in the regime local."),
    ] = 0.0,
    group: Annotated[
        int, typer.Option(min=1, help="Size of the groups of coordinates of which a client sends one, for the regime shuffled.")
    ] = 1,
    linked: Annotated[
        int,
        typer.Option(min=1, help="How many coordinates stay together, for the regime shuffled and for --cost."),
    ] = 1,
    cost: Annotated[
        bool,
        typer.Option("--cost", help="Print the cost of a round over relays, or as a sum; of a RECIPE, time and memory of its training."),
    ] = False,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the RECIPE.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of data sets, for a RECIPE; else LDPFL_DATA_DIR, or the hub.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw epsilon against the number of clients into this file (svg, png, pdf).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compute the privacy and cost of a planned federation.

    With --target-central and without --clients (or --epsilon), it solves for the missing one. With --regime and --target, it prints
    the noise that keeps the target, and the error of a mean with this noise. With a RECIPE and --cost, it estimates the training.
    """
    if what is not None:  # the cost of training a recipe
        _check_recipe_options(context, cost)
        _print_training_cost(what, set_, data_dir, as_json)
        return
    if set_:
        raise ConfigError("--set changes a setting of a recipe, but the plan has none: name a recipe, with --cost, or leave out --set")
    if regime is not None or target is not None:  # a training regime; the rest is the plan of a setting, or solves for one of its values
        missing = [flag for flag, value in (("--regime", regime), ("--target", target), ("--clients", clients)) if value is None]
        if regime is None or target is None or clients is None:
            raise ConfigError(
                f"--regime and --target need each other and --clients, but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} "
                "missing: give all three"
            )
        is_given = {
            "--epsilon": epsilon is not None,
            "--target-central": target_central is not None,
            "--plot": plot is not None,
            "--self-sampling": self_sampling,
            "--layers": layers is not None,
            "--cost": cost and not regime.endswith("-summed"),  # for a regime, only the cost of a sum is computed
        }
        unfit_flags = [flag for flag, given in is_given.items() if given]
        if unfit_flags:
            raise ConfigError(f"--regime already decides {', '.join(unfit_flags)}: leave out {' and '.join(unfit_flags)}, or --regime")
        sizes = {"clients": clients, "weights": weights, "rounds": rounds, "records": records, "group": group, "linked": linked}
        unit = "person" if persons else "record"
        privacy = {"delta": delta, "colluding": colluding, "part": unit, "evaluation_epsilon": evaluation_epsilon}
        _plan_regime(regime, target, as_json, cost, **privacy, **sizes)
        return
    if evaluation_epsilon:
        raise ConfigError(
            "--evaluation-epsilon is set, but --regime is missing: give --regime (any but local), or leave out --evaluation-epsilon"
        )
    setting: dict[str, Any] = {
        "epsilon": epsilon,
        "clients": clients,
        "weights": weights,
        "rounds": rounds,
        "delta": delta,
        "mechanism": mechanism,
        "participation": participation,
        "self_sampling": self_sampling,
        "radius": radius,
        "channel": channel,
        "colluding": colluding,
        "layers": layers,
    }
    if target_central is None and (epsilon is None or clients is None):
        absent = " and ".join(flag for flag, value in (("--epsilon", epsilon), ("--clients", clients)) if value is None)
        raise ConfigError(f"the plan lacks {absent}: give --epsilon and --clients, or --target-central and one of them")
    if target_central is not None and epsilon is None and clients is None:
        raise ConfigError("--target-central needs --epsilon (to find the clients) or --clients (to find the epsilon)")
    if plot is not None:  # checked first, because planning may take half a minute
        api.check_plot(plot, **setting)
    with terminal(stderr=True).status("accounting ..."):  # seconds, for large settings half a minute
        planned = api.plan(target_central=target_central, **setting)
    if plot is not None:
        progress = partial(track, description="epsilon against clients", console=terminal(stderr=True), disable=as_json)
        api.draw_plan(planned, plot, target_central, progress)
    costs = api.cost(planned, linked) if cost else None
    if as_json:
        print(json.dumps(planned.to_dict() | ({"cost": costs.to_dict()} if costs else {}), indent=2))
        return
    console = terminal()
    console.print(plan_table(planned.to_dict()))
    if costs is not None:
        transport = "as a sum over two servers" if channel == "secure-sum" else f"over relays, {linked:,} units a record"
        console.print(lines_table(f"cost of a round of {costs.clients:,} clients {transport}", costs.lines()))
    print_guarantees(console, planned.to_dict())
    if plot is not None:
        console.print(Text(f"plot: {plot}"), soft_wrap=True)


def _check_recipe_options(context: typer.Context, cost: bool) -> None:
    """Raise a :class:`ConfigError` if the options of a plan for a recipe are not those that have an effect."""
    if not cost:
        raise ConfigError(f"plan has a recipe, {context.params['what']!r}, but no --cost: add --cost, or see its guarantee by ldpfl ledger")
    given = [name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    unfit = [f"--{name.replace('_', '-')}" for name in given if name not in ("what", "cost", "set_", "data_dir", "as_json")]
    if unfit:
        options = " and ".join(unfit)
        raise ConfigError(
            f"{options} cannot be given with a recipe, which has settings instead: leave out {options}, and give --set KEY=VALUE (ldpfl "
            "settings lists the keys)"
        )


def _print_training_cost(what: str, settings: list[str] | None, data_dir: Path | None, as_json: bool) -> None:
    """Print the estimated time and memory of the training of a recipe."""
    with terminal(stderr=True).status("timing a few steps ..."):
        estimated = api.training_cost(what, settings or (), data_dir=data_dir)
    if as_json:
        print(json.dumps(estimated.to_dict(), indent=2))
    else:
        terminal().print(lines_table(f"cost of training {what}, estimated", estimated.lines()))


def _plan_regime(regime: str, target: float, as_json: bool, cost: bool, **arguments: Any) -> None:
    """Print the plan of a training regime that keeps the ``target`` epsilon: its noise, cost and guarantee."""
    with terminal(stderr=True).status("accounting ..."):
        planned = api.plan_regime(regime, target, **arguments)
    costs = api.cost(planned) if cost else None
    if as_json:
        print(json.dumps(planned.to_dict() | ({"cost": costs.to_dict()} if costs else {}), indent=2))
        return
    console = terminal()
    console.print(regime_table(planned.to_dict()))
    if costs is not None:
        console.print(lines_table(f"cost of a round of {costs.clients:,} clients as a sum over two servers", costs.lines()))
    print_guarantees(console, planned.to_dict())
