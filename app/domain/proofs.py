"""Names of turns that a client can hold: a turn's number and a short MAC over it and its session.

They stand in response ids, item ids, signatures and encrypted content. A proof gives no access: a request that has one
is authorised as any other. It only tells which of several equal turns a client means.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection, Iterator, Sequence

_PROOF = re.compile(r"(\d{1,9})_([0-9a-f]{24})")


class Proofs:
    """`secrets`: the first is current, all are accepted. Without one, the key is the same for every server."""

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        self._keys = [hmac.digest(secret.encode(), b"turnlog turn v1", "sha256") for secret in (*secrets, "")]

    def of(self, session_id: str, turn: int) -> str:
        """The proof of a turn: `<number>_<24 hex digits>`."""
        return _proof(self._keys[0], session_id, turn)

    def all_of(self, session_id: str, turn: int) -> Iterator[str]:
        """What each accepted secret makes of a turn."""
        return (_proof(key, session_id, turn) for key in self._keys)

    def turn_of(self, session_id: str, proof: str) -> int | None:
        """The turn that a proof names; None if it is not this session's."""
        matched = _PROOF.fullmatch(proof)
        if matched is None:
            return None
        turn = int(matched[1])
        return turn if proof in self.all_of(session_id, turn) else None


class HeldProofs:
    """The turns of a session whose proofs a request holds: a turn is in it if its proof is."""

    def __init__(self, proofs: Proofs, session_id: str, held: Collection[str]) -> None:
        self._proofs = proofs
        self._session_id = session_id
        self._held = frozenset(held)

    def __contains__(self, turn: object) -> bool:
        return (
            bool(self._held)
            and isinstance(turn, int)
            and not self._held.isdisjoint(self._proofs.all_of(self._session_id, turn))
        )


def find_proof(text: str) -> str | None:
    """The proof inside an id or a signature, or None."""
    matched = _PROOF.search(text)
    return None if matched is None else matched[0]


def _proof(key: bytes, session_id: str, turn: int) -> str:
    mac = hmac.new(key, f"{turn}\0{session_id}".encode(), hashlib.sha256).hexdigest()[:24]
    return f"{turn}_{mac}"
