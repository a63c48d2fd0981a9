"""What an old store holds: a session for everything that a log, its content and its exports can be made of.

Written over HTTP, so that it can be told to a server of any release. Names say what is special about a session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from integration.stand import WEATHER, Stand, Talk, user
from integration.tito import output_of

PLAIN = {"tool_calls": False, "reasoning": False, "completion_tokens": 6}
LENGTH = {**PLAIN, "finish_reason": "length"}

LARGE = {f"component-{number:05}": 0.5 for number in range(4000)}
"""Components of more than the 64 KiB that a reward may have since."""

AGENT = {"x-claude-code-session-id": "harness", "x-claude-code-agent-id": "explorer"}


class Chapter(NamedTuple):
    """Sessions that one server wrote, before an engine of this dialect; `tokenizer`: with one."""

    dialect: str
    environment: Mapping[str, str]
    tell: Callable[[Stand], None]
    tokenizer: bool = False


def rewarded(stand: Stand, talk: Talk, reward: float, **more: Any) -> None:
    assert stand.http.put(f"{talk.path}/reward", json={"reward": reward, **more}).status_code == 200


def closed(stand: Stand, *talks: Talk) -> None:
    for talk in talks:
        assert stand.http.delete(talk.path).status_code == 204


def said(stand: Stand, name: str, *texts: str, sim: Mapping[str, Any] = PLAIN, **body: Any) -> Talk:
    talk = stand.talk(session_id=name, **body)
    for text in texts:
        talk.say(text, sim=sim)
    return talk


def plain(stand: Stand) -> None:
    said(stand, "empty", metadata={"owner": "é", "nested": [{"a": None, "b": [1, 2.5]}]})
    tools = said(stand, "tools", metadata={"task": 7})
    tools.say("Weather?", tools=[WEATHER], sim={"tool_calls": True, "reasoning": True}, temperature=0.5)
    keyed = said(stand, "keyed")
    for text in ("One", "Two"):
        keyed.say(text, headers={"idempotency-key": f"key-{text}"}, sim=PLAIN, temperature=0.7, top_p=0.9)
    rolled = said(stand, "rolled-back", "One", "Two", rollback_window=2)
    rolled.messages = rolled.messages[:2]
    rolled.say("Instead of two", sim=PLAIN)
    rewarded(stand, rolled, 0.25, turn=3, components={"kept": 1.0})
    drifted = said(stand, "drifted", "One", "Two")
    drifted.say("With tools", tools=[WEATHER], sim=PLAIN)
    diverged = said(stand, "diverged", "One", "Two", on_divergence="segment", matcher="strict")
    diverged.messages = []
    diverged.say("Something else", sim=PLAIN)
    said(stand, "versions", "Old", sim={**PLAIN, "weight_versions": ["7", "8"]}).say(
        "Named", sim={**PLAIN, "weight_version": "final"}
    )
    endings(stand)
    completions(stand)
    agents(stand)


def endings(stand: Stand) -> None:
    """Turns that ended early, were refused, were cut off."""
    said(stand, "length-last", "One").say("Cut", sim=LENGTH)
    said(stand, "length-first", "Cut", sim=LENGTH).say("On", sim=PLAIN)
    said(stand, "aborted", "One").say("Stop", sim={**PLAIN, "finish_reason": "abort"})
    refused = said(stand, "refused", "One")
    assert refused.chat([*refused.messages, user("Bad")], sim={"fault": "null_logprob"}).status_code == 502
    refused.say("Good", sim=PLAIN)
    cut = said(stand, "cut-off", "One")
    slow = stand.meanwhile(cut.chat, [*cut.messages, user("Slow")], sim={**PLAIN, "latency_s": 5.0})
    stand.until_generating(cut, 2)
    closed(stand, cut)
    assert slow.result().status_code == 404


def completions(stand: Stand) -> None:
    both: dict[str, list[Any]] = {"text": ["Once upon", " a time"], "ids": [[5, 6, 7], [8, 9]]}
    for name, prompts in both.items():
        stand.talk(session_id=f"completions-{name}")
        whole: Any = prompts[0]
        for more in (*prompts[1:], None):
            body = {"model": "simulator", "prompt": whole, "max_tokens": 4, "return_token_ids": True}
            reply = stand.http.post(f"/sessions/completions-{name}/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            if more is not None:
                answered = reply.json()["choices"][0]["text"] if name == "text" else output_of(reply.json())
                whole = whole + answered + more


def agents(stand: Stand) -> None:
    for headers in ({"x-claude-code-session-id": "harness"}, AGENT):
        body = {"model": "simulator", "messages": [user("Hello")], "sim": PLAIN}
        assert stand.http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200


def groups(stand: Stand) -> None:
    """One acknowledged, one that waits, one that is not complete, and erased members."""
    for group in ("acked", "waiting", "partial"):
        for attempt in range(3):
            talk = said(stand, f"{group}-{attempt}", "One", "Two", group_id=group, attempt=attempt, adapter=None)
            if group != "partial" or attempt:
                rewarded(stand, talk, attempt / 4, components={"style": attempt / 8, "length": -1.0})
                closed(stand, talk)
    rewarded(stand, stand.known("waiting-2"), 0.75, components={"late": 0.125})
    erase(stand, "acked-1")
    taken = stand.http.get("/export/groups", params={"consumer": "trainer", "size": 1})
    assert taken.json()["group_id"] == "acked", taken.text
    acknowledged = stand.http.post("/export/groups/ack", json={"consumer": "trainer", "groups": ["acked"]})
    assert acknowledged.status_code == 200
    large = said(stand, "large-reward", "One")
    # Later releases refuse so much, and have no such rewards.
    body = {"reward": 1.0, "components": LARGE}
    assert stand.http.put(f"{large.path}/reward", json=body).status_code in (200, 400, 413)
    rewarded(stand, large, 0.5, turn=1, components={"turn": 0.5})
    closed(stand, large)
    erased = said(stand, "erased", "One", metadata={"owner": "someone"})
    rewarded(stand, erased, 0.5, components={"secret": 0.5}, turn=1)
    rewarded(stand, erased, 0.75)
    erase(stand, "erased")


def erase(stand: Stand, name: str) -> None:
    assert stand.http.delete(f"/sessions/{name}", params={"erase": "true"}).status_code == 204


def payloads(prefix: str) -> Callable[[Stand], None]:
    """Replay payloads: behind a window, all kept, of a closed session, across a rollback and a drift."""

    def tell(stand: Stand) -> None:
        said(stand, f"{prefix}-window", "One", "Two", "Three", rollback_window=1)
        said(stand, f"{prefix}-all", "One", "Two", retain="all")
        rolled = said(stand, f"{prefix}-rolled-back", "One", "Two")
        rolled.messages = rolled.messages[:2]
        rolled.say("Instead", sim=PLAIN)
        drifted = said(stand, f"{prefix}-drifted", "One")
        drifted.say("With tools", tools=[WEATHER], sim=PLAIN)
        closed(stand, said(stand, f"{prefix}-closed", "One"))

    return tell


def tokens_in(stand: Stand) -> None:
    """Turnlog builds the prompts; one session's client sends its own."""
    said(stand, "tokens-in", "One", "Two", "Three")
    own = said(stand, "own-ids")
    own.add(user("One"), input_ids=[1, 2, 3, 4], sim=PLAIN)


def other_dialect(stand: Stand) -> None:
    said(stand, "vllm", "One", "Two")
    said(stand, "vllm-length", "One", sim=LENGTH)
    closed(stand, said(stand, "vllm-closed", "One", metadata={"a": 1}))


REPLAY = {"TURNLOG_REPLAY": "routed_experts,indexer_topk"}
EXPERTS = {"TURNLOG_REPLAY": "routed_experts"}
SHAPED = {"TURNLOG_MOE_LAYERS": "4", "TURNLOG_MOE_TOPK": "2"}

CHAPTERS = (
    Chapter("sglang", {}, plain),
    Chapter("sglang", {}, groups),
    Chapter("sglang", REPLAY, payloads("flat")),
    Chapter("sglang", {**REPLAY, **SHAPED}, payloads("shaped")),
    Chapter("vllm", EXPERTS, payloads("npy")),
    Chapter("sglang", {}, tokens_in, tokenizer=True),
    Chapter("vllm", {}, other_dialect),
)
