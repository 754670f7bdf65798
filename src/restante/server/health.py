"""Alive, ready, and the metrics."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from restante import wire
from restante.database import migrate, rules, shares
from restante.database.pool import Database
from restante.database.rules import Migration
from restante.errors import NotReady, RestanteError
from restante.http.operations import operation
from restante.http.problems import json_response
from restante.server.metrics import CONTENT_TYPE, Metrics
from restante.server.single_flight import SingleFlight
from restante.workspaces import auth

TAG = "health"

PROBES = frozenset({"/health", "/ready", "/metrics"})

# A probe that takes longer counts as failed anyway.
_ANSWER_WITHIN_SECONDS = 2.0
_BETWEEN_PROBES_SECONDS = 0.1


class Readiness:
    """Whether the database answers, is migrated far enough, and accepts writes."""

    def __init__(self, db: Database, migrations: Sequence[Migration]) -> None:
        self._db = db
        self._migrations = migrations
        self._probe = SingleFlight(self._look, at_most_every_seconds=_BETWEEN_PROBES_SECONDS)

    async def probe(self) -> None:
        """Check everything, or raise NotReady; anyone may ask, as often as they like."""
        await self._probe.result()

    async def _look(self) -> None:
        await self.check()
        await self.check_writable()

    async def check(self) -> None:
        """Raise NotReady with the reason, or return.  Enough for a command that reads."""
        async with _answering():
            async with self._db.connection() as connection:
                state = await migrate.schema_state(connection)
            rules.check_compatible(self._migrations, state)
        missing = rules.due(self._migrations, state, {rules.Phase.PRE})
        if missing:
            raise NotReady(f"Migration {missing[0]} has not run; run `restante migrate`.")

    async def check_writable(self) -> None:
        """Raise NotReady if the database accepts no writes."""
        async with _answering():
            await self._db.check_writable()


@asynccontextmanager
async def _answering() -> AsyncIterator[None]:
    """Turn every failure of the database, and a slow answer, into NotReady."""
    try:
        async with asyncio.timeout(_ANSWER_WITHIN_SECONDS):
            yield
    except TimeoutError as error:
        raise NotReady(
            f"The database did not answer within {_ANSWER_WITHIN_SECONDS:g} s."
        ) from error
    except RestanteError as error:
        raise NotReady(str(error)) from error


def _readiness(request: Request) -> Readiness:
    return request.app.state.readiness


def _metrics(request: Request) -> Metrics:
    return request.app.state.metrics


@operation(
    summary="Whether the process runs and its event loop responds.",
    caller="anyone",
    answers={200: wire.Alive},
)
async def health(_request: Request) -> Response:
    return json_response(wire.Alive("ok"))


@operation(
    summary="Whether the database is reachable, migrated and accepts writes.",
    caller="anyone",
    details="For load balancers; a server that is not ready need not be restarted. One whose disk "
    "is almost full stays ready, because fetching and acknowledging frees it; `degraded` says so.",
    answers={200: wire.Ready},
    refusals=(NotReady,),
)
async def ready(request: Request) -> Response:
    shares.caller.set(None)  # a probe must not wait for others at its address
    await _readiness(request).probe()
    is_low = request.app.state.disk.is_low
    return json_response(wire.Ready("ready", "disk" if is_low else None))


@operation(
    summary="Every metric as Prometheus text.",
    caller="anyone",
    answers={200: CONTENT_TYPE},
)
async def metrics(request: Request) -> Response:
    page = await _metrics(request).page(for_operator=auth.is_admin(request))
    return Response(page, media_type=CONTENT_TYPE)


ROUTES = [
    Route("/health", health),
    Route("/ready", ready),
    Route("/metrics", metrics),
]
