"""A node that reads from a made-up peer, which may say anything, one step at a time."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from impostors import Asked, Impostor, Said, http, impostor
from oplog.meshes import NOTES

from restante.database.pool import Database
from restante.oplog import peers, tables, ulids
from restante.oplog.peers import Changes, Peer
from restante.oplog.pulling.following import Follower
from restante.oplog.pulling.state import Pace, State
from restante.oplog.remote import Remote
from restante.oplog.snapshots.taking import Taker
from restante.oplog.tracking import capture
from restante.oplog.tracking.capture import Wanted

NOW = datetime.now(UTC)
OWN = "http://own.example"


def ulid(*, minutes_ago: float, tail: int = 0) -> str:
    lowest = ulids.lowest_at(NOW - timedelta(minutes=minutes_ago))
    return ulids.text_of(type(lowest)(int=lowest.int + tail))


def op(minutes_ago: float, *records: dict[str, Any], action: str = "create", **more: Any) -> Any:
    given = {
        "ulid": ulid(minutes_ago=minutes_ago),
        "host": "http://other.example",
        "action": action,
        "table": "notes",
        "data": list(records),
        "transient": False,
    }
    return given | more


def note(name: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "body": "x", "size": 1} | more


@dataclass
class Reader:
    """A node that reads from a made-up peer, one step at a time."""

    db: Database
    sql: Any
    follower: Follower
    other: Impostor
    answers: list[Said]
    state: State = field(default_factory=State)

    async def peer(self) -> Peer:
        async with self.db.connection() as connection:
            found = await peers.find(connection, self.other.url)
        assert found is not None
        return found

    async def pull(self, *answers: Said) -> float:
        """Pull once for each answer; returns the pause after the last one."""
        pause_seconds = 0.0
        for answer in answers:
            self.answers.append(answer)
            pause_seconds = await self.follower.advance(await self.peer(), self.state)
        return pause_seconds

    async def stored(self) -> Any:
        return await self.sql.fetchrow("select * from restante.op_peers")

    async def names(self) -> list[str]:
        return [row["id"] for row in await self.sql.fetch("select id from notes order by id")]

    @property
    def asked(self) -> Asked:
        return self.other.asked[-1]


@asynccontextmanager
async def reading(db: Database) -> AsyncIterator[Reader]:
    answers: list[Said] = []

    def clock() -> datetime:
        return NOW

    async with (
        impostor(lambda _asked: answers.pop(0)) as other,
        Remote.opened(own_host=OWN, clock=clock) as client,
        db.connection() as connection,
    ):
        await tables.identify(connection, OWN)
        await connection.execute(NOTES)
        await connection.execute("set search_path = public, restante")
        await capture.track(db, Wanted("public.notes"), host=None, now=NOW)
        await peers.add(connection, other.url, Changes(), now=NOW)
        taker = Taker(db, client, OWN, clock)
        follower = Follower(db, client, taker, Pace(pull_seconds=10), clock)
        yield Reader(db, connection, follower, other, answers)


def gap(body: Any, minimum: str) -> bytes:
    return http(body=body, X_Mediorum_Retention_Gap="true", X_Mediorum_Available_Min_Ulid=minimum)


def limited(body: Any) -> bytes:
    return http(body=body, X_Crud_Sweep_Limited="true")
