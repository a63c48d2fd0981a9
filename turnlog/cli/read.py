"""`turnlog read`: a session as a person reads it: what was asked, said and called, as it happened."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from turnlog.actions import Call, asked_first, calls_of, field, said_by, text_of
from turnlog.cli import complete
from turnlog.cli.remote import remote
from turnlog.cli.running import Failure, say, wants_json
from turnlog.cli.tail import followed, told
from turnlog.client.address import segment
from turnlog.errors import NotFound

if TYPE_CHECKING:
    from turnlog.client._sync.transport import Transport

MARGIN = 20
"""Width of what stands left of the text."""

FIRST, LAST, WIDE = 5, 2, 400
"""Of a long text: its first and last lines, and the characters of a line."""

INDENT, DEEPEST = 4, 5
"""How far an agent's turns stand to the right of those of the agent that called it, and how often."""

Object = Mapping[str, Any]


def read(
    ctx: typer.Context,
    session: Annotated[str, typer.Argument(help="The session's id.", autocompletion=complete.sessions)],
    turn: Annotated[int | None, typer.Option(min=1, help="Only this turn, with its request's new messages.")] = None,
    tools: Annotated[bool, typer.Option("--tools", help="Show all arguments of calls, and shorten nothing.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow until Ctrl-C, also across restarts of the server.")
    ] = False,
) -> None:
    """Print a session's conversation, with its agents, failures, rollbacks, rewards and annotations."""
    from turnlog.client.lines import EventsPlace

    path, place = f"/sessions/{segment(session)}", EventsPlace(0, follow)
    log = remote(ctx, patience_s=0) if follow else remote(ctx)
    server = remote(ctx, patience_s=math.inf, has_answered=True) if follow else log
    reading = _Reading(_Conversation(server, path, in_pages=turn is None), whole=tools)
    is_there = False
    events = followed(log, f"{path}/events", place) if follow else log.lines(f"{path}/events", place)
    for event in events:
        if turn is None or event.get("turn") == turn:
            is_there = True
            _machine(reading, event) if wants_json(ctx) else reading.print(event)
    if not is_there:
        raise Failure(f"session {session} has no turn {turn}")
    if not wants_json(ctx):
        reading.say_open()


def _machine(reading: _Reading, event: Object) -> None:
    """The event on a line; of a committed turn with its messages."""
    from turnlog.cli.output import machine

    if event["type"] == "TurnCommitted":
        machine({**event, "messages": reading.messages(event["turn"])})
    elif told(event) is not None:
        machine(event)


class _Conversation:
    """What was said, by turn. The turns that led to the newest one are read in pages, any other on its own."""

    def __init__(self, server: Transport, path: str, *, in_pages: bool) -> None:
        self._server = server
        self._path = f"{path}/messages"
        self._has_more = in_pages
        self._cursor: str | None = None
        self._newest = 0
        self._messages: dict[int, list[Object]] = {}

    def of(self, turn: int) -> list[Object]:
        """A turn's own messages, the reply last; none if they are not there."""
        try:
            while self._has_more and self._newest <= turn:  # the next page may go on with this turn
                page = self._page(cursor=self._cursor)
                for one in page["messages"]:
                    self._messages.setdefault(one["turn"], []).append(one)
                    self._newest = one["turn"]
                self._cursor = page["next_cursor"]
                self._has_more = self._cursor is not None
            return self._messages.pop(turn, None) or list(self._alone(turn))
        except NotFound:
            return []

    def _alone(self, turn: int) -> Iterator[Object]:
        cursor = None
        while True:
            page = self._page(turn=turn, cursor=cursor)
            yield from page["messages"]
            cursor = page["next_cursor"]
            if cursor is None:
                return

    def _page(self, **parameters: Any) -> Object:
        return self._server.read("GET", self._path, parameters=parameters)


class _Made(NamedTuple):
    """A call of a turn whose agent is so deep; `alone`: it is the only one of its reply."""

    turn: int
    depth: int
    call: Call
    alone: bool


class _Reading:
    """Prints events one after the other."""

    def __init__(self, conversation: _Conversation, *, whole: bool) -> None:
        self._conversation = conversation
        self._whole = whole
        self._opened: dict[int, float] = {}
        self._last: int | None = None
        self._depths: dict[int, int] = {}
        self._calls: dict[str, _Made] = {}
        self._open: dict[str, None] = {}

    def messages(self, turn: int) -> list[Object]:
        said = self._conversation.of(turn)
        return [{name: one.get(name) for name in ("sampled", "message", "error")} for one in said]

    def print(self, event: Object) -> None:
        match event:
            case {"type": "SessionCreated"}:
                self._print_head(event)
            case {"type": "TurnOpened"}:
                self._opened[event["turn"]] = event["at"]
                self._depths[event["turn"]] = self._depths.get(event["parent"], 0)
            case {"type": "TurnCommitted"}:
                self._print_turn(event)
            case _ if said := told(event):
                is_failure = event["type"] in ("TurnRejected", "TurnAbandoned", "RolledBack", "LimitReached")
                if event["type"] in ("TurnRejected", "TurnAbandoned"):
                    self._opened.pop(event["turn"], None)
                depth = self._depths.get(event.get("turn") or 0, 0)
                _print_block([_clock(event)], [(said, "red" if is_failure else "yellow")], depth=depth)

    def say_open(self) -> None:
        from turnlog.cli.output import since

        for turn, at in self._opened.items():
            say(f"turn {turn} is in flight for {since(at)}")

    def _print_head(self, event: Object) -> None:
        from turnlog.cli.output import compact, line, when

        known = {name: value for name, value in event["config"].items() if name in ("group_id", "attempt")}
        line(" ".join(filter(None, (f"created {when(event['at'])}", compact(known, 100)))), "bold")

    def _print_turn(self, event: Object) -> None:
        turn, parent = event["turn"], event["parent"]
        opened = self._opened.pop(turn, None)
        *brought, reply = self.messages(turn) or [{"message": None, "error": "the message is missing"}]
        depth = self._depths.get(event.get("carries") or parent, 0)
        if event.get("branch_cause") not in (None, "start"):
            caller = self._caller(event, [one["message"] for one in brought])
            depth = depth if caller is None else caller.depth + 1
            _print_block([], [(_begins(event, caller), "yellow")], depth=depth)
        elif self._last not in (None, parent):
            _print_block([], [(f"{_agent(event)}continues after turn {parent}", "yellow")], depth=depth)
        for one in brought:
            self._print_brought(one, depth)
        self._last, self._depths[turn] = turn, depth
        took = "" if opened is None else f" · {_seconds(event['at'] - opened)}"
        margin = [f"turn {turn}{took}", f"{_clock(event)} · {event['output_tokens']} tok"]
        if event.get("agent_id"):
            margin.append(event["agent_id"][: MARGIN - 2])
        text = list(self._reply(reply))
        finish = event.get("finish_reason")
        if finish not in (None, "stop", "tool_calls", "end_turn", "tool_use"):
            text.append((f"[{finish}]", "red"))
        _print_block(margin, text, "bold cyan", depth)
        calls = calls_of(reply["message"])
        for given, call in zip(field(reply["message"], "tool_calls") or (), calls, strict=False):
            key = str(field(given, "id"))
            self._calls[key] = _Made(turn, depth, call, len(calls) == 1)
            self._open[key] = None

    def _caller(self, event: Object, brought: Sequence[object]) -> _Made | None:
        """The call that an agent's first turn comes from: one with its task, else the first agent's newest open one."""
        if event["branch_cause"] == "compaction" or (event["parent"] and event["branch_cause"] != "agent"):
            return None
        task, newest_first = asked_first(brought), [self._calls[key] for key in reversed(self._open)]
        named = next((one for one in newest_first if one.call.hands_on(task)), None)
        if named or event["branch_cause"] != "agent" or not event.get("agent_id"):
            return named
        return next((one for one in newest_first if not one.depth), None)

    def _print_brought(self, one: Object, depth: int) -> None:
        if one["message"] is None:
            _print_block(["?"], [(f"[{one['error']}]", "red")], depth=depth)
            return
        role = str(one["message"].get("role", "?"))
        text = text_of(one["message"].get("content"))
        is_users = role == "user"
        pieces: list[tuple[str, str | None]] = [
            (_shortened(text, self._whole or is_users), None if is_users else "dim")
        ]
        key = str(one["message"].get("tool_call_id"))
        answered = self._calls.get(key)
        self._open.pop(key, None)
        if answered and not (answered.alone and answered.turn == self._last):
            pieces.insert(0, (f"{answered.call.name}: {answered.call.line}", "green"))
        _print_block([role], pieces, depth=depth)

    def _reply(self, one: Object) -> Iterator[tuple[str, str | None]]:
        """The pieces of a reply, and their styles: its reasoning, its text, its calls."""
        if one["message"] is None:
            yield f"[{one['error']}]", "red"
            return
        thought, said = said_by(one["message"])
        if thought:
            beside = _shortened(thought, self._whole).replace("\n", "\n│ ")
            yield f"│ {beside}", "dim italic"  # in a pipe nothing is dim
        if said:
            yield said, None
        for call in calls_of(one["message"]):
            yield _call(call) if self._whole else f"{call.name}: {call.line}", "green"


def _agent(event: Object) -> str:
    return f"{event['agent_id']} " if event.get("agent_id") else ""


def _begins(event: Object, caller: _Made | None) -> str:
    """What a turn says that does not continue its branch."""
    parent, cause = event["parent"], event["branch_cause"]
    if cause == "compaction":
        where = f"continues from a compaction, with the reply of turn {event['carries']}"
    elif caller is not None:
        where = f"begins, called by turn {caller.turn} ({caller.call.name})"
    else:
        where = f"continues after turn {parent}" if parent else "begins a new conversation"
    return f"{_agent(event)}{where}, branch {event.get('branch')} ({cause})"


def _print_block(
    margin: Sequence[str], pieces: Sequence[tuple[str, str | None]], style: str = "bold", depth: int = 0
) -> None:
    """Texts beside a margin, whose first line has the style; as wide as the terminal."""
    from itertools import zip_longest

    from rich.text import Text

    from turnlog.cli.output import UNBOUNDED, console, plain

    out = console()
    indent = INDENT * min(depth, DEEPEST) * " "
    room = max(out.width - MARGIN - len(indent), 20)
    lines: list[Text] = []
    for piece, piece_style in pieces:
        for raw in piece.expandtabs(4).splitlines():
            text = Text(plain(raw), piece_style or "")
            lines += [text] if out.width == UNBOUNDED else text.wrap(out, room)
    for at, (left, text) in enumerate(zip_longest(margin, lines)):
        beside = Text(indent + plain(left or "").ljust(MARGIN if text else 0), style if at == 0 else "dim")
        out.print(beside + text if text else beside, soft_wrap=True)


def _shortened(text: str, whole: bool) -> str:
    """The first and last lines of a long text."""
    lines = text.strip("\n").split("\n")
    if whole:
        return "\n".join(lines)
    lines = [line if len(line) <= WIDE else line[:WIDE] + " …" for line in lines]
    left_out = len(lines) - FIRST - LAST
    if left_out <= 1:
        return "\n".join(lines)
    return "\n".join([*lines[:FIRST], f"… {left_out} lines", *lines[-LAST:]])


def _call(call: Call) -> str:
    """A call with its arguments, the texts among them as they are."""
    given = call.given
    if not isinstance(given, Mapping):
        return f"{call.name}: {text_of(call.arguments)}"
    named = (f"{name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in given.items())
    return "\n".join((f"{call.name}:", *(f"  {line}" for each in named for line in each.split("\n"))))


def _clock(event: Object) -> str:
    from turnlog.cli.output import when

    return (when(event["at"]) or "")[11:]


def _seconds(seconds: float) -> str:
    from turnlog.cli.output import duration

    return f"{seconds:.1f} s" if seconds < 10 else duration(seconds)
