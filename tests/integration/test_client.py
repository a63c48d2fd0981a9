"""The client against a real server and engine, sync and async, and the openai client that it hands out."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from integration.cutting import CuttingRelay
from integration.proxy import RecordingProxy
from integration.stand import Stand, user
from turnlog import (
    AsyncTurnlog,
    Conflict,
    InvalidRequest,
    Limits,
    NewSession,
    NotFound,
    Session,
    SessionClosed,
    Turnlog,
)

PATIENCE_S = 120.0
"""On a machine that has much else to do, a restart takes long."""


@pytest.fixture
def client(stand: Stand) -> Iterator[Turnlog]:
    with Turnlog(stand.server.base_url) as made:
        yield made


def converse(session: Session, *texts: str) -> list[Any]:
    """A turn for each text, by the openai client."""
    messages: list[Any] = []
    with session.openai() as client:
        for text in texts:
            messages.append(user(text))
            reply = client.chat.completions.create(model="simulator", messages=messages)
            messages.append(reply.choices[0].message.model_dump(exclude_none=True))
    return messages


def finished(client: Turnlog, group: str, reward: float, *texts: str) -> Session:
    with client.create_session(group_id=group) as session:
        converse(session, *texts)
        session.set_reward(reward)
    return session


@pytest.mark.parametrize("through", [False, True])
def test_a_proxy_is_used_only_where_one_is_given(stand: Stand, monkeypatch: pytest.MonkeyPatch, through: bool) -> None:
    """A token, a prompt and a reply go to whatever `HTTP_PROXY` names, if a client reads it."""
    with RecordingProxy(stand.server.base_url) as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.base_url)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        with Turnlog(stand.server.base_url, proxy=proxy.base_url if through else None) as client:
            session = client.create_session()
            converse(session, "Hello")
            assert session.set_reward(1.0) > 1
            assert len(list(client.export(session_id=session.id))) == 1
        assert len(proxy.requests) == (4 if through else 0)


def test_a_session_from_its_creation_to_its_samples(client: Turnlog, stand: Stand) -> None:
    limits: Limits = {"turns": 50, "tokens": 100_000, "context": 32_768, "seconds": 1800}
    fields: NewSession = {"group_id": "task-17", "attempt": 2, "metadata": {"a": [1]}, "on_drift": "reject"}
    with client.create_session(**fields, limits=limits) as session:
        assert session.base_url == f"{stand.server.base_url}/sessions/{session.id}/v1"
        assert session.base_url == session.anthropic_base_url + "/v1"
        assert session.url == client.attach(session.id).url == session.anthropic_base_url
        assert session.token is None
        messages = converse(session, "What is 6 times 7?", "And times 2?")
        found = session.samples()
        records = session.get()["records"]
        assert session.set_reward(1.0, {"tests": 0.5}, turn=1) < session.set_reward(0.25)
        assert session.get()["metadata"]["reward"] == 0.25
        assert session.annotate("note", "Look again.") < session.annotate("tags", ["a"])
        assert (session.get()["session"]["note"], session.get()["session"]["tags"]) == ("Look again.", ["a"])
    [sample] = found.samples
    [row] = client.export(session_id=session.id)
    assert [row["metadata"], row["group_id"], row["attempt"], row["reward"]] == [{"a": [1]}, "task-17", 2, 0.25]
    assert row["turn_rewards"] == {"1": {"reward": 1.0, "components": {"tests": 0.5}}}
    assert [message["content"] for message in row["messages"]] == [message["content"] for message in messages]
    assert sample.arrays["tokens"].tolist() == row["tokens"]
    assert sample.arrays["loss_mask"].tolist() == row["loss_mask"][row["prompt_length"] :]
    np.testing.assert_array_equal(sample.arrays["rollout_log_probs"], row["logprobs"][row["prompt_length"] :])
    assert (sample.fields["response_length"], found.empty_reason) == (row["response_length"], None)
    assert found.session["accumulated_token_ids"] == row["tokens"]
    assert len(records) == 2
    assert [event["type"] for event in session.events()][-1] == "SessionClosed"
    with client.create_session() as other:
        converse(other, "Hello")
        assert (other.samples(max_seq_len=1).samples, other.samples(1).empty_reason) == ([], "all_truncated")


def test_annotations_are_of_numpy_in_and_out(client: Turnlog) -> None:
    with client.create_session() as session:
        converse(session, "Hello", "Again")
    [row] = client.export(session_id=session.id)
    span = row["turns"][1]
    size, own = span["end"] - span["output_start"], span["end"] - span["start"]
    scores = np.linspace(-2, 0, size, dtype=np.float64)
    masked = np.ma.masked_array(np.arange(own), mask=np.arange(own) % 2 == 0)
    session.annotate("scores", scores, turn=2, over="output", writer="teacher")
    session.annotate("steps", masked, turn=2, over="own")
    session.annotate("verdict", {"passed": True}, turn=1)
    given, steps = session.annotation("scores", turn=2), session.annotation("steps", turn=2)
    assert (given.dtype, given.mask.any(), steps.dtype) == (np.float32, False, np.int32)
    np.testing.assert_array_equal(given, scores.astype(np.float32))
    np.testing.assert_array_equal(steps.mask, masked.mask)
    np.testing.assert_array_equal(steps.compressed(), masked.compressed())
    assert session.annotation("verdict", turn=1) == {"passed": True}
    listed = {one["name"]: (one["turn"], one["writer"], one.get("length")) for one in session.annotations()}
    assert listed == {"scores": (2, "teacher", size), "steps": (2, None, own), "verdict": (1, None, None)}
    [row] = client.export(session_id=session.id, columns=["scores", "steps"])
    assert row["columns"]["scores"] is not None
    np.testing.assert_array_equal(np.float32(row["columns"]["scores"][span["output_start"] : span["end"]]), given)
    for _ in range(2):
        session.delete_annotation("scores", turn=2)
    with pytest.raises(NotFound):
        session.annotation("scores", turn=2)
    for wrong in ([[1.0]], ["a"], [None], [1 << 40]):
        with pytest.raises(ValueError, match="column"):
            session.annotate("scores", wrong, turn=2, over="output")
    with pytest.raises(ValueError, match="requires a turn"):
        session.annotate("scores", scores, over="output")  # type: ignore[call-overload]
    with pytest.raises(InvalidRequest, match=str(size)):
        session.annotate("scores", scores[1:], turn=2, over="output")


def test_closing_ends_with_the_context_also_after_an_exception(client: Turnlog) -> None:
    with pytest.raises(RuntimeError, match="the agent failed"), client.create_session() as session:
        raise RuntimeError("the agent failed")
    with pytest.raises(SessionClosed) as caught:
        session.get()
    assert (caught.value.status, caught.value.code) == (404, "session_closed")
    session.close()
    with session.openai() as agent, pytest.raises(openai.NotFoundError, match="closed"):
        agent.chat.completions.create(model="simulator", messages=[{"role": "user", "content": "Hello"}])
    session.set_reward(0.0)
    session.erase()
    with pytest.raises(NotFound):
        session.set_reward(1.0)


def test_an_export_that_breaks_off_loses_and_repeats_nothing(client: Turnlog, stand: Stand) -> None:
    group = uuid.uuid4().hex
    texts = ("Line\u2028ends\x85elsewhere", "Two")
    made = [finished(client, group, 1.0, *texts).id for _ in range(4)]
    whole = list(client.export(group_id=group))
    assert [row["session_id"] for row in whole] == made
    assert whole[0]["messages"][0]["content"] == texts[0]
    size = len(stand.http.get("/export", params={"group_id": group}).content)
    with (
        CuttingRelay(stand.server.port, size // 3, 20, size // 2, 600) as relay,
        Turnlog(relay.base_url) as broken,
    ):
        export = broken.export(group_id=group)
        rows = list(export)
        assert (relay.left, relay.made) == (0, 5)
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in whole]
    assert export.next_cursor is not None
    assert list(client.export(group_id=group, cursor=export.next_cursor)) == []
    some = client.export(group_id=group, limit=3)
    assert [row["session_id"] for row in some] == made[:3]
    assert [row["session_id"] for row in client.export(group_id=group, cursor=some.cursor)] == made[3:]
    with pytest.raises(TypeError, match="min_rewards is not a parameter, did you mean min_reward:"):
        list(client.export(min_rewards=1))


def test_a_followed_log_goes_on_over_a_restart_and_over_broken_connections(mortal: Stand) -> None:
    with (
        Turnlog(mortal.server.base_url, retry_for_s=PATIENCE_S) as client,
        CuttingRelay(mortal.server.port, 400, 300) as relay,
        Turnlog(relay.base_url, retry_for_s=PATIENCE_S) as follower,
    ):
        session = client.create_session()
        log = mortal.meanwhile(list, follower.attach(session.id).events(follow=True))
        converse(session, "One")
        mortal.server.kill()
        reward = mortal.meanwhile(session.set_reward, 0.5)
        mortal.server.start()
        assert reward.result() > 1
        converse(client.create_session(), "Another")
        session.erase()
        seen = [event["seq"] for event in log.result(PATIENCE_S)]
        assert seen == list(range(1, len(seen) + 1))
        assert len(seen) == len(list(session.events()))


def test_a_reply_that_was_lost_is_no_error(client: Turnlog, stand: Stand) -> None:
    """The close arrived, its reply did not: the second try finds the session closed, and that is what was wanted."""
    session = client.create_session()
    with CuttingRelay(stand.server.port, 10) as relay, Turnlog(relay.base_url) as broken:
        broken.attach(session.id).close()
        assert (relay.left, relay.made) == (0, 2)
    assert [event["type"] for event in session.events()].count("SessionClosed") == 1
    with CuttingRelay(stand.server.port, 10) as relay, Turnlog(relay.base_url) as broken:
        group = uuid.uuid4().hex
        made = broken.create_session(group_id=group)
        assert relay.made == 2
    assert [one["session_id"] for one in client.sessions(group_id=group)] == [made.id]
    converse(client.attach(made.id), "One")
    with CuttingRelay(stand.server.port, 10) as relay, Turnlog(relay.base_url) as broken:
        forks = broken.attach(made.id).fork(1, count=3, group_id=(tries := uuid.uuid4().hex))
        assert relay.made == 2
    assert {one["session_id"] for one in client.sessions(group_id=tries)} == {one.id for one in forks}
    assert len(forks) == 3


def test_the_async_client(stand: Stand) -> None:
    async def one(client: AsyncTurnlog, group: str, number: int) -> str:
        async with await client.create_session(group_id=group, attempt=number) as session:
            async with session.openai() as agent:
                await agent.chat.completions.create(
                    model="simulator", messages=[{"role": "user", "content": f"Question {number}"}]
                )
            assert len((await session.samples()).samples) == 1
            await session.set_reward(number)
        return session.id

    async def rollout() -> tuple[list[str], list[str], list[str]]:
        group = uuid.uuid4().hex
        async with AsyncTurnlog(stand.server.base_url) as client:
            made = await asyncio.gather(*(one(client, group, number) for number in range(8)))
            listed = [found["session_id"] async for found in client.sessions(group_id=group, status="closed")]
            rows = [row["session_id"] async for row in client.export(group_id=group, min_reward=4)]
            with pytest.raises(SessionClosed):
                await client.attach(made[0]).get()
        return made, listed, rows

    made, listed, rows = asyncio.run(rollout())
    assert sorted(listed) == sorted(made)
    assert sorted(rows) == sorted(made[4:])


def test_engines_are_added_brought_back_and_removed(client: Turnlog, stand: Stand) -> None:
    url, run = "http://engine.invalid:30000", uuid.uuid4().hex

    def serving(of: str) -> list[str]:
        return [one["url"] for one in client.engines(run=of)]

    assert [client.add_engine(said, run=run)["run"] for said in (url, f"{url}/", f"{url}/v1")] == [run] * 3
    assert client.add_engine(url)["run"] == run, "it stays its run's"
    assert serving(run) == [url]
    for other in ("another", "*"):
        with pytest.raises(Conflict, match="remove it first"):
            client.add_engine(url, run=other)
    assert stand.http.post("/engines", json={"url": url, "state": "draining"}).status_code == 200
    assert [one["state"] for one in client.engines(run=run)] == ["draining"]
    assert client.add_engine(url)["state"] == "serving"
    client.remove_engine(url)
    assert (serving(run), client.add_engine(url)["run"]) == ([], run)
    client.remove_engine(url)
    assert client.add_engine(url, run="*")["run"] is None
    assert url in serving(run) + serving("another")
    client.remove_engine(url)
    with pytest.raises(NotFound):
        client.remove_engine(url)
    with pytest.raises(InvalidRequest, match="a base URL"):
        client.add_engine("engine.invalid:30000")
