"""The JSON log; the column format is tested in e2e."""

import re
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
    """Run the program in its own process, because logging is configured per process."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program], capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    return [msgspec.json.decode(line) for line in done.stderr.splitlines()]


def test_an_event_is_one_object_with_its_fields():
    (line,) = logged("log.info('uploads_swept', acked=12)")

    assert line.pop("timestamp").endswith("Z")
    assert line == {"event": "uploads_swept", "acked": 12, "level": "info"}


def test_a_traceback_is_on_the_line_of_its_event():
    (line,) = logged("try:\n    1 / 0\nexcept ZeroDivisionError:\n    log.exception('bug')")

    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ZeroDivisionError: division by zero")


def test_events_below_the_level_are_not_logged():
    assert logged("log.debug('detail')") == []


def test_libraries_log_warnings_in_the_same_format():
    program = """
library = logging.getLogger("uvicorn.error")
library.info("Started server process")
library.warning("Something odd")
"""

    assert [line["event"] for line in logged(program)] == ["Something odd"]


def test_duplicates_from_libraries_are_dropped():
    """We log the traceback of a bug ourselves, and requests report an unavailable database."""
    program = """
logging.getLogger("uvicorn.error").error("Exception in ASGI application\\\\n")
logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
logging.getLogger("asyncpg.pool").warning("Failed to restore the pool connection floor")
"""

    assert logged(program) == []


def test_on_a_terminal_a_request_is_one_line():
    """What else happened in it is left out, unless something is wrong."""
    program = """
logs.configure("columns", "info")
with structlog.contextvars.bound_contextvars(request_id="mine"):
    log.info("upload_staged", size=3)
    log.warning("request_failed", code="not_ready")
    log.info("request", method="GET", path="/", status=200, seconds=0.1, bytes_in=0, bytes_out=3)
log.info("started", version="0.1.0")
"""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program], capture_output=True, text=True, check=True
    )

    lines = [re.sub(" +", " ", line.partition(" ")[2]) for line in done.stderr.splitlines()]
    assert lines == [
        "[warning ] request_failed code=not_ready request_id=mine",
        "200 GET / 3 B 100 ms",
        "[info ] started version=0.1.0",
    ]
