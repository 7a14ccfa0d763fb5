"""An answer that ends before it begins says why."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tiny_tokenizer import chat_tokenizer, ids_of, tokenizer
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from foretoken.cli.batch import read_jobs, run_jobs
from foretoken.engine.background import AsyncLlm
from foretoken.llm import Llm
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.models.other.table import TableModel

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ASK = [{"role": "user", "content": "The dog?"}]
PLAIN = "the model ended its answer at once, with <|im_end|>"
BARE = f"{PLAIN}: the prompt was given without the model's chat template, which llm.chat and messages apply"


@cache
def chatml() -> PreTrainedTokenizerFast:
    """The tiny tokenizer with turns."""
    backend = Tokenizer.from_str(tokenizer().backend_tokenizer.to_str())
    names = ["<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens(names)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", extra_special_tokens=names, chat_template=CHATML
    )


def writer(text: str, tokens: PreTrainedTokenizerFast | None = None) -> Llm:
    """A model that answers with a text and ends it, whether the prompt is bare or in the template."""
    tokens = tokens or chatml()
    lengths = {len(tokens("The dog?")["input_ids"])}
    lengths.add(len(tokens.apply_chat_template(ASK, add_generation_prompt=True)["input_ids"]))
    answer = [*ids_of(text), int(tokens.eos_token_id)]

    def distribution(prefix: Sequence[int]) -> list[float]:
        at = len(prefix) - max(length for length in lengths if length <= len(prefix))
        return [float(i == answer[min(at, len(answer) - 1)]) for i in range(len(tokens))]

    target = TableModel(distribution, len(tokens), eos_token_ids={int(tokens.eos_token_id)})
    return Llm(target, NgramDrafter(), None, ConstantController(), tokens)


def test_a_chat_model_without_its_template() -> None:
    llm = writer("")
    for bare in ("The dog?", ids_of("The dog?")):
        out = llm.generate(bare)
        assert (out.text, len(out.token_ids), out.finish_reason, out.note) == ("", 1, "eos", BARE)
        assert [piece.note for piece in llm.stream(bare)] == [BARE]


def test_a_prompt_in_the_template_is_not_blamed() -> None:
    llm = writer("")
    rendered = chatml().apply_chat_template(ASK, add_generation_prompt=True, tokenize=False)
    for prompt in (ASK, rendered, chatml()(rendered)):
        assert llm.generate(prompt).note == PLAIN
    assert llm.chat(ASK).note == PLAIN


def test_models_whose_templates_name_no_token_or_that_have_none() -> None:
    other = writer("", chat_tokenizer("{% for m in messages %}{{ m['content'] }}{% endfor %}")).chat(ASK).note
    assert other == PLAIN.replace("<|im_end|>", chat_tokenizer().eos_token)
    llm = writer("")
    llm.tokenizer = copy.deepcopy(chatml())
    llm.tokenizer.chat_template = None
    assert llm.generate("The dog?").note == PLAIN


def test_an_answer_has_no_note() -> None:
    llm = writer("The cat.")
    out = llm.chat(ASK)
    assert (out.text, out.note, out.finish_reason) == ("The cat.", "", "eos")
    assert all(piece.note == "" for piece in llm.stream(ASK))
    assert llm.chat(ASK, max_new_tokens=1).note == ""


def test_a_stop_that_comes_first_is_named() -> None:
    llm = writer("The cat.")
    assert llm.chat(ASK, stop="The").note == "the output began with its stop string or token, 'The'"
    assert llm.chat(ASK, stop="The", include_stop=True).note == ""
    assert llm.chat(ASK, stop="cat").note == ""


def test_a_stop_behind_blanks_is_named() -> None:
    assert writer(" \n The cat.").chat(ASK, stop="The").note == "the output began with its stop string or token, 'The'"


def test_a_stop_token_is_named_where_it_shows_nothing() -> None:
    llm = writer("The cat.")
    first = llm.chat(ASK, max_new_tokens=1).token_ids
    out = llm.chat(ASK, stop_token_ids=first, include_stop=True)
    assert (out.text, out.finish_reason, out.note) == ("The", "stop", "")
    out = llm.chat(ASK, stop_token_ids=first)
    assert (out.text, out.note) == ("", f"the output began with its stop string or token, {first[0]}")
    blank = writer(" \n ")
    first = blank.chat(ASK, max_new_tokens=1).token_ids
    assert blank.chat(ASK, stop_token_ids=first).note == f"the output began with its stop string or token, {first[0]}"


def test_an_answer_of_blanks_says_so() -> None:
    llm = writer(" \n ")
    blanks = len(ids_of(" \n "))
    out = llm.chat(ASK)
    assert (out.text.strip(), out.note) == (
        "",
        f"the model ended its answer after {blanks} blank tokens, with <|im_end|>",
    )
    assert list(llm.stream(ASK))[-1].note == out.note
    cut = "the whole output, 1 token, is white space or special tokens"
    assert llm.chat(ASK, max_new_tokens=1).note == list(llm.stream(ASK, max_new_tokens=1))[-1].note == cut


def test_token_ids_alone_are_no_blanks() -> None:
    llm = writer("The cat.")
    llm.tokenizer = None
    silent = Llm(llm.target, NgramDrafter(), None, ConstantController(), None)
    assert silent.generate(ids_of("The dog?")).note == ""


def test_servers_and_batches_hand_it_on(tmp_path: Path) -> None:
    llm = writer("")
    (tmp_path / "in.jsonl").write_text(
        '{"prompt": "The dog?"}\n{"messages": [{"role": "user", "content": "The dog?"}]}\n'
    )
    answers: list[dict[str, object]] = []
    run_jobs(llm, read_jobs(tmp_path / "in.jsonl", {}), lambda answer: answers.append(dict(answer)))
    assert [answer["note"] for answer in answers] == [BARE, PLAIN]

    async def served_note() -> str:
        served = AsyncLlm(llm)
        await served.start()
        try:
            return (await served.generate("The dog?")).note
        finally:
            await served.close(0)

    assert asyncio.run(served_note()) == BARE
