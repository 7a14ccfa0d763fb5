"""``vocab=N|FILE``: which tokens it names, files that cannot be used, and the drafters that take it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import foretoken as ft
from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import build_drafter, load_model
from foretoken.loading.drafters import LoadingContext
from foretoken.methods.drafters.base import BuildContext
from foretoken.methods.drafters.datastore import fingerprint
from foretoken.methods.drafters.draft_vocabulary import chosen_ids, first_of, save_vocabulary
from foretoken.methods.drafters.narrowed import projected, reduced_head
from foretoken.models.base import CapabilityError, Feed, LanguageModel
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.linear.quantised_products import QuantisedProduct
from models.checkpoints import VOCAB, new_model, prompt_of
from toys import engine, outputs, tables

END = 2
"""The end of text of these checkpoints."""
PROMPTS = [prompt_of(9), [3], prompt_of(14, seed=1)]


class Letters:
    """A tokenizer as far as its vocabulary goes."""

    def __init__(self, first: str = "a") -> None:
        self.first = first

    def get_vocab(self) -> dict[str, int]:
        return {self.first: 0, "b": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target") / "llama"
    new_model("llama").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> LanguageModel:
    return load_model(str(folder))


def context_of(target: LanguageModel, tokenizer: Any = None) -> BuildContext:
    return LoadingContext(target, "x", tokenizer)


def ids_of(vocab: str, target: LanguageModel, known: list[int] | None = None) -> list[int] | None:
    ids = chosen_ids(vocab, context_of(target), VOCAB, known or ())
    return None if ids is None else ids.tolist()


# -- what is chosen ----------------------------------------------------------------------------------------------------


def test_the_lowest_ids_and_the_end_of_text(target: LanguageModel) -> None:
    assert target.eos_token_ids == {END}
    assert ids_of("5", target) == [0, 1, 2, 3, 4] and ids_of("2", target) == [0, END] and ids_of("1", target) == [END]
    assert ids_of("", target) is None and ids_of("0", target) is None and ids_of(str(VOCAB), target) is None
    assert ids_of("3", target, [9, 8, 7, END]) == [9, 8, END]
    assert ids_of("3", target, [9, 8, 7]) == [9, 8, 7]  # trained without: its head cannot say it


def test_the_first_of_some_ids_with_all_ends() -> None:
    assert first_of([5, 6, 7, 8], 3, [8]) == [5, 6, 8] and first_of([5, 6, 7, 8], 3, [5]) == [5, 6, 7]
    assert first_of([5, 6, 7, 8], 1, [7, 8]) == [7, 8] and first_of([5, 6, 7, 8], 3, [5, 8]) == [5, 6, 8]


def test_a_number_that_is_none(target: LanguageModel) -> None:
    for vocab in (-1, VOCAB + 1):
        with pytest.raises(ValueError, match=f"up to {VOCAB}, or {VOCAB} for all; not {vocab}"):
            ids_of(str(vocab), target)


@pytest.mark.parametrize(
    ("content", "ids"),
    [
        ([7, 5, END], [7, 5, END]),
        ([7, 5], [7, 5, END]),  # the end of text is always one of them
        ({"ids": [4, END, 3]}, [4, END, 3]),
        ({"counts": {"9": 1, "4": 5, "8": 5, "6": 0, "2": 2}}, [4, 8, 2, 9]),
    ],
)
def test_files(content: Any, ids: list[int], tmp_path: Path, target: LanguageModel) -> None:
    file = tmp_path / "vocab.json"
    file.write_text(json.dumps(content))
    assert ids_of(str(file), target) == ids


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "neither a number of tokens nor a file: give a JSON list of token ids"),
        ("{", r"cannot be read as a draft vocabulary \(JSONDecodeError\): it must hold a JSON list"),
        ("5", "is not a draft vocabulary: it must hold a JSON list"),
        ('["a"]', "is not a draft vocabulary"),
        ("[1, true]", "is not a draft vocabulary"),
        ('{"tokens": [1]}', "is not a draft vocabulary"),
        ('{"counts": {"a": 1}}', "is not a draft vocabulary"),
        ('{"counts": {"1": -1}}', "is not a draft vocabulary"),
        ("[]", "names no token: a draft vocabulary holds at least one"),
        ('{"counts": {"1": 0}}', "names no token"),
        (f"[1, {VOCAB}]", f"names token {VOCAB}, and the vocabulary has {VOCAB}: it was made for another model"),
        ("[-1]", f"names token -1, and the vocabulary has {VOCAB}"),
        ("[4, 3, 4]", "names token 4 more than once: list every token once"),
        ('{"counts": {"4": 1, "04": 2}}', "names token 4 more than once"),
    ],
)
def test_files_that_cannot_be_used(content: str | None, message: str, tmp_path: Path, target: LanguageModel) -> None:
    file = tmp_path / "vocab.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=message) as raised:
        ids_of(str(file), target)
    assert "\n" not in str(raised.value) and str(file) in str(raised.value)


def test_a_file_of_none_of_the_trained_tokens(tmp_path: Path, target: LanguageModel) -> None:
    file = tmp_path / "vocab.json"
    file.write_text("[7, 8, 9]")
    assert ids_of(str(file), target, [9, 1, 7]) == [7, 9]
    with pytest.raises(ValueError, match="names none of the 2 tokens that this drafter was trained to predict"):
        ids_of(str(file), target, [1, 3])


def test_what_is_counted_from_texts(tmp_path: Path, target: LanguageModel) -> None:
    file, tokenizer = tmp_path / "vocab.json", Letters()
    save_vocabulary(file, [[5, 5, 7], [7, 5, 3]], tokenizer)
    assert json.loads(file.read_text()) == {"tokenizer": fingerprint(tokenizer), "ids": [5, 7, 3]}
    save_vocabulary(file, [torch.tensor([5, 5, 0, 1]).tolist()], tokenizer, size=6)
    assert chosen_ids(str(file), context_of(target, tokenizer), VOCAB).tolist() == [5, 0, 1, 2, 3, 4]  # type: ignore[union-attr]
    save_vocabulary(file, [[5, 5, 7, 7, 7, 3]], tokenizer, size=2)
    assert json.loads(file.read_text())["ids"] == [7, 5]
    with pytest.raises(
        ValueError, match="made with another tokenizer than the target's: count texts with the target's tokenizer"
    ):
        chosen_ids(str(file), context_of(target, Letters("c")), VOCAB)
    with pytest.raises(ValueError, match="counted from texts, and these have no tokens"):
        save_vocabulary(file, [[]])


# -- what drafts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama_gqa_tied", "gemma2", "granite", "phi3", "gpt2", "opt"])
@pytest.mark.parametrize("lean", [True, False])
def test_logits_are_the_models_own(name: str, lean: bool) -> None:
    model = HuggingFaceModel(new_model(name).double(), lean=lean)
    ids = torch.tensor([5, 1, 96, 40])
    own, narrow = model.open(), model.open()
    model.prefill(own, [3, 4]), model.prefill(narrow, [3, 4])
    feeds = [Feed(own, [5, 6, 7], wanted=2), Feed(narrow, [5, 6, 7], wanted=2)]
    whole = model.forward(feeds[:1])[0].logits
    (rows,) = projected(DraftHead(TargetParts(model), ids), model.forward, feeds[1:], ("layer:1",))
    assert rows.logits.shape == (2, 4) and len(rows.taps["layer:1"]) == 3
    assert torch.allclose(rows.logits.double(), whole[:, ids], atol=0.06, rtol=0.02)  # it may be in bfloat16


def build(spec: str, folder: Path, target: LanguageModel) -> Any:
    return build_drafter(spec.replace("PATH", str(folder)), target, target_source="x")


SPECS = (
    "model:PATH,vocab=9",
    "swift,k=3,keep=0,vocab=9",
    "quantized,bits=8,vocab=9",
    "early_exit,layer=1,vocab=9",
    "layer_skip,mlp=1,vocab=9",
)


@pytest.mark.parametrize("spec", [*SPECS, "model:PATH,tree=2x2,vocab=9", "early_exit,layer=1,until=margin,vocab=1"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafters_that_take_it(spec: str, temperature: float, folder: Path, target: LanguageModel) -> None:
    drafter = build(spec, folder, target)
    size = int(spec.rpartition("=")[2])
    assert drafter.head.size == size and END in drafter.head.ids.tolist()
    assert drafter.describe()[0]["vocabulary"] == size
    params = SamplingParams(temperature=temperature)
    requests = [Request(prompt, params, 16, seed=4) for prompt in PROMPTS]
    assert outputs(engine(target, drafter, max_batch=3), requests) == outputs(engine(target), requests)


def test_second_weights_without_a_projection(folder: Path, target: LanguageModel) -> None:
    narrow = build("quantized,bits=8,vocab=9", folder, target)
    whole = build("quantized,bits=8", folder, target)
    assert narrow.head.ids is not None and whole.head is None
    head = VOCAB * 48
    assert whole.model.weights.nbytes - narrow.model.weights.nbytes >= head
    assert isinstance(narrow.head.product, QuantisedProduct)
    assert narrow.describe()[0]["weights"] == "int8"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("model:PATH,vocab=98", "up to 97, or 97 for all; not 98"),
        ("model:PATH,vocab=nowhere.json", "neither a number of tokens nor a file"),
        ("quantized,vocab=-2", "not -2"),
        ("quantized,inner=ngram,vocab=9", "drafts from the whole vocabulary: leave out vocab=9"),
        ("cascade:PATH,inner=ngram,vocab=9", "unknown option 'vocab'"),
    ],
)
def test_refusals(spec: str, message: str, folder: Path, target: LanguageModel) -> None:
    with pytest.raises(ValueError, match=message):
        build(spec, folder, target)


def test_a_model_without_hidden_states() -> None:
    with pytest.raises(CapabilityError, match="needs a target with hidden states, not MarkovTable"):
        reduced_head("3", tables()[1], context_of(tables()[0]))


def test_what_a_model_tells_of_its_drafts(folder: Path) -> None:
    llm = ft.load(str(folder), drafter=f"model:{folder},k=3,vocab=9", tokenizer=None)
    (report,) = llm.describe()["drafts"]
    assert report == {"drafter": f"model:{folder},k=3,vocab=9", "weights": "float32", "vocabulary": 9}
    assert ft.load(str(folder), drafter=None, tokenizer=None).describe()["drafts"] == []
    group = ft.load(str(folder), drafter="router,drafters=(ngram|(early_exit,layer=1))", tokenizer=None)
    assert group.describe()["drafts"] == [
        {"drafter": "ngram"},
        {"drafter": "early_exit,layer=1", "weights": "float32", "vocabulary": VOCAB},
    ]


# -- trained heads -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def builtin() -> LanguageModel:
    return load_model("builtin")


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "medusa", "hydra", "kangaroo", "jump"])
def test_heads_as_shipped(method: str, builtin: LanguageModel, tmp_path: Path) -> None:
    file = tmp_path / "vocab.json"
    listed = list(range(0, 3000, 2))
    file.write_text(json.dumps(listed))
    ends = set(builtin.eos_token_ids)
    prompts = [[5, 9, 300, 41], [1000, 12]]
    requests = [Request(prompt, SamplingParams(), 12) for prompt in prompts]
    plain = outputs(engine(builtin), requests)
    for vocab, allowed in (("700", None), (str(file), {*listed, *ends})):
        drafter: Any = build_drafter(f"{method},vocab={vocab}", builtin)
        head = drafter.head
        assert drafter.describe()[0]["vocabulary"] == head.size
        assert head.size == 700 if allowed is None else set(head.ids.tolist()) <= allowed
        assert outputs(engine(builtin, drafter, max_batch=2), requests) == plain
        assert drafter.cost_beside(builtin.weight_bytes) <= build_drafter(method, builtin).cost_beside(  # type: ignore[union-attr]
            builtin.weight_bytes
        )
