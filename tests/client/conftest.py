"""What tests of the client side share."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from restante.client import patience

SMALL_BYTES = 256 * 1024


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's proxy does not know this machine's loopback."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between tries are hardly any; how long they are is tested apart."""
    monkeypatch.setattr(patience, "SHORTEST_SECONDS", 0.001)
    monkeypatch.setattr(patience, "LONGEST_SECONDS", 0.01)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of SMALL_BYTES."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_BYTES}", "tmpfs", str(path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small filesystem, and not everywhere")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)
