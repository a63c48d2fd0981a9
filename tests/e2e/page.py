"""The page in a real Chromium, and what it must never do: complain, open a dialog, ask another server."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
from integration.stand import Stand, serving, standing

from e2e.page_data import Filled, filled
from ops.simulator.process import SimulatorProcess

playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from axe_playwright_python.sync_playwright import Axe  # noqa: E402
from playwright.sync_api import Browser, Page, expect, sync_playwright  # noqa: E402

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


def barriers(page: Page, scheme: str = "") -> list[str]:
    """What axe finds; of one that was seen in the light, in the dark, only where its colours may differ."""
    only = {"runOnly": ["color-contrast"]} if scheme == "dark" else None
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


@contextlib.contextmanager
def page_standing(folder_factory: pytest.TempPathFactory) -> Iterator[PageStand]:
    with SimulatorProcess("--seed", "7", "--weight-version", "12", "--reasoning", "0.4") as engine:
        dead = SimulatorProcess("--seed", "8", "--weight-version", "11").start()
        folder = folder_factory.mktemp("page")
        at_once = {"TURNLOG_ON_DISCONNECT": "abort_after:0"}
        upstreams = (dead.base_url, engine.base_url)
        with serving(folder, *upstreams, environment=at_once, engine_url=engine.base_url) as stand:
            dead.kill()
            found = filled(stand)
            yield PageStand(stand, found, dead.base_url)
            found.close()


@pytest.fixture(scope="session")
def page_stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageStand]:
    """Tests only read it, or add sessions of their own."""
    require_chromium()
    with page_standing(tmp_path_factory) as made:
        yield made


@pytest.fixture(scope="session")
def quick_stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """An engine that answers at once, and a window of three turns."""
    require_chromium()
    engine = ("--seed", "3", "--reasoning", "0", "--context-length", str(1 << 23))
    with standing(tmp_path_factory.mktemp("quick"), *engine, environment={"TURNLOG_ROLLBACK_WINDOW": "3"}) as made:
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Not of the session: Playwright's loop runs as long as it does, and tests that are coroutines would not start."""
    with launched() as found:
        yield found


@pytest.fixture
def watch(browser: Browser) -> Iterator[Callable[..., Watched]]:
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
