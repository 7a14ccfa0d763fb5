"""Puts this folder on the import path (``toys``), one thread and no network for tests, and a mark on slow ones."""

from __future__ import annotations

import functools
import gc
import os
import random
import signal
import ssl
import warnings
import zlib
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import pytest
import torch

import selection
from process_state import process_state, put_back

torch.set_num_threads(1)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell: tests send it to themselves
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Each of a thousand clients would read all certificates anew, and no test speaks TLS.
ssl.create_default_context = functools.cache(ssl.create_default_context)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--slow-part I/N``: of the slow tests only those of one of N parts."""
    parser.addoption("--slow-part", default="1/1", metavar="I/N", help="run the I-th of N parts of the slow tests")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before ``-m`` chooses."""
    for item in selection.slow(items):
        item.add_marker(pytest.mark.slow)
    elsewhere = selection.in_other_parts(items, config.getoption("slow_part"))
    config.hook.pytest_deselected(items=[item for item in items if item in elsewhere])
    items[:] = [item for item in items if item not in elsewhere]


def pytest_collection_finish() -> None:
    """What was imported stays: no collection of garbage needs to look at it again."""
    gc.collect()
    gc.freeze()


def draw_by(name: str) -> None:
    """Draws without a seed depend on who draws, not on the tests that ran before in the same process."""
    torch.default_generator.manual_seed(zlib.crc32(name.encode()))
    random.seed(name)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> None:
    draw_by(fixturedef.argname)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    draw_by(item.nodeid)


@pytest.fixture(autouse=True, scope="session")
def checks_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Results of checks of fast paths are not kept in the user's folder, nor read from there."""
    from foretoken.models.checks import fast_paths

    file = tmp_path_factory.mktemp("checks") / "machine.json"
    fast_paths.KEPT.file = lambda: file


@pytest.fixture(autouse=True)
def _same_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test that leaves the process changed fails itself, and not those behind it.

    Handlers of signals, threads, logs, ...: a program that uses foretoken must find them as it left them.
    """
    before = process_state()
    yield
    monkeypatch.undo()  # what the test itself has changed for its time
    changed = put_back(before)
    assert not changed, "; ".join(changed)


@pytest.fixture(autouse=True)
def _same_default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that leaves PyTorch another default dtype fails itself, and not those behind it.

    What a thread left between two tests (Transformers changes it while it builds a model) is told and mended.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    if before != torch.float32:
        warnings.warn(f"PyTorch's default dtype was {before} in front of {request.node.nodeid}", stacklevel=1)
    yield
    after = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    assert after == torch.float32, f"PyTorch's default dtype became {after}"
