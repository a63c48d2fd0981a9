"""The page of the routes, `/docs`, in a browser: it shows the document, and a request can be sent from it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from e2e.page import PageStand, Watched

pytestmark = pytest.mark.long


def test_a_request_is_sent_from_the_page_of_the_routes(page_stand: PageStand, watch: Callable[..., Watched]) -> None:
    page = watch(page_stand.stand.server.base_url).page
    page.goto(f"{page_stand.stand.server.base_url}/docs")
    page.get_by_label("Filter").fill("reward put")
    route = page.locator("details:visible")
    route.get_by_text("PUT /sessions/{session_id}/reward").click()
    talk = page_stand.stand.talk()
    route.get_by_label("session_id").fill(talk.id)
    route.get_by_label("Body").fill('{"reward": 0.25}')
    route.get_by_role("button", name="Send").click()
    route.get_by_text(f'{{"session_id":"{talk.id}","seq":2}}').wait_for()
    assert talk.state()["metadata"]["reward"] == 0.25
