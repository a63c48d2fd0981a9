"""What a release may say otherwise of the store of an earlier one, and why. Nothing else may change."""

from __future__ import annotations

import json
from typing import Any

from compat.compare import MISSING, Allowed, added

EXPORT = r"GET /export(\?.*)?"


def is_stripped(before: Any, after: Any) -> bool:
    """Components are there no more, and the event says so."""
    return after == MISSING or (before == MISSING and after is True)


def is_given(before: Any, after: Any) -> bool:
    """Rows that were refused for want of a shape are there, and nothing says any more why they are not."""
    return before in (None, MISSING) or (after == MISSING and before in REFUSED)


def is_truncated(before: Any, after: Any) -> bool:
    return bool(before == "completed" and after == "truncated")


def is_longer_json(before: Any, after: Any) -> bool:
    """A JSON text that has the other's fields, and more."""
    return before != MISSING and after != MISSING and _holds(json.loads(after), json.loads(before))


def _holds(whole: Any, part: Any) -> bool:
    if not isinstance(part, dict):
        return bool(whole == part)
    return all(name in whole and _holds(whole[name], value) for name, value in part.items())


REFUSED = ("rows have 1 dimensions, layers and k are needed", "rollout_routed_experts", "rollout_indexer_topk")

ANSWERS_WITH_ROWS = r"(GET /export|POST /sessions/(flat|shaped)-).*"
REPLAYED = r"rollout_(routed_experts|indexer_topk)"

ROWS = r"(GET /export|POST /sessions/[^/]+/samples).*"
ROLLOUTS = (
    Allowed(
        "a row names its rollout, and says how many rows that has",
        ROWS,
        r"(.*/)?(rollout_(id|rows|weight)|rollout_(ids|weights|advantages)(/.*)?|reward_extra_info)",
        added,
    ),
    Allowed(
        "so JSON texts are longer", r"GET /export.*format=parquet.*", r".*/(metadata|extra_fields)", is_longer_json
    ),
    Allowed(
        "so its tensors stand in another order", r"(POST .*/samples|GET /export.*format=safetensors).*", r".*\(order\)"
    ),
)

LEASE = Allowed("a lease begins when the group is asked for", r"GET /export/groups\?.*", r".*/lease_until")

TREE = (
    Allowed(
        "a row names its branch",
        r"GET /export.*",
        r"(.*/)?(branch|branch_cause|parent_branch|fork_turn|agent_id)",
        added,
    ),
    Allowed("which stands before the tensors", r"GET /export\?.*format=safetensors.*", r"[^/]*/\(order\)"),
    Allowed(
        "the number of a turn that did not commit was given to the next one",
        r"GET /sessions/[^/?]+/events",
        r"\d+/is_provisional",
        lambda before, after: before == MISSING and after is True,
    ),
)

PROTOCOLS = (Allowed("a record names its turn's protocol", r"GET /sessions/[^/?]+", r"0/records/\d+/protocol", added),)

STREAMS = (
    Allowed("a session says how it streams", r"GET /sessions/[^/?]+", r"0/session/stream_mode", added),
    Allowed("which stands beside on_abort", r"GET /sessions/[^/?]+", r"0/session/\(order\)"),
)

SAMPLES = Allowed(
    "a sample has what later drivers of miles read",
    r"POST /sessions/[^/]+/samples.*",
    r"_samples_meta/samples/\d+/(reward|spec_info)",
    added,
)
PINNED = Allowed("a row says what its session's creator pinned", r"GET /export.*", r"(.*/)?pinned", added)
URLS = Allowed("a row has room for URLs", r"GET /export.*format=parquet.*", r"(.*/)?replay_urls", added)
SAMPLING = Allowed("a row says what its logprobs are of", ROWS, r"(.*/)?sampling(/.*)?", added)

PINNING = Allowed(
    "as its session does",
    r"GET /sessions/[^/?]+",
    r"0/session/(params|model|params_mode|evaluation)",
    added,
)

NOTES = (
    Allowed("a row has its session's note and tags", r"GET /export.*", r"(.*/)?(note|tags)", added),
    Allowed("as its session does", r"GET /sessions(\?.*|/[^/?]+)?", r"0/(sessions/\d+|session)/(note|tags)", added),
)

LISTED = Allowed(
    "a session in the list says what the page and the command line ask for",
    r"GET /sessions(\?.*)?",
    r"0/sessions/\d+/(state|attempt|weight_version|staleness|engine|claimed_since|closed_at)",
    added,
)

SINCE_D7078C7 = (
    LEASE,
    LISTED,
    *NOTES,
    *ROLLOUTS,
    *TREE,
    *PROTOCOLS,
    SAMPLING,
    PINNED,
    URLS,
    SAMPLES,
    Allowed(
        "GET /sessions/{id} gives back what the session was given at its creation",
        r"GET /sessions/[^/?]+",
        r"0/session",
        added,
    ),
    Allowed(
        "an erasure takes the components of rewards, those of earlier releases too",
        r"GET /sessions/(erased|acked-1)/events",
        r"\d+/(components|components_erased)",
        is_stripped,
    ),
    Allowed(
        "a row is truncated where any of its turns is",
        EXPORT,
        r"([^/]*/)(metadata/turnlog/|extra_fields/|extra/)?status",
        is_truncated,
    ),
    Allowed("so it passes the filter", r"GET /export\?status=truncated", r"length-first,0|\(order\)"),
    Allowed(
        "the rows of a session's agents count as its rollout's",
        r"GET /export\?.*shape=(miles|slime).*",
        r"\d+/rollout_id",
        lambda before, after: isinstance(before, int) and isinstance(after, int),
    ),
    Allowed("a group's rollout says whether it is finished", r"GET /groups/.*", r"0/attempts/\d+/finished", added),
    Allowed(
        "payloads of which no inner shape is known have flat rows",
        ANSWERS_WITH_ROWS,
        rf"(.*/)?({REPLAYED}(\.\d+)?|nulls/\d+|(routed_experts|indexer_topk)_missing)",
        is_given,
    ),
)

ALLOWED = {
    "d7078c7": SINCE_D7078C7,
    "3970f0b": (
        LEASE,
        LISTED,
        *NOTES,
        *ROLLOUTS,
        *TREE,
        *PROTOCOLS,
        *STREAMS,
        SAMPLING,
        PINNED,
        URLS,
        SAMPLES,
        PINNING,
    ),
}
"""By the release that wrote the store."""
