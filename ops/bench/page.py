"""The page over one long session: time to its first text and of a jump, its slowest frame, JavaScript's memory.

It needs Playwright and Chromium, which also draws by the CPU here: a frame's time is that of the machine.
"""

from __future__ import annotations

import argparse
import shutil
import time

from ops.bench.load import question_bytes
from ops.bench.measure import MIB, Figures, report
from ops.bench.stand import cores, simulator, turnlog
from ops.bench.stored import play

SIM = b'{"completion_tokens":150,"tool_calls":false,"reasoning":false,"latency_s":0}'
QUESTION_TOKENS = 850
SCROLLED_PX = 400
FRAMES = """() => {
  const frames = (window.frames = []);
  const seen = (at) => frames.push(at) && requestAnimationFrame(seen);
  requestAnimationFrame(seen);
}"""
SLOWEST = "frames.slice(1).map((at, place) => at - frames[place]).sort((one, other) => one - other)"
AT_END = "(one) => one.scrollHeight - one.scrollTop - one.clientHeight < 8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=500)


async def main(arguments: argparse.Namespace) -> int:
    from playwright.async_api import async_playwright

    cpu_sets = cores()
    with (
        simulator(cpu_sets, "--context-length", str(1 << 23)) as engine,
        turnlog(engine, cpu_sets, arguments.folder) as server,
    ):
        size = question_bytes(QUESTION_TOKENS)
        [session_id] = await play(server.base_url, 1, arguments.turns, question_bytes=size, sim=SIM)
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = await browser.new_page(viewport={"width": 1440, "height": 900})
            inspector = await page.context.new_cdp_session(page)
            await inspector.send("Performance.enable")
            address = f"{server.base_url}/ui#/session/{session_id}"
            began = time.perf_counter()
            await page.goto(address)
            await page.locator(".step .said").first.wait_for()
            figures: Figures = {"first text s": time.perf_counter() - began}
            target = arguments.turns * 4 // 5
            began = time.perf_counter()
            await page.goto(f"{address}?turn={target}")
            await page.locator(f".step[data-turn='{target}'] .said").first.wait_for()
            figures["jump s"] = time.perf_counter() - began
            await page.goto(f"{address}?turn=1")
            pane = page.locator(".tabcontent")
            await pane.hover()
            await page.evaluate(FRAMES)
            while not await pane.evaluate(AT_END):
                await page.mouse.wheel(0, SCROLLED_PX)
            frames = await page.evaluate(SLOWEST)
            figures |= {"frame p50 ms": frames[len(frames) // 2], "frame p99 ms": frames[len(frames) * 99 // 100]}
            await inspector.send("HeapProfiler.collectGarbage")
            metrics = (await inspector.send("Performance.getMetrics"))["metrics"]
            found = {one["name"]: one["value"] for one in metrics}
            figures |= {"JS heap MiB": found["JSHeapUsedSize"] / MIB, "nodes": found["Nodes"]}
            await browser.close()
    report(f"page-{arguments.turns}", figures)
    return 0
