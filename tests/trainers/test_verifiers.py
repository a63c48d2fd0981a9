"""verifiers' own training client, and its graph of a rollout: prime-rl takes its samples from there."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ops.simulator.tokenizer_files import write
from trainers.stand import Sequenced, TrainerStand, judge, trainer_stand
from turnlog import Turnlog

pytest.importorskip("verifiers", reason="verifiers is not installed", exc_type=ImportError)

from verifiers.v1.agent import AgentConfig
from verifiers.v1.clients import resolve_client
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.graph import prepare_turn
from verifiers.v1.task import TaskData
from verifiers.v1.trace import AgentInfo, Trace, TraceTask
from verifiers.v1.types import SamplingConfig

pytestmark = [
    pytest.mark.long,
    pytest.mark.harness,
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(params=["vllm", "sglang"])
def stand(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TrainerStand]:
    write(tmp_path / "model")
    with trainer_stand(tmp_path / "turnlog", "--reasoning", "0", dialect=request.param) as running:
        yield running


async def rollout(stand: TrainerStand, model: Path, conversations: int, limit: int, *, kill: bool = False) -> Any:
    """Two turns of each conversation, in one trace. Only the address is set, as in prime-rl's configuration."""
    config = TrainClientConfig(base_url=f"{stand.url}/v1", api_key_var="NONE", renderer_model_name=str(model))
    client, dialect = resolve_client(config), ChatDialect()
    agent = AgentInfo[AgentConfig](config=AgentConfig())
    trace = Trace(id=uuid.uuid4().hex, task=TraceTask(type="task", data=TaskData(idx=0)), agent=agent)
    for conversation in range(conversations):
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"{conversation}: what is 6 times 7?"}]
        for turn in range(2):
            if kill and turn:
                stand.kill()
            body = {"model": "simulator", "messages": messages}
            asked = dialect.parse_request(body)
            pending = prepare_turn(trace, asked.messages, asked.tools)
            sampling = SamplingConfig(temperature=1.0, max_tokens=limit, cache_salt="7")
            reply = await client.get_response(dialect, body, sampling, session_id=trace.id, turn=pending)
            pending.commit(reply)
            messages += [reply.raw["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    await client.close()
    return trace


@pytest.mark.parametrize(("conversations", "limit", "kill"), [(1, 20, False), (2, 300, False), (1, 300, True)])
async def test_its_branches_are_the_rows_and_what_the_engine_said(
    stand: TrainerStand, tmp_path: Path, conversations: int, limit: int, kill: bool
) -> None:
    trace = await rollout(stand, tmp_path / "model", conversations, limit, kill=kill)
    assert len(trace.branches) == conversations
    read = [Sequenced(one.token_ids, [*map(int, one.sampled_mask)], one.logprobs) for one in trace.branches]
    judge(read, stand.generations())
    with Turnlog(stand.url) as turnlog:
        rows = list(turnlog.export(session_id=trace.id))
    assert [Sequenced(row["tokens"], row["loss_mask"], row["logprobs"]) for row in rows] == read
