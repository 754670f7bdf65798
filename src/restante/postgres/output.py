"""Passes the log of Postgres on as log events, and keeps the last lines to explain a failure."""

import re
from collections import deque
from logging import CRITICAL, DEBUG, ERROR, WARNING
from typing import IO

import structlog

log = structlog.stdlib.get_logger(__name__)

LONGEST_LINE = 8192
LINES_KEPT = 20
# The value of log_line_prefix: the backend type, before the severity.
LOG_LINE_PREFIX = "[%b] "
LOG_LINE = re.compile(r"^(?:\[(?P<backend>[^]]*)\] )?(?P<severity>[A-Z]+):  (?P<text>.*)")
ERROR_LINE = re.compile(r"(?:PANIC|FATAL|ERROR|error): +(?P<text>.*)")
CLIENT = "client backend"
LEVELS = {"WARNING": WARNING, "ERROR": ERROR, "FATAL": ERROR, "PANIC": CRITICAL}
# A refused or closed connection is reported to the client.
CLIENT_LEVELS = LEVELS | {"FATAL": DEBUG}


class Output:
    """The output of one process."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._private = False

    def read(self, stream: IO[bytes]) -> None:
        """Read to the end; never stop earlier, because a full pipe would block Postgres."""
        with stream:
            for raw in iter(lambda: stream.readline(LONGEST_LINE), b""):
                line = raw.decode(errors="replace").rstrip()
                if line:
                    self._add(line)

    def mentions(self, *phrases: str) -> bool:
        return any(phrase in line for line in self._lines for phrase in phrases)

    @property
    def last_error(self) -> str:
        """The last error message, or the last line if there is none."""
        lines = ["nothing.", *self._lines]
        errors = [found["text"] for line in lines if (found := ERROR_LINE.search(line))]
        return (errors or lines)[-1]

    def _add(self, line: str) -> None:
        entry = LOG_LINE.match(line)
        if entry:
            self._private = _may_quote_contents(entry)
        if self._private:
            return
        self._lines.append(line)
        if entry:
            levels = CLIENT_LEVELS if entry["backend"] == CLIENT else LEVELS
            log.log(levels.get(entry["severity"], DEBUG), "postgres_said", text=entry["text"])
        else:
            log.debug("postgres_said", text=line)


def _may_quote_contents(entry: re.Match[str]) -> bool:
    """A client's error may quote the values it sent. The client gets it; our log must not."""
    return entry["backend"] == CLIENT and entry["severity"] == "ERROR"
