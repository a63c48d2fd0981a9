"""What keeps tokens exact where an engine, a template, a client or the disk is not as it should be."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import looking
from helpers.answering import Answer, Answering, Asked
from helpers.replies import Reply
from helpers.replies import sglang as sglang_reply
from helpers.tokenizers import needs_templates, tokenizer_folder

from integration.places import Places
from integration.stand import HOURS, Message, Stand, Talk, error_of, serving, until, user
from integration.tito import output_of
from workers import codec
from workers.codec import StoredTokens


class Engine(Answering):
    """Samples `output` whatever it is sent, and says to a session's turn what `spoil` leaves of a sound reply."""

    def __init__(self) -> None:
        super().__init__(self._sampled)
        self.reset()

    def _sampled(self, asked: Asked) -> Answer:
        reply = sglang_reply(json.loads(asked.body)["input_ids"], self.output)
        if asked.header("x-smg-routing-key") is not None:
            self.spoil(reply)
        return Answer(json.dumps(reply).encode())

    def reset(self) -> None:
        self.output = [7, 8]
        self.spoil: Callable[[Reply], None] = lambda reply: None


class Glm:
    """A server with GLM's tokenizer, whose replies end with a role token that the next prompt may replace."""

    def __init__(self, stand: Stand, engine: Engine, folder: Path) -> None:
        self.stand = stand
        self.engine = engine
        added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        self.ids = {token["content"]: token["id"] for token in added}

    def change_tokens(self, talk: Talk, turn: int, edit: Callable[[StoredTokens], bytes]) -> None:
        """Another content of a turn on disk, and nothing of it in memory: another session takes its place there."""
        url, where = self.stand.url, "WHERE session_id = :id AND turn = :turn"
        frames = [
            looking.value(url, f"SELECT {column} FROM turns {where}", id=talk.id, turn=turn)
            for column in ("tokens", "exchange")
        ]
        statement = f"UPDATE turns SET tokens = :tokens {where}"
        assert looking.change(url, statement, tokens=edit(codec.unpack_tokens(*frames)), id=talk.id, turn=turn) == 1
        self.stand.talk().say("Something else")


@pytest.fixture(scope="module")
def shared_glm(tmp_path_factory: pytest.TempPathFactory, places: Places) -> Iterator[Glm]:
    pytest.importorskip("transformers")
    folder = tokenizer_folder(tmp_path_factory, "glm-4.5")
    environment = {"TURNLOG_TOKENIZER": str(folder), "TURNLOG_CACHE_BYTES": "0"}
    with Engine() as engine, serving(places.new("glm"), engine.base_url, environment=environment) as stand:
        yield Glm(stand, engine, folder)


@pytest.fixture
def glm(shared_glm: Glm) -> Glm:
    shared_glm.engine.reset()
    return shared_glm


def says(count: int | None) -> Callable[[Reply], None]:
    """The reply does not repeat its prompt, and counts so many tokens of it; None: it counts none."""

    def spoil(reply: Reply) -> None:
        choice = reply["choices"][0]
        del choice["prompt_token_ids"]
        for told in (choice["meta_info"], reply["usage"]):
            del told["prompt_tokens"]
            if count is not None:
                told["prompt_tokens"] = count

    return spoil


@needs_templates
@pytest.mark.parametrize("fields", [{}, {"input_ids": [1, 2, 3, 4, 5, 6]}], ids=["built", "given"])
def test_an_engine_that_made_a_prompt_of_its_own_is_found_out(glm: Glm, fields: dict[str, Any]) -> None:
    """It repeats nothing, as one that ignores `input_ids` may: then it must have counted what was sent."""
    talk = glm.stand.talk()
    for count, expected in ((3, (500, "token_prefix_mismatch")), (None, (502, "upstream_invalid"))):
        glm.engine.spoil = says(count)
        assert error_of(talk.chat([user("Hello")], **fields)) == expected
        assert talk.types()[-2:] == ["TurnOpened", "TurnRejected"]
    assert talk.committed() == []
    glm.engine.reset()
    reply = talk.say("Hello", **fields).json()
    sent = reply["choices"][0]["prompt_token_ids"]
    glm.engine.spoil = says(len(sent) + 3)
    talk.say("On", input_ids=[*sent, *output_of(reply), 9])
    assert [event["suffix_tokens"] for event in talk.committed()] == [len(sent), 1]


def other_token(tokens: StoredTokens) -> bytes:
    ids = array("i", tokens.suffix_ids)
    ids[1] += 1
    return codec.pack(StoredTokens(ids.tobytes(), tokens.output_ids, tokens.logprobs))


NEXT: list[tuple[Message, int]] = [(user("On"), 0), ({"role": "tool", "content": "4", "tool_call_id": "c"}, 1)]


@needs_templates
@pytest.mark.parametrize(("message", "trimmed"), NEXT, ids=["whole", "trimmed"])
def test_a_stored_token_that_has_changed_is_no_beginning_of_a_prompt(glm: Glm, message: Message, trimmed: int) -> None:
    """Neither where the prompt takes all of them, nor where the last one is trimmed."""
    glm.engine.output = [7, 8, glm.ids["<|user|>"]]
    sound, changed = glm.stand.talk(), glm.stand.talk()
    for talk in (sound, changed):
        talk.say("Hello")
    glm.change_tokens(changed, 1, other_token)
    response = changed.chat([*changed.messages, message])
    assert error_of(response) == (500, "token_prefix_mismatch")
    assert changed.types()[-2:] == ["TurnOpened", "TurnRejected"]
    assert len(changed.committed()) == 1
    sound.add(message)
    assert [event.get("trimmed", 0) for event in sound.committed()] == [0, trimmed]
    assert [event["segment"] for event in sound.committed()] == [0, 0]


@needs_templates
@pytest.mark.parametrize("path", ["", "/samples"])
def test_a_session_whose_tokens_are_damaged_is_an_error_and_no_torn_body(glm: Glm, path: str) -> None:
    """The first record could have been sent."""
    talk = glm.stand.talk()
    talk.say("Hello")
    talk.say("On")
    glm.change_tokens(talk, 2, lambda tokens: b"\0")
    response = glm.stand.http.request("POST" if path else "GET", talk.path + path)
    assert error_of(response) == (500, "session_unreadable")


SHAPELESS: list[dict[str, Any]] = [
    {"chat_template_kwargs": 5},
    {"chat_template_kwargs": {"tokenize": True}},
    {"tools": 5},
    {"continue_final_message": True},
]


def test_what_cannot_be_rendered_is_400_before_anything_is_claimed(tito: Stand) -> None:
    talk = tito.talk()
    call = tito.meanwhile(talk.chat, [user("Slowly")], sim={"latency_s": HOURS})
    tito.until_generating(talk)
    before = talk.events()
    for fields in SHAPELESS:
        assert talk.chat([user("x")], **fields).status_code == 400, fields
    assert error_of(talk.chat([user("x")])) == (409, "session_busy")
    assert talk.events() == before
    tito.end()
    assert call.result().status_code == 200
    after = talk.events()
    for fields in SHAPELESS:
        assert talk.chat([user("x")], **fields).status_code == 400, fields
    assert talk.events() == after


def test_a_short_turn_does_not_wait_for_long_prompts(tito: Stand) -> None:
    small = tito.talk()
    small.say("Hello")
    text = " ".join(f"word{number}" for number in range(150_000))
    long = [tito.talk() for _ in range(4)]
    calls = [tito.meanwhile(talk.chat, [user(text)], max_tokens=2) for talk in long]
    until(lambda: all("TurnOpened" in talk.types() for talk in long))
    small.say("On")
    asked = sum(talk.generations() for talk in long)
    for talk in long:
        assert tito.http.delete(talk.path).status_code == 204
    assert asked < 2, "it came behind long prompts"
    assert {call.result().status_code for call in calls} <= {200, 404}
