"""A server that builds its prompts itself, beside the simulator's tokenizer, and what must hold of its sessions."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pybase64

from integration.places import Place
from integration.stand import Stand, Talk, serving
from ops.simulator.template import Template
from ops.simulator.tokenizer import Tokenizer
from ops.simulator.tokenizer_files import write
from ops.verify import verify_url

TOKENIZER = Tokenizer()

GENERATION = "<|im_start|>assistant\n"

_TEMPLATE = Template(TOKENIZER)


class _Record(msgspec.Struct):
    request: msgspec.Raw
    turn: int


class _State(msgspec.Struct):
    records: list[_Record]


def rendered(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> list[int]:
    """The simulator's own rendering, not the code that is tested; tools look as SGLang 0.5.23 shows them."""
    shown = [{**tool, "defer_loading": None} for tool in tools or ()]
    raw = msgspec.Raw(msgspec.json.encode(shown)) if shown else msgspec.Raw(b"")
    history = [msgspec.Raw(msgspec.json.encode(message)) for message in messages]
    return _TEMPLATE.prompt(_TEMPLATE.read(history, raw)).ids()


def text_of(ids: Sequence[int]) -> str:
    return TOKENIZER.decode(list(ids))


def tokenizer_folder(folder: Path, edit: Callable[[str], str] = lambda template: template) -> Path:
    """The simulator's tokenizer as a folder, its chat template changed by `edit`."""
    write(folder, TOKENIZER)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = edit(config["chat_template"])
    path.write_text(json.dumps(config))
    return folder


def require_sound(stand: Stand) -> None:
    """The store agrees with its own log."""
    report = asyncio.run(verify_url(stand.url))
    assert report.problems == []


@contextlib.contextmanager
def checked(where: Path | Place, *upstreams: str, environment: Mapping[str, str] | None = None) -> Iterator[Stand]:
    """A stand whose store must be sound in the end."""
    with serving(where, *upstreams, environment=environment) as stand:
        yield stand
        require_sound(stand)


def output_of(response: Mapping[str, Any]) -> list[int]:
    """The sampled ids of a reply, chat or completion, in either dialect."""
    choice = response["choices"][0]
    if "meta_info" in choice:
        return [entry[1] for entry in choice["meta_info"]["output_token_logprobs"]]
    ids: list[int] = choice["token_ids"]
    return ids


def ids_in(body: Mapping[str, Any]) -> list[int]:
    """The prompt's ids in a chat that either engine got."""
    ids: list[int] = body["input_ids"] if "input_ids" in body else body["kv_transfer_params"]["prompt_token_ids"]
    return ids


def sent_ids(stand: Stand, talk: Talk) -> list[list[int]]:
    """The prompts' ids in the engine's requests of one session, oldest first."""
    return [ids_in(one["body"]) for one in stand.engine_requests(talk.id)]


def require_consistent(stand: Stand, talk: Talk) -> None:
    """Records, the engine's requests, the export and the metadata tell the same tokens."""
    state = talk.state()
    turns = {event["turn"]: event for event in talk.committed()}
    whole: dict[int, list[int]] = {}
    for record in state["records"]:
        whole[record["turn"]] = ids_in(record["request"]) + output_of(record["response"])
    path = [record["turn"] for record in state["records"]]
    for before, after in pairwise(path):
        if turns[after]["segment"] == turns[before]["segment"]:
            prompt = next(ids_in(one["request"]) for one in state["records"] if one["turn"] == after)
            assert prompt[: len(whole[before])] == whole[before], f"turn {after} does not continue turn {before}"
    assert state["metadata"]["accumulated_token_ids"] == (whole[path[-1]] if path else [])
    last = {turns[number]["segment"]: number for number in path}
    rows = talk.rows()
    assert [row["tokens"] for row in rows] == [whole[number] for _, number in sorted(last.items())]
    for row in rows:
        sampled = {at for span in row["turns"] for at in range(span["output_start"], span["end"])}
        assert [at for at, flag in enumerate(row["loss_mask"]) if flag] == sorted(sampled)
        for span in row["turns"]:
            assert row["tokens"][: span["end"]] == whole[span["turn"]]
    require_sent_as_recorded(stand, talk)


def require_sent_as_recorded(stand: Stand, talk: Talk) -> None:
    """Each record's request is, to the byte, one that the engine got (of those that it remembers)."""
    seen = stand.sim.get("/sim/requests", params={"last": 256}).json()
    bodies = [
        pybase64.b64decode(one["body_base64"]) for one in seen if one["headers"].get("x-smg-routing-key") == talk.id
    ]
    records = msgspec.json.decode(stand.http.get(talk.path).content, type=_State).records
    assert len(bodies) >= len(records) or len(seen) >= 200
    for record in records[-len(bodies) :]:
        assert bytes(record.request) in bodies, f"turn {record.turn} was sent otherwise"
