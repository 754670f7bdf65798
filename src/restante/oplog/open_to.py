"""From which addresses the log may be read without a token."""

from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from restante.errors import SettingsInvalid

Network = IPv4Network | IPv6Network


@dataclass(frozen=True, slots=True)
class OpenTo:
    """The address ranges whose nodes may read the log without a token."""

    networks: tuple[Network, ...] = ()

    @classmethod
    def parsed(cls, text: str | None, *, name: str) -> "OpenTo":
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
        try:
            address = ip_address(host)
        except ValueError:
            return False
        if isinstance(address, IPv6Address) and address.ipv4_mapped:
            address = address.ipv4_mapped
        return any(address in network for network in self.networks)
