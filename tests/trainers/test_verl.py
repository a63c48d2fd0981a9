"""verl's own workers, queue, replay buffer and advantages over rollouts of `turnlog.integrations.verl`, on the CPU.

Of verl only its inference servers are missing, which need a GPU: an actor holds their version of the weights, and the
address that verl's load balancer has is that of an engine whose generations are known.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from trainers.stand import Generation, Sequenced, TrainerStand, generation, judge, trainer_stand
from turnlog import Turnlog

os.environ.setdefault("TQ_NUM_THREADS", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    missing = "see 'Trainers' packages' in CONTRIBUTING.md"
    torch = pytest.importorskip("torch", reason=missing)
    ray = pytest.importorskip("ray", reason=missing)
    tq = pytest.importorskip("transfer_queue", reason=missing)
    pytest.importorskip("verl.trainer.ppo.v1", reason=missing, exc_type=ImportError)
    import hydra
    import verl
    from hydra.errors import InstantiationException
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
    from verl import DataProto
    from verl.experimental.agent_loop import AgentLoopManager, AgentLoopWorker
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.trainer.ppo.ray_trainer import compute_advantage
    from verl.trainer.ppo.v1 import AgentLoopManagerTQ, PPOTrainerSync
    from verl.utils import tensordict_utils as tu
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.router import get_router_handle

    from ops.server import ROOT
    from ops.simulator import tokenizer_files
    from turnlog.integrations import verl as adapter

pytestmark = [pytest.mark.harness, pytest.mark.long, pytest.mark.filterwarnings("ignore")]


async def agent(*, base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> Any:
    """Two turns, and what `extra_info` says: a row of its own for the second, or an end that is none."""
    told = metadata["extra_info"]
    if told.get("does") == "nothing":
        raise OSError("no sandbox")
    messages, reply = list(prompt), None
    async with openai.AsyncOpenAI(
        base_url=f"{base_url}/v1", api_key=metadata["api_key"], max_retries=20, timeout=60
    ) as client:
        for turn in range(2):
            if turn == 1 and told.get("does") == "compacts":
                messages = [{"role": "user", "content": "In short: go on with the sum."}]
            if turn == 1 and told.get("does") == "raises":
                raise RuntimeError("the tool broke")
            if turn == 1 and told.get("waits"):
                Path(told["waits"], metadata["session_id"]).touch()
                while not Path(told["waits"], "go").exists():
                    await asyncio.sleep(0.02)
            reply = await client.chat.completions.create(
                model=metadata.get("model", "simulator"), messages=messages, **{**request_kwargs, "max_tokens": 24}
            )
            messages += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "And?"}]
    return None if told.get("judged") else float(len(messages[-2]["content"] or "") % 5)


class Server:
    """In the place of verl's `vLLMHttpServer`, whose HTTP is the engine's."""


class World:
    """A server and an engine, and of verl the configuration, a load balancer with the engine's address, a client."""

    def __init__(self, stand: TrainerStand, folder: Path) -> None:
        self.stand, self.folder = stand, folder
        tokenizer_files.write(folder / "model")
        small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
        heads = {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": len(AutoTokenizer.from_pretrained(folder / "model")),
        }
        Qwen2ForCausalLM(Qwen2Config(**small, **heads)).save_pretrained(folder / "model")
        self.balancer = get_router_handle({stand.engine.base_url.removeprefix("http://"): ray.remote(Server).remote()})

    def config(self, *overrides: str) -> Any:
        folder = str(Path(verl.__file__).parent / "trainer" / "config")
        given = [
            f"actor_rollout_ref.model.path={self.folder / 'model'}",
            "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.rollout.calculate_log_probs=True",
            "actor_rollout_ref.rollout.prompt_length=16",
            "actor_rollout_ref.rollout.response_length=200",
            "actor_rollout_ref.rollout.agent.num_workers=2",
            "actor_rollout_ref.rollout.agent.default_agent_loop=turnlog",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={adapter.__file__.removesuffix('py')}yaml",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
            "algorithm.adv_estimator=grpo",
        ]
        with hydra.initialize_config_dir(folder, version_base=None):
            return hydra.compose("ppo_trainer", [*given, *overrides])

    def client(self, config: Any) -> Any:
        return LLMServerClient(config, load_balancer_handle=self.balancer)

    def rewards(self, sessions: list[str]) -> list[float | None]:
        """What Turnlog has of these sessions."""
        with Turnlog() as turnlog:
            return [(turnlog.attach(one).state()["reward"] or {}).get("reward") for one in sessions]


AGENT = "+turnlog.agent=trainers.test_verl:agent"
REPLAY = "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The engine serves all runs, until the adapter takes it for this one."""
    folder = tmp_path_factory.mktemp("verl")
    replay = {"TURNLOG_REPLAY": "routed_experts", "TURNLOG_MOE_LAYERS": "2", "TURNLOG_MOE_TOPK": "2"}
    with trainer_stand(folder, "--seed", "5", "--experts", "2,2,8", dialect="vllm", environment=replay) as stand:
        variables = {"TURNLOG_URL": stand.url, "TURNLOG_RUN": "of-verl"}
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
        environment = {"env_vars": {**variables, "TQ_NUM_THREADS": "1", "PYTHONPATH": paths}}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            ray.init(num_cpus=8, include_dashboard=False, object_store_memory=100_000_000, runtime_env=environment)
            yield World(stand, folder)
            ray.shutdown()


@pytest.fixture
def said(world: World) -> Callable[[], list[Generation]]:
    """What the engine has said since the test began."""
    before = len(world.stand.generations())
    return lambda: world.stand.generations()[before:]


def columns(tells: list[dict[str, Any]], of: str, n: int = 1) -> dict[str, Any]:
    """A data set's: a prompt for each, n times as verl's classic trainer repeats it."""

    def column(of_prompt: Callable[[int], Any]) -> Any:
        made = np.empty(len(tells) * n, dtype=object)
        made[:] = [of_prompt(number) for number in range(len(tells)) for _ in range(n)]
        return made

    return {
        "raw_prompt": column(lambda number: [{"role": "user", "content": f"What is 6 times {number}, and why?"}]),
        "uid": column(lambda number: f"{of}-{number}"),
        "extra_info": column(lambda number: {"split": "train", "index": number, **tells[number]}),
        "data_source": column(lambda number: "sums"),
        "index": column(lambda number: number),
    }


def sequenced(prompt: Any, response: Any, mask: Any, logprobs: Any) -> Sequenced:
    """A row without padding."""
    before = len(prompt)
    tokens, loss = [*prompt.tolist(), *response.tolist()], [0] * before + mask.tolist()
    return Sequenced(tokens, loss, [0.0] * before + logprobs.tolist())


def classic(world: World, tells: list[dict[str, Any]], of: str, *overrides: str, judges: Any = None) -> Any:
    """What verl's classic worker makes of a batch."""
    config = world.config(*overrides)
    client = world.client(config)
    manager = AgentLoopManager.create(config=config, llm_client=client, reward_loop_worker_handles=judges)
    try:
        return manager.generate_sequences(DataProto.from_single_dict(columns(tells, of, n=2)))
    finally:
        for worker in manager.agent_loop_workers:
            ray.kill(worker)


def rows_of(batch: Any) -> list[Sequenced]:
    found = []
    for at in range(len(batch)):
        one, width = {name: value[at] for name, value in batch.batch.items()}, batch.batch["prompts"].shape[1]
        of_prompt, of_response = one["attention_mask"][:width].bool(), one["attention_mask"][width:].bool()
        response = (one["responses"], one["response_mask"], one["rollout_log_probs"])
        found.append(sequenced(one["prompts"][of_prompt], *(each[of_response] for each in response)))
    return found


def test_a_batch_of_the_classic_worker(world: World, said: Callable[[], list[Generation]]) -> None:
    """A row for each rollout: the longest of two, one outside the loss for one that failed, with or without a turn."""
    tells = [{}, {"does": "compacts"}, {"does": "raises"}, {"does": "nothing"}]
    batch = classic(world, tells, "classic", AGENT, "actor_rollout_ref.rollout.enable_rollout_routing_replay=False")
    rows = rows_of(batch)
    judge(rows, said(), unused=4, tolerance=1e-5)
    assert [sum(row.loss_mask) > 0 for row in rows] == [True] * 4 + [False] * 4
    assert batch.non_tensor_batch["rows_left_out"].tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
    assert [count > 0 for count in batch.non_tensor_batch["tokens_left_out"]] == [False] * 2 + [True] * 4 + [False] * 2
    sessions = [told["session_id"] for told in batch.non_tensor_batch["turnlog"]]
    assert sessions == [f"of-verl:classic-{number // 2}:{number}.0" for number in range(8)]
    rewards = batch.batch["rm_scores"].sum(dim=1).tolist()
    assert rewards == [reward or 0.0 for reward in world.rewards(sessions)]
    assert [told["failed"] is None for told in batch.non_tensor_batch["turnlog"]] == [True] * 4 + [False] * 4

    batch.batch["token_level_rewards"] = batch.batch["rm_scores"]
    batch.non_tensor_batch["uid"] = columns(tells, "classic", n=2)["uid"]
    advantages = compute_advantage(batch, adv_estimator="grpo", num_repeat=2).batch["advantages"]
    for at, row in enumerate(rows):
        pair = torch.tensor(rewards[at // 2 * 2 : at // 2 * 2 + 2])
        wanted = (rewards[at] - pair.mean()) / (pair.std() + 1e-6) * batch.batch["response_mask"][at]
        assert torch.allclose(advantages[at], wanted), row


class Judge:
    """In the place of verl's `RewardLoopWorker`, whose scores they are."""

    def compute_score(self, data: Any) -> dict[str, Any]:
        return {"reward_score": 0.25, "reward_extra_info": {"acc": 1.0}}


@pytest.mark.parametrize("judged", [True, False])
def test_a_rollout_that_failed_fits_to_the_others(world: World, judged: bool) -> None:
    """verl makes columns of what the first row of a worker has: scores, its judge's words, experts."""
    tells = [{"does": "nothing", "judged": judged}, {"judged": judged}]
    more, judges = (AGENT, "actor_rollout_ref.rollout.agent.num_workers=1", REPLAY), [ray.remote(Judge).remote()]
    batch = classic(world, tells, f"fits-{judged}", *more, judges=judges)
    experts = batch.batch["routed_experts"]
    assert experts.shape[2:] == (2, 2)
    assert [bool(one.any()) for one in experts] == [False, False, True, True]
    scores = batch.batch["rm_scores"].sum(dim=1).tolist()
    assert scores == [0.25] * 4 if judged else scores[:2] == [0.0] * 2
    assert ("acc" in batch.non_tensor_batch) == judged


def test_rollouts_without_a_run_are_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TURNLOG_RUN")
    config = world.config(AGENT)

    async def played() -> Any:
        given = DataProto.from_single_dict(columns([{}], "runless"))
        return await AgentLoopWorker(config, world.client(config)).generate_sequences(given)

    with pytest.raises(InstantiationException, match="have no run"):
        asyncio.run(played())


@pytest.mark.parametrize(
    ("parameter", "tell", "refused"),
    [
        ("+turnlog.rows=refuse", {"does": "compacts"}, "has 2 rows"),
        ("actor_rollout_ref.rollout.response_length=40", {}, None),
        ("+turnlog.row=refuse", {}, "unexpected keyword argument 'row'"),
    ],
)
def test_what_the_classic_worker_cannot_take(
    world: World, parameter: str, tell: dict[str, Any], refused: str | None
) -> None:
    if refused is not None:
        with pytest.raises((ValueError, InstantiationException), match=refused):
            classic(world, [tell], parameter, AGENT, parameter)
        return
    batch = classic(world, [tell], "cut", AGENT, parameter)
    assert batch.batch["responses"].shape == (2, 40)
    assert all(count > 0 for count in batch.non_tensor_batch["tokens_left_out"])


class Trainer:
    """verl's V1 trainer, whose queue, replay buffer and workers are its own; it has no GPU to make its actor on."""

    def __init__(self, world: World, *overrides: str) -> None:
        config = world.config("algorithm.rollout_correction.bypass_mode=True", *overrides)
        tq.init()
        self.ppo = PPOTrainerSync(config)
        self.ppo.global_steps = 8
        self._manager = lambda: AgentLoopManagerTQ.create(config=config, llm_client=world.client(config))
        self.ppo.agent_loop_manager = self._manager()

    def submit(self, given: dict[str, Any]) -> None:
        batch = tu.get_tensordict(dict(given))
        tu.assign_non_tensor_data(batch, "global_steps", self.ppo.global_steps)
        self.ppo._submit_batch_to_rollout(batch)

    def kill(self) -> None:
        """kill -9 of the processes that play; then the trainer starts others, as one that is started again does."""
        for worker in self.ppo.agent_loop_manager.agent_loop_workers:
            os.kill(ray.get(worker.__ray_call__.remote(lambda self: os.getpid())), signal.SIGKILL)
        self.ppo.agent_loop_manager = self._manager()

    def status(self, group: str) -> str:
        return str(tq.kv_list("train")["train"][group]["status"])

    def sample(self, prompts: int) -> tuple[Any, Any]:
        """Rows with verl's advantages. In its bypass mode the engine's logprobs are the old policy's."""
        batch, _ = self.ppo.replay_buffer.sample(
            global_steps=self.ppo.global_steps, partition_id="train", batch_size=prompts
        )
        batch = self.ppo._compute_advantage(self.ppo._compute_old_log_prob(batch, {}), {})
        return batch, tq.kv_batch_get(keys=batch.keys, partition_id="train")


@pytest.fixture
def trainer(world: World) -> Iterator[Trainer]:
    yield Trainer(world, AGENT)
    tq.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)


def test_a_step_of_v1_over_kills_of_server_and_players(
    world: World, trainer: Trainer, said: Callable[[], list[Generation]], tmp_path: Path
) -> None:
    """All rows of a rollout; a group with a rollout that failed is verl's `failure`, and what others of it said stays.
    What had ended before the kill is not played again."""
    waits = {"waits": str(tmp_path)}
    tells = [waits, {"does": "compacts", **waits}, {"does": "raises"}, {"split": "test"}]
    given = columns(tells, "v1")
    trainer.submit(given)
    wait_for(lambda: len(list(tmp_path.iterdir())) == 4 and trainer.status("v1-2") == "failure")
    wait_for(lambda: trainer.status("v1-3") == "finished")
    trainer.kill()
    trainer.submit(given)
    wait_for(lambda: len(list(tmp_path.iterdir())) == 8)
    world.stand.kill()
    (tmp_path / "go").touch()
    wait_for(lambda: trainer.status("v1-2") == "failure")
    batch, data = trainer.sample(4)

    keys = [
        f"v1-{group}_{attempt}_{row}"
        for group, rows in ((0, 1), (1, 2), (3, 1))
        for attempt in (0, 1)
        for row in range(rows)
    ]
    assert sorted(batch.keys) == sorted(keys)
    fields = ("prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores", "advantages", "extra_fields")
    found = {key: {name: data[at][name] for name in fields} for at, key in enumerate(batch.keys)}
    judge(
        [sequenced(*(one[name] for name in fields[:4])) for one in found.values()],
        said(),
        unused=4 + 2,
        tolerance=1e-5,
    )  # those of players that were killed after their first turn, and those of the group that failed
    told = {key: one["extra_fields"]["turnlog"] for key, one in found.items()}
    ended = {key: said["session_id"].rpartition(".")[2] for key, said in told.items()}
    assert ended == {key: "0" if key.startswith("v1-3") else "1" for key in keys}
    rewards = dict(zip(keys, world.rewards([told[key]["session_id"] for key in keys]), strict=True))
    assert {key: one["rm_scores"].sum().item() for key, one in found.items()} == rewards
    for key, one in found.items():
        pair = torch.tensor([rewards[f"{key.split('_')[0]}_{attempt}_0"] for attempt in (0, 1)])
        wanted = (rewards[key] - pair.mean()) / (pair.std() + 1e-6) * one["response_mask"]
        assert torch.allclose(one["advantages"], wanted), key
    versions = [(8, 8) if key.startswith("v1-3") else (7, 7) for key in batch.keys]  # a validation is of the step's own
    assert [(tag["min_global_steps"], tag["max_global_steps"]) for tag in batch.tags] == versions

    loss = actor_update(world, data)
    assert loss.isfinite()


def actor_update(world: World, data: Any) -> Any:
    """verl's loss over the rows on a model of one layer, and a step of its optimizer."""
    model = Qwen2ForCausalLM.from_pretrained(world.folder / "model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    padded = data.select("responses", "response_mask", "old_log_probs", "advantages", "input_ids").to_padded_tensor()
    lengths = [(len(data[at]["prompts"]), len(data[at]["responses"])) for at in range(len(data))]
    scores = model(padded["input_ids"]).logits.log_softmax(-1)
    given = torch.zeros_like(padded["old_log_probs"])
    for at, (prompt, response) in enumerate(lengths):
        of_response = scores[at, prompt - 1 : prompt + response - 1]
        given[at, :response] = of_response.gather(-1, data[at]["responses"].unsqueeze(-1)).squeeze(-1)
    actor = omega_conf_to_dataclass(world.config().actor_rollout_ref.actor)
    loss, _ = get_policy_loss_fn("vanilla")(
        old_log_prob=padded["old_log_probs"],
        log_prob=given,
        advantages=padded["advantages"],
        response_mask=padded["response_mask"],
        loss_agg_mode="token-mean",
        config=actor,
    )
    loss.backward()
    optimizer.step()
    return loss.detach()


def test_a_weight_update_of_an_asynchronous_trainer(
    world: World, trainer: Trainer, said: Callable[[], list[Generation]]
) -> None:
    """verl aborts what is in flight at its servers and holds them; the agent's client asks again."""
    engine = world.stand.simulator.base_url
    httpx.post(f"{engine}/sim/latency", json={"latency_ms": 1500})
    trainer.submit(columns([{}], "update"))
    wait_for(lambda: httpx.get(f"{engine}/sim/stats").json()["in_flight"] == 2)
    httpx.post(f"{engine}/pause", params={"mode": "abort"})
    httpx.post(f"{engine}/sim/latency", json={"latency_ms": 0})
    httpx.post(f"{engine}/resume")
    batch, data = trainer.sample(1)
    assert {data[at]["extra_fields"]["turnlog"]["status"] for at in range(len(data))} <= {"completed", "truncated"}
    assert len(batch.keys) == 2


COMMAND = """
import json, os, openai
told = json.load(open(os.environ["TURNLOG_ROLLOUT"]))
client = openai.OpenAI(max_retries=9)
client.chat.completions.create(model="simulator", messages=told["prompt"], **told["request_kwargs"])
print(json.dumps({"reward": 0.5, "number": told["metadata"]["extra_info"]["index"]}))
"""


def test_experts_and_a_command_as_the_agent(world: World, said: Callable[[], list[Generation]], tmp_path: Path) -> None:
    """A start before left an engine, which is dead; somebody added one by hand, which stays; a training before had this
    training's own."""
    (tmp_path / "agent.py").write_text(COMMAND)
    command = f"+turnlog.command={sys.executable} {tmp_path / 'agent.py'}"
    left, by_hand, own = "http://127.0.0.1:9", world.stand.simulator.base_url, world.stand.engine.base_url
    with Turnlog() as turnlog:
        for url in (left, by_hand):
            turnlog.add_engine(url, run="of-verl")
        httpx.post(f"{turnlog.base_url}/engines", json={"url": by_hand, "state": "draining"}).raise_for_status()
        turnlog.remove_engine(own)
        turnlog.add_engine(own, run="before")
        wait_for(lambda: {one["url"]: one["health"] for one in turnlog.engines()}[left] == "dead")
        batch = classic(world, [{}, {}], "experts", command, REPLAY)
        assert {one["url"]: one["run"] for one in turnlog.engines()} == {own: "of-verl", by_hand: "of-verl"}
        turnlog.remove_engine(by_hand)
    rows = rows_of(batch)
    judge(rows, said(), tolerance=1e-5)
    assert [told["failed"] for told in batch.non_tensor_batch["turnlog"]] == [None] * 4
    assert batch.batch["rm_scores"].sum(dim=1).tolist() == [0.5] * 4
    told = {}
    for reply in map(json.loads, world.stand.engine.replies):
        if (one := generation(reply)) is not None and one in said():
            packed = io.BytesIO(base64.b64decode(reply["choices"][0]["routed_experts"]))
            told[one.prompt + one.output] = np.load(packed)
    for at, row in enumerate(rows):
        begins = int(batch.batch["attention_mask"][at].argmax())
        experts = batch.batch["routed_experts"][at][begins : begins + len(row.tokens) - 1]
        assert np.array_equal(experts.numpy(), told[tuple(row.tokens)])
