"""What a seed means at the front door: the same text whatever drafts, samples of a prompt, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretoken.core.noise import SEEDS
from foretoken.llm import Llm, assemble
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from toys import tables

PROMPT = [0, 1, 2, 3, 0, 1]
SAMPLED: dict[str, Any] = {"max_new_tokens": 16, "temperature": 1.0}


def toy(drafter: Drafter | None = None, verifier: str = "auto", allow_lossy: bool = False) -> Llm:
    target, draft = tables()
    chosen = drafter or ModelDrafter(draft)
    return assemble(target, chosen, verifier, ConstantController(), None, allow_lossy=allow_lossy)


def test_the_text_of_a_seed_is_that_of_plain_decoding() -> None:
    llm = toy()
    for other in (llm, toy(NgramDrafter(n=2)), toy(verifier="coupled")):
        for seed in (0, 5, SEEDS - 1):
            plain, speculative = (model.generate(PROMPT, seed=seed, **SAMPLED) for model in (llm.plain, other))
            assert (speculative.token_ids, speculative.seed) == (plain.token_ids, seed)


def test_samples_of_a_prompt_can_be_asked_for_alone() -> None:
    llm = toy()
    samples = llm.generate(PROMPT, n=4, seed=SEEDS - 2, **SAMPLED)
    assert isinstance(samples, list)
    assert [out.seed for out in samples] == [SEEDS - 2, SEEDS - 1, 0, 1]
    assert [out.token_ids for out in samples] == [
        llm.generate(PROMPT, seed=out.seed, **SAMPLED).token_ids for out in samples
    ]
    assert len({tuple(out.token_ids) for out in samples}) == 4


def test_samples_of_several_prompts() -> None:
    llm = toy()
    outputs: Any = llm.generate([PROMPT, [3]], n=2, seed=[7, 40], **SAMPLED)
    assert [[out.seed for out in samples] for samples in outputs] == [[7, 8], [40, 41]]
    assert outputs[1][1].token_ids == llm.generate([3], seed=41, **SAMPLED).token_ids
    unseeded: Any = llm.generate([PROMPT, [3]], n=3, **SAMPLED)
    assert len({out.seed for samples in unseeded for out in samples}) == 6


def test_n_of_bad_size() -> None:
    llm = toy()
    with pytest.raises(ValueError, match="n must be at least 1, not 0"):
        llm.generate(PROMPT, n=0, **SAMPLED)
    with pytest.raises(ValueError, match="n=3 needs temperature > 0"):
        llm.generate(PROMPT, n=3)


@pytest.mark.parametrize("seed", [-1, SEEDS, 1.0, "3", True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_no_seed_is_refused(seed: Any, temperature: float) -> None:
    llm = toy()
    for value in (seed, [seed]):
        with pytest.raises(ValueError, match=r"a seed must be an integer from 0 to 2\*\*64 - 1, not"):
            llm.generate([PROMPT] if isinstance(value, list) else PROMPT, seed=value, temperature=temperature)
    with pytest.raises(ValueError, match="a seed must be an integer"):
        next(llm.stream(PROMPT, seed=seed, temperature=temperature))
    assert not llm.engine.busy


def test_a_list_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="1 seeds for 2 prompts: give one seed, or one per prompt"):
        toy().generate([PROMPT, PROMPT], seed=[1], **SAMPLED)


def test_coupled_without_a_seed_draws_one_and_says_which() -> None:
    llm = toy(verifier="coupled")
    first, second = llm.generate(PROMPT, **SAMPLED), llm.generate(PROMPT, **SAMPLED)
    assert first.seed is not None and first.seed != second.seed
    assert llm.generate(PROMPT, seed=first.seed, **SAMPLED).token_ids == first.token_ids
    *_, last = llm.stream(PROMPT, **SAMPLED)
    assert last.seed is not None
    streamed = llm.generate(PROMPT, seed=last.seed, **SAMPLED)
    assert last.stats is not None and streamed.stats.num_new_tokens == last.stats.num_new_tokens


def test_the_drawn_seed_follows_torchs_own() -> None:
    llm = toy(verifier="coupled")
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        drawn.append(llm.generate(PROMPT, **SAMPLED).seed)
    assert drawn[0] == drawn[1]


def test_coupled_at_temperature_0_is_the_greedy_walk() -> None:
    out = toy(verifier="coupled").generate(PROMPT, max_new_tokens=16, seed=3)
    assert out.token_ids == toy().plain.generate(PROMPT, max_new_tokens=16).token_ids
    assert out.seed is None  # nothing was left to chance
    state = torch.random.get_rng_state()
    toy().generate(PROMPT)
    assert torch.equal(state, torch.random.get_rng_state())


def test_with_a_lossy_rule_a_seed_repeats_that_rules_run() -> None:
    llm = toy(verifier="typical", allow_lossy=True)
    runs = [llm.generate(PROMPT, seed=seed, **SAMPLED).token_ids for seed in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]
    with pytest.raises(ValueError, match="allow_lossy"):
        toy(verifier="typical")


@pytest.mark.parametrize("rule", ["block", "rejection", "match"])
def test_with_a_rule_of_its_own_draws_a_seed_repeats_that_rules_run(rule: str) -> None:
    llm = toy(verifier=rule)
    runs = [llm.generate(PROMPT, seed=seed, **SAMPLED) for seed in (3, 3, 4)]
    assert runs[0].token_ids == runs[1].token_ids != runs[2].token_ids
    assert runs[0].seed == 3
