"""Servers for the tests of the web layer."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from sites import ADMIN_TOKEN, Site, SiteFactory, running_site

from restante.settings import Settings


@pytest.fixture
def run_site(dsn: str, tmp_path: Path) -> SiteFactory:
    """For tests that choose settings, or run two servers on one database."""

    def run(**chosen: Any) -> AbstractAsyncContextManager[Site]:
        given: dict[str, Any] = {
            "database_url": dsn,
            "data_dir": str(tmp_path),
            "admin_token": ADMIN_TOKEN,
        }
        return running_site(Settings(**(given | chosen)))

    return run


@pytest.fixture
async def site(run_site: SiteFactory) -> AsyncIterator[Site]:
    """A server with the default settings."""
    async with run_site() as site:
        yield site
