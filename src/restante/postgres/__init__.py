"""The embedded Postgres: found, prepared, run as our child, watched, and stopped with us."""

from restante.postgres.attach import postgres_for, running_dsn
from restante.postgres.datadir import DataDirectory
from restante.postgres.supervisor import EmbeddedPostgres

__all__ = ["DataDirectory", "EmbeddedPostgres", "postgres_for", "running_dsn"]
