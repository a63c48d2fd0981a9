"""OpenPipe ART: its groups, its tokenizer of exchanges, its advantages and packed tensors, with agents on Turnlog."""

from __future__ import annotations

import asyncio
import base64
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ops.simulator.tokenizer_files import write
from trainers import playing
from trainers.stand import Sequenced, TrainerStand, judge, trainer_stand
from turnlog import Turnlog, unpack_tree

art = pytest.importorskip("art", reason="openpipe-art is not installed", exc_type=ImportError)
transformers = pytest.importorskip("transformers")
pytest.importorskip("torch")

from art.preprocessing.pack import packed_tensors_from_tokenized_results  # noqa: E402
from art.preprocessing.tokenize import tokenize_trajectory_groups  # noqa: E402
from art.trajectories._selection import automatic_training_model_selector  # noqa: E402

from turnlog.integrations.art import trajectory  # noqa: E402

pytestmark = [
    pytest.mark.long,
    pytest.mark.harness,
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

ATTEMPTS = 3
EXPERTS = {"TURNLOG_REPLAY": "routed_experts", "TURNLOG_MOE_LAYERS": "2", "TURNLOG_MOE_TOPK": "3"}
MODEL = "agent@4"
SAMPLING = {"max_tokens": 100, "temperature": 1.0}
PROMPT = [{"role": "user", "content": "What is 6 times 7?"}]
AGENT = "trainers.playing:run"


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[TrainerStand]:
    write(tmp_path / "model")
    playing.prepare(tmp_path)
    words, dialect = getattr(request, "param", ((), "sglang"))
    environment = dict(EXPERTS) if words else None
    with trainer_stand(tmp_path / "turnlog", *words, dialect=dialect, environment=environment) as running:
        monkeypatch.setenv("TURNLOG_URL", running.url)
        monkeypatch.setenv(playing.FOLDER, str(tmp_path))
        yield running


def main(asked: dict[str, Any]) -> list[Sequenced]:
    """As a program that a test kills: plays groups, each of which has a name and says what its agents do."""

    async def play() -> list[Any]:
        return await asyncio.gather(*[gathered(AGENT, name, what) for name, what in asked["groups"]])

    groups = [group for [group] in asyncio.run(play())]
    assert all([one.reward for one in group] == expected(group) for group in groups)
    return [sequenced(one) for one in tokenized(groups, Path(asked["model"]))]


def expected(group: Any) -> list[float]:
    """The rewards of its agents: how many tokens the last turn has."""
    last = [one.exchanges.chat_completions[-1].response.choices[0] for one in group]
    return [len(one.model_extra["token_ids"]) for one in last]


async def gathered(agent: Any, name: str, what: str = "fine", *, max_exceptions: int = 0, **more: Any) -> list[Any]:
    """A group, as a rollout function of ART's makes it."""
    group = art.TrajectoryGroup(
        trajectory(
            agent,
            PROMPT,
            model=MODEL,
            metadata={"what": what},
            name=f"{name}.{attempt}",
            group_id=name,
            attempt=attempt,
            sampling=SAMPLING,
            **more,
        )
        for attempt in range(ATTEMPTS)
    )
    return list(await art.gather_trajectory_groups([group], pbar_desc=None, max_exceptions=max_exceptions))


def tokenized(groups: Sequence[Any], folder: Path) -> list[Any]:
    """As ART's local backend does; it wants the next step's name, and takes those of all steps."""
    return list(
        tokenize_trajectory_groups(
            transformers.AutoTokenizer.from_pretrained(folder),
            list(groups),
            allow_training_without_logprobs=False,
            scale_rewards=False,
            shuffle_group_trajectories=False,
            drop_zero_advantage_trajectories=False,
            model=automatic_training_model_selector("agent@5"),
        )
    )


def sequenced(one: Any) -> Sequenced:
    logprobs = [logprob if mask else 0.0 for logprob, mask in zip(one.logprobs, one.assistant_mask, strict=True)]
    return Sequenced(one.token_ids, one.assistant_mask, logprobs)


@pytest.mark.parametrize("stand", [((), "sglang"), ((), "vllm")], indirect=True, ids=["sglang", "vllm"])
@pytest.mark.parametrize(
    ("agent", "what", "more", "rows"),
    [
        (AGENT, "fine", {}, 3),
        (playing.run, "forgets", {}, 6),
        (None, "fine", {"command": (sys.executable, "-c", playing.COMMAND)}, 3),
    ],
    ids=["agent", "two rows", "command"],
)
async def test_what_it_trains_on_is_what_the_engine_said(
    stand: TrainerStand, tmp_path: Path, agent: Any, what: str, more: dict[str, Any], rows: int
) -> None:
    groups = await gathered(agent, "0.0", what, **more)
    read = tokenized(groups, tmp_path / "model")
    assert len(read) == rows
    judge([sequenced(one) for one in read], stand.generations())
    rewards = [one.reward for one in groups[0]]
    assert rewards == expected(groups[0])
    mean = statistics.fmean(rewards)
    assert [one.advantage for one in read] == pytest.approx([one.trajectory.reward - mean for one in read])
    packed = packed_tensors_from_tokenized_results(
        read, seq_len=512, pad_token_id=0, truncate_long_results=False, pack_results=False
    )
    assert int(packed["assistant_mask"].sum()) == sum(len(one.output) for one in stand.generations())
    # RULER and the logs read messages.
    histories = groups[0].trajectories[0].chat_completions_histories()
    assert [message["role"] for message in histories[0].messages][:2] == ["user", "assistant"]


@pytest.mark.parametrize("stand", [(("--experts", "2,3,16"), "sglang")], indirect=True, ids=["experts"])
async def test_experts_are_those_of_the_row(stand: TrainerStand, tmp_path: Path) -> None:
    groups = await gathered(AGENT, "e.0", num_experts=16)
    read = tokenized(groups, tmp_path / "model")
    with Turnlog(stand.url) as turnlog:
        rows = [row for tree in turnlog.export(shape="tree", replay=True) for row in unpack_tree(tree)]
    by_tokens = {tuple(row["tokens"]): row for row in rows}
    for one in read:
        row = by_tokens[tuple(one.token_ids)]
        said = np.frombuffer(base64.b64decode(row["routed_experts"]), row["dtype"]).reshape(row["shape"])
        given = np.concatenate(getattr(one.moe_routed_experts, "segments", (one.moe_routed_experts,)))
        assert len(given) == len(said) + 1  # ART makes up those of the last token, which predicts none.
        assert (given[: len(said)] == said).all()


async def test_experts_that_are_not_there_are_an_error(stand: TrainerStand) -> None:
    with pytest.raises(ValueError, match=r"session n\.0 has no routed experts"):
        await trajectory(AGENT, PROMPT, model=MODEL, name="n", attempt=0, num_experts=16)


@pytest.mark.parametrize("failed", ["drop", "keep"])
async def test_an_agent_that_raises_is_among_the_groups_exceptions(
    stand: TrainerStand, tmp_path: Path, failed: Any
) -> None:
    [group] = await gathered(AGENT, "f.0", "odd raises", max_exceptions=1, failed=failed)
    kept = failed == "keep"
    assert sorted(one.metrics["failed"] for one in group) == [False, False] + ([True] if kept else [])
    assert ["no answer" in one.message for one in group.exceptions] == ([] if kept else [True])
    judge([sequenced(one) for one in tokenized([group], tmp_path / "model")], stand.generations(), unused=not kept)


def test_a_kill_of_the_server_and_of_the_trainer_loses_nothing(stand: TrainerStand, tmp_path: Path) -> None:
    given = {"groups": [("7.0", "fine"), ("7.1", "waits")], "model": str(tmp_path / "model")}
    found = playing.over_kills(tmp_path, "test_art", given, stand, each=3)
    judge([Sequenced(*one) for one in found], stand.generations(), unused=3)
