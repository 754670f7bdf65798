"""Fixtures for tests of the client."""

import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SMALL_BYTES = 256 * 1024


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of the developer's environment cannot reach this machine's loopback."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jitter of zero, so that retries follow at once; test_retry covers the delays."""

    def zero(_low: float, _high: float) -> float:
        return 0

    monkeypatch.setattr(random, "uniform", zero)


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
