"""The background jobs of a server: what runs, how often, and for how long at most."""

from collections import Counter
from datetime import UTC, datetime, timedelta

from restante.oplog import looks, status
from restante.oplog.applying import apply, parked, settle
from restante.oplog.remote import Remote
from restante.oplog.tracking import schema_changes
from restante.oplog.trimming import log_subject, picture, plan
from restante.retention import upkeep
from restante.retention.subjects import Subjects
from restante.server import policies
from restante.server.app import Services
from restante.server.loops import Loop
from restante.server.parts import SWEEP_SECONDS
from restante.settings import Settings
from restante.wire.oplog_status import OplogStatus
from restante.workspaces.phantoms import reset_phantoms


def loops(settings: Settings, services: Services, subjects: Subjects) -> list[Loop]:
    """Everything that runs in the background."""
    every = upkeep.seconds_between_looks(subjects)
    jobs = _Jobs(settings, services, subjects)
    return [
        Loop("leaves", jobs.create_partitions, every, deadline_seconds=30),
        # A reservation lasts half a minute: what a killed server had reserved is free within one.
        Loop("expired", jobs.sweep_promptly, interval_seconds=15, deadline_seconds=30),
        Loop("sweep", jobs.sweep, settings.sweep_interval_seconds, deadline_seconds=SWEEP_SECONDS),
        Loop("disk", jobs.watch_disk, interval_seconds=1, deadline_seconds=10),
        Loop("relief", jobs.relieve_disk, interval_seconds=10, deadline_seconds=SWEEP_SECONDS),
        Loop("space", jobs.look_at_space, interval_seconds=300, deadline_seconds=30),
        # A poll or a stream counts as a sign of life; each workspace is written once a minute.
        Loop("seen", jobs.write_seen, interval_seconds=5, deadline_seconds=10),
        Loop("phantoms", jobs.reset_phantoms, interval_seconds=300, deadline_seconds=30),
        Loop("oplog", jobs.look_at_oplog, interval_seconds=10, deadline_seconds=20),
        # It probes every partition of the log, so it is made less often than the other looks.
        Loop("oplog_plan", jobs.look_at_log_plan, interval_seconds=60, deadline_seconds=30),
        Loop("oplog_waiting", jobs.apply_waiting, interval_seconds=2, deadline_seconds=60),
        Loop("oplog_schema", jobs.follow_schema, interval_seconds=10, deadline_seconds=60),
        Loop("oplog_peers", jobs.look_at_peers, interval_seconds=15, deadline_seconds=60),
    ]


class _Jobs:
    """One pass of each."""

    def __init__(self, settings: Settings, services: Services, subjects: Subjects) -> None:
        self._services = services
        self._subjects = subjects
        self._appended = status.Appended()
        self._evictions = status.Evictions()
        self._schema = schema_changes.Watch(services.oplog.db)
        self._refused = Counter(apply.refused_so_far)
        self._skipped = Counter(log_subject.skipped_so_far)
        self._log_limits = policies.log_limits(settings)
        self._phantom_stale = timedelta(seconds=settings.phantom_stale_seconds)

    async def create_partitions(self) -> None:
        now = await self._services.sweep.now()
        try:
            await upkeep.create_partitions(self._services.db, self._subjects, now=now)
        except Exception:  # the lead matters most when no partition can be created
            await self._see_lead(now)
            raise
        await self._see_lead(now)
        async with self._services.db.connection() as connection:
            await picture.note_time(connection, now=now)

    async def _see_lead(self, now: datetime) -> None:
        lead = await upkeep.lead_seconds(self._services.db, self._subjects, now=now)
        self._services.metrics.space.saw_lead(lead)

    async def sweep_promptly(self) -> None:
        sweep = self._services.sweep
        await sweep.run_prompt(self._services.metrics.sweep, now=await sweep.now())

    async def sweep(self) -> None:
        sweep = self._services.sweep
        await sweep.run_observed(self._services.metrics.sweep, now=await sweep.now())

    async def watch_disk(self) -> None:
        self._services.metrics.disk.saw(await self._services.disk.tend())

    async def relieve_disk(self) -> None:
        """On a disk that is almost full, free what can be freed: the next sweep may be too late."""
        if not self._services.disk.is_low:
            return
        sweep, observer = self._services.sweep, self._services.metrics.sweep
        await sweep.run_observed(observer, now=await sweep.now(), closely=True)
        await self._services.disk.checkpoint()  # frees the WAL as well, whatever was dropped

    async def look_at_space(self) -> None:
        self._services.metrics.saw_space(await self._services.space.sample(now=datetime.now(UTC)))

    async def write_seen(self) -> None:
        await self._services.access.seen.write(self._services.db)

    async def reset_phantoms(self) -> None:
        await reset_phantoms(
            self._services.db,
            now=datetime.now(UTC),
            stale=self._phantom_stale,
            count=self._services.metrics.sweep.phantom_busy_resets.inc,
        )

    async def look_at_oplog(self) -> None:
        db, now = self._services.oplog.db, datetime.now(UTC)
        found = await status.look(db, now=now)
        async with db.connection() as connection:
            appended = await self._appended.since_last_look(connection)
        refused = apply.refused_so_far - self._refused
        self._refused += refused
        metrics, dropped = self._services.metrics.oplog, self._services.oplog.outbox.dropped_by
        metrics.saw_counts(appended=appended, refused=refused, outbox_dropped=dropped)
        metrics.saw(found, now_seconds=now.timestamp())
        self._services.metrics.trimming.dropped.saw(found)
        self._announce_evictions(found)

    def _announce_evictions(self, found: OplogStatus) -> None:
        """Any server may have evicted a peer: each tells those who watch or listen at it."""
        for event in self._evictions.since_last_look(found):
            self._services.wakeups.announce(event)
            self._services.oplog.callbacks.put_eviction(event.payload)

    async def look_at_log_plan(self) -> None:
        """What retention and caps would do, and who stands in the way."""
        now = await self._services.sweep.now()
        async with self._services.oplog.db.transaction(readonly=True) as tx:
            found = await plan.look(tx, self._log_limits, now=now)
        skipped = log_subject.skipped_so_far - self._skipped
        self._skipped += skipped
        self._services.metrics.trimming.saw_skipped(skipped)
        self._services.metrics.trimming.saw_plan(found, now=now)

    async def apply_waiting(self) -> None:
        """What could not be applied, or not be judged, when it came."""
        db = self._services.oplog.db
        await settle.settle(db)
        await parked.retry_due(db, now=datetime.now(UTC))

    async def follow_schema(self) -> None:
        """New partitions need triggers, and new columns another capture function."""
        await self._schema.look()

    async def look_at_peers(self) -> None:
        """A client per pass: there are few peers, and some are away for long."""
        node = self._services.oplog
        async with Remote.opened(
            own_host=node.own_url or "", clock=lambda: datetime.now(UTC)
        ) as remote:
            await looks.look_at_peers(node.db, remote, now=datetime.now(UTC))
