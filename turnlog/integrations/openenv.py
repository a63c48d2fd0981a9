"""OpenEnv's harness (0.10) on Turnlog: a `ResourceSessionFactory` whose agents own their loop, for TRL's
`HarnessRolloutWorker` and others that take one."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from openenv.core.harness import ResourceSession, ResourceSessionFactory, TrainingTrace, TrainingTurn, VerifyResult

from turnlog import AsyncTurnlog, Rollout, name_of, rollout
from turnlog.rollouts import PATIENCE_S, load


class TurnlogSession(ResourceSession):  # type: ignore[misc]  # OpenEnv has no types
    """A rollout. `wait_for_completion` plays it, `close` in another thread ends it."""

    rollout: Rollout

    def __init__(self, task: Any, url: str | None, options: Mapping[str, Any]) -> None:
        self._prompt, self._url, self._options = task, url, options
        self._end: Callable[[], object] = lambda: None
        self._is_closed = False

    def initial_messages(self) -> list[Any]:
        return self._prompt if isinstance(self._prompt, list) else [{"role": "user", "content": self._prompt}]

    def list_tools(self) -> list[Any]:
        return []

    def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        raise NotImplementedError("the agent calls its own tools")

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """0, or 1 if the agent failed. Raises TimeoutError if it took too long, RuntimeError if the session was closed
        meanwhile, and TurnlogError."""
        try:
            self.rollout = asyncio.run(self._play(timeout_s))
        except asyncio.CancelledError as error:
            raise RuntimeError("the session was closed") from error
        failed = self.rollout.outcome.failed
        if failed is not None and failed["kind"] == "timeout":
            raise TimeoutError(failed.get("message"))
        return 0 if failed is None else 1

    async def _play(self, timeout_s: float | None) -> Rollout:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._end = lambda: loop.call_soon_threadsafe(task.cancel)
        if self._is_closed:
            raise asyncio.CancelledError
        options = {**self._options, **({} if timeout_s is None else {"timeout_s": timeout_s})}
        async with AsyncTurnlog(self._url, retry_for_s=PATIENCE_S) as turnlog:
            return await rollout(prompt=self._prompt, turnlog=turnlog, **options)

    def fetch_training_trace(self) -> TrainingTrace:
        """The generations that are in the loss, those of a row one after the other."""
        return TrainingTrace(turns=[TrainingTurn(**turn) for row in self.rollout.rows for turn in row["turns"]])

    def verify(self, transcript: list[Any], final_state: Any = None) -> VerifyResult:
        """The agent's reward, or None."""
        return VerifyResult(env_reward=self.rollout.outcome.reward, done=True)

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(RuntimeError):  # It has ended, and its loop.
            self._end()


class TurnlogSessions(ResourceSessionFactory):  # type: ignore[misc]  # OpenEnv has no types
    """In TRL: `HarnessRolloutWorker(harness_session_factory=partial(TurnlogSessions, "my.agent:run"), …)`.

    sampling: the trainer's. options: more arguments of `rollout` (`run`, `command`, `timeout_s`, `failed`,
    `retry_failed`, …) and of `create_session`; `params={"max_tokens": 512}` limits a generation.
    A session has the name `episode_id`: a trainer that gives the same again gets what was played. TRL's are random.
    """

    def __init__(
        self,
        agent: Callable[..., Any] | str | None = None,
        *,
        sampling: Mapping[str, Any] | None = None,
        url: str | None = None,
        **options: Any,
    ) -> None:
        agent = agent if options.get("command") is not None else load(agent)
        self._url = url
        self._options = {"agent": agent, "sampling": sampling, **options}
        self._life = uuid.uuid4().hex[:12]

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> TurnlogSession:
        """`seed` says which sessions are one group."""
        name = name_of(episode_id or uuid.uuid4().hex)
        group_id = None if seed is None else name_of(self._life, seed)
        return TurnlogSession(
            task, self._url, {"name": name, "shape": "openenv", "group_id": group_id, **self._options}
        )
