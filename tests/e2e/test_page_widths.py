"""Every view of the page on a phone, a tablet and a wall, and addresses that name nothing; the page of the routes."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from integration.stand import until, user
from playwright.sync_api import Page, expect

from e2e.page import ROWS, PageStand, Watch, barriers, nodes
from e2e.page_data import AT_ONCE, CHECKPOINT, RUN, SCORED

pytestmark = pytest.mark.long

GROUP = quote(next(iter(SCORED)), safe="")
TREE = "#/session/deep-research-5"
VIEWS = {
    "#/runs": ROWS,
    f"#/runs?run={RUN}": ".plots svg",
    "#/": ROWS,
    "#/groups": ROWS,
    f"#/group/{GROUP}": "svg.plot",
    f"#/group/{GROUP}/rollouts": ".sidebyside td",
    "#/search": "form.filters",
    "#/exports": "a[download]",
    "#/checkpoints": ROWS,
    f"#/checkpoint/{CHECKPOINT}": ROWS,
    "#/rollouts?sessions=deep-research-5@0,deep-research-5@2": ".sidebyside .text",
    TREE: ".said",
    f"{TREE}?tab=tokens": ".tokens .tok",
    f"{TREE}?tab=tree&branch=1": ".tree .dot",
    "#/session/swe-long-0": ".said",
    "#/session/terminal-bench-7?seq=6&tab=events": ".events .later",
}
"""Addresses, and what is there once the view is."""

LONG_VIEWS = {"#/session/{}": ".said", "#/session/{}?tab=tokens": ".tokens .tok"}
"""Of a session whose list and row are longer than any window; axe would look at each of their lines."""

PARTS = 2
"""Of the views, each a test of its own."""

TOO_WIDE = """() => {
  const hasScroller = (element) => {
    for (let one = element.parentElement; one && one !== document.body; one = one.parentElement) {
      if (one.tagName !== "MAIN" && getComputedStyle(one).overflowX !== "visible") return true;
    }
    return false;
  };
  const main = document.querySelector("main");
  const found = [...document.querySelectorAll("body *")].filter(
    (one) => one.getBoundingClientRect().right > innerWidth + 1 && !hasScroller(one),
  );
  return [
    document.documentElement.scrollWidth > innerWidth && "the document",
    main.scrollWidth > main.clientWidth && "main",
    ...found.slice(0, 5).map((one) => `${one.tagName}.${one.className}`),
  ].filter(Boolean);
}"""

TOO_TALL = """() => {
  const main = document.querySelector("main");
  const { top } = main.getBoundingClientRect();
  const bottoms = [...main.children].map((one) => one.getBoundingClientRect().bottom - top);
  const content = Math.ceil(Math.max(...bottoms) + main.scrollTop + parseFloat(getComputedStyle(main).paddingBottom));
  const whole = document.documentElement.scrollHeight;
  return [
    whole > innerHeight && `the document has ${whole} px`,
    main.scrollHeight > Math.max(main.clientHeight, content) && `main has ${main.scrollHeight} px for ${content}`,
  ].filter(Boolean);
}"""

CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = (colour) => {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((one) => one / 255)
      .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  return [0, 1, 2, 3, 4, 5, 6].map((place) => {
    const cell = document.createElement("span");
    cell.className = `tok lp${place}`;
    document.querySelector(".tokens").append(cell);
    const [one, other] = [getComputedStyle(cell).color, getComputedStyle(cell).backgroundColor].map(light).sort();
    cell.remove();
    return (other + 0.05) / (one + 0.05);
  });
}"""
"""Of the text on each colour of a token."""


def settled(page: Page, script: str) -> list[str]:
    """What is wrong once the page, which goes on reading and drawing, has had a second."""
    for _ in range(10):
        found: list[str] = page.evaluate(script)
        if not found:
            break
        page.wait_for_timeout(100)
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_every_view_fits_and_has_no_barrier_that_axe_finds(watch: Watch, page_stand: PageStand, part: int) -> None:
    """In the dark at a desk, in the light on a phone. Nothing is wider than the window, no view scrolls into an empty
    page."""
    long = page_stand.stand.talk(session_id=f"long-{part}")
    for number in range(80):
        long.say(str(number), sim={**AT_ONCE, "completion_tokens": 2})
    watched = watch(page_stand.stand.server.base_url)
    page, wrong = watched.open(), []
    views = {**VIEWS, **{view.format(long.id): ready for view, ready in LONG_VIEWS.items()}}
    for place, ready in list(views.items())[part::PARTS]:
        page.set_viewport_size({"width": 1440, "height": 900})
        page.emulate_media(color_scheme="dark")
        watched.go(place)
        page.locator(ready).first.wait_for()
        found = page.evaluate(TOO_TALL)
        for width, height in ((1440, 900), (768, 1024), (2560, 1440), (390, 844)):
            page.set_viewport_size({"width": width, "height": height})
            found += [f"at {width}: {one}" for one in settled(page, TOO_WIDE)]
            found += [f"at {width}: {one}" for one in page.evaluate(TOO_TALL)] if width == 390 else []
            if width in (1440, 390) and place in VIEWS:
                page.emulate_media(color_scheme="dark" if width == 1440 else "light")
                found += [f"at {width}: {one}" for one in barriers(page, of_colours=width == 390)]
        if place == f"{TREE}?tab=tokens":
            page.locator(".tokens .fold").first.click()
            page.locator(".promptrun .tok").first.wait_for()
            found += barriers(page)
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
                ratios = page.evaluate(CONTRAST)
                assert len(set(ratios)) == 7
                assert min(ratios) >= 4.5, ratios
        wrong += [f"{place}: {one}" for one in found]
    assert not wrong, "\n".join(wrong)


def test_a_view_that_is_left_leaves_nothing_behind(watch: Watch, page_stand: PageStand) -> None:
    watched = watch(page_stand.stand.server.base_url)
    page, kept = watched.open(), []
    for _ in range(2):
        for place, ready in VIEWS.items():
            watched.go(place)
            page.locator(ready).first.wait_for()
        watched.go("#/nowhere")
        page.locator("main > .message").wait_for()
        kept.append(nodes(page))
    until(lambda: nodes(page) < kept[0] + 150)  # what was let go is not collected at once


def tops(page: Page, selector: str) -> list[float]:
    """Where the elements begin, in pixels from the window's top."""
    found: list[float] = page.eval_on_selector_all(selector, "all => all.map((one) => one.getBoundingClientRect().top)")
    return found


def test_what_is_needed_is_in_sight_on_a_phone(watch: Watch, page_stand: PageStand) -> None:
    """Names while a list is scrolled sideways; forms are folded; what is copied, and where one is, scroll in a line."""
    watched = watch(page_stand.stand.server.base_url, width=390)
    for width in (390, 768):
        watched.page.set_viewport_size({"width": width, "height": 844})
        for place in ("#/groups", "#/"):
            page = watched.open(place)
            name = page.locator(f"{ROWS} th a").first
            expect(name).to_be_in_viewport()
            scroller = page.locator("main .table-scroll")
            assert scroller.evaluate("one => { one.scrollLeft = 300; return one.scrollLeft }") > 0
            expect(name).to_be_in_viewport()
            cell = page.locator(f"{ROWS} th").first.bounding_box()
            assert cell is not None
            assert cell["width"] >= 100
    page.set_viewport_size({"width": 390, "height": 844})
    page.reload()
    page.wait_for_selector(ROWS)
    field = page.locator("input[name=q]")
    expect(field).to_be_hidden()
    page.keyboard.press("/")
    expect(field).to_be_focused()
    page.keyboard.type("gsm8k-00")
    expect(page.locator(ROWS)).to_have_count(1)
    watched.go(TREE)
    page.locator(".sessiondetails > summary").click()
    last = page.get_by_role("button", name="Copy note as curl")
    last.wait_for()
    assert len(set(tops(page, "[aria-label=Session] .switches button"))) == 1
    last.scroll_into_view_if_needed()
    expect(last).to_be_in_viewport(ratio=0.9)
    watched.go("#/checkpoints")
    expect(page.locator("nav a[aria-current]")).to_be_in_viewport(ratio=0.9)


def test_the_strip_is_one_line_while_an_adapter_is_paused(watch: Watch, page_stand: PageStand) -> None:
    talk = page_stand.stand.talk()
    talk.say("one", sim=AT_ONCE)
    for fault in ("status_500", "not_json"):
        assert talk.chat([*talk.messages, user("x")], sim={"fault": fault}).status_code >= 500
    page = watch(page_stand.stand.server.base_url, width=1440).open()
    page.wait_for_selector("#fleet >> text=paused:")
    page.wait_for_selector("#fleet .errors >> text=upstream_invalid")
    expect(page.locator("#fleet .figure:has-text('Engine p50')")).to_contain_text("ms")
    for width in (1440, 1200, 768):
        page.set_viewport_size({"width": width, "height": 900})
        assert width == 768 or len(set(tops(page, "#fleet > *"))) == 1, width
        is_cut = "parts => parts.filter((one) => one.scrollWidth > one.clientWidth).length"
        assert page.eval_on_selector_all("#fleet > *", is_cut) == 0, width


def test_an_address_without_anything_says_so(watch: Watch, page_stand: PageStand) -> None:
    """A session is shown as soon as it exists."""
    watched = watch(page_stand.stand.server.base_url)
    watched.expected = ("404 (Not Found)",)
    page = watched.open()
    for place, title in (
        ("#/session/nobody", "There is no session “nobody”."),
        ("#/group/nobody", "There is no group “nobody”."),
        ("#/checkpoint/nobody", "There is no checkpoint “nobody”."),
        ("#/runs?run=nobody", "There is no run “nobody”."),
        ("#/nowhere/at/all", "There is no view at #/nowhere/at/all"),
    ):
        watched.go(place)
        expect(page.locator("main > .message strong")).to_have_text(title)
        assert page.locator("main > *").count() == 1
        page.locator("main > .message a").first.click()
        page.wait_for_selector(ROWS)
    watched.go("#/session/expected-soon")
    expect(page.locator("main > .message")).to_contain_text("There is no session")
    page_stand.stand.talk(session_id="expected-soon")
    expect(page.locator("main h1")).to_have_text("expected-soon")


def test_the_page_of_the_routes_sends_requests_and_has_no_barrier(watch: Watch, page_stand: PageStand) -> None:
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
    for key in ("Tab", "Tab", "Enter"):
        page.keyboard.press(key)
    page.get_by_role("button", name="Send").first.click()
    page.get_by_text('"base_url":').wait_for()
    page.get_by_text("Errors", exact=True).first.click()
    for width, scheme in ((1440, "light"), (1440, "dark"), (390, "light"), (390, "dark")):
        page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        page.set_viewport_size({"width": width, "height": 844})
        assert barriers(page, of_colours=scheme == "dark") == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width

    talk = page_stand.stand.talk()
    page.get_by_label("Filter").fill("reward put")
    route = page.locator("details[data-words]:visible")
    route.get_by_text("PUT /sessions/{session_id}/reward").click()
    route.get_by_label("session_id").fill(talk.id)
    route.get_by_label("Body").fill('{"reward": 0.25}')
    route.get_by_role("button", name="Send").click()
    route.get_by_text(f'{{"session_id":"{talk.id}","seq":2}}').wait_for()
    assert talk.state()["metadata"]["reward"] == 0.25


CUT = """() => [
  ...[...document.querySelectorAll("main .table-scroll")].filter((one) => one.scrollWidth > one.clientWidth),
  ...[...document.querySelectorAll("main thead th > *")].filter((one) => one.scrollWidth > one.parentNode.clientWidth),
].map((one) => `${one.getAttribute("aria-label") ?? one.textContent} ${one.scrollWidth}`)"""


def test_lists_fit_a_small_desk(watch: Watch, page_stand: PageStand) -> None:
    """No list scrolls to the side, and no title is cut."""
    watched = watch(page_stand.stand.server.base_url, width=1280)
    page, wrong = watched.open(), []
    for place in ("#/runs", "#/", "#/groups", f"#/group/{GROUP}", "#/checkpoints", f"#/checkpoint/{CHECKPOINT}"):
        watched.go(place)
        page.wait_for_selector(ROWS)
        wrong += [f"{place}: {found}" for found in settled(page, CUT)]
    assert wrong == []
