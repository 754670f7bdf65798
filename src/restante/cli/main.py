"""The `restante` command and its subcommands."""

import os
import sys
from typing import TYPE_CHECKING, NoReturn, cast

from cyclopts import App, Group

from restante import __version__
from restante.cli import (
    completion,
    connect,
    inbox,
    migrate,
    send,
    serve,
    status,
    sweep,
    uploads,
)
from restante.errors import RestanteError

if TYPE_CHECKING:
    from io import TextIOWrapper

_EXIT_CODES = (
    "Exit codes: 0 done; 1 it did not work, and one sentence says why; 2 the command line is "
    "wrong; 130 interrupted before it was done; 141 nobody reads the output any more."
)

app = App(
    name="restante",
    version=__version__,
    help="Files and messages wait here for receivers that nobody can call.",
    help_epilogue=_EXIT_CODES,
)
_GROUPS = {
    Group("Receive and send", sort_key=0): (connect, send, inbox),
    Group("Run a server", sort_key=1): (serve, status, uploads, sweep, migrate),
    Group("Other", sort_key=2): (completion,),
}
for group, commands in _GROUPS.items():
    for command in commands:
        command.register(app, group)


def main() -> None:
    """Run a command; a failure we know is one sentence on standard error and exit code 1."""
    for stream in (sys.stdout, sys.stderr):
        # What others wrote must not end a command because a terminal cannot show it.
        cast("TextIOWrapper", stream).reconfigure(errors="replace")
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except RestanteError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        if not error.name or error.name.startswith("restante"):
            raise
        _fail(
            f"This command needs the server's part, and {error.name} is not installed: "
            "run `pip install 'restante[server]'`."
        )
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # Python flushes once more at its end, and would complain that nobody reads.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _fail(sentence: str) -> NoReturn:
    print(f"restante: {sentence}", file=sys.stderr)
    sys.exit(1)
