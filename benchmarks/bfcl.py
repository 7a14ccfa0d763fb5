"""Calls of tools by BFCL's cases: are they valid, are they the right ones, and how fast.

    foretoken serve MODEL &
    python benchmarks/bfcl.py --data bfcl_eval-2026.3.23-py3-none-any.whl --url http://127.0.0.1:8000 --cases 50

Reads the questions and answers of the Berkeley Function Calling Leaderboard (Patil et al. 2025; package ``bfcl-eval``,
Apache-2.0) out of its wheel, which need not be installed: its requirements are many and pinned.  Each case is asked
with ``tool_choice`` auto and required, with drafts and without.  A call is valid where it names an offered function
and its arguments fit the schema; a case is right where the calls are those of the answer, in any order, each argument
with one of its accepted values.  Prints one JSON object a line for each category and way of asking.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema

CATEGORIES = ("simple_python", "multiple", "parallel")
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}
"""Types of BFCL's schemas that JSON Schema calls otherwise; ``any`` is none."""


def cases(path: str, category: str, most: int) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Questions with their functions, and the calls that answer them."""
    folder, name = "bfcl_eval/data", f"BFCL_v4_{category}.json"
    with zipfile.ZipFile(path) as wheel:
        lines = wheel.read(f"{folder}/{name}").decode().splitlines()[:most]
        answers = {
            found["id"]: found["ground_truth"]
            for found in map(json.loads, wheel.read(f"{folder}/possible_answer/{name}").decode().splitlines())
        }
    for line in lines:
        case = json.loads(line)
        yield case, answers[case["id"]]


def schema_of(schema: Any) -> Any:
    """A schema of BFCL as JSON Schema."""
    if isinstance(schema, list):
        return [schema_of(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: schema_of(value) for name, value in schema.items() if name not in ("default", "optional")}
    kind = found.get("type")
    if isinstance(kind, str) and kind in TYPES:
        found["type"] = TYPES[kind]
        if found["type"] is None:
            del found["type"]
    return found


def tool_of(function: dict[str, Any]) -> dict[str, Any]:
    """A tool in OpenAI's shape; what the schema does not name may not be given."""
    parameters = {**schema_of(function["parameters"]), "additionalProperties": False}
    told = {"name": function["name"].replace(" ", "_"), "description": function["description"]}
    return {"type": "function", "function": {**told, "parameters": parameters}}


def ask(url: str, **body: Any) -> dict[str, Any]:
    """An answer of the server."""
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def is_valid(call: dict[str, Any], tools: Sequence[dict[str, Any]]) -> bool:
    """Whether the call names an offered function and gives it what its schema asks for."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    try:
        jsonschema.validate(json.loads(call["arguments"]), schemas[call["name"]])
    except (KeyError, ValueError, jsonschema.ValidationError):
        return False
    return True


def is_right(calls: Sequence[dict[str, Any]], answer: Sequence[dict[str, Any]]) -> bool:
    """Whether the calls are those of the answer, in any order."""
    expected = list(answer)
    for call in calls:
        fitting = next((candidate for candidate in expected if matches(call, candidate)), None)
        if fitting is None:
            return False
        expected.remove(fitting)
    return not expected


def matches(call: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether a call has one of the accepted values for each argument; one with ``""`` among them may be left out."""
    ((name, accepted),) = expected.items()
    arguments = json.loads(call["arguments"])
    if call["name"] != name or not set(arguments) <= set(accepted):
        return False
    return all(
        same(arguments[argument], values) if argument in arguments else "" in values
        for argument, values in accepted.items()
    )


def same(value: Any, accepted: Sequence[Any]) -> bool:
    """Whether a value is among the accepted ones; texts are compared without case, spaces and stops."""

    def plain(item: Any) -> Any:
        return "".join(letter for letter in item.lower() if letter.isalnum()) if isinstance(item, str) else item

    return any(plain(value) == plain(option) for option in accepted)


def run(options: argparse.Namespace, category: str, choice: str, drafts: bool) -> dict[str, Any]:
    """One category, asked in one way."""
    total = valid = right = calls_made = tokens = rounds = 0
    start_s = time.perf_counter()
    for case, answer_calls in cases(options.data, category, options.cases):
        tools = [tool_of(function) for function in case["function"]]
        body = {
            "model": options.model,
            "messages": case["question"][0],
            "tools": tools,
            "tool_choice": choice,
            "parallel_tool_calls": category == "parallel",
            "temperature": 0,
            "max_tokens": options.max_tokens,
            "speculative": {"enabled": drafts},
        }
        answer = ask(options.url, **body)
        calls = [call["function"] for call in answer["choices"][0]["message"].get("tool_calls") or ()]
        total += 1
        calls_made += len(calls)
        valid += bool(calls) and all(is_valid(call, tools) for call in calls)
        right += is_right(calls, answer_calls)
        tokens += answer["usage"]["completion_tokens"]
        rounds += answer["metrics"]["speculative_decoding"]["num_spec_steps"]
    seconds = time.perf_counter() - start_s
    return {
        "category": category,
        "tool_choice": choice,
        "drafts": drafts,
        "cases": total,
        "valid": valid,
        "right": right,
        "calls": calls_made,
        "tokens": tokens,
        "tokens_per_round": round(tokens / max(1, rounds), 2),
        "seconds": round(seconds, 2),
    }


def main() -> None:
    """Ask every category in every way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="the wheel of bfcl-eval")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="what the server calls its model; asked of the server by default")
    parser.add_argument("--cases", type=int, default=50, help="of each category")
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--category", action="append", choices=CATEGORIES)
    options = parser.parse_args()
    if options.model is None:
        with urllib.request.urlopen(f"{options.url}/v1/models", timeout=60) as answer:
            options.model = json.load(answer)["data"][0]["id"]
    for category in options.category or CATEGORIES:
        for choice in ("auto", "required"):
            for drafts in (True, False):
                print(json.dumps(run(options, category, choice, drafts)), flush=True)


if __name__ == "__main__":
    main()
