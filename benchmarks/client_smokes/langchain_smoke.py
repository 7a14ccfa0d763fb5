"""langchain-openai's chat model."""

from __future__ import annotations

from _checks import URL, check, report
from langchain_openai import ChatOpenAI, OpenAI

chat = ChatOpenAI(model="builtin", base_url=f"{URL}/v1", api_key="none", max_tokens=16, temperature=0)
whole = chat.invoke("Write a function.")
text = "".join(chunk.content for chunk in chat.stream("Write a function."))
check("stream equals invoke", text == whole.content, text)
check("usage_metadata", whole.usage_metadata["output_tokens"] == 16, whole.usage_metadata)
check("finish_reason", whole.response_metadata["finish_reason"] == "length", whole.response_metadata)

shape = {"title": "Person", "type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}}}
shape |= {"required": ["age"], "additionalProperties": False}
asker = ChatOpenAI(model="builtin", base_url=f"{URL}/v1", api_key="none", temperature=0)
found = asker.with_structured_output(shape, method="json_schema").invoke("How old is she?")
check("with_structured_output", set(found) == {"age"}, found)

plain = OpenAI(model="builtin", base_url=f"{URL}/v1", api_key="none", max_tokens=8, temperature=0)
check("completions", bool(plain.invoke("def fib(n):")))
report("langchain-openai")
