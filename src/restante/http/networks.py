"""Which clients count as one, as long as nothing but their address is known."""

import ipaddress
from functools import lru_cache


@lru_cache(maxsize=4096)
def network_of(host: str) -> str:
    """What counts as one address: a /64 of IPv6, which is what one customer has."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return host
