"""systemd is told when the server is ready, by the protocol of `Type=notify`."""

import socket
from pathlib import Path

import pytest

from restante.server import systemd


@pytest.mark.parametrize("is_abstract", [False, True], ids=["file", "abstract"])
def test_systemd_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_abstract: bool):
    address = f"{'@' if is_abstract else ''}{tmp_path}/notify"
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(address.replace("@", "\0", 1))

        systemd.notify("READY=1")

        assert listening.recv(64) == b"READY=1"


@pytest.mark.parametrize("address", [None, "", "relative", "vsock:2:1", "/nowhere/notify"])
def test_a_server_runs_without_systemd(monkeypatch: pytest.MonkeyPatch, address: str | None):
    if address is None:
        monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    else:
        monkeypatch.setenv("NOTIFY_SOCKET", address)

    systemd.notify("READY=1")
