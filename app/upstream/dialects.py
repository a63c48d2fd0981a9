"""What each engine must be asked for so that a reply holds every token's id and logprob.

SGLang returns them in `meta_info` with `return_meta_info` and `logprobs`, the prompt's ids with
`return_prompt_token_ids`. vLLM returns both with `return_token_ids`, and needs `top_logprobs` to be a
number: an explicit null empties its logprobs. Asked for all of it, each engine answers its own; so
`auto` asks for all and the reply's shape tells which engine it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

DialectChoice = Literal["auto", "sglang", "vllm"]

_SGLANG: Mapping[str, bytes] = {
    "logprobs": b"true",
    "return_meta_info": b"true",
    "return_prompt_token_ids": b"true",
}
_VLLM: Mapping[str, bytes] = {"logprobs": b"true", "return_token_ids": b"true"}

_NEEDED: Mapping[DialectChoice, Mapping[str, bytes]] = {
    "sglang": _SGLANG,
    "vllm": _VLLM,
    "auto": {**_SGLANG, **_VLLM},
}


def complete(params: Mapping[str, msgspec.Raw], dialect: DialectChoice) -> dict[str, bytes]:
    """The client's parameters as raw JSON, with what Turnlog needs in place of the client's own wish."""
    fields = {name: bytes(raw) for name, raw in params.items()}
    fields.update(_NEEDED[dialect])
    if dialect != "sglang" and fields.get("top_logprobs", b"null") == b"null":
        fields["top_logprobs"] = b"0"
    return fields


def takes_rid(dialect: DialectChoice) -> bool:
    """Does the engine know a generation by the request's `rid`? vLLM has no such field."""
    return dialect != "vllm"
