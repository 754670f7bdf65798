"""Files come in and are announced: all of them, or none."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import msgspec
import structlog

from restante import wire
from restante.database.pool import Database, Tx, roll_back
from restante.delivery import quota_store as quotas
from restante.delivery import quotas as quota_rules
from restante.delivery import store as uploads
from restante.delivery.blobs.postgres import Blobs
from restante.delivery.capacity import Capacity
from restante.delivery.intake import Intake, Terms
from restante.delivery.quotas import Quota
from restante.delivery.rules import (
    Chunk,
    NewUpload,
    fingerprint,
    pending_uri,
    time_allowed,
)
from restante.delivery.store import Answer, Publication
from restante.errors import BadRequest, KeyReused, RestanteError, UploadTooSlow
from restante.feed.rules import announcement
from restante.feed.wakeups import Wakeups
from restante.ids import WorkspaceId

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Policy:
    """What the operator chose."""

    ttl: timedelta
    ttl_min: timedelta
    ttl_max: timedelta
    quota: Quota  # of each workspace
    answers_kept: timedelta
    grace_seconds: float
    min_bytes_per_second: int


class Staging:
    """Takes requests' files in and publishes them."""

    def __init__(
        self, db: Database, blobs: Blobs, capacity: Capacity, wakeups: Wakeups, policy: Policy
    ) -> None:
        self._db = db
        self._blobs = blobs
        self._capacity = capacity
        self._wakeups = wakeups
        self._policy = policy

    @asynccontextmanager
    async def intake(
        self,
        workspace_id: WorkspaceId,
        declared_bytes: int,
        *,
        keep: bool = True,
        ttl: timedelta | None = None,
    ) -> AsyncIterator[Intake]:
        """
        Take in one request's files; unless they are published inside, nothing remains.

        They wait as long as the sender asks for, within the operator's bounds, or as long as usual.
        """
        self._check_ttl(ttl)
        claimed_bytes = min(declared_bytes, self._policy.quota.max_bytes) if keep else 0
        now = datetime.now(UTC)
        async with self._capacity.claimed(claimed_bytes, 1 if keep else 0) as claim:
            terms = Terms(
                workspace_id,
                quota=self._policy.quota,
                claim=claim,
                room_until=now + 2 * self.time_allowed(declared_bytes),
                keep=keep,
                ttl=ttl,
            )
            intake = Intake(self._db, self._blobs, terms)
            try:
                yield intake
            except BaseException:
                await intake.abandon()
                raise

    def _check_ttl(self, ttl: timedelta | None) -> None:
        shortest, longest = self._policy.ttl_min, self._policy.ttl_max
        if ttl is not None and not shortest <= ttl <= longest:
            raise BadRequest(
                f"ttl_seconds is wrong: files wait from {shortest.total_seconds():.0f} "
                f"to {longest.total_seconds():.0f} s here."
            )

    def time_allowed(self, declared_bytes: int) -> timedelta:
        """How long a body of this size may take to arrive."""
        return time_allowed(
            declared_bytes,
            grace_seconds=self._policy.grace_seconds,
            min_bytes_per_second=self._policy.min_bytes_per_second,
        )

    async def publish(self, intake: Intake, *, key: str | None = None) -> bytes:
        """
        Make what was taken in visible, in one synced commit, and wake who waits for it.

        Returns the answer for the sender.  With a key that was used before, that is the first
        answer, and nothing is stored again.
        """
        publication = self._publication(intake, await intake.finish(), key)
        async with self._db.connection() as connection:
            publish = uploads.publish if key is None else _publish_or_roll_back
            seq = await publish(connection, publication)
        if seq is None:
            await intake.abandon()
            return await self._repeat_or_refuse(intake, key)
        self.announce(intake)
        return _answer(intake.workspace_id, intake.files)

    async def publish_in(self, tx: Tx, intake: Intake) -> None:
        """The same inside the caller's transaction, who calls `announce` after the commit."""
        publication = self._publication(intake, await intake.finish(), None)
        if await uploads.publish(tx, publication) is None:
            raise await self._refusal(tx, intake)

    def announce(self, intake: Intake) -> None:
        """After the commit: wake, count, and log."""
        self.wake(intake.workspace_id)
        self._capacity.stored(sum(file.size for file in intake.files), len(intake.files))
        for file in intake.files:
            log.info(
                "upload_staged",
                workspace=str(intake.workspace_id),
                file=str(file.file_id),
                size=file.size,
                name=file.name,
            )

    def wake(self, workspace_id: WorkspaceId) -> None:
        """Wake who waits for this feed."""
        self._wakeups.grew(workspace_id)

    async def is_known(self, workspace_id: WorkspaceId, key: str) -> bool:
        """Whether a request with this key has been answered."""
        async with self._db.connection() as connection:
            now = datetime.now(UTC)
            return await uploads.remembered(connection, workspace_id, key, now=now) is not None

    async def repeat(self, intake: Intake, key: str) -> bytes:
        """The first answer to this key; raises KeyReused if it was given for other files."""
        await intake.finish()
        return await self._repeat_or_refuse(intake, key)

    async def _repeat_or_refuse(self, intake: Intake, key: str | None) -> bytes:
        async with self._db.connection() as connection:
            now = datetime.now(UTC)
            found = key and await uploads.remembered(connection, intake.workspace_id, key, now=now)
            if not found:
                raise await self._refusal(connection, intake)
        first, answer = found
        if first != fingerprint(intake.files):
            raise KeyReused("This Idempotency-Key came before with other files; use a new one.")
        return answer.encode()

    async def _refusal(self, connection: Tx, intake: Intake) -> RestanteError:
        """Why nothing was published: there is no room, or it was no longer kept."""
        usage = await quotas.usage_of(connection, intake.workspace_id)
        extra_bytes, extra_files = sum(file.size for file in intake.files), len(intake.files)
        if quota_rules.fits(
            usage, extra_bytes=extra_bytes, extra_files=extra_files, quota=self._policy.quota
        ):
            return UploadTooSlow("The upload took longer than its room was kept; send it again.")
        frees_at = await quotas.workspace_frees_at(connection, intake.workspace_id)
        now = datetime.now(UTC)
        return quota_rules.workspace_full(usage, self._policy.quota, frees_at, now=now)

    def _publication(
        self, intake: Intake, last_chunks: Sequence[Chunk], key: str | None
    ) -> Publication:
        now, files = datetime.now(UTC), intake.files
        return Publication(
            workspace_id=intake.workspace_id,
            bucket=intake.bucket,
            created_at=now,
            expires_at=now + (intake.terms.ttl or self._policy.ttl),
            files=files,
            announcements=[announcement(intake.workspace_id, file) for file in files],
            last_chunks=last_chunks,
            quota=self._policy.quota,
            reservation=intake.reservation.id if intake.reservation else None,
            answer=self._remember(intake, key, now) if key else None,
        )

    def _remember(self, intake: Intake, key: str, now: datetime) -> Answer:
        answer = _answer(intake.workspace_id, intake.files).decode()
        return Answer(key, fingerprint(intake.files), answer, now + self._policy.answers_kept)


async def _publish_or_roll_back(connection: Tx, publication: Publication) -> int | None:
    """A key must not be remembered for files that found no room."""
    transaction = connection.transaction()
    await transaction.start()
    try:
        seq = await uploads.publish(connection, publication)
    except BaseException:
        await roll_back(connection, transaction)
        raise
    await (transaction.rollback() if seq is None else transaction.commit())
    return seq


def _answer(workspace_id: WorkspaceId, files: Sequence[NewUpload]) -> bytes:
    staged = [
        wire.StagedFile(
            pending_uri(workspace_id, file.file_id), file.name, file.mimetype, file.size
        )
        for file in files
    ]
    return msgspec.json.encode(wire.UploadAnswer(staged))
