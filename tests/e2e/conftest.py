"""One server for all tests that do not kill it, and a proxy with faults before it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from connecting import Office
from processes import Server
from proxies import Proxy


@pytest.fixture(scope="session")
def office_server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="restante-", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o711)
        with Server(Path(name) / "data", "--log-level", "warning") as server:
            server.started_once().start()
            yield server


@pytest.fixture
def office(office_server: Server) -> Iterator[Office]:
    """Its clients have threads, which end with the test: other tests count them."""
    with Office(office_server) as office:
        yield office


@pytest.fixture
def proxy(office: Office) -> Iterator[Proxy]:
    with Proxy(int(office.server.address.rpartition(":")[2])) as proxy:
        yield proxy
