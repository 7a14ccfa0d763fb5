"""``load("model.gguf")``: text equal to llama.cpp's and to plain decoding, tokenizers, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gguf_files import builtin, mamba, need_packages, sentencepiece, toy, write

need_packages()

import foretoken as ft  # noqa: E402
from foretoken.cli.main import main  # noqa: E402
from foretoken.engine.stopping import Detokenizer  # noqa: E402
from foretoken.lab.bench.arms import ArmSetup, Unit  # noqa: E402
from foretoken.lab.bench.serving import make_arm  # noqa: E402
from foretoken.llm import Llm  # noqa: E402
from foretoken.loading import LoadError, load_model, load_tokenizer  # noqa: E402
from foretoken.methods.drafters.datastore import build_datastore  # noqa: E402
from foretoken.models.base import CapabilityError  # noqa: E402
from foretoken.models.other.llama_cpp_model import LlamaCppModel  # noqa: E402
from foretoken.models.other.llama_cpp_tokenizer import LlamaCppTokenizer  # noqa: E402

PROMPTS = ["def fib(n):\n    a, b = 0, 1\n", "The old house", "import os\nimport re\n\nimport os\n"]
TEXTS = [
    "def f(x):\n\treturn  x",
    "naïve café — 中文字符 🙂🙂 Ω",
    " leading",
    "tail  ",
    "1234567 it's <|endoftext|> after",
    "\u00a0\u3000\r\n\n",
]
NEW = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(scope="module")
def target(folder: Path) -> Path:
    return builtin(folder / "target.gguf", "target")


@pytest.fixture(scope="module")
def draft(folder: Path) -> Path:
    return builtin(folder / "draft.gguf", "draft")


@pytest.fixture(scope="module")
def model(target: Path) -> LlamaCppModel:
    return LlamaCppModel(target, cache_type="f32")


@pytest.fixture(scope="module")
def plain(model: LlamaCppModel) -> Llm:
    return ft.load(model, drafter=None)


# -- text ------------------------------------------------------------------------------------------------------------


def test_greedy_is_llama_cpps(target: Path) -> None:
    from llama_cpp import Llama

    llm = ft.load(target, drafter="ngram")
    reference = Llama(str(target), n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False)
    for prompt in PROMPTS:
        ids = llm.encode(prompt)
        reference.reset()
        expected: list[int] = []
        for token in reference.generate(ids, temp=0.0, repeat_penalty=1.0):
            expected.append(int(token))
            if len(expected) == NEW or token in llm.target.eos_token_ids:
                break
        assert llm.plain.generate(ids, max_new_tokens=NEW).token_ids == expected
        assert llm.generate(ids, max_new_tokens=NEW).token_ids == expected
    reference.close()


SPECS = [
    "auto",
    "ngram",
    "ngram_cache",
    "suffix",
    "sam",
    "recycling",
    "prediction",
    "jacobi",
    "lookahead,w=3,n=3,g=3",
    "router,drafters=(ngram|suffix)",
    "model:{draft},k=3",
    "model:{draft},tree=3x2x1",
    "model:{draft},tree=2x2,draw=iid",
    "cascade:{draft}",
    "staged:{draft}",
    "retokenize:{draft}",
    "shared_vocab:{draft}",
    "model:builtin,k=3",
]


@pytest.mark.parametrize("spec", SPECS)
def test_drafters_change_nothing(model: LlamaCppModel, plain: Llm, draft: Path, spec: str) -> None:
    llm = ft.load(model, drafter=spec.format(draft=draft), tokenizer=plain.tokenizer)
    options: dict[str, Any] = {"max_new_tokens": NEW, "prediction": PROMPTS[0]}
    assert same(llm.generate(PROMPTS[:2], **options), plain.generate(PROMPTS[:2], **options))
    options.update(temperature=1.0, seed=5)
    assert llm.generate(PROMPTS[2], **options).token_ids == plain.generate(PROMPTS[2], **options).token_ids


def same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return [output.token_ids for output in first] == [output.token_ids for output in second]


@pytest.mark.parametrize(
    ("spec", "verifier"),
    [
        ("model:{draft},k=3", "rejection"),
        ("model:{draft},k=3", "block"),
        ("model:{draft},tree=2x2", "traversal"),
        ("model:{draft},tree=2x2", "without_replacement"),
        ("model:{draft},tree=2x2,draw=iid", "multi_round"),
        ("ngram", "point"),
        ("model:{draft},k=3", "coupled"),
    ],
)
def test_verifiers_sample(model: LlamaCppModel, plain: Llm, draft: Path, spec: str, verifier: str) -> None:
    llm = ft.load(model, spec.format(draft=draft), verifier, tokenizer=plain.tokenizer)
    outputs = llm.generate(PROMPTS[:2], max_new_tokens=12, temperature=0.8, seed=1)
    assert [len(output.token_ids) for output in outputs] == [12, 12]


def test_retrieval_is_built_with_the_files_tokenizer(model: LlamaCppModel, plain: Llm, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("The old house was empty. The old house was sold.")
    build_datastore([tmp_path / "texts"], plain.tokenizer, tmp_path / "store")
    llm = ft.load(model, drafter=f"retrieval:{tmp_path / 'store'}", controller="constant", tokenizer=plain.tokenizer)
    output = llm.generate(PROMPTS[1], max_new_tokens=NEW)
    assert output.token_ids == plain.generate(PROMPTS[1], max_new_tokens=NEW).token_ids
    assert output.stats.num_draft_tokens > 0


def test_batches_are_singles(model: LlamaCppModel, plain: Llm, draft: Path) -> None:
    llm = ft.load(model, drafter=f"model:{draft},tree=2x2", tokenizer=plain.tokenizer)
    together = llm.generate(PROMPTS * 2, max_new_tokens=NEW)
    assert same(together, [llm.generate(prompt, max_new_tokens=NEW) for prompt in PROMPTS * 2])


@pytest.mark.parametrize("spec", ["llama.cpp", "llama.cpp:prompt_lookup,k=4", "llama.cpp:draft,draft={draft},k=3"])
def test_llama_cpp_arms_run_the_file(model: LlamaCppModel, plain: Llm, draft: Path, spec: str) -> None:
    shared = ArmSetup(model, str(model.path), plain.tokenizer)
    run = make_arm(spec.format(draft=draft), shared).run(Unit.of(plain.encode(PROMPTS[0]), NEW), (0.0, 1))
    assert run.outputs == [plain.generate(PROMPTS[0], max_new_tokens=NEW, ignore_eos=True).token_ids]


def test_recurrent_files_have_no_drafter(folder: Path) -> None:
    file = mamba(folder / "mamba.gguf")
    llm = ft.load(file)
    assert llm.engine.drafter is None and llm.tokenizer is None
    assert len(llm.generate([1, 2, 3], max_new_tokens=6).token_ids) == 6
    batch = llm.generate([[1, 2, 3], [4, 5]] * 3, max_new_tokens=6)
    assert batch[0].token_ids == llm.generate([1, 2, 3], max_new_tokens=6).token_ids == batch[4].token_ids
    with pytest.raises(CapabilityError, match="mamba has recurrent layers"):
        ft.load(file, drafter="ngram")


# -- tokenizers ------------------------------------------------------------------------------------------------------


def test_tokenizer_is_the_folders(target: Path) -> None:
    tokenizer, reference = load_tokenizer(target), load_tokenizer("builtin")
    assert tokenizer is not None and reference is not None
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == reference(text)["input_ids"]
        ids = reference(text)["input_ids"]
        for skip in (False, True):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids[:3]) == reference.decode(ids[:3])
    assert tokenizer(TEXTS)["input_ids"] == reference(TEXTS)["input_ids"]
    assert tokenizer.get_vocab() == reference.get_vocab()
    assert (tokenizer.eos_token_id, tokenizer.all_special_ids) == (reference.eos_token_id, reference.all_special_ids)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_streams_hold_half_characters_back(target: Path, folder: Path, kind: str) -> None:
    tokenizer = LlamaCppTokenizer(target if kind == "bytes" else sentencepiece(folder / "spm.gguf"))
    text = "hi the 中文 🙂 ☃"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > len(text) / 2
    stream = Detokenizer(tokenizer)
    pieces = [stream.push([token]) for token in ids]
    assert "".join(pieces) + stream.flush() == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_sentencepiece_spaces_and_special_tokens(folder: Path) -> None:
    tokenizer = LlamaCppTokenizer(sentencepiece(folder / "spm.gguf"))
    ids = tokenizer.encode("hi the")
    assert ids[0] == tokenizer.bos_token_id == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hi the"
    assert tokenizer.decode([*ids, 2]) == "<s> hi the</s>"
    assert tokenizer.spelling(ids[1]) == b" hi"


def test_chat_template(folder: Path, target: Path) -> None:
    tokenizer = LlamaCppTokenizer(sentencepiece(folder / "spm.gguf"))
    messages = [{"role": "the", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<s>the hi</s>"
    ids = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    assert ids[0] == 1 and ids[-1] == 2 and ids.count(1) == 1
    with pytest.raises(ValueError, match="has no chat template"):
        LlamaCppTokenizer(target).apply_chat_template(messages)


def test_end_of_generation_tokens(model: LlamaCppModel) -> None:
    assert model.eos_token_ids == {0}


# -- what is refused -------------------------------------------------------------------------------------------------


def one_line(source: Any, words: str, **options: Any) -> None:
    with pytest.raises(LoadError, match=words) as error:
        load_model(source, backend="llama.cpp", **options)
    assert "\n" not in str(error.value)


def test_no_such_file(tmp_path: Path) -> None:
    one_line(tmp_path / "none.gguf", "there is no file")


def test_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04 something else")
    one_line(tmp_path / "m.gguf", "is not a GGUF file: it starts with")
    (tmp_path / "m.gguf").write_bytes(b"")
    one_line(tmp_path / "m.gguf", "is not a GGUF file")


@pytest.mark.parametrize("share", [0.0005, 0.01, 0.9])
def test_cut_off(tmp_path: Path, target: Path, share: float) -> None:
    data = target.read_bytes()
    (tmp_path / "m.gguf").write_bytes(data[: int(len(data) * share)])
    one_line(tmp_path / "m.gguf", "is cut off or damaged .*copy it again")


def test_unknown_architecture(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", "nonsense", {"context_length": 8}, {"token_embd.weight": [[0.0] * 32]})
    one_line(file, "architecture that this llama.cpp does not know .*nonsense.*update llama-cpp-python")


def test_lacking_tensors(tmp_path: Path) -> None:
    file = mamba(tmp_path / "whole.gguf", layers=1)
    data = file.read_bytes().replace(b"blk.0.ssm_out.weight", b"blk.0.ssm_xxx.weight")
    (tmp_path / "m.gguf").write_bytes(data)
    one_line(tmp_path / "m.gguf", "cannot load .*'blk.0.ssm_out.weight' not found")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "bfloat16"}, "takes no dtype=bfloat16"),
        ({"device": "cuda"}, "takes no device=cuda"),
        ({"exact": "bitwise"}, "takes no exact=bitwise"),
        ({"inflate": "1b"}, "takes no inflate=1b"),
    ],
)
def test_options_without_sense(target: Path, options: dict[str, Any], words: str) -> None:
    one_line(target, words, **options)


def test_usual_options_pass(target: Path) -> None:
    assert isinstance(load_model(str(target), device="auto", backend="llama.cpp"), LlamaCppModel)
    assert isinstance(load_model(target, device="cpu", dtype=None, backend="llama.cpp"), LlamaCppModel)


def test_other_vocabulary(model: LlamaCppModel, plain: Llm, folder: Path, draft: Path) -> None:
    file = toy(folder / "toy.gguf", vocab=32)
    with pytest.raises(ValueError, match="vocabulary of 32, the target one of 8192"):
        ft.load(model, drafter=f"model:{file}", tokenizer=plain.tokenizer)
    other = folder / "renamed.gguf"
    data = draft.read_bytes()
    place = data.index("Ġreturn".encode())
    other.write_bytes(data[:place] + "Ġrxturn".encode() + data[place + len("Ġreturn".encode()) :])
    with pytest.raises(ValueError, match="has another tokenizer than the target"):
        ft.load(model, drafter=f"model:{other}", tokenizer=plain.tokenizer)


def test_drafters_that_need_the_network(model: LlamaCppModel, plain: Llm) -> None:
    for spec in ("medusa", "early_exit", "swift", "sparse_kv"):
        with pytest.raises(CapabilityError, match="target") as error:
            ft.load(model, drafter=spec, tokenizer=plain.tokenizer)
        assert "\n" not in str(error.value)


def test_command_line(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "def f(", "--target", str(target), "--compare", "--json", "--max-new-tokens", "12"]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["identical"] and report["plain"]["text"]
    assert main(["generate", "def f(", "--target", "no.gguf"]) == 2
    assert "there is no file no.gguf" in capsys.readouterr().err


def test_the_log_is_quiet(target: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ft.load(target, drafter=None).generate(PROMPTS[0], max_new_tokens=2)
    assert capfd.readouterr() == ("", "")
