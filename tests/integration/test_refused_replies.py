"""A reply that is refused because of its payload: nothing is committed, and its beginning is kept for diagnosis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from integration.places import Places
from integration.routing import EXPERTS, KINDS, Recorded, Session, fetched, problems, recorded, rows_in
from integration.stand import error_of, user
from ops.simulator.process import SimulatorProcess

KEPT = 256 << 10


@pytest.fixture(scope="module", params=["sglang", "sglang pool", "vllm"])
def line(
    request: pytest.FixtureRequest,
    sglang: SimulatorProcess,
    vllm: SimulatorProcess,
    places: Places,
) -> Iterator[Recorded]:
    kind, _, pool = request.param.partition(" ")
    environment = {"TURNLOG_REPLAY": EXPERTS, "TURNLOG_MOE_LAYERS": "4", "TURNLOG_MOE_TOPK": "2"}
    if pool:
        environment |= {"TURNLOG_INLINE_MAX_BYTES": "0", "TURNLOG_WORKERS": "1"}
    engine = sglang if kind == "sglang" else vllm
    with recorded(places.new("refused"), engine.base_url, environment) as made:
        yield made


def rejections(talk: Session) -> list[dict[str, Any]]:
    return [event for event in talk.events() if event["type"] == "TurnRejected"]


def kept(talk: Session, fence: int) -> tuple[int, bytes, str]:
    """Status, content and the whole reply's size of a refused reply's route."""
    response = talk.stand.http.get(f"{talk.path}/rejected/{fence}")
    return response.status_code, response.content, response.headers.get("x-turnlog-reply-bytes", "")


@pytest.mark.long
@pytest.mark.parametrize(("fault", "nested"), [("bad_experts_base64", False), ("wrong_experts_rows", True)])
def test_a_spoiled_payload_is_502_and_its_reply_is_kept(line: Recorded, fault: str, nested: bool) -> None:
    talk = line.talk()
    talk.say("Hello")
    before = talk.state()
    response = talk.chat([*talk.messages, user("Again")], sim={"fault": fault, "experts": {"nested": nested}})
    sent = line.sent
    assert error_of(response) == (502, "upstream_invalid")
    assert EXPERTS in response.json()["error"]["message"]
    [rejected] = rejections(talk)
    assert (rejected["reply_bytes"], rejected["kept_bytes"]) == (len(sent), len(sent))
    assert EXPERTS in rejected["detail"]
    assert kept(talk, rejected["fence"]) == (200, sent, str(len(sent)))
    after = talk.state()
    assert after["records"] == before["records"]
    assert problems(line.stand) == []
    talk.say("Again")
    assert len(talk.committed()) == 2
    assert fetched(talk, 3).rows.tolist() == rows_in(line.sent).tolist()


def test_of_a_long_reply_only_the_beginning_is_kept(line: Recorded) -> None:
    talk = line.talk()
    assert talk.chat([user("Hello")], sim={"fault": "nan_logprob", "body_bytes": 3 * KEPT}).status_code == 502
    sent = line.sent
    assert len(sent) > 2 * KEPT
    [rejected] = rejections(talk)
    assert (rejected["reply_bytes"], rejected["kept_bytes"]) == (len(sent), KEPT)
    assert kept(talk, rejected["fence"]) == (200, sent[:KEPT], str(len(sent)))
    assert str(len(sent)) not in ("", str(KEPT))


@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_turn_leaves_the_payloads_of_the_one_before(line: Recorded, kind: str) -> None:
    """Nothing is tombstoned by what was not committed."""
    talk = line.talk(rollback_window=0)
    wish: dict[str, Any] = {"experts": {}, "indexer_topk": {}}
    talk.say("Hello", sim=wish)
    body = line.sent
    if f'"{kind}"' not in body.decode():
        pytest.skip("vLLM has no such payload")
    for fault in ("wrong_experts_rows", "nan_logprob"):
        refused = talk.chat([*talk.messages, user("Again")], sim={**wish, "fault": fault})
        assert refused.status_code == 502
        assert fetched(talk, 1, kind).rows.tolist() == rows_in(body, kind).tolist()


def test_what_is_not_kept_is_not_found(line: Recorded) -> None:
    talk, other = line.talk(), line.talk()
    assert talk.chat([user("Hello")], sim={"fault": "bad_experts_base64"}).status_code == 502
    assert talk.chat([user("Hello")], sim={"fault": "status_500"}).status_code == 500
    refused, failed = rejections(talk)
    assert "kept_bytes" not in failed
    for path in (
        f"{talk.path}/rejected/{failed['fence']}",
        f"{talk.path}/rejected/{refused['fence'] + 1000}",
        f"{other.path}/rejected/{refused['fence']}",
    ):
        assert error_of(line.stand.http.get(path)) == (404, "not_found")
    for path in (f"{talk.path}/rejected/x", f"{talk.path}/rejected/-1", f"{talk.path}/rejected/{2**70}"):
        assert error_of(line.stand.http.get(path))[0] in (400, 404)
