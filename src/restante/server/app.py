"""All routes, and the application that serves them."""

from dataclasses import dataclass, fields
from datetime import timedelta
from functools import cache

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute

from restante import wire
from restante.database.pool import Database
from restante.delivery import web as uploads
from restante.delivery.blobs import Blobs
from restante.delivery.receive import Receiver
from restante.errors import RestanteError
from restante.feed import events, messages, notifications, sockets, web as feed
from restante.feed.batches import WatchPolicy
from restante.feed.service import Feed
from restante.feed.wakeups import Wakeups
from restante.http import problems
from restante.http.body_room import BodyRoom
from restante.http.networks import AddressRanges
from restante.http.operations import JsonPace
from restante.http.origins import PREFLIGHT_STATUSES, CrossOrigin
from restante.http.refusal_delays import RefusalDelays
from restante.http.turns import Turns
from restante.oplog.node import Node
from restante.oplog.routes import push, reset_web, snapshot_web, verify_web, web as oplog
from restante.retention.disk import Disk
from restante.retention.space import SpaceAccount
from restante.retention.sweep import Sweep
from restante.server import admin, docs, health, slashes
from restante.server.connections import Connections
from restante.server.metrics import Metrics
from restante.server.observe import METHODS, UNMATCHED, ObservedApp, path_label
from restante.server.readiness import Readiness
from restante.workspaces import web as workspaces
from restante.workspaces.admin import WorkspaceAdmin
from restante.workspaces.auth import Access
from restante.workspaces.concurrency import Concurrency
from restante.workspaces.push import Push
from restante.workspaces.rates import Rate
from restante.workspaces.registry import Registry

ROUTES: list[BaseRoute] = [
    *health.ROUTES,
    *docs.ROUTES,
    *workspaces.ROUTES,
    *uploads.ROUTES,
    *messages.ROUTES,
    *notifications.ROUTES,
    *feed.ROUTES,
    *events.ROUTES,
    *sockets.ROUTES,
    *oplog.ROUTES,
    *push.ROUTES,
    *snapshot_web.ROUTES,
    *verify_web.ROUTES,
    *reset_web.ROUTES,
    *admin.ROUTES,
]


@dataclass(frozen=True, slots=True)
class Services:
    """What handlers find in `request.app.state`, under these names."""

    metrics: Metrics
    connections: Connections
    readiness: Readiness
    db: Database
    json_pace: JsonPace
    body_room: BodyRoom
    disk: Disk
    access: Access
    concurrency: Concurrency
    turns: Turns
    refusal_delays: RefusalDelays
    registry: Registry
    workspace_admin: WorkspaceAdmin
    push: Push
    feed: Feed
    watch_policy: WatchPolicy
    wakeups: Wakeups
    message_rate: Rate
    receiver: Receiver
    blobs: Blobs
    sweep: Sweep
    space: SpaceAccount
    ack_retention: timedelta
    staging_enabled: bool
    serve_acked: bool
    upload_limits: wire.UploadLimits
    origins: frozenset[str]
    proxies: AddressRanges
    oplog: Node


def build(services: Services) -> Starlette:
    """The application."""
    app = ObservedApp(
        routes=ROUTES,
        exception_handlers={
            RestanteError: problems.on_restante_error,
            HTTPException: problems.on_http_exception,
        },
    )
    app.router.redirect_slashes = False
    app.router.default = slashes.redirecting(app.router)
    for field in fields(services):
        setattr(app.state, field.name, getattr(services, field.name))
    requests = services.metrics.requests
    app.state.reference = _reference(services.upload_limits)
    app.state.cross_origin = CrossOrigin(services.origins, ROUTES)
    for (method, path), statuses in app.state.reference.statuses.items():
        requests.expect(method, path_label(path), statuses)
    for method in METHODS:
        requests.expect(method, UNMATCHED, (slashes.REPEAT_ELSEWHERE, 404))
    requests.expect("OPTIONS", UNMATCHED, PREFLIGHT_STATUSES)
    return app


@cache
def _reference(limits: wire.UploadLimits) -> docs.Reference:
    return docs.reference(ROUTES, limits)
