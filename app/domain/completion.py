"""Where a completion's prompt joins its session, and what in it is new.

The prompt is compared as a whole: it begins with all that is stored up to some live turn, or it repeats a live turn's
prompt, or it is something else (it shares no sampled output with the history). The first is found by `Turn.tokens_hash`
for token ids, and by the last of `Turn.message_hashes` for text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from app.domain import split
from app.domain.canonical import digest as _digest
from app.domain.request import CompletionRequest
from app.domain.rules import Plan, TreeIndex, diverging
from app.domain.session import Session, Turn
from app.errors import HistoryMismatch, RollbackTooDeep


class _Prefix(NamedTuple):
    """The beginning of a prompt that continues a turn: its size in bytes and hash."""

    size: int
    hash: str


class RequestPrompt:
    """A completion's prompt, as `history.RequestHistory` is for a chat's messages.

    New text counts as one message, as a JSON string; ids count as none, because they are stored as tokens.

    `continued` are the turns that the prompt was last found to continue, all of whose text begins it.
    """

    def __init__(self, request: CompletionRequest) -> None:
        self._ids = request.ids
        self._data = b"" if request.text is None else request.text.encode()
        self._new = b""
        self._messages = 0
        self.continued: set[int] = set()
        hasher = hashlib.sha256(b"text:" if self._ids is None else b"ids:")
        hasher.update(self._data if self._ids is None else self._ids.text)
        self.whole_hash = hasher.hexdigest()[:32]
        self.client_hash = self.whole_hash

    def __len__(self) -> int:
        return self._messages

    def check(self, index: TreeIndex, session: Session | None = None, agent_id: str | None = None) -> None:
        """Any prompt is valid."""

    partial_reply = None
    hash_before_last = None

    def new_hashes(self, start: int) -> tuple[str, ...]:
        return (_digest(self._new),) if self._messages > start else ()

    def new(self, plan: Plan) -> list[bytes]:
        """The new text, if the prompt is text and has any."""
        return [split.quoted(self._new.decode())] if self._new else []

    def reply_hashes(self, message: bytes) -> tuple[str, None, None]:
        """Identifies the text up to the reply's end, by size and hash, so that the next prompt can continue it."""
        if self._ids is not None:
            return _digest(message), None, None
        whole = self._data + msgspec.json.decode(message, type=str).encode()
        return f"{len(whole)}:{_digest(whole)}", None, None

    def join(self, session: Session, index: TreeIndex, agent_id: str | None) -> Plan:
        """Where the prompt joins the session. Raises RollbackTooDeep, HistoryMismatch in a linear session."""
        plan = self._attached(session, agent_id) if session.is_tree else self._plan(session)
        base = 0
        if plan.base_messages and self._ids is None:
            base = self._stored(session.turn(plan.parent)).size
        self._new = self._data[base:]
        self._messages = plan.base_messages + bool(self._new)
        return plan

    def undone_turn(self, session: Session, index: TreeIndex) -> int | None:
        """As `RequestHistory.undone_turn`."""
        undone = [session.undone[number] for number in self._continued(list(session.undone))]
        deepest = max(undone, key=lambda turn: self._stored(turn).size, default=None)
        if deepest is None:
            return None
        live = [self._stored(session.turn(number)).size for number in self._continued(list(session.turns))]
        return deepest.number if self._stored(deepest).size > max(live, default=0) else None

    def _attached(self, session: Session, agent_id: str | None) -> Plan:
        """After the turn with the longest text that begins the prompt: of several the same agent's, else the newest."""
        continued = self._continued([turn for turn in session.turns if turn.shape == "completions"])
        turns = [session.turn(number) for number in continued]
        parent = max(
            turns, key=lambda turn: (self._stored(turn).size, turn.agent_id == agent_id, turn.seq), default=None
        )
        return Plan(0, 0) if parent is None else Plan(parent.number, parent.message_count)

    def _plan(self, session: Session) -> Plan:
        leaf = session.leaf
        if leaf is None:
            return Plan(0, 0)
        own = self.client_hash
        chain = session.message_chain(leaf.number)
        continued = self._continued(chain)
        for place in range(len(chain) - 1, -1, -1):
            turn = chain[place]
            if self._stored(turn).size < 0:
                break  # Its text is unknown: discarding the turns from here on would be a guess.
            if turn.number in continued and (turn is chain[-1] or any(map(self._sampled, chain[: place + 1]))):
                return self._within(session, Plan(turn.number, turn.message_count, _numbers(chain[place + 1 :])))
            if turn.shape == "completions" and turn.client_hash == own:
                return self._within(session, Plan(turn.parent, turn.base_messages, _numbers(chain[place:])))
        return diverging(
            session,
            HistoryMismatch.of(
                "the prompt does not begin with a stored turn's tokens, and does not repeat a live turn's prompt"
            ),
        )

    def _within(self, session: Session, plan: Plan) -> Plan:
        window, turns = session.config.rollback_window, len(plan.discarded)
        if turns <= window:
            return plan
        return diverging(session, RollbackTooDeep.of(f"the prompt goes back {turns} turns", window))

    def _stored(self, turn: Turn) -> _Prefix:
        if self._ids is not None:
            return _Prefix(turn.tokens_text_bytes, turn.tokens_hash)
        size, _, digest = turn.message_hashes[-1].partition(":")
        return _Prefix(int(size), digest) if digest else _Prefix(-1, "-")

    def _sampled(self, turn: Turn) -> bool:
        """Does the prompt, which begins with all that is stored up to this turn, include an output of it?"""
        if self._ids is not None:
            return turn.output_tokens > 0
        return _digest(b"text:" + self._data[: self._stored(turn).size]) != turn.client_hash

    def _continued(self, chain: Sequence[Turn]) -> set[int]:
        """The turns that the prompt continues completely; each byte is hashed once."""
        data = memoryview(self._data if self._ids is None else self._ids.text)
        size = len(data) + (self._ids is not None)  # The text of tokens has a comma behind the last one.
        hasher, hashed = hashlib.sha256(), 0
        numbers: set[int] = set()
        for prefix, turn in sorted(((self._stored(turn), turn) for turn in chain), key=lambda pair: pair[0].size):
            if turn.shape != "completions" or not hashed <= prefix.size <= size:
                continue
            hasher.update(data[hashed : prefix.size])
            if hashed <= len(data) < prefix.size:
                hasher.update(b",")
            hashed = prefix.size
            if hasher.hexdigest()[: len(prefix.hash)] == prefix.hash:
                numbers.add(turn.number)
        self.continued = numbers
        return numbers


def _numbers(turns: Sequence[Turn]) -> tuple[int, ...]:
    return tuple(turn.number for turn in turns)
