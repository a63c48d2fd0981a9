"""A step of on-policy distillation from an export: the teacher's logprobs are columns that another process wrote.

What the trainer sees is compared with what left the engine and with the teacher's own scores, without Turnlog between.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from integration.proxy import RecordingProxy
from integration.stand import serving

from ops.simulator.process import SimulatorProcess

ABSENT = "torch is not installed: see 'Trainers' packages' in CONTRIBUTING.md"
SESSIONS, TURNS = 3, 2


class Rollout(NamedTuple):
    """Lists of T numbers; `teacher` counts where `is_sampled`."""

    tokens: list[int]
    is_sampled: list[int]
    sampled: list[float]
    teacher: list[float]


class Seen(NamedTuple):
    exported: list[Rollout]
    direct: list[Rollout]


def policy_gradient(scores: Any, rollout: Rollout) -> Any:
    """Of log-probabilities [T-1, V] of the student: reverse KL at the sampled tokens as their negative advantage."""
    import torch

    mask = torch.tensor(rollout.is_sampled[1:], dtype=torch.bool)
    own = scores.gather(-1, torch.tensor(rollout.tokens[1:])[:, None])[:, 0][mask]
    sampled, teacher = (torch.tensor(numbers[1:])[mask] for numbers in (rollout.sampled, rollout.teacher))
    return ((own - sampled).exp() * (sampled - teacher)).mean()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    pytest.importorskip("torch", reason=ABSENT)
    from e2e import distilling

    with (
        SimulatorProcess() as engine,
        RecordingProxy(engine.base_url) as proxy,
        serving(tmp_path_factory.mktemp("distilled"), proxy.base_url, engine_url=engine.base_url) as stand,
    ):
        talks = [stand.talk() for _ in range(SESSIONS)]
        for talk in talks:
            for turn in range(TURNS):
                talk.say(f"Step {turn}")
        teacher = [sys.executable, str(Path(distilling.__file__)), stand.base_url, *(talk.id for talk in talks)]
        subprocess.run(teacher, check=True, timeout=120)
        rows = [row for talk in talks for row in talk.rows(columns=distilling.COLUMN)]
        replies = [json.loads(reply)["choices"][0] for reply in proxy.replies]
    exported = [
        Rollout(row["tokens"], row["sampled_mask"], row["logprobs"], row["columns"][distilling.COLUMN]) for row in rows
    ]
    assert [row["column_masks"][distilling.COLUMN] for row in rows] == [row["sampled_mask"] for row in rows]
    direct = [of_engine(replies[at : at + TURNS], distilling.teachers_scores) for at in range(0, len(replies), TURNS)]
    return Seen(exported, direct)


def of_engine(replies: Sequence[Any], score: Callable[[list[int]], Any]) -> Rollout:
    """What the engine's replies to a session's turns say."""
    tokens: list[int] = []
    is_sampled: list[int] = []
    sampled: list[float] = []
    for reply in replies:
        prompt = reply["prompt_token_ids"]
        assert prompt[: len(tokens)] == tokens
        output = [(token, logprob) for logprob, token, *_ in reply["meta_info"]["output_token_logprobs"]]
        new = len(prompt) - len(tokens)
        tokens = [*prompt, *(token for token, _ in output)]
        is_sampled += [0] * new + [1] * len(output)
        sampled += [0.0] * new + [logprob for _, logprob in output]
    return Rollout(tokens, is_sampled, sampled, score(tokens).tolist())


def step(rollouts: Sequence[Rollout]) -> tuple[float, list[Any]]:
    """The mean loss of the rollouts, and the student's parameters after a step against it."""
    import torch

    from e2e import distilling

    student = distilling.student()
    optimizer = torch.optim.SGD(student.parameters(), lr=1.0)
    loss = torch.stack([policy_gradient(student(torch.tensor(one.tokens)), one) for one in rollouts]).mean()
    loss.backward()
    optimizer.step()
    return loss.item(), [parameter.detach() for parameter in student.parameters()]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_a_step_from_an_export_is_one_from_the_engine_and_the_teacher(
    seen: Seen, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    from e2e import distilling

    (loss, after), (direct, expected) = (step(rollouts) for rollouts in seen)
    with capsys.disabled():
        print(f"\nloss {loss:.6f} from the export, {direct:.6f} without Turnlog")
    assert loss == pytest.approx(direct, rel=1e-5)
    assert all(torch.allclose(*pair, rtol=1e-5, atol=1e-5) for pair in zip(after, expected, strict=True))
    assert any(not torch.equal(*pair) for pair in zip(after, distilling.student().parameters(), strict=True))
