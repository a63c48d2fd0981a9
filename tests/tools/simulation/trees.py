"""What must hold of a session's turns at the end of a schedule: where each joined, its branch, and every token of every
row, by what was asked and what the engines sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from app.domain.branches import Branches, Loss
from app.export.query import ExportQuery
from app.export.rows import Known, SessionRows
from app.store.content import StoredSession
from tests.tools.simulation.told import Story, Told

EXPORTS: tuple[tuple[Branches, Loss], ...] = (("all", "once"), ("kept", "once"), ("main", "once"), ("kept", "every"))

Place = tuple[int, int]
"""The turn that a request joins, and how many of its messages are stored there."""


def problems(story: Story, stored: StoredSession, found: Known) -> Iterator[str]:
    places: Callable[[Told], Place | None] = _in_a_tree(story) if story.is_tree else _on_a_line(story)
    for turn in story.turns:
        place = turn.event.parent, turn.event.base_messages
        expected = places(turn)
        if place != expected:
            yield f"turn {turn.number} joins {place}, but its request belongs to {expected}"
        continued = story.continued(turn)
        base = len(story.by_number[continued].tokens) if continued else 0
        if turn.event.base_tokens != base:
            yield f"turn {turn.number} continues {turn.event.base_tokens} tokens, its prompt {base}"
    if not found.session.undone:  # Branches are numbered with those of the turns that are undone.
        for turn, expected_branch in zip(story.turns, _branches(story), strict=True):
            branch = turn.branch, turn.event.branch_cause, turn.event.carries
            if branch != expected_branch:
                yield f"turn {turn.number} is of branch {branch}, which should be {expected_branch}"
    for branches, loss in EXPORTS:
        yield from _rows(
            story, SessionRows(stored, found, ExportQuery(branches=branches, loss=loss), branches, ""), branches, loss
        )


def _in_a_tree(story: Story) -> Callable[[Told], Place | None]:
    """A request joins the deepest turn whose whole history begins it; of several the same agent's, then one whose
    request was spelled so, then the newest."""

    def place(turn: Told) -> Place | None:
        earlier = story.before(turn.opened_seq)
        fits = [other for other in earlier if turn.request[: len(other.history)] == other.history]
        deepest = max((len(other.history) for other in fits), default=0)

        def rank(other: Told) -> tuple[bool, bool, int]:
            is_spelled = list(turn.raws[: len(other.raws)]) == list(other.raws)
            return other.agent == turn.agent, is_spelled, other.seq

        best = max((other for other in fits if len(other.history) == deepest), key=rank, default=None)
        return (0, 0) if best is None else (best.number, deepest)

    return place


def _on_a_line(story: Story) -> Callable[[Told], Place | None]:
    """A request goes on, or goes back as far as the window allows, on a reply that it has or to an input that it
    repeats; else it begins a segment, or is refused (None)."""
    config = story.session.config

    def place(turn: Told) -> Place | None:
        earlier = story.before(turn.opened_seq)
        if not earlier:
            return 0, 0
        leaf = earlier[-1]
        if turn.request[: len(leaf.history)] == leaf.history:
            return leaf.number, len(leaf.history)
        line = [story.by_number[number] for number in story.line(leaf.number)]
        kept = next((other for other in line if turn.request[: len(other.history)] == other.history), None)
        gone = line if kept is None else line[: line.index(kept)]
        repeats_input = gone[-1].request == turn.request
        equal = sum(1 for _ in _common(turn.request, leaf.history))
        is_foreign = any(message["role"] == "assistant" for message in turn.messages[equal:])
        if (kept or repeats_input) and not is_foreign and len(gone) <= config.rollback_window:
            return gone[-1].event.parent, len(kept.history) if kept else 0
        return (leaf.number, 0) if config.on_divergence == "segment" else None

    return place


def _common(one: Sequence[object], other: Sequence[object]) -> Iterator[object]:
    for left, right in zip(one, other, strict=False):
        if left != right:
            return
        yield left


def _branches(story: Story) -> Iterator[tuple[int, str | None, int | None]]:
    """Of each turn its branch, the cause where it begins one, and the turn whose reply it carries there."""
    begun = 0
    for place, turn in enumerate(story.turns):
        branch = _branch(story, turn, story.turns[:place], begun)
        begun += branch[1] is not None
        yield branch


def _branch(story: Story, turn: Told, earlier: Sequence[Told], begun: int) -> tuple[int, str | None, int | None]:
    if not earlier:
        return 0, "start", None
    parent = story.by_number.get(turn.parent)
    siblings = [other for other in earlier if other.parent == turn.parent]
    if parent is not None and not siblings and story.continued(turn):
        return parent.branch, None, None
    if any(turn.repeats(other) for other in siblings):
        return begun, "retry", None
    line = story.line(turn.parent)
    new = turn.request[len(parent.history) if parent else 0 :] if siblings or parent is None else []
    for message in new:
        for other in reversed(earlier):
            if other.history[-1] == message and other.number not in line:
                return begun, "compaction", other.number
    if turn.agent != (earlier[0] if parent is None else parent).agent:
        return begun, "agent", None
    return begun, "root" if parent is None else "fork" if siblings else "drift", None


def _rows(story: Story, made: SessionRows, branches: Branches, loss: Loss) -> Iterator[str]:
    """Each row is its leaf's prompt and output, and each of its tokens what the engines said of it."""
    turns = story.turns[-1:] if branches == "main" else story.turns
    gone = story.superseded(story.turns) if branches == "kept" else set()
    leaves = turns if branches == "main" else story.leaves([turn for turn in turns if turn.number not in gone])
    if [segment.row.leaf.number for segment in made.segments] != [leaf.number for leaf in leaves]:
        yield f"of {branches} the rows are {[segment.row.leaf.number for segment in made.segments]}"
        return
    taken: set[int] = set()
    for segment, leaf in zip(made.segments, leaves, strict=True):
        line = story.tokens_line(leaf)
        owned = {turn.number for turn in line} - taken
        if loss == "once":
            taken |= owned
        sample = made.row(segment, "").sample
        for name, expected in _expected(line, owned).items():
            if getattr(sample, name).tolist() != expected:
                yield f"of {branches}, loss {loss}, {name} of the row of turn {leaf.number} is not what was sampled"


def _expected(line: Sequence[Told], owned: set[int]) -> dict[str, list[float]]:
    """A row's arrays, by their names in a sample."""
    length = len(line[-1].tokens)
    columns: dict[str, list[float]] = {
        "tokens": [*line[-1].tokens],
        "sampled_mask": [0] * length,
        "loss_mask": [0] * length,
        "logprobs": [0.0] * length,
        "weight_versions": [-1] * length,
    }
    for turn in line:
        own = slice(len(turn.prompt), len(turn.tokens))
        columns["sampled_mask"][own] = [1] * len(turn.output)
        columns["loss_mask"][own] = [turn.number in owned] * len(turn.output)
        columns["logprobs"][own] = turn.logprobs
        columns["weight_versions"][own] = turn.versions
    return columns
