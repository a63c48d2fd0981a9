"""What of the gateway's wire is said otherwise here: the names of sessions, and the parameters of sampling.

A name may be any text there, such as `harbor/hello-world:0`; an id of a session has few characters. A byte of a name
that no id has is written as two dots and its hexadecimal digits.

Sources: rllm_model_gateway 0.1.0 (server.py, middleware.py, session_manager.py), rllm/engine/agentflow_engine.py.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from app.errors import InvalidRequest

MAX_ID, KEPT = 128, 95
"""Characters of an id, and of a longer one before the hash that ends it."""

_ODD = re.compile(r"[^A-Za-z0-9._:-]|\.{2,}|\A\.\Z")
_WRITTEN = re.compile(r"(?:\.\.[0-9A-F]{2})+")

MAX_MODEL = 512
"""Characters of a model's name, as in `POST /sessions`."""

SET_ANYWAY = frozenset({"logprobs", "return_token_ids"})
"""Parameters that every turn is asked with: rLLM sends `logprobs: 1` with its training parameters."""


def id_of(name: str) -> str:
    """The id of the session of this name; another name has another id. A usual name is its own id."""
    written = _ODD.sub(_digits, name)
    if len(written) <= MAX_ID:
        return written
    # Not to be read back: lists tell the id.
    return f"{written[:KEPT]}:{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[: MAX_ID - 1 - KEPT]}"


def name_of(session_id: str) -> str:
    """The name of the session of this id."""
    return _WRITTEN.sub(_text, session_id)


def _digits(odd: re.Match[str]) -> str:
    return "".join(f"..{byte:02X}" for byte in odd[0].encode("utf-8", "surrogatepass"))


def _text(written: re.Match[str]) -> str:
    return bytes.fromhex(written[0].replace(".", "")).decode("utf-8", "replace")


def pinned(sampling_params: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The parameters that override those of each request, and the model. Raises InvalidRequest."""
    params = {name: value for name, value in sampling_params.items() if name not in SET_ANYWAY}
    model = params.pop("model", None)
    if model is not None and not (isinstance(model, str) and 0 < len(model) <= MAX_MODEL and "\0" not in model):
        raise InvalidRequest(f"sampling_params.model must be text of 1 to {MAX_MODEL} characters")
    return params, model
