"""Replay payloads, sound in every form and spoiled in every way: each takes the place of the reply's own."""

from __future__ import annotations

import base64
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tests.tools.mutated_replies import tree
from tests.tools.mutated_replies.json_mutations import (
    choice_of,
    entries_of,
    escaped,
    home_of,
    junk,
    message_of,
    meta_of,
    prompt_of,
)
from tests.tools.mutated_replies.tree import Node, Object

CODES = {"<i1": "b", "|i1": "b", "|u1": "B", "<i2": "h", "<u2": "H", "<i4": "i", "<u4": "I", "<i8": "q", "<u8": "Q"}
"""Type codes of `array` for the dtypes of a `.npy` header."""


@dataclass(frozen=True, slots=True)
class Due:
    """A payload that would be sound: `cells` ids in each of `rows` rows, as the dialect writes them."""

    kind: str
    rows: int
    cells: int
    npy: bool

    def ids(self, rng: random.Random) -> list[int]:
        """Ids of all rows, each within what the kind may hold."""
        least = -1 if self.kind == "indexer_topk" else 0
        most = rng.choice((7, 255, 256, 300, 32767, 65535, 65536, 2**31 - 1))
        return [rng.randint(least, most) for _ in range(self.rows * self.cells)]

    def write(self, ids: Sequence[int]) -> str:
        """The JSON string of these ids."""
        return quoted(npy(ids, (self.rows, 1, self.cells)) if self.npy else raw(ids))


def raw(ids: Sequence[int]) -> bytes:
    """Little-endian int32."""
    return array("i", ids).tobytes()


def npy(ids: Sequence[int], shape: Sequence[int], descr: str = "<i4", fortran: str = "False", more: str = "") -> bytes:
    """A version 1 `.npy` file whose header says this."""
    sizes = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
    header = f"{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': ({sizes}), {more}}}".encode()
    header += b" " * (63 - (10 + len(header)) % 64) + b"\n"
    data = array(CODES.get(descr, "i"), ids).tobytes()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


def quoted(data: bytes) -> str:
    """A JSON string of base64."""
    return '"' + base64.b64encode(data).decode() + '"'


def due(rng: random.Random, root: Node) -> Due | None:
    """What would be sound in this reply, as far as it can still be told."""
    if home_of(root) is None:
        return None
    kind = "routed_experts" if meta_of(root) is None or rng.random() < 0.6 else "indexer_topk"
    rows = max(len(prompt_of(root)) + len(entries_of(root)) - 1, 0)
    vllm = meta_of(root) is None
    cells = _width(home_of(root), kind, rows, NPY_HEAD if vllm else 0)
    return Due(kind, rows, rng.choice((1, 2, 2, 4, 6)) if not cells or rng.random() < 0.1 else cells, npy=vllm)


QUOTED = 600
"""The longest payload that is copied into a message."""

NPY_HEAD = 128
"""Bytes before the data of a short `.npy` file."""


def _width(home: Object | None, kind: str, rows: int, head: int) -> int:
    """Ids a row of the payload that is there, so that most mutants keep to their session's; 0 where none is."""
    held = home.get(kind) if home else None
    if isinstance(held, list):
        ids = sum(isinstance(tree.child(*spot), str) for spot in tree.places(held))
    else:
        ids = (len(tree.plain(held)) * 3 // 4 - head) // 4
    return ids // rows if rows and ids > 0 else 0


def _sound(rng: random.Random, want: Due) -> Node:
    return want.write(want.ids(rng))


def _rows(rng: random.Random, want: Due) -> Node:
    """A row or an id too many or too few."""
    ids, cells = want.ids(rng), want.cells
    step = rng.choice((-cells, cells, -1, 1, cells * 2, -len(ids)))
    changed = (ids + ids)[: max(len(ids) + step, 0)]
    if want.npy and cells and len(changed) % cells == 0:
        return quoted(npy(changed, (len(changed) // cells, 1, cells)))
    return want.write(changed)


def _partial(rng: random.Random, want: Due) -> Node:
    """The last id is cut, or bytes follow it."""
    data = base64.b64decode(want.write(want.ids(rng)).strip('"'))
    return quoted(data[: -rng.randint(1, 3)] if rng.random() < 0.5 else data + rng.randbytes(rng.randint(1, 4)))


def _alphabet(rng: random.Random, want: Due) -> Node:
    """A character that base64 does not have, or not here."""
    text = want.write(want.ids(rng)).strip('"')
    at = rng.randint(0, len(text))
    wrong = rng.choice(("-", "_", " ", "\\n", "\\r\\n", "=", "==", "!", "é", "\\u0000", ".", "\\t", "Ａ", "\\u200b"))
    text = text[:at] + wrong + text[at + rng.randint(0, 1) :]
    return f'"{text}"'


def _padding(rng: random.Random, want: Due) -> Node:
    """Wrong padding, or bits behind the last byte that a decoder drops."""
    ids = want.ids(rng)
    data = raw(ids) if not want.npy else npy(ids, (want.rows, want.cells)) + b" "
    text = base64.b64encode(data).decode()
    padded = text.rstrip("=")
    last = padded[-1:] and chr(ord(padded[-1]) + 1)
    choices = (padded, text + "=", text + "====", "=" + text, padded + "=" * 3, padded[:-1], text[:-1])
    spoiled = padded[:-1] + last + text[len(padded) :]
    return '"' + rng.choice((*choices, spoiled, spoiled)) + '"'


def _range(rng: random.Random, want: Due) -> Node:
    """An id below or above what a kind may hold."""
    ids = want.ids(rng) or [0]
    ids[rng.randrange(len(ids))] = value = rng.choice((-1, -2, -(2**31), 2**31 - 1, 2**31, 2**40))
    if -(2**31) <= value < 2**31:
        return want.write(ids)
    if want.npy:
        return quoted(npy(ids, (want.rows, want.cells), "<i8"))
    return list(map(str, ids))


def _dtype(rng: random.Random, want: Due) -> Node:
    """Another type of number in the header of a `.npy` file, with data to match where there are such integers."""
    descr = rng.choice((*CODES, ">i4", "=i4", "<f4", "<f8", "|O", "|b1", "<c8", "|S4", "<M8[s]", "i4", "<i3", ""))
    width = {"b": 8, "B": 8, "h": 16, "H": 16}.get(CODES.get(descr, ""), 31)
    ids = [abs(number) % 2 ** (width - 1) for number in want.ids(rng)]
    return quoted(npy(ids, (want.rows, want.cells), descr))


def _header(rng: random.Random, want: Due) -> Node:
    """A `.npy` file whose header is wrong, odd, or of another version."""
    ids, rows, cells = want.ids(rng), want.rows, want.cells
    good = npy(ids, (rows, cells))
    match rng.randrange(12):
        case 0:
            return quoted(npy(ids, (rows, cells), fortran=rng.choice(("True", "0", "None", "False "))))
        case 1:
            odd = ((), (len(ids),), (1, rows, cells), (-1, cells))
            shapes = (*odd, (cells, rows), (rows + 1, cells), (rows, cells, 1))
            return quoted(npy(ids, rng.choice(shapes)))
        case 2:
            return quoted(npy(ids, rng.choice(((rows, 2**31), (2**62, 4), (0, cells), (rows, 0), (10**30,)))))
        case 3:
            return quoted(good[:6] + rng.choice((b"\x00\x00", b"\x04\x00", b"\x01\x01", b"\xff\xff")) + good[8:])
        case 4:
            end = 10 + int.from_bytes(good[8:10], "little")
            return quoted(good[:6] + b"\x02\x00" + (end - 10).to_bytes(4, "little") + good[10:])
        case 5:
            return quoted(good[:8] + rng.choice((b"\x00\x00", b"\xff\xff", b"\x01\x00")) + good[10:])
        case 6:
            return quoted(npy(ids, (rows, cells), more=rng.choice(("'x': 1", "'shape': (1,)", "'descr': '<i8'"))))
        case 7:
            return quoted(good[: rng.randrange(len(good) + 1)])
        case 8:
            return quoted(good + rng.randbytes(rng.randint(1, 8)))
        case 9:
            return quoted(bytes(rng.choice((0x92, 0x93)) for _ in range(1)) + good[1:])
        case 10:
            return quoted(good.replace(b"'shape': (", rng.choice((b"'shape': [", b"'shape': -(", b"'shapf': ("))))
        case _:
            return quoted(good.replace(b"False", rng.choice((b"open()", b"f'{1}'", b"True and", b"Fal\x00e"))))


def _nested(rng: random.Random, want: Due) -> Node:
    """Sound nested lists, flat, as rows or as [rows, layers, top_k]; sometimes with white space."""
    ids, cells = list(map(str, want.ids(rng))), want.cells
    flat = rng.randrange(3)
    rows: list[Node] = [list(ids[at : at + cells]) for at in range(0, len(ids), cells)]
    node: Node = list(ids) if flat == 0 else rows if flat == 1 else [[row] for row in rows]
    if rng.random() < 0.5:
        return node
    space = rng.choice((" ", "\n", "\t", "\r\n", "  "))
    return tree.render(node, comma=f"{space},{space}")


def _ragged(rng: random.Random, want: Due) -> Node:
    """Nested lists that are no array of integers."""
    ids, cells = list(map(str, want.ids(rng))), want.cells
    rows: list[Node] = [list(ids[at : at + cells]) for at in range(0, len(ids), cells)] or [[]]
    row = rng.choice(rows)
    assert isinstance(row, list)
    numbers = ("1.0", "-1", "-2", str(2**31), str(2**70), "-0", "1e0")
    wrong = rng.choice((*numbers, "true", "null", '"1"', "[]", "[1]", "{}"))
    match rng.randrange(6):
        case 0:
            row.append("1")
        case 1 if row:
            row.pop()
        case 2:
            rows[rng.randrange(len(rows))] = "1"
        case 3:
            rows.append(tree.twin(row))
        case 4:
            return [rows]
        case _:
            row[:1] = [wrong]
    return rows


def _type(rng: random.Random, want: Due) -> Node:
    """No payload at all."""
    values = ("null", "[]", "[[]]", "[null]", "{}", '{"data":""}', "0", "true")
    return rng.choice((*values, '""', '"AA=="', '"AAAA"', '"null"', '" "', junk(rng)))


def _other_form(rng: random.Random, want: Due) -> Node:
    """SGLang's form from vLLM, and the other way round."""
    ids = want.ids(rng)
    return quoted(raw(ids) if want.npy else npy(ids, (want.rows, want.cells)))


def _escapes(rng: random.Random, want: Due) -> Node:
    """A sound payload, spelled with escapes: slashes, or any character."""
    text = want.write(want.ids(rng))
    return text.replace("/", "\\/") if rng.random() < 0.5 else escaped(rng, text)


def _no_cells(rng: random.Random, want: Due) -> Node:
    """Rows of no ids."""
    empty: list[Node] = [[] for _ in range(want.rows)]
    return rng.choice((quoted(npy((), (want.rows, 0))), '""', empty))


FAULTS: Mapping[str, Callable[[random.Random, Due], Node]] = {
    "payload: sound": _sound,
    "payload: rows": _rows,
    "payload: cut id": _partial,
    "payload: alphabet": _alphabet,
    "payload: padding": _padding,
    "payload: range": _range,
    "payload: dtype": _dtype,
    "payload: npy header": _header,
    "payload: nested": _nested,
    "payload: ragged": _ragged,
    "payload: type": _type,
    "payload: other form": _other_form,
    "payload: escapes": _escapes,
    "payload: no cells": _no_cells,
}


def _into_place(fault: Callable[[random.Random, Due], Node]) -> Callable[[random.Random, Node], None]:
    def mutate(rng: random.Random, root: Node) -> None:
        want, home = due(rng, root), home_of(root)
        if want is not None and home is not None:
            home.set(want.kind, fault(rng, want))

    return mutate


def elsewhere(rng: random.Random, root: Node) -> None:
    """The payload's key a second time: beside itself, or where it does not belong."""
    want, home = due(rng, root), home_of(root)
    if want is None or home is None or not isinstance(root, Object):
        return
    copied = home.get(want.kind)
    node = tree.twin(copied) if copied is not None and rng.random() < 0.6 else want.write(want.ids(rng))
    if rng.random() < 0.3:
        node = rng.choice(("null", '"AAAA"', '"not base64"', "[]"))
    usage, message = root.get("usage"), message_of(root)
    homes = [place for place in (root, choice_of(root), home, usage, message) if isinstance(place, Object)]
    holder = rng.choice(homes)
    name = rng.choice((want.kind, want.kind, "routed_experts", "sglext", "_" + want.kind))
    value: Node = Object([(f'"{want.kind}"', node)]) if name == "sglext" else node
    place = rng.choice((0, len(holder.pairs)))
    holder.pairs.insert(place, (f'"{name}"' if rng.random() < 0.8 else escaped(rng, f'"{name}"'), value))


def in_text(rng: random.Random, root: Node) -> None:
    """The payload's key, or its very text, inside the message."""
    message, home = message_of(root), home_of(root)
    if message is None or home is None:
        return
    copied = home.get("routed_experts") or home.get("indexer_topk") or '"AAAA"'
    payload = copied if isinstance(copied, str) else tree.render(copied)
    if len(payload) > QUOTED:  # the next turn's payload has rows for these tokens, and may be quoted in its turn
        payload = '"AAAAAAAAAAA="'
    name = rng.choice(("routed_experts", "indexer_topk"))
    texts = (f'"{name}":{payload}', f'{{"meta_info":{{"{name}":{payload}}}}}', payload, f'\\"{name}\\":null', name)
    content = tree.text(rng.choice(texts))
    if rng.random() < 0.7:
        message.set(rng.choice(("content", "reasoning_content")), content)
    else:
        arguments = tree.text(f'{{"{name}": {payload}}}')
        call = f'[{{"id":"c","type":"function","function":{{"name":"f","arguments":{arguments}}}}}]'
        message.set("tool_calls", call)


MUTATIONS: Mapping[str, Callable[[random.Random, Node], None]] = {
    **{name: _into_place(fault) for name, fault in FAULTS.items()},
    "payload: elsewhere": elsewhere,
    "payload: in text": in_text,
}
