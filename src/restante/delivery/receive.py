"""
Files come in, and are published together or not at all.

A request's files are hashed and cut into chunks as they arrive.  While about 1 MiB of chunks is
being written, the next arrives, so a transfer holds a few chunks in memory whatever its size.  A
request that fits into that is written and published in a single statement.  A larger one first
reserves room in the quota of its workspace.  What it claims grows with what has arrived: a declared
size costs its sender nothing, so it takes no room from others.  Nothing is visible before it is
published; what an aborted request has written is unreachable, and leaves with its bucket.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import msgspec
import structlog

from restante import wire
from restante.database.outcomes import decided
from restante.database.pool import Connection, Database, is_in_transaction, translated
from restante.delivery import quotas, rules, store
from restante.delivery.blobs import WINDOW_CHUNKS, Blobs
from restante.delivery.capacity import Claim, ServerRoom
from restante.delivery.reservations import Reservations, Room
from restante.delivery.rules import (
    CHUNK_BYTES,
    MAX_FILES_PER_REQUEST,
    Chunk,
    IncomingFile,
    ReceivePolicy,
    Usage,
)
from restante.errors import (
    BadRequest,
    FeedFull,
    KeyReused,
    OutcomeUnknown,
    RestanteError,
    TooManyFiles,
    UploadMalformed,
    UploadTooSlow,
    WorkspaceUnknown,
)
from restante.feed import room as feed_room, store as feed
from restante.feed.rules import WriteLimits
from restante.feed.wakeups import Wakeups
from restante.ids import FileId, WorkspaceId
from restante.retention.disk import Disk

log = structlog.get_logger()

_WINDOW_BYTES = WINDOW_CHUNKS * CHUNK_BYTES

# More uploads of one workspace at once than this hold less memory each, and are slower.
_UPLOADS_AT_FULL_SPEED = 16


class Receiver:
    """Receives files for all workspaces, within their quotas and the server's."""

    def __init__(  # noqa: PLR0913 - each argument is one fact, named by its caller
        self,
        db: Database,
        blobs: Blobs,
        wakeups: Wakeups,
        policy: ReceivePolicy,
        *,
        limits: WriteLimits,
        disk: Disk,
    ) -> None:
        self.db = db
        self.blobs = blobs
        self.policy = policy
        self.limits = limits
        self.reservations = Reservations(db, policy.quota, limits)
        self.disk = disk
        self.server = ServerRoom(db, policy, disk)
        self.wakeups = wakeups

    @asynccontextmanager
    async def receive(
        self,
        workspace_id: WorkspaceId,
        declared_bytes: int | None,
        *,
        ttl: timedelta | None = None,
        source_id: WorkspaceId | None = None,
        repeats_key: bool = False,
    ) -> "AsyncIterator[Incoming]":
        """
        Receive one request's files; unless they are published inside, nothing remains of them.

        The files of a request that repeats an idempotency key are hashed and not stored.  Raises
        BadRequest for a TTL outside of the operator's limits; QuotaTooSmall and ServerFull if the
        declared size can not fit; DiskLow.
        """
        if ttl is not None:
            self.policy.check_ttl(ttl)
        expected = min(declared_bytes or 0, self.policy.quota.max_bytes)
        room = Room(workspace_id, expected_bytes=expected)
        incoming = Incoming(
            self,
            workspace_id,
            ttl=ttl or self.policy.ttl,
            source_id=source_id,
            declared_bytes=declared_bytes,
            is_stored=not repeats_key,
            room=room,
            claim=Claim(room),
        )
        if not repeats_key:
            rules.check_fits_ever(self.policy.quota, declared_bytes or 0)
            await self.server.check(Usage(expected, 1))
            incoming.claim.usage = Usage(0, 1)
        self.server.begin(incoming.claim)
        try:
            yield incoming
        finally:
            try:
                await self._end(incoming)
            finally:  # for a moment it may be counted twice, never not at all
                self.server.end(incoming.claim)
        if incoming.joined and incoming.is_undecided:
            raise BadRequest("End the transaction before the block that stages its files ends.")

    async def _end(self, incoming: "Incoming") -> None:
        """After the commit: wake waiting readers, count, and log; without one, clean up."""
        incoming.is_closed = True
        if incoming.joined:
            if incoming.is_undecided:
                # The transaction locks the reservation; after a rollback it expires.
                self.reservations.forget(incoming.room)
                return
            await self._look_up(incoming)
        if incoming.is_unknown:  # without a commit, the reservation expires
            self.reservations.forget(incoming.room)
            self.wakeups.grew(incoming.workspace_id)
            return
        if not incoming.is_published:
            await incoming.abort()
            return
        self.reservations.forget(incoming.room)
        self.wakeups.grew(incoming.workspace_id)
        self.server.published(Usage(incoming.total_bytes, len(incoming.files)))
        for file in incoming.files:
            log.info(
                "upload_staged",
                workspace=str(incoming.workspace_id),
                file=str(file.file_id),
                size=file.size,
                name=file.name,
            )

    async def _look_up(self, incoming: "Incoming") -> None:
        """Whether the caller's transaction, which has ended by now, was committed."""
        file_id = incoming.files[0].file_id
        try:
            async with self.db.connection() as connection:
                found = await store.created_at(connection, incoming.workspace_id, file_id)
        except RestanteError:
            incoming.is_unknown = True
        else:
            incoming.is_published = found is not None

    async def claim(self, incoming: "Incoming", wanted: Usage, *, now: datetime) -> None:
        """Claim this much in all for an upload; raises WorkspaceFull and ServerFull."""
        extra_bytes = wanted.bytes - incoming.claimed.bytes
        its = self.server.claimed_by(incoming.workspace_id)
        if its + extra_bytes > self.policy.quota.max_bytes:
            async with self.db.connection() as connection:
                raise await incoming.no_room(connection, now=now)
        await self.server.claim(incoming.claim, wanted)


@dataclass(slots=True, eq=False)
class Incoming:
    """One request's files while they arrive."""

    _receiver: Receiver
    workspace_id: WorkspaceId
    ttl: timedelta
    source_id: WorkspaceId | None  # the workspace that sends them; None: the canvas
    declared_bytes: int | None  # of the whole body, which is more than the files; None: not known
    is_stored: bool  # False: only hashed
    room: Room  # in the workspace's quota, reserved once chunks are written ahead
    claim: Claim  # on the server's quota and disk
    files: list[IncomingFile] = field(default_factory=list[IncomingFile])
    total_bytes: int = 0
    is_published: bool = False
    is_unknown: bool = False  # the database did not say whether they were published
    joined: Connection | None = None  # whose transaction the caller commits, or not
    is_closed: bool = False
    open_file: IncomingFile | None = None  # the one that is arriving now
    _chunks: list[Chunk] = field(default_factory=list[Chunk])  # not written yet
    _writing: "asyncio.Task[None] | None" = None

    @property
    def is_undecided(self) -> bool:
        """Whether the files are part of a transaction of the caller that is still open."""
        return self.joined is not None and is_in_transaction(self.joined)

    @property
    def claimed(self) -> Usage:
        return self.claim.usage

    @property
    def file_ids(self) -> list[FileId]:
        return [file.file_id for file in self.files]

    async def begin_file(self, name: str, mimetype: str, *, now: datetime) -> None:
        """A new file begins; its names and type are cleaned here."""
        count = len(self.files) + 1
        if count > MAX_FILES_PER_REQUEST:
            raise TooManyFiles(
                f"A request carries at most {MAX_FILES_PER_REQUEST} files.",
                max=MAX_FILES_PER_REQUEST,
            )
        if self.is_stored and count > self.claimed.files:
            await self._receiver.claim(self, Usage(self.claimed.bytes, count), now=now)
        self.open_file = IncomingFile(
            rules.clean_name(name), rules.display_name(name), rules.clean_mimetype(mimetype)
        )

    async def write(self, piece: bytes, *, now: datetime) -> None:
        """
        More bytes of the open file; raises RequestTooLarge and the refusals of the quotas.

        A file that is too large is counted to its end, so that its refusal can say its size.
        """
        file = self.open_file
        assert file is not None  # noqa: S101 - the caller has begun one
        file.size += len(piece)
        self.total_bytes += len(piece)
        policy = self._receiver.policy
        if file.size > policy.max_file_bytes:
            return
        if self.total_bytes > policy.max_request_bytes:
            raise rules.request_too_large(policy.max_request_bytes)
        quota, files = policy.quota, len(self.files) + 1
        if self.total_bytes > quota.max_bytes or files > quota.max_files:
            raise rules.quota_too_small(quota, bytes=self.total_bytes, files=files)
        await self._claim(now=now)
        await self._add(file.add(piece), now=now)

    async def end_file(self, *, now: datetime) -> None:
        """The open file is complete; raises if it is empty or too large."""
        file, self.open_file = self.open_file, None
        assert file is not None  # noqa: S101 - the caller has begun one
        if file.size == 0:
            raise UploadMalformed(f"The file {file.name} is empty.", filename=file.name)
        allowed = self._receiver.policy.max_file_bytes
        if file.size > allowed:
            raise rules.file_too_large(file, allowed)
        await self._add(file.end(), now=now)
        self.files.append(file)

    def body_too_large(self) -> RestanteError:
        """Why a body that goes on beyond its limit is refused; of the open file, it has so much."""
        file, policy = self.open_file, self._receiver.policy
        if file and file.size > policy.max_file_bytes:
            return rules.file_too_large(file, policy.max_file_bytes, is_complete=False)
        return rules.request_too_large(policy.max_request_bytes)

    async def _claim(self, *, now: datetime) -> None:
        """Claim room for what has arrived and for some of what may follow."""
        if self.is_stored and self.total_bytes > self.claimed.bytes:
            quota = self._receiver.policy.quota
            wanted = rules.claim_for(self.total_bytes, self.declared_bytes, quota)
            await self._receiver.claim(self, Usage(wanted, self.claimed.files), now=now)

    async def _add(self, chunks: Sequence[Chunk], *, now: datetime) -> None:
        """Collect chunks, and write them as soon as they are worth a statement."""
        if not self.is_stored:
            return
        for chunk in chunks:
            self._chunks.append(chunk)
            if _bytes_of(self._chunks) >= self._window_bytes:
                await self._write_ahead(now=now)

    @property
    def _window_bytes(self) -> int:
        uploads = self._receiver.server.uploads_of(self.workspace_id)
        return _WINDOW_BYTES if uploads <= _UPLOADS_AT_FULL_SPEED else CHUNK_BYTES

    async def _write_ahead(self, *, now: datetime) -> None:
        """Write the collected chunks while more arrive; one write at a time."""
        self._take_disk()
        if self._writing:
            await self._writing
        bucket = await self._reserve(now=now)
        chunks, self._chunks = self._chunks, []
        self.room.written = chunks[0].file_id
        self._writing = asyncio.create_task(self._put(bucket, chunks))

    async def _put(self, bucket: datetime, chunks: Sequence[Chunk]) -> None:
        try:
            await self._receiver.blobs.put(self.workspace_id, bucket, chunks)
        finally:
            self._receiver.server.wrote(self.claim, _bytes_of(chunks))

    def _take_disk(self) -> None:
        """The collected chunks are written now: raises DiskLow if the disk has filled meanwhile."""
        self._receiver.disk.take(_bytes_of(self._chunks))

    async def _reserve(self, *, now: datetime) -> datetime:
        """
        Reserve what is claimed in the workspace's quota before bytes are stored; their bucket.

        The bucket is chosen with the first bytes, not when the request began: only a reservation
        protects it.
        """
        room = self.room
        if not (room.bucket and room.covers(self.claimed)):
            async with self._receiver.db.connection() as connection:
                if not await self._receiver.reservations.reserve(connection, room, self.claimed):
                    raise await self.no_room(connection, now=now)
        assert room.bucket is not None  # noqa: S101 - it was reserved
        return room.bucket

    async def publish(self, *, now: datetime, key: str | None = None) -> wire.UploadAnswer:
        """
        Make the files visible in one synced commit; returns the answer for the sender.

        With an idempotency key that was used before, that is the first answer, and nothing is
        stored.  Raises KeyReused, WorkspaceFull, TooMuchWritten, FeedFull, UploadTooSlow if the
        reservation has expired, or OutcomeUnknown.
        """
        batch = await self._batch(now=now, key=key)
        publish = store.publish_with_key if key else store.publish
        last = batch.activity_ids[-1]
        try:
            seq = await decided(
                self._receiver.db,
                lambda connection: publish(connection, batch),
                lambda connection: feed.seq_of(connection, self.workspace_id, last),
            )
        except OutcomeUnknown:
            self.is_unknown = True
            raise
        self.is_published = seq is not None
        if self.is_published:
            return self._answer()
        await self.abort()
        return await self.repeated_answer(key, written_bytes=batch.written_bytes, now=now)

    async def publish_in(self, connection: Connection, *, now: datetime) -> list[FileId]:
        """
        Publish inside the caller's transaction: the files appear when, and only if, it commits.

        The connection may be the application's own; it must have a transaction open.
        """
        if not is_in_transaction(connection):
            raise BadRequest("publish_in needs a connection with an open transaction.")
        batch, refusal = await self._batch(now=now, key=None), None
        with translated():
            async with store.in_our_schema(connection):
                if await store.publish(connection, batch) is None:
                    refusal = await self._refusal(connection, batch.written_bytes, now=now)
        if refusal:  # the transaction is intact, and the caller may go on with it
            raise refusal
        self.joined = connection
        return self.file_ids

    async def _batch(self, *, now: datetime, key: str | None) -> store.Batch:
        """What one statement publishes; waits until earlier chunks are written."""
        if self.is_published or self.joined or self.is_closed:
            raise BadRequest("These files were published before, or their block has ended.")
        if not self.files:
            raise UploadMalformed("The request holds no part named files.")
        self._take_disk()
        if self._writing:
            await self._writing
            await self._reserve(now=now)
        answer = None
        if key:
            expires_at = now + self._receiver.policy.answers_kept
            json = msgspec.json.encode(self._answer()).decode()
            answer = store.Answer(key, rules.fingerprint(self.files), json, expires_at)
        self.claim.publishing_bytes = _bytes_of(self._chunks)
        return store.Batch(
            workspace_id=self.workspace_id,
            bucket=self.room.bucket,
            created_at=now,
            expires_at=now + self.ttl,
            source_id=self.source_id,
            files=self.files,
            chunks=self._chunks,
            quota=self._receiver.policy.quota,
            limits=self._receiver.limits,
            reservation=self.room.id if self.room.bucket else None,
            counted_bytes=self.room.counted_bytes,
            answer=answer,
        )

    async def repeated_answer(
        self, key: str | None, *, written_bytes: int = 0, now: datetime
    ) -> wire.UploadAnswer:
        """
        The first answer to this key; raises KeyReused if it was given for other files.

        Without one, raises why nothing was published that would have written so much.
        """
        if not self.files:
            raise UploadMalformed("The request holds no part named files.")
        async with self._receiver.db.connection() as connection:
            found = key and await store.remembered(connection, self.workspace_id, key, now=now)
            if not found:
                raise await self._refusal(connection, written_bytes, now=now)
        first, answer = found
        if first != rules.fingerprint(self.files):
            raise KeyReused("This Idempotency-Key was used before with other files; use a new one.")
        return msgspec.json.decode(answer, type=wire.UploadAnswer)

    async def _refusal(
        self, connection: Connection, written_bytes: int, *, now: datetime
    ) -> RestanteError:
        """Why nothing was published: there is no room, or the reservation has expired."""
        usage = await quotas.usage_of(connection, self.workspace_id)
        wanted = Usage(self.total_bytes, len(self.files))
        if usage and not usage.fits(self._receiver.policy.quota, wanted):
            return await self.no_room(connection, now=now)
        fill = await feed.fill_of(connection, self.workspace_id)
        if fill is None:
            return WorkspaceUnknown()
        feed_bytes = store.announced_bytes(self.workspace_id, self.files)
        refusal = fill.refusal(self._receiver.limits, feed=feed_bytes, written=written_bytes)
        # Not in the transaction of an application, which may be long.
        may_free = isinstance(refusal, FeedFull) and not is_in_transaction(connection)
        if may_free and await feed_room.free(
            connection, self.workspace_id, self._receiver.limits, feed_bytes, now=now
        ):
            return feed_room.freed_meanwhile()
        sentence = "The upload took longer than its room is reserved; send it again."
        return refusal or UploadTooSlow(sentence)

    async def no_room(self, connection: Connection, *, now: datetime) -> RestanteError:
        """Why no more can be reserved for the workspace."""
        quota, limits = self._receiver.policy.quota, self._receiver.limits
        if rules.is_too_large_for(quota, self.declared_bytes or 0):
            return rules.quota_too_small(quota, bytes=self.declared_bytes or 0, files=1)
        usage = await quotas.usage_of(connection, self.workspace_id)
        fill = await feed.fill_of(connection, self.workspace_id)
        if usage is None or fill is None:
            return WorkspaceUnknown()
        growth = self.claimed.bytes - self.room.counted_bytes
        if refusal := fill.refusal(limits, feed=0, written=growth):
            return refusal
        frees_at = await quotas.workspace_frees_at(connection, self.workspace_id)
        return rules.workspace_full(usage, quota, frees_at, now=now)

    def _answer(self) -> wire.UploadAnswer:
        files = [
            wire.StagedFile(
                rules.pending_uri(self.workspace_id, file.file_id),
                file.name,
                file.mimetype,
                file.size,
                file.display_name,
            )
            for file in self.files
        ]
        return wire.UploadAnswer(files)

    async def abort(self) -> None:
        """Nothing will be published: stop writing and release the reservation."""
        if self._writing:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        await self._receiver.reservations.release(self.room)


def _bytes_of(chunks: Sequence[Chunk]) -> int:
    return sum(len(chunk.bytes) for chunk in chunks)
