"""The page's frame and lists in a real browser, on a store such as a rollout leaves."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from importlib.util import find_spec
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from integration.stand import WEATHER, until
from playwright.sync_api import Locator, Page, expect

from e2e.page import ROWS, PageStand, Watch, Watched, barriers, copied, keys
from e2e.page_data import ADAPTER, AT_ONCE, FLAT, MISSING, RUN, SCORED, SIDE_BY_SIDE, STUCK, TASKS, rollouts
from ops.server import ROOT

pytestmark = pytest.mark.long

GROUP = next(iter(SCORED))
ANIMALS = "😀 <b>zebra</b> crossing"
COLUMNS, STEPS = ".sidebyside thead th:not(:first-child)", ".sidebyside tbody button[data-step]"


@pytest.fixture
def watched(watch: Watch, page_stand: PageStand) -> Watched:
    return watch(page_stand.stand.server.base_url, width=1440)


def settled(page: Page) -> Page:
    """Once the list is what was asked for."""
    page.wait_for_selector(".table-scroll[aria-busy=false] .foot:not(:empty)")
    return page


def cells(page: Page, key: str) -> dict[str, str]:
    """A row's texts by their columns' titles."""
    titles = page.locator("main thead th").all_inner_texts()
    texts = page.locator(f"{ROWS}[data-key='{key}'] > *").all_inner_texts()
    return dict(zip((title.strip() for title in titles), texts, strict=True))


def test_a_list_is_filtered_and_ordered_as_the_server_does(watched: Watched, page_stand: PageStand) -> None:
    def listed(**asked: Any) -> list[str]:
        rows = page_stand.stand.get("/ui/api/sessions", **{"sort": "updated_at", "limit": 500, **asked})["sessions"]
        return [row["session_id"] for row in rows]

    page = settled(watched.open())
    shown = keys(page)  # other tests may have added more sessions than fit in the window
    assert len(shown) >= min(len(listed()), 30)
    assert shown == listed()[: len(shown)]
    page.select_option("select[name=state]", "closed")
    page.fill("input[name=min_reward]", "0.9")
    expect(page.locator(ROWS)).to_have_count(4)
    assert keys(page) == listed(state="closed", min_reward=0.9)
    assert parse_qs(urlsplit(page.url).fragment.partition("?")[2]) == {"state": ["closed"], "min_reward": ["0.9"]}
    for order in ("descending", "ascending"):
        page.click("th button:has-text('Turns')")
        page.wait_for_selector(f"th[aria-sort={order}]:has-text('Turns')")
    by_turns = listed(state="closed", min_reward=0.9, sort="turns", order="asc")
    assert keys(settled(page)) == by_turns
    page.reload()
    assert keys(settled(page)) == by_turns
    assert page.input_value("select[name=state]") == "closed"

    watched.go("#/?state=erased")
    expect(page.locator(f"{ROWS}[data-key=withdrawn-1] .badge", has_text="erased")).to_be_visible()
    watched.go("#/?state=running&sort=running_since&order=asc")
    page.wait_for_selector(f"{ROWS}[data-key={page_stand.filled.in_turn[0]}] .badge:has-text('running')")
    assert keys(settled(page)) == page_stand.filled.in_turn, "the longest first"
    page.click(".chips >> text=Paused")
    expect(page.locator(ROWS)).to_have_count(1)
    assert keys(page) == [page_stand.filled.held]
    watched.go("#/?q=nobody")
    page.wait_for_selector("text=No session matches these filters")
    page.click("text=Show all sessions")
    page.wait_for_selector(ROWS)
    # What was typed a moment before the view is left acts no more: the address is the next view's.
    left = """async () => {
        const field = document.querySelector("input[name=q]");
        field.value = "gsm8k";
        field.dispatchEvent(new InputEvent("input", { bubbles: true }));
        location.hash = "#/groups";
        await new Promise((resolve) => setTimeout(resolve, 300)); // later than the form's own timer
        return location.hash;
    }"""
    assert page.evaluate(left) == "#/groups"


def test_rows_say_what_sessions_are_about_and_change_in_their_place(watched: Watched, page_stand: PageStand) -> None:
    """Columns are chosen and kept, and one that the list is sorted by is always there."""
    stand = page_stand.stand
    talk = stand.talk(session_id="about-1", metadata={"env": {"name": "web"}})
    talk.say("Is it warm?\nIn Bonn.", tools=[WEATHER], sim={**AT_ONCE, "text": "Where?"})
    talk.noted(note="looks like a loop", tags=["odd", "to check"])
    page = settled(watched.open("#/?q=about-"))
    expect(page.locator(f"{ROWS} td:has-text('Is it warm?')")).to_be_visible()
    row = cells(page, "about-1")
    assert (row["Task"], row["Last action"], row["Finish"]) == ("Is it warm? In Bonn.", "Where?", "stop")
    assert (row["Engine errors"], row["Tool errors"]) == ("0", "0")
    assert row["State"].endswith("idle")
    assert page.locator(f"{ROWS} .badge").get_attribute("title")
    assert page.locator(f"{ROWS} time").last.get_attribute("title"), "the absolute time"
    page.eval_on_selector(f"{ROWS}[data-key=about-1]", "row => { row.isTheSame = true }")
    talk.say(
        "Well?", tools=[WEATHER], sim={**AT_ONCE, "calls": [{"name": "get_weather", "arguments": {"city": "Bonn"}}]}
    )
    page.wait_for_selector(f"{ROWS} td.code:has-text('get_weather: Bonn')")
    assert page.eval_on_selector(f"{ROWS}[data-key=about-1]", "row => row.isTheSame")

    for number, name in enumerate(("parse", "render")):
        stand.talk(session_id=f"alike-{number}").say(f"You are in a repository. Mend {name}", sim=AT_ONCE)
    page = settled(watched.go("#/?q=alike-&order=asc"))
    expect(page.locator(ROWS)).to_contain_text(["… parse", "… render"])
    settled(watched.go("#/?q=about-"))

    page.click("text=Columns")
    page.get_by_label("Task").uncheck()
    page.get_by_label("Engine").last.check()
    page.get_by_label("Note and tags").check()
    page.fill("dialog input[name=metadata]", "env.name")
    page.keyboard.press("Enter")
    page.reload()
    row = cells(settled(page), "about-1")
    assert not {"Task", "In turn"} & row.keys()
    assert row["Engine"] != "–"
    assert row["env.name"] == "web"
    expect(page.locator(ROWS)).to_contain_text("odd, to check, looks like a loop")
    settled(watched.go("#/?stuck_s=60&sort=running_since&order=asc"))
    page.wait_for_selector("th[aria-sort=ascending]:has-text('In turn')")

    settled(watched.go("#/?sort=created_at&order=desc"))
    page.wait_for_selector("th[aria-sort=descending]:has-text('Created')")
    stand.talk(session_id="live-1")
    page.wait_for_selector("button.changed:has-text('Changes')")
    assert "live-1" not in keys(page)
    page.click("button.changed")
    expect(page.locator(ROWS).first).to_have_attribute("data-key", "live-1")
    expect(page.locator("button.changed")).to_be_hidden()

    page.fill("input[name=metadata]", "env.name=web")
    expect(page.locator(ROWS)).to_have_count(1)
    assert "metadata=env.name%3Dweb" in page.url
    watched.go(f"#/session/{talk.id}")
    page.locator(".sessiondetails > summary").click()
    command = copied(page, "Copy note as curl").replace("looks like", "was")
    subprocess.run(["bash", "-c", command], capture_output=True, timeout=30, check=True)
    expect(page.locator(".verdict", has_text="note")).to_contain_text("was a loop")
    page.locator(".verdict a", has_text="to check").click()
    expect(page.locator(ROWS)).to_have_count(1)


def test_all_by_keyboard(watched: Watched) -> None:
    page = settled(watched.open("#/?sort=created_at&order=asc"))
    first, second = keys(page)[:2]
    for pressed, current in (("j", first), ("j", second), ("k", first)):
        page.keyboard.press(pressed)
        page.wait_for_selector(f"tr[data-key='{current}'][aria-current]")
    page.keyboard.press("/")
    page.keyboard.type("jk")
    assert page.input_value("input[name=q]") == "jk"
    page.wait_for_selector("text=No session matches these filters")
    page.fill("input[name=q]", "")
    page.wait_for_selector(f"tr[data-key='{second}']")
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open] >> text=go to the filter")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="hidden")
    settled(page)
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/ui#/session/{second}")
    page.keyboard.press("g")
    page.keyboard.press("g")
    page.wait_for_url("**/ui#/groups")


def test_the_fleet_is_a_strip_that_folds(watched: Watched, page_stand: PageStand) -> None:
    """Its button names the engine that died; each kind of view remembers what somebody chose."""
    dead = urlsplit(page_stand.dead_engine).netloc
    page = watched.open()
    for what in (
        f".engines summary:has-text('1 dead: {dead}')",
        f"#fleet >> text=paused: {ADAPTER}",
        "#fleet a.figure.alert:has-text('Paused') >> text=1",
        "#fleet .figure:has-text('Weights') >> text=12",
    ):
        page.wait_for_selector(what)
    page.click(".engines summary")
    line = page.locator(f".engines tr[data-key='{page_stand.dead_engine}']")
    expect(line.locator(".badge")).to_contain_text("dead")
    expect(line.locator("td").last).not_to_have_text("–")
    line.locator("a").click()
    page.wait_for_selector("text=No session matches these filters")
    assert page.input_value("select[name=engine]") == page_stand.dead_engine

    one = f"#/session/{page_stand.filled.idle}"
    strip, fold = page.locator("#fleet"), page.locator("button.fold")
    watched.go(one)
    expect(strip).to_be_hidden()
    expect(fold).to_contain_text(f"1 dead: {dead}")
    watched.go("#/groups")
    expect(strip).to_be_visible()
    fold.press("Enter")
    expect(strip).to_be_hidden()
    watched.go(one)
    fold.press("Enter")
    expect(strip).to_be_visible()
    page.reload()
    expect(strip).to_be_visible()
    watched.go("#/")
    expect(strip).to_be_hidden()
    assert fold.get_attribute("aria-expanded") == "false"


def test_groups(watched: Watched) -> None:
    flat, missing = list(SCORED)[1:]
    page = settled(watched.open("#/groups?run=default"))
    assert set(SCORED) <= set(keys(page))
    assert "zero variance" in page.inner_text(f"{ROWS}[data-key='{flat}']")
    gaps = ", ".join(map(str, MISSING))
    expect(page.locator(f"{ROWS}[data-key='{missing}'] td").last).to_have_text(gaps)
    page.click("text=Zero variance")
    expect(page.locator(ROWS)).to_have_count(1)
    assert keys(page) == [flat]
    page.click(f"text={flat}")
    page.wait_for_selector(".flag:has-text('zero')")

    watched.go(f"#/group/{quote(missing, safe='')}")
    page.wait_for_selector(f".flag:has-text('{gaps}')")
    for link in ("In the session list", "Export", "Side by side"):
        expect(page.get_by_role("link", name=link, exact=True)).to_have_attribute(
            "href", re.compile(r"[?&]run=default\b")
        )
    rewards = SCORED[missing]
    dots = page.locator("svg.plot a")
    expect(dots).to_have_count(len(rewards))
    names = [dots.nth(at).get_attribute("aria-label") or "" for at in range(len(rewards))]
    assert sorted(float(name.split(": ")[1].split(" ")[0]) for name in names) == sorted(rewards)
    assert len(keys(page)) == len(rewards)
    page.wait_for_selector(f"details summary:text('Task') >> xpath=.. >> text={TASKS[2]}")
    for first in ("aime-02", "aime-00"):
        page.click("main th button:has-text('Advantage')")
        expect(page.locator(ROWS).first).to_have_attribute("data-key", first)
    row, off = cells(page, "aime-00"), rewards[0] - statistics.mean(rewards)
    assert (row["Reward"], row["Advantage"]) == (f"{rewards[0]:.3f}", f"{off:.3f}")
    assert row["÷ std. dev."] == f"{off / (statistics.stdev(rewards) + 1e-6):.3f}"
    dots.first.click()
    page.wait_for_url("**/ui#/session/aime-0*")


def test_a_run_is_chosen_at_the_top_and_stays_in_links(watched: Watched, page_stand: PageStand) -> None:
    """Its first view has what the server says of it. Lists, links and keys keep to it, and so does the strip."""
    stand = page_stand.stand
    page = settled(watched.open("#/groups"))
    choice, before = page.get_by_label("Run", exact=True), len(keys(page))
    choice.focus()
    choice.select_option(RUN)
    page.wait_for_url(f"**/ui#/groups?run={RUN}")
    expect(page.locator(ROWS)).to_have_count(6)
    assert before > 6
    page.locator(f"{ROWS} a", has_text=FLAT).click()
    page.wait_for_url(f"**/ui#/group/maze%2Fflat?run={RUN}")
    expect(page.locator(ROWS)).to_have_count(4)
    page.get_by_role("link", name="In the session list").click()
    expect(page.locator(ROWS)).to_have_count(4)
    page.keyboard.press("g")
    page.keyboard.press("s")
    expect(page.locator(ROWS)).to_have_count(21)
    assert f"run={RUN}" in page.url
    page.get_by_role("navigation").get_by_role("link", name="Runs").click()

    found = stand.get(f"/ui/api/runs/{RUN}")
    lines = page.locator(".versiontable tbody tr")
    expect(lines).to_have_count(5)
    for line, one in zip(lines.all_inner_texts(), found["versions"], strict=True):
        texts = line.split()
        assert texts[:3] == [str(one["version"]), f"{one['mean_reward']:.3f}", str(one["rewarded"])]
        assert f"{one['staleness']:.3f}" in texts
    for title in ("Reward", "Engine errors", "Tool errors", "Staleness"):
        plot = page.locator(".plots section", has=page.get_by_role("heading", name=f"{title}, "))
        expect(plot.locator("circle")).to_have_count(5)
    expect(page.locator("main .figure", has_text="Failed attempts")).to_contain_text("sandbox 1")

    def table(title: str) -> Locator:
        return page.locator("main section", has=page.get_by_role("heading", name=title))

    expect(table("Zero variance").locator("tbody th")).to_have_text([FLAT])
    expect(table("Open longest").locator("tbody th")).to_have_text([STUCK])
    expect(table("Lowest mean reward").locator("tbody th").first).to_have_text("maze/5")
    expect(table("Gates that are shut")).to_contain_text("All gates are open.")
    assert stand.http.post(f"/runs/{RUN}/fleet/pause", json={"lease_s": 600}).status_code == 200
    expect(table("Gates that are shut").locator("tbody tr")).to_contain_text("the run's")
    expect(page.locator("#fleet")).to_contain_text("paused")
    assert stand.http.post(f"/runs/{RUN}/fleet/resume").status_code == 200
    expect(table("Gates that are shut")).to_contain_text("All gates are open.")
    expect(page.locator("#fleet .figure:has-text('Closed')")).to_contain_text("20")
    expect(page.locator("#fleet .figure:has-text('Database')")).to_be_hidden()

    choice.select_option("")
    page.wait_for_url("**/ui#/runs")
    assert {"default", RUN} <= set(keys(settled(page)))
    state = page.locator(f"tr[data-key='{RUN}'] .badge")
    for path, told in (("pause", "paused"), ("resume", "open")):
        expect(state).not_to_have_text(told)
        assert stand.http.post(f"/runs/{RUN}/fleet/{path}").status_code == 200
        expect(state).to_have_text(told)
    page.locator(f"{ROWS} a", has_text=RUN).click()
    expect(page.locator("main h1")).to_have_text(RUN)


def test_what_is_said_is_found(watched: Watched, page_stand: PageStand) -> None:
    stand = page_stand.stand
    for number in range(25):
        text = ANIMALS if number == 3 else f"an elephant, number {number}"
        stand.talk(session_id=f"found-{number:02}", metadata={"task": f"t{number % 2}"}).say(text, sim=AT_ONCE)
    until(lambda: stand.get("/search", q="elephant", limit=100)["is_current"])
    page = watched.open("#/")
    page.keyboard.press("g")
    page.keyboard.press("f")
    expect(page.locator("input[name=q]")).to_be_focused()
    page.keyboard.type("zebra")
    hit = page.locator(".hits li")
    expect(hit).to_have_count(1)
    expect(hit.locator("mark")).to_have_text("zebra")
    assert ANIMALS in hit.inner_text(), "text, not markup"
    assert "q=zebra" in page.url
    assert barriers(page) == []
    hit.locator("a").first.click()
    page.wait_for_url("**/ui#/session/found-03?turn=1")
    page.go_back()
    expect(page.locator("input[name=q]")).to_have_value("zebra")
    expect(page.locator("body")).not_to_be_focused()
    settled(watched.go("#/groups"))  # the form is made anew with the next view
    watched.go("#/search?q=elephant&role=user")
    expect(hit).to_have_count(20)
    page.click("text=Load more")
    expect(hit).to_have_count(24)
    page.fill("input[name=metadata]", "task=t1")
    expect(hit).to_have_count(11)
    page.fill("input[name=q]", "nobodysaidthis")
    expect(page.locator("main [role=status]").first).to_contain_text("0 hits")


def test_exports(watched: Watched, page_stand: PageStand) -> None:
    stand, asked = page_stand.stand, {"group_id": GROUP, "min_reward": 0.5}
    rows = stand.rows(**asked)
    preview = stand.get("/ui/api/exports", **asked)
    assert (preview["complete"], preview["rows"]) == (True, len(rows))
    page = watched.open(f"#/exports?group_id={quote(GROUP, safe='')}&min_reward=0.5")
    page.wait_for_selector("text=sessions looked at: all")
    page.wait_for_selector("h2:has-text('First rows')")
    assert page.inner_text(".facts .figure:has-text('Rows') .value") == str(len(rows))
    assert page.locator(".fields thead th").all_inner_texts() == ["Field", "Row 1", "Row 2", "Row 3"]
    line = page.locator(".fields tr:has(th code:text-is('tokens')) td").all_inner_texts()
    ids = [row["tokens"] for row in rows[:3]]
    assert line == [f"{len(one)} × [{', '.join(map(str, [*one[:4], '…', *one[-4:]]))}]" for one in ids]
    size = len(stand.http.get("/export", params=asked).content)
    assert f"{size / 1024:.0f} KiB"[:1] in page.inner_text(".facts .figure:has-text('estimate') .value")
    links = page.eval_on_selector_all("a[download]", "links => links.map(link => link.href)")
    assert len(links) == len(set(links)) == 4 + 2
    for link in (links[0], links[-1]):
        assert parse_qs(urlsplit(link).query)["group_id"] == [GROUP]
        assert len(stand.http.get(link).text.splitlines()) == len(rows)
    # The form has all parameters but the format, which the links choose, the cursor and `url_s`, with their values.
    fields: dict[str, list[str]] = page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll("form.filters [name]")].map(
            ({ name, options = [] }) => [name, [...options].map(({ value }) => value).filter(Boolean)]))"""
    )
    parameters = stand.get("/openapi.json")["paths"]["/export"]["get"]["parameters"]
    known = {one["name"]: one["schema"] for one in parameters}
    assert fields.keys() == known.keys() - {"format", "cursor", "url_s"}
    assert {name: choices for name, choices in fields.items() if not set(choices) <= _choices(known[name])} == {}
    assert set(fields["shape"]) == _choices(known["shape"])

    watched.go("#/exports?max_staleness=0&weight_version=20")
    page.wait_for_selector("main th:has-text('stale')")
    missing = stand.get("/ui/api/exports", max_staleness=0, weight_version=20)["missing"]
    numbers = [(f"{one['lost_tokens']:,}", f"{one['count']:,}") for one in missing]
    shown = page.locator("table[aria-label='What is left out'], [aria-label='What is left out'] table").first
    cells = shown.locator("tbody tr").all()
    assert [tuple(row.locator("td.number").all_inner_texts()) for row in cells] == numbers
    page.locator("main td a").first.click()
    page.wait_for_url("**/ui#/session/*")


def _choices(schema: dict[str, Any]) -> set[str]:
    """What a parameter's schema enumerates."""
    cases = (schema, *schema.get("anyOf", ()))
    return {value for one in cases for value in (*one.get("enum", ()), *filter(None, [one.get("const")]))}


KNOWN = (
    *("pandas", "polars", "datasets", "slime", "miles", "verl", "skyrl", "trl-async", "openenv", "tinker"),
    *("torch", "xtuner", "rllm", "prime_rl"),
)
"""Packages that code of the page needs beside the client's, or its shape, which need not be here."""


def test_the_code_that_loads_an_export_runs(watched: Watched) -> None:
    """For each shape; what needs a package that is not here is only compiled."""
    page, ran = watched.open("#/exports"), set()
    shapes = page.eval_on_selector_all("select[name=shape] option", "all => all.map((one) => one.value)")
    for shape in shapes:
        watched.go(f"#/exports?group_id={quote(GROUP, safe='')}&advantage=grpo&shape={shape}")
        chips = page.locator(".chips button")
        expect(chips.first).to_have_text(shape if shape not in ("", "turnlog") else "pandas")
        for name in [shape, "pandas", "polars", "datasets", "Python"] if shape in ("", "trl") else [shape]:
            if not name or name == "turnlog":
                continue
            chips.get_by_text(name, exact=True).click()
            code = page.inner_text("pre.code")
            compile(code, name, "exec")
            if name != "atropos" and all(find_spec(one) for one in KNOWN if one == name or one in code):
                done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
                assert done.returncode == 0, f"{code}\n{done.stderr}"
                ran.add(name)
    assert {"trl", "tree", "Python"} <= ran


def test_the_scripts_pure_parts(watched: Watched) -> None:
    """In the browser that will run them. Of a view's requests a newer one, and the view's end, abort the last."""
    found = watched.open().evaluate(
        """async () => {
            const [route, format, { View }] = await Promise.all(
                ["route", "format", "view"].map((name) => import(`/ui/static/${name}.js`)));
            const id = "a/b?c#d%";
            const shown = [];
            const view = new View(document.createElement("div"));
            const load = () => {
                const answer = Promise.withResolvers();
                const request = (signal) => {
                    signal.addEventListener("abort", () => answer.reject(signal.reason));
                    return answer.promise;
                };
                return { answer, done: view.read(request, (value) => shown.push(value)) };
            };
            const [first, second] = [load(), load()];
            second.answer.resolve("second");
            await Promise.all([first.done, second.done]);
            const failed = load();
            failed.answer.reject(Object.assign(new Error("gone"), { code: "not_found" }));
            await failed.done;
            const left = load();
            view.close();
            await left.done;
            return {
                back: route.parse(route.groupHref(id)).id,
                none: ["#/nowhere", "#/session/", "#/session/%", "#/session/a/b"].map((hash) => route.parse(hash)),
                moment: route.parse(route.sessionHref("x", { seq: 4 })).query.get("seq"),
                durations: [0.25, 9.5, 59, 61, 7260, 90000].map(format.duration),
                bytes: [0, 1023, 1536, 2 ** 31].map(format.bytes),
                decimals: [null, 0, 0.5, -12.25, 1e-9, 12345678].map((one) => format.decimal(one)),
                ranges: format.ranges([7, 1, 2, 3, 9]),
                shown,
                problem: view.problem.textContent,
            };
        }"""
    )
    assert found == {
        "back": "a/b?c#d%",
        "none": [None] * 4,
        "moment": "4",
        "durations": ["250 ms", "9.5 s", "59 s", "1 min 01 s", "2 h 01 min", "1 d 1 h"],
        "bytes": ["0 B", "1023 B", "1.5 KiB", "2.0 GiB"],
        "decimals": ["–", "0.000", "0.500", "-12.250", "1.00e-9", "1.23e+7"],
        "ranges": "1–3, 7, 9",
        "shown": ["second"],
        "problem": "not_foundgoneTry again",
    }


def read(page: Page, count: int) -> Locator:
    """The columns' heads, once every rollout and the texts in the document have been read."""
    expect(page.locator(f"{COLUMNS} .reward")).to_have_count(count)
    expect(page.locator(".sidebyside >> text=Loading …")).to_have_count(0)
    return page.locator(COLUMNS)


def names(page: Page, count: int) -> list[str]:
    return read(page, count).locator("strong a").all_inner_texts()


def test_a_groups_rollouts_stand_side_by_side(watch: Watch, page_stand: PageStand) -> None:
    """The best against the worst, the others folded; the first differing step is whole, and each head names it."""
    stand = page_stand.stand
    ids = rollouts(stand)
    watched = watch(stand.server.base_url, width=2200, height=1000)
    page = watched.open(f"#/group/{quote(SIDE_BY_SIDE, safe='')}")
    page.click("a:text('Side by side')[href$='?run=default']")  # the run is known once the group has been read
    rewards = [(number * 3 % 5) / 4 for number in range(len(ids))]
    best, worst = (rewards.index(end(rewards)) for end in (max, min))
    others = [number for number in range(len(ids)) if number not in (best, worst)]
    assert names(page, len(ids)) == [f"attempt {number}" for number in (best, worst, *others)]
    heads = page.locator(COLUMNS)
    expect(heads.nth(0)).to_contain_text("The others are compared with this one.")
    expect(heads.nth(0)).to_contain_text("resolved 1.10 · length -0.10")
    said = "Step 2: attempt 0 gets “status in transit” where attempt 3 gets “status delivered”."
    expect(page.locator(".differs")).to_have_text(said)
    expect(page.locator("tr.common")).to_have_text("1 step is the same. show")
    first = page.locator(".sidebyside tbody tr").nth(1)
    expect(first.locator("th button")).to_have_attribute("aria-expanded", "true")
    expect(first.locator("td").nth(0).locator("del").last).to_have_text("delivered")
    assert first.locator("td").all_inner_texts()[2:] == ["=", "≠", "≠", "="]
    page.get_by_label("Steps of attempt 1").focus()
    page.keyboard.press("Enter")
    expect(heads.nth(2)).to_contain_text("Step 3: attempt 1 answers “")
    expect(page.get_by_label("Steps of attempt 1")).to_be_focused()

    page.select_option("select[name=order]", "attempt")
    page.wait_for_url("**sort=attempt*")
    expect(page.locator("td.unequal")).to_have_count(len(ids) - 1)
    assert names(page, len(ids)) == [f"attempt {number}" for number in range(len(ids))]
    expect(heads.nth(1)).to_contain_text(
        "Step 2: attempt 1 gets “status delivered” where attempt 0 gets “status in transit”."
    )
    expect(first.locator("td").nth(1).locator("ins").last).to_have_text("delivered")
    for at in (2, 0):
        page.locator(STEPS).nth(at).focus()
        page.keyboard.press("Enter")
        expect(page.locator(STEPS).nth(at)).to_have_attribute("aria-expanded", "true")
        expect(page.locator(STEPS).nth(at)).to_be_focused()
    read(page, len(ids))
    assert barriers(page) == []
    for key in ("Tab", "Tab", "Tab", "Enter"):  # the task, the first step, its turn
        page.keyboard.press(key)
    page.wait_for_url(f"**/ui#/session/{ids[0]}?run=default&turn=1*")
    page.go_back()

    page.click("text=First difference")
    page.reload()
    assert names(page, len(ids))[0] == "attempt 0"
    head = page.locator(COLUMNS, has=page.get_by_label("branch of retail-03"))
    turns = head.inner_text().split(" turns,")[0][-1]
    head.locator("select").select_option("0")
    expect(head).not_to_contain_text(f"{turns} turns,")
    expect(head.locator("select")).to_have_value("0")

    settled(watched.go("#/?q=retail-"))
    for one in ids[1:3]:
        page.get_by_label(f"pick {one}").check()
    page.click("text=2 side by side")
    assert names(page, 2) == ["attempt 1", "attempt 2"]
    assert "sessions=" in page.url
    watched.go("#/rollouts?sessions=" + ",".join(f"nobody-{number}" for number in range(300)))
    page.get_by_text("the first 250 of 300 rollouts").wait_for()
    watched.go("#/rollouts?sessions=nobody")
    expect(page.locator(f"{COLUMNS} .note")).to_have_text(["session nobody does not exist"])


def test_what_two_agents_do_otherwise_is_said(watch: Watch, page_stand: PageStand) -> None:
    """Branches too differ where more than ids of calls does. One step more shifts nothing, and a turn comes into an
    open page. A large group has pages, and a long rollout parts."""
    stand = page_stand.stand
    call = {**AT_ONCE, "text": "I look.", "calls": [{"name": "get_weather", "arguments": {"city": "Bonn"}}]}
    sunny = {**AT_ONCE, "text": "It is sunny."}
    replies = [[sunny], [call], [call, sunny], []]
    for number, sims in enumerate(replies, 1):
        talk = stand.talk(group_id="words", attempt=number)
        for sim in ({**AT_ONCE, "text": "Hello."}, *sims):
            talk.say("Weather?", tools=[WEATHER], sim=sim)
    watched = watch(stand.server.base_url, width=2200, height=1000)
    page = watched.open("#/group/words/rollouts")
    read(page, 4)
    said = [
        "Step 2: attempt 2 calls `get_weather: Bonn` where attempt 1 answers “It is sunny.”.",
        "After step 1: attempt 3 calls `get_weather: Bonn` in addition.",
        "Step 2: attempt 4 has ended where attempt 1 answers “It is sunny.”.",
    ]
    expect(page.locator(".differs")).to_have_text(said)
    assert [step.strip() for step in page.locator(STEPS).all_inner_texts()] == ["show", "+", "2", "+"]
    talk.say("Weather?", tools=[WEATHER], sim=sunny)
    expect(page.locator(".differs")).to_have_text(said[:2])
    expect(page.locator(".sidebyside tbody tr").nth(2).locator("td").nth(3)).to_contain_text("It is sunny.")
    tree = stand.talk(history="tree")
    for result in ("sunny", "rain"):
        tree.messages = []
        (called,) = tree.say("One", sim=call).json()["choices"][0]["message"]["tool_calls"]
        tree.add({"role": "tool", "tool_call_id": called["id"], "content": result}, sim=AT_ONCE)
    watched.go(f"#/session/{tree.id}?branch=1&tab=tree")
    page.locator(".branch > button", has_text="1 retry One").wait_for()
    page.get_by_role("link", name="compare with branch 0").click()
    read(page, 2)
    expect(page.locator(".differs")).to_have_text("Step 1: branch 1 gets “rain” where branch 0 gets “sunny”.")

    for number in range(14):
        talk = stand.talk(group_id="many", attempt=number)
        for step in range(105 if number == 13 else 2):
            talk.say(str(step), sim={**AT_ONCE, "text": f"{number} {step}"})
    watched.go("#/group/many/rollouts")
    read(page, 12)
    page.get_by_role("button", name="next").click()
    assert names(page, 2) == ["attempt 12", "attempt 13"]
    assert "from=12" in page.url
    expect(page.locator(STEPS)).to_have_count(100)
    page.get_by_role("button", name="6 more rows").click()
    expect(page.locator(STEPS)).to_have_count(106)


def test_one_request_of_a_view_at_a_time(watched: Watched) -> None:
    """A newer one aborts the one before, and so does the view's end; changes that come together are read once."""
    page = watched.open()
    assert page.evaluate(
        """async () => {
            const { View } = await import("/ui/static/view.js");
            const shown = [];
            const asked = [];
            class Example extends View {
                load() {
                    const answer = Promise.withResolvers();
                    const request = (signal) => {
                        signal.addEventListener("abort", () => answer.reject(signal.reason));
                        return answer.promise;
                    };
                    return { answer, done: this.read(request, (value) => shown.push(value)) };
                }
                refresh() {
                    asked.push(this.closed.aborted);
                }
            }
            const view = new Example(document.createElement("div"));
            const [first, second] = [view.load(), view.load()];
            second.answer.resolve("second");
            await Promise.all([first.done, second.done]);
            const failed = view.load();
            failed.answer.reject(Object.assign(new Error("gone"), { code: "not_found" }));
            await failed.done;
            const problem = view.problem.textContent;
            await Promise.all([view.changed(), view.changed(), view.changed()]);
            const left = view.load();
            view.close();
            await left.done;
            return { shown, asked, problem, after: view.problem.textContent };
        }"""
    ) == {
        "shown": ["second"],
        "asked": [False, False],
        "problem": "not_foundgoneTry again",
        "after": "not_foundgoneTry again",
    }
