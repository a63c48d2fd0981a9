"""Atropos' managed servers for SGLang and vLLM: only the address and the kind are set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ops.simulator.tokenizer_files import write
from trainers.stand import Sequenced, TrainerStand, judge, trainer_stand
from turnlog import Turnlog

pytest.importorskip("atroposlib", reason="atroposlib is not installed", exc_type=ImportError)

from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager

pytestmark = [
    pytest.mark.long,
    pytest.mark.harness,
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]


@pytest.fixture(params=["vllm", "sglang"])
def stand(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TrainerStand]:
    write(tmp_path / "model")
    with trainer_stand(tmp_path / "turnlog", dialect=request.param) as running:
        yield running


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.parametrize("kill", [False, True], ids=["", "a killed server"])
async def test_its_nodes_are_the_rows_and_what_the_engine_said(
    stand: TrainerStand, tmp_path: Path, kind: str, kill: bool
) -> None:
    """Its address has the session's path; each conversation is a row of it."""
    config = APIServerConfig(
        base_url=f"{stand.url}/sessions/worker-0/v1",
        server_type=kind,
        model_name="simulator",
        tokenizer_name=str(tmp_path / "model"),
        api_key="EMPTY",
        health_check=False,
    )
    with Turnlog(stand.url) as turnlog:
        turnlog.create_session(session_id="worker-0", history="tree")
        manager = ServerManager([config])
        nodes = []
        for rollout in range(2):
            async with manager.managed_server() as managed:
                messages = [{"role": "user", "content": f"{rollout}: what is 6 times 7?"}]
                for turn in range(2):
                    if kill and turn:
                        stand.kill()
                    reply = await managed.chat_completion(messages=messages, max_tokens=20, temperature=1.0)
                    said = {"role": "assistant", "content": reply.choices[0].message.content}
                    messages += [said, {"role": "user", "content": "And then?"}]
                nodes += managed.get_state()["nodes"]
        rows = list(turnlog.export(session_id="worker-0"))
    read = []
    for node in nodes:
        mask = [int(one != -100) for one in node.masked_tokens]
        logprobs = [logprob if sampled else 0.0 for logprob, sampled in zip(node.logprobs, mask, strict=True)]
        read.append(Sequenced(node.tokens, mask, logprobs))
    # Its nodes of a later turn mask what was sampled before, or keep it: every token in a loss is the engine's.
    judge(read, stand.generations())
    assert [row["tokens"] for row in rows] == [one.tokens for one in read]
