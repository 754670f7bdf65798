"""The `restante` command and its subcommands."""

import os
import sys

from cyclopts import App

from restante import __version__
from restante.cli import migrate, serve, status, sweep
from restante.errors import RestanteError

app = App(
    name="restante",
    version=__version__,
    help="Files and messages wait here for receivers that nobody can call.",
)
for command in (serve, status, sweep, migrate):
    command.register(app)


def main() -> None:
    """Run a command; a failure we know is one sentence on standard error and exit code 1."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except RestanteError as error:
        print(f"restante: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # Python flushes once more at its end, and would complain that nobody reads.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
