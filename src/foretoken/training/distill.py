"""``foretoken train distill``: aligns a draft model with the distribution of its target.

DistillSpec, Zhou et al. 2023 (https://arxiv.org/abs/2310.08461): one divergence per token, on fixed text, on text of
the target or of the student, or on a mix.  No gradient flows through the drawing of tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from foretoken.core.io.files import replacing, save_model
from foretoken.core.io.quiet import ERRORS_ONLY
from foretoken.loading import BUILTIN
from foretoken.methods.drafters.learning.divergences import divergence
from foretoken.methods.drafters.pard import MASK, MASKS
from foretoken.methods.drafters.target_states import FILE, NAME
from foretoken.models.forward.parts import weights_digest
from foretoken.models.network.taps import recording
from foretoken.training.checkpoint import check_same, latest_checkpoint, read_meta
from foretoken.training.config import DistillConfig
from foretoken.training.curves import ALIGNMENT
from foretoken.training.loop import Loop, Progress, Saving, identity_of
from foretoken.training.mask_rows import additive, mask_ids, mask_rows, rows_mask, seeds_of, with_text
from foretoken.training.optimizers import build_optimizers, vocabulary_of
from foretoken.training.state_rows import OWN_SHARE, StateRows, stored_apart
from foretoken.training.text_sources import PolicyText, TrainingText
from foretoken.training.workshop import Workshop, check_student

WIDTH = 64
"""A vocabulary extended by a mask is padded to a multiple of this: products over odd widths are slow."""
CHUNK, CPU_CHUNK = 1024, 64
"""Positions whose distributions are computed at once.  On a CPU few, so that they stay in its cache (a third of the
time)."""


Evaluate = Callable[[Any], Mapping[str, Any]]
"""Measures a network as a draft model on held-out text (:class:`foretoken.lab.bench.alignment.Alignment`)."""


class Distiller:
    """Aligns one student, a causal LM in float32, in place.

    Args:
        source: training text; by default that of the run's ``text``.
        name: origin of the student, for the report and the run's identity.
        extra: further data of the run's identity.
    """

    def __init__(
        self, shop: Workshop, student: Any, out: Path, *, source: TrainingText | None = None, name: str = BUILTIN,
        extra: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        config = shop.config
        check_student(student, config)
        self.start = weights_digest(student)  # before the mask's row is drawn
        # Once it is taught a mask it drafts by masks, which are untrained: what it was is measured on a copy.
        self._untaught = copy.deepcopy(student).eval() if config.places > 1 else None
        self.mask = teach_mask(student, config, len(shop.tokenizer)) if config.places > 1 else -1
        layers = config.layers
        self.states = StateRows(student, shop.parts, layers) if layers else None
        self.shop, self.student, self.out, self.config, self.name = shop, student.eval(), out, config, name
        self.extra = dict(extra or {})
        self.source = source if source is not None else shop.source(student)
        self.width = min(shop.target.vocab_size, int(student.config.get_text_config().vocab_size))
        self.optimizers = build_optimizers([(student, 1.0)], vocabulary_of(student), config.lr)
        self.before: Mapping[str, Any] | None = None

    def run(
        self,
        *,
        save_every: int = 100,
        eval_every: int = 100,
        evaluate: Evaluate | None = None,
        on_step: Callable[[Progress], None] | None = None,
        saving: Saving | None = None,
    ) -> dict[str, Any]:
        """Train to the end, resuming from ``out/checkpoints``; write the model; return the report.

        Raises ``ValueError`` for a checkpoint of other settings, models or text, or of more steps, and
        ``FloatingPointError`` when the loss or its gradient is NaN or infinite; the last checkpoint is then intact.
        """
        loop = Loop(self.out, self.config, self.student, self.optimizers, ALIGNMENT, self._identity)
        source = self.source
        if loop.meta:
            if isinstance(source, PolicyText):
                source.restore(loop.meta["text"])
            self.before = loop.meta["before"]
        elif evaluate is not None:
            self.before = dict(evaluate(self.student if self._untaught is None else self._untaught))
            loop.curve.add(0, None, self.before)
        self._untaught = None
        loop.run(
            self._loss,
            save_every=save_every,
            eval_every=eval_every,
            measure=None if evaluate is None else lambda: evaluate(self.student),
            keep=lambda step: {
                "before": self.before,
                "text": source.state(step) if isinstance(source, PolicyText) else {},
            },
            on_step=on_step,
            saving=saving,
        )
        self._save()
        after = dict(evaluate(self.student)) if evaluate is not None else None  # measured on the stored weights
        loop.curve.add(self.config.steps, None, after)
        return loop.finish(self._report(after, loop.spent_s))

    def _save(self) -> None:
        """Write the model in Hugging Face's layout, and beside it the projection of the target's states."""
        _cast_parameters(self.student, torch.bfloat16)
        projection = getattr(self.student, NAME, None)
        if projection is not None:
            with replacing(self.out / FILE) as file:
                save_file(stored_apart(self.student), file, {"format": "pt"})
        save_model(self.student, self.shop.tokenizer, self.out)
        if projection is not None:
            setattr(self.student, NAME, projection)
        _cast_parameters(self.student, torch.float32)

    def is_done(self) -> bool:
        """Whether ``out`` holds this run's finished model.  Raises ``ValueError`` if it holds one of other settings,
        models or text."""
        checkpoint = latest_checkpoint(self.out / "checkpoints")
        if checkpoint is None or not (self.out / "training.json").exists():
            return False
        check_same(checkpoint, identity_of(self.config, self._identity))
        return int(read_meta(checkpoint)["step"]) == self.config.steps

    @property
    def _identity(self) -> dict[str, Any]:
        shop = self.shop
        target = asdict(shop.parts.fingerprint())
        return {"draft": self.name, **self.extra, "target": target, "student": self.start, "text": shop.text}

    def _loss(self, step: int) -> Tensor:
        tokens, weights = self.text(step)
        return self.loss(tokens, weights) if self.mask < 0 else self.mask_loss(tokens, weights, step)

    def text(self, step: int) -> tuple[Tensor, Tensor]:
        """Rows int64 [batch, context + 1] of a step, and the weights [batch, context] of their positions."""
        tokens, learned = torch.from_numpy(self.source(step)), self.source.learned_of(step)
        return tokens, torch.ones(tokens[:, 1:].shape) if learned is None else torch.from_numpy(learned)[:, 1:].float()

    def mask_loss(self, tokens: Tensor, weights: Tensor, step: int) -> Tensor:
        """The loss of :meth:`loss` over the rows of the texts, and of masks after positions all over them."""
        config, device, n = self.config, self.student.device, tokens.shape[1] - 1
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        anchors, depths = with_text(n, *mask_rows(seeds_of(weights), config.places - 1, generator))
        visible = rows_mask(anchors, depths).to(device)
        columns = (anchors + depths).to(device)
        inputs = tokens[:, :-1].to(device)
        taps = () if self.states is None else self.states.taps
        with torch.no_grad(), recording(self.shop.parts.network, tuple(dict.fromkeys(taps))) as hidden:
            target_logits = self.shop.parts.network(input_ids=inputs, use_cache=False).logits
        with torch.autocast(device.type, dtype=torch.bfloat16):
            ids = mask_ids(inputs, len(anchors) - n, self.mask)
            ids[:, n:] += (depths[n:] - 1).clamp_max(getattr(self.student.config, MASKS, 1) - 1).to(device)
            read = {"input_ids": ids}
            if self.states is not None:
                read = {"inputs_embeds": self.states.embedded(ids, hidden, anchors.to(device), generator)}
            draft_logits = self.student(
                **read,
                position_ids=columns.expand(len(inputs), -1),
                attention_mask=additive(visible)[None, None],
                use_cache=False,
            ).logits
        counts, text_tokens = weights.to(device)[:, columns], None
        if self.states is not None:
            ids = tokens.to(device)
            counts = counts * self.states.weights(target_logits, ids, anchors.to(device), depths.to(device))
            text_tokens = ids[:, columns + 1]
        return self._weighted(target_logits, draft_logits, columns.expand(len(inputs), -1), counts, text_tokens)

    def loss(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """Weighted mean divergence per position of rows ``tokens`` int64 [b, n + 1], ``weights`` [b, n]."""
        device = self.student.device
        ids = tokens[:, :-1].to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            draft_logits = self.student(input_ids=ids, use_cache=False).logits
        with torch.no_grad():
            target_logits = self.shop.parts.network(input_ids=ids, use_cache=False).logits
        return self._weighted(
            target_logits, draft_logits, torch.arange(ids.shape[1], device=device).expand_as(ids), weights
        )

    def _weighted(
        self,
        target_logits: Tensor,
        draft_logits: Tensor,
        columns: Tensor,
        weights: Tensor,
        text_tokens: Tensor | None = None,
    ) -> Tensor:
        """Weighted mean divergence of the student's logits [b, m, V'] from the target's [b, n, V] at ``columns`` [b,
        m], with ``weights`` [b, m]; 0 if all are zero.  The cross entropy of the next ``text_tokens`` [b, m], if
        passed, is added."""
        starts = torch.arange(len(target_logits), device=columns.device)[:, None] * target_logits.shape[1]
        rows, weights = (columns + starts).flatten(), weights.to(columns.device).flatten()
        target_logits, draft_logits = target_logits.flatten(0, 1), draft_logits.flatten(0, 1)
        total = draft_logits[:0].sum(dtype=torch.float32)  # 0 with a gradient, for rows without weights
        for some in weights.nonzero()[:, 0].split(CPU_CHUNK if columns.device.type == "cpu" else CHUNK):
            p, q = target_logits[rows[some], : self.width], draft_logits[some, : self.width]
            each = divergence(self.config.loss, p, q, self.config.beta)
            if text_tokens is not None:
                each = each + OWN_SHARE * F.cross_entropy(q.float(), text_tokens.flatten()[some], reduction="none")
            total = total + (each * weights[some]).sum()
        return total / weights.sum().clamp_min(torch.finfo(weights.dtype).tiny)

    def _report(self, after: Mapping[str, Any] | None, spent_s: float) -> dict[str, Any]:
        return {
            "method": "distill",
            "draft": self.name,
            "parameters": sum(p.numel() for p in self.student.parameters()),
            "run": asdict(replace(self.config, prompt=self.config.prompt_tokens)),
            **self.extra,
            "tokens": self.config.tokens,
            "corpus": {split: self.shop.corpus[split] for split in ("train", "held")},
            "before": self.before,
            "after": after,
            "hours": spent_s / 3600,
        }


def teach_mask(student: Any, config: DistillConfig, vocabulary: int) -> int:
    """The id of the student's mask, the first of consecutive ones if they are distinct; its configuration gets the id
    and their number.

    It is the run's id, else that of the configuration, else the last rows of an embedding wider than the tokenizer,
    else new rows, drawn around the mean of the others with the run's seed.  Raises ``ValueError`` for an id outside of
    the vocabulary.
    """
    text_config = student.config.get_text_config()
    known, configured = getattr(student.config, MASK, None), getattr(student.config, MASKS, 1)
    count = config.places - 1 if config.distinct_masks else configured
    mask = config.mask_token if config.mask_token >= 0 else known if count == configured else None
    if mask is None:
        if text_config.vocab_size < vocabulary + count:
            # Transformers logs a long message about drawing the new rows around the mean.
            with ERRORS_ONLY.changed(), torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(config.seed)
                student.resize_token_embeddings(-(-(vocabulary + count) // WIDTH) * WIDTH, mean_resizing=True)
        mask = text_config.vocab_size - count
    if not 0 <= mask <= text_config.vocab_size - count:
        raise ValueError(f"the mask token must be one of the draft model's {text_config.vocab_size} tokens, not {mask}")
    setattr(student.config, MASK, mask)
    if count > 1:
        setattr(student.config, MASKS, count)
    return int(mask)


def _cast_parameters(network: Any, dtype: torch.dtype) -> None:
    """Cast parameters in place.  Buffers such as rotary frequencies are not stored and stay unchanged."""
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
