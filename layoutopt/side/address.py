"""Where a server listens, and whether that is this machine alone."""

from __future__ import annotations

import ipaddress

from layoutopt.errors import LayoutOptError

__all__ = ["check_reach", "is_loopback", "split_address"]


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


def check_reach(address: str, *, encrypted: bool, insecure: bool, keys: str) -> None:
    """See that plaintext stays on this machine, unless it was said that it need not.

    Args:
        address: HOST:PORT, ours or the server's.
        encrypted: whether there is TLS.
        insecure: whether plaintext may leave this machine.
        keys: which folder to give.

    Raises:
        LayoutOptError: it would leave it.
    """
    host, _ = split_address(address)
    if not encrypted and not insecure and not is_loopback(host):
        raise LayoutOptError(
            f"without keys nothing leaves this machine, got {address}: give --keys {keys} (see `layoutopt side keys`), "
            "or --insecure if everyone on the way may read and change what is sent"
        )
