-- Why:   a file that is acknowledged and reopened in turns is kept no longer than after its first
--        acknowledgement, so that time must outlast the reopening.
-- Works with: 0003 code, which ignores the column: a file that it reopens or acknowledges again is
--        kept from then on, as before.
set local lock_timeout = '3s';

alter table uploads add column first_acked_at timestamptz;
