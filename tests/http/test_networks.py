"""Which addresses count as one client."""

from restante.http.networks import network_of


def test_a_network_of_ipv6_counts_as_one_address():
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1")
    assert network_of("2001:db8:0:1::1") != network_of("2001:db8::1")
    assert network_of("::ffff:192.0.2.1") == network_of("192.0.2.1") == "192.0.2.1"
