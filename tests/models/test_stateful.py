"""Recurrent and hybrid models: after every round the state is that of a fresh reading of the committed text."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from checkpoints import VOCAB, plain_logits, prompt_of
from hybrids import HYBRIDS, hybrid, unclamped, whole_float64

from foretoken.models import wrap
from foretoken.models.base import CapabilityError, Feed, SequenceState
from foretoken.models.cache.delta_rule import RULES
from foretoken.models.cache.state import StateCache, tensors_of
from foretoken.models.sequential import SequentialModel
from foretoken.models.stateful import StatefulModel

ABLE = [name for name in HYBRIDS if name not in ("mamba", "falcon_mamba", "jamba", "lfm2")]
K = 3
TOLERANCE = 1e-9


@pytest.fixture(scope="module", params=ABLE)
def network(request: pytest.FixtureRequest) -> Iterator[Any]:
    model = unclamped(hybrid(request.param))
    with whole_float64(model):
        yield model


@pytest.fixture(scope="module")
def qwen() -> Iterator[Any]:
    model = hybrid("qwen3_5_text")
    with whole_float64(model):
        yield model


def worst(model: StatefulModel, sequence: SequenceState) -> float:
    """Largest difference of any state, window, key or value to a fresh reading of the tokens that the state holds."""
    state, fresh = model.state(sequence), StateCache()
    assert state.length <= len(sequence.tokens)
    if state.length == 0:
        return 0.0
    model.read(fresh, sequence.tokens[: state.length], 0)
    pairs = zip(tensors_of(state.cache), tensors_of(fresh.cache), strict=True)
    return max(float((stored - reread).abs().max()) for (_, stored), (_, reread) in pairs)


def verify(model: StatefulModel, sequence: SequenceState, root: int, drafts: Sequence[int], accepted: int) -> float:
    """One round with a forced verdict; the largest difference of its logits to a fresh forward."""
    (rows,) = model.forward([Feed(sequence, [root, *drafts])])
    expected = plain_logits(model.model, [*sequence.tokens, root, *drafts])[-len(drafts) - 1 :]
    model.commit(sequence, range(1 + accepted))
    return float((rows.logits - expected).abs().max())


VERDICTS = [*range(K + 1), 0, 2, K, 1]


def check_verdicts(model: StatefulModel, verdicts: Sequence[int]) -> None:
    """Forced verdicts; the state, as far as it goes, and the whole text's once it has settled."""
    sequence = model.open()
    model.prefill(sequence, prompt_of(13))
    for step, accepted in enumerate(verdicts):
        assert verify(model, sequence, 5 + step, prompt_of(K, seed=step), accepted) < TOLERANCE
        assert worst(model, sequence) < TOLERANCE
        if step % 4 == 3:
            model.settle(sequence)
            assert model.state(sequence).length == len(sequence.tokens)
            assert worst(model, sequence) < TOLERANCE
    model.release(sequence)
    assert not model._states


def test_the_state_after_every_verdict_is_that_of_a_fresh_reading(network: Any) -> None:
    check_verdicts(StatefulModel(network), VERDICTS)


@pytest.mark.parametrize("options", [{"flush": 0}, {"flush": 4}, {"flush": 100}])
def test_every_form_of_replay_keeps_the_state(qwen: Any, options: dict[str, Any]) -> None:
    check_verdicts(StatefulModel(qwen, replay="lazy", **options), VERDICTS)


def test_fifty_rounds(qwen: Any) -> None:
    model = StatefulModel(qwen, replay="lazy")
    sequence = model.open()
    model.prefill(sequence, prompt_of(2))
    generator = torch.Generator().manual_seed(0)
    for step in range(50):
        k = int(torch.randint(0, 4, (1,), generator=generator))
        accepted = int(torch.randint(0, k + 1, (1,), generator=generator))
        verify(model, sequence, step % VOCAB, prompt_of(k, seed=step), accepted)
        assert worst(model, sequence) < TOLERANCE
    model.settle(sequence)
    assert worst(model, sequence) < TOLERANCE


def test_a_rejection_costs_rows_and_no_forward(qwen: Any) -> None:
    for flush, forwards, rows in ((0, [1, 2, 1], [4, 6, 4]), (8, [1, 1, 1], [4, 6, 4])):
        model = StatefulModel(qwen, replay="lazy", flush=flush)
        sequence = model.open()
        model.prefill(sequence, prompt_of(9))
        counted = []
        for accepted in (1, K, K):
            before = model.num_forwards, model.run_rows
            verify(model, sequence, 5, [6, 7, 8], accepted)
            counted.append((model.num_forwards - before[0], model.run_rows - before[1]))
        assert counted == list(zip(forwards, rows, strict=True))


def test_plain_decoding_copies_nothing(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = StatefulModel(qwen)
    monkeypatch.setattr(StateCache, "save", lambda self: pytest.fail("a copy that nobody needs"))
    sequence = model.open()
    model.prefill(sequence, prompt_of(9))
    for token in (3, 4, 5):
        model.forward([Feed(sequence, [token])])
        model.commit(sequence, [0])
    assert worst(model, sequence) < TOLERANCE


def test_a_dropped_root_is_read_again_once(qwen: Any) -> None:
    model = StatefulModel(qwen)
    sequence = model.open()
    model.prefill(sequence, prompt_of(9))
    rows = []
    for _ in range(3):
        before = model.run_rows
        model.forward([Feed(sequence, [3])])
        model.commit(sequence, [])
        rows.append(model.run_rows - before)
    assert rows == [1, 10, 1]
    assert worst(model, sequence) < TOLERANCE


@pytest.mark.parametrize("replay", ["lazy", "capture"])
def test_drafting_one_by_one_and_catching_up(qwen: Any, replay: str) -> None:
    """As in a draft model, the scratch grows token by token, and the text decides what stays."""
    model = StatefulModel(qwen, replay=replay)
    sequence = model.open()
    text = prompt_of(9)
    for accepted in (0, 1, 2, 3, 3, 1, 0):
        unread = model.catch_up(sequence, text)
        (rows,) = model.forward([Feed(sequence, unread, wanted=1)])
        drafts = prompt_of(3, seed=accepted)
        for i, draft in enumerate(drafts):
            expected = plain_logits(model.model, [*text, *drafts[:i]])[-1:]
            assert float((rows.logits - expected).abs().max()) < TOLERANCE
            (rows,) = model.forward([Feed(sequence, [draft])])
        text = [*text, *drafts[:accepted], 7]
    model.catch_up(sequence, text)
    assert worst(model, sequence) < TOLERANCE
    model.settle(sequence)
    assert worst(model, sequence) < TOLERANCE


@pytest.mark.parametrize("replay", ["lazy", "capture"])
def test_taps_prefill_and_rewind(qwen: Any, replay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatefulModel, "prefill_chunk", 4)
    model = StatefulModel(qwen, replay=replay)
    whole, sequence = model.open(), model.open()
    text = prompt_of(11)
    taps = model.prefill(sequence, text, ["layer:2", "last"])
    expected = model.forward([Feed(whole, text)], ["layer:2", "last"])[0]
    for name, rows in taps.items():
        assert rows.shape == (11, 48)
        assert float((rows - expected.taps[name]).abs().max()) < TOLERANCE
    verify(model, sequence, 5, [6, 7, 8], 0)
    (rows,) = model.forward([Feed(sequence, [9, 10])], ["last"])  # lazily, a token is read again in front of them
    assert rows.taps["last"].shape == (2, 48)
    model.commit(sequence, [0])
    for length in (12, 7, 2):
        model.rewind(sequence, length)
        assert worst(model, sequence) < TOLERANCE
        assert verify(model, sequence, 5, [6, 7, 8], 1) < TOLERANCE
    assert worst(model, sequence) < TOLERANCE


def test_a_forward_that_breaks_off_leaves_a_text_that_can_go_on(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = StatefulModel(qwen)
    sequence = model.open()
    model.prefill(sequence, prompt_of(9))
    layer = qwen.model.layers[2]
    with monkeypatch.context() as patch:
        patch.setattr(layer.mlp, "forward", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            model.forward([Feed(sequence, [3, 4])])
    assert sequence.scratch_tokens == []
    assert verify(model, sequence, 5, [6, 7, 8], 1) < TOLERANCE
    model.forward([Feed(sequence, [3])])
    with monkeypatch.context() as patch:
        patch.setattr(layer.mlp, "forward", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            model.forward([Feed(sequence, [4])])
    (rows,) = model.forward([Feed(sequence, [4])])  # the scratch in front of it is read again, too
    expected = plain_logits(qwen, [*sequence.tokens, 3, 4])[-1:]
    assert float((rows.logits - expected).abs().max()) < TOLERANCE
    model.commit(sequence, [0])
    assert worst(model, sequence) < TOLERANCE


def test_what_cannot_be_done_is_refused(qwen: Any) -> None:
    model = StatefulModel(qwen)
    sequence = model.open()
    model.prefill(sequence, prompt_of(9))
    with pytest.raises(CapabilityError, match="only chains"):
        model.forward([Feed(sequence, [3, 4, 5], [-1, 0, 0])])
    with pytest.raises(CapabilityError, match="only chains"):
        model.forward([Feed(sequence, [3], after=4)])
    with pytest.raises(ValueError, match="same sequence"):
        model.forward([Feed(sequence, [3]), Feed(sequence, [4])])
    with pytest.raises(ValueError, match="unknown tap"):
        model.forward([Feed(sequence, [3])], ["layer:99"])
    model.forward([Feed(sequence, [3, 4, 5])])
    with pytest.raises(CapabilityError, match="branched"):
        model.commit(sequence, [0, 2])
    with pytest.raises(ValueError, match="flush"):
        StatefulModel(qwen, flush=-1)


# -- capture and replay --------------------------------------------------------------------------------------------

GATED_DELTA = ("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text", "olmo_hybrid")


@pytest.mark.parametrize("name", GATED_DELTA)
def test_captured_states_equal_replayed_ones(name: str) -> None:
    network = hybrid(name)
    with whole_float64(network):
        check_verdicts(StatefulModel(network, replay="capture"), VERDICTS[:5])


def test_capture_reads_nothing_again(qwen: Any) -> None:
    model = StatefulModel(qwen, replay="capture")
    sequence = model.open()
    model.prefill(sequence, prompt_of(9))
    for accepted in (1, 0, K, 2):
        before = model.num_forwards, model.run_rows
        verify(model, sequence, 5, [6, 7, 8], accepted)
        assert (model.num_forwards - before[0], model.run_rows - before[1]) == (1, 4)
        assert model.state(sequence).length == len(sequence.tokens)


def test_every_recurrent_layer_must_report(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = sys.modules[type(qwen).__module__]
    honest = {name: getattr(file, name) for name in RULES}
    model = StatefulModel(qwen, replay="capture")
    sequence = model.open()
    model.prefill(sequence, prompt_of(9))
    with monkeypatch.context() as patch:  # one layer that calls a rule of its own
        mixer = qwen.model.layers[1].linear_attn
        patch.setattr(mixer, "forward", lambda hidden_states, **more: torch.zeros_like(hidden_states))
        with pytest.raises(RuntimeError, match="2 reports of 3 recurrent layers"):
            model.forward([Feed(sequence, [3, 4])])
    assert verify(model, sequence, 5, [6, 7, 8], 1) < TOLERANCE
    assert {name: getattr(file, name) for name in RULES} == honest  # the modeling file is as it was
    with pytest.raises(ValueError, match="needs Gated DeltaNet layers"):
        StatefulModel(hybrid("mamba2"), replay="capture")
    with pytest.raises(ValueError, match="must be one of auto, lazy, capture"):
        StatefulModel(qwen, replay="magic")


@pytest.mark.parametrize("fault", ["a token less", "no copy", "convolution not cropped", "keys not cropped"])
def test_planted_faults_of_capture_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import foretoken.models.cache.state as place

    honest = place.replay
    if fault == "a token less":
        monkeypatch.setattr(place, "replay", lambda state, records, count: honest(state, records, count - 1))
    elif fault == "no copy":
        monkeypatch.setattr(place, "copied", lambda source, into: source)
    elif fault == "keys not cropped":
        monkeypatch.setattr(place, "crop", lambda layer, count: None)
    else:
        mixin = place.LinearAttentionCacheLayerMixin
        uncropped = mixin.crop
        monkeypatch.setattr(mixin, "crop", lambda layer, count: uncropped(layer, 0))
    with pytest.raises(CapabilityError, match="differ from a fresh prefill"):
        StatefulModel(hybrid("qwen3_5_text"), replay="capture")


# -- the self-test -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_capability_is_found_by_trial(name: str, dtype: torch.dtype) -> None:
    """Mamba-1 ignores its state when several tokens are fed; nemotron_h and zamba2 forget a clamp, which bfloat16
    hides."""
    model = wrap(hybrid(name, dtype=dtype))
    able = name in ABLE and not (name in ("nemotron_h", "zamba2") and dtype == torch.float32)
    assert isinstance(model, StatefulModel) == able
    assert not able or model.replay == ("capture" if name in GATED_DELTA else "lazy")
    assert model.capabilities.rollback == (able or name == "lfm2")
    assert not model.capabilities.tree_mask
    assert not model.capabilities.keep_path
    if not able and name != "lfm2":
        assert isinstance(model, SequentialModel)
        assert "differ from a fresh prefill" in model.capabilities.missing["rollback"]


def no_restore(self: StateCache) -> None:
    """A planted fault: keys are cropped, the recurrent state stays."""
    for layer in self.cache.layers:
        if hasattr(layer, "keys"):
            layer.crop(self.saved - self.length)
    self.length = self.saved


def plant(patch: pytest.MonkeyPatch, fault: str) -> None:
    """Break the rollback in one place."""
    import foretoken.models.cache.state as place

    honest = place.states_of
    if fault == "snapshot without a copy":
        patch.setattr(place, "copied", lambda source, into: source)
    elif fault == "state not restored":
        patch.setattr(StateCache, "restore", no_restore)
    elif fault == "convolution not restored":
        patch.setattr(place, "states_of", lambda layer: (s for s in honest(layer) if s[0] != "conv_states"))
    elif fault == "keys not cropped":
        patch.setattr(place, "crop", lambda layer, count: None)
    elif fault == "pending forgotten":

        def forget(self: StateCache) -> None:
            RESTORE(self)
            self.length += 1

        patch.setattr(StateCache, "restore", forget)
    else:
        raise ValueError(fault)


RESTORE = StateCache.restore
FAULTS = (
    "snapshot without a copy",
    "state not restored",
    "convolution not restored",
    "keys not cropped",
    "pending forgotten",
)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_planted_faults_are_caught(fault: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "bamba"  # recurrent states, convolutions and keys
    model, again = StatefulModel(hybrid(name, dtype=dtype)), hybrid(name, dtype=dtype)
    plant(monkeypatch, fault)
    sequence = model.open()
    model.prefill(sequence, prompt_of(13))
    verify(model, sequence, 5, [6, 7, 8], 1)
    (rows,) = model.forward([Feed(sequence, [9, 10])])
    expected = plain_logits(model.model, [*sequence.tokens, 9, 10])[-2:]
    assert float((rows.logits - expected).abs().max()) > 0.05  # a test of states would see it
    with pytest.raises(CapabilityError, match=r"differ from a fresh prefill|RuntimeError"):
        StatefulModel(again)
    assert not wrap(again).capabilities.rollback
