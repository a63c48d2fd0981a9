"""The page's frame and lists in a real browser, on a store such as a rollout leaves."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from integration.stand import WEATHER
from playwright.sync_api import Page, expect

from e2e.page import PageStand, Watched
from e2e.page_data import ADAPTER, AT_ONCE, MISSING, SCORED, TASKS
from ops.server import ROOT

pytestmark = pytest.mark.long

Watch = Callable[..., Watched]

ROWS = "main tbody tr[data-key]"
MARKUP = '<img src=x onerror="window.__pwned=1"><script>window.__pwned=1</script>'


@pytest.fixture
def watched(watch: Watch, page_stand: PageStand) -> Watched:
    return watch(page_stand.stand.server.base_url)


@pytest.fixture(scope="module")
def api(page_stand: PageStand) -> Callable[..., Any]:
    """What the server says, to compare the page with."""

    def ask(path: str, **parameters: Any) -> Any:
        response = page_stand.stand.http.get(path, params=parameters)
        assert response.status_code == 200, response.text
        return response.json()

    return ask


def keys(page: Page) -> list[str]:
    """The ids of the rows that are shown, in their order."""
    found: list[str] = page.eval_on_selector_all(ROWS, "rows => rows.map(row => row.dataset.key)")
    return found


def settled(page: Page) -> Page:
    """Once the list is what was asked for."""
    page.wait_for_selector(".table-scroll[aria-busy=false] .foot:not(:empty)")
    return page


def test_list_filters_and_orders_are_the_servers(watched: Watched, api: Callable[..., Any]) -> None:
    page = settled(watched.open())
    everything = api("/ui/api/sessions", sort="updated_at", limit=500)
    shown = keys(page)  # other tests may have added more sessions than fit in the window
    assert len(shown) >= min(len(everything["sessions"]), 30)
    assert shown == [row["session_id"] for row in everything["sessions"]][: len(shown)]

    page.select_option("select[name=state]", "closed")
    page.fill("input[name=min_reward]", "0.9")
    expect(page.locator(ROWS)).to_have_count(4)
    closed = api("/ui/api/sessions", sort="updated_at", state="closed", min_reward=0.9, limit=500)
    assert keys(page) == [row["session_id"] for row in closed["sessions"]]
    assert parse_qs(urlsplit(page.url).fragment.partition("?")[2]) == {"state": ["closed"], "min_reward": ["0.9"]}

    page.click("th button:has-text('Turns')")
    page.wait_for_selector("th[aria-sort=descending]:has-text('Turns')")
    page.click("th button:has-text('Turns')")
    page.wait_for_selector("th[aria-sort=ascending]:has-text('Turns')")
    by_turns = api("/ui/api/sessions", sort="turns", order="asc", state="closed", min_reward=0.9, limit=500)
    settled(page)
    assert keys(page) == [row["session_id"] for row in by_turns["sessions"]]
    page.reload()
    settled(page)
    assert page.input_value("select[name=state]") == "closed"
    assert keys(page) == [row["session_id"] for row in by_turns["sessions"]]

    watched.go("#/?state=erased")
    expect(page.locator(f"{ROWS}[data-key=withdrawn-1] .badge", has_text="erased")).to_be_visible()


def test_what_is_stuck_and_what_is_held(watched: Watched, page_stand: PageStand) -> None:
    page = settled(watched.open("#/?state=running&sort=running_since&order=asc"))
    assert keys(page) == page_stand.filled.in_turn, "the longest first"
    assert page.inner_text(f"{ROWS} .badge").endswith("running")
    page.click(".chips >> text=Paused")
    expect(page.locator(ROWS)).to_have_count(1)
    assert keys(page) == [page_stand.filled.held]
    watched.go("#/?q=nobody")
    page.wait_for_selector("text=No session matches these filters")
    page.click("text=Show all sessions")
    page.wait_for_selector(ROWS)


def cells(page: Page, key: str) -> dict[str, str]:
    """A row's texts by their columns' titles."""
    titles = page.locator("main thead th").all_inner_texts()
    texts = page.locator(f"{ROWS}[data-key='{key}'] > *").all_inner_texts()
    return dict(zip((title.strip(" ▲▼") for title in titles), texts, strict=True))


def test_a_row_says_what_a_session_is_about(watched: Watched, page_stand: PageStand) -> None:
    """And follows it; the columns are chosen, kept, and one that the list is sorted by is always there."""
    talk = page_stand.stand.talk(session_id="about-1", metadata={"env": {"name": "web"}})
    talk.say("Is it warm?\nIn Bonn.", tools=[WEATHER], sim={**AT_ONCE, "text": "Where?"})
    page = settled(watched.open("#/?q=about-"))
    expect(page.locator(f"{ROWS} td:has-text('Is it warm?')")).to_be_visible()
    row = cells(page, "about-1")
    assert (row["Task"], row["Last action"], row["Finish"], row["Errors"]) == ("Is it warm? …", "Where?", "stop", "0")
    assert row["State"].endswith("idle")
    assert page.locator(f"{ROWS} .badge").get_attribute("title")
    assert page.locator(f"{ROWS} time").last.get_attribute("title"), "the absolute time"
    calls = {**AT_ONCE, "calls": [{"name": "get_weather", "arguments": {"city": "Bonn"}}]}
    talk.say("Well?", tools=[WEATHER], sim=calls)
    page.wait_for_selector(f"{ROWS} td.code:has-text('get_weather: Bonn')")

    page.click("text=Columns")
    page.get_by_label("Task").uncheck()
    page.get_by_label("Engine").last.check()
    page.fill("dialog input[name=metadata]", "env.name")
    page.keyboard.press("Enter")
    page.reload()
    settled(page)
    row = cells(page, "about-1")
    assert "Task" not in row
    assert row["Engine"] != "–"
    assert row["env.name"] == "web"
    assert "In turn" not in row
    settled(watched.go("#/?stuck_s=60&sort=running_since&order=asc"))
    page.wait_for_selector("th[aria-sort=ascending]:has-text('In turn')")


def test_live_rows_change_in_place(watched: Watched, page_stand: PageStand) -> None:
    stand = page_stand.stand
    talk = stand.talk(session_id="live-1")
    page = settled(watched.open())
    row = f"{ROWS}[data-key=live-1]"
    page.eval_on_selector(row, "row => { row.isTheSame = true }")
    talk.say("one", max_tokens=8)
    talk.say("two", max_tokens=8)
    page.wait_for_function("row => document.querySelector(row).cells[5].textContent === '2'", arg=row)
    assert page.eval_on_selector(row, "row => row.isTheSame")
    stand.talk(session_id="live-2")
    page.wait_for_function("rows => document.querySelector(rows)?.dataset.key === 'live-2'", arg=ROWS)

    settled(watched.go("#/?sort=created_at&order=desc"))
    page.wait_for_selector("th[aria-sort=descending]:has-text('Created')")
    expect(page.locator(ROWS).first).to_have_attribute("data-key", "live-2")
    stand.talk(session_id="live-3")
    page.wait_for_selector("button.changed:has-text('Changes')")
    assert "live-3" not in keys(page)
    page.click("button.changed")
    expect(page.locator(ROWS).first).to_have_attribute("data-key", "live-3")
    expect(page.locator("button.changed")).to_be_hidden()


def test_all_by_keyboard(watched: Watched) -> None:
    page = settled(watched.open("#/?sort=created_at&order=asc"))
    first, second = keys(page)[:2]
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.wait_for_selector(f"tr[data-key='{second}'][aria-current]")
    page.keyboard.press("k")
    page.wait_for_selector(f"tr[data-key='{first}'][aria-current]")
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
    page.wait_for_selector("dialog", state="detached")
    settled(page)
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/ui#/session/{second}")
    page.keyboard.press("g")
    page.keyboard.press("g")
    page.wait_for_url("**/ui#/groups")


def test_fleet_strip(watched: Watched, page_stand: PageStand) -> None:
    page = watched.open()
    dead = urlsplit(page_stand.dead_engine).netloc
    page.wait_for_selector(f".engines summary:has-text('1 dead: {dead}')")
    page.wait_for_selector(f"#fleet >> text=paused: {ADAPTER}")
    page.wait_for_selector("#fleet a.figure.alert:has-text('Paused') >> text=1")
    page.wait_for_selector("#fleet .figure:has-text('Weights') >> text=12")
    page.click(".engines summary")
    line = page.locator(f".engines tr[data-key='{page_stand.dead_engine}']")
    expect(line.locator(".badge")).to_contain_text("dead")
    expect(line.locator("td").last).not_to_have_text("–")
    line.locator("a").click()
    page.wait_for_selector("text=No session matches these filters")
    assert page.input_value("select[name=engine]") == page_stand.dead_engine


def test_the_strip_folds_away_where_one_thing_is_looked_at(watched: Watched, page_stand: PageStand) -> None:
    """The button still names the engine that died; each kind of view remembers what somebody chose."""
    page = watched.open(f"#/session/{page_stand.filled.idle}")
    strip, fold = page.locator("#fleet"), page.locator("button.fold")
    expect(fold).to_contain_text(f"1 dead: {urlsplit(page_stand.dead_engine).netloc}")
    expect(strip).to_be_hidden()
    watched.go("#/groups")
    expect(strip).to_be_visible()
    fold.press("Enter")
    expect(strip).to_be_hidden()
    watched.go(f"#/session/{page_stand.filled.idle}")
    fold.press("Enter")
    expect(strip).to_be_visible()
    page.reload()
    expect(strip).to_be_visible()
    watched.go("#/")
    expect(strip).to_be_hidden()
    assert fold.get_attribute("aria-expanded") == "false"


def test_groups(watched: Watched, page_stand: PageStand) -> None:
    flat, missing = list(SCORED)[1:]
    page = settled(watched.open("#/groups"))
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
    assert page.locator("svg.plot a").count() == len(SCORED[missing])
    names = [page.locator("svg.plot a").nth(at).get_attribute("aria-label") or "" for at in range(4)]
    assert sorted(float(name.split(": ")[1].split(" ")[0]) for name in names) == sorted(SCORED[missing])
    assert len(keys(page)) == len(SCORED[missing])
    page.wait_for_selector(f"details summary:text('Task') >> xpath=.. >> text={TASKS[2]}")
    for title, first in (("Advantage", "aime-02"), ("Advantage", "aime-00")):
        page.click(f"main th button:has-text('{title}')")
        expect(page.locator(ROWS).first).to_have_attribute("data-key", first)
    rewards = SCORED[missing]
    row, off = cells(page, "aime-00"), rewards[0] - statistics.mean(rewards)
    assert (row["Reward"], row["Advantage"]) == (f"{rewards[0]:.3f}", f"{off:.3f}")
    assert row["÷ std. dev."] == f"{off / (statistics.stdev(rewards) + 1e-6):.3f}"
    page.locator("svg.plot a").first.click()
    page.wait_for_url("**/ui#/session/aime-0*")


def test_exports(watched: Watched, page_stand: PageStand, api: Callable[..., Any]) -> None:
    group = next(iter(SCORED))
    preview = api("/ui/api/exports", group_id=group, min_reward=0.5)
    assert preview["complete"]
    page = watched.open(f"#/exports?group_id={quote(group, safe='')}&min_reward=0.5")
    page.wait_for_selector("text=sessions looked at: all")
    assert page.inner_text(".facts .figure:has-text('Rows') .value") == str(preview["rows"])
    rows = page_stand.stand.rows(group_id=group, min_reward=0.5)
    assert preview["rows"] == len(rows)

    page.wait_for_selector("h2:has-text('First rows')")
    assert page.locator(".fields thead th").all_inner_texts() == ["Field", "Row 1", "Row 2", "Row 3"]
    line = page.locator(".fields tr:has(th code:text-is('tokens')) td").all_inner_texts()
    assert line == [_inshort(row["tokens"]) for row in rows[:3]]
    size = len(page_stand.stand.http.get("/export", params={"group_id": group, "min_reward": 0.5}).content)
    assert f"{size / 1024:.0f} KiB"[:1] in page.inner_text(".facts .figure:has-text('estimate') .value")
    links = page.eval_on_selector_all("a[download]", "links => links.map(link => link.href)")
    assert len(links) == len(set(links)) == 4 + 2
    for link in (links[0], links[-1]):
        query = {name: values[0] for name, values in parse_qs(urlsplit(link).query).items()}
        assert query["group_id"] == group
        response = page_stand.stand.http.get(link)
        assert response.status_code == 200
        assert len(response.text.splitlines()) == len(rows)

    watched.go("#/exports?max_staleness=0&weight_version=20")
    page.wait_for_selector("main th:has-text('stale')")
    page.locator("main td a").first.click()
    page.wait_for_url("**/ui#/session/*")


def _inshort(ids: list[int]) -> str:
    """A list of numbers as the page shows it."""
    return f"{len(ids)} × [{', '.join(map(str, [*ids[:4], '…', *ids[-4:]]))}]"


KNOWN = ("pandas", "polars", "datasets", "slime", "miles", "verl", "skyrl", "tinker", "torch", "prime_rl")
"""Packages that code of the page needs beside the client's, which need not be here."""


def test_the_code_that_loads_an_export_runs(watched: Watched, page_stand: PageStand) -> None:
    """For each shape; what needs a package that is not here is only compiled."""
    page = watched.open("#/exports")
    group, ran = next(iter(SCORED)), set()
    shapes = page.eval_on_selector_all("select[name=shape] option", "all => all.map((one) => one.value)")
    for shape in shapes:
        watched.go(f"#/exports?group_id={quote(group, safe='')}&advantage=grpo&shape={shape}")
        chips = page.locator(".chips button")
        expect(chips.first).to_have_text(shape if shape not in ("", "turnlog") else "pandas")
        for name in [shape, "pandas", "polars", "datasets", "Python"] if shape in ("", "trl") else [shape]:
            if not name or name == "turnlog":
                continue
            chips.get_by_text(name, exact=True).click()
            code = page.inner_text("pre.code")
            compile(code, name, "exec")
            if name != "atropos" and all(find_spec(one) for one in KNOWN if one == name or one in code):
                done = subprocess.run(
                    [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
                )
                assert done.returncode == 0, f"{code}\n{done.stderr}"
                ran.add(name)
    assert {"trl", "tree", "Python"} <= ran


def test_texts_of_others_stay_texts(watched: Watched, page_stand: PageStand) -> None:
    stand = page_stand.stand
    talk = stand.talk(session_id="hostile-1", group_id=MARKUP, metadata={"note": MARKUP}, adapter=MARKUP)
    kept = {"abort_all_requests": False}  # other tests' turns are in flight there
    stand.sim.post("/update_weight_version", json={"new_version": MARKUP, **kept})
    talk.say(MARKUP, max_tokens=8)
    assert stand.http.put(f"{talk.path}/reward", json={"reward": 1, "components": {MARKUP: 1}}).status_code == 200
    assert stand.http.post(f"/adapters/{quote(MARKUP)}/pause", json={}).status_code == 200
    try:
        page = watched.open("#/?q=hostile")
        page.wait_for_selector(f"{ROWS} >> text=<img src=x")
        page.wait_for_selector("#fleet .figure >> text=<img src=x")
        page.click(".engines summary")
        page.wait_for_selector(".engines td >> text=<img src=x")
        page.click(f"{ROWS}[data-key=hostile-1] td a")
        page.wait_for_selector("h1 >> text=<script>")
        for place in (
            "#/groups",
            "#/exports",
            "#/?engine=javascript:alert(1)",
            f"#/group/{quote(MARKUP, safe='')}?x={quote(MARKUP)}",
        ):
            watched.go(place)
            page.wait_for_selector("main :text('<img')" if "group" in place else "main form")
        assert page.locator("main img, main script, #fleet img").count() == 0
    finally:
        stand.http.post(f"/adapters/{quote(MARKUP)}/resume", json={})
        stand.sim.post("/update_weight_version", json={"new_version": "12", **kept})
        stand.talk(session_id="back-to-12").say("again", max_tokens=8)


def test_the_form_has_the_parameters_of_an_export(watched: Watched, api: Callable[..., Any]) -> None:
    """All but the format, which the links choose, the cursor, and `url_s`; in each choice the values that the
    server takes."""
    page = watched.open("#/exports")
    fields = page.eval_on_selector_all(
        "form.filters [name]",
        """fields => fields.map(({ name, options = [] }) =>
            [name, [...options].map(({ value }) => value).filter(Boolean)])""",
    )
    known = {one["name"]: one["schema"] for one in api("/openapi.json")["paths"]["/export"]["get"]["parameters"]}
    assert {name for name, _ in fields} == known.keys() - {"format", "cursor", "url_s"}
    for name, choices in fields:
        assert set(choices) <= _choices(known[name]), name
    assert set(dict(fields)["shape"]) == _choices(known["shape"])


def _choices(schema: dict[str, Any]) -> set[str]:
    """What a parameter's schema enumerates."""
    cases = (schema, *schema.get("anyOf", ()))
    return {value for one in cases for value in (*one.get("enum", ()), *filter(None, [one.get("const")]))}


def test_scripts_are_what_they_say(watched: Watched) -> None:
    """The pure parts, called by the browser that will run them."""
    page = watched.open()
    assert page.evaluate(
        """async () => {
            const route = await import("/ui/static/route.js");
            const format = await import("/ui/static/format.js");
            const id = "a/b?c#d%";
            return {
                back: route.parse(route.groupHref(id)).id,
                none: ["#/nowhere", "#/session/", "#/session/%", "#/session/a/b"].map((hash) => route.parse(hash)),
                moment: route.parse(route.sessionHref("x", { seq: 4 })).query.get("seq"),
                durations: [0.25, 9.5, 59, 61, 7260, 90000].map(format.duration),
                bytes: [0, 1023, 1536, 2 ** 31].map(format.bytes),
                decimals: [null, 0, 0.5, -12.25, 1e-9, 12345678].map((one) => format.decimal(one)),
                ranges: format.ranges([7, 1, 2, 3, 9]),
            };
        }"""
    ) == {
        "back": "a/b?c#d%",
        "none": [None] * 4,
        "moment": "4",
        "durations": ["250 ms", "9.5 s", "59 s", "1 min 01 s", "2 h 01 min", "1 d 1 h"],
        "bytes": ["0 B", "1023 B", "1.5 KiB", "2.0 GiB"],
        "decimals": ["–", "0.000", "0.500", "-12.250", "1.00e-9", "1.23e+7"],
        "ranges": "1–3, 7, 9",
    }


def test_a_view_that_is_left_takes_its_filter_along(watched: Watched) -> None:
    """What was typed a moment before acts no more: the address is the next view's."""
    page = watched.open()
    page.wait_for_selector(ROWS)
    assert (
        page.evaluate(
            """async () => {
            const field = document.querySelector("input[name=q]");
            field.value = "gsm8k";
            field.dispatchEvent(new InputEvent("input", { bubbles: true }));
            location.hash = "#/groups";
            await new Promise((resolve) => setTimeout(resolve, 300)); // later than the form's own timer
            return location.hash;
        }"""
        )
        == "#/groups"
    )


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
