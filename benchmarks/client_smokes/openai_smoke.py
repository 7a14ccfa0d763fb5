"""openai's Python client."""

from __future__ import annotations

import json

import openai
from _checks import URL, check, report

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
check("models", [model.id for model in client.models.list()] == ["builtin"])

asked = {"model": "builtin", "prompt": "def fib(n):", "max_tokens": 24, "temperature": 0}
whole = client.completions.create(**asked)
chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
check("stream equals whole", text == whole.choices[0].text, text)
check("usage on the last chunk", chunks[-1].usage == whole.usage, chunks[-1].usage)

messages = [{"role": "user", "content": "Copy this: alpha beta gamma"}]
first = client.chat.completions.create(model="builtin", messages=messages, max_tokens=24, temperature=0)
answer = first.choices[0].message.content
again = client.chat.completions.create(
    model="builtin",
    messages=messages,
    max_tokens=24,
    temperature=0,
    prediction={"type": "content", "content": answer},
)
check("prediction changes nothing", again.choices[0].message.content == answer)
details = again.usage.completion_tokens_details
check("accepted_prediction_tokens", details.accepted_prediction_tokens > 0, details)

shape = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["age"]}
shape["additionalProperties"] = False
found = client.chat.completions.create(
    model="builtin",
    messages=messages,
    temperature=1,
    response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": shape}},
)
check("json_schema", set(json.loads(found.choices[0].message.content)) == {"age"})

values = client.completions.create(**asked, logprobs=2)
check("logprobs", len(values.choices[0].logprobs.tokens) == 24)
for error, kind, body in (
    ("400 BadRequestError with param", openai.BadRequestError, {**asked, "temperature": -1}),
    ("404 NotFoundError", openai.NotFoundError, {**asked, "model": "another"}),
):
    try:
        client.completions.create(**body)
        check(error, False)
    except kind as raised:
        check(error, bool(raised.param), raised)
report("openai")
