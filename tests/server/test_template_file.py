"""``--chat-template``: a file in place of the model's own template."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from foretoken.server.config import ServerSettings
from foretoken.server.serving import Serving, load_llm

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from tiny_tokenizer import chat_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<turn_end>\n{% endfor %}"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base model: its vocabulary has an end of turn, which neither its configuration nor a template names."""
    tokens = chat_tokenizer()
    tokens.add_special_tokens({"additional_special_tokens": ["<turn_end>"]})
    tokens.chat_template = None
    folder = tmp_path / "base"
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokens.save_pretrained(folder)
    return folder


def test_the_files_end_of_turn_ends_an_answer(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE)
    plain = load_llm(ServerSettings(str(base), drafter="none"))
    llm = load_llm(ServerSettings(str(base), drafter="none", chat_template=str(file)))
    end = llm.tokenizer.convert_tokens_to_ids("<turn_end>")
    assert end not in plain.target.eos_token_ids and end in llm.target.eos_token_ids
    prompt = llm.tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    assert prompt == "user: Hello<turn_end>\n"


def test_what_cannot_be_used_is_refused_before_the_weights_are_read(base: Path, tmp_path: Path) -> None:
    (base / "model.safetensors").unlink()
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    for file, reason in ((tmp_path / "missing", "No such file or directory"), (binary, "it is not text in UTF-8")):
        serving = Serving(ServerSettings(str(base), chat_template=str(file)))
        asyncio.run(serving.start())
        assert str(serving.failed) == f"cannot read --chat-template {file}: {reason}"
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base / name).unlink(missing_ok=True)
    serving = Serving(ServerSettings(str(base), chat_template=str(file)))
    asyncio.run(serving.start())
    assert str(serving.failed) == "--chat-template needs a model with a tokenizer, and base has none"
