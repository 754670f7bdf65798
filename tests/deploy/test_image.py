"""The image is built, and a server runs in it as nobody in particular."""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from processes import wait_until

ROOT = Path(__file__).parents[2]
BUILDAH = shutil.which("buildah")
# An image, or a directory with a Debian and Python, since no registry may be reachable.
BASE = os.environ.get("TEST_BASE_IMAGE", "")

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(0),
    pytest.mark.skipif(not BUILDAH, reason="buildah is not installed"),
    pytest.mark.skipif(not BASE, reason="TEST_BASE_IMAGE is not set"),
]


class Buildah:
    """buildah with a store of its own, and without namespaces, which containers may lack."""

    def __init__(self, directory: Path) -> None:
        self._words = [
            str(BUILDAH),
            f"--root={directory}/root",
            f"--runroot={directory}/run",
            "--storage-driver=vfs",
        ]

    def command(self, *words: str | Path) -> list[str]:
        return [*self._words, *map(str, words)]

    def __call__(self, *words: str | Path) -> str:
        environment = os.environ | {"BUILDAH_ISOLATION": "chroot"}
        done = subprocess.run(
            self.command(*words), check=False, capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture
def buildah(tmp_path: Path) -> Iterator[Buildah]:
    tool = Buildah(tmp_path)
    yield tool
    tool("rm", "--all")
    tool("rmi", "--all", "--force")


def base_of(buildah: Buildah) -> str:
    if not Path(BASE).is_dir():
        return BASE
    container = buildah("from", "scratch")
    buildah("copy", "--quiet", container, BASE, "/")
    buildah("commit", "--quiet", container, "localhost/base")
    return "localhost/base"


def test_a_server_runs_in_the_image(buildah: Buildah):
    words = ["--format=docker", f"--build-arg=BASE={base_of(buildah)}", "--tag=localhost/restante"]
    buildah("build", *words, "--file", ROOT / "deploy/Dockerfile", ROOT)
    container = buildah("from", "localhost/restante")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = [f"--env=RESTANTE_PORT={port}", "--env=RESTANTE_HOST=127.0.0.1"]

    assert buildah("run", container, "--", "id", "--user") == "10001"
    with subprocess.Popen(
        buildah.command(
            "run", "--isolation=chroot", *settings, container, "--", "restante", "serve"
        ),
        start_new_session=True,
    ) as running:
        try:
            wait_until(lambda: is_ready(port), seconds=120, what="a server in the image")
            check = health_check(buildah)
            buildah("run", *settings, container, "--", *check)
        finally:
            os.killpg(running.pid, signal.SIGTERM)
            running.wait(60)
    with pytest.raises(AssertionError):
        buildah("run", *settings, container, "--", *check)


def is_ready(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
            return answer.status == 200
    except (URLError, OSError):
        return False


def health_check(buildah: Buildah) -> list[str]:
    """The command by which the image says whether it is healthy."""
    wanted = "{{range .Docker.Config.Healthcheck.Test}}{{println .}}{{end}}"
    shown = buildah("inspect", "--type=image", f"--format={wanted}", "localhost/restante")
    kind, *command = shown.splitlines()
    assert kind == "CMD"
    return command
