"""The FastAPI application, the same under uvicorn and under Ray."""

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

# PyTorch caches a compiled oneDNN primitive for every number of rows and weight shape, 0.4 to 0.6 MB each, up to 1,024
# of them.  Changing batch sizes fill the cache, so memory would grow for hours.  An evicted primitive is compiled again
# in half a millisecond.  Both caches read their variable on first use.  A value that the user has set is kept.
for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_name, "256")


def create_app(settings: ServerSettings, serving: Serving | None = None) -> FastAPI:
    """Create the application, which loads its model on startup; until then ``/ready`` answers 503.  Pass its state
    ``serving`` to watch it from outside."""
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
    app.add_middleware(Gate, settings=settings, slots=state.slots, failed=state.metrics.failed, admit=state.admit)
    app.add_middleware(across_origins, settings=settings)
    return app
