"""Web pages of other origins: which may use the server, and that browsers are told so."""

from __future__ import annotations

import httpx
import pytest
from running_server import Running, served

from foretoken.server.config import ServerSettings

PAGE = "https://chat.example"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}


def cors(answer: httpx.Response) -> dict[str, str]:
    """What an answer says to a browser about other origins."""
    return {name: value for name, value in answer.headers.items() if name.startswith("access-control-")}


def test_pages_of_allowed_origins_can_use_the_server() -> None:
    with served(api_keys=("secret",), allowed_origin=(PAGE,)) as running:
        path, key = "/v1/completions", {"Authorization": "Bearer secret"}
        answer = running.client.options(path, headers={"Origin": PAGE, **PREFLIGHT})
        assert answer.status_code == 200, "a preflight has no key"
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in answer.headers["access-control-allow-headers"]
        body = {"model": "builtin", "prompt": "x", "max_tokens": 1}
        for headers, status in ((key, 200), ({}, 401)):
            answer = running.client.post(path, json=body, headers={"Origin": PAGE, **headers})
            assert answer.status_code == status and answer.headers["access-control-allow-origin"] == PAGE
            assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
        other = {"Origin": "https://evil.example"}
        refused = running.client.options(path, headers={**other, **PREFLIGHT})
        assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers
        answer = running.client.post(path, json=body, headers={**other, **key})
        assert "access-control-allow-origin" not in answer.headers


def test_pages_on_the_internet_can_use_a_server_of_a_private_network() -> None:
    """Chromium asks for that in the preflight; an origin that is not allowed gets no leave."""
    private = {**PREFLIGHT, "Access-Control-Request-Private-Network": "true"}
    with served(allowed_origin=(PAGE,)) as running:
        answer = running.client.options("/v1/chat/completions", headers={"Origin": PAGE, **private})
        assert answer.status_code == 200 and answer.headers["access-control-allow-private-network"] == "true"
        refused = running.client.options("/v1/chat/completions", headers={"Origin": "https://evil.example", **private})
        assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers


def test_pages_can_read_the_id_of_anthropics_routes() -> None:
    body = {"model": "builtin", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    with served(allowed_origin=(PAGE,)) as running:
        answer = running.client.post("/v1/messages", json=body, headers={"Origin": PAGE})
        exposed = answer.headers["access-control-expose-headers"].lower().split(", ")
        assert answer.headers["request-id"] and "request-id" in exposed


def test_all_origins() -> None:
    body = {"model": "builtin", "prompt": "x", "max_tokens": 2, "stream": True}
    with served(allowed_origin=("*",)) as running:
        answer = running.client.post("/v1/completions", json=body, headers={"Origin": PAGE})
        assert answer.headers["access-control-allow-origin"] == "*" and "[DONE]" in answer.text


def test_pages_of_other_origins_can_read_what_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken on purpose")

    with served(allowed_origin=(PAGE,)) as running:
        monkeypatch.setattr("foretoken.server.info.json_bytes", broken)
        answer = running.client.post("/tokenize", json={"prompt": "x"}, headers={"Origin": PAGE, "X-Request-Id": "a-1"})
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
        assert answer.headers["access-control-allow-origin"] == PAGE and answer.headers["x-request-id"] == "a-1"
        monkeypatch.undo()
        assert running.client.post("/tokenize", json={"prompt": "x"}).status_code == 200


def test_no_other_origin_by_default(server: Running) -> None:
    answer = server.client.options("/v1/completions", headers={"Origin": PAGE, **PREFLIGHT})
    assert answer.status_code == 405 and not cors(answer)
    assert not cors(server.client.get("/v1/models", headers={"Origin": PAGE}))


@pytest.mark.parametrize(
    "origin",
    ["https://chat.example/", "https://Chat.example", "chat.example", "", "https://a.example,https://b.example"],
)
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(ValueError, match="allowed_origin must be"):
        ServerSettings(allowed_origin=("*", origin))
