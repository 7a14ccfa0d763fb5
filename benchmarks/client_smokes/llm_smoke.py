"""The program ``llm``, which is told of the server by a YAML file."""

from __future__ import annotations

import json
import os
from pathlib import Path

from _checks import URL, check, report, shell

home = Path(os.environ["LLM_USER_PATH"])
home.mkdir(parents=True, exist_ok=True)
(home / "extra-openai-models.yaml").write_text(
    f"- model_id: ft\n  model_name: builtin\n  api_base: {URL}/v1\n  supports_schema: true\n"
    f"- model_id: ft-complete\n  model_name: builtin\n  api_base: {URL}/v1\n  completion: true\n",
    encoding="utf-8",
)
streamed = shell("llm", "-m", "ft", "Write a function.", "-o", "max_tokens", "16", "-o", "temperature", "0")
whole = shell("llm", "-m", "ft", "Write a function.", "-o", "max_tokens", "16", "-o", "temperature", "0", "--no-stream")
check("stream equals --no-stream", bool(whole.strip()) and streamed == whole, (streamed, whole))
check("completions", bool(shell("llm", "-m", "ft-complete", "def fib(n):", "-o", "max_tokens", "8").strip()))
shaped = shell("llm", "-m", "ft", "How old?", "--schema", "ok bool", "-o", "temperature", "0")
check("--schema", isinstance(json.loads(shaped)["ok"], bool), shaped)
logged = json.loads(shell("llm", "logs", "--json", "-n", "0"))
chats = [one for one in logged if one["model"] == "ft"]  # it keeps none of completions
check("usage in its log", len(chats) == 3 and all(one["output_tokens"] for one in chats), chats)
report("llm")
