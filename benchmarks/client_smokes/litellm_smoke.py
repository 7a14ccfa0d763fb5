"""litellm, with its provider for vLLM's server and the one for OpenAI's API."""

from __future__ import annotations

import litellm
from _checks import URL, check, report

messages = [{"role": "user", "content": "Write a function."}]
for model in ("hosted_vllm/builtin", "openai/builtin"):
    asked = {"model": model, "api_base": f"{URL}/v1", "messages": messages, "max_tokens": 16, "temperature": 0}
    if model.startswith("openai"):
        asked["api_key"] = "none"
    whole = litellm.completion(**asked)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True))
    check(f"{model}: stream equals whole", text == whole.choices[0].message.content, text)
    check(f"{model}: usage", whole.usage.completion_tokens == 16, whole.usage)
    try:
        litellm.completion(**{**asked, "temperature": 9})
        check(f"{model}: BadRequestError", False)
    except litellm.BadRequestError as error:
        check(f"{model}: BadRequestError", "temperature" in str(error), error)
report("litellm")
