"""Tells systemd that the server is ready, or stopping, if systemd has started it."""

import contextlib
import os
import socket


def notify(state: str) -> None:
    """Send `READY=1` or `STOPPING=1`; nothing happens without systemd, or if it does not listen."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sending,
    ):
        sending.connect(address.replace("@", "\0", 1))  # an abstract address
        sending.sendall(state.encode())
