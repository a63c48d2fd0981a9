"""The page's own read-only routes, under `/ui/api`."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from fastapi import Query
from pydantic import Field

from app.api.engines import engine_fields
from app.api.exports import ExportParameters
from app.api.of_run import require_own
from app.api.parameters import LIMIT, Cursor, SessionId
from app.api.requests import Request
from app.api.routes import MOST_ROWS, Routes
from app.domain.patterns import ID, MAX_INTEGER, NO_NUL
from app.errors import SessionUnreadable
from app.features.page.overview import Overviews
from app.features.page.preview import Previews
from app.features.page.rollout_view import COLUMNS, MAX_KEYS, Order, compare, parted, step_texts
from app.features.page.summaries import MAX_SESSIONS, Summaries, listed
from app.features.page.token_view import Asked, TokenViews
from app.features.page.tokenizer import Decode, decoder
from app.features.page.turn_view import MAX_TURNS, TurnViews
from app.features.page.watch import Watch
from app.sessions.conversation import Conversations
from app.sessions.session_list import SessionQuery

if TYPE_CHECKING:
    from app.features.gates.pauses import Pauses
    from app.services import Services

route = Routes("Page")


class Page(NamedTuple):
    """The readers of the page's views. They never write."""

    overviews: Overviews
    watch: Watch
    turns: TurnViews
    tokens: TokenViews
    previews: Previews
    summaries: Summaries


def page_with(services: Services) -> Page:
    database, sessions = services.database, services.session_list
    pauses: Pauses | None = services.features.get("gates")
    watch = Watch(database, sessions, services.log_end)
    services.waits.append(watch.stop)
    return Page(
        overviews=Overviews(services, pauses),
        watch=watch,
        turns=TurnViews(database, services.turns.claimed, services.engines.engine_of),
        tokens=TokenViews(database, _decoder(services)),
        previews=Previews(database, services.release),
        summaries=Summaries(database),
    )


def _decoder(services: Services) -> Decode | None:
    """Of the tokenizer that makes prompts, else of the page's own. Raises StartupError."""
    path = services.settings.page_tokenizer
    if services.prompts is not None:
        return services.prompts.decode
    return None if path is None else decoder(path)


MAX_TOKENS = 10_000

Columns = Annotated[
    str | None,
    Field(
        max_length=512,
        pattern=NO_NUL,
        description="Keys of the metadata whose values are given too, with dots into objects and commas in between.",
    ),
]


class SessionListParameters(SessionQuery):
    """Filters and paging of the session list."""

    limit: int = Field(default=100, ge=1, le=MOST_ROWS, description=LIMIT)
    cursor: Cursor = None
    columns: Columns = None


Run = Annotated[str | None, Query(pattern=ID, description="Only this run.")]


@route.for_the_page("/me", of_run="any")
async def me(request: Request) -> object:
    """How the page must sign in: `auth` is `token` or `none`. A request without the needed token gets 401. `run`: the
    only one that is shown, to who signed in with its token."""
    auth = "token" if request.services.tokens.are_needed else "none"
    run, release = request.head.token_run, request.services.release
    return {"signed_in": True, "auth": auth, "run": run, "release": release, "now": time.time()}


@route.for_the_page("/overview", of_run="query")
async def overview(request: Request, run: Run = None) -> object:
    return await overview_of(request.services, run)


def page_of(request: Request) -> Page:
    page: Page = request.services.features["page"]
    return page


async def overview_of(app: Services, run: str | None) -> dict[str, Any]:
    """The overview and the engines, of a run or of all. Raises StoreUnavailable."""
    page: Page = app.features["page"]
    found = msgspec.structs.asdict(await page.overviews.now(run))
    return {**found, "engines": [engine_fields(app, listed) for listed in app.engine_pool.listed(run)]}


@route.for_the_page("/sessions", of_run="query")
async def list_sessions(request: Request, query: Annotated[SessionListParameters, Query()]) -> object:
    """Sessions by any filter, in any order; `sort=running_since` lists only those with a turn in flight."""
    app = request.services
    return await listed(app.database, app.session_list, query, query.cursor, query.limit, query.columns)


@route.for_the_page("/summaries", of_run="header")
async def summaries(
    request: Request,
    session_id: Annotated[
        list[Annotated[str, Field(pattern=ID)]], Query(max_length=MAX_SESSIONS, description="Ids of sessions.")
    ],
) -> object:
    """What each of these sessions is about and did last, by id; unknown ones are missing."""
    app, run = request.services, request.head.token_run
    if run is not None:
        rows = await app.database.read(lambda c: app.session_list.rows(c, session_id, {}))
        session_id = [row["session_id"] for row in rows if row["run"] == run]
    return await page_of(request).summaries.of(session_id)


Seq = Annotated[int | None, Query(ge=1, le=MAX_INTEGER, description="The state after this event; default: the last.")]

BranchNumber = Annotated[
    int | None, Query(ge=0, le=MAX_INTEGER, description="A branch's number; default: that of the newest turn.")
]


@route.for_the_page("/sessions/{session_id}", of_run="session")
async def session(request: Request, session_id: SessionId, seq: Seq = None) -> object:
    """A session in any state, after event `seq`, the checkpoints that have it now, and, without `seq`, its budgets."""
    app = request.services
    view = await app.views.at(session_id, seq)
    has_checkpoints = "checkpoints" in app.features
    pins = await app.features["checkpoints"].of_session(session_id) if has_checkpoints else []
    if request.head.token_run is not None:  # those of the whole store are the operator's
        pins = [one for one in pins if one.run == request.head.token_run]
    budgets: dict[str, Any] = {"budgets": [], "limit": None}
    if seq is None and "budgets" in app.features:
        # The view is of a damaged log too.
        with contextlib.suppress(SessionUnreadable):
            live = await app.cache.get(session_id)
            budgets |= {} if live is None else await app.features["budgets"].fields(live.session)
    return {**view, "checkpoints": pins, **budgets}


MAX_TURN = 2**30


TurnStart = Annotated[int, Query(ge=1, le=MAX_TURN, description="A turn's number, from 1.")]
TurnLimit = Annotated[int, Query(ge=1, le=MAX_TURNS, description=LIMIT)]


@route.for_the_page("/sessions/{session_id}/actions", of_run="session")
async def actions(
    request: Request, session_id: SessionId, start: TurnStart = 1, limit: TurnLimit = MAX_TURNS
) -> object:
    """What each of these turns did and what its request brought, in lines."""
    return await page_of(request).turns.actions(session_id, start, limit)


@route.for_the_page("/sessions/{session_id}/turns", of_run="session")
async def turn_messages(
    request: Request,
    session_id: SessionId,
    start: TurnStart = 1,
    limit: TurnLimit = MAX_TURNS,
    whole: Annotated[bool, Query(description="Do not shorten long messages.")] = False,
) -> object:
    """The own messages of the first of these turns; of one in flight here, its request's."""
    return await page_of(request).turns.messages(session_id, start, limit, whole=whole)


@route.for_the_page("/sessions/{session_id}/find", of_run="session")
async def find(
    request: Request,
    session_id: SessionId,
    text: Annotated[
        str, Query(min_length=1, max_length=200, pattern=NO_NUL, description="The text, in upper or lower case.")
    ],
) -> object:
    """The turns whose own messages have a text."""
    return await page_of(request).turns.find(session_id, text)


@route.for_the_page("/sessions/{session_id}/conversation", of_run="session")
async def conversation(
    request: Request,
    session_id: SessionId,
    seq: Seq = None,
    turn: Annotated[int | None, Query(ge=1, le=MAX_INTEGER, description="A turn's number, from 1.")] = None,
    branch: BranchNumber = None,
) -> object:
    """The messages up to a turn, live or discarded, or up to a branch's newest."""
    return await Conversations(request.services.database).at(session_id, seq, turn, branch)


@route.for_the_page("/sessions/{session_id}/tokens", of_run="session")
async def tokens(
    request: Request,
    session_id: SessionId,
    seq: Seq = None,
    branch: BranchNumber = None,
    start: Annotated[int, Query(ge=0, le=MAX_INTEGER, description="Index of the first token.")] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_TOKENS, description=LIMIT)] = 2000,
    sampled: Annotated[bool, Query(description="Only sampled tokens.")] = False,
    outline: Annotated[bool, Query(description="Also the whole row's scales and least likely tokens.")] = False,
) -> object:
    """A branch's tokens, as in an export."""
    asked = Asked(start, limit, sampled, outline)
    return await page_of(request).tokens.at(session_id, seq, branch, asked)


_KEY = rf"{ID[1:-1]}(@\d{{1,9}})?"
Key = Annotated[str, Field(pattern=f"^{_KEY}$")]
KeyAndTurn = Annotated[str, Field(pattern=rf"^{_KEY}/\d{{0,9}}$")]


@route.for_the_page("/rollouts", of_run="header")
async def rollouts(
    request: Request,
    rollout: Annotated[
        list[Key], Query(min_length=1, max_length=MAX_KEYS, description="Ids of sessions, or `id@branch`.")
    ],
    order: Annotated[
        Order, Query(description="`contrast`: the best and the worst first, if rewards differ.")
    ] = "contrast",
    start: Annotated[int, Query(ge=0, le=MAX_INTEGER, description="Index of the first one that is shown.")] = 0,
) -> object:
    """Rollouts side by side: their steps in rows, aligned with the first one's."""
    keys = list(dict.fromkeys(rollout))
    return await compare(request.services.database, keys, order, start, request.head.token_run)


@route.for_the_page("/rollouts/texts", of_run="header")
async def rollouts_texts(
    request: Request,
    step: Annotated[
        list[KeyAndTurn],
        Query(
            min_length=1,
            max_length=COLUMNS,
            description="A rollout and its turn, `id@branch/7`; turn 0 is the task; without a turn there is no step.",
        ),
    ],
) -> object:
    """The whole texts of a row of these rollouts, in parts: what is not in the first one's is marked."""
    app, run = request.services, request.head.token_run
    if run is not None:
        for each in step:
            await require_own(app, parted(each.partition("/")[0])[0], run)
    return await step_texts(app.database, step)


@route.for_the_page("/exports", of_run="query")
async def preview_export(request: Request, query: Annotated[ExportParameters, Query()]) -> object:
    """What `/export` with the same parameters would contain, and why the others are left out; paged."""
    return await page_of(request).previews.of(query, query.cursor)
