"""This description, as an OpenAPI document and as a page to read."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from restante import wire
from restante.http.operations import operation
from restante.server import openapi
from restante.server.docs.page import Page, rendered

TAG = "docs"


@dataclass(frozen=True, slots=True)
class Reference:
    """The description of the routes, ready to be sent."""

    document: bytes
    page: Page
    statuses: dict[tuple[str, str], list[int]]  # of each method and path


def reference(routes: Sequence[BaseRoute], limits: wire.UploadLimits) -> Reference:
    """Describe the routes; slow, so it is done once."""
    document = openapi.document(routes, limits)
    statuses = {
        (method.upper(), path): [
            int(status) for status in operation["responses"] if status.isdigit()
        ]
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }
    return Reference(msgspec.json.encode(document), rendered(document), statuses)


def _reference_of(request: Request) -> Reference:
    return request.app.state.reference


@operation(
    summary="This description as an OpenAPI 3.1 document.",
    caller="anyone",
    answers={200: "application/json"},
)
async def document(request: Request) -> Response:
    return Response(_reference_of(request).document, media_type="application/json")


@operation(
    summary="This description as a page to read.",
    caller="anyone",
    answers={200: "text/html"},
)
async def read(request: Request) -> Response:
    page = _reference_of(request).page
    return Response(
        page.html,
        media_type="text/html",
        headers={
            # Nothing is loaded and no script runs; the one style sheet is allowed by its hash.
            "Content-Security-Policy": f"default-src 'none'; style-src '{page.style_hash}'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        },
    )


ROUTES = [
    Route("/openapi.json", document),
    Route("/docs", read),
]
