"""A loop with tools, as agents run it, with the vendors' own clients: what is asked, called, answered and said.

    foretoken serve FOLDER &
    python benchmarks/tool_loop.py --url http://127.0.0.1:8000

Anthropic's client on ``/v1/messages`` (streamed), OpenAI's on ``/v1/responses`` and ``/v1/chat/completions``.  The
model must call a tool first (``tool_choice``), the tool is a Python function here, and the conversation goes on with
what it gave until the model answers in words.  Ends with 1 when a loop has no answer, or one without the tool's figure.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

QUESTION = "How many units of the red bicycle are in stock? Use the tool, then answer in one short sentence."
NAME, TOLD = "get_stock", "Number of units of a product that are in stock."
SCHEMA = {
    "type": "object",
    "properties": {"product": {"type": "string", "description": "name of the product"}},
    "required": ["product"],
}
STOCK = 17
MOST_TURNS = 4
MOST_TOKENS = 128


def used(arguments: dict[str, Any]) -> str:
    """The tool."""
    return json.dumps({"product": arguments.get("product"), "units": STOCK})


def note(who: str, what: str) -> None:
    """A line of the transcript."""
    print(f"{who:>9}  {what}", flush=True)


def messages(url: str, model: str) -> str:
    """Anthropic's client."""
    from anthropic import Anthropic

    client = Anthropic(base_url=url, auth_token="none", api_key=None)
    tools: Any = [{"name": NAME, "description": TOLD, "input_schema": SCHEMA}]
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    count = client.messages.count_tokens(model=model, messages=history, tools=tools).input_tokens
    note("", f"count_tokens: {count}")
    for turn in range(MOST_TURNS):
        choice: Any = {"type": "any" if turn == 0 else "auto", "disable_parallel_tool_use": True}
        with client.messages.stream(
            model=model,
            max_tokens=MOST_TOKENS,
            messages=history,
            tools=tools,
            tool_choice=choice,
            extra_body={"temperature": 0},
        ) as stream:
            kinds = [event.type for event in stream]
            answer = stream.get_final_message()
        note("events", ", ".join(dict.fromkeys(kinds)))
        history.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in answer.content if block.type == "text")
        results = []
        for call in calls:
            note("call", f"{call.name}({json.dumps(call.input)})")
            results.append({"type": "tool_result", "tool_use_id": call.id, "content": used(dict(call.input))})
            note("tool", results[-1]["content"])
        history.append({"role": "user", "content": results})
    return ""


def responses(url: str, model: str) -> str:
    """OpenAI's client, the newer API."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    tools: Any = [{"type": "function", "name": NAME, "description": TOLD, "parameters": SCHEMA}]
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    for turn in range(MOST_TURNS):
        answer = client.responses.create(
            model=model,
            input=items,
            tools=tools,
            tool_choice="required" if turn == 0 else "auto",
            parallel_tool_calls=False,
            max_output_tokens=MOST_TOKENS,
            temperature=0,
        )
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        for call in calls:
            note("call", f"{call.name}({call.arguments})")
            given = used(json.loads(call.arguments))
            note("tool", given)
            items += [
                {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
                {"type": "function_call_output", "call_id": call.call_id, "output": given},
            ]
    return ""


def completions(url: str, model: str) -> str:
    """OpenAI's client, chat completions."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    tools: Any = [{"type": "function", "function": {"name": NAME, "description": TOLD, "parameters": SCHEMA}}]
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    for turn in range(MOST_TURNS):
        answer = client.chat.completions.create(
            model=model,
            messages=history,
            tools=tools,
            tool_choice="required" if turn == 0 else "auto",
            parallel_tool_calls=False,
            max_completion_tokens=MOST_TOKENS,
            temperature=0,
        )
        message = answer.choices[0].message
        history.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            note("call", f"{call.function.name}({call.function.arguments})")
            given = used(json.loads(call.function.arguments))
            note("tool", given)
            history.append({"role": "tool", "tool_call_id": call.id, "content": given})
    return ""


LOOPS: dict[str, Callable[[str, str], str]] = {
    "anthropic, /v1/messages": messages,
    "openai, /v1/responses": responses,
    "openai, /v1/chat/completions": completions,
}


def main() -> None:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="by default the first that is served")
    args = parser.parse_args()
    model = args.model
    if model is None:
        from openai import OpenAI

        model = OpenAI(base_url=f"{args.url}/v1", api_key="none").models.list().data[0].id
    failed = 0
    for name, loop in LOOPS.items():
        print(f"-- {name}")
        note("user", QUESTION)
        answer = loop(args.url, model)
        note("model", answer)
        failed += str(STOCK) not in answer
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
