"""A workspace's inbox: append, read after a cursor, wait, watch."""
