"""The tree of errors: stable codes and statuses."""

from __future__ import annotations

import pytest
from tables import rows

from app import errors
from app.errors import AppError

STABLE = dict(rows("errors_stable"))


def tree(root: type[AppError]) -> list[type[AppError]]:
    return [found for sub in root.__subclasses__() for found in (sub, *tree(sub))]


ALL = [error for error in tree(AppError) if error.__module__ == "app.errors"]


def test_each_code_means_one_thing() -> None:
    assert {error.code: error.meaning for error in ALL} | {AppError.code: AppError.meaning} == errors.codes()
    for error in ALL:
        assert errors.codes()[error.code] == error.meaning != AppError.meaning


@pytest.mark.parametrize("name", sorted(STABLE))
def test_codes_are_stable(name: str) -> None:
    error = getattr(errors, name)
    assert [error.status, error.code] == STABLE[name]


@pytest.mark.parametrize("error", ALL, ids=lambda error: error.__name__)
def test_the_body_is_what_the_openai_sdks_read(error: type[AppError]) -> None:
    assert error("why").body() == {"error": {"message": "why", "type": error.type, "code": error.code, "param": None}}
    assert error.code != AppError.code


@pytest.mark.parametrize("error", ALL, ids=lambda error: error.__name__)
def test_what_a_retry_cannot_mend_says_so(error: type[AppError]) -> None:
    headers = error("x").headers()
    if error.status in (400, 404, 413, 422) or error.code in ("session_exists", "session_busy"):
        assert headers["x-should-retry"] == "false"
    if error.status in (503, 507) and error.retry is not False:
        assert int(headers["retry-after"]) > 0
        assert headers.get("x-should-retry") != "false"
