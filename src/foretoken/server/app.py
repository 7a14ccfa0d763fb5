"""The application: the same under uvicorn and under Ray."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

import foretoken
from foretoken.server import chat, completions, errors, info, messages, pages, responses
from foretoken.server.config import ServerSettings
from foretoken.server.limits import Gate, across_origins
from foretoken.server.serving import Serving

# PyTorch keeps a compiled oneDNN product for every number of rows and shape of weight, .4 to .6 MB each, up to 1,024 of
# them: batches that come and go meet all numbers, so a server would grow for hours.  A product that was given up is
# compiled again in half a millisecond.  Both caches read this when they are first used; a user's own setting stays.
for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_name, "256")


def create_app(settings: ServerSettings, serving: Serving | None = None) -> FastAPI:
    """An application that begins to load its model when it is started; until then ``/ready`` says 503.  Its state is
    ``serving``, where somebody else watches it."""
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
    )
    app.state.serving = state
    errors.install(app, state.metrics.failed)
    app.include_router(info.router)
    app.include_router(pages.router)
    app.include_router(completions.router)
    app.include_router(chat.router)
    app.include_router(messages.router)
    app.include_router(responses.router)
    app.add_middleware(Gate, settings=settings, places=state.places, failed=state.metrics.failed, admit=state.admit)
    app.add_middleware(across_origins, settings=settings)
    return app
