"""Commits a generated turn: events, content and the end of its claim in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from app import crash_points
from app.domain import decide
from app.domain.history import Incoming
from app.domain.request import ChatRequest
from app.domain.session import Session
from app.errors import AppError, ClaimLost
from app.sessions.cache import CacheEntry, require_open
from app.sessions.lifecycle import refusal
from app.store import pins
from app.store.log import Appended, Refused, StoredChunk, size_of
from app.store.log_turns import Commit, Pinned, Stage, Stale
from app.turn.claims import known_of
from app.turn.context import ClaimedTurn, TurnContext
from app.turn.dispatch import GeneratedTurn
from app.turn.token_in import added_text
from app.turn.validation import stored_chunks

if TYPE_CHECKING:
    from app.services import Services

STAGE_BYTES = 512 << 10
"""Payload chunks larger than this together are written before the commit: about 2 ms of one transaction."""


class Commits:
    """`is_alone()`: is no other turn in flight in this process?"""

    def __init__(self, services: Services, is_alone: Callable[[], bool]) -> None:
        self._services = services
        self._is_alone = is_alone

    async def commit(self, context: TurnContext, claimed: ClaimedTurn, generated: GeneratedTurn) -> None:
        """Commit the turn: it is on disk when this returns. Raises ClaimLost, SessionClosed, StoreUnavailable,
        StoreFull."""
        services, session_id = self._services, claimed.session.session_id
        result, chunks = generated.reply.result, stored_chunks(generated.reply.result)
        context.stages.reply_bytes = len(generated.body)
        context.stages.stored_bytes = len(result.facts or b"") + len(result.wire) + size_of(chunks)
        try:
            outcome = await self._write(context, claimed, generated, await self._stage(claimed, chunks))
        except AppError as error:
            services.cache.drop(session_id)
            await services.claims.fail(claimed, error)
            raise
        if isinstance(outcome, Refused):
            services.cache.drop(session_id)
            if outcome.status == "open":
                # The session still has the claim if only its staged chunks are gone.
                await services.claims.reject(claimed, ClaimLost.code)
                raise ClaimLost(f"the claim on session {session_id} was taken over during the turn")
            raise refusal(session_id, outcome.status)
        services.claims.appended(session_id, outcome)
        odd, turn = claimed.entry.index.odd_calls, claimed.opened.turn
        if (generated.reply.calls or generated.odd_arguments) and turn in odd:
            odd.learn(turn, generated.reply.calls)
        prompt = generated.prompt
        tokens = None if prompt is None else added_text(prompt, result.base, result.output_ids)
        messages = b",".join((*generated.new, result.message))
        layout = context.request.layout if isinstance(context.request, ChatRequest) else None
        spelled = context.history.spelled() if layout is not None and isinstance(context.history, Incoming) else None
        text = None if layout is None or generated.reply.text is None else generated.reply.text()
        services.cache.remember(session_id, claimed.opened.turn, messages, tokens, layout, spelled, text)

    async def _write(
        self, context: TurnContext, claimed: ClaimedTurn, generated: GeneratedTurn, chunks: Sequence[StoredChunk]
    ) -> Appended | Refused:
        """Write the commit. Other turns may have been committed since the claim: its events are decided for the state
        that it is written to. Raises StoreUnavailable, StoreFull, SessionClosed."""
        cache, session_id = self._services.cache, context.session_id
        entry = await cache.open(session_id)
        async with entry.committing:
            while True:
                await self._read_pins(entry)
                session = entry.session
                if not _may_hold(session, claimed):
                    return Refused(session.status)
                now = msgspec.structs.replace(claimed, session=session)
                outcome = await self._submit(context, self._commit_of(context, now, generated, chunks, entry))
                if isinstance(outcome, Pinned):
                    entry.pinned_upto = outcome.upto
                elif not isinstance(outcome, Stale):
                    return outcome
                entry = require_open(await cache.refresh(session_id), session_id)

    async def _read_pins(self, entry: CacheEntry) -> None:
        """A checkpoint that had the session may have been deleted; one that is made is found by the commit."""
        if entry.pinned_upto:
            session_id = entry.session.session_id
            entry.pinned_upto = await self._services.cache.database.read(
                lambda connection: pins.read_pinned_upto(connection, session_id), session_id=session_id
            )

    async def _submit(self, context: TurnContext, commit: Commit) -> Appended | Stale | Pinned | Refused:
        if crash_points.ARMED:
            crash_points.reach("before_commit")
        outcome: Appended | Stale | Pinned | Refused = await self._services.writer.submit(commit)
        if crash_points.ARMED:
            crash_points.reach("after_commit")
        if isinstance(outcome, Appended):
            context.stages.stored_bytes += size_of(commit.blobs)
        return outcome

    def _commit_of(
        self,
        context: TurnContext,
        claimed: ClaimedTurn,
        generated: GeneratedTurn,
        chunks: Sequence[StoredChunk],
        entry: CacheEntry,
    ) -> Commit:
        services, result = self._services, generated.reply.result
        blobs, new_blobs = generated.request.blobs(claimed.session)
        events = decide.commit_turn(
            claimed.session,
            entry.index,
            claimed.opened,
            claimed.fence,
            claimed.plan,
            context.history,
            generated.reply,
            blobs=blobs,
            given_ids=generated.given_ids,
            odd_arguments=generated.odd_arguments,
            binding=services.placement.binding(claimed.session, generated.choice, generated.reply.engine),
            timing=context.stages.timing(),
            left_out=generated.left_out,
            max_replay_bytes=services.settings.max_replay_bytes,
            uses=entry.uses,
            pinned_upto=entry.pinned_upto,
        )
        return Commit(
            context.session_id,
            claimed.fence,
            services.claims.incarnation,
            claimed.opened_at,
            services.clock(),
            known_of(claimed.session),
            events,
            result.facts,
            result.wire,
            new_blobs,
            chunks,
            is_alone=self._is_alone(),
            stages=("turn" if claimed.session.is_tree else "session") if services.staging.is_on else None,
            pinned_upto=entry.pinned_upto,
        )

    async def _stage(self, claimed: ClaimedTurn, chunks: Sequence[StoredChunk]) -> Sequence[StoredChunk]:
        """Write chunks before the commit: as objects, or, if there are many bytes of them, into the database, one at a
        time. Returns the chunks that the commit must write. Raises as `Objects.stored`."""
        services, session_id = self._services, claimed.session.session_id
        if chunks and services.objects is not None:
            chunks = await services.objects.stored(session_id, claimed.fence, chunks)
        if size_of(chunks) <= STAGE_BYTES:
            return chunks
        for chunk in chunks:
            stage = Stage(session_id, claimed.fence, services.claims.incarnation, claimed.opened_at, [chunk])
            if not await services.writer.submit(stage):
                break
            if crash_points.ARMED:
                crash_points.reach("after_staged")
        return ()


def _may_hold(session: Session, claimed: ClaimedTurn) -> bool:
    """May the claim still stand? A state from before it does not tell.

    Without it nothing can be decided: what the turn continues is no longer kept for it, and where a crash of the
    database undid it, its number and fence may be another turn's.
    """
    if session.version < claimed.fence:
        return True
    held, opened = session.open_turns.get(claimed.opened.turn), claimed.opened
    return held is not None and (held.fence, held.parent, held.body_hash) == (
        claimed.fence,
        opened.parent,
        opened.body_hash,
    )
