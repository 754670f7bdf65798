"""Only the public internet is called, however an address is spelled or wrapped."""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network

import pytest
from hypothesis import given, strategies as st
from hypothesis.strategies import SearchStrategy

from restante.workspaces.addresses import Reach, may_call, reach_of

PRIVATE = ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "127.0.0.0/8", "fc00::/7", "::1/128"]
NEVER = [
    "0.0.0.0/8",
    "169.254.0.0/16",
    "224.0.0.0/4",
    "240.0.0.0/4",
    "::/128",
    "fe80::/10",
    "fec0::/10",
    "ff00::/8",
    "100::/64",
    "2001::/32",
    "2002::/16",
    "64:ff9b:1::/48",
]


def addresses_in(block: IPv4Network | IPv6Network) -> SearchStrategy[str]:
    return st.ip_addresses(network=block).map(str)


def any_address_in(blocks: list[str]) -> SearchStrategy[str]:
    return st.sampled_from(blocks).flatmap(lambda block: addresses_in(ip_network(block)))


@given(any_address_in(PRIVATE))
def test_private_addresses_are_called_only_when_that_is_allowed(address: str):
    # fd00:ec2::254 is one address in 2**121; hypothesis may be that clever, and so are we.
    if address != "fd00:ec2::254":
        assert not may_call(address, private_allowed=False)
        assert may_call(address, private_allowed=True)


@given(any_address_in(NEVER))
def test_what_can_be_no_workspace_is_never_called(address: str):
    assert not may_call(address, private_allowed=False)
    assert not may_call(address, private_allowed=True)


@given(st.ip_addresses(v=4))
def test_what_is_public_for_us_is_global_for_the_standard_library(address: IPv4Address):
    """Our lists may be stricter than its own, never laxer."""
    if may_call(str(address), private_allowed=False):
        assert address.is_global
        assert not address.is_multicast


@given(st.ip_addresses(v=6))
def test_the_same_holds_for_ipv6(address: IPv6Address):
    if may_call(str(address), private_allowed=False):
        assert (address.ipv4_mapped or address).is_global
        assert not address.is_multicast


@given(st.ip_addresses(v=4), st.sampled_from(["::ffff:0:0", "64:ff9b::"]))
def test_a_wrapped_address_reaches_as_far_as_what_is_inside(inner: IPv4Address, prefix: str):
    wrapped = IPv6Address(int(IPv6Address(prefix)) | int(inner))

    assert reach_of(str(wrapped)) == reach_of(str(inner))


@given(st.ip_addresses(v=4))
def test_wrappings_that_nobody_needs_are_refused_whatever_is_inside(inner: IPv4Address):
    compatible = IPv6Address(int(inner))
    six_to_four = IPv6Address((0x2002 << 112) | (int(inner) << 80))

    assert not may_call(str(compatible), private_allowed=False)
    assert not may_call(str(six_to_four), private_allowed=False)


@given(st.text())
def test_what_is_not_an_address_is_never_called(text: str):
    if not set(text) <= set("0123456789abcdefABCDEF:."):
        assert "%" in text or reach_of(text) is Reach.NEVER


@pytest.mark.parametrize(
    "address",
    ["2130706433", "0x7f000001", "0177.0.0.1", "127.1", "127.0.0.1 ", "localhost", "", "1.1.1.1."],
)
def test_odd_spellings_are_never_called(address: str):
    """The system's resolver would turn some of them into an address behind our back."""
    assert reach_of(address) is Reach.NEVER


@pytest.mark.parametrize(
    ("address", "reach"),
    [
        ("1.1.1.1", Reach.PUBLIC),
        ("172.32.0.1", Reach.PUBLIC),
        ("100.128.0.1", Reach.PUBLIC),
        ("2606:4700:4700::1111", Reach.PUBLIC),
        ("64:ff9b::101:101", Reach.PUBLIC),
        ("127.0.0.1", Reach.PRIVATE),
        ("::1", Reach.PRIVATE),
        ("::ffff:10.1.2.3", Reach.PRIVATE),
        ("100.64.0.1", Reach.PRIVATE),
        ("169.254.169.254", Reach.NEVER),
        ("168.63.129.16", Reach.NEVER),
        ("100.100.100.200", Reach.NEVER),
        ("fd00:ec2::254", Reach.NEVER),
        ("::ffff:169.254.169.254", Reach.NEVER),
        ("fe80::1%eth0", Reach.NEVER),
        ("0.0.0.0", Reach.NEVER),
        ("::", Reach.NEVER),
        ("255.255.255.255", Reach.NEVER),
    ],
)
def test_the_borders(address: str, reach: Reach):
    assert reach_of(address) is reach
