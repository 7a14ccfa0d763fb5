"""Training of drafters: features of the target, the loss of a recipe, and acceptance on held-out text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.nets.eight_bits import check_bits
from foretoken.methods.drafters.nets.store import save_drafter
from foretoken.models.base import LanguageModel
from foretoken.models.forward.parts import TargetParts
from foretoken.training.captured import FeatureStore
from foretoken.training.chat import ChatBlocks, RowBlocks
from foretoken.training.config import TrainConfig, check_context
from foretoken.training.corpus import (
    BlockSampler,
    build_corpus,
    corpus_blocks,
    part_file,
    read_chat,
    read_tokens,
    spread_blocks,
    text_identity,
)
from foretoken.training.curves import DRAFTER
from foretoken.training.joint import as_served, held_loss, save_target, start_update
from foretoken.training.loop import Loop, Progress, Saving
from foretoken.training.optimizers import autocast, build_optimizers
from foretoken.training.recipes.base import Batch, Recipe
from foretoken.training.text_sources import write_blocks

BLOCKS = 8
"""Held-out blocks for measuring accuracies."""

Held = tuple[Tensor, Tensor | None]
"""Tokens int64 [1, n + 1], and a mask of those to predict, bool [1, n + 1]; ``None``: all."""


Evaluate = Callable[[Drafter, LanguageModel], Mapping[str, Any]]
"""Runs a drafter with its target on held-out text: ``mean_acceptance_length``, ``acceptance_rate``, ``per_position``,
and the same under ``sampled``."""


class Trainer:
    """Trains a recipe's network.  Raises ``ValueError`` for empty or too short data, a context longer than the
    target's, and features of other blocks.

    Args:
        corpus: folder of the encoded text, which runs can share (default: ``out/corpus``).
        features: folder for the target's hidden states, which runs can share (default: not stored).
        dtype: dtype of the stored target, if the recipe trains it.
        on_written: called with (blocks written, all blocks) while the target generates text.
        on_read: called with the number of documents read while text is encoded.

    Attributes:
        held_tokens: held-out blocks, int64 [1, n + 1] each.
        held_learned: masks of their tokens to predict, bool [1, n + 1] each; ``None``: all.
    """

    def __init__(
        self,
        recipe: Recipe,
        data: Sequence[str | Path],
        out: Path,
        config: TrainConfig,
        tokenizer: Any,
        corpus: Path | None = None,
        features: Path | None = None,
        dtype: torch.dtype = torch.bfloat16,
        on_written: Callable[[int, int], None] | None = None,
        on_read: Callable[[int], None] | None = None,
    ) -> None:
        self.recipe, self.out, self.config, self.tokenizer, self.dtype = recipe, out, config, tokenizer, dtype
        check_run(recipe, config, features)
        folder = corpus or out / "corpus"
        self.corpus = build_corpus(data, tokenizer, folder, on_read=on_read)
        self.sampler: BlockSampler | RowBlocks
        self.sampler = corpus_blocks(folder, self.corpus, tokenizer, config.context, config.batch_size, config.seed)
        if config.text == "target":
            self.sampler = write_blocks(
                folder,
                recipe.writer,
                asdict(TargetParts(recipe.writer).fingerprint()),
                self.sampler,
                config.written_blocks,
                config.written_temperature,
                on_written,
            )
        self.text = text_identity(folder, self.corpus)
        blocks = held_blocks(folder, self.corpus, tokenizer, config.context)
        device = recipe.parts.device
        self.held_tokens = [tokens.to(device) for tokens, _ in blocks]
        self.held_learned = [None if learned is None else learned.to(device) for _, learned in blocks]
        recipe.prepare(self.sampler.learned_ids)
        self.fingerprint = asdict(recipe.parts.fingerprint())
        self.network = recipe.parts.network.requires_grad_(recipe.trains_target)
        self.before = held_loss(recipe.parts, self.held_tokens, self.held_learned) if recipe.trains_target else None
        if recipe.update_rank:
            start_update(self.network, recipe.update_rank, config.seed)
        recipe.net.to(recipe.parts.device)
        self.trained = (
            nn.ModuleDict({"net": recipe.net, "target": self.network}) if recipe.trains_target else recipe.net
        )
        vocabulary = (recipe.parts.embed.weight, recipe.parts.head.weight)
        rates = [(recipe.net, 1.0), (self.network, recipe.target_lr)]
        self.optimizers = build_optimizers(rates, vocabulary, config.lr, config.optimizer, recipe.weight_decay)
        self.store: FeatureStore | None = None
        if features is not None:
            writing = [] if config.text == "fixed" else [config.written_blocks, config.written_temperature]
            self.store = FeatureStore(features, recipe.parts, self.sampler, self.text, writing)

    def held_prompts(self, count: int, length: int) -> list[list[int]]:
        """At most ``count`` held-out prompts: the first ``length`` tokens of blocks; for a conversation the tokens
        before its first answer, without their beginning if they are long."""
        prompts = []
        for tokens, learned in zip(self.held_tokens, self.held_learned, strict=True):
            if learned is None:
                prompts.append(tokens[0, :length].tolist())
                continue
            first = int(learned[0].int().argmax())
            if first:
                longest = max(length, tokens.shape[1] // 2)
                prompts.append(tokens[0, max(0, first - longest) : first].tolist())
        return prompts[:count]

    def _held_batches(self, recipe: Recipe) -> list[Batch]:
        return [
            Batch(tokens, recipe.parts.features(tokens[:, :-1], recipe.taps), recipe.parts, learned=learned)
            for tokens, learned in zip(self.held_tokens, self.held_learned, strict=True)
        ]

    def _batch(self, step: int) -> Batch:
        recipe = self.recipe
        tokens = torch.from_numpy(self.sampler(step)).to(recipe.parts.device)
        if self.store is not None:
            taps = self.store.features(step, recipe.taps)
        else:
            precision = self.config.precision if recipe.trains_target else "float32"
            with autocast(tokens.device.type, precision):
                taps = recipe.parts.features(tokens[:, :-1], recipe.taps, grad=recipe.trains_target)
        mask = self.sampler.learned_of(step)
        learned = None if mask is None else torch.from_numpy(mask).to(tokens.device)
        return Batch(tokens, taps, recipe.parts, step, self.config.steps, learned)

    def run(
        self,
        evaluate: Evaluate | None = None,
        on_step: Callable[[Progress], None] | None = None,
        weight_bits: int = 16,
        *,
        save_every: int = 100,
        eval_every: int = 100,
        saving: Saving | None = None,
    ) -> dict[str, Any]:
        """Train to the end, resuming from ``out/checkpoints``; write the drafter, in ``weight_bits`` (16 or 8); return
        the report.

        Raises ``ValueError`` for a checkpoint of other settings or text, of another target or of more steps in ``out``;
        ``FloatingPointError`` if the loss or its gradient is NaN or infinite (the last checkpoint is then intact); and
        :class:`Stopped` if ``saving.stop`` returned true (a checkpoint of the last step is in ``out``).
        """
        recipe = self.recipe
        check_weight_bits(recipe, weight_bits)
        identity = {
            "method": recipe.method,
            "net": asdict(recipe.config),
            "target": self.fingerprint,
            # Token tables of recipes are computed from the text and not stored in checkpoints.
            "text": self.text,
        }
        loop = Loop(self.out, self.config, self.trained, self.optimizers, DRAFTER, identity)
        if evaluate is not None and not loop.start and self.config.steps:
            fresh = self._evaluated(evaluate)[1]
            loop.curve.add(0, None, fresh)
            if on_step is not None:
                on_step(Progress(0, self.config.steps, math.nan, 0.0, fresh))
        loop.run(
            self._loss,
            save_every=save_every,
            eval_every=eval_every,
            measure=None if evaluate is None else lambda: self._evaluated(evaluate)[1],
            on_step=on_step,
            saving=saving,
        )
        measured, acceptance = self._evaluated(evaluate)
        loop.curve.add(self.config.steps, None, acceptance)
        parts = self._save(measured, weight_bits)
        report = {**self._report(parts, acceptance, loop.spent_s), **recipe.reported(measured)}
        return loop.finish({**report, "weight_bits": weight_bits})

    def _evaluated(self, evaluate: Evaluate | None) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """The recipe's measurements, and the acceptance on held-out text (empty without ``evaluate``)."""
        recipe = self.recipe
        recipe.net.eval()
        if recipe.trains_target:
            recipe = recipe.beside(as_served(self.network, self.dtype))
        measured = recipe.measure(self._held_batches(recipe))
        return measured, {} if evaluate is None else evaluate(recipe.drafter(measured), recipe.target)

    def _loss(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + step)
        self.recipe.net.train()
        with autocast(self.recipe.parts.device.type, self.config.precision):
            return self.recipe.loss(self._batch(step), generator)

    def _save(self, measured: Mapping[str, Any], bits: int) -> TargetParts:
        """Write the drafter, and the target if it was trained too; returns the parts of the stored target."""
        recipe, parts = self.recipe, self.recipe.parts
        if recipe.trains_target:
            save_target(self.network, self.dtype, self.tokenizer, self.out, recipe.update_rank)
            parts = TargetParts(as_served(self.network, self.dtype))
        if recipe.frequent is not None:
            measured = {**measured, "frequent": recipe.frequent.tolist()}
        if recipe.has_net:
            shape = recipe.stored_config()
            save_drafter(self.out, recipe.method, shape, recipe.net, parts.fingerprint(), measured, bits)
        return parts

    def _report(self, parts: TargetParts, acceptance: Mapping[str, Any], spent_s: float) -> dict[str, Any]:
        recipe = self.recipe
        losses = None
        if recipe.trains_target:
            losses = {"before": self.before, "after": held_loss(parts, self.held_tokens, self.held_learned)}
        return {
            "method": recipe.method,
            "parameters": sum(p.numel() for p in self.trained.parameters() if p.requires_grad),
            "run": asdict(self.config),
            "net": asdict(recipe.config),
            "settings": {k: v for k, v in asdict(recipe.config).items() if k not in recipe.fixed},
            "tokens": self.config.tokens,
            "corpus": {split: self.corpus[split] for split in ("train", "held")},
            "acceptance": dict(acceptance),
            "target_loss_nats": losses,
            "drafter": recipe.spec("FOLDER"),
            "hours": spent_s / 3600,
        }


def check_run(recipe: Recipe, config: TrainConfig, features: Path | None, weight_bits: int = 16) -> None:
    """Raise ``ValueError`` for settings that are wrong whatever the text is: blocks that are too long or too short,
    stored features of a target that is trained too, and as :func:`check_weight_bits` does."""
    check_context(config.context, min(recipe.target.context_length, recipe.writer.context_length))
    recipe.check_ahead(config.context, "--context")
    check_weight_bits(recipe, weight_bits)
    if features is not None and recipe.trains_target:
        raise ValueError("features of a target that is trained too cannot be stored: leave --features out")


def check_weight_bits(recipe: Recipe, bits: int) -> None:
    """Raise ``ValueError`` unless the drafter can be stored in so many bits; a method that trains only the target has
    none."""
    check_bits(bits)
    if bits != 16 and not recipe.has_net:
        raise ValueError(f"{recipe.method} has no drafter to store in {bits} bits: leave --weight-bits out")


def held_blocks(folder: Path, corpus: Mapping[str, Any], tokenizer: Any, context: int) -> list[Held]:
    """A few blocks of ``context`` tokens, spread over the held-out text; empty if there is none.  The tokenizer
    supplies the padding token of conversations."""
    if corpus.get("chat"):  # each row begins with a conversation
        parts = read_chat(folder, "held", corpus["dtype"])
        if not parts[1].any():
            return []
        blocks = ChatBlocks(*parts, context, 1, 0, tokenizer.eos_token_id)
        pairs = zip(blocks.rows[:BLOCKS], blocks.learned[:BLOCKS], strict=True)
        return [(torch.from_numpy(row)[None], torch.from_numpy(learned)[None]) for row, learned in pairs]
    tokens = read_tokens(part_file(folder, "held", "tokens"), corpus["dtype"])
    length = min(context, max(len(tokens) - 1, 0))
    if length < 2:
        return []
    return [(torch.from_numpy(block)[None], None) for block in spread_blocks(tokens, BLOCKS, length + 1)]
