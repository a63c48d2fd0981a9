"""The page in a real Chromium, and what it must never do: complain, open a dialog, ask another server."""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
from integration.stand import Stand, serving

from e2e.page_data import Filled, filled
from ops.simulator.process import SimulatorProcess

playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from axe_playwright_python.sync_playwright import Axe  # noqa: E402
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright  # noqa: E402

CHROMIUM_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

TIMEOUT_MS = 30_000
"""Of one wait, on a machine that is ten times slower than ours."""
expect.set_options(timeout=TIMEOUT_MS)


def chromium() -> str | None:
    """Where it is installed; Playwright's own download is not used."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def require_chromium() -> str:
    """Where it is; without one the test is skipped."""
    path = chromium()
    if path is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    return path


@contextlib.contextmanager
def launched() -> Iterator[Browser]:
    path = require_chromium()
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=list(CHROMIUM_ARGUMENTS))
        yield found
        found.close()


def barriers(page: Page, *, of_colours: bool = False) -> list[str]:
    """What axe finds; `of_colours`: of a view that it has seen already, only where its colours may differ."""
    only = {"runOnly": ["color-contrast"]} if of_colours else None
    return [
        f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in Axe().run(page, options=only).response["violations"]
    ]


@dataclass
class Watched:
    """A page of which nothing goes unseen; `expected` are texts of complaints that the test provokes."""

    page: Page
    base_url: str
    complaints: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    expected: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.page.set_default_timeout(TIMEOUT_MS)
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.complaints.append(f"uncaught: {error}"))
        self.page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.type}"))
        self.page.on("request", self._asked)

    def open(self, hash: str = "#/") -> Page:
        """Go there, and wait until the page has begun."""
        self.page.goto(f"{self.base_url}/ui{hash}")
        self.page.wait_for_selector("#connection[data-state=live]")
        return self.page

    def go(self, hash: str) -> Page:
        """As a link of the page would."""
        self.page.evaluate("hash => { location.hash = hash }", hash)
        return self.page

    def verify(self) -> None:
        """No complaint, no canary that ran, no request to anybody else."""
        assert not self.complaints, "\n".join(self.complaints)
        assert not self.foreign, self.foreign
        assert self.page.evaluate("typeof window.__pwned") == "undefined"

    def _said(self, message: playwright_api.ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not any(text in message.text for text in self.expected):
            self.complaints.append(f"{message.type}: {message.text}")

    def _asked(self, request: playwright_api.Request) -> None:
        parts = urlsplit(request.url)
        own = urlsplit(self.base_url)
        if parts.scheme != "data" and (parts.scheme, parts.netloc) != (own.scheme, own.netloc):
            self.foreign.append(request.url)


@dataclass
class PageStand:
    """A server with sessions, one living engine and one dead one."""

    stand: Stand
    filled: Filled
    dead_engine: str


@pytest.fixture(scope="session")
def page_stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageStand]:
    """Tests only read it, or add sessions of their own."""
    require_chromium()
    environment = {"TURNLOG_ON_DISCONNECT": "abort_after:0", "TURNLOG_ROLLBACK_WINDOW": "3", "TURNLOG_FEATURES": "all"}
    living = SimulatorProcess(
        "--seed", "7", "--weight-version", "12", "--reasoning", "0", "--context-length", str(1 << 23)
    )
    with living as engine:
        dead = SimulatorProcess("--seed", "8", "--weight-version", "11").start()
        upstreams = (dead.base_url, engine.base_url)
        folder = tmp_path_factory.mktemp("page")
        with serving(folder, *upstreams, environment=environment, engine_url=engine.base_url) as stand:
            dead.kill()
            with socket.socket() as kept:  # so that nobody else gets the port, and is taken for the engine
                kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                kept.bind(("127.0.0.1", urlsplit(dead.base_url).port or 0))
                found = filled(stand)
                yield PageStand(stand, found, dead.base_url)
                found.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Not of the session: Playwright's loop runs as long as it does, and tests that are coroutines would not start."""
    with launched() as found:
        yield found


Watch = Callable[..., Watched]
ROWS = "main tbody tr[data-key]"


def keys(page: Page) -> list[str]:
    """The ids of the rows that are shown, in their order."""
    found: list[str] = page.eval_on_selector_all(ROWS, "rows => rows.map(row => row.dataset.key)")
    return found


def nodes(page: Page) -> int:
    """How many the browser keeps."""
    inspector = page.context.new_cdp_session(page)
    inspector.send("Performance.enable")
    inspector.send("HeapProfiler.collectGarbage")
    metrics = inspector.send("Performance.getMetrics")["metrics"]
    return int(next(one["value"] for one in metrics if one["name"] == "Nodes"))


def copied(page: Page, button: str, within: Locator | None = None) -> str:
    """What the button of that name copies."""
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.evaluate("navigator.clipboard.writeText('')")  # that an earlier text was copied is said for a while
    (within or page).get_by_role("button", name=button, exact=True).click()
    page.get_by_text("Copied").first.wait_for()
    page.wait_for_function("navigator.clipboard.readText()")
    text: str = page.evaluate("navigator.clipboard.readText()")
    return text


@pytest.fixture
def watch(browser: Browser) -> Iterator[Watch]:
    """Makes pages in contexts of their own; verified when the test ends."""
    with contextlib.ExitStack() as stack:
        made: list[Watched] = []

        def new(base_url: str, *, width: int = 1280, height: int = 800, scheme: str = "light") -> Watched:
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            stack.callback(context.close)
            watched = Watched(context.new_page(), base_url)
            made.append(watched)
            return watched

        yield new
        for one in made:
            one.verify()
