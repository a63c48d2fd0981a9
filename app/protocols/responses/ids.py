"""Ids of responses and their items: each names its turn by a proof (`app.domain.proofs`)."""

from __future__ import annotations

import re

from app.domain.proofs import find_proof

RESPONSE, REASONING, MESSAGE, FUNCTION, CUSTOM, ENCRYPTED = "resp_", "rs_", "msg_", "fc_", "ctc_", "tl_"
COMPACTION, SUMMARY = "cmp_", "tls_"
"""Of a compaction's id, and of its encrypted content: the summary stands behind it."""

MAX_LENGTH = 256
"""Characters of a text in which a proof is looked for: ours are far shorter."""

_ITEM = re.compile(r"(rs|msg|fc|ctc)_\d{1,9}_[0-9a-f]{24}(?:_(\d{1,4})(r?))?")


def call_id(prefix: str, proof: str, index: int, is_raw: bool = False) -> str:
    """`is_raw`: the input of a custom tool's call is the sampled arguments as they are, since they hold no `input`."""
    return f"{prefix}{proof}_{index}{'r' if is_raw else ''}"


def is_raw(item_id: str, given: str) -> bool:
    """Is this input of a custom tool's call the sampled arguments as they are? Without an id of ours, an object is."""
    matched = _ITEM.fullmatch(item_id)
    if matched is not None:
        return bool(matched[3])
    return given.lstrip()[:1] == "{" and given.rstrip()[-1:] == "}"


def output_item(item_id: str) -> tuple[str, int] | None:
    """The kind of one of our output items, as its prefix, and its place among the calls; None for any other id."""
    matched = _ITEM.fullmatch(item_id)
    if matched is None or (matched[1] in ("fc", "ctc")) != (matched[2] is not None):
        return None
    return f"{matched[1]}_", int(matched[2] or 0)


def proof_in(text: str) -> str | None:
    return find_proof(text) if len(text) <= MAX_LENGTH else None


def response_proof(response_id: str) -> str | None:
    """The proof in a response's id; None if it is not one of ours."""
    proof = proof_in(response_id)
    return proof if proof is not None and response_id == RESPONSE + proof else None
