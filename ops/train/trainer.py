"""The trainer's process: `python -m ops.train.trainer --url … --engine … --folder … --steps …`.

Asynchronous GRPO over exported rows: a step takes complete groups from the feed, updates the policy, and puts the new
weights into the running engine behind a pause. It runs in the engine's environment, which has PyTorch.

In its folder are `weights/<version>`, of which `weights/newest` names the last; `trainer.pt`, its checkpoint beside one
of the server's, from which it goes on if it is there; `steps.jsonl`, a line a step; and `allowed`, the number of groups
that agents may have begun, which bounds how stale a row can be.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from ops.train import task
from ops.train.peer import GatewayGroups
from ops.train.rollouts import MAX_STALENESS, TurnlogGroups, write_atomically

GROUPS_A_STEP = 8
GROUPS_AHEAD = 8
"""Groups that agents may begin beyond those of the step that is due."""

CHECKPOINT_EVERY = 4
LEARNING_RATE = 1e-3
EPOCHS = 4
"""Optimizer steps over the groups of a step."""

CLIP = 0.2
EXACT = 1e-3
"""How far the ratio of the trainer's and the sampler's probabilities of a token may be from 1 before the first
update."""

POLL_S = 0.1
TRIES_S = 0.5


class LogprobsDiffer(Exception):
    """The trainer's and the sampler's logprobs differ though their weights do not."""


class Trainer:
    """Learns from a batch of groups a step. `step` counts them, and is the version of the newest weights."""

    def __init__(self, groups: TurnlogGroups | GatewayGroups, engine: str, folder: Path) -> None:
        self._groups, self._engine, self._folder = groups, engine, folder
        self._file = folder / "steps.jsonl"
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder / "weights" / "0", dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        self._taken = 0
        self.step = 0
        if (folder / "trainer.pt").exists():
            self._restore()
        else:
            self._file.touch()
            self._load()
            self._checkpoint()
        self._allow()
        (folder / "restored").touch()

    def run(self, steps: int) -> None:
        while self.step < steps:
            begun = time.monotonic()
            line, group_ids = self._train()
            self._publish()
            self._load()
            line |= {"at": time.time(), "seconds": time.monotonic() - begun}
            with self._file.open("a") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
            self._groups.taken(group_ids)
            self._allow()
            if self.step % CHECKPOINT_EVERY == 0:
                self._checkpoint()
            shown = {name: line[name] for name in ("step", "reward", "ratio_mean", "staleness", "seconds")}
            print(json.dumps(shown), flush=True)

    def _train(self) -> tuple[dict[str, Any], list[str]]:
        """Take groups and make a step: its line for `steps.jsonl`, and the ids of what was taken."""
        groups, left = self._next_groups()
        rows = [row for group in groups for row in group["rows"]]
        outcome = self._optimize(rows)
        if self.step == 0 and outcome["ratio_error"] > EXACT:
            raise LogprobsDiffer(f"ratio {1 + outcome['ratio_error']} before the first update")
        self.step += 1
        rewards = [(attempt["session_id"], attempt["reward"]) for group in groups for attempt in group["attempts"]]
        line = {
            "step": self.step,
            "version": self.step,
            "reward": sum(reward for _, reward in rewards) / len(rewards),
            **outcome,
            "staleness": max(group["staleness"] or 0 for group in groups),
            "groups": [group["group_id"] for group in groups],
            "left": left,
            "rewards": dict(rewards),
            "rows": [_trained(row) for row in rows],
        }
        ids = [*line["groups"], *(entry["group_id"] for entry in left)]
        self._taken += len(ids)
        return line, ids

    def _next_groups(self) -> tuple[list[Any], list[dict[str, Any]]]:
        """Waits for the groups of a step. Those that are too stale are `left`, and room is made for others."""
        while True:
            handed_out = self._groups.ready(2 * GROUPS_A_STEP, self.step)
            stale = [group for group in handed_out if (group["staleness"] or 0) > MAX_STALENESS]
            groups = [group for group in handed_out if group not in stale]
            if len(groups) >= GROUPS_A_STEP:
                left = [{"group_id": group["group_id"], "reason": "stale"} for group in stale]
                return groups[:GROUPS_A_STEP], left
            self._allow(len(stale))
            time.sleep(POLL_S)

    def _optimize(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """`EPOCHS` clipped policy-gradient steps over all sampled tokens, by their ratios to the sampled logprobs. The
        figures are those before the first."""
        tokens = _padded([row["tokens"] for row in rows], torch.long)
        sampled = _padded([row["loss_mask"] for row in rows], torch.bool)[:, 1:]
        old = _padded([row["logprobs"] for row in rows], torch.float32)[:, 1:]
        advantage = torch.tensor([row["advantage"] for row in rows])[:, None]
        is_fresh = _padded([row["weight_versions"] for row in rows], torch.long)[:, 1:] == self.step
        ratios = []
        for _ in range(EPOCHS):
            logits = self._model(input_ids=tokens).logits[:, :-1]
            logprobs = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
            ratio = (logprobs - old).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            loss = -torch.min(ratio * advantage, clipped * advantage)[sampled].mean()
            self._optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
            ratios.append(ratio.detach())
        of_sampled, of_fresh = ratios[0][sampled], ratios[0][sampled & is_fresh]
        return {
            "ratio_mean": of_sampled.mean().item(),
            "ratio_max": of_sampled.max().item(),
            # Tokens that the trainer's own weights sampled have the ratio 1 at every step.
            "ratio_error": (of_fresh - 1).abs().max().item() if len(of_fresh) else 0.0,
            "fresh_tokens": len(of_fresh),
            "tokens": len(of_sampled),
        }

    def _publish(self) -> None:
        """Write the weights; an engine that starts from now on starts with them."""
        weights = self._folder / "weights"
        self._model.save_pretrained(weights / str(self.step))
        _point(weights / "newest", str(self.step))

    def _load(self) -> None:
        """Put the newest weights into the engine behind the fleet's gate, which opens over no other weights."""
        version, path = str(self.step), self._folder / "weights" / str(self.step)
        self._groups.pause()
        while not self._is_loaded(version, path):
            time.sleep(TRIES_S)  # The engine is down. It is told again, whatever it began with.
        self._groups.resume(version)

    def _is_loaded(self, version: str, path: Path) -> bool:
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        try:
            with httpx.Client(base_url=self._engine, timeout=60, trust_env=False) as engine:
                engine.post("/collective_rpc", json=reload).raise_for_status()
                named = engine.post("/update_weight_version", json={"new_version": version})
                named.raise_for_status()
                answer = engine.get("/weight_info").raise_for_status()
        except httpx.HTTPError:
            return False
        return bool(answer.json()["weight_version"] == version)

    def _checkpoint(self) -> None:
        """A cut of the server's first, then the trainer's own, which names it: a kill between leaves the one before."""
        name, state_file = f"step-{self.step}-{uuid.uuid4().hex[:8]}", self._folder / "trainer.pt"
        self._groups.checkpoint(name)
        state = {
            "step": self.step,
            "taken": self._taken,
            "checkpoint": name,
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        torch.save(state, state_file.with_suffix(".new"))
        state_file.with_suffix(".new").replace(state_file)

    def _restore(self) -> None:
        """Take the server, the lines of the steps and the engine back to the checkpoint."""
        state = torch.load(self._folder / "trainer.pt")
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self._taken = state["step"], state["taken"]
        self._groups.restore(state["checkpoint"])
        lines = self._file.read_text().splitlines(keepends=True)[: self.step]
        write_atomically(self._file, "".join(lines))
        self._publish()
        self._load()

    def _allow(self, stale: int = 0) -> None:
        number = self._taken + stale + GROUPS_A_STEP + GROUPS_AHEAD
        write_atomically(self._folder / "allowed", str(number))


def _trained(row: Mapping[str, Any]) -> dict[str, Any]:
    """What `steps.jsonl` says of a row."""
    names = ("session_id", "group_id", "attempt", "branch")
    return {
        **{name: row[name] for name in names},
        "turns": [span["turn"] for span in row["turns"]],
        "sampled": sum(row["loss_mask"]),
        "sha256": task.digest(row),
    }


def _padded(columns: Sequence[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
    """The rows' columns as [rows, T], zeros behind the shorter ones."""
    return pad_sequence([torch.tensor(column, dtype=dtype) for column in columns], batch_first=True)


def _point(link: Path, target: str) -> None:
    new = link.with_suffix(".new")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.replace(link)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--in-memory", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(1)
    groups = GatewayGroups(given.engine, given.folder) if given.in_memory else TurnlogGroups(given.url)
    Trainer(groups, given.engine, given.folder).run(given.steps)


if __name__ == "__main__":
    main()
