"""How the gateway's routes say what is wrong: `{"error": text}`, and 422 `{"detail": […]}` for a parameter."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from app.api.error_handlers import error_reply
from app.api.state import services
from app.errors import AppError
from app.logs import request_id


class GatewayRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def told(request: Request) -> Response:
            try:
                return await handle(request)
            except AppError as error:
                status, headers, _ = await error_reply(services(request), None, error, request_id())
                return JSONResponse({"error": str(error)}, status, dict(headers))
            except RequestValidationError as error:
                return JSONResponse({"detail": jsonable_encoder(error.errors())}, 422)

        return told
