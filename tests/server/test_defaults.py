"""Fields that a client leaves out have the values of the model's generation config."""

from __future__ import annotations

import pytest
from running_server import make_llm, served

from foretoken.llm import Llm
from foretoken.loading.generation_defaults import GenerationDefaults
from foretoken.server.config import ServerSettings

OWN = {"temperature": 0.6, "top_k": 5, "repetition_penalty": 1.2, "max_new_tokens": 7, "min_tokens": 11}


def with_defaults(settings: ServerSettings) -> Llm:
    llm = make_llm(settings)
    llm.defaults = GenerationDefaults(OWN, "generation_config.json")
    return llm


def greedy(settings: ServerSettings) -> Llm:
    llm = make_llm(settings)
    llm.defaults = GenerationDefaults({"temperature": 0.0}, "generation_config.json")
    return llm


def test_what_a_client_leaves_out() -> None:
    with served(with_defaults) as server:
        body = {"prompt": "def fib(n):", "max_tokens": 12, "seed": 4, "ignore_eos": True}
        left_out = server.post("/v1/completions", **body).json()["choices"][0]["text"]
        named = {"temperature": 0.6, "top_k": 5, "repetition_penalty": 1.2}
        assert left_out == server.complete(**body, **named)["choices"][0]["text"]
        other = {"temperature": 1, "top_k": 0, "repetition_penalty": 1}
        assert left_out != server.complete(**body, **other)["choices"][0]["text"]
        chat = {"messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True}
        answer = server.post("/v1/chat/completions", **chat).json()
        assert answer["usage"]["completion_tokens"] == 7
        assert server.post("/v1/chat/completions", **chat, max_tokens=9).json()["usage"]["completion_tokens"] == 9
        defaults = server.client.get("/v1/spec").json()["sampling_defaults"]
        assert defaults == {"values": OWN, "source": "generation_config.json"}


@pytest.mark.parametrize("seed", [1, 2])
def test_a_model_that_is_greedy_by_itself(seed: int) -> None:
    with served(greedy) as server:
        answer = server.post("/v1/completions", prompt="def fib(n):", max_tokens=8, seed=seed).json()
        assert answer["choices"][0]["text"] == server.complete()["choices"][0]["text"]
        refused = server.post("/v1/completions", prompt="def fib(n):", n=2)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "n"
