"""Score exported rows again with the weights that they name: `python -m ops.train.rescore WEIGHTS < rows.ndjson`.

`WEIGHTS` has a model's folder a version. Prints the largest difference, in nats, between a sampled token's logprob and
that of its version. An engine that was started again with other weights than its turns name shows here. It runs in the
engine's environment, which has PyTorch.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def main(weights: Path) -> None:
    by_version: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in sys.stdin:
        row = json.loads(line)
        for version in {version for version in row["weight_versions"] if version >= 0}:
            by_version[version].append(row)
    largest = 0.0
    with torch.no_grad():
        for version, rows in by_version.items():
            model: Any = AutoModelForCausalLM.from_pretrained(weights / str(version), dtype=torch.float32)
            largest = max(largest, *(_difference(model, row, version) for row in rows))
    print(json.dumps(largest))


def _difference(model: Any, row: dict[str, Any], version: int) -> float:
    tokens = torch.tensor(row["tokens"])
    at = (torch.tensor(row["weight_versions"]) == version).nonzero().flatten()
    scored = model(tokens[None]).logits[0, at - 1].log_softmax(-1).gather(-1, tokens[at, None]).flatten()
    exported = torch.tensor(row["logprobs"], dtype=torch.float64)[at]
    difference: float = (scored.double() - exported).abs().max().item()
    return difference


if __name__ == "__main__":
    main(Path(sys.argv[1]))
