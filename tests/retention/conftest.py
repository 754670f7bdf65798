"""A database with partitions for the current time, a connection beside its pool, a workspace."""

from typing import Any

import pytest
from factories import make_workspace

from restante.database.pool import Database
from restante.ids import WorkspaceId


@pytest.fixture
def db(db_with_partitions: Database) -> Database:
    return db_with_partitions


@pytest.fixture
async def connection(db: Database, connections: Any) -> Any:
    connection = await connections()
    # Bounds of partitions are parsed as our own sessions print them.
    await connection.execute("set timezone = 'UTC'; set datestyle = 'ISO'")
    return connection


@pytest.fixture
async def workspace_id(connection: Any) -> WorkspaceId:
    return await make_workspace(connection)
