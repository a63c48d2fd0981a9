"""Generations that go on from tokens that exist already: those that an engine ended early, and staged ones.

    around a generation     an aborted one is continued, returned or refused, as `on_abort` says; with
                            `TURNLOG_STAGE_TOKENS_S` its tokens are staged   (`TurnPoints.around_engine`)
    a commit                joins the parts (`workers.join`), and deletes what was staged, as a close and an
                            erasure do   (`StorePoints.unstaged`)

Without this feature an aborted generation is a turn that ended with `abort`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.features.resume import schema as schema
from app.metrics import Family

if TYPE_CHECKING:
    from app.features.resume.resume import Resume
    from app.services import Services

OUTCOMES = ("staged", "not_staged", "restored", "anew", "moved")
"""`not_staged`: the turn is of a kind that cannot be continued. Of a retry: `restored`, it goes on from staged tokens,
or `anew`, it cannot. `moved`: the engine died, and the same turn went on at another or after its restart."""

METRICS = (
    Family(
        "turnlog_turns_staged_total",
        "counter",
        "Turns whose tokens are staged, and what became of them.",
        "outcome",
        OUTCOMES,
    ),
    Family("turnlog_tokens_restored_total", "counter", "Staged tokens that a retry did not have to generate again."),
)


def add_to(services: Services) -> Resume:
    from app.features.resume.resume import Resume
    from app.features.resume.staging import Staging

    staging = Staging(services.database, services.writer, services.settings)
    resume = Resume(services, staging)

    def refresh() -> None:
        turns = staging.counters.turns
        services.metrics.set_all("turnlog_turns_staged_total", {outcome: turns[outcome] for outcome in OUTCOMES})
        services.metrics.set("turnlog_tokens_restored_total", staging.counters.tokens_restored)

    services.points.around_engine.append(resume.around)
    services.refreshes.append(refresh)
    return resume
