"""Conversations as files that the viewer of agent traces on Hugging Face's hub reads.

The layout is its Session Trace Simple Format: https://huggingface.co/docs/hub/session-traces-format. A file is a line
for the session, then a line for each message.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from turnlog.rows import Row

HARNESS = "turnlog"

ROLES = {"developer": "system", "function": "tool"}
"""Roles that the format does not know."""


def write_traces(folder: str | Path, rows: Iterable[Row]) -> list[Path]:
    """Write a file for each row of the shape `turnlog`, and make the folder. Returns the files.

    A file's name is the session's id, with segment and branch. Images and other parts without text are left out. Files
    of these names are replaced. The files hold prompts, tools' output and whatever else was said: read them before you
    publish them.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for row in rows:
        name = f"{row['session_id']}-{row['segment']}-{row['branch']}"
        header = {
            "type": "session",
            "harness": HARNESS,
            "id": name,
            "name": f"{row['group_id'] or row['session_id']}: reward {row['reward']}",
            **{field: row[field] for field in ("session_id", "group_id", "reward", "status", "metadata")},
        }
        lines = [header, *({"type": "message", "message": _message(one)} for one in row["messages"])]
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
        files.append(file)
    return files


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    role = message["role"]
    written = {"role": ROLES.get(role, role), "content": _text(message.get("content"))}
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        written["reasoningContent"] = reasoning
    if calls := message.get("tool_calls"):
        written["toolCalls"] = [{"id": call.get("id"), "function": _function(call["function"])} for call in calls]
    if call_id := message.get("tool_call_id"):
        written["toolCallId"] = call_id
    return written


def _function(function: Mapping[str, Any]) -> dict[str, Any]:
    """Its arguments are a JSON text in the format; a chat template may have had them as an object."""
    given = function.get("arguments", {})
    return {"name": function["name"], "arguments": given if isinstance(given, str) else json.dumps(given)}


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if isinstance(part.get("text"), str))
    return content or ""
