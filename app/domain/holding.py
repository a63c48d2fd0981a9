"""What a request may ask for that came with a session's own token: nothing that is another session's."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from app.domain.request import ChatRequest, CompletionRequest
from app.errors import Forbidden

SESSION_PARAMS, ENGINE_SESSION = "session_params", "session_id"
"""Of SGLang's requests: an engine's own session to go on with, whose context the reply would tell."""

TRUSTED_ALONE = frozenset(
    {SESSION_PARAMS, "bootstrap_host", "bootstrap_port", "custom_logit_processor", "kv_transfer_params"}
)
"""Fields that have an engine join another context, connect to where they say, or run what they hold (SGLang, vLLM)."""

SETTABLE = frozenset({"chat_template", "extra_args", "logits_processors", "priority", "prompt_embeds", "vllm_xargs"})
"""Fields that have an engine run a template or a plug-in of their choice, load tensors, or prefer them to others: an
operator may allow them (`TURNLOG_SESSION_PARAMS`)."""


def require_own(
    request: ChatRequest | CompletionRequest, session_id: str, holder: str, allowed: Collection[str] = ()
) -> None:
    """`session_id` is the turn's session, `holder` that of the token: the same, or one above it. Raises Forbidden."""
    own = (session_id, holder)
    if request.control is not None and request.control.session_id not in own:
        raise Forbidden("nvext.session_control: a session's token may name that session alone")
    for name in sorted((TRUSTED_ALONE | SETTABLE.difference(allowed)) & request.params.keys()):
        if bytes(request.params[name]) != b"null":
            raise Forbidden(f"{name}: not with a session's token, but with the admin's")
    engine_session = request.params.get(ENGINE_SESSION)
    if engine_session is not None and bytes(engine_session) not in (b"null", *map(msgspec.json.encode, own)):
        raise Forbidden(f"{ENGINE_SESSION}: a session's token may name that session alone")
