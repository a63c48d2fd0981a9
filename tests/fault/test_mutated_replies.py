"""Fault 6: damaged replies of an engine, over a real server. Each is a 502, or a turn that is stored as what it says.

What a reply says is told by the rules of `workers`, which `unit/test_parse_fuzz.py` and `unit/test_payloads.py` hold
against readers of their own; here nothing may be lost or changed between the engine's bytes and log, record, export
and client.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from helpers.amounts import cases
from helpers.answering import Answer, Answering
from helpers.replies import BYTES, Reply, body_of, mutated
from integration.stand import Stand, Talk, error_of, serving, user
from unit.malformed_payloads import bodies, npy

from app.turn.client_reply import ASKED_FOR
from fault.table import Tally
from fault.verified import verified
from ops.verify import Acknowledged
from workers import codec, job, payloads
from workers.parse import REPLAY, Rejected
from workers.payloads import PayloadSpec
from workers.reply import UNKNOWN_VERSION, Job, ValidatedReply

ROWS = np.arange(8, dtype="<i4").reshape(4, 1, 2)

PHASES: Mapping[str, Mapping[str, str]] = {
    "asked": {"TURNLOG_CLIENT_REPLY": "asked", "TURNLOG_REPLAY": "routed_experts"},
    "verbatim": {"TURNLOG_INLINE_MAX_BYTES": "0"},
}
"""The settings of a server. `verbatim` judges each reply in a worker; its clients get the engine's bytes."""


@pytest.fixture(scope="module")
def replies() -> dict[str, bytes]:
    """What the engine answers each session with."""
    return {}


@pytest.fixture(scope="module")
def replying(replies: dict[str, bytes]) -> Iterator[Answering]:
    with Answering(lambda asked: Answer(replies.get(asked.header("x-smg-routing-key") or "", b"{}"))) as made:
        yield made


def sound(number: int) -> Reply:
    """A reply of either dialect with a payload, as lists or in base64."""
    shape = ("sglang", "vllm")[number % 2]
    reply: Reply = json.loads(body_of(shape, {"id": f"r{number}"}))
    home = reply["choices"][0] if shape == "vllm" else reply["choices"][0]["meta_info"]
    raw = npy(ROWS) if shape == "vllm" else ROWS.tobytes()
    home["routed_experts"] = ROWS.tolist() if number % 3 else base64.b64encode(raw).decode()
    return reply


def damaged(number: int) -> bytes:
    """A reply with a value in another's place, or with other bytes."""
    random, reply = Random(f"mutant {number}"), sound(number)
    if random.random() < 0.6:
        return mutated(reply, random, random.choice([(", ", ": "), (",", ":"), (",\n ", " :")]))
    body = json.dumps(reply).encode()
    at = random.randrange(len(body))
    junk = random.choice([*BYTES, random.randbytes(2), body[at : at + 40]])
    return random.choice([body[:at] + junk + body[at + random.randrange(5) :], body[:at]])


def judged(body: bytes, *, is_required: bool) -> ValidatedReply | None:
    """What the rules make of a reply; None where they refuse it."""
    specs = [PayloadSpec(kind, required=is_required and kind == "routed_experts") for kind in REPLAY]
    try:
        return job.work(Job("auto", None, specs, [], [], 200, "", b""), memoryview(body))
    except Rejected:
        return None


class Client:
    """A session that gets one reply, and a sound one after a refusal."""

    def __init__(self, stand: Stand, replies: dict[str, bytes], number: int, body: bytes, phase: str) -> None:
        self.talk: Talk = stand.talk()
        self.acknowledged: list[Acknowledged] = []
        self.refused: list[str] = []
        self._stand, self._replies, self._phase = stand, replies, phase
        self._bodies = (body, json.dumps(sound(number)).encode())

    def run(self) -> None:
        types = ["SessionCreated"]
        for body in self._bodies:
            self._replies[self.talk.id] = body
            reply, said = self.talk.chat([user("Hi")]), judged(body, is_required=self._phase == "asked")
            if said is None:
                assert body is self._bodies[0], "a sound reply is refused"
                assert error_of(reply) == (502, "upstream_invalid"), (body, reply.text[:200])
                self.refused.append(reply.json()["error"]["message"])
                types += ["TurnOpened", "TurnRejected"]
                continue
            assert reply.status_code == 200, (body, reply.text[:200])
            turn, content = int(reply.headers["x-turnlog-turn"]), hashlib.sha256(body).hexdigest()
            self.acknowledged.append(Acknowledged(self.talk.id, turn, content))
            self._is_given(reply.content, body)
            self._is_stored(said, body)
            types += ["TurnOpened", "TurnCommitted"]
            break
        assert [one for one in self.talk.types() if one != "AffinityBound"] == types

    def _is_given(self, got: bytes, body: bytes) -> None:
        """To the byte, or without what the client did not ask for."""
        if self._phase == "verbatim":
            assert got == body
        else:
            assert _lean(got) == _lean(body)

    def _is_stored(self, said: ValidatedReply, body: bytes) -> None:
        state = self._stand.http.get(self.talk.path, params={"replay": "true"})
        [record] = loads(state.content)["records"]
        assert record["response"] == loads(body)
        [row] = loads(
            b"[" + self._stand.http.get("/export", params={"session_id": self.talk.id, "replay": "true"}).content + b"]"
        )
        tokens = codec.unpack_tokens(said.tokens, said.exchange)
        prompt, output = (list(memoryview(ids).cast("i")) for ids in (tokens.suffix_ids, tokens.output_ids))
        assert row["tokens"] == [*prompt, *output]
        assert row["logprobs"] == [0.0] * len(prompt) + list(memoryview(tokens.logprobs).cast("d"))
        assert row["loss_mask"] == row["sampled_mask"] == [0] * len(prompt) + [1] * len(output)
        versions, names = row["weight_versions"][len(prompt) :], row["weight_version_names"]
        spans = [span.version for span in said.weight_versions for _ in range(span.start, span.end)]
        # An engine that does not say its version has the one that it was known to have when it was asked.
        known = row["turns"][0].get("dispatched") or UNKNOWN_VERSION
        spans = [known if version == UNKNOWN_VERSION else version for version in spans]
        assert [names[number] if names else str(number) for number in versions] == (
            spans if names else [version.lstrip("0") or "0" for version in spans]
        )
        assert [row["turns"][0]["finish_reason"], row["messages"][-1]] == [said.finish_reason, loads(said.message)]
        for payload in said.payloads:
            fields = (
                row[payload.kind] if isinstance(row.get(payload.kind), dict) else {**row, "data": row[payload.kind]}
            )
            sent = payloads.join([payloads.load(new.chunk, new.frame) for new in payload.new])
            given = np.frombuffer(base64.b64decode(fields["data"]), fields["dtype"])
            assert given.tolist() == sent.reshape(-1).tolist()
            assert (fields["row_start"], fields["rows"]) == (payload.start, payload.stop - payload.start)


def loads(text: bytes) -> Any:
    """Integers that Python refuses to read stay text."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 4000 else digits)


def _lean(body: bytes) -> Any:
    """A reply without what only some clients ask for."""
    reply = loads(body)
    [choice] = reply["choices"]
    for home in (reply, choice, choice.get("meta_info"), reply.get("sglext")):
        for name in ASKED_FOR.union(REPLAY) if isinstance(home, dict) else ():
            home.pop(name, None)
    return reply


@pytest.mark.fault(6, "an engine's replies are damaged")
@pytest.mark.parametrize("phase", ["asked", pytest.param("verbatim", marks=pytest.mark.long)])
def test_a_damaged_reply_is_refused_or_stored_as_it_is(
    replying: Answering, replies: dict[str, bytes], tmp_path: Path, tally: Tally, phase: str
) -> None:
    with serving(tmp_path, replying.base_url, environment=PHASES[phase]) as stand:
        known = (
            []
            if phase == "asked"
            else [(body, message) for _, body, message, specs in bodies() if specs == [PayloadSpec(specs[0].kind)]]
        )
        mutants = [damaged(number) for number in range(cases(500))]
        clients = [
            Client(stand, replies, number, body, phase)
            for number, body in enumerate([*(body for body, _ in known), *mutants])
        ]
        for call in [stand.meanwhile(client.run) for client in clients]:
            call.result(timeout=120)
        for client, (body, message) in zip(clients, known, strict=False):
            assert message in client.refused[0], body
        done = [one for client in clients for one in client.acknowledged]
        refused = sum(bool(client.refused) for client in clients[len(known) :])
        assert len(mutants) // 10 < refused < len(mutants) * 9 // 10
        assert len(stand.rows(replay="true")) == len(done)
        tally.tried += len(clients)
        verified(stand, done, tally)
        assert "Traceback" not in stand.server.log_path.read_text(errors="replace")
