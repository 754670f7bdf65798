"""The embedded Postgres: finds the binaries, creates the cluster, runs it as a child process."""

from restante.postgres.attach import postgres_for, running_dsn
from restante.postgres.ballast import Ballast
from restante.postgres.datadir import DataDirectory
from restante.postgres.supervisor import EmbeddedPostgres

__all__ = ["Ballast", "DataDirectory", "EmbeddedPostgres", "postgres_for", "running_dsn"]
