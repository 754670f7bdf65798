-- Why:   the time at which a workspace was last seen is written every minute.  With room on the page the
--        new version is beside the old one (HOT): no index is written, and the table does not grow.
--        Rows on full pages move to pages with room when they are written next.
-- Works with: 0007 code, which does not notice.
set local lock_timeout = '3s';

alter table workspaces set (fillfactor = 50);
