"""
Stages files that are already in memory: one, a batch, or a batch inside the caller's transaction.

This is how an application with its own Postgres hands files to a workspace.  HTTP uploads take the
same path, piece by piece.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime

from restante.delivery.receive import Incoming, Receiver
from restante.errors import BadRequest
from restante.ids import FileId, WorkspaceId


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file that is already in memory."""

    name: str
    mimetype: str
    content: bytes


async def stage(
    receiver: Receiver, workspace_id: WorkspaceId, file: NewFile, *, now: datetime
) -> FileId:
    """Store one file and announce it."""
    return (await stage_batch(receiver, workspace_id, [file], now=now))[0]


async def stage_batch(
    receiver: Receiver, workspace_id: WorkspaceId, files: Sequence[NewFile], *, now: datetime
) -> list[FileId]:
    """Store the files and announce them: the workspace sees all of them or none."""
    async with staging(receiver, workspace_id, files, now=now) as incoming:
        await incoming.publish(now=now)
    return incoming.file_ids


@asynccontextmanager
async def staging(
    receiver: Receiver, workspace_id: WorkspaceId, files: Sequence[NewFile], *, now: datetime
) -> AsyncIterator[Incoming]:
    """
    The same as part of the caller's own transaction, which begins and must end inside.

        async with staging(receiver, workspace_id, files, now=now) as incoming:
            async with connection.transaction():
                ...
                await incoming.publish_in(connection, now=now)

    The files are staged exactly if the transaction commits, whatever else happens in the block.
    Waiting readers are woken when the block ends.
    """
    if not files:
        raise BadRequest("There is nothing to stage: give at least one file.")
    total = sum(len(file.content) for file in files)
    async with receiver.receive(workspace_id, total) as incoming:
        for file in files:
            await incoming.begin_file(file.name, file.mimetype, now=now)
            await incoming.write(file.content, now=now)
            await incoming.end_file(now=now)
        yield incoming
