"""Shows a session, from `GET /sessions/{id}/state`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from turnlog.cli.output import Column, compact, line, shown, table, when
from turnlog.cli.running import failure

STAGES = ("gate", "claim", "prepare", "engine", "validate")
"""The stages of a turn before its commit, in milliseconds."""


def print_session(state: Mapping[str, Any]) -> None:
    last = "" if state["seq"] == state["last_seq"] else f" of {state['last_seq']}"
    line(f"session {state['session_id']}: {state['state']}, at event {state['seq']}{last}", "bold")
    line(f"created {when(state['created_at'])}{_after('closed', when(state['closed_at']))}")
    fork = state.get("fork")
    if fork is not None:
        loss = "its turns are in the loss too" if fork["loss"] else "its turns are context"
        line(f"forked from {fork['session']} after turn {fork['turn']}: {loss}")
    config = {name: value for name, value in state["config"].items() if value is not None}
    if config:
        line(compact(config, 60))
    if state["metadata"]:
        line("metadata: " + compact(state["metadata"], 60))
    if state.get("erased"):
        line("its content was erased; what follows is the log's skeleton")
    _print_reward(state)
    if state["failed"]:
        line(f"failed: {failure(state['failed'])}", "bold")
    if state["engine_errors"] or state["tool_errors"]:
        line(f"errors: {state['engine_errors']} of engines, {state['tool_errors']} of tools")
    if state.get("note"):
        line(f"note: {state['note']}")
    if state.get("tags"):
        line("tags: " + ", ".join(state["tags"]))
    if state["affinity"]:
        line("engine: " + compact({k: v for k, v in state["affinity"].items() if v is not None}, 120))
    for held in state["open_turns"]:
        names = {name: value for name, value in held.items() if name != "opened_at" and value is not None}
        line(f"in flight since {when(held['opened_at'])}: {compact(names, 60)}")
    if state["turns"]:
        line()
        _print_turns(state["turns"])
    if state["failed_turns"]:
        line()
        line("failed turns", "bold")
        _print_failed(state["failed_turns"])
    if state["rollbacks"]:
        line()
        line("rollbacks", "bold")
        columns = [
            Column("event", "seq", right=True),
            Column("at", lambda one: when(one["at"])),
            Column("back to turn", "to_turn", right=True),
            Column("discarded turns", "discarded", long=True),
        ]
        table(columns, state["rollbacks"])


def _after(what: str, moment: str | None) -> str:
    return "" if moment is None else f", {what} {moment}"


def _print_reward(state: Mapping[str, Any]) -> None:
    if state["reward"] is not None:
        line("reward " + _reward(state["reward"]))
    for turn, reward in state["turn_rewards"].items():
        line(f"reward of turn {turn}: {_reward(reward)}")


def _reward(reward: Mapping[str, Any]) -> str:
    parts = f" ({compact(reward['components'], 60)})" if reward["components"] else ""
    return f"{shown(float(reward['reward']))}{parts}"


def _print_turns(turns: list[dict[str, Any]]) -> None:
    """A line per turn. New prompt tokens are shown apart from those that continue the parent."""
    columns = [
        Column("turn", whole=True, right=True),
        Column("after", "parent", right=True),
        Column("state", _state, whole=True),
        Column("prompt", "prompt_tokens", right=True),
        Column("new", "suffix_tokens", right=True),
        Column("output", "output_tokens", right=True),
        Column("finish", "finish_reason"),
        *(Column(f"{name} ms", partial(_stage, name), right=True) for name in STAGES),
        Column("segment", _segment, right=True),
        Column("committed", lambda turn: when(turn["committed_at"])),
        Column("weights", _versions, long=True),
        Column("engine", long=True),
    ]
    table(columns, turns)


def _state(turn: Mapping[str, Any]) -> str:
    return "live" if turn["live"] else f"rolled back by event {shown(turn['discarded_by'])}"


def _stage(name: str, turn: Mapping[str, Any]) -> float | None:
    return (turn["timing"] or {}).get(name)


def _versions(turn: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(span["version"] for span in turn["weight_versions"]))


def _segment(turn: Mapping[str, Any]) -> str:
    return f"{turn['segment']}" + (f" ({turn['segment_cause']})" if turn["segment_cause"] else "")


def _print_failed(failed: list[dict[str, Any]]) -> None:
    columns = [
        Column("turn", right=True),
        Column("fence", right=True),
        Column("opened", lambda one: when(one["opened_at"])),
        Column("seconds", _seconds, right=True),
        Column("kind"),
        Column("reason", whole=True),
        Column("status", right=True),
        Column("detail", long=True),
    ]
    table(columns, failed)


def _seconds(failed: Mapping[str, Any]) -> float | None:
    return None if failed["opened_at"] is None else round(failed["ended_at"] - failed["opened_at"], 3)
