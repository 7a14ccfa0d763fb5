"""What tokens spell: tokenizers of every sort, pairs of vocabularies, borders of two tokenizations."""

from __future__ import annotations

import pytest
from foreign import KINDS, TEXT, tokenizer, vocabulary
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from foretoken.methods.drafters.vocabulary import (
    Vocabulary,
    common_border,
    common_tokens,
    speller,
    translated_spellings,
    whole_characters,
)

ALL = ("zoo", *KINDS)


def plain(*tokens: str, **more: object) -> Vocabulary:
    return Vocabulary([token.encode() for token in tokens], **more)  # type: ignore[arg-type]


# -- spellings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
def test_spellings_add_up_to_the_text(kind: str) -> None:
    vocab = vocabulary(kind)
    ids = vocab.encode(TEXT)
    lead = " " if kind == "pieces" else ""  # this one puts a space before every text
    assert vocab.bytes_of(ids).decode() == lead + TEXT
    decoded = tokenizer(kind).decode(ids, clean_up_tokenization_spaces=False, skip_special_tokens=False)
    assert decoded == TEXT


@pytest.mark.parametrize("kind", ALL)
def test_a_fragment_is_spelled_exactly(kind: str) -> None:
    vocab = vocabulary(kind)
    for fragment in (" return", "mat,", "\n    ", "caf\u00e9 in \u6771\u4eac \U0001f642!"):
        if kind != "words" or vocab.bytes_of(vocab.encode(fragment)) == fragment.encode():
            assert vocab.bytes_of(vocab.spell(fragment)) == fragment.encode()


def test_what_cannot_be_spelled_is_left_out() -> None:
    vocab = plain("a", "b", "ab", "\u00e9")
    assert vocab.spell("ab!a\u00e9\u6771b") == [2, 0, 3, 1]
    assert vocabulary("characters").spell("cat!?") == vocabulary("characters").spell("cat!")


def test_sentencepiece_signs() -> None:
    vocab = vocabulary("pieces")
    names = tokenizer("pieces").get_vocab()
    assert vocab.spellings[names["<0x0A>"]] == b"\n"
    assert vocab.spellings[names["\u2581return"]] == b" return"
    assert vocab.prefix == (names["<s>"],)
    assert vocab.roles == {"bos": names["<s>"], "eos": names["</s>"]}


def test_words_without_a_decoder_are_joined_with_spaces() -> None:
    inner = Tokenizer(models.WordLevel({"no": 0, "one": 1, "two": 2}, unk_token="no"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    vocab = Vocabulary.of(PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="no"), 3)
    assert vocab.bytes_of(vocab.encode("one two one")) == b" one two one"
    assert not vocab.prefix  # an unknown "a" is no prefix


def test_parts_of_words_continue_them() -> None:
    """WordPiece, as in BERT: words are joined with spaces, ``##`` continues a word, and a full stop ends one."""
    names = ["[UNK]", "the", "cat", "##s", "play", "##ing", ".", "@@x"]
    for prefix in ("##", "@@"):
        inner = Tokenizer(models.WordPiece({name.replace("##", prefix): i for i, name in enumerate(names)}))
        inner.pre_tokenizer, inner.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(prefix)
        inner.model.continuing_subword_prefix = prefix
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")
        vocab, text = Vocabulary.of(tokenizer, len(names)), "the cats playing."
        ids = vocab.encode(text)
        assert ids == [1, 2, 3, 4, 5, 6] and vocab.bytes_of(ids).decode() == " " + text
        assert tokenizer.decode(ids) == text
        assert [speller(tokenizer)(token) for token in (2, 3, 6)] == [b" cat", b"s", b"."]
        assert vocab.spell(" cats") == [2, 3]


def test_ends_of_words_are_spaces_and_no_drafts_are_translated() -> None:
    """As in OpenAI's first GPT: what a token spells depends on the one after it."""
    names = ["<unk>", "the</w>", "cat", "cat</w>", "s</w>"]
    inner = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], end_of_word_suffix="</w>"))
    inner.decoder = decoders.BPEDecoder("</w>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    spell = speller(tokenizer)
    assert b"".join(map(spell, (1, 2, 4, 1, 3))) == b"the cats the cat "
    assert tokenizer.decode([1, 2, 4, 1, 3]) == "the cats the cat"
    with pytest.raises(ValueError, match=r"marks the ends of words \(</w>\)") as caught:
        Vocabulary.of(tokenizer, len(names))
    assert "\n" not in str(caught.value)


def test_ids_that_the_model_lacks_are_no_tokens() -> None:
    whole, narrow = vocabulary("zoo"), Vocabulary.of(tokenizer("zoo"), 400)
    assert len(narrow) == 400 and max(narrow.encode(TEXT)) < 400 < max(whole.encode(TEXT))
    assert narrow.bytes_of([5000]) == b""
    assert len(Vocabulary.of(tokenizer("zoo"), 9000)) == 9000
    assert "eos" in narrow.roles and "eos" not in Vocabulary.of(tokenizer("bytes"), 1).roles


def test_a_whole_text_gets_its_prefix_once() -> None:
    vocab = vocabulary("pieces")
    once = vocab.encode_text("if n")
    assert once[0] == vocab.prefix[0] and once[1:] == vocab.encode("if n")
    assert vocab.encode_text("<s>if n").count(vocab.prefix[0]) == 1


# -- pairs -----------------------------------------------------------------------------------------------------------


def test_equal_vocabularies_pair_every_token_with_itself() -> None:
    pairs = common_tokens(vocabulary("zoo"), vocabulary("zoo"))
    assert pairs == {token: token for token in range(8192)}


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_spell_the_same_and_none_is_used_twice(kind: str) -> None:
    target, draft = vocabulary("zoo"), vocabulary(kind)
    pairs = common_tokens(target, draft)
    assert len(set(pairs.values())) == len(pairs) > 25
    for target_id, draft_id in pairs.items():
        if target_id != target.roles["eos"]:
            assert target.spellings[target_id] == draft.spellings[draft_id]
    assert pairs[target.roles["eos"]] == draft.roles["eos"]  # <|endoftext|> and </s>: by role


def test_space_signs_and_byte_tokens_meet() -> None:
    target, draft = tokenizer("zoo").get_vocab(), tokenizer("pieces").get_vocab()
    pairs = common_tokens(vocabulary("zoo"), vocabulary("pieces"))
    assert pairs[target["\u0120return"]] == draft["\u2581return"]
    assert pairs[target["\u010a"]] == draft["<0x0A>"]


def test_the_first_of_several_equal_tokens_wins() -> None:
    target, draft = plain("x", "y", "x"), plain("y", "x", "x", "y")
    assert common_tokens(target, draft) == {0: 1, 1: 0}


def test_special_tokens_pair_by_role_then_by_name() -> None:
    target = plain("a", "<end>", "<s>", "<tool>", "<pad>", special=[1, 2, 3, 4], roles={"eos": 1, "bos": 2})
    draft = plain("<s>", "<end>", "<tool>", "</s>", "a", special=[0, 1, 2, 3], roles={"eos": 3, "bos": 0})
    assert common_tokens(target, draft) == {0: 4, 1: 3, 2: 0, 3: 2}  # not <end> with <end>
    literal = plain("a", "<end>", "<s>", "<tool>", "</s>")  # the same strings, but no special tokens
    assert common_tokens(target, literal) == {0: 0}


def test_special_tokens_take_the_other_vocabularys_names() -> None:
    target = plain("a", "<end>", "<s>", special=[1, 2], roles={"eos": 1, "bos": 2})
    draft = plain("b", "</s>", special=[1], roles={"eos": 1})
    assert translated_spellings(target, draft) == [b"a", b"</s>", b""]
    both = plain("a", "<end>", special=[1], roles={"eos": 1, "bos": 1})
    assert translated_spellings(both, draft) == [b"a", b"</s>"]


# -- borders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "added", "border"),
    [
        (["the", " cat"], ["the", " cat", " sat"], " sat", (2, 2)),
        (["the", " fun"], ["the", " function"], "ction", (1, 1)),
        (["fun", "c"], ["func", "tion"], "tion", (0, 0)),  # behind "func" both have a border, but not the same token
        (["the", " cat"], [" ", "the", " cat", " sat"], " sat", (2, 3)),  # a space before the text
        (["x", "x", "x"], ["x", "x", "x", "x", "x"], "xx", (3, 3)),  # repeats fit at three places: only one is right
        (["ab"], ["abc"], "c", (0, 0)),
        ([], ["a"], "a", (0, 0)),
        (["ab"], [" ab", "c"], "c", (1, 2)),  # no border: behind both, and the caller notices
        (["ab"], [" abc"], "c", (1, 1)),
    ],
)
def test_borders(old: list[str], new: list[str], added: str, border: tuple[int, int]) -> None:
    tokens = sorted({*old, *new})
    vocab = plain(*tokens)
    assert common_border(vocab, [tokens.index(t) for t in old], [tokens.index(t) for t in new], len(added)) == border


def test_half_characters() -> None:
    whole = "a\u6771".encode()
    assert [whole_characters(whole[:n]) for n in range(5)] == [b"", b"a", b"a", b"a", whole]
    assert whole_characters(b"a\xffb") == b"a"
