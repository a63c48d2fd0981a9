"""Keeps a run of schemathesis going: what it asks for must neither last for ever nor stop the turns after it.

It runs in schemathesis' own process, which finds server, engine and token in its environment.
"""

from __future__ import annotations

import os
from typing import Any

import httpx
import schemathesis

SERVER, ENGINE = os.environ["TURNLOG_URL"], os.environ["TURNLOG_ENGINE"]
HEADERS = {"authorization": f"Bearer {os.environ['TURNLOG_TOKEN']}"}

SHORT_S = 0.01
YES = frozenset({"true", "1", "on", "yes", "y", "t"})


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    path, body = case.operation.path, case.body
    if path.endswith("/events") and str((case.query or {}).get("follow")).lower() in YES:
        case.query["follow"] = "false"
    if path.endswith("/pause") and isinstance(body, dict) and _is_number(body.get("lease_s", 600.0)):
        body["lease_s"] = min(body.get("lease_s", SHORT_S), SHORT_S)
    if path.endswith("wait_lora_unpaused") and isinstance(body, dict) and _is_number(body.get("timeout_s", 60.0)):
        body["timeout_s"] = min(body.get("timeout_s", SHORT_S), SHORT_S)


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    """Undo what would hold up or turn away the turns of later cases."""
    if response.status_code >= 300 and response.status_code != 502:
        return
    path, method = case.operation.path, case.operation.method.upper()
    if path == "/fleet/pause":
        _call("POST", "/fleet/resume")
    elif path == "/skyrl/v1/abort_lora_requests":
        _call("POST", "/skyrl/v1/resume_lora_requests", {"lora_name": case.body["lora_name"]})
    elif path.startswith("/adapters/") and path.endswith("/pause"):
        _call("POST", response.request.url.removeprefix(SERVER).removesuffix("pause") + "resume")
    elif path == "/engines" and method != "GET":
        for engine in httpx.get(SERVER + "/engines", headers=HEADERS).json()["engines"]:
            if engine["url"] != ENGINE:
                _call("DELETE", "/engines", {"url": engine["url"]})
        _call("POST", "/engines", {"url": ENGINE})


def _is_number(value: object) -> bool:
    """One that is right as it is: what is wrong must stay so."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 86_400


def _call(method: str, path: str, body: dict[str, Any] | None = None) -> None:
    reply = httpx.request(method, SERVER + path, json=body or {}, headers=HEADERS, timeout=30)
    assert reply.status_code < 300 or reply.status_code == 502, (method, path, reply.status_code)
