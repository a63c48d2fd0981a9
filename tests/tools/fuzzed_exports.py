"""Sessions whose requests, labels and rewards hold what a row may not be able to hold, exported in every form."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
from integration.reading import read
from integration.stand import Stand, standing

from app.export.formats import CONTAINERS, DEFAULT, DOCUMENTS, SHAPES
from workers import codec

NUMBERS = (
    *("0", "-0.0", "1", "0.7", "1.5", "5e-324", "1e-400", "1e308", "-1e308", "1e999", "-1e999", "3.4e38", "3.5e38"),
    *("9223372036854775808", "18446744073709551615", "18446744073709551616", "-9223372036854775809"),
    *("1" * 400, "1" * 5000, "0." + "1" * 5000),
)
TEXTS = ('""', r'"a\u0000b"', r'"\ud800"', r'"\udc00\ud800"', '"\u2028\x85"', r'"\uffff\\\"\n"', f'"{"x" * 7000}"')
OTHERS = ("null", "true", "[]", "{}")

SAMPLED = ("temperature", "top_p", "top_k", "min_p")
PARAMS = (*SAMPLED, "seed", "presence_penalty", "min_tokens", "user", "x", "chat_template_kwargs", "logit_bias")
KEYS = ('"k"', '"session_id"', '"turnlog"', '"excluded"', '"cursor"', '"env_name"', r'"a\u0000b"', r'"\ud800"', '""')


class Odd(random.Random):
    """Raw JSON of a seed."""

    def scalar(self) -> str:
        return self.choice(self.choice((NUMBERS, NUMBERS, TEXTS, OTHERS)))

    def value(self, depth: int = 2) -> str:
        kind = self.randrange(6) if depth else 0
        if kind == 4:
            return f"[{','.join(self.value(depth - 1) for _ in range(self.randrange(4)))}]"
        return self.object(depth - 1) if kind == 5 else self.scalar()

    def object(self, depth: int = 1) -> str:
        members = [f"{self.choice(KEYS)}:{self.value(depth)}" for _ in range(self.randrange(1, 4))]
        return "{" + ",".join(members) + "}"

    def params(self) -> str:
        """Members of a request's object, perhaps none, each after a comma."""
        names = self.sample(PARAMS, self.randrange(3))
        return "".join(f',"{name}":{self.choice(NUMBERS) if name in SAMPLED else self.value()}' for name in names)

    def rarely(self, text: str) -> str:
        return text if self.random() < 0.3 else ""

    def message(self) -> str:
        content = self.choice(('"Hello"', '"Hello"', *TEXTS, '[{"type":"text","text":"Hello"}]'))
        return f'{{"role":"user","content":{content}{self.rarely(f",{self.choice(KEYS)}:{self.value()}")}}}'

    def tools(self) -> str:
        schema = f'{{"type":"object","properties":{{}},"default":{self.value()}}}'
        return f',"tools":[{{"type":"function","function":{{"name":"f","parameters":{schema}}}}}]'


FORMS = [(format, shape) for format in CONTAINERS for shape in SHAPES] + [(format, DEFAULT) for format in DOCUMENTS]

GROUP = 4
"""Sessions of a group. Of every second group all are plain."""

STORED = (
    *(b'{"temperature":1e999}', b'{"top_k":18446744073709551616}', b'{"top_p":-1e999,"min_p":"x","temperature":true}'),
    *(b'{"model":1e999}', b'{"temperature":"\\ud800"}', b"[1]", b"{", b""),
)
"""A turn's parameters as no request can have them any more."""


class Result(msgspec.Struct):
    """How many requests were refused, rows and excluded sessions read, stored parameters changed; `broken` is what was
    not whole."""

    refused: int = 0
    damaged: int = 0
    rows: int = 0
    excluded: int = 0
    broken: list[str] = []


class _Made(msgspec.Struct, frozen=True):
    """The sessions by group; those of `plain` groups have nothing odd."""

    groups: dict[str, list[str]]
    plain: set[str]

    @property
    def sessions(self) -> set[str]:
        return {one for members in self.groups.values() for one in members}


def run(sessions: int, seed: int, folder: Path) -> Result:
    """Makes sessions at a real server, exports them in every form, and looks whether each export is whole."""
    result, odd, made = Result(), Odd(seed), _Made({}, set())
    with standing(folder, "--seed", str(seed)) as stand:
        for number in range(sessions):
            group_id, is_plain = f"g{number // GROUP}", number // GROUP % 2 == 0
            session_id = _session(stand, odd, group_id, is_plain, result)
            made.groups.setdefault(group_id, []).append(session_id)
            made.plain.update([session_id] if is_plain else [])
        _look(stand, made, result, 0)
        result.damaged = _store(folder / "turnlog.db", odd, made)
        _look(stand, made, result, 1)
    return result


def _session(stand: Stand, odd: Odd, group_id: str, is_plain: bool, result: Result) -> str:
    """A closed session, mostly rewarded; one that is not plain may have no turn."""

    def send(method: str, path: str, body: str) -> httpx.Response:
        content = body.encode("utf-8", "surrogatepass")
        response = stand.http.request(method, path, content=content)
        result.refused += response.status_code == 400
        if response.status_code >= 500 and "upstream" not in response.text:
            result.broken.append(f"{method} {path}: {response.status_code} for {body[:200]}")
        return response

    more = "" if is_plain else odd.rarely(f',"params":{odd.object()}') + odd.rarely(f',"metadata":{odd.object()}')
    made = send("POST", "/sessions", f'{{"group_id":"{group_id}"{more}}}')
    if made.status_code != 200:
        made = send("POST", "/sessions", f'{{"group_id":"{group_id}"}}')
    session_id: str = made.json()["session_id"]
    path = f"/sessions/{session_id}"
    for _ in range(2):
        send("POST", *_turn(odd, path, is_plain))
    if not is_plain:
        send("PUT", f"{path}/annotations/note", f'{{"value":{odd.scalar()}}}')
        send("PUT", f"{path}/annotations/tags", f'{{"value":[{odd.scalar()}]}}')
        send("PUT", f"{path}/annotations/odd", f'{{"value":{odd.object()}}}')
        send("PUT", f"{path}/reward", f'{{"reward":{odd.scalar()},"components":{odd.object()},"turn":1}}')
        send("PUT", f"{path}/reward", f'{{"reward":{odd.scalar()},"components":{odd.object()}}}')
    if is_plain or odd.random() < 0.5:
        send("PUT", f"{path}/reward", '{"reward":0.5}')
    send("DELETE", path, "")
    return session_id


def _turn(odd: Odd, path: str, is_plain: bool) -> tuple[str, str]:
    """A request's path and body; a session of several protocols has several segments, or a refused turn."""
    message = '{"role":"user","content":"Hello"}' if is_plain else odd.message()
    more = "" if is_plain else odd.params() + odd.rarely(odd.tools())
    match "chat" if is_plain else odd.choice(("chat", "chat", "completions", "messages", "responses")):
        case "completions":
            return f"{path}/v1/completions", f'{{"model":"m","prompt":{odd.choice((odd.scalar(), "[1,2,3]"))}{more}}}'
        case "messages":
            return f"{path}/v1/messages", f'{{"model":"m","max_tokens":9999,"messages":[{message}]{more}}}'
        case "responses":
            return f"{path}/v1/responses", f'{{"model":"m","input":[{message}]{more}}}'
    return f"{path}/v1/chat/completions", f'{{"model":"m","messages":[{message}]{more}}}'


def _store(file: Path, odd: Odd, made: _Made) -> int:
    """Change the stored parameters of some sessions that are not plain."""
    changed = 0
    with sqlite3.connect(file, timeout=30) as database:
        for session_id in sorted(made.sessions - made.plain):
            if odd.random() < 0.5:
                row = (codec.compress(odd.choice(STORED)), session_id)
                changed += database.execute(
                    "UPDATE blobs SET data = ? WHERE session_id = ? AND kind = 'params'", row
                ).rowcount
    database.close()
    return changed


def _look(stand: Stand, made: _Made, result: Result, time: int) -> None:
    """Each export is explained the one time or the other."""
    for number, (format, shape) in enumerate(FORMS):
        explain = number % 2 == time
        where = f"format={format} shape={shape} explain={explain}"
        result.broken += [f"{where}: {why}" for why in _export(stand, made, format, shape, explain, result)]
    for shape in SHAPES:
        result.broken += [f"feed shape={shape}: {why}" for why in _feed(stand, made, shape)]


def _export(stand: Stand, made: _Made, format: str, shape: str, explain: bool, result: Result) -> Iterator[str]:
    parameters: dict[str, Any] = {"format": format, "shape": shape, "explain": explain, "advantage": "grpo"}
    try:
        response = stand.http.get("/export", params=parameters)
        rows = read(format, response.content) if response.status_code == 200 else []
    except (httpx.HTTPError, ValueError) as error:
        yield f"it broke off: {type(error).__name__}: {error}"
        return
    if response.status_code != 200:
        yield f"{response.status_code}: {response.text[:200]}"
        return
    given, excluded = _told(rows)
    result.rows += sum(row.get("excluded") is None for row in rows)
    result.excluded += sum(row.get("excluded") is not None for row in rows)
    if SHAPES[shape].of_group is not None:  # One reason leaves out the whole group.
        groups = made.groups.values()
        excluded = {one for members in groups if excluded.intersection(members) for one in members}
    if missing := made.plain - given:
        yield f"{len(missing)} plain sessions have no row: {sorted(missing)[:3]}"
    if explain and (silent := made.sessions - given - excluded):
        yield f"{len(silent)} sessions have neither row nor reason: {sorted(silent)[:3]}"


def _feed(stand: Stand, made: _Made, shape: str) -> Iterator[str]:
    """All complete groups, given to the same consumer each time."""
    try:
        parameters: dict[str, Any] = {"consumer": "fuzz", "size": 1000, "shape": shape}
        response = stand.http.get("/export/groups", params=parameters)
        lines = {line["group_id"]: line for line in map(json.loads, response.content.split(b"\n")[:-1])}
    except (httpx.HTTPError, ValueError) as error:
        yield f"it broke off: {type(error).__name__}: {error}"
        return
    for group_id, members in made.groups.items():
        if members[0] not in made.plain:
            continue
        if group_id not in lines:
            yield f"group {group_id} was not handed out"
        elif not _told(lines[group_id]["rows"])[0].issuperset(members):
            yield f"group {group_id} was handed out without rows of all its sessions"


def _told(rows: Sequence[dict[str, Any]]) -> tuple[set[str], set[str]]:
    """The sessions with a row, and those with a reason. A group's row is of all its sessions."""
    given: set[str] = set()
    excluded: set[str] = set()
    for row in rows:
        if row.get("excluded") is not None:
            excluded.add(row["session_id"])
            continue
        given.update(row["session_ids"] if "session_ids" in row else [_named(row)])
    return given, excluded


def _named(row: dict[str, Any]) -> str:
    """The session that a row names: beside its own columns, or where the shape has room. In miles and slime that is
    beside the session's own metadata, which may have any name but `turnlog`.
    """
    for name in ("extra_fields", "extra", "metadata", "turnlog"):
        if name in row and (name == "turnlog" or row.get("session_id") is None):
            row = json.loads(row[name]) if isinstance(row[name], str) else row[name]
    return str(row["session_id"])
