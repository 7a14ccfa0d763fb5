"""GGUF files that cannot be used: one line that says what to do, before any weight is read."""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import new_model
from gguf import GGMLQuantizationType as Quant

import foretoken as ft
from foretoken.cli.main import main
from foretoken.engine.request import Request
from foretoken.loading import LoadError, load_model, load_tokenizer
from foretoken.loading import gguf as loading
from foretoken.models.gguf.architectures import header_faults
from foretoken.models.gguf.network import _WeightFiller
from gguf_writer import Stored, header_of, random_bytes, write_model
from toys import engine, outputs

SIZES = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
DOWN = "blk.1.ffn_down.weight"
Header, Tensors = dict[str, Any], dict[str, Stored]


@pytest.fixture(scope="module")
def model() -> Any:
    return new_model("llama", **SIZES)


@pytest.fixture(scope="module")
def good(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gguf") / "good.gguf", model)


@pytest.fixture
def no_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "has_llama_cpp", lambda: False)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is loaded before everything was looked at."""

    def fail(self: _WeightFiller) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(_WeightFiller, "fill", fail)


def refused(source: Any, words: str, **options: Any) -> None:
    with pytest.raises(LoadError, match=words) as error:
        load_model(source, **options)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def changed(folder: Path, model: Any, change: Callable[[Header, Tensors], None]) -> Path:
    return write_model(folder / "m.gguf", model, change=change)


# -- the file ---------------------------------------------------------------------------------------------------------


def length_of_header(data: bytes) -> int:
    """Bytes before the tensors: where the name of the first one stands, at least."""
    return data.index(b"token_embd.weight")


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("backend", ["auto", "native"])
def test_cut_off(tmp_path: Path, good: Path, backend: str) -> None:
    data, file = good.read_bytes(), tmp_path / "m.gguf"
    header = length_of_header(data)
    for length in (5, 8, 20, 30, header // 2, header + 3, header + 60, len(data) // 2, len(data) - 40):
        file.write_bytes(data[:length])
        refused(file, r"m.gguf is cut off or damaged \(.*\): copy it again", backend=backend)


@pytest.mark.parametrize("start", [b"", b"GG", b"PK\x03\x04 something", b"FUGG\x03\0\0\0"])
def test_no_gguf(tmp_path: Path, good: Path, start: bytes) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(start + good.read_bytes()[len(start) :] if len(start) > 4 else start)
    refused(file, r"m.gguf is not a GGUF file: it starts with b'")


def test_no_such_file(tmp_path: Path) -> None:
    refused(tmp_path / "none.gguf", "there is no file .*none.gguf")
    refused(tmp_path, "no config.json")


@pytest.mark.parametrize(
    ("version", "words"),
    [(1, "versions 2 and 3 are supported, not 1"), (4, "not 4"), (3 << 24, "written for another byte order")],
)
def test_other_versions(tmp_path: Path, good: Path, version: int, words: str) -> None:
    data, file = good.read_bytes(), tmp_path / "m.gguf"
    file.write_bytes(data[:4] + struct.pack("<I", version) + data[8:])
    refused(file, f"m.gguf cannot be read: .*{words}; convert the model again")


def test_damage_anywhere_is_one_line(tmp_path: Path, good: Path) -> None:
    """Bytes of the header are turned over: whatever they were, the file is read or refused."""
    data, file = good.read_bytes(), tmp_path / "m.gguf"
    end = length_of_header(data) + 400
    rng, refusals = random.Random(0), 0
    for _ in range(250):
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 1, 4))):
            damaged[rng.randrange(4, end)] = rng.randrange(256)
        file.write_bytes(damaged)
        try:
            load_model(file, backend="native")
        except LoadError as error:
            refusals += 1
            assert "\n" not in str(error)
    assert refusals > 100


# -- the header -------------------------------------------------------------------------------------------------------


def without(key: str) -> Callable[[Header, Tensors], None]:
    return lambda header, tensors: header.pop(key)


def with_value(key: str, value: Any) -> Callable[[Header, Tensors], None]:
    return lambda header, tensors: header.update({key: value})


def renamed(header: Header, tensors: Tensors) -> None:
    tensors["blk.1.ffn_dwon.weight"] = tensors.pop(DOWN)


def narrower(header: Header, tensors: Tensors) -> None:
    tensors[DOWN] = Stored(tensors[DOWN].data[:, :32].copy(), Quant.F32)


def one_more(header: Header, tensors: Tensors) -> None:
    tensors["blk.1.attn_sinks.weight"] = Stored(np.zeros(4, np.float32), Quant.F32)


def own_yarn(header: Header, tensors: Tensors) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 32, "yarn_attn_factor": 2.0}
    header.update({f"llama.rope.scaling.{key}": value for key, value in scaling.items()})


def some_biases(header: Header, tensors: Tensors) -> None:
    for block in range(2):
        for part in "qkv":
            count = tensors[f"blk.{block}.attn_{part}.weight"].data.shape[0]
            tensors[f"blk.{block}.attn_{part}.bias"] = Stored(np.zeros(count, np.float32), Quant.F32)


@pytest.mark.usefixtures("no_weights", "no_llama_cpp")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("llama.embedding_length"), "lacks llama.embedding_length: it is incomplete, convert the model again"),
        (without("llama.attention.head_count"), "lacks llama.attention.head_count"),
        (with_value("llama.attention.head_count", 0), "has llama.attention.head_count 0: convert the model again"),
        (with_value("llama.embedding_length", "wide"), "header .* convert the model again"),
        (with_value("llama.attention.head_count_kv", 3), "head_count_kv 3 for 4 heads: convert the model again"),
        (with_value("llama.expert_count", "many"), "header .* convert the model again"),
        (with_value("llama.embedding_length", 128), "is .*, and must be .*: convert the model again"),
        (with_value("llama.block_count", 3), "lacks .*: it is incomplete, copy it again"),
        (with_value("llama.block_count", 2**31), "lacks .*: it is incomplete, copy it again"),
        (with_value("llama.block_count", 1), "has blk.1.attn_k.weight, which llama models do not have: "),
        (
            with_value("llama.rope.dimension_count", 8),
            "rotates 8 of 16 dimensions of a head, which is not supported here: ",
        ),
        (
            with_value("llama.rope.scaling.type", "odd"),
            "scales rotary positions by 'odd', which is not supported here: ",
        ),
        (
            with_value("llama.rope.dimension_count_swa", 8),
            "rotates 8 of 16 dimensions of a head, which is not supported here: ",
        ),
        (
            with_value("llama.rope.scaling.attn_factor", 0.5),
            "has llama.rope.scaling.attn_factor 0.5, which is not supported here: ",
        ),
        (with_value("llama.attention.causal", False), r"\(llama\) is not a causal language model: give one that"),
        (with_value("llama.attention.head_count", [4, 2]), "has layers with different attention.head_count"),
        (with_value("split.count", "two"), "is cut off or damaged .*split.count"),
        (with_value("general.alignment", "wide"), "is cut off or damaged .*general.alignment"),
        (with_value("general.alignment", 24), "is cut off or damaged .*general.alignment is 24, not a power of two"),
        (own_yarn, "has llama.rope.scaling.yarn_attn_factor 2.0, which is not supported here: "),
        (some_biases, "has biases in only some attention projections, which is not supported here: "),
        (renamed, f"lacks 1 tensors .first: {DOWN}.: it is incomplete, copy it again"),
        (narrower, rf"{DOWN} in .* is \[64, 32\], and must be \[64, 256\]: convert the model again"),
        (one_more, "has blk.1.attn_sinks.weight, which llama models do not have: .*llama.cpp"),
    ],
)
def test_headers_that_do_not_fit(
    tmp_path: Path, model: Any, change: Callable[[Header, Tensors], None], words: str
) -> None:
    refused(changed(tmp_path, model, change), words)


@pytest.mark.usefixtures("no_weights", "no_llama_cpp")
def test_divisors_of_rotary_frequencies_that_differ_by_layer(tmp_path: Path) -> None:
    def change(header: Header, tensors: Tensors) -> None:
        tensors["rope_freqs.weight"] = Stored(np.ones(8, np.float32), Quant.F32)

    file = changed(tmp_path, new_model("gemma3_text", **SIZES, head_dim=16, tie_word_embeddings=True), change)
    refused(file, "has rope_freqs.weight, which gemma3_text models do not have: llama.cpp may run it")


def flat(tensor: Any) -> Any:
    return tensor.reshape(-1)


def two_dimensions(tensor: Any) -> Any:
    return tensor.reshape(len(tensor), -1)


def other_width(tensor: Any) -> Any:
    return tensor[:, :, :32].copy()


def fewer_experts(tensor: Any) -> Any:
    return tensor[:2].copy()


@pytest.mark.usefixtures("no_weights", "no_llama_cpp")
@pytest.mark.parametrize("shape", [flat, two_dimensions, other_width, fewer_experts])
@pytest.mark.parametrize("parts", [("gate",), ("up",), ("gate", "up")])
def test_experts_that_do_not_fit_together(tmp_path: Path, shape: Callable[[Any], Any], parts: tuple[str, ...]) -> None:
    def change(header: Header, tensors: Tensors) -> None:
        for part in parts:
            name = f"blk.1.ffn_{part}_exps.weight"
            tensors[name] = Stored(shape(tensors[name].data), Quant.F32)

    file = changed(tmp_path, new_model("mixtral", **SIZES), change)
    refused(file, r"blk.1.ffn_gate_exps.weight in .* is \[.*\], and must be \[.*\]: convert the model again")


@pytest.mark.usefixtures("no_weights", "no_llama_cpp")
def test_experts_that_memory_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 383 * 2**10
    monkeypatch.setattr("foretoken.models.machine.free_bytes", lambda: free)
    sizes = {**SIZES, "intermediate_size": 256, "num_local_experts": 2, "num_experts_per_tok": 1}
    file = write_model(tmp_path / "m.gguf", new_model("mixtral", **sizes, sliding_window=None), "Q8_0")
    # 2 layers x 2 experts x 3 matrices of 64 x 256 numbers in 2 bytes are 384 KiB.
    refused(file, "the experts of .*m.gguf take 0.0 GiB in bfloat16, and 0.0 GiB of memory are free: llama.cpp may run")
    free += 2**10
    with pytest.raises(AssertionError, match="weights are read"):
        load_model(file)


@pytest.mark.parametrize("part", ["gate", "up", "down"])
def test_experts_that_are_not_finite(tmp_path: Path, part: str) -> None:
    name = f"blk.1.ffn_{part}_exps.weight"

    def change(header: Header, tensors: Tensors) -> None:
        tensors[name].data.flat[-1] = np.inf

    file = changed(tmp_path, new_model("mixtral", **SIZES, sliding_window=None), change)
    refused(file, f"{name} in .* holds NaN or inf")


def test_an_unknown_architecture(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = changed(tmp_path, model, with_value("general.architecture", "starcoder2"))
    message = "has the architecture 'starcoder2', and only llama, qwen2, .* are supported here: "
    for installed, backend, remedy in (
        (False, "auto", r"llama.cpp may run it \(pip install 'foretoken\[gguf\]', .*\), or give a Transformers folder"),
        (False, "native", r"backend=llama.cpp may run it \(pip install"),
        (True, "native", "load it with backend=llama.cpp"),
    ):
        monkeypatch.setattr(loading, "has_llama_cpp", lambda installed=installed: installed)
        refused(file, message + remedy, backend=backend)


# -- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("kind", ["IQ2_XXS", "IQ4_XS", "TQ1_0", "Q8_K", "F64"])
def test_types_that_are_not_read(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def change(header: Header, tensors: Tensors) -> None:
        block, size = gguf.GGML_QUANT_SIZES[Quant[kind]]
        tensors[DOWN] = Stored(np.zeros((64, 256 // block * size), np.uint8), Quant[kind])

    file = changed(tmp_path, model, change)
    for installed in (False, True):
        monkeypatch.setattr(loading, "has_llama_cpp", lambda installed=installed: installed)
        refused(
            file,
            f"{DOWN} in .* has the type {kind}, which is not supported here: .*backend=llama.cpp",
            backend="native",
        )


@pytest.mark.usefixtures("no_weights", "no_llama_cpp")
def test_types_that_nobody_knows(tmp_path: Path, good: Path) -> None:
    data, file = good.read_bytes(), tmp_path / "m.gguf"
    name = DOWN.encode()
    place = data.index(name) + len(name) + 4 + 2 * 8  # behind the number of dimensions and two of them
    file.write_bytes(data[:place] + struct.pack("<I", 250) + data[place + 4 :])
    refused(file, f"{DOWN} in .* is of type 250, which is unknown: ", backend="native")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q4_K", "F32 norm", "F16"])
def test_numbers_that_are_none(tmp_path: Path, model: Any, kind: str, value: float) -> None:
    name = "blk.1.attn_norm.weight" if "norm" in kind else DOWN

    def change(header: Header, tensors: Tensors) -> None:
        if kind.startswith("F"):
            data = tensors[name].data.astype(np.float16 if kind == "F16" else np.float32)
            data.flat[5] = value
            tensors[name] = Stored(data, Quant[kind.split()[0]])
            return
        raw = random_bytes(kind, 64, 256)
        raw[7, :2] = np.array([value], np.float16).view(np.uint8)
        tensors[name] = Stored(raw, Quant[kind])

    refused(changed(tmp_path, model, change), f"{name} in .* holds NaN or inf: copy the file again, or use another one")


@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_pytorch_has_its_threads_again(tmp_path: Path, model: Any, value: float) -> None:
    """Matrices are read by threads with one each; so it is after a file that is refused, too."""

    def change(header: Header, tensors: Tensors) -> None:
        raw = random_bytes("Q8_0", 64, 256)
        raw[7, :2] = np.array([value], np.float16).view(np.uint8)
        tensors[DOWN] = Stored(raw, Quant["Q8_0"])

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with contextlib.nullcontext() if value == 0.5 else pytest.raises(LoadError, match="NaN"):
            load_model(changed(tmp_path, model, change), backend="native")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_draft_models_plain_numbers_are_looked_at(tmp_path: Path, model: Any) -> None:
    def change(header: Header, tensors: Tensors) -> None:
        tensors[DOWN].data.flat[5] = np.nan

    refused(changed(tmp_path, model, change), "mlp.down_proj.weight in .* holds NaN or inf", role="draft")


# -- parts ------------------------------------------------------------------------------------------------------------


def split(folder: Path, model: Any) -> list[Path]:
    """The model in two files, as llama.cpp's own tool splits it."""
    files = [folder / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]

    def part(number: int) -> Callable[[Header, Tensors], None]:
        def change(header: Header, tensors: Tensors) -> None:
            names = list(tensors)
            for name in names[len(names) // 2 :] if number == 0 else names[: len(names) // 2]:
                del tensors[name]
            if number:
                header.clear()
                header["general.architecture"] = "llama"
            header.update({"split.no": number, "split.count": 2, "split.tensors.count": len(names)})

        return change

    for number, file in enumerate(files):
        write_model(file, model, change=part(number))
    return files


def test_a_model_in_parts(tmp_path: Path, model: Any, good: Path) -> None:
    first, second = split(tmp_path, model)
    read: Any = load_model(first, backend="native")
    whole: Any = load_model(good, backend="native")
    for (name, weight), (_, expected) in zip(
        read.model.named_parameters(), whole.model.named_parameters(), strict=True
    ):
        assert torch.equal(weight, expected), name
    refused(second, "is one of 2 parts: give the first, ...-00001-of-....gguf", backend="native")
    moved = first.rename(tmp_path / "renamed.gguf")
    refused(moved, "is one of 2 parts: give the first", backend="native")
    moved.rename(first)
    second.unlink()
    refused(first, "there is no file .*m-00002-of-00002.gguf", backend="native")


def test_parts_of_another_model(tmp_path: Path, model: Any, good: Path) -> None:
    first, second = split(tmp_path, model)
    kept = second.read_bytes()
    second.write_bytes(good.read_bytes())
    refused(first, r"m-00002-of-00002.gguf is not part 2 of 2 \(.*\): copy all 2 parts again", backend="native")
    second.write_bytes(first.read_bytes())
    refused(first, "is not part 2 of 2", backend="native")

    def fewer(header: Header, tensors: Tensors) -> None:
        for name in [*tensors][:-1]:
            del tensors[name]
        header.update({"split.no": 1, "split.count": 2})

    write_model(second, model, change=fewer)
    refused(first, "and its parts have .* tensors of .*: copy all 2 parts again", backend="native")
    second.write_bytes(kept)
    load_model(first, backend="native")


@pytest.mark.usefixtures("no_weights", "no_llama_cpp")
def test_places_between_the_steps_of_the_file(tmp_path: Path, good: Path) -> None:
    data, file = good.read_bytes(), tmp_path / "m.gguf"
    name = DOWN.encode()
    place = data.index(name) + len(name) + 4 + 2 * 8 + 4  # behind the dimensions and the type
    (offset,) = struct.unpack("<Q", data[place : place + 8])
    file.write_bytes(data[:place] + struct.pack("<Q", offset - 2) + data[place + 8 :])
    refused(file, f"is cut off or damaged .*{DOWN} is at {offset - 2}, not a multiple of 32", backend="native")


@pytest.mark.usefixtures("no_llama_cpp")
def test_an_end_token_that_is_no_number(tmp_path: Path, model: Any) -> None:
    file = changed(tmp_path, model, with_value("tokenizer.ggml.eos_token_id", [1, 2]))
    refused(file, "header .* convert the model again")


def test_an_embedding_that_is_not_finite_is_named(tmp_path: Path, model: Any) -> None:
    """Its rows are looked up in the file, so nothing reads all of them at load."""

    def change(header: Header, tensors: Tensors) -> None:
        stored = gguf.quantize(tensors["token_embd.weight"].data.astype(np.float32), Quant.Q8_0)
        stored[7, :2] = np.array([np.inf], np.float16).view(np.uint8)
        tensors["token_embd.weight"] = Stored(stored, Quant.Q8_0)

    llm = ft.load(changed(tmp_path, model, change), backend="native")
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight in .*m.gguf holds NaN or inf"):
        llm.generate([7, 8], max_new_tokens=2)


# -- options ----------------------------------------------------------------------------------------------------------


def test_backends(good: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"backend must be one of auto, native, llama\.cpp, not 'exllama'"):
        ft.load(good, backend="exllama")
    with pytest.raises(ValueError, match="backend=native is for GGUF files, and builtin is not one: leave backend out"):
        ft.load("builtin", backend="native")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float64"}, "takes no dtype=float64: .* use dtype=float32"),
        ({"inflate": "1b"}, "takes no inflate=1b: inflate the model that it was converted from"),
        ({"quantize": "int4"}, "takes no quantize=int4: its weights keep their bits"),
        ({"device": "cuda"}, "takes no device=cuda: "),
    ],
)
def test_options_without_sense(good: Path, options: dict[str, Any], words: str) -> None:
    refused(good, words, **options)


def test_a_file_without_a_vocabulary_takes_ids(good: Path) -> None:
    assert load_tokenizer(good) is None
    llm = ft.load(good)
    assert len(llm.generate([3, 4, 5], max_new_tokens=4, ignore_eos=True).token_ids) == 4
    with pytest.raises(ValueError, match="tokenizer") as error:
        llm.generate("a text", max_new_tokens=4)
    assert "\n" not in str(error.value)


def test_a_context_longer_than_memory(tmp_path: Path, model: Any) -> None:
    """A context length promised by a header costs nothing; a text that does not fit is refused, the next one runs."""
    target = load_model(changed(tmp_path, model, with_value("llama.context_length", 2**31 - 1)), backend="native")
    assert target.context_length == 2**31 - 1
    server = engine(target, kv_memory=2**20)
    with pytest.raises(ValueError, match="kv_memory is 1048576: shorten the prompt or ask for fewer tokens"):
        server.add(Request([3, 4, 5], max_new_tokens=10**7))
    assert len(outputs(server, [Request([3, 4, 5], max_new_tokens=4)])[0]) == 4


def test_the_command_line_says_one_line(tmp_path: Path, good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "broken.gguf"
    for data, words in ((good.read_bytes()[:-40], "is cut off or damaged"), (b"PK\3\4", "is not a GGUF file")):
        file.write_bytes(data)
        assert main(["generate", str(file), "def f(", "--max-new-tokens", "4"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and words in err and len(err.strip().splitlines()) == 1
    assert main(["generate", str(good), "def f(", "--max-new-tokens", "4"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "tokenizer" in err and len(err.strip().splitlines()) == 1


def test_the_header_is_as_the_writer_says(good: Path, model: Any) -> None:
    """The tests above change a file that is otherwise sound."""
    assert header_of(model)["llama.block_count"] == 2
    assert load_model(good, backend="native").vocab_size == model.config.vocab_size


def test_a_broken_installation_is_not_blamed_on_the_file() -> None:
    file: Any = SimpleNamespace(path="x.gguf", architecture="llama")
    with pytest.raises(ImportError, match="no such package"), header_faults(file):
        raise ImportError("no such package")
