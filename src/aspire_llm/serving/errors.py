"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from aspire_llm.errors import UserError

logger = logging.getLogger("aspire_llm.serving")

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
LONGEST_VALUE = 80  # characters of a refused value in a message


class ApiError(Exception):
    """Ends a request with a status and a body of the one shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        return error_body(self.status, self.message, self.param, self.code)

    def response(self) -> Response:
        return error_response(self.status, self.message, self.param, self.code, self.headers)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    # ASCII, since a message may quote text that is not valid Unicode
    content = json.dumps(error_body(status, message, param, code), ensure_ascii=True)
    return Response(content, status_code=status, headers=dict(headers or {}), media_type="application/json")


def of_user_error(error: UserError) -> ApiError:
    code = "context_length_exceeded" if "max_model_len" in str(error) else None
    return ApiError(400, str(error), param=error.parameter, code=code)


def of_validation_error(error: RequestValidationError) -> ApiError:
    """The first fault in a body or a query: parameter, value, what is allowed."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, UserError):
        return of_user_error(cause)
    if isinstance(cause, ApiError):
        return cause
    name = _place(first, error.body)
    if first["type"] in ("json_invalid", "json_type"):
        reason = cause if isinstance(cause, str) else first["msg"]
        return ApiError(400, f"the body is not JSON: {reason}", code="invalid_json")
    if first["type"] == "extra_forbidden":
        return ApiError(
            400, f"unknown parameter {name!r} = {_brief(first['input'])}", param=name, code="unknown_parameter"
        )
    if first["type"] == "missing":
        message = f"parameter {name!r} is missing" if name else "a JSON body is needed"
        return ApiError(400, message, param=name, code="missing_required_parameter")
    # a union reports what is wrong with each of its kinds
    same = [e for e in error.errors() if _place(e, error.body) == name and e["input"] is first["input"]]
    wanted = " or ".join(dict.fromkeys(map(_wanted, same)))
    what = f"{name} = {_brief(first['input'])}" if name else f"the body {_brief(first['input'])}"
    return ApiError(400, f"{what}: must be {wanted}", param=name)


def _wanted(error: dict[str, Any]) -> str:
    return str(error["msg"]).removeprefix("Input should be ").removeprefix("Value error, ")


def _place(error: dict[str, Any], body: Any) -> str | None:
    """The field at fault, as a path through the body; without what pydantic adds to tell a union's kinds apart."""
    parts = []
    at = body
    for part in error["loc"][1:]:  # after "body", "query" or "path"
        if (isinstance(at, dict) and part in at) or (isinstance(at, list) and isinstance(part, int) and part < len(at)):
            at = at[part]
            parts.append(str(part))
        elif error["type"] == "missing" and part == error["loc"][-1]:
            parts.append(str(part))
    return ".".join(parts) or None


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


def install(app: FastAPI) -> None:
    """Give every error of the app the one shape. Faults of ours go on to the middleware around it."""

    @app.exception_handler(ApiError)
    async def api(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(UserError)
    async def user(_: Request, error: UserError) -> Response:
        return of_user_error(error).response()

    @app.exception_handler(RequestValidationError)
    async def validation(_: Request, error: RequestValidationError) -> Response:
        return of_validation_error(error).response()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if error.status_code == 404:
            message = f"{request.method} {request.url.path}: there is no such path"
        elif error.status_code == 405:
            message = f"{request.method} {request.url.path}: the path does not allow this method"
        return error_response(error.status_code, message, headers=error.headers)
