"""The host program decides what Transformers prints, whatever we switch off meanwhile and in how many threads."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Barrier, Thread

import pytest
import torch
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from foretoken.core.io.files import save_model
from foretoken.core.io.quiet import ERRORS_ONLY, NO_BARS, ProcessSetting
from foretoken.loading import load_model

BARS = sys.modules["huggingface_hub.utils.tqdm"]  # the name leads to a class of the same name


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Bars are switched by calls, not by the environment; afterwards they are off, as for all tests."""
    monkeypatch.setattr(BARS, "HF_HUB_DISABLE_PROGRESS_BARS", None)
    yield
    logging.disable_progress_bar()


def bars() -> tuple[bool, bool]:
    return logging.is_progress_bar_enabled(), not are_progress_bars_disabled()


@pytest.mark.parametrize("shown", [(True, True), (True, False), (False, True), (False, False)])
def test_bars_are_as_they_were(shown: tuple[bool, bool]) -> None:
    (logging.enable_progress_bar if shown[0] else logging.disable_progress_bar)()
    (enable_progress_bars if shown[1] else disable_progress_bars)()
    with NO_BARS.changed():
        assert bars() == (False, False)
    assert bars() == shown


@pytest.mark.parametrize("shown", [True, False])
def test_loading_and_saving_leave_bars_and_advice(shown: bool, tmp_path: Path) -> None:
    """A program without bars had them again after the first ``foretoken.load``."""
    (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
    before = logging.get_verbosity()
    logging.set_verbosity_info()
    try:
        torch.manual_seed(0)
        shape = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        save_model(LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=1)), None, tmp_path / "model")
        assert bars() == (shown, shown)
        load_model(str(tmp_path / "model"))
        assert bars() == (shown, shown)
        assert logging.get_verbosity() == logging.INFO
    finally:
        logging.set_verbosity(before)


def test_a_variable_that_forbids_bars_brings_no_warning(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    logging.disable_progress_bar()
    monkeypatch.setattr(BARS, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    with NO_BARS.changed():
        pass
    assert bars() == (False, False)
    assert not [str(warning.message) for warning in recwarn]


def test_blocks_that_overlap_in_two_threads() -> None:
    """Each would put back what it saw: the one that began second would leave what the first had set."""
    value = ["loud"]
    setting = ProcessSetting(
        lambda: value[0], lambda: value.__setitem__(0, "quiet"), lambda was: value.__setitem__(0, was)
    )
    begun, ended = Barrier(2), Barrier(2)

    def second() -> None:
        with setting.changed():
            begun.wait(10)
            ended.wait(10)

    thread = Thread(target=second)
    with setting.changed():
        thread.start()
        begun.wait(10)
    assert value == ["quiet"]
    ended.wait(10)
    thread.join(10)
    assert value == ["loud"]


def test_an_error_inside_gives_it_back() -> None:
    before = logging.get_verbosity()
    with pytest.raises(KeyError), ERRORS_ONLY.changed():
        raise KeyError
    assert logging.get_verbosity() == before
