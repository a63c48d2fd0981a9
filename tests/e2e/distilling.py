"""A student and a teacher of two layers, and `python distilling.py SERVER SESSION…`: the teacher's process.

It reads the sessions' rows, scores their tokens and writes what it thinks of each sampled one as a column of its turn.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from turnlog import Turnlog

COLUMN = "teacher_logprobs"
VOCABULARY = 4096
WIDTH = 16
SHARPNESS = 8.0
"""Of the logits, so that the two models differ by more than float32 rounds."""


class Model(torch.nn.Module):
    """A causal language model whose weights are drawn from a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.TransformerEncoder(layer, 2)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Any) -> Any:
        """Log-probabilities [T-1, V] of what follows each of the tokens [T] but the last."""
        mask = torch.nn.Transformer.generate_square_subsequent_mask(len(ids) - 1)
        hidden = self.layers(self.embedding(ids[:-1])[None], mask=mask, is_causal=True)
        return (SHARPNESS * self.head(hidden)[0]).log_softmax(-1)


def student() -> Model:
    return Model(1)


@torch.no_grad()
def teachers_scores(tokens: Sequence[int]) -> Any:
    """The teacher's log-probability [T] of each token; 0 for the first, which nothing precedes."""
    ids = torch.tensor(tokens)
    scores = Model(2)(ids).gather(-1, ids[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), scores]).numpy()


def main(server: str, sessions: Sequence[str]) -> None:
    with Turnlog(server) as turnlog:
        for session_id in sessions:
            [row] = turnlog.export(session_id=session_id)
            session, scores = turnlog.attach(session_id), teachers_scores(row["tokens"])
            for turn in row["turns"]:
                own = scores[turn["output_start"] : turn["end"]]
                session.annotate(COLUMN, own, turn=turn["turn"], over="output", writer="teacher")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
