"""Information routes: health, models, tokens, counters, and drafting."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

import foretoken
from foretoken.core.bos import ids_with_one_bos
from foretoken.core.conversation import has_template
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.group import GroupDrafter
from foretoken.methods.drafters.known import KnownDrafter
from foretoken.methods.drafters.online import OnlineDrafter
from foretoken.server.errors import RESPONSES, ApiError, bad, shutting_down, still_loading
from foretoken.server.inputs import room_of
from foretoken.server.schemas import DetokenizeRequest, TokenizeRequest
from foretoken.server.serving import Serving
from foretoken.server.templates import Conversation, prompt_of
from foretoken.server.workers import TEXTS, in_thread, json_bytes

router = APIRouter(responses=RESPONSES)


def _serving(http: Request) -> Serving:
    serving: Serving = http.app.state.serving
    return serving


@router.get("/health")
async def health(http: Request) -> dict[str, Any]:
    """Liveness: whether the process should keep running."""
    trouble = _serving(http).trouble
    if trouble is not None:
        raise ApiError(503, trouble, code="unhealthy")
    return {"status": "ok"}


@router.get("/ready")
async def ready(http: Request) -> dict[str, Any]:
    """Readiness: whether requests should be sent here."""
    serving = _serving(http)
    if serving.draining:
        raise shutting_down()
    if serving.trouble is not None:
        raise ApiError(503, serving.trouble, code="unhealthy")
    if not serving.is_loaded:
        raise still_loading()
    return {"status": "ready", "model": serving.settings.name}


@router.get("/version")
async def version() -> dict[str, Any]:
    """The server's release."""
    return {"version": foretoken.__version__}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(http: Request) -> Response:
    """Prometheus counters."""
    return Response(_serving(http).metrics.text(), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models")
async def models(http: Request) -> dict[str, Any]:
    """The served model."""
    served = _model(_serving(http))
    return {"object": "list", "data": [served], "has_more": False, "first_id": served["id"], "last_id": served["id"]}


@router.get("/v1/models/{name:path}")
async def model(name: str, http: Request) -> dict[str, Any]:
    """The served model, by name."""
    serving = _serving(http)
    serving.check_model(name)
    return _model(serving)


def _model(serving: Serving) -> dict[str, Any]:
    """The model object in the formats of OpenAI and Anthropic."""
    return {
        "id": serving.settings.name,
        "object": "model",
        "type": "model",
        "display_name": serving.settings.name,
        "created": serving.started_s,
        "created_at": datetime.fromtimestamp(serving.started_s, UTC).isoformat(),
        "owned_by": "foretoken",
        "root": serving.settings.name,
        "max_model_len": room_of(serving, 0),
    }


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, http: Request) -> Response:
    """Token ids of a text, or of a conversation as the model sees it."""
    serving = _serving(http)
    serving.check_model(body.model)
    headers = serving.note_ignored(body.ignored)
    tokenizer = _tokenizer(serving)
    if (body.prompt is None) == (body.messages is None):
        raise bad("give either prompt or messages", "prompt")
    text, special = body.prompt, body.add_special_tokens is not False
    if text is None:
        options = (body.chat_template_kwargs or {}, body.add_generation_prompt, body.continue_final_message)
        text = await prompt_of(tokenizer, Conversation(body.messages or (), body.tools or (), *options))
        special = not has_template(tokenizer) if body.add_special_tokens is None else body.add_special_tokens
    with_texts, longest = body.return_token_strs, room_of(serving, 0)

    def answer() -> bytes:
        ids = ids_with_one_bos(text, tokenizer, special)
        texts = tokenizer.convert_ids_to_tokens(ids) if with_texts else None
        fields = {"count": len(ids), "max_model_len": longest, "tokens": ids}
        return json_bytes(fields if texts is None else {**fields, "token_strs": texts})

    content = await in_thread(TEXTS, answer, cost=len(text))
    return Response(content, media_type="application/json", headers=headers)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, http: Request) -> JSONResponse:
    """The text of token ids."""
    serving = _serving(http)
    serving.check_model(body.model)
    wide = serving.llm.target.vocab_size
    if body.tokens and max(body.tokens) >= wide:
        raise bad(f"token {max(body.tokens)} is outside the vocabulary of {wide}", "tokens")
    tokenizer = _tokenizer(serving)
    text = await in_thread(TEXTS, lambda: tokenizer.decode(body.tokens), cost=len(body.tokens))
    return JSONResponse({"prompt": text}, headers=serving.note_ignored(body.ignored))


@router.get("/tokenizer_info")
async def tokenizer_info(http: Request) -> dict[str, Any]:
    """Properties of the tokenizer for evaluation tools."""
    serving = _serving(http)
    tokenizer = _tokenizer(serving)
    names = ("eos_token", "bos_token", "pad_token", "unk_token")
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": serving.llm.target.vocab_size,
        "model_max_length": serving.llm.target.context_length,
        "chat_template": getattr(tokenizer, "chat_template", None),
        **{name: None if (token := getattr(tokenizer, name, None)) is None else str(token) for name in names},
    }


def _tokenizer(serving: Serving) -> Any:
    tokenizer = serving.llm.tokenizer
    if tokenizer is None:
        raise bad("this model has no tokenizer")
    return tokenizer


@router.get("/v1/spec")
async def spec(http: Request) -> dict[str, Any]:
    """Drafting configuration, exactness and current state of the engine."""
    serving = _serving(http)
    llm, status = serving.llm, serving.engine.status
    drafter, controller = llm.drafter, llm.engine.controller
    return {
        "model": serving.settings.name,
        "drafter": None if drafter is None else drafter.spec or drafter.name,
        "members": [] if drafter is None else [limits.name for limits in drafter.limits.members],
        "drafters": [] if drafter is None else _drafters(drafter),
        "online": None if drafter is None else _learned(drafter),
        "max_draft_tokens": 0 if drafter is None else drafter.max_depth,
        "verifier": "auto" if llm.engine.verifier is None else llm.engine.verifier.name,
        "controller": None if controller is None else controller.name,
        "lossless": not llm.engine.allow_lossy,
        "chat_template": serving.is_chat,
        "sampling_defaults": {"values": llm.defaults.sampling, "source": llm.defaults.source},
        **llm.describe(),
        "state": dataclasses.asdict(status),
        "memory": llm.memory(),
        "limits": {
            "max_running": serving.settings.max_running,
            "max_queued": serving.settings.max_queued,
            "context_length": llm.target.context_length,
        },
    }


def _drafters(drafter: Drafter) -> list[dict[str, Any]]:
    """Maximum depth and nodes of each drafter that a request may name, and the cost of a level by its size, in target
    calls."""
    if isinstance(drafter, KnownDrafter) and drafter.inner is not None:
        return _drafters(drafter.inner)
    members = drafter.limits.members
    parts = drafter.drafters if isinstance(drafter, GroupDrafter) and members else (drafter,)
    return [
        {
            "name": limits.name,
            "max_depth": limits.max_depth,
            "max_nodes": limits.max_nodes,
            "shape": "tree" if part.traits.draws_trees else "chain",
            "relative_cost": limits.relative_cost,
        }
        for part, limits in zip(parts, members or (drafter.limits,), strict=True)
    ]


def _learned(drafter: Drafter) -> dict[str, Any] | None:
    """Report of an online draft model, wherever in the drafter it is."""
    if isinstance(drafter, OnlineDrafter):
        return drafter.report() or None
    if isinstance(drafter, GroupDrafter):
        return next((report for report in map(_learned, drafter.drafters) if report is not None), None)
    return None
