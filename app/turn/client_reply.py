"""How much of an engine's reply its client gets: TURNLOG_CLIENT_REPLY."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import msgspec

from app.domain.request import join_object
from workers.codec import describe
from workers.parse import REPLAY

Mode = Literal["auto", "verbatim", "lean", "asked"]
Fields = Mapping[str, msgspec.Raw]
Parts = Sequence[bytes | memoryview]

ASKS_FOR_LOGPROBS = ("logprobs", "return_logprob", "return_meta_info")
"""Parameters with which a client asks for log-probabilities; `logprobs` of a completion is a number."""

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CHOICES = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
describe(dict[str, msgspec.Raw], list[dict[str, msgspec.Raw]])


def shown_kinds(requested_payloads: Collection[str], mode: Mode) -> Collection[str]:
    """The payload kinds that the client's reply keeps, of those that it asked for."""
    return {"auto": requested_payloads, "asked": requested_payloads, "verbatim": REPLAY, "lean": ()}[mode]


def shown(parts: Parts, params: Fields, mode: Mode) -> Parts:
    """A valid reply as the client gets it, its payloads apart, which `shown_kinds` decides.

    With `asked`, log-probabilities and `kv_transfer_params` that the client's parameters do not name are null, and the
    rest is compact; else the parts are unchanged.
    """
    if mode != "asked":
        return parts
    hides_logprobs = not any(_is_set(params, name) for name in ASKS_FOR_LOGPROBS)
    reply = _FIELDS.decode(b"".join(parts))
    if hides_logprobs:
        choices = [join_object(_without_logprobs(choice)) for choice in _CHOICES.decode(reply["choices"])]
        reply["choices"] = msgspec.Raw(b"[" + b",".join(choices) + b"]")
    if "kv_transfer_params" in reply and not _is_set(params, "kv_transfer_params"):
        reply["kv_transfer_params"] = msgspec.Raw(b"null")
    return [join_object({name: bytes(raw) for name, raw in reply.items()})]


def _is_set(params: Fields, name: str) -> bool:
    return bytes(params.get(name, b"null")) not in (b"null", b"false")


def _without_logprobs(choice: Fields) -> dict[str, bytes]:
    """The choice with null for each list of log-probabilities, of SGLang's `meta_info` too."""
    members = {name: b"null" if name.endswith("logprobs") else bytes(raw) for name, raw in choice.items()}
    if members.get("meta_info", b"null")[:1] == b"{":
        members["meta_info"] = join_object(_without_logprobs(_FIELDS.decode(members["meta_info"])))
    return members
