"""Prompts as ids: what the engine gets turn by turn, and what is stored of it."""

from __future__ import annotations

from typing import Any

import pytest

from integration.stand import WEATHER, Message, Stand, user
from integration.tito import GENERATION, output_of, rendered, require_consistent, sent_ids, text_of

BOTH = pytest.mark.parametrize("tito", ["sglang", "vllm"], indirect=True)
"""For what the engines' prompts, or the ids that they take, might make a difference to."""

NO_CALLS = {"tool_calls": False}
CALLS = {"tool_calls": True}


def results(reply: Message, text: str = "Rain") -> list[Message]:
    return [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in reply.get("tool_calls") or ()]


@BOTH
def test_every_prompt_is_the_stored_ids_and_what_is_new(tito: Stand) -> None:
    talk = tito.talk()
    talk.say("What is the weather?", tools=[WEATHER], sim={**CALLS, "reasoning": True})
    talk.add(*results(talk.messages[-1]), tools=[WEATHER], sim={**NO_CALLS, "reasoning": True})
    talk.say("And in words: “straße”, 你好?", tools=[WEATHER], sim=NO_CALLS)
    talk.add(user("One"), user("after another"), tools=[WEATHER], sim=NO_CALLS)
    prompts = sent_ids(tito, talk)
    assert prompts[0] == rendered(talk.messages[:1], [WEATHER])
    assert prompts[-1] == rendered(talk.messages[:-1], [WEATHER])
    new = prompts[3][len(prompts[2]) + talk.committed()[2]["output_tokens"] :]
    assert text_of(new) == f"\n<|im_start|>user\nOne<|im_end|>\n<|im_start|>user\nafter another<|im_end|>\n{GENERATION}"
    assert [event["base_tokens"] for event in talk.committed()][1:] == [
        len(prompt) + event["output_tokens"] for prompt, event in zip(prompts, talk.committed()[:3], strict=False)
    ]
    assert all(event["sent_ids"] for event in talk.committed())
    state = talk.state()["metadata"]
    assert (state["tito_session_mismatch"], state["max_trim_tokens"]) == ([], 0)
    require_consistent(tito, talk)


def dropped(message: Message) -> Message:
    return {"role": "assistant", "content": message["content"]}


def padded(message: Message) -> Message:
    return {**message, "content": f"\n{message['content']}  ", "reasoning_content": None}


@pytest.mark.parametrize(
    ("matcher", "change"),
    [("tolerant", dropped), ("tolerant", padded), ("role_content_only", dropped), ("role_content_only", padded)],
)
def test_reasoning_that_a_harness_drops_keeps_its_tokens(tito: Stand, matcher: str, change: Any) -> None:
    talk = tito.talk(matcher=matcher)
    first = talk.say("Think", sim={"reasoning": True})
    assert "<think>" in text_of(output_of(first.json()))
    for text in ("And again", "Once more"):
        talk.messages = [change(one) if one["role"] == "assistant" else one for one in talk.messages]
        talk.say(text, sim={"reasoning": True})
    prompts = sent_ids(tito, talk)
    stored = [record["response"]["choices"][0]["message"] for record in talk.state()["records"]]
    assert prompts[2] == rendered([user("Think"), stored[0], user("And again"), stored[1], user("Once more")])
    assert talk.state()["metadata"]["tito_session_mismatch"] == []
    require_consistent(tito, talk)


@BOTH
@pytest.mark.parametrize("reason", ["length", "abort"])
def test_a_generation_that_was_cut_is_ended_by_the_next_prompt(tito: Stand, reason: str) -> None:
    talk = tito.talk()
    talk.say("Hello", sim={"finish_reason": reason, "reasoning": False})
    [output] = [output_of(record["response"]) for record in talk.state()["records"]]
    assert not text_of(output).endswith("<|im_end|>")
    talk.say("On")
    one, two = sent_ids(tito, talk)
    assert two[: len(one) + len(output)] == one + output
    assert text_of(two[len(one) + len(output) :]) == f"<|im_end|>\n<|im_start|>user\nOn<|im_end|>\n{GENERATION}"
    require_consistent(tito, talk)


def test_other_tools_begin_a_segment_whose_prompt_shows_them(tito: Stand) -> None:
    other = {"type": "function", "function": {"name": "divine", "description": "Divines", "parameters": {}}}
    talk = tito.talk()
    talk.say("Hello", tools=[WEATHER], sim=NO_CALLS)
    talk.say("Now with others", tools=[other], sim=NO_CALLS)
    talk.say("Still", tools=[other], sim=NO_CALLS)
    talk.say("None at all")
    prompts = sent_ids(tito, talk)
    assert prompts[1] == rendered(talk.messages[:3], [other])
    assert '"divine"' in text_of(prompts[1])
    assert '"weather"' not in text_of(prompts[1])
    assert prompts[3] == rendered(talk.messages[:7])
    causes = [(row["segment"], row["segment_cause"], [span["turn"] for span in row["turns"]]) for row in talk.rows()]
    assert causes == [(0, None, [1]), (1, "drift", [2, 3]), (2, "drift", [4])]
    require_consistent(tito, talk)


@BOTH
def test_tools_that_are_not_offered_at_first_are_not_shown_and_then_begin_a_segment(tito: Stand) -> None:
    talk = tito.talk()
    talk.say("Hello", tools=[WEATHER], tool_choice="none")
    talk.say("Still none", tools=[WEATHER], tool_choice="none")
    talk.say("Now", tools=[WEATHER], sim=NO_CALLS)
    prompts = sent_ids(tito, talk)
    shown = [WEATHER] if talk.committed()[0]["dialect"] == "vllm" else None  # vLLM shows them all the same
    assert prompts[1] == rendered(talk.messages[:3], shown)
    assert prompts[2] == rendered(talk.messages[:5], [WEATHER])
    assert [row["segment_cause"] for row in talk.rows()] == ([None] if shown else [None, "drift"])
    require_consistent(tito, talk)


@BOTH
def test_a_reply_that_its_client_begins_is_continued_as_ids(tito: Stand) -> None:
    """The template of the simulator begins a reply as it renders a message of the assistant, so both engines can."""
    talk = tito.talk()
    talk.say("Hello", sim=NO_CALLS)
    begun = [*talk.messages, user("And?"), {"role": "assistant", "content": "I would"}]
    fields = {"continue_final_message": True, "add_generation_prompt": False, "sim": {**NO_CALLS, "text": " not"}}
    assert talk.chat(begun, **fields).status_code == 200
    talk.messages = [*begun[:-1], {"role": "assistant", "content": "I would not"}]
    talk.say("Why?", sim=NO_CALLS)
    prompts = sent_ids(tito, talk)
    assert text_of(prompts[1]).endswith(f"{GENERATION}I would")
    assert prompts[2][: len(prompts[1])] == prompts[1]
    [row] = talk.rows()
    assert [turn["end"] - turn["output_start"] for turn in row["turns"]] == [
        len(output_of(record["response"])) for record in talk.state()["records"]
    ]
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"] * 3
    assert row["messages"][3]["content"] == "I would not"
    require_consistent(tito, talk)


@BOTH
def test_in_a_tree_a_fork_continues_its_parents_ids_and_a_new_beginning_is_rendered(tito: Stand) -> None:
    talk = tito.talk(history="tree")
    first = talk.say("One", sim={"reasoning": True})
    after_one = list(talk.messages)
    second = talk.say("Two", sim=NO_CALLS)
    talk.messages = after_one
    talk.say("Instead", sim=NO_CALLS)
    carried = second.json()["choices"][0]["message"]
    talk.messages = [user("So far: one, two"), carried]
    talk.say("Go on", sim=NO_CALLS)
    prompts = sent_ids(tito, talk)
    stored = prompts[0] + output_of(first.json())
    assert [prompt[: len(stored)] == stored for prompt in prompts] == [False, True, True, False]
    assert text_of(prompts[2][len(stored) :]) == f"\n<|im_start|>user\nInstead<|im_end|>\n{GENERATION}"
    assert prompts[3] == rendered([user("So far: one, two"), carried, user("Go on")])
    causes = [(event["branch"], event.get("branch_cause"), event["base_tokens"] > 0) for event in talk.committed()]
    assert causes == [(0, "start", False), (0, None, True), (1, "fork", True), (2, "compaction", False)]
