"""A process that was forked while another thread of its parent used a model, or loaded one."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

import foretoken as ft
from foretoken.models.network.alone import BUILDING, lock_of

PROMPT = [1, 2, 3]
FORKING = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def llm() -> Any:
    return ft.load("builtin", drafter=None)


@contextmanager
def held_elsewhere(lock: AbstractContextManager[Any]) -> Iterator[None]:
    """Inside the block, another thread holds the lock."""
    held, ended = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            ended.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    try:
        yield
    finally:
        ended.set()
        thread.join()


def in_a_child(use: Callable[[], Any]) -> Any:
    """What a function returns in a forked process, or the text of its error."""
    results: Any = FORKING.SimpleQueue()

    def run() -> None:
        torch.set_num_threads(1)  # PyTorch's own do not survive a fork
        try:
            results.put(use())
        except RuntimeError as error:
            results.put(str(error))

    child = FORKING.Process(target=run)
    child.start()
    child.join(30)
    if child.exitcode is None:
        child.kill()
        child.join()
    assert child.exitcode == 0, "it waits forever"
    return results.get()


def test_a_child_of_a_round_is_told_to_load_for_itself(llm: Any) -> None:
    def generate() -> Any:
        return llm.generate(PROMPT, max_new_tokens=4).token_ids

    expected = generate()
    with held_elsewhere(llm.calls.turn):
        assert "forked while another thread used this model: load it in each process" in in_a_child(generate)
    with llm.calls.turn:  # by the thread that forks
        assert in_a_child(generate) == expected
    assert in_a_child(generate) == expected
    assert generate() == expected


def test_a_child_of_a_forward_may_not_use_the_network_either(llm: Any) -> None:
    network = llm.target.model

    def load() -> Any:
        return ft.load(network, drafter=None).generate(PROMPT, max_new_tokens=2).token_ids

    with held_elsewhere(lock_of(network)):
        assert "forked while another thread used this model" in in_a_child(load)
    assert len(in_a_child(load)) == 2


def test_a_child_of_a_load_is_told_to_fork_at_another_time() -> None:
    def load() -> Any:
        return ft.load("builtin", drafter=None).generate(PROMPT, max_new_tokens=2).token_ids

    with held_elsewhere(BUILDING):
        assert "forked while another thread loaded a model: fork before or after" in in_a_child(load)
    assert len(in_a_child(load)) == 2


def test_an_unfinished_stream_of_the_parent_can_be_closed_in_a_child(llm: Any) -> None:
    pieces = llm.stream(PROMPT, max_new_tokens=8)
    next(pieces)
    with held_elsewhere(llm.calls.turn):
        in_a_child(pieces.close)
    in_a_child(pieces.close)
    assert [piece.finish_reason for piece in pieces][-1] == "length"
