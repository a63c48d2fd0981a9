"""The engine's prefix cache: a prefix that was prefilled or sampled before needs no prefill, in any session.

It is a radix tree over token ids, like SGLang's with pages of one token. If a sequence continues after a leaf, the leaf
grows. So a session has one node after the part that it shares with others, and finding it is a memory comparison.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

_WIDTH = 4
"""Bytes of a packed id."""


class _Node:
    """Packed ids between two branches of the tree, with the children by their first id."""

    __slots__ = ("children", "ids", "parent")

    def __init__(self, ids: bytes, parent: _Node | None) -> None:
        self.ids = ids
        self.parent = parent
        self.children: dict[bytes, _Node] = {}


class PrefixCache:
    """A cache of at most ``tokens`` tokens. The least recently used sequences are shortened from their end.

    ``_order`` has each node after all of its children, because a sequence is touched from its end to its beginning. So
    the first node in it is always a leaf.
    """

    def __init__(self, tokens: int) -> None:
        self._capacity = tokens * _WIDTH
        self.clear()

    def clear(self) -> None:
        """Remove everything."""
        self._root = _Node(b"", None)
        self._order: OrderedDict[_Node, None] = OrderedDict()
        self._size = 0

    @property
    def tokens(self) -> int:
        """The number of cached tokens."""
        return self._size // _WIDTH

    def cached(self, prompt: bytes) -> int:
        """The number of leading ids of ``prompt`` that need no prefill. It excludes the last id, whose logits are
        needed."""
        _, at, child, shared = self._find(prompt)
        return max(0, min((at + (shared if child else 0)) // _WIDTH, len(prompt) // _WIDTH - 1))

    def served(self, sequence: bytes) -> None:
        """Add a prompt and the ids sampled after it."""
        node, at, child, shared = self._find(sequence)
        if child is not None:
            node, at = self._split(child, shared), at + shared
        rest = sequence[at:]
        if rest:
            if node.children or node is self._root:
                node.children[rest[:_WIDTH]] = node = _Node(rest, node)
            else:
                node.ids += rest
            self._size += len(rest)
        self._touch(node)
        while self._size > self._capacity:
            self._drop(self._size - self._capacity)

    def _find(self, sequence: bytes) -> tuple[_Node, int, _Node | None, int]:
        """The last node that ``sequence`` contains completely, and its end in ``sequence``; then a child that it
        contains partly, and how many bytes of it."""
        node, at = self._root, 0
        while (child := node.children.get(sequence[at : at + _WIDTH])) is not None:
            if not sequence.startswith(child.ids, at):
                return node, at, child, _shared(child.ids, sequence, at)
            node, at = child, at + len(child.ids)
        return node, at, None, 0

    def _split(self, node: _Node, at: int) -> _Node:
        """Split ``node`` at byte ``at``; returns the new node of its first part."""
        assert node.parent is not None
        head = _Node(node.ids[:at], node.parent)
        node.parent.children[head.ids[:_WIDTH]] = head
        node.ids, node.parent = node.ids[at:], head
        head.children[node.ids[:_WIDTH]] = node
        return head

    def _touch(self, node: _Node | None) -> None:
        while node is not None and node is not self._root:
            self._order[node] = None
            self._order.move_to_end(node)
            node = node.parent

    def _drop(self, excess: int) -> None:
        """Remove up to ``excess`` bytes from the end of the oldest leaf."""
        leaf = next(iter(self._order))
        if len(leaf.ids) > excess:
            leaf.ids = leaf.ids[:-excess]
            self._size -= excess
            return
        assert leaf.parent is not None
        del leaf.parent.children[leaf.ids[:_WIDTH]], self._order[leaf]
        self._size -= len(leaf.ids)


def _shared(ids: bytes, sequence: bytes, at: int) -> int:
    """Length in bytes of the common prefix of ``ids`` and ``sequence[at:]``, in whole ids."""
    count = min(len(ids), len(sequence) - at) // _WIDTH
    differ = np.frombuffer(ids, np.int32, count) != np.frombuffer(sequence, np.int32, count, at)
    return (int(differ.argmax()) if differ.any() else count) * _WIDTH
