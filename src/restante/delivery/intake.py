"""
One request's files on their way in: cut into chunks, hashed, and stored ahead.

While one stretch of about 1 MiB is being written, the next one arrives; so a transfer holds a few
chunks in memory whatever its size.  Nothing is visible before it is published; what an abandoned
intake has stored is unreachable, and leaves with its bucket.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import uuid4

from restante.database.pool import Database
from restante.delivery import quota_store as quotas
from restante.delivery import quotas as quota_rules
from restante.delivery.blobs.postgres import WINDOW_CHUNKS, Blobs
from restante.delivery.capacity import Claim
from restante.delivery.quotas import Quota, Reservation
from restante.delivery.rules import (
    CHUNK_BYTES,
    MAX_FILE_BYTES,
    MAX_FILES_PER_REQUEST,
    MAX_REQUEST_BYTES,
    Chunk,
    NewUpload,
    bucket_of,
    clean_mimetype,
    clean_name,
)
from restante.errors import (
    FileTooLarge,
    RequestTooLarge,
    RestanteError,
    TooManyFiles,
    UploadMalformed,
)
from restante.ids import WorkspaceId, new_file_id

_WINDOW_BYTES = WINDOW_CHUNKS * CHUNK_BYTES


class _Arriving:
    """The file that is arriving now."""

    def __init__(self, name: str, mimetype: str) -> None:
        self.file_id = new_file_id()
        self.name = name
        self.mimetype = mimetype
        self.size = 0
        self._hash = hashlib.sha256()
        self._pieces: list[bytes] = []
        self._held = 0
        self._next_seq = 0

    def take(self, piece: bytes) -> list[Chunk]:
        """Add bytes; returns the chunks that are full now."""
        self._hash.update(piece)
        self._pieces.append(piece)
        self._held += len(piece)
        return self._cut() if self._held >= CHUNK_BYTES else []

    def _cut(self) -> list[Chunk]:
        held = b"".join(self._pieces)
        whole = len(held) - len(held) % CHUNK_BYTES
        rest = held[whole:]
        self._pieces, self._held = ([rest] if rest else []), len(rest)
        return [self._chunk(held[at : at + CHUNK_BYTES]) for at in range(0, whole, CHUNK_BYTES)]

    def _chunk(self, content: bytes) -> Chunk:
        chunk = Chunk(self.file_id, self._next_seq, content)
        self._next_seq += 1
        return chunk

    def end(self) -> list[Chunk]:
        """The last chunk, if the file did not end with a full one."""
        return [self._chunk(b"".join(self._pieces))] if self._held else []

    def finished(self) -> NewUpload:
        return NewUpload(self.file_id, self.name, self.mimetype, self.size, self._hash.digest())


@dataclass(frozen=True, slots=True)
class Terms:
    """For whom the files are, and how much room they may take."""

    workspace_id: WorkspaceId
    quota: Quota
    claim: Claim
    room_until: datetime
    keep: bool  # False: only read and hash
    ttl: timedelta | None = None  # None: as long as usual


class Intake:
    """Takes files piece by piece."""

    def __init__(self, db: Database, blobs: Blobs, terms: Terms) -> None:
        self._db = db
        self._blobs = blobs
        self.terms = terms
        self._file: _Arriving | None = None
        self._pending: list[Chunk] = []
        self._pending_bytes = 0
        self._writing: asyncio.Task[None] | None = None
        self._total = 0
        self.files: list[NewUpload] = []
        self.reservation: Reservation | None = None
        self.bucket = bucket_of(datetime.now(UTC))

    @property
    def workspace_id(self) -> WorkspaceId:
        return self.terms.workspace_id

    @property
    def has_file(self) -> bool:
        """Whether a file has begun and not ended."""
        return self._file is not None

    async def begin_file(self, name: str, mimetype: str) -> None:
        """A new file begins; its name and type are cleaned here."""
        if len(self.files) >= MAX_FILES_PER_REQUEST:
            raise TooManyFiles(
                f"A request carries at most {MAX_FILES_PER_REQUEST} files.",
                max=MAX_FILES_PER_REQUEST,
            )
        if self.terms.keep:
            await self.terms.claim.grow_to(len(self.files) + 1)
        self._file = _Arriving(clean_name(name), clean_mimetype(mimetype))

    async def write(self, piece: bytes) -> None:
        """More bytes of the file that has begun."""
        file = self._file
        assert file is not None  # noqa: S101 - the caller has begun one
        file.size += len(piece)
        self._total += len(piece)
        self._check_total()
        if file.size > MAX_FILE_BYTES:
            return  # counted to its end, so that the refusal can say how large it was
        await self._keep(file.take(piece))

    async def _keep(self, chunks: Sequence[Chunk]) -> None:
        """Hold chunks until a stretch of them is worth a statement."""
        if not self.terms.keep:
            return
        for chunk in chunks:
            self._pending.append(chunk)
            self._pending_bytes += len(chunk.bytes)
            if self._pending_bytes >= _WINDOW_BYTES:
                await self._write_ahead()

    def _check_total(self) -> None:
        if self._total > MAX_REQUEST_BYTES:
            raise RequestTooLarge(
                f"A request carries at most {MAX_REQUEST_BYTES} bytes of files.",
                max=MAX_REQUEST_BYTES,
            )
        quota_rules.check_can_ever_fit(
            extra_bytes=self._total, extra_files=len(self.files) + 1, quota=self.terms.quota
        )

    async def end_file(self) -> None:
        """The file is complete; raises if it is empty or was too large."""
        file = self._file
        assert file is not None  # noqa: S101 - the caller has begun one
        self._file = None
        if file.size == 0:
            raise UploadMalformed(f"The file {file.name} is empty.", filename=file.name)
        if file.size > MAX_FILE_BYTES:
            raise FileTooLarge(
                f"The file {file.name} has {file.size} bytes; {MAX_FILE_BYTES} are allowed.",
                filename=file.name,
                size=file.size,
                max=MAX_FILE_BYTES,
            )
        await self._keep(file.end())
        self.files.append(file.finished())

    async def finish(self) -> Sequence[Chunk]:
        """All files have arrived; returns the chunks that the publishing statement is to carry."""
        if not self.files:
            raise UploadMalformed("The request holds no part named files.")
        await self._written()
        if not self.reservation:
            self.bucket = bucket_of(datetime.now(UTC))
        return await self._blobs.put_last(self.workspace_id, self.bucket, self._pending)

    async def abandon(self) -> None:
        """Nothing will be published: stop writing and give the room back."""
        if self._writing:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        if self.reservation:
            reservation, self.reservation = self.reservation, None
            # The sender is to hear why it was abandoned; what cannot be given back now is given
            # back when it expires.
            with suppress(RestanteError):
                async with self._db.connection() as connection:
                    await quotas.release(connection, reservation.id)

    async def _write_ahead(self) -> None:
        """Write what is pending while more arrives; at most one stretch is under way."""
        await self._reserve()
        await self._written()
        chunks, self._pending, self._pending_bytes = self._pending, [], 0
        self._writing = asyncio.create_task(self._blobs.put(self.workspace_id, self.bucket, chunks))

    async def _written(self) -> None:
        if self._writing:
            await self._writing
            self._writing = None

    async def _reserve(self) -> None:
        """
        Have room promised before the first bytes are stored.

        The bucket is chosen now and not when the request came: nothing has kept that one since.
        """
        if self.reservation:
            return
        terms, claim = self.terms, self.terms.claim
        now = datetime.now(UTC)
        self.bucket = bucket_of(now)
        wanted = Reservation(
            uuid4(), terms.workspace_id, self.bucket, claim.bytes, claim.files, terms.room_until
        )
        async with self._db.connection() as connection:
            if not await quotas.reserve(connection, wanted, self.terms.quota):
                usage = await quotas.usage_of(connection, self.workspace_id)
                frees_at = await quotas.workspace_frees_at(connection, self.workspace_id)
                raise quota_rules.workspace_full(usage, self.terms.quota, frees_at, now=now)
        self.reservation = wanted
        claim.is_reserved()
