"""slime's and miles' own rollout and conversion, in a process of their own: what is trained is what the engine said.

They are installed from their checkouts, beside SGLang: see CONTRIBUTING.md.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ops.server import ROOT
from ops.simulator import tokenizer_files
from ops.simulator.tokenizer import Tokenizer
from trainers import playing
from trainers.stand import Sequenced, TrainerStand, generation, judge, trainer_stand
from turnlog import Turnlog

pytestmark = [pytest.mark.harness, pytest.mark.long]

BOTH = pytest.mark.parametrize("trainer", ["slime", "miles"])

LAYERS, TOP_K = 2, 4
EXPERTS = {"TURNLOG_REPLAY": "routed_experts", "TURNLOG_MOE_LAYERS": str(LAYERS), "TURNLOG_MOE_TOPK": str(TOP_K)}
REPLAYING = {"use_rollout_routing_replay": True, "num_layers": LAYERS, "moe_router_topk": TOP_K}


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[TrainerStand]:
    words = ("--seed", "3", "--weight-version", "7", "--experts", f"{LAYERS},{TOP_K},16")
    with trainer_stand(tmp_path / "server", *words, environment=EXPERTS) as made:
        yield made


def asked(
    stand: TrainerStand, folder: Path, *what: str, rollouts: int = 1, evaluations: int = 0, **args: Any
) -> dict[str, Any]:
    """A data set of two prompts, or one for each of `what`, which the agent does with them."""
    tokenizer_files.write(folder / "model")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is {place} times 7?"}],
            "metadata": {"what": one, "place": place},
        }
        for place, one in enumerate(what or ("fine", "fine"))
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ip, _, port = stand.url.removeprefix("http://").partition(":")
    given = {"hf_checkpoint": str(folder / "model"), "prompt_data": str(folder / "prompts.jsonl")}
    given |= {"sglang_router_ip": ip, "sglang_router_port": port, **args}
    return {"args": given, "rollouts": list(range(rollouts)), "evaluations": [0] * evaluations}


def program(
    trainer: str, folder: Path, given: dict[str, Any], stand: TrainerStand, **environment: str
) -> AbstractContextManager[playing.Program]:
    if importlib.util.find_spec(trainer) is None:
        pytest.skip(f"{trainer} is not installed, see CONTRIBUTING.md")
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")))
    return playing.program(folder, f"{trainer}_program", given, stand.url, PYTHONPATH=path, **environment)


def sequences(data: dict[str, Any]) -> list[Sequenced]:
    """Those that are trained."""
    found = []
    for place, tokens in enumerate(data["tokens"]):
        prompt = [0] * (len(tokens) - data["response_lengths"][place])
        one = Sequenced(tokens, prompt + data["loss_masks"][place], prompt + data["rollout_log_probs"][place])
        found += [] if data["samples"][place]["remove_sample"] else [one]
    return found


def require(stand: TrainerStand, found: list[dict[str, Any]], unused: int = 0, by_agent: bool = True) -> None:
    """Tokens, masks, logprobs and experts are the engine's, advantages those of the rewards; rewards the agent's: the
    length of its last turn."""
    judge((one for data in found for one in sequences(data)), stand.generations(), unused=unused)
    said = engine_experts(stand)
    for data in found:
        for place, experts in enumerate(data["rollout_routed_experts"]):
            if not data["samples"][place]["remove_sample"]:
                assert experts == said[tuple(data["tokens"][place])]
        kept = [place for place, one in enumerate(data["samples"]) if not one["remove_sample"]]
        masks = {data["rollout_ids"][place]: data["loss_masks"][place] for place in kept}  # Of the last rows.
        for place in kept:
            of_last = "".join(map(str, masks[data["rollout_ids"][place]])).strip("0").rpartition("0")[2]
            assert data["raw_reward"][place] == len(of_last) or not by_agent
            group = data["samples"][place]["group_index"]
            of = {}
            for other in kept:
                if data["samples"][other]["group_index"] == group:
                    of[data["rollout_ids"][other]] = data["raw_reward"][other]
            spread = statistics.stdev(of.values()) + 1e-6
            wanted = (data["raw_reward"][place] - statistics.fmean(of.values())) / spread
            assert data["rewards"][place] == pytest.approx(wanted, abs=1e-5)


def engine_experts(stand: TrainerStand) -> dict[tuple[int, ...], list[Any]]:
    """[T-1, layers, k] by the tokens, of every generation."""
    found = {}
    for reply in (json.loads(one) for one in list(stand.engine.replies) if one.startswith(b"{")):
        if (said := generation(reply)) is not None:
            tokens = (*said.prompt, *said.output)
            info = reply["choices"][0].get("meta_info") or reply["sglext"]
            flat = np.frombuffer(base64.b64decode(info["routed_experts"]), dtype="<i4")
            found[tokens] = flat.reshape(len(tokens) - 1, LAYERS, TOP_K).tolist()
    return found


@BOTH
def test_what_is_trained_is_what_the_engine_said(trainer: str, stand: TrainerStand, tmp_path: Path) -> None:
    """Over two epochs of the data set."""
    given = asked(stand, tmp_path, rollouts=2, n_samples_per_prompt=3, **REPLAYING)
    with program(trainer, tmp_path, given, stand) as player:
        found = player.result()["rollouts"]
    require(stand, found)
    assert [data["sample_indices"] for data in found] == [list(range(6)), list(range(6, 12))]
    for data in found:
        assert data["rollout_ids"] == data["sample_indices"]
        for one, tokens, length in zip(data["samples"], data["tokens"], data["response_lengths"], strict=True):
            assert one["status"] in ("completed", "truncated")
            assert one["weight_versions"] == ["7", "7"]
            assert one["response"] == Tokenizer().decode(tokens[-length:])


@BOTH
def test_a_kill_of_the_server_and_of_the_trainer_loses_nothing(
    trainer: str, stand: TrainerStand, tmp_path: Path
) -> None:
    given = asked(stand, tmp_path, "fine", "waits")
    run = {"TURNLOG_RUN": "killed"}
    (tmp_path / "gate").touch()
    with program(trainer, tmp_path, given, stand, **run) as player:
        player.until("waiting", 4)
        ended = player.ended(2)
        stand.kill()
        player.kill()
    with program(trainer, tmp_path, given, stand, **run) as player:
        player.until("waiting", 6)
        stand.kill()
        player.gate.unlink()
        found = player.result()["rollouts"]
        assert len(player.until("played", 4)) == 4
    require(stand, found, unused=2)
    with Turnlog(stand.url) as turnlog:
        kinds = {one["session_id"]: (one["failed"] or {}).get("kind") for one in turnlog.export(run="killed")}
    assert len(kinds) == 6
    assert {kinds[session_id] for session_id in ended} == {None}
    assert sorted(map(str, kinds.values())) == ["None"] * 4 + ["other"] * 2


@BOTH
@pytest.mark.parametrize(
    ("agent", "options", "partial", "statuses"),
    [
        ("playing:run", {}, False, {"failed": 2}),
        ("playing:run", {"failed": "drop"}, False, {"aborted": 2}),
        ("none:run", {"command": [sys.executable, "-c", playing.COMMAND]}, False, {}),
        ("none:run", {"command": ["false"]}, False, {"aborted": 4}),
        ("playing:run", {"metadata": {"what": "fine"}, "sampling": {"max_new_tokens": 9}}, False, {}),
        ("playing:run", {"export": {"replay": False}, "failed": "drop"}, False, {"aborted": 2, "failed": 2}),
        ("slime_program:several", {}, False, {}),
        ("slime_program:several", {}, True, {"failed": 2}),
    ],
    ids=["raises", "dropped", "command", "no rows", "options", "no experts", "several rows", "no room for several"],
)
def test_what_became_of_a_rollout_is_in_its_samples_status(
    trainer: str,
    stand: TrainerStand,
    tmp_path: Path,
    agent: str,
    options: dict[str, Any],
    partial: bool,
    statuses: dict[str, int],
) -> None:
    """What failed without a reward, or has no place in a batch, is in no loss and in no mean."""
    args = {"turnlog": options, "partial_rollout": partial, "reward_key": "score", **REPLAYING}
    given = asked(stand, tmp_path, "raises", "fine", **args)
    with program(trainer, tmp_path, given, stand, TURNLOG_AGENT=f"trainers.{agent}") as player:
        [data] = player.result()["rollouts"]
    has_failed = sum(statuses.values())
    require(stand, [data], unused=8 if partial else 6 if "export" in options else has_failed)
    samples = data["samples"]
    found = Counter(one["status"] for one in samples if one["status"] not in ("completed", "truncated"))
    assert found == statuses
    for one, reward, mask in zip(samples, data["rewards"], data["loss_masks"], strict=True):
        assert one["remove_sample"] == (one["status"] in statuses)
        if one["remove_sample"]:
            assert (reward, any(mask)) == (0.0, False)
            if (failed := one["metadata"]["turnlog"]["failed"]) is not None:
                assert (one["reward"], failed["kind"]) == ({"score": 0.0}, "agent")
    log = player.log.read_text()
    assert ("lacks routed experts for some tokens" in log, "no room for its" in log) == ("export" in options, partial)
    if has_failed and not partial:
        assert ("no answer" if "command" not in options else "exit code 1") in log
    if "sampling" in options:
        assert max(data["raw_reward"]) <= 9
    if "several" in agent and not partial:
        assert Counter(data["rollout_ids"]) == {0: 1, 1: 1, 2: 2, 3: 2}
        assert data["sample_indices"] == data["rollout_ids"]


@BOTH
def test_a_rollout_without_a_reward_and_with_an_aborted_row_is_in_no_loss(
    trainer: str, stand: TrainerStand, tmp_path: Path
) -> None:
    """The trainers ask no reward model for any of its rows."""
    environment = {"TURNLOG_AGENT": "trainers.slime_program:aborted"}
    with program(trainer, tmp_path, asked(stand, tmp_path), stand, **environment) as player:
        [data] = player.result()["rollouts"]
    assert Counter(one["status"] for one in data["samples"]) == {"completed": 4, "aborted": 4}
    assert {(one["remove_sample"], one["reward"]) for one in data["samples"]} == {(True, 0.0)}
    assert set(data["rewards"]) == {0.0}


def test_newer_miles_has_the_places_of_weight_versions(stand: TrainerStand, tmp_path: Path) -> None:
    with program("miles", tmp_path, asked(stand, tmp_path, spans=True), stand) as player:
        [data] = player.result()["rollouts"]
    require(stand, [data])
    for one, tokens, mask in zip(data["samples"], data["tokens"], data["loss_masks"], strict=True):
        places = [len(tokens) - len(mask) + place for place, sampled in enumerate(mask) if sampled]
        spans = [span for [span] in one["weight_versions"]]
        assert [place for span in spans for place in range(span["abs_start"], span["abs_end"])] == places
        assert [span["version"] for span in spans] == ["7", "7"]


@pytest.mark.parametrize("partial", [False, True])
def test_slimes_abort_ends_what_is_still_played(stand: TrainerStand, tmp_path: Path, partial: bool) -> None:
    """With partial rollouts slime asks for those again, and they are played anew."""
    what = ("fine", "waits", "waits", "fine", "fine", "fine")
    args = {"over_sampling_batch_size": 4, "partial_rollout": partial}
    (tmp_path / "gate").touch()
    with program("slime", tmp_path, asked(stand, tmp_path, *what, rollouts=2, **args), stand) as player:
        found = player.result()["rollouts"]
    require(stand, found, unused=99)
    assert [len(sequences(data)) for data in found] == [4, 4]
    with Turnlog(stand.url) as turnlog:
        sessions = list(turnlog.sessions())
    assert {one["status"] for one in sessions} == {"closed"}
    asked_again = Counter(one["session_id"].rsplit(":", 1)[0] for one in sessions)
    assert max(asked_again.values()) == 1 + partial


def test_evaluations_have_names_of_their_own(stand: TrainerStand, tmp_path: Path) -> None:
    """Two data sets with the same prompts, twice; they are in no group that is trained."""
    with program("slime", tmp_path, asked(stand, tmp_path, rollouts=0, evaluations=2), stand) as player:
        found = player.result()["evaluations"]
    names = [name for sets in found for sessions in sets.values() for name in sessions]
    assert len(set(names)) == 8
    with Turnlog(stand.url) as turnlog:
        assert {one["session_id"] for one in turnlog.sessions(evaluation=True)} == set(names)
        assert list(turnlog.export()) == []


def test_slimes_own_rollout_works_by_configuration_alone(stand: TrainerStand, tmp_path: Path) -> None:
    own: dict[str, Any] = {
        "custom_generate_function_path": None,
        "apply_chat_template": True,
        "router_policy": "consistent_hashing",
    }
    own |= {"rm_type": "random", "custom_reward_post_process_path": None}
    given = asked(stand, tmp_path, rollouts=2, **own, **REPLAYING)
    with program("slime", tmp_path, given, stand) as player:
        found = player.result()["rollouts"]
    require(stand, found, by_agent=False)
    with Turnlog(stand.url) as turnlog:
        assert len(list(turnlog.sessions())) == 8


def test_miles_own_driver_finds_its_session_server(stand: TrainerStand, tmp_path: Path) -> None:
    """`agentic_tool_call.generate`, told of Turnlog's address."""
    driver = {"custom_generate_function_path": "trainers.miles_program.driver"}
    driver |= {"custom_agent_function_path": "trainers.miles_program.plain"}
    given = asked(stand, tmp_path, n_samples_per_prompt=3, custom_rm_path="trainers.miles_program.reward", **driver)
    with program("miles", tmp_path, given, stand) as player:
        [data] = player.result()["rollouts"]
    require(stand, [data])
