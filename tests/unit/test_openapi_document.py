"""The OpenAPI document against the application's own routes, errors and models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
import schemathesis

from app.api import openapi
from app.main import create_app
from app.protocols.registry import ROUTES
from app.settings import FEATURES, Settings


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    app = create_app(Settings(features=FEATURES))
    return openapi.document(app.table, app.release)


def operations(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"{method.upper()} {path}": operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def test_every_route_is_in_it(document: dict[str, Any]) -> None:
    routes = {
        f"{method} {route.documented_path}"
        for route in create_app(Settings(features=FEATURES)).table.routes
        for method in route.methods
        if method != "HEAD"
    }
    # A redirect to the page is nothing to call.
    assert set(operations(document)) == routes - {"GET /ui/"}


def test_what_the_page_asks_for_is_said_to_be_its_own(document: dict[str, Any]) -> None:
    own = {name for name, operation in operations(document).items() if operation["summary"] == "For the page"}
    assert own == {name for name in operations(document) if name.startswith("GET /ui/api/")} - {"GET /ui/api/live"}


def test_every_parameter_is_explained(document: dict[str, Any]) -> None:
    for name, operation in operations(document).items():
        for parameter in operation.get("parameters", ()):
            assert parameter["description"], (name, parameter["name"])


def test_it_is_openapi(document: dict[str, Any]) -> None:
    schemathesis.openapi.from_dict(document).validate()
    assert document["openapi"] == "3.1.0"


def test_no_reference_leads_nowhere(document: dict[str, Any]) -> None:
    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                yield value["$ref"]
            for one in value.values():
                yield from references(one)
        elif isinstance(value, list):
            for one in value:
                yield from references(one)

    found = set(references(document))
    assert len(found) > 30
    for reference in found:
        place = document
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]


def test_examples_are_what_their_schemas_say(document: dict[str, Any]) -> None:
    checked = 0
    for name, operation in operations(document).items():
        content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        if "example" in content:
            schema = {**content["schema"], "components": document["components"]}
            assert jsonschema_rs.is_valid(schema, content["example"]), name
            checked += 1
    assert checked > 10


def test_422_is_one_code_of_what_takes_a_key(document: dict[str, Any]) -> None:
    with_422 = {name for name, operation in operations(document).items() if "422" in operation["responses"]}
    turns = {f"POST /sessions/{{session_id}}{route.removeprefix('/v1')}" for route in ROUTES}
    assert with_422 == {name for name in operations(document) if name.endswith((*ROUTES, "/fork"))} | turns
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_everything_but_what_anyone_may_needs_a_token(document: dict[str, Any]) -> None:
    open_to_all = {name for name, operation in operations(document).items() if not operation["security"]}
    assert open_to_all == {
        "GET /",
        "GET /docs",
        "GET /health",
        "GET /ready",
        "GET /ui",
        "GET /ui/static/{name}",
        "POST /ui/sign-in",
        "POST /ui/sign-out",
    }
