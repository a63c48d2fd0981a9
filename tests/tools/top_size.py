"""What a turn's most likely tokens cost on disk: `python -m tests.tools.top_size`.

Replies of 1,000 sampled tokens in both engines' shapes, with random ids of a vocabulary of 150,000 and random float32
logprobs. Of each: its bytes, those of its stored frames (tokens: ids and numbers; exchange: the reply, to be given
again to the byte), and of the tokens without compression, a sampled token.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np

from ops.bench.measure import table
from workers import job
from workers.reply import Dialect, Job
from workers.top_logprobs import LogprobWish

TOKENS, VOCABULARY, KS = 1000, 150_000, (0, 5, 20)


def main() -> None:
    rows = []
    for dialect in ("sglang", "vllm"):
        before: dict[str, float] = {}
        for k in KS:
            body = msgspec.json.encode(a_reply(dialect, k, random.Random(k)))
            wish = LogprobWish(k) if k else None
            done = job.work(Job(dialect, None, [], [], [], 200, "", b"", wish=wish), memoryview(body))
            sizes = {"reply": len(body), "tokens": len(done.tokens or b""), "exchange": len(done.exchange)}
            shown = {name: size / TOKENS for name, size in sizes.items()}
            before = before or shown
            more = {f"{name} more": shown[name] - before[name] for name in ("tokens", "exchange")}
            rows.append({"engine": dialect, "k": k, **shown, **more, "ids and logprobs as they are": 8 * k})
    table(rows)


def a_reply(dialect: Dialect, k: int, rng: random.Random) -> dict[str, Any]:
    """Most sampled tokens are among the likely ones, of which a few carry most of the weight, as in a model."""
    texts = ["".join(rng.choices("etaoinshrdlu ", k=rng.randint(1, 7))) for _ in range(VOCABULARY)]
    content, triples, rows, ids = [], [], [], []
    for _ in range(TOKENS):
        sizes = sorted(rng.expovariate(0.2) for _ in range(k + 1))
        drawn: dict[int, None] = {}
        while len(drawn) <= k:
            drawn[int(VOCABULARY * rng.random() ** 3)] = None
        top = [(float(np.float32(-size)), token) for size, token in zip(sizes, drawn, strict=True)]
        own = top[0 if rng.random() < 0.9 else -1]
        shown = [own, *(one for one in top if one is not own)][:k] if dialect == "vllm" else top[:k]
        content.append(
            {**entry(own, texts, False), "top_logprobs": [entry(one, texts, dialect == "vllm") for one in shown]}
        )
        ids.append(own[1])
        triples.append([*own, texts[own[1]]])
        rows.append([[*one, texts[one[1]]] for one in shown])
    message = {"role": "assistant", "content": "".join(texts[token] for token in ids)}
    choice = {"index": 0, "message": message, "logprobs": {"content": content}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": TOKENS, "total_tokens": TOKENS + 3}
    if dialect == "vllm":
        return {"choices": [{**choice, "token_ids": ids}], "prompt_token_ids": [1, 2, 3], "usage": usage}
    meta = {"completion_tokens": TOKENS, "output_token_logprobs": triples, "output_top_logprobs": rows}
    return {"choices": [{**choice, "prompt_token_ids": [1, 2, 3], "meta_info": meta}], "usage": usage}


def entry(one: tuple[float, int], texts: list[str], as_id: bool) -> dict[str, Any]:
    name = f"token_id:{one[1]}" if as_id else texts[one[1]]
    return {"token": name, "bytes": list(name.encode()), "logprob": one[0]}


if __name__ == "__main__":
    main()
