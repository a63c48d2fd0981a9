"""Common to all commands: the shared options, output for people or programs, and failures."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from turnlog.client.address import DEFAULT
from turnlog.errors import TurnlogError, Unauthorized
from turnlog.server_code import put_on_path

TOKEN_HINT = "set TURNLOG_TOKEN, or give --token"

INTERRUPTED = 130
"""The exit code after Ctrl-C."""


class Failure(Exception):
    """Ends the command with this exit code and a line on standard error, plus the lines of `more`."""

    def __init__(self, message: str, code: int = 1, more: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.lines = (message, *more)


class UsageError(Failure):
    """Options that do not fit together."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 2)


class Commands(TyperGroup):
    """Turn a command's exceptions into a line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except Failure as error:
            for line in error.lines:
                say(line)
            raise typer.Exit(error.code) from None
        except TurnlogError as error:
            say(f"{error}; {TOKEN_HINT}" if isinstance(error, Unauthorized) else str(error))
            raise typer.Exit(1) from None
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise
        except BrokenPipeError:
            _drop_output()
            raise typer.Exit(1) from None
        return result


class ServerCommand(TyperCommand):
    """Runs the server's code in this process."""

    def invoke(self, ctx: Any) -> Any:
        put_on_path()
        from app.extras import missing_packages

        if absent := missing_packages("server"):
            raise Failure(f"{ctx.command_path} needs the extra turnlog[server]; missing: {', '.join(absent)}")
        return super().invoke(ctx)


def say(line: str) -> None:
    """A line for people on standard error, never part of the command's output."""
    from turnlog.cli.output import plain

    print(f"turnlog: {plain(line)}", file=sys.stderr, flush=True)


def _drop_output() -> None:
    """The reader of our output has closed it; the interpreter must not complain when it flushes the rest."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Remote(NamedTuple):
    """The options of a command that calls a server; its context's `obj`."""

    url: str
    token: str | None
    as_json: bool


Url = Annotated[str, typer.Option("--url", envvar="TURNLOG_URL", help="The server.")]
Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar=["TURNLOG_TOKEN", "TURNLOG_ADMIN_TOKEN"],
        show_default=False,
        help="Sent as a bearer token. Better in the environment: other users see a command's arguments.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output, and nothing else.")]
DatabaseUrl = Annotated[
    str | None, typer.Option("--database-url", help="The store; default: TURNLOG_DATABASE_URL, as the server reads it.")
]


def _use_config(path: Path | None) -> Path | None:
    """Every process of this command reads it (`app/settings.py`)."""
    if path is not None:
        os.environ["TURNLOG_CONFIG"] = str(path.absolute())
    return path


def _use_env_file(path: Path | None) -> Path | None:
    """Set its variables but those that are set. Raises Failure; no value is in its message."""
    if path is None:
        return None
    try:
        from dotenv.parser import parse_stream

        with path.open(encoding="utf-8") as file:
            bindings = list(parse_stream(file))
    except ModuleNotFoundError:
        raise Failure("--env-file needs the extra turnlog[server]") from None
    except OSError as error:
        raise UsageError(f"--env-file {path}: {error.strerror}") from None
    for binding in bindings:
        if binding.error or (binding.key is not None and binding.value is None):
            raise UsageError(f"{path}:{binding.original.line}: not NAME=value")
        if binding.key is not None:
            os.environ.setdefault(binding.key, binding.value or "")
    return path


def _with_options(run: Callable[..., None], *of: Callable[..., None]) -> Callable[..., None]:
    """`run`, which takes the parameters of these functions, one after the other."""
    taken = [one for each in of for one in inspect.signature(each, eval_str=True).parameters.values()]
    run.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    return run


def settings_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command that reads the server's settings: adds --config and --env-file to its options.

    They are eager: what they set is also the default of the command's other options.
    """

    @functools.wraps(command)
    def run(*, config: Path | None, env_file: Path | None, **given: Any) -> None:
        command(**given)

    def common(
        config: Annotated[
            Path | None,
            typer.Option(is_eager=True, callback=_use_config, help="A TOML file of settings (docs/settings.md)."),
        ] = None,
        env_file: Annotated[
            Path | None, typer.Option(is_eager=True, callback=_use_env_file, help="A file of variables, as NAME=value.")
        ] = None,
    ) -> None: ...

    return _with_options(run, command, common)


def current(token: str | None) -> str | None:
    """The server's variable may hold several tokens, the current one first."""
    return (token or "").split(",")[0].strip() or None


def wants_json(ctx: typer.Context) -> bool:
    return bool(ctx.obj.as_json)


def server_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command that calls a server: adds --url, --token and --json to its options."""

    @functools.wraps(command)
    def run(ctx: typer.Context, *, url: str, token: str | None, as_json: bool, **given: Any) -> None:
        ctx.obj = Remote(url, current(token), as_json)
        command(ctx, **given)

    def common(url: Url = DEFAULT, token: Token = None, as_json: Json = False) -> None: ...

    return _with_options(run, command, common)


def failure(failed: Mapping[str, Any]) -> str:
    """A rollout's failure in a line."""
    return ": ".join(filter(None, (failed["kind"], failed.get("message"))))


def say_if_none(records: Sequence[object], noun: str) -> None:
    if not records:
        say(f"no {noun} matches")


def printed_as_json(ctx: typer.Context, value: object) -> bool:
    """Print `value` as JSON if --json was given; returns whether it did."""
    if not wants_json(ctx):
        return False
    from turnlog.cli.output import machine

    machine(value)
    return True
