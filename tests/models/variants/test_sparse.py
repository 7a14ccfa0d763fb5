"""A part of the target's cache: the right slots are chosen and copied, and the weights compute on just these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoints import checkpoint, new_model, prompt_of
from torch import Tensor

from foretoken.models import wrap
from foretoken.models.base import CapabilityError, Feed, SequenceState
from foretoken.models.forward.network import Network
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.network.taps import decoder_layers
from foretoken.models.other.table import TableModel
from foretoken.models.sequential import SequentialModel
from foretoken.models.variants.sparse import SINKS, SparseModel, recent_slots, retrieved_slots
from toys import llama

FAMILIES = ("llama", "llama_gqa_tied", "qwen2", "qwen3", "mistral", "gpt_neox", "gpt2", "olmo2", "phi3", "granite",
            "opt")  # fmt: skip
LATENT = "deepseek_v3"  # keeps compressed keys
TREE = ([7, 5, 6, 5, 5], [-1, 0, 0, 1, 2])
ROOT = 7

Subject = Callable[[str, bool], HuggingFaceModel]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Models by name, on the lean forward where there is one or on the public one."""
    models: dict[tuple[str, bool], Any] = {}

    def get(name: str, lean: bool) -> HuggingFaceModel:
        if (name, lean) not in models:
            model: Any = checkpoint(tmp_path_factory.mktemp("sparse"), name)
            models[name, lean] = model if lean and model.is_lean else HuggingFaceModel(model.model, lean=False)
        return models[name, lean]

    return get


def opened(model: HuggingFaceModel, length: int, start: int = 0) -> SequenceState:
    sequence = model.open()
    model.prefill(sequence, prompt_of(length + start)[start:])
    return sequence


def beside(sparse: SparseModel, source: SequenceState, root: int = ROOT) -> SequenceState:
    """A sequence with its subset; what must be fed next is the root."""
    sequence = sparse.open_beside(source)
    sparse.prefill(sequence, source.tokens)
    assert sparse.catch_up(sequence, [*source.tokens, root]) == [root]
    return sequence


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() < 1e-5 * b.std())


# -- which slots -----------------------------------------------------------------------------------------------------


def worked_keys() -> Tensor:
    """[2, 11, 2]: five chunks of two and one token more; only the first dimension varies, mean keys in the comments."""
    first = [-9, -9, 4, -4, 1, 1, 3, 0, 2, 2, 7]  # -9, 0, 1, 1.5, 2
    second = [-9, -9, 8, 8, -1, -1, 5, 5, -2, -2, 7]  # -9, 8, -1, 5, -2
    return torch.tensor([first, second], dtype=torch.float32)[:, :, None] * torch.tensor([1.0, 0.0])


def test_each_head_takes_the_chunks_of_the_best_mean_keys() -> None:
    """First chunk and unfinished end always; a large key beside a small one counts by their mean."""
    query = torch.tensor([[1.0, 0.0], [1.0, 5.0]])
    assert retrieved_slots(worked_keys(), query, budget=7, chunk=2).tolist() == [
        [0, 1, 6, 7, 8, 9, 10],
        [0, 1, 2, 3, 6, 7, 10],
    ]
    # The other way round for a query that points the other way.
    assert retrieved_slots(worked_keys(), -query, budget=5, chunk=2).tolist() == [[0, 1, 2, 3, 10], [0, 1, 8, 9, 10]]


def test_the_query_heads_of_a_group_are_averaged() -> None:
    """Heads 0 and 1 share the first key head: 3 and -1 make 1; heads 2 and 3 the second: 1 and -3 make -1."""
    query = torch.tensor([[3.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [-3.0, 0.0]])
    assert retrieved_slots(worked_keys(), query, budget=5, chunk=2).tolist() == [[0, 1, 8, 9, 10], [0, 1, 8, 9, 10]]


def test_a_share_of_the_budget_is_for_the_latest_chunks() -> None:
    query = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    slots = retrieved_slots(worked_keys(), query, budget=7, chunk=2, local=0.5)
    assert slots.tolist() == [[0, 1, 6, 7, 8, 9, 10], [0, 1, 2, 3, 8, 9, 10]]
    # However large the share, the first chunk stays.
    assert retrieved_slots(worked_keys(), query, 7, 2, local=0.99).tolist() == [[0, 1, 6, 7, 8, 9, 10]] * 2


def test_slots_never_exceed_the_budget() -> None:
    keys, query = torch.randn(2, 50, 4), torch.randn(4, 4)
    for count in range(25, 51):
        for budget in range(24, count):
            for local in (0.0, 0.5, 0.9):
                slots = retrieved_slots(keys[:, :count], query, budget, 8, local)
                assert budget - 8 < slots.shape[1] <= budget
                assert bool((slots.diff(dim=1) > 0).all()) and int(slots.max()) < count
                assert slots[:, :8].tolist() == [list(range(8))] * 2


def test_recent_slots_are_the_first_sixteen_and_the_last() -> None:
    assert recent_slots(30, 19).tolist() == [*range(16), 27, 28, 29]
    assert recent_slots(18, 17).tolist() == [*range(16), 17]


# -- what is computed on them ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_text_within_the_budget_is_the_target(subject: Subject, name: str, lean: bool) -> None:
    target = subject(name, lean)
    sparse = SparseModel(target, budget=40)
    assert sparse.forward_name == target.forward_name
    source = opened(target, 40)
    sequence = beside(sparse, source)
    logits = sparse.forward([Feed(sequence, *TREE)])[0].logits
    assert close(logits, target.forward([Feed(source, *TREE)])[0].logits)
    for model, each in ((target, source), (sparse, sequence)):
        model.commit(each, [0, 2, 4])
    after = [model.forward([Feed(each, [9, 3])])[0].logits for model, each in ((sparse, sequence), (target, source))]
    assert close(*after)
    sparse.release(sequence)
    target.release(source)


def masked_logits(
    target: HuggingFaceModel,
    context: list[int],
    kept: list[int],
    ends: dict[str, Callable[[Tensor], Tensor]] | None = None,
) -> Tensor:
    """[5, V] of the tree behind ``context`` when only its nodes are kept from most slots: one call of the model.

    ``ends``: of layers with windows, by their type, which differences of positions [n, n] they look at.
    """
    tokens, parents = TREE
    count, total = len(context), len(context) + len(tokens)
    allowed = torch.ones(total, total, dtype=torch.bool).tril()
    allowed[count:] = False
    allowed[count:, kept] = True
    depths: list[int] = []
    for node, parent in enumerate(parents):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        while node >= 0:
            allowed[count + len(depths) - 1, count + node] = True
            node = parents[node]
    positions = torch.tensor([[*range(count), *(count + depth for depth in depths)]])

    def additive(seen: Tensor) -> Tensor:
        mask = torch.zeros(1, 1, total, total, dtype=target.dtype)
        return mask.masked_fill_(~seen, torch.finfo(target.dtype).min)

    mask: Any = additive(allowed)
    if ends is not None:
        allowed[count:, :count] = True
        near = {kind: additive(allowed & rule(positions[0])) for kind, rule in ends.items()}
        mask = {"full_attention": mask, **near}
    out = target.model(torch.tensor([[*context, *tokens]]), attention_mask=mask, position_ids=positions)
    return out.logits[0, count:]


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("name", [*FAMILIES, LATENT])
@torch.inference_mode()
def test_a_subset_is_the_target_with_the_other_slots_masked(subject: Subject, name: str, lean: bool) -> None:
    target = subject(name, lean)
    source = opened(target, 50)
    sparse = SparseModel(target, budget=20, select="recent")
    sequence = beside(sparse, source)
    logits = sparse.forward([Feed(sequence, *TREE)])[0].logits
    expected = masked_logits(target, source.tokens, recent_slots(50, 20).tolist())
    assert close(logits, expected)
    assert not close(logits, target.forward([Feed(source, *TREE)])[0].logits)
    sparse.release(sequence)
    target.release(source)


def in_window(size: int) -> Callable[[Tensor], Tensor]:
    return lambda places: places[:, None] - places[None] < size


def in_chunk(size: int) -> Callable[[Tensor], Tensor]:
    return lambda places: places[:, None] // size == places[None] // size


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("gemma3", {"sliding_attention": in_window(8)}),
        ("gemma2", {"sliding_attention": in_window(8)}),
        ("llama4", {"chunked_attention": in_chunk(8)}),
    ],
)
@torch.inference_mode()
def test_layers_with_windows_keep_the_end(
    subject: Subject, name: str, ends: dict[str, Callable[[Tensor], Tensor]], lean: bool
) -> None:
    """Their window is whole; only the layers that see all of the text see a part of it."""
    target = subject(name, lean)
    source = opened(target, 50)
    sparse = SparseModel(target, budget=20, select="recent")
    assert 0 < len(sparse._ends_only) < target.num_layers
    sequence = beside(sparse, source)
    logits = sparse.forward([Feed(sequence, *TREE)])[0].logits
    assert close(logits, masked_logits(target, source.tokens, recent_slots(50, 20).tolist(), ends))
    assert not close(logits, target.forward([Feed(source, *TREE)])[0].logits)
    sparse.release(sequence)
    target.release(source)


@pytest.mark.parametrize("select", ["retrieval", "recent"])
def test_a_model_that_slides_everywhere_loses_nothing(subject: Subject, select: str) -> None:
    """All of a window of 8 is among the last 20 slots; later texts go on behind the subset."""
    target = subject("mistral_sliding", True)
    source = opened(target, 50)
    sparse = SparseModel(target, budget=20, chunk=4, select=select)
    sequence = beside(sparse, source)
    for model, each in ((target, source), (sparse, sequence)):
        model.forward([Feed(each, *TREE)])
        model.commit(each, [0, 2, 4])
    after = [model.forward([Feed(each, [9, 3])])[0].logits for model, each in ((sparse, sequence), (target, source))]
    assert close(*after)
    sparse.release(sequence)
    target.release(source)


def test_retrieval_takes_as_many_slots_of_every_layer(subject: Subject) -> None:
    """Layers that see all choose by their queries; the others keep the last ones, in order."""
    target = subject("gemma3", True)
    source = opened(target, 45)
    sparse = SparseModel(target, budget=20, chunk=4)
    sequence = beside(sparse, source)
    for layer in sparse._ends_only:
        keys: Any = target.cache.keys[layer]
        stored: Any = sparse.cache.keys[layer]
        assert torch.equal(stored[sequence.row, :, :17], keys[source.row, :, 45 - 17 : 45])
    assert sequence.num_slots == 17  # four chunks of 4, and the last token
    sparse.release(sequence)
    target.release(source)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_chosen_keys_and_values_are_copied_per_head(subject: Subject, name: str) -> None:
    """Queries come from the root, at its place, and every head gets its own slots."""
    target = subject(name, True)
    source = opened(target, 45)
    sparse = SparseModel(target, budget=20, chunk=4)
    queries = sparse.queries(source, ROOT)
    assert sorted(queries) == list(range(target.num_layers)) and not source.scratch_tokens
    sequence = beside(sparse, source)
    differing = 0
    for layer in range(target.num_layers):
        keys, values = target.cache.keys[layer], target.cache.values[layer]
        assert keys is not None and values is not None
        slots = retrieved_slots(keys[source.row, :, :45], queries[layer], 20, 4, 0.5)
        for head, chosen in enumerate(slots.tolist()):
            differing += chosen != slots[0].tolist()
            for cached, source_layer in ((sparse.cache.keys, keys), (sparse.cache.values, values)):
                stored: Any = cached[layer]
                assert torch.equal(stored[sequence.row, head, : len(chosen)], source_layer[source.row, head, chosen])
    assert differing or target.cache.keys[0].shape[1] == 1  # type: ignore[union-attr]
    sparse.release(sequence)
    target.release(source)


@pytest.mark.parametrize("lean", [True, False])
def test_the_query_is_the_rotated_one_of_the_root(lean: bool) -> None:
    """On a llama it can be computed by hand from the hidden state at the layer's input."""
    target = HuggingFaceModel(llama(), lean=lean)
    source = opened_llama(target, 30)
    queries = SparseModel(target, budget=24).queries(source, 9)
    taps = target.forward([Feed(source, [9])], ["layer:0", "layer:1"])[0].taps
    target.commit(source, ())
    for index, layer in enumerate(decoder_layers(target.model)):
        attention: Any = layer.self_attn
        flat = attention.q_proj(layer.input_layernorm(taps[f"layer:{index}"]))[0]  # type: ignore[operator]
        query = flat.view(4, -1)
        half = query.shape[1] // 2
        angles = 30 * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        a, b = query[:, :half], query[:, half:]
        turned = torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], 1)
        torch.testing.assert_close(queries[index], turned, rtol=0, atol=1e-6)
    target.release(source)


def opened_llama(target: HuggingFaceModel, length: int, start: int = 0) -> SequenceState:
    sequence = target.open()
    target.prefill(sequence, [(7 * i + i * i // 3) % 31 for i in range(start, start + length)])
    return sequence


# -- state -----------------------------------------------------------------------------------------------------------


def test_ragged_rows_equal_single_ones_while_rows_move() -> None:
    """Some texts fit, others do not; target rows and sparse rows are released in different orders."""
    target = HuggingFaceModel(llama())
    sparse = SparseModel(target, budget=24, chunk=4, rebuild=8)
    lengths = (40, 10, 60, 25)
    alone = []
    for length in lengths:
        source = opened_llama(target, length, start=length)
        sequence = beside(sparse, source)
        alone.append(sparse.forward([Feed(sequence, *TREE)])[0].logits)
        sparse.release(sequence)
        target.release(source)
    sources = [opened_llama(target, length, start=length) for length in lengths]
    sequences = [beside(sparse, source) for source in sources]
    batched = sparse.forward([Feed(sequence, *TREE) for sequence in sequences])
    for rows, expected in zip(batched, alone, strict=True):
        torch.testing.assert_close(rows.logits, expected, rtol=0, atol=1e-10)
    for sequence in sequences:
        sparse.commit(sequence, ())
    target.release(sources[0])  # the last one moves to row 0
    sparse.release(sequences[1])  # the last one moves to row 1
    again = sparse.forward([Feed(sequences[3], *TREE)])[0].logits
    torch.testing.assert_close(again, alone[3], rtol=0, atol=1e-10)
    sparse.choose(sequences[3], ROOT)  # dropped the scratch; reads the moved row
    again = sparse.forward([Feed(sequences[3], *TREE)])[0].logits
    torch.testing.assert_close(again, alone[3], rtol=0, atol=1e-10)


def test_tokens_that_were_committed_stay_behind_the_subset() -> None:
    """The model's own text goes on after the subset, whether it came in one call or in several with dead branches."""
    target = HuggingFaceModel(llama())
    sparse = SparseModel(target, budget=24, chunk=4)
    source = opened_llama(target, 40)
    once, often = beside(sparse, source), beside(sparse, source)
    text = [3, 1, 4, 1, 5]
    expected = sparse.forward([Feed(once, [*text, 9])])[0].logits[-1]
    sparse.forward([Feed(often, [3, 8, 1, 1], [-1, 0, 0, 2])])
    assert sparse.catch_up(often, [*source.tokens, *text, 9]) == [4, 1, 5, 9]
    got = sparse.forward([Feed(often, [4, 1, 5, 9])])[0].logits[-1]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    sparse.rewind(often, 41)
    got = sparse.forward([Feed(often, [1, 4, 1, 5, 9])])[0].logits[-1]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    with pytest.raises(CapabilityError, match="cannot roll back"):
        sparse.rewind(often, 39)
    with pytest.raises(ValueError, match="must follow its end"):
        sparse.forward([Feed(often, [1], after=3)])


def test_the_subset_is_chosen_anew_when_it_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    target = HuggingFaceModel(llama())
    sparse = SparseModel(target, budget=24, chunk=4, rebuild=5)
    source = opened_llama(target, 40)
    sequence = beside(sparse, source)
    at = []
    choose = SparseModel.choose

    def counted(self: SparseModel, own: SequenceState, root: int) -> None:
        choose(self, own, root)
        at.append(len(own.tokens))

    monkeypatch.setattr(SparseModel, "choose", counted)
    for token in range(12):
        target.prefill(source, [token])
        fed = sparse.catch_up(sequence, [*source.tokens, ROOT])
        sparse.forward([Feed(sequence, fed)])
    assert at == [45, 50]
    assert sequence.tokens == source.tokens[: len(sequence.tokens)]


def test_the_target_is_left_as_it_was() -> None:
    target = HuggingFaceModel(llama())
    source, twin = opened_llama(target, 40), opened_llama(target, 40)
    sparse = SparseModel(target, budget=24, chunk=4)
    sequence = beside(sparse, source)
    sparse.forward([Feed(sequence, [1, 2, 3])])
    assert target.is_lean and target.run_rows > 0 and len(target._sequences) == 2
    rows = target.forward([Feed(source, [9, 2]), Feed(twin, [9, 2])])
    assert torch.equal(rows[0].logits, rows[1].logits)


def test_nothing_but_the_subset_takes_memory() -> None:
    model = llama(context=4096)
    target = HuggingFaceModel(model)
    sparse = SparseModel(target, budget=64)
    source = opened_llama(target, 3000)
    sequence = beside(sparse, source)
    sparse.forward([Feed(sequence, [1, 2, 3])])
    assert sparse.model is target.model and sparse.forwards.fast.layers is target.forwards.fast.layers
    assert sparse.cache.num_bytes() * 8 < target.cache.num_bytes()


def test_a_failed_choice_leaves_no_scratch_and_no_watcher(monkeypatch: pytest.MonkeyPatch) -> None:
    target = HuggingFaceModel(llama())
    sparse = SparseModel(target, budget=24, chunk=4)
    source = opened_llama(target, 40)
    sequence = beside(sparse, source)
    before = sparse.forward([Feed(sequence, [1, 2])])[0].logits
    sparse.commit(sequence, ())

    def broken(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Network, "run_public", broken)
        sparse.choose(sequence, ROOT)
    assert not source.scratch_tokens
    assert torch.equal(sparse.forward([Feed(sequence, [1, 2])])[0].logits, before)


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": 23}, r"budget >= 24 \(3 chunks of 8\), not 23"),
        ({"budget": -1}, "budget >= 24"),
        ({"budget": SINKS, "select": "recent"}, "budget >= 17 .*not 16"),
        ({"chunk": 0}, "chunk >= 1, not 0"),
        ({"rebuild": 0}, "rebuild >= 1, not 0"),
        ({"local": 1.0}, "0 <= local < 1"),
        ({"local": float("nan")}, "0 <= local < 1"),
        ({"select": "best"}, "retrieval or recent, not 'best'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SparseModel(HuggingFaceModel(llama()), **options)


def test_compressed_keys_cannot_be_compared_with_queries(subject: Subject) -> None:
    target = subject(LATENT, True)
    with pytest.raises(CapabilityError, match="compressed keys of deepseek_v3 layers: use select=recent"):
        SparseModel(target)
    assert not target._sequences


def test_models_without_such_a_cache_are_named() -> None:
    with pytest.raises(CapabilityError, match="TableModel has none"):
        SparseModel(TableModel(lambda _: [0.5, 0.5], 2))


def test_sequential_models_are_refused_with_their_reason() -> None:
    model = wrap(new_model("bloom", n_layer=2, n_head=4))
    assert isinstance(model, SequentialModel)
    with pytest.raises(CapabilityError, match="ALiBi"):
        SparseModel(model)


def test_sequences_need_the_targets_text() -> None:
    target = HuggingFaceModel(llama())
    sparse = SparseModel(target)
    for refused in (sparse.open, lambda: sparse.open_beside(None)):
        with pytest.raises(CapabilityError, match="inside another drafter"):
            refused()
    source = opened_llama(target, 5)
    sequence = sparse.open_beside(source)
    with pytest.raises(ValueError, match="with the same tokens"):
        sparse.prefill(sequence, [1, 2])
    with pytest.raises(ValueError, match="open_beside"):
        sparse.catch_up(target.open(), [1])
    target.forward([Feed(source, [1])])
    with pytest.raises(CapabilityError, match="scratch must be empty"):
        sparse.queries(source, 1)


def test_a_window_as_long_as_the_context_is_none() -> None:
    """A sliding layer whose window is never reached sees the whole text."""
    from transformers import MistralConfig, MistralForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(
        vocab_size=32, num_key_value_heads=2, max_position_embeddings=128, sliding_window=128, **shape
    )
    torch.manual_seed(0)
    target = HuggingFaceModel(MistralForCausalLM(config).to(torch.float64))
    sparse = SparseModel(target, budget=20, select="recent")
    source = opened_llama(target, 60)
    logits = sparse.forward([Feed(beside(sparse, source), *TREE)])[0].logits
    with torch.inference_mode():
        assert close(logits, masked_logits(target, source.tokens, recent_slots(60, 20).tolist()))
