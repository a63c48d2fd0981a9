"""A server that can be killed, and an engine of which every generation is known, for the tests of trainers' adapters.

What a trainer got is compared with what the engine said, by a reading of its own: neither Turnlog's log nor its rows.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from integration.proxy import RecordingProxy

from ops.server import ServerProcess
from ops.simulator.process import SimulatorProcess


class Generation(NamedTuple):
    """What the engine was given and what it said; `logprobs` as it wrote them."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    logprobs: tuple[float, ...]


class Sequenced(NamedTuple):
    """A row of any trainer as plain lists of T entries each: tokens, loss mask, and logprobs where the mask is 1."""

    tokens: Sequence[int]
    loss_mask: Sequence[int]
    logprobs: Sequence[float]


class TrainerStand(NamedTuple):
    server: ServerProcess
    engine: RecordingProxy
    simulator: SimulatorProcess

    @property
    def url(self) -> str:
        return self.server.base_url

    def kill(self) -> None:
        """`kill -9` of the server, which is started again at the same address."""
        self.server.kill()
        self.server.start()

    def generations(self) -> list[Generation]:
        said = [reply for reply in list(self.engine.replies) if reply.startswith(b"{")]  # Not an abort's.
        return [found for reply in said if (found := generation(json.loads(reply))) is not None]


@contextmanager
def trainer_stand(
    folder: Path, *simulator: str, dialect: str = "sglang", environment: Mapping[str, str] | None = None
) -> Iterator[TrainerStand]:
    """A server on SQLite in `folder`; `simulator` are more words of the simulator's command line."""
    with (
        SimulatorProcess("--dialect", dialect, *simulator) as engine,
        RecordingProxy(engine.base_url) as proxy,
        ServerProcess(folder, upstreams=[proxy.base_url], environment=environment) as server,
    ):
        yield TrainerStand(server, proxy, engine)


def generation(reply: Mapping[str, Any]) -> Generation | None:
    """Of a chat's or a completion's reply in either dialect; None for another reply."""
    if not reply.get("choices"):
        return None
    [choice] = reply["choices"]
    if "meta_info" in choice:  # SGLang
        said = choice["meta_info"]["output_token_logprobs"]
        ids, logprobs = [one[1] for one in said], [one[0] for one in said]
        return Generation(tuple(choice["prompt_token_ids"]), tuple(ids), tuple(logprobs))
    told = choice["logprobs"]
    logprobs = [one["logprob"] for one in told["content"]] if "content" in told else told["token_logprobs"]
    prompt = choice.get("prompt_token_ids") or reply["prompt_token_ids"]
    return Generation(tuple(prompt), tuple(choice["token_ids"]), tuple(logprobs))


def judge(rows: Iterable[Sequenced], said: Sequence[Generation], *, unused: int = 0, tolerance: float = 1e-6) -> None:
    """Every token in a loss is one that the engine sampled after exactly the tokens before it, with its logprob; every
    generation is in the loss once, but for at most `unused`, which a kill left behind."""
    used: Counter[Generation] = Counter()
    for row in rows:
        assert len(row.tokens) == len(row.loss_mask) == len(row.logprobs), "rows of unequal length"
        at = 0
        while at < len(row.tokens):
            if not row.loss_mask[at]:
                at += 1
                continue
            before = tuple(row.tokens[:at])
            found = [one for one in said if one.prompt == before and _begins(row, at, one.output)]
            assert found, f"no generation has the tokens from {at} on"
            [longest] = sorted(found, key=lambda one: len(one.output))[-1:]
            end = at + len(longest.output)
            wrong = [
                (row.logprobs[place], logprob)
                for place, logprob in zip(range(at, end), longest.logprobs, strict=True)
                if not abs(row.logprobs[place] - logprob) <= tolerance  # NaN too
            ]
            assert not wrong, f"other logprobs than the engine's: {wrong[:3]}"
            used[longest] += 1
            at = end
    made = Counter(said)
    assert not used - made, "a generation is in the loss twice"
    assert (made - used).total() <= unused, f"{(made - used).total()} generations are in no loss"


def _begins(row: Sequenced, at: int, output: tuple[int, ...]) -> bool:
    end = at + len(output)
    return tuple(row.tokens[at:end]) == output and all(row.loss_mask[at:end])
