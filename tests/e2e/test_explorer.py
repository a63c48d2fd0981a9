"""The page of the routes, `/docs`, in a browser: it shows the document, and a request can be sent from it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from e2e.page import PageStand, Watched, barriers

pytestmark = pytest.mark.long


def test_the_page_of_the_routes_has_no_barrier(page_stand: PageStand, watch: Callable[..., Watched]) -> None:
    """At a desk in the light, and on a phone in the dark too."""
    watched = watch(page_stand.stand.server.base_url, width=1440)
    page = watched.page
    reply = page.goto(f"{watched.base_url}/docs")
    assert reply is not None
    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; connect-src 'self'; ")
    assert "unsafe" not in policy
    page.locator("details[data-words]").first.wait_for()
    page.get_by_label("Filter").focus()
    page.keyboard.type("post /sessions create")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Send").first.click()
    page.get_by_text('"base_url":').wait_for()
    page.get_by_text("Errors", exact=True).first.click()
    for width, scheme in ((1440, "light"), (1440, "dark"), (390, "light"), (390, "dark")):
        page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        page.set_viewport_size({"width": width, "height": 844})
        assert barriers(page, scheme) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    watched.verify()


def test_a_request_is_sent_from_the_page_of_the_routes(page_stand: PageStand, watch: Callable[..., Watched]) -> None:
    page = watch(page_stand.stand.server.base_url).page
    page.goto(f"{page_stand.stand.server.base_url}/docs")
    page.get_by_label("Filter").fill("reward put")
    route = page.locator("details[data-words]:visible")
    route.get_by_text("PUT /sessions/{session_id}/reward").click()
    talk = page_stand.stand.talk()
    route.get_by_label("session_id").fill(talk.id)
    route.get_by_label("Body").fill('{"reward": 0.25}')
    route.get_by_role("button", name="Send").click()
    route.get_by_text(f'{{"session_id":"{talk.id}","seq":2}}').wait_for()
    assert talk.state()["metadata"]["reward"] == 0.25
