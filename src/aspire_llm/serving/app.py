"""The ASGI application."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from aspire_llm import __version__
from aspire_llm.engine.async_llm import AsyncLLM
from aspire_llm.engine.metrics import Metric
from aspire_llm.serving import admin, chat, completions, errors, responses, tokenize
from aspire_llm.serving.live import LiveMonitor, live_router
from aspire_llm.serving.middleware import Accounting, BodyLimit, KeyCheck, Turns
from aspire_llm.serving.prometheus import HttpCounts, make_registry
from aspire_llm.serving.protocol import ErrorResponse
from aspire_llm.serving.settings import ServerSettings
from aspire_llm.serving.state import ServerState


def create_app(llm: AsyncLLM | None, settings: ServerSettings, monitor: LiveMonitor | None = None) -> FastAPI:
    """An OpenAI-compatible application around an engine.

    llm: None while it is still being loaded; `attach` it later. monitor: the one that the engine's `on_step` feeds; None: no
    live page. The caller shuts the engine down. Raises UserError for settings that cannot be used.
    """
    app = FastAPI(
        title="aspire-llm",
        version=__version__,
        docs_url=None,  # these pages load their scripts from elsewhere
        redoc_url=None,
        root_path=settings.root_path,
    )
    state = ServerState(settings)
    app.state.server = state
    app.state.monitor = monitor

    def engine_metrics() -> tuple[str, list[Metric]] | None:
        llm = state.attached
        return (state.names_of(llm)[0], llm.get_metrics()) if llm is not None else None

    app.state.registry = make_registry(engine_metrics)
    errors.install(app)
    for router in (completions.router, chat.router, responses.router, tokenize.router, admin.router):
        app.include_router(router, responses={"4XX": {"model": ErrorResponse}, "5XX": {"model": ErrorResponse}})
    if monitor is not None:
        app.include_router(live_router(lambda: state.attached, monitor))
    # the last one added is the outermost
    app.add_middleware(Turns)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_size, seconds=settings.read_timeout)
    app.add_middleware(KeyCheck, keys=state.keys)
    if settings.cors_allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_allow_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(Accounting, counts=HttpCounts(app.state.registry))
    if llm is not None:
        attach(app, llm)
    return app


def attach(app: FastAPI, llm: AsyncLLM) -> None:
    """Give the application its engine. On the application's event loop, if that runs."""
    state: ServerState = app.state.server
    state.attach(llm)
