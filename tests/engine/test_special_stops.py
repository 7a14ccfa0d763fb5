"""Stop strings that hold a special token and other text: where they end a text, as Transformers' criterion has it."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from tiny_tokenizer import Writer, tokenizer
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast, StopStringCriteria

from foretoken.engine.ends import special_tokens
from foretoken.engine.stopping import Stopper
from foretoken.llm import Llm, Output
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.scripted import ScriptedDrafter

END, START = "<|im_end|>", "<|im_start|>"


@cache
def turns() -> PreTrainedTokenizerFast:
    """The tiny tokenizer with the special tokens of a chat."""
    backend = Tokenizer.from_str(tokenizer().backend_tokenizer.to_str())
    backend.add_special_tokens([START, END])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", extra_special_tokens=[START, END])


def ids_of(text: str) -> list[int]:
    ids: list[int] = turns()(text)["input_ids"]
    return ids


def written(text: str, stop: str | list[str], *, include: bool = False, ignore_eos: bool = False) -> Output:
    """The output of a target that writes ``text``; drafted, plain and streamed are equal."""
    ids, prompt = ids_of(text), ids_of("The cat")
    target = Writer(ids, len(prompt))
    target.vocab_size = len(turns())
    drafter = ScriptedDrafter(script=[*ids, 5, 5], as_output=True)
    llm = Llm(target, drafter, None, ConstantController(), turns())
    output = llm.generate(prompt, stop=stop, include_stop=include, ignore_eos=ignore_eos, max_new_tokens=len(ids))
    plain = llm.plain.generate(prompt, stop=stop, include_stop=include, ignore_eos=ignore_eos, max_new_tokens=len(ids))
    pieces = list(llm.stream(prompt, stop=stop, include_stop=include, ignore_eos=ignore_eos, max_new_tokens=len(ids)))
    assert plain.text == output.text == "".join(piece.text for piece in pieces)
    assert plain.token_ids == output.token_ids
    assert plain.stop_reason == output.stop_reason == pieces[-1].stop_reason
    return output


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        (f"The dog sat.{END}\nuser", f"{END}\nuser", "The dog sat."),
        (f"The dog sat.{END}\nusers there", f"{END}\nuser", "The dog sat."),
        (f"The dog sat.{END}\n{START}user", f"sat.{END}\n{START}", "The dog "),
        (f"{START}The dog{END}{END} ran", f"{END}{END}", "The dog"),
        (f"The {START}cat{START}dog{END} ran", f"dog{END}", "The cat"),
        (f"The cat {END}ran", f"{END}r", "The cat "),
        (f"größer 🙂{END}\nuser", f"🙂{END}\nuse", "größer "),
        (f"The dog sat.{END}\n{START}user", f"end|>\n{START}", "The dog sat."),  # begins within a special token
    ],
)
@pytest.mark.parametrize("include", [False, True])
def test_the_text_is_cut_before_the_match(text: str, stop: str, shown: str, include: bool) -> None:
    output = written(f"{text} and the mat", [stop, "never"], include=include)
    assert (output.text, output.stop_reason) == (shown + (stop if include else ""), stop)
    assert output.finish_reason == "stop"


def test_half_a_character_before_the_special_token() -> None:
    ids = [*ids_of("The 🙂")[:-1], *ids_of(f"{END}\nuser")]
    stopper = Stopper(frozenset(), [f"{END}\nuser"], 99, turns(), special=special_tokens(turns()))
    assert stopper.push(ids) == (len(ids), "stop")
    assert turns().decode(ids, skip_special_tokens=True)[: stopper.cut] == "The \ufffd"


def test_the_end_of_the_text_comes_first_where_it_is_not_ignored() -> None:
    text, stop = "The dog<eos>\nUser: STOP", "<eos>\nUser:"
    ended = written(text, stop)
    assert (ended.text, ended.finish_reason) == ("The dog", "eos")
    ignored = written(text, stop, ignore_eos=True)
    assert (ignored.text, ignored.finish_reason, ignored.stop_reason) == ("The dog", "stop", stop)


def test_a_string_across_a_special_token_that_it_does_not_name() -> None:
    """Ordinary stop strings are matched in the visible text, in which special tokens leave nothing."""
    assert written(f"The cat{END} sat on", ["cat sat", f"{END} on"]).text == "The "


def test_the_same_tokens_as_transformers() -> None:
    """Random texts of few tokens, so that matches are many: they end after the same token as under its criterion."""
    stops = [f"{END}\nuser", f"at{END}", f"{END}{START}", f" cat{START}s", f"{END} "]
    parts = [ids_of(part) for part in (END, START, "\n", "user", "cat", " cat", "s", " sat", " ")]
    draw, ends = random.Random(0), 0
    for stop in stops:
        criterion = StopStringCriteria(turns(), [stop])
        for _ in range(60):
            ids = [token for _ in range(30) for token in draw.choice(parts)]
            lengths = range(1, len(ids) + 1)
            expected = next((n for n in lengths if bool(criterion(torch.tensor([ids[:n]]), None)[0])), None)  # type: ignore[arg-type]
            kept, reason = Stopper(frozenset(), [stop], 99, turns(), special=special_tokens(turns())).push(ids)
            assert (kept if reason == "stop" else None) == expected, (stop, turns().convert_ids_to_tokens(ids))
            ends += expected is not None
    assert ends > 100
