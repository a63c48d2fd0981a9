"""The page with 10,000 sessions and 200 live ones: how soon it can be used, what it holds, what it shows and when.

A real Chromium without a window opens `/ui`. Everything that is said of its rows was read from the document by a
`MutationObserver` (page_probe.js): when the list was there and had answered to a key, and when a row first showed a
turn, after that turn's client had its reply. At the end the lists are scrolled through and each live session's row
compared with what its client saw. The CPU of the server is taken with no page and with some, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from playwright.async_api import Browser, CDPSession, Page, async_playwright

from ops.bench.measure import cpu_s, keep, percentile, table
from ops.bench.page_load import LIVE_PREFIX, Drivers, fill
from ops.bench.sampler import family_pss
from ops.bench.stand import Stand, stand

PROBE = Path(__file__).with_name("page_probe.js")
CHROMIUM_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WINDOW = {"width": 1280, "height": 800}
LONG_TASK_MS = 50
SETTLED_S = 15.0
ANSWER_S = 60.0
ROW = "table.virtual tr[data-key]"
STILL = "#/?sort=created_at&order=desc"
"""The list in an order that changes do not change; the live sessions, made last, are at its top."""

MIB = 2**20


class NoChromium(Exception):
    """There is none in the PATH."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--live", type=int, default=200)
    parser.add_argument("--period", type=float, default=2.0, help="seconds from turn to turn of a live session")
    parser.add_argument("--minutes", type=float, default=2.0, help="that one page is open while its memory is watched")
    parser.add_argument("--openings", type=int, default=5, help="of the page, each in a new profile")
    parser.add_argument("--pages", type=int, default=5, help="open at once while the server's CPU is taken")
    parser.add_argument("--rounds", type=int, default=3, help="of the server's CPU without and with them")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each")
    parser.add_argument("--folder", type=Path, help="where the database is put: the disk that is measured")
    parser.add_argument("--screenshot", type=Path, help="of the list at the end, as a PNG file")


async def main(arguments: argparse.Namespace) -> int:
    with stand(arguments.folder, spread=True) as running:
        url = running.server.base_url
        filled_s = await fill(url, arguments.sessions)
        drivers = Drivers(url, arguments.live, arguments.period)
        await drivers.start()
        try:
            async with chromium() as browser:
                figures = {"sessions": arguments.sessions, "live sessions": arguments.live, "filled in s": filled_s}
                figures |= await _openings(browser, url, arguments.openings)
                figures |= await _server_cpu(browser, running, drivers, arguments)
            async with chromium() as browser:
                figures |= await _watched(browser, running, drivers, arguments)
        finally:
            await drivers.stop()
    table([{"": name, "figure": value} for name, value in figures.items()])
    print(f"written to {keep('page', figures)}")
    return 1 if figures["live rows that differ from the server"] or figures["versions that never came"] else 0


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Raises NoChromium."""
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
async def opened(browser: Browser, url: str, address: str = "") -> AsyncIterator[Page]:
    """The list in a profile of its own, and so with connections and a cache of its own, once its rows are there."""
    context = await browser.new_context(viewport={"width": WINDOW["width"], "height": WINDOW["height"]})
    try:
        await context.add_init_script(path=PROBE)
        page = await context.new_page()
        await page.goto(f"{url}/ui{address}", wait_until="commit")
        await page.wait_for_selector(ROW)
        yield page
    finally:
        await context.close()


async def _openings(browser: Browser, url: str, times: int) -> dict[str, Any]:
    """From the navigation's start until the list has answered to a key pressed as soon as it had rows."""
    shown, answered = [], []
    for _ in range(times):
        async with opened(browser, url) as page:
            await page.keyboard.press("/")
            await page.keyboard.type("f")
            async with asyncio.timeout(ANSWER_S):
                answered.append(await page.evaluate("__probe.answered"))
            first = await page.evaluate("Math.min(...Object.values(__probe.shown).map((seen) => seen[0][1]))")
            shown.append(first - await page.evaluate("performance.timeOrigin"))
    return {
        "rows shown after ms, median": statistics.median(shown),
        "interactive after ms, median": statistics.median(answered),
        "interactive after ms, worst": max(answered),
    }


async def _server_cpu(
    browser: Browser, running: Stand, drivers: Drivers, arguments: argparse.Namespace
) -> dict[str, Any]:
    without, with_pages, seconds = [], [], arguments.seconds
    for _ in range(arguments.rounds):
        without.append(await _cpu_ms_a_turn(running.server.pid, drivers, seconds))
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(arguments.pages):
                await stack.enter_async_context(opened(browser, running.server.base_url))
            with_pages.append(await _cpu_ms_a_turn(running.server.pid, drivers, seconds))
    return {
        "turns/s": statistics.median(one.turns_s for one in (*without, *with_pages)),
        "server CPU ms a turn, no page": statistics.median(one.cpu_ms for one in without),
        f"server CPU ms a turn, {arguments.pages} pages": statistics.median(one.cpu_ms for one in with_pages),
        "of a core that the pages take": (
            statistics.median(one.core for one in with_pages) - statistics.median(one.core for one in without)
        ),
    }


class _Stretch(NamedTuple):
    turns_s: float
    cpu_ms: float
    core: float


async def _cpu_ms_a_turn(pid: int, drivers: Drivers, seconds: float) -> _Stretch:
    began, turns, cpu = time.perf_counter(), drivers.total, cpu_s(pid)
    await asyncio.sleep(seconds)
    passed, turns, cpu = time.perf_counter() - began, drivers.total - turns, cpu_s(pid) - cpu
    return _Stretch(turns / passed, cpu * 1000 / max(turns, 1), cpu / passed)


async def _watched(browser: Browser, running: Stand, drivers: Drivers, arguments: argparse.Namespace) -> dict[str, Any]:
    """For some minutes a page whose rows move with each change, and one whose rows stay; then both without changes."""
    url = running.server.base_url
    async with opened(browser, url) as page:
        chrome = await page.context.new_cdp_session(page)
        await chrome.send("Performance.enable")
        renderer = await _renderer(browser)
        loaded = await page.evaluate("performance.now()")
        first = await _memory(chrome, renderer)
        async with opened(browser, url, STILL) as still:
            await still.evaluate(_LISTEN, [url])
            await asyncio.sleep(arguments.minutes * 60)
            last = await _memory(chrome, renderer)
            await drivers.stop()
            never_came = await _never_came(still, await _versions(url, drivers))
            different = [*await _different(page, drivers), *await _different(still, drivers)]
            late = _latencies(drivers, await still.evaluate("__probe.shown"))
        tasks = [took for at, took in await page.evaluate("__probe.tasks") if took > LONG_TASK_MS and at > loaded]
        if arguments.screenshot:
            await page.evaluate("document.querySelector('.table-scroll.fill').scrollTop = 0")
            await page.screenshot(path=arguments.screenshot)
    return {
        **{f"{name}, at first": value for name, value in first.items()},
        **{f"{name}, after {arguments.minutes:g} min": value for name, value in last.items()},
        f"tasks over {LONG_TASK_MS} ms in that time": len(tasks),
        "the longest, ms": max(tasks, default=0.0),
        "turns in all": drivers.total,
        "rows timed": len(late),
        "reply to shown row ms, p50": percentile(late, 50),
        "reply to shown row ms, p99": percentile(late, 99),
        "live rows that differ from the server": len(different),
        "versions that never came": len(never_came),
    }


_LISTEN = """([url]) => {
  __probe.versions = {};
  __probe.source = new EventSource(`${url}/ui/api/live`);
  __probe.source.addEventListener("sessions", (event) => {
    for (const row of JSON.parse(event.data).rows) __probe.versions[row.session_id] = row.version;
  });
}"""
"""A stream of the benchmark's own beside the page's: which versions the server told."""


async def _renderer(browser: Browser) -> int:
    """The process of the only page. Raises StopIteration where there is none."""
    chrome = await browser.new_browser_cdp_session()
    found = await chrome.send("SystemInfo.getProcessInfo")
    renderers = [one for one in found["processInfo"] if one["type"] == "renderer"]
    return int(max(renderers, key=lambda one: one["cpuTime"])["id"])


async def _memory(chrome: CDPSession, renderer: int) -> dict[str, Any]:
    """After a collection of garbage."""
    await chrome.send("HeapProfiler.collectGarbage")
    metrics = {one["name"]: one["value"] for one in (await chrome.send("Performance.getMetrics"))["metrics"]}
    return {
        "JS heap MiB": metrics["JSHeapUsedSize"] / MIB,
        "renderer MiB": family_pss(renderer) / MIB,
        "DOM nodes": int(metrics["Nodes"]),
    }


async def _versions(url: str, drivers: Drivers) -> dict[str, int]:
    """Of the live sessions, as the server lists them."""
    parameters = {"q": LIVE_PREFIX, "limit": "500"}
    found: dict[str, int] = {}
    async with aiohttp.ClientSession(url, raise_for_status=True) as http:
        while True:
            async with http.get("/ui/api/sessions", params=parameters) as response:
                listed = await response.json()
            found |= {row["session_id"]: row["version"] for row in listed["sessions"]}
            if listed["next_cursor"] is None:
                return {name: found[name] for name in drivers.names}
            parameters["cursor"] = listed["next_cursor"]


async def _never_came(page: Page, server: Mapping[str, int]) -> list[str]:
    """Live sessions of which the stream has not told the last version within some seconds."""
    deadline = time.monotonic() + SETTLED_S
    while True:
        told = await page.evaluate("__probe.versions")
        missing = [name for name, version in server.items() if told.get(name) != version]
        if not missing or time.monotonic() > deadline:
            return missing
        await asyncio.sleep(0.1)


async def _different(page: Page, drivers: Drivers) -> list[str]:
    """Live sessions whose row, scrolled to, does not say as many turns as were answered."""
    found: dict[str, int] = {}
    deadline = time.monotonic() + SETTLED_S
    while time.monotonic() < deadline and any(found.get(name) != drivers.turns[name] for name in drivers.names):
        found |= await page.evaluate(_SCROLLED)
    return [name for name in drivers.names if found.get(name) != drivers.turns[name]]


_SCROLLED = """async () => {
  const list = document.querySelector(".table-scroll.fill");
  const found = {};
  list.scrollTop = 0;
  let top = -1;
  while (list.scrollTop > top && Object.keys(found).length < 1000) {
    top = list.scrollTop;
    await new Promise((shown) => requestAnimationFrame(() => requestAnimationFrame(shown)));
    for (const row of list.querySelectorAll("tr[data-key]")) {
      const heads = [...list.querySelectorAll("thead th")];
      const turns = row.cells[heads.findIndex((one) => one.textContent === "Turns")].textContent;
      found[row.dataset.key] = Number(turns.replaceAll(",", ""));
    }
    list.scrollTop += list.clientHeight / 2;
  }
  return found;
}"""
"""From the top down, some hundred rows."""


def _latencies(drivers: Drivers, shown: Mapping[str, Sequence[tuple[int, float]]]) -> list[float]:
    """Milliseconds from a turn's reply to the first moment at which its session's row, seen before, showed it."""
    found: list[float] = []
    for name in drivers.names:
        for (before, _), (turns, at) in zip(shown.get(name, []), shown.get(name, [])[1:], strict=False):
            found += [at - drivers.answered[name, turn] * 1000 for turn in range(before + 1, turns + 1)]
    return found
