"""What a line of the log looks like to a machine; how it looks to people is in e2e."""

import subprocess
import sys
from typing import Any

import msgspec

BEGIN = """
import logging, structlog
from restante.server import logs
logs.configure("json", "info")
log = structlog.get_logger()
"""


def logged(program: str) -> list[dict[str, Any]]:
    """What a process of its own writes to its log: how logs are set up is a matter of a process."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program], capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    return [msgspec.json.decode(line) for line in done.stderr.splitlines()]


def test_an_event_is_one_object_with_its_fields():
    (line,) = logged("log.info('uploads_swept', acked=12)")

    assert line.pop("timestamp").endswith("Z")
    assert line == {"event": "uploads_swept", "acked": 12, "level": "info"}


def test_an_error_carries_its_whole_trace_on_the_one_line():
    (line,) = logged("try:\n    1 / 0\nexcept ZeroDivisionError:\n    log.exception('bug')")

    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ZeroDivisionError: division by zero")


def test_what_is_below_the_level_is_not_written():
    assert logged("log.debug('detail')") == []


def test_libraries_speak_in_the_same_shape_and_only_when_it_matters():
    program = """
library = logging.getLogger("uvicorn.error")
library.info("Started server process")
library.warning("Something odd")
"""

    assert [line["event"] for line in logged(program)] == ["Something odd"]


def test_what_was_told_already_is_not_told_again():
    """A bug's trace comes from us, and a database that is away is in the answers to requests."""
    program = """
logging.getLogger("uvicorn.error").error("Exception in ASGI application\\\\n")
logging.getLogger("asyncpg.pool").warning("Failed to restore the pool connection floor")
"""

    assert logged(program) == []
