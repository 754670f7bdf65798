"""Structured logs on standard error: lines for people, JSON for machines."""

import logging
import sys
from typing import Literal

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from restante.server.request_lines import columns, request_line

# Libraries log warnings and above.
_QUIET = ("uvicorn", "uvicorn.error", "asyncio", "aiohttp")
# Logs a trace for every failed connection while Postgres is down.
_SILENT = ("asyncpg",)
_LOGGED_BY_US = ("Exception in ASGI application", "Invalid HTTP request received")
_REQUEST_LINES = frozenset({"request", "refused_unread"})


def configure(style: Literal["auto", "columns", "json"], level: str) -> None:
    """Set up logging: ours through structlog, the libraries' in the same format."""
    for_people = style == "columns" or (style == "auto" and sys.stderr.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False)
        if for_people
        else structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    chosen: list[Processor] = [_one_line_per_request] if for_people and level != "debug" else []
    structlog.configure(
        processors=[*shared, *chosen, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(_number(level)),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *(_for_people() if for_people else _for_machines()),
            ],
        )
    )
    logging.basicConfig(handlers=[handler], level=_number(level), force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in _SILENT:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logging.getLogger("uvicorn.error").addFilter(_is_not_logged_by_us)


def _is_not_logged_by_us(record: logging.LogRecord) -> bool:
    """The trace of a bug, and a request that is not HTTP: uvicorn would log them once more."""
    return not record.getMessage().startswith(_LOGGED_BY_US)


def _one_line_per_request(_logger: object, level: str, event: EventDict) -> EventDict:
    """Leave out what a request reports beside its own line, unless something is wrong."""
    if level == "info" and "request_id" in event and event["event"] not in _REQUEST_LINES:
        raise structlog.DropEvent
    return event


def _for_people() -> list[Processor]:
    colors = sys.stderr.isatty()
    others = structlog.dev.ConsoleRenderer(
        colors=colors,
        pad_event_to=0,
        # The default one prints local variables, and with them tokens and contents.
        exception_formatter=structlog.dev.plain_traceback,
    )

    def render(logger: WrappedLogger, level: str, event: EventDict) -> str:
        if event["event"] == "request":
            return request_line(event, width=columns(), colors=colors)
        return others(logger, level, event)

    return [render]


def _for_machines() -> list[Processor]:
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]


def _number(level: str) -> int:
    return logging.getLevelNamesMapping()[level.upper()]
