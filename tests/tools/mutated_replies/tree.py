"""JSON as a tree that keeps spellings, so that a mutation can write what no encoder would.

A leaf is raw JSON text, or text that is no JSON at all; keys are raw too, and may stand twice.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Object:
    """A JSON object: pairs of (raw key, with its quotes; value), in order."""

    pairs: list[tuple[str, Node]] = field(default_factory=list)

    def get(self, name: str) -> Node | None:
        """The value of a key that is spelled plainly."""
        return next((node for key, node in self.pairs if key == f'"{name}"'), None)

    def set(self, name: str, node: Node) -> None:
        """Replace the value where it stands, or add it at the end."""
        for place, (key, _) in enumerate(self.pairs):
            if key == f'"{name}"':
                self.pairs[place] = (key, node)
                return
        self.pairs.append((f'"{name}"', node))

    def add(self, name: str, node: Node) -> None:
        """Add a pair, also where the key is there already."""
        self.pairs.append((f'"{name}"', node))


Node = Object | list["Node"] | str
Container = Object | list[Node]


class _Number(str):
    """A number as it was spelled."""

    __slots__ = ()


_DECODER = json.JSONDecoder(object_pairs_hook=lambda pairs: ("{", pairs), parse_int=_Number, parse_float=_Number)


def parse(body: bytes) -> Node:
    """The tree of a sound body. Raises ValueError."""
    return _node(_DECODER.decode(body.decode()))


def _node(value: Any) -> Node:
    if isinstance(value, _Number):
        return str(value)
    if isinstance(value, str):
        return text(value)
    if isinstance(value, tuple):
        return Object([(text(key), _node(child)) for key, child in value[1]])
    if isinstance(value, list):
        return [_node(child) for child in value]
    return {None: "null", True: "true", False: "false"}[value]


def text(value: str) -> str:
    """A JSON string."""
    return json.dumps(value, ensure_ascii=False)


def plain(node: Node | None) -> str:
    """The value of a leaf that is a JSON string; what is none reads as empty."""
    if not isinstance(node, str) or not node.startswith('"'):
        return ""
    try:
        value = json.loads(node)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""


def render(node: Node, comma: str = ",", colon: str = ":") -> str:
    """As JSON text, with these separators."""
    if isinstance(node, str):
        return node
    if isinstance(node, list):
        return "[" + comma.join([render(child, comma, colon) for child in node]) + "]"
    return "{" + comma.join([key + colon + render(child, comma, colon) for key, child in node.pairs]) + "}"


def to_bytes(rendered: str) -> bytes:
    """UTF-8; a lone surrogate, which has none, as the three bytes that careless encoders write."""
    return rendered.encode("utf-8", "surrogatepass")


def size(container: Container) -> int:
    """How many children it has."""
    return len(container) if isinstance(container, list) else len(container.pairs)


def child(container: Container, place: int) -> Node:
    """The child at `place`; raises IndexError."""
    return container[place] if isinstance(container, list) else container.pairs[place][1]


def put(container: Container, place: int, node: Node) -> None:
    """Replace the child at `place`; an object keeps its key."""
    if isinstance(container, list):
        container[place] = node
    else:
        container.pairs[place] = (container.pairs[place][0], node)


def insert(container: Container, place: int, node: Node, key: str = '"added"') -> None:
    """Put a child before the one at `place`; in an object under the raw key `key`."""
    if isinstance(container, list):
        container.insert(place, node)
    else:
        container.pairs.insert(place, (key, node))


def remove(container: Container, place: int) -> Node:
    """Take the child at `place` out."""
    if isinstance(container, list):
        return container.pop(place)
    return container.pairs.pop(place)[1]


def pick(rng: random.Random, root: Node) -> tuple[Container, int] | None:
    """A random place: walked to from the root, so that the few fields at the top are met as often as the many below."""
    found: tuple[Container, int] | None = None
    node = root
    while isinstance(node, list | Object) and size(node):
        found = (node, rng.randrange(size(node)))
        node = child(*found)
        if rng.random() < 0.2:
            break
    return found


def places(node: Node) -> Iterator[tuple[Container, int]]:
    """Every place below `node`, itself left out."""
    if isinstance(node, str):
        return
    for place in range(size(node)):
        yield node, place
        yield from places(child(node, place))


def twin(node: Node) -> Node:
    """A copy that may be changed by itself."""
    return copy.deepcopy(node)
