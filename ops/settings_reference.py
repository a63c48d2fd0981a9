"""Generates docs/settings.md from the settings and their texts: `python -m ops.settings_reference`.

A unit test says whether the page is current.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from app.settings import PREFIX, Settings, can_be_off
from ops.server import ROOT

FILE = ROOT / "docs" / "settings.md"

INTRODUCTION = """# Settings

Every setting is an environment variable, read once, with a default that works on one machine. [Tuning](tuning.md) says
which to change for your load, and [Operations](operations.md#settings-that-must-be-equal) which must be equal on all
hosts.

- A file can hold them: `turnlog serve --config turnlog.toml` (also `migrate`, `doctor` and the commands that open the
  store), or `TURNLOG_CONFIG=turnlog.toml` for every start, `uvicorn app.main:app` too. Its keys are the names in lower
  case without `TURNLOG_`, such as `upstreams = ["http://engine:30000"]`; lists and tables stand for commas and JSON.
  `--env-file FILE` reads lines of `NAME=value`. A variable takes precedence over both files.
- An empty value counts as not set. Bad values stop the start with one line each.
- A misspelt setting (`…_UPSTREAM`) stops the start, with a line that names the right one. Any other unknown `TURNLOG_…`
  is ignored with a warning.
- Sizes are a number of bytes or have a unit, in upper or lower case: `KiB`, `MiB`, `GiB`, `TiB` count by 1024; `kB`,
  `MB`, `GB`, `TB` by 1000; `64M` is refused. Times are in seconds.
"""

DEFAULTS = {
    "features": "all but `rllm` and `search`",
    "workers": "CPUs, at most 16",
    "on_abort": "`return`; with a tokenizer `continue`",
    "history": "the first turn's choice",
    "session_secret": "the admin tokens",
}
"""Defaults that a value does not tell."""

TEXTS: Mapping[str, Mapping[str, str]] = {
    "Store and service": {
        "database_url": "SQLite, or [`postgresql+asyncpg://…`](operations.md#several-processes-postgresql). "
        "Alembic reads it too",
        "features": "[parts of the service](design.md#features) beside the kernel; or `none`, or `all`, which is "
        "each but `rllm`; `all,rllm` is each. What is left out has no routes, background work and metrics. On SQLite, "
        "[search](search.md) needs FTS5",
        "log_format": "`auto`: JSON unless standard error is a terminal",
        "log_level": "`debug` has a line with the stages of each turn",
        "lease_s": "silence after which a process on PostgreSQL loses its claims",
        "workers": "worker processes that validate large replies, of each API process. A large export has two helper "
        "processes less than this, at most 3",
        "worker_deadline_s": "a worker that takes longer for a reply is killed",
        "worker_memory_bytes": "address space of a worker",
        "inline_max_bytes": "replies of up to this many bytes of ids and logprobs are validated in the API process; "
        "0: none",
        "cache_bytes": "sessions in memory, roughly counted",
    },
    "Engines": {
        "upstreams": "engines' base URLs, separated by commas; a trailing `/v1` is dropped",
        "upstream_dialect": "`auto`: each engine is asked",
        "upstream_api_key": "sent to engines as a bearer token",
        "upstream_connect_timeout_s": "to connect to an engine",
        "upstream_timeout_s": "a whole generation",
        "router_workers": "[addresses](fleet.md#workers-of-a-router), with commas, that a router's list of workers may "
        "name and that are then sent that key",
        "logprobs_mode": "[what the logprobs are of](export.md#what-the-logprobs-are-of) at an engine that does not "
        "say it. `auto`: such rows say `unknown`",
        "text_upstreams": "[upstreams of sessions of text](text.md#upstreams), by name, as JSON",
        "placement": "[where a session without an engine goes](fleet.md#placement-and-affinity)",
        "affinity_ttl_s": "a session unused for this long loses its engine",
        "engine_sessions": "engines on which [`nvext.session_control`](fleet.md#session-control) may open sessions: "
        "base URLs, separated by commas, or `all`",
        "engine_session_ids": "chats tell SGLang their session: "
        "[Session ids at the engine](fleet.md#session-ids-at-the-engine)",
        "on_abort": "default of `on_abort`: [Aborted generations](fleet.md#aborted-generations)",
        "stage_tokens_s": "how often the tokens of a turn in flight are written; 0: never. "
        "[Generations that outlive a crash](fleet.md#generations-that-outlive-a-crash)",
    },
    "Sessions and turns": {
        "history": "default of `history` ([Histories](trees.md#histories))",
        "rollback_window": "default of `rollback_window`",
        "on_divergence": "default of `on_divergence`",
        "agents": "a harness's [agents](trees.md#agents) are branches of its session, or have sessions",
        "without_session": "a request that names no session is 400; `record`: it gets "
        "[its own session](api.md#sessions-in-headers)",
        "session_from_body": "body fields that may [name the session](api.md#sessions-in-headers), in this order",
        "max_open_turns": "turns in flight of one tree; past it: 409 `session_busy`",
        "max_turns": "turns of one session; past it: 409 `too_many_turns`",
        "limits": "default of [`limits`](budgets.md), as JSON: "
        '`{"turns": 50, "tokens": 100000, "context": 32768, "seconds": 1800}`',
        "on_disconnect": "the turn of a client that left goes on and commits; or `abort_after:<seconds>`",
        "stream_keepalive_s": "how often a waiting stream gets a comment; 0: never",
        "client_reply": "without what Turnlog [asked for and the client did not](api.md#a-turn); or `verbatim`",
        "tokenizer": "a folder or hub name: Turnlog builds prompts as token ids ([Token-in, token-out](tito.md))",
        "tito_family": "or a [family](tito.md#models), whose template arguments are then pinned",
        "samples_versions": "weight versions in [`/samples`](api.md#samples)",
        "picker": "a dotted path of the operator's own [picker of branches](trees.md#rows)",
    },
    "Replay payloads": {
        "replay": "[replay payloads](api.md#replay-payloads) to ask engines for",
        "replay_incremental": "ask for new rows only",
        "moe_layers": "the shape of a row of `routed_experts`, with the next: set both, or neither",
        "moe_topk": "as above",
        "max_replay_bytes": "replay payloads of one session; past it the longest idle leaves' are tombstoned",
        "payloads": "where large replay payloads go: `database`, `s3://bucket/prefix`, `gs://bucket/prefix`, "
        "`az://container/prefix` or `file:///folder` ([Payloads in object storage](payloads.md))",
        "payloads_timeout_s": "how long a turn waits for object storage before it ends with 503 `payloads_unavailable`",
        "payloads_keep_s": "how long an object that nothing refers to stays: at least the age of the backups that "
        "you may restore",
    },
    "Limits of bodies": {
        "max_request_bytes": "of a request's body",
        "max_upstream_bytes": "of an engine's reply",
        "inflight_bytes": "all bodies in flight, requests' and replies' ([shares](security.md#how-it-works)). A body "
        "up to 64 KiB is never refused for a share",
    },
    "Retention": {
        "idle_close_s": "open sessions unchanged for this long are closed (`SessionClosed`, reason `idle`), a root "
        "only with its rollout; none while a gate is shut, and for a minute after",
        "closed_replay_ttl_s": "replay payloads and refused replies of a session closed for this long are freed; 0: at "
        "once",
        "closed_ttl_s": "sessions closed for this long are erased",
        "retain_until_ack": "the janitor frees nothing of a session whose group has not been acknowledged in the "
        "training feed",
        "max_db_bytes": "no new sessions (507) while the database is larger; checked about every two seconds",
    },
    "Access": {
        "public_url": "what a session's `url` begins with; by default the request's address",
        "admin_token": "the bearer token that every request then requires; several with commas, the first is current: "
        "[Rotation](security.md#rotation)",
        "session_secret": "the secret behind sessions' own tokens; several with commas",
        "session_rewards": "`refuse`: a session's own token sets no reward and erases nothing "
        "([Rewards](security.md#rewards)); no effect without an admin token",
        "session_params": "more [request fields](security.md#who-is-served) that a session's token may use, with "
        "commas: `chat_template`, `extra_args`, `logits_processors`, `priority`, `prompt_embeds`, `vllm_xargs`",
        "max_agent_sessions": "sessions below a rollout's root that a session's token may create by naming agents; "
        "several processes may each create one too many",
        "file_root": "the folder below which a `file:///…` that a request names must lie, after symbolic links "
        "([archives](guides/archives.md)); without one such requests are 400",
        "trusted_networks": "without an admin token: networks beside loopback whose clients are served, such as "
        "`10.0.0.0/8`, with commas",
    },
    "Webhooks": {
        "webhooks": "addresses, with commas, that get a POST for a stuck session, a complete group and a dead engine: "
        "[Webhooks](webhooks.md). None: no webhooks",
        "webhook_secret": "the secret that signs them, `whsec_…`; several with commas: each signs",
        "webhook_stuck_s": "how long a turn is in flight, or an open session without an event, before it is stuck",
        "webhook_networks": "networks beside public addresses that an address's host name may lead to, such as "
        "`10.0.0.0/8`, with commas",
    },
}
"""What each setting does, in the page's order; links are those of a page in docs/. What `app.settings` says is not
repeated here."""


def generate() -> str:
    parts = [INTRODUCTION]
    for group, texts in TEXTS.items():
        rows = [_row(name, text) for name, text in texts.items()]
        head = "| variable | default | accepted | |\n|---|---|---|---|"
        parts.append("\n".join((f"\n## {group}\n", head, *rows, "")))
    return "".join(parts)


def _row(name: str, text: str) -> str:
    field = Settings.model_fields[name]
    default = DEFAULTS.get(name) or _default(name, field)
    return f"| `{PREFIX}{name.upper()}` | {default} | {_accepted(name, field)} | {text} |"


def _default(name: str, field: FieldInfo) -> str:
    value = field.default
    if value is None or value == ():
        return "`off`" if can_be_off(field) and not name.startswith("moe_") else "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if name.endswith("_bytes"):
        return _size(value)
    return f"`{value}`" if isinstance(value, str) else f"{value:,}"


def _accepted(name: str, field: FieldInfo) -> str:
    words = [f"`{one}`" for one in _literals(field.annotation)]
    if field.annotation is bool:
        words = ["`true`", "`false`"]
    if get_origin(field.annotation) is tuple and words:
        words.append("several with commas")
    bounds = {key: getattr(one, key) for one in field.metadata for key in ("gt", "ge", "le") if hasattr(one, key)}
    if bounds:
        words.append(_range(bounds, is_size=name.endswith("_bytes")))
    if can_be_off(field):
        words.append("`off`")
    return ", ".join(words)


def _range(bounds: Mapping[str, int], is_size: bool) -> str:
    """Of a number that is over `gt` or at least `ge`, and at most `le`."""
    high = f"{bounds['le']:,}" if "le" in bounds else None
    if "gt" in bounds:
        return f"over {bounds['gt']}" if high is None else f"over {bounds['gt']}, at most {high}"
    least = _size(bounds["ge"]) if is_size else f"{bounds['ge']:,}"
    return f"from {least}" if high is None else f"{least} to {high}"


def _literals(annotation: Any) -> Iterator[str]:
    """The words that an annotation accepts."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for one in get_args(annotation):
            yield from _literals(one)


def _size(count: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count and count % unit == 0:
            return f"{count // unit} {name}"
    return str(count)


if __name__ == "__main__":
    FILE.write_text(generate())
