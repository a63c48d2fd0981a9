"""`GET /ui/api/rollouts`: rollouts side by side, and the whole texts of a step; `GET /ui/api/summaries`: what sessions
are about."""

from __future__ import annotations

from typing import Any

from app.features.page.rollout_view import MAX_KEYS, MAX_SAID
from app.features.page.summaries import MAX_SESSIONS
from integration.stand import WEATHER, Stand, Talk, error_of, user

NOW = {"latency_s": 0}
TEXT = {**NOW, "text": "the same"}


def compared(stand: Stand, *keys: str, **parameters: Any) -> dict[str, Any]:
    return dict(stand.get("/ui/api/rollouts", rollout=keys, **parameters))


def test_steps_stand_beside_those_that_do_the_same(stand: Stand) -> None:
    """Whatever ids the calls have. A row of a result that differs has the same step; their whole texts are marked."""
    look = [{"name": "get_weather", "arguments": {"city": "Bonn"}}]
    talks = []
    for number, result in enumerate(('{"error": "no such city"}', "sunny\nand warm")):
        talk = stand.talk(group_id="beside", attempt=number)
        asked = talk.say("Will it rain?", tools=[WEATHER], sim={**NOW, "text": "I look.", "calls": look})
        (call,) = asked.json()["choices"][0]["message"]["tool_calls"]
        talk.add({"role": "tool", "tool_call_id": call["id"], "content": result}, sim=TEXT)
        talks.append(talk)
    assert len({talk.messages[1]["tool_calls"][0]["id"] for talk in talks}) == 2
    ids = [talk.id for talk in talks]
    assert stand.http.put(f"{talks[1].path}/reward", json={"reward": 1, "components": {"dry": 1}}).status_code == 200
    for name, value in (("quality", "good"), ("long", "x" * (MAX_SAID + 1))):
        assert stand.http.put(f"{talks[1].path}/annotations/{name}", json={"value": value}).status_code == 200
    found = compared(stand, *ids)
    first, second = found["columns"]
    assert [row["step"] for row in found["rows"]] == [0, 1, 2]
    cells = [
        [cell and (cell["turn"], cell["results"], cell["failed"], cell["same"]) for cell in row["cells"]]
        for row in found["rows"]
    ]
    assert cells == [
        [(0, ["Will it rain?"], False, True)] * 2,
        [(1, ["no such city"], True, True), (1, ["sunny …"], False, False)],
        [(2, [], False, True)] * 2,
    ]
    assert found["rows"][1]["cells"][1]["actions"] == [{"tool": "get_weather", "text": "Bonn"}]
    assert (first["name"], first["reward"], first["difference"], first["differs_at"]) == ("attempt 0", None, None, None)
    assert (second["reward"], second["components"], second["differs_at"]) == (1.0, {"dry": 1.0}, 1)
    assert second["difference"] == "Step 1: attempt 1 gets “sunny …” where attempt 0 gets “no such city”"
    assert {one["name"]: one.get("value") for one in second["annotations"]} == {"quality": "good", "long": None}
    sampled = [sum(row["loss_mask"]) for row in talks[1].rows() if row["session_id"] == ids[1]]
    assert second["output_tokens"] == sum(sampled)
    texts = stand.get("/ui/api/rollouts/texts", step=[f"{one}/1" for one in ids])
    called = "I look.\ncalls get_weather\n  city: Bonn"
    assert [one["said"] for one in texts] == [[[False, called]]] * 2
    assert ["".join(text for _, text in one["got"]) for one in texts] == [
        'tool:\n{"error": "no such city"}',
        "tool:\nsunny\nand warm",
    ]
    same, task = stand.get("/ui/api/rollouts/texts", step=[f"{ids[0]}/", f"{ids[1]}/0"])
    assert (same, task) == ({"said": [], "got": []}, {"said": [], "got": [[False, "user:\nWill it rain?"]]})


def test_the_best_and_the_worst_come_first(stand: Stand) -> None:
    ids = []
    for number, reward in enumerate((0.5, 0.0, 1.0, None, 0.0)):
        talk = stand.talk(group_id="ordered", attempt=number)
        for step in range(number + 1):
            talk.say(str(step), sim=NOW)
        if reward is not None:
            assert stand.http.put(f"{talk.path}/reward", json={"reward": reward}).status_code == 200
        ids.append(talk.id)

    def order(*keys: str, **parameters: Any) -> tuple[str, bool]:
        found = compared(stand, *keys, **parameters)
        return "".join(str(ids.index(one["session_id"])) for one in found["columns"]), found["is_contrast"]

    orders = {"contrast": "21034", "attempt": "01234", "best": "20143", "worst": "14023", "longest": "43210"}
    assert {name: order(*ids, order=name) for name in orders} == {
        name: (one, name == "contrast") for name, one in orders.items()
    }
    assert order(*ids, start=3) == ("34", True)
    assert order(ids[1], ids[4], ids[3]) == ("143", False), "the rewards do not differ"
    assert order(*[ids[2]] * 3, ids[1]) == ("21", True), "a rollout is named once"


def test_what_cannot_be_compared_says_why(stand: Stand) -> None:
    talk = stand.talk(history="tree")
    talk.say("One", sim=TEXT)
    found = compared(stand, "nobody", talk.id, f"{talk.id}@7")
    errors = [column.get("error") for column in found["columns"]]
    assert errors == ["session nobody does not exist", None, f"session {talk.id} has no branch 7 at event 4"]
    assert [[cell and cell["same"] for cell in row["cells"]] for row in found["rows"]] == [[None, False, None]] * 2
    branches = compared(stand, f"{talk.id}@0", talk.id)["columns"]
    assert [(one["name"], one["difference"]) for one in branches] == [("branch 0", None), (talk.id, None)]
    assert stand.http.delete(talk.path, params={"erase": True}).status_code == 204
    erased, other = stand.talk(), stand.talk()
    for one in (erased, other):
        one.say("One", sim=TEXT)
    assert stand.http.delete(erased.path, params={"erase": True}).status_code == 204
    column = compared(stand, other.id, erased.id)["columns"][1]
    assert column["status"] == "erased"
    assert "does what cannot be read" in column["difference"]
    for wrong in ([], ["a b"], ["x@"], ["x"] * (MAX_KEYS + 1)):
        response = stand.http.get("/ui/api/rollouts", params={"rollout": wrong})
        assert error_of(response) == (400, "invalid_request")


def summary_of(stand: Stand, session_id: str) -> dict[str, Any]:
    return dict(stand.get("/ui/api/summaries", session_id=[session_id])[session_id])


def test_a_summary_follows_its_session(stand: Stand) -> None:
    """Asked after each step or only at the end: what was read before changes nothing."""
    calls = {**NOW, "calls": [{"name": "get_weather", "arguments": {"city": "Bonn"}}], "completion_tokens": 9}
    often, late = (stand.talk(group_id="summaries", attempt=number) for number in range(2))
    seen = [summary_of(stand, often.id)]
    for talk in (often, late):

        def look(talk: Talk = talk) -> None:
            seen.extend([summary_of(stand, talk.id)] if talk is often else [])

        talk.say("\nWill it rain?\nSay yes or no.", sim=TEXT)
        look()
        history = list(talk.messages)
        talk.say("Look again.", tools=[WEATHER], sim=calls)
        look()
        fault = talk.chat([*talk.messages, user("Bad")], sim={**NOW, "fault": "missing_meta_info"})
        assert fault.status_code == 502
        reward = {"reward": 0.5, "components": {"correct": 1.0}}
        assert stand.http.put(f"{talk.path}/reward", json=reward).status_code == 200
        look()
        talk.messages = history
        talk.say("Otherwise.", sim={**NOW, "text": "It did not."})
        look()
    rain, looked = "Will it rain? Say yes or no.", [("get_weather", "Bonn")]
    assert [(one["task"], [tuple(action.values()) for action in one["actions"]], one["turns"]) for one in seen] == [
        ("", [], 0),
        (rain, [(None, "the same")], 1),
        *2 * [(rain, looked, 2)],
        (rain, [(None, "It did not.")], 2),
    ]
    last, cold = seen[-1], summary_of(stand, late.id)
    (row,) = often.rows()
    assert (last["tokens"], last["output_tokens"]) == (len(row["tokens"]), sum(row["loss_mask"]))
    assert (last["reward"], last["components"], last["finish_reason"]) == (0.5, {"correct": 1.0}, "stop")
    own = {"started_at", "ended_at", "tokens", "output_tokens"}
    assert {name: last[name] for name in last.keys() - own} == {name: cold[name] for name in cold.keys() - own}

    assert stand.http.delete(often.path, params={"erase": True}).status_code == 204
    erased = summary_of(stand, often.id)
    assert (erased["task"], erased["actions"], erased["components"]) == ("", [], {})
    for wrong in ([], ["a b"], ["x"] * (MAX_SESSIONS + 1)):
        response = stand.http.get("/ui/api/summaries", params={"session_id": wrong})
        assert error_of(response) == (400, "invalid_request")
