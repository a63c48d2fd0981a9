"""The page with 10,000 sessions: how soon each view is shown, and what it holds after an hour of updates.

A real Chromium opens each view, in a new profile each time. Then each view stays open while an hour of updates is
replayed in it (page_probe.js): four changes of 21 rows a second, one of them a new session, and the strip. The JS heap
after a collection of garbage must not grow from the first half hour to the second. At last all views are entered again
and again, with the same question.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import shutil
import statistics
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ops.bench.client import Broken, Connection
from ops.bench.measure import save_figures, table
from ops.bench.sessions import Conversation, error_code, opening_messages, reply_message
from ops.bench.sizes import MIB
from ops.bench.stand import cores, folder_for_bench, simulator, started
from ops.bench.stored import fill
from ops.server import ServerProcess

if TYPE_CHECKING:
    from playwright.async_api import Browser, CDPSession, Page

PROBE = Path(__file__).with_name("page_probe.js")
CHROMIUM_ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
WIDTH, HEIGHT = 1440, 900

GROUP = "live"
ROLLOUTS, STEPS = 20, 12
"""Sessions of the group that is shown side by side, and the turns that each begins with."""

FOLLOWED, FOLLOWED_TURNS = "followed", 160
"""The session that is followed live has more turns, messages and events than its view shows at a time. With fewer the
document grows with the session, up to 100 turns, 200 messages and 300 events, and a leak could not be told from that.
"""

PERIOD_S = 0.5
"""Between two turns of the group, while views are opened."""

ROW = "table.virtual tr[data-key]"
VIEWS = {
    "sessions": ("#/", ROW),
    "groups": ("#/groups", ROW),
    "session": (f"#/session/{FOLLOWED}", ".timeline tbody tr"),
    "side by side": (f"#/group/{GROUP}/rollouts", ".gridcell ol.conversation"),
}
"""An address, and what is there once the view has content."""

BUDGET_MS = 1000.0
SLACK_MIB, SLACK = 1.0, 0.1
"""The heap may be larger by this, and by this share, after the second half: a collection does not find all at once."""


class NoChromium(Exception):
    """chromium is not in the PATH."""


class Held(NamedTuple):
    """What a page holds after a collection of garbage."""

    heap_mib: float
    nodes: int
    listeners: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--openings", type=int, default=7, help="of each view")
    parser.add_argument("--minutes", type=float, default=60.0, help="of updates that are replayed in each view")
    parser.add_argument("--rounds", type=int, default=40, help="in which all views are entered one after another")


async def main(arguments: argparse.Namespace) -> int:
    cpu_sets = cores(spread=True)
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(simulator(cpu_sets))
        folder = stack.enter_context(folder_for_bench(arguments.folder))
        server = ServerProcess(folder, upstreams=[engine.base_url]).migrate()
        await fill(server.environment["TURNLOG_DATABASE_URL"], arguments.sessions, 2, ended=True, group_size=8)
        stack.enter_context(started(server, cpu_sets))
        async with _live_group(server.base_url), chromium() as browser:
            opened = [
                {"view": name, **await _openings(browser, server.base_url, name, arguments.openings)} for name in VIEWS
            ]
            table(opened)
            again = await _again(browser, server.base_url, arguments.openings)
            table([again])
            held = [await _replayed(browser, server.base_url, name, arguments.minutes * 60) for name in VIEWS]
            held.append(await _entered(browser, server.base_url, arguments.rounds))
            table(held)
            rows = await _all_rows(browser, server.base_url)
    table([rows])
    save_figures("page", {"opened": opened, "again": again, "held": held, "scrolled": rows})
    is_kept = all(one["budget"] == "kept" for one in (*opened, *held)) and rows["rows"] >= arguments.sessions
    return 0 if is_kept else 1


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Raises NoChromium."""
    from playwright.async_api import async_playwright

    executable = shutil.which("chromium") or shutil.which("google-chrome")
    if executable is None:
        raise NoChromium("chromium is not in the PATH")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=executable, args=list(CHROMIUM_ARGUMENTS))
        try:
            yield browser
        finally:
            await browser.close()


@contextlib.asynccontextmanager
async def _live_group(base_url: str) -> AsyncIterator[None]:
    """A group of sessions, and one by itself, that go on, one turn after another, until the end. Raises Broken."""
    async with await Connection.connect(base_url) as connection:
        conversations: dict[str, Conversation] = {}
        for number in range(ROLLOUTS):
            name = f"{GROUP}-{number}"
            await connection.json("POST", "/sessions", {"session_id": name, "group_id": GROUP, "attempt": number})
            conversations[name] = Conversation(opening_messages(512, seed=number))
        for name in itertools.chain.from_iterable([*conversations] for _ in range(STEPS)):
            await _turn(connection, name, conversations[name])
        await connection.json("POST", "/sessions", {"session_id": FOLLOWED})
        conversations[FOLLOWED] = Conversation(opening_messages(512, seed=ROLLOUTS))
        for _ in range(FOLLOWED_TURNS):
            await _turn(connection, FOLLOWED, conversations[FOLLOWED])
        going_on = asyncio.create_task(_go_on(connection, conversations))
        try:
            yield
        finally:
            going_on.cancel()
            await asyncio.gather(going_on, return_exceptions=True)


async def _go_on(connection: Connection, conversations: dict[str, Conversation]) -> None:
    for name in itertools.cycle(conversations):
        await asyncio.sleep(PERIOD_S)
        await _turn(connection, name, conversations[name])


async def _turn(connection: Connection, name: str, conversation: Conversation) -> None:
    response = await connection.request("POST", f"/sessions/{name}/v1/chat/completions", conversation.body())
    if response.status != 200:
        raise Broken(f"a turn was answered {response.status} {error_code(response.body)}")
    conversation.answered(reply_message(response.body))


@contextlib.asynccontextmanager
async def _opened(browser: Browser, base_url: str, name: str) -> AsyncIterator[Page]:
    """A view in a profile of its own, without a cache, once it has content."""
    address, selector = VIEWS[name]
    context = await browser.new_context(viewport={"width": WIDTH, "height": HEIGHT})
    try:
        await context.add_init_script(PROBE.read_text().replace("SELECTOR", selector))
        page = await context.new_page()
        await page.goto(f"{base_url}/ui{address}", wait_until="commit")
        await page.locator(selector).first.wait_for()
        yield page
    finally:
        await context.close()


async def _openings(browser: Browser, base_url: str, name: str, times: int) -> dict[str, Any]:
    """Milliseconds from the navigation's start until the view has content."""
    shown: list[float] = []
    for _ in range(times):
        async with _opened(browser, base_url, name) as page:
            shown.append(await page.evaluate("__probe.shownAt"))
    median = statistics.median(shown)
    return {"first content ms, median": median, "most": max(shown), "budget": _kept(median <= BUDGET_MS)}


async def _again(browser: Browser, base_url: str, times: int) -> dict[str, Any]:
    """Milliseconds of reading all sessions over time: when nothing was read before, and with the turns since then."""
    async with _opened(browser, base_url, "over time") as page:
        first: float = await page.evaluate(_READ, "day")
        took = [await page.evaluate(_READ) for _ in range(times)]
    return {"over time: all sessions, first ms": first, "again, median": statistics.median(took), "most": max(took)}


_READ = """async (interval) => {
  const buttonOf = (text) => [...document.querySelectorAll("main button")].find((one) => one.textContent === text);
  const began = performance.now();
  if (interval) {
    const field = document.querySelector("main select[aria-label=By]");
    field.value = interval;
    field.dispatchEvent(new Event("change"));
  } else buttonOf("Refresh").click();
  while (true) {
    await new Promise((painted) => requestAnimationFrame(painted));
    if (document.querySelector("main [role=status]").textContent.startsWith("Looking")) continue;
    if (buttonOf("Look further").hidden) return performance.now() - began;
    buttonOf("Look further").click();
  }
}"""
"""By an interval that was not read before, or again."""


async def _replayed(browser: Browser, base_url: str, name: str, seconds: float) -> dict[str, Any]:
    """What the view holds before the updates, after half of them, and after all."""
    async with _opened(browser, base_url, name) as page:
        await page.evaluate("__probe.ready")
        chrome = await page.context.new_cdp_session(page)
        held = [await _held(chrome)]
        for _ in range(2):
            await page.evaluate("seconds => __probe.replay(seconds)", seconds / 2)
            held.append(await _held(chrome))
    return _growth(name, held)


async def _entered(browser: Browser, base_url: str, rounds: int) -> dict[str, Any]:
    """What the page holds after all views were entered once, in half of the rounds, and in all."""
    async with _opened(browser, base_url, "sessions") as page:
        chrome = await page.context.new_cdp_session(page)
        held = []
        for times in (1, rounds // 2, rounds - rounds // 2):
            for _ in range(times):
                for address, selector in (*VIEWS.values(), VIEWS["sessions"]):
                    await page.evaluate("address => { location.hash = address }", address)
                    await page.locator(selector).first.wait_for()
            held.append(await _held(chrome))
    return _growth(f"{rounds} times all", held)


def _growth(name: str, held: list[Held]) -> dict[str, Any]:
    first, half, whole = held
    is_kept = (
        whole.heap_mib <= half.heap_mib * (1 + SLACK) + SLACK_MIB and whole.nodes <= half.nodes * (1 + SLACK) + 100
    )
    return {
        "view": name,
        "heap MiB at first": first.heap_mib,
        "after half": half.heap_mib,
        "after all": whole.heap_mib,
        "nodes at first": first.nodes,
        "half": half.nodes,
        "all": whole.nodes,
        "listeners, half": half.listeners,
        "listeners, all": whole.listeners,
        "budget": _kept(is_kept),
    }


async def _held(chrome: CDPSession) -> Held:
    await chrome.send("Performance.enable")
    await chrome.send("HeapProfiler.enable")
    for _ in range(2):
        await chrome.send("HeapProfiler.collectGarbage")
    found = {one["name"]: one["value"] for one in (await chrome.send("Performance.getMetrics"))["metrics"]}
    return Held(found["JSHeapUsedSize"] / MIB, int(found["Nodes"]), int(found["JSEventListeners"]))


async def _all_rows(browser: Browser, base_url: str) -> dict[str, Any]:
    """The list scrolled to its end: how many rows it has, and how many of them are in the document."""
    async with _opened(browser, base_url, "sessions") as page:
        found: dict[str, Any] = await page.evaluate(_SCROLLED)
        chrome = await page.context.new_cdp_session(page)
        return {**found, "heap MiB": (await _held(chrome)).heap_mib}


_SCROLLED = """async () => {
  const list = document.querySelector(".table-scroll.fill");
  const began = performance.now();
  while (!/All [\\d,]+ shown/.test(document.querySelector("main").textContent)) {
    list.scrollTop = list.scrollHeight;
    await new Promise((painted) => requestAnimationFrame(painted));
  }
  const all = document.querySelector("main").textContent.match(/All ([\\d,]+) shown/)[1];
  return {
    rows: Number(all.replaceAll(",", "")),
    "rows in the document": document.querySelectorAll("table.virtual tr[data-key]").length,
    "scrolled through in s": (performance.now() - began) / 1000,
  };
}"""


def _kept(is_kept: bool) -> str:
    return "kept" if is_kept else "EXCEEDED"
