"""Is everything that was acknowledged still there, to the byte and once? Asked over HTTP, as a client would."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter

import aiohttp
import msgspec

from ops.crash_rounds.clients import Ack, Round, Site


class _Record(msgspec.Struct):
    turn: int
    response: msgspec.Raw


class _Records(msgspec.Struct):
    records: list[_Record]


class _LoggedEvent(msgspec.Struct):
    type: str
    turn: int | None = None
    retry_key: str | None = None


async def audit(site: Site, http: aiohttp.ClientSession, result: Round, *, everything: bool) -> None:
    """Look up what was acknowledged since the last audit, or ever."""
    for followed in list(site.followed):
        acks = followed.acks[0 if everything else followed.audited :]
        if acks:
            followed.audited = len(followed.acks)
            await _audit_session(site, http, followed.session_id, acks, result)


async def _audit_session(
    site: Site, http: aiohttp.ClientSession, session_id: str, acks: list[Ack], result: Round
) -> None:
    url = f"{site.base_urls[0]}/sessions/{session_id}"
    records: dict[int, str] = {}
    async with http.get(url) as response:
        if response.status == 200:
            for record in msgspec.json.decode(await response.read(), type=_Records).records:
                records[record.turn] = hashlib.sha256(record.response).hexdigest()
    keys: Counter[str | None] = Counter()
    places: dict[str | None, int | None] = {}
    async with http.get(f"{url}/events") as response:
        for line in (await response.read()).splitlines() if response.status == 200 else ():
            event = msgspec.json.decode(line, type=_LoggedEvent)
            if event.type == "TurnCommitted":
                keys[event.retry_key] += 1
                places[event.retry_key] = event.turn
    for ack in acks:
        if records.get(ack.turn) != ack.digest or places.get(ack.retry_key) != ack.turn:
            result.lost += 1
            print(f"lost: session {session_id}, turn {ack.turn}", file=sys.stderr)
    result.twice += sum(1 for count in keys.values() if count > 1)
