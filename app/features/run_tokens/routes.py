"""Routes that make and end the token of a run."""

from __future__ import annotations

from app.api.parameters import RunName
from app.api.requests import Request
from app.api.routes import NO_CONTENT, WRITE, Routes, json_reply
from app.errors import InvalidRequest
from app.features.run_tokens.run_tokens import TokenNumbers
from turnlog import replies as reply_types

route = Routes("Runs")


@route(
    "POST /runs/{run}/token",
    "Create the run's token, or replace it",
    "admin",
    json_reply(reply_types.RunToken, "The token. Only this reply shows it; the server does not store it."),
    errors=(InvalidRequest, *WRITE),
)
async def make_token(request: Request, run: RunName) -> reply_types.RunToken:
    """A token for everything within the run and nothing outside. It replaces the run's earlier token.

    Another process of the server may take the former token for half a second more.
    """
    if not request.services.tokens.are_needed:
        raise InvalidRequest(
            "a run's token requires TURNLOG_ADMIN_TOKEN, which is not set: the server accepts requests without a token"
        )
    return {"run": run, "token": await _run_tokens(request).make(run)}


@route("DELETE /runs/{run}/token", "Revoke the run's token", "admin", NO_CONTENT, errors=(InvalidRequest, *WRITE))
async def end_token(request: Request, run: RunName) -> None:
    """The run then has no token; it need not have had one."""
    await _run_tokens(request).end(run)


def _run_tokens(request: Request) -> TokenNumbers:
    run_tokens: TokenNumbers = request.services.features["run_tokens"]
    return run_tokens
