"""`with turnlog.weights(version)`: what stays shut, for how long, and with which version it opens."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from integration.cutting import CuttingRelay
from integration.stand import error_of, until

from fleet.pausing import SLOW_S, adapter, finish, new_name, of_fleet, order, speaking, until_generating
from fleet.stands import Fleet
from fleet.test_pause import behave
from turnlog import AsyncTurnlog, EnginesFailed, InvalidRequest, Turnlog, Unreachable
from turnlog.client.renewal import RENEWALS

pytestmark = pytest.mark.long

LEASE_S = 4.0
VERSION = {"fleet": "weight_version", "adapter": "version"}


@pytest.fixture(autouse=True)
def nothing_stays_paused(fleet: Fleet) -> Iterator[None]:
    yield
    fleet.apis[0].http.post("/fleet/resume")


def change(fleet: Fleet, kind: str, body: Callable[[Any], None], version: Any = None, **options: Any) -> None:
    """The body, which blocks, in `weights` of one client or the other."""
    url = fleet.apis[0].http.base_url
    if kind == "sync":
        with Turnlog(str(url)) as turnlog, turnlog.weights(version, **options) as paused:
            body(paused)
        return

    async def changing() -> None:
        async with AsyncTurnlog(str(url)) as turnlog, turnlog.weights(version, **options) as paused:
            body(paused)

    asyncio.run(changing())


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_turns_wait_for_the_body_however_long_it_is_and_go_on_with_the_version(fleet: Fleet, kind: str) -> None:
    """A turn is cut and goes on, another waits; the lease is renewed over a body that blocks thread and event loop."""
    talk, held = (fleet.apis[1].talk(on_abort="return") for _ in range(2))
    cut = speaking(fleet, talk, sim={"latency_s": SLOW_S})
    until_generating(fleet, talk)
    waiting = []

    def body(paused: Any) -> None:
        assert {url: told["ok"] for url, told in paused["engines"].items()} == {one.url: True for one in fleet.engines}
        assert finish(cut.result()) == "abort"
        assert of_fleet(fleet.apis[1])["paused"] is True, "asked, it looks; by itself it knows within 100 ms"
        waiting.append(speaking(fleet, held))
        told = [len(engine.seen("/pause_generation")) for engine in fleet.engines]
        until(lambda: of_fleet(fleet.apis[1])["held"] == 1)
        renewed = of_fleet(fleet.apis[1])["version"] + RENEWALS + 1
        while (gate := of_fleet(fleet.apis[1]))["version"] < renewed:
            assert (gate["paused"], gate["closings"]) == (True, paused["closings"])
            time.sleep(0.05)
        assert [len(engine.seen("/pause_generation")) for engine in fleet.engines] == told, "engines are told once"
        assert not waiting[0].done()

    change(fleet, kind, body, 7, lease_s=LEASE_S)
    assert finish(waiting[0].result()) == "stop"
    gate = of_fleet(fleet.apis[1])
    assert (gate["paused"], gate["weight_version"]) == (False, "7")


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("of", ["fleet", "adapter"])
def test_an_error_in_the_body_is_raised_and_the_old_version_stays(fleet: Fleet, kind: str, of: str) -> None:
    name = new_name()
    options = {"adapter": name} if of == "adapter" else {}
    path = f"/adapters/{name}" if of == "adapter" else "/fleet"
    order(fleet.apis[0], f"{path}/resume", version="3")
    look: Callable[[], dict[str, Any]] = lambda: fleet.apis[1].get(path)  # noqa: E731

    def body(paused: Any) -> None:
        assert look()["paused"]
        raise KeyError("the checkpoint is not there")

    with pytest.raises(KeyError, match="the checkpoint is not there"):
        change(fleet, kind, body, "4", **options)
    assert (look()["paused"], look()[VERSION[of]]) == (False, "3")
    change(fleet, kind, lambda paused: None, "4", **options)
    assert (look()["paused"], look()[VERSION[of]]) == (False, "4")


def test_a_pause_that_an_engine_does_not_take_leaves_nothing_shut(fleet: Fleet) -> None:
    order(fleet.apis[0], "/fleet/resume", version="3")
    behave(fleet.engines[1], pause="error")
    with pytest.raises(EnginesFailed):
        change(fleet, "sync", lambda paused: pytest.fail("the body ran"), "4")
    gate = of_fleet(fleet.apis[0])
    assert (gate["paused"], gate["weight_version"]) == (False, "3")
    assert not any(engine.stats()["paused"] for engine in fleet.engines)


def test_a_pause_whose_reply_is_lost_is_taken_back(fleet: Fleet) -> None:
    port = fleet.apis[0].http.base_url.port
    assert port is not None
    before = of_fleet(fleet.apis[0])["closings"]
    with CuttingRelay(port, 10) as relay, Turnlog(relay.base_url, retry_for_s=0) as broken:  # noqa: SIM117
        with pytest.raises(Unreachable), broken.weights("4"):
            pytest.fail("the body ran")
    gate = of_fleet(fleet.apis[0])
    assert (gate["paused"], gate["closings"]) == (False, before + 1)


def test_a_refused_order_opens_nobody_elses_gate(fleet: Fleet) -> None:
    order(fleet.apis[0], "/fleet/pause")
    with pytest.raises(InvalidRequest):
        change(fleet, "sync", lambda paused: pytest.fail("the body ran"), "4", lease_s=-1)
    assert of_fleet(fleet.apis[0])["paused"]
    for wrong in ({"version": ""}, {"version": "x" * 513}, {"mode": "abort", "adapter": "a"}):
        with pytest.raises(ValueError, match=r"version|mode"):
            change(fleet, "sync", lambda paused: pytest.fail("the body ran"), **wrong)


@pytest.mark.parametrize(
    ("named", "run", "shut"), [("exp-1", None, "exp-1"), ("exp-1", "exp-2", "exp-2"), ("exp-1", "*", None)]
)
def test_the_pause_is_of_the_run_that_the_environment_names(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, named: str, run: str | None, shut: str | None
) -> None:
    monkeypatch.setenv("TURNLOG_RUN", named)

    def body(paused: Any) -> None:
        gate = of_fleet(fleet.apis[0])
        assert (gate["paused"], gate["paused_runs"]) == (shut is None, [] if shut is None else [shut])

    change(fleet, "sync", body, "9", run=run)
    path = "/fleet" if shut is None else f"/runs/{shut}/fleet"
    assert fleet.apis[0].get(path)["weight_version"] == "9"


def test_a_renewal_extends_its_own_pause_alone(fleet: Fleet) -> None:
    """One that comes late, after the resume or another's pause, shuts and extends nothing."""
    api, name = fleet.apis[0], new_name()
    for path, look in ((f"/adapters/{name}", lambda: adapter(api, name)), ("/fleet", lambda: of_fleet(api))):
        paused = order(api, f"{path}/pause", lease_s=60)
        renewal = {"lease_s": 3000, "renews": paused["closings"]}
        assert order(api, f"{path}/pause", **renewal)["lease_left_s"] > 2900
        order(api, f"{path}/resume")
        assert error_of(api.http.post(f"{path}/pause", json=renewal)) == (409, "pause_ended")
        assert not look()["paused"]
        order(api, f"{path}/pause", lease_s=60)
        assert error_of(api.http.post(f"{path}/pause", json=renewal)) == (409, "pause_ended")
        assert look()["lease_left_s"] <= 60
        order(api, f"{path}/resume")


TRAINER = f"""
import sys, time
from turnlog import Turnlog
with Turnlog(sys.argv[1]).weights("8", lease_s={LEASE_S}):
    print("paused", flush=True)
    time.sleep(600)
"""


def test_a_trainer_that_is_killed_in_the_body_leaves_no_gate_shut(fleet: Fleet) -> None:
    api = fleet.apis[0]
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(api.http.base_url)], stdout=subprocess.PIPE, text=True
    )
    with trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "paused\n"
        held = api.talk()
        waiting = speaking(fleet, held)
        before = of_fleet(api)["version"]
        until(lambda: of_fleet(api)["version"] > before)
        assert of_fleet(api)["paused"], "it was renewed"
        trainer.kill()
    assert finish(waiting.result()) == "stop"
    gate = of_fleet(api)
    assert (gate["paused"], gate["weight_version"]) == (False, None), "whose weights the engines have is not known"
