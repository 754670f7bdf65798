"""What authentication costs."""

from typing import Any
from uuid import UUID

import pytest

from restante.ids import WorkspaceId
from restante.workspaces.auth import Access
from restante.workspaces.rules import is_token, new_token

pytestmark = pytest.mark.anyio

MALFORMED = [
    "",
    "x",
    "a" * 42,
    "a" * 44,
    "a" * 60_000,
    "a" * 42 + "/",
    "a" * 42 + "é",
    "a" * 43 + "\n",
]


@pytest.mark.parametrize("token", MALFORMED)
async def test_a_malformed_token_is_refused_without_the_database(token: str):
    no_database: Any = None
    access = Access(no_database, admin_token="the admin's token")

    assert await access.find_by_token(token) is None
    assert await access.find_own(WorkspaceId(UUID(int=1)), token) is None


def test_every_token_that_is_issued_can_be_one():
    assert all(is_token(new_token()) for _ in range(100))
