"""Bad checkpoints and parts that do not fit: one line that says what is wrong and what to do."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from time import sleep
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as hf_logging

import foretoken as ft
from foretoken.core.io.checkpoints import cause_of
from foretoken.loading import LoadError, load_model, load_tokenizer, parse_dtype
from foretoken.loading.networks import from_pretrained
from foretoken.methods.drafters.ensemble import EnsembleDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.models.base import CapabilityError
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.other.table import TableModel

WORDS = ["zero", "one", "two", "three", "four", "five"]


def model(vocab_size: int = 64, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
        )
    )


def save_checkpoint(folder: Path, **options: Any) -> Path:
    hf_logging.disable_progress_bar()
    model(**options).save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path, words: list[str]) -> None:
    inner = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0]))
    inner.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=words[0]).save_pretrained(folder)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "good")


def test_an_encoder_with_a_decoder_is_loaded_with_both(tmp_path: Path) -> None:
    """Bart has a causal class, too, which would load half of it: what is refused is its whole."""
    shape = {"vocab_size": 64, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16,
             "decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}  # fmt: skip
    BartForConditionalGeneration(BartConfig(**shape)).save_pretrained(tmp_path / "bart")
    with pytest.raises(
        CapabilityError, match="bart is an encoder-decoder model without a relative position bias"
    ) as error:
        ft.load(tmp_path / "bart")
    assert "\n" not in str(error.value)
    with pytest.raises(LoadError, match="is an encoder-decoder model, which cannot be split: leave tensor_parallel"):
        from_pretrained(str(tmp_path / "bart"), None, None, split=object())


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama", "hidd')


def foreign_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "no_such_architecture"}')


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def pickle_only(folder: Path) -> None:
    torch.save(model().state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def truncated(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def truncated_header(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])


def empty_file(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def no_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 4096)


def empty_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


def split(folder: Path) -> list[Path]:
    hf_logging.disable_progress_bar()
    model().save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    return sorted(folder.glob("*.safetensors"))


def missing_shard(folder: Path) -> None:
    split(folder)[1].unlink()


def broken_index(folder: Path) -> None:
    split(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {')


def empty_index(folder: Path) -> None:
    split(folder)
    (folder / "model.safetensors.index.json").write_text("[]")


def missing_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def wrong_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))


def wrong_kind(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": "x"}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_config, "has no config.json: point to"),
        (broken_config, "config.json"),
        (foreign_config, "no_such_architecture"),
        (no_weights, "holds no .*safetensors weights: the checkpoint is incomplete"),
        (pickle_only, r"pickled weights only \(pytorch_model.bin\).*convert them"),
        (truncated, "half-written, copy it again"),
        (truncated_header, "damaged or half-written, copy it again"),
        (empty_file, "damaged or half-written, copy it again"),
        (no_safetensors, "damaged or half-written, copy it again"),
        (empty_header, "damaged or half-written, copy it again"),
        (missing_shard, "lacks model-00002-of-.*copy the missing shards"),
        (broken_index, "model.safetensors.index.json is damaged.*copy it again"),
        (empty_index, "model.safetensors.index.json is damaged.*copy it again"),
        (
            missing_weights,
            r"lacks 1 weights \(first: model.layers.1.mlp.up_proj.weight\): the checkpoint is incomplete",
        ),
        (wrong_kind, "load a model from .*: Validation error for field 'rms_norm_eps': .* expected float, got str"),
        (wrong_shape, r"config.json that does not fit its weights: model.layers.0.mlp.*\[32, 32\].*\[32, 48\]"),
    ],
)
def test_bad_checkpoints(good: Path, damage: Callable[[Path], object], message: str) -> None:
    assert isinstance(load_model(good), HuggingFaceModel)
    damage(good)
    for load in (lambda: load_model(good), lambda: ft.load(str(good), drafter=None)):
        with pytest.raises(LoadError, match=message) as caught:
            load()
        assert "\n" not in str(caught.value)
        assert good.name in str(caught.value)


def test_a_sharded_checkpoint_loads(good: Path) -> None:
    expected = load_model(good).model.state_dict()  # type: ignore[attr-defined]
    assert len(split(good)) > 1
    got = load_model(good).model.state_dict()  # type: ignore[attr-defined]
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_missing_folders(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    for path in (tmp_path / "nothing", f"{tmp_path}/nothing", "./no/such/folder", file):
        with pytest.raises(LoadError, match="is not a folder with a model"):
            load_model(path)
        with pytest.raises(LoadError, match="is not a folder with a model"):
            ft.load(str(path), drafter=None)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(LoadError, match=r"has no config\.json"):
        load_model(empty)


def test_dtypes(good: Path) -> None:
    with pytest.raises(ValueError, match="unknown dtype 'float8': choose one of float32, float64, bfloat16, float16"):
        load_model(good, dtype="float8")
    assert parse_dtype(torch.float16) is torch.float16
    for name in ("float32", "float64", "bfloat16"):
        loaded = load_model(good, dtype=name)
        assert isinstance(loaded, HuggingFaceModel)
        assert loaded.dtype is parse_dtype(name)


def test_a_model_object_is_taken_as_it_is() -> None:
    network = model()
    loaded = load_model(network)
    assert isinstance(loaded, HuggingFaceModel)
    assert loaded.model is network
    table = TableModel.random(5)
    assert load_model(table) is table


def test_draft_models_must_share_the_tokenizer(tmp_path: Path) -> None:
    target, draft = save_checkpoint(tmp_path / "target"), save_checkpoint(tmp_path / "draft", seed=1)
    save_tokenizer(target, WORDS)
    save_tokenizer(draft, WORDS)
    assert ft.load(str(target), drafter=f"model:{draft},k=2").generate("one two", max_new_tokens=4).token_ids
    save_tokenizer(draft, [*WORDS[:3], "drei", *WORDS[4:]])
    with pytest.raises(
        ValueError, match=r"another tokenizer.*2 entries differ, first '(drei|three)' = 3.*'ngram'"
    ) as caught:
        ft.load(str(target), drafter=f"model:{draft},k=2")
    assert "\n" not in str(caught.value)


def test_draft_models_must_have_the_targets_vocabulary(good: Path, tmp_path: Path) -> None:
    other = save_checkpoint(tmp_path / "other", vocab_size=1000)
    with pytest.raises(ValueError, match="vocabulary of 1000, the target one of 64: they do not share a tokenizer"):
        ft.load(str(good), drafter=f"model:{other}")


def test_draft_models_are_checked_like_targets(good: Path, tmp_path: Path) -> None:
    draft = save_checkpoint(tmp_path / "draft")
    truncated(draft)
    with pytest.raises(LoadError, match="half-written"):
        ft.load(str(good), drafter=f"model:{draft}")
    with pytest.raises(LoadError, match="is not a folder"):
        ft.load(str(good), drafter=f"model:{tmp_path}/nothing")
    with pytest.raises(ValueError, match="needs a path for this target: model:PATH"):
        ft.load(str(good), drafter="model")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nothing", "unknown drafter 'nothing': choose one of .*ngram"),
        ("ngram,depth=3", "unknown option 'depth' of drafter 'ngram': valid ones: n, k"),
        ("ngram,k=many", "option k='many' of drafter 'ngram' must be of type int"),
        ("ngram,k", "'k' in 'ngram,k' is not key=value"),
        ("ngram:./path", "drafter 'ngram' takes no path"),
        ("ngram,k=0", "k >= 1"),
    ],
)
def test_bad_specs(good: Path, spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        ft.load(str(good), drafter=spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"allow_lossy": "yes"}, "allow_lossy must be True or False, not 'yes'"),
        ({"known": 1}, "known must be True or False, not 1"),
        ({"prefix_cache": "no"}, "prefix_cache must be True or False, not 'no'"),
        ({"profile": 5}, "profile must be the path of a JSON file, not 5"),
        ({"tensor_parallel": "2"}, "tensor_parallel must be a whole number, not '2'"),
        ({"tensor_parallel": True}, "tensor_parallel must be a whole number, not True"),
        ({"tensor_parallel": 2, "backend": "foo"}, "backend must be one of auto, native, llama.cpp, not 'foo'"),
        ({"pack": 1}, "pack must be 'auto', True or False, not 1"),
    ],
)
def test_options_of_the_wrong_kind(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ft.load("builtin", **wrong)


def test_a_list_of_drafters_is_an_ensemble(good: Path, tmp_path: Path) -> None:
    draft = save_checkpoint(tmp_path / "draft", seed=1)
    ngram = NgramDrafter(n=2)
    plain = ft.load(str(good), drafter=None).generate([1, 2, 3, 1, 2], max_new_tokens=8).token_ids
    for drafters in ([f"model:{draft},k=2", ngram], (f"model:{draft},k=2", "ngram,k=3", "suffix,share=false")):
        llm = ft.load(str(good), drafter=drafters)
        assert isinstance(llm.drafter, EnsembleDrafter) and len(llm.drafter.drafters) == len(drafters)
        assert llm.generate([1, 2, 3, 1, 2], max_new_tokens=8).token_ids == plain
    assert ft.load(str(good), drafter=["ngram", ngram]).drafter.drafters[1] is ngram  # type: ignore[union-attr]


def test_bad_lists_of_drafters(good: Path, tmp_path: Path) -> None:
    other = save_checkpoint(tmp_path / "other", vocab_size=1000)
    for drafters, message in (
        ([], "needs at least one member"),
        (["ngram", "nothing"], "unknown drafter 'nothing': choose one of"),
        (["ngram", "none"], "cannot hold 'none'"),
        (["ngram", f"model:{other}"], "vocabulary of 1000, the target one of 64"),
        (f"ensemble,drafters=(ngram|model:{other},k=2)", "vocabulary of 1000, the target one of 64"),
        (f"router,drafters=(model:{other}|ngram)", "vocabulary of 1000, the target one of 64"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            ft.load(str(good), drafter=drafters)
        assert "\n" not in str(caught.value)


def test_tokenizers(good: Path) -> None:
    assert load_tokenizer(good) is None
    with pytest.raises(ValueError, match="a text prompt needs a tokenizer"):
        ft.load(str(good), drafter=None).generate("one")
    save_tokenizer(good, WORDS)
    assert load_tokenizer(str(good)).get_vocab() == {word: i for i, word in enumerate(WORDS)}
    (good / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(LoadError, match="cannot load a tokenizer") as caught:
        load_tokenizer(good)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b'{"version": "1.0", "trunc'),
        ("tokenizer.json", b""),
        ("tokenizer.json", b"[]"),
        ("tokenizer.json", b"\xff\xfe\x00"),
        ("tokenizer_config.json", b'{"a":'),
        ("tokenizer_config.json", b"[]"),
        ("special_tokens_map.json", b"{"),
        ("chat_template.jinja", b"\xff\xfe"),
    ],
)
def test_broken_tokenizer_files_are_named(good: Path, name: str, content: bytes) -> None:
    save_tokenizer(good, WORDS)
    (good / name).write_bytes(content)
    with pytest.raises(LoadError, match=f"cannot load a tokenizer from .*: {name} is damaged.*copy it again") as caught:
        ft.load(str(good), None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "tokenizer.json is missing, copy it"),
        ("{}", "tokenizer.json holds no tokenizer .*copy it again"),
        ('{"version": "1.0", "model": {}}', "tokenizer.json holds no tokenizer .*copy it again"),
    ],
)
def test_a_tokenizer_without_its_tokens_is_named(good: Path, content: str | None, words: str) -> None:
    save_tokenizer(good, WORDS)
    (good / "tokenizer.json").unlink()
    if content is not None:
        (good / "tokenizer.json").write_text(content)
    with pytest.raises(LoadError, match=f"cannot load a tokenizer from .*good: {words}") as caught:
        ft.load(str(good), None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("limit", ["x", [], {}])
def test_a_length_that_is_no_number_is_named(good: Path, limit: Any) -> None:
    save_tokenizer(good, WORDS)
    file = good / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": limit}))
    words = re.escape(f"tokenizer_config.json has model_max_length {limit!r}, which is not a number: copy it again")
    with pytest.raises(LoadError, match=f"cannot load a tokenizer from .*good: {words}") as caught:
        ft.load(str(good), None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("inside", [False, True])
def test_a_chat_template_with_a_syntax_error_does_not_keep_a_model_from_loading(good: Path, inside: bool) -> None:
    save_tokenizer(good, WORDS)
    text, name = "{% for message in messages %}\n{{ message.content ", "chat_template.jinja"
    if inside:
        name = "tokenizer_config.json"
        (good / name).write_text(json.dumps({**json.loads((good / name).read_text()), "chat_template": text}))
    else:
        (good / name).write_text(text)
    llm = ft.load(str(good), None)
    assert llm.generate("one two", max_new_tokens=3).token_ids
    with pytest.raises(ValueError, match=rf"chat template in .*good/{name} has a syntax error \(line 2: ") as caught:
        llm.chat([{"role": "user", "content": "one"}])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, r"\(quantised with bitsandbytes\): .*pip install"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, r"\(quantised with gptq\): .*pip install"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, r"\(quantised with awq\): .*pip install"),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, r"\(quantised with torchao\): .*torchao"),
    ],
)
def test_quantised_checkpoints_without_their_package_name_both(
    good: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], words: str
) -> None:
    config = json.loads((good / "config.json").read_text())
    (good / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    for package in ("bitsandbytes", "optimum", "gptqmodel", "torchao"):
        if importlib.util.find_spec(package) is not None:
            pytest.skip(f"{package} is installed")
    with pytest.raises(LoadError, match=words) as caught:
        ft.load(str(good), None)
    assert "\n" not in str(caught.value)


def test_a_package_that_is_not_there_is_named() -> None:
    error = ModuleNotFoundError("No module named 'torchao'", name="torchao")
    assert cause_of(error) == "it needs the package torchao (pip install torchao)"
    assert cause_of(RuntimeError("Validation error for field 'a':\n    TypeError: b")).endswith("'a': TypeError: b")
    assert cause_of(RuntimeError("a cause:")) == "a cause:"
    assert cause_of(RuntimeError("one\ntwo")) == "one" and cause_of(RuntimeError()) == "RuntimeError"


def test_networks_are_built_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers changes the default dtype of the whole process meanwhile: two threads left float64 behind."""
    model().save_pretrained(tmp_path)
    honest, inside = LlamaForCausalLM.from_pretrained, Lock()

    def build(*args: Any, **options: Any) -> Any:
        assert inside.acquire(blocking=False), "another thread builds"
        try:
            sleep(0.05)
            return honest(*args, **options)
        finally:
            inside.release()

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", build)
    dtypes = [torch.float64, torch.bfloat16, torch.float32] * 2
    with ThreadPoolExecutor(len(dtypes)) as threads:
        models = list(threads.map(lambda dtype: load_model(tmp_path, dtype=dtype), dtypes))
    assert [loaded.dtype for loaded in models] == dtypes and torch.get_default_dtype() == torch.float32


def test_python_without_docstrings_is_refused() -> None:
    """Transformers reads its docstrings when it is imported."""
    code = "import foretoken as ft\nft.load('builtin')"
    done = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("run Python without -OO (PYTHONOPTIMIZE=2)")
