"""`turnlog engines`, `pause` and `resume`: commands for the fleet."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from turnlog.amounts import amount
from turnlog.cli import complete
from turnlog.cli.remote import remote
from turnlog.cli.running import UsageError, printed_as_json, server_options
from turnlog.client.address import below_run, segment
from turnlog.errors import TurnlogError


class Mode(StrEnum):
    ABORT = "abort"
    IN_PLACE = "in_place"
    RETRACT = "retract"


engines_app = typer.Typer(help="List, add, drain and remove engines.", no_args_is_help=True)

Engine = Annotated[str, typer.Argument(help="The engine's base URL, as in TURNLOG_UPSTREAMS.")]
Adapter = Annotated[str | None, typer.Argument(help="The adapter's name; or --fleet.")]
Run = Annotated[str | None, typer.Option("--run", help="Only for this run.", autocompletion=complete.runs)]
Fleet = Annotated[bool, typer.Option("--fleet", help="The gate of all turns, and every engine.")]


@engines_app.command("list")
@server_options
def list_engines(ctx: typer.Context, run: Run = None) -> None:
    """List the engines, or those that serve a run, with their health as seen by the answering process."""
    found = remote(ctx).read("GET", "/engines", parameters={} if run is None else {"run": run})
    if not printed_as_json(ctx, found):
        _print_engines(found["engines"])


@engines_app.command()
@server_options
def add(
    ctx: typer.Context,
    engine: Engine,
    run: Annotated[
        str | None, typer.Option("--run", help="The engine serves only this run.", autocompletion=complete.runs)
    ] = None,
) -> None:
    """Add an engine, or bring back one that was drained or removed."""
    _put(ctx, engine, "serving", run)


@engines_app.command()
@server_options
def drain(ctx: typer.Context, engine: Engine) -> None:
    """Send no more sessions to an engine; turns in flight end there."""
    _put(ctx, engine, "draining")


@engines_app.command()
@server_options
def remove(ctx: typer.Context, engine: Engine) -> None:
    """Take an engine out of the pool; turns in flight end there."""
    remote(ctx).call("DELETE", "/engines", parameters={"url": engine})
    printed_as_json(ctx, {"url": engine, "state": "removed"})


def _put(ctx: typer.Context, engine: str, state: str, run: str | None = None) -> None:
    of_run = {} if run is None else {"run": run}
    found = remote(ctx).read("POST", "/engines", body={"url": engine, "state": state, **of_run})
    if not printed_as_json(ctx, found):
        _print_engines([found])


def _print_engines(engines: list[dict[str, Any]]) -> None:
    from turnlog.cli.output import Column, since, table

    columns = [
        Column("engine", "url", whole=True),
        Column("run"),
        Column("state"),
        Column("health"),
        Column("for", lambda one: since(one["since"]), right=True),
        Column("in flight", "in_flight", right=True),
        Column("dialect"),
        Column("weights", "weight_version"),
        Column("from", "source"),
        Column("last error", "last_error", long=True),
    ]
    table(columns, engines)


def pause(
    ctx: typer.Context,
    adapter: Adapter = None,
    fleet: Fleet = False,
    run: Run = None,
    lease_s: Annotated[float | None, typer.Option(min=0, help="Seconds until the gate opens by itself (600).")] = None,
    mode: Annotated[Mode | None, typer.Option(help="With --fleet: how engines pause (abort).")] = None,
) -> None:
    """Hold an adapter's turns, or with --fleet all turns, and abort running generations."""
    wish = {"lease_s": lease_s, "mode": mode}
    if mode is not None and not fleet:
        raise UsageError("--mode needs --fleet")
    _order(ctx, "pause", adapter, fleet, run, wish)


def resume(
    ctx: typer.Context,
    adapter: Adapter = None,
    fleet: Fleet = False,
    run: Run = None,
    version: Annotated[str | None, typer.Option(help="The new weight version.")] = None,
) -> None:
    """Let an adapter's turns proceed, or with --fleet all turns."""
    _order(ctx, "resume", adapter, fleet, run, {"version": version})


def _order(
    ctx: typer.Context, verb: str, adapter: str | None, fleet: bool, run: str | None, wish: Mapping[str, object]
) -> None:
    """Print the gate's state and each engine's answer; exit code 1 if an engine failed."""
    if fleet == (adapter is not None):
        raise UsageError("name an adapter, or --fleet")
    where = below_run(run, "/fleet" if fleet else f"/adapters/{segment(adapter or '')}")
    body = {name: value for name, value in wish.items() if value is not None}
    failure: TurnlogError | None = None
    state: Mapping[str, Any]
    try:
        state = remote(ctx).read("POST", f"{where}/{verb}", body=body, slow=True)
    except TurnlogError as error:
        if "engines" not in error.body:
            raise
        failure, state = error, error.body
    if not printed_as_json(ctx, {name: value for name, value in state.items() if name != "error"}):
        what = "the fleet" if fleet else f"adapter {adapter}"
        _print_gate(what if run is None else f"{what} of run {run}", state)
    if failure is not None:
        raise failure


def _print_gate(what: str, state: Mapping[str, Any]) -> None:
    from turnlog.cli.output import Column, duration, line, table

    left = state["lease_left_s"]
    lease = f", opens by itself in {duration(left)}" if state["paused"] and left is not None else ""
    line(f"{what}: {'paused' if state['paused'] else 'open'}{lease}", "bold")
    aborted = f", {amount(state['count'], 'generation')} aborted" if "count" in state else ""
    line(f"{amount(state['held'], 'turn')} held in this process, {state['in_flight']} in flight{aborted}")
    told = state.get("engines")
    if told:
        columns = [
            Column("engine", whole=True),
            Column("done", "ok"),
            Column("aborted", right=True),
            Column("error", long=True),
        ]
        table(columns, [{"engine": engine, **one} for engine, one in told.items()])
