"""The application: the same under uvicorn and under Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

import foretoken
from foretoken.server import chat, completions, errors, info, messages, pages, responses
from foretoken.server.config import Settings
from foretoken.server.limits import Gate
from foretoken.server.serving import Serving


def create_app(settings: Settings, serving: Serving | None = None) -> FastAPI:
    """An application that begins to load its model when it is started; until then ``/ready`` says 503.

    Args:
        settings: how it is set up.
        serving: its state, where somebody else watches it.
    """
    state = serving or Serving(settings)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.create_task(state.start())
        try:
            yield
        finally:
            if not loading.done():
                await loading
            await state.stop(0.0 if state.draining else settings.shutdown_timeout)

    app = FastAPI(
        title="foretoken",
        version=foretoken.__version__,
        lifespan=life,
        docs_url=None,
        redoc_url=None,
        root_path=settings.root_path.rstrip("/"),
    )
    app.state.serving = state
    errors.install(app)
    app.include_router(info.router)
    app.include_router(pages.router)
    app.include_router(completions.router)
    app.include_router(chat.router)
    app.include_router(messages.router)
    app.include_router(responses.router)
    app.add_middleware(Gate, settings=settings, places=state.places, admit=state.admit)
    return app
