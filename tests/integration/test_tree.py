"""Sessions with `history: tree`: branches, turns in flight together, and rows in which each sampled token is once."""

from __future__ import annotations

from typing import Any

from integration.stand import HOURS, Message, Stand, Talk, user


def tree(stand: Stand, **body: Any) -> Talk:
    return stand.talk(history="tree", **body)


def ask(talk: Talk, *messages: Message, **fields: Any) -> tuple[int, Message]:
    """The turn's number and its reply's message."""
    response = talk.chat(messages, **fields)
    assert response.status_code == 200, response.text
    return int(response.headers["x-turnlog-turn"]), response.json()["choices"][0]["message"]


def shape(talk: Talk) -> list[tuple[int, int, int, str | None]]:
    """Each turn in the order of commits: its number, parent, branch and the cause of a branch that it begins."""
    return [(event["turn"], event["parent"], event["branch"], event.get("branch_cause")) for event in talk.committed()]


def owners(rows: list[dict[str, Any]]) -> dict[int, list[int]]:
    """By turn the branches of the rows that have it in their loss."""
    found: dict[int, list[int]] = {}
    for row in rows:
        for span in row["turns"]:
            if any(row["loss_mask"][span["output_start"] : span["end"]]):
                found.setdefault(span["turn"], []).append(row["branch"])
    return found


def test_requests_attach_to_the_deepest_turn_that_they_continue(stand: Stand) -> None:
    talk = tree(stand)
    one, first = ask(talk, user("One"))
    two, second = ask(talk, user("One"), first, user("Two"))
    fork, forked = ask(talk, user("One"), first, user("Instead"))
    deeper, _ = ask(talk, user("One"), first, user("Instead"), forked, user("On"))
    retry, _ = ask(talk, user("One"), first, user("Two"))
    root, _ = ask(talk, user("A title for this?"))
    carried, _ = ask(talk, user("So far: things"), second, user("Go on"))
    assert shape(talk) == [
        (one, 0, 0, "start"),
        (two, one, 0, None),
        (fork, one, 1, "fork"),
        (deeper, fork, 1, None),
        (retry, one, 2, "retry"),
        (root, 0, 3, "root"),
        (carried, 0, 4, "compaction"),
    ]
    assert talk.committed()[-1]["carries"] == two
    rows = talk.rows()
    assert [(row["branch"], row["branch_cause"], row["parent_branch"], row["fork_turn"]) for row in rows] == [
        (0, "start", None, None),
        (1, "fork", 0, one),
        (2, "retry", 0, one),
        (3, "root", None, None),
        (4, "compaction", None, None),
    ]
    assert owners(rows) == {one: [0], two: [0], fork: [1], deeper: [1], retry: [2], root: [3], carried: [4]}
    assert [row["branch"] for row in talk.rows(branches="main")] == [4]
    assert owners(talk.rows(loss="every"))[one] == [0, 1, 2]


def test_turns_in_flight_together_are_siblings(stand: Stand) -> None:
    talk = tree(stand)
    calls = [stand.meanwhile(talk.chat, [user("Same")], sim={"latency_s": HOURS, "abort_at": [5]}) for _ in range(5)]
    stand.until_generating(talk, 5)
    stand.end()
    assert [call.result().status_code for call in calls] == [200] * 5
    assert (talk.generations(), len(talk.committed())) == (5, 5)
    assert sorted(row["branch_cause"] for row in talk.rows()) == ["retry"] * 4 + ["start"]
    assert sorted(owners(talk.rows())) == [1, 2, 3, 4, 5]


def test_the_tree_says_what_an_export_makes_of_each_turn(stand: Stand) -> None:
    talk = tree(stand)
    one, first = ask(talk, user("One"))
    two, second = ask(talk, user("One"), first, user("Two"))
    fork, _ = ask(talk, user("One"), first, user("Instead"))
    dropped, _ = ask(talk, user("One"), first, user("Again"))
    kept, reply = ask(talk, user("One"), first, user("Again"))
    child, _ = ask(talk, user("One"), first, user("Again"), reply, user("On"), sim={"weight_versions": ["7", "8"]})
    carried, _ = ask(talk, user("So far: things"), second, user("Go on"))
    call = stand.meanwhile(talk.chat, [user("Slow")], sim={"latency_s": 60})
    stand.until_generating(talk, 8)

    found, events = talk.tree(), talk.events()
    assert (found["version"], found["history"], found["main_branch"]) == (len(events), "tree", 4)
    *turns, in_flight = found["turns"]
    for turn, event in zip(turns, talk.committed(), strict=True):
        same = ("turn", "parent", "branch", "output_tokens", "finish_reason")
        assert [turn[name] for name in same] == [event[name] for name in same]
        assert (turn["cause"], turn["carries"]) == (event.get("branch_cause"), event.get("carries"))
        assert turn["tokens"] == event["base_tokens"] + event["suffix_tokens"] + event["output_tokens"]
        assert turn["messages"] == event["base_messages"] + event["new_messages"] + 1
    assert [turn["weight_versions"] for turn in turns if turn["turn"] == child] == [["7", "8"]]
    waiting = [in_flight[name] for name in ("state", "branch", "exported", "reason")]
    assert waiting == ["open", None, False, "in flight"]
    assert {turn["turn"]: (turn["loss_branches"], turn["superseded"], turn["reason"]) for turn in turns} == {
        **dict.fromkeys((one, two), ([0], False, None)),
        fork: ([1], False, None),
        dropped: ([], True, "superseded"),
        **dict.fromkeys((kept, child), ([3], False, None)),
        carried: ([4], False, None),
    }
    branches = [
        tuple(b[name] for name in ("branch", "cause", "parent_branch", "fork_turn", "leaf", "turns", "reason"))
        for b in found["branches"]
    ]
    assert branches == [
        (0, "start", None, None, two, 2, None),
        (1, "fork", 0, one, fork, 1, None),
        (2, "fork", 0, one, dropped, 1, "superseded"),
        (3, "retry", 0, one, child, 2, None),
        (4, "compaction", None, None, carried, 1, None),
    ]
    exported = {b["branch"]: b["tokens"] for b in found["branches"] if b["exported"]}
    assert exported == {row["branch"]: len(row["tokens"]) for row in talk.rows()}
    for parameters in ({"loss": "every"}, {"branches": "main"}, {"branches": "all"}, {"branches": "longest"}):
        seen = {turn["turn"]: turn["loss_branches"] for turn in talk.tree(**parameters)["turns"]}
        assert {turn: told for turn, told in seen.items() if told} == owners(talk.rows(**parameters)), parameters
    assert talk.tree(branches="main")["branches"][0]["reason"] == "not in branches=main"
    assert stand.http.delete(talk.path).status_code == 204
    assert call.result().status_code == 404
