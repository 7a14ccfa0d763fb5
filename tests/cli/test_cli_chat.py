"""``foretoken chat``: turns, commands, templates, a full context, Ctrl-C."""

from __future__ import annotations

import io
from typing import Any

import pytest

import foretoken as ft
from foretoken.cli.chat import Session
from foretoken.engine.loop import Engine

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.0}


@pytest.fixture
def session(target: str) -> Session:
    return Session(ft.load(target, drafter="ngram"), dict(OPTIONS))


def test_a_piped_conversation(run: Any, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["/stats", "add a and b", "", "/stats", "/nosuch", "/reset", "add a and b", "/quit", "never read"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    result = run("chat", "--target", target, "--max-new-tokens", "12")
    assert result.code == 0
    assert "is not trained for chat" in result.err
    assert "nothing generated yet" in result.out
    assert "12 tokens" in result.out
    assert "unknown command /nosuch" in result.out
    assert "(forgotten)" in result.out
    llm = ft.load(target, drafter=None)
    answer = llm.generate("User: add a and b\nAssistant:", max_new_tokens=12, stop="\nUser:").text
    assert result.out.count(answer.lstrip()) == 2  # after /reset the same question gets the same answer


def test_the_end_of_the_input_ends_the_chat(run: Any, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert run("chat", "--target", target, "--max-new-tokens", "4").code == 0


def test_every_turn_sees_the_ones_before(session: Session) -> None:
    session.handle("one")
    session.handle("two")
    assert [m["role"] for m in session.messages] == ["user", "assistant", "user", "assistant"]
    answer = session.messages[1]["content"]
    session.messages.append({"role": "user", "content": "three"})
    text = session.llm.tokenizer.decode(session._prompt())
    assert text.startswith(f"User: one\nAssistant: {answer}\nUser: two\n") and text.endswith("User: three\nAssistant:")


def test_every_answer_has_a_seed_of_its_own(target: str) -> None:
    llm = ft.load(target, drafter="ngram")

    def answers(seed: int) -> list[str]:
        session = Session(llm, {**OPTIONS, "temperature": 1.0, "seed": seed})
        for line in ("one", "/reset", "one", "/reset", "one"):
            session.handle(line)
            if session.messages:
                said.append(session.messages[-1]["content"])
        return said[-3:]

    said: list[str] = []
    first = answers(2**64 - 2)  # the seed behind the largest one is 0
    assert len(set(first)) == 3
    assert answers(2**64 - 2) == first and answers(2**64 - 1)[:2] == first[1:]
    options = {**OPTIONS, "temperature": 1.0, "stop": ["\nUser:"]}
    want = [llm.generate("User: one\nAssistant:", seed=seed, **options).text.strip() for seed in (2**64 - 2, 0)]
    assert [first[0], first[2]] == want


def test_a_chat_template_is_used(session: Session) -> None:
    tokenizer = session.llm.tokenizer
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    tokenizer.chat_template = template
    session.messages.append({"role": "user", "content": "hi"})
    assert tokenizer.decode(session._prompt()) == "<user>hi<assistant>"
    session.messages.clear()
    session.handle("hi")
    assert session.messages[1]["role"] == "assistant"


def test_the_oldest_turns_are_forgotten_when_the_context_is_full(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(8):
        session.handle("a message that is long enough to fill the context in some turns")
    assert "forgot the oldest" in capsys.readouterr().err
    assert len(session.messages) < 16
    assert session.messages[0]["role"] == "user"


def test_a_limit_as_long_as_the_context_forgets_nothing(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    llm = ft.load(target, drafter=None)
    long_session = Session(llm, {**OPTIONS, "max_new_tokens": llm.target.context_length})
    long_session.messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    long_session.handle("three")
    assert "forgot" not in capsys.readouterr().err
    assert [message["content"] for message in long_session.messages[:3]] == ["one", "two", "three"]


def test_a_message_beyond_the_context_is_refused_and_the_chat_goes_on(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    session.handle("x" * 2000)
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert session.messages == []
    session.handle("short")
    assert len(session.messages) == 2


def test_a_message_beyond_the_context_erases_nothing(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("one", "two"):
        session.handle(line)
    before = list(session.messages)
    capsys.readouterr()
    session.handle("x" * 2000)
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "forgot" not in err
    assert session.messages == before and len(before) == 4


def test_ctrl_c_ends_the_answer_and_not_the_chat(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step, calls = Engine.step, []

    def interrupted(engine: Engine) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    session.handle("first")
    assert "(stopped)" in capsys.readouterr().out
    partial = session.messages[1]["content"]
    session.messages.clear()
    session.handle("first")
    whole = session.messages[1]["content"]
    assert whole.startswith(partial) and len(whole) > len(partial)
    assert not session.llm.engine.busy


@pytest.mark.parametrize("place", ["_fitting_prompt", "_count"])
def test_ctrl_c_around_an_answer_does_not_end_the_chat_of_a_terminal(
    run: Any, target: str, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    original, calls = getattr(Session, place), []

    def interrupted(session: Session, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(session, *args)

    monkeypatch.setattr(Session, place, interrupted)
    monkeypatch.setattr("sys.stdin", Terminal())
    lines = iter(["one", "two", "three", "/history"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines, "/quit"))
    result = run("chat", "--target", target, "--max-new-tokens", "4")
    assert result.code == 0
    asked = [line[6:] for line in result.out.splitlines() if line.startswith("user: ")]
    assert asked == (["one", "two", "three"] if place == "_count" else ["one", "three"])
    assert result.out.count("assistant: ") == len(asked)


def test_ctrl_c_at_the_prompt_of_a_terminal_shows_how_to_leave(
    run: Any, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    answers = iter([KeyboardInterrupt(), "/quit"])

    def typed(prompt: str) -> str:
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", typed)
    result = run("chat", "--target", target)
    assert result.code == 0
    assert "/quit leaves" in result.out
