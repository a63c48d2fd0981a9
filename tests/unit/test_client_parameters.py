"""The client and the command line know every parameter of exports and of the feed, and no other."""

from __future__ import annotations

from app.api.exports import ExportParameters as ExportRoute
from app.export.feed import FeedQuery
from turnlog.parameters import ExportParameters, FeedParameters


def test_they_are_the_servers() -> None:
    assert {*ExportParameters.__annotations__, "format"} == set(ExportRoute.model_fields)
    assert {*FeedParameters.__annotations__, "consumer"} == set(FeedQuery.model_fields)
