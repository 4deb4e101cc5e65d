"""Clients: who shares the server fairly with whom."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

from oscar_mm.errors import InputError

if TYPE_CHECKING:
    from starlette.datastructures import Address

_MAX_USER = 256
"""Number of characters of a user's name that count."""
_NETWORK_BITS = 64
"""Length of the IPv6 prefix that is one client, since a machine can have all addresses below it."""


def client_of(address: Address | None, user: str) -> tuple[str, str]:
    """Return the client that sent a request: its address, and the user that the request names.

    Args:
        address: address of the connection, or the one that a trusted proxy reports.
        user: name of the user, in the words of the client; "" for none.
    """
    return _network(address.host if address else ""), user[:_MAX_USER]


def read_proxies(given: Iterable[str]) -> tuple[str, ...]:
    """Check the values of ``--trusted-proxy``, and return them.

    Raises:
        InputError: if a value is not an address or a network.
    """
    proxies = tuple(given)
    for proxy in proxies:
        try:
            ipaddress.ip_network(proxy)
        except ValueError:
            raise InputError(
                f"--trusted-proxy {proxy[:200]}: must be an IP address such as 10.0.0.2, or a "
                "network such as 10.0.0.0/24"
            ) from None
    return proxies


@lru_cache(maxsize=1024)
def _network(host: str) -> str:
    """Return an IPv4 address, or the network of an IPv6 address; "" if it is neither."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    if address.version == 6:
        if address.ipv4_mapped is None:
            return str(ipaddress.ip_network((int(address), _NETWORK_BITS), strict=False))
        address = address.ipv4_mapped
    return str(address)
