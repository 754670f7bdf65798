"""
Which addresses a push workspace may be called at.

Whoever registers a workspace chooses the address that this server then calls from inside its own
network, so only addresses of the public internet are called unless the operator allows more.  The
lists follow the IANA special-purpose registries; they are spelled out because what the standard
library calls private differs between its releases.
"""

from enum import Enum, auto
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network


class Reach(Enum):
    """How far an address reaches."""

    PUBLIC = auto()
    PRIVATE = auto()  # this machine or its networks: the operator may allow it
    NEVER = auto()  # no place where a workspace could be, or one that guards a cloud's secrets


_NEVER = [
    ip_network(block)
    for block in (
        "0.0.0.0/8",  # this host, by another name
        "169.254.0.0/16",  # link-local; clouds serve credentials at 169.254.169.254
        "168.63.129.16/32",  # the same of Azure, in public clothes
        "100.100.100.200/32",  # the same of Alibaba
        "192.0.0.0/24",  # protocol assignments; Oracle's metadata at 192.0.0.192
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # 6to4 relays
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
        "fd00:ec2::254/128",  # metadata of AWS
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
        "100.64.0.0/10",  # behind a carrier's NAT
        "127.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "198.18.0.0/15",  # benchmarks between own networks
        "::1/128",
        "fc00::/7",
    )
]

_GLOBAL_UNICAST = IPv6Network("2000::/3")

# Their last 32 bits are the IPv4 address that is really reached.
_EMBEDS_IPV4 = (
    IPv6Network("::ffff:0:0/96"),  # mapped
    IPv6Network("64:ff9b::/96"),  # NAT64
)


def reach_of(address: str) -> Reach:
    """
    Tell how far an address reaches; what is not the usual spelling of an address is NEVER called.

    An IPv6 address that only wraps an IPv4 address reaches as far as that one.
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
    # Outside of global unicast lie link-local, multicast and what nobody has assigned yet.
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
