"""The socket that a server listens on."""

from __future__ import annotations

import asyncio
import socket

import pytest

from foretoken.server.config import ServerSettings
from foretoken.server.lifecycle import listener


def nodelay(sock: socket.socket) -> bool:
    """Whether asyncio sends small chunks of connections to this socket at once."""

    async def run() -> bool:
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            future.set_result(bool(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
            writer.close()

        async with await asyncio.start_server(connected, sock=sock):
            _, writer = await asyncio.open_connection(*sock.getsockname()[:2])
            result = await asyncio.wait_for(future, 5)
            writer.close()
            return result

    return asyncio.run(run())


def test_small_chunks_do_not_wait_for_an_acknowledgement() -> None:
    """With Nagle's algorithm the first token came 40 ms late."""
    assert nodelay(listener(ServerSettings(port=0)))


def test_a_port_that_is_taken_is_named() -> None:
    with listener(ServerSettings(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{port}"):
            listener(ServerSettings(port=port))
