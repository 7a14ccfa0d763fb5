"""Which names a server answers to.

A page of a stranger can let its own name point to 127.0.0.1 and then talk to a server there as to itself ("DNS
rebinding").  The browser still sends the stranger's name in ``Host``, so a name that was not expected is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address

from foretoken.server.errors import ApiError

ANY = "*"


class Hosts:
    """Names that may be in ``Host``.

    Args:
        bound: where the server listens.
        allowed: more names; ``*`` allows all.
        keyed: whether every request needs a key: a stranger's page has none, so that all names are allowed unless some
            are given.
    """

    def __init__(self, bound: str, allowed: Sequence[str], keyed: bool) -> None:
        self._bound = bound
        self._names = {"localhost", bound.lower(), *(name.lower() for name in allowed)}
        self._any = ANY in allowed or (keyed and not allowed)

    def check(self, header: str) -> None:
        """Refuse a name that is not this server's; a client that names none is no browser.

        Raises:
            ApiError: 421.
        """
        name = _name_of(header)
        if self._any or not header or name in self._names or self._is_own_address(name):
            return
        raise ApiError(
            421,
            f"this server is not called {name[:64]!r}: start it with --allowed-host {name[:64]}, or ask it by the "
            "address that it listens on",
            code="unknown_host",
        )

    def _is_own_address(self, name: str) -> bool:
        """An address cannot be somebody else's name: where the server listens on all, any may be its own."""
        try:
            address = ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or self._bound in ("0.0.0.0", "::")


def _name_of(header: str) -> str:
    """Without the port, and without the brackets of an IPv6 address."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].rstrip(".")
