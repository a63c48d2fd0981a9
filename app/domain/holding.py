"""What a request may ask for that came with a session's own token: nothing that is another session's."""

from __future__ import annotations

import msgspec

from app.domain.request import ChatRequest, CompletionRequest
from app.errors import Forbidden

SESSION_PARAMS, ENGINE_SESSION = "session_params", "session_id"
"""Of SGLang's requests: an engine's own session to go on with, whose context the reply would tell."""

TRUSTED_ALONE = frozenset(
    {SESSION_PARAMS, "bootstrap_host", "bootstrap_port", "custom_logit_processor", "kv_transfer_params"}
)
"""Fields that have an engine join another context, connect to where they say, or run what they hold (SGLang, vLLM)."""


def require_own(request: ChatRequest | CompletionRequest, session_id: str, holder: str) -> None:
    """`session_id` is the turn's session, `holder` that of the token: the same, or one above it. Raises Forbidden."""
    own = (session_id, holder)
    if request.control is not None and request.control.session_id not in own:
        raise Forbidden("nvext.session_control: a session's token may name that session alone")
    for name in sorted(TRUSTED_ALONE & request.params.keys()):
        if bytes(request.params[name]) != b"null":
            raise Forbidden(f"{name}: not with a session's token, but with the admin's")
    engine_session = request.params.get(ENGINE_SESSION)
    if engine_session is not None and bytes(engine_session) not in (b"null", *map(msgspec.json.encode, own)):
        raise Forbidden(f"{ENGINE_SESSION}: a session's token may name that session alone")
