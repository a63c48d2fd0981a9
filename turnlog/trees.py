"""Rows of the shape `tree`: made into rows of the shape `turnlog`, and into what trainers with tree attention take.

Rows may come from any format; arrays may be lists or numpy arrays. What is made of them are lists.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from turnlog.rows import Row, TrainerRow

OF_TREE = (
    *("tokens", "position_ids", "loss_mask", "sampled_mask", "logprobs", "weight_versions", "weight_version_names"),
    *("segment_starts", "segment_parents", "segment_turns", "segment_owners", "leaves", "turns"),
)
OF_LEAF = ("turn", "leaf_segment", "loss_turns", "payloads")
OF_TURN = ("parent", "first_message", "messages", "images", "sampling")
KINDS = ("routed_experts", "indexer_topk")
CODES = {"uint8": "B", "int8": "b", "uint16": "H", "int16": "h", "uint32": "I", "int32": "i"}
"""The array type of each type of ids."""


def unpack_tree(tree: TrainerRow) -> list[Row]:
    """The session's rows in the shape `turnlog`, in their order, as the same export gives them.

    Each has the tree's `cursor`, behind which the session's next change comes. Columns that a format has as JSON text
    must have been parsed.
    """
    return [cast(Row, _unpacked(tree, leaf)) for leaf in tree["leaves"]]


def _unpacked(tree: TrainerRow, leaf: Mapping[str, Any]) -> dict[str, Any]:
    turns = {turn["turn"]: turn for turn in tree["turns"]}
    path = list(_path(tree, leaf["leaf_segment"]))
    in_loss = set(leaf["loss_turns"])
    columns: dict[str, list[Any]] = {name: [] for name in ("tokens", "loss_mask", "sampled_mask", "logprobs")}
    versions: list[int] = []
    for segment in path:
        own = slice(*_range(tree, segment))
        for name, values in columns.items():
            part = tree["sampled_mask" if name == "loss_mask" else name][own]
            values += map(float if name == "logprobs" else int, part)
        if tree["segment_turns"][segment] not in in_loss:
            columns["loss_mask"][len(versions) :] = [0] * (len(columns["tokens"]) - len(versions))
        versions += map(int, tree["weight_versions"][own])
    spans = list(_chain(turns, leaf["turn"], "start"))
    ends = [*(span["start"] for span in spans[1:]), len(versions)]
    said = list(_chain(turns, leaf["turn"], "first_message"))
    row = {
        **{name: value for name, value in tree.items() if name not in OF_TREE and name not in KINDS},
        **{name: value for name, value in leaf.items() if name not in OF_LEAF},
        **columns,
        "weight_versions": _versions(versions, tree["weight_version_names"], leaf["weight_version_names"]),
        "turns": [_cut(span, end) for span, end in zip(spans, ends, strict=True)],
        "sampling": [span["sampling"] for span in spans],
        "messages": [message for turn in said for message in turn["messages"]],
    }
    if said and "images" in said[0]:
        row["images"] = [image for turn in said for image in turn["images"]]
    if "payloads" in leaf:
        row |= _payloads(tree, leaf["payloads"])
    return row


def _path(tree: TrainerRow, segment: int) -> Iterator[int]:
    """The segments from a root to this one."""
    path: list[int] = []
    while segment >= 0:
        path.append(segment)
        segment = tree["segment_parents"][segment]
    return iter(path[::-1])


def _range(tree: TrainerRow, segment: int) -> tuple[int, int]:
    starts: Sequence[int] = tree["segment_starts"]
    return starts[segment], starts[segment + 1] if segment + 1 < len(starts) else len(tree["tokens"])


def _chain(turns: Mapping[int, Mapping[str, Any]], number: int, begins: str) -> Iterator[Mapping[str, Any]]:
    """The turns up to this one, from the one where `begins` is 0 on."""
    chain: list[Mapping[str, Any]] = [turns[number]]
    while chain[-1][begins]:
        chain.append(turns[chain[-1]["parent"]])
    return iter(chain[::-1])


def _versions(versions: Sequence[int], names: Sequence[str], own: Sequence[str]) -> list[int]:
    """A row has numbers where all of its versions are, even if other rows of the tree have names."""
    if not len(names):
        return list(versions)
    numbers = {name: place for place, name in enumerate(own)} if len(own) else None
    told = {place: numbers[names[place]] if numbers else int(names[place]) for place in set(versions) - {-1}}
    return [told.get(version, -1) for version in versions]


def _cut(turn: Mapping[str, Any], end: int) -> dict[str, Any]:
    """The turn's span in a row where it ends so."""
    parts = [{**part, "end": min(part["end"], end)} for part in turn["parts"] if part["start"] < end]
    return {**{name: value for name, value in turn.items() if name not in OF_TURN}, "end": end, "parts": parts}


def _payloads(tree: TrainerRow, payloads: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Any]:
    row: dict[str, Any] = {"routed_experts": None, "row_start": None, "rows": 0, "dtype": None, "shape": []}
    for kind, ref in payloads.items():
        payload = None if ref is None else _payload(tree[kind], ref)
        if kind != "routed_experts":
            row[kind] = payload
        elif payload is not None:
            row |= {kind: payload.pop("data"), **payload}
    return row


def _payload(stored: Mapping[str, Any], ref: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of one row's payload, in the type that it has alone; base64 where the tree has that."""
    is_text = isinstance(stored["data"], str)
    data = base64.b64decode(stored["data"]) if is_text else bytes(stored["data"])
    count, *inner = map(int, stored["shape"])
    width = len(data) // max(count, 1)
    own = b"".join(data[start * width : end * width] for start, end in ref["ranges"])
    if ref["dtype"] != stored["dtype"]:
        own = array(CODES[ref["dtype"]], array(CODES[stored["dtype"]], own)).tobytes()
    rows = sum(end - start for start, end in ref["ranges"])
    return {
        "data": base64.b64encode(own).decode() if is_text else own,
        "row_start": ref["row_start"],
        "rows": rows,
        "dtype": ref["dtype"],
        "shape": [rows, *inner],
    }


@dataclass(frozen=True)
class PackedTrees:
    """Trees one after the other as one sequence of N tokens, each with its subtree behind it.

    parents: the token before each in its rows, whose logits predict it; −1 for a first token. The token at `i` is a
        target where `loss_weights[i]` is not 0, and `parents[i]` its source: a token may have several next ones, so
        shifting by one place gives wrong targets.
    subtree_ends: token `q` sees token `k` if `k <= q < subtree_ends[k]`.
    cu_seqlens: where the trees of one root begin, and N: no token sees one of another tree.
    segment_starts, segment_lengths, segment_parents, segment_depths: the runs of tokens of which only the first may
        follow another than its neighbour. The parent is a segment, −1 for a root; the depth is the first position.
    loss_weights: in how many rows' loss a token is: 0 or 1, with `loss=every` perhaps more. 0 without a predecessor.
    logprobs: of the sampled tokens, 0.0 elsewhere. `sampled_mask` says which these are.
    advantages: the session's for each token in the loss, 0.0 elsewhere; None if a session has none.
    rows: for each row of each session the places of its tokens, to take per-token results back to rows.
    """

    input_ids: list[int]
    position_ids: list[int]
    parents: list[int]
    subtree_ends: list[int]
    cu_seqlens: list[int]
    segment_starts: list[int]
    segment_lengths: list[int]
    segment_parents: list[int]
    segment_depths: list[int]
    sampled_mask: list[int]
    loss_weights: list[int]
    logprobs: list[float]
    weight_versions: list[int]
    advantages: list[float] | None
    rows: list[list[int]]


def pack_trees(trees: Iterable[TrainerRow]) -> PackedTrees:
    """Rows of the shape `tree`, one after the other."""
    packed = PackedTrees([], [], [], [], [], [], [], [], [], [], [], [], [], [], [])
    has_advantages = True
    for tree in trees:
        offset, first = len(packed.input_ids), len(packed.segment_starts)
        packed.input_ids.extend(map(int, tree["tokens"]))
        packed.position_ids.extend(map(int, tree["position_ids"]))
        packed.sampled_mask.extend(map(int, tree["sampled_mask"]))
        packed.logprobs.extend(map(float, tree["logprobs"]))
        packed.weight_versions.extend(map(int, tree["weight_versions"]))
        packed.subtree_ends.extend([0] * len(tree["tokens"]))
        for segment, parent in enumerate(map(int, tree["segment_parents"])):
            start, end = _range(tree, segment)
            if parent < 0:
                packed.cu_seqlens.append(offset + start)
            before = -1 if parent < 0 else offset + _range(tree, parent)[1] - 1
            packed.parents.extend([before, *range(offset + start, offset + end - 1)])
            packed.segment_starts.append(offset + start)
            packed.segment_lengths.append(end - start)
            packed.segment_parents.append(parent if parent < 0 else first + parent)
            packed.segment_depths.append(int(tree["position_ids"][start]))
        for place in range(len(packed.input_ids) - 1, offset - 1, -1):
            packed.subtree_ends[place] = max(packed.subtree_ends[place], place + 1)
            if (before := packed.parents[place]) >= 0:
                packed.subtree_ends[before] = max(packed.subtree_ends[before], packed.subtree_ends[place])
        weights = [0] * len(tree["tokens"])
        for leaf in tree["leaves"]:
            row: list[int] = []
            in_loss = set(leaf["loss_turns"])
            for segment in _path(tree, leaf["leaf_segment"]):
                own = range(*_range(tree, segment))
                row += [offset + place for place in own]
                if int(tree["segment_turns"][segment]) in in_loss:
                    for place in own:
                        weights[place] += bool(tree["sampled_mask"][place] and packed.parents[offset + place] >= 0)
            packed.rows.append(row)
        packed.loss_weights.extend(weights)
        if (advantage := tree["advantage"]) is None:
            has_advantages = False
        elif packed.advantages is not None:
            packed.advantages.extend([advantage if weight else 0.0 for weight in weights])
    packed.cu_seqlens.append(len(packed.input_ids))
    return packed if has_advantages else replace(packed, advantages=None)


def sees(packed: PackedTrees, query: int, key: int) -> bool:
    """May the token at `query` see the one at `key`? With tensors in the place of lists, FlexAttention's `mask_mod`."""
    return key <= query < packed.subtree_ends[key]


def attention_mask(packed: PackedTrees) -> list[list[bool]]:
    """[N][N]: which tokens (the second index) each token sees."""
    places = range(len(packed.input_ids))
    return [[sees(packed, query, key) for key in places] for query in places]


def attention_slices(packed: PackedTrees) -> tuple[list[list[int]], list[list[int]], list[str]]:
    """The same as rectangles: query ranges, key ranges, and `causal` (a segment of itself) or `full` (of an earlier one
    on its path). MagiAttention takes masks so."""
    queries: list[list[int]] = []
    keys: list[list[int]] = []
    kinds: list[str] = []
    ranges = [
        [start, start + count] for start, count in zip(packed.segment_starts, packed.segment_lengths, strict=True)
    ]
    for segment, own in enumerate(ranges):
        kind, key = "causal", segment
        while key >= 0:
            queries.append(own)
            keys.append(ranges[key])
            kinds.append(kind)
            kind, key = "full", packed.segment_parents[key]
    return queries, keys, kinds
