-- Why:   files larger than 25 MiB, a name for people beside the one on the wire, and the sender.  The
--        checks are not validated: a scan would hold the lock, and the old rows satisfy them already.
-- Works with: 0004 code, which accepts no larger file and leaves the new columns null.
set local lock_timeout = '3s';

alter table uploads
    add column display_name text,
    add column source_id uuid,
    drop constraint uploads_size_check,
    add constraint uploads_size_check check (size between 1 and 68719476736) not valid,
    add constraint uploads_display_name_check
        check (length(display_name) between 1 and 255) not valid;
