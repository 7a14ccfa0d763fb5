"""SpecDec++: when its stop rule ends a draft, that it keeps the distribution, and heads that do not belong."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from foretoken import registry
from foretoken.core import Budget, Context, Limits, PathStop, Rng, TokenTree
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import ZOO, build_controller, load_model
from foretoken.methods.controllers.specdec_pp import HeadStop, SpecdecPpController
from foretoken.methods.drafters.early_exit import EarlyExitDrafter
from foretoken.methods.drafters.ensemble import EnsembleDrafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.nets.specdec_pp import StopHead, StopHeadConfig, best_constant, weighted_loss
from foretoken.methods.drafters.nets.store import save_drafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.router import RouterDrafter
from foretoken.models.forward.parts import Fingerprint, TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from toys import FALSE_ALARM, engine, joint_distribution, llama, llamas, outputs, sampled_p_value, tables

T1 = SamplingParams(temperature=1.0)
PROMPT = [0, 1, 2, 3, 0, 1]
WIDTH = 16  # of the toy llamas


class Says(nn.Module):
    """A head whose chances are given, call by call; it writes down the states that it was shown."""

    def __init__(self, *chances: Sequence[float]) -> None:
        super().__init__()
        self.left, self.seen = list(chances), list[Tensor]()

    def forward(self, states: Tensor) -> Tensor:
        self.seen.append(states)
        return torch.logit(torch.tensor(self.left.pop(0), dtype=torch.float64))


def propose(drafter: ModelDrafter, budget: Budget, params: SamplingParams = T1, seed: int = 0) -> TokenTree:
    context = Context(0, list(PROMPT), len(PROMPT), Sampler(params, len(PROMPT)), Rng(seed))
    drafter.start(context)
    return drafter.propose(context, budget)


def head(width: int = WIDTH, seed: int = 0) -> StopHead:
    """Random weights: its chances are all over the place."""
    torch.manual_seed(seed)
    net = StopHead(StopHeadConfig(width, blocks=1))
    nn.init.normal_(net.out.weight, std=1.0)
    return net.eval()


def fingerprint(model: HuggingFaceModel) -> Fingerprint:
    return TargetParts(model).fingerprint()


# -- when a draft ends -----------------------------------------------------------------------------------------------


def test_the_product_lags_one_token_and_ends_above_the_threshold() -> None:
    """Chances .9, .8, .95: after x1 nothing is known, after x2 1-.9, after x3 1-.72, after x4 1-.684."""
    for threshold, length in ((0.05, 2), (0.1, 2), (0.11, 3), (0.27, 3), (0.29, 4), (0.31, 4), (0.32, 5)):
        net = Says([0.9], [0.8], [0.95], [0.9999])
        tree = propose(ModelDrafter(llamas()[1], k=5), Budget(8, 64, stop=HeadStop(net, threshold)))
        assert tree.num_drafts == length, threshold


@pytest.mark.parametrize(("threshold", "length"), [(0.0, 2), (1.0, 6)])
def test_the_ends_of_the_range(threshold: float, length: int) -> None:
    """0 ends as soon as anything is in doubt, which is after two tokens; 1 never does."""
    stop = HeadStop(Says([0.9], [0.01], [0.01], [0.01], [0.01]), threshold)
    assert propose(ModelDrafter(llamas()[1], k=6), Budget(8, 64, stop=stop)).num_drafts == length


def test_every_path_of_a_tree_has_its_own_product() -> None:
    """Children .9 and .5 of the root: only the first's are drafted on; theirs are .9 x .9 and .9 x .6."""
    stop = HeadStop(Says([0.9, 0.5], [0.9, 0.6], [0.8]), 0.3)
    tree = propose(ModelDrafter(llamas()[1], tree="2x2x1x1x1"), Budget(8, 64, stop=stop))
    # Nothing behind the children of 2 (.5) and 4 (.54); 7, behind 3 (.81), goes on and ends with its child (.648).
    assert tree.parents == (-1, 0, 0, 1, 1, 2, 2, 3, 4, 7)


def test_the_head_sees_the_state_behind_the_token() -> None:
    """After x1 the head sees the draft model's last hidden state of that token at its place."""
    _, draft = llamas()
    net = Says([0.99], [0.99])
    tree = propose(ModelDrafter(draft, k=3), Budget(8, 64, stop=HeadStop(net, 0.5)))
    for depth, seen in enumerate(net.seen, 1):
        text = torch.tensor([[*PROMPT, *tree.tokens[1 : depth + 1]]])
        expected = TargetParts(draft).features(text, ("last",))["last"][0, -1:]
        assert torch.allclose(seen.double(), expected, atol=1e-6)
    assert len(net.seen) == 2


def test_a_batch_is_stopped_request_by_request() -> None:
    drafter = ModelDrafter(llamas()[1], k=4)
    contexts = [Context(i, [*PROMPT, i], 7, Sampler(T1, 7), Rng(i)) for i in range(3)]
    for context in contexts:
        drafter.start(context)
    stops = [HeadStop(Says([0.1]), 0.3), None, HeadStop(Says([0.9], [0.1]), 0.3)]
    trees = drafter.propose_batch(contexts, [Budget(8, 64, stop=stop) for stop in stops])
    assert [tree.num_drafts for tree in trees] == [2, 4, 3]


def test_greedy_drafts_are_stopped_too() -> None:
    stop = HeadStop(Says([0.9], [0.5]), 0.3)
    tree = propose(ModelDrafter(llamas()[1], k=6), Budget(8, 64, stop=stop), SamplingParams())
    assert tree.num_drafts == 3 and tree.q is None


def test_a_threshold_of_probability_counts_beside_it() -> None:
    """min_confidence looks at the token, the head at the path: either ends the draft."""
    sure = HeadStop(Says([1 - 1e-9], [1 - 1e-9], [1 - 1e-9]), 0.3)
    drafter = ModelDrafter(llamas()[1], k=4)
    assert propose(drafter, Budget(8, 64, min_confidence=1.0, stop=sure)).num_drafts == 1
    assert propose(ModelDrafter(llamas()[1], k=4), Budget(8, 64, stop=sure)).num_drafts == 4


def test_where_there_are_no_hidden_states_it_never_stops() -> None:
    class Never(PathStop):
        def follow(self, above: Sequence[float], hidden: Tensor) -> list[float]:
            raise AssertionError("there is nothing to follow")

        def ends(self, likelihood: float) -> bool:
            return likelihood < 1

    budget = Budget(8, 64, stop=Never())
    assert not budget.stops_after(None, 0.0) and not budget.stops_after(torch.tensor([0.5, 0.5]), 0.5)
    assert budget.path_stop is budget.stop and Budget(stop=lambda distribution, chance: True).path_stop is None
    assert propose(ModelDrafter(tables()[1], k=4), budget).num_drafts == 4
    target, _ = llamas()
    context = Context(0, list(PROMPT), 6, Sampler(T1, 6), Rng(0), sequence=target.open())
    target.prefill(context.sequence, PROMPT[:-1])
    drafter = EarlyExitDrafter(target, layer=1, k=3)
    drafter.start(context)
    assert drafter.states is None and drafter.propose(context, budget).num_drafts == 3


# -- exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [{"k": 4}, {"tree": "2x1x1", "draw": "iid"}, {"tree": "2x2x1"}], ids=str)
def test_the_distribution_is_kept(shape: dict[str, str]) -> None:
    """False alarm 1e-4; the head ends drafts at every length."""
    target, draft = HuggingFaceModel(llama(4)), HuggingFaceModel(llama(4, noise=0.3))
    modes = {"T=1": T1, "T=0.6": SamplingParams(temperature=0.6)}
    distributions = {mode: joint_distribution(target, params, PROMPT, 4) for mode, params in modes.items()}
    controller = SpecdecPpController(head(), fingerprint(draft), threshold=0.6)
    speculative = engine(target, ModelDrafter(draft, **shape), None, controller, max_batch=4)  # type: ignore[arg-type]
    assert sampled_p_value(speculative, modes, distributions, PROMPT, 4, 100) > FALSE_ALARM


def test_greedy_outputs_are_kept_and_drafts_have_many_lengths() -> None:
    target, draft = llamas()
    requests = [Request(prompt, max_new_tokens=40) for prompt in (PROMPT, [3], [2, 2, 2])]
    seen: set[int] = set()

    class Watched(ModelDrafter):
        name = "model"

        def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
            trees = super().propose_batch(contexts, budgets)
            seen.update(tree.num_drafts for tree in trees)
            return trees

    controller = SpecdecPpController(head(), fingerprint(draft), threshold=0.6)
    assert outputs(engine(target, Watched(draft, k=6), None, controller), requests) == outputs(engine(target), requests)
    assert len(seen) > 2


# -- the head --------------------------------------------------------------------------------------------------------


def test_the_loss_by_hand() -> None:
    """Log-odds 0, chances 1 and .5, weight 6: ln 2 (1 + .5 + 3) / (1 + .5 + 3); the constant has odds .75 / 1.5."""
    chances = torch.tensor([1.0, 0.5])
    assert float(weighted_loss(torch.zeros(2), chances, 6.0)) == pytest.approx(math.log(2))
    assert float(best_constant(chances, 6.0)) == pytest.approx(math.log(0.75 / 1.5))
    best = weighted_loss(best_constant(chances, 6.0).expand(2), chances, 6.0)
    for other in (-1.5, -0.5, 0.0):
        assert float(weighted_loss(torch.full((2,), other), chances, 6.0)) > float(best)


def test_a_head_learns_the_chance_of_every_state() -> None:
    """States along one direction, chances a smooth function of it: the head finds them, the mismatch weight undone."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(2048, 8, generator=generator)
    chances = torch.sigmoid(2 * states[:, 0] + 1)
    torch.manual_seed(0)
    net = StopHead(StopHeadConfig(8, blocks=2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    first = float(weighted_loss(net(states), chances, 6.0).detach())
    for _ in range(200):
        loss = weighted_loss(net(states), chances, 6.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    constant = float(weighted_loss(best_constant(chances, 6.0).expand_as(chances), chances, 6.0))
    assert float(loss.detach()) < 0.75 * constant < first
    believed = torch.sigmoid(net(states).detach() + math.log(6.0))
    assert float((believed - chances).abs().mean()) < 0.05


@pytest.mark.parametrize("wrong", [{"blocks": -1}, {"mix": 0.0}, {"mix": 1.5}, {"mismatch": 0.0}])
def test_a_head_of_no_shape(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"specdec_pp needs .*{next(iter(wrong))}"):
        StopHeadConfig(8, **wrong)  # type: ignore[arg-type]


# -- what does not belong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["threshold=1.5", "threshold=-0.1", "k=0"])
def test_bad_options(options: str) -> None:
    with pytest.raises(ValueError, match=r"^specdec_pp needs"):
        build_controller(f"specdec_pp,{options}")


def test_lengths_come_from_the_drafter_or_the_option() -> None:
    controller = SpecdecPpController(head())
    controller.attach(Limits("toy", 7, 33, states=object()))
    context = Context(0, [0], 1, Sampler(T1), Rng(0))
    assert controller.budget(context, 1) == Budget(7, 33, stop=controller.stop)
    longer = SpecdecPpController(head(), k=12)
    longer.attach(Limits("toy", 7, 33, states=object()))
    assert longer.budget(context, 1).max_depth == 12


def test_a_drafter_without_a_draft_model_is_refused() -> None:
    target, draft = llamas()
    for drafter in (
        NgramDrafter(),
        ModelDrafter(tables(32)[1]),
        EnsembleDrafter([NgramDrafter(), ModelDrafter(draft)]),
    ):
        with pytest.raises(ValueError, match="use drafter model:PATH, or another controller") as error:
            engine(target, drafter, None, SpecdecPpController(head(), fingerprint(draft)))
        assert drafter.name in str(error.value) and "\n" not in str(error.value)


def test_the_members_of_a_router() -> None:
    target, draft = llamas()
    group = RouterDrafter([ModelDrafter(draft, k=3), NgramDrafter(n=2)])
    requests = [Request(PROMPT, max_new_tokens=30)]
    speculative = engine(target, group, None, SpecdecPpController(head(), fingerprint(draft)))
    assert outputs(speculative, requests) == outputs(engine(target), requests)
    other = RouterDrafter([ModelDrafter(draft, k=3), ModelDrafter(HuggingFaceModel(llama(seed=5)), k=3)])
    with pytest.raises(ValueError, match="another draft model"):
        engine(target, other, None, SpecdecPpController(head(), fingerprint(draft)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A stored head of the toy draft model."""
    net = head()
    save_drafter(tmp_path / "head", "specdec_pp", vars(net.config), net, fingerprint(llamas()[1]))
    return tmp_path / "head"


def test_a_stored_head_comes_back(folder: Path) -> None:
    controller: SpecdecPpController = build_controller(f"specdec_pp:{folder},threshold=0.7,k=9")
    states = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(controller.stop.net(states), head()(states), atol=0.05)  # bfloat16
    assert controller.stop.threshold == 0.7 and controller.k == 9
    target, draft = llamas()
    assert engine(target, ModelDrafter(draft), None, controller).controller is controller


def test_a_head_of_another_draft_model_is_refused(folder: Path) -> None:
    target, draft = llamas()
    controller = build_controller(f"specdec_pp:{folder}")
    with pytest.raises(ValueError, match=r"trained for another draft model .the shapes agree, but the weights differ"):
        engine(target, ModelDrafter(target), None, controller)
    with pytest.raises(ValueError, match="hidden_size was 192 in training and is 16 here"):
        engine(target, ModelDrafter(draft), None, build_controller("specdec_pp"))


def test_wrong_folders(folder: Path, tmp_path: Path) -> None:
    def refused(path: Path | str, words: str) -> None:
        with pytest.raises(ValueError, match=words) as error:
            build_controller(f"specdec_pp:{path}")
        assert "\n" not in str(error.value)

    refused(tmp_path / "none", "not a folder with a trained stop head: make one with `foretoken train specdec_pp`")
    refused(tmp_path, "holds no trained stop head")
    refused(ZOO / "medusa", "was trained as 'medusa': use it as medusa:")
    cut = Path(shutil.copytree(folder, tmp_path / "cut"))
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-9])
    refused(cut, "missing, damaged or half-written")
    described = json.loads((folder / "drafter.json").read_text())
    for change, words in (
        ({"config": {"hidden_size": 8}}, "must be"),
        ({"config": {"layers": 8}}, "does not describe a valid stop head"),
        ({"format": 99}, "train it again"),
        ({"target": None}, "damaged"),
    ):
        (cut / "drafter.json").write_text(json.dumps(described | change))
        shutil.copy(folder / "model.safetensors", cut)
        refused(cut, words)


def test_methods_without_files_take_no_path() -> None:
    for role, name in (("controller", "constant"), ("verifier", "block")):
        with pytest.raises(ValueError, match=f"{role} '{name}' takes no path"):
            registry.make(role, f"{name}:./here")  # type: ignore[arg-type]


# -- the built-in head -----------------------------------------------------------------------------------------------


def test_the_built_in_head_is_small_and_says_what_it_is() -> None:
    assert (ZOO / "specdec_pp/model.safetensors").stat().st_size < 700_000
    card, report = (
        (ZOO / "specdec_pp/README.md").read_text(),
        json.loads((ZOO / "specdec_pp/training.json").read_text()),
    )
    for word in ("foretoken train specdec_pp", "Held-out loss", "Held-out acceptance", "tokens seen", "Data"):
        assert word in card, word
    measured = json.loads((ZOO / "specdec_pp/drafter.json").read_text())["measured"]
    assert measured["loss"] < measured["constant_loss"] and report["corpus"]["held"]["documents"] > 0
    accepted = [group[1] for group in measured["calibration"]]
    assert accepted[-1] > accepted[0] + 0.1  # what it believes in is accepted more often


def test_the_built_in_head_is_that_of_the_built_in_draft_model() -> None:
    controller: SpecdecPpController = build_controller("specdec_pp")
    draft = load_model("builtin", role="draft", dtype="float32")
    controller.attach(ModelDrafter(draft, k=8).limits)
    assert controller.budget(Context(0, [0], 1, Sampler(T1), Rng(0)), 1).max_depth == 8


def test_the_built_in_head_names_the_target_that_it_learned() -> None:
    """Its target's layers too: the embedding alone is also that of the target that was trained for early exits."""
    config = json.loads((ZOO / "specdec_pp/drafter.json").read_text())["config"]
    learned, other = (TargetParts(load_model(name)).fingerprint() for name in ("builtin", "builtin:early_exit"))
    assert (config["judge"], config["judge_layers"]) == (learned.weights, learned.layers)
    assert learned.weights == other.weights and learned.layers != other.layers


def test_a_head_from_before_its_targets_layers_were_stored(folder: Path) -> None:
    file = folder / "drafter.json"
    described = json.loads(file.read_text())
    del described["config"]["judge_layers"]
    file.write_text(json.dumps(described))
    assert isinstance(build_controller(f"specdec_pp:{folder}"), SpecdecPpController)
