"""The page on a phone, a tablet and a wall, and addresses that name nothing."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import quote

import pytest
from integration.stand import user
from playwright.sync_api import Page, expect

from e2e.page import PageStand, Watched, barriers
from e2e.page_data import SCORED

pytestmark = pytest.mark.long

Watch = Callable[..., Watched]

GROUP = quote(next(iter(SCORED)), safe="")
VIEWS = {
    "#/": "main tbody tr[data-key]",
    "#/groups": "main tbody tr[data-key]",
    f"#/group/{GROUP}": "svg.plot",
    f"#/group/{GROUP}/rollouts": ".sidebyside td",
    "#/versions": "main tbody tr[data-key]",
    "#/search": "form.filters",
    "#/exports": "a[download]",
    "#/checkpoints": "main tbody tr[data-key]",
    "#/checkpoint/step-40": "main tbody tr[data-key]",
    "#/session/deep-research-5": ".said",
    "#/rollouts?sessions=deep-research-5@0,deep-research-5@2": ".sidebyside .text",
    "#/session/deep-research-5?tab=tokens": ".tokens .tok",
}
"""Addresses, and what is there once the view is."""

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


def settled(page: Page, script: str) -> list[str]:
    """What is wrong once the page, which goes on reading and drawing, has had a second."""
    for _ in range(10):
        found: list[str] = page.evaluate(script)
        if not found:
            break
        page.wait_for_timeout(100)
    return found


SIZES = {"light": ((390, 844),), "dark": ((1440, 900), (768, 1024), (2560, 1440))}
"""By the page's scheme. It is opened at the first size, and then made narrower and wider."""


@pytest.mark.parametrize("scheme", SIZES)
def test_every_view_fits_and_has_no_barrier_that_axe_finds(watch: Watch, page_stand: PageStand, scheme: str) -> None:
    """Nothing is wider than the window, and no view scrolls into an empty page."""
    filled, (first, *others) = page_stand.filled, SIZES[scheme]
    long = page_stand.stand.talk(session_id=f"long-{scheme}")
    for number in range(80):
        long.say(str(number), sim={"latency_s": 0, "completion_tokens": 2})
    views = VIEWS | {f"#/session/{long.id}": ".said", f"#/session/{long.id}?tab=tokens": ".tokens .tok"}
    views |= {f"#/session/{filled.refused}?tab=stages": ".stagebar", f"#/session/{filled.in_turn[0]}": ".said"}
    views |= {f"#/session/{filled.rolled_back}?seq=6&tab=events": ".events .later"}
    views |= {f"#/session/{filled.tree}?tab=tree&branch=1": ".tree .spot"}
    watched = watch(page_stand.stand.server.base_url, scheme=scheme, width=first[0], height=first[1])
    page, wrong = watched.open(), []
    for place, ready in views.items():
        watched.go(place)
        page.locator(ready).first.wait_for()
        found = barriers(page) if long.id not in place else []
        wrong += [f"{place}: {one}" for one in [*page.evaluate(TOO_TALL), *found]]
        for width, height in (first, *others):
            page.set_viewport_size({"width": width, "height": height})
            wrong += [f"{place} at {width}: {one}" for one in settled(page, TOO_WIDE)]
        page.set_viewport_size({"width": first[0], "height": first[1]})
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("width", [390, 768])
def test_names_are_in_sight_also_while_a_list_is_scrolled_sideways(
    watch: Watch, page_stand: PageStand, width: int
) -> None:
    watched = watch(page_stand.stand.server.base_url, width=width)
    for place in ("#/groups", "#/"):
        page = watched.open(place)
        name = page.locator("main tbody tr[data-key] th a").first
        expect(name).to_be_in_viewport()
        scroller = page.locator("main .table-scroll")
        assert scroller.evaluate("one => { one.scrollLeft = 300; return one.scrollLeft }") > 0
        expect(name).to_be_in_viewport()
        cell = page.locator("main tbody tr[data-key] th").first.bounding_box()
        assert cell is not None
        assert cell["width"] >= 100


def tops(page: Page, selector: str) -> list[float]:
    """Where the elements begin, in pixels from the window's top."""
    found: list[float] = page.eval_on_selector_all(selector, "all => all.map((one) => one.getBoundingClientRect().top)")
    return found


def test_the_strip_is_one_line_while_an_adapter_is_paused(watch: Watch, page_stand: PageStand) -> None:
    stand = page_stand.stand
    watched = watch(stand.server.base_url, width=1440)
    talk = stand.talk(session_id="strip-1")
    talk.say("one", max_tokens=4)
    for fault in ("status_500", "not_json"):
        assert talk.chat([*talk.messages, user("x")], sim={"fault": fault}).status_code >= 500
    page = watched.open()
    page.wait_for_selector("#fleet >> text=paused:")
    page.wait_for_selector("#fleet .errors >> text=upstream_invalid")
    expect(page.locator("#fleet .figure:has-text('Engine p50')")).to_contain_text("ms")
    for width in (1440, 1200, 768):
        page.set_viewport_size({"width": width, "height": 900})
        assert width == 768 or len(set(tops(page, "#fleet > *"))) == 1, width
        cut = page.eval_on_selector_all(
            "#fleet > *", "parts => parts.filter((one) => one.scrollWidth > one.clientWidth).length"
        )
        assert cut == 0, width


def test_the_forms_are_folded_on_a_phone(watch: Watch, page_stand: PageStand) -> None:
    page = watch(page_stand.stand.server.base_url, width=390).open()
    field = page.locator("input[name=q]")
    expect(field).to_be_hidden()
    page.keyboard.press("/")
    expect(field).to_be_focused()
    page.keyboard.type("gsm8k-00")
    expect(page.locator("main tbody tr[data-key]")).to_have_count(1)


def test_what_is_copied_and_where_one_is_are_lines_that_scroll_on_a_phone(watch: Watch, page_stand: PageStand) -> None:
    page = watch(page_stand.stand.server.base_url, width=390).open("#/session/deep-research-5")
    page.locator(".sessiondetails > summary").click()
    last = page.get_by_role("button", name="Copy note as curl")
    last.wait_for()
    assert len(set(tops(page, "[aria-label=Session] .switches button"))) == 1
    last.scroll_into_view_if_needed()
    expect(last).to_be_in_viewport(ratio=0.9)
    page = watch(page_stand.stand.server.base_url, width=390).open("#/checkpoints")
    expect(page.locator("nav a[aria-current]")).to_be_in_viewport(ratio=0.9)


@pytest.mark.parametrize(
    ("place", "title"),
    [
        ("#/session/nobody", "There is no session “nobody”."),
        ("#/group/nobody", "There is no group “nobody”."),
        ("#/checkpoint/nobody", "There is no checkpoint “nobody”."),
        ("#/nowhere/at/all", "There is no view at #/nowhere/at/all"),
    ],
)
def test_an_address_without_anything_says_so(watch: Watch, page_stand: PageStand, place: str, title: str) -> None:
    watched = watch(page_stand.stand.server.base_url)
    watched.expected = ("404 (Not Found)",)
    page = watched.open(place)
    expect(page.locator("main > .message strong")).to_have_text(title)
    assert page.locator("main > *").count() == 1
    page.locator("main > .message a").first.click()
    page.wait_for_selector("main tbody tr[data-key]")


def test_a_session_is_shown_as_soon_as_it_exists(watch: Watch, page_stand: PageStand) -> None:
    watched = watch(page_stand.stand.server.base_url)
    watched.expected = ("404 (Not Found)",)
    page = watched.open("#/session/expected-soon")
    expect(page.locator("main > .message")).to_contain_text("There is no session")
    page_stand.stand.talk(session_id="expected-soon")
    expect(page.locator("main h1")).to_have_text("expected-soon")


def test_a_branch_without_a_row_can_be_chosen_too(watch: Watch, page_stand: PageStand) -> None:
    watched = watch(page_stand.stand.server.base_url)
    talk = page_stand.stand.talk(session_id="two-segments", on_divergence="segment", rollback_window=1)
    talk.say("one", max_tokens=4)
    talk.messages = []
    talk.say("begin anew", max_tokens=4)
    talk.messages = []
    talk.say("and again", max_tokens=4)
    page = watched.open(f"#/session/{talk.id}?tab=tokens")
    page.wait_for_selector(".tokens .tok")
    every = page.get_by_label("branch", exact=True).locator("option").all_inner_texts()
    assert [one.split(":")[0] for one in every] == ["0", "1", "2"]
    page.get_by_label("branch", exact=True).select_option("1")
    page.wait_for_selector(".tokens .turnmark:has-text('turn 2')")


def test_a_view_that_is_left_leaves_nothing_behind(watch: Watch, page_stand: PageStand) -> None:
    """The nodes that the browser keeps, after a visit of all views and after two more."""
    watched = watch(page_stand.stand.server.base_url)
    page = watched.open()
    inspector = page.context.new_cdp_session(page)
    inspector.send("Performance.enable")

    def nodes() -> int:
        watched.go("#/nowhere")
        page.locator("main > .message").wait_for()
        inspector.send("HeapProfiler.collectGarbage")
        metrics = inspector.send("Performance.getMetrics")["metrics"]
        return int(next(one["value"] for one in metrics if one["name"] == "Nodes"))

    kept = []
    for visits in (1, 2):
        for _ in range(visits):
            for place, ready in VIEWS.items():
                watched.go(place)
                page.locator(ready).first.wait_for()
        kept.append(nodes())
    assert kept[1] < kept[0] + 150, kept
