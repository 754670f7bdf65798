"""What Postgres says, passed on as log events; the last lines are kept to explain a failure."""

import re
from collections import deque
from logging import CRITICAL, DEBUG, ERROR, WARNING
from typing import IO

import structlog

log = structlog.stdlib.get_logger(__name__)

LONGEST_LINE = 8192
LINES_KEPT = 20
# Postgres names the kind of process that speaks, then the severity; see `options.DEFAULTS`.
SPEAKER_PREFIX = "[%b] "
SPOKEN = re.compile(r"^(?:\[(?P<speaker>[^]]*)\] )?(?P<severity>[A-Z]+):  (?P<text>.*)")
COMPLAINT = re.compile(r"(?:PANIC|FATAL|ERROR|error): +(?P<why>.*)")
CLIENT = "client backend"
LEVELS = {"WARNING": WARNING, "ERROR": ERROR, "FATAL": ERROR, "PANIC": CRITICAL}
# That a connection was refused or cut is told to the client, for whom it matters.
CLIENT_LEVELS = LEVELS | {"FATAL": DEBUG}


class Transcript:
    """The words of one process."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._private = False

    def hear(self, stream: IO[bytes]) -> None:
        """Read to the end; a full pipe would stop Postgres, so nothing here may give up early."""
        with stream:
            for raw in iter(lambda: stream.readline(LONGEST_LINE), b""):
                line = raw.decode(errors="replace").rstrip()
                if line:
                    self._note(line)

    def mentions(self, *phrases: str) -> bool:
        return any(phrase in line for line in self._lines for phrase in phrases)

    @property
    def complaint(self) -> str:
        """The line that most likely says why the process ended."""
        lines = ["nothing.", *self._lines]
        complaints = [found["why"] for line in lines if (found := COMPLAINT.search(line))]
        return (complaints or lines)[-1]

    def _note(self, line: str) -> None:
        spoken = SPOKEN.match(line)
        if spoken:
            self._private = _quotes_contents(spoken)
        if self._private:
            return
        self._lines.append(line)
        if spoken:
            level = CLIENT_LEVELS if spoken["speaker"] == CLIENT else LEVELS
            log.log(level.get(spoken["severity"], DEBUG), "postgres_said", text=spoken["text"])
        else:
            log.debug("postgres_said", text=line)


def _quotes_contents(spoken: re.Match[str]) -> bool:
    """A client's error reaches the client, and may quote what it sent: that is not for our log."""
    return spoken["speaker"] == CLIENT and spoken["severity"] == "ERROR"
