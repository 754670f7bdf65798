"""The `restante` command and its subcommands."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

from cyclopts import App, Group

from restante import __version__
from restante.cli import (
    backup,
    completion,
    connect,
    inbox,
    migrate,
    notify,
    oplog,
    send,
    serve,
    status,
    sweep,
    uploads,
    workspaces,
)
from restante.cli.lines import sentence_lines
from restante.cli.output import Console
from restante.errors import RestanteError
from restante.text import printable

if TYPE_CHECKING:
    from io import TextIOWrapper

_EXIT_CODES = (
    "Exit codes: 0 success; 1 failure, explained on standard error; 2 invalid command line; "
    "130 interrupted; 141 the reader of the output is gone."
)

app = App(
    name="restante",
    version=__version__,
    help="Store and forward files and messages for receivers without a public address.",
    help_epilogue=_EXIT_CODES,
    console=Console(),
    error_console=Console(stderr=True),
)
_GROUPS = {
    Group("Receive and send", sort_key=0): (connect, send, notify, inbox),
    Group("Run a server", sort_key=1): (
        serve,
        status,
        workspaces,
        uploads,
        oplog,
        sweep,
        migrate,
        backup,
    ),
    Group("Other", sort_key=2): (completion,),
}
for group, commands in _GROUPS.items():
    for command in commands:
        command.register(app, group)


def main() -> None:
    """Run a command; a RestanteError is one line on standard error and exit code 1."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal's encoding lacks must not end the command.
        cast("TextIOWrapper", stream).reconfigure(errors="replace")
    try:
        try:
            _run()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
    except BrokenPipeError:
        # Python flushes both at exit, which would print a second error.
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        sys.exit(141)


def _open_closed_streams() -> None:
    """What the caller has closed is empty, or swallows what is written; Python has None there."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - until the end


def _run() -> None:
    try:
        app(sys.argv[1:])
    except RestanteError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        if not error.name or error.name.startswith("restante"):
            raise
        _fail(
            f"This command needs the server package, and {error.name} is not installed: "
            "run `pip install 'restante[server]'`."
        )
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(sentence: str) -> NoReturn:
    console, text = Console(stderr=True), printable(f"restante: {sentence}")
    lines = sentence_lines(text, console.width) if console.is_terminal else [text]
    print("\n".join(lines), file=sys.stderr)
    sys.exit(1)
