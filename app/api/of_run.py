"""What the token of a run opens: everything within the run, and nothing outside, not even that it exists.

Its entry in the table says where a route names its run (`Route.of_run`); without such an entry a route is closed. All
is checked here: by `admit` before the route answers; where a body names the run, when it is read (`Request.body_of`);
and where a header names the session, once its name is looked up.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.datastructures import QueryParams

from app.api.head import RUN, UNKNOWN_TOKEN, Head, to_newest, unknown_session
from app.api.routes import Route
from app.domain.names import first_id
from app.domain.patterns import is_id
from app.errors import AppError, Forbidden, IdUnavailable, NotFound, RunMismatch, SessionNotFound, Unauthorized
from app.services import Services
from app.store.sessions import run_of
from app.tokens import RunToken

_HEADER = RUN.encode()


async def admit(app: Services, head: Head, token: RunToken, route: Route) -> AppError | None:
    """The error for what this token of a run does not open, else None. Limits the request to the run."""
    try:
        if app.run_number is None or await app.run_number(token.run) != token.number:
            return Unauthorized(UNKNOWN_TOKEN)
        if route.limit is None:
            return Forbidden("this route needs the admin token")
        _limit_header(head, token.run)
        if route.limit == "query":
            _limit_query(head, token.run)
        elif route.limit == "path" and head.path_values["run"] != token.run:
            return NotFound.of_run(head.path_values["run"])
        elif route.limit == "session" and head.path_session is None:
            await require_own(app, head.path_values["session_id"], token.run)
        elif route.limit == "session":
            await _limit_path(app, head, token.run)
    except AppError as error:
        return error
    return None


def require_run(named: str | None, run: str) -> None:
    """Raises Forbidden where a request with the token of `run` names another run."""
    if named not in (None, run):
        raise Forbidden(f"the token is valid for run {run} only")


def _limit_header(head: Head, run: str) -> None:
    for given in head.headers.get(_HEADER, ()):
        require_run(given.strip(b" \t").decode("latin-1"), run)
    own = run.encode()
    head.headers[_HEADER] = [own]
    head.scope["headers"] = [*(each for each in head.scope["headers"] if each[0] != _HEADER), (_HEADER, own)]


def _limit_query(head: Head, run: str) -> None:
    query: bytes = head.scope["query_string"]
    given = QueryParams(query).getlist("run")
    for named in given:
        require_run(named, run)
    if not given:
        head.scope["query_string"] = b"&".join(filter(None, (query, b"run=" + run.encode())))


async def _limit_path(app: Services, head: Head, run: str) -> None:
    """Raises SessionNotFound, the same for a session of another run and for none."""
    name = head.path_session or ""
    # Looked up before what may be another run's session is read: that would take longer than to find none.
    named = [name, first_id(run, name)] if is_id(name) else []
    if run not in [await _found_run(app, session_id, run) for session_id in named]:
        raise unknown_session(name)
    before = head.scope, head.path_session, head.session_id
    try:
        await to_newest(app, head)
        await require_own(app, head.path_session or "", run)
    except (RunMismatch, SessionNotFound) as error:
        raise unknown_session(name) from error
    finally:
        head.scope, head.path_session, head.session_id = before  # Who answers looks it up.


async def require_own(app: Services, session_id: str, run: str) -> None:
    """Raises SessionNotFound where the session is not of the run whose token the request brought."""
    if await _found_run(app, session_id, run) != run:
        raise unknown_session(session_id)


async def _found_run(app: Services, session_id: str, own: str) -> str | None:
    """The run of a session in the store. A foreign one is looked up as one that does not exist is, so that the time of
    the answer does not tell them apart."""
    known = app.cache.known(session_id)
    if known is not None and known.config.of_run == own:
        return own
    return await run_of(app.database, session_id)


async def hide(app: Services, error: AppError, run: str | None, session_ids: Iterable[str | None]) -> None:
    """Raises IdUnavailable in place of the error of a request that creates sessions, where one of these ids is taken
    outside `run`, whose token the request brought: that is all that it may know."""
    if run is None:
        return
    named = list(filter(None, session_ids))
    for session_id in named:
        found, absent = await _found_run(app, session_id, run), SessionNotFound.of(session_id)
        if found != run and (found is not None or await app.explained(absent) is not absent):
            raise IdUnavailable.of(session_id) from error
    if isinstance(error, RunMismatch) and named:  # A child of another run was there before its parent.
        raise IdUnavailable.of(named[0]) from error
