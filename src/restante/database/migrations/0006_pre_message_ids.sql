-- Why:   a message that its sender repeats, because the answer was lost, is queued once.  The ids are
--        forgotten after a day by dropping partitions, so that their space goes back.
-- Works with: 0005 code, which does not know the table: it queues a repetition again.

create table message_ids (
    workspace_id uuid        not null,
    digest       uuid        not null,
    slot         timestamptz not null,
    queued_at    timestamptz not null,
    primary key (workspace_id, digest, slot)
) partition by range (slot);
