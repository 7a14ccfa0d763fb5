"""Where an output ends: eos ids, stop strings across token borders, the length; and its text while it grows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from tiny_tokenizer import TEXT, Writer, eos, ids_of, tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from foretoken.engine.stopping import Detokenizer, Stopper
from foretoken.llm import Llm, Output, Piece
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.scripted import ScriptedDrafter
from toys import tables

PROMPT = ids_of("The cat")
STORY = " sat on the mat. The dog ran to the STOP cat and END there.\n"
UNICODE = "Größe, naïve 東京 🙂🚀 café 🙂"


def writer(text: str, drafter: Drafter | None = None) -> Llm:
    """A model that writes ``text``, with a draft of the true output unless another drafter is given."""
    output = ids_of(text)
    chosen = drafter or ScriptedDrafter(script=[*output, eos(), 5, 5, 5], as_output=True)
    return Llm(Writer(output, len(PROMPT)), chosen, None, ConstantController(), tokenizer())


def both(text: str, drafter: Drafter | None = None, **options: object) -> tuple[Output, list[Piece]]:
    """The output of ``generate`` and the pieces of ``stream``; plain decoding must give the same."""
    llm = writer(text, drafter)
    output = llm.generate(PROMPT, **options)  # type: ignore[call-overload]
    pieces = list(llm.stream(PROMPT, **options))
    plain = llm.plain.generate(PROMPT, **options)  # type: ignore[call-overload]
    assert (plain.text, plain.token_ids, plain.finish_reason) == (output.text, output.token_ids, output.finish_reason)
    return output, pieces


def check_pieces(output: Output, pieces: Sequence[Piece]) -> None:
    assert "".join(piece.text for piece in pieces) == output.text
    assert [token for piece in pieces for token in piece.token_ids] == output.token_ids
    assert [origin for piece in pieces for origin in piece.origins] == output.origins
    assert all(piece.accepted == [o == "accepted" for o in piece.origins] for piece in pieces)
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [output.finish_reason]
    assert pieces[-1].stats is not None and all(piece.stats is None for piece in pieces[:-1])


# -- the stopper -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("eos_ids", "limit", "tokens", "kept", "reason"),
    [
        ({9}, 10, [1, 2, 3], 3, None),
        ({9}, 10, [1, 9, 3], 2, "eos"),
        ({8, 9}, 10, [1, 8, 9], 2, "eos"),
        ({9}, 3, [1, 2, 3, 4], 3, "length"),
        ({9}, 3, [1, 2, 9], 3, "eos"),
        ({9}, 3, [1, 2, 3, 9], 3, "length"),
        (set(), 1, [0], 1, "length"),
        ({0}, 5, [0, 1], 1, "eos"),
    ],
)
def test_ids_and_length(eos_ids: set[int], limit: int, tokens: list[int], kept: int, reason: str | None) -> None:
    assert Stopper(frozenset(eos_ids), (), limit).push(tokens) == (kept, reason)
    one_by_one = Stopper(frozenset(eos_ids), (), limit)
    verdicts = [one_by_one.push([token]) for token in tokens[:kept]]
    assert verdicts == [(1, None)] * (kept - 1) + [(1, reason)]


def test_stop_strings_need_a_tokenizer_and_a_character() -> None:
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        Stopper(frozenset(), ("x",), 5)
    with pytest.raises(ValueError, match="must not be empty"):
        Stopper(frozenset(), ("x", ""), 5, tokenizer())


# -- stop strings ----------------------------------------------------------------------------------------------------

STOPS = [
    "STOP",
    "P c",
    " STOP cat an",
    "mat",
    "at.",
    "t on the m",
    ".",
    " ",
    "there.\n",
    "s",
]


@pytest.mark.parametrize("stop", STOPS)
def test_stop_strings_inside_accepted_drafts(stop: str) -> None:
    """The text ends before the match, the tokens with the one that completed it."""
    output, pieces = both(STORY, stop=stop)
    assert output.finish_reason == "stop"
    assert output.text == STORY[: STORY.index(stop)]
    ids = ids_of(STORY)
    assert output.token_ids == ids[: len(output.token_ids)]
    text = tokenizer().decode(output.token_ids)
    assert stop in text and stop not in tokenizer().decode(output.token_ids[:-1])
    check_pieces(output, pieces)


def test_a_stop_string_across_several_tokens_of_one_draft() -> None:
    stop = "the STOP cat and"
    assert len(ids_of(stop)) > 4
    output, _ = both(STORY, stop=stop)
    assert output.text == STORY[: STORY.index(stop)]
    assert output.stats.num_accepted_tokens > 8


def test_the_first_of_several_stop_strings_wins() -> None:
    output, pieces = both(STORY, stop=["END", "dog", "never", "The dog ran away"])
    assert output.text == STORY[: STORY.index("dog")]
    check_pieces(output, pieces)


def test_two_matches_in_one_token_cut_at_the_earlier() -> None:
    """``" the"`` completes both; the longer one began before."""
    output, _ = both(STORY, stop=["the", "on the"])
    assert output.text == STORY[: STORY.index("on the")]


@pytest.mark.parametrize(("stops", "first"), [(["e", "he "], "e"), (["the", "th"], "th"), (["t.", "at."], "at.")])
def test_stop_strings_that_overlap(stops: list[str], first: str) -> None:
    """The first to be complete ends the text, in whatever order they were given; of several, the one that began first,
    and of those the shortest."""
    for given in (stops, stops[::-1]):
        output, pieces = both(STORY, stop=given)
        assert (output.text, output.stop_reason) == (STORY[: STORY.index(first)], first)
        check_pieces(output, pieces)


def test_a_stop_string_that_never_comes() -> None:
    output, pieces = both(STORY, stop=["xyz", "STOPPED"], max_new_tokens=200)
    assert (output.text, output.finish_reason) == (STORY, "eos")
    check_pieces(output, pieces)


def test_a_stop_string_of_the_prompt_does_not_count() -> None:
    output, _ = both(STORY, stop="The cat sat", max_new_tokens=200)
    assert output.text == STORY


@pytest.mark.parametrize("stop", ["京", "🙂", "ï", "🙂🚀", "ö"])
def test_stop_strings_of_characters_that_take_several_tokens(stop: str) -> None:
    assert len(ids_of(stop)) > 1
    output, pieces = both(UNICODE, stop=stop, max_new_tokens=200)
    assert output.text == UNICODE[: UNICODE.index(stop)]
    check_pieces(output, pieces)


def test_a_stream_shows_nothing_that_may_become_a_stop_string() -> None:
    shown = ""
    for piece in writer(STORY).stream(PROMPT, stop="STOP cat"):
        shown += piece.text
        assert STORY.startswith(shown)
        assert "STOP" not in shown
    assert shown == STORY[: STORY.index("STOP")]


# -- eos, length, text -----------------------------------------------------------------------------------------------


def test_eos_stays_in_the_tokens_and_out_of_the_text() -> None:
    output, pieces = both(STORY, max_new_tokens=200)
    assert (output.text, output.token_ids, output.finish_reason) == (STORY, [*ids_of(STORY), eos()], "eos")
    check_pieces(output, pieces)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("number", [0, 3, 7])
def test_a_stop_token_is_shown_where_that_is_asked_for(number: int, include: bool) -> None:
    """By its id, as by its text; the ids keep it."""
    ids = ids_of(STORY)
    stop, number = ids[number], ids.index(ids[number])
    shown = tokenizer().decode(ids[: number + include])
    output, pieces = both(STORY, stop_token_ids=[stop], include_stop=include, max_new_tokens=200)
    assert (output.text, output.token_ids, output.stop_reason) == (shown, ids[: number + 1], stop)
    assert "".join(piece.text for piece in pieces) == shown


@pytest.mark.parametrize("include", [False, True])
def test_an_end_that_is_no_special_token_is_shown_where_that_is_asked_for(include: bool) -> None:
    ids = ids_of(STORY)
    target = Writer(ids, 1)
    target.eos_token_ids = frozenset({ids[4]})
    llm = Llm(target, None, None, None, tokenizer())
    options: dict[str, Any] = {"include_stop": include, "max_new_tokens": 50}
    output = llm.generate([eos()], **options)
    end = ids.index(ids[4])
    assert (output.token_ids, output.finish_reason) == (ids[: end + 1], "eos")
    assert output.text == tokenizer().decode(ids[: end + include])
    assert "".join(piece.text for piece in llm.stream([eos()], **options)) == output.text


@pytest.mark.parametrize("limit", [1, 2, 5, 9, 10])
def test_length(limit: int) -> None:
    output, pieces = both(STORY, max_new_tokens=limit)
    assert (output.token_ids, output.finish_reason) == (ids_of(STORY)[:limit], "length")
    check_pieces(output, pieces)


@pytest.mark.parametrize("text", [TEXT, UNICODE, STORY, "🙂", "\n\n  x\t", "aaaa" * 20])
@pytest.mark.parametrize("drafter", [None, NgramDrafter(), ScriptedDrafter()], ids=["all", "ngram", "none"])
def test_pieces_concatenate_to_the_text(text: str, drafter: Drafter | None) -> None:
    output, pieces = both(text, drafter, max_new_tokens=400)
    assert output.text == text
    check_pieces(output, pieces)


@pytest.mark.parametrize("limit", range(1, 24))
def test_pieces_of_an_output_that_ends_inside_a_character(limit: int) -> None:
    output, pieces = both(UNICODE, max_new_tokens=limit)
    check_pieces(output, pieces)
    whole = output.text.rstrip("\ufffd")
    assert UNICODE.startswith(whole)
    assert all("\ufffd" not in piece.text for piece in pieces[:-1])


def test_bytes_that_are_no_character_do_not_stop_the_text() -> None:
    first_byte = ids_of("ö")[0]
    assert tokenizer().decode([first_byte]) == "\ufffd"
    detokenizer = Detokenizer(tokenizer())
    parts = [detokenizer.push([token]) for token in [first_byte, *ids_of("cat"), first_byte]]
    assert parts[0] == "" and "".join(parts) == "\ufffdcat"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.text == "\ufffdcat\ufffd"


class Counted:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self) -> None:
        self.count = 0

    def decode(self, ids: list[int], **options: bool) -> str:
        self.count += len(ids)
        return str(tokenizer().decode(ids, **options))


def test_a_run_of_bytes_that_are_no_character_streams_and_is_decoded_in_linear_time() -> None:
    first_byte = ids_of("ö")[0]
    counts = []
    for size in (200, 400):
        counted = Counted()
        detokenizer = Detokenizer(counted)
        parts = [detokenizer.push([token]) for token in [*ids_of("cat"), *[first_byte] * size, *ids_of("dog")]]
        assert "".join(parts) == "cat" + "\ufffd" * size + "dog" and not detokenizer.flush()
        assert max(map(len, parts)) <= Detokenizer.HELD + 1
        counts.append(counted.count)
    assert counts[1] < 2.2 * counts[0]


def test_bytes_that_are_no_character_are_found_by_a_stop_string() -> None:
    tokens = [*ids_of("cat"), *ids_of("ö")[:1] * 40]
    stopper = Stopper(frozenset(), ("\ufffd\ufffd",), 100, tokenizer())
    kept, reason = stopper.push(tokens)
    assert reason == "stop" and stopper.cut == len("cat")
    assert kept <= len(ids_of("cat")) + Detokenizer.HELD + 1


@pytest.mark.parametrize("size", [1, 2, 5, 20])
@pytest.mark.parametrize("seed", range(4))
def test_the_text_of_any_bytes_is_that_of_all_at_once(seed: int, size: int) -> None:
    """Characters, halves of them and runs of wrong bytes; what was streamed is never taken back."""
    rng = random.Random(seed)
    for _ in range(20):
        ids: list[int] = []
        while len(ids) < 100:
            ids += ids_of("".join(rng.choice("aé東🙂x ö") for _ in range(rng.randrange(1, 30))))
            ids += [rng.randrange(1, len(tokenizer()))] * rng.choice([0, 0, 1, 30])
        whole, detokenizer = tokenizer().decode(ids), Detokenizer(tokenizer())
        for start in range(0, len(ids), size):
            detokenizer.push(ids[start : start + size])
            assert whole.startswith(detokenizer.text)
        detokenizer.flush()
        assert detokenizer.text == whole


@cache
def bytes_tokenizer() -> Any:
    """As SentencePiece's: tokens of single bytes, and a run of them with a wrong one is replaced as a whole."""
    names = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁a", "b", "<unk>"]
    vocabulary = {name: number for number, name in enumerate(names)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


@pytest.mark.parametrize("size", [1, 2, 5, 20])
@pytest.mark.parametrize("characters", ["東京タワー", "🙂", "é🙂東x"])
def test_many_characters_of_single_bytes_stream_as_they_are(characters: str, size: int) -> None:
    ids = [256, *(characters * 30).encode(), 257, 257]
    detokenizer = Detokenizer(bytes_tokenizer())
    for start in range(0, len(ids), size):
        detokenizer.push(ids[start : start + size])
        assert bytes_tokenizer().decode(ids).startswith(detokenizer.text)
    detokenizer.flush()
    assert detokenizer.text == bytes_tokenizer().decode(ids) == " a" + characters * 30 + "bb"


def test_a_text_goes_on_after_a_wrong_byte_behind_a_character() -> None:
    """The character was streamed before the tokenizer replaced it, and nothing is streamed twice."""
    ids = [256, *"é".encode(), 255, *[257] * 40]
    detokenizer = Detokenizer(bytes_tokenizer())
    parts = [detokenizer.push([token]) for token in ids]
    assert "".join(parts) == " aé" + "\ufffd" * 3 + "b" * 40 and not detokenizer.flush()


def test_a_long_text_is_decoded_piece_by_piece_as_at_once() -> None:
    ids = ids_of(TEXT * 4)
    for size in (1, 3, 7):
        detokenizer = Detokenizer(tokenizer())
        for start in range(0, len(ids), size):
            detokenizer.push(ids[start : start + size])
        detokenizer.flush()
        assert detokenizer.text == TEXT * 4


def test_no_tokenizer_no_text() -> None:
    target, _ = tables()
    llm = Llm(target, NgramDrafter(), None, ConstantController(), None)
    output = llm.generate([0, 1, 2], max_new_tokens=5)
    pieces = list(llm.stream([0, 1, 2], max_new_tokens=5))
    assert output.text == "" and len(output.token_ids) == 5
    check_pieces(output, pieces)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        llm.generate("text")
