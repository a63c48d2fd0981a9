"""The client's parameters and replies are the server's, and a wrong parameter is refused before it is sent."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints, is_typeddict

import msgspec
import numpy as np
import pytest

import turnlog
from app.api.creation import CreateSession
from app.api.exports import EventParameters as EventsRoute
from app.api.exports import ExportParameters as ExportRoute
from app.api.sessions import SessionListQuery
from app.domain.branches import Branches, Loss
from app.domain.samples import Stale
from app.export.formats import SHAPES, columns_of
from app.export.query import ExportQuery
from app.features.groups.feed import FeedQuery
from app.features.groups.operations import Acknowledged
from app.features.groups.rules import Attempt, Statistics
from app.features.search.routes import SearchQuery
from app.sessions.session_list import Sort, Status
from ops import event_types, unasync
from turnlog import parameters, replies, rows
from turnlog.client import names as client
from turnlog.client.checked import checked, wanted


def names(kind: type) -> set[str]:
    return set(get_type_hints(kind))


def test_parameters_are_the_servers() -> None:
    assert {*names(parameters.ExportParameters), "format"} == set(ExportRoute.model_fields)
    assert names(parameters.EventParameters) == set(EventsRoute.model_fields)
    assert {*names(parameters.FeedParameters), "consumer"} == set(FeedQuery.model_fields)
    assert names(parameters.NewSession) == set(CreateSession.model_fields)
    assert {*names(parameters.SearchFilters), "q", "limit", "cursor"} == set(SearchQuery.model_fields)
    assert {*names(parameters.SessionFilters), "count", "tasks", "limit", "cursor"} == set(
        SessionListQuery.model_fields
    )


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (parameters.Branches, Branches),
        (parameters.Loss, Loss),
        (parameters.Stale, Stale),
        (parameters.SessionStatus, Status),
        (parameters.SessionOrder, Sort),
    ],
)
def test_choices_are_the_servers(ours: Any, theirs: Any) -> None:
    assert set(get_args(ours)) == set(get_args(theirs))


def test_shapes_are_the_servers() -> None:
    assert {"turnlog", *get_args(parameters.TrainerShape)} == set(SHAPES)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (replies.Attempt, Attempt),
        (rows.Statistics, Statistics),
        (rows.Acknowledged, Acknowledged),
    ],
)
def test_replies_are_the_servers(ours: type, theirs: type[msgspec.Struct]) -> None:
    assert names(ours) == set(theirs.__struct_fields__)


def test_rows_are_the_servers() -> None:
    asked = ExportQuery(stale="keep", top_k=1, columns="values", replay=True, routing="sampled")
    assert names(rows.Row) == set(columns_of(asked))


def test_events_are_the_servers() -> None:
    assert event_types.FILE.read_text() == event_types.generate(), "run python -m ops.event_types"


def test_all_types_are_public_and_nothing_else_is_typed() -> None:
    public: list[str] = getattr(turnlog, "__all__")  # noqa: B009 - made when it is asked for, which mypy does not see
    for module in (parameters, rows):
        own = {name for name, one in vars(module).items() if is_typeddict(one) and one.__module__ == module.__name__}
        assert own - {"OfGroups", "OfSessions", "RowForm", "RowFilters"} <= set(public)
    for name in public:
        assert getattr(turnlog, name) is getattr(client, name)
    with pytest.raises(AttributeError, match="no attribute 'Sessions'"):
        turnlog.Sessions  # type: ignore[attr-defined]  # noqa: B018


WRONG: list[tuple[type, dict[str, Any], type[Exception], str]] = [
    (parameters.ExportParameters, {"grup_id": "g"}, TypeError, "grup_id is not a parameter, did you mean group_id"),
    (parameters.ExportParameters, {"format": "parquet"}, TypeError, "format is not a parameter"),
    (parameters.ExportParameters, {"shape": "slim"}, ValueError, "shape must be one of turnlog, miles, slime"),
    (parameters.ExportParameters, {"status": "done"}, ValueError, "status must be one of completed, truncated"),
    (parameters.ExportParameters, {"limit": "5"}, TypeError, "limit must be int, not str"),
    (parameters.ExportParameters, {"limit": 5.0}, TypeError, "limit must be int, not float"),
    (parameters.ExportParameters, {"limit": True}, TypeError, "limit must be int, not bool"),
    (parameters.ExportParameters, {"min_reward": float("nan")}, ValueError, "min_reward must be finite, not nan"),
    (parameters.ExportParameters, {"replay": "url"}, ValueError, "replay must be one of urls, not url"),
    (parameters.ExportParameters, {"since": []}, TypeError, "since must be float or str, not list"),
    (parameters.FeedParameters, {"size": None, "lease_s": "1"}, TypeError, "lease_s must be float, not str"),
    (parameters.EventParameters, {"type": ["TurnComitted"]}, ValueError, "each of type must be one of SessionCreated"),
    (parameters.EventParameters, {"type": "TurnCommitted"}, TypeError, "type must be a sequence, not str"),
    (parameters.SessionFilters, {"metadata": "a=b"}, TypeError, "metadata must be a mapping, not str"),
    (parameters.SessionFilters, {"status": "idle"}, ValueError, "status must be one of open, closed, erased"),
    (parameters.NewSession, {"history": "trees"}, ValueError, "history must be one of linear, tree, not trees"),
    (parameters.NewSession, {"attempt": "0"}, TypeError, "attempt must be int"),
    (parameters.NewSession, {"limits": 50}, TypeError, "limits must be a mapping or None, not int"),
    (
        parameters.NewSession,
        {"limits": {"tokns": 5}},
        TypeError,
        "limits: tokns is not a parameter, did you mean tokens",
    ),
    (parameters.NewSession, {"limits": {"turns": "5"}}, TypeError, "limits: turns must be int"),
    (parameters.NewSession, {"limits": {"per": "run"}}, ValueError, "limits: per must be one of rollout, session"),
]


@pytest.mark.parametrize(("kind", "given", "error", "message"), WRONG, ids=[str(one[1]) for one in WRONG])
def test_a_wrong_parameter_is_refused(kind: type, given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        checked(kind, given)
    assert message in str(caught.value)


def test_right_parameters_pass() -> None:
    given = {"limit": np.int64(3), "min_reward": 1, "max_reward": np.float32(2), "since": "2026-01-01", "until": 5}
    assert checked(parameters.ExportParameters, {**given, "replay": True, "cursor": None}) == {**given, "replay": True}
    assert wanted(parameters.ExportParameters, {"columns": ["a", "b"]}) == {"columns": "a,b"}
    assert checked(parameters.EventParameters, {"type": ("TurnCommitted",)}) == {"type": ("TurnCommitted",)}
    limits = {"turns": 50, "tokens": None, "seconds": 1800, "per": "session"}
    assert checked(parameters.NewSession, {"limits": limits, "params": {}}) == {"limits": limits, "params": {}}
    filters = {"a": "b", "n": 3, "yes": True, "none": None, "any": ["b", 3]}
    assert checked(parameters.SessionFilters, {"metadata": filters}) == {"metadata": filters}
    given = wanted(parameters.SessionFilters, {"metadata": filters})
    assert given == {
        "metadata.a": ["b"],
        "metadata.n": ["3"],
        "metadata.yes": ["true"],
        "metadata.none": ["null"],
        "metadata.any": ["b", "3"],
    }
    with pytest.raises(ValueError, match="metadata: a has an empty list of values"):
        wanted(parameters.SessionFilters, {"metadata": {"a": []}})


def test_the_sync_client_is_current() -> None:
    assert unasync.is_current(), "run python -m ops.unasync"
