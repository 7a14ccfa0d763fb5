"""Options made from dataclasses: names, defaults, ranges and help stand in one place, and the object comes back."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from foretoken.cli.settings import FromOptions, with_settings
from foretoken.core.settings import About, setting, settings_of
from foretoken.training.config import AnswerConfig, DistillConfig, Intervals, LmConfig, TrainConfig


@dataclass(frozen=True)
class Inner:
    size: int = setting(3, "Rows of it.", 1, 9)
    kind: str = setting("plain")
    loud: bool = setting(False, "Say more.")
    derived: float = 0.5

    def __post_init__(self) -> None:
        if self.kind == "odd":
            raise ValueError("kind must not be odd")


def app_of(how: FromOptions) -> tuple[typer.Typer, list[dict[str, Any]]]:
    """A command with a group of options between two of its own."""
    seen: list[dict[str, Any]] = []

    def command(*, first: int = 1, inner: Annotated[Any, how], last: str = "z") -> None:
        """Do it."""
        seen.append({"first": first, "inner": inner, "last": last})

    command.__annotations__["inner"] = Annotated[Inner, how]
    command.__annotations__ |= {"first": int, "last": str, "return": None}
    app = typer.Typer()
    app.command()(with_settings(command))
    return app, seen


def test_a_command_is_given_the_object_that_its_options_say() -> None:
    app, seen = app_of(FromOptions())
    assert CliRunner().invoke(app, ["--first", "2", "--size", "7", "--loud", "--last", "y"]).exit_code == 0
    assert CliRunner().invoke(app, []).exit_code == 0
    assert seen == [
        {"first": 2, "inner": Inner(7, "plain", True), "last": "y"},
        {"first": 1, "inner": Inner(), "last": "z"},
    ]


def test_ranges_help_and_place_come_from_the_fields() -> None:
    app, seen = app_of(FromOptions())
    page = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"}).output
    assert "Rows of it. [default: 3]" in page and "1<=x<=9" in page
    assert page.index("--first") < page.index("--size") < page.index("--kind") < page.index("--last")
    assert "--derived" not in page
    assert CliRunner().invoke(app, ["--size", "10"]).exit_code == 2 and not seen


def test_prefixes_and_fixed_values() -> None:
    app, seen = app_of(FromOptions("inner_", omit=("loud",), fixed={"kind": "round"}))
    assert CliRunner().invoke(app, ["--inner-size", "4"]).exit_code == 0
    assert seen[0]["inner"] == Inner(4, "round")
    for missing in ("--size", "--inner-kind", "--inner-loud"):
        assert CliRunner().invoke(app, [missing, "5"]).exit_code == 2


def test_what_the_object_refuses_reaches_the_caller() -> None:
    app, seen = app_of(FromOptions())
    refused = CliRunner().invoke(app, ["--kind", "odd"])
    assert isinstance(refused.exception, ValueError) and "must not be odd" in str(refused.exception) and not seen


def test_settings_are_the_described_fields_in_order() -> None:
    assert {field.name: about for field, about in settings_of(Inner).items()} == {
        "size": About("Rows of it.", 1, 9), "kind": About(), "loud": About("Say more."),
    }  # fmt: skip
    secret = dataclass(type("Secret", (), {"__annotations__": {"key": str}, "key": setting("abc", shown=False)}))
    assert "abc" not in repr(secret())


@pytest.mark.parametrize("kind", [LmConfig, TrainConfig, DistillConfig, AnswerConfig, Intervals])
def test_defaults_lie_within_their_ranges(kind: type) -> None:
    described = settings_of(kind)
    assert described
    for field, about in described.items():
        assert about.low is None or field.default >= about.low, field.name
        assert about.high is None or field.default <= about.high, field.name


@pytest.mark.parametrize(
    ("command", "kind", "without", "prefix"),
    [
        ("lm", LmConfig, {"weight_decay"}, ""),
        ("medusa", TrainConfig, {"warmup", "decay"}, ""),
        ("distill", DistillConfig, {"warmup", "decay"}, ""),
        ("medusa", AnswerConfig, {"seed"}, "answer-"),
        ("medusa", Intervals, set(), ""),
    ],
)
def test_every_setting_of_a_training_is_an_option(
    command: str, kind: type, without: set[str], prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from foretoken.cli.main import main

    assert main(["train", command, "--help"]) == 0
    page = capsys.readouterr().out
    for field in fields(kind):
        option = f"--{prefix}{field.name.replace('_', '-')} "
        assert (option in page) == (field.name not in without), option


def test_every_option_of_every_command_is_explained() -> None:
    """``--help`` explains every option, whoever declares it."""
    from foretoken.cli.main import app

    bare = []
    waiting: list[tuple[str, Any]] = [("foretoken", typer.main.get_command(app))]
    while waiting:
        name, command = waiting.pop()
        waiting += [(f"{name} {part}", inner) for part, inner in getattr(command, "commands", {}).items()]
        options = [option for option in command.params if option.param_type_name == "option" and not option.hidden]
        bare += [f"{name} {option.opts[0]}" for option in options if not option.help]
    assert bare == []


def test_help_shows_text_in_brackets() -> None:
    """Rich takes ``[auto]`` for a style and drops it, and with it the default of an option."""
    from rich.text import Text

    from foretoken.cli.main import app

    waiting: list[tuple[str, Any]] = [("foretoken", typer.main.get_command(app))]
    brackets = []
    while waiting:
        name, command = waiting.pop()
        waiting += [(f"{name} {part}", inner) for part, inner in getattr(command, "commands", {}).items()]
        for parameter in command.params:
            text = getattr(parameter, "help", None) or ""
            unescaped = text.replace("\\[", "[")
            brackets += [unescaped] if "[" in unescaped else []
            assert Text.from_markup(text).plain == unescaped, f"{name} {parameter.name}"
    assert any("[auto]" in text for text in brackets)
