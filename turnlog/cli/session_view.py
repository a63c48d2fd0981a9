"""A session for people, from what `GET /ui/api/sessions/{id}` says of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnlog.cli.output import Column, compact, line, shown, table, when

STAGES = ("gate", "claim", "prepare", "engine", "validate")
"""What a turn's time went to before its commit, in milliseconds."""


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
    if state["affinity"]:
        line("engine: " + compact({k: v for k, v in state["affinity"].items() if v is not None}, 120))
    held = state["open_turn"]
    if held is not None:
        names = {name: value for name, value in held.items() if name != "opened_at" and value is not None}
        line(f"in flight since {when(held['opened_at'])}: {compact(names, 60)}")
    if state["turns"]:
        line()
        _print_turns(state["turns"])
    if state["failed"]:
        line()
        line("failed turns", "bold")
        _print_failed(state["failed"])
    if state["rollbacks"]:
        line()
        line("rollbacks", "bold")
        table(
            [
                Column("event", right=True),
                Column("at"),
                Column("back to turn", right=True),
                Column("discarded turns", long=True),
            ],
            [(one["seq"], when(one["at"]), one["to_turn"], one["discarded"]) for one in state["rollbacks"]],
        )


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
    """A line a turn. Of a prompt's tokens those that are new stand by themselves: the rest was there before."""
    table(
        [
            Column("turn", whole=True, right=True),
            Column("after", right=True),
            Column("state", whole=True),
            Column("prompt", right=True),
            Column("new", right=True),
            Column("output", right=True),
            Column("finish"),
            *(Column(f"{name} ms", right=True) for name in STAGES),
            Column("segment", right=True),
            Column("committed"),
            Column("weights", long=True),
            Column("engine", long=True),
        ],
        [
            (
                turn["turn"],
                turn["parent"],
                "live" if turn["live"] else f"rolled back by event {shown(turn['discarded_by'])}",
                turn["prompt_tokens"],
                turn["suffix_tokens"],
                turn["output_tokens"],
                turn["finish_reason"],
                *((turn["timing"] or {}).get(name) for name in STAGES),
                _segment(turn),
                when(turn["committed_at"]),
                list(dict.fromkeys(span["version"] for span in turn["weight_versions"])),
                turn["engine"],
            )
            for turn in turns
        ],
    )


def _segment(turn: Mapping[str, Any]) -> str:
    return f"{turn['segment']}" + (f" ({turn['segment_cause']})" if turn["segment_cause"] else "")


def _print_failed(failed: list[dict[str, Any]]) -> None:
    table(
        [
            Column("turn", right=True),
            Column("fence", right=True),
            Column("opened"),
            Column("seconds", right=True),
            Column("kind"),
            Column("reason", whole=True),
            Column("status", right=True),
            Column("detail", long=True),
        ],
        [
            (
                one["turn"],
                one["fence"],
                when(one["opened_at"]),
                None if one["opened_at"] is None else round(one["ended_at"] - one["opened_at"], 3),
                one["kind"],
                one["reason"],
                one["status"],
                one["detail"],
            )
            for one in failed
        ],
    )
