"""NeMo Gym's prefix `/ng-rollout/<id>`: the routes that name a session in a header, with the session in the path.

Gym gives each agent a base URL of its own, `<server>/ng-rollout/<rollout id>`, with `/training-token-capture` behind it
where the rollout is trained on, and the SDK adds `/v1/...`. Such a request is served as one to `/v1/...` with the
rollout's id in `x-turnlog-session-id`; the session is made at the first turn. What a harness's own headers say of its
agent holds, and what they say of its session does not.

Source: nemo_gym/base_responses_api_model.py and rollout_correlation.py (nemo-gym 0.7.0).
"""

from __future__ import annotations

import re

from starlette.types import Scope

from app.api.head import route_path
from app.api.header_sessions import in_header

PREFIX = "/ng-rollout/"
_PATH = re.compile(PREFIX + r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:/training-token-capture)?(/v1/.*)", re.DOTALL)


def without_prefix(scope: Scope) -> Scope:
    """The scope of the same request without Gym's prefix; the same scope if it has none."""
    path = route_path(scope)
    if not path.startswith(PREFIX) or (match := _PATH.fullmatch(path)) is None:
        return scope
    rollout_id, rest = match.groups()
    root = scope["path"][: len(scope["path"]) - len(path)]
    return in_header({**scope, "path": root + rest, "raw_path": (root + rest).encode()}, rollout_id)
