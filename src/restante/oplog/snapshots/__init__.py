"""Snapshots of tracked tables: served page by page, and taken."""
