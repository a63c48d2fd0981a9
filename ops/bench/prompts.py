"""The event loop's longest stall while a thread encodes a long prompt, in pieces and as a whole."""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable

from app.tito.encoding import PIECE, Encoder
from ops.bench.measure import percentile, save_figures, table
from ops.simulator.prose import Prose
from ops.simulator.tokenizer import IM_END, IM_START, Tokenizer

TICK_S = 0.001


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=3_800_000, help="of the prompt, about")
    parser.add_argument("--messages", type=int, default=500, help="of the prompt")
    parser.add_argument("--rounds", type=int, default=5)


async def main(arguments: argparse.Namespace) -> int:
    tokenizer = Tokenizer()
    text = _prompt(tokenizer, arguments.tokens, arguments.messages)
    encoders = {"in pieces": Encoder(tokenizer.bpe, PIECE), "as a whole": Encoder(tokenizer.bpe, len(text))}
    stalls: dict[str, list[float]] = {name: [] for name in ("no encoding", *encoders)}
    tokens: set[int] = set()
    for _ in range(arguments.rounds):
        stalls["no encoding"].append((await _stalled(lambda: time.sleep(1)))[1])
        for name, encoder in encoders.items():
            ids, stall_s = await _stalled(lambda encoder=encoder: len(encoder.encode(text)))  # type: ignore[misc]
            stalls[name].append(stall_s)
            tokens.add(ids)
    (count,) = tokens
    whole = percentile(stalls["as a whole"], 50)
    rows = [
        {
            "encoded": name,
            "longest stall ms": percentile(found, 50) * 1e3,
            "over whole": percentile(found, 50) / whole,
            "lowest": min(found) * 1e3,
            "highest": max(found) * 1e3,
        }
        for name, found in stalls.items()
    ]
    print(f"{count} tokens in {arguments.messages} messages")
    table(rows)
    save_figures("prompts", {"tokens": count, "rows": rows})
    return 0


def _prompt(tokenizer: Tokenizer, tokens: int, messages: int) -> str:
    prose, rng = Prose(tokenizer, seed=1), random.Random(1)
    one = prose.draw(rng, tokens // messages)[0]
    return "".join(f"{IM_START}user\n{one}{IM_END}\n" for _ in range(messages))


async def _stalled(work: Callable[[], int | None]) -> tuple[int, float]:
    """What `work` returns on a thread, and the longest time in seconds that the loop came late meanwhile."""
    working = asyncio.create_task(asyncio.to_thread(work))
    longest = 0.0
    while not working.done():
        before = time.perf_counter()
        await asyncio.sleep(TICK_S)
        longest = max(longest, time.perf_counter() - before - TICK_S)
    return working.result() or 0, longest
