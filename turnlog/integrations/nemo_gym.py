"""NeMo Gym's token-capture protocol (0.7.0) over Turnlog: `TokenSource`, and what a `TokenSink` has left to do.

An agent's base URL is `<Turnlog>/ng-rollout/<rollout id>/training-token-capture`, as Gym makes it from the address of a
model server. The rollout's session has the rollout's id. Gym's `put` must make a call durable before its reply leaves;
Turnlog's commit does that, so `put` only checks that the call is there. `freeze` closes the session: no later call can
commit. `drop` retires exactly what was frozen: by default Turnlog keeps it, and its own retention decides; with
`erase=True` it is erased.

Turnlog splits a session into rows; each generation is in the loss of one of them. A frozen entry is such a generation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_gym.token_id_capture import TokenCaptureSnapshot, TokenEntry
from nemo_gym.token_id_capture.records import ParentResolutionStatus, stamp_lineage

from turnlog import AsyncTurnlog
from turnlog.errors import Conflict, NotFound

INCOMPLETE = ":incomplete"
"""Ends the id of the session without turns that marks a rollout as incomplete. No rollout's id of Gym has a `:`."""


class CallMissing(LookupError):
    """Turnlog holds no generation with these tokens in the rollout's session."""


class TurnlogTokenCapture:
    """Gym's `TokenSource` and `TokenSink` over one Turnlog server. `turnlog` is not closed by it, and needs the admin
    token where tokens are on.
    """

    def __init__(self, turnlog: AsyncTurnlog, *, erase: bool = False) -> None:
        self._turnlog = turnlog
        self._erase = erase

    async def put(self, entry: TokenEntry) -> None:
        """Check that the rollout's session has this call. Raises CallMissing; Gym then marks the rollout incomplete."""
        wanted = (entry.prompt_token_ids, entry.generation_token_ids)
        entries, _ = await self._read(entry.rollout_id)
        if not any((one.prompt_token_ids, one.generation_token_ids) == wanted for one in entries):
            raise CallMissing(
                f"rollout {entry.rollout_id} has no call of {len(entry.generation_token_ids)} such tokens"
            )

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """Mark the rollout for good, also after its freeze."""
        try:
            marker = await self._turnlog.create_session(
                session_id=rollout_id + INCOMPLETE, metadata={"model_call_id": model_call_id}
            )
        except Conflict as refused:
            if refused.code not in ("session_exists", "session_closed"):  # Marked for another call, or before.
                raise
            return
        await marker.close()

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """Close the rollout's session and return its generations. Without such a session there are none.

        `incomplete`: it was marked, or a branch of it gives no row. `version` grows with each of its events.
        """
        session = self._turnlog.attach(rollout_id)
        try:
            await session.close()
            seq = max([event["seq"] async for event in session.events()], default=0)
        except NotFound:
            seq = 0
        marked = await self._is_marked(rollout_id)
        entries, left_out = await self._read(rollout_id) if seq else ([], False)
        version = 2 * seq + marked
        named = ",".join(f"{one.model_call_id}={one.digest}" for one in entries)
        snapshot_id = hashlib.sha256(f"{rollout_id}|{version}|{named}".encode()).hexdigest()
        return TokenCaptureSnapshot(rollout_id, tuple(entries), marked or left_out, snapshot_id, version)

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Retire the snapshot if nothing changed since. Call it once the trainer's queue has the rows."""
        now = await self.freeze(rollout_id)
        if (now.snapshot_id, now.version) != (snapshot_id, version):
            return False
        if self._erase:
            await self._turnlog.attach(rollout_id).erase()
        return True

    async def close(self) -> None:
        """Nothing is buffered here."""

    async def _is_marked(self, rollout_id: str) -> bool:
        try:
            await self._turnlog.attach(rollout_id + INCOMPLETE).tree()
        except NotFound:
            return False
        return True

    async def _read(self, rollout_id: str) -> tuple[list[TokenEntry], bool]:
        """The rollout's generations so far, and whether a branch of it was left out."""
        entries: list[TokenEntry] = []
        left_out = False
        async for row in self._turnlog.export(session_id=rollout_id, shape="openenv", evaluation=True, explain=True):
            if "excluded" in row:
                left_out |= row.get("turn") is None
            else:
                entries += _entries(rollout_id, row)
        return entries, left_out


def _entries(rollout_id: str, row: Mapping[str, Any]) -> Iterator[TokenEntry]:
    """The generations that this row has in its loss, each with the whole prompt that it was sampled after. The parent
    is the turn before it in the row, whose tokens begin its prompt.
    """
    for turn in row["turns"]:
        [choice] = turn["response"]["choices"]
        entry = TokenEntry(
            rollout_id=rollout_id,
            model_call_id=turn["node_id"],
            prompt_token_ids=turn["prompt_token_ids"],
            generation_token_ids=turn["completion_token_ids"],
            generation_log_probs=turn["per_token_logps"],
            output_items=[{"type": "message", **choice["message"]}],
            token_item_index=0,
        )
        parent = turn["metadata"]["parent"]
        status = ParentResolutionStatus.ROOT if parent is None else ParentResolutionStatus.RESOLVED
        yield stamp_lineage(entry, parent, parent_resolution=status)
