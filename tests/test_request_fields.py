"""The table of request fields, and all that is made of it: requests, lines, commands, bodies, defaults of a model."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import foretoken
from foretoken import options
from foretoken.cli.batch import read_jobs
from foretoken.cli.options import Common, common_parameters
from foretoken.core.sampling import NO_FILTERS, Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.loading.generation_defaults import NEUTRAL, RANGES
from foretoken.options import FIELDS, Field, Range, make_request

PLAIN = {name: field for name, field in FIELDS.items() if field.kind is not None}
OTHER = {bool: True, int: 2, float: 0.5, str: "x"}


def test_the_table_has_what_can_be_asked() -> None:
    names = {"LogitsProcessor": Any, "OutputRule": Any, "Request": Any}
    assert set(get_type_hints(options.Options, localns=names)) == set(FIELDS)
    params = {field.name: field for field in dataclasses.fields(SamplingParams)}
    assert {name for name, field in FIELDS.items() if field.sampling} == set(params) - {"logit_bias", "processors"}
    for name, field in FIELDS.items():
        if field.sampling:
            assert params[name].default == field.default, name


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.sampling])
def test_the_pipeline_knows_every_sampling_parameter(name: str) -> None:
    """One that its recipe left out would share distributions with its neighbours in a batch."""
    usual = Sampler(SamplingParams(temperature=1.0))
    sampler = Sampler(SamplingParams(**{"temperature": 1.0, name: OTHER[FIELDS[name].kind or float]}))
    assert sampler.recipe != usual.recipe and usual.context_free and not usual.cuts
    assert sampler.cuts is FIELDS[name].filters
    assert sampler.context_free is (FIELDS[name].filters or name == "temperature")


def test_a_new_filter_is_a_field_and_a_row(tmp_path: Path) -> None:
    """As ``docs/engine.md`` says, in a copy of the package."""
    package = Path(foretoken.__file__).parent
    shutil.copytree(package, tmp_path / "foretoken", ignore=shutil.ignore_patterns("zoo", "__pycache__"))
    core = tmp_path / "foretoken" / "core"
    for name, old, new in (
        ("sampling.py", "    min_p: float = 0.0\n", "    top_a: float = 0.0\n"),
        ("filters.py", "    min_p: float = 0.0\n", "    top_a: float = 0.0\n"),
        (
            "filters.py",
            "        if self.min_p > 0:\n",
            "        if self.top_a > 0:\n            return ids[:1], weights[:1] * 0 + 1\n",
        ),
        ("fields.py", '    "min_p": _drawn(', '    "top_a": _drawn(float, 0.0, filters=True),\n'),
    ):
        text = (core / name).read_text()
        assert old in text
        (core / name).write_text(text.replace(old, new + old, 1))
    code = """
import torch
from foretoken.core.sampling import Sampler, SamplingParams
usual, sampler = (Sampler(SamplingParams(temperature=1.0, top_a=value)) for value in (0.0, 1.0))
print(sampler.distribution(torch.zeros(3), [0]).tolist(), sampler.cuts, sampler.recipe != usual.recipe)
"""
    path = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True, check=False)
    assert ran.stdout == "[1.0, 0.0, 0.0] True True\n", ran.stderr


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_value_goes_into_the_request_as_it_is(name: str) -> None:
    field = PLAIN[name]
    value = OTHER[field.kind] if field.kind is not None else None
    request: Any = make_request([0], None, **{"temperature": 1.0, name: value})  # type: ignore[misc]
    assert getattr(request.params if field.sampling else request, name) == value
    owner = request.params if field.sampling else request
    usual = getattr(SamplingParams() if field.sampling else Request([0]), name)
    assert usual == field.default and getattr(owner, name) != usual


def test_ranges() -> None:
    assert 0 in Range(0, 1) and 1 in Range(0, 1) and 1.5 not in Range(0, 1) and -1 not in Range(0, 1)
    assert 0 not in Range(0, 1, above=True) and 1 in Range(0, 1, above=True)
    assert 1e300 in Range() and -1e300 in Range()


def test_commands_have_the_fields_with_a_help() -> None:
    parameters = {parameter.name: parameter for parameter in common_parameters()}
    assert list(parameters)[-1] == "allow_lossy"
    for name in options.COMMAND_LINE:
        assert parameters[name].default == FIELDS[name].default
        assert parameters[name].annotation.__metadata__[0].help == FIELDS[name].help
    common = Common()
    assert common.sampling == {name: FIELDS[name].default for name in options.COMMAND_LINE}
    assert common.filters == NO_FILTERS and common.request_options == {"max_new_tokens": 64, "seed": None}


def test_a_line_has_the_fields_that_it_may_have(tmp_path: Path) -> None:
    file = tmp_path / "jobs.jsonl"
    for name, field in FIELDS.items():
        file.write_text(json.dumps({"prompt": "x", name: 1}) + "\n")
        if field.in_lines:
            assert read_jobs(file, {})[0].options == {name: 1}
        else:
            with pytest.raises(ValueError, match=f"unknown field '{name}'"):
                read_jobs(file, {})


def test_a_body_has_the_fields_that_are_served() -> None:
    schemas = pytest.importorskip("foretoken.server.schemas", reason="the extra 'serve' is not installed")
    for body in (schemas.CompletionRequest, schemas.ChatRequest):
        for name, field in FIELDS.items():
            if field.served is not None:
                assert body.model_fields[name].default is None, name
    for name, low, high in (
        ("temperature", -0.1, 2.1),
        ("top_p", 0, 1.1),
        ("min_tokens", -1, 2**31),
        ("top_k", -2, 0.5),
    ):
        for value in (low, high):
            with pytest.raises(ValueError, match=name):
                schemas.CompletionRequest(model="m", prompt="x", **{name: value})
    with pytest.raises(LookupError, match="stop is not an option of server requests"):
        schemas.option("stop")


def test_a_new_row_is_served_and_written_in_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the table has to know it."""
    schemas = pytest.importorskip("foretoken.server.schemas", reason="the extra 'serve' is not installed")
    table = {**FIELDS, "typical_p": Field(float, 1.0, sampling=True, served=Range(0, 1, above=True))}
    monkeypatch.setattr(schemas, "FIELDS", table)
    body = schemas.with_options(schemas.Body)
    assert body(typical_p=0.5).typical_p == 0.5 and body().typical_p is None
    with pytest.raises(ValueError, match="typical_p"):
        body(typical_p=0)


def test_what_a_model_may_say() -> None:
    sampling = ["temperature", "top_k", "top_p", "min_p", "repetition_penalty"]
    assert list(RANGES) == [*sampling, "max_new_tokens", "min_tokens"]
    assert NEUTRAL["temperature"] == 1.0 and NEUTRAL["top_k"] == 0 and NEUTRAL["top_p"] == 1.0
