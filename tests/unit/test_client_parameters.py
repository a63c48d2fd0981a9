"""The client and the command line know every parameter of exports, of the feed and of all events, and no other."""

from __future__ import annotations

from app.api.events import EventParameters as EventsRoute
from app.api.exports import ExportParameters as ExportRoute
from app.export.feed import FeedQuery
from turnlog.parameters import EventParameters, ExportParameters, FeedParameters


def test_they_are_the_servers() -> None:
    assert {*ExportParameters.__annotations__, "format"} == set(ExportRoute.model_fields)
    assert set(EventParameters.__annotations__) == set(EventsRoute.model_fields)
    assert {*FeedParameters.__annotations__, "consumer"} == set(FeedQuery.model_fields)
