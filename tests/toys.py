"""Small models whose distributions are known, and the statistics that compare an engine's output with them."""

from __future__ import annotations

import copy
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from scipy.stats import chi2
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.loop import Engine
from foretoken.engine.request import Request, Running
from foretoken.methods.controllers.base import Controller
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.verifiers.base import Verifier
from foretoken.models.base import Feed, LanguageModel
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.network.layers import WHOLE, LayerPlan
from foretoken.models.other.table import TableModel

FALSE_ALARM = 1e-4
"""How often a right engine may fail one distribution test (seeds are fixed: a test that passes goes on passing)."""
CAUGHT = 1e-8
"""A planted error counts as caught when chance would do as badly less often than this."""
SCALE = int(os.environ.get("FORETOKEN_SAMPLES", "1"))
"""Multiplies the samples of every distribution test: 1 in the ordinary run, more for a thorough one."""

Distribution = dict[tuple[int, ...], float]


def layer_runs(model: Any) -> float:
    """How many layers a runner has run since this was asked first; an attention or an MLP counts half."""
    if "layers_seen" not in vars(model):
        score = model._score

        def counted(
            feeds: Any, places: Any, taps: Sequence[str], plan: LayerPlan = WHOLE, inputs: Sequence[Any] = ()
        ) -> Any:
            model.layers_seen += plan.count(model.num_layers)
            return score(feeds, places, taps, plan, inputs)

        model._score, model.layers_seen = counted, 0.0
    seen: float = model.layers_seen
    return seen


# -- models ----------------------------------------------------------------------------------------------------------


class MarkovTable(TableModel):
    """A table model whose distribution depends on the last two tokens and is computed once."""

    def __init__(
        self, table: Callable[[tuple[int, ...]], Sequence[float] | Tensor], vocab_size: int, **more: Any
    ) -> None:
        super().__init__(table, vocab_size, **more)
        self._known: dict[tuple[int, ...], Tensor] = {}

    def distribution(self, prefix: Sequence[int]) -> Tensor:
        """[V] distribution after the last two tokens of ``prefix``; fails past the context, as a real model does."""
        if len(prefix) > self.context_length:
            raise IndexError(f"{len(prefix)} tokens in a context of {self.context_length}")
        key = tuple(prefix[-2:])
        if key not in self._known:
            self._known[key] = super().distribution(key)
        return self._known[key]


def tables(vocab: int = 4, closeness: float = 0.4, seed: int = 0, **more: Any) -> tuple[MarkovTable, MarkovTable]:
    """A target and a draft model whose distributions are ``closeness`` target and the rest something else."""
    p = TableModel.random(vocab, seed=2 * seed, sharpness=1.2)
    other = TableModel.random(vocab, seed=2 * seed + 1, sharpness=1.2)

    def q(prefix: tuple[int, ...]) -> Tensor:
        return closeness * p.distribution(prefix) + (1 - closeness) * other.distribution(prefix)

    return MarkovTable(p.distribution, vocab, **more), MarkovTable(q, vocab, **more)


def fixed_tables(p: Sequence[float], q: Sequence[float]) -> tuple[MarkovTable, MarkovTable]:
    """The same two distributions after every prefix."""
    return MarkovTable(lambda _: p, len(p)), MarkovTable(lambda _: q, len(q))


@cache
def llama(
    vocab: int = 32, seed: int = 0, noise: float = 0.0, dtype: torch.dtype = torch.float64, context: int = 128
) -> LlamaForCausalLM:
    """A random llama of two layers whose distribution is neither flat nor one-hot; ``noise`` makes another one near
    it."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    if noise:
        model = copy.deepcopy(llama(vocab, seed, 0.0, dtype, context))
        generator = torch.Generator().manual_seed(seed + 77)
        with torch.no_grad():
            for weight in model.parameters():
                change = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(dtype)
                weight.add_(change * weight.std() * noise)
        return model.eval()
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                scale = 0.6 if "lm_head" in name else 0.4
                weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) * scale)
    model.generation_config.eos_token_id = None
    return model


def llamas(dtype: torch.dtype = torch.float64, vocab: int = 32) -> tuple[HuggingFaceModel, HuggingFaceModel]:
    """A target and a draft model near it, with fresh caches."""
    return HuggingFaceModel(llama(vocab, dtype=dtype)), HuggingFaceModel(llama(vocab, noise=0.3, dtype=dtype))


# -- running an engine -----------------------------------------------------------------------------------------------


def engine(
    target: LanguageModel,
    drafter: Drafter | None = None,
    verifier: Verifier | None = None,
    controller: Controller | None = None,
    **more: Any,
) -> Engine:
    """An engine with a constant controller unless another is given."""
    return Engine(target, drafter, verifier, controller or (ConstantController() if drafter else None), **more)


def serve(engine: Engine, requests: Iterable[Request]) -> list[Running]:
    """Run requests to their end; finished requests in the order given.

    Raises:
        Exception: what ended one of them, if something went wrong.
    """
    ids = [engine.add(request) for request in requests]
    done: dict[int, Running] = {}
    while engine.busy:
        for run, emission in engine.step():
            if emission.error is not None:
                raise emission.error
            if emission.finish_reason is not None:
                done[run.id] = run
    return [done[request_id] for request_id in ids]


def outputs(engine: Engine, requests: Iterable[Request]) -> list[list[int]]:
    """New tokens of every request."""
    return [run.output for run in serve(engine, requests)]


# -- distributions
# ------------------------------------------------------------------------------------------------------------


def next_logits(model: LanguageModel, tokens: Sequence[int]) -> Tensor:
    """[V] logits after ``tokens``, from an empty cache."""
    sequence = model.open()
    model.prefill(sequence, tokens[:-1])
    logits = model.forward([Feed(sequence, tokens[-1:], wanted=1)])[0].logits[0]
    model.release(sequence)
    return logits


def joint_distribution(
    model: LanguageModel, params: SamplingParams, prompt: Sequence[int], length: int
) -> Distribution:
    """The exact distribution of the first ``length`` output tokens of plain sampling; texts end at the model's eos
    ids."""
    sampler = Sampler(params, len(prompt))
    distribution: Distribution = {(): 1.0}
    for _ in range(length):
        longer: Distribution = {}
        for output, weight in distribution.items():
            if output and output[-1] in model.eos_token_ids:
                longer[output] = weight
                continue
            prefix = [*prompt, *output]
            for token, chance in enumerate(sampler.distribution(next_logits(model, prefix), prefix).tolist()):
                if chance > 0.0:
                    longer[(*output, token)] = weight * chance
        distribution = longer
    return distribution


def shortened(distribution: Mapping[tuple[int, ...], float], length: int) -> Counter[tuple[int, ...]]:
    """The distribution (or the counts) of the first ``length`` tokens."""
    short: Counter[tuple[int, ...]] = Counter()
    for output, weight in distribution.items():
        short[output[:length]] += weight  # type: ignore[assignment]
    return short


def chi_square(
    counts: Mapping[tuple[int, ...], int], distribution: Mapping[tuple[int, ...], float]
) -> tuple[float, int]:
    """Statistic and degrees of freedom; rare outcomes are grouped until five are expected."""
    total = sum(counts.values())
    if any(outcome not in distribution for outcome in counts):
        return math.inf, 1
    statistic, groups = 0.0, 0
    expected = observed = 0.0
    rest = float(total)
    for outcome in sorted(distribution, key=distribution.__getitem__):
        expected += total * distribution[outcome]
        observed += counts.get(outcome, 0)
        rest -= total * distribution[outcome]
        if expected >= 5 and (rest >= 5 or rest < 1e-6):
            statistic += (observed - expected) ** 2 / expected
            groups += 1
            expected = observed = 0.0
    return statistic, max(groups - 1, 0)


def p_value(
    samples: Mapping[str, Sequence[Sequence[int]]], distributions: Mapping[str, Distribution], length: int
) -> float:
    """How likely a right engine is to deviate that much.

    The chi-square statistics of all modes are added up, for the first token, the first two, and so on; the smallest
    p-value is corrected for the number of looks.
    """
    smallest = 1.0
    for n in range(1, length + 1):
        parts = [
            chi_square(shortened(Counter(map(tuple, samples[mode])), n), shortened(distributions[mode], n))
            for mode in samples
        ]
        statistic, freedom = sum(s for s, _ in parts), sum(f for _, f in parts)
        smallest = min(smallest, float(chi2.sf(statistic, freedom)) if freedom else float(math.isfinite(statistic)))
    return min(1.0, smallest * length)


def sampled_p_value(
    engine: Engine,
    modes: Mapping[str, SamplingParams],
    distributions: Mapping[str, Distribution],
    prompt: Sequence[int],
    length: int,
    per_mode: int,
) -> float:
    """Draw ``per_mode`` outputs of every mode, all in one queue, and compare them with their exact distributions.

    The requests have no seeds of their own, so that the engine serves them as it serves whoever gives none.
    """
    keys = [mode for _ in range(per_mode * SCALE) for mode in modes]
    requests = [Request(prompt, modes[mode], length) for mode in keys]
    samples: dict[str, list[list[int]]] = {mode: [] for mode in modes}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for mode, tokens in zip(keys, outputs(engine, requests), strict=True):
            samples[mode].append(tokens)
    return p_value(samples, distributions, length)
