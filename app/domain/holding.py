"""What a request with a session's token may ask for: nothing of another session."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from app.domain.request import ChatRequest, CompletionRequest
from app.errors import Forbidden

SESSION_PARAMS, ENGINE_SESSION = "session_params", "session_id"
"""Fields of SGLang's requests that continue one of the engine's own sessions, whose context the reply would reveal."""

TRUSTED_ALONE = frozenset(
    {SESSION_PARAMS, "bootstrap_host", "bootstrap_port", "custom_logit_processor", "kv_transfer_params"}
)
"""Fields that let an engine join another context, connect to a given host, or run given code (SGLang, vLLM)."""

SETTABLE = frozenset({"chat_template", "extra_args", "logits_processors", "priority", "prompt_embeds", "vllm_xargs"})
"""Fields that let an engine run a chosen template or plug-in, load tensors, or change priority. An operator may allow
them (`TURNLOG_SESSION_PARAMS`)."""


def require_own(
    request: ChatRequest | CompletionRequest, session_id: str, token_session: str, allowed: Collection[str] = ()
) -> None:
    """`session_id` is the turn's session, `token_session` the token's: the same or an ancestor. Raises Forbidden."""
    own = (session_id, token_session)
    if request.control is not None and request.control.session_id not in own:
        raise Forbidden("nvext.session_control: a session's token may name that session alone")
    for name in sorted((TRUSTED_ALONE | SETTABLE.difference(allowed)) & request.params.keys()):
        if bytes(request.params[name]) != b"null":
            raise Forbidden(f"{name}: not with a session's token, but with the admin's")
    engine_session = request.params.get(ENGINE_SESSION)
    if engine_session is not None and bytes(engine_session) not in (b"null", *map(msgspec.json.encode, own)):
        raise Forbidden(f"{ENGINE_SESSION}: a session's token may name that session alone")
