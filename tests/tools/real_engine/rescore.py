"""Score exported rows again with `transformers`: `python -m tests.tools.real_engine.rescore MODEL < rows.ndjson`.

Prints a JSON object: rows, sampled tokens, and the largest difference between an exported logprob and the model's own,
in nats. The model's own are of the distribution that the row's `sampling` names. Runs in the engine's environment,
which has PyTorch.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def main(folder: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = [json.loads(line) for line in sys.stdin]
    with torch.no_grad():
        differences = [one for row in rows for one in _differences(model, row)]
    print(json.dumps({"rows": len(rows), "tokens": len(differences), "largest": max(differences, default=0.0)}))


def _differences(model: Any, row: dict[str, Any]) -> list[float]:
    """One for each token in the row's loss."""
    tokens = torch.tensor(row["tokens"])
    sampled = torch.tensor(row["loss_mask"], dtype=torch.bool).nonzero().flatten()
    logits = _of_named_distribution(model(tokens[None]).logits[0], row)[sampled - 1]
    scored = logits.log_softmax(-1).gather(-1, tokens[sampled, None]).flatten()
    exported = torch.tensor(row["logprobs"], dtype=torch.float64)[sampled]
    found: list[float] = (scored.double() - exported).abs().tolist()
    return found


def _of_named_distribution(logits: Any, row: dict[str, Any]) -> Any:
    """The logits [T, vocabulary] scaled and cut as those were that the row's logprobs are of."""
    logits = logits.clone()
    for span, sampling in zip(row["turns"], row["sampling"], strict=True):
        of, temperature, top_k = sampling["logprobs_of"], sampling["temperature"], sampling["top_k"]
        part = logits[span["output_start"] - 1 : span["end"] - 1]
        if of in ("scaled", "processed") and temperature:
            part /= temperature
        if of == "processed" and top_k:
            part[part < part.topk(top_k).values[:, -1:]] = -torch.inf
    return logits


if __name__ == "__main__":
    main(sys.argv[1])
