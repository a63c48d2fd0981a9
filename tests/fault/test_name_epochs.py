"""Names that come again in each epoch, while servers are killed."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.tools import name_epochs

pytestmark = pytest.mark.long


@pytest.mark.parametrize("processes", [1, 2], ids=["sqlite", "two-on-postgresql"])
def test_no_turn_is_in_the_session_of_another_epoch(processes: int) -> None:
    with name_epochs.serving(processes) as servers:
        result = asyncio.run(name_epochs.run(servers, epochs=6, seed=processes))
    assert result.faults == 0, str(result)
    assert result.kills > 0


def test_finishes_race_first_requests_at_two_processes() -> None:
    """Whichever comes first: a turn that was answered is in the generation that its client was told of."""
    name = "raced"
    with name_epochs.serving(2) as servers, ThreadPoolExecutor(8) as pool, httpx.Client(timeout=60) as http:

        def ask(url: str, text: str) -> tuple[int, str]:
            body = {"model": "simulator", "messages": [{"role": "user", "content": text}]}
            reply = http.post(f"{url}/v1/chat/completions", json=body, headers={"x-session-id": name})
            return reply.status_code, reply.headers.get("x-turnlog-session-id", name)

        def finish(url: str) -> int:
            return http.post(f"{url}/finish_session", params={"session_id": name}).status_code

        urls = [server.base_url for server in servers]
        told: Counter[str] = Counter()
        statuses: Counter[int] = Counter()
        for number in range(25):
            asked = [pool.submit(ask, url, f"{number} {place}") for place in range(2) for url in urls]
            finished = [pool.submit(finish, url) for url in urls]
            for status, session_id in (wait.result() for wait in asked):
                statuses[status] += 1
                told[session_id] += status == 200
            assert {wait.result() for wait in finished} == {200}
        assert finish(urls[0]) == 200
        found = http.get(f"{urls[1]}/sessions", params={"name": name, "order": "asc", "limit": 1000}).json()["sessions"]
    assert statuses.keys() <= {200, 404}
    assert [one["generation"] for one in found] == list(range(1, len(found) + 1))
    assert {one["status"] for one in found} == {"closed"}
    assert {one["session_id"]: one["turns"] for one in found if one["turns"]} == +told
    assert len(found) > 1
