"""A build of llama.cpp that is known to end the process is told of when it is loaded."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from foretoken.models.other.llama_cpp import LlamaLibrary


class Module:
    """The part of ``llama_cpp.llama_cpp`` that loading needs."""

    def __init__(self, info: bytes) -> None:
        self.info = info

    def llama_log_callback(self, function: Any) -> Any:
        return function

    def llama_log_set(self, *_: Any) -> None: ...

    def llama_backend_init(self) -> None: ...

    def llama_print_system_info(self) -> bytes:
        return self.info


@pytest.mark.parametrize(
    ("info", "warned"),
    [(b"CPU : AVX512 = 1 | AMX_INT8 = 1 | ", True), (b"CPU : AVX512 = 1 | AMX_INT8 = 0", False), (b"", False)],
)
def test_a_build_with_amx_is_told_of(caplog: pytest.LogCaptureFixture, info: bytes, warned: bool) -> None:
    with caplog.at_level(logging.WARNING):
        LlamaLibrary(Module(info))
    assert [("illegal instruction" in line, "make gguf" in line) for line in caplog.messages] == [(True, True)] * warned
