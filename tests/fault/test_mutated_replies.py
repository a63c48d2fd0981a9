"""Fault 6: a short run of `tests.tools.mutated_replies`; its reader and its checks find what is wrong."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.amounts import cases

from fault.table import Tally
from tests.tools.mutated_replies import checks, payload_mutations
from tests.tools.mutated_replies.checks import Taken
from tests.tools.mutated_replies.mutate import CONTROL
from tests.tools.mutated_replies.payload_reader import Malformed, Rows
from tests.tools.mutated_replies.reader import Demand, Reading, decode, read, spell
from tests.tools.mutated_replies.run import Plan, run

PLAIN = Demand(judged=False)
JUDGED = Demand(judged=True)

Change = Callable[[dict[str, Any]], None]


@pytest.mark.anyio
@pytest.mark.fault(6, "an engine's replies are mutated")
async def test_mutated_replies_are_refused_or_committed_as_they_are(tmp_path: Path, tally: Tally) -> None:
    """The run verifies its stores itself, before it removes them."""
    plan = Plan(cases(1000), seed=20, folder=tmp_path, clients=16)
    found = await run(plan)
    total = found.total
    tally.tried += plan.count
    tally.acknowledged += total.accepted
    assert not found.failures, "\n".join(found.lines())
    assert not found.problems, "\n".join(found.lines())
    assert total.replies == plan.count
    assert min(total.accepted, total.refused) > plan.count // 10
    assert total.crashed == 0
    assert found.good_after > 0
    assert found.counts[CONTROL].accepted > 0


def sglang(change: Change) -> bytes:
    meta = {
        "completion_tokens": 2,
        "output_token_logprobs": [[-0.5, 4, "a"], [-0.25, 5, None]],
        "weight_version": "3",
        "routed_experts": base64.b64encode(payload_mutations.raw([1, 2, 3, 4])).decode(),
    }
    message = {"role": "assistant", "content": "ab"}
    choice = {"message": message, "finish_reason": "stop", "prompt_token_ids": [1, 2, 3], "meta_info": meta}
    reply = {"choices": [choice]}
    change(reply)
    return json.dumps(reply).encode()


def meta(**fields: Any) -> Change:
    return lambda reply: reply["choices"][0]["meta_info"].update(fields)


def choice(**fields: Any) -> Change:
    return lambda reply: reply["choices"][0].update(fields)


def test_a_sound_reply_is_read() -> None:
    reading = read(sglang(lambda _: None), JUDGED)
    assert (reading.prompt, reading.output, reading.logprobs) == ([1, 2, 3], [4, 5], [-0.5, -0.25])
    assert (reading.versions, reading.finish_reason) == (["3", "3"], "stop")
    assert reading.payloads == {"routed_experts": Rows(0, 4, [1, 2, 3, 4])}
    assert json.loads(spell(reading.message)) == {"role": "assistant", "content": "ab"}


@pytest.mark.parametrize(
    "change",
    [
        meta(completion_tokens=3),
        meta(completion_tokens=True),
        meta(completion_tokens=2.0),
        meta(output_token_logprobs=[[-0.5, 4], [float("nan"), 5]]),
        meta(output_token_logprobs=[[-0.5, 4], [-9999, 5]]),
        meta(output_token_logprobs=[[-0.5, 4], [-1, 2**31]]),
        meta(output_token_logprobs=[[-0.5, 4], [-1, 5.0]]),
        meta(output_token_logprobs=[[-0.5, 4], [-1]]),
        meta(weight_versions=[{"version": "1", "start": 0, "end": 1}]),
        meta(routed_experts="AAAA"),
        meta(routed_experts="AAAAAAAA!AAAAAAAAAAAAA=="),
        meta(routed_experts=[1, 2, 3]),
        meta(routed_experts=[[1], [2], [3], [-1]]),
        meta(routed_experts=[[1], [2, 2], [3], [4]]),
        meta(x=json.loads("[" * 98 + "]" * 98)),
        choice(prompt_token_ids=None),
        choice(message="x"),
        choice(message={"role": "assistant", "content": None}),
        choice(finish_reason=5),
        lambda reply: reply["choices"].append(reply["choices"][0]),
    ],
)
def test_a_malformed_reply_is_not_read(change: Change) -> None:
    with pytest.raises(Malformed):
        read(sglang(change), JUDGED)


def row(**changed: Any) -> bytes:
    fields = {
        "tokens": [1, 2, 3, 4, 5],
        "logprobs": [0.0, 0.0, 0.0, -0.5, -0.25],
        "loss_mask": [0, 0, 0, 1, 1],
        "sampled_mask": [0, 0, 0, 1, 1],
        "weight_versions": [-1, -1, -1, 3, 3],
        "weight_version_names": [],
        "status": "completed",
        "turns": [{"turn": 1, "start": 0, "output_start": 3, "end": 5, "finish_reason": "stop"}],
        "messages": [{"role": "user"}, {"role": "assistant", "content": "ab"}],
        "routed_experts": base64.b64encode(bytes([1, 2, 3, 4])).decode(),
        "row_start": 0,
        "rows": 4,
        "dtype": "uint8",
        "shape": [4, 1],
    }
    return json.dumps({**fields, **changed}).encode()


def taken() -> Taken:
    body = sglang(lambda _: None)
    return Taken(0, 1, body, read(body, JUDGED))


def test_a_faithful_export_passes() -> None:
    assert list(checks.export([taken()], row(), replay=True)) == []


@pytest.mark.parametrize(
    "changed",
    [
        {"tokens": [1, 2, 3, 4, 6]},
        {"tokens": [1, 2, 9, 4, 5]},
        {"logprobs": [0.0, 0.0, 0.0, -0.5, -0.26]},
        {"loss_mask": [0, 0, 1, 1, 1]},
        {"weight_versions": [-1, -1, -1, 3, 4]},
        {"weight_versions": [-1, -1, -1, 0, 0], "weight_version_names": ["4"]},
        {"status": "aborted"},
        {"messages": [{"role": "assistant", "content": "abc"}]},
        {"turns": []},
        {"routed_experts": base64.b64encode(bytes([1, 2, 3, 5])).decode()},
        {"routed_experts": None},
        {"rows": 3},
        {"shape": [4, 2]},
        {"row_start": 1},
    ],
)
def test_an_export_that_says_something_else_is_found(changed: dict[str, Any]) -> None:
    assert list(checks.export([taken()], row(**changed), replay=True)) != []


def test_a_record_or_a_client_reply_that_says_something_else_is_found() -> None:
    one = taken()
    record = {"turn": 1, "response": json.loads(one.body)}
    assert list(checks.records([one], json.dumps({"records": [record]}).encode())) == []
    assert list(checks.records([one], b'{"records":[]}')) != []
    lean = sglang(meta(routed_experts=None))
    assert list(checks.records([one], json.dumps({"records": [{**record, "response": json.loads(lean)}]}).encode()))
    assert list(checks.client_reply(one.body, lean, ["routed_experts"])) == []
    assert list(checks.client_reply(one.body, lean, [])) != []
    other = sglang(meta(completion_tokens=2.0, routed_experts=None))
    assert list(checks.client_reply(one.body, other, ["routed_experts"])) != []
    assert list(checks.differences(decode(b'{"a":1}'), decode(b'{"a":"1"}'), [])) != []


def log(*types: str) -> bytes:
    turns = iter((1, 1, 2, 2, 3, 3))
    rows = [{"seq": place, "type": kind, "turn": next(turns)} for place, kind in enumerate(types, 1)]
    return b"\n".join(json.dumps({**event, "reason": "upstream_invalid"}).encode() for event in rows)


def test_a_log_that_says_something_else_is_found() -> None:
    good = log("TurnOpened", "TurnCommitted", "TurnOpened", "TurnRejected")
    told = ["committed", "upstream_invalid"]
    assert list(checks.events(told, good)) == []
    assert list(checks.events(["committed", "committed"], good)) != []
    assert list(checks.events(told[:1], log("TurnOpened", "TurnCommitted", "TurnOpened"))) != []
    assert list(checks.events(told, log("TurnOpened", "TurnCommitted", "TurnRejected"))) != []
    assert isinstance(read(sglang(lambda _: None), PLAIN), Reading)
