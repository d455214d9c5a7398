"""What operators and probes ask: health, readiness, version, models, metrics, aborts."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry
from starlette.responses import JSONResponse, Response

from aspire_llm import __version__
from aspire_llm.serving.errors import ApiError
from aspire_llm.serving.prometheus import CONTENT_TYPE, exposition
from aspire_llm.serving.protocol import AbortRequest
from aspire_llm.serving.state import RETRY_SECONDS, ServerState, state_of

router = APIRouter()


@router.get("/health", summary="200 from when the model is loaded until the engine ends")
async def health(request: Request) -> Response:
    state = state_of(request)
    if state.draining and not state.failed:
        return JSONResponse({"status": "draining"})  # it still serves what runs: no reason to be killed
    return _status(state)


@router.get("/ready", summary="200 while new requests are taken")
async def ready(request: Request) -> Response:
    return _status(state_of(request))


def _status(state: ServerState) -> Response:
    if (trouble := state.trouble) is not None:
        raise ApiError(503, trouble, headers={} if state.failed else {"Retry-After": RETRY_SECONDS})
    return JSONResponse({"status": "ok"})


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/metrics", summary="For Prometheus")
async def metrics(request: Request) -> Response:
    registry: CollectorRegistry = request.app.state.registry
    return Response(exposition(registry), media_type=CONTENT_TYPE)


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    state = state_of(request)
    return {"object": "list", "data": [_model(state, name) for name in state.model_names]}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    state = state_of(request)
    state.check_model(name)
    return _model(state, name)


def _model(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "aspire-llm",
        "root": state.llm.config.model,
        "parent": None,
        "max_model_len": state.llm.max_model_len,
    }


@router.post("/v1/abort", summary="End a running request")
async def abort(body: AbortRequest, request: Request) -> dict[str, list[str]]:
    """By the id of its response or its X-Request-Id. It ends with finish_reason "abort"."""
    aborted = await state_of(request).abort(body.request_id)
    if not aborted:
        raise ApiError(404, f"no request {body.request_id!r} is running", param="request_id", code="request_not_found")
    return {"aborted": aborted}
