"""A real nginx with TLS in front of a server, configured by `deploy/nginx.conf`."""

import os
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import ClientSession, ClientTimeout, TCPConnector
from processes import children, wait_until
from sites import Site

ROOT = Path(__file__).parents[2]
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
OPENSSL = shutil.which("openssl")

# What a distribution's nginx.conf has around the included files.
AROUND = """
{user}
daemon off;
pid nginx.pid;
worker_processes 1;
error_log stderr notice;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path client_body;
    proxy_temp_path proxy;
    fastcgi_temp_path other;
    uwsgi_temp_path other;
    scgi_temp_path other;
    include restante.conf;
}}
"""


class Front:
    """A running nginx."""

    def __init__(self, directory: Path, ports: tuple[int, int]) -> None:
        self.directory = directory
        self.plain, self.tls = ports
        self.certificate = directory / "certificate.pem"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"https://localhost:{self.tls}"

    @property
    def said(self) -> str:
        return (self.directory / "error.log").read_text()

    @property
    def logged(self) -> str:
        """The lines about requests that have ended."""
        return (self.directory / "access.log").read_text()

    def reload(self) -> None:
        """Replace the workers; the old ones finish what they have begun."""
        assert self.process is not None
        before = set(children(self.process.pid))
        self.process.send_signal(signal.SIGHUP)
        self._until_working(before)

    def _until_working(self, before: set[int]) -> None:
        assert self.process is not None
        pid = self.process.pid
        wait_until(lambda: set(children(pid)) - before, seconds=20, what="a worker of nginx")

    @contextmanager
    def running(self) -> Iterator[None]:
        assert NGINX
        command = [NGINX, "-p", str(self.directory), "-c", "nginx.conf"]
        with (self.directory / "error.log").open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log)
        try:
            self._until_working(set())
            wait_until(self._accepts, seconds=20, what="listening: " + self.said)
            yield
        finally:
            self.process.terminate()
            self.process.wait(20)

    def _accepts(self) -> bool:
        with socket.socket() as trying:
            return trying.connect_ex(("127.0.0.1", self.tls)) == 0

    def trusting(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.certificate))


@asynccontextmanager
async def in_front_of(site: Site, directory: Path) -> AsyncIterator[tuple[Front, Site]]:
    """An nginx, and the site as its clients see it."""
    front = Front(directory, _free_ports())
    _make_certificate(directory)
    (directory / "restante.conf").write_text(_configured(front, urlsplit(site.url).netloc))
    user = "user root;" if os.geteuid() == 0 else ""
    (directory / "nginx.conf").write_text(AROUND.format(user=user))
    with front.running():
        connector = TCPConnector(ssl=front.trusting())
        timeout = ClientTimeout(total=30)
        async with ClientSession(front.url, connector=connector, timeout=timeout) as http:
            yield front, replace(site, url=front.url, http=http)


def _configured(front: Front, server: str) -> str:
    """The published configuration with the names and ports of a test; nothing else is changed."""
    text = (ROOT / "deploy/nginx.conf").read_text()
    changes = {
        "    listen [::]:80;\n": "",
        "    listen [::]:443 ssl http2;\n": "",
        "listen 80;": f"listen 127.0.0.1:{front.plain};",
        "listen 443 ssl": f"listen 127.0.0.1:{front.tls} ssl",
        "server 127.0.0.1:8080;": f"server {server};",
        "/var/log/nginx/restante.log": str(front.directory / "access.log"),
        "server_name restante.example;": "server_name localhost;",
        "/etc/ssl/restante.example/fullchain.pem": str(front.certificate),
        "/etc/ssl/restante.example/key.pem": str(front.directory / "key.pem"),
    }
    for written, meant in changes.items():
        assert written in text, written
        text = text.replace(written, meant)
    return text


def _free_ports() -> tuple[int, int]:
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        return one.getsockname()[1], other.getsockname()[1]


def _make_certificate(directory: Path) -> None:
    assert OPENSSL
    words = "req -x509 -nodes -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -days 2"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(directory / "key.pem"), "-out", str(directory / "certificate.pem")]
    subprocess.run([OPENSSL, *words.split(), *names, *files], check=True, capture_output=True)
