"""Agents for trainers, and a trainer as a program in a process of its own, which may be killed and started again.

A program is a module of this folder with `main(asked)`: it runs the trainer and returns what the trainer got, as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openai import AsyncOpenAI

from ops.server import ROOT
from turnlog import Turnlog

if TYPE_CHECKING:
    from trainers.stand import TrainerStand

FOLDER = "TRAINERS_FOLDER"
"""Where the agents write down what they do. If it has a file `gate`, they wait after their first turn until that is
gone."""

COMMAND = """
import json, os, urllib.request
told = json.load(open(os.environ["TURNLOG_ROLLOUT"]))
body = {"model": "simulator", "messages": told["prompt"], **told["request_kwargs"]}
head = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), head)
print(json.load(urllib.request.urlopen(asked))["usage"]["completion_tokens"])
"""
"""Plays a turn; the reward is the number of its tokens."""


async def run(base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> float:
    """Plays two turns, or one and raises if the metadata's `what` says so. The reward is the number of tokens of the
    last one."""
    what, folder, messages = metadata.get("what"), Path(os.environ[FOLDER]), list(prompt)
    extra = {name: request_kwargs.pop(name) for name in ("top_k", "min_tokens") if name in request_kwargs}
    request_kwargs = {name: value for name, value in request_kwargs.items() if name in ("temperature", "max_tokens")}
    async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key=metadata["api_key"], max_retries=10) as client:
        for follow_up in ("Are you sure?", None):
            reply = await client.chat.completions.create(
                model="simulator", messages=messages, extra_body=extra, **request_kwargs
            )
            messages.append(reply.choices[0].message.model_dump(exclude_none=True))
            if what == "raises" or (what == "odd raises" and metadata["attempt"] % 2):
                raise ValueError("no answer")
            if follow_up is None:
                break
            if what == "forgets":
                messages = list(prompt)
            messages.append({"role": "user", "content": follow_up})
            (folder / "waiting" / metadata["session_id"]).touch()
            while what == "waits" and (folder / "gate").exists():
                await asyncio.sleep(0.02)
    (folder / "played" / metadata["session_id"]).touch()
    assert reply.usage is not None
    return float(reply.usage.completion_tokens)


def prepare(folder: Path) -> None:
    """Make the folders of agents that play in `folder`."""
    for name in ("waiting", "played"):
        (folder / name).mkdir(parents=True, exist_ok=True)


class Program:
    """`module` of this folder; `asked` is what its `main` gets."""

    def __init__(self, folder: Path, module: str, asked: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self.folder, self._url = folder, environment["TURNLOG_URL"]
        prepare(folder)
        self.gate = folder / "gate"
        self._result = folder / "result.json"
        self.log = folder / "log"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TURNLOG_")}
        path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
        command = (sys.executable, "-m", "trainers.playing", module, json.dumps(asked), str(self._result))
        self._output = self.log.open("ab")
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env={**inherited, "PYTHONPATH": path, FOLDER: str(folder), **environment},
            stdout=self._output,
            stderr=self._output,
        )

    def until(self, what: str, count: int) -> set[str]:
        """The sessions of which at least `count` are `waiting` or `played`."""
        while len(found := {path.name for path in (self.folder / what).iterdir()}) < count:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.05)
            assert self._process.returncode is None, self.log.read_text()[-5000:]
        return found

    def ended(self, count: int) -> set[str]:
        """The sessions of which at least `count` are played and closed: that is on disk."""
        found = self.until("played", count)
        with Turnlog(self._url) as turnlog:
            while not all(turnlog.attach(name).state()["status"] == "closed" for name in found):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(0.05)
        return found

    def result(self) -> Any:
        assert self._process.wait(300) == 0, self.log.read_text()[-5000:]
        return json.loads(self._result.read_text())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        self._output.close()


@contextlib.contextmanager
def program(folder: Path, module: str, asked: Mapping[str, Any], url: str, **environment: str) -> Iterator[Program]:
    made = Program(folder, module, asked, {"TURNLOG_URL": url, "TURNLOG_AGENT": "trainers.playing:run", **environment})
    try:
        yield made
    finally:
        made.close()


def over_kills(folder: Path, module: str, asked: Mapping[str, Any], stand: TrainerStand, each: int) -> Any:
    """The result of a program of which `each` rollouts end and as many wait after their first turn, when it is killed
    and started again, and the server killed: what had ended is not played again, what was cut off is."""
    (folder / "gate").touch()
    with program(folder, module, asked, stand.url) as trainer:
        trainer.until("waiting", 2 * each)
        ended = trainer.ended(each)
        trainer.kill()
    with program(folder, module, asked, stand.url) as trainer:
        trainer.until("waiting", 3 * each)
        stand.kill()
        trainer.gate.unlink()
        result = trainer.result()
        assert len(trainer.until("played", 2 * each)) == 2 * each
    with Turnlog(stand.url) as turnlog:
        kinds = {one["session_id"]: (one["failed"] or {}).get("kind") for one in turnlog.sessions()}
    assert {kinds[session_id] for session_id in ended} == {None}
    assert sorted(map(str, kinds.values())) == ["None"] * 2 * each + ["other"] * each
    return result


if __name__ == "__main__":
    _, module, asked, result = sys.argv
    found = json.dumps(importlib.import_module(f"trainers.{module}").main(json.loads(asked)))
    Path(f"{result}.new").write_text(found)
    Path(f"{result}.new").rename(result)
    # The trainers' threads and executors hold a process up.
    os._exit(0)
