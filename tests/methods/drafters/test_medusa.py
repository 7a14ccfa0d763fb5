"""Medusa's heads: what they start as, which tokens stand where in the tree, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretoken.cli.main import main
from foretoken.core import Budget, Context, Rng
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.methods.drafters.medusa import MedusaDrafter
from foretoken.methods.drafters.nets.medusa import MedusaConfig, MedusaHeads
from foretoken.methods.drafters.nets.store import load_weights, read_description, save_drafter
from foretoken.models.base import CapabilityError, Feed
from foretoken.models.forward.parts import TargetParts
from foretoken.models.other.table import TableModel
from toys import llamas

PROMPT = [3, 1, 4, 1, 5]


def parts_of_target() -> TargetParts:
    return TargetParts(llamas()[0])


def context_with(hidden: torch.Tensor) -> Context:
    context = Context(0, list(PROMPT), len(PROMPT), Sampler(SamplingParams()), Rng(0))
    context.hidden = {"last": hidden}
    return context


def heads(count: int = 3, seed: int = 0, own: bool = False) -> MedusaHeads:
    parts = parts_of_target()
    net = MedusaHeads(MedusaConfig(parts.hidden_size, parts.vocab_size, count, own_projection=own))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.4)
    return net


def test_a_fresh_head_says_what_the_target_says() -> None:
    """Zero-initialised blocks: every head's logits are the target's own for that state."""
    target = llamas()[0]
    parts = TargetParts(target)
    drafter = MedusaDrafter(MedusaHeads(MedusaConfig(parts.hidden_size, parts.vocab_size, 3)), parts)
    sequence = target.open()
    rows = target.forward([Feed(sequence, PROMPT)], ["last"])[0]
    logits = drafter.logits(rows.taps["last"].float())
    for head in logits:
        assert torch.allclose(head, rows.logits.float(), atol=0.05 * float(rows.logits.std()))
        assert head.argmax(-1).tolist() == rows.logits.argmax(-1).tolist()


def test_the_tree_holds_each_heads_candidates_whatever_is_above_them() -> None:
    net, parts = heads(), parts_of_target()
    drafter = MedusaDrafter(net, parts, nodes=8, accuracies=[[0.5, 0.3, 0.1], [0.4, 0.2, 0.1], [0.3, 0.1, 0.1]])
    state = torch.randn(1, parts.hidden_size, generator=torch.Generator().manual_seed(1))
    tree = drafter.propose(context_with(state), Budget(max_depth=8, max_nodes=64))
    ranked = drafter.logits(state)[:, 0].topk(3, -1).indices.tolist()
    assert len(tree) == 9 and tree.tokens[0] == PROMPT[-1]
    for choice, node in zip(drafter.choices, range(1, 9), strict=True):
        assert tree.tokens[node] == ranked[len(choice) - 1][choice[-1]]
        assert tree.depths[node] == len(choice)


def test_budgets_cut_the_tree() -> None:
    parts = parts_of_target()
    drafter = MedusaDrafter(heads(), parts, nodes=12)
    state = torch.ones(1, parts.hidden_size)
    assert len(drafter.propose(context_with(state), Budget(max_depth=8, max_nodes=5))) == 6
    assert max(drafter.propose(context_with(state), Budget(max_depth=1, max_nodes=64)).depths) == 1
    assert len(drafter.propose(context_with(torch.empty(0, parts.hidden_size)), Budget())) == 1


def test_a_batch_is_its_requests() -> None:
    parts = parts_of_target()
    drafter = MedusaDrafter(heads(own=True), parts)
    contexts = [context_with(torch.full((1, parts.hidden_size), float(i))) for i in range(3)]
    contexts[1].hidden = {}
    together = drafter.propose_batch(contexts, [Budget(max_nodes=20)] * 3)
    alone = [drafter.propose(context, Budget(max_nodes=20)) for context in contexts]
    assert [t.tokens for t in together] == [t.tokens for t in alone] and len(together[1]) == 1


def test_saved_and_loaded(tmp_path: Path) -> None:
    parts, net = parts_of_target(), heads()
    config = dataclasses.asdict(MedusaConfig(parts.hidden_size, parts.vocab_size, 3))
    save_drafter(tmp_path, "medusa", config, net, parts.fingerprint(), {"accuracies": [[0.5, 0.1]] * 3})
    description = read_description(tmp_path, "medusa", parts.fingerprint())
    other = MedusaHeads(MedusaConfig(**description["config"]))
    load_weights(tmp_path, other)
    for name, value in net.state_dict().items():
        assert torch.equal(other.state_dict()[name], value.bfloat16().float())
    assert not list(tmp_path.glob(".tmp*")) and description["measured"]["accuracies"][0] == [0.5, 0.1]


def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path) -> None:
    parts, net = parts_of_target(), heads()
    fingerprint = parts.fingerprint()
    config = dataclasses.asdict(MedusaConfig(parts.hidden_size, parts.vocab_size, 3))
    with pytest.raises(ValueError, match="no trained drafter"):
        read_description(tmp_path, "medusa", fingerprint)
    save_drafter(tmp_path, "medusa", config, net, fingerprint)
    with pytest.raises(ValueError, match="trained as 'medusa'"):
        read_description(tmp_path, "hydra", fingerprint)
    for change, words in (
        ({"hidden_size": 9}, "hidden_size"),
        ({"vocab_size": 9}, "vocab_size"),
        ({"weights": "0"}, "weights"),
    ):
        with pytest.raises(ValueError, match=f"another target: .*{words}"):
            read_description(tmp_path, "medusa", dataclasses.replace(fingerprint, **change))
    tensors = load_file(tmp_path / "model.safetensors")
    name = min(tensors)
    save_file({k: v for k, v in tensors.items() if k != name}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"lacks the tensor {name}"):
        load_weights(tmp_path, net)
    save_file({**tensors, "more": tensors[name].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="that this drafter does not have"):
        load_weights(tmp_path, net)
    (tmp_path / "model.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match="half-written"):
        load_weights(tmp_path, net)
    (tmp_path / "drafter.json").write_text(json.dumps({"format": 1}))
    with pytest.raises(ValueError, match="damaged"):
        read_description(tmp_path, "medusa", fingerprint)


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, net = parts_of_target(), heads()
    config = dataclasses.asdict(MedusaConfig(parts.hidden_size, parts.vocab_size, 3))
    save_drafter(tmp_path, "medusa", config, net, parts.fingerprint())
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(Path, "write_text", full)
        save_drafter(tmp_path, "medusa", config, heads(seed=5), parts.fingerprint())
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_errors_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for spec, words in (
        (f"medusa:{tmp_path / 'none'}", "no such file or folder"),
        (f"medusa:{tmp_path}", "no trained drafter"),
    ):
        assert main(["generate", "--drafter", spec, "--max-new-tokens", "4", "x"]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1


def test_a_target_without_hidden_states() -> None:
    with pytest.raises(CapabilityError, match="hidden states"):
        TargetParts(TableModel(lambda _: [0.5, 0.5], 2))


def test_sizes_out_of_range() -> None:
    with pytest.raises(ValueError, match="nodes >= 1"):
        MedusaDrafter(heads(), parts_of_target(), nodes=0)
    with pytest.raises(ValueError, match="heads >= 1"):
        MedusaConfig(4, 4, 0)
