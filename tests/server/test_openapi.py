"""The OpenAPI document, the page made of it, and the protocol guide are complete."""

import base64
import hashlib
import html
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from callers import ask, registered
from schemathesis.specs.openapi.definitions import OPENAPI_31
from sites import Site
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute

import restante
from restante import wire
from restante.http import problems
from restante.http.operations import operation, operation_of
from restante.server import openapi, policies
from restante.server.app import ROUTES
from restante.server.docs.page import rendered
from restante.settings import Settings

TAG = "tests"  # of the handlers in this file
HTTP_ROUTES = [route for route in ROUTES if isinstance(route, Route)]
WEBSOCKET_ROUTES = [route for route in ROUTES if isinstance(route, WebSocketRoute)]
GUIDE = (Path(__file__).parents[2] / "docs/protocol.md").read_text()
LIMITS = policies.upload_limits(Settings())
DOCUMENT = openapi.document(ROUTES, LIMITS)
OPERATIONS = {
    one["operationId"]: one for methods in DOCUMENT["paths"].values() for one in methods.values()
}

# Public and stable: generated clients use them as names.
OPERATION_IDS = {
    ("DELETE", "/admin/oplog/peers"): "oplog_remove_peer",
    ("GET", "/admin/oplog/peers"): "oplog_list_peers",
    ("POST", "/admin/oplog/peers"): "oplog_add_peer",
    ("GET", "/admin/retention/plan"): "retention_plan",
    ("POST", "/admin/retention/sweep"): "retention_sweep",
    ("GET", "/admin/status"): "retention_status",
    ("GET", "/admin/workspaces"): "workspaces_page",
    ("GET", "/admin/workspaces/{workspace_id}"): "workspaces_show",
    ("DELETE", "/admin/workspaces/{workspace_id}/token"): "workspaces_revoke_token",
    ("POST", "/admin/workspaces/{workspace_id}/token"): "workspaces_reissue_token",
    ("GET", "/docs"): "docs_read",
    ("GET", "/events/stream"): "events_stream_any",
    ("GET", "/health"): "health_health",
    ("POST", "/internal/crud/push"): "oplog_push",
    ("GET", "/internal/crud/sweep"): "oplog_sweep",
    ("GET", "/internal/oplog/status"): "oplog_status",
    ("POST", "/internal/oplog/cursors"): "oplog_cursors",
    ("POST", "/internal/oplog/digest"): "oplog_digest",
    ("POST", "/internal/oplog/digest/records"): "oplog_records",
    ("POST", "/internal/oplog/digest/tables"): "oplog_tables",
    ("POST", "/internal/oplog/snapshot"): "oplog_begin",
    ("POST", "/internal/oplog/snapshot/missing"): "oplog_missing",
    ("POST", "/internal/oplog/snapshot/page"): "oplog_page",
    ("GET", "/metrics"): "health_metrics",
    ("GET", "/openapi.json"): "docs_document",
    ("GET", "/ready"): "health_ready",
    ("POST", "/registry/heartbeat"): "workspaces_heartbeat",
    ("POST", "/registry/register"): "workspaces_register",
    ("GET", "/uploads/limits"): "uploads_limits",
    ("DELETE", "/workspaces/{workspace_id}"): "workspaces_remove",
    ("PATCH", "/workspaces/{workspace_id}"): "workspaces_change",
    ("POST", "/workspaces/{workspace_id}/a2a"): "messages_send",
    ("POST", "/workspaces/{workspace_id}/notify"): "messages_notify",
    ("GET", "/workspaces/{workspace_id}/activity"): "feed_read",
    ("POST", "/workspaces/{workspace_id}/activity/ack"): "feed_acknowledge",
    ("POST", "/workspaces/{workspace_id}/chat/uploads"): "uploads_upload",
    ("GET", "/workspaces/{workspace_id}/events"): "events_stream",
    ("GET", "/workspaces/{workspace_id}/pending-uploads"): "uploads_waiting",
    ("POST", "/workspaces/{workspace_id}/pending-uploads/{file_id}/ack"): "uploads_acknowledge",
    ("GET", "/workspaces/{workspace_id}/pending-uploads/{file_id}/content"): "uploads_content",
    ("POST", "/workspaces/{workspace_id}/pending-uploads/{file_id}/reopen"): "uploads_reopen",
}


def paths() -> list[str]:
    return sorted({route.path for route in [*HTTP_ROUTES, *WEBSOCKET_ROUTES]})


def codes() -> list[str]:
    return sorted(
        {error.code for error in problems.STATUS}
        | {*problems._HTTP_CODES.values(), "internal", "stopping"}
    )


@pytest.mark.parametrize("route", HTTP_ROUTES, ids=lambda route: f"{route.endpoint.__name__}")
def test_every_route_and_method_is_described(route: Route):
    assert operation_of(route.endpoint)
    methods = {method.upper() for method in DOCUMENT["paths"][route.path]}
    assert route.methods
    assert route.methods <= methods


def test_a_route_without_a_description_is_an_error():
    async def forgotten(_request: Request) -> Response:
        return Response()

    with pytest.raises(LookupError, match="/forgotten has no @operation"):
        openapi.document([*ROUTES, Route("/forgotten", forgotten)], LIMITS)


def test_the_document_is_valid_openapi():
    errors = jsonschema_rs.validator_for(OPENAPI_31).iter_errors(DOCUMENT)

    assert [str(error) for error in errors] == []
    assert DOCUMENT["info"]["version"] == restante.__version__
    assert DOCUMENT["servers"] == [{"url": "/"}]


def test_every_schema_is_valid_and_described():
    for name, schema in DOCUMENT["components"]["schemas"].items():
        jsonschema_rs.meta.validate(schema)
        assert schema["description"], name


def test_every_reference_can_be_resolved():
    for reference in set(references(DOCUMENT)):
        found: Any = DOCUMENT
        for key in reference.removeprefix("#/").split("/"):
            found = found[key]
        assert found


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if "$ref" in value else []
        return own + [one for inner in value.values() for one in references(inner)]
    return [one for inner in value for one in references(inner)] if isinstance(value, list) else []


def test_every_operation_has_an_id_of_its_own():
    methods = [method for methods in DOCUMENT["paths"].values() for method in methods]

    assert len(OPERATIONS) == len(methods)
    assert all(re.fullmatch(r"[a-z0-9_]+", name) for name in OPERATIONS)


def test_operation_ids_and_tags_stay_what_generated_clients_use():
    """A client generator makes one method of each id and one class of each tag."""
    found = {
        (method.upper(), path): (one["operationId"], one["tags"])
        for path, methods in DOCUMENT["paths"].items()
        for method, one in methods.items()
    }
    expected = {
        **{key: (name, [name.partition("_")[0]]) for key, name in OPERATION_IDS.items()},
        **{
            ("HEAD", path): (f"{name}_head", [name.partition("_")[0]])
            for (method, path), name in OPERATION_IDS.items()
            if method == "GET"
        },
    }

    assert found == expected


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("health_health", []),
        ("workspaces_register", [{}, {"workspace": []}, {"registration": []}, {"admin": []}]),
        ("workspaces_show", [{"admin": []}]),
        ("feed_read", [{"workspace": []}, {"admin": []}]),
        ("messages_send", [{"sender": []}, {"admin": []}]),
        ("oplog_sweep", [{"peer": []}]),
        ("uploads_content", [{"workspace": []}, {"admin": []}]),
    ],
)
def test_an_operation_names_the_tokens_that_it_accepts(name: str, tokens: list[dict[str, Any]]):
    assert OPERATIONS[name]["security"] == tokens


def test_a_query_is_described_with_its_limits():
    described = {one["name"]: one for one in OPERATIONS["feed_read"]["parameters"]}

    assert described["limit"]["schema"] == {
        "anyOf": [{"type": "integer", "minimum": 1, "maximum": 500}, {"type": "string"}],
        "default": 100,
    }
    assert described["limit"]["allowEmptyValue"]
    assert described["since_id"]["schema"] == {"type": "string", "format": "uuid"}
    assert described["since_seq"]["schema"] == {
        "type": "integer",
        "minimum": 0,
        "maximum": 2**63 - 1,
    }
    assert described["workspace_id"]["required"]
    assert not described["since_id"]["required"]


def test_a_parameter_is_required_if_its_default_is_refused():
    confirm = OPERATIONS["workspaces_remove"]["parameters"][1]

    assert (confirm["name"], confirm["required"], confirm["schema"]["const"]) == (
        "confirm",
        True,
        True,
    )


def test_files_are_described_as_parts_of_a_form():
    body = OPERATIONS["uploads_upload"]["requestBody"]["content"]["multipart/form-data"]["schema"]

    assert body["required"] == ["files"]
    assert body["properties"]["files"]["maxItems"] == 64


def test_refusals_name_their_codes():
    answers = OPERATIONS["uploads_upload"]["responses"]

    assert set(answers["413"]["x-codes"]) == {
        "file_too_large",
        "request_too_large",
        "quota_too_small",
    }
    assert "`file_too_large`" in answers["413"]["description"]
    assert "WWW-Authenticate" in answers["401"]["headers"]


def test_headers_of_answers_are_described():
    assert {wire.LOWEST_SEQ, wire.LATEST_SEQ, wire.ACKED_SEQ, "X-Request-ID"} <= set(
        OPERATIONS["feed_read"]["responses"]["200"]["headers"]
    )
    assert {"ETag", "Repr-Digest", "Content-Range"} <= set(
        OPERATIONS["uploads_content"]["responses"]["206"]["headers"]
    )


def test_a_bare_status_stands_for_every_error_that_has_it():
    @operation(summary="Try.", caller="anyone", refusals=(422,))
    async def attempt(_request: Request) -> Response:
        return Response()

    found = openapi.document([Route("/attempt", attempt)], LIMITS)

    refused = found["paths"]["/attempt"]["get"]["responses"]["422"]
    assert set(refused["x-codes"]) == {
        error.code for error, status in problems.STATUS.items() if status == 422
    }


def test_the_limits_of_the_server_are_named():
    document = openapi.document(ROUTES, wire.UploadLimits(2_000_001, 3_000_002, 64))

    path = document["paths"]["/workspaces/{workspace_id}/chat/uploads"]
    description = path["post"]["description"]
    assert "2000001 bytes" in description
    assert "3000002 bytes in 64 files" in description


def test_a_description_may_have_any_dollar_sign():
    """A server must not fail at startup because of a sentence about its interface."""
    sentence = "It costs 5 $ ($5, $$, ${x} or $nobody_knows) for $per_file_bytes bytes."

    @operation(summary="Try.", caller="anyone", details=sentence)
    async def attempt(_request: Request) -> Response:
        return Response()

    found = openapi.document([Route("/attempt", attempt)], LIMITS)

    shown = sentence.replace("$per_file_bytes", str(LIMITS.per_file_bytes))
    assert found["paths"]["/attempt"]["get"]["description"] == shown


@pytest.mark.anyio
async def test_the_document_is_served(site: Site):
    answer = await ask(site, "GET", "/openapi.json")

    assert answer.status == 200
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.json == DOCUMENT


@pytest.mark.anyio
async def test_the_page_loads_nothing_and_runs_nothing(site: Site):
    answer = await ask(site, "GET", "/docs")

    page = answer.body.decode()
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    assert style
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}';")
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert not re.search(r"<script|<link|<img|<iframe|\son\w+=|\sstyle=|@import|url\(", page)
    assert "//" not in re.sub(r"http://127\.0\.0\.1:8080", "", page)


def test_the_page_shows_every_operation_and_shape():
    page = Reader(rendered(DOCUMENT).html.decode())

    for name in OPERATIONS:
        assert name.endswith("_head") or name in page.anchors
    for name in DOCUMENT["components"]["schemas"]:
        assert f"shape-{name}" in page.anchors
    assert page.inner_links <= page.anchors
    assert page.open_tags == []


class Reader(HTMLParser):
    """Collects the anchors of a page and the links to them, and checks that tags are closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.inner_links: set[str] = set()
        self.open_tags: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in {"meta", "br", "wbr", "input"}:
            self.open_tags.append(tag)
        for name, value in attrs:
            if name == "id" and value:
                assert value not in self.anchors
                self.anchors.add(value)
            if name == "href" and value and value.startswith("#"):
                self.inner_links.add(value[1:])

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag


def test_descriptions_are_escaped_on_the_page():
    hostile = "<script>alert('`x`')</script>"
    document = DOCUMENT | {"info": DOCUMENT["info"] | {"description": hostile}}

    page = rendered(document).html.decode()

    assert "<script" not in page
    assert html.escape("<script>") in page


@pytest.mark.anyio
@pytest.mark.parametrize("query", ["since_secs=null", "source=null", "source=NULL", "wait=null"])
async def test_null_in_a_query_is_refused(site: Site, query: str):
    """A client with a bug must not get the whole feed because its filter was dropped."""
    workspace = await registered(site)

    answer = await workspace.ask("GET", f"/activity?{query}")

    assert (answer.status, answer.json["code"]) == (400, "bad_request")
    assert query.partition("=")[0] in answer.json["error"]


@pytest.mark.anyio
async def test_a_405_lists_every_method_of_the_path(site: Site):
    workspace = await registered(site)

    answer = await ask(site, "PUT", workspace.path)

    assert answer.status == 405
    assert answer.headers["Allow"] == "DELETE, PATCH"


@pytest.mark.parametrize("path", paths())
def test_the_guide_mentions_every_path(path: str):
    assert f"{path}`" in GUIDE or f"{path}?" in GUIDE


@pytest.mark.parametrize("code", codes())
def test_the_guide_says_what_to_do_about_every_code(code: str):
    rows = re.findall(rf"^\| `{code}` \| (\d+) \| (.+) \| (.+) \|$", GUIDE, re.MULTILINE)

    assert len(rows) == 1
    status, meaning, what_to_do = rows[0]
    assert meaning.strip()
    assert what_to_do.strip()
    expected = {error.code: str(found) for error, found in problems.STATUS.items()}
    assert status == expected.get(code, status)


@pytest.mark.parametrize(
    "header",
    [
        wire.LOWEST_SEQ,
        wire.LATEST_SEQ,
        wire.ACKED_SEQ,
        wire.IDEMPOTENCY_KEY,
        wire.CALLER_ID,
        "Last-Event-ID",
        "Repr-Digest",
        "ETag",
        "Retry-After",
        "X-Request-ID",
    ],
)
def test_the_guide_mentions_every_header(header: str):
    assert f"`{header}" in GUIDE
