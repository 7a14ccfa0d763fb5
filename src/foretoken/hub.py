"""Speculative decoding inside Hugging Face code: ``model.generate(**inputs, custom_generate=ft.custom_generate)``.

Transformers prepares inputs, logits processors and stopping criteria, then calls :func:`custom_generate` in place of
its own decoding loop. Keyword arguments of ``generate`` with the names of our options are passed on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from foretoken.core.noise import samples_of, seeds_of
from foretoken.core.values import plain
from foretoken.engine.request import Request
from foretoken.engine.stats import SpecStats
from foretoken.llm import Llm, load
from foretoken.loading import load_tokenizer
from foretoken.loading.hub_inputs import caller_of_generate, check_supported
from foretoken.loading.hub_params import holds, params_of, tell_row_by_row
from foretoken.loading.prepared import Prepared, prepared_of
from foretoken.methods.controllers.base import Controller
from foretoken.methods.verifiers.base import Verifier
from foretoken.models.network.alone import lock_of
from foretoken.options import prediction_ids, predictions_of

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """Result with ``return_dict_in_generate=True``: ``sequences`` [B, n], and one :class:`SpecStats` per row."""

    stats: list[SpecStats] | None = None  # Transformers allows a single required field


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    drafter: Any = "auto",
    verifier: str | Verifier = "auto",
    controller: str | Controller = "auto",
    allow_lossy: bool = False,
    seed: int | Sequence[int] | None = None,
    token_streamer: BaseStreamer | None = None,
    prediction: str | Sequence[int] | Sequence[Any] | None = None,
    exact: str = "distribution",
    profile: str | Path | None = None,
    **model_kwargs: Any,
) -> Tensor | SpeculativeOutput:
    """Decode speculatively for ``model.generate(**inputs, custom_generate=custom_generate)``.

    Greedy output equals that of ``model.generate`` without it (up to ties decided by rounding); sampled output has the
    same distribution. The model stays unchanged, except for an attribute that caches data for the next call (such as a
    copy of its weights; copies and pickles of the model omit it). Drafters and controllers forget their state after the
    call; :class:`CustomGenerate` keeps it.

    Args:
        model: the target.
        input_ids: [B, n] prompts, left-padded.
        logits_processor: Transformers' processors, temperature and filters included.
        stopping_criteria: end-of-text ids and lengths are handled here, others are called after every token with the
            row's ids [1, n]. ``StopStringCriteria(tokenizer, [...])`` replaces ``stop_strings``, for which Transformers
            misses the tokenizer even if it is given.
        generation_config: pad token and output form.
        synced_gpus: not supported.
        streamer: a Transformers streamer that gets the prompt and then every round's tokens (one row only).
        drafter: spec string, drafter, a draft model (``PreTrainedModel``), or ``None`` for plain decoding; or a
            :class:`CustomGenerate`, with its settings.
        verifier: as in :func:`foretoken.load`.
        controller: as in :func:`foretoken.load`.
        allow_lossy: as in :func:`foretoken.load`.
        exact: as in :func:`foretoken.load`.
        profile: as in :func:`foretoken.load`.
        seed: fixes sampled output, whatever the drafts; one per row, or the first of consecutive ones. Without a seed,
            random numbers come from torch's generator, so that ``torch.manual_seed`` works.
        token_streamer: another name of ``streamer``.
        prediction: the caller's expected answer, as in :meth:`foretoken.llm.Llm.generate`: text or token ids for all
            rows, or a list with one (or ``None``) for each.
        model_kwargs: arguments of the model's forward. ``attention_mask`` marks padding. A cache that is not empty,
            positions that do not count from 0, embeddings and other arguments that would change the output are refused
            by name.

    Returns:
        [B, n + new] token ids, shorter rows padded on the right.

    Raises:
        ValueError: beams, encoder-decoder models, scores or attentions as output, stateful processors, padding that is
            not on the left, inputs that would be dropped (see ``model_kwargs``), a model whose inputs PEFT's prompt
            learning prepares, or an error of :func:`foretoken.load`.
    """
    settings = (verifier, controller, allow_lossy, exact, profile)
    if isinstance(drafter, CustomGenerate):
        if names := _not_default(settings):
            with _ended(caller_of_generate(model).get("streamer", streamer), token_streamer):
                raise ValueError(
                    f"drafter= is a CustomGenerate, with settings of its own: pass it {names}, and not here"
                )
        generate = drafter
    else:
        generate = CustomGenerate(drafter, *settings)
    extra: dict[str, Any] = {"seed": seed, "token_streamer": token_streamer, "prediction": prediction, **model_kwargs}
    inputs = (input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer)
    return generate(model, *inputs, **extra)


class CustomGenerate:
    """:func:`custom_generate` with fixed settings, which keeps the state of drafters and controllers between calls::

        generate = ft.CustomGenerate(drafter="suffix")
        model.generate(**inputs, custom_generate=generate)

    It holds the last model, and starts over for another model or changed weights. Its arguments are those of
    :func:`custom_generate`.
    """

    def __init__(
        self,
        drafter: Any = "auto",
        verifier: str | Verifier = "auto",
        controller: str | Controller = "auto",
        allow_lossy: bool = False,
        exact: str = "distribution",
        profile: str | Path | None = None,
    ) -> None:
        self.drafter, self.verifier, self.controller = drafter, verifier, controller
        self.allow_lossy, self.exact, self.profile = allow_lossy, exact, profile
        self._llm: Llm | None = None
        self._predicted = False
        self._prepared: Prepared | None = None

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        seed: int | Sequence[int] | None = None,
        token_streamer: BaseStreamer | None = None,
        prediction: str | Sequence[int] | Sequence[Any] | None = None,
        **model_kwargs: Any,
    ) -> Tensor | SpeculativeOutput:
        """Called by :meth:`generate` of a Transformers model, which reads these parameter names."""
        call = caller_of_generate(model)
        knows_prompt = call.get("streamer") is not None  # generate has passed the prompt to it
        streamer = call["streamer"] if knows_prompt else streamer
        with _ended(streamer, token_streamer):
            check_supported(model, input_ids, generation_config, logits_processor, synced_gpus, model_kwargs, call)
            rows = _rows(
                input_ids, model_kwargs.get("attention_mask"), _streamer(streamer, token_streamer), knows_prompt
            )
            lengths = [c.max_length for c in stopping_criteria if isinstance(c, MaxLengthCriteria)]
            room = min(lengths, default=input_ids.shape[1] + 20) - input_ids.shape[1]
            tell_row_by_row([*logits_processor, *stopping_criteria], len(rows))
            seeds = _seeds(seed, len(rows))
            predictions = _predictions(model, prediction, len(rows))
            with _undisturbed(model, _draft_models(self.drafter)):
                llm = self.llm(model, prediction is not None)
                requests = [
                    Request(
                        row.full[row.padding :],
                        params_of(logits_processor, i, row.padding, generation_config, len(rows)),
                        room,
                        (),
                        seeds[i],
                        predictions[i],
                        True,
                    )
                    for i, row in enumerate(rows)
                ]
                _run(llm, requests, rows, stopping_criteria, input_ids.device)
            return _result(rows, input_ids, generation_config)

    def llm(self, model: Any, predicted: bool = False) -> Llm:
        """The engine for a model.

        Args:
            predicted: whether the caller passes a prediction, which is then drafted first.
        """
        with lock_of(model, "call"), lock_of(self, "call"):
            prepared = prepared_of(model, self.exact)
            if self._llm is None or self._prepared is not prepared or self._predicted != predicted:
                self._llm, self._predicted, self._prepared = self._make(prepared, predicted), predicted, prepared
            return self._llm

    def _make(self, prepared: Prepared, predicted: bool) -> Llm:
        return load(
            prepared.target(),
            self.drafter,
            self.verifier,
            self.controller,
            tokenizer=prepared.tokenizer,
            exact=self.exact,
            profile=self.profile,
            allow_lossy=self.allow_lossy,
            graphs=False,
            prefix_cache=False,
            generation_config=None,
            known=predicted,
        )


# -- inputs ----------------------------------------------------------------------------------------------------------


@dataclass
class _BatchRow:
    """One row of the batch: ``full`` holds padding, prompt and output; ``shown`` is whether its streamer has the
    prompt."""

    full: list[int]
    padding: int
    streamer: Any = None
    shown: bool = False
    stats: SpecStats = field(default_factory=SpecStats)
    is_done: bool = False


def _streamer(streamer: BaseStreamer | None, token_streamer: BaseStreamer | None) -> BaseStreamer | None:
    if streamer is not None and token_streamer is not None and streamer is not token_streamer:
        raise ValueError("streamer= and token_streamer= are both given: pass one of them")
    return token_streamer if streamer is None else streamer


def _not_default(settings: Sequence[Any]) -> str:
    """Names of the settings, in the order of :class:`CustomGenerate`'s, that are not its defaults."""
    _, *options = signature(CustomGenerate).parameters.values()
    return ", ".join(option.name for option, value in zip(options, settings, strict=True) if value != option.default)


@contextmanager
def _ended(*streamers: BaseStreamer | None) -> Iterator[None]:
    """End streamers after the block, also after an error, because a reader may be waiting in another thread."""
    try:
        yield
    finally:
        for streamer in {id(s): s for s in streamers if s is not None}.values():
            streamer.end()


def _rows(input_ids: Tensor, mask: Tensor | None, streamer: Any, shown: bool) -> list[_BatchRow]:
    """The rows of a batch with left padding or none."""
    if streamer is not None and len(input_ids) > 1:
        raise ValueError("a streamer shows one row: pass a batch of one, or no streamer")
    if mask is None:
        return [_BatchRow(row, 0, streamer, shown) for row in input_ids.tolist()]
    attended = mask.bool()
    paddings = [attended.shape[1] - length for length in attended.sum(-1).tolist()]
    for i, padding in enumerate(paddings):
        if not bool(attended[i, padding:].all()):
            raise ValueError("the attention mask has holes or right padding: use a tokenizer with padding_side='left'")
        if padding == attended.shape[1]:
            raise ValueError(f"row {i} is empty: its attention mask is all zero")
    rows = zip(input_ids.tolist(), paddings, strict=True)
    return [_BatchRow(full, padding, streamer, shown) for full, padding in rows]


def _seeds(seed: Any, count: int) -> Sequence[int | None]:
    if seed is None:  # random, so that the output does not depend on the drafts, which depend on measured times
        seed = int(torch.randint(2**62, ()))
    seed = plain(seed)
    if isinstance(seed, str) or not isinstance(seed, Sequence):
        return samples_of(seeds_of(seed, 1)[0], count)
    if len(seed) != count:
        raise ValueError(f"{len(seed)} seeds for {count} rows: give one per row, or one number")
    return seeds_of(list(seed), count)


def _predictions(model: Any, prediction: Any, count: int) -> list[list[int] | None]:
    """The predicted tokens of each row."""
    given = predictions_of(prediction, count, single=False)
    is_text = any(isinstance(part, str) for part in given)
    tokenizer = load_tokenizer(model) if is_text else None
    if is_text and tokenizer is None:
        raise ValueError("a text prediction needs the model's tokenizer, which was not found: give token ids")
    return [prediction_ids(part, tokenizer) for part in given]


def _draft_models(drafter: Any) -> list[nn.Module]:
    """The caller's draft networks that loading puts into eval mode."""
    drafters = drafter if isinstance(drafter, list | tuple) else [drafter]
    return [part for part in drafters if isinstance(part, nn.Module)]


@contextmanager
def _undisturbed(model: Any, drafts: Sequence[nn.Module]) -> Iterator[None]:
    """Run one call of a model at a time. Restore the training mode of the model and draft models, which loading turns
    off because of dropout."""
    with lock_of(model, "call"):
        training: list[tuple[Any, list[nn.Module]]] = []
        for network in (model, *drafts):
            with lock_of(network):
                training.append((network, [module for module in network.modules() if module.training]))
        try:
            yield
        finally:
            for network, modules in training:
                with lock_of(network):
                    for module in modules:
                        module.training = True


# -- decoding --------------------------------------------------------------------------------------------------------


def _run(
    llm: Llm,
    requests: Sequence[Request],
    rows: Sequence[_BatchRow],
    criteria: StoppingCriteriaList,
    device: torch.device,
) -> None:
    """Serve all rows as one batch. Every token is checked against the criteria, and a row ends at the first that
    holds."""
    eos = {int(t) for c in criteria if isinstance(c, EosTokenCriteria) for t in c.eos_token_id.flatten().tolist()}
    others = [c for c in criteria if not isinstance(c, EosTokenCriteria | MaxLengthCriteria)]
    ends = frozenset(token for token in eos if 0 <= token < llm.target.vocab_size)  # drafters learn nothing behind them
    by_id: dict[int, _BatchRow] = {}
    try:
        for request, row in zip(requests, rows, strict=True):
            by_id[llm.engine.add(replace(request, stop_token_ids=ends))] = row
            if row.streamer is not None and not row.shown:
                row.streamer.put(torch.tensor([row.full]))
        while llm.engine.busy:
            for run, emission in llm.engine.step():
                if emission.error is not None:
                    raise emission.error
                row = by_id[run.id]
                row.stats = run.stats
                new = _kept(row, emission.token_ids, eos, others, device)
                run.stats.cut_round(emission.origins, len(new))
                if row.streamer is not None and new:
                    row.streamer.put(torch.tensor(new))
                if row.is_done:
                    llm.engine.cancel(run.id)
    finally:
        llm.engine.close()


def _kept(
    row: _BatchRow, tokens: Sequence[int], eos: set[int], others: Sequence[Any], device: torch.device
) -> list[int]:
    """Append tokens to a row until a criterion ends it. Returns the appended tokens."""
    new: list[int] = []
    for token in tokens:
        row.full.append(token)
        new.append(token)
        row.is_done = token in eos
        if others and not row.is_done:
            ids = torch.tensor([row.full], device=device)
            row.is_done = any(holds(criterion, ids) for criterion in others)
        if row.is_done:
            break
    return new


def _result(rows: Sequence[_BatchRow], input_ids: Tensor, config: GenerationConfig) -> Tensor | SpeculativeOutput:
    longest = max(len(row.full) for row in rows)
    pad = getattr(config, "_pad_token_tensor", None)
    if pad is None and any(len(row.full) < longest for row in rows):
        raise ValueError("rows ended at different lengths and there is no pad token: set pad_token_id")
    filler = 0 if pad is None else int(pad)
    sequences = torch.tensor(
        [row.full + [filler] * (longest - len(row.full)) for row in rows],
        dtype=input_ids.dtype,
        device=input_ids.device,
    )
    if config.return_dict_in_generate:
        return SpeculativeOutput(sequences=cast(torch.LongTensor, sequences), stats=[row.stats for row in rows])
    return sequences
