-- Why:   bounds what is written for a workspace in an hour, whatever becomes of it, and what its feed
--        keeps.
-- Works with: 0002 code, which leaves the new columns alone.  The feed rows that it writes have no
--        bytes and count 0.  It trims without subtracting: counted_seq tells that by being behind.
set local lock_timeout = '3s';

alter table feeds
    add column written_hour  timestamptz,
    add column written_bytes bigint not null default 0 check (written_bytes >= 0),
    add column written_total bigint not null default 0 check (written_total >= 0),
    add column feed_bytes    bigint not null default 0 check (feed_bytes >= 0),
    add column counted_seq   bigint not null default 0,
    add column unacked_bytes bigint not null default 0 check (unacked_bytes >= 0),
    add column settled_seq   bigint not null default 0;

alter table feed add column bytes integer;
