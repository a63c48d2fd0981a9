"""Where faults are made: files by what they do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.tools.mutants.edits import Mutant, mutants_of

AREAS: dict[str, tuple[str, ...]] = {
    "claims and commits": (
        "app/turn/claims.py",
        "app/store/log_turns.py",
        "app/store/sqlite_tx.py",
        "app/store/postgres_tx.py",
    ),
    "store": (
        "app/store/statements.py",
        "app/store/log.py",
        "app/store/log_sessions.py",
        "app/store/pins.py",
        "app/store/rollouts.py",
        "app/store/repair.py",
        "app/store/incarnations.py",
        "app/store/fleet.py",
    ),
    "writer": ("app/store/writer.py", "app/store/postgres.py", "app/store/dialect.py"),
    "turns": ("app/turn/turns.py", "app/turn/in_flight.py", "app/turn/placement.py"),
    "matching": (
        "app/domain/rules.py",
        "app/domain/canonical.py",
        "app/domain/history.py",
        "app/domain/returned.py",
        "app/domain/decide.py",
        "app/domain/branches.py",
    ),
    "fold and cache": (
        "app/domain/session.py",
        "app/domain/restore.py",
        "app/sessions/cache.py",
        "app/store/sessions.py",
    ),
    "retries and deliveries": ("app/turn/retries.py",),
    "sessions": ("app/sessions/lifecycle.py", "app/sessions/names.py", "app/sessions/recovery.py"),
    "retention": (
        "app/domain/retention.py",
        "app/sessions/janitor.py",
        "app/sessions/replay_payloads.py",
        "app/features/objects/objects.py",
        "app/features/objects/rows.py",
        "app/features/objects/schema.py",
    ),
    "cursors": (
        "app/domain/cursors.py",
        "app/store/feed.py",
        "app/sessions/all_events.py",
        "app/sessions/session_list.py",
        "app/sessions/event_log.py",
        "app/sessions/log_end.py",
    ),
    "budgets": ("app/features/budgets/*.py",),
    "erasure": ("app/sessions/erasure.py",),
    "checkpoints": (
        "app/features/checkpoints/checkpoints.py",
        "app/features/checkpoints/[or]*s.py",
        "app/features/checkpoints/schema.py",
    ),
    "groups": ("app/features/groups/*.py",),
    "gates": ("app/features/gates/gates.py", "app/features/gates/pauses.py", "app/fleet/state.py"),
    "session control": ("app/features/session_control/*.py", "app/domain/control.py"),
    "forks": ("app/features/forks/*.py",),
    "archive": ("app/features/archive/archive.py", "app/features/archive/rows.py", "app/features/archive/schema.py"),
    "annotations": ("app/features/annotations/*.py",),
    "continued turns": ("app/features/resume/*.py",),
}


def all_mutants(tree: Path) -> Iterator[tuple[str, Mutant]]:
    """Every fault that a pattern makes in a tree, with its area."""
    for area, globs in AREAS.items():
        for glob in globs:
            for file in sorted(tree.glob(glob)):
                path = str(file.relative_to(tree))
                for mutant in mutants_of(path, file.read_text()):
                    yield area, mutant
