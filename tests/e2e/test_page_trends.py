"""The charts over time in a real browser, on a run whose times are hours apart."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from integration.stand import Stand, standing
from playwright.sync_api import expect

from e2e.page import Watched, barriers, require_chromium
from e2e.page_data import HOURS, over_hours

pytestmark = pytest.mark.long

Watch = Callable[..., Watched]

SESSIONS = 96


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    require_chromium()
    with standing(tmp_path_factory.mktemp("trends")) as stand:
        over_hours(stand, SESSIONS)
        yield stand


def test_a_run_by_hour_as_charts_tables_and_csv(run: Stand, watch: Watch, tmp_path: Path) -> None:
    watched = watch(run.server.base_url)
    page = watched.open("#/")
    assert page.locator("script[src*=uPlot]").count() == 0
    page.click("nav >> text=Over time")
    expect(page.locator(".trendplot canvas")).to_have_count(7)
    expect(page.locator("main [role=status]").first).to_have_text(f"{SESSIONS} of {SESSIONS} sessions, newest first")
    reward = page.locator("section[aria-labelledby=trend-reward]")
    reward.locator("summary").click()
    expect(reward.locator(".table-scroll tbody tr")).to_have_count(HOURS)
    assert "mean from" in (reward.locator("[role=img]").get_attribute("aria-label") or "")
    with page.expect_download() as download:
        page.click("text=Download CSV")
    lines = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text())))
    assert len(lines) == HOURS
    assert sum(float(line["sessions created"]) for line in lines) == SESSIONS
    rewards = [float(line["reward mean"]) for line in lines]
    assert rewards == sorted(rewards)
    assert sum(float(line["errors upstream_invalid"]) for line in lines) > 0
    assert all(float(line["reward min"]) <= float(line["reward mean"]) <= float(line["reward max"]) for line in lines)
    assert max(float(line["staleness mean of the turns"]) for line in lines) > 0


def test_by_version_filtered_and_without_a_barrier(run: Stand, watch: Watch) -> None:
    watched = watch(run.server.base_url, width=768)
    page = watched.open("#/trends?by=weight_version&group_id=task-1")
    expect(page.locator("main [role=status]").first).to_have_text("8 of 8 sessions, newest first")
    expect(page.locator(".trendplot canvas")).to_have_count(6)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        page.locator(".trendplot canvas").first.wait_for()
        assert barriers(page, scheme) == []
    page.select_option("select[aria-label=By]", "day")
    page.wait_for_url("**by=day**")
    page.fill("input[name=q]", "nobody")
    expect(page.locator("main >> text=There is nothing to chart.")).to_be_visible()
    expect(page.locator(".trendplot")).to_have_count(0)
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.keyboard.press("t")
    expect(page.locator(".trendplot canvas").first).to_be_visible()
