"""One real server process for all of these tests; each has workspaces of its own there."""

from collections.abc import AsyncIterator

import pytest
from cluster import cloned
from outsiders import Outsider, joined
from processes import Server
from sites import ADMIN_TOKEN


@pytest.fixture(scope="session")
async def url(
    anyio_backend: str, cluster: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[str]:
    """The address of a server with default settings that may push to this machine."""
    async with cloned(cluster) as dsn:
        settings = {
            "RESTANTE_DATABASE_URL": dsn,
            "RESTANTE_ADMIN_TOKEN": ADMIN_TOKEN,
            "RESTANTE_PUSH_TO_PRIVATE": "on",
        }
        with Server(tmp_path_factory.mktemp("server"), **settings) as server:
            yield server.start().address


@pytest.fixture
def workspace(url: str) -> Outsider:
    """A registered workspace that polls."""
    return joined(url)


@pytest.fixture
def other(url: str) -> Outsider:
    """Another one."""
    return joined(url)


@pytest.fixture(scope="session")
def admin(url: str) -> Outsider:
    """The operator, or a canvas of a self-hosted server."""
    return Outsider(url, ADMIN_TOKEN)
