"""Commands of the relay's operator."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ldpfl.api import operators
from ldpfl.cli.commands import Group
from ldpfl.report.console import print_json
from ldpfl.util.number_format import counted

STORE_VARIABLE = "LDPFL_RELAY_STORE"
TOKEN_HELP = "Tokens of clients and aggregators."

app = typer.Typer(cls=Group, no_args_is_help=True, help="Run the relay, which mixes sealed reports so that nobody sees who sent what.")
token_app = typer.Typer(cls=Group, no_args_is_help=True, help=TOKEN_HELP)
app.add_typer(token_app, name="token")

StoreOption = Annotated[
    str,
    typer.Option("--store", envvar=STORE_VARIABLE, show_envvar=True, help="SQLite file, or postgresql://user@host/database."),
]

SigningKeyOption = Annotated[
    str | None,
    typer.Option("--signing-key", metavar="LINE", help="For sums: what ldpfl deploy node-key printed on the client's node."),
]


@app.command("serve")
def serve_command(
    store: StoreOption,
    host: Annotated[str, typer.Option(help="Address to listen on; other machines need TLS.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 lets the system choose.")] = 8473,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key of the certificate, PEM.")] = None,
    connections_per_address: Annotated[
        int, typer.Option(min=0, help="Connections at once from one address; 0 is no bound, for a relay behind a proxy.")
    ] = 100,
) -> None:
    """Serve the relay until it is stopped; several may share one PostgreSQL store."""
    operators.serve_relay(store, host, port, tls_cert=tls_cert, tls_key=tls_key, connections_per_address=connections_per_address)


@token_app.command()
def add(
    name: Annotated[str, typer.Argument(help="Who the token is for.")],
    store: StoreOption,
    role: Annotated[str, typer.Option(help="client or aggregator.")],
    signing_key: SigningKeyOption = None,
) -> None:
    """Make a token and print it: the only time that it can be read."""
    print(operators.add_token(store, name, role, signing_key))


@token_app.command("list")
def list_command(store: StoreOption) -> None:
    """List the tokens: role, name, and the 16 digits by which messages name a client's signing key for sums."""
    for token in operators.list_tokens(store):
        signs = "" if token.signs_as is None else f"  signs as {token.signs_as}"
        print(f"{token.role:<10}  {token.name}{signs}{'  (older token)' if token.older else ''}")


@token_app.command()
def renew(
    name: Annotated[str, typer.Argument(help="Who the token is for.")],
    store: StoreOption,
    signing_key: SigningKeyOption = None,
) -> None:
    """Make a second token for somebody who has one, and print it. The first works until "revoke NAME --older"; both are one client.

    The second token has the first one's signing key, unless another one is given.
    """
    print(operators.renew_token(store, name, signing_key))


@token_app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="Whose token.")],
    store: StoreOption,
    older: Annotated[bool, typer.Option("--older", help="Only the older one of two, after renew.")] = False,
) -> None:
    """Revoke a token: it stops working with the next request."""
    operators.revoke_token(store, name, older=older)


@app.command("rounds")
def rounds_command(
    store: StoreOption,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the rounds that the relay holds: state, uploads so far, age, deadline. Names no client."""
    rounds = operators.list_rounds(store)
    if as_json:
        print_json([asdict(listed) for listed in rounds])
        return
    for held in rounds:
        due = f"deadline in {held.seconds_left:,.0f} s" if held.seconds_left > 0 else f"deadline {-held.seconds_left:,.0f} s ago"
        incomplete = f", {held.incomplete:,} incomplete" if held.incomplete else ""
        uploads = f"{counted(held.uploads, 'upload')}{incomplete} (waits for {held.min_clients:,}, takes {held.max_uploads:,})"
        print(f"{held.run} {held.round}: {held.state}, {uploads}, {held.age_s:,.0f} s old, {due}, opened by {held.aggregator}")
    if not rounds:
        print("the relay holds no round: each was acknowledged or cancelled, or none was opened")


@app.command("cancel")
def cancel_command(
    run: Annotated[str, typer.Argument(help="Name of the run, as ldpfl relay rounds shows it.")],
    round_: Annotated[int, typer.Argument(metavar="ROUND", min=1, help="Number of the round.")],
    store: StoreOption,
) -> None:
    """End a round and delete what the relay holds of it. What clients were charged for it stays charged, and its reports are lost."""
    ended = operators.cancel_round(store, run, round_)
    print(f"round {round_} of {run} {'is cancelled, and its uploads are deleted' if ended else 'was deleted before'}")
