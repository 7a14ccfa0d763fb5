"""Masks behind places all over a text: which rows there are, what they see, and that drafting shows the same."""

from __future__ import annotations

import logging
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from foretoken.core import Context, Rng
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import load_model
from foretoken.methods.drafters.pard import PardDrafter, mask_token
from foretoken.models.base import Feed
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.training.config import DistillConfig, LmConfig
from foretoken.training.distill import Distiller, teach_mask
from foretoken.training.lm import build_model
from foretoken.training.mask_rows import kept_counts, mask_ids, mask_rows, rows_mask, seeds_of, with_text
from foretoken.training.state_rows import StateRows, layers_of
from toys import engine, llama, serve

MASK = 31


def test_counts_of_the_published_example() -> None:
    """Six places, a share of .8: four, two and one mask of the depths 1 to 3."""
    assert kept_counts(6, 3, keep=0.8) == [4, 2, 1]
    _, depths = mask_rows(torch.ones(6, dtype=torch.bool), 3, torch.Generator().manual_seed(0), keep=0.8)
    assert depths.tolist() == [1, 1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("seed", range(5))
def test_a_mask_has_one_of_every_lower_depth_before_it(seed: int) -> None:
    seeds = torch.rand(40, generator=torch.Generator().manual_seed(seed)) < 0.8
    anchors, depths = mask_rows(seeds, 7, torch.Generator().manual_seed(seed))
    pairs = list(zip(anchors.tolist(), depths.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs) > 20
    for anchor, depth in pairs:
        assert 0 <= anchor < anchor + depth < 40 and bool(seeds[anchor + depth])
        assert depth == 1 or (anchor, depth - 1) in pairs


def test_what_rows_see_by_hand() -> None:
    """Five tokens, three places: rows (position, copy) as in the paper."""
    anchors, depths = with_text(5, torch.tensor([0, 1, 3, 1]), torch.tensor([1, 1, 1, 2]))
    rows = [(int(a + d), int(d)) for a, d in zip(anchors, depths, strict=True)]
    assert rows == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (1, 1), (2, 1), (4, 1), (3, 2)]
    seen = {
        row: {rows[i] for i in visible.nonzero()[:, 0].tolist()}
        for row, visible in zip(rows, rows_mask(anchors, depths), strict=True)
    }
    for position in range(5):
        assert seen[position, 0] == {(p, 0) for p in range(position + 1)}
    assert seen[1, 1] == {(0, 0), (1, 1)}
    assert seen[2, 1] == {(0, 0), (1, 0), (2, 1)}
    assert seen[4, 1] == {(0, 0), (1, 0), (2, 0), (3, 0), (4, 1)}
    assert seen[3, 2] == {(0, 0), (1, 0), (2, 1), (3, 2)}


def row_logits(network: Any, tokens: Tensor, anchors: Tensor, depths: Tensor) -> Tensor:
    seen = rows_mask(anchors, depths)
    mask = torch.zeros(seen.shape, dtype=network.dtype).masked_fill_(~seen, -torch.inf)[None, None]
    ids = mask_ids(tokens, len(anchors) - tokens.shape[1], MASK)
    logits: Tensor = network(input_ids=ids, position_ids=(anchors + depths)[None], attention_mask=mask).logits
    return logits


@torch.no_grad()
def test_a_row_of_training_is_a_row_of_drafting() -> None:
    """Every mask of three places behind every anchor, in one pass and by the draft model's cache."""
    model = HuggingFaceModel(llama(32))
    tokens = torch.randint(31, (1, 9), generator=torch.Generator().manual_seed(0))
    pairs = [(a, d) for a in range(9) for d in (1, 2) if a + d < 9]
    anchors, depths = with_text(9, *(torch.tensor(part) for part in zip(*pairs, strict=True)))
    trained = row_logits(model.model, tokens, anchors, depths)[0]
    drafter = PardDrafter(model, k=3, mask=MASK)
    for anchor in range(9):
        text = tokens[0, : anchor + 1].tolist()
        feed = drafter._feed(model.open(), text, 3)
        assert isinstance(feed, Feed)
        drafted = model.forward([feed])[0].logits
        for depth in range(min(3, 9 - anchor)):
            (row,) = ((anchors == anchor) & (depths == depth)).nonzero()[:, 0].tolist()
            assert torch.allclose(trained[row], drafted[depth], atol=1e-4)


class Shop:
    """The parts of a workshop that a distiller uses."""

    def __init__(self, target: HuggingFaceModel, config: DistillConfig, known: int = 32) -> None:
        self.target, self.config, self.parts = target, config, TargetParts(target)
        self.tokenizer = range(known)

    def source(self, student: Any) -> None:
        return None


def distiller(target: Any, student: Any, tmp_path: Path, known: int = 32, **changes: Any) -> Distiller:
    config = DistillConfig(**{"context": 24, "places": 4, **changes})
    return Distiller(Shop(target, config, known), student, tmp_path)  # type: ignore[arg-type]


def test_the_mask_is_a_new_token_or_a_spare_one(tmp_path: Path) -> None:
    config = DistillConfig(places=4)
    new = deepcopy(llama(32))
    assert teach_mask(new, config, 32) == 63 and new.config.vocab_size == 64 and new.config.pard_token == 63
    spare = deepcopy(llama(32))
    assert teach_mask(spare, config, 30) == 31 and spare.config.vocab_size == 32
    assert teach_mask(spare, DistillConfig(places=4, mask_token=3), 30) == 3
    assert teach_mask(spare, config, 30) == 3  # as configured
    with pytest.raises(ValueError, match="must be one of the draft model's 32 tokens, not 32"):
        teach_mask(spare, DistillConfig(places=4, mask_token=32), 30)
    new.save_pretrained(tmp_path)
    assert mask_token(load_model(tmp_path)) == 63


def test_distinct_masks_are_consecutive_tokens(tmp_path: Path) -> None:
    """One for each position after the first: new ones, spare ones, those of the configuration, and those that draft."""
    config = DistillConfig(places=4, distinct_masks=True)
    new, spare = deepcopy(llama(32)), deepcopy(llama(32))
    assert teach_mask(new, config, 32) == 61 and (new.config.vocab_size, new.config.pard_tokens) == (64, 3)
    assert teach_mask(spare, config, 29) == 29 and spare.config.vocab_size == 32
    assert teach_mask(spare, DistillConfig(places=4), 29) == 29  # as configured
    with pytest.raises(ValueError, match="must be one of the draft model's 32 tokens, not 30"):
        teach_mask(spare, DistillConfig(places=4, distinct_masks=True, mask_token=30), 29)
    new.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    drafter = PardDrafter(model, k=6)
    assert (drafter.mask, drafter.num_masks) == (61, 3)
    assert list(drafter._feed(model.open(), [5, 6], 6).tokens) == [5, 6, 61, 62, 63, 63, 63]
    assert list(PardDrafter(model, k=3, mask=9)._feed(model.open(), [5], 3).tokens) == [5, 9, 9]


def test_distinct_masks_of_training_are_those_of_drafting(tmp_path: Path) -> None:
    """The ids that the student reads, by depth; only their rows and those of the text get a gradient."""
    target = HuggingFaceModel(llama(32, dtype=torch.float32))
    student = deepcopy(llama(32, seed=1, dtype=torch.float32))
    worker = distiller(target, student, tmp_path, known=29, distinct_masks=True)
    read: list[Tensor] = []
    student.model.register_forward_pre_hook(lambda _, __, given: read.append(given["input_ids"]), with_kwargs=True)
    tokens = torch.randint(29, (1, 13), generator=torch.Generator().manual_seed(2))
    with torch.enable_grad():
        worker.mask_loss(tokens, torch.ones(1, 12), 0).backward()
    generator = torch.Generator().manual_seed(0)
    _, depths = mask_rows(torch.ones(12, dtype=torch.bool), 3, generator)
    assert read[0][0, 12:].tolist() == [28 + depth for depth in depths.tolist()] and set(depths.tolist()) == {1, 2, 3}
    gradients = student.get_input_embeddings().weight.grad.abs().amax(-1)
    assert bool((gradients[29:] > 0).all())


def test_settings() -> None:
    with pytest.raises(ValueError, match="distinct_masks goes with places above 2, and without taps"):
        DistillConfig(places=2, distinct_masks=True)
    with pytest.raises(ValueError, match="goes with places above 1"):
        DistillConfig(mask_token=3)
    with pytest.raises(ValueError, match="places must be at least 1, not 0"):
        DistillConfig(places=0)
    with pytest.raises(ValueError, match="places=256 must be fewer than the 256 tokens"):
        DistillConfig(places=256)


def test_a_recurrent_draft_model_is_refused(tmp_path: Path) -> None:
    """Its layers ignore the attention mask: a mask's row would read the tokens to predict."""
    student = build_model(LmConfig(hidden=32, layers=4, heads=2, kv_heads=1, ffn=48, context=64, hybrid=True), 0)
    target = HuggingFaceModel(llama(32, dtype=torch.float32))
    with pytest.raises(ValueError, match=r"places=4 needs a draft model that can hide tokens from a mask: .*attention"):
        distiller(target, student, tmp_path)
    distiller(target, student, tmp_path, places=1)


def test_places_that_do_not_count_are_not_learned(tmp_path: Path) -> None:
    """Only rows whose next token counts have a part in the loss, and a text without any weight none."""
    weights = torch.zeros(2, 12)
    weights[0, 3:6] = 1
    assert seeds_of(weights).nonzero()[:, 0].tolist() == [3, 4, 5]
    anchors, depths = mask_rows(seeds_of(weights), 3, torch.Generator().manual_seed(0))
    assert set((anchors + depths).tolist()) <= {4, 5}
    target = HuggingFaceModel(llama(32, dtype=torch.float32))
    worker = distiller(target, deepcopy(llama(32, seed=1, dtype=torch.float32)), tmp_path)
    tokens = torch.randint(30, (2, 13), generator=torch.Generator().manual_seed(2))
    loss = float(worker.mask_loss(tokens, weights, 0).detach())
    tokens[1] = 5
    assert loss > 0 and float(worker.mask_loss(tokens, weights, 0).detach()) == pytest.approx(loss, rel=1e-3)


def test_without_masks_the_loss_is_the_plain_one(tmp_path: Path) -> None:
    """The rows are those of the text alone: masks add rows, and nothing else."""
    target = HuggingFaceModel(llama(32, dtype=torch.float32))
    worker = distiller(target, deepcopy(llama(32, seed=1, dtype=torch.float32)), tmp_path)
    tokens, weights = torch.randint(30, (2, 13), generator=torch.Generator().manual_seed(2)), torch.ones(2, 12)
    object.__setattr__(worker.config, "places", 1)
    plain = float(worker.loss(tokens, weights))
    assert float(worker.mask_loss(tokens, weights, 0)) == pytest.approx(plain, rel=1e-2)


def learnt(tmp_path: Path, steps: int, **changes: Any) -> tuple[PardDrafter, HuggingFaceModel]:
    """A draft model of a random target that learns from what that target writes."""
    target = HuggingFaceModel(llama(dtype=torch.float32))
    student = deepcopy(llama(seed=1, dtype=torch.float32))
    worker = distiller(target, student, tmp_path, context=46, **changes)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(32, (96, 2), generator=generator).tolist()
    runs = serve(
        engine(target), [Request(p, SamplingParams(temperature=0.3), 46, seed=i) for i, p in enumerate(prompts)]
    )
    texts = torch.tensor([prompt + run.output for prompt, run in zip(prompts, runs, strict=True)])
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-3)
    for step in range(steps):
        with torch.enable_grad():
            tokens = texts[torch.randint(len(texts), (8,), generator=generator)]
            worker.mask_loss(tokens, torch.ones(8, tokens.shape[1] - 1), step).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return PardDrafter(HuggingFaceModel(student), k=4, width=1, target=target), target


def acceptance(drafter: PardDrafter, target: HuggingFaceModel) -> float:
    prompts = torch.randint(32, (12, 2), generator=torch.Generator().manual_seed(9)).tolist()
    runs = serve(engine(target, drafter), [Request(p, SamplingParams(), 40, seed=i) for i, p in enumerate(prompts)])
    return sum(len(run.output) for run in runs) / sum(run.stats.num_drafts for run in runs)


@pytest.mark.slow
@pytest.mark.parametrize("distinct_masks", [False, True])
def test_masks_learn(tmp_path: Path, distinct_masks: bool) -> None:
    fresh = acceptance(*learnt(tmp_path, 0, distinct_masks=distinct_masks))
    drafter, target = learnt(tmp_path, 250, distinct_masks=distinct_masks)
    length = acceptance(drafter, target)
    assert length >= max(1.3, fresh + 0.1)
    drafter.max_depth = 1
    assert length > acceptance(drafter, target) + 0.05  # places behind the first are guessed by masks


# -- with the target's states (PARD-2) -------------------------------------------------------------------------------


def test_settings_of_states() -> None:
    assert layers_of("usual") == (-1, -8, -16, -24) and layers_of("-1+2") == (-1, 2) and layers_of("") == ()
    with pytest.raises(ValueError, match="go with places above 1"):
        DistillConfig(taps="usual")
    with pytest.raises(ValueError, match="taps must be usual, or hidden states"):
        DistillConfig(places=4, taps="last")


def test_rows_count_by_the_chance_of_what_their_masks_stand_for() -> None:
    logits = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(5, (2, 7), generator=torch.Generator().manual_seed(1))
    anchors, depths = torch.tensor([0, 3, 1, 2]), torch.tensor([0, 0, 1, 3])
    weights = StateRows.weights(logits, tokens, anchors, depths)
    p = torch.softmax(logits, -1)
    for text in range(2):
        chance = [float(p[text, at - 1, tokens[text, at]]) for at in range(1, 6)]  # of the tokens 1 to 5
        assert weights[text].tolist() == pytest.approx([1, 1, chance[1], chance[2] * chance[3] * chance[4]])


@torch.no_grad()
def test_a_row_that_learns_reads_what_a_row_that_drafts_reads(tmp_path: Path) -> None:
    """State and place of every mask behind every anchor, against the drafter's own rows."""
    target, student = HuggingFaceModel(llama(32)), deepcopy(llama(32, seed=1))
    worker = distiller(target, student, tmp_path, mask_token=MASK, taps="-1+1", places=3)
    assert worker.states is not None
    student.target_proj.double()
    student.config.pard2_scale = 0.02
    tokens = torch.randint(31, (1, 9), generator=torch.Generator().manual_seed(0))
    pairs = [(a, d) for a in range(9) for d in (1, 2) if a + d < 9]
    anchors, depths = with_text(9, *(torch.tensor(part) for part in zip(*pairs, strict=True)))
    hidden = target.model(input_ids=tokens, output_hidden_states=True).hidden_states
    kept = torch.Generator().manual_seed(1)  # the text keeps its states
    ids = mask_ids(tokens, len(anchors) - 9, MASK)
    states = {"last": hidden[-1].double(), "layer:1": hidden[1].double()}
    student.target_proj.float()
    embedded = worker.states.embedded(ids, states, anchors, kept)
    student.target_proj.double()
    seen = rows_mask(anchors, depths)
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill_(~seen, -torch.inf)[None, None]
    trained = student(inputs_embeds=embedded, position_ids=(anchors + depths)[None], attention_mask=mask).logits[0]
    drafter = PardDrafter(HuggingFaceModel(student), k=3, mask=MASK, width=1, target=target)
    assert drafter.reader is not None
    for anchor in range(9):
        text = tokens[0, : anchor + 1].tolist()
        context = Context(0, text, len(text), Sampler(SamplingParams(), len(text)), Rng(0))
        if anchor:
            context.hidden = target.prefill(target.open(), text[:-1], drafter.taps)
        drafter.start(context)
        drafter.reader.read_up_to_end([context])
        drafted = drafter.reader.logits_of([context], [3])[id(context)]
        for depth in range(min(3, 9 - anchor)):
            (row,) = ((anchors == anchor) & (depths == depth)).nonzero()[:, 0].tolist()
            assert torch.allclose(trained[row], drafted[depth], atol=1e-4)


def test_states_are_dropped_in_some_texts(tmp_path: Path) -> None:
    target = HuggingFaceModel(llama(32, dtype=torch.float32))
    student = deepcopy(llama(32, seed=1, dtype=torch.float32))
    worker = distiller(target, student, tmp_path, mask_token=MASK, taps="-1")
    assert worker.states is not None
    ids, states = torch.zeros(200, 3, dtype=torch.long), {"last": torch.ones(200, 3, 16)}
    embedded = worker.states.embedded(ids, states, torch.arange(3), torch.Generator().manual_seed(0))
    plain = student.get_input_embeddings()(ids)
    assert torch.equal(embedded[:, 0], plain[:, 0])  # nothing before the first token
    dropped = (embedded[:, 1:] == plain[:, 1:]).flatten(1).all(1)
    assert 0.04 < float(dropped.float().mean()) < 0.18


def test_what_is_written_drafts_with_states(tmp_path: Path) -> None:
    """A folder whose model is as any other, and the projection beside it; what was learnt is what is loaded."""
    target = HuggingFaceModel(llama(32, dtype=torch.float32))
    student = deepcopy(llama(32, seed=1, dtype=torch.float32))
    worker = distiller(target, student, tmp_path, mask_token=MASK, taps="-1+1")
    tokens, weights = torch.randint(30, (2, 13), generator=torch.Generator().manual_seed(2)), torch.ones(2, 12)
    worker.mask_loss(tokens, weights, 0).backward()
    assert float(student.target_proj.weight.grad.abs().sum()) > 0
    worker.shop.tokenizer = None
    worker._save()
    assert hasattr(student, "target_proj")
    loaded = load_model(tmp_path)
    drafter = PardDrafter(loaded, k=4, target=target)
    assert drafter.reader is not None and drafter.taps == ("last", "layer:1")
    stored = drafter.reader.projection.weight.float()
    assert torch.equal(stored, student.target_proj.weight.detach().bfloat16().float())


def test_a_new_mask_row_is_drawn_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers explains how it draws new rows, and how that is turned off, which nobody can here."""
    lines: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: lines.append(record.getMessage()))
    log = logging.getLogger("transformers")
    monkeypatch.setattr(log, "handlers", [handler])
    transformers_logging.warning_once.cache_clear()
    teach_mask(deepcopy(llama()).float(), DistillConfig(places=2), 32)
    assert lines == []


def test_a_new_mask_row_is_a_function_of_the_seed() -> None:
    def row(seed: int) -> Tensor:
        student = deepcopy(llama()).float()
        student.get_input_embeddings().weight.data *= 1e3  # what is drawn around the mean is far smaller than that
        config = DistillConfig(places=2, seed=seed)
        before = torch.get_rng_state()
        mask = teach_mask(student, config, vocabulary=student.config.vocab_size)
        assert torch.equal(torch.get_rng_state(), before)
        weight: Tensor = student.get_input_embeddings().weight[mask].detach().clone()
        torch.rand(7)
        return weight

    assert torch.equal(row(3), row(3))
    assert not torch.equal(row(3), row(4))
