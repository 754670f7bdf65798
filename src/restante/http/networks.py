"""Addresses of clients: which count as one, and which are in a list of ranges."""

from dataclasses import dataclass
from functools import lru_cache
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)

from restante.errors import SettingsInvalid


@lru_cache(maxsize=4096)
def network_of(host: str) -> str:
    """What counts as one address: a /64 of IPv6, which is what one customer has."""
    address = address_of(host)
    if isinstance(address, IPv6Address):
        return str(ip_network((address, 64), strict=False))
    return host if address is None else str(address)


def address_of(host: str) -> IPv4Address | IPv6Address | None:
    """The address, if it is one; that of an IPv4 client on an IPv6 socket is its IPv4 address."""
    try:
        address = ip_address(host)
    except ValueError:
        return None
    if isinstance(address, IPv6Address):
        return address.ipv4_mapped or address
    return address


@dataclass(frozen=True, slots=True)
class AddressRanges:
    """The ranges of addresses that a setting lists."""

    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    @classmethod
    def parsed(cls, text: str | None, *, name: str) -> "AddressRanges":
        """From ranges separated by commas; raises SettingsInvalid with the setting's name."""
        try:
            ranges = [one.strip() for one in (text or "").split(",") if one.strip()]
            return cls(tuple(ip_network(one) for one in ranges))
        except ValueError as error:
            raise SettingsInvalid(
                f"{name} is wrong: {error}. Write ranges like 10.0.0.0/8, separated by commas."
            ) from error

    def includes(self, host: str) -> bool:
        """Whether an address is in one of them."""
        if not self.networks:
            return False
        address = address_of(host)
        return address is not None and any(address in network for network in self.networks)
