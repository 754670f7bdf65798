"""The socket is bound before anything else is started."""

import socket

import pytest

from restante.errors import AddressTaken
from restante.server.listener import address_of, listen


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_address_has_the_host_as_configured(host: str):
    with listen(host, 0) as listening:
        port = listening.getsockname()[1]

        assert address_of(listening, host) == f"http://{host}:{port}"


def test_an_ipv6_address_has_brackets():
    if not socket.has_ipv6:
        pytest.skip("this Python was built without IPv6")
    try:
        listening = listen("::1", 0)
    except AddressTaken:
        pytest.skip("this machine has no IPv6")
    with listening:
        assert address_of(listening, "::1") == f"http://[::1]:{listening.getsockname()[1]}"


def test_a_port_can_be_reused_at_once():
    """A restart must not wait for connections in TIME_WAIT."""
    with listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            listening.accept()[0].close()

    with listen("127.0.0.1", port):
        pass


def test_a_port_in_use_is_refused():
    with (
        listen("127.0.0.1", 0) as listening,
        pytest.raises(AddressTaken, match=r"Address already in use\. Choose another"),
    ):
        listen("127.0.0.1", listening.getsockname()[1])
