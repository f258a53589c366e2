"""Errors in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

logger = logging.getLogger(__name__)


class ApiError(Exception):
    """A request that is answered with an error."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None
    ) -> None:
        """`status` of the answer; `code` for programs; `param` names the field at fault."""
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        """What the client gets."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }

    def response(self) -> JSONResponse:
        """As an answer."""
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else None
        return JSONResponse(self.body(), self.status, headers)


def misdirected(text: str) -> JSONResponse:
    """The answer to a request for a name that is not this server's."""
    return ApiError(421, text).response()


INTERNAL = ApiError(500, "an error of the server, which its log describes", "internal_error")


def answer_errors(app: FastAPI) -> None:
    """Give every error of `app` this form, whoever raises it."""

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        what = f"{request.method} {request.url.path}: {error.detail}"
        return ApiError(error.status_code, what).response()

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> JSONResponse:
        return INTERNAL.response()  # the server logs the traceback
