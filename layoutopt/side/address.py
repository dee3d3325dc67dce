"""Where a server listens, and whether that is this machine alone."""

from __future__ import annotations

import ipaddress

from layoutopt.errors import LayoutOptError

__all__ = ["is_loopback", "split_address"]


def split_address(address: str) -> tuple[str, int]:
    """Host and port.

    Raises:
        LayoutOptError: it is not HOST:PORT.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise LayoutOptError(f"{address!r} is no address: expected HOST:PORT, such as 127.0.0.1:7311 or [::1]:7311")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
