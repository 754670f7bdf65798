"""A file far above the default limits is streamed and resumed, and needs no flag of the client."""

import hashlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from connecting import Connect, Office
from processes import RESTANTE, Server, clean_environment, peak_kib, wait_until
from proxies import Proxy, calm, stalled_files

MIB = 1024 * 1024
SIZE = 96 * MIB
LIMIT = 100 * MIB
# What Python, the HTTP library and a few pieces of a file need.
MEMORY_MIB = 90


@pytest.fixture
def roomy(server: Server) -> Iterator[Office]:
    """A server whose operator allows files of 100 MiB."""
    server.flags = [*server.flags, *limit("file"), *limit("request")]
    server.start()
    with Office(server) as office:
        yield office


def limit(of: str) -> list[str]:
    return [f"--max-{of}-bytes", str(LIMIT)]


@pytest.fixture
def film(tmp_path: Path) -> Path:
    path = tmp_path / "film.mp4"
    with path.open("wb") as file:
        file.truncate(SIZE - MIB)  # a sparse file is quick to create
        file.seek(0, os.SEEK_END)
        file.write(os.urandom(MIB))
    return path


def test_a_large_file_is_sent_and_received_with_little_memory(
    roomy: Office, film: Path, tmp_path: Path
):
    """And resumed after a crash in the middle."""
    server, into = roomy.server, tmp_path / "into"
    with (
        Proxy(int(server.address.rpartition(":")[2])) as proxy,
        Connect(tmp_path / "ana", proxy.address, "--into", into).start() as ana,
    ):
        proxy.weather = stalled_files(SIZE // 2)
        sent_with_mib = send(roomy, ana, film)
        wait_until(lambda: partial_bytes(into) == SIZE // 2, seconds=60, what="half of the film")
        ana.kill()
        proxy.weather = calm

        ana.start()
        roomy.until_nothing_waits(ana, 60)
        received_with_mib = ana.memory_mib("VmHWM")

    assert digest(into / film.name) == digest(film)
    ranges = [request.headers.get("range") for request in proxy.requests]
    assert [found for found in ranges if found] == [f"bytes={SIZE // 2}-"]
    print(f"sent with {sent_with_mib:.0f} MiB, received with {received_with_mib:.0f} MiB")
    assert max(sent_with_mib, received_with_mib) < MEMORY_MIB


def send(office: Office, to: Connect, path: Path) -> float:
    """Run `restante send`; returns the peak of its memory."""
    peaks = [0]
    with subprocess.Popen(
        [RESTANTE, "send", str(to.credentials.workspace_id), path],
        env=clean_environment(
            RESTANTE_URL=office.server.address, RESTANTE_TOKEN=office.server.admin_token
        ),
        stdout=subprocess.DEVNULL,
    ) as process:

        def has_ended() -> bool:
            with suppress(IndexError):  # a process that has ended has no memory
                peaks.append(peak_kib(process.pid))
            return process.poll() is not None

        wait_until(has_ended, seconds=60, what="sending")
    assert process.returncode == 0
    return max(peaks) / 1024


def partial_bytes(into: Path) -> int:
    return sum(path.stat().st_size for path in into.glob(".*.part"))


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
