"""The greeting of a server that has started names the page for this kind of model and a curl that works."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

import pytest
from running_server import Running, served
from test_contract import make_templated

from foretoken.server.config import ServerSettings
from foretoken.server.lifecycle import bound, greeting, listener
from foretoken.server.pages import FOLDER, PATHS


@pytest.fixture(scope="module")
def templated() -> Iterator[Running]:
    with served(make_templated) as running:
        yield running


def sent(running: Running) -> tuple[str, dict[str, object]]:
    """Path and body of the curl that is printed, as a shell would read it; it must succeed."""
    text = greeting(running.serving.settings, running.serving.is_chat)
    (line,) = [line for line in text.splitlines() if line.strip().startswith("curl ")]
    words = shlex.split(line)
    path, body = words[1].removeprefix(running.url), json.loads(words[words.index("-d") + 1])
    answer = running.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return path, body


def test_the_curl_is_a_chat_where_there_is_a_template(server: Running, templated: Running) -> None:
    path, body = sent(templated)
    assert path == "/v1/chat/completions" and body["messages"] == [{"role": "user", "content": "Hello"}]
    path, body = sent(server)
    assert path == "/v1/completions" and body["prompt"] == "def fib(n):"


def test_the_curl_survives_a_shell() -> None:
    text = greeting(ServerSettings(served_name="it's mine", api_keys=("secret",)), is_chat=True)
    line = next(line for line in text.splitlines() if "curl" in line)
    words = shlex.split(line)
    assert json.loads(words[-1])["model"] == "it's mine"
    assert "Authorization: Bearer KEY" in words and "secret" not in text


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        (ServerSettings(host="::1"), "http://[::1]:8000"),
        (ServerSettings(root_path="/x/"), "http://127.0.0.1:8000/x"),
    ],
)
def test_the_address_can_be_called(settings: ServerSettings, url: str) -> None:
    text = greeting(settings)
    assert f" {url} (page at {url}/)" in text and f"curl {url}/v1/completions" in text


def test_the_port_that_the_system_has_chosen_is_told() -> None:
    with listener(ServerSettings(port=0)) as sock:
        port = sock.getsockname()[1]
        assert port and f"http://127.0.0.1:{port}/" in greeting(bound(ServerSettings(port=0), sock))


def test_spec_says_whether_there_is_a_template(server: Running, templated: Running) -> None:
    assert templated.client.get("/v1/spec").json()["chat_template"] is True
    assert server.client.get("/v1/spec").json()["chat_template"] is False


def test_the_pages_files_are_served(server: Running) -> None:
    assert server.client.get("/").text == (FOLDER / "index.html").read_text(encoding="utf-8")
    for path in PATHS - {"/"}:
        answer = server.client.get(path)
        assert answer.status_code == 200 and answer.headers["cache-control"] == "no-cache"
        assert answer.headers["content-type"].startswith("text/css" if path.endswith(".css") else "text/javascript")
        assert answer.headers["content-security-policy"].startswith("default-src 'self'")
