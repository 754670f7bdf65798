"""Large rows of feeds in the tests, and the room for those that are being sent."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

from restante.http.body_room import BodyRoom

LARGE_BYTES = 256 * 1024 * 1024  # of all large answers in a process, and of all large events


@asynccontextmanager
async def taken(room: BodyRoom) -> AsyncIterator[None]:
    """Somebody else has all of the room that is free."""
    size = room.free_bytes
    async with room.place(size) as place:
        await place.grow(size)
        yield


async def make_rows(connection: Any, workspace_id: str, *sizes: int) -> None:
    """Rows whose bodies are strings of these sizes, which compress to almost nothing."""
    await connection.execute(
        "with counter as ("
        "    update feeds set last_seq = last_seq + cardinality($2::int[])"
        "     where workspace_id = $1 returning last_seq - cardinality($2::int[]) as last"
        ") insert into feed"
        " (id, workspace_id, seq, activity_type, status, request_body, created_at)"
        # An id of this millisecond, as `new_activity_id` makes them.
        " select (lpad(to_hex((extract(epoch from now()) * 1000)::bigint), 12, '0')"
        "         || lpad(to_hex(size.number), 20, '0'))::uuid,"
        "        $1, last + size.number, 'a2a_receive', 'ok',"
        "        to_json(repeat('x', size.bytes - 2)::text), now()"
        "   from counter, unnest($2::int[]) with ordinality as size (bytes, number)",
        UUID(workspace_id),
        sizes,
    )
