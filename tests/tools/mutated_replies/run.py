"""The run: for each phase an engine, a server, its clients, and at the end `ops.verify`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from app.settings import Settings
from ops.server import ServerProcess
from ops.verify import verify_url
from tests.tools.mutated_replies.client import Client, Phase, run_sessions
from tests.tools.mutated_replies.engine import Engine
from tests.tools.mutated_replies.payload_reader import KINDS
from tests.tools.mutated_replies.tally import Tally

REPLIES_PER_SESSION = 4
REQUEST_TIMEOUT_S = 60.0
KEEPALIVE_S = 600
"""The server keeps idle connections, so that one which ends is a fault, on a busy machine too."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`count` replies of run `seed` by `clients` at a time; `only`: the one session of this index."""

    count: int
    seed: int
    folder: Path
    clients: int = 32
    only: int | None = None


def phases() -> list[Phase]:
    """What the run's halves set differently. Payloads are asked for and judged where this version can."""
    judged = "replay" in Settings.model_fields
    return [
        Phase("asked", verbatim=False, judged=judged, asked=KINDS if judged else ()),
        Phase("verbatim", verbatim=True, judged=judged, asked=()),
    ]


def environment(phase: Phase) -> Mapping[str, str]:
    """The server's settings in a phase; `verbatim` also judges every reply off the event loop."""
    chosen = {"TURNLOG_CLIENT_REPLY": phase.name}
    if phase.verbatim:
        chosen["TURNLOG_INLINE_MAX_BYTES"] = "0"
    if phase.asked:
        chosen["TURNLOG_REPLAY"] = ",".join(phase.asked)
    return chosen


def sessions_of(plan: Plan, phase_index: int, phase_count: int) -> list[tuple[int, range]]:
    """The sessions of a phase, each with its replies' numbers: the phases take turns."""
    found = [
        (index, range(first, min(first + REPLIES_PER_SESSION, plan.count)))
        for index, first in enumerate(range(0, plan.count, REPLIES_PER_SESSION))
    ]
    return [one for one in found if one[0] % phase_count == phase_index and plan.only in (None, one[0])]


async def run(plan: Plan) -> Tally:
    """All phases, one after the other."""
    tally = Tally()
    every = phases()
    for place, phase in enumerate(every):
        sessions = sessions_of(plan, place, len(every))
        if sessions:
            with tempfile.TemporaryDirectory(prefix="turnlog-mutated-") as scratch:
                await _phase(plan, phase, sessions, tally, Path(scratch))
    return tally


async def _phase(plan: Plan, phase: Phase, sessions: list[tuple[int, range]], tally: Tally, scratch: Path) -> None:
    async with Engine(plan.seed) as engine:
        server = ServerProcess(
            scratch,
            upstreams=[engine.base_url],
            environment=environment(phase),
            arguments=["--timeout-keep-alive", str(KEEPALIVE_S)],
        )
        with server:
            timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
            connector = aiohttp.TCPConnector(limit=plan.clients, keepalive_timeout=KEEPALIVE_S)
            async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
                client = Client(phase, engine, http, server.base_url, plan.seed, tally, plan.folder)
                rows = await run_sessions(client, sessions, plan.clients)
                tally.problems += await _whole_export(phase, http, server.base_url, rows)
        tally.problems += [f"{phase.name}: {fault}" for fault in engine.faults]
    tally.problems += _logged(phase, server.log_path, plan.folder)
    report = await verify_url(server.environment["TURNLOG_DATABASE_URL"])
    tally.problems += [f"{phase.name}: ops.verify: {one.session_id}: {one.what}" for one in report.problems]


async def _whole_export(phase: Phase, http: aiohttp.ClientSession, base_url: str, rows: int) -> list[str]:
    """No stored reply may end the export of all the others."""
    try:
        async with http.get(f"{base_url}/export", params={"replay": "true"} if phase.judged else {}) as response:
            found = (await response.read()).count(b"\n")
    except aiohttp.ClientError as error:
        return [f"{phase.name}: the export of all sessions broke: {type(error).__name__}"]
    return [] if found == rows else [f"{phase.name}: the export of all sessions has {found} rows, theirs have {rows}"]


def _logged(phase: Phase, log: Path, folder: Path) -> list[str]:
    """Faults that the server noted itself; its log is kept then."""
    faults = log.read_text(errors="replace").count("Traceback")
    if not faults:
        return []
    kept = shutil.copy(log, folder / f"{phase.name}-server.log")
    return [f"{phase.name}: the server's log has {faults} tracebacks: {kept}"]
