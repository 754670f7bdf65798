"""What most tests of delivery begin with."""

from typing import Any

import pytest
from callers import Caller, registered
from factories import Parts, make_parts, make_workspace
from sites import Site

from restante.database.pool import Database
from restante.ids import WorkspaceId


@pytest.fixture
def db(db_with_partitions: Database) -> Database:
    return db_with_partitions


@pytest.fixture
async def connection(connections: Any) -> Any:
    return await connections()


@pytest.fixture
async def workspace_id(db: Database, connection: Any) -> WorkspaceId:
    """A workspace in a database with partitions for its files and rows."""
    return await make_workspace(connection)


@pytest.fixture
def parts(db: Database) -> Parts:
    return make_parts(db)


@pytest.fixture
async def caller(site: Site) -> Caller:
    return await registered(site)
