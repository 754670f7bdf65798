"""
Which IP addresses a push workspace may be called at.

A registration chooses the address that this server then calls from inside its network (SSRF), so
only public addresses are called unless the operator allows more.  The lists follow the IANA
special-purpose registries; they are spelled out because `is_private` differs between Python
releases.
"""

from enum import Enum, auto
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network


class Reach(Enum):
    """Which kind of network an address belongs to."""

    PUBLIC = auto()
    PRIVATE = auto()  # this machine or a private network: the operator may allow it
    NEVER = auto()  # reserved, or a cloud metadata service


_NEVER = [
    ip_network(block)
    for block in (
        "0.0.0.0/8",  # this host
        "169.254.0.0/16",  # link-local; clouds serve credentials at 169.254.169.254
        "168.63.129.16/32",  # Azure metadata, a public address
        "100.100.100.200/32",  # Alibaba metadata
        "192.0.0.0/24",  # protocol assignments; Oracle's metadata at 192.0.0.192
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # 6to4 relays
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
        "fd00:ec2::254/128",  # AWS metadata
        "2001::/23",  # protocol assignments, Teredo among them
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4, which embeds any IPv4 address
        "3fff::/20",  # documentation
    )
]

_PRIVATE = [
    ip_network(block)
    for block in (
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT
        "127.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "198.18.0.0/15",  # benchmarking
        "::1/128",
        "fc00::/7",
    )
]

_GLOBAL_UNICAST = IPv6Network("2000::/3")

# Their last 32 bits are the IPv4 address that is reached.
_EMBEDS_IPV4 = (
    IPv6Network("::ffff:0:0/96"),  # mapped
    IPv6Network("64:ff9b::/96"),  # NAT64
)


def reach_of(address: str) -> Reach:
    """
    Classify an address; anything that is not a canonical address is NEVER.

    An IPv6 address that embeds an IPv4 address is classified as that one.
    """
    try:
        found = ip_address(address)
    except ValueError:
        return Reach.NEVER
    inner = _unwrapped(found)
    if any(inner in block for block in _NEVER):
        return Reach.NEVER
    if any(inner in block for block in _PRIVATE):
        return Reach.PRIVATE
    # Outside of global unicast are link-local, multicast and unassigned addresses.
    if isinstance(inner, IPv6Address) and inner not in _GLOBAL_UNICAST:
        return Reach.NEVER
    return Reach.PUBLIC


def _unwrapped(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    if isinstance(address, IPv6Address) and any(address in block for block in _EMBEDS_IPV4):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def may_call(address: str, *, private_allowed: bool) -> bool:
    """Whether a workspace may be called at this address."""
    reach = reach_of(address)
    return reach is Reach.PUBLIC or (private_allowed and reach is Reach.PRIVATE)
