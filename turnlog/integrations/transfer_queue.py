"""A producer for TransferQueue (0.1.11): Turnlog's complete groups, where verl's trainer looks for them.

lease groups ──▶ put their rows ──▶ show the group, with a receipt ──▶ acknowledge ──▶ clear the receipt
                 (not yet shown)     (one step of the queue)            (in Turnlog)

verl's `ReplayBuffer` takes a group when its key, the group's id, has the tag `finished`. That tag and the receipt are
set in one request, so the receipt is there exactly if the trainer may have seen the group. A producer that died is
started again with the same consumer name: groups with a receipt are acknowledged and not put a second time, the others
are put again under the same keys. So no row is lost or doubled by the death of the producer or of Turnlog.

The queue keeps its rows in memory. With `until="put"` a group that is in the queue is acknowledged, and lost if the
queue dies before the trainer took it. With `until="cleared"` it is acknowledged when the trainer has cleared its rows:
a queue that died is filled again, also with rows that the trainer had read and not yet cleared.

One producer at a time for each consumer name. Start it with `python -m turnlog.integrations.transfer_queue`.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar

import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack

from turnlog import AsyncTurnlog
from turnlog.client.address import default_run
from turnlog.errors import TurnlogError
from turnlog.rows import LeasedGroup, TrainerRow

RECEIPT = "turnlog:receipt:"
"""Begins the keys of receipts. It has no `_`, so verl takes a receipt for no group's row."""

MAX_SIZE = 1000
"""Groups that Turnlog hands out at once."""

Row = Mapping[str, Any]
Columns = dict[str, Any]
Result = TypeVar("Result")


@dataclass
class Counts:
    """What a producer did since it was made.

    put: groups whose rows it put. rows: those rows. empty: groups without a row of a rollout that did not fail, which
    were acknowledged at once.
    found: groups handed out to it that were in the queue already. acknowledged: groups.
    """

    put: int = 0
    rows: int = 0
    empty: int = 0
    found: int = 0
    acknowledged: int = 0


def uid(group_id: str) -> str:
    """The group's key in the queue. verl reads a key as `<uid>_<session>_<index>`, so a uid has no `_`."""
    return group_id.replace("%", "%25").replace("_", "%5F")


def keys(group_id: str, rows: Sequence[Row]) -> list[str]:
    """The rows' keys: always the same for the same rows. The rows of a rollout are numbered in their order."""
    seen: dict[str, int] = {}
    found = []
    for row in rows:
        rollout = row["extra_fields"]["rollout_id"]
        found.append(f"{uid(group_id)}_{uid(rollout)}_{seen.setdefault(rollout, 0)}")
        seen[rollout] += 1
    return found


def versions(rows: Sequence[Row]) -> tuple[int, int]:
    """The oldest and the newest weight version that is a number; (0, 0) if there is none."""
    named = [str(version) for row in rows for version in row["extra_fields"]["weight_versions"]]
    numbers = [int(version) for version in named if version.isdecimal()]
    return min(numbers, default=0), max(numbers, default=0)


def columns(row: Mapping[str, Any]) -> Columns:
    """A row of the shape `verl` as verl's (0.9) agent loops put it: what `AgentLoopOutput.as_dict` gives, and what they
    add for a text model.

    prompts, responses, input_ids and position_ids are int64. response_mask and loss_mask are too, 1 where the model
    sampled. rollout_log_probs and rm_scores are float32, of the responses' length, the reward in the last place
    or, with `rewards="turn"`, where turns earned it. Columns of your data set are yours to add.
    """
    prompts = torch.tensor(row["prompt_ids"], dtype=torch.int64)
    responses = torch.tensor(row["response_ids"], dtype=torch.int64)
    mask = torch.tensor(row["response_mask"], dtype=torch.int64)
    found: Columns = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses]),
        "position_ids": torch.arange(len(prompts) + len(responses)),
        "response_mask": mask,
        "loss_mask": mask,
        "rollout_log_probs": torch.tensor(row["response_logprobs"], dtype=torch.float32),
        "num_turns": row["num_turns"],
        "metrics": row["metrics"],
        "multi_modal_inputs": {},
        "extra_fields": row["extra_fields"],
    }
    if row.get("rm_scores") is not None:
        found["rm_scores"] = torch.tensor(row["rm_scores"], dtype=torch.float32)
    elif row["reward_score"] is not None:
        found["rm_scores"] = torch.zeros(len(responses))
        found["rm_scores"][-1] = row["reward_score"]
    return found


def batch(rows: Sequence[Columns]) -> TensorDict:
    """Rows with equal columns as one batch: tensors of one shape stacked, of several jagged, other values as they are.

    Raises ValueError if a row has other columns than the first.
    """
    names = rows[0].keys()
    if any(row.keys() != names for row in rows):
        raise ValueError("the rows of a group do not have the same columns")
    return TensorDict({name: _column([row[name] for row in rows]) for name in names}, batch_size=[len(rows)])


def _column(values: list[Any]) -> Any:
    if not all(isinstance(value, torch.Tensor) for value in values):
        return NonTensorStack(*values)
    if len({value.shape for value in values}) == 1:
        return torch.stack(values)
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)


class TransferQueueProducer:
    """Puts the groups of Turnlog's feed into a partition of the queue that `transfer_queue.init()` has connected to.

    consumer: the name by which Turnlog leases groups; one producer at a time may have it.
    run: whose groups; by default those of `TURNLOG_RUN`, else of the default run. A partition takes those of one run.
    until: when a group is acknowledged; see the module.
    columns: a row's columns in the queue; by default verl's.
    size: groups put at a time. limit: groups in the queue that the trainer has not taken; at so many none is put.
    lease_s: for how long Turnlog gives them to no other consumer.
    rewards: of `turn`, a reward stands at the token that earned it.
    timeout_s: how long the queue may take for one request. TransferQueue itself waits for a dead queue for ever.
    """

    def __init__(
        self,
        turnlog: AsyncTurnlog,
        *,
        consumer: str,
        run: str | None = None,
        partition: str = "train",
        until: Literal["put", "cleared"] = "put",
        columns: Callable[[Row], Columns] = columns,
        size: int = 8,
        limit: int | None = None,
        attempts: int = 1,
        lease_s: float = 600.0,
        rewards: Literal["total", "turn"] = "total",
        timeout_s: float = 60.0,
    ) -> None:
        self.counts = Counts()
        self._turnlog = turnlog
        self._consumer = consumer
        self._run = run or default_run() or "default"
        self._partition = partition
        self._until = until
        self._columns = columns
        self._size = size
        self._limit = limit
        self._attempts = attempts
        self._lease_s = lease_s
        self._rewards = rewards
        self._timeout_s = timeout_s
        self._renew_at = 0.0

    async def run(self, poll_s: float = 1.0) -> NoReturn:
        """Put groups as they complete, and ask every `poll_s` seconds while there are none.

        Raises TurnlogError and, if the queue does not answer, TimeoutError: start it again then, in a new process,
        which connects to the queue anew.
        """
        while True:
            if not await self.step():
                await asyncio.sleep(poll_s)

    async def step(self) -> int:
        """Acknowledge what may be, lease up to `size` groups and put them. Returns the number of groups put.

        Raises as `run`.
        """
        waiting = await self._settle()
        listing = await self._listing()
        untaken = sum(bool(tag.get("is_prompt")) for tag in listing.values())
        is_full = self._limit is not None and untaken >= self._limit
        put = 0
        for group in await self._lease(len(waiting), 0 if is_full else self._size):
            # verl makes advantages of all rows of a group: those of failed rollouts have no place among them.
            rows = [row for row in group["rows"] if row["extra_fields"]["failed"] is None]
            if group["group_id"] in waiting:
                self.counts.found += 1
            elif rows:
                await self._put(group["group_id"], rows, listing)
                put += 1
            else:
                await self._turnlog.acknowledge(self._consumer, [group["group_id"]], run=self._run)
                self.counts.empty += 1
        if put:
            await self._settle()
        return put

    async def _lease(self, waiting: int, new: int) -> list[LeasedGroup[TrainerRow]]:
        """Up to `new` new groups. Groups that wait for the trainer are leased again when a third of their lease has
        passed.
        """
        renew = not waiting or time.monotonic() >= self._renew_at
        size = min(new + (waiting if renew else 0), MAX_SIZE)
        if not size:
            return []
        if renew:
            self._renew_at = time.monotonic() + self._lease_s / 3
        return await self._turnlog.hand_out(
            self._consumer,
            run=self._run,
            size=size,
            attempts=self._attempts,
            lease_s=self._lease_s,
            shape="verl",
            rewards=self._rewards,
            new_only=not renew,
        )

    async def _settle(self) -> set[str]:
        """Acknowledge groups that have a receipt, and clear it. Returns the groups that keep theirs."""
        listing = await self._listing()
        receipts = {tag["group_id"]: key for key, tag in listing.items() if key.startswith(RECEIPT) and tag}
        held = {key.split("_")[0] for key in listing}
        due = [group_id for group_id in receipts if self._until == "put" or uid(group_id) not in held]
        if due:
            answer = await self._turnlog.acknowledge(self._consumer, due, run=self._run)
            settled = set(due) - set(answer["not_leased"])
            self.counts.acknowledged += len(answer["acknowledged"])
            await self._clear([receipts.pop(group_id) for group_id in sorted(settled)])
        return set(receipts)

    async def _put(self, group_id: str, rows: Sequence[Row], listing: Mapping[str, Any]) -> None:
        """Put the rows, then show them."""
        group = uid(group_id)
        # A put that a crash cut off. Not every storage of the queue overwrites a key.
        await self._clear([key for key in listing if key.split("_")[0] == group or key == RECEIPT + group])
        oldest, _ = versions(rows)
        named = keys(group_id, rows)
        fields = batch([{**self._columns(row), "uid": group} for row in rows])
        tags = [_tag(row, oldest) for row in rows]
        await self._ask(tq.async_kv_batch_put(keys=named, partition_id=self._partition, fields=fields, tags=tags))
        shown = {"is_prompt": True, "status": "finished", "global_steps": oldest}
        receipt = {"group_id": group_id}
        await self._ask(
            tq.async_kv_batch_put(keys=[group, RECEIPT + group], partition_id=self._partition, tags=[shown, receipt])
        )
        self.counts.put += 1
        self.counts.rows += len(rows)

    async def _listing(self) -> dict[str, dict[str, Any]]:
        """The partition's keys and their tags."""
        found = await self._ask(tq.async_kv_list(self._partition))
        return dict((found or {}).get(self._partition, {}))

    async def _clear(self, keys: list[str]) -> None:
        if keys:
            await self._ask(tq.async_kv_clear(keys=keys, partition_id=self._partition))

    async def _ask(self, request: Awaitable[Result]) -> Result:
        async with asyncio.timeout(self._timeout_s):
            return await request


def _tag(row: Row, step: int) -> dict[str, Any]:
    """A row's tag, as verl's agent loops set it. The steps are weight versions."""
    oldest, newest = versions([row])
    prompt, response = len(row["prompt_ids"]), len(row["response_ids"])
    return {
        "status": "success",
        "prompt_len": prompt,
        "response_len": response,
        "seq_len": prompt + response,
        "global_steps": step,
        "min_global_steps": oldest,
        "max_global_steps": newest,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a producer until the queue or Turnlog fails for good; a supervisor starts it again. Returns the exit code.

    It joins the Ray cluster at `--ray` and waits until the trainer has started the queue there. After each put it
    prints its counts as a line of JSON.
    """
    parser = argparse.ArgumentParser(
        prog="python -m turnlog.integrations.transfer_queue", description="Feed TransferQueue."
    )
    parser.add_argument("--consumer", required=True, help="the name by which Turnlog leases groups")
    parser.add_argument("--run", help="the run whose groups are leased; by default TURNLOG_RUN, else the default run")
    parser.add_argument("--url", help="Turnlog's address; by default TURNLOG_URL")
    parser.add_argument("--ray", default="auto", help="the Ray cluster's address")
    parser.add_argument("--partition", default="train")
    parser.add_argument("--until", choices=("put", "cleared"), default="put", help="when groups are acknowledged")
    parser.add_argument("--size", type=int, default=8, help="groups put at a time")
    parser.add_argument("--limit", type=int, help="pause while this many groups wait for the trainer")
    parser.add_argument("--attempts", type=int, default=1, help="only groups with at least this many sessions")
    parser.add_argument(
        "--rewards",
        choices=("total", "turn"),
        default="total",
        help="turn: at the tokens of the turns that earned them",
    )
    parser.add_argument("--lease-s", type=float, default=600.0)
    parser.add_argument(
        "--timeout-s", type=float, default=60.0, help="the timeout of a request to the queue, in seconds"
    )
    parser.add_argument("--poll-s", type=float, default=1.0)
    given = vars(parser.parse_args(arguments))
    ray.init(address=given.pop("ray"), log_to_driver=False)
    poll_s = given.pop("poll_s")
    try:
        _wait_for_queue(poll_s)
        asyncio.run(_produce(given.pop("url"), poll_s, given))
    except (TurnlogError, TimeoutError, ray.exceptions.RayActorError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return 1


def _wait_for_queue(poll_s: float) -> None:
    while True:
        try:
            ray.get_actor("TransferQueueController", namespace="transfer_queue")
            return
        except ValueError:
            time.sleep(poll_s)


async def _produce(url: str | None, poll_s: float, given: Mapping[str, Any]) -> NoReturn:
    async with AsyncTurnlog(url) as turnlog:
        producer = TransferQueueProducer(turnlog, **given)
        while True:
            if await producer.step():
                print(json.dumps(dataclasses.asdict(producer.counts)), flush=True)
            else:
                await asyncio.sleep(poll_s)


if __name__ == "__main__":
    sys.exit(main())
