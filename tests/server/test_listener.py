"""The socket is bound before anything else is started."""

import socket

import pytest

from restante.errors import AddressTaken
from restante.server.listener import address_of, listen


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_address_is_one_that_can_be_typed(host: str):
    with listen(host, 0) as listening:
        port = listening.getsockname()[1]

        assert address_of(listening, host) == f"http://{host}:{port}"


def test_an_address_of_version_six_has_brackets():
    if not socket.has_ipv6:
        pytest.skip("this Python was built without IPv6")
    try:
        listening = listen("::1", 0)
    except AddressTaken:
        pytest.skip("this machine has no IPv6")
    with listening:
        assert address_of(listening, "::1") == f"http://[::1]:{listening.getsockname()[1]}"


def test_a_port_that_was_just_given_up_can_be_had_again():
    """A restart must not have to wait until old connections are forgotten."""
    with listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            listening.accept()[0].close()

    with listen("127.0.0.1", port):
        pass


def test_a_port_that_somebody_listens_on_is_refused():
    with (
        listen("127.0.0.1", 0) as listening,
        pytest.raises(AddressTaken, match=r"Address already in use\. Choose another"),
    ):
        listen("127.0.0.1", listening.getsockname()[1])
