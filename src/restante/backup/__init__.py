"""Backups of the embedded Postgres: one file, taken while the server runs, restored whole."""
