"""SkyRL's own trainers and client, as far as they run without a GPU: what they get is what the engine said."""

# ruff: noqa: E402

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from integration.stand import until

from ops.simulator import tokenizer_files
from trainers.skyrl_agents import COMMAND
from trainers.stand import Sequenced, TrainerStand, generation, judge, trainer_stand
from turnlog import Turnlog

NO_SKYRL = "skyrl is not installed (it needs Python 3.12): see 'Trainers' packages' in CONTRIBUTING.md"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("skyrl.train.entrypoints.main_base", reason=NO_SKYRL, exc_type=ImportError)

from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
from skyrl.train.dataset import PromptDataset
from skyrl.train.evaluate import evaluate
from skyrl.train.fully_async_trainer_sim import _SimDispatch
from skyrl.train.generators.base import GeneratorInterface
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl.train.generators.utils import prepare_generator_input
from skyrl.train.trainer import RayPPOTrainer
from skyrl.utils.tok import get_tokenizer

from trainers.skyrl_program import FULLY_ASYNC, words
from turnlog.integrations.skyrl import TurnlogExp, TurnlogGenerator, TurnlogTrainConfig

pytestmark = [pytest.mark.harness, pytest.mark.long, pytest.mark.anyio, pytest.mark.filterwarnings("ignore")]

AGENT = "turnlog.agent=trainers.skyrl_agents:two_turns"
STEPS = "generator.step_wise_trajectories=true"
SAMPLES = 3


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerStand]:
    environment = {"TURNLOG_REPLAY": "routed_experts,sampling_mask"}
    with trainer_stand(tmp_path_factory.mktemp("skyrl"), dialect="vllm", environment=environment) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer_files.write(tmp_path / "tokenizer")
    return tmp_path


def write(folder: Path, *rows: dict[str, Any]) -> None:
    told = [
        {"prompt": [{"role": "user", "content": f"Question {number}"}], "env_class": "turnlog", "fault": "", **row}
        for number, row in enumerate(rows)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))


def client_of(cfg: TurnlogTrainConfig, tokenizer: Any) -> RemoteInferenceClient:
    """As SkyRL builds it of its configuration."""
    engines = cfg.generator.inference_engine
    return RemoteInferenceClient(
        proxy_url=engines.external_proxy_url,
        server_urls=list(engines.external_server_urls),
        data_parallel_size=1,
        model_name="simulator",
        tokenizer=tokenizer,
    )


def trainer_of(
    folder: Path, url: str, *more: str, generator: Callable[..., GeneratorInterface] | None = None
) -> RayPPOTrainer:
    prompts = len((folder / "train.jsonl").read_text().splitlines())
    sizes = [f"trainer.{name}={prompts}" for name in ("train_batch_size", "policy_mini_batch_size")]
    given = words(folder, url, f"generator.n_samples_per_prompt={SAMPLES}", *sizes, *more)
    cfg = TurnlogTrainConfig.from_cli_overrides(given)
    tokenizer = get_tokenizer(str(folder / "tokenizer"), padding_side="left")
    data = PromptDataset([str(folder / "train.jsonl")], tokenizer, cfg.trainer.max_prompt_length, num_workers=1)
    client = client_of(cfg, tokenizer)
    made = TurnlogGenerator(cfg.turnlog, cfg.generator) if generator is None else generator(cfg, client, tokenizer)
    trainer = RayPPOTrainer(
        cfg=cfg,
        tracker=None,
        tokenizer=tokenizer,
        train_dataset=data,
        inference_engine_client=client,
        generator=made,
    )
    trainer.dispatch = _SimDispatch(client, 0)  # It says that there is one rank.
    return trainer


def batch_of(trainer: RayPPOTrainer, step: int = 1) -> tuple[Any, list[str]]:
    data, cfg = trainer.train_dataset, trainer.cfg
    prompts = data.collate_fn([data[number] for number in range(len(data))])
    sampling = get_sampling_params_for_backend("vllm", cfg.generator.sampling_params)
    return prepare_generator_input(prompts, cfg.generator.n_samples_per_prompt, sampling, "turnlog", "train", step)


async def trained_on(trainer: RayPPOTrainer, step: int = 1) -> tuple[Any, Any]:
    """SkyRL's own way from the generator to the advantages; what the generator gave, and the batch."""
    asked, uids = batch_of(trainer, step)
    output = await trainer.generate(asked)
    if trainer.cfg.generator.step_wise_trajectories:
        uids = [one.instance_id for one in output["trajectory_ids"]]
    made, uids = trainer.postprocess_generator_output(dict(output), uids)
    batch = trainer.convert_to_training_input(made, uids)
    batch["values"] = None
    return output, trainer.compute_advantages_and_returns(batch)


def sequences(batch: Any) -> list[Sequenced]:
    """Of tensors: prompts are padded on the left, responses stand at the right."""
    found = []
    for place in range(len(batch["sequences"])):
        tokens = batch["sequences"][place][batch["attention_mask"][place].bool()].tolist()
        is_response = batch["response_mask"][place].bool()
        before = [0] * (len(tokens) - int(is_response.sum()))
        mask, logprobs = (batch[key][place][is_response].tolist() for key in ("loss_mask", "rollout_logprobs"))
        found.append(Sequenced(tokens, before + list(map(int, mask)), before + logprobs))
    return found


CASES = {
    "whole": ([], ["", ""], AGENT),
    "failed": ([], ["early", "late", ""], AGENT),
    "steps": ([STEPS], ["branches", "late"], AGENT),
    "turns": (["turnlog.rewards=turn"], ["", "early"], AGENT),
    "command": ([], ["early", ""], f"turnlog.command={COMMAND}"),
    "replayed": (
        [
            STEPS,
            "generator.inference_engine.enable_return_routed_experts=true",
            "generator.inference_engine.enable_return_sample_support_set=true",
            "generator.sampling_params.top_k=8",
        ],
        ["branches", "early"],
        AGENT,
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_a_batch_is_what_the_engine_said(stand: TrainerStand, folder: Path, case: str) -> None:
    more, faults, agent = CASES[case]
    write(folder, *({"fault": fault, "turn_rewards": case == "turns"} for fault in faults))
    before = len(stand.engine.replies)
    trainer = trainer_of(folder, stand.url, agent, f"turnlog.url={stand.url}", f"turnlog.run={case}", *more)
    output, batch = await trained_on(trainer)
    replies = [reply for reply in map(json.loads, stand.engine.replies[before:]) if generation(reply)]
    said = [one for reply in replies if (one := generation(reply)) is not None]
    late = "late" in faults
    judge(sequences(batch), said, unused=late)

    by_prompt = defaultdict(list)
    for place, one in enumerate(output["trajectory_ids"]):
        by_prompt[one.instance_id, one.repetition_id].append(place)
    assert list(by_prompt) == [(str(n), attempt) for n in range(len(faults)) for attempt in range(SAMPLES)]
    for (uid, attempt), places in by_prompt.items():
        fault = faults[int(uid)] if attempt == 1 else ""
        assert len(places) == (2 if fault == "branches" else 1)
        is_masked = fault in ("early", "late")
        rewards = [float(batch["rewards"][place].sum()) if "rewards" in batch else 0 for place in places]
        others = [0.0, 2.0] if is_masked else [attempt]
        assert rewards == [sum(others) / len(others)] * len(places)
        assert [output["stop_reasons"][place] for place in places] == ["error" if is_masked else "length"] * len(places)
        assert [output["is_last_step"][place] for place in places] == [False] * (len(places) - 1) + [True]
        if is_masked:
            assert not batch["loss_mask"][places[0]].any()
        mean = 1.0  # of 0, 1 and 2; of 0 and 2, and it again
        if case != "turns":
            scale = np.std([0.0, 1.0, 2.0], ddof=1) + 1e-6
            shown = batch["advantages"][places[-1]][batch["response_mask"][places[-1]].bool()]
            assert shown.tolist() == pytest.approx([(rewards[-1] - mean) / scale] * len(shown), abs=1e-5)
    if case == "turns":
        for uid, attempt in by_prompt:
            [place] = by_prompt[uid, attempt]
            if output["stop_reasons"][place] != "error":
                row = sequences(batch)[place]
                ends = [at for at, mask in enumerate(row.loss_mask) if mask and not [*row.loss_mask, 0][at + 1]]
                response = len(row.tokens) - len(output["response_ids"][place])
                earned = {at - response: reward for at, reward in zip(ends, (0.25, attempt - 0.25), strict=True)}
                assert {at: one for at, one in enumerate(output["rewards"][place]) if one} == earned
    if case == "replayed":
        require_payloads(output, batch, replies)


def require_payloads(output: Any, batch: Any, replies: Sequence[dict[str, Any]]) -> None:
    """Experts of the last generation of a row, as they cover all before; masks of each, -1 for other tokens."""
    experts, support = batch["rollout_expert_indices"], batch["rollout_sample_support"]
    for place, row in enumerate(sequences(batch)):
        if not any(row.loss_mask):
            assert (len(output["rollout_expert_indices"][place]), experts.sequence_lengths[place]) == (
                1,
                len(row.tokens),
            )
            assert (output["rollout_sample_support"][place] == -1).all()
            continue
        in_row = [one for one in replies if _is_in(row, one)]
        last = max(in_row, key=lambda one: len(one["prompt_token_ids"]))["choices"][0]
        given = np.load(io.BytesIO(base64.b64decode(last["routed_experts"])))
        assert (output["rollout_expert_indices"][place] == given).all()
        start = int(experts.cu_seqlens[place])
        assert (experts.values[start : start + len(given)].numpy() == given).all()
        wanted = [[-1] * 8 for _ in row.tokens]
        for one in in_row:
            at = len(one["prompt_token_ids"])
            for offset, ids in enumerate(one["choices"][0]["sampling_mask"]):
                wanted[at + offset] = ids + [-1] * (8 - len(ids))
        response = len(row.tokens) - len(output["response_ids"][place])
        start = int(support.cu_seqlens[place])
        assert support.values[start : start + len(row.tokens) - response].tolist() == wanted[response:]


def _is_in(row: Sequenced, reply: dict[str, Any]) -> bool:
    prompt, ids = reply["prompt_token_ids"], reply["choices"][0]["token_ids"]
    return list(row.tokens[: len(prompt) + len(ids)]) == prompt + ids and bool(row.loss_mask[len(prompt)])


async def test_several_rows_without_steps_and_no_run_are_refused(stand: TrainerStand, folder: Path) -> None:
    write(folder, {"fault": "branches"})
    trainer = trainer_of(folder, stand.url, AGENT, f"turnlog.url={stand.url}", "turnlog.run=rows")
    with pytest.raises(ValueError, match="step_wise_trajectories"):
        await trained_on(trainer)
    with pytest.raises(ValueError, match="TURNLOG_RUN"):
        trainer_of(folder, stand.url, AGENT)


async def test_a_step_is_played_once_and_its_prompts_sampled_again_are_others(
    stand: TrainerStand, folder: Path
) -> None:
    """Dynamic sampling may ask for a prompt twice in a step; a trainer that is started again asks in the same order."""
    write(folder, {})
    given = (folder, stand.url, AGENT, f"turnlog.url={stand.url}", "turnlog.run=again")
    trainer = trainer_of(*given)
    first, second = [(await trained_on(trainer))[0] for _ in range(2)]
    count = len(stand.engine.replies)
    restarted = trainer_of(*given)
    again = [(await trained_on(restarted))[0] for _ in range(2)]
    assert len(stand.engine.replies) == count
    sessions = [[one["session_id"] for one in output["env_metrics"]] for output in (first, second, *again)]
    assert sessions[:2] == sessions[2:]
    await trained_on(restarted, step=2)
    third = (await trained_on(restarted))[0]  # The fully asynchronous trainer's steps overlap.
    assert not {one["session_id"] for one in third["env_metrics"]} & {name for given in sessions for name in given}
    assert not set(sessions[0]) & set(sessions[1])
    assert [one["response_ids"] for one in again] == [first["response_ids"], second["response_ids"]]


def test_engines_are_those_of_the_last_training_that_started_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine is first shared, then one run's, then another's; a run's token does not take it."""
    write(folder, {})
    tokenizer = get_tokenizer(str(folder / "tokenizer"))
    monkeypatch.setenv("TURNLOG_ADMIN_TOKEN", "admin")
    admin = {"TURNLOG_ADMIN_TOKEN": "admin", "TURNLOG_SESSION_SECRET": "secret"}
    with trainer_stand(folder / "store", dialect="vllm", environment=admin) as stand, Turnlog(stand.url) as turnlog:

        def begun(run: str, url: str, *more: str) -> None:
            given = words(folder, url, AGENT, f"turnlog.url={stand.url}", f"turnlog.run={run}", *more)
            cfg = TurnlogTrainConfig.from_cli_overrides(given)
            TurnlogExp.get_generator(TurnlogExp.__new__(TurnlogExp), cfg, tokenizer, client_of(cfg, tokenizer))

        def engines() -> list[tuple[str, str | None]]:
            return [(one["url"], one["run"]) for one in turnlog.engines()]

        engine, second = stand.engine.base_url, stand.simulator.base_url
        assert engines() == [(engine, None)]
        for run in ("one", "two", "two"):
            begun(run, engine)
            assert engines() == [(engine, run)]
        begun("two", stand.url)  # Turnlog itself, which has the engines.
        assert engines() == [(engine, "two")]
        with pytest.raises(ValueError, match="enable_pd"):
            begun("two", second, "generator.inference_engine.enable_pd=true")
        token = turnlog.run_token("three")
        with monkeypatch.context() as patch:
            patch.setenv("TURNLOG_TOKEN", token)
            with pytest.raises(ValueError, match=engine):
                begun("three", engine)
            begun("three", second)
        assert engines() == [(engine, "two"), (second, "three")]


async def test_no_more_agents_at_a_time_than_are_allowed(folder: Path, stand: TrainerStand) -> None:
    (folder / "gate").mkdir()
    write(folder, {"gate": str(folder / "gate")})
    more = (f"turnlog.url={stand.url}", "turnlog.run=few", "turnlog.max_agents=2")
    training = asyncio.create_task(trained_on(trainer_of(folder, stand.url, AGENT, *more)))
    with Turnlog(stand.url) as turnlog:
        while len(list((folder / "gate").iterdir())) < 2:
            await asyncio.sleep(0.05)
        assert len(list(turnlog.sessions(run="few"))) == 2
        (folder / "gate" / "open").touch()
        await training
        assert len(list(turnlog.sessions(run="few"))) == SAMPLES


async def test_validation_is_evaluation(stand: TrainerStand, folder: Path) -> None:
    write(folder, {}, {"fault": "late"})
    more = ("generator.eval_n_samples_per_prompt=3", f"turnlog.url={stand.url}", "turnlog.run=eval", STEPS)
    trainer = trainer_of(folder, stand.url, AGENT, *more, "trainer.dump_eval_results=false")
    found = await evaluate(trainer.train_dataloader, trainer.generator, trainer.cfg, 7, trainer.tokenizer)
    assert found["eval/all/avg_score"] == pytest.approx((0 + 1 + 2 + 0 + 0 + 2) / 6)  # the one that failed has 0
    with Turnlog(stand.url) as turnlog:
        assert list(turnlog.export(run="eval")) == []
        rows = list(turnlog.export(run="eval", evaluation=True))
    assert {(row["group_id"], row["attempt"]) for row in rows} == {(f"eval:7:{n}", a) for n in "01" for a in (0, 1, 2)}


async def test_a_server_that_is_killed_in_mid_rollout_loses_nothing(folder: Path) -> None:
    write(folder, *({"gate": str(folder / "gate")} for _ in range(2)))
    (folder / "gate").mkdir()
    with trainer_stand(folder / "store", dialect="vllm") as stand:
        trainer = trainer_of(folder, stand.url, AGENT, f"turnlog.url={stand.url}", "turnlog.run=killed")
        training = asyncio.create_task(trained_on(trainer))
        while len(list((folder / "gate").iterdir())) < 2 * SAMPLES:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(stand.kill)
        (folder / "gate" / "open").touch()
        output, batch = await training
        assert output["stop_reasons"] == ["length"] * 2 * SAMPLES
        judge(sequences(batch), stand.generations())


async def test_by_configuration_alone_and_its_names_come_again(folder: Path) -> None:
    """SkyRL's own generator and client: a session is a trajectory, in each epoch another."""
    spec = {"reward_spec": {"ground_truth": "7"}, "extra_info": {}, "env_class": "gsm8k_multi_turn"}
    write(folder, *(spec | {"extra_info": {"index": number}} for number in range(2)))

    def of_skyrl(cfg: Any, client: Any, tokenizer: Any) -> GeneratorInterface:
        return SkyRLGymGenerator(cfg.generator, cfg.environment.skyrl_gym, client, tokenizer)

    with trainer_stand(folder / "store", dialect="vllm") as stand:
        trainer = trainer_of(folder, stand.url, "generator.max_turns=3", "generator.batched=false", generator=of_skyrl)
        batches = [await trained_on(trainer, step) for step in (1, 2)]
        judge([row for _, batch in batches for row in sequences(batch)], stand.generations())
        with Turnlog(stand.url) as turnlog:
            rows = list(turnlog.export())
        assert len(rows) == 2 * 2 * SAMPLES
        given = [
            prompt + response
            for output, _ in batches
            for prompt, response in zip(output["prompt_token_ids"], output["response_ids"], strict=True)
        ]
        assert sorted(row["tokens"] for row in rows) == sorted(given)
        client = trainer.inference_engine_client
        for order, is_paused in ((client.pause_generation, True), (client.resume_generation, False)):
            await order()
            assert httpx.get(f"{stand.url}/is_paused").json() == {"is_paused": is_paused}


def started(folder: Path, stand: TrainerStand) -> subprocess.Popen[str]:
    """The program, through SkyRL's own entry point."""
    engine = stand.engine.base_url
    more = ["trainer.override_entrypoint=trainers.skyrl_program", AGENT, "turnlog.run=run", STEPS, *FULLY_ASYNC]
    (folder / "batches").mkdir(exist_ok=True)
    (folder / "stubs" / "flash_attn").mkdir(parents=True, exist_ok=True)
    # A package of CUDA kernels, which SkyRL imports and a simulated step does not need.
    (folder / "stubs" / "flash_attn" / "__init__.py").touch()
    (folder / "stubs" / "flash_attn" / "bert_padding.py").write_text("pad_input = unpad_input = None\n")
    told = {
        "PYTHONPATH": os.pathsep.join((str(folder / "stubs"), str(Path(__file__).parents[1]))),
        "TURNLOG_URL": stand.url,
        "BATCHES": str(folder / "batches"),
    }
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "skyrl.train.entrypoints.main_base", *words(folder, engine, *more)],
        env={**os.environ, **told},
        stdout=(folder / "printed").open("a"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )


def test_a_trainer_that_is_killed_plays_nothing_again_that_had_ended(folder: Path) -> None:
    """Prompts 0 and 1 end; 2 and 3 wait after their first turn, and are played again."""
    gate = folder / "gate"
    gate.mkdir()
    write(folder, {}, {"fault": "branches"}, {"gate": str(gate)}, {"gate": str(gate), "fault": "early"})
    with trainer_stand(folder / "store", dialect="vllm") as stand, Turnlog(stand.url) as turnlog:
        program = started(folder, stand)

        def has_come() -> bool:
            assert program.poll() is None, (folder / "printed").read_text()[-3000:]
            ended = [one for one in turnlog.sessions(run="run") if one["status"] == "closed"]
            return len(ended) == 5 and len(list(gate.iterdir())) == 3

        until(has_come, timeout_s=240)
        left = {path.name: path.read_text() for path in gate.iterdir()}
        os.killpg(program.pid, signal.SIGKILL)
        [trainer] = set(left.values())  # Ray's process, in a group of its own.
        os.kill(int(trainer), signal.SIGKILL)
        program.wait()
        (gate / "open").touch()
        assert started(folder, stand).wait(timeout=300) == 0, (folder / "printed").read_text()[-3000:]
        import torch

        batches = [torch.load(path) for path in sorted((folder / "batches").iterdir())]
        assert len(batches) == 2
        judge([row for batch in batches for row in sequences(batch)], stand.generations(), unused=len(left))
        names = {one["session_id"] for one in turnlog.sessions(run="run")}
        assert len(names) == 8 + len(left)
        assert {name for name in names if name.endswith(".1")} == {f"{name[:-1]}1" for name in left}
        [engine] = turnlog.engines()
        assert (engine["url"], engine["run"]) == (stand.engine.base_url, "run")
        # The last step, though each of the two trainers updated its weights three times.
        assert turnlog.pause_fleet(run="run")["weight_version"] == "2"
