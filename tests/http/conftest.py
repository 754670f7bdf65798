"""A workspace of the attacker, and a check that its attacks store nothing."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from callers import Caller, everything, registered
from sites import Site


@pytest.fixture
async def caller(site: Site) -> Caller:
    return await registered(site)


@pytest.fixture
async def nothing_stored(caller: Caller, connections: Any) -> AsyncIterator[None]:
    """The test must leave the tables as they were."""
    connection = await connections()
    before = await everything(connection, caller.id)
    yield
    assert await everything(connection, caller.id) == before
